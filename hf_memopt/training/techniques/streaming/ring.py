"""Which layers have copies on the device: the one that computes and the next few, in the order of the pass.

Forward the next layers are those of the model's order; backward those of this pass's calls, last first. A wrong guess
costs a copy, never a result. After the last layer of a forward pass ``prefetch + 1`` layers stay, since the backward
pass begins with them: a step of L layers takes 2 L - 1 - prefetch fetches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_memopt.training.techniques import Lanes
from hf_memopt.training.techniques.streaming.gradients import DeviceSteps, HostGradients
from hf_memopt.training.techniques.streaming.layer import LayerCall, StreamedLayer


class Held(NamedTuple):
    """What a layer has on the device: a copy and its event for each plain parameter and for each carrier."""

    copies: list[tuple[torch.Tensor | None, Any]]
    carried: list[tuple[torch.Tensor, Any]]
    host: list[torch.Tensor]  # what the carriers had


class Ring:
    """The layers of a model, and their copies."""

    def __init__(self, lanes: Lanes, prefetch: int) -> None:
        self.lanes, self.prefetch = lanes, prefetch  # layers to fetch ahead
        self.layers: list[StreamedLayer] = []  # in the order of the model
        self.compared: set[type] = set()  # kinds of layers whose rows were found in the first dimension
        # of passes that recorded gradients, empty, and the layer that was given each first
        self.caches: weakref.WeakKeyDictionary[Any, nn.Module] = weakref.WeakKeyDictionary()
        self.gradients = HostGradients(lanes)
        self.steps: DeviceSteps | None = None  # of an optimizer that steps within the backward pass
        self.fetches = 0  # copies in of a whole layer so far
        self.live_bytes = self.peak_bytes = 0  # weights on the device now, with those that only autograd still holds
        self._held: dict[StreamedLayer, Held] = {}
        self._shells: dict[StreamedLayer, list[torch.Tensor]] = {}  # of carriers; their storage comes and goes
        self._calls: list[weakref.ref[LayerCall]] = []  # of forward passes whose backward pass is to come
        self._in_backward = False

    def use(self, call: LayerCall) -> list[torch.Tensor | None]:
        """Return the device copies of a layer that is about to compute, and start to fetch the next ones."""
        layer, is_backward = call.layer, call.is_recorded
        if is_backward:
            self._begin_backward()
            if self.steps is not None:
                self.steps.begin_layer()
        elif not (call.has_begun or _is_inside_backward()) and (self._in_backward or layer is self.layers[0]):
            self.clear()  # a new pass; a backward pass that failed has no end
        call.has_begun = True
        coming = self._before(call) if is_backward else self._after(layer)
        for other in [other for other in self._held if other is not layer and other not in coming]:
            self._drop(other, self.lanes.ready)
        held = self._held.get(layer) or self._fetch(layer)
        for _, event in (*held.copies, *held.carried):
            self.lanes.ready(event)
        for carrier, (tensor, _) in zip(layer.carriers, held.carried, strict=True):
            carrier.exchange(tensor)
        for other in coming:  # issued after this layer's wait and before its compute, beside which they run
            if other not in self._held:
                self._fetch(other)
        return [copy for copy, _ in held.copies]

    def record(self, call: LayerCall) -> None:
        """Remember a call that the backward pass will come back to."""
        self._calls = [*map(weakref.ref, self._alive()), weakref.ref(call)]

    def deliver(self, layer: StreamedLayer, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take the whole gradient of a parameter; return it on the host where autograd is to go on with it."""
        parameter = layer.parameters[index]
        self._begin_backward()
        if self.steps is None or not self.steps.has(parameter):
            return self.gradients.take(layer, parameter, gradient)
        held = self._held.get(layer)
        weight, event = held.copies[index] if held else self._copy(parameter)
        assert weight is not None  # no quantised weight is trained
        self.lanes.ready(event)
        self.steps.step(parameter, weight, gradient)
        return None

    def clear(self) -> None:
        """Let go of all copies, and of gradients that a failed backward pass has left on their way.

        No copy is under way then: the host's weights may be written.
        """
        self._in_backward = False
        for layer in list(self._held):
            self._drop(layer, self.lanes.landed)
        self.gradients.settle(is_wanted=False)
        if self.steps is not None:
            self.steps.settle()

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            # as FSDP and DDP learn of the end; seen in torch 2.13
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:  # weights and gradients on the host become whole for whoever reads them now
        self.gradients.settle()
        self.clear()
        self._calls.clear()

    def _alive(self) -> list[LayerCall]:
        return [call for call in (reference() for reference in self._calls) if call is not None]

    def _before(self, call: LayerCall) -> list[StreamedLayer]:
        """Return the layers whose backward pass comes after that of this call."""
        calls = self._alive()
        at = next((index for index, one in enumerate(calls) if one is call), 0)
        return [one.layer for one in reversed(calls[max(0, at - self.prefetch) : at])]

    def _after(self, layer: StreamedLayer) -> list[StreamedLayer]:
        """Return the layers that compute after this one; at the end those that the backward pass begins with."""
        at = self.layers.index(layer)
        if torch.is_grad_enabled() and at + self.prefetch >= len(self.layers):
            return [other for other in self.layers[-1 - self.prefetch :] if other is not layer]
        return self.layers[at + 1 : at + 1 + self.prefetch]

    @torch.inference_mode(False)  # what evaluation fetches may be used by training
    @torch.no_grad()
    def _fetch(self, layer: StreamedLayer) -> Held:
        self.fetches += 1
        copies = [self._copy(parameter) if parameter is not None else (None, None) for parameter in layer.plain()]
        host = [carrier.tensor for carrier in layer.carriers]
        shells = self._shells.get(layer, [None] * len(host))
        carried = [self.lanes.fetch(one, into=into) for one, into in zip(host, shells, strict=True)]
        self._shells[layer] = [tensor for tensor, _ in carried]
        self._count(sum(tensor.nbytes for tensor, _ in carried))
        if self.steps is not None and self._in_backward:
            self.steps.fetch(layer.parameters)
        self._held[layer] = Held(copies, carried, host)
        return self._held[layer]

    def _copy(self, parameter: torch.Tensor) -> tuple[torch.Tensor | None, Any]:
        tensor, event = self.lanes.fetch(parameter)
        self._count(tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._count, -tensor.nbytes)  # when autograd lets go of it too
        return tensor, event

    def _count(self, change_bytes: int) -> None:
        self.live_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _drop(self, layer: StreamedLayer, wait: Callable[[Any], None]) -> None:
        """Let go of a layer; memory that a copy still writes into must not be given away."""
        held = self._held.pop(layer)
        for _, event in (*held.copies, *held.carried):
            wait(event)
        layer.put_away(held.host)
        for tensor, _ in held.carried:
            self._count(-tensor.nbytes)
            tensor.untyped_storage().resize_(0)


def _is_inside_backward() -> bool:  # as torch.utils.checkpoint asks; seen in torch 2.13
    return torch._C._current_graph_task_id() != -1
