"""The section "Training memory" of a model card: what training took on which device, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.binding import checkpointing_of
from hf_memopt.memory.run import name_of
from hf_memopt.units import format_bytes
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

HEADING = "## Training memory"
SECTION = re.compile(rf"^{HEADING}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def training_memory(summary: Mapping[str, Mapping[str, int]], device: torch.device, trainer: Any) -> str:
    """Return the section about a ``MemoryReportCallback.summary``, with the arguments of a trainer, if there is one."""
    kinds = list(next(iter(summary.values()), {}))
    heads = [kind.removesuffix("_bytes").replace("_", " ") for kind in kinds]
    lines = [HEADING, "", f"Measured on {name_of(device)} by `hf_memopt.MemoryReportCallback`:", ""]
    lines += [f"| phase | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for phase, sizes in summary.items():
        cells = " | ".join(format_bytes(sizes[kind]) if kind in sizes else "" for kind in kinds)
        lines.append(f"| {phase.replace('_', ' + ')} | {cells} |")
    return "\n".join([*lines, "", *([] if trainer is None else [_settings(trainer.args), ""])])


def _settings(args: TrainingArguments) -> str:
    """Return in one line which arguments decide the memory."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    batch = f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} examples per step and device"
    checkpointing = ", gradient checkpointing" if checkpointing_of(args)[0] else ""
    return f"Batch: {batch}; {precision}, optimizer `{getattr(args.optim, 'value', args.optim)}`{checkpointing}."


def add_section(card: Path, section: str) -> None:
    """Put the section into a model card, in the place of an older one, else at the end; a missing card stays so."""
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    if SECTION.search(text):
        write_whole(card, SECTION.sub(lambda _: section, text))
    else:
        write_whole(card, f"{text.rstrip()}\n\n{section}")
