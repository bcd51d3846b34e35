"""Collators: rows, settings and tokenizers that are refused, and the messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collated_rows import (
    bert,
    error_of,
    t5,
    tokenized,
)
from transformers import (
    default_data_collator,
)

import tiny
from hf_memopt import BucketedCollator, DynamicPaddingCollator

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
