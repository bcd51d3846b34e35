"""Layers that wait on the host: bit for bit what stock with checkpointing trains, whatever happens in between."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import peft
import psutil
import pytest
import torch
import transformers
from slow_cases import slow_except
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt import StreamedLayersCallback, attach, low_memory_optimizer, stream_layers
from hf_memopt.training.binding import checkpointing_arguments, enable_checkpointing
from technique_table import same

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
LAYERS = 5
IDS = torch.randint(5, 100, (8, 12), generator=torch.Generator().manual_seed(1)).to(tiny.DEVICE)
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-2, "logging_strategy": "steps", "logging_steps": 1}


def llama(**settings: Any) -> transformers.LlamaForCausalLM:
    return tiny.llama(**{"num_hidden_layers": LAYERS, "attention_dropout": 0.1, **settings}).train().to(tiny.DEVICE)


def rows(count: int = 16) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in tiny.rows(count)]


def backward(model: Any, seed: int = 0, ids: torch.Tensor = IDS) -> float:
    torch.manual_seed(seed)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def stock(model: Any) -> Any:
    """Return a copy with stock's checkpointing."""
    copied = copy.deepcopy(model)
    enable_checkpointing(copied, {"use_reentrant": False})
    return copied


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def layer_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.model.layers[0].parameters())


@pytest.mark.parametrize(
    ("prefetch", "resident", "settings"),
    [
        (0, 0, {"max_grad_norm": 1.0}),
        (1, 0, {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}),
        (2, 0, {"optim": "sgd"}),
        (LAYERS, 0, {"optim": "adamw_bnb_8bit", "bf16": True}),
        (0, 1, {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}),
        (1, 2, {"max_grad_norm": 1.0}),
        (2, 4, {"optim": "adamw_bnb_8bit", "bf16": True}),
        (1, LAYERS, {"max_grad_norm": 1.0}),
    ],
)
def test_weights_and_losses_are_those_of_stock(
    prefetch: int, resident: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Of stock with checkpointing, which computes the same: gradients are summed and clipped on the host."""
    settings = {**ADAMW, **checkpointing_arguments(), "per_device_train_batch_size": 4, **settings}
    callback = StreamedLayersCallback(prefetch, resident=resident)
    model, plain, away = llama(), llama(), LAYERS - resident
    ours = tiny.train(model, rows(), tmp_path, trainer_callbacks=[callback], **settings)
    theirs = tiny.train(plain, rows(), tmp_path, **settings)
    assert tiny.largest_difference(model, plain) == 0.0
    keys = ("loss", "grad_norm")
    assert [[entry.get(key) for key in keys] for entry in ours.state.log_history] == [
        [entry.get(key) for key in keys] for entry in theirs.state.log_history
    ]
    ring = callback.handle.ring
    passes = 4  # micro-batches of 4 of 16 rows
    compared = 3 * away if "gradient_accumulation_steps" in settings else 0  # the losses of a batch and its halves
    assert ring.fetches == passes * max(2 * away - 1 - prefetch, away) + compared
    assert (ring.live_bytes, ring.peak_bytes) == (0, min(prefetch + 1, away) * layer_bytes(model))


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("direction", ["to streamed", "to plain"])
def test_a_checkpoint_is_resumed_with_and_without(direction: str, resident: int, tmp_path: Path) -> None:
    settings = {**ADAMW, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    streamed, plain = ({"trainer_callbacks": [StreamedLayersCallback(resident=resident)]}, {})
    first, then = (plain, streamed) if direction == "to streamed" else (streamed, plain)
    straight = llama()
    tiny.train(straight, rows(), tmp_path / "straight", **settings, **first)
    model = llama(seed=1)
    tiny.train(model, rows(), tmp_path / "resumed", str(tmp_path / "straight" / "checkpoint-2"), **settings, **then)
    assert tiny.largest_difference(straight, model) == 0.0
    saved = [path.read_bytes() for path in sorted(tmp_path.glob("*/checkpoint-4/model.safetensors"))]
    assert len(saved) == 2
    assert saved[0] == saved[1]


@pytest.mark.parametrize("resident", [0, 1])
def test_a_model_that_is_streamed_before_the_trainer_is_kept(resident: int, tmp_path: Path) -> None:
    model, away = llama(), LAYERS - resident
    handle = stream_layers(model, prefetch=2, resident=resident)
    callback = StreamedLayersCallback()
    trainer = attach(Trainer(model, tiny.arguments(tmp_path), train_dataset=rows(4)), callback)
    assert callback.handle is not None
    trainer.train()
    assert handle.ring.fetches == 2 * away - 3
    [change] = trainer.memopt_changes
    size, stay = f"{away * layer_bytes(model) / 1024:.1f} KiB", ", 1 stay on the device" * resident
    assert str(change) == (
        f"weights of the layers: 'on the device' -> 'fetched' ({size} of {away} layers wait in host memory{stay})"
    )


def test_a_model_that_was_placed_before_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """On a machine without a GPU weights on meta stand for weights that the Trainer has moved."""
    args = SimpleNamespace(device=torch.device("meta"), fp16_full_eval=False, bf16_full_eval=False)
    with pytest.raises(ValueError, match="is not a device whose memory can be read"):
        StreamedLayersCallback().change_model(llama().to("meta"), args)
    assert caplog.messages == [
        "StreamedLayersCallback: the whole model was on meta before its layers could wait in host memory. Where it "
        "does not fit, call before Trainer(...): stream_layers(model)"
    ]


@pytest.mark.parametrize(("resident", "stay"), [(0, []), (2, [0, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])])
def test_stocks_checkpointing_is_off_while_layers_are_streamed(resident: int, stay: list[int], tmp_path: Path) -> None:
    """The Trainer switches it on at each train(), and finds it on when the layers are its own again."""
    model, callback = llama(), StreamedLayersCallback(resident=resident)
    tiny.train(model, rows(4), tmp_path, trainer_callbacks=[callback], **checkpointing_arguments())
    assert [number for number, layer in enumerate(model.model.layers) if layer.gradient_checkpointing] == stay
    callback.handle.remove()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_plain_model_of_its_own(way: Any) -> None:
    model = llama()
    handle = stream_layers(model)
    copied = way(model).to(tiny.DEVICE)  # its layers were copied on the host
    assert backward(copied) == backward(model)
    assert same(gradients(copied), gradients(model))
    assert handle.ring.fetches == 2 * LAYERS - 2
    with torch.no_grad():
        copied.model.layers[0].mlp.up_proj.weight.zero_()
    assert backward(model) != backward(copied)
    assert stream_layers(copied).ring is not handle.ring


class Broken(nn.Module):
    """Raises in the forward or in the backward pass."""

    def __init__(self, inner: nn.Module, when: str) -> None:
        super().__init__()
        self.inner, self.when = inner, when

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.inner(hidden)
        if self.when == "forward":
            raise KeyError("broken")
        if self.when == "backward":
            out.register_hook(lambda gradient: {}["broken"])
        return out


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_error_in_the_middle_leaves_the_model_whole(when: str) -> None:
    model = llama()
    model.model.layers[2].mlp = Broken(model.model.layers[2].mlp, "")
    expected = copy.deepcopy(model)
    handle = stream_layers(model)
    before = list(model.parameters())
    model.model.layers[2].mlp.when = when
    with pytest.raises(KeyError, match="broken"):
        backward(model)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    if when == "forward":  # a failed backward pass lets go when the next pass begins
        assert handle.ring.live_bytes == 0
    model.model.layers[2].mlp.when = ""
    model.zero_grad()
    assert backward(model) == backward(expected)
    assert same(gradients(model), gradients(expected))
    assert handle.ring.live_bytes == 0


def test_evaluation_and_generation_fetch_each_layer_once() -> None:
    model = llama().eval()
    plain = copy.deepcopy(model)
    ring = stream_layers(model).ring
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert (ring.fetches, ring.live_bytes) == (LAYERS, 0)
    asked = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(IDS, **asked), plain.generate(IDS, **asked))
    assert (ring.fetches, ring.live_bytes) == (4 * LAYERS, 0)
    assert backward(model.train()) == backward(plain.train())  # with what inference mode has fetched gone


def test_adapters_are_trained_on_the_device_and_merged(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), config)
    plain = copy.deepcopy(model)
    enable_checkpointing(plain.get_base_model(), {"use_reentrant": False})
    plain.enable_input_require_grads()
    ring = stream_layers(model).ring
    stored: list[Any] = []
    ring.lanes.store = lambda *given: stored.append(given)
    assert backward(model) == backward(plain)
    assert same(gradients(model), gradients(plain))
    assert not stored  # frozen weights have no gradients, and adapters are on the device
    assert not any(parameter.requires_grad for layer in ring.layers for parameter in layer.parameters)
    assert tiny.largest_difference(model.merge_and_unload(), plain.merge_and_unload()) == 0.0


def frozen_below() -> Any:
    model = llama()
    for part in (model.model.embed_tokens, *model.model.layers[:3]):
        part.requires_grad_(False)
    return model


def with_a_layer_used_twice() -> Any:
    model = llama()
    model.model.layers = nn.ModuleList([*model.model.layers, model.model.layers[1]])
    model.config.num_hidden_layers += 1
    return model


def two_towers() -> Any:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 100, "max_position_embeddings": 16},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(0)
    return transformers.CLIPModel(config).train()


def as_preference_losses_run(model: Any) -> None:
    """Two forward passes before the backward passes, and gradients of both add up."""
    torch.manual_seed(0)
    first, second = model(IDS[:4], labels=IDS[:4]).loss, model(IDS[4:], labels=IDS[4:]).loss
    (first - second).backward(retain_graph=True)
    first.backward()


def of_text_and_picture(model: Any) -> None:
    model(input_ids=IDS[:2], pixel_values=torch.ones(2, 3, 8, 8), return_loss=True).loss.backward()


@pytest.mark.parametrize(
    ("make", "run", "fetches"),
    [
        (frozen_below, backward, LAYERS),  # not recomputed below; the last two stayed for the backward pass
        (with_a_layer_used_twice, backward, 12),  # it gets the sum of both gradients
        (llama, as_preference_losses_run, 23),
        # the last layers of the model's order are not the last that ran: a fetch more, and never another result
        (two_towers, of_text_and_picture, 12),
    ],
)
def test_gradients_are_those_of_stock_whatever_runs(make: Any, run: Any, fetches: int) -> None:
    model = make()
    plain = stock(model)
    ring = stream_layers(model).ring
    for one in (model, plain):
        run(one)
    assert same(gradients(model), gradients(plain))
    assert (ring.fetches, ring.live_bytes) == (fetches, 0)


def test_embeddings_on_the_host_are_trained_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    plain = stock(model)
    handle = stream_layers(model, embeddings_on_host=True)
    asked: list[torch.device] = []
    backwards = nn.Embedding.forward
    monkeypatch.setattr(
        nn.Embedding, "forward", lambda self, ids: (asked.append(self.weight.device), backwards(self, ids))[1]
    )
    assert backward(model) == backward(plain)
    assert same(gradients(model), gradients(plain))
    model.to("meta")
    assert model.model.embed_tokens.weight.device.type == "cpu"
    assert model.lm_head.weight.is_meta
    assert {device.type for device in asked} == {"cpu"}
    handle.remove()
    assert "forward" not in vars(model.model.embed_tokens)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_in_parts_fetch_no_more(rows: int) -> None:
    model = llama(attention_dropout=0.0).double()
    plain = stock(model)
    ring = stream_layers(model, rows=rows).ring
    mask = torch.ones_like(IDS)
    mask[:, -2:] = 0
    for one in (model, plain):
        one(input_ids=IDS, attention_mask=mask, labels=IDS).loss.backward()
    assert ring.fetches == 2 * LAYERS - 2
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)  # sums of float64 in another order


def small(family: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, family)(getattr(transformers, family).config_class(vocab_size=100, **sizes)).train()


AT_ONCE = "give something else than their rows at once"


@pytest.mark.parametrize(
    ("model", "kind", "problem"),
    [
        (lambda: small("XLNetLMHeadModel", d_model=32, n_layer=3, n_head=4, d_inner=64), "XLNetLayer", AT_ONCE),
        (
            lambda: small("MptForCausalLM", d_model=32, n_layers=3, n_heads=4),
            "MptBlock",
            "fail (...)",
        ),  # as many heads as rows
        (lambda: small("BloomForCausalLM", hidden_size=32, n_layer=3, n_head=4), "BloomBlock", "fail (...)"),
    ],
    ids=["positions first", "bias of heads", "heads within rows"],
)
def test_rows_are_not_cut_where_parts_give_something_else(model: Any, kind: str, problem: str) -> None:
    streamed = model()
    stream_layers(streamed, rows=1)
    with pytest.raises(ValueError) as error:
        streamed(IDS[:4], labels=IDS[:4])
    told = re.sub(r"fail \(.*\);", "fail (...);", str(error.value))  # of torch
    assert told == (
        f"rows=1 cuts what {kind} gets where its rows are not, and parts {problem}; expected rows in the first "
        "dimension of all it gets. Pass rows=None to stream_layers"
    )


def test_the_comparison_of_parts_draws_no_random_numbers() -> None:
    model = llama(attention_dropout=0.5)
    stream_layers(model, rows=3)
    losses = []
    for _ in range(2):  # the first compares
        torch.manual_seed(0)
        losses.append(model(IDS, labels=IDS).loss.detach())
    assert losses[0] == losses[1]


def test_too_little_host_memory_is_said_before_the_first_step(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=1000))
    model = llama()
    size = 3 * sum(p.nbytes for p in model.parameters()) / 1024  # a gradient and two moments beside each weight
    with pytest.raises(ValueError) as error:
        tiny.train(model, rows(4), tmp_path, trainer_callbacks=[StreamedLayersCallback()], optim="adamw_torch")
    assert str(error.value) == (
        f"streamed layers need {size:.1f} KiB of host memory for gradients and optimizer state, and 1000 B are "
        "available; expected no more, since the machine would swap. Train adapters, set optim='adamw_bnb_8bit', or "
        "load the model with dtype=torch.bfloat16"
    )


@pytest.mark.parametrize("way", ["load_state_dict", "an attribute"])
def test_weights_that_were_replaced_are_refused_and_values_are_loaded(way: str) -> None:
    """They would not be used, and be lost after the next pass."""
    model, other = llama(), llama()
    state = {name: value + 1 for name, value in other.state_dict().items()}
    handle = stream_layers(model)
    model.load_state_dict(state)
    other.load_state_dict(state)
    assert backward(model) == backward(other)
    assert same(gradients(model), gradients(other))
    linear = model.model.layers[0].self_attn.q_proj
    if way == "load_state_dict":
        model.load_state_dict(state, assign=True)
    else:
        linear.weight = nn.Parameter(linear.weight.detach() + 1)
    for use in (backward, lambda model: model.to("cpu")):
        with pytest.raises(ValueError) as error:
            use(model)
        assert str(error.value) == (
            "weight of a streamed Linear was replaced, as load_state_dict(assign=True) does, and would be lost; "
            "expected the parameter that was streamed, with other values. Call handle.remove() before replacing it, "
            "and stream_layers(model) afterwards"
        )
    handle.remove()
    assert torch.equal(linear.weight, state["model.layers.0.self_attn.q_proj.weight"] + (way == "an attribute"))
    stream_layers(model)
    backward(model)


EIGHT_BITS = {"optim_bits": 8, "min_8bit_size": 512}
RELEASED = {
    "AdamW": (torch.optim.AdamW, {}, {}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}, {}),
    "clipped AdamW": (torch.optim.AdamW, {}, {"max_tensor_norm": 0.01}),
    "8-bit AdamW": (bitsandbytes.optim.AdamW, EIGHT_BITS, {}),
    "16-bit weights": (low_memory_optimizer(torch.optim.AdamW, rounding="kahan"), {}, {}),
    "16-bit weights, 8-bit AdamW": (low_memory_optimizer(bitsandbytes.optim.AdamW, rounding="kahan"), EIGHT_BITS, {}),
}


def released_run(
    folder: Path, kind: Any, options: Any, *, streamed: bool, resume: str | None = None, resident: int = 0
) -> Trainer:
    dtype = torch.bfloat16 if hasattr(kind, "rounding") else torch.float32
    callbacks = [StreamedLayersCallback(resident=resident)] if streamed else []
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


@pytest.mark.parametrize("case", slow_except(("fused AdamW", "clipped AdamW", "16-bit weights, 8-bit AdamW"), RELEASED))
def test_steps_on_the_device_are_those_of_the_plain_class(case: str, tmp_path: Path) -> None:
    """Weights, and all of the optimizer's state under the parameters of the host; in one step, and resumed."""
    kind, options, released = RELEASED[case]
    given = low_memory_optimizer(kind, **released, release=True), options
    plain = released_run(tmp_path / "plain", *given, streamed=False)
    ours = released_run(tmp_path / "ours", *given, streamed=True, resident=3 * (case == "fused AdamW"))
    assert tiny.largest_difference(ours.model, plain.model) == 0.0
    assert same(ours.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    resumed = released_run(tmp_path / "resumed", *given, streamed=True, resume=str(tmp_path / "plain" / "checkpoint-2"))
    assert tiny.largest_difference(resumed.model, plain.model) == 0.0
    [callback] = [one for one in ours.callback_handler.callbacks if isinstance(one, StreamedLayersCallback)]
    assert callback.handle.ring.steps is None  # after the run gradients are parked again


def measured(monkeypatch: pytest.MonkeyPatch, free_bytes: float) -> None:
    """Let the CPU read as a GPU of 1 GB with so many bytes that neither the peak nor the margin needs."""
    total, later = 10**9, 700  # bytes that are reserved at the peak and not now
    used = total - total // 20 - int(free_bytes) - later
    reading = SimpleNamespace(
        device_total_bytes=total, device_used_bytes=used, reserved_bytes=300, peak_reserved_bytes=300 + later
    )
    monkeypatch.setattr("hf_memopt.training.techniques.streaming.resident.read_memory", lambda device: reading)


AUTO = {  # bytes that are free, in layers, and how many fit
    # a weight, its gradient, two moments, a temporary of the step, and counters
    "parked": ({}, 10.2, 2),
    "parked, autocast": ({"bf16": True}, 10.2, 1),  # whose copies of 16 bits are half a layer more
    "released": ({"optimizer": low_memory_optimizer(torch.optim.AdamW, release=True)}, 6.2, 2),
    "LoRA": ({"lora": True}, 2.5, 2),
    "all": ({"lora": True}, 4.5, LAYERS),  # no copies of the last two are needed then
    "none": ({}, 4.9, 0),
}


@pytest.mark.parametrize("before", [False, True], ids=["", "streamed before"])
@pytest.mark.parametrize("case", slow_except(("parked", "released", "all"), AUTO))
def test_as_many_layers_stay_as_two_steps_leave_room_for(
    case: str, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options, layers, expected = AUTO[case]
    options = {**ADAMW, **checkpointing_arguments(), "per_device_train_batch_size": 4, **options}
    kind, is_adapted = options.pop("optimizer", None), options.pop("lora", False)
    given = {"max_grad_norm": 0.0} if kind else {}
    measured(monkeypatch, layers * layer_bytes(llama()))
    found: list[Any] = []
    for resident in ("auto", 1, None):
        model: Any = llama()
        if is_adapted:
            torch.manual_seed(0)
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).train()
        if resident == "auto" and before:
            stream_layers(model, resident="auto")
        own = resident if not (resident == "auto" and before) else 0
        callbacks = [] if resident is None else [StreamedLayersCallback(resident=own)]
        args = tiny.arguments(tmp_path, **{**options, **given})
        kinds = {"optimizer_cls_and_kwargs": (kind, {"lr": 1e-3})} if kind else {}
        trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks, **kinds)
        attach(trainer).train()
        found.append((model, trainer, *callbacks))
    (model, trainer, callback), (fixed, other, _), (plain, _) = found
    assert tiny.largest_difference(model, plain) == tiny.largest_difference(fixed, plain) == 0.0
    assert same(trainer.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"])
    assert (callback.handle.options["resident"], len(callback.handle.ring.layers)) == (expected, LAYERS - expected)
    assert len([layer for layer in layers_of(model) if layer.gradient_checkpointing]) == expected
    text = f"StreamedLayersCallback: {expected} of {LAYERS} layers stay on cpu from here on, since "
    [said] = [message for message in caplog.messages if message.startswith(text)]
    assert said.endswith(
        f" were free beside the peak of 2 steps and a margin of 5 %. Next time pass resident={expected}"
    )


def layers_of(model: Any) -> Any:
    return getattr(model, "get_base_model", lambda: model)().model.layers


@pytest.mark.parametrize(
    ("optim", "settings", "problem", "fix"),
    [
        (
            "adamw_torch",
            dict.fromkeys(checkpointing_arguments()),
            "layers that stay would keep their activations, and those that are streamed are recomputed",
            f"Set {next(iter(checkpointing_arguments()))}=True, or pass resident=1",
        ),
        (
            "adamw_bnb_8bit",
            {},
            "the state of <AdamW> would have to move in the middle of a run",
            "Pass resident=1, and more while it fits",
        ),
    ],
)
def test_what_two_steps_do_not_say_is_refused(
    optim: str, settings: Any, problem: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, 0)
    options = {**checkpointing_arguments(), "optim": optim, **settings}
    with pytest.raises(ValueError) as error:
        tiny.train(llama(), rows(4), tmp_path, trainer_callbacks=[StreamedLayersCallback(resident="auto")], **options)
    assert str(error.value) == (
        f"resident='auto' cannot be used here: {problem}; expected a number of layers, or a run in which two steps say "
        f"what a layer needs that stays. {fix}"
    )


@pytest.mark.parametrize("resident", [0, 1, 2])
def test_no_cache_is_filled_in_part(resident: int) -> None:
    """Layers that stay would fill it where gradients are recorded, and those that wait would not."""
    model = llama()
    expected = backward(copy.deepcopy(model))
    stream_layers(model, resident=resident)
    torch.manual_seed(0)
    name = next(one for one in ("cache", "past_key_values") if one in inspect.signature(model.forward).parameters)
    found = model(input_ids=IDS, labels=IDS, use_cache=True)
    assert found.loss.item() == expected
    assert found[name].get_seq_length() == 0
    with pytest.raises(ValueError, match=r"^past_key_values goes on with a cache where gradients are recorded"):
        model(input_ids=IDS, **{name: found[name]})
    with torch.no_grad():
        assert model(input_ids=IDS, use_cache=True)[name].get_seq_length() == IDS.shape[1]


class TwoPasses(Trainer):
    """Adds up the losses of two forward passes, as contrastive losses and R-Drop do."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


def test_a_layer_that_runs_twice_is_not_released_but_parked(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path, max_grad_norm=0)
    plain, model, parked = llama(), llama(), llama()
    for one, callbacks in ((plain, []), (parked, [StreamedLayersCallback()])):
        attach(TwoPasses(one, args, train_dataset=rows(4), callbacks=callbacks)).train()
    assert tiny.largest_difference(parked, plain) == 0.0
    kinds = low_memory_optimizer(args, model, release=True)
    trainer = TwoPasses(model, args, train_dataset=rows(4), optimizer_cls_and_kwargs=kinds)
    with pytest.raises(RuntimeError) as error:
        attach(trainer, StreamedLayersCallback()).train()
    assert str(error.value) == (
        "a parameter of shape (32,) got a second gradient within one backward pass, of another call of its streamed "
        f"layer, when {kinds[0].__name__} had stepped it; expected one forward pass for each backward pass. Run the "
        "model once on all rows joined, or leave release=True out: parked gradients are added up"
    )


def test_stochastic_rounding_steps_on_the_device(tmp_path: Path) -> None:
    """Its random numbers follow the order of steps, which is the order of gradients: the same in two streamed runs."""
    models = []
    for name in ("one", "two"):
        args = tiny.arguments(tmp_path / name, optim="adamw_torch", learning_rate=1e-4)
        model = llama().bfloat16()
        kind = low_memory_optimizer(args, model, release=True, rounding="stochastic")
        callbacks = [StreamedLayersCallback()]
        trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks, optimizer_cls_and_kwargs=kind)
        attach(trainer).train()
        models.append(model)
    assert tiny.largest_difference(*models) == 0.0
    assert tiny.largest_difference(models[0], llama().bfloat16()) > 0.0


def on_gpu(model: Any, prefetch: int = 1) -> Any:
    return stream_layers(model, prefetch=prefetch, device="cuda").ring


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_gradients_are_those_of_stock_with_checkpointing(prefetch: int, dtype: torch.dtype) -> None:
    model = llama(hidden_size=256, intermediate_size=1024, num_attention_heads=4).to(dtype)
    plain = stock(model).to("cuda")
    ring = on_gpu(model, prefetch)
    ids = IDS.cuda()
    for seed in range(3):
        assert backward(model, seed, ids) == backward(plain, seed, ids)
        torch.cuda.synchronize()
        ours = [None if grad is None else grad.cpu() for grad in gradients(model)]
        theirs = [None if grad is None else grad.cpu() for grad in gradients(plain)]
        assert same(ours, theirs)
    assert all(parameter.device.type == "cpu" for layer in ring.layers for parameter in layer.parameters)


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_compute() -> None:
    """Of a pass with many tokens the copies are hidden: it takes less than compute and copies one after the other."""
    model = llama(hidden_size=2048, intermediate_size=8192, num_attention_heads=16).bfloat16()
    ring = on_gpu(model)
    ids = torch.randint(5, 100, (16, 512), device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def milliseconds(run: Any) -> float:
        run()
        torch.cuda.synchronize()
        start.record()
        run()
        torch.cuda.synchronize()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def copies() -> None:
        for layer in ring.layers:
            for parameter in layer.parameters:
                _, event = ring.lanes.fetch(parameter.detach())
                ring.lanes.ready(event)

    streamed, copied = milliseconds(lambda: backward(model, ids=ids)), milliseconds(copies)
    plain = stock(model).to("cuda")  # a copy has whole weights
    computed = milliseconds(lambda: backward(plain, ids=ids))
    assert streamed < computed + 2 * copied


@pytest.mark.gpu
def test_on_a_gpu_the_trainer_trains_what_it_trains_on_whole_weights(tmp_path: Path) -> None:
    model, plain = llama(), llama()
    options = {**ADAMW, **checkpointing_arguments(), "use_cpu": False, "max_grad_norm": 0.0}
    tiny.train(model, rows(), tmp_path, trainer_callbacks=[StreamedLayersCallback()], **options)
    tiny.train(plain, rows(), tmp_path, **options)
    # stock steps on the GPU, and the parked gradients on the host: other kernels of AdamW
    assert tiny.largest_difference(model.cpu(), plain.cpu()) <= 1e-6
