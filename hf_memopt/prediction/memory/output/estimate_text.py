"""Format an ``Estimate``: as a table with a verdict, and as a dict for JSON."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from itertools import chain
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt.components import COLOURS, COMPONENTS, CONTEXT, MARGIN_SHARE, parts_of
from hf_memopt.notices import Aside, quoted
from hf_memopt.technique_list import asked_by
from hf_memopt.units import format_bytes, format_count, format_number, percent, to_gib

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from hf_memopt.prediction.memory import Estimate
    from hf_memopt.prediction.memory.settings import StepSettings

FORMAT = 2  # of the JSON; raised when a field changes its meaning or goes
BAR_COLUMNS = 20
PHASES_FROM = 74  # columns, in which a line holds all of a phase
NOTHING = 0.0005  # of the total, which a table leaves out
TRUST = "simulated, not measured on a GPU; an estimate may be 5 % of the GPU off"
COLOUR = {"fits": "green", "tight": "yellow", "over": "red"}


# ---- Table


def print_estimate(
    estimate: Estimate,
    console: Console,
    wording: Callable[[str], str] = lambda text: text,
    plan: str = "",
    *,
    verbose: bool = False,
) -> None:
    """Print set-up and verdict, the table, then a line for each of peak, speed and notes; ``wording`` changes notes.

    ``plan``: what to type to find what fits, the last line where it does not surely; a call of ``plan`` by default.
    ``verbose`` shows components of nothing, the phases and every note too.
    """
    plain = partial(console.print, markup=False, highlight=False, emoji=False)
    plain(f"{describe(estimate)}\n{_parameters(estimate)}")
    plain(wording(verdict(estimate)), style=f"bold {COLOUR[estimate.verdict]}" if estimate.verdict else "bold")
    console.print(_components(estimate, "█" if console.encoding.lower().startswith("utf") else "#", verbose=verbose))
    if verbose:
        console.print(_phases(estimate, console.width))
    lines = [("Peak", decides(estimate))]
    if not verbose:
        peaks = (f"{name} {format_bytes(peak.reserved_bytes)}" for name, peak in estimate.phases.items())
        lines.append(("Reserved", ", ".join(peaks)))
    if estimate.host_bytes:
        lines.append(("Host", f"{format_bytes(estimate.host_bytes)} are moved to host memory"))
    lines += [("Speed", text) for text in _time(estimate)]
    lines += [("Note", note) for note in estimate.notes if verbose or not isinstance(note, Aside)]
    lines.append(("Trust", TRUST))
    for label, text in lines:
        begin = f"{label:<9}"
        filled = fill(
            wording(text), console.width, initial_indent=begin, subsequent_indent=" " * 9, break_on_hyphens=False
        )
        plain(filled, soft_wrap=True)
    if estimate.verdict not in (None, "fits"):
        plain(f"{'Next':<9}{plan or _plan_call(estimate)}", soft_wrap=True)


def _components(estimate: Estimate, block: str, *, verbose: bool) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("component", no_wrap=True)
    for heading in ("memory", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    parts = parts_of(estimate.components, estimate.peak_reserved_bytes, estimate.context_bytes)
    parts[CONTEXT] = parts.pop(CONTEXT)  # comes last
    largest = max(COMPONENTS, key=lambda name: parts[name])
    for name, size_bytes in parts.items():
        share = size_bytes / max(estimate.total_bytes, 1)
        bar = Text(block * round(share * BAR_COLUMNS), style=COLOURS.get(name, ""))
        style, is_unknown = "bold" if name == largest else None, name == CONTEXT and estimate.context_bytes is None
        if size_bytes < NOTHING * estimate.total_bytes and not (verbose or name == CONTEXT):
            continue
        cells = ("unknown", "") if is_unknown else (format_bytes(size_bytes), percent(share, 1))
        table.add_row(name, *cells, bar, end_section=name == CONTEXT, style=style)
    table.add_row("total", format_bytes(estimate.total_bytes), style="bold")
    return table


def _phases(estimate: Estimate, columns: int) -> RenderableType:
    """Return what each phase needs, the one that decides the total in bold."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    line = " " if columns >= PHASES_FROM else "\n"
    for heading in ("phase", f"peak{line}allocated", f"peak{line}reserved", "most of it"):
        table.add_column(heading, justify="right" if heading.startswith("peak") else "left", no_wrap=True)
    for name, peak in estimate.phases.items():
        largest = max(peak.components, key=lambda part: peak.components[part])
        sizes = (format_bytes(size) for size in (peak.allocated_bytes, peak.reserved_bytes, peak.components[largest]))
        allocated, reserved, most = sizes
        style = "bold" if name == estimate.phase else None
        table.add_row(name, allocated, reserved, f"{largest}{line}{most}", style=style)
    return table


def decides(estimate: Estimate) -> str:
    """Return in which phase memory peaks: by what tensors hold, or by what the allocator has to."""
    place = f", at {estimate.module}" if estimate.module else ""
    said, most = f"in the {estimate.phase} phase{place}", estimate.peak_allocated_bytes
    if estimate.phases[estimate.phase].allocated_bytes == most:
        return f"{said}, where most is allocated"
    fullest = max(estimate.phases, key=lambda name: estimate.phases[name].allocated_bytes)
    return f"{said}, where the allocator reserves more than for the {format_bytes(most)} of the {fullest} phase"


def _time(estimate: Estimate) -> list[str]:
    """Return the line about speed; none without a GPU."""
    time, work = estimate.step_time, f"{format_number(estimate.flops / 1e12)} TFLOP per optimizer step"
    if time is None:
        return [f"not predicted, {estimate.time_unknown}; {work}"] if estimate.time_unknown else [work]
    speed = f"{format_number(time.examples_per_second)} examples/s"
    seconds, low, high = map(format_number, (time.seconds, time.low, time.high))
    tokens = time.tokens_per_second()
    if tokens is not None:
        speed = f"{tokens:,.0f} tokens/s"
    bound = (
        f"; {percent(time.shares['launches'])} of it are launches, which depend on the CPU"
        if time.is_launch_bound
        else ""
    )
    return [f"{speed}, {seconds} s ({low} to {high} s) per optimizer step{bound}; {work}"]


def _parameters(estimate: Estimate) -> str:
    """Return how many parameters there are and are trained; adapters apart, since a model is known by its own size."""
    trained, everything = estimate.trainable_parameters, estimate.parameters
    if estimate.settings.lora is not None and not estimate.settings.freeze:  # all that is trained is PEFT's
        return f"{format_count(everything - trained)} parameters, {format_count(trained)} trainable in adapters"
    return (
        f"{format_count(everything)} parameters, {'all' if trained == everything else format_count(trained)} trainable"
    )


def describe(estimate: Estimate) -> str:
    """Return model, batch size and what differs from the stock Trainer's defaults, in one line."""
    size = f"batch {estimate.batch_size}" + ("" if estimate.seq_len is None else f" x {estimate.seq_len}")
    return f"{estimate.model}: {', '.join((size, *_choices(estimate.settings)))}"


def _choices(settings: StepSettings) -> Iterator[str]:
    if settings.gradient_accumulation_steps > 1:
        yield f"{settings.gradient_accumulation_steps} accumulation steps"
    if settings.micro_batch_size is not None:
        yield f"micro-batches of {settings.micro_batch_size}"
    yield settings.precision + (
        "" if settings.weights_dtype == "float32" else f" with {settings.weights_dtype} weights"
    )
    if settings.load_in is not None:
        yield f"{settings.load_in} linears"
    if settings.lora is not None:
        targets = {} if settings.lora_targets == "auto" else {"targets": settings.lora_targets}
        is_rank = isinstance(settings.lora, int)
        adapters = {"r": settings.lora, **targets} if is_rank else _changed_options(settings.lora)
        yield f"LoRA{_call_text(adapters)}"
    if settings.freeze:
        yield f"frozen: {', '.join(settings.freeze)}"
    if settings.optimizer_memory is None:
        yield settings.optim + (" with 8-bit embeddings" if settings.embedding_bits == 8 else "")
    else:
        yield _function_text(settings.optimizer_memory)
    if settings.loop != "trainer":
        yield f"hand-written {'step function' if settings.loop == 'function' else 'loop'}"
    if not settings.zero_grad_to_none:
        yield "gradients kept between steps"
    if settings.checkpointing:
        options = settings.checkpointing if isinstance(settings.checkpointing, Mapping) else {}
        yield f"checkpointing{_call_text(options) if options else ''}"
    if settings.rounding != "nearest":
        yield f"{settings.rounding} rounding"
    yield from (name for name, one in asked_by(settings).items() if one.fields[one.field_in(settings)] is False)
    if settings.attn_implementation is not None:
        yield f"{settings.attn_implementation} attention"
    if settings.eval_batch_size is not None:
        yield f"evaluation batch {settings.eval_batch_size}"
    if settings.expandable_segments:
        yield "expandable segments"
    yield from map(_function_text, settings.prepare)


def _changed_options(config: Any) -> dict[str, Any]:
    """Return the options of a ``LoraConfig`` that are not the defaults."""
    usual = type(config)()
    found = {item.name: getattr(config, item.name) for item in fields(config) if item.init}
    return {name: value for name, value in found.items() if value != getattr(usual, name)}


def _function_text(function: Callable[..., Any]) -> str:
    """Return the name of a function, with the arguments of a ``functools.partial``."""
    if isinstance(function, partial):
        given = {**{str(number): value for number, value in enumerate(function.args)}, **function.keywords}
        return _function_text(function.func) + _call_text(given)
    return str(getattr(function, "__name__", type(function).__name__))


def _call_text(options: Mapping[str, Any]) -> str:
    shown = {key: _function_text(value) if callable(value) else repr(value) for key, value in options.items()}
    return f"({', '.join(value if key.isdigit() else f'{key}={value}' for key, value in shown.items())})"


# ---- Verdict


def verdict(estimate: Estimate) -> str:
    """Return one sentence: whether the GPU can hold it, by how much, and if not surely, what is largest."""
    gpu, total = estimate.gpu, to_gib(estimate.total_bytes)
    if gpu is None:
        context = " and CUDA's context" if estimate.context_bytes is None else ""
        return f"NEEDS {total:.2f} GiB{context}; name a GPU to see whether it fits, for example gpu='RTX 3050 4GB'"
    spare_bytes = gpu.usable_bytes - estimate.total_bytes
    context = " (and CUDA's context, whose size is unknown)" if estimate.context_bytes is None else ""
    figures = f"{gpu.name}: {total:.2f}{context} of {to_gib(gpu.usable_bytes):.2f} GiB"
    if estimate.verdict == "fits":
        return f"FITS {figures}, {format_bytes(spare_bytes)} free"
    said = f"DOES NOT FIT {figures}, {format_bytes(-spare_bytes)} too much"
    if estimate.verdict == "tight":
        wrong = f"an estimate may be {100 // MARGIN_SHARE} % of the GPU off"
        said = f"TOO CLOSE TO TELL on {figures}, {format_bytes(spare_bytes)} free, and {wrong}"
    largest = max(COMPONENTS, key=lambda name: estimate.components[name])
    return f"{said}; most are {largest}, {format_bytes(estimate.components[largest])}"


def plan_line(model: str, **given: Any) -> str:
    """Return the command that plans a model, with the options that are given: the words of ``hf-memopt plan``.

    Examples:
        >>> plan_line("gpt2", gpu="RTX 3060 12GB", seq_len=512, task=None)
        "hf-memopt plan gpt2 --gpu 'RTX 3060 12GB' --seq-len 512"
    """
    options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None]
    return " ".join(map(quoted, ["hf-memopt", "plan", model, *chain.from_iterable(options)]))


def _plan_call(estimate: Estimate) -> str:
    """Return the same in Python: of the model that ``estimate`` was given only the display name is known."""
    assert estimate.gpu is not None
    length = "" if estimate.seq_len is None else f", seq_len={estimate.seq_len}"
    examples = estimate.batch_size * estimate.settings.gradient_accumulation_steps
    return f"plan(model, gpu={estimate.gpu.name!r}{length}, effective_batch_size={examples})"


# ---- JSON


def as_dict(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate for JSON, memory as int bytes; of the timeline only the peaks of its phases.

    Functions among the settings (``prepare``, a ``context_fn``) are given by name.
    """
    gpu = None if estimate.gpu is None else {**asdict(estimate.gpu), "bf16": estimate.gpu.bf16}
    nested = ("settings", "gpu", "timeline", "fragmentation", "step_time", "step_costs", "gradient_bytes")
    figures = {item.name: getattr(estimate, item.name) for item in fields(estimate) if item.name not in nested}
    versions = {name: importlib.metadata.version(name) for name in ("hf-memopt", "torch", "transformers")}
    found = {
        "format": FORMAT,
        **figures,
        "settings": {item.name: getattr(estimate.settings, item.name) for item in fields(estimate.settings)},
        "gpu": gpu,
        "fragmentation": None if estimate.fragmentation is None else asdict(estimate.fragmentation),
        "step_time": None if estimate.step_time is None else asdict(estimate.step_time),
        "total_bytes": estimate.total_bytes,
        "fits": estimate.fits,
        "verdict": estimate.verdict,
        "phase_peaks": {
            name: {"allocated_bytes": peak.allocated_bytes, "reserved_bytes": peak.reserved_bytes}
            for name, peak in estimate.phases.items()
        },
        "phase_components": {name: peak.components for name, peak in estimate.phases.items()},
        "versions": versions,
    }
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """Return ``value`` with types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "peft_type"):
        return _plain(_changed_options(value))
    return _function_text(value) if callable(value) else value
