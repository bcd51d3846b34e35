"""A file is written whole or not at all, wherever the package writes: full disks, interrupts, links, modes."""

from __future__ import annotations

import ast
import os
import resource
import secrets
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from resource_limits import resource_limit

import hf_memopt
from hf_memopt import padding_report
from hf_memopt.whole_files import warn_unwritten, write_whole

WRITERS: dict[str, Callable[[Path], Any]] = {  # the file that is written, by its writer
    "any.txt": lambda folder: write_whole(folder / "any.txt", "new"),
    "padding.png": lambda folder: padding_report([3, 4]).plot(folder / "padding.png"),
}


def raising(error: BaseException) -> Callable[..., None]:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    return raises


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# ---- One function ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "written"), [("é\n", "é\n".encode()), (b"\xff", b"\xff"), ("\udcff", b"\\udcff")])
def test_content_replaces_what_was_there(tmp_path, content, written) -> None:
    path = tmp_path / ("n" * 255)  # the longest name: that of the unfinished file does not grow with it
    for _ in range(2):
        write_whole(path, content)
        assert path.read_bytes() == written
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit()], ids=repr)
@pytest.mark.parametrize("where", ["fsync", "replace", "fsync, and it cannot be removed"])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, where, error) -> None:
    """And is the error that is told."""
    path = tmp_path / "any.txt"
    path.write_text("old")
    monkeypatch.setattr(os, where.partition(",")[0], raising(error))
    if "removed" in where:
        monkeypatch.setattr(Path, "unlink", raising(OSError(30, "Read-only file system")))
    with pytest.raises(type(error)) as caught:
        write_whole(path, "new")
    assert caught.value is error
    assert not isinstance(error, OSError) or error.filename == str(path)
    if "removed" not in where:
        assert [entry.read_text() for entry in tmp_path.iterdir()] == ["old"]


def test_what_is_no_file_is_not_replaced(tmp_path) -> None:
    """Renaming over /dev/null, say, would break the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder"):
        with pytest.raises(FileExistsError) as error:
            write_whole(path, "new")
        assert str(error.value) == f"[Errno 17] it exists and is not a regular file: {str(path)!r}"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (folder / ".memopt-guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(folder / "any.txt", "new")
    monkeypatch.undo()
    (folder / "any.txt").symlink_to(victim)
    write_whole(folder / "any.txt", "new")
    assert (victim.read_text(), (folder / "any.txt").read_text()) == ("mine", "new")
    assert not (folder / "any.txt").is_symlink()


def test_writers_at_the_same_time_do_not_mix(tmp_path) -> None:
    path, texts = tmp_path / "any.txt", [letter * 100_000 for letter in "abc"]
    write_whole(path, texts[0])
    writers = [threading.Thread(target=lambda: [write_whole(path, text) for text in texts * 7]) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_cause_is_warned_of_once() -> None:
    causes: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for error in (OSError(28, "No space left on device"), OSError(28, "No space left on device"), OSError("odd")):
            warn_unwritten(Path("a.json"), error, "the log has it", causes)
    assert [str(each.message) for each in caught] == [
        f"a.json could not be written ({cause}), so the log has it. Training goes on; make room for it or let its "
        "folder be written to"
        for cause in ("No space left on device", "odd")
    ]


# ---- Wherever the package writes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_of_the_umask(tmp_path, name, mask, mode) -> None:
    if name.endswith(".png"):
        pytest.importorskip("matplotlib")
    with umask(mask):
        WRITERS[name](tmp_path)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_may_not_grow_leaves_the_older_one(tmp_path, name) -> None:
    if name.endswith(".png"):
        pytest.importorskip("matplotlib")
    (tmp_path / name).write_text("old")
    with (
        resource_limit(resource.RLIMIT_FSIZE, 2),
        pytest.raises((OSError, ValueError, RuntimeError), match="File too large"),
    ):
        WRITERS[name](tmp_path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [(name, "old")]


def test_no_other_module_writes_files() -> None:
    """But for a manifest, which is locked while its checkpoint is saved and says itself whether it is whole, for the
    library of a rehearsal, whose folder gets its name at the end, and for files in the folder that one removes.
    """
    package, found = Path(hf_memopt.__file__).parent, set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                modes = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
                writes = name == "open" and any(set(str(mode)) & set("wxa+") for mode in modes)
                if writes or name in ("write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "fdopen"):
                    found.add(str(file.relative_to(package)))
    of_rehearsals = {
        str(Path("prediction", "rehearsal", f"{name}.py")) for name in ("library", "child", "empty_weights")
    }
    assert found == {"whole_files.py", str(Path("training", "binding", "checkpoint_manifest.py")), *of_rehearsals}
