"""Settings of the whole suite: offline, no state left between tests, and a gate for the tests that need a GPU."""

from __future__ import annotations

import csv
import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import bitsandbytes
import pytest
import torch
import transformers.trainer  # noqa: F401  # imported before the freeze below
from hypothesis import settings

import tiny

NOT_ON_CUDA = Path(__file__).with_name("not_on_cuda.csv")  # tests, or beginnings of their names, and why

torch.set_num_threads(1)  # xdist's workers share the cores, and other threads' allocations would be measured too

collect_ignore = ["clients"]  # an environment of its own: make test-clients

settings.register_profile("suite", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="module")
def _quick_collection() -> None:
    """Keep what imports and earlier modules left out of the garbage collection with which each training starts.

    It takes 0.5 s after the imports, and grows with what caches, pytest's reports and compiled code hold: without
    this the later half of the suite takes three times as long.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_singleton() -> Iterator[None]:
    """Take back what the stock Trainer leaves in bitsandbytes' process-wide registry with an 8-bit optimizer."""
    yield
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


@pytest.fixture(autouse=True)
def _without_global_hooks() -> Iterator[None]:
    """Let no hook on all modules outlive its test: the doubles of a full GPU keep theirs as long as their model."""
    yield
    torch.nn.modules.module._global_forward_hooks.clear()  # private, as the next; seen in torch 2.6 to 2.13
    torch.nn.modules.module._global_forward_pre_hooks.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA GPU"
    if "gpu" in missing or "HF_MEMOPT_GPU_MEMORY" not in os.environ:
        missing["stand_in"] = "needs the stand-in of a GPU: make test-cuda"
    has_row = tiny.DEVICE == "cuda" or "HF_MEMOPT_GPU_MEMORY" in os.environ
    with NOT_ON_CUDA.open(encoding="utf-8", newline="") as file:
        elsewhere = list(csv.DictReader(file)) if has_row else []
    for item in items:
        for row in elsewhere:
            if item.nodeid.startswith(row["test"]):
                item.add_marker(pytest.mark.skip(reason=row["reason"]))
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
