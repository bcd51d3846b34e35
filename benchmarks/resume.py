"""What memory of the host it takes to load an optimizer's state for a GPU: python benchmarks/resume.py

Stock (``torch.load``, ``load_state_dict``) against what ``ShardedCheckpointCallback`` does instead, each in a fresh
process, which reads the peak of its anonymous memory: pages of a mapped file are the file's own. The parameters are on
the meta device, which stands for the GPU, so no GPU is needed; every byte of the state is read, as a copy to a GPU
reads it. Linux only. glibc keeps freed blocks for later use once it has seen blocks of their size freed;
``MALLOC_MMAP_THRESHOLD_`` makes it give them back, so that the figures are what is held.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from fresh_process import in_fresh_process
from results_file import markdown, show
from torch import nn

from hf_memopt.units import format_bytes

CASES = {
    "AdamW of torch": "torch.optim.AdamW",
    "AdamW of bitsandbytes, 32 bit": "bitsandbytes.optim.AdamW32bit",
    "AdamW of bitsandbytes, 8 bit": "bitsandbytes.optim.AdamW8bit",
}
WAYS = ("stock", "lean")
TENSORS, ELEMENTS = 64, 2**20


def build(name: str, device: str) -> tuple[list[nn.Parameter], Any]:
    """Return parameters on a device and the optimizer of one case."""
    import bitsandbytes

    parameters = [nn.Parameter(torch.ones(ELEMENTS // 1024, 1024, device=device)) for _ in range(TENSORS)]
    library = {"torch": torch, "bitsandbytes": bitsandbytes}[name.split(".")[0]]
    return parameters, getattr(library.optim, name.split(".")[-1])(parameters, lr=0.1)


def write(name: str, path: str) -> int:
    """Write the state of an optimizer that has stepped once; return its bytes."""
    parameters, optimizer = build(name, "cpu")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
    return Path(path).stat().st_size


def load(name: str, path: str, way: str) -> dict[str, Any]:
    """Load the state one way; return the peak above what the process held before."""
    from hf_memopt.training.techniques.checkpoints.sharded import load_optimizer_state, mapped_loading

    _, optimizer = build(name, "meta")
    with AnonymousPeak() as peak:
        if way == "stock":
            state_dict = torch.load(path, map_location="cpu", weights_only=True)
            read(state_dict["state"])
            optimizer.load_state_dict(state_dict)
        else:
            with mapped_loading():
                state_dict = torch.load(path, map_location="cpu", weights_only=True)
            read(state_dict["state"])
            load_optimizer_state(optimizer, state_dict)
    return {"host_bytes": peak.bytes}


def read(value: Any) -> None:
    """Read every byte of the tensors in nested dictionaries."""
    if isinstance(value, dict):
        for item in value.values():
            read(item)
    elif torch.is_tensor(value):
        value.max()


class AnonymousPeak:
    """The peak of this process's anonymous memory above what it was at the start, sampled by a thread."""

    def __enter__(self) -> AnonymousPeak:
        self.bytes, self._before, self._is_over = 0, anonymous_bytes(), False
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over:
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)
            time.sleep(0.001)


def anonymous_bytes() -> int:
    """Return the memory of this process that belongs to no file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def measure(name: str) -> dict[str, Any]:
    """Return the figures of one optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "optimizer.pt")
        size = in_fresh_process(write, name, path)
        return {"state_bytes": size, **{way: in_fresh_process(load, name, path, way) for way in WAYS}}


def table(figures: dict[str, Any]) -> str:
    """Return the host memory of a resume."""
    rows = [
        (name, *map(format_bytes, (found["state_bytes"], *(found[way]["host_bytes"] for way in WAYS))))
        for name, found in figures.items()
    ]
    note = "Host memory above the start, for a state that belongs on a GPU (`python benchmarks/resume.py`)."
    return markdown("| optimizer | its state | extra, stock | extra, `ShardedCheckpointCallback` |", rows, note)


def main() -> None:
    """Run the cases, print the table, append the row."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read when a process starts: for the fresh ones
    figures = {title: measure(name) for title, name in CASES.items()}
    show("resume", figures, table(figures))


if __name__ == "__main__":
    main()
