"""What older software did differently, as one table: library, versions, kind of loop -> a change of the estimate.

Each entry is a documented behaviour of those versions, put in place through public extension points: settings of
``estimate``, functions in ``prepare=``, ``PreTrainedModel.loss_function``, module hooks, and the attention and cache
interfaces of transformers. Nothing depends on a single measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from published_cases import Case
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from hf_memopt.memory.optimizers.optimizer_memory import OptimizerMemory, ParameterFacts
from hf_memopt.memory.optimizers.parameter_facts import FLOAT_BYTES, in_order, memory_of, with_previous

LOOPS = ("Trainer", "SFTTrainer", "manual")
Settings = dict[str, Any]


@dataclass(frozen=True)
class Behaviour:
    """A behaviour of some versions of a library.

    Attributes:
        name: what happened then.
        library: as in ``Case.versions``.
        since: the first (major, minor) that has it; None for every earlier one.
        before: the first that no longer has it; None for every later one.
        change: changes the settings of an estimate in place.
        source: where it is documented.
        loops: the kinds of loop that it concerns.
        model_types: the families of models that it concerns; None for all.
        applies: a further condition on the set-up.
    """

    name: str
    library: str
    since: tuple[int, int] | None
    before: tuple[int, int] | None
    change: Callable[[Settings], None]
    source: str
    loops: tuple[str, ...] = LOOPS
    model_types: frozenset[str] | None = None
    applies: Callable[[Case], bool] = lambda case: True

    def concerns(self, case: Case, model_type: str) -> bool:
        """Return whether the run of ``case`` had this behaviour."""
        version = case.versions.get(self.library)
        if version is None or (self.since and version < self.since) or (self.before and version >= self.before):
            return False
        of_model = self.model_types is None or model_type in self.model_types
        return case.loop in self.loops and of_model and self.applies(case)


def behaviours_of(case: Case, model_type: str) -> list[Behaviour]:
    """Return the behaviours that the run of ``case`` had and today's software has not, in the table's order."""
    return [behaviour for behaviour in BEHAVIOURS if behaviour.concerns(case, model_type)]


def _set(**values: Any) -> Callable[[Settings], None]:
    def change(settings: Settings) -> None:
        settings.update(values)

    return change


def _prepare(function: Callable[[nn.Module], None], *, first: bool = False) -> Callable[[Settings], None]:
    """Return the change that runs ``function`` on the model, before quantisation and LoRA or after them."""

    def change(settings: Settings) -> None:
        given = settings.get("prepare", ())
        settings["prepare"] = (function, *given) if first else (*given, function)

    return change


# ---- The loss and the logits of language models


def upcast_logits(model: Any) -> None:
    """Cast the logits to float32 as soon as the head has made them."""
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits.float())


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


class _SoftmaxKeepsInput(torch.autograd.Function):
    """A softmax that keeps its input for the backward pass, though it needs its output alone."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor) -> torch.Tensor:
        result = F.softmax(source, dim=-1)
        ctx.save_for_backward(result, source if source.dtype == result.dtype else source.to(result.dtype))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        result, source = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, result, -1, source.dtype)


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
    weights = _SoftmaxKeepsInput.apply(scores)
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
    inside, presents, running = _inside(model), [], []

    def begin(module: Any, args: Any) -> None:
        running.append(True)

    def keep(module: Any, args: Any, projected: torch.Tensor) -> None:
        if running:  # what checkpointing recomputes in the backward pass is not kept
            width = 2 * module_config.hidden_size // module_config.num_attention_heads
            presents.append(projected[..., -width:])

    def end(module: Any, args: Any, outputs: Any) -> None:
        outputs["past_key_values"] = tuple(presents)
        presents.clear()
        running.clear()

    module_config = inside.config
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


def _two_averages(parameters: Sequence[ParameterFacts], temporaries: int) -> OptimizerMemory:
    state = [size for parameter in in_order(parameters) for size in (parameter.size_bytes,) * 2]
    step = [(left, *(parameter.size_bytes,) * temporaries) for left, parameter in with_previous(parameters)]
    return memory_of(state, step)


def adamw_of_transformers(parameters: Sequence[ParameterFacts]) -> OptimizerMemory:
    """Return the memory of transformers.AdamW: a loop over the parameters with one temporary."""
    return _two_averages(parameters, 1)


def adamw_in_a_loop(parameters: Sequence[ParameterFacts]) -> OptimizerMemory:
    """Return the memory of torch.optim.AdamW without foreach: a loop over the parameters with two temporaries."""
    return _two_averages(parameters, 2)


def adafactor_of_torch(parameters: Sequence[ParameterFacts]) -> OptimizerMemory:
    """Return the memory of torch.optim.Adafactor: factors along the last two dimensions, one temporary.

    The last parameter's update is held while the next one's variance is estimated.
    """
    state: list[int] = []
    step: list[tuple[int, ...]] = []
    for left, parameter in with_previous(parameters):
        shape, size = parameter.shape, parameter.element_size
        rows = parameter.elements // shape[-1] if shape else 1
        columns = parameter.elements // shape[-2] if len(shape) > 1 else 0
        factors = (rows * size, columns * size) if len(shape) > 1 else (parameter.size_bytes,)
        state += factors
        step.append((left, *(factors if len(shape) > 1 else (parameter.size_bytes,)), parameter.size_bytes))
    return memory_of(state, step, host_state_bytes=FLOAT_BYTES * len(parameters))


# ---- The table

_UPCASTING = frozenset({"llama", "mistral", "mixtral", "granite", "qwen2", "gemma", "phi", "phi3"})
_LATER = frozenset({"mistral", "granite"})  # moved to the common loss with 4.48, the others with 4.46
_OWN_LOSS = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "gpt_neox"})
_SOURCE = "github:huggingface/transformers "

BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour(
        "logits are cast to float32 in forward",
        "transformers",
        None,
        (4, 46),
        _prepare(upcast_logits),
        _SOURCE + "v4.45.2 models/llama/modeling_llama.py, LlamaForCausalLM.forward",
        model_types=_UPCASTING,
    ),
    Behaviour(
        "logits are cast to float32 in forward (families that came later to the common loss)",
        "transformers",
        (4, 46),
        (4, 48),
        _prepare(upcast_logits),
        _SOURCE + "v4.47.1 models/mistral/modeling_mistral.py, MistralForCausalLM.forward",
        model_types=_LATER,
    ),
    Behaviour(
        "the loss casts the logits to float32 and copies their shifted part",
        "transformers",
        None,
        (4, 49),
        _prepare(upcast_and_copy_in_loss),
        _SOURCE + "v4.48.1 loss/loss_utils.py, ForCausalLMLoss; before 4.46 each model's forward",
        model_types=_UPCASTING,
    ),
    Behaviour(
        "the loss copies the shifted logits in their own dtype",
        "transformers",
        None,
        (4, 49),
        _prepare(copy_in_loss),
        _SOURCE + "v4.48.1 models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeForCausalLM.forward",
        model_types=_OWN_LOSS,
    ),
    Behaviour(
        "the key-value cache keeps keys and values without a copy",
        "transformers",
        None,
        (4, 54),
        _prepare(cache_without_copy),
        _SOURCE + "v4.53.3 cache_utils.py, DynamicCache.update",
        loops=("manual",),
    ),
    Behaviour(
        "experts are linears of their own, run one after the other",
        "transformers",
        None,
        (5, 0),
        _prepare(experts_in_a_loop, first=True),
        _SOURCE + "v4.57.1 models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock",
        model_types=frozenset({"mixtral"}),
    ),
    Behaviour(
        "checkpointing leaves use_cache on, and keys and values are views of the whole projection",
        "transformers",
        None,
        (4, 53),
        _prepare(keep_projections_of_keys),
        _SOURCE + "v4.51.3 models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward",
        model_types=frozenset({"gpt_bigcode"}),
        applies=lambda case: bool(case.settings.get("checkpointing")),
    ),
    Behaviour(
        "bfloat16 adapters, embeddings and head after prepare_model_for_kbit_training",
        "trl",
        None,
        (0, 20),
        _prepare(bf16_adapters_and_heads),
        "github:huggingface/trl v0.13.0 trl/trainer/utils.py, peft_module_casting_to_bf16; called by SFTTrainer",
        loops=("SFTTrainer",),
        applies=lambda case: case.kbit_preparation == "peft" and case.settings["precision"] == "bf16",
    ),
    Behaviour(
        "softmax keeps its input",
        "torch",
        None,
        (1, 11),
        _set(attn_implementation="eager_with_kept_input"),
        "github:pytorch/pytorch v1.10.0 tools/autograd/derivatives.yaml, _softmax (self in the backward formula)",
        applies=lambda case: case.settings.get("attn_implementation") == "eager",
    ),
    Behaviour(
        "zero_grad keeps the gradients",
        "torch",
        None,
        (2, 0),
        _set(zero_grad_to_none=False),
        "github:pytorch/pytorch release notes of 2.0: zero_grad sets gradients to None by default",
    ),
    Behaviour(
        "the Trainer's AdamW is transformers' own, a loop with one temporary",
        "transformers",
        None,
        (4, 16),
        _set(optimizer_memory=adamw_of_transformers),
        _SOURCE + "v4.15.0 trainer.py, create_optimizer; optimization.py, AdamW.step",
        loops=("Trainer",),
        applies=lambda case: case.settings["optim"] == "adamw_torch",
    ),
    Behaviour(
        "optim='adamw_hf': a loop with one temporary",
        "transformers",
        (4, 16),
        (5, 0),
        _set(optimizer_memory=adamw_of_transformers),
        _SOURCE + "v4.45.2 optimization.py, AdamW.step",
        loops=("Trainer", "SFTTrainer"),
        applies=lambda case: case.optim_class == "transformers.AdamW",
    ),
    Behaviour(
        "torch's AdamW loops over the parameters",
        "torch",
        None,
        (2, 0),
        _set(optimizer_memory=adamw_in_a_loop),
        "github:pytorch/pytorch release notes of 2.0: foreach is the default of optimizers on CUDA",
        loops=("manual",),
        applies=lambda case: case.settings["optim"] == "adamw_torch",
    ),
    Behaviour(
        "8-bit optimizers keep embeddings at 8 bits",
        "transformers",
        None,
        (4, 20),
        _set(embedding_bits=8),
        _SOURCE + "v4.15.0 trainer.py has no GlobalOptimManager override; the optimizer was passed in",
        loops=("Trainer",),
        applies=lambda case: "8bit" in case.settings["optim"],
    ),
    Behaviour(
        "Adafactor is torch's: one temporary",
        "torch",
        (2, 5),
        None,
        _set(optimizer_memory=adafactor_of_torch),
        "github:pytorch/pytorch v2.6.0 torch/optim/_adafactor.py, _single_tensor_adafactor",
        loops=("manual",),
        applies=lambda case: case.optim_class == "torch.optim.Adafactor",
    ),
    Behaviour(
        "cuBLAS has no workspace in torch's allocator on ROCm",
        "torch",
        None,
        None,
        _set(cublas_workspace_bytes=0),
        "github:pytorch/pytorch aten/src/ATen/cuda/CublasHandlePool.cpp: the workspace is set where USE_ROCM is not",
        applies=lambda case: case.rocm,
    ),
)
