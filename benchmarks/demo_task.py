"""The demo's task for the benchmarks that train on it: in a folder, from which a fresh process reads it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "demo"))

from docstring_task import MAX_LENGTH_TOKENS as MAX_LENGTH_TOKENS
from docstring_task import DocstringTask, docstring_task, read_docstrings, source_files, train_tokenizer
from set_ups import HYPERPARAMETERS as HYPERPARAMETERS
from set_ups import build_model as build_model

VERSIONS_OF = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "hf-memopt")


def versions() -> dict[str, str]:
    """Return the versions that the figures belong to, and the device."""
    found = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    return {"python": platform.python_version(), **found, "device": platform.machine()}


def whole_task() -> DocstringTask:
    """Return the texts of the standard library."""
    return docstring_task(read_docstrings(source_files()))


def prepare(work: Path, *, max_train: int | None) -> DocstringTask:
    """Read the docstrings, train the tokenizer and write both into ``work`` for the children; return the task."""
    task = whole_task()
    train_tokenizer(task.train_texts).save_pretrained(work / "tokenizer")
    task = replace(task, train_texts=task.train_texts[:max_train], train_labels=task.train_labels[:max_train])
    (work / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
    return task


def prepared(work: Path) -> tuple[DocstringTask, Any]:
    """Return the task and the tokenizer that ``prepare`` wrote."""
    from transformers import AutoTokenizer

    task = DocstringTask(**json.loads((work / "task.json").read_text(encoding="utf-8")))
    return task, AutoTokenizer.from_pretrained(work / "tokenizer")


@torch.no_grad()
def predict_labels(model: Any, tokenizer: Any, texts: Sequence[str], batch_size: int = 64) -> list[int]:
    """Return the number of the predicted label of each text, in the order of ``texts``."""
    predicted: dict[int, int] = {}
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    model.eval()
    for start in range(0, len(texts), batch_size):
        rows = by_length[start : start + batch_size]
        batch = tokenizer([texts[row] for row in rows], truncation=True, padding=True, return_tensors="pt")
        predicted |= zip(rows, model(**batch.to(model.device)).logits.argmax(-1).tolist(), strict=True)
    return [predicted[row] for row in range(len(texts))]
