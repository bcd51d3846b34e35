"""ZeRO's share of a process, against the formulas that DeepSpeed itself has for weights, gradients and states."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from hf_memopt import Estimate, StepSettings, estimate
from hf_memopt.memory.distributed import ZeroStep, sharded_step, zero_options
from hf_memopt.memory.distributed.zero import partition_facts
from hf_memopt.memory.distributed.zero_config import BUCKET_ELEMENTS, LIVE_ELEMENTS
from hf_memopt.memory.models import load_model
from hf_memopt.memory.optimizers import ParameterFacts

SIZES = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**SIZES)


def found(strategy: str, **changed: Any) -> Estimate:
    asked = {"precision": "bf16", "world_size": 2, "strategy": strategy, **changed}
    return estimate(config(), batch_size=1, seq_len=8, gpu="RTX 3090", **asked)


def reference_zero2(parameters: int, processes: int, *, offload: bool) -> int:
    """Return the bytes on a GPU: deepspeed 0.19.6, ``estimate_zero2_model_states_mem_needs``.

    16-bit weights; then, cut, gradients of 2 and 4 bytes, a float32 copy and two averages.
    """
    return 2 * parameters + (0 if offload else 18 * parameters // processes)


def reference_zero3(parameters: int, processes: int) -> int:
    """Return the same of stage 3 without offload, ``estimate_zero3_model_states_mem_needs`` but for the gathered layer.

    It leaves out the 16-bit gradients, which ``grad_partitions_flat_buffer`` holds.
    """
    return 18 * parameters // processes + 2 * parameters // processes


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_states_are_those_of_deepspeeds_own_formula(strategy: str, processes: int) -> None:
    """What is held between steps; float32 gradients are there while the optimizer steps, with a copy in 16 bits."""
    one = found(strategy, world_size=processes)
    count = one.parameters
    if strategy == "zero2":
        whole = reference_zero2(count, processes, offload=False)
        more = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]  # a gradient that two processes keep
    else:
        whole = reference_zero3(count, processes)
        more = 2 * (2 * SIZES["num_hidden_layers"] + 1) * SIZES["hidden_size"]  # norms, which stay whole
    more += 2 * 2**20  # the allocator does not split off less than that of a block
    held = sum(one.components[part] for part in ("weights", "gradients", "optimizer state"))
    expected = whole - 4 * count // processes
    assert expected <= held <= 1.001 * expected + more
    stepping = one.phases["optimizer"].allocated_bytes - one.components["workspace"]
    assert whole + 2 * count // processes <= stepping <= 1.02 * (whole + 2 * count // processes) + more


def test_offload_leaves_the_weights_of_stage_2_and_gathered_ones_of_stage_3() -> None:
    second, third = found("zero2", offload_params=True), found("zero3", offload_params=True)
    largest = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    expected = reference_zero2(second.parameters, 2, offload=True) + largest  # on its way to the host
    assert second.components["weights"] == pytest.approx(expected, rel=0.01)
    assert third.components["weights"] < 0.02 * expected
    for one in (second, third):
        assert one.components["optimizer state"] == one.components["gradients"] == 0
        assert one.host_bytes == pytest.approx(16 * one.parameters / 2, rel=0.01)  # copies, gradients, two averages


def test_buckets_are_held_while_gradients_are_reduced() -> None:
    alone, shared = found("zero2", world_size=1), found("zero2")
    backward = shared.phases["backward"].allocated_bytes
    buckets = 2 * BUCKET_ELEMENTS * 2
    assert backward > buckets + shared.components["weights"]
    assert alone.components["temporaries"] < buckets


def test_accumulation_holds_what_is_added_beside_the_gradients() -> None:
    once, twice = found("zero2"), found("zero2", gradient_accumulation_steps=2)
    more = twice.peak_allocated_bytes - once.peak_allocated_bytes
    assert more == pytest.approx(once.components["gradients"], rel=0.05)


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


def test_groups_are_cut_whole_and_padded() -> None:
    facts = [ParameterFacts(name, (count,), 4, False, decays=name != "norm") for name, count in
             (("one", 5), ("two", 6), ("norm", 3))]  # fmt: skip
    parts = {
        strategy: [part.elements for part in partition_facts(facts, StepSettings(world_size=2, strategy=strategy))]
        for strategy in ("zero2", "zero3")
    }
    assert parts == {"zero2": [6, 2], "zero3": [3 + 3, 2]}


def test_a_model_is_as_before_its_recording() -> None:
    model = load_model(config()).model
    before = {name: (id(one), one.untyped_storage().nbytes()) for name, one in model.named_parameters()}
    buffers = dict(model.named_buffers())
    for strategy in ("zero2", "zero3"):
        step = sharded_step(model, StepSettings(precision="fp16", world_size=2, strategy=strategy))
        assert step is not None
        with step.sharding():
            assert {one.dtype.itemsize for one in model.parameters()} == {2}
    assert {name: (id(one), one.untyped_storage().nbytes()) for name, one in model.named_parameters()} == before
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_the_estimate_says_that_it_is_computed_from_documentation() -> None:
    notes = found("zero3").notes
    assert any("computed from DeepSpeed's documentation and sources, and not measured" in note for note in notes)
    assert any(note.startswith("bytes of one of 2 GPUs, ZeRO-3;") for note in notes)
