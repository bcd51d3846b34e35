"""``sparse_tied_embedding`` on real models: stock's gradients bit for bit, and one matrix instead of three."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tables import refuses, whole
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import language_models
import tiny
from hf_memopt.techniques import sparse_tied_embedding
from hf_memopt.training.binding import enable_checkpointing
from language_models import VOCABULARY

MODELS = ("llama-tied", "gemma2", "bert", "t5", "bart", "gpt2")
"""Embeddings as they are, scaled, padded, one weight three times, scaled and twice, and with positions."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CASES = [
    pytest.param(name, dtype, marks=[] if place == 0 or dtype == torch.bfloat16 else pytest.mark.slow)
    for place, name in enumerate(MODELS)
    for dtype in DTYPES
]
QUICK = ("llama-tied", "t5")
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]


def build(name: str = "llama-tied", dtype: torch.dtype = torch.float32) -> Any:
    return language_models.build(name, dtype)


def ids(rows: int = 2, length: int = 30, seed: int = 0) -> torch.Tensor:
    """Random tokens, of which a third is one token and one in ten the padding of half of the models."""
    torch.manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (rows, length))
    tokens[:, ::3] = 7
    tokens[:, -3:] = 1
    return tokens


def weight_of(model: Any) -> nn.Parameter:
    return model.get_input_embeddings().weight


def backward(model: Any, tokens: torch.Tensor | None = None) -> None:
    tokens = ids() if tokens is None else tokens
    model(input_ids=tokens, labels=tokens).loss.backward()


def with_stock(name: str = "llama-tied", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a model with sparse rows, and a copy that is as in stock."""
    stock = build(name, dtype)
    ours = copy.deepcopy(stock)
    sparse_tied_embedding(ours)
    return ours, stock


def gradients(model: Any) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def assert_same(one: Any, other: Any) -> None:
    for mine, theirs in zip(gradients(one), gradients(other), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def assert_trained_the_same(*models: Any, run: Callable[[Any], None] = backward) -> None:
    for model in models:
        run(model)
    assert_same(*models)


def large_tensors(model: Any, run: Callable[[], Any]) -> list[str]:
    """Return the names of torch's operations inside ``run`` that allocated as much as the tied weight has.

    BERT's position embeddings are 3 % larger.
    """
    size = weight_of(model).nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    return [event.name for event in found.events() if size <= (event.self_cpu_memory_usage or 0) < 1.02 * size]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradients_are_bit_for_bit_those_of_stock(name: str, dtype: torch.dtype) -> None:
    """In one backward pass, and added to those of a first one; so the error of 16 bits is stock's, too."""
    ours, stock = with_stock(name, dtype)
    for seed in range(2):
        assert_trained_the_same(ours, stock, run=lambda model, seed=seed: backward(model, ids(seed=seed)))
    assert weight_of(ours).grad.layout == torch.strided


def checkpointed(model: Any, *, reentrant: bool = False) -> None:
    enable_checkpointing(model, {"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    backward(model)


def under_autocast(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()


def embeddings_checkpointed(model: Any) -> None:
    hidden = checkpoint(model.get_input_embeddings(), ids(), use_reentrant=False)
    model(inputs_embeds=hidden, labels=ids()).loss.backward()


def scaled_by_frequency(model: Any) -> None:
    model.get_input_embeddings().scale_grad_by_freq = True
    backward(model)


WAYS = [
    checkpointed,
    partial(checkpointed, reentrant=True),
    under_autocast,
    embeddings_checkpointed,
    scaled_by_frequency,
]


@pytest.mark.parametrize("run", WAYS, ids=["checkpointed", "reentrant", "autocast", "embeddings alone", "frequency"])
def test_gradients_are_those_of_stock_in_every_way_to_train(run: Callable[[Any], None]) -> None:
    models = with_stock(dtype=torch.float32 if run is under_autocast else torch.float64)
    assert_trained_the_same(*models, run=run)


@pytest.mark.parametrize("name", EACH)
def test_one_matrix_is_made_where_stock_makes_three_or_more(name: str) -> None:
    counts = []
    for model in with_stock(name):
        backward(model)  # .grad exists in the second
        loss = model(input_ids=ids(), labels=ids()).loss
        counts.append(large_tensors(model, loss.backward))
    assert counts[0] == ["aten::mm"], counts
    assert len(counts[1]) >= 3, counts


def shared_by_a_sum(model: Any) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Autograd gives both terms of a sum the same tensor; return a function that returns that of the other term."""
    other = torch.zeros_like(weight_of(model)).requires_grad_()
    hidden = model.get_input_embeddings()(ids())
    return F.linear(hidden, weight_of(model) + other).square().sum(), lambda: other.grad


def kept_by_a_hook(model: Any) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """The hook keeps the gradient of a view of the weight, which is the gradient of the weight itself."""
    kept: list[torch.Tensor] = []
    view = weight_of(model).view_as(weight_of(model))
    view.register_hook(lambda gradient: kept.append(gradient))
    return F.linear(model.get_input_embeddings()(ids()), view).square().sum(), lambda: kept[0]


def kept_as_the_base_of_a_view(model: Any) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """A linear layer's gradient is a view of a product, which a hook keeps."""
    kept: list[torch.Tensor] = []
    transposed = weight_of(model).t()
    transposed.register_hook(lambda gradient: kept.append(gradient))
    return (model.get_input_embeddings()(ids()) @ transposed).square().sum(), lambda: kept[0].t()


@pytest.mark.parametrize("share", [shared_by_a_sum, kept_by_a_hook, kept_as_the_base_of_a_view])
def test_a_gradient_that_something_else_holds_is_not_changed(share: Any) -> None:
    model, stock = with_stock(dtype=torch.float64)
    found = []
    for one in (model, stock):
        loss, held = share(one)
        loss.backward()
        found.append(held().clone())
    assert torch.equal(*found)
    assert_same(model, stock)
    assert not torch.equal(found[0], weight_of(model).grad)


@pytest.mark.parametrize("name", ["llama-tied", "t5"])
def test_the_release_hook_runs_once_with_the_whole_gradient(name: str) -> None:
    model, stock = with_stock(name, torch.float64)
    seen: list[torch.Tensor] = []
    weight_of(model).register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    backward(model)
    backward(stock)
    assert len(seen) == 1
    assert torch.equal(seen[0], weight_of(stock).grad)


@pytest.mark.parametrize("detached", [False, True])
def test_a_loss_without_the_head_is_refused(detached: bool) -> None:
    """A loss of the hidden states alone; a head that the loss goes through and that is frozen there."""
    model, stock = with_stock()
    hidden = model.model(input_ids=ids()).last_hidden_state
    loss = F.linear(hidden, weight_of(model).detach()).sum() if detached else hidden.square().sum()
    refuses(RuntimeError, whole("the loss depends on"), loss.backward)
    model.zero_grad()
    assert_trained_the_same(model, stock)


def test_rows_of_an_interrupted_backward_pass_are_not_added_to_the_next() -> None:
    """The decoder's embeddings of T5 are through when the encoder runs out of memory."""
    ours, stock = with_stock("t5")

    def interrupt(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = ours.encoder.block[0].register_full_backward_hook(interrupt)
    with pytest.raises(torch.OutOfMemoryError):
        backward(ours)
    handle.remove()
    ours.zero_grad()
    assert_trained_the_same(ours, stock)


def test_evaluation_and_frozen_weights_are_left_alone() -> None:
    model, stock = with_stock()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids()).logits, stock(input_ids=ids()).logits)
    weight_of(model).requires_grad_(False)
    backward(model)
    assert weight_of(model).grad is None
    weight_of(model).requires_grad_(True)
    for one in (model, stock):
        one.zero_grad()
    assert_trained_the_same(model, stock)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_as_in_stock_and_reads_its_own_weight(way: str) -> None:
    model, stock = with_stock()
    backward(model)
    copied = COPIES[way](model)
    copied.zero_grad()
    for one in (copied, stock):
        weight_of(one).data.mul_(2)
    assert_trained_the_same(copied, stock)
    assert len(large_tensors(copied, lambda: backward(copied))) >= 3
    assert not sparse_tied_embedding(copied).is_removed


def test_the_handle_undoes_it_and_keeps_nothing_alive() -> None:
    model = build()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    handle = sparse_tied_embedding(model)
    assert sparse_tied_embedding(model).is_removed  # a second call changes nothing
    backward(model)
    handle.remove()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not weight_of(model)._backward_hooks
    sparse_tied_embedding(model)
    backward(model)
    parameter, handle = weakref.ref(weight_of(model)), sparse_tied_embedding(model)
    del model
    gc.collect()
    assert parameter() is None
    handle.remove()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_inside_peft_the_models_own_embeddings_are_found() -> None:
    model = build()
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    handle = sparse_tied_embedding(wrapped)  # frozen: nothing to do in a pass
    assert "forward" in vars(model.get_input_embeddings())
    backward(wrapped)
    handle.remove()
    assert "forward" not in vars(model.get_input_embeddings())


class Shard(nn.Parameter):
    """A weight of another class than torch's own."""


def with_norm() -> Any:
    model = build()
    model.get_input_embeddings().max_norm = 1.0
    return model


def with_linear_embeddings() -> Any:
    model = build()
    model.set_input_embeddings(nn.Linear(64, VOCABULARY, bias=False))
    model.lm_head.weight = model.get_input_embeddings().weight
    return model


def with_shards() -> Any:
    model = build()
    model.get_input_embeddings().weight = model.lm_head.weight = Shard(weight_of(model).detach())
    return model


UNTIED = whole("model=<{}> has no head")
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (tiny.llama, UNTIED.format("LlamaForCausalLM")),
    (tiny.bert, UNTIED.format("BertForSequenceClassification")),
    (lambda: nn.Linear(2, 2), UNTIED.format("Linear")),
    (
        lambda: get_peft_model(build(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        UNTIED.format("LlamaForCausalLM"),
    ),
    (lambda: "Llama-3.2-1B", whole("model='Llama-3.2-1B'")),
    (with_norm, whole("embeddings=<Embedding>,")),
    (with_linear_embeddings, whole("embeddings=<Linear>")),
    (with_shards, whole("embeddings=<Embedding> have")),
]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_has_no_tied_rows_is_refused(make: Callable[[], Any], message: str) -> None:
    refuses((ValueError, TypeError), message, sparse_tied_embedding, make())
