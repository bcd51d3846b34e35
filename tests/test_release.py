"""The wheel and the source distribution: built, installed in an environment of their own, run outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import hf_memopt

ROOT = Path(__file__).resolve().parent.parent
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # a build changes sys.argv
print(build_meta.build_wheel(folder), build_meta.build_sdist(folder))
"""


def test_the_citation_is_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [hf_memopt.__version__]
    assert re.findall(r"^license: (\S+)$", citation, re.MULTILINE) == ["Apache-2.0"]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return what a command prints; PYTHONPATH does not lead it to the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command_line = [str(word) for word in command]
    done = subprocess.run(
        command_line, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution, built of a copy of the files that a build needs."""
    pytest.importorskip("setuptools", minversion="77")
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hf_memopt", source / "hf_memopt", ignore=shutil.ignore_patterns("__pycache__"))
    wheel, sdist = run(sys.executable, "-c", BUILD, dist, cwd=source).split()[-2:]
    return dist / wheel, dist / sdist


def files_of_the_package() -> set[str]:
    found = (path for path in (ROOT / "hf_memopt").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.slow
def test_wheel_and_source_distribution_have_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    version = hf_memopt.__version__
    assert [wheel.name, sdist.name] == [f"hf_memopt-{version}-py3-none-any.whl", f"hf_memopt-{version}.tar.gz"]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"hf_memopt-{version}.dist-info/METADATA").decode()
    assert {name for name in names if name.startswith("hf_memopt/")} == files_of_the_package()
    assert f"hf_memopt-{version}.dist-info/licenses/LICENSE" in names
    assert re.search(r"^License(-Expression)?: Apache-2.0$", metadata, re.MULTILINE)
    assert {"plot", "peft"} <= set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of_the_package() | {"setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= inside


@pytest.mark.slow
def test_the_installed_wheel_works_outside_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The dependencies are those of this environment, by a .pth file, so that nothing is downloaded."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    inside = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", vars=inside))
    scripts = Path(sysconfig.get_path("scripts", vars=inside))
    python, command = scripts / Path(sys.executable).name, scripts / "hf-memopt"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, built[0], cwd=tmp_path)
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(shared)) + "\n", encoding="utf-8")
    where = run(python, "-c", "import hf_memopt; print(hf_memopt.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(environment)
    assert run(command, "--version", cwd=tmp_path) == f"hf-memopt {hf_memopt.__version__}\n"
    assert run(command, "doctor", cwd=tmp_path).startswith(("CPU only: installed correctly", "Ready to train: "))
    assert "4gb-gpu" in run(command, "presets", cwd=tmp_path)
    assert "Llama-3.1-8B" in run(command, "estimate", "--list-models", cwd=tmp_path)
    plan = ROOT / "benchmarks" / "results" / "plan-example.json"
    run(command, "report", plan, "-o", tmp_path / "plan.html", cwd=tmp_path)  # its template and style are package data
    assert "<style>" in (tmp_path / "plan.html").read_text(encoding="utf-8")
