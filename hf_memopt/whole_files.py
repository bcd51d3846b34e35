"""Write a file whole or not at all; everything that the package writes goes through ``write_whole``.

Limitations: a symbolic link at the path is replaced, not followed, and only the file's own content is synchronised to
the disk, not its folder, so that after a power cut the old content may be back.
"""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from contextlib import suppress
from pathlib import Path

__all__ = ["warn_unwritten", "write_whole"]


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
