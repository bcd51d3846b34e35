"""Watch the first optimizer steps of a Trainer: peaks by phase, bytes by component, seconds and tokens.

The first steps get the longest rows of the data, so that their peaks are those of a whole run; the others get the run's
own batches and are timed. Forward and backward passes have no events, so ``compute_loss`` and accelerate's ``backward``
are overridden on this one Trainer. Nothing is evaluated, saved, logged or pushed meanwhile, and callbacks of others do
not hear of the end of an epoch or of the training, at which many save.

On a CPU torch counts no bytes, so the operations of the measured steps go through ``StorageTracker``: its bytes are
those that tensors hold, without the allocator's rounding and without what a kernel allocates inside itself. That slows
a step down; steps that are timed run without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from accelerate.utils import send_to_device
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from hf_memopt.batching import token_lengths
from hf_memopt.binding import TrainingView
from hf_memopt.binding.model import tensors_in, unwrap_optimizer
from hf_memopt.binding.undo import UndoHandle, override_method, set_attribute, undo_all
from hf_memopt.devices.readings import (
    PeakMeter,
    free_failed_step,
    is_out_of_memory,
    measured_device,
    read_context,
    read_memory,
)
from hf_memopt.memory.run import MemoryReportCallback, PhasePeaks
from hf_memopt.memory.settings import BatchShape
from hf_memopt.memory.tracking import StorageTracker, bytes_on

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl

MEMORY_STEPS = 2
"""Steps of the longest rows: the first makes the optimizer's state, the second begins with it."""

WARM_UP_STEPS = MEMORY_STEPS + 1
"""Steps before the first that is timed."""

SINKS = "transformers.integrations"  # the module of W&B's, TensorBoard's and other callbacks; seen in 5.8.1 to 5.23.0
REPORTING = (ProgressCallback, PrinterCallback, MemoryReportCallback)
_OFF = ("eval_on_start", "load_best_model_at_end", "auto_find_batch_size", "push_to_hub")


class StepRecorder(TrainerCallback):
    """Record ``WARM_UP_STEPS`` and then ``timed_steps`` steps, and stop the run."""

    def __init__(self, trainer: Trainer, timed_steps: int) -> None:
        self._trainer, self._timed_steps = trainer, timed_steps
        self.longest = LongestRows()  # the rows that come first
        self._ended = 0.0
        self._shown: Any = None  # the progress bar
        self.meter = meter_of(trainer.args.device)
        self.steps = 0  # optimizer steps that were finished
        self.phase = "load"  # that runs now, by the names of an `Estimate`'s phases
        self.out_of_memory = ""  # the phase in which memory ran out
        self.context_bytes: int | None = None  # what the process holds on the GPU besides
        self.peaks = PhasePeaks(self.meter)  # of all steps on an accelerator, of those of the longest rows on a CPU
        # each at its largest: weights, gradients, optimizer state, what a forward pass keeps for the backward pass
        self.components: dict[str, int] = {}
        self.shapes: list[list[BatchShape]] = []  # of each batch, by step
        self.seconds: list[float] = []  # of each timed step, from the end of the step before it

    def run(self, train: Callable[[], Any]) -> None:
        """Let ``train`` take the steps. Memory that runs out ends them; the list of callbacks is changed for good."""
        steps = WARM_UP_STEPS + self._timed_steps
        # on a terminal alone, and gone at the end
        with self._watch(), tqdm(desc="measuring", total=steps, unit="step", disable=None, leave=False) as self._shown:
            try:
                train()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.out_of_memory = self.phase
            if self.out_of_memory:  # after the exception, which holds the step's tensors
                free_failed_step()
            self.context_bytes = read_context(self.meter.device)

    def _watch(self) -> UndoHandle:
        trainer, handler = self._trainer, self._trainer.callback_handler
        own = [one for one in handler.callbacks if not isinstance(one, REPORTING)]
        handler.callbacks[:] = [one for one in own if not type(one).__module__.startswith(SINKS)]
        trainer.add_callback(self)
        return undo_all(
            override_method(trainer, "get_train_dataloader", self.longest.reading),
            override_method(trainer, "get_batch_samples", self._batches),
            override_method(trainer, "compute_loss", self._forward),
            override_method(trainer.accelerator, "backward", self._backward),
            override_method(trainer, "log", lambda before, *args, **kwargs: None),
            override_method(handler, "on_epoch_end", self._for_own_callbacks),
            override_method(handler, "on_train_end", self._for_own_callbacks),
            *(set_attribute(trainer.args, name, False) for name in _OFF),
            UndoHandle(self.meter.end),
        )

    def _for_own_callbacks(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let callbacks of this package alone hear an event."""
        handler = self._trainer.callback_handler
        everyone = handler.callbacks[:]
        handler.callbacks[:] = [one for one in everyone if type(one).__module__.startswith("hf_memopt.")]
        try:
            return before(*args, **kwargs)
        finally:
            handler.callbacks[:] = everyone

    @property
    def largest(self) -> BatchShape | None:
        """The batch of most padded tokens; None before the first."""
        shapes = [shape for of_step in self.shapes for shape in of_step]
        return max(shapes, key=lambda shape: shape.padded_tokens, default=None)

    @property
    def _counts(self) -> bool:
        """Whether bytes are counted: on a CPU only until steps are timed."""
        return self.meter.device.type != "cpu" or self.steps < MEMORY_STEPS

    def _close(self, phase: str) -> None:
        if self._counts:
            self.peaks.close(phase)

    def _note(self, component: str, size_bytes: int) -> None:
        self.components[component] = max(size_bytes, self.components.get(component, 0))

    # ---- What is overridden

    def _batches(
        self, before: Callable[..., Any], iterator: Iterator[Any], number: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Get the longest rows first, and note the shape of each batch."""
        if self.steps < MEMORY_STEPS:
            longest = self.longest.batches(self._trainer.args.train_batch_size, number)
            if longest is not None:
                iterator = iter(send_to_device(longest, self._trainer.args.device))
        batches, *rest = before(iterator, number, *args, **kwargs)
        self.shapes.append([BatchShape.of(batch) for batch in batches])
        return batches, *rest

    def _forward(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.phase = "forward"
        held_bytes = self.meter.allocated_bytes() if self.steps < MEMORY_STEPS else 0
        loss = before(*args, **kwargs)
        if self.steps < MEMORY_STEPS:
            self._note("activations and logits", self.meter.allocated_bytes() - held_bytes)
        self._close("forward")
        self.phase = "backward"
        return loss

    def _backward(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = before(*args, **kwargs)
        self._close("backward")
        self.phase = "optimizer"
        return found

    # ---- Events

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        model: Any = self._trainer.model
        weights = [*model.parameters(), *model.buffers()]
        self._note("weights", bytes_on(self.meter.device, weights))
        self.meter.begin(weights)
        self.peaks.close("load")
        self.phase = "forward"

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        model: Any = self._trainer.model
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        self._note("gradients", bytes_on(self.meter.device, gradients))
        self._close("optimizer")  # clipping

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.steps < MEMORY_STEPS:
            state = tensors_in(dict(unwrap_optimizer(self._trainer.optimizer).state))
            self._note("optimizer state", bytes_on(self.meter.device, state))
        self._close("optimizer")

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.meter.synchronize()
        ended = time.perf_counter()
        self.steps += 1
        if self.steps > WARM_UP_STEPS:
            self.seconds.append(ended - self._ended)
        if self.steps == MEMORY_STEPS and self.meter.device.type == "cpu":
            self.meter.end()
        self.meter.skip()  # the gradients are gone now
        self._shown.update()
        self._ended = time.perf_counter()
        self.phase = "forward"
        self.on_epoch_end(args, state, control)
        if self.steps >= WARM_UP_STEPS + self._timed_steps:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        control.should_log = control.should_save = control.should_evaluate = False


LOOKED_AT = 2000
"""Examples whose tokens are counted where a dataset makes them on the fly."""


class LongestRows:
    """Batches of the longest rows of what the training loader reads; none for views, which begin with the largest."""

    def __init__(self) -> None:
        self.note = ""  # what was not looked at
        self.longest_row: int | None = None  # tokens
        self._loader: Any = None
        self._order: np.ndarray | None = None

    def reading(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loader = before(*args, **kwargs)
        lengths = self.lengths(getattr(self._loader, "dataset", None))
        if lengths is not None and len(lengths):
            self._order, self.longest_row = np.argsort(-lengths, kind="stable"), int(lengths.max())
        return self._loader

    def batches(self, batch_size: int, number: int) -> list[Any] | None:
        """Return ``number`` batches, the longest rows first; None where lengths are unknown or the order is a view's.

        Of fewer rows than that the longest are taken again.
        """
        if self._order is None:
            return None
        rows = np.resize(self._order, batch_size * number).reshape(number, batch_size)
        dataset, collate = self._loader.dataset, self._loader.collate_fn
        return [collate([dataset[int(index)] for index in of_batch]) for of_batch in rows]

    def lengths(self, dataset: Any) -> np.ndarray | None:
        """Return the tokens of the rows, or of those that are looked at; None where they are unknown, and of a view."""
        if isinstance(dataset, TrainingView) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            return None
        table = getattr(getattr(dataset, "data", None), "table", None)
        is_made = isinstance(table, pa.Table) and dataset.format["type"] == "custom"  # by a transform
        is_read = (isinstance(table, pa.Table) and not is_made) or isinstance(dataset, list)
        rows = dataset if is_read else [dataset[index] for index in range(min(len(dataset), LOOKED_AT))]
        if len(rows) < len(dataset):
            self.note = f"the longest rows are those of the first {len(rows):,} of {len(dataset):,} examples"
        try:
            return token_lengths(rows).astype(np.int64)
        except (ValueError, TypeError):  # images, sound: rows of one size
            return None


# ---- Meters


class StepMeter(PeakMeter):
    """Peaks span by span, and the bytes that are allocated now."""

    def begin(self, held: Iterable[torch.Tensor]) -> None:
        """Count from here; ``held`` are the tensors that are there already."""

    def end(self) -> None:
        """Stop counting: what remains of the run is timed."""

    def allocated_bytes(self) -> int:
        return read_memory(self.device).allocated_bytes or 0

    def synchronize(self) -> None:
        torch.get_device_module(self.device).synchronize()


class TrackedMeter(StepMeter):
    """The same for a CPU, where every operation is looked at."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._tracker = StorageTracker(device_type="cpu", flops=False)
        self._on = ExitStack()
        self._seen = self._allocated_bytes = 0

    def begin(self, held: Iterable[torch.Tensor]) -> None:
        for tensor in held:
            self._tracker.add(tensor)
        self._on.callback(self._tracker.close)
        self._on.enter_context(self._tracker)

    def end(self) -> None:
        self._on.close()

    def read(self) -> dict[str, int]:
        """Return the peak since the last reading."""
        peak_bytes = self._allocated_bytes
        for _, delta in self._tracker.events[self._seen :]:
            self._allocated_bytes += delta
            peak_bytes = max(peak_bytes, self._allocated_bytes)
        self._seen = len(self._tracker.events)
        return {"peak_allocated_bytes": peak_bytes}

    def skip(self) -> None:
        self.read()

    def allocated_bytes(self) -> int:
        return self._allocated_bytes + sum(delta for _, delta in self._tracker.events[self._seen :])


def meter_of(device: torch.device) -> StepMeter:
    measured = measured_device(device)
    return TrackedMeter(measured) if measured.type == "cpu" else StepMeter(measured)
