"""Read the rows of a data set in the formats that people have, into what a model of a task takes.

The format follows from the names of the columns; ``columns=`` names others. One reader serves ``lengths``, ``plan
--data``, the scripts that ``plan --write`` writes, and Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from hf_memopt.plain_data import Count, check_value, check_word, shown
from hf_memopt.rows.encoders import OPTIONAL, Encoder
from hf_memopt.rows.formats import ALIASES, TASKS, row_format
from hf_memopt.rows.labels import Labels, labels_of
from hf_memopt.rows.metrics import BEST, kept_predictions, metrics_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__all__ = ["Rows", "read_rows"]

EVALUATION, SEED = 0.02, 0  # the share of rows that are kept for evaluation where the data has no split for it
SMALL, ENOUGH = 0.1, 100  # of few rows a larger share, for so many: by a single row no checkpoint is the best
SPLITS = ("valid", "dev", "eval", "test")  # how the names of the splits to evaluate begin


@dataclass(frozen=True)
class Rows:
    """Rows as a model takes them.

    Attributes:
        train: the rows to train on.
        evaluation: those of the split for validation, else 2 % of the rows, of less than 5,000 up to 10 % for 100 rows.
        format: how they were written.
        head: options of ``from_pretrained`` for a new head; none for language models.
        metrics: for ``compute_metrics``; None where the loss says it all.
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
    """Return the rows of a data set as token ids and labels, and what a head and its metric are made from.

    Conversations are written by the chat template, and what the assistant says is learned; of prompt and completion the
    completion is. Every example of a causal model ends with one end-of-text token, which is learned. Classes are told
    from numbers by ``labels_of``. Rows without text or label are left out, and rows of which nothing is left to learn.

    Args:
        dataset: the rows, or its splits; "train" is trained on, "validation" evaluated, else "test", else 2 % of the
            rows, the same ones each time.
        tokenizer: of the model.
        task: "causal-lm", "masked-lm", "seq2seq", "sequence-classification" (also "regression" and
            "multi-label-classification"), "token-classification" or "question-answering".
        columns: the column of a part, where its name is not a usual one: ``{"text": "body", "label": "stars"}``.
        max_length: tokens at which rows are cut; None cuts none.
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
    check_word("task", task, (*TASKS, *ALIASES))
    kind = ALIASES.get(task)
    task = "sequence-classification" if kind else task
    train, *others = parts = _parts(dataset)
    chosen, found = row_format(train.column_names, task, columns)
    for other in others:
        row_format(other.column_names, task, found)
    labels = _labels(train, found, kind)
    notes = [labels.note] if labels is not None and labels.note else []
    encoder = Encoder(task, found, tokenizer, max_length, prefix, labels)
    encoded = [_encoded(one, encoder, notes) for one in parts]
    train, evaluation = encoded if others else _split(encoded[0])
    what = labels.kind if labels is not None and task == "sequence-classification" else task
    return Rows(
        train,
        evaluation,
        chosen.name,
        {} if labels is None else labels.head,
        metrics_of(what, tokenizer),
        kept_predictions(what),
        tuple(dict.fromkeys(notes)),
        BEST.get(what, "loss"),
    )


def _parts(dataset: Any) -> list[Any]:
    """Return the rows to train on, and those to evaluate where the data names them."""
    from datasets import Dataset, DatasetDict

    if isinstance(dataset, Dataset):
        return [dataset]
    if not isinstance(dataset, DatasetDict) or not dataset:
        is_stream = "Iterable" in type(dataset).__name__
        how = "load_dataset(NAME) without streaming=True" if is_stream else "datasets.Dataset.from_list(rows)"
        raise TypeError(
            f"dataset=<{type(dataset).__name__}> is {'a stream' if is_stream else 'no data set'}; expected a "
            f"datasets.Dataset or DatasetDict. Call: {how}"
        )
    train = "train" if "train" in dataset else next(iter(dataset))
    others = (name for split in SPLITS for name in dataset if name.startswith(split) and name != train)
    return [dataset[name] for name in (train, *islice(others, 1))]


def _labels(rows: Dataset, found: Mapping[str, str], kind: Any) -> Labels | None:
    """Return the classes of the rows or of their words; None where they have none."""
    name = found.get("label") or found.get("tags")
    if name is None:
        return None
    column = rows.select_columns([name]).with_format("arrow")[:].column(name)
    if "tags" in found:
        column = pc.list_flatten(column)
    feature = rows.features[name]
    return labels_of(column, names=getattr(getattr(feature, "feature", feature), "names", None), kind=kind)


def _encoded(rows: Dataset, encoder: Encoder, notes: list[str]) -> Dataset:
    made = rows.with_format(None).map(encoder, batched=True, remove_columns=rows.column_names, desc="Reading rows")
    needed = " or ".join(name for part, name in encoder.columns.items() if part not in OPTIONAL)
    if not len(made):
        raise ValueError(
            f"dataset=<{len(rows)} rows> has none with {needed} to learn from; expected at least one. "
            "Name other columns: columns={...}"
        )
    if len(made) < len(rows):
        notes.append(
            f"{len(rows) - len(made)} of {len(rows)} rows without {needed}, or with nothing to learn, were left out"
        )
    return made


def _split(rows: Dataset) -> list[Dataset]:
    if len(rows) < 2:
        raise ValueError(
            "dataset=<1 row> leaves nothing to evaluate; expected 2 rows or more. Check the filter that made it"
        )
    share = max(EVALUATION, min(SMALL, ENOUGH / len(rows)), 1 / len(rows))
    parts = rows.train_test_split(share, seed=SEED)
    return [parts["train"], parts["test"]]
