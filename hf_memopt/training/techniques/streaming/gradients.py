"""Where the gradients of streamed layers go: to the host, or into a step on the device within the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_memopt.training.techniques import Lanes


class HostGradients:
    """Parked gradients: each becomes its parameter's ordinary ``.grad`` on the host, where stock clips and steps.

    A copy out runs beside the compute of the next layer, and is waited for when that layer's gradients arrive.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._kept: dict[torch.Tensor, torch.Tensor] = {}  # memory of each gradient, written anew in each backward pass
        self._arriving: dict[nn.Parameter, tuple[Any, torch.Tensor, Any]] = {}  # layer, on the host, event

    def take(self, layer: Any, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Start to copy a gradient; return it where hooks of the parameter wait for autograd to hand it to them."""
        if any(other is not layer or earlier is parameter for earlier, (other, _, _) in self._arriving.items()):
            self.settle()
        is_hooked = bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
        host = self._memory(parameter, is_temporary=is_hooked or parameter.grad is not None)
        event = self._lanes.store(host, gradient)
        if is_hooked:
            self._lanes.landed(event)
            return host
        self._arriving[parameter] = layer, host, event
        return None

    def settle(self, *, is_wanted: bool = True) -> None:
        """Wait for the gradients on their way, and give those that are wanted to their parameters."""
        while self._arriving:
            parameter, (_, host, event) = self._arriving.popitem()
            self._lanes.landed(event)
            if is_wanted:
                parameter.grad = host if parameter.grad is None else parameter.grad.add_(host)

    def _memory(self, parameter: torch.Tensor, *, is_temporary: bool) -> torch.Tensor:
        if is_temporary:
            return torch.empty_like(parameter, pin_memory=self._lanes.is_async)
        if parameter not in self._kept:
            [self._kept[parameter]] = self._lanes.host_like([parameter])
        return self._kept[parameter]


class DeviceSteps:
    """The steps of a released optimizer, on the device, within the backward pass.

    Weight and state of a parameter are fetched, stepped and copied out. ``optimizer.state`` of the host parameter stays
    where saving and resuming find it.
    """

    def __init__(self, lanes: Lanes, optimizer: Any) -> None:
        self._lanes, self.optimizer = lanes, optimizer
        self._written: list[Any] = []  # the events of copies out, those of the last layer and of this one
        self._of_last = 0
        self._fetched: dict[torch.Tensor, dict[str, Any]] = {}
        self._stepped: set[torch.Tensor] = set()  # in this backward pass

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer steps this parameter."""
        return bool(self.optimizer.steps(parameter))

    def fetch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to fetch the state of parameters whose gradients will come."""
        for parameter in parameters:
            if parameter.requires_grad and self.has(parameter) and parameter not in self._fetched:
                state = self.optimizer.state.get(parameter, {})
                on_device = self.optimizer.has_counter_on_device(parameter)
                self._fetched[parameter] = {
                    key: self._lanes.fetch(value)
                    if torch.is_tensor(value) and (value.dim() or on_device)
                    else (value, None)
                    for key, value in state.items()
                }

    def step(self, parameter: nn.Parameter, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step the fetched weight of a parameter, and start to copy weight and state out."""
        if parameter in self._stepped:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient within one backward pass, of "
                f"another call of its streamed layer, when {type(self.optimizer).__name__} had stepped it; expected "
                "one forward pass for each backward pass. Run the model once on all rows joined, or leave "
                "release=True out: parked gradients are added up"
            )
        self._stepped.add(parameter)
        self.fetch([parameter])
        fetched = self._fetched.pop(parameter)
        for _, event in fetched.values():
            self._lanes.ready(event)
        weight = weight.detach()
        weight.grad = gradient
        state = self.optimizer.step_copy(parameter, weight, {key: value for key, (value, _) in fetched.items()})
        weight.grad = None
        self._written.append(self._lanes.store(parameter, weight))
        kept = self.optimizer.state[parameter]
        for key, value in state.items():
            kept[key] = self._stored(key, value, kept.get(key))

    def _stored(self, key: str, value: Any, host: Any) -> Any:
        """Return what the host keeps of one entry of a state, which a copy is on its way to."""
        if not torch.is_tensor(value) or value is host or value.device.type != self._lanes.device.type:
            return value  # a counter
        if host is not None and key.startswith("qmap"):
            return host  # a table of constants
        is_slow = host is not None and self._lanes.is_async and not host.is_pinned()  # resumed from a checkpoint
        if host is None or is_slow or (host.shape, host.dtype) != (value.shape, value.dtype):
            [host] = self._lanes.host_like([value])
        self._written.append(self._lanes.store(host, value))
        return host

    def begin_layer(self) -> None:
        """Wait for the copies out of the layer before the last, so that no more than one layer is on its way."""
        for event in self._written[: self._of_last]:
            self._lanes.landed(event)
        del self._written[: self._of_last]
        self._of_last = len(self._written)

    def settle(self) -> None:
        """Wait until weights and states on the host are whole, and what was fetched for gradients that never came."""
        unused = [event for state in self._fetched.values() for _, event in state.values()]
        for event in (*self._written, *unused):
            self._lanes.landed(event)
        self._written.clear()
        self._of_last = 0
        self._fetched.clear()
        self._stepped.clear()
