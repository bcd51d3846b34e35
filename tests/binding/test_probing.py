"""A probe of the loss leaves no trace: readings of a trainer, statistics of a model, logs, modes, random numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt.batching.collation.flattened_texts import undisturbed
from hf_memopt.binding import attach
from hf_memopt.binding.undo.kept_state import LARGEST_COPY_BYTES
from hf_memopt.techniques.microbatching import MicrobatchCallback
from scarcity import Pad, mixed_rows


class Meter:
    """A metric of the user's own."""

    def __init__(self) -> None:
        self.total, self.values = 0.0, []

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class Accumulates(Trainer):
    """Keep readings of every loss, in all the ways that subclasses have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.tokens = 0
        self.recent = deque([1.0], maxlen=3)
        self.seen: set[int] = set()
        self.meter = Meter()
        self.histogram = np.zeros(3)
        self.sums = torch.zeros(2)
        self.logged: list[dict[str, float]] = []

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        value = float(loss.detach())
        self._metrics["train" if model.training else "eval"]["loss"].append(value)
        self.tokens += inputs["input_ids"].numel()
        self.recent.append(value)
        self.seen.add(len(inputs["input_ids"]))
        self.meter.update(value)
        self.histogram[0] += 1
        self.sums += 1
        self.last_loss = value
        self.log({"inner": value})
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.logged.append(logs)
        super().log(logs, *args, **kwargs)


class Counting(nn.Module):
    """A classifier that counts its passes and keeps a running mean, in evaluation mode too."""

    def __init__(self, buffer_elements: int = 3) -> None:
        super().__init__()
        self.inner = tiny.bert()
        self.register_buffer("mean", torch.zeros(buffer_elements))
        self.register_buffer("replaced", torch.zeros(3))
        self.passes = 0

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> Any:
        outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        self.passes += 1
        self.mean += 1
        self.replaced = self.replaced + 1
        self.cache = outputs["logits"].detach()
        return {"loss": outputs["loss"], "logits": outputs["logits"]}


def make(folder: Path, model: nn.Module | None = None, **settings: Any) -> Accumulates:
    args = tiny.arguments(folder, per_device_train_batch_size=4, max_steps=1, **settings)
    return Accumulates(model=model or Counting(), args=args, train_dataset=mixed_rows(8), data_collator=Pad())


def kept(trainer: Accumulates) -> dict[str, Any]:
    model = trainer.model
    return {
        "metrics": {mode: dict(readings) for mode, readings in trainer._metrics.items()},
        "meter": (trainer.meter.total, list(trainer.meter.values)),
        "others": (trainer.tokens, list(trainer.recent), set(trainer.seen), hasattr(trainer, "last_loss")),
        "arrays": (trainer.histogram.tolist(), trainer.sums.tolist()),
        "log": (list(trainer.logged), list(trainer.state.log_history)),
        "model": (model.passes, model.mean.tolist(), model.replaced.tolist(), hasattr(model, "cache")),
    }


def test_the_readings_of_micro_batching_are_those_of_the_steps_alone(tmp_path: Path) -> None:
    found = []
    for callbacks in ((), (MicrobatchCallback(),)):
        trainer = attach(make(tmp_path), *callbacks)
        trainer.train()
        found.append(kept(trainer))
    found[0]["log"] = found[0]["log"][0][:1]  # without the run's own figures, which have times
    found[1]["log"] = found[1]["log"][0][:1]
    assert found[0] == found[1]
    assert len(found[0]["metrics"]["train"]["loss"]) == 1


def test_readings_stay_when_the_loss_fails(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    before = kept(trainer)

    def fail(*args: Any) -> None:
        raise ValueError("no")

    trainer.model.register_forward_hook(fail)
    trainer.model.inner.classifier.register_forward_hook(lambda *_: trainer._metrics["eval"]["loss"].append(1.0))
    with pytest.raises(ValueError, match="no"), undisturbed(trainer, trainer.model):
        trainer.model(**Pad()(mixed_rows(2)))
    assert kept(trainer) == before


def test_what_is_too_large_to_be_put_back_is_said(tmp_path: Path) -> None:
    elements = LARGEST_COPY_BYTES // 4 + 1
    trainer = make(tmp_path, Counting(elements))
    with pytest.warns(UserWarning, match="put back") as caught, undisturbed(trainer, trainer.model):
        trainer.model(**Pad()(mixed_rows(2)))
    assert [str(warning.message) for warning in caught] == [
        "Counting._buffers['mean'], 1 MiB, was changed by a probe of the loss and is too large to be put back; "
        "expected at most 1 MiB, or no change outside of training. Change it in training mode alone: "
        "if model.training: ..."
    ]
    assert trainer.model.mean[0] == 1
    assert trainer.model.passes == 0


def test_a_dataset_in_a_list_is_neither_copied_in_depth_nor_changed(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    rows = trainer.train_dataset
    first = rows[0]
    with undisturbed(trainer, trainer.model):
        pass
    assert trainer.train_dataset is rows
    assert rows[0] is first


def test_what_a_model_records_of_its_layers_is_recorded_once(tmp_path: Path) -> None:
    """Transformers registers the hooks for hidden states in the first forward pass that asks for them."""
    ids = torch.arange(5, 11)[None]
    model = tiny.llama()
    attached = Trainer(model=model, args=tiny.arguments(tmp_path))
    with undisturbed(attached, model):
        model(input_ids=ids, output_hidden_states=True)
    found = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(found) == model.config.num_hidden_layers + 1


def test_quantised_weights_are_not_repacked(tmp_path: Path) -> None:
    """On a CPU with AVX-512 BF16 bitsandbytes 0.50 repacks them in evaluation, and loses gradients from then on."""
    model = nn.Sequential(Linear4bit(64, 64, bias=False))
    trainer = Trainer(model=model, args=tiny.arguments(tmp_path))
    model[0].support_avx512bf16_for_cpu = True
    with undisturbed(trainer, model):
        assert not model[0].support_avx512bf16_for_cpu
    assert model[0].support_avx512bf16_for_cpu
