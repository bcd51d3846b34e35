"""What tiles of positions cost and save: python benchmarks/long_rows.py [--json]

Counted by the tracker of storages, for forward and backward pass of a Llama of 4 layers: floating-point operations,
operators that run, and the peak of activations and gradients; beside tiles inside a checkpoint as they are usually
written, which compute the MLP a third time. Measured on the CPU: seconds of an MLP at the widths of real models, in
tiles against one that is checkpointed whole, the best of several runs in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from results_file import append, markdown
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.techniques import tile_layers
from hf_memopt.training.binding import enable_checkpointing
from hf_memopt.training.binding.undo import UndoHandle, override_method, undo_all

TOKENS, TILE = 1024, 128
SET_UPS: dict[str, tuple[str, str]] = {
    "whole": ("none", ""),
    "in tiles": ("none", "ours"),
    "layers checkpointed": ("non-reentrant", ""),
    "layers checkpointed, usual tiles": ("non-reentrant", "usual"),
    "layers checkpointed, in tiles": ("non-reentrant", "ours"),
}
WIDTHS: dict[str, tuple[int, int]] = {"Qwen2.5-0.5B": (896, 4864), "Llama-3.2-1B": (2048, 8192)}
TILES = {"Qwen2.5-0.5B": (256, 1024), "Llama-3.2-1B": (2048,)}
ROW_TOKENS = 4096


def build(hidden_size: int, intermediate_size: int, layers: int) -> Any:
    """Return a Llama with these widths and a small vocabulary, in training mode."""
    sizes = {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": layers}
    sizes |= {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "max_position_embeddings": ROW_TOKENS}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).train()


@contextmanager
def _usual_tiles(model: Any, tile: int) -> Iterator[None]:
    """Checkpoint each tile of an MLP by itself, as it is usually written."""

    def forward(before: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([checkpoint(before, part, use_reentrant=False) for part in hidden.split(tile, 1)], 1)

    handles: list[UndoHandle] = [override_method(layer.mlp, "forward", forward) for layer in model.model.layers]
    with undo_all(*handles):
        yield


def counted(checkpointing: str, tiles: str) -> dict[str, int]:
    """Count forward and backward pass of one set-up; gradients are there before."""
    model = build(256, 1024, 4)
    if checkpointing != "none":
        enable_checkpointing(model, {"use_reentrant": False})
    ids = torch.randint(512, (1, TOKENS))
    opened = {"": undo_all, "usual": lambda: _usual_tiles(model, TILE), "ours": lambda: tile_layers(model, TILE)}
    with opened[tiles]():
        model(input_ids=ids, labels=ids).loss.backward()
        with StorageTracker(device_type="cpu") as tracker, tracker.counting():
            model(input_ids=ids, labels=ids).loss.backward()
    return {
        "flops": tracker.flops,
        "operators": sum(tracker.operations[0].values()),
        "peak_bytes": max(accumulate(size for _, size in tracker.events)),
    }


def seconds_of_mlp(name: str, runs: int) -> dict[str, float]:
    """Measure CPU seconds of an MLP's forward and backward pass: checkpointed whole, and in tiles of several sizes."""
    model = build(*WIDTHS[name], layers=1)
    mlp = model.model.layers[0].mlp
    row = torch.randn(1, ROW_TOKENS, WIDTHS[name][0], requires_grad=True)

    def whole() -> torch.Tensor:
        return checkpoint(mlp, row, use_reentrant=False)  # type: ignore[no-any-return]

    def seconds(call: Callable[[], torch.Tensor]) -> float:
        start = time.process_time()
        call().sum().backward()
        return time.process_time() - start

    found: dict[str, list[float]] = {}
    whole().sum().backward()  # gradients are there from now on
    for _ in range(runs):
        found.setdefault("whole", []).append(seconds(whole))
        for tile in TILES[name]:
            with tile_layers(model, tile):
                mlp(row[:, : tile + 1])  # the first batch is compared
                found.setdefault(str(tile), []).append(seconds(lambda: mlp(row)))
    return {tile: min(each) for tile, each in found.items()}


def table(figures: dict[str, Any]) -> str:
    """Return what is counted, and the seconds below it."""
    plain = figures["counted"]["whole"]
    rows = [
        (
            name,
            f"{found['flops'] / plain['flops']:.3f}",
            f"{found['operators']:,}",
            f"{found['peak_bytes'] / 2**20:.1f} MiB",
        )
        for name, found in figures["counted"].items()
    ]
    ratios = "; ".join(
        f"{name}, {ROW_TOKENS:,} tokens: "
        + ", ".join(f"tiles of {tile} {found[tile] / found['whole']:.2f}" for tile in found if tile != "whole")
        for name, found in figures["mlp_seconds"].items()
    )
    note = (
        f"Counted for a Llama of 4 layers, {TOKENS:,} tokens in tiles of {TILE} (`python benchmarks/long_rows.py`). "
        f"CPU seconds of one MLP in tiles, divided by those of one that is checkpointed whole: {ratios}."
    )
    return markdown("| forward and backward pass | operations | operators | peak |", rows, note)


def main() -> None:
    """Count, measure, print the table or the figures, append the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of the table")
    parser.add_argument("--runs", type=int, default=3, help="of which the fastest counts")
    asked = parser.parse_args()
    figures = {
        "counted": {name: counted(*set_up) for name, set_up in SET_UPS.items()},
        "mlp_seconds": {name: seconds_of_mlp(name, asked.runs) for name in WIDTHS},
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures) if asked.json else table(figures))
    append("long_rows", figures)


if __name__ == "__main__":
    main()
