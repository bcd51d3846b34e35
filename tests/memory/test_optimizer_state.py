"""Optimizer state in an estimate against the optimizers that the stock Trainer builds, byte for byte."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bitsandbytes.optim.ademamix import AdEMAMix
from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit
from slow_cases import slow_except
from torch import nn
from transformers import LlamaConfig, Trainer
from transformers.training_args import OptimizerNames

import tiny
from hf_memopt import Estimate, NotEstimableError, estimate, low_memory_optimizer
from hf_memopt.components import COMPONENTS

TORCH = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
PLAIN = (
    *(*TORCH, "adafactor"),
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
    *("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit"),
    *("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
    *("stable_adamw", "grokadamw", "lomo", "adalomo"),
)
CASES: dict[str, dict[str, Any]] = {  # a name, and what is said of it: further TrainingArguments
    **{name: {} for name in PLAIN},
    "sgd, momentum": {"optim_args": "momentum=0.9"},
    "sgd, nesterov and decay": {"optim_args": "momentum=0.9,nesterov=true", "weight_decay": 0.1},
    "adagrad, decay": {"weight_decay": 0.1},
    "rmsprop, everything": {"optim_args": "momentum=0.9,centered=true", "weight_decay": 0.1},
    "adafactor, decay": {"weight_decay": 0.1},
}
PAGED = {"paged_adamw_32bit": 8, "paged_adamw_8bit": 2, "paged_lion_8bit": 1, "paged_ademamix_8bit": 3}
PACKAGES = {  # what runs only where a further package is installed, and its distribution
    "schedule_free": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
}
WARNINGS = [
    "ignore:Paged optimizers are not supported on CPU:UserWarning",  # bitsandbytes: falls back to unpaged, as wanted
    "ignore:.*torch.cuda.amp.autocast:FutureWarning",  # grokadamw 0.1.2
    "ignore:CUDA is not available or torch_xla is imported:UserWarning",  # the same, without a GPU
]
pytestmark = [pytest.mark.filterwarnings(text) for text in WARNINGS]


def model_of(dtype: torch.dtype) -> nn.Module:
    """Return a tiny Llama: parameters of 4,096 elements, fewer and more, one-dimensional, tied, frozen."""
    model = tiny.llama(vocab_size=203, intermediate_size=128, tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    return model.to(dtype)


def skip_missing(optim: str) -> None:
    for start, (package, distribution) in PACKAGES.items():
        if optim.startswith(start) and importlib.util.find_spec(package) is None:
            pytest.skip(f"optim={optim!r} runs only where {package} is installed: pip install {distribution}")


def built(model: nn.Module, optim: str, tmp_path: Any, **settings: Any) -> Any:
    """Return the optimizer that the stock Trainer builds."""
    args = tiny.arguments(tmp_path, optim=optim, learning_rate=1e-3, **settings)
    optimizer = Trainer(model=model, args=args).create_optimizer()
    if optim.startswith("schedule_free"):
        optimizer.train()
    return optimizer


def gradients(model: nn.Module) -> None:
    """Give every trainable parameter a gradient, without a backward pass."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a state, which may be nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner)


def state_sizes(optimizer: Any) -> list[int]:
    """Return the bytes of each storage in the state, in order of creation; Trainer's layer-wise dummy has many."""
    states: list[Any] = [optimizer.state]
    if hasattr(optimizer, "optimizer_dict"):
        states = [inner.state for inner in optimizer.optimizer_dict.values()]
    states += [group["state"] for group in optimizer.param_groups if "state" in group]  # GrokAdamW
    states += [getattr(optimizer, name, {}) for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")]  # AdaLOMO
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors(states)}
    return list(storages.values())


def stepped(model: nn.Module, case: str, tmp_path: Any, monkeypatch: Any) -> Any:
    """Return the stock Trainer's optimizer of a case after two steps."""
    optim = case.split(",")[0]
    skip_missing(optim)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # where AdaLOMO puts its state, whatever there is
    if optim == "adalomo":
        model.requires_grad_(True)  # it keeps state for frozen parameters too
    optimizer = built(model, optim, tmp_path, **CASES[case])
    for group in optimizer.param_groups:
        if "triton" in group:
            group["triton"] = False  # torch-optimi's kernels, which a build for CUDA would take on a CPU too
    for _ in range(5 if "radam" in optim else 2):  # RAdam divides by its second moment from the fifth step on
        if "layerwise" in optim:
            ids = torch.randint(5, 100, (2, 8), generator=torch.Generator().manual_seed(0))
            model(input_ids=ids, labels=ids).loss.backward()
        elif "lomo" in optim:
            gradients(model)
            optimizer.step_num = getattr(optimizer, "step_num", 0) + 1
            optimizer.grad_func(None)
        else:
            gradients(model)
            optimizer.step()
    return optimizer


def of_model(model: nn.Module, **settings: Any) -> Estimate:
    return estimate(model, batch_size=1, seq_len=8, gpu="RTX 3090", **{"max_grad_norm": 0, **settings})


def state_bytes(found: Estimate) -> int:
    """Return the most that the state holds on the GPU."""
    return int(found.timeline.components[:, COMPONENTS.index("optimizer state")].max())


def in_blocks(sizes: list[int]) -> int:
    """Return the bytes of tensors in torch's allocator, which rounds each to 512."""
    return sum(-(-size // 512) * 512 for size in sizes)


@pytest.mark.parametrize("dtype", slow_except((torch.float32,), (torch.float32, torch.bfloat16)))
@pytest.mark.parametrize("case", slow_except([*CASES][::4], CASES))
def test_state_is_byte_exact(case: str, dtype: torch.dtype, tmp_path: Any, monkeypatch: Any) -> None:
    model = model_of(dtype)
    optimizer = stepped(model, case, tmp_path, monkeypatch)
    optim, sizes = case.split(",")[0], state_sizes(optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    on_host: list[int] = []
    if optim in TORCH and optim != "adamw_torch_fused":  # counters
        on_host = [size for size in sizes if size == 4]
    elif optim == "grokadamw":
        on_host = sizes
    elif optim == "stable_adamw":  # what its Triton kernels have on top
        sizes = [*sizes, *[4] * len(trained), *([1] * len(trained) if dtype == torch.float32 else [])]
    for size in on_host:
        sizes = [*sizes]
        sizes.remove(size)
    found = of_model(model, optim=optim, **CASES[case])
    assert state_bytes(found) == in_blocks(sizes)
    assert found.host_bytes == sum(on_host)


@pytest.mark.parametrize("mixed", [False, True], ids=["all", "mixed"])
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize(
    "optim", slow_except(("adamw_8bit",), ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "lion_8bit"))
)
def test_state_of_rounded_weights(optim: str, rounding: str, mixed: bool, tmp_path: Any) -> None:
    model: Any = model_of(torch.bfloat16)
    for parameter in model.parameters():
        if mixed and parameter.dim() == 1:
            parameter.data = parameter.data.float()
    GlobalOptimManager.get_instance().initialize()
    args = tiny.arguments(tmp_path, optim=optim, learning_rate=1e-3)
    chosen = low_memory_optimizer(args, model, rounding=rounding)
    optimizer = Trainer(model=model, args=args, optimizer_cls_and_kwargs=chosen).create_optimizer()
    gradients(model)
    optimizer.step()
    found = of_model(model, optim=optim, rounding=rounding, precision="fp32")
    sizes = [size for size in state_sizes(optimizer) if size != 4 or optim != "adamw_torch"]
    assert state_bytes(found) == in_blocks(sizes)


@pytest.mark.parametrize("optim", slow_except(("paged_adamw_8bit",), PAGED))
def test_paged_state_begins_at_100_000_elements(optim: str) -> None:
    """Pins the bound where nothing is paged without a GPU: bitsandbytes 0.50.0 and 0.50.2."""
    assert "p.numel() < 1e5" in inspect.getsource(Optimizer8bit.get_state_buffer)
    assert "p.numel() < 1e5" in inspect.getsource(AdEMAMix._get_state_double_buffer)
    sizes = {"vocab_size": 100_000, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(hidden_size=1, intermediate_size=1, tie_word_embeddings=True, **sizes)
    averages = PAGED[optim]
    found = of_config(config, optim)
    below = of_config(LlamaConfig(**{**config.to_dict(), "vocab_size": 99_999}), optim)
    assert (found.host_bytes, below.host_bytes) == (averages * 100_000, 0)
    assert state_bytes(below) - state_bytes(found) == pytest.approx(averages * 99_999, abs=2048)


def of_config(config: Any, optim: str) -> Estimate:
    return estimate(config, batch_size=1, seq_len=8, gpu="RTX 3090", max_grad_norm=0, optim=optim, embedding_bits=8)


def test_every_name_is_estimable_or_says_why_not() -> None:
    """Of the installed transformers; what is said of the others is in ``refusals.csv``."""
    for optim in {name.value for name in OptimizerNames} - {case.split(",")[0] for case in CASES}:
        with pytest.raises(NotEstimableError, match=f"^not estimable: optim='{optim}': "):
            of_model(tiny.bert(), optim=optim)
