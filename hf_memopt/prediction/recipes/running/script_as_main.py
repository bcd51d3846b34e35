"""Run somebody's script as ``python SCRIPT`` does, with modules changed right after the script imports them.

They are changed there and not earlier, since a script may set environment variables before its imports.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

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
