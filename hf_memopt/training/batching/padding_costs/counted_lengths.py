"""Count the lengths of the examples in data files, for ``hf-memopt lengths`` and ``--data``: token ids, or texts.

Texts are counted in tokens where a tokenizer is given, as ``read_rows`` encodes rows of their format, else in words.

Limitations: local files only; transforms that a dataset would apply are not applied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hf_memopt.hub import hub_answers
from hf_memopt.training.batching.padding_costs.data_files import HELD, UNKNOWN, DataFile, check_column, data_file
from hf_memopt.training.batching.padding_costs.file_readers import Column, first_line, kind_of, open_source, reading
from hf_memopt.training.rows import OPTIONAL, READ, Encoder, words_of

IDS = ("input_ids", "labels")  # the parts that are lists of integers


@dataclass(frozen=True)
class FileLengths:
    """The result of ``file_lengths``."""

    lengths: NDArray[np.int32]  # (examples,), without null and empty rows, which a bucketed view refuses
    unit: Literal["tokens", "words"]  # words where texts were split at white space
    columns: tuple[str, ...]  # what was counted
    file: DataFile
    null_rows: int  # without a value in a column that they need
    empty_rows: int  # of length 0, or with nothing to learn

    @property
    def column(self) -> str:
        """The column that was counted, or several with commas."""
        return ", ".join(self.columns)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the lengths for JSON."""
        of_file = {"kind": self.file.kind, "files": len(self.file.sources), "format": self.file.format}
        own = {name: getattr(self, name) for name in ("column", "unit", "null_rows", "empty_rows")}
        return {**of_file, "unread": list(self.file.unread), **own}

    def heading(self, path: str | Path) -> str:
        """Return lines of text that say what was read and counted."""
        count = len(self.file.sources)
        files = "1 file" if count == 1 else f"{count} files"
        how = ", split at white space into words (for tokens pass --tokenizer NAME)" if self.unit == "words" else ""
        form = self.file.format
        rows = f" of rows as {form}" if len(self.columns) > 1 or form == "conversation" else ""
        columns = f"column{'s' * (len(self.columns) > 1)} {', '.join(map(repr, self.columns))}"
        lines = [f"{path}: {files}, {self.file.kind}, {columns}{rows}{how}"]
        if self.file.unread:
            lines.append(f"C{self.file.note[1:]}.")
        if self.null_rows or self.empty_rows:
            full = " and ".join(f"row[{column!r}]" for column in self.columns)
            lines.append(
                f"Skipped: {self.null_rows:,} null and {self.empty_rows:,} empty rows; remove them before training:\n"
                f"    dataset.filter(lambda row: {full})"
            )
        return "\n".join(lines)


def file_lengths(
    path: str | Path,
    *,
    column: str | None = None,
    tokenizer: str | None = None,
    task: str | None = None,
    field: str | None = None,
) -> FileLengths:
    """Return the length of every example in a file, or in a folder of files of one kind.

    A folder is searched with its subfolders; hidden files and other kinds of files are skipped. A folder that
    ``Dataset.save_to_disk`` wrote is read as that dataset. With a tokenizer the lengths are those of ``read_rows``,
    else words are counted. A row of an encoder-decoder is as long as the longer of its source and its target, one of
    texts that are embedded as the longest of them.

    Args:
        path: the file or folder.
        column: lists of token ids or texts, to be read alone; by default the columns of the first format that fits
            (with a tokenizer texts are preferred to ``input_ids``).
        tokenizer: a folder or a name on the Hub for ``AutoTokenizer``.
        task: of the model's head, which decides where several formats fit; None for any.
        field: of the JSON object that the file is, which holds the rows.

    Raises:
        ValueError: a path, a column, rows in no format, or a tokenizer that cannot be read.
    """
    from tqdm.auto import tqdm

    file = data_file(path, column=column, has_tokenizer=tokenizer is not None, task=task, field=field)
    if tokenizer is not None and not file.is_text:
        raise ValueError(
            f"tokenizer={tokenizer!r} has no text to split: column {file.column!r} holds token ids already; expected a "
            "column of texts. Leave the tokenizer out, or name another column: --column NAME"
        )
    parts = file.parts or {"text" if file.is_text else "input_ids": file.column}
    if task is None or tokenizer is None:  # whoever trains decides what the labels are
        wanted = (*READ, "tools", *(IDS if task == "seq2seq" else ()))
        parts = {part: name for part, name in parts.items() if part in wanted}
    count = _counter(parts, file, tokenizer, task)
    needed = [name for part, name in parts.items() if part not in OPTIONAL]
    lengths, null_rows, rows = [np.empty(0, dtype=np.int32)], 0, 0
    with tqdm(unit=" rows", desc="Reading lengths", delay=1.0, leave=False) as progress:
        for batch in _batches(file, parts):
            is_null = np.any([_nulls(batch[name]) for name in needed], axis=0)
            null_rows, rows = null_rows + int(is_null.sum()), rows + len(is_null)
            progress.update(len(is_null))
            if not is_null.all():
                lengths.append(count({name: _taken(values, ~is_null) for name, values in batch.items()}))
    counted = np.concatenate(lengths)
    full = counted[counted > 0]
    empty_rows = rows - null_rows - len(full)
    columns = tuple(name for part, name in parts.items() if part in READ)
    if len(full) == 0:
        where = f"column{'s' * (len(columns) > 1)} {', '.join(map(repr, columns))}"
        found = f"{null_rows} null and {empty_rows} empty rows in {where}, and no other"
        raise ValueError(f"path={str(path)!r} holds {found}; expected at least one example. Check what wrote it")
    unit: Literal["tokens", "words"] = "words" if file.is_text and tokenizer is None else "tokens"
    return FileLengths(full, unit, columns, file, null_rows, empty_rows)


def _batches(file: DataFile, parts: Mapping[str, str]) -> Iterator[Mapping[str, Column]]:
    """Yield the columns of the parts, which hold in each batch what they must."""
    for source in file.sources:
        with reading(source, file.kind):
            kinds, read = open_source(source, file.kind, file.field)
            for name in parts.values() - kinds.keys():
                check_column(kinds, name, source)
            for batch in read([*{*parts.values()}]):
                for part, name in parts.items():
                    if (held := kind_of(batch[name])) not in (*HELD.get(part, (held,)), *UNKNOWN):
                        raise ValueError(
                            f"column={name!r} of {str(source)!r} holds {held}; expected "
                            f"{' or '.join(HELD[part])} in every row. Correct these rows, or pass --column NAME"
                        )
                yield batch


def _nulls(values: Column) -> NDArray[np.bool_]:
    is_list = isinstance(values, list)
    return np.array([value is None for value in values]) if is_list else np.asarray(values.is_null())


def _taken(values: Column, is_taken: NDArray[np.bool_]) -> Column:
    return [*compress(values, is_taken)] if isinstance(values, list) else values.filter(pa.array(is_taken))


# ---- How long -------------------------------------------------------------------------------------------------------


def _counter(
    parts: Mapping[str, str], file: DataFile, tokenizer: str | None, task: str | None
) -> Callable[[Mapping[str, Column]], NDArray[np.int32]]:
    """Return what counts the lengths of rows, by their columns."""
    if not file.is_text:  # from the offsets
        return lambda rows: np.max([pc.list_value_length(one) for one in rows.values()], axis=0).astype(np.int32)
    own_task = file.task if file.parts and file.task is not None else "masked-lm"
    encode = None if tokenizer is None else Encoder(own_task, parts, _loaded(tokenizer))

    def count(rows: Mapping[str, Column]) -> NDArray[np.int32]:
        batch = {name: values if isinstance(values, list) else values.to_pylist() for name, values in rows.items()}
        if encode is not None:
            made = replace(encode, has_own_none=any(isinstance(values, list) for values in rows.values()))(batch)
            sides = [made[name] for name in IDS if name in made and (name == "input_ids" or task == "seq2seq")]
            return np.array([max(map(len, row)) for row in zip(*sides, strict=True)], dtype=np.int32)
        texts = batch[parts["text"]][:20] if "text" in parts else []  # one alone may be a text such as "[1]"
        if texts and all(re.fullmatch(r"\[\s*\d[\d\s,]*\]", text) for text in texts):
            raise ValueError(
                f"column={file.column!r} holds lists written as text, like {texts[0][:20]!r}; expected texts, or real "
                "lists of token ids. Write a format that has lists: dataset.to_parquet(...)"
            )
        return np.array(words_of({part: batch[name] for part, name in parts.items()}), dtype=np.int32)

    return count


def _loaded(name: str) -> Any:
    try:
        from transformers import AutoTokenizer

        offline = not Path(name).exists() and not hub_answers()  # its client would try ten times, for a minute
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=offline)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # where the Rust of tokenizers panics, what it raises is no Exception
        raise ValueError(
            f"tokenizer={name!r} cannot be loaded ({first_line(error)}); expected a folder or a name on the Hub. "
            "Leave it out to count words"
        ) from error
    # of a folder that holds a config.json alone transformers 5 makes a tokenizer without a vocabulary
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            f"tokenizer={name!r} has no vocabulary; expected one that save_pretrained has written. "
            f"Call: tokenizer.save_pretrained({name!r})"
        )
    return tokenizer
