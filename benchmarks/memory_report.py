"""What MemoryReportCallback costs: microseconds per step with nothing in the step, over the time of a real one.

The callback's events are called in the order of the real Trainer, with a log at every step (more often than anyone
logs). The real step is forward, backward and AdamW of a BERT of 3 layers x 192 in float32 on a batch of 32 x 64 tokens;
the larger the model, the smaller the share. All times are medians.

    python benchmarks/memory_report.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from results_file import show
from transformers import BertConfig, BertForSequenceClassification, TrainerControl, TrainerState, TrainingArguments

from hf_memopt import MemoryReportCallback

BATCH, TOKENS = 32, 64


def median_seconds(function: Callable[[], object], repetitions: int, *, warmup: int) -> float:
    """Return the median time of one call."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def callback_seconds(args: TrainingArguments) -> float:
    """Return the time of the callback's own work in one step of nothing."""
    callback, state, control = MemoryReportCallback(), TrainerState(), TrainerControl()
    callback.on_init_end(args, state, control)
    callback.on_train_begin(args, state, control)

    def step() -> None:
        callback.on_step_begin(args, state, control)
        callback.on_pre_optimizer_step(args, state, control)
        callback.on_optimizer_step(args, state, control)
        callback.on_step_end(args, state, control)
        logs = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-4}
        state.log_history[:] = [{**logs, "step": state.global_step}]
        callback.on_log(args, state, control, logs=logs)

    return median_seconds(step, 2000, warmup=100)


def real_step_seconds(device: torch.device) -> float:
    """Return the time of forward, backward and optimizer step of the small BERT."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=4000,
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=20,
    )
    model = BertForSequenceClassification(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = {
        "input_ids": torch.randint(5, 4000, (BATCH, TOKENS), device=device),
        "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long, device=device),
        "labels": torch.randint(20, (BATCH,), device=device),
    }

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        model.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return median_seconds(step, 40, warmup=5)


def table(figures: dict[str, Any]) -> str:
    """Return the cost in a sentence."""
    return (
        f"`MemoryReportCallback` costs {figures['callback_step_and_log_microseconds']:.0f} microseconds per step when "
        f"every step is logged: {figures['overhead_with_log_percent']:.2f} % of a "
        f"{figures['real_step_milliseconds']:.0f} ms step."
    )


def main() -> None:
    """Measure, print the sentence, append the row."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=folder, report_to="none")
        callback, real = callback_seconds(args), real_step_seconds(args.device)
    figures = {
        "device": str(args.device),
        "threads": torch.get_num_threads(),
        "callback_step_and_log_microseconds": round(callback * 1e6, 1),
        "real_step_milliseconds": round(real * 1e3, 2),
        "overhead_with_log_percent": round(100 * callback / real, 3),
    }
    show("memory_report", figures, table(figures))


if __name__ == "__main__":
    main()
