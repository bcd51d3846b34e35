"""The process of a script that ``hf-memopt run`` runs: each ``Trainer.train()`` gets what does not change its result.

``python -m hf_memopt.prediction.recipes.running.script OPTIONS SCRIPT [ARGUMENT]...``, with the options as JSON.
All that this package says goes to standard error, and only from the first process of a run with several.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from hf_memopt.prediction.recipes.running.script_as_main import TRAINER, run_script


def main(options: str, script: str, *arguments: str) -> None:
    """Run the script to its end; say so where it never trained."""
    asked = json.loads(options)
    running = Running(script, {**asked, "folder": os.getcwd()})
    try:
        changes = {TRAINER: lambda module: running.change(module.Trainer)}
        run_script(script, arguments, changes, is_module=asked["is_module"])
    finally:
        if not running.has_trained and os.getpid() == running.process:
            say("the script called no Trainer.train(), so nothing was attached to it")


def say(text: str, begins: str = "[memopt] ") -> None:
    """Write lines to standard error, above a progress bar if there is one."""
    if os.environ.get("RANK", "0") == "0":
        from hf_memopt.notices import printable

        write = sys.modules["tqdm"].tqdm.write if "tqdm" in sys.modules else print
        for line in text.splitlines():
            write(f"{begins}{printable(line)}", file=sys.stderr)


class Running:
    def __init__(self, script: str, options: dict[str, Any]) -> None:
        self._script, self._options = script, options
        self.process, self.has_trained = os.getpid(), False
        self.is_inside = False
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()

    def change(self, kind: Any) -> None:
        """Let each training begin with an assistant."""
        stock = kind.train

        @functools.wraps(stock)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_inside or os.getpid() != self.process:
                return stock(trainer, *args, **kwargs)
            from hf_memopt.prediction.recipes.running.assistant import assisted

            self.has_trained = self.is_inside = True
            inner: Callable[..., Any] = functools.partial(stock, trainer)
            if trainer not in self._attached:  # what is attached overrides train(), inside of a subclass's own
                self._attached.add(trainer)
                trainer.train = _Inner(self, inner, trainer.train)
                inner = lambda *args, **kwargs: trainer.train(*args, **kwargs)  # noqa: E731
            try:
                with assisted(trainer, self._script, self._options, say):
                    return inner(*args, **kwargs)
            finally:
                self.is_inside = False

        kind.train = train


class _Inner:
    """Stands for ``train()`` of one Trainer under what overrides it: the class's own, or stock's while that runs."""

    def __init__(self, running: Running, stock: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._running, self._stock, self._own = running, stock, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._stock if self._running.is_inside else self._own)(*args, **kwargs)


if __name__ == "__main__":
    main(*sys.argv[1:])
