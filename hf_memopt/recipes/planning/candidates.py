"""A ``Candidate``: a set-up that was simulated, what it needs and takes, and why it was taken or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hf_memopt.memory import MARGIN_SHARE, margin_of
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.devices import Gpu
    from hf_memopt.memory import Estimate
    from hf_memopt.recipes import Recipe
    from hf_memopt.recipes.planning.set_ups import SetUp, Technique
    from hf_memopt.recipes.planning.sharing import Sharing

__all__ = ["MARGIN_SHARE", "Candidate", "Verdict", "candidate_of", "margin_of", "verdict_of"]

Verdict = Literal["fits", "tight", "over"]


@dataclass(frozen=True)
class Candidate:
    """A set-up that was simulated.

    Attributes:
        name: method and techniques in short.
        stage: "full", "freeze" (full with frozen parameters), "lora" or "qlora".
        recipe: the set-up as plain data.
        techniques: of the set-up, by which it is known.
        seq_len: tokens of the longest row; None for a model without text.
        accumulation_steps: micro-batches of a step on each GPU.
        reserved_bytes: what torch's allocator holds at its peak.
        context_bytes: of CUDA's context; 0 where it is unknown.
        margin_bytes: what has to be left of the GPU: a twentieth.
        usable_bytes: of the GPU, or the budget.
        components: bytes at the allocated peak, by component.
        phase: when that peak is reached.
        seconds: predicted, of an optimizer step at the mean padded length; None where it cannot be predicted.
        low: the least that it may be.
        high: the most.
        ranking_seconds: by which set-ups are ranked: ``seconds``, else an assumed time, which is not shown.
        flops: of an optimizer step.
        examples: of an optimizer step, on all GPUs.
        tokens: of a step, without padding where lengths were given; None for a model without text.
        consents: the words of ``allow`` that it needs and was not given.
        simplicity: smaller is simpler.
        sharing: how several GPUs share a step; None for one GPU.
        host_bytes: of one process: what is moved to the host, and what its optimizer has there.
        communication_fraction: of the seconds, what waits for other GPUs and the host; None where it is unknown.
        corrected: what of it a measurement corrected: "context", "reserved", "seconds".
        reason: why it was taken or refused.
    """

    name: str
    stage: str
    recipe: Recipe
    seq_len: int | None
    accumulation_steps: int
    reserved_bytes: int
    context_bytes: int
    margin_bytes: int
    usable_bytes: int
    components: Mapping[str, int] = field(hash=False)
    techniques: tuple[Technique, ...] = field(default=(), repr=False)
    phase: str = ""
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    ranking_seconds: float = 0.0
    flops: int = 0
    examples: int = 1
    tokens: float | None = None
    consents: tuple[str, ...] = ()
    simplicity: tuple[int, int, int] = (0, 0, 0)
    sharing: Sharing | None = None
    host_bytes: int = 0
    communication_fraction: float | None = None
    corrected: tuple[str, ...] = ()
    reason: str = ""

    @property
    def rows(self) -> int:
        """Examples of a micro-batch."""
        return self.recipe.per_device_train_batch_size

    @property
    def total_bytes(self) -> int:
        """Reserved bytes and context, as ``Estimate.total_bytes``."""
        return self.reserved_bytes + self.context_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left of the GPU, the margin included; negative for what is missing."""
        return self.usable_bytes - self.total_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether it fits with the margin, without it, or not at all."""
        return verdict_of(self.spare_bytes, self.margin_bytes)

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
        """Examples of a micro-batch times micro-batches."""
        return f"{self.rows} x {self.accumulation_steps}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from every other candidate of a plan: techniques, how GPUs share a step, length, rows."""
        return self.techniques, self.sharing, self.seq_len, self.rows

    def adds(self, technique: Technique, *, to: Candidate) -> bool:
        """Return whether it is another set-up with one technique more, for rows of the same length."""
        same = (self.stage, self.seq_len, self.sharing) == (to.stage, to.seq_len, to.sharing)
        return same and {*self.techniques} - {*to.techniques} == {technique} and {*to.techniques} < {*self.techniques}

    def because(self, reason: str) -> Candidate:
        """Return it with a reason."""
        return replace(self, reason=reason)

    def says(self) -> str:
        """Return the verdict with its figure."""
        if self.verdict == "over":
            return f"over by {format_bytes(-self.spare_bytes)}"
        return f"{self.verdict}, {format_bytes(self.spare_bytes)} to spare"

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate for JSON, bytes as integers."""
        found = {**asdict(self), "components": dict(self.components), "recipe": _plain(self.recipe)}
        del found["techniques"], found["simplicity"], found["ranking_seconds"]
        return {
            **found,
            "micro_batch_size": self.rows,
            "total_bytes": self.total_bytes,
            "spare_bytes": self.spare_bytes,
            "verdict": self.verdict,
            "seconds_per_example": None if self.seconds is None else self.seconds / self.examples,
        }


def verdict_of(spare_bytes: int, margin_bytes: int) -> Verdict:
    """Return whether what is left holds the margin, less than it, or is missing."""
    return "over" if spare_bytes < 0 else "tight" if spare_bytes < margin_bytes else "fits"


def _plain(recipe: Recipe) -> Any:
    import json

    return json.loads(recipe.to_json())


def candidate_of(set_up: SetUp, recipe: Recipe, found: Estimate, gpu: Gpu, consents: tuple[str, ...]) -> Candidate:
    """Return the candidate of an estimate, without its time."""
    return Candidate(
        name=set_up.name,
        stage=set_up.stage,
        recipe=recipe,
        seq_len=found.seq_len,
        accumulation_steps=found.settings.gradient_accumulation_steps,
        reserved_bytes=found.peak_reserved_bytes,
        context_bytes=found.context_bytes or 0,
        margin_bytes=margin_of(gpu),
        usable_bytes=gpu.usable_bytes,
        components=found.components,
        techniques=set_up.techniques,
        phase=found.phase,
        flops=found.flops,
        examples=recipe.effective_batch_size,
        consents=consents,
        simplicity=set_up.simplicity,
        sharing=set_up.sharing,
        host_bytes=found.host_bytes,
    )
