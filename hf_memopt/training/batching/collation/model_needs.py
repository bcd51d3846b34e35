"""What a collator asks of the model: absolute positions, a decoder, how labels become its inputs, known ids."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import torch
from numpy.typing import NDArray
from torch import nn

from hf_memopt.training.binding.model import unwrap_model

if TYPE_CHECKING:
    from transformers import Trainer


def needs_position_ids(model: nn.Module) -> bool:
    """Return whether left padding shifts the positions of ``model`` and ``position_ids`` repair that.

    True for a forward that takes ``position_ids`` and would number the padded columns (GPT-2, BERT). False for rotary
    positions, which are relative, and for models that number the real tokens themselves: RoBERTa and its descendants
    from ``input_ids``, starting above 0, OPT from ``attention_mask``.
    """
    inside = unwrap_model(model)
    if "position_ids" not in inspect.signature(inside.forward).parameters:
        return False
    return not any(_is_free_of_columns(type(module)) for module in inside.modules())


def first_position(model: nn.Module) -> int:
    """Return the position of a text's first token: behind the padding's where the model counts tokens, else 0."""
    counting = (module for module in unwrap_model(model).modules() if _counts_tokens(type(module)))
    starts = (getattr(module, "padding_idx", None) for module in counting)
    return max((start + 1 for start in starts if isinstance(start, int)), default=0)


def most_positions(model: nn.Module) -> float:
    """Return the length of a row that the model's configuration has positions for; infinite where it does not say."""
    with suppress(AttributeError, TypeError, ValueError):
        return int(unwrap_model(model).config.get_text_config().max_position_embeddings) - first_position(model)
    return float("inf")


def _counts_tokens(kind: type[nn.Module]) -> bool:
    name = "create_position_ids_from_input_ids"  # a method or a function of the module file, seen in 5.8.1 to 5.23.0
    return hasattr(kind, name) or hasattr(sys.modules[kind.__module__], name)


def _is_free_of_columns(kind: type[nn.Module]) -> bool:
    """Return whether a module class has positions that are relative, or counted from the tokens themselves."""
    if "Rotary" in kind.__name__ or kind.__name__ == "OPTLearnedPositionalEmbedding":
        return True
    return _counts_tokens(kind)


def has_decoder(model: nn.Module) -> bool | None:
    """Return whether the labels of ``model`` go to a decoder of its own; None if it has no config."""
    inside = unwrap_model(model)
    if not hasattr(inside, "config"):
        return None
    takes_decoder_ids = "decoder_input_ids" in inspect.signature(inside.forward).parameters
    return takes_decoder_ids and bool(getattr(inside.config, "is_encoder_decoder", False))


def embedding_rows(model: nn.Module) -> dict[str, int]:
    """Return how many token ids have an embedding, as far as known; none where images and sounds have ids beyond."""
    inside, rows = cast(Any, unwrap_model(model)), dict[str, int]()
    # of other models than transformers' language models
    with suppress(AttributeError, NotImplementedError, ValueError):
        if inside.config.get_text_config() is inside.config:
            rows["input_ids"] = int(inside.get_input_embeddings().num_embeddings)
            rows["decoder_input_ids"] = int(inside.get_decoder().get_input_embeddings().num_embeddings)
    return rows


class KnownIds:
    """The token ids that a Trainer's model has embeddings of now; in a copy for a worker, those of its beginning."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Callable[[], Any] = weakref.ref(trainer)
        self._rows = embedding_rows(cast(nn.Module, trainer.model))

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (KnownIds,), {"trainer": NoneType, "_rows": self._now()}

    def _now(self) -> dict[str, int]:
        if (trainer := self.trainer()) is not None:  # its model may be resized, or another of model_init
            self._rows = embedding_rows(trainer.model)
        return self._rows

    def check(self, batch: Mapping[str, NDArray[Any]]) -> None:
        """Raise for a token id without an embedding: torch says on a GPU only that an index is out of range."""
        for name in self._rows.keys() & batch.keys():
            most = batch[name].max(initial=0)
            if most >= self._rows[name] and most >= (rows := self._now().get(name, most + 1)):
                raise ValueError(
                    f"{name} has the token id {most}, and the model has embeddings of {rows} ids; expected ids below "
                    f"{rows}. Call model.resize_token_embeddings(len(tokenizer)) before the Trainer is made"
                )


def label_shifter(model: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return the model's ``prepare_decoder_input_ids_from_labels``, bound to a copy that has the config but no weights.

    Spawned workers would get the weights otherwise; all of transformers 5.8.1, 5.17.0 and 5.23.0 read the config only.
    """
    inside = unwrap_model(model)
    if not hasattr(inside, "prepare_decoder_input_ids_from_labels"):
        return None
    shell = object.__new__(type(inside))
    nn.Module.__init__(shell)
    shell.config = inside.config
    shift_labels: Callable[..., torch.Tensor] = shell.prepare_decoder_input_ids_from_labels
    return shift_labels
