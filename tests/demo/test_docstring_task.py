"""The demo's data: docstrings of the standard library, against ast.walk."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import pytest
from docstring_task import (
    LABELS,
    docstring_task,
    read_docstrings,
    source_files,
)


@pytest.fixture(scope="session")
def module_of() -> dict[str, str]:
    """The docstrings of the standard library that runs the tests."""
    return read_docstrings(source_files())


def texts_by_walk(file: Path) -> set[str]:
    """Return the docstrings of a file by looking at every node."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {(ast.get_docstring(node) or "").strip() for node in nodes if isinstance(node, kinds)}
    return texts - {""}


@pytest.mark.parametrize("name", ["asyncio/base_events.py", "typing.py", "turtle.py", "ctypes/util.py"])
def test_finds_what_walking_every_node_finds(name: str) -> None:
    file = Path(sysconfig.get_path("stdlib")) / name
    assert set(read_docstrings([("any", file)])) == texts_by_walk(file)


@pytest.mark.parametrize("name", ["empty", "python311.zip", "missing"])
def test_a_python_without_sources_is_an_error(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    if name == "empty":
        root.mkdir()
        (root / "json.pyc").touch()
    elif name == "python311.zip":
        root.touch()
    with pytest.raises(ValueError) as error:
        source_files(root)
    assert str(error.value) == (
        f"standard_library={str(root)!r} holds no Python sources; expected the *.py files of the standard library "
        "(a zipped or embedded Python has none). Run the demo with a full installation: "
        "python3.11 -m venv .venv && .venv/bin/python -m pip install ."
    )


def test_the_task_has_the_most_frequent_modules_and_every_text_once(module_of: dict[str, str]) -> None:
    task = docstring_task(module_of)
    counts = Counter(module_of.values())
    assert (
        list(task.labels) == [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:LABELS]
    )
    assert set(task.labels) <= sys.stdlib_module_names
    texts = [*task.train_texts, *task.test_texts]
    assert sorted(texts) == sorted(text for text, module in module_of.items() if module in task.labels)
    labels = [task.labels[number] for number in (*task.train_labels, *task.test_labels)]
    assert labels == [module_of[text] for text in texts]


def test_the_split_depends_on_each_text_alone(module_of: dict[str, str]) -> None:
    task = docstring_task(module_of)
    assert docstring_task(dict(reversed(module_of.items()))) == task
    for texts, in_test in ((task.train_texts, False), (task.test_texts, True)):
        for text in texts:
            first = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            assert (int(first, 16) / 16**16 < 0.2) is in_test
    share = len(task.test_texts) / (len(task.train_texts) + len(task.test_texts))
    assert share == pytest.approx(0.2, abs=0.03)  # of thousands of texts: 5 standard deviations
