"""Split a batch into micro-batches: which rows go together, and their tensors without the padding they do not need.

Pure functions on what a collator returns. Rows are sorted by length, so that the longest row of a micro-batch is little
longer than its shortest, and the columns on the right that are padding in all of its rows are cut off. A column is cut
off only where that does not change the loss: in every row its attention mask is 0 and its label is -100. Columns on the
left stay (without them GPT-2 would number its positions differently, and its loss would change). All columns stay where
no mask of shape (batch, seq) marks the padding, where a tensor with an unknown name has as many columns, or where the
loss is over columns (``start_positions``: heads for question answering give padding a probability too).

Models that read padding all the same, as XLNet's and YOSO's heads and ConvBERT's convolutions do, are found by running
a row with its padding and without it (``padding_check``); then all columns stay too: ``keeps_padding``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_memopt.training.binding.model import IGNORED_LABEL
from hf_memopt.training.binding.trials import row_count, select_rows

TEXT_NAMES = (
    *("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids"),
    *("special_tokens_mask", "global_attention_mask", "bbox", "labels"),
)
"""Tensors that may have one column per token: (batch, seq) or (batch, seq, ...)."""

DECODER_NAMES = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "decoder_position_ids")
"""The same for the decoder of an encoder-decoder model, to which its labels belong."""

MULTIPLE = 8  # widths at which tensor cores are fast


# ---- Rows -----------------------------------------------------------------------------------------------------------


def row_lengths(inputs: Mapping[str, Any], *, keeps_padding: bool = False) -> list[int] | None:
    """Return the tokens that each row of a batch takes in a micro-batch of its own, shape (rows,).

    That is up to its last column that is not padding, the decoder's sequence added to the encoder's, each rounded up to
    a multiple of 8 where the batch's own length is one; all columns where none may be cut off. Waits for the device
    once.
    """
    columns = _columns_needed(inputs, _sequences(inputs, keeps_padding))
    return [sum(row) for row in zip(*columns, strict=True)] if columns else None


def decoder_lengths(inputs: Mapping[str, Any], *, keeps_padding: bool = False) -> list[int] | None:
    """Return the decoder's part of ``row_lengths``, shape (rows,); None for a batch with one sequence or none."""
    sequences = _sequences(inputs, keeps_padding)
    return _columns_needed(inputs, sequences[1:])[0] if len(sequences) > 1 else None


def take_rows(
    inputs: Mapping[str, Any], rows: Sequence[int], *, keeps_padding: bool = False, multiple: int = MULTIPLE
) -> dict[str, Any]:
    """Return the given rows of a batch, without the padding on the right that none of them needs.

    Everything else, such as scalars and ``position_ids`` of shape (1, seq), is kept as it is.

    Examples:
        >>> ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> take_rows({"input_ids": ids, "attention_mask": mask}, [1])
        {'input_ids': tensor([[8]]), 'attention_mask': tensor([[1]])}
    """
    sequences = _sequences(inputs, keeps_padding)
    trimmed = dict(inputs)
    for sequence, columns in zip(sequences, _columns_needed(inputs, sequences, multiple), strict=True):
        needed = max(columns[row] for row in rows)
        if needed < sequence.columns:
            trimmed.update({name: inputs[name][:, :needed].contiguous() for name in sequence.names})
    selected: dict[str, Any] = select_rows(trimmed, list(rows), row_count(inputs))
    return selected


# ---- Sequences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The tensors of a batch that share one sequence of tokens.

    ``names``: those with one column per token. ``marking``: those among them that mark the columns which are not
    padding, (batch, seq) each; empty if no column may be cut off. ``columns``: tokens per row.
    """

    names: tuple[str, ...]
    marking: tuple[str, ...]
    columns: int
    device: torch.device


def _sequences(inputs: Mapping[str, Any], keeps_padding: bool) -> list[_Sequence]:
    """Return the sequences of a batch: the text (of an encoder-decoder model the encoder's), then the decoder's.

    ``keeps_padding``: no column of theirs may be cut off.
    """
    sequences = []
    text = next((inputs[name] for name in TEXT_NAMES[:2] if torch.is_tensor(inputs.get(name))), None)
    labels = inputs.get("labels")
    has_token_labels = torch.is_tensor(labels) and labels.dim() == 2 and not labels.is_floating_point()
    has_decoder = any(torch.is_tensor(inputs.get(name)) for name in DECODER_NAMES)
    if text is not None and text.dim() > 1:
        of_text = TEXT_NAMES[:-1] if has_decoder else TEXT_NAMES
        sequences.append(_sequence(inputs, of_text, text, needs_mask=True))
        has_token_labels = has_token_labels and "labels" not in sequences[0].names
    if has_decoder or has_token_labels:
        of_decoder = (*DECODER_NAMES, "labels") if has_token_labels else DECODER_NAMES
        first = next(inputs[name] for name in of_decoder if torch.is_tensor(inputs.get(name)))
        sequences.append(_sequence(inputs, of_decoder, first))
    return [replace(sequence, marking=()) for sequence in sequences] if keeps_padding else sequences


def _sequence(
    inputs: Mapping[str, Any], names: Sequence[str], like: torch.Tensor, needs_mask: bool = False
) -> _Sequence:
    """Return the sequence that has the columns of ``like``, (batch, seq) or (batch, seq, ...)."""
    rows = like.shape[0]
    # ids of multiple choice have shape (batch, choices, seq)
    columns = like.shape[1] if like.is_floating_point() else like.shape[1:].numel()
    shared = tuple(name for name in names if _has_columns(inputs.get(name), columns))
    marking = tuple(name for name in shared if name == "labels" or name.endswith("attention_mask"))
    may_cut = (
        all(inputs[name].shape == (rows, columns) and not inputs[name].is_floating_point() for name in marking)
        and ("attention_mask" in marking if needs_mask else bool(marking))
        and "start_positions" not in inputs
        and not any(_may_need(name, value, columns) for name, value in tensors_by_name(inputs))
    )
    return _Sequence(shared, marking if may_cut else (), columns, like.device)


def _has_columns(value: Any, columns: int) -> bool:
    return torch.is_tensor(value) and value.dim() > 1 and value.shape[1] == columns


def _may_need(name: str, value: torch.Tensor, columns: int) -> bool:
    """Return whether a tensor that would not be trimmed has as many columns, in whichever dimension."""
    is_known = name in (*TEXT_NAMES, *DECODER_NAMES) and _has_columns(value, columns)
    return columns in value.shape[1:] and not is_known


def tensors_by_name(inputs: Mapping[Any, Any], within: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch by name; of nested dicts too, as "outer.inner"."""
    for name, value in inputs.items():
        if torch.is_tensor(value):
            yield f"{within}{name}", value
        elif isinstance(value, Mapping):
            yield from tensors_by_name(value, f"{within}{name}.")


def _columns_needed(
    inputs: Mapping[str, Any], sequences: Sequence[_Sequence], multiple: int = MULTIPLE
) -> list[list[int]]:
    """Return how many columns of each row are needed, 1 at least, for each sequence; shape (sequences, rows)."""
    last = [_last_columns(inputs, sequence, multiple) for sequence in sequences]
    found: list[list[int]] = torch.stack(last).tolist() if last else []
    return found


def _last_columns(inputs: Mapping[str, Any], sequence: _Sequence, multiple: int) -> torch.Tensor:
    if not sequence.marking:
        return torch.full((row_count(inputs),), sequence.columns, device=sequence.device)  # (batch,)
    # (batch, seq) each
    counts = [inputs[name] != (IGNORED_LABEL if name == "labels" else 0) for name in sequence.marking]
    numbers = torch.arange(1, sequence.columns + 1, device=sequence.device)
    needed = (torch.stack(counts).any(0) * numbers).amax(1).clamp(min=1)  # (batch,): the last column that counts
    if sequence.columns % multiple == 0:
        needed = (needed + multiple - 1) // multiple * multiple
    return needed


# ---- Cuts -----------------------------------------------------------------------------------------------------------


def cut(
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    max_examples: int | None = None,
    decoder_lengths: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split the rows of a batch into as few micro-batches as the limits allow, with as little padding as possible.

    The rows are sorted by length, the longest first, and neighbours share a micro-batch. Its padded tokens are its rows
    times the longest of them, encoder and decoder apart.

    Args:
        lengths: tokens of each row, as ``row_lengths`` gives them; ``[1] * rows`` where it gives None.
        max_tokens: most padded tokens of a micro-batch; a longer row gets one of its own.
        max_examples: most rows of a micro-batch.
        decoder_lengths: the decoder's part of the lengths, as ``decoder_lengths`` gives it.

    Returns:
        The rows of each micro-batch. Every row is in exactly one; rows of one length stay in their order.

    Examples:
        >>> cut([3, 9, 2, 8, 3], max_tokens=18)
        [[1, 3], [0, 4, 2]]
    """
    total = np.asarray(lengths, dtype=np.int64)
    decoder = np.zeros_like(total) if decoder_lengths is None else np.asarray(decoder_lengths, dtype=np.int64)
    order = np.argsort(-total, kind="stable")
    starts = _best_starts((total - decoder)[order], decoder[order], max_tokens, max_examples or len(total))
    return [order[start:end].tolist() for start, end in pairwise([*starts, len(total)])]


def _best_starts(
    encoder: NDArray[np.int64], decoder: NDArray[np.int64], max_tokens: int | None, max_examples: int
) -> list[int]:
    """Return where each micro-batch of the sorted rows begins.

    Dynamic programming over prefixes: the best split of rows 0 to ``end`` is the best split of rows 0 to ``start``, and
    one micro-batch from there on, for the best ``start``. A micro-batch costs its padded tokens and a constant above
    all padded tokens that any split can have, so that fewer micro-batches always win and padding decides among equals.
    Rows are sorted, so the micro-batches to try at each ``end`` are those whose padded tokens, which fall with
    ``start``, are within the limit; one row is always allowed.
    """
    count = len(encoder)
    per_micro_batch = 2 * count * int((encoder + decoder).max(initial=0)) + 1
    cost = np.zeros(count + 1, dtype=np.int64)  # of the best split of the first rows
    start_of_last = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        first = max(0, end - max_examples)
        rows = np.arange(end - first, 0, -1)  # of the last micro-batch, if it begins at first, first + 1, ...
        padded = rows * (_longest_from(encoder[first:end]) + _longest_from(decoder[first:end]))
        if max_tokens is not None:
            padded = padded[-max(1, int((padded <= max_tokens).sum())) :]  # the fewer rows, the fewer tokens
        candidates = cost[end - len(padded) : end] + padded + per_micro_batch
        chosen = int(candidates.argmin())
        cost[end], start_of_last[end] = candidates[chosen], end - len(padded) + chosen
    starts = []
    while count > 0:
        count = int(start_of_last[count])
        starts.append(count)
    return starts[::-1]


def _longest_from(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each position the longest of the rows from there on, shape (rows,)."""
    return np.maximum.accumulate(lengths[::-1])[::-1]


def padded_tokens(inputs: Mapping[str, Any], rows: Sequence[int], *, keeps_padding: bool = False) -> int | None:
    """Return what ``cut`` counts for a micro-batch: rows times the longest row, encoder and decoder apart.

    None for a batch without a sequence of tokens.
    """
    lengths = row_lengths(inputs, keeps_padding=keeps_padding)
    of_decoder = decoder_lengths(inputs, keeps_padding=keeps_padding)
    if lengths is None:
        return None
    decoder = of_decoder or [0] * len(lengths)
    return len(rows) * (max(lengths[row] - decoder[row] for row in rows) + max(decoder[row] for row in rows))
