"""Every public function with valid arguments, one of which ``test_wrong_values.py`` and
``hard/test_malformed_calls.py`` replace by a wrong value.

Left out are what the package makes and users only read (``Change``, ``Estimate``, ``Gpu``, ``MemoryReading``,
``PaddingReport``, ``Plan``) and exceptions: their methods that take arguments are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from bitsandbytes.nn import Linear4bit
from bitsandbytes.optim import AdamW8bit
from datasets import Dataset
from tables import tables
from tiny_plans import fitting_plan, missing_plan
from transformers import Trainer

import hf_memopt as m
import tiny

TABLES = tables(__file__)

__all__ = ["CALLS", "Call"]

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
LENGTHS = [3, 9, 4, 7, 5, 8, 12, 6]
TEXTS = Dataset.from_dict({"text": [f"w{length} w5" for length in LENGTHS]})
ROWS = [{"input_ids": [5] * length, "labels": length % 3} for length in LENGTHS]


@dataclass(frozen=True)
class Call:
    """A function, its valid arguments, and what is done with its result.

    Attributes:
        function: takes keyword arguments alone.
        valid: of them, made anew for each call in a new folder.
        use: what a user does with the result.
        also: other names by which messages may call an argument.
        skip: arguments that are not replaced, since any value is right.
        is_slow: whether a call that works takes more than a tenth of a second.
    """

    function: Callable[..., Any]
    valid: Callable[[Path], Mapping[str, Any]]
    use: Callable[[Any], object] = lambda found: None
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    is_slow: bool = False


def llama() -> Any:
    return tiny.llama(**SIZES)


def bert() -> Any:
    return tiny.bert(**SIZES)


@cache
def _tokenizer() -> Any:
    return tiny.tokenizer()


def _mixture() -> Any:
    sizes = {**SIZES, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def trainer(folder: Path, model: Any = None, **settings: Any) -> Trainer:
    args = tiny.arguments(folder, **{"max_steps": 1, "per_device_train_batch_size": 2, **settings})
    rows = [{"input_ids": [5, 6, 7], "labels": 1}] * 4
    return Trainer(bert() if model is None else model, args, train_dataset=rows, eval_dataset=rows)


def _stepped(callback: Any, **settings: Any) -> None:
    """Attach a callback to a Trainer, train a step and evaluate."""
    folder = settings.pop("folder")
    trained = m.attach(trainer(folder, **settings), callback)
    trained.train()
    trained.evaluate()


def _callback(kind: Any, valid: Mapping[str, Any], also: str = "", **settings: Any) -> Call:
    """Return the call that makes a callback, which is then trained with."""

    def made(*, folder: Path, **arguments: Any) -> None:
        _stepped(kind(**arguments), folder=folder, **settings)

    others = {name: (also,) for name in valid if also}
    return Call(made, lambda folder: {"folder": folder, **valid}, also=others, skip=("folder",), is_slow=True)


def _model_call(function: Any, model: Callable[[], Any], **valid: Any) -> Call:
    return Call(function, lambda folder: {"model": model(), **valid}, also={"model": ("lora_targets",)})


# ---- Methods, as functions


def _plan_method(name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return getattr(fitting_plan(), name)(**arguments)

    return call


@cache
def estimated() -> m.Estimate:
    return m.estimate(tiny.llama_config(**SIZES), batch_size=1, seq_len=8, gpu="RTX 3060 12GB")


def _read(sampler: Any) -> None:
    list(sampler)


def _sampler_method(name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> None:
        sampler = m.LengthBucketedBatchSampler(LENGTHS, batch_size=2)
        getattr(sampler, name)(**arguments)
        list(sampler)

    return call


def _picture(draw: Callable[..., Any]) -> Call:
    return Call(draw, lambda folder: {"path": folder / "a.svg"}, also={"path": ("plot=",)}, is_slow=True)


def _attached(**arguments: Any) -> None:
    m.attach(arguments["trainer"], arguments["callbacks"])


def _recipe(**values: Any) -> None:
    made = m.Recipe(**values)
    str(made), made.to_json(), made.step_settings(), made.callbacks()
    made.training_arguments("out", use_cpu=True)
    made.model_kwargs()


SETTINGS = {item.name: item.default for item in fields(m.types.StepSettings)}
RECIPE = {item.name: item.default for item in fields(m.Recipe) if item.name not in ("name", "purpose", "reasons")}

CALLS: dict[str, Call] = {
    # ---- Data
    "LengthBuckets": Call(
        m.types.LengthBuckets,
        lambda folder: {
            **{"lengths": LENGTHS, "batch_size": 2, "max_tokens": None, "n_buckets": "auto", "boundaries": None},
            **{"seed": 0, "world_size": 1, "pad_to_multiple_of": 8, "too_long": "error"},
        },
        lambda found: (found.plan(0), found.diagnostics()),
    ),
    "LengthBuckets of tokens": Call(
        m.types.LengthBuckets,
        lambda folder: {"lengths": LENGTHS, "max_tokens": 32, "boundaries": [8, 16], "too_long": "drop"},
        lambda found: found.plan(0),
    ),
    "LengthBuckets.plan": Call(m.types.LengthBuckets(LENGTHS, batch_size=2).plan, lambda folder: {"epoch": 0}),
    "LengthBucketedBatchSampler": Call(
        m.LengthBucketedBatchSampler,
        lambda folder: {"lengths": LENGTHS, "batch_size": 2, "seed": 0, "world_size": 1, "rank": None},
        _read,
    ),
    "LengthBucketedSampler": Call(
        m.LengthBucketedSampler,
        lambda folder: {"lengths": LENGTHS, "batch_size": 2, "seed": 0, "world_size": 2, "rank": None},
        _read,
    ),
    "set_epoch": Call(_sampler_method("set_epoch"), lambda folder: {"epoch": 1}),
    "state_dict": Call(_sampler_method("state_dict"), lambda folder: {"position": None}),
    "load_state_dict": Call(
        _sampler_method("load_state_dict"),
        lambda folder: {"state": m.LengthBucketedBatchSampler(LENGTHS, batch_size=2).state_dict()},
    ),
    "bucketed": Call(
        m.bucketed,
        lambda folder: {
            **{"dataset": ROWS, "batch_size": 2, "max_tokens": None, "n_buckets": "auto", "boundaries": None},
            **{"seed": 0, "lengths": LENGTHS, "column": "input_ids", "world_size": 1},
            **{"pad_to_multiple_of": 8, "too_long": "error"},
        },
        lambda found: [found[i] for i in range(len(found))],
    ),
    "packed": Call(
        m.packed,
        lambda folder: {
            **{"dataset": ROWS, "row_tokens": 64, "too_long": "split", "seed": 0, "lengths": LENGTHS},
            **{"column": "input_ids", "world_size": 1},
        },
        lambda found: [found[i] for i in range(len(found))],
    ),
    "sorted_by_length": Call(
        m.sorted_by_length,
        lambda folder: {"dataset": ROWS, "lengths": LENGTHS, "column": "input_ids", "restore_by_hand": True},
        lambda found: [found[i] for i in range(len(found))],
    ),
    "token_lengths": Call(m.token_lengths, lambda folder: {"dataset": ROWS, "column": "input_ids"}),
    "read_rows": Call(
        m.read_rows,
        lambda folder: {
            **{"dataset": TEXTS, "tokenizer": tiny.tokenizer(), "task": "causal-lm", "columns": {"text": "text"}},
            **{"max_length": 8, "prefix": ""},
        },
    ),
    "padding_report": Call(
        m.padding_report,
        lambda folder: {
            **{"lengths": LENGTHS, "batch_size": 2, "max_tokens": None, "max_length": 8, "pad_to_multiple_of": 8},
            **{"seed": 0, "unit": "tokens"},
        },
        lambda found: (str(found), found.as_dict(), found._repr_html_()),
    ),
    "PaddingReport.plot": _picture(lambda **arguments: m.padding_report(LENGTHS).plot(**arguments)),
    "BucketedCollator": Call(
        m.BucketedCollator,
        lambda folder: {
            **{"tokenizer": _tokenizer(), "model": llama(), "mlm_probability": None, "causal_lm": True},
            **{"pad_to_multiple_of": 8, "label_pad_token_id": -100, "position_ids": None, "inner": None},
        },
        lambda found: found([{"input_ids": [5, 6]}, {"input_ids": [7]}]),
    ),
    "BucketedCollator of masked texts": Call(
        m.BucketedCollator,
        lambda folder: {"tokenizer": _tokenizer(), "mlm_probability": 0.15},
        lambda found: found([{"input_ids": [5, 6]}, {"input_ids": [7]}]),
    ),
    "BucketedCollator of examples": Call(
        lambda features: m.BucketedCollator(_tokenizer())(features), lambda folder: {"features": ROWS}
    ),
    "SpeechCollator": Call(
        m.SpeechCollator,
        lambda folder: {"decoder_start_token_id": 9, "dtype": torch.float32},
        lambda found: found([{"input_features": [[0.0]], "labels": [9, 5]}]),
    ),
    # ---- Models and optimizers
    "checkpoint_layers": _model_call(m.techniques.checkpoint_layers, llama, policy="full", offload=False),
    "stream_layers": _model_call(
        m.stream_layers,
        lambda: tiny.llama(**{**SIZES, "num_hidden_layers": 3}),
        **{"prefetch": 1, "rows": None, "embeddings_on_host": False, "resident": 1, "device": "cpu"},
    ),
    "freeze": replace(
        _model_call(m.techniques.freeze, bert, patterns="embeddings"), also={"model": ("no parameter of Linear",)}
    ),
    "fuse_cross_entropy": _model_call(m.techniques.fuse_cross_entropy, llama, chunk_bytes=None),
    "tile_layers": _model_call(
        m.techniques.tile_layers, lambda: tiny.bert(**{**SIZES, "intermediate_size": 64}), tile_tokens=4
    ),
    "quantize_experts": _model_call(m.techniques.quantize_experts, _mixture, double_quant=True),
    "add_adapters": _model_call(m.add_adapters, llama, lora=2, lora_alpha=4, lora_targets=("q_proj",)),
    "prepare_quantized": _model_call(
        m.prepare_quantized, lambda: torch.nn.Sequential(torch.nn.Embedding(4, 64), Linear4bit(64, 64)).bfloat16()
    ),
    "sparse_tied_embedding": _model_call(
        m.techniques.sparse_tied_embedding, lambda: tiny.llama(**SIZES, tie_word_embeddings=True)
    ),
    "low_memory_optimizer": Call(
        m.low_memory_optimizer,
        lambda folder: {
            **{"optimizer": tiny.arguments(folder), "model": bert(), "max_tensor_norm": 1.0, "trust": False},
            **{"release": True, "rounding": "stochastic"},
        },
    ),
    "override_embedding_bits": Call(
        lambda model, optimizer, bits: m.techniques.override_embedding_bits(
            model, AdamW8bit(model.parameters()) if isinstance(optimizer, str) else optimizer, bits
        ),
        lambda folder: {"model": bert(), "optimizer": "its own", "bits": 32},
        also={"model": ("parameters",)},
        skip=("model",),
    ),
    # ---- The Trainer
    "attach": Call(_attached, lambda folder: {"trainer": trainer(folder), "callbacks": m.MicrobatchCallback()}),
    "CheckpointingCallback": _callback(m.CheckpointingCallback, {"policy": "full", "offload": False}),
    "StreamedLayersCallback": Call(
        m.StreamedLayersCallback,
        lambda folder: {"prefetch": 1, "rows": None, "embeddings_on_host": False, "resident": 1},
    ),
    "OptimizerStateOnHostCallback": Call(m.OptimizerStateOnHostCallback, lambda folder: {"chunk": "64MiB"}),
    "EmbeddingBitsCallback": _callback(m.EmbeddingBitsCallback, {"bits": 32}, optim="adamw_bnb_8bit"),
    "EvaluationGuardCallback": _callback(m.EvaluationGuardCallback, {"reduce": None, "card_budget": "64MiB"}),
    "FreezeCallback": _callback(m.FreezeCallback, {"patterns": "embeddings"}),
    "ExpertsConfig": Call(m.ExpertsConfig, lambda folder: {"load_in_4bit": True}),
    "TiledLayersCallback": Call(m.TiledLayersCallback, lambda folder: {"tile_tokens": 4}),
    "FusedCrossEntropyCallback": Call(m.FusedCrossEntropyCallback, lambda folder: {"chunk_bytes": None}),
    "MemoryReportCallback": _callback(m.MemoryReportCallback, {"plot": None, "report": True, "predict": False}),
    "MicrobatchCallback": _callback(m.MicrobatchCallback, {"max_tokens": 8, "max_examples": None}),
    "OverflowCallback": _callback(m.OverflowCallback, {"max_nonfinite_steps": 10, "max_in_a_row": 3}),
    "PrecisionCallback": _callback(m.PrecisionCallback, {"autocast_cache": "auto", "master_weights": True}),
    "ShardedCheckpointCallback": _callback(m.ShardedCheckpointCallback, {"max_shard_bytes": "1GB"}),
    # ---- Estimates
    "estimate": Call(
        m.estimate,
        lambda folder: {
            **{"model": tiny.llama_config(**SIZES), "batch_size": 1, "seq_len": 8, "recipe": None},
            **{"gpu": "RTX 3060 12GB", "task": None, "labels_length": None, "lengths": None},
        },
        lambda found: (str(found), found._repr_html_()),
        is_slow=True,
    ),
    "estimate of lengths": Call(
        m.estimate,
        lambda folder: {"model": tiny.llama_config(**SIZES), "batch_size": 1, "lengths": [8, 16], "gpu": None},
        is_slow=True,
    ),
    "estimate_from_arguments": Call(
        m.estimate_from_arguments,
        lambda folder: {
            **{"model": tiny.llama_config(**SIZES), "args": tiny.arguments(folder), "lengths": [8]},
            **{"gpu": "RTX 3060 12GB", "task": None, "labels_length": None},
        },
        also={"lengths": ("seq_len=",)},
        is_slow=True,
    ),
    "Estimate.plot": _picture(lambda **arguments: estimated().plot(**arguments)),
    "StepSettings": Call(m.types.StepSettings, lambda folder: SETTINGS),
    "StepSettings, estimated": Call(
        lambda **settings: m.estimate(tiny.llama_config(**SIZES), batch_size=1, seq_len=8, **settings),
        lambda folder: SETTINGS,
        also={"checkpointing": ("keywords must be strings",)},
        skip=("gradient_accumulation_steps", "optimizer_memory"),  # as many as asked for are simulated; a user's code
        is_slow=True,
    ),
    "find_gpu": Call(m.gpus.find_gpu, lambda folder: {"gpu": "T4"}),
    "custom_gpu": Call(
        m.gpus.custom_gpu,
        lambda folder: {"memory": "8GB", "compute_capability": "8.6", "name": "mine"},
        lambda found: m.estimate(tiny.llama_config(**SIZES), batch_size=1, seq_len=8, gpu=found).table(),
    ),
    "read_memory": Call(m.read_memory, lambda folder: {"device": "cpu"}),
    "print_gpu_utilization": Call(m.print_gpu_utilization, lambda folder: {"device": "cpu"}),
    "print_summary": Call(
        m.print_summary,
        lambda folder: {
            "result": transformers.trainer_utils.TrainOutput(1, 1.0, {"train_runtime": 1.0}),
            "device": "cpu",
        },
    ),
    # ---- Recipes and plans
    "recipe": Call(m.recipe, lambda folder: {"name": "4gb-gpu"}),
    "preset": Call(
        m.preset,
        lambda folder: {
            **{"name": "4gb-gpu", "output_dir": str(folder), "effective_batch_size": None, "use_cpu": True},
            **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
        },
        skip=("use_cpu",),
    ),
    "Recipe": Call(
        _recipe,
        lambda folder: {"name": "mine", "purpose": "a test", **RECIPE, "reasons": {}},
        skip=("optim",),  # TrainingArguments know more names than this package, and list them
    ),
    "Recipe.replace": Call(m.recipe("4gb-gpu").replace, lambda folder: {"lora": None, "reasons": {}}),
    "Recipe.from_json": Call(m.Recipe.from_json, lambda folder: {"text": m.recipe("cpu").to_json()}),
    "Recipe.reason_of": Call(m.recipe("cpu").reason_of, lambda folder: {"name": "optim"}),
    "Recipe.training_arguments": Call(
        lambda output_dir: m.recipe("cpu").training_arguments(output_dir, use_cpu=True),
        lambda folder: {"output_dir": str(folder)},
    ),
    "Recipe.model_kwargs": Call(m.recipe("cpu").model_kwargs, lambda folder: {"task": None}),
    "Recipe.collator": Call(m.recipe("cpu").collator, lambda folder: {"tokenizer": _tokenizer(), "causal_lm": False}),
    "Recipe.prepare_model": Call(m.recipe("cpu").replace(lora=4).prepare_model, lambda folder: {"model": llama()}),
    "plan": Call(
        m.plan,
        lambda folder: {
            **{"model": tiny.llama_config(**SIZES), "gpu": "RTX 3060 12GB", "budget": None, "lengths": None},
            **{"seq_len": 8, "effective_batch_size": 2, "goal": "speed", "method": "full", "allow": ()},
            "task": None,
        },
        lambda found: (str(found), found.to_json(), found._repr_html_()),
        is_slow=True,
    ),
    "Plan.write": Call(
        _plan_method("write"), lambda folder: {"directory": folder / "run", "force": False}, is_slow=True
    ),
    "Plan.report": Call(
        _plan_method("report"),
        lambda folder: {"path": folder / "a.html", "force": False},
        also={"path": ("report=",)},
        is_slow=True,
    ),
    "Plan.plot": _picture(_plan_method("plot")),
    "Plan.table": Call(_plan_method("table"), lambda folder: {"width": 80, "verbose": False}),
    "Plan.to_json": Call(lambda figures: missing_plan().to_json(figures=figures), lambda folder: {"figures": False}),
}

TAKE_ARRAYS = ("lengths", "boundaries", "dataset", "train_dataset", "features", "state", "text")

UNCALLED = TABLES["uncalled"]
"""Public names that no malformed argument can reach."""
