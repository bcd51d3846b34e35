"""Malformed options of every command: exit code 2 and one message on standard error, no traceback and no file."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hand_made_runs import finished_run
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from malformed import limited
from public_calls import SIZES
from typer.testing import CliRunner

import tiny
from hf_memopt.cli.app import app

pytestmark = pytest.mark.filterwarnings("ignore")

numbers = itertools.count()
BUG = "which is a bug in hf-memopt"

COMMANDS: dict[str, tuple[str, ...]] = {
    "gpus": ("3060",),
    "presets": ("4gb-gpu",),
    "lengths": ("rows.jsonl",),
    "estimate": ("model", "--batch-size", "1", "--seq-len", "8"),
    "plan": ("model", "--gpu", "RTX 3060 12GB", "--seq-len", "8", "--effective-batch", "1", "--method", "full"),
    "report": ("memopt_run.json", "--output", "page.html"),
    "doctor": (),
}
"""Valid arguments of each command, quick ones."""

PARAMETERS = {name: command.params for name, command in typer.main.get_command(app).commands.items()}
OPTIONS = {
    name: [max(one.opts, key=len) for one in parameters if one.param_type_name == "option" and one.name != "help"]
    for name, parameters in PARAMETERS.items()
}
FLAGS = {
    name: {max(one.opts, key=len) for one in parameters if getattr(one, "is_flag", False)}
    for name, parameters in PARAMETERS.items()
}

PLAIN = """- -- --no-such-option -1 0 1 7 0.5 nan inf -inf 1e308 no-such-word [/red] [bold] $\\frac{ %s%n {} ' " ; *
.. /dev/null /no/such/folder/x.png /no/such/x.html rows.jsonl model folder empty.json memopt_run.json
page.html a.png script.py T4 8GB -8GB 99999999GB 8.6 bf16 nf4 fsdp2 adamw_bnb_8bit auto full causal-lm True None cpu"""
WORDS = ("", " ", "9" * 30, "9" * 200, "x" * 200, "💾", "\u202e", "a\nb", *PLAIN.split())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tiny.llama_config(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
    (folder / "folder").mkdir()
    (folder / "empty.json").write_bytes(b"")
    (folder / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    (folder / "memopt_run.json").write_text(json.dumps(finished_run()))
    (folder / "script.py").write_text("raise ValueError('the script')\n")
    return folder


def run(arguments: Sequence[str], made: Path, folder: Path) -> Any:
    """Run a command in a folder of its own; assert that it works, or ends with one message and no file."""
    shutil.copytree(made, folder)
    before, former = tiny.files_of(folder), Path.cwd()
    try:
        os.chdir(folder)
        with limited():
            done = CliRunner().invoke(app, list(arguments))
        shown = f"{done.stdout[-500:]}\n{done.stderr[-1500:]}"
        assert done.exception is None or isinstance(done.exception, SystemExit), (done.exception, shown)
        assert done.exit_code in (0, 1, 2), shown
        assert "Traceback" not in done.output, shown
        assert BUG not in done.output, shown
        if done.exit_code == 2:
            lines = done.stderr.strip().splitlines()
            assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"]), shown
            usage = ("hint: See: ", "hint: Did you mean ", "hint: Pass ", "hint: It is an option")
            assert lines[-1].startswith(usage) or "expected" in lines[0] or "not estimable" in lines[0], shown
            assert tiny.files_of(folder) == before, "a file was written or changed"
        return done
    finally:
        os.chdir(former)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_with_every_word(name: str, made: Path, tmp_path: Path) -> None:
    """What takes longer than a check of options is drawn below."""
    words = WORDS if name in ("gpus", "presets", "lengths", "report") else WORDS[:21]
    for option in OPTIONS[name]:
        if name in ("estimate", "plan", "doctor") and option in FLAGS[name]:
            continue
        for word in words:
            given_words = (option,) if option in FLAGS[name] else (option, word)
            run((name, *COMMANDS[name], *given_words), made, tmp_path / "one")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_word_as_the_argument(name: str, made: Path, tmp_path: Path) -> None:
    rest = COMMANDS[name][1:]
    for word in WORDS if name not in ("estimate", "plan") else WORDS[:40]:
        run((name, word, *rest), made, tmp_path / "one")


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, ...]:
    name = draw(st.sampled_from(list(COMMANDS)))
    words = st.sampled_from(WORDS) | st.text(max_size=12).filter(lambda text: "\0" not in text)
    options: list[str] = []
    for option in draw(st.lists(st.sampled_from(OPTIONS[name]), max_size=3)) if OPTIONS[name] else []:
        options += [option] if option in FLAGS[name] else [option, draw(words)]
    arguments = list(COMMANDS[name])
    if draw(st.booleans()) and arguments:
        arguments[draw(st.integers(0, len(arguments) - 1))] = draw(words)
    return (name, *arguments, *options)


@seed(18)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(arguments=command_lines())
def test_drawn_command_lines(arguments: tuple[str, ...], made: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run(arguments, made, tmp_path_factory.getbasetemp() / f"command-{next(numbers)}")
