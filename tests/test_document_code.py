"""The code of README and of docs/ runs as it stands: Python blocks page by page, and the commands of hf-memopt.

A page may use what its reader has already: a model, its tokenizer, tokenised data, arguments and a Trainer. Names of
the hub stand for tiny models, since tests have no network.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from slow_cases import slow_except
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from typer.testing import CliRunner

import language_models
import tiny
from hf_memopt import BucketedCollator
from hf_memopt.cli.app import app
from hf_memopt.training.batching.padding_costs import counted_lengths

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
OF_LANGUAGE_MODELS = ("docs/full-fine-tuning.md", "docs/larger-than-the-gpu.md", "docs/lora-and-qlora.md")
DEEP = tiny.llama_config(tie_word_embeddings=True, num_hidden_layers=3)  # streamed layers need three
OPTIONAL = ("trl",)  # packages that this environment may lack
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CUDA_BUILD = torch.version.cuda is not None
COMMAND_ANSWERS = (0, 1)  # it fits, or it does not


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [text for found, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if found == language]


def commands(page: str) -> list[str]:
    """Return the commands of hf-memopt that a page shows."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith("hf-memopt ")]


def texts(count: int) -> list[str]:
    return [" ".join(f"w{(row * 7 + i) % 95}" for i in range(3 + row % 20)) for row in range(count)]


def tiny_or_from_folder(
    name: str, load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained, **settings: Any
) -> Any:
    """Return the model of a folder, and a tiny one for a name of the hub."""
    return load(name, **settings) if Path(name).is_dir() else tiny.llama(tie_word_embeddings=True)


@pytest.fixture
def reader(tmp_path, monkeypatch) -> dict[str, Any]:
    """Return the names that a reader of the pages has, in an empty folder with a file of texts."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny.tokenizer()
    rows = {**tokenizer(texts(16)), "labels": [row % 3 for row in range(16)]}
    dataset = Dataset.from_dict(rows)
    Path("train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(64)), encoding="utf-8")
    Path("train.py").write_text("import sys\nprint(sys.argv)\n", encoding="utf-8")
    model = tiny.bert()
    args = TrainingArguments("out", num_train_epochs=1, disable_tqdm=True, save_strategy="no")
    return {
        "__name__": "__main__",
        "model": model,
        "language_model": tiny.llama(),
        "tokenizer": tokenizer,
        "train_set": dataset,
        "dataset": Dataset.from_dict({"text": texts(16), "label": [row % 3 for row in range(16)]}),
        "eval_set": dataset.select(range(8)),
        "texts": dataset.remove_columns("labels"),
        "args": args,
        "trainer": Trainer(model, args, train_dataset=dataset, processing_class=tokenizer),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")  # what a CPU cannot do as a GPU does is warned of
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # by TRL 1.16 itself
@pytest.mark.parametrize(
    "page", slow_except(("docs/getting-started.md",), [page for page in PAGES if blocks(page, "python")])
)
def test_python_of_the_page_runs(page, reader, monkeypatch) -> None:
    if page in OF_LANGUAGE_MODELS or page == "README.md":
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: reader["tokenizer"])
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", tiny_or_from_folder)
    if page in OF_LANGUAGE_MODELS:
        reader["model"] = LlamaForCausalLM(DEEP)
        reader["train_set"] = reader["train_set"].remove_columns("labels")
        reader["collator"] = DataCollatorForLanguageModeling(reader["tokenizer"], mlm=False)
    if page == "docs/lora-and-qlora.md":
        reader["folder"] = "checkpoint"
        language_models.build("mixtral").save_pretrained("checkpoint")
    for text in blocks(page, "python"):
        if page == "docs/rehearse.md" and (not CUDA_BUILD or "from_pretrained" in text):
            continue  # the script that the page rehearses, in bf16 on a GPU
        if any(f"from {name} import" in text and find_spec(name) is None for name in OPTIONAL):
            continue
        if not torch.cuda.is_available():  # as the page says of GPUs before Ampere
            text = text.replace('SFTConfig("out", ', 'SFTConfig("out", bf16=False, ')
        exec(compile(text, page, "exec"), reader)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_python_of_the_readme_without_its_plan_runs(reader) -> None:
    for text in blocks("README.md", "python"):
        if "from_pretrained" not in text:  # the recipe of a large model is planned, which takes 20 seconds
            exec(compile(text, "README.md", "exec"), reader)


def test_the_loss_of_the_page_weighs_each_label_of_a_step_the_same() -> None:
    (text,) = (text for text in blocks("docs/cut-padding.md", "python") if "def summed_loss" in text)
    names: dict[str, Any] = {"BucketedCollator": BucketedCollator}
    exec(compile(text.partition("\n\nweighted")[0], "docs/cut-padding.md", "exec"), names)
    logits, labels = torch.randn(6, 4, 3), torch.randint(3, (6, 4))
    labels[0, 1:] = -100
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    parts = [(logits[rows], labels[rows]) for rows in (slice(1), slice(1, 6))]
    count = labels.ne(-100).sum()
    summed = sum(names["summed_loss"]({"logits": part}, own, count) for part, own in parts)
    torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(names["summed_loss"]({"logits": logits}, labels), expected)
    collator = names["WithoutFirstLabel"](tiny.tokenizer(), causal_lm=True)
    assert collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])["labels"][0, :3].tolist() == [-100, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), [(page, line) for page in PAGES for line in commands(page)])
def test_command_of_the_page_answers(page, command, reader, monkeypatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **settings: reader["tokenizer"])
    monkeypatch.setattr(counted_lengths, "hub_answers", lambda: False)
    words = shlex.split(command)[1:]
    if words[0] == "rehearse" and not CUDA_BUILD:
        pytest.skip("a rehearsal needs a CUDA build of torch")
    if words[0] == "run":  # ends its process with the script
        subprocess.run([sys.executable, "-m", "hf_memopt", *words], check=True, timeout=600)
        return
    found = CliRunner().invoke(app, words)
    assert found.exit_code in COMMAND_ANSWERS, found.output
