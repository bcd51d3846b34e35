"""Bytes as text and back. Memory is an int number of bytes everywhere else; this is the only place where bytes are
divided.

Text in: ``4GB`` is 4e9 bytes, ``4GiB`` is 4 * 2**30. Text out: always GiB, MiB or KiB. Rates and times become text here
too.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hf_memopt.plain_data import shown

_FACTORS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return a number of bytes from text such as ``"4GB"``, ``"3.5 GiB"`` or from an int, which is bytes already.

    ``name`` is what messages call it.

    Raises:
        ValueError: the text is not a number followed by a unit, or the size is negative.

    Examples:
        >>> parse_bytes("4GB"), parse_bytes("4 GiB"), parse_bytes(512)
        (4000000000, 4294967296, 512)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"{name}={size!r} is negative; expected 0 bytes or more. Write, for example, '4GB'.")
        return size
    number = r"[0-9]{1,1000}(?:\.[0-9]{1,1000})?"  # Python makes no integer of more than 4300 digits
    text = size if isinstance(size, str) else ""
    match = re.fullmatch(rf"\s*({number})\s*([A-Z]+)\s*", text, flags=re.IGNORECASE | re.ASCII)
    factor = None if match is None else _FACTORS.get(match.group(2).upper())
    if match is None or factor is None:
        bare = str(size).strip() if isinstance(size, str | float) else ""
        is_bare = re.fullmatch(number, bare, flags=re.ASCII) is not None
        unit = "GB" if is_bare and float(bare) < 1000 else "MiB"  # as people speak of GPUs, and as nvidia-smi prints it
        raise ValueError(
            f"{name}={shown(size)} {'has no unit' if is_bare else 'is not an amount of memory'}; expected a number "
            "with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB. "
            + (f"Pass {name}='{bare}{unit}'" if is_bare else "Write, for example, '4GB' or '3.5GiB'.")
        )
    return round(Fraction(match.group(1)) * factor)  # exact: a float has 53 bits


def to_mib(size_bytes: int) -> float:
    """Return ``size_bytes`` in MiB."""
    return size_bytes / 2**20


def to_gib(size_bytes: int) -> float:
    """Return ``size_bytes`` in GiB."""
    return size_bytes / 2**30


def format_bytes(size_bytes: int) -> str:
    """Return bytes as text for people, in the binary unit whose printed number is at least 1 and below 1024.

    Examples:
        >>> format_bytes(0), format_bytes(2048), format_bytes(6749 * 2**20)
        ('0 B', '2.0 KiB', '6.59 GiB')
    """
    magnitude = abs(size_bytes)
    if magnitude < 2**10:
        return f"{size_bytes} B"
    for factor, unit in ((2**10, "KiB"), (2**20, "MiB")):
        if round(magnitude / factor, 1) < 1024:  # as printed: 2**20 - 1 is not "1024.0 KiB"
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{to_gib(size_bytes):.2f} GiB"


def format_count(count: int) -> str:
    """Return how many parameters, with three digits from a million on.

    Examples:
        >>> format_count(1_543_714_304), format_count(999_885_952), format_count(22_713_216), format_count(4_386)
        ('1.54 B', '1.00 B', '22.7 M', '4,386')
    """
    if count < 10**6:
        return f"{count:,}"
    value, unit = (count / 10**9, "B") if count >= 999.5e6 else (count / 10**6, "M")
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def format_number(value: float) -> str:
    """Return a rate or a size with three digits at least, and no decimals from 100 on.

    Examples:
        >>> format_number(1738.2), format_number(9.4271)
        ('1,738', '9.43')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Return a time in seconds below 90 s, in minutes below 90 min, else in hours.

    Examples:
        >>> format_duration(47), format_duration(1000), format_duration(9000)
        ('47 s', '17 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def percent(share: float, digits: int = 0, *, signed: bool = False) -> str:
    """Return a share as text.

    Examples:
        >>> percent(0.05), percent(-0.0123, 1, signed=True)
        ('5 %', '-1.2 %')
    """
    return f"{100 * share:{'+' if signed else ''},.{digits}f} %"
