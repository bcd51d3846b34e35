"""A recorded step: what is refused, what is said of it, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from recorded import prepared, record, surroundings
from torch import nn

import tiny
from hf_memopt import NotEstimableError
from hf_memopt.types import StepSettings

BATCH, SEQ = 2, 12
FP32 = StepSettings(precision="fp32")


def on_meta(build: Any, **settings: Any) -> Any:
    with torch.device("meta"):
        return build(**settings)


def ids(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def llama_batch() -> dict[str, torch.Tensor]:
    return {name: ids(BATCH, SEQ) for name in ("input_ids", "attention_mask", "labels")}


def test_the_forward_pass_ends_before_the_gradient_of_the_loss() -> None:
    """Its last event frees something, and the next one is the gradient, a float32."""
    trace = record(on_meta(tiny.llama), llama_batch(), StepSettings(precision="bf16"))
    events, [part] = trace.tracker.events, trace.micro_batches
    assert events[part.forward_end - 1][1] < 0
    assert events[part.forward_end][1] == 4


class Reads(nn.Module):
    """A model whose code asks for values, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.head, self.way = nn.Linear(4, 4), way
        self.inner = nn.ModuleList([getattr(nn, way)(4, 4)] if way in ("LSTM", "GRU", "RNN") else [])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(x)
        if self.way == "branch" and (out > 0).all():
            out = out * 2
        if self.way == "number":
            out = out * float(out.detach().float().max())
        if self.way == "numpy":
            torch.linalg.eigvals(out).numpy()
        if self.way == "error":
            raise KeyError("of the model")
        return {"loss": out.sum()}


BRANCH = Reads.forward.__code__.co_firstlineno + 2
NOT = "not estimable: "
REFUSED = {
    "branch": f"{NOT}test_recorded_steps, line {BRANCH}, lets values on the GPU decide what runs, in the model, and "
    "only real data has them; expected a pass that depends on shapes and settings alone. Estimate the model without "
    "that branch",
    "number": f"{NOT}the model's code reads a number (torch.float32) from the GPU, in the model, and only real data "
    "has it",
    "numpy": f"{NOT}Reads does not run on the meta device, where tensors have shapes but no values (TypeError: ",
    "error": f"{NOT}Reads fails with this batch and set-up (KeyError: 'of the model')",
    **{
        kind: f"{NOT}inner.0 is an nn.{kind}, for which cuDNN reserves memory by undocumented rules; expected a model "
        "without recurrent layers. Measure the step on the GPU"
        for kind in ("LSTM", "GRU", "RNN")
    },
}


def hooks(model: nn.Module) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.filterwarnings("ignore:B?Complex32 support is experimental:UserWarning")  # torch 2.15 tells it for eigvals
@pytest.mark.parametrize("way", REFUSED)
def test_a_model_that_needs_values_is_not_estimable_and_left_as_it_was(way: str) -> None:
    before, model = surroundings(), on_meta(lambda: Reads(way))
    released = StepSettings(precision="bf16", gradient_release=True, max_grad_norm=0)
    with pytest.raises(NotEstimableError) as error:
        record(model, {"x": torch.empty(4, 4, device="meta")}, released, "cuda")
    assert str(error.value).startswith(REFUSED[way])
    assert surroundings() == before
    assert hooks(model) == 0
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_changes_nothing_but_leaves_the_model_in_training_mode(precision: str) -> None:
    settings = StepSettings(precision=precision, label_smoothing_factor=0.1, checkpointing=True)
    model, batch = prepared(on_meta(tiny.llama, attention_dropout=0.1), settings).eval(), llama_batch()
    before = surroundings()  # after the model, whose maker sets the seed
    tensors, hooked = dict(batch), hooks(model)  # by the checkpointing
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    one, other = (record(model, batch, settings, "cuda", evaluate=True).tracker.events for _ in range(2))
    assert one == other
    assert surroundings() == before
    assert (hooks(model), model.training) == (hooked, True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert all(batch[name] is tensor for name, tensor in tensors.items())


def bart(**settings: Any) -> transformers.BartForConditionalGeneration:
    sizes = {"vocab_size": 100, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 4, f"{side}_attention_heads": 2}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, max_position_embeddings=64, **settings)
    )


def test_layers_that_are_dropped_at_random_all_run_and_are_told_of() -> None:
    model, before = on_meta(bart, encoder_layerdrop=0.9, decoder_layerdrop=0.5), surroundings()
    some, every = (record(m, llama_batch(), FP32) for m in (model, on_meta(bart)))
    assert some.tracker.events == every.tracker.events
    assert every.notes == ()
    assert some.notes == (
        "decoder_layerdrop=0.5, encoder_layerdrop=0.9, layerdrop=0.5, layerdrop=0.9: with every layer, the most that a "
        "step takes",
    )
    assert (model.model.encoder.layerdrop, model.model.decoder.layerdrop) == (0.9, 0.5)
    assert (model.config.encoder_layerdrop, model.config.decoder_layerdrop) == (0.9, 0.5)
    assert surroundings() == before
