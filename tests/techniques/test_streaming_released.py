"""Streamed layers under a released optimizer: the step runs on the device, and is that of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from test_streaming import LAYERS, llama, rows
from transformers import Trainer

import tiny
from hf_memopt import StreamedLayersCallback, attach, gradient_release, released_optimizer, sixteen_bit_optimizer
from hf_memopt.techniques.streaming.gradients import DeviceSteps

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


def train(folder: Path, case: str, *, streamed: bool, resume: str | None = None) -> Trainer:
    kind, options, released = CLASSES[case]
    model = llama().to(torch.bfloat16 if "16-bit" in case else torch.float32)
    callbacks = [StreamedLayersCallback()] if streamed else []
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
    trainer = Trainer(
        model,
        tiny.arguments(folder, **settings),
        train_dataset=rows(),
        callbacks=callbacks,
        optimizer_cls_and_kwargs=(gradient_release(kind, **released), {"lr": 1e-3, **options}),
    )
    attach(trainer).train(resume_from_checkpoint=resume)
    return trainer


def state_of(trainer: Trainer) -> list[Any]:
    states = trainer.optimizer.state_dict()["state"]
    return [value for _, state in sorted(states.items()) for value in torch.utils._pytree.tree_leaves(state)]


@pytest.mark.parametrize("case", CLASSES)
def test_steps_on_the_device_are_those_of_the_plain_class(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Weights, and all of the optimizer's state under the parameters of the host; in one step, and resumed."""
    stepped: list[Any] = []
    before = DeviceSteps.step
    monkeypatch.setattr(DeviceSteps, "step", lambda self, p, *given: (stepped.append(p), before(self, p, *given)))
    plain = train(tmp_path / "plain", case, streamed=False)
    assert not stepped
    ours = train(tmp_path / "ours", case, streamed=True)
    assert len(stepped) == 4 * 9 * LAYERS  # each of a layer's 9 parameters in each of 4 steps
    assert tiny.largest_difference(ours.model, plain.model) == 0.0
    assert len(state_of(ours)) == len(state_of(plain))
    for one, other in zip(state_of(ours), state_of(plain), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    resumed = train(tmp_path / "resumed", case, streamed=True, resume=str(tmp_path / "plain" / "checkpoint-2"))
    assert tiny.largest_difference(resumed.model, plain.model) == 0.0


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


def test_after_the_run_gradients_are_parked_again(tmp_path: Path) -> None:
    trainer = train(tmp_path, "AdamW", streamed=True)
    [callback] = [one for one in trainer.callback_handler.callbacks if isinstance(one, StreamedLayersCallback)]
    assert callback.handle.ring.steps is None


def test_a_paged_optimizer_is_refused(tmp_path: Path) -> None:
    CLASSES["paged"] = (bitsandbytes.optim.PagedAdamW, {}, {})
    with pytest.raises(ValueError) as error:
        train(tmp_path, "paged", streamed=True)
    del CLASSES["paged"]
    assert str(error.value) == (
        "optim=<ReleasedPagedAdamW> pages its state, and that of streamed layers is on the host already; expected an "
        "optimizer without pages. Set optim='adamw_bnb_8bit'"
    )
