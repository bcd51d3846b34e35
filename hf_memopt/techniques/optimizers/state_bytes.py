"""The bytes of an optimizer's state, by dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from hf_memopt.binding.model_traits import unwrap_optimizer
from hf_memopt.binding.nested_tensors import tensors_in

__all__ = ["optimizer_state_bytes"]

_QUANTISATION_TABLES = ("qmap1", "qmap2")


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of all tensors in an optimizer's state by dtype name.

    Each storage counts once and as a whole; of a sharded tensor the local part counts. bitsandbytes' quantisation
    tables (``qmap1`` and ``qmap2``, 1 KiB each, shared by all parameters) do not count.

    Examples:
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> layer(torch.ones(4)).sum().backward(); optimizer.step()
        >>> optimizer_state_bytes(optimizer)  # two moments of 16 elements, and the step count
        {'float32': 132}
    """
    storages: dict[Any, tuple[str, int]] = {}
    for state in unwrap_optimizer(optimizer).state.values():
        for tensor in _plain_tensors(state):
            storage = tensor.untyped_storage()
            key = (storage.device, storage.data_ptr()) if storage.data_ptr() else id(tensor)  # meta has no addresses
            storages.setdefault(key, (str(tensor.dtype).removeprefix("torch."), storage.nbytes()))
    sizes: Counter[str] = Counter()
    for dtype, size in storages.values():
        sizes[dtype] += size
    return dict(sorted(sizes.items()))


def _plain_tensors(state: Any) -> list[torch.Tensor]:
    """Return the plain tensors in one parameter's state, also those inside tensor subclasses (sharded, quantised)."""
    if isinstance(state, Mapping):
        state = [value for name, value in state.items() if name not in _QUANTISATION_TABLES]
    plain: list[torch.Tensor] = []
    for tensor in tensors_in(state):
        if hasattr(tensor, "__tensor_flatten__"):
            plain += _plain_tensors([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            plain.append(tensor)
    return plain
