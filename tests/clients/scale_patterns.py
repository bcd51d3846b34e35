"""Losses by what they return: sums and counts of users under accumulation, exchanged and wrapped losses and attentions,
and flags, tasks and modes that change while a training goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from torch import nn
from transformers import AttentionInterface, DataCollatorWithPadding, Trainer, TrainerCallback
from transformers.loss import loss_utils
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.llama.modeling_llama import eager_attention_forward

import tiny
from client import train_and_evaluate
from language_patterns import sentences, with_words
from pattern import STARVED, Pattern, built

ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

# ---- Normalised over all accumulated batches ------------------------------------------------------------------------


class OwnSum(Trainer):
    """Adds up what ``total`` gives of each batch, and divides that by ``divisor``."""

    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, reduction="sum")

    def divisor(self, items: Any) -> Any:
        return 4

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.total(outputs.logits, labels)
        loss = loss / self.divisor(num_items_in_batch) if model.training else loss / len(labels)
        return (loss, outputs) if return_outputs else loss


class OverTheProduct(OwnSum):
    def divisor(self, items: Any) -> Any:
        return self.args.train_batch_size * self.args.gradient_accumulation_steps


class OverAnInteger(OwnSum):
    def divisor(self, items: Any) -> Any:
        return int(items)


class OverTheWindow(OwnSum):
    """Weights of rows over their sum in all batches that are accumulated."""

    window: Any = 1.0

    def get_batch_samples(self, *args: Any) -> Any:
        batches, items = super().get_batch_samples(*args)
        self.window = sum((batch["labels"].float() + 1).sum() for batch in batches)
        return batches, items

    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(logits, labels, reduction="none") * (labels.float() + 1)).sum()

    def divisor(self, items: Any) -> Any:
        return self.window


class MeanOverSteps(OwnSum):
    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels)

    def divisor(self, items: Any) -> Any:
        return self.args.gradient_accumulation_steps


STEPS = 2


class MeanOverANumber(MeanOverSteps):
    def divisor(self, items: Any) -> Any:
        return STEPS


class Rewards(OwnSum):
    """Of either sign."""

    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(logits, -1)[:, 0] * (labels.float() - 1.2)).sum()


class PolicyGradient(OwnSum):
    """Worth 0, whatever the gradient is."""

    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        taken = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        return ((taken - taken.detach()).exp() * (labels.float() - 1)).sum() - (labels.float() - 1).sum()


class NegativesOfTheBatch(OwnSum):
    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(5 * logits @ logits.T, torch.arange(len(logits)), reduction="sum")

    def divisor(self, items: Any) -> Any:
        return items


class WithPenalty(OwnSum):
    """The sum over the count and a mean of the batch."""

    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().total(logits, labels) + logits.square().mean()

    def divisor(self, items: Any) -> Any:
        return items


class Denoising(OwnSum):
    """Draws noise for the logits."""

    def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        noisy = logits + 0.3 * torch.randn_like(logits)
        return F.mse_loss(noisy, F.one_hot(labels, 3).float(), reduction="sum")


def over_four(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / 4


# ---- Exchanged ------------------------------------------------------------------------------------------------------


def hardest(entropies: torch.Tensor) -> torch.Tensor:
    """Return the mean of the larger half of those that count."""
    counted = entropies[entropies > 0]
    return counted.topk(max(1, len(counted) // 2)).values.mean()


def hard_cross_entropy(source: Any, target: Any, num_items: Any = None, ignore_index: int = -100, **_: Any) -> Any:
    return hardest(stock_cross_entropy(source, target, ignore_index=ignore_index, reduction="none"))


def any_cross_entropy(source: Any, target: Any, *args: Any, **settings: Any) -> Any:
    settings.pop("reduction", None)
    return hardest(stock_cross_entropy(source, target, *args, reduction="none", **settings))


def smooth_cross_entropy(source: Any, target: Any, *args: Any, **settings: Any) -> Any:
    """Another loss, which is a mean or a sum as it is asked for."""
    return stock_cross_entropy(source, target, *args, **{**settings, "label_smoothing": 0.1})


stock_cross_entropy = F.cross_entropy


def weighted(before: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the loss of a head: multiplied by how wrong the batch was."""

    @functools.wraps(before)
    def loss(*args: Any, **kwargs: Any) -> Any:
        found = before(*args, **kwargs)
        return found * found.detach().clamp(max=5.0)

    return loss


def within(*patches: Callable[[], Any]) -> Callable[[Trainer], Mapping[str, Any]]:
    """Return what trains and evaluates with something of transformers or torch exchanged."""

    def drive(trainer: Trainer) -> Mapping[str, Any]:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch())
            return train_and_evaluate(trainer)

    return drive


def patched(place: Any, name: str, function: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(place, name, function)


def mapped(name: str) -> Callable[[], Any]:
    return lambda: mock.patch.dict(loss_utils.LOSS_MAPPING, {name: weighted(loss_utils.LOSS_MAPPING[name])})


def rows_meet(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
    """Attention that looks at the values of the row before, too."""
    return eager_attention_forward(module, query, key, value + 0.5 * value.roll(1, 0), mask, **settings)


def rows_apart(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
    return eager_attention_forward(module, query, key, 1.5 * value, mask, **settings)


AttentionInterface.register("rows_meet", rows_meet)
AttentionInterface.register("rows_apart", rows_apart)


def causal(*patches: Callable[[], Any], attention: str = "eager", **settings: Any) -> Pattern:
    """Return the pattern of a causal language model with something exchanged."""

    def model() -> Any:
        found = tiny.llama(initializer_range=0.1)
        found.config._attn_implementation = attention
        return found

    given = {"collate": with_words, "remove_unused_columns": False, **settings}
    return Pattern(built(model=model, data=sentences, **given), within(*patches))


# ---- What changes meanwhile -----------------------------------------------------------------------------------------


class MixedBert(BertModel):
    """MixStyle: rows are mixed with their neighbours once it is on, or where a task says so."""

    on, scale = False, 1.0

    def forward(self, *args: Any, task: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if self.on or (task is not None and bool((task == 1).any())):
            mean = outputs.last_hidden_state.mean(1, keepdim=True)
            outputs.last_hidden_state = 0.7 * outputs.last_hidden_state + 0.3 * mean.roll(1, 0)
        outputs.last_hidden_state = self.scale * outputs.last_hidden_state
        return outputs


class Mixed(nn.Module):
    """A classifier over it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert = MixedBert(tiny.bert_config(initializer_range=0.2))
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, task: Any = None, step: Any = None) -> Any:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask, task=task).last_hidden_state
        shift = 0.0 if step is None else 0.01 * step.float().mean()
        logits = self.head(hidden[:, 0]) + shift
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class From(TrainerCallback):
    """Sets an attribute of a module from a step on."""

    def __init__(self, step: int, name: str, value: Any) -> None:
        self.step, self.name, self.value = step, name, value

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step >= self.step:
            setattr(model.bert, self.name, self.value(state.global_step))


class StillFrom(From):
    """Puts a layer into evaluation mode."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step >= self.step:
            model.bert.encoder.layer[0].eval()


class Tasks(DataCollatorWithPadding):
    """Adds what ``tensor`` makes of the number of the batch."""

    def __init__(self, tensor: Callable[[int, int], dict[str, torch.Tensor]]) -> None:
        super().__init__(tiny.tokenizer())
        self.tensor, self.count = tensor, 0

    def __call__(self, features: Any) -> Any:
        self.count += 1
        return {**super().__call__(features), **self.tensor(self.count, len(features))}


def changing(*callbacks: Callable[[], TrainerCallback], tensor: Any = None, step: int = 0, **settings: Any) -> Pattern:
    """Return the pattern of a model whose rows are mixed at ``step``, counted from 1; 0: at none."""
    collate = {} if tensor is None else {"collate": lambda: Tasks(tensor)}
    given = {"evaluated": 0, "remove_unused_columns": False, **collate, **settings}
    refusal = rf"at step {step} .*rows depend on each other: parts of its output 0"
    refuses = {"micro-batches of 2": refusal} if step else {}
    left_out = STARVED if step else ()  # memory runs out in a step before
    build = built(model=Mixed, callbacks=callbacks, **given)
    return Pattern(build, lambda trainer: trainer.train() and {}, left_out=left_out, refuses=refuses)


# ---- Sounds ---------------------------------------------------------------------------------------------------------


def sounds(count: int, *, seed: int = 0) -> Dataset:
    """Sounds of one length, and three labels each."""
    waves = torch.randn(count, 700, generator=torch.Generator().manual_seed(seed)).tolist()
    labels = [[1 + (i * k) % 28 for k in range(1, 4)] for i in range(count)]
    return Dataset.from_dict({"input_values": waves, "labels": labels})


def wav2vec2() -> Any:
    """Return a model of which SpecAugment masks nothing: masks of parts are other draws."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "intermediate_size": 32}
    dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    rates = dict.fromkeys((*dropouts, "layerdrop"), 0.0)
    norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "ctc_loss_reduction": "mean"}
    config = transformers.Wav2Vec2Config(**sizes, **layers, **places, **rates, **norms, mask_time_prob=0.0)
    return transformers.Wav2Vec2ForCTC(config)


class ScaledLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 1.0, outputs) if return_outputs else outputs.loss * 1.0


def stacked() -> Callable[[Any], Any]:
    return lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def accumulated(kind: Any = Trainer, **settings: Any) -> Pattern:
    return Pattern(built(kind, **ACCUMULATED, **settings), fits=1)


PATTERNS = {
    "a sum over batch size x accumulation steps": accumulated(OverTheProduct),
    "a sum over a number in the code": accumulated(OwnSum),
    "a sum over the count as an integer": accumulated(OverAnInteger),
    "a sum of weights over those of the window": accumulated(OverTheWindow, remove_unused_columns=False),
    "a mean over the accumulation steps": accumulated(MeanOverSteps),
    "a mean over a number of steps from outside": accumulated(MeanOverANumber),
    "rewards of either sign, a sum": accumulated(Rewards),
    "a policy gradient, worth 0": accumulated(PolicyGradient),
    "negatives of the batch, a sum over the count": accumulated(NegativesOfTheBatch),
    "a sum over the count beside a mean": accumulated(WithPenalty),
    "noise on the logits, a sum": accumulated(Denoising),
    "compute_loss_func, a sum over a number": accumulated(given={"compute_loss_func": over_four}),
    "fixed_cross_entropy exchanged, the hardest half": causal(
        patched(loss_utils, "fixed_cross_entropy", hard_cross_entropy)
    ),
    "cross_entropy of torch exchanged, the hardest half": causal(patched(F, "cross_entropy", any_cross_entropy)),
    "cross_entropy of torch exchanged, smoothed": causal(patched(F, "cross_entropy", smooth_cross_entropy)),
    "a wrapped loss of transformers": causal(mapped("ForCausalLM")),
    "a wrapped loss of a classifier": Pattern(built(), within(mapped("ForSequenceClassification"))),
    "attention by name, rows meet": causal(attention="rows_meet"),
    "attention by name, rows apart": causal(attention="rows_apart"),
    "rows mixed from a step on": changing(lambda: From(2, "on", lambda step: True), step=3),
    "rows mixed where a tensor says so": changing(
        tensor=lambda count, rows: {"task": torch.full((rows,), int(count == 3))}, step=3
    ),
    "tasks as a tensor, rows apart": changing(
        tensor=lambda count, rows: {"task": torch.full((rows,), 2 * (count % 2))}
    ),
    "a scale that is set in each step": changing(lambda: From(0, "scale", lambda step: 1.0 + 0.1 * step)),
    "a layer in evaluation mode from a step on": changing(lambda: StillFrom(2, "", None)),
    "the step as a tensor": changing(tensor=lambda count, rows: {"step": torch.full((rows,), count)}),
    "sounds to texts, no SpecAugment": Pattern(built(model=wav2vec2, data=sounds, collate=stacked)),
    "sounds to texts, an own loss": Pattern(built(ScaledLoss, model=wav2vec2, data=sounds, collate=stacked)),
}
