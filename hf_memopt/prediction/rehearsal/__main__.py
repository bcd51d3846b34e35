"""Run a command on a GPU that is not there.

``python -m hf_memopt.prediction.rehearsal --gpu T4 -- python train.py``
"""

from __future__ import annotations

import argparse
import os
import sys

from hf_memopt.prediction.rehearsal.requirements import RehearsalError
from hf_memopt.prediction.rehearsal.stand_in import StandIn
from hf_memopt.training.devices import custom_gpu, find_gpu


def main(arguments: list[str]) -> None:
    """Become the command: its exit code is that of this process, and an interrupt ends the one process there is."""
    parser = argparse.ArgumentParser(prog="python -m hf_memopt.prediction.rehearsal", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpu", default="RTX 3060 12GB", metavar="NAME", help="of the table of GPUs (%(default)s)")
    which.add_argument("--memory", metavar="SIZE", help="instead: 12GiB, for example")
    parser.add_argument("--capability", metavar="MAJOR.MINOR", help="compute capability, with --memory (8.6)")
    parser.add_argument("--no-values", action="store_true", help="leave small tensors without their values")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("command is missing; expected one after --. Write, for example: -- python train.py")
    if given.capability and not given.memory:
        parser.error("--capability is known of a GPU of the table; expected --memory beside it. Omit --capability")
    try:
        gpu = custom_gpu(given.memory, given.capability or "8.6") if given.memory else find_gpu(given.gpu)
        os.execvpe(command[0], command, StandIn.of(gpu).environment(values=not given.no_values))
    except (RehearsalError, ValueError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"command={command[0]!r} cannot be run: {error.strerror}. Write, for example: -- python train.py")


if __name__ == "__main__":
    main(sys.argv[1:])
