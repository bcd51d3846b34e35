"""Put other parameters in the place of a model's own, for as long as a context is open."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from torch import nn

__all__ = ["swap_parameters"]


def swap_parameters(model: nn.Module, swapped: Mapping[nn.Parameter, nn.Parameter], around: ExitStack) -> None:
    """Replace parameters wherever modules hold them, tied ones too; ``around`` puts them back when it closes."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in swapped:
                around.callback(module._parameters.__setitem__, name, parameter)
                module._parameters[name] = swapped[parameter]
