"""16-bit weights: updates are float32's bit for bit, rounding is unbiased or loses nothing, runs resume exactly."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim.optimizer import GlobalOptimManager
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt import EmbeddingBitsCallback, PrecisionCallback, attach, low_memory_optimizer
from technique_table import same

pytestmark = [
    # bitsandbytes on a CPU
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    # torch 2.13 about bitsandbytes 0.50.2
    pytest.mark.filterwarnings("ignore:_check_is_size will be removed:FutureWarning"),
]

SHAPES = ((2100, 1000), (5000,), (33,), (), (3, 1024))  # two slices of the first, the last block of 256 broken


def weights(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """Return bfloat16 numbers in a dtype, and a last parameter in float32."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in (*SHAPES, (50, 100))]
    return [nn.Parameter(value.to(dtype)) for value in values[:-1]] + [nn.Parameter(values[-1].float())]


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in (*SHAPES, (50, 100))]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]


def train(optimizer: Any, parameters: list[nn.Parameter], steps: int = 3, *, start: int = 0) -> None:
    """Step with given gradients, in the backward pass where gradients are released."""
    for seed in range(start, start + steps):
        if hasattr(optimizer, "last_grad_norm"):
            pairs = zip(parameters, gradients(seed), strict=True)
            sum((parameter * gradient.to(parameter.dtype)).sum() for parameter, gradient in pairs).backward()
        else:
            for parameter, gradient in zip(parameters, gradients(seed), strict=True):
                parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def float_weight(optimizer: Any, parameter: nn.Parameter) -> torch.Tensor:
    """Return the float32 weight: the 16-bit one and what rounding cut off, joined as integers."""
    if parameter.dtype == torch.float32:
        return parameter.detach()
    upper = parameter.detach().view(torch.int16).int() * 2**16
    return (upper + optimizer.state[parameter]["compensation"]).view(torch.float32)


def same_state(optimizer: Any, parameter: nn.Parameter, plain: Any, master: nn.Parameter) -> bool:
    own = {key: value for key, value in optimizer.state[parameter].items() if key != "compensation"}
    return same(own, plain.state[master])


of_bitsandbytes = bitsandbytes.optim
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd, momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adamw 8 bits": (of_bitsandbytes.AdamW8bit, {}),
    "paged adamw 8 bits": (of_bitsandbytes.PagedAdamW8bit, {}),
}
MORE: dict[str, tuple[Any, dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, {"fused": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    **{name: (getattr(torch.optim, name), {}) for name in ("Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax")},
    **{name: (getattr(torch.optim, name), {}) for name in ("ASGD", "Rprop", "Adam")},
    **{name: (getattr(of_bitsandbytes, name), {}) for name in ("AdamW", "Lion8bit", "RMSprop8bit", "Adagrad8bit")},
    **{name: (getattr(of_bitsandbytes, name), {}) for name in ("Lion", "PagedAdamW", "PagedLion8bit", "Adam8bit")},
    "sgd 8 bits": (of_bitsandbytes.SGD8bit, {"momentum": 0.9}),
}


@pytest.mark.parametrize("released", [False, True], ids=["plain", "released"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(*case, id=name) for name, case in CASES.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()],
)
def test_weights_and_state_are_those_of_float32(kind: Any, options: Any, released: bool) -> None:
    parameters, masters = weights(), weights(torch.float32)
    rounded = low_memory_optimizer(kind, rounding="kahan")
    optimizer = (low_memory_optimizer(rounded, release=True) if released else rounded)(
        groups(parameters), lr=1e-3, **options
    )
    plain = kind(groups(masters), lr=1e-3, **options)
    train(optimizer, parameters)
    train(plain, masters)
    for parameter, master in zip(parameters, masters, strict=True):
        assert torch.equal(float_weight(optimizer, parameter), master.detach())
        assert same_state(optimizer, parameter, plain, master)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, of_bitsandbytes.AdamW8bit])
def test_stochastic_rounding_takes_one_of_the_two_neighbours(kind: Any) -> None:
    parameters, masters = weights(), weights(torch.float32)
    optimizer, plain = (
        low_memory_optimizer(kind, rounding="stochastic")(groups(parameters), lr=1e-3),
        kind(groups(masters), lr=1e-3),
    )
    train(optimizer, parameters, 1)
    train(plain, masters, 1)
    ups, expected = 0, 0.0
    for parameter, master in zip(parameters[:-1], masters[:-1], strict=True):
        assert same_state(optimizer, parameter, plain, master)
        towards_zero = ((master.detach().view(torch.int32) >> 16) << 16).view(torch.float32)
        away = (((master.detach().view(torch.int32) >> 16) + 1) << 16).view(torch.float32)
        up = parameter.detach().float() == away
        assert torch.equal(parameter.detach().float(), torch.where(up, away, towards_zero))
        ups += int(up.sum())
        expected += (master.detach().view(torch.int32) % 2**16).double().sum().item() / 2**16
    assert ups == pytest.approx(expected, abs=5 * (2_108_106 / 4) ** 0.5)  # five standard deviations at most
    assert torch.equal(parameters[-1], masters[-1])  # float32


def fifty_updates(kind: Any, **options: Any) -> torch.Tensor:
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = kind([weight], lr=1e-4, **options)
    for _ in range(50):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    return weight.detach().float()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {}), (of_bitsandbytes.AdamW8bit, {"weight_decay": 0.0})],
    ids=["sgd", "adamw 8 bits"],
)
def test_fifty_small_updates_of_one(kind: Any, options: dict[str, Any]) -> None:
    assert fifty_updates(kind, **options).unique().tolist() == [1.0]  # the plain class rounds each of them away
    stochastic = fifty_updates(low_memory_optimizer(kind, rounding="stochastic"), **options)
    assert stochastic.mean().item() == pytest.approx(1.005, abs=5 * 0.0063 / 4096**0.5)  # five standard errors
    kahan = fifty_updates(low_memory_optimizer(kind, rounding="kahan"), **options)
    assert kahan.unique().tolist() == [1.0078125]  # the nearest to 1.005


def test_random_numbers_are_its_own_and_the_same_in_each_process() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        parameters = weights()
        optimizer = low_memory_optimizer(torch.optim.SGD, rounding="stochastic")(parameters, lr=1e-3)
        before = torch.get_rng_state()
        train(optimizer, parameters)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(parameters)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def model(seed: int = 0) -> nn.Module:
    return tiny.bert(seed, vocab_size=200, hidden_dropout_prob=0.1).bfloat16()


def trained(folder: Any, way: Callable[..., Any] | None, resume: str | None = None, **given: Any) -> Trainer:
    callbacks = given.pop("callbacks", [EmbeddingBitsCallback()])
    GlobalOptimManager.get_instance().initialize()
    settings = {"optim": "paged_adamw_8bit", "learning_rate": 1e-3, "per_device_train_batch_size": 4, "max_steps": 4}
    args = tiny.arguments(folder, **{**settings, **given})
    built = model()
    chosen = {} if way is None else {"optimizer_cls_and_kwargs": way(args, built)}
    trainer = attach(Trainer(model=built, args=args, train_dataset=tiny.rows(16), callbacks=callbacks, **chosen))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_arguments_that_are_not_the_trainers_own_are_refused(tmp_path: Path) -> None:
    other = tiny.arguments(tmp_path, optim="sgd")
    with pytest.raises(ValueError, match=r"^optim=") as error:
        trained(
            tmp_path,
            lambda args, model: low_memory_optimizer(other, model, rounding="stochastic"),
            optim="adamw_torch",
            callbacks=[],
        )
    assert str(error.value) == (
        "optim='adamw_torch' names torch.optim.adamw.AdamW, and the Trainer has a class that was made of "
        "torch.optim.sgd.SGD; expected the one that its arguments name, in all runs. Make the class of "
        "args=trainer.args, or leave optim as it was"
    )


def inner(trainer: Trainer) -> Any:
    return trainer.optimizer.optimizer


def test_a_resumed_run_equals_the_straight_one(tmp_path: Path) -> None:
    """Its random numbers go on where they were."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    straight = trained(tmp_path, partial(low_memory_optimizer, rounding="stochastic"), **saving)
    resumed = trained(
        tmp_path, partial(low_memory_optimizer, rounding="stochastic"), str(tmp_path / "checkpoint-2"), **saving
    )
    assert tiny.largest_difference(straight.model, resumed.model) == 0.0
    assert same(inner(straight).state_dict(), inner(resumed).state_dict())
    assert inner(straight).state_dict()["rounding_updates"] > 0


def test_dequantised_states_keep_what_rounding_cut_off(tmp_path: Path) -> None:
    trainer = trained(tmp_path, lambda args, model: low_memory_optimizer(args, model, rounding="kahan"), callbacks=[])
    embedding = trainer.model.get_input_embeddings().weight
    inner(trainer).state[embedding]["compensation"].fill_(7)
    attach(trainer, EmbeddingBitsCallback())
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    state = inner(trainer).state[embedding]
    assert state["state1"].dtype == torch.float32
    assert state["compensation"].unique().tolist() == [7]


def test_under_autocast_the_weights_stay_in_16_bits(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        partial(low_memory_optimizer, rounding="stochastic"),
        bf16=True,
        callbacks=[precision := PrecisionCallback()],
        max_steps=1,
    )
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    assert precision.changes == []
    trained(tmp_path, None, bf16=True, callbacks=[precision := PrecisionCallback()], max_steps=1)
    assert [change.name for change in precision.changes] == ["master_weights"]


def test_checkpoints_go_both_ways() -> None:
    kinds = (
        torch.optim.AdamW,
        low_memory_optimizer(torch.optim.AdamW, rounding="stochastic"),
        low_memory_optimizer(torch.optim.AdamW, rounding="kahan"),
    )
    for start in kinds:
        parameters = weights()
        saved = start(groups(parameters), lr=1e-3)
        train(saved, parameters, 2)
        for go_on in kinds:
            copied = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            optimizer = go_on(groups(copied), lr=1e-3)
            optimizer.load_state_dict(pickle.loads(pickle.dumps(saved.state_dict())))
            if go_on is not torch.optim.AdamW and start is not torch.optim.AdamW:
                assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
            train(optimizer, copied, 1, start=2)
            assert optimizer.state[copied[0]]["step"] == 3
