"""Run what works on each position alone over tiles of positions, so that no MLP's intermediates are all in memory.

Of a row of many tokens an MLP's intermediates are the largest activation of a checkpointed layer while its backward
pass runs: 8 times its input, or more. Here a tile of positions is computed at a time, and again in the backward pass.

Beside a layer's own checkpoint that costs no operation more (``python benchmarks/long_rows.py``): all that the tiles
read is saved before the first of them, and no tile saves anything, so the layer's recomputation stops before the tiles.
Not where the layer saves something after them, such as the input of a norm (Gemma 2 and 3, GLM 4): there, and without
checkpointing, each tile is one forward pass more.

Limitations: text models (``position_wise``); without ``torch.compile``; nothing that draws random numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memopt.binding.compatibility import check_settings
from hf_memopt.binding.model import check_model, unwrap_model
from hf_memopt.binding.parameters import checked_patterns
from hf_memopt.binding.undo import UndoHandle, override_method, remove_all, set_attribute, undo_all
from hf_memopt.changes import Change, add_change, record_changes
from hf_memopt.plain_data import Count, check_value
from hf_memopt.techniques import ModelCallback
from hf_memopt.techniques.tiling.position_wise import (
    DRAWS,
    Call,
    Place,
    difference,
    find_places,
    first_axis,
    is_tensor,
    join,
)

if TYPE_CHECKING:
    from transformers import Trainer

MOST_TILES = (
    8  # of weights whose gradient is in 16 bits: the tiles' gradients are added up in it, and each sum is rounded
)
LEAST_TOKENS = 1024
_CHECKED_TILES = 8  # of the first batch


class TileHandle(UndoHandle):
    """Undoes the tiles of one model.

    Attributes:
        modules: what each tiled module kept for the backward pass, in bytes per position, by its name; most first.
    """

    def __init__(self, modules: Mapping[str, int], undo: Callable[[], object]) -> None:
        super().__init__(undo)
        self.modules = modules


def tile_layers(
    model: Any, tile_tokens: int | None = None, *, patterns: str | Iterable[str] | None = None
) -> TileHandle:
    """Run the modules that work on each position alone over tiles of positions, each recomputed in the backward pass.

    Losses and gradients are stock's up to the order of sums. Which modules, the model itself is asked
    (``position_wise``): MLPs and experts, without a rule per architecture. A router is not tiled, its experts are. The
    first batch is compared too: the first 8 tiles of it, of one module of each kind.

    Call it once adapters and checkpointing are in place. Checkpointing that is reentrant becomes non-reentrant, since
    the reentrant one would compute each tile once more. The policy ``"selective"`` keeps the results of linear layers,
    those of tiles too, and so saves nothing here.

    Args:
        model: of transformers, of text, or wrapped by PEFT.
        tile_tokens: tokens of a tile, all rows together; by default as many as the model is wide, at least 1024: below
            that the peak hardly falls and launches cost more. A module that trains 16-bit weights has at most 8 tiles,
            since the sum of their gradients is rounded for each tile.
        patterns: globs of the names of modules, such as ``"*.mlp"``; None for all that keep at least 3.5 times their
            input.

    Returns:
        A handle whose ``remove()`` undoes it; its ``modules`` are what runs in tiles.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``tile_tokens`` below 1; nothing tiles, or not what the patterns name, with the reason: positions in
            the first dimension, inputs other than text, dropout above 0 inside.
        RuntimeError: in the first batch, where a module gives other outputs in tiles.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=32, num_attention_heads=1, num_hidden_layers=2)
        >>> handle = tile_layers(LlamaForCausalLM(config), tile_tokens=1024)
        >>> list(handle.modules)
        ['model.layers.0.mlp', 'model.layers.1.mlp']
    """
    check_model(model)
    check_value("tile_tokens", tile_tokens, Count | None, 1024)
    chosen = None if patterns is None else checked_patterns(patterns)
    _check_text(model)
    handles, seen = [without_reentrant(model)], set[Any]()
    try:
        places, reasons = find_places(model, chosen)
        _check_found(model, places, reasons, chosen)
    except BaseException:
        remove_all(handles)
        raise
    for place in places:
        handles.append(override_method(place.module, place.method, partial(_in_tiles, place, tile_tokens, seen)))
    return TileHandle({place.name: place.kept_bytes for place in places}, undo_all(*handles).remove)


def without_reentrant(model: nn.Module) -> UndoHandle:
    """Make the checkpointing that is on in a model non-reentrant; return what undoes it."""
    name, handles = "_gradient_checkpointing_func", []  # transformers 5.8.1, 5.17.0 and 5.23.0
    for module in model.modules():
        function = vars(module).get(name)
        if isinstance(function, partial) and function.keywords.get("use_reentrant") is not False:
            handles.append(set_attribute(module, name, partial(function, use_reentrant=False)))
    return undo_all(*handles)


class TiledLayersCallback(ModelCallback):
    """Call ``tile_layers`` when the ``Trainer`` is built, and again when ``train()`` starts with a new model.

    Checkpointing that the ``Trainer`` switches on becomes non-reentrant when training begins. It logs no keys.

    Args:
        tile_tokens: as ``tile_layers`` takes it.
        patterns: as ``tile_layers`` takes them.

    Attributes:
        changes: what runs in tiles, one ``Change``; in ``trainer.memopt_changes`` too after ``attach(trainer)``.
        handle: undoes the changes to the last model; None before the first.

    Raises:
        ValueError: ``tile_tokens`` below 1 and malformed patterns at once; the rest as ``tile_layers`` does, when the
            ``Trainer`` is constructed; settings that it is incompatible with.
    """

    technique = "tiled layers"

    def __init__(self, tile_tokens: int | None = None, *, patterns: str | Iterable[str] | None = None) -> None:
        check_value("tile_tokens", tile_tokens, Count | None, 1024)
        self.patterns = None if patterns is None else checked_patterns(patterns)
        super().__init__(tile_tokens, patterns=self.patterns)
        self.tile_tokens = tile_tokens

    def change_model(self, model: Any) -> None:
        """Tile a model that is new."""
        if self._handles.model is model and self.handle is not None and not self.handle.is_removed:
            return
        tiles = tile_layers(model, self.tile_tokens, patterns=self.patterns)
        self.handle = self._handles.keep(model, tiles)
        names = f"{len(tiles.modules)} modules, such as {next(iter(tiles.modules))}"
        size = self.tile_tokens or f"{LEAST_TOKENS} or more"
        reason = "each works on each position alone, and keeps its input only"
        add_change(self.changes, Change(names, "all positions at once", f"tiles of {size} tokens", reason))

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Tile the model, and note that in ``trainer.memopt_changes``."""
        handle = super().bind(trainer)
        record_changes(trainer, self.changes)
        return handle

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse settings, tile a model that is new, and make checkpointing non-reentrant."""
        check_settings(self.technique, args)
        super().on_train_begin(args, state, control, model=model, **kwargs)
        self._handles.keep(self._handles.model, without_reentrant(model))


# ---- What cannot be tiled --------------------------------------------------------------------------------------------


def _check_text(model: Any) -> None:
    takes = getattr(unwrap_model(model), "main_input_name", "no token ids")
    if takes != "input_ids":
        raise ValueError(
            f"model=<{type(unwrap_model(model)).__name__}> takes {takes}; expected a text model of transformers, which "
            "takes input_ids. Train it without tiles"
        )


def _check_found(model: Any, places: list[Place], reasons: dict[str, str], patterns: tuple[str, ...] | None) -> None:
    name = type(unwrap_model(model)).__name__
    random = next((place for place, reason in reasons.items() if reason == DRAWS), None)
    if random is not None:
        raise ValueError(
            f"model=<{name}> has dropout above 0 in {random}, whose tiles would draw other random numbers; expected "
            "none inside of what is tiled. Set dropout to 0 in the model's configuration, and lora_dropout=0"
        )
    if places:
        return
    if patterns is not None:
        why = next((f"{place} {reason}" for place, reason in reasons.items()), "no module has such a name")
        raise ValueError(
            f"patterns={list(patterns)} match nothing in <{name}> that tiles: {why}; expected names of modules that "
            "work on each position alone. Leave patterns out"
        )
    swapped = next((place for place, reason in reasons.items() if reason.startswith("takes (positions")), None)
    why = (
        "no module works on each position alone and keeps much for it (OPT's and BART's kind compute the MLP within "
        "the layer)"
        if swapped is None
        else f"{swapped} takes (positions, rows, ...)"
    )
    raise ValueError(
        f"model=<{name}> does not tile: {why}; expected MLPs or experts that take (rows, positions, hidden). Save "
        "memory otherwise: checkpoint_layers(model)"
    )


# ---- A call in tiles -------------------------------------------------------------------------------------------------


def _in_tiles(
    place: Place, tile_tokens: int | None, seen: set[Any], before: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Make a call of a place in tiles, or whole where one tile holds it."""
    call = Call.of(before, args, kwargs)
    if call.form != place.form:
        _warn_of_other_arguments(place, seen)
        return before(*args, **kwargs)
    leaf, axis = first_axis(place.axes)
    source = call.leaves[leaf]
    length = _length(place, tile_tokens, source, axis)
    if length >= source.shape[axis]:
        return before(*args, **kwargs)
    is_training = torch.is_grad_enabled() and place.module.training
    if is_training and place.kind not in seen and source.device.type != "meta":
        seen.add(place.kind)
        _check_batch(place, call, axis, length)
    return _Tiles(call, place, length).run(axis)


def _length(place: Place, tile_tokens: int | None, source: torch.Tensor, axis: int) -> int:
    """Return the positions of a tile; tiles are about equally long."""
    positions, rows = source.shape[axis], source.shape[0] if axis else 1
    tile = tile_tokens or max(LEAST_TOKENS, source.shape[-1])
    count = math.ceil(positions / max(1, tile // rows))
    if any(weight.requires_grad and weight.dtype.itemsize == 2 for weight in place.module.parameters()):
        count = min(count, MOST_TILES)
    return math.ceil(positions / count)


def _warn_of_other_arguments(place: Place, seen: set[Any]) -> None:
    if place.name not in seen:
        seen.add(place.name)
        warnings.warn(
            f"{place.name} is called with other arguments than when it was asked, so it runs whole; expected the same. "
            "Leave it out with patterns=, or run the model without tiles",
            stacklevel=2,
        )


def _check_batch(place: Place, call: Call, axis: int, length: int) -> None:
    """Raise RuntimeError where the first tiles of a batch, joined, are not what the module gives for them at once."""
    first = call.cut(place.axes, _CHECKED_TILES * length)[0]
    with torch.no_grad():
        problem = difference(first, place.axes, length)
    if problem:
        raise RuntimeError(
            f"{place.name} {problem} in this batch, though not in a probe; expected the same outputs from tiles. Leave "
            "it out: tile_layers(model, patterns=...), or undo the tiles: handle.remove()"
        )


class _Saved(torch.autograd.Function):
    """Saves tensors for the backward pass before any tile runs: a checkpoint around it recomputes up to here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor, whose ``grad_fn`` has the tensors."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Tiles:
    """One call in tiles. In the backward pass the tiles are cut again from what was saved, once for all of them."""

    def __init__(self, call: Call, place: Place, length: int) -> None:
        self._axes, self._length = place.axes, length
        self._is_saved = call.form[1]
        self._others = [None if is_tensor(x) else x for x in call.leaves]
        self._empty = call.with_leaves([])
        self._tiles: list[Call] = call.cut(place.axes, length)
        self._count, self._left = len(self._tiles), 0
        self._saved: Any = None
        if torch.is_grad_enabled():
            anchor = torch.empty(0, requires_grad=True)
            self._saved = _Saved.apply(anchor, *filter(is_tensor, call.leaves)).grad_fn  # type: ignore[no-untyped-call]

    def run(self, axis: int) -> Any:
        """Return the joined outputs."""
        if self._saved is None:
            return join([self._tile(i) for i in range(self._count)], axis)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        outputs = [checkpoint(self._tile, i, **options) for i in range(self._count)]
        self._tiles = []  # a checkpoint around it lets the inputs go
        return join(outputs, axis)

    def _tile(self, index: int) -> Any:
        if not self._tiles:
            self._tiles, self._left = self._cut_again(), self._count
        tile = self._tiles[index]
        if self._left:
            self._left -= 1
            self._tiles = self._tiles if self._left else []
        with _weights_cast_anew():
            return tile()

    def _cut_again(self) -> list[Call]:
        saved = iter(self._saved.saved_tensors)  # a checkpoint around it computes them now, once per backward pass
        leaves = [next(saved) if is_saved else x for is_saved, x in zip(self._is_saved, self._others, strict=True)]
        return self._empty.with_leaves(leaves).cut(self._axes, self._length)


@contextmanager
def _weights_cast_anew() -> Iterator[None]:
    """Let autocast cast the weights for each tile: the gradients of one cast for all would be added up in 16 bits."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
