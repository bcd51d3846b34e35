"""Run what works on each position alone over tiles of positions, so that no MLP's intermediates are all in memory.

Of a row of many tokens they are the largest activation of a checkpointed layer while its backward pass runs: 8 times
its input, or more. Here each tile is computed again in the backward pass, one at a time. Beside a layer's own
checkpoint that costs no operation more (``python benchmarks/long_rows.py``): all that tiles read is saved before the
first of them, and they save nothing, so the layer's recomputation stops before them. Not where the layer saves
something after them, as the norm after an MLP does (Gemma 2 and 3, GLM 4): there, and without checkpointing, each is
one forward pass more.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from hf_memopt.changes import Change
from hf_memopt.plain_data import Count, check_value
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.compatibility import check_settings, refusal_of
from hf_memopt.training.binding.model import check_model, unwrap_model
from hf_memopt.training.binding.undo import RandomState, UndoHandle, override_method, remove_all
from hf_memopt.training.techniques import ModelCallback
from hf_memopt.training.techniques.tiling.position_wise import (
    DRAWS,
    SWAPPED,
    Call,
    Place,
    difference,
    find_places,
    join,
)

LEAST_TOKENS = 1024
MOST_TILES = 8  # of 16-bit weights: the gradients of tiles are added up in 16 bits. Of the first batch, to be compared


class TileHandle(UndoHandle):
    """Undoes the tiles of one model; ``modules`` has the bytes per position that each kept, by its name, most first."""

    def __init__(self, modules: Mapping[str, int], undo: Callable[[], object]) -> None:
        super().__init__(undo)
        self.modules = modules


def tile_layers(model: Any, tile_tokens: int | None = None) -> TileHandle:
    """Run position-wise modules over tiles of positions, each recomputed in the backward pass.

    Losses and gradients are stock's up to the order of sums. Which modules, the model itself is asked: MLPs and experts
    of any architecture (``position_wise``). Of the first batch too, the first 8 tiles of each kind are compared.

    Call it once adapters and checkpointing are in place. Reentrant checkpointing becomes non-reentrant, since it would
    compute each tile once more. The policy ``"selective"`` keeps what linear layers return, so tiles save nothing.

    Args:
        model: of transformers, of text, or wrapped by PEFT. For one on the meta device a small one is asked.
        tile_tokens: tokens of a tile, all rows together; by default as many as the model is wide, at least 1024: below
            that the peak hardly falls, and launches cost more. A module that trains 16-bit weights has 8 tiles at most,
            since the sum of their gradients is rounded for each tile.

    Returns:
        A handle whose ``remove()`` undoes it; its ``modules`` are what runs in tiles.

    Raises:
        ValueError: ``tile_tokens`` below 1, or another size than that of the tiles that the model has (of the same size
            they stay until the last handle is removed); the model has dropout above 0 inside of what
            would be tiled, positions in the first dimension, inputs other than text, layers that wait in host memory,
            or nothing that tiles. The model is unchanged then.
        RuntimeError: in the first batch, where a module returns something else in tiles.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=32, num_attention_heads=1, num_hidden_layers=2)
        >>> list(tile_layers(LlamaForCausalLM(config), tile_tokens=1024).modules)
        ['model.layers.0.mlp', 'model.layers.1.mlp']
    """
    check_model(model)
    check_value("tile_tokens", tile_tokens, Count | None, 1024)
    inner, reentrant = unwrap_model(model), versions.without_reentrant(model)
    try:
        found = _tiled.get(inner)
        if found is None or not found.handles:
            found = _tiled[inner] = _Tiles(model, tile_tokens)
        return found.handle(tile_tokens, reentrant)
    except BaseException:
        reentrant.remove()
        raise


class _Tiles:
    """The tiles of a model, which are undone with the last of their handles."""

    def __init__(self, model: Any, tile_tokens: int | None) -> None:
        self.tile_tokens, self.handles, self._undo, compared = tile_tokens, 0, list[UndoHandle](), set[Any]()
        self._of, places = type(unwrap_model(model)).__name__, _checked_places(model)
        try:
            for place in places:
                run = partial(_in_tiles, place, tile_tokens, compared)
                self._undo.append(override_method(place.module, place.method, run))
        except BaseException:
            remove_all(self._undo)
            raise
        self._modules = {place.name: place.kept_bytes for place in places}

    def handle(self, tile_tokens: int | None, reentrant: UndoHandle) -> TileHandle:
        """Return one more handle, which puts reentrant checkpointing back too."""
        if tile_tokens != self.tile_tokens:
            raise ValueError(
                f"tile_tokens={tile_tokens!r} is not the size of the tiles that {self._of} has already, "
                f"{self.tile_tokens!r}; expected one size for a model. Pass tile_tokens={self.tile_tokens!r}, or call "
                "handle.remove() of the first"
            )

        def undo() -> None:
            reentrant.remove()
            self.handles -= 1
            if not self.handles:
                remove_all(self._undo)

        self.handles += 1
        return TileHandle(self._modules, undo)


_tiled: weakref.WeakKeyDictionary[nn.Module, _Tiles] = weakref.WeakKeyDictionary()


class TiledLayersCallback(ModelCallback):
    """Run MLPs and experts over tiles of positions: call ``tile_layers`` for each model of the ``Trainer``.

    Checkpointing becomes non-reentrant when training begins. It logs no keys.

    Args:
        tile_tokens: as of ``tile_layers``.

    Attributes:
        changes: what runs in tiles, one ``Change``; in ``trainer.memopt_changes`` too after ``attach(trainer)``.
        handle: undoes the changes to the last model; None before the first.

    Raises:
        ValueError: ``tile_tokens`` below 1, at once; the rest as ``tile_layers`` does, when the ``Trainer`` is
            constructed; settings that it is incompatible with.
    """

    technique = "tiled layers"

    def __init__(self, tile_tokens: int | None = None) -> None:
        check_value("tile_tokens", tile_tokens, Count | None, 1024)
        super().__init__(tile_tokens)
        self.tile_tokens = tile_tokens

    def change_model(self, model: Any, args: Any) -> None:
        """Tile a model that is new."""
        if self._handles.model is model and self.handle is not None and not self.handle.is_removed:
            return
        tiles = tile_layers(model, self.tile_tokens)
        self.handle = self._handles.keep(model, tiles)
        names = f"{len(tiles.modules)} modules, such as {next(iter(tiles.modules))}"
        size = f"tiles of {self.tile_tokens or f'at least {LEAST_TOKENS}'} tokens"
        self.note(Change(names, "all positions at once", size, "each works on each position alone"))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse settings, tile a model that is new, and make checkpointing non-reentrant."""
        check_settings(self.technique, args)
        super().on_train_begin(args, state, control, model=model, **kwargs)
        self._handles.keep(self._handles.model, versions.without_reentrant(model))


def _checked_places(model: Any) -> list[Place]:
    inner = unwrap_model(model)
    if len({parameter.device.type for parameter in model.parameters()}) > 1:  # no layer can be asked by itself
        raise ValueError(str(refusal_of("streamed layers", "tiled layers")))
    if (takes := getattr(inner, "main_input_name", "no token ids")) != "input_ids":
        problem = f"it takes {takes}; expected a text model of transformers. Train it without tiles"
    else:
        is_real = not next(model.parameters()).is_meta
        places, reasons = find_places(model) if is_real else _places_on_meta(model)
        of = {reason: name for name, reason in reversed(reasons.items())}
        if places and DRAWS not in of:
            return places
        if DRAWS in of:
            problem = (
                f"{of[DRAWS]} has dropout above 0, and tiles would draw other random numbers; expected none within an "
                "MLP. Set it to 0 in the model's configuration, and lora_dropout=0"
            )
        else:
            none = "no module works on each position alone and keeps much for it (OPT and BART have none for their MLP)"
            problem = (
                f"{f'{of[SWAPPED]} {SWAPPED}' if SWAPPED in of else none}; expected MLPs or experts that take (rows, "
                "positions, ...). Save memory otherwise: checkpoint_layers(model)"
            )
    raise ValueError(f"model=<{type(inner).__name__}> does not tile: {problem}")


def _in_tiles(
    place: Place, tile_tokens: int | None, compared: set[Any], before: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Make a call of a place in tiles, or whole where one tile holds it."""
    call = Call(before, *tree_flatten((args, kwargs)))
    if call.form != place.form:
        message = f"{place.name} is called with other arguments than in the probe; expected the same: it runs whole"
        warnings.warn(f"{message}. Undo the tiles: handle.remove()", stacklevel=2)
        return before(*args, **kwargs)
    length = _length(place, tile_tokens, call.leaves[0])
    if length >= call.leaves[0].shape[place.axes[0]]:
        return before(*args, **kwargs)
    kind = place.kind, _drops(place.module)  # adapters with dropout may come after the first batch
    if torch.is_grad_enabled() and kind not in compared and not call.leaves[0].is_meta:
        compared.add(kind)
        with torch.no_grad(), _uncached():
            problem = difference(call.cut(place.axes, MOST_TILES * length)[0], place.axes, length)
        if problem:
            raise RuntimeError(
                f"{place.name} {problem} in this batch, though not in the probe; expected what it returns for all "
                "positions at once. Undo the tiles: handle.remove()"
            )
        torch.cuda.empty_cache()  # of the blocks of all positions, which the training never needs
    return _tile_by_tile(call, place.axes, length)


@contextmanager
def _uncached() -> Iterator[None]:
    """Let autocast keep no casts of weights inside the context."""
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)


def _drops(module: nn.Module, *, is_training: bool = True) -> bool:
    drops = (one for one in module.modules() if isinstance(one, nn.Dropout) and one.p > 0)
    return any(one.training or not is_training for one in drops)


def _length(place: Place, tile_tokens: int | None, source: torch.Tensor) -> int:
    """Return the positions of a tile; tiles are about equally long."""
    positions, rows = source.shape[place.axes[0]], source.shape[0] if place.axes[0] else 1
    count = math.ceil(positions / max(1, (tile_tokens or max(LEAST_TOKENS, source.shape[-1])) // rows))
    if any(weight.requires_grad and weight.dtype.itemsize == 2 for weight in place.module.parameters()):
        count = min(count, MOST_TILES)
    return math.ceil(positions / count)


class _Saved(torch.autograd.Function):
    """Saves tensors for the backward pass before any tile runs: a checkpoint around it recomputes up to here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor, whose ``grad_fn`` has the tensors."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


def _tile_by_tile(call: Call, axes: tuple[Any, ...], length: int) -> Any:
    """Return the joined outputs of the tiles, each recomputed in the backward pass from what was saved."""
    tiles = dict(enumerate(call.cut(axes, length)))
    if not torch.is_grad_enabled():
        return join([tile() for tile in tiles.values()], axes[0])
    tensors = filter(torch.is_tensor, call.leaves)
    node = _Saved.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn  # type: ignore[no-untyped-call]
    emptied = replace(call, leaves=[_Saved if torch.is_tensor(x) else x for x in call.leaves])

    def run(index: int) -> Any:
        if index not in tiles:  # in the backward pass; a checkpoint around it computes them now, once for all tiles
            saved = iter(node.saved_tensors)
            leaves = [next(saved) if x is _Saved else x for x in emptied.leaves]
            tiles.update(enumerate(replace(emptied, leaves=leaves).cut(axes, length)))
        with _uncached():  # the gradients of one cast for all tiles would be added up in 16 bits
            return tiles.pop(index)()

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return join([checkpoint(run, index, **options) for index in range(len(tiles))], axes[0])


# ---- A model on the meta device, which has no values


PARTS = (64, 32, 16, 8, 4, 2, 1)  # of the width; the first with which a model runs counts
MOST_WEIGHTS = 700_000_000  # of the small model
_WIDTHS = re.compile(
    "dim|hidden_size|intermediate_size|embedding_size|head_size|ffn|d_model|d_kv|d_ff|dff|d_inner|d_head|n_embd|n_inner"
    "|rank|width|channels"
)
_NO_WIDTHS = re.compile("num_|layers|heads|vocab|conv|image|patch")

_found: dict[tuple[type, str], tuple[list[Place], dict[str, str]]] = {}  # without the modules of the small model


def _places_on_meta(model: Any) -> tuple[list[Place], dict[str, str]]:
    """Return what ``find_places`` would for a model on the meta device if it had values; ``kept_bytes`` are too small.

    A small model of the same class and configuration is asked, with all its layers and experts and a part of its width.
    """
    inner = unwrap_model(model)
    key = type(inner), repr(inner.config)
    if key not in _found:
        places, reasons = _of_small(inner)
        _found[key] = [place._replace(module=nn.Module()) for place in places], reasons
    places, reasons = _found[key]
    places = [one._replace(module=inner.get_submodule(one.name.removesuffix(f".{one.method}"))) for one in places]
    dropping = (one for one in places if _drops(one.module, is_training=False))
    return places, reasons | {one.name: DRAWS for one in dropping}  # of adapters, which the small one has none of


def _of_small(model: Any) -> tuple[list[Place], dict[str, str]]:
    weights = sum(parameter.numel() for parameter in model.parameters())
    drawn, problem = RandomState.capture(torch.device("cpu")), ""
    try:
        for part in (one for one in PARTS if weights / one**2 <= MOST_WEIGHTS):
            try:
                return find_places(type(model)(_with_part(model.config, part)))
            except Exception as error:  # of foreign code: a width that does not divide
                problem = str(error)
    finally:
        drawn.restore()
    raise ValueError(
        f"model=<{type(model).__name__}> does not tile: no small model of its configuration runs ({problem}); expected "
        "a text model of transformers. Estimate it without tiles"
    )


def _with_part(config: PretrainedConfig, part: int) -> Any:
    """Return a copy of a configuration, all of whose widths are divided by ``part``."""
    made = copy.deepcopy(config)
    for one in (made, *(inner for inner in vars(made).values() if isinstance(inner, PretrainedConfig))):
        for name, value in list(vars(one).items()):
            if type(value) is int and value > 1 and _WIDTHS.search(name) and not _NO_WIDTHS.search(name):
                setattr(one, name, max(1, value // part))
    return made
