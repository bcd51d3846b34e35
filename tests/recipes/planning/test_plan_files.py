"""``Plan.write`` and ``hf-memopt plan --write``: nothing is overwritten, nothing is half written, recipes come back."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from installed import install
from printed_errors import in_one_line
from typer.testing import CliRunner

import tiny
from hf_memopt import Plan, Recipe, __version__, plan, recipe
from hf_memopt.cli.app import app
from hf_memopt.memory.models import name_on_hub
from hf_memopt.recipes.planning import planner as planning

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SMALL = ("--seq-len", "8", "--effective-batch", "1", "--method", "full")
GPU = ("--gpu", "RTX 3060 12GB")


@pytest.fixture(scope="module")
def found() -> Plan:
    config = tiny.llama_config(num_hidden_layers=1)
    return plan(config, gpu="RTX 3060 12GB", seq_len=8, effective_batch_size=1, method="full")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.llama_config(num_hidden_layers=1).save_pretrained("model")
    return tmp_path


def run(*options: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", "model", *options])


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


def test_a_launchers_file_is_not_overwritten_and_the_search_does_not_start(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "run").mkdir()
    (work / "run/accelerate.yaml").write_text("mine")
    monkeypatch.setattr(planning, "facts_of", None)  # the search would stop at it
    done = run(*GPU, *SMALL, "--effective-batch", "2", "--gpus", "2", "--strategy", "fsdp2", "--write", "run")
    assert done.exit_code == 2
    assert done.output.startswith("error: --write run has accelerate.yaml already; expected a folder without")
    assert [path.name for path in (work / "run").iterdir()] == ["accelerate.yaml"]


def test_files_are_overwritten_with_force_alone_and_the_search_does_not_start(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "run").mkdir()
    (work / "run/train.py").write_text("mine")
    (work / "run/notes.txt").write_text("mine too")
    monkeypatch.setattr(planning, "facts_of", None)  # the search would stop at it
    done = run(*GPU, *SMALL, "--write", "run")
    assert done.exit_code == 2
    assert in_one_line(done.output) == (
        "--write run has train.py already; expected a folder without, so that nothing is overwritten. Pass --force, or "
        "another folder\n"
    )
    assert (work / "run/train.py").read_text() == "mine"
    monkeypatch.undo()
    monkeypatch.chdir(work)
    assert run(*GPU, *SMALL, "--write", "run", "--force").exit_code == 0
    assert (work / "run/train.py").read_text() != "mine"
    assert (work / "run/notes.txt").read_text() == "mine too"


def test_the_line_that_installs_names_what_it_was_installed_from(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.BertConfig(**{**tiny.bert_config().to_dict(), "num_hidden_layers": 1})
    choice = plan(config, gpu="RTX 3060 12GB", seq_len=8, effective_batch_size=1, method="full", task="multiple-choice")
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
        (
            ("--force",),
            "--force has nothing to replace: no file is written; expected --write or --report. Pass --write DIR",
        ),
        (("--write", "file"), "--write file cannot be a folder: 'file' is a file; expected a folder or a new path. "),
        (("--write", "file/run"), "cannot be a folder: '{}/file' is a file; expected a folder or a new path. "),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_the_search(
    options: tuple[str, ...], says: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "file").write_text("mine")
    monkeypatch.setattr(planning, "facts_of", None)
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


def test_a_model_without_a_name_and_a_head_without_a_script_are_said(found: Plan, work: Path) -> None:
    written = found.write("run")
    assert written.notes[0].startswith("before you run it, complete in run/train.py: NAME; the data file")
    config = transformers.BertConfig(**{**tiny.bert_config().to_dict(), "num_hidden_layers": 1})
    choice = plan(config, gpu="RTX 3060 12GB", seq_len=8, effective_batch_size=1, method="full", task="multiple-choice")
    other = choice.write("other")
    assert other.script is None
    assert str(other) == (
        "Written: other/recipe.json\n"
        "Note: there is no script for multiple-choice; call recipe('other/recipe.json').trainer(...).\n"
        f"  {install()}"
    )
    assert recipe(other.recipe) == choice.recipe


@pytest.mark.parametrize(
    ("typed", "loaded"),
    [
        ("gpt2", "openai-community/gpt2"),
        ("T5-base", "google-t5/t5-base"),
        ("Mistral-7B", "mistralai/Mistral-7B-v0.3"),
        ("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("vit-base", "google/vit-base-patch16-224"),
        ("my/model", "my/model"),
    ],
)
def test_a_well_known_name_is_loaded_with_its_organisation(typed: str, loaded: str) -> None:
    assert name_on_hub(typed) == loaded


# ---- recipe.json

BAD = [
    (
        {"format": 2},
        f"format=2 is that of a newer hf-memopt than {__version__}; expected 1 at most. Call: pip install ",
    ),
    ({"format": "new"}, "format='new' is invalid; expected an integer of 1 or more. Pass format=1"),
    ({"lroa": 16}, "lroa=16 is not a field of Recipe; expected one of name, purpose, "),
    ({"lora": "16"}, "lora='16' is invalid; expected an integer of 1 or more, or None. Pass lora=None"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is invalid; expected an integer of 1 or more."),
    (
        {"precision": "bf"},
        "precision='bf' is invalid; expected 'auto', 'bf16', 'fp16', 'tf32' or 'fp32'. Did you mean 'bf16'?",
    ),
    ({"optim": "adamw_8bits"}, "optim='adamw_8bits' is not an optimizer whose memory is known; expected one of "),
    ({"load_in": "nf4"}, "load_in='nf4', lora=None leave nothing to train: "),
]


@pytest.mark.parametrize(("changed", "says"), BAD)
def test_a_recipe_that_was_edited_into_nonsense_is_refused(
    changed: dict[str, Any], says: str, found: Plan, work: Path
) -> None:
    written = found.write("run")
    assert recipe(str(written.recipe)) == recipe(written.recipe) == found.recipe
    values = json.loads(written.recipe.read_text())
    written.recipe.write_text(json.dumps({**values, **changed}))
    with pytest.raises(ValueError) as error:
        recipe(written.recipe)
    assert str(error.value).startswith(f"name='run/recipe.json' holds no recipe: {says}")


def test_a_recipe_without_a_format_is_of_the_first_one_and_one_that_is_not_estimable_is_read(found: Plan) -> None:
    values = json.loads(found.recipe.to_json())
    assert values.pop("format") == 1
    assert Recipe.from_json(json.dumps(values)) == found.recipe
    assert Recipe.from_json(json.dumps({**values, "optim": "adamw_torch_4bit"})).optim == "adamw_torch_4bit"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.json", "name='none.json' cannot be read (No such file or directory); expected a file that Plan.write "),
        (Path("model"), "name='model' cannot be read (Is a directory); expected a file that Plan.write has written. "),
        ("bytes.json", "name='bytes.json' cannot be read (it is not UTF-8 text); expected a file that Plan.write "),
        ("list.json", "name='list.json' holds no recipe: text='[1]' is not a recipe (it is not an object but [1]); "),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(name: Any, says: str, work: Path) -> None:
    (work / "bytes.json").write_bytes(b"\xff")
    (work / "list.json").write_text("[1]")
    with pytest.raises(ValueError) as error:
        recipe(name)
    assert str(error.value).startswith(says)


def test_a_recipe_of_a_file_takes_no_other_model(found: Plan, work: Path) -> None:
    with pytest.raises(ValueError, match="is a recipe for one model already, and another is given; expected only"):
        recipe(found.write("run").recipe, "bert-base-uncased")
