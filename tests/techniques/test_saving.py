"""Saving a checkpoint takes nothing on the device: why ``estimate`` has no phase for it.

Mixture-of-experts models are the exception: ``tests/techniques/test_sharded_checkpoints.py`` measures them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sharded_checkpoints import CASES, llama
from transformers import TrainerCallback

import tiny
from hf_memopt.prediction.memory.tracking import StorageTracker


class WatchSaving(TrainerCallback):
    """Counts what is allocated between the end of a step and the end of its saving."""

    def __init__(self) -> None:
        self.tracker = StorageTracker(device_type=None, flops=False)
        self.saved = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for tensor in (*kwargs["model"].parameters(), *kwargs["model"].buffers()):
            self.tracker.add(tensor)
        for states in kwargs["optimizer"].state.values():
            for tensor in states.values():
                if isinstance(tensor, torch.Tensor):
                    self.tracker.add(tensor)
        self.known = len(self.tracker.sizes)
        self.tracker.__enter__()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tracker.__exit__(None, None, None)
        self.saved += 1


SAVED: dict[str, tuple[Any, dict[str, Any]]] = {
    **CASES,
    "only the model": (llama, {"save_only_model": True}),
    "classification": (tiny.bert, {}),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks by that name
@pytest.mark.parametrize("case", SAVED)
def test_saving_copies_no_weight_and_no_state(tmp_path, case) -> None:
    """On a card each tensor then moves to the host by itself, which frees nothing there and takes nothing."""
    build, settings = SAVED[case]
    watch, model = WatchSaving(), build()
    label = 1 if build is tiny.bert else [5, 6, 7, 8]
    tiny.train(
        model,
        [{"input_ids": [5, 6, 7, 8], "labels": label}] * 2,
        tmp_path,
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        trainer_callbacks=[watch],
        **{"optim": "adamw_torch", **settings},
    )
    born = watch.tracker.sizes[watch.known :]
    assert watch.saved == 1
    assert watch.known > len(list(model.parameters()))
    assert max(born, default=0) < min(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)
