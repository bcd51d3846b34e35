"""What do 16-bit weights cost in quality, and save in bytes? Four ways to hold the weights, over several seeds.

Two tasks on the CPU, with stock's Trainer and 8-bit AdamW (embeddings in 32 bits):

* the demo's task, a small BERT trained from random weights: loss and accuracy on unseen texts;
* a small Llama, trained in float32 on half of the demo's texts and then, at the Trainer's default learning rate, on the
  other half in each of the four ways: loss and accuracy of the next token on unseen texts.

All ways compute in bfloat16 (``bf16=True`` for float32 weights), and all are evaluated in float32. Seeds decide the
order of the data, and the weights of the BERT. Printed are means over the seeds, and the 95 % t-interval of the mean
difference from float32 weights with the same seed.

    python benchmarks/sixteen_bit_weights.py [--seeds 3]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accuracy import t_interval
from demo_task import DocstringTask, build_model, train_tokenizer, whole_task
from results_file import markdown, show
from transformers import (
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from hf_memopt import EmbeddingBitsCallback, attach, low_memory_optimizer
from hf_memopt.training.techniques.optimizers import optimizer_state_bytes

Run = Callable[[str, int], dict[str, float]]
WAYS = ("float32 masters", "plain bf16", "stochastic", "kahan")
SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
LENGTH_TOKENS = 64
ROWS = 320  # of each half of the causal LM's texts
TITLES = {"demo": "the demo's task", "causal-lm": "a small causal language model, continued"}
RATES = {"demo": 1e-3, "causal-lm before": 1e-3, "causal-lm": 5e-5}


def train(
    model: Any,
    way: str,
    rows: Any,
    folder: str,
    *,
    seed: int = 0,
    rate: float,
    epochs: int = 1,
    batch_size: int = 32,
    **trainer: Any,
) -> Trainer:
    """Train with the weights held in one way."""
    model = model if way == "float32 masters" else model.bfloat16()
    args = TrainingArguments(
        output_dir=folder,
        learning_rate=rate,
        warmup_steps=0.1,
        per_device_train_batch_size=batch_size,
        num_train_epochs=epochs,
        seed=seed,
        optim="adamw_8bit",
        bf16=way == "float32 masters",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    chosen = {"optimizer_cls_and_kwargs": low_memory_optimizer(args, model, rounding=way)} if way in WAYS[2:] else {}
    built = Trainer(
        model=model, args=args, train_dataset=rows, callbacks=[EmbeddingBitsCallback()], **chosen, **trainer
    )
    built.remove_callback(PrinterCallback)
    attach(built).train()
    return built


def figures_of(trainer: Trainer, loss: float, accuracy: float) -> dict[str, float]:
    """Return loss, accuracy and the bytes per parameter of weights, gradients and optimizer state."""
    parameters = list(trainer.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    weights = sum(parameter.nbytes for parameter in parameters)
    state = sum(optimizer_state_bytes(trainer.optimizer).values())
    return {"loss": loss, "accuracy": accuracy, "weight_bytes": weights / count, "state_bytes": state / count}


@torch.no_grad()
def evaluate(model: Any, batches: list[dict[str, torch.Tensor]], shift: int) -> tuple[float, float]:
    """Return the mean loss and accuracy of a float32 copy; ``shift`` is 1 where labels are the next tokens."""
    model = copy.deepcopy(model).float().eval()
    losses, hits = [], []
    for batch in batches:
        labels = batch["labels"]
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        labels = labels[:, shift:] if shift else labels
        logits = logits[:, :-shift] if shift else logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none"))
        hits.append((logits.argmax(-1) == labels).flatten().float())
    return torch.cat(losses).mean().item(), torch.cat(hits).mean().item()


def demo_run(task: DocstringTask, tokenizer: PreTrainedTokenizerBase, folder: str) -> tuple[Run, None]:
    """Return a function that trains the demo's classifier in one way with one seed."""
    encoded = [tokenizer(list(texts), truncation=True) for texts in (task.train_texts, task.test_texts)]
    rows = [
        [{"input_ids": ids, "labels": label} for ids, label in zip(part["input_ids"], labels, strict=True)]
        for part, labels in zip(encoded, (task.train_labels, task.test_labels), strict=True)
    ]
    collator = DataCollatorWithPadding(tokenizer)
    test = sorted(rows[1], key=lambda row: len(row["input_ids"]))
    batches = [dict(collator(test[start : start + 64])) for start in range(0, len(test), 64)]

    def run(way: str, seed: int) -> dict[str, float]:
        model = build_model(len(tokenizer), task.labels, SIZES, seed=seed)
        trained = train(model, way, rows[0], folder, seed=seed, rate=RATES["demo"], data_collator=collator)
        return figures_of(trained, *evaluate(trained.model, batches, shift=0))

    return run, None


def causal_run(task: DocstringTask, tokenizer: PreTrainedTokenizerBase, folder: str) -> tuple[Run, tuple[float, float]]:
    """Return a function that trains the Llama on in one way with one seed, and loss and accuracy before it.

    The first half is trained here, once.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH_TOKENS,
        tie_word_embeddings=True,
    )
    half = len(task.train_texts) // 2
    parts = (task.train_texts[:half], task.train_texts[half:], task.test_texts)
    first, second, test = (packed(tokenizer, texts) for texts in parts)
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    train(base, "float32 masters", first, folder, rate=RATES["causal-lm before"], epochs=4, batch_size=16)
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    ids = torch.tensor([row["input_ids"] for row in test])
    batches = [{"input_ids": part, "labels": part} for part in ids.split(32)]

    def run(way: str, seed: int) -> dict[str, float]:
        model = LlamaForCausalLM(config)
        model.load_state_dict(weights)
        trained = train(model, way, second, folder, seed=seed, rate=RATES["causal-lm"], epochs=2, batch_size=16)
        return figures_of(trained, *evaluate(trained.model, batches, shift=1))

    return run, evaluate(base, batches, shift=1)


def packed(tokenizer: PreTrainedTokenizerBase, texts: Any) -> list[dict[str, list[int]]]:
    """Return the texts one after the other, cut into rows of ``LENGTH_TOKENS``."""
    ids = [token for text in tokenizer(list(texts))["input_ids"] for token in text]
    starts = range(0, len(ids) - LENGTH_TOKENS + 1, LENGTH_TOKENS)
    rows = [ids[start : start + LENGTH_TOKENS] for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows[:ROWS]]


def summarise(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return each way's means, and the intervals of its differences from float32 weights."""
    found: dict[str, Any] = {}
    for way, runs in rows.items():
        found[way] = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        if way != WAYS[0]:
            for name in ("loss", "accuracy"):
                pairs = zip(runs, rows[WAYS[0]], strict=True)
                found[way][f"{name}_difference"] = t_interval([run[name] - masters[name] for run, masters in pairs])
    return found


def table(tasks: dict[str, dict[str, Any]]) -> str:
    """Return quality and bytes of each way, task by task."""
    rows = []
    for task, figures in tasks.items():
        for way in WAYS:
            found = figures[way]
            weight, state = found["weight_bytes"], found["state_bytes"]
            differences = [
                "{:+.4f} [{:+.4f}, {:+.4f}]".format(*found[key]) if key in found else ""
                for key in ("loss_difference", "accuracy_difference")
            ]
            cells = [TITLES[task], way, f"{found['loss']:.4f}", differences[0], f"{found['accuracy']:.4f}"]
            rows.append((*cells, differences[1], f"{weight:.0f} + {weight:.0f} + {state:.2f}"))
    seeds = next(iter(tasks.values()))["seeds"]
    note = (
        f"Means of {seeds} seeds, with 95 % intervals of the difference (`python benchmarks/sixteen_bit_weights.py`). "
        "*Bytes* are those of a parameter: weight, gradient, and 8-bit AdamW's state with embeddings in 32 bits."
    )
    return markdown("| task | weights | loss | against float32 weights | accuracy | against | bytes |", rows, note)


def main() -> None:
    """Run the seeds, print the table, append a row for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 11), metavar="N")
    seeds = parser.parse_args().seeds
    task = whole_task()
    tokenizer = train_tokenizer(task.train_texts)
    with tempfile.TemporaryDirectory() as folder:
        for name, build in (("demo", demo_run), ("causal-lm", causal_run)):
            run, before = build(task, tokenizer, folder)
            rows = {way: [run(way, seed) for seed in range(seeds)] for way in WAYS}
            figures = {"seeds": seeds, "learning_rate": RATES[name], "before": before, **summarise(rows)}
            show(f"16-bit weights, {name}", figures, table({name: figures}))


if __name__ == "__main__":
    main()
