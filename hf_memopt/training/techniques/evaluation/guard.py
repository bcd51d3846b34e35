"""Evaluation that cannot run out of memory on the GPU or the host, by stock's own means.

Stock keeps the logits of every batch on the GPU until the evaluation ends, and then on the host: 160 rows of 128
tokens over 50,000 classes take 4.1 GB, at the moment of concatenation twice that. Here they are

- reduced on the GPU as the user says (``preprocess_logits_for_metrics``): of 50,000 numbers per token one stays, unless
  ``compute_metrics`` returns something else of them (``metric_check``);
- moved to the host (``eval_accumulation_steps``) before more than ``card_budget`` of them is on the GPU;
- refused with an error before the host's memory runs out: at the first batch if its outputs times the number of
  batches are too many, else at the batch that makes them too many.

A batch that does not fit is split by rows and joined again (``recover_predictions``), which changes no result. The
batch size stays the user's: ``eval_loss`` of token-level heads is a mean of batch means, which depends on how rows are
batched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from transformers import Trainer

from hf_memopt.notices import notify
from hf_memopt.plain_data import shown
from hf_memopt.training.binding import bind_late
from hf_memopt.training.binding.compatibility import check_compatibility
from hf_memopt.training.binding.undo import UndoHandle, override_method, set_attribute, undo_all
from hf_memopt.training.techniques import BoundCallback
from hf_memopt.training.techniques.evaluation.metric_check import Reduce
from hf_memopt.training.techniques.evaluation.outputs import KeptOutputs
from hf_memopt.training.techniques.evaluation.recovery import recover_predictions
from hf_memopt.units import parse_bytes

logger = logging.getLogger(__name__)


class EvaluationGuardCallback(BoundCallback):
    """Bound the memory of ``trainer.evaluate`` and ``trainer.predict``. It logs no keys.

    Args:
        reduce: how logits are reduced on the GPU, before anything is kept. ``"argmax"``: the predicted class
            (``class_predictions``). A callable: as stock's ``preprocess_logits_for_metrics``, takes logits and labels.
            None: they stay as they are, since ``compute_metrics`` may need any of them, or are reduced by the
            ``preprocess_logits_for_metrics`` that the Trainer was given. In the first evaluation
            ``compute_metrics`` is called on one batch both ways; unless it returns the same to 1e-6, predictions stay
            whole if they fit. A function that keeps state always gets them whole. Generated ids stay as they are.
            Without ``compute_metrics`` what ``trainer.predict`` returns is reduced too, which a notice says once.
        card_budget: bytes of outputs on the GPU before they are moved to the host, unless ``eval_accumulation_steps``
            is set. Each move waits for the GPU; while outputs are concatenated twice as much is allocated.

    Attributes:
        handle: takes everything off the trainer again; None until it is bound.

    Raises:
        ValueError: an argument is invalid; when bound, ``reduce`` is given and so is
            ``preprocess_logits_for_metrics``; in an evaluation, predictions have to stay whole and do not fit, or are
            not logits of several classes and ``reduce`` is ``"argmax"``.
        MemoryError: in an evaluation whose outputs need more than half of the host memory that is available (all of it
            with ``eval_do_concat_batches=False``, which concatenates nothing).
    """

    technique = "evaluation guard"

    def __init__(self, reduce: Literal["argmax"] | Reduce | None = None, *, card_budget: int | str = "64MiB") -> None:
        self._arguments: dict[str, Any] = {"reduce": reduce, "card_budget": card_budget}
        _checked(**self._arguments)
        super().__init__(**self._arguments)

    def change_trainer(self, trainer: Trainer) -> list[UndoHandle]:
        """Guard this trainer's evaluations."""
        return [guard_evaluation(trainer, **self._arguments)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse incompatible settings before the first evaluation."""
        bind_late(self, state)
        self._check_bound(state)
        if self.binding.trainer is not None:
            check_compatibility(self.binding.trainer)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound, without training too."""
        self._check_bound(state)

    def _check_bound(self, state: Any) -> None:
        if self.handle is None or not self.handle.is_removed:  # a removed handle lets evaluations run without it
            self.binding.serving(self, state)


def guard_evaluation(
    trainer: Trainer, reduce: Literal["argmax"] | Reduce | None = None, *, card_budget: int | str = "64MiB"
) -> UndoHandle:
    """Bound the memory of one trainer's evaluations; for the arguments see ``EvaluationGuardCallback``."""
    function, budget_bytes = _checked(reduce, card_budget)
    _refuse_two_reductions(trainer, function)
    loop = partial(_evaluation_loop, trainer, function, budget_bytes, {})
    return undo_all(recover_predictions(trainer), override_method(trainer, "evaluation_loop", loop))


def class_predictions(logits: Any, labels: Any) -> Any:
    """Return the class with the largest logit, of shape (batch, ...) for logits of shape (batch, ..., classes).

    Of several outputs the first counts, or with several labels (start and end of a span) the first of each, in a tuple.
    Whole numbers, as of generated text, are ids already and stay as they are.

    Examples:
        >>> class_predictions((torch.tensor([[0.1, 0.9], [2.0, 1.0]]), "hidden states"), None)
        tensor([1, 0])
    """
    outputs = tuple(logits.values()) if isinstance(logits, Mapping) else logits
    if not isinstance(outputs, (tuple, list)):
        return _largest(outputs)
    if isinstance(labels, (tuple, list)) and len(labels) <= len(outputs):
        return tuple(_largest(output) for output in outputs[: len(labels)])
    return class_predictions(outputs[0], labels) if outputs else _largest(outputs)


def _largest(logits: Any) -> Any:
    if torch.is_tensor(logits) and logits.dtype in (torch.int32, torch.int64):
        return logits
    if not torch.is_tensor(logits) or not logits.is_floating_point() or logits.dim() < 2 or logits.shape[-1] < 2:
        shown = f"{tuple(logits.shape)} and dtype {logits.dtype}" if torch.is_tensor(logits) else type(logits).__name__
        raise ValueError(
            f"reduce='argmax' found an output of shape {shown}, which are not logits of several classes; expected a "
            "floating point output of shape (batch, ..., classes). For one label write "
            "EvaluationGuardCallback(reduce=None); say what to keep of others: reduce=lambda logits, labels: ..."
        )
    return logits.argmax(dim=-1)


def _evaluation_loop(
    trainer: Any,
    reduce: Reduce | None,
    budget_bytes: int,
    checked: dict[int, tuple[str, ...]],
    before: Callable[..., Any],
    dataloader: Any,
    description: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Reduce and keep the outputs of one evaluation; ``checked`` has why each function gets them whole, by its id."""
    with ExitStack() as stack:
        outer = getattr(trainer.preprocess_logits_for_metrics, "__self__", None)
        if isinstance(outer, KeptOutputs):  # compute_metrics evaluates itself
            theirs, steps = outer.of_trainer
            stack.enter_context(set_attribute(trainer, "preprocess_logits_for_metrics", theirs))
            stack.enter_context(set_attribute(trainer.args, "eval_accumulation_steps", steps))
        _refuse_two_reductions(trainer, reduce)
        function = getattr(trainer.compute_metrics, "memopt_function", trainer.compute_metrics)
        outputs = KeptOutputs(trainer, reduce, _name(reduce), budget_bytes, dataloader, description)
        if reduce is not None and function is not None:
            outputs.why_whole = checked.get(id(function))
        stack.enter_context(set_attribute(trainer, "preprocess_logits_for_metrics", outputs.reduce_and_check))
        stack.enter_context(
            set_attribute(trainer.args, "eval_accumulation_steps", trainer.args.eval_accumulation_steps)
        )
        found = before(dataloader, description, *args, **kwargs)
    is_unchecked = reduce is class_predictions and function is None and outputs.is_reduced
    if is_unchecked and id(function) not in checked and trainer.is_local_process_zero():  # said once
        notify(
            logger,
            "evaluation: reduce='argmax' reduces what trainer.predict returns without compute_metrics too; "
            "argmax of it is wrong. For logits pass EvaluationGuardCallback(reduce=None).",
        )
    if outputs.why_whole is not None:
        checked[id(function)] = outputs.why_whole
    return found


def _checked(reduce: Any, card_budget: Any) -> tuple[Reduce | None, int]:
    """Return the reduction as a function, and the budget in bytes."""
    is_argmax = isinstance(reduce, str) and reduce == "argmax"
    if reduce is not None and not is_argmax and not callable(reduce):
        raise ValueError(
            f"reduce={shown(reduce)} is not a reduction of logits; expected None, 'argmax' or a callable that takes "
            "logits and labels. Write: EvaluationGuardCallback(reduce='argmax')"
        )
    return class_predictions if is_argmax else reduce, parse_bytes(card_budget, "card_budget")


def _name(function: Any, *, short: bool = True) -> str:
    """Return how a reduction is shown: as it was given, or by its name."""
    is_argmax = short and function is class_predictions
    return "'argmax'" if is_argmax else f"<{getattr(function, '__name__', type(function).__name__)}>"


def _refuse_two_reductions(trainer: Any, reduce: Reduce | None) -> None:
    theirs = trainer.preprocess_logits_for_metrics
    if reduce is not None and theirs is not None:
        raise ValueError(
            f"reduce={_name(reduce)} and preprocess_logits_for_metrics={_name(theirs, short=False)} "
            "would both reduce the logits; expected one of them. Write: EvaluationGuardCallback(reduce=None)"
        )
