"""The plan of ``LengthBuckets`` as samplers, for a plain DataLoader, Accelerate or sentence-transformers.

The stock ``Trainer`` wants the views of ``bucketed`` instead: of a sampler that is put in by other means it loses the
epoch on resume. A sampler's position counts what it has handed out; the workers of a DataLoader run ahead of the
training loop, so there name the batches that were trained on: ``sampler.state_dict(position=step)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from hf_memopt.batching.plan.buckets import LengthBuckets, PlanDiagnostics
from hf_memopt.batching.plan.checks import check_counts, check_seed

__all__ = ["LengthBucketedBatchSampler", "LengthBucketedSampler"]


class _PlanSampler:
    """What both samplers share: the epoch, the position in it, and their state."""

    buckets: LengthBuckets

    def _start(self, rank: int | None) -> None:
        world_size = self.buckets.world_size
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
            raise ValueError(
                f"rank={rank!r} is out of range; expected None or 0 to world_size - 1 = {world_size - 1}. "
                f"Pass rank=0, world_size={world_size}"
            )
        self.rank = rank
        self.epoch = 0
        self._position = 0  # items handed out in this epoch
        self._resume_at = 0  # where the next iteration begins

    def __len__(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Hand out the order of an epoch, from its beginning; the epoch it is in already changes nothing."""
        check_seed(epoch, name="epoch")
        if epoch != self.epoch:
            self.epoch, self._position, self._resume_at = epoch, 0, 0

    def _begin(self) -> int:
        """Begin an iteration and return its first position; only the first one after a restored state is not 0."""
        self._position, self._resume_at = self._resume_at, 0
        return self._position

    def _steps(self) -> int:
        """The batches of one rank; with a rank, the last steps wrap around to the first batches, as stock does."""
        batches = self.buckets.n_batches
        return batches if self.rank is None else -(-batches // self.buckets.world_size)

    def _batch_number(self, step: int) -> int:
        """The position in the plan of a step of this rank."""
        if self.rank is None:
            return step
        return (step * self.buckets.world_size + self.rank) % self.buckets.n_batches

    def diagnostics(self) -> PlanDiagnostics:
        """Return what the batches of the current epoch are like, over all ranks."""
        return self.buckets.diagnostics(self.epoch)

    # ---- State ------------------------------------------------------------------------------------------------------

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """Return where the sampler stands, for ``load_state_dict``.

        Args:
            position: items of this epoch that were trained on; None: all that were handed out, which includes those
                that DataLoader workers hold ready.

        Raises:
            ValueError: ``position`` is not within the epoch.
        """
        if position is None:
            position = self._position
        _check_position(position, len(self))
        return {**self._settings(), "epoch": self.epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler of the same data and settings stood.

        Raises:
            ValueError: missing or unknown keys, or a state of other lengths or settings; the sampler stays as it was.
        """
        settings = self._settings()
        known = {*settings, "epoch", "position"}
        if state.keys() != known:
            raise ValueError(
                f"state=<keys {sorted(state)}> lacks {sorted(known - state.keys())} and has the unknown "
                f"{sorted(state.keys() - known)}; expected what state_dict() of this version returns. "
                "Save it anew: sampler.state_dict()"
            )
        for name, value in settings.items():
            if state[name] != value:
                raise ValueError(
                    f"state[{name!r}]={state[name]!r} belongs to another order than this sampler's {value!r}; expected "
                    "the same lengths and settings. Build the sampler as it was when the state was saved"
                )
        check_seed(state["epoch"], name="epoch")
        _check_position(state["position"], len(self))
        self.epoch, self._position, self._resume_at = state["epoch"], state["position"], state["position"]

    def _settings(self) -> dict[str, Any]:
        """Everything that the order depends on, but the epoch."""
        buckets = self.buckets
        return {
            "kind": type(self).__name__,
            "batch_size": buckets.batch_size,
            "max_tokens": buckets.max_tokens,
            "boundaries": buckets.boundaries.tolist(),
            "pads_to_boundaries": buckets.pads_to_boundaries,
            "pad_to_multiple_of": buckets.pad_to_multiple_of,
            "too_long": buckets.too_long,
            "seed": buckets.seed,
            "world_size": buckets.world_size,
            "rank": self.rank,
            "examples": len(buckets.lengths),
            "fingerprint": hashlib.sha256(buckets.lengths.astype("<i4").tobytes()).hexdigest()[:16],
        }


class LengthBucketedBatchSampler(_PlanSampler, torch.utils.data.Sampler[list[int]]):
    """Batches of example indices of similar length, for ``DataLoader(dataset, batch_sampler=...)``.

    Args:
        lengths: tokens per example, shape (examples,).
        batch_size: examples per batch; or
        max_tokens: padded tokens per batch.
        seed: together with the epoch it fixes the order.
        world_size: processes that train side by side.
        rank: which of them this is, to get its batches only; every rank then makes the same number of steps. None for
            all batches, in groups of ``world_size``: what Accelerate wants, which shares them out itself.
        settings: ``n_buckets``, ``boundaries``, ``pad_to_multiple_of``, ``too_long``: see ``LengthBuckets``.

    Raises:
        ValueError: see ``LengthBuckets``; a rank outside 0 to ``world_size - 1``.

    Example:
        >>> sampler = LengthBucketedBatchSampler([3, 50, 4, 52, 5, 51], max_tokens=168, n_buckets=2)
        >>> [sorted(batch) for batch in sampler]
        [[1, 3, 5], [0, 2, 4]]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        world_size: int = 1,
        rank: int | None = None,
        **settings: Any,
    ) -> None:
        self.buckets = LengthBuckets(
            lengths, batch_size=batch_size, max_tokens=max_tokens, seed=seed, world_size=world_size, **settings
        )
        self.batch_size = batch_size  # Accelerate reads it; None says that batches differ
        self.drop_last = False
        self._start(rank)

    def __len__(self) -> int:
        return self._steps()

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self._begin())

    def _batches(self, first: int) -> Iterator[list[int]]:
        plan = self.buckets.plan(self.epoch)
        for step in range(first, len(self)):
            self._position = step + 1
            yield plan.batch(self._batch_number(step)).tolist()


class LengthBucketedSampler(_PlanSampler, torch.utils.data.Sampler[int]):
    """Example indices of which ``batch_size`` neighbours are of similar length, for ``DataLoader(..., sampler=...)``.

    Args:
        lengths: tokens per example, shape (examples,).
        batch_size: that of the DataLoader.
        seed: together with the epoch it fixes the order.
        world_size: processes that train side by side.
        rank: which of them this is, to get its examples only; None for all.
        settings: ``n_buckets``, ``pad_to_multiple_of``: see ``LengthBuckets``.

    Raises:
        ValueError: see ``LengthBuckets``; a rank outside 0 to ``world_size - 1``.

    Example:
        >>> sampler = LengthBucketedSampler([3, 50, 4, 52, 5, 51], batch_size=3, n_buckets=2)
        >>> sorted(list(sampler)[:3])
        [1, 3, 5]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: int,
        seed: int = 0,
        world_size: int = 1,
        rank: int | None = None,
        n_buckets: int | Literal["auto"] = "auto",
        pad_to_multiple_of: int = 8,
    ) -> None:
        check_counts(batch_size=batch_size)
        self.buckets = LengthBuckets(
            lengths,
            batch_size=batch_size,
            n_buckets=n_buckets,
            seed=seed,
            world_size=world_size,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        self.batch_size = batch_size
        self._start(rank)

    def __len__(self) -> int:
        if self.rank is None:
            return self.buckets.n_examples
        return self._steps() * self.batch_size

    def __iter__(self) -> Iterator[int]:
        return self._examples(self._begin())

    def _examples(self, first: int) -> Iterator[int]:
        plan = self.buckets.plan(self.epoch)
        for step in range(first // self.batch_size, self._steps()):
            batch = plan.batch(self._batch_number(step))
            if self.rank is not None and len(batch) < self.batch_size:
                batch = np.resize(batch, self.batch_size)  # filled up with its own examples: ranks take equal steps
            begin = step * self.batch_size
            for position, example in enumerate(batch.tolist(), start=begin):
                if position >= first:
                    self._position = position + 1
                    yield example


def _check_position(position: Any, length: int) -> None:
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= length:
        raise ValueError(
            f"position={position!r} is not within the epoch; expected 0 to {length}. Pass the number of items that "
            "were trained on since the epoch began"
        )
