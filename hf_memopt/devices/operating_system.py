"""The operating system of this machine, as far as it decides what CUDA can do."""

from __future__ import annotations

import platform
from collections.abc import Mapping

__all__ = ["SYSTEMS", "current_os"]

SYSTEMS: Mapping[str, str] = {"linux": "Linux", "windows": "Windows", "wsl": "WSL"}


def current_os() -> str:
    """Return the word of ``SYSTEMS`` for this machine; "linux" for every other system."""
    if platform.system() == "Windows":
        return "windows"
    return "wsl" if "microsoft" in platform.release().lower() else "linux"  # of the kernel of WSL 1 and 2
