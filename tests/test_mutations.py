"""The faults of ``tests/mutations`` fit today's code: each line is there once, and so is the test that finds it.

Whether it does find it is ``python tests/mutations/run.py``, which takes minutes.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from mutations.run import TOP, faults


def names_of_tests(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault['room']}: {fault['name']}")
def test_a_fault_fits(fault: dict[str, Any]) -> None:
    text = (TOP / fault["file"]).read_text(encoding="utf-8")
    assert text.count(fault["before"]) == 1
    assert fault["before"] != fault["after"]
    compile(text.replace(fault["before"], fault["after"]), fault["file"], "exec")
    file, _, test = fault["found_by"].partition("::")
    assert test.partition("[")[0].rpartition("::")[2] in names_of_tests(TOP / file)
