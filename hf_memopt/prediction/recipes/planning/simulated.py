"""A ``Candidate``: a set-up that was simulated, what it needs and takes, and why it was taken or refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.components import Verdict, verdict_of
from hf_memopt.errors import MissingExtraError
from hf_memopt.prediction.memory import Estimate, estimate, margin_of
from hf_memopt.prediction.memory.step_time import StepTime, missing_figures
from hf_memopt.training.devices import GPUS, Gpu
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes import Recipe
    from hf_memopt.prediction.recipes.planning.model_and_rows import Texts
    from hf_memopt.prediction.recipes.planning.set_ups import ModelFacts, SetUp, Technique

    Case = tuple[tuple[Technique, ...], int, int | None]


@dataclass(frozen=True)
class Candidate:
    """A set-up that was simulated."""

    name: str  # method and techniques in short
    stage: str  # "full", "freeze" (full with frozen parameters), "lora" or "qlora"
    recipe: Recipe  # the set-up as plain data
    seq_len: int | None  # tokens of the longest row; None for a model without text
    accumulation_steps: int  # micro-batches of a step
    reserved_bytes: int  # what torch's allocator holds at its peak
    context_bytes: int  # of CUDA's context; 0 where it is unknown
    margin_bytes: int  # what has to be left of the GPU: a twentieth
    usable_bytes: int  # of the GPU, or the budget
    # allocated bytes at the moment that decides the total, by component
    components: Mapping[str, int] = field(hash=False)
    techniques: tuple[Technique, ...] = field(default=(), repr=False)  # of the set-up, by which it is known
    phase: str = ""  # that of this moment
    # what each phase needs, by its name; see `Estimate.phases`
    phases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False, repr=False)
    # predicted, of an optimizer step at the mean padded length; None where it cannot be predicted
    seconds: float | None = None
    low: float | None = None  # the least that it may be
    high: float | None = None  # the most
    ranking_seconds: float = 0.0  # by which set-ups are ranked: `seconds`, else an assumed time, which is not shown
    flops: int = 0  # of an optimizer step
    examples: int = 1  # of an optimizer step
    tokens: float | None = None  # of a step, without padding where lengths were given; None for a model without text
    consents: tuple[str, ...] = ()  # the words of `allow` that it needs and was not given
    simplicity: tuple[int, int, int] = (0, 0, 0)  # smaller is simpler
    host_bytes: int = 0  # of one process: what is moved to the host, and what its optimizer has there
    # of these, what the host's memory has not; 0 unless layers are streamed or inputs offloaded
    host_lacks_bytes: int = 0
    # of a pass, from which computing hides the copies of streamed layers; None without them
    hiding_tokens: float | None = None
    layers: int = 0  # of a model of which some are streamed; 0 for any other
    waiting_seconds: float | None = None  # of these that a step waits for the host; None where no time is predicted
    reason: str = ""  # why it was taken or refused

    @property
    def rows(self) -> int:
        return self.recipe.per_device_train_batch_size

    @property
    def total_bytes(self) -> int:
        return self.reserved_bytes + self.context_bytes

    @property
    def spare_bytes(self) -> int:
        """The margin included; negative for what is missing."""
        return self.usable_bytes - self.total_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether it fits with the margin, without it, or not at all."""
        return "over" if self.host_lacks_bytes else verdict_of(self.spare_bytes, self.margin_bytes)

    @property
    def fits(self) -> bool:
        """Whether it fits with the margin, and needs no consent that was not given."""
        return self.verdict == "fits" and not self.consents

    @property
    def floor_bytes(self) -> int:
        """What is there whatever the rows, with the context: weights, gradients that are kept, optimizer state."""
        kept = ("weights", "optimizer state", *(("gradients",) if self.recipe.accumulates else ()))
        return self.context_bytes + sum(self.components[name] for name in kept)

    @property
    def cost(self) -> float:
        """Seconds of an example, by which set-ups are ranked."""
        return self.ranking_seconds / self.examples

    @property
    def batch(self) -> str:
        return f"{self.rows} x {self.accumulation_steps}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from every other candidate of a plan: techniques, length, rows."""
        return self.techniques, self.seq_len, self.rows

    def adds(self, technique: Technique, *, to: Candidate) -> bool:
        """Return whether it is another set-up with one technique more, for rows of the same length."""
        same = (self.stage, self.seq_len) == (to.stage, to.seq_len)
        return same and {*self.techniques} - {*to.techniques} == {technique} and {*to.techniques} < {*self.techniques}

    def says(self) -> str:
        if self.host_lacks_bytes:
            has = format_bytes(self.host_bytes - self.host_lacks_bytes)
            return f"needs {format_bytes(self.host_bytes)} of host memory, which has {has}"
        if self.verdict == "over":
            return f"over by {format_bytes(-self.spare_bytes)}"
        return f"{self.verdict}, {format_bytes(self.spare_bytes)} free"

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate for JSON, bytes as integers."""
        found = {**asdict(self), "components": dict(self.components), "recipe": json.loads(self.recipe.to_json())}
        del found["techniques"], found["simplicity"], found["ranking_seconds"]
        return {
            **found,
            "micro_batch_size": self.rows,
            "total_bytes": self.total_bytes,
            "spare_bytes": self.spare_bytes,
            "verdict": self.verdict,
            "seconds_per_example": None if self.seconds is None else self.seconds / self.examples,
        }


def priced_on(gpu: Gpu) -> Gpu:
    """Return the GPU whose figures give seconds: itself, else of the nearest compute capability the nearest in size."""
    if not missing_figures(gpu):
        return gpu

    def distance(known: Gpu) -> tuple[int, int]:
        (major, minor), (own, own_minor) = known.compute_capability, gpu.compute_capability
        return abs(10 * (major - own) + minor - own_minor), abs(known.memory_bytes - gpu.memory_bytes)

    nearest = min((known for known in GPUS.values() if not missing_figures(known)), key=distance)
    return replace(nearest, pcie=gpu.bus)


@dataclass
class Simulation:
    """Estimates of one model on one GPU."""

    model: Any  # as for `estimate`
    task: str | None  # of the head to build; None for the model's own
    facts: ModelFacts  # of the model
    gpu: Gpu  # to fit, with what is usable of it
    texts: Texts  # lengths to plan for
    share: int = 1  # examples of a step
    goal: str = "speed"  # as for `plan`
    allow: tuple[str, ...] = ()  # words of `allow` that were given
    announce: Callable[[str], object] = str  # called before each simulation with a text
    count: int = 0  # simulations so far
    place: str = ""  # of the set-up in its search, as `announce` says it
    refused: dict[SetUp, str] = field(default_factory=dict)  # the set-ups that could not be simulated, and why
    time_unknown: str = ""  # why no time is predicted, and which is assumed instead; "" where one is predicted
    parameters: int = 0
    model_name: str = ""
    media: Mapping[str, Any] = field(default_factory=dict)  # pictures and audio of an example, as for `estimate`
    not_generated: str = ""  # why an evaluation that generates is simulated without that; "" where it is not
    left_bytes: int = (
        0  # of the GPU, which what is searched for next has to leave, with nothing in host memory; 0 for any
    )
    # of the computer, for all that waits there; 0 for plans without streamed ones
    host_memory_bytes: int = 0
    is_this_host: bool = True  # whether it is this machine's
    _found: dict[Case, Candidate | None] = field(default_factory=dict)
    _shorter: dict[tuple[Recipe, int, int | None], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.priced_on = priced_on(self.gpu)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "announce": str}  # what shows progress belongs to this process

    @property
    def candidates(self) -> list[Candidate]:
        """Every set-up that was simulated, with its micro-batch, in the order of the simulations."""
        return [one for one in self._found.values() if one is not None]

    def allows(self, set_up: SetUp) -> bool:
        return set(set_up.consents) <= set(self.allow)

    def is_whole(self, recipe: Recipe) -> bool:
        """Return whether a step has to be one batch: a released gradient needs it, or a loss that compares rows."""
        return not recipe.accumulates or self.facts.compares_rows

    def row_counts(self, set_up: SetUp) -> list[int]:
        """Return the micro-batches that a step's examples of one GPU can be cut into."""
        if self.is_whole(set_up.recipe):
            return [self.share]
        return [rows for rows in range(1, self.share + 1) if self.share % rows == 0]

    def of(self, set_up: SetUp, rows: int) -> Candidate | None:
        """Return the set-up with micro-batches of ``rows``; None where it cannot be simulated (see ``refused``)."""
        key = set_up.techniques, rows, self.texts.seq_len
        if key not in self._found:
            self.announce(f"{self.place}{set_up.name}, {rows} at a time")
            self._found[key] = self._simulated(set_up, set_up.with_rows(rows))
        return self._found[key]

    def spare_bytes(self, recipe: Recipe, seq_len: int | None) -> int | None:
        """Return what a recipe leaves of the GPU beside the margin; None where it cannot be simulated."""
        try:
            found = self.estimate(recipe, seq_len)
        except (ValueError, NotImplementedError, MissingExtraError):
            return None
        return min(self.gpu.usable_bytes - margin_of(self.gpu) - found.total_bytes, self._spare_on_host(recipe, found))

    def _spare_on_host(self, recipe: Recipe, found: Estimate) -> int:
        """Return what all that waits there leaves of the host's memory; of 0 only streamed layers are counted."""
        waits = recipe.offload or recipe.optimizer_state_on_host
        is_counted = recipe.streamed or (waits and self.host_memory_bytes > 0)
        return self.host_memory_bytes - found.host_bytes if is_counted else sys.maxsize

    def estimate(self, recipe: Recipe, seq_len: int | None, gpu: Gpu | None = None) -> Estimate:
        self.count += 1
        steps = recipe.effective_batch_size // recipe.per_device_train_batch_size
        estimated = partial(
            estimate,
            self.model,
            batch_size=recipe.per_device_train_batch_size,
            seq_len=seq_len,
            recipe=recipe,
            gpu=gpu or self.gpu,
            task=self.task,
            gradient_accumulation_steps=steps,
            **self.media,
        )
        generation: dict[str, Any] = {
            "predict_with_generate": True,
            "generation_max_length": seq_len,
            "generation_num_beams": 1,
        }
        try:
            return estimated(**generation if self.facts.is_generating and not self.not_generated else {})
        except ValueError as error:
            if not self.facts.is_generating or self.not_generated:
                raise
            found, self.not_generated = estimated(), str(error)
            return found

    def _simulated(self, set_up: SetUp, recipe: Recipe) -> Candidate | None:
        try:
            found = self.estimate(recipe, self.texts.seq_len)
        except (ValueError, NotImplementedError, MissingExtraError) as error:
            self.refused[set_up] = str(error)
            return None
        base = found.parameters - (found.trainable_parameters if recipe.lora is not None else 0)  # without adapters
        self.parameters, self.model_name = self.parameters or base, found.model
        texts, examples, time = self.texts, recipe.effective_batch_size, self._priced(found)
        tokens = texts.seq_len if texts.tokens is None else texts.tokens
        ratio = 1.0
        if texts.width != texts.seq_len and texts.width is not None:
            ratio = 1 - self._saved(set_up, recipe, time) / time.seconds
        is_timed = self._is_timed(found)
        return Candidate(
            name=set_up.name,
            stage=set_up.stage,
            recipe=recipe,
            seq_len=found.seq_len,
            accumulation_steps=found.settings.gradient_accumulation_steps,
            reserved_bytes=found.peak_reserved_bytes,
            context_bytes=found.context_bytes or 0,
            margin_bytes=margin_of(self.gpu),
            usable_bytes=self.gpu.usable_bytes,
            components=found.components,
            techniques=set_up.techniques,
            phase=found.phase,
            phases={name: peak._asdict() for name, peak in found.phases.items()},
            seconds=ratio * time.seconds if is_timed else None,
            low=ratio * time.low if is_timed else None,
            high=ratio * time.high if is_timed else None,
            ranking_seconds=ratio * time.seconds,
            flops=found.flops,
            examples=examples,
            tokens=None if tokens is None else tokens * examples,
            consents=tuple(word for word in set_up.consents if word not in self.allow),
            simplicity=set_up.simplicity,
            host_bytes=found.host_bytes,
            host_lacks_bytes=max(0, -self._spare_on_host(recipe, found)),
            hiding_tokens=None if found.step_costs is None else found.step_costs.hiding_tokens(self.priced_on),
            layers=self.facts.all_layers if recipe.streamed else 0,
            waiting_seconds=ratio * time.seconds * time.shares["PCIe"] if is_timed and recipe.streamed else None,
        )

    def _is_timed(self, found: Estimate) -> bool:
        """Return whether the time of a step is predicted, and not only assumed."""
        assumed = found.step_costs.ranking_rule if found.step_costs is not None else ""
        if not assumed and self.priced_on.compute_capability != self.gpu.compute_capability:
            assumed = f"that of {self.priced_on.name}"
        if assumed:
            self.time_unknown = f"{found.time_unknown}; set-ups are ranked by an assumed time, {assumed}"
        return not assumed

    def _priced(self, found: Estimate) -> StepTime:
        if found.step_time is not None:
            return found.step_time
        assert found.step_costs is not None  # there are none of some optimizers, which plan does not use
        return found.step_costs.on(self.priced_on)

    def _saved(self, set_up: SetUp, recipe: Recipe, longest: StepTime) -> float:
        """Return the seconds of a step that rows of the mean padded length save."""
        rows = recipe.per_device_train_batch_size
        key = set_up.structure, rows, self.texts.seq_len
        if key not in self._shorter:
            trained = recipe.replace(prediction_loss_only=True)  # the time of a step has no evaluation in it
            self._shorter[key] = longest.seconds - self._priced(self.estimate(trained, self.texts.width)).seconds
        return self._shorter[key]
