"""Count a batch once in the running statistics of ``BatchNorm``, though its layer is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn


class StillStatistics:
    """Norms that use the statistics of a batch, and add them to the running ones in the first of two passes only.

    It is a ``context_fn`` of non-reentrant ``torch.utils.checkpoint`` too, around that of ``inner``.
    """

    def __init__(self, layers: Iterable[nn.Module], inner: Callable[[], tuple[Any, Any]] | None = None) -> None:
        parts: Iterable[Any] = (part for layer in layers for part in layer.modules())
        of_batches = nn.modules.batchnorm._BatchNorm
        self.norms: list[Any] = [one for one in parts if isinstance(one, of_batches) and one.track_running_stats]
        self._inner = inner

    def __call__(self) -> tuple[Any, Any]:
        first, second = (nullcontext(), nullcontext()) if self._inner is None else self._inner()
        return first, self._again(second)

    @contextmanager
    def _again(self, inner: Any) -> Iterator[None]:
        with self.still(), inner:  # selective checkpointing counts what runs within
            yield

    @contextmanager
    def still(self, is_again: bool = True) -> Iterator[None]:
        """Leave the running statistics as they are if the pass is the second one."""
        former = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in self.norms if is_again]
        try:
            for norm, _, _ in former:
                norm.momentum = 0.0
            yield
        finally:
            for norm, momentum, count in former:
                norm.momentum = momentum
                norm.num_batches_tracked.copy_(count)
