"""Keep where a bucketed stream stands in the Trainer's checkpoints, so that a resumed run need not read it again.

Stock reads again what was trained on and throws it away, however much that is. ``ignore_data_skip=True`` is its way to
leave that out, and its data then starts over; that of an attached stream goes on from the checkpoint instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from hf_memopt.binding.undo import UndoHandle, is_overridden, override_method, remove_all, undo_all
from hf_memopt.plain_data import parse_object
from hf_memopt.whole_files import warn_unwritten, write_whole

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from hf_memopt.batching.views.bucketed_stream import BucketedStream


def keep_in_checkpoints(trainer: Trainer, stream: BucketedStream) -> UndoHandle:
    """Write the stream's state into each checkpoint of a trainer, and read it in a run that resumes.

    It is written with the weights, so the checkpoint's manifest has it.
    """
    purpose = f"state of stream {id(stream)}"
    if is_overridden(trainer, "save_model", purpose):
        return undo_all()
    unwritten: set[str] = set()  # the causes of failed writes that were already warned of
    begun = {"step": 0, "turn": 0}  # of the run: where it went on

    def save_model(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = before(*args, **kwargs)
        folder = Path(args[0] if args else kwargs.get("output_dir") or "")
        # private, and the same in transformers 5.8.1 to 5.23.0: else a user saves weights
        if kwargs.get("_internal_call") and folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
            since = trainer.state.global_step - begun["step"]
            turn = begun["turn"] + since * trainer.args.gradient_accumulation_steps
            _write_state(trainer.args, stream.state_dict(position=turn), folder, unwritten)
        return found

    def train(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked = args[0] if args else kwargs.get("resume_from_checkpoint")
        folder = asked if trainer.args.ignore_data_skip else None
        if folder is True:
            folder = get_last_checkpoint(trainer.args.output_dir or "")  # type: ignore[no-untyped-call]
        state = _saved_state(trainer, folder or None)
        stream.load_state_dict(state)
        begun.update({"step": 0, "turn": 0} if state is None else {"step": _step_of(folder), "turn": state["turn"]})
        handles = [] if state is None else [_seed_workers_apart(trainer, state["turn"])]
        try:
            return before(*args, **kwargs)
        finally:
            remove_all(handles)
            stream.load_state_dict(None)

    return undo_all(
        override_method(trainer, "save_model", save_model, purpose=purpose), override_method(trainer, "train", train)
    )


def _seed_workers_apart(trainer: Trainer, turn: int) -> UndoHandle:
    """Let the DataLoader of a run that goes on draw the seed of its workers from a generator of its own.

    It would draw it from torch's random numbers after stock has restored those of the checkpoint, and dropout would
    draw others than in the straight run, which drew that seed when it began.
    """

    def get_train_dataloader(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = before(*args, **kwargs)
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's adapter iterates over the one it holds
        inner.generator = torch.Generator().manual_seed(trainer.args.seed + turn)
        return loader

    return override_method(trainer, "get_train_dataloader", get_train_dataloader)


def _write_state(args: TrainingArguments, state: dict[str, Any], folder: Path, unwritten: set[str]) -> None:
    """Write the state after the batches that were trained on, one file for each process."""
    file = folder / _file_name(args)
    try:
        write_whole(file, json.dumps(state))
    except OSError as error:
        warn_unwritten(file, error, "a run with ignore_data_skip=True cannot resume here", unwritten)


def _saved_state(trainer: Trainer, folder: str | os.PathLike[str] | None) -> Any:
    """Return the state that this process wrote into a checkpoint; None of a run that does not resume.

    Raises:
        ValueError: it cannot be read. To start the stream over would train on the same examples again.
    """
    if not folder:
        return None
    file = Path(folder) / _file_name(trainer.args)
    try:
        return parse_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"ignore_data_skip=True cannot resume: {file} could not be read ({type(error).__name__}: {error}); "
            "expected where the stream of this process stands. To read again what was trained on, train with "
            "TrainingArguments(..., ignore_data_skip=False)"
        ) from error


def _step_of(folder: Any) -> int:
    """Return the step that a checkpoint was saved after."""
    step: int = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME)).global_step
    return step


def _file_name(args: TrainingArguments) -> str:
    return f"memopt_stream_{args.process_index}.json"
