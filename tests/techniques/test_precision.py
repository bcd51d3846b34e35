"""The precision that follows the card, with the card played by monkeypatches of torch's own answers; autocast without a
cache, and master weights.
"""

from __future__ import annotations

import copy
import csv
import gc
import pickle
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt.binding import attach, checkpointing_arguments, enable_checkpointing
from hf_memopt.changes import Change
from hf_memopt.devices import against_float16, check_precision, choose_precision, precision_support
from hf_memopt.memory import estimate
from hf_memopt.techniques import PrecisionCallback
from hf_memopt.techniques.freezing import FreezeCallback
from hf_memopt.techniques.precision import disable_autocast_cache, keep_master_weights
from hf_memopt.units import format_bytes


def play(monkeypatch, kind: str, *, name: str = "", capability: tuple[int, int] = (0, 0), native_bf16: bool = False):
    monkeypatch.setattr(precision_support, "accelerator_type", lambda: kind)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: native_bf16 or including_emulation
    )


@pytest.mark.parametrize(
    ("name", "capability", "native", "chosen", "reason"),
    [
        ("Tesla T4", (7, 5), False, "fp16", "Tesla T4 (compute capability 7.5) only emulates bfloat16"),
        ("Tesla V100", (7, 0), False, "fp16", "Tesla V100 (compute capability 7.0) only emulates bfloat16"),
        ("RTX 3050", (8, 6), True, "bf16", "RTX 3050 (compute capability 8.6) computes bfloat16 natively"),
        (
            "Tesla P4",
            (6, 1),
            False,
            "fp32",
            "Tesla P4 (compute capability 6.1) only emulates bfloat16, and it has no tensor cores for float16",
        ),
        (
            "NVIDIA GeForce GTX 1650",
            (7, 5),
            False,
            "fp32",
            "NVIDIA GeForce GTX 1650 (compute capability 7.5) only emulates bfloat16, and GTX 16 is unsafe in float16: "
            "its convolutions return NaN (https://github.com/pytorch/pytorch/issues/58123)",
        ),
    ],
)
def test_cuda_cards(monkeypatch, name, capability, native, chosen, reason) -> None:
    play(monkeypatch, "cuda", name=name, capability=capability, native_bf16=native)
    found = choose_precision()
    assert (found.name, found.reason, found.bf16, found.fp16) == (chosen, reason, chosen == "bf16", chosen == "fp16")


# ---- What is known to leave float16's range

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "hf_memopt/devices/float16_overflow.csv"
OVERFLOWING = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("row", OVERFLOWING, ids=lambda row: row["name"])
def test_what_overflows_in_float16_is_known_has_a_source_and_is_documented(row: dict[str, str]) -> None:
    assert row["source"].startswith("https://")
    said = f"{row['name']} is unsafe in float16: {row['what']} ({row['source']})"
    if row["name"] == "GTX 16":
        assert against_float16("NVIDIA GeForce GTX 1650") == said
    else:
        assert against_float16(config=transformers.AutoConfig.for_model(row["name"])) == said
    page = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert row["source"] in next(line for line in page.splitlines() if f"| {row['name']} " in line)


def test_a_language_model_within_another_model_counts() -> None:
    assert against_float16(config=transformers.PaliGemmaConfig(text_config={"model_type": "gemma2"})).startswith(
        "gemma2 "
    )


@pytest.mark.parametrize("config", [None, object(), transformers.BertConfig(), transformers.LlamaConfig()])
def test_of_others_nothing_is_said(config: Any) -> None:
    assert against_float16(config=config) == against_float16("Tesla T4", config) == ""


def test_use_cpu_wins_over_the_card(monkeypatch) -> None:
    play(monkeypatch, "cuda", name="RTX 3050", capability=(8, 6), native_bf16=True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert choose_precision(use_cpu=True).name == "fp32"


@pytest.mark.parametrize(
    ("capabilities", "chosen", "reason"),
    [
        ({}, "fp32", "this CPU has no bfloat16 instructions, so 16 bit would only be slower"),
        ({"amx_bf16": True}, "bf16", "this CPU multiplies bfloat16 (amx_bf16); the gain is not yet measured"),
        ({"avx512_bf16": True}, "bf16", "this CPU multiplies bfloat16 (avx512_bf16); the gain is not yet measured"),
    ],
)
def test_cpu_by_its_instructions(monkeypatch, capabilities, chosen, reason) -> None:
    play(monkeypatch, "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert (choose_precision().name, choose_precision().reason) == (chosen, reason)


def test_a_torch_that_does_not_tell_its_capabilities_means_float32(monkeypatch) -> None:
    play(monkeypatch, "cpu")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert choose_precision().name == "fp32"


@pytest.mark.parametrize(("kind", "chosen"), [("mps", "fp32"), ("npu", "fp32")])
def test_other_accelerators(monkeypatch, kind, chosen) -> None:
    play(monkeypatch, kind)
    assert choose_precision().name == chosen


def test_fp16_without_a_card_is_refused(monkeypatch) -> None:
    play(monkeypatch, "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    with pytest.raises(ValueError) as error:
        check_precision(bf16=False, fp16=True)
    assert str(error.value) == (
        "fp16=True cannot train on this machine, whose device is 'cpu'; expected a GPU with a gradient scaler. "
        "Leave fp16 out: this machine trains in fp32"
    )


def test_emulated_bf16_is_refused(monkeypatch) -> None:
    play(monkeypatch, "cuda", name="Tesla T4", capability=(7, 5))
    with pytest.raises(ValueError) as error:
        check_precision(bf16=True, fp16=False)
    assert str(error.value) == (
        "bf16=True is emulated here: Tesla T4 (compute capability 7.5) only emulates bfloat16; expected fp16. Leave "
        "bf16 out"
    )


def test_both_at_once_are_refused() -> None:
    with pytest.raises(ValueError) as error:
        check_precision(bf16=True, fp16=True)
    assert str(error.value) == (
        "bf16=True, fp16=True are given together; expected one of them. Drop one: preset(..., bf16=True)"
    )


def test_what_the_card_can_do_is_accepted(monkeypatch) -> None:
    play(monkeypatch, "cuda", name="Tesla T4", capability=(7, 5))
    assert check_precision(bf16=False, fp16=True) is None
    play(monkeypatch, "cuda", name="RTX 3050", capability=(8, 6), native_bf16=True)
    assert check_precision(bf16=True, fp16=False) is None
    assert check_precision(bf16=False, fp16=True) is None


def test_the_machine_at_hand_gets_an_answer() -> None:
    assert choose_precision().name in ("bf16", "fp16", "fp32")


def make_trainer(folder: Any, *callbacks: TrainerCallback, model: Any = None, **settings: Any) -> Trainer:
    given = {"model_init": model} if callable(model) and not isinstance(model, nn.Module) else {"model": model}
    if model is None:
        given = {"model": tiny.bert()}
    arguments = tiny.arguments(folder, **{"max_steps": 2, "per_device_train_batch_size": 4, **settings})
    return Trainer(**given, args=arguments, train_dataset=tiny.rows(16), callbacks=list(callbacks))


# ---- Autocast's cache -----------------------------------------------------------------------------------------------


def albert() -> nn.Module:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": 100, "hidden_size": 32, "embedding_size": 16, "intermediate_size": 64}
    config = transformers.AlbertConfig(**sizes, **dropout, num_hidden_layers=3, num_attention_heads=2)
    return transformers.AlbertForSequenceClassification(config)


class Casts(TorchDispatchMode):
    """Count how often a parameter is cast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count = 0
        self._parameters = {id(parameter) for parameter in model.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cast = function is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
        self.count += is_cast and id(args[0]) in self._parameters
        return function(*args, **kwargs)


def autocast_step(model: nn.Module, *, cache: bool, checkpointed: bool) -> tuple[int, torch.Tensor, dict[str, Any]]:
    """Return the casts of a step, its loss and its gradients."""
    if checkpointed:
        enable_checkpointing(model, {"use_reentrant": False})
    ids = torch.arange(5, 29).reshape(2, 12)
    with Casts(model.train()) as casts:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            loss = model(input_ids=ids, labels=torch.tensor([0, 1])).loss
        loss.backward()
    return casts.count, loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("checkpointed", "casts"), [(False, 28), (True, 52)], ids=["plain", "checkpointed"])
def test_without_the_cache_a_step_is_bit_equal_and_casts_as_often(checkpointed: bool, casts: int) -> None:
    """14 linear layers of weight and bias; the recomputation of the 2 layers casts their 12 once more, either way."""
    cached = autocast_step(tiny.bert(), cache=True, checkpointed=checkpointed)
    direct = autocast_step(tiny.bert(), cache=False, checkpointed=checkpointed)
    assert (cached[0], direct[0]) == (casts, casts)
    assert torch.equal(cached[1], direct[1])
    assert all(torch.equal(cached[2][name], gradient) for name, gradient in direct[2].items())


def test_without_the_cache_a_shared_weight_is_cast_at_each_use() -> None:
    cached, direct = (autocast_step(albert(), cache=cache, checkpointed=False) for cache in (True, False))
    assert (cached[0], direct[0]) == (18, 42)
    assert torch.equal(cached[1], direct[1])
    different = {name for name, gradient in direct[2].items() if not torch.equal(cached[2][name], gradient)}
    assert different
    assert all("albert_layer" in name for name in different)  # summed over layers in float32, not in bfloat16


def peaks(*, cache: bool, **settings: Any) -> dict[str, int]:
    """Return the peak in MiB of BERT-large's forward passes and of the whole step, by the estimator."""
    sizes = {"batch_size": 32, "seq_len": 128, "gpu": "RTX 3090"}
    found = estimate("bert-large-uncased", **sizes, precision="bf16", autocast_cache=cache, **settings)
    total = found.timeline.components.sum(axis=1)
    starts = [*found.timeline.phases, (len(total), "end")]
    forward = [total[a:b].max() for (a, name), (b, _) in pairwise(starts) if name == "forward"]
    return {"forward": round(max(forward) / 2**20), "step": round(found.peak_allocated_bytes / 2**20)}


@pytest.mark.parametrize(
    ("settings", "cached", "direct"),
    [
        pytest.param(
            {"gradient_accumulation_steps": 2},
            {"forward": 6203, "step": 6203},
            {"forward": 5626, "step": 5787},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"gradient_release": True, "max_grad_norm": 0.0},
            {"forward": 4923, "step": 4923},
            {"forward": 4347, "step": 4508},
            marks=pytest.mark.slow,
        ),
        ({}, {"forward": 4923, "step": 5249}, {"forward": 4347, "step": 5249}),
    ],
    ids=["accumulation", "release", "plain"],
)
def test_what_the_cache_costs_under_checkpointing(settings: Any, cached: Any, direct: Any) -> None:
    """The figures of the docstring: 576 MiB of a forward pass, and what of it the peak of the step feels."""
    assert peaks(cache=True, checkpointing=True, **settings) == cached
    assert peaks(cache=False, checkpointing=True, **settings) == direct


def test_without_checkpointing_the_cache_costs_nothing() -> None:
    settings = {
        "batch_size": 2,
        "seq_len": 12,
        "gpu": "RTX 3090",
        "precision": "bf16",
        "gradient_accumulation_steps": 2,
    }
    cached, direct = (estimate(tiny.bert(), **settings, autocast_cache=cache) for cache in (True, False))
    assert cached.peak_allocated_bytes == direct.peak_allocated_bytes


class CacheInside(nn.Module):
    """Stand in for a layer of the model and note whether autocast runs there, and with its cache."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: set[tuple[bool, bool]] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.add((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return self.inner(*args, **kwargs)


def watched_bert() -> Any:
    model = tiny.bert()
    model.bert.pooler = CacheInside(model.bert.pooler)
    return model


@pytest.mark.parametrize(
    ("choice", "bf16", "checkpointed", "inside"),
    [
        ("auto", True, True, (True, False)),
        ("auto", True, False, (True, True)),
        ("auto", False, True, (False, True)),
        (False, True, False, (True, False)),
        (True, True, True, (True, True)),
    ],
)
def test_the_cache_within_a_real_run(tmp_path: Any, choice: Any, bf16: bool, checkpointed: bool, inside: Any) -> None:
    model, callback = watched_bert(), PrecisionCallback(autocast_cache=choice)
    settings = checkpointing_arguments() if checkpointed else {}
    trainer = attach(make_trainer(tmp_path, callback, model=model, bf16=bf16, **settings))
    model.bert.pooler.seen.clear()  # attach probes the head
    trainer.train()
    assert model.bert.pooler.seen == {inside}
    stock = make_trainer(tmp_path, model=tiny.bert(), bf16=bf16, **settings)
    stock.train()
    pairs = zip(model.parameters(), stock.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    off = Change("autocast_cache", True, False, "it would keep a 16-bit copy of each weight for the forward pass")
    assert (off in callback.changes) is (inside[1] is False)


def test_a_checkpointing_callback_counts_too(tmp_path: Any) -> None:
    class Policy(TrainerCallback):
        technique = "checkpointing policy"

    trainer = attach(make_trainer(tmp_path, PrecisionCallback(), Policy(), bf16=True))
    assert trainer.accelerator.autocast_handler.cache_enabled is False


def test_attach_after_an_evaluation_comes_too_late(tmp_path: Any) -> None:
    """It is accelerate's private mark of a prepared model that tells; this pins it."""
    for choice in (False, "auto"):
        callback = PrecisionCallback(autocast_cache=choice)
        trainer = make_trainer(tmp_path, callback, bf16=True, **checkpointing_arguments())
        trainer.evaluate(tiny.rows(4))
        if choice == "auto":
            attach(trainer)
            late = "the model runs under autocast already, attach came too late"
            assert callback.changes == [Change("autocast_cache", True, True, late)]
            continue
        with pytest.raises(ValueError) as error:
            attach(trainer)
        assert str(error.value) == (
            "autocast_cache=False comes too late, BertForSequenceClassification runs under autocast already; expected "
            "a Trainer that has neither trained nor evaluated. Call attach(trainer) right after Trainer(...)"
        )


def test_the_users_autocast_handler_is_kept_and_comes_back(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, bf16=True)
    for former in (None, AutocastKwargs(enabled=False)):
        trainer.accelerator.autocast_handler = former
        handle = disable_autocast_cache(trainer)
        enabled = former is None
        assert trainer.accelerator.autocast_handler == AutocastKwargs(enabled=enabled, cache_enabled=False)
        disable_autocast_cache(trainer).remove()
        assert trainer.accelerator.autocast_handler.cache_enabled is False
        handle.remove()
        assert trainer.accelerator.autocast_handler is former


def test_an_unbound_callback_says_so(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, PrecisionCallback(), bf16=True)
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    assert str(error.value) == (
        "PrecisionCallback was passed in callbacks= but never bound to its trainer; expected a bound callback. "
        "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
    )


# ---- Master weights -------------------------------------------------------------------------------------------------


def half_llama(**settings: Any) -> nn.Module:
    return tiny.llama(**settings).to(torch.bfloat16)


def half_bert() -> nn.Module:
    return tiny.bert().to(torch.bfloat16)


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def test_master_weights_are_the_same_parameters_and_come_back_exactly() -> None:
    model = half_llama(tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    handle = keep_master_weights(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_frozen = name.startswith("model.layers.0.")
        assert parameter.dtype == (torch.bfloat16 if is_frozen else torch.float32)
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter.to(torch.bfloat16), before[name][1])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert keep_master_weights(model).is_removed
    handle.remove()
    assert dtypes(model) == {torch.bfloat16}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters(remove_duplicate=False))


def test_an_optimizer_that_is_built_already_is_kept_until_it_has_stepped() -> None:
    model = half_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keep_master_weights(model, optimizer).remove()
    rows = torch.arange(5, 17).reshape(1, 12)
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError) as error:
        keep_master_weights(model, optimizer)
    assert str(error.value) == (
        "optimizer=AdamW holds 16-bit states of model.embed_tokens.weight; expected one that has not stepped yet. "
        "Call keep_master_weights(model) before the optimizer is built"
    )
    assert dtypes(model) == {torch.bfloat16}


@pytest.mark.parametrize("rebuilt", [False, True], ids=["model", "model_init"])
def test_small_updates_are_lost_without_master_weights(tmp_path: Any, rebuilt: bool) -> None:
    """Updates of 1e-5 on weights around 0.02: bfloat16 rounds nearly all of them away."""
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in tiny.rows(16)]

    def moved_fraction(*callbacks: TrainerCallback) -> float:
        settings = {"optim": "adamw_torch", "learning_rate": 1e-5, "max_steps": 2, "bf16": True}
        model = {"model_init": lambda: half_llama()} if rebuilt else {"model": half_llama()}
        trainer = Trainer(
            **model, args=tiny.arguments(tmp_path, **settings), train_dataset=rows, callbacks=list(callbacks)
        )
        attach(trainer).train()
        pairs = list(zip(trainer.model.parameters(), half_llama().parameters(), strict=True))
        moved = sum(int((new.float() != old.float()).sum()) for new, old in pairs)
        return moved / sum(old.numel() for _, old in pairs)

    assert moved_fraction() < 0.3
    assert moved_fraction(PrecisionCallback()) > 0.9


def test_master_weights_only_where_autocast_runs(tmp_path: Any) -> None:
    for settings, choice, expected in (
        ({"bf16": True}, True, torch.float32),
        ({"bf16": True}, False, torch.bfloat16),
        ({}, True, torch.bfloat16),  # training in pure 16 bits
    ):
        callback = PrecisionCallback(master_weights=choice)
        trainer = attach(make_trainer(tmp_path, callback, model=half_bert(), **settings))
        assert dtypes(trainer.model) == {expected}
        if expected is torch.float32:
            total = sum(parameter.numel() for parameter in trainer.model.parameters())
            sizes = format_bytes(2 * total), format_bytes(4 * total)
            reason = "41 trainable weights: autocast computes in 16 bits, updates need more"
            assert callback.changes == [
                Change("master_weights", f"16 bits, {sizes[0]}", f"float32, {sizes[1]}", reason)
            ]


# peft 0.21.2 reads the name that transformers 5.23 deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_get_master_weights_and_their_base_does_not(tmp_path: Any) -> None:
    model = peft.get_peft_model(half_bert(), peft.LoraConfig(target_modules=["query"]), autocast_adapter_dtype=False)
    trainer = make_trainer(tmp_path, PrecisionCallback(), model=model, bf16=True, remove_unused_columns=False)
    attach(trainer).train()
    found = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert found == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("way", ["model", "model_init", "attached later"])
def test_a_resumed_run_with_master_weights_equals_a_straight_one(tmp_path: Any, way: str, optim: str) -> None:
    """The checkpoint's float32 weights and states are loaded into float32 parameters."""
    settings = {"bf16": True, "optim": optim, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1}
    models = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        callback = PrecisionCallback()
        model = half_bert if way == "model_init" else half_bert()
        given = () if way == "attached later" else (callback,)
        trainer = attach(make_trainer(tmp_path, *given, model=model, **settings), callback)
        trainer.train(resume_from_checkpoint=resume)
        models.append(trainer.model)
    assert tiny.largest_difference(*models) == 0.0
    assert dtypes(models[1]) == {torch.float32}


def test_what_is_frozen_first_stays_in_16_bits(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, model=half_bert(), bf16=True)
    attach(trainer, FreezeCallback("base"), PrecisionCallback())
    found = {parameter.requires_grad: parameter.dtype for parameter in trainer.model.parameters()}
    assert found == {True: torch.float32, False: torch.bfloat16}


# ---- The callback ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"autocast_cache": 1}, "True or False, or 'auto'. Pass autocast_cache='auto'"),
        ({"autocast_cache": None}, "True or False, or 'auto'. Pass autocast_cache='auto'"),
        ({"master_weights": "auto"}, "True or False. Pass master_weights=True"),
    ],
    ids=["cache-int", "cache-none", "masters-auto"],
)
def test_unknown_values(settings: dict[str, Any], rule: str) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ValueError) as error:
        PrecisionCallback(**settings)
    assert str(error.value) == f"{name}={value!r} is invalid; expected {rule}"


def test_the_handle_undoes_it_and_attach_binds_again(tmp_path: Any) -> None:
    callback = PrecisionCallback(autocast_cache=False)
    trainer = make_trainer(tmp_path, callback, model=half_bert(), bf16=True)
    before = set(vars(trainer))
    for _ in range(2):
        attach(attach(trainer))
        assert "call_model_init" in vars(trainer)
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        assert dtypes(trainer.model) == {torch.float32}
        callback.handle.remove()
        assert "call_model_init" not in vars(trainer)
        assert trainer.accelerator.autocast_handler is None
        assert dtypes(trainer.model) == {torch.bfloat16}
    assert before <= set(vars(trainer))


def test_a_callback_that_was_taken_off_moves_to_another_trainer(tmp_path: Any) -> None:
    callback = PrecisionCallback(autocast_cache=False)
    first, second = (make_trainer(tmp_path, callback, bf16=True) for _ in range(2))
    attach(first)
    callback.handle.remove()
    attach(second)
    assert "call_model_init" not in vars(first)
    assert first.accelerator.autocast_handler is None
    second.train()
    with pytest.raises(RuntimeError, match="never bound to its trainer"):
        first.train()


def test_a_callback_is_copied_and_pickled_unused_and_keeps_no_trainer_alive(tmp_path: Any) -> None:
    callback = PrecisionCallback(autocast_cache=False, master_weights=False)
    trainer = attach(make_trainer(tmp_path, callback, bf16=True))
    trainer.train()
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert (copied.autocast_cache, copied.master_weights) == (False, False)
        assert (copied.changes, copied.handle) == ([], None)
    references = weakref.ref(trainer), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
