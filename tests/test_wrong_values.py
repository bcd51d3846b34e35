"""A wrong value in any parameter of the public interface is refused by a message that names the parameter, or it works.

No message of numpy, torch or Python comes out of the middle of a function: each value is compared only where its type
is known.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.optim import Adam8bit
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hf_memopt
import tiny

LLAMA = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2}
LENGTHS = [3, 9, 4, 8] * 8


class Unprintable:
    """A user's object whose ``__repr__`` fails, as that of a half-built module does."""

    def __repr__(self) -> str:
        raise RuntimeError("no text for this object")


VALUES: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array([1, 2]),
    "scalar": lambda: torch.tensor(2),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "nan": lambda: float("nan"),
    "empty": lambda: "",
    "object": object,
    "dict": lambda: {"a": 1},
    "large": lambda: 10**30,
    "unprintable": Unprintable,
}
INTERNAL = re.compile(
    r"ambiguous|0-d|unhashable|\bbug\b|' object |no len\(\)|not subscriptable|not supported between|unsupported operand"
    r"|positional argument|no text for|not iterable|invalid literal|could not convert|must be real|be interpreted"
)


def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, max_grad_norm=0, report_to="none", max_steps=1)


def rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": [5] * length, "labels": [5] * length} for length in LENGTHS]


def trainer(folder: Path) -> Trainer:
    return Trainer(model(), arguments(folder), train_dataset=rows())


def calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return what is called, and its good arguments: those that it needs."""
    m = hf_memopt
    config = LlamaConfig(**LLAMA)
    cpu = m.recipe("cpu")
    buckets = m.LengthBuckets(LENGTHS, batch_size=2)
    sampler = m.LengthBucketedBatchSampler(LENGTHS, batch_size=2)
    report = m.padding_report(LENGTHS, batch_size=2)
    found = m.estimate(config, batch_size=1, seq_len=8, gpu="T4")
    planned = m.plan(config, gpu="T4", seq_len=8, method="full")
    return {
        "BucketedCollator": (m.BucketedCollator, {"tokenizer": tiny.tokenizer()}),
        "DynamicPaddingCollator": (m.DynamicPaddingCollator, {"tokenizer": tiny.tokenizer()}),
        "Change": (m.Change, {"name": "a", "old": 1, "new": 2, "reason": "b"}),
        "CheckpointingCallback": (m.CheckpointingCallback, {}),
        "EmbeddingBitsCallback": (m.EmbeddingBitsCallback, {}),
        "EvaluationGuardCallback": (m.EvaluationGuardCallback, {}),
        "FreezeCallback": (m.FreezeCallback, {"patterns": "*"}),
        "FusedCrossEntropyCallback": (m.FusedCrossEntropyCallback, {}),
        "GradualUnfreezeCallback": (m.GradualUnfreezeCallback, {"schedule": {0: "*"}}),
        "LeanCheckpointCallback": (m.LeanCheckpointCallback, {}),
        "LengthBucketedBatchSampler": (m.LengthBucketedBatchSampler, {"lengths": LENGTHS, "batch_size": 2}),
        "LengthBucketedBatchSampler.set_epoch": (sampler.set_epoch, {"epoch": 1}),
        "LengthBucketedBatchSampler.state_dict": (sampler.state_dict, {}),
        "LengthBucketedBatchSampler.load_state_dict": (sampler.load_state_dict, {"state": sampler.state_dict()}),
        "LengthBucketedSampler": (m.LengthBucketedSampler, {"lengths": LENGTHS, "batch_size": 2}),
        "LengthBuckets": (m.LengthBuckets, {"lengths": LENGTHS, "batch_size": 2}),
        "LengthBuckets.plan": (buckets.plan, {"epoch": 0}),
        "LengthBuckets.padding_efficiency": (buckets.padding_efficiency, {}),
        "LengthBuckets.diagnostics": (buckets.diagnostics, {}),
        "MemoryReportCallback": (m.MemoryReportCallback, {}),
        "MicrobatchCallback": (m.MicrobatchCallback, {}),
        "MissingExtraError": (m.MissingExtraError, {"package": "a", "extra": "b", "purpose": "c"}),
        "NotEstimableError": (m.NotEstimableError, {}),
        "OverflowCallback": (m.OverflowCallback, {}),
        "PaddingReport.plot": (report.plot, {"path": folder / "report.png"}),
        "Estimate.plot": (found.plot, {"path": folder / "estimate.png"}),
        "Plan.table": (planned.table, {}),
        "Plan.to_json": (planned.to_json, {}),
        "Plan.write": (planned.write, {"directory": folder / "plan", "force": True}),
        "Plan.plot": (planned.plot, {"path": folder / "plan.png"}),
        "PrecisionCallback": (m.PrecisionCallback, {}),
        "Recipe": (m.Recipe, {"name": "a", "purpose": "b"}),
        "Recipe.reason_of": (cpu.reason_of, {"name": "optim"}),
        "Recipe.changes": (cpu.changes, {}),
        "Recipe.training_arguments": (cpu.training_arguments, {"output_dir": str(folder)}),
        "Recipe.model_kwargs": (cpu.model_kwargs, {}),
        "Recipe.prepare_model": (cpu.prepare_model, {"model": model()}),
        "Recipe.collator": (cpu.collator, {"tokenizer": tiny.tokenizer()}),
        "Recipe.trainer": (
            cpu.trainer,
            {
                "model": model(),
                "train_dataset": rows(),
                "processing_class": tiny.tokenizer(),
                "training_arguments": {"use_cpu": True},
            },
        ),
        "Recipe.distributed": (m.recipe("24gb-gpu").distributed, {"world_size": 2}),
        "ShardedCheckpointCallback": (m.ShardedCheckpointCallback, {}),
        "StepSettings": (m.StepSettings, {}),
        "attach": (
            lambda trainer, callbacks: m.attach(trainer, callbacks),
            {"trainer": trainer(folder), "callbacks": m.FreezeCallback("*embed*")},
        ),
        "bucketed": (m.bucketed, {"dataset": rows(), "batch_size": 2}),
        "checkpoint_layers": (m.checkpoint_layers, {"model": model()}),
        "custom_gpu": (m.custom_gpu, {"memory": "8GB"}),
        "estimate": (m.estimate, {"model": config, "batch_size": 1, "seq_len": 8}),
        "estimate_from_arguments": (
            m.estimate_from_arguments,
            {"model": config, "args": arguments(folder), "lengths": 8},
        ),
        "exact_loss": (m.exact_loss, {"model": model()}),
        "find_gpu": (m.find_gpu, {"gpu": "T4"}),
        "freeze": (m.freeze, {"model": model(), "patterns": "*"}),
        "fuse_cross_entropy": (m.fuse_cross_entropy, {"model": model()}),
        "gradient_release": (m.gradient_release, {"optimizer_class": torch.optim.AdamW}),
        "override_embedding_bits": (
            m.override_embedding_bits,
            {"model": model(), "optimizer": Adam8bit(model().parameters())},
        ),
        "measure": (m.measure, {"trainer": trainer(folder), "steps": 1}),
        "padding_report": (m.padding_report, {"lengths": LENGTHS, "batch_size": 2}),
        "plan": (m.plan, {"model": config, "gpu": "T4", "seq_len": 8, "method": "full"}),
        "prepare_quantized": (m.prepare_quantized, {"model": model()}),
        "preset": (m.preset, {"name": "cpu", "output_dir": str(folder)}),
        "print_gpu_utilization": (m.print_gpu_utilization, {}),
        "print_summary": (m.print_summary, {"result": SimpleNamespace(metrics={"train_runtime": 1.0})}),
        "read_memory": (m.read_memory, {}),
        "recipe": (m.recipe, {"name": "cpu"}),
        "released_optimizer": (m.released_optimizer, {"args": arguments(folder), "model": model()}),
        "rounded_optimizer": (m.rounded_optimizer, {"args": arguments(folder), "model": model()}),
        "sixteen_bit_optimizer": (m.sixteen_bit_optimizer, {"optimizer_class": torch.optim.AdamW}),
        "sorted_by_length": (m.sorted_by_length, {"dataset": rows()}),
        "sparse_tied_embedding": (m.sparse_tied_embedding, {"model": model()}),
        "token_lengths": (m.token_lengths, {"dataset": rows()}),
    }


NOT_CALLED_BY_USERS = {"Estimate", "Gpu", "Measurement", "MemoryReading", "PaddingReport", "Plan"}  # results
WITHOUT_PARAMETERS = {"TiedEmbeddingCallback", "use_expandable_segments"}
WORKS_OTHERWISE = {
    ("Plan.write", "data", "empty"),  # the current folder
    ("measure", "force", "*"),  # trains
    *(("MissingExtraError", name, "unprintable") for name in ("package", "extra", "purpose")),  # the text of an error
}


def parameters(function: Callable[..., Any]) -> list[str]:
    if function is hf_memopt.NotEstimableError:
        return []
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    return calls(tmp_path_factory.mktemp("calls"))


def test_the_table_has_every_public_callable(table: dict[str, Any]) -> None:
    public = {name for name in hf_memopt.__all__ if callable(getattr(hf_memopt, name))}
    assert public == {name for name in table if "." not in name} | NOT_CALLED_BY_USERS | WITHOUT_PARAMETERS


@pytest.mark.parametrize("kind", VALUES)
def test_a_wrong_value_is_refused_by_the_name_of_its_parameter(
    kind: str, table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failures = []
    for called, (function, good) in table.items():
        for name in parameters(function):
            if {(called, name, kind), (called, name, "*")} & WORKS_OTHERWISE:
                continue
            problem = problem_of(partial(function, **{**good, name: VALUES[kind]()}), name)
            if problem:
                failures.append(f"{called}({name}=<{kind}>): {problem}")
    assert not failures, "\n".join(failures)


def problem_of(call: Callable[[], Any], name: str) -> str:
    """Return what is wrong with the refusal of a value; "" if the call works, or names the parameter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (ValueError, TypeError, FileNotFoundError, NotADirectoryError) as error:
        text = str(error)
        is_clear = re.search(rf"(?<!\w){name}\b|^a=1 is", text) and not INTERNAL.search(text)
        return "" if is_clear else f"{type(error).__name__}: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hf_memopt.find_gpu("0GB"),
            "gpu='0GB' is too little for a GPU; expected 1.0 MiB to 1048576.00 GiB. Pass gpu='4GiB'.",
        ),
        (
            lambda: hf_memopt.custom_gpu("0GB"),
            "memory='0GB' is too little for a GPU; expected 1.0 MiB to 1048576.00 GiB. Pass memory='4GiB'.",
        ),
        (
            lambda: hf_memopt.EvaluationGuardCallback(card_budget="much"),
            "card_budget='much' is not an amount of memory; expected a number with one of the units B, KB, MB, GB, TB, "
            "KiB, MiB, GiB, TiB. Write, for example, '4GB' or '3.5GiB'.",
        ),
        (
            lambda: hf_memopt.EvaluationGuardCallback(card_budget=-1),
            "card_budget=-1 is negative; expected 0 bytes or more. Write, for example, '4GB'.",
        ),
        (
            lambda: hf_memopt.estimate(LlamaConfig(**LLAMA), task=np.array([1, 2])),
            "task=array([1, 2]) is unknown; expected one of 'speech-seq2seq', 'seq2seq', 'causal-lm', 'masked-lm', "
            "'sequence-classification', 'token-classification', 'question-answering', 'multiple-choice', "
            "'image-classification'. Pass task='sequence-classification'",
        ),
        (
            lambda: hf_memopt.gradient_release(torch.optim.AdamW, trust=np.array([1, 2])),
            "trust=array([1, 2]) is invalid; expected True or False. Pass trust=False",
        ),
        (
            lambda: hf_memopt.freeze(model(), torch.tensor(2)),
            "patterns=tensor(2) is not text; expected one pattern or several. Write, for example, "
            "patterns=['embeddings', 'layers:0-3'].",
        ),
        (
            lambda: hf_memopt.gradient_release(Unprintable()),
            "optimizer_class=<Unprintable> is not a class of optimizers; expected a subclass of torch.optim.Optimizer. "
            "Call gradient_release(torch.optim.AdamW).",
        ),
    ],
    ids=range(8),
)
def test_whole_messages(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert str(error.value) == message
