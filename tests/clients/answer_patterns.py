"""Losses over pairs and groups of answers, models with several heads, experts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from torch import nn
from transformers import (
    Trainer,
)

import tiny
from contrastive_patterns import groups, nested
from language_patterns import causal, llama, log_probabilities, sentences, token_losses

# ---- Pairs and groups of answers ------------------------------------------------------------------------------------


class Preferences(Trainer):
    """DPO by hand: chosen and rejected in two passes each, with a frozen model of another training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = llama(seed=1).eval().requires_grad_(False)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        better, worse = (log_probabilities(model, inputs[name]) for name in ("chosen", "rejected"))
        with torch.no_grad():
            asked = [log_probabilities(self.reference, inputs[name]) for name in ("chosen", "rejected")]
        margin = 0.1 * ((better - worse) - (asked[0] - asked[1]))
        loss = -F.logsigmoid(margin - 0.5).mean()
        if model.training:
            self.log({"rewards/accuracy": (margin > 0).float().mean().item()})
        return (loss, {"loss": loss}) if return_outputs else loss


class OneStack(Trainer):
    """SimPO: chosen and rejected as one batch of twice as many rows, which the loss halves again."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = log_probabilities(model, inputs) / inputs["attention_mask"].sum(-1)
        better, worse = found.chunk(2)
        loss = -F.logsigmoid(2 * (better - worse) - 0.3).mean()
        return (loss, {"loss": loss}) if return_outputs else loss


def stacked() -> Callable[[list[Any]], dict[str, Any]]:
    """Return a collator that puts the chosen texts above the rejected ones."""
    tokenizer = tiny.tokenizer()

    def collate(rows: list[Any]) -> dict[str, Any]:
        both = [row["chosen"] for row in rows] + [row["rejected"] for row in rows]
        return dict(tokenizer(both, padding=True, return_tensors="pt", return_token_type_ids=False))

    return collate


class Rewards(Trainer):
    """A model of one number: that of the chosen text above that of the rejected one."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        chosen = model(**inputs["chosen"]).logits
        rejected = model(**inputs["rejected"]).logits
        loss = -F.logsigmoid(chosen - rejected).mean() + 0.01 * (chosen + rejected).pow(2).mean()
        return (loss, {"loss": loss}) if return_outputs else loss


class Reinforce(Trainer):
    """Log-probabilities by rewards, less the mean reward of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        rewards = inputs.pop("reward")
        found = log_probabilities(model, inputs)
        loss = -((rewards - rewards.mean()) * found).mean() / 10
        return (loss, {"loss": loss}) if return_outputs else loss


class GroupAdvantages(Trainer):
    """GRPO: rewards against mean and spread of the batch, the ratio to the old policy bounded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.old = copy.deepcopy(self.model).eval().requires_grad_(False)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        rewards = inputs.pop("reward")
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        lengths = inputs["attention_mask"].sum(-1)
        found = log_probabilities(model, inputs) / lengths
        with torch.no_grad():
            old = log_probabilities(self.old, inputs) / lengths
        ratio = torch.exp(found - old)
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean() - 0.1 * found.mean()
        return (loss, {"loss": loss}) if return_outputs else loss


class Desirable(Trainer):
    """KTO: good and bad answers against the mean divergence of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        signs = torch.where(inputs.pop("reward") > 0, 1.0, -1.0)
        found = log_probabilities(model, inputs) / 20
        level = found.mean().detach()
        loss = (1 - torch.sigmoid(signs * (found - level))).mean()
        return (loss, {"loss": loss}) if return_outputs else loss


def rewarded(count: int, *, seed: int = 0) -> Dataset:
    """Texts with a reward."""
    rewards = torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return sentences(count, seed=seed, reward=rewards)


def reward_model() -> Any:
    """Return a Llama with one number a row."""
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(tiny.llama_config(num_labels=1, initializer_range=0.1))


# ---- Models ---------------------------------------------------------------------------------------------------------


class TwoAhead(nn.Module):
    """A second head for the word after the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = llama()
        self.second = nn.Linear(32, 100, bias=False)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        outputs = self.base(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        logits = self.second(outputs.hidden_states[-1])
        first = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        second = F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
        return {"loss": first + 0.3 * second, "logits": outputs.logits}


class EarlyExit(Trainer):
    """The same head on an earlier layer."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        early = self.model.lm_head(self.model.model.norm(outputs.hidden_states[1]))
        losses, mask = token_losses(early, inputs["labels"])
        loss = outputs.loss + 0.5 * (losses * mask).sum() / mask.sum()
        return (loss, {"loss": loss}) if return_outputs else loss


class OwnForCausalLM(transformers.LlamaForCausalLM):
    """A subclass whose forward pass adds the mean square of its hidden states over all tokens."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, output_hidden_states=True
        )
        outputs.loss = outputs.loss + 0.1 * outputs.hidden_states[-1].pow(2).mean()
        outputs.hidden_states = None
        return outputs


def own_forward() -> Any:
    """Return such a model."""
    torch.manual_seed(0)
    return OwnForCausalLM(tiny.llama_config(initializer_range=0.1))


def experts(**settings: Any) -> Any:
    """Return a tiny Mixtral whose router has a loss over all tokens of a batch."""
    torch.manual_seed(0)
    chosen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    routed = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = transformers.MixtralConfig(
        **chosen,
        **routed,
        vocab_size=100,
        num_key_value_heads=2,
        router_aux_loss_coef=0.1,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return transformers.MixtralForCausalLM(config).to(**settings)


class BalancedExperts(Trainer):
    """The balance of the router written by hand."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, output_router_logits=True)
        losses, mask = token_losses(outputs.logits, labels)
        routed = outputs.router_logits[0].float().softmax(-1)
        share = F.one_hot(routed.topk(2, -1).indices, 4).float().sum(1).mean(0)
        loss = (losses * mask).sum() / mask.sum() + 0.1 * 4 * (share * routed.mean(0)).sum()
        return (loss, {"loss": loss}) if return_outputs else loss


pairs = functools.partial(causal, data=groups("chosen", "rejected"), evaluated=0)

PATTERNS = {
    "preferences, DPO by hand": pairs(Preferences, collate=nested),
    "preferences, one stack of chosen and rejected": replace(pairs(OneStack, collate=stacked), fits=4),
    "preferences, rewards": pairs(Rewards, model=reward_model, collate=nested),
    "answers, REINFORCE with the batch's mean": causal(Reinforce, data=rewarded, evaluated=0),
    "answers, GRPO": causal(GroupAdvantages, data=rewarded, evaluated=0),
    "answers, KTO": causal(Desirable, data=rewarded, evaluated=0),
    "two words ahead": causal(model=TwoAhead),
    "early exit": causal(EarlyExit),
    "forward overridden, a penalty on hidden states": causal(model=own_forward),
    "experts, the router's loss": causal(model=experts),
    "experts, the router's loss in bf16": causal(model=experts, bf16=True, is_narrow=True),
    "experts, own balance": causal(BalancedExperts, model=experts),
    "experts, own balance in bf16 weights": causal(
        BalancedExperts, model=functools.partial(experts, dtype=torch.bfloat16), is_narrow=True
    ),
}
