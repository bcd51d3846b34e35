"""What is told about a step that was not finite: where it began, in which examples, and what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["CASES", "OverflowReport", "write_reports"]

CASES = {
    "weights": "weights were not finite before the step",
    "inputs": "the batch itself is not finite",
    "forward": "a module made values that are not finite out of finite ones",
    "loss": "the loss is not finite, what it is computed from is",
    "gradient": "loss and values are finite, a gradient is not",
    "loss scale": "gradients are finite, but not times the loss scale of fp16",
    "unknown": "the step was not finite, but is when it is repeated",
}
"""Where a step can stop being finite, in the order in which it is looked for."""


@dataclass(frozen=True, slots=True)
class OverflowReport:
    """One step whose loss or gradients were not finite.

    Args:
        step: the optimizer step, counted from 1.
        case: one of ``CASES``.
        where: the module (``gradient``: the one in whose backward pass it begins), the weight or the column of the
            batch; empty where it is the model itself or not known.
        module_class: the module's class; empty where ``where`` is no module.
        dtype: of the values in question.
        largest_value: the largest finite magnitude among them; None where there is none.
        largest_input: the same of the module's inputs, or for a gradient of the module's output.
        micro_batch: the micro-batch of the step, counted from 0.
        rows: the rows of that micro-batch; empty where it needs them all together.
        examples: indices of those rows in the training data; None where they cannot be known.
        parameters: the first weights that are not finite, or whose gradients were not.
        loss_scale: of fp16 training; None without.
        precision: what the step computed in: ``fp32``, ``bf16`` or ``fp16``.
        detail: a cause that could be read off the batch, or why the step could not be repeated.
    """

    step: int
    case: str
    where: str = ""
    module_class: str = ""
    dtype: str = ""
    largest_value: float | None = None
    largest_input: float | None = None
    micro_batch: int | None = None
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

    Both are complete or not there: each is written under another name first. Processes other than the first put their
    index into the name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "overflow_report" if process_index == 0 else f"overflow_report_rank{process_index}"
    lines = [report.to_json() for report in reports]
    _replace(folder / f"{stem}.txt", "".join(f"{report}\n" for report in reports))
    return _replace(folder / f"{stem}.json", "[\n" + ",\n".join(lines) + "\n]\n")


def _replace(path: Path, text: str) -> Path:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
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
        return f"the output of {named} is not finite, its inputs are ({_values(report, 'input', 'finite output')})"
    if report.case == "loss":
        cause = f": {report.detail}" if report.detail else ""
        return f"the loss is not finite, what it is computed from is{_in_brackets(_values(report, '', 'value'))}{cause}"
    if report.case == "gradient":
        values = _in_brackets(_values(report, "gradient of its output", "finite gradient of its inputs"))
        return f"the gradient stops being finite in the backward pass of {named}{values}{_of_parameters(report)}"
    if report.case == "loss scale":
        return f"the gradients are finite, but not times the loss scale of {report.loss_scale:g}"
    repeated = f"and repeating the step failed ({report.detail})" if report.detail else "but are when it is repeated"
    return f"loss or gradients were not finite, {repeated}{_of_parameters(report)}"


def _values(report: OverflowReport, given: str, made: str) -> str:
    parts = [] if report.largest_input is None else [f"largest {given} {report.largest_input:.3g}"]
    if report.largest_value is not None:
        parts.append(f"largest {made} {report.largest_value:.3g}")
    return ", ".join([*parts, *([report.dtype] if report.dtype else [])])


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _of_parameters(report: OverflowReport) -> str:
    return f"; first weights with such a gradient: {', '.join(report.parameters)}" if report.parameters else ""


def _origin(report: OverflowReport) -> str:
    if report.micro_batch is None:
        return ""
    rows = f", rows {_listed(report.rows)}" if report.rows else ", no row alone"
    examples = "" if report.examples is None else f", examples {_listed(report.examples)}"
    return f"; micro-batch {report.micro_batch}{rows}{examples}"


def _listed(numbers: Sequence[int], most: int = 10) -> str:
    rest = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(str(number) for number in numbers[:most]) + rest


def _remedy(report: OverflowReport) -> str:
    module = report.where or "the model's forward"
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
        return f"Set bf16=True instead of fp16=True, which needs no loss scale; where the card lacks it, {calmer}"
    if report.precision == "fp16" and report.case in ("forward", "gradient"):
        return f"Set bf16=True instead of fp16=True, or compute {module} in float32; else {calmer}"
    if report.case in ("forward", "gradient"):
        return f"Look for sqrt, log or a division of zero in {module}: add an eps inside; else {calmer}"
    return f"If it comes again, {calmer}, or search with torch.autograd.set_detect_anomaly(True)"
