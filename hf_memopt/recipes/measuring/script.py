"""The process of a script that ``hf-memopt measure`` runs: its first ``Trainer.train()`` measures, and ends it.

``python -m hf_memopt.recipes.measuring.script RESULT STEPS SCRIPT [ARGUMENT]...`` runs a script as ``python SCRIPT``
does. Inside ``train()`` the steps are taken, what they took is written to the file RESULT, and ``os._exit`` ends the
process: nothing after that line runs, neither ``finally`` nor ``atexit``. ``Trainer`` is changed where the script
imports it, not earlier, since a script may set environment variables before its imports.

Limitations: what a callback writes in the middle of a step; a process that the script starts anew trains as ever.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn


def main(result: str, steps: str, script: str, *arguments: str) -> None:
    ending = _Ending(Path(result), int(steps), script)
    run_script(script, arguments, {TRAINER: lambda module: ending.change(module.Trainer)})


class _Ending:
    """Makes the first ``Trainer.train()`` measure and end the process; the file ``result`` says that it was reached."""

    def __init__(self, result: Path, steps: int, script: str) -> None:
        self._result, self._steps, self._script = result, steps, script
        self._process = os.getpid()
        self._lock = threading.RLock()

    def change(self, kind: Any) -> None:
        """Change ``Trainer``, and each subclass whose own ``train`` does not come to it."""
        stock = kind.train

        @functools.wraps(stock)
        def train(trainer: Any, *_: Any, **__: Any) -> NoReturn:
            if os.getpid() != self._process:
                self._refuse(
                    "trains in a process that it forks; expected a call of train() in its own. Call: trainer.train()"
                )
            with self._lock:  # another thread waits here until the process has ended
                self._end(trainer, functools.partial(stock, trainer))

        def __init_subclass__(cls: type[Any], /, **options: Any) -> None:
            super(kind, cls).__init_subclass__(**options)
            own, names = vars(cls).get("train"), {"super", *(base.__name__ for base in cls.__mro__[1:])}
            if inspect.isfunction(own) and not own.__closure__ and names.isdisjoint(own.__code__.co_names):
                cls.train = lambda *_, **__: self._refuse(
                    f"trains by {cls.__name__}.train(), which never calls Trainer.train(); expected a train() that "
                    "does. Call: super().train()"
                )

        kind.train, kind.__init_subclass__ = train, classmethod(__init_subclass__)

    def _refuse(self, why: str) -> NoReturn:
        self._tell(message=f"script={self._script!r} {why}")
        if os.getpid() != self._process:
            os.kill(self._process, signal.SIGKILL)
        leave()

    def _end(self, trainer: Any, train: Callable[[], Any]) -> NoReturn:
        """Measure, tell what was found, and end the process whatever happens."""
        try:
            self._tell()
            self._tell(**_measured(trainer, self._steps, train))
        except BaseException as error:
            self._tell(failed=f"{type(error).__name__}: {error}")
        finally:
            leave()

    def _tell(self, **found: str) -> None:
        from hf_memopt.whole_files import write_whole

        workers = [one.pid for one in multiprocessing.active_children() if one.daemon]  # of DataLoaders
        write_whole(self._result, json.dumps({"workers": workers, **found}))


def leave(code: int = 0) -> NoReturn:
    """End this process, without destructors and whatever the script registered."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _measured(trainer: Any, steps: int, train: Callable[[], Any]) -> dict[str, str]:
    from hf_memopt.recipes.measuring.child_process import check_trainer, measurement_of
    from hf_memopt.recipes.measuring.recorder import StepRecorder

    try:
        check_trainer(trainer)
    except RuntimeError as error:
        return {"message": str(error)}
    recorder = StepRecorder(trainer, steps)
    recorder.run(train)
    return {"figures": measurement_of(trainer, recorder).to_json()}


# ---- Somebody's script, run as ``python`` does ----------------------------------------------------------------------


TRAINER = "transformers.trainer"  # defines Trainer; seen in transformers 5.8.1 to 5.23.0
Changes = Mapping[str, Callable[[Any], None]]
"""What gets a module, by its name, right after its import."""


def run_script(script: str, arguments: Sequence[str], changes: Changes, *, is_module: bool = False) -> None:
    """Run a script, or with ``is_module`` a module by its name, as ``__main__``.

    An error is printed without the frames of this package, and exits with 1 as Python does.
    """
    try:
        run_as_main(script, arguments, changes, is_module=is_module)
    except Exception as error:
        print_traceback(error)
        sys.exit(1)


def run_as_main(script: str, arguments: Sequence[str], changes: Changes, *, is_module: bool = False) -> None:
    """Do the same, and raise what the script raises."""
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AtImport(name, change))
    main = ModuleType("__main__")
    code = _code_of_module(script, main) if is_module else _code_of_file(script, main)
    sys.argv[:] = [script if main.__spec__ is None else str(main.__file__), *arguments]
    sys.modules["__main__"] = main
    exec(code, vars(main))


def print_traceback(error: Exception) -> None:
    """Print an error of a script as Python does, without the frames that started it."""
    folder = str(Path(__file__).parents[2])
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename.startswith(folder):
        own = own.tb_next
    if sys.excepthook is sys.__excepthook__:
        from hf_memopt.notices import printable

        print(printable("".join(traceback.format_exception(error.with_traceback(own)))), end="", file=sys.stderr)
    else:
        sys.excepthook(type(error), error.with_traceback(own), own)


def _code_of_file(script: str, main: ModuleType) -> CodeType:
    main.__file__ = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    return compile(Path(main.__file__).read_bytes(), main.__file__, "exec")


def _code_of_module(name: str, main: ModuleType) -> CodeType:
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError as error:
        problem = f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
        sys.exit(f"{sys.executable}: {problem}")
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        sys.exit(f"{sys.executable}: No module named {name}")
    main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
    found: CodeType = loader.get_code(spec.name)
    return found


class _AtImport:
    """Finds a module as the import system does, and calls a function with it once it has run."""

    def __init__(self, module: str, then: Callable[[Any], None]) -> None:
        self._module, self._then, self._is_looking = module, then, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._module or self._is_looking:
            return None
        self._is_looking = True  # the others are asked, and may be again: of a spec not every module is imported
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec


if __name__ == "__main__":
    main(*sys.argv[1:])
