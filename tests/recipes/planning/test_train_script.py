"""The script of a plan: it runs as it is, its arguments and callbacks are the recipe's, its memory the plan's."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import tiny
from hf_memopt import Plan, Recipe, custom_gpu, estimate_from_arguments, plan, recipe
from hf_memopt.cli.app import app

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true but no accelerator:UserWarning"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
GPU = "RTX 3060 12GB"
OF_THE_SCRIPT = ("learning_rate", "num_train_epochs", "eval_strategy", "save_strategy", "logging_steps", "use_cpu")
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
    return [one.__reduce__()[:2] for one in trainer.callback_handler.callbacks if hasattr(one, "technique")]


def check_against_recipe(trainer: Any, chosen: Recipe) -> None:
    built = trainer_of_recipe(chosen, trainer)
    assert trainer.args.to_dict() == built.args.to_dict()
    assert own_callbacks(trainer) == own_callbacks(built)
    assert type(trainer.data_collator) is type(built.data_collator)
    assert type(trainer.train_dataset) is type(built.train_dataset)
    assert trainer.optimizer_cls_and_kwargs == built.optimizer_cls_and_kwargs


def check_memory(trainer: Any, found: Plan) -> None:
    """Hold the estimate of the script's own model and arguments against the plan's."""
    chosen, one = found.recipe, found.chosen
    assert one is not None
    names = ("autocast_cache", "fused_cross_entropy", "sparse_tied_embedding", "gradient_release", "rounding")
    settings = {name: getattr(chosen, name) for name in names}
    itself = estimate_from_arguments(trainer.model, trainer.args, one.seq_len, gpu=found.gpu, **settings)
    assert itself.components == one.components
    assert itself.total_bytes == one.total_bytes


def test_the_script_of_a_lora_plan_runs_as_it_is(model: Path, work: Path) -> None:
    options = ("--gpu", GPU, "--data", "train.jsonl", "--effective-batch", "8", "--method", "lora", "--write", "run")
    done = CliRunner().invoke(app, ["plan", str(model), *options])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-3:] == [
        "Written: run/train.py and run/recipe.json",
        "  pip install 'hf-memopt[peft]'",
        "  python run/train.py",
    ]
    trainer = run_script(work / "run/train.py")
    assert trainer.state.global_step == 3 * 3  # 3 epochs of 23 rows
    assert (work / "run/out/final/adapter_model.safetensors").is_file()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    chosen = recipe("run/recipe.json")
    check_against_recipe(trainer, chosen)
    found = plan(model, gpu=GPU, seq_len=24, effective_batch_size=8, method="lora")
    assert found.recipe.replace(purpose="", reasons={}) == chosen.replace(purpose="", reasons={})
    check_memory(trainer, found)
