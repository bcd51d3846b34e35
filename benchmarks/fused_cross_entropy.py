"""What fusing the head with the loss costs or saves in time, on the CPU: python benchmarks/fused_cross_entropy.py

Two training steps (forward and backward pass), fused and stock in turn: masked language modelling of BERT-base's shape,
64 x 128 tokens of which 15 % have a label, and a causal language model of which half of the labels are masked. And the
head with its loss alone: stock, fused, and torch's own ``F.linear_cross_entropy``, which takes float32 logits without a
scale between head and loss. Times are CPU seconds of the process, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from hf_memopt import fuse_cross_entropy

ROWS, TOKENS = 64, 128
HEAD = {"hidden": 768, "vocabulary": 30_522, "rows": 2_048}
SHARES = {"every row has a label": 1.0, "half of the rows": 0.5, "15 % of the rows": 0.15}


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


class Head(torch.nn.Module):
    """A head and nothing else, which ``fuse_cross_entropy`` takes for a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(HEAD["hidden"], HEAD["vocabulary"], bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the head."""
        return self.head


def head_figures(share: float, repeats: int) -> dict[str, float]:
    """Time forward and backward pass of the head with its loss."""
    torch.manual_seed(0)
    model = Head().train()
    hidden = torch.randn(HEAD["rows"], HEAD["hidden"], requires_grad=True)
    target = torch.randint(0, HEAD["vocabulary"], (HEAD["rows"],))
    target[torch.rand(target.shape) > share] = -100

    def stock() -> torch.Tensor:
        return F.cross_entropy(model.head(hidden), target)

    def fused() -> torch.Tensor:
        handle = fuse_cross_entropy(model)
        loss = stock()
        handle.remove()
        return loss

    def of_torch() -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, model.head.weight, target, options=options)

    ways = {"stock": stock, "fused": fused, "linear_cross_entropy": of_torch}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, run in ways.items():
            hidden.grad = model.head.weight.grad = None
            started = time.process_time()
            run().backward()
            if repeat:
                seconds[way].append(time.process_time() - started)
    return {way: statistics.median(taken) for way, taken in seconds.items()}


def fused_table(figures: dict[str, Any]) -> str:
    """Return the figures as two Markdown tables."""
    lines = ["| training step | stock | fused | ratio |", "|---|---|---|---|"]
    for case, found in figures["steps"].items():
        times = f"{found['stock_seconds']:.2f} s | {found['fused_seconds']:.2f} s"
        lines.append(f"| {case} | {times} | {found['ratio']:.2f} |")
    lines += ["", "| head and loss alone | stock | fused | `F.linear_cross_entropy` |", "|---|---|---|---|"]
    for case, found in figures["heads"].items():
        lines.append("| " + " | ".join([case, *(f"{seconds:.2f} s" for seconds in found.values())]) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables, append the figures to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions of each step")
    parser.add_argument("--bert-repeats", type=int, default=1, help="of the step of BERT-base, minutes on two cores")
    given = parser.parse_args(arguments)
    from results_file import append

    transformers.logging.set_verbosity_error()
    figures = {
        "threads": torch.get_num_threads(),
        "heads": {case: head_figures(share, given.repeats) for case, share in SHARES.items()},
        "steps": {
            case: step_figures(build, given.bert_repeats if build is masked_model else given.repeats)
            for case, build in CASES.items()
        },
    }
    print(fused_table(figures))
    append("fused cross entropy", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
