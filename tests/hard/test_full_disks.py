"""Where the disk is full, older files stay whole, nothing half-written is left, and training goes on where it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from children import finish, start
from starved_disks import (
    WAYS,
    call_commands,
    mount_disk,
    run_on,
    save_without_room,
    train_on_without_room,
    write_everything,
)

import tiny


@pytest.fixture(scope="module")
def why_no_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return why this system lets no process mount a disk of its own, or an empty string."""
    folder = tmp_path_factory.mktemp("disk")
    log = folder / "log"
    process = start(mount_disk, folder, log=log)
    process.join()
    return "" if process.exitcode == 0 else log.read_text().splitlines()[-1]


@pytest.fixture(params=WAYS)
def way(request: Any, why_no_disk: str) -> str:
    if request.param == "a disk of its own" and why_no_disk:
        pytest.skip(f"no disk can be mounted here: {why_no_disk}")
    return str(request.param)


def run(function: Any, way: str, folder: Path, *args: Any) -> None:
    """Run a function in a process whose disk is this folder."""
    disk, log = folder / "disk", folder / "log"
    disk.mkdir()
    process = start(run_on, way, disk, function, *args, log=log)
    finish(process, log)


@pytest.mark.parametrize("seed", range(2))
def test_what_cannot_be_written_leaves_what_was_there(way: str, seed: int, tmp_path: Path) -> None:
    run(write_everything, way, tmp_path, seed)


def test_a_command_that_cannot_write_says_so_in_one_line(way: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.llama_config(num_hidden_layers=1, max_position_embeddings=64).save_pretrained(model)
    run(call_commands, way, tmp_path, str(model))


@pytest.mark.parametrize("seed", range(2))
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(way: str, seed: int, tmp_path: Path) -> None:
    run(save_without_room, way, tmp_path, tmp_path / "straight", seed)


def test_training_goes_on_without_the_files_that_it_does_not_need(way: str, tmp_path: Path) -> None:
    run(train_on_without_room, way, tmp_path, tmp_path / "straight")
