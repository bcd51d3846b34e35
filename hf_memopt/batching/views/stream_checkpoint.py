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

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from hf_memopt.binding.handles import UndoHandle, override_method, undo_all
from hf_memopt.plain_data import parse_object
from hf_memopt.whole_files import warn_unwritten, write_whole

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from hf_memopt.batching.views.bucketed_stream import BucketedStream

__all__ = ["keep_in_checkpoints"]


def keep_in_checkpoints(trainer: Trainer, stream: BucketedStream) -> UndoHandle:
    """Write the stream's state into each checkpoint of a trainer, and read it in a run that resumes."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, _StreamStateCallback) and callback.stream is stream:
            return undo_all()
    callback = _StreamStateCallback(stream)
    trainer.add_callback(callback)

    def going_on(before: Callable[..., Any]) -> Callable[..., Any]:
        def train(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            folder = resume_from_checkpoint if trainer.args.ignore_data_skip else None
            if folder is True:
                folder = get_last_checkpoint(trainer.args.output_dir or "")  # type: ignore[no-untyped-call]
            stream.load_state_dict(_saved_state(trainer, folder or None))
            try:
                return before(resume_from_checkpoint, *args, **kwargs)
            finally:
                stream.load_state_dict(None)

        return train

    def remove() -> None:
        trainer.pop_callback(callback)

    return undo_all(UndoHandle(remove), override_method(trainer, "train", going_on))


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


class _StreamStateCallback(TrainerCallback):
    """Write the state of a stream into each checkpoint, one file for each process."""

    def __init__(self, stream: BucketedStream) -> None:
        self.stream = stream
        self._unwritten: set[str] = set()  # the causes of failed writes that were already warned of

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the state after the batches that were trained on."""
        folder = Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not folder.is_dir():
            return
        batches = state.global_step * args.gradient_accumulation_steps
        file = folder / _file_name(args)
        try:
            write_whole(file, json.dumps(self.stream.state_dict(position=batches)))
        except OSError as error:
            warn_unwritten(file, error, "a run that resumes here reads again what was trained on", self._unwritten)
