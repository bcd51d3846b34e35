"""Train transformers on the GPU you have, with the stock Hugging Face ``Trainer``.

The public names are loaded when they are first used: importing the package imports neither torch nor transformers and
changes nothing. They are listed in ``__init__.pyi``, as those of each folder are.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

__version__ = "0.5.0"

REMOVED = {
    "exact_loss": "the loss of 15 lines in docs/lengths-and-padding.md, passed as compute_loss_func=",
    "GradualUnfreezeCallback": "FreezeCallback, or a TrainerCallback that sets requires_grad",
}
"""The public names that an earlier version had, and what to use."""

_loaded, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _loaded(name)
    if name in REMOVED:  # no AttributeError, whose text "from hf_memopt import" would leave out
        raise ImportError(f"hf_memopt.{name} is gone; expected a name of this version. Use {REMOVED[name]}")
    from hf_memopt.errors import did_you_mean

    meant = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant and '.'}{meant}")
