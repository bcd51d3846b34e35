"""What processes send each other in a step, by hand for each engine, and how much of its time it adds."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memopt import GPUS, StepSettings, estimate
from hf_memopt.memory.optimizers import ParameterFacts
from hf_memopt.memory.step_time.communication import Communication, communication_of_step

FACTS = [ParameterFacts("weight", (1000,), 4, False)]
GATHERED = 6000


def sent(passes: int = 3, **settings: Any) -> Communication:
    return communication_of_step(FACTS, StepSettings(world_size=4, precision="bf16", **settings), GATHERED, passes)


def test_bytes_of_a_ring() -> None:
    """Of N processes each sends (N - 1) / N of what is gathered, or reduced and scattered."""
    ring = 3 / 4
    gradients, short = 4000, 2000
    expected = {
        "ddp": 2 * ring * gradients,  # once a step
        "fsdp2": ring * (3 * GATHERED + short),
        "zero2": ring * (3 * 2 * short + short),
        "zero3": ring * 3 * (GATHERED + short),
    }
    assert {strategy: sent(strategy=strategy).link_bytes for strategy in expected} == expected


def test_each_micro_batch_reduces_gradients_under_fsdp2() -> None:
    settings = StepSettings(world_size=4, precision="bf16", strategy="fsdp2")
    found = communication_of_step(FACTS, settings, GATHERED, passes=6, reductions=3)
    assert found.link_bytes == 3 / 4 * (6 * GATHERED + 3 * 2000)


def test_offload_moves_shards_and_its_optimizer_runs_on_the_host() -> None:
    own = 1000 / 4
    found = {name: sent(strategy=name, offload_params=True) for name in ("fsdp2", "zero2", "zero3")}
    assert found["fsdp2"].pcie_bytes == 3 * GATHERED / 4 + 4 * own
    assert found["zero2"].pcie_bytes == 2 * own + 3 * 2 * own
    assert found["zero3"].pcie_bytes == 3 * GATHERED / 4 + 3 * 2 * own
    assert {one.host_bytes for one in found.values()} == {28 * own}


def test_only_what_computing_does_not_hide_is_waited_for() -> None:
    one = Communication(link_bytes=100, hiding_fraction=0.5)
    assert one.seconds(10, link=25, pcie=1) == (0.0, 4.0, 0.0)
    assert one.seconds(10, link=10, pcie=1) == (5.0, 10.0, 0.0)


def test_a_slow_link_makes_a_step_longer_and_the_range_wider() -> None:
    options: dict[str, Any] = {"batch_size": 1, "seq_len": 64, "precision": "bf16"}
    alone = estimate("gpt2", gpu="A100 80GB", **options).step_time
    assert alone is not None
    times = {}
    for name in ("A100 80GB", "RTX 3090"):
        found = estimate("gpt2", gpu=name, world_size=2, strategy="ddp", **options).step_time
        assert found is not None
        assert found.low < found.seconds < found.high
        times[name] = found
    assert times["A100 80GB"].shares["communication"] == pytest.approx(0, abs=0.01)
    assert times["RTX 3090"].shares["communication"] > 0.1  # 0.5 GB over PCIe


def test_links() -> None:
    links = {
        name: (GPUS[name].link, GPUS[name].link_bytes_per_second) for name in ("T4", "RTX 4090", "H100", "V100 32GB")
    }
    assert links == {
        "T4": ("PCIe 3.0 x16", 16 * 10**9),
        "RTX 4090": ("PCIe 4.0 x16", 32 * 10**9),
        "H100": ("NVLink", 450 * 10**9),
        "V100 32GB": ("NVLink", 150 * 10**9),
    }
