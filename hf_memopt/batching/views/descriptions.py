"""What a view tells about its dataset to those who take it for one: columns, features, where the data came from."""

from __future__ import annotations

from typing import Any

__all__ = ["DescribedByDataset"]

DESCRIPTIONS = {
    "builder_name",
    "citation",
    "column_names",
    "config_name",
    "dataset_size",
    "description",
    "download_checksums",
    "download_size",
    "features",
    "homepage",
    "info",
    "license",
    "size_in_bytes",
    "split",
    "version",
}
"""The properties of a ``datasets.Dataset`` that hold for its rows in any order (datasets 3.0 to 5.2)."""


class DescribedByDataset:
    """Answer ``column_names``, ``features``, ``info`` and the like as ``self.dataset`` does, if it does."""

    def __getattr__(self, name: str) -> Any:
        if name in DESCRIPTIONS:
            return getattr(vars(self)["dataset"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
