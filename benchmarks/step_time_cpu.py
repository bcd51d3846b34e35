"""Predicted against real seconds of a training step on this CPU: python benchmarks/step_time.py --cpu

Three small measurements calibrate the CPU: a matrix product, a copy to new memory, and additions of eight elements in a
chain of modules, forward and backward, which cost the host's work alone. Then the demo's model takes real steps of 16
rows under twelve set-ups, on one thread. CPU time is read, which other processes disturb less than the clock, but not
little: run it on a quiet machine. On a CPU GELU, softmax and layer norm are arithmetic and not copies, so that
predictions are too fast throughout: what is checked is the order of set-ups with the same optimizer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results_file import show
from step_time import Row, grouped, print_rows, summary, table
from transformers import BertConfig, BertForSequenceClassification
from transformers.optimization import Adafactor

from hf_memopt.binding.versions import enable_checkpointing
from hf_memopt.demo.setups import CPU_MODEL
from hf_memopt.memory.estimation import estimate
from hf_memopt.memory.step_time.prices import Constants, Prices, step_time

ROWS = 16
LEAST_ON_CPU = 0.9  # of the rank correlation of seconds
STEPS = 3
SETUPS: tuple[dict[str, Any], ...] = (
    *(
        {"batch_size": rows, "seq_len": length, "checkpointing": checkpointing}
        for length, (rows, checkpointing) in itertools.product((32, 64, 128), ((1, False), (16, False), (16, True)))
    ),
    *({"batch_size": 16, "seq_len": length, "optim": "adafactor"} for length in (32, 64, 128)),
)


def calibrate() -> Prices:
    """Return the prices of this CPU: what a product, a copy and a small addition reach."""
    one, other = torch.randn(512, 512), torch.randn(512, 512)
    product = _median(lambda: one @ other, 4)
    source = torch.randn(4 * 2**20)
    copy = _median(source.clone, 4)
    chain, few = torch.nn.Sequential(*[_Addition() for _ in range(20)]), torch.randn(8, requires_grad=True)
    launch = _median(lambda: chain(few).sum().backward(), 50) / 20 / (1 + Constants.backward_launch_fraction)
    rate = 2 * 512**3 / product
    bandwidth = 2 * source.nbytes / copy
    print(f"{rate / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s, {launch * 1e6:.1f} us for a launch")
    constants = Constants(memory_fraction=1.0, kernel_seconds=0.0, launch_seconds=launch, micro_batch_seconds=0.0)
    rates = {("product", "fp32"): rate, ("attention", "fp32"): rate}
    return Prices(rates, bandwidth, constants=constants, is_measured=False, runs_ahead=False)


class _Addition(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


def _median(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(13):
        started = time.process_time()
        for _ in range(repeats):
            run()
        seconds.append((time.process_time() - started) / repeats)
    return statistics.median(seconds)


def model_config() -> BertConfig:
    """Return the demo's model for a CPU, with a vocabulary of its size."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(vocab_size=8000, max_position_embeddings=128, **dropout, **CPU_MODEL)


def real_seconds(batch_size: int, seq_len: int, optim: str = "adamw_torch_fused", checkpointing: bool = False) -> float:
    """Return the CPU seconds of a step of ``ROWS`` rows, the fastest of a few after the first."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(model_config()).train()
    if checkpointing:
        enable_checkpointing(model, {"use_reentrant": False})
    optimizer: torch.optim.Optimizer = (
        Adafactor(model.parameters(), scale_parameter=False, relative_step=False, lr=1e-3)
        if optim == "adafactor"
        else torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    )
    tokens = torch.randint(1, 8000, (ROWS, seq_len))
    labels = torch.zeros(ROWS, dtype=torch.long)
    seconds = []
    for _ in range(1 + STEPS):
        started = time.process_time()
        for first in range(0, ROWS, batch_size):
            rows = slice(first, first + batch_size)
            loss = model(input_ids=tokens[rows], labels=labels[rows]).loss
            (loss * batch_size / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - started)
    return min(seconds[1:])


def compare(prices: Prices) -> list[Row]:
    """Return the set-ups, each measured and predicted."""
    found = []
    for setup in SETUPS:
        given = {"optim": "adamw_torch_fused", "checkpointing": False, **setup}
        steps = ROWS // given["batch_size"]
        costs = estimate(
            model_config(),
            gpu="A100 80GB",  # for its kernels
            task="sequence-classification",
            precision="fp32",
            gradient_accumulation_steps=steps,
            padding=False,
            **given,
        ).step_costs
        assert costs is not None
        name = f"{steps} x {given['batch_size']} x {given['seq_len']}" + ", checkpointing" * given["checkpointing"]
        measured = real_seconds(**given)
        found.append(Row(f"{given['optim']}, CPU", name, measured, step_time(costs, prices)))
    return found


def main() -> int:
    """Print the set-ups and the summaries, append the row; 1 where the order is not kept."""
    torch.set_num_threads(1)
    rows = compare(calibrate())
    print_rows(rows)
    found = {name: summary(members) for name, members in grouped(rows).items()}
    figures = {"rows": [row.figures() for row in rows], "summaries": found}
    show("step_time_cpu", figures, table(figures))
    return 0 if all(figures["spearman"] >= LEAST_ON_CPU for figures in found.values()) else 1
