"""Rows that depend on the batch they are in: micro-batches train what stock trains, or say why they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import tiny
from hf_memopt import EvaluationGuardCallback, FusedCrossEntropyCallback, MicrobatchCallback, attach

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
IMAGE = 49


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 48, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def with_images(*counts_and_words: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return rows of some images of 4 tokens, then words; the images of all rows are one list."""
    batch = padded(*(4 * images + words for images, words in counts_and_words))
    for row, (images, _) in enumerate(counts_and_words):
        batch["input_ids"][row, : 4 * images] = IMAGE
    is_ignored = (batch["attention_mask"] == 0) | (batch["input_ids"] == IMAGE)
    pixels = torch.randn(sum(images for images, _ in counts_and_words), 3, 4, 4, dtype=torch.double)
    return {**batch, "labels": batch["input_ids"].masked_fill(is_ignored, -100), "pixel_values": pixels}


def labelled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(
        **{**SMALL, "hidden_size": 16}, image_size=4, patch_size=2, initializer_range=0.5
    )
    text = transformers.LlamaConfig(**SMALL, initializer_range=0.5)
    options = {"image_token_id": IMAGE, "vision_feature_layer": -1}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **options)
    return transformers.LlavaForConditionalGeneration(config)


def llama(kind: str = "CausalLM", **options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**{**SMALL, "initializer_range": 0.5, "pad_token_id": 0, **options})
    return getattr(transformers, f"LlamaFor{kind}")(config)


def xlnet() -> nn.Module:
    sizes = {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    config = transformers.XLNetConfig(**sizes, num_labels=3, dropout=0.0, summary_last_dropout=0.0)
    return transformers.XLNetForSequenceClassification(config)


def xlm() -> nn.Module:
    sizes = {"vocab_size": 50, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
    config = transformers.XLMConfig(**sizes, num_labels=3, summary_first_dropout=0.0, summary_type="mean")
    return transformers.XLMForSequenceClassification(config)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batches: Sequence[Any]
    callback: Callable[[], Any]
    kind: type[transformers.Trainer] = transformers.Trainer


CLASSES = {**padded(16, 3, 4, 8), "labels": torch.tensor([0, 1, 2, 0])}
EMBEDDED = {
    "inputs_embeds": torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0)).double(),
    **{name: CLASSES[name] for name in ("attention_mask", "labels")},
}
EACH_ONE = with_images((1, 4), (1, 4), (1, 4), (1, 4))
MIXED = with_images((0, 8), (2, 4), (1, 4), (1, 9))
TEXTS = labelled(padded(5, 7))
ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}, "max_position_embeddings": 20}


def by_tokens() -> MicrobatchCallback:
    return MicrobatchCallback(max_tokens=16)


CASES = {
    "as many images as rows": Case(
        llava, [with_images((0, 4), (2, 4), (1, 20), (1, 20))] * 2, lambda: MicrobatchCallback(max_examples=2)
    ),
    "a row with all images": Case(llava, [with_images((0, 4), (2, 4))] * 2, lambda: MicrobatchCallback(max_examples=1)),
    "images, a loss of one's own": Case(
        llava, [EACH_ONE, MIXED], lambda: MicrobatchCallback(max_examples=1), OwnLoss
    ),
    "images that cannot be exchanged": Case(
        llava, [MIXED], lambda: MicrobatchCallback(max_examples=2), OwnLoss
    ),
    "dynamic RoPE": Case(
        lambda: llama(**ROPE), [labelled(padded(14, 13, 60, 15))] * 2, lambda: MicrobatchCallback(max_tokens=64)
    ),
    "classes from embeddings": Case(
        lambda: llama("SequenceClassification", num_labels=3), [EMBEDDED] * 2, by_tokens
    ),
    "XLNet's last column": Case(xlnet, [CLASSES] * 2, by_tokens),
    "XLM's mean of columns": Case(xlm, [CLASSES] * 2, by_tokens),
    "fused, without any label": Case(
        llama, [TEXTS, {**TEXTS, "labels": torch.full((2, 7), -100)}, TEXTS], FusedCrossEntropyCallback
    ),
}  # fmt: skip


def trainer_of(case: Case, folder: Any, *callbacks: Any) -> transformers.Trainer:
    torch.manual_seed(0)
    options = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "remove_unused_columns": False}
    plain = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.05, "train_sampling_strategy": "sequential"}
    trainer = case.kind(
        model=case.make().double(),
        args=tiny.arguments(folder, **options, **plain, max_steps=len(case.batches), logging_steps=1),
        train_dataset=case.batches,
        eval_dataset=case.batches,
        data_collator=lambda rows: rows[0],
        callbacks=list(callbacks),
    )
    if callbacks:
        attach(trainer)
    return trainer


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_stocks(name: str, tmp_path: Any) -> None:
    case = CASES[name]
    stock, ours = trainer_of(case, tmp_path), trainer_of(case, tmp_path, case.callback())
    stock.train()
    if name == "dynamic RoPE" and tiny.IS_BEFORE_5_17:  # it counts under a name of its own there
        with pytest.raises(ValueError, match="None_max_seq_len_cached, which parts would change"):
            ours.train()
        return
    ours.train()
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (stock, ours)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    rounding = 1e-6 if name.startswith("fused") else 1e-12  # stock's loss is in float32
    assert tiny.largest_difference(ours.model, stock.model) < rounding


def test_an_evaluation_with_images_of_other_rows_is_not_split(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(llava, [MIXED], EvaluationGuardCallback)
    plain = F.embedding

    def limited(ids: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        if len(weight) == 50 and ids.dim() > 1 and len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return plain(ids, weight, *args, **kwargs)

    monkeypatch.setattr(F, "embedding", limited)
    with pytest.raises(torch.OutOfMemoryError, match="cannot be split"):
        trainer_of(case, tmp_path, EvaluationGuardCallback()).evaluate()
