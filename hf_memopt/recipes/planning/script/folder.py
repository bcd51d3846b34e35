"""Write what a ``Plan`` chose into a folder: ``train.py`` and ``recipe.json``."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt.units import format_bytes
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.plan import Plan

__all__ = ["RECIPE", "SCRIPT", "Written", "check_folder", "write_plan"]

SCRIPT, RECIPE = "train.py", "recipe.json"
PACKAGES = {"image-classification": ("'datasets[vision]'",), "speech-seq2seq": ("'datasets[audio]'",)}
"""What the data of a task needs besides."""
WITHOUT_SCRIPT = (None, "multiple-choice")
"""The tasks of which no script is written; None for an unknown head."""


@dataclass(frozen=True)
class Written:
    """What ``Plan.write`` wrote; ``print`` shows the commands to run next.

    Attributes:
        recipe: the path of ``recipe.json``.
        script: the path of ``train.py``; None where none was written.
        commands: to run next, in order.
        notes: what is to be completed first, or why there is no script.
    """

    recipe: Path
    script: Path | None
    commands: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = " and ".join(str(path) for path in (self.script, self.recipe) if path is not None)
        notes = [f"Note: {note}." for note in self.notes]
        return "\n".join([f"Written: {files}", *notes, *(f"  {command}" for command in self.commands)])


def check_folder(directory: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Return the folder as a path if ``train.py`` and ``recipe.json`` can be written there; nothing is written yet.

    Raises:
        ValueError: the folder has one of them and ``force`` is not set; it or one above it is a file, or cannot be
            written to.
    """
    folder = Path(directory)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        raise ValueError(
            f"directory={str(folder)!r} cannot be a folder: {str(existing)!r} is a file; expected a folder or a new "
            "path. Pass directory='run'"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"directory={str(folder)!r} cannot be written to: no permission for {str(existing)!r}; expected a folder "
            "of yours. Pass directory='run'"
        )
    there = [name for name in (SCRIPT, RECIPE) if os.path.lexists(folder / name)]
    if there and not force:
        raise ValueError(
            f"directory={str(folder)!r} has {' and '.join(there)} already; expected a folder without, so that nothing "
            "is overwritten. Pass force=True, or another folder"
        )
    return folder


def write_plan(
    found: Plan,
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
    data: str | os.PathLike[str] | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
    made_by: str = "hf_memopt.plan()",
) -> Written:
    """Write the files; see ``Plan.write``."""
    from hf_memopt.batching.padding_costs.data_files import data_file
    from hf_memopt.recipes.planning.script.script import ScriptFacts, training_script

    recipe, chosen = found.recipe, found.chosen
    assert chosen is not None
    folder = check_folder(directory, force=force)
    file = None if data is None else data_file(data, column=column, has_tokenizer=tokenizer is not None)
    script, notes = None, []
    if found.task in WITHOUT_SCRIPT or found.task is None:
        what = found.task or "a head that is unknown"
        notes.append(f"there is no script for {what}; call recipe({str(folder / RECIPE)!r}).trainer(...)")
    else:
        facts = ScriptFacts(
            name=found.source or "NAME OF THE MODEL",
            task=found.task,
            seq_len=chosen.seq_len,
            accumulation_steps=chosen.accumulation_steps,
            world_size=found.world_size,
            output_dir=str(folder / "out"),
            heading=_heading(found, made_by),
            file=file,
            tokenizer=tokenizer,
            cut=_cut(found),
        )
        text, to_fill_in = training_script(recipe, facts)
        missing = [] if found.source is not None else ["NAME"]
        missing += [to_fill_in] if to_fill_in else []
        script = folder / SCRIPT
        notes += [f"before you run it, complete in {script}: {'; '.join(missing)}"] if missing else []
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RECIPE, recipe.to_json() + "\n")
    if script is not None:
        write_whole(script, text)
    return Written(folder / RECIPE, script, _commands(found, script), tuple(notes))


def _heading(found: Plan, made_by: str) -> tuple[str, ...]:
    one, gpu = found.chosen, found.gpu
    assert one is not None
    several = f" on each of {found.world_size} GPUs" if found.world_size > 1 else ""
    return (
        f"Train {found.model}: {one.name}, {one.batch} on {gpu.name}.",
        f"Needs {format_bytes(one.total_bytes)} of {format_bytes(gpu.usable_bytes)}{several} (computed, not measured).",
        f"Made by: {made_by}",
    )


def _cut(found: Plan) -> str:
    texts = found.texts
    return f"; {texts.cut / texts.rows:.1%} are longer, and cut" if texts.cut and texts.rows else ""


def _commands(found: Plan, script: Path | None) -> tuple[str, ...]:
    package = "hf-memopt" if found.recipe.lora is None else "'hf-memopt[peft]'"
    install = " ".join(["pip install", package, *PACKAGES.get(found.task or "", ())])
    if script is None:
        return (install,)
    start = "python" if found.world_size == 1 else f"torchrun --nproc-per-node {found.world_size}"
    return install, f"{start} {shlex.quote(str(script))}"
