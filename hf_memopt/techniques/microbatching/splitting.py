"""Cut a batch into pieces: which rows go together, and the tensors of a piece without the padding it does not need.

Pure functions on what a collator returns. Rows are sorted by length, so that the longest row of a piece is little
longer than its shortest, and the columns on the right that are padding in all of its rows are cut off. A column is cut
only where that leaves the loss alone: in every row its attention mask is 0 and its label is -100. Columns on the left
stay (without them GPT-2's positions would be others, and so would its loss), and all of them stay where no mask of
shape (batch, seq) tells what is padding, where a tensor of a name unknown here has as many columns, or where the loss
is over columns (``start_positions``: heads for question answering give padding a probability too).

Left out: models that mix neighbouring columns whatever the mask says, as ConvBERT's convolutions do. Their loss depends
on how far a batch is padded, here as anywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_memopt.binding.model_traits import IGNORED_LABEL

__all__ = [
    "cut",
    "decoder_lengths",
    "row_count",
    "row_lengths",
    "splittable_batch_reason",
    "splittable_reason",
    "take_rows",
]

BATCH_NAMES = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "labels")
"""Where the number of rows is read, the first that is there; else from the first tensor with a dimension."""

TEXT_NAMES = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "special_tokens_mask",
    "global_attention_mask",
    "bbox",
    "labels",
)
"""What may have one column per token: (batch, seq) or (batch, seq, ...)."""

DECODER_NAMES = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "decoder_position_ids")
"""The same for the decoder of an encoder-decoder model, to which its labels belong."""

MULTIPLE = 8  # the widths that tensor cores like

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


# ---- Rows -----------------------------------------------------------------------------------------------------------


def row_count(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch.

    Raises:
        ValueError: no tensor has a batch dimension.
    """
    for value in (*(inputs.get(name) for name in BATCH_NAMES), *inputs.values()):
        if torch.is_tensor(value) and value.dim() > 0:
            return int(value.shape[0])
    raise ValueError(
        f"inputs=<{', '.join(inputs)}> have no tensor with a batch dimension; expected one of "
        f"{', '.join(BATCH_NAMES)}. Return tensors from the collator: return_tensors='pt'."
    )


def row_lengths(inputs: Mapping[str, Any]) -> list[int] | None:
    """Return the tokens that each row of a batch takes in a piece of its own, shape (rows,).

    That is up to its last column that is no padding, the decoder's sequence added to the encoder's, each rounded up to
    a multiple of 8 where the batch's own length is one; all columns where nothing may be cut. Waits for the device
    once.

    Returns:
        None for a batch without a sequence of tokens, such as images with one label each.
    """
    columns = _columns_needed(inputs, _sequences(inputs))
    return [sum(row) for row in zip(*columns, strict=True)] if columns else None


def decoder_lengths(inputs: Mapping[str, Any]) -> list[int] | None:
    """Return the decoder's part of ``row_lengths``, shape (rows,); None for a batch with one sequence or none."""
    sequences = _sequences(inputs)
    return _columns_needed(inputs, sequences[1:])[0] if len(sequences) > 1 else None


def take_rows(inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return the piece of a batch that has the given rows, without the padding on the right that none of them needs.

    Tensors, lists and tuples with one entry per row are selected, in nested dicts too; what else there is, such as
    scalars and ``position_ids`` of shape (1, seq), is kept for every piece.

    Example:
        >>> ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> take_rows({"input_ids": ids, "attention_mask": mask}, [1])
        {'input_ids': tensor([[8]]), 'attention_mask': tensor([[1]])}
    """
    sequences = _sequences(inputs)
    trimmed = dict(inputs)
    for sequence, columns in zip(sequences, _columns_needed(inputs, sequences), strict=True):
        needed = max(columns[row] for row in rows)
        if needed < sequence.columns:
            trimmed.update({name: inputs[name][:, :needed].contiguous() for name in sequence.names})
    count = row_count(inputs)
    return {name: _select(value, rows, count) for name, value in trimmed.items()}


def _select(value: Any, rows: Sequence[int], count: int) -> Any:
    if torch.is_tensor(value):
        return value[list(rows)] if value.dim() > 0 and value.shape[0] == count else value
    if isinstance(value, Mapping):
        return {key: _select(inner, rows, count) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and len(value) == count:
        kept = [value[row] for row in rows]
        return kept if isinstance(value, list) else tuple(kept)
    return value


# ---- Sequences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The tensors of a batch that share one sequence of tokens.

    ``names``: those with one column per token. ``counting``: those among them that tell which columns count, (batch,
    seq) each; empty if none may be cut. ``columns``: tokens per row.
    """

    names: tuple[str, ...]
    counting: tuple[str, ...]
    columns: int
    device: torch.device


def _sequences(inputs: Mapping[str, Any]) -> list[_Sequence]:
    """Return the sequences of a batch: the text (of an encoder-decoder model the encoder's), then the decoder's."""
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
    return sequences


def _sequence(
    inputs: Mapping[str, Any], names: Sequence[str], like: torch.Tensor, needs_mask: bool = False
) -> _Sequence:
    """Return the sequence that has the columns of ``like``, (batch, seq) or (batch, seq, ...)."""
    rows = like.shape[0]
    columns = like.shape[1] if like.is_floating_point() else like.shape[1:].numel()  # of all choices, if there are
    shared = tuple(name for name in names if _has_columns(inputs.get(name), columns))
    telling = tuple(name for name in shared if name == "labels" or name.endswith("attention_mask"))
    may_cut = (
        all(inputs[name].shape == (rows, columns) and not inputs[name].is_floating_point() for name in telling)
        and ("attention_mask" in telling if needs_mask else bool(telling))
        and "start_positions" not in inputs
        and not any(_may_need(name, value, columns) for name, value in _tensors(inputs))
    )
    return _Sequence(shared, telling if may_cut else (), columns, like.device)


def _has_columns(value: Any, columns: int) -> bool:
    return torch.is_tensor(value) and value.dim() > 1 and value.shape[1] == columns


def _may_need(name: str, value: torch.Tensor, columns: int) -> bool:
    """Tell whether a tensor that nobody would trim has as many columns, in whichever dimension."""
    is_known = name in (*TEXT_NAMES, *DECODER_NAMES) and _has_columns(value, columns)
    return columns in value.shape[1:] and not is_known


def _tensors(inputs: Mapping[Any, Any], within: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch by name; of nested dicts too, as "outer.inner"."""
    for name, value in inputs.items():
        if torch.is_tensor(value):
            yield f"{within}{name}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{within}{name}.")


def _columns_needed(inputs: Mapping[str, Any], sequences: Sequence[_Sequence]) -> list[list[int]]:
    """Return up to which column each row is needed, 1 at least, for each sequence; shape (sequences, rows)."""
    last = [_last_columns(inputs, sequence) for sequence in sequences]
    found: list[list[int]] = torch.stack(last).tolist() if last else []
    return found


def _last_columns(inputs: Mapping[str, Any], sequence: _Sequence) -> torch.Tensor:
    if not sequence.counting:
        return torch.full((row_count(inputs),), sequence.columns, device=sequence.device)
    counts = [inputs[name] != (IGNORED_LABEL if name == "labels" else 0) for name in sequence.counting]
    numbers = torch.arange(1, sequence.columns + 1, device=sequence.device)
    needed = (torch.stack(counts).any(0) * numbers).amax(1).clamp(min=1)
    if sequence.columns % MULTIPLE == 0:
        needed = (needed + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return needed


# ---- Cuts -----------------------------------------------------------------------------------------------------------


def cut(
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    max_examples: int | None = None,
    decoder_lengths: Sequence[int] | None = None,
) -> list[list[int]]:
    """Cut the rows of a batch into as few pieces as the limits allow, and those with as little padding as possible.

    The rows are sorted by length, the longest first, and neighbours share a piece. Its padded tokens are its rows times
    the longest of them, encoder and decoder apart.

    Args:
        lengths: tokens of each row, as ``row_lengths`` gives them; ``[1] * rows`` where it gives None.
        max_tokens: most padded tokens of a piece; a longer row gets a piece of its own.
        max_examples: most rows of a piece.
        decoder_lengths: the decoder's part of the lengths, as ``decoder_lengths`` gives it.

    Returns:
        The rows of each piece. Every row is in one of them; rows of one length stay in their order.

    Raises:
        ValueError: a limit below 1.

    Example:
        >>> cut([3, 9, 2, 8, 3], max_tokens=18)
        [[1, 3], [0, 4, 2]]
    """
    for name, limit in (("max_tokens", max_tokens), ("max_examples", max_examples)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit!r} leaves no row in a piece; expected at least 1. Pass {name}=1.")
    total = np.asarray(lengths, dtype=np.int64)
    decoder = np.zeros_like(total) if decoder_lengths is None else np.asarray(decoder_lengths, dtype=np.int64)
    order = np.argsort(-total, kind="stable")
    starts = _best_starts((total - decoder)[order], decoder[order], max_tokens, max_examples or len(total))
    return [order[start:end].tolist() for start, end in pairwise([*starts, len(total)])]


def _best_starts(
    encoder: NDArray[np.int64], decoder: NDArray[np.int64], max_tokens: int | None, max_examples: int
) -> list[int]:
    """Return where each piece of the sorted rows begins; the best cut of each prefix follows from the shorter ones."""
    count = len(encoder)
    a_piece = 2 * count * int((encoder + decoder).max(initial=0)) + 1  # above the padded tokens of any cut
    cost = np.zeros(count + 1, dtype=np.int64)
    began = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        first = max(0, end - max_examples)
        rows = np.arange(end - first, 0, -1)
        padded = rows * (_longest_from(encoder[first:end]) + _longest_from(decoder[first:end]))
        if max_tokens is not None:
            padded = padded[-max(1, int((padded <= max_tokens).sum())) :]  # the fewer rows, the fewer tokens
        candidates = cost[end - len(padded) : end] + padded + a_piece
        chosen = int(candidates.argmin())
        cost[end], began[end] = candidates[chosen], end - len(padded) + chosen
    starts = []
    while count > 0:
        count = int(began[count])
        starts.append(count)
    return starts[::-1]


def _longest_from(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each position the longest of the rows from there on."""
    return np.maximum.accumulate(lengths[::-1])[::-1]


# ---- What cannot be cut ---------------------------------------------------------------------------------------------


def splittable_reason(model: nn.Module) -> str | None:
    """Tell why the loss of a model is not a sum over rows, so that pieces would train something else; None if it is.

    Found are batch norms that are in training mode now, contrastive models (CLIP), which compare the rows of a batch
    with each other: those whose ``forward`` takes ``return_loss``, and BigBird's sparse attention.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) and module.training:
            return f"{type(module).__name__} {name} takes its statistics over the rows of a batch"
    innermost = _innermost(model)
    if "return_loss" in inspect.signature(innermost.forward).parameters:
        return f"the loss of {type(innermost).__name__} compares the rows of a batch with each other"
    if getattr(getattr(innermost, "config", None), "attention_type", None) == "block_sparse":
        return f"the sparse attention of {type(innermost).__name__} becomes full, for good, once all rows are short"
    return None


def _innermost(model: Any) -> Any:
    """Return the model inside the wrappers of accelerate and PEFT."""
    from accelerate.utils import extract_model_from_parallel

    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def splittable_batch_reason(inputs: Mapping[str, Any]) -> str | None:
    """Tell why a batch cannot be cut into rows; None if it can.

    Found are sequences packed into one row, and tensors that do not have one entry per row, such as the image patches
    of Qwen2-VL. Waits for the device where a batch of one row has ``position_ids``.
    """
    rows = row_count(inputs)
    packed = [name for name in inputs if name.startswith("cu_seq")]
    if rows == 1:
        packed += [name for name in ("seq_idx", "position_ids") if _restarts(inputs.get(name))]
    if packed:
        return f"its examples are packed into one row, as {packed[0]} tells"
    for name, value in _tensors(inputs):
        is_elsewhere = name == "position_ids" and value.dim() == 3  # (3, batch, seq), for text, height and width
        if is_elsewhere or (value.dim() > 0 and value.shape[0] not in (1, rows)):
            return f"{name} of shape {tuple(value.shape)} does not have one entry for each of the {rows} rows"
    return None


def _restarts(numbers: Any) -> bool:
    """Tell whether positions begin again within a row, or whether the number of the sequence changes."""
    if not torch.is_tensor(numbers) or numbers.dim() == 0:
        return False
    steps = numbers.diff()
    return bool((steps < 0).any()) or bool((steps == 0).any() and (steps != 0).any())
