"""The demo's data: docstrings of the standard library, against importing the modules and against ast.walk."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
import warnings
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from docstring_task import (
    LABELS,
    VOCABULARY_TOKENS,
    DocstringTask,
    docstring_task,
    read_docstrings,
    source_files,
    train_tokenizer,
)
from transformers import AutoTokenizer

TRAINING_TEXTS = ["Return the absolute path.", "Parse the header; return a Message.", "Überschreibe nichts."] * 3


@pytest.fixture(scope="session")
def module_of() -> dict[str, str]:
    """The docstrings of the standard library that runs the tests."""
    return read_docstrings(source_files())


def texts_by_import(module: ModuleType) -> set[str]:
    """Return the docstrings of a module, its classes, functions and methods by importing it: slow and obvious."""
    found = [module]
    for value in vars(module).values():
        if isinstance(value, type | FunctionType) and value.__module__ == module.__name__:
            found.append(value)
            if isinstance(value, type):
                found += [member for member in vars(value).values() if isinstance(member, FunctionType)]
    texts = (inspect.cleandoc(item.__doc__).strip() for item in found if item.__doc__ and not is_generated(item))
    return {text for text in texts if text}


def is_generated(item: object) -> bool:
    """Return whether an object was made at run time (by a dataclass, say) and so is in no source."""
    try:
        inspect.getsource(item)
    except (OSError, TypeError):
        return True
    return False


def texts_by_walk(file: Path) -> set[str]:
    """Return the docstrings of a file by looking at every node."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {(ast.get_docstring(node) or "").strip() for node in nodes if isinstance(node, kinds)}
    return texts - {""}


@pytest.mark.parametrize("name", ["textwrap", "fractions", "shlex", "heapq", "queue"])
def test_finds_what_importing_finds(name: str, module_of: dict[str, str]) -> None:
    texts = texts_by_import(__import__(name))
    found = {text: module_of[text] for text in texts if text in module_of}
    assert set(found.values()) == {name}
    everywhere = Counter(text for module, file in source_files() if module == name for text in texts_by_walk(file))
    assert texts <= set(everywhere)
    assert len(found) >= 0.8 * len(texts)  # the rest is in a second module too


@pytest.mark.parametrize("name", ["asyncio/base_events.py", "typing.py", "turtle.py", "ctypes/util.py"])
def test_finds_what_walking_every_node_finds(name: str) -> None:
    file = Path(sysconfig.get_path("stdlib")) / name
    assert set(read_docstrings([("any", file)])) == texts_by_walk(file)


def test_finds_definitions_inside_blocks() -> None:
    file = Path(__file__).with_name("blocks.txt")
    texts = {"in if", "in except", "in match\nsecond line", "in with", "in method"}
    assert set(read_docstrings([("blocks", file)])) == texts == texts_by_walk(file)


def test_reads_declared_encodings_and_skips_what_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes('# coding: latin-1\n"""Größe."""\n'.encode("latin-1"))
    (tmp_path / "wrong.py").write_bytes('"""Größe in Latin-1."""\n'.encode("latin-1"))  # UTF-8 is expected
    (tmp_path / "null.py").write_bytes(b'"""Null."""\x00')
    (tmp_path / "syntax.py").write_text('"""Syntax."""\ndef')
    (tmp_path / "escape.py").write_text('"""An invalid \\d escape."""\n')  # would warn
    files = [("m", file) for file in [*sorted(tmp_path.iterdir()), tmp_path / "missing.py"]]
    assert set(read_docstrings(files)) == {"Größe.", "An invalid \\d escape."}


def test_drops_texts_of_two_modules_and_keeps_one_of_a_repeated_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Both."""\ndef f(): "Only a."\ndef g(): "Only a."\n')
    (tmp_path / "b.py").write_text('"""Both."""\ndef f(): "Only b."\n')
    (tmp_path / "c.py").write_text('"""Both."""\n')
    files = [(name, tmp_path / f"{name}.py") for name in "abc"]
    assert read_docstrings(files) == {"Only a.": "a", "Only b.": "b"}


def test_source_files_skips_tests_and_what_is_not_a_module(tmp_path: Path) -> None:
    kept = ["json/__init__.py", "json/decoder.py", "shlex.py"]
    skipped = [
        "json/tests/__init__.py",
        "test/a.py",
        "idlelib/idle_test/a.py",
        "site-packages/x.py",
        "mine.py",
        "json.txt",
    ]
    for name in [*kept, *skipped]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    modules = ["json", "json", "shlex"]
    assert source_files(tmp_path) == [(module, tmp_path / name) for module, name in zip(modules, kept, strict=True)]


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


def test_the_tokenizer_is_the_same_every_time_and_stays_within_its_vocabulary(module_of: dict[str, str]) -> None:
    texts = sorted(module_of)[:300]
    one, other = (train_tokenizer(texts, vocabulary_tokens=800) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()  # not so with the trainer of tokenizers alone, in one process or two
    assert len(one) <= 800
    assert sorted(one.get_vocab().values()) == list(range(len(one)))


def test_the_tokenizer_has_berts_special_tokens_and_can_be_reloaded(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TRAINING_TEXTS)
    assert [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.cls_token_id] == [0, 1, 2]
    assert [tokenizer.sep_token, tokenizer.mask_token] == ["[SEP]", "[MASK]"]
    encoded = tokenizer(["Return the PATH.", "☃", "path " * 400], truncation=True)
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(encoded["input_ids"][0]) == "[CLS] return the path. [SEP]"
    assert encoded["input_ids"][1] == [2, 1, 3]
    assert len(encoded["input_ids"][2]) == 256
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded(TRAINING_TEXTS, truncation=True)["input_ids"] == tokenizer(TRAINING_TEXTS)["input_ids"]
    assert reloaded.model_max_length == 256
    assert reloaded.pad_token_id == 0


@pytest.fixture(scope="module")
def task(module_of: dict[str, str]) -> DocstringTask:
    return docstring_task(module_of)


def test_the_task_is_of_a_useful_size(task: DocstringTask) -> None:
    assert len(task.labels) == len(set(task.labels)) == 20
    assert not set(task.train_texts) & set(task.test_texts)
    assert 2_000 < len(task.train_texts) < 20_000
    assert 500 < len(task.test_texts) < 5_000
    assert set(task.train_labels) == set(task.test_labels) == set(range(20))
    assert all(text == text.strip() != "" for text in (*task.train_texts, *task.test_texts))


def test_the_default_tokenizer_on_the_real_texts(task: DocstringTask) -> None:
    one = train_tokenizer(task.train_texts)
    assert 1000 < len(one) <= VOCABULARY_TOKENS
    assert [one.pad_token_id, one.cls_token_id, one.sep_token_id, one.mask_token_id] == [0, 2, 3, 4]
    lengths = [len(ids) for ids in one(list(task.test_texts), truncation=True)["input_ids"]]
    assert 3 <= min(lengths) < 16
    assert max(lengths) == 256
    assert one("")["input_ids"] == [2, 3]
