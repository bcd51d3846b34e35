"""The lines by which a script does itself what ``hf-memopt run`` did to it, as a unified diff that applies."""

from __future__ import annotations

import ast
import difflib
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path


def lines_of(callbacks: Sequence[str], trainer: str = "trainer") -> str:
    """Return the import and the call.

    Examples:
        >>> print(lines_of(["MicrobatchCallback"]))
        from hf_memopt import MicrobatchCallback, attach
        attach(trainer, MicrobatchCallback())
    """
    names = ", ".join([*sorted(callbacks), "attach"])
    return f"from hf_memopt import {names}\nattach({trainer}, {', '.join(f'{name}()' for name in callbacks)})"


def diff_of(script: str, callbacks: Sequence[str], folder: str = ".") -> str | None:
    """Return a diff that attaches callbacks before the script trains; None where no ``trainer.train()`` is found."""
    try:
        with tokenize.open(Path(folder, script)) as file:  # in the encoding that the script states
            text = file.read()
    except (OSError, ValueError, SyntaxError):  # it is gone, or is none that can be read
        return None
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    found = next(_trainings(tree), None)
    if found is None or any(line.endswith("\r\n") for line in lines):
        return None
    statement, name = found
    added, call = lines_of(callbacks, name).splitlines()
    imports = [
        one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom) and one.lineno < statement.lineno
    ]
    after = max((one.end_lineno or 0 for one in imports), default=0)
    changed = list(lines)
    changed.insert(statement.lineno - 1, f"{' ' * statement.col_offset}{call}\n")
    changed.insert(after, f"{added}\n")
    return "".join(difflib.unified_diff(lines, changed, f"a/{script}", f"b/{script}"))


def _trainings(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield statements that call ``train()`` of a name to which something called a Trainer was assigned."""
    names = {
        target.id
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)
        for target in one.targets
        if isinstance(target, ast.Name) and _last_name(one.value.func).endswith("Trainer")
    }
    for one in sorted(_statements(tree), key=lambda statement: statement.lineno):
        for call in ast.walk(one):
            is_train = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "train"
            if is_train and isinstance(call.func.value, ast.Name) and call.func.value.id in names:  # type: ignore[attr-defined]
                yield one, call.func.value.id  # type: ignore[attr-defined]


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that hold no others."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Expr | ast.Assign | ast.Return | ast.AnnAssign):
            yield one


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
