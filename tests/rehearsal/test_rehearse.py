"""Scripts on a GPU that is not there: the verdict, that it is true at the printed need, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from invoked import invoked
from torch.utils.data import DataLoader

from hf_memopt import rehearse
from hf_memopt.prediction.recipes.running.longest_rows import LongestRows
from hf_memopt.prediction.rehearsal import RehearsalError
from hf_memopt.types import Rehearsal

on_stand_in = pytest.mark.stand_in
STORED = Path(__file__).with_name("rehearsed.json").read_text(encoding="utf-8")

PLAIN = """
import sys, torch
from torch import nn
rows, broken = int(sys.argv[1]), sys.argv[2:]
model = nn.Sequential(nn.Embedding(100, 512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
if "compiles" in broken:
    model = torch.compile(model, backend="aot_eager")
if "compiles itself" in broken:
    model.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.ones(rows, 256, dtype=torch.long, device="cuda")
for step in range(10):
    half = rows
    while half:
        try:
            model(tokens[:half]).square().mean().backward()
            break
        except torch.OutOfMemoryError:
            if "recovers" not in broken:
                raise
            half //= 2
    if "fails" in broken:
        raise KeyError("of its own")
    if "never" not in broken:
        optimizer.step()
    optimizer.zero_grad()
    if "never" in broken:
        sys.exit()
open("after", "w").close()
"""
TRAINER = """
import sys
from transformers import DataCollatorWithPadding, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(vocab_size=4000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
rows = [{"input_ids": [5] * n, "labels": [5] * n} for n in (16, 32, 64, 128) for _ in range(8)]
def collate(batch):
    import torch
    n = max(len(row["input_ids"]) for row in batch)
    return {name: torch.tensor([row[name] + [0] * (n - len(row[name])) for row in batch]) for name in batch[0]}
arguments = TrainingArguments("out", per_device_train_batch_size=4, save_strategy="steps", save_steps=1,
    push_to_hub=True, eval_strategy="epoch", per_device_eval_batch_size=4, report_to="none")
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate,
    compute_metrics=lambda found: 1 / 0)
trainer.train()
open("after", "w").close()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")])))
    (tmp_path / "plain.py").write_text(PLAIN, encoding="utf-8")
    (tmp_path / "stock.py").write_text(TRAINER, encoding="utf-8")
    return tmp_path


# ---- On the stand-in


@on_stand_in
def test_a_plain_loop_ends_at_its_second_step_and_twice_to_the_byte(folder: Path) -> None:
    found, again = (rehearse("plain.py", "64", memory="2GiB") for _ in range(2))
    assert replace(again, seconds=found.seconds) == found
    assert (found.verdict, found.steps, found.exit_code) == ("fits", 2, 0)
    assert list(found.phases) == ["load", "forward", "backward", "optimizer"]
    assert (str(found.largest_batch), found.longest_row) == ("64 x 256 tokens", None)
    places = {one.place: one.size_bytes for one in found.held}
    weights = 4 * (100 * 512 + 2 * 512 * 2048 + 2048 + 512)
    assert places["weights of Sequential"] == weights
    assert places["state of AdamW"] == 2 * weights
    assert places[f"{folder}/plain.py:16 <module>"] >= 2 * 4 * 64 * 256 * 2048
    assert not (folder / "after").exists()


@on_stand_in
@pytest.mark.parametrize("script", ["plain.py", "stock.py"])
def test_the_verdict_flips_at_the_printed_need(script: str, folder: Path) -> None:
    arguments = ["64"] if script == "plain.py" else []
    with_room = rehearse(script, *arguments, memory="2GiB")
    needed = with_room.needed_bytes
    assert needed is not None
    assert with_room.peak_phase in with_room.phases
    assert rehearse(script, *arguments, memory=needed * 101 // 100).fits
    out = rehearse(script, *arguments, memory=needed * 99 // 100)
    assert (out.verdict, out.exit_code) == ("runs out", 1)
    failure = out.out_of_memory
    assert failure is not None
    assert failure.phase == with_room.peak_phase
    free_bytes = out.usable_bytes - out.context_bytes - failure.reserved_bytes
    assert failure.free_bytes == free_bytes < failure.asked_bytes


@on_stand_in
def test_a_trainer_takes_its_longest_rows_evaluates_two_batches_and_writes_nothing(folder: Path) -> None:
    found = rehearse("stock.py", memory="4GiB")
    assert (found.verdict, found.steps) == ("fits", 2)
    assert list(found.phases) == ["load", "forward", "backward", "optimizer", "evaluation"]
    assert (str(found.largest_batch), found.longest_row) == ("4 x 128 tokens", 128)
    kept = 4 * 4 * (128 * 4000 + 128 + 4)  # logits, labels, losses of four rows; labels have 8 bytes
    kept += 4 * 4 * 128
    assert any(f"{kept / 2**20:.1f} MiB of outputs of each of 8 batches on the GPU" in note for note in found.notes)
    assert found.phases["evaluation"].allocated_bytes > 2 * 7 * 4 * 4 * 128 * 4000
    assert sorted(path.name for path in folder.iterdir()) == ["out", "plain.py", "stock.py"]
    assert not list((folder / "out").iterdir())


@on_stand_in
def test_the_command_says_where_memory_runs_out_and_who_held_it(folder: Path) -> None:
    done = invoked("rehearse", "--memory", "300MiB", "--capability", "7.5", "--json", "out.json", "plain.py", "64")
    assert done.exit_code == 1
    mib = r"[\d.]+ MiB"
    assert re.match(
        rf"RUNS OUT in step 1, forward, batch of 64 x 256 tokens: 128\.0 MiB asked for, {mib} free "
        rf"Of 0\.29 GiB \(custom 300\.0 MiB\): {mib} used, {mib} in gaps, {mib} context At plain\.py:16 <module>",
        " ".join(done.stdout.split()),
    )
    assert "plain.py:16 <module>: model(tokens[:half])" in done.stdout
    stored = Rehearsal.from_json((folder / "out.json").read_bytes())
    assert stored.verdict == "runs out"


@on_stand_in
@pytest.mark.parametrize("how", ["compiles", "compiles itself"])
def test_a_compiled_model_has_its_phases_its_batch_and_its_name(how: str, folder: Path) -> None:
    """torch.compile takes hooks of modules into its graphs, where they would see nothing."""
    found = rehearse("plain.py", "64", how, memory="2GiB")
    assert (found.verdict, found.steps, str(found.largest_batch)) == ("fits", 2, "64 x 256 tokens")
    assert list(found.phases) == ["load", "forward", "backward", "optimizer"]
    assert found.phases["forward"].allocated_bytes >= 2 * 4 * 64 * 256 * 2048
    assert "weights of Sequential" in [one.place for one in found.held]


@on_stand_in
def test_a_script_that_recovers_fits_and_that_is_said(folder: Path) -> None:
    found = rehearse("plain.py", "64", "recovers", memory="400MiB")
    assert found.fits
    assert found.recovered >= 2
    assert f"; ran out {found.recovered} x and went on by itself\n" in found.table()


@on_stand_in
def test_a_script_that_fails_keeps_its_traceback_and_its_exit_code(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = invoked("rehearse", "--memory", "2GiB", "plain.py", "1", "fails")
    assert (done.exit_code, done.stdout) == (1, "")
    error = capfd.readouterr().err
    assert error.endswith("KeyError: 'of its own'\n")
    assert "hf_memopt" not in error


@on_stand_in
@pytest.mark.parametrize(
    "asks",
    ["datasets; datasets.load_dataset('some/texts')", "transformers; transformers.AutoConfig.from_pretrained('a/b')"],
)
def test_a_script_that_asks_the_hub_is_refused_with_the_remedy(
    asks: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (folder / "asks.py").write_text(f"import {asks}", encoding="utf-8")
    assert rehearse("asks.py", memory="2GiB").verdict == "failed"
    assert capfd.readouterr().err.endswith(
        "\nerror: HF_HUB_OFFLINE='1' keeps the script from the Hub; expected its data sets and models on the disk\n"
        "hint: Set HF_HUB_OFFLINE=0, or, for models alone, pass --empty-weights\n"
    )


@on_stand_in
def test_a_script_that_never_trains_is_an_error(folder: Path) -> None:
    done = invoked("rehearse", "--memory", "2GiB", "plain.py", "1", "never")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: 'plain.py' ended without a step of an optimizer of torch on the GPU; expected one that trains in "
        "its own process\n"
        "hint: Rehearse what it starts, or run it by itself: python plain.py\n"
    )


def _on_a_t4(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``hf-memopt`` where a T4 stands in for the GPU of the machine."""
    command = [
        sys.executable,
        "-m",
        "hf_memopt.prediction.rehearsal",
        "--gpu",
        "T4",
        "--",
        sys.executable,
        "-m",
        "hf_memopt",
    ]
    return subprocess.run([*command, *words], capture_output=True, text=True, check=False)


@on_stand_in
def test_on_a_gpu_steps_are_measured_beside_what_was_predicted(folder: Path) -> None:
    done = _on_a_t4("rehearse", "plain.py", "64")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("FITS: 0.75 of 14.56 GiB (T4)\n")
    assert re.search(r"^2 steps in \d+ s, measured on this GPU\. With 1 % less: out in backward$", done.stdout, re.M)
    assert re.search(r"^Seconds    \d+\.\d\d, \d+\.\d\d of the steps$", done.stdout, re.M)
    assert "\nNote       needed here: 766.0 MiB; predicted without the GPU: 766.0 MiB\n" in done.stdout
    assert "rehearsed without the GPU" not in done.stdout
    assert not (folder / "after").exists()


@on_stand_in
def test_a_run_may_be_rehearsed_first_and_trains_once(folder: Path) -> None:
    done = _on_a_t4("run", "--rehearse", "plain.py", "64")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("FITS: 0.75 of 14.56 GiB (T4)\n")
    assert done.stderr.count(", rehearsed without the GPU. With 1 % less: out in backward\n") == 1
    assert done.stderr.endswith("\n[memopt] the script called no Trainer.train(), so nothing was attached to it\n")
    assert (folder / "after").exists()


@on_stand_in
def test_an_interrupt_leaves_no_process_and_no_file(folder: Path) -> None:
    (folder / "slow.py").write_text(
        "import os, time\nopen('pid', 'w').write(f'{os.getpid()} ')\ntime.sleep(600)\n", encoding="utf-8"
    )
    words = [sys.executable, "-m", "hf_memopt", "rehearse", "--memory", "2GiB", "slow.py"]
    with subprocess.Popen(
        words,
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests may run in the background
    ) as process:
        while not (folder / "pid").exists() or not (folder / "pid").read_text().endswith(" "):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)
    assert not list(folder.glob("hf-memopt-*"))


# ---- Without it


def test_every_batch_of_a_step_has_the_longest_rows() -> None:
    """The longest batch is the larger in a step's second part, beside the gradients of the first."""
    rows = [{"input_ids": [0] * tokens} for tokens in (3, 9, 5, 8, 7)]
    found = LongestRows()
    found.reading(lambda: DataLoader(rows, collate_fn=list))  # type: ignore[arg-type]
    batches = found.batches(batch_size=2, number=3)
    assert batches is not None
    assert [[len(row["input_ids"]) for row in batch] for batch in batches] == [[9, 8]] * 3
    assert found.longest_row == 9


def test_a_result_goes_through_json() -> None:
    found = Rehearsal.from_json(STORED)
    assert Rehearsal.from_json(found.to_json()) == found
    assert found.fits
    for text in ("{}", '{"format": 0}', STORED.replace('"place"', '"where"')):
        with pytest.raises(ValueError, match="is no rehearsal of this version"):
            Rehearsal.from_json(text)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_text_begins_with_the_verdict_and_fits_the_terminal(columns: int) -> None:
    found = Rehearsal.from_json(STORED)
    text = found.table(columns)
    assert text.startswith("FITS: 14.64 of 23.49 GiB (RTX 4090)\n")
    assert max(map(len, text.splitlines())) <= min(columns, 80)
    assert text.endswith("Next       hf-memopt run train.py")


def test_the_text_at_80_columns() -> None:
    assert Rehearsal.from_json(STORED).table() == textwrap.dedent("""\
        FITS: 14.64 of 23.49 GiB (RTX 4090)
        Where there is more, torch's allocator keeps up to 18.54 GiB
        2 steps in 20 s, rehearsed without the GPU. With 1 % less: out in backward

        phase         allocated   reserved   GiB, each with 0.48 of CUDA's context
        load               3.28       3.28
        forward           12.31      18.54
        backward          12.80      14.62   < peak
        optimizer          9.71      14.62
        evaluation        12.31      18.54

        At peak memory these held it:
            4.60 GiB   438 x  state of AdamW
            2.30 GiB   148 x  weights of LlamaForCausalLM
            2.30 GiB   146 x  gradients
          1002.0 MiB     1 x  backward: _log_softmax_backward_data
          1002.0 MiB     1 x  backward: nll_loss_backward
          1002.0 MiB     1 x  loss_utils.py:42 fixed_cross_entropy: loss = nn.functional
           120.0 MiB    15 x  modeling_llama.py:312 forward: hidden_states = residual +
            16.0 MiB     1 x  modeling_llama.py:63 forward: hidden_states = hidden_state
            40.5 MiB    22 x  other places

        Batches    largest batch 4 x 512 tokens, longest row of the data 512 tokens
        Note       the Trainer's saving, reporting and pushing were off
        Note       what the script itself writes was written
        Next       hf-memopt run train.py""")


def test_the_picture_needs_a_timeline(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        Rehearsal.from_json(STORED).plot(tmp_path / "steps.svg")
    assert str(error.value) == "timeline=None has nothing to draw; expected one. Call: rehearse(..., timeline=True)"


REFUSED = [
    (["--gpu", "T4", "--memory", "8GB", "x.py"], "--gpu T4 and --memory 8GB are two GPUs; expected one"),
    (["--capability", "7.5", "x.py"], "--capability 7.5 is known of a GPU by name; expected --memory 8GB beside it"),
    (["--gpu", "RTX 9999", "x.py"], "--gpu 'RTX 9999' is not a GPU of the table"),
    (
        ["--gpu", "T4", "none.py"],
        "'none.py' is not a file; expected a Python script that trains, or --module and a module's name\n"
        "hint: Call: hf-memopt rehearse --gpu T4 train.py\n",
    ),
    (
        ["--gpu", "T4", "x.ipynb"],
        "'x.ipynb' is a notebook; expected a Python script, or --module and a module's name\n"
        "hint: Call: jupyter nbconvert --to script x.ipynb\n",
    ),
    (
        ["--gpus", "2", "x.py"],
        "--gpus 2 needs GPUs that stand in; expected the name of one\nhint: Pass --gpu 'RTX 3060 12GB'\n",
    ),
    (
        ["x.py", "--gpu", "T4"],
        "--gpu after the script is the script's own; expected it before, as there is no GPU here\n"
        "hint: Call: hf-memopt rehearse --gpu T4 x.py\n",
    ),
    (["--gpu", "T4", "--timeline", "x.txt", "x.py"], "--timeline x.txt is not a kind of picture"),
]


@pytest.mark.parametrize(("words", "begins"), REFUSED)
def test_what_cannot_be_rehearsed_is_refused(
    words: list[str], begins: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_memopt.cli.rehearse_command.current_gpu", lambda: None)
    (folder / "x.py").touch()
    (folder / "x.ipynb").touch()
    done = invoked("rehearse", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {begins}")


FOUND = Rehearsal.from_json(STORED)
PREDICTED = [
    (replace(FOUND, needed_bytes=2**30), "1.00 GiB"),
    (replace(FOUND, needed_bytes=None, verdict="runs out"), "more than there is"),
    (replace(FOUND, needed_bytes=None, verdict="failed"), "none (the script fails there)"),
    (RehearsalError("there is no compiler"), "none (there is no compiler)"),
]


@pytest.mark.parametrize(("predicted", "text"), PREDICTED)
def test_what_was_measured_is_printed_whatever_the_prediction_is(
    predicted: Rehearsal | RehearsalError, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([replace(FOUND, is_measured=True), predicted])

    def run(*_: object, **__: object) -> Rehearsal:
        result = next(results)
        if isinstance(result, RehearsalError):
            raise result
        return result

    monkeypatch.setattr("hf_memopt.cli.rehearse_command.rehearse", run)
    done = invoked("rehearse", "plain.py")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"needed here: 14.64 GiB; predicted without the GPU: {text} " in f"{' '.join(done.stdout.split())} "


def test_a_build_for_the_cpu_is_refused_in_two_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").touch()
    (folder / "torch/version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    done = invoked("rehearse", "--gpu", "T4", "plain.py")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: torch='2.13.0+cpu' is a build for the CPU; expected one for CUDA\n"
        "hint: A rehearsal needs no GPU and no driver. On Linux, in a new environment: pip install torch. "
        "Without a rehearsal: hf-memopt estimate\n"
    )
