"""Recipes and presets: what they become, what overriding one value does to the others, and that they are data.

What is refused is in ``refused_recipes.txt``.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
import transformers
from datasets import Dataset
from five_lines import trainer_of
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow_except
from tables import refuses

import tiny
from hf_memopt import (
    PRESETS,
    EmbeddingBitsCallback,
    FreezeCallback,
    MemoryReportCallback,
    MicrobatchCallback,
    PrecisionCallback,
    Recipe,
    preset,
    read_memory,
    recipe,
)
from hf_memopt.training.binding import versions
from hf_memopt.training.devices import GPUS, choose_precision
from hf_memopt.types import StepSettings

NAMES = ["4gb-gpu", "6gb-gpu", "8gb-gpu", "12gb-gpu", "16gb-gpu", "24gb-gpu", "40gb-gpu", "80gb-gpu", "cpu"]
PAGED_ON_CPU = "ignore:Paged optimizers are not supported on CPU:UserWarning"  # bitsandbytes 0.50 says so once


def dataset(count: int = 16) -> Dataset:
    lengths = [4 + (7 * i) % 17 for i in range(count)]
    return Dataset.from_list(
        [{"input_ids": [5 + (i * j) % 90 for j in range(n)], "labels": i % 3} for i, n in enumerate(lengths)]
    )


# ---- Presets


def test_all_nine_names_are_there_and_literal() -> None:
    assert [(name, type(value), value.name) for name, value in PRESETS.items()] == [(n, Recipe, n) for n in NAMES]
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
@pytest.mark.parametrize("name", slow_except(("4gb-gpu", "cpu"), NAMES))
def test_every_preset_trains_through_the_stock_trainer(name, tmp_path) -> None:
    quiet = {"output_dir": str(tmp_path), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    quiet |= {"max_steps": 1, "dataloader_num_workers": 0}
    trainer = trainer_of(
        recipe(name),
        model=tiny.bert(),
        train_dataset=dataset(40),
        processing_class=tiny.tokenizer(),
        training_arguments=quiet,
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


@pytest.mark.parametrize(
    ("gib", "chosen"),
    [(2.0, "4gb-gpu"), (3.9, "4gb-gpu"), (5.8, "6gb-gpu"), (7.6, "8gb-gpu"), (14.3, "12gb-gpu"), (14.8, "16gb-gpu"),
     (23.6, "24gb-gpu"), (39.4, "40gb-gpu"), (79.1, "80gb-gpu"), (140.0, "80gb-gpu")],
)  # fmt: skip
def test_auto_takes_the_largest_preset_that_the_card_covers(monkeypatch, gib, chosen) -> None:
    gpu = replace(read_memory("cpu"), device="cuda:0", device_name="some GPU", device_total_bytes=round(gib * 2**30))
    monkeypatch.setattr("hf_memopt.training.devices.readings.read_memory", lambda: gpu)
    found = recipe("auto")
    assert found.name == chosen
    assert "memory not yet measured on a GPU" in found.purpose
    assert found.purpose.startswith(f"chosen by recipe('auto') for some GPU with {gib:.2f} GiB: ")
    assert found.replace(purpose="") == PRESETS[chosen].replace(purpose="")
    on_mac = replace(gpu, device="mps")
    monkeypatch.setattr("hf_memopt.training.devices.readings.read_memory", lambda: on_mac)
    has_8_bit = PRESETS[chosen].optim.endswith("8bit")  # which bitsandbytes does not support there
    assert recipe("auto").optim == ("adamw_torch" if has_8_bit else PRESETS[chosen].optim)
    assert recipe("auto").reason_of("optim").startswith("bitsandbytes, which") is has_8_bit
    monkeypatch.setattr(
        "hf_memopt.training.devices.readings.read_memory", lambda: replace(gpu, device_total_bytes=None)
    )
    assert recipe("auto").name == "cpu"


def test_auto_takes_the_preset_of_the_size_that_a_card_is_sold_with(monkeypatch) -> None:
    sizes = {name: int(name.removesuffix("gb-gpu")) for name in NAMES if name != "cpu"}
    for card in GPUS.values():
        reading = replace(read_memory("cpu"), device_name=card.name, device_total_bytes=card.usable_bytes)
        monkeypatch.setattr("hf_memopt.training.devices.readings.read_memory", lambda reading=reading: reading)
        largest = max(gib for gib in sizes.values() if gib <= max(card.memory_bytes // 2**30, 4))
        assert sizes[recipe("auto").name] == largest, card.name


# ---- One override re-derives the others


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
    why = "keeps 32 examples per optimizer step on 1 process"
    expected = f"per_device_train_batch_size x gradient_accumulation_steps: (8, 4) -> (4, 8) ({why})"
    assert str(recipe("4gb-gpu").changes(per_device_train_batch_size=4)[-1]) == expected


def test_what_is_not_given_follows() -> None:
    given_steps = preset("4gb-gpu", "out", gradient_accumulation_steps=16)
    assert (given_steps.per_device_train_batch_size, given_steps.gradient_accumulation_steps) == (2, 16)
    smaller = preset("4gb-gpu", "out", effective_batch_size=20)  # with the largest pass that divides it
    assert (smaller.per_device_train_batch_size, smaller.gradient_accumulation_steps) == (5, 4)
    odd = Recipe("mine", "a test", effective_batch_size=4, per_device_train_batch_size=16)
    assert odd.step_settings().gradient_accumulation_steps == 1


def test_processes_share_the_effective_batch(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    [change] = [c for c in recipe("40gb-gpu").changes() if c.name.startswith("per_device")]
    assert (change.old, change.new) == ((32, 1), (16, 1))
    assert change.reason == "keeps 32 examples per optimizer step on 2 processes"
    message = (
        "WORLD_SIZE=2 on 2 processes does not divide the effective batch of 5; expected a divisor. "
        "Pass effective_batch_size=4"
    )
    refuses(ValueError, message, recipe("40gb-gpu").changes, effective_batch_size=5)


def test_a_file_in_place_of_the_output_folder_is_refused(tmp_path) -> None:
    path = tmp_path / "taken"
    path.write_text("something", encoding="utf-8")
    message = f"output_dir={str(path)!r} is a file; expected a folder or a new path. Pass another output_dir"
    refuses(NotADirectoryError, message, preset, "cpu", output_dir=str(path))
    assert path.read_text(encoding="utf-8") == "something"


def test_precision_follows_the_card_and_says_why(monkeypatch) -> None:
    made_up = replace(choose_precision(), name="fp32", reason="a made-up GPU")
    monkeypatch.setattr("hf_memopt.training.devices.choose_precision", lambda **_: made_up)
    [change] = [c for c in recipe("16gb-gpu").changes() if c.name == "precision"]
    assert str(change) == "precision: 'auto' -> 'fp32' (a made-up GPU)"


def test_tf32_is_used_where_the_machine_has_it(monkeypatch, tmp_path) -> None:
    chosen = Recipe("mine", "a test", precision="tf32")
    assert chosen.step_settings().precision == "tf32"
    assert chosen.training_arguments(str(tmp_path)).tf32 is None
    [change] = [c for c in chosen.changes() if c.name == "precision"]
    assert str(change).startswith("precision: 'tf32' -> 'fp32' (this machine has no TF32")
    monkeypatch.setattr("transformers.utils.import_utils.is_torch_tf32_available", lambda: True)
    assert not [c for c in chosen.changes() if c.name == "precision"]


def test_checkpointing_of_some_layers_is_stocks_own(tmp_path) -> None:
    chosen = Recipe("mine", "a test", checkpointing=True, every_n_layers=2)
    assert chosen.step_settings().checkpointing == {"every_n_layers": 2}
    if versions.can_offload_checkpoints():
        args = chosen.training_arguments(str(tmp_path))
        assert versions.checkpointing_of(args) == (True, {"use_reentrant": False, "every_n_layers": 2})

        for asked in ({"gradient_checkpointing": True}, {"gradient_checkpointing_kwargs": '{"use_reentrant": true}'}):
            options = versions.checkpointing_of(chosen.training_arguments(str(tmp_path), **asked))[1]
            assert options == {"use_reentrant": "gradient_checkpointing" not in asked, "every_n_layers": 2}
    prefix = "activation" if hasattr(preset("cpu", "out"), "activation_checkpointing") else "gradient"
    switched_off = preset("4gb-gpu", "out", **{f"{prefix}_checkpointing": False})
    assert [versions.checkpointing_of(one)[0] for one in (preset("4gb-gpu", "out"), switched_off)] == [True, False]


def test_expandable_segments_are_asked_for_before_cuda_starts(monkeypatch, tmp_path) -> None:
    asked = []
    monkeypatch.setattr("hf_memopt.training.techniques.use_expandable_segments", lambda: asked.append(1))
    chosen = Recipe("mine", "a test", expandable_segments=True)
    assert chosen.step_settings().expandable_segments
    chosen.training_arguments(str(tmp_path))
    assert asked == []  # there is no GPU
    monkeypatch.setattr("hf_memopt.training.devices.accelerator_type", lambda: "cuda")
    chosen.model_kwargs()
    assert asked == [1]


# ---- The recipe as data


@pytest.mark.parametrize(
    "chosen",
    [
        *PRESETS.values(),
        Recipe("m", "a test", lora=8, lora_alpha=32, lora_targets=["q_proj", "v_proj"], load_in="nf4"),
        Recipe("m", "a test", freeze=["a", "b"], checkpointing=True, offload=True),
    ],
)
def test_json_round_trip(chosen) -> None:
    read = Recipe.from_json(chosen.to_json())
    assert read == chosen
    assert hash(read) == hash(chosen)
    assert all(isinstance(one, str | tuple) for one in (read.lora_targets, read.freeze))
    known = {"name": chosen.name, "purpose": chosen.purpose}  # a recipe of an earlier version has fewer fields
    assert Recipe.from_json(json.dumps(known)) == Recipe(**known)


def test_recipes_are_frozen_hashable_and_replaced() -> None:
    with pytest.raises(FrozenInstanceError):
        PRESETS["cpu"].optim = "sgd"  # type: ignore[misc]
    changed = PRESETS["4gb-gpu"].replace(optim="sgd")
    assert changed.optim == "sgd"
    assert "optim                        'sgd'                 chosen by the caller" in str(changed)
    assert PRESETS["4gb-gpu"].optim == "paged_adamw_8bit"
    assert len({PRESETS["cpu"], PRESETS["cpu"].replace()}) == 1


def test_model_kwargs_ask_for_float32_weights(tmp_path) -> None:
    tiny.bert().to(torch.bfloat16).save_pretrained(tmp_path)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    loaded = load(tmp_path, **recipe("4gb-gpu").model_kwargs())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.config._attn_implementation == "sdpa"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(vocab_size=9, **sizes)).save_pretrained(tmp_path)
    other = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, **recipe("4gb-gpu").model_kwargs())
    assert other.config._attn_implementation == "eager"  # it has no other


def test_callbacks_follow_the_fields() -> None:
    kinds = [type(callback) for callback in recipe("4gb-gpu").callbacks()]
    assert kinds == [PrecisionCallback, EmbeddingBitsCallback, MicrobatchCallback, MemoryReportCallback]
    assert [recipe(name).callbacks()[0].autocast_cache for name in ("4gb-gpu", "cpu")] == [False, True]
    assert [type(c) for c in recipe("cpu").callbacks()] == [PrecisionCallback, MicrobatchCallback, MemoryReportCallback]
    least = recipe("cpu").replace(freeze=("embeddings",), micro_batching=False, memory_report=False)
    assert [type(c) for c in least.callbacks()] == [FreezeCallback, PrecisionCallback]


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
    keywords = chosen.model_kwargs()
    assert settings.attn_implementation == chosen.attn_implementation == keywords.get("attn_implementation", "sdpa")
    assert settings.weights_dtype == str(keywords["dtype"]).removeprefix("torch.")


def test_step_settings_have_every_field_that_they_share_with_a_recipe() -> None:
    plain = Recipe("plain", "a test")
    shared = {item.name for item in fields(Recipe)} & {item.name for item in fields(StepSettings)}
    chosen = plain.replace(lora=8, lora_targets=("q_proj",), load_in="nf4", weights_dtype="bfloat16", precision="bf16")
    settings = chosen.step_settings()
    assert all(getattr(settings, name) == getattr(chosen, name) for name in shared - {"checkpointing"})
    assert plain.replace(checkpointing=True, offload=True).step_settings().checkpointing == {"offload": True}
    released = plain.replace(gradient_release=True, per_device_train_batch_size=8).step_settings()
    assert (released.max_grad_norm, released.gradient_accumulation_steps) == (0, 1)
