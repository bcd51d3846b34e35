"""Freezing: what each word means in each architecture, what is saved, and that training stays what it was."""

from __future__ import annotations

import csv
import gc
import json
import logging
import os
import re
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import auto_heads
import bitsandbytes
import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt import FreezeCallback, attach
from hf_memopt.techniques import freeze
from hf_memopt.training.binding import checkpointing_arguments
from hf_memopt.types import Change
from two_ranks import run_pair

pytestmark = [
    # DeBERTa-v2 in transformers 5.8 and 5.17, with torch 2.13
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    # peft 0.21.2 reads the name that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


ARCHITECTURES = {
    row.pop("kind"): row
    for row in csv.DictReader(Path(__file__).with_name("frozen_names.csv").read_text(encoding="utf-8").splitlines())
}
"""The prefixes of exactly the parameters that a word stands for; none where it is not asked."""
CASES = [
    (kind, word, row[column].split())
    for kind, row in ARCHITECTURES.items()
    for word, column in (("embeddings", "embeddings"), ("base", "head"), ("layers:1", "stacks"))
    if row[column]
]


def build(kind: str, **sizes: int) -> Any:
    """Return a tiny model of two layers, all of it to be trained."""
    task = ARCHITECTURES[kind]["task"]
    with pytest.MonkeyPatch.context() as patched:
        for name, size in sizes.items():
            patched.setitem(auto_heads.SIZES, name, size)
        return auto_heads.build(task, kind, dict(auto_heads.heads(task))[kind]).requires_grad_(True)


def bert(**settings: Any) -> Any:
    return tiny.bert(num_hidden_layers=3, **settings)


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def under(model: nn.Module, prefixes: list[str]) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(prefixes))}


@pytest.mark.parametrize(("kind", "word", "names"), CASES)
def test_a_word_names_the_same_part_of_each_architecture(kind: str, word: str, names: list[str]) -> None:
    model = build(kind)
    freeze(model, word)
    expected = under(model, [f"{stack}.1." for stack in names] if word == "layers:1" else names)
    if word == "base":
        expected = {name for name, _ in model.named_parameters()} - expected
    assert frozen(model) == expected != set()


class Plain(nn.Module):
    """Of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 2)])
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])


@pytest.mark.parametrize(
    ("make", "patterns", "prefixes"),
    [
        (bert, "bert.pooler", ["bert.pooler."]),
        (bert, "bert.encoder.layer.1", ["bert.encoder.layer.1."]),
        (bert, "bert.embeddings.LayerNorm.weight", ["bert.embeddings.LayerNorm.weight"]),
        (bert, "bert.encoder.layer.[0-1].*", ["bert.encoder.layer.0.", "bert.encoder.layer.1."]),
        (bert, "bert.encoder.layer.[!0]", ["bert.encoder.layer.1.", "bert.encoder.layer.2."]),
        (bert, ("bert.pooler", "layers:2"), ["bert.pooler.", "bert.encoder.layer.2."]),
        (bert, {"bert.pooler"}, ["bert.pooler."]),
        (bert, "layers:0-2", ["bert.encoder.layer."]),
        # a name is no prefix of a longer number
        (lambda: tiny.bert(num_hidden_layers=11), "bert.encoder.layer.1", ["bert.encoder.layer.1."]),
        (lambda: build("albert"), "layers:0", ["albert.encoder.albert_layer_groups.0."]),
        (Plain, "layers:1-2", ["blocks.1.", "blocks.2."]),
    ],
)
def test_names_and_globs(make: Any, patterns: Any, prefixes: list[str]) -> None:
    model = make()
    freeze(model, patterns)
    assert frozen(model) == under(model, prefixes)


def lora(model: nn.Module) -> peft.PeftModel:
    modules = {"target_modules": ["query", "word_embeddings"], "modules_to_save": ["classifier"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **modules))


def own_adapters(model: Any) -> Any:
    """Added by transformers itself, of which 5.24 wants a PEFT that is newer than the newest."""
    try:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))
    return model


@pytest.mark.parametrize(("adapted", "is_thawed"), [(lora, True), (lora, False), (own_adapters, False)])
def test_base_never_freezes_adapters(adapted: Any, is_thawed: bool) -> None:
    model = adapted(bert())
    trained = {name for name, _ in model.named_parameters() if "lora_" in name or "modules_to_save" in name}
    assert trained
    if is_thawed:
        model.requires_grad_(True)
        trained |= {name for name, _ in model.named_parameters() if ".classifier." in name}
    freeze(model, "base")
    assert {name for name, _ in model.named_parameters()} - frozen(model) == trained


def test_the_handle_restores_exactly_the_flags_it_changed() -> None:
    model = bert()
    model.bert.pooler.requires_grad_(False)
    outer = freeze(model, "embeddings")
    with freeze(model, ["embeddings", "bert.pooler", "layers:1"]):
        assert frozen(model) == under(model, ["bert.embeddings.", "bert.pooler.", "bert.encoder.layer.1."])
    assert frozen(model) == under(model, ["bert.embeddings.", "bert.pooler."])
    outer.remove()
    outer.remove()
    assert frozen(model) == under(model, ["bert.pooler."])


class Saved:
    """A tensor as the graph holds it: it dies with the node that saved it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(model: nn.Module) -> int:
    """Return the bytes that the graph holds after one forward pass, each storage once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    ids = torch.randint(5, 100, (8, 32), generator=torch.Generator().manual_seed(0)).to(model.device)
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = model(input_ids=ids, labels=torch.arange(8, device=model.device) % 3).loss
    gc.collect()  # what a checkpointed layer without any gradient saved is dead by now
    storages = {saved.tensor.untyped_storage().data_ptr(): saved.tensor.untyped_storage().nbytes() for saved in alive}
    loss.backward()
    model.zero_grad()
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def six_layers() -> Any:
    return tiny.bert(hidden_size=64, intermediate_size=256, num_hidden_layers=6)


PREFIX = ["embeddings", "layers:0-2"]
PREFIX_NAMES = ["bert.embeddings.", *(f"bert.encoder.layer.{i}." for i in range(3))]


def test_a_frozen_prefix_saves_its_activations_and_a_suffix_does_not() -> None:
    everything = saved_bytes(six_layers())
    for patterns, bounds in ((PREFIX, (0.0, 0.51)), ("layers:3-5", (0.75, 1.0))):  # the gradient still passes through
        model = six_layers()
        freeze(model, patterns)
        assert bounds[0] < saved_bytes(model) / everything < bounds[1]


def train(model: Any, folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    common = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}
    return tiny.train(model, tiny.rows(16), folder, trainer_callbacks=[*callbacks], **{**common, **settings})


def moved(before: nn.Module, model: nn.Module) -> set[str]:
    old = dict(before.named_parameters())
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter.cpu(), old[name].cpu())}


@pytest.mark.parametrize(
    ("rebuilt", "kind", "checkpointing"),
    [
        (False, torch.optim.SGD, {}),
        (False, bitsandbytes.optim.AdamW8bit, checkpointing_arguments()),
        (True, torch.optim.AdamW, checkpointing_arguments(use_reentrant=True)),
        (True, bitsandbytes.optim.AdamW8bit, {}),
    ],
)
def test_training_moves_what_is_trainable_and_nothing_else_has_a_state(
    rebuilt: bool, kind: Any, checkpointing: dict[str, Any], tmp_path: Path
) -> None:
    given = {"trainer_model_init": six_layers} if rebuilt else {}
    settings = {"trainer_optimizer_cls_and_kwargs": (kind, {"lr": 1e-3}), **given, **checkpointing}
    trainer = train(None if rebuilt else six_layers(), tmp_path, FreezeCallback(PREFIX), **settings)
    model, optimizer = trainer.model, trainer.optimizer.optimizer
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained = {*names.values()} - under(model, PREFIX_NAMES)
    assert frozen(model) == under(model, PREFIX_NAMES)
    assert moved(six_layers(), model) == trained
    in_groups = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    assert in_groups == trained  # of a model of model_init, too
    with_state = {names[parameter] for parameter, state in optimizer.state.items() if state}
    assert with_state == (set() if kind is torch.optim.SGD else trained)


class Measuring(transformers.TrainerCallback):
    """Reads the bytes of the graph before the first step, and counts the calls of each layer within it."""

    def __init__(self) -> None:
        self.saved_bytes, self.calls = 0, [0] * 6

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.saved_bytes = saved_bytes(model)
        for index, layer in enumerate(model.bert.encoder.layer):
            layer.attention.register_forward_hook(lambda *_, index=index: self._count(index))

    def _count(self, index: int) -> None:
        self.calls[index] += 1


def test_under_checkpointing_the_callback_keeps_what_a_frozen_prefix_saves(tmp_path: Path) -> None:
    """Stock's hooks on the embeddings, here put there twice, would let it be saved and recomputed."""
    found = {}
    for name, callbacks in {"stock": [], "ours": [FreezeCallback(PREFIX)]}.items():
        model, measuring = six_layers(), Measuring()
        if name == "stock":
            freeze(model, PREFIX)
        model.enable_input_require_grads()
        train(model, tmp_path, *callbacks, measuring, max_steps=1, **checkpointing_arguments())
        found[name] = measuring
    assert found["ours"].saved_bytes < 0.51 * found["stock"].saved_bytes
    assert found["stock"].calls == [2] * 6
    assert found["ours"].calls == [1, 1, 1, 2, 2, 2]


def test_changes_the_log_line_and_what_the_handle_undoes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, callback = six_layers(), FreezeCallback(PREFIX)
    total = sum(parameter.numel() for parameter in model.parameters())
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        trainer = train(model, tmp_path, callback, **checkpointing_arguments())
        trainer.train()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    why = "non-reentrant checkpointing needs no gradient there, and it would undo what a frozen prefix saves"
    assert callback.changes == [
        Change("trainable_parameters", total, trained, "frozen: embeddings, layers:0-2"),
        Change("input_require_grads", True, False, why),
    ]
    assert [message for message in caplog.messages if message.startswith("FreezeCallback")] == [
        f"FreezeCallback trains {trained:,} of {total:,} parameters; frozen: embeddings, layers:0-2"
    ]
    for _ in range(2):
        assert callback.handle is not None
        callback.handle.remove()
        assert frozen(model) == set()
        assert len(model.get_input_embeddings()._forward_hooks) == 1
        trainer.train()  # acts again, as every callback of a Trainer does
        assert frozen(model) == under(model, PREFIX_NAMES)
        assert len(model.get_input_embeddings()._forward_hooks) == 0


@pytest.mark.parametrize(("before", "now"), [((), "base"), (("layers:0",), "layers:1")])
def test_a_run_that_froze_others_is_not_resumed(tmp_path: Path, before, now: str) -> None:
    """As many others too: their states would go to other weights."""
    saving = {"max_steps": 1, "optim": "adamw_torch", "save_strategy": "steps", "save_steps": 1}
    asked = str(tmp_path / "checkpoint-1")

    def trainer(*patterns: str, **settings: Any) -> Trainer:
        args = tiny.arguments(tmp_path, **{**saving, **settings})
        made = Trainer(model_init=lambda: tiny.bert(), args=args, train_dataset=tiny.rows(16))
        return attach(made, *map(FreezeCallback, patterns))

    trainer(*before).train()
    trainer(*before, max_steps=2).train(resume_from_checkpoint=asked)
    said = "has the optimizer of a run that trained others than this one ("
    for name in (asked, True):
        shutil.rmtree(tmp_path / "checkpoint-2", ignore_errors=True)
        with pytest.raises(ValueError, match=re.escape(f"resume_from_checkpoint={asked!r} {said}")):
            trainer(now, max_steps=2).train(resume_from_checkpoint=name)
    trainer(*before, save_only_model=True).train()
    trainer(now, max_steps=2).train(resume_from_checkpoint=asked)  # weights alone go to their names


@pytest.mark.slow
def test_two_processes_train_the_rest_of_a_model_that_training_makes(tmp_path: Path) -> None:
    """DDP waits for the gradient of each weight that was trained when it was built."""
    first, second = run_pair(tmp_path, __file__, str(tmp_path))
    assert first == second == {"steps": 3, "frozen in the optimizer": 0}


def main(folder: str) -> None:
    """Train as one of two processes; write the steps."""
    rank = os.environ["RANK"]
    flags = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    args = tiny.arguments(Path(folder, rank), max_steps=3, **flags)
    trainer = Trainer(model_init=lambda: tiny.bert(), args=args, train_dataset=tiny.rows(16))
    attach(trainer, FreezeCallback("embeddings")).train()
    trained = [one for group in trainer.optimizer.param_groups for one in group["params"]]
    found = {"steps": trainer.state.global_step, "frozen in the optimizer": sum(not x.requires_grad for x in trained)}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
