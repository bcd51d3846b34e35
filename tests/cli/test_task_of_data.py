"""The task of a plan: ``--task``, else the labels in the rows, else the model's own; where they differ it is said."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
from invoked import invoked
from slow_cases import slow_except

import tiny
from hf_memopt import read_rows

T5 = {
    "vocab_size": 100,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
OWN: dict[str, Callable[[], Any]] = {
    "masked-lm": lambda: transformers.BertForMaskedLM(tiny.bert_config()),
    "sequence-classification": tiny.bert,
    "causal-lm": partial(tiny.llama, eos_token_id=14),
    "seq2seq": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
}
HEADS: dict[str, Any] = {
    "masked-lm": transformers.AutoModelForMaskedLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "causal-lm": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
}
TEXT, LABEL = {"text": "w5 w6"}, {"label": 1}
ROWS: dict[str, dict[str, Any]] = {
    "text": TEXT,
    "label": TEXT | LABEL,
    "score": TEXT | {"score": 0.5, "url": "a"},
    "pair": {"sentence1": "w5", "sentence2": "w6"} | LABEL,
    "tags": {"tokens": ["w5", "w6"], "ner_tags": [0, 1]},
    "ids": {"input_ids": [5, 6], "labels": 1},
    "ids of tokens": {"input_ids": [5, 6], "labels": [5, 6]},
    "completion": {"prompt": "w5", "completion": "w6", "label": True},
}
BY_ROWS = "Task: {}, by the columns {} of rows.jsonl; the model's own is {} (--task {})."
LEFT = "Task: {}, {}; {} of rows.jsonl is not learned (--task {} learns it)."
LACKING = "Task: {}, the model's own; rows.jsonl has no column for it beside {}."
CLASSES, TAGS = "sequence-classification", "token-classification"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and its tokenizer for each task."""
    parent = tmp_path_factory.mktemp("models")
    for task, build in OWN.items():
        build().save_pretrained(parent / task)
        tiny.tokenizer().save_pretrained(parent / task)
    return parent


@pytest.mark.parametrize(
    ("own", "rows", "asked", "task", "said"),
    [
        ("masked-lm", "label", None, CLASSES, BY_ROWS.format(CLASSES, "text, label", "masked-lm", "masked-lm")),
        (
            "masked-lm",
            "pair",
            None,
            CLASSES,
            BY_ROWS.format(CLASSES, "sentence1, sentence2, label", *["masked-lm"] * 2),
        ),
        ("masked-lm", "tags", None, TAGS, BY_ROWS.format(TAGS, "tokens, ner_tags", "masked-lm", "masked-lm")),
        ("masked-lm", "ids", None, CLASSES, BY_ROWS.format(CLASSES, "input_ids, labels", "masked-lm", "masked-lm")),
        ("masked-lm", "ids of tokens", None, "masked-lm", ""),
        ("masked-lm", "text", None, "masked-lm", ""),
        ("masked-lm", "label", "masked-lm", "masked-lm", LEFT.format("masked-lm", "as --task says", "label", CLASSES)),
        ("masked-lm", "label", CLASSES, CLASSES, ""),
        (CLASSES, "label", None, CLASSES, ""),
        (CLASSES, "tags", None, TAGS, BY_ROWS.format(TAGS, "tokens, ner_tags", CLASSES, CLASSES)),
        (CLASSES, "text", None, CLASSES, LACKING.format(CLASSES, "text")),
        ("causal-lm", "label", None, CLASSES, BY_ROWS.format(CLASSES, "text, label", "causal-lm", "causal-lm")),
        ("causal-lm", "score", None, "causal-lm", LEFT.format("causal-lm", "the model's own", "score", CLASSES)),
        ("causal-lm", "completion", None, "causal-lm", ""),
        ("causal-lm", "ids of tokens", None, "causal-lm", ""),
        ("seq2seq", "label", None, "seq2seq", ""),  # a text to write
    ],
)
def test_labels_decide_where_nothing_else_does_and_what_differs_is_said(
    own: str, rows: str, asked: str | None, task: str, said: str, folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[rows]) + "\n")
    options = ("--task", asked) if asked else ()
    done = invoked(
        "estimate", folders / own, "--data", tmp_path / "rows.jsonl", "-b", 1, "--gpu", "1GB", *options, "--json"
    )
    told = json.loads(done.stdout)
    assert [note for note in told["notes"] if note.startswith("Task: ")] == [one for one in [said.rstrip(".")] if one]
    config = transformers.AutoConfig.from_pretrained(folders / own)
    config.pad_token_id = 0
    assert told["parameters"] == sum(weight.numel() for weight in HEADS[task].from_config(config).parameters())


def planned(folder: Path, *options: str, data: str = "rows.jsonl") -> list[str]:
    """Return the lines that a plan for the rows prints."""
    given = ("--gpu", "1GB", "--data", data, "--effective-batch", "8", "--method", "full", *options)
    done = invoked("plan", folder, *given)
    assert done.exit_code == 0, done.output
    lines: list[str] = done.stdout.splitlines()
    return lines


def test_columns_that_are_not_read_are_named_alike(folders: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": "w5 w6", "history": [["w7", "w8"]], "system": None}] * 9
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sentence, model = "columns that are not read: history, system", folders / "masked-lm"
    assert f"C{sentence[1:]}.\n" in invoked("lengths", "rows.jsonl").stdout
    given = ("--data", "rows.jsonl", "-b", 1, "--gpu", "1GB", "--json")
    assert sentence in json.loads(invoked("estimate", model, *given).stdout)["notes"]
    assert sentence in json.loads("\n".join(planned(model, "--json")))["notes"]
    assert sentence in read_rows(datasets.Dataset.from_list(rows), tiny.tokenizer(), "masked-lm").notes
    held = {"about": "w9", "data": rows}
    Path("rows.json").write_text(json.dumps(held))
    for told in (invoked("lengths", "rows.json"), invoked("plan", model, "--data", "rows.json")):
        assert told.exit_code == 2
        assert "is one object, with rows in data; expected an object for each row" in " ".join(told.output.split())
    assert sentence in json.loads("\n".join(planned(model, "--json", "--field", "data", data="rows.json")))["notes"]
    told = json.loads(invoked("estimate", model, *given, "--field", "data", "--data", "rows.json").stdout)
    assert sentence in told["notes"]


FILES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "": ("rows.jsonl", lambda rows: "\n".join(map(json.dumps, rows))),
    "--field data": ("rows.json", lambda rows: json.dumps({"data": rows, "version": 1}, indent=1)),
    "TSV": ("rows.tsv", lambda rows: "".join(f"{one}\t{two}\n" for one, two in [[*rows[0]], *map(dict.values, rows)])),
}


SCRIPTS: list[tuple[str, tuple[str, ...], str, str]] = [
    ("masked-lm", (), "Task: sequence-classification, by the columns", "BertForSequenceClassification"),
    ("masked-lm", ("TSV",), "Task: sequence-classification, by the columns", "BertForSequenceClassification"),
    ("masked-lm", ("--field", "data"), "Task: sequence-classification, by", "BertForSequenceClassification"),
    ("masked-lm", ("--task", "fill-mask"), "Task: masked-lm, as --task says; label", "BertForMaskedLM"),
    ("causal-lm", (), "Task: sequence-classification, by", "LlamaForSequenceClassification"),
]


@pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true but no accelerator:UserWarning")
@pytest.mark.parametrize(
    ("own", "options", "said", "kind"),
    slow_except(SCRIPTS[:1], SCRIPTS),
)
def test_the_written_script_trains_what_the_first_line_says(
    own: str, options: tuple[str, ...], said: str, kind: str, folders: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # which the script may set
    rows = [{"text": " ".join(["w5", "w6", "w7"][: 1 + i % 3]), "label": ["no", "yes"][i % 2]} for i in range(24)]
    file, write = FILES.get(" ".join(options), FILES[""])
    Path(file).write_text(write(rows))
    options = tuple(option for option in options if option != "TSV")
    assert planned(folders / own, "--write", "run", *options, data=file)[0].startswith(said)
    script = Path("run/train.py")
    script.write_text(script.read_text().replace("bf16=cuda,", "bf16=True, use_cpu=True,").replace("tf32=cuda,", ""))
    trainer = runpy.run_path(str(script), run_name="__main__")["trainer"]
    assert type(trainer.model).__name__ == kind
    assert trainer.state.global_step == 9
    assert ("eval_accuracy" in trainer.evaluate()) is kind.endswith("Classification")
    if kind.endswith("Classification"):
        assert trainer.model.config.id2label == {0: "no", 1: "yes"}


def test_json_has_the_sentence_among_its_notes(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(ROWS["label"]) + "\n")
    told = json.loads("\n".join(planned(folders / "masked-lm", "--json")))
    assert told["notes"][0] == BY_ROWS.format(CLASSES, "text, label", "masked-lm", "masked-lm")
