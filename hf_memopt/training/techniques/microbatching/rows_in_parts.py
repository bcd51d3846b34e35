"""Run the rows of a batch through a module in parts; whatever comes after it sees all rows.

A loss may compare rows, pick the hardest of them or weigh them by class: it gets the outputs of the whole batch, and is
computed once, as the user wrote it. What is cut is the backbone below it, where rows do not depend on each other
(``row_check``) and where nearly all activations are.

One call of the module is one node of autograd's graph. The forward pass runs part after part without a graph and joins
their outputs; the backward pass runs each part again, with the random numbers that it drew, and with a graph. While it
does, the weights are replaced by aliases, so that gradients are summed in one place and the hooks of the real weights
(DDP's) see one gradient each.

Out of memory inside a part is recovered on the spot with half of its rows. An alias that has its gradient by then is
left out of the repetition, so nothing is counted twice. A part that drew random numbers cannot be halved, since halves
would draw others than the loss has seen; then the step has to be repeated.

The price: each part runs forward twice, 1.3 to 1.8 times the CPU time of whole rows. Joined outputs exist for all rows,
and what the head makes of them. The gradients of the module's weights live until its last part has run, so that beside
gradients that are there already, under accumulation, they exist twice.

Limitations: first derivatives; see also ``row_check``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from hf_memopt.training.binding.undo import RandomState, set_attribute, undo_all
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.training.techniques.microbatching.module_call import (
    DependentRowsError,
    Layout,
    ModuleCall,
    is_same_value,
)

LARGEST_CHANGE = 1e-5  # of the sum of an output's absolute values, when a part is run again


class PartsFailedError(torch.OutOfMemoryError):
    """Memory ran out inside a part that cannot be made smaller where it ran.

    ``rows`` and ``columns`` are the part's; ``columns`` is None for images and sounds.
    """

    def __init__(self, rows: int, columns: int | None, text: str) -> None:
        super().__init__(text)
        self.rows, self.columns = rows, columns


class Size(NamedTuple):
    """How many rows a part may have, and what is told when that was too many.

    ``rows``: gives the most rows of a part of so many columns; ``failed``: is told rows, columns and the seconds lost,
    and lowers what ``rows`` gives.
    """

    rows: Callable[[int | None], int]
    failed: Callable[[int, int | None, float], None]


def run_rows_in_parts(call: ModuleCall, layout: Layout, size: Size) -> Any:
    """Return what the call would return, with its rows run in parts.

    Raises:
        DependentRowsError: parts cannot be joined; in the backward pass, what was run again gave other values, or a
            gradient arrives where parts cannot pass it on.
        PartsFailedError: memory ran out in a part of one row, or in one that drew random numbers, in the backward pass.
    """
    parts = _Parts(call, layout, size)
    if not torch.is_grad_enabled():
        joined = parts.forward()
    else:
        weights = {name: p for name, p in call.module.named_parameters() if p.requires_grad}
        floats = [i for i, leaf in enumerate(call.leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
        inputs = (*(call.leaves[i] for i in floats), *weights.values())
        joined = _Node.apply(parts, floats, tuple(weights), *inputs)  # type: ignore[no-untyped-call]
    leaves = [
        tensor if constant is None else constant for tensor, constant in zip(joined, parts.constants, strict=True)
    ]
    assert parts.spec is not None  # of the first part
    return tree_unflatten(leaves, parts.spec)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: _Parts, floats: list[int], names: tuple[str, ...], *inputs: Any) -> Any:
        ctx.parts, ctx.floats = parts, floats
        ctx.weights = dict(zip(names, inputs[len(floats) :], strict=True))
        ctx.set_materialize_grads(False)
        try:
            joined = parts.forward()
        finally:
            torch.clear_autocast_cache()  # of casts that were made without a graph
        ctx.mark_non_differentiable(*(t for t in joined if t is not None and not t.is_floating_point()))
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise DependentRowsError(
                "the gradient itself is differentiated (create_graph=True), and parts have no second derivative"
            )
        found = ctx.parts.backward(ctx.weights, ctx.floats, gradients)
        return (None, None, None, *found)


class _Part(NamedTuple):
    """Rows that ran together, and the states of the generators before. ``sums``: of each output, to know it again."""

    start: int
    stop: int
    states: list[RandomState]
    is_random: bool
    sums: list[torch.Tensor]

    def of(self, value: torch.Tensor, dim: int | None, rows: int) -> torch.Tensor:
        """Return its entries of a tensor of all ``rows``, a view; all of what has no rows."""
        if dim is None:
            return value
        of_one = value.shape[dim] // rows
        return value.narrow(dim, self.start * of_one, (self.stop - self.start) * of_one)

    def halves(self) -> tuple[_Part, _Part]:
        """Return two parts, whose sums are not known."""
        middle = (self.start + self.stop) // 2
        return self._replace(stop=middle, sums=[]), self._replace(start=middle, sums=[])


class _Parts:
    """The parts of one call."""

    def __init__(self, call: ModuleCall, layout: Layout, size: Size) -> None:
        self.call, self.layout, self.size = call, layout, size
        self.constants: list[Any] = []  # outputs that are no tensors; None for each tensor
        self.spec: TreeSpec | None = None
        self._parts: list[_Part] = []
        self._devices = call.devices()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in self._devices)}
            if torch.amp.is_autocast_available(kind)
        ]
        self._versions = [(name, p, p._version) for name, p in call.module.named_parameters()]
        self._config = getattr(call.module, "config", None)
        self._settings = dict(getattr(self._config, "__dict__", {}))  # which a loss may change for as long as it runs

    def _capture(self) -> list[RandomState]:
        return [RandomState.capture(device) for device in self._devices]

    def forward(self) -> tuple[torch.Tensor | None, ...]:
        """Run all parts; return their joined outputs, None for those that are no tensors."""
        done: list[list[Any]] = []
        start = 0
        while start < self.call.rows:
            stop = min(start + self.size.rows(self.call.columns), self.call.rows)
            states, begin = self._capture(), time.perf_counter()
            leaves = self.call.rows_from(self.layout.into, start, stop)
            text = None
            try:
                outputs, self.spec = self.call.run_with_spec(leaves)
            except Exception as error:
                text = self._text_of(error, stop - start)
            if text is not None:  # the except block has ended, and with it the frames that hold tensors
                self._halve(stop - start, begin)
                for state in states:
                    state.restore()
                continue
            is_random = any(not one.is_same(two) for one, two in zip(states, self._capture(), strict=True))
            if len(outputs) != len(self.layout.out):
                raise DependentRowsError("it returns another number of values than when it was checked")
            self._parts.append(_Part(start, stop, states, is_random, _sums(outputs)))
            done.append(outputs)
            start = stop
        self.constants = [None if torch.is_tensor(value) else value for value in done[0]]
        return tuple(self._joined([outputs[i] for outputs in done], dim) for i, dim in enumerate(self.layout.out))

    def _joined(self, values: list[Any], dim: int | None) -> torch.Tensor | None:
        if not torch.is_tensor(values[0]):
            if not all(is_same_value(values[0], value) for value in values):
                raise DependentRowsError(f"parts return different values, {str(values)[:80]}, for all rows")
            return None
        # a copy: an output of a node of the graph is a tensor of its own
        return values[0].clone() if dim is None else torch.cat(values, dim)

    def _text_of(self, error: Exception, rows: int) -> str:
        """Return the first line of an out-of-memory error that fewer rows may help against; raise any other."""
        if not is_out_of_memory(error):
            raise error
        text = str(error).partition("\n")[0]
        if rows == 1:
            raise PartsFailedError(1, self.call.columns, text) from None
        return text

    def _halve(self, rows: int, begin: float) -> None:
        free_failed_step()
        self.size.failed(rows, self.call.columns, time.perf_counter() - begin)

    # ---- Backward ---------------------------------------------------------------------------------------------------

    def backward(
        self, weights: Mapping[str, torch.Tensor], floats: list[int], gradients: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs that need one, then of the weights."""
        for name, parameter, version in self._versions:
            if parameter._version != version:
                raise DependentRowsError(
                    f"{name} was changed between the forward and the backward pass, so that parts would be run again "
                    "with other weights"
                )
        for gradient, dim in zip(gradients, self.layout.out, strict=True):
            if gradient is not None and dim is None:
                raise DependentRowsError(
                    f"the loss uses an output of shape {tuple(gradient.shape)} that all rows share, whose gradient "
                    "parts cannot pass on"
                )
        sums = {i: torch.zeros_like(self.call.leaves[i]) for i in floats}
        aliases = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        runner, now = _Runner(self.call.module), self._capture()
        differs = {name: old for name, old in self._settings.items() if vars(self._config).get(name) is not old}
        settings = undo_all(*(set_attribute(self._config, name, old) for name, old in differs.items()))
        try:
            for part in self._parts:
                self._again(runner, part, gradients, aliases, sums, frozenset())
        finally:
            settings.remove()
            for state in now:
                state.restore()
        return [*sums.values(), *(alias.grad for alias in aliases.values())]

    def _again(
        self,
        runner: _Runner,
        part: _Part,
        gradients: tuple[torch.Tensor | None, ...],
        aliases: Mapping[str, torch.Tensor],
        sums: Mapping[int, torch.Tensor],
        counted: frozenset[str],
    ) -> None:
        """Run a part forward and backward; weights in ``counted`` have the gradient of its rows already."""
        done: set[str] = set()
        used = {name: alias.detach() if name in counted else alias for name, alias in aliases.items()}
        hooks = [
            alias.register_post_accumulate_grad_hook(lambda _, name=name: done.add(name))  # type: ignore[no-untyped-call]
            for name, alias in used.items()
            if name not in counted
        ]
        for state in part.states:
            state.restore()
        text, fresh, begin = None, {}, time.perf_counter()
        try:
            fresh = {i: self._input(part, self.call.leaves, i).detach().requires_grad_() for i in sums}
            runner.run(used, lambda: self._run_part(part, gradients, fresh))
            for i, leaf in fresh.items():
                if leaf.grad is not None:
                    self._input(part, sums, i).add_(leaf.grad)
        except Exception as error:
            text = self._text_of(error, part.stop - part.start)
            if part.is_random:
                raise PartsFailedError(part.stop - part.start, self.call.columns, text) from None
        finally:
            for hook in hooks:
                hook.remove()
        if text is None:
            return
        fresh.clear()
        self._halve(part.stop - part.start, begin)
        for half in part.halves():
            self._again(runner, half, gradients, aliases, sums, counted | done)

    def _input(self, part: _Part, values: Any, index: int) -> torch.Tensor:
        return part.of(values[index], self.layout.into[index], self.call.rows)

    def _run_part(
        self, part: _Part, gradients: tuple[torch.Tensor | None, ...], fresh: Mapping[int, torch.Tensor]
    ) -> None:
        leaves = self.call.rows_from(self.layout.into, part.start, part.stop)
        for i, leaf in fresh.items():
            leaves[i] = leaf
        with torch.enable_grad():
            with ExitStack() as stack:
                for kind, dtype, is_enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
                outputs = self.call.run(leaves)
            for before, after in zip(part.sums, _sums(outputs), strict=bool(part.sums)):
                if bool((before - after).abs().max() > LARGEST_CHANGE * before[1]):
                    raise DependentRowsError(
                        "a part that was run again gave other values: a weight, a buffer or a generator changed "
                        "between the forward and the backward pass"
                    )
            pairs = [
                (output, part.of(gradient, dim, self.call.rows))
                for output, gradient, dim in zip(outputs, gradients, self.layout.out, strict=True)
                if gradient is not None and torch.is_tensor(output) and output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _sums(outputs: list[Any]) -> list[torch.Tensor]:
    """Return the sum of each floating-point output and that of its absolute values, shape (2,) each."""
    found = []
    for value in outputs:
        if torch.is_tensor(value) and value.is_floating_point() and value.numel():
            wide = torch.float32 if value.device.type == "mps" else torch.float64
            value = value.detach()
            found.append(torch.stack([value.sum(dtype=wide), torch.linalg.vector_norm(value, 1, dtype=wide)]))
    return found


class _Runner(nn.Module):
    """Runs a function while the weights of a module are replaced."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, function: Callable[[], None]) -> None:
        function()

    def run(self, weights: Mapping[str, torch.Tensor], function: Callable[[], None]) -> None:
        """Call a function while these weights, shared ones too, take the place of the module's own."""
        named = {f"inner.{name}": weight for name, weight in weights.items()}
        torch.func.functional_call(self, named, (function,), tie_weights=True)
