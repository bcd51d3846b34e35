"""Step each parameter within the backward pass, as soon as it has its gradient, and free that gradient at once.

All gradients together are as large as the weights (4 bytes per parameter in float32); when they are released, only one
exists at a time, at most the largest: 131,072 instead of 919,808 bytes in ``test_gradient_release.py``. Weights,
optimizer state and checkpoints are bit for bit those of the plain optimizer. The price is the fixed Python cost of a
``step()``, paid for each parameter instead of once, and whatever needs all gradients together (its entry in
``technique_list.py``): the norm of all gradients, loss scaling, accumulation, several processes.

Limitations: there is no global norm, so the stock ``Trainer`` logs ``grad_norm`` 0.0 (see ``last_grad_norm``);
optimizers whose parameters depend on each other within a step are refused; an optimizer's step hooks run around
``step()``, where the gradients are gone already.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from torch.utils.hooks import RemovableHandle

from hf_memopt.plain_data import check_value, shown
from hf_memopt.training.binding.compatibility import refusal_of
from hf_memopt.training.binding.undo import UndoHandle
from hf_memopt.training.techniques.optimizers.built_classes import (
    Built,
    built_class,
    check_is_class,
    class_name,
    plain_step,
    steps_alone,
)

TECHNIQUE = "gradient release"
FIX = "Call low_memory_optimizer(torch.optim.AdamW, release=True)."


def gradient_release(
    optimizer_class: type[torch.optim.Optimizer], *, max_tensor_norm: float | None = None, trust: bool = False
) -> Any:
    """Return a subclass of an optimizer class that steps each parameter within the backward pass.

    Its optimizers are built and used like the plain ones, ``step()`` after each backward pass included: it steps the
    parameters that still have a gradient (unfrozen since the last step), and ends the step. Their ``state_dict`` is the
    plain class's, so checkpoints go both ways; learning-rate schedules, weight-decay groups and tied weights work as
    they do there. So does the registration of 32-bit embeddings that stock ``Trainer`` makes for ``optim_bits=8``: it
    goes by the module name of the class, which is the plain one's. A copy or an unpickled optimizer steps as the plain
    one does.

    An optimizer's ``handle.remove()`` takes its hooks off: from then on it is a plain optimizer.
    ``last_grad_norm()`` returns the norm of all gradients of the last step, before clipping, as a tensor on their
    device; None without ``max_tensor_norm``, since only that measures norms.

    Args:
        optimizer_class: of torch or bitsandbytes, transformers' Adafactor, a subclass that keeps their step, or with
            ``trust=True`` any other.
        max_tensor_norm: clip each parameter's gradient by itself to this L2 norm, as ``torch.nn.utils.clip_grad_norm_``
            does for one tensor; ``math.inf`` only measures. It is **not** ``max_grad_norm``, the norm of all gradients
            together: gradients change their proportions to each other, so it changes the training. None by default.
        trust: accept a class that is not known. Its ``step()`` then runs once per parameter, with ``param_groups`` that
            hold this parameter only; training is wrong, without an error, if it computes something over several
            parameters or counts its steps in ``param_groups``.

    Returns:
        A class for ``Trainer(optimizer_cls_and_kwargs=(released_class, {"lr": ...}))``, always the same one for the
        same arguments. With a ``Trainer`` set ``max_grad_norm=0`` and call ``attach(trainer)``, which refuses what
        cannot work.

    Raises:
        TypeError: ``optimizer_class`` is not an optimizer class.
        ValueError: it needs a closure, releases gradients already, is a bitsandbytes class with a step of its own, or
            is not known and ``trust`` is False; ``max_tensor_norm`` is not above 0.
        RuntimeError: in the backward pass, where accelerate or ``torch.distributed`` run fp16, accumulation or several
            processes, or where a parameter would step twice.

    Examples:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = gradient_release(torch.optim.SGD)([layer.weight], lr=1.0)
        >>> before = layer.weight.tolist()
        >>> layer(torch.ones(2)).backward()
        >>> layer.weight.grad is None, layer.weight.tolist() != before  # it has stepped
        (True, True)
        >>> optimizer.step()
    """
    check_is_class(optimizer_class, FIX)
    check_value("trust", trust, bool, False)
    is_number = isinstance(max_tensor_norm, (int, float)) and not isinstance(max_tensor_norm, bool)
    if max_tensor_norm is not None and not (is_number and max_tensor_norm > 0):
        raise ValueError(
            f"max_tensor_norm={shown(max_tensor_norm)} is invalid; expected a norm above 0, or None not to clip. "
            "Pass max_tensor_norm=1.0."
        )
    plain: Any = optimizer_class
    _check_class(plain)
    if not (trust or steps_alone(plain)):
        raise ValueError(
            f"optimizer_class={class_name(plain)} is not known to step each parameter by itself; expected a class with "
            "the step of one in torch.optim, bitsandbytes or transformers, or trust=True. If its step neither combines "
            "parameters nor counts in param_groups, pass trust=True."
        )
    kind = _ReleasedBitsandbytes if issubclass(plain, Optimizer8bit) else _Released
    return built_class(kind, plain, max_tensor_norm=max_tensor_norm)


class _Released(Built):
    """The methods that a released class has before those of its plain class.

    The hook of a parameter runs in the backward pass, once its gradient is complete. It lets the plain class's own
    ``step()`` run with ``param_groups`` that contain this parameter only, so that each optimizer's arithmetic is its
    own, then drops the gradient. ``step()`` itself finds no gradients left, but ends the step: it allows each parameter
    to be stepped again.
    """

    technique = TECHNIQUE
    prefix, described, inner_step = "Released", "that steps within the backward pass.", "_plain_step"
    why_last = (
        "releases gradients already; expected a plain class. "
        'Call low_memory_optimizer(torch.optim.AdamW, release=True, rounding="stochastic").'
    )
    max_tensor_norm: float | None
    _plain_step: Any
    _is_releasing = False
    _is_paused = False
    _is_told = False  # by train(), when a step begins
    _loop: Any = None  # that told it last

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self._places: dict[torch.Tensor, tuple[int, int]] = {}  # group and position of each parameter with a hook
        self._stepped: set[torch.Tensor] = set()  # since the last step()
        self._norms: list[torch.Tensor] = []
        self._last_norms: list[torch.Tensor] = []
        self._lock = threading.Lock()  # the backward pass has one thread per device
        self._hooks: list[RemovableHandle] = []
        own = weakref.ref(self)  # parameters and handles outlive their optimizer
        self._hook = lambda parameter: None if (alive := own()) is None else alive._release(parameter)
        self.handle = UndoHandle(lambda: None if (alive := own()) is None else alive._stop())
        self._is_releasing = True
        self._install_hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (type(self),), self.__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and release its gradients too."""
        super().add_param_group(param_group)
        if self._is_releasing:
            self._install_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._is_releasing:
            self._stepped.clear()  # a checkpoint was loaded
            self._norms.clear()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that still have a gradient, and end the step; returns the closure's loss, if any."""
        if not self._is_releasing:
            return self._plain_step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        remaining = [parameter for parameter in self._parameters() if parameter.grad is not None]
        for parameter in remaining:
            self._clip(parameter)
        if remaining or getattr(self, "is_paged", False):  # paged states are ready only when the plain step has synced
            self._plain_step()
        for parameter in remaining:
            parameter.grad = None
        self._stepped.clear()
        self._last_norms, self._norms = self._norms, []
        self._install_hooks()
        self._is_paused = self._is_told
        return loss

    def train(self) -> None:
        """Begin a step, as stock tells an optimizer before each; what follows its ``step()`` steps nothing then.

        A loop that calls it once only steps in ``step()`` from the second on, and releases nothing.
        """
        plain: Any = getattr(super(), "train", lambda: None)
        plain()
        if (loop := _loop_of_now()) != self._loop:
            self.pause(False)
        self._loop, self._is_told, self._is_paused = loop, True, False

    def last_grad_norm(self) -> torch.Tensor | None:
        """Return the L2 norm of all gradients of the last step before clipping; None if none was measured."""
        if not self._last_norms:
            return None
        device = self._last_norms[0].device
        norms = [norm.to(device, torch.float32) for norm in self._last_norms]
        return torch.nn.utils.get_total_norm(norms)

    def pause(self, is_paused: bool) -> None:
        """Step nothing in backward passes between two runs, or step again; forget a step that was interrupted."""
        self._is_paused = is_paused
        self._stepped.clear()
        self._norms.clear()

    def steps(self, parameter: torch.Tensor) -> bool:
        """Return whether it steps this parameter within the backward pass."""
        return self._is_releasing and not self._is_idle() and parameter in self._places

    def has_counter_on_device(self, parameter: torch.Tensor) -> bool:
        """Return whether the count of steps in a parameter's state is a tensor beside its weight."""
        group = self.param_groups[self._places[parameter][0]]
        return bool(group.get("fused") or group.get("capturable"))

    def step_copy(self, parameter: torch.Tensor, copy: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Step a copy in place of its parameter, on the copy's device; return the state that this leaves.

        ``copy`` has the gradient, and ``state`` is the parameter's as that device has it.
        """
        with self._lock:
            self._begin(parameter, copy.grad)
            self.state[copy] = state
            try:
                self._clip(copy)
                self._step_alone(copy, *self._places[parameter])
            finally:
                state = self.state.pop(copy)
        return state

    def _install_hooks(self) -> None:
        """Register a hook on every parameter that requires a gradient and has no hook yet."""
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._places:
                    self._places[parameter] = (group_index, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook))

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._is_releasing = False

    def _is_idle(self) -> bool:
        """Return whether it is paused, or another loop trains since its own was interrupted."""
        return self._is_paused or (self._is_told and _loop_of_now() != self._loop)

    def _release(self, parameter: torch.Tensor) -> None:
        if self._is_idle():
            return
        with self._lock:
            if parameter.grad is None and parameter in self._stepped:
                return  # a copy has stepped in its place
            self._begin(parameter, parameter.grad)
            self._clip(parameter)
            self._step_alone(parameter, *self._places[parameter])
            parameter.grad = None

    def _begin(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Note that a parameter steps; refuse a second time, and what cannot work."""
        if not self._stepped:
            _check_surroundings()
        if parameter in self._stepped:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient within one step of "
                f"{type(self).__name__}; expected one backward pass per optimizer.step(), and no reentrant "
                "checkpointing. Pass use_reentrant=False, call optimizer.step() after each backward pass, an "
                "interrupted one included, or where another optimizer trains the model by now, handle.remove() of this "
                "one."
            )
        if gradient is None:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} was released before "
                f"{type(self).__name__} saw it; expected one released optimizer per parameter. Call handle.remove() of "
                "the other optimizer."
            )
        self._stepped.add(parameter)

    def _clip(self, parameter: torch.Tensor) -> None:
        if self.max_tensor_norm is not None:
            self._norms.append(torch.nn.utils.clip_grad_norm_(parameter, self.max_tensor_norm))

    def _step_alone(self, parameter: torch.Tensor, group_index: int, index: int) -> None:
        """Run the plain step with one parameter only, and its group's current options."""
        self._step_with([{**self.param_groups[group_index], "params": [parameter]}], self._plain_step)


class _ReleasedBitsandbytes(_Released):
    """bitsandbytes looks overrides up by group and position, so ``param_groups`` stay whole; it has a public method
    for the step of one parameter.
    """

    def _step_alone(self, parameter: torch.Tensor, group_index: int, index: int) -> None:
        optimizer: Any = self
        if not optimizer.initialized:
            optimizer.check_overrides()
            optimizer.to_gpu()
            optimizer.initialized = True
        group = self.param_groups[group_index]
        if not self.state[parameter]:
            optimizer.init_state(group, parameter, group_index, index)
        optimizer.prefetch_state(parameter)
        optimizer.update_step(group, parameter, group_index, index)


def _copied(released: Any) -> Any:
    copied = released.__new__(released)
    copied.handle, copied._last_norms = UndoHandle(lambda: None), []
    return copied


def _check_class(optimizer_class: Any) -> None:
    step = plain_step(optimizer_class.step)
    closure = inspect.signature(step).parameters.get("closure")
    problem = None
    if issubclass(optimizer_class, _Released):
        problem = "releases gradients already; expected a plain class"
    elif closure is not None and closure.default is inspect.Parameter.empty:
        problem = "runs the model several times within one step; expected a class whose step needs no closure"
    elif issubclass(optimizer_class, Optimizer8bit) and step is not plain_step(Optimizer8bit.step):
        problem = "has a step of its own; expected a class with the step of bitsandbytes or of torch"
    if problem is not None:
        raise ValueError(f"optimizer_class={class_name(optimizer_class)} {problem}. {FIX}")


def _loop_of_now() -> Any:
    """Return a reference to the dataloader that accelerate reads now, another one in each run; None without."""
    from accelerate.state import GradientState, is_initialized

    loader = GradientState().active_dataloader if is_initialized() else None
    return None if loader is None else weakref.ref(loader)


def _check_surroundings() -> None:
    """Raise RuntimeError if the state of accelerate or of torch.distributed shows that this cannot work."""
    from accelerate.state import AcceleratorState, GradientState, is_initialized

    setting = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        setting = "DDP" if torch.distributed.get_world_size() > 1 else None
    if is_initialized():
        if AcceleratorState().mixed_precision == "fp16":
            setting = "fp16"
        elif not GradientState().sync_gradients:
            setting = "accumulation"
    if setting is not None:
        raise RuntimeError(str(refusal_of(TECHNIQUE, setting)))
