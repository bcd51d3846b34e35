"""What ``hf-memopt gpus`` does: list the known GPUs by memory, all or those of some words."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_memopt.cli.command import wrapped
from hf_memopt.terminal import Console
from hf_memopt.training.devices import GPUS

if TYPE_CHECKING:
    from hf_memopt.cli.options import GpusOptions

GIB = 2**30
NOTE = (
    "GiB: memory as sold; usable: by all processes together. bf16: native. sm: compute capability. TFLOP/s: 16-bit "
    "matrix products, as specified (-: not published). GB/s: memory bandwidth.\nNext: hf-memopt plan MODEL --gpu NAME"
)


def run(options: GpusOptions, context: Any) -> None:
    """Print the GPUs as a table or as JSON."""
    asked, console = " ".join(options.words or ()), Console()
    words = re.sub(r"(\d) gb\b", r"\1gb", asked.lower().replace("-", " ")).split()
    names = {name: name.lower().replace(" ", "") for name in GPUS}
    sizes = {name: f"{gpu.memory_bytes // GIB}gb" for name, gpu in GPUS.items()}
    found = [
        gpu
        for name, gpu in GPUS.items()
        if all(word == sizes[name] if re.fullmatch(r"\d+gb", word) else word in names[name] for word in words)
    ]
    if not found:
        raise ValueError(
            f"words={asked!r} is in no name of the {len(GPUS)} GPUs; expected parts of a name, such as 3060, "
            "or a size. List all: hf-memopt gpus"
        )
    if options.json_output:
        console.out(json.dumps([{**asdict(gpu), "bf16": gpu.bf16} for gpu in found], indent=2), highlight=False)
        return
    table = Table("GPU", box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    for heading in ("GiB", "usable", "bf16", "sm", "TFLOP/s", "GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for gpu in sorted(found, key=lambda gpu: gpu.memory_bytes):
        rate, bandwidth = gpu.peak_flops_per_second.fp16, gpu.bandwidth_bytes_per_second
        table.add_row(
            gpu.name,
            f"{gpu.memory_bytes / GIB:.0f}",
            f"{gpu.usable_bytes / GIB:.2f}",
            "yes" if gpu.bf16 else "no",
            "{}.{}".format(*gpu.compute_capability),
            "-" if rate is None else f"{rate / 1e12:.0f}",
            "-" if bandwidth is None else f"{bandwidth / 1e9:,.0f}",
        )
    console.print(table, crop=False)
    console.out(wrapped(NOTE, console), highlight=False)
