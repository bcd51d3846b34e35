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

from hf_memopt.binding.model import IGNORED_LABEL, tensors_in
from hf_memopt.binding.undo import KeptState, RandomState

Reduce = Callable[[Any, Any], Any]

BATCH = "one batch"
TOLERANCE = 1e-6  # of a metric, absolute and relative
LARGEST_STATE_BYTES = 2**26  # of a tensor or an array that is copied, to be put back
FOR_CLASSES = "ids = p.predictions if p.predictions.ndim == p.label_ids.ndim else p.predictions.argmax(-1)"


def why_whole(
    trainer: Any, reduce: Reduce, name: str, whole: Any, rest: Mapping[str, Any], rows: int, few: int
) -> tuple[str, ...]:
    """Return why predictions have to stay whole for ``trainer.compute_metrics``, and a remedy; () for no reason.

    A function that fails on whole predictions alone was written for reduced ones, which are right then. ``whole`` are
    the model's outputs for a batch, of which ``rows`` are taken, and ``few`` may be copied on the GPU; ``rest`` are its
    ``label_ids``, ``inputs`` and ``losses``, None for what the function does not get.
    """
    function = getattr(trainer.compute_metrics, "memopt_function", trainer.compute_metrics)
    shown = f"reduce={name} and compute_metrics=<{getattr(function, '__name__', type(function).__name__)}>"
    if trainer.args.batch_eval_metrics:
        return _of_state(shown, "batch_eval_metrics=True keeps no predictions, so reducing them saves nothing")
    kept = KeptState(largest_copy_bytes=LARGEST_STATE_BYTES, what="a check of compute_metrics")
    kept.look_into(function)
    kept.look_at(trainer.state)
    if kept.unseen:
        return _of_state(shown, f"it uses <{kept.unseen}>, which cannot be put back after a check")
    random_numbers, concat, changes = RandomState.capture(trainer.args.device), trainer.args.eval_do_concat_batches, []

    def values(outputs: dict[str, Any], count: int, times: int) -> Any:
        try:
            prediction = EvalPrediction(**_as_stock_gives(outputs, count, times, concat))
            return denumpify_detensorize(function(prediction))  # type: ignore[no-untyped-call]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            changes.append(kept.has_changed())
            kept.restore()
            random_numbers.restore()

    for which, outputs, count in _cases({"predictions": whole, **rest}, reduce, rows, few):
        reduced = {**outputs, "predictions": reduce(outputs["predictions"], outputs["label_ids"])}
        classes = {one.shape[-1] for one in tensors_in(outputs["predictions"]) if one.dim() > 1}
        times = next(number for number in itertools.count(1) if number * count not in {1, *classes})
        first, is_other = values(outputs, count, times), which != BATCH
        failed = isinstance(first, str)
        if any(changes):
            return () if failed else _of_state(shown, "a call changes what it holds")
        second = values(reduced, count, times)
        if failed and (is_other or not isinstance(second, str)):
            return ()
        if failed or not _same(first, second):
            if not _same(first, values(outputs, count, times)):
                return _of_state(shown, "two calls on the same predictions differ")
            one, other = _where_they_differ(first, second)
            return (
                f"{shown} do not agree: for {which} it returns {one} of whole predictions and {other} of reduced ones; "
                "expected the same.",
                f"Let it take both: {FOR_CLASSES}; or pass EvaluationGuardCallback(reduce=None), or another reduce",
            )
    return ()


def _cases(batch: dict[str, Any], reduce: Reduce, rows: int, few: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield a batch, and its first rows with predictions of several classes, as labels too where these are ids.

    Both ways may agree on a batch by chance: on few rows, or where all are predicted to be of the first class.
    """
    yield BATCH, batch, rows
    index = [row % few for row in range(max(few, 2))]
    other = {
        name: recursively_apply(lambda one: one[index] if one.dim() else one, value) for name, value in batch.items()
    }
    other["predictions"] = recursively_apply(_rolled, other["predictions"])
    ids, labels = reduce(other["predictions"], other["label_ids"]), other["label_ids"]
    are_tensors = torch.is_tensor(ids) and torch.is_tensor(labels)
    if are_tensors and ids.shape == labels.shape and not (ids.is_floating_point() or labels.is_floating_point()):
        other["label_ids"] = torch.where(labels == IGNORED_LABEL, labels, ids)
    yield f"{BATCH} with other predictions", other, len(index)


def _rolled(logits: torch.Tensor) -> torch.Tensor:
    """Return logits with every second row shifted by one class."""
    if not logits.is_floating_point() or logits.dim() < 2:
        return logits
    flat = logits.reshape(-1, logits.shape[-1]).clone()
    flat[1::2] = flat[1::2].roll(1, -1)
    return flat.view(logits.shape)


def _of_state(shown: str, why: str) -> tuple[str, ...]:
    return (
        f"{shown} cannot be checked on one batch: {why}; expected a function that keeps nothing.",
        "To reduce all the same, pass Trainer(..., preprocess_logits_for_metrics=...) and reduce=None",
    )


def _as_stock_gives(outputs: Mapping[str, Any], rows: int, times: int, concat: bool) -> dict[str, Any]:
    """Return copies of a batch's first rows as the arrays that stock gives ``compute_metrics``.

    ``times``: where there is a single row, or as many as classes, ids broadcast against logits, and a comparison that
    would fail returns something, so such rows are taken more than once.
    """
    arrays = {}
    for name, value in outputs.items():
        container = EvalLoopContainer(concat, padding_index=IGNORED_LABEL)
        for _ in range(times if value is not None else 0):
            container.add(recursively_apply(lambda one: one[:rows].to("cpu", copy=True) if one.dim() else one, value))
        arrays[name] = container.get_arrays()  # type: ignore[no-untyped-call]
    return arrays


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    try:
        return bool(np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    except (TypeError, ValueError):  # no numbers, or not equally many
        return bool(np.array_equal(one, other))


def _where_they_differ(one: Any, other: Any) -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [name for name in {**one, **other} if not _same(one.get(name), other.get(name))][:3]
        one, other = ({name: each[name] for name in names if name in each} for each in (one, other))
    return [f"{_rounded(one)!s:.120}", f"{_rounded(other)!s:.120}"]


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
