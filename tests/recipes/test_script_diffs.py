"""The diff that ``hf-memopt run`` shows, applied by ``patch``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hf_memopt.recipes.running.assistant import diff_of


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("import x\ndef f():\n\tt = Trainer()\n\tt.train()\n", "\tattach(t, A())\n\tt.train()\n"),
        ('#!/bin/python\n"""Text."""\nt = Trainer()\nt.train()\n', '"""Text."""\nfrom hf_memopt import A, attach\n'),
        ("#!/bin/python\nt = Trainer()\nt.train()\n", "#!/bin/python\nfrom hf_memopt import A, attach\n"),
        ("t = Trainer()\nif t: t.train()\n", None),
    ],
)
def test_a_diff_keeps_what_the_lines_of_a_script_begin_with(text: str, changed: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    found = diff_of("train.py", ["A"], str(tmp_path))
    assert (found is None) is (changed is None)
    if changed is not None:
        (tmp_path / "a.patch").write_text(found or "")
        subprocess.run(["patch", "-p1", "-i", "a.patch"], cwd=tmp_path, check=True, capture_output=True)
        assert changed in (tmp_path / "train.py").read_text()
