"""What fusing the head with the loss costs or saves in time, on the CPU: python benchmarks/fused_cross_entropy.py

Two training steps (forward and backward pass), fused and stock in turn: masked language modelling of BERT-base's shape,
64 x 128 tokens of which 15 % have a label, and a causal language model of which half of the labels are masked. Times
are CPU seconds of the process, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from results_file import MACHINE, last_row, markdown, show

from hf_memopt.techniques import fuse_cross_entropy
from hf_memopt.units import format_bytes

ROWS, TOKENS = 64, 128


def masked_model() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return BERT-base, random weights, and a batch of which 15 % of the positions have a label."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig()).train()
    ids = torch.randint(1000, 30_000, (ROWS, TOKENS))
    return model, {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)}


def causal_model() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a Llama of 4 layers of 512 and a batch of 8 x 256 tokens, of which the first half has no label."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32_000, **sizes)).train()
    ids = torch.randint(0, 32_000, (8, 256))
    labels = ids.clone()
    labels[:, :128] = -100
    return model, {"input_ids": ids, "labels": labels}


CASES = {"BERT-base, 64 x 128, 15 % of labels": masked_model, "Llama, 4 x 512, half of the labels": causal_model}


def step_figures(build: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Time steps of stock and of the fused model in turn, after a short one; CPU time of the process."""
    model, inputs = build()
    model(**{name: value[:1] for name, value in inputs.items()}).loss.backward()
    model.zero_grad()
    seconds: dict[str, list[float]] = {"stock": [], "fused": []}
    losses = {}
    for _ in range(repeats):
        for way, taken in seconds.items():
            handle = fuse_cross_entropy(model) if way == "fused" else None
            torch.manual_seed(1)  # dropout
            started = time.process_time()
            loss = model(**inputs).loss
            loss.backward()
            taken.append(time.process_time() - started)
            losses[way] = float(loss.detach())
            model.zero_grad()
            if handle is not None:
                handle.remove()
    medians = {f"{way}_seconds": statistics.median(taken) for way, taken in seconds.items()}
    pairs = [fused / stock for fused, stock in zip(seconds["fused"], seconds["stock"], strict=True)]
    return {**medians, "ratio": statistics.median(pairs), "repeats": repeats, "losses": losses}


def table(figures: dict[str, Any]) -> str:
    """Return the time of the steps, and how many logits they need, which ``large_models.py`` computes."""
    rows = [
        (case, f"{found['stock_seconds']:.1f} s", f"{found['fused_seconds']:.1f} s", f"{found['ratio']:.2f}")
        for case, found in figures["steps"].items()
    ]
    logits = last_row("large_models")["figures"]["logits_and_loss"]["16-bit weights"]
    note = (
        f"CPU seconds on {MACHINE} (`python benchmarks/fused_cross_entropy.py`). For Llama-3.2-1B with 16-bit weights "
        f"and 2 x 512 tokens, logits and loss take {format_bytes(logits['fused'])} instead of "
        f"{format_bytes(logits['stock'])} (computed)."
    )
    return markdown("| training step | stock | fused | ratio |", rows, note)


def main() -> None:
    """Measure, print the table, append the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions of a step; BERT-base has one")
    repeats = parser.parse_args().repeats
    transformers.logging.set_verbosity_error()
    steps = {case: step_figures(build, 1 if build is masked_model else repeats) for case, build in CASES.items()}
    figures = {"threads": torch.get_num_threads(), "steps": steps}
    show("fused cross entropy", figures, table(figures))


if __name__ == "__main__":
    main()
