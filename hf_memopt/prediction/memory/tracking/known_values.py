"""Know the values of meta tensors that follow from the batch alone: ids, masks, positions, sizes of pictures.

Model code asks for such values: where the placeholders of a picture are, whether a row has a global token, how many
patches each picture has. They are kept beside the meta tensors, on the host, by storage: an operation whose arguments
are all known runs on the host too, and what it writes to with something unknown is forgotten. Nothing that depends on
weights, pixels or random numbers is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_aten = torch.ops.aten
READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
"""Operations that return a value of a tensor, or of two."""
CHOICES = {_aten.topk.default: 2, _aten.argmax.default: 1, _aten.max.dim: 1}
"""Operations by which a router chooses experts, and which argument of each is the dimension."""
_MOST_EXPERTS = 1024
_MOST = 2**20  # elements of a tensor whose values are kept: a mask of 1024 x 1024
_INDEXES = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index}
_META = torch.device("meta")


class KnownValues:
    """The values of meta tensors, as host tensors over one storage for each of theirs."""

    def __init__(self) -> None:
        self._is_unread = False
        self._hosts: dict[int, tuple[torch.UntypedStorage, Any]] = {}  # by _cdata, private: pinned by a test

    def give(self, tensor: torch.Tensor, values: Any) -> None:
        """Remember that a meta tensor has these values, of the same shape."""
        storage = tensor.untyped_storage()
        if tensor.numel() > _MOST or storage._cdata in self._hosts or storage.nbytes() > 8 * _MOST:
            return
        key = storage._cdata
        freed = weakref.ref(storage, lambda _: self._hosts.pop(key, None))
        with _disable_current_modes():
            self._hosts[key] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage(), freed
            given = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=tensor.dtype)
            self._view(tensor).copy_(given)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values on the host; None where they are unknown."""
        if not tensor.is_meta:
            return tensor
        if self._is_unknown(tensor):
            return None
        with _disable_current_modes():
            return self._view(tensor)

    def arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``args, kwargs`` with values in place of meta tensors; None where one is unknown, or none is meta."""
        on_meta = kwargs.get("device") == _META
        if self._is_unread or not (self._hosts or on_meta) or any(map(self._is_unknown, args)) or _has_no_value(func):
            return None
        leaves, structure = tree_flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                on_meta = on_meta or leaf.is_meta
                leaves[index] = self.of(leaf)
                if leaves[index] is None or leaf.numel() > _MOST:
                    return None
            elif leaf == _META and isinstance(leaf, torch.device):
                leaves[index] = torch.device("cpu")
        return tree_unflatten(leaves, structure) if on_meta else None

    def keep(self, func: Any, known: Any, out: Any) -> None:
        """Remember the values of what an operation returned on meta, of which ``known`` are the arguments' values."""
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if sum(leaf.numel() for leaf in made) > _MOST:
            return
        try:
            result = on_host(func, known)
        except (RuntimeError, IndexError):  # values that real data does not have
            return
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor, values in zip(made, results, strict=True):
            self.give(tensor, values)

    def balance(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Remember a choice among the last dimension that takes each one equally often, and none twice in a row."""
        scores, indices = args[0], out[1] if isinstance(out, tuple) else out
        experts = scores.shape[-1] if scores.dim() else 0
        given, default = args[CHOICES[func] :], -1 if func is _aten.topk.default else None
        if (
            (given[0] if given else default) in (-1, scores.dim() - 1)
            and scores.is_floating_point()
            and 0 < experts <= _MOST_EXPERTS
        ):
            self.give(indices, on_host(torch.arange, ((indices.numel(),), {})).remainder_(experts).view(indices.shape))

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Compute no values inside, where what is made is never read."""
        self._is_unread = True
        try:
            yield
        finally:
            self._is_unread = False

    def forget(self) -> None:
        """Forget all values."""
        self._hosts.clear()

    def forget_written(self, func: Any, args: tuple[Any, ...]) -> None:
        """Forget the values of what an operation with unknown arguments writes to."""
        if self._hosts:
            for index in _written(func):
                for leaf in tree_leaves(args[index : index + 1]):
                    if isinstance(leaf, torch.Tensor):
                        self._hosts.pop(leaf.untyped_storage()._cdata, None)

    def with_positions(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an indexing with positions, as many as are set, in place of masks that are known."""
        if not self._hosts or func.overloadpacket not in _INDEXES:
            return args
        indices: list[Any] = []
        for index in args[1]:
            mask = self.of(index) if index is not None and index.dtype == torch.bool else None
            indices += [index] if mask is None else [one.to("meta") for one in mask.nonzero().unbind(1)]
        return args[0], indices, *args[2:]

    def _is_unknown(self, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_meta and one.untyped_storage()._cdata not in self._hosts

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(0, dtype=tensor.dtype)
        storage, _ = self._hosts[tensor.untyped_storage()._cdata]
        return host.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def shapes_of(known: Any, func: Any) -> Any:
    """Return on meta what an operation returns whose shapes depend on values."""
    result = on_host(func, known)
    return tree_map(lambda one: torch.empty_like(one, device="meta") if isinstance(one, torch.Tensor) else one, result)


def on_host(func: Any, known: Any) -> Any:
    """Return what an operation returns on the host, unseen by all modes."""
    with _disable_current_modes():  # private: pinned by a test, torch 2.6 to 2.13
        return func(*known[0], **known[1])


@cache
def _has_no_value(func: Any) -> bool:
    """Return whether an operation returns what its arguments do not say: random numbers, uninitialised memory."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__


@cache
def _written(func: Any) -> tuple[int, ...]:
    arguments = enumerate(func._schema.arguments)  # private: pinned by a test, seen in torch 2.6 to 2.13
    return tuple(index for index, one in arguments if one.alias_info is not None and one.alias_info.is_write)
