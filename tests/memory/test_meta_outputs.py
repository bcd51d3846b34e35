"""What operations return on meta and what a second pass does is not computed again: a recording is as if it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocks import empty as meta
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from hf_memopt import estimate
from hf_memopt.memory.recording import step
from hf_memopt.memory.recording.passes import second_pass
from hf_memopt.memory.recording.sessions import Session
from hf_memopt.memory.recording.step import recording
from hf_memopt.memory.tracking import StorageTracker, meta_outputs, storage_tracker
from hf_memopt.memory.tracking.meta_outputs import run_on_meta
from tests.memory.small_configs import CONFIGS

aten = torch.ops.aten


def run_anew(func: Any, args: Any, kwargs: Any, flops: bool = True) -> tuple[Any, int, None]:
    """Run an operation without the memory."""
    out = func(*args, **kwargs)
    formula = flop_registry.get(func._overloadpacket) if flops else None
    return out, formula(*args, **kwargs, out_val=out) if formula else 0, None


def facts(out: Any) -> Any:
    return [(one.shape, one.stride(), one.dtype, one.device) for one in (out if isinstance(out, tuple) else (out,))]


def estimated(name: str, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a new recording of a model gives an estimate."""
    Session.traces.clear()
    found = estimate(CONFIGS[name](), batch_size=2, seq_len=None if name == "vit" else 24, gpu="A100 80GB", **settings)
    return found.to_json(), found.timeline.components.tolist(), found.timeline.reserved.tolist(), found.step_costs


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    meta_outputs._remembered.clear()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "bert")]
)
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


@pytest.mark.parametrize("settings", SECOND)
@pytest.mark.parametrize("name", CONFIGS)
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


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "product": (aten.mm.default, (meta(4, 8), meta(8, 3)), {}),
    "several results": (aten.native_layer_norm.default, (meta(2, 3, 8), [8], meta(8), meta(8), 1e-5), {}),
    "a missing result": (
        aten.native_layer_norm_backward.default,
        (meta(2, 8), meta(2, 8), [8], meta(2, 1), meta(2, 1), meta(8), None, [True, True, False]),
        {},
    ),
    "numbers among the results": (
        aten._scaled_dot_product_flash_attention.default,
        tuple(meta(1, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3)),
        {},
    ),
    "strides": (aten.add.Tensor, (meta(4, 6).t(), meta(4, 6).t()), {}),
    "options": (aten._to_copy.default, (meta(4, 6),), {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_from_memory_is_as_the_first(name: str) -> None:
    func, args, kwargs = CALLS[name]
    expected, flops, _ = run_anew(func, args, kwargs)
    for _ in range(2):
        found, counted, _ = run_on_meta(func, args, kwargs)
        for one, other in zip(*((out if isinstance(out, tuple) else (out,)) for out in (found, expected)), strict=True):
            assert (one is None) == (other is None)
            assert one == other if isinstance(one, int) else one is None or facts(one) == facts(other)
        assert counted == flops
    assert len(meta_outputs._remembered) == 1


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, (meta(4, 6), [24])),
        (aten._unsafe_view.default, (meta(4, 6), [24])),  # its schema does not say that it returns a view
        (aten.unsqueeze_.default, (meta(4, 6), 0)),
        (aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))),
        (aten.index.Tensor, (meta(4, 6), [None, torch.tensor([1])])),
    ],
)
def test_views_changes_and_real_tensors_are_not_remembered(func: Any, args: tuple[Any, ...]) -> None:
    for _ in range(2):
        out, _, kept = run_on_meta(func, args, {})
        assert kept is None
        shared = out.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        expected = func(*args)
        assert shared == (expected.untyped_storage()._cdata == args[0].untyped_storage()._cdata)
    assert not meta_outputs._remembered


def test_what_works_in_place_returns_its_first_argument() -> None:
    x, y = meta(4, 6), meta(6)
    for _ in range(2):
        assert run_on_meta(aten.clamp_.default, (x, 0, 3), {})[0] is x
        assert run_on_meta(aten.add_.Tensor, (x, y), {})[0] is x
        with pytest.raises(RuntimeError):
            run_on_meta(aten.add_.Tensor, (y, x), {})
    assert len(meta_outputs._remembered) == 2


def test_what_is_kept_beside_a_result_is_that_of_equal_arguments() -> None:
    """A tensor that is given twice is read once; where in its storage a tensor begins changes nothing; 1 is not 1.0."""
    x, y, large = meta(4, 6), meta(4, 6), meta(8, 6)
    equal = ((x, y), (y, x), (large[:4], large[4:]))
    calls = (*equal, (x, x), (x, 2), (x, 2.0), (x, True), (x.long(), 2), (meta(6, 4).t(), y))
    found = [run_on_meta(aten.mul.Tensor, args, {})[2] for args in calls]
    assert found[0] is not None
    assert [one is found[0] for one in found] == [True] * 3 + [False] * 6
    assert len({id(one) for one in found}) == 7


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_outputs, "_MOST_REMEMBERED", 3)
    for size in range(1, 9):
        run_on_meta(aten.neg.default, (meta(size),), {})
        assert len(meta_outputs._remembered) <= 3


def test_no_function_mode_sees_what_a_tracker_reads() -> None:
    """``torch._C.DisableTorchFunction``: in a backward pass a function mode is on while the tracker runs."""

    class Names(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    weight = torch.nn.Parameter(meta(4, 4))
    loss = (meta(2, 4) @ weight).sum()
    with recording(StorageTracker(), Names()):
        torch.autograd.graph._engine_run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    assert weight.grad is not None
    assert names == ["ones_like"]
