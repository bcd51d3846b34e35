"""Make the gradients of unequal accumulation steps those of one big batch: a loss for ``Trainer(compute_loss_func=)``.

A head that takes the mean over its own rows weighs a label of a short accumulation step more than one of a long one.
Here each adds up its labels' losses and divides by ``num_items_in_batch``, the labels of the whole optimizer step: all
its accumulation steps on all its processes. With ``attach(trainer)`` two more things come right:

- A causal LM predicts nothing at a row's first position, yet stock counts a label there (5.8.1: always; 5.17.0, 5.23.0:
  for heads such as GPT-2, whose class name hides it): 11/12 of the gradient at length 12. Here it is not counted.
- Stock takes the labels out of the inputs of a model that is to have its loss computed elsewhere. An encoder-decoder
  then has nothing to make ``decoder_input_ids`` from (BART silently takes the source text). Here they are made before.

Limitations: no question answering, multiple choice, contrastive or CTC losses, no auxiliary losses (a router's), class
weights, context or sequence parallelism; ``Seq2SeqTrainer.evaluate`` with generation calls no ``compute_loss_func``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers.loss.loss_utils import (
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from hf_memopt.binding import refuse_data_parallel
from hf_memopt.binding.losses import CLASSES, KnownLoss
from hf_memopt.binding.model import IGNORED_LABEL, check_model, unwrap_model
from hf_memopt.binding.undo import UndoHandle, is_overridden, override_method, share_attribute, undo_all
from hf_memopt.changes import Change, record_changes
from hf_memopt.hub import task_by_name
from hf_memopt.plain_data import check_value, shown

if TYPE_CHECKING:
    from transformers import Trainer

TASKS = ("sequence-classification", "token-classification", "masked-lm", "causal-lm", "seq2seq-lm")

OF_LOSS_FUNCTION = {
    ForSequenceClassificationLoss: "sequence-classification",
    ForTokenClassification: "token-classification",
    ForMaskedLMLoss: "masked-lm",
    ForCausalLMLoss: "causal-lm",
}
OF_CLASS: Mapping[Any, str] = {
    **dict.fromkeys(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(), "masked-lm"),
    **dict.fromkeys(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(), "token-classification"),
    **dict.fromkeys(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values(), "sequence-classification"),
    **dict.fromkeys(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values(), "sequence-classification"),
}
# Their forward adds or leaves out what the other heads of their kind do not (read in 5.8.1, 5.17.0 and 5.23.0).
OF_THEIR_OWN_KIND = {
    "BrosForTokenClassification",
    "CsmForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "HiggsAudioV2ForConditionalGeneration",
    "ProphetNetForConditionalGeneration",
    "ShieldGemma2ForImageClassification",
}
COUNTING_METHOD = "_get_num_items_in_batch"
COUNTED = "counts_predictions"  # marks the counts of a trainer that attach has bound, and the override that makes them


def exact_loss(model: nn.Module, *, label_smoothing: float | None = None, task: str | None = None) -> ExactLoss:
    """Return the loss of ``model``'s head for ``Trainer(compute_loss_func=...)``, exact for unequal micro-batches.

    Follow it with ``attach(trainer)``; causal LMs and encoder-decoders refuse to train without. The gradient of a step
    is that of the mean over all its labels other than -100, however they are spread over micro-batches and processes.
    For several targets per row (multi-label, regression) each target counts, as in the heads' own losses; unlike there,
    a target of -100 is left out, as the ``Trainer`` leaves it out of its count. A micro-batch without any label adds 0.
    16-bit logits are raised to float32. Without ``num_items_in_batch`` the result is the model's own loss.

    Args:
        model: the model to train, also inside PEFT or DistributedDataParallel. Only its config and name are kept.
        label_smoothing: the share of the target spread evenly over all classes, in [0, 1). None takes
            ``args.label_smoothing_factor`` at ``attach(trainer)``; beside a ``compute_loss_func`` stock ignores it.
        task: what the head computes, one of ``TASKS``. None finds out, from the library's loss function where the head
            calls it and from the class's name elsewhere.

    Raises:
        ValueError: a head or a task this loss does not know, an auxiliary loss in the config, smoothing out of range.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertForTokenClassification
        >>> sizes = dict(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        >>> loss = exact_loss(BertForTokenClassification(BertConfig(**sizes, num_labels=2)))
        >>> loss
        exact_loss(BertForTokenClassification, task='token-classification', label_smoothing=None)
        >>> loss({"logits": torch.zeros(1, 3, 2)}, torch.tensor([[0, 1, -100]]), num_items_in_batch=4)  # ln(2) * 2 / 4
        tensor(0.3466)
    """
    check_value("label_smoothing", label_smoothing, float | None, 0.1)
    if label_smoothing is not None and not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing={shown(label_smoothing)} is out of range; expected 0 <= label_smoothing < 1. "
            "Call: exact_loss(model, label_smoothing=0.1)"
        )
    if task is not None:
        task = task_by_name(task, TASKS)
    check_model(model)
    inside = unwrap_model(model)
    config = getattr(inside, "config", None)
    found = task or _find_task(inside)
    if found is None or (found == "sequence-classification" and config is None):
        raise ValueError(
            f"model=<{type(inside).__name__}> has a loss that exact_loss does not know; expected a transformers head "
            f"for {', '.join(TASKS[:-1])} or {TASKS[-1]}. Leave compute_loss_func out and call attach(trainer), which "
            "repairs the scale (a mean of the micro-batches' means), or name what the head computes: "
            'exact_loss(model, task="token-classification")'
        )
    for name in ("output_router_logits", "z_loss_coefficient"):
        if getattr(config, name, None):
            raise ValueError(
                f"{name}={getattr(config, name)!r} gives {type(inside).__name__} an auxiliary loss, which is not a sum "
                f"over labels; expected a model without. Leave compute_loss_func out and call attach(trainer), or set: "
                f"model.config.{name} = {type(getattr(config, name))(0)!r}"
            )
    return ExactLoss(type(inside).__name__, config, found, label_smoothing)


class ExactLoss:
    """What ``exact_loss`` returns: called by the ``Trainer``, bound to it by ``attach``; pickles.

    Attributes:
        mean_over: what the mean is over where there is no ``num_items_in_batch``; read by
            ``hf_memopt.binding.losses.known_losses``.
    """

    @property
    def mean_over(self) -> str:
        """Return "labels", or "shifted labels" for those without the first of each row."""
        return "shifted labels" if self.task == "causal-lm" else "labels"

    def __init__(self, model_name: str, config: Any, task: str, label_smoothing: float | None) -> None:
        self.model_name = model_name
        self.config = config
        self.task = task
        self.label_smoothing = label_smoothing
        self._smoothing_of_arguments = 0.0

    def __call__(
        self, outputs: Any, labels: torch.Tensor | None, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the summed loss of the labels over ``num_items_in_batch``, or their mean where that is None.

        Raises:
            ValueError: no labels, no logits, shapes that do not fit, an auxiliary loss in the outputs, smoothing of
                targets that are not classes.
            RuntimeError: a causal LM or encoder-decoder whose trainer is not bound, or torch.nn.DataParallel.
        """
        if labels is None:
            raise ValueError(
                "labels=None reached exact_loss; expected a column called labels. "
                'Call: dataset.rename_column("<its name>", "labels")'
            )
        if torch.is_tensor(num_items_in_batch) and num_items_in_batch.dim() > 0:
            refuse_data_parallel(len(num_items_in_batch))
        if self._needs_trainer and num_items_in_batch is not None and not hasattr(num_items_in_batch, COUNTED):
            raise RuntimeError(
                f"exact_loss of {self.model_name} (task={self.task!r}) was never bound to its trainer; expected "
                "a bound loss. Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
            )
        total, own_items = self._sum(self._read_logits(outputs), labels)
        items = own_items if num_items_in_batch is None else num_items_in_batch
        if torch.is_tensor(items):
            return total / items.to(total.device).clamp(min=1)
        return total / max(items, 1)

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Make ``trainer`` count what the head predicts and give a decoder its inputs; ``attach`` calls it.

        Raises:
            ValueError: two different amounts of label smoothing, or processes that do not share their counts.
        """
        if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False gives each process the same weight, however few labels it has; "
                "expected True beside exact_loss. Pass TrainingArguments(..., average_tokens_across_devices=True)"
            )
        smoothing = self._take_smoothing(trainer)
        if not self._needs_trainer or is_overridden(trainer, COUNTING_METHOD, COUNTED):
            return smoothing
        count = _bind_count(trainer, shifts_labels=self.task == "causal-lm")
        if self.task == "causal-lm":
            reason = f"{self.model_name} predicts no token from nothing"
            change = Change("num_items_in_batch", "labels", "labels without those of position 0", reason)
            record_changes(trainer, [change])
            return undo_all(smoothing, count)
        reason = (
            f"{self.model_name} could not make them itself, as compute_loss_func takes the labels out of the inputs"
        )
        record_changes(trainer, [Change("decoder_input_ids", None, "made from the labels where missing", reason)])
        return undo_all(smoothing, count, _bind_decoder_inputs(trainer, self.model_name))

    @property
    def _needs_trainer(self) -> bool:
        return self.task in ("causal-lm", "seq2seq-lm")

    def _take_smoothing(self, trainer: Trainer) -> UndoHandle:
        """Take ``label_smoothing_factor``, which stock ignores beside a ``compute_loss_func``."""
        wanted = trainer.args.label_smoothing_factor
        if self.label_smoothing is not None:
            if wanted not in (0, self.label_smoothing):
                raise ValueError(
                    f"label_smoothing_factor={wanted!r} differs from exact_loss's label_smoothing="
                    f"{self.label_smoothing!r}; expected one amount. Call: exact_loss(model), which takes the former"
                )
            return undo_all()
        if self.task == "sequence-classification":
            is_number = self.config.problem_type is None and self.config.num_labels == 1
            if is_number or self.config.problem_type in ("regression", "multi_label_classification"):
                wanted = 0.0  # as stock, which warns about several labels
        before = self._smoothing_of_arguments
        if before != wanted:
            reason = "the TrainingArguments' label_smoothing_factor, which stock ignores beside a compute_loss_func"
            record_changes(trainer, [Change("exact_loss label_smoothing", before, wanted, reason)])
        return share_attribute(self, "_smoothing_of_arguments", wanted)

    def _read_logits(self, outputs: Any) -> torch.Tensor:
        """Return the logits of a model output or tuple, 16-bit ones as float32."""
        if isinstance(outputs, Mapping):
            auxiliary = [name for name, value in outputs.items() if name.endswith("_loss") and value is not None]
            if auxiliary or "logits" not in outputs:
                what = f"an auxiliary {auxiliary[0]}" if auxiliary else "no logits"
                raise ValueError(
                    f"outputs=<{type(outputs).__name__}> of {self.model_name} have {what}; expected logits and nothing "
                    "else that adds to the loss. Leave compute_loss_func out and call attach(trainer)"
                )
            logits: torch.Tensor = outputs["logits"]
        else:
            logits = outputs[0]
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def _sum(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of all labels that count, and how many they are."""
        labels = labels.to(logits.device)
        if self.task != "sequence-classification":
            self._check_shape(logits, labels, logits.shape[:-1])
            if self.task == "causal-lm":  # logits (batch, seq, vocab) of position i against the label of i + 1
                labels = functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
            return self._sum_of_classes(logits, labels)
        problem = self._problem_type(labels)
        if problem == "single_label_classification":
            self._check_shape(logits, labels, logits.shape[:-1], (*logits.shape[:-1], 1))
            return self._sum_of_classes(logits, labels)
        if self._smoothing > 0:
            raise ValueError(
                f"label_smoothing={self._smoothing!r} has no meaning for {problem}; expected 0. "
                "Call: exact_loss(model, label_smoothing=0.0)"
            )
        allowed = [logits.shape] + [logits.shape[:-1]] * (logits.shape[-1] == 1)
        self._check_shape(logits, labels, *allowed)
        targets = labels.to(logits.dtype).reshape(logits.shape)
        compare = functional.mse_loss if problem == "regression" else functional.binary_cross_entropy_with_logits
        counts = targets.ne(IGNORED_LABEL)
        return compare(logits, targets, reduction="none").masked_fill(~counts, 0).sum(), counts.sum()

    def _sum_of_classes(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross entropy of class labels, and how many there are."""
        total = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=self._smoothing,
        )
        return total, labels.ne(IGNORED_LABEL).sum()

    @property
    def _smoothing(self) -> float:
        return self._smoothing_of_arguments if self.label_smoothing is None else self.label_smoothing

    def _problem_type(self, labels: torch.Tensor) -> str:
        """Return what a classification head takes its labels for."""
        found = KnownLoss(CLASSES, "", config=self.config).problem_type(labels)
        is_by_dtype = self.config.problem_type is None and found == "multi_label_classification"
        if is_by_dtype and self.model_name.startswith("Deberta"):  # its own rule: cross entropy with soft targets
            raise ValueError(
                f"problem_type=None makes {self.model_name} take {labels.dtype} labels for soft targets, unlike other "
                'heads; expected it to be set. Set: model.config.problem_type = "multi_label_classification"'
            )
        return found

    def _check_shape(self, logits: torch.Tensor, labels: torch.Tensor, *allowed: tuple[int, ...]) -> None:
        if tuple(labels.shape) not in [tuple(shape) for shape in allowed]:
            raise ValueError(
                f"labels=<shape {tuple(labels.shape)}> do not fit the logits of {self.model_name}, "
                f"{tuple(logits.shape)}, in {self.task}; expected {' or '.join(str(tuple(s)) for s in allowed)}. "
                "Leave compute_loss_func out and call attach(trainer) if the model reads its labels in its own way."
            )

    def __repr__(self) -> str:
        return f"exact_loss({self.model_name}, task={self.task!r}, label_smoothing={shown(self.label_smoothing)})"


def _find_task(model: Any) -> str | None:
    """Return the task of a transformers head, or None if its loss is none of those known here.

    Heads of the library either call ``self.loss_function``, whose kind is known, or compute the loss inline; then the
    class that defines ``forward`` decides, so a user's subclass with a forward of its own is not mistaken for its
    parent. Inline causal LMs are not known: those of 5.23.0 (``BartForCausalLM``, XLNet) do not shift their labels.
    """
    forward = inspect.unwrap(type(model).forward)
    name = forward.__qualname__.split(".")[0]
    parameters = inspect.signature(forward).parameters
    has_decoder = "decoder_input_ids" in parameters
    is_stock = forward.__module__.startswith("transformers.") and "labels" in parameters
    if name in OF_THEIR_OWN_KIND:
        return None
    if is_stock and has_decoder and name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        return "seq2seq-lm"
    if "loss_function" in forward.__code__.co_names and hasattr(model, "loss_function"):
        task = OF_LOSS_FUNCTION.get(model.loss_function)
        return None if has_decoder and task == "causal-lm" else task
    return OF_CLASS.get(name) if is_stock else None


def _bind_count(trainer: Trainer, *, shifts_labels: bool) -> UndoHandle:
    """Let ``trainer`` count the labels of a step, in training and evaluation, without those of position 0 if shifted.

    They are counted by stock itself, over the accumulation steps and processes of the step, with the others shown as
    ignored. The method is private; the same in 5.8.1, 5.17.0 and 5.23.0, pinned by tests.
    """

    def count(before: Callable[..., Any], batch_samples: list[Any], device: torch.device) -> Any:
        if shifts_labels:
            batch_samples = [_without_first_labels(batch) for batch in batch_samples]
        items = before(batch_samples, device)
        if torch.is_tensor(items):
            setattr(items, COUNTED, True)
        return items

    return override_method(trainer, COUNTING_METHOD, count, purpose=COUNTED)


def _without_first_labels(batch: Any) -> Any:
    labels = batch.get("labels")
    if not torch.is_tensor(labels) or labels.dim() == 0:
        return batch
    labels = labels.clone()
    labels[..., 0] = IGNORED_LABEL
    return {**batch, "labels": labels}


def _bind_decoder_inputs(trainer: Trainer, model_name: str) -> UndoHandle:
    """Let ``trainer`` make ``decoder_input_ids`` from the labels, as the model would if it saw them."""

    def compute_loss(
        before: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        names = ("decoder_input_ids", "decoder_inputs_embeds")
        if "labels" in inputs and all(inputs.get(name) is None for name in names):
            shift_labels = getattr(unwrap_model(trainer.model), "prepare_decoder_input_ids_from_labels", None)
            if shift_labels is None:
                raise ValueError(
                    f"decoder_input_ids are missing, and {model_name} has no prepare_decoder_input_ids_from_labels;"
                    " expected them in the data. Leave compute_loss_func out, or add the column."
                )
            inputs = {**inputs, "decoder_input_ids": shift_labels(labels=inputs["labels"])}
        return before(model, inputs, *args, **kwargs)

    return override_method(trainer, "compute_loss", compute_loss)
