"""One rank's share of a stream over Parquet files, read by DataLoader workers: python stream_ranks.py FOLDER SETTINGS.

``stop`` batches are read, the state is taken, and another stream goes on from it; both are written, by example.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import load_dataset
from torch.utils.data import DataLoader

from hf_memopt import bucketed

warnings.filterwarnings("ignore", "This DataLoader will create")


def stream(folder: Path, rank: int, settings: dict[str, Any]) -> Any:
    """Return a rank's share of the files of a folder."""
    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))
    return bucketed(rows, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), buffer_examples=24, **settings)


def batches(source: Any, workers: int, count: int, rows: int) -> list[list[int]]:
    """Return the first token, which names the example, of each row of the first batches."""
    options = {"collate_fn": lambda items: items, "num_workers": workers}
    loader = DataLoader(source, batch_size=rows, **options)
    found = islice(loader, count)
    if source.max_tokens is not None:
        return [[row["input_ids"][0] for row in batch] for [batch] in found]
    return [[row["input_ids"][0] for row in batch] for batch in found]


def main(folder: str, asked: str) -> None:
    """Write what this rank reads to ``rank<rank>.json``, straight and resumed."""
    dist.init_process_group("gloo")
    rank, cases = dist.get_rank(), json.loads(asked)
    found = []
    for case in cases:
        settings, workers, count = case["settings"], case["workers"], case["count"]
        rows = settings.get("batch_size", 1)
        straight = stream(Path(folder), rank, settings)
        read = batches(straight, workers, count, rows)
        state = json.loads(json.dumps(straight.state_dict(position=case["stop"])))
        resumed = stream(Path(folder), rank, settings)
        resumed.load_state_dict(state)
        rest = batches(resumed, case.get("workers_then", workers), count - case["stop"], rows)
        found.append({"read": read, "rest": rest, "state": state})
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
