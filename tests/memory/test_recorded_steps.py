"""A recorded step: where its parts begin, which storages are what, what is refused, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from recorded import RecordedPass, StepTrace, prepared, record, surroundings
from torch import nn

import tiny
from hf_memopt import NotEstimableError, StepSettings

BATCH, SEQ, HIDDEN, VOCABULARY = 2, 12, 32, 100
FP32, BF16 = StepSettings(precision="fp32"), StepSettings(precision="bf16")
LOGITS = BATCH * SEQ * VOCABULARY


def on_meta(build: Any, **settings: Any) -> Any:
    with torch.device("meta"):
        return build(**settings)


def ids(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def bert_batch() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(BATCH, SEQ), "attention_mask": ids(BATCH, SEQ), "labels": ids(BATCH)}


def llama_batch() -> dict[str, torch.Tensor]:
    return {name: ids(BATCH, SEQ) for name in ("input_ids", "attention_mask", "labels")}


def sizes_of(trace: StepTrace, numbers: Iterable[int]) -> list[int]:
    return [trace.tracker.sizes[number] for number in numbers]


def made(trace: StepTrace, part: RecordedPass, *, backward: bool = False) -> list[tuple[int, int]]:
    """Return number and size of what a pass allocates."""
    begin, end = (part.forward_end, part.end) if backward else (part.start, part.forward_end)
    return [(number, delta) for number, delta in trace.tracker.events[begin:end] if delta > 0]


def test_weights_are_those_of_the_model_once_in_the_order_of_loading() -> None:
    """``model.to(device)`` moves children before the parameters of a module itself; tied weights are one storage."""
    tied = on_meta(tiny.llama, tie_word_embeddings=True)
    trace = record(tied, llama_batch(), FP32)
    counted = {tensor.untyped_storage()._cdata: tensor for tensor in (*tied.parameters(), *tied.buffers())}
    expected = sorted(tensor.untyped_storage().nbytes() for tensor in counted.values())
    assert sorted(sizes_of(trace, trace.weights)) == expected
    assert expected.count(VOCABULARY * HIDDEN * 4) == 1

    class Nest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.empty(3))
            self.child = nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.child(x) * self.first).sum()}

    trace = record(on_meta(Nest), {"x": torch.empty(2, 5, device="meta")}, FP32)
    assert sizes_of(trace, trace.weights) == [20, 4, 12]
    assert sizes_of(trace, trace.inputs) == [40]


def test_logits_are_known_with_what_follows_until_the_loss() -> None:
    trace = record(on_meta(tiny.llama), llama_batch(), BF16)
    [part] = trace.micro_batches
    assert sizes_of(trace, part.logits) == [LOGITS * 2]
    assert part.start < part.logits_event == trace.tracker.allocated_at[min(part.logits)] < part.forward_end
    assert LOGITS * 4 in [delta for number, delta in made(trace, part) if number > min(part.logits)]  # in float32
    backward = [number for number, _ in made(trace, part, backward=True)]
    of_loss = [trace.tracker.sizes[n] for n in backward if trace.tracker.sequences[n] in part.logits_sequences]
    assert LOGITS * 4 in of_loss
    # the last norm's, a layer's, and the casts of the head's weight and input
    assert {HIDDEN * 4, HIDDEN * 64 * 4, HIDDEN * VOCABULARY * 4, BATCH * SEQ * HIDDEN * 4}.isdisjoint(of_loss)
    assert trace.tracker.events[part.forward_end - 1][1] < 0  # frees of the forward pass, then the gradient of the loss
    assert trace.tracker.events[part.forward_end][1] == 4


@pytest.mark.parametrize(("problem", "labels"), [("regression", 1), ("multi_label_classification", 3)])
def test_loss_heads_of_every_kind_run(problem: str, labels: int) -> None:
    """A regression and a multi-label head take other losses; labels are floats then."""
    model = on_meta(tiny.bert, problem_type=problem, num_labels=labels)
    shape = (BATCH,) if labels == 1 else (BATCH, labels)
    trace = record(
        model, {**bert_batch(), "labels": torch.empty(*shape, device="meta")}, StepSettings(precision="fp16")
    )
    assert sizes_of(trace, trace.micro_batches[0].logits) == [BATCH * labels * 2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_with_float32_weights_run(precision: str) -> None:
    """Autocast leaves the grouped product alone, so it is in float32, which the meta device refuses and CUDA takes."""
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads)
    model = on_meta(lambda: transformers.MixtralForCausalLM(config))
    trace = record(model, llama_batch(), StepSettings(precision=precision), "cuda")
    [part] = trace.micro_batches
    assert 2 * BATCH * SEQ * 2 * 64 * 4 in [delta for _, delta in made(trace, part)]  # gate and up
    of_experts = {4 * 128 * 32 * 4, 4 * 64 * 32 * 4}
    assert of_experts <= set(sizes_of(trace, trace.gradients))
    backward = [delta for _, delta in made(trace, part, backward=True)]
    assert [backward.count(size) for size in of_experts] == [1, 1]  # nothing is copied to the weights' layout


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


def test_model_without_a_trainable_parameter_is_refused_first() -> None:
    with pytest.raises(ValueError) as error:
        record(on_meta(lambda: Reads("number")).requires_grad_(False), {"y": ids(2)}, FP32)
    assert not isinstance(error.value, NotEstimableError)
    assert str(error.value) == (
        "model=<Reads> has no trainable parameter; expected one or more with requires_grad=True. Call "
        "model.requires_grad_(True)"
    )


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
