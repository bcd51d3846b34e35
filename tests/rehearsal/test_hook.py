"""The module that Python runs at its start in each process of a rehearsal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_memopt

HOOK = Path(hf_memopt.__file__).parent / "rehearsal" / "hook"


def _run(code: str, *folders: Path, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "HF_MEMOPT_GPU_MEMORY" or environment.get("rehearse")}
    path = os.pathsep.join(map(str, (HOOK, *folders)))
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env={**inherited, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_outside_a_rehearsal_it_lets_the_next_one_run_and_does_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.seen = 'the next one'\n")
    code = "import sys; print(sys.seen, [f for f in sys.meta_path if getattr(f, '__name__', '') == 'AfterImport'])"
    assert _run(code, tmp_path) == "the next one []"


def test_at_the_start_it_imports_no_torch(tmp_path: Path) -> None:
    assert _run("import sys; print('torch' in sys.modules, 'hf_memopt' in sys.modules)") == "False False"


@pytest.mark.stand_in
def test_values_are_installed_with_torch_even_after_a_look_for_it() -> None:
    code = """
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("bitsandbytes")
import torch
print(float((torch.ones(3, device="cuda") * 2).sum()))
import bitsandbytes
from bitsandbytes.functional import quantize_4bit
packed, _ = quantize_4bit(torch.linspace(-1, 1, 128, device="cuda"))
print(packed.unique().numel() > 8)
"""
    assert _run(code, rehearse="yes").split() == ["6.0", "True"]
