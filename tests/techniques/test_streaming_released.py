"""Streamed layers under a released optimizer: the step runs on the device, and is that of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from slow_cases import slow_except
from test_streaming import LAYERS, llama, rows
from transformers import Trainer

import tiny
from hf_memopt import StreamedLayersCallback, attach, gradient_release, released_optimizer, sixteen_bit_optimizer
from technique_table import same

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
EIGHT_BITS = {"optim_bits": 8, "min_8bit_size": 512}
CLASSES = {
    "AdamW": (torch.optim.AdamW, {}, {}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}, {}),
    "clipped AdamW": (torch.optim.AdamW, {}, {"max_tensor_norm": 0.01}),
    "8-bit AdamW": (bitsandbytes.optim.AdamW, EIGHT_BITS, {}),
    "16-bit weights": (sixteen_bit_optimizer(torch.optim.AdamW, "kahan"), {}, {}),
    "16-bit weights, 8-bit AdamW": (sixteen_bit_optimizer(bitsandbytes.optim.AdamW, "kahan"), EIGHT_BITS, {}),
}


class Recording(torch.optim.AdamW):
    """Notes what it steps."""

    stepped: list[torch.Tensor]

    def step(self, closure: Any = None) -> Any:
        vars(self).setdefault("stepped", []).extend(p for group in self.param_groups for p in group["params"])
        return super().step(closure)


def train(folder: Path, kind: Any, options: Any, *, streamed: bool, resume: str | None = None) -> Trainer:
    dtype = torch.bfloat16 if hasattr(kind, "rounding") else torch.float32
    callbacks = [StreamedLayersCallback()] if streamed else []
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
    trainer = Trainer(
        llama().to(dtype),
        tiny.arguments(folder, **settings),
        train_dataset=rows(),
        callbacks=callbacks,
        optimizer_cls_and_kwargs=(kind, {"lr": 1e-3, **options}),
    )
    attach(trainer).train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("case", slow_except(("fused AdamW", "clipped AdamW", "16-bit weights, 8-bit AdamW"), CLASSES))
def test_steps_on_the_device_are_those_of_the_plain_class(case: str, tmp_path: Path) -> None:
    """Weights, and all of the optimizer's state under the parameters of the host; in one step, and resumed."""
    kind, options, released = CLASSES[case]
    given = gradient_release(kind, **released), options
    plain = train(tmp_path / "plain", *given, streamed=False)
    ours = train(tmp_path / "ours", *given, streamed=True)
    assert tiny.largest_difference(ours.model, plain.model) == 0.0
    assert same(ours.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    resumed = train(tmp_path / "resumed", *given, streamed=True, resume=str(tmp_path / "plain" / "checkpoint-2"))
    assert tiny.largest_difference(resumed.model, plain.model) == 0.0
    [callback] = [one for one in ours.callback_handler.callbacks if isinstance(one, StreamedLayersCallback)]
    assert callback.handle.ring.steps is None  # after the run gradients are parked again


def test_copies_of_the_weights_step(tmp_path: Path) -> None:
    trainer = train(tmp_path, gradient_release(Recording, trust=True), {}, streamed=True)
    stepped, own = trainer.optimizer.optimizer.stepped, {*trainer.model.parameters()}
    assert (
        len([one for one in stepped if one not in own]) == 4 * 9 * LAYERS
    )  # 9 parameters of a layer in each of 4 steps
    assert len([one for one in stepped if one in own]) == 4 * (len(own) - 9 * LAYERS)


def test_stochastic_rounding_steps_on_the_device(tmp_path: Path) -> None:
    """Its random numbers follow the order of steps, which is the order of gradients: the same in two streamed runs."""
    models = []
    for name in ("one", "two"):
        args = tiny.arguments(tmp_path / name, optim="adamw_torch", learning_rate=1e-4)
        model = llama().bfloat16()
        kind = released_optimizer(args, model, rounding="stochastic")
        callbacks = [StreamedLayersCallback()]
        trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks, optimizer_cls_and_kwargs=kind)
        attach(trainer).train()
        models.append(model)
    assert tiny.largest_difference(*models) == 0.0
    assert tiny.largest_difference(models[0], llama().bfloat16()) > 0.0
