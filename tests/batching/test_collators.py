"""Collators: every column against a slow reference, labels, whole batches, copies and workers, the stock Trainer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from collated_rows import (
    LOSS_TOLERANCE,
    PAD,
    SEP,
    as_kind,
    assert_same,
    bart,
    bert,
    ids_of,
    llama,
    reference,
    t5,
    tokenized,
)
from hypothesis import given
from hypothesis import strategies as st
from tables import refuses, table, whole
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, default_data_collator

import tiny
from hf_memopt import BucketedCollator


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [8, 1, None])
def test_every_column_matches_the_slow_reference(kind, side, multiple, monkeypatch):
    lengths = [3, 7, 1]
    special = [[1] + [0] * (n - 1) for n in lengths]
    types = [[1] * n for n in lengths]
    offsets = [[(i, i + 2) for i in range(n)] for n in lengths]
    weights = [[0.5] * n for n in lengths]
    decoder = [[9, 8, 7], [6], [5, 5]]  # padded on the right with any tokenizer
    rows = tokenized(
        lengths,
        decoder_input_ids=decoder,
        decoder_attention_mask=[[1] * len(ids) for ids in decoder],
        special_tokens_mask=special,
        token_type_ids=types,
        offset_mapping=offsets,
        weights=weights,
        score=[0.25, 1.0, -2.0],
        index=[7, 8, 9],
        features=[[1.0, 2.0]] * 3,
    )
    tokenizer = tiny.tokenizer(side)
    monkeypatch.setattr(type(tokenizer), "pad_token_type_id", 3)  # XLNet's
    batch = BucketedCollator(tokenizer, pad_to_multiple_of=multiple)(as_kind(rows, kind))

    def expected(cells, value):
        return torch.tensor(reference(cells, value, side=side, multiple=multiple or 1))

    assert type(batch) is dict
    assert_same(
        batch,
        {
            "input_ids": expected(ids_of(lengths), PAD),
            "attention_mask": expected([[1] * n for n in lengths], 0),
            "token_type_ids": expected(types, 3),
            "special_tokens_mask": expected(special, 1),
            "offset_mapping": expected(offsets, (0, 0)),
            "weights": expected(weights, 0.0),
            "decoder_input_ids": torch.tensor(reference(decoder, PAD, multiple=multiple or 1)),
            "decoder_attention_mask": torch.tensor(
                reference([[1] * len(ids) for ids in decoder], 0, multiple=multiple or 1)
            ),
            "score": torch.tensor([0.25, 1.0, -2.0]),
            "index": torch.tensor([7, 8, 9]),
            "features": torch.tensor([[1.0, 2.0]] * 3),
        },
    )


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), side=st.sampled_from(["right", "left"]))
def test_ids_and_the_mask_made_from_lengths_match_the_slow_reference(lengths, side):
    ids = ids_of(lengths)
    batch = BucketedCollator(tiny.tokenizer(side))([{"input_ids": row} for row in ids])
    assert batch["input_ids"].tolist() == reference(ids, PAD, side=side)
    assert batch["attention_mask"].tolist() == reference([[1] * n for n in lengths], 0, side=side)
    assert {column.dtype for column in batch.values()} == {torch.int64}


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_row_without_tokens_leaves_the_causal_loss_of_the_others_alone(side):
    collator = BucketedCollator(tiny.tokenizer(side), causal_lm=True)
    model = tiny.llama().eval()
    rows = [{"input_ids": row} for row in ids_of([6, 9])]
    with torch.no_grad():
        alone, among = model(**collator(rows)).loss, model(**collator([*rows, {"input_ids": []}])).loss
    assert abs(alone - among) < LOSS_TOLERANCE


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        pytest.param([2, 0], torch.tensor([2, 0]), id="class"),
        pytest.param([True, False], torch.tensor([1, 0]), id="bool class"),
        pytest.param([0.5, 2.0], torch.tensor([0.5, 2.0]), id="regression"),
        pytest.param([[1.0, 0.0], [0.0, 1.0]], torch.tensor([[1.0, 0.0], [0.0, 1.0]]), id="multi-label"),
        pytest.param([[True, False], [False, False]], torch.tensor([[1.0, 0.0], [0.0, 0.0]]), id="multi-hot"),
        pytest.param([[1, 2], [1, 2, 0]], torch.tensor([[-100, -100, 1, 2], [-100, 1, 2, 0]]), id="token, left"),
        pytest.param([[4, 5, 6], [7]], torch.tensor([[4, 5, 6, -100], [7, -100, -100, -100]]), id="decoder, right"),
    ],
)
def test_labels_are_told_by_their_shape(name, kind, cells, expected):
    rows = as_kind(tokenized([2, 3], **{name: cells}), kind)
    batch = BucketedCollator(tiny.tokenizer("left"), pad_to_multiple_of=4)(rows)
    assert [key for key in batch if "label" in key] == ["labels"]
    assert batch["labels"].dtype == expected.dtype
    assert torch.equal(batch["labels"], expected)
    other = BucketedCollator(tiny.tokenizer("left"), pad_to_multiple_of=4, label_pad_token_id=-1)(rows)["labels"]
    assert torch.equal(other, expected.where(expected != -100, -1))


def test_a_model_without_decoder_stacks_int_vectors_of_one_size():
    collator = BucketedCollator(tiny.tokenizer(), model=tiny.bert())
    assert collator(tokenized([4, 5], labels=[[1, 2], [3, 0]]))["labels"].tolist() == [[1, 2], [3, 0]]


def test_a_causal_label_survives_where_the_pad_token_is_the_end_of_text_token():
    tokenizer = tiny.tokenizer(pad_token="[SEP]", eos_token="[SEP]")
    rows = [{"input_ids": [5, 6, SEP]}, {"input_ids": [7, SEP]}]
    ours = BucketedCollator(tokenizer, causal_lm=True, pad_to_multiple_of=None)(rows)
    stock = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert ours["labels"].tolist() == [[5, 6, SEP], [7, SEP, -100]]
    assert stock["labels"].tolist() == [[5, 6, -100], [7, -100, -100]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_pad_tokens_at_the_ends_of_rows_without_a_mask_are_padding(side):
    tokenizer, ids = tiny.tokenizer(side), [[5, PAD, 6, 7], [8, 9], [5]]
    padded = [{"input_ids": row} for row in reference(ids, PAD, side=side)]
    ours, stock = (
        collate(padded)
        for collate in (
            BucketedCollator(tokenizer, causal_lm=True),
            DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
    )
    assert ours["attention_mask"].tolist() == reference([[1] * len(row) for row in ids], 0, side=side)
    assert [(row != -100).sum().item() for row in ours["labels"]] == ([4, 2, 1] if side == "right" else [3, 1, 0])
    if side == "right":
        assert ours["labels"].where(ours["input_ids"] != PAD, -100).equal(stock["labels"])


def test_causal_labels_leave_out_what_the_data_itself_masks_and_labels_of_the_data_win():
    collator = BucketedCollator(tiny.tokenizer(), causal_lm=True, pad_to_multiple_of=None)
    padded = {"input_ids": [5, 6, PAD], "attention_mask": [1, 1, 0], "special_tokens_mask": [0, 0, 1]}
    padded["offset_mapping"] = [(0, 1), (2, 3), (0, 0)]
    assert collator([padded])["labels"].tolist() == [[5, 6, -100]]
    assert sorted(collator([padded])) == ["attention_mask", "input_ids", "labels"]
    assert collator([{**padded, "labels": [-100, 6, -100]}])["labels"].tolist() == [[-100, 6, -100]]
    assert collator([{**padded, "label": 1}])["labels"].tolist() == [[5, 6, -100]]  # of a classification


def test_bucketed_collator_splices_whole_batches_between_single_examples():
    rows = tokenized([2, 9, 4, 1], labels=[0, 1, 2, 0])
    collator = BucketedCollator(tiny.tokenizer())
    expected = BucketedCollator(tiny.tokenizer())(rows)
    assert_same(collator(rows), expected)
    assert_same(collator([rows]), expected)
    assert_same(collator([rows[0], tuple(rows[1:3]), [], [rows[3]]]), expected)


def test_the_tokenizer_of_inner_shows_so_that_the_trainer_can_save_it():
    tokenizer = tiny.tokenizer()
    assert BucketedCollator(inner=DataCollatorWithPadding(tokenizer)).tokenizer is tokenizer
    assert BucketedCollator(inner=default_data_collator).tokenizer is None


@pytest.mark.parametrize(
    "collator",
    [
        BucketedCollator(tiny.tokenizer("left"), causal_lm=True, position_ids=True),
        BucketedCollator(tiny.tokenizer(), mlm_probability=0.5),
        BucketedCollator(inner=DataCollatorWithPadding(tiny.tokenizer())),
    ],
    ids=["causal", "masked", "inner"],
)
def test_pickled_and_copied_collators_give_the_same_batch(collator):
    rows = tokenized([3, 5])
    batches = []
    for twin in (collator, pickle.loads(pickle.dumps(collator)), copy.deepcopy(collator)):
        torch.manual_seed(0)
        batches.append(twin(rows))
    assert_same(batches[1], dict(batches[0]))
    assert_same(batches[2], dict(batches[0]))


@pytest.mark.parametrize("build", [t5, bart])
def test_a_pickled_collator_carries_no_weights_of_its_model(build):
    plain = BucketedCollator(tiny.tokenizer())
    adapted = BucketedCollator(tiny.tokenizer(), model=build())
    weights = sum(parameter.nbytes for parameter in build().parameters())
    assert len(pickle.dumps(adapted)) - len(pickle.dumps(plain)) < weights / 10
    rows = tokenized([3], labels=[[5, 6]])
    assert_same(pickle.loads(pickle.dumps(adapted))(rows), adapted(rows))


@pytest.mark.parametrize("build", [t5, bart])
def test_label_smoothing_trains_an_encoder_decoder_in_the_stock_trainer(build, tmp_path):
    rows = [{"input_ids": row, "labels": target} for row, target in zip(ids_of([4, 7]), ids_of([3, 2], 1), strict=True)]
    model = copy.deepcopy(build())
    collator = BucketedCollator(tiny.tokenizer(), model=model)
    smoothing = {"label_smoothing_factor": 0.1, "per_device_train_batch_size": 2}
    tiny.train(model, rows, tmp_path, trainer_data_collator=collator, **smoothing)
    assert tiny.largest_difference(model, build()) > 1e-6


ROW = {"input_ids": [5, 6]}
BAD_FEATURES = [
    *table("batching/tables/refused_rows"),
    ([{"input_ids": np.array([5.0])}], whole("features[0]['input_ids']=array")),
]


@pytest.mark.parametrize(("features", "message"), BAD_FEATURES, ids=[str(features) for features, _ in BAD_FEATURES])
def test_bad_rows_are_named_with_column_row_and_fix(features, message):
    refuses((TypeError, ValueError), message, BucketedCollator(tiny.tokenizer()), features)


INNER = "expected inner= alone. Set it on the inner collator, or leave inner out."
BAD_SETTINGS = [
    *table("batching/tables/refused_settings_of_collators"),
    *[
        (
            {"inner": default_data_collator, **given},
            f"inner=default_data_collator pads by itself, so {', '.join(given)} would be ignored; {INNER}",
        )
        for given in ({"mlm_probability": 0.15}, {"causal_lm": True, "position_ids": True})
    ],
    (
        {"tokenizer": tiny.tokenizer(pad_token=None)},
        whole("tokenizer={name} has", name=type(tiny.tokenizer()).__name__),
    ),
    (
        {"tokenizer": tiny.tokenizer(mask_token=None), "mlm_probability": 0.15},
        whole("mlm_probability=0.15 needs", name=type(tiny.tokenizer()).__name__),
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=range(len(BAD_SETTINGS)))
def test_bad_settings_are_refused_at_construction(settings, message):
    refuses((TypeError, ValueError), message, BucketedCollator, **{"tokenizer": tiny.tokenizer(), **settings})


BAD_LABELS: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    (
        {"model": bert("TokenClassification", num_labels=3)},
        tokenized([2, 3], label=[[1, 0], [1, 1, 0, 0]]),
        whole("features[1]['label']"),
    ),
    ({"mlm_probability": 0.15}, [{**ROW, "label": 1}], whole("mlm_probability=0.15 draws")),
    ({"causal_lm": True}, [{**ROW, "labels": 1}], whole("column {name!r} has not", name="labels", own="")),
    (
        {"model": llama()},
        [{**ROW, "label": 1}],
        whole(
            "column {name!r} has not",
            name="label",
            own=", or for a loss of your own: dataset.rename_column('label', 'labels')",
        ),
    ),
]


@pytest.mark.parametrize(("settings", "rows", "message"), BAD_LABELS, ids=["tokens", "mlm", "causal", "left over"])
def test_labels_that_the_model_cannot_use_are_refused(settings, rows, message):
    refuses(ValueError, message, BucketedCollator(tiny.tokenizer(), **settings), rows)


def test_causal_lm_with_an_encoder_decoder_is_refused_and_changes_nothing():
    collator = BucketedCollator(tiny.tokenizer(), causal_lm=True)
    for refused in (
        lambda: collator.adapt(t5()),
        lambda: BucketedCollator(tiny.tokenizer(), causal_lm=True, model=t5()),
    ):
        refuses(ValueError, whole("causal_lm=True copies"), refused)
    assert collator([ROW])["labels"].tolist() == [[5, 6] + [-100] * 6]
