"""Recipes and presets: what they become, what overriding one value does to the others, and the wired stock Trainer."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial

import pytest
import torch
import transformers
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

import tiny
from hf_memopt import (
    PRESETS,
    BucketedCollator,
    EmbeddingBitsCallback,
    FreezeCallback,
    MemoryReportCallback,
    MicrobatchCallback,
    PrecisionCallback,
    Recipe,
    gradient_release,
    preset,
    recipe,
)
from hf_memopt.batching.views import BucketedStream, BucketedView, SortedExamples, bucketed
from hf_memopt.binding import versions
from hf_memopt.devices.precision_support import Precision
from hf_memopt.devices.readings import memory_reading
from hf_memopt.memory import estimate
from hf_memopt.recipes import callbacks_of
from hf_memopt.recipes.resolved_arguments import resolve_arguments
from hf_memopt.techniques.freezing.freezing import freeze, trainable_parameters

NAMES = ["4gb-gpu", "6gb-gpu", "8gb-gpu", "12gb-gpu", "16gb-gpu", "24gb-gpu", "40gb-gpu", "80gb-gpu", "cpu"]
PAGED_ON_CPU = "ignore:Paged optimizers are not supported on CPU:UserWarning"  # bitsandbytes 0.50 says so once


def dataset(count: int = 16) -> Dataset:
    lengths = [4 + (7 * i) % 17 for i in range(count)]
    return Dataset.from_list(
        [{"input_ids": [5 + (i * j) % 90 for j in range(n)], "labels": i % 3} for i, n in enumerate(lengths)]
    )


# ---- Presets
# ----------------------------------------------------------------------------------------------------------


def test_all_nine_names_are_there_and_literal() -> None:
    assert list(PRESETS) == NAMES
    assert all(isinstance(value, Recipe) and value.name == name for name, value in PRESETS.items())
    with pytest.raises(TypeError):
        PRESETS["4gb-gpu"] = PRESETS["cpu"]  # type: ignore[index]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_gives_plain_training_arguments_on_any_machine(name, tmp_path) -> None:
    args = preset(name, output_dir=str(tmp_path))
    assert type(args) is transformers.TrainingArguments
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    assert json.loads(args.to_json_string())["optim"] == args.optim
    assert pickle.loads(pickle.dumps(args)).optim == args.optim


@pytest.mark.filterwarnings(PAGED_ON_CPU)
@pytest.mark.parametrize("name", NAMES)
def test_every_preset_trains_through_the_stock_trainer(name, tmp_path) -> None:
    quiet = {"output_dir": str(tmp_path), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    quiet |= {"max_steps": 1, "dataloader_num_workers": 0}
    trainer = recipe(name).trainer(
        model=tiny.bert(), train_dataset=dataset(40), processing_class=tiny.tokenizer(), training_arguments=quiet
    )
    assert type(trainer) is transformers.Trainer
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_printing_a_recipe_gives_every_choice_with_a_reason(name) -> None:
    lines = str(recipe(name)).splitlines()
    shown = [item.name for item in fields(Recipe) if item.name not in ("name", "purpose", "reasons")]
    assert [line.split()[0] for line in lines[1:]] == shown
    for line, field in zip(lines[1:], shown, strict=True):
        assert repr(getattr(recipe(name), field)) in line
        assert len(line.split("  ")[-1].split()) >= 3, f"no reason for {field}: {line!r}"


def test_presets_say_that_their_memory_is_not_measured() -> None:
    for name in NAMES[:8]:
        assert "memory not yet measured on a GPU" in PRESETS[name].purpose


def test_unknown_preset_names_the_nearest_and_all() -> None:
    with pytest.raises(ValueError) as error:
        preset("4gb")
    assert str(error.value) == (
        "name='4gb' is not a preset; expected one of 4gb-gpu, 6gb-gpu, 8gb-gpu, 12gb-gpu, 16gb-gpu, 24gb-gpu, "
        "40gb-gpu, 80gb-gpu, cpu, auto. Did you mean '4gb-gpu'? See them: hf-memopt presets"
    )


@pytest.mark.parametrize(
    ("gib", "chosen"),
    [(2.0, "4gb-gpu"), (3.9, "4gb-gpu"), (5.8, "6gb-gpu"), (7.6, "8gb-gpu"), (14.7, "12gb-gpu"), (14.8, "16gb-gpu"),
     (23.6, "24gb-gpu"), (39.4, "40gb-gpu"), (79.1, "80gb-gpu"), (140.0, "80gb-gpu")],
)  # fmt: skip
def test_auto_takes_the_largest_preset_that_the_card_covers(monkeypatch, gib, chosen) -> None:
    here = memory_reading.read_memory("cpu")
    gpu = replace(here, device="cuda:0", device_name="some GPU", device_total_bytes=round(gib * 2**30))
    monkeypatch.setattr("hf_memopt.devices.readings.read_memory", lambda: gpu)
    found = recipe("auto")
    assert found.name == chosen
    assert found.purpose.startswith(f"chosen by recipe('auto') for some GPU with {gib:.2f} GiB: ")
    assert found.replace(purpose="") == PRESETS[chosen].replace(purpose="")


def test_auto_without_a_card_is_the_cpu_preset(monkeypatch) -> None:
    here = memory_reading.read_memory("cpu")
    monkeypatch.setattr("hf_memopt.devices.readings.read_memory", lambda: replace(here, device_total_bytes=None))
    assert recipe("auto").name == "cpu"


# ---- One override re-derives the others
# -------------------------------------------------------------------------------


@given(per_device=st.integers(1, 64), effective=st.integers(1, 128))
def test_the_effective_batch_stays_or_the_call_is_refused(per_device, effective) -> None:
    r = recipe("4gb-gpu")
    try:
        args = r.training_arguments(
            "out", effective_batch_size=effective, per_device_train_batch_size=per_device, use_cpu=True
        )
    except ValueError:
        assert effective % per_device != 0
    else:
        assert args.per_device_train_batch_size == per_device
        assert per_device * args.gradient_accumulation_steps == effective


def test_the_new_accumulation_is_told_as_a_change() -> None:
    change = recipe("4gb-gpu").changes(per_device_train_batch_size=4)[-1]
    assert str(change) == (
        "per_device_train_batch_size x gradient_accumulation_steps: (8, 4) -> (4, 8) "
        "(keeps 32 examples per optimizer step on 1 process)"
    )


def test_giving_the_accumulation_re_derives_the_batch() -> None:
    args = preset("4gb-gpu", "out", gradient_accumulation_steps=16)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 16)


def test_another_effective_batch_keeps_the_largest_fitting_pass() -> None:
    args = preset("4gb-gpu", "out", effective_batch_size=20)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (5, 4)


def test_processes_share_the_effective_batch(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    [change] = [c for c in recipe("40gb-gpu").changes() if c.name.startswith("per_device")]
    assert (change.old, change.new) == ((32, 1), (16, 1))
    assert change.reason == "keeps 32 examples per optimizer step on 2 processes"
    with pytest.raises(ValueError) as error:
        recipe("40gb-gpu").changes(effective_batch_size=5)
    assert str(error.value) == (
        "WORLD_SIZE=2 on 2 processes does not divide the effective batch of 5; expected a divisor. "
        "Pass effective_batch_size=4"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"per_device_train_batch_size": 5},
            "per_device_train_batch_size=5 on 1 process does not divide the effective batch of 32; expected a "
            "divisor. Pass effective_batch_size=30",
        ),
        (
            {"per_device_train_batch_size": 0},
            "per_device_train_batch_size=0 is invalid; expected an integer of 1 or more. "
            "Pass per_device_train_batch_size=8",
        ),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
            "per_device_train_batch_size=4, gradient_accumulation_steps=4 make 16 examples per step on 1 process; "
            "expected the effective batch of 32. Give one of the two, or effective_batch_size=16",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused(overrides, message) -> None:
    with pytest.raises(ValueError) as error:
        preset("4gb-gpu", "out", **overrides)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"lerning_rate": 1},
            "lerning_rate=1 is not a field of TrainingArguments; expected one of its fields. Did you mean "
            "'learning_rate'? List them: help(transformers.TrainingArguments)",
        ),
        (
            {"batch_size": 4},
            "batch_size=4 is not a field of TrainingArguments; expected one of its fields. Did you mean "
            "'per_device_train_batch_size'? List them: help(transformers.TrainingArguments)",
        ),
        (
            {"evaluation_strategy": "steps"},
            "evaluation_strategy='steps' is a name of transformers 4.x; expected a field of TrainingArguments 5.x. "
            'Instead: eval_strategy="steps"',
        ),
        (
            {"no_cuda": True},
            "no_cuda=True is a name of transformers 4.x; expected a field of TrainingArguments 5.x. Instead: "
            "use_cpu=True",
        ),
    ],
)
def test_unknown_fields_name_the_right_one(overrides, message) -> None:
    with pytest.raises(TypeError) as error:
        preset("4gb-gpu", "out", **overrides)
    assert str(error.value) == message


def test_a_file_in_place_of_the_output_folder_is_refused(tmp_path) -> None:
    path = tmp_path / "taken"
    path.write_text("something", encoding="utf-8")
    with pytest.raises(NotADirectoryError) as error:
        preset("cpu", output_dir=str(path))
    assert str(error.value) == (
        f"output_dir={str(path)!r} is a file; expected a folder or a new path. Pass another output_dir"
    )
    assert path.read_text(encoding="utf-8") == "something"


def test_precision_follows_the_card_and_says_why(monkeypatch) -> None:
    monkeypatch.setattr("hf_memopt.devices.choose_precision", lambda **_: Precision("fp32", "a made-up GPU"))
    [change] = [c for c in recipe("16gb-gpu").changes() if c.name == "precision"]
    assert str(change) == "precision: 'auto' -> 'fp32' (a made-up GPU)"


def test_an_explicit_precision_is_kept_or_refused() -> None:
    assert preset("cpu", "out", bf16=True, use_cpu=True).bf16
    assert preset("cpu", "out", bf16=False).bf16 is False
    with pytest.raises(ValueError) as error:
        preset("cpu", "out", fp16=True, use_cpu=True)
    assert str(error.value).startswith("fp16=True cannot train on this machine, whose device is 'cpu'; ")


def test_tf32_is_used_where_the_machine_has_it(monkeypatch, tmp_path) -> None:
    chosen = Recipe("mine", "a test", precision="tf32")
    assert chosen.step_settings().precision == "tf32"
    assert chosen.training_arguments(str(tmp_path)).tf32 is None
    [change] = [c for c in chosen.changes() if c.name == "precision"]
    assert str(change).startswith("precision: 'tf32' -> 'fp32' (this machine has no TF32")
    monkeypatch.setattr("transformers.utils.import_utils.is_torch_tf32_available", lambda: True)
    assert resolve_arguments(chosen, None, {})[0]["tf32"] is True
    assert not [c for c in chosen.changes() if c.name == "precision"]


def test_checkpointing_of_some_layers_is_stocks_own(tmp_path) -> None:
    chosen = Recipe("mine", "a test", checkpointing=True, every_n_layers=2)
    assert chosen.step_settings().checkpointing == {"every_n_layers": 2}
    if versions.can_offload_checkpoints():
        args = chosen.training_arguments(str(tmp_path))
        assert versions.checkpointing_of(args) == (True, {"use_reentrant": False, "every_n_layers": 2})
    with pytest.raises(ValueError, match="every_n_layers=2, checkpointing=False recompute nothing"):
        Recipe("mine", "a test", every_n_layers=2)


def test_expandable_segments_are_asked_for_before_cuda_starts(monkeypatch, tmp_path) -> None:
    asked = []
    monkeypatch.setattr("hf_memopt.techniques.use_expandable_segments", lambda: asked.append(1))
    chosen = Recipe("mine", "a test", expandable_segments=True)
    assert chosen.step_settings().expandable_segments
    chosen.training_arguments(str(tmp_path))
    assert asked == []  # there is no GPU
    monkeypatch.setattr("hf_memopt.devices.accelerator_type", lambda: "cuda")
    chosen._prepare_allocator()
    assert asked == [1]


def test_checkpointing_can_be_switched_off() -> None:
    prefix = "activation" if hasattr(preset("cpu", "out"), "activation_checkpointing") else "gradient"
    assert getattr(preset("4gb-gpu", "out"), f"{prefix}_checkpointing")
    assert not getattr(preset("4gb-gpu", "out", **{f"{prefix}_checkpointing": False}), f"{prefix}_checkpointing")


# ---- The recipe as data
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip(name) -> None:
    assert Recipe.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_text_that_is_no_json_object_is_refused() -> None:
    text = "[" * 100_000
    with pytest.raises(ValueError) as error:
        Recipe.from_json(text)
    assert str(error.value) == (
        f"text='{'[' * 56}... is not a recipe (it is nested too deeply); expected what Recipe.to_json() returns. "
        "Write it anew: recipe('4gb-gpu').to_json()"
    )


@pytest.mark.parametrize(
    ("given_fields", "message"),
    [
        ({"bucketing": "false"}, "bucketing='false' is invalid; expected True or False. Pass bucketing=True"),
        ({"freeze": "base"}, "freeze='base' is invalid; expected a tuple or list of strings. Pass freeze=()"),
        ({"embedding_bits": 8}, "embedding_bits=8 is invalid; expected 32. Pass embedding_bits=32"),
        ({"reasons": {"optim": 1}}, "reasons={'optim': 1} is invalid; expected strings by name. Pass reasons={}"),
        (
            {"eval_accumulation_steps": 0},
            "eval_accumulation_steps=0 is invalid; expected an integer of 1 or more, or None. "
            "Pass eval_accumulation_steps=None",
        ),
    ],
)
def test_json_with_nonsense_in_a_field_is_refused(given_fields, message) -> None:
    with pytest.raises(ValueError) as error:
        Recipe.from_json(json.dumps({"name": "x", "purpose": "y", **given_fields}))
    assert str(error.value) == message


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", [item.name for item in fields(Recipe)])
@given(value=JSON_VALUES)
def test_any_value_of_a_field_round_trips_or_is_refused_by_name(name, value) -> None:
    text = json.dumps({**json.loads(PRESETS["4gb-gpu"].to_json()), name: value})
    try:
        read = Recipe.from_json(text)
    except ValueError as error:
        assert str(error).startswith(f"{name}=")  # noqa: PT017  # either is fine
    else:
        assert json.loads(read.to_json())[name] == value
        assert Recipe.from_json(read.to_json()) == read


def test_patterns_may_come_as_a_list() -> None:
    assert Recipe("mine", "a test", freeze=["a", "b"]).freeze == ("a", "b")


@pytest.mark.parametrize("size", [0, -1, True, "8", 8.0])
def test_an_effective_batch_size_that_is_no_count_is_refused(size) -> None:
    for function in (PRESETS["cpu"].training_arguments, PRESETS["cpu"].changes, partial(preset, "cpu")):
        with pytest.raises(ValueError) as error:
            function(effective_batch_size=size)
        assert str(error.value) == (
            f"effective_batch_size={size!r} is invalid; expected an integer of 1 or more. Pass effective_batch_size=32"
        )


@pytest.mark.parametrize("count", ["0", "many", "-2", ""])
def test_a_number_of_processes_that_is_no_count_is_refused(monkeypatch, count) -> None:
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ValueError) as error:
        PRESETS["cpu"].changes()
    value = int(count) if count.isdigit() else count
    assert str(error.value) == f"WORLD_SIZE={value!r} is invalid; expected an integer of 1 or more. Pass WORLD_SIZE=1"


def test_recipes_are_frozen_hashable_and_replaced() -> None:
    with pytest.raises(FrozenInstanceError):
        PRESETS["cpu"].optim = "sgd"  # type: ignore[misc]
    changed = PRESETS["4gb-gpu"].replace(optim="sgd")
    assert changed.optim == "sgd"
    assert "optim                        'sgd'                 chosen by the caller" in str(changed)
    assert PRESETS["4gb-gpu"].optim == "paged_adamw_8bit"
    assert len({PRESETS["cpu"], PRESETS["cpu"].replace()}) == 1


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        (
            {"per_device_train_batch_size": 0},
            ValueError,
            "per_device_train_batch_size=0 is invalid; expected an integer of 1 or more. "
            "Pass per_device_train_batch_size=32",
        ),
        (
            {"precision": "fp8"},
            ValueError,
            "precision='fp8' is invalid; expected 'auto', 'bf16', 'fp16', 'tf32' or 'fp32'. Pass precision='auto'",
        ),
    ],
)
def test_bad_values_of_a_recipe(values, kind, message) -> None:
    with pytest.raises(kind) as error:
        PRESETS["cpu"].replace(**values)
    assert str(error.value).replace("'fp16'?", "'fp32'?") == message


def test_replacing_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(TypeError) as error:
        PRESETS["cpu"].replace(learning_rate=1e-5)
    assert str(error.value).startswith("learning_rate=1e-05 is not a field of a Recipe; expected one of ['name', ")
    assert str(error.value).endswith("TrainingArguments go into recipe.training_arguments(learning_rate=...)")


def test_model_kwargs_ask_for_float32_weights(tmp_path) -> None:
    tiny.bert().to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, **recipe("4gb-gpu").model_kwargs()
    )
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.config._attn_implementation == "sdpa"


def test_callbacks_follow_the_fields() -> None:
    kinds = [type(callback) for callback in recipe("4gb-gpu").callbacks()]
    assert kinds == [PrecisionCallback, EmbeddingBitsCallback, MicrobatchCallback, MemoryReportCallback]
    assert [recipe(name).callbacks()[0].autocast_cache for name in ("4gb-gpu", "cpu")] == [False, True]
    assert [type(c) for c in recipe("cpu").callbacks()] == [PrecisionCallback, MicrobatchCallback, MemoryReportCallback]
    least = recipe("cpu").replace(freeze=("embeddings",), micro_batching=False, memory_report=False)
    assert [type(c) for c in least.callbacks()] == [FreezeCallback, PrecisionCallback]


def test_what_cannot_work_with_what_the_caller_asks_for_is_left_out_and_told(tmp_path) -> None:
    released = (gradient_release(torch.optim.SGD), {"lr": 0.1})
    arguments = {"max_grad_norm": 0}
    trainer = wired(tmp_path, recipe("cpu"), dataset(), training_arguments=arguments, optimizer_cls_and_kwargs=released)
    assert not any(isinstance(c, MicrobatchCallback) for c in trainer.callback_handler.callbacks)
    assert [str(change) for change in trainer.memopt_changes if change.name == "micro-batching"] == [
        "micro-batching: True -> False (incompatible with gradient release: gradients have to stay until the last "
        "micro-batch, and a weight that has stepped cannot be taken back)"
    ]


def test_a_callback_of_the_callers_own_is_refused_not_left_out(tmp_path) -> None:
    released = (gradient_release(torch.optim.SGD), {"lr": 0.1})
    with pytest.raises(ValueError) as error:
        wired(
            tmp_path,
            recipe("cpu").replace(micro_batching=False),
            dataset(),
            training_arguments={"max_grad_norm": 0},
            optimizer_cls_and_kwargs=released,
            callbacks=[MicrobatchCallback()],
        )
    assert str(error.value) == (
        "gradient release and micro-batching are incompatible: gradients have to stay until the last micro-batch, "
        "and a weight that has stepped cannot be taken back; expected only one of them. Take MicrobatchCallback out of "
        "callbacks="
    )


# ---- The wired trainer
# ------------------------------------------------------------------------------------------------


def wired(tmp_path, chosen: Recipe, data, **settings):
    quiet = {"output_dir": str(tmp_path), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return chosen.trainer(
        model=settings.pop("model", None) or tiny.bert(),
        train_dataset=data,
        processing_class=settings.pop("processing_class", tiny.tokenizer()),
        training_arguments={**quiet, "use_cpu": True, **settings.pop("training_arguments", {})},
        **settings,
    )


def test_the_trainer_is_stock_and_everything_is_wired(tmp_path) -> None:
    mine = transformers.TrainerCallback()
    trainer = wired(tmp_path, recipe("8gb-gpu"), dataset(), callbacks=[mine], training_arguments={"data_seed": 7})
    assert type(trainer) is transformers.Trainer
    assert isinstance(trainer.train_dataset, BucketedView)
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


def test_an_optimizer_without_8_bit_state_gets_no_embedding_hook(tmp_path) -> None:
    trainer = wired(tmp_path, recipe("8gb-gpu"), dataset(), training_arguments={"optim": "sgd"})
    assert not any(isinstance(c, EmbeddingBitsCallback) for c in trainer.callback_handler.callbacks)


def test_a_view_of_the_users_own_is_kept(tmp_path) -> None:
    view = bucketed(dataset(), batch_size=32, n_buckets=2)
    assert wired(tmp_path, recipe("cpu"), view).train_dataset is view


@pytest.mark.parametrize("data", [None, "no input_ids", "bucketing off"])
def test_data_that_cannot_be_bucketed_is_read_in_stock_order(tmp_path, data) -> None:
    chosen = recipe("cpu").replace(bucketing=data != "bucketing off")
    rows = {
        None: None,
        "no input_ids": [{"inputs_embeds": torch.zeros(4, 32), "labels": 0}] * 4,
        "bucketing off": dataset(),
    }[data]
    collator = transformers.default_data_collator if data == "no input_ids" else None
    trainer = wired(tmp_path, chosen, rows, data_collator=collator)
    assert trainer.train_dataset is rows
    assert trainer.args.train_sampling_strategy == "random"


def test_evaluation_is_sorted_by_length_and_its_results_are_in_dataset_order(tmp_path) -> None:
    rows = [{"input_ids": [5] * (1 + 5 * i % 17), "labels": i % 3} for i in range(20)]
    chosen, model = recipe("cpu"), tiny.bert()
    sorted_one = wired(tmp_path, chosen, dataset(), model=model, eval_dataset=rows)
    assert isinstance(sorted_one.eval_dataset, SortedExamples)
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
    assert isinstance(several["one"], SortedExamples)
    assert several["other"] is stream
    given = {"dataloader_drop_last": True}
    assert wired(tmp_path, recipe("cpu"), dataset(), eval_dataset=rows, training_arguments=given).eval_dataset is rows


def test_a_bucketed_view_as_evaluation_data_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError) as error:
        wired(tmp_path, recipe("cpu"), dataset(), eval_dataset=bucketed(dataset(), batch_size=4))
    assert str(error.value) == (
        "dataset=<BucketedView> is in shuffled order, and predictions would be in that order too; expected the "
        "dataset itself, or sorted by length. Evaluate or predict sorted_by_length(view.dataset)"
    )


def test_a_view_of_whole_batches_gets_the_arguments_that_fit_it(tmp_path) -> None:
    view = bucketed(dataset(), max_tokens=256)
    trainer = wired(tmp_path, recipe("4gb-gpu"), view, training_arguments={"gradient_accumulation_steps": 3})
    assert trainer.train_dataset is view
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (1, 3)
    assert args.train_sampling_strategy == "sequential"


def test_a_stream_is_bucketed_where_it_names_its_columns(tmp_path) -> None:
    stream = Dataset.from_list([{"input_ids": [5] * (1 + i % 9), "labels": i % 3} for i in range(40)])
    chosen, steps = recipe("cpu").replace(effective_batch_size=4), {"max_steps": 3}
    trainer = wired(tmp_path, chosen, stream.to_iterable_dataset(), training_arguments=steps)
    assert isinstance(trainer.train_dataset, BucketedStream)
    assert trainer.train().global_step == 3

    class Nameless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(stream)

    assert isinstance(wired(tmp_path, chosen, Nameless(), training_arguments=steps).train_dataset, Nameless)


def test_model_init_works(tmp_path) -> None:
    trainer = recipe("cpu").trainer(
        model_init=lambda: tiny.bert(),
        train_dataset=dataset(),
        processing_class=tiny.tokenizer(),
        training_arguments={"output_dir": str(tmp_path), "report_to": "none", "disable_tqdm": True, "max_steps": 1,
                            "save_strategy": "no"},
    )  # fmt: skip
    assert trainer.train().global_step == 1


def test_no_tokenizer_and_no_collator_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError) as error:
        wired(tmp_path, recipe("cpu"), dataset(), processing_class=None)
    assert str(error.value) == (
        "processing_class=None leaves nothing to pad with; expected the tokenizer. Pass processing_class=tokenizer, or "
        "data_collator=..."
    )


def test_rows_of_text_are_to_be_read_first(tmp_path) -> None:
    rows = Dataset.from_dict({"text": ["w1 w2"] * 4, "label": [0, 1] * 2})
    with pytest.raises(ValueError) as error:
        wired(tmp_path, recipe("cpu"), rows)
    assert str(error.value) == (
        "train_dataset=<columns ['label', 'text']> holds rows of text and label; expected token ids. "
        "Call: read_rows(train_dataset, tokenizer, 'sequence-classification'), and pass its .train"
    )


LOAD = "Pass model=AutoModelForSequenceClassification.from_pretrained({}, **recipe.model_kwargs())"


@pytest.mark.parametrize(
    ("given_to_trainer", "kind", "message"),
    [
        (
            {},
            ValueError,
            "model=None leaves nothing to train; expected a loaded model, or model_init. " + LOAD.format("name"),
        ),
        (
            {"model": "bert-base-uncased"},
            TypeError,
            "model='bert-base-uncased' is a name; expected a loaded model. "
            + LOAD.format("'bert-base-uncased'")
            + ", or another class",
        ),
        (
            {"args": Precision("fp32", "any object")},
            TypeError,
            "args=<Precision> would replace the arguments of the recipe; expected a dict of fields. "
            'Pass training_arguments={"output_dir": "out", "learning_rate": 3e-5}',
        ),
        (
            {"learning_rate": 1e-4},
            TypeError,
            "learning_rate=0.0001 is a field of TrainingArguments; expected it in training_arguments. "
            'Pass training_arguments={"learning_rate": 0.0001}',
        ),
    ],
)
def test_what_the_trainer_is_not_given_right_is_named_first(given_to_trainer, kind, message) -> None:
    with pytest.raises(kind) as error:
        recipe("cpu").trainer(**given_to_trainer)
    assert str(error.value) == message


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(
        TypeError, match=r"^train_data=<list> is not a parameter of Trainer; .* Did you mean 'train_dataset'\?"
    ):
        recipe("cpu").trainer(train_data=[])


def test_a_causal_model_without_labels_learns_its_tokens_and_says_so(tmp_path) -> None:
    unlabelled = dataset().remove_columns("labels")
    trainer = wired(tmp_path, recipe("cpu"), unlabelled, model=tiny.llama(), training_arguments={"max_steps": 1})
    assert trainer.data_collator.causal_lm
    change = next(change for change in trainer.memopt_changes if change.name == "labels")
    assert (change.new, change.reason) == (
        "input_ids",
        "LlamaForCausalLM predicts tokens, and the data has no labels of its own",
    )
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize("model", [tiny.llama, tiny.bert])
def test_labels_of_the_data_or_another_model_leave_labels_alone(tmp_path, model) -> None:
    data = dataset() if model is tiny.llama else dataset().remove_columns("labels")
    if model is tiny.llama:
        data = data.map(lambda row: {"labels": row["input_ids"]})
    trainer = recipe("cpu").trainer(
        model=model(),
        train_dataset=data if model is tiny.llama else None,
        processing_class=tiny.tokenizer(),
        training_arguments={"output_dir": str(tmp_path), "use_cpu": True},
    )
    assert not trainer.data_collator.causal_lm
    assert "labels" not in [change.name for change in getattr(trainer, "memopt_changes", ())]


def test_a_model_of_images_needs_no_processing_class(tmp_path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, num_labels=3
    )
    images = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 3} for i in range(32)]
    model = transformers.ViTForImageClassification(config)
    trainer = wired(
        tmp_path, recipe("cpu"), images, model=model, processing_class=None, training_arguments={"max_steps": 1}
    )
    assert trainer.train().global_step == 1


def test_training_arguments_must_be_a_mapping(tmp_path) -> None:
    with pytest.raises(TypeError) as error:
        recipe("cpu").trainer(
            model=tiny.bert(), processing_class=tiny.tokenizer(), training_arguments=tiny.arguments(tmp_path)
        )
    assert str(error.value) == (
        "training_arguments=<TrainingArguments> is not a mapping; expected a dict of fields. "
        'Pass training_arguments={"output_dir": "out", "learning_rate": 3e-5}'
    )


def test_the_8_bit_names_are_those_that_stock_knows() -> None:
    names = {item.value for item in transformers.training_args.OptimizerNames if item.value.endswith("8bit")}
    other_makers = {"adamw_torch_8bit"} | {name for name in names if name.startswith("galore")}
    made = {name: callbacks_of(recipe("cpu"), name) for name in names}
    found = {name for name, own in made.items() if any(isinstance(one, EmbeddingBitsCallback) for one in own)}
    assert found == names - other_makers


# ---- Settings of a step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_step_settings_say_what_the_training_arguments_say(name, tmp_path) -> None:
    chosen = recipe(name)
    settings = chosen.step_settings()
    args = chosen.training_arguments(str(tmp_path), use_cpu=True, bf16=False)
    assert settings.precision == chosen.precision
    assert settings.optim == args.optim.value
    assert settings.gradient_accumulation_steps == args.gradient_accumulation_steps
    assert bool(settings.checkpointing) == versions.checkpointing_of(args)[0] == chosen.checkpointing
    assert settings.eval_batch_size == args.per_device_eval_batch_size
    assert settings.eval_accumulation_steps == args.eval_accumulation_steps
    assert settings.max_grad_norm == args.max_grad_norm
    assert settings.embedding_bits == chosen.embedding_bits
    assert settings.attn_implementation == chosen.attn_implementation == chosen.model_kwargs()["attn_implementation"]
    assert settings.weights_dtype == str(chosen.model_kwargs()["dtype"]).removeprefix("torch.")


def test_step_settings_freeze_by_the_function_of_the_real_run() -> None:
    frozen = Recipe("mine", "a test", freeze=("*embeddings*", "*layer.0.*"))
    settings = frozen.step_settings()
    assert (settings.freeze, settings.prepare) == (("*embeddings*", "*layer.0.*"), ())
    real = tiny.bert()
    freeze(real, ["*embeddings*", "*layer.0.*"])
    assert estimate(tiny.bert_config(), batch_size=2, seq_len=8, recipe=frozen).trainable_parameters == (
        trainable_parameters(real)
    )


def test_a_batch_above_the_effective_one_is_one_step() -> None:
    odd = Recipe("mine", "a test", effective_batch_size=4, per_device_train_batch_size=16)
    assert odd.step_settings().gradient_accumulation_steps == 1


def test_the_estimate_of_a_recipe_follows_its_frozen_parts() -> None:
    whole = Recipe("mine", "a test", per_device_train_batch_size=4, precision="fp32")
    frozen = whole.replace(freeze=("*embeddings*", "*layer.0.*"))
    sizes = {"batch_size": 4, "seq_len": 16}
    found = [estimate(tiny.bert_config(), **sizes, recipe=each) for each in (whole, frozen)]
    assert found[1].trainable_parameters < found[0].trainable_parameters
    assert found[1].components["optimizer state"] < found[0].components["optimizer state"]
