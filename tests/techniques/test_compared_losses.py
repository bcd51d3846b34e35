"""A known loss is compared with what runs, and a check stands for batches of the same kind: flags, modes and tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback
from transformers.loss import loss_utils
from transformers.models.bert.modeling_bert import BertModel

import tiny
from hf_memopt import MicrobatchCallback, attach
from hf_memopt.training.binding.trials import names_of_draws, without_dropout
from hf_memopt.training.techniques.microbatching import backbones, whole_micro_batches
from hf_memopt.training.techniques.microbatching.not_splittable import NotSplittableError
from scarcity import Pad, Scarcity, causal_rows, mixed_rows

FLOAT32 = 2**-22
STEPS, ROWS = 5, 4


def run(
    model: nn.Module,
    folder: Path,
    rows: Any,
    *callbacks: Any,
    kind: type[Trainer] = Trainer,
    own: Any = (),
    **given: Any,
) -> Any:
    """Return a trainer of five steps of four rows, trained, and its losses."""
    settings = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "train_sampling_strategy": "sequential"}
    logs = {"logging_strategy": "steps", "logging_steps": 1, "remove_unused_columns": False}
    data = {"train_dataset": rows, "data_collator": given.pop("collate", Pad()), "callbacks": list(own)}
    trainer = attach(kind(model, tiny.arguments(folder, **settings, **logs, **given), **data), *callbacks)
    torch.manual_seed(0)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def llama(attention: str = "eager") -> Any:
    model = tiny.llama(initializer_range=0.2)
    model.config._attn_implementation = attention
    return model


# ---- A loss that is known by its name -------------------------------------------------------------------------------

cross_entropy = F.cross_entropy


def hardest(logits: Any, labels: Any, *args: Any, ignore_index: int = -100, **_: Any) -> torch.Tensor:
    """Return the mean of the larger half of the cross entropies."""
    found = cross_entropy(logits, labels, reduction="none", ignore_index=ignore_index)[labels != ignore_index]
    return found.topk(max(1, len(found) // 2)).values.mean()


@functools.wraps(loss_utils.ForCausalLMLoss)
def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
    loss = loss_utils.ForCausalLMLoss(*args, **kwargs)
    return loss.square() / 10


EXCHANGED: dict[str, Callable[[], Any]] = {
    "fixed_cross_entropy": lambda: mock.patch.object(loss_utils, "fixed_cross_entropy", hardest),
    "cross_entropy of torch": lambda: mock.patch.object(F, "cross_entropy", hardest),
    "a wrapped loss": lambda: mock.patch.dict(loss_utils.LOSS_MAPPING, {"ForCausalLM": wrapped}),
}


class Short(Scarcity):
    """Run out of memory above a number of rows where no graph is made, too."""

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is self._first() and not torch.is_grad_enabled() and len(args[0]) > self.limit:
            self.fail()


@pytest.mark.parametrize(("name", "limit"), [*((name, ROWS) for name in EXCHANGED), ("fixed_cross_entropy", 2)])
def test_a_known_loss_whose_parts_are_exchanged_is_cut_below_it(name: str, limit: int, tmp_path: Path) -> None:
    """Also where half of the rows are compared, since not all of them fit."""
    callback, model, scarcity = MicrobatchCallback(max_examples=2), llama(), Short(limit)
    scarcity.watch(model)
    with EXCHANGED[name]():
        whole = run(llama(), tmp_path, causal_rows(20))
        parts = run(model, tmp_path, causal_rows(20), callback)
    assert (scarcity.errors > 0, callback.tally.cut_steps) == (limit < ROWS, STEPS)
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    assert tiny.largest_difference(whole.model, parts.model) <= FLOAT32
    (change,) = parts.memopt_changes
    assert change.reason.startswith("the loss is not known: that of a batch is ")


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_loss_that_is_exchanged_later_is_found_when_it_is_compared_again(
    is_looked_at: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step in 200, drawn at random; here in all of them, or none."""

    class Exchange(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                loss_utils.fixed_cross_entropy = hardest

    monkeypatch.setattr(whole_micro_batches, "CHECKED_STEPS", float(is_looked_at))
    found = []
    for callbacks in ((), (MicrobatchCallback(max_examples=2),)):
        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", loss_utils.fixed_cross_entropy)
        found.append(losses(run(llama(), tmp_path, causal_rows(20), *callbacks, own=[Exchange()])))
        monkeypatch.undo()
        monkeypatch.setattr(whole_micro_batches, "CHECKED_STEPS", float(is_looked_at))
    assert (found[1] == pytest.approx(found[0], abs=1e-5)) is is_looked_at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_rounding_is_no_other_loss(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, rows = (llama(), causal_rows(20)) if name == "llama" else (tiny.bert(initializer_range=0.2), mixed_rows(20))
    callback = MicrobatchCallback(max_examples=2)
    trainer = run(model.to(dtype), tmp_path, rows, callback, learning_rate=1e-3)
    assert callback.tally.cut_steps == STEPS
    assert "micro-batches" not in [change.name for change in trainer.memopt_changes]


# ---- What a check stands for ----------------------------------------------------------------------------------------


class Mixed(BertModel):
    """Mixes rows once it is on, as MixStyle does, or where a task says so."""

    on, scale = False, 1.0

    def forward(self, *args: Any, task: Any = None, count: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if self.on or (task is not None and bool((task == 1).any())):
            mean = outputs.last_hidden_state.mean(1, keepdim=True)
            outputs.last_hidden_state = 0.7 * outputs.last_hidden_state + 0.3 * mean.roll(1, 0)
        outputs.last_hidden_state = self.scale * outputs.last_hidden_state
        return outputs


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert, self.head = Mixed(tiny.bert_config(initializer_range=0.2)), nn.Linear(32, 3)

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.bert(**inputs).last_hidden_state[:, 0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Sets(TrainerCallback):
    """Does something to the model before each step, counted from 1."""

    def __init__(self, change: Callable[[Mixed, int], object]) -> None:
        self.change = change

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.change(model.bert, state.global_step + 1)


class Adds(Pad):
    """Adds a tensor to each batch, given its number from 1."""

    def __init__(self, name: str, value: Callable[[int], int]) -> None:
        super().__init__()
        self.name, self.value, self.number = name, value, 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.number += 1
        return {**super().__call__(rows), self.name: torch.full((len(rows),), self.value(self.number))}


LATER: dict[str, Callable[[], dict[str, Any]]] = {
    "an attribute": lambda: {"own": [Sets(lambda bert, step: setattr(bert, "on", step >= 4))]},
    "a task in a tensor": lambda: {"collate": Adds("task", lambda number: int(number == 4))},
}


@pytest.mark.parametrize("name", LATER)
def test_rows_that_are_mixed_later_are_refused_in_that_step(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotSplittableError) as error:
        run(Classifier(), tmp_path, mixed_rows(20), MicrobatchCallback(max_examples=2), **LATER[name]())
    assert "cannot be trained in micro-batches at step 4 " in str(error.value)
    assert "; bert: rows depend on each other: parts of its output 0 of shape " in str(error.value)


def stays_still(layer: nn.Module) -> None:
    """Leave a layer in evaluation mode, whatever the Trainer calls."""
    layer.train = lambda mode=True: nn.Module.train(layer, False)


SAME: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    # and how often rows are compared: in the first step of a kind, and in the second step
    "nothing": (dict, 2),
    "a mode": (
        lambda: {"own": [Sets(lambda bert, step: stays_still(bert.encoder.layer[0]) if step == 3 else None)]},
        3,
    ),
    "a scale": (lambda: {"own": [Sets(lambda bert, step: setattr(bert, "scale", 1 + step / 10))]}, 2),
    "a step above all codes": (lambda: {"own": [Sets(lambda bert, step: setattr(bert, "step", 100 + step))]}, 2),
    "a step in a tensor": (lambda: {"collate": Adds("count", lambda number: 100 + number)}, 2),
    "two tasks in a tensor": (lambda: {"collate": Adds("task", lambda number: 2 * (number % 2))}, 2),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_meanwhile_and_mixes_nothing_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, checks = SAME[name]
    checked = mock.Mock(side_effect=backbones.check_rows)
    monkeypatch.setattr(backbones, "check_rows", checked)
    whole = run(Classifier(), tmp_path, mixed_rows(20), **make())
    parts = run(Classifier(), tmp_path, mixed_rows(20), MicrobatchCallback(max_examples=2), **make())
    assert tiny.largest_difference(whole.model, parts.model) <= FLOAT32
    assert checked.call_count == checks


# ---- Random numbers: one rule for both ways -------------------------------------------------------------------------


def sounds(count: int) -> list[dict[str, Any]]:
    waves = torch.randn(count, 700, generator=torch.Generator().manual_seed(0))
    return [{"input_values": wave, "labels": [1 + (i * k) % 28 for k in range(1, 4)]} for i, wave in enumerate(waves)]


def wav2vec2() -> Any:
    """Return a model as it comes, but for dropout: SpecAugment masks a part of each sound."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "intermediate_size": 32}
    dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    rates = dict.fromkeys((*dropouts, "layerdrop"), 0.0)
    norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "ctc_loss_reduction": "mean"}
    masks = {"mask_time_prob": 0.3, "mask_time_length": 4}
    return transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(**sizes, **layers, **places, **rates, **norms, **masks)
    )


class OwnLoss(Trainer):
    """A loss that is not known, so that the model is cut below it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 1.0, outputs) if return_outputs else outputs.loss * 1.0


def falcon() -> Any:
    sizes = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.FalconModel(transformers.FalconConfig(**sizes, hidden_dropout=0.5))


def dino() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    jitter = {"pos_embed_shift": 0.5, "pos_embed_jitter": 1.5, "pos_embed_rescale": 2.0, "drop_path_rate": 0.0}
    return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes, image_size=16, patch_size=8, **jitter))


DRAWING: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor]]] = {
    "SpecAugment": (lambda: wav2vec2().wav2vec2, lambda: torch.ones(2, 700)),
    "dropout": (falcon, lambda: torch.arange(12).view(2, 6)),
    "moved positions": (dino, lambda: torch.ones(2, 3, 16, 16)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_what_a_model_draws_by_its_configuration_is_switched_off(name: str) -> None:
    build, batch = DRAWING[name]
    model = build().train()
    before = dict(vars(model.config))

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            return model(batch())[0]

    assert not torch.equal(outputs(), outputs())
    with without_dropout(model):
        assert torch.equal(outputs(), outputs())
    assert vars(model.config) == before
    assert name == "dropout" or names_of_draws(model) == name


def test_spec_augment_is_drawn_in_each_part_whichever_way_it_is_cut(tmp_path: Path) -> None:
    """As dropout is: other draws of the same distribution."""
    callbacks = MicrobatchCallback(max_examples=2), MicrobatchCallback(max_examples=2)
    settings = {
        "collate": lambda rows: {name: torch.stack([torch.as_tensor(x[name]) for x in rows]) for name in rows[0]}
    }
    known = run(wav2vec2(), tmp_path, sounds(20), callbacks[0], **settings)
    below = run(wav2vec2(), tmp_path, sounds(20), callbacks[1], kind=OwnLoss, **settings)
    assert [callback.tally.cut_steps for callback in callbacks] == [STEPS, STEPS]
    assert losses(known) == pytest.approx(losses(below), rel=1e-5)
    assert losses(known) != pytest.approx(losses(run(wav2vec2(), tmp_path, sounds(20), **settings)), rel=1e-5)
    assert known.model.config.apply_spec_augment
