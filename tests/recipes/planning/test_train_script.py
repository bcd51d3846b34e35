"""The script of a plan: it runs as it is, its arguments and callbacks are the recipe's, its memory the plan's."""

from __future__ import annotations

import ast
import json
import os
import runpy
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import pytest
import torch
import transformers
from five_lines import trainer_of
from installed import install
from invoked import invoked
from slow_cases import slow_except
from tables import refuses
from tiny_plans import gpu_of

import tiny
from hf_memopt import (
    BucketedCollator,
    Plan,
    PrecisionCallback,
    Recipe,
    estimate_from_arguments,
    plan,
    read_rows,
    recipe,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true but no accelerator:UserWarning"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
GPU = "RTX 3060 12GB"
OF_THE_SCRIPT = (
    *("learning_rate", "num_train_epochs", "eval_strategy", "save_strategy", "save_total_limit", "logging_steps"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("seed", "lr_scheduler_type", "warmup_steps", "use_cpu"),
)
"""The arguments that a recipe does not have."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} [SEP] {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


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


def on_cpu(path: Path) -> Path:
    """Let a script train here as on a GPU, with what stock asks for besides, and return its path."""
    text = path.read_text().replace("bf16=cuda,", "bf16=True, use_cpu=True,").replace("tf32=cuda,", "")
    path.write_text(text.replace("torch.cuda.is_available()", "True"))
    return path


def run_script(path: Path) -> Any:
    """Run a script in this process and return its Trainer."""
    return runpy.run_path(str(on_cpu(path)), run_name="__main__")["trainer"]


def trainer_of_recipe(chosen: Recipe, script: Any) -> Any:
    """Return the Trainer that the recipe builds from the model and the data of a script's Trainer."""
    own = {name: getattr(script.args, name) for name in OF_THE_SCRIPT}
    masks = getattr(script.data_collator, "mlm_probability", None)  # without it a masked LM has no labels
    pads = isinstance(script.data_collator, BucketedCollator)
    own_collator = {"data_collator": script.data_collator} if masks or not pads else {}
    return trainer_of(
        chosen.replace(bucketing=False),  # the view is the script's
        **own_collator,
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
        name: value or {"use_reentrant": False} if name.endswith("_checkpointing_kwargs") else value
        for name, value in trainer.args.to_dict().items()
        # what attach changes while it makes a DataLoader, the recipe passes; a recipe generates nothing
        if name != "train_sampling_strategy" and name in {item.name for item in fields(transformers.TrainingArguments)}
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
    done = invoked("plan", str(model), *options, "--task", "causal-lm", "--json")  # the labels beside are left out
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-3:] == [
        "Written: run/train.py and run/recipe.json",
        f"  {install('[peft]')}",
        "  python run/train.py",
    ]
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 3 * 3  # 3 epochs of 23 rows
    least = min(log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)
    assert trainer.state.best_metric == least
    assert (work / "run/out/final/adapter_model.safetensors").is_file()
    merged = transformers.AutoModelForCausalLM.from_pretrained(work / "run/out/merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    chosen, told = recipe("run/recipe.json"), json.loads(done.stdout)["chosen"]
    assert json.loads(chosen.to_json()) == told["recipe"]
    assert ("PYTORCH_ALLOC_CONF" in os.environ) is chosen.expandable_segments
    check_against_recipe(trainer, chosen)
    check_memory(trainer, chosen, told, GPU)


def test_on_a_cpu_a_script_says_so_and_trains_in_float32(
    model: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = plan(model, gpu=GPU, seq_len=24, effective_batch_size=8, method="lora").write("run", data="train.jsonl")
    text = written.script.read_text()
    assert len(text.splitlines()) <= 60, text
    written.script.write_text(text.replace("num_train_epochs=3", "num_train_epochs=1"))
    trainer = runpy.run_path(str(written.script), run_name="__main__")["trainer"]
    assert capsys.readouterr().out.startswith("No GPU found: training on the CPU in float32.\n")
    assert (trainer.args.bf16, trainer.model.dtype) == (False, torch.float32)


# ---- Other set-ups and tasks


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
    found = plan(model, gpu=gpu_of("200MiB"), **options)
    assert found.chosen is not None
    written = found.write("run", data="train.jsonl")
    trainer = run_script(written.script)
    assert trainer.state.global_step == 3 * 6
    check_against_recipe(trainer, recipe(written.recipe))
    if not found.recipe.freeze:
        check_memory(trainer, found.recipe, found.chosen.as_dict(), found.gpu)


ENCODERS = {
    "masked-lm": transformers.AutoModelForMaskedLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
}
COLUMNS: dict[str, Any] = {
    "masked-lm": {"text": "w5 w6"},
    "sequence-classification": {"sentence1": "w5 w6", "sentence2": "w7 w8", "label": "no"},
    "token-classification": {"tokens": ["w7", "w8", "w9"], "ner_tags": [0, 1, 2]},
    "question-answering": {"question": "w5", "context": "w6 w7 w8", "answers": {"text": ["w7"], "answer_start": [3]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("task", ENCODERS)
def test_the_script_of_an_encoder_runs(task: str, method: str, work: Path) -> None:
    config = tiny.bert_config(num_labels=2 if task == "question-answering" else 7)  # of another task
    transformers.BertForTokenClassification(config).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    rows = [COLUMNS[task]] * 23 + ([{**COLUMNS[task], "label": "yes"}] * 2 if task == "sequence-classification" else [])
    (work / "train.jsonl").write_text("\n".join(map(json.dumps, [*rows, COLUMNS[task]])))
    found = plan("model", gpu=GPU, seq_len=24, effective_batch_size=8, method=method, task=task)
    written = found.write("run", data="train.jsonl")
    assert written.notes == ()
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 3 * 3  # of 24 or 26 rows 3 are evaluated
    assert found.chosen is not None
    check_against_recipe(trainer, recipe(written.recipe))
    names = {"sequence-classification": ["no", "yes"], "token-classification": ["0", "1", "2"]}
    if task in names:
        assert list(trainer.model.config.id2label.values()) == names[task]
    assert Path(trainer.state.best_model_checkpoint).is_dir()


T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_script_of_an_encoder_decoder_generates_what_it_is_measured_by(method: str, work: Path) -> None:
    config = transformers.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=3)
    transformers.T5ForConditionalGeneration(config).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    rows = [{"document": "w5 w6 w7", "summary": "w8"}] * 24
    (work / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = plan("model", gpu=GPU, seq_len=24, effective_batch_size=8, method=method)
    written = found.write("run", data="train.jsonl")
    what = 'what T5 is told to do, such as "translate English to German: "'
    assert written.notes == (f"before you run it, complete in {written.script}: {what}",)
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 9
    assert trainer.evaluate().keys() >= {"eval_exact_match", "eval_generated_tokens", "eval_loss_per_token"}
    simulated = estimate_from_arguments(trainer.model, trainer.args, 24).settings
    assert (simulated.predict_with_generate, simulated.eval_accumulation_steps) == (True, None)
    assert simulated.generation_num_beams == 1
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (3, 24)
    if method == "full":
        assert json.loads((work / "run/out/final/generation_config.json").read_text())["max_length"] == 24
    check_against_recipe(trainer, recipe(written.recipe))


def save_vision_transformer() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, num_labels=7)
    transformers.ViTForImageClassification(config).save_pretrained("model")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained("model")


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:unclosed file .*metadata.csv:ResourceWarning"
)  # datasets (seen in 5.2) leaves it open
@pytest.mark.parametrize(
    ("method", "classes", "labels"),
    [
        ("full", "folders", ["a", "b", "c"]),
        ("lora", "folders", ["a", "b", "c"]),
        ("lora", "metadata.csv", ["a", "b", "c"]),
        ("lora", "metadata.csv", ["1", "2", "10"]),  # numbers, which are no ids
    ],
)
def test_the_script_of_a_vision_transformer_runs_on_folders_of_images(
    method: str, classes: str, labels: list[str], work: Path
) -> None:
    save_vision_transformer()
    for number in range(32):
        split = work / "images" / ("validation" if number > 23 else "train")
        name = labels[number % 3] if number < 24 else labels[1 + number % 2]
        folder = split / name if classes == "folders" else split
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("L", (40, 36), number).save(folder / f"{number}.png")
        if classes != "folders":
            lines = "" if (folder / classes).exists() else "file_name,label\n"
            with (folder / classes).open("a") as file:
                file.write(f"{lines}{number}.png,{name}\n")
    found = plan("model", gpu=GPU, effective_batch_size=8, method=method)
    written = found.write("run")
    assert "the folder of images" in written.notes[0]
    assert written.commands[0].endswith("'datasets[vision]'")
    tree = ast.parse(written.script.read_text())
    names: dict[str, Any] = {}
    exec(ast.unparse(next(node for node in tree.body if getattr(node, "name", "") == "in_colour")), names)
    grey = {"L": 7, "I;16": 7 * 256 + 3, "I": 7 * 256}
    images = [PIL.Image.new(mode, (1, 1), value) for mode, value in grey.items()]
    assert {names["in_colour"](image).getpixel((0, 0)) for image in images} == {(7, 7, 7)}
    trainer = run_script(work / "run/train.py")
    assert (trainer.state.global_step, len(trainer.eval_dataset)) == (9, 8)
    assert trainer.model.config.id2label == dict(enumerate(labels))
    assert trainer.model.config.label2id == {name: at for at, name in enumerate(labels)}
    assert {int(row["labels"]) for row in trainer.eval_dataset} == {1, 2}
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    trainer.args.remove_unused_columns = True  # the script's own: its images are read by a transform
    check_against_recipe(trainer, recipe(written.recipe))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file .*metadata.csv:ResourceWarning")
@pytest.mark.parametrize("missing", ["train", "validation"])
def test_the_script_stops_at_images_without_a_label(missing: str, work: Path) -> None:
    save_vision_transformer()
    for split in ("train", "validation", "test"):  # of which the last is not read
        (work / "images" / split).mkdir(parents=True)
        labels = ["cat", "" if split in (missing, "test") else "dog"]
        for number in range(2):
            PIL.Image.new("L", (40, 36)).save(work / "images" / split / f"{number}.png")
        lines = (f"{number}.png,{label}" for number, label in enumerate(labels))
        (work / "images" / split / "metadata.csv").write_text("\n".join(["file_name,label", *lines]))
    plan("model", gpu=GPU, effective_batch_size=8).write("run")
    with pytest.raises(SystemExit, match="images without a label: 1; add it, or remove the line"):
        run_script(work / "run/train.py")


def whisper(folder: str) -> None:
    """Save a tiny Whisper with a processor for the letters of two languages."""
    letters = {letter: at for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz\u0120")}
    special = ["startoftranscript", "en", "de", "translate", "transcribe", "notimestamps"]
    tokenizer = transformers.WhisperTokenizer(vocab={**letters, "<|endoftext|>": len(letters)}, merges=[])
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{name}|>" for name in special]})
    features = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    transformers.WhisperProcessor(features, tokenizer).save_pretrained(folder)
    sizes: dict[str, Any] = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 32}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    end, start = len(letters), len(letters) + 1
    tokens = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    config = transformers.WhisperConfig(vocab_size=len(tokenizer), **sizes, **tokens)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)


SOUND = '{"audio": {"array": [0.1] * %d}, "text": "hello"}'
SOUNDS = f"datasets.Dataset.from_list([{SOUND % 16000}] * 24 + [{SOUND % 16001}])"
"""Stands for a folder of sounds, which needs torchcodec."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_script_of_whisper_knows_language_and_task(method: str, work: Path) -> None:
    whisper("model")
    found = plan("model", gpu=GPU, effective_batch_size=8, method=method)
    written = found.write("run")
    assert written.notes[0].endswith(
        ": the language that is spoken; the folder of sounds, and in encode() the column of what is said in them"
    )
    assert written.commands[0].endswith("'datasets[audio]'")
    script = work / "run/train.py"
    text = script.read_text().replace('.cast_column("audio", datasets.Audio(16_000))', "")
    folder = 'datasets.load_dataset("audiofolder", data_dir="sounds")'
    script.write_text(text.replace(folder, f"datasets.DatasetDict(train={SOUNDS})"))
    trainer = run_script(script)
    assert trainer.state.global_step == 9
    assert len(trainer.train_dataset) + len(trainer.eval_dataset) == 24  # the model hears one second
    start = trainer.processing_class.tokenizer.decode(trainer.train_dataset[0]["labels"])
    assert start == "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>hello<|endoftext|>"
    if method == "full":
        saved = json.loads((work / "run/out/final/generation_config.json").read_text())
        assert (saved["language"], saved["task"]) == ("english", "transcribe")
    check_against_recipe(trainer, recipe(written.recipe))


# ---- The rows

INTEGERS = [{"text": f"w{5 + at} w6", "label": at % 12} for at in range(48)]
CHAT = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
FORMATS: dict[str, tuple[str, list[dict[str, Any]], str | None]] = {
    "odd name": ("causal-lm", [{"other": 1, "w\u2028 'x\"": "w5 w6"}], "w\u2028 'x\""),
    "messages": ("causal-lm", [{"messages": CHAT}], None),
    "prompt": ("causal-lm", [{"prompt": "w5 w6 ", "completion": "w7"}], None),
    "token ids": ("causal-lm", [{"ids": [5, 6, 7] * 20, "labels": [-100, 6, 7] * 20}], "ids"),
    "masked": ("masked-lm", [{"content": "w5 w6"}], None),
    "integers": ("sequence-classification", INTEGERS, None),
    "floats": ("sequence-classification", [{"text": "w5", "label": at / 3} for at in range(24)], None),
    "named": ("sequence-classification", [{"title": "w5", "body": "w6 w7", "stars": 1}], "body"),
    "tags": ("token-classification", [{"words": ["w5", "w6"], "pos_tags": ["A", "B"]}], None),
    "answers": ("question-answering", [COLUMNS["question-answering"]], None),
    "dialogue": ("seq2seq", [{"dialogue": "w5", "summary": "w6"}], None),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a plan whose model is the folder of a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.tokenizer(chat_template=TEMPLATE).save_pretrained(folder)
    made = plan(tiny.llama_config(num_hidden_layers=1), gpu=GPU, seq_len=24, effective_batch_size=1, method="full")
    return replace(made, source=str(folder))


QUICK = ("odd name", "messages")


@pytest.mark.parametrize("name", slow_except(QUICK, FORMATS))
def test_the_rows_of_a_script_are_those_of_read_rows(name: str, found: Plan, work: Path) -> None:
    task, rows, column = FORMATS[name]
    made = rows if len(rows) > 1 else rows * 24
    Path("data").mkdir()
    for split, part in (("train", made), ("validation", made[:12])):
        Path(f"data/{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
    written = replace(found, task=task).write("run", data="data", column=column)
    assert written.notes == ()
    tree = ast.parse(written.script.read_text())
    last = next(at for at, node in enumerate(tree.body) if ast.unparse(node).startswith("rows = "))
    names: dict[str, Any] = {}
    exec(compile(ast.Module(tree.body[: last + 1], []), "train.py", "exec"), names)
    given = {"named": {"text": "body"}, "odd name": {"text": column}, "token ids": {"input_ids": column}}.get(name)
    data = datasets.load_dataset("json", data_dir="data")
    own = read_rows(data, tiny.tokenizer(chat_template=TEMPLATE), task, columns=given, max_length=24)
    script = names["rows"]
    assert (len(script.train), len(script.evaluation)) == (len(made), 12)
    assert (script.train.to_list(), script.evaluation.to_list()) == (own.train.to_list(), own.evaluation.to_list())
    assert (script.format, script.head, script.notes) == (own.format, own.head, own.notes)


def test_a_column_that_no_format_has_is_left_to_fill_in(found: Plan, work: Path) -> None:
    Path("train.jsonl").write_text(json.dumps({"text": "w5", "answer": 1}))
    written = replace(found, task="sequence-classification").write("run", data="train.jsonl", column="text")
    assert written.notes == ("before you run it, complete in run/train.py: the names of the columns",)
    fill_in = 'columns={"text": "text", "label": "NAME"},  # FILL IN: the names of the columns'
    assert fill_in in Path("run/train.py").read_text()


def test_files_that_load_dataset_would_leave_out_are_refused_before_a_script_is_written(
    found: Plan, work: Path
) -> None:
    Path("data").mkdir()
    for name in ("reviews.jsonl", "reviews-test.jsonl"):
        Path("data", name).write_text(json.dumps({"text": "w5", "label": 1}) + "\n")
    message = (
        "path='data' has 'reviews.jsonl' beside files named for test, and load_dataset would leave it out; expected a "
        "split in the name of each file, or of none. Rename it: train-reviews.jsonl"
    )
    made = replace(found, task="sequence-classification")
    refuses(ValueError, message, made.write, "run", data="data")
    assert not Path("run").exists()
    Path("data/reviews.jsonl").rename("data/train-reviews.jsonl")
    assert made.write("run", data="data").script is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets 4.0 leaves the file open
def test_a_class_called_none_is_read_from_a_csv_file_of_any_name(found: Plan, work: Path) -> None:
    Path("train[1].csv").write_text("text,label\n" + "w5,None\nw6,NA\n,NA\n" * 4)
    text = replace(found, task="sequence-classification").write("run", data="train[1].csv").script.read_text()
    loads = next(node for node in ast.parse(text).body if ast.unparse(node).startswith("data = "))
    data = eval(ast.unparse(loads).removeprefix("data = "))
    rows = read_rows(data, tiny.tokenizer(), "sequence-classification")
    assert rows.head["id2label"] == {0: "NA", 1: "None"}
    assert rows.notes[0] == "4 of 12 rows without text or label, or with nothing to learn, were left out"


def test_folders_that_load_dataset_would_read_otherwise_are_refused(found: Plan, work: Path) -> None:
    made = replace(found, task="causal-lm")
    for name in ("part.jsonl", "notes.txt"):
        Path("data").mkdir(exist_ok=True)
        Path("data", name).write_text(json.dumps({"text": "w5"}) + "\n")
    with pytest.raises(ValueError, match=r"path='data' has 'notes\.txt' too, which load_dataset would read as json"):
        made.write("run", data="data")
    datasets.Dataset.from_list([{"text": "w5"}] * 4).save_to_disk("saved/train")
    with pytest.raises(ValueError, match=r"has 1 saved datasets in folders of their own.*Name it: saved/train"):
        made.write("run", data="saved")
    assert made.write("run", data="saved/train").script is not None
