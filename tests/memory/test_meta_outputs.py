"""What operations return on the meta device is remembered; a recording with the memory is the same as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hf_memopt.devices import Chip
from hf_memopt.memory.models import load_model
from hf_memopt.memory.recording import RecordedPass, Shape, StepTrace, session
from hf_memopt.memory.recording.sessions import Session
from hf_memopt.memory.recording.step import recording
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import StorageTracker, meta_outputs, storage_tracker
from hf_memopt.memory.tracking.meta_outputs import run_on_meta
from tests.memory.small_configs import CONFIGS

aten = torch.ops.aten


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def run_anew(func: Any, args: Any, kwargs: Any, flops: bool = True) -> tuple[Any, int, None]:
    """Run an operation without the memory."""
    out = func(*args, **kwargs)
    formula = flop_registry.get(func._overloadpacket) if flops else None
    return out, formula(*args, **kwargs, out_val=out) if formula else 0, None


def facts(out: Any) -> Any:
    return [(one.shape, one.stride(), one.dtype, one.device) for one in (out if isinstance(out, tuple) else (out,))]


def facts_of(trace: StepTrace) -> dict[str, Any]:
    """Return everything that a replay or an estimate reads from a trace."""
    tracker = trace.tracker
    numbers = range(len(tracker.sizes))

    def of_pass(part: RecordedPass | None) -> Any:
        if part is None:
            return None
        # the sequence numbers themselves depend on what ran in the process before
        loss = [number for number in numbers if tracker.sequences[number] in part.logits_sequences]
        whole = part.start, part.forward_end, part.end, part.logits, part.logits_event
        return *whole, part.outputs, part.releases, loss

    return {
        "events": tracker.events,
        "sizes": tracker.sizes,
        "allocated_at": tracker.allocated_at,
        "recomputed": tracker.recomputed,
        "modules": [tracker.module_of(number) for number in numbers],
        "weights": trace.weights,
        "inputs": (trace.inputs, trace.evaluation_inputs),
        "gradients": trace.gradients,
        "passes": [of_pass(part) for part in (*trace.micro_batches, trace.evaluation)],
        "flops": trace.flops,
        "operations": trace.tracker.operations,
        "notes": trace.notes,
        "host bytes": trace.host_bytes,
    }


def recorded(name: str, settings: StepSettings) -> dict[str, Any]:
    """Return the facts of a new recording of a model."""
    Session.traces.clear()
    trace = session().record(
        load_model(CONFIGS[name]()), settings, Shape(2, None if name == "vit" else 24), Chip.of((8, 0))
    )
    return facts_of(trace)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    meta_outputs._remembered.clear()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "bert")]
)
def test_a_recording_with_the_memory_is_one_without(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StepSettings(precision=precision, checkpointing=True, gradient_accumulation_steps=2)
    found = [recorded(name, settings) for _ in range(2)]
    monkeypatch.setattr(storage_tracker, "run_on_meta", run_anew)
    expected = recorded(name, settings)
    for one in found:
        assert {fact for fact in expected if expected[fact] != one[fact]} == set()


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


def test_numbers_of_other_types_are_other_options() -> None:
    """``1``, ``1.0`` and ``True`` are equal keys of a dict, but give results of other dtypes."""
    x = meta(2, dtype=torch.int64)
    for value in (1, 1.0, True):
        for _ in range(2):
            assert run_on_meta(aten.add.Scalar, (x, value), {})[0].dtype == aten.add.Scalar(x, value).dtype


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
    """A tensor that is given twice is read once; where in its storage a tensor begins changes nothing."""
    x, y, large = meta(4, 6), meta(4, 6), meta(8, 6)
    found = [
        run_on_meta(aten.mul.Tensor, args, {})[2] for args in ((x, y), (y, x), (x, x), (large[:4], large[4:]), (x, 2))
    ]
    assert found[0] is not None
    assert [one is found[0] for one in found] == [True, True, False, True, False]


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_outputs, "_MOST_REMEMBERED", 3)
    for size in range(1, 9):
        run_on_meta(aten.neg.default, (meta(size),), {})
        assert len(meta_outputs._remembered) <= 3


class Seen(TorchDispatchMode):
    """Note every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_around_a_tracker_sees_every_operation() -> None:
    """``torch._C._len_torch_dispatch_stack``: the modes that are still to come."""
    x, seen = meta(4), Seen()
    with recording(StorageTracker()):
        x.neg(), x.neg()
    with recording(seen, StorageTracker()):
        x.neg(), x.neg()
    assert seen.names == ["aten.neg.default"] * 2


# ---- Private names of torch -----------------------------------------------------------------------------------------


def test_a_schema_says_what_an_operation_changes_and_returns() -> None:
    """``OpOverload._schema`` with ``alias_info``; ``_overloadpacket`` is the key of the formulas of operations."""
    assert [item.alias_info for item in aten.mm.default._schema.arguments] == [None, None]
    assert [str(item.type) for item in aten.mm.default._schema.returns] == ["Tensor"]
    assert aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    assert aten.view.default._schema.returns[0].alias_info is not None
    assert aten.mm.default._overloadpacket in flop_registry


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
