"""Write a file whole or not at all; everything that the package writes goes through ``write_whole``.

Limitations: a symbolic link at the path is replaced, not followed, and only the file's own content is synchronised to
the disk, not its folder, so that after a power cut the old content may be back.
"""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hf_memopt.plain_data import checked_path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step: a reader sees all of the new content or what was there before, also after a kill.

    The content goes into a hidden file beside ``path``, which then takes its place. The hidden file is removed on any
    failure, ``KeyboardInterrupt`` included. The permissions are those of a new file, ``0o666`` less the umask.

    Args:
        path: of the file, in an existing folder.
        content: text is encoded as UTF-8; what UTF-8 cannot hold (undecodable bytes of file names) is escaped.

    Raises:
        OSError: the file cannot be written, or ``path`` exists and is not a regular file.
    """
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # renaming over /dev/null would replace it for the whole machine
        raise OSError(errno.EEXIST, "it exists and is not a regular file", str(path))
    # The name cannot be guessed, and "x" (O_EXCL) opens neither an existing file nor an existing link. mkstemp would do
    # the same with mode 0600; to widen that by the umask, the umask would have to be set, for all threads.
    unfinished = path.with_name(f".memopt-{secrets.token_hex(16)}")
    try:
        with open(unfinished, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a disk that is full may say so only now
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to report
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # it names the hidden file, or none
            error.filename = str(path)
            del error.filename2
        raise


def check_target(name: str, path: Any, *, kind: str = "", endings: Sequence[str] = (), force: bool = True) -> Path:
    """Return a path that a user passes for a file to be written.

    Args:
        name: what messages call it.
        path: text or a ``pathlib.Path``.
        kind: what its ``endings`` stand for, with its article; "" where any name will do.
        endings: in lower case, the usual one first.
        force: whether a file that is there may be replaced.

    Raises:
        ValueError: another ending; a folder, or in a missing one; there already, without ``force``.
    """
    found = checked_path(name, path)
    given = f"{name}={str(found)!r}"
    if kind and found.suffix.lower() not in endings:
        known = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
        raise ValueError(
            f"{given} is not {kind}; expected a name that ends in {known}. Pass {found.stem or 'file'}{endings[0]}"
        )
    if found.is_dir() or not found.parent.is_dir():
        raise ValueError(
            f"{given} is a folder or is in a missing one; expected a file in an existing folder. Pass {found.name} "
            "to write it here"
        )
    if found.exists() and not force:
        raise ValueError(f"{given} exists already; expected a new file. Pass another name, or force=True to replace it")
    return found


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Raise ValueError for an OSError of the block, which writes a file that a user asked for."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{name}={str(path)!r} cannot be written ({error.strerror}); expected a writable folder with free space. "
            "Pass another file"
        ) from error


def warn_unwritten(path: Path, error: OSError, consequence: str, causes: set[str]) -> None:
    """Warn that a file which training does not need was not written, once for each cause.

    Args:
        path: of the file.
        error: what writing it raised.
        consequence: what is lost, as a clause.
        causes: the causes that were reported already; a new one is added.
    """
    cause = error.strerror or str(error)
    if cause not in causes:
        causes.add(cause)
        warnings.warn(
            f"{path} could not be written ({cause}), so {consequence}. Training goes on; make room for it or let its "
            "folder be written to",
            stacklevel=3,
        )
