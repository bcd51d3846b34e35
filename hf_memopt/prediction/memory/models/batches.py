"""Create the batch that the stock collators would give a model, on the meta device: shapes and dtypes without values.

Text models get ``input_ids``, ``attention_mask`` and, where the family's tokenizer returns them and the model takes
them, ``token_type_ids``; image models ``pixel_values``; Whisper ``input_features``. The labels follow from the head.
The mask is included whether or not rows are padded, as in stock collators.

Limitations: custom heads, whose batch is unknown, and further inputs that a model may take.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from hf_memopt.plain_data import Count, check_value
from hf_memopt.prediction.memory.models.loading import TASKS, is_headless
from hf_memopt.prediction.memory.models.media import (
    DEFAULT_SECONDS,
    Media,
    audio_of,
    filled,
    known,
    media_of,
    picture_channels,
    picture_side,
)
from hf_memopt.prediction.memory.settings import ROW_TOKENS, NotEstimableError, StepSettings
from hf_memopt.training.binding.model import head_for, task_of, unwrap_model

CHOICES = 4
"""Answers per question of multiple choice, as in SWAG; configurations do not have their number."""

CHARACTERS_PER_SECOND = 15
"""Of a transcription, read English; its loss takes little memory."""

OBJECTS = 7
"""Objects of a picture, the mean of COCO's."""

_OF_IMAGES = ("image-classification", "semantic-segmentation", "object-detection")


def assumed_inputs(model: nn.Module, settings: StepSettings) -> Iterator[str]:
    """Yield what is assumed of head, pictures and audio, where nothing says, and what was given without effect."""
    inside = unwrap_model(model)
    if is_headless(inside.config):
        named, head = inside.config.architectures[0], type(inside).__name__
        yield f"{named} has no loss: estimated as {head}; give task for another head"
    if _reads_audio_alone(inside):
        note = audio_of(inside, settings, 1)[1]
        read = ["audio_seconds"] if note else []  # Whisper's recordings have one length
    elif task_of(model) in (*_OF_IMAGES, "zero-shot-image-classification"):
        height, width = picture_side(inside.config, settings.image_size)
        note, read = f"pictures of {height} x {width} pixels (image_size)", ["image_size"]
    else:
        media = _media(inside, settings, 1)
        has_pictures = any("pixel" in name for name in media.inputs)
        note, read = media.note, ["images", "image_size"] if has_pictures else ["audio_seconds"] * bool(media.inputs)
    if note:
        yield note
    for name in ("images", "image_size", "audio_seconds"):
        if (value := getattr(settings, name)) and name not in read:
            yield f"{name}={value!r} has no effect on {type(inside).__name__}"


def default_length(model: nn.Module, settings: StepSettings | None = None) -> int | None:
    """Return ``ROW_TOKENS`` and the tokens of pictures or audio, or all positions if fewer; None without text."""
    task = task_of(model)
    if task is None or "text" not in head_for(task).traits:
        return None
    media = _media(unwrap_model(model), settings or StepSettings(), 1)
    length = ROW_TOKENS + media.tokens * media.per_example
    return min(length, most_tokens(model) or length)


def most_tokens(model: nn.Module) -> int | None:
    """Return the tokens that a model has positions for; None for no limit.

    RoBERTa and its variants number tokens from above the padding index: of 514 positions 512 are left. Whisper's limit
    is its decoder's. Relative positions (T5, DeBERTa-v3) have no limit. Rotary positions have no table either, but
    ``max_position_embeddings`` is the length they were trained for.
    """
    inside: Any = unwrap_model(model)
    config = inside.config
    limit = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    limit = limit or getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1 or getattr(config, "position_biased_input", True) is False:
        return None
    for name, module in inside.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - int(module.padding_idx) - 1
    return limit


def example_batch(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int | None,
    labels_length: int | None = None,
    settings: StepSettings | None = None,
) -> dict[str, Any]:
    """Return a training batch for ``model`` on the meta device, labels included.

    ``seq_len`` are the tokens of a row, padding and placeholders of pictures included; of Whisper the transcription's,
    whose audio has one length only. None for images, and for audio without text.

    Examples:
        >>> from hf_memopt.prediction.memory.models.loading import load_model
        >>> batch = example_batch(load_model("bert-base-uncased").model, batch_size=32, seq_len=128)
        >>> {name: tuple(tensor.shape) for name, tensor in batch.items()}["labels"], sorted(batch)
        ((32,), ['attention_mask', 'input_ids', 'labels', 'token_type_ids'])
    """
    inside = unwrap_model(model)
    task = task_of(model)
    if task is None:
        raise ValueError(
            f"model=<{type(inside).__name__}> has no head whose batch is known; expected one of transformers' "
            f"for {', '.join(map(repr, TASKS))}. Load the model with its head, for example: "
            "AutoModelForSequenceClassification.from_pretrained(...)"
        )
    check_value("batch_size", batch_size, Count, 1)
    _check_lengths(inside, task, seq_len, labels_length)
    settings = settings or StepSettings()
    if _reads_audio_alone(inside):
        return _audio_batch(inside, task, settings, batch_size, labels_length or seq_len)
    if task in _OF_IMAGES:
        return _image_batch(inside, task, settings, batch_size)
    rows = (batch_size, CHOICES) if task == "multiple-choice" else (batch_size,)
    assert seq_len is not None  # _check_lengths
    media = _media(inside, settings, batch_size)
    batch: dict[str, Any] = {**_text(inside, rows, seq_len, media), **media.inputs}
    if task == "zero-shot-image-classification":
        return {**batch, **_image_batch(inside, task, settings, batch_size)}
    batch["labels"] = _empty(torch.tensor(_ordinary(inside.config)), batch_size, labels_length or seq_len)
    if task == "sequence-classification":
        batch["labels"] = _class_labels(inside, batch_size)
    elif task == "multiple-choice":
        batch["labels"] = _ids(batch_size)
    elif task == "question-answering":
        del batch["labels"]
        batch.update(start_positions=_ids(batch_size), end_positions=_ids(batch_size))
    return batch


def check_sequence(model: nn.Module, seq_len: int, *, name: str = "seq_len") -> None:
    """Raise ValueError for a number of tokens, called ``name``, that ``model`` has no positions for."""
    check_value(name, seq_len, Count, 1)
    positions = most_tokens(model)
    if positions is not None and seq_len > positions:
        kind = type(unwrap_model(model)).__name__
        raise ValueError(
            f"{name}={seq_len!r} is beyond the positions of {kind}; expected 1 to {positions}. Pass {name}={positions}"
        )


def _check_lengths(model: Any, task: str, seq_len: int | None, labels_length: int | None) -> None:
    has_text = "text" in head_for(task).traits
    if not has_text and seq_len is not None:
        what = "images" if task in _OF_IMAGES else "audio"
        raise ValueError(
            f"seq_len={seq_len!r} has no meaning for {type(model).__name__}, which takes {what}; expected none. "
            "Pass seq_len=None"
        )
    if has_text:
        if seq_len is None:
            raise ValueError(
                f"seq_len=None is missing for {type(model).__name__}; expected tokens per row. Pass seq_len=128"
            )
        check_sequence(model, seq_len)
    if labels_length is not None:
        if task not in ("seq2seq", "speech-seq2seq"):
            raise ValueError(
                f"labels_length={labels_length!r} has no meaning for {type(model).__name__}; expected None for all but "
                "encoder-decoders. Remove labels_length"
            )
        check_sequence(model, labels_length, name="labels_length")


def _media(model: Any, settings: StepSettings, batch_size: int) -> Media:
    """Return the pictures or the sounds that a model reads with text."""
    task = task_of(model)
    is_decoder = task in ("speech-seq2seq", "seq2seq") and not model.config.is_encoder_decoder
    reads = is_decoder or task in ("image-text-to-text", "causal-lm")
    return media_of(model, settings, batch_size) if reads else Media({})


def _reads_audio_alone(model: Any) -> bool:
    task = task_of(model)
    return task in ("ctc", "audio-classification") or (task == "speech-seq2seq" and model.config.is_encoder_decoder)


def _text(model: Any, rows: tuple[int, ...], seq_len: int, media: Media) -> dict[str, torch.Tensor]:
    """Return ids, masks and token types of shape (batch, seq), each as the tokenizer or the processor returns them.

    The placeholders of each picture follow a token of text, and a row ends with the end of text.
    """
    config, taken = model.config, inspect.signature(model.forward).parameters  # ``Trainer`` drops all else
    placeholders = (1 + media.tokens) * media.per_example if media.tokens else 0
    if placeholders >= seq_len:
        raise ValueError(
            f"seq_len={seq_len} is too short for {media.per_example} x {media.tokens} tokens of pictures or audio; "
            f"expected more than {placeholders}. Pass seq_len={placeholders + ROW_TOKENS}, or a smaller image_size"
        )
    ordinary = _ordinary(config)
    ids, types = torch.full((seq_len,), ordinary), torch.zeros(seq_len, dtype=torch.int64)
    if placeholders:
        kind = "image" if "pixel" in " ".join(media.inputs) else "audio"
        row = torch.tensor([ordinary] + [_placeholder(config, kind)] * media.tokens).repeat(media.per_example)
        ids[:placeholders], types[:placeholders] = row, row != ordinary
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and end >= 0:
        ids[-1] = end
    kinds = getattr(config, "type_vocab_sizes", None)  # TAPAS: of a token's column, row, rank and others
    names = [*_tokenizer_inputs(model), *(("token_type_ids", "mm_token_type_ids") if media.inputs else ())]
    given = {
        "input_ids": ids,
        "token_type_ids": types if kinds is None else torch.zeros(seq_len, len(kinds), dtype=torch.int64),
        "mm_token_type_ids": types,
        "attention_mask": torch.ones_like(ids),
    }
    found = {name: _empty(row, *rows) for name, row in given.items() if name in names and name in taken}
    if "bbox" in taken:  # of layouts
        found["bbox"] = filled(0, *rows, seq_len, getattr(config, "dim_bbox", 4))
    if "aspect_ratio_mask" in media.inputs:
        tiles = media.inputs["aspect_ratio_mask"].shape[1:]
        found["cross_attention_mask"] = filled(1, *rows, seq_len, *tiles)
    return found


def _ordinary(config: Any) -> int:
    """Return the id of a token that means nothing special to the model."""
    values = {
        str(value) for one in (config, config.get_text_config()) for name, value in vars(one).items() if "tok" in name
    }
    return next(number for number in range(3, 10**6) if str(number) not in values)


def _placeholder(config: Any, kind: str) -> int:
    """Return the id of the token that stands for a part of a picture or of a sound."""
    named = re.compile(rf"({kind}|media)_.*(id|index)$")
    ids = [value for name, value in vars(config).items() if named.match(name) and isinstance(value, int)]
    if not ids:
        raise NotEstimableError(
            f"not estimable: {type(config).__name__} does not say which token stands for {kind}; expected "
            f"{kind}_token_id. Pass images=0 for rows of text alone"
        )
    return ids[0]


def _tokenizer_inputs(model: Any) -> list[str]:
    """Return what the family's tokenizer returns, as its class lists it."""
    tokenizer = TOKENIZER_MAPPING_NAMES.get(model.config.model_type)
    try:
        kind = tokenizer_class_from_name(tokenizer) if isinstance(tokenizer, str) else None
        return list(getattr(kind, "model_input_names", ["input_ids", "attention_mask"]))
    except ImportError:  # of a library that is not installed
        return ["input_ids", "attention_mask"]


def _audio_batch(model: Any, task: str, settings: StepSettings, batch_size: int, length: int | None) -> dict[str, Any]:
    batch, _ = audio_of(model, settings, batch_size)
    if task == "audio-classification":
        batch["labels"] = _class_labels(model, batch_size)
    elif task == "ctc":
        seconds = settings.audio_seconds or DEFAULT_SECONDS
        length = math.ceil(CHARACTERS_PER_SECOND * seconds)
        batch["labels"] = filled(1, batch_size, length)
    else:
        batch["labels"] = _ids(batch_size, length)
    return batch


def _image_batch(model: Any, task: str, settings: StepSettings, batch_size: int) -> dict[str, Any]:
    config = model.config
    height, width = picture_side(config, settings.image_size)
    batch: dict[str, Any] = {"pixel_values": _floats(batch_size, picture_channels(config), height, width)}
    if task == "image-classification":
        batch["labels"] = _class_labels(model, batch_size)
    elif task == "semantic-segmentation":
        batch["labels"] = _ids(batch_size, height, width)
    elif task == "object-detection":
        one = {
            "class_labels": known(torch.ones(OBJECTS, dtype=torch.int64)),
            "boxes": known(torch.full((OBJECTS, 4), 0.5)),
        }
        batch["labels"] = [dict(one) for _ in range(batch_size)]
    else:
        batch["return_loss"] = True
    return batch


def _class_labels(model: Any, batch_size: int) -> torch.Tensor:
    """Return one class per example, or the targets of a regression or multi-label head, by its configuration."""
    config = model.config
    if config.problem_type == "multi_label_classification":
        return _floats(batch_size, config.num_labels)
    if config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1):
        return _floats(batch_size) if config.num_labels == 1 else _floats(batch_size, config.num_labels)
    return _ids(batch_size)


def _ids(*shape: int | None) -> torch.Tensor:
    return _empty(torch.tensor(1), *shape)


def _floats(*shape: int) -> torch.Tensor:
    return _empty(torch.tensor(1.0), *shape)


def _empty(row: torch.Tensor, *shape: int | None) -> torch.Tensor:
    """Return a meta tensor of shape (*shape, *row.shape), of which integers are known to be those of ``row``."""
    values = row.expand(*shape, *row.shape)  # type: ignore[arg-type]
    return torch.empty_like(values, device="meta") if values.is_floating_point() else known(values)
