"""The package's own errors, and the hint at a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import Any

__all__ = ["MissingExtraError", "did_you_mean", "nearest", "reason"]


class MissingExtraError(ImportError):
    """An optional dependency is not installed.

    Args:
        package: the distribution that could not be imported.
        extra: the extra of hf-memopt that installs it.
        purpose: what needs it, as the subject of a sentence.
    """

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed. Call: pip install 'hf-memopt[{extra}]'")
        self.package = package
        self.extra = extra
        self.purpose = purpose

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.package, extra=self.extra, purpose=self.purpose), (), vars(self)


def reason(error: BaseException) -> str:
    """Return the type and, if there is one, the message of an error, to be quoted in another.

    Examples:
        >>> reason(KeyError("x")), reason(StopIteration())
        ("KeyError: 'x'", 'StopIteration')
    """
    try:
        text = str(error).strip()
    except Exception:  # of the message's own code
        text = ""
    return ": ".join(filter(None, (type(error).__name__, text)))


def did_you_mean(name: Any, known: Iterable[Any]) -> str:
    """Return the known name that ``name`` most resembles as a hint for an error text, or an empty string.

    What is not text resembles nothing.

    Examples:
        >>> did_you_mean("4gb", ["4gb-gpu", "cpu"])
        " Did you mean '4gb-gpu'?"
    """
    found = nearest(name, known)
    return "" if found is None else f" Did you mean {found!r}?"


def nearest(name: Any, known: Iterable[Any]) -> str | None:
    """Return the known name that ``name`` most resembles, or None; what is not text resembles nothing."""
    if not isinstance(name, str):
        return None
    names = [other for other in known if isinstance(other, str)]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)
