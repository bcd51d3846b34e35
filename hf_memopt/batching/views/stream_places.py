"""Where a bucketed stream can begin again: places in its dataset, which DataLoader workers note for the main process.

A worker runs ahead of the training, so only the main process knows how many batches were trained on, and only the
worker knows where in the dataset they were read. The worker writes a place whenever it begins to hand out what it
holds, into a ring in shared memory; the main process takes the latest one that is not ahead of the training.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, TypedDict

import numpy as np
import torch

from hf_memopt.plain_data import CountOrZero, check_value, shown

__all__ = ["Place", "SharedPlaces", "checked_place"]

PLACES, LARGEST_BYTES = (
    16,
    2**16,
)  # the first is the beginning; 15 fillings of the buffer are more than workers prefetch
HEADER = np.dtype("<u4")  # two of them: length and checksum
HEADER_BYTES = 2 * HEADER.itemsize


class Place(TypedDict):
    """Where the reading of what a stream holds began, and what had been handed out when that began to be."""

    epoch: int  # the pass
    row: int  # rows of the pass that were read before
    dataset: Any  # the dataset's own state there; None: the rows before are read again
    group: int  # groups drawn so far: of the pass, or with a rank of all passes
    turn: int  # turns handed out so far, of all passes: a batch for each process
    dropped: int


def checked_place(place: Any) -> Place:
    """Return a place that a state holds.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(place, dict) or place.keys() != Place.__annotations__.keys():
        raise ValueError(
            f"state['place']={shown(place)} is not a place in a stream; expected an object with "
            f"{', '.join(Place.__annotations__)}. Save it anew: stream.state_dict()"
        )
    for name in Place.__annotations__.keys() - {"dataset"}:
        check_value(f"state['place'][{name!r}]", place[name], CountOrZero)
    return place  # type: ignore[return-value]  # checked


class SharedPlaces:
    """The latest places, in memory that forked and spawned workers share."""

    def __init__(self) -> None:
        self._memory = torch.zeros((PLACES, LARGEST_BYTES), dtype=torch.uint8)
        self._share()
        self._added = 0

    def _share(self) -> None:
        self._memory.untyped_storage().share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()  # a copy or a plain pickle is private memory

    def begin(self, place: Place) -> None:
        """Forget all places but this one, where an iteration begins."""
        self._memory[:, :HEADER_BYTES] = 0
        self._added = 0
        self._write(0, place)

    def add(self, place: Place) -> None:
        """Note a place in the room of the oldest."""
        self._write(1 + self._added % (PLACES - 1), place)
        self._added += 1

    def latest(self, turn: int) -> Place | None:
        """Return the latest place at or before a turn; None before the first iteration."""
        found = [place for number in range(PLACES) if (place := self._read(number)) is not None]
        return max((place for place in found if place["turn"] <= turn), key=lambda place: place["turn"], default=None)

    def _write(self, number: int, place: Place) -> None:
        try:
            text = json.dumps(place).encode()
        except TypeError:  # a dataset whose state is not JSON
            text = b""
        if not text or len(text) > LARGEST_BYTES - HEADER_BYTES:
            text = json.dumps({**place, "dataset": None}).encode()
        memory = self._memory[number].numpy()
        memory[:HEADER_BYTES] = 0
        memory[HEADER_BYTES : HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        memory[:HEADER_BYTES] = np.array([len(text), zlib.crc32(text)], HEADER).view(np.uint8)

    def _read(self, number: int) -> Place | None:
        memory = self._memory[number].numpy().tobytes()
        length, checksum = np.frombuffer(memory[:HEADER_BYTES], HEADER).tolist()
        text = memory[HEADER_BYTES : HEADER_BYTES + length]
        if not length or zlib.crc32(text) != checksum:  # a worker is writing it
            return None
        place: Place = json.loads(text)
        return place
