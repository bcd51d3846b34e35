"""Know, without asking it, how the loss of a batch is made of the losses of its rows.

A loss is known by construction: the Trainer's ``training_step`` and ``compute_loss`` are ones that are listed here, the
model's code and all hooks on it are from packages that are listed, and its loss is one whose source was read
(``head_losses``; losses of sentence-transformers by their class). Then it is a sum that ``num_items_in_batch`` divides,
whose parts add up, or one mean: over rows, labels, labels without the first of each row. What is not known is no less
trained; only not this way.

Limitations: none of batch norms, CLIP and BigBird, whose rows depend on each other, is looked for here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_memopt.binding.handles import function_below
from hf_memopt.binding.head_losses import Head, assigned, head_loss
from hf_memopt.binding.model_traits import IGNORED_LABEL, unwrap_model
from hf_memopt.errors import did_you_mean

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["MEANS", "KnownLoss", "counts_items", "head_counts_items", "known_loss", "stated_loss"]

MEANS = ("sum", "mean over rows", "mean over labels", "mean over shifted labels")
"""What may be stated of a loss, beside "mean over <column of the batch>"."""

TRUSTED = (
    "accelerate",
    "bitsandbytes",
    "builtins",
    "hf_memopt",
    "peft",
    "sentence_transformers",
    "torch",
    "torchao",
    "transformers",
    "typing",
    "abc",
    "contextlib",
    "functools",
)
"""Packages in whose layers the rows of a batch do not meet, unless ``splitting`` says so."""

NEVER = ("neftune_post_forward_hook",)  # noise whose size depends on the width of the batch

TRAINING_STEPS = {"transformers.trainer.Trainer.training_step", "trl.trainer.sft_trainer.SFTTrainer.training_step"}
STOCK = "transformers.trainer.Trainer.compute_loss"
SFT = "trl.trainer.sft_trainer.SFTTrainer.compute_loss"
# How TRL 1.16 makes its loss, beside that of sequence parallelism.
SFT_LOSSES = {
    "self.compute_loss_func(model(**logits_inputs), inputs.get('labels'), num_items_in_batch=num_items_in_batch)",
    "self.label_smoother(model(**logits_inputs), inputs['labels'], shift_labels=True, **kwargs)",
    "per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)",
    "loss * (self.accelerator.num_processes // self.get_tp_size())",
    "loss + weighted_aux_loss / steps",
}
EMBEDDINGS = {
    "sentence_transformers.base.trainer.BaseTrainer.compute_loss",
    "sentence_transformers.cross_encoder.trainer.CrossEncoderTrainer.compute_loss",
}
# Its losses that are one mean over rows, and what in them decides on that (sentence-transformers 6.2).
OF_EMBEDDINGS = {
    "sentence_transformer.losses.cosine_similarity.CosineSimilarityLoss": "loss_fct",
    "sentence_transformer.losses.triplet.TripletLoss": "",
    "sentence_transformer.losses.contrastive.ContrastiveLoss": "size_average",
    "sentence_transformer.losses.softmax.SoftmaxLoss": "loss_fct",
    "sentence_transformer.losses.margin_mse.MarginMSELoss": "loss_fct",
    "cross_encoder.losses.binary_cross_entropy.BinaryCrossEntropyLoss": "bce_with_logits_loss",
    "cross_encoder.losses.cross_entropy.CrossEntropyLoss": "ce_loss",
    "cross_encoder.losses.mse.MSELoss": "loss_fct",
}


@dataclass(frozen=True, slots=True)
class KnownLoss:
    """How the loss of a batch is made of the losses of its rows.

    Attributes:
        over: what one mean is over: "rows", "labels", "shifted labels" (without the first of each row), "classes" (as
            the problem type of the config says), "positions" (of answers), a column of the batch; "sum" if losses of
            parts add up.
        source: where this is written.
        divides: whether class labels are a sum that ``num_items_in_batch`` divides; for "classes" alone.
        config: of the model, for "classes" alone.
    """

    over: str
    source: str
    divides: bool = False
    config: Any = None

    def row_weights(self, inputs: Mapping[str, Any]) -> list[float] | None:
        """Return the weight of each row's own loss in the loss of this batch, shape (rows,); they sum to 1.

        Rows weigh the same where none has a label that counts: stock's loss is 0 / 0 then. Waits for the device.

        Args:
            inputs: a batch for which ``reason_against`` is None.

        Returns:
            None if the losses of parts add up.
        """
        counts = self._counts(inputs)
        if counts is None:
            return None
        found: list[float] = counts.double().cpu().tolist() if counts.device.type != "mps" else counts.cpu().tolist()
        total = sum(found)
        return [count / total for count in found] if total else [1 / len(found)] * len(found)

    def reason_against(self, inputs: Mapping[str, Any]) -> str | None:
        """Return why this one batch does not follow the rule; None if it does. Waits for the device."""
        given = [name for name in ("ignore_index", "output_router_logits") if inputs.get(name) is not None]
        if given:
            return f"its {given[0]} changes the loss"
        if self.over == "positions":
            return self._reason_against_positions(inputs)
        if self.over in ("labels", "shifted labels", "classes"):
            labels = inputs.get("labels")
            if not torch.is_tensor(labels) or labels.dim() == 0:
                return "it has no tensor of labels"
            if self.over == "classes":
                return self._reason_against_classes(labels)
        elif self.over not in ("sum", "rows") and _column(inputs, self.over) is None:
            return f"it has no column {self.over} with one entry per row"
        return None

    def _counts(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return what each row weighs, shape (rows,)."""
        labels = inputs.get("labels")
        over = self.over
        if over == "classes":
            over = "rows" if self.problem_type(labels) != "single_label_classification" else "labels"
            over = "sum" if over == "labels" and self.divides else over
        if over == "sum":
            return None
        if over in ("labels", "shifted labels"):
            if over == "shifted labels":
                shifted = inputs.get("shift_labels")
                labels = labels[..., 1:] if shifted is None else shifted  # type: ignore[index]
            return _per_row(labels != IGNORED_LABEL)
        if over in ("rows", "positions"):
            return torch.ones(_rows(inputs))
        column = _column(inputs, over)
        if column is None:
            raise ValueError(
                f"loss='mean over {over}' needs a column that the batch lacks; expected a tensor with one entry "
                f"per row, among {', '.join(inputs)}. Return it from the collator"
            )
        return _per_row(column != IGNORED_LABEL if over == "labels" else column)

    def problem_type(self, labels: Any) -> str:
        """Return what a classification head takes labels for, by the rule of ``ForSequenceClassificationLoss``."""
        if self.config.problem_type is not None:
            return str(self.config.problem_type)
        if self.config.num_labels == 1:
            return "regression"
        is_class = labels.dtype in (torch.long, torch.int)
        return "single_label_classification" if is_class else "multi_label_classification"

    def _reason_against_classes(self, labels: torch.Tensor) -> str | None:
        rows, wanted = len(labels), self.config.num_labels
        if self.problem_type(labels) == "single_label_classification":
            is_negative = (labels < 0) & (labels != IGNORED_LABEL)
            return "it has labels below 0" if bool(is_negative.any()) else None
        if labels.numel() != rows * wanted:
            return f"its labels of shape {tuple(labels.shape)} are not {wanted} for each of {rows} rows"
        return None

    def _reason_against_positions(self, inputs: Mapping[str, Any]) -> str | None:
        text = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
        both = [inputs.get(name) for name in ("start_positions", "end_positions")]
        if text is None or any(not torch.is_tensor(positions) for positions in both):
            return "it has no text with positions of answers"
        if any(bool((positions >= text.shape[1]).any()) for positions in both):
            return "answers lie beyond its texts, and do not count"
        return None


def known_loss(trainer: Trainer, num_items_in_batch: torch.Tensor | int | None) -> KnownLoss | str:
    """Return how the loss of this Trainer is made of its rows', or why it is not known.

    Args:
        trainer: as it trains; nothing of it is changed or called.
        num_items_in_batch: as ``training_step`` gets it.
    """
    for name in ("training_step", "_prepare_inputs", "compute_loss_context_manager"):
        function = function_below(trainer, name)
        if not (_full_name(function) in TRAINING_STEPS if name == "training_step" else _is_trusted(function)):
            return f"{name} is {_full_name(function)}"
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        return "sequences or tensors are spread over processes"
    function = function_below(trainer, "compute_loss")
    name = _full_name(function)
    is_sft = name == SFT
    if name not in (STOCK, SFT, *EMBEDDINGS):
        return f"compute_loss is {name}"
    model = _outermost(trainer.model)
    reason = _foreign_code(model, ("trl",) if is_sft else ())
    if reason is not None:
        return reason
    if name in EMBEDDINGS:
        return _of_embeddings(trainer)
    if is_sft:
        return _of_sft(trainer, function, num_items_in_batch)
    return _of_stock(trainer, model, num_items_in_batch)


def head_counts_items(model: nn.Module, labels: Any = None) -> bool | None:
    """Return whether the head of a model divides by ``num_items_in_batch`` when it gets it; None: it is not known.

    ``labels``: as ``counts_items``.
    """
    head = _head(_outermost(model))
    if isinstance(head, str):
        return None
    if head.over != "classes" or not head.counts:
        return head.counts
    config = unwrap_model(_outermost(model)).config
    if config.problem_type is None and config.num_labels > 1 and not torch.is_tensor(labels):
        return None
    return KnownLoss("classes", head.source, config=config).problem_type(labels) == "single_label_classification"


def counts_items(trainer: Trainer, labels: Any = None) -> bool | None:
    """Return whether the loss of a Trainer divides by ``num_items_in_batch`` where it gets it; None: it is not known.

    ``labels``: those of a batch, which may decide what a classification head computes. True for a head without labels
    too, as for question answering: stock counts nothing then.
    """
    model = _outermost(trainer.model)
    if _full_name(function_below(trainer, "compute_loss")) != STOCK or _foreign_code(model, ()) is not None:
        return None
    if trainer.label_smoother is not None:
        loss = _of_smoother(trainer, model, 1)
        found = None if isinstance(loss, str) else loss.over == "sum"
    else:
        found = head_counts_items(model, labels)
    takes_labels = "labels" in inspect.signature(unwrap_model(model).forward).parameters
    return found if found is None or takes_labels else True


def stated_loss(text: str) -> KnownLoss:
    """Return the loss that a user has stated, as ``MEANS`` names it.

    "mean over <column>" weighs each row by what its values of that column add up to: a mask, a weight, a count.

    Raises:
        ValueError: the text is none of these.

    Examples:
        >>> stated_loss("mean over rows").row_weights({"labels": torch.tensor([1, 0])})
        [0.5, 0.5]
        >>> stated_loss("mean over attention_mask").row_weights({"attention_mask": torch.tensor([[1, 1], [1, 0]])})
        [0.6666666666666666, 0.3333333333333333]
    """
    over = text.removeprefix("mean over ") if isinstance(text, str) else ""
    if text != "sum" and (not over or over == text or over == "sum"):
        raise ValueError(
            f"loss={text!r} is unknown; expected one of {', '.join(MEANS)}, or 'mean over <column of the batch>'."
            f'{did_you_mean(str(text), MEANS)} Call MicrobatchCallback(loss="mean over labels")'
        )
    return KnownLoss(over, f"stated as loss={text!r}")


# ---- Trainers -------------------------------------------------------------------------------------------------------


def _of_stock(trainer: Any, model: Any, items: Any) -> KnownLoss | str:
    """Return how ``Trainer.compute_loss`` makes its loss."""
    config = getattr(unwrap_model(model), "config", None)
    if trainer.compute_loss_func is not None:
        over = getattr(trainer.compute_loss_func, "mean_over", None)
        if over is None or not _is_trusted(type(trainer.compute_loss_func).__call__):
            return f"compute_loss_func is {trainer.compute_loss_func!r}"
        source = "hf_memopt/batching/exact_losses.py, ExactLoss"
        return KnownLoss(over if items is None else "sum", source, config=config)
    if trainer.label_smoother is not None:
        return _of_smoother(trainer, model, items)
    head = _head(model)
    if isinstance(head, str):
        return head
    adds_up = head.counts and trainer.model_accepts_loss_kwargs and items is not None
    if head.over == "ctc":
        reduction = config.ctc_loss_reduction  # type: ignore[union-attr]
        return KnownLoss("sum" if reduction == "sum" else "rows", head.source)
    if head.over == "classes":
        return KnownLoss("classes", head.source, adds_up, config)
    return KnownLoss("sum" if adds_up else _over_prompt(model, head.over), head.source)


def _of_smoother(trainer: Any, model: Any, items: Any, *, shifts: bool | None = None) -> KnownLoss | str:
    """Return the same of ``LabelSmoother``, which divides by the count from transformers 5.15 on."""
    call = type(trainer.label_smoother).__call__
    if _full_name(call) != "transformers.trainer_pt_utils.LabelSmoother.__call__":
        return f"label_smoother is a {_full_name(call)}"
    source = "transformers/trainer_pt_utils.py, LabelSmoother"
    if items is not None and "num_items_in_batch" in inspect.signature(call).parameters:
        return KnownLoss("sum", source)
    if shifts is None:
        shifts = unwrap_model(model)._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return KnownLoss("shifted labels" if shifts else "labels", source)


def _of_sft(trainer: Any, function: Callable[..., Any], items: Any) -> KnownLoss | str:
    """Return how TRL's ``SFTTrainer`` makes its loss: ``nll`` and ``dft`` are sums over predicted labels."""
    of_sequence_parallelism = "a part of loss, outputs"
    found = assigned(function, "loss") - SFT_LOSSES
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
        reason = _foreign_code(loss, ())
        if reason is not None:
            return reason
        inner = getattr(loss, OF_EMBEDDINGS[kind]) if OF_EMBEDDINGS[kind] else True
        if isinstance(inner, nn.Module):
            is_mean = type(inner).__module__ == "torch.nn.modules.loss" and getattr(inner, "reduction", "") == "mean"
            inner = is_mean and (not isinstance(inner, nn.CrossEntropyLoss) or inner.weight is None)
        if inner is not True:
            return f"its {kind} takes no plain mean"
    return KnownLoss("rows", f"sentence_transformers, {type(losses[0]).__name__}")


def _over_prompt(model: Any, over: str) -> str:
    """Return what a mean is over where virtual tokens stand before the text: its first label is predicted too."""
    config = _prompt_config(model)
    return "labels" if over == "shifted labels" and config is not None and _is_put_before(config) else over


# ---- Models ---------------------------------------------------------------------------------------------------------


def _outermost(model: Any) -> Any:
    """Return a model out of DistributedDataParallel and torch.compile, but not out of peft."""
    while (inner := getattr(model, "_orig_mod", None) or _parallel(model)) is not None:
        model = inner
    return model


def _parallel(model: Any) -> Any:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None


def _head(model: Any) -> Head | str:
    """Return how the head of a transformers model makes its loss, or why that is not known."""
    inside = unwrap_model(model)
    tuner = model.base_model if hasattr(model, "peft_config") else inside  # of prompt learning that is the model
    if tuner is not inside and _full_name(type(tuner).forward) != "peft.tuners.tuners_utils.BaseTuner.forward":
        return f"{type(tuner).__name__} of peft has a forward of its own"
    config = _prompt_config(model)
    if config is not None and not (config.task_type == "CAUSAL_LM" and config.peft_type in PROMPTS):
        return f"peft's {config.peft_type} of {config.task_type} makes its own loss"
    forward = inspect.unwrap(type(inside).forward)
    if not forward.__globals__["__name__"].startswith("transformers."):
        return f"the forward of {type(inside).__name__} is {_full_name(forward)}"
    return head_loss(inside, forward)


PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")


def _prompt_config(model: Any) -> Any:
    """Return the configuration of peft's prompt learning; None if there is none."""
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    return config if getattr(config, "is_prompt_learning", False) else None


def _is_put_before(config: Any) -> bool:
    return bool(config.peft_type != "PREFIX_TUNING")


def _foreign_code(model: nn.Module, also: tuple[str, ...]) -> str | None:
    """Return what in a model is from a package that is not listed; None if nothing is."""
    for name, module in model.named_modules():
        if hasattr(module, "expert_capacity"):  # of a batch, not of a row (NLLB-MoE)
            return f"{type(module).__name__} {name} lets so many tokens to an expert and no more"
        where = f"{type(module).__name__} {name}".rstrip()
        for kind in type(module).__mro__:
            if not _is_listed(kind.__module__, also):
                return f"{where} is from {kind.__module__}"
        for function in _layers(vars(module).get("forward")):
            if not _is_trusted(function, also):
                return f"the forward of {where} is {_full_name(function)}"
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_trusted(hook, also) or getattr(hook, "__name__", "") in NEVER:
                return f"the hook {_full_name(hook)} is on {where}"
    return None


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function and those inside it, as decorators, partial functions and overrides have them."""
    while function is not None:
        yield function
        inner = getattr(function, "__func__", None) or getattr(function, "func", None)
        function = inner or getattr(function, "__wrapped__", None)


def _is_trusted(function: Any, also: tuple[str, ...] = ()) -> bool:
    return _is_listed(_module_of(function), also)


def _is_listed(module: str, also: tuple[str, ...]) -> bool:
    return module.partition(".")[0] in (*TRUSTED, *also)


def _module_of(function: Any) -> str:
    """Return the module in which a function is written, which ``functools.wraps`` does not change."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    written_in = getattr(function, "__globals__", None)
    return str(type(function).__module__ if written_in is None else written_in["__name__"])


def _full_name(function: Any) -> str:
    return f"{_module_of(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


# ---- Batches --------------------------------------------------------------------------------------------------------


def _rows(inputs: Mapping[str, Any]) -> int:
    names = ("labels", "input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features", *inputs)
    found = (inputs[name] for name in names if torch.is_tensor(inputs.get(name)) and inputs[name].dim() > 0)
    return len(next(found))


def _column(inputs: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Return a column with one entry per row; of nested ones by a dotted name."""
    value: Any = inputs
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if torch.is_tensor(value) and value.dim() > 0 and len(value) == _rows(inputs) else None


def _per_row(values: Any) -> torch.Tensor:
    summed: torch.Tensor = values.reshape(len(values), -1).sum(1)
    return summed
