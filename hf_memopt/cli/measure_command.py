"""What ``hf-memopt measure`` does: run a script in a process of its own, and print what that measured.

The process ends inside the script's first ``Trainer.train()`` (``recipes/measuring/script.py``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from hf_memopt.cli.command import check_script, print_coloured
from hf_memopt.reports import Measurement
from hf_memopt.terminal import Console
from hf_memopt.whole_files import check_target

if TYPE_CHECKING:
    from hf_memopt.cli.options import MeasureOptions

FITS, OUT_OF_MEMORY = 0, 1


def run(options: MeasureOptions, context: Any) -> int:
    """Print the measurement and return the exit code: 0 if the steps ran, 1 if memory ran out."""
    script = os.fspath(options.script)
    check_script(script, "measure")
    if options.output is not None:
        check_target("path", options.output, force=options.force)
    told, ended = _run(options)
    if told is None:
        raise ValueError(
            f"script={script!r} never called Trainer.train() ({ended}); expected a script that trains with the stock "
            f"Trainer. Run it by itself: python {script}"
        )
    if "message" in told:
        raise ValueError(told["message"])
    if "figures" not in told:
        raise ValueError(
            f"script={script!r} fails in its first steps ({told.get('failed', ended)}); expected steps that run. Run "
            f"it by itself: python {script}"
        )
    found = Measurement.from_json(told["figures"])
    if options.output is not None:
        found.write(options.output, force=options.force)
    console = Console()
    if options.json_output:
        console.out(found.to_json(), highlight=False)
    else:
        print_coloured(found.table(console.width), console)
    return FITS if found.fits else OUT_OF_MEMORY


def _run(options: MeasureOptions) -> tuple[Any, str]:
    """Run the script; return what its process told, None where it never trained, and how the process ended."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        with TemporaryDirectory(prefix="hf-memopt-") as folder:
            result = Path(folder, "result.json")
            words = [str(result), str(options.steps), str(options.script), *(options.arguments or ())]
            # what the script prints must not be in the JSON; an exception that ends this call ends the process too
            code = subprocess.call(
                [sys.executable, "-m", "hf_memopt.recipes.measuring.script", *words],
                stdout=2 if options.json_output else None,
            )
            told = json.loads(result.read_bytes()) if result.exists() else None
    finally:
        signal.signal(signal.SIGTERM, before)
    for worker in told["workers"] if told else ():
        with suppress(OSError):
            os.kill(worker, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has the latter alone, and ends it
    return told, f"it ended with exit code {code}" if code >= 0 else f"it was killed by {signal.Signals(-code).name}"


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
