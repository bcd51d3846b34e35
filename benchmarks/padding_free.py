"""Batches without padding: how much of the token budget they use, and what reading and collating them costs.

The sets of lengths of benchmarks/batching.py, 10,000 examples in a datasets.Dataset (docstrings: as many as there are),
one epoch through the training DataLoader of a stock Trainer, one thread, no workers; CPU time, best of three. "fits" is
the number of rows of the longest text that the budget holds, "mean" the one that uses the budget on average.

python benchmarks/padding_free.py
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np
import torch
from batching import length_sets
from datasets import Dataset
from results_file import markdown, show
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_memopt import BucketedCollator, attach, bucketed

EXAMPLES, REPEATS = 10_000, 3


def make_trainer(dataset: Any, collator: Any, rows: int) -> Trainer:
    """Return a Trainer with a model that is as good as none, for its DataLoader."""
    config = LlamaConfig(
        vocab_size=100, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    arguments = TrainingArguments(
        tempfile.gettempdir(),
        per_device_train_batch_size=rows,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=dataset, data_collator=collator)


def measure(trainer: Trainer, lengths: np.ndarray, budget: int) -> dict[str, float]:
    """Return the tokens of the batches of an epoch and the time to make them."""
    seconds, tokens, examples = [], int(lengths.sum()), len(lengths)
    for _ in range(REPEATS):
        start = time.process_time()
        sizes = [batch["input_ids"].numel() for batch in trainer.get_train_dataloader()]
        seconds.append(time.process_time() - start)
    return {
        "batches": len(sizes),
        "tokens_per_batch": tokens / len(sizes),
        "largest_over_budget": max(sizes) / budget,
        "budget_used": tokens / len(sizes) / max(budget, max(sizes)),
        "us_per_example": min(seconds) / examples * 1e6,
    }


def arms(lengths: np.ndarray, budget: int) -> dict[str, dict[str, float]]:
    """Return the figures of every way to make the batches."""
    dataset = Dataset.from_dict({"input_ids": [[7] * length for length in lengths.tolist()]})
    stock, ours = DataCollatorWithFlattening(), BucketedCollator(inner=DataCollatorWithFlattening())
    fits, mean = budget // int(lengths.max()), round(budget / lengths.mean())
    found = {}
    for name, data, collator, rows in (
        (f"stock, {fits} rows: fits", dataset, stock, fits),
        (f"stock, {mean} rows: mean", dataset, stock, mean),
        ("max_tokens, no padding", bucketed(dataset, max_tokens=budget), ours, 1),
    ):
        trainer = make_trainer(data, collator, rows)
        found[name] = measure(trainer if collator is stock else attach(trainer), lengths, budget)
    return found


def table(figures: dict[str, Any]) -> str:
    """Return what each way makes of the budget."""
    rows = [
        (
            f"{name}, {of_set['budget']:,}: {arm}",
            f"{found['batches']:,}",
            f"{found['tokens_per_batch']:,.0f}",
            f"{found['largest_over_budget']:.2f}",
            f"{found['budget_used']:.3f}",
            f"{found['us_per_example']:.0f}",
        )
        for name, of_set in figures.items()
        for arm, found in of_set["arms"].items()
    ]
    return markdown("| set, budget: way | batches | tokens, mean | largest / budget | budget used | us/example |", rows)


def main() -> None:
    """Measure, print and append the row."""
    torch.set_num_threads(1)
    figures = {
        name: {"budget": budget, "arms": arms(np.asarray(lengths), budget)}
        for name, (lengths, budget) in length_sets(EXAMPLES).items()
    }
    show("padding_free", figures, table(figures))


if __name__ == "__main__":
    main()
