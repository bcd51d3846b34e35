"""Find changes of a set-up that make it fit a GPU; every change is simulated before it is reported.

The search tries single changes in the order of ``_candidates``, which begins with those that leave the result of
training as it is, and stops when ``ENOUGH`` of them fit. If none does, it tries pairs, then combinations of three and
four. Each trial is one simulation; their number and their time are bounded. A smaller batch keeps the examples of an
optimizer step by accumulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

from hf_memopt.errors import MissingExtraError
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.memory.result import Estimate

__all__ = ["Hint", "find_hints"]

ENOUGH = 2
MOST_TRIALS, MOST_SECONDS = 24, 40.0
MOST_CHANGES, TRIALS_OF_A_SIZE = 4, 3  # in a combination
TIGHT_SHARE = 50  # a combination that leaves less than a fiftieth of the GPU is tight
SLACK = 1.15  # by which a prediction of what fits may be too high
LEAST_SHARE = 10  # what saves less than a tenth of what is missing is not tried
LORA_RANK = 16
Simulate = Callable[[Mapping[str, Any]], "Estimate"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A change of a set-up, and what it needs as simulated.

    Attributes:
        changes: arguments of ``estimate`` that differ from the set-up.
        total_bytes: as in ``Estimate``.
        spare_bytes: what is left of the GPU, negative for what is missing.
    """

    changes: Mapping[str, Any] = field(hash=False)
    total_bytes: int
    spare_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the GPU holds the changed set-up."""
        return self.spare_bytes >= 0

    def __str__(self) -> str:
        changes = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        rest = "fits, {} to spare" if self.fits else "still {} over"
        return f"{changes} needs {format_bytes(self.total_bytes)}: {rest.format(format_bytes(abs(self.spare_bytes)))}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "changes": dict(self.changes),
            "total_bytes": self.total_bytes,
            "spare_bytes": self.spare_bytes,
            "fits": self.fits,
        }


def find_hints(
    found: Estimate, simulate: Simulate, *, announce: Callable[[str], object] = lambda text: None
) -> tuple[Hint, ...]:
    """Return changes that make a set-up fit, simulated.

    Args:
        found: the estimate of a set-up that does not fit its GPU.
        simulate: returns the estimate of the set-up with changes, or raises ValueError where they do not apply to it,
            MissingExtraError where they need a package.
        announce: called before each trial with a text that names it.

    Returns:
        Single changes that fit, at most ``ENOUGH``. Where none does: the most effective one, and after it the smallest
        combination that was found to fit, or else the best of those that were tried.
    """
    search = _Search(found, simulate, announce)
    singles: list[Hint] = []
    slope_bytes = 0.0  # of an example
    for changes in _candidates(found):
        hint = search.tried(changes)
        if hint is None or hint.total_bytes >= found.total_bytes:
            continue
        if "batch_size" in changes:
            slope_bytes = (found.total_bytes - hint.total_bytes) / (found.batch_size - 1)
            hint = search.with_larger_batch(hint, slope_bytes)
        singles.append(hint)
        if sum(single.fits for single in singles) == ENOUGH:
            break
    fitting = [single for single in singles if single.fits]
    if fitting or not singles:
        return tuple(fitting)
    best = min(singles, key=lambda single: single.total_bytes)
    combination = search.combined(singles)
    if combination is None or combination.total_bytes >= best.total_bytes:
        return (best,)
    if "batch_size" in combination.changes:
        combination = search.with_larger_batch(combination, slope_bytes)
    return best, combination


class _Search:
    """Trials of changes, within the limits of their number and time; a trial beyond them returns None."""

    def __init__(self, found: Estimate, simulate: Simulate, announce: Callable[[str], object]) -> None:
        self._found, self._simulate, self._announce = found, simulate, announce
        self._usable_bytes = 0 if found.gpu is None else found.gpu.usable_bytes
        self._trials, self._started = 0, time.monotonic()

    def tried(self, changes: Mapping[str, Any]) -> Hint | None:
        """Return the hint of a simulated change, or None where it is not applicable."""
        if self._trials >= MOST_TRIALS or time.monotonic() - self._started > MOST_SECONDS:
            return None
        self._trials += 1
        self._announce(f"trying {', '.join(f'{name}={value!r}' for name, value in changes.items())}")
        try:
            found = self._simulate(changes)
        except (ValueError, MissingExtraError):
            return None
        if found.gpu is None:
            return None
        return Hint(dict(changes), found.total_bytes, found.gpu.usable_bytes - found.total_bytes)

    def with_larger_batch(self, hint: Hint, slope_bytes: float) -> Hint:
        """Return a hint of single examples with the largest batch that fits too, or as it is.

        Memory is nearly linear in the batch: ``slope_bytes`` of an example predict the largest, a trial verifies it.
        """
        batch_size = self._found.batch_size
        if not hint.fits or slope_bytes <= 0:
            return hint
        most = 1 + hint.spare_bytes / slope_bytes
        for size in (size for size in range(batch_size - 1, 1, -1) if batch_size % size == 0 and size <= most):
            larger = self.tried({**hint.changes, **_smaller_batch(self._found, size)})
            if larger is not None and larger.fits:
                return larger
        return hint

    def combined(self, singles: list[Hint]) -> Hint | None:
        """Return the smallest combination that was found to fit, or the best of those that were tried.

        One that fits with little to spare is returned where no other trial of as many changes leaves more.
        """
        best = None
        for count in range(2, min(len(singles), MOST_CHANGES) + 1):
            tight = None
            for changes in self._ranked(singles, count)[:TRIALS_OF_A_SIZE]:
                hint = self.tried(changes)
                if hint is None:
                    continue
                if hint.spare_bytes >= self._usable_bytes // TIGHT_SHARE:
                    return hint
                tight = tight or (hint if hint.fits else None)
                best = hint if best is None or hint.total_bytes < best.total_bytes else best
            if tight is not None:
                return tight
        return best

    def _ranked(self, singles: list[Hint], count: int) -> list[dict[str, Any]]:
        """Return the changes of all combinations of ``count`` hints, the most promising first.

        The bytes of a combination are predicted as the product of what its members leave of the set-up. Those that are
        predicted to fit come first, in the order of ``singles``; then the others, those of least bytes first.
        """
        ranked = []
        for order, members in enumerate(combinations(singles, count)):
            changes = _merged(members)
            if changes is not None:
                left = prod(single.total_bytes / self._found.total_bytes for single in members)
                predicted_bytes = left * self._found.total_bytes
                fits = predicted_bytes <= SLACK * self._usable_bytes
                ranked.append((not fits, order if fits else predicted_bytes, order, changes))
        return [changes for *_, changes in sorted(ranked, key=lambda row: row[:3])]


def _merged(hints: Sequence[Hint]) -> dict[str, Any] | None:
    """Return the changes of all hints, or None where two of them set the same thing."""
    merged: dict[str, Any] = {}
    for hint in hints:
        if any(merged.get(name, value) != value for name, value in hint.changes.items()):
            return None
        if hint.changes.keys() <= merged.keys():
            return None
        merged.update(hint.changes)
    return merged


def _candidates(found: Estimate) -> Iterator[dict[str, Any]]:
    """Yield the changes to try: first what leaves the result of training as it is, at last a shorter length."""
    settings, gpu = found.settings, found.gpu
    assert gpu is not None
    over_bytes, parts = found.total_bytes - gpu.usable_bytes, found.components
    passing_bytes = sum(parts[name] for name in ("activations", "logits and loss", "temporaries"))

    def matters(size_bytes: int) -> bool:
        return LEAST_SHARE * size_bytes >= over_bytes

    if found.phase == "evaluation" and settings.eval_batches > 1 and settings.eval_accumulation_steps != 1:
        yield {"eval_accumulation_steps": 1}
    if found.phase in ("generation", "evaluation") and (settings.eval_batch_size or 1) > 1:
        yield {"eval_batch_size": 1}
    if not settings.expandable_segments and found.peak_allocated_bytes + (found.context_bytes or 0) <= gpu.usable_bytes:
        yield {"expandable_segments": True}
    if not settings.checkpointing and matters(parts["activations"]):
        yield {"checkpointing": True}
    if settings.micro_batch_size not in (None, 1):
        yield {"micro_batch_size": 1}
    elif found.batch_size > 1 and not settings.gradient_release and matters(passing_bytes):
        yield _smaller_batch(found, 1)
    if settings.precision in ("bf16", "fp16") and settings.autocast_cache and matters(2 * found.parameters):
        yield {"autocast_cache": False}
    if settings.precision in ("fp32", "tf32") and settings.weights_dtype == "float32":
        yield {"precision": "bf16" if gpu.bf16 else "fp16"}
    if found.phase == "optimizer" and settings.optim == "adamw_torch":
        yield {"optim": "adamw_torch_fused"}
    elif not matters(parts["optimizer state"]):
        pass
    elif settings.optim.startswith("adamw_torch"):
        yield {"optim": "adamw_8bit"}
    elif settings.optim == "adamw_8bit":
        yield {"optim": "paged_adamw_8bit"}
    if gpu.bf16 and settings.weights_dtype == "float32":
        yield {"weights_dtype": "bfloat16"}
    if found.trainable_parameters == found.parameters:
        precision, dtype = ("bf16", "bfloat16") if gpu.bf16 else ("fp16", "float16")
        adapters: dict[str, Any] = {"lora": LORA_RANK, "weights_dtype": dtype}
        if settings.precision != precision:
            adapters["precision"] = precision
        yield adapters
        yield {**adapters, "load_in": "nf4"}
    if found.seq_len is not None and found.seq_len > 1 and matters(passing_bytes):
        yield {"seq_len": found.seq_len // 2}


def _smaller_batch(found: Estimate, size: int) -> dict[str, int]:
    """Return the changes to batches of ``size`` examples, with the same examples per optimizer step."""
    steps = found.settings.gradient_accumulation_steps * found.batch_size // size
    return {"batch_size": size, "gradient_accumulation_steps": steps}
