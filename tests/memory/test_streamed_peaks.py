"""Layers that stay beside streamed ones: peaks of torch's own allocator, and waits between streams, on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

import tiny
from hf_memopt import StreamedLayersCallback, add_adapters, attach, estimate, low_memory_optimizer, stream_layers
from hf_memopt.gpus import GPUS
from hf_memopt.prediction.rehearsal import peaks_by_phase
from hf_memopt.training.binding import checkpointing_arguments
from hf_memopt.training.techniques import Lanes

pytestmark = [
    pytest.mark.stand_in,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]
LAYERS, ROWS, TOKENS = 8, 4, 256
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": LAYERS, "vocab_size": 8000}
SET_UPS: dict[str, dict[str, Any]] = {
    "LoRA": {"precision": "bf16", "weights_dtype": "bfloat16", "lora": 16},
    "full": {"precision": "fp32", "weights_dtype": "float32"},
    "full, released": {"precision": "fp32", "weights_dtype": "float32", "gradient_release": True, "max_grad_norm": 0.0},
}


def keep_late(patch: pytest.MonkeyPatch) -> None:
    """Let what a copy out has read stay until somebody waits for it, as estimates count: here it is over at once."""
    store, landed = Lanes.store, Lanes.landed
    patch.setattr(Lanes, "store", lambda self, host, source: [store(self, host, source), source])

    def land(self: Lanes, event: Any) -> None:
        if not isinstance(event, list):
            landed(self, event)
        elif event:
            landed(self, event[0])
            event.clear()

    patch.setattr(Lanes, "landed", land)


def config() -> Any:
    return tiny.llama_config(**SIZES, num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=512)


def trained_peaks(settings: dict[str, Any], resident: int, folder: str) -> tuple[int, int]:
    """Return the most that was allocated and reserved in three steps of the Trainer."""
    dtype = getattr(torch, settings["weights_dtype"])
    model: Any = transformers.LlamaForCausalLM._from_config(config(), dtype=dtype)
    if "lora" in settings:
        model = add_adapters(model, settings["lora"])
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        max_steps=3,
        bf16=settings["precision"] == "bf16",
        max_grad_norm=settings.get("max_grad_norm", 1.0),
        **checkpointing_arguments(),
        **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True},
    )
    is_released = "gradient_release" in settings
    kinds = {"optimizer_cls_and_kwargs": low_memory_optimizer(args, model, release=True)} if is_released else {}
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    with peaks_by_phase() as peaks:
        stream_layers(model, resident=resident)
        trainer = Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 3 * ROWS, **kinds)
        attach(trainer, StreamedLayersCallback()).train()
    return max(one.allocated_bytes for one in peaks.values()), max(one.reserved_bytes for one in peaks.values())


CASES = [
    *(("LoRA", one) for one in (0, 1, LAYERS // 2, LAYERS)),
    ("full", LAYERS // 2),
    ("full, released", LAYERS // 2),
]


@pytest.mark.parametrize(("set_up", "resident"), CASES)
def test_peaks_are_those_of_the_allocator(set_up: str, resident: int) -> None:
    """Each in a process of its own, since blocks that a run leaves move those of the next."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, set_up, str(resident)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    gpu = replace(GPUS["RTX 3090"], compute_capability=torch.cuda.get_device_capability())
    shape = {"batch_size": ROWS, "seq_len": TOKENS, "padding": False, "checkpointing": True}
    expected = estimate(config(), gpu=gpu, streamed=True, resident=resident, **shape, **SET_UPS[set_up])
    assert allocated == pytest.approx(expected.peak_allocated_bytes, rel=0.005)
    assert reserved == pytest.approx(expected.peak_reserved_bytes, rel=0.005)


@pytest.mark.parametrize("resident", [0, 1, 2, 4])
def test_compute_waits_for_the_copies_of_each_layer_that_waits(resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in begins after what compute has issued, and compute goes on after each copy that it uses."""
    model = tiny.llama(num_hidden_layers=5).train()
    ring = stream_layers(model, device="cuda", resident=resident).ring
    tensors = {len(layer.parameters) for layer in ring.layers}
    waited = Counter[str]()
    for name in ("wait_event", "wait_stream"):
        wait = getattr(torch.cuda.Stream, name)

        def counted(self: Any, other: Any, name: str = name, wait: Any = wait) -> None:
            waited[name] += 1
            wait(self, other)

        monkeypatch.setattr(torch.cuda.Stream, name, counted)
    ids = torch.ones(2, 8, dtype=torch.int64, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    [count], away = tensors, 5 - resident
    assert ring.fetches == max(2 * away - 2, away)
    assert waited["wait_event"] >= 2 * away * count  # each use, and each copy that is dropped
    assert waited["wait_stream"] == (ring.fetches + away) * count  # and each gradient that goes out


@pytest.mark.parametrize(("optim", "counters"), [("adamw_torch", "cpu"), ("adamw_torch_fused", "cuda")])
def test_layers_and_their_state_move_when_two_steps_left_room(optim: str, counters: str, tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=5).train()
    stream_layers(model, resident="auto")
    args = tiny.arguments(tmp_path, use_cpu=False, max_steps=3, optim=optim, **checkpointing_arguments())
    row = {"input_ids": [5] * 16, "labels": [5] * 16}
    callback = StreamedLayersCallback()
    trainer = attach(Trainer(model, args, train_dataset=[row] * 12, callbacks=[callback]))
    trainer.train()
    assert callback.resident == 5
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    values = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert {value.device.type for value in values if value.dim()} == {"cuda"}
    assert {value.device.type for value in values if not value.dim()} == {counters}


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as folder:
        keep_late(patched)
        print(json.dumps(trained_peaks(SET_UPS[sys.argv[1]], int(sys.argv[2]), folder)))
    sys.stdout.flush()
    os._exit(0)  # without destructors that look for the GPU's libraries
