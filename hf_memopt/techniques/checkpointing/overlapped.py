"""Inputs of checkpointed layers in host memory, copied there and back while layers compute.

Of stock's ``offload`` (``torch.autograd.graph.save_on_cpu``) the GPU waits for each copy: 0.2 to 3.5 % of a step
by its rates. Here an input leaves on a stream of its own while its layer computes, and comes back while the layer after
it is recomputed: at most two are on the GPU for it. The copies are those of streamed layers (``Lanes``), with
page-locked buffers of exact size, used again in the next pass.

What needs no gradient stays on the device: position embeddings and masks, which all layers share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.binding.undo import UndoHandle, set_attribute, undo_all
from hf_memopt.techniques.streaming import Lanes  # torch alone

_FUNCTION = "_gradient_checkpointing_func"  # transformers 5.8.1, 5.17.0 and 5.23.0


def overlap_offload(model: nn.Module, lanes: Any = None) -> UndoHandle:
    """Let the checkpointing that is on in a model keep the inputs of layers in host memory; return what undoes it."""
    inputs, handles = Inputs(lanes), []
    for module in model.modules():
        function = vars(module).get(_FUNCTION)
        if isinstance(function, partial):
            around = partial(inputs.around, function.func, *function.args, **function.keywords)
            handles.append(set_attribute(module, _FUNCTION, around))
    return undo_all(*handles)


class _Input:
    """A tensor that waits on the host for its backward pass."""

    def __init__(self, host: Tensor, stored: Any, let_go: Callable[[_Input], None]) -> None:
        self.host, self.stored, self._let_go = host, stored, let_go
        self.copy: Tensor | None = None
        self.arrived: Any = None

    def __del__(self) -> None:
        self._let_go(self)


class Inputs:
    """The inputs of one model's layers, in the order of their forward passes."""

    def __init__(self, lanes: Any) -> None:
        self._lanes = lanes
        self._waiting: list[weakref.ref[_Input]] = []
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def around(self, checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of checkpointing, whose saved inputs go to the host."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return checkpoint(*args, **kwargs)

    def pack(self, tensor: Tensor) -> Any:
        """Start to copy an input to the host."""
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return tensor
        if self._lanes is None:
            self._lanes = _SimulatedLanes() if tensor.is_meta else Lanes(tensor.device)
        source = tensor.detach()
        kind = source.shape, source.dtype
        if not self._free.get(kind):  # other lengths: buffers that no layer waits for are let go
            alive = [one for reference in self._waiting if (one := reference()) is not None]
            kinds = {(one.host.shape, one.host.dtype) for one in alive}
            self._free = {kind: hosts for kind, hosts in self._free.items() if kind in kinds}
        free = self._free.setdefault(kind, [])
        host = free.pop() if free else self._lanes.host_like([source])[0]
        found = _Input(host, self._lanes.store(host, source), self._let_go)
        self._waiting = [*(one for one in self._waiting if one() is not None), weakref.ref(found)]
        return found

    def _let_go(self, one: _Input) -> None:
        """Take the host's buffer back; memory that a copy still writes into must not be given away."""
        if one.copy is not None:
            self._lanes.ready(one.arrived)
        self._free.setdefault((one.host.shape, one.host.dtype), []).append(one.host)

    def unpack(self, saved: Any) -> Tensor:
        """Return an input on the device, and start to fetch that of the layer before."""
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved)
        self._lanes.ready(saved.arrived)
        copy: Tensor
        copy, saved.copy = saved.copy, None
        alive = [one for one in (reference() for reference in self._waiting) if one is not None]
        at = next(index for index, one in enumerate(alive) if one is saved)
        if at:
            self._fetch(alive[at - 1])
        return copy

    def _fetch(self, one: _Input) -> None:
        if one.copy is None:
            self._lanes.landed(one.stored)
            one.copy, one.arrived = self._lanes.fetch(one.host)


class _SimulatedLanes:
    """Copies of an estimate, by the operations of ``save_on_cpu``, which it knows."""

    def host_like(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.empty(one.size(), dtype=one.dtype, layout=one.layout, pin_memory=True) for one in tensors]

    def store(self, host: Tensor, source: Tensor) -> None:
        host.copy_(source)

    def fetch(self, host: Tensor) -> tuple[Tensor, None]:
        return host.to("meta", non_blocking=True), None

    def ready(self, event: None) -> None:
        """Do nothing: every copy is over at once."""

    landed = ready
