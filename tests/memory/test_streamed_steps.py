"""Steps whose layers wait in host memory: bytes against the real callback on a CPU, host bytes and seconds by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import StorageTracker, peak_bytes, record_streamed
from slow_cases import slow_except
from transformers import Trainer

import tiny
from hf_memopt import StreamedLayersCallback, attach, estimate, low_memory_optimizer
from hf_memopt.types import StepSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
LAYERS, ROWS, TOKENS = 5, 4, 16
CONFIG = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
STEPS = {
    "parked": {},
    "parked, embeddings": {"embeddings_on_host": True},
    "released": {"gradient_release": True, "max_grad_norm": 0.0},
    "released, embeddings": {"gradient_release": True, "max_grad_norm": 0.0, "embeddings_on_host": True},
    "parked, some stay": {"resident": 2},
    "released, some stay": {"gradient_release": True, "max_grad_norm": 0.0, "resident": 3},
}


def llama(device: str = "cpu") -> Any:
    with torch.device(device):
        model = tiny.llama(**CONFIG).train()
    model.config._attn_implementation = "eager"
    return model


class Recorded(Trainer):
    """Records its third step, whose optimizer has its state; copies to the host are late."""

    peak = 0

    def training_step(self, model: Any, inputs: Any, *given: Any) -> torch.Tensor:
        if self.state.global_step < 2:
            return super().training_step(model, inputs, *given)
        [callback] = [one for one in self.callback_handler.callbacks if isinstance(one, StreamedLayersCallback)]
        embeddings = model.get_input_embeddings() if callback.embeddings_on_host else torch.nn.Module()
        away = {p for layer in callback.handle.ring.layers for p in layer.parameters} | {*embeddings.parameters()}
        lanes: Any = type(callback.handle.ring.gradients._lanes)
        tracker, before = StorageTracker(device_type="cpu"), lanes.host_like
        state = [one for p in away for one in self.optimizer.state.get(p, {}).values() if torch.is_tensor(one)]
        for tensor in [*away, *state, *callback.handle.ring.gradients._kept.values()]:
            tracker.ignore(tensor)

        def host_like(self: Any, tensors: Any) -> list[torch.Tensor]:
            found = before(self, tensors)
            for tensor in found:
                tracker.ignore(tensor)
            return found

        for tensor in [p for p in model.parameters() if p not in away] + [*model.buffers(), *inputs.values()]:
            tracker.add(tensor)
        with pytest.MonkeyPatch.context() as patch, tracker:
            patch.setattr(lanes, "host_like", host_like)
            patch.setattr(lanes, "store", lambda self, host, source: (host.detach().copy_(source), [source])[1])
            patch.setattr(lanes, "landed", lambda self, event: event.clear() if event else None)
            loss = super().training_step(model, inputs, *given)
        Recorded.peak = peak_bytes(tracker)
        return loss


def trained_peak(folder: Path, step: dict[str, Any]) -> int:
    """Return the peak of a step of the stock Trainer with the callback, less what is on the host."""
    model, options = llama(), {"optim": "adamw_torch_fused", "max_grad_norm": step.get("max_grad_norm", 1.0)}
    args = tiny.arguments(folder, per_device_train_batch_size=ROWS, max_steps=3, **options)
    row = {"input_ids": [5] * TOKENS, "labels": [5] * TOKENS}
    released = (
        {"optimizer_cls_and_kwargs": low_memory_optimizer(args, model, release=True)}
        if "gradient_release" in step
        else {}
    )
    resident = step.get("resident", 0)
    callback = StreamedLayersCallback(embeddings_on_host="embeddings_on_host" in step, resident=resident)
    attach(Recorded(model, args, train_dataset=[row] * 3 * ROWS, callbacks=[callback], **released)).train()
    return Recorded.peak


def recorded(step: dict[str, Any]) -> Any:
    model, settings = llama("meta"), StepSettings(precision="fp32", streamed=True, **step)
    ids = torch.empty(ROWS, TOKENS, dtype=torch.int64, device="meta")
    return *record_streamed(model, {"input_ids": ids, "labels": torch.empty_like(ids)}, settings), model


@pytest.mark.parametrize("case", slow_except(("released, embeddings",), STEPS))
def test_recorded_bytes_are_those_of_the_trainer(case: str, tmp_path: Path) -> None:
    trace, _, _ = recorded(STEPS[case])
    assert peak_bytes(trace) == pytest.approx(trained_peak(tmp_path, STEPS[case]), rel=0.01)


@pytest.mark.parametrize("case", STEPS)
def test_bytes_on_the_host_and_over_the_bus_by_hand(case: str) -> None:
    """2 L - 2 fetches of L layers that wait; of a released optimizer its state in and weight and state out as well."""
    step = STEPS[case]
    _, found, model = recorded(step)
    layer, embeddings = (
        sum(parameter.nbytes for parameter in model.model.layers[0].parameters()),
        model.get_input_embeddings().weight.nbytes,
    )
    is_released, on_host = "gradient_release" in step, embeddings * ("embeddings_on_host" in step)
    away = LAYERS - step.get("resident", 0)
    state = 2 * away * layer * is_released  # two averages in float32
    assert found.weights_bytes == away * layer + on_host
    assert found.in_bytes == pytest.approx((2 * away - 2) * layer + state, rel=1e-3)  # beside counters of steps
    assert found.out_bytes == pytest.approx(away * layer + state, rel=1e-3)
    assert found.first_bytes == layer
    settings = StepSettings(precision="fp32", streamed=True, **step)
    gradients = on_host if is_released else away * layer + on_host
    assert found.gradient_bytes == gradients
    trained = away * layer + on_host
    assert found.bytes_on_host(settings) == pytest.approx(trained + gradients + 2 * trained, rel=1e-3)


def test_estimate_says_what_the_host_holds() -> None:
    """Of a GPU it is the weights outside of the layers that stay; the copies are those of two layers."""
    settings = {"batch_size": 4, "seq_len": 64, "precision": "bf16", "gpu": "RTX 3060 12GB"}
    plain = estimate("pythia-70m", checkpointing=True, **settings)
    found = estimate("pythia-70m", streamed=True, **settings)
    assert found.components["weights"] < 0.8 * plain.components["weights"]
    assert found.host_bytes > 0 == plain.host_bytes
    assert "streamed layers" in str(found)
    assert found.step_costs.hiding_tokens("RTX 3060 12GB") == 0  # the longer step on the GPU hides them
    assert plain.step_costs.hiding_tokens("RTX 3060 12GB") is None
    # the host adds each further pass to its gradients: 3 accesses of each, beside 7 of the step of AdamW
    twice = estimate("pythia-70m", streamed=True, gradient_accumulation_steps=2, **settings)
    once, more = (each.step_costs.streaming.host_bytes for each in (found, twice))
    assert (more - once) / once == pytest.approx(3 / 7, rel=1e-3)


@pytest.mark.parametrize("released", [False, True])
def test_all_layers_that_stay_are_a_model_that_is_not_streamed(released: bool) -> None:
    """To the byte, in every phase; with fewer of them less is on the GPU, more on the host, and a step is longer."""
    settings = {"batch_size": 4, "seq_len": 64, "precision": "bf16", "checkpointing": True, "gpu": "RTX 3060 12GB"}
    settings |= {"gradient_release": True, "max_grad_norm": 0.0} if released else {}
    plain = estimate("pythia-70m", **settings)
    layers = 6
    found = [estimate("pythia-70m", streamed=True, resident=resident, **settings) for resident in range(layers + 1)]
    assert (found[-1].phases, found[-1].host_bytes) == (plain.phases, 0)
    assert found[-1].step_time.seconds == pytest.approx(plain.step_time.seconds)
    assert [one.host_bytes for one in found] == sorted((one.host_bytes for one in found), reverse=True)
    assert [one.peak_allocated_bytes for one in found] == sorted(one.peak_allocated_bytes for one in found)
    assert [one.step_time.seconds for one in found] == sorted((one.step_time.seconds for one in found), reverse=True)
