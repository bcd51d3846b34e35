"""Keys of recorded steps: equal where nothing changed, other after any change, none where nobody can tell."""

from __future__ import annotations

import functools
import gc
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny
from hf_memopt.memory.models.loading import load_model
from hf_memopt.memory.recording.fingerprints import code_of, module_fingerprint, value_fingerprint
from hf_memopt.techniques.freezing.freezing import freeze

PATTERNS = ["*embeddings*"]


def reading_a_list(model: Any) -> None:
    freeze(model, PATTERNS)


def reading_it_from_inside(model: Any) -> None:
    def inner() -> None:
        freeze(model, PATTERNS)

    inner()


def calling_another(model: Any) -> None:
    reading_a_list(model)


def reading_an_object(model: Any) -> None:
    model.apply(COUNTED.__call__)


class Counted:
    """Something with a state of its own that can be called."""

    def __call__(self, model: Any) -> None: ...

    def method(self, model: Any) -> None: ...


COUNTED = Counted()


def closing_over(value: Any) -> Callable[[Any], Any]:
    return lambda model: freeze(model, value)


# ---- Values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1.5,
        "bf16",
        torch.bfloat16,
        {"every_n_layers": 2, "inner": [1, (2, 3), {"a", "b"}]},
        partial(freeze, patterns=("*embeddings*",)),
        LoraConfig(r=4, target_modules=["query"]),
        tiny.bert_config(),
        checkpoint,  # its decorator closes over something, but it is torch's own
        get_peft_model,
        torch.tanh,
        reading_a_list,
        lambda model: model,
        int,
        torch,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_be_told_has_a_fingerprint(value: Any) -> None:
    first = value_fingerprint(value)
    assert first is not None
    assert first == value_fingerprint(value)
    assert hash(first) == hash(value_fingerprint(value))


@pytest.mark.parametrize(
    "value",
    [
        closing_over(["a"]),
        Counted(),
        Counted().method,
        [].append,
        object(),
        partial(Counted()),
        {"context_fn": closing_over(1)},
        (1, [object()]),
        reading_an_object,
        functools.wraps(freeze)(closing_over(1)),  # under a name of the library, and not the library's
        torch.zeros(2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_a_state_of_its_own_has_none(value: Any) -> None:
    assert value_fingerprint(value) is None


def test_equal_numbers_of_other_types_differ() -> None:
    assert len({value_fingerprint(value) for value in (1, 1.0, True, (1,), "1")}) == 5


def test_a_dataclass_that_is_changed_in_place_is_another_value() -> None:
    config = LoraConfig(r=4, target_modules=["query"])
    first = value_fingerprint(partial(get_peft_model, peft_config=config))
    config.r = 8
    second = value_fingerprint(partial(get_peft_model, peft_config=config))
    assert first != second
    assert second == value_fingerprint(partial(get_peft_model, peft_config=LoraConfig(r=8, target_modules=["query"])))


def test_no_object_stands_for_a_later_one_at_its_address() -> None:
    found = set()
    for rank in range(1, 30):
        found.add(value_fingerprint(partial(get_peft_model, peft_config=LoraConfig(r=rank))))
        gc.collect()
    assert len(found) == 29


def test_a_dataclass_that_shows_an_address_has_none() -> None:
    config = LoraConfig(r=4)
    config.layer_replication = object()  # type: ignore[assignment]
    assert value_fingerprint(config) is None


@pytest.mark.parametrize("function", [reading_a_list, reading_it_from_inside, calling_another])
def test_what_a_function_reads_from_its_module_counts(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = value_fingerprint(function)
    assert first is not None
    monkeypatch.setitem(globals(), "PATTERNS", ["*layer.0.*"])
    assert value_fingerprint(function) not in (None, first)
    monkeypatch.undo()
    assert value_fingerprint(function) == first


def test_defaults_of_a_function_count() -> None:
    config = LoraConfig(r=4)

    def adapt(model: Any, config: LoraConfig = config) -> Any:
        return get_peft_model(model, config)

    first = value_fingerprint(adapt)
    config.r = 8
    assert value_fingerprint(adapt) not in (None, first)


def test_the_kernels_of_a_configuration_count() -> None:
    found = set()
    for attention, experts in ((None, None), ("sdpa", None), ("eager", None), (None, "eager"), (None, "batched_mm")):
        config = tiny.llama_config()
        config._attn_implementation, config._experts_implementation = attention, experts  # both private, pinned here
        found.add(value_fingerprint(config))
    assert len(found) == 5
    assert len({config.to_json_string() for config in (tiny.llama_config(), config)}) == 1


# ---- Modules --------------------------------------------------------------------------------------------------------


def copied(model: nn.Module) -> nn.Module:
    """Return what ``estimate`` takes the fingerprint of."""
    return load_model(model).model


def small() -> Any:
    return transformers.BertForMaskedLM(tiny.bert_config(hidden_dropout_prob=0.1))


@pytest.mark.parametrize(
    "name",
    [
        *("bert-base-uncased", "gpt2", "t5-small", "deberta-v3-small", "ModernBERT-base", "vit-base-patch16-224"),
        *("whisper-tiny", "distilbert-base-uncased", "Llama-3.2-1B", "gemma-3-270m"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # DeBERTa of transformers 5.8
def test_models_of_transformers_have_a_fingerprint_that_stays(name: str) -> None:
    model = load_model(name).model
    first = module_fingerprint(copied(model))
    assert first is not None
    assert first == module_fingerprint(copied(model))
    assert (code_of(copied(model)), hash(first)) == (code_of(model), hash(module_fingerprint(copied(model))))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # 5.23 prefers the name of activations
def test_a_model_with_adapters_and_checkpointing_has_one() -> None:
    model = tiny.llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    first = module_fingerprint(copied(adapted))
    assert first is not None
    assert first == module_fingerprint(copied(adapted))


def test_it_costs_little() -> None:
    model = load_model(load_model("bert-large-uncased").model).model
    seconds = []
    for _ in range(5):
        start = time.process_time()
        hash((module_fingerprint(model), code_of(model)))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


def straight(value: torch.Tensor) -> torch.Tensor:
    return value


def noisy_hook(module: Any, given: Any, found: Any) -> None: ...


def _activate(model: Any, function: Any) -> None:
    intermediate = model.bert.encoder.layer[0].intermediate
    del intermediate.intermediate_act_fn  # a module
    intermediate.intermediate_act_fn = function


def _untie(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.requires_grad_(False),
        lambda model: setattr(model.bert.embeddings.dropout, "p", 0.5),
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda model: model.half(),
        lambda model: setattr(model.bert.encoder, "layer", model.bert.encoder.layer[:1]),
        lambda model: _activate(model, F.silu),
        lambda model: _activate(model, straight),
        lambda model: setattr(model.bert.encoder, "dtype_of_sums", torch.float32),
        lambda model: setattr(model.bert.encoder, "skipped", [1, 3]),
        lambda model: setattr(model.bert.encoder, "options", {"cut": 2}),
        lambda model: setattr(model.bert.encoder, "config", tiny.bert_config(chunk_size_feed_forward=2)),
        lambda model: model.bert.pooler or model.bert.register_forward_hook(noisy_hook),
        _untie,
    ],
    ids=[
        *("requires_grad", "dropout", "checkpointing", "dtype", "layers", "function of torch", "function"),
        *("dtype attribute", "list", "dict", "configuration of a part", "hook", "tied weights"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*")  # 5.23 prefers the name of activations
def test_a_change_shows(change: Any) -> None:
    model = small()
    first = module_fingerprint(copied(model))
    change(model)
    second = module_fingerprint(copied(model))
    assert None not in (first, second)
    assert first != second


def test_a_list_that_grows_shows() -> None:
    model = small()
    model.skipped = [1]
    first = module_fingerprint(copied(model))
    model.skipped.append(2)
    assert module_fingerprint(copied(model)) not in (None, first)


def _patch(model: Any) -> None:
    layer = model.bert.encoder.layer[0]
    layer.forward = types.MethodType(type(layer).forward, layer)


@pytest.mark.parametrize(
    "change",
    [
        _patch,
        lambda model: setattr(model.bert.encoder.layer[0], "forward", straight),
        lambda model: setattr(model.bert.encoder, "state", Counted()),
        lambda model: setattr(model.bert.encoder, "parts", [nn.Linear(2, 2)]),
        lambda model: model.bert.register_forward_hook(closing_over(1)),
        lambda model: model.bert.register_forward_pre_hook(Counted()),
        lambda model: model.bert.register_full_backward_hook(Counted().method),
    ],
    ids=["method", "function as method", "object", "hidden module", "closure", "callable", "bound method"],
)
def test_what_cannot_be_told_gives_none(change: Any) -> None:
    model = small()
    change(model)
    assert module_fingerprint(copied(model)) is None


def test_a_class_that_was_patched_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    first = code_of(model)
    monkeypatch.setattr(transformers.models.bert.modeling_bert.BertLayer, "forward", straight)
    assert code_of(model) != first


def test_the_experts_of_a_part_show() -> None:
    model = small()
    first = code_of(model)
    model.bert.config._experts_implementation = "batched_mm"
    assert code_of(model) != first
