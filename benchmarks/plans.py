"""What ``plan`` chooses for eight models on five GPUs, and the largest full fine-tuning: python benchmarks/plans.py

The rows are in ``benchmarks/results/plans.jsonl``, written after each plan. Ten to twenty minutes on two idle CPU
cores; no GPU is needed, and no figure was measured on one.

python benchmarks/plans.py --only 'Llama*'    # models by name; the rows of the others stay
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatch
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import results_file

from hf_memopt import Plan, plan
from hf_memopt.units import format_bytes, to_gib

OUT = results_file.RESULTS / "plans.jsonl"
EXAMPLE_PLAN = results_file.RESULTS / "plan-example.json"  # of which README's picture is made
CASE = "plan"
EFFECTIVE_BATCH = 32
HOST_MEMORY = "32GiB"  # the same on every machine; for layers that wait there where nothing fits the GPU alone
GPUS = ("RTX 3050 4GB", "RTX 4060", "RTX 3060 12GB", "T4", "RTX 3090")
MODELS: tuple[tuple[str, int | None], ...] = (  # with the tokens of every row
    ("roberta-base", 512),
    ("bert-large-uncased", 512),
    ("t5-base", 512),
    ("vit-base-patch16-224", None),
    ("whisper-small", 128),
    ("Llama-3.2-1B", 512),
    ("Qwen2.5-1.5B", 512),
    ("Llama-3.1-8B", 512),
)
LARGEST = (  # model, GPU, effective batch: a released gradient takes it as one batch
    ("Llama-3.2-1B", "RTX 3050 4GB", 2),
    ("Llama-3.2-3B", "RTX 3060 12GB", 8),
    ("Llama-3.1-8B", "RTX 3090", 8),
)
CONSENTS = ("release_clipping", "bf16_weights")

STAGES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
SIZES = {"RTX 4060": 8, "T4": 16, "RTX 3090": 24}  # GB, of GPUs whose names have none


@dataclass(frozen=True)
class Cell:
    """A question to ``plan``."""

    model: str
    gpu: str
    seq_len: int | None
    effective_batch_size: int = EFFECTIVE_BATCH
    method: str = "auto"
    allow: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The question as text."""
        return json.dumps(asdict(self))


MODEL_CELLS = tuple(Cell(model, gpu, seq_len) for model, seq_len in MODELS for gpu in GPUS)
EXAMPLE = Cell("Qwen2.5-1.5B", "RTX 3060 12GB", 512)  # whose table README shows
LARGEST_CELLS = tuple(Cell(model, gpu, 512, batch, "full", CONSENTS) for model, gpu, batch in LARGEST)
EVERY_CELL = (*LARGEST_CELLS, *MODEL_CELLS)


def planned(cell: Cell) -> Plan:
    """Return the plan."""
    return plan(
        cell.model,
        gpu=cell.gpu,
        seq_len=cell.seq_len,
        effective_batch_size=cell.effective_batch_size,
        method=cell.method,
        allow=cell.allow,
        host_memory=HOST_MEMORY,
    )


def figures_of(cell: Cell, found: Plan) -> dict[str, Any]:
    """Return what the tables show of a plan: of the chosen set-up, or of the nearest where none fits."""
    shown = found.chosen
    if shown is None:
        assert found.shortfall is not None
        shown = found.shortfall.nearest
    recipe = shown.recipe
    return {
        **asdict(cell),
        "basis": "computed",
        "fits": found.fits,
        "verdict": shown.verdict,
        "set_up": shown.name,
        "stage": shown.stage,
        "batch": shown.batch,
        "total_bytes": shown.total_bytes,
        "usable_bytes": shown.usable_bytes,
        "per_second": _per_second(shown),
        "unit": "examples" if shown.tokens is None else "tokens",
        "parameters": found.parameters,
        "trains_all": recipe.lora is None and not recipe.freeze,
        "clipping": not recipe.gradient_release,
        **({"host_bytes": shown.host_bytes} if recipe.streamed else {}),
        **({"text": as_typed(found).table(80)} if cell == EXAMPLE else {}),
    }


def as_typed(found: Plan) -> Plan:
    """Return a plan as the command line makes it, whose last line is for a terminal."""
    return replace(found, command=f"hf-memopt plan {found.model}")


def pictured(found: Plan) -> str:
    """Return the JSON of a plan with what its picture shows: the shown set-ups, and what fits."""
    told = json.loads(found.to_json(figures=True))
    told["candidates"] = [told["candidates"][place] for place in told["shown"]]
    told["shown"] = list(range(len(told["candidates"])))
    told["figures"] |= {"timeline": None, "choices": []}
    return json.dumps({**told, "script": None}) + "\n"


def _per_second(shown: Any) -> float | None:
    if not shown.seconds:
        return None
    return float((shown.examples if shown.tokens is None else shown.tokens) / shown.seconds)


# ---- The file -------------------------------------------------------------------------------------------------------


def read_plans() -> dict[str, dict[str, Any]]:
    """Return the row of each question, by its text."""
    lines = OUT.read_text(encoding="utf-8").splitlines() if OUT.exists() else []
    return {key_of(row["figures"]): row for row in map(json.loads, lines)}


def key_of(figures: Mapping[str, Any]) -> str:
    """Return the text of the question that a row answers."""
    asked = {field.name: figures[field.name] for field in fields(Cell)}
    return Cell(**{**asked, "allow": tuple(asked["allow"])}).key


def write_plans(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the rows in the order of the questions."""
    lines = [json.dumps(rows[cell.key]) + "\n" for cell in EVERY_CELL if cell.key in rows]
    OUT.write_text("".join(lines), encoding="utf-8")


# ---- The tables -----------------------------------------------------------------------------------------------------


def plans_table() -> str:
    """Return the table of models and GPUs."""
    rows = read_plans()
    heads = [gpu if "GB" in gpu else f"{gpu}, {SIZES[gpu]} GB" for gpu in GPUS]
    lines = [
        (
            model if seq_len is None else f"{model}, {seq_len}",
            *(_cell(rows, Cell(model, gpu, seq_len)) for gpu in GPUS),
        )
        for model, seq_len in MODELS
    ]
    note = (
        "- All figures are computed, none was measured on a GPU. *full* may use checkpointing and an 8-bit AdamW; "
        "LoRA and QLoRA train adapters.\n"
        f"- `4 x 8`: 4 examples at a time, 8 times a step; always {EFFECTIVE_BATCH} examples per optimizer step\n"
        "- then the GPU memory needed, and tokens per second (ViT: images, Whisper: tokens of the labels)\n"
        "- *streamed*: too large for the GPU alone, so the layers' weights wait in host memory "
        f"({HOST_MEMORY.replace('GiB', ' GiB')} assumed)"
    )
    return results_file.markdown(f"| model, tokens | {' | '.join(heads)} |", lines, note)


def _cell(rows: dict[str, dict[str, Any]], cell: Cell) -> str:
    found = _figures(rows, cell)
    if not found["fits"]:
        return "-"
    size = f"{to_gib(found['total_bytes']):.1f} GiB"
    speed = "" if found["per_second"] is None else f", {_rounded(found['per_second'])}/s"
    host = f" + {to_gib(found['host_bytes']):.1f} in host memory" if "host_bytes" in found else ""
    streamed = "streamed " * bool(host)
    return f"{streamed}{STAGES[found['stage']]} {found['batch']}<br>{size}{host}{speed}"


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
    """Return what ``hf-memopt plan`` prints for one model and GPU."""
    return f"```text\n{_figures(read_plans(), EXAMPLE)['text']}\n```"


def largest_full() -> str:
    """Return the largest models of which every parameter is trained."""
    rows = read_plans()
    lines = []
    for cell in LARGEST_CELLS:
        found = _figures(rows, cell)
        cells = [f"{cell.model}, {cell.seq_len}, {cell.gpu}", found["batch"], "yes" if found["clipping"] else "none"]
        cells.append(f"{to_gib(found['total_bytes']):.2f} of {to_gib(found['usable_bytes']):.2f}")
        lines.append((*cells, _rounded(found["per_second"])))
    words = ", ".join(f'"{word}"' for word in CONSENTS)
    note = (
        f'`plan(model, gpu=..., method="full", allow=[{words}], effective_batch_size=...)` chooses these set-ups: '
        f"{found['set_up'].removeprefix('full, ')}. The stock `Trainer` trains every parameter. Gradients are neither "
        "accumulated nor clipped by their global norm. Computed, not measured (`python benchmarks/plans.py`)."
    )
    return results_file.markdown("| model, tokens, GPU | batch | clipping | GiB of usable | tokens/s |", lines, note)


# ---- The program ----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Plan, and write the rows after each plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models by name, such as 'Llama*'")
    only = parser.parse_args(arguments).only.lower()
    rows = read_plans()
    for cell in EVERY_CELL:
        if fnmatch(cell.model.lower(), only):
            found = planned(cell)
            figures = figures_of(cell, found)
            rows[cell.key] = results_file.row_of(CASE, figures)
            write_plans(rows)
            if cell == EXAMPLE:
                EXAMPLE_PLAN.write_text(pictured(found), encoding="utf-8")
            needs = f"{figures['set_up']}, {figures['batch']}, {format_bytes(figures['total_bytes'])}"
            print(f"{cell.model}, {cell.gpu}: {needs}", flush=True)
    print(f"rows in {OUT}")


if __name__ == "__main__":
    main()
