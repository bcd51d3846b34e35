"""What one of several processes holds: DDP's buckets, FSDP2's shards, and ZeRO by DeepSpeed's own formulas."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from hf_memopt import Estimate, NotEstimableError, Recipe, estimate
from tests.memory.small_configs import ODD_BERT, ODD_LLAMA, WIDE_LLAMA


def one_process(**changed: Any) -> Estimate:
    config = transformers.LlamaConfig(**ODD_LLAMA)
    return estimate(config, batch_size=2, seq_len=48, **{"precision": "fp32", "max_grad_norm": 0, **changed})


def test_ddp_holds_buckets_of_all_gradients_beside_them() -> None:
    alone, shared = one_process(), one_process(world_size=2, strategy="ddp")
    gradients_bytes = 4 * alone.trainable_parameters
    more_bytes = shared.peak_allocated_bytes - alone.peak_allocated_bytes
    assert gradients_bytes <= more_bytes <= gradients_bytes + 512  # a block of the allocator
    assert any(note.startswith("bytes of one of 2 GPUs, DDP;") for note in shared.notes)


def test_two_processes_hold_a_half_each_and_offload_nothing_of_it() -> None:
    alone, sharded = one_process(), one_process(world_size=2, strategy="fsdp2")
    offloaded = one_process(world_size=2, strategy="fsdp2", offload_params=True)
    for part in ("weights", "optimizer state"):
        assert sharded.components[part] == pytest.approx(alone.components[part] / 2, rel=0.02)
    assert offloaded.components["optimizer state"] == offloaded.components["gradients"] == 0
    assert offloaded.components["weights"] < 0.01 * alone.components["weights"]  # buffers
    assert offloaded.host_bytes == pytest.approx(8 * alone.trainable_parameters, rel=0.01)  # a half of 16
    assert sharded.parameters == alone.parameters
    assert sharded.trainable_parameters == alone.trainable_parameters


def test_a_recipes_accumulation_is_shared_by_the_processes() -> None:
    mine = Recipe("mine", "tests", effective_batch_size=32, per_device_train_batch_size=4)
    found = [one_process(recipe=mine, world_size=size).settings for size in (1, 2, 3, 8)]
    assert [settings.gradient_accumulation_steps for settings in found] == [8, 4, 3, 1]


def test_embeddings_inside_a_named_layer_are_a_note() -> None:
    sizes = {"batch_size": 1, "seq_len": 8, "world_size": 2, "strategy": "fsdp2"}
    found = estimate(transformers.BertConfig(**ODD_BERT), task="sequence-classification", **sizes)
    assert any("pass fsdp_config={'transformer_layer_cls_to_wrap': ['BertLayer']}" in note for note in found.notes)


def test_a_parameter_of_two_units_is_not_estimable() -> None:
    """As of BERT's head, whose bias is tied; FSDP2 raises at the first step."""
    config = transformers.BertConfig(**ODD_BERT)
    with pytest.raises(NotEstimableError, match=r"strategy='fsdp2' with cls\.predictions\.\S*bias, which is tied"):
        estimate(config, task="masked-lm", batch_size=1, seq_len=8, world_size=2, strategy="fsdp2")


SIZES = {**WIDE_LLAMA, "num_hidden_layers": 6}


def found(strategy: str, **changed: Any) -> Estimate:
    asked = {"precision": "bf16", "world_size": 2, "strategy": strategy, **changed}
    return estimate(transformers.LlamaConfig(**SIZES), batch_size=1, seq_len=8, gpu="RTX 3090", **asked)


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
    buckets = 2 * 50_000_000 * 2
    assert backward > buckets + shared.components["weights"]
    assert alone.components["temporaries"] < buckets


def test_accumulation_holds_what_is_added_beside_the_gradients() -> None:
    once, twice = found("zero2"), found("zero2", gradient_accumulation_steps=2)
    more = twice.peak_allocated_bytes - once.peak_allocated_bytes
    assert more == pytest.approx(once.components["gradients"], rel=0.05)


def test_the_estimate_says_that_it_is_computed_from_documentation() -> None:
    notes = found("zero3").notes
    assert any("computed from DeepSpeed's documentation and sources, and not measured" in note for note in notes)
    assert any(note.startswith("bytes of one of 2 GPUs, ZeRO-3;") for note in notes)
