"""All tensors in a batch, in the outputs of a model or in the state of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested mappings (a ``ModelOutput`` too), lists and tuples, in their order.

    Examples:
        >>> len(tensors_in({"logits": torch.ones(2), "others": (torch.ones(1), [torch.ones(3), "text"])}))
        3
    """
    if torch.is_tensor(value):
        return [value]
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in tensors_in(entry)]
