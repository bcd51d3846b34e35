"""What a checkpoint's manifest costs: python benchmarks/checkpoint_manifest.py [--folder FOLDER]

A small Llama with AdamW saves checkpoints: as stock does, with files that are flushed but not read back for their
CRC32, and with a whole manifest. The ways take turns, each into a folder that is not there yet; timed is
``Trainer._save_checkpoint``, and figures are those of the fastest turn, since what else the machine does only adds.
"CRC32" is what reading back adds to saving and flushing. "check" is what a run does before it resumes.

The faster the disk, the larger the ratio: ``--folder /dev/shm`` is its limit, where flushing does nothing.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from results_file import markdown, show
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_memopt import ShardedCheckpointCallback, attach
from hf_memopt.training.binding import checkpoint_manifest
from hf_memopt.units import format_bytes, percent

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "vocab_size": 8192}
WAYS = ("stock", "flushed", "manifest")


def build(folder: Path, layers: int, way: str, shard_bytes: str | None) -> Trainer:
    """Return a Trainer after one step: its optimizer has all of its state."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES))
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        optim="adamw_torch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}]
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    if way != "stock":
        attach(trainer, *([] if shard_bytes is None else [ShardedCheckpointCallback(shard_bytes)]))
    trainer.train()
    return trainer


def save(trainer: Trainer, way: str) -> float:
    """Save a checkpoint into a folder that is not there yet; return the seconds."""
    unread = mock.patch.object(checkpoint_manifest, "_sum", return_value="") if way == "flushed" else nullcontext()
    shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
    with unread:
        begin = time.perf_counter()
        trainer._save_checkpoint(trainer.model, trial=None)
        return time.perf_counter() - begin


def measure(folder: Path, layers: int, repeats: int, shard_bytes: str | None) -> dict[str, Any]:
    """Return the bytes of a checkpoint, the seconds of each way, and those of the check."""
    trainers = {way: build(folder / way, layers, way, shard_bytes) for way in WAYS}
    turns = [{way: save(trainer, way) for way, trainer in trainers.items()} for _ in range(repeats)]
    seconds = {way: min(turn[way] for turn in turns) for way in WAYS}
    checkpoint, checks = folder / "manifest" / "checkpoint-1", []
    for _ in range(repeats):
        begin = time.perf_counter()
        if (reason := checkpoint_manifest.why_not_whole(checkpoint)) is not None:
            raise AssertionError(reason)
        checks.append(time.perf_counter() - begin)
    size = sum(path.stat().st_size for path in checkpoint.rglob("*"))
    return {"bytes": size, "seconds": seconds, "check_seconds": min(checks)}


def table(figures: dict[str, Any]) -> str:
    """Return the seconds of each way."""
    rows = []
    for title, found in figures["cases"].items():
        seconds = found["seconds"]
        crc = percent(seconds["manifest"] / seconds["flushed"] - 1, 1, signed=True)
        times = [f"{taken:.2f} s" for taken in (*(seconds[way] for way in WAYS), found["check_seconds"])]
        rows.append((title, format_bytes(found["bytes"]), *times[:-1], crc, times[-1]))
    return markdown("| checkpoint | bytes | stock | flushed | manifest | CRC32 | check |", rows)


def main() -> None:
    """Run the cases, print the table, append the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--folder", help="in which checkpoints are saved; that of temporary files by default")
    given = parser.parse_args()
    cases = {}
    for layers, shard_bytes in itertools.product(given.layers, (None, "256MB")):
        title = f"{layers} layers, {'one file' if shard_bytes is None else 'sharded'}"
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            cases[title] = measure(Path(folder), layers, given.repeats, shard_bytes)
    figures = {"folder": given.folder or "temporary files", "cases": cases}
    show("checkpoint manifest", figures, table(figures))


if __name__ == "__main__":
    main()
