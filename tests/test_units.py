"""``units``: text to bytes and back, against exact arithmetic."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.units import format_bytes, parse_bytes, to_gib, to_mib

BYTES_OF = {
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}


@given(st.integers(min_value=0))
def test_an_int_is_bytes_already_however_large(size):
    assert parse_bytes(size) == size
    assert parse_bytes(f"{size}B") == size


@given(st.integers(0, 10**12), st.sampled_from(sorted(BYTES_OF)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_whole_numbers_are_exact_in_every_unit_and_spelling(number, unit, space, lower):
    text = f" {number}{space}{unit.lower() if lower else unit} "
    assert parse_bytes(text) == number * BYTES_OF[unit]


@given(st.integers(0, 10**9), st.integers(0, 999), st.sampled_from(sorted(BYTES_OF)))
def test_fractions_are_rounded_to_the_nearest_byte(whole, thousandths, unit):
    text = f"{whole}.{thousandths:03d}"
    assert abs(parse_bytes(text + unit) - Decimal(text) * BYTES_OF[unit]) <= Decimal("0.5")


NO_AMOUNTS = ["", "GB", "iB", "4 iB", "4 GiBs", "4,5GB", "-4GB", "1e9B", "4.GB", "nan GB", "٤GB", None, True]


@pytest.mark.parametrize("size", [*NO_AMOUNTS, "9" * 5000 + "GiB", -1], ids=lambda size: str(size)[:9])
def test_what_is_no_amount_is_refused(size):
    with pytest.raises(ValueError) as error:
        parse_bytes(size)
    shown = repr(size) if len(repr(size)) <= 60 else f"{repr(size)[:57]}..."
    rule = (
        "is not an amount of memory; expected a number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB. "
        "Write, for example, '4GB' or '3.5GiB'."
    )
    rule = "is negative; expected 0 bytes or more. Write, for example, '4GB'." if size == -1 else rule
    assert str(error.value) == f"size={shown} {rule}"


@pytest.mark.parametrize(
    ("size", "meant"), [("4", "4GB"), (4.0, "4.0GB"), (" 5.2 ", "5.2GB"), ("999", "999GB"), ("8192", "8192MiB")]
)
def test_a_number_without_a_unit_is_answered_with_the_likely_one(size, meant):
    with pytest.raises(ValueError) as error:
        parse_bytes(size, "budget")
    assert str(error.value) == (
        f"budget={size!r} has no unit; expected a number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB. "
        f"Pass budget={meant!r}"
    )


@given(st.integers(-(2**60), 2**60))
def test_printed_number_is_labelled_and_right_to_its_last_digit(size):
    text, unit = format_bytes(size).split()
    assert unit in {"B", "KiB", "MiB", "GiB"}
    assert unit == "GiB" or abs(Decimal(text)) < 1024
    assert unit == "B" or abs(Decimal(text)) >= 1
    last_digit = Decimal(1).scaleb(Decimal(text).as_tuple().exponent)
    # half a last digit, and 2**-52 of the size for the float that was formatted
    assert abs(Decimal(text) * BYTES_OF[unit] - size) <= last_digit * BYTES_OF[unit] / 2 + Decimal(abs(size)) / 2**52


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20, "1.0 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (3 * 2**40, "3072.00 GiB"),
        (-(2**21), "-2.0 MiB"),
    ],
)
def test_units_change_where_they_should(size, text):
    assert format_bytes(size) == text


@given(st.integers(0, 2**45))
def test_what_is_printed_can_be_read_again(size):
    assert to_mib(size) * 2**20 == to_gib(size) * 2**30 == size
    text = format_bytes(size)
    assert format_bytes(parse_bytes(text)) == text
