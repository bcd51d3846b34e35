"""Read the rows of a data set in the formats that people have, into what a model of a task takes.

The format follows from the names of the columns; ``columns=`` names others. The formats are in ``formats.csv`` in the
order in which they are looked for: ``part=name/name`` are the names that data sets give to a part, those of TRL and of
the best-known data sets. One reader serves ``lengths``, ``plan --data``, the scripts that ``plan --write`` writes, and
Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from hf_memopt.errors import did_you_mean
from hf_memopt.hub import task_by_name
from hf_memopt.plain_data import Count, check_value, packaged_rows, shown
from hf_memopt.training.rows.encoders import OPTIONAL, Columns, Encoder
from hf_memopt.training.rows.labels import Labels, labels_of
from hf_memopt.training.rows.metrics import metric_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

LEAST, ENOUGH, MOST = 0.02, 100, 0.1  # shares of the rows, and how many rows, to evaluate where no split is for it
SEED = 0
SPLITS = ("val", "dev", "eval", "test")  # how the names of the splits to evaluate begin


TASKS = ("causal-lm", "masked-lm", "seq2seq", "sequence-classification", "token-classification", "question-answering")
ALIASES = {"regression": "regression", "multi-label-classification": "multi_label_classification"}


@dataclass(frozen=True)
class Rows:
    """The examples of a data set as a model takes them.

    Attributes:
        train: the rows to train on.
        evaluation: those of the split for validation, else 100 rows, but 2 % at least and 10 % at most.
        format: how they were written.
        head: options of ``from_pretrained`` for a new head; none for language models.
        metrics: for ``compute_metrics``, of seq2seq for generated texts; None where the loss says it all.
        kept_predictions: for ``preprocess_logits_for_metrics``; None for all of them.
        best_metric: for ``metric_for_best_model``.
        notes: what was assumed or left out.
    """

    train: Dataset
    evaluation: Dataset
    format: str
    head: Mapping[str, Any] = field(default_factory=dict)
    metrics: Callable[[Any], dict[str, float]] | None = None
    kept_predictions: Callable[[Any, Any], Any] | None = None
    notes: tuple[str, ...] = ()
    best_metric: str = "loss"


def read_rows(
    dataset: Dataset | DatasetDict,
    tokenizer: Any,
    task: str,
    *,
    columns: Mapping[str, str] | None = None,
    max_length: int | None = None,
    prefix: str = "",
) -> Rows:
    """Read a data set as token ids and labels, with the settings of a new head and its metric.

    Conversations are written by the chat template, and what the assistant says is learned; of prompt and completion the
    completion is. Every example of a causal model ends with one end-of-text token, which is learned. Classes are told
    from numbers by ``labels_of``. Rows without text or label are left out, and rows of which nothing is left to learn.

    Args:
        dataset: the rows, or its splits; "train" is trained on, "validation" evaluated, else "test", else 100 rows, 2 %
            at least and 10 % at most, the same ones each time. A split without labels is not evaluated.
        tokenizer: of the model.
        task: "causal-lm", "masked-lm", "seq2seq", "sequence-classification" (also "regression" and
            "multi-label-classification"), "token-classification" or "question-answering".
        columns: the column of a part, where its name is not a usual one: ``{"text": "body", "label": "stars"}``.
        max_length: tokens at which rows are cut, those of ``prefix`` included; None cuts none.
        prefix: before each text to read, as T5 was trained with: "summarize: ".

    Raises:
        ValueError: no format of the task has these columns, rows that are not as their format says, or no rows at all.
        TypeError: no data set, or no tokenizer.

    Example:
        >>> rows = read_rows(dataset, tokenizer, "sequence-classification", max_length=256)  # doctest: +SKIP
        >>> model = AutoModelForSequenceClassification.from_pretrained(name, **rows.head)  # doctest: +SKIP
    """
    if not hasattr(tokenizer, "eos_token_id"):
        raise TypeError(
            f"tokenizer={shown(tokenizer)} has no eos_token_id; expected a transformers tokenizer. "
            "Call: AutoTokenizer.from_pretrained(NAME)"
        )
    check_value("columns", columns, Mapping | None)
    check_value("max_length", max_length, Count | None, 512)
    check_value("prefix", prefix, str, "summarize: ")
    task = task_by_name(task, (*TASKS, *ALIASES))
    if prefix and task != "seq2seq":
        raise ValueError(
            f"prefix={shown(prefix)} is for task='seq2seq' alone, and task={task!r}; expected none. "
            "Write it into the texts: dataset.map(...)"
        )
    if task == "seq2seq" and getattr(tokenizer, "tgt_lang", "") is None:
        raise ValueError(
            f"tokenizer=<{type(tokenizer).__name__}> has tgt_lang=None, and would mark targets as of the language of "
            "their sources; expected both languages. "
            "Call: AutoTokenizer.from_pretrained(NAME, src_lang='eng_Latn', tgt_lang='deu_Latn')"
        )
    kind = ALIASES.get(task)
    task = "sequence-classification" if kind else task
    notes: list[str] = []
    train, others = _splits(dataset, notes)
    chosen, found = _row_format(train.column_names, task, dict(columns or {}))
    labels = _labels(train, found, kind)
    notes += [labels.note] if labels is not None and labels.note else []
    unread = sorted({*train.column_names} - {*found.values()})
    is_rated = "completion" in found and "label" in unread and getattr(train.features["label"], "dtype", "") == "bool"
    if is_rated and False in train.unique("label"):
        raise ValueError(
            "label=False in rows of prompt and completion marks completions that nobody wants (KTO's), which would be "
            "learned; expected wanted ones alone. Leave the others out: dataset.filter(lambda row: row['label'])"
        )
    notes += [f"columns that are not read: {', '.join(unread)}"] if unread else []
    if "translation" in found:
        first: Mapping[str, str] = next((one for one in train[found["translation"]] if one is not None), {})
        notes.append(f"translation: from {' to '.join(map(repr, first))}, as they stand in the data")
    encoder = Encoder(task, found, tokenizer, max_length, prefix, labels)
    encoded = _encoded(train, encoder, notes)
    evaluation = _evaluated(others, train, found, () if labels is None else labels.values, notes)
    own = "of the split for evaluation, so they are not in the metrics"
    parts = _split(encoded, notes) if evaluation is None else [encoded, _encoded(evaluation, encoder, notes, own)]
    train, evaluation = parts
    what = labels.kind if labels is not None and task == "sequence-classification" else task
    head = {} if labels is None else labels.head
    if labels is not None:
        part = "label" if "label" in found else "tags"
        also = [name for name in chosen.columns[part] if name in unread]
        read = f"the part {part!r} is read from {found[part]!r}"
        notes.append(f"{found[part]}: {labels}")
        notes += [f"{read}; {name!r} could be it too: columns={{{part!r}: {name!r}}}" for name in also]
    told = tuple(dict.fromkeys(notes))
    return Rows(train, evaluation, chosen.name, head, notes=told, **metric_of(what, tokenizer))


def _splits(dataset: Any, notes: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return the rows to train on, and the splits that may be evaluated, the best one first."""
    from datasets import Dataset, DatasetDict

    if isinstance(dataset, Dataset):
        return dataset, {}
    if not isinstance(dataset, DatasetDict) or not dataset:
        is_stream = "Iterable" in type(dataset).__name__
        how = "load_dataset(NAME) without streaming=True" if is_stream else "datasets.Dataset.from_list(rows)"
        raise TypeError(
            f"dataset=<{type(dataset).__name__}> is {'a stream' if is_stream else 'no data set'}; expected a "
            f"datasets.Dataset or DatasetDict. Call: {how}"
        )
    named = {name.lower(): name for name in dataset}
    others = {name: dataset[name] for split in SPLITS for low, name in named.items() if low.startswith(split)}
    begins = [name for low, name in named.items() if low.startswith("train")]
    possible = begins or [name for name in dataset if name not in others] or [*dataset]
    train = named.get("train") or (possible[0] if len(possible) == 1 else None)
    if train is None:
        other = next(iter(others), possible[-1])
        raise ValueError(
            f"dataset=<splits {', '.join(dataset)}> has none that is 'train', and several that could be; expected one "
            f"to train on. Pass datasets.DatasetDict(train=data[{possible[0]!r}], validation=data[{other!r}])"
        )
    others.pop(train, None)
    unused = [name for name in dataset if name != train and name not in others]
    notes += [f"splits that are not used: {', '.join(unused)}"] if unused else []
    return dataset[train], others


def _evaluated(
    splits: Mapping[str, Any], train: Any, found: Mapping[str, str], classes: Sequence[Any], notes: list[str]
) -> Any:
    """Return the first split that has what is learned; None where there is none."""
    needed = {name for part, name in found.items() if part not in OPTIONAL}
    label = found.get("label")
    for split, rows in splits.items():
        lacking = needed - {*rows.column_names}
        if not lacking and label is not None and not pa.types.is_nested(_column(rows, label).type):
            values = {*pc.unique(_column(rows, label)).to_pylist()}
            lacking = set() if values - {None, -1} or -1 in classes else {label}
        if not lacking:
            _check_names(split, rows, train, label or found.get("tags"))
            return rows
        notes.append(f"the split {split!r} has no {', '.join(sorted(lacking))}, so it is not evaluated")
    return None


def _check_names(split: str, rows: Any, train: Any, label: str | None) -> None:
    """Raise where the ids of two splits stand for other classes."""
    if label is None:
        return
    own, expected = (_names(one.features[label]) for one in (rows, train))
    if own is not None and expected is not None and [*own] != [*expected]:
        raise ValueError(
            f"{label}: the classes of the split {split!r} are {', '.join(own)}, those of the training rows "
            f"{', '.join(expected)}; expected the same in the same order. "
            f"Call: data[{split!r}] = data[{split!r}].align_labels_with_mapping({{name: at for at, name in "
            f"enumerate(train.features[{label!r}].names)}}, {label!r}), with the training rows as train"
        )


def _names(feature: Any) -> Sequence[str] | None:
    """Return the names of classes, of a column of them or of lists of them."""
    return getattr(getattr(feature, "feature", feature), "names", None)


def _column(rows: Any, name: str) -> pa.ChunkedArray:
    return rows.select_columns([name]).with_format("arrow")[:].column(name)


def _arguments(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return the arguments of calls in conversations, where Arrow holds them as structs."""
    for name in ("tool_calls", "function", "arguments"):
        column = _without_lists(column)
        if pa.types.is_struct(column.type) and column.type.get_field_index(name) >= 0:
            column = pc.struct_field(column, name)
        elif name != "function":
            return None
    return column if pa.types.is_struct(column.type) else None


def _has_null_fields(column: pa.ChunkedArray) -> bool:
    """Return whether objects in a column have fields that are null."""
    column = _without_lists(column).drop_null()
    is_object = pa.types.is_struct(column.type)
    return is_object and any(one.null_count or _has_null_fields(one) for one in column.flatten())


def _without_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.list_flatten(column)
    return column


def _labels(rows: Dataset, found: Mapping[str, str], kind: Any) -> Labels | None:
    """Return the classes of the rows or of their words; None where they have none."""
    name = found.get("label") or found.get("tags")
    if name is None:
        return None
    column = _column(rows, name)
    if "tags" in found:
        for one in (found[part] for part in ("words", "tags") if part in found):
            if str(_column(rows, one).type) in ("string", "large_string"):
                raise ValueError(
                    f"{one}={shown(rows[0][one])} is a text; expected a list in each row. Split the text: "
                    f"dataset.map(lambda row: {{{one!r}: row[{one!r}].split()}}), or read a list written as text: "
                    f"ast.literal_eval(row[{one!r}])"
                )
        column = pc.list_flatten(column)
    return labels_of(column, names=_names(rows.features[name]), kind=kind)


def _encoded(rows: Dataset, encoder: Encoder, notes: list[str], where: str = "") -> Dataset:
    # a column that is made would get the type of one of the same name that is read
    names = {name: f"{name} that is read" for name in encoder.columns.values()}
    read = rows.with_format(None).select_columns([*names]).rename_columns(names)

    chats = [name for part, name in encoder.columns.items() if part in ("messages", "prompt", "completion")]
    arguments = [_arguments(_column(rows, name)) for name in chats]
    encoder = replace(encoder, has_own_none=all(one is None for one in arguments))
    if any(one is not None and _has_null_fields(one) for one in arguments):
        notes.append(
            "arguments of calls that are null are left out: where they are columns, null may be one that a row lacks; "
            "arguments as JSON keep it"
        )
    target = encoder.columns.get("target", "")
    classes = _names(rows.features.get(target))  # of which one to write is learned by its name

    def encode(batch: Mapping[str, list[Any]]) -> Columns:
        given = {name: batch[renamed] for name, renamed in names.items()}
        if classes is not None:
            given[target] = [None if one in (None, -1) else classes[one] for one in given[target]]
        return encoder(given)

    made = read.map(encode, batched=True, remove_columns=read.column_names, desc="Reading rows")
    needed = " or ".join(name for part, name in encoder.columns.items() if part not in OPTIONAL)
    within = "" if encoder.max_length is None else f" within {encoder.max_length} tokens"
    if not len(made):
        how = "Raise max_length (--seq-len of a plan), or name" if within else "Name"
        raise ValueError(
            f"dataset=<{len(rows)} rows> has none with {needed} to learn from{within}; expected at least one. "
            f"{how} other columns: columns={{...}}"
        )
    if len(made) < len(rows):
        left = f"{len(rows) - len(made)} of {len(rows)} rows without {needed}, or with nothing to learn{within},"
        notes.append(f"{left} were left out {where}".rstrip())
    notes += _of_lengths(made, encoder)
    return made


def _of_lengths(rows: Dataset, encoder: Encoder) -> Iterator[str]:
    """Yield how many rows may have been cut, or are longer than the model takes."""
    sides = ["input_ids", "labels"] if encoder.task == "seq2seq" and "labels" in rows.column_names else ["input_ids"]
    longest = pc.max_element_wise(*(pc.list_value_length(_column(rows, name)) for name in sides)).to_numpy()
    limit, most = encoder.max_length, getattr(encoder.tokenizer, "model_max_length", None)
    if limit is not None and (count := int((longest >= limit).sum())):
        yield f"{count} of {len(rows)} rows fill max_length={limit} and may have been cut"
    if limit is None and most is not None and (count := int((longest > most).sum())):
        yield (
            f"{count} of {len(rows)} rows have more than model_max_length={most} tokens, which the model may not take; "
            f"max_length={most} cuts them"
        )


def _split(rows: Dataset, notes: list[str]) -> list[Dataset]:
    if len(rows) < 2:
        raise ValueError(
            "dataset=<1 row> leaves nothing to evaluate; expected 2 rows or more. Check the filter that made it"
        )
    parts = rows.train_test_split(max(LEAST, min(MOST, ENOUGH / len(rows))), seed=SEED)
    notes.append(f"{len(parts['test'])} of {len(rows)} rows are kept for evaluation: the data has no split for it")
    return [parts["train"], parts["test"]]


# ---- Formats --------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A way of writing rows."""

    name: str  # of the format
    tasks: list[str]  # whose rows are written so
    columns: dict[str, list[str]]  # the names that data sets give to each part
    optional: dict[str, list[str]]  # those of the parts that rows may lack

    def found_in(self, names: Sequence[str], given: Mapping[str, str]) -> dict[str, str] | None:
        """Return the column of each part; None where one lacks, or ``given``, the column of a part, has others."""
        parts = {**self.columns, **self.optional}
        named = {part: next((name for name in usual if name in names), "") for part, usual in parts.items()}
        found = {part: name for part, name in {**named, **given}.items() if name}
        return found if self.columns.keys() <= found.keys() <= parts.keys() else None


def _parts(cell: str) -> dict[str, list[str]]:
    """Return the names of each part, of ``"words=tokens/words tags"``."""
    named = (one.partition("=") for one in cell.split())
    return {part: (names or part).split("/") for part, _, names in named}


FORMATS = [
    Format(row["format"], row["tasks"].split(), _parts(row["columns"]), _parts(row["optional"]))
    for row in packaged_rows("hf_memopt.training.rows", "formats.csv")
]


def fitting_format(
    names: Sequence[str], task: str | None, columns: Mapping[str, str]
) -> tuple[Format, dict[str, str]] | None:
    """Return the first format of a task, or of any, that has these columns, and the column of each part; else None."""
    possible = (one for one in FORMATS if task is None or task in one.tasks)
    return next(((one, found) for one in possible if (found := one.found_in(names, columns)) is not None), None)


def _row_format(names: Sequence[str], task: str, given: Mapping[str, str]) -> tuple[Format, dict[str, str]]:
    """Return the format of rows with these columns, and the column of each of its parts, of which some are given."""
    absent = next((name for name in given.values() if name not in names), None)
    if absent is not None:
        raise ValueError(
            f"columns={given!r} name {absent!r}, which is not in the data; expected names among {sorted(names)}."
            f"{did_you_mean(absent, names)} Pass columns={{'text': {next(iter(names), 'text')!r}}}"
        )
    found = fitting_format(names, task, given)
    if found is not None:
        return found
    possible = [one for one in FORMATS if task in one.tasks]
    wanted = "; ".join(dict.fromkeys(f"{one.name} ({', '.join(one.columns)})" for one in possible))
    example = dict.fromkeys(possible[-1].columns, "NAME")
    raise ValueError(
        f"columns {sorted(names)} are in no format of {task}; expected one of: {wanted}. Name them: columns={example!r}"
    )
