"""Build the stock ``Trainer`` of a Recipe: adapters, arguments, data, collator, optimizer and callbacks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from hf_memopt.batching.views import BucketedView, bucketed
from hf_memopt.binding import attach, versions
from hf_memopt.binding.compatibility import is_of_bitsandbytes, names_of, refusals_of
from hf_memopt.binding.model import unwrap_model
from hf_memopt.changes import Change, add_change, record_changes
from hf_memopt.devices import choose_precision
from hf_memopt.errors import did_you_mean
from hf_memopt.memory.run import MemoryReportCallback
from hf_memopt.plain_data import shown
from hf_memopt.recipes.data_views import (
    check_encoded,
    evaluation_view,
    fixed_size_input,
    needs_causal_labels,
    speech_collator,
    view_arguments,
    why_unbucketed,
)
from hf_memopt.recipes.model_setup import prepared_model
from hf_memopt.technique_list import asked_by, load
from hf_memopt.techniques import PrecisionCallback
from hf_memopt.techniques.freezing import FreezeCallback
from hf_memopt.techniques.microbatching import MicrobatchCallback
from hf_memopt.techniques.nonfinite import OverflowCallback
from hf_memopt.techniques.optimizers import EmbeddingBitsCallback

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_memopt.recipes.recipe_class import Recipe

logger = logging.getLogger(__name__)


def build_trainer(
    recipe: Recipe,
    model: Any,
    training_arguments: Mapping[str, Any] | None,
    callbacks: tuple[TrainerCallback, ...],
    /,
    *,
    train_dataset: Any,
    processing_class: Any,
    **trainer_kwargs: Any,
) -> Trainer:
    """Return the Trainer; see ``Recipe.trainer``."""
    _check_inputs(model, training_arguments, trainer_kwargs)
    for callback in callbacks:
        if not issubclass(callback if isinstance(callback, type) else type(callback), TrainerCallback):
            raise TypeError(
                f"callbacks=<{type(callback).__name__}> is not a TrainerCallback; expected instances. "
                "Pass callbacks=[MyCallback()]"
            )
    fixed = fixed_size_input(model, train_dataset, processing_class)
    if processing_class is None and "data_collator" not in trainer_kwargs and fixed is None:
        raise ValueError(
            "processing_class=None leaves nothing to pad with; expected the tokenizer. Pass "
            "processing_class=tokenizer, or data_collator=..."
        )
    given = dict(training_arguments or {})
    has_own_loss = trainer_kwargs.get("compute_loss_func") is not None
    if fixed is None and trainer_kwargs.get("data_collator") is None:
        check_encoded(train_dataset, model, has_own_labels=has_own_loss or bool(given.get("label_names")))
    reader = (model, trainer_kwargs.get("data_collator"))
    unbucketed = why_unbucketed(train_dataset, given, *reader) if recipe.bucketing else None
    is_bucketed = recipe.bucketing and train_dataset is not None and unbucketed is None
    if is_bucketed:
        given = view_arguments(recipe.name, train_dataset, given)
    args = recipe.training_arguments(**given)
    if args.prediction_loss_only and trainer_kwargs.get("compute_metrics") is not None:
        raise ValueError(
            f"compute_metrics={shown(trainer_kwargs['compute_metrics'])} is never called with "
            "prediction_loss_only=True; expected only one of them. Pass "
            "training_arguments={'prediction_loss_only': False}, or recipe.replace(prediction_loss_only=False)"
        )
    of_run = {name: one for name, one in given.items() if name != "output_dir"}
    changes = [] if recipe.accumulates else list(recipe.changes(**of_run))
    trainer_kwargs |= _optimizer(recipe, args, model, trainer_kwargs)
    if model is not None:
        model, made = prepared_model(recipe, model)
        changes += made
        if recipe.lora is not None:
            _check_optimizer(recipe, model, (trainer_kwargs.get("optimizers") or (None,))[0])
    elif recipe.lora is not None or recipe.trains_16_bits:
        trainer_kwargs["model_init"] = _preparing(recipe, trainer_kwargs["model_init"], changes)
    changes += [Change("bucketing", True, False, unbucketed)] if unbucketed else []
    if is_bucketed and not isinstance(train_dataset, BucketedView):
        size, multiple = args.per_device_train_batch_size, recipe.pad_to_multiple_of
        train_dataset = bucketed(train_dataset, batch_size=size, pad_to_multiple_of=multiple)
    if recipe.bucketing:
        evaluated = trainer_kwargs.get("eval_dataset")
        trainer_kwargs["eval_dataset"] = evaluation_view(recipe.name, evaluated, args, *reader)
    pads = trainer_kwargs.get("data_collator") is None and fixed is None
    if pads:
        from hf_memopt.batching.collation import check_tokenizer

        check_tokenizer(processing_class, "processing_class")
    elif fixed == "input_features" and trainer_kwargs.get("data_collator") is None:
        trainer_kwargs["data_collator"] = speech_collator(model)
    theirs = {type(callback) for callback in callbacks} & {*_REMOVABLE}
    own = [one for one in callbacks_of(recipe, args.optim) if type(one) not in theirs]
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        processing_class=processing_class,
        callbacks=[*own, *callbacks],
        **trainer_kwargs,
    )
    if pads:  # by the model, which model_init has made by now
        causal_lm = needs_causal_labels(trainer.model, train_dataset, has_own_loss=has_own_loss)
        trainer.data_collator = recipe.collator(processing_class, causal_lm=causal_lm)
        if causal_lm:
            kind = type(unwrap_model(trainer.model)).__name__
            reason = f"{kind} predicts tokens, and the data names no labels of tokens"
            changes.append(Change("labels", None, "input_ids", reason))
    for change in changes:
        logger.info("%s: %s", recipe.name, change)
    record_changes(trainer, changes)
    asked = [callback for callback in own if not isinstance(callback, _REMOVABLE)]
    _remove_refused_callbacks(recipe, trainer, kept=(*asked, *callbacks))
    return attach(trainer)


def _check_inputs(model: Any, training_arguments: Any, trainer_kwargs: Mapping[str, Any]) -> None:
    """Raise for what the stock Trainer would refuse with an error about something else."""
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


def callbacks_of(recipe: Recipe, optim: str) -> list[TrainerCallback]:
    """Return new callbacks for a Trainer with this optimizer; see ``Recipe.callbacks``."""
    wanted: list[TrainerCallback] = []
    if recipe.freeze:
        wanted.append(FreezeCallback(recipe.freeze))
    wanted.append(PrecisionCallback(autocast_cache=recipe.autocast_cache, master_weights=not recipe.trains_16_bits))
    if is_of_bitsandbytes(optim) and optim.endswith("8bit") and not optim.startswith("galore"):
        wanted.append(EmbeddingBitsCallback())
    precision = recipe.step_settings().precision
    if recipe.accumulates and (precision == "fp16" or (precision == "auto" and choose_precision().fp16)):
        wanted.append(OverflowCallback())
    own = [one for one in asked_by(recipe).values() if one.callback]
    return wanted + [load(one.callback)(**{name: getattr(recipe, name) for name in one.arguments}) for one in own]


_REMOVABLE = (PrecisionCallback, EmbeddingBitsCallback, OverflowCallback, MicrobatchCallback, MemoryReportCallback)
"""What a recipe leaves out where the caller asks for something else; what a recipe was asked for is refused."""


def _remove_refused_callbacks(recipe: Recipe, trainer: Trainer, kept: Iterable[TrainerCallback]) -> None:
    """Remove the recipe's own callbacks that are incompatible with what the caller asked for."""
    for refusal in refusals_of(trainer):
        for callback in tuple(trainer.callback_handler.callbacks):
            name = next((one for one in (refusal.one, refusal.other) if one in names_of(callback)), None)
            if name is not None and not any(callback is own for own in kept):
                trainer.remove_callback(callback)
                other = refusal.other if name == refusal.one else refusal.one
                change = Change(name, True, False, f"incompatible with {other}: {refusal.reason}")
                logger.info("%s: %s", recipe.name, change)
                record_changes(trainer, (change,))


def _optimizer(recipe: Recipe, args: TrainingArguments, model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``optimizer_cls_and_kwargs`` for gradient release and the rounding of 16-bit weights, or nothing."""
    technique = next((one for one in asked_by(recipe).values() if one.optimizer), None)
    if technique is None:
        return {}
    field = technique.field_in(recipe)
    for name, value in (("optimizers", (given.get("optimizers") or (None,))[0]), (_CLASS, given.get(_CLASS))):
        if value is not None:
            raise ValueError(
                f"{name} is given, and {field}={getattr(recipe, field)!r} makes an optimizer of its own; expected "
                f"only one of them. Pass training_arguments={{'optim': ...}}, or recipe.replace({field}=...)"
            )
    return {_CLASS: load(technique.optimizer)(args, model, rounding=recipe.rounding)}


_CLASS = "optimizer_cls_and_kwargs"


def _check_optimizer(recipe: Recipe, model: Any, optimizer: Any) -> None:
    """Raise where an optimizer was made before the adapters, and so trains nothing."""
    held = {id(one) for group in getattr(optimizer, "param_groups", ()) for one in group["params"]}
    if held and not any(one.requires_grad and id(one) in held for one in model.parameters()):
        raise ValueError(
            f"optimizers=(<{type(optimizer).__name__}>, ...) holds no weight that is trained: "
            f"lora={recipe.lora!r} adds them now; expected an optimizer of the adapters. Call: model = "
            "recipe.prepare_model(model) first, and make it of model.parameters(), or pass "
            "training_arguments={'optim': ...}"
        )


def _preparing(recipe: Recipe, model_init: Callable[..., Any], changes: list[Change]) -> Callable[..., Any]:
    @wraps(model_init)  # stock counts its parameters
    def prepared(*args: Any, **kwargs: Any) -> Any:
        model, made = prepared_model(recipe, model_init(*args, **kwargs))
        for change in made:
            add_change(changes, change)
        return model

    return prepared
