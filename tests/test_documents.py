"""README, changelog, notebook and docstrings tell what the code does: their code runs, their tables are current."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import sentences
import table
import yaml
from chromium import CHROMIUM, Chromium
from table_of_code import RUN, compatibility_pairs

import hf_memopt
from hf_memopt.technique_list import TECHNIQUES
from hf_memopt.training.binding.compatibility import refusal_of
from hf_memopt.training.binding.compatibility.conflicts import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_memopt"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)


@pytest.mark.slow
def test_examples_in_docstrings_run() -> None:
    assert [name for name in MODULES if doctest.testmod(importlib.import_module(name)).failed] == []


def test_generated_parts_of_the_pages_are_current() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in table.PAGES}
    assert table.unplaced(texts.values()) == []
    if f"typer=={version('typer')}" not in (ROOT / "constraints.txt").read_text(encoding="utf-8").split():
        del texts["cli.md"]  # other versions lay the help out differently
    stale = [name for name, text in texts.items() if table.rendered(text) != text]
    assert stale == [], "run: python benchmarks/table.py"


def test_few_sentences_of_the_pages_are_long_and_no_word_is_to_be_left_out() -> None:
    found = sentences.joined(sentences.read(path.read_text(encoding="utf-8")) for path in sentences.WRITTEN)
    assert found.words == [], "run: python benchmarks/sentences.py --show"
    assert len(found.long) <= sentences.LONG_SHARE * len(found.sentences), "run: python benchmarks/sentences.py --show"


def test_sentences_are_counted_by_words_outside_of_code_and_tables() -> None:
    long = " ".join(["word"] * 24)
    text = f"""# {long} one two\n\n{long} `a b c` [d](e).\n{long} 4 + 4. What we were told is.\n
- {long} of our own
| {long} to spare | that |\n\n```sh\n{long} stock.\n```\n<!-- judge:begin -->\n{long} 4 4\n<!-- judge:end -->\n"""
    found = sentences.read(text)
    assert [len(one.split()) for one in found.sentences] == [26, 27, 5, 27]
    assert [len(one.split()) for one in found.long] == [26, 27, 27]
    assert [what for what, _ in found.words] == ["what ... is", "told", "of one's own", "to spare"]


def test_each_page_is_called_as_in_the_navigation() -> None:
    def entries(part: Any) -> Iterator[tuple[str, str]]:
        for label, found in ((label, found) for one in part for label, found in one.items()):
            yield from entries(found) if isinstance(found, list) else [(found, label)]

    nav = dict(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    pages = {page.name: page.read_text(encoding="utf-8").partition("\n")[0] for page in table.PAGES[1:]}
    assert {page: f"# {label}" for page, label in nav.items() if page.endswith(".md")} == pages


def test_counts_of_models_and_gpus_are_generated() -> None:
    by_hand = re.compile(r"\b\d{3} (?:(?:known|well-known|other) )?(?:models|GPUs|well-known|names)\b")
    texts = {page.name: page.read_text(encoding="utf-8") for page in table.PAGES}
    assert {name: by_hand.findall(text) for name, text in texts.items() if by_hand.search(text)} == {}
    counted = {name: [marked["name"] for marked in table.COUNTED.finditer(text)] for name, text in texts.items()}
    assert {one for names in counted.values() for one in names} == {*table.COUNTS}
    models, gpus = (table.COUNTS[f"{what}-of-the-page"]() for what in ("models", "gpus"))
    assert not [name for name, text in texts.items() if re.search(r"^<!--[\w-]+-->\d", text, re.MULTILINE)]  # of HTML
    title = f"<title>Does it fit? Training memory of {models} models on {gpus} GPUs</title>"
    assert title in (ROOT / "docs" / "does-it-fit.html").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("api*.md")))
    named = re.findall(r"^::: (\S+)\.(\w+)$", reference, flags=re.MULTILINE)
    stub = Path(hf_memopt.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    public = {
        (f"hf_memopt.{module}", name) for module, name in re.findall(r"^from \.(\S+) import (\w+) as", stub, re.M)
    }
    for module in (hf_memopt.gpus, hf_memopt.techniques, hf_memopt.types):
        text = Path(module.__file__).read_text(encoding="utf-8")
        public |= {*re.findall(r"^from (\S+) import (\w+) as", text, re.M)}
    assert {*named} == public


def test_changelog_has_this_version() -> None:
    assert f"## [{hf_memopt.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_wheel_that_is_installed_is_of_this_version() -> None:
    for page in ("README.md", "docs/getting-started.md"):
        named = set(re.findall(r"hf_memopt-([\d.]+)-py3-none-any\.whl", (ROOT / page).read_text(encoding="utf-8")))
        assert named == {hf_memopt.__version__}, page


def test_makefile_has_the_targets_that_the_readme_names() -> None:
    readme = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z][a-z-]*)", readme)) - {"and", "it"}
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    assert named <= targets, named - targets


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_short_and_show_their_outputs_and_a_picture(path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(cells) <= 15
    assert all(cell["execution_count"] for cell in code)
    shown = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output["output_type"] == "error" or output.get("name") == "stderr"]


def test_a_notebook_keeps_what_is_printed_and_the_notices_of_the_package(monkeypatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    printed = [("stdout", "one\n"), ("stderr", "[memopt] step 1: cut\nUserWarning: no\n"), ("stdout", "two\n")]
    picture = nbformat.v4.new_output("display_data", data={"image/png": "AA=="})
    streams = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in printed]
    shown = importlib.import_module("execute").shown_outputs([*streams, picture, streams[0]])
    assert [output.get("text") for output in shown] == ["one\n[memopt] step 1: cut\ntwo\n", None, "one\n"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_offline(path, monkeypatch) -> None:
    pytest.importorskip("nbclient")
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    importlib.import_module("execute").execute(path)  # raises the error of a cell


@pytest.mark.slow
def test_the_documentation_builds(tmp_path) -> None:
    pytest.importorskip("mkdocs")
    found = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "api.html").exists()
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html")}
    loads = re.compile(r"""<(?:script|link rel="?stylesheet)[^>]*(?:src|href)="?https?:""")
    assert [name for name, text in pages.items() if loads.search(text)] == []  # they work without a network
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with Chromium(tmp_path / "profile") as browser:
        browser.open(tmp_path / "index.html", 1280)
        browser.value("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text="padding")
        found = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        wait = f"new Promise(done => setInterval(() => {found}.length && done({found}), 100))"
        assert any(link.partition("?")[0].endswith("/cut-padding.html") for link in browser.value(wait))
        assert not [one for one in browser.complaints() if one.startswith("http")]


def test_the_table_of_exceptions_tells_what_is_refused() -> None:
    refused, untried = (
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines()[2:]]
        for part in table.compatibility().split("\n\n")
    )
    shown = {frozenset((row, column)): why for row, columns, *why in refused for column in columns.split("; ")}
    pairs = compatibility_pairs()
    assert {(row, column) for row in TECHNIQUES for column in SETTINGS} < {*pairs}
    expected = {frozenset(pair): refusal_of(*pair) for pair in pairs}
    assert shown == {pair: [found.reason, found.fix] for pair, found in expected.items() if found is not None}
    named = {column for columns, _ in untried for column in columns.split("; ")}
    assert named == {*SETTINGS} - {*RUN}
