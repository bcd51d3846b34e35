"""Images and sounds: rows mixed with each other, losses over pixels and frames, images beside texts."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import Trainer

import tiny
from client import texts
from contrastive_patterns import Embedder
from pattern import OfLabels, Pattern, built
from signal_clients import LANGUAGE, SMALL, described, noise, padded, stacked, texts_padded

Rows = list[dict[str, Any]]
VISION = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def images(count: int, *, seed: int = 0) -> Rows:
    """Images of three classes."""
    return [{"pixel_values": noise(3, 32, 32, seed=100 * seed + i), "labels": i % 3} for i in range(count)]


def masks(count: int, *, seed: int = 0) -> Rows:
    """Images, and a class for each of their pixels."""
    rows = images(count, seed=seed)
    return [{**row, "labels": (row["pixel_values"].sum(0) > i % 3 - 1).long()} for i, row in enumerate(rows)]


def sounds(count: int, *, seed: int = 0) -> Rows:
    """Sounds of different lengths, and letters."""
    return [
        {"input_values": noise(400 + 40 * (i % 5), seed=100 * seed + i), "labels": torch.arange(1, 4 + i % 4)}
        for i in range(count)
    ]


def described_images(count: int, *, seed: int = 0) -> Rows:
    """An image of 16 tokens and a text."""
    rows = described(tiny.tokenizer()(texts(count, seed=seed))["input_ids"], [16] * count)
    return [{**row, "pixel_values": noise(3, 32, 32, seed=100 * seed + i)} for i, row in enumerate(rows)]


def beside_texts(rows: Rows) -> dict[str, Any]:
    """Put texts of different lengths and images of one size together."""
    return {**texts_padded(rows), "pixel_values": torch.stack([row["pixel_values"] for row in rows])}


def vit() -> Any:
    """Return a tiny ViT whose rows differ."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=3, initializer_range=0.2)
    return transformers.ViTForImageClassification(config)


def wav2vec(kind: Any = transformers.Wav2Vec2ForCTC, **settings: Any) -> Any:
    """Return a tiny model of sounds, without anything random in it."""
    still = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        **{**SMALL, **dict.fromkeys(still, 0.0), **convolutions, **positions, **settings},
        vocab_size=20,
        do_stable_layer_norm=True,
        mask_time_prob=0.0,
        layerdrop=0.0,
        ctc_zero_infinity=True,
    )
    return kind(config)


def llava() -> Any:
    """Return a tiny LLaVA."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, num_attention_heads=2),
        text_config=transformers.LlamaConfig(**LANGUAGE),
        image_token_id=4,
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


# ---- Images ---------------------------------------------------------------------------------------------------------


class MixedImages(Trainer):
    """Mixup: images and losses of two orders, which a generator of one's own draws."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generator = torch.Generator().manual_seed(11)

    def mixed(self, images: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the images to train on, and the share of the first order."""
        share = 0.5 + 0.5 * torch.rand((), generator=self.generator).item()
        return share * images + (1 - share) * images[order], share

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        labels = inputs.pop("labels")
        order = torch.randperm(len(labels), generator=self.generator)
        images, share = self.mixed(inputs["pixel_values"], order)
        logits = model(pixel_values=images).logits
        return share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[order])


class CutImages(MixedImages):
    """CutMix: a square of another image."""

    def mixed(self, images: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, float]:
        top, left = torch.randint(0, 16, (2,), generator=self.generator).tolist()
        images = images.clone()
        images[:, :, top : top + 16, left : left + 16] = images[order, :, top : top + 16, left : left + 16]
        return images, 0.75


class SoftLabels(OfLabels):
    """Two classes to a row, mixed by the collator."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return -(labels * outputs.logits.log_softmax(-1)).sum(-1).mean()


class Consistent(Trainer):
    """FixMatch: the guess on an image as it is, where it is sure, is the label of the mirrored one."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        sure, guess = outputs.logits.detach().softmax(-1).max(-1)
        mirrored = model(pixel_values=inputs["pixel_values"].flip(-1)).logits
        loss = outputs.loss + (F.cross_entropy(mirrored, guess, reduction="none") * (sure > 0.4)).mean()
        return (loss, outputs) if return_outputs else loss


class Convolutions(nn.Module):
    """A small convolutional network whose norms see the batch."""

    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:
        logits = self.head(self.body(pixel_values).mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Segmentation(nn.Module):
    """A class for each pixel: cross-entropy and dice over all pixels of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 2, 1))

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:
        logits = self.body(pixel_values)
        found, asked = logits.softmax(1)[:, 1], labels.to(logits.dtype)
        dice = 1 - (2 * (found * asked).sum() + 1) / (found.sum() + asked.sum() + 1)
        return {"loss": F.cross_entropy(logits, labels) + dice, "logits": logits}


class ImagesAndTexts(nn.Module):
    """A tower of images and one of texts, told from the others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.of_images = vit().vit
        self.of_texts = Embedder()
        self.projection = nn.Linear(16, 32)

    def forward(self, pixel_values: Any, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        seen = F.normalize(self.projection(self.of_images(pixel_values).last_hidden_state[:, 0]), dim=-1)
        scores = 4 * seen @ self.of_texts(input_ids, attention_mask).T
        asked = torch.arange(len(scores))
        return {"loss": (F.cross_entropy(scores, asked) + F.cross_entropy(scores.T, asked)) / 2, "logits": scores}


class AnswersWeighted(Trainer):
    """Own cross-entropy of the words that follow an image, each row as one."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        mask = (labels[:, 1:] != -100).float()
        loss = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        return (loss, {"loss": loss}) if return_outputs else loss


# ---- Sounds ---------------------------------------------------------------------------------------------------------


class OwnCtc(Trainer):
    """CTC by hand: each row over the number of its letters."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        logs = logits.log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(labels),), len(logs))
        letters = (labels != -100).sum(-1)
        loss = F.ctc_loss(logs, labels.clamp(min=0), frames, letters, zero_infinity=True) / 10
        return (loss, {"logits": logits}) if return_outputs else loss


class SpeakersApart(Trainer):
    """The frames' mean of each sound against those of the batch; sounds of about as many letters are one speaker."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        speakers = (inputs.pop("labels") != -100).sum(-1) // 2
        hidden = model(**inputs).last_hidden_state.mean(1)
        vectors = F.normalize(hidden, dim=-1)
        same = (speakers[:, None] == speakers[None]).float()
        loss = F.binary_cross_entropy_with_logits(4 * vectors @ vectors.T - 2, same)
        return (loss, {"hidden": hidden}) if return_outputs else loss


def collated(collate: Any) -> Any:
    """Return what makes this collator."""
    return lambda: collate


def soft(rows: Rows) -> dict[str, torch.Tensor]:
    """Mix each image and its class with those of the next one."""
    batch = stacked(rows)
    labels = F.one_hot(batch["labels"], 3).float()
    return {
        "pixel_values": 0.8 * batch["pixel_values"] + 0.2 * batch["pixel_values"].roll(1, 0),
        "labels": 0.8 * labels + 0.2 * labels.roll(1, 0),
    }


pictured = functools.partial(built, data=images, collate=collated(stacked), remove_unused_columns=False)
spoken = functools.partial(
    built, data=sounds, collate=collated(padded), remove_unused_columns=False, learning_rate=1e-2
)
read = functools.partial(built, data=described_images, collate=collated(beside_texts), remove_unused_columns=False)

PATTERNS = {
    "images, mixup in compute_loss": Pattern(pictured(MixedImages, model=vit)),
    "images, CutMix in compute_loss": Pattern(pictured(CutImages, model=vit)),
    "images, mixup in the collator": Pattern(pictured(SoftLabels, model=vit, collate=collated(soft))),
    "images, FixMatch": Pattern(pictured(Consistent, model=vit)),
    "images, convolutions and batch norm": Pattern(pictured(model=Convolutions), evaluates=True),
    "images, convolutions and instance norm": Pattern(
        pictured(model=functools.partial(Convolutions, norm=nn.InstanceNorm2d))
    ),
    "images, pixels by dice": Pattern(pictured(model=Segmentation, data=masks)),
    "images and texts, two towers": Pattern(read(model=ImagesAndTexts)),
    "images and texts, LLaVA with an own loss": Pattern(read(AnswersWeighted, model=llava)),
    "sounds, own CTC": Pattern(spoken(OwnCtc, model=wav2vec)),
    "sounds, speakers told apart": Pattern(
        spoken(SpeakersApart, model=functools.partial(wav2vec, transformers.Wav2Vec2Model))
    ),
}
