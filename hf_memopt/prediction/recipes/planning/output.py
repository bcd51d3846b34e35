"""Show a ``Plan`` as text for a terminal of any width, and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from hf_memopt.notices import Aside, quoted
from hf_memopt.prediction.memory.step_time import equally_fast
from hf_memopt.prediction.recipes.planning.choice import best_of
from hf_memopt.prediction.recipes.planning.nearest import NAMES
from hf_memopt.prediction.recipes.planning.report_figures import report_figures
from hf_memopt.prediction.recipes.planning.request import GOALS
from hf_memopt.prediction.recipes.planning.set_ups import CHECKPOINTING
from hf_memopt.prediction.reports.plan import FORMAT
from hf_memopt.training.binding.model import head_for
from hf_memopt.units import format_bytes, format_count, percent, to_gib
from hf_memopt.units import format_duration as _duration
from hf_memopt.units import format_number as _number

if TYPE_CHECKING:
    from rich.console import Console

    from hf_memopt.prediction.recipes.planning.result import Plan
    from hf_memopt.prediction.recipes.planning.simulated import Candidate

SHOWN_FITTING, SHOWN_OVER = 4, 2  # rows of a table beside the chosen one
SHORT_ROWS, LEAST_ROWS, SHORT_TABLE_LINES = 5, 2, 9  # of a table that is not verbose
SHORT_LINES = 18  # of a plan that is not verbose
MARKS = {">": "recommended", "~": "tight", "x": "does not fit", "?": "needs consent"}
STYLES = {">": "bold green", "~": "yellow", "x": "red", "?": "yellow"}  # of rich, in a terminal alone
VERDICT_STYLES = {"fits": "bold green", "tight": "bold yellow", "over": "bold red"}
BAR_FROM, WIDE_FROM = 76, 100  # columns of a terminal
LEAST_COLUMNS = 40
LABEL_COLUMNS = 9
NO_BREAK = "\N{NO-BREAK SPACE}"
EPOCHS = {"fixed": "padded", "bucketed": "by length", "packed": "packed"}

Wording = Callable[[str], str]


# ---- Text


def plan_text(found: Plan, width: int = 80, *, verbose: bool = False) -> str:
    """Return the plan as text of at most ``width`` columns (at least 40)."""
    return "\n".join(line for line, _ in _lines(found, width, lambda text: text, _next(found), verbose=verbose))


def print_plan(
    found: Plan,
    console: Console,
    wording: Wording = lambda text: text,
    *,
    verbose: bool = False,
    is_written: bool = False,
) -> None:
    """Print the plan, in a terminal with its verdicts in colour unless NO_COLOR is set; ``wording`` changes notes."""
    bars = {} if console.encoding.lower().startswith("utf") else str.maketrans("█░", "#.")
    ends = () if is_written and found.fits else _next(found)
    for line, style in _lines(found, console.width, wording, ends, verbose=verbose):
        console.out(line.translate(bars), style=style or None, highlight=False)


def print_plans(plans: Sequence[Plan], console: Console, wording: Wording, *, verbose: bool = False) -> None:
    """Print the plans of one model for several GPUs, a row a GPU: the chosen set-up, or the nearest where none fits."""
    width, texts, rows = max(console.width, LEAST_COLUMNS), plans[0].texts, []
    for found in plans:
        one = found.shortfall.nearest if found.shortfall else found.chosen
        assert one is not None
        mark = {"fits": " ", "tight": "~", "over": "x"}[one.verdict]
        rows.append((mark, f"{found.gpu.name}: {_name(one, found)}", one))
    shared = [note for note in plans[0].notes if all(note in found.notes for found in plans)]
    of_gpus = [f"{found.gpu.name}: {note}" for found in plans for note in found.gpu.notes if note not in shared]
    notes = [wording(f"{note}.") for note in (*_shown_notes(shared, verbose=verbose), *of_gpus)]
    heading = _filled(_heading(plans[0], f"{len(plans)} GPUs"), width)
    table = _laid_out(rows, width, texts.rows, 0, "GPU: set-up")
    ends = [("Note", note) for note in notes]
    ends += [("Trust", TRUST), ("Next", "a plan for one GPU has its reasons, and --write its script")]
    for line, style in (*heading, ("", ""), *table, ("", ""), *_labelled(ends, width)):
        console.out(line, style=style or None, highlight=False)


TRUST = "simulated, not measured on this GPU"


def _lines(
    found: Plan, width: int, wording: Wording, ends: Iterable[tuple[str, str]], *, verbose: bool
) -> Iterator[tuple[str, str]]:
    width = max(width, LEAST_COLUMNS)
    one = found.chosen
    style = VERDICT_STYLES["over" if one is None else one.verdict]
    verdict = [(line, style) for line, _ in _filled([_verdict(found)], width)]
    top = [*_filled(_heading(found), width), *verdict, ("", "")]
    labelled = [*(_of_shortfall(found) if one is None else _of_chosen(found, one, verbose=verbose)), *_epochs(found)]
    labelled += _with_consent(found)
    notes, trust = _shown_notes(found.notes, verbose=verbose), ("Trust", f"{TRUST}; 5 % of it is kept free")
    before, of_notes, after = (
        [list(_labelled([(label, wording(text))], width)) for label, text in rows]
        for rows in (labelled, [("Note", note) for note in notes], [trust, *ends])
    )
    left = SHORT_LINES - sum(map(len, (top, *before, *after)))  # for the table, an empty line and notes
    noted = min(len(of_notes), 1)
    if noted and (one is None or found.rows is not None):  # where nothing fits, and of the user's data: a note in full
        noted = len(of_notes[0]) + (len(of_notes) > 1)
    table = [*_table(found, width, None if verbose else left - 1 - noted), ("", "")]
    if not verbose:
        of_notes = [*_cut(of_notes, left - len(table), "-v" if found.command else "table(verbose=True)")]
    yield from chain(top, table, *before, *of_notes, *after)


def _cut(notes: Sequence[list[tuple[str, str]]], room: int, more: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the lines of each note that there is room for, then how many there are besides."""
    for number, lines in enumerate(notes):
        others = len(notes) - number
        if len(lines) + (others > 1) > room:
            yield [(f"{'Note':<{LABEL_COLUMNS}}{others} more note{'s' * (others > 1)}: {more}", "")]
            return
        yield lines
        room -= len(lines)


def _shown_notes(notes: Iterable[str], *, verbose: bool) -> list[str]:
    return [note for note in notes if verbose or not isinstance(note, Aside)]


def _labelled(rows: Iterable[tuple[str, str]], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of texts, each behind its label."""
    for label, text in rows:
        for number, (line, _) in enumerate(_filled([text], width - LABEL_COLUMNS)):
            yield f"{'' if number else label:<{LABEL_COLUMNS}}{line}", ""


def _verdict(found: Plan) -> str:
    """Return in one sentence whether it fits, with what, and what it needs."""
    one = found.chosen
    near = one or (found.shortfall.nearest if found.shortfall else found.candidates[0])
    sizes = f"{to_gib(near.total_bytes):.2f} of {to_gib(near.usable_bytes):.2f} GiB"
    if one is None:
        return f"DOES NOT FIT: the smallest set-up needs {sizes}"
    if one.seconds is not None:
        amount, unit = _amount(one)
        sizes += f", about {_number(float(f'{amount / one.seconds:.3g}'))} {unit}"
    word = "FITS" if one.fits else "TIGHT"
    return f"{word} with {_name(one, found)}, batch {one.batch}: {sizes}"


def _amount(one: Candidate) -> tuple[float, str]:
    """Return what a step trains, and the unit of its speed."""
    return (one.tokens, "tokens/s") if one.tokens else (float(one.examples), "examples/s")


def _of_chosen(found: Plan, one: Candidate, *, verbose: bool) -> Iterator[tuple[str, str]]:
    yield "Why", f"{one.reason}{f'; {found.passed_over}' if found.passed_over else ''}"
    parts = sorted(one.components.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    allocated = {name: peak["allocated_bytes"] for name, peak in one.phases.items()}
    fullest = max(allocated, key=allocated.__getitem__, default=one.phase)
    if one.phase in allocated and allocated[one.phase] < allocated[fullest]:
        most = f"the allocator reserves more in it than for the {format_bytes(allocated[fullest])} of {_in(fullest)}"
    yield "Peak", f"in {_in(one.phase)}: {most}"
    if verbose:
        yield "Phases", ", ".join(f"{name} {format_bytes(size)}" for name, size in allocated.items()) + ", allocated"
    if one.seconds is not None and one.low and one.high:
        amount, unit = _amount(one)
        speeds = f"{_number(amount / one.high)} to {_number(amount / one.low)} {unit}"
        yield "Speed", f"{speeds}, {_number(one.seconds)} s per optimizer step"


def _in(phase: str) -> str:
    names = {"load": "loading", "optimizer": "the optimizer step", "evaluation": "evaluation"}
    return names.get(phase, f"the {phase} pass")


def _of_shortfall(found: Plan) -> Iterator[tuple[str, str]]:
    """Yield what fails first of the smallest set-up, and what would fit."""
    short = found.shortfall
    assert short is not None
    near = short.nearest
    room = near.usable_bytes - near.context_bytes
    over = [name for name, peak in near.phases.items() if peak["reserved_bytes"] > room]
    name = over[0] if over else near.phase
    parts: Mapping[str, int] = (near.phases[name]["components"] if over else {}) or near.components
    largest = max(parts, key=parts.__getitem__)
    where = name if name in ("load", "evaluation") else f"step 1, {name}"
    reach = (
        f"{where}: {largest} reach {format_bytes(parts[largest])}, {format_bytes(short.lacks_bytes)} too much in all"
    )
    yield "Fails", reach if over else near.says()
    what = []
    if found.method == "full":
        what.append("perhaps LoRA or QLoRA on this GPU: leave method='full' out")
    if short.consents:
        what.append(f"with your consent, allow={','.join(short.consents)}")
    if short.longest is not None:
        what.append(f"examples of {short.longest} tokens")
    if short.batch is not None:
        what.append(f"{short.batch} example{'s' * (short.batch != 1)} per step")
    if short.gpu:
        what.append(f"a larger GPU: {short.gpu}")
    if short.parameters >= 10**6:
        what.append(f"a model of about {format_count(short.parameters)} parameters")
    if what:
        yield "Fits", "; ".join(what)


def _next(found: Plan) -> tuple[tuple[str, str], ...]:
    """Return what to do next: write the script, or plan what would fit."""
    short, is_typed = found.shortfall, bool(found.command)
    if short is None:
        has_script = "script" in head_for(found.task).traits
        made = "makes run/train.py for this set-up" if has_script else "writes the recipe to run/"
        return (("Next", f"add --write run      {made}" if is_typed else f"plan.write('run')      {made}"),)
    changed: dict[str, Any] = {}
    if short.consents:
        changed = {"allow": ",".join(short.consents)}
    elif short.longest is not None:
        changed = {"seq_len": short.longest}
    elif short.batch is not None:
        changed = {"effective_batch": short.batch}
    elif short.gpu:
        changed = {"gpu": short.gpu}
    if not changed:
        return ()
    ((name, value),) = changed.items()
    if not is_typed:
        name = name.replace("effective_batch", "effective_batch_size")
        return (("Next", f"call plan with {name}={value!r}"),)
    return (("Next", with_option(found.command, f"--{name.replace('_', '-')}", str(value))),)


def with_option(command: str, option: str, value: str) -> str:
    """Return a command with an option, in place of those of the same name.

    Examples:
        >>> with_option("hf-memopt plan gpt2 --gpu T4 --seq-len 512", "--gpu", "RTX 4090")
        "hf-memopt plan gpt2 --seq-len 512 --gpu 'RTX 4090'"
    """
    words = shlex.split(command, posix=os.name != "nt")
    drop = {place + step for place, word in enumerate(words) if word == option for step in (0, 1)}
    kept = [word for place, word in enumerate(words) if place not in drop]
    return " ".join(map(quoted, [*kept, option, value]))


def _epochs(found: Plan) -> Iterator[tuple[str, str]]:
    """Yield what an epoch of the given data costs padded, in buckets and packed."""
    padding = report_figures(found, simulate=False)["padding"]
    if padding is None:
        return
    ways = padding["strategies"]
    kept = [ways[0], *(way for way in ways if way["name"].startswith(("bucketed(batch", "packed")))]
    costs: list[str] = []
    for way in kept:  # "bucketed(batch_size=4)"
        time = "" if way["epoch_seconds"] is None else f" ({_duration(way['epoch_seconds'])})"
        name = EPOCHS[re.split(r"\W", way["name"])[0]]
        costs.append(f"{name} {way['epoch_tokens']:,}{'' if costs else ' tokens'}{time}")
    yield "Epoch", ", ".join(costs)


def _filled(paragraphs: Iterable[str], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of paragraphs; "32 x 1" and "1.5 GiB" stay in one line."""
    for text in paragraphs:
        kept = re.sub(r"(?<=\d) (?=(x \d|[KMG]iB\b|%))|(?<=\d x) (?=\d)", NO_BREAK, text)
        kept = kept.replace("      ", NO_BREAK * 6)
        for line in wrap(kept, width, break_on_hyphens=False):
            yield line.replace(NO_BREAK, " "), ""


def _heading(found: Plan, gpus: str = "") -> Iterator[str]:
    gpu, texts = found.gpu, found.texts
    yield from filter(None, [found.task_note])
    what = []
    if texts.lengths is not None:
        what.append(f"{texts.rows:,} examples, mean {texts.tokens:.0f} tokens, padded {texts.width}")
    if texts.seq_len is not None:
        what.append(f"{'planned for ' * bool(what)}{texts.seq_len} tokens")
    what.append(f"{found.effective_batch_size} example{'s' * (found.effective_batch_size != 1)} per step")
    what += filter(None, [_precision(found)])
    what += [f"goal: {GOALS[found.goal]}"] if found.goal != "speed" else []
    yield f"{found.model} ({format_count(found.parameters)}) on {gpus or gpu.name}: {', '.join(what)}"


def _precision(found: Plan) -> str:
    """Return the precision that the names of all set-ups have, where it is one; else ""."""
    named = {one.recipe.precision for one in found.candidates if one.recipe.precision in one.name.split(", ")}
    return named.pop() if len(named) == 1 else ""


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


def _table(found: Plan, width: int, room: int | None) -> list[tuple[str, str]]:
    """Return the lines of the table, of its most telling rows where there is room for so many lines."""
    shown = shown_candidates(found)
    kept = shown if room is None else _most_telling(found, shown)
    bar_columns = 0 if width < BAR_FROM else 10 if width < WIDE_FROM else 16
    examples = found.texts.rows if width >= BAR_FROM else None  # of an epoch, whose time is shown
    while True:
        rows = [(_mark(one, found), _name(one, found), one) for one in shown if one in kept]
        lines = list(_laid_out(rows, width, examples, bar_columns, "set-up"))
        if room is None or len(kept) <= LEAST_ROWS or len(lines) <= min(room, SHORT_TABLE_LINES):
            return lines
        kept = kept[:-1]


def _most_telling(found: Plan, shown: Sequence[Candidate]) -> list[Candidate]:
    """Return the rows of a short table: the chosen one, then one of each reason to show more."""
    reasons = _Shown(found)
    order = [*shown[:1], *reasons.best_of_stages(), *reasons.simplest_over()[:1], *reasons.worth_asking()]
    order += [*reasons.recomputed(), *reasons.tight()[:1], *shown]
    return list({id(one): one for one in order}.values())[:SHORT_ROWS]


def _name(one: Candidate, found: Plan) -> str:
    """Return the name of a set-up, without the precision of the heading, and with a length that is another one."""
    method, *techniques = one.name.split(", ")
    kept = [NAMES.get(method, method), *(name for name in techniques if name != _precision(found))]
    return ", ".join(kept) + (f", {one.seq_len} tokens" if one.seq_len != found.texts.seq_len else "")


def _laid_out(
    rows: Sequence[tuple[str, str, Candidate]], width: int, examples: int | None, bar_columns: int, name_heading: str
) -> Iterator[tuple[str, str]]:
    """Yield the lines of a table of candidates with their marks and names, and of the marks' meanings."""
    timed = _is_timed(one for _, _, one in rows)
    text = any(one.tokens is not None for _, _, one in rows)
    epoch = timed and examples is not None
    headings = ["batch", "memory, GiB" if bar_columns else "GiB", "free"]
    headings += [*(["tokens/s" if text else "examples/s"] if timed else []), *(["epoch"] if epoch else [])]
    table = [[one.batch, *_figures(one, bar_columns, timed, examples if epoch else None)] for _, _, one in rows]
    columns = [max(len(headings[i]), *(len(row[i]) for row in table)) for i in range(len(headings))]
    name_columns = min(width - 3 - sum(columns) - 2 * len(columns), max(len(name) for _, name, _ in rows))
    name_columns = max(name_columns, 12)
    if bar_columns and any(len(name) > name_columns for _, name, _ in rows):
        yield from _laid_out(rows, width, examples, 0, name_heading)
        return

    def line(mark: str, name: str, cells: Sequence[str]) -> str:
        left = {0, 1} if bar_columns else {0}
        shown = [f"{c:<{n}}" if i in left else f"{c:>{n}}" for i, (c, n) in enumerate(zip(cells, columns, strict=True))]
        return "  ".join([f" {mark} {name:<{name_columns}}", *shown]).rstrip()

    yield line(" ", name_heading, headings), "bold"
    for (mark, name, _), row in zip(rows, table, strict=True):
        first, *rest = wrap(name, name_columns)
        yield line(mark, first, row), STYLES.get(mark, "")
        yield from ((f"     {more}", STYLES.get(mark, "")) for more in rest)
    marks = {mark for mark, _, _ in rows}
    legend = [f"{sign} {meaning}" for sign, meaning in MARKS.items() if sign in marks]
    one = rows[0][2]
    times = "once" if one.accumulation_steps == 1 else f"{one.accumulation_steps} times"
    legend += [f"{one.batch}: {one.rows} at a time, {times} a step"]
    while len(said := "   ".join(legend)) >= width:
        legend.pop()
    if legend:
        yield f" {said}", ""


def _is_timed(rows: Iterable[Candidate]) -> bool:
    return any(one.seconds is not None and one.verdict != "over" for one in rows)


def _mark(one: Candidate, found: Plan) -> str:
    if one is found.chosen:
        return ">"
    return "x" if one.verdict == "over" else "?" if one.consents else "~" if one.verdict == "tight" else " "


def _figures(one: Candidate, bar_columns: int, timed: bool, examples: int | None) -> list[str]:
    cells, bar = [], ""
    if bar_columns:
        share = one.total_bytes / max(one.usable_bytes, 1)
        full = min(round(share * bar_columns), bar_columns)
        bar = "█" * full + "░" * (bar_columns - full)
        bar = f"{bar[:-1]}+ " if share > 1 else f"{bar} "
    cells += [f"{bar}{to_gib(one.total_bytes):{6 if bar_columns else 0}.2f}", f"{to_gib(one.spare_bytes):.2f}"]
    if timed:
        speed = "-"
        if one.seconds is not None and one.verdict != "over":
            speed = _number((one.tokens or one.examples) / one.seconds)
        cells.append(speed)
    if examples is not None:
        whole = one.seconds is not None and one.verdict != "over"
        cells.append(_duration(one.cost * examples) if whole else "-")
    return cells


def _with_consent(found: Plan) -> Iterator[tuple[str, str]]:
    chosen, totals = found.chosen, {(one.techniques, one.rows): one.total_bytes for one in reversed(found.candidates)}
    for one in (lever for lever in shown_candidates(found) if lever.consents):
        gains = []
        if chosen is not None:
            ratio = 1.0 if one.seconds is None else one.cost / chosen.cost
            gains += [f"{percent(1 - ratio)} less time"] if ratio < 1 else []
            gains += [f"{percent(ratio - 1)} more time"] if ratio > 1 else []
            freed = chosen.total_bytes - totals.get((one.techniques, chosen.rows), chosen.total_bytes)
            gains += [f"{format_bytes(freed)} less"] if freed > 0 else []  # with as many examples
        yield "Option", f"allow={','.join(one.consents)} changes training: {' and '.join(gains) or 'fits'}"


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
