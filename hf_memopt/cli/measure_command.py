"""What ``hf-memopt measure`` does: run a script up to its first ``Trainer.train()``, and measure a few steps there.

The script runs as ``python script.py`` would run it, and ends there: what it does after training does not run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.script_runner import run_until_training
from hf_memopt.cli.verdicts import print_coloured
from hf_memopt.plain_data import checked_path
from hf_memopt.recipes.measuring.measurement import DEFAULT_STEPS, Measurement, check_new_file

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MeasureOptions", "run_measure"]

FITS, OUT_OF_MEMORY = 0, 1


@dataclass(frozen=True)
class MeasureOptions:
    """The options of the command."""

    script: Path
    arguments: Sequence[str] = ()
    steps: int = DEFAULT_STEPS
    output: Path | None = None
    force: bool = False
    json_output: bool = False


def run_measure(options: MeasureOptions, console: Console) -> int:
    """Print the measurement and return the exit code: 0 if the steps ran, 1 if memory ran out.

    Raises:
        ValueError: invalid options; the script does not train, or its steps cannot be measured.
    """
    if not checked_path("script", options.script).is_file():
        raise ValueError(
            f"script={str(options.script)!r} is not a file; expected a Python script that trains with the stock "
            "Trainer. Call: hf-memopt measure train.py"
        )
    if options.output is not None:
        check_new_file(options.output, force=options.force)
    found: list[Measurement] = []
    # what the script prints must not be in the JSON
    with redirect_stdout(sys.stderr) if options.json_output else nullcontext():
        run_until_training(options.script, options.arguments, lambda trainer: found.append(_measured(trainer, options)))
    text = found[0].to_json() if options.json_output else found[0].table(console.width)
    if options.json_output:
        console.out(text, highlight=False)
    else:
        print_coloured(text, console)
    return FITS if found[0].fits else OUT_OF_MEMORY


def _measured(trainer: Any, options: MeasureOptions) -> Measurement:
    from hf_memopt.recipes.measuring.measure import check_trainer, measure

    try:
        check_trainer(trainer)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    try:
        return measure(trainer, steps=options.steps, path=options.output, force=options.force)
    except Exception as error:
        raise ValueError(
            f"script={str(options.script)!r} fails in its first steps ({type(error).__name__}: {error}); expected "
            f"steps that run. Run it by itself: python {options.script}"
        ) from error
