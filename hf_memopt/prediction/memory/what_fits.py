"""Find the largest number along a line that fits: rows of a micro-batch, tokens of a row, examples of a step.

Memory grows with each of them, nearly along a line. So the line through two numbers whose bytes are known tells where
to look next, and halving is the fallback where it leads nowhere. It is a guess and no more: that a number fits, and
that the next one does not, are simulated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hf_memopt.components import MARGIN_SHARE

if TYPE_CHECKING:
    from hf_memopt.training.devices import Gpu


def margin_of(gpu: Gpu) -> int:
    """Return the bytes of a GPU that have to be left."""
    return gpu.usable_bytes // MARGIN_SHARE


def largest_that_fits(
    numbers: Sequence[int],
    spare_bytes: Callable[[int], int | None],
    *,
    first: Sequence[int] = (),
    is_worth: Callable[[int], bool] = lambda number: True,
) -> int | None:
    """Return the largest number that leaves bytes free, where the next one does not; None where none does.

    Args:
        numbers: to choose from, ascending.
        spare_bytes: simulates a number: what it leaves, negative for what is missing; None where it cannot be
            simulated, which counts as missing. Asked once for each number.
        first: which of the numbers to try first, those that the ones before them have not settled.
        is_worth: of a number that does not fit: whether a smaller one is still of use. Where it is not, the largest
            number that is known to fit is returned.

    Examples:
        >>> largest_that_fits(range(1, 1001), lambda rows: 8_000 - 100 - 30 * rows)
        263
    """
    known: dict[int, int] = {}
    low, high = -1, len(numbers)  # places: the one at low fits, the one at high does not
    wanted = list(first)
    turn = 0
    while high - low > 1 and (high == len(numbers) or is_worth(numbers[high])):
        asked = next((number for number in wanted if low < bisect_right(numbers, number) - 1 < high), None)
        if asked is not None:
            wanted.remove(asked)
            place = bisect_right(numbers, asked) - 1
        else:
            turn += 1
            place = (low + high) // 2 if turn % 3 == 0 else _guess(numbers, known, low, high)
        spare = spare_bytes(numbers[place])
        if spare is not None:
            known[place] = spare
        if spare is not None and spare >= 0:
            low = place
        else:
            high = place
    return numbers[low] if low >= 0 else None


def _guess(numbers: Sequence[int], known: Mapping[int, int], low: int, high: int) -> int:
    """Return the place between two others where the line through the two nearest known numbers leaves nothing."""
    nearest = sorted(known, key=lambda place: min(abs(place - low), abs(place - high)))[:2]
    if len(nearest) == 2:
        one, other = sorted(nearest)
        slope_bytes = (known[one] - known[other]) / (numbers[other] - numbers[one])
        if slope_bytes > 0:
            most = numbers[one] + known[one] / slope_bytes
            return min(max(bisect_right(numbers, most) - 1, low + 1), high - 1)
    return (low + high) // 2
