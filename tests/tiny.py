"""Tiny models built from configs (random weights, no download) and the smallest pieces that tests of all rooms
share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

IS_BEFORE_5_17 = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17)  # which offloads no activations

DEVICE = os.environ.get("HF_MEMOPT_TEST_DEVICE", "cpu")
"""Where what these helpers make trains: "cpu", or "cuda" on a GPU and in `make test-cuda`."""

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(95))]  # 100 tokens
LENGTHS = {
    **dict.fromkeys(
        ("image-classification", "semantic-segmentation", "object-detection", "ctc", "audio-classification")
    ),
    "image-text-to-text": 4096,
    "zero-shot-image-classification": 77,
}
"""Tokens of a row by task, where 16 do not do: None for rows without text."""


def tokenizer(padding_side: str = "right", **settings: Any) -> PreTrainedTokenizerFast:
    """Return a fast word-level tokenizer over ``VOCABULARY`` with BERT's special tokens."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side=padding_side, **{**special, **settings})


def bert_config(**settings: Any) -> transformers.BertConfig:
    """Return a 2-layer BERT configuration without dropout; 64 positions, 100 tokens."""
    tiny = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 3,
    }
    return transformers.BertConfig(**{**tiny, **settings})


def bert(seed: int = 0, **settings: Any) -> transformers.BertForSequenceClassification:
    """Return a tiny BERT classifier with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(bert_config(**settings))


class TiedBert(transformers.BertForSequenceClassification):
    """A BERT that classifies by words of its vocabulary: its classifier shares the weight of its embeddings."""

    _tied_weights_keys = {"classifier.weight": "bert.embeddings.word_embeddings.weight"}  # noqa: RUF012  # of the base

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.classifier


def tied_bert(seed: int = 0, **settings: Any) -> TiedBert:
    """Return a tiny BERT classifier whose labels are the first words of its vocabulary."""
    torch.manual_seed(seed)
    config = bert_config(**settings, tie_word_embeddings=True)
    config.num_labels = config.vocab_size
    return TiedBert(config)


def llama_config(**settings: Any) -> transformers.LlamaConfig:
    """Return a 2-layer Llama configuration; 64 positions, 100 tokens, untied head."""
    tiny = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**{**tiny, **settings})


def llama(seed: int = 0, **settings: Any) -> transformers.LlamaForCausalLM:
    """Return a tiny Llama causal LM with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(llama_config(**settings))


def conformer() -> transformers.Wav2Vec2ConformerForSequenceClassification:
    """Return a tiny conformer, whose layers have a ``BatchNorm`` each; it reads ``input_values`` of 2,000 samples."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "conv_depthwise_kernel_size": 3}
    others = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
    drops = dict.fromkeys(("layerdrop", "mask_time_prob", "final_dropout", "feat_proj_dropout"), 0.0)
    config = transformers.Wav2Vec2ConformerConfig(**sizes, **convolutions, **others, **drops)
    return transformers.Wav2Vec2ConformerForSequenceClassification(config).train()


def rows(count: int = 16, length: int = 12, labels: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``count`` classification examples of one length, random ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, (count, length), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * length, "labels": i % labels} for i, row in enumerate(ids)]


class Stream(IterableDataset[Any]):
    """Rows that are read one after the other, from the first one on in each pass."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


DDP = {"ddp_backend": "gloo", "ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False}
"""Flags of two processes on a CPU with which each may run its own number of micro-batches."""


def arguments(output_dir: Any, **settings: Any) -> TrainingArguments:
    """Return quiet ``TrainingArguments`` on ``DEVICE``: no saving, no progress bar, no clipping, plain SGD."""
    quiet = {
        "output_dir": str(output_dir),
        "use_cpu": DEVICE == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "learning_rate": 0.1,
        "num_train_epochs": 1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**quiet, **settings})


def train(model: Any, dataset: Any, output_dir: Any, resume: Any = None, **settings: Any) -> Trainer:
    """Train with the stock Trainer on ``DEVICE`` and return the Trainer; ``trainer_*`` settings go to the Trainer."""
    names = [name for name in settings if name.startswith("trainer_")]
    of_trainer = {name.removeprefix("trainer_"): settings.pop(name) for name in names}
    trainer = Trainer(model=model, args=arguments(output_dir, **settings), train_dataset=dataset, **of_trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def largest_difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the maximum absolute difference over all parameters of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    differences = [(a.detach().cpu() - b.detach().cpu()).abs().max().double() for a, b in pairs]
    return torch.stack(differences).max().item()  # NaN stays
