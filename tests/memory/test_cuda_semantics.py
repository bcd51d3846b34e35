"""Activations that are offloaded: on the host in the forward pass, and back in the backward pass."""

from __future__ import annotations

import pytest
import torch
from blocks import empty as meta
from recorded import prepared, record

import tiny
from hf_memopt.types import StepSettings


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")], ids=["build for the CPU", "build for CUDA"])
def test_offloaded_activations_are_on_the_host_and_come_back_in_the_backward_pass(
    accelerator: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a build for CUDA names its accelerator on a machine without a GPU too, where save_on_cpu pins no memory
    monkeypatch.setattr("transformers.modeling_utils.get_current_accelerator", lambda: accelerator, raising=False)
    batch = {name: meta(2, 12, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    batch["labels"], steps = meta(2, dtype=torch.int64), {}
    for offload in (False, True):
        settings = StepSettings(precision="fp32", checkpointing={"offload": True} if offload else True)
        with torch.device("meta"):
            model = tiny.bert()
        if not hasattr(model, "activation_checkpointing_enable") and offload:
            pytest.skip("this version of transformers has no offload")
        steps[offload] = record(prepared(model, settings), batch, settings, "cuda")
    hidden = 2 * 12 * 32 * 4
    assert steps[False].host_bytes == 0
    assert steps[True].host_bytes >= 2 * hidden  # the input of each of 2 layers
    events = {offload: step.tracker.events for offload, step in steps.items()}
    border = {offload: step.micro_batches[0].forward_end for offload, step in steps.items()}
    alive = [sum((delta == hidden) - (delta == -hidden) for _, delta in events[o][: border[o]]) for o in (False, True)]
    assert alive[0] - alive[1] == 2
    copied = [sum(delta == hidden for _, delta in events[offload][border[offload] :]) for offload in (False, True)]
    assert copied[1] == copied[0] + 2  # back to the GPU
    assert all(step.tracker.ignored == set() for step in steps.values())  # nothing of the host is left
