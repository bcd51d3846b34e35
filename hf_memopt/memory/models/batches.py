"""Create the batch that the stock collators would give a model, on the meta device: shapes and dtypes without values.

Text models get ``input_ids``, ``attention_mask`` and, where the family's tokenizer returns them and the model takes
them, ``token_type_ids``; image models ``pixel_values``; Whisper ``input_features``. The labels follow from the head.
The mask is included whether or not rows are padded, as in stock collators.

Limitations: custom heads, whose batch is unknown, and further inputs that a model may take.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from hf_memopt.binding.model import task_of, unwrap_model
from hf_memopt.memory.models.loading import TASKS
from hf_memopt.plain_data import Count, check_value

__all__ = ["DEFAULT_LENGTH", "check_sequence", "cut_batch", "default_length", "example_batch", "most_tokens"]

CHOICES = 4
"""Answers per question of multiple choice, as in SWAG; configurations do not have their number."""

DEFAULT_LENGTH = 512
"""Tokens of a row where nothing says how long rows are: what BERT's family takes at most, and usual in fine-tuning."""


def default_length(model: nn.Module) -> int | None:
    """Return ``DEFAULT_LENGTH``, or the positions of a model that has fewer; None for images and unknown heads."""
    if task_of(model) in (None, "image-classification"):
        return None
    return min(DEFAULT_LENGTH, most_tokens(model) or DEFAULT_LENGTH)


def most_tokens(model: nn.Module) -> int | None:
    """Return the tokens that a model has positions for, as ``check_sequence`` counts them; None for no limit."""
    return _positions(unwrap_model(model))


def example_batch(
    model: nn.Module, *, batch_size: int, seq_len: int | None, labels_length: int | None = None
) -> dict[str, torch.Tensor]:
    """Return a training batch for ``model`` on the meta device, labels included.

    Args:
        model: with one of transformers' heads, as ``load_model`` returns it.
        batch_size: examples.
        seq_len: tokens of a row, padding included; of Whisper the transcription's, whose audio has one length only.
            None for images.
        labels_length: tokens of the targets of an encoder-decoder; ``seq_len`` by default.

    Raises:
        ValueError: the head is unknown; a size is not an integer of 1 or more, missing, without meaning for this model,
            or beyond its positions.

    Examples:
        >>> from hf_memopt.memory.models.loading import load_model
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
    if task == "image-classification":
        return {"pixel_values": _pixels(inside, batch_size), "labels": _class_labels(inside, batch_size)}
    targets = {"labels": _ids(batch_size, labels_length or seq_len)}
    if task == "speech-seq2seq":
        return {"input_features": _features(inside, batch_size), **targets}
    rows = (batch_size, CHOICES) if task == "multiple-choice" else (batch_size,)
    inputs = {name: _ids(*rows, seq_len) for name in _input_names(inside)}
    if task == "sequence-classification":
        targets = {"labels": _class_labels(inside, batch_size)}
    elif task == "multiple-choice":
        targets = {"labels": _ids(batch_size)}
    elif task == "question-answering":
        targets = {"start_positions": _ids(batch_size), "end_positions": _ids(batch_size)}
    return {**inputs, **targets}


def cut_batch(batch: Mapping[str, torch.Tensor], batch_size: int, rows: int) -> dict[str, torch.Tensor]:
    """Return the first ``rows`` of the ``batch_size`` examples; tensors without one row per example stay whole.

    What is returned are views, which share the storage of the batch.
    """
    return {name: one[:rows] if one.dim() and len(one) == batch_size else one for name, one in batch.items()}


def check_sequence(model: nn.Module, seq_len: int, *, name: str = "seq_len") -> None:
    """Refuse a number of tokens that ``model`` has no positions for.

    RoBERTa and its variants number tokens from above the padding index: of 514 positions 512 are left. Whisper's limit
    is its decoder's. Relative positions (T5, DeBERTa-v3) have no limit. Rotary positions have no table either, but
    ``max_position_embeddings`` is the length they were trained for.

    Raises:
        ValueError: ``seq_len`` is not an integer of 1 or more, or beyond the positions; the message calls it ``name``.
    """
    check_value(name, seq_len, Count, 1)
    inside = unwrap_model(model)
    positions = _positions(inside)
    if positions is not None and seq_len > positions:
        raise ValueError(
            f"{name}={seq_len!r} is beyond the positions of {type(inside).__name__}; expected 1 to {positions}. "
            f"Pass {name}={positions}"
        )


def _positions(model: Any) -> int | None:
    config = model.config
    limit = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1 or getattr(config, "position_biased_input", True) is False:
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - int(module.padding_idx) - 1
    return limit


def _check_lengths(model: Any, task: str, seq_len: int | None, labels_length: int | None) -> None:
    if task == "image-classification" and seq_len is not None:
        raise ValueError(
            f"seq_len={seq_len!r} has no meaning for {type(model).__name__}, which takes images; expected none. "
            "Pass seq_len=None"
        )
    if task != "image-classification":
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


def _input_names(model: Any) -> list[str]:
    """Return the names of the inputs of shape (batch, seq).

    ``Trainer`` drops what ``forward`` does not take; what a tokenizer returns is listed in its class.
    """
    tokenizer = TOKENIZER_MAPPING_NAMES.get(model.config.model_type)
    kind = tokenizer_class_from_name(tokenizer) if isinstance(tokenizer, str) else None
    given = getattr(kind, "model_input_names", ["input_ids", "attention_mask"])
    taken = inspect.signature(model.forward).parameters
    return [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in given and name in taken]


def _class_labels(model: Any, batch_size: int) -> torch.Tensor:
    """Return one class per example, or the targets of a regression or multi-label head, by its configuration."""
    config = model.config
    if config.problem_type == "multi_label_classification":
        return _floats(batch_size, config.num_labels)
    if config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1):
        return _floats(batch_size) if config.num_labels == 1 else _floats(batch_size, config.num_labels)
    return _ids(batch_size)


def _pixels(model: Any, batch_size: int) -> torch.Tensor:
    size, channels = (getattr(model.config, name, None) for name in ("image_size", "num_channels"))
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if not isinstance(height, int) or not isinstance(width, int) or not isinstance(channels, int):
        raise ValueError(
            f"image_size={size!r}, num_channels={channels!r} of {type(model).__name__} are not the shape of an image; "
            "expected integers. Set: model.config.image_size = 224; model.config.num_channels = 3"
        )
    return _floats(batch_size, channels, height, width)


def _features(model: Any, batch_size: int) -> torch.Tensor:
    """Return Whisper's log-mel spectrogram: twice as many frames as the encoder has positions (30 s: 3000)."""
    bins, positions = (getattr(model.config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if model.main_input_name != "input_features" or bins is None or positions is None:
        raise ValueError(
            f"model=<{type(model).__name__}> takes audio in an unknown shape; expected Whisper. "
            "Pass model='whisper-small'"
        )
    return _floats(batch_size, bins, 2 * positions)


def _ids(*shape: int | None) -> torch.Tensor:
    return _empty(shape, torch.int64)


def _floats(*shape: int) -> torch.Tensor:
    return _empty(shape, torch.float32)


def _empty(shape: tuple[int | None, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="meta")  # type: ignore[arg-type]
    except (RuntimeError, TypeError) as error:  # a size that is negative or not a number; too many bytes
        raise ValueError(
            f"batch=<tensor of shape {shape}> cannot be created; expected sizes of 1 or more, and below 2**63 bytes "
            "in total. Correct the configuration, or pass a smaller batch_size"
        ) from error
