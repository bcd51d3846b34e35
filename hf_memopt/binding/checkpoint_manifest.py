"""Give each checkpoint a manifest, and resume from whole checkpoints only.

``memopt_manifest.json`` is written last: when all processes have written their files and these are on the disk. It has
the run, the step, the number of processes, and size and CRC32 of each file, so it finds whatever is missing, cut off,
changed, or of another run or step, whoever wrote it. While a checkpoint is being saved its manifest has the run alone:
a second run that saves into the same folder meanwhile ends in no manifest for either of them.

The trade: files are flushed to the disk and read back once, by several threads, when they are saved, and read once more
before a run resumes (``python benchmarks/checkpoint_manifest.py``).

It is written before stock deletes older checkpoints, and again where a callback changed files in ``on_save``.

Limitations: ``load_best_model_at_end`` reads without a check. Two runs that save into one folder at the same time are
found out only where the first to begin is not killed before its end.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.binding.checkpoint_names import check_names, tell_pushed_names, under_own_names
from hf_memopt.binding.undo import UndoHandle, is_overridden, override_method, undo_all
from hf_memopt.notices import notify
from hf_memopt.plain_data import Count, CountOrZero, check_fields, from_object, parse_object, shown
from hf_memopt.whole_files import write_whole

MANIFEST = "memopt_manifest.json"

logger = getLogger(__name__)

OF_OTHER_GROUPS = "loaded state dict "  # how torch begins to say that parameter groups do not fit (2.6 to 2.13)
UNFINISHED = ".memopt-*"  # of write_whole
STALE = (
    *(TRAINER_STATE_NAME, "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "global_step*"),
    *("model*.safetensors*", "pytorch_model*", "adapter_model*", "memopt_*.json", UNFINISHED),
)
"""What stock, FSDP, DeepSpeed or this package would resume from, also where the run that saves now writes less."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint was when it was saved; ``files`` are size and CRC32 by path below its folder.

    ``trained``: number and CRC32 of the places in the model of what the optimizer steps, and of its names; "" where it
    has copies. A second adapter changes the places, a wrapper the names; where others are trained both differ.
    """

    run: str
    step: CountOrZero
    world_size: Count
    files: Mapping[str, str]
    trained: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


# ---- Writing --------------------------------------------------------------------------------------------------------


def keep_manifests(trainer: Trainer) -> UndoHandle:
    """Write a manifest with each checkpoint of a trainer, and let it resume from whole ones only; for ``attach``."""
    if is_overridden(trainer, "save_model", MANIFEST):
        return undo_all()
    tell_pushed_names(trainer)
    saving = _Saving(trainer)

    def train(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        folder, is_writer = trainer.args.output_dir or "", trainer.args.should_save
        for pattern in (UNFINISHED, f"{PREFIX_CHECKPOINT_DIR}-*/{UNFINISHED}") if is_writer else ():
            for left in Path(folder).glob(pattern):
                with suppress(OSError):
                    left.unlink()
        asked = args[0] if args else kwargs.get("resume_from_checkpoint")
        found = checkpoint_to_resume(asked, folder, is_reader=is_writer)
        if found is not asked:  # a subclass may take it by name only, or not at all
            args, kwargs = ((found, *args[1:]), kwargs) if args else (args, {**kwargs, "resume_from_checkpoint": found})
        check = partial(_check_trained, trainer, found)
        try:
            with override_method(trainer.callback_handler, "on_train_begin", check):  # by then there is an optimizer
                return before(*args, **kwargs)
        except ValueError as error:
            if not (found and str(error).startswith(OF_OTHER_GROUPS)):
                raise
            raise _other_parameters(trainer, found, str(error)) from error

    return undo_all(
        override_method(trainer, "save_model", saving.save_model, purpose=MANIFEST),
        override_method(trainer, "_save_checkpoint", saving.save_checkpoint),
        override_method(trainer.callback_handler, "on_save", saving.on_save),
        override_method(trainer, "train", train),
    )


def _check_trained(trainer: Any, found: Any, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse the optimizer of a run that trained as many others: its state has places, and no names."""
    folder = _checkpoints(Path(trainer.args.output_dir))[0] if found is True else Path(found or "")
    if found:
        check_names(trainer, folder)
    if found and (folder / MANIFEST).is_file() and any(folder.glob("optimizer*")):  # none under save_only_model
        saved, now = from_object(Manifest, parse_object((folder / MANIFEST).read_bytes())).trained, _trained(trainer)
        if "" not in (saved, now) and not {*saved.split(", ")[1:]} & {*now.split(", ")[1:]}:  # neither places nor names
            raise _other_parameters(trainer, found, f"{saved}, and not {now}")
    return before(*args, **kwargs)


def _trained(trainer: Any) -> str:
    named = [*trainer.model.named_parameters()]
    groups = getattr(trainer.optimizer, "param_groups", ())
    held = [id(weight) for group in groups for weight in group["params"]]
    places = {id(weight): place for place, (_, weight) in enumerate(named)}
    if not held or not places.keys() >= {*held}:
        return ""
    names = {id(weight): name for name, weight in named}
    of_places, of_names = (zlib.crc32(json.dumps([known[one] for one in held]).encode()) for known in (places, names))
    return f"{len(held)} parameters, CRC32 of their places {of_places:08x}, names {of_names:08x}"


def _other_parameters(trainer: Any, found: Any, why: str) -> ValueError:
    held = sum(len(group["params"]) for group in trainer.optimizer.param_groups)
    return ValueError(
        f"resume_from_checkpoint={found!r} has the optimizer of a run that trained others than the {held} "
        f"parameters of this one ({why}); expected the same, frozen ones frozen. Freeze what that run froze, "
        "or begin a run with its weights: from_pretrained(checkpoint), and trainer.train()"
    )


class _Saving:
    """A checkpoint of one trainer on its way from the first file to the manifest.

    Private, and the same in transformers 5.8.1 to 5.23.0: all processes call ``_save_checkpoint``, its first act is
    ``save_model(folder, _internal_call=True)``, the folder below ``_get_output_dir(trial)``, and its last before it
    deletes old checkpoints is, where files are saved, ``state.save_to_json`` (a test pins the order).
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.run = trainer, secrets.token_hex(8)
        self.folder: Path | None = None  # of a checkpoint that is being saved, only where files are
        self.is_ended = False
        self.saved: Mapping[Path, tuple[int, int]] = {}  # when the last checkpoint ended, here
        self.earlier: dict[Path, dict[Path, tuple[int, int]]] = {}  # what a folder had when its checkpoint began

    def save_model(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (folder := own_checkpoint(*args, **kwargs)) is None:
            return before(*args, **kwargs)
        if self.trainer.args.should_save:
            self.begin(folder)
        self.trainer.accelerator.wait_for_everyone()  # what an earlier run left is gone
        with under_own_names(self.trainer):
            return before(*args, **kwargs)

    def save_checkpoint(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.is_ended, trial = False, args[1] if len(args) > 1 else kwargs.get("trial")
        folder = Path(self.trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}")
        self.earlier = {folder: _stamps(folder)}
        self.trainer.accelerator.wait_for_everyone()  # a subclass may write files of its own first
        try:
            with override_method(self.trainer.state, "save_to_json", self.save_to_json):
                before(*args, **kwargs)
            if not self.is_ended:  # the process that ends it waits for this one
                self.trainer.accelerator.wait_for_everyone()
        finally:
            self.folder, self.earlier = None, {}

    def save_to_json(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)
        if self.folder is not None:
            self.trainer.accelerator.wait_for_everyone()
            self.is_ended = True
            self.end(self.folder)

    def on_save(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        control, saved, self.saved = before(*args, **kwargs), self.saved, {}
        for path in [path for path in saved if path.name == MANIFEST]:
            found = _stamps(path.parent)
            if found != saved and found.get(path) == saved[path]:  # else another run saves into it by now
                write_whole(path, self.manifest(path.parent))
        return control

    def manifest(self, folder: Path) -> str:
        """Return the manifest of the files below a folder, which are on the disk then."""
        files = _sums(folder, is_flushing=True)
        size, trained = self.trainer.args.world_size, _trained(self.trainer)
        found = Manifest(self.run, self.trainer.state.global_step, size, files, trained)
        return json.dumps(asdict(found), indent=1)

    def begin(self, folder: Path) -> None:
        """Make a folder's manifest that of an unfinished checkpoint, and remove what an earlier run left."""
        earlier = self.earlier.get(folder, _stamps(folder))
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / MANIFEST, "ab") as file:
            file.truncate(0)
            file.write(self.run.encode())
        remove_stale(folder, earlier)
        _flush(folder / MANIFEST, folder, folder.parent)
        self.folder = folder

    def end(self, folder: Path) -> None:
        """Write the manifest, unless another run has saved into the folder since ``begin``."""
        path, args = folder / MANIFEST, self.trainer.args
        manifest = self.manifest(folder)
        self.folder, self.saved = None, {}
        if path.read_text() == self.run:
            write_whole(path, manifest)
            self.saved = _stamps(folder)
            return
        write_whole(path, "")
        warnings.warn(
            f"output_dir={args.output_dir!r} is that of another run too, which saved {folder.name} at the same time, "
            "so no run will resume from that; expected a folder for each run. "
            "Pass TrainingArguments(output_dir=...)",
            stacklevel=2,
        )


def own_checkpoint(output_dir: Any = None, _internal_call: bool = False, **_: Any) -> Path | None:
    """Return the folder if ``save_model`` was called with these arguments to begin a checkpoint, else None.

    ``_internal_call`` is stock's own (5.8.1 to 5.23.0): weights that a user saves into a checkpoint leave its state.
    """
    is_checkpoint = _internal_call and Path(output_dir or "").name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
    return Path(output_dir) if is_checkpoint else None


def remove_stale(folder: Path, earlier: Mapping[Path, tuple[int, int]]) -> None:
    """Remove what stock would read beside what is saved now, of the files that are as they were ``earlier``."""
    written = [folder / MANIFEST, *(path for path, stamp in _stamps(folder).items() if earlier.get(path) != stamp)]
    kept = {one for path in written for one in (path, *path.parents)}
    for path in {path for pattern in STALE for path in folder.glob(pattern)} - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _flush(*paths: Path) -> None:
    """Write files or folders to the disk."""
    for path in paths:
        if os.name != "nt" or path.is_file():  # Windows opens no folder, and writes none that is opened to be read
            descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of the last change of each file below a folder."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}


def _sums(folder: Path, names: Container[str] | None = None, *, is_flushing: bool = False) -> dict[str, str]:
    """Return size and CRC32 of the files below a folder, of all but the manifest or of those in ``names``."""
    below = sorted(folder.rglob("*"))
    files = {path.relative_to(folder).as_posix(): path for path in below if path.is_file() and path.name != MANIFEST}
    files = {name: path for name, path in files.items() if names is None or name in names}
    folders = [folder, *(path for path in below if path.is_dir())]
    with ThreadPoolExecutor(32) as pool:  # CRC32 lets other threads run, and flushing waits for the disk
        flushed = pool.map(_flush, [*files.values(), *folders] if is_flushing else ())
        sums = dict(zip(files, pool.map(_sum, files.values()), strict=True))
        list(flushed)  # raises what flushing raised
    return sums


def _sum(path: Path) -> str:
    crc, part = 0, memoryview(bytearray(2**18))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(part):
            crc = zlib.crc32(part[:count], crc)
        return f"{file.tell()} bytes, CRC32 {crc:08x}"


# ---- Resuming -------------------------------------------------------------------------------------------------------


def checkpoint_to_resume(asked: Any, output_dir: str, *, is_reader: bool = True) -> Any:
    """Return what ``Trainer.train`` is to resume from: what was asked for, but never a checkpoint that is not whole.

    If True is asked for, i.e. the last checkpoint, and that one is not whole, the last one that is is returned, with a
    warning. A checkpoint without a manifest is resumed with a notice. All processes of a run return the same.
    """
    if asked is not True and not isinstance(asked, (str, os.PathLike)):
        return asked
    refused = None
    for folder in broadcast_object_list([_checkpoints(Path(output_dir)) if asked is True else [Path(asked)]])[0]:
        is_read = is_reader and folder.is_dir()
        reason = next(filter(None, gather_object([why_not_whole(folder) if is_read else None])), None)
        if reason is None:
            if is_read and not (folder / MANIFEST).exists():
                notify(
                    logger, f"{folder} has no {MANIFEST}, as of stock or hf_memopt 0.3.0: its files were not checked"
                )
            if refused is not None:
                warnings.warn(
                    f"resume_from_checkpoint=True goes back to {folder.name}: {refused}. To choose it without this "
                    f"warning, call trainer.train(resume_from_checkpoint={str(folder)!r})",
                    stacklevel=4,
                )
            return asked if refused is None else str(folder)
        refused = refused or f"{folder.name} is not whole, {reason}"
    if refused is None:  # no checkpoint at all, which stock refuses
        return asked
    has_manifest = asked is not True and (Path(asked) / MANIFEST).exists()
    action = f"Name another, or delete {MANIFEST} to skip the check" if has_manifest else "Start anew: trainer.train()"
    raise ValueError(
        f"resume_from_checkpoint={asked!r} finds no whole checkpoint: {refused}; expected the files as they were "
        f"saved. {action}"
    )


def why_not_whole(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint's folder, as a clause, or None if it is whole or cannot be checked."""
    if not (folder / MANIFEST).exists():
        if not (folder / TRAINER_STATE_NAME).is_file():
            return f"it has no {TRAINER_STATE_NAME}, which stock writes last"
        return _why_foreign(folder)
    try:
        saved = from_object(Manifest, parse_object((folder / MANIFEST).read_bytes())).files
    except (OSError, ValueError):
        return f"its {MANIFEST} was not written to its end"
    found = _sums(folder, saved)
    for name, expected in saved.items():
        if name not in found:
            return f"it has no {name}"
        if found[name] != expected:
            return f"its {name} has {found[name]}, and was saved with {expected}"
    return _why_foreign(folder)


def _why_foreign(folder: Path) -> str | None:
    """Return why an index cannot be read or which file elsewhere it names: stock would follow it out of the folder."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file() or (folder / SAFE_WEIGHTS_NAME).is_file():
        return None
    try:
        names = parse_object(index.read_bytes()).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"it has weight_map={shown(names)}, which names no files")
        for name in names.values():
            if name != Path(name).name:
                raise ValueError(f"it has the file {shown(name)}, which is not one of its folder")
    except ValueError as error:
        return f"its {index.name} cannot be read: {error}"
    return None


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders of checkpoints as stock names them, the last step first."""
    name = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = output_dir.iterdir() if output_dir.is_dir() else ()
    steps = {path: int(match[1]) for path in found if (match := name.fullmatch(path.name)) and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path], reverse=True)
