"""Keep the state of any optimizer in host memory: a chunk of it comes to the GPU for its step and goes back.

Under AdamW the state is twice as large as the weights; here the GPU has two chunks of it, and only while the optimizer
steps. While one chunk is stepped and copied out the next one is copied in, so that a step takes the time of one way
over the bus: 8 bytes a parameter under AdamW, 2 under 8-bit AdamW. It is plain torch, without the managed memory of
paged optimizers, which Windows and WSL lack. Weights and states are bit for bit those of the optimizer without it.

The optimizer's own step runs once for each chunk, and sees the gradients and the state of its parameters alone. A
parameter that has no state yet is a chunk of its own. In ``optimizer.state`` are ordinary tensors on the host, for
saving and resuming, also without this. Tensors below 4 KiB stay on the GPU.

Limitations: no closures. Hooks around the step run once, and see all gradients. Optimizers that are not known to step
each parameter by itself are refused: one that compares gradients, or counts its steps, would do so for each chunk.

Source: the idea of ZeRO-Offload (https://arxiv.org/abs/2101.06840), with the step on the GPU.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from hf_memopt.changes import Change
from hf_memopt.plain_data import shown
from hf_memopt.state_chunks import CHUNK_BYTES, SMALLEST_BYTES, cut_into_chunks
from hf_memopt.training.binding.compatibility import names_of, refusal_of
from hf_memopt.training.binding.model import tensors_in, unwrap_optimizer
from hf_memopt.training.binding.undo import UndoHandle, override_method, set_attribute, undo_all
from hf_memopt.training.techniques import BoundCallback, Lanes
from hf_memopt.training.techniques.optimizers.built_classes import steps_alone
from hf_memopt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from transformers import Trainer

TECHNIQUE = "optimizer state on the host"
_HANDLES: weakref.WeakKeyDictionary[Any, UndoHandle] = weakref.WeakKeyDictionary()
_OUT = "take OptimizerStateOnHostCallback out of callbacks="


def optimizer_state_on_host(
    optimizer: torch.optim.Optimizer, *, chunk_bytes: int = CHUNK_BYTES, lanes: Lanes | None = None
) -> UndoHandle:
    """Keep the state of ``optimizer`` on the host from now on, and step chunk by chunk.

    Call it before schedulers and ``load_state_dict``, which then puts at most a chunk on the GPU at once. Parameters
    on the host, of streamed layers for example, step there as before.

    Args:
        optimizer: of parameters on one GPU, as it is or wrapped by accelerate. Its ``step`` and ``load_state_dict``
            are overridden.
        chunk_bytes: of state in a chunk; a parameter with more is a chunk of its own.
        lanes: makes the copies; for tests.

    Returns:
        A handle whose ``remove()`` brings the state back to the GPU.

    Raises:
        ValueError: the state is paged, is on the host already, or cannot be stepped in chunks.
        TypeError: ``optimizer`` is not one of torch.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(100, 100))
        >>> optimizer = torch.optim.AdamW([weight])
        >>> handle = optimizer_state_on_host(optimizer)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg"].device
        device(type='cpu')
    """
    chunk_bytes = parse_bytes(chunk_bytes, "chunk_bytes")
    inner: Any = unwrap_optimizer(optimizer)
    _check_optimizer(inner)
    waiting = _WaitingState(inner, chunk_bytes, lanes)
    for parameter, state in inner.state.items():
        waiting.store(parameter, state)
    waiting.settle()
    overrides = [override_method(inner, name, getattr(waiting, name)) for name in ("step", "load_state_dict")]
    bring_back = weakref.WeakMethod(waiting.bring_back)  # the overrides keep it alive, which the optimizer has

    def undo() -> None:
        if (method := bring_back()) is not None:
            method()

    handle = _HANDLES[inner] = undo_all(*overrides, UndoHandle(undo))
    return handle


class OptimizerStateOnHostCallback(BoundCallback):
    """Call ``optimizer_state_on_host`` for the ``Trainer``'s optimizer as soon as it is made. It logs no keys.

    Resuming puts at most a chunk of the state on the GPU at once; with several processes stock reads the whole
    file there first, one after the other.

    Args:
        chunk: of state that visits the GPU, as a number of bytes or as text; two are there at once.

    Attributes:
        changes: what was changed, one ``Change``.
        handle: takes everything off the trainer again; None until it is bound.

    Raises:
        ValueError: ``chunk`` is not an amount of memory; as ``optimizer_state_on_host`` does, when training begins.
    """

    technique = TECHNIQUE

    def __init__(self, chunk: int | str = "128MiB") -> None:
        self.chunk, self.chunk_bytes = chunk, parse_bytes(chunk, "chunk")
        super().__init__(chunk)

    def change_trainer(self, trainer: Trainer) -> list[UndoHandle]:
        """Override what makes the optimizer, before accelerate and schedulers look at it."""

        def create_optimizer(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            made = before(*args, **kwargs)
            self._move(unwrap_optimizer(made))
            return made

        return [override_method(trainer, "create_optimizer", create_optimizer), UndoHandle(self._handles.remove)]

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Move the state of an optimizer that was not made by ``create_optimizer``."""
        super().on_train_begin(args, state, control, **kwargs)
        self._move(unwrap_optimizer(optimizer))

    def _move(self, optimizer: Any) -> None:
        if (handle := _HANDLES.get(optimizer)) is None or handle.is_removed:
            self._handles.keep(optimizer, optimizer_state_on_host(optimizer, chunk_bytes=self.chunk_bytes))
            reason = f"copied to the device in chunks of {format_bytes(self.chunk_bytes)}"
            self.note(Change("optimizer state", "on the device", "in host memory", reason))


class _WaitingState:
    """The state of one optimizer, which has this in its overrides, and the copies that are under way."""

    def __init__(self, optimizer: Any, chunk_bytes: int, lanes: Lanes | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._chunk_bytes, self._given_lanes = chunk_bytes, lanes
        self._keys: dict[Any, set[str]] = {}  # which entries of a parameter's state wait
        self._hosts: dict[Any, dict[str, torch.Tensor]] = {}  # where those wait that are on the device now
        self._arriving: dict[Any, dict[str, tuple[torch.Tensor, Any]]] = {}
        self._leaving: list[tuple[torch.Tensor, Any]] = []

    @property
    def lanes(self) -> Lanes:
        """The copies, to the device of the parameters, where they are when the first one is made."""
        if self._given_lanes is None:
            parameters = [p for group in self._alive().param_groups for p in group["params"]]
            places = dict.fromkeys(p.device for p in parameters if p.device.type != "cpu")
            if len(places) > 1:
                raise ValueError(
                    f"optimizer=<{type(self._alive()).__name__}> steps parameters on {', '.join(map(str, places))}; "
                    f"expected one device. Load the model on one, or {_OUT}"
                )
            self._given_lanes = Lanes(next(iter(places), "cpu"))
        return self._given_lanes

    def _alive(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None  # whose methods are running
        return optimizer

    # ---- The overrides

    def step(self, before: Callable[..., Any], closure: Any = None) -> None:
        """Run the optimizer's step once for each chunk, and the hooks around it once."""
        optimizer = self._alive()
        if closure is not None:
            raise ValueError(
                f"closure={shown(closure)} would run once for each chunk of the optimizer's state; expected step() "
                f"without one. Compute the loss before, or {_OUT}"
            )
        hooks = [list(getattr(owner, name).values()) for owner, name in _hooks_of(optimizer)]
        for hook in (*hooks[0], *hooks[1]):
            hook(optimizer, (optimizer,), {})
        with undo_all(*(set_attribute(owner, name, OrderedDict()) for owner, name in _hooks_of(optimizer))):
            self._step_in_chunks(optimizer, before)
        for hook in (*hooks[2], *hooks[3]):
            hook(optimizer, (optimizer,), {})

    def _step_in_chunks(self, optimizer: Any, before: Callable[..., Any]) -> None:
        """Step each chunk beside the copies of the next one and of the last one."""
        groups = optimizer.param_groups
        gradients = {p: p.grad for group in groups for p in group["params"] if p.grad is not None}
        stepping = list(gradients)
        chunks = [stepping[chunk] for chunk in cut_into_chunks(map(self._size, stepping), self._chunk_bytes)]
        state = {p: optimizer.state.pop(p) for p in stepping if p in optimizer.state}
        for parameter in stepping:
            parameter.grad = None
        try:
            for chunk, coming in zip(chunks, [*chunks[1:], []], strict=True):
                self._fetch(chunk, state)  # the first one; all others are on their way
                self._land()
                self._fetch(coming, state)
                self._receive(chunk, state)
                optimizer.state.update((p, state[p]) for p in chunk if p in state)
                try:
                    self._step(before, chunk, gradients)
                finally:
                    for parameter in chunk:
                        if parameter in optimizer.state:
                            state[parameter] = optimizer.state.pop(parameter)
                            self.store(parameter, state[parameter])
        finally:
            self.settle()
            optimizer.state.update(state)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def load_state_dict(
        self, before: Callable[..., Any], state_dict: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Load as the optimizer does, chunk by chunk, each of which goes to the host at once."""
        optimizer, loaded = self._alive(), dict[Any, Any]()
        before({**state_dict, "state": {}}, *args, **kwargs)
        self._keys.clear()
        entries = list(state_dict["state"].items())
        sizes = (sum(tensor.nbytes for tensor in tensors_in(entry)) for _, entry in entries)
        for chunk in cut_into_chunks(sizes, self._chunk_bytes):
            before({**state_dict, "state": dict(entries[chunk])}, *args, **kwargs)
            for parameter, state in optimizer.state.items():
                self.store(parameter, state)
            self.settle()
            loaded |= optimizer.state
        optimizer.state.update(loaded)

    def bring_back(self) -> None:
        """Put the whole state on the device for good."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._fetch(self._keys, optimizer.state)
            self._receive(list(self._keys), optimizer.state)
            self._hosts.clear()

    # ---- The parts of a step

    def _step(self, before: Callable[..., Any], chunk: list[Any], gradients: dict[Any, Any]) -> None:
        for parameter in chunk:
            parameter.grad = gradients[parameter]
        try:
            before()
        finally:
            for parameter in chunk:
                parameter.grad = None

    def _size(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a parameter's state that wait; of one that has none yet those of a whole chunk."""
        state = self._alive().state.get(parameter)
        if not state or parameter not in self._keys:
            return self._chunk_bytes
        return sum(state[key].nbytes for key in self._keys[parameter] if key in state)

    def _fetch(self, chunk: Iterable[Any], state: dict[Any, Any]) -> None:
        """Start to copy the state of parameters to the device, unless that was done."""
        for parameter in chunk:
            if parameter not in self._arriving and parameter in self._keys and parameter in state:
                own = state[parameter]
                waiting = [key for key in own if key in self._keys[parameter] and own[key].device.type == "cpu"]
                self._arriving[parameter] = {key: self.lanes.fetch(own[key]) for key in waiting}

    def _receive(self, chunk: Iterable[Any], state: dict[Any, Any]) -> None:
        """Put what was fetched into the state of its parameters."""
        for parameter in chunk:
            hosts = self._hosts[parameter] = {}
            for key, (tensor, event) in self._arriving.pop(parameter, {}).items():
                self.lanes.ready(event)
                hosts[key], state[parameter][key] = state[parameter][key], tensor

    def store(self, parameter: Any, state: dict[str, Any]) -> None:
        """Start to copy the state of a parameter to the host, and leave its tensors there in it."""
        place, hosts = self.lanes.device.type, self._hosts.pop(parameter, {})
        if not torch.is_tensor(parameter) or parameter.device.type != place:
            return
        keys = self._keys[parameter] = set()
        for key, value in state.items():
            if not torch.is_tensor(value) or value.device.type != place or value.nbytes < SMALLEST_BYTES:
                continue
            keys.add(key)
            host = hosts.get(key)
            is_slow = host is not None and self.lanes.is_async and not host.is_pinned()  # loaded, or copied since
            like = value.dtype, value.shape, value.stride()
            if host is None or is_slow or (host.dtype, host.shape, host.stride()) != like:
                [flat] = self.lanes.host_like([value.as_strided((value.numel(),), (1,))])  # in the order of memory
                host = flat.as_strided(value.shape, value.stride())
            self._leaving.append((value, self.lanes.store(host, value)))
            state[key] = host

    def _land(self) -> None:
        """Wait for the copies out, whose tensors on the device may then be given away."""
        for _, event in self._leaving:
            self.lanes.landed(event)
        self._leaving.clear()

    def settle(self) -> None:
        """Wait for all copies, also for those in of chunks that were not stepped."""
        self._land()
        for fetched in self._arriving.values():
            for _, event in fetched.values():
                self.lanes.landed(event)
        self._arriving.clear()
        self._hosts.clear()


# ---- What cannot work


def _check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer whose state is elsewhere, or whose step is."""
    name = f"optimizer=<{type(optimizer).__name__}>"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{name} is not an optimizer of torch; expected one. Pass trainer.optimizer")
    if (handle := _HANDLES.get(optimizer)) is not None and not handle.is_removed:
        raise ValueError(f"{name} has its state on the host already; expected a plain one. Call remove() of its handle")
    if "gradient release" in names_of(optimizer):
        raise ValueError(str(refusal_of(TECHNIQUE, "gradient release")))
    if getattr(optimizer, "is_paged", False):
        raise ValueError(str(refusal_of(TECHNIQUE, "paged optimizer")))
    if not steps_alone(type(optimizer)):
        raise ValueError(
            f"{name} is not known to step each parameter by itself, and its step would run once for each chunk of its "
            f"state; expected the step of a class of torch or bitsandbytes. Choose AdamW, or {_OUT}"
        )
    if any(hasattr(p, "device_mesh") for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(str(refusal_of(TECHNIQUE, "other sharding")))


def _hooks_of(optimizer: Any) -> list[tuple[Any, str]]:
    """Return where torch keeps the hooks around a step, in the order in which they run; seen in torch 2.6 to 2.14."""
    return [
        (torch_optimizer, "_global_optimizer_pre_hooks"),
        (optimizer, "_optimizer_step_pre_hooks"),
        (optimizer, "_optimizer_step_post_hooks"),
        (torch_optimizer, "_global_optimizer_post_hooks"),
    ]
