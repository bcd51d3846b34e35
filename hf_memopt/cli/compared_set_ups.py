"""What ``hf-memopt estimate --compare`` compares: set-ups of one model, each with the most rows that fit the GPU.

All have the same examples per optimizer step, and accumulate what does not fit at once. Where not even one row fits
with 5 % to spare, the figures are those of one row; without a GPU they are those of all rows at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.devices import Gpu, current_gpu
from hf_memopt.errors import MissingExtraError
from hf_memopt.memory import Estimate, estimate, largest_that_fits, margin_of, precision_for
from hf_memopt.memory.output import as_dict, bar_of
from hf_memopt.memory.recording import keeping_models
from hf_memopt.memory.step_time import equally_fast
from hf_memopt.reports.pictures import Limit, draw_bars
from hf_memopt.units import format_bytes, format_duration, to_gib

if TYPE_CHECKING:
    from rich.console import Console


LORA_RANK = 16
SHOWN = ("weights", "gradients", "optimizer state", "activations")
FITS = {"fits": "[green]yes[/]", "tight": "[yellow]tight[/]", "over": "[red]no[/]", None: "?"}
WIDE_COLUMNS = 80  # of a terminal that shows what the bytes are for


@dataclass(frozen=True)
class Compared:
    """A set-up by its name, and its estimate; None where it is not estimable, for a reason."""

    name: str
    estimate: Estimate | None
    reason: str = ""

    @property
    def batch(self) -> str:
        """Rows of a micro-batch and accumulation steps."""
        if self.estimate is None:
            return ""
        return f"{self.estimate.batch_size} x {self.estimate.settings.gradient_accumulation_steps}"

    def as_dict(self) -> dict[str, Any]:
        """Return the set-up for JSON."""
        found = None if self.estimate is None else as_dict(self.estimate)
        return {"set_up": self.name, "batch": self.batch, "reason": self.reason, "estimate": found}


def set_ups(precision: str = "bf16", dtype: str = "bfloat16") -> dict[str, dict[str, Any]]:
    """Return the settings of each set-up by its name; one with a "+" has what the one before it has, and more."""
    autocast = {"precision": precision}
    eight_bit = {**autocast, "optim": "adamw_8bit"}
    checkpointed = {**eight_bit, "checkpointing": True, "autocast_cache": False}
    paged = {**checkpointed, "optim": "paged_adamw_8bit"}
    lora = {**autocast, "lora": LORA_RANK, "weights_dtype": dtype}
    found: dict[str, dict[str, Any]] = {
        "fp32": {"precision": "fp32"},
        precision: autocast,
        "+ 8-bit AdamW": eight_bit,
        "+ checkpointing": checkpointed,
        "+ paged state": paged,
        "+ expandable segments": {**paged, "expandable_segments": True},
        "paged, frozen body": {**paged, "freeze": ("base",)},
    }
    if precision != "fp16":  # whose gradient scaler wants all gradients at once, and none of float16 weights
        found["paged, gradients released"] = {**paged, "gradient_release": True, "max_grad_norm": 0.0}
    if precision == "bf16":
        found["paged, bf16 weights"] = {**paged, "weights_dtype": dtype}
    return found | {
        "LoRA": lora,
        "LoRA, checkpointing": {**lora, "checkpointing": True},
        "QLoRA": {**lora, "load_in": "nf4"},
        "QLoRA, checkpointing": {**lora, "load_in": "nf4", "checkpointing": True},
    }


def compare(
    model: Any,
    *,
    examples: int,
    seq_len: int | None = None,
    gpu: Gpu | None = None,
    announce: Callable[[str], object] = lambda text: None,
    **overrides: Any,
) -> list[Compared]:
    """Estimate every set-up with the most rows that fit."""
    gpu = current_gpu() if gpu is None else gpu
    given = {"seq_len": seq_len, "gpu": gpu, **overrides}
    found = []
    with keeping_models():
        precision, dtype, problem = precision_for(model, gpu, overrides.get("task"))
        compared, began = set_ups(precision, dtype), time.monotonic()
        for number, (name, settings) in enumerate(compared.items()):
            left = (time.monotonic() - began) / max(number, 1) * (len(compared) - number)
            soon = f", about {format_duration(left)} left" if number else ""
            announce(f"{number + 1} of {len(compared)}: {name}{soon}")
            found.append(_with_most_rows(model, name, examples, {**given, **settings}))
    if all(one.estimate is None for one in found):
        raise ValueError(found[0].reason)
    if problem:
        found[0] = replace(found[0], reason=f"{problem}, so nothing is compared in it")
    return found


def _with_most_rows(model: Any, name: str, examples: int, given: Mapping[str, Any]) -> Compared:
    estimates: dict[int, Estimate] = {}
    reasons: list[str] = []

    def spare_bytes(rows: int) -> int | None:
        try:
            found = estimate(model, batch_size=rows, gradient_accumulation_steps=examples // rows, **given)
        except (ValueError, MissingExtraError) as error:
            reasons.append(str(error))
            return None
        estimates[rows] = found
        return 0 if found.gpu is None else found.gpu.usable_bytes - margin_of(found.gpu) - found.total_bytes

    released = given.get("gradient_release", False)  # which accumulates nothing
    sizes = [rows for rows in range(1, examples + 1) if examples % rows == 0 and (rows == examples or not released)]
    most = largest_that_fits(sizes, spare_bytes, first=(examples, 1))
    found = estimates.get(sizes[0] if most is None else most)
    return Compared(name, found, "" if found is not None else reasons[-1])


def print_compared(found: Sequence[Compared], console: Console, notes: Sequence[str] = ()) -> None:
    """Print the set-ups as a table, the reasons of those that are not estimable, and which fit the GPU."""
    from rich import box
    from rich.table import Table

    known = _known(found)
    shown = SHOWN if console.width >= WIDE_COLUMNS else ()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("set-up")
    headings = {"gradients": "gradi-\nents", "optimizer state": "state", "activations": "activa-\ntions"}
    for heading in ("rows x\nsteps", *(headings.get(name, name) for name in shown), "total", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        if one.estimate is None:
            table.add_row(one.name)
            continue
        sizes = (*(one.estimate.components[name] for name in shown), one.estimate.total_bytes)
        fits = FITS[one.estimate.verdict]
        table.add_row(one.name, one.batch, *(f"{to_gib(size_bytes):.2f}" for size_bytes in sizes), fits)
    plain = partial(console.print, markup=False, highlight=False, emoji=False)
    plain(f"{_title(found)}, in GiB")
    console.print(table, crop=False)
    context = "which is unknown" if known[0].context_bytes is None else format_bytes(known[0].context_bytes)
    plain(f"\nTotal: reserved bytes and CUDA's context, {context}.")
    for note in notes:
        plain(f"Note: {note}")
    for reason in dict.fromkeys(one.reason for one in found if one.reason):
        plain(f"{', '.join(one.name for one in found if one.reason == reason)}: {reason}")
    gpu = known[0].gpu
    if gpu is not None:
        number = sum(one.verdict == "fits" for one in known)
        verdict = f"{number} of {len(found)} fit {gpu.name}, {format_bytes(gpu.usable_bytes)} usable"
        plain(verdict, style="bold green" if number else "bold red")
        if (best := taken(found)) is not None:
            kind = ", which trains adapters" if "LoRA" in best.name else ""
            plain(f"Take {_whole_name(best, found)}, {best.batch}{kind}: the fastest of these. More: hf-memopt plan")


def taken(found: Sequence[Compared]) -> Compared | None:
    """Return the fastest set-up that fits, of those within 5 % the first; None where none fits or has seconds.

    What asks for consent is left out, and adapters are taken where training all weights fits in no set-up.
    """
    times = {
        one.name: one.estimate.step_time.seconds
        for one in found
        if one.estimate is not None and one.estimate.verdict == "fits" and one.estimate.step_time is not None
    }
    full = [name for name in times if "LoRA" not in name and not name.startswith("paged, ")]
    wanted = full or [name for name in times if "LoRA" in name]
    fastest = min((times[name] for name in wanted), default=0.0)
    return next((one for one in found if one.name in wanted and equally_fast(times[one.name], fastest)), None)


def _whole_name(one: Compared, found: Sequence[Compared]) -> str:
    """Return the name with those that a "+" adds to."""
    names = [other.name for other in found[: found.index(one) + 1]]
    if not one.name.startswith("+"):
        return one.name
    begins = max(at for at, name in enumerate(names) if not name.startswith("+"))
    return " ".join(names[begins:])


def draw_compared(found: Sequence[Compared], path: Path) -> None:
    """Draw the set-ups to a PNG, SVG or PDF file; see ``draw_bars``."""
    gpu = _known(found)[0].gpu
    limit = None if gpu is None else Limit(gpu.name, gpu.usable_bytes)
    bars = [bar_of("", f"{one.name}  {one.batch}", one.estimate) for one in found]
    draw_bars(bars, path, title=_title(found), limit=limit)


def _known(found: Sequence[Compared]) -> list[Estimate]:
    return [one.estimate for one in found if one.estimate is not None]


def _title(found: Sequence[Compared]) -> str:
    first = _known(found)[0]
    examples = first.batch_size * first.settings.gradient_accumulation_steps
    length = "" if first.seq_len is None else f" of {first.seq_len} tokens"
    return f"{first.model}: {examples} examples{length} per optimizer step"
