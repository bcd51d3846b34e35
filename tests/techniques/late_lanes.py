"""A double of the lanes: copies run as late as their events allow, and what may still be read must not change."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_memopt.training.techniques import Lanes


class LateLanes(Lanes):
    """Each copy runs at a random moment between its issue and its wait, in the order of its lane.

    Until then its target holds NaN. A copy that finds its source changed or its target freed raises AssertionError.
    ``without`` names the function that leaves its waits out.
    """

    def __init__(self, seed: int, without: str = "") -> None:
        super().__init__("cpu")
        self.random, self.without, self.late = random.Random(seed), without, 0
        self.asked: set[str] = set()
        self.chance = self.random.choice((0.01, 0.3))
        self.queues: dict[str, list[dict[str, Any]]] = {"in": [], "out": []}

    def fetch(self, host: torch.Tensor, *, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        for job in self.queues["out"]:
            assert job["target"]() is not host.untyped_storage(), "read while a copy out is under way"
        if into is None:
            into = torch.empty_like(host)
        else:
            into.untyped_storage().resize_(host.nbytes)
        return into, self._issue("in", into, host)

    def store(self, host: torch.Tensor, source: torch.Tensor) -> Any:
        return self._issue("out", host, source)

    def ready(self, event: Any) -> None:
        self._wait(event)

    def landed(self, event: Any) -> None:
        self._wait(event)

    def _issue(self, lane: str, target: torch.Tensor, source: torch.Tensor) -> dict[str, Any]:
        source, target = source.detach(), target.detach()
        value = source.clone()
        target.fill_(float("nan") if target.is_floating_point() else 0)
        layout = target.storage_offset(), target.shape, target.stride()
        storage = weakref.ref(target.untyped_storage())
        job = {"lane": lane, "target": storage, "done": False}
        job["run"] = _copy(storage, layout, source, value)
        self.queues[lane].append(job)
        self._some()
        return job

    def _some(self) -> None:
        for lane, queue in self.queues.items():
            while queue and self.random.random() < self.chance:
                self._first(lane)

    def _first(self, lane: str) -> None:
        job = self.queues[lane].pop(0)
        job["done"] = True
        job["run"]()

    def _wait(self, event: Any) -> None:
        if event is None:
            return
        asking = sys._getframe(2).f_code.co_qualname
        self.asked.add(asking)
        if asking == self.without:
            return
        self._some()
        self.late += not event["done"]
        while not event["done"]:
            self._first(event["lane"])


def _copy(storage: Any, layout: Any, source: torch.Tensor, value: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        assert torch.equal(source, value), "the source was overwritten before the copy"
        found = storage()
        assert found is not None, "the target was freed before the copy"
        assert found.nbytes() >= value.nbytes, "the target was emptied before the copy"
        torch.empty(0, dtype=value.dtype).set_(found, *layout).copy_(value)

    return run
