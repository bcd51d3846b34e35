"""Keep where a bucketed stream stands in the Trainer's checkpoints, so that a resumed run need not read it again.

Stock reads again what was trained on and throws it away, however much that is. ``ignore_data_skip=True`` is its way to
leave that out, and its data then starts over; that of an attached stream goes on from the checkpoint instead.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from hf_memopt.binding.handles import UndoHandle, is_overridden, override_method, remove_all, undo_all
from hf_memopt.plain_data import parse_object
from hf_memopt.whole_files import warn_unwritten, write_whole

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from hf_memopt.batching.views.bucketed_stream import BucketedStream

__all__ = ["keep_in_checkpoints"]


def keep_in_checkpoints(trainer: Trainer, stream: BucketedStream) -> UndoHandle:
    """Write the stream's state into each checkpoint of a trainer, and read it in a run that resumes.

    It is written with the weights: ``trainer_state.json`` comes last, and with it a checkpoint counts as complete.
    """
    purpose = f"state of stream {id(stream)}"
    if is_overridden(trainer, "save_model", purpose):
        return undo_all()
    unwritten: set[str] = set()  # the causes of failed writes that were already warned of

    def saving(before: Callable[..., Any]) -> Callable[..., Any]:
        def save_model(output_dir: Any = None, _internal_call: bool = False, **kwargs: Any) -> Any:
            found = before(output_dir, _internal_call, **kwargs)
            if _internal_call and Path(output_dir or "").name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
                _write_state(trainer, stream, Path(output_dir), unwritten)
            return found

        return save_model

    def going_on(before: Callable[..., Any]) -> Callable[..., Any]:
        def train(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            folder = resume_from_checkpoint if trainer.args.ignore_data_skip else None
            if folder is True:
                folder = get_last_checkpoint(trainer.args.output_dir or "")  # type: ignore[no-untyped-call]
            state = _saved_state(trainer, folder or None)
            stream.load_state_dict(state)
            handles = [] if state is None else [_seed_workers_apart(trainer, state["turn"])]
            try:
                return before(resume_from_checkpoint, *args, **kwargs)
            finally:
                remove_all(handles)
                stream.load_state_dict(None)

        return train

    return undo_all(
        override_method(trainer, "save_model", saving, purpose=purpose), override_method(trainer, "train", going_on)
    )


def _seed_workers_apart(trainer: Trainer, turn: int) -> UndoHandle:
    """Let the DataLoader of a run that goes on draw the seed of its workers from a generator of its own.

    It would draw it from torch's random numbers after stock has restored those of the checkpoint, and dropout would
    draw others than in the straight run, which drew that seed when it began.
    """

    def drawing_apart(before: Callable[..., Any]) -> Callable[..., Any]:
        def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
            loader = before(*args, **kwargs)
            inner = getattr(loader, "base_dataloader", loader)  # accelerate's adapter iterates over the one it holds
            inner.generator = torch.Generator().manual_seed(trainer.args.seed + turn)
            return loader

        return get_train_dataloader

    return override_method(trainer, "get_train_dataloader", drawing_apart)


def _write_state(trainer: Trainer, stream: BucketedStream, folder: Path, unwritten: set[str]) -> None:
    """Write the state after the batches that were trained on, one file for each process."""
    batches = trainer.state.global_step * trainer.args.gradient_accumulation_steps
    file = folder / _file_name(trainer.args)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # where the first process has not made it yet
        write_whole(file, json.dumps(stream.state_dict(position=batches)))
    except OSError as error:
        warn_unwritten(file, error, "a run that resumes here reads again what was trained on", unwritten)


def _saved_state(trainer: Trainer, folder: str | os.PathLike[str] | None) -> Any:
    """Return the state that this process wrote into a checkpoint, or None, with a warning where there is none."""
    if not folder:
        return None
    file = Path(folder) / _file_name(trainer.args)
    try:
        return parse_object(file.read_bytes())
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{file} could not be read ({type(error).__name__}: {error}), so with ignore_data_skip=True the stream "
            "starts over. To go on where the checkpoint stands and read again what was trained on, train with "
            "TrainingArguments(..., ignore_data_skip=False)",
            stacklevel=3,
        )
        return None


def _file_name(args: TrainingArguments) -> str:
    return f"memopt_stream_{args.process_index}.json"
