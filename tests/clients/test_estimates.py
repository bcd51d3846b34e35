"""The estimate of each trainer of TRL: what a run on the host takes, or refused by name.

The host has no Triton, so TRL's kernels do nothing in the run either, and the tiles are those of a GPU: the losses are
none, the memory is what would be.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from host_semantics import HostSemantics
from peft import LoraConfig
from recorded import allocator_peak, replayed_peak
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import tiny
import trl_clients
from client import arguments
from hf_memopt import estimate
from hf_memopt.prediction.memory import estimate_of
from hf_memopt.prediction.memory.cuda import CudaSemantics
from hf_memopt.prediction.memory.models import example_batch, load_model
from hf_memopt.prediction.memory.optimizers import optimizer_memory, parameter_facts
from hf_memopt.prediction.memory.recording import trainer_loss
from hf_memopt.prediction.memory.recording.step import record_step
from hf_memopt.prediction.memory.recording.trainer_loss import _head_of_a_gpu
from hf_memopt.prediction.memory.settings import BatchShape, NotEstimableError
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.prediction.recipes.running.script import Running
from hf_memopt.training.binding import checkpointing_of, enable_checkpointing
from hf_memopt.types import StepSettings

EXAMPLES, LENGTH = 4, 32  # of a batch, and the tokens of each
SMALL = {"vocab_size": 40_000, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}


def llama(kind: type[Any] = transformers.LlamaForCausalLM, **more: Any) -> Any:
    """Return a Llama whose head is wider than a tile of TRL's."""
    torch.manual_seed(0)
    return kind(tiny.llama_config(**SMALL, **HEADS, max_position_embeddings=128, **more))


def ids(length: int, seed: int = 0) -> list[list[int]]:
    """Return rows of one length, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 100, (16, length), generator=generator).tolist()


def texts(length: int, seed: int = 0, start: str = "") -> list[str]:
    """Return texts of so many tokens."""
    return [start + " ".join(f"w{number - 5}" for number in row) for row in ids(length, seed)]


def made(kind: type[Any], config: type[Any], model: Any, data: dict[str, Any], folder: Path, **settings: Any) -> Any:
    """Return a trainer of two steps; the settings that are not of its arguments are its own."""
    own = {name: settings.pop(name) for name in ("ref_model", "peft_config") if name in settings}
    given = {"max_steps": 2, "max_length": LENGTH, "gradient_checkpointing": False, **settings}
    args = arguments(folder, config, **given)
    rows = Dataset.from_dict(data)
    return kind(model=model, args=args, train_dataset=rows, processing_class=trl_clients.tokenizer(), **own)


def sft(folder: Path, data: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Supervised fine-tuning."""
    return made(SFTTrainer, SFTConfig, llama(), data or {"input_ids": ids(LENGTH)}, folder, **settings)


def dpo(folder: Path, **settings: Any) -> Any:
    """Preferences; a prompt of one token, so that nearly all are those of an answer."""
    answers = {name: texts(LENGTH - 2, seed, " ") for seed, name in enumerate(("chosen", "rejected"))}
    return made(DPOTrainer, DPOConfig, llama(), {"prompt": texts(1), **answers}, folder, **settings)


def reward(folder: Path, **settings: Any) -> Any:
    """A reward model."""
    answers = {name: texts(LENGTH - 1, seed) for seed, name in enumerate(("chosen", "rejected"))}
    model = llama(transformers.LlamaForSequenceClassification, num_labels=1)
    return made(RewardTrainer, RewardConfig, model, answers, folder, **settings)


def adapters() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


COMPLETIONS = {"prompt": texts(2), "completion": texts(LENGTH - 3, 1, " ")}
BUILT: dict[str, Callable[..., Any]] = {
    "TRL SFT": sft,
    "TRL SFT, packing": partial(sft, data={"text": texts(LENGTH // 2 - 1)}, packing=True),
    "TRL SFT, prompt and completion": partial(sft, data=COMPLETIONS),
    "TRL SFT, padding-free": partial(sft, padding_free=True, max_length=None),
    "TRL SFT, LoRA": partial(sft, peft_config=adapters()),
    "TRL SFT, dft loss": partial(sft, loss_type="dft"),
    "TRL SFT, smoothed labels": partial(sft, label_smoothing_factor=0.1),
    "TRL SFT, accumulation": partial(sft, gradient_accumulation_steps=2),
    "TRL SFT, checkpointing, bf16": partial(sft, gradient_checkpointing=True, bf16=True),
    "TRL DPO": lambda folder: dpo(folder, ref_model=llama()),
    "TRL DPO, checkpointing, bf16": lambda folder: dpo(
        folder, ref_model=llama(), gradient_checkpointing=True, bf16=True
    ),
    "TRL DPO, LoRA": partial(dpo, peft_config=adapters()),
    "TRL DPO, LoRA, checkpointing": partial(dpo, peft_config=adapters(), gradient_checkpointing=True),
    "TRL DPO, precomputed": partial(dpo, precompute_ref_log_probs=True),
    "TRL Reward": reward,
    "TRL Reward, accumulation": partial(reward, gradient_accumulation_steps=2),
}
FEWER = {"TRL SFT, packing": 0.04, "TRL SFT, prompt and completion": 0.06, "TRL SFT, padding-free": 0.01}
"""By how much a run takes less, of whose positions some have no label; of all others every one counts."""
REFUSED = ("TRL KTO", "TRL GRPO", "TRL RLOO", "TRL Distillation")


class Bf16OnTheHost(HostSemantics):
    """The host's kernels, and the flags of autocast that TRL's head reads."""

    _enable_torchs_autocast = CudaSemantics._enable_torchs_autocast


def simulated(trainer: Any) -> int:
    """Return the peak of the estimator's parts with the CPU's kernels and allocator."""
    loaded, loss, args = load_model(trainer.model).model, trainer_loss(trainer), trainer.args
    assert loss is not None
    is_checkpointing = checkpointing_of(args)[0]
    step = StepSettings(
        precision="bf16" if args.bf16 else "fp32",
        optim="sgd",
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        prepare=(loss,),
    )
    if is_checkpointing:
        enable_checkpointing(loaded, {"use_reentrant": False})
    batch = loss.batch(example_batch(loaded, batch_size=EXAMPLES * loss.rows, seq_len=LENGTH))
    tracker = StorageTracker()
    semantics = Bf16OnTheHost(autocast=torch.bfloat16 if args.bf16 else None, tracker=tracker)
    trace = record_step(loaded, batch, step, tracker=tracker, semantics=semantics)
    return replayed_peak(trace, step, optimizer_memory(parameter_facts(loaded), step))


def measured(trainer: Any) -> int:
    """Return the peak of a run, beside the models that are there before."""
    trainer.args.max_grad_norm = 0.0
    trainer.create_optimizer()
    held = [one for one in (trainer.model, getattr(trainer, "ref_model", None)) if one is not None]
    changes = [*_head_of_a_gpu()]
    try:
        with allocator_peak(*held) as peak:
            trainer.train()
    finally:
        for change in reversed(changes):
            change.remove()
    return peak[0]


def test_every_trainer_of_trl_is_a_row() -> None:
    assert {*trl_clients.CLIENTS} <= {*BUILT, *REFUSED}


@pytest.mark.parametrize("name", BUILT)
def test_a_run_takes_what_was_simulated(name: str, tmp_path: Path) -> None:
    trainer = BUILT[name](tmp_path)
    found = simulated(trainer)
    less = FEWER.get(name, 0.0)
    # a real step has numbers of the loss and of the metrics besides
    assert found * (0.9995 - less) <= measured(trainer) <= found * 1.0005


@pytest.mark.parametrize("name", BUILT)
def test_an_estimate_is_of_examples_and_changes_nothing(name: str, tmp_path: Path) -> None:
    trainer = BUILT[name](tmp_path)
    changed = vars(trainer.model), vars(import_module("trl.kernels.chunked_logprob")), vars(trainer)
    before = [dict(one) for one in changed]
    rows = EXAMPLES * (1 if "SFT" in name else 2)
    found = estimate_of(trainer, BatchShape(rows, LENGTH, None, None), gpu="RTX 3060 12GB")
    assert (found.batch_size, found.seq_len, found.gpu and found.gpu.name) == (EXAMPLES, LENGTH, "RTX 3060 12GB")
    held = [one for one in (trainer.model, getattr(trainer, "ref_model", None)) if one is not None]
    needed = sum(weight.nbytes for one in held for weight in one.parameters())
    assert needed <= found.components["weights"] < needed * 1.03  # and what blocks are rounded up to
    assert before == [dict(one) for one in changed]


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_its_completions_is_refused_by_name(name: str, tmp_path: Path) -> None:
    trainer = trl_clients.CLIENTS[name].build(tmp_path, lambda dataset: dataset)
    kind = type(trainer).__name__
    with pytest.raises(NotEstimableError) as error:
        estimate_of(trainer, BatchShape(8, LENGTH, None, None))
    assert str(error.value) == (
        f"not estimable: trainer=<{kind}> trains on completions that it generates or pairs anew, which is not "
        "simulated; expected SFTTrainer, DPOTrainer, RewardTrainer without FSDP. Measure a few steps: "
        f"{kind}(..., callbacks=[MemoryReportCallback()])"
    )


def test_the_head_of_trl_is_the_one_that_was_read() -> None:
    """The names that an estimate exchanges, and that the kernels write to what is there."""
    kernels, utils = import_module("trl.kernels.chunked_logprob"), import_module("trl.trainer.utils")
    assert utils._use_triton is kernels._use_triton
    assert utils._ChunkedLogProbFunction is kernels.ChunkedLogProbFunction
    source = inspect.getsource(kernels.ChunkedLogProbFunction)
    assert "fold = _forward_kernel[(n,)] if _use_triton(device) else _forward_tile" in source
    assert "_backward_kernel[(n, triton.cdiv(end - start, _BLOCK_SIZE))]" in source
    assert source.count("_addmm_fp32(") == 2
    assert "torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)" in inspect.getsource(kernels._addmm_fp32)


def test_a_training_in_another_thread_keeps_its_kernels() -> None:
    kernels = import_module("trl.kernels.chunked_logprob")
    found: list[Any] = []
    changes = [*_head_of_a_gpu()]
    try:
        thread = threading.Thread(target=lambda: found.append(kernels._use_triton(torch.device("cpu"))))
        thread.start()
        thread.join()
        found.append(kernels._use_triton(torch.device("cpu")))
    finally:
        for change in changes:
            change.remove()
    assert found == [False, True]


def test_a_model_with_trls_head_is_estimated_as_without(tmp_path: Path) -> None:
    options = {"batch_size": EXAMPLES, "seq_len": LENGTH, "gpu": "T4"}
    patched = estimate(sft(tmp_path).model, **options)
    plain = estimate(llama(), **options)
    assert (patched.components, patched.flops, patched.notes) == (plain.components, plain.flops, plain.notes)


def test_an_evaluation_for_metrics_has_the_logits_of_another_pass(tmp_path: Path) -> None:
    found = {}
    for metrics in (None, lambda prediction: {}):
        rows = Dataset.from_dict({"input_ids": ids(LENGTH)})
        trainer = SFTTrainer(
            model=llama(),
            args=arguments(tmp_path, SFTConfig, eval_strategy="epoch", max_length=LENGTH),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=trl_clients.tokenizer(),
            compute_metrics=metrics,
        )
        phases = estimate_of(trainer, BatchShape(EXAMPLES, LENGTH, None, None), gpu="T4").phases
        found[metrics is None] = phases["evaluation"].allocated_bytes
    logits = EXAMPLES * LENGTH * SMALL["vocab_size"] * 4
    assert found[False] - found[True] >= logits / 8


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("TRL SFT", "4 examples of 21 tokens need "),
        ("TRL DPO", "8 examples of 23 tokens need "),
        ("TRL Reward", "8 examples of 20 tokens need "),
        ("TRL GRPO", "not predicted: NotEstimableError: not estimable: trainer=<GRPOTrainer> trains on completions"),
    ],
)
def test_run_predicts_a_trainer_of_trl(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers.Trainer, "train", transformers.Trainer.train)  # put back afterwards
    options = {"gpu": "T4", "apply": None, "allow": (), "repair": None, "is_module": True}
    Running("train.py", options).change(transformers.Trainer)
    trl_clients.CLIENTS[name].build(tmp_path, lambda dataset: dataset).train()
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("[memopt] ")]
    assert said[0].startswith(f"[memopt] {line}")
    assert ("GRPO" in name) or said[0].endswith(" of 14.56 GiB on T4: fits")
