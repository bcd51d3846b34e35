"""Find changes of a set-up that make it fit a GPU; every change is simulated before it is reported.

The search tries single changes in the order of ``_candidates``, which begins with those that leave the result of
training as it is, and stops when ``ENOUGH`` of them fit with 5 % of the GPU to spare, as a plan does. If none does,
those that help are added to each other in that order until their combination does. A smaller batch keeps the examples
of an optimizer step by accumulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.compatibility import refused_fields
from hf_memopt.components import Verdict, verdict_of
from hf_memopt.errors import MissingExtraError
from hf_memopt.memory.what_fits import largest_that_fits, margin_of
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.memory.result import Estimate

ENOUGH = 2
MOST_SECONDS = 40.0
LEAST_SHARE = 10  # what saves less than a tenth of what is missing is not tried
LORA_RANK = 16
Simulate = Callable[[Mapping[str, Any]], "Estimate"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A change of a set-up, and what it needs as simulated."""

    changes: Mapping[str, Any] = field(hash=False)  # arguments of ``estimate`` that differ from the set-up
    total_bytes: int  # as in ``Estimate``
    spare_bytes: int  # what is left of the GPU, negative for what is missing
    margin_bytes: int = 0  # what has to be left, since an estimate may be wrong by so much

    @property
    def fits(self) -> bool:
        """Whether the GPU holds the changed set-up."""
        return self.spare_bytes >= 0

    @property
    def verdict(self) -> Verdict:
        """As ``Estimate.verdict``."""
        return verdict_of(self.spare_bytes, self.margin_bytes)

    @property
    def is_enough(self) -> bool:
        """Whether it fits and leaves the margin."""
        return self.spare_bytes >= self.margin_bytes

    def __str__(self) -> str:
        changes = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        spare = format_bytes(abs(self.spare_bytes))
        rest = f"{self.verdict}, {spare} to spare" if self.fits else f"still {spare} over"
        return f"{changes} needs {format_bytes(self.total_bytes)}: {rest}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "changes": dict(self.changes),
            "total_bytes": self.total_bytes,
            "spare_bytes": self.spare_bytes,
            "fits": self.fits,
            "verdict": self.verdict,
        }


def find_hints(
    found: Estimate,
    simulate: Simulate,
    precision: str,
    dtype: str,
    *,
    announce: Callable[[str], object] = lambda text: None,
) -> tuple[Hint, ...]:
    """Return single changes that make the estimated set-up fit with the margin, at most ``ENOUGH``.

    Where none does: the most effective one, and after it the combination of the first that do together, or else of all
    that help. After ``MOST_SECONDS`` nothing more is tried. ``simulate`` raises ValueError where changes do not apply,
    MissingExtraError where they need a package; ``precision`` and ``dtype`` are those of ``precision_for``.
    """
    started = time.monotonic()

    def tried(changes: Mapping[str, Any]) -> Hint | None:
        if time.monotonic() - started > MOST_SECONDS:
            return None
        announce(f"trying {', '.join(f'{name}={value!r}' for name, value in changes.items())}")
        try:
            changed = simulate(changes)
        except (ValueError, MissingExtraError):
            return None
        assert changed.gpu is not None  # that of the set-up
        spare_bytes = changed.gpu.usable_bytes - changed.total_bytes
        return Hint(dict(changes), changed.total_bytes, spare_bytes, margin_of(changed.gpu))

    singles: list[Hint] = []
    for changes in _candidates(found, precision, dtype):
        hint = tried(changes)
        if hint is not None and hint.total_bytes < found.total_bytes:
            singles.append(_with_larger_batch(hint, found, tried))
        if sum(single.is_enough for single in singles) == ENOUGH:
            break
    fitting = [single for single in singles if single.is_enough]
    if fitting or not singles:
        return tuple(fitting)
    best, combined = min(singles, key=lambda single: single.total_bytes), singles[0]
    for single in singles[1:]:
        more = tried({**combined.changes, **single.changes})
        if more is not None and more.total_bytes < combined.total_bytes:
            combined = more
        if combined.is_enough:
            break
    return (best, _with_larger_batch(combined, found, tried)) if combined.total_bytes < best.total_bytes else (best,)


def _with_larger_batch(hint: Hint, found: Estimate, tried: Callable[[Mapping[str, Any]], Hint | None]) -> Hint:
    """Return a hint of single examples that fits with the largest batch that fits too; any other as it is."""
    if not hint.is_enough or hint.changes.get("batch_size") != 1:
        return hint
    hints = {1: hint}

    def spare_bytes(size: int) -> int | None:
        if size == found.batch_size:
            return hint.total_bytes + hint.spare_bytes - hint.margin_bytes - found.total_bytes  # without any change
        larger = hints.get(size) or tried({**hint.changes, **_smaller_batch(found, size)})
        if larger is None:
            return None
        hints[size] = larger
        return larger.spare_bytes - larger.margin_bytes

    sizes = [size for size in range(1, found.batch_size + 1) if found.batch_size % size == 0]
    return hints[largest_that_fits(sizes, spare_bytes, first=(1, found.batch_size)) or 1]


def _candidates(found: Estimate, precision: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the changes to try: first what leaves the result of training as it is, at last a shorter length."""
    settings, gpu = found.settings, found.gpu
    assert gpu is not None
    over_bytes, parts = found.total_bytes + margin_of(gpu) - gpu.usable_bytes, found.components
    passing_bytes = sum(parts[name] for name in ("activations", "logits and loss", "temporaries"))

    def matters(size_bytes: int) -> bool:
        return LEAST_SHARE * size_bytes >= over_bytes

    if found.phase == "evaluation" and not settings.prediction_loss_only:
        yield {"prediction_loss_only": True}
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
    elif found.batch_size > 1 and not refused_fields(settings, "accumulation") and matters(passing_bytes):
        yield _smaller_batch(found, 1)
    if settings.precision in ("bf16", "fp16") and settings.autocast_cache and matters(2 * found.parameters):
        yield {"autocast_cache": False}
    if settings.precision in ("fp32", "tf32") and settings.weights_dtype == "float32" and precision != "fp32":
        yield {"precision": precision}
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
