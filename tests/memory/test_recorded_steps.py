"""A recorded step: where its parts begin, which storages are what, what is refused, and that nothing else changes."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from recorded import RecordedPass, StepTrace, prepared, record, record_step, surroundings
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


def freed_at(trace: StepTrace, number: int) -> int:
    """Return the event at which a storage died."""
    return next(index for index, (other, delta) in enumerate(trace.tracker.events) if other == number and delta < 0)


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


def test_one_pass_is_one_micro_batch_and_accumulation_or_pieces_are_two() -> None:
    model, batch = on_meta(tiny.bert), bert_batch()
    one, two = (record(model, batch, FP32.replace(gradient_accumulation_steps=steps), "cuda") for steps in (1, 8))
    rows = {name: tensor[:1] for name, tensor in batch.items()}
    cut = record_step(model, batch, FP32.replace(micro_batch_size=1), micro_batch=rows)
    assert [len(trace.micro_batches) for trace in (one, two, cut)] == [1, 2, 2]
    assert two.flops == [one.flops[0]] * 2
    assert 0 < cut.flops[0] == cut.flops[1] <= one.flops[0] / 2 + 1
    assert sizes_of(cut, cut.inputs) == [BATCH * SEQ * 8] * 2 + [BATCH * 8]  # the whole batch stays on the GPU
    for trace in (one, two, cut):
        for part in trace.micro_batches:
            assert 0 < part.start < part.forward_end < part.end <= len(trace.tracker.events)
        assert [part.start for part in trace.micro_batches][1:] == [part.end for part in trace.micro_batches][:-1]


def test_gradients_are_made_in_the_first_pass_and_added_to_in_the_second() -> None:
    model = on_meta(tiny.bert)
    model.bert.embeddings.requires_grad_(False)
    trace = record(model, bert_batch(), FP32.replace(gradient_accumulation_steps=2))
    first, second = trace.micro_batches
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(sizes_of(trace, trace.gradients)) == sorted(parameter.numel() * 4 for parameter in trainable)
    assert set(trace.gradients) <= {number for number, _ in made(trace, first, backward=True)}
    assert all(freed_at(trace, number) >= second.end for number in trace.gradients)
    again = made(trace, second, backward=True)
    assert len(again) >= len(trace.gradients)  # a new one of each, added and freed within the pass
    assert all(freed_at(trace, number) <= second.end for number, _ in again)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_released_gradients_die_at_once_in_the_order_of_the_backward_pass() -> None:
    model = on_meta(tiny.bert)
    trace = record(model, bert_batch(), FP32.replace(gradient_release=True, max_grad_norm=0))
    [part], parameters = trace.micro_batches, list(model.parameters())
    assert sorted(index for _, index, _ in part.releases) == list(range(len(parameters)))
    events = [event for event, _, _ in part.releases]
    assert events == sorted(events)
    for event, index, number in part.releases:
        assert trace.tracker.sizes[number] == parameters[index].numel() * 4
        assert trace.tracker.allocated_at[number] < event <= freed_at(trace, number) < part.end
    assert {number for _, _, number in part.releases} == set(trace.gradients)
    names = [name for name, _ in model.named_parameters()]
    order = [names[index] for _, index, _ in part.releases]
    assert set(order[:2]) == {"classifier.bias", "classifier.weight"}
    assert "embeddings" in order[-1]
    assert all(not parameter._post_accumulate_grad_hooks for parameter in parameters)


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


def test_evaluation_gathers_the_outputs_without_what_inference_ignores() -> None:
    model, settings = on_meta(tiny.llama), BF16.replace(eval_batch_size=BATCH)
    trace = record_step(model, llama_batch(), settings, evaluation_batch=llama_batch())
    # logits as float32 and labels, no cache
    assert sizes_of(trace, trace.evaluation.outputs) == [LOGITS * 4, BATCH * SEQ * 8]  # type: ignore[union-attr]
    assert sizes_of(trace, trace.evaluation_inputs) == [BATCH * SEQ * 8] * 3
    assert set(trace.evaluation_inputs).isdisjoint(trace.inputs)
    dropped = record(model, llama_batch(), settings.replace(prediction_loss_only=True), evaluate=True)
    assert dropped.evaluation.outputs == ()  # type: ignore[union-attr]
    assert model.training


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_stretches_and_modules_are_those_of_the_layers(reentrant: bool) -> None:
    settings = FP32.replace(gradient_accumulation_steps=2, checkpointing={"use_reentrant": reentrant})
    trace = record(prepared(on_meta(tiny.bert), settings), bert_batch(), settings)
    tracker = trace.tracker
    assert len(tracker.recomputed) == 2 * 2  # layers x micro-batches
    for index, (begin, end) in enumerate(tracker.recomputed):
        part = trace.micro_batches[index // 2]
        assert part.forward_end <= begin < end <= part.end
        layer = f"bert.encoder.layer.{1 - index % 2}"
        modules = {tracker.module_of(number) for number, delta in tracker.events[begin:end] if delta > 0}
        assert {name for name in modules if not name.startswith(layer)} <= {"", "bert.encoder"}
        assert f"{layer}.intermediate.dense" in modules
    plain = record(on_meta(tiny.bert), bert_batch(), FP32)
    assert plain.tracker.recomputed == []
    of_forward = {plain.tracker.module_of(number) for number, _ in made(plain, plain.micro_batches[0])}
    assert {"bert.embeddings.word_embeddings", "bert.encoder.layer.0.attention.self.query", "classifier"} <= of_forward
    as_large = [plain.tracker.module_of(n) for n in plain.gradients if plain.tracker.sizes[n] == 64 * HIDDEN * 4]
    dense = [f"bert.encoder.layer.{i}.{part}.dense" for i in (0, 1) for part in ("intermediate", "output")]
    assert sorted(as_large) == sorted([*dense, "bert.embeddings.position_embeddings"])


def test_16_bit_outputs_are_copied_to_float32_as_accelerate_does() -> None:
    half = record(on_meta(tiny.bert), bert_batch(), StepSettings(precision="fp16"))
    pure = record(on_meta(tiny.bert).to(torch.bfloat16), bert_batch(), FP32.replace(weights_dtype="bfloat16"))
    copy = (BATCH * 3 * 4, "")
    counts = [[(d, t.tracker.module_of(n)) for n, d in made(t, t.micro_batches[0])].count(copy) for t in (half, pure)]
    assert counts[0] > counts[1] == 0


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


def test_a_trace_ends_with_the_step_whatever_dies_later() -> None:
    """A trace that is kept would change when its model is collected."""
    model, batch = on_meta(tiny.bert), bert_batch()
    trace = record(model, batch, FP32)
    events = list(trace.tracker.events)
    del model, batch
    gc.collect()
    assert trace.tracker.events == events != []
