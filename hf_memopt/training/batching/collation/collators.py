"""Pad a batch to its own longest row, column by column in numpy.

Stock collators turn every padded row into Python lists and hand the nested lists to ``torch.tensor``, which costs far
more than the padding. Here the rows of a column are copied into one array of numpy, which ``torch.from_numpy`` wraps.

``BucketedCollator`` takes a list of examples, the whole-batch items of a
token-budget view, or the rows of a packed view, whose texts it joins. It serves classification, regression, token
labels, causal LM, MLM and encoder-decoders: what the labels are is read from their shape, and from the model once
``adapt`` has seen it. Limitations: no truncation, multiple choice, whole-word masking or anything but text (``inner=``
wraps the collator that knows it).
"""

from __future__ import annotations

import copy
import logging
import reprlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

from hf_memopt.changes import Change, record_changes
from hf_memopt.notices import notify
from hf_memopt.plain_data import check_value, shown
from hf_memopt.training.batching.collation.columns import (
    INPUTS,
    LABELS,
    Array,
    Column,
    column_kind,
    count_ids,
    label_kind,
    pad,
    read_columns,
    round_up,
    stack,
    take_labels,
    where_padding,
)
from hf_memopt.training.batching.collation.flattened_texts import keep_texts_apart
from hf_memopt.training.batching.collation.model_needs import (
    KnownIds,
    first_position,
    has_decoder,
    label_shifter,
    most_positions,
    needs_position_ids,
)
from hf_memopt.training.batching.collation.rows import ColumnBatch, PackedRow, RowBatch
from hf_memopt.training.batching.plan import check_settings
from hf_memopt.training.binding.first_use import calling_trainer
from hf_memopt.training.binding.model import check_model, is_causal_lm
from hf_memopt.training.binding.undo import UndoHandle, set_attribute, undo_all

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

PLACES = ("start_positions", "end_positions")  # of tokens in a row: question answering
LabelId = Annotated[int, range(-(2**31), 2**31)]


class BucketedCollator:
    """Pad a batch to its longest example, and return a plain dict of tensors.

    An item that is a list of examples, as in the views of ``bucketed(max_tokens=)``, is replaced by these examples. An
    item of a ``packed`` view becomes one row of its texts, with ``position_ids`` that begin anew with each, what they
    leave free as a text of its own, no ``attention_mask``, and for a causal LM no label at a text's first token.

    ``input_ids`` are padded with the tokenizer's pad token on its padding side, ``attention_mask`` with 0 (where it is
    missing it is made, and pad tokens at the ends of rows are padding unless they are bos, eos or unk, too),
    ``token_type_ids`` with the tokenizer's pad type, ``special_tokens_mask`` with 1, ids of other ``label_names`` of an
    attached Trainer as labels, any other column with one entry per token with 0; the decoder's columns always on the
    right. One number per row gives ``(batch,)``, a vector of one size in all rows ``(batch, size)``.
    ``start_positions`` and ``end_positions`` move with the tokens of their row. Columns of None, and ``length``, are
    dropped.

    Labels come from ``labels``, ``label`` or ``label_ids`` and leave as ``labels``: an int per row is a class, a float
    a regression target, a vector of floats or bools several targets (float32). A list of ints is one label per token
    if it is as long as ``input_ids`` in every row, else the labels of a decoder. Rows without tokens become padding.

    Two things that stock gets wrong on left padding are repaired: absolute positions that count the padding (where the
    model takes ``position_ids``), and the label of a causal LM's first token, which it would have to predict from
    padding. BART and heads that read the first column (BERT's pooler) still want ``padding_side="right"``.

    Args:
        tokenizer: gives pad token, padding side and special tokens; a processor that has a ``tokenizer`` will do.
        model: what ``adapt`` would be given later. Its weights are not kept, so the collator stays small to pickle.
        mlm_probability: the share of real, non-special tokens to mask, in (0, 1], with the random draws of stock's
            ``DataCollatorForLanguageModeling``. None masks nothing.
        causal_lm: copy ``input_ids`` to ``labels``, padding left out by ``attention_mask``: a real end-of-text token
            keeps its label even when it doubles as the pad token (stock drops it). Labels in the data win, except a
            ``label`` that is one number per row, left over from a classification.
        pad_to_multiple_of: round the padded length up, as far as the model has positions; 8 fits tensor cores. None or
            1 rounds nothing.
        label_pad_token_id: what the loss ignores.
        position_ids: add ``position_ids`` that count real tokens from 0. None: on left padding if the model needs it.
        inner: a collator that does all the work instead; this one only passes the examples on. Stock's
            ``DataCollatorWithFlattening()`` joins the texts of a batch into one row, without padding; ``attach`` then
            refuses a model in which texts of one row see each other.

    Raises:
        ValueError: settings out of range or against each other, no pad token or mask token; on a call: no features,
            rows with different columns, a missing, ragged or partly None column.
        TypeError: no tokenizer; on a call: rows that are not dicts, cells that are not numbers, ids that are not ints.

    Examples:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
        >>> collator = BucketedCollator(tokenizer, pad_to_multiple_of=4)
        >>> collator([{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}])["input_ids"]
        tensor([[5, 6, 7, 0],
                [8, 0, 0, 0]])
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        model: nn.Module | None = None,
        mlm_probability: float | None = None,
        causal_lm: bool = False,
        pad_to_multiple_of: int | None = 8,
        label_pad_token_id: int = -100,
        position_ids: bool | None = None,
        inner: Callable[[Any], Any] | None = None,
    ) -> None:
        if not hasattr(tokenizer, "padding_side"):  # a processor
            tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        check_value("mlm_probability", mlm_probability, float | None, 0.15)
        check_value("causal_lm", causal_lm, bool, True)
        check_value("label_pad_token_id", label_pad_token_id, LabelId, -100)
        check_value("position_ids", position_ids, bool | None, None)
        own = {"mlm_probability": mlm_probability, "causal_lm": causal_lm, "position_ids": position_ids}
        if inner is not None:
            _check_inner(inner, own)
        else:
            check_tokenizer(tokenizer)
            _check_settings(tokenizer, mlm_probability, causal_lm, pad_to_multiple_of)
        # The Trainer saves data_collator.tokenizer into its checkpoints.
        self.tokenizer: Any = getattr(inner, "tokenizer", None) if tokenizer is None else tokenizer
        self.mlm_probability = mlm_probability
        self.causal_lm = causal_lm
        self.pad_to_multiple_of = pad_to_multiple_of
        self.label_pad_token_id = label_pad_token_id
        self.position_ids = position_ids
        self.inner = inner
        self._masking: Any = None
        if mlm_probability is not None:
            self._masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability)
        self._has_decoder: bool | None = None  # None: unknown, so the shape of the labels decides alone
        self._shift_labels: Callable[..., torch.Tensor] | None = None
        self._adds_position_ids = bool(position_ids)
        self._first_position, self._most_positions = 0, float("inf")
        self._predicts_next_token = causal_lm
        self._has_model = False
        self._known_ids: KnownIds | None = None  # of the attached Trainer's model
        self._told_of_texts = self._told_of_model = False
        self._label_names: frozenset[str] = frozenset(LABELS)
        if model is not None:
            check_model(model)
            self.adapt(model)
            self._has_model = True

    @property
    def is_padding_free(self) -> bool:
        """Whether ``inner`` is stock's ``DataCollatorWithFlattening``, which joins texts instead of padding them."""
        return isinstance(self.inner, DataCollatorWithFlattening)

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Adapt to the trainer's model, or refuse one that cannot train on flattened texts; ``attach`` calls it.

        A trainer gets a copy where another one, that is still there, has this collator.
        """
        apart = keep_texts_apart(trainer, self.inner) if self.is_padding_free else undo_all()
        is_taken = self._known_ids is not None and self._known_ids.trainer() not in (None, trainer)
        own, model = copy.copy(self) if is_taken else self, cast(nn.Module, trainer.model)
        handles = [set_attribute(trainer, "data_collator", own)] if is_taken else []
        names = ("_has_decoder", "_shift_labels", "_predicts_next_token", "_adds_position_ids", "_first_position")
        handles += [set_attribute(own, name, getattr(own, name)) for name in (*names, "_most_positions")]
        handles.append(set_attribute(own, "_known_ids", KnownIds(trainer)))
        others = {*trainer.label_names} - INPUTS  # which are named to be kept beside predictions
        handles.append(set_attribute(own, "_label_names", frozenset(LABELS) | others))
        record_changes(trainer, own.adapt(model))
        return undo_all(apart, *handles)

    def adapt(self, model: nn.Module) -> tuple[Change, ...]:
        """Set what depends on the model and return each choice; nothing changes if a model was given at construction.

        For an encoder-decoder, lists of ints are always decoder labels and ``decoder_input_ids`` are made from them,
        which label smoothing in the ``Trainer`` needs. For any other model they must fit ``input_ids`` or have one
        size. The class's docstring says what is repaired on left padding.
        """
        if self.inner is not None or self._has_model:
            return ()
        is_seq2seq = has_decoder(model)
        if is_seq2seq and self.causal_lm:
            raise ValueError(
                f"causal_lm=True copies input_ids to labels, but {type(model).__name__} is an encoder-decoder; "
                "expected the decoder's labels in the data. Leave causal_lm out."
            )
        changes = []
        self._first_position, self._most_positions = first_position(model), most_positions(model)
        self._has_decoder = is_seq2seq
        self._shift_labels = label_shifter(model) if is_seq2seq else None
        if is_seq2seq:
            reason = f"{type(model).__name__} is an encoder-decoder, whose labels are padded on the right"
            changes.append(Change("integer lists in labels", "told apart by length", "decoder labels", reason))
        pads_left = self.tokenizer.padding_side == "left"
        self._predicts_next_token = self.causal_lm or is_causal_lm(model)
        if pads_left and self._predicts_next_token:
            reason = f"{type(model).__name__} would have to predict it from the padding on its left"
            changes.append(Change("label of the first token", "token id", self.label_pad_token_id, reason))
        if self.position_ids is None:
            self._adds_position_ids = pads_left and needs_position_ids(model)
            if self._adds_position_ids:
                reason = f"padding on the left would shift the positions of {type(model).__name__}"
                changes.append(Change("position_ids", False, True, reason))
        return tuple(changes)

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the batch of ``features``, which stay as they are."""
        if not isinstance(features, Sequence):
            raise TypeError(
                f"features={shown(features)} is not a list of examples; expected one. Call: collator([dataset[0]])"
            )
        if len(features) == 1 and isinstance(features[0], ColumnBatch):
            return self._collate(dict(features[0].columns), features[0].width)
        if self.inner is None and len(features) and all(isinstance(item, PackedRow) for item in features):
            return self._collate_packed(features)
        self._tell_of_model()
        items = (item if isinstance(item, (list, tuple)) else [item] for item in features)  # of whole batches, too
        examples = [example for item in items for example in item]
        if self.inner is not None:
            batch: dict[str, Any] = self.inner(examples)
            return batch
        return self._collate(read_columns(examples), _common_width(features))

    def _tell_of_model(self) -> None:
        """Say once what a Trainer's model needs of this collator, where neither ``attach`` nor ``model=`` named it."""
        if self._told_of_model or self._has_model or self._known_ids is not None:
            return
        self._told_of_model = True
        trainer = calling_trainer(lambda one: one.data_collator is self)
        changes = () if trainer is None else copy.copy(self).adapt(cast(nn.Module, trainer.model))
        if trainer is not None and (changes or self.is_padding_free):
            needs = f"{changes[0].name}: {changes[0].new}" if changes else "a check that texts of one row stay apart"
            model = type(trainer.model).__name__
            notify(
                logger,
                f"{type(self).__name__} collates for a Trainer that is not attached; {model} needs {needs}. "
                "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach",
            )

    def _collate(self, columns: dict[str, Column], width: int | None) -> dict[str, Any]:
        """Return the batch as tensors, padded to ``width`` or to its longest row."""
        lengths = count_ids(columns)
        label_name, labels = take_labels(columns)
        batch = self._pad_inputs(columns, lengths, self._width(lengths, width))
        batch.update(self._pad_labels(label_name, labels, lengths, batch))
        if self._known_ids is not None:
            self._known_ids.check(batch)
        special = None
        if self.causal_lm or self._masking is not None:  # as stock: a language model takes neither
            special = batch.pop("special_tokens_mask", None)
            batch.pop("offset_mapping", None)
        tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
        if self._masking is not None:
            special = np.isin(batch["input_ids"], self.tokenizer.all_special_ids) if special is None else special != 0
            unmaskable = special | (batch["attention_mask"] == 0)
            tensors["input_ids"], tensors["labels"] = self._masking.torch_mask_tokens(
                tensors["input_ids"], special_tokens_mask=torch.from_numpy(unmaskable)
            )
        return tensors

    def _collate_packed(self, rows: Sequence[PackedRow]) -> dict[str, Any]:
        """Return rows of several texts each, which no mask tells apart but where the positions begin anew."""
        if not (self._told_of_texts or rows[0].is_bound):
            self._told_of_texts = True
            notify(
                logger,
                "rows of packed(...) are read without attach(trainer): texts of a row may see each other, as they do "
                "in encoders. Call attach(trainer) before trainer.train()",
            )
        joined = [self._joined(row) for row in rows]
        width = max(len(row["position_ids"]) for row in joined)
        batch = self._collate({name: [row[name] for row in joined] for name in joined[0]}, width)
        del batch["attention_mask"]
        if self._predicts_next_token and "labels" in batch:  # nothing predicts a text's first token
            batch["labels"][batch["position_ids"] == self._first_position] = self.label_pad_token_id
        return batch

    def _joined(self, row: PackedRow) -> dict[str, Array]:
        """Return the columns of a row's texts one after the other; the tail is padding, no longer than they are."""
        columns = read_columns(row)
        columns.pop("position_ids", None)
        lengths = count_ids(columns)
        free = (row.width or sum(lengths)) - sum(lengths)
        positions = [np.arange(length) for length in lengths] + [np.arange(free) % max(lengths)]
        found = {"position_ids": np.concatenate(positions) + self._first_position}
        pad_id = -1 if "attention_mask" in columns else self._pad_id()
        columns.setdefault("attention_mask", [np.ones(length, np.int64) for length in lengths])
        for name, cells in columns.items():
            for text, (cell, length) in enumerate(zip(cells, lengths, strict=True)):
                is_padded = name == "attention_mask" and not cell.all()
                if name == "input_ids" and length > 1:  # a single one may end a text
                    is_padded = pad_id == cell[0] == cell[1] or pad_id == cell[-2] == cell[-1]
                if np.ndim(cell) == 0 or len(cell) != length or is_padded:
                    raise ValueError(
                        f"features[{text}][{name!r}]={reprlib.repr(np.asarray(cell).tolist())} cannot share a row with "
                        f"other texts; expected one value for each of {length} tokens, none of them padding. Train on "
                        "padded rows: bucketed(dataset, ...), tokenise with padding=False, or leave the column out."
                    )
            value = self._pad_value(name, cells[0])
            if name in self._label_names and cells[0].dtype.kind == "u":  # which have no -100
                cells = [cell.astype(np.int64) for cell in cells]
            found[name] = np.concatenate([*cells, np.full((free, *cells[0].shape[1:]), value, cells[0].dtype)])
        return found

    def _width(self, lengths: list[int], width: int | None) -> int:
        """Return the width to pad to: the one that is asked for, or the longest row, rounded up as far as it may be."""
        longest = max(lengths)
        rounded = round_up(longest, self.pad_to_multiple_of) if width is None else width
        if longest > rounded:
            raise ValueError(
                f"width={width} is too short for features[{lengths.index(longest)}]['input_ids'] with {longest} ids; "
                "expected the longest row to fit. Give the view the true lengths: "
                "bucketed(dataset, ..., lengths=token_lengths(dataset))."
            )
        return int(min(rounded, self._most_positions)) if longest <= self._most_positions else rounded

    def _pad_inputs(self, columns: dict[str, Column], lengths: list[int], width: int) -> dict[str, Array]:
        """Return every column but the labels as one array, plus ``attention_mask`` and ``position_ids`` if wanted."""
        side = self.tokenizer.padding_side
        batch = {}
        for name, column in columns.items():
            kind = column_kind(name, column, lengths)
            if kind == "fixed":
                batch[name] = stack(column)
                if name in PLACES and side == "left":  # padding moves the tokens
                    batch[name] += (width - np.array(lengths)).reshape(-1, *[1] * (batch[name].ndim - 1))
            elif kind == "decoder":
                own_width = self._width([*map(len, column)], None)
                batch[name] = pad(column, own_width, self._pad_value(name, column[0]), "right")
            else:
                batch[name] = pad(column, width, self._pad_value(name, column[0]), side)
        if "attention_mask" not in batch:
            is_padding, is_pad = where_padding(lengths, width, side), batch["input_ids"] == self._pad_id()
            if (is_pad > is_padding).any():  # rows were padded before
                before, after = (np.logical_and.accumulate(side, axis=1) for side in (is_pad, is_pad[:, ::-1]))
                is_padding = before | after[:, ::-1]
            batch["attention_mask"] = (~is_padding).astype(np.int64)
        if self._adds_position_ids and "position_ids" not in batch:
            first = batch["attention_mask"].argmax(axis=1)
            positions = np.clip(np.arange(width) - first[:, None], 0, None)
            batch["position_ids"] = positions * ~where_padding(lengths, width, side)
        return batch

    def _pad_id(self) -> int:
        """Return the token that at a row's ends is padding; -1 where the pad token has another use, too."""
        others = [getattr(self.tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "unk")]
        return -1 if self.tokenizer.pad_token_id in others else int(self.tokenizer.pad_token_id)

    def _pad_value(self, name: str, cell: Array) -> int:
        if name in LABELS or (name in self._label_names and cell.dtype.kind in "iu"):
            return self.label_pad_token_id
        if name in ("input_ids", "decoder_input_ids"):
            return int(self.tokenizer.pad_token_id)
        if name == "token_type_ids":
            return int(self.tokenizer.pad_token_type_id)
        return 1 if name == "special_tokens_mask" else 0

    def _pad_labels(
        self, name: str, labels: Column | None, lengths: list[int], batch: dict[str, Array]
    ) -> dict[str, Array]:
        """Return ``labels`` as one array, or nothing; and ``decoder_input_ids`` where the model makes them."""
        if labels is None or (self.causal_lm and name == "label" and labels[0].ndim == 0):
            if not self.causal_lm:
                return {}
            is_padding = batch["attention_mask"] == 0
            copied = np.where(is_padding, self.label_pad_token_id, batch["input_ids"])
            return {"labels": self._without_unpredictable(copied, batch["attention_mask"])}
        kind = label_kind(labels, lengths, self._has_decoder, name)
        self._check_label_source(name, kind)
        if kind in ("class", "target"):
            return {"labels": stack(labels).astype(np.int64 if kind == "class" else np.float32, copy=False)}
        if kind == "token":
            width = batch["input_ids"].shape[1]
            padded = pad(labels, width, self.label_pad_token_id, self.tokenizer.padding_side)
            return {"labels": self._without_unpredictable(padded, batch["attention_mask"])}
        width = self._width([*map(len, labels)], None)
        padded = pad(labels, width, self.label_pad_token_id, "right")
        if self._shift_labels is None or "decoder_input_ids" in batch:
            return {"labels": padded}
        return {"labels": padded, "decoder_input_ids": self._shift_labels(labels=torch.from_numpy(padded)).numpy()}

    def _without_unpredictable(self, labels: Array, attention_mask: Array) -> Array:
        """Return causal labels without those of tokens right after padding, which has nothing to predict them from."""
        if self._predicts_next_token:
            first = attention_mask.argmax(axis=1)
            after_padding = np.flatnonzero(first)
            labels[after_padding, first[after_padding]] = self.label_pad_token_id
        return labels

    def _check_label_source(self, name: str, kind: str) -> None:
        """Refuse labels in the data that MLM would overwrite or that do not fit causal LM."""
        if self._masking is not None:
            raise ValueError(
                f"mlm_probability={self.mlm_probability!r} draws the labels, but the data has them under {name!r}; "
                f"expected one source of labels. Call: dataset.remove_columns({name!r})."
            )
        if (self.causal_lm or (self._predicts_next_token and name == "label")) and kind != "token":
            own = ", or for a loss of your own: dataset.rename_column('label', 'labels')" if name == "label" else ""
            raise ValueError(
                f"column {name!r} has not one label per token for a causal language model; expected labels as long as "
                f"input_ids, or causal_lm=True without them. Call: dataset.remove_columns({name!r}){own}."
            )


def _common_width(features: Sequence[Any]) -> int | None:
    """Return the width that the batches of views ask for; None where anything else is among them."""
    batches = [features] if isinstance(features, RowBatch) else features
    widths = [batch.width if isinstance(batch, RowBatch) else None for batch in batches]
    return None if None in widths else max(widths)  # type: ignore[type-var]


def _check_inner(inner: Any, own: dict[str, Any]) -> None:
    set_too = [name for name, value in own.items() if value]
    if set_too:
        name = getattr(inner, "__name__", type(inner).__name__)
        raise ValueError(
            f"inner={name} pads by itself, so {', '.join(set_too)} would be ignored; expected inner= alone. "
            "Set it on the inner collator, or leave inner out."
        )


def check_tokenizer(tokenizer: Any, name: str = "tokenizer") -> None:
    if tokenizer is None:
        raise ValueError(
            "tokenizer=None and inner=None leave nothing to pad with; expected one of them. "
            "Call: BucketedCollator(AutoTokenizer.from_pretrained(name))."
        )
    if not hasattr(tokenizer, "pad_token_id") or not hasattr(tokenizer, "padding_side"):
        raise TypeError(
            f"{name}={reprlib.repr(tokenizer)} has no pad_token_id and padding_side; expected a transformers "
            "tokenizer or a processor that holds one. Call: AutoTokenizer.from_pretrained(name)."
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"{name}={type(tokenizer).__name__} has no pad token; expected one to pad with. "
            "Set: tokenizer.pad_token = tokenizer.eos_token."
        )


def _check_settings(
    tokenizer: Any, mlm_probability: float | None, causal_lm: bool, pad_to_multiple_of: int | None
) -> None:
    if pad_to_multiple_of is not None:
        check_settings(pad_to_multiple_of=pad_to_multiple_of)
    if mlm_probability is None:
        return
    if not 0 < mlm_probability <= 1:
        raise ValueError(
            f"mlm_probability={mlm_probability!r} is out of range; expected a share in (0, 1], or None for no masking. "
            "Write: mlm_probability=0.15."
        )
    if causal_lm:
        raise ValueError(
            f"mlm_probability={mlm_probability!r} and causal_lm=True both make the labels; expected one of them. "
            "Leave one out."
        )
    if getattr(tokenizer, "mask_token", None) is None:
        raise ValueError(
            f"mlm_probability={mlm_probability!r} needs a mask token, which {type(tokenizer).__name__} does not have; "
            'expected one in its vocabulary. Set: tokenizer.mask_token = "[MASK]".'
        )
