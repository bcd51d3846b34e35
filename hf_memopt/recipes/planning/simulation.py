"""Simulate set-ups of one model on one GPU for ``plan``: each once, with its time at the real lengths of the rows.

Memory is that of batches of the longest rows. Time is that of the mean padded length: a step's seconds grow along a
line with the length but for attention, so the mean of many lengths is close to the time at the mean. The optimizer's
part does not depend on lengths, so all optimizers of one recording share the difference between the two lengths.

Where no time is predicted, set-ups are ranked by an assumed one, which is not shown: that with equally many tokens for
each expert, or that of the GPU of the nearest compute capability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_memopt.devices import GPUS
from hf_memopt.errors import MissingExtraError
from hf_memopt.memory import estimate
from hf_memopt.memory.step_time import missing_figures
from hf_memopt.recipes.planning.candidates import Candidate, candidate_of, margin_of

if TYPE_CHECKING:
    from hf_memopt.devices import Gpu
    from hf_memopt.memory import Estimate
    from hf_memopt.memory.step_time import StepTime
    from hf_memopt.recipes import Recipe
    from hf_memopt.recipes.planning.measured import Corrections
    from hf_memopt.recipes.planning.set_ups import SetUp, Technique
    from hf_memopt.recipes.planning.sharing import Sharing
    from hf_memopt.recipes.planning.texts import Texts

    Case = tuple[tuple[Technique, ...], int, int | None, Sharing | None]
    """The techniques, the rows of a micro-batch, the tokens of a row, and how GPUs share a step."""

__all__ = ["Simulation", "priced_on"]


def priced_on(gpu: Gpu) -> Gpu:
    """Return the GPU whose figures give seconds: itself, else of the nearest compute capability the nearest in size."""
    if not missing_figures(gpu):
        return gpu

    def distance(known: Gpu) -> tuple[int, int]:
        return abs(_as_number(known) - _as_number(gpu)), abs(known.memory_bytes - gpu.memory_bytes)

    return min((known for known in GPUS.values() if not missing_figures(known)), key=distance)


def _as_number(gpu: Gpu) -> int:
    major, minor = gpu.compute_capability
    return 10 * major + minor


@dataclass
class Simulation:
    """Estimates of one model on one GPU.

    Attributes:
        model: as for ``estimate``.
        task: of the head to build; None for the model's own.
        gpu: to fit, with what is usable of it.
        texts: lengths to plan for.
        world_size: GPUs that share a step.
        allow: words of ``allow`` that were given.
        announce: called before each simulation with a text.
        measured: what corrects the estimates; None for nothing.
        count: simulations so far.
        refused: the set-ups that could not be simulated, and why.
        time_unknown: why no time is predicted, and which is assumed instead; "" where one is predicted.
        most_tokens: of a row that the model takes; None for no limit.
        sharing: how the GPUs share the steps that are simulated next; None for one GPU.
    """

    model: Any
    task: str | None
    gpu: Gpu
    texts: Texts
    world_size: int = 1
    allow: tuple[str, ...] = ()
    announce: Callable[[str], object] = str
    measured: Corrections | None = None
    count: int = 0
    refused: dict[SetUp, str] = field(default_factory=dict)
    time_unknown: str = ""
    parameters: int = 0
    model_name: str = ""
    most_tokens: int | None = None
    sharing: Sharing | None = None
    _found: dict[Case, Candidate | None] = field(default_factory=dict)
    _shorter: dict[tuple[Recipe, int, int | None, Sharing | None], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.priced_on = priced_on(self.gpu)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "announce": str}  # what shows progress belongs to this process

    @property
    def candidates(self) -> list[Candidate]:
        """Every set-up that was simulated, with its micro-batch, in the order of the simulations."""
        return [one for one in self._found.values() if one is not None]

    def allows(self, set_up: SetUp) -> bool:
        """Return whether a set-up needs no word that was not given."""
        return set(set_up.consents) <= set(self.allow)

    def of(self, set_up: SetUp, rows: int) -> Candidate | None:
        """Return the set-up with micro-batches of ``rows``; None where it cannot be simulated (see ``refused``)."""
        key = set_up.techniques, rows, self.texts.seq_len, self.sharing
        if key not in self._found:
            self.announce(f"{self.count + 1}: {set_up.name}, {rows} at a time")
            self._found[key] = self._simulated(set_up, set_up.with_rows(rows))
        return self._found[key]

    def spare_bytes(self, recipe: Recipe, seq_len: int | None) -> int | None:
        """Return what a recipe leaves of the GPU beside the margin; None where it cannot be simulated."""
        try:
            found = self.estimate(recipe, seq_len)
        except (ValueError, MissingExtraError):
            return None
        return self.gpu.usable_bytes - margin_of(self.gpu) - found.total_bytes

    def estimate(self, recipe: Recipe, seq_len: int | None, gpu: Gpu | None = None) -> Estimate:
        """Return the estimate of a recipe."""
        self.count += 1
        steps = recipe.effective_batch_size // (recipe.per_device_train_batch_size * self.world_size)
        shared = {} if self.sharing is None else {"world_size": self.world_size, **asdict(self.sharing)}
        found = estimate(
            self.model,
            batch_size=recipe.per_device_train_batch_size,
            seq_len=seq_len,
            recipe=recipe,
            gpu=gpu or self.gpu,
            task=self.task,
            gradient_accumulation_steps=steps,
            **shared,
        )
        return found if self.measured is None or gpu is not None else self.measured.applied(found, recipe)

    def _simulated(self, set_up: SetUp, recipe: Recipe) -> Candidate | None:
        try:
            found = self.estimate(recipe, self.texts.seq_len)
        except (ValueError, MissingExtraError) as error:
            self.refused[set_up] = str(error)
            return None
        self.parameters, self.model_name = self.parameters or found.parameters, found.model
        missing = tuple(word for word in set_up.consents if word not in self.allow)
        candidate = candidate_of(set_up, recipe, found, self.gpu, missing)
        if self.measured is not None:
            candidate = replace(candidate, corrected=self.measured.words(found, recipe))
        return self._timed(set_up, recipe, found, candidate)

    def _timed(self, set_up: SetUp, recipe: Recipe, found: Estimate, candidate: Candidate) -> Candidate:
        texts, examples = self.texts, recipe.effective_batch_size
        tokens = texts.tokens if texts.tokens is not None else texts.seq_len
        candidate = replace(candidate, tokens=None if tokens is None else tokens * examples)
        time = self._priced(found)
        ratio = 1.0
        if texts.width is not None and texts.width != texts.seq_len:
            ratio = 1 - self._saved(set_up, recipe, time) / time.seconds
        candidate = replace(candidate, ranking_seconds=ratio * time.seconds)
        if self.step_time(found) is None:
            return candidate
        candidate = replace(candidate, communication_fraction=time.shares.get("communication"))
        return replace(candidate, seconds=ratio * time.seconds, low=ratio * time.low, high=ratio * time.high)

    def step_time(self, found: Estimate) -> StepTime | None:
        """Return the predicted time of an estimated step; None where it cannot be predicted."""
        assumed = ""
        if found.step_costs is not None and found.step_costs.routes_tokens:
            assumed = "equally many for each"
        elif self.priced_on.compute_capability != self.gpu.compute_capability:
            assumed = f"that of {self.priced_on.name}"
        if not assumed:
            return self._priced(found)
        self.time_unknown = f"{found.time_unknown}; set-ups are ranked by an assumed time, {assumed}"
        return None

    def _priced(self, found: Estimate) -> StepTime:
        """Return the time of an estimated step by which set-ups are ranked."""
        if found.step_time is not None:
            return found.step_time
        assert found.step_costs is not None  # there are none of some optimizers, which plan does not use
        return found.step_costs.on(self.priced_on)

    def _saved(self, set_up: SetUp, recipe: Recipe, longest: StepTime) -> float:
        """Return the seconds of a step that rows of the mean padded length save."""
        rows = recipe.per_device_train_batch_size
        key = set_up.structure, rows, self.texts.seq_len, self.sharing
        if key not in self._shorter:
            self._shorter[key] = longest.seconds - self._priced(self.estimate(recipe, self.texts.width)).seconds
        return self._shorter[key]
