"""Train transformers on the GPU you have, with the stock Hugging Face ``Trainer``.

The public names are loaded when they are first used: importing the package imports neither torch nor transformers and
changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from hf_memopt.batching.collation.collators import BucketedCollator as BucketedCollator
    from hf_memopt.batching.collation.collators import DynamicPaddingCollator as DynamicPaddingCollator
    from hf_memopt.batching.exact_losses import exact_loss as exact_loss
    from hf_memopt.batching.lengths import token_lengths as token_lengths
    from hf_memopt.batching.padding_costs.figures import PaddingReport as PaddingReport
    from hf_memopt.batching.padding_costs.figures import padding_report as padding_report
    from hf_memopt.batching.plan.buckets import LengthBuckets as LengthBuckets
    from hf_memopt.batching.plan.samplers import LengthBucketedBatchSampler as LengthBucketedBatchSampler
    from hf_memopt.batching.plan.samplers import LengthBucketedSampler as LengthBucketedSampler
    from hf_memopt.batching.views.bucketed_view import bucketed as bucketed
    from hf_memopt.batching.views.sorted_view import sorted_by_length as sorted_by_length
    from hf_memopt.binding.attachment import attach as attach
    from hf_memopt.binding.fused_loss.fuse import fuse_cross_entropy as fuse_cross_entropy
    from hf_memopt.binding.model_changes.quantized_weights import prepare_quantized as prepare_quantized
    from hf_memopt.changes import Change as Change
    from hf_memopt.devices.gpus import GPUS as GPUS
    from hf_memopt.devices.gpus import Gpu as Gpu
    from hf_memopt.devices.gpus import custom_gpu as custom_gpu
    from hf_memopt.devices.gpus import find_gpu as find_gpu
    from hf_memopt.devices.readings.memory_reading import MemoryReading as MemoryReading
    from hf_memopt.devices.readings.memory_reading import read_memory as read_memory
    from hf_memopt.errors import MissingExtraError as MissingExtraError
    from hf_memopt.memory.estimation import estimate as estimate
    from hf_memopt.memory.estimation import estimate_from_arguments as estimate_from_arguments
    from hf_memopt.memory.result import Estimate as Estimate
    from hf_memopt.memory.run.callback import MemoryReportCallback as MemoryReportCallback
    from hf_memopt.memory.run.printed_memory import print_gpu_utilization as print_gpu_utilization
    from hf_memopt.memory.run.printed_memory import print_summary as print_summary
    from hf_memopt.memory.settings.step_settings import NotEstimableError as NotEstimableError
    from hf_memopt.memory.settings.step_settings import StepSettings as StepSettings
    from hf_memopt.recipes.measuring.child_process import measure as measure
    from hf_memopt.recipes.planning.planner import plan as plan
    from hf_memopt.recipes.planning.result import Plan as Plan
    from hf_memopt.recipes.presets import PRESETS as PRESETS
    from hf_memopt.recipes.presets import preset as preset
    from hf_memopt.recipes.presets import recipe as recipe
    from hf_memopt.recipes.recipe_class import Recipe as Recipe
    from hf_memopt.reports.measurement_file import Measurement as Measurement
    from hf_memopt.techniques.checkpointing.policies import CheckpointingCallback as CheckpointingCallback
    from hf_memopt.techniques.checkpointing.policies import checkpoint_layers as checkpoint_layers
    from hf_memopt.techniques.checkpoints.sharded import LeanCheckpointCallback as LeanCheckpointCallback
    from hf_memopt.techniques.checkpoints.sharded import ShardedCheckpointCallback as ShardedCheckpointCallback
    from hf_memopt.techniques.evaluation.guard import EvaluationGuardCallback as EvaluationGuardCallback
    from hf_memopt.techniques.expandable_segments import use_expandable_segments as use_expandable_segments
    from hf_memopt.techniques.freezing.freezing import FreezeCallback as FreezeCallback
    from hf_memopt.techniques.freezing.freezing import freeze as freeze
    from hf_memopt.techniques.freezing.unfreezing import GradualUnfreezeCallback as GradualUnfreezeCallback
    from hf_memopt.techniques.fused_cross_entropy import FusedCrossEntropyCallback as FusedCrossEntropyCallback
    from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback as MicrobatchCallback
    from hf_memopt.techniques.nonfinite.overflow import OverflowCallback as OverflowCallback
    from hf_memopt.techniques.optimizers.embedding_bits import EmbeddingBitsCallback as EmbeddingBitsCallback
    from hf_memopt.techniques.optimizers.embedding_bits import override_embedding_bits as override_embedding_bits
    from hf_memopt.techniques.optimizers.gradient_release import gradient_release as gradient_release
    from hf_memopt.techniques.optimizers.gradient_release import released_optimizer as released_optimizer
    from hf_memopt.techniques.optimizers.sixteen_bit_weights import rounded_optimizer as rounded_optimizer
    from hf_memopt.techniques.optimizers.sixteen_bit_weights import sixteen_bit_optimizer as sixteen_bit_optimizer
    from hf_memopt.techniques.precision import PrecisionCallback as PrecisionCallback
    from hf_memopt.techniques.tied_embedding import TiedEmbeddingCallback as TiedEmbeddingCallback
    from hf_memopt.techniques.tied_embedding import sparse_tied_embedding as sparse_tied_embedding

_MODULES = {
    "hf_memopt.batching.plan.buckets": ("LengthBuckets",),
    "hf_memopt.batching.collation.collators": ("BucketedCollator", "DynamicPaddingCollator"),
    "hf_memopt.batching.views.sorted_view": ("sorted_by_length",),
    "hf_memopt.batching.lengths": ("token_lengths",),
    "hf_memopt.batching.exact_losses": ("exact_loss",),
    "hf_memopt.batching.padding_costs.figures": ("PaddingReport", "padding_report"),
    "hf_memopt.batching.plan.samplers": ("LengthBucketedBatchSampler", "LengthBucketedSampler"),
    "hf_memopt.batching.views.bucketed_view": ("bucketed",),
    "hf_memopt.binding.attachment": ("attach",),
    "hf_memopt.binding.fused_loss.fuse": ("fuse_cross_entropy",),
    "hf_memopt.binding.model_changes.quantized_weights": ("prepare_quantized",),
    "hf_memopt.changes": ("Change",),
    "hf_memopt.errors": ("MissingExtraError",),
    "hf_memopt.devices.gpus": ("GPUS", "Gpu", "custom_gpu", "find_gpu"),
    "hf_memopt.memory.estimation": ("estimate", "estimate_from_arguments"),
    "hf_memopt.memory.run.printed_memory": ("print_gpu_utilization", "print_summary"),
    "hf_memopt.memory.run.callback": ("MemoryReportCallback",),
    "hf_memopt.memory.result": ("Estimate",),
    "hf_memopt.memory.settings.step_settings": ("NotEstimableError", "StepSettings"),
    "hf_memopt.devices.readings.memory_reading": ("MemoryReading", "read_memory"),
    "hf_memopt.recipes.measuring.child_process": ("measure",),
    "hf_memopt.reports.measurement_file": ("Measurement",),
    "hf_memopt.recipes.planning.planner": ("plan",),
    "hf_memopt.recipes.planning.result": ("Plan",),
    "hf_memopt.recipes.presets": ("PRESETS", "preset", "recipe"),
    "hf_memopt.recipes.recipe_class": ("Recipe",),
    "hf_memopt.techniques.expandable_segments": ("use_expandable_segments",),
    "hf_memopt.techniques.checkpoints.sharded": ("LeanCheckpointCallback", "ShardedCheckpointCallback"),
    "hf_memopt.techniques.checkpointing.policies": ("CheckpointingCallback", "checkpoint_layers"),
    "hf_memopt.techniques.optimizers.embedding_bits": ("EmbeddingBitsCallback", "override_embedding_bits"),
    "hf_memopt.techniques.evaluation.guard": ("EvaluationGuardCallback",),
    "hf_memopt.techniques.freezing.freezing": ("FreezeCallback", "freeze"),
    "hf_memopt.techniques.fused_cross_entropy": ("FusedCrossEntropyCallback",),
    "hf_memopt.techniques.optimizers.gradient_release": ("gradient_release", "released_optimizer"),
    "hf_memopt.techniques.microbatching.microbatch": ("MicrobatchCallback",),
    "hf_memopt.techniques.nonfinite.overflow": ("OverflowCallback",),
    "hf_memopt.techniques.precision": ("PrecisionCallback",),
    "hf_memopt.techniques.optimizers.sixteen_bit_weights": ("rounded_optimizer", "sixteen_bit_optimizer"),
    "hf_memopt.techniques.freezing.unfreezing": ("GradualUnfreezeCallback",),
    "hf_memopt.techniques.tied_embedding": ("TiedEmbeddingCallback", "sparse_tied_embedding"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        did_you_mean = import_module("hf_memopt.errors").did_you_mean
        meant = "" if name.startswith("_") else did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant and '.'}{meant}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
