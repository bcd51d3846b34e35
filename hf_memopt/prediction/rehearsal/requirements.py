"""What a rehearsal needs: Linux on x86-64, a CUDA build of torch, a C++ compiler; no GPU, no driver.

torch is not imported, so that a refusal comes at once.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

WITHOUT = "Without a rehearsal: hf-memopt estimate"


class RehearsalError(RuntimeError):
    """A machine or a build of torch cannot rehearse."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch: its folder, its version, and that of CUDA, as (major, minor)."""

    folder: Path
    version: str
    cuda: tuple[int, int]


def installed_torch() -> TorchBuild:
    """Return the installed torch, a CUDA build.

    Raises:
        RehearsalError: this is not Linux on x86-64, there is no torch, or it is a build for the CPU or for ROCm.
    """
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        action = "Rehearse under WSL, or call" if system == "Windows" else "Call"
        rule = f"platform='{system} {machine}' cannot rehearse; expected 'Linux x86_64'"
        raise RehearsalError(f"{rule}. {action}: hf-memopt estimate")
    spec = PathFinder.find_spec("torch")  # importlib.util's would ask a torch that is imported already
    if spec is None or spec.origin is None:
        raise RehearsalError("torch is not installed; expected its CUDA build. Call: pip install torch")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    # "cuda: Optional[str] = '13.0'"
    found = dict(re.findall(r"^(\w+)\b[^=\n]*= ['\"](.+)['\"]", text, re.MULTILINE))
    version, cuda = found.get("__version__"), found.get("cuda")
    if cuda is None:
        raise RehearsalError(
            f"torch={version!r} is a build for {'ROCm' if 'hip' in found else 'the CPU'}; expected one for CUDA. "
            f"A rehearsal needs no GPU and no driver. On Linux, in a new environment: pip install torch. {WITHOUT}"
        )
    major, minor = cuda.split(".")[:2]
    return TorchBuild(folder, str(version), (int(major), int(minor)))


def compiler() -> list[str]:
    """Return the command of the C++ compiler: ``$CXX``, else ``g++``.

    Raises:
        RehearsalError: it is not installed, or binutils' ``nm`` is not.
    """
    command = shlex.split(os.environ.get("CXX", "g++"))
    for tool in (command[0], "nm"):
        if shutil.which(tool) is None:
            raise RehearsalError(
                f"tool={tool!r} is not installed; expected g++ (or $CXX) and nm, to build the stand-in of a GPU once. "
                f"Call, for example: apt install g++ binutils. {WITHOUT}"
            )
    return command
