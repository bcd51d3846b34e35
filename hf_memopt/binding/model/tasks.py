"""The tasks that heads of transformers are for, by class: which auto class builds a head, and which heads are new."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from transformers.models.auto import modeling_auto

from hf_memopt.binding.model.traits import unwrap_model

__all__ = ["HEADS", "NEW_HEADS", "task_of", "task_of_class"]

HEADS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "speech-seq2seq": ("AutoModelForSpeechSeq2Seq", modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
    "seq2seq": ("AutoModelForSeq2SeqLM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "causal-lm": ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked-lm": ("AutoModelForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "sequence-classification": (
        "AutoModelForSequenceClassification",
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "token-classification": (
        "AutoModelForTokenClassification",
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ),
    "question-answering": ("AutoModelForQuestionAnswering", modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    "multiple-choice": ("AutoModelForMultipleChoice", modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES),
    "image-classification": (
        "AutoModelForImageClassification",
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ),
}
# Of the tasks that list a class, the first is taken: BartForConditionalGeneration is not a masked LM.

NEW_HEADS: Mapping[str, tuple[str, ...]] = {
    "sequence-classification": ("pre_classifier", "classifier", "score"),
    "token-classification": ("classifier", "score"),
    "question-answering": ("qa_outputs",),
    "multiple-choice": ("pre_classifier", "classifier"),
    "image-classification": ("classifier",),
}
"""Heads that a checkpoint usually lacks, so that they are trained whole, by the names that PEFT gives them."""


def task_of(model: nn.Module) -> str | None:
    """Return the task of a model's head, or None if its class is not one of the known heads of transformers."""
    tasks = task_of_class()
    return next((tasks[kind.__name__] for kind in type(unwrap_model(model)).__mro__ if kind.__name__ in tasks), None)


@cache
def task_of_class() -> dict[str, str]:
    """Return the task of each class of the known heads, by the name of the class."""
    tasks: dict[str, str] = {}
    for task, (_, mapping) in HEADS.items():
        for names in mapping.values():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault(name, task)
    return tasks
