"""``Recipe.trainer``: the stock ``Trainer`` with arguments, data, collator and callbacks wired."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset, Image
from tables import refuses, whole
from test_recipe import dataset

import tiny
from hf_memopt import (
    BucketedCollator,
    EmbeddingBitsCallback,
    MemoryReportCallback,
    MicrobatchCallback,
    Recipe,
    bucketed,
    gradient_release,
    recipe,
)
from hf_memopt.recipes import callbacks_of


def kind(data: Any) -> str:
    return type(data).__name__


def wired(tmp_path: Any, chosen: Recipe, data: Any, **settings: Any) -> Any:
    quiet = {"output_dir": str(tmp_path), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return chosen.trainer(
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
    assert kind(trainer.train_dataset) == "BucketedView"
    assert trainer.train_dataset.buckets.batch_size == trainer.args.per_device_train_batch_size == 16
    assert trainer.train_dataset.buckets.seed == 7
    assert trainer.args.train_sampling_strategy == "sequential"
    assert isinstance(trainer.data_collator, BucketedCollator)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert EmbeddingBitsCallback in kinds
    assert MemoryReportCallback in kinds
    assert mine in trainer.callback_handler.callbacks
    names = [change.name for change in trainer.memopt_changes]
    assert names == ["seed of the bucketed view", "model_accepts_loss_kwargs", "autocast_cache"]


STOCK_ORDER = [  # rows, whether to bucket them, the strategy that is asked for, why they are not bucketed
    (None, True, "random", []),
    (
        [{"inputs_embeds": torch.zeros(4, 32), "labels": 0}] * 4,
        True,
        "random",
        ["the examples have no input_ids whose length could count"],
    ),
    (dataset(), False, "random", []),
    (dataset(), True, "sequential", ["train_sampling_strategy='sequential' asks for the order of the data"]),
]


@pytest.mark.parametrize(("rows", "bucketing", "strategy", "reasons"), STOCK_ORDER)
def test_data_that_is_not_bucketed_is_read_in_stock_order(tmp_path, rows, bucketing, strategy, reasons) -> None:
    collator = transformers.default_data_collator if isinstance(rows, list) else None
    given = {} if strategy == "random" else {"train_sampling_strategy": strategy}
    chosen = recipe("cpu").replace(bucketing=bucketing)
    trainer = wired(tmp_path, chosen, rows, data_collator=collator, training_arguments=given)
    assert trainer.train_dataset is rows
    assert trainer.args.train_sampling_strategy == strategy
    changes = [str(one) for one in getattr(trainer, "memopt_changes", ()) if one.name == "bucketing"]
    assert changes == [f"bucketing: True -> False ({reason})" for reason in reasons]


class Compared(transformers.BertForSequenceClassification):
    """As CLIP: asked for the loss by ``return_loss``, which compares the rows of a batch."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, return_loss: bool = True) -> Any:
        return super().forward(input_ids, attention_mask, labels=labels)


def test_rows_that_a_loss_compares_are_not_gathered_by_length(tmp_path) -> None:
    model = Compared(tiny.bert_config())
    trainer = wired(tmp_path, recipe("cpu"), dataset(), model=model, eval_dataset=dataset())
    assert kind(trainer.train_dataset) == kind(trainer.eval_dataset) == kind(dataset())
    reason = "the loss of Compared compares the rows of a batch with each other"
    assert f"bucketing: True -> False ({reason})" in map(str, trainer.memopt_changes)


def test_rows_of_several_texts_are_left_to_the_callers_collator(tmp_path) -> None:
    rows = [{"input_ids": [[5] * (1 + i % 4)] * 3, "labels": i % 3} for i in range(32)]
    model = transformers.BertForMultipleChoice(tiny.bert_config())
    for data in (rows, Dataset.from_list(rows)):
        given = {"model": model, "eval_dataset": data, "training_arguments": {"max_steps": 1}}
        collator = transformers.DataCollatorForMultipleChoice(tiny.tokenizer())
        trainer = wired(tmp_path, recipe("cpu"), data, data_collator=collator, **given)
        assert trainer.train_dataset is trainer.eval_dataset is data
        reason = "the input_ids of an example are not one flat list of token ids, whose length could count"
        assert f"bucketing: True -> False ({reason})" in map(str, trainer.memopt_changes)
        assert trainer.train().global_step == 1
        with pytest.raises(ValueError, match=r"recipe\.replace\(bucketing=False\)"):
            wired(tmp_path, recipe("cpu"), data, **given)


def test_evaluation_is_sorted_by_length_and_its_results_are_in_dataset_order(tmp_path) -> None:
    rows = [{"input_ids": [5] * (1 + 5 * i % 17), "labels": i % 3} for i in range(20)]
    chosen, model = recipe("cpu"), tiny.bert()
    sorted_one = wired(tmp_path, chosen, dataset(), model=model, eval_dataset=rows)
    assert kind(sorted_one.eval_dataset) == "SortedExamples"
    plain = wired(tmp_path, chosen.replace(bucketing=False), dataset(), model=model, eval_dataset=rows)
    assert plain.eval_dataset is rows
    assert sorted_one.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    expected = plain.predict(rows)
    found = sorted_one.predict(sorted_one.eval_dataset)
    assert (found.label_ids == expected.label_ids).all()
    assert found.predictions == pytest.approx(expected.predictions, abs=1e-6)


def test_evaluation_that_cannot_be_put_back_into_order_is_left_alone(tmp_path) -> None:
    rows = [{"input_ids": [5, 6], "labels": 0}] * 4
    stream = Dataset.from_list(rows).to_iterable_dataset()
    several = wired(tmp_path, recipe("cpu"), dataset(), eval_dataset={"one": rows, "other": stream}).eval_dataset
    assert kind(several["one"]) == "SortedExamples"
    assert several["other"] is stream
    given = {"dataloader_drop_last": True}
    assert wired(tmp_path, recipe("cpu"), dataset(), eval_dataset=rows, training_arguments=given).eval_dataset is rows


def test_a_bucketed_view_as_evaluation_data_is_refused(tmp_path) -> None:
    view = bucketed(dataset(), batch_size=4)
    refuses(ValueError, whole("dataset=<BucketedView>"), wired, tmp_path, recipe("cpu"), dataset(), eval_dataset=view)


def test_a_view_of_whole_batches_gets_the_arguments_that_fit_it(tmp_path) -> None:
    view = bucketed(dataset(), max_tokens=256)
    trainer = wired(tmp_path, recipe("4gb-gpu"), view, training_arguments={"gradient_accumulation_steps": 3})
    assert trainer.train_dataset is view
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (1, 3)
    assert args.train_sampling_strategy == "sequential"


def test_a_stream_stays_in_its_own_order(tmp_path, caplog) -> None:
    stream = Dataset.from_list([{"input_ids": [5] * (1 + i % 9), "labels": i % 3} for i in range(40)])
    chosen, steps = recipe("cpu").replace(effective_batch_size=4), {"max_steps": 3}
    trainer = wired(tmp_path, chosen, data := stream.to_iterable_dataset(), training_arguments=steps)
    assert trainer.train_dataset is data
    assert trainer.train().global_step == 3


@pytest.mark.parametrize("is_made_by_the_trainer", [False, True])
def test_a_causal_model_without_labels_learns_its_tokens_and_says_so(tmp_path, is_made_by_the_trainer, caplog) -> None:
    left_over = dataset().rename_column("labels", "label")  # of a classification
    unlabelled = left_over if is_made_by_the_trainer else left_over.remove_columns("label")
    model = {"model": None, "model_init": lambda: tiny.llama()} if is_made_by_the_trainer else {"model": tiny.llama()}
    steps = {"max_steps": 1, "train_sampling_strategy": "group_by_length"}
    with caplog.at_level("INFO"):
        trainer = wired(tmp_path, recipe("cpu"), unlabelled, **model, training_arguments=steps)
    assert "train_sampling_strategy: 'group_by_length' -> 'sequential'" in caplog.text
    assert trainer.data_collator.causal_lm
    change = next(change for change in trainer.memopt_changes if change.name == "labels")
    assert (change.new, change.reason) == (
        "input_ids",
        "LlamaForCausalLM predicts tokens, and the data names no labels of tokens",
    )
    assert trainer.train().training_loss > 0


def test_labels_of_a_loss_of_ones_own_are_left_to_it(tmp_path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        shapes.append(labels if labels is None else labels.ndim)
        return outputs.logits.float().pow(2).mean()

    shapes: list[Any] = []
    given = {"compute_loss_func": loss, "training_arguments": {"max_steps": 1}}
    wired(tmp_path, recipe("cpu"), dataset(), model=tiny.llama(), **given).train()
    masked = transformers.BertForMaskedLM(tiny.bert_config())
    wired(tmp_path, recipe("cpu"), dataset().remove_columns("labels"), model=masked, **given).train()
    assert {*shapes} == {1, None}


def test_columns_that_no_model_is_given_are_not_decoded(tmp_path) -> None:
    missing = {"path": str(tmp_path / "missing.png"), "bytes": None}
    rows = [{**row, "image": missing} for row in dataset()]
    pictured = Dataset.from_list(rows).cast_column("image", Image())
    given = {"data_collator": BucketedCollator(tiny.tokenizer()), "eval_dataset": pictured}
    trainer = wired(tmp_path, recipe("cpu"), pictured, **given)
    assert kind(trainer.train_dataset) == "BucketedView"
    with pytest.raises(FileNotFoundError):
        pictured[0]


def encoded(row: Any) -> Any:
    return tiny.tokenizer()(row["text"])


UNNAMED = {  # rows of text -> rows of tokens whose columns the data set does not name
    "stream": lambda rows: rows.to_iterable_dataset().map(encoded, remove_columns=["text"]),
    "transform": lambda rows: rows.with_transform(encoded),
    "batches of a list": lambda rows: bucketed([*rows.with_transform(encoded)], max_tokens=64),
}


@pytest.mark.parametrize("arrange", UNNAMED.values(), ids=UNNAMED)
def test_a_causal_model_learns_the_tokens_of_rows_whose_columns_are_not_named(tmp_path, arrange) -> None:
    rows = arrange(Dataset.from_list([{"text": "w1 " * (1 + i % 5)} for i in range(16)]))
    chosen = recipe("cpu").replace(effective_batch_size=4)
    trainer = wired(tmp_path, chosen, rows, model=tiny.llama(), training_arguments={"max_steps": 1})
    assert trainer.train().training_loss > 0
    labelled = [{"input_ids": [5, 6], "labels": [-100, 6]}]
    assert trainer.data_collator(labelled)["labels"][0, :2].tolist() == [-100, 6]  # those of the data win


def test_what_would_be_ignored_or_train_nothing_is_refused(tmp_path) -> None:
    model, cpu = tiny.bert(), recipe("cpu")
    sixteen = cpu.replace(weights_dtype="bfloat16", rounding="stochastic")
    own = {"model": model, "optimizers": (torch.optim.AdamW(model.parameters()), None)}
    for chosen, given, message in [
        (cpu.replace(lora=4), own, "holds no weight that is trained"),
        (
            cpu.replace(prediction_loss_only=True),
            {"compute_metrics": dict},
            "is never called with prediction_loss_only=True",
        ),
        (sixteen, {"model": None, "model_init": lambda: tiny.bert()}, "has float32 weights"),
    ]:
        with pytest.raises(ValueError, match=message):
            wired(tmp_path, chosen, dataset(), **given)


def test_a_callback_of_the_callers_own_takes_the_place_of_the_recipes(tmp_path) -> None:
    own = [MicrobatchCallback(max_tokens=64), MemoryReportCallback()]
    trainer = wired(tmp_path, recipe("cpu").replace(micro_batching=True), dataset(), callbacks=own)
    kinds = (MicrobatchCallback, MemoryReportCallback)
    assert {one for one in trainer.callback_handler.callbacks if isinstance(one, kinds)} == {*own}


@pytest.mark.parametrize("model", [tiny.llama, tiny.bert])
def test_labels_of_the_data_or_another_model_leave_labels_alone(tmp_path, model) -> None:
    data = dataset().map(lambda row: {"labels": row["input_ids"]}) if model is tiny.llama else None
    trainer = wired(tmp_path, recipe("auto"), data, model=model())
    assert not trainer.data_collator.causal_lm
    assert "labels" not in [change.name for change in getattr(trainer, "memopt_changes", ())]


def test_a_model_of_images_needs_no_processing_class(tmp_path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, num_labels=3
    )
    images = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 3} for i in range(32)]
    model = transformers.ViTForImageClassification(config)
    for chosen in (recipe("cpu"), recipe("cpu").replace(optim="adamw_8bit")):  # which has no embeddings to keep
        steps = {"max_steps": 1}
        trainer = wired(tmp_path, chosen, images, model=model, processing_class=None, training_arguments=steps)
        assert trainer.train().global_step == 1


def test_sounds_of_a_feature_extractor_are_padded_by_stock(tmp_path) -> None:
    rows = [{"input_values": torch.randn(400 + 20 * i).tolist(), "label": i % 2} for i in range(32)]
    sizes = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "hidden_size": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**sizes, **layers, mask_time_prob=0.0)
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    given = {"processing_class": transformers.Wav2Vec2FeatureExtractor(), "training_arguments": {"max_steps": 1}}
    trainer = wired(tmp_path, recipe("cpu"), rows, model=model, **given)
    assert kind(trainer.data_collator) == "DataCollatorWithPadding"
    assert trainer.train().global_step == 1


def test_texts_beside_images_are_padded_where_images_are_the_main_input(tmp_path) -> None:
    heads = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BlipConfig(
        text_config={**heads, "encoder_hidden_size": 16, "vocab_size": 100, "bos_token_id": 2, "sep_token_id": 3},
        vision_config={**heads, "image_size": 8, "patch_size": 4},
    )
    model, image = transformers.BlipForConditionalGeneration(config), torch.randn(3, 8, 8)
    rows = [{"pixel_values": image, "input_ids": ids, "labels": ids} for ids in ([5, 6], [5, 6, 7])] * 16
    steps = {"max_steps": 1}
    trainer = wired(tmp_path, recipe("cpu"), rows, model=model, training_arguments=steps)
    assert isinstance(trainer.data_collator, BucketedCollator)
    assert trainer.train().global_step == 1
    plain = wired(tmp_path, recipe("cpu"), rows[::2], model=model, processing_class=None, training_arguments=steps)
    assert plain.data_collator is transformers.default_data_collator  # rows of one length need no tokenizer


def test_the_8_bit_names_are_those_that_stock_knows() -> None:
    names = {item.value for item in transformers.training_args.OptimizerNames if item.value.endswith("8bit")}
    other_makers = {"adamw_torch_8bit"} | {name for name in names if name.startswith("galore")}
    made = {name: callbacks_of(recipe("cpu"), name) for name in names}
    found = {name for name, own in made.items() if any(isinstance(one, EmbeddingBitsCallback) for one in own)}
    assert found == names - other_makers


def test_what_cannot_work_with_what_the_caller_asks_for_is_left_out_and_told_and_of_his_own_refused(tmp_path) -> None:
    released = {"optimizer_cls_and_kwargs": (gradient_release(torch.optim.SGD), {"lr": 0.1})}
    released |= {"training_arguments": {"max_grad_norm": 0}}
    trainer = wired(tmp_path, recipe("cpu"), dataset(), **released)
    assert not any(isinstance(c, MicrobatchCallback) for c in trainer.callback_handler.callbacks)
    why = (
        "incompatible{}: gradients have to stay until the last micro-batch, and a weight that has stepped cannot be "
        "taken back"
    )
    assert [str(change) for change in trainer.memopt_changes if change.name == "micro-batching"] == [
        f"micro-batching: True -> False ({why.format(' with gradient release')})"
    ]
    chosen = recipe("cpu").replace(micro_batching=False)
    refuses(
        ValueError,
        f"gradient release and micro-batching are {why.format('')}; expected only one of them. Take MicrobatchCallback "
        "out of callbacks=",
        lambda: wired(tmp_path, chosen, dataset(), callbacks=[MicrobatchCallback()], **released),
    )
