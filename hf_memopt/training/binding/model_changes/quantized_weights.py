"""Prepare a model with quantised weights for training adapters, without float32 copies of its embeddings and head.

PEFT's ``prepare_model_for_kbit_training`` freezes the model and makes every 16-bit parameter float32: of Llama-3.1-8B
embeddings and head, 2.0 GiB more, and with them the activations between the layers, which have the embeddings' dtype.
Neither changes the loss: norms compute in float32 whatever their weights are, and 16 bits are what the weights were
published in. ``benchmarks/quantized.py`` compares losses and memory of both. Only what is trained is made float32, as
PEFT makes its adapters: an update below 1/512 of a bfloat16 weight is lost, and torch's gradient scaler
refuses float16.

Others measured what the copies cost: Mistral-7B in 4 bits, 4 rows of 4096 tokens on an A100, holds 19.2 GiB with them
and 15.2 without (github.com/foundation-model-stack/fms-acceleration, ``scripts/benchmarks/refs/a100_80gb.csv``,
baseline-peft-bnb and accelerated-peft-bnb). The estimate prepares its model by the function below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only  # private: pinned by a test, seen in torch 2.6 to 2.13

from hf_memopt.training.binding.model import check_model, head_for, unwrap_model
from hf_memopt.training.binding.parameters import cast_parameters, parameters_outside_adapters, set_trainable
from hf_memopt.training.binding.undo import UndoHandle, nothing_to_undo, set_attribute, undo_all

_LOAD_IN: Mapping[str, Mapping[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
"""Options of ``BitsAndBytesConfig``; for 4 bits those of QLoRA (Dettmers et al. 2023, section 3)."""

_PACKED = ("Params4bit", "Int8Params")
"""The classes of bitsandbytes' quantised weights, by name: importing it takes a second."""
REPACKS = "support_avx512bf16_for_cpu"
"""By this attribute bitsandbytes 0.50's ``Linear4bit`` repacks its weight for a CPU with AVX-512 BF16 at the first
forward pass in evaluation mode, and keeps it so: gradients no longer pass the layer when training goes on, with no more
than a warning. False keeps the weight as it is."""
_BESIDE_A_BASE = r"[^.]+(\.pooler)?(\.dense)?$"
"""Linear layers beside a base model, and its pooler: a pattern of transformers' own matching of names."""
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_CHECKED_ROWS = 4096


def quantization_options(
    load_in: str,
    compute_dtype: str,
    task: str | None = None,
    *,
    is_sharded: bool = False,
    new: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the options of ``BitsAndBytesConfig``.

    Args:
        load_in: ``"nf4"`` or ``"int8"``.
        compute_dtype: of the products with 4-bit weights.
        task: of the model's head. A new head is not quantised, since it could not be trained and PEFT stops at it;
            of any other model transformers itself leaves the head out.
        is_sharded: whether FSDP is to cut 4-bit weights, which it does where they are stored as numbers of the dtype
            that is computed in; the bytes are the same. accelerate leaves whole what is stored as uint8.
        new: the new parts of the model; None for those that any with a head for the task may have.
    """
    if new is None and (new := head_for(task).new):
        new = *new, _BESIDE_A_BASE
    heads = {"llm_int8_skip_modules": list(new)} if new else {}
    storage = {"bnb_4bit_quant_storage": compute_dtype} if is_sharded and load_in == "nf4" else {}
    return {**_LOAD_IN[load_in], "bnb_4bit_compute_dtype": compute_dtype, **storage, **heads}


def is_quantized(model: nn.Module) -> bool:
    """Return whether weights of a model are quantised by bitsandbytes, or the model says that they are."""
    packed = any(type(parameter).__name__ in _PACKED for parameter in model.parameters())
    return packed or bool(getattr(unwrap_model(model), "is_quantized", False))


def prepare_quantized(model: nn.Module) -> UndoHandle:
    """Freeze a quantised model, keep its embeddings, norms and head in 16 bits, and make trained weights float32.

    Call it in place of PEFT's ``prepare_model_for_kbit_training``, before the optimizer is built. It may be called
    before ``get_peft_model`` or, which is better, after it: then copies of whole modules that PEFT trains
    (``modules_to_save``) become float32 too, and cast what they are given where no autocast runs. Called after PEFT's
    function (TRL's ``SFTTrainer`` calls it by itself), it takes the float32 copies back: a frozen float32 parameter
    becomes 16-bit again if it loses nothing, i.e. if 16 bits hold each of its values. A second call changes nothing.

    Checkpointing of activations needs nothing here: transformers makes the embeddings' output require a gradient
    when checkpointing is switched on, by the ``Trainer`` or by hand.

    Limitations: in float16 the activations between the layers are float16 as well, which overflow in some models (T5,
    Gemma); those need bfloat16, or float32 as ``dtype`` and ``bnb_4bit_compute_dtype``, which is left as it is.

    Args:
        model: as ``from_pretrained(quantization_config=...)`` returned it, or wrapped by PEFT. Changed in place.

    Returns:
        A handle whose ``remove()`` restores dtypes and ``requires_grad`` of what this call changed; it does not keep
        the model alive. Weights that were made float32 are rounded to 16 bits again.

    Raises:
        ValueError: no weight of the model is quantised.

    Examples:
        >>> from bitsandbytes.nn import Linear4bit
        >>> model = nn.Sequential(nn.Embedding(4, 64), Linear4bit(64, 64, bias=False))
        >>> handle = prepare_quantized(model.bfloat16())
        >>> [(str(parameter.dtype), parameter.requires_grad) for parameter in model.parameters()]
        [('torch.bfloat16', False), ('torch.bfloat16', False)]
    """
    check_model(model)
    inside = unwrap_model(model)
    if not is_quantized(model):
        raise ValueError(
            f"model=<{type(inside).__name__}> has no quantised weights; expected one that from_pretrained has "
            "quantised. Load it with quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
        )
    frozen = [] if hasattr(model, "peft_config") else [p for p in model.parameters() if p.requires_grad]
    undo_flags = set_trainable(model, dict.fromkeys(frozen, False))
    narrowed: dict[torch.Tensor, torch.dtype] = dict(_frozen_to_16_bits(model, inside))
    undo_casts, trained = cast_parameters(narrowed), train_in_float32(model)  # beside what has 16 bits then
    repacking = [module for module in model.modules() if getattr(module, REPACKS, False)]
    if not frozen and not narrowed and not repacking and trained.is_removed:
        return nothing_to_undo()
    repacked = (set_attribute(module, REPACKS, False) for module in repacking)
    return undo_all(undo_flags, undo_casts, trained, *repacked)


def train_in_float32(model: nn.Module) -> UndoHandle:
    """Make what is trained float32, and let what PEFT trains whole beside 16-bit layers cast what these give it.

    Under autocast it is given what the layers give, as in stock.
    """
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype in _SIXTEEN_BITS]
    wrappers: Any = [one for one in model.modules() if type(one).__name__ == "ModulesToSaveWrapper"]
    copies: list[nn.Module] = [copy for wrapper in wrappers for copy in wrapper.modules_to_save.values()]
    statistics = [buffer for copy in copies for buffer in copy.buffers() if buffer.dtype in _SIXTEEN_BITS]
    is_mixed = any(parameter.dtype in _SIXTEEN_BITS for parameter in model.parameters())
    hooks = [
        UndoHandle(copy.register_forward_pre_hook(cast_inputs, with_kwargs=True).remove)
        for copy in copies
        if is_mixed and cast_inputs not in copy._forward_pre_hooks.values()
    ]
    if not trained and not hooks:
        return nothing_to_undo()
    return undo_all(cast_parameters(dict.fromkeys([*trained, *statistics], torch.float32)), *hooks)


def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Give a module its inputs in the dtype of its weights, unless autocast runs: a hook, which is pickled by name."""
    dtype = next((one.dtype for one in module.parameters()), torch.float32)  # FSDP may have taken them away

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        kind = "cuda" if tensor.is_meta else tensor.device.type  # an estimate's autocast is that of CUDA
        is_other = tensor.is_floating_point() and not torch.is_autocast_enabled(kind)
        return tensor.to(dtype) if is_other else tensor

    return tree_map_only(torch.Tensor, cast, (args, kwargs))


def _frozen_to_16_bits(model: nn.Module, inside: Any) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Return the frozen float32 parameters whose values 16 bits hold, with that dtype, adapters left out.

    Classes of transformers name modules that they keep in float32 themselves: ``_keep_in_fp32_modules``, private, seen
    in transformers 5.8.1, 5.17.0 and 5.23.0.
    """
    config = getattr(inside, "config", None)
    own = getattr(config, "dtype", None)  # as it was loaded
    quantization = getattr(config, "quantization_config", None)
    if own == getattr(quantization, "bnb_4bit_compute_dtype", None) == torch.float32:
        return []
    dtypes = sorted(_SIXTEEN_BITS, key=lambda dtype: dtype != own)
    kept = {
        name
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in getattr(inside, attribute, None) or ()
    }
    outside = {id(parameter) for parameter in parameters_outside_adapters(model)}
    found = []
    for module_name, module in model.named_modules():  # a layer computes with all its parameters in one dtype
        candidates = [
            parameter
            for name, parameter in module.named_parameters(module_name, recurse=False)
            if parameter.dtype == torch.float32 and not parameter.requires_grad and id(parameter) in outside
            # a meta tensor has no values to look at
            if not parameter.is_meta and kept.isdisjoint(name.split("."))
        ]
        holding = (dtype for dtype in dtypes if all(_holds(dtype, parameter) for parameter in candidates))
        if (dtype := next(holding, None)) is not None:
            found += [(parameter, dtype) for parameter in candidates]
    return found


def _holds(dtype: torch.dtype, parameter: nn.Parameter) -> bool:
    """Return whether a dtype has every value of a parameter; a few rows at a time, so that no whole copy is made."""
    values = parameter.detach()
    parts = torch.split(values, _CHECKED_ROWS) if values.dim() else (values,)
    return all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts)
