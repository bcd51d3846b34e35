"""What operations return on meta and what a second pass does is not computed again: a recording is as if it was."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from slow_cases import slow_except
from torch.utils.flop_counter import flop_registry

from hf_memopt import estimate
from hf_memopt.prediction.memory.recording import step
from hf_memopt.prediction.memory.recording.passes import second_pass
from hf_memopt.prediction.memory.recording.sessions import Session
from hf_memopt.prediction.memory.tracking import meta_outputs, storage_tracker
from tests.memory.small_configs import CONFIGS


def run_anew(func: Any, args: Any, kwargs: Any, flops: bool = True) -> tuple[Any, int, None]:
    """Run an operation without the memory."""
    out = func(*args, **kwargs)
    formula = flop_registry.get(func._overloadpacket) if flops else None
    return out, formula(*args, **kwargs, out_val=out) if formula else 0, None


def estimated(name: str, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a new recording of a model gives an estimate."""
    Session.traces.clear()
    found = estimate(CONFIGS[name](), batch_size=2, seq_len=None if name == "vit" else 24, gpu="A100 80GB", **settings)
    return found.to_json(), found.timeline.components.tolist(), found.timeline.reserved.tolist(), found.step_costs


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    meta_outputs._remembered.clear()


@pytest.mark.parametrize("precision", slow_except(("bf16",), ("bf16", "fp32")))
@pytest.mark.parametrize("name", slow_except(("vit",), CONFIGS))
def test_a_recording_with_the_memory_is_one_without(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"precision": precision, "checkpointing": True, "gradient_accumulation_steps": 2, "eval_batch_size": 2}
    found = [estimated(name, settings) for _ in range(2)]
    monkeypatch.setattr(storage_tracker, "run_on_meta", run_anew)
    assert found == [estimated(name, settings)] * 2


def keeps_a_tensor(model: Any) -> None:
    """Let the first pass fill a cache."""
    cache: list[Any] = []
    model.register_forward_hook(lambda module, given, out: None if cache else cache.append(out["loss"].detach() * 2))


SECOND: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "checkpointing": True, "eval_batch_size": 2},
    "fp16, LoRA": {"precision": "fp16", "lora": 4},
    "fp32, cut": {"precision": "fp32", "micro_batch_size": 1, "gradient_accumulation_steps": 1},
    "a cache": {"precision": "fp32", "prepare": (keeps_a_tensor,)},
}
"""Settings of steps with two passes, by what they are about; with the last, the second does something else."""
QUICK = (("gpt2", "bf16"), ("gpt2", "a cache"))


@pytest.mark.parametrize(("name", "settings"), slow_except(QUICK, product(CONFIGS, SECOND)))
def test_the_second_pass_that_is_made_of_the_first_is_the_one_that_runs(
    name: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def noted(*args: Any) -> Any:
        found = second_pass(*args)
        made.append(found is not None)
        return found

    asked = {"gradient_accumulation_steps": 2, **SECOND[settings]}
    monkeypatch.setattr(step, "second_pass", noted)
    found = estimated(name, asked)
    if name == "gpt2" or settings == "a cache":  # of others autograd copies some gradients, or adds up several
        assert made == [settings != "a cache"]
    monkeypatch.setattr(step, "second_pass", lambda *_: None)
    assert found[1:] == estimated(name, asked)[1:]  # seconds are sums of the costs, in another order
