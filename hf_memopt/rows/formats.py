"""The ways in which people write rows, told apart by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_memopt.errors import did_you_mean

__all__ = ["ALIASES", "FORMATS", "TASKS", "Format", "fitting_format", "row_format"]

TASKS = ("causal-lm", "masked-lm", "seq2seq", "sequence-classification", "token-classification", "question-answering")
ALIASES = {"regression": "regression", "multi-label-classification": "multi_label_classification"}


@dataclass(frozen=True)
class Format:
    """A way of writing rows.

    Attributes:
        name: of the format.
        columns: what each part is called here, and what data sets call it.
        optional: the parts that a row may lack.
        tasks: the tasks whose rows are written so.
    """

    name: str
    columns: Mapping[str, tuple[str, ...]]
    tasks: tuple[str, ...]
    optional: tuple[str, ...] = ()


LANGUAGE = ("causal-lm", "masked-lm")
LABEL = ("label", "labels", "class", "score", "target", "stars", "sentiment", "category")
FORMATS = (
    Format("tokens", {"input_ids": ("input_ids",), "labels": ("labels", "label")}, TASKS, ("labels",)),
    Format(
        "conversation",
        {"messages": ("messages", "conversations", "conversation"), "tools": ("tools",)},
        ("causal-lm",),
        ("tools",),
    ),
    Format(
        "prompt and completion",
        {"prompt": ("prompt",), "completion": ("completion",), "tools": ("tools",)},
        ("causal-lm",),
        ("tools",),
    ),
    Format(
        "instruction",
        {"instruction": ("instruction",), "output": ("output", "response"), "input": ("input", "context")},
        ("causal-lm",),
        ("input",),
    ),
    Format(
        "question and answers",
        {"question": ("question",), "context": ("context",), "answers": ("answers",)},
        ("question-answering",),
    ),
    Format(
        "tokens and tags",
        {"words": ("tokens", "words"), "tags": ("ner_tags", "tags", "pos_tags", "chunk_tags", "labels")},
        ("token-classification",),
    ),
    Format("translation", {"translation": ("translation",)}, ("seq2seq",)),
    *(
        Format("pair of texts", {"first": (first,), "second": (second,), "label": LABEL}, ("sequence-classification",))
        for first, second in (
            ("sentence1", "sentence2"),
            ("premise", "hypothesis"),
            ("question1", "question2"),
            ("text1", "text2"),
            ("question", "sentence"),
            ("question", "passage"),
            ("query", "passage"),
            ("text", "text_pair"),
        )
    ),
    Format(
        "text and label",
        {"text": ("text", "sentence", "content", "review", "review_body", "comment"), "label": LABEL},
        ("sequence-classification",),
    ),
    Format("text", {"text": ("text", "content")}, LANGUAGE),
    Format(
        "source and target",
        {
            "source": (
                "source",
                "document",
                "article",
                "dialogue",
                "text",
                "input",
                "question",
                "prompt",
                "instruction",
            ),
            "target": ("target", "summary", "highlights", "output", "answer", "completion", "response", "label"),
        },
        ("seq2seq",),
    ),
)
"""In the order in which they are looked for. The names are those of TRL and of the best-known data sets."""


def row_format(
    names: Sequence[str], task: str, columns: Mapping[str, str] | None = None
) -> tuple[Format, dict[str, str]]:
    """Return the format of rows with these columns, and the column of each of its parts.

    Args:
        names: of the columns.
        task: what is trained: "causal-lm", "masked-lm", "seq2seq", "sequence-classification", "token-classification" or
            "question-answering".
        columns: the column of a part, where its name is another one: ``{"text": "body"}``.

    Raises:
        ValueError: an unknown task or column, or columns that no format has.
    """
    if task not in TASKS:
        raise ValueError(
            f"task={task!r} has no rows of text; expected one of {', '.join((*TASKS, *ALIASES))}."
            f"{did_you_mean(task, TASKS)} Pass task={TASKS[0]!r}"
        )
    given = dict(columns or {})
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
    wanted = "; ".join(dict.fromkeys(f"{one.name} ({', '.join(_needed(one))})" for one in possible))
    example = dict.fromkeys(_needed(possible[-1]), "NAME")
    raise ValueError(
        f"columns {sorted(names)} are in no format of {task}; expected one of: {wanted}. Name them: columns={example!r}"
    )


def fitting_format(
    names: Sequence[str], task: str | None, given: Mapping[str, str]
) -> tuple[Format, dict[str, str]] | None:
    """Return as ``row_format``; for any task where it is None; None where no format fits."""
    for one in FORMATS:
        if task is not None and task not in one.tasks:
            continue
        found = {part: given.get(part) or _first(spellings, names) for part, spellings in one.columns.items()}
        if all(found[part] for part in _needed(one)) and given.keys() <= found.keys():
            return one, {part: name for part, name in found.items() if name}
    return None


def _first(spellings: Sequence[str], names: Sequence[str]) -> str | None:
    return next((spelling for spelling in spellings if spelling in names), None)


def _needed(one: Format) -> list[str]:
    return [part for part in one.columns if part not in one.optional]
