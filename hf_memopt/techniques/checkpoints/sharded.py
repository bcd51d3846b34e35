"""Write and read checkpoints without taking more memory than training does.

What stock transformers 5.8 to 5.23 already does well is left to it. Saving copies no weight and no optimizer state on
the device (``test_saving.py`` proves it), ``torch.save`` moves one storage at a time to the host, resumed weights
go from a mapped file into the parameters one by one, and torch's own optimizers load their state without a second copy.
What is not so well, and what ``ShardedCheckpointCallback`` does about it:

- *Weights on the host.* safetensors copies all tensors of one file from the card to the host before it writes the first
  (0.8.0), and stock's files hold up to 50 GB. Files of 1 GB bound the copies.
- *Converted weights.* Mixture-of-experts checkpoints are saved in their hub's names, expert by expert: a copy of up to
  two thirds of the experts on the card. Stock cannot resume from it, nor from vision-language checkpoints in such names
  (it reads them under names that the model does not have, with a warning only:
  https://github.com/huggingface/transformers/issues/48805). A checkpoint to resume from keeps the names that the model
  trains under; ``from_pretrained`` reads both. So does what is pushed to the hub *during* training, a copy of it; the
  final push has the hub's names.
- *State on the host.* Stock reads ``optimizer.pt`` whole into the memory of the host and then moves it to the card.
  Here the file is mapped: its pages are the file's own and the system may drop them at any time.
- *State of bitsandbytes.* Its ``load_state_dict`` begins with a deep copy of everything: on the host with one card, on
  the card itself with several processes, where stock reads the file straight into each. Here it copies piece by piece.
- *Paged state.* bitsandbytes loads it into ordinary memory of the card, so a run that fits may not fit once it is
  resumed (https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1344). Here it is paged again.
- *State of an earlier run.* A Trainer that trains a second time holds the old state until the new one is loaded.

All files stay stock's: either side reads what the other wrote, but for names that stock itself cannot read back.
``python benchmarks/resume.py`` prints the figures.

Left out: FSDP and DeepSpeed, whose engines read and write by themselves; and weights that are no
``PreTrainedModel``'s, PEFT adapters among them, which are small and stay in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.handles import UndoHandle, override_method
from hf_memopt.techniques.checkpoints.complete import checkpoint_to_resume, remove_training_state
from hf_memopt.units import parse_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import Trainer

__all__ = [
    "LeanCheckpointCallback",
    "ShardedCheckpointCallback",
    "load_optimizer_state",
    "mapped_loading",
    "page_state",
    "save_in_shards",
]

PIECE_BYTES = 64 * 2**20
"""Optimizer state that is copied at once. A piece costs a copy of the parameter groups, so not one per parameter."""


# ---- Saving ---------------------------------------------------------------------------------------------------------


def save_in_shards(model: PreTrainedModel, *, max_shard_bytes: int) -> UndoHandle:
    """Let ``model.save_pretrained`` write files of bounded size, and to a checkpoint the names the model trains under.

    An index that the folder holds already is deleted first and a new one is written last: what was interrupted is no
    checkpoint, never a mixture. One old file of all weights stays until the new files are complete and is deleted then,
    since stock would read it before them. What the caller passes to ``save_pretrained`` wins.

    Args:
        model: a model without PEFT adapters.
        max_shard_bytes: the size of a file, unless one tensor is larger.

    Returns:
        A handle whose ``remove()`` makes ``save_pretrained`` what it was.
    """

    def lean(before: Callable[..., Any]) -> Callable[..., Any]:
        def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            options: dict[str, Any] = {"max_shard_size": max_shard_bytes}
            folder = Path(save_directory)
            if folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
                options["save_original_format"] = False
            is_main_process = args[0] if args else kwargs.get("is_main_process", True)
            replaces = is_main_process and kwargs.get("variant") is None
            if replaces:
                (folder / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
            saved = before(save_directory, *args, **{**options, **kwargs})
            if replaces and (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
                (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
            return saved

        return save_pretrained

    return override_method(model, "save_pretrained", lean)


def _has_adapters(model: Any) -> bool:
    return bool(getattr(model, "peft_config", None))


# ---- Resuming -------------------------------------------------------------------------------------------------------


@contextmanager
def mapped_loading() -> Iterator[None]:
    """Let ``torch.load`` map files inside instead of reading them; a process-wide setting, put back afterwards.

    torch 2.6 has no such setting: there nothing changes.
    """
    try:
        from torch.utils.serialization import config
    except ImportError:
        yield
        return
    before = config.load.mmap
    config.load.mmap = True
    try:
        yield
    finally:
        config.load.mmap = before


def load_optimizer_state(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    *,
    load: Callable[[dict[str, Any]], Any] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Load a state dict into an optimizer as its ``load_state_dict`` does, with no more than a piece of it twice.

    The optimizer's present state is dropped first. The state of a bitsandbytes optimizer is **taken out of**
    ``state_dict`` as it is loaded, and paged again; what other optimizers load costs no copy and stays there.

    Args:
        optimizer: not accelerate's wrapper but what is inside.
        state_dict: as ``optimizer.state_dict()`` gives it, on any device.
        load: the ``load_state_dict`` to use; the optimizer's own by default.
        piece_bytes: state of bitsandbytes that is copied at once; more if one parameter has more.

    Raises:
        ValueError: from ``load``, where the parameter groups do not fit.
    """
    from bitsandbytes.optim.optimizer import Optimizer8bit  # the base of all of its optimizers, of 32 bits too

    load = optimizer.load_state_dict if load is None else load
    if not isinstance(optimizer, Optimizer8bit):
        optimizer.state.clear()
        load(state_dict)
        return
    load({**state_dict, "state": {}})  # raises if groups do not fit; drops the present state
    entries = state_dict["state"]
    loaded: dict[Any, Any] = {}
    while entries:
        load({**state_dict, "state": _take_piece(entries, piece_bytes)})
        for parameter, state in optimizer.state.items():
            if torch.is_tensor(parameter) and parameter.device.type != "cpu":
                page_state(optimizer, state)
        loaded.update(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(loaded)


def page_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Move one parameter's state into paged memory where the optimizer would have allocated it there.

    Args:
        optimizer: one of bitsandbytes, paged or not.
        state: the state of one parameter, which is on a card.
    """
    for name in ("state1", "state2"):
        value = state.get(name)
        if optimizer.is_paged and value is not None:
            buffer = optimizer.get_state_buffer(value, dtype=value.dtype)
            if getattr(buffer, "is_paged", False):
                state[name] = buffer.copy_(value)


def _take_piece(entries: dict[Any, Any], piece_bytes: int) -> dict[Any, Any]:
    """Take entries out, from the first on, until they have ``piece_bytes``."""
    piece: dict[Any, Any] = {}
    size_bytes = 0
    while entries and size_bytes < piece_bytes:
        key = next(iter(entries))
        piece[key] = entries.pop(key)
        size_bytes += _size(piece[key])
    return piece


def _size(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_size(item) for item in value.values())
    return value.nbytes if torch.is_tensor(value) else 0


def _off_the_file(value: Any) -> Any:
    """Copy what stays on the host: pages of the file would be in use for the whole run, and files get deleted."""
    if isinstance(value, dict):
        return {key: _off_the_file(item) for key, item in value.items()}
    is_mapped = torch.is_tensor(value) and value.device.type == "cpu" and not getattr(value, "is_paged", False)
    return value.clone() if is_mapped else value


# ---- The Trainer ----------------------------------------------------------------------------------------------------


class ShardedCheckpointCallback(TrainerCallback):
    """Save and resume with no more memory than training takes; bound with ``attach``.

    Where weights are saved, also by ``trainer.save_model()``, files are of bounded size. Where ``train()`` resumes, the
    optimizer's state is mapped (not on a CPU, where it stays in the host's memory anyway) and loaded by
    ``load_optimizer_state``.

    A checkpoint is complete or not resumed from, whatever an earlier run left in its folder: see ``whole_checkpoints``.
    ``resume_from_checkpoint=True`` means the last complete one, and an incomplete one that is asked for raises.

    Args:
        max_shard_bytes: the size of a file of weights, as a number of bytes or as text, and with it what saving copies
            to the host at once. A model that is smaller is one file, as stock writes it.

    Attributes:
        handle: takes the trainer's overrides out again; None before ``attach``.

    Raises:
        ValueError: no amount of memory, or 0.
    """

    technique = "sharded checkpoints"

    def __init__(self, max_shard_bytes: int | str = "1GB") -> None:
        self.max_shard_bytes = _checked_size(max_shard_bytes)
        self.handle: UndoHandle | None = None
        self.binding = Binding()
        self._is_resuming = False
        self._loading = ExitStack()  # what is in force from the scheduler's creation until the state is loaded

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_shard_bytes,)  # a copy starts unbound

    def bind(self, trainer: Trainer) -> None:
        """Override what saves and what resumes on this one trainer; ``attach`` calls it."""
        if self.binding.trainer is trainer:
            return
        self.handle = self.binding.to(
            trainer,
            override_method(trainer, "save_model", self._saving),
            override_method(trainer, "create_scheduler", self._before_loading),
            override_method(trainer, "train", self._training),
            UndoHandle(self._loading.close),
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound; end the loading where the checkpoint had no state to load."""
        check_compatibility(self.binding.serving(self, state))
        self._loading.close()

    def _saving(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def save_model(*args: Any, **kwargs: Any) -> Any:
            trainer = self.binding.trainer
            folder = _own_checkpoint(*args, **kwargs) if trainer.args.should_save else None
            if folder is not None:
                remove_training_state(folder, trainer.args.world_size)
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            if isinstance(model, PreTrainedModel) and not _has_adapters(model):
                with save_in_shards(model, max_shard_bytes=self.max_shard_bytes):
                    before(*args, **kwargs)
            else:
                before(*args, **kwargs)
            if folder is not None:
                _remove_shadowing_weights(folder, has_adapters=_has_adapters(model))

        return save_model

    def _training(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            trainer = self.binding.trainer
            resume_from_checkpoint = checkpoint_to_resume(
                resume_from_checkpoint, trainer.args.output_dir, check_files=not _engine_saves(trainer)
            )
            self._is_resuming = bool(resume_from_checkpoint)
            try:
                return before(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._is_resuming = False
                self._loading.close()

        return train

    def _before_loading(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """The scheduler is the last thing that stock creates before it loads the optimizer's state."""

        def create_scheduler(*args: Any, **kwargs: Any) -> Any:
            scheduler = before(*args, **kwargs)
            trainer = self.binding.trainer
            if self._is_resuming and not _engine_saves(trainer):
                self._loading.close()
                optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper has it
                self._loading.enter_context(override_method(optimizer, "load_state_dict", self._loader(optimizer)))
                if _maps_state(trainer):
                    self._loading.enter_context(mapped_loading())
            return scheduler

        return create_scheduler

    def _loader(self, optimizer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def lean(before: Callable[..., Any]) -> Callable[..., Any]:
            def load_state_dict(state_dict: dict[str, Any]) -> None:
                self._loading.close()  # the file is open; what follows may read others its own way
                load_optimizer_state(optimizer, state_dict, load=before)
                if _maps_state(self.binding.trainer):
                    for parameter, state in optimizer.state.items():
                        optimizer.state[parameter] = _off_the_file(state)

            return load_state_dict

        return lean


def _own_checkpoint(output_dir: Any = None, _internal_call: bool = False, **_: Any) -> Path | None:
    """Return the folder where ``save_model`` was called with these arguments to begin a checkpoint of the Trainer's.

    ``_internal_call`` is stock's own (5.8.1 to 5.23.0): weights that a user saves into a checkpoint leave its state.
    """
    is_checkpoint = _internal_call and Path(output_dir or "").name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
    return Path(output_dir) if is_checkpoint else None


def _remove_shadowing_weights(folder: Path, *, has_adapters: bool) -> None:
    """Remove a whole model that an earlier run left where stock would read it before what was saved now."""
    if has_adapters or (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        (folder / WEIGHTS_NAME).unlink(missing_ok=True)
    if has_adapters:
        (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)


def _engine_saves(trainer: Any) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def _maps_state(trainer: Any) -> bool:
    return bool(trainer.args.device.type != "cpu")


def _checked_size(max_shard_bytes: int | str) -> int:
    try:
        size_bytes = parse_bytes(max_shard_bytes)
    except ValueError as error:
        raise ValueError(str(error).replace("size=", "max_shard_bytes=", 1)) from error
    if size_bytes == 0:
        raise ValueError(
            f"max_shard_bytes={max_shard_bytes!r} leaves a file no room; expected 1 byte or more. "
            "Write, for example, max_shard_bytes='1GB'."
        )
    return size_bytes


LeanCheckpointCallback = ShardedCheckpointCallback  # its former name
