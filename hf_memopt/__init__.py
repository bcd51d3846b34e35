"""Train transformers on the card you have, with the stock Hugging Face ``Trainer``.

The public names are loaded when they are first used: importing the package imports neither torch nor transformers and
changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_memopt.batching.buckets import LengthBuckets
    from hf_memopt.batching.collators import BucketedCollator, DynamicPaddingCollator
    from hf_memopt.batching.evaluation import sorted_by_length
    from hf_memopt.batching.lengths import token_lengths
    from hf_memopt.batching.losses import exact_loss
    from hf_memopt.batching.padding import PaddingReport, padding_report
    from hf_memopt.batching.samplers import LengthBucketedBatchSampler, LengthBucketedSampler
    from hf_memopt.batching.views import bucketed
    from hf_memopt.binding import attach
    from hf_memopt.changes import BudgetError, Change, MissingExtraError
    from hf_memopt.gpus import GPUS, Gpu, custom_gpu, find_gpu
    from hf_memopt.memory.estimation import estimate, estimate_from_arguments
    from hf_memopt.memory.report import MemoryReportCallback, print_gpu_utilization, print_summary
    from hf_memopt.memory.result import Estimate
    from hf_memopt.memory.settings import NotEstimableError, StepSettings
    from hf_memopt.reading import MemoryReading, read_memory
    from hf_memopt.recipes.presets import PRESETS, preset, recipe
    from hf_memopt.recipes.recipe import Recipe
    from hf_memopt.techniques.allocator_settings import use_expandable_segments
    from hf_memopt.techniques.checkpoint_files import LeanCheckpointCallback
    from hf_memopt.techniques.checkpointing import CheckpointingCallback, checkpoint_layers
    from hf_memopt.techniques.embedding_bits import EmbeddingBitsCallback, override_embedding_bits
    from hf_memopt.techniques.evaluation import EvaluationGuardCallback
    from hf_memopt.techniques.freezing import FreezeCallback, freeze
    from hf_memopt.techniques.gradient_release import gradient_release
    from hf_memopt.techniques.microbatch import MicrobatchCallback
    from hf_memopt.techniques.overflow import OverflowCallback
    from hf_memopt.techniques.precision_callback import PrecisionCallback
    from hf_memopt.techniques.released_optimizer import released_optimizer
    from hf_memopt.techniques.unfreezing import GradualUnfreezeCallback

_MODULES = {
    "hf_memopt.batching.buckets": ("LengthBuckets",),
    "hf_memopt.batching.collators": ("BucketedCollator", "DynamicPaddingCollator"),
    "hf_memopt.batching.evaluation": ("sorted_by_length",),
    "hf_memopt.batching.lengths": ("token_lengths",),
    "hf_memopt.batching.losses": ("exact_loss",),
    "hf_memopt.batching.padding": ("PaddingReport", "padding_report"),
    "hf_memopt.batching.samplers": ("LengthBucketedBatchSampler", "LengthBucketedSampler"),
    "hf_memopt.batching.views": ("bucketed",),
    "hf_memopt.binding": ("attach",),
    "hf_memopt.changes": ("BudgetError", "Change", "MissingExtraError"),
    "hf_memopt.gpus": ("GPUS", "Gpu", "custom_gpu", "find_gpu"),
    "hf_memopt.memory.estimation": ("estimate", "estimate_from_arguments"),
    "hf_memopt.memory.report": ("MemoryReportCallback", "print_gpu_utilization", "print_summary"),
    "hf_memopt.memory.result": ("Estimate",),
    "hf_memopt.memory.settings": ("NotEstimableError", "StepSettings"),
    "hf_memopt.reading": ("MemoryReading", "read_memory"),
    "hf_memopt.recipes.presets": ("PRESETS", "preset", "recipe"),
    "hf_memopt.recipes.recipe": ("Recipe",),
    "hf_memopt.techniques.allocator_settings": ("use_expandable_segments",),
    "hf_memopt.techniques.checkpoint_files": ("LeanCheckpointCallback",),
    "hf_memopt.techniques.checkpointing": ("CheckpointingCallback", "checkpoint_layers"),
    "hf_memopt.techniques.embedding_bits": ("EmbeddingBitsCallback", "override_embedding_bits"),
    "hf_memopt.techniques.evaluation": ("EvaluationGuardCallback",),
    "hf_memopt.techniques.freezing": ("FreezeCallback", "freeze"),
    "hf_memopt.techniques.gradient_release": ("gradient_release",),
    "hf_memopt.techniques.microbatch": ("MicrobatchCallback",),
    "hf_memopt.techniques.overflow": ("OverflowCallback",),
    "hf_memopt.techniques.precision_callback": ("PrecisionCallback",),
    "hf_memopt.techniques.released_optimizer": ("released_optimizer",),
    "hf_memopt.techniques.unfreezing": ("GradualUnfreezeCallback",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "GPUS",
    "PRESETS",
    "BucketedCollator",
    "BudgetError",
    "Change",
    "CheckpointingCallback",
    "DynamicPaddingCollator",
    "EmbeddingBitsCallback",
    "Estimate",
    "EvaluationGuardCallback",
    "FreezeCallback",
    "Gpu",
    "GradualUnfreezeCallback",
    "LeanCheckpointCallback",
    "LengthBucketedBatchSampler",
    "LengthBucketedSampler",
    "LengthBuckets",
    "MemoryReading",
    "MemoryReportCallback",
    "MicrobatchCallback",
    "MissingExtraError",
    "NotEstimableError",
    "OverflowCallback",
    "PaddingReport",
    "PrecisionCallback",
    "Recipe",
    "StepSettings",
    "attach",
    "bucketed",
    "checkpoint_layers",
    "custom_gpu",
    "estimate",
    "estimate_from_arguments",
    "exact_loss",
    "find_gpu",
    "freeze",
    "gradient_release",
    "override_embedding_bits",
    "padding_report",
    "preset",
    "print_gpu_utilization",
    "print_summary",
    "read_memory",
    "recipe",
    "released_optimizer",
    "sorted_by_length",
    "token_lengths",
    "use_expandable_segments",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
