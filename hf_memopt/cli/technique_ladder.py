"""Compare techniques for ``hf-memopt estimate --compare``: ladders add one technique after the other to a baseline.

Every set-up of a ladder is called a rung, and estimating it is one simulation. All rungs have the same examples per
optimizer step. The ladders:

- "the usual ladder": gradient accumulation, checkpointing, Adafactor, a frozen body, half the length; as for
  chinese-macbert-large in "Transformers显存优化策略" (crazybuddha-max.github.io/CBuddhaDocs).
- "nothing frozen or cut": every weight is trained on the whole text.
- "gradients released": the same without cutting the batch. Each gradient is freed as soon as its parameter has stepped,
  so gradients cannot be clipped by their global norm.
- "16-bit weights": weights, gradients and the update in bfloat16; not on GPUs without bfloat16.
- "LoRA", "QLoRA": 16-bit or 4-bit weights that are not trained, and adapters that are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.devices.gpus import current_gpu
from hf_memopt.errors import MissingExtraError
from hf_memopt.memory.estimation import estimate
from hf_memopt.memory.models.example_batch import default_length
from hf_memopt.memory.output.estimate_picture import bar_of
from hf_memopt.memory.output.estimate_text import as_dict
from hf_memopt.memory.recording.session import keeping_models, session
from hf_memopt.memory.timeline import COMPONENTS
from hf_memopt.recipes.effective_batch import largest_divisor
from hf_memopt.reports.bar_picture import Bar, Limit, draw_bars
from hf_memopt.units import format_bytes, to_gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_memopt.devices.gpus import Gpu
    from hf_memopt.memory.result import Estimate

__all__ = ["Row", "Rung", "draw_rows", "ladder", "ladder_rungs", "print_ladder"]

TABLE_COLUMNS, FIRST_COLUMNS = 80, 22
SHOWN_ALONE = ("weights", "gradients", "optimizer state", "activations")
HEADINGS = ("weights", "grads", "state", "activ.", "other", "alloc.", "re-\nserved", "total", "fits")
DROPPED_WHERE_NARROW = ("other", "alloc.", "re-\nserved")
BASELINE, USUAL, WHOLE = "baseline", "the usual ladder", "nothing frozen or cut"
RELEASED = "gradients released"
SIXTEEN_BIT, LORA, QLORA = "16-bit weights", "LoRA", "QLoRA"
LORA_RANK = 16


@dataclass(frozen=True)
class Rung:
    """A set-up on a ladder: the technique that it adds to the rung before, and all its settings."""

    ladder: str
    added: str
    batch_size: int
    seq_len: int | None
    settings: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Row:
    """A rung and its estimate, or the reason why it is not estimable."""

    rung: Rung
    estimate: Estimate | None
    reason: str = ""

    def bar(self) -> Bar:
        """Return the row for the picture."""
        return bar_of(self.rung.ladder, self.rung.added, self.estimate)

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "ladder": self.rung.ladder,
            "added": self.rung.added,
            "batch_size": self.rung.batch_size,
            "gradient_accumulation_steps": self.rung.settings["gradient_accumulation_steps"],
            "seq_len": self.rung.seq_len,
            "reason": self.reason,
            "estimate": None if self.estimate is None else as_dict(self.estimate),
        }


def ladder_rungs(effective_batch_size: int, seq_len: int | None, *, bf16: bool = True) -> list[Rung]:
    """Return the baseline and the rungs of the ladders; ``bf16`` says whether the GPU computes in bfloat16."""
    stock = {"precision": "fp32", "optim": "adamw_torch_fused", "gradient_accumulation_steps": 1}
    baseline = Rung(BASELINE, f"fp32, batch {effective_batch_size}", effective_batch_size, seq_len, stock)
    precision = "bf16" if bf16 else "fp16"
    half = {} if seq_len is None else {"+ half the length": {"seq_len": max(seq_len // 2, 1)}}
    micro_batch = largest_divisor(effective_batch_size, 8)
    single = {f"+ accumulation 1 x {effective_batch_size}": {"batch_size": 1}} if effective_batch_size > 1 else {}
    smaller: dict[str, dict[str, Any]] = {}
    if micro_batch < effective_batch_size:
        smaller = {f"+ accumulation {micro_batch} x {effective_batch_size // micro_batch}": {"batch_size": micro_batch}}
    usual: dict[str, dict[str, Any]] = {
        **single,
        "+ checkpointing": {"checkpointing": True},
        "+ Adafactor": {"optim": "adafactor"},
        "+ frozen body": {"freeze": ("base",)},
        **half,
    }
    eight_bit = {"+ 8-bit Adam": {"optim": "adamw_8bit", "embedding_bits": 32}}
    no_cache = {"+ autocast cache off": {"autocast_cache": False}}
    paged = {"+ paged state": {"optim": "paged_adamw_8bit"}}
    whole: dict[str, dict[str, Any]] = {
        f"+ {precision} autocast": {"precision": precision},
        **eight_bit,
        **smaller,
        "+ checkpointing": {"checkpointing": True},
        **no_cache,
        **paged,
        "+ expandable segments": {"expandable_segments": True},
        **single,
    }
    # fp16's gradient scaler needs all gradients at once, which a released gradient does not wait for
    autocast = {"+ bf16 autocast": {"precision": "bf16"}} if bf16 else {}
    released: dict[str, dict[str, Any]] = {
        **autocast,
        **eight_bit,
        "+ checkpointing": {"checkpointing": True},
        **(no_cache if bf16 else {}),
        "+ release, unclipped": {"gradient_release": True, "max_grad_norm": 0.0},
        **paged,
    }
    checkpointed: dict[str, dict[str, Any]] = {**smaller, "+ checkpointing": {"checkpointing": True}}
    dtype = "bfloat16" if bf16 else "float16"
    sixteen_bit: dict[str, dict[str, Any]] = {
        "bf16, paged 8-bit Adam": {"weights_dtype": dtype, "optim": "paged_adamw_8bit", "precision": precision},
        **checkpointed,
        **single,
    }
    adapters = {"lora": LORA_RANK, "weights_dtype": dtype, "precision": precision}
    lora: dict[str, dict[str, Any]] = {f"{precision}, rank {LORA_RANK}": adapters, **checkpointed, **single}
    qlora: dict[str, dict[str, Any]] = {
        f"nf4, {precision}, rank {LORA_RANK}": {**adapters, "load_in": "nf4"},
        **checkpointed,
        **single,
    }
    ladders = {USUAL: usual, WHOLE: whole, RELEASED: released}
    if bf16:  # torch's gradient scaler refuses the gradients of float16 weights
        ladders[SIXTEEN_BIT] = sixteen_bit
    ladders |= {LORA: lora, QLORA: qlora}
    return [baseline, *(rung for name, additions in ladders.items() for rung in _climb(baseline, name, additions))]


def _climb(rung: Rung, name: str, additions: Mapping[str, Mapping[str, Any]]) -> Iterator[Rung]:
    effective = rung.batch_size
    for added, changed in additions.items():
        settings = {**rung.settings, **changed}
        batch_size = settings.pop("batch_size", rung.batch_size)
        seq_len = settings.pop("seq_len", rung.seq_len)
        settings["gradient_accumulation_steps"] = effective // batch_size
        rung = replace(rung, ladder=name, added=added, batch_size=batch_size, seq_len=seq_len, settings=settings)
        yield rung


def ladder(
    model: Any,
    *,
    batch_size: int = 32,
    seq_len: int | None = None,
    gradient_accumulation_steps: int = 1,
    gpu: Gpu | None = None,
    announce: Callable[[str], object] = lambda text: None,
    **overrides: Any,
) -> list[Row]:
    """Estimate every rung of the ladders; a rung that is not estimable becomes a row with the reason.

    Args:
        model: as for ``estimate``.
        batch_size: times ``gradient_accumulation_steps`` the examples of an optimizer step, the same on every rung.
        seq_len: as for ``estimate``.
        gradient_accumulation_steps: see ``batch_size``.
        gpu: as for ``estimate``; the 16-bit rungs are bf16 where no GPU is given or found.
        announce: called before each simulation with a text that names the rung.
        overrides: settings of every rung, as for ``estimate``.

    Raises:
        ValueError: no rung is estimable; the message is the baseline's reason.
    """
    gpu = current_gpu() if gpu is None else gpu
    effective, bf16 = batch_size * gradient_accumulation_steps, gpu is None or gpu.bf16

    def row(rung: Rung) -> Row:
        settings = {**rung.settings, **overrides}
        try:
            found = estimate(model, batch_size=rung.batch_size, seq_len=rung.seq_len, gpu=gpu, **settings)
        except (ValueError, MissingExtraError) as error:
            return Row(rung, None, str(error))
        return Row(replace(rung, seq_len=found.seq_len), found)

    announce("the baseline")
    with keeping_models():
        baseline, *rungs = ladder_rungs(effective, _length(model, seq_len, overrides), bf16=bf16)
        rows = [row(replace(baseline, seq_len=seq_len))]  # which notes a length by default
        for number, rung in enumerate(rungs, 2):
            announce(f"{number} of {len(rungs) + 1}: {rung.added}")
            rows.append(row(rung))
    if all(row.estimate is None for row in rows):
        raise ValueError(rows[0].reason)
    return rows


def _length(model: Any, seq_len: int | None, overrides: Mapping[str, Any]) -> int | None:
    """Return the tokens of a row that ``estimate`` takes; by default as many as the model says, which stays loaded."""
    if seq_len is not None:
        return seq_len
    options = {name: overrides[name] for name in ("task", "attn_implementation") if name in overrides}
    try:
        return default_length(session().load(model, **options).model)
    except MissingExtraError as error:
        raise ValueError(str(error)) from error


def print_ladder(rows: Sequence[Row], console: Console, notes: Sequence[str] = ()) -> None:
    """Print the rungs as a table, the reasons of those that are not estimable, and the rungs that fit the GPU.

    A narrow terminal gets fewer columns.
    """
    known = _first(rows)
    plain = partial(console.print, markup=False, highlight=False, emoji=False)
    plain(f"{_title(rows)}, in GiB")
    narrow = console.width < TABLE_COLUMNS
    console.print(_ladder_table(rows, narrow=narrow), crop=False)
    context = "which is unknown" if known.context_bytes is None else format_bytes(known.context_bytes)
    other = "not shown" if narrow else "other"
    plain(
        f"\nComponents at the peak of allocated bytes; {other}: logits and loss, temporaries, workspace, inputs. "
        f"Total: reserved bytes and CUDA's context, {context}. 8-bit Adam keeps 32 bits for embeddings."
    )
    for note in notes:
        plain(f"Note: {note}")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.estimate is None:
            reasons.setdefault(row.reason, []).append(f"{row.rung.added} ({row.rung.ladder})")
    for reason, names in reasons.items():
        plain(f"{', '.join(names)}: {reason}")
    if known.gpu is not None:
        fits = any(row.estimate is not None and row.estimate.fits for row in rows)
        plain(_ladder_verdict(rows, known.gpu), style="bold green" if fits else "bold red")


def draw_rows(rows: Sequence[Row], path: Path) -> None:
    """Draw the rungs to a PNG, SVG or PDF file; see ``draw_bars``."""
    gpu = _first(rows).gpu
    limit = None if gpu is None else Limit(gpu.name, gpu.usable_bytes)
    draw_bars([row.bar() for row in rows], path, title=_title(rows), limit=limit)


def _first(rows: Sequence[Row]) -> Estimate:
    return next(row.estimate for row in rows if row.estimate is not None)


def _title(rows: Sequence[Row]) -> str:
    baseline = rows[0].rung
    length = "" if baseline.seq_len is None else f" of {baseline.seq_len} tokens"
    return f"{_first(rows).model}: {baseline.batch_size} examples{length} per optimizer step"


def _ladder_table(rows: Sequence[Row], *, narrow: bool) -> Table:
    from rich import box
    from rich.table import Table

    shown = [not (narrow and heading in DROPPED_WHERE_NARROW) for heading in HEADINGS]
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("set-up, built up", min_width=FIRST_COLUMNS)
    for heading in compress(HEADINGS, shown):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in dict.fromkeys(row.rung.ladder for row in rows):
        members = [row for row in rows if row.rung.ladder == name]
        if name != BASELINE:
            table.add_row(f"[bold]{name}[/]")
        for row in members:
            cells = compress(_cells(row.estimate, digits=1 if narrow else 2), shown)
            table.add_row(row.rung.added, *cells, end_section=row is members[-1])
    return table


def _cells(found: Estimate | None, digits: int) -> list[str]:
    if found is None:
        return ["-"] * len(HEADINGS)
    other = sum(found.components[name] for name in COMPONENTS if name not in SHOWN_ALONE)
    alone = [found.components[name] for name in SHOWN_ALONE]
    sizes = [*alone, other, found.peak_allocated_bytes, found.peak_reserved_bytes, found.total_bytes]
    fits = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}[found.fits]
    return [*(f"{to_gib(size_bytes):.{digits}f}" for size_bytes in sizes), fits]


def _ladder_verdict(rows: Sequence[Row], gpu: Gpu) -> str:
    """Return which rung of each ladder is the first to fit the GPU, or that the baseline fits already."""
    known = [(row.rung, row.estimate) for row in rows if row.estimate is not None]
    fitting = [rung for rung, found in known if found.fits]
    size = f"{gpu.name}, {format_bytes(gpu.usable_bytes)} usable"
    if not fitting:
        rung, least = min(known, key=lambda pair: pair[1].total_bytes)
        needed = format_bytes(least.total_bytes)
        return f"none of them fits {size}: the least, {rung.added!r} ({rung.ladder}), needs {needed}"
    if fitting[0].ladder == BASELINE:
        return f"fits {size}: already the baseline"
    first = {rung.ladder: rung.added for rung in reversed(fitting)}
    return f"fits {size}: " + "; ".join(f"{name} from {first[name]!r}" for name in reversed(first))
