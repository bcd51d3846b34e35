"""Turn batches of rows into the columns that a model of a task takes; ``Dataset.map`` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_memopt.rows.conversations import IGNORED, encode
from hf_memopt.rows.labels import Labels

__all__ = ["Encoder"]

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Encoder:
    """Encodes a batch of the columns of a data set.

    Attributes:
        task: what is trained.
        columns: the column of each part of a row.
        tokenizer: of the model.
        max_length: tokens at which rows are cut; None cuts none.
        prefix: before each text to read.
        labels: the classes; None where there are none.
    """

    task: str
    columns: Mapping[str, str]
    tokenizer: Any
    max_length: int | None = None
    prefix: str = ""
    labels: Labels | None = None

    def __call__(self, batch: Mapping[str, list[Any]]) -> Columns:
        given = {part: batch[name] for part, name in self.columns.items()}
        return (_cut if "input_ids" in given else ENCODERS[self.task])(given, self)

    @property
    def limits(self) -> dict[str, Any]:
        """Options that cut."""
        return {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}

    def ids_of(self, labels: list[Any]) -> list[Any]:
        """Return labels as the loss takes them."""
        return labels if self.labels is None else [self.labels.encode(label) for label in labels]


def _cut(given: Columns, how: Encoder) -> Columns:
    """Cut rows of token ids, and their labels where each token has one."""
    made = {"input_ids": [ids[: how.max_length] for ids in given["input_ids"]]}
    if "labels" not in given:
        return made
    if how.task == "sequence-classification":
        return {**made, "labels": how.ids_of(given["labels"])}
    return {**made, "labels": [labels[: how.max_length] for labels in given["labels"]]}


def _causal_lm(given: Columns, how: Encoder) -> Columns:
    rows = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    made = encode(rows, how.tokenizer, how.max_length)
    return {name: [row[name] for row in made] for name in made[0]}


def _masked_lm(given: Columns, how: Encoder) -> Columns:
    return dict(how.tokenizer(given["text"], **how.limits))


def _sequence_classification(given: Columns, how: Encoder) -> Columns:
    texts = [given["text"]] if "text" in given else [given["first"], given["second"]]
    return {**how.tokenizer(*texts, **how.limits), "labels": how.ids_of(given["label"])}


def _token_classification(given: Columns, how: Encoder) -> Columns:
    """The first token of a word has the label of the word, its others none."""
    made = how.tokenizer(given["words"], is_split_into_words=True, **how.limits)
    labels = []
    for at, tags in enumerate(given["tags"]):
        words, ids = made.word_ids(at), how.ids_of(tags)  # a word is None for special tokens
        begins = [word != before for before, word in zip([None, *words], words, strict=False)]
        labels.append(
            [ids[word] if begin and word is not None else IGNORED for begin, word in zip(begins, words, strict=True)]
        )
    return {**made, "labels": labels}


def _question_answering(given: Columns, how: Encoder) -> Columns:
    """The first and last token of an answer; 0, the first token, where there is none or it was cut off."""
    cut = {**how.limits, "truncation": "only_second"} if how.limits else {}
    made = how.tokenizer(given["question"], given["context"], return_offsets_mapping=True, **cut)
    offsets = made.pop("offset_mapping")
    spans = [_span(one, offsets[at], made.sequence_ids(at)) for at, one in enumerate(given["answers"])]
    return {**made, "start_positions": [one for one, _ in spans], "end_positions": [one for _, one in spans]}


def _span(answers: Mapping[str, Any], offsets: Sequence[tuple[int, int]], parts: Sequence[Any]) -> tuple[int, int]:
    if not len(answers["text"]):
        return 0, 0
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = [i for i, (left, right) in enumerate(offsets) if parts[i] == 1 and right > start and left < end]
    is_whole = inside and offsets[inside[0]][0] <= start and offsets[inside[-1]][1] >= end
    return (inside[0], inside[-1]) if is_whole else (0, 0)


def _seq2seq(given: Columns, how: Encoder) -> Columns:
    if "translation" in given:
        pairs = [tuple(one.values())[:2] for one in given["translation"]]
        given = {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}
    made = how.tokenizer([how.prefix + text for text in given["source"]], **how.limits)
    labels = how.tokenizer(text_target=[str(text) for text in given["target"]], **how.limits)
    return {**made, "labels": labels["input_ids"]}


ENCODERS: Mapping[str, Callable[[Columns, Encoder], Columns]] = {
    "causal-lm": _causal_lm,
    "masked-lm": _masked_lm,
    "sequence-classification": _sequence_classification,
    "token-classification": _token_classification,
    "question-answering": _question_answering,
    "seq2seq": _seq2seq,
}
