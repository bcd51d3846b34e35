"""Outputs of an evaluation on disk instead of in memory: written batch by batch, handed out as ``numpy.memmap``.

Stock holds the outputs of all batches and concatenates them anew whenever a batch is added, so at its peak it holds
them twice. Here memory holds those of one batch. ``compute_metrics`` gets arrays as ever (a memmap is one) that may be
changed in place; what it makes of them (a copy, a comparison of all of it) is in memory again. Pages that it has read
count as resident, as those of any mapped file, and the system takes them back when memory is short.

The files are temporary: they go when the arrays do, also where an error or the end of the process takes them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_memopt.units import format_bytes

__all__ = ["SpilledOutputs", "check_disk", "is_spillable", "tensor_bytes"]

IGNORED = -100  # what stock pads outputs with


def tensor_bytes(outputs: Any, *, on_host: bool = False) -> int:
    """Return the bytes of all tensors in nested outputs, or of the arrays on the host, where bfloat16 is float32."""
    tensors = [leaf for leaf in _leaves(outputs) if torch.is_tensor(leaf)]
    return sum(
        leaf.numel() * (4 if on_host and leaf.dtype == torch.bfloat16 else leaf.element_size()) for leaf in tensors
    )


def is_spillable(outputs: Any) -> bool:
    """Tell whether outputs are tensors of shape (batch, ...), alone or in tuples, lists and dicts."""
    leaves = _leaves(outputs)
    if not leaves or not all(torch.is_tensor(leaf) and leaf.dim() > 0 for leaf in leaves):
        return False
    return len({leaf.shape[0] for leaf in leaves}) == 1


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise OSError where a folder has too little room."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise OSError(
            f"spill_folder={str(folder)!r} has {format_bytes(free_bytes)} free, and the outputs of this evaluation "
            f"take {format_bytes(needed_bytes)}; expected room for them. Reduce them on the card: "
            "EvaluationGuardCallback(reduce='argmax')"
        )


class SpilledOutputs:
    """The outputs of one evaluation, row by row in files; in their place the Trainer holds the numbers of the rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[_RowFile] = []
        self._structure: Any = None
        self._rows = 0
        self._restored: dict[bytes, Any] = {}  # what compute_metrics changes in place shows in the output, as ever

    def add(self, outputs: Any) -> torch.Tensor:
        """Write the outputs of a batch; return the numbers of its rows, shape (batch,), on their device."""
        leaves = _leaves(outputs)
        if not self._files:
            self._structure = _structure(outputs)
            self._files = [_RowFile(self._folder) for _ in leaves]
        for file, leaf in zip(self._files, leaves, strict=True):
            file.append(_as_array(leaf))
        first, self._rows = self._rows, self._rows + len(leaves[0])
        return torch.arange(first, self._rows, device=leaves[0].device)

    def restore(self, rows: NDArray[np.int64]) -> Any:
        """Return the outputs of these rows, nested as the model gave them, as memory-mapped arrays.

        Shorter rows are padded with -100 in the second dimension, as stock does.
        """
        key = rows.tobytes()
        if key not in self._restored:
            self._restored[key] = _rebuild(self._structure, iter([file.read(rows) for file in self._files]))
        return self._restored[key]

    def close(self) -> None:
        """Close the files; the arrays stay, and the space on disk goes with them."""
        for file in self._files:
            file.close()


class _RowFile:
    """One output: rows of shape (width, ...) one after the other, of which the width may differ from batch to batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = _open(folder)
        self._dtype: Any = None
        self._shapes: list[tuple[int, ...]] = []  # of each row
        self._offsets: list[int] = []

    def append(self, batch: NDArray[Any]) -> None:
        if self._shapes and batch.shape[2:] != self._shapes[0][1:]:
            raise ValueError(
                f"outputs of shapes {self._shapes[0]} and {batch.shape[1:]} per row, as attentions of texts of other "
                "lengths, cannot be concatenated; expected rows that differ in their first dimension at most. Leave "
                'them out: trainer.evaluate(ignore_keys=["attentions"])'
            )
        self._dtype = batch.dtype
        start = self._file.tell()
        row_bytes = batch.nbytes // max(len(batch), 1)
        self._offsets.extend(start + row * row_bytes for row in range(len(batch)))
        self._shapes.extend([batch.shape[1:]] * len(batch))
        self._file.write(_content(batch))

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        self._file.flush()
        shapes = {self._shapes[row] for row in rows}
        if len(shapes) == 1 and np.array_equal(rows, np.arange(len(rows))):
            return np.memmap(self._file, self._dtype, "r+", shape=(len(rows), *shapes.pop()))
        width = max((shape[0] for shape in shapes if shape), default=0)
        ordered = _open(self._folder)
        for row in rows:
            shape = self._shapes[row]
            self._file.seek(self._offsets[row])
            content = np.frombuffer(self._file.read(int(np.prod(shape)) * self._dtype.itemsize), self._dtype)
            content = content.reshape(shape)
            if shape and shape[0] < width:
                padding = np.full((width - shape[0], *shape[1:]), IGNORED, self._dtype)
                content = np.concatenate([content, padding])
            ordered.write(_content(content))
        ordered.flush()
        with ordered:
            return np.memmap(ordered, self._dtype, "r+", shape=(len(rows), *content.shape))

    def close(self) -> None:
        self._file.close()


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's values on the host; numpy has no bfloat16, so float32 as stock does."""
    on_host = tensor.detach().cpu()
    return (on_host.float() if on_host.dtype == torch.bfloat16 else on_host).numpy()


def _content(array: NDArray[Any]) -> Any:
    """Return the bytes of an array, copied only where they are not in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _open(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, prefix="memopt-outputs-")


def _leaves(outputs: Any) -> list[Any]:
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, (tuple, list)):
        return [leaf for one in outputs for leaf in _leaves(one)]
    return [outputs]


def _structure(outputs: Any) -> Any:
    """Return nested outputs without their tensors."""
    kind: Any = type(outputs)
    if isinstance(outputs, Mapping):
        return kind({name: _structure(one) for name, one in outputs.items()})
    if isinstance(outputs, (tuple, list)):
        return kind(_structure(one) for one in outputs)
    return None


def _rebuild(structure: Any, leaves: Any) -> Any:
    kind: Any = type(structure)
    if isinstance(structure, Mapping):
        return kind({name: _rebuild(one, leaves) for name, one in structure.items()})
    if isinstance(structure, (tuple, list)):
        return kind(_rebuild(one, leaves) for one in structure)
    return next(leaves)
