"""Evaluation that cannot blow the card or the host, on stock's own means.

Stock keeps the logits of every batch on the card until the evaluation ends, and then on the host: 160 rows of 128
tokens over 50,000 classes take 4.1 GB, at the moment of concatenation twice that. Here they are

- reduced on the card as the user says (``preprocess_logits_for_metrics``): of 50,000 numbers per token one stays;
- moved to the host (``eval_accumulation_steps``) before more than ``card_budget`` of them is on the card;
- written to disk where the host would hold more than ``host_budget``: ``compute_metrics`` gets memory-mapped arrays.

A batch that does not fit is cut by rows and joined again (``recover_predictions``), which changes no result. Another
batch size would change one: ``eval_loss`` of token-level heads is a mean of batch means, which depends on how rows are
batched. So the batch size stays the user's unless ``batch_size="auto"`` asks for more where memory is free.

Left out: several processes are never spilled to disk, for each gathers the outputs of all; they get an error instead,
before memory is gone. ``eval_do_concat_batches=False`` and ``batch_eval_metrics=True`` neither, whose outputs have
another form or are not kept at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.handles import UndoHandle, override_method
from hf_memopt.devices.memory_reading import measured_device, read_memory
from hf_memopt.techniques.evaluation.outputs import KeptOutputs, OutputSettings, Reduce
from hf_memopt.techniques.evaluation.recovery import recover_predictions
from hf_memopt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = [
    "EvaluationGuardCallback",
    "class_predictions",
    "fitting_batch_size",
    "guard_evaluation",
    "recover_predictions",
]

logger = logging.getLogger(__name__)

MEMORY_MARGIN = 0.8  # of what is free: the longest rows may come in another evaluation
LARGEST_GROWTH = 64  # times the user's batch size


class EvaluationGuardCallback(TrainerCallback):
    """Bound the memory of ``trainer.evaluate`` and ``trainer.predict``; needs ``attach``.

    Args:
        reduce: what becomes of the logits on the card, before anything is kept. ``"argmax"``: the predicted class
            (``class_predictions``). A callable: as stock's ``preprocess_logits_for_metrics``, takes logits and labels.
            None: they stay as they are, since nobody can know what ``compute_metrics`` needs, or are reduced by the
            ``preprocess_logits_for_metrics`` that the Trainer was given.
        batch_size: ``"keep"`` the user's, so ``eval_loss`` stays what it is; ``"auto"``: from the second evaluation on
            as much more as fits into the memory that is free, by what a row took before (one process, CUDA or XPU).
        card_budget: bytes of outputs on the card before they are moved to the host, unless ``eval_accumulation_steps``
            is set. Each move waits for the card; while outputs are concatenated twice as much is held.
        host_budget: bytes of outputs on the host before they go to disk, expected from the first batch; None: a quarter
            of what is available when the evaluation starts.
        spill_folder: where they go; None: ``output_dir``. Not a folder in memory, as ``/tmp`` may be.

    Attributes:
        handle: takes back what was done to the trainer; None while unbound.

    Raises:
        ValueError: at once: a value that is none of these. When bound: ``reduce`` is given and so is
            ``preprocess_logits_for_metrics``.
    """

    technique = "evaluation guard"

    def __init__(
        self,
        reduce: Literal["argmax"] | Reduce | None = None,
        *,
        batch_size: Literal["keep", "auto"] = "keep",
        card_budget: int | str = "64MiB",
        host_budget: int | str | None = None,
        spill_folder: str | None = None,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "reduce": reduce,
            "batch_size": batch_size,
            "card_budget": card_budget,
            "host_budget": host_budget,
            "spill_folder": spill_folder,
        }
        _checked(**self._arguments)
        self.handle: UndoHandle | None = None
        self.binding = Binding()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._arguments), ()  # a copy starts unbound: the handle belongs to one trainer

    def bind(self, trainer: Trainer) -> None:
        """Guard this trainer's evaluations; called by ``attach``."""
        if self.binding.trainer is not trainer:
            self.handle = self.binding.to(trainer, guard_evaluation(trainer, **self._arguments))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot work before the first evaluation comes."""
        self._check_bound(state)
        if self.binding.trainer is not None:
            check_compatibility(self.binding.trainer)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound where nothing is trained."""
        self._check_bound(state)

    def _check_bound(self, state: Any) -> None:
        if self.handle is None or not self.handle.is_removed:  # taken off by hand it lets evaluations be
            self.binding.serving(self, state)


def guard_evaluation(
    trainer: Trainer,
    reduce: Literal["argmax"] | Reduce | None = None,
    *,
    batch_size: Literal["keep", "auto"] = "keep",
    card_budget: int | str = "64MiB",
    host_budget: int | str | None = None,
    spill_folder: str | None = None,
) -> UndoHandle:
    """Bound the memory of one trainer's evaluations; for the arguments see ``EvaluationGuardCallback``.

    Returns:
        A handle that takes it back. Outside an evaluation the trainer's arguments are the user's in any case.

    Raises:
        ValueError: as ``EvaluationGuardCallback`` does.
    """
    settings = _checked(reduce, batch_size, card_budget, host_budget, spill_folder)
    _refuse_two_reductions(trainer, settings.reduce)
    guard = _Guard(trainer, settings)
    handles = [recover_predictions(trainer), override_method(trainer, "evaluation_loop", guard.guarding)]
    if batch_size == "auto":
        handles += [override_method(trainer, name, guard.growing) for name in ("evaluate", "predict")]

    def undo() -> None:
        for handle in handles:
            if handle is not None:
                handle.remove()

    return UndoHandle(undo)


def class_predictions(logits: Any, labels: Any) -> Any:
    """Return the class with the largest logit, of shape (batch, ...) for logits of shape (batch, ..., classes).

    Of several outputs the first counts, or with several labels (start and end of a span) the first of each, in a tuple.

    Raises:
        ValueError: the output holds no logits of several classes.

    Example:
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
            f"reduce='argmax' found an output of shape {shown}, which are no logits of several classes; expected a "
            "floating point output of shape (batch, ..., classes). Say what to keep: "
            "EvaluationGuardCallback(reduce=lambda logits, labels: ...)"
        )
    return logits.argmax(dim=-1)


def fitting_batch_size(batch_size: int, row_bytes: int, free_bytes: int) -> int:
    """Return the batch size, doubled as often as ``row_bytes`` for each row fit into 80 % of ``free_bytes``.

    Example:
        >>> fitting_batch_size(8, row_bytes=10 * 2**20, free_bytes=1000 * 2**20)
        64
    """
    rows = int(free_bytes * MEMORY_MARGIN) // max(row_bytes, 1)
    grown = batch_size
    while grown * 2 <= min(rows, batch_size * LARGEST_GROWTH):
        grown *= 2
    return grown


class _Guard:
    """What one trainer's evaluations share: the settings, and what a row took in the last of them."""

    def __init__(self, trainer: Any, settings: OutputSettings) -> None:
        self.trainer, self.settings = trainer, settings
        self._row_bytes: int | None = None
        self._is_grown = False

    def guarding(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``evaluation_loop``."""

        def evaluation_loop(
            dataloader: Any,
            description: str,
            prediction_loss_only: bool | None = None,
            ignore_keys: list[str] | None = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            trainer, args = self.trainer, self.trainer.args
            _refuse_two_reductions(trainer, self.settings.reduce)
            outputs = KeptOutputs(trainer, self.settings, dataloader, description)
            started_bytes = read_memory(measured_device(args.device)).allocated_bytes
            of_trainer = _restored(trainer, "preprocess_logits_for_metrics", "compute_metrics")
            with closing(outputs), of_trainer, _restored(args, "eval_accumulation_steps"):
                trainer.preprocess_logits_for_metrics = outputs.receive
                if trainer.compute_metrics is not None:
                    trainer.compute_metrics = outputs.handed_to(trainer.compute_metrics)
                output = before(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
                output = output._replace(predictions=outputs.restore(output.predictions))
            self._learn(started_bytes, output.num_samples)
            return output

        return evaluation_loop

    def _learn(self, started_bytes: int | None, samples: int) -> None:
        """Note what a row took. The peak is of the process so far, which in training is too much rather than too
        little: resetting torch's counter would take it from others.
        """
        peak_bytes = read_memory(measured_device(self.trainer.args.device)).peak_allocated_bytes
        if started_bytes is not None and peak_bytes is not None and samples > 0:
            self._row_bytes = (peak_bytes - started_bytes) // min(samples, self.trainer.args.eval_batch_size)

    def growing(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``evaluate`` and ``predict``, which build the data loader."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            arguments = self.trainer.args
            if self._is_grown:  # each dataset of a dict, by the evaluation of all
                return before(*args, **kwargs)
            self._is_grown = True
            try:
                with _restored(arguments, "per_device_eval_batch_size"):
                    arguments.per_device_eval_batch_size = self._batch_size()
                    return before(*args, **kwargs)
            finally:
                self._is_grown = False

        return evaluate

    def _batch_size(self) -> int:
        args = self.trainer.args
        size: int = args.per_device_eval_batch_size
        if self._row_bytes is None or args.world_size > 1 or args.dataloader_persistent_workers:
            return size  # processes would have to agree; loaders that are kept have the former size
        now = read_memory(measured_device(args.device))
        if now.device_total_bytes is None or now.device_used_bytes is None:
            return size
        idle_bytes = (now.reserved_bytes or 0) - (now.allocated_bytes or 0)
        free_bytes = now.device_total_bytes - now.device_used_bytes + idle_bytes
        grown = fitting_batch_size(size, self._row_bytes, free_bytes)
        if grown != size:
            row, free = format_bytes(self._row_bytes), format_bytes(free_bytes)
            logger.info(f"evaluates {grown} rows at a time instead of {size}: a row took {row}, and {free} are free")
        return grown


def _checked(reduce: Any, batch_size: Any, card_budget: Any, host_budget: Any, spill_folder: Any) -> OutputSettings:
    if reduce is not None and reduce != "argmax" and not callable(reduce):
        raise ValueError(
            f"reduce={reduce!r} is no reduction of logits; expected None, 'argmax' or a callable that takes logits and "
            "labels. Write: EvaluationGuardCallback(reduce='argmax')"
        )
    if batch_size not in ("keep", "auto"):
        raise ValueError(
            f"batch_size={batch_size!r} is no rule; expected 'keep' or 'auto'. For a number write: "
            "TrainingArguments(..., per_device_eval_batch_size=16)"
        )
    return OutputSettings(
        reduce=class_predictions if reduce == "argmax" else reduce,
        card_budget_bytes=parse_bytes(card_budget),
        host_budget_bytes=None if host_budget is None else parse_bytes(host_budget),
        spill_folder=spill_folder,
    )


def _refuse_two_reductions(trainer: Any, reduce: Reduce | None) -> None:
    theirs = trainer.preprocess_logits_for_metrics
    if reduce is not None and theirs is not None:
        name = "'argmax'" if reduce is class_predictions else f"<{getattr(reduce, '__name__', type(reduce).__name__)}>"
        raise ValueError(
            f"reduce={name} and preprocess_logits_for_metrics=<{getattr(theirs, '__name__', type(theirs).__name__)}> "
            "would both reduce the logits; expected one of them. Write: EvaluationGuardCallback(reduce=None)"
        )


@contextmanager
def _restored(owner: Any, *names: str) -> Iterator[None]:
    """Leave attributes of one object, which it has itself, as they were."""
    values = {name: getattr(owner, name) for name in names}
    try:
        yield
    finally:
        for name, value in values.items():
            setattr(owner, name, value)
