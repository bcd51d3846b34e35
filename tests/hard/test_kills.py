"""A training that is killed again and again, at any moment, ends with the weights of one that was not.

Each chain starts a training in a process of its own, ends it by SIGKILL, SIGTERM or SIGINT while it begins, steps or
saves, and starts it again from the newest whole checkpoint, ten times; where two processes train together, it kills
one of them, twenty times. What the machine itself may lose when its power is cut is not tried.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from children import SERVER, finish, start
from killed_runs import FINAL, PAIR, SETUPS, STEPS, train

from hf_memopt.training.binding.checkpoint_manifest import why_not_whole
from hf_memopt.training.binding.model import tensors_in

KILLS, KILLS_OF_TWO = 10, 20  # of each chain
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EXIT_CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 1}


class Run:
    """One process of a chain, and what it says of itself."""

    def __init__(self, name: str, folder: Path, rank: int = 0, port: int = 0) -> None:
        self.log = folder.with_suffix(f".{rank}.log")
        self.events, writer = SERVER.Pipe(duplex=False)
        self.process = start(train, name, folder, writer, rank, port, log=self.log)
        writer.close()

    def wait_for(self, event: str, times: int = 1) -> bool:
        """Wait until the run has said this so often; return False where it ended before."""
        while times:
            try:
                times -= self.events.recv() == event
            except EOFError:
                return False
        return True

    def end_by(self, number: signal.Signals) -> None:
        """Send a signal until the process has ended; Python loses a SIGINT that arrives while it calls a destructor."""
        while self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
            self.process.join(5)
        self.events.close()


def start_all(name: str, folder: Path) -> list[Run]:
    """Start the one process of a training, or its two."""
    if name in SETUPS:
        return [Run(name, folder)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Run(name, folder, rank, port) for rank in (0, 1)]


def seconds_of(name: str, folder: Path) -> dict[str, float]:
    """Train without a kill; return how long it takes to load, to step and to save."""
    runs, begin = start_all(name, folder), time.perf_counter()
    run, before, took = runs[0], "", {"built": [0.1], "step": [0.01], "saving": [0.01]}
    with suppress(EOFError):
        while True:
            event = run.events.recv()
            begin, after = time.perf_counter(), time.perf_counter() - begin
            took.setdefault(before, []).append(after)
            before = event
    for each in runs:
        finish(each.process, each.log)
    return {event: statistics.median(found) for event, found in took.items()}


def unfinished_files(folder: Path) -> set[Path]:
    return set(folder.rglob(".memopt-*"))


@pytest.mark.parametrize("name", SETUPS)
def test_a_training_that_is_killed_ten_times_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    chance, seconds = random.Random(name), seconds_of(name, tmp_path / "straight")
    folder = tmp_path / "killed"
    folder.mkdir()
    left_unfinished = 0
    for number in range(KILLS):
        how = SIGNALS[number % len(SIGNALS)]
        where = chance.choice(["built", "step", "saving", "saving", "saving"])
        run, before = Run(name, folder), unfinished_files(folder)
        assert run.wait_for(where, 1 if where == "built" else chance.randint(1, 2)), run.log.read_text()
        time.sleep(chance.uniform(0.0, seconds[where]))
        run.end_by(how)
        assert run.process.exitcode == EXIT_CODES[how], run.log.read_text()
        if how == signal.SIGINT:  # which leaves time to remove them
            assert unfinished_files(folder) <= before
        left_unfinished += any(why_not_whole(each) is not None for each in folder.glob("checkpoint-*"))
        if (report := folder / "memopt_run.json").exists():
            json.loads(report.read_bytes())
    assert left_unfinished > 0  # so runs did die while they saved, and went back
    run = Run(name, folder)
    finish(run.process, run.log)
    assert_equal(torch.load(folder / f"0-{FINAL}"), torch.load(tmp_path / "straight" / f"0-{FINAL}"))


def whole(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("checkpoint-*") if why_not_whole(each) is None)


def test_two_processes_of_which_one_is_killed_twenty_times_end_with_the_same_weights(tmp_path: Path) -> None:
    """Only one checkpoint is kept; at no moment is there none that is whole, once there was one."""
    chance, seconds = random.Random(PAIR), seconds_of(PAIR, tmp_path / "straight")
    folder = tmp_path / "killed"
    folder.mkdir()
    found: list[list[str]] = []
    left_unfinished = 0
    for _ in range(KILLS_OF_TWO):
        runs = start_all(PAIR, folder)
        dies, where = chance.choice(runs), chance.choice(["built", "step", "saving", "saving", "saving"])
        assert dies.wait_for(where, 1 if where == "built" else chance.randint(1, 2)), dies.log.read_text()
        time.sleep(chance.uniform(0.0, seconds[where]))
        for run in (dies, *runs):  # the other would fail at its next gradient, or wait as long as a launcher lets it
            run.end_by(signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.5) if run is dies else 0.0)
        found.append(whole(folder))
        assert bool(found[-1]) >= any(found), found
        left_unfinished += len(found[-1]) < len(list(folder.glob("checkpoint-*")))
    assert left_unfinished > 0  # so runs did die while they saved, and went back
    for run in (runs := start_all(PAIR, folder)):
        finish(run.process, run.log)
    for rank in range(len(runs)):
        assert_equal(*(torch.load(each / f"{rank}-{FINAL}") for each in (folder, tmp_path / "straight")))
    assert whole(folder) == [f"checkpoint-{STEPS}"]
    assert not unfinished_files(folder)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare weights, state of the optimizer and logs, bit for bit."""
    if expected["logs"] is not None:  # of the process that logs
        assert [log["step"] for log in expected["logs"]] == list(range(1, STEPS + 1))
    assert found["logs"] == expected["logs"]
    assert found["weights"].keys() == expected["weights"].keys()
    for part in ("weights", "optimizer"):
        pairs = zip(tensors_in(found[part]), tensors_in(expected[part]), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), part
