"""Sharded steps: the prediction for one of two processes against torch's allocator in two processes of gloo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from host_semantics import HostSemantics
from recorded import replayed_peak
from sharded_ranks import batch, build
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from hf_memopt import StepSettings
from hf_memopt.binding.fused_loss import chunked_loss
from hf_memopt.memory.distributed import ZeroStep, bucket_bytes, shard_facts, sharded_step, zero_options
from hf_memopt.memory.distributed.zero import partition_facts
from hf_memopt.memory.distributed.zero_config import LIVE_ELEMENTS
from hf_memopt.memory.models import load_model
from hf_memopt.memory.optimizers import OptimizerMemory, ParameterFacts, parameter_facts
from hf_memopt.memory.recording.passes import autocast_dtype
from hf_memopt.memory.recording.step import record_step
from hf_memopt.memory.tracking import StorageTracker
from tests.memory.small_configs import ODD_BERT, ODD_LLAMA, WIDE_LLAMA
from two_ranks import run_pair

LLAMA = {"model": "LlamaForCausalLM", "config": "LlamaConfig", "size": ODD_LLAMA, "batch": (2, 48), "precision": "fp32"}
BERT = {
    "model": "BertForSequenceClassification",
    "config": "BertConfig",
    "size": ODD_BERT,
    "batch": (4, 64),
    "precision": "fp32",
    "layers": ["BertLayer"],
}
GPT2 = {
    "model": "GPT2LMHeadModel",  # its embeddings are tied
    "config": "GPT2Config",
    "size": {"vocab_size": 1999, "n_embd": 128, "n_layer": 3, "n_head": 4},
    "batch": (2, 48),
    "precision": "fp32",
}
EVEN = {**LLAMA, "size": {**LLAMA["size"], "vocab_size": 2000}}  # torch's CPU copies a gradient before it pads it
FUSED, FAST = {"chunk_bytes": 100_000}, "llama, fused and accumulation"
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, bf16": {**LLAMA, "precision": "bf16"},
    "llama, checkpointing": {**LLAMA, "checkpointing": True, "batch": (4, 96)},
    "llama, tied": {**LLAMA, "size": {**LLAMA["size"], "tie_word_embeddings": True}},
    "llama, accumulation": {**LLAMA, "accumulation": 3},
    "llama, frozen embeddings": {**LLAMA, "frozen": "embed_tokens"},
    "llama, LoRA": {**LLAMA, "precision": "bf16", "lora": 8, "batch": (4, 96)},
    "llama, fused": {**EVEN, **FUSED},
    "llama, bf16, fused": {**EVEN, **FUSED, "precision": "bf16"},
    "llama, LoRA, fused": {**LLAMA, **FUSED, "precision": "bf16", "lora": 8, "batch": (4, 96)},
    FAST: {**LLAMA, **FUSED, "batch": (3, 48), "accumulation": 2},
    "llama, bf16, fused, accumulation and checkpointing": {
        **{**LLAMA, **FUSED, "precision": "bf16", "batch": (4, 96)},
        **{"accumulation": 3, "checkpointing": True},
    },
    "bert": BERT,
    "bert, bf16": {**BERT, "precision": "bf16"},
    "gpt2": GPT2,
    "gpt2, fused": {**GPT2, **FUSED, "batch": (8, 96)},
}


@contextmanager
def products_of_the_cpu() -> Iterator[None]:
    """Let the fused loss cast the factors of its products in float32, as it does on a CPU, which has no such kernel."""

    def wide_product(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if one.itemsize > 2:
            return one @ other
        with torch._C.DisableTorchFunction():  # and with it the autocast of ``HostSemantics``
            return one.to(dtype) @ other.to(dtype)

    with mock.patch.object(chunked_loss, "wide_product", wide_product):
        yield


def predicted(case: dict[str, Any]) -> int:
    """Return the peak of a step with optimizer states, as the estimate's own parts find it, for kernels of the CPU."""
    settings = StepSettings(
        precision=case["precision"],
        world_size=2,
        strategy="fsdp2",
        gradient_accumulation_steps=case.get("accumulation", 1),
        optim="adamw_torch",
        max_grad_norm=0,
    )
    model = build(case, "meta")
    facts = shard_facts(parameter_facts(model), settings)
    tracker = StorageTracker(padding=False)
    semantics = HostSemantics(tracker=tracker, autocast=autocast_dtype(settings.precision))
    sharded = sharded_step(model, settings)
    assert sharded is not None
    with sharded.sharding(), products_of_the_cpu():
        inputs = batch(case, "meta")
        options = {"tracker": tracker, "semantics": semantics, "sharded": sharded}
        trace = record_step(model, inputs, settings, **options)
    state = tuple(fact.size_bytes for fact in facts for _ in range(2))  # AdamW's averages; it steps after the peak
    return replayed_peak(trace, settings, OptimizerMemory(state, 0, (), ()), 1)


@pytest.mark.parametrize("names", [(FAST,), pytest.param(tuple(set(CASES) - {FAST}), marks=pytest.mark.slow)])
def test_a_step_has_the_bytes_of_torchs_allocator_in_each_of_two_processes(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """The second process has less where a shard is padded: 0.02 % here.

    Measured in November 2026 with torch 2.13 and accelerate 1.15: within 0.03 %, but -0.11 % where checkpointing keeps
    the state of random numbers on the host, and -0.84 % of BERT in bf16, where oneDNN takes memory for itself.
    """
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps({name: CASES[name] for name in names}))
    program = str(Path(__file__).with_name("sharded_ranks.py"))
    ranks = run_pair(tmp_path, program, str(tmp_path), str(cases), timeout_seconds=120)
    for name in names:
        for first, later in (found[name] for found in ranks):
            assert first < later  # which has optimizer states
            assert predicted(CASES[name]) == pytest.approx(later, rel=0.01), name


def test_buckets_are_filled_from_the_last_parameter() -> None:
    """The first has 1 MiB, the others 25 MiB, and each ends with the parameter that fills it."""
    mib = 2**20
    facts = [ParameterFacts(str(index), (size * mib // 4,), 4, False) for index, size in enumerate((7, 20, 10, 2))]
    assert bucket_bytes(facts, StepSettings(world_size=2)) == (2 * mib, 30 * mib, 7 * mib)
    assert (
        bucket_bytes(facts, StepSettings()) == bucket_bytes(facts, StepSettings(world_size=2, strategy="fsdp2")) == ()
    )


def held(model: Any) -> list[Any]:
    """Return parameters and buffers of a model and the hooks on its modules."""
    return [
        {name: (id(one), one.untyped_storage().nbytes()) for name, one in model.named_parameters()},
        [name for name, _ in model.named_buffers()],
        [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()],
    ]


def test_a_model_is_as_before_its_sharded_recording() -> None:
    model = build(LLAMA, "meta")
    before = held(model)
    for strategy, precision in (("fsdp2", "bf16"), ("zero2", "fp16"), ("zero3", "fp16")):
        sharded = sharded_step(model, StepSettings(precision=precision, world_size=2, strategy=strategy))
        assert sharded is not None
        with sharded.sharding():
            shards = dict(model.named_parameters())
            assert {one.dtype.itemsize for one in shards.values()} == {2}
            if strategy == "fsdp2":
                assert {one.dtype for one in shards.values()} == {torch.bfloat16}
                table = shards["model.embed_tokens.weight"]
                assert (tuple(table.shape), table.untyped_storage().nbytes()) == ((1999, 128), 1000 * 128 * 4)
        assert held(model) == before


def test_what_stays_gathered_is_gathered_once_and_the_rest_again_for_the_backward_pass() -> None:
    model = build(LLAMA, "meta")
    sharded = sharded_step(model, StepSettings(precision="fp32", world_size=2, strategy="fsdp2"))
    once = 4 * 128 * (2000 + 1)  # the head, whose odd rows are padded, and the last norm
    layers = 4 * sum(one.numel() for one in model.model.layers.parameters())
    assert sharded.gathered_bytes == 2 * (layers + 4 * 128 * 2000) + once  # type: ignore[union-attr]


def config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**WIDE_LLAMA, num_hidden_layers=2)


class Filled(HfDeepSpeedConfig):
    """transformers' class without deepspeed, which makes it one of accelerate's alone."""

    is_auto = HfTrainerDeepSpeedConfig.is_auto
    fill_only = HfTrainerDeepSpeedConfig.fill_only
    fill_match = HfTrainerDeepSpeedConfig.fill_match
    trainer_config_finalize = HfTrainerDeepSpeedConfig.trainer_config_finalize
    mismatches: tuple[str, ...] = ()


@pytest.mark.parametrize("stage", [2, 3])
def test_the_configuration_and_the_estimate_have_the_same_sizes(stage: int) -> None:
    """What is "auto" transformers fills in from the hidden size."""
    read = Filled({"zero_optimization": zero_options(stage)})
    read.trainer_config_finalize(transformers.TrainingArguments(use_cpu=True), load_model(config()).model, 1)
    filled = read.config["zero_optimization"]
    sizes = ZeroStep(load_model(config()).model, StepSettings(world_size=2, strategy=f"zero{stage}"), None)
    assert filled["reduce_bucket_size"] == sizes.bucket
    if stage == 3:
        assert filled["stage3_param_persistence_threshold"] == sizes.persistent
        assert filled["stage3_max_live_parameters"] == filled["stage3_max_reuse_distance"] == LIVE_ELEMENTS


def test_stage_3_gathers_what_is_recomputed_once_more() -> None:
    model, plain = load_model(config()).model, StepSettings(world_size=2, strategy="zero3")
    once, again = (ZeroStep(model, step, None).gathered_bytes for step in (plain, plain.replace(checkpointing=True)))
    assert (once % 2, again) == (0, once * 3 // 2)


def test_groups_are_cut_whole_and_padded() -> None:
    facts = [ParameterFacts(name, (count,), 4, False, decays=name != "norm") for name, count in
             (("one", 5), ("two", 6), ("norm", 3))]  # fmt: skip
    parts = {
        strategy: [part.elements for part in partition_facts(facts, StepSettings(world_size=2, strategy=strategy))]
        for strategy in ("zero2", "zero3")
    }
    assert parts == {"zero2": [6, 2], "zero3": [3 + 3, 2]}
