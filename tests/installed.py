"""Where this package was installed from, which pip takes."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import distribution

__all__ = ["install"]


def install(extra: str = "") -> str:
    """Return the command that installs this package as it is installed here."""
    told = json.loads(distribution("hf-memopt").read_text("direct_url.json") or "{}")
    return f"pip install {shlex.quote(told.get('url', 'hf-memopt').removeprefix('file://') + extra)}"
