"""The precision that follows the card, with the card played by monkeypatches of torch's own answers; autocast without a
cache, and master weights.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import heads
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt import CheckpointingCallback, FreezeCallback, PrecisionCallback, attach
from hf_memopt.training.binding import checkpointing_arguments, enable_checkpointing
from hf_memopt.training.devices import against_float16, check_precision, choose_precision, precision_support
from hf_memopt.types import Change
from hf_memopt.units import format_bytes

Play = Callable[..., None]
HERE = Path(__file__).parent


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def play(kind: str, name: str = "", capability: Any = (0, 0), native: bool = False, instructions: Any = ()) -> None:
        monkeypatch.setattr(precision_support, "accelerator_type", lambda: kind)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation
        )
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True), raising=False)
        if instructions is None:  # of a torch that does not tell
            monkeypatch.delattr(torch.cpu, "get_capabilities")

    return play


@pytest.mark.parametrize("row", rows_of(HERE / "machines.csv"), ids=lambda row: row["machine"])
def test_the_precision_of_a_machine(play: Play, row: dict[str, str]) -> None:
    play(*ast.literal_eval(row["machine"]))
    found, chosen = choose_precision(use_cpu=row["use_cpu"] == "yes"), row["chosen"]
    assert (found.name, found.bf16, found.fp16) == (chosen, chosen == "bf16", chosen == "fp16")
    assert row["reason"] in ("...", found.reason)


@pytest.mark.parametrize("row", rows_of(HERE / "asked_precisions.csv"), ids=lambda row: " ".join(row.values())[:60])
def test_a_precision_that_a_machine_cannot_train_in(play: Play, row: dict[str, str]) -> None:
    play(*ast.literal_eval(row["machine"]))
    with pytest.raises(ValueError) if row["says"] else nullcontext() as error:
        check_precision(**{name: name in row["asked"] for name in ("bf16", "fp16")})
    assert row["says"] in ("", str(error and error.value))


ROOT = Path(__file__).resolve().parents[2]
OVERFLOWING = rows_of(ROOT / "hf_memopt/training/devices/float16_overflow.csv")


@pytest.mark.parametrize("row", OVERFLOWING, ids=lambda row: row["name"])
def test_what_overflows_in_float16_is_known_has_a_source_and_is_documented(row: dict[str, str]) -> None:
    assert row["source"].startswith("https://")
    said = f"{row['name']} is unsafe in float16: {row['what']} ({row['source']})"
    if row["name"] == "GTX 16":
        assert against_float16("NVIDIA GeForce GTX 1650") == said
    else:
        assert against_float16(config=transformers.AutoConfig.for_model(row["name"])) == said
    page = (ROOT / "docs" / "nan-and-precision.md").read_text(encoding="utf-8")
    assert row["source"] in next(line for line in page.splitlines() if f"| {row['name']} " in line)


def test_a_language_model_within_another_model_counts_and_of_others_nothing_is_said() -> None:
    within = transformers.PaliGemmaConfig(text_config={"model_type": "gemma2"})
    assert against_float16(config=within).startswith("gemma2 ")
    for config in (None, object(), transformers.BertConfig(), transformers.LlamaConfig()):
        assert against_float16(config=config) == against_float16("Tesla T4", config) == ""


def make_trainer(folder: Any, *callbacks: TrainerCallback, model: Any = None, **settings: Any) -> Trainer:
    of_trainer = {key[8:]: settings.pop(key) for key in [*settings] if key.startswith("trainer_")}
    arguments = tiny.arguments(folder, **{"max_steps": 2, "per_device_train_batch_size": 4, **settings})
    given = {"train_dataset": tiny.rows(16), "callbacks": list(callbacks), **of_trainer}
    return Trainer(tiny.bert() if model is None and "model_init" not in given else model, arguments, **given)


def albert() -> nn.Module:
    """All layers share their weights."""
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**{**heads.TINY, "num_hidden_layers": 3}, embedding_size=16)
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


def autocast_step(model: nn.Module, *, cache: bool) -> tuple[int, torch.Tensor, dict[str, Any]]:
    """Return the casts of a step, its loss and its gradients."""
    ids = torch.arange(5, 29).reshape(2, 12)
    with Casts(model.train()) as casts:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            loss = model(input_ids=ids, labels=torch.tensor([0, 1])).loss
        loss.backward()
    return casts.count, loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def checkpointed() -> nn.Module:
    model = tiny.bert()
    enable_checkpointing(model, {"use_reentrant": False})
    return model


@pytest.mark.parametrize(("make", "casts"), [(tiny.bert, (28, 28)), (checkpointed, (52, 52)), (albert, (18, 42))])
def test_without_the_cache_a_step_is_bit_equal_but_for_shared_weights(make: Any, casts: tuple[int, int]) -> None:
    """14 linear layers of weight and bias; the recomputation of the 2 layers casts their 12 once more, either way. A
    weight that several layers share is cast at each use, and its gradients are summed in float32, not in bfloat16.
    """
    cached, direct = (autocast_step(make(), cache=cache) for cache in (True, False))
    assert (cached[0], direct[0]) == casts
    assert torch.equal(cached[1], direct[1])
    different = {name for name, gradient in direct[2].items() if not torch.equal(cached[2][name], gradient)}
    assert bool(different) is (make is albert)
    assert all("albert_layer" in name for name in different)


class CacheInside(nn.Module):
    """Stand in for a layer of the model and note whether autocast runs there, and with its cache."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: set[tuple[bool, bool]] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.add((torch.is_autocast_enabled(tiny.DEVICE), torch.is_autocast_cache_enabled()))
        return self.inner(*args, **kwargs)


OFF = Change("autocast_cache", True, False, "it would keep a 16-bit copy of each weight for the forward pass")


@pytest.mark.parametrize(
    ("choice", "bf16", "by", "inside"),
    [
        ("auto", True, "arguments", (True, False)),
        ("auto", True, "callback", (True, False)),
        ("auto", True, "", (True, True)),
        ("auto", False, "arguments", (False, True)),
        (False, True, "", (True, False)),
        (True, True, "arguments", (True, True)),
    ],
)
def test_the_cache_within_a_real_run(tmp_path: Path, choice: Any, bf16: bool, by: str, inside: Any) -> None:
    """``by`` is what asks for checkpointing."""
    model, callback = tiny.bert(), PrecisionCallback(autocast_cache=choice)
    watch = model.bert.pooler = CacheInside(model.bert.pooler)
    settings = checkpointing_arguments() if by == "arguments" else {}
    others = [CheckpointingCallback("full")] if by == "callback" else []
    trainer = attach(make_trainer(tmp_path, callback, *others, model=model, bf16=bf16, **settings))
    watch.seen.clear()  # attach probes the head
    trainer.train()
    assert watch.seen == {inside}
    stock = make_trainer(tmp_path, bf16=bf16, **settings)
    stock.train()
    assert tiny.largest_difference(model, stock.model) == 0.0
    assert (OFF in callback.changes) is (inside[1] is False)


@pytest.mark.parametrize("choice", [False, "auto"])
def test_attach_after_an_evaluation_comes_too_late(choice: Any, tmp_path: Path) -> None:
    """It is accelerate's private mark of a prepared model that tells; this pins it."""
    callback = PrecisionCallback(autocast_cache=choice)
    trainer = make_trainer(tmp_path, bf16=True, **checkpointing_arguments())
    trainer.evaluate(tiny.rows(4))
    if choice == "auto":
        attach(trainer, callback)
        late = "the model runs under autocast already, attach came too late"
        assert callback.changes == [Change("autocast_cache", True, True, late)]
        return
    with pytest.raises(ValueError) as error:
        attach(trainer, callback)
    assert str(error.value) == (
        "autocast_cache=False comes too late, BertForSequenceClassification runs under autocast already; expected a "
        "Trainer that has neither trained nor evaluated. Call attach(trainer) right after Trainer(...)"
    )


TEXTS = heads.causal_examples(16)


def half_llama() -> Any:
    return tiny.llama(tie_word_embeddings=True).to(torch.bfloat16)


def half_bert() -> Any:
    return tiny.bert().to(torch.bfloat16)


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def test_master_weights_are_the_same_parameters_and_come_back_exactly(tmp_path: Path) -> None:
    """Twice, and attached once more in between, which changes nothing."""
    model, callback = half_llama(), PrecisionCallback()
    model.model.layers[0].requires_grad_(False)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    trainer = make_trainer(tmp_path, callback, model=model, bf16=True, trainer_train_dataset=TEXTS)
    for _ in range(2):
        attach(attach(trainer))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            is_frozen = name.startswith("model.layers.0.")
            assert parameter.dtype == (torch.bfloat16 if is_frozen else torch.float32)
            assert id(parameter) == before[name][0]
            assert torch.equal(parameter.to(torch.bfloat16).cpu(), before[name][1])
        assert model.lm_head.weight is model.model.embed_tokens.weight
        callback.handle.remove()
        assert dtypes(model) == {torch.bfloat16}
        assert all(torch.equal(p.cpu(), before[name][1]) for name, p in model.named_parameters(remove_duplicate=False))
        assert "call_model_init" not in vars(trainer)


@pytest.mark.parametrize("rebuilt", [False, True], ids=["model", "model_init"])
def test_small_updates_are_lost_without_master_weights(tmp_path: Path, rebuilt: bool) -> None:
    """Updates of 1e-5 on weights around 0.02: bfloat16 rounds nearly all of them away."""

    def moved_fraction(*callbacks: TrainerCallback) -> float:
        settings = {"optim": "adamw_torch", "learning_rate": 1e-5, "bf16": True, "trainer_train_dataset": TEXTS}
        settings |= {"trainer_model_init": half_llama} if rebuilt else {"model": half_llama()}
        trainer = attach(make_trainer(tmp_path, *callbacks, **settings))
        trainer.train()
        pairs = list(zip(trainer.model.parameters(), half_llama().parameters(), strict=True))
        moved = sum(int((new.cpu().float() != old.float()).sum()) for new, old in pairs)
        return moved / sum(old.numel() for _, old in pairs)

    assert moved_fraction() < 0.3
    assert moved_fraction(PrecisionCallback()) > 0.9


@pytest.mark.parametrize(
    ("settings", "choice", "expected"),
    [
        ({"bf16": True}, True, torch.float32),
        ({"bf16": True}, False, torch.bfloat16),
        ({}, True, torch.bfloat16),  # training in pure 16 bits
    ],
)
def test_master_weights_only_where_autocast_runs(settings: Any, choice: bool, expected: Any, tmp_path: Path) -> None:
    callback = PrecisionCallback(master_weights=choice)
    trainer = attach(make_trainer(tmp_path, callback, model=half_bert(), **settings))
    assert dtypes(trainer.model) == {expected}
    total = sum(parameter.numel() for parameter in trainer.model.parameters())
    sizes = f"16 bits, {format_bytes(2 * total)}", f"float32, {format_bytes(4 * total)}"
    reason = "41 trainable weights: autocast computes in 16 bits, updates need more"
    changes = [Change("master_weights", *sizes, reason)]
    assert callback.changes == (changes if expected is torch.float32 else [])


def adapted() -> Any:
    return peft.get_peft_model(half_bert(), peft.LoraConfig(target_modules=["query"]), autocast_adapter_dtype=False)


# peft 0.21.2 reads the name that transformers 5.23 deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("make", "callbacks"), [(adapted, []), (half_bert, [FreezeCallback("base")])])
def test_what_is_frozen_first_stays_in_16_bits(make: Any, callbacks: list[Any], tmp_path: Path) -> None:
    model = make()
    optimizers = torch.optim.AdamW(model.parameters()), None  # which holds what is frozen, too
    kept = {"bf16": True, "remove_unused_columns": False, "trainer_optimizers": optimizers}
    trainer = make_trainer(tmp_path, model=model, **kept)
    attach(trainer, *callbacks, PrecisionCallback()).train()
    found = {parameter.requires_grad: parameter.dtype for parameter in trainer.model.parameters()}
    assert found == {True: torch.float32, False: torch.bfloat16}
    # adapters are saved without the base's dtype
    assert ("calls itself torch.bfloat16" in str(trainer.memopt_changes)) is bool(callbacks)


@pytest.mark.parametrize("way", ["model", "model_init", "attached later"])
def test_a_resumed_run_with_master_weights_equals_a_straight_one(tmp_path: Path, way: str) -> None:
    """The checkpoint's float32 weights and states are loaded into float32 parameters."""
    settings = {"bf16": True, "optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1}
    models = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        callback = PrecisionCallback()
        model = {"trainer_model_init": half_bert} if way == "model_init" else {"model": half_bert()}
        given = () if way == "attached later" else (callback,)
        trainer = attach(make_trainer(tmp_path, *given, **model, **settings), callback)
        trainer.train(resume_from_checkpoint=resume)
        models.append(trainer.model)
    assert tiny.largest_difference(*models) == 0.0
    assert dtypes(models[1]) == {torch.float32}
