"""Train on the same texts, packed by TRL's ``SFTTrainer`` without flash attention, and by ``packed``.

TRL packs by best fit as ``packed`` does; without flash attention its texts are apart where the model reads
``position_ids`` (Llama), and see each other where it does not (OPT). New texts, each alone, show what that costs. The
program needs TRL: ``.venv-clients/bin/python benchmarks/trl_packing.py`` after ``make .venv-clients/.ready``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from packed_rows import SEEDS, STEPS, TRAINED_ROW, VOCABULARY, llama, loss_alone, sequences
from results_file import markdown, show
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

from hf_memopt import BucketedCollator, attach, packed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def opt() -> OPTForCausalLM:
    """Return an OPT of the size of the Llama."""
    size: dict[str, Any] = {
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "dropout": 0.0,
    }
    size |= {"vocab_size": VOCABULARY, "word_embed_proj_dim": 64, "max_position_embeddings": 2048}
    return OPTForCausalLM(OPTConfig(**size))


MODELS: dict[str, Callable[[], Any]] = {"llama": lambda: llama(TRAINED_ROW, VOCABULARY, 64), "opt": opt}


def trained(name: str, way: str, seed: int) -> float:
    """Return the loss of new texts after one epoch over the same texts in rows of the same length."""
    from trl import SFTConfig, SFTTrainer

    texts = [text for step in range(STEPS) for text in sequences(16, seed * 10_000 + step)]
    dataset = Dataset.from_list([{"input_ids": text["input_ids"]} for text in texts])
    torch.manual_seed(seed)
    model = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "TRL":
            rows = {"packing": True, "max_length": TRAINED_ROW, "gradient_checkpointing": False}
            args = SFTConfig(folder, seed=seed, **rows, **SETTINGS)
            trainer: Trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=tiny.tokenizer())
        else:
            view, collator = packed(dataset, TRAINED_ROW, seed=seed), BucketedCollator(tiny.tokenizer(), causal_lm=True)
            args = TrainingArguments(folder, seed=seed, **SETTINGS)
            trainer = attach(Trainer(model, args, train_dataset=view, data_collator=collator))
        trainer.train()
    return loss_alone(model.eval(), sequences(200, -1 % 2**31))


def main() -> None:
    """Measure, print and append the row."""
    torch.set_num_threads(1)
    ways = ("TRL", "packed")
    figures = {f"{name}, {way}": [trained(name, way, seed) for seed in range(SEEDS)] for name in MODELS for way in ways}
    rows = [(name, f"{statistics.mean(losses):.4f}") for name, losses in figures.items()]
    show("trl_packing", {"loss_of_texts_alone": figures}, markdown("| rows of | loss of new texts, each alone |", rows))


if __name__ == "__main__":
    main()
