"""Checkpointing policies: gradients bit by bit, saved bytes, kept operations, the estimate, undo, the Trainer."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import heads
import peft
import pytest
import torch
import torch._functorch.config as functorch
from slow_cases import slow_except
from torch import nn
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers.modeling_layers import GradientCheckpointingLayer

import tiny
from hf_memopt import CheckpointingCallback, attach, estimate, stream_layers
from hf_memopt.techniques import checkpoint_layers
from hf_memopt.training.binding import checkpointing_arguments, enable_checkpointing, versions
from hf_memopt.training.techniques.checkpointing.selective import (
    KEPT_ATTENTIONS,
    KEPT_PRODUCTS,
    activation_memory_budget,
)
from hf_memopt.types import Change
from technique_table import same

POLICIES = ("full", "every_2", "first_1", "selective")
KINDS = ("llama-causal-lm", "t5", "vit", "gpt2", "eager", "sdpa", "autocast", "adapters")


def examples(name: str = "bert", count: int = 8) -> dict[str, torch.Tensor]:
    """One batch of the examples of ``heads``."""
    batch: dict[str, torch.Tensor] = default_data_collator(heads.HEADS[name].examples(count))
    return batch


def build(name: str) -> Any:
    """A model of ``heads`` in training mode, without the key-value cache that checkpointing switches off."""
    torch.manual_seed(0)
    model = heads.HEADS[name].build()
    for module in model.modules():  # T5's decoder has a configuration of its own
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model.train()


def gradients(model: nn.Module, batch: dict[str, torch.Tensor], *, is_autocast: bool = False) -> list[torch.Tensor]:
    """Of all parameters that have one, from one seed of the dropout; the backward pass is outside of autocast."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = model(**batch).loss
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the distinct storages, weights apart, that the graph of one forward pass holds."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    del loss
    return sum(tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in weights)


def flags(model: nn.Module) -> list[bool]:
    """Which layers are checkpointed, in stock's order."""
    return [
        module.gradient_checkpointing for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """What every module holds of its own, hooks included."""
    return [
        {key: value for key, value in vars(module).items() if "checkpoint" in key}
        | {"hooks": len(module._forward_hooks)}
        for module in model.modules()
    ]


def with_dropout(attention: str) -> Any:
    dropouts = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    return tiny.bert(**dropouts, attn_implementation=attention).train()


# of transformers 5.23, which peft 0.21 asks by its former name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "policy"), slow_except([*zip(KINDS, POLICIES * 2, strict=True)], product(KINDS, POLICIES))
)
def test_gradients_are_those_without_checkpointing_bit_by_bit(name: str, policy: str) -> None:
    """Dropout draws the same numbers again, within attention too; autocast is on again where layers are recomputed."""
    model = build(name) if name in heads.HEADS else with_dropout("sdpa" if name in ("sdpa", "autocast") else "eager")
    if name == "adapters":
        adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
        model = peft.get_peft_model(model, adapters)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    batch, before = examples(name if name in heads.HEADS else "bert"), attributes(model)
    expected = gradients(model, batch, is_autocast=name == "autocast")
    handle = checkpoint_layers(model, policy)
    assert any(flags(model))
    assert same(gradients(model, batch, is_autocast=name == "autocast"), expected)
    assert len(expected) > 0
    if name == "adapters":
        assert sum(hooks["hooks"] for hooks in attributes(model)) == 1  # stock's, which adapters may need
    handle.remove()
    assert attributes(model) == before


@pytest.mark.parametrize("policy", [*POLICIES, "streamed"])
def test_running_statistics_count_a_batch_once(policy: str) -> None:
    model, expected = tiny.conformer().to(tiny.DEVICE), tiny.conformer().to(tiny.DEVICE)
    batch = {"input_values": torch.randn(4, 2000), "labels": torch.tensor([0, 1, 1, 0])}
    batch = {name: values.to(tiny.DEVICE) for name, values in batch.items()}
    with stream_layers(model) if policy == "streamed" else checkpoint_layers(model, policy):
        for _ in range(2):
            assert same(gradients(model, batch), gradients(expected, batch))
    state = expected.state_dict()
    assert same(model.state_dict(), state)
    assert {int(one) for name, one in state.items() if "num_batches" in name} == {2}


def test_bytes_saved_by_layers() -> None:
    model = tiny.llama(num_hidden_layers=4, use_cache=False).train()
    batch = examples("llama-causal-lm")
    plain = saved_bytes(model, batch)
    saved = {}
    for policy in ("first_1", "first_2", "first_3", "first_4", "full", "every_2", "every_4"):
        with checkpoint_layers(model, policy):
            saved[policy] = saved_bytes(model, batch)
    assert saved_bytes(model, batch) == plain
    layer = plain - saved["first_1"]  # each layer saves the same, less its input
    assert layer > 0
    assert [saved[f"first_{count}"] for count in (1, 2, 3)] == [plain - count * layer for count in (1, 2, 3)]
    assert saved["full"] == saved["first_4"] <= plain - 4 * layer  # nor are the rotary angles held by any graph
    assert saved["every_2"] == saved["first_2"]
    assert saved["every_4"] == saved["first_1"]


def test_every_second_layer_is_the_one_that_stock_counts() -> None:
    for name in ("bert", "t5", "bart"):
        model, stock = build(name), build(name)
        checkpoint_layers(model, "every_2")
        enable_checkpointing(stock, {"use_reentrant": False, "every_n_layers": 2})
        if versions.can_offload_checkpoints():  # both options came with one version
            assert flags(model) == flags(stock)
        assert flags(model) == [index % 2 == 0 for index in range(len(flags(model)))]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_handle_puts_a_model_that_was_checkpointed_back_as_it_was(policy: str) -> None:
    model = build("bert")
    enable_checkpointing(model, {"use_reentrant": False})
    before = attributes(model)
    handle = checkpoint_layers(model, policy)
    assert attributes(model) != before
    handle.remove()
    assert attributes(model) == before


def forward_end_bytes(config: Any, policy: str | None, **settings: Any) -> tuple[int, int]:
    """Allocated bytes when the forward pass ends, and operations of the step."""
    prepare = () if policy is None else (partial(checkpoint_layers, policy=policy),)
    given = {"batch_size": 4, "seq_len": 48, "gpu": "RTX 3060 12GB", "precision": "bf16", **settings}
    found = estimate(config, **given, prepare=prepare)
    start = [event for event, phase in found.timeline.phases if phase == "backward"][-1]
    return int(found.timeline.components[start - 1].sum()), found.flops


def test_the_estimator_tells_policies_apart() -> None:
    config = tiny.llama_config(num_hidden_layers=4, architectures=["LlamaForCausalLM"])
    found = {policy: forward_end_bytes(config, policy) for policy in (None, *POLICIES)}
    held = {policy: bytes_ for policy, (bytes_, _) in found.items()}
    assert held["full"] < held["selective"] < held[None]
    assert held["full"] < held["every_2"] < held["first_1"] < held[None]
    flops = {policy: operations for policy, (_, operations) in found.items()}
    layer = flops["first_1"] - flops[None]
    assert layer > 0
    assert flops["full"] == flops[None] + 4 * layer
    assert flops["every_2"] == flops[None] + 2 * layer
    assert flops["selective"] == flops[None]  # every product is kept, and this attention has no dropout


def train(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    """Train a tiny BERT with dropout for three steps."""
    dropouts = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    asked = {"max_steps": 3, "trainer_callbacks": list(callbacks), **settings}
    return tiny.train(tiny.bert(**dropouts), tiny.rows(), folder, **asked)


def test_the_policy_replaces_that_of_the_arguments_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hf_memopt")
    callback = CheckpointingCallback("first_1")
    trainer = train(tmp_path, callback, **checkpointing_arguments())
    assert flags(trainer.model) == [True, False]
    reason = "the callback replaces the arguments' own"
    assert callback.changes == [Change("checkpointing", {"use_reentrant": False}, "first_1", reason)]
    assert [record.getMessage() for record in caplog.records if "Checkpointing" in record.getMessage()] == [
        "CheckpointingCallback recomputes 1 of 2 layers, by policy 'first_1'"
    ]


class Budgets(TrainerCallback):
    """Note torch's setting between training steps."""

    def __init__(self) -> None:
        self.outside: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.outside.append(functorch.activation_memory_budget)


class Watched(nn.Module):
    """Note torch's setting within forward passes; raise at the second if told."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.fails = fails
        self.inside: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.inside.append(functorch.activation_memory_budget)
        if self.fails and len(self.inside) == 2:
            raise RuntimeError("the second step fails")
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


def budget_trainer(folder: Path, callback: TrainerCallback, model: nn.Module, **settings: Any) -> Trainer:
    args = tiny.arguments(folder, max_steps=2, per_device_train_batch_size=2, **settings)
    # the callback only asks whether the model is compiled; compiling one takes a minute
    args.torch_compile = settings.get("torch_compile", True)
    rows = [{"x": torch.tensor([float(i), 1.0]), "labels": torch.tensor(0.0)} for i in range(4)]
    return Trainer(model=model, args=args, train_dataset=rows, callbacks=[callback, Budgets()])


@pytest.mark.parametrize("fails", [False, True])
def test_a_budget_is_set_within_training_steps_alone(tmp_path: Path, fails: bool) -> None:
    model = Watched(fails=fails)
    callback = CheckpointingCallback("budget_0.25")
    trainer = attach(budget_trainer(tmp_path, callback, model))
    model.inside.clear()  # attach has probed the loss
    if fails:
        with pytest.raises(RuntimeError, match=r"^the second step fails$"):
            trainer.train()
    else:
        trainer.train()
    assert model.inside == [0.25, 0.25]
    assert functorch.activation_memory_budget == 1.0
    (budgets,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, Budgets))
    assert set(budgets.outside) == {1.0}
    assert callback.handle is not None
    callback.handle.remove()
    assert "training_step" not in vars(trainer)


def test_the_names_of_operations_are_those_of_the_installed_torch_and_bitsandbytes() -> None:
    importlib.import_module("bitsandbytes")  # it registers its operations
    for name in KEPT_PRODUCTS | KEPT_ATTENTIONS:
        library, _, operation = name.rpartition("::")
        if library in ("aten", "bitsandbytes"):
            overload = getattr(getattr(torch.ops, library), operation).default
            assert overload.name() == name
            drops = [argument.name for argument in overload._schema.arguments if argument.name == "dropout_p"]
            assert len(drops) == (name in KEPT_ATTENTIONS), name
        else:
            assert library == "flash_attn" or getattr(torch.ops.higher_order, operation).name() == name


# of torch 2.13, when its compiler is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_graph_saves_less_within_a_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(256, 64)
    found = {}
    for fraction in (1.0, 0.5, 0.0):
        torch._dynamo.reset()  # the name that torch documents for compiling anew
        with activation_memory_budget(fraction):
            compiled = torch.compile(model, backend="aot_eager_decomp_partition")
            held: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):  # noqa: B023
                loss = compiled(x).square().mean()
            model.zero_grad()
            loss.backward()
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in held if t.data_ptr() not in weights}
        found[fraction] = sum(storages.values()), [parameter.grad.clone() for parameter in model.parameters()]
    assert found[0.0][0] < found[0.5][0] < found[1.0][0]
    for fraction in (0.5, 0.0):
        assert all(torch.equal(*pair) for pair in zip(found[fraction][1], found[1.0][1], strict=True))
    assert functorch.activation_memory_budget == 1.0
