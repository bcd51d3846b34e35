"""Trainings of sentence embeddings: sentence-transformers and setfit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import setfit
import torch
import transformers
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
    cross_encoder,
    sparse_encoder,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer import losses, modules

import tiny
from client import PASSED, SETUPS, Arrange, Client, arguments, texts


def encoder(folder: Path) -> SentenceTransformer:
    """Return a tiny BERT with mean pooling, by way of a folder, as the library reads one."""
    path = str(folder / "encoder")
    torch.manual_seed(0)
    transformers.BertModel(tiny.bert_config()).save_pretrained(path)
    tiny.tokenizer(model_max_length=64).save_pretrained(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer = modules.Transformer(path)
        return SentenceTransformer(modules=[transformer, modules.Pooling(transformer.get_word_embedding_dimension())])


def pairs(count: int = 16) -> Dataset:
    """Pairs of texts that belong together."""
    return Dataset.from_dict({"anchor": texts(count), "positive": texts(count, seed=1)})


def scored(count: int = 16) -> Dataset:
    """Pairs of texts and how alike they are."""
    return Dataset.from_dict(
        {"one": texts(count), "two": texts(count, seed=1), "score": [i / count for i in range(count)]}
    )


def in_order(dataset: Any, **settings: Any) -> DefaultBatchSampler:
    """Return a batch sampler that reads a dataset as it is; the library's own ones shuffle."""
    return DefaultBatchSampler(torch.utils.data.SequentialSampler(dataset), **settings)


def embeddings(folder: Path, arrange: Arrange, *, data: Any, loss: Any) -> Any:
    """Train embeddings."""
    model = encoder(folder)
    return SentenceTransformerTrainer(
        model=model,
        args=arguments(folder, SentenceTransformerTrainingArguments, batch_sampler=in_order),
        train_dataset=arrange(data()),
        eval_dataset=data(8),
        loss=loss(model),
    )


def layers_of(kind: Any, **settings: Any) -> Any:
    """Return what makes a loss of all layers and widths; it would draw some of them."""
    settings |= {"n_dims_per_step": -1} if "matryoshka_dims" in settings else {}
    return lambda model: kind(model, losses.MultipleNegativesRankingLoss(model), n_layers_per_step=-1, **settings)


def triplets(count: int = 16) -> Dataset:
    """Texts, one that belongs to each and one that does not."""
    return pairs(count).add_column("negative", texts(count, seed=2))


def judged(count: int = 16) -> Dataset:
    """Pairs of texts that belong together or not."""
    return pairs(count).add_column("label", [float(i % 2) for i in range(count)])


def reranked(folder: Path, arrange: Arrange) -> Any:
    """Both texts of a pair in one row."""
    path = str(folder / "classifier")
    tiny.bert(num_labels=1).save_pretrained(path)
    tiny.tokenizer(model_max_length=64).save_pretrained(path)
    model = CrossEncoder(path, num_labels=1)
    return CrossEncoderTrainer(
        model=model,
        args=arguments(folder, CrossEncoderTrainingArguments, batch_sampler=in_order),
        train_dataset=arrange(judged()),
        eval_dataset=judged(8),
        loss=cross_encoder.losses.BinaryCrossEntropyLoss(model),
    )


def sparse(folder: Path, arrange: Arrange) -> Any:
    """Embeddings over the vocabulary, most of it 0 (SPLADE)."""
    path = str(folder / "masked")
    torch.manual_seed(0)
    transformers.BertForMaskedLM(tiny.bert_config()).save_pretrained(path)
    tiny.tokenizer(model_max_length=64).save_pretrained(path)
    model = SparseEncoder(
        modules=[modules.Transformer(path, transformer_task="fill-mask"), sparse_encoder.modules.SpladePooling("max")]
    )
    inner = sparse_encoder.losses.SparseMultipleNegativesRankingLoss(model)
    return SparseEncoderTrainer(
        model=model,
        args=arguments(folder, SparseEncoderTrainingArguments, batch_sampler=in_order, learning_rate=1e-4),
        train_dataset=arrange(pairs()),
        eval_dataset=pairs(8),
        loss=sparse_encoder.losses.SpladeLoss(model, inner, 0.01, 0.01),
    )


def few_shot(folder: Path, arrange: Arrange, *, inner: bool = True) -> Any:
    """Return the trainer of embeddings inside of setfit's; not ``inner``: setfit's own."""
    model = setfit.SetFitModel(model_body=encoder(folder), model_head=setfit.SetFitHead(in_features=32, out_features=3))
    trainer = setfit.Trainer(
        model=model,
        args=setfit.TrainingArguments(
            output_dir=str(folder), batch_size=4, max_steps=4, report_to="none", save_strategy="no", logging_steps=1
        ),
        train_dataset=arrange(Dataset.from_dict({"text": texts(8), "label": [i % 3 for i in range(8)]})),
    )
    if not inner:
        return trainer
    trainer.st_trainer.outer = trainer
    return trainer.st_trainer


def train_outer(trainer: Any) -> Mapping[str, Any]:
    """Train by setfit's trainer, which calls the one of the embeddings."""
    trainer.outer.train()
    return {}


NOT_A_TRAINER = (
    "trainer=<Trainer> is not a transformers.Trainer; expected the Trainer that trains. Pass the one inside it: "
    "attach(trainer.st_trainer)"
)
DATASETS_ALONE = "sentence-transformers takes a datasets.Dataset and refuses every other type by itself"
OWN_PAIRS = "setfit makes the pairs that it trains on from the texts, and reads them in an order of its own"

CLIENTS = {
    "sentence-transformers, in-batch negatives": Client(
        functools.partial(embeddings, data=pairs, loss=losses.MultipleNegativesRankingLoss),
        no_view=DATASETS_ALONE,
    ),
    "sentence-transformers, scored pairs": Client(
        functools.partial(embeddings, data=scored, loss=losses.CosineSimilarityLoss), no_view=DATASETS_ALONE
    ),
    "sentence-transformers, triplets": Client(
        functools.partial(embeddings, data=triplets, loss=losses.TripletLoss), no_view=DATASETS_ALONE
    ),
    "sentence-transformers, cached negatives": Client(
        functools.partial(
            embeddings,
            data=pairs,
            loss=functools.partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=2),
        ),
        no_view=DATASETS_ALONE,
    ),
    "sentence-transformers, adaptive layers": Client(
        functools.partial(embeddings, data=pairs, loss=layers_of(losses.AdaptiveLayerLoss)), no_view=DATASETS_ALONE
    ),
    "sentence-transformers, layers and widths": Client(
        functools.partial(embeddings, data=pairs, loss=layers_of(losses.Matryoshka2dLoss, matryoshka_dims=[32, 16, 8])),
        no_view=DATASETS_ALONE,
    ),
    "sentence-transformers, CrossEncoder": Client(reranked, no_view=DATASETS_ALONE),
    "sentence-transformers, SparseEncoder": Client(sparse, no_view=DATASETS_ALONE),
    "setfit": Client(few_shot, drive=train_outer, no_view=OWN_PAIRS),
    "setfit, its own trainer": Client(
        functools.partial(few_shot, inner=False),
        drive=lambda trainer: {},
        no_view=OWN_PAIRS,
        refuses={**dict.fromkeys(SETUPS, NOT_A_TRAINER), PASSED: ""},  # to the trainer inside
    ),
}
