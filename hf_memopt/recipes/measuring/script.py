"""The process of a script that ``hf-memopt measure`` runs: its first ``Trainer.train()`` measures, and ends it.

``python -m hf_memopt.recipes.measuring.script RESULT STEPS SCRIPT [ARGUMENT]...`` runs a script as ``python SCRIPT``
does. Inside ``train()`` the steps are taken, what they took is written to the file RESULT, and ``os._exit`` ends the
process: nothing after that line runs, neither ``finally`` nor ``atexit``. ``Trainer`` is changed where the script
imports it, not earlier, since a script may set environment variables before its imports.

Limitations: what a callback writes in the middle of a step; a process that the script starts anew trains as ever.
"""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hf_memopt.recipes.measuring.scripts import run_script


def main(result: str, steps: str, script: str, *arguments: str) -> None:
    """Run the script until it trains; without that, end as it ends."""
    run_script(script, arguments, _Ending(Path(result), int(steps), script).change)


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
        _leave()

    def _end(self, trainer: Any, train: Callable[[], Any]) -> NoReturn:
        """Measure, tell what was found, and end the process whatever happens."""
        try:
            self._tell()
            self._tell(**_measured(trainer, self._steps, train))
        except BaseException as error:
            self._tell(failed=f"{type(error).__name__}: {error}")
        finally:
            _leave()

    def _tell(self, **found: str) -> None:
        from hf_memopt.whole_files import write_whole

        workers = [one.pid for one in multiprocessing.active_children() if one.daemon]  # of DataLoaders
        write_whole(self._result, json.dumps({"workers": workers, **found}))


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
