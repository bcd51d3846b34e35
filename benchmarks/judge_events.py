"""Both sides of a row of ``judge.py`` allocation by allocation: peaks hide errors that cancel."""

from __future__ import annotations

import difflib
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from judge_rows import SET_UPS, estimate_row

from hf_memopt.prediction.memory.allocator import caching_allocator, replay

LEAST_BYTES = 2**20  # smaller ones share segments of 2 MiB, and hardly move a peak
SHOWN = 8


def in_blocks(size_bytes: int) -> int:
    """Return a size as torch's allocator rounds it."""
    return -(-size_bytes // 512) * 512


class Event(NamedTuple):
    """What is allocated (bytes above 0) or freed (below), in whole blocks, and where."""

    size_bytes: int
    place: str


def real_events(recorded: list[Any]) -> list[Event]:
    """Return torch's own allocations and frees, with phase, operator and lines of Python."""
    signs = {"allocate": 1, "free": -1}
    return [
        Event(signs[one.kind] * in_blocks(one.requested_bytes), f"{one.phase}: {one.operator} {one.place}")
        for one in recorded
        if one.kind in signs
    ]


def estimated_events(name: str) -> list[Event]:
    """Return what the replay of an estimate allocates and frees, with the module; frees have no place."""
    found: list[Event] = []
    sizes: dict[Any, int] = {}
    runs: list[Any] = []

    class Recording(caching_allocator.CachingAllocator):
        def malloc(self, key: Any, size_bytes: int) -> int:
            place = runs[-1]._tracker.module_of(key % replay._KEYS) if isinstance(key, int) else key
            found.append(Event(in_blocks(size_bytes), f"{runs[-1]._phases[-1][1]}: {place}"))
            sizes[key] = in_blocks(size_bytes)
            return super().malloc(key, size_bytes)

        def free(self, key: Any) -> int:
            found.append(Event(-sizes.pop(key), ""))
            return super().free(key)

        def rename(self, key: Any, new_key: Any) -> None:
            sizes[new_key] = sizes.pop(key)
            super().rename(key, new_key)

    class Run(replay._Run):
        def __init__(self, *given: Any) -> None:
            runs.append(self)
            super().__init__(*given)

    replay.CachingAllocator, replay._Run = Recording, Run  # type: ignore[misc]
    estimate_row(SET_UPS[name])
    return found


def compare_events(name: str, rehearse: Callable[[str, Path], Any]) -> None:
    """Print how many allocations and frees differ, and the first that do, with their places on both sides."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.pickle"
        rehearse(name, file)
        both = real_events(pickle.loads(file.read_bytes())), estimated_events(name)
    real, estimated = ([one for one in events if abs(one.size_bytes) > LEAST_BYTES] for events in both)
    sizes = [[one.size_bytes for one in events] for events in (real, estimated)]
    codes = difflib.SequenceMatcher(None, *sizes, autojunk=False).get_opcodes()
    differences = [place for kind, *place in codes if kind != "equal"]
    print(f"{name}: {len(real)} real events, {len(estimated)} estimated, {len(differences)} differences")
    for start, end, other_start, other_end in differences[:SHOWN]:
        print(f"--- real {start} to {end}, estimated {other_start} to {other_end}")
        for side, events in (("real", real[start:end]), ("estimated", estimated[other_start:other_end])):
            for event in events[:SHOWN]:
                print(f"  {side:9s} {event.size_bytes / 2**20:+10.2f} MiB  {event.place[:220]}")
