"""What bitsandbytes' quantised weights keep on the device beside autograd, so that it can be taken away and put back.

``MatMul4Bit`` keeps a view of the packed weight and the weight's ``QuantState`` as plain attributes of its ``ctx``, and
``Linear8bitLt`` computes from ``module.state``; checkpointing drops neither. So each of these tensors has one device
storage for good: it is emptied while the layer is away and filled again before the layer is recomputed, and whoever
kept a view of it sees the values again. ``QuantState.to()`` would move the state for ever.

Private to bitsandbytes, seen in 0.50.2; ``test_streaming_quantized.py`` pins it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Carrier(NamedTuple):
    """A tensor that its owner has as an attribute, on the host while the layer is away."""

    owner: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """What the owner has now."""
        found: torch.Tensor = getattr(self.owner, self.name)
        return found

    def exchange(self, tensor: torch.Tensor) -> None:
        """Give the owner another tensor."""
        setattr(self.owner, self.name, tensor)


def is_packed(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a quantised weight of bitsandbytes."""
    return getattr(parameter, "quant_state", None) is not None or hasattr(parameter, "SCB")


def carriers_of(parameter: Any, module: Any) -> Iterator[Carrier]:
    """Yield what holds the values of a quantised weight of a module.

    The weight of 8 bits comes last: ``forward`` makes it the state's tensor, and put away it has the host's again.
    """
    if hasattr(parameter, "SCB"):
        if parameter.CB is not None:  # until the first forward pass the weight has them
            module.init_8bit_state()
        yield from (Carrier(module.state, name) for name in ("CB", "SCB"))
        return
    yield Carrier(parameter, "data")
    for state in (parameter.quant_state, getattr(parameter.quant_state, "state2", None)):
        for name in ("absmax", "code", "offset"):
            if torch.is_tensor(getattr(state, name, None)):
                yield Carrier(state, name)
