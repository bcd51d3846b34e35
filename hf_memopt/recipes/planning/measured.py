"""Correct the estimates of ``plan`` by real steps that ``measure`` took on the same GPU.

Formula:
    seconds x measured / predicted seconds, where that makes their range narrower; reserved bytes x measured / predicted
    where that is above 1, of the same model; CUDA's context as it was measured.

Bytes are never lowered below their prediction: what made one set-up need less may not hold for another. A factor of one
set-up leaves an error in another. Its largest values, from all pairs of published rows of one GPU
(``benchmarks/step_time.py``, 9 of a V100 and 13 of an A100), are the ranges that are given after a correction.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_memopt.memory.step_time import Prices, StepTime
from hf_memopt.reports import PACKAGES, Measurement
from hf_memopt.units import format_bytes, percent

if TYPE_CHECKING:
    from hf_memopt.devices import Gpu
    from hf_memopt.memory import Estimate
    from hf_memopt.recipes import Recipe
    from hf_memopt.recipes.planning.simulated import Candidate

SAME_KIND, SAME_MODEL, SAME_GPU = 0.04, 0.11, 0.17
"""The error that is left in seconds: of the same model, method, precision and optimizer, of the same model, of any."""

SAME_SIZE = 1e-3  # of parameters, by which models are the same; heads differ in their labels


@dataclass(frozen=True)
class Corrections:
    """What a measurement corrects."""

    measurement: Measurement  # of steps on the GPU that is planned for
    name: str  # of its file, for notes
    gpu: Gpu  # that GPU, with the context that was measured

    @classmethod
    def of(cls, measurement: Measurement, name: str, gpu: Gpu) -> Corrections:
        """Return the corrections for a GPU."""
        if measurement.gpu != gpu.name:
            raise ValueError(
                f"measured={name!r} is of {measurement.gpu}, and gpu={gpu.name!r} is planned for; expected a "
                f"measurement on that GPU. Pass gpu={measurement.gpu!r}, or measure there: hf-memopt measure train.py"
            )
        if measurement.total_bytes > gpu.memory_bytes:
            raise ValueError(
                f"measured={name!r} has {format_bytes(measurement.total_bytes)} on {gpu.name}, which has "
                f"{format_bytes(gpu.memory_bytes)}; expected less. Measure again: hf-memopt measure train.py"
            )
        context_bytes = measurement.measured.context_bytes
        return cls(measurement, name, gpu if context_bytes is None else replace(gpu, context_bytes=context_bytes))

    @property
    def seconds_factor(self) -> float | None:
        measured, predicted = self.measurement.measured, self.measurement.predicted
        if predicted is None or not measured.seconds or not predicted.seconds:
            return None
        return measured.seconds / predicted.seconds

    @property
    def bytes_factor(self) -> float:
        """By what reserved bytes are raised; where memory ran out, so that the set-up does not fit."""
        measured, predicted = self.measurement.measured, self.measurement.predicted
        if predicted is None or not predicted.reserved_bytes or not measured.reserved_bytes:
            return 1.0
        needed = measured.reserved_bytes
        if not self.measurement.fits:
            needed = max(needed, self.gpu.usable_bytes - (self.gpu.context_bytes or 0) + 1)
        return max(needed / predicted.reserved_bytes, 1.0)

    def applied(self, found: Estimate, recipe: Recipe) -> Estimate:
        words = self.words(found, recipe)
        if "reserved" in words:
            found = replace(found, peak_reserved_bytes=math.ceil(found.peak_reserved_bytes * self.bytes_factor))
        if "seconds" in words and found.step_time is not None:
            found = replace(found, step_time=self._timed(found.step_time, self._error(found, recipe)))
        return found

    def words(self, found: Estimate, recipe: Recipe) -> tuple[str, ...]:
        """Return what is corrected of a recipe's estimate: "context", "reserved", "seconds"."""
        words = []
        if self.measurement.measured.context_bytes is not None:
            words.append("context")
        if self.bytes_factor > 1 and self._is_same_model(found, recipe):
            words.append("reserved")
        is_timed = self.seconds_factor is not None and found.step_time is not None
        if is_timed and self._error(found, recipe) < Prices.of(self.gpu).error:
            words.append("seconds")
        return tuple(words)

    def _timed(self, time: StepTime, error: float) -> StepTime:
        factor = self.seconds_factor or 1.0
        seconds = factor * time.seconds
        low = seconds * (1 - error)
        if time.is_launch_bound and error > SAME_KIND:  # how fast the host is was not measured
            low = min(low, factor * time.low)
        return replace(time, seconds=seconds, low=low, high=seconds * (1 + error))

    def _error(self, found: Estimate, recipe: Recipe) -> float:
        """Return the error that is left in the seconds of a recipe."""
        if not self._is_same_model(found, recipe):
            return SAME_GPU
        measured = self.measurement
        method = "qlora" if recipe.load_in is not None else "lora" if recipe.lora is not None else "full"
        kind = method, recipe.precision, recipe.optim
        return SAME_KIND if kind == (measured.method, measured.precision, measured.optim) else SAME_MODEL

    def _is_same_model(self, found: Estimate, recipe: Recipe) -> bool:
        base = found.parameters - (found.trainable_parameters if recipe.lora is not None else 0)
        return abs(base - self.measurement.parameters) <= SAME_SIZE * base

    # ---- Notes

    def notes(self, candidates: Sequence[Candidate]) -> Iterator[str]:
        """Yield what was corrected by how much, and what was not and why."""
        measured, predicted = self.measurement.measured, self.measurement.predicted
        corrected = {word for one in candidates for word in one.corrected}
        set_up = ", ".join((self.measurement.method, self.measurement.precision, self.measurement.optim))
        if predicted is None:
            yield f"{self.name} has no prediction, so neither seconds nor reserved bytes are corrected"
        if measured.context_bytes is not None:
            yield f"{self.name}: CUDA's context is {format_bytes(measured.context_bytes)}, as measured"
        if "reserved" in corrected:
            why = "memory ran out there" if not self.measurement.fits else "so much more was measured than predicted"
            yield f"{self.name}: reserved bytes x {self.bytes_factor:.3f}, as {why} ({set_up})"
        elif predicted is not None and predicted.reserved_bytes and measured.reserved_bytes:
            less = 1 - measured.reserved_bytes / predicted.reserved_bytes
            why = (
                f"{percent(less, 1)} less was measured, for that set-up alone"
                if self.bytes_factor == 1
                else "another model"
            )
            yield f"{self.name}: reserved bytes stay as predicted: {why}"
        if "seconds" in corrected:
            yield (
                f"{self.name}: seconds x {self.seconds_factor:.3f}, as measured with {self.measurement.model} "
                f"({set_up}); up to {percent(SAME_KIND)} off for such a set-up, {percent(SAME_MODEL)} for others "
                f"of that model, "
                f"{percent(SAME_GPU)} for other models"
            )
        elif self.seconds_factor is not None:
            yield f"{self.name}: seconds stay as predicted, since one step of another model makes them no surer"
        for name in PACKAGES:
            version, here = self.measurement.versions[name], importlib.metadata.version(name)
            if version.partition("+")[0] != here.partition("+")[0]:
                yield f"{self.name} was measured with {name} {version}, and {here} is installed"
