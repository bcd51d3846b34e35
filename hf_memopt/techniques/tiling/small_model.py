"""Ask a small model what a model on the meta device cannot answer, since it has no values: which modules tile.

The small one is of the same class and configuration, with all its layers and experts and a part of its width.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hf_memopt.binding.model import unwrap_model
from hf_memopt.binding.undo import RandomState
from hf_memopt.techniques.tiling.position_wise import DRAWS, Place, find_places

PARTS = (64, 32, 16, 8, 4, 2, 1)  # of the width; the first with which a model runs counts
MOST_WEIGHTS = 700_000_000  # of the small model
_WIDTHS = re.compile(
    "dim|hidden_size|intermediate_size|embedding_size|head_size|ffn|d_model|d_kv|d_ff|dff|d_inner|d_head|n_embd|n_inner"
    "|rank|width|channels"
)
_NO_WIDTHS = re.compile("num_|layers|heads|vocab|conv|image|patch")

_found: dict[tuple[type, str], tuple[list[Place], dict[str, str]]] = {}  # without the modules of the small model


def places_on_meta(model: Any) -> tuple[list[Place], dict[str, str]]:
    """Return what ``find_places`` would for the same model with values; ``kept_bytes`` are those of the small one.

    Raises:
        ValueError: no model of this configuration runs.
    """
    inner = unwrap_model(model)
    key = type(inner), repr(inner.config)
    if key not in _found:
        places, reasons = _of_small(inner)
        _found[key] = [place._replace(module=nn.Module()) for place in places], reasons
    places, reasons = _found[key]
    places = [one._replace(module=inner.get_submodule(one.name.removesuffix(f".{one.method}"))) for one in places]
    dropping = (one for one in places if any(isinstance(x, nn.Dropout) and x.p > 0 for x in one.module.modules()))
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
