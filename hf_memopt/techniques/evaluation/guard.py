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
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from transformers import Trainer
from transformers.trainer_utils import has_length

from hf_memopt.binding.compatibility import check_compatibility
from hf_memopt.binding.model import tensors_in
from hf_memopt.binding.undo import UndoHandle, override_method, set_attribute
from hf_memopt.devices.readings import read_memory
from hf_memopt.notices import notify
from hf_memopt.plain_data import shown
from hf_memopt.techniques import BoundCallback
from hf_memopt.techniques.evaluation.metric_check import Reduce, function_of, name_of, why_whole
from hf_memopt.techniques.evaluation.recovery import recover_predictions
from hf_memopt.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)


class EvaluationGuardCallback(BoundCallback):
    """Bound the memory of ``trainer.evaluate`` and ``trainer.predict``; needs ``attach``. It logs no keys.

    Args:
        reduce: how logits are reduced on the GPU, before anything is kept. ``"argmax"``: the predicted class
            (``class_predictions``). A callable: as stock's ``preprocess_logits_for_metrics``, takes logits and labels.
            None: they stay as they are, since ``compute_metrics`` may need any of them, or are reduced by the
            ``preprocess_logits_for_metrics`` that the Trainer was given. In the first evaluation of each data set
            ``compute_metrics`` is called on one batch both ways; unless it returns the same to 1e-6, predictions stay
            whole if they fit. A function that keeps state always gets them whole.
        card_budget: bytes of outputs on the GPU before they are moved to the host, unless ``eval_accumulation_steps``
            is set. Each move waits for the GPU; while outputs are concatenated twice as much is allocated.

    Attributes:
        handle: takes everything off the trainer again; None before ``attach``.

    Raises:
        ValueError: an argument is invalid; when bound, ``reduce`` is given and so is
            ``preprocess_logits_for_metrics``; in an evaluation, predictions have to stay whole and do not fit.
        MemoryError: in an evaluation whose outputs need more than half of the host memory that is available (all of it
            with ``eval_do_concat_batches=False``, which concatenates nothing).
    """

    technique = "evaluation guard"

    def __init__(self, reduce: Literal["argmax"] | Reduce | None = None, *, card_budget: int | str = "64MiB") -> None:
        super().__init__(reduce, card_budget=card_budget)
        is_argmax = isinstance(reduce, str) and reduce == "argmax"
        if reduce is not None and not is_argmax and not callable(reduce):
            raise ValueError(
                f"reduce={shown(reduce)} is not a reduction of logits; expected None, 'argmax' or a callable that "
                "takes logits and labels. Write: EvaluationGuardCallback(reduce='argmax')"
            )
        self._reduce: Reduce | None = class_predictions if is_argmax else reduce  # type: ignore[assignment]
        self._budget_bytes = parse_bytes(card_budget, "card_budget")

    def change_trainer(self, trainer: Trainer) -> list[UndoHandle]:
        """Guard this trainer's evaluations."""
        _refuse_two_reductions(trainer, self._reduce)
        loop = partial(_evaluation_loop, trainer, self._reduce, self._budget_bytes, {})
        return [recover_predictions(trainer), override_method(trainer, "evaluation_loop", loop)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse incompatible settings before the first evaluation."""
        self._check_bound(state)
        if self.binding.trainer is not None:
            check_compatibility(self.binding.trainer)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound, without training too."""
        self._check_bound(state)

    def _check_bound(self, state: Any) -> None:
        if self.handle is None or not self.handle.is_removed:  # a removed handle lets evaluations run without it
            self.binding.serving(self, state)


def class_predictions(logits: Any, labels: Any) -> Any:
    """Return the class with the largest logit, of shape (batch, ...) for logits of shape (batch, ..., classes).

    Of several outputs the first counts, or with several labels (start and end of a span) the first of each, in a tuple.

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
    if not torch.is_tensor(logits) or not logits.is_floating_point() or logits.dim() < 2 or logits.shape[-1] < 2:
        shown = f"{tuple(logits.shape)} and dtype {logits.dtype}" if torch.is_tensor(logits) else type(logits).__name__
        raise ValueError(
            f"reduce='argmax' found an output of shape {shown}, which are not logits of several classes; expected a "
            "floating point output of shape (batch, ..., classes). Say what to keep: "
            "EvaluationGuardCallback(reduce=lambda logits, labels: ...)"
        )
    return logits.argmax(dim=-1)


# ---- One evaluation -------------------------------------------------------------------------------------------------


def _evaluation_loop(
    trainer: Any,
    reduce: Reduce | None,
    budget_bytes: int,
    checked: dict[tuple[Any, ...], tuple[str, ...]],  # why predictions stay whole, by what was evaluated
    before: Callable[..., Any],
    /,
    dataloader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> Any:
    _refuse_two_reductions(trainer, reduce)
    args, function = trainer.args, function_of(trainer)
    dataset = getattr(dataloader, "dataset", None)
    # what tells a data set from others: a stream is a new object in each evaluation, and so is a data set without its
    # unused columns, but for `_fingerprint`, private, of datasets 5.2
    data_set = getattr(dataset, "_fingerprint", id(dataset)) if has_length(dataset) else None
    case = metric_key_prefix, data_set, id(function), args.batch_eval_metrics
    outputs = _KeptOutputs(trainer, reduce, budget_bytes, dataloader, description)
    if reduce is not None and function is not None:
        outputs.why_whole = checked.get(case)
    with ExitStack() as stack:
        stack.enter_context(set_attribute(trainer, "preprocess_logits_for_metrics", outputs.reduce_and_check))
        stack.enter_context(set_attribute(args, "eval_accumulation_steps", args.eval_accumulation_steps))
        if outputs.why_whole is None and args.include_for_metrics:
            stack.enter_context(override_method(trainer, "prediction_step", outputs.prediction_step))
        found = before(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
    if outputs.why_whole is not None:
        checked[case] = outputs.why_whole
    return found


def _refuse_two_reductions(trainer: Any, reduce: Reduce | None) -> None:
    theirs = trainer.preprocess_logits_for_metrics
    if reduce is not None and theirs is not None:
        raise ValueError(
            f"reduce={_name(reduce)} and preprocess_logits_for_metrics={name_of(theirs)} "
            "would both reduce the logits; expected one of them. Write: EvaluationGuardCallback(reduce=None)"
        )


def _name(reduce: Reduce | None) -> str:
    """Return how a reduction is shown: as it was given, or by its name."""
    return "'argmax'" if reduce is class_predictions else name_of(reduce)


class _KeptOutputs:
    """The outputs that stock keeps during one evaluation, and how many bytes of them are allowed.

    ``preprocess_logits_for_metrics`` gets the outputs of each batch before they are kept, and
    ``eval_accumulation_steps`` is read after each batch.
    """

    def __init__(
        self, trainer: Trainer, reduce: Reduce | None, budget_bytes: int, dataloader: Any, description: str
    ) -> None:
        self._trainer, self._name, self._budget_bytes, self._dataloader = (
            trainer,
            _name(reduce),
            budget_bytes,
            dataloader,
        )
        # why compute_metrics needs them whole, and a remedy; () where it does not, None: not checked yet
        self.why_whole: tuple[str, ...] | None = ()
        self._batch: tuple[Mapping[str, Any], Any] | None = None
        self._reduce = reduce or trainer.preprocess_logits_for_metrics
        self._are_kept = description == "Prediction" or not trainer.args.batch_eval_metrics
        self._chooses_steps = trainer.args.eval_accumulation_steps is None and trainer.args.device.type != "cpu"
        self._largest_bytes = 0
        self._kept_bytes = 0
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun; each of them keeps the outputs of all
        self._available_bytes = read_memory("cpu").host_available_bytes // processes
        self._limit_bytes = self._available_bytes // (2 if trainer.args.eval_do_concat_batches else 1)

    def reduce_and_check(self, logits: Any, labels: Any) -> Any:
        """Reduce the outputs of a batch, and check that there is enough memory; ``preprocess_logits_for_metrics``."""
        if self.why_whole is None and labels is not None:
            self.why_whole = self._checked(logits, labels)
        outputs = logits if self._reduce is None or self.why_whole else self._reduce(logits, labels)
        if not self._are_kept:
            return outputs
        processes = self._trainer.accelerator.num_processes
        on_device_bytes, on_host_bytes = (
            _tensor_bytes(outputs, on_host=is_host) * processes for is_host in (False, True)
        )
        if self._chooses_steps and on_device_bytes > self._largest_bytes:
            self._largest_bytes = on_device_bytes
            self._trainer.args.eval_accumulation_steps = max(1, self._budget_bytes // on_device_bytes)
        if self._kept_bytes == 0:
            self._check_room(on_host_bytes * self._batches())
        self._kept_bytes += on_host_bytes
        self._check_room(self._kept_bytes)  # the first batch may have been a short one
        return outputs

    def prediction_step(
        self, before: Callable[..., Any], model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Note inputs and loss of the first batch, which ``compute_metrics`` may get."""
        found = before(model, inputs, *args, **kwargs)
        self._batch = (inputs, found[0]) if self.why_whole is None else None
        return found

    def _checked(self, logits: Any, labels: Any) -> tuple[str, ...]:
        """Return why predictions stay whole: one answer for all processes, each of which checks its own rows."""
        trainer: Any = self._trainer
        args, processes = trainer.args, trainer.accelerator.num_processes
        (inputs, loss), asked = self._batch or ({}, None), args.include_for_metrics
        rest = {
            "label_ids": labels,
            "inputs": inputs.get(getattr(trainer.model, "main_input_name", "input_ids")) if "inputs" in asked else None,
            "losses": loss.repeat(args.eval_batch_size) if "loss" in asked and loss is not None else None,
        }
        needed_bytes = _tensor_bytes(logits, on_host=True)
        count = next((len(one) for one in tensors_in(logits) if one.dim()), 1)
        rows, few = (
            max(min(count, count * most_bytes // max(2 * needed_bytes, 1)), 1)  # two copies of them
            for most_bytes in (self._limit_bytes, min(self._limit_bytes, self._budget_bytes))
        )
        assert self._reduce is not None  # else nothing is checked
        why = why_whole(trainer, self._reduce, self._name, logits, rest, rows, few)
        needed_bytes *= processes * self._batches() if self._are_kept else 0
        found = gather_object([(why, needed_bytes <= self._limit_bytes)])
        why = next((one for one, _ in found if one), ())
        if why and not all(fits for _, fits in found):
            raise ValueError(self._in_words(why, needed_bytes))
        if why and trainer.is_local_process_zero():
            size = f"{format_bytes(needed_bytes)} of host memory" if needed_bytes else "one batch at a time"
            notify(logger, f"evaluation: {why[0]} Predictions stay whole, {size}. {why[1]}.")
        return why

    def _in_words(self, why: tuple[str, ...], needed_bytes: int) -> str:
        """Return why predictions that stay whole are refused."""
        needed, limit = format_bytes(needed_bytes), format_bytes(self._limit_bytes)
        return f"{why[0]} Whole predictions need {needed} of host memory; only {limit} may be used. {why[1]}"

    def _batches(self) -> int:
        """Return the number of batches; 1 for a stream, whose length is unknown."""
        try:
            return len(self._dataloader)
        except TypeError:
            return 1

    def _check_room(self, needed_bytes: int) -> None:
        if needed_bytes <= self._limit_bytes:
            return
        if self.why_whole:
            raise ValueError(self._in_words(self.why_whole, needed_bytes))
        needed, available, limit = map(format_bytes, (needed_bytes, self._available_bytes, self._limit_bytes))
        half = f"half of the {available} available, because concatenation holds them twice"
        why = half if self._limit_bytes < self._available_bytes else "all that is available"
        raise MemoryError(
            f"evaluation outputs need {needed} of host memory; only {limit} may be used ({why}). Reduce them on "
            "the GPU: EvaluationGuardCallback(reduce='argmax'), or compute metrics batch by batch: "
            "TrainingArguments(..., batch_eval_metrics=True)"
        )


def _tensor_bytes(outputs: Any, *, on_host: bool = False) -> int:
    """Return the bytes of all tensors in nested outputs, or of the arrays on the host, where bfloat16 is float32."""
    return sum(
        tensor.numel() * (4 if on_host and tensor.dtype == torch.bfloat16 else tensor.element_size())
        for tensor in tensors_in(outputs)
    )
