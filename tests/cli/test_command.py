"""Messages in the words of the command line, help in groups, and the length that a data file asks for."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import transformers
from printed_errors import stopped
from rich.console import Console
from tables import tables
from typer.testing import CliRunner

import tiny
from hf_memopt import PRESETS
from hf_memopt.cli.app import app
from hf_memopt.cli.command import Flag, in_flags, print_coloured
from hf_memopt.cli.lengths_command import length_of_data, lengths_of_data
from hf_memopt.prediction.recipes.planning.script import RowsFile

TABLES = tables(__file__)

runner = CliRunner()
FLAGS = {
    "model": Flag(""),
    "gpu": Flag("--gpu"),
    "seq_len": Flag("--seq-len"),
    "tiled": Flag("--tiled"),
    "checkpointing": Flag("--checkpointing", "--no-checkpointing"),
    "memory": Flag("--gpu-memory"),
}


@pytest.mark.parametrize(("text", "expected"), TABLES["flags"])
def test_parameters_become_flags(text: str, expected: str) -> None:
    assert in_flags(text, FLAGS) == expected


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_help_of_estimate_is_grouped_and_whole(columns: str) -> None:
    shown = runner.invoke(app, ["estimate", "--help"], env={"COLUMNS": columns}).stdout
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["Model", "GPU", "Step", "Output", "Options"]
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for option in ("-b, --batch-size N", "-s, --seq-len N", "-g, --gpu NAME", "--compute-capability X.Y"):
        assert option in shown
    assert "--grad-accum, --gradient-accumulation-steps N" in shown
    assert "--[no-]checkpointing" in shown
    assert '  hf-memopt estimate gpt2 -g "RTX 3060 12GB"\n' in shown


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("80", 80), ("120", 120)])
def test_the_presets_cut_no_word(columns: str, widest: int) -> None:
    shown = runner.invoke(app, ["presets"], env={"COLUMNS": columns}).stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= widest
    assert {"optimizer", *PRESETS, *(recipe.optim for recipe in PRESETS.values())} <= set(shown.split())


COMMANDS = ("gpus", "presets", "lengths", "estimate", "report", "rehearse", "doctor")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_help_of_every_command_fits_the_terminal_and_ends_with_examples(columns: int) -> None:
    for name in ("", *COMMANDS):
        shown = runner.invoke(app, [*([name] if name else []), "--help"], terminal_width=columns).stdout
        body, examples = shown.split("Examples:\n")
        assert max(map(len, body.splitlines())) <= columns, name
        assert "…" not in body
        assert f"  hf-memopt {name}" in examples


def test_commands_are_listed_in_groups() -> None:
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    headings = re.findall(r"^(\w[\w ]+):$", shown, re.MULTILINE)
    assert headings == ["Options", "Before the run", "On the machine that trains"]
    assert set(re.findall(r"^  (\w+)  ", shown, re.MULTILINE)) >= {*COMMANDS, "plan"}


@pytest.mark.parametrize(("command", "options"), TABLES["letters"])
def test_frequent_options_have_a_letter(command: str, options: list[str]) -> None:
    shown = runner.invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert re.findall(r"^  (-\w), --", shown, re.MULTILINE) == options


@pytest.mark.parametrize("settings", [{}, {"force_terminal": True, "color_system": "truecolor"}])
def test_only_a_terminal_gets_colours(settings: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "plan\n > LoRA  4 x 8\n x full\n\nFITS: 1 of 2 GiB\nRUNS OUT in step 1"

    def printed() -> str:
        print_coloured(text, console := Console(file=io.StringIO(), width=20, **settings))
        return console.file.getvalue()

    assert re.sub(r"\x1b\[[\d;]*m", "", printed()) == f"{text}\n"  # no line is wrapped
    assert ("\x1b[1;32mFITS\x1b[0m: 1" in printed()) is bool(settings)
    assert ("\x1b[1;31mRUNS OUT" in printed()) is bool(settings)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;32m" not in printed()


# ---- The length of --data


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.bert_config(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    return tmp_path


def write(path, lengths) -> None:
    path.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in lengths))


def test_the_99th_percentile_is_rounded_up_and_told(folder) -> None:
    write(folder / "rows.jsonl", [9] * 198 + [21, 40])
    assert length_of_data("model", RowsFile(folder / "rows.jsonl"), None) == (
        16,
        "seq_len=16 from 200 rows of rows.jsonl: p99 9, longest 40 tokens; 2 longer rows have to be truncated",
    )


def test_the_length_ends_where_the_model_does(folder) -> None:
    write(folder / "rows.jsonl", [90] * 3)
    found = json.loads(runner.invoke(app, ["estimate", "model", "--data", "rows.jsonl", "--json"]).stdout)
    assert (found["seq_len"], found["notes"][0]) == (
        64,
        "seq_len=64 from 3 rows of rows.jsonl: p99 90, longest 90 tokens, all that the model takes; "
        "3 longer rows have to be truncated",
    )
    shown = runner.invoke(app, ["estimate", "model", "--data", "rows.jsonl"], env={"COLUMNS": "200"}).stdout
    assert "\nNote     --seq-len 64 from 3 rows of rows.jsonl: p99 90, " in shown


UNCOUNTED = (
    "--data {} holds texts, and the tokenizer of {!r} {}; expected token ids or a tokenizer that counts them. Pass "
    "--tokenizer FOLDER, or leave --data out and pass --seq-len 512"
)


def test_texts_are_counted_by_a_tokenizer_or_refused(folder) -> None:
    (folder / "texts.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}) + "\n")
    result = runner.invoke(app, ["estimate", "model", "--data", "texts.jsonl", "--plot", "p.png"])
    before, after = UNCOUNTED.format("texts.jsonl", "model", "cannot be loaded here (...)").split("...")
    assert stopped(result).startswith(before)
    assert stopped(result).endswith(after)
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    result = runner.invoke(app, ["estimate", "model", "--data", "texts.jsonl", "--tokenizer", "tokenizer", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["seq_len"]) == (0, 8)
    assert not (folder / "p.png").exists()


def test_conversations_are_counted_as_the_chat_template_writes_them(folder) -> None:
    tiny.llama_config().save_pretrained(folder / "chat")
    tokenizer = tiny.tokenizer(eos_token="w9")
    tokenizer.save_pretrained(folder / "chat")
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    result = runner.invoke(app, ["estimate", "chat", "--data", "chats.jsonl", "--json"])
    assert stopped(result) == UNCOUNTED.format("chats.jsonl", "chat", "has no chat template for them")
    tokenizer.chat_template = "{% for m in messages %}w5 {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder / "chat")
    lengths = lengths_of_data("chat", RowsFile(folder / "chats.jsonl"), None)[1]
    assert lengths.tolist() == [6]  # two turns, and the end


def test_rows_of_t5_are_counted_with_room_for_a_prefix(folder) -> None:
    sizes = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    kinds = {"t5": transformers.T5Config(**sizes), "mt5": transformers.MT5Config(**sizes)}
    (folder / "texts.jsonl").write_text(json.dumps({"source": "w1 w2 w3", "target": "w4"}) + "\n")
    counted = []
    for name, config in kinds.items():
        config.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
        counted.append(lengths_of_data(name, RowsFile(folder / "texts.jsonl"), "seq2seq")[1].item())
    assert counted[0] == counted[1] + 8  # train.py has one for T5 alone


def test_a_file_without_lengths_is_refused_before_anything_is_written(folder) -> None:
    pytest.importorskip("matplotlib")
    (folder / "bad.jsonl").write_text('{"label": 1}\n')
    result = runner.invoke(app, ["estimate", "model", "--data", "bad.jsonl", "--plot", "p.png", "--json"])
    assert stopped(result) == (
        "--data bad.jsonl has the columns label (integers); expected those of a format: messages; translation; text; "
        "prompt, completion; tokens, ner_tags; query, positive; text, label; source, target; input_ids; question, "
        "context, answers; sentence1, sentence2, label; instruction, output. Add a column of texts or of token ids"
    )
    assert not (folder / "p.png").exists()
