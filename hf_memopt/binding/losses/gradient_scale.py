"""Repair the scale of gradients under accumulation where the model's loss ignores ``num_items_in_batch``.

Stock transformers 5.x multiplies the gradients of such a head (BERT classification, T5, ...) by accumulation steps
times processes: it leaves the division to a head that never does it. Stock's own division is switched back on where it
is needed, only there. Heads of transformers are looked up (``known_losses``); of any other loss the first training step
that accumulates is watched: a count that stock passed and no operation took is ignored, unless the loss was divided by
the accumulation steps themselves. Nothing is run for it, and nothing read before.

Limitations: a count that only a kernel of one's own reads, in a ``torch.autograd.Function``, is taken for ignored, and
so is one of a loss that is divided by the steps in code with no name for accumulation, unless that comes last:
``trainer.loss_is_scaled_for_ga = True`` says that it is. What ``torch.compile`` has compiled cannot be watched, and a
warning says so. Of several processes, a loss that divides stock's by the steps has stock's factor of their number.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves  # private: pinned by a test, seen in torch 2.6 to 2.13

from hf_memopt.binding import versions
from hf_memopt.binding.losses.known_losses import counts_items, is_stock, router_coefficient
from hf_memopt.binding.model import unwrap_model
from hf_memopt.binding.undo import UndoHandle, is_overridden, override_method, set_attribute, undo_all
from hf_memopt.changes import Change, record_changes
from hf_memopt.notices import notify

logger = logging.getLogger(__name__)

# A public attribute, named in stock's docstring and read live at every step, after the loss (5.8.1, 5.17.0, 5.23.0;
# pinned by a test).
SWITCH = "model_accepts_loss_kwargs"
WATCHES = "gradient scale"  # the purpose of the override that watches the first step
AVERAGES = "average_tokens_across_devices"  # stock multiplies by the number of processes where it is set

# Methods of a tensor that give the same numbers on another device, in another dtype or shape.
SAME_NUMBERS = {"__get__", "clone", "cpu", "cuda", "detach", "double", "float", "long", "to"}
SAME_NUMBERS |= {"contiguous", "expand", "flatten", "reshape", "squeeze", "unsqueeze", "view"}
DIVISIONS = {"__truediv__", "__itruediv__", "div", "div_", "true_divide", "true_divide_"}
PRODUCTS = {"__mul__", "__rmul__", "__imul__", "mul", "mul_", "multiply"}
READ_NUMBERS = {"__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"}


def repair_gradient_scale(trainer: Any) -> UndoHandle:
    """Switch stock's own division by accumulation steps back on where the head ignores ``num_items_in_batch``."""
    restore = set_attribute(trainer, SWITCH, trainer.model_accepts_loss_kwargs)
    ignores = ignores_items(trainer)
    if ignores is None:
        watch = _watch_first_step if trainer.compute_loss_func is None else _watch_function
        return undo_all(restore, watch(trainer))
    if ignores:
        _divide_by_steps(trainer)
    return restore


def ignores_items(trainer: Any) -> bool | None:
    """Return whether stock's division has to be switched on; None: the first step will tell."""
    function = trainer.compute_loss_func
    if function is None and not trainer.model_accepts_loss_kwargs:
        return False  # stock divides already
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:  # of 5.23: the user says who divides
        return False
    if not versions.takes(trainer.compute_loss, "num_items_in_batch"):
        return False  # a subclass that calls its own compute_loss its own way
    if function is not None:  # a word where TRL's losses are not to be divided; that of exact_loss counts
        return None if callable(function) and not hasattr(function, "mean_over") else False
    counts = counts_items(trainer)
    return None if counts is None else not counts


def _watch_first_step(trainer: Any) -> UndoHandle:
    """Watch the first loss of the training, and take out what watches."""
    if is_overridden(trainer, "compute_loss", WATCHES):
        return undo_all()

    def compute_loss(before: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not (model.training and _is_of_use(trainer)):
            return before(model, inputs, *args, **kwargs)
        items = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
        # once more, since labels may decide what a classification head computes
        counts = counts_items(trainer, inputs.get("labels") if isinstance(inputs, Mapping) else None)
        finding = "" if counts is not None or items is None else _hidden(trainer, model, items)
        if counts is not None or finding:
            handle.remove()
            _decide(trainer, items is not None and counts is False, finding)
            return before(model, inputs, *args, **kwargs)
        with _WatchedCount(items, _steps(trainer)) as watched:
            loss = before(model, inputs, *args, **kwargs)
        handle.remove()
        is_divided = watched.has_divided(loss)
        _decide(trainer, items is not None and not is_divided)
        if items is not None and is_divided and is_stock(trainer, "compute_loss"):
            _warn_of_router(trainer)
        return loss

    handle = override_method(trainer, "compute_loss", compute_loss, purpose=WATCHES)
    return handle


def _watch_function(trainer: Any) -> UndoHandle:
    """Watch the first call of ``compute_loss_func`` in training, and divide by the steps if it ignores the count."""
    if is_overridden(trainer, "compute_loss", WATCHES):
        return undo_all()
    found: list[bool] = []  # whether it ignores the count

    def compute_loss(before: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = trainer.compute_loss_func
        with ExitStack() as stack:
            if any(found):  # no number of processes multiplies a mean, in an evaluation either
                stack.enter_context(set_attribute(trainer.args, AVERAGES, False))
            elif not found and model.training and function is not None and _is_of_use(trainer):
                call = partial(_watched, trainer, function, found, stack)
                stack.enter_context(set_attribute(trainer, "compute_loss_func", call))
            loss = before(model, *args, **kwargs)
        if not model.training or function is None:
            return loss
        if not any(found):
            if found:
                handle.remove()
            return loss
        steps = getattr(trainer, "current_gradient_accumulation_steps", 1)
        return (loss[0] / steps, *loss[1:]) if isinstance(loss, tuple) else loss / steps

    handle = override_method(trainer, "compute_loss", compute_loss, purpose=WATCHES)
    return handle


def _watched(
    trainer: Any, function: Callable[..., Any], found: list[bool], stack: ExitStack, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a ``compute_loss_func``, and note whether it ignores its count."""
    items = kwargs.get("num_items_in_batch", args[2] if len(args) > 2 else None)
    with torch.compiler.set_stance("force_eager"), _WatchedCount(items, _steps(trainer)) as watched:
        loss = function(*args, **kwargs)
    outputs = args[0] if args else None  # a loss that the model made of its labels, and its count, all the same
    is_the_models = isinstance(outputs, Mapping) and outputs.get("loss") is not None
    is_counted = items is not None and not torch.is_tensor(items)  # and what takes a number is not seen
    found.append(_of_all(trainer, not (watched.has_divided(loss) or is_counted or is_the_models)))
    if found[0]:
        stack.enter_context(set_attribute(trainer.args, AVERAGES, False))
        name = getattr(function, "__name__", type(function).__name__)
        _record(trainer, "compute_loss_func", f"<{name}>", f"<{name}> / gradient_accumulation_steps", "it")
    return loss


def _is_of_use(trainer: Any) -> bool:
    """Return whether a loss can be watched now: in a run, whose steps or processes multiply it.

    With a single one nobody can see who divides, and a later run, as of a search, may accumulate.
    """
    is_multiplied = _steps(trainer) or trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1
    return bool(trainer.is_in_train and is_multiplied)


def _steps(trainer: Any) -> set[int]:
    """Return what a loss may divide by itself: the accumulation steps, of this window too."""
    of_window = getattr(trainer, "current_gradient_accumulation_steps", 1)
    return {trainer.args.gradient_accumulation_steps, of_window} - {1}


def _of_all(trainer: Any, ignores: bool) -> bool:
    """Return one answer for all processes, as those that count items wait for each other."""
    if trainer.args.world_size == 1:
        return ignores
    return bool(trainer.accelerator.gather(torch.tensor([int(ignores)], device=trainer.args.device)).any())


def _decide(trainer: Any, ignores: bool, finding: str = "") -> None:
    """Switch stock's division on if the loss of any process ignores its count; warn where that could not be seen."""
    if _of_all(trainer, ignores):
        _divide_by_steps(trainer)
    elif finding:
        warnings.warn(
            f"attach could not find out whether the loss of {type(trainer.model).__name__} is normalised by "
            f"num_items_in_batch ({finding}); its gradients may be multiplied by the accumulation steps. If the loss "
            "is a mean over the batch, set: trainer.model_accepts_loss_kwargs = False",
            stacklevel=3,
        )


def _warn_of_router(trainer: Any) -> None:
    """Warn of the loss of a router: no count divides it, so that of each accumulation step and process adds up."""
    args, model, name = trainer.args, unwrap_model(trainer.model), router_coefficient(trainer.model)
    processes = trainer.accelerator.num_processes if args.average_tokens_across_devices else 1
    factor, value = args.gradient_accumulation_steps * processes, attrgetter(name)(model) if name else 0.0
    # the config differs from the model where the user has set the latter
    if (
        not trainer.is_local_process_zero()
        or factor == 1
        or not value
        or math.isclose(value * factor, getattr(model.config, name, value))
    ):
        return
    owner = "trainer.model.get_base_model()" if hasattr(trainer.model, "get_base_model") else "trainer.model"
    warnings.warn(
        f"{name}={value:g} of {type(model).__name__} weighs {value * factor:g}: num_items_in_batch does not divide the "
        f"loss of its router, which accumulation steps x processes multiply by {factor}; expected its mean. "
        f"Set: {owner}.{name} = {value / factor:g}, unless the configuration has been divided already",
        stacklevel=3,
    )


def _divide_by_steps(trainer: Any) -> None:
    setattr(trainer, SWITCH, False)
    _record(trainer, SWITCH, True, False, f"the loss of {type(trainer.model).__name__}")


def _record(trainer: Any, name: str, old: Any, new: Any, loss: str) -> None:
    factor = "so stock would multiply its gradients by accumulation steps x processes"
    change = Change(name, old, new, f"{loss} ignores num_items_in_batch, {factor}")
    if trainer.args.gradient_accumulation_steps * trainer.accelerator.num_processes > 1:
        notify(logger, f"attach changed {change}")  # the losses that are logged differ from stock's
    else:
        logger.info("attach changed %s", change)
    record_changes(trainer, (change,))


def _hidden(trainer: Any, model: nn.Module, items: Any) -> str:
    """Return why the use of a count cannot be seen; "" if it can."""
    if not torch.is_tensor(items):
        return f"it is {items!r}, not a tensor"
    # what torch.compile puts around a module, or leaves on it: private, seen in torch 2.13
    is_hidden = any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())
    return "torch.compile hides what it computes" if is_hidden or versions.is_compiled(trainer.args) else ""


def _is_among(one: Any, numbers: Collection[float]) -> bool:
    return isinstance(one, (int, float)) and one in numbers


class _WatchedCount(TorchFunctionMode):
    """See whether an operation takes ``num_items_in_batch``, or a copy of it, or divides by the accumulation steps.

    Stock's ``compute_loss`` multiplies a loss that it takes for a sum by the number of processes, in place, and nothing
    else (5.8.1, 5.17.0, 5.23.0; pinned by a test). That is left out if the count was not used up to then: the loss is a
    mean.
    """

    def __init__(self, items: Any, steps: Collection[int]) -> None:
        super().__init__()
        self._steps, self._shares = steps, {1 / count for count in steps}
        self.is_used = False
        self._last: Any = None  # what was divided last by a number from outside
        self._same = [] if items is None else [items]
        from transformers import Trainer

        self._stock = Trainer.compute_loss.__code__

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        name = getattr(function, "__name__", "")
        if name == "mul_" and not self.is_used and sys._getframe(1).f_code is self._stock:
            return args[0]
        is_taken = any(part is one for part in tree_leaves((args, kwargs)) for one in self._same)
        result = function(*args, **(kwargs or {}))
        numbers = self._steps if name in DIVISIONS else self._shares if name in PRODUCTS else ()
        if any(_is_among(one, numbers) for one in args):
            self._divides(sys._getframe(1).f_code, name, result)
        if is_taken and torch.is_tensor(result) and name in SAME_NUMBERS:
            self._same.append(result)
        elif is_taken and (torch.is_tensor(result) or name in READ_NUMBERS):
            self.is_used = True
        return result

    def _divides(self, code: CodeType, name: str, result: Any) -> None:
        """Note a division by as many as the steps: a mean of two losses, a weight or a temperature is one as well.

        It is that of the steps where the code names what accumulates; if it does not write the number, only at the end.
        """
        if any("accum" in one for one in (*code.co_names, *code.co_freevars, *code.co_varnames)):
            self.is_used = True
        elif name in DIVISIONS and not any(_is_among(one, self._steps) for one in code.co_consts):
            self._last = result

    def has_divided(self, loss: Any) -> bool:
        """Return whether the count was used, or the last operation divides by the steps."""
        last = loss[0] if isinstance(loss, tuple) else loss
        return self.is_used or (self._last is not None and last is self._last)
