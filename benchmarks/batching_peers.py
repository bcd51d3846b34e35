"""The samplers that ``batching.py`` compares, behind the same two calls: build it, ask for the batches of an epoch.

Nobody pads here; the collator that all of them would use rounds the longest row up to a multiple of 8. Samplers with a
token budget of their own are told the rounded lengths, so that they can keep to it. Samplers with a fixed batch size
come in both honest settings: ``safe``, where even a batch of the longest rows keeps to the budget, and ``mean``, where
the average batch does and long ones break it. ``column`` is ``mean`` with the lengths in a column of a Dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAD_TO_MULTIPLE_OF = 8
RANKS = 8

Batches = Iterable[Sequence[int] | NDArray[Any]]
Lengths = NDArray[np.int32]


def round_up(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Round lengths up to what the collator pads to; an empty text still takes a column."""
    return -(-np.maximum(lengths, 1).astype(np.int64) // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF


@dataclass(frozen=True)
class Sampler:
    """``epoch(number)`` gives its batches; ``shapes(number)`` their (rows, widths) where a row is not an example."""

    epoch: Callable[[int], Batches]
    shapes: Callable[[int], tuple[Sequence[int], Sequence[int]] | None] = lambda number: None


@dataclass(frozen=True)
class Arm:
    """One row of the comparison.

    ``build(lengths, budget, world_size)``: ``world_size`` consecutive batches are a step of as many ranks.
    ``knows_ranks``: the batches differ with ``world_size``. ``requires``: the package that it comes with.
    ``counts_memory``: it is that of Python and numpy objects, and counting it does not take minutes.
    """

    build: Callable[[Lengths, int, int], Sampler]
    knows_ranks: bool = False
    requires: str | None = None
    counts_memory: bool = True


def safe_batch_size(lengths: Lengths, budget: int) -> int:
    """Return how many of the longest rows keep to the budget."""
    return max(1, budget // int(round_up(lengths).max()))


def mean_batch_size(lengths: Lengths, budget: int) -> int:
    """Return how many rows of average padded length keep to the budget."""
    return max(1, int(budget / round_up(lengths).mean()))


# ---- Stock ----------------------------------------------------------------------------------------------------------


def _cut(sampler: Any, batch_size: int) -> Callable[[int], Batches]:
    """Cut the order of a stock sampler, which draws from torch's global generator, as a DataLoader does."""
    import torch

    def epoch(number: int) -> Batches:
        torch.manual_seed(number)
        return torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False)

    return epoch


def stock_random(size_of: Callable[[Lengths, int], int]) -> Callable[[Lengths, int, int], Sampler]:
    """Return the builder of the Trainer's default order."""

    def build(lengths: Lengths, budget: int, _: int) -> Sampler:
        import torch

        return Sampler(_cut(torch.utils.data.RandomSampler(range(len(lengths))), size_of(lengths, budget)))

    return build


def stock_group_by_length(size_of: Callable[[Lengths, int], int]) -> Callable[[Lengths, int, int], Sampler]:
    """Return the builder of ``train_sampling_strategy="group_by_length"`` with the lengths in a list."""

    def build(lengths: Lengths, budget: int, _: int) -> Sampler:
        from transformers.trainer_pt_utils import LengthGroupedSampler

        size = size_of(lengths, budget)
        return Sampler(_cut(LengthGroupedSampler(size, lengths=lengths.tolist()), size))

    return build


def stock_group_by_length_column(lengths: Lengths, budget: int, _: int) -> Sampler:
    """Build the same with the ``length`` column of a ``datasets.Dataset``, as the Trainer hands it over."""
    from datasets import Dataset
    from transformers.trainer_pt_utils import LengthGroupedSampler

    size = mean_batch_size(lengths, budget)
    return Sampler(_cut(LengthGroupedSampler(size, lengths=Dataset.from_dict({"length": lengths})["length"]), size))


def stock_batch_rebalance(size_of: Callable[[Lengths, int], int]) -> Callable[[Lengths, int, int], Sampler]:
    """Return the builder of ``train_sampling_strategy="batch_rebalance"``; in one process with 8 accumulated batches.

    In one process without accumulation it has nothing to balance and is the random order.
    """

    def build(lengths: Lengths, budget: int, world_size: int) -> Sampler:
        from transformers.trainer_pt_utils import BatchRebalanceSampler

        samplers = [
            BatchRebalanceSampler(
                lengths.tolist(),
                effective_batch_size=RANKS * size_of(lengths, budget),
                dp_size=world_size,
                grad_accum=RANKS // world_size,
                rank=rank,
                drop_last=False,
            )
            for rank in range(world_size)
        ]

        def epoch(number: int) -> Batches:
            for sampler in samplers:
                sampler.set_epoch(number)
            return (batch for step in zip(*samplers, strict=True) for batch in step)

        return Sampler(epoch)

    return build


def has_batch_rebalance() -> bool:
    """Tell whether this transformers has the sampler: 5.17 has it, 5.8 has not."""
    from transformers import trainer_pt_utils

    return hasattr(trainer_pt_utils, "BatchRebalanceSampler")


# ---- Other packages -------------------------------------------------------------------------------------------------


def lhotse_dynamic_bucketing(lengths: Lengths, budget: int, world_size: int) -> Sampler:
    """Build lhotse's DynamicBucketingSampler with its own token constraint, 30 buckets and the default buffer."""
    from lhotse.dataset.sampling.base import TokenConstraint
    from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

    texts = _Texts(round_up(lengths))
    samplers = [
        DynamicBucketingSampler(
            texts,
            constraint=TokenConstraint(max_tokens=budget),
            num_buckets=30,
            shuffle=True,
            world_size=world_size,
            rank=rank,
        )
        for rank in range(world_size)
    ]

    def epoch(number: int) -> Iterator[list[int]]:
        for sampler in samplers:
            sampler.set_epoch(number)
        for step in zip(*samplers, strict=True):
            for batch in step:
                yield [text.index for text in batch]

    return Sampler(epoch)


class _Text:
    """What lhotse has to know of an example; it adds attributes of its own."""

    def __init__(self, index: int, tokens: int) -> None:
        self.index, self.id, self.num_tokens = index, str(index), tokens


class _Texts:
    """The examples in their order, made when they are read: lhotse's lazy input."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[_Text]:
        for start in range(0, len(self.lengths), 1000):
            for index, tokens in enumerate(self.lengths[start : start + 1000].tolist(), start):
                yield _Text(index, tokens)


def trl_bfd(lengths: Lengths, budget: int, _: int) -> Sampler:
    """Build TRL's best-fit-decreasing packing into rows of the longest example, which need attention by document.

    Every token of the packed text is the number of its example, which is how the examples are found again; a tenth of
    the arm's time goes there.
    """
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from datasets.table import InMemoryTable
    from trl import pack_dataset

    disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    column = pa.LargeListArray.from_arrays(pa.array(offsets), tokens)
    width = int(round_up(lengths).max())
    texts = Dataset(InMemoryTable(pa.table({"input_ids": column})))
    packed = pack_dataset(texts, seq_length=width, strategy="bfd").with_format("arrow")[:]
    texts_of_row = [
        np.asarray(ids)[np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)]
        for ids, counts in zip(packed["input_ids"].to_numpy(), packed["seq_lengths"].to_numpy(), strict=True)
    ]
    rows = max(1, budget // width)

    def epoch(number: int) -> Batches:
        order = np.random.default_rng(number).permutation(len(texts_of_row))
        return (
            np.concatenate([texts_of_row[row] for row in order[start : start + rows]])
            for start in range(0, len(order), rows)
        )

    def shapes(_: int) -> tuple[list[int], list[int]]:
        sizes = [min(rows, len(texts_of_row) - start) for start in range(0, len(texts_of_row), rows)]
        return sizes, [width] * len(sizes)

    return Sampler(epoch, shapes)


def fairseq_batch_by_size(lengths: Lengths, budget: int, _: int) -> Sampler:
    """Build fairseq's rule, since fairseq has no wheel: sort with random ties, cut greedily, shuffle whole batches.

    fairseq itself keeps the batches of the first epoch for all of them; here the ties are drawn anew, which it can be
    made to do.
    """
    rounded = round_up(lengths)

    def epoch(number: int) -> Batches:
        generator = np.random.default_rng(number)
        shuffled = generator.permutation(len(rounded))
        order = shuffled[np.argsort(rounded[shuffled], kind="stable")]
        batches = batch_by_size(order, rounded[order], max_tokens=budget)
        return (batches[i] for i in generator.permutation(len(batches)))

    return Sampler(epoch)


def batch_by_size(
    order: NDArray[np.int64], lengths: NDArray[np.int64], *, max_tokens: int, multiple: int = 8
) -> list[NDArray[np.int64]]:
    """Cut an order of ascending ``lengths`` where rows * longest would pass ``max_tokens``.

    A full batch keeps the largest number of rows that is a multiple of ``multiple``, or, with fewer rows than that, all
    of them; the others begin the next batch.
    """
    batches, start = [], 0
    for position, longest in enumerate(lengths.tolist()):
        while (position - start + 1) * longest > max_tokens and position > start:
            rows = position - start
            kept = max(rows // multiple * multiple, rows % multiple)
            batches.append(order[start : start + kept])
            start += kept
    batches.append(order[start:])
    return batches


# ---- Ours -----------------------------------------------------------------------------------------------------------


def ours(**settings: Any) -> Callable[[Lengths, int, int], Sampler]:
    """Return the builder of ``LengthBuckets(max_tokens=budget, **settings)``."""

    def build(lengths: Lengths, budget: int, world_size: int) -> Sampler:
        from hf_memopt.types import LengthBuckets

        return _planned(LengthBuckets(lengths, max_tokens=budget, world_size=world_size, **settings))

    return build


def ours_batch_size(size_of: Callable[[Lengths, int], int]) -> Callable[[Lengths, int, int], Sampler]:
    """Return the builder of ``LengthBuckets(batch_size=...)``."""

    def build(lengths: Lengths, budget: int, world_size: int) -> Sampler:
        from hf_memopt.types import LengthBuckets

        return _planned(LengthBuckets(lengths, batch_size=size_of(lengths, budget), world_size=world_size))

    return build


def _planned(buckets: Any) -> Sampler:
    def epoch(number: int) -> Batches:
        plan = buckets.plan(number)
        return (plan.batch(i) for i in range(buckets.n_batches))

    def shapes(number: int) -> tuple[list[int], list[int]]:
        plan = buckets.plan(number)
        batches = [plan.batch(i) for i in range(buckets.n_batches)]
        longest = [int(round_up(buckets.lengths[batch]).max()) for batch in batches]
        widths = [plan.width(i) for i in range(buckets.n_batches)]
        return [len(batch) for batch in batches], [w or own for w, own in zip(widths, longest, strict=True)]

    return Sampler(epoch, shapes)


ARMS: dict[str, Arm] = {
    "hf_memopt max_tokens": Arm(ours(), knows_ranks=True),
    "hf_memopt boundaries=auto": Arm(ours(boundaries="auto"), knows_ranks=True),
    "hf_memopt batch_size, safe": Arm(ours_batch_size(safe_batch_size), knows_ranks=True),
    "hf_memopt batch_size, mean": Arm(ours_batch_size(mean_batch_size), knows_ranks=True),
    "random, safe": Arm(stock_random(safe_batch_size)),
    "random, mean": Arm(stock_random(mean_batch_size)),
    "group_by_length, safe": Arm(stock_group_by_length(safe_batch_size)),
    "group_by_length, mean": Arm(stock_group_by_length(mean_batch_size)),
    "group_by_length, column": Arm(stock_group_by_length_column, counts_memory=False),
    "batch_rebalance, safe": Arm(stock_batch_rebalance(safe_batch_size), knows_ranks=True),
    "batch_rebalance, mean": Arm(stock_batch_rebalance(mean_batch_size), knows_ranks=True),
    "lhotse dynamic bucketing": Arm(lhotse_dynamic_bucketing, knows_ranks=True, requires="lhotse"),
    "fairseq batch_by_size": Arm(fairseq_batch_by_size),
    "TRL bfd packing": Arm(trl_bfd, requires="trl", counts_memory=False),
}


def missing(name: str) -> str | None:
    """Return why an arm cannot run here, with what to do; None if it can."""
    arm = ARMS[name]
    if arm.requires is not None and find_spec(arm.requires) is None:
        return f'{name}: skipped, {arm.requires} is not installed. Call: pip install "hf-memopt[bench]"'
    if "batch_rebalance" in name and not has_batch_rebalance():
        return f'{name}: skipped, this transformers has no such sampler. Call: pip install "transformers>=5.17"'
    return None
