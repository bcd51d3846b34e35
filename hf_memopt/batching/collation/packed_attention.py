"""Attention within the texts of a row, for any model on transformers' attention interface: exact, and without a mask of
all pairs of the row's tokens.

Stock tells texts apart by ``position_ids`` that begin anew, but only in models that pass them to the mask, without an
``attention_mask`` and without a cache; in others texts see each other silently, and its mask has one entry for each two
tokens of the row. Here an attention and a mask function are registered as ``"packed_sdpa"`` and ``"packed_eager"``. The
mask is not a tensor but a recipe, as flex attention's ``BlockMask`` is: what makes stock's own mask for one text. The
attention runs text by text on slices of queries, keys and values, so that windows, chunks, sinks and soft caps stay the
model's own, and work and memory are those of the texts. Batches that are not packed go the stock way.

Trade: one attention call per text and layer. On a CPU, forward and backward of 2 layers over 4,096 tokens in texts of
256 take 0.15 s in place of 1.59 s (benchmarks/packed_rows.py); on a GPU many short texts are many small kernels, where
flash attention has one: it reads ``position_ids`` in stock and is left as it is.
"""

from __future__ import annotations

import inspect
from functools import partial
from itertools import pairwise
from threading import local
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_memopt.binding.undo import UndoHandle, undo_all

BASES = ("sdpa", "eager")  # whose masks are tensors of all pairs
_NOW = local()  # .bounds: of the forward pass that runs in this thread


class TextMasks:
    """The masks of the texts of a batch, made by the base implementation when a text is attended to.

    Args:
        bounds: by row where each text begins, and the row's end.
        base: ``"sdpa"`` or ``"eager"``.
        recipe: the arguments with which stock asks for the whole mask.
    """

    ndim, shape, dtype, device = 4, (1, 1, 0, 0), torch.bool, torch.device("cpu")  # what models ask of a mask

    def __init__(self, bounds: list[list[int]], base: str, recipe: dict[str, Any]) -> None:
        self.bounds, self._base, self._recipe = bounds, base, recipe
        self._made: dict[tuple[int, int], tuple[torch.Tensor | None, bool | None]] = {}

    def to(self, *args: Any, **kwargs: Any) -> TextMasks:
        return self

    def __getitem__(self, index: Any) -> TextMasks:  # models cut masks to the length of the keys
        return self

    def of_text(self, row: int, start: int, end: int, is_causal: bool) -> torch.Tensor | None:
        """Return the mask of one text, (1, 1, length, length); None where ``is_causal`` tells the kernel as much."""
        if (row, start) not in self._made:
            self._made[row, start] = self._make(row, start, end - start)
        mask, plain = self._made[row, start]
        return None if plain is is_causal else mask

    def _make(self, row: int, start: int, length: int) -> tuple[torch.Tensor | None, bool | None]:
        """Return the mask, and whether it is plainly causal (True), plainly all tokens (False) or neither (None)."""
        function = self._recipe["mask_function"]

        def moved(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return function(batch + row, head, query + start, key + start)  # stock's may index tensors of the whole row

        wanted = {**self._recipe, "batch_size": 1, "q_length": length, "kv_length": length, "mask_function": moved}
        wanted |= {"q_offset": 0, "kv_offset": 0, "attention_mask": None}
        wanted |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[self._base](**wanted)
        if mask is None or mask.dtype != torch.bool:  # eager attention adds it, and takes no None
            return mask, None
        plain = False if bool(mask.all()) else True if torch.equal(mask, mask.new_ones(mask.shape).tril()) else None
        return mask, plain


def text_bounds(position_ids: torch.Tensor, rows: int) -> list[list[int]]:
    """Return by row where each text begins, and the row's end; one begins where positions do not go on by 1."""
    begins = torch.diff(position_ids.expand(rows, -1), dim=-1).ne(1)
    return [[0, *(row.nonzero()[:, 0] + 1).tolist(), position_ids.shape[-1]] for row in begins.cpu()]


def pack_attention(model: Any) -> UndoHandle | None:
    """Switch a model to attention within texts wherever a batch has ``position_ids`` that begin anew within a row.

    Returns:
        The handle that undoes it; None where the model's attention is not on transformers' interface, or is one that
        reads ``position_ids`` by itself (flash attention).
    """
    base = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if base not in BASES or not hasattr(model, "set_attn_implementation"):
        return None
    name = f"packed_{base}"
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, base))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(_masks, base))
    try:
        model.set_attn_implementation(name)
    except ValueError:  # a part of the model that has no such interface
        model.set_attn_implementation(base)
    if model.config._attn_implementation != name:
        return None
    hooks = (
        model.register_forward_pre_hook(_note_bounds, with_kwargs=True),
        model.register_forward_hook(_forget_bounds, always_call=True),
    )
    return undo_all(UndoHandle(partial(model.set_attn_implementation, base)), *map(_removing, hooks))


def _removing(hook: Any) -> UndoHandle:
    return UndoHandle(hook.remove)


def _note_bounds(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note where the texts of a packed batch are; None of any other batch."""
    _NOW.bounds = None
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    rows = next((len(value) for value in given if value is not None), 0)
    is_unmasked = mask is None or (mask.ndim == 2 and bool(mask.all()))
    if positions is None or positions.ndim != 2 or kwargs.get("past_key_values") is not None or not is_unmasked:
        return
    bounds = text_bounds(positions, rows)
    if any(len(row) > 2 for row in bounds):
        _NOW.bounds = bounds


def _forget_bounds(*_: Any) -> None:
    _NOW.bounds = None


def _masks(base: str, **recipe: Any) -> Any:
    """Make the mask of a forward pass, in place of stock's mask function."""
    bounds = getattr(_NOW, "bounds", None)
    return ALL_MASK_ATTENTION_FUNCTIONS[base](**recipe) if bounds is None else TextMasks(bounds, base, recipe)


def _attend(
    base: str, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend within each text; query, key and value are (batch, heads, seq, head_dim), the output (batch, seq, ...)."""
    inner = ALL_ATTENTION_FUNCTIONS.get(base) or inspect.getmodule(type(module)).eager_attention_forward  # type: ignore[union-attr]
    if not isinstance(mask, TextMasks):
        if getattr(_NOW, "bounds", None) is not None:
            raise ValueError(
                f"{type(module).__name__} makes its mask by itself, so texts of one row could see each other; expected "
                "transformers' mask functions. Train on padded rows: bucketed(dataset, ...)"
            )
        return inner(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    rows = []
    for row, bounds in enumerate(mask.bounds):
        parts = []
        for start, end in pairwise(bounds):
            q, k, v = (x[row : row + 1, :, start:end] for x in (query, key, value))
            parts.append(inner(module, q, k, v, mask.of_text(row, start, end, causal), **options)[0])
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows), None
