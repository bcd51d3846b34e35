"""Attention within the texts of a row, for any model on transformers' attention interface, without a mask of all pairs.

``"packed_sdpa"`` and ``"packed_eager"`` are registered beside stock's: the mask is what makes stock's own mask for one
text, and attention runs text by text on slices of queries, keys and values. Windows, chunks, sinks and soft caps stay
the model's own, and work and memory are those of the texts (benchmarks/packed_rows.py). Other batches go the stock way.

Trade: one attention call per text and layer, so on a GPU many short texts are many small kernels. Flash attention reads
``position_ids`` in stock, and is left as it is.
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

from hf_memopt.training.binding import versions
from hf_memopt.training.binding.undo import UndoHandle, undo_all

_NOW = local()  # .bounds: of the packed batch in the forward pass that runs in this thread, or None


class TextMasks:
    """The masks of the texts of a batch, each made from the ``recipe`` with which stock asks for that of whole rows."""

    ndim, shape, dtype, device = 4, (1, 1, 0, 0), torch.bool, torch.device("cpu")  # what models ask of a mask

    def __init__(self, bounds: list[list[int]], base: str, recipe: dict[str, Any]) -> None:
        self.bounds, self._base, self._recipe = bounds, base, recipe
        self._made: dict[tuple[int, int], tuple[torch.Tensor, bool | None]] = {}

    def to(self, *args: Any, **kwargs: Any) -> TextMasks:
        return self

    def __getitem__(self, index: Any) -> TextMasks:  # models cut masks to the length of the keys
        return self

    def of_text(self, row: int, start: int, length: int, is_causal: bool) -> torch.Tensor | None:
        """Return the mask of one text, (1, 1, length, length); None where ``is_causal`` tells the kernel as much."""
        if (row, start) not in self._made:
            function = self._recipe["mask_function"]  # may index tensors of the whole rows
            moved: dict[str, Any] = {"mask_function": lambda b, h, q, k: function(b + row, h, q + start, k + start)}
            moved |= {"batch_size": 1, "q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
            moved |= {"attention_mask": None, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            mask: torch.Tensor = ALL_MASK_ATTENTION_FUNCTIONS[self._base](**{**self._recipe, **moved})
            plain = None  # is it causal and nothing else, or all tokens? eager attention needs it either way
            if mask.dtype == torch.bool:
                plain = False if mask.all() else True if torch.equal(mask, torch.ones_like(mask).tril()) else None
            self._made[row, start] = mask, plain
        mask, plain = self._made[row, start]
        return None if plain is is_causal else mask


def text_bounds(position_ids: torch.Tensor, rows: int) -> list[list[int]]:
    """Return by row where each text begins, and the row's end; one begins where positions do not go on by 1."""
    begins = torch.diff(position_ids.expand(rows, -1), dim=-1).ne(1)
    return [[0, *(row.nonzero()[:, 0] + 1).tolist(), position_ids.shape[-1]] for row in begins.cpu()]


def pack_attention(model: Any) -> UndoHandle | None:
    """Switch a model to attention within texts wherever a batch has ``position_ids`` that begin anew within a row.

    None where its attention is not on transformers' interface, or neither sdpa nor eager.
    """
    base = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if base not in ("sdpa", "eager") or not hasattr(model, "set_attn_implementation"):
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
    before = model.register_forward_pre_hook(_note_bounds, with_kwargs=True)
    after = model.register_forward_hook(_forget_bounds, always_call=True)
    undo = (partial(model.set_attn_implementation, base), before.remove, after.remove)
    return undo_all(*map(UndoHandle, undo))


def _note_bounds(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _NOW.bounds = None
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    is_cached = any(kwargs.get(name) is not None for name in versions.CACHES)
    is_unmasked = mask is None or (mask.ndim == 2 and bool(mask.all()))
    if positions is not None and positions.ndim == 2 and is_unmasked and not is_cached:
        bounds = text_bounds(positions, next((len(value) for value in given if value is not None), 0))
        _NOW.bounds = bounds if any(len(row) > 2 for row in bounds) else None


def _forget_bounds(*_: Any) -> None:
    _NOW.bounds = None


def _masks(base: str, **recipe: Any) -> Any:
    bounds = getattr(_NOW, "bounds", None)
    return ALL_MASK_ATTENTION_FUNCTIONS[base](**recipe) if bounds is None else TextMasks(bounds, base, recipe)


def _attend(
    base: str, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend within each text; query, key and value are (batch, heads, seq, head_dim), the output (batch, seq, ...)."""
    inner: Any = ALL_ATTENTION_FUNCTIONS.get(base) or vars(inspect.getmodule(type(module)))["eager_attention_forward"]
    if not isinstance(mask, TextMasks):
        return inner(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    rows = []
    for row, bounds in enumerate(mask.bounds):
        parts = []
        for start, end in pairwise(bounds):
            q, k, v = (x[row : row + 1, :, start:end] for x in (query, key, value))
            parts.append(inner(module, q, k, v, mask.of_text(row, start, end - start, causal), **options)[0])
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows), None
