"""What is known of each purpose of a head, by the name of the task: ``heads.csv``, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_memopt.plain_data import packaged_rows


@dataclass(frozen=True)
class Head:
    """One purpose of a head."""

    auto_class: str  # of transformers, which builds it
    table: str  # transformers' own, of the model types that have it
    # parts that a checkpoint usually lacks, so that they are trained whole, by the names that PEFT gives them
    new: tuple[str, ...]
    adapters: str | None  # PEFT's name of the task; None where it has none
    # "text": its rows have text. "buckets": a collator of this package makes its batches. "script": a plan writes a
    # script for it. "vocabulary": it has a logit for each word. "loss-alone": it is evaluated by its loss; of others a
    # metric is usual
    traits: frozenset[str]

    @property
    def types(self) -> Mapping[str, Any]:
        """The model types that have it, with the names of their classes."""
        from transformers.models.auto import modeling_auto

        found: Mapping[str, Any] = getattr(modeling_auto, self.table)
        return found


HEADS = {
    row["task"]: Head(
        row["auto_class"],
        row["types"],
        tuple(row["new"].split()),
        row["adapters"] or None,
        frozenset(row["traits"].split()),
    )
    for row in packaged_rows("hf_memopt.training.binding.model", "heads.csv")
}
"""By task. Of those that list a class, the first is taken: BartForConditionalGeneration is not a masked LM."""

_OTHER = Head("", "", (), None, frozenset({"text", "buckets"}))


def head_for(task: str | None) -> Head:
    """Return what is known of a task; of None and of any other, that its rows are texts in batches of this package."""
    return HEADS.get(task or "", _OTHER)
