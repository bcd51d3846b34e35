"""Checkpointing policies: gradients bit by bit, saved bytes, what the estimator makes of them, undo, the Trainer."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import heads
import peft
import pytest
import torch
import torch._functorch.config as functorch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers.modeling_layers import GradientCheckpointingLayer

import tiny
from hf_memopt import Change, CheckpointingCallback, attach, checkpoint_layers, estimate, freeze
from hf_memopt.binding import (
    can_offload_checkpoints,
    checkpointing_arguments,
    enable_checkpointing,
)
from technique_table import same

POLICIES = ("full", "every_2", "first_1", "selective")


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


# ---- Gradients and bytes --------------------------------------------------------------------------------------------


def with_dropout(attention: str) -> Any:
    dropouts = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    return tiny.bert(**dropouts, attn_implementation=attention).train()


# of transformers 5.23, which peft 0.21 asks by its former name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama-causal-lm", "t5", "vit", "gpt2", "eager", "sdpa", "autocast", "adapters"])
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


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # torch 2.15
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_frozen_prefix_saves_nothing_under_checkpointing(policy: str) -> None:
    model = tiny.bert(num_hidden_layers=4).train()
    freeze(model, ["embeddings", "layers:0-2"])
    checkpoint_layers(model, policy)
    ours = saved_bytes(model, examples())
    enable_checkpointing(model, {"use_reentrant": False})  # as stock does, with a hook on the embeddings
    assert ours < saved_bytes(model, examples())
    assert [layer.gradient_checkpointing for layer in model.bert.encoder.layer] == [True] * 4


# ---- Which layers ---------------------------------------------------------------------------------------------------


def test_every_second_layer_is_the_one_that_stock_counts() -> None:
    for name in ("bert", "t5", "bart"):
        model, stock = build(name), build(name)
        checkpoint_layers(model, "every_2")
        enable_checkpointing(stock, {"use_reentrant": False, "every_n_layers": 2})
        if can_offload_checkpoints():  # both options came with one version
            assert flags(model) == flags(stock)
        assert flags(model) == [index % 2 == 0 for index in range(len(flags(model)))]


def test_the_first_layers_are_those_of_each_stack_and_a_policy_replaces_another() -> None:
    model = build("t5")
    checkpoint_layers(model, "full")
    checkpoint_layers(model, "first_1")
    layers = (*model.encoder.block, *model.decoder.block)
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False]


# ---- Undo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_handle_puts_a_model_that_was_checkpointed_back_as_it_was(policy: str) -> None:
    model = build("bert")
    enable_checkpointing(model, {"use_reentrant": False})
    before = attributes(model)
    handle = checkpoint_layers(model, policy)
    assert attributes(model) != before
    handle.remove()
    assert attributes(model) == before


def test_the_handle_keeps_no_model_alive() -> None:
    model = build("bert")
    handle = checkpoint_layers(model, "selective")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    handle.remove()


# ---- Refusals -------------------------------------------------------------------------------------------------------


HINTS = {"fulll": "full", "every_0": "every_2", "first_-1": "first_8", "every_2.5": "every_2", "FIRST_2": "first_8"}


def unknown(policy: Any, *, rest: str = "") -> str:
    hint = f" Did you mean {HINTS[policy]!r}?" if policy in HINTS else ""
    return (
        f"policy={policy!r} is unknown; expected 'full', 'selective', 'every_<n>' or 'first_<k>' with a number from 1"
        f"{rest}.{hint} Pass policy='full'"
    )


def unsupported(name: str) -> str:
    return (
        f"policy='full' cannot be applied: {name} does not support checkpointing; expected a model of transformers "
        "with supports_gradient_checkpointing=True. Save memory otherwise, for example: freeze(model, 'embeddings'), "
        "or MicrobatchCallback(max_examples=1)"
    )


def one_by_one(policy: str, name: str) -> str:
    return (
        f"policy={policy!r} needs layers that are switched one by one, and {name} has no stack of transformers' "
        "GradientCheckpointingLayer; expected 'full' or 'selective'. Pass policy='full'"
    )


class OldStyle(transformers.PreTrainedModel):
    """Checkpoints by a flag of its own, in no layer of transformers' class."""

    config_class = transformers.BertConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.gradient_checkpointing = False
        self.post_init()


class Layer(GradientCheckpointingLayer):
    """A layer that nothing counts."""


class InNoStack(OldStyle):
    """Has a checkpointing layer, but in no list."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({"only": Layer()})


class OtherStack(InNoStack):
    """Its only list is one of other layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.others = nn.ModuleList([nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("make", "policy", "message"),
    [
        *((lambda: build("bert"), policy, unknown(policy)) for policy in (*HINTS, 2, None)),
        (
            lambda: build("bert"),
            "budget_0.5",
            "policy='budget_0.5' is for torch.compile, not for the layers of a model; expected 'full', 'every_<n>', "
            "'first_<k>' or 'selective'. Pass CheckpointingCallback('budget_0.5') to a Trainer with "
            "torch_compile=True, or call: activation_memory_budget(0.5)",
        ),
        (lambda: heads_of_albert(), "full", unsupported("AlbertForSequenceClassification")),
        (lambda: nn.Linear(2, 2), "full", unsupported("Linear")),
        *((lambda: OldStyle(tiny.bert_config()), one, one_by_one(one, "OldStyle")) for one in ("first_1", "every_1")),
        (lambda: InNoStack(tiny.bert_config()), "first_1", one_by_one("first_1", "InNoStack")),
        (lambda: OtherStack(tiny.bert_config()), "first_1", one_by_one("first_1", "OtherStack")),
        (
            lambda: build("t5"),
            "first_3",
            "policy='first_3' exceeds the 2 layers of encoder.block and the 2 layers of decoder.block of "
            "T5ForConditionalGeneration; expected a number from 1 to 2. Pass policy='first_2'",
        ),
        (
            lambda: build("t5"),
            "every_5",
            "policy='every_5' exceeds the 4 layers of T5ForConditionalGeneration; expected a number from 1 to 4. "
            "Pass policy='every_4'",
        ),
    ],
)
def test_policies_that_a_model_cannot_have(make: Any, policy: Any, message: str) -> None:
    model = make()
    before = attributes(model)
    with pytest.raises(ValueError) as error:
        checkpoint_layers(model, policy)
    assert str(error.value) == message
    assert attributes(model) == before


def heads_of_albert() -> nn.Module:
    return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**heads.TINY, embedding_size=8))


def test_a_callback_knows_budgets_too() -> None:
    with pytest.raises(ValueError) as error:
        CheckpointingCallback("budget_2")
    rest, hint = ", 'budget_<share from 0 to 1>'", " Did you mean 'budget_0.5'?"
    assert str(error.value) == unknown("budget_2", rest=rest).replace(" Pass", f"{hint} Pass")


def test_offload_is_refused_where_it_cannot_work() -> None:
    both = (
        "policy='selective', offload=True are incompatible: what the policy keeps within the layers stays on the GPU; "
        "expected 'full', 'every_<n>' or 'first_<k>'. Pass offload=False"
    )
    for make in (partial(checkpoint_layers, build("bert")), CheckpointingCallback):
        with pytest.raises(ValueError) as error:
            make(policy="selective", offload=True)
        assert str(error.value) == both
    no_accelerator = (
        "offload=True moves activations from an accelerator to the host, and there is no accelerator; expected a GPU "
        "that torch can use. Pass offload=False"
    )
    too_old = (
        f"offload=True is not known to transformers {transformers.__version__}; expected 5.17 or newer. "
        "Call: pip install -U transformers"
    )
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError) as error:
            checkpoint_layers(build("bert"), "full", offload=True)
        assert str(error.value) == (no_accelerator if can_offload_checkpoints() else too_old)


# ---- Estimates ------------------------------------------------------------------------------------------------------


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


@pytest.mark.skipif(not can_offload_checkpoints(), reason="transformers before 5.17")
def test_the_estimator_sees_what_is_offloaded() -> None:
    config = tiny.llama_config(architectures=["LlamaForCausalLM"])
    given = {"batch_size": 4, "seq_len": 48, "gpu": "RTX 3060 12GB", "precision": "fp32"}
    found = [
        estimate(config, **given, prepare=(partial(checkpoint_layers, policy="first_1", offload=offload),))
        for offload in (False, True)
    ]
    assert [one.host_bytes for one in found] == [0, 2**15]  # the input of the layer, 24,576 bytes, page-locked
    assert found[0].flops == found[1].flops


def test_attention_with_dropout_is_recomputed_whole() -> None:
    config = tiny.bert_config(attention_probs_dropout_prob=0.1, architectures=["BertForSequenceClassification"])
    (_, plain), (_, selective) = (forward_end_bytes(config, policy) for policy in (None, "selective"))
    heads_, width, seq, batch, layers = 2, 16, 48, 4, 2
    assert selective - plain == layers * 2 * (2 * batch * heads_ * seq * seq * width)  # two products of attention


# ---- The callback ---------------------------------------------------------------------------------------------------


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


def test_reentrant_checkpointing_in_the_arguments_is_refused(tmp_path: Path) -> None:
    reentrant = checkpointing_arguments(use_reentrant=True)
    with pytest.raises(ValueError) as error:
        train(tmp_path, CheckpointingCallback(), **reentrant)
    assert str(error.value) == (
        "checkpointing policy and reentrant checkpointing are incompatible: policies need the non-reentrant "
        'variant; expected only one of them. Leave activation_checkpointing_kwargs={"use_reentrant": True} out'
    )


# ---- The budget of torch.compile ------------------------------------------------------------------------------------


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


def test_a_budget_needs_attach_and_can_be_attached_again(tmp_path: Path) -> None:
    callback = CheckpointingCallback("budget_0.25")
    trainer = attach(budget_trainer(tmp_path, callback, Watched()))
    assert callback.handle is not None
    callback.handle.remove()
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    assert str(error.value) == (
        "CheckpointingCallback was passed in callbacks= but never bound to its trainer; expected a bound callback. "
        "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
    )
    attach(trainer)
    trainer.model.inside.clear()  # attach has probed the loss
    trainer.train()
    assert trainer.model.inside == [0.25, 0.25]


def test_a_budget_needs_a_compiled_model(tmp_path: Path) -> None:
    trainer = budget_trainer(tmp_path, CheckpointingCallback("budget_0.5"), Watched(), torch_compile=False)
    with pytest.raises(ValueError) as error:
        attach(trainer)
    assert str(error.value) == (
        "policy='budget_0.5' is a choice that torch.compile makes, and torch_compile=False; expected a compiled model. "
        "Set torch_compile=True, or pass policy='selective'"
    )
