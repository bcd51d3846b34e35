"""Losses that compare the rows of a batch with each other: embeddings, pairs, triplets, queues, prototypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import BertModel, Trainer

import tiny
from client import labelled, texts
from pattern import Pattern, bert, built, telling

Batch = dict[str, Any]


def encoder(seed: int = 0) -> Any:
    """Return a tiny BERT without a head whose rows differ."""
    torch.manual_seed(seed)
    return BertModel(tiny.bert_config(initializer_range=0.2), add_pooling_layer=False)


def mean_of_tokens(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over each row's tokens."""
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


class Embedder(nn.Module):
    """A BERT whose output is one normalised vector a row; ``return_loss`` tells the Trainer to evaluate its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, input_ids: Any, attention_mask: Any = None, return_loss: bool = True) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return F.normalize(mean_of_tokens(hidden, attention_mask), dim=-1)


class BiEncoder(nn.Module):
    """A backbone for queries and another one for passages."""

    def __init__(self) -> None:
        super().__init__()
        self.of_query, self.of_passage = encoder(0), encoder(1)

    def forward(self, query: Any, passage: Any, return_loss: bool = True) -> Any:
        one = mean_of_tokens(self.of_query(**query).last_hidden_state, query["attention_mask"])
        other = mean_of_tokens(self.of_passage(**passage).last_hidden_state, passage["attention_mask"])
        scores = one @ other.T / 10
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores))), "scores": scores}


def groups(*names: str, seed: int = 0) -> Callable[..., list[dict[str, str]]]:
    """Return what makes rows with a text under each of these names."""

    def make(count: int, *, seed: int = seed) -> list[dict[str, str]]:
        columns = [texts(count, seed=seed + 10 * i) for i in range(len(names))]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    return make


def nested() -> Callable[[list[Mapping[str, str]]], Batch]:
    """Return a collator that makes one dictionary of tensors for each name of a row."""
    tokenizer = tiny.tokenizer()

    def collate(rows: list[Mapping[str, str]]) -> Batch:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return {name: dict(tokenizer(column, padding=True, return_tensors="pt")) for name, column in columns.items()}

    return collate


def of_pairs(kind: type[Trainer], *names: str, model: Any = Embedder, **more: Any) -> Any:
    """Return what builds a trainer on nested batches."""
    return built(kind, model=model, data=groups(*names), collate=nested, remove_unused_columns=False, **more)


# ---- Beside a classifier --------------------------------------------------------------------------------------------


def supervised_contrast(hidden: torch.Tensor, labels: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    """Pull rows of one class together (SupCon)."""
    vectors = F.normalize(hidden, dim=-1)
    scores = vectors @ vectors.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool)
    same = (labels[:, None] == labels[None]) & ~itself
    logs = scores - scores.masked_fill(itself, -1e9).logsumexp(1, keepdim=True)
    return -((same * logs).sum(1) / same.sum(1).clamp(min=1)).mean()


class WithContrast(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        contrast = supervised_contrast(outputs.hidden_states[-1][:, 0], inputs["labels"])
        loss = outputs.loss + 0.3 * contrast
        return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss


class BatchHardTriplets(Trainer):
    """The farthest row of the same class and the nearest one of another, for each row."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, output_hidden_states=True)
        vectors = outputs.hidden_states[-1].mean(1)
        distances = (vectors[:, None] - vectors[None]).pow(2).sum(-1)
        same = labels[:, None] == labels[None]
        farthest = distances.masked_fill(~same, -1).amax(1)
        nearest = distances.masked_fill(same, 1e9).amin(1)
        loss = F.softplus((farthest - nearest).clamp(min=-20) / 10).mean()
        return (loss, outputs.logits) if return_outputs else loss


class Prototypes(Trainer):
    """Rows are told by their distance from the means of the classes in the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][:, 0]
        member = F.one_hot(labels, 3).to(hidden.dtype)
        means = member.T @ hidden / member.sum(0).clamp(min=1)[:, None]
        distances = torch.cdist(hidden, means + 1e-2).pow(2).masked_fill(member.sum(0) == 0, 1e4)
        loss = F.cross_entropy(-distances / 10, labels)
        return (loss, {"logits": -distances}) if return_outputs else loss


class ArcFace(nn.Module):
    """A head of angles, with a margin for the right class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.weight = nn.Parameter(torch.randn(3, 32) * 0.1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        first = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        cosines = F.linear(F.normalize(first), F.normalize(self.weight)).clamp(-0.999, 0.999)
        margins = torch.where(F.one_hot(labels, 3).bool(), torch.cos(torch.acos(cosines) + 0.3), cosines)
        return {"loss": F.cross_entropy(8 * margins, labels), "logits": 8 * cosines}


class CenterLoss(nn.Module):
    """Cross-entropy, and the distance from centres of the classes, which move with every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.classifier = nn.Linear(32, 3)
        self.register_buffer("centers", torch.zeros(3, 32))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        first = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        logits = self.classifier(first)
        loss = F.cross_entropy(logits, labels) + 0.01 * (first - self.centers[labels]).pow(2).sum(1).mean()
        if self.training:
            with torch.no_grad():
                moved = 0.5 * (first.detach() - self.centers[labels])
                self.centers.index_add_(0, labels, moved)
        return {"loss": loss, "logits": logits}


class Proxies(nn.Module):
    """Proxy-NCA: a learned vector for each class; the others of the batch stay out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = Embedder()
        self.proxies = nn.Parameter(torch.randn(3, 32))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        scores = 4 * self.embedder(input_ids, attention_mask) @ F.normalize(self.proxies, dim=-1).T
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


# ---- Pairs ----------------------------------------------------------------------------------------------------------


class InBatchNegatives(Trainer):
    """InfoNCE: each query's passage against those of the others."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        query, passage = model(**inputs["query"]), model(**inputs["passage"])
        scores = query @ passage.T / 0.2
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        return (loss, scores) if return_outputs else loss


class Symmetric(Trainer):
    """As in CLIP: both directions, a learned temperature."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        one, other = model(**inputs["one"]), model(**inputs["other"])
        scores = model.scale.exp() * one @ other.T
        asked = torch.arange(len(scores))
        loss = (F.cross_entropy(scores, asked) + F.cross_entropy(scores.T, asked)) / 2
        return (loss, {"scores": scores}) if return_outputs else loss


class HardNegatives(Trainer):
    """Passages and hard negatives of the whole batch, in one pass of twice as many rows."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        passages = {name: _joined(inputs["passage"][name], inputs["negative"][name]) for name in inputs["passage"]}
        scores = model(**inputs["query"]) @ model(**passages).T / 0.2
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        return (loss, scores) if return_outputs else loss


def _joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Put two padded batches under each other."""
    longest = max(one.shape[1], other.shape[1])
    return torch.cat([F.pad(part, (0, longest - part.shape[1])) for part in (one, other)])


class Triplets(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        anchor, positive, negative = (model(**inputs[name]) for name in ("anchor", "positive", "negative"))
        loss = F.triplet_margin_loss(anchor, positive, negative, margin=0.5)
        return (loss, anchor) if return_outputs else loss


class Siamese(Trainer):
    """The cosine of two texts against a score; columns with a suffix."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        first = model(inputs["input_ids_a"], inputs["attention_mask_a"])
        second = model(inputs["input_ids_b"], inputs["attention_mask_b"])
        loss = F.mse_loss((first * second).sum(-1), inputs["labels"])
        return (loss, first) if return_outputs else loss


def suffixed(count: int, *, seed: int = 0) -> Dataset:
    """Two texts with padded columns of their own, and a score."""
    tokenizer = tiny.tokenizer()
    pair = [tokenizer(texts(count, seed=seed + i), padding="max_length", max_length=22) for i in range(2)]
    columns = {f"{name}_{side}": ids[name] for side, ids in zip("ab", pair, strict=True) for name in ids}
    return Dataset.from_dict({**columns, "labels": [i / count for i in range(count)]})


class TwoViews(Trainer):
    """SimCLR: two passes over two views, each row against all others of both."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        both = torch.cat([model(**inputs["one"]), model(**inputs["other"])])
        count = len(both) // 2
        scores = (both @ both.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
        loss = F.cross_entropy(scores, torch.arange(2 * count).roll(count))
        return (loss, both) if return_outputs else loss


class SimCse(Trainer):
    """Two passes over the same texts, which differ by noise that a generator of one's own draws."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise = torch.Generator().manual_seed(7)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        one, other = model(**inputs["text"]), model(**inputs["text"])
        other = F.normalize(other + 0.1 * torch.randn(other.shape, generator=self.noise), dim=-1)
        loss = F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))
        return (loss, one) if return_outputs else loss


class BarlowTwins(Trainer):
    """Correlations between two views over the batch: 1 on the diagonal, 0 beside it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        one, other = model(**inputs["one"]), model(**inputs["other"])
        one, other = ((part - part.mean(0)) / (part.std(0) + 1e-2) for part in (one, other))
        correlations = one.T @ other / len(one)
        diagonal = correlations.diagonal()
        loss = ((diagonal - 1).pow(2).sum() + 0.01 * (correlations.pow(2).sum() - diagonal.pow(2).sum())) / 32
        return (loss, one) if return_outputs else loss


class VarianceInvariance(Trainer):
    """VICReg."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        one, other = model(**inputs["one"]), model(**inputs["other"])
        loss = 10 * F.mse_loss(one, other)
        for part in (one, other):
            loss = loss + F.relu(1 - (part.var(0) + 1e-4).sqrt()).mean()
            covariance = torch.cov(part.T)
            loss = loss + (covariance - covariance.diag().diag()).pow(2).sum() / 32
        return (loss, one) if return_outputs else loss


class LateInteraction(Trainer):
    """ColBERT: the best token for each token, over all pairs of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        query = F.normalize(model(**inputs["query"]).last_hidden_state, dim=-1)
        passage = F.normalize(model(**inputs["passage"]).last_hidden_state, dim=-1)
        alike = torch.einsum("qid,pjd->qpij", query, passage)
        alike = alike.masked_fill(inputs["passage"]["attention_mask"][None, :, None] == 0, -1e4).amax(-1)
        scores = (alike * inputs["query"]["attention_mask"][:, None]).sum(-1)
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        return (loss, scores) if return_outputs else loss


class SparsePenalty(Trainer):
    """SPLADE: words that few texts of the batch share, by the square of their mean."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        one, other = F.relu(model(**inputs["query"])), F.relu(model(**inputs["passage"]))
        loss = F.cross_entropy(5 * one @ other.T, torch.arange(len(one)))
        loss = loss + 0.1 * sum(part.mean(0).pow(2).sum() for part in (one, other))
        return (loss, one) if return_outputs else loss


class Queue(Trainer):
    """MoCo: keys of earlier batches, from a slow copy of the encoder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slow = Embedder().requires_grad_(False)
        self.slow.load_state_dict(self.model.state_dict())
        self.queue = F.normalize(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)), dim=-1)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        query = model(**inputs["one"])
        with torch.no_grad():
            if model.training:
                for slow, fast in zip(self.slow.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            key = self.slow(**inputs["other"])
        scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.T], 1) / 0.2
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        if model.training:
            self.queue = torch.cat([key, self.queue])[:8]
        return (loss, scores) if return_outputs else loss


class InstanceMemory(Trainer):
    """A stored vector for each example, found by its number and moved after use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = F.normalize(torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), dim=-1)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        number = inputs.pop("number")
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][:, 0]
        vectors = F.normalize(hidden, dim=-1)
        loss = F.cross_entropy(vectors @ self.memory.T / 0.2, number)
        if model.training:
            moved = F.normalize(0.5 * self.memory[number] + 0.5 * vectors.detach(), dim=-1)
            self.memory = self.memory.index_copy(0, number, moved)
        return (loss, vectors) if return_outputs else loss


class LayerEmbedder(nn.Module):
    """Writes what it finds into the batch that it gets, as modules of sentence-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = WordsOfBatch()

    def forward(self, features: Batch, return_loss: bool = True) -> Batch:
        features = self.words(features)
        features["vector"] = F.normalize(mean_of_tokens(features["hidden"], features["attention_mask"]), dim=-1)
        return features


class WordsOfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, features: Batch) -> Batch:
        found = self.encoder(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        features["hidden"] = found.last_hidden_state
        if self.encoder.config.output_hidden_states:
            features["layers"] = found.hidden_states
        return features


class EachLayer(Trainer):
    """AdaptiveLayerLoss: every layer's vectors, by a forward that is exchanged for as long as the loss runs."""

    widths: tuple[int, ...] = (32,)  # of the vectors, from their beginning (Matryoshka)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        words, layers = model.words, []
        own, config = words.forward, words.encoder.config

        def exchanged(features: Batch) -> Batch:
            return {**features, "hidden": features["layers"][layers[-1]]} if layers else own(features)

        words.forward, config.output_hidden_states = exchanged, True
        try:
            loss = self.of_batch(model, inputs)
            for layer in range(len(inputs["query"]["layers"]) - 1):
                layers.append(layer)
                loss = loss + self.of_batch(model, inputs) / 2
        finally:
            del words.forward
            config.output_hidden_states = False
        return (loss, loss[None]) if return_outputs else loss

    def of_batch(self, model: Any, inputs: Any) -> torch.Tensor:
        query, passage = (model(inputs[name])["vector"] for name in ("query", "passage"))
        scores = [query[:, :width] @ passage[:, :width].T for width in self.widths]
        return sum(F.cross_entropy(5 * each, torch.arange(len(each))) for each in scores)


class EachLayerAndWidth(EachLayer):
    widths = (32, 16, 8)


def numbered(count: int, *, seed: int = 0) -> Dataset:
    """Texts with their own number."""
    return labelled(count, seed=seed, number=list(range(count)))


PATTERNS = {
    "SupCon beside cross-entropy": Pattern(built(WithContrast), evaluates=True),
    "triplets, the hardest of the batch": Pattern(built(BatchHardTriplets)),
    "prototypes of the batch": Pattern(built(Prototypes)),
    "ArcFace head": Pattern(built(model=ArcFace)),
    "center loss, buffers that move": Pattern(built(model=CenterLoss)),
    "proxies, learned": Pattern(built(model=Proxies)),
    "in-batch negatives, InfoNCE": Pattern(of_pairs(InBatchNegatives, "query", "passage"), evaluates=True),
    "symmetric, learned temperature": Pattern(of_pairs(Symmetric, "one", "other")),
    "hard negatives, two passages to a query": Pattern(of_pairs(HardNegatives, "query", "passage", "negative"), fits=4),
    "triplets, columns of their own": Pattern(of_pairs(Triplets, "anchor", "positive", "negative")),
    "bi-encoder, two backbones": Pattern(of_pairs(Trainer, "query", "passage", model=BiEncoder)),
    "siamese, cosine to a score": Pattern(
        built(
            Siamese,
            model=Embedder,
            data=suffixed,
            remove_unused_columns=False,
            collate=lambda: None,
            label_names=["labels"],
        )
    ),
    "adaptive layers": Pattern(of_pairs(EachLayer, "query", "passage", model=LayerEmbedder, evaluated=0)),
    "adaptive layers and widths": Pattern(
        of_pairs(EachLayerAndWidth, "query", "passage", model=LayerEmbedder, evaluated=0)
    ),
    "two views, SimCLR": Pattern(of_pairs(TwoViews, "one", "other")),
    "SimCSE, noise of an own generator": Pattern(of_pairs(SimCse, "text")),
    "Barlow Twins": Pattern(of_pairs(BarlowTwins, "one", "other")),
    "VICReg": Pattern(of_pairs(VarianceInvariance, "one", "other")),
    "late interaction, ColBERT": Pattern(of_pairs(LateInteraction, "query", "passage", model=encoder, evaluated=0)),
    "sparse penalty over the batch, SPLADE": Pattern(of_pairs(SparsePenalty, "query", "passage")),
    "queue of earlier batches, MoCo": Pattern(of_pairs(Queue, "one", "other"), drive=telling("queue")),
    "memory of every example": Pattern(
        built(InstanceMemory, model=bert, data=numbered, remove_unused_columns=False), drive=telling("memory")
    ),
}
