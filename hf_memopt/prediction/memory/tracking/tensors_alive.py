"""Say what a device holds now: weights, gradients, optimizer state, and all other tensors that Python can reach.

Python cannot reach what autograd keeps for the backward pass (activations saved in C++) and what kernels allocate. On
CUDA torch's list of blocks has their sizes. Only plain data is returned, so nothing is kept alive.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hf_memopt.training.binding.model import tensors_in, unwrap_optimizer

if TYPE_CHECKING:
    from transformers import Trainer

MOST_GROUPS = 15
OTHERS = "other tensors"


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors on a type of device, each once."""
    found = (_storage_on(plain, device) for tensor in tensors for plain in _plain_tensors(tensor))
    return sum(dict(storage for storage in found if storage is not None).values())


def held_by_trainer(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of weights (buffers too), gradients and optimizer state, by component."""
    model: Any = trainer.model
    parameters = list(model.parameters())
    optimizer = unwrap_optimizer(trainer.optimizer)
    return {
        "weights": [*parameters, *model.buffers()],
        "gradients": [one.grad for one in parameters if one.grad is not None],
        "optimizer state": [] if optimizer is None else tensors_in(dict(optimizer.state)),
    }


def live_tensors(trainer: Trainer, device: torch.device) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return bytes by component, and the largest groups of tensors of one component, shape and dtype.

    Each storage counts once, as a whole, for the first tensor that is found to use it.
    """
    sizes: Counter[str] = Counter()
    counts: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    bytes_of: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    seen: set[int] = set()
    for name, tensor in _named(trainer):
        storage = _storage_on(tensor, device)
        if storage is None or storage[0] in seen:
            continue
        seen.add(storage[0])
        group = name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        sizes[name] += storage[1]
        counts[group] += 1
        bytes_of[group] += storage[1]
    groups = [
        {"component": name, "shape": list(shape), "dtype": dtype, "count": counts[name, shape, dtype], "bytes": size}
        for (name, shape, dtype), size in bytes_of.most_common(MOST_GROUPS)
    ]
    return dict(sizes), groups


def largest_blocks(trainer: Trainer, device: torch.device) -> list[dict[str, int]] | None:
    """Return sizes and numbers of the largest blocks of CUDA's allocator that no tensor of Python begins; else None."""
    if device.type != "cuda":
        return None
    known = {storage[0] for _, one in _named(trainer) if (storage := _storage_on(one, device)) is not None}
    found: Counter[int] = Counter()
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    for segment in segments:
        if segment["device"] != device.index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and address not in known:
                found[block["size"]] += 1
            address += block["size"]
    largest = sorted(found, key=lambda size: -size * found[size])[:MOST_GROUPS]
    return [{"bytes": size, "count": found[size]} for size in largest]


def _named(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensors in held_by_trainer(trainer).items():
        for tensor in tensors:
            for plain in _plain_tensors(tensor):
                yield name, plain
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):  # isinstance would wake objects that import when they are asked
            yield OTHERS, one


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the data: those inside of a sharded or quantised one, else itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    inner: Any = tensor
    for name in inner.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), torch.Tensor):  # a sharded tensor names its mesh of devices too
            yield from _plain_tensors(part)


def _storage_on(tensor: torch.Tensor, device: torch.device) -> tuple[int, int] | None:
    """Return address and bytes of a tensor's storage; None where it is elsewhere, or has none of its own."""
    try:
        if tensor.device.type != device.type or (device.index is not None and tensor.device != device):
            return None
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.data_ptr() else None
    except (RuntimeError, NotImplementedError):  # fake tensors, and subclasses around others, which are found too
        return None
