"""The house: what may import what, what importing changes, and which names are public."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import hf_memopt

PACKAGE = Path(hf_memopt.__file__).parent
WINGS = ("training", "prediction")
PUBLIC = ("gpus", "techniques", "types")  # modules of public names, which import what nobody inside imports
ROOMS = ("batching", "techniques", "memory", "rows")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def inner_modules() -> list[Path]:
    return [path for path in modules() if path.parent != PACKAGE or path.stem not in PUBLIC]


def faces() -> dict[str, dict[str, str]]:
    """Return for each folder the names that others may import of it, and the module that each comes from."""
    found = {}
    for stub in PACKAGE.glob("*/**/__init__.pyi"):
        folder = ".".join(["hf_memopt", *stub.parent.relative_to(PACKAGE).parts])
        nodes = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        found[folder] = {alias.name: f"{folder}.{node.module or alias.name}" for node in nodes for alias in node.names}
    return found


FACES = faces()


@cache
def import_nodes(path: Path, for_type_checkers: bool = True) -> list[ast.Import | ast.ImportFrom]:
    found, waiting = [], [ast.parse(path.read_text(encoding="utf-8"))]  # type: list[Any], list[Any]
    while waiting:
        node = waiting.pop()
        found += [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if for_type_checkers or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            inner = ast.stmt | ast.excepthandler | ast.match_case
            waiting += [one for one in ast.iter_child_nodes(node) if isinstance(one, inner)]
    return found


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules of this package that a file imports, anywhere in it but under TYPE_CHECKING."""
    found = set()
    for node in import_nodes(path, for_type_checkers=False):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_memopt"):
            names = [alias.name for alias in node.names]
            if node.module == "hf_memopt":
                found |= {f"{node.module}.{name}" for name in names}
            elif node.module in FACES:
                found |= {FACES[node.module].get(name, f"{node.module}.{name}") for name in names}
            else:
                found.add(node.module or "")
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("hf_memopt")}
    return frozenset(found)


def room(module: str) -> str:
    """Return the folder of a module by its dotted name, without its wing; "ground" for the modules in none."""
    parts = [part for part in module.split(".")[1:] if part not in WINGS]
    return parts[0] if parts and parts[0] in ALLOWED else "ground"


# From the bottom to the top: a folder may import from itself and from what is named here, nothing above it.
BELOW = {"ground", "devices", "binding"}
ALLOWED = {
    "ground": set(),
    "devices": {"ground"},
    "binding": {"ground"},
    "batching": {*BELOW, "rows"},
    "techniques": BELOW,
    "reports": {"ground", "batching"},
    "rows": {"ground"},
    "memory": {*BELOW, "reports"},
    "recipes": {*BELOW, *ROOMS, "reports"},
    "rehearsal": {*BELOW, *ROOMS, "reports", "recipes"},
    "cli": {*BELOW, *ROOMS, "reports", "recipes", "rehearsal"},
    "__main__": {"cli"},
    "gpus": {"devices"},
    "types": {*BELOW, *ROOMS, "rehearsal"},
}


def test_imports_run_downwards() -> None:
    assert imports(PACKAGE / "__init__.py") == {"hf_memopt.errors"}  # where a name is unknown
    above = {}
    for path in set(modules()) - {PACKAGE / "__init__.py"}:
        module = ".".join(["hf_memopt", *path.relative_to(PACKAGE).with_suffix("").parts])
        allowed = {room(module), *ALLOWED[room(module)]}
        above[module] = {name for name in imports(path) if room(name) not in allowed} - {"hf_memopt.__version__"}
    assert not {module: names for module, names in above.items() if names}


def test_training_knows_nothing_of_prediction() -> None:
    """Nothing in the text names the other wing: no lazy import, none for type checkers, no "module:name"."""
    ground = [path for path in PACKAGE.glob("*.py") if path.stem not in PUBLIC]
    below = [*PACKAGE.glob("training/**/*.py*"), *ground, *PACKAGE.glob("training/**/*.csv")]
    naming = {path.name for path in below if re.search(r"hf_memopt[./]prediction", path.read_text(encoding="utf-8"))}
    assert not naming


def imported_modules(name: str, path: Path, names: set[str]) -> set[str]:
    """Return the modules among ``names`` that a file imports, ``from package import module`` included."""
    found = set(imports(path))
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in found}
    return found & names - {name}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules of which each one reaches every other by its imports."""
    reached = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:  # Warshall's transitive closure
        for name in graph:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    groups = (frozenset(other for other in reached[name] if name in reached[other]) for name in graph)
    return {group for group in groups if group}


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count, those for type checkers do not."""
    by_name = {".".join(["hf_memopt", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in modules()}
    graph = {name: imported_modules(name, path, set(by_name)) for name, path in by_name.items()}
    assert sum(map(len, graph.values())) > 100
    assert not circles(graph)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}


def test_every_public_name_is_there() -> None:
    """Which ones there are, docs/api.md lists, and a test of the documents compares."""
    for name in hf_memopt.__all__:
        assert getattr(hf_memopt, name) is not None


@pytest.mark.parametrize("folder", FACES)
def test_a_folder_has_a_face(folder: str) -> None:
    """At most twelve names, each imported by another folder or a test, and none that a file of the folder bears."""
    names, here = FACES[folder], PACKAGE.joinpath(*folder.split(".")[1:])
    assert len(names) <= 12
    assert ast.get_docstring(ast.parse((here / "__init__.py").read_text(encoding="utf-8")))
    files = {path.stem for path in here.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not {name for name, module in names.items() if name in files and module != f"{folder}.{name}"}
    assert USED.get(folder, set()) <= set(names) <= USED.get(folder, set()) | USED_BY_TESTS.get(folder, set())


def test_other_folders_are_imported_by_their_faces() -> None:
    inside = {
        f"{path.relative_to(PACKAGE)}: {node.module}"
        for path in inner_modules()
        for node in import_nodes(path)
        if isinstance(node, ast.ImportFrom)
        and (folder := (node.module or "").rpartition(".")[0]) in FACES
        and node.module not in FACES
        and PACKAGE.joinpath(*folder.split(".")[1:]) != path.parent
    }
    assert not inside


def used_names(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return the names of each folder that files outside it import by its face."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for node in import_nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module in FACES:
                is_inside = path.parent == PACKAGE.joinpath(*node.module.split(".")[1:])
                found.setdefault(node.module, set()).update(alias.name for alias in node.names if not is_inside)
    return found


USED = used_names(inner_modules())
USED_BY_TESTS = used_names(path for folder in ("tests", "examples") for path in (PACKAGE.parent / folder).rglob("*.py"))


def test_no_module_on_the_ground_floor_bears_the_name_of_a_public_function() -> None:
    taken = {path.stem for path in PACKAGE.iterdir()}
    assert taken.isdisjoint(hf_memopt.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError) as error:
        _ = hf_memopt.no_such_name
    assert str(error.value) == "module 'hf_memopt' has no attribute 'no_such_name'"
    with pytest.raises(AttributeError) as error:
        hf_memopt.Bucketed  # noqa: B018
    assert str(error.value) == "module 'hf_memopt' has no attribute 'Bucketed'. Did you mean 'bucketed'?"


@pytest.mark.parametrize("name", hf_memopt._GONE)
def test_a_name_that_is_gone_says_what_to_use(name: str) -> None:
    assert name not in hf_memopt.__all__
    with pytest.raises(ImportError) as error:
        exec(f"from hf_memopt import {name}")
    assert str(error.value) == f"hf_memopt.{name} was removed after 0.5.0. Use {hf_memopt._GONE[name]}"


@pytest.mark.parametrize("name", hf_memopt._OLD)
def test_a_name_of_before_works_with_a_warning(name: str) -> None:
    place, new = hf_memopt._OLD[name]
    with pytest.warns(UserWarning, match=re.escape(f"hf_memopt.{name} is now {new}, and goes with the next version.")):
        found = getattr(hf_memopt, name)
    assert name not in hf_memopt.__all__
    assert found is getattr(importlib.import_module(place), new if place == "hf_memopt" else name)
    assert not new.startswith("hf_memopt.") or found is getattr(getattr(hf_memopt, new.split(".")[1]), name)


def test_every_data_file_is_installed() -> None:
    """setup.cfg lists them one on a line: setuptools does not split a line at commas where there are several lines."""
    settings = configparser.ConfigParser()
    settings.read(PACKAGE.parent / "setup.cfg", encoding="utf-8")
    listed = settings["options.package_data"]["hf_memopt"].split("\n")
    data = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyi", ".pyc")]
    data += PACKAGE.glob("prediction/rehearsal/hook/*.py")  # found by Python itself, so its folder is no package
    assert sorted(filter(None, listed)) == sorted(path.relative_to(PACKAGE).as_posix() for path in data)


WATCH = """
import logging, os, random, sys, warnings
import {before}
before = (dict(os.environ), logging.root.level, list(logging.root.handlers), random.getstate(), list(warnings.filters))
import hf_memopt
{after}
now = (dict(os.environ), logging.root.level, list(logging.root.handlers), random.getstate(), list(warnings.filters))
assert now == before, [a for a, b in zip(now, before) if a != b]
print(*(name for name in ("torch", "transformers", "numpy", "bitsandbytes") if name in sys.modules))
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_the_package_is_light_and_changes_nothing() -> None:
    assert run(WATCH.format(before="math", after="")) == ""


@pytest.mark.slow
def test_loading_every_public_name_changes_no_global_state() -> None:
    """Beyond what torch, transformers and bitsandbytes themselves do when they are imported."""
    before = "torch, transformers, transformers.trainer, bitsandbytes, datasets, tqdm.auto"
    after = (
        "import torch; dtype, seed = torch.get_default_dtype(), torch.initial_seed();"
        "[getattr(hf_memopt, name) for name in hf_memopt.__all__];"
        "assert (torch.get_default_dtype(), torch.initial_seed()) == (dtype, seed);"
        "assert not torch.cuda.is_initialized()"
    )
    assert "torch" in run(WATCH.format(before=before, after=after))


ESTIMATE = """
import sys, transformers.models.bert.modeling_bert
by_transformers = set(sys.modules)
from hf_memopt.cli import main
sys.argv = "hf-memopt estimate bert-base-uncased --batch-size 2 --seq-len 16 --gpu T4".split()
try:
    main()
except SystemExit as stop:
    assert stop.code == 0
added = set(sys.modules) - by_transformers
packages = ("peft", "bitsandbytes", "datasets", "torch._inductor", "torch.distributed.tensor", "transformers.trainer")
loaded = [name for name in packages if any(module == name or module.startswith(name + ".") for module in added)]
never = ("peft", "bitsandbytes", "datasets", "torch._inductor.compile_fx")
print(loaded, [name for name in never if name in sys.modules])
"""


@pytest.mark.slow
def test_a_plain_estimate_imports_neither_the_trainer_nor_a_compiler() -> None:
    """Nothing beyond what transformers imports with the class of the model.

    That includes parts of ``torch._inductor`` and ``torch.distributed.tensor``, which no import of a model can avoid
    (transformers 5.23.0, torch 2.13.0): ``masking_utils`` imports ``torch._dynamo``, which imports
    ``torch._inductor.test_operators``, and ``core_model_loading`` imports ``distributed.sharding_utils``, which imports
    ``torch.distributed.tensor``.
    """
    assert run(ESTIMATE).splitlines()[-1] == "[] []"
