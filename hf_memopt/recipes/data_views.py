"""How a Recipe's Trainer reads its data: bucketed by length for training, sorted for evaluation, padded by what."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

from hf_memopt.batching import token_count
from hf_memopt.batching.views import (
    BucketedView,
    SortedExamples,
    is_map_style,
    loses_order,
    sorted_by_length,
)
from hf_memopt.binding.model import is_causal_lm, task_of, task_of_class, unwrap_model
from hf_memopt.changes import Change
from hf_memopt.plain_data import Count, check_value
from hf_memopt.recipes.resolved_arguments import process_count
from hf_memopt.rows import FORMATS, fitting_format

if TYPE_CHECKING:
    from hf_memopt.batching.collation import SpeechCollator

logger = logging.getLogger(__name__)

LABELS = {"labels", "label", "label_ids"}


def why_unbucketed(dataset: Any, given: Mapping[str, Any], model: Any, collator: Any) -> str | None:
    """Return why training data stays in its own order, or None; a view has the order that was asked for."""
    if dataset is None or isinstance(dataset, BucketedView):
        return None
    if given.get("train_sampling_strategy") == "sequential":
        return "train_sampling_strategy='sequential' asks for the order of the data"
    return _why_not(dataset, model, collator)


def evaluation_view(name: str, dataset: Any, args: Any, model: Any, collator: Any) -> Any:
    """Return the evaluation data, or each of several, sorted by length where ``attach`` can restore its order."""
    if dataset is None or isinstance(
        dataset, (SortedExamples, BucketedView)
    ):  # attach refuses an order made for training
        return dataset
    if isinstance(dataset, Mapping):
        return {key: evaluation_view(name, value, args, model, collator) for key, value in dataset.items()}
    if loses_order(args) is not None:
        reason: str | None = "the training arguments cannot restore dataset order"
    else:
        reason = _why_not(dataset, model, collator)
    if reason is not None:
        logger.info("%s: %s", name, Change("evaluation sorted by length", True, False, reason))
        return dataset
    return sorted_by_length(dataset)


def view_arguments(name: str, dataset: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training arguments that fit a bucketed view of the data, whose order and batches are its own."""
    fitting = {**given, "train_sampling_strategy": "sequential"}
    if (asked := given.get("train_sampling_strategy", "sequential")) != "sequential":
        reason = "the bucketed view of the training data has an order of its own; Recipe(bucketing=False) has none"
        logger.info("%s: %s", name, Change("train_sampling_strategy", asked, "sequential", reason))
    if getattr(dataset, "has_whole_batches", False):
        steps = given.get("gradient_accumulation_steps", 1)
        check_value("gradient_accumulation_steps", steps, Count, 1)
        fitting |= {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": steps,
            "effective_batch_size": steps * process_count(),
        }
        reason = "the training data comes in whole batches of max_tokens, so a step has so many tokens, not examples"
        for size in ("per_device_train_batch_size", "effective_batch_size"):
            logger.info("%s: %s", name, Change(size, given.get(size, "of the recipe"), fitting[size], reason))
    return fitting


def _why_not(dataset: Any, model: Any, collator: Any) -> str | None:
    """Return why a dataset stays in its own order for a model, or None."""
    if not is_map_style(dataset):
        return "a stream has no lengths to sort by"
    inside = unwrap_model(model)
    if hasattr(inside, "forward") and "return_loss" in inspect.signature(inside.forward).parameters:  # as CLIP's
        return f"the loss of {type(inside).__name__} compares the rows of a batch with each other"
    if "input_ids" not in _column_names(dataset):
        return "the examples have no input_ids whose length could count"
    if collator is not None:  # as of multiple choice; without one these rows are refused
        try:
            token_count({"input_ids": _first_row(dataset).get("input_ids")}, "input_ids", "row 0")
        except ValueError:
            return "the input_ids of an example are not one flat list of token ids, whose length could count"
    return None


def _first_row(dataset: Any) -> Mapping[str, Any]:
    """Return the first example; nothing where there is none, or it has no columns.

    Of a dataset that names its columns it has those that are looked at: others, as of pictures, would be decoded.
    """
    dataset = _inside(dataset)
    if not is_map_style(dataset) or isinstance(dataset, Mapping) or not len(dataset):
        return {}
    if isinstance(dataset, Dataset) and not _is_transformed(dataset):
        dataset = dataset.select_columns([name for name in ("input_ids", "label") if name in dataset.column_names])
    first = dataset[0] if len(dataset) else None
    return first if isinstance(first, Mapping) else {}


def _column_names(dataset: Any) -> list[str]:
    """Return the columns that a dataset names, else those of its first example; none where neither says."""
    inside = _inside(dataset)
    names = None if _is_transformed(inside) else getattr(inside, "column_names", None)
    return list(_first_row(dataset) if names is None else names)


def _inside(dataset: Any) -> Any:
    return dataset.dataset if isinstance(dataset, (SortedExamples, BucketedView)) else dataset


def _is_transformed(dataset: Any) -> bool:
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def check_encoded(dataset: Any, model: Any, *, has_own_labels: bool = False) -> None:
    """Raise for rows of text, and for tokens without the labels that their masks ask for, which ``read_rows`` makes.

    And for rows without labels of a masked language model, which another collator draws, unless the loss or the names
    of the labels are the user's.
    """
    names = _column_names(dataset)
    task = None if model is None else task_of(model)
    kind = type(unwrap_model(model)).__name__
    is_masked = task_of_class().get(kind) == "masked-lm" and not has_own_labels
    if is_masked and "input_ids" in names and not LABELS & {*names}:
        raise ValueError(
            f"train_dataset=<columns {sorted(names)}> has no labels, which {kind} learns; expected tokens to be drawn "
            "and masked. Pass data_collator=BucketedCollator(tokenizer, mlm_probability=0.15)"
        )
    masks = sorted({"assistant_masks", "completion_mask"} & {*names})
    if masks and "labels" not in names and (model is None or is_causal_lm(model)):
        raise ValueError(
            f"train_dataset=<columns {sorted(names)}> marks in {masks[0]} what is learned, and has no labels; expected "
            "labels of these tokens. Call: read_rows(train_dataset, tokenizer, 'causal-lm'), and pass its .train"
        )
    found = None if "input_ids" in names else fitting_format(names, task, {}) or fitting_format(names, None, {})
    if found is not None:
        is_read = any(task in one.tasks for one in FORMATS)
        task = task if is_read else found[0].tasks[0]
        raise ValueError(
            f"train_dataset=<columns {sorted(names)}> holds rows of {found[0].name}; expected token ids. "
            f"Call: read_rows(train_dataset, tokenizer, {task!r}), and pass its .train"
        )


def fixed_size_input(model: Any, dataset: Any, processing_class: Any) -> str | None:
    """Return the column of inputs that need no tokenizer; None for text, and for images beside text with a tokenizer.

    ``"pixel_values"`` of images, which stock's default collator stacks, ``"input_features"`` of sound (Whisper), or
    ``"input_values"`` of sound with a feature extractor, by which stock pads them.
    """
    names = _column_names(dataset)
    has_tokenizer = hasattr(getattr(processing_class, "tokenizer", processing_class), "pad_token_id")
    is_text = "input_ids" in names
    extracted: tuple[str, ...] = () if has_tokenizer or processing_class is None else ("input_values",)
    for name in ("pixel_values", "input_features", *extracted):
        is_main = getattr(model, "main_input_name", None) == name
        if (name in names and not is_text) or (is_main and not (is_text and has_tokenizer)):
            return name
    return None


def speech_collator(model: Any) -> SpeechCollator:
    """Return the collator of sound for a model, or for float32 features where ``model_init`` builds it later."""
    from hf_memopt.batching.collation import SpeechCollator

    if model is None:
        return SpeechCollator()
    inside = unwrap_model(model)
    return SpeechCollator(getattr(inside.config, "decoder_start_token_id", None), inside.dtype)


def needs_causal_labels(model: Any, dataset: Any, *, has_own_loss: bool = False) -> bool:
    """Return whether a causal language model is to be trained on examples of tokens alone that have no labels.

    So it is on a stream that does not name its columns: labels in its rows win. A model that reads images is not.
    """
    names = set(_column_names(dataset))
    if model is None or dataset is None or not is_causal_lm(model):
        return False
    if not names:
        return not type(unwrap_model(model)).__name__.endswith("ForConditionalGeneration")
    label = [] if has_own_loss else _first_row(dataset).get("label", [])
    if not isinstance(label, list) and np.ndim(label) == 0:
        names.discard("label")  # of a classification, left over
    others = LABELS | {"pixel_values", "input_features"}  # whose places among the tokens are not learned
    return "input_ids" in names and not names & others
