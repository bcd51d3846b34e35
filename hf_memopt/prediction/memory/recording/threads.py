"""What a recording exchanges in the whole process, for its own thread alone: another one may be training."""

from __future__ import annotations

import threading
from typing import Any


class OfThread:
    """Gives one thread an object of its own, and all others the one that they share."""

    def __init__(self, own: Any, shared: Any) -> None:
        self._thread, self._own, self._shared = threading.get_ident(), own, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if threading.get_ident() == self._thread else self._shared, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)
