"""Gradient release: bit for bit the plain optimizer, one gradient at a time, and a clear word where it cannot be."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import bitsandbytes
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, is_initialized
from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback
from transformers.optimization import Adafactor

import tiny
from hf_memopt.binding import attach, checkpointing_arguments
from hf_memopt.binding.compatibility import refusal_of
from hf_memopt.memory import estimate
from hf_memopt.techniques.optimizers import EmbeddingBitsCallback
from hf_memopt.techniques.optimizers.built_classes import plain_step
from hf_memopt.techniques.optimizers.gradient_release import gradient_release, released_optimizer

pytestmark = [
    # bitsandbytes on a CPU
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    # torch 2.13 about bitsandbytes 0.50.2
    pytest.mark.filterwarnings("ignore:_check_is_size will be removed:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _no_accelerate_state() -> Iterator[None]:
    """Let no test see what an earlier one told accelerate."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# ---- bit for bit, in a plain loop


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def backward(model: nn.Module, seed: int = 0, factor: float = 1.0) -> None:
    ids = torch.randint(0, 100, (8,), generator=torch.Generator().manual_seed(seed))
    (factor * model(ids)).square().mean().backward()


def run(optimizer_class: Any, options: dict[str, Any], steps: int = 3) -> tuple[nn.Module, Any]:
    """Train with a learning rate that changes in place, as a schedule changes it."""
    model = network()
    optimizer = optimizer_class(decay_groups(model), **{"lr": 1e-3, **options})
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tensors(value: Any) -> list[torch.Tensor]:
    if torch.is_tensor(value):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in inner for tensor in tensors(part)]


def assert_same_state(one: Any, other: Any) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for key, state in first["state"].items():
        assert state.keys() == second["state"][key].keys()
        for left, right in zip(tensors(state), tensors(second["state"][key]), strict=True):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)


TORCH = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "radam": (torch.optim.RAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "torch-adafactor": (torch.optim.Adafactor, {}),
    "adafactor": (Adafactor, {"scale_parameter": False, "relative_step": False}),
}
MOMENTUM = ("LARS8bit", "SGD8bit")  # they ask for one
EIGHT_BIT = {
    name: (kind, {"momentum": 0.9} if name in MOMENTUM else {})
    for name, kind in sorted(vars(bitsandbytes.optim).items())
    if name.endswith("8bit") and name != "Optimizer8bit"
}
THIRTY_TWO_BIT = {
    name: (getattr(bitsandbytes.optim, name), {}) for name in ("AdamW", "AdamW32bit", "PagedAdamW", "Lion", "AdEMAMix")
}


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [pytest.param(*case, id=name) for name, case in {**TORCH, **EIGHT_BIT, **THIRTY_TWO_BIT}.items()],
)
def test_weights_and_state_are_the_plain_classs(optimizer_class: Any, options: dict[str, Any]) -> None:
    plain_model, plain = run(optimizer_class, options)
    model, released = run(gradient_release(optimizer_class), options)
    assert tiny.largest_difference(model, network()) > 0
    assert tiny.largest_difference(model, plain_model) == 0.0
    assert_same_state(released, plain)


def test_every_8_bit_optimizer_of_bitsandbytes_is_in_the_table_and_has_8_bit_states() -> None:
    assert {"AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit", "RMSprop8bit", "LAMB8bit"} < EIGHT_BIT.keys()
    for optimizer_class, options in EIGHT_BIT.values():
        _, released = run(gradient_release(optimizer_class), options, steps=1)
        assert torch.uint8 in {tensor.dtype for tensor in tensors(list(released.state.values()))}


@pytest.mark.slow  # it compiles a kernel for each shape
# of torch 2.13, when its compiler is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_torchao() -> None:
    torchao = pytest.importorskip("torchao.optim")
    for optimizer_class in (torchao.AdamW8bit, torchao.AdamW4bit):
        models = []
        for kind in (optimizer_class, gradient_release(optimizer_class, trust=True)):
            models.append(network())
            optimizer = kind(decay_groups(models[-1]), lr=1e-3)
            for step in range(2):
                backward(models[-1], step)
                optimizer.step()
                optimizer.zero_grad()
        assert tiny.largest_difference(*models) == 0.0


# ---- bit for bit, with the stock Trainer


def causal_rows(count: int = 16) -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in tiny.rows(count)]


def albert() -> nn.Module:
    sizes = {"vocab_size": 100, "embedding_size": 32, "hidden_size": 32, "num_attention_heads": 2}
    rest = {"intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 64, "num_labels": 3}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**sizes, **rest, **dropouts))


def wide_bert() -> nn.Module:
    """Its embeddings and its layers are large enough for 8-bit states."""
    return tiny.bert(hidden_size=64)


def make_trainer(
    model: nn.Module, tmp_path: Any, is_released: bool, *, rows: Any = None, callbacks: Any = (), **settings: Any
) -> Trainer:
    common = {
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    args = tiny.arguments(tmp_path, **{**common, **settings})
    released = {"optimizer_cls_and_kwargs": released_optimizer(args, model)} if is_released else {}
    data = tiny.rows(16) if rows is None else rows
    return Trainer(model=model, args=args, train_dataset=data, callbacks=list(callbacks), **released)


def inner(trainer: Trainer) -> Any:
    return trainer.optimizer.optimizer


def assert_same_training(build: Callable[[], nn.Module], tmp_path: Any, runs: int = 1, **settings: Any) -> Trainer:
    """Train with the plain class and with the released one; return the Trainer of the latter."""
    make_callbacks = settings.pop("make_callbacks", lambda: ())
    trainers = []
    for is_released in (False, True):
        GlobalOptimManager.get_instance().initialize()  # what stock leaves there concerns the next 8-bit optimizer
        trainer = make_trainer(build(), tmp_path, is_released, callbacks=make_callbacks(), **settings)
        for _ in range(runs):
            trainer.train()
        trainers.append(trainer)
    plain, released = trainers
    assert type(inner(released)).technique == "gradient release"
    assert tiny.largest_difference(released.model, build()) > 0
    assert tiny.largest_difference(plain.model, released.model) == 0.0
    assert_same_state(inner(plain), inner(released))
    return released


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
        {"optim": "adafactor"},
        {"optim": "paged_adamw_8bit"},
        {"optim": "adamw_torch", "adam_beta1": 0.8, "bf16": True, **checkpointing_arguments()},
    ],
    ids=["fused", "sgd", "adafactor", "paged", "bf16-checkpointing"],
)
def test_training_is_the_plain_optimizers(tmp_path: Any, settings: dict[str, Any]) -> None:
    assert_same_training(wide_bert, tmp_path, **settings)


def test_tied_weights(tmp_path: Any) -> None:
    assert_same_training(lambda: tiny.llama(tie_word_embeddings=True), tmp_path, rows=causal_rows())


def test_layers_that_share_weights(tmp_path: Any) -> None:
    assert_same_training(albert, tmp_path)


def test_a_second_run_with_the_same_optimizer(tmp_path: Any) -> None:
    assert_same_training(wide_bert, tmp_path, runs=2, optim="adamw_8bit")


def embedding_dtypes(trainer: Trainer) -> set[torch.dtype]:
    optimizer = inner(trainer)
    weights = [module.weight for module in trainer.model.modules() if isinstance(module, nn.Embedding)]
    return {optimizer.state[weight]["state1"].dtype for weight in weights if weight.numel() >= 4096}


def test_stock_registers_32_bit_embeddings_as_for_the_plain_class(tmp_path: Any) -> None:
    trainer = assert_same_training(wide_bert, tmp_path, optim="adamw_8bit", max_steps=2)
    assert embedding_dtypes(trainer) == {torch.float32}


def test_embedding_bits_callback(tmp_path: Any) -> None:
    asked = {"optim": "adamw_8bit", "max_steps": 2, "make_callbacks": lambda: [EmbeddingBitsCallback()]}
    assert embedding_dtypes(assert_same_training(wide_bert, tmp_path, **asked)) == {torch.float32}


class Unfreeze(TrainerCallback):
    """Train the embeddings from the second step on; those who froze them did so before or after the hooks were put."""

    def __init__(self, is_frozen_late: bool) -> None:
        self.is_frozen_late = is_frozen_late

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.is_frozen_late:
            model.get_input_embeddings().requires_grad_(False)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.get_input_embeddings().requires_grad_(state.global_step >= 1)


@pytest.mark.parametrize("is_frozen_late", [True, False], ids=["frozen-late", "frozen-before"])
def test_parameters_that_are_unfrozen_in_between(tmp_path: Any, is_frozen_late: bool) -> None:
    def build() -> nn.Module:
        model = tiny.bert()
        if not is_frozen_late:
            model.get_input_embeddings().requires_grad_(False)
        return model

    models = []
    for kind in (torch.optim.AdamW, gradient_release(torch.optim.AdamW)):
        model = build()
        optimizer = kind(model.parameters(), lr=1e-3)  # frozen ones too, as a gradual schedule needs it
        args = tiny.arguments(tmp_path, per_device_train_batch_size=4)
        callbacks = [Unfreeze(is_frozen_late)]
        Trainer(
            model=model, args=args, train_dataset=tiny.rows(16), optimizers=(optimizer, None), callbacks=callbacks
        ).train()
        assert optimizer.state[model.get_input_embeddings().weight]["step"] == 3
        models.append(model)
    assert tiny.largest_difference(*models) == 0.0


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_checkpoints_go_both_ways(tmp_path: Any, optim: str) -> None:
    def trained(folder: str, is_released: bool, resume: str | None = None) -> nn.Module:
        GlobalOptimManager.get_instance().initialize()
        saving = {"save_strategy": "steps", "save_steps": 2, "optim": optim}
        trainer = make_trainer(wide_bert(), tmp_path / folder, is_released, **saving)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    straight = trained("plain", False)
    assert tiny.largest_difference(straight, trained("released", True)) == 0.0
    for start, is_released in (("plain", True), ("released", False)):
        resumed = trained("resumed", is_released, str(tmp_path / start / "checkpoint-2"))
        assert tiny.largest_difference(straight, resumed) == 0.0


# ---- memory


class LiveGradients:
    """Hooks, put before the optimizer's, that note how many bytes of gradients live when one has been computed."""

    def __init__(self, model: nn.Module) -> None:
        self.peak_bytes = 0
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        live = sum(parameter.grad.nbytes for parameter in self._parameters if parameter.grad is not None)
        self.peak_bytes = max(self.peak_bytes, live)


def facts_llama() -> nn.Module:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    return tiny.llama(**sizes, num_attention_heads=4, num_key_value_heads=4)


def test_only_the_largest_gradient_lives(tmp_path: Any) -> None:
    peaks = []
    for is_released in (False, True):
        model = facts_llama()
        tracker = LiveGradients(model)
        make_trainer(model, tmp_path, is_released, rows=causal_rows(8)).train()
        peaks.append(tracker.peak_bytes)
    sizes = [parameter.numel() * 4 for parameter in facts_llama().parameters()]
    assert peaks == [sum(sizes), max(sizes)] == [919_808, 131_072]


def test_the_estimator_predicts_it() -> None:
    settings = {"batch_size": 1, "seq_len": 8, "precision": "fp32", "max_grad_norm": 0.0}
    kept, released = (
        estimate(facts_llama(), **settings, gradient_release=flag).components["gradients"] for flag in (False, True)
    )
    norms = 2 * 4 + 1  # 256 bytes each; the allocator that is replayed gives out 512 at least
    assert (kept, released) == (919_808 + norms * 256, 131_072)


# ---- clipping


def test_each_tensor_is_clipped_by_itself() -> None:
    models = [network(), network()]
    plain = torch.optim.AdamW(models[0].parameters(), lr=1e-3)
    released = gradient_release(torch.optim.AdamW, max_tensor_norm=0.01)(models[1].parameters(), lr=1e-3)
    for step in range(3):
        backward(models[0], step, 10)
        norms = [nn.utils.clip_grad_norm_(parameter, 0.01) for parameter in models[0].parameters()]
        plain.step()
        plain.zero_grad()
        backward(models[1], step, 10)
        released.step()
        assert max(norms) > 0.01
        # the norm of the norms, summed in another order
        torch.testing.assert_close(released.last_grad_norm(), torch.stack(norms).norm(), rtol=1e-6, atol=0)
    assert tiny.largest_difference(*models) == 0.0
    unclipped, _ = run(torch.optim.AdamW, {})
    assert tiny.largest_difference(models[0], unclipped) > 0


def test_a_parameter_that_still_had_its_gradient_is_clipped_too() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = gradient_release(torch.optim.SGD, max_tensor_norm=0.5)(model.parameters(), lr=1.0)
    model[0].weight.requires_grad_(True)
    backward(model, factor=1000.0)
    assert model[0].weight.grad is not None
    optimizer.step()
    assert model[0].weight.grad is None
    assert (model[0].weight - before).norm().item() == pytest.approx(0.5, rel=1e-4)  # 1e-6 is added to the norm
    backward(model)
    assert model[0].weight.grad is None  # it has a hook now


def test_an_infinite_bound_only_measures() -> None:
    plain_model, _ = run(torch.optim.AdamW, {})
    model, released = run(gradient_release(torch.optim.AdamW, max_tensor_norm=math.inf), {})
    assert tiny.largest_difference(plain_model, model) == 0.0
    backward(plain_model)
    expected = nn.utils.clip_grad_norm_(plain_model.parameters(), math.inf)
    backward(model)
    released.step()
    torch.testing.assert_close(released.last_grad_norm(), expected, rtol=1e-6, atol=0)
    assert run(gradient_release(torch.optim.AdamW), {})[1].last_grad_norm() is None


def test_stock_logs_no_gradient_norm(tmp_path: Any) -> None:
    trainer = make_trainer(tiny.bert(), tmp_path, True, logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row] == [0.0] * 4


# ---- the optimizer as an object


def test_the_class() -> None:
    released = gradient_release(torch.optim.AdamW)
    assert released is gradient_release(torch.optim.AdamW)
    assert released is not gradient_release(torch.optim.AdamW, max_tensor_norm=1.0)
    assert issubclass(released, torch.optim.AdamW)
    assert (released.__name__, released.technique) == ("ReleasedAdamW", "gradient release")
    assert not transformers.trainer.is_optimizer_factory(released)


def test_step_hooks_run_once_per_step() -> None:
    torch.optim.AdamW(network().parameters())  # torch wraps a class's step when the first one is built
    model = network()
    optimizer = gradient_release(torch.optim.AdamW)(model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert calls == ["before", "after"] * 2


def test_a_closure_runs_and_its_loss_is_returned() -> None:
    models = [network(), network()]
    losses = []
    for model, kind in zip(models, (torch.optim.AdamW, gradient_release(torch.optim.AdamW)), strict=True):
        optimizer = kind(model.parameters())

        def closure(model: nn.Module = model) -> torch.Tensor:
            loss = model(torch.arange(8)).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert losses[0] == losses[1] > 0
    assert tiny.largest_difference(*models) == 0.0


def test_the_handle_makes_it_a_plain_optimizer() -> None:
    plain_model, plain = run(torch.optim.AdamW, {}, steps=1)
    model, released = run(gradient_release(torch.optim.AdamW), {}, steps=1)
    released.handle.remove()
    for trained, optimizer in ((plain_model, plain), (model, released)):
        backward(trained)
        assert all(parameter.grad is not None for parameter in trained.parameters())
        optimizer.step()
    assert tiny.largest_difference(plain_model, model) == 0.0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_is_a_plain_optimizer(copied: Callable[[Any], Any]) -> None:
    model, optimizer = copied(run(gradient_release(torch.optim.AdamW), {}, steps=1))
    plain_model, plain = run(torch.optim.AdamW, {}, steps=1)
    for trained, own in ((model, optimizer), (plain_model, plain)):
        backward(trained)
        assert all(parameter.grad is not None for parameter in trained.parameters())
        own.step()
    assert tiny.largest_difference(plain_model, model) == 0.0
    assert optimizer.last_grad_norm() is None
    optimizer.handle.remove()  # there is nothing to undo


def test_a_group_that_is_added_is_released_too() -> None:
    model = network()
    optimizer = gradient_release(torch.optim.SGD)(model[1].parameters(), lr=0.1)
    optimizer.add_param_group({"params": [model[0].weight]})
    backward(model)
    assert model[0].weight.grad is None
    assert model[3].weight.grad is not None


def test_an_optimizer_that_is_gone_steps_no_more() -> None:
    model = network()
    optimizer = gradient_release(torch.optim.SGD)(model.parameters(), lr=0.1)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    backward(model)
    assert tiny.largest_difference(model, network()) == 0.0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_two_released_optimizers_of_one_parameter() -> None:
    model = network()
    released = gradient_release(torch.optim.SGD)
    first, second = (released(model[3].parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(RuntimeError) as error:
        backward(model)
    assert str(error.value) == (
        "the gradient of a parameter of shape (64,) was released before ReleasedSGD saw it; expected one released "
        "optimizer per parameter. Call handle.remove() of the other optimizer."
    )
    first.handle.remove()
    second.step()
    model.zero_grad()
    backward(model)
    assert model[3].weight.grad is None


# ---- errors


class Failing(torch.optim.SGD):
    """Fails as soon as it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("told to")
        return super().step(closure)


def test_an_error_surfaces_from_the_backward_pass() -> None:
    model = network()
    optimizer = gradient_release(Failing, trust=True)(model.parameters(), lr=0.1)
    groups = optimizer.param_groups
    optimizer.fails = True
    with pytest.raises(ArithmeticError, match="told to"):
        backward(model)
    assert optimizer.param_groups is groups
    optimizer.fails = False
    optimizer.step()
    backward(model)
    assert all(parameter.grad is None for parameter in model.parameters())


SECOND_GRADIENT = (
    "a parameter of shape (4, 4) got a second gradient within one step of ReleasedSGD; expected one backward pass per "
    "optimizer.step(), and no reentrant checkpointing. Pass use_reentrant=False, or call optimizer.step() after each "
    "backward pass, an interrupted one included."
)


def test_reentrant_checkpointing_is_noticed() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = gradient_release(torch.optim.SGD)(layer.parameters(), lr=0.1)
    inputs = torch.ones(2, 4, requires_grad=True)

    def loss(use_reentrant: bool) -> torch.Tensor:
        hidden = checkpoint(layer, inputs, use_reentrant=use_reentrant)
        return checkpoint(layer, hidden, use_reentrant=use_reentrant).sum()

    loss(use_reentrant=False).backward()
    optimizer.step()
    with pytest.raises(RuntimeError) as error:
        loss(use_reentrant=True).backward()
    assert str(error.value) == SECOND_GRADIENT


def test_a_second_backward_pass_without_a_step_is_noticed() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = gradient_release(torch.optim.SGD)(layer.parameters(), lr=0.1)
    layer(torch.ones(4)).sum().backward()
    with pytest.raises(RuntimeError) as error:
        layer(torch.ones(4)).sum().backward()
    assert str(error.value) == SECOND_GRADIENT
    optimizer.step()
    layer.zero_grad()
    layer(torch.ones(4)).sum().backward()


def refused(other: str) -> str:
    return str(refusal_of("gradient release", other))


def test_accumulation_is_noticed_in_the_first_backward_pass(tmp_path: Any) -> None:
    model = tiny.bert()
    released = (gradient_release(torch.optim.SGD), {"lr": 0.1})
    args = tiny.arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer = Trainer(model=model, args=args, train_dataset=tiny.rows(16), optimizer_cls_and_kwargs=released)
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    assert str(error.value) == refused("accumulation")
    assert tiny.largest_difference(model, tiny.bert()) == 0.0


def test_fp16_is_noticed_in_the_first_backward_pass() -> None:
    accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    model = network()
    optimizer = gradient_release(torch.optim.SGD)(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as error:
        backward(model)
    assert str(error.value) == refused("fp16")
    assert optimizer.last_grad_norm() is None
    assert tiny.largest_difference(model, network()) == 0.0


def test_several_processes_are_noticed_in_the_first_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = network()
    optimizer = gradient_release(torch.optim.SGD)(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as error:
        backward(model)
    assert str(error.value) == refused("DDP")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model.zero_grad()
    backward(model)
    optimizer.step()


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"max_grad_norm": 1.0}, "norm clipping"),
        ({"fp16": True}, "fp16"),
        ({"gradient_accumulation_steps": 2}, "accumulation"),
        (checkpointing_arguments(use_reentrant=True), "reentrant checkpointing"),
    ],
    ids=["clipping", "fp16", "accumulation", "reentrant"],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    tmp_path: Any, settings: dict[str, Any], other: str
) -> None:
    args = tiny.arguments(tmp_path, **settings)
    model = tiny.bert()
    with pytest.raises(ValueError) as error:
        released_optimizer(args, model)
    assert str(error.value) == refused(other)
    released = (gradient_release(torch.optim.SGD), {"lr": 0.1})
    trainer = Trainer(model=model, args=args, train_dataset=tiny.rows(), optimizer_cls_and_kwargs=released)
    with pytest.raises(ValueError) as error:
        attach(trainer)
    assert str(error.value) == refused(other)


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_in_the_backward_pass_already_are_refused(tmp_path: Any, optim: str) -> None:
    model = tiny.bert()
    args = tiny.arguments(tmp_path, optim=optim, optim_target_modules="all-linear")
    with pytest.raises(ValueError) as error:
        released_optimizer(args, model)
    assert str(error.value) == refused("layer-wise optimizer")
    backward_bert(model)
    assert all(parameter.grad is not None for parameter in model.parameters())  # stock has put no hooks either


def backward_bert(model: nn.Module) -> None:
    model(input_ids=torch.full((2, 8), 7), labels=torch.tensor([0, 1])).loss.backward()


FIX = "Call gradient_release(torch.optim.AdamW)."


class OwnStep(bitsandbytes.optim.AdamW8bit):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer_class", "problem"),
    [
        (
            torch.optim.LBFGS,
            "runs the model several times within one step; expected a class whose step needs no closure",
        ),
        (gradient_release(torch.optim.SGD), "releases gradients already; expected a plain class"),
        (OwnStep, "has a step of its own; expected a class with the step of bitsandbytes or of torch"),
    ],
    ids=["lbfgs", "released", "own-step"],
)
def test_classes_that_are_refused(optimizer_class: Any, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        gradient_release(optimizer_class)
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    assert str(error.value) == f"optimizer_class={name} {problem}. {FIX}"


@pytest.mark.parametrize("given", [nn.Linear, "adamw"], ids=["module", "name"])
def test_what_is_no_class_of_optimizers(given: Any) -> None:
    with pytest.raises(TypeError) as error:
        gradient_release(given)
    assert str(error.value) == (
        f"optimizer_class={given!r} is not a class of optimizers; expected a subclass of torch.optim.Optimizer. {FIX}"
    )


@pytest.mark.parametrize("norm", [0, -1.0, math.nan, True, "1"])
def test_bounds_that_are_refused(norm: Any) -> None:
    with pytest.raises(ValueError) as error:
        gradient_release(torch.optim.SGD, max_tensor_norm=norm)
    assert str(error.value) == (
        f"max_tensor_norm={norm!r} is invalid; expected a norm above 0, or None not to clip. Pass max_tensor_norm=1.0."
    )


class Doubled(torch.optim.SGD):
    """A step of its own, which treats each parameter by itself."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


class Renamed(torch.optim.SGD):
    """Keeps the step of a known class."""


@pytest.mark.parametrize("optimizer_class", [Doubled, torch.optim.SparseAdam, bitsandbytes.optim.lars.PytorchLARS])
def test_a_class_that_is_not_known_is_taken_on_trust_only(optimizer_class: Any) -> None:
    with pytest.raises(ValueError) as error:
        gradient_release(optimizer_class)
    assert str(error.value) == (
        f"optimizer_class={optimizer_class.__module__}.{optimizer_class.__qualname__} is not known to step each "
        "parameter by itself; expected a class with the step of one in torch.optim, bitsandbytes or transformers, or "
        "trust=True. If its step neither combines parameters nor counts in param_groups, pass trust=True."
    )
    assert issubclass(gradient_release(optimizer_class, trust=True), optimizer_class)


@pytest.mark.parametrize(("optimizer_class", "trust"), [(Doubled, True), (Renamed, False)])
def test_classes_of_the_user(optimizer_class: Any, trust: bool) -> None:
    plain_model, plain = run(optimizer_class, {})
    model, released = run(gradient_release(optimizer_class, trust=trust), {})
    assert tiny.largest_difference(model, plain_model) == 0.0
    assert_same_state(released, plain)


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "stable_adamw", "grokadamw"])
def test_stocks_names_whose_parameters_depend_on_each_other_are_not_known(tmp_path: Any, optim: str) -> None:
    with pytest.raises(ValueError, match=r" is not known to step each parameter by itself; expected "):
        released_optimizer(tiny.arguments(tmp_path, optim=optim), tiny.bert())


def test_quantised_parameters_and_empty_groups() -> None:
    quantised = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    model = network()
    groups = [{"params": [quantised, *model.parameters()]}, {"params": []}, {"params": [quantised.clone()]}]
    optimizer = gradient_release(torch.optim.AdamW)(groups)
    backward(model)
    optimizer.step()
    assert tiny.largest_difference(model, network()) > 0
    gradient_release(torch.optim.AdamW)([quantised])


# ---- what others could change


def test_the_mark_on_a_step_that_runs_hooks() -> None:
    """``hooked``, undocumented: seen in torch 2.13."""

    class Fresh(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    own = Fresh.step
    Fresh(network().parameters(), lr=0.1)
    assert Fresh.step is not own
    assert Fresh.step.hooked is True
    assert plain_step(Fresh.step) is own


def test_the_methods_of_bitsandbytes_that_its_step_calls() -> None:
    """Public names without documentation: seen in bitsandbytes 0.50.2."""
    calls: list[str] = []

    class Recorded(bitsandbytes.optim.AdamW8bit):
        def __getattribute__(self, name: str) -> Any:
            if name in ("check_overrides", "to_gpu", "init_state", "prefetch_state", "update_step"):
                calls.append(name)
            return super().__getattribute__(name)

    assert plain_step(Recorded.step) is plain_step(Optimizer8bit.step)
    expected = ["check_overrides", "to_gpu", "init_state", "prefetch_state", "update_step"]
    for kind in (Recorded, gradient_release(Recorded)):
        layer = nn.Linear(2, 2, bias=False)
        optimizer = kind(layer.parameters())
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
        assert calls == expected
        calls.clear()


def test_the_state_of_accelerate() -> None:
    assert not is_initialized()
    accelerate.Accelerator(cpu=True)
    assert is_initialized()
    assert AcceleratorState().mixed_precision == "no"
    assert GradientState().sync_gradients is True
