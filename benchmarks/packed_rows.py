"""Rows of several texts: how full they are, what attention within texts costs, what is lost if texts see each other.

- Best fit of a million lengths into rows, beside the same rule text by text, as TRL's ``bfd`` has it.
- Forward and backward pass of a Llama of 2 layers over one row of texts of 256 tokens: CPU seconds and peak of
  activations and gradients, with stock's mask of all pairs and with attention within texts.
- A small Llama is trained from scratch on the same packed rows, once with texts kept apart and once with the
  ``attention_mask`` of ones with which stock lets them see each other without a word (TRL issue 3910 reports the same
  of packing without flash attention). Texts are arithmetic sequences; the loss is that of new texts, each alone.

python benchmarks/packed_rows.py
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left, insort
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from results_file import markdown, show
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.batching.collation.packed_attention import pack_attention
from hf_memopt.training.batching.plan import PackedRows
from hf_memopt.training.batching.plan.packed_rows import best_fit

EXAMPLES, ROW_TOKENS = 1_000_000, 4096
ROWS, TEXT = (2048, 4096), 256
STEPS, SEEDS, VOCABULARY, TRAINED_ROW = 300, 3, 97, 256


def text_by_text(lengths: list[int], row_tokens: int) -> int:
    """Return the number of rows by best-fit decreasing, one text at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else row_tokens
        insort(rooms, room - length)
    return len(rooms)


def packing() -> dict[str, dict[str, float]]:
    """Return rows, their fill and CPU seconds of both ways."""
    draws = np.random.default_rng(0).normal(np.log(300), 1.1, EXAMPLES)
    lengths = np.clip(np.exp(draws), 1, ROW_TOKENS).astype(np.int32)
    ways = {
        "by length": lambda: int(best_fit(lengths, ROW_TOKENS).max()) + 1,
        "text by text": lambda: text_by_text(lengths.tolist(), ROW_TOKENS),
        "whole plan of an epoch": lambda: len(PackedRows(lengths, row_tokens=ROW_TOKENS).plan(0)),
    }
    found = {}
    for name, count in ways.items():
        seconds = []
        for _ in range(3):
            start = time.process_time()
            rows = count()
            seconds.append(time.process_time() - start)
        fill = int(lengths.sum(dtype=np.int64)) / (rows * ROW_TOKENS)
        found[name] = {"rows": rows, "fill": fill, "cpu_seconds": min(seconds)}
    return found


def llama(row_tokens: int, vocabulary: int, hidden_size: int) -> Any:
    """Return a Llama of 2 layers."""
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=row_tokens, use_cache=False)).train()


def attention() -> dict[str, dict[str, float]]:
    """Return CPU seconds and peak bytes of a row, with stock's mask and within texts."""
    found = {}
    for tokens in ROWS:
        torch.manual_seed(0)
        model, ids = llama(tokens, 512, 128), torch.randint(512, (1, tokens))
        positions = torch.arange(tokens)[None] % TEXT
        for name in ("stock", "within texts"):
            handle = pack_attention(model) if name != "stock" else None
            seconds = []
            for _ in range(3):
                start = time.process_time()
                model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
                seconds.append(time.process_time() - start)
            with StorageTracker(device_type="cpu") as tracker:
                model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
            peak = max(accumulate(size for _, size in tracker.events))
            found[f"{tokens}, {name}"] = {"cpu_seconds": min(seconds), "peak_bytes": peak}
            if handle is not None:
                handle.remove()
    return found


def sequences(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return arithmetic sequences modulo the vocabulary, each with a start and a step of its own."""
    draw = np.random.default_rng(seed)
    starts, steps, lengths = (
        draw.integers(0, VOCABULARY, count),
        draw.integers(1, 12, count),
        draw.integers(6, 25, count),
    )
    return [
        {"input_ids": ((start + step * np.arange(length)) % VOCABULARY).tolist()}
        for start, step, length in zip(starts.tolist(), steps.tolist(), lengths.tolist(), strict=True)
    ]


def joined(texts: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return texts as one row, with no label at their first tokens."""
    ids = torch.tensor([list(chain.from_iterable(text["input_ids"] for text in texts))])
    positions = torch.cat([torch.arange(len(text["input_ids"])) for text in texts])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def loss_alone(model: Any, texts: list[dict[str, list[int]]]) -> float:
    """Return the mean loss of a token, each text by itself."""
    with torch.no_grad():
        losses = [float(model(**(row := joined([text]))).loss) * (row["input_ids"].shape[1] - 1) for text in texts]
    return sum(losses) / sum(len(text["input_ids"]) - 1 for text in texts)


def contamination(seed: int) -> dict[str, float]:
    """Return the loss of new texts after training on rows whose texts are apart, and whose texts see each other."""
    found = {}
    for name in ("apart", "see each other"):
        torch.manual_seed(seed)
        model = llama(TRAINED_ROW, VOCABULARY, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        handle = pack_attention(model) if name == "apart" else None
        for step in range(STEPS):
            texts = sequences(16, seed * 10_000 + step)
            row = joined(texts)
            mask = {} if handle is not None else {"attention_mask": torch.ones_like(row["input_ids"])}
            model(**row, **mask).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = loss_alone(model.eval(), sequences(200, -1 % 2**31))
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the three tables."""
    packed = [
        (name, f"{one['rows']:,}", f"{one['fill']:.5f}", f"{one['cpu_seconds']:.3f}")
        for name, one in figures["packing"].items()
    ]
    rows = [
        (name, f"{one['cpu_seconds']:.2f}", f"{one['peak_bytes'] / 2**20:.0f}")
        for name, one in figures["attention"].items()
    ]
    losses = [(name, f"{statistics.mean(values):.4f}") for name, values in figures["loss_of_texts_alone"].items()]
    return "\n\n".join(
        [
            markdown(f"| {EXAMPLES:,} lengths into rows of {ROW_TOKENS} | rows | fill | CPU s |", packed),
            markdown(f"| row of texts of {TEXT} tokens | CPU s | peak, MiB |", rows),
            markdown("| texts of a training row | loss of new texts, each alone |", losses),
        ]
    )


def main() -> None:
    """Measure, print and append the row."""
    torch.set_num_threads(1)
    runs = [contamination(seed) for seed in range(SEEDS)]
    figures = {
        "packing": packing(),
        "attention": attention(),
        "loss_of_texts_alone": {name: [run[name] for run in runs] for name in runs[0]},
    }
    show("packed_rows", figures, table(figures))


if __name__ == "__main__":
    main()
