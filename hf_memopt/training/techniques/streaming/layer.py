"""One streamed layer: its weights stay whole on the host, and each call computes with copies on the device.

For a call the attributes of the layer's modules are exchanged for copies, inside one non-reentrant checkpoint, so that
the recomputation in the backward pass fetches by itself. A gate stands in the graph for each trained parameter:
autograd sums the gradients of all its uses in the call on the device, parts of rows and experts included, and hands the
sum over once. Autograd also owns the memory of a copy, which cannot be taken away under a node that still needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from hf_memopt.training.binding import versions
from hf_memopt.training.binding.model import tensors_in
from hf_memopt.training.binding.parameters import StillStatistics
from hf_memopt.training.techniques.streaming.row_parts import compare_parts, joined, row_parts

if TYPE_CHECKING:
    from hf_memopt.training.techniques.streaming.ring import Ring


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter that waits on the host, and the modules that have it, each under a name of its own."""

    parameter: Any
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def is_8bit(self) -> bool:
        return hasattr(self.parameter, "SCB")

    def carriers(self) -> Iterator[Carrier]:
        """Yield what holds its values, if it is quantised."""
        if is_packed(self.parameter):
            yield from carriers_of(self.parameter, self.places[0][0])

    def check(self) -> None:
        """Refuse a parameter that was replaced."""
        for module, name in self.places:
            if module._parameters.get(name) is not self.parameter:
                raise ValueError(
                    f"{name} of a streamed {type(module).__name__} was replaced, as load_state_dict(assign=True) "
                    "does, and would be lost; expected the parameter that was streamed, with other values. Call "
                    "handle.remove() before replacing it, and stream_layers(model) afterwards"
                )

    def exchange(self, tensor: torch.Tensor | None) -> None:
        """Give its modules another tensor."""
        for module, name in self.places:
            module._parameters[name] = tensor  # type: ignore[assignment]

    def put_back(self) -> None:
        """Give its modules the parameter again."""
        for module, name in self.places:
            module._buffers.pop(name, None)  # where PEFT's adapters of fused experts leave what they replaced
        self.exchange(self.parameter)


def _held(module: nn.Module, resident: Collection[nn.Parameter]) -> list[Held]:
    """Return what a module holds but for ``resident``, which stays on the device: adapters for example."""
    found: dict[nn.Parameter, Held] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter not in resident:
                found.setdefault(parameter, Held(parameter)).places.append((inner, name))
    return list(found.values())


class StreamedLayer:
    """A layer of a model whose parameters are fetched for each call."""

    def __init__(self, module: nn.Module, ring: Ring, resident: Collection[nn.Parameter], rows: int | None) -> None:
        self.module, self.ring, self.rows = module, ring, rows  # rows of a part of the batch; None for all at once
        self._held = _held(module, resident)
        self.parameters: list[nn.Parameter] = [held.parameter for held in self._held]
        self._stacks = [inner for inner in module.modules() if type(inner).__name__ == "ExpertStack"]
        self.carriers = [carrier for held in self._held for carrier in held.carriers()]
        for stack in self._stacks:
            self.carriers += [Carrier(stack, name) for name, tensor in stack._buffers.items() if tensor is not None]
        self._flagged: list[Any] = [inner for inner in module.modules() if hasattr(inner, "gradient_checkpointing")]
        self._switched: set[Any] = set()
        self.statistics = StillStatistics([module])

    def plain(self) -> list[nn.Parameter | None]:
        """Return the parameters that are fetched as tensors, with None for those that carriers hold."""
        return [None if is_packed(parameter) else parameter for parameter in self.parameters]

    def forward(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward pass with fetched weights; where gradients are recorded, as a checkpoint."""
        call = LayerCall(self)
        if not torch.is_grad_enabled():
            return call.run(before, *args, **kwargs)
        self.switch_off()
        # of each parameter that is trained
        call.gates = [Gate.apply(p, call, i) if p.requires_grad else None for i, p in enumerate(self.parameters)]  # type: ignore[no-untyped-call]
        args, kwargs = without_cache(self.module, self.ring, args, kwargs)
        parts = [*row_parts(self.module, args, kwargs, self.rows)]
        if len(parts) > 1 and type(self.module) not in self.ring.compared:
            run = functools.partial(call.run, before)
            compare_parts(run, self.module, (args, kwargs), parts)
            self.ring.compared.add(type(self.module))
        outputs = [checkpoint(call.run, before, *part, use_reentrant=False, **named) for part, named in parts]
        call.is_recorded = True
        if any(tensor.requires_grad for tensor in tensors_in(outputs)):
            self.ring.record(call)
        return joined(outputs, self.rows)

    def move(self, before: Callable[..., Any], function: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        """Let ``module.to(device)`` move buffers and what is resident, and leave streamed parameters on the host."""
        for parameter in self.parameters:
            dtype = function(parameter.detach().new_empty(0)).dtype
            if dtype != parameter.dtype:
                raise ValueError(
                    f"dtype={dtype} cannot be given to streamed weights of {parameter.dtype}; expected a model that "
                    "has its dtype before stream_layers. Load it with dtype=..., or call handle.remove() first"
                )
        waiting = [(stack, dict(stack._buffers)) for stack in self._stacks]
        try:
            for stack, _ in waiting:
                stack._buffers.update(dict.fromkeys(stack._buffers))
            with self.exchanged([None] * len(self.parameters)):
                return before(function, *args, **kwargs)
        finally:
            for stack, buffers in waiting:
                stack._buffers.update(buffers)

    def host_tensors(self) -> list[torch.Tensor]:
        """Return what waits on the host for a call: plain parameters and what carriers hold."""
        plain = [parameter.detach() for parameter in self.plain() if parameter is not None]
        return [*plain, *(carrier.tensor for carrier in self.carriers)]

    def to_host(self) -> None:
        """Put all of it where the lanes copy from; gradients that are there are let go of."""
        with torch.no_grad():
            copies = self.ring.lanes.host_like(self.host_tensors())
            for copy, tensor in zip(copies, self.host_tensors(), strict=True):
                copy.copy_(tensor)
        for parameter in self.plain():
            if parameter is not None:
                parameter.data, parameter.grad = copies.pop(0), None
        self.put_away(copies)

    def switch_off(self) -> None:
        """Switch stock's own checkpointing of this layer off; the Trainer switches it on at each train()."""
        for inner in self._flagged:
            if inner.gradient_checkpointing:
                inner.gradient_checkpointing = False
                self._switched.add(inner)

    def switch_back(self) -> None:
        """Switch stock's checkpointing on where it was."""
        for inner in self._switched:
            inner.gradient_checkpointing = True
        self._switched.clear()

    @contextmanager
    def exchanged(self, tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Let the modules have other tensors than their parameters, which are back afterwards, whatever happens."""
        for held in self._held:
            held.check()
        try:
            for held, tensor in zip(self._held, tensors, strict=True):
                held.exchange(tensor)
            yield
        finally:
            for held in self._held:
                held.put_back()

    def put_away(self, host: Sequence[torch.Tensor]) -> None:
        """Give the owners of carriers their host tensors back."""
        for carrier, tensor in zip(self.carriers, host, strict=True):
            carrier.exchange(tensor)
        for held in self._held:
            if held.is_8bit:  # whose forward gave the weight the device tensor of the state
                module: Any = held.places[0][0]
                held.parameter.data = module.state.CB


def without_cache(
    module: nn.Module, ring: Ring, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer without its cache, which a recomputation would write once more.

    A cache is refused that comes filled or again. Layers that stay get none either: it would be filled in part.
    """
    if getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is not None:
        owner = ring.caches.get(cache)
        if owner is module or (owner is None and cache.get_seq_length() > 0):
            raise ValueError(
                "past_key_values goes on with a cache where gradients are recorded, and streamed layers keep none; "
                "expected none. Run all of it under torch.no_grad(), or pass use_cache=False, or call handle.remove()"
            )
        ring.caches.setdefault(cache, module)
    kwargs = {name: None if name in versions.CACHES else value for name, value in kwargs.items()}
    kwargs |= {"use_cache": False} if kwargs.get("use_cache") else {}
    return tuple(None if isinstance(value, Cache) else value for value in args), kwargs  # as GPT-2's layers take it


def resident_forward(module: nn.Module, ring: Ring, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass of a layer that stays beside streamed ones."""
    if torch.is_grad_enabled():
        args, kwargs = without_cache(module, ring, args, kwargs)
    return before(*args, **kwargs)


class LayerCall:
    """One call of a layer: what its forward pass and the recomputation of each part share."""

    def __init__(self, layer: StreamedLayer) -> None:
        self.layer = layer
        self.has_begun = False  # a part of it has run
        self.is_recorded = False  # the forward pass is over, so that whoever runs it again is the backward pass
        self.gates: list[torch.Tensor | None] = [None] * len(layer.parameters)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer with its weights on the device; the first time and whenever it is recomputed."""
        layer = self.layer
        try:
            copies = layer.ring.use(self)
            weights = [
                # of a quantised weight the carriers have the values
                parameter if copy is None else copy if gate is None else Weight.apply(gate, copy)  # type: ignore[no-untyped-call]
                for parameter, copy, gate in zip(layer.parameters, copies, self.gates, strict=True)
            ]
            with layer.exchanged(weights), layer.statistics.still(self.is_recorded):
                return forward(*args, **kwargs)
        except BaseException:
            if not self.is_recorded:  # else it may be the end of a recomputation that has all it needs
                layer.ring.clear()
            raise
        finally:
            if not torch.is_grad_enabled() and layer is layer.ring.layers[-1]:
                layer.ring.clear()  # nothing of this pass is needed again


class Gate(torch.autograd.Function):
    """Stands for one parameter in one call: a number that pretends to have its shape, and gets the gradient's sum."""

    @staticmethod
    def forward(ctx: Any, host: torch.Tensor, call: LayerCall, index: int) -> torch.Tensor:
        ctx.call, ctx.index = call, index
        return host.new_empty((), device=call.layer.ring.lanes.device).expand(host.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.call.layer.ring.deliver(ctx.call.layer, ctx.index, gradients[0]), None, None


class Weight(torch.autograd.Function):
    """The fetched weight, whose gradient goes to the gate."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


# ---- Quantised weights


class Carrier(NamedTuple):
    """A tensor that its owner has as an attribute, on the host while the layer is away."""

    owner: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """What the owner has now."""
        found: torch.Tensor = getattr(self.owner, self.name)
        return found

    def exchange(self, tensor: torch.Tensor) -> None:
        """Give the owner another tensor."""
        setattr(self.owner, self.name, tensor)


def is_packed(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a quantised weight of bitsandbytes."""
    return getattr(parameter, "quant_state", None) is not None or hasattr(parameter, "SCB")


def carriers_of(parameter: Any, module: Any) -> Iterator[Carrier]:
    """Yield what holds the values of a quantised weight of a module.

    ``MatMul4Bit`` keeps a view of the packed weight and the weight's ``QuantState`` as plain attributes of its ``ctx``,
    and ``Linear8bitLt`` computes from ``module.state``; checkpointing drops neither. So each of these tensors has one
    device storage for good: it is emptied while the layer is away and filled again before the layer is recomputed, and
    whoever kept a view of it sees the values again. ``QuantState.to()`` would move the state for ever. All of it is
    private to bitsandbytes, seen in 0.50.2; ``test_streaming_quantized.py`` pins it.

    The weight of 8 bits comes last: ``forward`` makes it the state's tensor, and put away it has the host's again.
    """
    if hasattr(parameter, "SCB"):
        if parameter.CB is not None:  # until the first forward pass the weight has them
            module.init_8bit_state()
        yield from (Carrier(module.state, name) for name in ("CB", "SCB"))
        return
    yield Carrier(parameter, "data")
    for state in (parameter.quant_state, getattr(parameter.quant_state, "state2", None)):
        for name in ("absmax", "code", "offset"):
            if torch.is_tensor(getattr(state, name, None)):
                yield Carrier(state, name)
