"""The largest number that fits is that of trying every number, from few simulations."""

from __future__ import annotations

from math import log2

from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.prediction.memory import largest_that_fits

LINES = {
    "fixed": st.integers(0, 1000),
    "each": st.integers(1, 50),
    "bend": st.floats(0, 0.05),
    "block": st.integers(1, 40),
}


def spare_of(room: int, fixed: int, each: int, bend: float, block: int):
    """Return what a number leaves of ``room``: bytes along a line that bends upwards, rounded to blocks."""

    def spare_bytes(number: int) -> int:
        needed = fixed + each * number + bend * number**2
        return room - int(-(-needed // block)) * block

    return spare_bytes


@given(
    numbers=st.sets(st.integers(1, 2000), min_size=1, max_size=60), share=st.floats(0, 2), first=st.booleans(), **LINES
)
def test_it_is_the_largest_of_all_and_each_is_simulated_once(numbers, share, first, fixed, each, bend, block) -> None:
    ordered = sorted(numbers)
    spare_bytes = spare_of(int(share * (fixed + each * ordered[-1])), fixed, each, bend, block)
    asked: list[int] = []

    def simulate(number: int) -> int:
        asked.append(number)
        return spare_bytes(number)

    found = largest_that_fits(ordered, simulate, first=(ordered[0], ordered[-1]) if first else ())
    assert found == max((number for number in ordered if spare_bytes(number) >= 0), default=None)
    assert len(asked) == len(set(asked)) <= 4 + 3 * log2(len(ordered) + 1)


def test_what_cannot_be_simulated_counts_as_missing() -> None:
    assert largest_that_fits(range(1, 33), lambda rows: None if rows > 7 else 5) == 7
    assert largest_that_fits(range(1, 33), lambda rows: None) is None
    assert largest_that_fits([], lambda rows: 1) is None
