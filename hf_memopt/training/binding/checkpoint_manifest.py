"""Give each checkpoint a manifest, and resume from whole checkpoints only.

``memopt_manifest.json`` is written last, when the files of all processes are on the disk: before stock deletes older
checkpoints, and again where a callback changed files in ``on_save``. It has size and CRC32 of each file, so it finds
what is missing, cut off, changed, or of another run or step. While a checkpoint is being saved its manifest has the run
alone: a second run that saves into the same folder meanwhile ends in no manifest for either of them.

Files are flushed and read back once, by several threads, when they are saved, and read once more before a run resumes
(``python benchmarks/checkpoint_manifest.py``). ``load_best_model_at_end`` reads without a check.

Weights are saved under the names that the model trains under. transformers loads the hub's names of some models under
others (BERT's ``LayerNorm.gamma``, ViT, experts) and writes the hub's again, which the Trainer does not find when it
resumes (https://github.com/huggingface/transformers/issues/43701 and 48805; seen in 5.23.0).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from safetensors import safe_open
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_memopt.notices import notify
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.undo import UndoHandle, is_overridden, nothing_to_undo, override_method, undo_all
from hf_memopt.whole_files import write_whole

MANIFEST = "memopt_manifest.json"

logger = getLogger(__name__)

UNFINISHED = ".memopt-*"  # of write_whole
STALE = (
    *(TRAINER_STATE_NAME, "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "global_step*"),
    *("model*.safetensors*", "pytorch_model*", "adapter_model*", "memopt_*.json", UNFINISHED),
)
"""What stock, FSDP, DeepSpeed or this package would resume from, also where the run that saves now writes less."""


# ---- Writing --------------------------------------------------------------------------------------------------------


def keep_manifests(trainer: Trainer) -> UndoHandle:
    """Write a manifest with each checkpoint of a trainer, and let it resume from whole ones only; for ``attach``."""
    if is_overridden(trainer, "_save_checkpoint", MANIFEST):
        return undo_all()
    saving = _Saving(trainer)

    def train(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        folder, is_writer = Path(trainer.args.output_dir or ""), trainer.args.should_save
        left = [*folder.glob(UNFINISHED), *folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{UNFINISHED}")]
        for path in left if is_writer else ():
            path.unlink(missing_ok=True)
        asked = args[0] if args else kwargs.get("resume_from_checkpoint")
        found = checkpoint_to_resume(asked, folder, is_reader=is_writer)
        if found is not asked:  # a subclass may take it by name only, or not at all
            args, kwargs = ((found, *args[1:]), kwargs) if args else (args, {**kwargs, "resume_from_checkpoint": found})
        return before(*args, **kwargs)

    def load(before: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint is not None:
            _check_names(trainer, Path(checkpoint))
            _check_trained(trainer, Path(checkpoint))
        return before(checkpoint, *args, **kwargs)

    return undo_all(
        override_method(trainer, "_save_checkpoint", saving.save_checkpoint, purpose=MANIFEST),
        override_method(trainer.callback_handler, "on_save", saving.on_save),
        override_method(trainer, "_load_optimizer_and_scheduler", load),
        override_method(trainer, "train", train),
    )


class _Saving:
    """Private, and the same in transformers 5.8.1 to 5.23.0: all processes call ``_save_checkpoint``, its folder is
    below ``_get_output_dir(trial)``, and its last act before it deletes old checkpoints is, where files are saved,
    ``state.save_to_json`` (a test pins the order).
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.run = trainer, secrets.token_hex(8)
        self.saved: dict[Path, tuple[int, int]] = {}  # when the last checkpoint ended, here

    def save_checkpoint(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        trainer: Any = self.trainer
        trial = args[1] if len(args) > 1 else kwargs.get("trial")
        folder = Path(trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
        is_ended = False

        def save_to_json(save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            nonlocal is_ended
            save(*args, **kwargs)
            if trainer.args.should_save and not is_ended:
                is_ended = True
                trainer.accelerator.wait_for_everyone()
                self.end(folder)

        if trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MANIFEST).write_text(self.run)
            for path in {path for pattern in STALE for path in folder.glob(pattern)} - {folder / MANIFEST}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        trainer.accelerator.wait_for_everyone()  # what an earlier run left is gone
        with _under_own_names(trainer), override_method(trainer.state, "save_to_json", save_to_json):
            before(*args, **kwargs)
        if not is_ended:  # the process that ends it waits for this one
            trainer.accelerator.wait_for_everyone()

    def end(self, folder: Path) -> None:
        """Write the manifest, unless another run has saved into the folder since this one began."""
        path, manifest = folder / MANIFEST, self.manifest(folder)
        if path.read_text() == self.run:
            write_whole(path, manifest)
            self.saved = _stamps(folder)
            return
        write_whole(path, "")
        warnings.warn(
            f"output_dir={self.trainer.args.output_dir!r} is that of another run too, which saved {folder.name} at the "
            "same time, so no run will resume from that; expected a folder for each run. "
            "Pass TrainingArguments(output_dir=...)",
            stacklevel=2,
        )

    def on_save(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        control, saved, self.saved = before(*args, **kwargs), self.saved, {}
        for path in [path for path in saved if path.name == MANIFEST]:
            found = _stamps(path.parent)
            if found != saved and found.get(path) == saved[path]:  # else another run saves into it by now
                write_whole(path, self.manifest(path.parent))
        return control

    def manifest(self, folder: Path) -> str:
        """Return the manifest of the files below a folder, which are on the disk then."""
        with ThreadPoolExecutor(32) as pool:  # CRC32 lets other threads run, and flushing waits for the disk
            paths = [folder.parent, folder, *folder.rglob("*")]
            flushed, sums = pool.map(_flush, paths), _sums(folder, pool)
            list(flushed)  # raises what flushing raised
        args, state = self.trainer.args, self.trainer.state
        found = {"run": self.run, "step": state.global_step, "world_size": args.world_size, "files": sums}
        return json.dumps({**found, "trained": _trained(self.trainer)}, indent=1)


def _plain_model(trainer: Any) -> PreTrainedModel | None:
    """Return the model whose own weights a checkpoint has; None for adapters and for a module of the user's."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return model if isinstance(model, PreTrainedModel) and not getattr(model, "peft_config", None) else None


def _under_own_names(trainer: Any) -> UndoHandle:
    """Let the model be saved under the names that it trains under, until the handle is removed."""
    model = _plain_model(trainer)
    if model is None or not versions.takes(model.save_pretrained, "save_original_format"):
        return nothing_to_undo()  # or of a user's class, which saves in its own way
    own = {"save_original_format": False}
    return override_method(model, "save_pretrained", lambda before, *args, **kwargs: before(*args, **own | kwargs))


def _flush(path: Path) -> None:
    """Write a file or folder to the disk."""
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


def _sums(folder: Path, pool: ThreadPoolExecutor) -> dict[str, str]:
    """Return size and CRC32 of the files below a folder, of all but the manifest."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return dict(zip((path.relative_to(folder).as_posix() for path in found), pool.map(_sum, found), strict=True))


def _sum(path: Path) -> str:
    crc, part = 0, memoryview(bytearray(2**18))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(part):
            crc = zlib.crc32(part[:count], crc)
        return f"{file.tell()} bytes, CRC32 {crc:08x}"


# ---- Resuming -------------------------------------------------------------------------------------------------------


def checkpoint_to_resume(asked: Any, output_dir: Path, *, is_reader: bool) -> Any:
    """Return what ``Trainer.train`` is to resume from: what was asked for, but never a checkpoint that is not whole.

    For True the last whole one is returned, with a warning if it is not the last. One without a manifest is resumed
    with a notice. All processes of a run return the same.
    """
    if asked is not True and not isinstance(asked, (str, os.PathLike)):
        return asked
    refused = None
    for folder in broadcast_object_list([_checkpoints(output_dir) if asked is True else [Path(asked)]])[0]:
        is_read = is_reader and folder.is_dir()
        reason = next(filter(None, gather_object([why_not_whole(folder) if is_read else None])), None)
        if reason is not None:
            refused = refused or f"{folder.name} is not whole, {reason}"
            continue
        if is_read and not (folder / MANIFEST).exists():
            notify(logger, f"{folder} has no {MANIFEST}, as of stock or hf_memopt 0.3.0: its files were not checked")
        if refused is None:
            return asked
        warnings.warn(
            f"resume_from_checkpoint=True goes back to {folder.name}: {refused}. To choose it without this "
            f"warning, call trainer.train(resume_from_checkpoint={str(folder)!r})",
            stacklevel=4,
        )
        return str(folder)
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
        has_state = (folder / TRAINER_STATE_NAME).is_file()
        return None if has_state else f"it has no {TRAINER_STATE_NAME}, which stock writes last"
    try:
        saved = json.loads((folder / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, TypeError, KeyError):
        return f"its {MANIFEST} was not written to its end"
    with ThreadPoolExecutor(32) as pool:
        found = _sums(folder, pool)
    for name, expected in saved.items():
        if name not in found:
            return f"it has no {name}"
        if found[name] != expected:
            return f"its {name} has {found[name]}, and was saved with {expected}"
    return None


def _check_names(trainer: Any, folder: Path) -> None:
    """Refuse weights under other names than the model's, which stock would leave as they are; fewer are resumed."""
    model, names = _plain_model(trainer), set()
    if model is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= {*file.keys()}
    state, ignored = model.state_dict(), model._keys_to_ignore_on_save or ()
    held = {state[name].data_ptr() for name in names & state.keys()}  # tied weights are saved once
    lost = [name for name, one in state.items() if name not in ignored and one.data_ptr() not in held]
    if lost and names - state.keys():
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} has {len(lost)} weights under other names, {lost[0]} for one, as "
            "stock saves them and does not load them; expected the names that the model trains under. Write it anew: "
            f"{type(model).__name__}.from_pretrained(folder).save_pretrained(folder, save_original_format=False), and "
            f"delete its {MANIFEST}"
        )


def _check_trained(trainer: Any, folder: Path) -> None:
    """Refuse the optimizer of a run that trained others: its state has places, and no names."""
    if not (folder / MANIFEST).is_file() or not any(folder.glob("optimizer*")):  # none under save_only_model
        return
    saved, now = json.loads((folder / MANIFEST).read_bytes()).get("trained"), _trained(trainer)
    if saved and now and not {*saved.split(", ")[1:]} & {*now.split(", ")[1:]}:  # neither places nor names
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} has the optimizer of a run that trained others than this one "
            f"({saved}, and not {now}); expected the same, frozen ones frozen. Freeze what that run froze, or begin a "
            "run with its weights: from_pretrained(checkpoint), and trainer.train()"
        )


def _trained(trainer: Any) -> str:
    """Return number, places in the model and names of what the optimizer steps; "" where it has copies.

    A second adapter changes the places, a wrapper the names; where others are trained, both.
    """
    known = {id(weight): (place, name) for place, (name, weight) in enumerate(trainer.model.named_parameters())}
    held = [id(weight) for group in getattr(trainer.optimizer, "param_groups", ()) for weight in group["params"]]
    if not held or not known.keys() >= {*held}:
        return ""
    places, names = (zlib.crc32(json.dumps(each).encode()) for each in zip(*(known[one] for one in held), strict=True))
    return f"{len(held)} parameters, CRC32 of their places {places:08x}, names {names:08x}"


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders of checkpoints as stock names them, the last step first."""
    steps = {path: path.name.partition("-")[2] for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/")}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]), reverse=True)
