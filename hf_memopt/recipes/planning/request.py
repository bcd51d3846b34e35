"""What ``plan`` is asked for, checked: the words of ``goal``, ``method`` and ``allow``, the GPU, lengths, the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_memopt.devices.gpus import Gpu, current_gpu, custom_gpu, find_gpu
from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import Count, check_value
from hf_memopt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "ALLOW",
    "GOALS",
    "METHODS",
    "MULTIPLE",
    "Texts",
    "checked_allow",
    "checked_batch",
    "checked_word",
    "read_gpu",
]

GOALS: Mapping[str, str] = {
    "speed": "the least time per example",
    "memory": "the least memory; of set-ups within 5 % of it the fastest",
    "longest": "the longest rows; at that length the least time per example",
}
METHODS: Mapping[str, str] = {
    "auto": "full training where it fits with 5 % to spare, else LoRA, else QLoRA",
    "full": "every weight is trained",
    "lora": "adapters are trained, on 16-bit weights",
    "qlora": "adapters are trained, on 4-bit weights",
}
ALLOW: Mapping[str, str] = {
    "release_clipping": "give up clipping by the global norm, so that each gradient is freed as soon as it is used",
    "bf16_weights": "train bfloat16 weights with stochastic rounding, without float32 copies",
    "freeze": "leave embeddings, or also the lower half of the layers, as they are",
    "shorter": "cut texts to a half or a quarter of the length where nothing else fits",
}
OF_ALL_WEIGHTS = ("release_clipping", "bf16_weights", "freeze")
"""What of ``ALLOW`` means nothing where only adapters are trained."""

MULTIPLE = 8  # tensor cores want it, and collators pad to it


def checked_word(name: str, value: Any, known: Mapping[str, str]) -> None:
    """Refuse a word that is not among the known ones."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"{name}={value!r} is unknown; expected one of {', '.join(map(repr, known))}.{did_you_mean(value, known)} "
            f"Pass {name}={next(iter(known))!r}"
        )


def checked_allow(allow: str | Iterable[str], method: str, gpu: Gpu) -> tuple[str, ...]:
    """Return the words of ``allow`` in the order of ``ALLOW``.

    Raises:
        ValueError: a word is unknown, or contradicts the method or the GPU.
    """
    words = (allow,) if isinstance(allow, str) else tuple(allow)
    for word in words:
        checked_word("allow", word, ALLOW)
    for word in OF_ALL_WEIGHTS:
        if word in words and method in ("lora", "qlora"):
            raise ValueError(
                f"allow={words!r}, method={method!r} contradict each other: {word!r} is for weights that are trained, "
                f"and only adapters are; expected another method. Pass method='full', or leave {word!r} out"
            )
    if "bf16_weights" in words and not gpu.bf16:
        raise ValueError(
            f"allow={words!r}, gpu={gpu.name!r} contradict each other: this GPU only emulates bfloat16; expected "
            "compute capability 8.0 or newer. Leave 'bf16_weights' out"
        )
    return tuple(word for word in ALLOW if word in words)


def checked_batch(effective_batch_size: int, world_size: int) -> int:
    """Return the examples of a step on each GPU.

    Raises:
        ValueError: a number below 1, or an effective batch that cannot be cut over the GPUs.
    """
    check_value("effective_batch_size", effective_batch_size, Count, 32)
    check_value("world_size", world_size, Count, 1)
    if effective_batch_size % world_size:
        near = world_size * max(1, round(effective_batch_size / world_size))
        raise ValueError(
            f"effective_batch_size={effective_batch_size} cannot be cut over world_size={world_size} GPUs; expected a "
            f"multiple. Pass effective_batch_size={near}"
        )
    return effective_batch_size // world_size


def read_gpu(gpu: str | Gpu | None, budget: int | str | None) -> Gpu:
    """Return the GPU to plan for; of a budget beside it only so much is usable.

    Raises:
        ValueError: an unknown GPU; neither is given and this machine has none; a budget above the GPU's memory.
    """
    if gpu is None and budget is not None:
        here = current_gpu()
        found = custom_gpu(budget) if here is None else here
    else:
        known = current_gpu() if gpu is None else find_gpu(gpu)
        if known is None:
            raise ValueError(
                "gpu=None names no GPU, and this machine has none; expected a name or a size. Pass gpu='RTX 3060 12GB'"
            )
        found = known
    if budget is None:
        return found
    budget_bytes = custom_gpu(budget).usable_bytes if isinstance(budget, str) else parse_bytes(budget)
    if budget_bytes > found.usable_bytes:
        raise ValueError(
            f"budget={budget!r} is more than the {format_bytes(found.usable_bytes)} that {found.name} has; expected "
            f"less, or no budget. Pass budget='{found.usable_bytes // 2**20}MiB'"
        )
    return replace(found, usable_bytes=budget_bytes)


@dataclass(frozen=True)
class Texts:
    """The lengths to plan for.

    Attributes:
        seq_len: tokens of the longest row, where it is cut those that stay; None for a model without text.
        width: mean padded tokens of a row over an epoch in bucketed order, a multiple of 8; None without lengths.
        rows: the number of examples; None where it is unknown.
        tokens: mean tokens of a row without padding; None without lengths.
        cut: rows that are longer than ``seq_len``.
        lengths: tokens of each example, shape (examples,); None where they are unknown.
    """

    seq_len: int | None
    width: int | None = None
    rows: int | None = None
    tokens: float | None = None
    cut: int = 0
    lengths: NDArray[np.int64] | None = None

    @classmethod
    def of(
        cls, lengths: ArrayLike | None, seq_len: int | None, *, batch_size: int, most: int | None, default: int | None
    ) -> Texts:
        """Return the lengths of rows that are cut to ``seq_len``.

        Args:
            lengths: tokens of each example, shape (examples,); None for rows of ``seq_len``.
            seq_len: where longer rows are cut; None for the longest of ``lengths``, else ``default``.
            batch_size: examples of a batch whose longest row the others are padded to.
            most: tokens that the model has positions for; None for no limit.
            default: length where neither is given; None for a model without text.

        Raises:
            ValueError: no or impossible lengths, or lengths beyond the model's positions.
        """
        if lengths is None:
            return cls(default if seq_len is None else seq_len)
        values = np.asarray(lengths)
        if values.ndim != 1 or not values.size or values.dtype.kind not in "iu" or values.min() < 1:
            raise ValueError(
                f"lengths=<{values.dtype} of shape {values.shape}> are no lengths of examples; expected whole numbers "
                "from 1 on, one for each example. Pass lengths=token_lengths(dataset)"
            )
        if default is None:
            raise ValueError(
                f"lengths=<{values.size} lengths> have no meaning for a model without text; expected None. "
                "Leave lengths out"
            )
        longest = int(values.max())
        if seq_len is None:
            if most is not None and longest > most:
                raise ValueError(
                    f"lengths=<longest {longest}> are beyond the {most} positions of the model; expected 1 to {most}. "
                    f"Pass seq_len={most}, which cuts {int((values > most).sum())} of {values.size} rows"
                )
            seq_len = most or _rounded(longest)
        seq_len = min(seq_len, _rounded(longest))
        kept = np.minimum(values.astype(np.int64), seq_len)
        ordered = np.sort(kept)
        widths = np.maximum.reduceat(ordered, np.arange(0, len(ordered), batch_size))
        rows = np.diff(np.arange(0, len(ordered), batch_size), append=len(ordered))
        width = min(_rounded(float((widths * rows).sum() / len(ordered))), seq_len)
        return cls(
            seq_len, width, len(kept), float(kept.mean()), int((values > seq_len).sum()), values.astype(np.int64)
        )

    def shorter(self) -> tuple[int, float] | None:
        """Return the 99th percentile of the rows, rounded up, and the share of the rows that are longer.

        None where no lengths are known, or where it is hardly shorter than the longest row: by less than a tenth.
        """
        if self.lengths is None or self.seq_len is None:
            return None
        length = _rounded(float(np.percentile(self.lengths, 99, method="inverted_cdf")))
        longer = float((self.lengths > length).mean())
        return (length, longer) if length < 0.9 * self.seq_len else None

    def shortened(self, seq_len: int, batch_size: int) -> Texts:
        """Return the lengths of the same rows, cut to fewer tokens."""
        if self.lengths is None:
            return Texts(seq_len)
        return Texts.of(self.lengths, seq_len, batch_size=batch_size, most=None, default=seq_len)


def _rounded(tokens: float) -> int:
    return int(-(-tokens // MULTIPLE)) * MULTIPLE
