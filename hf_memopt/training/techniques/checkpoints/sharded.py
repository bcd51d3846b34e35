"""Write and read checkpoints without taking more memory than training does.

What stock transformers 5.8 to 5.23 already does well is left to it. Saving copies no weight and no optimizer state on
the device (``test_saving.py`` proves it), ``torch.save`` moves one storage at a time to the host, resumed weights
go from a mapped file into the parameters one by one, and torch's own optimizers load their state without a second copy.
What it does not do well, and what ``ShardedCheckpointCallback`` does about it:

- *Weights on the host.* safetensors copies all tensors of one file from the GPU to the host before it writes the first
  (0.8.0), and stock's files hold up to 50 GB. Files of 1 GB bound the copies.
- *Converted weights.* Mixture-of-experts checkpoints are saved in their hub's names, expert by expert: a copy of up to
  two thirds of the experts on the GPU, from which stock cannot resume. ``attach`` keeps the names that the model trains
  under (``training.binding.checkpoint_manifest``). So does what is pushed to the hub *during* training, a copy of it;
  the final push has the hub's names.
- *State on the host.* Stock reads ``optimizer.pt`` whole into the memory of the host and then moves it to the GPU.
  Here the file is mapped: its pages are the file's own and the system may drop them at any time.
- *State of bitsandbytes.* Its ``load_state_dict`` begins with a deep copy of everything: on the host with one GPU, on
  the GPU itself with several processes, where stock reads the file straight into each. Here it copies part by part.
- *Paged state.* bitsandbytes loads it into ordinary memory of the GPU, so a run that fits may not fit once it is
  resumed (https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1344). Here it is paged again.
- *State of an earlier run.* A Trainer that trains a second time holds the old state until the new one is loaded.

All files have stock's format: either side reads what the other wrote, except names that stock itself cannot read back.
``python benchmarks/resume.py`` prints the figures.

Limitations: nothing changes for FSDP and DeepSpeed, whose engines read and write by themselves, and for weights that
are not a ``PreTrainedModel``'s, such as PEFT adapters, which are small and stay in one file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.training.binding import versions
from hf_memopt.training.binding.model import tensors_in, unwrap_optimizer
from hf_memopt.training.binding.undo import UndoHandle, nothing_to_undo, override_method
from hf_memopt.training.techniques import BoundCallback
from hf_memopt.units import parse_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import Trainer

PART_BYTES = 64 * 2**20
"""Optimizer state that is copied at once. Each part costs a copy of the parameter groups, so not one per parameter."""


# ---- Saving ---------------------------------------------------------------------------------------------------------


def save_in_shards(model: PreTrainedModel, *, max_shard_bytes: int) -> UndoHandle:
    """Let ``model.save_pretrained`` write files of bounded size.

    An index that the folder contains already is deleted first and a new one is written last, so an interrupted save
    leaves no checkpoint rather than a mixture. An old file of all weights stays until the new files are complete and is
    deleted then, since stock would read it first. Arguments of the caller of ``save_pretrained`` take precedence. A
    class whose own ``save_pretrained`` takes no ``max_shard_size`` saves as it does.
    """
    if not versions.takes(model.save_pretrained, "max_shard_size"):
        return nothing_to_undo()

    def save_pretrained(before: Callable[..., Any], save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(save_directory)
        is_main_process = args[0] if args else kwargs.get("is_main_process", True)
        replaces = is_main_process and kwargs.get("variant") is None
        if replaces:
            (folder / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
        saved = before(save_directory, *args, **{"max_shard_size": max_shard_bytes, **kwargs})
        if replaces and (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
            (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
        return saved

    return override_method(model, "save_pretrained", save_pretrained)


# ---- Resuming -------------------------------------------------------------------------------------------------------


def mapped_loading() -> AbstractContextManager[Any]:
    """Return the context in which ``torch.load`` maps files instead of reading them, a process-wide setting.

    torch 2.6 has no such setting: there nothing changes.
    """
    try:
        from torch.utils.serialization import config
    except ImportError:
        return nullcontext()
    settings: Any = config  # its methods are added when it is imported
    patch: AbstractContextManager[Any] = settings.patch({"load.mmap": True})
    return patch


def load_optimizer_state(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    *,
    load: Callable[[dict[str, Any]], Any] | None = None,
    part_bytes: int = PART_BYTES,
) -> None:
    """Load a state dict into an optimizer as its ``load_state_dict`` does, with at most ``part_bytes`` of it twice.

    The optimizer's current state is dropped first. The state of a bitsandbytes optimizer is **removed from**
    ``state_dict`` as it is loaded, and paged again; other optimizers load it without a copy, and it stays there.

    Raises:
        ValueError: from ``load``, where the parameter groups do not fit.
    """
    from bitsandbytes.optim.optimizer import Optimizer8bit  # the base of all of its optimizers, of 32 bits too

    load = optimizer.load_state_dict if load is None else load
    if not isinstance(optimizer, Optimizer8bit):
        optimizer.state.clear()
        load(state_dict)
        return
    load({**state_dict, "state": {}})  # raises if groups do not fit; drops the current state
    entries = state_dict["state"]
    loaded: dict[Any, Any] = {}
    while entries:
        load({**state_dict, "state": _take_part(entries, part_bytes)})
        for parameter, state in optimizer.state.items():
            if torch.is_tensor(parameter) and parameter.device.type != "cpu":
                page_state(optimizer, state)
        loaded.update(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(loaded)


def page_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Move one parameter's state into paged memory if the optimizer would have allocated it there."""
    for name in ("state1", "state2"):
        value = state.get(name)
        if optimizer.is_paged and value is not None:
            buffer = optimizer.get_state_buffer(value, dtype=value.dtype)
            if getattr(buffer, "is_paged", False):
                state[name] = buffer.copy_(value)


def _take_part(entries: dict[Any, Any], part_bytes: int) -> dict[Any, Any]:
    """Take entries out, from the first on, until they have ``part_bytes``."""
    part: dict[Any, Any] = {}
    size_bytes = 0
    while entries and size_bytes < part_bytes:
        key = next(iter(entries))
        part[key] = entries.pop(key)
        size_bytes += sum(tensor.nbytes for tensor in tensors_in(part[key]))
    return part


def _off_the_file(value: Any) -> Any:
    """Copy state that stays on the host, else the file, which may be deleted, would stay mapped for the whole run."""
    if isinstance(value, dict):
        return {key: _off_the_file(item) for key, item in value.items()}
    is_mapped = torch.is_tensor(value) and value.device.type == "cpu" and not getattr(value, "is_paged", False)
    return value.clone() if is_mapped else value


# ---- The Trainer ----------------------------------------------------------------------------------------------------


class ShardedCheckpointCallback(BoundCallback):
    """Save and resume with no more memory than training takes; bind it with ``attach``. It logs no keys.

    When weights are saved, also by ``trainer.save_model()``, files have a bounded size. When ``train()`` resumes, the
    optimizer's state is mapped (not on a CPU, where it stays in the host's memory anyway) and loaded by
    ``load_optimizer_state``.

    Args:
        max_shard_bytes: the size of a file of weights, as a number of bytes or as text, and with it the bytes that
            saving copies to the host at once. A model that is smaller is one file, as stock writes it.

    Attributes:
        handle: takes everything off the trainer again; None until it is bound.

    Raises:
        ValueError: ``max_shard_bytes`` is not an amount of memory.
    """

    technique = "sharded checkpoints"

    def __init__(self, max_shard_bytes: int | str = "1GB") -> None:
        self.max_shard_bytes = parse_bytes(max_shard_bytes, "max_shard_bytes")
        super().__init__(self.max_shard_bytes)
        self._is_resuming = False
        self._loading = ExitStack()  # overrides from the creation of the scheduler until the state is loaded

    def change_trainer(self, trainer: Trainer) -> list[UndoHandle]:
        """Override what saves and resumes on this trainer."""
        return [
            override_method(trainer, "save_model", self._save_model),
            override_method(trainer, "create_scheduler", self._create_scheduler),
            override_method(trainer, "train", self._train),
            UndoHandle(self._loading.close),
        ]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the loading if the checkpoint had no state to load."""
        super().on_train_begin(args, state, control)
        self._loading.close()

    def _save_model(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer = self.binding.trainer
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        is_plain = isinstance(model, PreTrainedModel) and not getattr(model, "peft_config", None)
        with save_in_shards(model, max_shard_bytes=self.max_shard_bytes) if is_plain else nullcontext():
            before(*args, **kwargs)

    def _train(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_resuming = bool(args[0] if args else kwargs.get("resume_from_checkpoint"))
        try:
            return before(*args, **kwargs)
        finally:
            self._is_resuming = False
            self._loading.close()

    def _create_scheduler(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The scheduler is the last thing that stock creates before it loads the optimizer's state."""
        scheduler = before(*args, **kwargs)
        trainer = self.binding.trainer
        if self._is_resuming and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # whose engines load
            self._loading.close()
            optimizer = unwrap_optimizer(trainer.optimizer)
            load = partial(self._load_state_dict, optimizer)
            self._loading.enter_context(override_method(optimizer, "load_state_dict", load))
            if _maps_state(trainer):
                self._loading.enter_context(mapped_loading())
        return scheduler

    def _load_state_dict(self, optimizer: Any, before: Callable[..., Any], state_dict: dict[str, Any]) -> None:
        self._loading.close()  # the file is open; whatever is loaded next is read as usual
        load_optimizer_state(optimizer, state_dict, load=before)
        if _maps_state(self.binding.trainer):
            for parameter, state in optimizer.state.items():
                optimizer.state[parameter] = _off_the_file(state)


def _maps_state(trainer: Trainer) -> bool:
    return trainer.args.device.type != "cpu"
