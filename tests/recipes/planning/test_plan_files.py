"""``Plan.write`` and ``hf-memopt plan --write``: nothing is overwritten, nothing is half written, recipes come back."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from installed import install
from invoked import invoked
from printed_errors import in_one_line, stopped

import tiny
from hf_memopt import Plan, Recipe, __version__, plan, recipe

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SMALL = ("--seq-len", "8", "--effective-batch", "1", "--method", "full")
GPU = ("--gpu", "RTX 3060 12GB")
SEARCH = "hf_memopt.prediction.recipes.planning.planner.facts_of"
"""What a search begins with."""


@pytest.fixture(scope="module")
def found() -> Plan:
    config = tiny.llama_config(num_hidden_layers=1)
    return plan(config, gpu="RTX 3060 12GB", seq_len=8, effective_batch_size=1, method="full")


@pytest.fixture(scope="module")
def choice() -> Plan:
    """Return a plan for a head that no script is made for."""
    config = transformers.BertConfig(**{**tiny.bert_config().to_dict(), "num_hidden_layers": 1})
    return plan(config, gpu="RTX 3060 12GB", seq_len=8, effective_batch_size=1, method="full", task="multiple-choice")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.llama_config(num_hidden_layers=1).save_pretrained("model")
    return tmp_path


def run(*options: str) -> Any:
    return invoked("plan", "model", *options)


def test_the_command_stands_in_the_script_and_what_is_missing_is_said(work: Path) -> None:
    done = run(*GPU, *SMALL, "--write", "a run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["fits"] is True
    assert done.stderr.splitlines()[-4:] == [
        "Written: a run/train.py and a run/recipe.json",
        "Note: before you run it, complete in a run/train.py: the data file.",
        f"  {install()}",
        "  python 'a run/train.py'",
    ]
    assert sorted(path.name for path in (work / "a run").iterdir()) == ["recipe.json", "train.py"]
    lines = (work / "a run/train.py").read_text().splitlines()
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    assert " ".join(lines[2:4]).startswith(f"# Made by hf-memopt {__version__} with {versions}: hf-memopt plan")
    assert 'data_files="train.jsonl")  # FILL IN: the data file' in "\n".join(lines)


def test_files_are_overwritten_with_force_alone_and_the_search_does_not_start(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "run").mkdir()
    for name in ("train.py", "notes.txt"):
        (work / "run" / name).write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(SEARCH, None)
        assert stopped(run(*GPU, *SMALL, "--write", "run")) == (
            "--write run has train.py already; expected a folder without, so that nothing is overwritten. "
            "Pass --force, or another folder"
        )
    assert run(*GPU, *SMALL, "--write", "run", "--force").exit_code == 0
    written = {path.name: path.read_text() for path in (work / "run").iterdir()}
    assert written.keys() == {"train.py", "recipe.json", "notes.txt"}
    assert written["train.py"] != written["notes.txt"] == "mine"


def test_the_line_that_installs_names_what_it_was_installed_from(
    choice: Plan, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for told, named in {
        '{"url": "file:///my%20wheels/hf_memopt-9-py3-none-any.whl"}': "'/my wheels/hf_memopt-9-py3-none-any.whl'",
        '{"url": "https://a.site/hf_memopt.git", "vcs_info": {}}': "hf-memopt",
        None: "hf-memopt",
    }.items():
        monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda self, name, told=told: told)
        assert choice.write("other", force=True).commands == (f"pip install {named}",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--write", "file"), "--write file cannot be a folder: 'file' is a file; expected a folder or a new path. "),
        (("--write", "file/run"), "cannot be a folder: '{}/file' is a file; expected a folder or a new path. "),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_the_search(
    options: tuple[str, ...], says: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "file").write_text("mine")
    monkeypatch.setattr(SEARCH, None)
    done = run(*GPU, *SMALL, *options)
    assert done.exit_code == 2
    assert says.format(work) in in_one_line(done.output)
    assert (work / "file").read_text() == "mine"


def test_where_nothing_fits_nothing_is_written(work: Path) -> None:
    done = run("--gpu", "160MiB", *SMALL, "--write", "run")
    assert done.exit_code == 1, done.output
    assert done.output.splitlines()[-1] == "Nothing was written to run: no set-up fits."
    assert not (work / "run").exists()


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    found: Plan, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.write("run")
    before = (work / "run/recipe.json").read_bytes()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left on device"):
        found.write("run", force=True)
    assert (work / "run/recipe.json").read_bytes() == before
    assert sorted(path.name for path in (work / "run").iterdir()) == ["recipe.json", "train.py"]


def test_a_model_without_a_name_and_a_head_without_a_script_are_said(found: Plan, choice: Plan, work: Path) -> None:
    written = found.write("run")
    assert written.notes[0].startswith("before you run it, complete in run/train.py: NAME; the data file")
    other = choice.write("other")
    assert other.script is None
    assert str(other) == (
        "Written: other/recipe.json\n"
        "Note: there is no script for multiple-choice; the parts of a Trainer are methods of "
        "recipe('other/recipe.json').\n"
        f"  {install()}"
    )
    assert recipe(other.recipe) == choice.recipe


@pytest.mark.slow
def test_a_model_that_is_changed_in_memory_has_no_script_and_the_call_has_what_was_asked(work: Path) -> None:
    adapted = Recipe("mine", "a test", lora=4).prepare_model(tiny.bert())
    planned = plan(adapted, gpu="RTX 3060 12GB", budget="8GB", seq_len=16, effective_batch_size=2)
    note = "there is no script for this model; the parts of a Trainer are methods of recipe('run/recipe.json')"
    assert planned.write("run").notes[0] == note
    assert json.loads(planned.to_json())["command"].startswith(
        "plan(model, gpu='RTX 3060 12GB', budget='8GB', seq_len=16"
    )


# ---- recipe.json


def test_a_recipe_comes_back_and_one_edited_into_nonsense_is_refused(found: Plan, work: Path) -> None:
    written = found.write("run")
    assert recipe(str(written.recipe)) == recipe(written.recipe) == found.recipe
    values = json.loads(written.recipe.read_text())
    written.recipe.write_text(json.dumps({**values, "lroa": 16}))
    start = "^name='run/recipe.json' holds no recipe: lroa=16 is not a field of Recipe; expected one of name, purpose, "
    with pytest.raises(ValueError, match=start):
        recipe(written.recipe)


def test_a_recipe_without_a_format_is_of_the_first_one(found: Plan) -> None:
    values = json.loads(found.recipe.to_json())
    assert values.pop("format") == 1
    assert Recipe.from_json(json.dumps(values)) == found.recipe


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.json", "name='none.json' cannot be read (No such file or directory); expected a file that Plan.write "),
        (Path("model"), "name='model' cannot be read (Is a directory); expected a file that Plan.write has written. "),
        ("list.json", "name='list.json' holds no recipe: text='[1]' is not a recipe (it is not an object but [1]); "),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(name: Any, says: str, work: Path) -> None:
    (work / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        recipe(name)
