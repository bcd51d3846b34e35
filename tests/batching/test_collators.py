"""Collators: every column against a slow reference and against stock, padding that changes no loss, clear errors."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

import tiny
from hf_memopt.batching.collation.collators import BucketedCollator, DynamicPaddingCollator, flatten, needs_position_ids
from hf_memopt.changes import Change

PAD, CLS, SEP, MASK = 0, 2, 3, 4

# A loss of a padded batch against the mean of losses without padding: other kernel shapes, other rounding in float32.
LOSS_TOLERANCE = 1e-5


# The slow obvious reference: nested Python lists.


def reference(rows: list[list[Any]], value: Any, *, side: str = "right", multiple: int = 8) -> list[list[Any]]:
    longest = max(len(row) for row in rows)
    width = next(n for n in range(max(longest, 1), longest + multiple + 1) if n % multiple == 0)
    padded = []
    for row in rows:
        padding = [value] * (width - len(row))
        padded.append(list(row) + padding if side == "right" else padding + list(row))
    return padded


def ids_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Return random ids without special tokens, one list per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 100, (n,), generator=generator).tolist() for n in lengths]


def tokenized(lengths: list[int], **columns: Any) -> list[dict[str, Any]]:
    ids = ids_of(lengths)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "token_type_ids": [0] * len(row)} for row in ids]
    return [{**row, **{name: cells[i] for name, cells in columns.items()}} for i, row in enumerate(rows)]


def as_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    convert: dict[str, Callable[[Any], Any]] = {"list": lambda cell: cell, "numpy": np.array, "torch": torch.tensor}
    return [{name: convert[kind](cell) for name, cell in row.items()} for row in rows]


def assert_same(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert batch.keys() == other.keys()
    for name, column in batch.items():
        assert column.dtype == other[name].dtype, name
        assert torch.equal(column, other[name]), name


# Columns


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [8, 1, None])
def test_every_column_matches_the_slow_reference(kind, side, multiple, monkeypatch):
    lengths = [3, 7, 1]
    special = [[1] + [0] * (n - 1) for n in lengths]
    types = [[1] * n for n in lengths]
    offsets = [[(i, i + 2) for i in range(n)] for n in lengths]
    weights = [[0.5] * n for n in lengths]
    rows = tokenized(
        lengths,
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
    batch = DynamicPaddingCollator(tokenizer, pad_to_multiple_of=multiple)(as_kind(rows, kind))

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
            "score": torch.tensor([0.25, 1.0, -2.0]),
            "index": torch.tensor([7, 8, 9]),
            "features": torch.tensor([[1.0, 2.0]] * 3),
        },
    )


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), side=st.sampled_from(["right", "left"]))
def test_ids_and_the_mask_made_from_lengths_match_the_slow_reference(lengths, side):
    ids = ids_of(lengths)
    batch = DynamicPaddingCollator(tiny.tokenizer(side))([{"input_ids": row} for row in ids])
    assert batch["input_ids"].tolist() == reference(ids, PAD, side=side)
    assert batch["attention_mask"].tolist() == reference([[1] * n for n in lengths], 0, side=side)
    assert {column.dtype for column in batch.values()} == {torch.int64}


def test_decoder_columns_are_padded_on_the_right_under_a_left_padding_tokenizer():
    rows = tokenized([2, 5], decoder_input_ids=[[9, 8, 7], [6]], decoder_attention_mask=[[1, 1, 1], [1]])
    batch = DynamicPaddingCollator(tiny.tokenizer("left"), pad_to_multiple_of=4)(rows)
    assert batch["decoder_input_ids"].tolist() == [[9, 8, 7, PAD], [6, PAD, PAD, PAD]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_small_numpy_dtypes_and_mixed_numbers_leave_as_int64_and_float32():
    rows = [
        {"input_ids": np.array([5, 6], np.int32), "mask": np.array([True, False]), "x": np.float64(1), "y": 1},
        {"input_ids": np.array([7], np.uint8), "mask": np.array([True]), "x": np.float16(2), "y": 2.5},
    ]
    batch = DynamicPaddingCollator(tiny.tokenizer(), pad_to_multiple_of=None)(rows)
    dtypes = {name: column.dtype for name, column in batch.items()}
    assert dtypes == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
        "mask": torch.bool,
        "x": torch.float32,
        "y": torch.float32,
    }
    assert batch["mask"].tolist() == [[True, False], [True, False]]
    assert batch["y"].tolist() == [1.0, 2.5]


def test_columns_of_none_and_the_length_column_are_dropped():
    rows = tokenized([2, 3], length=[2, 3], labels=[None, None], note=[None, None])
    batch = DynamicPaddingCollator(tiny.tokenizer())(rows)
    assert sorted(batch) == ["attention_mask", "input_ids", "token_type_ids"]


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
def test_features_stay_as_they_are_and_share_no_memory_with_the_batch(kind):
    rows = as_kind(tokenized([8, 8], labels=[[1] * 8] * 2), kind)
    before = copy.deepcopy(rows)
    batch = DynamicPaddingCollator(tiny.tokenizer())(rows)
    for column in batch.values():
        column.fill_(77)
    for row, old in zip(rows, before, strict=True):
        assert row.keys() == old.keys()
        assert all(np.array_equal(np.asarray(row[name]), np.asarray(old[name])) for name in row)


def test_the_output_of_a_tokenizer_call_is_taken_as_it_is():
    tokenizer = tiny.tokenizer()
    rows = [tokenizer("w1 w2 w3"), tokenizer("w4")]  # BatchEncoding: a Mapping, not a dict
    batch = DynamicPaddingCollator(tokenizer)(rows)
    assert_same(batch, dict(tokenizer.pad(rows, pad_to_multiple_of=8, return_tensors="pt")))


def test_a_processor_lends_its_tokenizer():
    class Processor:
        tokenizer = tiny.tokenizer()

    collator = DynamicPaddingCollator(Processor())
    assert collator.tokenizer is Processor.tokenizer


# Rows without tokens


def test_a_row_without_tokens_is_padding_only_and_causal_lm_gets_no_label_from_it():
    batch = DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True, pad_to_multiple_of=None)(
        [{"input_ids": []}, {"input_ids": [5, 6]}]
    )
    assert batch["input_ids"].tolist() == [[PAD, PAD], [5, 6]]
    assert batch["attention_mask"].tolist() == [[0, 0], [1, 1]]
    assert batch["labels"].tolist() == [[-100, -100], [5, 6]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_row_without_tokens_leaves_the_causal_loss_of_the_others_alone(side):
    collator = DynamicPaddingCollator(tiny.tokenizer(side), causal_lm=True)
    model = tiny.llama().eval()
    rows = [{"input_ids": row} for row in ids_of([6, 9])]
    with torch.no_grad():
        alone, among = model(**collator(rows)).loss, model(**collator([*rows, {"input_ids": []}])).loss
    assert abs(alone - among) < LOSS_TOLERANCE


def test_a_batch_of_rows_without_tokens_has_one_rounded_width():
    batch = DynamicPaddingCollator(tiny.tokenizer(), pad_to_multiple_of=4)([{"input_ids": []}, {"input_ids": []}])
    assert batch["input_ids"].tolist() == [[PAD] * 4] * 2


# Labels


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
    batch = DynamicPaddingCollator(tiny.tokenizer("left"), pad_to_multiple_of=4)(rows)
    assert [key for key in batch if "label" in key] == ["labels"]
    assert batch["labels"].dtype == expected.dtype
    assert torch.equal(batch["labels"], expected)


def test_label_pad_token_id_fills_every_kind_of_padded_label():
    collator = DynamicPaddingCollator(tiny.tokenizer(), label_pad_token_id=-1, pad_to_multiple_of=4)
    assert collator(tokenized([2, 3], labels=[[1, 1], [1, 1, 1]]))["labels"].tolist() == [[1, 1, -1, -1], [1, 1, 1, -1]]
    assert collator(tokenized([2, 3], labels=[[1], [1]]))["labels"].tolist() == [[1, -1, -1, -1]] * 2


def test_a_model_without_decoder_stacks_int_vectors_of_one_size():
    collator = DynamicPaddingCollator(tiny.tokenizer(), model=tiny.bert())
    assert collator(tokenized([4, 5], labels=[[1, 2], [3, 0]]))["labels"].tolist() == [[1, 2], [3, 0]]


def test_a_pad_token_that_is_changed_between_batches_is_seen():
    tokenizer = tiny.tokenizer()
    collator = DynamicPaddingCollator(tokenizer, pad_to_multiple_of=3)

    def padded_with() -> int:
        return int(collator([{"input_ids": [5, 6]}])["input_ids"][0, 2])

    assert [padded_with(), padded_with()] == [PAD, PAD]
    tokenizer.pad_token = "[SEP]"
    assert [padded_with(), padded_with()] == [SEP, SEP]
    tokenizer.pad_token_id = 7
    assert padded_with() == 7
    collator = pickle.loads(pickle.dumps(collator))
    assert padded_with() == 7
    collator.tokenizer = types.SimpleNamespace(pad_token_id=8, padding_side="right")
    assert padded_with() == 8
    collator.tokenizer.pad_token_id = 9
    assert padded_with() == 9


def test_a_causal_label_survives_where_the_pad_token_is_the_end_of_text_token():
    tokenizer = tiny.tokenizer(pad_token="[SEP]", eos_token="[SEP]")
    rows = [{"input_ids": [5, 6, SEP]}, {"input_ids": [7, SEP]}]
    ours = DynamicPaddingCollator(tokenizer, causal_lm=True, pad_to_multiple_of=None)(rows)
    stock = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert ours["labels"].tolist() == [[5, 6, SEP], [7, SEP, -100]]
    assert stock["labels"].tolist() == [[5, 6, -100], [7, -100, -100]]


def test_causal_labels_leave_out_what_the_data_itself_masks_and_labels_of_the_data_win():
    collator = DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True, pad_to_multiple_of=None)
    padded = {"input_ids": [5, 6, PAD], "attention_mask": [1, 1, 0], "special_tokens_mask": [0, 0, 1]}
    padded["offset_mapping"] = [(0, 1), (2, 3), (0, 0)]
    assert collator([padded])["labels"].tolist() == [[5, 6, -100]]
    assert sorted(collator([padded])) == ["attention_mask", "input_ids", "labels"]
    assert collator([{**padded, "labels": [-100, 6, -100]}])["labels"].tolist() == [[-100, 6, -100]]


@pytest.mark.parametrize("settings", [{"causal_lm": True}, {"model": "llama"}], ids=str)
def test_the_label_of_a_token_after_padding_on_the_left_is_ignored_by_a_causal_lm(settings):
    settings = {name: llama() if value == "llama" else value for name, value in settings.items()}
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11], "labels": [8, 9, 10, 11]}]
    collator = DynamicPaddingCollator(tiny.tokenizer("left"), pad_to_multiple_of=4, **settings)
    assert collator(rows)["labels"].tolist() == [[-100, -100, 6, 7], [8, 9, 10, 11]]
    masked = {"input_ids": [PAD, 8, 9, 10], "attention_mask": [0, 1, 1, 1], "labels": [-100, 8, 9, 10]}
    assert collator([masked])["labels"].tolist() == [[-100, -100, 9, 10]]


# Equal to stock where stock is right


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
SIDES = st.sampled_from(["right", "left"])


@given(lengths=LENGTHS, side=SIDES, multiple=st.sampled_from([None, 8]))
def test_equals_data_collator_with_padding(lengths, side, multiple):
    tokenizer = tiny.tokenizer(side)
    rows = tokenized(lengths, label=[i % 3 for i in range(len(lengths))])
    stock = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)(copy.deepcopy(rows))
    assert_same(DynamicPaddingCollator(tokenizer, pad_to_multiple_of=multiple)(rows), dict(stock))


@given(lengths=LENGTHS, side=SIDES)
def test_equals_data_collator_for_token_classification(lengths, side):
    tokenizer = tiny.tokenizer(side)
    rows = tokenized(lengths, labels=ids_of(lengths, seed=1))
    stock = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)(copy.deepcopy(rows))
    assert_same(DynamicPaddingCollator(tokenizer)(rows), dict(stock))


@given(lengths=LENGTHS, seed=st.integers(0, 9), data=st.data())
def test_equals_data_collator_for_seq2seq_on_right_padding(lengths, seed, data):
    targets = data.draw(st.lists(st.integers(1, 40), min_size=len(lengths), max_size=len(lengths)))
    tokenizer, model = tiny.tokenizer(), t5()
    rows = tokenized(lengths, labels=ids_of(targets, seed=seed))
    stock = DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8)(copy.deepcopy(rows))
    assert_same(DynamicPaddingCollator(tokenizer, model=model)(rows), dict(stock))


@given(lengths=LENGTHS, side=SIDES, seed=st.integers(0, 9), with_mask=st.booleans())
def test_mlm_draws_and_masks_as_stock_does(lengths, side, seed, with_mask):
    tokenizer = tiny.tokenizer(side)
    rows = [{**row, "input_ids": [CLS, *row["input_ids"][1:]]} for row in tokenized(lengths)]
    if with_mask:
        rows = [{**row, "special_tokens_mask": [1] + [0] * (len(row["input_ids"]) - 1)} for row in rows]
    torch.manual_seed(seed)
    stock = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, pad_to_multiple_of=8)(copy.deepcopy(rows))
    torch.manual_seed(seed)
    assert_same(DynamicPaddingCollator(tokenizer, mlm_probability=0.3)(rows), dict(stock))


@given(lengths=LENGTHS, side=SIDES)
def test_mlm_masks_every_real_token_at_1_and_nothing_else(lengths, side):
    # The pad token is not among the special tokens that a mask of the data names, and CLS is masked out by the data.
    rows = [{"input_ids": [CLS, *row], "special_tokens_mask": [1] + [0] * len(row)} for row in ids_of(lengths)]
    batch = DynamicPaddingCollator(tiny.tokenizer(side), mlm_probability=1.0)(rows)
    expected = reference([[-100, *row] for row in ids_of(lengths)], -100, side=side)
    assert batch["labels"].tolist() == expected
    untouched = batch["labels"] == -100
    original = torch.tensor(reference([row["input_ids"] for row in rows], PAD, side=side))
    assert torch.equal(batch["input_ids"][untouched], original[untouched])


def test_mlm_does_not_mask_what_the_attention_mask_of_the_data_leaves_out():
    rows = [{"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 0, 0]}]
    batch = DynamicPaddingCollator(tiny.tokenizer(), mlm_probability=1.0)(rows)
    assert batch["labels"].tolist() == [[5, 6] + [-100] * 6]


# Padding changes no loss


@cache
def t5() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=100,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=3,
            decoder_start_token_id=0,
        )
    ).eval()


@cache
def bart() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=100,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
            decoder_start_token_id=3,
            forced_eos_token_id=None,
        )
    ).eval()


@cache
def gpt2() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 100,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout)).eval()


@cache
def bert(head: str, **config: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{head}")(tiny.bert_config(**config)).eval()


@cache
def llama() -> transformers.PreTrainedModel:
    return tiny.llama().eval()


def loss_without_padding(model: Any, row: dict[str, Any]) -> float:
    with torch.no_grad():
        return model(**{name: torch.tensor([cell]) for name, cell in row.items()}).loss.item()


def assert_padding_changes_no_loss(
    model: Any, collator: DynamicPaddingCollator, rows: list[dict[str, Any]], weights: list[int] | None = None
) -> None:
    """Compare the loss of the batch with the weighted mean of the losses of its rows, each alone and unpadded."""
    weights = weights or [1] * len(rows)
    alone = [loss_without_padding(model, row) for row in rows]
    expected = sum(loss * weight for loss, weight in zip(alone, weights, strict=True)) / sum(weights)
    with torch.no_grad():
        assert abs(model(**collator(rows)).loss.item() - expected) < LOSS_TOLERANCE


FEW = settings(max_examples=10)  # each runs a model on every row
HEADS = {
    "classification": ({"num_labels": 3, "problem_type": "single_label_classification"}, lambda i: i % 3),
    "multi-label": (
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        lambda i: [float(i % 2), 1.0, 0.0],
    ),
    "regression": ({"num_labels": 1}, lambda i: i / 3),
    "several targets": ({"num_labels": 3, "problem_type": "regression"}, lambda i: [i / 3, -1.0, 0.5]),
}


@pytest.mark.parametrize("head", HEADS)
@FEW
@given(lengths=LENGTHS)
def test_padding_changes_no_loss_of_a_row_wise_head(head, lengths):
    config, label = HEADS[head]
    model = bert("SequenceClassification", **config)
    rows = tokenized(lengths, labels=[label(i) for i in range(len(lengths))])
    assert_padding_changes_no_loss(model, DynamicPaddingCollator(tiny.tokenizer(), model=model), rows)


@FEW
@given(lengths=LENGTHS, side=SIDES)
def test_padding_changes_no_loss_of_token_classification(lengths, side):
    model = bert("TokenClassification", num_labels=3)
    rows = tokenized(lengths, labels=[[(i + j) % 3 for j in range(n)] for i, n in enumerate(lengths)])
    assert_padding_changes_no_loss(model, DynamicPaddingCollator(tiny.tokenizer(side), model=model), rows, lengths)


@FEW
@given(lengths=LENGTHS, side=SIDES)
def test_padding_changes_no_loss_of_mlm_with_given_labels(lengths, side):
    model = bert("MaskedLM")
    labels = [[token if j % 2 == 0 else -100 for j, token in enumerate(row)] for row in ids_of(lengths, seed=1)]
    weights = [(n + 1) // 2 for n in lengths]
    collator = DynamicPaddingCollator(tiny.tokenizer(side), model=model)
    assert_padding_changes_no_loss(model, collator, tokenized(lengths, labels=labels), weights)


LENGTHS_OVER_1 = st.lists(st.integers(2, 40), min_size=1, max_size=6)  # a causal LM has no target for a single token


@pytest.mark.parametrize("build", [llama, gpt2])
@FEW
@given(lengths=LENGTHS_OVER_1, side=SIDES)
def test_padding_changes_no_loss_of_a_causal_lm(build, lengths, side):
    model, ids = build(), ids_of(lengths)
    collator = DynamicPaddingCollator(tiny.tokenizer(side), model=model, causal_lm=True)
    with torch.no_grad():
        loss = model(**collator([{"input_ids": row} for row in ids])).loss.item()
    alone = [loss_without_padding(model, {"input_ids": row, "labels": row}) * (len(row) - 1) for row in ids]
    assert abs(loss - sum(alone) / sum(n - 1 for n in lengths)) < LOSS_TOLERANCE


@FEW
@given(lengths=LENGTHS, side=SIDES)
def test_padding_changes_no_loss_of_a_causal_classifier(lengths, side):
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(tiny.llama_config(num_labels=3)).eval()
    ids = ids_of(lengths)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": i % 3} for i, row in enumerate(ids)]
    assert_padding_changes_no_loss(model, DynamicPaddingCollator(tiny.tokenizer(side), model=model), rows)


@pytest.mark.parametrize(("build", "sides"), [(t5, ["right", "left"]), (bart, ["right"])])
@FEW
@given(lengths=LENGTHS, data=st.data())
def test_padding_changes_no_loss_of_an_encoder_decoder(build, sides, lengths, data):
    targets = data.draw(st.lists(st.integers(1, 40), min_size=len(lengths), max_size=len(lengths)))
    side = data.draw(st.sampled_from(sides))
    model = build()
    rows = [
        {"input_ids": row, "attention_mask": [1] * len(row), "labels": target}
        for row, target in zip(ids_of(lengths), ids_of(targets, seed=1), strict=True)
    ]
    collator = DynamicPaddingCollator(tiny.tokenizer(side), model=model)
    assert_padding_changes_no_loss(model, collator, rows, targets)


def test_left_padding_in_stock_does_change_the_loss_of_gpt2_by_positions_and_by_the_first_label():
    rows = [{"input_ids": row} for row in ids_of([3, 20])]
    tokenizer = tiny.tokenizer("left")
    batch = DynamicPaddingCollator(tokenizer, causal_lm=True, position_ids=True)(rows)
    with torch.no_grad():
        right = gpt2()(**DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True)(rows)).loss
        repaired = gpt2()(**batch).loss
        stock = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)(rows)
        stock_with_positions = gpt2()(**stock, position_ids=batch["position_ids"]).loss
        stock_with_our_labels = gpt2()(**{**stock, "labels": batch["labels"]}).loss
    assert abs(repaired - right) < LOSS_TOLERANCE
    assert abs(stock_with_positions - right) > 1e-4
    assert abs(stock_with_our_labels - right) > 1e-4


# Positions and what depends on the model


def test_position_ids_count_real_tokens_on_either_side_and_skip_padding_of_the_data():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    for side, expected in [("right", [[0, 1, 2, 0], [0, 0, 0, 0]]), ("left", [[0, 0, 1, 2], [0, 0, 0, 0]])]:
        collator = DynamicPaddingCollator(tiny.tokenizer(side), position_ids=True, pad_to_multiple_of=4)
        assert collator(rows)["position_ids"].tolist() == expected
    collator = DynamicPaddingCollator(tiny.tokenizer("left"), position_ids=True, pad_to_multiple_of=4)
    masked = [{"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]}]
    assert collator(masked)["position_ids"].tolist() == [[0, 0, 0, 1]]
    own = [{"input_ids": [5, 6], "position_ids": [3, 4]}]
    assert collator(own)["position_ids"].tolist() == [[0, 0, 3, 4]]


GPT = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
POSITIONS = [  # model class, configuration, whether it needs position_ids
    ("BertForMaskedLM", ENCODER, True),
    ("ElectraForMaskedLM", ENCODER, True),
    ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}, True),
    (
        "DistilBertForMaskedLM",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64},
        True,
    ),
    ("DebertaV2ForMaskedLM", ENCODER, True),
    ("GPT2LMHeadModel", GPT, True),
    ("OpenAIGPTLMHeadModel", GPT, True),
    ("CTRLLMHeadModel", {**GPT, "dff": 64}, True),
    ("XGLMForCausalLM", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2}, True),
    ("RobertaForMaskedLM", ENCODER, False),
    ("CamembertForMaskedLM", ENCODER, False),
    ("EsmForMaskedLM", {**ENCODER, "mask_token_id": MASK}, False),
    ("ModernBertForMaskedLM", ENCODER, False),
    ("LlamaForCausalLM", {**ENCODER, "num_key_value_heads": 2}, False),
    ("GPTNeoXForCausalLM", ENCODER, False),
    ("OPTForCausalLM", {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}, False),
    ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 2}, False),
]


# DeBERTa of transformers 5.8 still calls torch.jit.script, which torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "config", "needed"), POSITIONS, ids=[name for name, *_ in POSITIONS])
def test_position_ids_are_added_exactly_where_left_padding_changes_the_logits(name, config, needed):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    ids_of_specials = {"vocab_size": 100, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    model = kind(kind.config_class(**{**config, **ids_of_specials})).eval()
    assert needs_position_ids(model) is needed

    tokenizer = tiny.tokenizer("left", pad_token="[UNK]")  # id 1, as in RoBERTa
    row = {"input_ids": ids_of([5])[0]}
    alone = DynamicPaddingCollator(tokenizer, pad_to_multiple_of=None)([row])
    with torch.no_grad():
        expected = model(**alone).logits[0]
        plain, adapted = (
            model(**DynamicPaddingCollator(tokenizer, model=given)([row])).logits[0, -5:] for given in (None, model)
        )
    assert ((plain - expected).abs().max() > 1e-3) == needed
    assert torch.allclose(adapted, expected, atol=LOSS_TOLERANCE)


def test_adapt_returns_every_choice_and_leaves_a_collator_that_was_given_its_model():
    collator = DynamicPaddingCollator(tiny.tokenizer("left"))
    reason = "GPT2LMHeadModel would have to predict it from the padding on its left"
    label = Change("label of the first token", "token id", -100, reason)
    reason = "padding on the left would shift the positions of GPT2LMHeadModel"
    assert collator.adapt(gpt2()) == (label, Change("position_ids", False, True, reason))
    assert "position_ids" in collator([{"input_ids": [5]}])
    assert collator.adapt(bert("TokenClassification", num_labels=3))[0].name == "position_ids"  # another model
    assert collator.adapt(t5())[0].name == "integer lists in labels"
    assert "position_ids" not in collator([{"input_ids": [5]}])

    reason = "T5ForConditionalGeneration is an encoder-decoder, whose labels are padded on the right"
    change = Change("integer lists in labels", "told apart by length", "decoder labels", reason)
    assert DynamicPaddingCollator(tiny.tokenizer()).adapt(t5()) == (change,)
    assert DynamicPaddingCollator(tiny.tokenizer()).adapt(gpt2()) == ()  # right padding
    assert DynamicPaddingCollator(tiny.tokenizer("left"), position_ids=False).adapt(gpt2()) == (label,)
    assert DynamicPaddingCollator(tiny.tokenizer("left"), model=llama()).adapt(gpt2()) == ()
    assert DynamicPaddingCollator(inner=default_data_collator).adapt(gpt2()) == ()


def test_adapt_takes_a_model_without_config():
    collator = DynamicPaddingCollator(tiny.tokenizer("left"))
    assert collator.adapt(torch.nn.Linear(2, 2)) == ()


def test_an_encoder_decoder_has_decoder_labels_even_where_they_are_as_long_as_the_inputs():
    rows = tokenized([2, 3], labels=[[5, 6], [7, 8, 9]])
    batch = DynamicPaddingCollator(tiny.tokenizer("left"), model=bart(), pad_to_multiple_of=4)(rows)
    assert batch["labels"].tolist() == [[5, 6, -100, -100], [7, 8, 9, -100]]
    assert batch["decoder_input_ids"].tolist() == [[SEP, 5, 6, PAD], [SEP, 7, 8, 9]]


def test_a_head_on_the_encoder_of_an_encoder_decoder_keeps_token_labels():
    model = transformers.T5ForTokenClassification(copy.deepcopy(t5().config))  # it changes the config
    rows = tokenized([2, 3], labels=[[1, 0], [1, 1, 0]])
    batch = DynamicPaddingCollator(tiny.tokenizer("left"), model=model, pad_to_multiple_of=4)(rows)
    assert batch["labels"].tolist() == [[-100, -100, 1, 0], [-100, 1, 1, 0]]
    assert "decoder_input_ids" not in batch


def test_decoder_input_ids_of_the_data_and_scalar_labels_are_left_alone():
    collator = DynamicPaddingCollator(tiny.tokenizer(), model=bart(), pad_to_multiple_of=4)
    given_ids = collator(tokenized([2], labels=[[5, 6, 7]], decoder_input_ids=[[2, 5, 6]]))["decoder_input_ids"]
    assert given_ids.tolist() == [[2, 5, 6, PAD]]
    assert "decoder_input_ids" not in collator(tokenized([2], labels=[1]))


# peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_wrappers_are_looked_into():
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    assert needs_position_ids(peft.get_peft_model(copy.deepcopy(gpt2()), lora))
    lora = peft.LoraConfig(target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    collator = DynamicPaddingCollator(tiny.tokenizer(), model=peft.get_peft_model(copy.deepcopy(t5()), lora))
    assert "decoder_input_ids" in collator(tokenized([2], labels=[[5, 6, 7]]))


# Whole-batch items and inner collators


def test_bucketed_collator_splices_whole_batches_between_single_examples():
    rows = tokenized([2, 9, 4, 1], labels=[0, 1, 2, 0])
    collator = BucketedCollator(tiny.tokenizer())
    expected = DynamicPaddingCollator(tiny.tokenizer())(rows)
    assert_same(collator(rows), expected)
    assert_same(collator([rows]), expected)
    assert_same(collator([rows[0], tuple(rows[1:3]), [], [rows[3]]]), expected)
    assert flatten([1, [2, 3], (4,)]) == [1, 2, 3, 4]


def test_inner_gets_the_flat_examples_and_does_all_the_work():
    rows = [{"pixel_values": torch.full((3, 2, 2), float(i)), "label": i} for i in range(3)]
    batch = BucketedCollator(inner=default_data_collator)([rows[:2], rows[2]])
    assert_same(batch, default_data_collator(rows))
    assert_same(
        DynamicPaddingCollator(tiny.tokenizer(), inner=default_data_collator)(rows), default_data_collator(rows)
    )


def test_the_tokenizer_of_inner_shows_so_that_the_trainer_can_save_it():
    tokenizer = tiny.tokenizer()
    assert DynamicPaddingCollator(inner=DataCollatorWithPadding(tokenizer)).tokenizer is tokenizer
    assert DynamicPaddingCollator(inner=default_data_collator).tokenizer is None


# Pickle, copies, workers


@pytest.mark.parametrize(
    "collator",
    [
        DynamicPaddingCollator(tiny.tokenizer("left"), causal_lm=True, position_ids=True),
        BucketedCollator(tiny.tokenizer(), mlm_probability=0.5),
        BucketedCollator(inner=DataCollatorWithPadding(tiny.tokenizer())),
    ],
    ids=repr,
)
def test_pickled_and_copied_collators_give_the_same_batch(collator):
    rows = tokenized([3, 5])
    batches = []
    for twin in (collator, pickle.loads(pickle.dumps(collator)), copy.deepcopy(collator)):
        torch.manual_seed(0)
        batches.append(twin(rows))
        assert repr(twin) == repr(collator)
    assert_same(batches[1], dict(batches[0]))
    assert_same(batches[2], dict(batches[0]))


@pytest.mark.parametrize("build", [t5, bart])
def test_a_pickled_collator_carries_no_weights_of_its_model(build):
    plain = DynamicPaddingCollator(tiny.tokenizer())
    adapted = DynamicPaddingCollator(tiny.tokenizer(), model=build())
    weights = sum(parameter.nbytes for parameter in build().parameters())
    assert len(pickle.dumps(adapted)) - len(pickle.dumps(plain)) < weights / 10
    rows = tokenized([3], labels=[[5, 6]])
    assert_same(pickle.loads(pickle.dumps(adapted))(rows), adapted(rows))


def test_repr_names_what_is_set():
    assert repr(BucketedCollator(tiny.tokenizer(), mlm_probability=0.15, pad_to_multiple_of=None)) == (
        f"BucketedCollator(tokenizer={type(tiny.tokenizer()).__name__}, mlm_probability=0.15)"
    )
    assert repr(DynamicPaddingCollator(inner=default_data_collator)) == (
        "BucketedCollator(pad_to_multiple_of=8, inner=default_data_collator)"
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
@pytest.mark.parametrize(
    "start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)]
)  # it pickles, as tested above
def test_worker_processes_give_the_batches_of_this_process(start):
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system starts no processes by {start}")
    rows = tokenized([3, 9, 4, 1, 2, 8], labels=[[5, 6]] * 6)
    collator = BucketedCollator(tiny.tokenizer(), model=t5())
    workers = 2 if start == "fork" else 1  # a spawned one imports torch and transformers first: seconds
    loader = DataLoader(
        [rows[:3], rows[3:]], batch_size=1, num_workers=workers, collate_fn=collator, multiprocessing_context=start
    )
    batches = list(loader)
    assert_same(batches[0], collator(rows[:3]))
    assert_same(batches[1], collator(rows[3:]))


# In the stock Trainer


def test_the_stock_trainer_takes_the_same_steps_as_with_its_own_collator(tmp_path):
    rows = tokenized([3, 17, 9, 1, 30, 12, 8, 8], label=[0, 1, 2, 0, 1, 2, 0, 1])
    tokenizer = tiny.tokenizer()
    ours, stock = tiny.bert(), tiny.bert()
    tiny.train(ours, rows, tmp_path, per_device_train_batch_size=4, trainer_data_collator=BucketedCollator(tokenizer))
    stock_collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    tiny.train(stock, rows, tmp_path, per_device_train_batch_size=4, trainer_data_collator=stock_collator)
    assert tiny.largest_difference(ours, tiny.bert()) > 1e-4  # it trained
    assert tiny.largest_difference(ours, stock) == 0.0


def test_the_stock_trainer_takes_whole_batch_items_one_per_step(tmp_path):
    rows = tokenized([3, 17, 9, 1, 30, 12, 8, 8], label=[0, 1, 2, 0, 1, 2, 0, 1])
    whole, single = tiny.bert(), tiny.bert()
    one_by_one = {"train_sampling_strategy": "sequential", "trainer_data_collator": BucketedCollator(tiny.tokenizer())}
    tiny.train(whole, [rows[:4], rows[4:]], tmp_path, per_device_train_batch_size=1, **one_by_one)
    tiny.train(single, rows, tmp_path, per_device_train_batch_size=4, **one_by_one)
    assert tiny.largest_difference(whole, tiny.bert()) > 1e-4
    assert tiny.largest_difference(whole, single) == 0.0


@pytest.mark.parametrize("build", [t5, bart])
def test_label_smoothing_trains_an_encoder_decoder_in_the_stock_trainer(build, tmp_path):
    rows = [{"input_ids": row, "labels": target} for row, target in zip(ids_of([4, 7]), ids_of([3, 2], 1), strict=True)]
    model = copy.deepcopy(build())
    collator = BucketedCollator(tiny.tokenizer(), model=model)
    smoothing = {"label_smoothing_factor": 0.1, "per_device_train_batch_size": 2}
    tiny.train(model, rows, tmp_path, trainer_data_collator=collator, **smoothing)
    assert tiny.largest_difference(model, build()) > 1e-6


# Errors


def error_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


REMEDY = (
    "Remove it: dataset.remove_columns('text') or TrainingArguments(remove_unused_columns=True); or let a collator "
    "that knows it do the work: BucketedCollator(inner=...)."
)
ROW = {"input_ids": [5, 6]}
BAD_FEATURES: list[tuple[str, type[Exception], list[Any], str]] = [
    (
        "no features",
        ValueError,
        [],
        "features=[] has no example to pad; expected at least one. Call: collator([dataset[0]]).",
    ),
    (
        "a row that is no dict",
        TypeError,
        [ROW, [5, 6]],
        "features[1]=5 is not a row; expected a dict of columns. Call: collator([dataset[0]]).",
    ),
    (
        "no input_ids",
        ValueError,
        [{"label": 1, "attention_mask": [1]}],
        "features have the columns ['attention_mask', 'label'] and no 'input_ids'; expected token ids. Tokenize first, "
        "tokenizer(text), or pass inner= the collator of this kind of data.",
    ),
    (
        "rows with different columns",
        ValueError,
        [ROW, {**ROW, "labels": 1}],
        "features[1] and features[0] do not share the columns ['labels']; expected the same columns in every row. "
        "Remove or fill them: dataset.map(...).",
    ),
    (
        "a None among values",
        ValueError,
        [{**ROW, "labels": 1}, {**ROW, "labels": None}],
        "features[1]['labels'] is None where other rows have a value; expected values in all rows or in none. "
        "Filter them: dataset.filter(lambda row: row['labels'] is not None).",
    ),
    (
        "float ids",
        TypeError,
        [ROW, {"input_ids": [5, 6.5]}],
        "features[1]['input_ids']=[5, 6.5] is not a list of integers; expected token ids. "
        "Tokenize first: tokenizer(text).",
    ),
    (
        "float ids in an array",
        TypeError,
        [{"input_ids": np.array([5.0])}],
        "features[0]['input_ids']=array([5.]) is not a list of integers; expected token ids. "
        "Tokenize first: tokenizer(text).",
    ),
    (
        "tokens instead of ids",
        TypeError,
        [{"input_ids": ["w1", "w2"]}],
        "features[0]['input_ids']=['w1', 'w2'] is not a list of integers; expected token ids. "
        "Tokenize first: tokenizer(text).",
    ),
    (
        "nested ragged ids",
        TypeError,
        [{"input_ids": [[5], [6, 7]]}],
        "features[0]['input_ids']=[[5], [6, 7]] is not a list of integers; expected token ids. "
        "Tokenize first: tokenizer(text).",
    ),
    (
        "ids of shape (1, n)",
        ValueError,
        [{"input_ids": [[5, 6]]}],
        "features[0]['input_ids'] has shape (1, 2); expected one list of ids per row. "
        "Tokenize one text per row: tokenizer(text) without return_tensors.",
    ),
    (
        "one id per row",
        ValueError,
        [{"input_ids": 5}],
        "features[0]['input_ids'] has shape (); expected one list of ids per row. "
        "Tokenize one text per row: tokenizer(text) without return_tensors.",
    ),
    (
        "a ragged attention_mask",
        ValueError,
        [{**ROW, "attention_mask": [1, 1]}, {**ROW, "attention_mask": [1]}],
        "features[1]['attention_mask'] has 1 entries for 2 input_ids; expected one per token. "
        "Cut all columns together: tokenizer(text, truncation=True, max_length=...).",
    ),
    (
        "a scalar attention_mask",
        ValueError,
        [{**ROW, "attention_mask": 1}],
        "features[0]['attention_mask'] has 0 entries for 2 input_ids; expected one per token. "
        "Cut all columns together: tokenizer(text, truncation=True, max_length=...).",
    ),
    (
        "a column of strings",
        TypeError,
        [{**ROW, "text": "w1 w2"}],
        "features[0]['text']='w1 w2' is neither a number nor a list of numbers; expected a column that a tensor can "
        "hold. " + REMEDY,
    ),
    (
        "a ragged column",
        ValueError,
        [{**ROW, "text": [1, 2, 3]}, {**ROW, "text": [1]}],
        "column 'text' is ragged, with shapes (1,), (3,); expected one entry per token or one shape in all rows. "
        + REMEDY,
    ),
    (
        "pairs and triples per token",
        ValueError,
        [{**ROW, "text": [(1, 2), (3, 4)]}, {**ROW, "text": [(1, 2, 3), (4, 5, 6)]}],
        "column 'text' is ragged, with shapes (2, 2), (2, 3); expected one entry per token or one shape in all rows. "
        + REMEDY,
    ),
    (
        "labels twice",
        ValueError,
        [{**ROW, "labels": 1, "label": 1}],
        "features hold labels under ['labels', 'label']; expected one of these columns. "
        "Remove the others: dataset.remove_columns(['label']).",
    ),
    (
        "labels of mixed shapes",
        ValueError,
        [{**ROW, "label": 1}, {**ROW, "label": [1, 0]}],
        "column 'label' mixes shapes (), (2,); expected one number per row, float vectors of one size, or lists of "
        "ints. Make the rows alike: dataset.map(...).",
    ),
    (
        "float labels of mixed sizes",
        ValueError,
        [{**ROW, "labels": [1.0]}, {**ROW, "labels": [1.0, 0.0]}],
        "column 'labels' mixes shapes (1,), (2,); expected one number per row, float vectors of one size, or lists of "
        "ints. Make the rows alike: dataset.map(...).",
    ),
]


@pytest.mark.parametrize(
    ("kind", "features", "message"), [case[1:] for case in BAD_FEATURES], ids=[c[0] for c in BAD_FEATURES]
)
def test_bad_rows_are_named_with_column_row_and_fix(kind, features, message):
    assert error_of(lambda: DynamicPaddingCollator(tiny.tokenizer())(features), kind) == message


def test_token_labels_that_do_not_fit_are_refused_once_the_model_is_known_to_have_no_decoder():
    rows = tokenized([2, 3], label=[[1, 0], [1, 1, 0, 0]])
    collator = DynamicPaddingCollator(tiny.tokenizer(), model=bert("TokenClassification", num_labels=3))
    assert error_of(lambda: collator(rows), ValueError) == (
        "features[1]['label'] has 4 entries for 3 input_ids, and the model has no decoder; expected one label per "
        "token. Align them: tokenizer(words, is_split_into_words=True)."
    )


def test_labels_of_the_data_that_a_language_model_cannot_use_are_refused():
    mlm = DynamicPaddingCollator(tiny.tokenizer(), mlm_probability=0.15)
    assert error_of(lambda: mlm([{**ROW, "label": 1}]), ValueError) == (
        "mlm_probability=0.15 draws the labels, but the data has them under 'label'; expected one source of labels. "
        "Call: dataset.remove_columns('label')."
    )
    causal = DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True)
    assert error_of(lambda: causal([{**ROW, "label": 1}]), ValueError) == (
        "causal_lm=True needs one label per token, and column 'label' has not; expected labels as long as input_ids, "
        "or none. Call: dataset.remove_columns('label')."
    )


BAD_SETTINGS = {
    "pad_to_multiple_of=0": (
        {"pad_to_multiple_of": 0},
        "pad_to_multiple_of=0 is invalid; expected an integer of 1 or more. Pass pad_to_multiple_of=32",
    ),
    "pad_to_multiple_of=8.0": (
        {"pad_to_multiple_of": 8.0},
        "pad_to_multiple_of=8.0 is invalid; expected an integer of 1 or more. Pass pad_to_multiple_of=32",
    ),
    "mlm_probability=0": (
        {"mlm_probability": 0},
        "mlm_probability=0 is out of range; expected a share in (0, 1], or None for no masking. "
        "Write: mlm_probability=0.15.",
    ),
    "mlm_probability=15": (
        {"mlm_probability": 15},
        "mlm_probability=15 is out of range; expected a share in (0, 1], or None for no masking. "
        "Write: mlm_probability=0.15.",
    ),
    "mlm and causal": (
        {"mlm_probability": 0.15, "causal_lm": True},
        "mlm_probability=0.15 and causal_lm=True both make the labels; expected one of them. Leave one out.",
    ),
    "inner and mlm": (
        {"inner": default_data_collator, "mlm_probability": 0.15},
        "inner=default_data_collator pads by itself, so mlm_probability would be ignored; expected inner= alone. "
        "Set it on the inner collator, or leave inner out.",
    ),
    "inner and causal, positions": (
        {"inner": default_data_collator, "causal_lm": True, "position_ids": True},
        "inner=default_data_collator pads by itself, so causal_lm, position_ids would be ignored; expected inner= "
        "alone. Set it on the inner collator, or leave inner out.",
    ),
}


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_refused_at_construction(settings, message):
    assert error_of(lambda: BucketedCollator(tiny.tokenizer(), **settings), ValueError) == message


def test_causal_lm_with_an_encoder_decoder_is_refused_and_changes_nothing():
    message = (
        "causal_lm=True copies input_ids to labels, but T5ForConditionalGeneration is an encoder-decoder; expected the "
        "decoder's labels in the data. Leave causal_lm out."
    )
    collator = DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True)
    assert error_of(lambda: collator.adapt(t5()), ValueError) == message
    assert collator([ROW])["labels"].tolist() == [[5, 6] + [-100] * 6]
    assert error_of(lambda: DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True, model=t5()), ValueError) == message


def test_a_tokenizer_that_cannot_pad_or_mask_is_refused_with_the_fixing_line():
    assert error_of(lambda: BucketedCollator(), ValueError) == (
        "tokenizer=None and inner=None leave nothing to pad with; expected one of them. "
        "Call: BucketedCollator(AutoTokenizer.from_pretrained(name))."
    )
    assert error_of(lambda: BucketedCollator("bert-base-uncased"), TypeError) == (
        "tokenizer='bert-base-uncased' has no pad_token_id and padding_side; expected a transformers tokenizer or a "
        "processor that holds one. Call: AutoTokenizer.from_pretrained(name)."
    )
    name = type(tiny.tokenizer()).__name__
    assert error_of(lambda: BucketedCollator(tiny.tokenizer(pad_token=None)), ValueError) == (
        f"tokenizer={name} has no pad token; expected one to pad with. Set: tokenizer.pad_token = tokenizer.eos_token."
    )
    assert error_of(lambda: BucketedCollator(tiny.tokenizer(mask_token=None), mlm_probability=0.15), ValueError) == (
        f"mlm_probability=0.15 needs a mask token, which {name} does not have; expected one in its vocabulary. "
        'Set: tokenizer.mask_token = "[MASK]".'
    )


class WordTokenizer(transformers.PreTrainedTokenizer):
    """A tokenizer in Python over ``tiny.VOCABULARY``."""

    def __init__(self, **settings: Any) -> None:
        self.ids = {token: i for i, token in enumerate(tiny.VOCABULARY)}
        super().__init__(pad_token="[PAD]", unk_token="[UNK]", **settings)

    @property
    def vocab_size(self) -> int:
        return len(self.ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def _tokenize(self, text: str, **settings: Any) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, 1)

    def _convert_id_to_token(self, index: int) -> str:
        return tiny.VOCABULARY[index]


def test_a_python_tokenizer_is_warned_about_once_and_works():
    tokenizer = WordTokenizer()
    with pytest.warns(UserWarning, match="is a Python tokenizer") as caught:
        collator = BucketedCollator(tokenizer)
    assert [str(warning.message) for warning in caught] == [
        "tokenizer=WordTokenizer is a Python tokenizer; expected a fast one, in Rust. "
        "Load it with AutoTokenizer.from_pretrained(name, use_fast=True)."
    ]
    assert caught[0].filename == __file__
    batch = collator([tokenizer("w0 w1"), tokenizer("w2")])  # a second warning would be an error
    assert batch["input_ids"].tolist() == [[5, 6] + [PAD] * 6, [7] + [PAD] * 7]
