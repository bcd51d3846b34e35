"""Collators and models: equal to stock where stock is right, padding that changes no loss, positions."""

from __future__ import annotations

import copy
from typing import Any

import heads
import peft
import pytest
import torch
import transformers
from collated_rows import (
    CLS,
    LENGTHS,
    LOSS_TOLERANCE,
    PAD,
    SEP,
    SIDES,
    assert_same,
    bart,
    bert,
    gpt2,
    ids_of,
    llama,
    reference,
    t5,
    tokenized,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import refuses, table
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

import tiny
from hf_memopt import BucketedCollator, attach, packed
from hf_memopt.types import Change


@given(lengths=LENGTHS, side=SIDES, multiple=st.sampled_from([None, 8]))
def test_equals_data_collator_with_padding(lengths, side, multiple):
    tokenizer = tiny.tokenizer(side)
    rows = tokenized(lengths, label=[i % 3 for i in range(len(lengths))])
    stock = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)(copy.deepcopy(rows))
    assert_same(BucketedCollator(tokenizer, pad_to_multiple_of=multiple)(rows), dict(stock))


@given(lengths=LENGTHS, side=SIDES)
def test_equals_data_collator_for_token_classification(lengths, side):
    tokenizer = tiny.tokenizer(side)
    rows = tokenized(lengths, labels=ids_of(lengths, seed=1))
    stock = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)(copy.deepcopy(rows))
    assert_same(BucketedCollator(tokenizer)(rows), dict(stock))


@given(lengths=LENGTHS, seed=st.integers(0, 9), data=st.data())
def test_equals_data_collator_for_seq2seq_on_right_padding(lengths, seed, data):
    targets = data.draw(st.lists(st.integers(1, 40), min_size=len(lengths), max_size=len(lengths)))
    tokenizer, model = tiny.tokenizer(), t5()
    rows = tokenized(lengths, labels=ids_of(targets, seed=seed))
    stock = DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8)(copy.deepcopy(rows))
    assert_same(BucketedCollator(tokenizer, model=model)(rows), dict(stock))


@given(lengths=LENGTHS, side=SIDES, seed=st.integers(0, 9), with_mask=st.booleans())
def test_mlm_draws_and_masks_as_stock_does(lengths, side, seed, with_mask):
    tokenizer = tiny.tokenizer(side)
    rows = [{**row, "input_ids": [CLS, *row["input_ids"][1:]]} for row in tokenized(lengths)]
    if with_mask:
        rows = [{**row, "special_tokens_mask": [1] + [0] * (len(row["input_ids"]) - 1)} for row in rows]
    torch.manual_seed(seed)
    stock = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, pad_to_multiple_of=8)(copy.deepcopy(rows))
    torch.manual_seed(seed)
    assert_same(BucketedCollator(tokenizer, mlm_probability=0.3)(rows), dict(stock))


@given(lengths=LENGTHS, side=SIDES)
def test_mlm_masks_every_real_token_at_1_and_nothing_else(lengths, side):
    # The pad token is not among the special tokens that a mask of the data names, and CLS is masked out by the data.
    rows = [{"input_ids": [CLS, *row], "special_tokens_mask": [1] + [0] * len(row)} for row in ids_of(lengths)]
    batch = BucketedCollator(tiny.tokenizer(side), mlm_probability=1.0)(rows)
    expected = reference([[-100, *row] for row in ids_of(lengths)], -100, side=side)
    assert batch["labels"].tolist() == expected
    untouched = batch["labels"] == -100
    original = torch.tensor(reference([row["input_ids"] for row in rows], PAD, side=side))
    assert torch.equal(batch["input_ids"][untouched], original[untouched])


def loss_without_padding(model: Any, row: dict[str, Any]) -> float:
    with torch.no_grad():
        return model(**{name: torch.tensor([cell]) for name, cell in row.items()}).loss.item()


def assert_padding_changes_no_loss(
    model: Any, collator: BucketedCollator, rows: list[dict[str, Any]], weights: list[int] | None = None
) -> None:
    """Compare the loss of the batch with the weighted mean of the losses of its rows, each alone and unpadded."""
    weights = weights or [1] * len(rows)
    alone = [loss_without_padding(model, row) for row in rows]
    expected = sum(loss * weight for loss, weight in zip(alone, weights, strict=True)) / sum(weights)
    with torch.no_grad():
        assert abs(model(**collator(rows)).loss.item() - expected) < LOSS_TOLERANCE


FEW = settings(max_examples=10)  # each runs a model on every row


CLASSIFIER = "SequenceClassification"
HEADS: dict[str, tuple[str, dict[str, Any], Any]] = {  # the head, its configuration, the labels of row i with n tokens
    "classification": (CLASSIFIER, {}, lambda i, n: i % 3),
    "multi-label": (CLASSIFIER, {"problem_type": "multi_label_classification"}, lambda i, n: [float(i % 2), 1.0, 0.0]),
    "regression": (CLASSIFIER, {"num_labels": 1}, lambda i, n: i / 3),
    "several targets": (CLASSIFIER, {"problem_type": "regression"}, lambda i, n: [i / 3, -1.0, 0.5]),
    "tokens": ("TokenClassification", {"num_labels": 3}, lambda i, n: [(i + j) % 3 for j in range(n)]),
    "mlm": ("MaskedLM", {}, lambda i, n: [5 + i + j if j % 2 == 0 else -100 for j in range(n)]),
}


@pytest.mark.parametrize("head", HEADS)
@FEW
@given(lengths=LENGTHS, side=SIDES)
def test_padding_changes_no_loss_of_an_encoder(head, lengths, side):
    kind, config, label = HEADS[head]
    model, labels = bert(kind, **config), [label(i, n) for i, n in enumerate(lengths)]
    weights = None if kind == CLASSIFIER else [sum(value != -100 for value in row) for row in labels]
    side = side if weights else "right"  # BERT's pooler reads the first column
    collator = BucketedCollator(tiny.tokenizer(side), model=model)
    assert_padding_changes_no_loss(model, collator, tokenized(lengths, labels=labels), weights)


LENGTHS_OVER_1 = st.lists(st.integers(2, 40), min_size=1, max_size=6)  # a causal LM has no target for a single token


@pytest.mark.parametrize("build", [llama, gpt2])
@FEW
@given(lengths=LENGTHS_OVER_1, side=SIDES)
def test_padding_changes_no_loss_of_a_causal_lm(build, lengths, side):
    model, ids = build(), ids_of(lengths)
    collator = BucketedCollator(tiny.tokenizer(side), model=model, causal_lm=True)
    with torch.no_grad():
        loss = model(**collator([{"input_ids": row} for row in ids])).loss.item()
    alone = [loss_without_padding(model, {"input_ids": row, "labels": row}) * (len(row) - 1) for row in ids]
    assert abs(loss - sum(alone) / sum(n - 1 for n in lengths)) < LOSS_TOLERANCE


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
    collator = BucketedCollator(tiny.tokenizer(side), model=model)
    assert_padding_changes_no_loss(model, collator, rows, targets)


def test_position_ids_count_real_tokens_on_either_side_and_skip_padding_of_the_data():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    for side, expected in [("right", [[0, 1, 2, 0], [0, 0, 0, 0]]), ("left", [[0, 0, 1, 2], [0, 0, 0, 0]])]:
        collator = BucketedCollator(tiny.tokenizer(side), position_ids=True, pad_to_multiple_of=4)
        assert collator(rows)["position_ids"].tolist() == expected
    collator = BucketedCollator(tiny.tokenizer("left"), position_ids=True, pad_to_multiple_of=4)
    masked = [{"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]}]
    assert collator(masked)["position_ids"].tolist() == [[0, 0, 0, 1]]
    own = [{"input_ids": [5, 6], "position_ids": [3, 4]}]
    assert collator(own)["position_ids"].tolist() == [[0, 0, 3, 4]]


POSITIONS = table("batching/tables/models_and_positions")


# DeBERTa of transformers 5.8 still calls torch.jit.script, which torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
class OwnT5ForConditionalGeneration(transformers.T5ForConditionalGeneration):
    def __init__(self) -> None:
        super().__init__(transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1, vocab_size=20))

    def forward(self, input_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        return super().forward(input_ids, labels=labels, **given)


@pytest.mark.parametrize(("name", "config", "needed"), POSITIONS, ids=[name for name, *_ in POSITIONS])
def test_position_ids_are_added_exactly_where_left_padding_changes_the_logits(name, config, needed):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    ids_of_specials = {"vocab_size": 100, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    model = kind(kind.config_class(**{**config, **ids_of_specials})).eval()
    tokenizer = tiny.tokenizer("left", pad_token="[UNK]")  # id 1, as in RoBERTa
    row = {"input_ids": ids_of([5])[0]}
    alone = BucketedCollator(tokenizer, pad_to_multiple_of=None)([row])
    with torch.no_grad():
        expected = model(**alone).logits[0]
        plain, adapted = (
            model(**BucketedCollator(tokenizer, model=given)([row])).logits[0, -5:] for given in (None, model)
        )
    assert ((plain - expected).abs().max() > 1e-3) == needed
    assert torch.allclose(adapted, expected, atol=LOSS_TOLERANCE)


def test_adapt_returns_every_choice_and_leaves_a_collator_that_was_given_its_model():
    collator = BucketedCollator(tiny.tokenizer("left"))
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
    assert BucketedCollator(tiny.tokenizer()).adapt(t5()) == (change,)
    assert BucketedCollator(tiny.tokenizer()).adapt(gpt2()) == ()  # right padding
    assert BucketedCollator(tiny.tokenizer("left"), position_ids=False).adapt(gpt2()) == (label,)
    assert BucketedCollator(tiny.tokenizer("left"), model=llama()).adapt(gpt2()) == ()
    # no causal language model, though its parent is told by its name and it hands its labels on
    assert BucketedCollator(tiny.tokenizer("left"), position_ids=False).adapt(OwnT5ForConditionalGeneration()) == ()
    assert BucketedCollator(inner=default_data_collator).adapt(gpt2()) == ()


def test_an_encoder_decoder_has_decoder_labels_even_where_they_are_as_long_as_the_inputs():
    rows = tokenized([2, 3], labels=[[5, 6], [7, 8, 9]])
    batch = BucketedCollator(tiny.tokenizer("left"), model=bart(), pad_to_multiple_of=4)(rows)
    assert batch["labels"].tolist() == [[5, 6, -100, -100], [7, 8, 9, -100]]
    assert batch["decoder_input_ids"].tolist() == [[SEP, 5, 6, PAD], [SEP, 7, 8, 9]]


# peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_wrappers_are_looked_into():
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    left = BucketedCollator(tiny.tokenizer("left"), model=peft.get_peft_model(copy.deepcopy(gpt2()), lora))
    assert "position_ids" in left([{"input_ids": [5]}])
    lora = peft.LoraConfig(target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    collator = BucketedCollator(tiny.tokenizer(), model=peft.get_peft_model(copy.deepcopy(t5()), lora))
    assert "decoder_input_ids" in collator(tokenized([2], labels=[[5, 6, 7]]))


def attached(model, collator, folder):
    rows = tokenized([5, 9])
    return attach(transformers.Trainer(model, tiny.arguments(folder), train_dataset=rows, data_collator=collator))


@pytest.mark.parametrize("name", ["input_ids", "decoder_input_ids"])
def test_an_id_without_an_embedding_is_refused_before_torch_meets_it(name, tmp_path):
    tokenizer = tiny.tokenizer()
    model = t5() if name.startswith("decoder") else tiny.llama()
    rows = model.get_input_embeddings().num_embeddings
    collator = attached(model, BucketedCollator(tokenizer), tmp_path).data_collator
    row = {"input_ids": [5, rows - 1], "labels": [5, rows - 1]}
    assert collator([row])["input_ids"].max() == rows - 1
    message = (
        f"{name} has the token id {rows}, and the model has embeddings of {rows} ids; expected ids below {rows}. "
        "Call model.resize_token_embeddings(len(tokenizer)) before the Trainer is made"
    )
    column = "labels" if name.startswith("decoder") else name
    refuses(ValueError, message, collator, [{**row, column: [rows, 5]}])


def test_a_decoder_may_have_more_ids_than_its_encoder(tmp_path):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 1, "eos_token_id": 2}
    words = {"vocab_size": 50, "decoder_vocab_size": 90, "share_encoder_decoder_embeddings": False}
    config = transformers.MarianConfig(**sizes, **heads, **words, decoder_start_token_id=1, tie_word_embeddings=False)
    trainer = attached(transformers.MarianMTModel(config), BucketedCollator(tiny.tokenizer()), tmp_path)
    batch = trainer.data_collator([{"input_ids": [5, 6], "labels": [80, 89, 7]}])
    assert batch["decoder_input_ids"].max() == 89
    with pytest.raises(ValueError, match="embeddings of 90 ids"):
        trainer.data_collator([{"input_ids": [5, 6], "labels": [90, 89, 7]}])


def test_labels_of_a_second_head_are_padded_as_labels(tmp_path):
    rows = tokenized([2, 3], pos_labels=ids_of([2, 3], seed=1), scores=[[0.5] * 2, [0.5] * 3])
    args = tiny.arguments(
        tmp_path, label_names=["labels", "pos_labels", "scores", "attention_mask"], per_device_train_batch_size=1
    )
    for side, padding in (("right", slice(2, None)), ("left", slice(-2))):
        collator = BucketedCollator(tiny.tokenizer(side), pad_to_multiple_of=4)
        assert collator(rows)["pos_labels"][0].tolist().count(-100) == 0
        trainer = attach(transformers.Trainer(tiny.bert(), args, train_dataset=rows, data_collator=collator))
        batch = collator(rows)
        assert batch["pos_labels"][0, padding].tolist() == [-100] * 2
        assert batch["scores"][0, padding].tolist() == batch["attention_mask"][0, padding].tolist() == [0] * 2
        trainer.memopt_handle.remove()
        assert (collator(rows)["pos_labels"] != -100).all()
    model = transformers.LlamaForCausalLM(tiny.llama_config())
    trainer = transformers.Trainer(model, args, train_dataset=packed(rows, 8), data_collator=collator)
    [batch] = attach(trainer).get_train_dataloader()
    assert batch["pos_labels"][0, -3:].tolist() == [-100] * 3


@pytest.mark.parametrize(("name", "most"), [("bert", 29), ("roberta", 28), ("bart", 29)])
def test_rounding_up_ends_where_the_model_has_no_more_positions(name, most):
    built = heads.HEADS[name].build()
    config = copy.deepcopy(built.config)
    config.max_position_embeddings = 29
    model = type(built)(config)
    collator = BucketedCollator(tiny.tokenizer(), model=model)
    labels = [1] * most if name == "bart" else 1
    for longest, width in ((most, most), (most - 1, most), (24, 24), (9, 16), (most + 1, 32)):
        batch = collator([{"input_ids": [5] * length, "labels": labels} for length in (longest, 3)])
        assert batch["input_ids"].shape == (2, width)
        if width <= most:
            assert model(**batch).loss.isfinite()
