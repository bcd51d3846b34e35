"""Collators: rows, settings and tokenizers that are refused, and the messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collated_rows import bert, t5, tokenized
from transformers import default_data_collator

import tiny
from hf_memopt import BucketedCollator, DynamicPaddingCollator

ROW = {"input_ids": [5, 6]}
IDS = "is not a list of integers; expected token ids. Tokenize first: tokenizer(text)."
ONE_LIST = "expected one list of ids per row. Tokenize one text per row: tokenizer(text) without return_tensors."
TOGETHER = "expected one per token. Cut all columns together: tokenizer(text, truncation=True, max_length=...)."
REMEDY = (
    "Remove it: dataset.remove_columns('text') or TrainingArguments(remove_unused_columns=True); or let a collator "
    "that knows it do the work: BucketedCollator(inner=...)."
)
RAGGED = f"expected one entry per token or one shape in all rows. {REMEDY}"
ALIKE = (
    "expected one number per row, float vectors of one size, or lists of ints. Make the rows alike: dataset.map(...)."
)
BAD_FEATURES: list[tuple[list[Any], str]] = [
    ([], "features=[] has no example to pad; expected at least one. Call: collator([dataset[0]])."),
    ([ROW, [5, 6]], "features[1]=5 is not a row; expected a dict of columns. Call: collator([dataset[0]])."),
    (
        [{"label": 1, "attention_mask": [1]}],
        "features have the columns ['attention_mask', 'label'] and no 'input_ids'; expected token ids. Tokenize first, "
        "tokenizer(text), or pass inner= the collator of this kind of data.",
    ),
    (
        [ROW, {**ROW, "labels": 1}],
        "features[1] and features[0] do not share the columns ['labels']; expected the same columns in every row. "
        "Remove or fill them: dataset.map(...).",
    ),
    (
        [{**ROW, "labels": 1}, {**ROW, "labels": None}],
        "features[1]['labels'] is None where other rows have a value; expected values in all rows or in none. "
        "Filter them: dataset.filter(lambda row: row['labels'] is not None).",
    ),
    ([ROW, {"input_ids": [5, 6.5]}], f"features[1]['input_ids']=[5, 6.5] {IDS}"),
    ([{"input_ids": np.array([5.0])}], f"features[0]['input_ids']=array([5.]) {IDS}"),
    ([{"input_ids": ["w1", "w2"]}], f"features[0]['input_ids']=['w1', 'w2'] {IDS}"),
    ([{"input_ids": [[5], [6, 7]]}], f"features[0]['input_ids']=[[5], [6, 7]] {IDS}"),
    ([{"input_ids": [[5, 6]]}], f"features[0]['input_ids'] has shape (1, 2); {ONE_LIST}"),
    ([{"input_ids": 5}], f"features[0]['input_ids'] has shape (); {ONE_LIST}"),
    (
        [{**ROW, "attention_mask": [1, 1]}, {**ROW, "attention_mask": [1]}],
        f"features[1]['attention_mask'] has 1 entries for 2 input_ids; {TOGETHER}",
    ),
    ([{**ROW, "attention_mask": 1}], f"features[0]['attention_mask'] has 0 entries for 2 input_ids; {TOGETHER}"),
    (
        [{**ROW, "text": "w1 w2"}],
        "features[0]['text']='w1 w2' is neither a number nor a list of numbers; expected a column that a tensor can "
        f"hold. {REMEDY}",
    ),
    ([{**ROW, "text": [1, 2, 3]}, {**ROW, "text": [1]}], f"column 'text' is ragged, with shapes (1,), (3,); {RAGGED}"),
    (
        [{**ROW, "text": [(1, 2), (3, 4)]}, {**ROW, "text": [(1, 2, 3), (4, 5, 6)]}],
        f"column 'text' is ragged, with shapes (2, 2), (2, 3); {RAGGED}",
    ),
    (
        [{**ROW, "labels": 1, "label": 1}],
        "features hold labels under ['labels', 'label']; expected one of these columns. "
        "Remove the others: dataset.remove_columns(['label']).",
    ),
    ([{**ROW, "label": 1}, {**ROW, "label": [1, 0]}], f"column 'label' mixes shapes (), (2,); {ALIKE}"),
    ([{**ROW, "labels": [1.0]}, {**ROW, "labels": [1.0, 0.0]}], f"column 'labels' mixes shapes (1,), (2,); {ALIKE}"),
]


def error_of(call: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(("features", "message"), BAD_FEATURES, ids=[str(features) for features, _ in BAD_FEATURES])
def test_bad_rows_are_named_with_column_row_and_fix(features, message):
    assert error_of(lambda: DynamicPaddingCollator(tiny.tokenizer())(features)) == message


SIZE = "is invalid; expected an integer of 1 or more. Pass pad_to_multiple_of=32"
SHARE = "is out of range; expected a share in (0, 1], or None for no masking. Write: mlm_probability=0.15."
INNER = "expected inner= alone. Set it on the inner collator, or leave inner out."
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"pad_to_multiple_of": 0}, f"pad_to_multiple_of=0 {SIZE}"),
    ({"pad_to_multiple_of": 8.0}, f"pad_to_multiple_of=8.0 {SIZE}"),
    ({"mlm_probability": 0}, f"mlm_probability=0 {SHARE}"),
    ({"mlm_probability": 15}, f"mlm_probability=15 {SHARE}"),
    (
        {"mlm_probability": 0.15, "causal_lm": True},
        "mlm_probability=0.15 and causal_lm=True both make the labels; expected one of them. Leave one out.",
    ),
    (
        {"inner": default_data_collator, "mlm_probability": 0.15},
        f"inner=default_data_collator pads by itself, so mlm_probability would be ignored; {INNER}",
    ),
    (
        {"inner": default_data_collator, "causal_lm": True, "position_ids": True},
        f"inner=default_data_collator pads by itself, so causal_lm, position_ids would be ignored; {INNER}",
    ),
    (
        {"tokenizer": None},
        "tokenizer=None and inner=None leave nothing to pad with; expected one of them. "
        "Call: BucketedCollator(AutoTokenizer.from_pretrained(name)).",
    ),
    (
        {"tokenizer": "bert-base-uncased"},
        "tokenizer='bert-base-uncased' has no pad_token_id and padding_side; expected a transformers tokenizer or a "
        "processor that holds one. Call: AutoTokenizer.from_pretrained(name).",
    ),
    (
        {"tokenizer": tiny.tokenizer(pad_token=None)},
        f"tokenizer={type(tiny.tokenizer()).__name__} has no pad token; expected one to pad with. "
        "Set: tokenizer.pad_token = tokenizer.eos_token.",
    ),
    (
        {"tokenizer": tiny.tokenizer(mask_token=None), "mlm_probability": 0.15},
        f"mlm_probability=0.15 needs a mask token, which {type(tiny.tokenizer()).__name__} does not have; expected "
        'one in its vocabulary. Set: tokenizer.mask_token = "[MASK]".',
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=range(len(BAD_SETTINGS)))
def test_bad_settings_are_refused_at_construction(settings, message):
    assert error_of(lambda: BucketedCollator(**{"tokenizer": tiny.tokenizer(), **settings})) == message


BAD_LABELS: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    (
        {"model": bert("TokenClassification", num_labels=3)},
        tokenized([2, 3], label=[[1, 0], [1, 1, 0, 0]]),
        "features[1]['label'] has 4 entries for 3 input_ids, and the model has no decoder; expected one label per "
        "token. Align them: tokenizer(words, is_split_into_words=True).",
    ),
    (
        {"mlm_probability": 0.15},
        [{**ROW, "label": 1}],
        "mlm_probability=0.15 draws the labels, but the data has them under 'label'; expected one source of labels. "
        "Call: dataset.remove_columns('label').",
    ),
    (
        {"causal_lm": True},
        [{**ROW, "label": 1}],
        "causal_lm=True needs one label per token, and column 'label' has not; expected labels as long as input_ids, "
        "or none. Call: dataset.remove_columns('label').",
    ),
]


@pytest.mark.parametrize(("settings", "rows", "message"), BAD_LABELS, ids=["tokens", "mlm", "causal"])
def test_labels_that_the_model_cannot_use_are_refused(settings, rows, message):
    assert error_of(lambda: DynamicPaddingCollator(tiny.tokenizer(), **settings)(rows)) == message


def test_causal_lm_with_an_encoder_decoder_is_refused_and_changes_nothing():
    collator = DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True)
    for refused in (
        lambda: collator.adapt(t5()),
        lambda: DynamicPaddingCollator(tiny.tokenizer(), causal_lm=True, model=t5()),
    ):
        assert error_of(refused) == (
            "causal_lm=True copies input_ids to labels, but T5ForConditionalGeneration is an encoder-decoder; expected "
            "the decoder's labels in the data. Leave causal_lm out."
        )
    assert collator([ROW])["labels"].tolist() == [[5, 6] + [-100] * 6]
