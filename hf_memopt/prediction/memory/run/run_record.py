"""Note what happens in a run while it trains, for the picture and the report of ``MemoryReportCallback``.

Where memory runs out is seen in ``compute_loss`` and accelerate's ``backward``, inside of what recovers from it
(micro-batching), while the failed pass still holds its tensors. Whether anything recovered is known where ``train``
ends.

The trade: two more Python calls per accumulation step and one sum over the attention mask, which is read only when the
report is written.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hf_memopt.notices import notify
from hf_memopt.prediction.memory.settings import BatchShape
from hf_memopt.prediction.memory.tracking import bytes_on, held_by_trainer, largest_blocks, live_tensors
from hf_memopt.training.devices.readings import is_out_of_memory, measured_device, read_memory

if TYPE_CHECKING:
    import torch
    from transformers import Trainer


logger = logging.getLogger(__name__)

MOST_POINTS = 2000


class StepPeaks:
    """A peak for each step; of a long run the largest of neighbouring steps, so that no peak is lost.

    Examples:
        >>> peaks = StepPeaks(most_points=2)
        >>> for step, size in enumerate([3, 9, 4, 5], 1):
        ...     peaks.add(step, size)
        >>> peaks.steps, peaks.sizes
        ([1, 3], [9, 5])
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self.steps: list[int] = []
        self.sizes: list[int] = []
        self._most_points = most_points
        self._width = 1  # steps of a point

    def add(self, step: int, size_bytes: int) -> None:
        """Note a peak; of several in one step the largest counts."""
        if self.steps and step < self.steps[-1] + self._width:
            self.sizes[-1] = max(self.sizes[-1], size_bytes)
            return
        if len(self.steps) == self._most_points:
            self._width *= 2
            self.steps = self.steps[::2]
            self.sizes = [max(pair) for pair in zip_longest(self.sizes[::2], self.sizes[1::2], fillvalue=0)]
            self.add(step, size_bytes)
            return
        self.steps.append(step)
        self.sizes.append(size_bytes)


class RunRecord:
    """What is noted of a run: peaks by phase and step for one kind of bytes, batches, and what is held."""

    def __init__(self) -> None:
        self.unwritten: set[str] = set()  # the causes of failed writes that were warned of
        self._began: float | None = None  # the step that runs, with the loading of its batches
        self.begin(0)

    def begin(self, first_step: int) -> None:
        """Note that training begins at a step, after those of a resumed run, or over again with a smaller batch."""
        self.first_step = first_step
        self.peaks: dict[str, StepPeaks] = {}  # by the name of a phase
        self.largest: BatchShape | None = None  # the batch of most padded tokens; None before the first, and unbound
        self.batches = self.examples = self.padded_tokens = 0  # that were seen; padding included
        self._tokens: torch.Tensor | None = None  # a count on the device of the batches
        self._counts_tokens = True
        self.phase = "load"  # then "forward", "backward", "optimizer", "evaluation", or "between steps"
        self.shape: BatchShape | None = None  # of the last pass
        self.components: dict[str, int] = {}  # bytes of weights and gradients after the first passes, then of the state
        self.failure: dict[str, Any] | None = None  # the last out-of-memory, whether or not it was recovered from
        self.curve: dict[str, list[Any]] = {"step": [], "loss": [], "seconds_per_step": [], "tokens_per_second": []}
        self._seconds, self._logged_step, self._logged_tokens = 0.0, first_step, 0

    def begin_step(self) -> None:
        """Note that the batches of a step are about to be loaded."""
        self._began = perf_counter()

    def end_step(self) -> None:
        """Note that a step has ended; what comes between steps (evaluation, checkpoints) is not counted."""
        if self._began is not None:
            self._seconds, self._began = self._seconds + perf_counter() - self._began, None

    def log(self, step: int, loss: float) -> None:
        """Note a log of training. The Trainer has just waited for the device, for the loss."""
        tokens, steps = self.tokens or self.padded_tokens, step - self._logged_step
        if steps < 1 or not self._seconds:
            return
        points = list(self.curve.values())
        if len(points[0]) >= MOST_POINTS:
            for one in points:
                del one[::2]  # every second log is left
        rate = (tokens - self._logged_tokens) / self._seconds
        found = (step, loss if math.isfinite(loss) else None, self._seconds / steps, rate)
        for one, value in zip(points, found, strict=True):
            one.append(value)
        self._seconds, self._logged_step, self._logged_tokens = 0.0, step, tokens

    @property
    def tokens(self) -> int | None:
        """Tokens of all batches without padding; None where they are unknown. Waits for the device."""
        return int(self._tokens) if self._tokens is not None and self._counts_tokens else None

    def add(self, phase: str, step: int, found: Mapping[str, int]) -> None:
        """Note a reading of ``PeakMeter`` at a step."""
        size = next((size for kind, size in found.items() if kind.endswith(("allocated_bytes", "rss_bytes"))), None)
        if size is not None:
            self.peaks.setdefault(phase, StepPeaks()).add(step, size)

    def look_at(self, batches: Iterable[Any]) -> None:
        """Count batches, examples and tokens, and note the batch of most padded tokens."""
        for shape in map(BatchShape.of, batches):
            self.batches += 1
            self.examples += shape.rows
            self.padded_tokens += shape.rows * (shape.seq_len or 0)
            if shape.real is None:
                self._counts_tokens = False
            else:
                self._tokens = shape.real if self._tokens is None else self._tokens + shape.real
            if self.largest is None or shape.padded_tokens > self.largest.padded_tokens:
                self.largest = shape

    def by_step(self) -> dict[str, Any]:
        """Return the peaks of each phase as plain data."""
        return {phase: {"first": found.steps, "bytes": found.sizes} for phase, found in self.peaks.items()}

    # ---- Passes

    def run_forward(
        self, trainer: Any, before: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kw: Any
    ) -> Any:
        """Return ``compute_loss(model, inputs)``; where memory runs out, note first what is alive."""
        self.phase = "forward" if model.training else "evaluation"
        self.shape = BatchShape.of(inputs, count_tokens=False)
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
        names = {"forward_backward": ("weights", "gradients"), "optimizer": ("optimizer state",)}.get(phase, ())
        if any(name not in self.components for name in names):
            held = held_by_trainer(trainer)
            self.components |= {name: bytes_on(trainer.args.device, held[name]) for name in names}

    def _watched(self, trainer: Trainer, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            if is_out_of_memory(error):
                self.note_failure(trainer, error)
            raise

    def note_failure(self, trainer: Any, error: BaseException) -> None:
        """Note what is alive; nothing that goes wrong here may hide the error."""
        try:
            device = measured_device(trainer.args.device)
            components, tensors = live_tensors(trainer, trainer.args.device)
            reading = read_memory(device) if device.type != "cpu" else None
            shape = self.shape
            allocated = None if reading is None else reading.allocated_bytes
            if allocated is not None and allocated > sum(components.values()):
                components["kept by autograd and kernels"] = allocated - sum(components.values())
            self.failure = {
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
