"""Whether ``compute_metrics`` returns the same for reduced predictions as for whole ones, found out with one batch.

A function that calls ``argmax`` itself returns something else of class ids, and nothing fails: the accuracy is wrong,
and with it early stopping and the best model. So the function is called on one batch both ways before reduced
predictions count. What it holds and the random numbers that it draws are put back after each call (``KeptState``); what
it prints, logs elsewhere or writes to a file, is not. A function whose calls change what it holds is not called on
reduced predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from transformers import EvalPrediction
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import denumpify_detensorize

from hf_memopt.training.binding.model import IGNORED_LABEL, tensors_in
from hf_memopt.training.binding.undo import KeptState, RandomState

Reduce = Callable[[Any, Any], Any]

BATCH = "one batch"
TOLERANCE = 1e-6  # of a metric, absolute and relative
LARGEST_STATE_BYTES = 2**26  # of a tensor or an array that is copied, to be put back
FOR_CLASSES = "ids = p.predictions if p.predictions.ndim == p.label_ids.ndim else p.predictions.argmax(-1)"


def why_whole(trainer: Any, reduce: Reduce, name: str, whole: Any, labels: Any, rows: int) -> tuple[str, ...]:
    """Return why predictions have to stay whole for ``trainer.compute_metrics``, and a remedy; () for no reason.

    A function that fails on whole predictions alone was written for reduced ones, which are right then. ``whole`` are
    the model's outputs for a batch, ``name`` is that of ``reduce`` in messages, and ``rows`` of them may be copied.
    """
    function = getattr(trainer.compute_metrics, "memopt_function", trainer.compute_metrics)
    shown = f"reduce={name} and compute_metrics=<{getattr(function, '__name__', type(function).__name__)}>"
    if trainer.args.batch_eval_metrics:
        return _of_state(shown, "batch_eval_metrics=True keeps no predictions, so reducing them saves nothing")
    if trainer.args.include_for_metrics:
        return _of_state(shown, f"include_for_metrics={trainer.args.include_for_metrics!r} gives it more than that")
    kept = KeptState(largest_copy_bytes=LARGEST_STATE_BYTES, what="a check of compute_metrics")
    kept.look_into(function)
    kept.look_at(trainer.state)
    if kept.unseen:
        return _of_state(shown, f"it uses <{kept.unseen}>, which cannot be put back after a check")
    random_numbers, concat, changes = RandomState.capture(trainer.args.device), trainer.args.eval_do_concat_batches, []

    def values(predictions: Any, label_ids: Any, times: int) -> Any:
        try:
            given = [_as_stock_gives(value, times, concat) for value in (predictions, label_ids)]
            return denumpify_detensorize(function(EvalPrediction(*given)))  # type: ignore[no-untyped-call]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            changes.append(kept.has_changed())
            kept.restore()
            random_numbers.restore()

    for which, logits, ids in _cases(whole, labels, reduce, rows):
        counts = {tensor.shape[0] for tensor in tensors_in(logits) if tensor.dim()} or {1}
        classes = {tensor.shape[-1] for tensor in tensors_in(logits) if tensor.dim() > 1}
        times = next(number for number in itertools.count(1) if number * max(counts) not in {1, *classes})
        first = values(logits, ids, times)
        failed = isinstance(first, str)
        if any(changes):
            return () if failed else _of_state(shown, "a call changes what it holds")
        second = values(reduce(logits, ids), ids, times)
        if failed and (which != BATCH or not isinstance(second, str)):
            return ()
        if failed or not _same(first, second):
            if not _same(first, values(logits, ids, times)):
                return _of_state(shown, "two calls on the same predictions differ")
            return (
                f"{shown} do not agree: for {which} it returns {first!s:.120} of whole predictions and {second!s:.120} "
                "of reduced ones; expected the same.",
                f"Let it take both: {FOR_CLASSES}; or pass EvaluationGuardCallback(reduce=None), or another reduce",
            )
    return ()


def _cases(whole: Any, labels: Any, reduce: Reduce, rows: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield the first rows of a batch, and with predictions of several classes, as labels too where these are ids.

    Both ways may agree on a batch by chance: on few rows, or where all are predicted to be of the first class.
    """
    yield BATCH, *_rows_of((whole, labels), slice(rows))
    logits, labels = _rows_of((whole, labels), [row % rows for row in range(max(rows, 2))])
    logits = recursively_apply(_rolled, logits)
    ids = reduce(logits, labels)
    are_tensors = torch.is_tensor(ids) and torch.is_tensor(labels)
    if are_tensors and ids.shape == labels.shape and not (ids.is_floating_point() or labels.is_floating_point()):
        labels = torch.where(labels == IGNORED_LABEL, labels, ids)
    yield f"{BATCH} with other predictions", logits, labels


def _rows_of(values: Any, index: Any) -> Any:
    return recursively_apply(lambda one: one[index] if one.dim() else one, values)


def _rolled(logits: torch.Tensor) -> torch.Tensor:
    """Return logits with every second row shifted by one class."""
    if not logits.is_floating_point() or logits.dim() < 2:
        return logits
    flat = logits.reshape(-1, logits.shape[-1]).clone()
    flat[1::2] = flat[1::2].roll(1, -1)
    return flat.view(logits.shape)


def _of_state(shown: str, why: str) -> tuple[str, ...]:
    return (
        f"{shown} cannot be checked on one batch: {why}; expected a function of predictions and labels alone.",
        "To reduce all the same, pass Trainer(..., preprocess_logits_for_metrics=...) and reduce=None",
    )


def _as_stock_gives(value: Any, times: int, concat: bool) -> Any:
    """Return copies of a batch's rows as the arrays that stock gives ``compute_metrics``.

    ``times``: where there is a single row, or as many as classes, ids broadcast against logits, and a comparison that
    would fail returns something, so such rows are taken more than once.
    """
    container = EvalLoopContainer(concat, padding_index=IGNORED_LABEL)
    for _ in range(times):
        container.add(recursively_apply(lambda one: one.to("cpu", copy=True), value))
    return container.get_arrays()  # type: ignore[no-untyped-call]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    try:
        return bool(np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    except (TypeError, ValueError):  # no numbers, or not equally many
        return bool(np.array_equal(one, other))
