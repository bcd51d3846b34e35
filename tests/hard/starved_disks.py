"""What ``test_full_disks`` runs in a process of its own, whose disk is full or whose files may not grow.

A disk is a tmpfs that only this process sees, in namespaces of its own; it fills by pages of 4 KiB. The largest size of
a file, RLIMIT_FSIZE, ends a write at any byte. Either way the system itself refuses it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import tiny_plans
import torch
from printed_errors import in_one_line
from resource_limits import resource_limit
from transformers import Trainer, TrainerCallback
from typer.testing import CliRunner

import hf_memopt as m
import tiny
from hf_memopt.cli.app import app
from hf_memopt.training.binding.checkpoint_manifest import why_not_whole

WAYS = ("a disk of its own", "files that may not grow")
DISK_BYTES = 8 * 2**20
REFUSALS = ("No space left on device", "File too large")
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h


def run_on(way: str, root: Path, function: Callable[..., None], *args: Any) -> None:
    """Call a function in a process whose disk is this folder; first of all, since threads could keep the old disk."""
    if way == "a disk of its own":
        mount_disk(root)
    function(way, root, *args)


def mount_disk(folder: Path) -> None:
    """Mount a tmpfs over a folder, for this process, which has one thread, and its children alone.

    Raises:
        OSError: the system lets this user make no namespaces.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    user, group = os.getuid(), os.getgid()
    checked(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    checked(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={DISK_BYTES}".encode()))


@contextmanager
def starved(way: str, root: Path, most_bytes: int) -> Iterator[None]:
    """Leave this much room on the disk, or let no file grow beyond it."""
    if way == "files that may not grow":
        with resource_limit(resource.RLIMIT_FSIZE, most_bytes):
            yield
        return
    filler = root / "filler"
    state = os.statvfs(root)
    filler.write_bytes(bytes(max(state.f_bavail * state.f_frsize - most_bytes, 0)))
    try:
        yield
    finally:
        filler.unlink()


# ---- Files that the package writes ----------------------------------------------------------------------------------


def writers(root: Path) -> dict[str, Callable[[Path], Any]]:
    """Return what writes files into a folder."""
    plan = tiny_plans.fitting_plan()
    return {
        "a picture of padding": lambda folder: m.padding_report([3, 4, 90]).plot(folder / "padding.svg"),
        "a plan": lambda folder: plan.write(folder, force=True),
        "the report of a plan": lambda folder: plan.report(folder / "plan.html", force=True),
        "the picture of a plan": lambda folder: plan.plot(folder / "plan.svg"),
    }


def write_everything(way: str, root: Path, seed: int) -> None:
    """Let each writer write over older files, with random room, and check what is left."""
    chance = random.Random(seed)
    messages: list[tuple[str, str, list[str]]] = []
    written = writers(root)
    for name, write in written.items():
        folder = root / "files"
        folder.mkdir(exist_ok=True)
        write(folder)
        new = {path.name: path.read_bytes() for path in folder.iterdir()}
        for _ in range(12):
            for file in new:
                (folder / file).write_bytes(b"the old one")
            with starved(way, root, chance.randrange(max(map(len, new.values())))):
                try:
                    write(folder)
                except (OSError, ValueError) as error:
                    messages.append((name, str(error), [str(folder / file) for file in new]))
            left = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert left.keys() == new.keys(), left.keys()
            assert all(left[file] in (b"the old one", new[file]) for file in new), (name, left)
        for file in new:
            (folder / file).unlink()
    assert {name for name, _, _ in messages} == written.keys()
    for _, text, files in messages:
        assert any(refusal in text for refusal in REFUSALS), text
        assert any(file in text for file in files), text


def call_commands(way: str, root: Path, model: str) -> None:
    """Let commands write on a full disk; each has to end with one line, the exit code 2 and the old file."""
    options = ["plan", model, "--gpu", "RTX 3060 12GB", "--effective-batch", "2", "--seq-len", "16", "--method", "full"]
    page, folder = root / "plan.html", root / "run"
    folder.mkdir()
    (folder / "train.py").write_text("the old one")
    page.write_text("the old one")
    with starved(way, root, 100):
        for more in (["--write", str(folder)], ["--report", str(page)]):
            found = CliRunner().invoke(app, [*options, *more, "--force"])
            assert found.exit_code == 2, found.output
            line = in_one_line(found.stderr).splitlines()[-1]
            assert any(text in line for text in REFUSALS), found.stderr
            assert str(folder / "recipe.json") in line or str(page) in line, line
            assert "Traceback" not in found.output
    assert (folder / "train.py").read_text() == page.read_text() == "the old one"
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == ["plan.html", "train.py"]


# ---- Trainings ------------------------------------------------------------------------------------------------------


class StarvesAt(TrainerCallback):
    """Take the room away once a checkpoint is written, before or after other callbacks write their files into it."""

    def __init__(self, way: str, root: Path, step: int, most_bytes: int) -> None:
        self.step, self.room = step, starved(way, root, most_bytes)
        self.is_starving = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.room.__enter__()
            self.is_starving = True

    def end(self) -> None:
        if self.is_starving:
            self.room.__exit__(None, None, None)


def make_trainer(folder: Path, **settings: Any) -> Trainer:
    """Return a Trainer that draws random numbers in each step, and writes all there is to write."""
    rows = [{"input_ids": [5 + i] * (3 * i % 17 + 1), "labels": i % 3} for i in range(24)]
    asked = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 1}
    asked |= {"optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "constant", **settings}
    args = tiny.arguments(folder, **asked)
    torch.manual_seed(0)
    collator = m.BucketedCollator(tiny.tokenizer())
    trainer = Trainer(
        tiny.bert(hidden_dropout_prob=0.1), args, train_dataset=m.bucketed(rows, max_tokens=48), data_collator=collator
    )
    callbacks = [m.MicrobatchCallback(max_tokens=24), m.MemoryReportCallback(), m.ShardedCheckpointCallback("40KB")]
    return m.attach(trainer, *callbacks)


def save_without_room(way: str, root: Path, straight: Path, seed: int) -> None:
    """Run out of room in a checkpoint, at random bytes of it; the one before is whole and is resumed exactly."""
    warnings.simplefilter("ignore", UserWarning)
    chance = random.Random(seed)
    expected = make_trainer(straight)
    expected.train()
    sizes = [path.stat().st_size for path in (straight / "checkpoint-8").iterdir()]
    most, errors = sum(sizes) if way == "a disk of its own" else max(sizes), []
    for number in range(12):
        folder = root / f"out{number}"
        trainer = make_trainer(folder)
        starving = StarvesAt(way, root, 4, chance.randrange(most))
        trainer.add_callback(starving)
        try:
            trainer.train()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        finally:
            starving.end()
        assert why_not_whole(folder / "checkpoint-4") is None
        resumed = make_trainer(folder)
        resumed.train(resume_from_checkpoint=True)
        assert tiny.largest_difference(expected.model, resumed.model) == 0.0
        assert not list(folder.rglob(".memopt-*"))
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert len(errors) >= 6, errors
    print("\n".join(errors))


def train_on_without_room(way: str, root: Path, straight: Path) -> None:
    """Take the room away when the checkpoint is written but not what training does not need: it goes on."""
    expected = make_trainer(straight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected.train()
    trainer = make_trainer(root / "out", max_steps=4, save_steps=4)
    starving = StarvesAt(way, root, 4, 0)
    trainer.callback_handler.callbacks.insert(0, starving)
    log = io.StringIO()  # the file of the log may not grow either
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(log), redirect_stderr(log):
        warnings.simplefilter("always", UserWarning)
        trainer.train()
    starving.end()
    assert trainer.state.global_step == 4
    messages = sorted(str(each.message) for each in caught if "could not be written" in str(each.message))
    print("\n".join(messages))
    assert [Path(text.split()[0]).name for text in messages] == ["memopt_run.json"], messages
    assert all(any(refusal in text for refusal in REFUSALS) for text in messages), messages
    assert all("Training goes on; make room for it" in text for text in messages), messages
    assert json.loads((root / "out" / "memopt_run.json").read_bytes())["state"] == "training"  # of its beginning
    resumed = make_trainer(root / "out")
    resumed.train(resume_from_checkpoint=True)
    assert tiny.largest_difference(expected.model, resumed.model) == 0.0
    assert json.loads((root / "out" / "memopt_run.json").read_bytes())["last_step"] == 8
