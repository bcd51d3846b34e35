"""What micro-batching costs where it does nothing, and gains on texts of mixed length: python benchmarks/microbatch.py

Cost: ``MicrobatchCallback`` around a training step that does nothing, over a real step of BERT-tiny (2 layers, hidden
128) on 8 short texts. Gain: BERT-mini (4 layers, hidden 256) on the docstrings that Python ships with, 32 to an
optimizer step; stock in 4 accumulation steps of 8, padded to their longest, against one batch that is split into as
many rows or as many tokens at most. A loss that is not known (hard examples): one batch of 32 whole, and with 8 rows of
the backbone at a time. Every arm trains on the same texts at the same step; the arms take turns, and of
each step the median of the turns counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

from results_file import MACHINE, markdown, show
from transformers import TrainerCallback

from hf_memopt.units import percent

CALLS, REPEATS = 2000, 7
TURNS, STEPS = 3, 12
ROWS, MICROBATCH_ROWS = 32, 8
TINY: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
MINI: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
MOST_TOKENS = 256  # of a text

STOCK = {"per_device_train_batch_size": MICROBATCH_ROWS, "gradient_accumulation_steps": ROWS // MICROBATCH_ROWS}
ARMS: dict[str, dict[str, int]] = {
    "stock, 4 accumulation steps of 8 rows": {},
    "micro-batches of 8 rows at most": {"max_examples": MICROBATCH_ROWS},
    "micro-batches of 2048 tokens at most": {"max_tokens": MICROBATCH_ROWS * MOST_TOKENS},
}
"""Arms by name: the limits of ours, none for stock."""


OWN: dict[str, dict[str, int] | None] = {
    "hard examples, 32 rows at once, stock": None,
    "hard examples, attached, nothing to cut": {},
    "hard examples, 8 rows of the backbone at a time": {"max_examples": MICROBATCH_ROWS},
}
"""Arms of a loss that compares rows: the limits, None for stock alone."""


def hard_examples(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return the mean of the half of the rows with the largest loss."""
    import torch

    losses = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
    return losses.topk(len(losses) // 2).values.mean()


class StepClock(TrainerCallback):
    """Time of each optimizer step, and the padded tokens that the model saw in it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.tokens: list[int] = []

    def count(self, module: Any, args: Any, inputs: dict[str, Any]) -> None:
        """Count a forward pass; a hook of the model."""
        self.tokens[-1] += inputs["input_ids"].numel()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.tokens.append(0)
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.cpu_seconds.append(time.process_time() - self._cpu)
        self.seconds.append(time.perf_counter() - self._started)


def read_texts() -> tuple[Any, list[dict[str, Any]]]:
    """Return a tokenizer and the tokenized docstrings with their labels."""
    from demo_task import train_tokenizer, whole_task

    task = whole_task()
    tokenizer = train_tokenizer(task.train_texts)
    ids = tokenizer(list(task.train_texts), truncation=True, max_length=MOST_TOKENS)["input_ids"]
    return tokenizer, [{"input_ids": row, "labels": label} for row, label in zip(ids, task.train_labels, strict=True)]


def build_trainer(tokenizer: Any, rows: Any, sizes: dict[str, Any], **settings: Any) -> Any:
    """Return a stock Trainer on a new BERT."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), num_labels=20, **sizes)
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    settings = {"per_device_train_batch_size": ROWS, "learning_rate": 1e-4, "max_steps": STEPS, **quiet, **settings}
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(**settings, dataloader_pin_memory=torch.accelerator.is_available()),
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def attached(trainer: Any, **limits: int) -> Any:
    """Attach micro-batching, which without ``limits`` has no reason to split."""
    from hf_memopt import MicrobatchCallback, attach

    return attach(trainer, MicrobatchCallback(**limits))


def overhead(tokenizer: Any, rows: list[dict[str, Any]], folder: str) -> dict[str, float]:
    """Time the callback around a step that does nothing, and a real step of the smallest model on short texts."""
    from hf_memopt.training.binding.undo import override_method

    few = [row for row in rows if len(row["input_ids"]) <= 64][: MICROBATCH_ROWS * STEPS]
    settings = {"output_dir": folder, "per_device_train_batch_size": MICROBATCH_ROWS}
    trainer = build_trainer(tokenizer, few, TINY, **settings)
    clock = StepClock()
    trainer.add_callback(clock)
    trainer.train()
    real = statistics.median(clock.seconds[1:])

    inputs = trainer.data_collator(few[:MICROBATCH_ROWS])
    loss = trainer.compute_loss(trainer.model, dict(inputs)).detach()
    override_method(trainer, "training_step", lambda before, *args: loss)
    bare = seconds_per_call(trainer, inputs)
    extra = seconds_per_call(attached(trainer), inputs) - bare
    return {"callback_seconds": extra, "step_seconds": real, "fraction": extra / real}


def seconds_per_call(trainer: Any, inputs: Any) -> float:
    """Return the time of one step with its event, the least of several repeats."""
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(CALLS):
            trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)
            trainer.training_step(trainer.model, inputs, None)
        found.append((time.perf_counter() - started) / CALLS)
    return min(found)


def mixed_lengths(tokenizer: Any, rows: list[dict[str, Any]], folder: str) -> dict[str, dict[str, float]]:
    """Train the arms in turns; return the seconds and padded tokens of an optimizer step of each."""
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    clocks: dict[str, StepClock] = {}
    for _ in range(TURNS):
        for name, limits in ARMS.items():
            trainer = build_trainer(tokenizer, rows, MINI, output_dir=folder, **({} if limits else STOCK))
            if limits:
                attached(trainer, **limits)
            clocks[name] = clock = StepClock()
            trainer.add_callback(clock)
            trainer.model.register_forward_pre_hook(clock.count, with_kwargs=True)
            trainer.train()
            seconds[name].append(clock.seconds[1:])  # the first one finds out how the loss is scaled
    return {
        name: {
            "seconds_per_step": statistics.mean(statistics.median(turns) for turns in zip(*seconds[name], strict=True)),
            "padded_tokens_per_step": statistics.mean(clock.tokens[1:]),
        }
        for name, clock in clocks.items()
    }


def own_losses(tokenizer: Any, rows: Any, folder: str) -> dict[str, dict[str, float]]:
    """Train the arms of a loss that compares rows in turns; return the CPU seconds of an optimizer step of each."""
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(TURNS):
        for name, limits in OWN.items():
            trainer = build_trainer(tokenizer, rows, MINI, output_dir=folder)
            trainer.compute_loss_func = hard_examples
            if limits is not None:
                attached(trainer, **limits)
            clock = StepClock()
            trainer.add_callback(clock)
            trainer.train()
            seconds[name].append(clock.cpu_seconds[2:])  # the first two check that rows are independent
    return {
        name: {"cpu_seconds_per_step": statistics.mean(statistics.median(each) for each in zip(*turns, strict=True))}
        for name, turns in seconds.items()
    }


def table(figures: dict[str, Any]) -> str:
    """Return pieces against stock accumulation, and what the callback costs."""
    cost, arms = figures["overhead"], figures["mixed_lengths"]
    stock = next(iter(arms.values()))["seconds_per_step"]
    rows = []
    for name, found in arms.items():
        seconds, tokens = found["seconds_per_step"], found["padded_tokens_per_step"]
        rows.append((name, f"{seconds:.2f}", f"{tokens:,.0f}", f"{stock / seconds:.2f}x"))
    own = {name: found["cpu_seconds_per_step"] for name, found in figures["own_losses"].items()}
    (whole, attached, parts), (_, _, name) = own.values(), own
    return markdown(
        "| 32 docstrings a step, BERT-mini | seconds per step | padded tokens | speed |",
        rows,
        f"Where nothing is cut, the callback costs {1e6 * cost['callback_seconds']:.0f} microseconds per step: "
        f"{percent(cost['fraction'], 2)} of a {1e3 * cost['step_seconds']:.0f} ms step of BERT-tiny. On {MACHINE} "
        "(`python benchmarks/microbatch.py`).",
        f"An unknown loss costs more. For 32 examples of BERT-mini, {name} take {parts / whole:.2f} times the CPU time "
        f"of the whole batch in the plain Trainer; where nothing is cut, {attached / whole:.2f} times.",
    )


def main() -> None:
    """Run all three, print the table, append the row."""
    tokenizer, rows = read_texts()
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            name: run(tokenizer, rows, folder)
            for name, run in (("overhead", overhead), ("mixed_lengths", mixed_lengths), ("own_losses", own_losses))
        }
    show("microbatch", figures, table(figures))


if __name__ == "__main__":
    main()
