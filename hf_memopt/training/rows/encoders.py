"""Turn batches of rows into the columns that a model of a task takes; ``Dataset.map`` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_memopt.training.rows.conversations import Written, written_row
from hf_memopt.training.rows.labels import IGNORED, Labels, is_known

TEXTS = ("text", "first", "second", "question", "context", "source", "instruction", "output", "query", "positive")
"""The parts that must be texts; prompts and completions are texts or messages."""
READ = (*TEXTS, "input", "negative", "messages", "prompt", "completion", "words", "translation", "input_ids")
OPTIONAL = ("tools", "input", "negative")
"""The parts that may be None in a row."""

Columns = dict[str, list[Any]]


def words_of(rows: Mapping[str, list[Any]]) -> list[int]:
    """Return how many words stand in what is read of each row, by its parts; labels and targets are not read.

    Of texts that are embedded, each alone, the longest counts.
    """
    count = max if "positive" in rows else sum
    return [count(map(_words, values)) for values in zip(*(rows[part] for part in rows if part in READ), strict=True)]


def _words(value: Any) -> int:
    if isinstance(value, Mapping):  # a message
        return sum(_words(part) for name, part in value.items() if name not in ("role", "from", "type"))
    return len(value.split()) if isinstance(value, str) else sum(map(_words, value)) if isinstance(value, list) else 0


@dataclass(frozen=True)
class Encoder:
    """Encodes a batch of the columns of a data set; rows without a part, or with nothing to learn, are left out."""

    task: str  # what is trained
    # the column of each part of a row; where the labels do not matter, of those that are read
    columns: Mapping[str, str]
    tokenizer: Any  # of the model
    max_length: int | None = None  # tokens at which rows are cut; None cuts none
    prefix: str = ""  # before each text to read
    labels: Labels | None = None  # the classes; None where there are none
    has_own_none: bool = False  # whether the arguments of calls are as their row says, not filled in by Arrow

    def __call__(self, batch: Mapping[str, list[Any]]) -> Columns:
        given = _whole_rows({part: batch[name] for part, name in self.columns.items()})
        if self.labels is not None and "label" in given:
            given = _kept(given, [at for at, label in enumerate(given["label"]) if not self.labels.is_none(label)])
        if not any(given.values()):
            return {"input_ids": []}
        for part in given.keys() & set(TEXTS):
            wrong = next((value for value in given[part] if not isinstance(value, str)), None)
            if wrong is not None:
                raise ValueError(
                    f"{self.columns[part]}={wrong!r:.60} is not text; expected text in this column. "
                    f"Name the right one: columns={{{part!r}: NAME}}"
                )
        try:
            made = (_cut if "input_ids" in given else ENCODERS[self.task])(given, self)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            names = ", ".join(self.columns.values())
            raise ValueError(
                f"{names}: a row is not as the others are ({type(error).__name__}: {error}); expected values of one "
                "kind in each column. Correct the row, or leave it out: dataset.filter(...)"
            ) from error
        if self.task != "causal-lm":
            return made
        learned = made.get("labels", made["input_ids"])
        return _kept(made, [at for at, row in enumerate(learned) if any(label != IGNORED for label in row)])

    @property
    def limits(self) -> dict[str, Any]:
        """Options that cut."""
        return {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}

    def ids_of(self, labels: list[Any]) -> list[Any]:
        """Return labels as the loss takes them."""
        return labels if self.labels is None else [self.labels.encode(label) for label in labels]


def _whole_rows(given: Columns) -> Columns:
    """Return the rows that have each part they need; a label may be 0 or [], not NaN."""
    kept: Sequence[int] = range(len(next(iter(given.values()))))
    for part in given.keys() - {*OPTIONAL}:
        has = _is_read if part in READ else is_known
        kept = [at for at in kept if has(given[part][at])]
    return _kept(given, kept)


def _is_read(value: Any) -> bool:
    """Return whether there is something to read; a translation needs both of its texts."""
    return all(value.values()) if isinstance(value, Mapping) else bool(value)


def _kept(columns: Columns, rows: Sequence[int]) -> Columns:
    return {name: [values[at] for at in rows] for name, values in columns.items()}


# ---- The encoders of the tasks --------------------------------------------------------------------------------------


def _cut(given: Columns, how: Encoder) -> Columns:
    """Cut what has a value for each token; the labels of a row and positions have not."""
    whole = ("label", "start_positions", "end_positions")
    made = {
        part: values if part in whole else [one[: how.max_length] for one in values] for part, values in given.items()
    }
    masks = [made.pop(name) for name in ("completion_mask", "assistant_masks") if name in made]
    if masks and "labels" not in made:  # of both, as TRL does
        rows = [zip(*row, strict=True) for row in zip(made["input_ids"], *masks, strict=True)]
        made["labels"] = [[token if all(bits) else IGNORED for token, *bits in row] for row in rows]
    if "label" in made:
        made["labels"] = how.ids_of(made.pop("label"))
    if "tags" in made:
        made["labels"] = [how.ids_of(tags) for tags in made.pop("tags")]
    ends = made.get("end_positions")
    if ends is None:
        return made
    return _kept(made, [at for at, ids in enumerate(made["input_ids"]) if ends[at] < len(ids)])  # the answer is there


def _causal_lm(given: Columns, how: Encoder) -> Columns:
    """Write rows as text; each ends with one end-of-text token. Where all is learned there are no labels."""
    rows = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    written = [written_row(row, how.tokenizer, has_own_none=how.has_own_none) for row in rows]
    is_all = written[0].spans is None
    if not is_all and not getattr(how.tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer=<{type(how.tokenizer).__name__}> cannot tell where in the text its tokens stand; expected a "
            "fast one. Call: AutoTokenizer.from_pretrained(NAME, use_fast=True)"
        )
    made = how.tokenizer(
        [one.text for one in written],
        add_special_tokens=not written[0].is_chat,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=not is_all,
        verbose=False,
    )
    columns: Columns = {"input_ids": [], "labels": []}
    for at, ids in enumerate(made["input_ids"]):
        learned = [True] * len(ids) if is_all else _learned(written[at], made["offset_mapping"][at])
        ids, learned = _ended(ids, learned, how.tokenizer)
        columns["input_ids"].append(ids[: how.max_length])
        labels = [token if is_learned else IGNORED for token, is_learned in zip(ids, learned, strict=True)]
        columns["labels"].append(labels[: how.max_length])
    return {"input_ids": columns["input_ids"]} if is_all else columns


def _learned(one: Written, offsets: list[tuple[int, int]]) -> list[bool]:
    """Return which tokens are learned, by the characters at which they begin and end, shape (tokens, 2)."""
    left, right = np.array(offsets).reshape(-1, 2).T
    learned = np.zeros(len(left), dtype=bool)
    for start, end, end_of_turn in one.spans or ():
        learned |= (right > start) & ((left < end) | (right <= end_of_turn))  # blanks may be trimmed: left == right
    found: list[bool] = learned.tolist()
    return found


def _ended(ids: list[int], learned: list[bool], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return a row that ends with one end-of-text token; after what is learned, that token is learned too."""
    end, last = tokenizer.eos_token_id, len(ids) - 1
    if end is None or last < 0:
        return ids, learned
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:  # the same of the first token
        ids, learned, last = ids[1:], learned[1:], last - 1
    if ids[-2:] == [end, end]:  # of the text, and of the tokenizer
        ids, learned, last = ids[:-1], learned[:-1], last - 1
    while last > 0 and ids[last] != end and not tokenizer.decode([ids[last]]).strip():
        last -= 1  # the line break that templates write at the end
    if ids[last] == end:
        return ids, [*learned[:last], learned[last - 1] or learned[last], *learned[last + 1 :]]
    is_learned = learned[last] or learned[-1]  # a completion of blanks is all that is learned
    return ([*ids, end], [*learned[: last + 1], *[True] * (len(ids) - last)]) if is_learned else (ids, learned)


def _texts(given: Columns, how: Encoder) -> Columns:
    texts = [given["text"]] if "text" in given else [given["first"], given["second"]]
    made = dict(how.tokenizer(*texts, verbose=False, **how.limits))
    return {**made, "labels": how.ids_of(given["label"])} if "label" in given else made


def _token_classification(given: Columns, how: Encoder) -> Columns:
    """The first token of a word has the label of the word, its others none."""
    for words, tags in zip(given["words"], given.get("tags", []), strict=False):
        if len(words) != len(tags):
            raise ValueError(
                f"{how.columns['words']}={words!r:.60} has {len(words)} words and {how.columns['tags']} {len(tags)} "
                "tags; expected a tag for each word. Correct the row, or leave it out: dataset.filter(...)"
            )
    rows = given["words"]
    words = {"add_special_tokens": False, "is_split_into_words": True}
    bare, spaced = (how.tokenizer(["a", b], **words)["input_ids"] for b in ("b", " b"))
    if how.tokenizer("a b", add_special_tokens=False)["input_ids"] == spaced != bare:  # words that lack their space
        rows = [[f" {word}" if at else word for at, word in enumerate(words)] for words in rows]
    made = how.tokenizer(rows, is_split_into_words=True, verbose=False, **how.limits)
    labels = []
    for at, tags in enumerate(given.get("tags", [])):
        words, ids = made.word_ids(at), how.ids_of(tags)  # a word is None for special tokens
        pairs = zip([None, *words], words, strict=False)
        labels.append([IGNORED if word in (None, before) else ids[word] for before, word in pairs])
    return {**made, "labels": labels}


def _question_answering(given: Columns, how: Encoder) -> Columns:
    """Answers by their first and last token; rows whose answer is cut off are left out.

    Where there is no answer both are the place of the classification token, the first one where a row has none.
    """
    cut = {**how.limits, "truncation": "only_second"} if how.limits else {}
    try:
        made = how.tokenizer(given["question"], given["context"], verbose=False, **cut)
    except Exception as error:  # tokenizers' Rust has no narrower one
        raise ValueError(
            f"max_length={how.max_length} has no room for a question and its context ({error}); expected more tokens "
            "than the longest question has. Raise max_length, or leave such rows out: dataset.filter(...)"
        ) from error
    if "answers" not in given:  # rows that are only counted
        return dict(made)
    starts: list[int | None] = []
    ends: list[int | None] = []
    for at, answers in enumerate(given["answers"]):
        text, first = _answer(answers, given["context"][at])
        ids, of_none = made["input_ids"][at], how.tokenizer.cls_token_id
        span: list[int | None] = [ids.index(of_none) if of_none in ids else 0]
        if text:
            span = [made.char_to_token(at, one, 1) for one in (first, first + len(text.strip()) - 1)]
        starts.append(span[0])
        ends.append(span[-1])
    made = {**made, "start_positions": starts, "end_positions": ends}
    return _kept(made, [at for at, ends_of in enumerate(zip(starts, ends, strict=True)) if None not in ends_of])


def _answer(answers: Any, context: str) -> tuple[str, int]:
    """Return the first answer and the character at which it begins; "" and 0 for none."""
    if isinstance(answers, list):  # {"text": ..., "answer_start": ...} for each answer
        answers = {name: [one[name] for one in answers] for name in ("text", "answer_start")}
    text, start = next(zip(answers["text"], answers["answer_start"], strict=True), ("", 0))
    if not text or not text.strip():
        return "", 0
    if start < 0 or not context.startswith(text, start):
        raise ValueError(
            f"answer={text!r:.60} is not at character {start} of its context, {context[max(start, 0) :]!r:.40} is; "
            "expected answer_start to say where it begins. Correct the row, or leave it out: dataset.filter(...)"
        )
    return text, start + len(text) - len(text.lstrip())


def _seq2seq(given: Columns, how: Encoder) -> Columns:
    if "instruction" in given:
        inputs = given.get("input") or [None] * len(given["instruction"])
        both = zip(given["instruction"], inputs, strict=True)
        given = {
            **given,
            "source": [f"{one}\n\n{more}" if more else one for one, more in both],
            "target": given["output"],
        }
    if "translation" in given:
        pairs = [tuple(one.values())[:2] for one in given["translation"]]
        given = {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}
    made = how.tokenizer([how.prefix + text for text in given["source"]], verbose=False, **how.limits)
    if "target" not in given:
        return dict(made)
    wrong = next((one for one in given["target"] if not isinstance(one, str | int | float)), None)
    if wrong is not None:
        raise ValueError(
            f"target={wrong!r:.60} is not text; expected text in its column. "
            "Name the right one: columns={'target': NAME}"
        )
    labels = how.tokenizer(text_target=[str(text) for text in given["target"]], verbose=False, **how.limits)
    return {**made, "labels": labels["input_ids"]}


def _embedded(given: Columns, how: Encoder) -> Columns:
    """The longest of the texts, each of which is embedded alone."""
    texts = [[text or "" for text in given[part]] for part in ("query", "positive", "negative") if part in given]
    made = [how.tokenizer(one, verbose=False, **how.limits)["input_ids"] for one in texts]
    return {"input_ids": [max(row, key=len) for row in zip(*made, strict=True)]}


ENCODERS: Mapping[str, Callable[[Columns, Encoder], Columns]] = {
    "causal-lm": _causal_lm,
    "masked-lm": _texts,
    "sequence-classification": _texts,
    "token-classification": _token_classification,
    "question-answering": _question_answering,
    "seq2seq": _seq2seq,
    "sentence-similarity": _embedded,
}
