"""What older libraries did to models and optimizers, as functions that ``published_behaviours`` puts in place.

Each changes a model through public means, as ``prepare=`` does, or returns the memory of an optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from hf_memopt.prediction.memory.optimizers import OptimizerMemory, ParameterFacts
from hf_memopt.prediction.memory.optimizers.parameters import in_order, memory_of, with_previous

# ---- The loss and the logits of language models


def upcast_and_copy_in_loss(model: Any) -> None:
    """Let the loss cast the logits to float32 and copy all but the last position of each row."""
    _inside(model).loss_function = _shifted_loss(upcast=True)


def copy_in_loss(model: Any) -> None:
    """Let the loss copy all but the last position of each row, in the dtype of the logits."""
    _inside(model).loss_function = _shifted_loss(upcast=False)


def _shifted_loss(*, upcast: bool) -> Callable[..., torch.Tensor]:
    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        if upcast:
            logits = logits.float()
        left = logits[..., :-1, :].contiguous()
        right = labels[..., 1:].contiguous()
        return F.cross_entropy(left.view(-1, vocab_size), right.view(-1), ignore_index=-100)

    return loss


def _inside(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# ---- Attention, softmax and the key-value cache


class _Kept(torch.autograd.Function):
    """The identity, which keeps its input until its own backward is over."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source)
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def softmax_that_keeps_its_input(source: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension; input and output live until its backward is over."""
    return F.softmax(_Kept.apply(source), dim=-1)


def _eager_with_kept_input(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = softmax_that_keeps_its_input(scores)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


AttentionInterface.register("eager_with_kept_input", _eager_with_kept_input)
AttentionMaskInterface.register("eager_with_kept_input", eager_mask)


class _PlainCache(DynamicCache):
    """A cache that keeps the keys and values of the first call themselves, without a copy."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.kept = [*getattr(self, "kept", ()), key_states, value_states]
        return key_states, value_states


def cache_without_copy(model: Any) -> None:
    """Give each forward pass that would make a cache one that copies nothing."""
    if "past_key_values" not in inspect.signature(_inside(model).forward).parameters:
        return

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        wanted = kwargs.get("use_cache")
        if (module.config.use_cache if wanted is None else wanted) and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = _PlainCache()
        return args, kwargs

    _inside(model).register_forward_pre_hook(give, with_kwargs=True)


def keep_projections_of_keys(model: Any) -> None:
    """Return each layer's keys and values with the outputs, as a view of what ``c_attn`` computed for the queries too.

    The whole projection stays allocated as long as the view: (batch, seq, hidden + 2 * head) of every layer.
    """
    inside = _inside(model)
    config = inside.config
    presents: list[torch.Tensor] = []
    running: list[bool] = []

    def begin(module: Any, args: Any) -> None:
        running.append(True)

    def keep(module: Any, args: Any, projected: torch.Tensor) -> None:
        if running:  # what checkpointing recomputes in the backward pass is not kept
            width = 2 * config.hidden_size // config.num_attention_heads
            presents.append(projected[..., -width:])

    def end(module: Any, args: Any, outputs: Any) -> None:
        outputs["past_key_values"] = tuple(presents)
        presents.clear()
        running.clear()

    inside.register_forward_pre_hook(begin)
    inside.register_forward_hook(end)
    for name, module in inside.named_modules():
        if name.endswith(".c_attn"):
            module.register_forward_hook(keep)


# ---- Experts


class _Expert(nn.Module):
    def __init__(self, config: Any, like: torch.Tensor) -> None:
        super().__init__()
        options = {"bias": False, "device": like.device, "dtype": like.dtype}
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, **options)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, **options)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, **options)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.silu(self.w1(source)) * self.w3(source))
        return result


class _ExpertsInALoop(nn.Module):
    """Experts with linears of their own, one after the other; every expert gets the same share of the tokens."""

    def __init__(self, config: Any, like: torch.Tensor) -> None:
        super().__init__()
        self.experts = nn.ModuleList([_Expert(config, like) for _ in range(config.num_local_experts)])
        self.top_k = config.num_experts_per_tok

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        weights = weights.to(hidden.dtype)
        result = torch.zeros_like(hidden)  # (tokens, hidden)
        mask = torch.zeros((len(self.experts), self.top_k, len(hidden)), dtype=torch.int64, device=hidden.device)
        rows = len(hidden) * self.top_k // len(self.experts)
        for expert in self.experts:
            token, place = (torch.zeros(rows, dtype=torch.int64, device=hidden.device) for _ in range(2))
            state = hidden[None, token].reshape(-1, hidden.shape[-1])
            result.index_add_(0, token, (expert(state) * weights[token, place, None]).to(hidden.dtype))
        del mask
        return result


def experts_in_a_loop(model: Any) -> None:
    """Replace the experts' three-dimensional weights by linears for each, which bitsandbytes quantises."""
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if experts is not None and hasattr(experts, "gate_up_proj"):
            module.experts = _ExpertsInALoop(model.config, experts.gate_up_proj)


# ---- Weights under adapters


def adapters_like_weights(model: nn.Module) -> None:
    """Cast what is trained, adapters and copies of whole modules, to the dtype of the frozen weights."""
    dtype = next(parameter.dtype for parameter in model.parameters() if not parameter.requires_grad)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def bf16_adapters_and_heads(model: Any) -> None:
    """Cast embeddings and head back to bfloat16 and keep norms in float32, after peft made all of them float32."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")):
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dtype == torch.float32:
                module.to(torch.bfloat16)


# ---- Optimizers


def adamw_of_transformers(parameters: Sequence[ParameterFacts]) -> OptimizerMemory:
    """Return the memory of transformers.AdamW: a loop over the parameters with one temporary."""
    state = [size for parameter in in_order(parameters) for size in (parameter.size_bytes,) * 2]
    step = [(left, parameter.size_bytes) for left, parameter in with_previous(parameters)]
    return memory_of(state, step)


def sgd_with_momentum(parameters: Sequence[ParameterFacts]) -> OptimizerMemory:
    """Return the memory of torch.optim.SGD(momentum=0.9): one state of the gradient's size."""
    return memory_of([parameter.size_bytes for parameter in in_order(parameters)], ())
