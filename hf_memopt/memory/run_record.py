"""Keep the peaks of every step of a run, and its largest batch, for the picture and the report of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.model_traits import unwrap_model
from hf_memopt.devices.memory_reading import read_memory
from hf_memopt.memory.batch_lengths import BatchShape
from hf_memopt.memory.settings import NotEstimableError
from hf_memopt.memory.timeline import phase_peaks
from hf_memopt.notices import notify

if TYPE_CHECKING:
    import torch

    from hf_memopt.memory.result import Estimate
    from hf_memopt.reports.run_file import StepsData

__all__ = ["RunRecord", "StepPeaks", "name_of"]

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
    """The peaks of a run by phase and step, for one kind of bytes, and the batch of most padded tokens.

    Attributes:
        peaks: by the name of a phase.
        largest: None before the first batch, and where no trainer is bound.
        batches: that were seen.
        examples: in them.
        padded_tokens: in them, padding included.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, StepPeaks] = {}
        self.largest: BatchShape | None = None
        self.batches = self.examples = self.padded_tokens = 0
        self._tokens: torch.Tensor | None = None  # a count on the device of the batches
        self._counts_tokens = True

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

    def by_step(self) -> dict[str, StepsData]:
        """Return the peaks of each phase as plain data."""
        return {phase: {"first": found.steps, "bytes": found.sizes} for phase, found in self.peaks.items()}

    def draw(self, path: Path, summary: Mapping[str, Mapping[str, int]], device: torch.device, trainer: Any) -> None:
        """Draw the run beside its prediction; what fails is reported and not raised, since training is over.

        Args:
            path: the picture.
            summary: the peaks of the whole run by phase and kind.
            device: whose memory they are.
            trainer: the Trainer; None where none is bound, and so nothing is predicted.
        """
        try:
            from hf_memopt.reports.run_picture import RunPicture, draw_run

            found, reason = self._predicted(device, trainer)
            predicted, batch = {}, ""
            if found is not None:
                predicted = {name: sizes["allocated_bytes"] for name, sizes in phase_peaks(found.timeline).items()}
                batch = f"{found.batch_size}" + ("" if found.seq_len is None else f" x {found.seq_len}")
            model = "" if trainer is None else f"{type(unwrap_model(trainer.model)).__name__} on "
            name = f"{model}{name_of(device)}"
            draw_run(RunPicture(self.by_step(), summary, predicted, name=name, batch=batch, reason=reason), path)
        except Exception as error:  # a picture must not cost a training its result
            notify(logger, f"plot={str(path)!r} was not drawn ({type(error).__name__}: {error}); the training is whole")

    def _predicted(self, device: torch.device, trainer: Any) -> tuple[Estimate | None, str]:
        """Return the estimate of the largest batch, or None and the reason."""
        if device.type == "cpu":
            return None, "without an accelerator the memory of the whole process is measured"
        if trainer is None:
            return None, "the callback was not attached; call attach(trainer) before trainer.train()"
        if self.largest is None or not self.largest.rows:
            return None, "no batch of tensors was seen"
        from hf_memopt.memory.trainer_estimate import estimate_of

        try:
            return estimate_of(trainer, self.largest), ""
        except (NotEstimableError, ValueError) as error:
            return None, str(error)


def name_of(device: torch.device) -> str:
    """Return what a device is called."""
    return "a CPU" if device.type == "cpu" else read_memory(device).device_name
