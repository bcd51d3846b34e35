"""The Trainer of a recipe, built as README and docs/getting-started.md build it."""

from __future__ import annotations

from typing import Any

import transformers

from hf_memopt import Recipe, attach, bucketed


def trainer_of(
    recipe: Recipe,
    *,
    model: Any = None,
    train_dataset: Any = None,
    processing_class: Any = None,
    training_arguments: Any = None,
    causal_lm: bool = False,
    **given: Any,
) -> transformers.Trainer:
    """Return an attached Trainer with the recipe's model, arguments, optimizer, data, collator and callbacks."""
    args = recipe.training_arguments(**(training_arguments or {}))
    if model is not None:
        model = recipe.prepare_model(model)
        given.setdefault("optimizer_cls_and_kwargs", recipe.optimizer(args, model))
    if "data_collator" not in given:
        given["data_collator"] = recipe.collator(processing_class, causal_lm=causal_lm)
    if recipe.bucketing:
        train_dataset = bucketed(
            train_dataset, batch_size=args.per_device_train_batch_size, pad_to_multiple_of=recipe.pad_to_multiple_of
        )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        processing_class=processing_class,
        callbacks=[*recipe.callbacks(), *given.pop("callbacks", ())],
        **given,
    )
    return attach(trainer)
