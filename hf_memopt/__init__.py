"""Train transformers on the GPU you have, with the stock Hugging Face ``Trainer``.

The public names are loaded when they are first used: importing the package imports neither torch nor transformers and
changes nothing. They are listed in ``__init__.pyi``, as those of each folder are.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

__version__ = "0.5.0"

_loaded, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_RENAMED = {"DynamicPaddingCollator": "BucketedCollator"}  # the old names work for one version
_GONE = {  # and what to use
    "exact_loss": "the loss of 15 lines in docs/cut-padding.md, passed as compute_loss_func=",
    "GradualUnfreezeCallback": "FreezeCallback, or a TrainerCallback that sets requires_grad",
    "LeanCheckpointCallback": "ShardedCheckpointCallback, its other name",
    **dict.fromkeys(("measure", "Measurement"), "hf-memopt rehearse train.py, on the GPU that trains"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _loaded(name)
    if name in _RENAMED:
        import warnings

        new = _RENAMED[name]
        warnings.warn(f"hf_memopt.{name} is now {new}, and goes with the next version. Use {new}", stacklevel=2)
        return _loaded(new)
    if name in _GONE:  # no AttributeError, whose text `from hf_memopt import ...` drops
        raise ImportError(f"hf_memopt.{name} was removed after 0.5.0. Use {_GONE[name]}", name=__name__)
    from hf_memopt.errors import did_you_mean

    meant = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant and '.'}{meant}")
