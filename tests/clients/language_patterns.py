"""Losses of causal language models: over tokens, sequences, pairs and groups of answers; experts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DataCollatorForLanguageModeling, Trainer

import tiny
from client import texts
from contrastive_patterns import groups, nested
from pattern import Pattern, built

llama = functools.partial(tiny.llama, initializer_range=0.1)


def sentences(count: int, *, seed: int = 0, **columns: list[Any]) -> Dataset:
    """Tokenised texts, and more columns."""
    return Dataset.from_dict({"input_ids": tiny.tokenizer()(texts(count, seed=seed))["input_ids"], **columns})


def with_words() -> DataCollatorForLanguageModeling:
    """Return the collator whose labels are the words."""
    return DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)


def causal(
    kind: Callable[..., Any] = Trainer,
    *,
    model: Any = llama,
    data: Any = sentences,
    is_narrow: bool = False,
    left_out: Sequence[str] = (),
    **more: Any,
) -> Pattern:
    """Return the pattern of a causal language model."""
    settings = {"collate": with_words, "remove_unused_columns": False, **more}
    return Pattern(
        built(kind, model=model, data=data, **settings), is_text=True, is_narrow=is_narrow, left_out=left_out
    )


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each next token, and which of them count; ``(batch, seq - 1)`` both."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return losses, (labels[:, 1:] != -100).to(losses.dtype)


def log_probabilities(model: Any, inputs: Any) -> torch.Tensor:
    """Return the log-probability of each row's words."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    words = inputs["input_ids"][:, 1:]
    found = logits.log_softmax(-1).gather(-1, words[..., None]).squeeze(-1)
    return (found * inputs["attention_mask"][:, 1:]).sum(-1)


# ---- Tokens ---------------------------------------------------------------------------------------------------------


class OwnShift(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        shifted = outputs.logits[..., :-1, :].contiguous()
        asked = labels[..., 1:].contiguous()
        loss = nn.CrossEntropyLoss()(shifted.view(-1, shifted.size(-1)), asked.view(-1))
        return (loss, outputs) if return_outputs else loss


class PaddingIgnored(Trainer):
    """Labels are the ids; padding is told by its id."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        outputs = model(input_ids=ids, attention_mask=inputs["attention_mask"])
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        return (loss, outputs) if return_outputs else loss


class OverItems(Trainer):
    """A sum that the items of the whole step divide."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, mask = token_losses(outputs.logits, labels)
        loss = (losses * mask).sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class ZLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-2 * outputs.logits.logsumexp(-1).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class SmoothedTokens(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, mask = token_losses(outputs.logits, labels)
        even = -outputs.logits[:, :-1].log_softmax(-1).mean(-1)
        loss = ((0.9 * losses + 0.1 * even) * mask).sum() / mask.sum()
        return (loss, outputs) if return_outputs else loss


class MeanOfSequences(Trainer):
    """Every row counts as much, however long it is."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, mask = token_losses(outputs.logits, labels)
        loss = ((losses * mask).sum(-1) / mask.sum(-1)).mean()
        return (loss, outputs) if return_outputs else loss


class Unlikelihood(Trainer):
    """Words that the row has had already become less likely."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        words = inputs["input_ids"]
        seen = torch.zeros_like(outputs.logits).scatter_(2, words[:, None].expand(-1, words.shape[1], -1), 1.0)
        seen.scatter_(2, words.roll(-1, 1)[..., None], 0.0)
        unlikely = -((1 - outputs.logits.softmax(-1)).clamp(min=1e-5).log() * seen).sum(-1)
        loss = outputs.loss + 0.1 * (unlikely * inputs["attention_mask"]).sum() / inputs["attention_mask"].sum()
        return (loss, outputs) if return_outputs else loss


class PromptWeighted(Trainer):
    """Words of the prompt count a tenth."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels, prompt = inputs.pop("labels"), inputs.pop("prompt_length")
        outputs = model(**inputs)
        losses, mask = token_losses(outputs.logits, labels)
        is_prompt = torch.arange(1, labels.shape[1]) < prompt[:, None]
        weights = mask * torch.where(is_prompt, 0.1, 1.0)
        loss = (losses * weights).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


class DynamicFineTuning(Trainer):
    """DFT: each token's loss by its own probability."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, mask = token_losses(outputs.logits, labels)
        loss = (losses * torch.exp(-losses.detach()) * mask).sum() / mask.sum()
        return (loss, outputs) if return_outputs else loss


def focal_tokens(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A ``compute_loss_func``."""
    losses, mask = token_losses(outputs.logits, labels)
    total = ((1 - torch.exp(-losses)) ** 2 * losses * mask).sum()
    return total / (mask.sum() if num_items_in_batch is None else num_items_in_batch)


class HardTokens(Trainer):
    """The 60 % of the batch's tokens with the largest losses."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses, mask = token_losses(outputs.logits, labels)
        counted = losses[mask.bool()]
        loss = counted.topk(max(1, int(0.6 * len(counted)))).values.mean()
        return (loss, outputs) if return_outputs else loss


class InChunks(Trainer):
    """The head and the loss for eight positions at a time."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        hidden = self.model.model(**inputs).last_hidden_state[:, :-1].flatten(0, 1)
        asked = labels[:, 1:].flatten()
        total = sum(
            F.cross_entropy(self.model.lm_head(part), wanted, reduction="sum")
            for part, wanted in zip(hidden.split(8), asked.split(8), strict=True)
        )
        loss = total / (asked != -100).sum()
        return (loss, {"loss": loss}) if return_outputs else loss


class Capped(Trainer):
    """Logits in float32, bounded, and a bonus for the entropy of all words."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = 5 * torch.tanh(outputs.logits.float() / 5)
        losses, mask = token_losses(logits, labels)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[:, :-1]
        loss = ((losses - 0.01 * entropy) * mask).sum() / mask.sum()
        return (loss, outputs) if return_outputs else loss


class NearReference(Trainer):
    """The divergence of each word from the model as it was, as a mean over the words of the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(False)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            asked = self.reference(**inputs).logits.log_softmax(-1)
        apart = F.kl_div(outputs.logits.log_softmax(-1), asked, log_target=True, reduction="none").sum(-1)
        mask = inputs["attention_mask"]
        loss = outputs.loss + (apart * mask).sum() / mask.sum()
        return (loss, outputs) if return_outputs else loss


class AlikeTokens(Trainer):
    """SimCTG: the hidden states of a row's words are kept apart."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        hidden = F.normalize(outputs.hidden_states[-1], dim=-1)
        mask = inputs["attention_mask"]
        pairs = (mask[:, :, None] * mask[:, None]) * (1 - torch.eye(mask.shape[1]))
        alike = F.relu(0.5 - 1 + hidden @ hidden.transpose(1, 2)) * pairs
        loss = outputs.loss + alike.sum() / pairs.sum()
        return (loss, {"loss": loss}) if return_outputs else loss


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


def prompted(count: int, *, seed: int = 0) -> Dataset:
    """Texts with the length of their prompt."""
    return sentences(count, seed=seed, prompt_length=[2 + i % 4 for i in range(count)])


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


def adapted() -> Any:
    """Return a Llama with adapters that are not zero."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config)


pairs = functools.partial(causal, data=groups("chosen", "rejected"), evaluated=0)

PATTERNS = {
    "tokens, own shift": causal(OwnShift),
    "tokens, padding ignored by its id": causal(PaddingIgnored),
    "tokens, over the items of the step": causal(OverItems),
    "tokens, over the items of two accumulated batches": causal(OverItems, gradient_accumulation_steps=2, max_steps=2),
    "tokens, z-loss": causal(ZLoss),
    "tokens, label smoothing by hand": causal(SmoothedTokens),
    "tokens, mean of sequences": causal(MeanOfSequences),
    "tokens, unlikelihood": causal(Unlikelihood),
    "tokens, prompt weighted": causal(PromptWeighted, data=prompted),
    "tokens, DFT": causal(DynamicFineTuning),
    "tokens, focal by compute_loss_func": causal(given={"compute_loss_func": focal_tokens}),
    "tokens, the hardest of the batch": causal(HardTokens),
    "tokens, in chunks": causal(InChunks),
    "tokens, capped logits and entropy": causal(Capped),
    "tokens, KL to a reference": causal(NearReference),
    "tokens, contrast within rows": causal(AlikeTokens),
    "tokens, bf16 autocast": causal(OwnShift, bf16=True, is_narrow=True),
    "tokens, LoRA": causal(OwnShift, model=adapted),
    "preferences, DPO by hand": pairs(Preferences, collate=nested),
    "preferences, one stack of chosen and rejected": pairs(OneStack, collate=stacked),
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
