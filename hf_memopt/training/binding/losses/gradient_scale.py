"""Repair the scale of gradients under accumulation where the model's loss ignores ``num_items_in_batch``.

Stock transformers 5.x multiplies the gradients of such a head (BERT classification, T5, ...) by accumulation steps
times processes: it leaves the division to a head that never does it. Stock's own division is switched back on where it
is needed, only there. Heads of transformers are looked up (``known_losses``). Of any other loss, and of a head that is
said to count, since its cross entropy may have been exchanged, the losses of parts of a batch decide
(``loss_of_parts``), before the first backward pass of the first training step that accumulates.

Limitations: losses that are 0 whatever the gradient is, or random, or that need more than one row show too little; a
notice then has the losses that were seen, what was done, and what to set if that is wrong. Of several processes, a loss
that divides stock's by the steps has stock's factor of their number.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn

from hf_memopt.changes import Change, record_changes
from hf_memopt.notices import notify
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.losses.known_losses import counts_items, is_stock, router_coefficient
from hf_memopt.training.binding.losses.loss_of_parts import Finding, compare_parts
from hf_memopt.training.binding.model import unwrap_model
from hf_memopt.training.binding.trials import TRIAL
from hf_memopt.training.binding.undo import UndoHandle, is_overridden, override_method, set_attribute, undo_all

logger = logging.getLogger(__name__)

# A public attribute, named in stock's docstring and read live at every step, after the loss (5.8.1, 5.17.0, 5.23.0;
# pinned by a test).
SWITCH = "model_accepts_loss_kwargs"
WATCHES = "gradient scale"  # the purpose of the override that watches the first step
AVERAGES = "average_tokens_across_devices"  # stock multiplies by the number of processes where it is set


def repair_gradient_scale(trainer: Any) -> UndoHandle:
    """Switch stock's own division by accumulation steps back on where the head ignores ``num_items_in_batch``."""
    restore = set_attribute(trainer, SWITCH, trainer.model_accepts_loss_kwargs)
    if ignores_items(trainer):
        _divide_by_steps(trainer)
    elif not _is_settled(trainer):
        return undo_all(restore, _watch_first_step(trainer))
    return restore


def ignores_items(trainer: Any, labels: Any = None) -> bool | None:
    """Return whether stock's division has to be switched on; None: the first step will show it.

    ``labels``: those of a batch, which may decide what a classification head computes.
    """
    if _is_settled(trainer):
        return False
    counts = counts_items(trainer, labels) if trainer.compute_loss_func is None else None
    return None if counts is None else not counts


def _is_settled(trainer: Any) -> bool:
    """Return whether stock divides already, or the user does."""
    function = trainer.compute_loss_func
    if function is None and not trainer.model_accepts_loss_kwargs:
        return True
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:  # the user says who divides; stock asks from 5.23
        return True
    if not versions.takes(trainer.compute_loss, "num_items_in_batch"):  # a subclass calls its compute_loss its own way
        return True
    return function is not None and not callable(function)  # a word where TRL's losses are not to be divided


def _watch_first_step(trainer: Any) -> UndoHandle:
    """Look at the first loss of the training that is accumulated; divide ``compute_loss_func`` if it is a mean."""
    if is_overridden(trainer, "compute_loss", WATCHES):
        return undo_all()
    is_mean = None  # of compute_loss_func, which stock never divides

    def compute_loss(before: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_mean
        function = trainer.compute_loss_func
        if is_mean is None and model.training and _is_of_use(trainer):
            finding = _find(trainer, before, model, inputs, *args, **kwargs)
            is_mean = finding.is_mean and function is not None
            model_name = type(trainer.model).__name__
            name = model_name if function is None else f"<{getattr(function, '__name__', type(function).__name__)}>"
            _tell(trainer, finding, name)
            if is_mean:
                _record(trainer, "compute_loss_func", name, f"{name} / gradient_accumulation_steps", "it")
            elif finding.is_mean:
                _divide_by_steps(trainer)
        if not is_mean:
            if is_mean is not None:
                handle.remove()
            return before(model, inputs, *args, **kwargs)
        with set_attribute(trainer.args, AVERAGES, False):  # nor multiplied by processes, in an evaluation either
            loss = before(model, inputs, *args, **kwargs)
        if not model.training or function is None:
            return loss
        steps = getattr(trainer, "current_gradient_accumulation_steps", 1)
        return (loss[0] / steps, *loss[1:]) if isinstance(loss, tuple) else loss / steps

    handle = override_method(trainer, "compute_loss", compute_loss, purpose=WATCHES)
    return handle


def _find(
    trainer: Any,
    compute_loss: Callable[..., Any],
    model: nn.Module,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Finding:
    """Return whether the loss of a batch is a mean that nobody divides."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    ignores = ignores_items(trainer, labels)
    stock_divides = num_items_in_batch is None and trainer.compute_loss_func is None
    if ignores or stock_divides or _is_settled(trainer):
        return Finding(bool(ignores) and not stock_divides)

    def loss(batch: Any, items: Any) -> Any:
        return compute_loss(model, batch, num_items_in_batch=items, **kwargs)

    finding = compare_parts(trainer, model, inputs, num_items_in_batch, loss)
    if ignores is False and not (finding.is_mean and finding.is_clear):  # it is said to count
        finding = Finding(False)
    if not finding.is_mean and is_stock(trainer, "compute_loss"):
        _warn_of_router(trainer)
    return finding


def _tell(trainer: Any, finding: Finding, loss: str) -> None:
    """Say which losses were seen where they are not clear, what is done, and what to do if that is wrong."""
    if finding.is_clear or not trainer.is_local_process_zero():
        return
    remedy = "a mean over its batch, return it divided: loss / self.args.gradient_accumulation_steps"
    if finding.is_mean:
        remedy = "normalised over all accumulated batches, set: trainer.loss_is_scaled_for_ga = True"
    done = "taken for a mean over its batch" if finding.is_mean else "left as it is"
    shown = f"{finding.losses}, which does not show how the loss of {loss} is normalised"
    notify(logger, f"gradient scale: {shown}. It is {done}. If it is {remedy}")


def _is_of_use(trainer: Any) -> bool:
    """Return whether a loss can be looked at now: in a run, whose steps or processes multiply it, outside of trials.

    With a single one nobody can see who divides, and a later run, as of a search, may accumulate.
    """
    args, processes = trainer.args, trainer.accelerator.num_processes
    is_multiplied = args.gradient_accumulation_steps > 1 or processes > 1 or args.n_gpu > 1
    return bool(trainer.is_in_train and is_multiplied and not is_overridden(trainer, "log", TRIAL))


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
