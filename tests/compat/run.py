"""Run the suite with other versions of what this package stands on, and note what came of it.

python tests/compat/run.py ENVIRONMENT [pytest arguments]

An environment is a release of transformers, with the other packages as in constraints.txt (``5.8.1``) or as old as
setup.cfg allows (``5.8.1-oldest``), another Python (``python3.12``), or what a new user gets: the newest of everything
(``newest``, several GB of CUDA with torch). It is made in ``.venv-ENVIRONMENT`` and kept; ``newest`` is renewed.
The counts go to ``results.jsonl`` beside this file, from which ``make table`` makes the table of docs/compatibility.md.
The exit code is that of pytest; a Python that is not installed is told in one line, noted, and no failure.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.jsonl"
SHOWN = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "peft", "numpy")
# Old releases use what newer packages below them call deprecated; every other warning stays an error.
LET_PASS = ("-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
# Its page has a table of the results, which are new after each environment.
OF_RESULTS = "tests/test_documents.py::test_generated_parts_of_the_pages_are_current"
COUNTS = ("tests", "failures", "errors", "skipped")
REQUIREMENT = re.compile(r"([\w.-]+) *>= *([\w.]+)")


def main(environment: str, *arguments: str) -> int:
    """Make the environment, run the suite in it, note the counts; return the exit code."""
    python = environment if environment.startswith("python") else sys.executable
    if not runs(python):
        print(f"{environment}: not installed, so nothing was run with it", flush=True)
        note({"environment": environment, "counts": None})
        return 0
    folder = ROOT / f".venv-{environment}"
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(constraints_of(environment)) + "\n", encoding="utf-8")
    renewed = ("--upgrade", "--upgrade-strategy", "eager") if environment == "newest" else ()
    install = ["install", "--quiet", *renewed, "--constraint", constraints, "--editable", f"{ROOT}[test,plot]"]
    subprocess.run([inside, "-m", "pip", *install], check=True)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    let_pass = LET_PASS if environment.endswith("-oldest") else ()
    chosen = ("-m", "not slow", f"--deselect={OF_RESULTS}")
    pytest = [inside, "-m", "pytest", *chosen, f"--junit-xml={report}", *let_pass, *arguments]
    code = subprocess.run(pytest, cwd=ROOT, check=False).returncode
    if report.exists():
        counts = counts_of(report)
        note({"environment": environment, "versions": versions_in(inside), "counts": counts})
        print(f"{environment}: {', '.join(f'{count} {name}' for name, count in counts.items())}", flush=True)
    return code


def runs(python: str) -> bool:
    """Return whether the interpreter is there and starts (pyenv leaves commands that do not)."""
    try:
        return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def constraints_of(environment: str) -> Iterator[str]:
    """Yield the lines of constraints.txt with the environment's versions in place; none for what is newest."""
    if environment == "newest":
        return
    name, _, age = environment.partition("-")
    wanted = oldest_versions() if age == "oldest" else {}
    if not name.startswith("python"):
        wanted["transformers"] = name
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        package = line.partition("==")[0]
        yield f"{package}=={wanted[package]}" if package in wanted else line


def oldest_versions() -> dict[str, str]:
    """Return the lower bounds of setup.cfg, but that of torch: of it, one build serves all environments."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = setup["options.extras_require"]
    required = "\n".join((setup["options"]["install_requires"], extras["plot"], extras["peft"]))
    return {name: oldest for name, oldest in REQUIREMENT.findall(required) if name != "torch"}


def versions_in(python: Path) -> dict[str, str]:
    """Return the versions that an environment has."""
    program = (
        "import json, sys, importlib.metadata as m; "
        "print(json.dumps({'Python': sys.version.split()[0], **{n: m.version(n) for n in sys.argv[1:]}}))"
    )
    shown = subprocess.run([python, "-c", program, *SHOWN], check=True, capture_output=True, text=True).stdout
    return json.loads(shown)


def counts_of(report: Path) -> dict[str, int]:
    """Return pytest's counts from its JUnit report."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    return {name: int(suite.attrib[name]) for name in COUNTS}


def note(result: dict[str, object]) -> None:
    """Put the result in place of the environment's earlier one."""
    described = ["git", "-C", ROOT, "describe", "--always", "--exclude=*", "--abbrev=12"]
    commit = subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip()
    dated = {**result, "commit": commit or "-", "date": datetime.now(UTC).date().isoformat()}
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    kept = [line for line in lines if json.loads(line)["environment"] != result["environment"]]
    whole = RESULTS.with_suffix(".part")
    whole.write_text("\n".join([*kept, json.dumps(dated)]) + "\n", encoding="utf-8")
    whole.replace(RESULTS)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
