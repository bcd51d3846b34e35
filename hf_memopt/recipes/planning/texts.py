"""The lengths of rows that ``plan`` plans for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hf_memopt.plain_data import checked_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["MULTIPLE", "Texts"]

MULTIPLE = 8  # tensor cores want it, and collators pad to it


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
        values = checked_array("lengths", lengths)
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

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row before it is cut, a multiple of 8; None without lengths."""
        return None if self.lengths is None else _rounded(int(self.lengths.max()))

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
