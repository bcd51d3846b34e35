"""Rank 0 of several GPUs, alone: what the other ranks would have written is there as soon as it is waited for.

Collectives are the stand-in's, as if every rank held what this one holds: gathered shards have the right size, not the
values of the whole. DDP broadcasts all weights in one tensor, whose values are kept up to the limits of the stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def environment(count: int) -> dict[str, str]:
    """Return what ``torchrun`` sets for rank 0 of ``count`` GPUs in one machine, and the number of the stand-in's."""
    counts = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "HF_MEMOPT_GPU_COUNT")
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # where nobody listens
    return {**dict.fromkeys(("RANK", "LOCAL_RANK"), "0"), **dict.fromkeys(counts, str(count)), **address}


def install(count: int) -> None:
    """Let ``init_process_group`` of this process find ``count`` ranks; call it after the import of torch."""
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import _rendezvous_handlers  # private, seen in torch 2.14

    class Alone(Store):
        """Has what is written, and ``b"1"`` of what is not; every rank adds what this one adds."""

        def __init__(self) -> None:
            super().__init__()
            self.written: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self.written[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key: str) -> bytes:
            return self.written.get(key, b"1")

        def add(self, key: str, amount: int) -> int:
            self.set(key, int(self.written.get(key, b"0")) + amount * count)
            return int(self.written[key])

        def wait(self, *keys_and_timeout: Any) -> None:
            pass

    store = Alone()  # torch's own reference would not keep what is Python's

    def meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        yield store, 0, count

    _rendezvous_handlers["env"] = meet
