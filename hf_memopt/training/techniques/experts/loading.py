"""Load a mixture of experts in 4 bits: bitsandbytes for its linear layers, stacks for its experts, one at a time.

Stock's loader merges the experts of a layer before it quantises, so that a whole layer is there in 16 bits, and
bitsandbytes then leaves it so. Here each expert of a checkpoint goes through the same conversions by itself and into
its stack. Checkpoints that have the experts of a layer in one tensor (gpt-oss, Granite) are read layer by layer.

Private to transformers, seen in 5.8.1, 5.17.0 and 5.23.0: ``WeightConverter.collected_tensors``, whose entries are
functions that read where a model is quantised while it is loaded, and ``update_weight_conversions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.core_model_loading import WeightConverter
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_memopt.plain_data import check_value
from hf_memopt.training.techniques.experts.quantize import is_experts, put_stack, use_stacks
from hf_memopt.training.techniques.experts.stacks import ExpertStack

METHOD = "hf_memopt_experts"


@register_quantization_config(METHOD)
class ExpertsConfig(BitsAndBytesConfig):
    """Load the experts of a mixture in 4 bits too: ``BitsAndBytesConfig``, with the same arguments.

    Raises:
        ValueError: ``load_in_4bit`` is not True, or another type than ``"nf4"`` is asked for.

    Examples:
        >>> ExpertsConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").quant_method
        'hf_memopt_experts'
    """

    def __init__(self, load_in_4bit: bool = False, **options: Any) -> None:
        check_value("load_in_4bit", load_in_4bit, bool, True)
        super().__init__(**{"load_in_4bit": load_in_4bit, "bnb_4bit_quant_type": "nf4", **options})  # type: ignore[no-untyped-call]
        if not self.load_in_4bit or self.bnb_4bit_quant_type != "nf4":
            raise ValueError(
                f"load_in_4bit={self.load_in_4bit}, bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} are not for "
                "experts; expected NF4. Pass ExpertsConfig(load_in_4bit=True)"
            )
        self.quant_method: Any = METHOD


@register_quantizer(METHOD)
class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """Quantises linear layers as stock does, and experts."""

    def preprocess_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Let the model say that bitsandbytes has quantised it, which PEFT and the Trainer ask."""
        super().preprocess_model(model, *args, **kwargs)
        model.quantization_method = BitsAndBytesConfig(load_in_4bit=True).quant_method  # type: ignore[no-untyped-call]

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a weight is one of a linear layer or of experts."""
        return _is_weight_of_experts(model, param_name) or bool(
            super().param_needs_quantization(model, param_name, **kwargs)
        )

    def get_quantize_ops(self) -> Any:
        """Return the operation by which a loaded weight is quantised."""
        return _Quantize(self)  # type: ignore[no-untyped-call]

    def update_weight_conversions(self, weight_conversions: Sequence[Any], *args: Any) -> Any:
        """Convert experts one by one."""
        found = super().update_weight_conversions(weight_conversions, *args)  # type: ignore[no-untyped-call]
        for converter in found:
            if type(converter) is WeightConverter:
                converter.__class__ = _ExpertByExpert
        return found

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        found = super()._process_model_after_weight_loading(model, **kwargs)
        use_stacks(model)
        return found

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return that stock could not load what is saved."""
        return False


def _is_weight_of_experts(model: Any, name: str) -> bool:
    module, key = get_module_from_name(model, name)
    weight = module._parameters.get(key)
    return is_experts(module) and weight is not None and weight.dim() == 3


def _stack_for(quantizer: Any, model: Any, name: str, device: Any, dtype: Any) -> ExpertStack:
    module, key = get_module_from_name(model, name)
    double_quant = quantizer.quantization_config.bnb_4bit_use_double_quant
    return put_stack(module, key, dtype, double_quant=double_quant, device=device)


class _Quantize(Bnb4bitQuantize):
    """Quantises a weight that is whole: of a linear layer, or of all experts of a layer."""

    def convert(self, input_dict: Any, *args: Any, model: Any = None, missing_keys: Any = None, **kwargs: Any) -> Any:
        """Return what stock makes of the others."""
        rest = dict(input_dict)
        for name in [name for name in rest if _is_weight_of_experts(model, name)]:
            experts = rest.pop(name)
            experts = experts[0] if isinstance(experts, list) else experts
            stack = _stack_for(self.hf_quantizer, model, name, experts.device, experts.dtype)
            for index, expert in enumerate(experts):
                stack.write(index, expert)
            (missing_keys or set()).discard(name)
        return super().convert(rest, *args, model=model, **kwargs) if rest else {}  # type: ignore[misc]


class _ExpertByExpert(WeightConverter):
    """Converts what a checkpoint has as one tensor for each expert, one expert after the other."""

    __slots__ = ()

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> Any:
        readers = dict(self.collected_tensors)
        counts = {len(one) for one in readers.values()}
        if not _is_weight_of_experts(model, layer_name) or len(counts) != 1 or counts == {1}:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        stack = None
        for index in range(counts.pop()):
            for pattern, of_experts in readers.items():
                self.collected_tensors[pattern] = [of_experts[index]]
            [expert] = super().convert(layer_name, model, config, None, loading_info).values()
            if stack is None:
                stack = _stack_for(hf_quantizer, model, layer_name, expert.device, expert.dtype)
            stack.write(index, expert[0])
        if loading_info is not None:
            loading_info.missing_keys.discard(layer_name)
        return {}
