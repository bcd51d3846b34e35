"""``hf-memopt estimate``: options, exit codes, whole messages; the simulation stands in, but for one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers
from printed_errors import in_one_line
from tables import tables
from transformers import BertConfig
from typer.testing import CliRunner

from hand_made import hand_made
from hf_memopt import recipe
from hf_memopt.cli import estimate_command
from hf_memopt.cli.app import app
from hf_memopt.prediction.memory import Estimate
from hf_memopt.prediction.memory.models import known_models
from hf_memopt.prediction.memory.output import as_dict
from hf_memopt.prediction.memory.settings import NotEstimableError, StepSettings
from hf_memopt.training.devices import custom_gpu, find_gpu

TABLES = tables(__file__)

runner = CliRunner()
MIB = 2**20
CARD = "RTX 3050 4GB"


class Simulation:
    """Stands in for ``estimate``: keeps its calls, answers by hand; without checkpointing it is 4 times as large."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: ValueError | None = None

    def __call__(self, model: Any, **given: Any) -> Estimate:
        self.calls.append({"model": model, **given})
        if self.error is not None:
            raise self.error
        gpu, batch_size, seq_len = given["gpu"], given["batch_size"], given["seq_len"]
        names = set(given) - {"gpu", "batch_size", "seq_len", "recipe", "task"}
        start = StepSettings() if given.get("recipe") is None else given["recipe"].step_settings()
        settings = start.replace(**{name: given[name] for name in names})
        context_bytes = None if gpu is None else gpu.context_bytes
        found = hand_made(1 if settings.checkpointing else 4)
        shape = {"batch_size": batch_size, "seq_len": seq_len, "gpu": gpu, "context_bytes": context_bytes}
        plain = {name: getattr(settings, name) for name in ("checkpointing", "gradient_accumulation_steps", "optim")}
        return hand_made(1 if settings.checkpointing else 4, model=found.model, settings=plain, **shape)


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """The simulation that the command calls, on a machine without a card."""
    stand_in = Simulation()
    monkeypatch.setattr("hf_memopt.prediction.memory.estimate", stand_in)
    monkeypatch.setattr(estimate_command, "find_config", lambda text: Path(text))
    return stand_in


def run(*options: str) -> Any:
    return runner.invoke(app, ["estimate", "bert-large", *options], env={"COLUMNS": "80"})


def lines(text: str) -> str:
    """Return printed text without the spaces that end its lines."""
    return "\n".join(line.rstrip() for line in text.splitlines())


# ---- One set-up


def test_what_fits_ends_with_0_and_prints_the_table(simulation) -> None:
    result = run("--batch-size", "32", "--seq-len", "128", "--gpu", "geforce rtx 3050 4gb", "--checkpointing")
    assert (result.exit_code, result.stderr) == (0, "")
    gpu = find_gpu(CARD)
    assert simulation.calls == [
        {"model": "bert-large", "batch_size": 32, "seq_len": 128, "recipe": None, "gpu": gpu, "checkpointing": True}
    ]
    expected = hand_made(gpu=gpu, context_bytes=gpu.context_bytes, settings={"checkpointing": True})
    assert lines(result.stdout) == expected.table()


PLAN = "hf-memopt plan bert-large --gpu 'RTX 3050 4GB'"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--gpu", CARD], f"{PLAN} --effective-batch 8"),
        (["--gpu", CARD, "-s", "64", "-b", "4", "--grad-accum", "3"], f"{PLAN} --seq-len 64 --effective-batch 12"),
        (["--gpu", CARD, "--task", "causal-lm"], f"{PLAN} --task causal-lm --effective-batch 8"),
        (["--gpu-memory", "3GiB"], "hf-memopt plan bert-large --gpu 3GiB --effective-batch 8"),
    ],
)
def test_what_does_not_fit_ends_with_1_and_the_line_to_type(options: list[str], line: str) -> None:
    result = run(*options)
    assert (result.exit_code, result.stderr) == (1, "")
    *_, printed = lines(result.stdout).splitlines()
    assert printed == f"Next     {line}"
    assert "\nDOES NOT FIT " in result.stdout
    words = shlex.split(line)
    plan = runner.invoke(app, [*words[1:], "--goal", "?"])  # its options are understood, up to this one
    assert "--goal" in plan.stderr


def test_what_is_too_close_to_tell_ends_with_3(simulation) -> None:
    gpu = custom_gpu("4GiB", "8.0")
    mib = -(-hand_made(1, context_bytes=gpu.context_bytes).total_bytes // MIB)
    result = run("--gpu-memory", f"{mib}MiB", "--compute-capability", "8.0", "--checkpointing")
    assert "\nTOO CLOSE TO TELL on custom " in result.stdout
    assert result.exit_code == 3


@pytest.mark.parametrize(("options", "code"), [(["--checkpointing"], 0), (["--no-checkpointing"], 1)])
def test_json_prints_nothing_else(simulation, options, code) -> None:
    result = run("--gpu", CARD, "--json", *options)
    assert (result.exit_code, result.stderr) == (code, "")
    call = simulation.calls[0]
    expected = Simulation()(call.pop("model"), **call)
    assert json.loads(result.stdout) == json.loads(json.dumps(as_dict(expected)))


def test_every_option_reaches_the_simulation(simulation) -> None:
    options = ["--precision", "bf16", "--optim", "adafactor", "--no-checkpointing", "--attn", "eager", "--task"]
    options += ["causal-lm", "--eval-batch-size", "4", "--gradient-accumulation-steps", "2", "--freeze", "embeddings"]
    options += ["--weights", "bf16", "--load-in", "4bit", "--lora", "16", "--no-autocast-cache"]
    options += ["--expandable-segments"]
    assert run(*options, "--freeze", "layers:0-3", "--gpu-memory", "4GiB", "--compute-capability", "7.5").exit_code == 1
    [call] = simulation.calls
    assert call == {
        "model": "bert-large",
        "batch_size": 8,
        "seq_len": None,
        "recipe": None,
        "gpu": custom_gpu("4GiB", "7.5"),
        "precision": "bf16",
        "weights_dtype": "bfloat16",
        "load_in": "nf4",
        "lora": 16,
        "freeze": ("embeddings", "layers:0-3"),
        "autocast_cache": False,
        "expandable_segments": True,
        "optim": "adafactor",
        "checkpointing": False,
        "attn_implementation": "eager",
        "task": "causal-lm",
        "eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }


@pytest.mark.parametrize(
    ("options", "batch_size", "steps"),
    [
        ([], 8, 4),
        (["--batch-size", "4"], 4, 8),
        (["--gradient-accumulation-steps", "16"], 2, 16),
        (["--batch-size", "4", "--gradient-accumulation-steps", "3"], 4, 3),
    ],
)
def test_a_preset_keeps_its_effective_batch_unless_both_are_given(simulation, options, batch_size, steps) -> None:
    chosen = recipe("4gb-gpu")
    assert (chosen.per_device_train_batch_size, chosen.effective_batch_size) == (8, 32)
    run("--preset", "4gb-gpu", *options)
    assert simulation.calls == [
        {
            "model": "bert-large",
            "batch_size": batch_size,
            "seq_len": None,
            "recipe": chosen,
            "gpu": None,
            "gradient_accumulation_steps": steps,
        }
    ]


def test_freezing_adds_to_what_the_preset_freezes(simulation, monkeypatch) -> None:
    frozen = recipe("4gb-gpu").replace(freeze=("embeddings",))
    monkeypatch.setattr("hf_memopt.cli.estimate_command.recipe", lambda name: frozen)
    run("--preset", "4gb-gpu", "--optim", "sgd", "--freeze", "layers:0")
    run("--checkpointing", "--freeze", "layers:0")
    assert simulation.calls[0]["optim"] == "sgd"
    assert [call["freeze"] for call in simulation.calls] == [("embeddings", "layers:0"), ("layers:0",)]


def test_the_picture_is_drawn_and_named(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    result = run("--plot", str(picture), "--checkpointing")
    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.splitlines()[-1] == f"Picture: {picture}"


# ---- Errors


@pytest.mark.parametrize(("options", "message"), TABLES["bad options"])
def test_bad_options_end_with_2_before_any_simulation(simulation, options, message) -> None:
    result = run(*options)
    assert (result.exit_code, result.stdout, in_one_line(result.stderr)) == (2, "", f"{message}\n")
    assert simulation.calls == []


@pytest.mark.parametrize(
    ("options", "name", "most"),
    [
        ([], "batch_size", 1000000),
        ([], "seq_len", 1000000),
        ([], "eval_batch_size", 1000000),
        ([], "gradient_accumulation_steps", 10000),
    ],
)
def test_counts_that_are_never_simulated_are_refused_at_once(simulation, options, name, most) -> None:
    option = f"--{name.replace('_', '-')}"
    result = run(*options, option, str(most + 1))
    assert (result.exit_code, result.stdout, in_one_line(result.stderr)) == (
        2,
        "",
        f"{option} {most + 1} is too large to simulate; expected 1 to {most}. Pass {option} 32\n",
    )
    assert simulation.calls == []


def test_the_well_known_names_are_listed() -> None:
    result = runner.invoke(app, ["estimate", "--list-models"])
    assert (result.exit_code, result.stdout.splitlines()) == (0, list(known_models()))


@pytest.mark.parametrize("error", [ValueError("seq_len=9 is too long"), NotEstimableError("not estimable: because")])
def test_what_is_not_estimable_ends_with_2_and_leaves_nothing(simulation, tmp_path, error) -> None:
    pytest.importorskip("matplotlib")
    simulation.error = error
    result = run("--json", "--plot", str(tmp_path / "timeline.png"))
    told = str(error).replace("seq_len=9", "--seq-len 9")
    assert (result.exit_code, result.stdout, in_one_line(result.stderr)) == (2, "", f"{told}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_prints_no_table(tmp_path, monkeypatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", full)
    result = run("--plot", str(tmp_path / "timeline.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: --plot {tmp_path / 'timeline.png'} cannot be written (No space left")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_code_of_its_own_asks_nothing_and_runs_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.undo()
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}')
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    result = runner.invoke(app, ["estimate", str(tmp_path), "--seq-len", "8"], input="y\n")
    assert (result.exit_code, result.stdout, in_one_line(result.stderr)) == (
        2,
        "",
        f"{str(tmp_path)!r} has a config.json that transformers {transformers.__version__} does not understand "
        "without Python code of its own, and no such code is run; expected a model type of transformers. Load it "
        "yourself in Python and pass the module\n",
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_real_model_from_a_folder(tmp_path, monkeypatch) -> None:
    """Through the true simulation."""
    monkeypatch.undo()
    BertConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=2,
        max_position_embeddings=64, architectures=["BertForSequenceClassification"],
    ).save_pretrained(tmp_path)  # fmt: skip
    options = ["--batch-size", "4", "--seq-len", "32", "--gpu", CARD]
    result = runner.invoke(app, ["estimate", str(tmp_path), *options, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert sum(found["components"].values()) == found["peak_allocated_bytes"] <= found["peak_reserved_bytes"]
    assert found["phase_peaks"][found["phase"]]["allocated_bytes"] == found["peak_allocated_bytes"]
    result = runner.invoke(app, ["estimate", str(tmp_path), "--seq-len", "65"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --seq-len 65 ")
