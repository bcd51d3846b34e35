"""Find where a step stopped being finite, and report it: which module, which examples, what to do about it.

The accumulation steps are repeated row by row: a row needs less memory than the step did, and identifies the examples.
Only where no row alone shows what was seen in training is the accumulation step repeated as a whole, with the random
numbers of the step. Cases are ruled out in this order, as each can only be blamed once those before it are known to be
finite: weights, inputs, forward, loss, gradient, loss scale (gradients are finite, but not times that of fp16);
"unknown" is a step that is finite when it is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hf_memopt.binding.model_traits import IGNORED_LABEL
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.techniques.microbatching.splitting import row_count, splittable_batch_reason, splittable_reason
from hf_memopt.techniques.nonfinite.replay import Extent, Place, Replay, StepInputs, bad_weights, replay
from hf_memopt.whole_files import write_whole

__all__ = ["OverflowReport", "diagnose", "diagnose_unrepeated", "write_reports"]

MOST_NAMES = 3  # of weights in a report

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class OverflowReport:
    """One step whose loss or gradients were not finite.

    Args:
        step: the optimizer step, counted from 1.
        case: what was not finite first, in the words of this module's docstring.
        where: the module (``gradient``: the one in whose backward pass it begins), the weight or the column of the
            batch; empty if it is the model itself, outside of it or not known.
        module_class: the module's class; empty if it is not a module.
        dtype: of the values in question.
        largest_value: the largest finite magnitude among them; None if there is none.
        largest_input: the same of the module's inputs, or for a gradient of the module's output.
        accumulation_step: the accumulation step, counted from 0.
        rows: the rows of its batch that show it; empty if only all of them together do.
        examples: indices of those rows in the training data, or of all its rows if a row is not an example; None if
            they cannot be known.
        parameters: the first weights of the model that are not finite, or whose gradients were not.
        loss_scale: of fp16 training; None otherwise.
        precision: the floating-point format of the forward pass: ``fp32``, ``bf16`` or ``fp16``.
        detail: a cause that is visible in the batch, or why the step could not be repeated.
    """

    step: int
    case: str
    where: str = ""
    module_class: str = ""
    dtype: str = ""
    largest_value: float | None = None
    largest_input: float | None = None
    accumulation_step: int | None = None
    rows: tuple[int, ...] = ()
    examples: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()
    loss_scale: float | None = None
    precision: str = "fp32"
    detail: str = ""

    @property
    def remedy(self) -> str:
        """What to try, most promising first."""
        return _remedy(self)

    def __str__(self) -> str:
        return f"step {self.step}: {_finding(self)}{_origin(self)}. {self.remedy}"

    def to_json(self) -> str:
        """Return all fields and the remedy as one line of JSON."""
        return json.dumps({**asdict(self), "remedy": self.remedy})


def write_reports(reports: Sequence[OverflowReport], folder: Path, process_index: int = 0) -> Path:
    """Write reports to ``overflow_report.json`` and, for people, ``.txt``; return the path of the first.

    Processes other than the first put their index into the name.

    Raises:
        OSError: one of them cannot be written; it is then what it was before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "overflow_report" if process_index == 0 else f"overflow_report_rank{process_index}"
    lines = [report.to_json() for report in reports]
    write_whole(folder / f"{stem}.txt", "".join(f"{report}\n" for report in reports))
    path = folder / f"{stem}.json"
    write_whole(path, "[\n" + ",\n".join(lines) + "\n]\n")
    return path


def _finding(report: OverflowReport) -> str:
    named = f"{report.where or 'the model itself'}"
    if report.module_class:
        named += f" ({report.module_class})"
    if report.case == "weights":
        return f"the weights were not finite before it: {', '.join(report.parameters)}"
    if report.case == "inputs":
        return f"the batch itself is not finite, in column {report.where}"
    if report.case == "forward":
        values = _values(report, "input", "finite output")
        return f"the output of {named} is not finite, its inputs are{f' ({values})' if values else ''}"
    if report.case == "loss":
        cause = f": {report.detail}" if report.detail else ""
        return f"the loss is not finite, what it is computed from is{cause}"
    if report.case == "gradient" and not report.module_class:
        return f"the loss is finite, a gradient is not, and no one module is to blame{_of_parameters(report)}"
    if report.case == "gradient":
        values = _values(report, "gradient of its output", "finite gradient of its inputs")
        in_brackets = f" ({values})" if values else ""
        return f"the gradient stops being finite in the backward pass of {named}{in_brackets}{_of_parameters(report)}"
    if report.case == "loss scale":
        return f"the gradients are finite, but not times the loss scale of {report.loss_scale:g}"
    repeated = f"and repeating the step failed ({report.detail})" if report.detail else "but are when it is repeated"
    return f"loss or gradients were not finite, {repeated}"


def _values(report: OverflowReport, given: str, made: str) -> str:
    parts = [] if report.largest_input is None else [f"largest {given} {report.largest_input:.3g}"]
    if report.largest_value is not None:
        parts.append(f"largest {made} {report.largest_value:.3g}")
    return ", ".join([*parts, *([report.dtype] if report.dtype else [])])


def _of_parameters(report: OverflowReport) -> str:
    return f"; first weights with such a gradient: {', '.join(report.parameters)}" if report.parameters else ""


def _origin(report: OverflowReport) -> str:
    if report.accumulation_step is None:
        return ""
    rows = f", rows {_listed(report.rows)}" if report.rows else ", no row alone"
    examples = "" if report.examples is None else f", examples {_listed(report.examples)}"
    return f"; accumulation step {report.accumulation_step}{rows}{examples}"


def _listed(numbers: Sequence[int], most: int = 10) -> str:
    rest = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(str(number) for number in numbers[:most]) + rest


def _remedy(report: OverflowReport) -> str:
    module = report.where or ("the model's forward" if report.module_class else "the loss, or the model's forward")
    calmer = "lower learning_rate, lengthen warmup_steps or set max_grad_norm=1.0"
    if report.case == "weights":
        return "Go back to the last good checkpoint, trainer.train(resume_from_checkpoint=True), and " + calmer
    if report.case == "inputs":
        return f"Mend {report.where} in these examples or leave them out: dataset.select(...)"
    if report.case == "loss":
        if report.detail:
            return "Look at the collator, at truncation and at the labels of these examples"
        return "Look for log(0), a division by zero or a masked class among the labels: add an eps, or leave them out"
    if report.case == "loss scale":
        return f"Set bf16=True instead of fp16=True, which needs no loss scale; where the GPU lacks it, {calmer}"
    if report.precision == "fp16" and report.case in ("forward", "gradient"):
        return f"Set bf16=True instead of fp16=True, or compute {module} in float32; else {calmer}"
    if report.case == "forward":
        values = 'the values of the modules before it: debug="underflow_overflow"'
        return f"Look for sqrt, log or a division of zero in {module}: add an eps inside ({values}); else {calmer}"
    if report.case == "gradient":
        return f"Look for sqrt, log or a division of zero in {module}: add an eps inside; else {calmer}"
    return f"If it comes again, {calmer}, or search with torch.autograd.set_detect_anomaly(True)"


# ---- Diagnosis ------------------------------------------------------------------------------------------------------


def diagnose(
    trainer: Any, window: Sequence[StepInputs], is_loss_bad: Sequence[bool], report: OverflowReport
) -> OverflowReport:
    """Return ``report`` completed with what a repetition of the step shows.

    Args:
        trainer: its model is run again in its current modes.
        window: the accumulation steps.
        is_loss_bad: for each of them, whether its loss was not finite; False for all if only gradients were not.
        report: with step, precision and loss scale.
    """
    failures: list[str] = []
    weights = _attempted(lambda: bad_weights(trainer.model), failures)
    if weights:
        return replace(report, case="weights", where=weights[0], parameters=weights[:MOST_NAMES])
    suspects = [position for position, is_bad in enumerate(is_loss_bad) if is_bad] or list(range(len(window)))
    for position in suspects:
        here = replace(report, accumulation_step=position)
        found = _bad_column(window[position], here)
        found = found or _repeated(trainer, window[position], here, is_loss_bad[position], failures)
        if found is not None:
            return found
    for position in suspects if report.loss_scale is not None else ():
        here = replace(report, accumulation_step=position)
        found = _repeated(trainer, window[position], here, is_loss_bad[position], failures, scale=report.loss_scale)
        if found is not None:
            return replace(found, case="loss scale")
    return replace(report, detail=failures[-1] if failures else "")


def diagnose_unrepeated(
    trainer: Any,
    window: Sequence[StepInputs],
    is_loss_bad: Sequence[bool],
    report: OverflowReport,
    gradients: Sequence[str],
) -> OverflowReport:
    """Return ``report`` completed with what is seen without a forward pass, for which FSDP2 needs all processes.

    Args:
        trainer: its weights are looked at, this process's shards of them.
        window: the accumulation steps.
        is_loss_bad: for each of them, whether its loss was not finite.
        report: with step, precision and loss scale.
        gradients: the names of the parameters whose gradients were not finite.
    """
    if weights := bad_weights(trainer.model):
        return replace(report, case="weights", where=weights[0], parameters=weights[:MOST_NAMES])
    suspects = [position for position, is_bad in enumerate(is_loss_bad) if is_bad]
    for position in suspects or range(len(window)):
        if (found := _bad_column(window[position], replace(report, accumulation_step=position))) is not None:
            return found
    if not suspects:
        return replace(report, case="gradient", parameters=tuple(gradients[:MOST_NAMES]))
    return replace(report, accumulation_step=suspects[0], detail="sharded weights, which all processes gather together")


def _repeated(
    trainer: Any,
    step_inputs: StepInputs,
    report: OverflowReport,
    is_loss_bad: bool,
    failures: list[str],
    *,
    scale: float | None = None,
) -> OverflowReport | None:
    """Repeat an accumulation step by rows, then as a whole; None if it does not show what was seen in training."""

    def attempt(rows: Sequence[int] | None) -> Replay | None:
        found = _attempted(lambda: replay(trainer, step_inputs, rows, scale=scale), failures)
        return found if found is not None and found.shows(is_loss_bad) else None

    shown: dict[int, OverflowReport] = {}
    for row in _rows_alone(trainer.model, step_inputs.inputs):
        if (found := attempt([row])) is not None:
            shown[row] = _described(found, step_inputs, replace(report, rows=(row,)))
    if not shown:
        found = attempt(None)
        return None if found is None else _described(found, step_inputs, report)
    first = next(iter(shown.values()))
    alike = tuple(row for row, one in shown.items() if (one.case, one.where) == (first.case, first.where))
    return replace(first, rows=alike)


def _attempted(attempt: Callable[[], Found], failures: list[str]) -> Found | None:
    """Return the result of an attempt; None if it fails, for lack of memory say, which must not end the run."""
    try:
        return attempt()
    except Exception as error:  # anything that the user's model or compute_loss raises
        failures.append(f"{type(error).__name__}: {error}")
        is_memory = is_out_of_memory(error)
    if is_memory:
        free_failed_step()
    return None


def _rows_alone(model: nn.Module, inputs: Mapping[str, Any]) -> Sequence[int]:
    """Return the rows that can be repeated one by one.

    Rows without a label that counts are left out unless there are no others: alone their mean loss would be 0 / 0.
    """
    if not any(torch.is_tensor(value) and value.dim() > 0 for value in inputs.values()):
        return ()
    if splittable_reason(model) is not None or splittable_batch_reason(inputs) is not None:
        return ()
    every_row = range(row_count(inputs))
    ignored = _ignored_rows(inputs)
    return [row for row in every_row if row not in ignored] or every_row


def _ignored_rows(inputs: Mapping[str, Any]) -> set[int]:
    """Return the rows without a label that counts."""
    labels = inputs.get("labels")
    if not torch.is_tensor(labels) or labels.is_floating_point() or labels.dim() == 0:
        return set()
    flags: list[bool] = (labels == IGNORED_LABEL).unsqueeze(-1).flatten(1).all(1).tolist()
    return {row for row, is_ignored in enumerate(flags) if is_ignored}


def _described(found: Replay, step_inputs: StepInputs, report: OverflowReport) -> OverflowReport:
    if not found.is_loss_finite:
        place = found.forward
        if place is not None and not (place.outputs is not None and place.outputs.only_scalars):
            return _placed(replace(report, case="forward"), place, place.inputs, place.outputs)
        ignored = _ignored_rows(step_inputs.inputs)
        is_cause = bool(ignored) and ignored.issuperset(report.rows or range(row_count(step_inputs.inputs)))
        detail = f"every label there is {IGNORED_LABEL}, so none counts" if is_cause else ""
        return replace(report, case="loss", detail=detail)
    report = replace(report, case="gradient", parameters=found.bad_gradients[:MOST_NAMES])
    if found.backward is None:
        return report
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


def _bad_column(step_inputs: StepInputs, report: OverflowReport) -> OverflowReport | None:
    """Report the first column of a batch that is not finite."""
    for column, value in step_inputs.inputs.items():
        extent = Extent.of(value, allow_masks=True)
        if extent is None or extent.is_finite:
            continue
        rows: tuple[int, ...] = ()
        if torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == row_count(step_inputs.inputs):
            rows = tuple(row for row, one in enumerate(value) if not _holds_only_numbers(one))
        return replace(report, case="inputs", where=column, rows=rows, dtype=extent.dtype, largest_value=extent.largest)
    return None


def _holds_only_numbers(value: torch.Tensor) -> bool:
    extent = Extent.of(value, allow_masks=True)
    return extent is None or extent.is_finite
