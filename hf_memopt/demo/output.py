"""The demo's output folder: it appears whole or not at all, and nothing that a user put there is ever removed.

Everything is written in a hidden folder beside it, on the same disk, which takes its place by renaming.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_memopt.plain_data import parse_object
from hf_memopt.units import format_bytes
from hf_memopt.whole_files import write_whole

__all__ = ["DemoError", "check_disk", "check_json_file", "check_output", "publish", "work_folder", "write_figures"]

MARKER = "demo.json"  # written last into the output folder, and what a later run knows it by
ANOTHER = "Call: hf-memopt demo --output another-folder"


class DemoError(RuntimeError):
    """The demo cannot start or go on; the text says what to do."""


def check_output(output: Path) -> None:
    """Refuse an output that is neither new nor the whole folder of an earlier demo and nothing else.

    Raises:
        DemoError: a file or a link, a folder without a readable marker, one with files missing or added since, or a
            missing parent folder.
    """
    name = f"output={str(output)!r}"
    if not output.parent.is_dir():
        raise DemoError(f"{name} lies in a folder that does not exist; expected an existing one. {ANOTHER}")
    if not os.path.lexists(output):
        return
    rule = f"expected a new folder or one that an earlier demo finished. {ANOTHER}"
    if output.is_symlink() or not output.is_dir():
        raise DemoError(f"{name} is not a folder; {rule}")
    try:
        recorded = parse_object((output / MARKER).read_bytes()).get("files")
    except (OSError, ValueError):
        recorded = None
    if not isinstance(recorded, list) or not all(isinstance(name, str) for name in recorded):
        raise DemoError(f"{name} has no readable {MARKER}; {rule}") from None
    found = {entry.name for entry in output.iterdir()} - {MARKER}
    if missing := sorted(set(recorded) - found):
        raise DemoError(f"{name} has lost {', '.join(missing)} of an earlier demo; {rule}")
    if added := sorted(found.difference(recorded)):
        raise DemoError(f"{name} holds {', '.join(added)}, which no demo wrote; {rule}")


def check_json_file(json_file: Path, output: Path) -> None:
    """Refuse a file for the figures that cannot be written, or that a later demo would remove with its output.

    Raises:
        DemoError: a folder, a file in a missing folder or inside ``output``.
    """
    absolute = Path(os.path.abspath(json_file))
    rule = "expected a file in an existing folder outside the output. Call: hf-memopt demo --json figures.json"
    if absolute.is_relative_to(output):
        raise DemoError(f"json_file={str(json_file)!r} lies in the output, which is replaced as a whole; {rule}")
    if absolute.is_dir() or not absolute.parent.is_dir():
        raise DemoError(f"json_file={str(json_file)!r} is a folder or lies in a missing one; {rule}")


def check_disk(output: Path, needed_bytes: int) -> None:
    """Raise DemoError if the disk of ``output`` has less than ``needed_bytes`` free."""
    free_bytes = shutil.disk_usage(output.parent).free
    if free_bytes < needed_bytes:
        raise DemoError(
            f"output={str(output)!r} lies on a disk with {format_bytes(free_bytes)} free; expected at least "
            f"{format_bytes(needed_bytes)}. Call: hf-memopt demo --output folder-on-another-disk"
        )


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """Give a hidden folder beside ``output`` and remove it whatever happens.

    Raises:
        DemoError: no folder can be made there, or the disk became full while the demo wrote into it.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise DemoError(
            f"output={str(output)!r} cannot be written ({error.strerror}); expected a writable place. {ANOTHER}"
        ) from None
    try:
        yield work
    except Exception as error:
        # Writers in Rust (tokenizers, safetensors) raise errors of their own, and a child's error arrives as text.
        if getattr(error, "errno", None) != errno.ENOSPC and os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise DemoError(
            f"output={str(output)!r} lies on a disk that is full now; expected room for model and tokenizer. What was "
            "written is removed again. Call: hf-memopt demo --output folder-on-another-disk"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(finished: Path, output: Path, marker: Mapping[str, Any]) -> None:
    """Complete a finished folder with its marker and put it in the place of ``output`` by renaming.

    A former demo is moved aside into the folder that holds ``finished``, and back if the renaming fails.
    """
    files = sorted(entry.name for entry in finished.iterdir())
    write_whole(finished / MARKER, json.dumps({**marker, "files": files}, indent=2) + "\n")
    replaced = finished.with_name("replaced")
    try:
        if output.exists():
            output.rename(replaced)
        finished.rename(output)
    except BaseException:
        if replaced.exists() and not output.exists():
            replaced.rename(output)
        raise


def write_figures(json_file: Path, figures: Mapping[str, Any]) -> None:
    """Write the figures as JSON, whole or not at all.

    Raises:
        DemoError: the file cannot be written.
    """
    try:
        write_whole(json_file, json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise DemoError(
            f"json_file={str(json_file)!r} cannot be written ({error.strerror}); expected a writable place with room. "
            "The same figures stand in demo.json of the output. Call: hf-memopt demo --json another-file.json"
        ) from error
