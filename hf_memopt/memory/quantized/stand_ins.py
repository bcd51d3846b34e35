"""Stand-ins on the meta device for the quantised linears of bitsandbytes, with the same allocations as on CUDA.

bitsandbytes 0.50 quantises when a weight is moved to a real device, and its operations have no meta kernels that would
show the temporaries of the CUDA kernels. ``Linear4bitStandIn`` and ``Linear8bitStandIn`` hold a quantised weight on
meta, with its statistics as buffers, and perform the steps of the CUDA operation on tensors that are allocated and
never filled. They are subclasses of the real modules, so peft wraps them in its own 4-bit and 8-bit layers.
``tests/memory/test_quantized.py`` runs bitsandbytes' CUDA sources against them, without a GPU.

Their assumptions are in ``linears``. Limitations: the table of 256 values that bitsandbytes
keeps once per process (1 KiB).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from bitsandbytes.nn.modules import Embedding4bit, Embedding8bit, Linear4bit, Linear8bitLt, OutlierAwareLinear
from torch import nn

from hf_memopt.memory.quantized.linears import Linear4bitStandIn, Linear8bitStandIn
from hf_memopt.memory.settings import NotEstimableError

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

__all__ = ["quantize", "stand_in"]

_QUANTIZED = (
    "aqlm.",
    "auto_gptq.",
    "auto_round.",
    "awq.",
    "compressed_tensors.",
    "eetq.",
    "flute.",
    "fouroversix.",
    "fp_quant.",
    "gptqmodel.",
    "hqq.",
    "optimum.quanto.",
    "quanto.",
    "quark.",
    "sinq.",
    "spqr_quant.",
    "torchao.",
    "transformers.integrations.",
    "vptq.",
)
"""The modules that define the quantised layers and tensors that transformers can load."""


def stand_in(module: nn.Module) -> nn.Module | None:
    """Return the stand-in of a quantised module for the meta device, None for a module that runs there itself.

    Raises:
        NotEstimableError: the memory of this kind of quantisation is unknown.

    Examples:
        >>> stand_in(torch.nn.Linear(8, 8)) is None
        True
        >>> type(stand_in(Linear4bit(8, 8))).__name__
        'Linear4bitStandIn'
    """
    if isinstance(module, Linear4bitStandIn | Linear8bitStandIn):
        return None
    if isinstance(module, Linear4bit):
        return Linear4bitStandIn(module)
    if isinstance(module, Linear8bitLt):
        if module.state.has_fp16_weights:
            raise NotEstimableError(
                "not estimable: Linear8bitLt with has_fp16_weights=True quantises a trainable weight in every step; "
                "expected a frozen 8-bit weight. Pass BitsAndBytesConfig(load_in_8bit=True)"
            )
        return Linear8bitStandIn(module)
    found = _unknown_quantization(module)
    if found is not None:
        raise NotEstimableError(
            f"not estimable: {found} has operations whose memory is unknown; expected linears of bitsandbytes or "
            "none that are quantised. Pass quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
        )
    return None


def _unknown_quantization(module: nn.Module) -> str | None:
    """Return the class by which a module or its own weight is quantised in a way that has no stand-in."""
    if isinstance(module, Embedding8bit | Embedding4bit | OutlierAwareLinear):
        return _class_name(module)
    for candidate in (module, *module.parameters(recurse=False)):
        if f"{type(candidate).__module__}.".startswith(_QUANTIZED):
            return _class_name(candidate)
    return None


def _class_name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def quantize(model: PreTrainedModel, config: BitsAndBytesConfig | Mapping[str, Any]) -> PreTrainedModel:
    """Replace the linears that ``from_pretrained(quantization_config=config)`` would quantise, in place, by stand-ins.

    transformers' own quantizer selects them, so the output head, tied weights and ``llm_int8_skip_modules`` are
    treated as there. Everything else keeps its dtype and its ``requires_grad``; peft freezes what it does not train.

    Args:
        model: on the meta device, in the dtype in which the real one is loaded.
        config: the argument of ``from_pretrained``, or the same as a mapping.

    Returns:
        The model itself.

    Raises:
        ValueError: the model holds weights, or ``config`` quantises nothing.
        NotEstimableError: ``config`` asks for something without a stand-in (``llm_int8_has_fp16_weight``).

    Examples:
        >>> from functools import partial
        >>> from hf_memopt.memory.settings import StepSettings
        >>> settings = StepSettings(prepare=(partial(quantize, config={"load_in_4bit": True}),))
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    config = _read_config(config)
    _check_on_meta(model)
    loaded = {name: (module.weight.dtype, module.bias) for name, module in _with_weight(model).items()}
    AutoHfQuantizer.from_config(config, pre_quantized=False).preprocess_model(model=model, device_map=None)
    for name, module in _with_weight(model).items():
        if not isinstance(module, Linear4bit | Linear8bitLt):
            continue
        dtype, bias = loaded[name]
        module.weight.data = module.weight.data.to(dtype)  # replaced linears are created in the default dtype
        if bias is not None:
            module.bias = nn.Parameter(bias.data)  # a loaded bias requires a gradient until peft freezes it
        replacement = stand_in(module)
        if replacement is not None:
            model.set_submodule(name, replacement)
    # from_pretrained sets this once the weights are loaded; peft and the Trainer read it
    setattr(model, "is_loaded_in_4bit" if config.load_in_4bit else "is_loaded_in_8bit", True)
    return model


def _read_config(config: BitsAndBytesConfig | Mapping[str, Any]) -> BitsAndBytesConfig:
    from transformers import BitsAndBytesConfig

    if not isinstance(config, BitsAndBytesConfig):
        config = BitsAndBytesConfig(**config)  # type: ignore[no-untyped-call]
    if not (config.load_in_4bit or config.load_in_8bit):
        raise ValueError(
            "config=BitsAndBytesConfig() quantises nothing; expected load_in_4bit=True or load_in_8bit=True. "
            'Pass config={"load_in_4bit": True}'
        )
    return config


def _check_on_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise ValueError(
                f"model={type(model).__name__} holds weights ({name} on {parameter.device}); expected a model on the "
                'meta device. Write: with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)'
            )


def _with_weight(model: nn.Module) -> dict[str, Any]:
    """Return the modules that have a weight and a bias, or None for it, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor) and hasattr(module, "bias")
    }
