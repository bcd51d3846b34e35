"""What a rehearsal found, as plain data that goes through JSON."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hf_memopt.notices import quoted
from hf_memopt.plain_data import checked_path, parse_object

FORMAT = 1
Verdict = Literal["fits", "runs out", "failed", "never trained"]


class Done(BaseException):
    """A rehearsal has seen enough; no ``Exception``, which scripts catch."""


@dataclass(frozen=True)
class Batch:
    """What a forward pass got: rows, and tokens of a row, None where there are none."""

    rows: int
    tokens: int | None

    @property
    def size(self) -> int:
        return self.rows * (self.tokens or 1)

    def __str__(self) -> str:
        return f"{self.rows} rows" if self.tokens is None else f"{self.rows} x {self.tokens} tokens"


@dataclass(frozen=True)
class Peak:
    """The most that torch's allocator had given out, and had reserved, in one phase."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0


@dataclass(frozen=True)
class Held:
    """Blocks that were held, by name, by the line of code or the operator that made them."""

    place: str
    size_bytes: int
    blocks: int
    code: str = ""  # of the line


@dataclass(frozen=True)
class OutOfMemory:
    """Where memory ran out, and how much there was."""

    phase: str
    step: int
    batch: Batch | None
    asked_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    place: str


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal. Bytes of phases and blocks are torch's, without CUDA's context.

    Attributes:
        verdict: "fits", "runs out", "failed" (the script did, by itself) or "never trained".
        gpu: its name.
        usable_bytes: of the GPU by a process, with ``context_bytes`` in them.
        needed_bytes: the least memory, with the context, with which these steps run; None unless they fit.
        is_measured: whether the GPU was a real one.
        phases: peaks by phase, in the order of the run.
        peak_phase: where memory runs out on a GPU with a little less.
        held: what held the memory at the peak, or when it ran out.
        out_of_memory: where memory ran out for good.
        recovered: how often memory ran out and the script went on.
        largest_batch: of a forward pass that trains.
        longest_row: tokens, where the data says so.
        steps: of the optimizer.
        seconds: that the rehearsal took; ``step_seconds`` are of its steps, on a real GPU.
        notes: what was changed, and what is not modelled.
        exit_code: of the script; 0 where the rehearsal ended it.
        timeline: for the picture, where it was asked for.
    """

    verdict: Verdict
    gpu: str
    usable_bytes: int
    context_bytes: int
    needed_bytes: int | None = None
    is_measured: bool = False
    phases: dict[str, Peak] = field(default_factory=dict)
    peak_phase: str = ""
    held: tuple[Held, ...] = ()
    out_of_memory: OutOfMemory | None = None
    recovered: int = 0
    largest_batch: Batch | None = None
    longest_row: int | None = None
    steps: int = 0
    seconds: float = 0.0
    step_seconds: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    exit_code: int = 0
    timeline: dict[str, Any] | None = None

    @property
    def fits(self) -> bool:
        """Whether the steps ran."""
        return self.verdict == "fits"

    def table(self, width: int = 80, script: str = "train.py") -> str:
        """Return what ``hf-memopt rehearse`` prints, at most 80 columns wide."""
        from hf_memopt.prediction.rehearsal.output import text_of

        gpu = quoted(re.sub(r"^custom (\S+) ", r"\1", self.gpu))
        next_one = f"run {quoted(script)}" if self.fits else f"plan MODEL --gpu {gpu}"
        return text_of(self, f"hf-memopt {next_one}", width)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw allocated and reserved bytes over the events, to a PNG, SVG or PDF file.

        Raises:
            ValueError: the timeline was not asked for, or ``path`` is not such a file.
            MissingExtraError: matplotlib is not installed.
        """
        if self.timeline is None:
            raise ValueError("timeline=None has nothing to draw; expected one. Call: rehearse(..., timeline=True)")
        from hf_memopt.prediction.rehearsal.timeline import draw

        draw(self, checked_path("path", path))

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Rehearsal:
        """Return what ``to_json`` wrote.

        Raises:
            ValueError: it is something else, or of another version.
        """
        told = parse_object(text)
        try:
            if told.pop("format") != FORMAT:
                raise KeyError("format")
            failure, largest = told["out_of_memory"], told["largest_batch"]
            told["phases"] = {name: Peak(**peak) for name, peak in told["phases"].items()}
            told["held"] = tuple(Held(**one) for one in told["held"])
            told["largest_batch"] = largest and Batch(**largest)
            if failure is not None:
                failure["batch"] = failure["batch"] and Batch(**failure["batch"])
                told["out_of_memory"] = OutOfMemory(**failure)
            return cls(**{**told, "notes": tuple(told["notes"]), "step_seconds": tuple(told["step_seconds"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"text is no rehearsal of this version ({error}); expected what to_json() writes. Rehearse anew"
            ) from None
