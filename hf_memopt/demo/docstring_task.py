"""The demo's data: a text classification task that needs no download, made from the docstrings of the standard library.

The task is to name the top-level module that a docstring comes from, among the ``LABELS`` modules with the most
docstrings. Sources are read with ``ast`` and never imported. Skipped are test packages and every text that occurs in
two modules, because it has no single right answer. The split depends on a hash of each text, so it is the same on
every machine with the same Python; the number of texts differs between versions (3.11: about 4,900).
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DocstringTask",
    "MissingSourcesError",
    "docstring_task",
    "read_docstrings",
    "source_files",
    "train_tokenizer",
]

LABELS = 20
TEST_FRACTION = 0.2
MAX_LENGTH_TOKENS = 256
VOCABULARY_TOKENS = 4000
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # nodes that can contain a definition


class MissingSourcesError(ValueError):
    """The running Python does not have the sources of its standard library, or too few of them."""


@dataclass(frozen=True)
class DocstringTask:
    """Texts with the number of their module, split into a training and a test part.

    ``train_labels`` and ``test_labels`` are positions in ``labels``, the names of the modules.
    """

    labels: tuple[str, ...]
    train_texts: tuple[str, ...]
    train_labels: tuple[int, ...]
    test_texts: tuple[str, ...]
    test_labels: tuple[int, ...]


def source_files(standard_library: Path | None = None) -> list[tuple[str, Path]]:
    """Return ``(top-level module, file)`` of every Python source of the standard library, in a fixed order.

    Args:
        standard_library: the folder to read; the running Python's own by default.

    Raises:
        MissingSourcesError: the folder holds no sources, as with a zipped or an embedded Python.
    """
    root = standard_library if standard_library is not None else Path(sysconfig.get_path("stdlib"))
    entries = sorted(root.iterdir()) if root.is_dir() else []
    files: list[tuple[str, Path]] = []
    for entry in entries:
        if entry.stem not in sys.stdlib_module_names:
            continue  # site-packages and other files of an installation
        if entry.is_dir():
            inside = (file for file in entry.rglob("*.py") if not TEST_FOLDERS & set(file.relative_to(root).parts))
            files += [(entry.name, file) for file in sorted(inside)]
        elif entry.suffix == ".py":
            files.append((entry.stem, entry))
    if not files:
        raise MissingSourcesError(
            f"standard_library={str(root)!r} holds no Python sources; expected the *.py files of the standard library "
            "(a zipped or embedded Python has none). Run the demo with a full installation: "
            "python3.11 -m venv .venv && .venv/bin/python -m pip install hf-memopt"
        )
    return files


def read_docstrings(
    files: Iterable[tuple[str, Path]], *, on_file: Callable[[], object] = lambda: None
) -> dict[str, str]:
    """Return the module of every docstring that occurs in one top-level module only.

    Args:
        files: what ``source_files`` returned.
        on_file: called after each file, for a progress bar.
    """
    module_of: dict[str, str] = {}
    ambiguous: set[str] = set()
    for module, file in files:
        for text in _docstrings(file):
            if module_of.setdefault(text, module) != module:
                ambiguous.add(text)
        on_file()
    return {text: module for text, module in module_of.items() if text not in ambiguous}


def docstring_task(module_of: dict[str, str]) -> DocstringTask:
    """Return the classification task over the ``LABELS`` modules with the most docstrings.

    Raises:
        MissingSourcesError: fewer modules than that have docstrings.
    """
    texts_of_module = Counter(module_of.values())
    if len(texts_of_module) < LABELS:
        raise MissingSourcesError(
            f"module_of={len(module_of)} docstrings come from {len(texts_of_module)} modules; expected at least "
            f"{LABELS} modules of the standard library. Run the demo with a full installation of Python."
        )
    labels = tuple(sorted(sorted(texts_of_module), key=texts_of_module.__getitem__, reverse=True)[:LABELS])
    number_of = {module: number for number, module in enumerate(labels)}
    in_hash_order = sorted((text for text, module in module_of.items() if module in number_of), key=_fraction)
    split = sum(_fraction(text) < TEST_FRACTION for text in in_hash_order)
    test, train = in_hash_order[:split], in_hash_order[split:]
    return DocstringTask(
        labels=labels,
        train_texts=tuple(train),
        train_labels=tuple(number_of[module_of[text]] for text in train),
        test_texts=tuple(test),
        test_labels=tuple(number_of[module_of[text]] for text in test),
    )


def train_tokenizer(texts: Iterable[str], *, vocabulary_tokens: int = VOCABULARY_TOKENS) -> PreTrainedTokenizerBase:
    """Train BERT's lower-case WordPiece tokenizer; the same texts give the same tokenizer.

    Args:
        texts: the training split only, so that the test texts stay unseen.
        vocabulary_tokens: the upper bound of the vocabulary, special tokens included.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    texts = list(texts)
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers the single characters inside a word ("##a") in the order of a randomly seeded hash map, and
    # breaks ties between merges by these numbers, so that two runs differ. Special tokens are numbered in the order in
    # which they are passed, so the characters are passed as special tokens. Seen in tokenizers 0.23.3.
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


def _docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a source file; nothing where it cannot be read or is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes, which the user of the demo cannot change
            todo: list[ast.AST] = [ast.parse(file.read_bytes())]
    except (OSError, SyntaxError, ValueError):  # ValueError: null bytes or a wrong encoding
        return
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").strip()
            if text:
                yield text
        # Expressions contain no docstrings; skipping them saves a third of the time.
        todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS)]


def _fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
