"""The lines that build a Trainer of a recipe: what is wired, what is left out, what is refused."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from five_lines import trainer_of
from tables import refuses
from test_recipe import dataset

import tiny
from hf_memopt import (
    BucketedCollator,
    EmbeddingBitsCallback,
    MemoryReportCallback,
    MicrobatchCallback,
    Recipe,
    low_memory_optimizer,
    recipe,
)


def wired(tmp_path: Any, chosen: Recipe, data: Any, **settings: Any) -> Any:
    quiet = {"output_dir": str(tmp_path), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return trainer_of(
        chosen,
        model=settings.pop("model") if "model" in settings else tiny.bert(),
        train_dataset=data,
        processing_class=settings.pop("processing_class", tiny.tokenizer()),
        training_arguments={**quiet, "use_cpu": tiny.DEVICE == "cpu", **settings.pop("training_arguments", {})},
        **settings,
    )


def test_the_trainer_is_stock_and_everything_is_wired(tmp_path) -> None:
    mine = transformers.TrainerCallback()
    trainer = wired(tmp_path, recipe("8gb-gpu"), dataset(), callbacks=[mine], training_arguments={"data_seed": 7})
    assert type(trainer) is transformers.Trainer
    assert trainer.train_dataset.buckets.batch_size == trainer.args.per_device_train_batch_size == 16
    assert trainer.train_dataset.buckets.seed == 7
    assert isinstance(trainer.data_collator, BucketedCollator)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert {EmbeddingBitsCallback, MemoryReportCallback} <= {*kinds}
    assert mine in trainer.callback_handler.callbacks
    of_attach = ["seed of the bucketed view", "train_sampling_strategy", "model_accepts_loss_kwargs", "autocast_cache"]
    assert [change.name for change in trainer.memopt_changes] == of_attach


def test_a_causal_model_learns_the_tokens_of_rows_without_labels_and_labels_of_the_data_win(tmp_path) -> None:
    rows, steps = dataset().remove_columns("labels"), {"max_steps": 1}
    trainer = wired(tmp_path, recipe("cpu"), rows, model=tiny.llama(), causal_lm=True, training_arguments=steps)
    assert trainer.train().training_loss > 0
    labelled = [{"input_ids": [5, 6], "labels": [-100, 6]}]
    assert trainer.data_collator(labelled)["labels"][0, :2].tolist() == [-100, 6]


def test_a_model_of_images_needs_no_processing_class(tmp_path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, num_labels=3
    )
    images = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 3} for i in range(32)]
    given = {"processing_class": None, "data_collator": None, "training_arguments": {"max_steps": 1}}
    plain = recipe("cpu").replace(bucketing=False)
    for chosen in (plain, plain.replace(optim="adamw_8bit")):  # which has no embeddings to keep
        trainer = wired(tmp_path, chosen, images, model=transformers.ViTForImageClassification(config), **given)
        assert trainer.train().global_step == 1


def test_the_8_bit_names_are_those_that_stock_knows() -> None:
    names = {item.value for item in transformers.training_args.OptimizerNames if item.value.endswith("8bit")}
    other_makers = {"adamw_torch_8bit"} | {name for name in names if name.startswith("galore")}
    made = {name: recipe("cpu").replace(optim=name).callbacks() for name in names}
    found = {name for name, own in made.items() if any(isinstance(one, EmbeddingBitsCallback) for one in own)}
    assert found == names - other_makers


def test_micro_batching_is_left_out_beside_what_it_does_not_work_with_and_refused_where_it_is_asked_for(
    tmp_path,
) -> None:
    released = Recipe("released", "a test", gradient_release=True, optim="adamw_torch", per_device_train_batch_size=4)
    assert released.micro_batching
    assert not any(isinstance(one, MicrobatchCallback) for one in released.callbacks())
    refuses(
        ValueError,
        "gradient release and micro-batching are incompatible: gradients have to stay until the last micro-batch, and "
        "a weight that has stepped cannot be taken back; expected only one of them. Take MicrobatchCallback out of "
        "callbacks=",
        lambda: wired(tmp_path, released, dataset(), callbacks=[MicrobatchCallback()]),
    )
    own = {"optimizer_cls_and_kwargs": (low_memory_optimizer(torch.optim.SGD, release=True), {"lr": 0.1})}
    plain = recipe("cpu").replace(micro_batching=False)
    trainer = wired(tmp_path, plain, dataset(), **own, training_arguments={"max_grad_norm": 0, "max_steps": 1})
    assert trainer.train().global_step == 1
