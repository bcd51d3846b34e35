"""The script of a plan: it runs as it is, its arguments and callbacks are the recipe's, its memory the plan's."""

from __future__ import annotations

import ast
import itertools
import json
import os
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import pytest
import torch
import transformers
from typer.testing import CliRunner

import tiny
from hf_memopt import PrecisionCallback, Recipe, custom_gpu, estimate_from_arguments, plan, recipe
from hf_memopt.batching.padding_costs import DataFile
from hf_memopt.cli.app import app
from hf_memopt.devices import find_gpu
from hf_memopt.recipes.planning.script.script import KNOWN, NOT_REENTRANT, ScriptFacts, training_script
from hf_memopt.recipes.planning.set_ups import ModelFacts, set_ups

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true but no accelerator:UserWarning"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
GPU = "RTX 3060 12GB"
OF_THE_SCRIPT = (
    *("learning_rate", "num_train_epochs", "eval_strategy", "save_strategy", "save_total_limit", "logging_steps"),
    "use_cpu",
)
"""The arguments that a recipe does not have."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Llama with its tokenizer, saved in bfloat16 as models are published."""
    folder = tmp_path_factory.mktemp("llama")
    tiny.llama(**SIZES).to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Go to a new folder with a file of texts, whose caches it holds too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # the script sets one of them
        monkeypatch.delenv(name, raising=False)
    rows = [{"text": " ".join(f"w{5 + (i * j) % 90}" for j in range(3 + i % 20)), "label": i % 3} for i in range(24)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": "", "label": 0}])))
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def run_script(path: Path) -> Any:
    """Run a script in this process and return its Trainer."""
    return runpy.run_path(str(path), run_name="__main__")["trainer"]


def trainer_of_recipe(chosen: Recipe, script: Any) -> Any:
    """Return the Trainer that the recipe builds from the model and the data of a script's Trainer."""
    own = {name: getattr(script.args, name) for name in OF_THE_SCRIPT}
    return chosen.trainer(
        model=script.model,
        train_dataset=script.train_dataset,
        eval_dataset=script.eval_dataset,
        processing_class=script.processing_class,
        training_arguments={**own, "output_dir": script.args.output_dir, "dataloader_pin_memory": True},
    )


def own_callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks of this package, by what they are made from, in their order."""
    made = [one.__reduce__()[:2] for one in trainer.callback_handler.callbacks if hasattr(one, "technique")]
    parts = ("func", "args", "keywords")  # partials are equal only to themselves
    return [([getattr(one, part, one) for part in parts], given) for one, given in made]


def arguments_of(trainer: Any) -> dict[str, Any]:
    """Return the arguments, with the options of checkpointing that hold where none are given."""
    return {
        name: value or NOT_REENTRANT if name.endswith("_checkpointing_kwargs") else value
        for name, value in trainer.args.to_dict().items()
        if name != "train_sampling_strategy"  # what attach changes while it makes a DataLoader, the recipe passes
    }


def check_against_recipe(trainer: Any, chosen: Recipe) -> None:
    built = trainer_of_recipe(chosen, trainer)
    assert arguments_of(trainer) == arguments_of(built)
    if not any(isinstance(one, PrecisionCallback) for one in trainer.callback_handler.callbacks):
        [idle] = (one for one in built.callback_handler.callbacks if isinstance(one, PrecisionCallback))
        assert idle.changes == []  # nothing to do, so the script leaves it out
        built.remove_callback(idle)
    assert own_callbacks(trainer) == own_callbacks(built)
    assert type(trainer.data_collator) is type(built.data_collator)
    assert type(trainer.train_dataset) is type(built.train_dataset)
    assert trainer.optimizer_cls_and_kwargs == built.optimizer_cls_and_kwargs


def check_memory(trainer: Any, chosen: Recipe, told: dict[str, Any], gpu: Any) -> None:
    """Hold the estimate of the script's own model and arguments against what the plan told, ``Candidate.as_dict()``."""
    names = ("autocast_cache", "fused_cross_entropy", "sparse_tied_embedding", "gradient_release", "rounding")
    names = (*names, "expandable_segments")
    settings = {name: getattr(chosen, name) for name in names}
    itself = estimate_from_arguments(trainer.model, trainer.args, told["seq_len"], gpu=gpu, **settings)
    assert itself.components == told["components"]
    assert itself.total_bytes == told["total_bytes"]


def test_the_script_of_a_lora_plan_runs_as_it_is(model: Path, work: Path) -> None:
    options = ("--gpu", GPU, "--data", "train.jsonl", "--effective-batch", "8", "--method", "lora", "--write", "run")
    done = CliRunner().invoke(app, ["plan", str(model), *options, "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-3:] == [
        "Written: run/train.py and run/recipe.json",
        "  pip install 'hf-memopt[peft]'",
        "  python run/train.py",
    ]
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 3 * 3  # 3 epochs of 23 rows
    assert (work / "run/out/final/adapter_model.safetensors").is_file()
    chosen, told = recipe("run/recipe.json"), json.loads(done.stdout)["chosen"]
    assert json.loads(chosen.to_json()) == told["recipe"]
    assert ("PYTORCH_ALLOC_CONF" in os.environ) is chosen.expandable_segments
    check_against_recipe(trainer, chosen)
    check_memory(trainer, chosen, told, GPU)


# ---- Other set-ups and tasks


def gpu_of(mebibytes: int) -> Any:
    """Return a GPU with so much for torch's allocator, beside a context."""
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes or 0
    return custom_gpu(mebibytes * 2**20 + context_bytes, "8.6", name="a small GPU")


SET_UPS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "QLoRA": {"method": "qlora"},
    "released, bf16 weights": {"method": "full", "goal": "memory", "allow": ("release_clipping", "bf16_weights")},
    "frozen": {"method": "full", "goal": "memory", "allow": ("freeze",)},
    "bf16 weights": {"method": "full", "goal": "memory", "allow": ("bf16_weights",)},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("name", SET_UPS)
def test_the_script_of_every_method_runs_as_it_is(name: str, model: Path, work: Path) -> None:
    options = {"seq_len": 24, "effective_batch_size": 4, **SET_UPS[name]}
    found = plan(model, gpu=gpu_of(200), **options)
    assert found.chosen is not None
    written = found.write("run", data="train.jsonl")
    assert written.script is not None
    trainer = run_script(written.script)
    assert trainer.state.global_step == 3 * 6
    check_against_recipe(trainer, recipe(written.recipe))
    if not found.recipe.freeze:
        check_memory(trainer, found.recipe, found.chosen.as_dict(), found.gpu)


IDS: dict[str, dict[str, Any]] = {
    "input_ids": {"input_ids": list(range(5, 37)), "other": 1},
    "ids": {"ids": list(range(5, 37)), "labels": [-100] * 16 + list(range(21, 37))},
}


@pytest.mark.slow
@pytest.mark.parametrize("column", IDS)
def test_the_script_of_token_ids_runs_as_it_is(column: str, model: Path, work: Path) -> None:
    datasets.Dataset.from_list([IDS[column]] * 24).to_parquet("rows.parquet")
    found = plan(model, gpu=GPU, seq_len=24, effective_batch_size=8, method="lora")
    written = found.write("run", data="rows.parquet", column=column)
    assert written.notes == ()
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 9
    row = trainer.train_dataset[0]
    assert row["input_ids"] == list(range(5, 29))
    assert row.get("labels") == (None if column == "input_ids" else [-100] * 16 + list(range(21, 29)))


ENCODERS = {
    "masked-lm": transformers.AutoModelForMaskedLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
}
COLUMNS: dict[str, Any] = {  # as the scripts call them before they are completed
    "token-classification": {"tokens": ["w7", "w8", "w9"], "tags": [0, 1, 2]},
    "question-answering": {"question": "w5", "context": "w6 w7 w8", "start": 4, "end": 5},
    "seq2seq": {"text": "w5 w6 w7", "target": "w8"},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("task", ENCODERS)
def test_the_script_of_an_encoder_runs(task: str, method: str, work: Path) -> None:
    config = tiny.bert_config(num_labels=2 if task == "question-answering" else 3)
    ENCODERS[task].from_config(config).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    found = plan("model", gpu=GPU, seq_len=24, effective_batch_size=8, method=method, task=task)
    rows_of_task(work, task)
    written = found.write("run", data="train.jsonl", column=None if task in COLUMNS else "text")
    assert bool(written.notes) is (task in COLUMNS)
    script = work / "run/train.py"
    script.write_text(script.read_text().replace("LABELS = 2", "LABELS = 3"))
    trainer = run_script(script)
    assert trainer.state.global_step == 9
    assert found.chosen is not None
    if "classification" in task:
        assert trainer.model.config.num_labels == 3
        check_memory(trainer, found.recipe, found.chosen.as_dict(), found.gpu)
    check_against_recipe(trainer, recipe(written.recipe))


def rows_of_task(folder: Path, task: str) -> None:
    """Replace the file of texts by rows with the columns that a task's script begins with."""
    if task in COLUMNS:
        row = {"text": "w5 w6", **COLUMNS[task]}
        (folder / "train.jsonl").write_text("\n".join([json.dumps(row)] * 24))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_script_of_an_encoder_decoder_runs_where_its_columns_are_named_so(method: str, work: Path) -> None:
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    rows_of_task(work, "seq2seq")
    found = plan("model", gpu=GPU, seq_len=24, effective_batch_size=8, method=method)
    written = found.write("run", data="train.jsonl", column="text")
    what = "encode(): the columns of the texts to read and to write"
    assert written.notes == (f"before you run it, complete in {written.script}: {what}",)
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 9
    check_against_recipe(trainer, recipe(written.recipe))


PROCESSOR = """type("Images", (), {
    "__call__": lambda self, images, **_: {"pixel_values": __import__("torch").rand(len(images), 3, 32, 32)},
    "save_pretrained": lambda *_: None,
})()"""
"""Stands for ViT's image processor, which needs torchvision."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_script_of_a_vision_transformer_runs_on_a_folder_of_images(method: str, work: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, num_labels=2)
    transformers.ViTForImageClassification(config).save_pretrained("model")
    for number in range(24):
        folder = work / "images" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("L", (40, 36), number).save(folder / f"{number}.png")
    found = plan("model", gpu=GPU, effective_batch_size=8, method=method)
    written = found.write("run")
    assert "the folder of images" in written.notes[0]
    assert written.commands[0].endswith("'datasets[vision]'")
    script = work / "run/train.py"
    script.write_text(script.read_text().replace("transformers.AutoImageProcessor.from_pretrained(NAME)", PROCESSOR))
    trainer = run_script(script)
    assert trainer.state.global_step == 9
    assert trainer.model.config.num_labels == 3
    assert trainer.args.remove_unused_columns is False
    trainer.args.remove_unused_columns = True  # the script's own: its images are read by a transform
    check_against_recipe(trainer, recipe(written.recipe))


def completed(script: Path, rows: str) -> None:
    """Put rows in place of those that the user describes; the tiny model has no processor to load."""
    head, _, rest = script.read_text().partition("processor = ")
    split = rest[rest.index("data = data.train_test_split") :]
    script.write_text(f"{head}processor = None\n{rows}\n{split}")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_script_of_whisper_runs_with_rows_of_ones_own(method: str, work: Path) -> None:
    sizes: dict[str, Any] = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(vocab_size=100, **sizes, **tokens)
    transformers.WhisperForConditionalGeneration(config).save_pretrained("model")
    found = plan("model", gpu=GPU, effective_batch_size=8, method=method)
    written = found.write("run")
    assert written.commands[0].endswith("'datasets[audio]'")
    row = '{"input_features": [[0.5] * 32] * 8, "labels": [3, 7, 8, 2]}'
    completed(work / "run/train.py", f"data = datasets.Dataset.from_list([{row}] * 24)")
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 9
    check_against_recipe(trainer, recipe(written.recipe))


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
def test_names_of_any_kind_are_literals_of_the_script(name: str) -> None:
    """A column, a path or a name may hold what ends a line, begins a comment or a template's block."""
    for task, is_text in itertools.product(("causal-lm", "sequence-classification", "seq2seq"), (True, False)):
        file = DataFile(name, "json", False, False, name, is_text, (name, "labels"))
        told = ScriptFacts(name, task, 512, 1, 1, name, (f"Made by: plan {name}",), file, tokenizer=name)
        text, _ = training_script(Recipe("a name", "a purpose"), told)
        found = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        assert {name, f"{name}/final"} <= found
        assert all(character == "\n" or character.isprintable() for character in text)


@pytest.mark.parametrize("stage", ["full", "lora", "qlora"])
@pytest.mark.parametrize("overflow", ["", "it is unsafe in float16 (https://a.source)"])
def test_fp16_is_watched_and_what_overflows_in_it_is_float32(stage: str, overflow: str) -> None:
    facts = ModelFacts("causal-lm", is_tied=True, layers=4, overflow=overflow)
    chosen = next(iter(set_ups(stage, facts, find_gpu("T4"), 32))).recipe
    text = training_script(chosen, ScriptFacts("a/model", "causal-lm", 512, 32, 1, "out", ("A script.",)))[0]
    is_narrow = not overflow
    assert ("fp16=True" in text, "hf_memopt.OverflowCallback()," in text) == (is_narrow, is_narrow)
    assert ('dtype="float16"' in text) is (is_narrow and stage != "full")
    assert ('bnb_4bit_compute_dtype="float32"' in text) is (stage == "qlora" and not is_narrow)


# ---- Layout


def scripts_of_all_set_ups(every: int) -> Iterator[tuple[ScriptFacts, Recipe, str]]:
    """Yield facts, recipe and script of every n-th set-up of each task and GPU, with files of all kinds."""
    paths = ("train.jsonl", 'a "strange" path', "a/path/that/is/too/long/for/one/line/of/a/script/of/88/columns/rows")
    files = [DataFile(path, "json", False, False, "text", True, ("text", "label")) for path in paths]
    files += [DataFile("ids", "parquet", True, False, "ids", False, ("ids", "labels"))]
    files += [DataFile("saved", "arrow", True, True, "text", True, ("text",))]
    number = 0
    for task in ("causal-lm", *ENCODERS, "seq2seq", "speech-seq2seq", "image-classification"):
        for gpu in map(find_gpu, (GPU, "T4")):
            facts = ModelFacts(task, is_tied=True, layers=4)
            for one in (one for stage in METHODS for one in set_ups(stage, facts, gpu, 32)):
                number += 1
                if number % every:
                    continue
                told = ScriptFacts(
                    name="organisation/model",
                    task=task,
                    seq_len=None if task == "image-classification" else 512,
                    accumulation_steps=32,
                    world_size=1 + number % 2,
                    output_dir="run/out",
                    heading=("A script.", "Made by: hf-memopt plan " + "--allow freeze " * (number % 9)),
                    file=[None, *files][number % 6],
                    tokenizer=None if number % 4 else "a tokenizer",
                    cut="longer rows are cut: 3.9% of them",
                )
                yield told, one.recipe, training_script(one.recipe, told)[0]


METHODS = ("full", "freeze", "lora", "qlora")
RUFF = ("check", "check --select E4,E5,E7,E9,F,W,I,UP,B,C4,SIM,RUF --line-length 120", "format --check")


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_scripts_pass_ruff_at_any_length_of_line(every: int, tmp_path: Path) -> None:
    ruff = pytest.importorskip("ruff")
    for number, (_, _, text) in enumerate(scripts_of_all_set_ups(every)):
        (tmp_path / f"train_{number}.py").write_text(text)
    assert number > 40
    for options in (*RUFF, "format --check --line-length 120"):
        command = [ruff.find_ruff_bin(), *options.split(), "--isolated", "--no-cache", "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[:2000]


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_scripts_are_short(every: int) -> None:
    for told, one, text in scripts_of_all_set_ups(every):
        lines = [line for line in text.splitlines() if line and not line.strip().startswith("#")]
        most = 45 if told.task in KNOWN else 48
        most += 7 * (one.load_in is not None)  # its options, and prepare_quantized
        most += 2 * one.expandable_segments  # before the imports
        if told.world_size == 1 and (told.file is None or len(told.file.path) < 20):
            assert 30 <= len(lines) <= most, text
