"""Gradient release: bit for bit the plain optimizer, one gradient at a time, and a clear word where it cannot be."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import bitsandbytes
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from bitsandbytes.optim.optimizer import GlobalOptimManager
from slow_cases import slow_except
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from transformers.optimization import Adafactor

import tiny
from hf_memopt import estimate, low_memory_optimizer
from hf_memopt.technique_list import TECHNIQUES, Refusal
from hf_memopt.training.binding import checkpointing_arguments
from technique_table import same

pytestmark = [
    # bitsandbytes on a CPU
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    # torch 2.13 about bitsandbytes 0.50.2
    pytest.mark.filterwarnings("ignore:_check_is_size will be removed:FutureWarning"),
]
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


@pytest.fixture(autouse=True)
def _no_accelerate_state() -> Iterator[None]:
    """Let no test see what an earlier one told accelerate."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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


def released(optimizer_class: Any = SGD, model: nn.Module | None = None, lr: float = 0.1, **given: Any) -> Any:
    """Return a model and its released optimizer."""
    model = network() if model is None else model
    return model, low_memory_optimizer(optimizer_class, **given, release=True)(model.parameters(), lr=lr)


def none_released(model: nn.Module) -> bool:
    return all(parameter.grad is not None for parameter in model.parameters())


class Doubled(SGD):
    """A step of its own, which treats each parameter by itself."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


class Renamed(SGD):
    """Keeps the step of a known class."""


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (getattr(torch.optim, name), {}) for name in ("Adam", "AdamW", "SGD", "Adagrad", "NAdam", "Adadelta")},
    **{name: (getattr(torch.optim, name), {}) for name in ("Adamax", "ASGD", "RAdam", "Rprop", "Adafactor")},
    **{f"AdamW, {name}": (AdamW, {name: True}) for name in ("foreach", "fused", "amsgrad")},
    "SGD, momentum": (SGD, {"momentum": 0.9}),
    "SGD, nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "Adafactor of transformers": (Adafactor, {"scale_parameter": False, "relative_step": False}),
    **{
        f"bitsandbytes {name}": (getattr(bitsandbytes.optim, name), {})
        for name in ("AdamW", "AdamW32bit", "PagedAdamW", "Lion", "AdEMAMix")
    },
    "renamed": (Renamed, {}),
    "trusted": (Doubled, {}),
}
EIGHT_BIT = {
    name: (kind, {"momentum": 0.9} if name in ("LARS8bit", "SGD8bit") else {})
    for name, kind in sorted(vars(bitsandbytes.optim).items())
    if name.endswith("8bit") and name != "Optimizer8bit"
}
assert {"AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit", "RMSprop8bit", "LAMB8bit"} < EIGHT_BIT.keys()


@pytest.mark.parametrize("name", slow_except([*KINDS, *EIGHT_BIT][::4], [*KINDS, *EIGHT_BIT]))
def test_weights_and_state_are_the_plain_classs(name: str) -> None:
    kind, options = (KINDS | EIGHT_BIT)[name]
    plain_model, plain = run(kind, options)
    model, optimizer = run(low_memory_optimizer(kind, release=True, trust=name == "trusted"), options)
    assert tiny.largest_difference(model, network()) > 0
    assert tiny.largest_difference(model, plain_model) == 0.0
    assert same(optimizer.state_dict(), plain.state_dict())
    states = tree_leaves([*optimizer.state.values()])
    assert any(getattr(state, "dtype", None) == torch.uint8 for state in states) is (name in EIGHT_BIT)


@pytest.mark.slow  # it compiles a kernel for each shape
# of torch 2.13, when its compiler is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_torchao(name: str) -> None:
    kind = getattr(pytest.importorskip("torchao.optim"), name)
    models = [run(one, {}, steps=2)[0] for one in (kind, low_memory_optimizer(kind, release=True, trust=True))]
    assert tiny.largest_difference(*models) == 0.0


def causal_rows(count: int = 16) -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in tiny.rows(count)]


def albert() -> nn.Module:
    """Its layers share their weights."""
    sizes = {"vocab_size": 100, "embedding_size": 32, "hidden_size": 32, "num_attention_heads": 2}
    rest = {"intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 64, "num_labels": 3}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**sizes, **rest, **dropouts))


def wide_bert() -> nn.Module:
    """Its embeddings and its layers are large enough for 8-bit states."""
    return tiny.bert(hidden_size=64)


def make_trainer(
    model: nn.Module, folder: Path, is_released: bool, *, rows: Any = None, callbacks: Any = (), **settings: Any
) -> Trainer:
    common = {"optim": "adamw_torch_fused", "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 2}
    common |= {"per_device_train_batch_size": 4, "lr_scheduler_type": "cosine"}
    args = tiny.arguments(folder, **{**common, **settings})
    chosen = {"optimizer_cls_and_kwargs": low_memory_optimizer(args, model, release=True)} if is_released else {}
    data = tiny.rows(16) if rows is None else rows
    GlobalOptimManager.get_instance().initialize()  # what stock leaves there concerns the next 8-bit optimizer
    return Trainer(model=model, args=args, train_dataset=data, callbacks=list(callbacks), **chosen)


@pytest.mark.parametrize(
    ("build", "runs", "settings"),
    [
        (wide_bert, 1, {}),
        (wide_bert, 1, {"optim": "paged_adamw_8bit"}),
        (wide_bert, 1, {"optim": "adamw_torch", "adam_beta1": 0.8, "bf16": True, **checkpointing_arguments()}),
        (wide_bert, 2, {"optim": "adamw_8bit"}),
        (lambda: tiny.llama(tie_word_embeddings=True), 1, {"rows": causal_rows()}),
        (albert, 1, {}),
    ],
    ids=["fused", "paged", "bf16-checkpointing", "second run", "tied", "shared layers"],
)
def test_training_is_the_plain_optimizers(build: Any, runs: int, settings: dict[str, Any], tmp_path: Path) -> None:
    trainers = []
    for is_released in (False, True):
        trainer = make_trainer(build(), tmp_path, is_released, **settings)
        for _ in range(runs):
            trainer.train()
        trainers.append(trainer)
    plain, ours = trainers
    assert tiny.largest_difference(ours.model, build()) > 0
    assert tiny.largest_difference(plain.model, ours.model) == 0.0
    assert same(plain.optimizer.optimizer.state_dict(), ours.optimizer.optimizer.state_dict())


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_checkpoints_go_both_ways(tmp_path: Path, optim: str) -> None:
    def trained(folder: str, is_released: bool, resume: str | None = None) -> nn.Module:
        saving = {"save_strategy": "steps", "save_steps": 2, "optim": optim}
        trainer = make_trainer(wide_bert(), tmp_path / folder, is_released, **saving)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    straight = trained("plain", False)
    assert tiny.largest_difference(straight, trained("released", True)) == 0.0
    for start, is_released in (("plain", True), ("released", False)):
        resumed = trained("resumed", is_released, str(tmp_path / start / "checkpoint-2"))
        assert tiny.largest_difference(straight, resumed) == 0.0


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


def test_only_the_largest_gradient_lives_and_the_estimate_knows(tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    settings = {"batch_size": 1, "seq_len": 8, "precision": "fp32", "max_grad_norm": 0.0}
    peaks, estimated = [], []
    for is_released in (False, True):
        model = tiny.llama(**sizes, num_attention_heads=4, num_key_value_heads=4)
        estimated.append(estimate(model, **settings, gradient_release=is_released).components["gradients"])
        tracker = LiveGradients(model)
        make_trainer(model, tmp_path, is_released, rows=causal_rows(8)).train()
        peaks.append(tracker.peak_bytes)
    sizes_bytes = [parameter.nbytes for parameter in model.parameters()]
    assert peaks == [sum(sizes_bytes), max(sizes_bytes)] == [919_808, 131_072]
    norms = 2 * 4 + 1  # 256 bytes each; the allocator that is replayed gives out 512 at least
    assert estimated == [919_808 + norms * 256, 131_072]


def test_each_tensor_is_clipped_by_itself() -> None:
    model, plain_model = network(), network()
    plain = AdamW(plain_model.parameters(), lr=1e-3)
    optimizer = low_memory_optimizer(AdamW, release=True, max_tensor_norm=0.01)(model.parameters(), lr=1e-3)
    for step in range(3):
        backward(plain_model, step, 10)
        norms = [nn.utils.clip_grad_norm_(parameter, 0.01) for parameter in plain_model.parameters()]
        plain.step()
        plain.zero_grad()
        backward(model, step, 10)
        optimizer.step()
        assert max(norms) > 0.01
        # the norm of the norms, summed in another order
        torch.testing.assert_close(optimizer.last_grad_norm(), torch.stack(norms).norm(), rtol=1e-6, atol=0)
    assert tiny.largest_difference(model, plain_model) == 0.0


def test_step_hooks_run_once_per_step() -> None:
    """By the undocumented mark ``hooked`` on a step that runs hooks: seen in torch 2.13."""
    AdamW(network().parameters())  # torch wraps a class's step when the first one is built
    assert AdamW.step.hooked
    model, optimizer = released(AdamW)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert calls == ["before", "after"] * 2


def taken_back(pair: Any) -> Any:
    pair[1].handle.remove()
    return pair


@pytest.mark.parametrize(
    "made_plain",
    [taken_back, copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["handle", "copy", "pickle"],
)
def test_without_its_hooks_it_is_a_plain_optimizer(made_plain: Callable[[Any], Any]) -> None:
    model, optimizer = made_plain(run(low_memory_optimizer(AdamW, release=True), {}, steps=1))
    plain_model, plain = run(AdamW, {}, steps=1)
    for trained, own in ((model, optimizer), (plain_model, plain)):
        backward(trained)
        assert none_released(trained)
        own.step()
    assert tiny.largest_difference(plain_model, model) == 0.0
    assert optimizer.last_grad_norm() is None
    optimizer.handle.remove()  # there is nothing more to undo


def test_a_state_that_is_loaded_ends_the_step() -> None:
    """After a backward pass that nobody stepped; the norms of its gradients are forgotten with it."""
    model, optimizer = released(max_tensor_norm=math.inf)
    saved = copy.deepcopy(optimizer.state_dict())
    backward(model, factor=100.0)
    optimizer.load_state_dict(saved)
    expected = copy.deepcopy(model)
    backward(expected)
    backward(model)
    optimizer.step()
    norms = [parameter.grad.norm() for parameter in expected.parameters()]
    torch.testing.assert_close(optimizer.last_grad_norm(), torch.stack(norms).norm(), rtol=1e-6, atol=0)


def twice(layer: nn.Module, *, use_reentrant: bool) -> None:
    hidden = checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=use_reentrant)
    checkpoint(layer, hidden, use_reentrant=use_reentrant).sum().backward()


def without_a_step(layer: nn.Module) -> None:
    for _ in range(2):
        layer(torch.ones(4)).sum().backward()


@pytest.mark.parametrize("use", [lambda layer: twice(layer, use_reentrant=True), without_a_step])
def test_a_second_gradient_within_a_step_is_noticed(use: Callable[[nn.Module], None]) -> None:
    """Of reentrant checkpointing, and of a second backward pass."""
    layer, optimizer = released(model=nn.Linear(4, 4, bias=False))
    twice(layer, use_reentrant=False)
    optimizer.step()
    with pytest.raises(RuntimeError) as error:
        use(layer)
    assert str(error.value) == (
        "a parameter of shape (4, 4) got a second gradient within one step of ReleasedSGD; expected one backward pass "
        "per optimizer.step(), and no reentrant checkpointing. Pass use_reentrant=False, call optimizer.step() "
        "after each backward pass, an interrupted one included, or where another optimizer trains the model by now, "
        "handle.remove() of this one."
    )
    optimizer.step()
    layer.zero_grad()
    layer(torch.ones(4)).sum().backward()


def refused(other: str) -> str:
    return str(Refusal("gradient release", other, *TECHNIQUES["gradient release"].refused[other]))


def fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate.Accelerator(cpu=True, mixed_precision="fp16")


def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


@pytest.mark.parametrize(("tell", "other"), [(fp16, "fp16"), (two_processes, "DDP")])
def test_what_cannot_work_is_noticed_in_the_first_backward_pass(
    tell: Any, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch)
    model, optimizer = released()
    with pytest.raises(RuntimeError) as error:
        backward(model)
    assert str(error.value) == refused(other)
    assert optimizer.last_grad_norm() is None
    assert tiny.largest_difference(model, network()) == 0.0
    if other == "DDP":
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        model.zero_grad()
        backward(model)
        optimizer.step()


def test_accumulation_is_noticed_in_the_first_backward_pass(tmp_path: Path) -> None:
    model, settings = tiny.bert(), {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    chosen = (low_memory_optimizer(SGD, release=True), {"lr": 0.1})
    with pytest.raises(RuntimeError) as error:
        tiny.train(model, tiny.rows(16), tmp_path, trainer_optimizer_cls_and_kwargs=chosen, **settings)
    assert str(error.value) == refused("accumulation")
    assert tiny.largest_difference(model, tiny.bert()) == 0.0
