"""A recorded step: where its parts begin, which storages are what, and that the model stays as it was."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
import transformers
from torch import nn

import tiny
from hf_memopt.binding import versions as compat
from hf_memopt.memory.recording import RecordedPass, StepTrace
from hf_memopt.memory.recording.passes import autocast_dtype
from hf_memopt.memory.recording.step import record_step
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.memory.tracking import StorageTracker

BATCH, SEQ, HIDDEN = 2, 12, 32
FP32 = StepSettings(precision="fp32")


def on_meta(build: Any, **settings: Any) -> Any:
    with torch.device("meta"):
        return build(**settings)


def ids(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def bert_batch(rows: int = BATCH) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(rows, SEQ), "attention_mask": ids(rows, SEQ), "labels": ids(rows)}


def llama_batch() -> dict[str, torch.Tensor]:
    return {name: ids(BATCH, SEQ) for name in ("input_ids", "attention_mask", "labels")}


def sizes_of(trace: StepTrace, numbers: Any) -> list[int]:
    return [trace.tracker.sizes[number] for number in numbers]


def freed_at(trace: StepTrace, number: int) -> int:
    """Return the event at which a storage died."""
    return next(index for index, (other, delta) in enumerate(trace.tracker.events) if other == number and delta < 0)


def allocations(trace: StepTrace, part: RecordedPass, *, backward: bool) -> list[tuple[int, int]]:
    begin, end = (part.forward_end, part.end) if backward else (part.start, part.forward_end)
    return [(number, delta) for number, delta in trace.tracker.events[begin:end] if delta > 0]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("tf32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_dtype_of_the_autocast_region(precision: str, dtype: torch.dtype | None) -> None:
    assert autocast_dtype(precision) is dtype


def test_weights_are_those_of_the_model_once_in_the_order_of_loading() -> None:
    """``model.to(device)`` moves children before the parameters of a module itself; tied weights are one storage."""
    tied = on_meta(tiny.llama, tie_word_embeddings=True)
    trace = record_step(tied, llama_batch(), FP32)
    counted = {tensor.untyped_storage()._cdata: tensor for tensor in (*tied.parameters(), *tied.buffers())}
    expected = sorted(tensor.untyped_storage().nbytes() for tensor in counted.values())
    assert sorted(sizes_of(trace, trace.weights)) == expected
    assert expected.count(100 * HIDDEN * 4) == 1

    class Nest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.empty(3))
            self.child = nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.child(x) * self.first).sum()}

    nest = on_meta(Nest)
    trace = record_step(nest, {"x": torch.empty(2, 5, device="meta")}, FP32)
    assert sizes_of(trace, trace.weights) == [20, 4, 12]
    assert sizes_of(trace, trace.inputs) == [40]


def test_one_pass_is_one_micro_batch_and_accumulation_or_pieces_are_two() -> None:
    model, batch = on_meta(tiny.bert), bert_batch()
    one = record_step(model, batch, FP32)
    two = record_step(model, batch, FP32.replace(gradient_accumulation_steps=8))
    rows = {name: tensor[:1] for name, tensor in batch.items()}
    cut = record_step(model, batch, FP32.replace(micro_batch_size=1), micro_batch=rows)
    assert [len(trace.micro_batches) for trace in (one, two, cut)] == [1, 2, 2]
    assert [len(trace.flops) for trace in (one, two, cut)] == [1, 2, 2]
    assert two.flops == [one.flops[0]] * 2
    assert 0 < cut.flops[0] <= one.flops[0] / 2 + 1
    assert sizes_of(cut, cut.inputs) == [BATCH * SEQ * 8] * 2 + [BATCH * 8]  # the whole batch stays on the GPU
    for trace in (one, two, cut):
        for part in trace.micro_batches:
            assert 0 < part.start < part.forward_end < part.end <= len(trace.tracker.events)
        assert [part.start for part in trace.micro_batches][1:] == [part.end for part in trace.micro_batches][:-1]


def test_gradients_are_made_in_the_first_pass_and_added_to_in_the_second() -> None:
    model = on_meta(tiny.bert)
    trace = record_step(model, bert_batch(), FP32.replace(gradient_accumulation_steps=2))
    first, second = trace.micro_batches
    assert sorted(sizes_of(trace, trace.gradients)) == sorted(p.numel() * 4 for p in model.parameters())
    made = {number for number, _ in allocations(trace, first, backward=True)}
    assert set(trace.gradients) <= made
    for number in trace.gradients:
        assert freed_at(trace, number) >= second.end
    again = [delta for _, delta in allocations(trace, second, backward=True)]
    assert len(again) >= len(trace.gradients)  # a new one of each, added and freed within the pass
    kept = {number for number, _ in allocations(trace, second, backward=True) if freed_at(trace, number) > second.end}
    assert kept == set()


def test_frozen_parameters_have_no_gradient() -> None:
    model = on_meta(tiny.bert)
    for parameter in model.bert.parameters():
        parameter.requires_grad_(False)
    trace = record_step(model, bert_batch(), FP32)
    assert sorted(sizes_of(trace, trace.gradients)) == [3 * 4, 3 * HIDDEN * 4]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_released_gradients_die_at_once_in_the_order_of_the_backward_pass() -> None:
    model = on_meta(tiny.bert)
    settings = FP32.replace(gradient_release=True, max_grad_norm=0)
    trace = record_step(model, bert_batch(), settings)
    part = trace.micro_batches[0]
    parameters = list(model.parameters())
    assert sorted(index for _, index, _ in part.releases) == list(range(len(parameters)))
    events = [event for event, _, _ in part.releases]
    assert events == sorted(events)
    for event, index, number in part.releases:
        assert trace.tracker.sizes[number] == parameters[index].numel() * 4
        assert trace.tracker.allocated_at[number] < event <= freed_at(trace, number) < part.end
    assert {number for _, _, number in part.releases} == set(trace.gradients)
    names = [name for name, _ in model.named_parameters()]
    order = [names[index] for _, index, _ in part.releases]
    assert order[:2] == ["classifier.bias", "classifier.weight"] or set(order[:2]) == {
        "classifier.bias",
        "classifier.weight",
    }
    assert "embeddings" in order[-1]
    assert all(not p._post_accumulate_grad_hooks for p in parameters)


def test_logits_are_known_with_what_follows_until_the_loss() -> None:
    model = on_meta(tiny.llama)
    trace = record_step(model, llama_batch(), StepSettings(precision="bf16"))
    part = trace.micro_batches[0]
    assert sizes_of(trace, part.logits) == [BATCH * SEQ * 100 * 2]
    assert part.logits_event == trace.tracker.allocated_at[min(part.logits)]
    assert part.start < part.logits_event < part.forward_end
    later = [delta for number, delta in allocations(trace, part, backward=False) if number > min(part.logits)]
    assert BATCH * SEQ * 100 * 4 in later  # the copy in float32
    of_gradients = [
        trace.tracker.sizes[number]
        for number, _ in allocations(trace, part, backward=True)
        if trace.tracker.sequences[number] in part.logits_sequences
    ]
    assert BATCH * SEQ * 100 * 4 in of_gradients
    assert HIDDEN * 64 * 4 not in of_gradients


def test_label_smoothing_is_the_trainers_outside_of_the_model() -> None:
    model = on_meta(tiny.llama)
    plain = record_step(model, llama_batch(), StepSettings(precision="bf16"))
    smooth = record_step(model, llama_batch(), StepSettings(precision="bf16", label_smoothing_factor=0.1))
    wide = BATCH * (SEQ - 1) * 100 * 4
    counted = [
        sum(1 for _, delta in allocations(trace, trace.micro_batches[0], backward=False) if delta == wide)
        for trace in (plain, smooth)
    ]
    assert counted[1] > counted[0]
    assert sizes_of(smooth, smooth.micro_batches[0].logits) == [BATCH * SEQ * 100 * 2]


def test_evaluation_gathers_the_outputs_without_what_inference_ignores() -> None:
    model = on_meta(tiny.llama)
    settings = StepSettings(precision="bf16", eval_batch_size=BATCH)
    trace = record_step(model, llama_batch(), settings, evaluation_batch=llama_batch())
    assert trace.evaluation is not None
    assert sizes_of(trace, trace.evaluation.outputs) == [
        BATCH * SEQ * 100 * 4,  # logits as float32, no cache
        BATCH * SEQ * 8,  # labels
    ]
    assert sizes_of(trace, trace.evaluation_inputs) == [BATCH * SEQ * 8] * 3
    assert set(trace.evaluation_inputs).isdisjoint(trace.inputs)
    assert allocations(trace, trace.evaluation, backward=True) == []
    dropped = record_step(
        model, llama_batch(), settings.replace(prediction_loss_only=True), evaluation_batch=llama_batch()
    )
    assert dropped.evaluation is not None
    assert dropped.evaluation.outputs == ()
    assert model.training


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_stretches_are_those_of_the_layers(reentrant: bool) -> None:
    model = on_meta(tiny.bert)
    compat.enable_checkpointing(model, {"use_reentrant": reentrant})
    trace = record_step(model, bert_batch(), FP32.replace(gradient_accumulation_steps=2))
    stretches = trace.tracker.recomputed
    assert len(stretches) == 2 * 2  # layers x micro-batches
    for index, (begin, end) in enumerate(stretches):
        part = trace.micro_batches[index // 2]
        assert part.forward_end <= begin < end <= part.end
        layer = 1 - index % 2
        modules = {trace.tracker.module_of(number) for number, delta in trace.tracker.events[begin:end] if delta > 0}
        assert {name for name in modules if not name.startswith(f"bert.encoder.layer.{layer}")} <= {"", "bert.encoder"}
        assert f"bert.encoder.layer.{layer}.intermediate.dense" in modules
    assert record_step(on_meta(tiny.bert), bert_batch(), FP32).tracker.recomputed == []


def test_module_of_weights_gradients_and_activations() -> None:
    model = on_meta(tiny.bert)
    trace = record_step(model, bert_batch(), FP32)
    tracker, part = trace.tracker, trace.micro_batches[0]
    of_forward = {tracker.module_of(number) for number, _ in allocations(trace, part, backward=False)}
    assert {"bert.embeddings.word_embeddings", "bert.encoder.layer.0.attention.self.query", "classifier"} <= of_forward
    table = next(n for n in trace.gradients if tracker.sizes[n] == 100 * HIDDEN * 4)
    assert tracker.module_of(table) == "bert.embeddings.word_embeddings"
    as_large = [tracker.module_of(n) for n in trace.gradients if tracker.sizes[n] == 64 * HIDDEN * 4]
    dense = [f"bert.encoder.layer.{i}.{part}.dense" for i in (0, 1) for part in ("intermediate", "output")]
    assert sorted(as_large) == sorted([*dense, "bert.embeddings.position_embeddings"])


def test_16_bit_outputs_are_copied_to_float32_as_accelerate_does() -> None:
    model = on_meta(tiny.bert)
    half = record_step(model, bert_batch(), StepSettings(precision="fp16"))
    pure = record_step(on_meta(tiny.bert).to(torch.bfloat16), bert_batch(), FP32.replace(weights_dtype="bfloat16"))
    copy = BATCH * 3 * 4
    counts = [
        [(delta, t.tracker.module_of(n)) for n, delta in allocations(t, t.micro_batches[0], backward=False)].count(
            (copy, "")
        )
        for t in (half, pure)
    ]
    assert counts[0] > 0
    assert counts[1] == 0


# ---- Nothing is left behind -----------------------------------------------------------------------------------------


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.linalg.eigvals(self.linear(x)).numpy()
        return {"loss": self.linear(x).sum()}


class ReadsANumber(AsksForValues):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).sum() * float(x.max())}


def surroundings() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        gc.isenabled(),
        fx_config.meta_nonzero_assume_all_nonzero,
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.overrides._get_current_function_mode_stack(),
    )


def hooks(model: nn.Module) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.filterwarnings("ignore:B?Complex32 support is experimental:UserWarning")  # torch 2.15 tells it for eigvals
@pytest.mark.parametrize("kind", [AsksForValues, ReadsANumber])
def test_model_that_needs_values_is_not_estimable_and_left_as_it_was(kind: type[AsksForValues]) -> None:
    before = surroundings()
    model = on_meta(kind)
    with pytest.raises(NotEstimableError) as error:
        record_step(
            model,
            {"x": torch.empty(4, 4, device="meta")},
            StepSettings(precision="bf16", gradient_release=True, max_grad_norm=0),
        )
    if kind is ReadsANumber:
        expected = (
            "not estimable: the model's code reads a number (torch.float32) from the GPU, in the model, and only real "
            "data has it"
        )
    else:
        cause = error.value.__cause__
        assert isinstance(cause, TypeError)
        expected = (
            "not estimable: AsksForValues does not run on the meta device, where tensors have shapes but no values "
            f"({type(cause).__name__}: {str(cause).splitlines()[0]})"
        )
    assert str(error.value) == expected
    assert surroundings() == before
    assert hooks(model) == 0
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_step_changes_nothing_but_leaves_the_model_in_training_mode(precision: str) -> None:
    before = surroundings()
    model, batch = on_meta(tiny.bert).eval(), bert_batch()
    tensors = dict(batch)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    compat.enable_checkpointing(model, {"use_reentrant": False})
    hooked = hooks(model)  # by the checkpointing
    record_step(model, batch, StepSettings(precision=precision, label_smoothing_factor=0.1), evaluation_batch=batch)
    assert surroundings() == before
    assert hooks(model) == hooked
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert batch == tensors


def test_two_recordings_of_one_model_are_the_same() -> None:
    model = on_meta(tiny.bert, hidden_dropout_prob=0.1)
    one, other = (record_step(model, bert_batch(), StepSettings(precision="bf16")).tracker for _ in range(2))
    assert one.events == other.events
    assert [one.module_of(n) for n in range(len(one.sizes))] == [other.module_of(n) for n in range(len(other.sizes))]


def test_loss_heads_of_every_kind_run() -> None:
    """A regression and a multi-label head take other losses; labels are floats then."""
    for problem, labels in (("regression", 1), ("multi_label_classification", 3)):
        model = on_meta(tiny.bert, problem_type=problem, num_labels=labels)
        shape = (BATCH,) if labels == 1 else (BATCH, labels)
        batch = {**bert_batch(), "labels": torch.empty(*shape, device="meta")}
        trace = record_step(model, batch, StepSettings(precision="fp16"))
        assert sizes_of(trace, trace.micro_batches[0].logits) == [BATCH * labels * 2]
    assert isinstance(model, transformers.PreTrainedModel)


def test_error_of_the_models_own_is_not_taken_for_the_devices() -> None:
    with pytest.raises(NotEstimableError) as error:
        record_step(on_meta(ReadsANumber), {"y": ids(2)}, FP32)
    assert str(error.value) == (
        "not estimable: ReadsANumber fails with this batch and set-up (TypeError: ReadsANumber.forward() got an "
        "unexpected keyword argument 'y')"
    )
    assert isinstance(error.value.__cause__, TypeError)


def test_model_without_a_trainable_parameter_is_refused_first() -> None:
    with pytest.raises(ValueError) as error:
        record_step(on_meta(ReadsANumber).requires_grad_(False), {"y": ids(2)}, FP32)
    assert not isinstance(error.value, NotEstimableError)
    assert str(error.value) == (
        "model=<ReadsANumber> has no trainable parameter; expected one or more with requires_grad=True. Call "
        "model.requires_grad_(True)"
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_not_estimable(kind: type[nn.RNNBase]) -> None:
    """The meta device unrolls their cells; cuDNN has one kernel and a reserve."""
    with pytest.raises(NotEstimableError) as error:
        record_step(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), kind(4, 4))), {"x": ids(2)}, FP32)
    assert str(error.value) == (
        f"not estimable: 1 is an nn.{kind.__name__}, for which cuDNN reserves memory by undocumented rules; expected a "
        "model without recurrent layers. Measure the step on the GPU"
    )


def bart(**settings: Any) -> transformers.BartForConditionalGeneration:
    tiny_bart = {"vocab_size": 100, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    for side in ("encoder", "decoder"):
        tiny_bart |= {f"{side}_layers": 4, f"{side}_attention_heads": 2}
    config = transformers.BartConfig(**tiny_bart, max_position_embeddings=64, **settings)
    return transformers.BartForConditionalGeneration(config)


def test_layers_that_are_dropped_at_random_all_run_and_are_told_of() -> None:
    dropping = {"encoder_layerdrop": 0.9, "decoder_layerdrop": 0.5}
    model = on_meta(bart, **dropping)
    some, every = (record_step(m, llama_batch(), FP32) for m in (model, on_meta(bart)))
    assert some.tracker.events == every.tracker.events
    assert every.notes == ()
    assert some.notes == (
        "decoder_layerdrop=0.5, encoder_layerdrop=0.9, layerdrop=0.5, layerdrop=0.9: with every layer, the most that a "
        "step takes",
    )
    assert (model.model.encoder.layerdrop, model.model.decoder.layerdrop) == (0.9, 0.5)
    assert (model.config.encoder_layerdrop, model.config.decoder_layerdrop) == (0.9, 0.5)


@pytest.mark.parametrize("fails", [False, True])
def test_trace_ends_with_the_step_whatever_dies_later(fails: bool) -> None:
    """A trace that is kept would change when its model is collected."""
    tracker = StorageTracker()
    model, batch = on_meta(tiny.bert), bert_batch()
    if fails:
        batch["labels"] = ids(BATCH + 1)
        with pytest.raises(NotEstimableError):
            record_step(model, batch, FP32, tracker=tracker)
    else:
        record_step(model, batch, FP32, tracker=tracker)
    events = list(tracker.events)
    del model, batch
    gc.collect()
    assert tracker.events == events != []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_callers_mode_of_gradients_does_not_matter(context: Any) -> None:
    model, batch = on_meta(tiny.bert), bert_batch()
    expected = record_step(model, batch, FP32).tracker.events
    with context():
        found = record_step(model, batch, FP32).tracker.events
    assert found == expected


def test_step_takes_nothing_from_the_callers_random_numbers() -> None:
    states = torch.get_rng_state(), random.getstate()
    record_step(on_meta(bart, encoder_layerdrop=0.5, dropout=0.1), llama_batch(), FP32)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_with_float32_weights_run(precision: str) -> None:
    """Autocast leaves the grouped product alone, so it is in float32, which the meta device refuses and CUDA takes."""
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    trace = record_step(
        on_meta(lambda: transformers.MixtralForCausalLM(config)), llama_batch(), StepSettings(precision)
    )
    tokens, made = 2 * BATCH * SEQ, [delta for _, delta in allocations(trace, trace.micro_batches[0], backward=False)]
    assert tokens * 2 * 64 * 4 in made  # gate and up
    of_experts = {4 * 128 * 32 * 4, 4 * 64 * 32 * 4}
    assert of_experts <= {trace.tracker.sizes[number] for number in trace.gradients}
    backward = [delta for _, delta in allocations(trace, trace.micro_batches[0], backward=True)]
    assert [backward.count(size) for size in of_experts] == [1, 1]  # nothing is copied to the weights' layout
