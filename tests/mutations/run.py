"""Put each fault of ``*.toml`` into a copy of the package, and see whether the test named beside it fails.

    .venv/bin/python tests/mutations/run.py                    # all of them, a few minutes
    .venv/bin/python tests/mutations/run.py allocator          # those whose name or file has this in it
    .venv/bin/python tests/mutations/run.py --suite allocator  # the whole default suite in place of the test named

A fault is a ``[[fault]]`` with ``name``, ``file``, ``before`` (which the file has once), ``after``, and ``found_by``: a
test of the default suite, as pytest spells it. The exit code is 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOP = HERE.parent.parent


def faults() -> list[dict[str, Any]]:
    """Return the faults of all files, with the name of the file as ``room``."""
    return [
        {"room": path.stem, **fault}
        for path in sorted(HERE.glob("*.toml"))
        for fault in tomllib.loads(path.read_text(encoding="utf-8")).get("fault", [])
    ]


def passes(copy: Path, arguments: list[str]) -> bool:
    """Run pytest in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):  # no such test, or a wrong call
        raise SystemExit(f"pytest {' '.join(arguments)} ended with {done.returncode}.\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def is_found(fault: dict[str, Any], copy: Path, arguments: list[str]) -> bool:
    """Return whether pytest fails in the copy while it has the fault, and put the file back."""
    path = copy / fault["file"]
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault["before"], fault["after"]), encoding="utf-8")
    found = not passes(copy, arguments)
    path.write_text(text, encoding="utf-8")
    return found


def main() -> None:
    """Print a line for each fault, and what was not found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="faults whose name or file has one of these")
    parser.add_argument("--suite", action="store_true", help="run the whole default suite")
    asked = parser.parse_args()
    chosen = [one for one in faults() if any(word in f"{one['room']}: {one['name']}" for word in asked.words or [""])]
    left = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, copy / name)
        tests = sorted({fault["found_by"] for fault in chosen})
        if not passes(copy, ["--numprocesses", "auto"] if asked.suite else tests):
            raise SystemExit("The tests fail without a fault; nothing can be told by them.")
        for number, fault in enumerate(chosen, 1):
            arguments = ["--numprocesses", "auto"] if asked.suite else [fault["found_by"]]
            found = is_found(fault, copy, arguments)
            print(
                f"{number:3}/{len(chosen)}  {'found' if found else 'MISSED':6}  {fault['room']}: {fault['name']}",
                flush=True,
            )
            left += [] if found else [fault["name"]]
    print(f"{len(chosen) - len(left)} of {len(chosen)} found" + "".join(f"\nmissed: {name}" for name in left))
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
