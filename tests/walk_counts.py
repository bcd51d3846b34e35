"""How many files of the package one answer walks through: python tests/walk_counts.py [estimate|plan|recovery|recipe]

Prints, as JSON, the files of ``hf_memopt`` in which a function was entered: counted by ``sys.setprofile``, the imports
left out. Each walk is a process of its own; with ``PYTHONPATH`` it counts another checkout.
"""

from __future__ import annotations

import json
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import hf_memopt

PACKAGE = Path(hf_memopt.__file__).parent
UNCOUNTED = {"errors.py", "units.py"}


def walk(call: Callable[[], Any]) -> list[str]:
    """Return the files of the package whose functions ``call`` enters, in any thread; all is imported before."""
    for module in pkgutil.walk_packages(hf_memopt.__path__, "hf_memopt."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_flags & 2:  # a function's locals
            found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = {str(Path(name).relative_to(PACKAGE)) for name in found if name.startswith(str(PACKAGE))}
    return sorted(inside - UNCOUNTED - {"__init__.py"})


def estimate() -> list[str]:
    """A causal model of the Hub's names, checkpointed, on a GPU of the table."""
    return walk(lambda: hf_memopt.estimate("Qwen2.5-0.5B", gpu="RTX 3060 12GB", seq_len=256, checkpointing=True))


def plan() -> list[str]:
    """What plan answers for a small encoder."""
    return walk(lambda: hf_memopt.plan("bert-base-uncased", gpu="RTX 3060 12GB", seq_len=128))


def recovery() -> list[str]:
    """One step of the stock ``Trainer`` that runs out of memory at its first micro-batch and is taken in parts."""
    import transformers

    import tiny
    from scarcity import Scarcity

    model = tiny.bert()
    scarcity = Scarcity(calls=(1,))
    scarcity.watch(model)
    with TemporaryDirectory() as folder:
        arguments = tiny.arguments(folder, max_steps=1, per_device_train_batch_size=4)
        callback = hf_memopt.MicrobatchCallback()
        trainer = transformers.Trainer(model, arguments, train_dataset=tiny.rows(4, 6), callbacks=[callback])
        hf_memopt.attach(trainer)
        walked = walk(trainer.train)
    assert (scarcity.errors, scarcity.count) == (1, 3), scarcity.count
    return walked


def recipe() -> list[str]:
    """A preset looked up."""
    return walk(lambda: hf_memopt.recipe("4gb-gpu"))


WALKS = {walked.__name__: walked for walked in (estimate, plan, recovery, recipe)}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or WALKS:
        files = WALKS[name]()
        print(json.dumps({"walk": name, "files": len(files), "names": files}))
