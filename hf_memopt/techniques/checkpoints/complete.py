"""Make sure that a run resumes from complete checkpoints only.

Stock writes ``trainer_state.json`` last (transformers 5.8.1 to 5.23.0; a test pins the order), but over whatever an
earlier run left in a folder of the same name, and it resumes from the highest step without checking the folder. A run
that is killed while it saves leaves its weights beside the earlier run's optimizer and step. Here the training state of
the earlier run is removed before the first new file is written, so ``trainer_state.json`` belongs to one run only.

Limitations: a mixture that a stock run left looks complete. Processes do not wait for each other while they save: if
all are killed in the moment in which the first of them starts or ends to save, the random state of another one may be
an earlier run's.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.plain_data import parse_object, shown
from hf_memopt.techniques.microbatching.limits import LIMITS_FILE

__all__ = ["checkpoint_to_resume", "remove_training_state", "why_incomplete"]

RESUMED_FILES = ("optimizer.pt", "scheduler.pt", "rng_state*.pth")
"""What stock resumes from beside the weights and ``trainer_state.json``; ``save_only_model`` saves none of them."""


def remove_training_state(folder: Path, processes: int = 1) -> None:
    """Remove what an earlier run left of its training state in a checkpoint's folder, which makes it incomplete.

    ``trainer_state.json`` goes first. The rest goes too because this run may write less: with ``save_only_model``, with
    fewer processes or without a loss scale. Weights stay until they are written over.

    Args:
        folder: of the checkpoint, which need not exist.
        processes: of this run. Those after the first may have written their random state and the state of their stream
            already.
    """
    written_by_others = {
        name for rank in range(1, processes) for name in (f"rng_state_{rank}.pth", f"memopt_stream_{rank}.json")
    }
    for pattern in (TRAINER_STATE_NAME, *RESUMED_FILES, "scaler.pt", LIMITS_FILE, "memopt_stream_*.json"):
        for path in folder.glob(pattern):
            if path.name not in written_by_others:
                path.unlink()


def why_incomplete(folder: Path, *, check_files: bool = True) -> str | None:
    """Return what a checkpoint's folder lacks, or None if it is complete.

    Args:
        folder: of the checkpoint.
        check_files: whether to look for the other files too, which FSDP and DeepSpeed name their own way.
    """
    try:
        state = json.loads((folder / TRAINER_STATE_NAME).read_bytes())  # not strict: a logged loss may be NaN
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE_NAME}, which is written last"
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        return f"its {TRAINER_STATE_NAME} was not written to its end"
    shards: list[str] = []
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
        try:
            shards = _shards(index)
        except ValueError as error:
            return f"its {index.name} cannot be read: {error}"
    if not check_files:
        return None
    # What follows happens where deleting a checkpoint was interrupted; stock then trains on with a new optimizer.
    missing = [name for name in RESUMED_FILES if not any(folder.glob(name))]
    if len(missing) == len(RESUMED_FILES):  # save_only_model
        missing = []
    missing += [name for name in shards if not (folder / name).is_file()]
    return f"it has no {missing[0]}" if missing else None


def _shards(index: Path) -> list[str]:
    """Return the names of the files of weights that an index names; stock would follow them out of the folder.

    Raises:
        ValueError: it is no index, or names a file elsewhere. The message is a clause about "it".
    """
    names = parse_object(index.read_bytes()).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"it has weight_map={shown(names)}, which names no files")
    for name in names.values():
        if name != Path(name).name:
            raise ValueError(f"it has the file {shown(name)}, which is not one of its folder")
    return sorted(set(names.values()))


def checkpoint_to_resume(asked: Any, output_dir: str, *, check_files: bool = True) -> Any:
    """Return what ``Trainer.train`` is to resume from: what was asked for, but never an incomplete folder.

    If True is asked for, i.e. the last checkpoint, and that one is incomplete, the last complete one is returned, with
    a warning. A folder that is given by name only has to be written to its end: files may be missing on purpose.

    Args:
        asked: ``resume_from_checkpoint`` as ``Trainer.train`` takes it.
        output_dir: of the training arguments.
        check_files: see ``why_incomplete``.

    Raises:
        ValueError: the folder that was asked for is incomplete, or every checkpoint of ``output_dir`` is.
    """
    if asked is not True and not isinstance(asked, (str, os.PathLike)):
        return asked
    refused = None
    for folder in _checkpoints(Path(output_dir)) if asked is True else [Path(asked)]:
        reason = why_incomplete(folder, check_files=check_files and asked is True) if folder.is_dir() else None
        if reason is None:
            if refused is not None:
                warnings.warn(
                    f"resume_from_checkpoint=True goes back to {folder.name}: {refused}. To choose it without this "
                    f"warning, call trainer.train(resume_from_checkpoint={str(folder)!r})",
                    stacklevel=4,
                )
            return asked if refused is None else str(folder)
        refused = refused or f"{folder.name} is incomplete, {reason}"
    if refused is None:  # no checkpoint at all, which stock refuses
        return asked
    raise ValueError(
        f"resume_from_checkpoint={asked!r} finds no complete checkpoint: {refused}; expected one that was written to "
        "its end. Start anew: trainer.train()"
    )


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders of checkpoints as stock names them, the last step first."""
    name = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = output_dir.iterdir() if output_dir.is_dir() else ()
    steps = {path: int(match[1]) for path in found if (match := name.fullmatch(path.name)) and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path], reverse=True)
