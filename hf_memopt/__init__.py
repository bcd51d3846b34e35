"""Train transformers on the GPU you have, with the stock Hugging Face ``Trainer``.

The public names are loaded when they are first used: importing the package imports neither torch nor transformers and
changes nothing. They are listed in ``__init__.pyi``, as those of each folder are.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import lazy_loader

__version__ = "0.6.0"

_loaded, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_MODULES = {  # names that stood here until 0.5.0; their old place works for one version
    "gpus": ("GPUS", "Gpu", "custom_gpu", "find_gpu"),
    "techniques": (
        *("checkpoint_layers", "freeze", "fuse_cross_entropy", "override_embedding_bits"),
        *("quantize_experts", "sparse_tied_embedding", "tile_layers"),
    ),
    "types": ("Change", "LengthBuckets", "MemoryReading", "PaddingReport", "Rehearsal", "Rows", "StepSettings"),
}
_OPTIMIZERS = "hf_memopt.training.techniques.optimizers"
_OLD = {  # where an old name is, and what to use
    "DynamicPaddingCollator": ("hf_memopt", "BucketedCollator"),
    **{old: (f"hf_memopt.{place}", f"hf_memopt.{place}.{old}") for place, names in _MODULES.items() for old in names},
    "gradient_release": (f"{_OPTIMIZERS}.gradient_release", "low_memory_optimizer(..., release=True)"),
    "released_optimizer": (f"{_OPTIMIZERS}.low_memory", "low_memory_optimizer(..., release=True)"),
    "rounded_optimizer": (f"{_OPTIMIZERS}.low_memory", "low_memory_optimizer(..., rounding=...)"),
    "sixteen_bit_optimizer": (f"{_OPTIMIZERS}.sixteen_bit_weights", "low_memory_optimizer(..., rounding=...)"),
}
_GONE = {  # and what to use
    "exact_loss": "the loss of 15 lines in docs/cut-padding.md, passed as compute_loss_func=",
    "GradualUnfreezeCallback": "FreezeCallback, or a TrainerCallback that sets requires_grad",
    "LeanCheckpointCallback": "ShardedCheckpointCallback, its other name",
    **dict.fromkeys(("measure", "Measurement"), "hf-memopt rehearse train.py, on the GPU that trains"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _loaded(name)
    if name in _MODULES:
        return import_module(f"hf_memopt.{name}")
    if name in _OLD:
        place, new = _OLD[name]
        warnings.warn(f"hf_memopt.{name} is now {new}, and goes with the next version. Use {new}", stacklevel=2)
        return getattr(import_module(place), new if place == "hf_memopt" else name)
    if name in _GONE:  # no AttributeError, whose text `from hf_memopt import ...` drops
        raise ImportError(f"hf_memopt.{name} was removed after 0.5.0. Use {_GONE[name]}", name=__name__)
    from hf_memopt.errors import did_you_mean

    meant = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant and '.'}{meant}")
