"""Check what a Recipe's Trainer is given, and choose what its data needs: padding, labels, or neither (images)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_memopt.binding import versions
from hf_memopt.binding.model_traits import is_causal_lm, unwrap_model
from hf_memopt.errors import did_you_mean
from hf_memopt.recipes.data_views import column_names

if TYPE_CHECKING:
    from hf_memopt.batching.collation.speech import SpeechCollator

__all__ = [
    "check_argument_names",
    "check_trainer_inputs",
    "fixed_size_input",
    "needs_causal_labels",
    "speech_collator",
]

LABELS = {"labels", "label", "label_ids"}
SHORT_NAMES = {
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "accumulation_steps": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
}
"""What other libraries call fields of TrainingArguments."""


def check_argument_names(overrides: Mapping[str, Any]) -> None:
    """Raise TypeError for a name that TrainingArguments does not have; the message says the right one."""
    known = versions.training_argument_names()
    for name in overrides:
        if name in known:
            continue
        if name in versions.RENAMED_ARGUMENTS:
            raise TypeError(
                f"{name}={overrides[name]!r} is a name of transformers 4.x; expected a field of TrainingArguments 5.x. "
                f"Instead: {versions.RENAMED_ARGUMENTS[name]}"
            )
        meant = f" Did you mean {SHORT_NAMES[name]!r}?" if name in SHORT_NAMES else did_you_mean(name, known)
        raise TypeError(
            f"{name}={overrides[name]!r} is not a field of TrainingArguments; expected one of its fields."
            f"{meant} List them: help(transformers.TrainingArguments)"
        )


def check_trainer_inputs(model: Any, training_arguments: Any, trainer_kwargs: Mapping[str, Any]) -> None:
    """Raise for what the stock Trainer would refuse with an error about something else.

    Raises:
        TypeError: ``training_arguments`` is no mapping, ``args=`` is given, a field of TrainingArguments or an unknown
            name stands among the keywords, or the model is a name.
        ValueError: there is neither a model nor ``model_init``.
    """
    is_mapping = isinstance(training_arguments, Mapping) and all(isinstance(name, str) for name in training_arguments)
    if training_arguments is not None and not is_mapping:
        raise TypeError(
            f"training_arguments=<{type(training_arguments).__name__}> is not a mapping; expected a dict of "
            "fields. "
            'Pass training_arguments={"output_dir": "out", "learning_rate": 3e-5}'
        )
    _check_keywords(trainer_kwargs)
    if isinstance(model, str):
        raise TypeError(
            f"model={model!r} is a name; expected a loaded model. Pass "
            f"model=AutoModelForSequenceClassification.from_pretrained({model!r}, **recipe.model_kwargs()), or another "
            "class"
        )
    if model is None and trainer_kwargs.get("model_init") is None:
        raise ValueError(
            "model=None leaves nothing to train; expected a loaded model, or model_init. Pass "
            "model=AutoModelForSequenceClassification.from_pretrained(name, **recipe.model_kwargs())"
        )


def _check_keywords(trainer_kwargs: Mapping[str, Any]) -> None:
    from transformers import Trainer

    known = [name for name in inspect.signature(Trainer.__init__).parameters if name not in ("self", "args")]
    for name, value in trainer_kwargs.items():
        if name == "args":
            raise TypeError(
                f"args=<{type(value).__name__}> would replace the arguments of the recipe; expected a dict of fields. "
                'Pass training_arguments={"output_dir": "out", "learning_rate": 3e-5}'
            )
        if name in versions.training_argument_names() or name == "effective_batch_size":
            raise TypeError(
                f"{name}={value!r} is a field of TrainingArguments; expected it in training_arguments. Pass "
                f'training_arguments={{"{name}": {value!r}}}'
            )
        if name not in known:
            raise TypeError(
                f"{name}=<{type(value).__name__}> is not a parameter of Trainer; expected one of {', '.join(known)}."
                f"{did_you_mean(name, known)} Call: recipe.trainer(model=model, train_dataset=dataset, "
                "processing_class=tokenizer)"
            )


def fixed_size_input(model: Any, dataset: Any) -> str | None:
    """Return the column of inputs of one size, which need no padding and no tokenizer; None for text.

    ``"pixel_values"`` of images, which stock's default collator stacks, or ``"input_features"`` of sound (Whisper).
    """
    names = column_names(dataset)
    for name in ("pixel_values", "input_features"):
        if getattr(model, "main_input_name", None) == name or (name in names and "input_ids" not in names):
            return name
    return None


def speech_collator(model: Any) -> SpeechCollator:
    """Return the collator of sound for a model, or for float32 features where ``model_init`` builds it later."""
    from hf_memopt.batching.collation.speech import SpeechCollator

    if model is None:
        return SpeechCollator()
    inside = unwrap_model(model)
    return SpeechCollator(getattr(inside.config, "decoder_start_token_id", None), inside.dtype)


def needs_causal_labels(model: Any, dataset: Any) -> bool:
    """Return whether a causal language model is to be trained on examples of tokens that have no labels."""
    names = set(column_names(dataset))
    return model is not None and "input_ids" in names and not names & LABELS and is_causal_lm(model)
