"""The rows of one layer's call in parts: the layer's weights are fetched once for all of them, whatever the batch.

The gradient is that of all rows at once but for the order of sums. Dropout draws its numbers part after part. The first
time a kind of layer is cut, two parts are compared with their rows at once, without a graph or dropout: XLNet's layers
take positions first, and MPT's a bias whose heads may be as many as the rows.

Limitation: in 16 bits what differs by less than 1.6 % of the largest value passes, XLNet with fresh weights; in float32
on a GPU, which may compute in TF32, less than 0.1 %.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_memopt.training.binding.undo import RandomState
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory

FIX = "Pass rows=None to stream_layers"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def row_parts(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None
) -> Iterator[Arguments]:
    """Yield the arguments of each part; a tensor is cut where its first dimension is that of the first one."""
    count = _first(args, kwargs).shape[0]
    if rows is None or count <= rows:
        yield args, kwargs
        return
    _check(module, _first(args, kwargs), rows)
    for start in range(0, count, rows):
        yield _cut((args, kwargs), count, slice(start, min(start + rows, count)))


def compare_parts(run: Callable[..., Any], module: nn.Module, given: Arguments, parts: Sequence[Arguments]) -> None:
    """Raise ValueError where the first two parts give something else than their rows at once.

    A near tie of a router may send single tokens elsewhere, so most of what is compared has to differ. Not compared is
    what does not fit into memory, which needs twice the rows of a part but no graph.
    """
    first, rows = _first(*given), _first(*parts[0]).shape[0]
    if first.is_meta:
        return
    limit = _limit(module, first)
    state, problem = RandomState.capture(first.device), ""
    training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        with torch.no_grad():
            whole_args, whole_kwargs = _cut(given, first.shape[0], slice(0, 2 * rows))
            whole = run(*whole_args, **whole_kwargs)
            cut = joined([run(*args, **kwargs) for args, kwargs in parts[:2]], rows)
        pairs = [*zip(tree_leaves(whole), tree_leaves(cut), strict=True)]
        values = (pair for pair in pairs if torch.is_tensor(pair[0]) and pair[0].is_floating_point())
        if any(_differs(*pair, limit) for pair in values):
            problem = "give something else than their rows at once"
    except RuntimeError as error:
        if not is_out_of_memory(error):
            problem = f"fail ({str(error)[:80]})"
    finally:
        for one in training:
            one.training = True
        state.restore()
        torch.clear_autocast_cache()  # of casts without a graph, which older torch would use again
    free_failed_step()
    if problem:
        raise ValueError(
            f"rows={rows} cuts what {type(module).__name__} gets where its rows are not, and parts {problem}; expected "
            f"rows in the first dimension of all it gets. {FIX}"
        )


def _differs(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    if one.shape[1:] != other.shape[1:] or (one.shape != other.shape and 1 not in (len(one), len(other))):
        return True  # but T5's position bias, of which there is one for all rows or one for each
    error = (one - other).abs() > limit * one.abs().max()
    return error.ndim > 1 and bool(error.any(-1).float().mean() > 0.5)


def _limit(module: nn.Module, first: torch.Tensor) -> float:
    """Return what rounds, in parts of the largest value."""
    is_wide = all(weight.element_size() >= 4 for weight in (first, *module.parameters()))
    if not is_wide or (torch.is_autocast_enabled(first.device.type) and first.dtype != torch.float64):
        return 2**-6
    return 1e-5 if first.is_cpu or first.dtype == torch.float64 else 1e-3  # TF32 may be on: 2^-11 of each factor


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return what a layer works on: (batch, seq, hidden)."""
    return next(v for v in (*args, *kwargs.values()) if torch.is_tensor(v) and v.dim() > 1)


def _check(module: nn.Module, first: torch.Tensor, rows: int) -> None:
    if first.dim() > 2 and first.shape[1] == first.shape[0]:
        raise ValueError(
            f"rows={rows} cannot cut a batch of {first.shape[0]} rows of {first.shape[1]} tokens: either dimension may "
            f"be the rows; expected another number of rows. {FIX}, or pad to another length"
        )
    means = [one for one in module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training]
    if means:
        raise ValueError(
            f"rows={rows} would give single parts to the {type(means[0]).__name__} inside {type(module).__name__}, "
            f"which takes the mean over all rows; expected layers whose rows do not meet. {FIX}"
        )
    hooks = (hook for one in module.modules() if one is not module for hook in one._forward_hooks.values())
    if not all(map(_is_idle, hooks)):
        raise ValueError(
            f"rows={rows} would give single parts to the hooks inside {type(module).__name__}, which record "
            f"attentions or router logits; expected output_attentions=False and output_router_logits=False. {FIX}"
        )


def _is_idle(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of transformers', which stay once something was recorded, and records nothing now.

    Private, seen in transformers 5.23.0 and pinned by a test; a hook with other names counts as one that records.
    """
    if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
        return False
    names = inspect.getclosurevars(hook)
    collector, key = names.globals.get("_active_collector"), names.nonlocals.get("key")
    return collector is not None and key is not None and key not in (collector.get() or {})


def _cut(value: Any, count: int, part: slice) -> Any:
    if torch.is_tensor(value):
        return value[part] if value.dim() > 1 and value.shape[0] == count else value
    if isinstance(value, dict):
        return {name: _cut(each, count, part) for name, each in value.items()}
    return type(value)(_cut(each, count, part) for each in value) if type(value) in (tuple, list) else value


def joined(parts: Sequence[Any], rows: int | None) -> Any:
    """Return the output of all rows; what has one for all (T5's position bias) is that of the first part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, (tuple, list)):
        return type(first)(joined(each, rows) for each in zip(*parts, strict=True))
    if not torch.is_tensor(first):
        return first
    if first.dim() > 1 and first.shape[0] in (rows, 1):
        return torch.cat(list(parts)) if first.shape[0] == rows else first
    raise ValueError(
        f"rows={rows} cannot join an output of shape {tuple(first.shape)}; expected (rows, ...) or (1, ...). {FIX}"
    )
