"""The simulation against a run of the real ``Trainer`` on the host."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from host_semantics import HostSemantics
from recorded import allocator_peak, replayed_peak
from transformers import Trainer

import tiny
from hf_memopt.prediction.memory.models import example_batch, load_model
from hf_memopt.prediction.memory.optimizers import optimizer_memory, parameter_facts
from hf_memopt.prediction.memory.recording.step import record_step
from hf_memopt.training.binding import checkpointing_arguments, enable_checkpointing
from hf_memopt.types import StepSettings

# torch 2.13 says so whenever the state of oneDNN is read
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")


def simulated_on_the_host(model: Any, *, batch_size: int, seq_len: int, **changed: Any) -> int:
    """Return the peak of the estimator's parts with the CPU's kernels and allocator."""
    loaded = load_model(model).model
    step = StepSettings(precision="fp32", **changed)
    if step.checkpointing:
        enable_checkpointing(loaded, {"use_reentrant": False})
    batch = example_batch(loaded, batch_size=batch_size, seq_len=seq_len)
    batch.pop("token_type_ids", None)
    trace = record_step(loaded, batch, step, semantics=HostSemantics())
    return replayed_peak(trace, step, optimizer_memory(parameter_facts(loaded), step))


def measured_on_the_host(trainer: Any) -> int:
    """Return the peak of a run, and the weights that were there before."""
    for group in trainer.create_optimizer().param_groups:
        group["foreach"] = True  # the default on a GPU
    with allocator_peak(trainer.model) as peak:
        trainer.train()
    return peak[0]


@pytest.mark.parametrize(
    ("optim", "set_up"),
    [
        *(("adamw_torch", {}), ("adafactor", {})),
        *(("sgd", {"gradient_accumulation_steps": 2}), ("adamw_torch", {"checkpointing": True})),
    ],
)
def test_a_real_trainer_on_the_host_takes_what_was_simulated(tmp_path: Any, optim: str, set_up: dict[str, Any]) -> None:
    sizes = {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512}
    config = tiny.bert_config(**sizes, hidden_dropout_prob=0.1, attn_implementation="eager")
    model = transformers.BertForSequenceClassification(config)
    simulated = simulated_on_the_host(model, batch_size=16, seq_len=64, optim=optim, **set_up)
    arguments = checkpointing_arguments() if set_up.get("checkpointing") else dict(set_up)
    trainer = Trainer(
        model=model,
        args=tiny.arguments(tmp_path, optim=optim, per_device_train_batch_size=16, max_steps=2, **arguments),
        train_dataset=tiny.rows(64, length=64),
    )
    # what the simulation does not have: numbers of the loss and the random sampler
    assert simulated == pytest.approx(measured_on_the_host(trainer), rel=0.012)
