"""Know, without asking it, how the loss of a batch is made of the losses of its rows.

A loss is known by construction: the Trainer's ``training_step`` and ``compute_loss`` are ones that are listed here, the
model's code and all hooks on it are from packages that are listed, and its loss is one whose source was read
(``head_losses``; losses of sentence-transformers by their class). Then it is a sum that ``num_items_in_batch`` divides,
whose parts add up, or one mean: over rows, labels, labels without the first of each row. What is not known is no less
trained; only not this way. Names do not show what was exchanged: the first batches are compared with their parts.

Limitations: none of batch norms, CLIP and BigBird, whose rows depend on each other, is looked for here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_memopt.training.binding.losses.foreign_code import foreign_code, full_name, is_listed
from hf_memopt.training.binding.losses.head_losses import Head, assigned, head_loss, known
from hf_memopt.training.binding.losses.row_weights import CLASSES, KnownLoss
from hf_memopt.training.binding.model import unwrap_model, unwrap_parallel
from hf_memopt.training.binding.undo import function_below

if TYPE_CHECKING:
    from transformers import Trainer

TRAINING_STEPS = {"transformers.trainer.Trainer.training_step", "trl.trainer.sft_trainer.SFTTrainer.training_step"}
STOCK_LOSS = "transformers.trainer.Trainer.compute_loss"
SFT = "trl.trainer.sft_trainer.SFTTrainer.compute_loss"
SFT_LOSSES = known("loss of TRL")  # how TRL 1.16 makes its loss, beside that of sequence parallelism
EMBEDDINGS = {
    "sentence_transformers.base.trainer.BaseTrainer.compute_loss",
    "sentence_transformers.cross_encoder.trainer.CrossEncoderTrainer.compute_loss",
}
# Prompt learning of peft that leaves the loss to the model (peft 0.21).
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
# Losses of sentence-transformers that are one mean over rows, and what in them decides on that (6.2).
OF_EMBEDDINGS = known("loss of sentence-transformers")


def known_loss(trainer: Trainer, num_items_in_batch: torch.Tensor | int | None) -> KnownLoss | str:
    """Return how the loss of this Trainer is made of its rows', or why it is not known."""
    for name in ("training_step", "_prepare_inputs", "compute_loss_context_manager"):
        function = function_below(getattr(trainer, name))
        if not (full_name(function) in TRAINING_STEPS if name == "training_step" else is_listed(function)):
            return f"{name} is {full_name(function)}"
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if any(getattr(parallel, f"{kind}_size", 1) > 1 for kind in ("cp", "sp", "tp")):
        return "sequences or tensors are spread over processes"
    function = function_below(trainer.compute_loss)
    name = full_name(function)
    is_sft = name == SFT
    if name not in (STOCK_LOSS, SFT, *EMBEDDINGS):
        return f"compute_loss is {name}"
    model = unwrap_parallel(trainer.model)
    reason = foreign_code(model, "trl" if is_sft else "")
    if reason is not None:
        return reason
    if any(hasattr(module, "expert_capacity") for module in model.modules()):
        return "its experts take so many tokens of a batch and no more"  # NLLB-MoE; SwitchTransformers, of a row
    if name in EMBEDDINGS:
        return _of_embeddings(trainer)
    if is_sft:
        return _of_sft(trainer, function, num_items_in_batch)
    return _of_stock(trainer, model, num_items_in_batch)


def is_stock(trainer: Trainer, name: str) -> bool:
    """Return whether the ``compute_loss`` of a Trainer is stock's, whatever its ``compute_loss_func``, or its
    ``training_step``: one loss, one backward pass.
    """
    return full_name(function_below(getattr(trainer, name))) in {STOCK_LOSS, *TRAINING_STEPS}


def head_counts_items(model: nn.Module, labels: Any = None) -> bool | None:
    """Return whether the head of a model divides by ``num_items_in_batch`` when it gets it; None: it is not known.

    ``labels``: as ``counts_items``.
    """
    head = _head(unwrap_parallel(model))
    if isinstance(head, str):
        return None
    if head.over != CLASSES or not head.counts:
        return head.counts
    config = unwrap_model(unwrap_parallel(model)).config
    if config.problem_type is None and config.num_labels > 1 and not torch.is_tensor(labels):
        return None
    return KnownLoss(CLASSES, head.source, config=config).problem_type(labels) == "single_label_classification"


def counts_items(trainer: Trainer, labels: Any = None) -> bool | None:
    """Return whether the loss of a Trainer divides by ``num_items_in_batch`` where it gets it; None: it is not known.

    ``labels``: those of a batch, which may decide what a classification head computes. True for a head without labels
    too, as for question answering: stock counts nothing then.
    """
    model = unwrap_parallel(trainer.model)
    if not is_stock(trainer, "compute_loss") or foreign_code(model) is not None:
        return None
    if trainer.label_smoother is not None:
        loss = _of_smoother(trainer, model, 1)
        found = None if isinstance(loss, str) else loss.over == "sum"
    else:
        found = head_counts_items(model, labels)
    takes_labels = "labels" in inspect.signature(unwrap_model(model).forward).parameters
    return found if found is None or takes_labels else True


def router_coefficient(model: nn.Module) -> str:
    """Return which attribute of a transformers model weighs the loss of its router; "" where it adds none."""
    inside = unwrap_model(unwrap_parallel(model))
    forward = inspect.unwrap(type(inside).forward)
    if not forward.__globals__["__name__"].startswith("transformers."):
        return ""
    text = inspect.getsource(forward)
    weighs = re.search(r"self\.([\w.]*aux_loss_coef) \*", text)
    switch = re.search(r"self\.([\w.]*output_router_logits)", text)
    return weighs[1] if weighs and switch and attrgetter(switch[1])(inside) else ""


# ---- Trainers -------------------------------------------------------------------------------------------------------


def _of_stock(trainer: Any, model: Any, items: Any) -> KnownLoss | str:
    """Return how ``Trainer.compute_loss`` makes its loss."""
    config = getattr(unwrap_model(model), "config", None)
    if trainer.compute_loss_func is not None:
        return f"compute_loss_func is {trainer.compute_loss_func!r}"
    if trainer.label_smoother is not None:
        return _of_smoother(trainer, model, items)
    head = _head(model)
    if isinstance(head, str):
        return head
    adds_up = head.counts and trainer.model_accepts_loss_kwargs and items is not None
    if head.over == "ctc":
        reduction = config.ctc_loss_reduction  # type: ignore[union-attr]
        return KnownLoss("sum" if reduction == "sum" else "rows", head.source)
    if head.over == CLASSES:
        return KnownLoss(CLASSES, head.source, adds_up, config)
    return KnownLoss("sum" if adds_up else _over_prompt(model, head.over), head.source)


def _of_smoother(trainer: Any, model: Any, items: Any, *, shifts: bool | None = None) -> KnownLoss | str:
    """Return the same of ``LabelSmoother``, which divides by the count from transformers 5.15 on."""
    call = type(trainer.label_smoother).__call__
    if full_name(call) != "transformers.trainer_pt_utils.LabelSmoother.__call__":
        return f"label_smoother is a {full_name(call)}"
    source = "transformers/trainer_pt_utils.py, LabelSmoother"
    if items is not None and "num_items_in_batch" in inspect.signature(call).parameters:
        return KnownLoss("sum", source)
    if shifts is None:
        shifts = unwrap_model(model)._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return KnownLoss("shifted labels" if shifts else "labels", source)


def _of_sft(trainer: Any, function: Callable[..., Any], items: Any) -> KnownLoss | str:
    """Return how TRL's ``SFTTrainer`` makes its loss: ``nll`` and ``dft`` are sums over predicted labels."""
    if trainer.args.world_size > 1:  # a process that cuts more would wait for ever
        return "SFTTrainer adds up metrics over the processes whenever it computes a loss"
    of_sequence_parallelism = "a part of loss, outputs"
    found = assigned(function, "loss") - SFT_LOSSES.keys()
    unknown = [text for text in found if not text.startswith(of_sequence_parallelism)]
    if unknown:
        return f"compute_loss of this version of TRL has: loss = {min(unknown)}"
    if trainer.compute_loss_func is not None or trainer.aux_loss_enabled:
        return "SFTTrainer has a compute_loss_func or the loss of a router"
    if trainer.label_smoother is not None and trainer.args.loss_type == "nll":
        return _of_smoother(trainer, trainer.model, items, shifts=True)
    source = "trl/trainer/sft_trainer.py, SFTTrainer.compute_loss"
    return KnownLoss("sum" if items is not None else _over_prompt(trainer.model, "shifted labels"), source)


def _of_embeddings(trainer: Any) -> KnownLoss | str:
    """Return how a trainer of sentence-transformers makes its loss."""
    losses = list(trainer.loss.values()) if isinstance(trainer.loss, dict) else [trainer.loss]
    for loss in losses:
        kind = f"{type(loss).__module__}.{type(loss).__qualname__}".removeprefix("sentence_transformers.")
        if kind not in OF_EMBEDDINGS:
            return f"its loss is {kind}"
        reason = foreign_code(loss)
        if reason is not None:
            return reason
        inner = getattr(loss, OF_EMBEDDINGS[kind]) if OF_EMBEDDINGS[kind] else True
        if isinstance(inner, nn.Module):
            is_mean = type(inner).__module__ == "torch.nn.modules.loss" and getattr(inner, "reduction", "") == "mean"
            inner = is_mean and (not isinstance(inner, nn.CrossEntropyLoss) or inner.weight is None)
        if inner is not True:
            return f"its {kind} takes no plain mean"
    return KnownLoss("rows", f"sentence_transformers, {type(losses[0]).__name__}")


# ---- Models ---------------------------------------------------------------------------------------------------------


def _head(model: Any) -> Head | str:
    """Return how the head of a transformers model makes its loss, or why that is not known."""
    inside = unwrap_model(model)
    tuner = model.base_model if hasattr(model, "get_base_model") else inside  # of prompt learning that is the model
    if tuner is not inside and full_name(type(tuner).forward) != "peft.tuners.tuners_utils.BaseTuner.forward":
        return f"{type(tuner).__name__} of peft has a forward of its own"
    config = _prompt_config(model)
    if config is not None and not (config.task_type == "CAUSAL_LM" and config.peft_type in PROMPTS):
        return f"peft's {config.peft_type} of {config.task_type} makes its own loss"
    forward = inspect.unwrap(type(inside).forward)
    if not forward.__globals__["__name__"].startswith("transformers."):
        return f"the forward of {type(inside).__name__} is {full_name(forward)}"
    return head_loss(inside, forward)


def _prompt_config(model: Any) -> Any:
    """Return the configuration of peft's prompt learning; None if there is none."""
    config = getattr(model, "active_peft_config", None) if hasattr(model, "get_base_model") else None
    return config if getattr(config, "is_prompt_learning", False) else None


def _over_prompt(model: Any, over: str) -> str:
    """Return what a mean is over: with virtual tokens before the text, the first label of a row is predicted too."""
    config = _prompt_config(model)
    is_put_before = config is not None and config.peft_type != "PREFIX_TUNING"
    return "labels" if over == "shifted labels" and is_put_before else over
