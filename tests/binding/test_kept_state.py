"""What runs beside the training leaves nothing behind: attributes, containers, tensors, generators, closures."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from tables import whole
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt import MicrobatchCallback, attach
from hf_memopt.training.batching.collation.flattened_texts import undisturbed
from hf_memopt.training.binding.undo import KeptState
from scarcity import Pad, mixed_rows

LARGEST_COPY_BYTES = 2**20
GLOBAL: list[int] = [1]


class Meter:
    """A metric of the user's own, in all the ways that subclasses keep readings."""

    shared: ClassVar[list[int]] = [1]

    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]
        self.by_mode = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.recent, self.seen = deque([1.0], maxlen=3), {1}
        self.histogram, self.sums = np.zeros(3), torch.zeros(2)
        self.inner: Any = None

    def update(self) -> None:
        self.total += 1
        self.values.append(2.0)
        self.by_mode["train"]["loss"].append(1.0)
        self.recent.append(2.0)
        self.seen.add(2)
        self.histogram[0] += 1
        self.sums += 1
        self.last = 1.0
        del self.by_mode["eval"]

    def __call__(self) -> None:
        self.shared.append(2)
        self.update()


class Counting(nn.Module):
    """Counts its passes and keeps a running mean, in evaluation mode too."""

    def __init__(self, elements: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(elements))
        self.register_buffer("replaced", torch.zeros(3))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.mean += 1
        self.replaced = self.replaced + 1
        self.cache = x
        self.register_forward_hook(lambda *_: None)
        return x


def plain(value: Any) -> Any:
    """Return what a value holds, as text."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (Meter, Counting)):
        return plain({name: one for name, one in vars(value).items() if name != "_modules"})
    return repr(value)


@pytest.mark.parametrize("nested", [False, True])
def test_what_an_object_holds_is_put_back_where_it_was(nested: bool) -> None:
    owner = meter = Meter()
    if nested:
        owner = Meter()
        owner.inner = {"of": [meter]}
    values, before, kept = meter.values, plain(meter), KeptState()
    kept.look_at(owner)
    assert not kept.has_changed()
    meter.update()
    assert kept.has_changed()
    kept.restore()
    assert plain(meter) == before
    assert meter.values is values
    assert not kept.has_changed()
    assert (kept.lost(), kept.unseen) == ([], "")


def counter(values: list[int], *, default: Any = None) -> Callable[[], None]:
    count = 0

    def count_up(of: list[int] = default) -> None:
        nonlocal count, values
        count += 1
        values.append(count)
        values = [*values]
        of.append(count)
        GLOBAL.append(count)
        count_up.calls = count  # type: ignore[attr-defined]

    count_up.state = lambda: (count, values)  # type: ignore[attr-defined]
    return count_up


@pytest.mark.parametrize("how", ["function", "partial", "method", "callable object"])
def test_what_a_function_changes_is_put_back(how: str) -> None:
    """In its closure, defaults, attributes and the globals that it names; of an object, what its class shares."""
    meter, default = Meter(), [1]
    count_up = counter([1], default=default)
    called = {"function": count_up, "partial": partial(count_up), "method": meter.update, "callable object": meter}[how]

    def held() -> Any:
        return copy.deepcopy((count_up.state(), default, GLOBAL, Meter.shared, plain(meter), sorted(vars(count_up))))

    before, kept = held(), KeptState(foreign=())
    kept.look_into(called)
    called()
    assert held() != before
    assert kept.has_changed()
    kept.restore()
    assert held() == before


def test_what_cannot_be_put_back_or_seen_is_said(tmp_path: Path) -> None:
    model = Counting(LARGEST_COPY_BYTES // 4 + 1)
    trainer = Trainer(model=nn.Sequential(model), args=tiny.arguments(tmp_path))
    with pytest.warns(UserWarning, match="put back") as caught, undisturbed(trainer, trainer.model):
        trainer.model(torch.ones(1))
    assert [str(warning.message) for warning in caught] == [whole("Counting._buffers['mean'],")]
    assert (float(model.mean[0]), model.passes) == (1.0, 0)
    for unseen in (iter([1]), np.zeros(LARGEST_COPY_BYTES)):
        kept = KeptState()
        kept.keep(unseen, "told")
        assert kept.unseen == "told"


class Reads(Trainer):
    """Keeps a reading of every loss."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.readings = [*getattr(self, "readings", ()), (model.training, float(loss.detach()), len(inputs["labels"]))]
        return (loss, outputs) if return_outputs else loss


def test_the_readings_of_micro_batching_are_those_of_the_steps_alone(tmp_path: Path) -> None:
    found = []
    for callbacks in ((), (MicrobatchCallback(),)):
        args = tiny.arguments(tmp_path, per_device_train_batch_size=4, max_steps=1)
        trainer = attach(Reads(tiny.bert(), args, train_dataset=mixed_rows(8), data_collator=Pad()), *callbacks)
        trainer.train()
        found.append(trainer.readings)
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_a_probe_that_fails_leaves_nothing_either_and_repacks_no_weights(tmp_path: Path) -> None:
    """On a CPU with AVX-512 BF16 bitsandbytes 0.50 repacks them in evaluation, and loses gradients from then on."""
    model = nn.Sequential(Counting(), Linear4bit(64, 64, bias=False))
    trainer = Trainer(model=model, args=tiny.arguments(tmp_path))
    model[1].support_avx512bf16_for_cpu = True

    def fail() -> None:
        assert (model[1].support_avx512bf16_for_cpu, model.training) == (False, False)
        model[0](torch.rand(1))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), undisturbed(trainer, model):
        fail()
    assert model[1].support_avx512bf16_for_cpu
    assert (model.training, model[0].passes) == (True, 0)
