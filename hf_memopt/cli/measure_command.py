"""What ``hf-memopt measure`` does: run a script up to its first ``Trainer.train()``, and measure a few steps there.

The script runs as ``python script.py`` would run it, and ends there: what it does after training does not run. The
class ``transformers.Trainer`` is changed where the script imports it, not before: a script may set environment
variables before its imports. Afterwards the class, ``sys.argv`` and ``sys.path`` are as before.
"""

from __future__ import annotations

import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_memopt.plain_data import checked_path
from hf_memopt.recipes.measuring.measurement import DEFAULT_STEPS, Measurement, check_new_file

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MeasureOptions", "print_coloured", "run_measure"]

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


STYLES = {
    r"^It fits\b|^Recommended\b": "bold green",
    r"^Nothing fits\b|^Out of memory\b": "bold red",
}


def print_coloured(text: str, console: Console) -> None:
    """Print lines as they are, without wrapping them, and what ``STYLES`` matches in its colour."""
    from rich.text import Text

    shown = Text(text)
    for pattern, style in STYLES.items():
        shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console.print(shown, soft_wrap=True, highlight=False)


_MODULE = "transformers.trainer"  # defines Trainer; seen in transformers 5.8.1 to 5.23.0


class _ReachedError(BaseException):
    """Ends the script; not an ``Exception``, which a script may catch."""


def run_until_training(script: Path, arguments: Sequence[str], at_training: Callable[[Any], None]) -> None:
    """Run the script until it calls ``Trainer.train()``; then call ``at_training(trainer)`` and end the script.

    Args:
        script: of Python.
        arguments: that the script finds in ``sys.argv``.
        at_training: called with the trainer, whose ``train`` is its own again. What it raises is raised.

    Raises:
        ValueError: the script raised, ended or finished before ``train()``.
    """
    failed: list[Exception] = []

    def reached(trainer: Any) -> None:
        try:
            at_training(trainer)
        except Exception as error:
            failed.append(error)
        raise _ReachedError

    with ExitStack() as stack:
        stack.callback(setattr, sys, "argv", sys.argv)
        stack.callback(setattr, sys, "path", sys.path)
        sys.argv, sys.path = [str(script), *arguments], [str(script.parent.resolve()), *sys.path]
        stack.callback(_at_first_training(reached))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _ReachedError:
            if failed:
                raise failed[0] from None
            return
        except SystemExit as stop:
            raise _not_reached(script, f"it ended with exit code {stop.code!r}") from stop
        except Exception as error:
            raise _not_reached(script, f"{type(error).__name__}: {error}{_line_of(error, script)}") from error
    raise _not_reached(script, "it finished")


def _not_reached(script: Path, reason: str) -> ValueError:
    return ValueError(
        f"script={str(script)!r} never called Trainer.train() ({reason}); expected a script that trains with the stock "
        f"Trainer. Run it by itself: python {script}"
    )


def _line_of(error: BaseException, script: Path) -> str:
    """Return the last line of the script that an error passed through, for a message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
    return f", line {lines[-1]}" if lines else ""


def _at_first_training(reached: Callable[[Any], None]) -> Callable[[], None]:
    """Change ``Trainer.train`` now, or as soon as the class is made; return what undoes it."""
    undo = ExitStack()

    def change(module: Any) -> None:
        kind, before = module.Trainer, module.Trainer.train

        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if kind.train is not train:  # attach kept this one, and calls it for the steps that are measured
                return before(trainer, *args, **kwargs)
            kind.train = before
            reached(trainer)
            return None

        kind.train = train
        undo.callback(setattr, kind, "train", before)

    if _MODULE in sys.modules:
        change(sys.modules[_MODULE])
    else:
        finder = _Finder(change)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
    return undo.close


class _Finder:
    """Finds one module as the import system does, and calls a function with it once it has run."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._then(module)

        loader.exec_module = exec_module
        return spec
