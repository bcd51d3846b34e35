"""Import bitsandbytes without torch's compiler, in a process that estimates and trains nothing.

While it is imported, bitsandbytes 0.50 hands the functions that it has for devices without kernels of its own to
``torch.compile``, and torch imports its compiler for that: 1.2 of 1.4 seconds. No estimate calls these functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH = "TORCHDYNAMO_DISABLE"
"""The environment variable by which ``torch.compile`` returns a function as it is; seen in torch 2.6 to 2.13."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let ``torch.compile`` do nothing inside.

    Only for a command: what is imported inside is not compiled afterwards either.
    """
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
