"""The package's own errors, and the hint at a misspelt name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import partial
from os.path import commonprefix
from typing import Any


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
    """Return the type and, if there is one, the message of an error, to be quoted in another."""
    try:
        text = str(error).strip()
    except Exception:  # of the message's own code
        text = ""
    return ": ".join(filter(None, (type(error).__name__, text)))


def did_you_mean(name: Any, known: Iterable[Any]) -> str:
    """Return the known name that was probably meant as a hint for an error text, or an empty string.

    Examples:
        >>> did_you_mean("4gb", ["4gb-gpu", "cpu"])
        " Did you mean '4gb-gpu'?"
    """
    found = nearest(name, known)
    return "" if found is None else f" Did you mean {found!r}?"


PREFIX_SHARE = 0.75  # of the name that is the beginning of what is meant: "adamw9"
# difflib's ratio; "all-mpnet-base-v2" and "albert-base-v2" have 0.77, "paln" and "plan" 0.75
ALIKE, SHORT_ALIKE = 0.8, 0.75


def nearest(name: Any, known: Iterable[Any]) -> str | None:
    """Return the known name that was probably meant, or None: a wrong suggestion is worse than none.

    Case and separators do not count. A name that begins alike comes before one with a typing error, in which digits may
    change places alone: "MX450" is not "MI250". What is not text resembles nothing.
    """
    asked = _plain(name) if isinstance(name, str) else ""
    spelled = {other: _plain(other) for other in known if isinstance(other, str)}
    shared = {other: len(commonprefix((asked, text))) for other, text in spelled.items()}  # noqa: RUF071  # no paths
    alike = {other: (shared[other], text == asked, _digits(text) == _digits(asked)) for other, text in spelled.items()}
    best = max(alike, key=lambda other: alike[other], default="")
    if best and shared[best] >= max(2, min(3, len(asked)), PREFIX_SHARE * len(asked)):
        return best
    typed = {spelled[other]: other for other, (_, _, same_digits) in alike.items() if same_digits}
    found = difflib.get_close_matches(asked, typed, n=1, cutoff=ALIKE if len(asked) > 5 else SHORT_ALIKE)
    return typed[found[0]] if found else None


def _plain(name: str) -> str:
    return re.sub(r"[\s_./-]", "", name.casefold())


def _digits(text: str) -> list[str]:
    return sorted(re.findall(r"\d", text))
