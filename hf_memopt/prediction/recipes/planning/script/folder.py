"""Write what a ``Plan`` chose into a folder: ``train.py`` and ``recipe.json``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hf_memopt.notices import quoted
from hf_memopt.plain_data import checked_path
from hf_memopt.training.binding.model import head_for
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes.planning import Plan
    from hf_memopt.training.batching import DataFile

SCRIPT, RECIPE = "train.py", "recipe.json"
PACKAGES = {"image-classification": ("datasets[vision]",), "speech-seq2seq": ("datasets[audio]",)}
"""What the data of a task needs besides."""


@dataclass(frozen=True)
class RowsFile:
    """The file or folder of rows that a plan was made for."""

    path: str | os.PathLike[str]  # Parquet, Arrow, JSON, CSV or TSV
    column: str | None = None  # of it, with texts or token ids; None for the likely one
    tokenizer: str | None = None  # a folder or a name on the Hub; None for the model's own
    field: str | None = None  # of the JSON object that the file is, which holds the rows

    def read(self, task: str | None = None) -> DataFile:
        """Return the file's columns and what they hold, those that a task learns where it is given."""
        from hf_memopt.training.batching import data_file

        has_tokenizer = self.tokenizer is not None
        return data_file(self.path, column=self.column, has_tokenizer=has_tokenizer, task=task, field=self.field)


@dataclass(frozen=True)
class Written:
    """What ``Plan.write`` wrote; ``print`` shows the commands to run next."""

    recipe: Path  # the path of `recipe.json`
    script: Path | None  # the path of `train.py`; None where none was written
    commands: tuple[str, ...]  # to run next, in order
    notes: tuple[str, ...] = ()  # what is to be completed first, or why there is no script

    def __str__(self) -> str:
        files = " and ".join(str(path) for path in (self.script, self.recipe) if path is not None)
        notes = [f"Note: {note}." for note in self.notes]
        return "\n".join([f"Written: {files}", *notes, *(f"  {command}" for command in self.commands)])


def check_folder(directory: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Return the folder as a path if ``train.py`` and ``recipe.json`` can be written there; nothing is written yet."""
    folder = checked_path("directory", directory)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        raise ValueError(
            f"directory={str(folder)!r} cannot be a folder: {str(existing)!r} is a file; expected a folder or a new "
            "path. Pass directory='run'"
        )
    there = [name for name in (SCRIPT, RECIPE) if os.path.lexists(folder / name)]
    if there and not force:
        raise ValueError(
            f"directory={str(folder)!r} has {' and '.join(there)} already; expected a folder without, so that nothing "
            "is overwritten. Pass force=True, or another folder"
        )
    return folder


def check_splits(rows: RowsFile) -> None:
    """Raise where ``load_dataset`` reads other files of a folder than were planned with.

    It takes those named for a split, if there are any, and files of any kind.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    file = rows.read()
    planned = {os.path.realpath(source): source for source in file.sources}
    if file.is_saved and planned.keys() != {os.path.realpath(file.path)}:
        raise ValueError(
            f"path={file.path!r} has {len(planned)} saved datasets in folders of their own; expected one. "
            f"Name it: {file.sources[0]}"
        )
    if not file.is_folder or file.is_saved:
        return
    found = DataFilesDict.from_patterns(get_data_patterns(file.path), base_path=file.path)
    taken = {os.path.realpath(one) for files in found.values() for one in files}
    if foreign := sorted(taken - planned.keys()):
        raise ValueError(
            f"path={file.path!r} has {os.path.basename(foreign[0])!r} too, which load_dataset would read as "
            f"{file.kind}; expected data files alone. Move it out of the folder"
        )
    left = [source for source in file.sources if os.path.realpath(source) not in taken]
    if left:
        raise ValueError(
            f"path={file.path!r} has {left[0].name!r} beside files named for {', '.join(map(str, found))}, and "
            f"load_dataset would leave it out; expected a split in the name of each file, or of none. "
            f"Rename it: train-{left[0].name}"
        )


def write_plan(
    found: Plan, directory: str | os.PathLike[str], *, force: bool = False, rows: RowsFile | None = None
) -> Written:
    from hf_memopt.prediction.recipes.planning.script import script_of

    recipe = found.recipe
    folder = check_folder(directory, force=force)
    if rows is not None:
        check_splits(rows)
    text, missing = script_of(found, rows, output_dir=str(folder / "out"))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RECIPE, recipe.to_json() + "\n")
    if text is None:
        has_script = "script" in head_for(found.task).traits
        what = "this model" if has_script else found.task or "a head that is unknown"
        note = f"there is no script for {what}; the parts of a Trainer are methods of recipe({str(folder / RECIPE)!r})"
        return Written(folder / RECIPE, None, _commands(found, None), (note,))
    script = folder / SCRIPT
    write_whole(script, text)
    notes = (f"before you run it, complete in {script}: {'; '.join(missing)}",) if missing else ()
    return Written(folder / RECIPE, script, _commands(found, script), notes)


def _commands(found: Plan, script: Path | None) -> tuple[str, ...]:
    package = quoted(_installed_from() + ("" if found.recipe.lora is None else "[peft]"))
    install = " ".join(["pip install", package, *map(quoted, PACKAGES.get(found.task or "", ()))])
    if script is None:
        return (install,)
    return install, f"python {quoted(str(script))}"


def _installed_from() -> str:
    """Return the folder or wheel that this package was installed from, which pip takes; else its name.

    Source: https://packaging.python.org/en/latest/specifications/direct-url/
    """
    try:
        told = distribution("hf-memopt").read_text("direct_url.json")
    except PackageNotFoundError:  # imported from a folder on the path
        told = None
    url = urlsplit(json.loads(told)["url"]) if told else None
    return url2pathname(url.path) if url is not None and url.scheme == "file" else "hf-memopt"
