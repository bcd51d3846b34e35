"""The parts of README.md that ``plan`` computes: eight models on five GPUs, and the largest full fine-tuning."""

from __future__ import annotations

from typing import Any

from plans import CONSENTS, EFFECTIVE_BATCH, EXAMPLE, GPUS, LARGEST_CELLS, MODELS, Cell, read_plans

from hf_memopt.units import to_gib

STAGES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
SIZES = {"RTX 4060": 8, "T4": 16, "RTX 3090": 24}  # GB, of GPUs whose names have none
MARKS = {"computed": "c", "measured": "m"}


def plans() -> str:
    """Return the table of models and GPUs, from ``benchmarks/plans.py``."""
    rows = read_plans()
    heads = [gpu if "GB" in gpu else f"{gpu}, {SIZES[gpu]} GB" for gpu in GPUS]
    lines = [f"| model, tokens | {' | '.join(heads)} |", f"|---|{'---|' * len(GPUS)}"]
    for model, seq_len in MODELS:
        name = model if seq_len is None else f"{model}, {seq_len}"
        lines.append(f"| {name} | {' | '.join(_cell(rows, Cell(model, gpu, seq_len)) for gpu in GPUS)} |")
    note = (
        f"What `plan` chooses with nothing allowed that changes the training but LoRA and QLoRA: micro-batch x "
        f"accumulation steps of {EFFECTIVE_BATCH} examples, GiB of the GPU, predicted tokens (images) per second; "
        "whisper: tokens of the labels. c: computed, m: measured (`python benchmarks/plans.py`)."
    )
    return "\n".join([*lines, "", note])


def _cell(rows: dict[str, dict[str, Any]], cell: Cell) -> str:
    found = _figures(rows, cell)
    if not found["fits"]:
        return "-"
    size = f"{to_gib(found['total_bytes']):.1f} GiB"
    speed = "" if found["per_second"] is None else f", {_rounded(found['per_second'])}/s"
    return f"{STAGES[found['stage']]} {found['batch']}<br>{size}{speed} {MARKS[found['basis']]}"


def _figures(rows: dict[str, dict[str, Any]], cell: Cell) -> dict[str, Any]:
    if cell.key not in rows:
        raise SystemExit(f"{cell} was not planned; expected a row of it. Run: python benchmarks/plans.py")
    figures: dict[str, Any] = rows[cell.key]["figures"]
    return figures


def _rounded(value: float) -> str:
    """Return a number with two significant digits; a prediction is no more exact."""
    digits = 2 - len(str(int(value)))
    return f"{round(value, digits):,.0f}" if value >= 10 else f"{value:.2g}"


def plan_example() -> str:
    """Return what ``hf-memopt plan`` prints for one model and GPU, from ``benchmarks/plans.py``."""
    return f"```text\n{_figures(read_plans(), EXAMPLE)['text']}\n```"


def largest_full() -> str:
    """Return the largest models of which every parameter is trained, from ``benchmarks/plans.py``."""
    rows = read_plans()
    lines = ["| model, tokens, GPU | batch | clipping | GiB of usable | tokens/s |", "|---|---|---|---|---|"]
    for cell in LARGEST_CELLS:
        found = _figures(rows, cell)
        cells = [f"{cell.model}, {cell.seq_len}, {cell.gpu}", found["batch"], "yes" if found["clipping"] else "none"]
        cells.append(f"{to_gib(found['total_bytes']):.2f} of {to_gib(found['usable_bytes']):.2f}")
        lines.append(f"| {' | '.join(cells)} | {_rounded(found['per_second'])} |")
    words = ", ".join(f'"{word}"' for word in CONSENTS)
    note = (
        f'Every parameter trained by the stock `Trainer`: `plan(model, gpu=..., method="full", allow=[{words}], '
        f"effective_batch_size=...)` chooses {found['set_up'].removeprefix('full, ')}; gradients are neither "
        "accumulated nor clipped by their global norm. Computed, not measured (`python benchmarks/plans.py`)."
    )
    return "\n".join([*lines, "", note])
