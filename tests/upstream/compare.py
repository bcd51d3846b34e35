"""Run the Trainer and data-collator tests of a checkout of transformers with stock and attached; list what is new.

python tests/upstream/compare.py TRANSFORMERS_SRC [pytest arguments]

The tests of the checkout run against the transformers that is installed. Exit code 1 if a test passes with stock and
does not pass attached (a skip is not a pass), unless ``known_differences.py`` says why; 2 if nothing passed with stock.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from known_differences import reason_of

HERE = Path(__file__).resolve().parent
TESTS = "tests/trainer"
VARIANTS = ("stock", "attached", "attached with callbacks")


class Outcome(NamedTuple):
    """What came of a test: "passed", "failed" or "skipped", and the last line of its error."""

    verdict: str
    text: str = ""


def outcomes_of(source: Path, variant: str, arguments: list[str]) -> dict[str, Outcome]:
    """Run the tests in a variant; return what came of each, by node id."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes.jsonl")
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        # Offline: tests that need the Hub fail at once, stock and attached, and are no comparison.
        settings = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
        settings |= {"HF_MEMOPT_UPSTREAM": variant, "HF_MEMOPT_OUTCOMES": str(file), "PYTHONPATH": path}
        # No conftest: that of transformers puts the checkout's own src before what is installed.
        options = ["--noconftest", "--continue-on-collection-errors", "-p", "attached_trainers"]
        options += ["-p", "no:cacheprovider", "-q", "--tb=line"]
        command = [sys.executable, "-m", "pytest", *options, "-c", os.devnull, f"--rootdir={source}", *arguments]
        with Path(folder, "output.txt").open("w+", encoding="utf-8") as output:
            subprocess.run([*command, TESTS], cwd=source, env={**os.environ, **settings}, stdout=output, stderr=output)
            output.seek(0)
            if not file.exists():
                raise SystemExit(f"no test ran in {source / TESTS}:\n{output.read()[-3000:]}")
        found: dict[str, Outcome] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            test, verdict, text = json.loads(line)
            if found.get(test, Outcome("")).verdict != "failed":  # a teardown that fails comes after its test
                found[test] = Outcome(verdict, text)
    return found


def new_failures(stock: Mapping[str, Outcome], attached: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return what passes with stock and does not pass attached, by test."""
    missing = Outcome("missing", "it did not run")
    passed = [test for test, outcome in stock.items() if outcome.verdict == "passed"]
    return {test: attached.get(test, missing) for test in passed if attached.get(test, missing).verdict != "passed"}


def versions_of(source: Path) -> str:
    """Return which tests run against which transformers."""
    init = source / "src" / "transformers" / "__init__.py"
    found = re.search(r'__version__ = "(.+?)"', init.read_text(encoding="utf-8")) if init.exists() else None
    described = subprocess.run(["git", "-C", str(source), "describe", "--always"], capture_output=True, text=True)
    commit = described.stdout.strip() or "no commit known"
    return (
        f"tests of transformers {found[1] if found else '(no version in the checkout)'} ({commit}) against "
        f"transformers {version('transformers')}"
    )


def report(runs: Mapping[str, Mapping[str, Outcome]]) -> tuple[list[str], int]:
    """Return what the runs of all variants, stock first, come to: lines of text and the exit code."""
    lines = []
    for variant, found in runs.items():
        counts = Counter(outcome.verdict for outcome in found.values())
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("passed", "failed", "skipped"))
        lines.append(f"{variant}: {shown}")
    (_, stock), *attached = runs.items()
    reasons = Counter((outcome.verdict, outcome.text) for outcome in stock.values() if outcome.verdict != "passed")
    lines += [f"  {verdict} with stock: {count} for {text!r}" for (verdict, text), count in reasons.most_common()]
    if not any(outcome.verdict == "passed" for outcome in stock.values()):
        return [*lines, "nothing passed with stock, so nothing can be compared"], 2
    unknown = 0
    for variant, found in attached:
        for test, outcome in new_failures(stock, found).items():
            reason = reason_of(test, variant)
            unknown += reason is None
            lines.append(f"{variant}: {test} {outcome.verdict}: {outcome.text}")
            lines.append(f"  {reason or 'NEW: no reason is known'}")
    return [*lines, f"{unknown} new failures without a known reason"], int(unknown > 0)


def main(source: Path, arguments: list[str]) -> int:
    """Run all variants, print counts and new failures; return the exit code."""
    print(versions_of(source), flush=True)
    lines, code = report({variant: outcomes_of(source, variant, arguments) for variant in VARIANTS})
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1], TESTS).is_dir():
        raise SystemExit(f"usage: {Path(__file__).name} TRANSFORMERS_SRC [pytest arguments]; it has {TESTS} in it")
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
