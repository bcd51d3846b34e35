"""Add LoRA adapters to a model, by ``peft.get_peft_model``: real ones for a run, on the meta device for its estimate.

A rank alone means adapters on all linear layers but the head, which QLoRA found to matter more than the rank (Dettmers
et al. 2023, section 4) and PEFT's guide to quantisation recommends. A new head of a classifier is trained as well.
Whatever is trained is float32, as PEFT makes its adapters: an update below 1/512 of a bfloat16 weight is lost, and
torch's gradient scaler stops at float16 ("Attempting to unscale FP16 gradients").
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_memopt.errors import MissingExtraError, nearest
from hf_memopt.plain_data import Count, check_value
from hf_memopt.training.binding.model import check_model, head_for, task_of, unwrap_model
from hf_memopt.training.binding.model_changes.quantized_weights import is_quantized, train_in_float32

if TYPE_CHECKING:
    from peft import LoraConfig

AUTO_TARGETS = "auto"
"""As ``lora_targets``: all linear layers but the head."""
MOST_RANK = 65_536  # wider than any layer
_WITH_A_NECK = ("semantic-segmentation", "object-detection")
"""Tasks whose checkpoints hold parts beside the base model that are no head."""
_HEADED = ("Classification", "QuestionAnswering")
"""How those classes of transformers are called that have a new head, of other tasks too (video, frames of audio)."""
_OF_POOLED_ROWS = ("sequence-classification", "multiple-choice")
"""Tasks whose heads read a base model's pooler; other classes may have one that nothing reads."""


def add_adapters(
    model: nn.Module,
    lora: int | LoraConfig,
    *,
    lora_alpha: int | None = None,
    lora_targets: str | tuple[str, ...] = AUTO_TARGETS,
) -> nn.Module:
    """Return the model with LoRA adapters and all other weights frozen, as ``plan`` adds them.

    ``peft.get_peft_model`` with ``target_modules="all-linear"`` does the same for most models. It stops at projections
    that a kernel of Mamba reads, and takes routers and experts in 4 bits, which cannot be adapted: these are left out.
    A new head of a classifier is trained whole, and what is trained is float32: where no autocast runs, such a head
    casts what a 16-bit model gives it. What else a checkpoint lacks, and nothing in the model tells, is named by hand:
    ``LoraConfig(target_modules="all-linear", modules_to_save=["crossattention"])`` after
    ``from_encoder_decoder_pretrained``. Of a quantised model call ``prepare_quantized`` afterwards.

    Args:
        model: of transformers, without adapters. Changed in place.
        lora: the rank of adapters on the linear layers, or a ``peft.LoraConfig``, which PEFT gets as it is.
        lora_alpha: with a rank: the adapters' output is scaled by alpha / rank; None for twice the rank.
        lora_targets: with a rank: the last parts of the names of the layers that get adapters, such as
            ``("q_proj", "v_proj")``; ``"auto"`` for all linear layers but the head.

    Returns:
        PEFT's model around the one that was given.

    Raises:
        MissingExtraError: peft is not installed.
        ValueError: the model has adapters already, or the rank or a name does not fit it.

    Examples:
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 2}
        >>> adapted = add_adapters(MambaForCausalLM(MambaConfig(**sizes)), 2)
        >>> adapted.peft_config["default"].exclude_modules
        {'backbone.layers.0.mixer.out_proj'}
    """
    check_model(model)
    is_rank = getattr(lora, "peft_type", None) != "LORA"
    if is_rank:
        check_value("lora", lora, Annotated[int, range(1, MOST_RANK + 1)], 16)
    check_value("lora_alpha", lora_alpha, Count | None, 32)
    check_value("lora_targets", lora_targets, Literal["auto"] | tuple[str, ...], AUTO_TARGETS)
    if not is_rank and (lora_alpha, lora_targets) != (None, AUTO_TARGETS):
        raise ValueError(
            f"lora_alpha={lora_alpha}, lora_targets={lora_targets!r}, lora={_shown(lora)} do not fit each other; "
            "expected a rank as lora. Pass lora=16, or LoraConfig(lora_alpha=..., target_modules=...) alone"
        )
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtraError("peft", extra="peft", purpose=f"lora={lora!r}") from error
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"lora={_shown(lora)} is given for a {type(model).__name__}, which has adapters already; expected a model "
            "without them. Remove lora, or pass model=model.unload()"
        )
    if lora_targets != AUTO_TARGETS:
        _check_targets(model, lora_targets)
    config: Any = copy.deepcopy(lora)
    if isinstance(lora, int):
        of_rank: dict[str, Any] = {"lora_alpha": lora_alpha, "lora_targets": lora_targets, "new": new_parts(model)}
        config = LoraConfig(**adapter_options(task_of(model), lora, **of_rank, model=model))
    with without_warnings_of_peft():
        try:
            adapted: nn.Module = get_peft_model(model, config)
        except (ValueError, TypeError) as error:
            cause = str(error).splitlines()[0].rstrip(".")
            given, rule = f"lora={_shown(lora)}", "target_modules that name linear layers of the model"
            fix = "lora=16, which takes all of them but the head"
            if lora_targets != AUTO_TARGETS:
                given, rule = f"lora_targets={lora_targets!r}", "names that name linear layers of the model"
                fix = "lora_targets='auto'"
            elif is_rank:
                rule = "linear layers of the model beside its head, by names that no other layer has"
                fix = "LoraConfig(target_modules=[...]) with the names of others, or train all weights without lora"
            raise ValueError(
                f"{given} cannot be added to {type(model).__name__} ({cause}); expected {rule}. Pass {fix}"
            ) from error
    if isinstance(lora, int):
        # experts in 4 bits are among the names that PEFT makes of "all-linear", and it has put no adapter on them
        stacks = [name for name, one in model.named_modules() if type(one).__name__ == "ExpertStack"]
        named = config.target_parameters or ()
        kept = [name for name in named if not any(stack.endswith(f".{name}") for stack in stacks)]
        if stacks and len(kept) < len(named):
            config.target_parameters = kept or None
        train_in_float32(adapted)  # PEFT leaves a copied head in the dtype of the model
    return adapted


@contextmanager
def without_warnings_of_peft() -> Iterator[None]:
    """Leave out what PEFT warns of and does right.

    peft 0.21 asks transformers 5.23 under the names of 5.17, corrects ``fan_in_fan_out`` for GPT-2 by itself, and makes
    patterns for experts from ``all-linear`` by itself.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
        warnings.filterwarnings("ignore", ".*fan_in_fan_out.*", UserWarning)
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        yield


def new_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's parts that a checkpoint usually lacks, which are trained whole and not quantised.

    Of a class for a task with a new head these are the parts with weights outside its base model, as RoBERTa's
    ``classifier`` and DeBERTa's ``pooler``, and the base model's pooler where the head is one linear layer behind it,
    as BERT's: checkpoints of masked LMs have none. So they are of other classifiers and of a user's own classes with
    labels, models and output embeddings left out. What is quantised all the same is left out.
    """
    inside = unwrap_model(model)
    task, base = task_of(inside), getattr(inside, "base_model", inside)
    head, modules = head_for(task), dict(inside.named_modules())
    last_parts = {name.rpartition(".")[2] for name in modules}
    found = dict.fromkeys(name for name in head.new if name in last_parts)
    if task is None and base is not inside and _has_new_head(inside):
        found = dict.fromkeys(_heads_outside(inside, modules))
    elif head.new and base is not inside and task not in _WITH_A_NECK:
        prefix = f"{inside.base_model_prefix}."
        found |= dict.fromkeys(_parts_outside(prefix, modules))
        pooler = f"{prefix}pooler"
        is_read = task in _OF_POOLED_ROWS and len(found) == 1 and isinstance(modules.get(*found), nn.Linear)
        # SqueezeBERT's other layers are convolutions: adapters of a pooler trained whole would have no place
        if is_read and _linears(pooler, modules) not in ([], _linears(prefix[:-1], modules)):
            found[pooler] = None
    return tuple(name for name in found if name not in modules or not is_quantized(modules[name]))


def _has_new_head(model: Any) -> bool:
    """Return whether a class whose task is not known has a head that its base model's checkpoints lack, by its name or
    by its labels if somebody else wrote it.
    """
    kind = type(model)
    is_own = not kind.__module__.startswith("transformers.")
    is_headed = "labels" in inspect.signature(kind.forward).parameters if is_own else kind.__name__.endswith(_HEADED)
    return is_headed and isinstance(model, PreTrainedModel)


def _heads_outside(model: Any, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the parts outside the base model in which there is neither a model that was trained nor a vocabulary's."""
    words = model.get_output_embeddings()
    for name in _parts_outside(f"{model.base_model_prefix}.", modules):
        if not any(one is words or isinstance(one, PreTrainedModel) for one in modules[name].modules()):
            yield name


def _parts_outside(prefix: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield names of the parts with weights outside the base model, such that PEFT finds nothing else by them.

    PEFT compares the ends of names: a part whose name ends one of the base model's is named layer by layer.
    """
    inner = [name for name in modules if name.startswith(prefix)]
    for name, part in modules.items():
        if name and "." not in name and f"{name}." != prefix and any(True for _ in part.parameters()):
            is_in_layers = isinstance(part, nn.ModuleList | nn.ModuleDict) or any(one.endswith(name) for one in inner)
            names = _linears(name, modules) if is_in_layers else [name]
            yield from (one for one in names if not any(other.endswith(one) for other in inner))


def _linears(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    own = (one for one in modules if one == name or one.startswith(f"{name}."))
    return [one for one in own if isinstance(modules[one], nn.Linear)]


def adapter_options(
    task: str | None,
    rank: int,
    *,
    lora_alpha: int | None = None,
    lora_targets: str | tuple[str, ...] = AUTO_TARGETS,
    new: Sequence[str] | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Return the options of PEFT's ``LoraConfig`` for a head for ``task``, of which ``new`` is trained whole.

    Of the linear layers of ``model`` those are left out that PEFT would take with "all-linear", and cannot adapt.
    """
    head = head_for(task)  # of which PEFT 0.21 would put adapters on some parts first, and then refuse
    is_auto = isinstance(lora_targets, str)
    return {
        "r": rank,
        "lora_alpha": 2 * rank if lora_alpha is None else lora_alpha,
        "target_modules": "all-linear" if is_auto else list(lora_targets),
        "exclude_modules": _not_adaptable(model) if is_auto and model is not None else None,
        "task_type": head.adapters,
        "modules_to_save": list(head.new if new is None else new) or None,
    }


def _not_adaptable(model: nn.Module) -> list[str] | None:
    """Return the linear layers that PEFT would take with "all-linear", and then stop at; None for none.

    These are routers that return several tensors, layers that are no plain product, and projections whose weight a
    fused kernel reads (Mamba's ``out_proj``).
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import (
        _check_lora_target_modules_mamba,
    )  # private: pinned by a test, peft 0.18 to 0.21

    config, found = LoraConfig(), []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        try:
            _check_lora_target_modules_mamba(config, model, name.rpartition(".")[2])  # reads the kind of adapters alone
        except ValueError:
            found.append(name)
            continue
        if type(module).__module__.startswith("transformers.") and not _is_one_product(module):
            found.append(name)
    return found or None


def _is_one_product(linear: nn.Linear) -> bool:
    """Return whether a class of linear layers returns one tensor with its ``out_features``, by a call on meta."""
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in linear.named_parameters()}
    row = torch.empty(1, linear.in_features, dtype=linear.weight.dtype, device="meta")
    try:
        out = torch.func.functional_call(linear, weights, (row,))
    except (RuntimeError, ValueError, IndexError):  # a layer of groups takes another shape
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, linear.out_features)


def _check_targets(model: nn.Module, targets: str | tuple[str, ...]) -> None:
    """Refuse targets of which one names no layer, which PEFT accepts as long as another one does."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    named = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in named):
            leaves = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            near = nearest(target, leaves)
            hint = "" if near is None else f" Did you mean {near!r}?"
            raise ValueError(
                f"lora_targets={targets!r} names no layer of {type(model).__name__} with {target!r}; expected last "
                f"parts of the names of its linear layers: {', '.join(leaves)}.{hint} Pass lora_targets="
                + (f"{(near,)!r}" if near is not None else "'auto'")
            )


def _shown(lora: int | LoraConfig) -> str:
    return repr(lora) if isinstance(lora, int) else f"LoraConfig(target_modules={lora.target_modules!r})"
