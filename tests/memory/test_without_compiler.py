"""Estimates import bitsandbytes without torch's compiler; the switch belongs to torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hf_memopt.memory import without_compiler


def plain(number: int) -> int:
    return number


def test_nothing_is_compiled_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("TORCHDYNAMO_DISABLE", before)
        with without_compiler():
            assert torch.compile(plain) is plain
        assert os.environ.get("TORCHDYNAMO_DISABLE") == before


@pytest.mark.slow
def test_bitsandbytes_does_not_bring_the_compiler() -> None:
    pytest.importorskip("bitsandbytes")
    code = (
        "import sys\nfrom hf_memopt.memory.compiler_import import without_compiler\n"
        "with without_compiler():\n    import bitsandbytes\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
