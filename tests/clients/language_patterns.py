"""Losses of causal language models over their tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DataCollatorForLanguageModeling, Trainer

import tiny
from client import texts
from pattern import OfInputs, OfLabels, Pattern, built

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
    **more: Any,
) -> Pattern:
    """Return the pattern of a causal language model."""
    settings = {"collate": with_words, "remove_unused_columns": False, **more}
    return Pattern(built(kind, model=model, data=data, **settings), is_text=True, is_narrow=is_narrow)


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


class OwnShift(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        shifted = outputs.logits[..., :-1, :].contiguous()
        asked = labels[..., 1:].contiguous()
        return nn.CrossEntropyLoss()(shifted.view(-1, shifted.size(-1)), asked.view(-1))


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


class ZLoss(OfInputs):
    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        return outputs.loss + 1e-2 * outputs.logits.logsumexp(-1).pow(2).mean()


class SmoothedTokens(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        losses, mask = token_losses(outputs.logits, labels)
        even = -outputs.logits[:, :-1].log_softmax(-1).mean(-1)
        return ((0.9 * losses + 0.1 * even) * mask).sum() / mask.sum()


class MeanOfSequences(OfLabels):
    """Every row counts as much, however long it is."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        losses, mask = token_losses(outputs.logits, labels)
        return ((losses * mask).sum(-1) / mask.sum(-1)).mean()


class Unlikelihood(OfInputs):
    """Words that the row has had already become less likely."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        words = inputs["input_ids"]
        seen = torch.zeros_like(outputs.logits).scatter_(2, words[:, None].expand(-1, words.shape[1], -1), 1.0)
        seen.scatter_(2, words.roll(-1, 1)[..., None], 0.0)
        unlikely = -((1 - outputs.logits.softmax(-1)).clamp(min=1e-5).log() * seen).sum(-1)
        return outputs.loss + 0.1 * (unlikely * inputs["attention_mask"]).sum() / inputs["attention_mask"].sum()


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


class DynamicFineTuning(OfLabels):
    """DFT: each token's loss by its own probability."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        losses, mask = token_losses(outputs.logits, labels)
        return (losses * torch.exp(-losses.detach()) * mask).sum() / mask.sum()


def focal_tokens(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A ``compute_loss_func``."""
    losses, mask = token_losses(outputs.logits, labels)
    total = ((1 - torch.exp(-losses)) ** 2 * losses * mask).sum()
    return total / (mask.sum() if num_items_in_batch is None else num_items_in_batch)


class HardTokens(OfLabels):
    """The 60 % of the batch's tokens with the largest losses."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        losses, mask = token_losses(outputs.logits, labels)
        counted = losses[mask.bool()]
        return counted.topk(max(1, int(0.6 * len(counted)))).values.mean()


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


class Capped(OfLabels):
    """Logits in float32, bounded, and a bonus for the entropy of all words."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        logits = 5 * torch.tanh(outputs.logits.float() / 5)
        losses, mask = token_losses(logits, labels)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[:, :-1]
        return ((losses - 0.01 * entropy) * mask).sum() / mask.sum()


class NearReference(OfInputs):
    """The divergence of each word from the model as it was, as a mean over the words of the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(False)

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        with torch.no_grad():
            asked = self.reference(**inputs).logits.log_softmax(-1)
        apart = F.kl_div(outputs.logits.log_softmax(-1), asked, log_target=True, reduction="none").sum(-1)
        mask = inputs["attention_mask"]
        return outputs.loss + (apart * mask).sum() / mask.sum()


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


def prompted(count: int, *, seed: int = 0) -> Dataset:
    """Texts with the length of their prompt."""
    return sentences(count, seed=seed, prompt_length=[2 + i % 4 for i in range(count)])


def adapted() -> Any:
    """Return a Llama with adapters that are not zero."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config)


PATTERNS = {
    "tokens, LoRA": causal(OwnShift, model=adapted),
    "tokens, prompt weighted": causal(PromptWeighted, data=prompted),
    "tokens, own shift": causal(OwnShift),
    "tokens, padding ignored by its id": causal(PaddingIgnored),
    "tokens, over the items of the step": causal(OverItems),
    "tokens, over the items of two accumulated batches": causal(OverItems, gradient_accumulation_steps=2, max_steps=3),
    "tokens, z-loss": causal(ZLoss),
    "tokens, label smoothing by hand": causal(SmoothedTokens),
    "tokens, mean of sequences": causal(MeanOfSequences),
    "tokens, unlikelihood": causal(Unlikelihood),
    "tokens, DFT": causal(DynamicFineTuning),
    "tokens, focal by compute_loss_func": causal(given={"compute_loss_func": focal_tokens}),
    "tokens, the hardest of the batch": causal(HardTokens),
    "tokens, in chunks": causal(InChunks),
    "tokens, capped logits and entropy": causal(Capped),
    "tokens, KL to a reference": causal(NearReference),
    "tokens, contrast within rows": causal(AlikeTokens),
    "tokens, bf16 autocast": causal(OwnShift, bf16=True, is_narrow=True),
}
