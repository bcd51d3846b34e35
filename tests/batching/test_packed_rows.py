"""Rows of fixed length that hold whole texts: packed by the slow rule, every token once, kept apart in any model."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from tables import refuses, table, whole
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput

import tiny
from hf_memopt import BucketedCollator, attach, bucketed, packed
from hf_memopt.training.binding import enable_checkpointing

ROW = 48
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)


def examples(count: int = 30, longest: int = 20) -> list[dict[str, Any]]:
    """Return texts of random tokens and lengths."""
    numbers = random.Random(0)
    lengths = (numbers.randint(2, longest) for _ in range(count))
    return [{"input_ids": [numbers.randint(5, 99) for _ in range(length)]} for length in lengths]


def labelled(count: int) -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in examples(count)]


def tokens_of(rows: Any) -> list[int]:
    return sorted(token for row in rows for text in row for token in text["input_ids"])


def slow_best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """The obvious rule: each text, the longest first, into the row with the least room that holds it."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(row_tokens)
        rooms[min(fitting, key=rooms.__getitem__) if fitting else -1] -= length
    return sorted(row_tokens - room for room in rooms)


def view_of(lengths: Any, row_tokens: int, **settings: Any) -> Any:
    """Return a packed view of texts of these lengths, whose tokens are (text, place)."""
    rows = [{"input_ids": [1000 * i + k for k in range(n)]} for i, n in enumerate(lengths)]
    return packed(rows, row_tokens, lengths=lengths, **settings)


@given(lengths=LENGTHS, row_tokens=st.integers(64, 300))
def test_rows_are_those_of_the_slow_rule(lengths, row_tokens):
    view = view_of(lengths, row_tokens)
    filled = sorted(sum(len(text["input_ids"]) for text in view[i]) for i in range(len(view)))
    assert filled == slow_best_fit(lengths, row_tokens)


@given(
    lengths=LENGTHS,
    row_tokens=st.integers(40, 90),
    world_size=st.integers(1, 4),
    too_long=st.sampled_from(["drop", "split"]),
    seed=st.integers(0, 3),
)
def test_every_token_is_in_exactly_one_row(lengths, row_tokens, world_size, too_long, seed):
    if too_long == "drop" and min(lengths) > row_tokens:
        return
    view = view_of(lengths, row_tokens, too_long=too_long, world_size=world_size, seed=seed)
    expected = [1000 * i + k for i, n in enumerate(lengths) if too_long == "split" or n <= row_tokens for k in range(n)]
    assert view.buckets.dropped == (0 if too_long == "split" else sum(n > row_tokens for n in lengths))
    for epoch in range(2):
        view.set_epoch(epoch)
        rows = [view[i] for i in range(len(view))]
        assert all(1 <= sum(len(text["input_ids"]) for text in row) <= row_tokens for row in rows)
        assert tokens_of(rows) == expected
        assert all(text["input_ids"] == sorted(text["input_ids"]) for row in rows for text in row)
        assert len(rows) % world_size == 0 or sum(map(len, rows)) < len(rows) + world_size  # too few texts


def test_texts_of_equal_length_trade_places_and_the_order_depends_on_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(1, 40, 500)

    def rows(epoch: int, seed: int = 0) -> list[tuple[int, ...]]:
        view = view_of(lengths, 100, seed=seed)
        view.set_epoch(epoch)
        return [tuple(sorted(text["input_ids"][0] for text in view[i])) for i in range(len(view))]

    assert rows(1) == rows(1)
    assert not set(rows(0)) & set(rows(1))
    assert not set(rows(0)) & set(rows(0, seed=1))


@pytest.mark.parametrize("spread", [0.6, 1.1])
def test_real_looking_lengths_fill_the_rows(spread):
    draws = np.random.default_rng(0).normal(np.log(300), spread, 50_000)
    lengths = np.clip(np.exp(draws), 1, 4096).astype(np.int32)
    rows = len(packed([{}] * len(lengths), 4096, lengths=lengths))
    assert lengths.sum() >= 0.999 * 4096 * rows


@pytest.mark.parametrize(
    ("row_tokens", "message"),
    [
        (8, whole("lengths[1]=9 exceeds")),
        (0, "row_tokens=0 is invalid; expected an integer of 1 or more. Pass row_tokens=32"),
    ],
)
def test_settings_that_no_row_holds_are_refused(row_tokens, message):
    refuses(ValueError, message, view_of, [3, 9], row_tokens)


@pytest.mark.parametrize("source", [list, Dataset.from_list], ids=["rows", "datasets"])
def test_a_view_reads_every_token_once(source):
    rows = examples()
    view = packed(source(rows), 16, too_long="split")
    assert tokens_of(view.__getitems__(range(len(view)))) == sorted(t for row in rows for t in row["input_ids"])
    assert sorted(set(view.indices_of(range(len(view))))) == list(range(len(rows)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [3, 3, 6]}, "lengths[1]=3 is not that of row 1"),
        ({"lengths": [3, 4, 6], "column": "tokens"}, "column='tokens' is not in row 0"),
    ],
)
def test_lengths_that_are_not_the_texts_are_refused_where_they_would_cut_them(settings, message):
    view = packed([{"input_ids": [5] * length} for length in (3, 4, 6)], 16, **settings)
    refuses(ValueError, whole(message), list, view)


def test_a_collated_row_begins_positions_anew_and_has_no_label_at_a_texts_first_token():
    view = packed([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], 9)
    batch = BucketedCollator(tiny.tokenizer(), causal_lm=True)([view[0]])
    texts = sorted(([5, 6, 7], [8, 9]), key=lambda text: text != view[0][0]["input_ids"])  # in any order
    assert {name: value.tolist()[0] for name, value in batch.items()} == {
        "input_ids": [*texts[0], *texts[1], *[tiny.tokenizer().pad_token_id] * 4],
        "position_ids": [*range(len(texts[0])), *range(len(texts[1])), 0, 1, 2, 0],
        "labels": [-100, *texts[0][1:], -100, *texts[1][1:], *[-100] * 4],
    }


def test_one_label_per_text_is_refused():
    row = packed([{"input_ids": [5, 6], "labels": 1}, {"input_ids": [8], "labels": 0}], 9)[0]
    values = {"name": "labels", "value": row[0]["labels"], "count": len(row[0]["input_ids"])}
    refuses(ValueError, whole("features[0][{name!r}]", **values), BucketedCollator(tiny.tokenizer()), [row])


@pytest.mark.parametrize(("name", "value"), [("input_ids", [5, 0, 0]), ("attention_mask", [1, 1, 0])])
def test_texts_that_were_padded_before_are_refused(name, value):
    row = packed([{"input_ids": [5, 6, 0], name: value}], 9)[0]
    message = whole("features[0][{name!r}]", name=name, value=value, count=3)
    refuses(ValueError, message, BucketedCollator(tiny.tokenizer()), [row])


SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "dropout": 0.0}
DECODERS = dict(table("batching/tables/decoders"))
ENCODERS = dict(table("batching/tables/encoders"))
REFUSED = dict(table("batching/tables/refused_models"))
OF_23 = Version(transformers.__version__) >= Version("5.23")  # 5.17 cuts Llama 4's chunks by the row, not by the text
OF_24 = Version(transformers.__version__) >= Version("5.24")  # where ALiBi of Falcon goes by the positions of a text

LEAKS_IN_STOCK = {"opt", "biogpt", "gpt_oss", *ENCODERS}


def tiny_model(name: str) -> Any:
    """Return a tiny language model of a type, without dropout."""
    own = {**DECODERS, **ENCODERS, **REFUSED}[name]
    known = transformers.AutoConfig.for_model(name)
    settable = {key for key in dir(known) if not isinstance(getattr(type(known), key, None), property)}
    taken = {key: value for key, value in {**SIZES, **NO_DROPOUT}.items() if key in settable}
    config = transformers.AutoConfig.for_model(name, **{**taken, **own})
    masked = {*ENCODERS, "deberta-v2", "fnet", "funnel", "convbert", "mpnet", "layoutlm"}
    kind = transformers.AutoModelForMaskedLM if name in masked else None
    kind = kind or (transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that are not installed
        return kind.from_config(config, attn_implementation=own.get("attn"))


def make_trainer(folder: Any, model: Any, dataset: Any, collator: Any = None, **settings: Any) -> Trainer:
    args = tiny.arguments(folder, **{"per_device_train_batch_size": 1, **settings})
    collator = collator or BucketedCollator(tiny.tokenizer(), causal_lm=True)
    return Trainer(model, args, train_dataset=dataset, data_collator=collator)


FAMILIES = [*DECODERS, *ENCODERS]
DEFAULT = {"llama", "gemma3_text", "gpt2", "opt", "gpt_oss", "llama4_text", "bert", "roberta", "modernbert"}


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_packed_texts_have_the_losses_and_gradients_of_each_alone(name, tmp_path):
    """The slow reference: every text in a row of its own; in float64 sums in another order differ by 1e-12 at most, and
    norms, routers and eager attention that stock computes in float32 by 1e-6.
    """
    texts = labelled(9)
    model = tiny_model(name).double()
    if DECODERS.get(name, {}).get("num_experts"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    collator = BucketedCollator(tiny.tokenizer())
    view = packed(texts, ROW)
    if name == "llama4_text" and not OF_23:
        with pytest.raises(ValueError, match="does not compute what it computes for a text alone"):
            attach(make_trainer(tmp_path, model, view, collator))
        return
    trainer = attach(make_trainer(tmp_path, model, view, collator))
    model.eval()
    row = {key: value for key, value in collator([view[0]]).items() if key != "labels"}

    def total(batches: list[dict[str, Any]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        sum_of_losses = 0.0
        for batch in batches:
            labels = batch.pop("labels")
            logits = model(**batch).logits
            if name in DECODERS:
                logits, labels = logits[:, :-1], labels[:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()
            sum_of_losses += float(loss.detach())
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return sum_of_losses, torch.cat(gradients).clone()

    whole = total([collator([view[i] for i in range(len(view))])])
    with torch.no_grad():
        packed_logits = model(**row).logits
        trainer.memopt_handle.remove()
        leak = (model(**row).logits - packed_logits).norm() / packed_logits.norm()
    assert (leak > 1e-3) == (name in LEAKS_IN_STOCK)
    alone = total([{name: torch.tensor([values]) for name, values in text.items()} for text in texts])
    limit = 1e-12 if name in {"llama", "gpt2", "bert", "roberta", "opt"} else 1e-6
    assert whole[0] == pytest.approx(alone[0], rel=limit)
    assert (whole[1] - alone[1]).norm() <= limit * alone[1].norm()


def test_the_docs_say_which_models_are_which():
    text = (Path(__file__).parents[2] / "docs" / "cut-padding.md").read_text(encoding="utf-8")
    rows = [
        set(re.findall(r"`([\w-]+)`", row.split("|")[2]))
        for row in re.findall(r"^\| .*`(?:llama|opt|mamba)`.*$", text, re.M)
    ]
    assert rows == [{*FAMILIES} - LEAKS_IN_STOCK, LEAKS_IN_STOCK, {*REFUSED}]


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_texts_cannot_be_kept_apart_are_refused_by_name(name, tmp_path):
    texts = labelled(9)
    model = tiny_model(name)
    if name == "falcon" and OF_24:
        attach(make_trainer(tmp_path, model, packed(texts, ROW), BucketedCollator(tiny.tokenizer())))
        return
    with pytest.raises(ValueError) as error:
        attach(make_trainer(tmp_path, model, packed(texts, ROW), BucketedCollator(tiny.tokenizer())))
    assert str(error.value).startswith("packed(...) joins texts into one row, ")
    assert type(model).__name__ in str(error.value) or name == "t5"
    assert "Train on padded rows: bucketed(dataset, batch_size=...) and BucketedCollator(tokenizer" in str(error.value)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_training_packed_rows_is_training_the_texts(name, tmp_path):
    """An epoch of one optimizer step, packed and each text in a row of its own: 1e-12 is rounding in another order."""
    texts = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in (row["input_ids"] for row in examples())]
    found = []
    for way in ("packed", "padded"):
        model = tiny_model(name).double()
        before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
        view = packed(texts, ROW) if way == "packed" else bucketed(texts, batch_size=1)
        trainer = make_trainer(tmp_path, model, view, gradient_accumulation_steps=64)
        attach(trainer).train()
        assert trainer.state.global_step == 1
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        found.append((after - before, trainer.state.log_history[-1]["train_loss"]))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)  # losses are logged in float32
    assert (found[0][0] - found[1][0]).norm() <= 1e-12 * found[0][0].norm()
    assert found[0][0].norm() > 1e-4


def test_a_leak_that_appears_later_stops_the_run_at_its_first_batch(tmp_path):
    model = tiny.llama()
    trainer = attach(make_trainer(tmp_path, model, packed(examples(), ROW)))
    model.set_attn_implementation("eager")  # stock's masks: apart, too
    trainer.train()
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
    with pytest.raises(ValueError, match=r"of a row of the first batch see other texts of it in LlamaForCausalLM"):
        trainer.train()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_looked_at_too(reentrant, tmp_path):
    model = tiny.llama()
    enable_checkpointing(model, {"use_reentrant": reentrant})
    attach(make_trainer(tmp_path, model, packed(examples(), ROW))).train()


def test_a_resumed_run_is_the_straight_one(tmp_path):
    def run(folder: Any, checkpoint: str | None = None) -> Any:
        view = packed(Dataset.from_list(examples()), ROW)
        settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = attach(make_trainer(folder, tiny.llama(), view, **settings))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    straight = run(tmp_path / "straight")
    step = straight.state.max_steps // 2 // 2 * 2
    resumed = run(tmp_path / "resumed", str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert tiny.largest_difference(straight.model, resumed.model) == 0.0


def train_and_note(folder: Path, rows: Any) -> list[list[int]]:
    """Train for an epoch; return the ids of every row that this process was given."""
    model, seen = tiny.llama(), []
    settings = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    trainer = make_trainer(folder, model, packed(rows, ROW), **settings)

    def see(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        if module.training and "loss" in output:
            seen.append(kwargs["input_ids"][0].tolist())

    model.register_forward_hook(see, with_kwargs=True)
    attach(trainer).train()
    return seen


@pytest.mark.slow
def test_two_processes_share_the_rows(tmp_path):
    from two_ranks import run_pair

    first, second = run_pair(tmp_path, __file__, str(tmp_path))
    assert len(first) == len(second)
    pad = tiny.tokenizer().pad_token_id
    real = sorted(token for row in (*first, *second) for token in row if token != pad)
    assert real == sorted(token for row in examples(60) for token in row["input_ids"])
    assert all(len(row) == ROW for row in (*first, *second))


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    (folder / f"rank{rank}.json").write_text(json.dumps(train_and_note(folder, examples(60))))


def test_examples_that_are_left_out_are_told(caplog):
    rows = [{"input_ids": [5] * length} for length in (3, 9, 12, 4)]
    with caplog.at_level("WARNING", logger="hf_memopt"):
        packed(rows, 8, too_long="drop")
        bucketed(rows, max_tokens=8, too_long="drop")
        packed(rows, 12, too_long="drop")
    assert caplog.messages == ["2 of 4 examples are too long and left out"] * 2


def test_rows_that_no_trainer_is_attached_to_are_told_of_once(tmp_path, caplog):
    rows = labelled(8)
    collator = BucketedCollator(tiny.tokenizer())
    source = packed(rows, 24)
    with caplog.at_level("WARNING", logger="hf_memopt"):
        collator([source[0]])
        collator([source[0]])
    assert [text.partition(":")[0] for text in caplog.messages] == [
        "rows of packed(...) are read without attach(trainer)"
    ]
    caplog.clear()
    trainer = attach(make_trainer(tmp_path, tiny.llama(), source, BucketedCollator(tiny.tokenizer()), max_steps=1))
    next(iter(trainer.get_train_dataloader()))
    assert caplog.messages == []


class Calling(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        return super().forward(input_ids, position_ids=position_ids, labels=labels, **given)


class Shifting(transformers.LlamaForCausalLM):
    shift = 1

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, position_ids=position_ids).last_hidden_state)
        return CausalLMOutput(labels if labels is None else self.compared(logits, labels), logits)

    def compared(self, logits: Any, labels: Any) -> Any:
        shown = logits[:, : logits.shape[1] - self.shift].flatten(0, 1)
        return torch.nn.functional.cross_entropy(shown, labels[:, self.shift :].flatten())


class Tagging(Shifting):
    shift = 0


class OverStates(transformers.LlamaForCausalLM):
    """A tagger that takes hidden states from the language model, and keeps the labels to itself."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        found = super().forward(input_ids, position_ids=position_ids, **given)
        loss = (
            None if labels is None else torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        )
        return CausalLMOutput(loss, found.logits)


def llava() -> Any:
    seen = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32}
    images = transformers.CLIPVisionConfig(hidden_size=32, patch_size=16, **seen)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=images, text_config=tiny.llama_config())
    )


@pytest.mark.parametrize(
    ("make", "is_left_out"),
    [
        (lambda: type("Mine", (transformers.LlamaForCausalLM,), {})(tiny.llama_config()), True),
        (lambda: Calling(tiny.llama_config()), True),
        (llava, True),
        (lambda: Tagging(tiny.llama_config()), False),
        (lambda: OverStates(tiny.llama_config()), False),
    ],
)
def test_a_text_keeps_its_first_label_only_where_the_loss_does_not_shift(make, is_left_out, tmp_path):
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]} for _ in range(8)]
    trainer = make_trainer(tmp_path, make(), packed(rows, 12), BucketedCollator(tiny.tokenizer()))
    batch = next(iter(attach(trainer).get_train_dataloader()))
    assert set(batch["labels"][batch["position_ids"] == 0].tolist()) == {-100 if is_left_out else 5}


def test_a_loss_of_ones_own_that_shifts_is_found_and_named(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]} for _ in range(8)]
    for causal_lm in (False, True):
        collator = BucketedCollator(tiny.tokenizer(), causal_lm=causal_lm)
        trainer = make_trainer(tmp_path, Shifting(tiny.llama_config()), packed(rows, 12), collator)
        if causal_lm:
            batch = next(iter(attach(trainer).get_train_dataloader()))
            assert set(batch["labels"][batch["position_ids"] == 0].tolist()) == {-100}
        else:
            message = "which the loss of Shifting compares with what the text before predicts; expected none. Pass Buck"
            with pytest.raises(ValueError, match=re.escape(message)):
                attach(trainer)
