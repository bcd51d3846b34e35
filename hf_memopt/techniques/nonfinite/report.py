"""What is told of a step that was not finite: which module, which examples, what to do about it; and its files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from hf_memopt.binding.model import tensors_in
from hf_memopt.whole_files import write_whole


@dataclass(frozen=True, slots=True)
class OverflowReport:
    """One step whose loss or gradients were not finite."""

    step: int  # the optimizer step, counted from 1
    case: str  # what was not finite first, in the words of `diagnosis`
    # the module (`gradient`: the one in whose backward pass it begins), the weight or the column of the batch; empty if
    # it is the model itself, outside of it or not known
    where: str = ""
    module_class: str = ""  # the module's class; empty if it is not a module
    dtype: str = ""  # of the values in question
    # the largest finite magnitude among the values of a forward pass or of a column; else None
    largest_value: float | None = None
    largest_input: float | None = None  # the same of the module's inputs
    accumulation_step: int | None = None  # the accumulation step, counted from 0
    rows: tuple[int, ...] = ()  # the rows of its batch that show it; empty if no single rows do
    # indices of those rows in the training data, or of all its rows if there are none or if a row is not an example;
    # None if they cannot be known
    examples: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()  # the first weights of the model that are not finite, or whose gradients were not
    loss_scale: float | None = None  # of fp16 training; None otherwise
    precision: str = "fp32"  # the floating-point format of the forward pass: `fp32`, `bf16` or `fp16`
    detail: str = ""  # a cause that is visible in the batch, or why the step could not be repeated
    batch: str = ""  # the file beside the report with the batch of the accumulation step; empty if it was not saved

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
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"overflow_report{_rank(process_index)}"
    lines = [report.to_json() for report in reports]
    write_whole(folder / f"{stem}.txt", "".join(f"{report}\n" for report in reports))
    path = folder / f"{stem}.json"
    write_whole(path, "[\n" + ",\n".join(lines) + "\n]\n")
    return path


def save_batch(inputs: Mapping[str, Any], step: int, folder: Path, process_index: int = 0) -> str:
    """Save the tensors of a batch, to be passed to the model again, and return the name of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    name, content = f"overflow_batch_step{step}{_rank(process_index)}.pt", io.BytesIO()
    tensors = {column: value for column, value in inputs.items() if tensors_in(value)}
    torch.save(send_to_device(tensors, "cpu"), content)
    write_whole(folder / name, content.getvalue())
    return name


def _rank(process_index: int) -> str:
    return f"_rank{process_index}" if process_index else ""


def _finding(report: OverflowReport) -> str:
    named = f"{report.where or 'the model itself'}"
    if report.module_class:
        named += f" ({report.module_class})"
    if report.case == "weights":
        return f"the weights were not finite before it: {', '.join(report.parameters)}"
    if report.case == "inputs":
        return f"the batch itself is not finite, in column {report.where}"
    if report.case == "forward":
        return f"the output of {named} is not finite, its inputs are{_values(report)}"
    if report.case == "loss":
        cause = f": {report.detail}" if report.detail else ""
        return f"the loss is not finite, what it is computed from is{cause}"
    if report.case == "gradient" and not report.module_class:
        return f"the loss is finite, a gradient is not, and no one module is to blame{_of_parameters(report)}"
    if report.case == "gradient":
        return f"the gradient stops being finite in the backward pass of {named}{_of_parameters(report)}"
    if report.case == "loss scale":
        return f"the gradients are finite, but not times the loss scale of {report.loss_scale:g}"
    repeated = f"and the step cannot be repeated ({report.detail})" if report.detail else "but are when it is repeated"
    return f"loss or gradients were not finite, {repeated}"


def _values(report: OverflowReport) -> str:
    parts = [] if report.largest_input is None else [f"largest input {report.largest_input:.3g}"]
    if report.largest_value is not None:
        parts.append(f"largest finite output {report.largest_value:.3g}")
    parts += [report.dtype] if report.dtype else []
    return f" ({', '.join(parts)})" if parts else ""


def _of_parameters(report: OverflowReport) -> str:
    return f"; first weights with such a gradient: {', '.join(report.parameters)}" if report.parameters else ""


def _origin(report: OverflowReport) -> str:
    if report.accumulation_step is None:
        return ""
    rows = f", rows {_listed(report.rows)}" if report.rows else ""
    examples = "" if report.examples is None else f", examples {_listed(report.examples)}"
    batch = f", batch in {report.batch}" if report.batch else ""
    return f"; accumulation step {report.accumulation_step}{rows}{examples}{batch}"


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
