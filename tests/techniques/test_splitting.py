"""Which rows share a micro-batch, what it contains, and that the columns which were cut off do not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import tiny
from hf_memopt.techniques.microbatching import row_count, row_lengths, splittable_batch_reason, splittable_reason
from hf_memopt.techniques.microbatching.splitting import cut, decoder_lengths, take_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
LIMIT = st.none() | st.integers(1, 120)


# ---- which rows go together


def padded_tokens(rows: Sequence[int], encoder: Sequence[int], decoder: Sequence[int]) -> int:
    return len(rows) * (max(encoder[row] for row in rows) + max(decoder[row] for row in rows))


def all_cuts(order: list[int]) -> list[list[list[int]]]:
    """Return every way to cut a list into neighbouring groups."""
    if not order:
        return [[]]
    return [[order[:first], *rest] for first in range(1, len(order) + 1) for rest in all_cuts(order[first:])]


@given(LENGTHS, st.data(), LIMIT, st.none() | st.integers(1, 9))
@example([40, 1, 40, 2], None, 41, None)
def test_as_few_groups_as_the_limits_allow_then_as_little_padding(
    encoder: list[int], data: Any, max_tokens: int | None, max_examples: int | None
) -> None:
    sizes = {"min_size": len(encoder), "max_size": len(encoder)}
    decoder = [0] * len(encoder) if data is None else data.draw(st.lists(st.integers(0, 30), **sizes))
    total = [one + other for one, other in zip(encoder, decoder, strict=True)]
    groups = cut(total, max_tokens=max_tokens, max_examples=max_examples, decoder_lengths=decoder)

    def is_allowed(micro_batch: list[int]) -> bool:
        fits = max_tokens is None or padded_tokens(micro_batch, encoder, decoder) <= max_tokens or len(micro_batch) == 1
        return fits and (max_examples is None or len(micro_batch) <= max_examples)

    def cost(cuts: list[list[int]]) -> tuple[int, int]:
        return len(cuts), sum(padded_tokens(micro_batch, encoder, decoder) for micro_batch in cuts)

    order = sorted(range(len(total)), key=lambda row: -total[row])
    best = min(cost(cuts) for cuts in all_cuts(order) if all(map(is_allowed, cuts)))
    assert [
        row for micro_batch in groups for row in micro_batch
    ] == order  # every row once, the longest first, ties in order
    assert all(map(is_allowed, groups))
    assert cost(groups) == best


def test_without_a_limit_all_rows_are_one_micro_batch() -> None:
    assert cut([3, 9, 5]) == [[1, 2, 0]]


def test_no_rows_are_no_micro_batch() -> None:
    assert cut([], max_tokens=8) == []


def test_a_row_above_the_limit_is_a_micro_batch_of_its_own() -> None:
    assert cut([4, 100, 4, 101], max_tokens=8) == [[3], [1], [0, 2]]


def test_the_rest_is_not_a_tiny_micro_batch_if_another_cut_pads_less() -> None:
    assert cut([10, 10, 2, 2], max_examples=3) == [[0, 1], [2, 3]]  # three and one would pad 32 tokens instead of 24


# ---- what a micro-batch holds


def padded(rows: Sequence[Sequence[int]], value: int, multiple: int, side: str = "right") -> torch.Tensor:
    width = -(-max(map(len, rows)) // multiple) * multiple
    filled = [[value] * (width - len(row)) for row in rows]
    if side == "right":
        return torch.tensor([[*row, *fill] for row, fill in zip(rows, filled, strict=True)])
    return torch.tensor([[*fill, *row] for row, fill in zip(rows, filled, strict=True)])


def collated(lengths: Sequence[tuple[int, int]], multiple: int, seq2seq: bool) -> dict[str, Any]:
    """Return what a collator makes of examples of these lengths: token labels, or a decoder's of another length."""
    ids = [list(range(1, length + 1)) for length, _ in lengths]
    labels = [list(range(7, 7 + length)) for _, length in lengths] if seq2seq else ids
    embedded = padded(ids, 0, multiple)
    return {
        "input_ids": padded(ids, 0, multiple),
        "attention_mask": padded([[1] * len(row) for row in ids], 0, multiple),
        "token_type_ids": padded([[0] * len(row) for row in ids], 0, multiple),
        "bbox": torch.stack([embedded] * 4, dim=2),
        "labels": padded(labels, -100, multiple),
        "names": [str(length) for length in lengths],
        "extra": {"weights": torch.tensor([float(length) for length, _ in lengths]), "flag": True},
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif torch.is_tensor(one):
        assert one.dtype == other.dtype
        assert one.is_contiguous()  # heads flatten labels with view(-1)
        assert torch.equal(one, other)
    else:
        assert one == other


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(13, 30)), min_size=2, max_size=7), st.data())
def test_a_micro_batch_equals_what_the_collator_makes_of_its_rows(lengths: list[tuple[int, int]], data: Any) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    for seq2seq in (False, True):
        for multiple in (1, 8):
            batch = collated(lengths, multiple, seq2seq)
            if multiple == 1 and any(batch[name].shape[1] % 8 == 0 for name in ("input_ids", "labels")):
                continue  # then widths stay multiples of 8 on purpose: the next test
            assert_same(take_rows(batch, rows), collated([lengths[row] for row in rows], multiple, seq2seq))


def test_a_width_that_is_a_multiple_of_eight_stays_one() -> None:
    batch = {"input_ids": torch.ones(2, 16, dtype=torch.long), "attention_mask": torch.zeros(2, 16, dtype=torch.long)}
    batch["attention_mask"][0, :9] = batch["attention_mask"][1, :3] = 1
    assert row_lengths(batch) == [16, 8]
    assert take_rows(batch, [1])["input_ids"].shape == (1, 8)


@given(st.lists(st.integers(1, 15), min_size=1, max_size=6), st.data())
def test_the_length_of_a_row_is_its_width_alone(lengths: list[int], data: Any) -> None:
    seq2seq = data.draw(st.booleans())
    batch = collated([(length, 31 - length) for length in lengths], 1, seq2seq)
    found = row_lengths(batch)
    assert found is not None
    for row, length in enumerate(found):
        micro_batch = take_rows(batch, [row])
        assert length == micro_batch["input_ids"].shape[1] + (micro_batch["labels"].shape[1] if seq2seq else 0)
    of_decoder = [take_rows(batch, [row])["labels"].shape[1] for row in range(len(lengths))]
    assert decoder_lengths(batch) == (of_decoder if seq2seq else None)


def text(rows: int = 3, columns: int = 10, real: int = 4, **others: Any) -> dict[str, Any]:
    """Return a batch whose rows have ``real`` tokens each, then padding."""
    mask = torch.zeros(rows, columns, dtype=torch.long)
    mask[:, :real] = 1
    return {"input_ids": torch.ones(rows, columns, dtype=torch.long), "attention_mask": mask, **others}


def test_left_padded_rows_keep_their_columns() -> None:
    batch = text()
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    assert row_lengths(batch) == [10, 10, 10]
    assert take_rows(batch, [2, 0])["input_ids"].shape == (2, 10)


KEPT: dict[str, dict[str, Any]] = {
    "no mask": {"attention_mask": None},
    "mask of pairs": {"attention_mask": torch.zeros(3, 1, 10, 10)},
    "mask for a prefix too": {"attention_mask": torch.zeros(3, 14, dtype=torch.long)},
    "one mask for all rows": {"attention_mask": torch.zeros(1, 10, dtype=torch.long)},
    "labels that count": {"labels": torch.zeros(3, 10, dtype=torch.long)},
    "one score for each column": {"labels": torch.zeros(3, 10)},
    "a tensor of unknown name": {"teacher_logits": torch.zeros(3, 10, 5)},
    "one in a nested dict": {"teacher": {"logits": torch.zeros(3, 10, 5)}},
    "a known name in a nested dict": {"teacher": {"input_ids": torch.zeros(3, 10)}},
    "a mask of pairs of unknown name": {"bias": torch.zeros(3, 1, 10, 10)},
}


@pytest.mark.parametrize("case", KEPT)
def test_no_column_is_cut_where_it_might_count(case: str) -> None:
    batch = {name: value for name, value in text(**KEPT[case]).items() if value is not None}
    micro_batch = take_rows(batch, [1])
    assert row_lengths(batch) == [10, 10, 10]
    assert micro_batch["input_ids"].shape == (1, 10)


def test_columns_that_a_label_needs_stay_and_the_others_go() -> None:
    labels = torch.full((3, 10), -100)
    labels[1, 6] = 5  # outside the mask of 4 columns
    batch = text(labels=labels)
    assert row_lengths(batch) == [4, 7, 4]
    assert {name: tuple(value.shape) for name, value in take_rows(batch, [0, 1]).items()} == {
        "input_ids": (2, 7),
        "attention_mask": (2, 7),
        "labels": (2, 7),
    }


def test_embeddings_and_shared_positions_are_trimmed_with_the_mask() -> None:
    batch = text(inputs_embeds=torch.rand(3, 10, 6), position_ids=torch.arange(10)[None])
    del batch["input_ids"]
    micro_batch = take_rows(batch, [0, 2])
    assert torch.equal(micro_batch["inputs_embeds"], batch["inputs_embeds"][[0, 2], :4])
    assert torch.equal(micro_batch["position_ids"], torch.arange(4)[None])


def test_a_row_without_any_token_keeps_one_column() -> None:
    batch = text(real=0)
    assert row_lengths(batch) == [1, 1, 1]
    assert take_rows(batch, [0])["input_ids"].shape == (1, 1)


def test_both_sides_of_an_encoder_decoder_are_trimmed_by_themselves() -> None:
    decoder = torch.ones(3, 7, dtype=torch.long)
    labels = torch.full((3, 7), -100)
    labels[0, :6], labels[1, :2], labels[2, :3] = 1, 1, 1
    batch = text(decoder_input_ids=decoder, labels=labels)
    assert row_lengths(batch) == [4 + 6, 4 + 2, 4 + 3]
    assert decoder_lengths(batch) == [6, 2, 3]
    shapes = {name: tuple(value.shape) for name, value in take_rows(batch, [1, 2]).items()}
    assert shapes == {
        "input_ids": (2, 4),
        "attention_mask": (2, 4),
        "decoder_input_ids": (2, 3),
        "labels": (2, 3),
    }


def test_a_decoder_with_a_mask_of_pairs_keeps_its_columns() -> None:
    labels = torch.full((3, 7), -100)
    batch = text(labels=labels, decoder_input_ids=labels + 100, decoder_attention_mask=torch.ones(3, 1, 7, 7))
    assert decoder_lengths(batch) == [7, 7, 7]
    micro_batch = take_rows(batch, [1])
    assert {name: tuple(value.shape) for name, value in micro_batch.items()} == {
        "input_ids": (1, 4),
        "attention_mask": (1, 4),
        "labels": (1, 7),
        "decoder_input_ids": (1, 7),
        "decoder_attention_mask": (1, 1, 7, 7),
    }


def test_audio_keeps_its_frames_and_loses_columns_of_its_text() -> None:
    labels = torch.tensor([[5, 6, -100], [7, 8, 9]])
    batch = {"input_features": torch.rand(2, 80, 30), "labels": labels}
    assert row_lengths(batch) == [2, 3]
    micro_batch = take_rows(batch, [0])
    assert micro_batch["input_features"].shape == (1, 80, 30)
    assert micro_batch["labels"].tolist() == [[5, 6]]


def test_multiple_choice_counts_the_tokens_of_all_choices() -> None:
    batch = {"input_ids": torch.ones(2, 4, 5, dtype=torch.long), "labels": torch.tensor([0, 3])}
    assert row_lengths(batch) == [20, 20]
    assert take_rows(batch, [1])["input_ids"].shape == (1, 4, 5)


def test_images_have_no_length() -> None:
    batch = {"pixel_values": torch.rand(2, 3, 4, 4), "labels": torch.tensor([0, 1])}
    assert row_lengths(batch) is None
    assert decoder_lengths(batch) is None
    assert row_count(batch) == 2
    assert take_rows(batch, [1])["labels"].tolist() == [1]


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"pixel_values": torch.zeros(8, 3), "input_ids": torch.zeros(2, 5)}, 2),
        ({"labels": torch.zeros(4), "pixel_values": torch.zeros(3, 3, 2, 2)}, 3),
        ({"scale": torch.tensor(1.0), "features": torch.zeros(5, 2)}, 5),
    ],
    ids=["text before images", "images before labels", "any other"],
)
def test_the_number_of_rows(batch: dict[str, Any], rows: int) -> None:
    assert row_count(batch) == rows


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        row_count({"texts": ["a", "b"], "scale": torch.tensor(1.0)})
    assert str(error.value) == (
        "inputs=<texts, scale> have no tensor with a batch dimension; expected one of input_ids, inputs_embeds, "
        "pixel_values, input_features, input_values, labels. Return tensors from the collator: return_tensors='pt'."
    )


# ---- the columns that were cut do not count


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=100, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=100, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bert_tokens() -> nn.Module:
    return transformers.BertForTokenClassification(tiny.bert_config())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("build", [tiny.llama, gpt2, bert_tokens, t5], ids=lambda build: build.__name__)
def test_the_loss_of_a_micro_batch_is_that_of_its_rows_in_the_batch(build: Callable[[], nn.Module], side: str) -> None:
    torch.manual_seed(0)
    model = build().eval()
    ids = [torch.randint(5, 100, (length,)).tolist() for length in (4, 11, 6)]
    seq2seq = build is t5
    labels = [row[:3] for row in ids] if seq2seq else [[token % 3 for token in row] for row in ids]
    batch = {
        "input_ids": padded(ids, 0, 1, side),
        "attention_mask": padded([[1] * len(row) for row in ids], 0, 1, side),
        "labels": padded(labels, -100, 1, "right" if seq2seq else side),
    }
    rows = [2, 0]
    untrimmed = {name: value[rows] for name, value in batch.items()}
    micro_batch = take_rows(batch, rows)
    assert micro_batch["input_ids"].shape[1] == (6 if side == "right" else 11)
    with torch.no_grad():
        # one float32 rounding apart: sums over fewer columns
        torch.testing.assert_close(model(**micro_batch).loss, model(**untrimmed).loss, rtol=1e-6, atol=1e-6)


# ---- what cannot be cut


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.body(pixel_values)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_in_training_mode_cannot_be_cut(norm: type[nn.Module]) -> None:
    model = Convolution()
    model.body[1] = norm(2)
    assert splittable_reason(model) == f"{norm.__name__} body.1 takes its statistics over the rows of a batch"
    model.body.eval()
    assert splittable_reason(model) is None


def clip() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 20}, vision_config={**sizes, "image_size": 4, "patch_size": 2}
    )
    return transformers.CLIPModel(config)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.clip = module

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.clip.get_text_features(input_ids)


def test_contrastive_models_cannot_be_cut() -> None:
    reason = "the loss of CLIPModel compares the rows of a batch with each other"
    assert splittable_reason(clip()) == reason
    assert splittable_reason(Wrapped(clip())) is None  # another loss upon its features


def test_attention_that_short_rows_change_cannot_be_cut() -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.BigBirdConfig(**sizes, num_attention_heads=1, block_size=2, attention_type="block_sparse")
    model = transformers.BigBirdForSequenceClassification(config)
    assert splittable_reason(model) == (
        "the sparse attention of BigBirdForSequenceClassification becomes full, for good, once all rows are short"
    )
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert model.bert.attention_type == "original_full"


def test_padding_stays_where_the_loss_is_over_columns() -> None:
    batch = {**text(), "start_positions": torch.zeros(3), "end_positions": torch.ones(3)}
    assert take_rows(batch, [1])["input_ids"].shape == (1, 10)


@pytest.mark.parametrize("build", [tiny.bert, tiny.llama, gpt2, t5], ids=lambda build: build.__name__)
def test_these_models_can_be_cut(build: Callable[[], nn.Module]) -> None:
    assert splittable_reason(build().train()) is None


PACKED: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])},
    "seq_idx": {"seq_idx": torch.tensor([[0, 0, 0, 1, 1]])},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 3, 5])},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_cannot_be_cut(name: str) -> None:
    batch = {"input_ids": torch.ones(1, 5, dtype=torch.long), **PACKED[name]}
    assert splittable_batch_reason(batch) == f"its examples are packed into one row, as {name} shows"


def test_what_the_flattening_collator_returns_cannot_be_cut() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=False)(rows)
    assert splittable_batch_reason(batch) == "its examples are packed into one row, as position_ids shows"


def test_tensors_without_one_entry_per_row_cannot_be_cut() -> None:
    patches = text(pixel_values=torch.rand(12, 6), image_grid_thw=torch.ones(3, 3))
    assert splittable_batch_reason(patches) == (
        "pixel_values of shape (12, 6) does not have one entry for each of the 3 rows"
    )
    nested = text(vision={"patches": torch.rand(12, 6)})
    assert splittable_batch_reason(nested) == (
        "vision.patches of shape (12, 6) does not have one entry for each of the 3 rows"
    )
    by_axis = text(position_ids=torch.zeros(3, 3, 10))
    assert splittable_batch_reason(by_axis) == (
        "position_ids of shape (3, 3, 10) does not have one entry for each of the 3 rows"
    )


@pytest.mark.parametrize(
    "others",
    [{}, {"position_ids": torch.arange(10)[None]}, {"seq_idx": torch.zeros(3, 10)}, {"scale": torch.tensor(2.0)}],
    ids=["plain", "shared positions", "packed rows, several of them", "scalar"],
)
def test_these_batches_can_be_cut(others: dict[str, Any]) -> None:
    assert splittable_batch_reason(text(**others)) is None
    assert splittable_batch_reason({name: value[:1] for name, value in text().items()}) is None
