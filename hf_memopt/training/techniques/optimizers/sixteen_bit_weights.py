"""Update bfloat16 weights so that small updates are not lost, without a float32 copy of the weights.

A bfloat16 number has 8 significant bits: an update below 1/512 of its weight is rounded away, and 50 updates of 1e-4
leave 1.0 at 1.0. Here the update itself runs in float32, on slices of a weight and its gradient, and the result is
rounded to 16 bits in one of two ways:

* ``"stochastic"``: up or down with the probabilities that make the expected weight the float32 result. No memory: 2
  bytes per weight in all.
* ``"kahan"``: to nearest, and what rounding cut off is kept in 16 more bits of optimizer state and added back before
  the next update. The two together are the float32 weight, bit for bit, in 4 bytes.

The state of torch's optimizers is float32 (in a plain 16-bit run it has the weights' dtype, in which a second moment
with ``beta2=0.999`` hardly moves); that of bitsandbytes' is what it was. The update of a slice is bit for bit that of
the whole tensor, since the classes that are accepted work element by element, or in blocks of 256 elements
(bitsandbytes in 8 bits), to which the slices are aligned.

Limitations: gradients stay in 16 bits, and so does their sum over accumulation steps. float16 is refused: its gradients
need a scaler, which needs float32 weights.

Source: stochastic rounding of weights, https://arxiv.org/abs/2010.06192, which also compares Kahan summation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State, Optimizer8bit

from hf_memopt.plain_data import check_word
from hf_memopt.training.devices import choose_precision
from hf_memopt.training.techniques.optimizers.built_classes import (
    ELEMENTWISE,
    Built,
    built_class,
    check_is_class,
    class_name,
    plain_step,
)
from hf_memopt.training.techniques.optimizers.weight_slices import (
    is_rounded,
    part_of,
    round_weights,
    store_part,
    widen_state,
    widened,
)

TECHNIQUE = "16-bit weights"
FIX = 'Call low_memory_optimizer(torch.optim.AdamW, rounding="stochastic").'
SLICE_ELEMENTS = 2**21
"""Elements of a slice, a multiple of bitsandbytes' blocks: at most 32 bytes of temporaries each, so 64 MiB."""
COMPENSATION = "compensation"
"""The key in a parameter's state of what rounding to nearest cut off, int16 of the parameter's shape."""


def sixteen_bit_optimizer(
    optimizer_class: type[torch.optim.Optimizer], rounding: Literal["stochastic", "kahan"] = "stochastic"
) -> Any:
    """Return a subclass of an optimizer class that updates bfloat16 parameters in float32, slice by slice.

    Its optimizers are built and used like the plain ones, and update float32 parameters as these do. Load the model
    with ``dtype=torch.bfloat16``. Gradient release comes after it: it takes the returned class.

    The random numbers of stochastic rounding have generators of their own, seeded by the number of updates so far,
    which ``state_dict`` contains: a resumed run equals the straight one, dropout is not affected, and the processes of
    one run round alike. Checkpoints go both ways between this class and the plain one.

    Args:
        optimizer_class: AdamW, Adam, SGD, RMSprop, Adagrad or another of torch that works element by element, fused or
            not; Adam, AdamW, Lion, RMSprop, Adagrad or SGD of bitsandbytes, in 8 or 32 bits, paged or not; or a
            subclass that keeps their step.
        rounding: ``"stochastic"`` or ``"kahan"``.

    Returns:
        A class, always the same one for the same arguments.

    Raises:
        TypeError: ``optimizer_class`` is not an optimizer class.
        ValueError: ``rounding`` is unknown; the step of the class does not work element by element, or it releases
            gradients already. When an optimizer is built: a parameter is float16, or bfloat16 on a GPU that emulates
            it.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        >>> optimizer = sixteen_bit_optimizer(torch.optim.SGD)([weight], lr=1e-4)
        >>> for _ in range(50):
        ...     weight.grad = torch.full_like(weight, -1.0)
        ...     optimizer.step()
        >>> round(weight.mean(dtype=torch.float32).item(), 3)  # plain SGD leaves it at 1.0
        1.005
    """
    check_is_class(optimizer_class, FIX)
    check_word("rounding", rounding, ("stochastic", "kahan"))
    _check_class(optimizer_class)
    kind = _SixteenBitBitsandbytes if issubclass(optimizer_class, Optimizer8bit) else _SixteenBitTorch
    plain: Any = optimizer_class
    return built_class(kind, plain, rounding=rounding)


class _SixteenBit(Built):
    """The methods that the returned class has before those of its plain class.

    A slice of a parameter is a float32 tensor with a gradient and a state of its own, views of the parameter's. The
    plain class's step runs with ``param_groups`` that contain this slice only, so that each optimizer's arithmetic is
    its own, and foreach or fused implementations see one slice.
    """

    technique = TECHNIQUE
    prefix, described, inner_step = "SixteenBit", "for bfloat16 weights, with {rounding} rounding.", "_rounded_step"
    rounding: str

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._updates = 0  # of 16-bit parameters, since the first step
        super().__init__(params, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_updates": self._updates}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be updated."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _check_parameter(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain class's, with the count from which random numbers follow as ``"rounding_updates"``."""
        return {**super().state_dict(), "rounding_updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state, of the plain class too; float32 stays float32, where the plain class would make it 16 bit."""
        super().load_state_dict(state_dict, *args, **kwargs)
        self._updates = state_dict.get("rounding_updates", self._updates)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, parameter in zip(saved, self._parameters(), strict=True):
            own = self.state.get(parameter, {})
            for key, value in state_dict["state"].get(number, {}).items():
                if torch.is_tensor(value) and own[key].dtype != value.dtype:
                    own[key] = value.to(own[key].device, copy=True)

    def _update(self, parameter: torch.Tensor, update: Callable[[torch.Tensor], None]) -> None:
        """Update a 16-bit parameter; ``update`` updates one float32 slice that has a gradient and a state."""
        state = self.state[parameter]
        widen_state(state, parameter)
        if self.rounding == "kahan" and COMPENSATION not in state:
            state[COMPENSATION] = _nothing_lost(parameter)
        weight = parameter.detach().reshape(-1)  # (elements,): a view, or a copy of what is not contiguous
        gradient = parameter.grad.reshape(-1) if parameter.grad is not None else torch.zeros_like(weight)
        self._updates += 1  # the same random numbers in each process of a run
        seed = random.Random(f"16-bit weights {self._updates}").getrandbits(63)
        generator = torch.Generator(parameter.device).manual_seed(seed)
        before = {key: value for key, value in state.items() if key != COMPENSATION}
        for start in range(0, weight.numel(), SLICE_ELEMENTS):
            part = slice(start, min(start + SLICE_ELEMENTS, weight.numel()))
            lost = state[COMPENSATION].view(-1)[part] if self.rounding == "kahan" else None
            float_slice = widened(weight[part], lost)
            float_slice.grad = gradient[part].float()
            given = {key: part_of(key, value, parameter, part) for key, value in before.items()}
            self.state[float_slice] = dict(given)
            try:
                update(float_slice)
            finally:
                after = self.state.pop(float_slice)
            float_slice.grad = None
            store_part(after, given, state, parameter, part)
            del given, after  # a slice's own state, where it was made now
            round_weights(float_slice, weight[part], lost, generator)
            del float_slice  # before the next one is made
        if not parameter.is_contiguous():
            parameter.detach().copy_(weight.view(parameter.shape))


class _SixteenBitTorch(_SixteenBit):
    """torch's optimizers step what ``param_groups`` contain."""

    _rounded_step: Any

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step float32 parameters as the plain class does, all together, then those of 16 bits one after the other."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        whole = [{**group, "params": [p for p in group["params"] if not is_rounded(p)]} for group in groups]
        self._step_with(whole, self._rounded_step)
        for group in groups:
            for parameter in group["params"]:
                if is_rounded(parameter) and parameter.grad is not None and parameter.numel():
                    self._update(parameter, partial(self._step_slice, group))
        return loss

    def _step_slice(self, group: dict[str, Any], float_slice: torch.Tensor) -> None:
        self._step_with([{**group, "params": [float_slice]}], self._rounded_step)


class _SixteenBitBitsandbytes(_SixteenBit):
    """bitsandbytes has a public method for the update of one parameter, which gradient release calls too."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        optimizer: Any = self
        optimizer.non_castable_tensor_keys.add(COMPENSATION)
        if optimizer.args.max_unorm > 0:
            raise ValueError(
                f"max_unorm={optimizer.args.max_unorm!r} needs the norm of a whole update; expected 0.0, as of AdamW. "
                'Call low_memory_optimizer(bitsandbytes.optim.AdamW, rounding="stochastic").'
            )

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Add the compensation to the plain class's state."""
        plain: Any = super()
        plain.init_state(group, p, gindex, pindex)
        if self.rounding == "kahan" and is_rounded(p):
            self.state[p][COMPENSATION] = _nothing_lost(p)

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter, slice by slice if it has 16 bits."""
        plain: Any = super()
        if not is_rounded(p):
            plain.update_step(group, p, gindex, pindex)
            return
        self._update(p, lambda float_slice: plain.update_step(group, float_slice, gindex, pindex))


def _nothing_lost(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=torch.int16, memory_format=torch.contiguous_format)


def _check_class(optimizer_class: Any) -> None:
    problem = None
    if hasattr(optimizer_class, "why_last"):
        problem = optimizer_class.why_last
    elif not _is_elementwise(optimizer_class):
        problem = (
            "has a step that is not known to work element by element; expected the step of Adam, AdamW, SGD, RMSprop "
            f"or Adagrad in torch.optim, or of these or Lion in bitsandbytes. {FIX}"
        )
    if problem is not None:
        raise ValueError(f"optimizer_class={class_name(optimizer_class)} {problem}")


def _is_elementwise(optimizer_class: Any) -> bool:
    step = plain_step(optimizer_class.step)
    if issubclass(optimizer_class, Optimizer8bit):
        updates = (Optimizer1State.update_step, Optimizer2State.update_step)  # AdEMAMix and others have their own
        return step is plain_step(Optimizer8bit.step) and optimizer_class.update_step in updates
    return step in {plain_step(getattr(torch.optim, name).step) for name in ELEMENTWISE}


def _check_parameter(parameter: torch.Tensor) -> None:
    """Refuse a dtype that cannot be trained."""
    if parameter.dtype == torch.float16:
        raise ValueError(
            f"dtype=torch.float16 of a parameter of shape {tuple(parameter.shape)} cannot be trained: float16 "
            "gradients need a scaler, which needs float32 weights; expected bfloat16 or float32. Load the model with "
            "dtype=torch.bfloat16."
        )
    if is_rounded(parameter) and parameter.device.type == "cuda":
        native = choose_precision()
        if native.emulates_bf16:
            raise ValueError(
                f"dtype=torch.bfloat16 of a parameter of shape {tuple(parameter.shape)} is emulated here: "
                f"{native.reason}; expected float32 weights on this GPU. Load the model with dtype=torch.float32."
            )
