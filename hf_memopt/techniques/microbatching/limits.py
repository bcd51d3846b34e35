"""How large a piece of a batch may be: lowered when memory runs out, raised again with care. Numbers only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_memopt.plain_data import Count, CountOrZero, check_fields, from_object, parse_object, shown
from hf_memopt.whole_files import write_whole

__all__ = ["CAPS_FILE", "Cap", "read_caps", "write_caps"]

CAPS_FILE = "memopt_microbatch.json"
CAP_NAMES = ("max_tokens", "max_examples")

FIRST_WAIT_STEPS = 200
MOST_FAILED_TRIES = 3


@dataclass(slots=True)
class Cap:
    """The most that a piece may hold, in padded tokens or in examples.

    - Out of memory halves what the failed piece held.
    - After ``wait_steps`` steps that were cut and ran, half as much again is tried. While that try lasts (as many steps
      again), out of memory goes back to what ran before and doubles the wait; three failed tries end the trying.
    - It never exceeds ``most``.

    Attributes:
        most: what the user set; None for no bound.
        limit: what is in force; None while nothing is cut.
        proven: what ran before the try under way; None without one.
        quiet_steps: the steps that were cut and ran, since the last change.
        wait_steps: how many of them a try waits for.
        failed_tries: how many tries ran out of memory.

    Example:
        >>> cap = Cap()
        >>> cap.lower(4096); cap.limit
        2048
        >>> sum(cap.note_step(was_cut=True) for _ in range(200)), cap.limit
        (1, 3072)
        >>> cap.lower(2900); cap.limit, cap.wait_steps
        (2048, 400)
    """

    most: Count | None = None
    limit: Count | None = None
    proven: Count | None = None
    quiet_steps: CountOrZero = 0
    wait_steps: CountOrZero = FIRST_WAIT_STEPS
    failed_tries: CountOrZero = 0

    def __post_init__(self) -> None:
        if self.limit is None:
            self.limit = self.most

    def lower(self, held: int) -> None:
        """Take note that a piece which held this much, of two rows or more, ran out of memory.

        The new limit is below ``held``, so that cutting again ends; half of it is still room for the longest row.
        """
        if self.proven is not None and self.proven < held:
            self.limit = self.proven
            self.wait_steps *= 2
            self.failed_tries += 1
        else:
            self.limit = max(held // 2, 1)
        self.proven = None
        self.quiet_steps = 0

    def note_step(self, *, was_cut: bool) -> bool:
        """Take note of a step that ran; return whether the limit was raised for the next one."""
        if self.limit is None or not was_cut or self.failed_tries >= MOST_FAILED_TRIES:
            return False
        self.quiet_steps += 1
        if self.quiet_steps < self.wait_steps:
            return False
        raised = max(self.limit * 3 // 2, self.limit + 1)
        if self.most is not None:
            raised = min(raised, self.most)
        self.proven = self.limit if raised > self.limit else None
        self.limit, self.quiet_steps = raised, 0
        return self.proven is not None


def write_caps(folder: Path, caps: Mapping[str, Cap]) -> None:
    """Write caps into a checkpoint's folder, all of the file or nothing of it.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({name: asdict(cap) for name, cap in caps.items()}, indent=2) + "\n"
    write_whole(folder / CAPS_FILE, text)


def read_caps(folder: Path) -> dict[str, Cap]:
    """Return the caps that ``write_caps`` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold caps; the message starts with the name of what is wrong.
    """
    caps = {}
    for name, values in parse_object((folder / CAPS_FILE).read_bytes()).items():
        if name not in CAP_NAMES or not isinstance(values, dict):
            raise ValueError(f"{name}={shown(values)} is not a cap; expected an object under {' or '.join(CAP_NAMES)}")
        try:
            cap = caps[name] = from_object(Cap, values)
            check_fields(cap)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None
        if cap.most is not None and cap.limit is not None and cap.limit > cap.most:
            raise ValueError(f"{name}.limit={cap.limit} is invalid; expected at most {name}.most={cap.most}")
    return caps
