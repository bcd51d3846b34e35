"""Memory that runs out with probability 0.1 at every place of every pass changes neither weights nor predictions.

Only single rows are spared: where one of them does not fit, ``MicrobatchCallback`` raises. Every few steps the limit is
taken back, as if another process had left the GPU, so that whole batches are tried, and run out, to the end.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import T5ForConditionalGeneration, Trainer, TrainerCallback

import tiny
from hf_memopt import MicrobatchCallback, ShardedCheckpointCallback, attach
from scarcity import CASES, Pad

STEPS = 300
PROBABILITY = 0.1
BATCH = 6


class Storm:
    """Run out of memory by chance, in the passes of two rows or more: before each layer forward and backward.

    Attributes:
        errors: how often it did, by the kind of place.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.errors: dict[str, int] = {}
        self._rows = 0
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        layers = [module for module in model.modules() if type(module).__name__.endswith(("Layer", "Block"))]
        for place in (*layers, head):
            place.register_forward_pre_hook(lambda *_: self._maybe("forward"))
            place.register_full_backward_pre_hook(lambda *_: self._maybe("backward"))

    def _begin(self, model: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        self._rows = len(inputs["input_ids"])
        self._maybe("forward")

    def _maybe(self, place: str) -> None:
        if self._rows > 1 and self.chance.random() < PROBABILITY:
            self.errors[place] = self.errors.get(place, 0) + 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Relief(TrainerCallback):
    """Take the limits back by chance, as if memory had become free; the callback itself waits 200 steps for that."""

    def __init__(self, callback: MicrobatchCallback) -> None:
        self.callback, self.chance = callback, random.Random(1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.chance.random() < 0.5:
            for limit in self.callback.limits.values():
                limit.limit = limit.last_good = None


def _t5_with_gelu() -> nn.Module:
    config = CASES["t5"].build().config
    config.dense_act_fn = "gelu"
    return T5ForConditionalGeneration(config)


MODELS = {**CASES, "t5-gelu": CASES["t5"]._replace(build=_t5_with_gelu)}


class Run(NamedTuple):
    """A way to train, and how far the weights may be from those of the undisturbed run after 300 steps."""

    case: str
    tolerance: float
    settings: dict[str, Any]


SGD: dict[str, Any] = {"learning_rate": 0.01}
ADAMW: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3}
RUNS = {
    # sums in another order: single bits of float32, which few steps of this size carry on
    "BERT, SGD": Run("bert", 1e-6, SGD),
    "Llama, SGD, accumulated": Run("llama", 1e-6, {**SGD, "gradient_accumulation_steps": 3}),
    # float64, since AdamW divides by the root of the second moment, and rounding of float32 would show as 1e-6
    "BERT per token, AdamW": Run("bert-tokens", 1e-12, {**ADAMW, "gradient_accumulation_steps": 2}),
    # rotary angles are float32 in a float64 model too: 2e-8 on one CPU, below 1e-12 on another
    "Llama padded left, AdamW": Run("llama-left", 1e-7, ADAMW),
    # T5's own ReLU is held in float64: where rounding turns the sign of one of its inputs, that unit's gradient is
    # there or not, and after 300 steps the weights differ by 7e-6 in float32 (4e-16 in float64). GELU: by 1.2e-7
    "T5 with ReLU, SGD": Run("t5", 1e-12, SGD),
    "T5 with GELU, SGD": Run("t5-gelu", 1e-6, SGD),
}


def make(run: Run, folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    case = MODELS[run.case]
    torch.manual_seed(0)
    model = case.build()
    args = tiny.arguments(
        folder,
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        **{"max_steps": STEPS, **case.settings, **run.settings, **settings},
    )
    return attach(
        Trainer(
            model.double() if run.tolerance < 1e-6 else model,
            args,
            train_dataset=case.rows(BATCH * 10),
            eval_dataset=case.rows(BATCH * 4),
            data_collator=Pad(case.side),
        ),
        *callbacks,
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_through_a_storm_ends_with_the_weights_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    run, callback = RUNS[name], MicrobatchCallback()
    undisturbed = make(run, tmp_path)
    undisturbed.train()
    trainer = make(run, tmp_path, callback)
    trainer.add_callback(Relief(callback))
    storm = Storm(trainer.model)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert min(storm.errors["forward"], storm.errors["backward"]) >= 30, storm.errors
    assert callback.tally.failures >= 100
    assert tiny.largest_difference(undisturbed.model, trainer.model) <= run.tolerance


@pytest.mark.parametrize("name", RUNS)
def test_predictions_through_a_storm_are_those_of_whole_batches(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    settings = {"per_device_eval_batch_size": BATCH, "max_steps": 1}
    trainer = make(run, tmp_path, MicrobatchCallback(), **settings)
    expected = trainer.predict(trainer.eval_dataset)
    storm = Storm(trainer.model)
    for _ in range(30):
        found = trainer.predict(trainer.eval_dataset)
        pairs = [(found.predictions, expected.predictions), (found.label_ids, expected.label_ids)]
        for ours, whole in pairs:
            assert_close(ours, whole)
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-6)
    assert storm.errors["forward"] >= 30, storm.errors


def assert_close(ours: Any, whole: Any) -> None:
    if isinstance(whole, tuple):
        for one, other in zip(ours, whole, strict=True):
            assert_close(one, other)
    else:
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(whole), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_memory_that_runs_out_in_the_optimizer_ends_the_run_and_it_resumes_exactly(optim: str, tmp_path: Path) -> None:
    """No recovery is promised there: a step may be half done. The last checkpoint is whole, and the run goes on."""
    run = Run("bert", 0.0, {"optim": optim, "learning_rate": 0.01})
    settings = {"max_steps": 30, "save_strategy": "steps", "save_steps": 4}
    straight = make(run, tmp_path / "straight", MicrobatchCallback(), **settings)
    straight.train()
    chance, ended = random.Random(1), 0  # the seed 0 has no draw below 0.1 in 30 steps
    while True:
        trainer = make(run, tmp_path / "out", MicrobatchCallback(), ShardedCheckpointCallback(), **settings)
        trainer.add_callback(_StarvedOptimizer(chance))
        try:
            trainer.train(resume_from_checkpoint=any((tmp_path / "out").glob("checkpoint-*")))
            break
        except torch.OutOfMemoryError:
            ended += 1
    assert ended >= 2
    assert tiny.largest_difference(straight.model, trainer.model) == 0.0


class _StarvedOptimizer(TrainerCallback):
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.chance.random() < PROBABILITY:
            parameter = kwargs["optimizer"].param_groups[0]["params"][0]
            parameter.data.add_(1.0)  # a step that is half done
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
