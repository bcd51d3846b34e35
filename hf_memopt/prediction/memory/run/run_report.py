"""Write what a run leaves: the picture of its peaks, its report in the output folder, the section of its model card.

After a failure that ends the run the step is simulated once.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.changes import CHANGES
from hf_memopt.notices import notify
from hf_memopt.plain_data import parse_object, shown
from hf_memopt.prediction.reports.run import FORMAT, read_run, run_name
from hf_memopt.training.binding import checkpointing_of, versions
from hf_memopt.training.binding.model import task_of, unwrap_model
from hf_memopt.training.devices import GPUS
from hf_memopt.training.devices.readings import measured_device, read_context, read_memory
from hf_memopt.units import format_bytes
from hf_memopt.whole_files import warn_unwritten, write_whole

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

    from hf_memopt.prediction.memory.run.run_record import RunRecord
    from hf_memopt.prediction.memory.settings import BatchShape

logger = logging.getLogger(__name__)

VERSIONS = ("hf-memopt", "torch", "transformers", "accelerate")
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")
LONGEST = 200  # characters of a value of a change
ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "optim"),
    *("bf16", "fp16", "tf32", "max_grad_norm", "num_train_epochs", "max_steps", "eval_accumulation_steps"),
)
"""Of ``TrainingArguments``, what memory depends on."""
HEADING = "## Training memory"
SECTION = re.compile(rf"^{HEADING}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)

Peaks = Mapping[str, Mapping[str, int]]


def draw_report(path: Path, peaks: Peaks, record: RunRecord, device: torch.device, trainer: Any) -> None:
    """Draw a run beside its prediction, which needs a trainer; what fails is reported, since training is over."""
    try:
        from hf_memopt.prediction.reports.run import RunPicture

        predicted, reason = None, "without an accelerator the memory of the whole process is measured"
        if device.type != "cpu":
            predicted, reason = _prediction(trainer, record.largest)
        sizes = {} if predicted is None else {name: predicted[name] for name in ("batch_size", "seq_len")}
        batch = " x ".join(str(size) for size in sizes.values() if size is not None)
        phases = {} if predicted is None else predicted["phases"]
        model = "" if trainer is None else f"{type(unwrap_model(trainer.model)).__name__} on "
        name = f"{model}{name_of(device)}"
        RunPicture(record.by_step(), peaks, phases, name=name, batch=batch, reason=reason).write(path)
    except Exception as error:  # a picture must not cost a training its result
        notify(logger, f"plot={str(path)!r} was not drawn ({type(error).__name__}: {error}); the training is whole")


def begin_report(trainer: Any, peaks: Peaks, record: RunRecord) -> None:
    """Put the report of a run that begins in place of an earlier one's, whose page of an out-of-memory goes with it."""
    path = Path(trainer.args.output_dir or "") / run_name(trainer.args.process_index)
    with suppress(OSError, ValueError):
        state = parse_object(path.read_bytes()).get("state")
        path.with_suffix(".html").unlink(missing_ok=True)
        if state == "out of memory":
            path.unlink()
    if trainer.args.should_save:
        write_report(trainer, peaks, record, "training")


def write_report(trainer: Any, peaks: Peaks, record: RunRecord, state: str, *, predict: bool = False) -> None:
    """Write the report of a run whose state is "training" or "finished"; ``predict`` simulates the largest batch."""
    try:
        predicted, reason = _prediction(trainer, record.largest, eval_batch_size=None) if predict else (None, "")
        told = _as_dict(trainer, peaks, record, state, predicted, reason)
        page = _write(trainer, told, record.unwritten, with_page=state == "finished")
        if page is not None and state == "finished":
            notify(logger, f"report of this run: {page}")
    except Exception as error:  # of a device, a driver or a picture; a report must not cost a training its result
        notify(logger, f"there is no report of this run ({error})")


def write_failure(trainer: Any, error: BaseException, peaks: Peaks, record: RunRecord) -> None:
    """Write the report of an out-of-memory that ends the run, as JSON and as a page; nothing is raised."""
    try:
        if record.failure is None or record.phase not in ("forward", "backward"):  # else it was noted as it happened
            record.note_failure(trainer, error)
        else:
            record.failure["error"] = str(error)  # of what gave up, with its advice
        shape, of_evaluation = record.shape or record.largest, None
        if record.phase == "evaluation" and record.shape is not None:
            shape, of_evaluation = record.largest or record.shape, record.shape.rows
        notify(logger, "out of memory: simulating the step, for its report (Ctrl-C to go without)")
        predicted, reason = _prediction(trainer, shape, eval_batch_size=of_evaluation)
        told = _as_dict(trainer, peaks, record, "out of memory", predicted, reason)
        told["plan"] = _plan(trainer, shape, predicted)
        page = _write(trainer, told, record.unwritten, with_page=True)
        if page is not None:
            said = f"what was alive when memory ran out: {page}\n[memopt] to find what fits: {told['plan']}"
            error.add_note(f"[memopt] {said}")
    except (Exception, KeyboardInterrupt) as failed:  # the original error is the one to see
        notify(logger, f"there is no report of the out-of-memory ({type(failed).__name__}: {failed})")


def _write(trainer: Any, told: dict[str, Any], unwritten: set[str], *, with_page: bool = False) -> Path | None:
    """Write JSON, and the page of it where asked for; return the last path, None where one was not written."""
    path = Path(trainer.args.output_dir or "") / run_name(trainer.args.process_index)
    try:
        write_whole(path, json.dumps(told) + "\n")
        if with_page:
            from hf_memopt.prediction.reports.run import run_page

            text = run_page(read_run(path.read_bytes(), str(path)))
            path = path.with_suffix(".html")
            write_whole(path, text)
    except OSError as error:
        warn_unwritten(path, error, "there is no report of this run", unwritten)
        return None
    return path


def _as_dict(
    trainer: Any, peaks: Peaks, record: RunRecord, state: str, predicted: dict[str, Any] | None, reason: str
) -> dict[str, Any]:
    args, model = trainer.args, trainer.model
    reading = read_memory(measured_device(args.device))
    largest = record.largest
    return {
        "format": FORMAT,
        "state": state,
        "model": type(model).__name__,
        "parameters": sum(one.numel() for one in model.parameters()),
        "trainable_parameters": sum(one.numel() for one in model.parameters() if one.requires_grad),
        "device": str(args.device),
        "device_name": reading.device_name,
        "device_bytes": reading.device_total_bytes if reading.has_accelerator else reading.host_total_bytes,
        "context_bytes": read_context(args.device),
        "process": args.process_index,
        "processes": args.world_size,
        "first_step": record.first_step,
        "last_step": trainer.state.global_step,
        "peaks": peaks,
        "components": record.components,
        "steps": record.by_step(),
        "curve": record.curve,
        "batches": {
            "batches": record.batches,
            "examples": record.examples,
            "padded_tokens": record.padded_tokens,
            "tokens": record.tokens,
            "largest_rows": 0 if largest is None else largest.rows,
            "largest_length": None if largest is None else largest.seq_len,
        },
        "changes": [
            {"name": one.name, "old": shown(one.old, LONGEST), "new": shown(one.new, LONGEST), "reason": one.reason}
            for one in getattr(trainer, CHANGES, ())
        ],
        "micro_batching": _micro_batching(trainer),
        "predicted": predicted,
        "out_of_memory": record.failure if state == "out of memory" else None,
        "plan": "",
        "arguments": {
            name: str(getattr(getattr(args, name), "value", getattr(args, name)))
            for name in ARGUMENTS
            if hasattr(args, name)
        },
        "notes": [f"not predicted: {reason}"] if reason else [],
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: os.environ[name] for name in VARIABLES if name in os.environ},
        },
    }


def _plan(trainer: Any, shape: BatchShape | None, predicted: dict[str, Any] | None) -> str:
    """Return what to type to find what fits: a command, or a call where the model has no name that it could load."""
    from hf_memopt.prediction.memory.output import plan_line

    args, model = trainer.args, unwrap_model(trainer.model)
    examples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    gpu = GPUS.get("" if predicted is None else predicted["gpu"])
    given = {
        "gpu": None if gpu is None else gpu.name,  # of this machine by default
        "seq_len": None if shape is None else shape.seq_len,
    }
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    if name:
        return plan_line(name, **given, task=task_of(model), effective_batch=examples)
    known = {**{name: value for name, value in given.items() if value is not None}, "effective_batch_size": examples}
    return f"plan(model, {', '.join(f'{name}={value!r}' for name, value in known.items())})"


def _prediction(trainer: Any, shape: BatchShape | None, **overrides: Any) -> tuple[dict[str, Any] | None, str]:
    """Return what the estimate says of a batch, or None and the reason."""
    from hf_memopt.prediction.memory import estimate_of

    if trainer is None:
        return None, "the callback was not attached; call attach(trainer) before trainer.train()"
    if trainer.args.world_size > 1:
        return None, "several processes"
    if shape is None or not shape.rows:
        return None, "no batch of tensors was seen"
    try:
        found = estimate_of(trainer, shape, **overrides)
    except Exception as error:  # NotEstimableError, and what a user's own model may raise on meta
        return None, str(error)
    return {
        "batch_size": found.batch_size,
        "seq_len": found.seq_len,
        "reserved_bytes": found.peak_reserved_bytes,
        "allocated_bytes": found.peak_allocated_bytes,
        "context_bytes": found.context_bytes,
        "components": found.components,
        "phases": {name: peaks.allocated_bytes for name, peaks in found.phases.items()},
        "gpu": "" if found.gpu is None else found.gpu.name,
        "usable_bytes": None if found.gpu is None else found.gpu.usable_bytes,
    }, ""


def _micro_batching(trainer: Any) -> dict[str, Any] | None:
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "technique", None) == "micro-batching":
            return {
                "steps": callback.tally.steps,
                "cut_steps": callback.tally.cut_steps,
                "failures": callback.tally.failures,
                "lost_seconds": callback.tally.lost_seconds,
                "limits": {name: limit.limit for name, limit in callback.limits.items()},
            }
    return None


def name_of(device: torch.device) -> str:
    """Return what a device is called."""
    return "a CPU" if device.type == "cpu" else read_memory(device).device_name


# ---- Model card


def training_memory(summary: Mapping[str, Mapping[str, int]], device: torch.device, trainer: Any) -> str:
    """Return the section about a ``MemoryReportCallback.summary``, with the arguments of a trainer, if there is one."""
    kinds = list(next(iter(summary.values()), {}))
    heads = [kind.removesuffix("_bytes").replace("_", " ") for kind in kinds]
    lines = [HEADING, "", f"Measured on {name_of(device)} by `hf_memopt.MemoryReportCallback`:", ""]
    lines += [f"| phase | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for phase, sizes in summary.items():
        cells = " | ".join(format_bytes(sizes[kind]) if kind in sizes else "" for kind in kinds)
        lines.append(f"| {phase.replace('_', ' + ')} | {cells} |")
    return "\n".join([*lines, "", *([] if trainer is None else [_settings(trainer.args), ""])])


def _settings(args: TrainingArguments) -> str:
    """Return in one line which arguments decide the memory."""
    precision = versions.mixed_precision(args).replace("no", "fp32")
    batch = f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} examples per step and device"
    checkpointing = ", gradient checkpointing" if checkpointing_of(args)[0] else ""
    return f"Batch: {batch}; {precision}, optimizer `{getattr(args.optim, 'value', args.optim)}`{checkpointing}."


def add_section(card: Path, section: str) -> None:
    """Put the section into a model card, in the place of an older one, else at the end; a missing card stays so."""
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    if SECTION.search(text):
        write_whole(card, SECTION.sub(lambda _: section, text))
    else:
        write_whole(card, f"{text.rstrip()}\n\n{section}")
