"""The plan of ``LengthBuckets`` as samplers, for a plain DataLoader, Accelerate or sentence-transformers.

The stock ``Trainer`` wants the views of ``bucketed`` instead: of a sampler that is put in by other means it loses the
epoch on resume. A sampler's position counts what it has handed out; the workers of a DataLoader run ahead of the
training loop, so there name the batches that were trained on: ``sampler.state_dict(position=step)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from hf_memopt.plain_data import check_value
from hf_memopt.training.batching.plan.buckets import LengthBuckets, PlanDiagnostics
from hf_memopt.training.batching.plan.checks import check_settings, plain_number


class LengthBucketedBatchSampler(torch.utils.data.Sampler[Any]):
    """Yield batches of examples of similar length, for ``DataLoader(dataset, batch_sampler=...)``.

    Args:
        lengths: tokens per example, shape (examples,).
        rank: which of ``world_size`` processes this is, to get its batches only; every rank then makes the same number
            of steps. None for all batches, in groups of ``world_size``: what Accelerate wants, which shares them out
            itself.
        settings: ``batch_size`` or ``max_tokens``, ``seed``, ``world_size``, ``n_buckets``, ``boundaries``,
            ``pad_to_multiple_of``, ``too_long``: see ``LengthBuckets``.

    Raises:
        ValueError: see ``LengthBuckets``; a rank outside 0 to ``world_size - 1``.

    Examples:
        >>> sampler = LengthBucketedBatchSampler([3, 50, 4, 52, 5, 51], max_tokens=168, n_buckets=2)
        >>> [sorted(batch) for batch in sampler]
        [[1, 3, 5], [0, 2, 4]]
    """

    def __init__(self, lengths: ArrayLike, *, rank: int | None = None, **settings: Any) -> None:
        self.buckets = LengthBuckets(lengths, **settings)
        self.batch_size = self.buckets.batch_size  # Accelerate reads it; None says that batches differ
        self.drop_last = False
        check_value("rank", rank, Annotated[int, range(self.buckets.world_size)] | None, 0)
        self.rank = rank
        self.epoch = 0
        self._position = 0  # items handed out in this epoch
        self._resume_at = 0  # where the next iteration begins

    @property
    def sampler(self) -> LengthBucketedBatchSampler:
        """Itself: with several processes accelerate sets the epoch of a batch sampler's ``sampler`` (1.15.0)."""
        return self

    def __len__(self) -> int:
        return self._steps()

    def _steps(self) -> int:
        batches = self.buckets.n_batches
        return batches if self.rank is None else -(-batches // self.buckets.world_size)

    def __iter__(self) -> Iterator[Any]:
        self._position, self._resume_at = self._resume_at, 0  # only after a restored state the first position is not 0
        return self._from(self._position)

    def _from(self, first: int) -> Iterator[Any]:
        for position, item in enumerate(self._items(first), start=first + 1):
            self._position = position
            yield item

    def _items(self, first: int) -> Iterator[Any]:
        """Yield what is handed out from a position on; with a rank, the last steps wrap around to the first batches,
        as stock does.
        """
        plan, world_size = self.buckets.plan(self.epoch), self.buckets.world_size
        for step in range(first, self._steps()):
            number = step if self.rank is None else (step * world_size + self.rank) % len(plan)
            yield plan.batch(number).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Hand out the order of an epoch, from its beginning; the epoch it is in already changes nothing."""
        check_settings(epoch=epoch)
        if epoch != self.epoch:
            self.epoch, self._position, self._resume_at = epoch, 0, 0

    def diagnostics(self) -> PlanDiagnostics:
        """Return what the batches of the current epoch are like, over all ranks."""
        return self.buckets.diagnostics(self.epoch)

    # ---- State ------------------------------------------------------------------------------------------------------

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """Return the position of the sampler, for ``load_state_dict``.

        Args:
            position: items of this epoch that were trained on; None: all that were handed out, which includes those
                that DataLoader workers hold ready.

        Raises:
            ValueError: ``position`` is not within the epoch.
        """
        if position is None:
            position = self._position
        check_value("position", position, Annotated[int, range(len(self) + 1)], 0)
        return {**self._settings(), "epoch": self.epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler of the same data and settings stood.

        Raises:
            ValueError: a state of other lengths or settings; the sampler stays as it was.
        """
        saved = state if isinstance(state, Mapping) else {}
        for name, value in self._settings().items():
            if (found := saved.get(name)) != value:
                raise ValueError(
                    f"state[{name!r}]={found!r} belongs to another order than this sampler's {value!r}; expected "
                    "the same lengths and settings. Build the sampler as it was when the state was saved"
                )
        check_settings(epoch=state["epoch"])
        check_value("position", state["position"], Annotated[int, range(len(self) + 1)], 0)
        self.epoch, self._position, self._resume_at = state["epoch"], state["position"], state["position"]

    def _settings(self) -> dict[str, Any]:
        """Everything that the order depends on, but the epoch."""
        buckets = self.buckets
        names = ("batch_size", "max_tokens", "pads_to_boundaries", "pad_to_multiple_of", "too_long", "seed")
        return {
            "kind": type(self).__name__,
            **{name: plain_number(getattr(buckets, name)) for name in (*names, "world_size")},
            "boundaries": buckets.boundaries.tolist(),
            "rank": self.rank,
            "examples": len(buckets.lengths),
            "fingerprint": hashlib.sha256(buckets.lengths.astype("<i4").tobytes()).hexdigest()[:16],
        }


class LengthBucketedSampler(LengthBucketedBatchSampler):
    """Yield examples so that ``batch_size`` neighbours have similar lengths, for ``DataLoader(..., sampler=...)``.

    Args:
        lengths: tokens per example, shape (examples,).
        batch_size: that of the DataLoader.
        settings: ``seed``, ``world_size``, ``rank``, ``n_buckets``, ``pad_to_multiple_of``, ``too_long``: see
            ``LengthBucketedBatchSampler``.

    Raises:
        ValueError: see ``LengthBuckets``; a rank outside 0 to ``world_size - 1``.

    Examples:
        >>> sampler = LengthBucketedSampler([3, 50, 4, 52, 5, 51], batch_size=3, n_buckets=2)
        >>> sorted(list(sampler)[:3])
        [1, 3, 5]
    """

    batch_size: int

    def __init__(self, lengths: ArrayLike, *, batch_size: int, **settings: Any) -> None:
        super().__init__(lengths, batch_size=batch_size, **settings)

    def __len__(self) -> int:
        return self.buckets.n_examples if self.rank is None else self._steps() * self.batch_size

    def _items(self, first: int) -> Iterator[int]:
        step, begin = divmod(first, self.batch_size)
        for batch in super()._items(step):
            if self.rank is not None:  # fill up with its own examples: ranks take equal steps
                batch = np.resize(batch, self.batch_size).tolist()
            yield from batch[begin:]
            begin = 0
