"""Models as people build them around a backbone: heads, norms, tasks, rows that see each other, hooks, adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.utils.checkpoint import checkpoint
from transformers import BertModel, Trainer
from transformers.modeling_outputs import SequenceClassifierOutput

import tiny
from batch_patterns import HardHalf
from client import labelled
from contrastive_patterns import encoder, mean_of_tokens
from loss_patterns import Focal
from pattern import Pattern, bert, built

LINEAR = functools.partial(nn.Linear, 32, 3)


class Headed(nn.Module):
    """A BERT under the name ``encoder``, and a head on its first token."""

    def __init__(self, head: Callable[[], nn.Module] = LINEAR) -> None:
        super().__init__()
        self.encoder = encoder()
        self.head = head()

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        first = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        logits = self.head(first)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def headed(*layers: Callable[[], nn.Module]) -> Callable[[], Headed]:
    """Return what makes a model with these layers for a head."""
    return lambda: Headed(lambda: nn.Sequential(*(layer() for layer in layers)))


# ---- Heads and poolings ---------------------------------------------------------------------------------------------


class MultiSample(Headed):
    """The mean loss of several dropout masks on one vector; the probability is 0 here."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        first = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        logits = [self.head(F.dropout(first, 0.0, self.training)) for _ in range(4)]
        loss = sum(F.cross_entropy(each, labels) for each in logits) / 4
        return SequenceClassifierOutput(loss=loss, logits=torch.stack(logits).mean(0))


class WeightedLayers(Headed):
    """A learned mean of all layers, averaged over the tokens; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(3))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        layers = torch.stack(outputs.hidden_states)
        pooled = mean_of_tokens((layers * self.weights.softmax(0)[:, None, None, None]).sum(0), attention_mask)
        logits = self.head(pooled)
        return F.cross_entropy(logits, labels), logits


class AttentionPooling(Headed):
    """A learned weight for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(32, 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        scores = self.score(hidden).squeeze(-1).masked_fill(attention_mask == 0, -1e4)
        logits = self.head((hidden * scores.softmax(-1)[..., None]).sum(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Recurrent(nn.Module):
    """No backbone of transformers: embeddings, an LSTM, convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(100, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.convolutions = nn.ModuleList(nn.Conv1d(16, 8, width, padding=1) for width in (2, 3))
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        hidden, _ = self.lstm(self.embeddings(input_ids))
        maxima = [F.relu(layer(hidden.transpose(1, 2))).amax(-1) for layer in self.convolutions]
        logits = self.head(torch.cat(maxima, -1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Sentences(Headed):
    """A document is its sentences: rows of a third dimension, run as one batch and averaged."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        batch, sentences, length = input_ids.shape
        flat = (value.view(batch * sentences, length) for value in (input_ids, attention_mask))
        first = self.encoder(*flat).last_hidden_state[:, 0].view(batch, sentences, -1)
        logits = self.head(first.mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def documents(count: int, *, seed: int = 0) -> Dataset:
    """Two sentences of one length to a row."""
    ids = torch.randint(5, 100, (count, 2, 8), generator=torch.Generator().manual_seed(seed))
    columns = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    return Dataset.from_dict({**columns, "labels": [i % 3 for i in range(count)]})


# ---- Tasks ----------------------------------------------------------------------------------------------------------


class TwoTasks(nn.Module):
    """Two heads; class 4 of the second is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.first, self.second = nn.Linear(32, 3), nn.Linear(32, 5)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, second_labels: Any = None) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        one, other = self.first(hidden), self.second(hidden)
        ignored = F.cross_entropy(other, second_labels, ignore_index=4)
        return {"loss": F.cross_entropy(one, labels) + ignored, "logits": one, "second": other}


def two_tasks(count: int, *, seed: int = 0) -> Dataset:
    """Second labels, of which those of later examples are ignored here and there."""
    second = [i % 4 if i < 6 or i % 3 else 4 for i in range(count)]
    return labelled(count, seed=seed, second_labels=second)


class TasksInTurn(Headed):
    """A task to a batch: the third one compares the rows of the batch, so that only some batches couple them."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, task: Any = None) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden[:, 0])
        turn = int(task[0])
        if turn == 0:
            loss = F.cross_entropy(logits, labels)
        elif turn == 1:
            loss = (hidden.pow(2).mean(-1) * attention_mask).sum() / attention_mask.sum()
        else:
            vectors = F.normalize(hidden[:, 0], dim=-1)
            loss = F.cross_entropy(vectors @ vectors.T / 0.5, torch.arange(len(vectors)).roll(1))
        return {"loss": loss, "logits": logits}


def in_turn(count: int, *, seed: int = 0) -> Dataset:
    """Four examples to a task."""
    return labelled(count, seed=seed, task=[i // 4 % 3 for i in range(count)])


class TaskOfEachRow(nn.Module):
    """A head for each task, and the mean over the tasks of the batch of the means of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.heads = nn.ModuleList(nn.Linear(32, 3) for _ in range(2))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, task: Any = None) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        logits = torch.stack([head(hidden) for head in self.heads])[task % 2, torch.arange(len(hidden))]
        losses = F.cross_entropy(logits, labels, reduction="none")
        present = (task % 2).unique()
        return {"loss": sum(losses[task % 2 == one].mean() for one in present) / len(present), "logits": logits}


def mixed(count: int, *, seed: int = 0) -> Dataset:
    """Tasks within a batch."""
    return labelled(count, seed=seed, task=[int(i % 3 == 0) for i in range(count)])


class GroupAttention(nn.Module):
    """Rows with the same group see each other, between backbone and head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, group: Any = None) -> Any:
        first = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        others = group[:, None] != group[None]
        mixed = self.attention(first[None], first[None], first[None], attn_mask=others, need_weights=False)[0][0]
        logits = self.head(first + mixed)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class GroupsInBackbone(GroupAttention):
    """The same before the backbone: its embedded words are mixed between rows of a group."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, group: Any = None) -> Any:
        embedded = self.encoder.embeddings.word_embeddings(input_ids)
        same = (group[:, None] == group[None]).to(embedded.dtype)
        shared = torch.einsum("ij,jld->ild", same / same.sum(1, keepdim=True), embedded)
        hidden = self.encoder(inputs_embeds=embedded + 0.5 * shared, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden[:, 0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def grouped(count: int, *, seed: int = 0) -> Dataset:
    """Groups that come apart in a shuffled batch."""
    return labelled(count, seed=seed, group=[i % 3 for i in range(count)])


# ---- Norms, quantisation, checkpointing -----------------------------------------------------------------------------


class NormedTokens(nn.Module):
    """A norm over the batch between the layers of a BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


def normed_backbone() -> Any:
    """Return a BERT with a batch norm inside."""
    model = bert()
    model.bert.embeddings.LayerNorm = NormedTokens()
    return model


def spectral() -> Any:
    """Return a BERT whose classifier's weight is divided by its largest singular value, which moves in training."""
    model = bert()
    nn.utils.parametrizations.spectral_norm(model.classifier)
    return model


def spectral_inside() -> Any:
    """Return the same with a layer of the backbone."""
    model = bert()
    nn.utils.parametrizations.spectral_norm(model.bert.encoder.layer[0].intermediate.dense)
    return model


def quantised() -> Any:
    """Return a BERT that learns to be quantised: a hook rounds the pooler's output by a moving range."""
    model = bert()
    observer = functools.partial(MovingAverageMinMaxObserver, averaging_constant=0.3)
    model.bert.pooler.add_module("fake", FakeQuantize(observer, quant_min=0, quant_max=255))
    model.bert.pooler.register_forward_hook(lambda module, given, found: module.fake(found))
    return model


class Reentrant(Headed):
    """The backbone runs again in the backward pass, as torch did it first."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        def run(embedded: torch.Tensor) -> torch.Tensor:
            return self.encoder(inputs_embeds=embedded, attention_mask=attention_mask).last_hidden_state

        embedded = self.encoder.embeddings.word_embeddings(input_ids)
        logits = self.head(checkpoint(run, embedded, use_reentrant=True)[:, 0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


# ---- Rows mixed -----------------------------------------------------------------------------------------------------


class MixedHidden(Trainer):
    """Mixup of the hidden states that the classifier reads."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        pooled = self.model.bert(**inputs).pooler_output
        if not model.training:
            logits = self.model.classifier(pooled)
            loss = F.cross_entropy(logits, labels)
            return (loss, {"logits": logits}) if return_outputs else loss
        order = torch.arange(len(pooled)).flip(0)
        logits = self.model.classifier(0.7 * pooled + 0.3 * pooled[order])
        return 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels[order])


class ManifoldMixup(Trainer):
    """Rows mixed within the first layer, by a hook that is there for one pass."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        labels = inputs.pop("labels")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.state.global_step))

        def mix(module: Any, given: Any, found: Any) -> Any:
            hidden = found[0] if isinstance(found, tuple) else found
            hidden = 0.8 * hidden + 0.2 * hidden[order]
            return (hidden, *found[1:]) if isinstance(found, tuple) else hidden

        handle = self.model.bert.encoder.layer[0].register_forward_hook(mix)
        logits = model(**inputs).logits
        handle.remove()
        return 0.8 * F.cross_entropy(logits, labels) + 0.2 * F.cross_entropy(logits, labels[order])


class Tied(nn.Module):
    """A BERT that rebuilds its own words by the weight of its embeddings, beside a class."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = BertModel(tiny.bert_config(initializer_range=0.2))
        self.classifier = nn.Linear(32, 3)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        outputs = self.backbone(input_ids=input_ids, attention_mask=attention_mask)
        words = F.linear(outputs.last_hidden_state, self.backbone.embeddings.word_embeddings.weight)
        logits = self.classifier(outputs.pooler_output)
        rebuilt = F.cross_entropy(words.flatten(0, 1), input_ids.flatten(), ignore_index=0)
        return {"loss": F.cross_entropy(logits, labels) + 0.1 * rebuilt, "logits": logits}


def adapted(**settings: Any) -> Any:
    """Return a BERT with adapters that are not zero."""
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=False)
    return get_peft_model(bert(**settings), config)


def in_order(**settings: Any) -> Any:
    """Return what builds a trainer that reads its examples as they are."""
    return built(train_sampling_strategy="sequential", remove_unused_columns=False, **settings)


class WithoutTypes(Trainer):
    """Leaves out a column that the model does not take."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        inputs.pop("token_type_ids", None)
        return super().compute_loss(model, inputs, return_outputs)


PATTERNS = {
    "multi-sample dropout": Pattern(built(model=MultiSample)),
    "mean of all layers": Pattern(built(model=WeightedLayers)),
    "attention pooling": Pattern(built(model=AttentionPooling)),
    "LSTM and convolutions, no backbone": Pattern(built(model=Recurrent)),
    "documents, sentences as rows": Pattern(built(model=Sentences, data=documents, collate=lambda: None), fits=4),
    "two tasks, labels ignored later": Pattern(built(model=TwoTasks, data=two_tasks)),
    "tasks in turn, one compares rows": Pattern(in_order(kind=WithoutTypes, model=TasksInTurn, data=in_turn)),
    "task of each row": Pattern(built(model=TaskOfEachRow, data=mixed)),
    "attention within groups, in the head": Pattern(built(model=GroupAttention, data=grouped), evaluates=True),
    "attention within groups, before the backbone": Pattern(built(model=GroupsInBackbone, data=grouped)),
    "batch norm in the head": Pattern(built(model=headed(functools.partial(nn.BatchNorm1d, 32), LINEAR))),
    "batch norm in the backbone": Pattern(built(model=normed_backbone)),
    "group norm in the head": Pattern(built(model=headed(functools.partial(nn.GroupNorm, 4, 32), LINEAR))),
    "layer norm in the head": Pattern(built(model=headed(functools.partial(nn.LayerNorm, 32), nn.GELU, LINEAR))),
    "spectral norm of the classifier": Pattern(built(model=spectral)),
    "spectral norm in the backbone": Pattern(built(model=spectral_inside)),
    "quantisation-aware, a hook": Pattern(built(model=quantised)),
    "checkpoint, reentrant": Pattern(built(model=Reentrant)),
    "gradient checkpointing, focal": Pattern(
        built(Focal, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    ),
    "mixup of hidden states": Pattern(built(MixedHidden)),
    "manifold mixup, a hook for one pass": Pattern(built(ManifoldMixup)),
    "words rebuilt by tied embeddings": Pattern(built(model=Tied)),
    "LoRA, focal": Pattern(built(Focal, model=adapted)),
    "LoRA, hard examples": Pattern(built(HardHalf, model=adapted)),
    "bf16 autocast, focal": Pattern(built(Focal, bf16=True), is_narrow=True),
    "bf16 weights, hard examples": Pattern(built(HardHalf, model=lambda: bert().to(torch.bfloat16)), is_narrow=True),
}
