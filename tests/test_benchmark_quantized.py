"""The benchmark of QLoRA's preparations, on a few texts and a model of one layer."""

from __future__ import annotations

import pytest
import quantized
from demo_task import read_docstrings, source_files

# peft 0.21 still asks transformers 5.23 under the names of 5.17
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.slow
def test_the_preparations_train_alike_and_ours_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(quantized, "SIZES", small)
    monkeypatch.setattr(quantized, "HELD_OUT", 8)
    monkeypatch.setitem(quantized.ESTIMATED, "model", "SmolLM2-135M")
    files = [pair for pair in source_files() if pair[0] in ("json", "logging", "email")]
    runs = quantized.training_figures(sorted(read_docstrings(files)), steps=6, updates=20)
    theirs, ours = (runs[name]["losses"] for name in ("peft's prepare_model_for_kbit_training", "prepare_quantized"))
    reference = runs["float32 throughout"]["losses"]
    # bfloat16 has 8 bits; both are as far from float32 as its rounding is
    assert quantized.difference(ours, reference) < 0.01
    assert quantized.difference(theirs, reference) < 0.01
    memory = quantized.memory_figures()
    assert set(memory) == set(quantized.PREPARATIONS)
    assert memory["prepare_quantized"] < memory["peft's prepare_model_for_kbit_training"]
    lines = quantized.table({"runs": runs, "memory_bytes": memory}).splitlines()
    assert len(lines) == 2 + len(runs)
    assert all(line.count("|") == lines[0].count("|") for line in lines)
