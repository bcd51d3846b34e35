"""Read the rows of a data set in the formats that people have, into what a model of a task takes.

The format follows from the names of the columns; ``columns=`` names others. One reader serves ``lengths``, ``plan
--data``, the scripts that ``plan --write`` writes, and Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_memopt.plain_data import shown
from hf_memopt.rows.conversations import IGNORED
from hf_memopt.rows.encoders import Encoder
from hf_memopt.rows.formats import ALIASES, row_format
from hf_memopt.rows.labels import Labels, labels_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__all__ = ["Rows", "read_rows"]

EVALUATION, SEED = 0.02, 0  # the share of rows that are kept for evaluation where the data has no split for it
SPLITS = ("validation", "valid", "dev", "eval", "test")


@dataclass(frozen=True)
class Rows:
    """Rows as a model takes them.

    Attributes:
        train: the rows to train on.
        evaluation: those of the split for validation, else 2 % of the rows.
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
        TypeError: no data set.

    Example:
        >>> rows = read_rows(dataset, tokenizer, "sequence-classification", max_length=256)  # doctest: +SKIP
        >>> model = AutoModelForSequenceClassification.from_pretrained(name, **rows.head)  # doctest: +SKIP
    """
    kind = ALIASES.get(task)
    task = "sequence-classification" if kind else task
    parts = _parts(dataset)
    chosen, found = row_format(parts[0].column_names, task, columns)
    notes: list[str] = []
    train, *others = (_full(one, list(found.values()), notes) for one in parts)
    train, evaluation = (train, others[0]) if others else _split(train)
    labels = _labels(train, found, task, kind)
    if labels is not None and labels.note:
        notes.append(labels.note)
    encoder = Encoder(task, found, tokenizer, max_length, prefix, labels)
    train, evaluation = (_encoded(one, encoder, notes) for one in (train, evaluation))
    what = labels.kind if labels is not None and task == "sequence-classification" else task
    from hf_memopt.rows.metrics import BEST, kept_predictions, metrics_of

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


# ---- Which rows -----------------------------------------------------------------------------------------------------


def _parts(dataset: Any) -> list[Any]:
    """Return the rows to train on, and those to evaluate where the data names them."""
    from datasets import Dataset, DatasetDict

    if isinstance(dataset, DatasetDict) and dataset:
        train = "train" if "train" in dataset else next(iter(dataset))
        named = next((name for name in SPLITS if name in dataset and name != train), None)
        return [dataset[train]] if named is None else [dataset[train], dataset[named]]
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"dataset={shown(dataset)} is no data set; expected a datasets.Dataset or DatasetDict. "
            "Call: datasets.Dataset.from_list(rows)"
        )
    return [dataset]


def _split(rows: Any) -> tuple[Any, Any]:
    if len(rows) < 2:
        raise ValueError(
            f"dataset=<{len(rows)} rows> leaves nothing to evaluate; expected 2 rows or more. "
            "Check the filter that made it"
        )
    parts = rows.train_test_split(max(EVALUATION, 1 / len(rows)), seed=SEED)
    return parts["train"], parts["test"]


def _full(rows: Any, columns: Sequence[str], notes: list[str]) -> Any:
    """Return the rows that have something in each of the columns that are needed."""
    needed = [name for name in columns if name not in ("tools", "input", "context")]
    kept = rows.filter(
        lambda *values: all(value is not None and value not in ("", []) for value in values), input_columns=needed
    )
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} rows without {' or '.join(needed)} were left out")
    if not len(kept):
        raise ValueError(
            f"dataset=<{len(rows)} rows> has none with all of {', '.join(needed)}; expected at least one. "
            "Name other columns: columns={...}"
        )
    return kept


def _labels(rows: Any, found: Mapping[str, str], task: str, kind: Any) -> Labels | None:
    """Return the classes of the rows; None where the task has none."""
    if task == "token-classification":
        column = found.get("tags") or found.get("labels")
        nested = rows.features[column]
        names = getattr(getattr(nested, "feature", None), "names", None)
        if names is not None:
            return labels_of([0], names=names)
        return labels_of([one for row in rows[column] for one in row if one != IGNORED] * 2)
    column = found.get("label") or (found.get("labels") if task == "sequence-classification" else None)
    if task != "sequence-classification" or column is None:
        return None
    feature = rows.features[column]
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
    return labels_of(rows[column][:], names=names, kind=kind)


def _encoded(rows: Any, encoder: Encoder, notes: list[str]) -> Any:
    made = rows.map(encoder, batched=True, remove_columns=rows.column_names, desc="Reading rows")
    if encoder.task != "causal-lm" or "labels" not in made.column_names:
        return made
    kept = made.filter(lambda labels: any(label != IGNORED for label in labels), input_columns=["labels"])
    if len(kept) < len(made):
        notes.append(f"{len(made) - len(kept)} rows of which nothing is learned were left out")
    return kept
