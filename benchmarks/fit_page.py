"""Write what ``fit_points`` simulated as a Parquet file and as a page that answers from it; ``fit_data`` calls this."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from math import log2
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import results_file
from fit_moments import LOGITS, Row, components_at
from fit_points import (
    EFFECTIVE_BATCH,
    KERNELS,
    LARGER_WORKSPACES_BYTES,
    METHODS,
    TITLES,
    between,
    has_large_workspace,
    kernels_of,
    parts_at,
)

import hf_memopt
from hf_memopt.components import COMPONENTS, CONTEXT, UNUSED
from hf_memopt.gpus import GPUS
from hf_memopt.plotting import DARK, LIGHT
from hf_memopt.prediction.memory import margin_of
from hf_memopt.prediction.memory.models import known_models
from hf_memopt.prediction.reports.pictures import colours_of
from hf_memopt.training.binding.fused_loss.chunked_loss import CHUNK_BYTES

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLAIN_GPU, PLAIN_LENGTH = GPUS["RTX 3060 12GB"], 512  # of the table without JavaScript
PAGE, DATA = DOCS / "does-it-fit.html", DOCS / "does-it-fit.parquet"
SAME = {
    **dict.fromkeys(("model", "task", "method", "kernels", "precision", "reason"), pa.string()),
    **dict.fromkeys(("parameters", "trainable", "host_bytes", "rows"), pa.int64()),
    "cpu_seconds": pa.float32(),
}
"""Columns that all points of a row have."""
UNIT_BYTES = 2**16  # of the page's whole numbers
STEPS_OF_A_FACTOR_2 = 256  # of the page's seconds: within 0.14 %


def write(rows: Sequence[Row]) -> None:
    """Write both files."""
    write_data(rows)
    PAGE.write_text(page_of(rows), encoding="utf-8")
    for path in (DATA, PAGE):
        print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1e6:.2f} MB")


def write_data(rows: Sequence[Row]) -> None:
    """Write the Parquet file, whole or not at all."""
    part = DATA.with_suffix(".part")
    pq.write_table(table_of(rows), part, compression="brotli", compression_level=11)
    part.replace(DATA)


def read_data() -> list[Row]:
    """Return the rows that the Parquet file was written of; none if there is no file."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for point in pq.read_table(DATA).to_pylist(maps_as_pydicts="strict") if DATA.exists() else []:
        same = {name: point[name] for name in SAME if point[name] is not None}
        row = found.setdefault((point["model"], point["method"], point["kernels"]), same)
        if "reason" in row:
            continue
        for name in ("lengths", "simulated", "reserved_share"):
            row.setdefault(name, [])
        row["lengths"].append(point["length"])
        row |= json.loads(point["between"]) if point["between"] else {}
        if point["is_simulated"]:
            row["simulated"].append(point["length"])
            row["reserved_share"].append(point["reserved_bytes"] / point["allocated_bytes"])
        for name, seconds in point["seconds"].items():
            row.setdefault("seconds", {}).setdefault(name, []).append(float(f"{seconds:.4g}"))
        row.setdefault("seconds", {})
    return list(found.values())


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Return a row for each model, method, kernels and length, and one with the reason for what is not simulated."""
    found = []
    for row in rows:
        same = {name: row.get(name) for name in SAME}
        for place, length in enumerate(row.get("lengths", ())):
            parts = dict(zip(COMPONENTS, map(round, components_at(row, length)), strict=True))
            allocated = sum(parts.values())
            found.append(
                {
                    **same,
                    "length": length,
                    "is_simulated": length in row["simulated"],
                    "between": None if place else json.dumps({name: row[name] for name in ("pieces", "chunk")}),
                    **{f"{name.replace(' ', '_')}_bytes": size for name, size in parts.items()},
                    "allocated_bytes": allocated,
                    "reserved_bytes": round(allocated * between(row["simulated"], row["reserved_share"], length)),
                    "seconds": {name: seconds[place] for name, seconds in row["seconds"].items()},
                }
            )
        if "reason" in row:
            found.append(same)
    fields = dict(SAME)
    fields |= {name: pa.int64() for name in ("length", "allocated_bytes", "reserved_bytes")}
    fields |= {f"{name.replace(' ', '_')}_bytes": pa.int64() for name in COMPONENTS}
    fields |= {"is_simulated": pa.bool_(), "between": pa.string(), "seconds": pa.map_(pa.string(), pa.float32())}
    told = {"hf-memopt": hf_memopt.__version__, "effective_batch": str(EFFECTIVE_BATCH)}
    return pa.Table.from_pylist(found, pa.schema(list(fields.items()), metadata=told))


# ---- The page


def page_of(rows: Sequence[Row]) -> str:
    """Return the page: its figures are compressed in it, and its script interpolates between them."""
    here, reports = Path(__file__).parent, Path(hf_memopt.__file__).parent / "prediction" / "reports"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([here, reports]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"light": asdict(LIGHT), "dark": asdict(DARK)}
    environment.filters |= {
        "gib": lambda size: f"{size / 2**30:.0f}",
        "sha256": lambda text: base64.b64encode(sha256(text.encode()).digest()).decode(),
    }
    figures, seconds = figures_of(rows)
    colours = colours_of(LIGHT)
    by_theme = {name: f"var(--{part})" for part, name in (("strong", CONTEXT), ("faint", UNUSED))}
    return environment.get_template("fit_page.html.jinja").render(
        versions={"hf-memopt": hf_memopt.__version__},
        pictures={"bar": ""},
        examples=EFFECTIVE_BATCH,
        parts={name: by_theme.get(name, colours[name]) for name in (CONTEXT, *COMPONENTS, UNUSED)},
        figures=packed(json.dumps(figures, separators=(",", ":")).encode()),
        seconds=packed(seconds.tobytes()),
        organisations=by_organisation({row["model"] for row in rows}),
        sizes=by_size(),
        titles=TITLES,
        plain=least_memory(rows),
        plain_gpu=PLAIN_GPU,
        plain_length=PLAIN_LENGTH,
        published=results_file.last_row("published")["figures"]["summaries"],
        checked=results_file.last_row("fit_data")["figures"],
    )


def packed(data: bytes) -> str:
    """Return bytes compressed as text; the same bytes give the same text."""
    made = gzip.compress(data, 9, mtime=0)
    return base64.b64encode(made[:9] + b"\x03" + made[10:]).decode()  # Unix, which Python 3.13 calls unknown


def shown_models() -> set[str]:
    """Return the models of the page."""
    return set(pq.read_table(DATA, columns=["model"])["model"].to_pylist())


def least_memory(rows: Sequence[Row]) -> dict[str, list[int | None]]:
    """Return the bytes of each model by method, for a reader without JavaScript; None where none were simulated."""
    found: dict[str, list[int | None]] = {}
    for row in rows:
        if row["kernels"] == kernels_of(PLAIN_GPU).name:
            sizes = found.setdefault(row["model"], [None] * len(METHODS))
            if "reason" not in row:
                length = None if row["lengths"][0] is None else min(PLAIN_LENGTH, row["lengths"][-1])
                sizes[[*METHODS].index(row["method"])] = round(sum(parts_at(row, PLAIN_GPU, length).values()))
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def by_organisation(names: set[str]) -> dict[str, list[str]]:
    """Return the models by who made them."""
    found: dict[str, list[str]] = {}
    for name, facts in known_models().items():
        if name in names:
            found.setdefault(facts["organisation"], []).append(name)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def by_size() -> dict[str, list[str]]:
    """Return the GPUs of the page by their size."""
    shown = [gpu for gpu in GPUS.values() if kernels_of(gpu)]
    found: dict[str, list[str]] = {}
    for gpu in sorted(shown, key=lambda gpu: gpu.memory_bytes):
        found.setdefault(f"{gpu.memory_bytes / 2**30:.0f} GB", []).append(gpu.name)
    return found


def figures_of(rows: Sequence[Row]) -> tuple[dict[str, Any], np.ndarray]:
    """Return what the script reads, and its seconds: (rows, GPUs, lengths) one after the other, as differences.

    Seconds are whole steps of a logarithm; each GPU's are those beyond the GPU before it, which compresses well.
    """
    told, logarithms, place = [], [], 0
    for row in rows:
        same = {"model": row["model"], "method": row["method"], "kernels": row["kernels"]}
        if "reason" in row:
            told.append({**same, "reason": row["reason"]})
            continue
        names = ("parameters", "host_bytes", "precision", "rows", "lengths", "simulated", "chunk")
        kept = {name: row.get(name) for name in names}
        pieces = [
            [piece["lengths"], (np.array(piece["moments"]) / UNIT_BYTES).round().astype(int).tolist()]
            for piece in row["pieces"]
        ]
        shares = [round(share, 4) for share in row["reserved_share"]]
        told.append({**same, **kept, "pieces": pieces, "shares": shares, "at": None})
        if row["seconds"]:
            told[-1]["at"] = place
            steps = [[round(STEPS_OF_A_FACTOR_2 * log2(1e4 * one)) for one in of] for of in row["seconds"].values()]
            logarithms.append(np.diff(np.array(steps, dtype=np.int16), axis=0, prepend=np.int16(0)).ravel())
            place += len(logarithms[-1])
    gpus = {
        name: {
            "kernels": kernels.name,
            "usable": gpu.usable_bytes,
            "margin": margin_of(gpu),
            "context": gpu.context_bytes,
            "large": has_large_workspace(gpu),
        }
        for name, gpu in GPUS.items()
        if (kernels := kernels_of(gpu))
    }
    figures = {
        "rows": told,
        "gpus": gpus,
        "order": {kernels.name: kernels.gpus for kernels in KERNELS},
        "titles": TITLES,
        "examples": EFFECTIVE_BATCH,
        "larger_workspaces": LARGER_WORKSPACES_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "logits": LOGITS,
    }
    return figures, np.concatenate(logarithms or [np.zeros(0, np.int16)])
