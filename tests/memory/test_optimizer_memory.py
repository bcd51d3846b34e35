"""What an optimizer's step takes on top of its state, measured of the real classes; the facts that decide it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import peak_bytes
from slow_cases import slow_except
from test_optimizer_state import CASES, WARNINGS, gradients, model_of, state_sizes, stepped, tensors
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt import low_memory_optimizer
from hf_memopt.prediction.memory.optimizers import (
    OptimizerMemory,
    ParameterFacts,
    optimizer_memory,
    parameter_facts,
)
from hf_memopt.prediction.memory.optimizers import state_and_temporaries as optimizer_module
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.state_chunks import SMALLEST_BYTES
from hf_memopt.training.techniques.optimizers import sixteen_bit_weights
from hf_memopt.types import StepSettings

SCALARS_BYTES = 128  # norms, means, root mean squares: single numbers that are alive at a peak
pytestmark = [pytest.mark.filterwarnings(text) for text in WARNINGS]


def temporaries(run: Callable[[], Any], *known: Any) -> int:
    """Return the most bytes that are alive beside storages that were known before."""
    tracker = StorageTracker(device_type="cpu", flops=False)
    for tensor in tensors(list(known)):
        tracker.add(tensor)
    before = sum(delta for _, delta in tracker.events)
    with tracker:
        run()
    return peak_bytes(tracker) - before


def peak(groups: tuple[tuple[int, ...], ...]) -> int:
    return max(map(sum, groups), default=0)


def memory_of(facts: list[ParameterFacts], optim: str, **settings: Any) -> OptimizerMemory:
    return optimizer_memory(facts, StepSettings(optim=optim, max_grad_norm=0, **settings))


def estimated(model: nn.Module, case: str, **settings: Any) -> OptimizerMemory:
    return memory_of(parameter_facts(model), case.split(",")[0], **CASES[case], **settings)


def measured_step(model: nn.Module, optimizer: Any) -> int:
    """Return the peak of a step's temporaries."""
    gradients(model)
    states = [optimizer.state, *[group["state"] for group in optimizer.param_groups if "state" in group]]
    return temporaries(optimizer.step, states, list(model.parameters()), [p.grad for p in model.parameters()])


def as_on_a_gpu(optimizer: Any) -> Any:
    """Let torch's optimizers take all tensors of a group together, which they do on a GPU by themselves."""
    for group in optimizer.param_groups:
        group["foreach"] = not group.get("fused")
    return optimizer


NOT_ON_A_CPU = ("bnb", "bit", "ademamix", "lomo", "stable", "grok")  # other kernels; steps in backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [case for case in CASES if not any(part in case for part in NOT_ON_A_CPU)])
def test_step(case: str, dtype: torch.dtype, tmp_path: Any, monkeypatch: Any) -> None:
    model = model_of(dtype)
    measured = measured_step(model, as_on_a_gpu(stepped(model, case, tmp_path, monkeypatch)))
    found = peak(estimated(model, case).step)
    assert abs(found - measured) <= SCALARS_BYTES


A, B = ParameterFacts("a", (10, 20), 2, False), ParameterFacts("b", (10, 20), 4, False)
NORM = ParameterFacts("norm", (10,), 4, False, decays=False)
STEPS: dict[str, tuple[list[ParameterFacts], str, dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "fused": ([A, B], "adamw_torch_fused", {}, ()),
    # one parameter group after the other, in it one dtype after the other; the last dtype's until the next are there
    "foreach": ([B, NORM, A], "adamw_torch", {}, ((800,), (800, 400), (40,))),
    "decay": ([B, A], "sgd", {"weight_decay": 0.1}, ((800,), (800, 400))),
    "no decay": ([B, A], "sgd", {}, ()),
    "casts of the weights in 16 bits": ([A, B], "adalomo", {}, ((800, 800, 800, 40, 80), (800, 800, 40, 80))),
    # three averages of a parameter come from the host, and the last parameter's are let go as they are assigned
    "from the host": ([B, B], "grokadamw", {}, ((800, 800), (800,) * 5, (800,) * 6, (800,) * 6)),
    "RAdam": ([B], "schedule_free_radam", {}, ((800,),)),
}


@pytest.mark.parametrize(("facts", "optim", "settings", "step"), STEPS.values(), ids=STEPS)
def test_groups_of_a_step(facts: Any, optim: str, settings: dict[str, Any], step: Any) -> None:
    memory = memory_of(facts, optim, **settings)
    assert memory.step == step
    assert memory.first_step == (() if optim == "schedule_free_radam" else step)  # it divides by nothing yet


def test_state_on_the_host_visits_in_chunks_that_step_alone() -> None:
    facts = [
        ParameterFacts("norm", (64,), 4, is_embedding=False, decays=False),
        *(ParameterFacts(f"{place}", (2**size,), 4, is_embedding=False) for place, size in enumerate((23, 23, 25, 12))),
    ]
    for optim in ("adamw_torch", "adamw_torch_fused", "adafactor", "adamw_bnb_8bit"):
        waiting, whole = memory_of(facts, optim, optimizer_state_on_host=True), memory_of(facts, optim)
        assert waiting.state == tuple(size for size in whole.state if size < SMALLEST_BYTES)
        moved = [size for chunk in waiting.chunks for size in chunk.state]
        assert sorted([*waiting.state, *moved]) == sorted(whole.state)
        assert waiting.host_state_bytes == whole.host_state_bytes + sum(moved)
        assert (waiting.step, waiting.first_step, waiting.releases_gradients) == ((), (), False)
        assert [one.step for one in waiting.alone] == [memory_of([fact], optim).step for fact in [*facts[1:], facts[0]]]
    foreach = memory_of(facts, "adamw_torch", optimizer_state_on_host=True)
    assert [chunk.state for chunk in foreach.chunks] == [  # 2**23 floats have 64 MiB of state, 2**25 more than a chunk
        (2**25,) * 4,
        (2**27,) * 2,
        (2**14,) * 2,
    ]
    assert [chunk.step for chunk in foreach.chunks] == [((2**25, 2**25),), ((2**27,),), ((2**14,), (256,))]


def test_decay_is_that_of_the_stock_trainer(tmp_path: Any) -> None:
    """Pins the names that ``Trainer.get_decay_parameter_names`` leaves out (5.8.1, 5.17.0, 5.23.0)."""
    model = tiny.bert()
    names = set(Trainer(model=model, args=tiny.arguments(tmp_path)).get_decay_parameter_names(model))
    assert {fact.name for fact in parameter_facts(model) if fact.decays} == names
    assert 0 < len(names) < len(parameter_facts(model))
    norms = ("norm", "normal", "final_norm", "rmsnorm", "post_layernorm", "norm_layers")
    named = nn.ModuleDict({name: nn.Linear(2, 2) for name in norms} | {"by_class": nn.LayerNorm(2)})
    names = set(Trainer.get_decay_parameter_names(None, named))  # its first argument is not used
    assert {fact.name for fact in parameter_facts(named) if fact.decays} == names
    assert len(names) == 2


ROUNDED = ("adamw_torch", "adamw_torch_fused", "sgd, momentum", "adagrad", "rmsprop, everything")


def rounded(model: nn.Module, case: str, rounding: Any, tmp_path: Any) -> Any:
    args = tiny.arguments(tmp_path, optim=case.split(",")[0], learning_rate=1e-3, **CASES[case])
    chosen = low_memory_optimizer(args, model, rounding=rounding)
    return as_on_a_gpu(Trainer(model=model, args=args, optimizer_cls_and_kwargs=chosen).create_optimizer())


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("case", slow_except([*ROUNDED][::3], ROUNDED))
def test_step_of_rounded_weights(case: str, rounding: str, tmp_path: Any, monkeypatch: Any) -> None:
    """Slices are small, one layer is frozen, and vectors are float32."""
    assert optimizer_module.SLICE_ELEMENTS == sixteen_bit_weights.SLICE_ELEMENTS
    for module in (optimizer_module, sixteen_bit_weights):
        monkeypatch.setattr(module, "SLICE_ELEMENTS", 1024)
    model = model_of(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.float()
    optimizer = rounded(model, case, rounding, tmp_path)
    first, later = measured_step(model, optimizer), measured_step(model, optimizer)
    memory = estimated(model, case, rounding=rounding)
    assert abs(later - peak(memory.step)) <= SCALARS_BYTES
    if not case.startswith("adagrad"):  # its constructor makes a state of 16 bits
        # temporaries beside the whole state are estimated; the last parameter may have fewer of them
        assert first - sum(state_sizes(optimizer)) <= peak(memory.first_step) + SCALARS_BYTES
