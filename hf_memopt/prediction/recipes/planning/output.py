"""Show a ``Plan`` as text for a terminal of any width, and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from hf_memopt.prediction.memory.step_time import equally_fast
from hf_memopt.prediction.recipes.planning.choice import best_of
from hf_memopt.prediction.recipes.planning.report_figures import report_figures
from hf_memopt.prediction.recipes.planning.request import GOALS
from hf_memopt.prediction.recipes.planning.set_ups import CHECKPOINTING
from hf_memopt.prediction.reports.plan import FORMAT
from hf_memopt.units import format_bytes, format_count, to_gib
from hf_memopt.units import format_duration as _duration
from hf_memopt.units import format_number as _number

if TYPE_CHECKING:
    from rich.console import Console

    from hf_memopt.prediction.recipes.planning.model_and_rows import Texts
    from hf_memopt.prediction.recipes.planning.result import Plan
    from hf_memopt.prediction.recipes.planning.simulated import Candidate

SHOWN_FITTING, SHOWN_OVER = 4, 2  # rows of a table beside the chosen one
MARKS = {">": "recommended", "~": "tight", "x": "does not fit", "?": "needs consent"}
STYLES = {">": "bold green", "~": "yellow", "x": "red", "?": "yellow"}  # of rich, in a terminal alone
BAR_FROM, WIDE_FROM = 76, 100  # columns of a terminal
LEAST_COLUMNS = 40
NO_BREAK = "\N{NO-BREAK SPACE}"


# ---- Text


def plan_text(found: Plan, width: int = 80) -> str:
    """Return the plan as text of at most ``width`` columns (at least 40)."""
    return "\n".join(line for line, _ in _lines(found, width, lambda text: text))


def print_plan(found: Plan, console: Console, wording: Callable[[str], str] = lambda text: text) -> None:
    """Print the plan, in a terminal with its verdicts in colour unless NO_COLOR is set; ``wording`` changes notes."""
    bars = {} if console.encoding.lower().startswith("utf") else str.maketrans("█░", "#.")
    for line, style in _lines(found, console.width, wording):
        console.out(line.translate(bars), style=style or None, highlight=False)


def print_plans(plans: Sequence[Plan], console: Console, wording: Callable[[str], str]) -> None:
    """Print the plans of one model for several GPUs, a row a GPU: the chosen set-up, or the nearest where none fits."""
    width, texts, rows = max(console.width, LEAST_COLUMNS), plans[0].texts, []
    for found in plans:
        one = found.shortfall.nearest if found.shortfall else found.chosen
        assert one is not None
        mark = {"fits": " ", "tight": "~", "over": "x"}[one.verdict]
        rows.append((mark, f"{found.gpu.name}: {_name(one, texts)}", one))
    shared = [note for note in plans[0].notes if all(note in found.notes for found in plans)]
    of_gpus = [f"{found.gpu.name}: {note}" for found in plans for note in found.gpu.notes if note not in shared]
    notes = [wording(f"Note: {note}.") for note in (*shared, *of_gpus)]
    ends = "* predicted, and so is the memory. With one GPU a plan has its reasons, and --write its script."
    heading = _filled(_heading(plans[0], f"{len(plans)} GPUs"), width)
    table = _laid_out(rows, width, texts.rows, 0, ("GPU: plan", "free"))
    for line, style in (*heading, ("", ""), *table, ("", ""), *_filled([*notes, ends], width)):
        console.out(line, style=style or None, highlight=False)


def _lines(found: Plan, width: int, wording: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    width = max(width, LEAST_COLUMNS)
    yield from _filled(_heading(found), width)
    yield "", ""
    yield from _table(found, width)
    yield "", ""
    yield from _filled(_recommended(found), width, "bold green")
    yield from _filled(map(wording, _short(found)), width, "bold red")
    yield from _filled(map(wording, _with_consent(found)), width)
    yield from _filled(_epochs(found), width)
    yield from _filled((wording(f"Note: {note}.") for note in found.notes), width)
    what = "* predicted, and so is the memory" if _is_timed(shown_candidates(found)) else "Memory is predicted"
    yield from _filled([f"{what}: nothing of it was measured on this GPU."], width)


def _epochs(found: Plan) -> Iterator[str]:
    """Yield what an epoch of the given data costs padded, in buckets and packed."""
    padding = report_figures(found, simulate=False)["padding"]
    if padding is None:
        return
    ways = padding["strategies"]
    kept = [ways[0], *(way for way in ways if way["name"].startswith(("bucketed(batch", "packed")))]
    costs = []
    for way in kept:
        time = "" if way["epoch_seconds"] is None else f", {_duration(way['epoch_seconds'])}"
        costs.append(f"{way['name']}: {way['epoch_tokens']:,} tokens{time}")
    yield f"An epoch of your data: {'; '.join(costs)}."


def _filled(paragraphs: Iterable[str], width: int, style: str = "") -> Iterator[tuple[str, str]]:
    """Yield the lines of paragraphs, the first paragraph in a style; "32 x 1" and "1.5 GiB" stay in one line."""
    for number, text in enumerate(paragraphs):
        kept = re.sub(r"(?<=\d) (?=(x \d|[KMG]iB\b|%))|(?<=\d x) (?=\d)", NO_BREAK, text)
        for line in wrap(kept, width, break_on_hyphens=False):
            yield line.replace(NO_BREAK, " "), "" if number else style


def _heading(found: Plan, gpus: str = "") -> Iterator[str]:
    gpu, texts = found.gpu, found.texts
    yield from filter(None, [found.task_note])
    where = f"{gpu.name}: {format_bytes(gpu.usable_bytes)} usable, {'bf16' if gpu.bf16 else 'no bf16'}"
    yield f"{found.model}, {format_count(found.parameters)} parameters, on {gpus or where}"
    rows = ""
    if texts.lengths is not None:
        rows = f"{texts.rows:,} rows, mean {texts.tokens:.0f} tokens, padded {texts.width}; "
    length = "" if texts.seq_len is None else f"planned for {texts.seq_len} tokens, "
    yield f"{rows}{length}{found.effective_batch_size} examples a step; goal: {GOALS[found.goal]}"


def shown_candidates(found: Plan) -> list[Candidate]:
    """Return the candidates of the table, each once: the chosen one, and those that a reason of ``_Shown`` names."""
    shown = _Shown(found)
    every = [
        *shown.fitting(),
        *shown.recomputed(),
        *shown.best_of_stages(),
        *shown.tight(),
        *shown.nearest(),
        *shown.worth_asking(),
        *shown.simplest_over(),
    ]
    return list({id(one): one for one in every}.values())


class _Shown:
    """The reasons to show a candidate.

    Of the micro-batches of a set-up one may be shown: the largest that fits, else the smallest.
    """

    def __init__(self, found: Plan) -> None:
        self.found, self.chosen = found, found.chosen
        by_set_up: dict[tuple[Any, ...], Candidate] = {}
        for one in sorted(found.candidates, key=self._order):
            by_set_up.setdefault(one.key[:-1], one)
        self.ranked = list(by_set_up.values())

    def _order(self, one: Candidate) -> tuple[Any, ...]:
        return one is not self.chosen, *_place(one)

    def fitting(self) -> list[Candidate]:
        """The chosen one, and the best others that fit."""
        return [one for one in self.ranked if one.fits or one is self.chosen][: 1 + SHOWN_FITTING]

    def recomputed(self) -> list[Candidate]:
        """What checkpointing would change."""
        return [one for one in self.ranked if self.chosen is not None and one.adds(CHECKPOINTING, to=self.chosen)]

    def best_of_stages(self) -> list[Candidate]:
        """The best of full training, of LoRA and so on, but the chosen one."""
        stages = dict.fromkeys(one.stage for one in self.ranked)
        best = (best_of(one for one in self.ranked if one.stage == stage) for stage in stages)
        return [one for one in best if one is not None and one is not self.chosen]

    def tight(self) -> list[Candidate]:
        shown = self.fitting()
        tight = [one for one in self.ranked if one.verdict == "tight" and not one.consents and one not in shown]
        return tight[:SHOWN_OVER]

    def nearest(self) -> list[Candidate]:
        """Where nothing fits, what is the nearest."""
        return [] if self.found.shortfall is None else [self.found.shortfall.nearest]

    def worth_asking(self) -> list[Candidate]:
        """The best for each consent that would help."""
        worth = [one for one in self.ranked if one.consents and _is_worth_asking(one, self.found)]
        best = {one.consents: one for one in reversed(worth)}
        return list(reversed(best.values()))

    def simplest_over(self) -> list[Candidate]:
        """Of each stage the simplest that is too large with the fewest rows, to show what is missing."""
        fewest = [one for one in self.ranked if not one.consents and (one.rows == 1 or not one.recipe.accumulates)]
        found: dict[str, Candidate] = {}
        for one in sorted(fewest, key=lambda one: one.simplicity):
            if one.verdict == "over":
                found.setdefault(one.stage, one)
        return [found[stage] for stage in dict.fromkeys(one.stage for one in self.found.candidates) if stage in found]


def _is_worth_asking(one: Candidate, found: Plan) -> bool:
    """Return whether a set-up that needs consent fits, where nothing else does, or is faster by more than 5 %."""
    if one.verdict != "fits":
        return False
    chosen = found.chosen
    if chosen is None or not chosen.fits:
        return True
    return one.cost < chosen.cost and not equally_fast(one.cost, chosen.cost)


def _place(one: Candidate) -> tuple[Any, ...]:
    """Return what sorts candidates: fitting before tight before over, and faster ones first of those that fit."""
    if one.verdict == "over":
        return 2, bool(one.consents), -one.spare_bytes
    return ("fits", "tight").index(one.verdict), bool(one.consents), one.cost


def _table(found: Plan, width: int) -> Iterator[tuple[str, str]]:
    rows = [(_mark(one, found), _name(one, found.texts), one) for one in shown_candidates(found)]
    bar_columns = 0 if width < BAR_FROM else 10 if width < WIDE_FROM else 16
    examples = found.texts.rows if width >= BAR_FROM else None  # of an epoch, whose time is shown
    yield from _laid_out(rows, width, examples, bar_columns, ("plan", "to spare"))


def _name(one: Candidate, texts: Texts) -> str:
    return one.name + (f", {one.seq_len} tokens" if one.seq_len != texts.seq_len else "")


def _laid_out(
    rows: Sequence[tuple[str, str, Candidate]], width: int, examples: int | None, bar_columns: int, names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the lines of a table of candidates with their marks and names, and of the marks' meanings."""
    timed = _is_timed(one for _, _, one in rows)
    text = any(one.tokens is not None for _, _, one in rows)
    epoch = timed and examples is not None
    headings = ["batch", *(["at peak"] if bar_columns else [])]
    headings += ["GiB", names[1], *(["tok/s*" if text else "ex/s*"] if timed else []), *(["epoch*"] if epoch else [])]
    table = [[one.batch, *_figures(one, bar_columns, timed, examples if epoch else None)] for _, _, one in rows]
    columns = [max(len(headings[i]), *(len(row[i]) for row in table)) for i in range(len(headings))]
    name_columns = min(width - 3 - sum(columns) - 2 * len(columns), max(len(name) for _, name, _ in rows))
    name_columns = max(name_columns, 12)

    def line(mark: str, name: str, cells: Sequence[str]) -> str:
        left = {0, 1} if bar_columns else {0}
        shown = [f"{c:<{n}}" if i in left else f"{c:>{n}}" for i, (c, n) in enumerate(zip(cells, columns, strict=True))]
        return "  ".join([f" {mark} {name:<{name_columns}}", *shown]).rstrip()

    yield line(" ", names[0], headings), "bold"
    for (mark, name, _), row in zip(rows, table, strict=True):
        first, *rest = wrap(name, name_columns)
        yield line(mark, first, row), STYLES.get(mark, "")
        yield from ((f"     {more}", STYLES.get(mark, "")) for more in rest)
    marks = {mark for mark, _, _ in rows}
    legend = "   ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marks)
    if legend and len(legend) < width:
        yield f" {legend}", ""


def _is_timed(rows: Iterable[Candidate]) -> bool:
    return any(one.seconds is not None and one.verdict != "over" for one in rows)


def _mark(one: Candidate, found: Plan) -> str:
    if one is found.chosen:
        return ">"
    return "x" if one.verdict == "over" else "?" if one.consents else "~" if one.verdict == "tight" else " "


def _figures(one: Candidate, bar_columns: int, timed: bool, examples: int | None) -> list[str]:
    cells = []
    if bar_columns:
        share = one.total_bytes / max(one.usable_bytes, 1)
        full = min(round(share * bar_columns), bar_columns)
        bar = "█" * full + "░" * (bar_columns - full)
        cells.append(bar[:-1] + "+" if share > 1 else bar)
    cells += [f"{to_gib(one.total_bytes):.2f}", f"{to_gib(one.spare_bytes):.2f}"]
    if timed:
        speed = "-"
        if one.seconds is not None and one.verdict != "over":
            speed = _number((one.tokens or one.examples) / one.seconds)
        cells.append(speed)
    if examples is not None:
        whole = one.seconds is not None and one.verdict != "over"
        cells.append(_duration(one.cost * examples) if whole else "-")
    return cells


def _recommended(found: Plan) -> Iterator[str]:
    one = found.chosen
    if one is None:
        return
    parts = sorted(one.components.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    allocated = {name: peak["allocated_bytes"] for name, peak in one.phases.items()}
    fullest = max(allocated, key=allocated.__getitem__, default=one.phase)
    if one.phase in allocated and allocated[one.phase] < allocated[fullest]:
        most = (
            f"the allocator reserves more in it than for the {format_bytes(allocated[fullest])} of the {fullest} phase"
        )
    peak = f"The {one.phase} phase decides its {format_bytes(one.total_bytes)}: {most}"
    yield f"Recommended: {one.name}, {one.batch}: {one.reason}. {peak}."
    by_phase = (f"{name} {format_bytes(size)}" for name, size in allocated.items())
    yield f"Allocated at most: {', '.join(by_phase)}."
    if one.seconds is not None and one.low and one.high:
        unit, amount = ("tokens/s", one.tokens) if one.tokens else ("examples/s", float(one.examples))
        slow, fast = _number(amount / one.high), _number(amount / one.low)
        yield f"Speed: {_number(amount / one.seconds)} {unit} ({slow} to {fast}), {_number(one.seconds)} s a step."


def _with_consent(found: Plan) -> Iterator[str]:
    chosen, totals = found.chosen, {(one.techniques, one.rows): one.total_bytes for one in reversed(found.candidates)}
    for one in (lever for lever in shown_candidates(found) if lever.consents):
        times = less = ""
        if chosen is not None:
            times = "" if one.seconds is None else f", {one.cost / chosen.cost:.2f} x its time"
            freed = chosen.total_bytes - totals.get((one.techniques, chosen.rows), chosen.total_bytes)
            less = f", {format_bytes(freed)} less with as many rows" if freed > 0 else ""
        words = ",".join(one.consents)
        yield f"? Bigger lever, with your consent: allow={words}: {one.name}, {one.batch}{times}{less}."


def _short(found: Plan) -> Iterator[str]:
    short = found.shortfall
    if short is None:
        return
    near = short.nearest
    yield (
        f"Nothing fits. The nearest: {near.name}, {near.batch}, needs {format_bytes(near.total_bytes)}: "
        f"{format_bytes(short.lacks_bytes)} too much."
    )
    what = []
    if short.consents:
        what.append(f"with your consent, allow={','.join(short.consents)}")
    if short.longest is not None:
        what.append(f"rows of {short.longest} tokens")
    if short.batch is not None:
        what.append(f"an effective batch of {short.batch}")
    if short.parameters >= 10**6:
        what.append(f"a model of about {format_count(short.parameters)} parameters")
    if short.gpu:
        what.append(f"a larger GPU: {short.gpu}")
    if what:
        yield f"What would fit: {'; '.join(what)}."


# ---- JSON


ASKED = ("effective_batch_size", "goal", "method", "allow")
SAME = ("model", "parameters", *ASKED, "fits", "notes", "simulations")
"""The attributes of a plan that are fields of its JSON as they are."""


def plan_json(found: Plan, *, figures: bool = False) -> str:
    """Return everything as JSON text, memory as integers of bytes."""
    short, gpu = found.shortfall, found.gpu
    places = {one.key: place for place, one in enumerate(found.candidates)}
    whole: dict[str, Any] = {
        "format": FORMAT,
        "command": found.command or _call(found),
        **{name: getattr(found, name) for name in SAME},
        "notes": [*filter(None, [found.task_note]), *found.notes],
        "gpu": gpu.name,
        "gpu_source": gpu.source,
        "usable_bytes": gpu.usable_bytes,
        "memory_bytes": gpu.memory_bytes,
        "texts": {name: value for name, value in vars(found.texts).items() if name != "lengths"},
        "chosen": None if found.chosen is None else found.chosen.as_dict(),
        "shortfall": None if short is None else {**vars(short), "nearest": short.nearest.as_dict()},
        "candidates": [one.as_dict() for one in found.candidates],
        "shown": [places[one.key] for one in shown_candidates(found)],
        "figures": found.figures if figures else report_figures(found, simulate=False),
        "script": None if found.chosen is None else found.script(),
        "versions": {name: importlib.metadata.version(name) for name in ("hf-memopt", "torch", "transformers")},
    }
    return json.dumps(whole, indent=2)


def _call(found: Plan) -> str:
    """Return the call of ``plan`` that makes the plan, without the defaults."""
    texts, source = found.texts, None if found.simulation is None else found.simulation.model
    given: dict[str, Any] = {**(found.asked or {"gpu": found.gpu.name}), "seq_len": texts.seq_len}
    given |= {"os": found.system} if found.system else {}
    usual = zip(ASKED, (32, "speed", "auto", ()), strict=True)
    given |= {name: getattr(found, name) for name, value in usual if getattr(found, name) != value}
    model = repr(source) if isinstance(source, str) else "model"
    lengths = "" if texts.lengths is None else "lengths=lengths, "
    return f"plan({model}, {lengths}{', '.join(f'{name}={value!r}' for name, value in given.items())})"
