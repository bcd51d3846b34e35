"""Bits of the embeddings' optimizer state: every 8-bit optimizer, every way of passing it, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from bitsandbytes.functional import quantize_blockwise
from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt.techniques.freezing import FreezeCallback
from hf_memopt.techniques.optimizers import EmbeddingBitsCallback, optimizer_state_bytes
from hf_memopt.techniques.optimizers.embedding_bits import override_embedding_bits

pytestmark = [
    # bitsandbytes 0.50.2 on a machine without a GPU
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]

OPTIMIZERS = [getattr(bitsandbytes.optim, name) for name in dir(bitsandbytes.optim) if name.endswith("8bit")]
NEEDS_MOMENTUM = ("SGD8bit", "LARS8bit")


def singleton() -> Any:
    return GlobalOptimManager.get_instance()


class Words(nn.Module):
    """An embedding and two layers, all with 8-bit states by their size; shaped as ``Trainer`` expects a model."""

    def __init__(self, rows: int = 200, columns: int = 64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(rows, columns)
        self.hidden = nn.Linear(columns, 128, bias=False)
        self.head = nn.Linear(128, 64, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.hidden(self.embedding(input_ids).mean(dim=1))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class NoWords(nn.Module):
    """Two layers and no embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(12, 400, bias=False)
        self.b = nn.Linear(400, 12, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.b(torch.tanh(self.a(input_ids.float() / 100)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make(optimizer_class: Any, model: nn.Module, **settings: Any) -> Any:
    momentum = {"momentum": 0.9} if optimizer_class.__name__ in NEEDS_MOMENTUM else {}
    return optimizer_class(model.parameters(), **{"lr": 1e-3, **momentum, **settings})


def step(model: nn.Module, optimizer: Any, count: int = 1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, 199, (8, 12), generator=generator)
        model(input_ids=ids, labels=torch.randint(0, 12, (8,), generator=generator))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def dtypes(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Return the dtype of ``state1`` of each parameter with state, by name."""
    inner = getattr(optimizer, "optimizer", optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: str(state["state1"].dtype)[6:] for parameter, state in inner.state.items() if state}


def train(model: nn.Module, tmp_path: Any, *callbacks: Any, **settings: Any) -> Trainer:
    common = {
        "optim": "adamw_bnb_8bit",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "train_sampling_strategy": "sequential",
        "trainer_callbacks": list(callbacks),
    }
    return tiny.train(model, tiny.rows(32), tmp_path, **{**common, **settings})


def bert(seed: int = 0, **settings: Any) -> nn.Module:
    return tiny.bert(seed, **{"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, **settings})


BERT_EMBEDDINGS = {
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.position_embeddings.weight",
    "bert.embeddings.token_type_embeddings.weight",
}


def in_8_bits(model: nn.Module, optimizer: Any) -> set[str]:
    return {name for name, dtype in dtypes(model, optimizer).items() if dtype == "uint8"}


def large(model: nn.Module) -> set[str]:
    """Return the names of the parameters that bitsandbytes quantises unless it is told not to."""
    return {name for name, parameter in model.named_parameters() if parameter.numel() >= 4096}


# ---- every optimizer, by hand


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS, ids=lambda optimizer_class: optimizer_class.__name__)
def test_every_8_bit_optimizer_keeps_embeddings_in_32_bits(optimizer_class: Any) -> None:
    model = Words()
    optimizer = make(optimizer_class, model)
    override_embedding_bits(model, optimizer)
    step(model, optimizer, 2)
    assert dtypes(model, optimizer) == {
        "embedding.weight": "float32",
        "hidden.weight": "uint8",
        "head.weight": "uint8",
    }


def test_every_8_bit_optimizer_is_in_the_list() -> None:
    assert {optimizer_class.__name__.removeprefix("Paged") for optimizer_class in OPTIMIZERS} == {
        "Adagrad8bit",
        "Adam8bit",
        "AdamW8bit",
        "AdEMAMix8bit",
        "LAMB8bit",
        "LARS8bit",
        "Lion8bit",
        "RMSprop8bit",
        "SGD8bit",
    }


def dequantised_slowly(state: dict[str, Any], number: int) -> torch.Tensor:
    """Look every code up and scale it by its block's maximum, one element after the other."""
    values, scales, table = state[f"state{number}"], state[f"absmax{number}"], state[f"qmap{number}"]
    if scales.dim() == 1:
        values, scales = values[None], scales[None]
    halves = [
        [table[code].item() * scales[half, i // 256].item() for i, code in enumerate(values[half].flatten().tolist())]
        for half in range(len(values))
    ]
    return torch.tensor(halves).reshape(state[f"state{number}"].shape)


@pytest.mark.parametrize("shape", [(200, 64), (199, 63)], ids=["whole blocks", "a broken last block"])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS, ids=lambda optimizer_class: optimizer_class.__name__)
def test_a_trained_8_bit_state_is_dequantised_as_it_stands(optimizer_class: Any, shape: tuple[int, int]) -> None:
    model = Words(*shape)
    optimizer = make(optimizer_class, model)
    step(model, optimizer, 3)
    weight = model.embedding.weight
    former = copy.deepcopy(dict(optimizer.state[weight]))
    others = {name: state for name, state in dtypes(model, optimizer).items() if name != "embedding.weight"}
    assert former["state1"].dtype == torch.uint8
    override_embedding_bits(model, optimizer)
    state = optimizer.state[weight]
    numbers = [number for number in (1, 2) if f"state{number}" in former]
    for number in numbers:
        expected = dequantised_slowly(former, number)
        assert state[f"state{number}"].shape == former[f"state{number}"].shape
        assert expected.abs().max() > 0
        # the slow reference multiplies in float64 and rounds once
        torch.testing.assert_close(state[f"state{number}"], expected, rtol=1e-6, atol=0.0)
    assert state["step"] == former["step"] == 3
    assert not {f"{key}{number}" for key in ("absmax", "qmap") for number in numbers} & set(state)
    step(model, optimizer, 2, seed=1)
    assert dtypes(model, optimizer) == {"embedding.weight": "float32", **others}
    assert optimizer.state[weight]["step"] == 5


def test_ademamix_keeps_two_averages_in_one_state() -> None:
    model = Words(199, 63)
    optimizer = make(bitsandbytes.optim.AdEMAMix8bit, model)
    step(model, optimizer)
    state = optimizer.state[model.embedding.weight]
    blocks = -(-199 * 63 // 256)
    assert (state["state1"].shape, state["absmax1"].shape) == ((2, 199, 63), (2, blocks))
    override_embedding_bits(model, optimizer)
    state = optimizer.state[model.embedding.weight]
    assert (state["state1"].shape, state["state1"].dtype) == ((2, 199, 63), torch.float32)


def test_bitsandbytes_own_embeddings_register_themselves_and_are_moved() -> None:
    model = nn.Sequential(bitsandbytes.nn.StableEmbedding(200, 64), bitsandbytes.nn.Embedding(200, 64))
    assert len(singleton().module_weight_config_triple) == 2
    optimizer = make(bitsandbytes.optim.AdamW8bit, model)
    override_embedding_bits(model, optimizer)
    assert singleton().module_weight_config_triple == []


def test_tied_and_shared_embeddings_count_once() -> None:
    model = Words(128, 64)
    model.decoder = nn.Embedding(128, 64)
    model.decoder.weight = model.embedding.weight
    model.head.weight = model.embedding.weight
    model.hidden = nn.Linear(64, 64, bias=False)
    optimizer = make(bitsandbytes.optim.AdamW8bit, model)
    override_embedding_bits(model, optimizer)
    ids = torch.arange(64).reshape(8, 8)
    model(input_ids=ids, labels=torch.arange(8))["loss"].backward()
    optimizer.step()
    assert dtypes(model, optimizer) == {"embedding.weight": "float32", "hidden.weight": "uint8"}


# ---- what the user registered goes on working


def test_a_users_override_of_another_module_moves_along() -> None:
    model = Words()
    singleton().register_module_override(model.head, "weight", {"optim_bits": 32, "lr": 0.0})
    optimizer = make(bitsandbytes.optim.AdamW8bit, model)
    override_embedding_bits(model, optimizer)
    head, hidden = model.head.weight.detach().clone(), model.hidden.weight.detach().clone()
    step(model, optimizer)
    assert dtypes(model, optimizer) == {
        "embedding.weight": "float32",
        "hidden.weight": "uint8",
        "head.weight": "float32",
    }
    assert torch.equal(model.head.weight, head)
    assert not torch.equal(model.hidden.weight, hidden)
    assert_empty(singleton())


def test_a_users_override_of_a_parameter_moves_along() -> None:
    model = Words()
    singleton().register_parameters(model.parameters())
    optimizer = make(bitsandbytes.optim.AdamW8bit, model)
    singleton().override_config(model.hidden.weight, "optim_bits", 32)
    override_embedding_bits(model, optimizer)
    step(model, optimizer)
    assert in_8_bits(model, optimizer) == {"head.weight"}
    assert_empty(singleton())


def test_a_users_setting_of_an_embedding_is_merged_with_its_bits() -> None:
    model = Words()
    singleton().override_config(model.embedding.weight, "lr", 0.0)
    optimizer = make(bitsandbytes.optim.AdamW8bit, model)
    singleton().register_module_override(model.embedding, "weight", {"optim_bits": 32})  # as stock Trainer does
    override_embedding_bits(model, optimizer)
    weight = model.embedding.weight.detach().clone()
    step(model, optimizer)
    assert dtypes(model, optimizer)["embedding.weight"] == "float32"
    assert torch.equal(model.embedding.weight, weight)


def test_what_belongs_to_other_models_stays() -> None:
    model, other = Words(), Words(seed=1)
    triple = (other.embedding, "weight", {"optim_bits": 32})
    singleton().register_module_override(*triple)
    singleton().override_config(other.head.weight, "optim_bits", 32)
    singleton().index2config[(7, 7)] = {"optim_bits": 32}
    override_embedding_bits(model, make(bitsandbytes.optim.AdamW8bit, model))
    assert singleton().module_weight_config_triple == [triple]
    assert singleton().pid2config == {id(other.head.weight): {"optim_bits": 32}}
    assert singleton().index2config == {(7, 7): {"optim_bits": 32}}


def assert_empty(manager: Any) -> None:
    assert manager.module_weight_config_triple == []
    assert manager.pid2config == {}
    assert manager.index2config == {}


# ---- undo


def test_undo_leaves_what_the_user_registered() -> None:
    model = Words()
    stock = make(bitsandbytes.optim.AdamW8bit, model)
    singleton().register_module_override(model.head, "weight", {"optim_bits": 32})
    singleton().override_config(model.embedding.weight, "lr", 0.0)
    step(model, stock)  # fills the entries by position
    handle = override_embedding_bits(model, stock)
    assert stock.mng is not singleton()
    assert_empty(singleton())
    before = model.embedding.weight.detach().clone()
    handle.remove()
    handle.remove()
    stock.state.clear()
    step(model, stock)
    assert torch.equal(model.embedding.weight, before)
    assert in_8_bits(model, stock) == {"embedding.weight", "hidden.weight"}


def test_an_undone_override_leaves_embeddings_in_8_bits() -> None:
    model = Words()
    optimizer = make(bitsandbytes.optim.AdamW8bit, model)
    with override_embedding_bits(model, optimizer):
        pass
    step(model, optimizer)
    assert set(dtypes(model, optimizer).values()) == {"uint8"}


def test_undo_after_the_model_and_its_optimizer_are_gone() -> None:
    model = Words()
    singleton().register_module_override(model.embedding, "weight", {"optim_bits": 32})
    singleton().override_config(model.head.weight, "lr", 0.5)
    optimizer = make(bitsandbytes.optim.AdamW8bit, model)
    step(model, optimizer)  # fills the entries by position
    handle = override_embedding_bits(model, optimizer)
    references = weakref.ref(model.embedding), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    handle.remove()
    assert_empty(singleton())


# ---- with the stock Trainer: every way of passing an optimizer

AdamW8bit = bitsandbytes.optim.AdamW8bit
OutsideBitsandbytes = type("OutsideBitsandbytes", (AdamW8bit,), {"__module__": "user.code"})
STOCK_NAMES = [
    "adamw_bnb_8bit",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "paged_lion_8bit",
    "ademamix_8bit",
    "paged_ademamix_8bit",
    "rmsprop_bnb_8bit",
]
WAYS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    **{name: lambda model, name=name: {"optim": name} for name in STOCK_NAMES},
    "optimizers=": lambda model: {"trainer_optimizers": (AdamW8bit(model.parameters(), lr=1e-3), None)},
    "optimizers= paged": lambda model: {
        "trainer_optimizers": (bitsandbytes.optim.PagedAdamW8bit(model.parameters(), lr=1e-3), None)
    },
    "class": lambda model: {"trainer_optimizer_cls_and_kwargs": (AdamW8bit, {"lr": 1e-3})},
    "class and optim_bits": lambda model: {
        "trainer_optimizer_cls_and_kwargs": (bitsandbytes.optim.AdamW, {"lr": 1e-3, "optim_bits": 8})
    },
    "subclass": lambda model: {"trainer_optimizer_cls_and_kwargs": (OutsideBitsandbytes, {"lr": 1e-3})},
}
MISSED_BY_STOCK = {"optimizers=", "optimizers= paged", "class", "subclass"}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_passing_an_8_bit_optimizer(way: str, tmp_path: Any) -> None:
    model = bert()
    trainer = train(model, tmp_path, EmbeddingBitsCallback(), **WAYS[way](model))
    assert in_8_bits(model, trainer.optimizer) == large(model) - BERT_EMBEDDINGS
    assert_empty(singleton())


@pytest.mark.parametrize("way", sorted(MISSED_BY_STOCK))
def test_stock_misses_some_of_these_ways(way: str, tmp_path: Any) -> None:
    """The reason for this module; when it fails, stock ``Trainer`` has learnt something."""
    model = bert()
    trainer = train(model, tmp_path, **WAYS[way](model))
    assert in_8_bits(model, trainer.optimizer) == large(model)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "lion_8bit", "ademamix_8bit", "rmsprop_bnb_8bit"])
def test_bit_equal_to_stock_where_stock_is_right(optim: str, tmp_path: Any) -> None:
    stock = train(bert(), tmp_path, optim=optim, num_train_epochs=2)
    assert dtypes(stock.model, stock.optimizer)["bert.embeddings.word_embeddings.weight"] == "float32"
    singleton().initialize()
    ours = train(bert(), tmp_path, EmbeddingBitsCallback(), optim=optim, num_train_epochs=2)
    assert tiny.largest_difference(stock.model, ours.model) == 0.0
    assert tiny.largest_difference(bert(), ours.model) > 1e-3


def test_tied_heads(tmp_path: Any) -> None:
    config = transformers.GPT2Config(
        vocab_size=200, n_embd=64, n_layer=1, n_head=2, n_positions=64, bos_token_id=2, eos_token_id=3
    )
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in tiny.rows(16)]
    trainer = tiny.train(model, data, tmp_path, optim="adamw_8bit", trainer_callbacks=[EmbeddingBitsCallback()])
    embeddings = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert in_8_bits(model, trainer.optimizer) == large(model) - embeddings


def test_frozen_embeddings_need_no_state(tmp_path: Any) -> None:
    model = bert()
    trainer = train(model, tmp_path, FreezeCallback("embeddings"), EmbeddingBitsCallback())
    assert in_8_bits(model, trainer.optimizer) == large(model) - BERT_EMBEDDINGS


# ---- the singleton's leak


def test_stock_leaks_its_override_into_the_next_model(tmp_path: Any) -> None:
    """The reason for a registry per optimizer; when it fails, bitsandbytes or ``Trainer`` has learnt something."""
    train(Words(), tmp_path)
    model = NoWords()
    trainer = train(model, tmp_path)
    assert dtypes(model, trainer.optimizer) == {"a.weight": "float32", "b.weight": "uint8"}


def test_nothing_leaks_into_the_next_model(tmp_path: Any) -> None:
    train(Words(), tmp_path, EmbeddingBitsCallback())
    model = NoWords()
    trainer = train(model, tmp_path)
    assert dtypes(model, trainer.optimizer) == {"a.weight": "uint8", "b.weight": "uint8"}


def test_a_leak_that_is_there_already_does_not_reach_us(tmp_path: Any) -> None:
    train(Words(), tmp_path)
    assert singleton().index2config == {(0, 0): {"optim_bits": 32}}
    model = nn.ModuleDict({"first": nn.Linear(64, 64, bias=False), "embedding": nn.Embedding(200, 64)})
    optimizer = AdamW8bit(model.parameters())
    override_embedding_bits(model, optimizer)
    model["first"](model["embedding"](torch.arange(8))).sum().backward()
    optimizer.step()
    assert dtypes(model, optimizer) == {"first.weight": "uint8", "embedding.weight": "float32"}


def test_a_deleted_models_embedding_is_dead(tmp_path: Any) -> None:
    callback = EmbeddingBitsCallback()
    trainer = train(Words(), tmp_path, callback)
    references = [weakref.ref(trainer.model.embedding), weakref.ref(trainer.model.embedding.weight)]
    del trainer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert callback.handle is not None  # the callback lives on


def test_stock_keeps_a_deleted_models_embedding_alive(tmp_path: Any) -> None:
    trainer = train(Words(), tmp_path)
    reference = weakref.ref(trainer.model.embedding)
    del trainer
    gc.collect()
    assert reference() is not None


def test_two_models_at_once(tmp_path: Any) -> None:
    """Two optimizers, stepped in turn, whose embeddings stand at different positions."""
    first, second = Words(), NoWords()
    second.embedding = nn.Embedding(200, 64)  # the last parameter, where the first model has a layer
    optimizers = [make(AdamW8bit, model) for model in (first, second)]
    handles = [override_embedding_bits(*pair) for pair in zip((first, second), optimizers, strict=True)]
    for _ in range(2):
        step(first, optimizers[0])
        step(second, optimizers[1])
        second.embedding(torch.arange(8)).sum().backward()
        optimizers[1].step()
    assert in_8_bits(first, optimizers[0]) == {"hidden.weight", "head.weight"}
    assert in_8_bits(second, optimizers[1]) == {"a.weight", "b.weight"}
    handles[0].remove()
    assert optimizers[1].mng is not singleton()


def test_two_trainers_at_once(tmp_path: Any) -> None:
    alone = [train(bert(seed), tmp_path, EmbeddingBitsCallback(), max_steps=2).model for seed in (0, 1)]
    trainers = []
    for seed in (0, 1):
        arguments = tiny.arguments(
            tmp_path,
            optim="adamw_bnb_8bit",
            learning_rate=1e-3,
            per_device_train_batch_size=8,
            train_sampling_strategy="sequential",
            max_steps=2,
        )
        data, callbacks = tiny.rows(32), [EmbeddingBitsCallback()]
        trainers.append(Trainer(model=bert(seed), args=arguments, train_dataset=data, callbacks=callbacks))
    for trainer in trainers:
        trainer.create_optimizer()  # both register on the singleton before either trains
    for trainer, reference in zip(trainers, alone, strict=True):
        trainer.train()
        assert tiny.largest_difference(trainer.model, reference) == 0.0
    assert_empty(singleton())


# ---- resumed runs and second runs


class StopAt(transformers.TrainerCallback):
    """Stops after a step, as an interruption does, so that the schedule is that of the whole run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "ademamix_8bit", "lion_8bit"])
def test_a_resumed_run_equals_a_straight_one(optim: str, tmp_path: Any) -> None:
    settings = {"optim": optim, "save_strategy": "steps", "save_steps": 2}
    straight = train(bert(), tmp_path, EmbeddingBitsCallback(), **settings)
    resumed = resume(bert(), tmp_path, EmbeddingBitsCallback(), **settings)
    assert tiny.largest_difference(straight.model, resumed.model) == 0.0


def resume(model: nn.Module, tmp_path: Any, *callbacks: Any, **settings: Any) -> Trainer:
    """Resume from ``checkpoint-2`` in ``tmp_path`` what ``train`` began."""
    arguments = tiny.arguments(
        tmp_path,
        **{
            "optim": "adamw_bnb_8bit",
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 8,
            "train_sampling_strategy": "sequential",
            **{key: value for key, value in settings.items() if not key.startswith("trainer_")},
        },
    )
    of_trainer = {key[8:]: value for key, value in settings.items() if key.startswith("trainer_")}
    trainer = Trainer(model=model, args=arguments, train_dataset=tiny.rows(32), callbacks=list(callbacks), **of_trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    return trainer


@pytest.mark.parametrize("class_name", ["AdamW8bit", "AdEMAMix8bit", "PagedLion8bit", "RMSprop8bit"])
def test_an_8_bit_checkpoint_is_dequantised_on_resume(class_name: str, tmp_path: Any) -> None:
    way = {"trainer_optimizer_cls_and_kwargs": (getattr(bitsandbytes.optim, class_name), {"lr": 1e-3})}
    saving = {"save_strategy": "steps", "save_steps": 2}
    before = train(bert(), tmp_path, StopAt(2), **saving, **way)  # stock misses the embeddings here
    assert in_8_bits(before.model, before.optimizer) == large(before.model)
    trainer = resume(bert(), tmp_path, EmbeddingBitsCallback(), **way)
    assert in_8_bits(trainer.model, trainer.optimizer) == large(trainer.model) - BERT_EMBEDDINGS


def test_a_second_train_keeps_one_override(tmp_path: Any) -> None:
    model = bert()
    callback = EmbeddingBitsCallback()
    trainer = train(model, tmp_path, callback)
    trainer.train()
    assert in_8_bits(model, trainer.optimizer) == large(model) - BERT_EMBEDDINGS
    former = {id(weight): {"optim_bits": 32} for name, weight in model.named_parameters() if name in BERT_EMBEDDINGS}
    assert trainer.optimizer.optimizer.mng.pid2config == former  # which stock registered too
    assert_empty(singleton())
    assert callback.handle is not None
    callback.handle.remove()
    assert trainer.optimizer.optimizer.mng.pid2config == former


def test_a_second_train_converts_what_the_first_left_in_8_bits(tmp_path: Any) -> None:
    model = bert()
    trainer = train(model, tmp_path, **WAYS["optimizers="](model))
    assert in_8_bits(model, trainer.optimizer) == large(model)
    trainer.add_callback(EmbeddingBitsCallback())
    trainer.train()
    assert in_8_bits(model, trainer.optimizer) == large(model) - BERT_EMBEDDINGS


def test_a_model_rebuilt_for_every_train(tmp_path: Any) -> None:
    callback = EmbeddingBitsCallback()
    trainer = train(None, tmp_path, callback, trainer_model_init=lambda: bert())
    reference = weakref.ref(trainer.model)
    trainer.train()
    gc.collect()
    assert reference() is None
    assert in_8_bits(trainer.model, trainer.optimizer) == large(trainer.model) - BERT_EMBEDDINGS
    assert_empty(singleton())


# ---- the check after the first step


def bytes_slowly(optimizer: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not key.startswith("qmap"):
                dtype = str(value.dtype)[6:]
                sizes[dtype] = sizes.get(dtype, 0) + value.numel() * value.element_size()
    return sizes


def test_the_check_waits_for_a_step_that_was_not_skipped_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Words()
    optimizer = make(AdamW8bit, model)
    callback = EmbeddingBitsCallback()
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        callback.on_optimizer_step(None, None, None, model=model, optimizer=optimizer)  # as after a gradient overflow
        assert caplog.messages == []
        step(model, optimizer)
        for _ in range(2):
            callback.on_optimizer_step(None, None, None, model=model, optimizer=optimizer)
    assert caplog.messages == [
        "EmbeddingBitsCallback keeps 1 embedding state in float32; the whole optimizer state is float32 100.5 KiB, "
        "uint8 32.0 KiB"
    ]


def test_an_override_that_was_overridden_is_noticed(tmp_path: Any) -> None:
    class Meddle(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
            optimizer.optimizer.mng = singleton()
            singleton().override_config(model.embedding.weight, "optim_bits", 8)

    with pytest.raises(RuntimeError) as error:
        train(Words(), tmp_path, EmbeddingBitsCallback(), Meddle())
    assert str(error.value) == (
        "bits=32 was set for the state of 'embedding.weight', which is in uint8 after the first step; expected "
        f"float32. Keep other code from setting optimizer.mng (bitsandbytes {bitsandbytes.__version__})."
    )


# ---- bytes of any optimizer


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor", "LBFGS"])
def test_state_bytes_of_torch_optimizers(name: str) -> None:
    model = Words(seed=3)
    settings = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **settings)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=torch.arange(96).reshape(8, 12), labels=torch.arange(8))["loss"]
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    if name == "LBFGS":  # keeps lists of tensors, some of them views of one vector
        flat = sum(parameter.numel() for parameter in model.parameters())
        assert optimizer_state_bytes(optimizer)["float32"] >= 2 * 4 * flat
    else:
        assert optimizer_state_bytes(optimizer) == bytes_slowly(optimizer)


def test_state_bytes_before_the_first_step_are_none() -> None:
    assert optimizer_state_bytes(torch.optim.AdamW(Words().parameters())) == {}


def test_state_bytes_count_a_storage_once_and_as_a_whole() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter])
    flat = torch.zeros(100)
    nested = {"first": [flat[:10], (flat[10:20],)], "second": torch.zeros(3, dtype=torch.float64), "step": 3}
    optimizer.state[parameter] = nested
    assert optimizer_state_bytes(optimizer) == {"float32": 400, "float64": 24}


def test_state_bytes_of_meta_tensors() -> None:
    parameter = nn.Parameter(torch.zeros(4, device="meta"))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {key: torch.zeros(1000, device="meta") for key in ("first", "second")}
    assert optimizer_state_bytes(optimizer) == {"float32": 8000}


class Wrapped(torch.Tensor):
    """A tensor subclass that holds its data in other tensors, as sharded and quantised ones do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_state_bytes_look_inside_tensor_subclasses() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"first": Wrapped(torch.zeros(256, dtype=torch.uint8), torch.zeros(1))}
    assert optimizer_state_bytes(optimizer) == {"float32": 4, "uint8": 256}


# ---- errors


FIX = 'Set, for example, TrainingArguments(optim="adamw_8bit").'


@pytest.mark.parametrize("bits", [8, 16, "32", 32.0, None])
def test_wrong_bits(bits: Any) -> None:
    model = Words()
    message = f"bits={bits!r} is invalid; expected 32. Pass bits=32"
    for call in (EmbeddingBitsCallback, lambda bits: override_embedding_bits(model, make(AdamW8bit, model), bits)):
        with pytest.raises(ValueError) as error:
            call(bits)
        assert str(error.value) == message


def test_an_optimizer_that_is_not_of_bitsandbytes() -> None:
    model = Words()
    with pytest.raises(TypeError) as error:
        override_embedding_bits(model, torch.optim.AdamW(model.parameters()))
    assert str(error.value) == (
        f"optimizer=torch.optim.adamw.AdamW has no 8-bit state; expected an 8-bit optimizer of bitsandbytes. {FIX}"
    )


def test_an_optimizer_with_32_bit_states() -> None:
    model = Words()
    optimizer = bitsandbytes.optim.AdamW(model.parameters())
    with pytest.raises(ValueError) as error:
        override_embedding_bits(model, optimizer)
    assert str(error.value) == (
        f"optimizer=bitsandbytes.optim.adamw.AdamW keeps its state in 32 bits; expected optim_bits=8. {FIX}"
    )
    assert optimizer.mng is singleton()


def test_a_model_without_embeddings() -> None:
    model = NoWords()
    optimizer = make(AdamW8bit, model)
    with pytest.raises(ValueError) as error:
        override_embedding_bits(model, optimizer)
    assert str(error.value) == (
        "model=NoWords has no nn.Embedding; expected a model with embeddings. Take EmbeddingBitsCallback() out of "
        "callbacks=."
    )
    assert optimizer.mng is singleton()


def test_the_callback_raises_when_training_begins(tmp_path: Any) -> None:
    model = bert()
    before = copy.deepcopy(model)
    with pytest.raises(TypeError) as error:
        train(model, tmp_path, EmbeddingBitsCallback(), optim="adamw_torch")
    assert str(error.value) == (
        f"optimizer=torch.optim.adamw.AdamW has no 8-bit state; expected an 8-bit optimizer of bitsandbytes. {FIX}"
    )
    assert tiny.largest_difference(before, model) == 0.0


def test_a_callback_is_copied_and_pickled_unused(tmp_path: Any) -> None:
    callback = EmbeddingBitsCallback()
    train(Words(), tmp_path, callback)
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert (copied.bits, copied.handle) == (32, None)


# ---- private names of bitsandbytes, each with the versions it was seen in


def test_the_manager_of_an_optimizer() -> None:
    """``Optimizer8bit.mng``, read at every step: bitsandbytes 0.50.0, 0.50.2."""
    optimizer = make(AdamW8bit, Words())
    assert isinstance(optimizer, Optimizer8bit)
    assert optimizer.mng is GlobalOptimManager.get_instance()


def test_the_fields_of_a_manager() -> None:
    """``initialize`` and the fields it makes: bitsandbytes 0.50.0, 0.50.2."""
    manager = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    assert vars(manager) == {
        "pid2config": {},
        "index2config": {},
        "optimizer": None,
        "uses_config_override": False,
        "module_weight_config_triple": [],
    }
    layer = nn.Linear(2, 2)
    manager.register_module_override(layer, "weight", config := {"optim_bits": 32})
    assert manager.module_weight_config_triple == [(layer, "weight", config)]
    manager.pid2config[id(layer.bias)] = config
    manager.register_parameters([{"params": [layer.weight]}, {"params": [layer.weight, layer.bias]}])
    assert manager.index2config == {(1, 1): config}


def test_a_first_step_enters_module_overrides_by_id_and_by_position() -> None:
    """``check_overrides`` shares one configuration among all three fields: bitsandbytes 0.50.0, 0.50.2."""
    model = Words()
    optimizer = make(AdamW8bit, model)
    singleton().register_module_override(model.hidden, "weight", config := {"optim_bits": 32})
    step(model, optimizer)
    assert singleton().pid2config[id(model.hidden.weight)] is config
    assert singleton().index2config[(0, 1)] is config


def test_the_settings_and_the_state_of_an_8_bit_optimizer() -> None:
    """``args``, ``init_state`` and the keys of a state: bitsandbytes 0.50.0, 0.50.2."""
    model = Words()
    optimizer = make(AdamW8bit, model)
    assert (optimizer.args.optim_bits, optimizer.args.min_8bit_size) == (8, 4096)
    optimizer.init_state(optimizer.param_groups[0], model.hidden.weight, 0, 1)
    keys = {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}
    assert set(optimizer.state[model.hidden.weight]) == keys
    assert optimizer.state[model.hidden.weight]["absmax1"].shape == (64 * 128 // 256,)
    singleton().override_config(model.head.weight, "optim_bits", 32)
    singleton().register_parameters(optimizer.param_groups)
    optimizer.init_state(optimizer.param_groups[0], model.head.weight, 0, 2)
    assert set(optimizer.state[model.head.weight]) == {"step", "state1", "state2"}


def test_states_are_quantised_in_blocks_of_256() -> None:
    """The block size of ``init_state``, with ``functional.dequantize_blockwise``: bitsandbytes 0.50.0, 0.50.2."""
    values = torch.randn(600, generator=torch.Generator().manual_seed(0))
    codes, quantisation = quantize_blockwise(values, blocksize=256)
    assert quantisation.absmax.shape == (3,)
    state = {"state1": codes, "absmax1": quantisation.absmax, "qmap1": quantisation.code}
    found = bitsandbytes.functional.dequantize_blockwise(
        codes, absmax=quantisation.absmax, code=quantisation.code, blocksize=256
    )
    torch.testing.assert_close(found, dequantised_slowly(state, 1), rtol=1e-6, atol=0.0)
