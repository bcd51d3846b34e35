"""Which rows share a micro-batch, what it contains, and that the columns which were cut off do not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import row_models
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from hf_memopt.training.techniques.microbatching import row_lengths, splittable_batch_reason, splittable_reason
from hf_memopt.training.techniques.microbatching.splitting import cut, decoder_lengths, take_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
LIMIT = st.none() | st.integers(1, 120)


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


def text(rows: int = 3, columns: int = 10, real: int = 4, **others: Any) -> dict[str, Any]:
    """Return a batch whose rows have ``real`` tokens each, then padding."""
    mask = torch.zeros(rows, columns, dtype=torch.long)
    mask[:, :real] = 1
    return {"input_ids": torch.ones(rows, columns, dtype=torch.long), "attention_mask": mask, **others}


def filled(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def labelled(rows: int, columns: int, *counting: tuple[int, slice | int]) -> torch.Tensor:
    """Return labels of which these, by row and column, count."""
    labels = torch.full((rows, columns), -100)
    for row, column in counting:
        labels[row, column] = 5
    return labels


WHOLE = [10, 10, 10]
DECODED = labelled(3, 7, (0, slice(6)), (1, slice(2)), (2, slice(3)))
PAIRS = {"decoder_input_ids": filled(3, 7), "decoder_attention_mask": torch.ones(3, 1, 7, 7)}
EIGHTS = torch.stack([(torch.arange(16) < 9).long(), (torch.arange(16) < 3).long()])
Shapes = dict[str, tuple[int, ...]]
TRIMMED: dict[str, tuple[dict[str, Any], list[int] | None, list[int] | None, list[int], Shapes]] = {
    # no column is cut off where it might count
    **{
        name: (text(**others), WHOLE, None, [1], {"input_ids": (1, 10)})
        for name, others in {
            "padding on the left": {"attention_mask": text()["attention_mask"].flip(1)},
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
            "a loss over columns": {"start_positions": torch.zeros(3), "end_positions": torch.ones(3)},
        }.items()
    },
    "a width that is a multiple of eight stays one": (
        {"input_ids": filled(2, 16), "attention_mask": EIGHTS}, [16, 8], None, [1],
        {"input_ids": (1, 8), "attention_mask": (1, 8)},
    ),
    "a label outside of the mask": (
        text(labels=labelled(3, 10, (1, 6))), [4, 7, 4], None, [0, 1],
        {"input_ids": (2, 7), "attention_mask": (2, 7), "labels": (2, 7)},
    ),
    "embeddings and shared positions": (
        {**text(inputs_embeds=torch.rand(3, 10, 6), position_ids=torch.arange(10)[None]), "input_ids": None},
        [4, 4, 4], None, [0, 2], {"inputs_embeds": (2, 4, 6), "attention_mask": (2, 4), "position_ids": (1, 4)},
    ),
    "no token at all": (text(real=0), [1, 1, 1], None, [0], {"input_ids": (1, 1), "attention_mask": (1, 1)}),
    "both sides of an encoder-decoder": (
        text(decoder_input_ids=filled(3, 7), labels=DECODED), [10, 6, 7], [6, 2, 3], [1, 2],
        {"input_ids": (2, 4), "attention_mask": (2, 4), "decoder_input_ids": (2, 3), "labels": (2, 3)},
    ),
    "a decoder with a mask of pairs": (
        text(labels=labelled(3, 7), **PAIRS), [11, 11, 11], [7, 7, 7], [1],
        {"input_ids": (1, 4), "attention_mask": (1, 4), "labels": (1, 7), "decoder_input_ids": (1, 7),
         "decoder_attention_mask": (1, 1, 7, 7)},
    ),
    "frames of sound beside text": (
        {"input_features": torch.rand(2, 80, 30), "labels": torch.tensor([[5, 6, -100], [7, 8, 9]])},
        [2, 3], None, [0], {"input_features": (1, 80, 30), "labels": (1, 2)},
    ),
    "tokens of all choices": (
        {"input_ids": filled(2, 4, 5), "labels": torch.tensor([0, 3])}, [20, 20], None, [1],
        {"input_ids": (1, 4, 5), "labels": (1,)},
    ),
    "images": (
        {"pixel_values": torch.rand(2, 3, 4, 4), "labels": torch.tensor([0, 1])}, None, None, [1],
        {"pixel_values": (1, 3, 4, 4), "labels": (1,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRIMMED)
def test_padding_that_no_row_needs_is_cut_off_and_nothing_else(case: str) -> None:
    batch, lengths, of_decoder, rows, shapes = TRIMMED[case]
    batch = {name: value for name, value in batch.items() if value is not None}
    assert (row_lengths(batch), decoder_lengths(batch)) == (lengths, of_decoder)
    micro_batch = take_rows(batch, rows)
    found = {name: tuple(value.shape) for name, value in micro_batch.items() if torch.is_tensor(value)}
    assert {**found, **shapes} == found
    assert lengths == WHOLE or found == shapes
    for name, shape in shapes.items():
        columns = slice(None) if len(shape) < 2 else slice(shape[1])
        kept = batch[name] if len(shape) < 2 else batch[name][:, columns]
        assert torch.equal(micro_batch[name], kept if len(kept) == 1 else kept[rows])


def normed(norm: type[nn.Module], *, trains: bool = True) -> nn.Module:
    model = nn.Module()
    model.body = nn.Sequential(nn.Conv2d(3, 2, 1), norm(2)).train(trains)
    model.forward = lambda pixel_values: model.body(pixel_values)
    return model


def of_features() -> nn.Module:
    """Return another loss upon CLIP's features."""
    model = nn.Module()
    model.clip = row_models.build("clip")
    model.forward = lambda input_ids: model.clip.get_text_features(input_ids)
    return model


def big_bird() -> nn.Module:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.BigBirdConfig(**sizes, num_attention_heads=1, block_size=2, attention_type="block_sparse")
    return transformers.BigBirdForSequenceClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    **{
        norm.__name__: (partial(normed, norm), f"{norm.__name__} body.1 takes its statistics over the rows of a batch")
        for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    },
    "a norm kept as it is": (partial(normed, nn.BatchNorm2d, trains=False), None),
    "contrastive": (
        partial(row_models.build, "clip"),
        "the loss of CLIPModel compares the rows of a batch with each other",
    ),
    "features": (of_features, None),
    "attention that short rows change": (
        big_bird,
        "the sparse attention of BigBirdForSequenceClassification becomes full, for good, once all rows are short",
    ),
    **{name: (partial(row_models.build, name), None) for name in ("bert", "llama", "gpt2", "t5")},
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_cut(case: str) -> None:
    build, reason = MODELS[case]
    model = build()
    assert splittable_reason(model if "norm" in case.lower() else model.train()) == reason
    if case == "attention that short rows change":
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
        assert model.bert.attention_type == "original_full"


ONE = {"input_ids": filled(1, 5)}
FLATTENED = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=False)(
    [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
)
IN_ONE_ROW = "its examples are packed into one row, as {} shows"
NO_ENTRIES = "{} of shape {} does not have one entry for each of the 3 rows"
BATCHES: dict[str, tuple[dict[str, Any], str | None]] = {
    "position_ids": ({**ONE, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, IN_ONE_ROW.format("position_ids")),
    "seq_idx": ({**ONE, "seq_idx": torch.tensor([[0, 0, 0, 1, 1]])}, IN_ONE_ROW.format("seq_idx")),
    "cu_seq_lens": ({**ONE, "cu_seq_lens_q": torch.tensor([0, 3, 5])}, IN_ONE_ROW.format("cu_seq_lens_q")),
    "stock's flattening": (FLATTENED, IN_ONE_ROW.format("position_ids")),
    "patches": (text(pixel_values=torch.rand(12, 6)), NO_ENTRIES.format("pixel_values", (12, 6))),
    "patches in a dict": (text(vision={"patches": torch.rand(12, 6)}), NO_ENTRIES.format("vision.patches", (12, 6))),
    "positions by axis": (
        text(position_ids=torch.zeros(3, 3, 10)), NO_ENTRIES.format("position_ids", (3, 3, 10))
    ),
    "plain": (text(), None),
    "one row": (text(rows=1), None),
    "shared positions": (text(position_ids=torch.arange(10)[None]), None),
    "packed rows, several of them": (text(seq_idx=torch.zeros(3, 10)), None),
    "a scalar": (text(scale=torch.tensor(2.0)), None),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_batches_that_cannot_be_cut(case: str) -> None:
    batch, reason = BATCHES[case]
    assert splittable_batch_reason(batch) == reason
