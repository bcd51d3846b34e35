"""Let torch.compile choose which activations to keep, within a fraction of those that a compiled step would save.

The partitioner of a compiled graph looks for the least recomputation within the fraction (1.0 is torch's default, 0.0
keeps about the inputs of the graph alone). It acts when a graph is compiled, i.e. the first time that it runs, and has
no effect on a model that is not compiled.
"""

from __future__ import annotations

from typing import Any

from hf_memopt.binding.handles import UndoHandle

__all__ = ["activation_memory_budget"]


def activation_memory_budget(fraction: float) -> UndoHandle:
    """Let graphs that torch compiles from now on save at most about ``fraction`` of their activations.

    Args:
        fraction: 0.0 to 1.0; of what torch.compile saves by default.

    Returns:
        A handle, and a context manager, that restores torch's configuration.

    Raises:
        ValueError: ``fraction`` is not a number from 0 to 1.

    Examples:
        >>> with activation_memory_budget(0.5):
        ...     pass  # the first training step of a model compiled by torch.compile
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise ValueError(
            f"fraction={fraction!r} is not a fraction of the activations; expected a number from 0.0 to 1.0. "
            "Call: activation_memory_budget(0.5)"
        )
    # private, pinned by a test, seen in torch 2.6 to 2.13: the name that torch's blog and issues give to users
    import torch._functorch.config as config

    patch: Any = config.patch(activation_memory_budget=float(fraction))
    patch.__enter__()
    return UndoHandle(lambda: patch.__exit__(None, None, None))
