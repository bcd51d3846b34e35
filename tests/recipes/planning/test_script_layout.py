"""The layout of training scripts: names of any kind, lines of 88 columns, ruff's rules, for every set-up of a plan."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import PIL.Image
import pytest
import tiny_plans
import torch
import transformers

import hf_memopt
from hf_memopt import Plan
from hf_memopt.prediction.recipes.planning.script import RowsFile, script_of
from hf_memopt.prediction.recipes.planning.set_ups import ModelFacts, set_ups
from hf_memopt.training import batching as padding_costs
from hf_memopt.training.binding.model import head_for
from hf_memopt.training.devices import find_gpu

GPU = "RTX 3060 12GB"
ENCODERS = ("masked-lm", "sequence-classification", "token-classification", "question-answering")


@pytest.fixture(scope="module")
def found() -> Plan:
    return tiny_plans.planned("2GiB", tiny_plans.config(64, 1, 500), effective_batch_size=1, method="full")


ODD = (
    "both ' and \"",
    "a\u2028b\u2029c\x85d",
    "a  # b, c=(",
    "a, b",
    "\\",
    "{{ name }} {% if %}",
    "\ud800",
    "line\nbreak\ttab",
    "\u202eright to left\x1b[31m",
)


@pytest.mark.parametrize("name", ODD)
def test_names_of_any_kind_are_literals_of_the_script(name: str, found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column, a path or a name may hold what ends a line, begins a comment or a template's block."""
    for task in ("causal-lm", "sequence-classification", "seq2seq"):
        file = padding_costs.DataFile(name, "json", False, False, name, True, (name,), "a format", {"text": name})
        monkeypatch.setattr(padding_costs, "data_file", lambda *args, file=file, **options: file)
        named = replace(found, task=task, source=name, model=name, command=f"plan {name}", simulation=None)
        text, _ = script_of(named, RowsFile(name, name, name), output_dir=name)
        constants = {node.value for node in ast.walk(ast.parse(str(text))) if isinstance(node, ast.Constant)}
        assert {name, f"{name}/final"} <= constants
        assert all(character == "\n" or character.isprintable() for character in str(text))


@pytest.mark.parametrize("stage", ["full", "lora", "qlora"])
@pytest.mark.parametrize("overflow", ["", "it is unsafe in float16 (https://a.source)"])
def test_fp16_is_watched_and_what_overflows_in_it_is_float32(stage: str, overflow: str, found: Plan) -> None:
    facts = ModelFacts("causal-lm", is_tied=True, layers=4, overflow=overflow)
    chosen = next(iter(set_ups(stage, facts, find_gpu("T4"), 32))).recipe
    text = str(script_of(replace(found, chosen=replace(found.chosen, recipe=chosen)), None)[0])
    is_narrow = not overflow
    assert ("fp16=True" in text, "hf_memopt.OverflowCallback()," in text) == (is_narrow, is_narrow)
    assert ('dtype="float16"' in text) is (is_narrow and stage != "full")
    assert ('bnb_4bit_compute_dtype="float32"' in text) is (stage == "qlora" and not is_narrow)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        (transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4), "out_proj"),
        (tiny_plans.config(64, 1, 500), ""),
    ],
)
def test_the_adapters_of_a_script_are_those_of_the_recipe(config: Any, left_out: str, found: Plan) -> None:
    facts = ModelFacts("causal-lm", is_tied=True, layers=1)
    chosen = next(iter(set_ups("lora", facts, find_gpu(GPU), 32))).recipe
    planned = SimpleNamespace(facts=facts, model=config, task=None)
    text = replace(found, chosen=replace(found.chosen, recipe=chosen), simulation=planned).script()
    assert ("all linear layers but the head and out_proj" in text) is bool(left_out)
    model, own = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
    [*_, made] = (node for node in ast.parse(text).body if "lora_alpha" in ast.unparse(node))
    names = {"hf_memopt": hf_memopt, "peft": peft, "model": model}
    exec(ast.unparse(made), names)
    assert repr(names["model"]) == repr(chosen.prepare_model(own.to(torch.bfloat16)))


# ---- Layout


def scripts_of_all_set_ups(found: Plan, every: int) -> Iterator[tuple[str, str]]:
    """Yield the path of the rows and the script of every n-th set-up of each task and GPU, with files of all kinds."""
    paths = ("train.jsonl", 'a "strange" path', "a/path/that/is/too/long/for/one/line/of/a/script/of/88/columns/rows")
    made = padding_costs.DataFile
    files = [made(path, "json", False, False, "text", True, ("text", "label"), "text", {}) for path in paths]
    files += [made("ids", "parquet", True, False, "ids", False, ("ids", "labels"), "tokens", {"input_ids": "ids"})]
    files += [made("saved", "arrow", True, True, "text", True, ("text",))]
    number = 0
    assert found.chosen is not None
    for task in ("causal-lm", *ENCODERS, "seq2seq", "speech-seq2seq", "image-classification"):
        for gpu in map(find_gpu, (GPU, "T4")):
            facts = ModelFacts(task, is_tied=True, layers=4, new_parts=head_for(task).new[:4])
            for one in (one for stage in METHODS for one in set_ups(stage, facts, gpu, 32)):
                number += 1
                if number % every:
                    continue
                length = None if task == "image-classification" else 512
                told = replace(
                    found,
                    source="organisation/model",
                    simulation=SimpleNamespace(facts=facts, model=tiny_plans.config(64, 1, 500), task=None),
                    task=task,
                    asked={"image_size": 1024} if number % 3 else {},
                    command="hf-memopt plan " + "--allow freeze " * (number % 9),
                    chosen=replace(found.chosen, recipe=one.recipe, accumulation_steps=32, seq_len=length),
                    texts=replace(found.texts, cut=39, rows=1000),
                )
                file = [None, *files][number % 6]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(padding_costs, "data_file", lambda *args, file=file, **options: file)
                    tokenizer = None if number % 4 else "a tokenizer"
                    rows = None if file is None else RowsFile(file.path, None, tokenizer)
                    text, _ = script_of(told, rows, output_dir="run/out")
                yield "" if file is None else file.path, str(text)


METHODS = ("full", "freeze", "lora", "qlora")
RUFF = ("check", "check --select E4,E5,E7,E9,F,W,I,UP,B,C4,SIM,RUF --line-length 120", "format --check")


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_scripts_are_short_and_pass_ruff_at_any_length_of_line(every: int, found: Plan, tmp_path: Path) -> None:
    ruff = pytest.importorskip("ruff")
    for number, (path, text) in enumerate(scripts_of_all_set_ups(found, every)):
        (tmp_path / f"train_{number}.py").write_text(text)
        lines = [line for line in text.splitlines() if line and not line.strip().startswith("#")]
        assert len(path) >= 20 or 30 <= len(lines) <= 72, text
        assert "from hf_memopt" not in text  # public names alone
        assert "after a break, once an epoch is saved: train(resume_from_checkpoint=True)" in text
    assert number > 40
    for options in (*RUFF, "format --check --line-length 120"):
        command = [ruff.find_ruff_bin(), *options.split(), "--isolated", "--no-cache", "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[:2000]


@pytest.mark.parametrize("kind", ["ViT", "ConvNext", "Bit", "Segformer", "PoolFormer"])
def test_pictures_have_the_size_that_was_planned(found: Plan, kind: str) -> None:
    facts = ModelFacts("image-classification", is_tied=False, layers=1)
    simulation = SimpleNamespace(facts=facts, model="a/name")
    text = replace(found, task=facts.task, simulation=simulation, asked={"image_size": 48}).script()
    made = [node for node in ast.parse(text).body if getattr(node, "name", "") in ("in_colour", "encode")]
    try:
        names: dict[str, Any] = {"processor": getattr(transformers, f"{kind}ImageProcessorPil")()}
    except ImportError as error:
        pytest.skip(str(error))  # with transformers 5.8, that of Segformer without torchvision
    exec("\n".join(map(ast.unparse, made)), names)
    images = [PIL.Image.new("RGB", size) for size in ((300, 200), (20, 40))]
    encoded = names["encode"]({"image": images, "label": [0, 1]})
    assert encoded["pixel_values"].shape == (2, 3, 48, 48)


@pytest.mark.parametrize(
    ("kind", "task", "says"),
    [
        ("mbart", "seq2seq", None),
        ("speech_to_text", "speech-seq2seq", None),
        ("m2m_100", "seq2seq", "tokenizer = transformers.AutoTokenizer.from_pretrained(NAME, **LANGUAGES)"),
    ],
)
def test_kinds_of_models_that_need_more_than_their_task_says(
    found: Plan, kind: str, task: str, says: str | None
) -> None:
    facts = ModelFacts(task, is_tied=True, layers=1, kind=kind)
    text = replace(found, task=task, simulation=SimpleNamespace(facts=facts, model="a/name")).script()
    assert text is says is None or says in text
