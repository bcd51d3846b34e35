"""Format an ``Estimate``: as a table with a verdict, and as a dict for JSON."""

from __future__ import annotations

import importlib.metadata
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.versions import allocator_variable
from hf_memopt.memory.timeline import COMPONENTS, phase_peaks
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from hf_memopt.devices.gpus import Gpu
    from hf_memopt.memory.result import Estimate
    from hf_memopt.memory.settings import StepSettings

__all__ = ["as_dict", "describe", "estimate_table", "print_estimate", "verdict"]

COLUMNS = 80


# ---- Table


def estimate_table(estimate: Estimate) -> str:
    """Return the estimate as plain text of at most 80 columns, the verdict at its end."""
    from rich.console import Console

    text = io.StringIO()
    print_estimate(estimate, Console(file=text, width=COLUMNS, color_system=None))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def print_estimate(estimate: Estimate, console: Console) -> None:
    """Print the table to a terminal, the verdict in colour."""
    trained = estimate.trainable_parameters
    heading = (
        f"{describe(estimate)}\n{_count(estimate.parameters)} parameters, "
        f"{'all' if trained == estimate.parameters else _count(trained)} trainable; "
        f"{estimate.flops / 1e12:,.3g} TFLOP per optimizer step"
    )
    place = f", in {estimate.module}" if estimate.module else ""
    lines = [f"The peak is reached in the {estimate.phase} phase{place}."]
    if estimate.host_bytes:
        lines.append(f"Moved to the host: {format_bytes(estimate.host_bytes)}.")
    lines += [f"Note: {note}" for note in estimate.notes]
    plain = partial(console.print, markup=False, highlight=False, emoji=False)
    plain(heading)
    console.print(_components(estimate))
    plain("\n".join(lines))
    style = {True: "bold green", False: "bold red", None: "bold"}[estimate.fits]
    plain(verdict(estimate), style=style)


def _components(estimate: Estimate) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("component", no_wrap=True)
    for heading in ("at the peak", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in COMPONENTS:
        size_bytes = estimate.components[name]
        last = name == COMPONENTS[-1]
        share = f"{size_bytes / estimate.peak_allocated_bytes:.1%}"
        table.add_row(name, format_bytes(size_bytes), share, end_section=last)
    context = "unknown" if estimate.context_bytes is None else format_bytes(estimate.context_bytes)
    table.add_row("peak allocated", format_bytes(estimate.peak_allocated_bytes))
    table.add_row("peak reserved", format_bytes(estimate.peak_reserved_bytes))
    table.add_row("CUDA context", context)
    table.add_row("total", format_bytes(estimate.total_bytes), style="bold")
    return table


def _count(elements: int) -> str:
    for factor, sign in ((10**9, "B"), (10**6, "M")):
        if elements >= factor:
            return f"{elements / factor:,.1f} {sign}"
    return f"{elements:,}"


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
    if settings.optimizer_memory is None:
        yield settings.optim + (" with 8-bit embeddings" if settings.embedding_bits == 8 else "")
    else:
        yield _function_text(settings.optimizer_memory)
    if settings.loop == "manual":
        yield "hand-written loop"
    if not settings.zero_grad_to_none:
        yield "gradients kept between steps"
    if settings.checkpointing:
        options = settings.checkpointing if isinstance(settings.checkpointing, Mapping) else {}
        yield f"checkpointing{_call_text(options) if options else ''}"
    if settings.gradient_release:
        yield "gradient release"
    if settings.attn_implementation is not None:
        yield f"{settings.attn_implementation} attention"
    if settings.eval_batch_size is not None:
        yield f"evaluation batch {settings.eval_batch_size}"
    if settings.expandable_segments:
        yield "expandable segments"
    yield from map(_function_text, settings.prepare)


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
    """Return one sentence: whether the GPU can hold it, by how much, and if not, what to try."""
    gpu, total = estimate.gpu, format_bytes(estimate.total_bytes)
    if gpu is None:
        context = " and CUDA's context" if estimate.context_bytes is None else ""
        return f"needs {total}{context}; name a GPU to see whether it fits, for example gpu='RTX 3050 4GB'"
    spare_bytes = gpu.usable_bytes - estimate.total_bytes
    context = " (and CUDA's context, whose size is unknown)" if estimate.context_bytes is None else ""
    figures = f"{gpu.name}: {total}{context} of {format_bytes(gpu.usable_bytes)}"
    if spare_bytes >= 0:
        return f"fits {figures}, {format_bytes(spare_bytes)} to spare"
    return f"does not fit {figures}, {format_bytes(-spare_bytes)} over; try {_advice(estimate, gpu)}"


def _advice(estimate: Estimate, gpu: Gpu) -> str:
    """Return a change of the set-up: against fragmentation, or one that lowers the largest component possible."""
    settings = estimate.settings
    allocated_bytes, reserved_bytes = estimate.peak_allocated_bytes, estimate.peak_reserved_bytes
    if allocated_bytes + (estimate.context_bytes or 0) <= gpu.usable_bytes and not settings.expandable_segments:
        return (
            f"{allocator_variable()}=expandable_segments:True (estimate it with expandable_segments=True): tensors "
            f"hold {format_bytes(allocated_bytes)} of the {format_bytes(reserved_bytes)} reserved"
        )
    if _gathers_logits(estimate):
        return (
            "eval_accumulation_steps=1, or prediction_loss_only=True where no metric needs logits: "
            f"{format_bytes(estimate.components['logits and loss'])} of the peak are logits and loss that are "
            "gathered on the GPU"
        )
    if estimate.phase == "evaluation" and (settings.eval_batch_size or 1) > 1:
        return f"eval_batch_size={_half(settings.eval_batch_size or 1)}: the peak is reached in the evaluation"
    for name in sorted(COMPONENTS, key=lambda name: estimate.components[name], reverse=True):
        fix = _fix(name, estimate)
        if fix is not None:
            return f"{fix}: {format_bytes(estimate.components[name])} of the peak are {name}"
    return "a smaller model"


def _gathers_logits(estimate: Estimate) -> bool:
    """Return whether logits of several batches are most of what the evaluation adds to the weights."""
    settings, components = estimate.settings, estimate.components
    gathered = min(settings.eval_batches, settings.eval_accumulation_steps or settings.eval_batches)
    if settings.eval_batch_size is None or settings.prediction_loss_only or settings.batch_eval_metrics:
        return False
    of_a_pass = components["activations"] + components["temporaries"]
    return estimate.phase == "evaluation" and gathered > 1 and components["logits and loss"] > of_a_pass


def _fix(component: str, estimate: Estimate) -> str | None:
    settings = estimate.settings
    if component == "activations" and not settings.checkpointing:
        return "checkpointing=True"
    if component == "temporaries" and estimate.phase == "optimizer" and settings.optim == "adamw_torch":
        return "optim='adamw_torch_fused'"
    if component in ("activations", "logits and loss", "temporaries") and estimate.phase != "optimizer":
        return _smaller_pass(estimate)
    if component == "optimizer state":
        return _smaller_state(settings.optim)
    if component in ("weights", "gradients") and estimate.trainable_parameters == estimate.parameters:
        return "LoRA, or freeze(model, 'embeddings')"
    return None


def _smaller_pass(estimate: Estimate) -> str | None:
    """Return the next smaller forward pass with the same effective batch."""
    settings, batch_size = estimate.settings, estimate.batch_size
    rows = min(settings.micro_batch_size or batch_size, batch_size)
    if rows == 1 or settings.gradient_release:
        return None
    if settings.micro_batch_size is not None:
        return f"micro_batch_size={_half(rows)}"
    smaller = _half(batch_size)
    steps = settings.gradient_accumulation_steps * batch_size // smaller
    return f"batch_size={smaller}, gradient_accumulation_steps={steps}"


def _half(size: int) -> int:
    """Return the largest proper divisor of ``size``."""
    return max(smaller for smaller in range(1, size // 2 + 1) if size % smaller == 0)


def _smaller_state(optim: str) -> str | None:
    if not optim.startswith("adamw"):
        return None
    return "optim='paged_adamw_8bit'" if "8bit" in optim else "optim='adamw_8bit'"


# ---- JSON


def as_dict(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate for JSON, memory as int bytes; of the timeline only the peaks of its phases.

    Functions among the settings (``prepare``, a ``context_fn``) are given by name.
    """
    gpu = None if estimate.gpu is None else {**asdict(estimate.gpu), "bf16": estimate.gpu.bf16}
    nested = ("settings", "gpu", "timeline")
    figures = {item.name: getattr(estimate, item.name) for item in fields(estimate) if item.name not in nested}
    versions = {name: importlib.metadata.version(name) for name in ("hf-memopt", "torch", "transformers")}
    found = {
        **figures,
        "settings": {item.name: getattr(estimate.settings, item.name) for item in fields(estimate.settings)},
        "gpu": gpu,
        "total_bytes": estimate.total_bytes,
        "fits": estimate.fits,
        "phase_peaks": phase_peaks(estimate.timeline),
        "versions": versions,
    }
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """Return ``value`` with types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return _function_text(value) if callable(value) else value
