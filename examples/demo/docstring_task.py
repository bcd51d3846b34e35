"""The demo's data: a text classification task that needs no download, made from the docstrings of the standard library.

The task is to name the top-level module that a docstring comes from, among the ``LABELS`` modules with most of them.
Skipped are test packages and texts of two modules, which have no single right answer. The split depends on a hash of
each text, so it is the same on every machine with the same Python (3.11: about 4,900 texts).
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABELS = 20
TEST_FRACTION = 0.2
MAX_LENGTH_TOKENS = 256
VOCABULARY_TOKENS = 4000
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class DocstringTask:
    """Texts with the number of their module, a position in ``labels``, split into a training and a test part."""

    labels: tuple[str, ...]
    train_texts: tuple[str, ...]
    train_labels: tuple[int, ...]
    test_texts: tuple[str, ...]
    test_labels: tuple[int, ...]


def source_files(standard_library: Path | None = None) -> list[tuple[str, Path]]:
    """Return ``(top-level module, file)`` of every Python source of the standard library, in a fixed order."""
    root = standard_library if standard_library is not None else Path(sysconfig.get_path("stdlib"))
    files = [
        (module, file)
        for module in sorted(sys.stdlib_module_names)  # and not site-packages
        for file in [root / f"{module}.py", *sorted((root / module).rglob("*.py"))]
        if file.is_file() and not TEST_FOLDERS & set(file.relative_to(root).parts)
    ]
    if not files:
        raise ValueError(
            f"standard_library={str(root)!r} holds no Python sources; expected the *.py files of the standard library "
            "(a zipped or embedded Python has none). Run the demo with a full installation: "
            "python3.11 -m venv .venv && .venv/bin/python -m pip install ."
        )
    return files


def read_docstrings(files: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Return the module of every docstring that occurs in one top-level module only, of ``source_files``."""
    module_of: dict[str, str] = {}
    ambiguous: set[str] = set()
    for module, file in files:
        for text in _docstrings(file):
            if module_of.setdefault(text, module) != module:
                ambiguous.add(text)
    return {text: module for text, module in module_of.items() if text not in ambiguous}


def docstring_task(module_of: dict[str, str]) -> DocstringTask:
    """Return the classification task over the ``LABELS`` modules with the most docstrings."""
    texts_of_module = Counter(module_of.values())
    labels = tuple(sorted(sorted(texts_of_module), key=texts_of_module.__getitem__, reverse=True)[:LABELS])
    number_of = {module: number for number, module in enumerate(labels)}
    in_hash_order = sorted((text for text, module in module_of.items() if module in number_of), key=_fraction)
    split = sum(_fraction(text) < TEST_FRACTION for text in in_hash_order)
    numbers = tuple(number_of[module_of[text]] for text in in_hash_order)
    return DocstringTask(
        labels=labels,
        train_texts=tuple(in_hash_order[split:]),
        train_labels=numbers[split:],
        test_texts=tuple(in_hash_order[:split]),
        test_labels=numbers[:split],
    )


def train_tokenizer(texts: Iterable[str], *, vocabulary_tokens: int = VOCABULARY_TOKENS) -> Any:
    """Train BERT's lower-case WordPiece tokenizer; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    texts = list(texts)
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers the characters inside a word ("##a") in the order of a randomly seeded hash map, so that two
    # runs differ. Special tokens are numbered as they are passed, so these are passed. Seen in tokenizers 0.23.3.
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inside = [f"##{character}" for character in sorted({character for word in words for character in word[1:]})]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_tokens, special_tokens=special + inside, show_progress=False
    )
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizer, splitter
    trained.train_from_iterator(texts, trainer)
    inputs = ["input_ids", "attention_mask"]
    return BertTokenizer(trained.get_vocab(), model_max_length=MAX_LENGTH_TOKENS, model_input_names=inputs)


def _docstrings(file: Path) -> set[str]:
    """Return the docstrings of a source file; none where it cannot be read or is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes, which the user of the demo cannot change
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # ValueError: null bytes or a wrong encoding
        return set()
    definitions = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {(ast.get_docstring(node) or "").strip() for node in ast.walk(tree) if isinstance(node, definitions)}
    return texts - {""}


def _fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
