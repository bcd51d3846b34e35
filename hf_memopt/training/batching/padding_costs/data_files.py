"""Find data files, and say which format of ``rows/formats.csv`` their rows are in; others are refused, never guessed.

A format has columns of certain names, those of TRL and of the best-known data sets, which hold what its parts must
hold. Other columns are named as not read. The error for rows in no format names their columns, the formats, and a line
that converts them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from itertools import islice
from pathlib import Path

from hf_memopt.errors import did_you_mean
from hf_memopt.notices import quoted
from hf_memopt.training.batching.padding_costs.file_readers import json_rows, open_source, reading
from hf_memopt.training.rows import FORMATS, TEXTS, Format

KINDS = {
    **{".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"},
    **{".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv"},
}
COMPRESSED = (".gz", ".bz2", ".zst")  # JSON, CSV and TSV only; pyarrow decompresses them by this ending
ENDINGS = f"one of {', '.join(KINDS)}, or a folder of them"
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
HELD: Mapping[str, tuple[str, ...]] = {  # what the column of a part holds; of others anything
    **dict.fromkeys((*TEXTS, "input", "negative"), ("texts",)),
    "input_ids": ("lists of integers",),
    "messages": ("lists of objects",),
    **dict.fromkeys(("prompt", "completion"), ("texts", "lists of objects")),
    "words": ("lists of texts",),
    "translation": ("objects",),
    "answers": ("objects", "lists of objects"),
}
UNKNOWN = ("null", "lists of null")  # of a column without a value in the first rows
TO_ROWS = {  # by columns that well-known files have: what jq makes of such a row
    ("query", "pos"): "{query, positive: .pos[0]}",
    ("prompt", "chosen"): "{prompt, completion: .chosen}",
    ("title", "paragraphs"): ".paragraphs[] | .context as $text | .qas[] | {question, context: $text, "
    "answers: {text: [.answers[].text], answer_start: [.answers[].answer_start]}}",
}

OF_ARRAYS = 'if type == "array" then .[] else . end | '


@dataclass(frozen=True)
class DataFile:
    """What a data file holds, by its first rows."""

    path: str  # as it was given
    kind: str  # "parquet", "arrow", "json", "csv" or "tsv"
    is_folder: bool  # whether `path` is a folder of such files
    is_saved: bool  # whether `Dataset.save_to_disk` wrote it
    column: str  # the one of texts or token ids
    is_text: bool  # whether that holds texts
    columns: tuple[str, ...]  # all of them
    format: str = ""  # of the rows, as `read_rows` calls it; "" of a column that was asked for and is in none
    parts: Mapping[str, str] = default(default_factory=dict)  # the column of each part, as `read_rows` takes them
    task: str | None = None  # the first one whose rows are written so, where none was given
    sources: Sequence[Path] = ()  # the files, or folders of saved datasets
    unread: tuple[str, ...] = ()  # columns that are no part
    values: tuple[str, ...] = ()  # columns of one number, one truth or one text a row
    field: str | None = None  # of a JSON object, that holds the rows

    @property
    def builder(self) -> str:
        """What `datasets` calls the reader of such files."""
        return "csv" if self.kind == "tsv" else self.kind

    @property
    def note(self) -> str:
        """A sentence on the columns that are not read; "" where all are."""
        return f"columns that are not read: {', '.join(self.unread)}" if self.unread else ""


def data_file(
    path: str | os.PathLike[str],
    *,
    column: str | None = None,
    has_tokenizer: bool = False,
    task: str | None = None,
    field: str | None = None,
) -> DataFile:
    """Return what a data file holds, of which the first rows are read; the columns are chosen as for ``file_lengths``.

    With ``has_tokenizer`` texts are preferred to token ids. The errors too are those of ``file_lengths``.
    """
    kind, sources = _find(Path(path))
    if field is not None and kind != "json":
        raise ValueError(f"field={field!r} is for JSON, and {str(path)!r} is {kind}; expected none. Leave --field out")
    with reading(sources[0], kind):
        kinds, _ = open_source(sources[0], kind, field)
    found = _format_of(kinds, column, task, has_tokenizer=has_tokenizer, source=sources[0])
    form, parts = found or (None, {})
    if column is None:
        _check_rows(sources[0], kinds, parts.values(), field)
        _, of_any = _fitting(kinds, None, {}) or (None, {})  # of rows that lack what the task learns
        column = next(iter(parts.values()), of_any.get("text") or of_any.get("input_ids"))
        if column is None:
            raise ValueError(_refusal(sources[0], kind, kinds, task, field))
    return DataFile(
        *(os.fspath(path), kind, Path(path).is_dir(), sources[0].is_dir()),
        *(column, "input_ids" not in parts and kinds[column] != "lists of integers", tuple(kinds)),
        format="" if form is None else form.name,
        parts=parts,
        task=task if form is None else task or form.tasks[0],
        sources=sources,
        unread=tuple(name for name in kinds if name not in (column, *parts.values())),
        values=tuple(name for name, held in kinds.items() if not held.startswith(("lists", "objects"))),
        field=field,
    )


# ---- Which files ----------------------------------------------------------------------------------------------------


def _find(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of the files and their paths; a saved dataset's folder counts as one file."""
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        action = "Check the path"
        if re.fullmatch(r"[\w-]+(/[\w.-]+)?", str(path)):  # could be the name of a dataset on the hub
            file = f"{path.name}.parquet"
            action = f"Save a dataset of the hub first: load_dataset({str(path)!r}, split='train').to_parquet({file!r})"
        meant = did_you_mean(path.name, siblings)
        raise ValueError(f"path={str(path)!r} does not exist; expected a file or a folder.{meant} {action}")
    below = _below(path) if path.is_dir() else [path]
    found = {os.path.realpath(source): source for source in below}  # once, if several links lead to it
    kinds = Counter(_kind(source) for source in found.values())
    if not found or None in kinds:
        what = "holds no data files" if path.is_dir() else "is not a known kind of file"
        raise ValueError(f"path={str(path)!r} {what}; expected {ENDINGS}. Convert it first")
    first, *others = kinds
    if others:
        mixture = " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=str))
        one = str(next(iter(found.values())))
        raise ValueError(
            f"path={str(path)!r} mixes files of several kinds, {mixture}; expected one kind. Pass path={one!r}"
        )
    return str(first), [*found.values()]


def _below(folder: Path) -> Iterator[Path]:
    """Yield the data files and saved datasets below a folder; what is hidden is left out."""
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        if "dataset_dict.json" in names:
            raise ValueError(
                f"path={top!r} holds the splits {', '.join(folders)}; expected one dataset. "
                f"Pass path={os.path.join(top, *folders[:1])!r}"
            )
        if {"state.json", "dataset_info.json"} <= {*names}:
            folders.clear()
            yield Path(top)
            continue
        shown = (Path(top, name) for name in sorted(names) if not name.startswith((".", "_")) and name not in METADATA)
        yield from (path for path in shown if _kind(path) is not None)


def _kind(file: Path) -> str | None:
    if file.is_dir():
        return "arrow"  # a saved dataset
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED and KINDS.get("".join(suffixes[-2:-1])) in ("json", "csv", "tsv"):
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


# ---- Which format ---------------------------------------------------------------------------------------------------


def _format_of(
    kinds: Mapping[str, str], column: str | None, task: str | None, *, has_tokenizer: bool, source: Path
) -> tuple[Format, dict[str, str]] | None:
    """Return the format and the columns of its parts; of a ``column`` alone None where it is in no format."""
    if column is not None:
        check_column(kinds, column, source)
        parts = {"lists of integers": ("input_ids",), "lists of objects": ("messages",)}
        each = (_fitting(kinds, task, {part: column}) for part in parts.get(kinds[column], ("text", "source")))
        return next(filter(None, each), None)
    without_ids = {name: kind for name, kind in kinds.items() if name != "input_ids"} if has_tokenizer else kinds
    return _fitting(without_ids, task, {}) or _fitting(kinds, task, {})


def _fitting(
    kinds: Mapping[str, str], task: str | None, given: Mapping[str, str]
) -> tuple[Format, dict[str, str]] | None:
    for form in FORMATS:
        parts = form.found_in([*kinds], given) if task is None or task in form.tasks else None
        if parts and all(kinds[name] in (*HELD.get(part, (kinds[name],)), *UNKNOWN) for part, name in parts.items()):
            return form, parts
    return None


def check_column(kinds: Mapping[str, str], column: str, source: Path) -> None:
    """Raise for a column that a file does not have."""
    if column not in kinds:
        raise ValueError(
            f"column={column!r} is not in {str(source)!r}; expected one of {sorted(kinds)}."
            f"{did_you_mean(column, kinds)} Pass --column NAME"
        )


def _check_rows(file: Path, kinds: Mapping[str, str], read: Iterable[str], field: str | None) -> None:
    """Raise where a JSON file is one object, with rows in a field that is not read."""
    held = [name for name, kind in kinds.items() if kind == "lists of objects" and name not in read]
    if held and field is None and _kind(file) == "json" and len([*islice(json_rows(file), 2)]) == 1:
        raise ValueError(
            f"path={str(file)!r} is one object, with rows in {' or '.join(held)}; expected an object for each row. "
            f"Pass --field {held[0]}"
        )


def _refusal(source: Path, kind: str, kinds: Mapping[str, str], task: str | None, field: str | None) -> str:
    """Return the error for rows in no format of the task."""
    fitting = _fitting(kinds, None, {})
    if fitting is None:
        has = ", ".join(f"{name} ({held})" for name, held in kinds.items())
        how = _conversion(source, kind, kinds, field)
    else:
        tasks = " or ".join(fitting[0].tasks)
        has = f"{', '.join(fitting[1].values())}, rows of {fitting[0].name}, which are for {tasks}"
        is_head = tasks in ("sequence-classification", "token-classification", "question-answering")
        how = f"Pass --task {tasks}" if is_head else f"Take a model of {tasks}, or rename the columns"
    possible = [form for form in FORMATS if task is None or task in form.tasks]
    possible.sort(key=lambda form: len(form.columns))
    usual = {form.name: ", ".join(names[0] for names in form.columns.values()) for form in reversed(possible)}
    formats = "; ".join(reversed(usual.values()))
    of = "" if task is None else f" for {task}"
    return f"path={str(source)!r} has the columns {has}; expected those of a format{of}: {formats}. {how}"


def _conversion(source: Path, kind: str, kinds: Mapping[str, str], field: str | None) -> str:
    """Return the line that converts rows in no format."""
    path, (first, *others) = str(source), kinds
    if kind == "json":
        program = next((program for names, program in TO_ROWS.items() if {*names} <= kinds.keys()), None)
        if program is not None:
            each = f".{field}[] | " if field else OF_ARRAYS * (".json" in source.suffixes)
            return f"Call: jq -c {quoted(each + program)} {quoted(path)} > rows.jsonl"
        if field is None and all(isinstance(value, list) for value in next(json_rows(source)).values()):
            return f"Call: pandas.read_json({path!r}).to_json('rows.jsonl', orient='records', lines=True)"
    separator = next((one for one in ";|\t" if one in first and not others), None)
    if separator is not None:
        read = f"pandas.read_csv({path!r}, sep={separator!r}, keep_default_na=False)"
        return f"Call: {read}.to_csv('rows.csv', index=False)"
    column = next((name for name, held in kinds.items() if held == "texts"), None)
    if column is None:
        return "Add a column of texts or of token ids"
    options = f", field={field!r}" * bool(field) + ", sep='\\t'" * (kind == "tsv")
    data = f"load_dataset({'csv' if kind == 'tsv' else kind!r}, data_files={path!r}, split='train'{options})"
    data = f"load_from_disk({path!r})" if source.is_dir() else data
    renamed = f"datasets.{data}.rename_column({column!r}, 'text')"
    return f"Pass --column {quoted(column)}, or call: {renamed}.to_parquet('rows.parquet')"
