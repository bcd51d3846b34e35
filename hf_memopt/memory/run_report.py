"""Say what happened in a run, for the report that ``MemoryReportCallback`` leaves in its output folder.

Where memory runs out is seen in ``compute_loss`` and accelerate's ``backward``, inside of what recovers from it
(micro-batching), while the failed pass still holds its tensors. Whether anything recovered is known where ``train``
ends.

The trade: two more Python calls per accumulation step and one sum over the attention mask, which is read only when the
report is written. After a failure that ends the run, one simulation of the step, and more to find what fits.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.changes import CHANGES
from hf_memopt.devices.memory_reading import measured_device, read_context, read_memory
from hf_memopt.devices.out_of_memory import is_out_of_memory
from hf_memopt.memory.batch_lengths import BatchShape
from hf_memopt.memory.live_tensors import bytes_on, held_by_trainer, largest_blocks, live_tensors
from hf_memopt.memory.run_record import RunRecord
from hf_memopt.memory.timeline import phase_peaks
from hf_memopt.notices import notify
from hf_memopt.plain_data import shown
from hf_memopt.reports.run_file import FORMAT, run_name
from hf_memopt.whole_files import warn_unwritten, write_whole

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["RunReport"]

logger = logging.getLogger(__name__)

VERSIONS = ("hf-memopt", "torch", "transformers", "accelerate")
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")
LONGEST = 200  # characters of a value of a change
ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "optim"),
    *("bf16", "fp16", "tf32", "max_grad_norm", "num_train_epochs", "max_steps", "eval_accumulation_steps"),
)
"""Of ``TrainingArguments``, what memory depends on."""

Peaks = Mapping[str, Mapping[str, int]]


class RunReport:
    """What a run's report shows beside the peaks, and the writing of it.

    Attributes:
        phase: that runs now: "load", "forward", "backward", "optimizer", "evaluation", or "between steps".
    """

    def __init__(self, first_step: int = 0) -> None:
        self.phase = "load"
        self._first_step = first_step  # those before it were trained in a run that is resumed
        self._components: dict[str, int] = {}
        self._shape: BatchShape | None = None  # of the last pass
        self._failure: dict[str, Any] | None = None  # the last one, whether or not it was recovered from
        self._unwritten: set[str] = set()  # the causes of failed writes that were warned of

    # ---- During the run ---------------------------------------------------------------------------------------------

    def run_forward(
        self, trainer: Any, before: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kw: Any
    ) -> Any:
        """Return ``compute_loss(model, inputs)``; where memory runs out, note first what is alive."""
        self.phase = "forward" if model.training else "evaluation"
        self._shape = BatchShape.of(inputs, count_tokens=False)
        loss = self._watched(trainer, lambda: before(model, inputs, *args, **kw))
        self.phase = "backward" if model.training else "evaluation"
        return loss

    def run_backward(self, trainer: Any, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run accelerate's ``backward``; where memory runs out, note first what is alive."""
        found = self._watched(trainer, lambda: before(*args, **kwargs))
        self.phase = "optimizer"
        return found

    def end_phase(self, trainer: Trainer, phase: str) -> None:
        """Note what is held at the end of the first passes and of the first optimizer step."""
        if phase == "forward_backward" and "gradients" not in self._components:
            held = held_by_trainer(trainer)
            for name in ("weights", "gradients"):
                self._components[name] = bytes_on(trainer.args.device, held[name])
        if phase == "optimizer" and "optimizer state" not in self._components:
            state = held_by_trainer(trainer)["optimizer state"]
            self._components["optimizer state"] = bytes_on(trainer.args.device, state)

    def _watched(self, trainer: Trainer, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            if is_out_of_memory(error):
                self._note_failure(trainer, error)
            raise

    def _note_failure(self, trainer: Any, error: BaseException) -> None:
        """Note what is alive; nothing that goes wrong here may hide the error."""
        try:
            device = measured_device(trainer.args.device)
            components, tensors = live_tensors(trainer, trainer.args.device)
            reading = read_memory(device) if device.type != "cpu" else None
            shape = self._shape
            allocated = None if reading is None else reading.allocated_bytes
            if allocated is not None and allocated > sum(components.values()):
                components["kept by autograd and kernels"] = allocated - sum(components.values())
            self._failure = {
                "step": trainer.state.global_step + 1,
                "phase": self.phase,
                "rows": None if shape is None else shape.rows,
                "length": None if shape is None else shape.seq_len,
                "error": str(error),
                "allocated_bytes": allocated,
                "reserved_bytes": None if reading is None else reading.reserved_bytes,
                "components": components,
                "tensors": tensors,
                "blocks": largest_blocks(trainer, device),
            }
        except Exception as failed:  # a device that has failed may answer nothing
            notify(logger, f"what was alive when memory ran out is unknown ({type(failed).__name__}: {failed})")

    # ---- The file ---------------------------------------------------------------------------------------------------

    def write(self, trainer: Any, peaks: Peaks, record: RunRecord, state: str, *, predict: bool = False) -> None:
        """Write the report of a run that goes on or has finished.

        Args:
            trainer: of the run.
            peaks: of the run so far, by phase and kind.
            record: the peaks of each step, and the batches.
            state: "training" or "finished".
            predict: whether to simulate the largest batch.
        """
        notes: list[str] = []
        try:
            predicted = self._predicted(trainer, record.largest, notes, hints=False) if predict else None
            self._write(trainer, self._as_dict(trainer, peaks, record, state, predicted, notes))
        except RuntimeError as error:  # of a device or a driver; a report must not cost a training its result
            notify(logger, f"there is no report of this run ({error})")

    def write_failure(self, trainer: Any, error: BaseException, peaks: Peaks, record: RunRecord) -> None:
        """Write the report of an out-of-memory that ends the run, as JSON and as a page; nothing is raised."""
        try:
            if self._failure is None or self.phase not in ("forward", "backward"):  # else it was noted as it happened
                self._note_failure(trainer, error)
            elif self._failure is not None:
                self._failure["error"] = str(error)  # of what gave up, with its advice
            notes: list[str] = []
            predicted = self._predicted(trainer, self._shape or record.largest, notes, hints=True)
            told = self._as_dict(trainer, peaks, record, "out of memory", predicted, notes)
            page = self._write(trainer, told, with_page=True)
            if page is not None:
                fits = "" if predicted is None else "".join(f"\n[memopt] {hint}" for hint in predicted["hints"])
                error.add_note(f"[memopt] what was alive when memory ran out: {page}{fits}")
        except (Exception, KeyboardInterrupt) as failed:  # the original error is the one to see
            notify(logger, f"there is no report of the out-of-memory ({type(failed).__name__}: {failed})")

    def _write(self, trainer: Any, told: dict[str, Any], *, with_page: bool = False) -> Path | None:
        """Write JSON, and the page of it where asked for; return the last path, None where nothing was written."""
        import json

        path = Path(trainer.args.output_dir or "") / run_name(trainer.args.process_index)
        try:
            write_whole(path, json.dumps(told) + "\n")
            if with_page:
                from hf_memopt.reports.run_file import read_run
                from hf_memopt.reports.run_page import run_page

                text = run_page(read_run(path.read_bytes(), str(path)))
                path = path.with_suffix(".html")
                write_whole(path, text)
        except OSError as error:
            warn_unwritten(path, error, "there is no report of this run", self._unwritten)
            return None
        return path

    def _as_dict(
        self,
        trainer: Any,
        peaks: Peaks,
        record: RunRecord,
        state: str,
        predicted: dict[str, Any] | None,
        notes: list[str],
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
            "first_step": self._first_step,
            "last_step": trainer.state.global_step,
            "peaks": peaks,
            "components": self._components,
            "steps": record.by_step(),
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
            "out_of_memory": self._failure if state == "out of memory" else None,
            "arguments": {name: _text(getattr(args, name)) for name in ARGUMENTS if hasattr(args, name)},
            "notes": notes,
            "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
            "environment": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                **{name: os.environ[name] for name in VARIABLES if name in os.environ},
            },
        }

    def _predicted(
        self, trainer: Any, shape: BatchShape | None, notes: list[str], *, hints: bool
    ) -> dict[str, Any] | None:
        """Return what the estimate says of a batch; None with a note where it cannot."""
        if shape is None or not shape.rows:
            return None
        if trainer.args.world_size > 1:
            notes.append("not predicted: several processes")
            return None
        from hf_memopt.memory.estimation import with_hints
        from hf_memopt.memory.trainer_estimate import estimate_of

        if hints:
            notify(logger, "out of memory: simulating the step, to find what fits (Ctrl-C to go without)")
        try:
            found = estimate_of(trainer, shape, eval_batch_size=None)
            if hints:
                found = with_hints(trainer.model, found, labels_length=shape.labels_length)
        except Exception as error:  # NotEstimableError, and what a user's own model may raise on meta
            notes.append(f"not predicted: {error}")
            return None
        return {
            "batch_size": found.batch_size,
            "seq_len": found.seq_len,
            "reserved_bytes": found.peak_reserved_bytes,
            "allocated_bytes": found.peak_allocated_bytes,
            "context_bytes": found.context_bytes,
            "components": found.components,
            "phases": {name: peaks["allocated_bytes"] for name, peaks in phase_peaks(found.timeline).items()},
            "gpu": "" if found.gpu is None else found.gpu.name,
            "usable_bytes": None if found.gpu is None else found.gpu.usable_bytes,
            "hints": [str(hint) for hint in found.hints or ()],
        }


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


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
