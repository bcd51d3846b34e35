"""Find where a step stopped being finite: repeat its micro-batches, row by row.

A repeated row needs less memory than the step did, and tells which examples it is. Only where no row alone shows what
was seen in training is the micro-batch repeated as a whole, with the random numbers of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_memopt.techniques.out_of_memory import is_out_of_memory, release_memory
from hf_memopt.techniques.overflow_replay import Extent, MicroBatch, Place, Replay, bad_weights, replay
from hf_memopt.techniques.overflow_report import OverflowReport
from hf_memopt.techniques.pieces import row_count, splittable_batch_reason, splittable_reason

__all__ = ["MOST_NAMES", "diagnose"]

IGNORED = -100  # the label that losses of transformers leave out
MOST_NAMES = 3  # of weights in a report


def diagnose(
    trainer: Any, window: Sequence[MicroBatch], is_loss_bad: Sequence[bool], report: OverflowReport
) -> OverflowReport:
    """Return ``report`` with what was found out about a step that was not finite.

    Args:
        trainer: its model is repeated as it stands, in the modes that it is in.
        window: the micro-batches of the step.
        is_loss_bad: for each of them whether its loss was not finite; none is where only gradients were not.
        report: step, precision and loss scale are given, and ``parameters`` whose gradients were not finite.
    """
    weights = bad_weights(trainer.model)
    if weights:
        return replace(report, case="weights", where=weights[0], parameters=weights[:MOST_NAMES])
    suspects = [position for position, is_bad in enumerate(is_loss_bad) if is_bad] or list(range(len(window)))
    failures: list[str] = []
    for position in suspects:
        here = replace(report, micro_batch=position)
        found = _bad_column(window[position], here)
        found = found or _repeated(trainer, window[position], here, is_loss_bad[position], failures)
        if found is not None:
            return found
    for position in suspects if report.loss_scale is not None else ():
        here = replace(report, micro_batch=position)
        found = _repeated(trainer, window[position], here, is_loss_bad[position], failures, scale=report.loss_scale)
        if found is not None:
            return replace(found, case="loss scale")
    return replace(report, detail=failures[-1] if failures else "")


def _repeated(
    trainer: Any,
    micro_batch: MicroBatch,
    report: OverflowReport,
    is_loss_bad: bool,
    failures: list[str],
    *,
    scale: float | None = None,
) -> OverflowReport | None:
    """Repeat a micro-batch by rows, then as a whole; None where it does not show what was seen in training."""

    def attempt(rows: Sequence[int] | None) -> Replay | None:
        found = _attempted(lambda: replay(trainer, micro_batch, rows, scale=scale), failures)
        return found if found is not None and found.shows(is_loss_bad) else None

    shown: dict[int, Replay] = {}
    for row in range(row_count(micro_batch.inputs)) if _has_rows(trainer.model, micro_batch.inputs) else ():
        if (found := attempt([row])) is not None:
            shown[row] = found
    first = next(iter(shown.values())) if shown else attempt(None)
    return None if first is None else _described(first, micro_batch, replace(report, rows=tuple(shown)))


def _attempted(repeat: Callable[[], Replay], failures: list[str]) -> Replay | None:
    """Return what a replay shows; None where it fails, for lack of memory say, or for a batch that is too small."""
    try:
        return repeat()
    except Exception as error:  # whatever the user's model or compute_loss raise
        failures.append(f"{type(error).__name__}: {error}")
        is_memory = is_out_of_memory(error)
    if is_memory:
        release_memory()
    return None


def _has_rows(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    if not any(torch.is_tensor(value) and value.dim() > 0 for value in inputs.values()):
        return False
    return splittable_reason(model) is None and splittable_batch_reason(inputs) is None


def _described(found: Replay, micro_batch: MicroBatch, report: OverflowReport) -> OverflowReport:
    place = found.forward
    if place is not None and not (place.outputs is not None and place.outputs.only_scalars):
        return _placed(replace(report, case="forward"), place, place.inputs, place.outputs)
    if not found.is_loss_finite:
        detail = _cause_in_labels(micro_batch.inputs, report.rows)
        return replace(report, case="loss", detail=detail)
    report = replace(report, case="gradient", parameters=found.bad_gradients[:MOST_NAMES])
    if found.backward is None:
        return replace(report, where=found.bad_gradients[0])
    given, made = found.backward.output_gradients, found.backward.input_gradients
    bad = [extent for extent in made if not extent.is_finite]
    return _placed(report, found.backward, given[0] if given else None, bad[0] if bad else None)


def _placed(report: OverflowReport, place: Place, given: Extent | None, made: Extent | None) -> OverflowReport:
    shown = made or given
    return replace(
        report,
        where=place.name,
        module_class=type(place.module).__name__,
        dtype="" if shown is None else shown.dtype,
        largest_value=None if made is None else made.largest,
        largest_input=None if given is None else given.largest,
    )


def _bad_column(micro_batch: MicroBatch, report: OverflowReport) -> OverflowReport | None:
    """Report the first column of a batch that is not finite."""
    for column, value in micro_batch.inputs.items():
        extent = Extent.of(value, allow_masks=True)
        if extent is None or extent.is_finite:
            continue
        rows: tuple[int, ...] = ()
        if torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == row_count(micro_batch.inputs):
            rows = tuple(row for row, one in enumerate(value) if not _holds_only_numbers(one))
        return replace(report, case="inputs", where=column, rows=rows, dtype=extent.dtype, largest_value=extent.largest)
    return None


def _holds_only_numbers(value: torch.Tensor) -> bool:
    extent = Extent.of(value, allow_masks=True)
    return extent is None or extent.is_finite


def _cause_in_labels(inputs: Mapping[str, Any], rows: Sequence[int]) -> str:
    labels = inputs.get("labels")
    if not torch.is_tensor(labels) or labels.is_floating_point() or labels.dim() == 0:
        return ""
    chosen = labels[list(rows)] if rows else labels
    return f"every label there is {IGNORED}, so none counts" if bool((chosen == IGNORED).all()) else ""
