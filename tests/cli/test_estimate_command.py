"""``hf-memopt estimate``: options, exit codes, whole messages; the simulation stands in, but for one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from printed_errors import in_one_line
from tables import tables
from transformers import BertConfig
from typer.testing import CliRunner

from hand_made import hand_made
from hf_memopt import recipe
from hf_memopt.cli import compared_set_ups, estimate_command
from hf_memopt.cli.app import app
from hf_memopt.cli.compared_set_ups import compare, set_ups
from hf_memopt.devices import custom_gpu, find_gpu
from hf_memopt.memory import Estimate
from hf_memopt.memory.hints import Hint
from hf_memopt.memory.models import known_models
from hf_memopt.memory.output import as_dict
from hf_memopt.memory.settings import NotEstimableError, StepSettings

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

    def with_hints(self, model: Any, found: Estimate, *, announce: Any, task: str | None = None) -> Estimate:
        """Stand in for the search: one change that is enough, and two that are not but together."""
        if found.fits is not False:
            return found
        announce("trying batch_size=1, gradient_accumulation_steps=8")
        changes = {"batch_size": 1, "gradient_accumulation_steps": 8, "weights_dtype": "bfloat16"}
        return replace(found, hints=(Hint({"checkpointing": True}, 3 * MIB, MIB), Hint(changes, 9 * MIB, -5 * MIB)))


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """The simulation that the command calls, on a machine without a card."""
    stand_in = Simulation()
    monkeypatch.setattr("hf_memopt.memory.estimate", stand_in)
    monkeypatch.setattr("hf_memopt.memory.with_hints", stand_in.with_hints)
    monkeypatch.setattr(estimate_command, "find_config", lambda text: Path(text))
    monkeypatch.setattr(compared_set_ups, "estimate", stand_in)
    monkeypatch.setattr(compared_set_ups, "current_gpu", lambda: None)
    return stand_in


def run(*options: str) -> Any:
    return runner.invoke(app, ["estimate", "bert-large", *options], env={"COLUMNS": "80"})


def lines(text: str) -> str:
    """Return printed text without the spaces that end its lines."""
    return "\n".join(line.rstrip() for line in text.splitlines())


# ---- One set-up


def test_the_tokens_of_a_tile_are_a_number(simulation) -> None:
    assert run("--gpu", CARD, "--tiled", "--tile-tokens", "8").exit_code < 2  # whether it fits or not
    assert (simulation.calls[0]["tiled"], simulation.calls[0]["tile_tokens"]) == (True, 8)
    assert run("--gpu", CARD, "--tiled", "--tile-tokens", "0").exit_code == 2


def test_what_fits_ends_with_0_and_prints_the_table(simulation) -> None:
    result = run("--batch-size", "32", "--seq-len", "128", "--gpu", "geforce rtx 3050 4gb", "--checkpointing")
    assert (result.exit_code, result.stderr) == (0, "")
    gpu = find_gpu(CARD)
    assert simulation.calls == [
        {"model": "bert-large", "batch_size": 32, "seq_len": 128, "recipe": None, "gpu": gpu, "checkpointing": True}
    ]
    expected = hand_made(gpu=gpu, context_bytes=gpu.context_bytes, settings={"checkpointing": True})
    assert lines(result.stdout) == expected.table()


def test_what_does_not_fit_ends_with_1_and_says_what_to_try() -> None:
    result = run("--gpu", CARD)
    assert (result.exit_code, result.stderr) == (1, "")
    assert lines(result.stdout).endswith(
        "\ndoes not fit RTX 3050 4GB: 6.60 GiB of 3.81 GiB, 2.79 GiB over. Changes that\nwere simulated:\n"
        "--checkpointing needs 3.0 MiB: fits, 1.0 MiB to spare\n"
        "--batch-size 1 --gradient-accumulation-steps 8 --weights bfloat16 needs 9.0 MiB:\nstill 5.0 MiB over"
    )


def test_what_is_too_close_to_tell_ends_with_3(simulation) -> None:
    gpu = custom_gpu("4GiB", "8.0")
    mib = -(-hand_made(1, context_bytes=gpu.context_bytes).total_bytes // MIB)
    result = run("--gpu-memory", f"{mib}MiB", "--compute-capability", "8.0", "--checkpointing")
    assert "\ntight on custom " in result.stdout
    assert ", too close to tell: " in lines(result.stdout).replace("\n", " ")
    assert result.exit_code == 3


def test_without_a_card_nothing_can_not_fit() -> None:
    result = run()
    assert result.exit_code == 0
    assert lines(result.stdout).endswith(
        "\nneeds 6.38 GiB and CUDA's context; name a GPU to see whether it fits, for\nexample --gpu 'RTX 3050 4GB'"
    )


@pytest.mark.parametrize(("options", "code"), [(["--checkpointing"], 0), (["--no-checkpointing"], 1)])
def test_json_prints_nothing_else(simulation, options, code) -> None:
    result = run("--gpu", CARD, "--json", *options)
    assert (result.exit_code, result.stderr) == (code, "")
    call = simulation.calls[0]
    expected = Simulation()(call.pop("model"), **call)
    expected = simulation.with_hints("", expected, announce=print)
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


def test_memory_alone_describes_a_card(simulation) -> None:
    run("--gpu-memory", "3GiB")
    assert simulation.calls[0]["gpu"] == custom_gpu("3GiB")


@pytest.mark.parametrize(
    ("options", "batch_size", "steps"),
    [
        ([], 8, 4),
        (["--batch-size", "4"], 4, 8),
        (["--gradient-accumulation-steps", "16"], 2, 16),
        (["--batch-size", "4", "--gradient-accumulation-steps", "3"], 4, 3),
        (["--world-size", "8"], 4, 1),
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
            **({"world_size": 8} if "--world-size" in options else {}),
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


@pytest.mark.parametrize(("name", "start"), [("l.png", b"\x89PNG"), ("l.svg", b"<?xml"), ("l.pdf", b"%PDF")])
def test_the_comparison_is_drawn_and_named(tmp_path, name, start) -> None:
    pytest.importorskip("matplotlib")
    result = run("--compare", "--plot", str(tmp_path / name), "--gpu", CARD)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(start)
    assert result.stdout.splitlines()[-1] == f"Picture: {tmp_path / name}"


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
        (["--compare", "--gradient-accumulation-steps", "5"], "batch_size", 2000),
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


@pytest.mark.parametrize("compare", [[], ["--compare"]])
@pytest.mark.parametrize("error", [ValueError("seq_len=9 is too long"), NotEstimableError("not estimable: because")])
def test_what_is_not_estimable_ends_with_2_and_leaves_nothing(simulation, tmp_path, error, compare) -> None:
    pytest.importorskip("matplotlib")
    simulation.error = error
    result = run("--json", *(compare or ["--plot", str(tmp_path / "timeline.png")]))
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


def test_a_count_below_1_is_refused_by_name() -> None:
    result = run("--batch-size", "0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--batch-size" in result.stderr


# ---- Comparison


def test_every_set_up_is_one_that_estimate_takes() -> None:
    for chosen in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        for settings in set_ups(*chosen).values():
            StepSettings(**settings)
    assert set_ups()["+ paged state"] == {
        "precision": "bf16",
        "optim": "paged_adamw_8bit",
        "checkpointing": True,
        "autocast_cache": False,
    }


def test_without_bfloat16_weights_of_16_bits_are_not_trained() -> None:
    scaled = set_ups("fp16", "float16").values()
    of_16_bits = [one for one in scaled if one.get("weights_dtype", "float32") != "float32"]
    assert {(one["weights_dtype"], one["lora"]) for one in of_16_bits} == {("float16", 16)}
    assert not any("gradient_release" in one for one in scaled)


@pytest.mark.parametrize(("capability", "precision"), [("8.6", "bf16"), ("7.5", "fp16")])
def test_the_comparison_computes_in_what_the_card_knows(simulation, capability, precision) -> None:
    compare("bert-large-uncased", examples=32, seq_len=128, gpu=custom_gpu("4GiB", capability))
    assert {call["precision"] for call in simulation.calls} == {"fp32", precision}


def test_a_model_that_overflows_in_float16_is_compared_in_float32(simulation) -> None:
    found = compare("t5-small", examples=32, seq_len=128, gpu=custom_gpu("4GiB", "7.5"))
    assert {call["precision"] for call in simulation.calls} == {"fp32"}
    assert {call.get("weights_dtype", "float32") for call in simulation.calls} == {"float32"}
    assert found[0].reason.startswith("t5 is unsafe in float16: its feed-forward outputs exceed 65,504 (https://")


def growing(model: Any, **given: Any) -> Estimate:
    """Return an estimate of 1 GiB and half a GiB for each row, half of that with checkpointing."""
    size_bytes = 2**30 + given["batch_size"] * 2**29 // (2 if given.get("checkpointing") else 1)
    settings = StepSettings(gradient_accumulation_steps=given["gradient_accumulation_steps"])
    found = hand_made(gpu=given["gpu"], batch_size=given["batch_size"], seq_len=given["seq_len"], settings={})
    return replace(found, settings=settings, peak_reserved_bytes=size_bytes, context_bytes=0)


@pytest.mark.parametrize("examples", [1, 6, 7, 32])
def test_each_set_up_has_the_most_rows_that_fit(monkeypatch, examples: int) -> None:
    monkeypatch.setattr(compared_set_ups, "estimate", growing)
    gpu = custom_gpu("4GiB")
    found = {one.name: one.estimate for one in compare("bert", examples=examples, seq_len=8, gpu=gpu)}
    sizes = [rows for rows in range(1, examples + 1) if examples % rows == 0]
    for name, settings in set_ups().items():
        fitting = [
            rows
            for rows in (sizes if "gradient_release" not in settings else [examples])
            if growing("", **settings, batch_size=rows, gradient_accumulation_steps=1, seq_len=8, gpu=gpu).verdict
            == "fits"
        ]
        one = found[name]
        assert one.batch_size == max(fitting, default=examples if "gradient_release" in settings else 1), name
        assert one.batch_size * one.settings.gradient_accumulation_steps == examples


def test_the_whole_comparison(simulation, monkeypatch) -> None:
    monkeypatch.setattr(compared_set_ups, "estimate", growing)
    result = run("--compare", "--seq-len", "128", "--gpu-memory", "4GiB")
    assert (result.exit_code, result.stderr) == (0, "")
    assert lines(result.stdout).startswith("bert-large: 32 examples of 128 tokens per optimizer step, in GiB\n")
    rows = {name: f"^{re.escape(name)} +{batch} .* {fits}$" for name, batch, fits in [
        ("fp32", "4 x 8", "yes"),
        ("+ 8-bit AdamW", "4 x 8", "yes"),
        ("+ checkpointing", "8 x 4", "yes"),
        ("paged, gradients released", "32 x 1", "no"),
        ("QLoRA", "4 x 8", "yes"),
    ]}  # fmt: skip
    for name, pattern in rows.items():
        assert re.search(pattern, lines(result.stdout), re.MULTILINE), name
    assert lines(result.stdout).endswith("\n12 of 13 fit custom 4.00 GiB, 4.00 GiB usable")
    assert max(map(len, lines(result.stdout).splitlines())) <= 80


def test_a_narrow_terminal_gets_fewer_columns_of_whole_figures() -> None:
    narrow = runner.invoke(app, ["estimate", "bert-large", "--compare", "--gpu", CARD], env={"COLUMNS": "60"}).stdout
    assert max(map(len, lines(narrow).splitlines())) <= 60
    assert "…" not in narrow
    assert re.search(r"^\+ checkpointing +32 x 1 +1\.81 +yes$", lines(narrow), re.MULTILINE)


def test_what_cannot_be_compared_is_named_with_its_reason(simulation, monkeypatch) -> None:
    def tied(model: Any, **given: Any) -> Estimate:
        if "freeze" in given:
            raise NotEstimableError("not estimable: all is frozen")
        return simulation(model, **given)

    monkeypatch.setattr(compared_set_ups, "estimate", tied)
    told: list[str] = []
    found = compare("gpt2", examples=16, seq_len=128, announce=told.append)
    assert [(one.name, one.reason) for one in found if one.estimate is None] == [
        ("paged, frozen body", "not estimable: all is frozen")
    ]
    assert [one.partition(": ")[2].partition(", about ")[0] for one in told] == list(set_ups())
    assert told[0] == f"1 of {len(told)}: fp32"
    assert told[-1].startswith(f"{len(told)} of {len(told)}: QLoRA, checkpointing, about ")
    result = run("--compare", "--seq-len", "128")
    assert result.exit_code == 0
    assert lines(result.stdout).endswith("\npaged, frozen body: not estimable: all is frozen")


@pytest.mark.parametrize(
    ("memory", "code", "message"), [("512MiB", 1, "0 of 13 fit custom 512.0 MiB"), ("50GiB", 0, "13 of 13 fit custom")]
)
def test_the_verdict_on_a_card_too_small_and_on_a_large_one(memory, code, message) -> None:
    result = run("--compare", "--gpu-memory", memory)
    assert result.exit_code == code
    assert message in lines(result.stdout).splitlines()[-1]


def test_the_comparison_without_card_and_length(simulation) -> None:
    result = run("--compare", "--batch-size", "4", "--gradient-accumulation-steps", "3", "--task", "masked-lm")
    assert result.exit_code == 0
    text = lines(result.stdout)
    assert text.startswith("bert-large: 12 examples per optimizer step, in GiB\n")
    assert text.endswith("Total: reserved bytes and CUDA's context, which is unknown.")
    assert len(simulation.calls) == text.count("   ?\n") == 13
    assert {(call["batch_size"], call["task"]) for call in simulation.calls} == {(12, "masked-lm")}


def test_the_comparison_as_json(simulation) -> None:
    result = run("--compare", "--seq-len", "128", "--gpu", CARD, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = compare("bert-large", examples=32, seq_len=128, gpu=find_gpu(CARD))
    assert json.loads(result.stdout) == json.loads(json.dumps([one.as_dict() for one in found]))
    first = json.loads(result.stdout)[0]
    assert (first["set_up"], first["batch"], first["reason"]) == ("fp32", "1 x 32", "")
    assert first["estimate"]["fits"] is False


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
    """Through the true simulation: one set-up, and every one that is compared."""
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
    result = runner.invoke(app, ["estimate", str(tmp_path), *options, "--json", "--compare"])
    compared = json.loads(result.stdout)
    assert [one["reason"] for one in compared] == [""] * 13
    result = runner.invoke(app, ["estimate", str(tmp_path), "--seq-len", "65"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --seq-len 65 ")


@pytest.mark.parametrize(("seconds", "whole"), TABLES["set-ups to take"])
def test_the_set_up_to_take_is_the_fastest_that_needs_no_consent(seconds: dict[str, float], whole: str) -> None:
    def compared(name: str) -> Any:
        time = SimpleNamespace(seconds=seconds.get(name, 9.0))
        fits = "fits" if name in seconds else "over"
        return compared_set_ups.Compared(name, SimpleNamespace(verdict=fits, step_time=time))  # type: ignore[arg-type]

    found = [compared(name) for name in set_ups()]
    best = compared_set_ups.taken(found)
    assert (compared_set_ups._whole_name(best, found) if best else "") == whole
