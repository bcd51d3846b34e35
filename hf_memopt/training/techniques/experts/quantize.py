"""Put the fused experts of a model into 4 bits, in place.

transformers 5 has the experts of a layer in one parameter of shape (experts, rows, columns). ``load_in_4bit`` leaves
these in 16 bits, since bitsandbytes knows linear layers: of Mixtral-8x7B 86 of 97 GiB. Here they become stacks of NF4
(``stacks``), in every class that transformers' experts interface runs. They are frozen; train adapters beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_memopt.plain_data import check_value
from hf_memopt.training.binding.model import check_model, unwrap_model
from hf_memopt.training.binding.undo import UndoHandle, remove_all, set_attribute
from hf_memopt.training.techniques.experts.stacks import BLOCK, ExpertStack, experts_forward

IMPLEMENTATION = "hf_memopt_nf4"
_SAVING = "save_pretrained"
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class QuantizedExpertsHandle(UndoHandle):
    """Puts the dequantised weights back; ``names`` are those of the parameters that are in 4 bits."""

    def __init__(self, names: list[str], undo: UndoHandle) -> None:
        super().__init__(undo.remove)
        self.names = names


def quantize_experts(model: Any, double_quant: bool = False) -> QuantizedExpertsHandle:
    """Quantise the weights of fused experts to 4 bits, one expert at a time, and freeze them.

    Loading a model with ``quantization_config=ExpertsConfig(load_in_4bit=True)`` does so while it is read, and never
    has the experts in 16 bits. Losses and gradients are those of the dequantised weights in 16 bits, to the bit those
    of transformers' ``grouped_mm``. Experts that are in 4 bits already (MXFP4 of gpt-oss) are left as they are.

    Adapters go on attention, as PEFT puts them; saved, they load over stock's own model. ``target_parameters`` of PEFT
    would silently make no adapter for a stack: the first forward pass refuses them. So is ``save_pretrained`` of the
    whole model, which transformers would load with new random experts.

    Args:
        model: of transformers, or wrapped by PEFT, its experts in 16 or 32 bits; on a CPU, a GPU or the meta device.
        double_quant: whether the largest value of each block is quantised too: 4.13 bits for a weight in place of 4.5.

    Returns:
        A handle whose ``remove()`` puts the dequantised weights back, frozen; ``names`` are those of the parameters.

    Raises:
        ValueError: it has no fused experts, or some that transformers' experts interface does not run (Llama 4), that
            are sharded, quantised by others, have adapters, or whose size is no multiple of 64. The model is unchanged.

    Examples:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=1, vocab_size=9))
        >>> quantize_experts(model).names
        ['model.layers.0.mlp.experts.gate_up_proj', 'model.layers.0.mlp.experts.down_proj']
    """
    check_model(model)
    check_value("double_quant", double_quant, bool, False)
    found = [(name, module, key) for name, module in model.named_modules() for key in _weights_of(name, module)]
    if not found:
        raise ValueError(
            f"model=<{type(unwrap_model(model)).__name__}> has no fused experts of 16 or 32 bits; expected a mixture "
            "of experts of transformers 5. Load another model with load_in_4bit, which quantises linear layers"
        )
    for _, module, key in found:
        weight = module._parameters[key]
        stack = put_stack(module, key, weight.dtype, double_quant=double_quant, device=weight.device)
        for index, expert in enumerate(weight):
            stack.write(index, expert)
        del weight
    names = [f"{name}.{key}" for name, _, key in found]
    return QuantizedExpertsHandle(names, use_stacks(model))


def quantize_experts_for_qlora(model: Any) -> QuantizedExpertsHandle:
    """Quantise experts as ``load_in="nf4"`` loads linear layers: doubly."""
    return quantize_experts(model, double_quant=True)


def _weights_of(name: str, module: Any) -> Iterator[str]:
    """Yield the names of a module's parameters that are weights of experts, and can be quantised."""
    if "packed" in module._buffers or type(module).__name__.startswith("Mxfp4"):
        return
    is_known = is_experts(module)
    for key, weight in module._parameters.items():
        if weight is None or weight.dim() != 3 or not (is_known or "expert" in name.rpartition(".")[2]):
            continue
        if found := _problem(module, weight):
            problem, wanted = found
            raise ValueError(
                f"{name}.{key} of {type(module).__name__} cannot be put into 4 bits: {problem}; expected {wanted}. "
                "Load the model without quantize_experts"
            )
        yield key


def is_experts(module: Any) -> bool:
    """Return whether transformers' experts interface runs a module (``use_experts_implementation``)."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _problem(module: Any, weight: Any) -> tuple[str, str] | None:
    """Return why a weight cannot be quantised, and what could."""
    if not is_experts(module):
        return "its class does not use transformers' experts interface", "one that does"
    if not weight.is_floating_point() or weight.itemsize < 2:
        return f"it is quantised already, as {weight.dtype}", "16 or 32 bits"
    if weight.shape[1] * weight.shape[2] % BLOCK:
        return f"an expert has {weight.shape[1]} x {weight.shape[2]} weights", f"a multiple of {BLOCK}"
    if hasattr(weight, "placements") or getattr(module, "_is_expert_parallel", False):
        return "it is a part of several processes", "a whole model"
    return None


def put_stack(module: Any, key: str, dtype: Any, *, double_quant: bool, device: Any) -> ExpertStack:
    """Return an empty stack that stands in the place of a parameter."""
    shape = module._parameters.pop(key).shape
    stack = ExpertStack(shape, dtype, double_quant=double_quant, device=device)
    module.add_module(key, stack)
    return stack


def use_stacks(model: Any) -> UndoHandle:
    """Let a model compute with the stacks that it has, and refuse what would lose them; return what undoes both."""
    inner = unwrap_model(model)
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    configs = {id(one.config): one.config for one in inner.modules() if is_experts(one)}.values()
    before = [(config, config._experts_implementation) for config in configs]
    for config in configs:
        config._experts_implementation = IMPLEMENTATION
    hook = inner.register_forward_pre_hook(_refuse_adapters)
    saving = set_attribute(inner, _SAVING, _refuse_saving)  # a function, which a deep copy has too
    # DDP would send buffers to all processes in each step; by their names here, and those below PEFT's wrapper
    stacks = [name for name, one in inner.named_modules() if isinstance(one, ExpertStack)]
    buffers = [f"{name}.{key}" for name in stacks for key in inner.get_submodule(name)._buffers]
    ignored = [*getattr(inner, _IGNORED, ()), *buffers, *(f"base_model.model.{name}" for name in buffers)]
    unsent = set_attribute(inner, _IGNORED, ignored)

    def undo() -> None:
        remove_all([hook, saving, unsent])
        for config, implementation in before:
            config._experts_implementation = implementation
        for module in [*inner.modules()]:
            for key, stack in [*module.named_children()]:
                if isinstance(stack, ExpertStack):
                    del module._modules[key]
                    module.register_parameter(key, nn.Parameter(stack.dequantized(), requires_grad=False))

    return UndoHandle(undo)


def _refuse_adapters(model: Any, args: Any) -> None:
    """Refuse PEFT's ``target_parameters`` for stacks, for which it silently makes no adapter; called before a pass."""
    for config in getattr(model, "peft_config", {}).values():
        for name in getattr(config, "target_parameters", None) or ():
            if any(
                isinstance(one, ExpertStack) and f".{full}".endswith(f".{name}") for full, one in model.named_modules()
            ):
                raise ValueError(
                    f"target_parameters=[{name!r}] makes no adapter for experts in 4 bits, and PEFT, which adds it for "
                    "'all-linear', does not say so; expected names of linear layers. Pass "
                    'LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])'
                )


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "save_pretrained() of a model with experts in 4 bits writes what transformers loads with new random experts; "
        "expected adapters alone, which load over stock's own model. Save the PEFT model; of a model that "
        "quantize_experts changed, handle.remove() puts dequantised weights back"
    )
