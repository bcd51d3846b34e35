"""Collate examples of sound for an encoder-decoder (Whisper): features of one size, labels of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import default_data_collator

from hf_memopt.plain_data import CountOrZero, check_value
from hf_memopt.training.binding.model import IGNORED_LABEL


@dataclass(frozen=True)
class SpeechCollator:
    """Stack ``input_features``, (batch, mel bins, frames), and pad ``labels`` to the longest, (batch, tokens).

    A feature extractor gives features of one size; labels are padded on the right with -100, which the loss ignores.
    It needs no tokenizer.

    Args:
        decoder_start_token_id: of the model's configuration. Whisper's tokenizer puts it first, and the model puts it
            there again when it shifts the labels to the right; so it is taken off where every row begins with it.
        dtype: of the features, that of the model's weights: its first layer is a convolution, which takes no other.

    Examples:
        >>> collator = SpeechCollator(decoder_start_token_id=9)
        >>> rows = [{"input_features": [[0.0]], "labels": [9, 5, 6]}, {"input_features": [[1.0]], "labels": [9, 7]}]
        >>> collator(rows)["labels"].tolist()
        [[5, 6], [7, -100]]
    """

    decoder_start_token_id: int | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_value("decoder_start_token_id", self.decoder_start_token_id, CountOrZero | None, 50258)
        check_value("dtype", self.dtype, torch.dtype, torch.float32)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the batch of ``features``, which stay as they are."""
        labels = [torch.as_tensor(row["labels"], dtype=torch.long) for row in features if "labels" in row]
        batch: dict[str, torch.Tensor] = default_data_collator(
            [{name: value for name, value in row.items() if name != "labels"} for row in features]
        )
        batch["input_features"] = batch["input_features"].to(self.dtype)
        if len(labels) < len(features):  # prediction without labels
            return batch
        if all(len(row) and int(row[0]) == self.decoder_start_token_id for row in labels):
            labels = [row[1:] for row in labels]
        batch["labels"] = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
        return batch
