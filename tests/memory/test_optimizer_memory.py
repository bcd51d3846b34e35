"""Optimizer state against the optimizers that the stock Trainer builds, byte for byte; what a step takes on top."""

from __future__ import annotations

import importlib.util
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bitsandbytes.optim.ademamix import AdEMAMix
from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer
from transformers.training_args import OptimizerNames

import tiny
from hf_memopt.memory.optimizers import (
    OptimizerMemory,
    ParameterFacts,
    clipping_temporaries,
    optimizer_memory,
    parameter_facts,
)
from hf_memopt.memory.optimizers import state_and_temporaries as optimizer_module
from hf_memopt.memory.optimizers.formulas import ELEMENTWISE, FAMILIES
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.techniques.optimizers import sixteen_bit_weights
from hf_memopt.techniques.optimizers.embedding_bits import override_embedding_bits

LOW_RANK = {"optim_args": "rank=8,update_proj_gap=1,scale=2.0", "optim_target_modules": "all-linear"}
CASES = {  # name: further TrainingArguments
    "adamw_torch": {},
    "adamw_torch_fused": {},
    "sgd": {},
    "sgd, momentum": {"optim_args": "momentum=0.9"},
    "sgd, nesterov and decay": {"optim_args": "momentum=0.9,nesterov=true", "weight_decay": 0.1},
    "adagrad": {},
    "adagrad, decay": {"weight_decay": 0.1},
    "rmsprop": {},
    "rmsprop, everything": {"optim_args": "momentum=0.9,centered=true", "weight_decay": 0.1},
    "adafactor": {},
    "adafactor, decay": {"weight_decay": 0.1},
    "adamw_bnb_8bit": {},
    "adamw_8bit": {},
    "paged_adamw_32bit": {},
    "paged_adamw_8bit": {},
    "ademamix": {},
    "ademamix_8bit": {},
    "paged_ademamix_32bit": {},
    "paged_ademamix_8bit": {},
    "lion_32bit": {},
    "lion_8bit": {},
    "paged_lion_32bit": {},
    "paged_lion_8bit": {},
    "rmsprop_bnb": {},
    "rmsprop_bnb_32bit": {},
    "rmsprop_bnb_8bit": {},
    "schedule_free_adamw": {},
    "schedule_free_radam": {},
    "schedule_free_sgd": {},
    "stable_adamw": {},
    "grokadamw": {},
    "lomo": {},
    "adalomo": {},
    "galore_adamw": LOW_RANK,
    "galore_adamw, reverse": {**LOW_RANK, "optim_args": "rank=2,update_proj_gap=1,proj_type=reverse_std"},
    "galore_adamw, full": {**LOW_RANK, "optim_args": "rank=8,update_proj_gap=1,proj_type=full"},
    "galore_adamw_layerwise": LOW_RANK,
    "galore_adafactor": LOW_RANK,
    "apollo_adamw": LOW_RANK,
    "apollo_adamw, singular vectors": {**LOW_RANK, "optim_args": "rank=8,update_proj_gap=1,proj=svd,scale_type=tensor"},
    "apollo_adamw_layerwise": LOW_RANK,
}
PACKAGES = {  # what runs only where a further package is installed, and its distribution
    "schedule_free": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
}
NOT_ESTIMABLE = {
    "adamw_torch_xla": "it runs on XLA devices; expected an optimizer for CUDA GPUs. Pass optim='adamw_torch_fused'",
    "adamw_torch_npu_fused": (
        "it runs on Ascend NPUs; expected an optimizer for CUDA GPUs. Pass optim='adamw_torch_fused'"
    ),
    "adamw_anyprecision": (
        "it needs torchdistx, which is archived and does not load with today's torch; expected an optimizer that can "
        "run. Pass optim='adamw_torch_fused'"
    ),
    "adamw_torch_4bit": (
        "torchao compiles its step, and its temporaries are decided by the compiler; expected an optimizer whose step "
        "is known. Pass optim='adamw_bnb_8bit'"
    ),
    "adamw_torch_8bit": (
        "torchao compiles its step, and its temporaries are decided by the compiler; expected an optimizer whose step "
        "is known. Pass optim='adamw_bnb_8bit'"
    ),
    "galore_adamw_8bit": (
        "galore-torch 1.0 passes bitsandbytes 0.50 arguments of an older version (percentile_clipping=100 arrives "
        "as max_unorm); expected an optimizer that runs as intended. Pass optim='galore_adamw'"
    ),
    "galore_adamw_8bit_layerwise": (
        "galore-torch 1.0 passes bitsandbytes 0.50 arguments of an older version (percentile_clipping=100 arrives "
        "as max_unorm); expected an optimizer that runs as intended. Pass optim='galore_adamw_layerwise'"
    ),
    "galore_adafactor_layerwise": (
        "stock Trainer cannot build it (it passes a learning rate and leaves relative_step=True); expected an "
        "optimizer that it can build. Pass optim='galore_adamw_layerwise'"
    ),
}
SCALARS_BYTES = 128  # norms, means, root mean squares: single numbers that are alive at a peak
WARNINGS = [
    "ignore:Paged optimizers are not supported on CPU:UserWarning",  # bitsandbytes: falls back to unpaged, as wanted
    "ignore:This implementation of AdamW is deprecated:FutureWarning",  # galore_torch 1.0 about itself
    "ignore:.*torch.cuda.amp.autocast:FutureWarning",  # grokadamw 0.1.2
    "ignore:CUDA is not available or torch_xla is imported:UserWarning",  # the same, without a GPU
]
pytestmark = [pytest.mark.filterwarnings(text) for text in WARNINGS]


def models(dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return tiny models: parameters above and below 4,096 elements, tall, wide, one-dimensional, tied, frozen."""
    bert = tiny.bert(vocab_size=203, intermediate_size=256)
    llama = tiny.llama(vocab_size=203, intermediate_size=160, tie_word_embeddings=True)
    llama.model.layers[0].requires_grad_(False)
    return {"bert": bert.to(dtype), "llama": llama.to(dtype)}


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


def backward(model: nn.Module) -> None:
    ids = torch.randint(5, 100, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = ids if hasattr(model, "lm_head") else torch.tensor([0, 1])
    model(input_ids=ids, labels=labels).loss.backward()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a state: nested, and in the projectors of low-rank optimizers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner)
    elif hasattr(value, "ortho_matrix"):
        yield from tensors(value.ortho_matrix)


def state_sizes(optimizer: Any) -> list[int]:
    """Return the bytes of each storage in the state, in order of creation; Trainer's layer-wise dummy has many."""
    states: list[Any] = [optimizer.state]
    if hasattr(optimizer, "optimizer_dict"):
        states = [inner.state for inner in optimizer.optimizer_dict.values()]
    states += [group["state"] for group in optimizer.param_groups if "state" in group]  # GrokAdamW
    states += [getattr(optimizer, name, {}) for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")]  # AdaLOMO
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors(states)}
    return list(storages.values())


class StepTracker(TorchDispatchMode):
    """The peak of the bytes of storages while it is on; ``before`` are those of the storages that were known already.

    ``UntypedStorage._cdata`` is the address of a storage (torch 2.6 to 2.13).
    """

    def __init__(self, *known: Any) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.alive = self.peak = 0
        for tensor in tensors(list(known)):
            if tensor.untyped_storage()._cdata not in self.seen:
                self.born(tensor.untyped_storage())
        self.before = self.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                self.born(tensor.untyped_storage())
        return out

    def born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def died(_: Any) -> None:
            self.seen.discard(key)
            self.alive -= size

        weakref.finalize(storage, died, None)


def peak(groups: tuple[tuple[int, ...], ...]) -> int:
    return max(map(sum, groups), default=0)


def memory_of(facts: list[ParameterFacts], optim: str, *, cuda: bool = True, **settings: Any) -> OptimizerMemory:
    return optimizer_memory(facts, StepSettings(optim=optim, max_grad_norm=0, **settings), cuda=cuda)


def estimated(model: nn.Module, case: str, **settings: Any) -> OptimizerMemory:
    return memory_of(parameter_facts(model), case.split(",")[0], **CASES[case], **settings)


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
            backward(model)
        elif "lomo" in optim:
            gradients(model)
            optimizer.step_num = getattr(optimizer, "step_num", 0) + 1
            optimizer.grad_func(None)
        else:
            gradients(model)
            optimizer.step()
    return optimizer


# ---- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("case", CASES)
def test_state_is_byte_exact(case: str, name: str, dtype: torch.dtype, tmp_path: Any, monkeypatch: Any) -> None:
    model = models(dtype)[name]
    found = state_sizes(stepped(model, case, tmp_path, monkeypatch))
    expected = list(estimated(model, case, cuda=False).state)
    assert sorted(found) == sorted(expected)
    assert sum(found) == sum(expected)


@pytest.mark.parametrize(("name", "model_name"), [("adamw_torch_fused", "bert"), ("adafactor", "llama")])
def test_state_is_in_order_of_creation(name: str, model_name: str, tmp_path: Any, monkeypatch: Any) -> None:
    model = models(torch.float32)[model_name]
    assert state_sizes(stepped(model, name, tmp_path, monkeypatch)) == list(estimated(model, name).state)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "ademamix_8bit", "lion_8bit", "rmsprop_bnb_8bit"])
def test_embedding_bits_are_those_of_the_technique(optim: str, bits: int, tmp_path: Any) -> None:
    model = models(torch.float32)["llama"]
    optimizer = built(model, optim, tmp_path)
    if bits == 32:
        override_embedding_bits(model, optimizer)
    else:  # as where the class is passed to the Trainer, which then registers nothing
        GlobalOptimManager.get_instance().initialize()
    gradients(model)
    optimizer.step()
    assert sorted(state_sizes(optimizer)) == sorted(estimated(model, optim, embedding_bits=bits).state)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(("stable", "grok"))])
def test_a_gpu_holds_what_a_cpu_holds_but_for_what_is_on_the_host(case: str) -> None:
    model = models(torch.float32)["bert"]
    on_gpu, on_cpu = estimated(model, case, cuda=True), estimated(model, case, cuda=False)
    assert on_gpu.state_bytes + on_gpu.host_state_bytes == on_cpu.state_bytes


@pytest.mark.parametrize(
    ("optim", "state", "host_state_bytes"),
    [
        ("adamw_torch_fused", (4, 400_000, 400_000, 4, 399_996, 399_996), 0),
        ("adamw_torch", (400_000, 400_000, 399_996, 399_996), 8),
        ("adagrad", (400_000, 399_996), 8),
        ("paged_adamw_32bit", (399_996, 399_996), 800_000),
        ("paged_adamw_8bit", (1024, 1024, 1564, 1564, 99_999, 99_999, 1564, 1564), 200_000),
        ("paged_lion_8bit", (1024, 1564, 99_999, 1564), 100_000),
        ("paged_ademamix_8bit", (1024, 1024, 3128, 1564, 3128, 1564, 199_998, 99_999), 300_000),
        ("stable_adamw", (400_000, 400_000, 4, 1, 4, 399_996, 399_996, 4, 1, 4), 0),
        ("grokadamw", (), 3 * 799_996),
        ("lomo", (), 0),
    ],
)
def test_what_is_on_the_gpu(optim: str, state: tuple[int, ...], host_state_bytes: int) -> None:
    parameters = [ParameterFacts("a", (100_000,), 4, False), ParameterFacts("b", (99_999,), 4, False)]
    memory = memory_of(parameters, optim)
    assert (memory.state, memory.host_state_bytes) == (state, host_state_bytes)


def test_paged_state_begins_at_100_000_elements() -> None:
    """Pins the bound where nothing is paged without a GPU: bitsandbytes 0.50.0 and 0.50.2."""
    assert "p.numel() < 1e5" in inspect.getsource(Optimizer8bit.get_state_buffer)
    assert "p.numel() < 1e5" in inspect.getsource(AdEMAMix._get_state_double_buffer)


# ---- the step

FOREACH = [
    case for case in CASES if case.startswith(("adamw_torch", "sgd", "adagrad", "rmsprop")) and "bnb" not in case
]
NOT_ON_A_CPU = ("bnb", "bit", "ademamix", "lomo", "layerwise")  # bitsandbytes' kernels are others; steps in backward


def measured_step(model: nn.Module, optimizer: Any) -> int:
    """Return the peak of a step's temporaries."""
    gradients(model)
    states = [optimizer.state, *[group["state"] for group in optimizer.param_groups if "state" in group]]
    with StepTracker(states, list(model.parameters()), [p.grad for p in model.parameters()]) as tracker:
        optimizer.step()
    return tracker.peak - tracker.before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("case", FOREACH)
def test_foreach_step_of_a_gpu(case: str, name: str, dtype: torch.dtype, tmp_path: Any, monkeypatch: Any) -> None:
    model = models(dtype)[name]
    optimizer = stepped(model, case, tmp_path, monkeypatch)
    for group in optimizer.param_groups:
        group["foreach"] = not group.get("fused")  # the default on a GPU
    assert abs(measured_step(model, optimizer) - peak(estimated(model, case).step)) <= SCALARS_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("case", [case for case in CASES if not any(part in case for part in NOT_ON_A_CPU)])
def test_step_of_a_cpu(case: str, name: str, dtype: torch.dtype, tmp_path: Any, monkeypatch: Any) -> None:
    model = models(dtype)[name]
    optimizer = stepped(model, case, tmp_path, monkeypatch)
    memory = estimated(model, case, cuda=False)
    assert abs(measured_step(model, optimizer) - peak(memory.step)) <= SCALARS_BYTES


@pytest.mark.parametrize("shape", [(7,), (40, 30), (30, 40), (6, 5, 3)])
@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch", "rmsprop"])
def test_one_parameter_by_itself(optim: str, shape: tuple[int, ...], tmp_path: Any) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

    model = One()
    optimizer = built(model, optim, tmp_path)
    for group in optimizer.param_groups:
        group["foreach"] = True
    gradients(model)
    optimizer.step()
    (alone,) = memory_of(parameter_facts(model), optim, gradient_release=True).alone
    group = max(alone.step, key=sum)
    assert abs(measured_step(model, optimizer) - sum(group)) <= 24  # single numbers


def test_groups_of_a_foreach_step() -> None:
    parameters = [
        ParameterFacts("a", (10, 10), 4, False),
        ParameterFacts("norm", (10,), 4, False, decays=False),
        ParameterFacts("half", (10, 10), 2, False),
    ]
    # one parameter group after the other, in it one dtype after the other; the last dtype's until the next are there
    assert memory_of(parameters, "adamw_torch").step == ((400,), (400, 200), (40,))
    assert memory_of(parameters, "adamw_torch_fused").step == ()
    assert memory_of(parameters, "sgd", weight_decay=0.1).step == ((400,), (400, 200))


def test_gradient_release_has_the_memory_of_each_parameter() -> None:
    facts = parameter_facts(models(torch.float32)["bert"])
    for optim in ("adamw_torch", "adamw_torch_fused", "adafactor", "adamw_bnb_8bit"):
        released = memory_of(facts, optim, gradient_release=True)
        whole = memory_of(facts, optim)
        assert (released.state, released.host_state_bytes) == (whole.state, whole.host_state_bytes)
        assert (released.releases_gradients, whole.releases_gradients) == (True, False)
        assert [one.step for one in released.alone] == [memory_of([fact], optim).step for fact in facts]
        assert whole.alone == ()


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_what_steps_within_backward_releases_gradients(optim: str) -> None:
    facts = parameter_facts(models(torch.bfloat16)["bert"])
    memory = memory_of(facts, optim, optim_target_modules="all-linear")
    assert memory.releases_gradients
    assert len(memory.alone) == len(facts)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "paged_ademamix_8bit", "lion_8bit", "galore_adamw_layerwise"])
def test_the_memory_of_each_parameter_adds_up(optim: str) -> None:
    facts = parameter_facts(models(torch.float32)["bert"])
    released = not optim.endswith("layerwise")
    whole = memory_of(facts, optim, optim_target_modules="all-linear", gradient_release=released)
    assert len(whole.alone) == len(facts)
    assert sorted(size for memory in whole.alone for size in memory.state) == sorted(whole.state)
    assert sum(memory.host_state_bytes for memory in whole.alone) == whole.host_state_bytes


def test_lomo_casts_what_is_in_16_bits() -> None:
    half, full = ParameterFacts("a", (10, 20), 2, False), ParameterFacts("b", (10, 20), 4, False)
    assert [one.step for one in memory_of([half, full], "lomo").alone] == [((800, 800),), ()]
    assert memory_of([half, full], "adalomo").step == ((800, 800, 800, 40, 80), (800, 800, 40, 80))


def test_first_step_of_radam_divides_by_nothing() -> None:
    memory = memory_of([ParameterFacts("a", (10,), 4, False)], "schedule_free_radam")
    assert (memory.first_step, memory.step) == ((), ((40,),))


def test_galore_says_what_is_not_counted() -> None:
    fact = ParameterFacts("a.weight", (8, 4), 4, False, is_linear=True)
    note = "GaLore: the workspace of cuSOLVER's singular value decomposition is not counted"
    assert memory_of([fact], "galore_adamw", optim_target_modules=["a"]).notes == (note,)
    assert memory_of([fact], "apollo_adamw", optim_target_modules=["a"]).notes == ()


# ---- clipping and scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_clipping_takes_norms_and_no_gradient(dtype: torch.dtype) -> None:
    model = models(dtype)["bert"]
    gradients(model)
    grads = [parameter.grad for parameter in model.parameters()]
    with StepTracker(grads, list(model.parameters())) as tracker:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    facts = parameter_facts(model)
    partial_norms = len(facts) * 4  # of the CUDA kernel alone, one chunk per tensor here
    assert abs(tracker.peak - tracker.before - (sum(clipping_temporaries(facts)) - partial_norms)) <= 16


def test_clipping_temporaries() -> None:
    facts = [ParameterFacts("a", (1000, 1000), 4, False), ParameterFacts("b", (10,), 4, False)]
    # 2 tensors x 16 chunks x 4 bytes; 2 norms; their stack; the total norm, the coefficient, the clamped one
    assert clipping_temporaries(facts) == (128, 4, 4, 8, 4, 4, 4)
    assert clipping_temporaries([]) == ()


# ---- facts of a model


def test_facts_know_embeddings_ties_linears_and_decay() -> None:
    facts = {fact.name: fact for fact in parameter_facts(models(torch.bfloat16)["llama"])}
    assert "lm_head.weight" not in facts  # tied
    assert not any(".layers.0." in name for name in facts)  # frozen
    assert facts["model.embed_tokens.weight"] == ParameterFacts(
        "model.embed_tokens.weight", (203, 32), 2, is_embedding=True, is_linear=False, decays=True
    )
    assert facts["model.layers.1.mlp.up_proj.weight"].is_linear
    assert not facts["model.norm.weight"].decays


def test_decay_is_that_of_the_stock_trainer(tmp_path: Any) -> None:
    """Pins the names that ``Trainer.get_decay_parameter_names`` leaves out (5.8.1, 5.17.0, 5.23.0)."""
    model = models(torch.float32)["bert"]
    trainer = Trainer(model=model, args=tiny.arguments(tmp_path))
    names = set(trainer.get_decay_parameter_names(model))
    assert {fact.name for fact in parameter_facts(model) if fact.decays} == names
    assert 0 < len(names) < len(parameter_facts(model))
    norms = ("norm", "normal", "final_norm", "rmsnorm", "post_layernorm", "norm_layers")
    named = nn.ModuleDict({name: nn.Linear(2, 2) for name in norms} | {"by_class": nn.LayerNorm(2)})
    names = set(Trainer.get_decay_parameter_names(None, named))  # its first argument is not used
    assert {fact.name for fact in parameter_facts(named) if fact.decays} == names
    assert len(names) == 2


@pytest.mark.parametrize(("shape", "elements"), [((), 1), ((3, 4), 12), ((3, 0), 0)])
def test_elements_and_bytes(shape: tuple[int, ...], elements: int) -> None:
    fact = ParameterFacts("a", shape, 2, False)
    assert (fact.elements, fact.size_bytes) == (elements, 2 * elements)


# ---- names


def test_every_name_is_estimable_or_says_why_not() -> None:
    """Every name of the installed transformers is in one of the tables of this file."""
    covered = {case.split(",")[0] for case in CASES}
    assert {name.value for name in OptimizerNames} == covered | set(NOT_ESTIMABLE)
    assert not covered & set(NOT_ESTIMABLE)


@pytest.mark.parametrize("optim", NOT_ESTIMABLE)
def test_not_estimable(optim: str) -> None:
    with pytest.raises(NotEstimableError) as error:
        memory_of([], optim)
    assert str(error.value) == f"not estimable: optim={optim!r}: {NOT_ESTIMABLE[optim]}"


def test_stock_cannot_build_layerwise_galore_adafactor(tmp_path: Any) -> None:
    skip_missing("galore")
    with pytest.raises(ValueError) as error:
        built(models(torch.float32)["bert"], "galore_adafactor_layerwise", tmp_path, **LOW_RANK)
    assert str(error.value) == "Cannot combine manual `lr` and `relative_step=True` options"


def test_unknown_name() -> None:
    with pytest.raises(ValueError) as error:
        memory_of([], "adamw_8bits")
    assert str(error.value) == (
        "optim='adamw_8bits' is not an optimizer whose memory is known; expected one of "
        f"{', '.join([*FAMILIES, *NOT_ESTIMABLE])}. Did you mean 'adamw_8bit'? Pass optim='adamw_8bit'"
    )


TARGET = ParameterFacts("layer.weight", (8, 4), 4, False, is_linear=True)


@pytest.mark.parametrize(
    ("optim", "settings", "message"),
    [
        (
            "galore_adamw",
            {},
            "optim_target_modules=None names no module, which optim='galore_adamw' needs; expected names, a regular "
            "expression or 'all-linear'. Pass optim_target_modules='all-linear'",
        ),
        (
            "apollo_adamw",
            {"optim_target_modules": ["attention"]},
            "optim_target_modules=['attention'] matches no trainable nn.Linear; expected the name of at least one. "
            "Pass optim_target_modules='all-linear'",
        ),
        (
            "galore_adamw",
            {"optim_target_modules": "all-linear", "optim_args": "proj_type=up"},
            "optim_args='proj_type=up' is not a projection; expected std, reverse_std, left, right or full. "
            "Pass optim_args='proj_type=std'",
        ),
        (
            "apollo_adamw",
            {"optim_target_modules": "all-linear", "optim_args": "proj_type=full"},
            "not estimable: optim='apollo_adamw', optim_args='proj_type=full': apollo-torch does not implement it; "
            "expected std, reverse_std, left or right. Pass optim_args='proj_type=std'",
        ),
        (
            "sgd",
            {"optim_args": "momentum"},
            "optim_args='momentum' cannot be parsed at 'momentum'; expected name=value pairs, separated by commas. "
            "Pass, for example, optim_args='rank=64,update_proj_gap=100'",
        ),
        (
            "sgd",
            {"optim_args": "momentum=much"},
            "optim_args='momentum=much' is not a number; expected a number after '='. Pass optim_args='momentum=0'",
        ),
    ],
)
def test_bad_input(optim: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        memory_of([TARGET], optim, **settings)
    assert str(error.value) == message


@pytest.mark.parametrize("targets", [["dense"], r".*\.(query|value)", "all-linear", "all_linear", ["output"]])
def test_targets_are_those_of_the_stock_trainer(targets: Any, tmp_path: Any) -> None:
    skip_missing("galore")
    model = models(torch.float32)["bert"]
    optimizer = built(model, "galore_adamw", tmp_path, optim_args="rank=4", optim_target_modules=targets)
    gradients(model)
    optimizer.step()
    memory = memory_of(parameter_facts(model), "galore_adamw", optim_args="rank=4", optim_target_modules=targets)
    assert state_sizes(optimizer) == list(memory.state)


# ---- 16-bit weights


ROUNDED = {case: arguments for case, arguments in CASES.items() if case.split(",")[0] in ELEMENTWISE}


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert optimizer_module.SLICE_ELEMENTS == sixteen_bit_weights.SLICE_ELEMENTS
    for module in (optimizer_module, sixteen_bit_weights):
        monkeypatch.setattr(module, "SLICE_ELEMENTS", 1024)


def rounded_optimizer(model: nn.Module, case: str, rounding: Any, tmp_path: Any) -> Any:
    GlobalOptimManager.get_instance().initialize()
    args = tiny.arguments(tmp_path, optim=case.split(",")[0], learning_rate=1e-3, **CASES[case])
    chosen = sixteen_bit_weights.rounded_optimizer(args, model, rounding)
    return Trainer(model=model, args=args, optimizer_cls_and_kwargs=chosen).create_optimizer()


def assert_rounding_is_estimated(case: str, rounding: str, tmp_path: Any, *, foreach: bool, mixed: bool) -> None:
    """One layer is frozen, and of mixed weights the vectors are float32."""
    model = models(torch.bfloat16)["llama"]
    for parameter in model.parameters():
        if mixed and parameter.dim() == 1:
            parameter.data = parameter.data.float()
    optimizer = rounded_optimizer(model, case, rounding, tmp_path)
    for group in optimizer.param_groups:
        if foreach:
            group["foreach"] = True
    first, later = measured_step(model, optimizer), measured_step(model, optimizer)
    memory = estimated(model, case, rounding=rounding, cuda=foreach)
    sizes = state_sizes(optimizer)
    counters = memory.host_state_bytes // 4 if foreach else 0  # on a GPU torch's are on the host
    assert sorted([*memory.state, *[4] * counters]) == sorted(sizes)
    assert abs(later - peak(memory.step)) <= SCALARS_BYTES
    if not case.startswith("adagrad"):  # its constructor makes a state of 16 bits
        # temporaries beside the whole state are estimated; the last parameter may have fewer of them
        assert first - sum(sizes) <= peak(memory.first_step) + SCALARS_BYTES


@pytest.mark.parametrize(
    ("case", "rounding"),
    [("adamw_torch", "stochastic"), ("adamw_torch_fused", "kahan"), ("paged_adamw_8bit", "kahan")],
)
def test_rounding(case: str, rounding: str, tmp_path: Any, small_slices: None) -> None:
    assert_rounding_is_estimated(case, rounding, tmp_path, foreach=False, mixed=True)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True], ids=["all", "mixed"])
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("case", ROUNDED)
def test_rounding_with_every_optimizer(
    case: str, rounding: str, mixed: bool, tmp_path: Any, small_slices: None
) -> None:
    assert_rounding_is_estimated(case, rounding, tmp_path, foreach=False, mixed=mixed)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("case", [case for case in FOREACH if "fused" not in case])
def test_rounding_with_foreach_slices(case: str, rounding: str, tmp_path: Any, small_slices: None) -> None:
    assert_rounding_is_estimated(case, rounding, tmp_path, foreach=True, mixed=True)


@pytest.mark.parametrize("case", ["adamw_torch", "rmsprop, everything"])
def test_temporaries_of_rounding_are_at_most_64_mib(case: str, tmp_path: Any) -> None:
    model = nn.Linear(2048, 1200, bias=False).bfloat16()  # two slices
    optimizer = rounded_optimizer(model, case, "kahan", tmp_path)
    memory = estimated(model, case, rounding="kahan", cuda=False)
    assert peak(memory.step) <= peak(memory.first_step) <= 64 * 2**20
    # the first slice finds no state yet, which is estimated to be there
    assert measured_step(model, optimizer) <= memory.state_bytes + peak(memory.first_step) + SCALARS_BYTES
    assert abs(measured_step(model, optimizer) - peak(memory.step)) <= SCALARS_BYTES


def test_released_rounding_has_the_memory_of_each_parameter() -> None:
    facts = parameter_facts(models(torch.bfloat16)["bert"])
    released = memory_of(facts, "paged_adamw_8bit", gradient_release=True, rounding="stochastic")
    assert [one.step for one in released.alone] == [((4 * fact.elements, 4 * fact.elements),) for fact in facts]
    assert released.state == memory_of(facts, "paged_adamw_8bit").state  # no byte more
    kahan = memory_of(facts, "paged_adamw_8bit", rounding="kahan")
    assert kahan.state_bytes - released.state_bytes == sum(2 * fact.elements for fact in facts)
    alone = memory_of(facts, "paged_adamw_8bit", rounding="kahan", gradient_release=True).alone
    assert sum(memory.state_bytes for memory in alone) == kahan.state_bytes


def test_rounding_leaves_float32_weights_alone() -> None:
    facts = parameter_facts(models(torch.float32)["bert"])
    for optim in ("adamw_torch", "adamw_8bit"):
        assert memory_of(facts, optim, rounding="kahan") == memory_of(facts, optim)


def test_rounding_needs_an_optimizer_that_goes_element_by_element() -> None:
    with pytest.raises(ValueError) as error:
        memory_of([TARGET], "adafactor", rounding="kahan")
    assert str(error.value) == (
        "optim='adafactor', rounding='kahan' are incompatible: its update does not go element by element; expected one "
        f"of {', '.join(ELEMENTWISE)}. Pass optim='adamw_8bit', or rounding='nearest'"
    )
