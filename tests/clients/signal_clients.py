"""Trainings on sound and images: rows that are no tokens, and losses that look at the whole batch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer

import tiny
from client import STEPS, Arrange, Client, arguments, not_splittable, texts


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put rows of one shape together."""
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put sounds of different lengths together."""
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_values": pad([row["input_values"] for row in rows]),
        "attention_mask": pad([torch.ones(len(row["input_values"]), dtype=torch.long) for row in rows]),
        "labels": pad([row["labels"] for row in rows], padding_value=-100),
    }


def trainer(
    folder: Path, arrange: Arrange, model: Any, rows: list[dict[str, Any]], collate: Any = stacked, **settings: Any
) -> Trainer:
    """Return a trainer on such rows."""
    return Trainer(
        model=model,
        args=arguments(folder, remove_unused_columns=False, **settings),
        train_dataset=arrange(rows),
        eval_dataset=rows[:8],
        data_collator=collate,
    )


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def wav2vec(folder: Path, arrange: Arrange) -> Trainer:
    """Speech to letters, CTC."""
    config = transformers.Wav2Vec2Config(
        **{
            **SMALL,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
        },
        vocab_size=20,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        mask_time_prob=0.0,
        layerdrop=0.0,
        final_dropout=0.0,
        ctc_zero_infinity=True,
    )
    torch.manual_seed(0)
    rows = [
        {"input_values": noise(600 + 40 * (i % 5), seed=i), "labels": torch.arange(1, 4 + i % 4)} for i in range(16)
    ]
    return trainer(folder, arrange, transformers.Wav2Vec2ForCTC(config), rows, padded, learning_rate=0.001)


def whisper(folder: Path, arrange: Arrange) -> Trainer:
    """Speech to text."""
    config = transformers.WhisperConfig(
        vocab_size=100,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=25,
        max_target_positions=32,
        num_mel_bins=8,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.0,
    )
    torch.manual_seed(0)
    labels = [torch.tensor(ids) for ids in tiny.tokenizer()(texts(16, longest=12))["input_ids"]]
    rows = [{"input_features": noise(8, 50, seed=i), "labels": ids} for i, ids in enumerate(labels)]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        targets = [row["labels"] for row in batch]
        return {
            "input_features": torch.stack([row["input_features"] for row in batch]),
            "labels": torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100),
        }

    return trainer(folder, arrange, transformers.WhisperForConditionalGeneration(config), rows, collate)


def images(**more: Any) -> list[dict[str, Any]]:
    """Return 16 images, and more columns."""
    return [
        {"pixel_values": noise(3, 32, 32, seed=i), **{name: values[i] for name, values in more.items()}}
        for i in range(16)
    ]


CLASSES = [i % 3 for i in range(16)]


def vit(folder: Path, arrange: Arrange) -> Trainer:
    """Images to classes, attention."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=3)
    return trainer(folder, arrange, transformers.ViTForImageClassification(config), images(labels=CLASSES))


def resnet(folder: Path, arrange: Arrange) -> Trainer:
    """Images to classes, batch norm."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return trainer(folder, arrange, transformers.ResNetForImageClassification(config), images(labels=CLASSES))


def autoencoder(folder: Path, arrange: Arrange) -> Trainer:
    """Images of which random parts are masked: each forward pass draws its own."""
    torch.manual_seed(0)
    config = transformers.ViTMAEConfig(
        **SMALL,
        image_size=32,
        patch_size=8,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    return trainer(folder, arrange, transformers.ViTMAEForPreTraining(config), images())


def detection(folder: Path, arrange: Arrange, *, counts: tuple[int, ...]) -> Trainer:
    """Images to boxes; ``counts``: boxes per image."""
    boxes = torch.rand(16, 8, 4, generator=torch.Generator().manual_seed(0)) * 0.3 + 0.3
    labels = [{"class_labels": torch.arange(count) % 3, "boxes": boxes[i, :count]} for i, count in enumerate(counts)]
    torch.manual_seed(0)
    config = transformers.YolosConfig(**SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=6, num_labels=3)

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        pixels = torch.stack([row["pixel_values"] for row in batch])
        return {"pixel_values": pixels, "labels": [row["labels"] for row in batch]}

    model = transformers.YolosForObjectDetection(config)
    made = trainer(
        folder, arrange, model, images(labels=labels), collate, learning_rate=1e-3, train_sampling_strategy="sequential"
    )
    made.eval_dataset = None  # the Trainer cannot join predictions with boxes
    return made


def clip(folder: Path, arrange: Arrange) -> Trainer:
    """Images and texts, each of which is told from the others of its batch."""
    torch.manual_seed(0)
    of_text = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    of_images = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**of_text, **heads, "eos_token_id": 3}, vision_config={**of_images, **heads}, projection_dim=8
    )
    ids = tiny.tokenizer()(texts(16, shortest=6, longest=6))["input_ids"]
    rows = images(input_ids=ids, return_loss=[True] * 16)

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        found = stacked([{name: row[name] for name in ("pixel_values", "input_ids")} for row in batch])
        return {**found, "return_loss": True}

    return trainer(folder, arrange, transformers.CLIPModel(config), rows, collate)


def sounds(folder: Path, arrange: Arrange) -> Trainer:
    """Sounds to classes."""
    torch.manual_seed(0)
    config = transformers.ASTConfig(
        **SMALL, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8, num_labels=3
    )
    rows = [{"input_values": noise(16, 8, seed=i), "labels": i % 3} for i in range(16)]
    return trainer(folder, arrange, transformers.ASTForAudioClassification(config), rows)


def segmentation(folder: Path, arrange: Arrange) -> Trainer:
    """Images to a class for each pixel; some pixels are ignored."""
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=3,
    )
    drawn = torch.randint(0, 3, (16, 32, 32), generator=torch.Generator().manual_seed(1))
    for i in range(16):
        drawn[i, : 2 * i] = 255
    return trainer(folder, arrange, transformers.SegformerForSemanticSegmentation(config), images(labels=list(drawn)))


def described(prompts: list[list[int]], image_tokens: list[int]) -> list[dict[str, Any]]:
    """Return texts that begin with an image's tokens, as token 4 each; the loss is over the rest."""
    return [
        {"input_ids": [4] * count + ids, "labels": [-100] * count + ids}
        for ids, count in zip(prompts, image_tokens, strict=True)
    ]


def texts_padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put texts of different lengths together."""
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    mask = pad([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows])
    return {"input_ids": pad(ids), "attention_mask": mask, "labels": pad(labels, padding_value=-100)}


LANGUAGE = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def llava(folder: Path, arrange: Arrange) -> Trainer:
    """Images and texts to texts: one image, of 16 tokens, for each text."""
    torch.manual_seed(0)
    of_images = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**of_images, num_attention_heads=2),
        text_config=transformers.LlamaConfig(**LANGUAGE),
        image_token_id=4,
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    rows = described(tiny.tokenizer()(texts(16))["input_ids"], [16] * 16)
    rows = [{**row, "pixel_values": noise(3, 32, 32, seed=i)} for i, row in enumerate(rows)]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        return {**texts_padded(batch), "pixel_values": torch.stack([row["pixel_values"] for row in batch])}

    model = transformers.LlavaForConditionalGeneration(config)
    return trainer(folder, arrange, model, rows, collate, prediction_loss_only=True)


def qwen_vl(folder: Path, arrange: Arrange) -> Trainer:
    """The same with images of different sizes, whose patches are one long row of the whole batch."""
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        text_config={**LANGUAGE, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    grids = [(1, 4, 4 + 2 * (i % 3)) for i in range(16)]
    counts = [height * width // 4 for _, height, width in grids]
    rows = described(tiny.tokenizer()(texts(16))["input_ids"], counts)
    rows = [
        {**row, "pixel_values": noise(grid[1] * grid[2], 3 * 2 * 4 * 4, seed=i), "image_grid_thw": torch.tensor([grid])}
        for i, (row, grid) in enumerate(zip(rows, grids, strict=True))
    ]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        joined = {name: torch.cat([row[name] for row in batch]) for name in ("pixel_values", "image_grid_thw")}
        found = texts_padded(batch)
        return {**found, **joined, "mm_token_type_ids": (found["input_ids"] == 4).long()}

    model = transformers.Qwen2VLForConditionalGeneration(config)
    return trainer(folder, arrange, model, rows, collate, prediction_loss_only=True)


def any_length(dataset: Any) -> list[int]:
    """Return lengths for rows that have none: a view has to hand any rows on as they are."""
    return [8 + 8 * (i % 4) for i in range(len(dataset))]


EQUAL_AT_FIRST = (2, 2, 2, 2, 1, 5, 1, 4, 2, 6, 1, 1, 3, 1, 1, 6)
MIXED = (1, 5, 2, 4) * STEPS
DRAWS = "it draws random numbers other than dropout's, so that parts draw others than the whole"
BATCH_NORM = not_splittable(
    "ResNetForImageClassification",
    "pixel_values, labels",
    "ResNetForImageClassification: it returns the loss of all rows; resnet: rows depend on each other: parts of its "
    "output 0 of shape (4, 16, 4, 4) differ from the whole by #",
)
RANDOM_MASKS = not_splittable(
    "ViTMAEForPreTraining", "pixel_values", f"ViTMAEForPreTraining: {DRAWS}; vit: {DRAWS}", "decoder"
)


CLIENTS = {
    "speech, Wav2Vec2 CTC": Client(wav2vec, lengths=lambda rows: [len(row["input_values"]) for row in rows]),
    "speech, Whisper": Client(whisper, lengths=any_length),
    "images, ViT": Client(vit, lengths=any_length),
    "images, ResNet": Client(resnet, lengths=any_length, cannot_cut=BATCH_NORM),
    "images, masked autoencoder": Client(autoencoder, lengths=any_length, cannot_cut=RANDOM_MASKS),
    "detection, YOLOS": Client(
        functools.partial(detection, counts=MIXED),
        lengths=any_length,
    ),
    "detection, equal counts at first": Client(
        functools.partial(detection, counts=EQUAL_AT_FIRST),
        lengths=any_length,
    ),
    "images and texts, CLIP": Client(clip, lengths=any_length),
    "sounds to classes, AST": Client(sounds, lengths=any_length),
    "segmentation, SegFormer": Client(
        segmentation,
        lengths=any_length,
    ),
    "images and texts to texts, LLaVA": Client(llava),
    "images and texts to texts, Qwen2-VL": Client(qwen_vl),
}
