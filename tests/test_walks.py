"""How many files a reader has to follow for one answer; ``walk_counts.py`` counts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The files at version 0.3.0, and the most today: a walk may get shorter, and is then recorded.
WALKS = {"estimate": (49, 36), "plan": (69, 53), "recovery": (20, 24), "recipe": (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_no_longer_than_it_was(name: str) -> None:
    program = Path(__file__).with_name("walk_counts.py")
    done = subprocess.run([sys.executable, str(program), name], capture_output=True, text=True, check=True, timeout=600)
    walked = json.loads(done.stdout.splitlines()[-1])
    assert walked["files"] <= WALKS[name][1], walked["names"]
