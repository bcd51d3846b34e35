"""Give a view the descriptions of its dataset: columns, features, where the data came from."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DescribedByDataset", "is_map_style"]

DESCRIPTIONS = {"builder_name", "citation", "column_names", "config_name", "dataset_size"}
DESCRIPTIONS |= {"description", "download_checksums", "download_size", "features", "homepage"}
DESCRIPTIONS |= {"info", "license", "size_in_bytes", "split", "version"}
"""The properties of a ``datasets.Dataset`` that hold for its rows in any order (datasets 3.0 to 5.2)."""


def is_map_style(dataset: Any) -> bool:
    """Return whether a dataset can be indexed; a stream of torch inherits a ``__getitem__`` that only raises."""
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    return not is_stream and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class DescribedByDataset:
    """Answer ``column_names``, ``features``, ``info`` and the like as ``self.dataset`` does, if it does."""

    def __getattr__(self, name: str) -> Any:
        if name in DESCRIPTIONS:
            return getattr(vars(self)["dataset"], name)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_") and callable(getattr(vars(self).get("dataset"), name, None)):
            make = "sorted_by_length" if type(self).__name__ == "SortedExamples" else "bucketed"
            message += (
                ": a view is read as it is; expected its dataset to be changed before. "
                f"Call: {make}(dataset.{name}(...), ...)"
            )
        raise AttributeError(message)
