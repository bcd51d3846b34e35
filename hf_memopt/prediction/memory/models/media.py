"""Create pictures and sounds of a batch on the meta device, in the shapes that a model's processor gives them.

Shapes follow from the parameters of ``forward`` and from the configuration: patches with a grid where the model takes
``image_grid_thw``, tiles where it takes ``aspect_ratio_ids``, else pictures of channels x height x width. How many
placeholder tokens a picture has is not computed by a formula: the model's own ``get_image_features`` runs on meta, and
the rows that it returns are counted.

Limitations: videos; pictures that a processor cuts into tiles (LLaVA-NeXT, InternVL, Idefics 3) are one tile and, where
the model demands it, its overview.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from hf_memopt.prediction.memory.cuda import CudaSemantics
from hf_memopt.prediction.memory.settings import NotEstimableError, StepSettings
from hf_memopt.prediction.memory.tracking import StorageTracker, all_nonzero
from hf_memopt.training.binding.model import task_of

DEFAULT_SIDE = 448
"""Pixels of a side where neither the caller nor the configuration has them: models that take pictures of any size."""
DEFAULT_SECONDS = 10.0
SAMPLES_PER_SECOND, FRAMES_PER_SECOND = 16_000, 100


_TRIED: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""Placeholder tokens of a picture or a sound, by model and shapes."""


class Media(NamedTuple):
    """The pictures or the sounds of a batch."""

    inputs: dict[str, torch.Tensor]  # by the names of the parameters of ``forward``
    per_example: int = 0  # pictures of an example, or one sound
    tokens: int = 0  # placeholder tokens of each; 0 for a model that reads them by cross attention
    note: str = ""  # what was assumed


def known(values: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor whose values the recording knows (``StorageTracker.values``)."""
    tensor: Any = torch.empty_like(values, device="meta")
    tensor.known_values = values
    found: torch.Tensor = tensor
    return found


def filled(value: int, *shape: int) -> torch.Tensor:
    """Return a meta tensor of integers of which each is known to be ``value``."""
    return known(torch.tensor(value).expand(shape))


def picture_side(config: Any, image_size: int | None) -> tuple[int, int]:
    """Return height and width in pixels: the caller's, the processor's, the configuration's, or 224."""
    asked = image_size or _of(config, "picture_size", "image_size", "img_size", "input_size") or 224
    height, width = asked if isinstance(asked, list | tuple) else (asked, asked)
    return int(height), int(width)


def picture_channels(config: Any) -> int:
    """Return the channels of a picture, 3 where the configuration does not say."""
    return int(_of(config, "num_channels", "in_channels", "in_chans") or 3)


def media_of(model: Any, settings: StepSettings, batch_size: int) -> Media:
    """Return the pictures or the sound of each example of a model that reads them with text, else nothing.

    Pictures are those of ``settings.images``, by default one, or none where the class is a causal LM too, and have the
    first shape that the model's own code takes.
    """
    taken, images = inspect.signature(model.forward).parameters, settings.images
    if "pixel" not in " ".join(taken) and task_of(model) in ("seq2seq", "speech-seq2seq"):
        inputs, note = audio_of(model, settings, batch_size)
        turned = {name: one.transpose(1, 2) if one.dim() == 3 else one for name, one in inputs.items()}
        return _first_that_runs(model, "get_audio_features", [(inputs, note), (turned, note)], 1, batch_size)
    if model.main_input_name == "pixel_values" and model.config.is_encoder_decoder and images not in (None, 1):
        raise ValueError(
            f"images={images} is not what {type(model).__name__} reads, one picture in each example; expected 1. "
            "Leave images out"
        )
    if "pixel" not in " ".join(taken) or images == 0 or getattr(model.config, "vision_config", model.config) is None:
        return Media({})
    if images is None and task_of(model) == "causal-lm":
        return Media({}, note="rows of text alone; give images for those with pictures")
    images = images or 1
    shapes = _shapes(model.config, settings.image_size, taken, batch_size, images)
    return _first_that_runs(model, "get_image_features", shapes, images, batch_size)


def _first_that_runs(model: Any, reader: str, shapes: Iterable[tuple[Any, str]], count: int, batch_size: int) -> Media:
    reads = getattr(model, reader, None) or getattr(model.base_model, reader, None)
    failure: Exception | None = None
    tried = _TRIED.setdefault(model, {})
    for inputs, note in shapes:
        if reads is None:
            return Media(inputs, count, 0, note)
        key = batch_size, count, note, tuple((name, one.shape) for name, one in inputs.items())
        try:
            tokens = tried[key] if key in tried else _rows_of(reads, inputs) // (batch_size * count)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            failure = failure or error
            continue
        tried[key] = tokens
        return Media(inputs, count, tokens, f"{note}, {tokens} tokens each")
    raise NotEstimableError(
        f"not estimable: {type(model).__name__} takes pictures or audio in a shape that is not known ({failure}); "
        "expected patches with a grid, tiles, pictures or frames. Pass images=0 for rows of text alone"
    ) from failure


def audio_of(model: Any, settings: StepSettings, batch_size: int) -> tuple[dict[str, torch.Tensor], str]:
    """Return sounds of ``settings.audio_seconds`` as samples or as frames of a spectrogram, and what was assumed."""
    taken, config = inspect.signature(model.forward).parameters, model.config
    seconds = settings.audio_seconds or DEFAULT_SECONDS
    note = f"{seconds:g} seconds of audio at 16 kHz in each example (audio_seconds)"
    bins = _of(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    name = "input_features" if "input_features" in taken else "input_values"
    if name not in taken or (bins is None and name == "input_features"):
        raise NotEstimableError(
            f"not estimable: {type(model).__name__} takes audio in an unknown shape; expected samples, or a "
            "configuration with num_mel_bins. Measure the step on the GPU"
        )
    length = math.ceil(seconds * (FRAMES_PER_SECOND if bins else SAMPLES_PER_SECOND))
    shape = (length, bins) if bins else (length,)
    fixed = _of(config, "num_mel_bins") and _of(config, "max_source_positions", "max_length")
    if fixed:
        is_whisper = _of(config, "max_source_positions") is not None
        length, note = (2 * fixed, "") if is_whisper else (fixed, "")
        shape = (bins, length) if is_whisper else (length, bins)
    elif bins and "conv_dim" not in vars(config) and bins % 80 == 0:
        length = length * 80 // bins  # several frames are one row
        shape = length, bins
    masks = ["input_features_mask", "feature_attention_mask"]
    if (
        not fixed
        and "input_ids" not in taken
        and (name == "input_features" or getattr(config, "feat_extract_norm", "") == "layer")
    ):
        masks.append("attention_mask")  # of samples where the feature extractor returns one
    inputs = {mask: filled(1, batch_size, length) for mask in masks if mask in taken}
    return {name: torch.empty(batch_size, *shape, device="meta"), **inputs}, note


def _shapes(
    config: Any, image_size: int | None, taken: Any, batch_size: int, images: int
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield inputs that a processor may give this model, with a note about them, the most specific first."""
    vision, count = getattr(config, "vision_config", None) or config, batch_size * images
    channels = picture_channels(vision)
    patch = _of(vision, "patch_size") or 16
    grid = next((name for name in ("image_grid_thw", "grid_thws") if name in taken), None)
    if grid is not None:
        merged = patch * (_of(vision, "spatial_merge_size", "merge_size") or 1)
        side = max(round((image_size or DEFAULT_SIDE) / merged), 1) * merged // patch
        depth = _of(vision, "temporal_patch_size") or 1
        grids = {grid: known(torch.tensor([[1, side, side]] * count))}
        size = _note(images, side * patch, side * patch)
        rows = count * side * side
        yield {"pixel_values": torch.empty(rows, channels * depth * patch**2, device="meta"), **grids}, size
        yield {"pixel_values": torch.empty(rows, channels, patch, patch, device="meta"), **grids}, size
    height, width = picture_side(vision, image_size)
    size = _note(images, height, width)
    if "aspect_ratio_ids" in taken:
        tile = _of(vision, "image_size")
        tiles = min(-(-height // tile) * -(-width // tile), vision.max_num_tiles)
        shape = batch_size, images, vision.max_num_tiles
        mask = torch.zeros(shape, dtype=torch.int64)
        mask[..., :tiles] = 1
        yield (
            {
                "pixel_values": torch.empty(*shape, channels, tile, tile, device="meta"),
                "aspect_ratio_ids": filled(tiles, *shape[:2]),
                "aspect_ratio_mask": known(mask),
            },
            size,
        )
        return
    name = "pixel_values" if "pixel_values" in taken else next(one for one in taken if "pixel" in one)
    sized = {"image_sizes": known(torch.tensor([[height, width]] * count))}
    picture = channels, height, width
    if hasattr(config, "image_grid_pinpoints") and "image_sizes" in taken:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        tiles = image_size_to_num_patches((height, width), config.image_grid_pinpoints, vision.image_size)
        of_tiles = count, tiles, channels, vision.image_size, vision.image_size
        yield {name: torch.empty(of_tiles, device="meta"), **sized}, f"{size}, each in {tiles} tiles"
    yield {name: torch.empty(count, *picture, device="meta")}, size
    if "image_sizes" in taken:
        yield {name: torch.empty(count, *picture, device="meta"), **sized}, size
    pixels = {name: torch.empty(batch_size, images, *picture, device="meta")}
    if "pixel_attention_mask" in taken:
        pixels["pixel_attention_mask"] = filled(1, batch_size, images, height, width)
    yield pixels, size


def _note(images: int, height: int, width: int) -> str:
    return f"{images} picture(s) of {height} x {width} pixels in each example (images, image_size)"


def _rows_of(reads: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Return how many rows of the text model's width the pictures become."""
    taken = inspect.signature(reads).parameters
    tracker = StorageTracker(flops=False)
    tracker.know(inputs)
    semantics = CudaSemantics(tracker=tracker, autocast=torch.bfloat16)  # which casts pictures to any weights
    with torch.no_grad(), all_nonzero(), tracker, semantics, semantics.autocast_region():
        out = reads(**{name: one for name, one in inputs.items() if name in taken or "pixel_values" not in taken})
    out = getattr(out, "pooler_output", out)
    leaves = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    return sum(one.numel() // one.shape[-1] for one in leaves)


def _of(config: Any, *names: str) -> Any:
    """Return the first of the attributes that a configuration, or one inside it, has; None for none."""
    inner = [one for one in vars(config).values() if hasattr(one, "to_json_string")]
    for name in names:
        for one in (config, *inner):
            value = getattr(one, name, None)
            if value is not None:
                return value[0] if isinstance(value, list | tuple) and "patch" in name else value
    return None
