"""Stacked bars of bytes: the parts of one, their colours and their shares of its width in percent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_memopt.units import to_gib

__all__ = ["CONTEXT", "UNUSED", "bar_of", "css_class", "legend_of", "percent", "share_text"]

UNUSED, CONTEXT = "reserved, not in use", "CUDA context"
LABELLED = 9.0  # percent of a bar that a part must have to bear its name


def css_class(name: str) -> str:
    """Return the class of a component's colour."""
    return "c-" + "".join(letter if letter.isalpha() else "-" for letter in name.lower())


def bar_of(named: Iterable[tuple[str, int]], scale_bytes: int) -> list[dict[str, Any]]:
    """Return the parts of a bar whose whole width is ``scale_bytes``; what is beyond it is cut off."""
    parts, left = [], 0.0
    for name, size in named:
        width = min(percent(size, scale_bytes), 100 - left)
        if width > 0:
            label = name if width >= LABELLED else ""
            gib = f"{to_gib(size):.2f}"
            parts.append({"name": name, "css": css_class(name), "width": width, "size": gib, "label": label})
        left += width
    return parts


def legend_of(names: Iterable[str]) -> list[dict[str, str]]:
    """Return names and classes of colours."""
    return [{"name": name, "css": css_class(name)} for name in names]


def percent(part: float, whole: float) -> float:
    """Return a share in percent, with the digits that a page needs."""
    return round(100 * part / whole, 3) if whole > 0 else 0.0


def share_text(value: float, before: float) -> str:
    """Return by how much a value differs from the one before, in percent; "" where that was 0.

    Examples:
        >>> share_text(12, 10), share_text(10, 10), share_text(1, 0)
        ('+20.0 %', '0.0 %', '')
    """
    if not before:
        return ""
    change = round(100 * (value / before - 1), 1)
    return f"{change:+.1f} %" if change else "0.0 %"
