"""Micro-batches in two processes: each recovers by itself."""

from __future__ import annotations

from typing import Any

import pytest

import scarcity
from two_ranks import run_pair


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_pair(folder, scarcity.__file__, str(folder), timeout_seconds=120)


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in scarcity.TRIED.items() for way in ways])
def test_each_process_recovers_by_itself(name: str, way: str, ranks: list[dict[str, Any]]) -> None:
    of_ranks = [found[f"{name}: {way}"] for found in ranks]
    assert all(difference <= 2**-23 for difference, _, _ in of_ranks)  # one bit of a norm's weight
    has_failed = [errors > 0 for _, errors, _ in of_ranks]
    assert has_failed == [way.startswith("both"), True]
    assert [limit is not None for _, _, limit in of_ranks] == has_failed


def test_out_of_memory_while_gradients_are_shared_says_what_to_set(ranks: list[dict[str, Any]]) -> None:
    assert [found["shared"] for found in ranks] == [
        "memory ran out in the backward pass in which the processes share their gradients (CUDA out of memory. Tried "
        "to allocate 2.00 GiB.); expected micro-batches that fit there. Start with smaller ones: "
        "MicrobatchCallback(max_tokens=36)"
    ] * 2


def test_default_flags_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert [found["flags"] for found in ranks] == [
        "micro-batching and DDP, default flags are incompatible: a forward pass that is run again would wait for "
        "the buffers of processes that do not run it; expected only one of them. Set ddp_broadcast_buffers=False, "
        "ddp_find_unused_parameters=False"
    ] * 2
