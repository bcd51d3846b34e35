"""No network without being asked: sockets are refused, and nothing tries to open one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_nothing_but_the_hub_s_names_needs_a_network(tmp_path: Path) -> None:
    """Without ``HF_HUB_OFFLINE`` and in a home of its own, so that nothing comes from a cache."""
    (tmp_path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "TRANSFORMERS_"))}
    program = Path(__file__).with_name("network_refused.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path)],
        env={**kept, "HOME": str(tmp_path / "home"), "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.rpartition("asked:")[2]) == []
