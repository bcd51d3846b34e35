"""Installs values in each Python process of a rehearsal (pytest, its workers, ``torchrun``), after ``import torch``.

Python imports a module of this name at its start, from the first folder of its path that has one. This one imports
nothing heavy, does nothing outside a rehearsal, and lets the next module of this name run, too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
NAMESPACES = {"torch": "aten", "bitsandbytes": "bitsandbytes"}  # of operators, by the package that defines them
REFUSED = {  # what cannot be rehearsed begins with these; an import alone is harmless, and accelerate makes it
    "deepspeed": "initialize",
    "deepspeed.comm.comm": "init_distributed",  # of several ranks, before the model is there
    "kernels.load": "get_kernel_with_resolver",  # seen in kernels 0.17
}


def refuse(*_: Any, kernel: Any = None, **__: Any) -> None:
    """Stand in for the functions that are refused."""
    from hf_memopt.prediction.rehearsal import RehearsalError

    what = "DeepSpeed" if kernel is None else f"kernel={kernel.repo_id!r} of the hub"
    raise RehearsalError(f"{what} cannot be rehearsed; expected torch's own code. Run the script without it")


class AfterImport:
    """A finder that leaves finding to the others, and installs values once the module has run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the others' spec, each time anew: transformers asks for specs of packages that it does not import."""
        if name not in NAMESPACES and name not in REFUSED:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not AfterImport)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_install(module: ModuleType) -> None:
                run(module)
                if name in NAMESPACES:
                    importlib.import_module("hf_memopt.prediction.rehearsal.values").install(NAMESPACES[name])
                else:
                    setattr(module, REFUSED[name], refuse)

            spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


following = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != FOLDER])
if following is not None and following.loader is not None:
    following.loader.exec_module(importlib.util.module_from_spec(following))
if "HF_MEMOPT_GPU_MEMORY" in os.environ:
    sys.path.append(str(FOLDER.parents[2]))  # a checkout that is not installed
    sys.meta_path.insert(0, AfterImport)
