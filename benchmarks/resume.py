"""What memory of the host it takes to load an optimizer's state for a GPU: python benchmarks/resume.py

Stock (``torch.load``, ``load_state_dict``) against what ``ShardedCheckpointCallback`` does instead, each in a fresh
process, which reads the peak of its anonymous memory: pages of a mapped file are the file's own. The parameters are on
the meta device, which stands for the GPU, so no GPU is needed; every byte of the state is read, as a copy to a GPU
reads it. Linux only. glibc keeps freed blocks for later use once it has seen blocks of their size freed;
``MALLOC_MMAP_THRESHOLD_`` makes it give them back, so that the figures are what is held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

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


def write(name: str, path: str) -> dict[str, Any]:
    """Write the state of an optimizer that has stepped once."""
    parameters, optimizer = build(name, "cpu")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
    return {"state_bytes": Path(path).stat().st_size}


def load(name: str, path: str, way: str) -> dict[str, Any]:
    """Load the state one way; return the peak above what the process held before."""
    from hf_memopt.techniques.checkpoints.sharded import load_optimizer_state, mapped_loading

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
    return {"host_bytes": peak.bytes, "seconds": peak.seconds}


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
        self.bytes, self.seconds, self._before, self._is_over = 0, 0.0, anonymous_bytes(), False
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._started
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


def main() -> int:
    """Run the cases, print a table, append the figures to the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", nargs=2, metavar=("OPTIMIZER", "FILE"), help="in this process")
    parser.add_argument("--load", nargs=3, metavar=("OPTIMIZER", "FILE", "WAY"), help="in this process")
    given = parser.parse_args()
    if given.write or given.load:
        print(json.dumps(write(*given.write) if given.write else load(*given.load)))
        return 0
    from results_file import append

    from hf_memopt.units import format_bytes

    figures = {}
    print(f"{'optimizer':<32}{'state':>12}{'stock':>12}{'lean':>12}{'of stock':>10}{'stock':>10}{'lean':>10}")
    for title, name in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "optimizer.pt")
            size = _in_a_fresh_process("--write", name, path)["state_bytes"]
            stock, lean = (_in_a_fresh_process("--load", name, path, way) for way in WAYS)
        figures[title] = {"state_bytes": size, "stock": stock, "lean": lean}
        cells = [format_bytes(number) for number in (size, stock["host_bytes"], lean["host_bytes"])]
        ratio = lean["host_bytes"] / stock["host_bytes"]
        times = f"{stock['seconds']:>8.2f} s{lean['seconds']:>8.2f} s"
        print(f"{title:<32}{''.join(f'{cell:>12}' for cell in cells)}{ratio:>9.0%} {times}", flush=True)
    append("resume", figures)
    return 0


def _in_a_fresh_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
