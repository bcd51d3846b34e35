"""Files from strangers: read as data or refused with one clear line; nothing is run, written or asked for elsewhere.

Memory may grow by 1 GiB while a file of some kilobytes is read, whatever sizes it claims.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from broken_files import ENDS, FILES, broken_bytes, broken_json
from hypothesis import HealthCheck, given, seed, settings
from malformed import limited

from hf_memopt import NotEstimableError

pytestmark = pytest.mark.filterwarnings("ignore")

numbers = itertools.count()
FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect")
seen: list[list[str]] = []
"""Lists to which what is forbidden, or written, is added; none while nobody looks."""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if not seen:
        return
    if event in FORBIDDEN or event == "socket.getaddrinfo":
        seen[-1].append(f"{event} {arguments}")
    elif event == "open" and isinstance(arguments[0], (str, bytes)) and isinstance(arguments[2], int):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            seen[-1].append(f"written: {os.fsdecode(arguments[0])}")
    elif event in ("os.remove", "os.rename", "shutil.rmtree", "os.rmdir"):
        seen[-1].append(f"{event} {arguments}")


sys.addaudithook(_note)


@contextmanager
def harmless(folder: Path) -> Iterator[None]:
    """Assert that a block runs no program, loads no pickle, connects to nothing and writes into its folder alone."""
    seen.append([])
    try:
        yield
    finally:
        found = seen.pop()
    inside = (str(folder), "/dev/null")
    assert [one for one in found if not one.startswith(tuple(f"written: {path}" for path in inside))] == []


def read_broken(kind: str, content: bytes, folder: Path) -> None:
    """Read a broken file; assert that it works or is refused in one line."""
    one = FILES[kind]
    folder.mkdir()
    try:
        one.write(folder)
        path = folder / one.name
        path.write_bytes(content)
        try:
            with limited(more_bytes=2**30), harmless(folder):
                one.read(path)
        except (ValueError, NotEstimableError) as error:
            text = str(error)
            assert type(error) in (ValueError, NotEstimableError), f"{type(error).__name__}: {text}"  # noqa: PT017
            assert "expected" in text or text.startswith("it ") or "not estimable" in text, text
            assert "\n" not in text, text
            assert len(text) < 2000, f"{len(text)} characters: {text[:300]}"
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the content of a valid file of each kind."""
    found = {}
    for kind, one in FILES.items():
        folder = tmp_path_factory.mktemp("whole")
        one.write(folder)
        found[kind] = (folder / one.name).read_bytes()
    return found


@pytest.mark.parametrize("kind", FILES)
def test_a_valid_file_is_read(kind: str, tmp_path: Path) -> None:
    FILES[kind].write(tmp_path)
    FILES[kind].read(tmp_path / FILES[kind].name)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_something_else_is_refused(kind: str, tmp_path: Path) -> None:
    for content in ENDS:
        read_broken(kind, content, tmp_path / "one")


@pytest.mark.parametrize("kind", FILES)
def test_cut_flipped_and_blown_up(kind: str, whole: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("files")

    @seed(18)
    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(content=broken_bytes(whole[kind]))
    def check(content: bytes) -> None:
        read_broken(kind, content, base / f"{next(numbers)}")

    check()


@pytest.mark.parametrize("kind", [kind for kind, one in FILES.items() if one.is_json])
def test_any_value_at_any_place(kind: str, whole: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    base, parsed = tmp_path_factory.mktemp("files"), json.loads(whole[kind])

    @seed(18)
    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(content=broken_json(parsed))
    def check(content: bytes) -> None:
        read_broken(kind, content, base / f"{next(numbers)}")

    check()


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w')",)


def _with_code(name: str, folder: Path, proof: Path) -> None:
    """Write a file of its kind whose folder holds Python code and pickles that a careless reader would run."""
    FILES[name].write(folder)
    for inside in (folder, folder / "tokenizer"):
        config = inside / FILES[name].name
        if not config.exists() or FILES[name].name not in ("config.json", "tokenizer_config.json"):
            continue
        own = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "strange.Own")
        content = {**json.loads(config.read_bytes()), "auto_map": {**own, "AutoTokenizer": ["strange.Own", None]}}
        config.write_text(json.dumps({**content, "tokenizer_class": "Own"}))
    for inside in (one for one in (folder, *folder.iterdir()) if one.is_dir()):
        for script in ("strange.py", "__init__.py", "sitecustomize.py", f"{inside.name}.py"):
            (inside / script).write_text(f"open({str(proof)!r}, 'w')")
        for pickled in ("pytorch_model.bin", "training_args.bin", "rows.pkl", "optimizer.pt", "rng_state.pth"):
            (inside / pickled).write_bytes(pickle.dumps(Payload(proof)))
        (inside / "model.safetensors").write_bytes(b"\xff" * 64)


@pytest.mark.parametrize("kind", FILES)
def test_code_and_pickles_beside_a_file_are_not_run(kind: str, tmp_path: Path) -> None:
    folder, proof = tmp_path / "folder", tmp_path / "proof"
    folder.mkdir()
    _with_code(kind, folder, proof)
    with limited(), harmless(tmp_path), suppress(ValueError):
        FILES[kind].read(folder / FILES[kind].name)
    assert not proof.exists()
    pickle.loads(pickle.dumps(Payload(proof)))
    assert proof.exists()  # as it would have been
