"""Freezing: what each word means in each architecture, what is saved, and that training stays what it was."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt.binding import attach, checkpointing_arguments
from hf_memopt.binding.model_changes import drop_input_gradients
from hf_memopt.binding.parameters import layer_stacks
from hf_memopt.changes import Change
from hf_memopt.techniques.freezing import FreezeCallback
from hf_memopt.techniques.freezing.freezing import freeze, trainable_parameters

pytestmark = [
    # DeBERTa-v2 in transformers 5.8 and 5.17, with torch 2.13
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


TEXT = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
SEQ2SEQ = {
    "vocab_size": 100,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))


def roberta() -> nn.Module:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**TEXT))


def distilbert() -> nn.Module:
    sizes = {"vocab_size": 100, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 64}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**sizes))


def deberta() -> nn.Module:
    relative = {
        "relative_attention": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
    }
    config = transformers.DebertaV2Config(**TEXT, **relative, share_att_key=True, type_vocab_size=0)
    return transformers.DebertaV2ForSequenceClassification(config)


def albert() -> nn.Module:
    return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**TEXT, embedding_size=8))


def modernbert() -> nn.Module:
    config = transformers.ModernBertConfig(**TEXT, cls_token_id=2, sep_token_id=3)
    return transformers.ModernBertForSequenceClassification(config)


def gpt2(**settings: Any) -> nn.Module:
    sizes = {
        "vocab_size": 100,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **settings))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, tie_word_embeddings=False))


def t5() -> nn.Module:
    sizes = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 3, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def bart() -> nn.Module:
    config = transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=64, num_labels=2)
    return transformers.BartForSequenceClassification(config)


def vit() -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 32,
    }
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, patch_size=16))


def wav2vec2() -> nn.Module:
    sizes = {key: value for key, value in TEXT.items() if key != "max_position_embeddings"}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes, **convolutions, **positions))


def whisper() -> nn.Module:
    sizes = {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SEQ2SEQ, **sizes))


EMBEDDINGS: dict[Callable[[], nn.Module], list[str]] = {
    bert: ["bert.embeddings."],
    roberta: ["roberta.embeddings."],
    distilbert: ["distilbert.embeddings."],
    deberta: ["deberta.embeddings.", "deberta.encoder.rel_embeddings."],
    albert: ["albert.embeddings.", "albert.encoder.embedding_hidden_mapping_in."],
    modernbert: ["model.embeddings."],
    gpt2: ["transformer.wte.", "transformer.wpe."],
    llama: ["model.embed_tokens."],
    t5: ["shared."],
    bart: [
        "model.shared.",
        "model.encoder.embed_positions.",
        "model.encoder.layernorm_embedding.",
        "model.decoder.embed_positions.",
        "model.decoder.layernorm_embedding.",
    ],
    vit: ["vit.embeddings."],
    whisper: ["model.encoder.embed_positions.", "model.decoder.embed_tokens.", "model.decoder.embed_positions."],
}
"""By architecture, the prefixes of exactly those parameters that "embeddings" stands for."""

STACKS: dict[Callable[[], nn.Module], list[str]] = {
    bert: ["bert.encoder.layer"],
    roberta: ["roberta.encoder.layer"],
    distilbert: ["distilbert.transformer.layer"],
    deberta: ["deberta.encoder.layer"],
    modernbert: ["model.layers"],
    gpt2: ["transformer.h"],
    llama: ["model.layers"],
    t5: ["encoder.block", "decoder.block"],
    bart: ["model.encoder.layers", "model.decoder.layers"],
    wav2vec2: ["wav2vec2.encoder.layers"],
    whisper: ["model.encoder.layers", "model.decoder.layers"],
}

HEADS: dict[Callable[[], nn.Module], list[str]] = {
    bert: ["classifier."],
    roberta: ["classifier."],
    distilbert: ["pre_classifier.", "classifier."],
    deberta: ["pooler.", "classifier."],
    albert: ["classifier."],
    modernbert: ["head.", "classifier."],
    llama: ["lm_head."],
    bart: ["classification_head."],
    vit: ["classifier."],
    wav2vec2: ["lm_head."],
}


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def under(model: nn.Module, prefixes: list[str]) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(prefixes))}


# ---- what the patterns mean


@pytest.mark.parametrize("build", EMBEDDINGS, ids=lambda build: build.__name__)
def test_the_word_embeddings_names_the_input_embeddings(build: Callable[[], nn.Module]) -> None:
    model = build().requires_grad_(True)
    freeze(model, "embeddings")
    assert frozen(model) == under(model, EMBEDDINGS[build])
    assert frozen(model)


@pytest.mark.parametrize("build", HEADS, ids=lambda build: build.__name__)
def test_the_word_base_names_all_but_the_head(build: Callable[[], nn.Module]) -> None:
    model = build().requires_grad_(True)
    freeze(model, "base")
    trained = under(model, HEADS[build])
    assert trained
    assert frozen(model) == {name for name, _ in model.named_parameters()} - trained


@pytest.mark.parametrize("build", STACKS, ids=lambda build: build.__name__)
@pytest.mark.parametrize(("word", "indices"), [("layers:0-1", (0, 1)), ("layers:2", (2,)), ("layers:0-2", (0, 1, 2))])
def test_layers_are_counted_in_every_stack(build: Callable[[], nn.Module], word: str, indices: tuple[int, ...]) -> None:
    model = build().requires_grad_(True)
    freeze(model, word)
    assert frozen(model) == under(model, [f"{stack}.{index}." for stack in STACKS[build] for index in indices])


def test_layers_of_vision_models_by_any_name() -> None:
    model = vit()  # vit.encoder.layer in transformers 5.8, vit.layers in 5.23
    ((name, stack),) = layer_stacks(model).items()
    freeze(model, "layers:1")
    assert len(stack) == 3
    assert frozen(model) == under(model, [f"{name}.1."])


def test_albert_has_one_shared_group_of_layers() -> None:
    model = albert()
    freeze(model, "layers:0")
    assert frozen(model) == under(model, ["albert.encoder.albert_layer_groups.0."])
    with pytest.raises(ValueError) as error:
        freeze(albert(), "layers:0-2")
    assert str(error.value) == (
        "patterns='layers:0-2' exceeds the layers of AlbertForSequenceClassification; expected indices within 0-0 "
        "(albert.encoder.albert_layer_groups). Write 'layers:0-0', or name the layers of one stack."
    )


def test_layers_of_a_model_that_is_not_from_transformers() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(2, 2)])
            self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    model = Plain()
    freeze(model, "layers:1-2")
    assert frozen(model) == under(model, ["blocks.1.", "blocks.2."])


def test_t5s_relative_attention_bias_belongs_to_its_layer() -> None:
    model = t5()
    freeze(model, "layers:0")
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert name in frozen(model)


@pytest.mark.parametrize(
    ("patterns", "prefixes"),
    [
        ("bert.pooler", ["bert.pooler."]),
        ("bert.encoder.layer.1", ["bert.encoder.layer.1."]),
        ("bert.embeddings.LayerNorm.weight", ["bert.embeddings.LayerNorm.weight"]),
        ("bert.encoder.layer.[0-1].*", ["bert.encoder.layer.0.", "bert.encoder.layer.1."]),
        ("bert.encoder.layer.[!0]", ["bert.encoder.layer.1.", "bert.encoder.layer.2."]),
        (("bert.pooler", "layers:2"), ["bert.pooler.", "bert.encoder.layer.2."]),
        ({"bert.pooler"}, ["bert.pooler."]),
    ],
)
def test_names_and_globs(patterns: Any, prefixes: list[str]) -> None:
    model = bert()
    freeze(model, patterns)
    assert frozen(model) == under(model, prefixes)


def test_a_name_is_no_prefix_of_a_longer_number() -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**{**TEXT, "num_hidden_layers": 11}))
    freeze(model, "bert.encoder.layer.1")
    assert frozen(model) == under(model, ["bert.encoder.layer.1."])


def test_globs_reach_single_parameters_and_generators_are_read_once() -> None:
    model = bert()
    callback = FreezeCallback(pattern for pattern in ["*.bias", "embeddings"])
    freeze(model, callback.patterns)
    expected = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    assert frozen(model) == expected | under(model, ["bert.embeddings."])


def test_a_tied_head_is_frozen_under_either_name() -> None:
    for pattern in ("transformer.wte", "lm_head"):
        model = gpt2()
        freeze(model, pattern)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert not model.lm_head.weight.requires_grad


# ---- PEFT


# peft 0.21.2 reads the name that transformers 5.23 deprecates
peft_reads_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def lora(model: nn.Module, **settings: Any) -> peft.PeftModel:
    modules = {"target_modules": ["query", "word_embeddings"], "modules_to_save": ["classifier"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **{**modules, **settings}))


@peft_reads_old_name
def test_base_never_freezes_adapters() -> None:
    model = lora(bert())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    freeze(model, "base")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 8  # two of word_embeddings, two of each layer's query
    assert trained == adapters | {name for name, _ in model.named_parameters() if ".classifier." in name}


@peft_reads_old_name
def test_base_of_a_fresh_peft_model_is_frozen_already() -> None:
    model = lora(bert())
    before = frozen(model)
    freeze(model, "base").remove()
    assert frozen(model) == before


def test_base_never_freezes_adapters_added_by_transformers_itself() -> None:
    model = bert()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    before = frozen(model)
    freeze(model, "base")
    assert frozen(model) == before
    assert trainable_parameters(model) == 3 * (2 * 16 + 16 * 2)


@peft_reads_old_name
def test_names_are_those_of_the_wrapped_model() -> None:
    model = lora(bert())
    freeze(model, ["base_model.model.bert.encoder.layer.0", "layers:1"])
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad and ".layer." in name]
    assert len(left) == 2
    assert all(".layer.2." in name for name in left)


# ---- errors


NEAREST = (
    "expected a module or parameter name, a glob, 'embeddings', 'base' or 'layers:first-last'.{} "
    "Pass patterns='layers:0', or one of its parts: bert, classifier"
)
WRITE = "Write, for example, patterns=['embeddings', 'layers:0-3']."
RANGE = (
    "is not a range of layers; expected 'layers:first-last' or 'layers:index', counted from 0, the last included. "
    "Write, for example, 'layers:0-3'."
)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            "bert.encoder.layers.0",
            "patterns='bert.encoder.layers.0' matches no parameter of BertForSequenceClassification; "
            + NEAREST.format(" Did you mean 'bert.encoder.layer.0'?"),
        ),
        (
            ["embeddings", "embedings"],
            "patterns='embedings' matches no parameter of BertForSequenceClassification; "
            + NEAREST.format(" Did you mean 'embeddings'?"),
        ),
        (
            "zzz.*",
            "patterns='zzz.*' matches no parameter of BertForSequenceClassification; " + NEAREST.format(""),
        ),
        (
            "*",
            "patterns='*' would leave BertForSequenceClassification nothing to train; expected at least one parameter "
            "that stays trainable. Pass patterns='layers:0'",
        ),
        (
            ["base", "classifier"],
            "patterns=['base', 'classifier'] would leave BertForSequenceClassification nothing to train; expected at "
            "least one parameter that stays trainable. Pass patterns='layers:0'",
        ),
        (
            "layers:1-3",
            "patterns='layers:1-3' exceeds the layers of BertForSequenceClassification; expected indices within 0-2 "
            "(bert.encoder.layer). Write 'layers:0-2', or name the layers of one stack.",
        ),
        ("layers:", f"patterns='layers:' {RANGE}"),
        ("layers:2-1", f"patterns='layers:2-1' {RANGE}"),
        ("layers:-1", f"patterns='layers:-1' {RANGE}"),
        ("layers:0-", f"patterns='layers:0-' {RANGE}"),
        ("layers:first", f"patterns='layers:first' {RANGE}"),
        ("", f"patterns='' contains an empty pattern; expected one pattern or several. {WRITE}"),
        (["base", " "], f"patterns=['base', ' '] contains an empty pattern; expected one pattern or several. {WRITE}"),
        ([], f"patterns=[] is empty; expected one pattern or several. {WRITE}"),
        (3, f"patterns=3 is not text; expected one pattern or several. {WRITE}"),
        (None, f"patterns=None is not text; expected one pattern or several. {WRITE}"),
        (b"base", f"patterns=b'base' is not text; expected one pattern or several. {WRITE}"),
        (["base", 3], f"patterns=['base', 3] contains 3, which is not text; expected one pattern or several. {WRITE}"),
    ],
)
def test_errors_leave_the_model_as_it_was(patterns: Any, message: str) -> None:
    model = bert()
    with pytest.raises(ValueError) as error:
        freeze(model, patterns)
    assert str(error.value) == message
    assert frozen(model) == set()


@pytest.mark.parametrize("patterns", [[], "", "layers:2-1", 3])
def test_the_callback_refuses_at_once_what_fits_no_model(patterns: Any) -> None:
    with pytest.raises(ValueError, match=r"^patterns="):
        FreezeCallback(patterns)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (transformers.BertModel(transformers.BertConfig(**TEXT)), "BertModel"),
        (nn.Linear(2, 2), "Linear"),
        (t5(), "T5ForConditionalGeneration"),
    ],
    ids=["bare", "not from transformers", "no part of it is its base_model"],
)
def test_base_needs_a_head(model: nn.Module, name: str) -> None:
    with pytest.raises(ValueError) as error:
        freeze(model, "base")
    assert str(error.value) == (
        f"patterns='base' needs a head apart from the base model, and {name} has none; expected a model whose "
        "base_model is a part of it. Pass patterns='layers:0'"
    )


def test_a_tied_head_counts_as_part_of_the_base() -> None:
    with pytest.raises(ValueError) as error:
        freeze(gpt2(), "base")
    assert str(error.value) == (
        "patterns='base' would leave GPT2LMHeadModel nothing to train; expected at least one parameter that stays "
        "trainable. Pass patterns='layers:0'"
    )


def test_stacks_of_two_lengths_are_both_named() -> None:
    config = transformers.BartConfig(**{**SEQ2SEQ, "decoder_layers": 2}, max_position_embeddings=64)
    with pytest.raises(ValueError) as error:
        freeze(transformers.BartForConditionalGeneration(config), "layers:0-2")
    assert str(error.value) == (
        "patterns='layers:0-2' exceeds the layers of BartForConditionalGeneration; expected indices within 0-2 "
        "(model.encoder.layers) and 0-1 (model.decoder.layers). Write 'layers:0-1', or name the layers of one stack."
    )


def test_a_model_without_layers_or_embeddings() -> None:
    with pytest.raises(ValueError) as error:
        freeze(nn.Linear(2, 2), "layers:0")
    assert str(error.value) == (
        "patterns='layers:0' finds no layers in Linear; expected an nn.ModuleList of repeated layers. Pass "
        "patterns='embeddings'"
    )
    with pytest.raises(ValueError) as error:
        freeze(wav2vec2(), "embeddings")
    assert str(error.value) == (
        "patterns='embeddings' matches no parameter of Wav2Vec2ForCTC; "
        + NEAREST.format("").replace("bert, classifier", "wav2vec2, lm_head")
    )


# ---- undo


def test_the_handle_restores_exactly_the_flags_it_changed() -> None:
    model = bert()
    model.bert.pooler.requires_grad_(False)
    outer = freeze(model, "embeddings")
    inner = freeze(model, ["embeddings", "bert.pooler", "layers:1"])
    inner.remove()
    assert frozen(model) == under(model, ["bert.embeddings.", "bert.pooler."])
    outer.remove()
    outer.remove()
    assert frozen(model) == under(model, ["bert.pooler."])


def test_a_freeze_as_a_context() -> None:
    model = bert()
    with freeze(model, "base"):
        assert trainable_parameters(model) == sum(p.numel() for p in model.classifier.parameters())
    assert frozen(model) == set()


def test_freezing_drops_a_gradient_that_an_optimizer_would_still_use() -> None:
    model = bert()
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([0])).loss.backward()
    before = copy.deepcopy(model.state_dict())
    freeze(model, "layers:0")
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved.isdisjoint(under(model, ["bert.encoder.layer.0."]))
    assert "bert.encoder.layer.1.output.dense.weight" in moved


def test_a_handle_keeps_no_model_alive() -> None:
    model = bert()
    reference = weakref.ref(model.bert.embeddings.word_embeddings.weight)
    handle = freeze(model, "embeddings")
    del model
    gc.collect()
    assert reference() is None
    handle.remove()


# ---- the activations that a frozen prefix saves


class Saved:
    """A tensor as the graph holds it: it dies with the node that saved it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Return the bytes that the graph holds after one forward pass, each storage once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = model(**batch).loss
    gc.collect()  # what a checkpointed layer without any gradient saved is dead by now
    storages = {saved.tensor.untyped_storage().data_ptr(): saved.tensor.untyped_storage().nbytes() for saved in alive}
    total = sum(size for pointer, size in storages.items() if pointer not in parameters)
    loss.backward()
    model.zero_grad()
    return total


def six_layers() -> nn.Module:
    return tiny.bert(hidden_size=64, intermediate_size=256, num_hidden_layers=6)


def batch(rows: int = 8, length: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(rows) % 3}


PREFIX = ["embeddings", "layers:0-2"]


def enable_checkpointing(model: Any, *, use_reentrant: bool = False) -> None:
    """Switch checkpointing on as stock ``Trainer`` does, by the installed version's name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def test_a_frozen_prefix_saves_its_activations() -> None:
    model = six_layers()
    everything = saved_bytes(model, batch())
    freeze(model, PREFIX)
    assert saved_bytes(model, batch()) < 0.51 * everything  # 3 of 6 layers, and the embeddings


def test_a_frozen_suffix_saves_no_input_of_a_layer_before_it() -> None:
    model = six_layers()
    everything = saved_bytes(model, batch())
    freeze(model, "layers:3-5")
    assert saved_bytes(model, batch()) > 0.75 * everything  # the gradient still passes through


def test_input_gradients_undo_the_saving_and_are_dropped() -> None:
    model = six_layers()
    freeze(model, PREFIX)
    enable_checkpointing(model)
    stock = saved_bytes(model, batch())
    handle = drop_input_gradients(model)
    dropped = saved_bytes(model, batch())
    assert not handle.is_removed
    assert dropped < 0.51 * stock  # the inputs of 3 of 6 layers
    handle.remove()
    assert saved_bytes(model, batch()) == stock


def test_a_frozen_prefix_is_not_recomputed() -> None:
    model = six_layers()
    freeze(model, PREFIX)
    enable_checkpointing(model)
    calls = [0] * 6
    for index, layer in enumerate(model.bert.encoder.layer):

        def count(*args: Any, index: int = index) -> None:
            calls[index] += 1

        layer.attention.register_forward_hook(count)
    saved_bytes(model, batch())
    assert calls == [2] * 6
    drop_input_gradients(model)
    saved_bytes(model, batch())
    assert calls == [3, 3, 3, 4, 4, 4]


def test_input_gradients_are_dropped_when_they_were_enabled_twice() -> None:
    model = six_layers()
    freeze(model, PREFIX)
    enable_checkpointing(model)
    once = drop_input_gradients(model)
    assert not once.is_removed
    dropped = saved_bytes(model, batch())
    enable_checkpointing(model)  # by hand
    enable_checkpointing(model)  # by Trainer: transformers now knows the second set of hooks only
    drop_input_gradients(model)
    assert saved_bytes(model, batch()) == dropped


@peft_reads_old_name
def test_input_gradients_stay_where_they_are_needed() -> None:
    reentrant = six_layers()
    enable_checkpointing(reentrant, use_reentrant=True)
    adapted = bert()
    adapted.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    enable_checkpointing(adapted)
    wrapped = lora(bert())
    enable_checkpointing(wrapped.get_base_model())
    for model in (reentrant, adapted, wrapped, six_layers(), nn.Linear(2, 2), vit()):
        hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
        assert drop_input_gradients(model).is_removed
        assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == hooks


def test_the_private_names_that_tell_how_a_model_is_checkpointed() -> None:
    """``_gradient_checkpointing_func`` and the name of the hook: seen in transformers 5.8.1, 5.17.0 and 5.23.0."""
    model = bert()
    enable_checkpointing(model)
    embeddings = model.get_input_embeddings()
    assert [hook.__name__ for hook in embeddings._forward_hooks.values()] == ["make_inputs_require_grads"]
    layer = model.bert.encoder.layer[0]
    assert layer.gradient_checkpointing is True
    assert layer._gradient_checkpointing_func.keywords["use_reentrant"] is False
    model.disable_input_require_grads()
    assert not embeddings._forward_hooks


@peft_reads_old_name
def test_the_private_name_that_tells_an_adapter() -> None:
    """``adapter_layer_names``: seen in peft 0.21.2."""
    model = lora(bert())
    query = model.base_model.model.bert.encoder.layer[0].attention.self.query
    assert "lora_A" in query.adapter_layer_names
    assert model.base_model.model.classifier.adapter_layer_names == ("modules_to_save",)


# ---- with the stock Trainer


def train(model: Any, tmp_path: Any, callback: FreezeCallback | None, **settings: Any) -> Trainer:
    callbacks = [] if callback is None else [callback]
    common = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", "trainer_callbacks": callbacks}
    return tiny.train(model, tiny.rows(16), tmp_path, **{**common, **settings})


def moved(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [{}, checkpointing_arguments()], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_bnb_8bit"])
def test_training_moves_what_is_trainable_and_nothing_else(
    tmp_path: Any, optim: str, checkpointing: dict[str, Any]
) -> None:
    model = six_layers()
    before = weights(model)
    train(model, tmp_path, FreezeCallback(PREFIX), optim=optim, **checkpointing)
    assert frozen(model) == under(model, ["bert.embeddings.", *(f"bert.encoder.layer.{i}." for i in range(3))])
    assert moved(before, model) == set(before) - frozen(model)


def test_reentrant_checkpointing_still_trains(tmp_path: Any) -> None:
    model = six_layers()
    before = weights(model)
    callback = FreezeCallback(PREFIX)
    train(model, tmp_path, callback, **checkpointing_arguments(use_reentrant=True))
    assert moved(before, model) == set(before) - frozen(model)
    assert [change.name for change in callback.changes] == ["trainable_parameters"]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.train()
    model(**batch()).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradients_are_those_without_freezing_and_without_checkpointing(tmp_path: Any) -> None:
    reference = gradients(six_layers())
    plain, checkpointed = six_layers(), six_layers()
    freeze(plain, PREFIX)
    callback = FreezeCallback(PREFIX)
    arguments = tiny.arguments(tmp_path, **checkpointing_arguments())
    trainer = Trainer(model=checkpointed, args=arguments, train_dataset=tiny.rows(), callbacks=[callback])
    enable_checkpointing(checkpointed)
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    for model in (plain, checkpointed):
        found = gradients(model)
        assert set(found) == set(reference) - frozen(model)
        for name, gradient in found.items():
            assert torch.equal(gradient, reference[name]), name


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, bitsandbytes.optim.AdamW8bit])
@pytest.mark.parametrize("rebuilt", [False, True], ids=["model", "model_init"])
def test_no_optimizer_state_for_what_is_frozen(tmp_path: Any, optimizer_class: Any, rebuilt: bool) -> None:
    settings: dict[str, Any] = {"trainer_optimizer_cls_and_kwargs": (optimizer_class, {"lr": 1e-3})}
    if rebuilt:
        settings["trainer_model_init"] = six_layers
    trainer = train(None if rebuilt else six_layers(), tmp_path, FreezeCallback(PREFIX), **settings)
    optimizer = trainer.optimizer.optimizer
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    in_groups = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    with_state = {names[parameter] for parameter, state in optimizer.state.items() if state}
    trainable = set(names.values()) - frozen(trainer.model)
    assert frozen(trainer.model) == under(
        trainer.model, ["bert.embeddings.", *(f"bert.encoder.layer.{i}." for i in range(3))]
    )
    assert with_state == trainable
    assert in_groups == (set(names.values()) if rebuilt else trainable)


def test_attach_freezes_before_the_optimizer_is_built(tmp_path: Any) -> None:
    trainer = Trainer(model=tiny.bert(), args=tiny.arguments(tmp_path), train_dataset=tiny.rows())
    attach(trainer, FreezeCallback("base")).train()
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(p) for p in trainer.model.classifier.parameters()}


def test_the_callback_saves_activations_in_a_real_run(tmp_path: Any) -> None:
    """Three Trainers; the bytes are read by the graph's hooks during the first training step of each."""
    seen = {}
    for name, callback in {"none": None, "stock": None, "ours": FreezeCallback(PREFIX)}.items():
        model = six_layers()
        if name == "stock":
            freeze(model, PREFIX)

        class Measure(transformers.TrainerCallback):
            def on_step_begin(self, *args: Any, model: Any = None, key: str = name, **kwargs: Any) -> None:
                seen[key] = saved_bytes(model, batch())

        callbacks = [Measure()] if callback is None else [callback, Measure()]
        train(model, tmp_path, None, trainer_callbacks=callbacks, max_steps=1, **checkpointing_arguments())
    assert seen["ours"] < 0.51 * seen["stock"] <= 0.51 * seen["none"]


def test_changes_and_the_log_line(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = six_layers()
    total = trainable_parameters(model)
    callback = FreezeCallback(PREFIX)
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        trainer = train(model, tmp_path, callback, **checkpointing_arguments())
        trainer.train()
    trained = trainable_parameters(model)
    assert callback.changes == [
        Change("trainable_parameters", total, trained, "frozen: embeddings, layers:0-2"),
        Change(
            "input_require_grads",
            True,
            False,
            "non-reentrant checkpointing needs no gradient there, and it would undo what a frozen prefix saves",
        ),
    ]
    ours = [record for record in caplog.records if record.name == "hf_memopt.techniques.freezing.freezing"]
    assert [record.getMessage() for record in ours] == [
        f"FreezeCallback trains {trained:,} of {total:,} parameters; frozen: embeddings, layers:0-2"
    ]


def test_the_callbacks_handle_undoes_both(tmp_path: Any) -> None:
    model = six_layers()
    callback = FreezeCallback(PREFIX)
    trainer = train(model, tmp_path, callback, **checkpointing_arguments())
    trainer.train()
    for _ in range(2):
        assert callback.handle is not None
        callback.handle.remove()
        assert frozen(model) == set()
        assert len(model.get_input_embeddings()._forward_hooks) == 1
        trainer.train()  # acts again, as every callback of a Trainer does
        assert len(frozen(model)) == 5 + 3 * 16
        assert len(model.get_input_embeddings()._forward_hooks) == 0


def test_a_wrapper_around_the_frozen_model_is_left_alone(tmp_path: Any) -> None:
    model = tiny.bert()
    callback = FreezeCallback("bert.pooler")
    trainer = Trainer(model=model, args=tiny.arguments(tmp_path), train_dataset=tiny.rows(), callbacks=[callback])
    wrapper = nn.ModuleDict({"module": model})  # names change: "module.bert.pooler"
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=wrapper)
    assert frozen(model) == under(model, ["bert.pooler."])


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bnb_8bit"])
@pytest.mark.parametrize("rebuilt", [False, True], ids=["model", "model_init"])
def test_a_resumed_run_equals_a_straight_one(tmp_path: Any, optim: str, rebuilt: bool) -> None:
    def run(folder: str, resume: str | None = None) -> nn.Module:
        # embeddings stay trainable: 8-bit states of 100 x 64 elements, resumed from the checkpoint
        model = {"model_init": six_layers} if rebuilt else {"model": six_layers()}
        arguments = tiny.arguments(
            tmp_path / folder,
            optim=optim,
            learning_rate=1e-3,
            per_device_train_batch_size=4,
            save_strategy="steps",
            save_steps=2,
            **checkpointing_arguments(),
        )
        trainer = Trainer(
            **model, args=arguments, train_dataset=tiny.rows(16), callbacks=[FreezeCallback(["layers:0-2"])]
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    straight = run("straight")
    resumed = run("resumed", str(tmp_path / "straight" / "checkpoint-2"))
    assert tiny.largest_difference(straight, resumed) == 0.0
    assert frozen(resumed) == frozen(straight) != set()


def test_two_trainers_do_not_disturb_each_other(tmp_path: Any) -> None:
    alone = {pattern: train(tiny.bert(), tmp_path, FreezeCallback(pattern)).model for pattern in ("embeddings", "base")}
    shared_dataset = tiny.rows(16)
    trainers = {
        pattern: Trainer(
            model=tiny.bert(),
            args=tiny.arguments(tmp_path, per_device_train_batch_size=8, train_sampling_strategy="sequential"),
            train_dataset=shared_dataset,
            callbacks=[FreezeCallback(pattern)],
        )
        for pattern in alone
    }
    for pattern, trainer in trainers.items():
        trainer.train()
        assert frozen(trainer.model) == frozen(alone[pattern]) != set()
        assert tiny.largest_difference(trainer.model, alone[pattern]) == 0.0


def test_one_callback_serves_two_trainers(tmp_path: Any) -> None:
    callback = FreezeCallback("base")
    first, second = tiny.bert(0), tiny.bert(1)
    before = weights(first), weights(second)
    arguments = tiny.arguments(tmp_path)
    trainers = [
        Trainer(model=model, args=arguments, train_dataset=tiny.rows(), callbacks=[callback])
        for model in (first, second)
    ]
    for trainer in trainers:
        trainer.train()
    for model, old in zip((first, second), before, strict=True):
        assert moved(old, model) == {"classifier.weight", "classifier.bias"}


def test_a_callback_is_copied_and_pickled_unused(tmp_path: Any) -> None:
    callback = FreezeCallback(["embeddings"])
    train(tiny.bert(), tmp_path, callback)
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert (copied.patterns, copied.changes, copied.handle) == (("embeddings",), [], None)


def test_a_callback_keeps_no_model_alive(tmp_path: Any) -> None:
    callback = FreezeCallback("embeddings")
    trainer = train(tiny.bert(), tmp_path, callback)
    reference = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert reference() is None
