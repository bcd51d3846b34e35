"""Bind what needs the ``Trainer`` itself, check that its pieces fit each other, and repair stock's gradient scale.

Stock transformers 5.x multiplies the gradients of a head that ignores ``num_items_in_batch`` (BERT classification, T5,
...) by accumulation steps times processes: it leaves the division to a head that never does it. ``attach`` asks the
head itself, with two forward passes of a few examples, and switches the stock division back on where it is needed, only
there.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.changes import Change

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

    from hf_memopt.binding.callback_binding import Binding

__all__ = ["attach", "record_changes", "refuse_data_parallel", "used_columns"]

logger = logging.getLogger(__name__)

PROBE_EXAMPLES = 4
CHANGES = "memopt_changes"  # the attribute of the trainer that tells what attach changed
# Purposes of what attach puts over a trainer's methods for good.
PROBES, RESTORES_ORDER, KEEPS_COLUMNS = "gradient scale", "dataset order", "used columns"


def attach(trainer: Trainer, *callbacks: TrainerCallback) -> Trainer:
    """Add and bind callbacks, check that data, collator and arguments fit, repair the gradient scale; return the
    trainer.

    Call it once the Trainer is built and before ``trainer.train()``, in every process of the run; calling it again is
    harmless. What it changed stands in ``trainer.memopt_changes``, a tuple of ``Change``; a stream is probed with its
    first batch, so there it is complete after the first step. A repaired scale weighs the micro-batches of a step
    equally, however many labels each has.

    All of it belongs to this one trainer. A deep copy or an unpickled one is not attached: callbacks that need it
    refuse to train until ``attach(copy)``. A shallow copy shares everything, as in stock. A callback serves one trainer
    at a time.

    Raises:
        RuntimeError: several GPUs in one process (``torch.nn.DataParallel``).
        TypeError: ``trainer`` is not a Trainer, or a callback is not an instance of ``TrainerCallback``.
        ValueError: data view, collator and arguments do not fit each other, two techniques or a technique and a
            setting cannot work together (``hf_memopt.binding.conflicts``), fp16 training of float16 weights, or a
            callback is attached to another Trainer.
    """
    _check_types(trainer, callbacks)
    refuse_data_parallel(trainer.args.n_gpu)
    check_compatibility(trainer, *callbacks)
    for callback in (*trainer.callback_handler.callbacks, *callbacks):
        if (binding := _binding_of(callback)) is not None:
            binding.refuse_another(callback, trainer)
    for part in (trainer.train_dataset, trainer.compute_loss_func):
        bind_part = getattr(part, "bind_trainer", None)
        if bind_part is not None:
            record_changes(trainer, bind_part(trainer))
    _bind_training_data(trainer)
    _bind_evaluation(trainer)
    _check_master_weights(trainer)
    adapt = getattr(trainer.data_collator, "adapt", None)
    record_changes(trainer, () if adapt is None else adapt(trainer.model))
    for callback in callbacks:
        if callback not in trainer.callback_handler.callbacks:
            trainer.add_callback(callback)
    _repair_gradient_scale(trainer)  # before any callback is bound: a memory report begins to measure there
    outermost_last = sorted(trainer.callback_handler.callbacks, key=lambda callback: hasattr(callback, "binds_last"))
    for callback in outermost_last:
        bind = getattr(callback, "bind", None)
        if bind is not None:
            bind(trainer)
        if (binding := _binding_of(callback)) is not None and binding.trainer is not trainer:
            binding.to(trainer)
    return trainer


def _binding_of(callback: Any) -> Binding | None:
    from hf_memopt.binding.callback_binding import Binding

    binding = getattr(callback, "binding", None)
    return binding if isinstance(binding, Binding) else None


def _check_types(trainer: Any, callbacks: Iterable[Any]) -> None:
    from transformers import Trainer, TrainerCallback

    if not isinstance(trainer, Trainer):
        inside = [name for name, value in _attributes(trainer).items() if isinstance(value, Trainer)]
        raise TypeError(
            f"trainer={_named(trainer)} is not a transformers.Trainer; expected the Trainer that trains. "
            + (f"Pass the one inside it: attach(trainer.{inside[0]})" if inside else "Call attach(Trainer(model, ...))")
        )
    for callback in callbacks:
        if not isinstance(callback, TrainerCallback):
            name = callback.__name__ if isinstance(callback, type) else "MemoryReportCallback"
            raise TypeError(
                f"callbacks={_named(callback)} is not a TrainerCallback; expected instances. "
                f"Call attach(trainer, {name}(...))"
            )


def _attributes(value: Any) -> dict[str, Any]:
    return {} if isinstance(value, type) else getattr(value, "__dict__", {})


def _named(value: Any) -> str:
    return f"<class {value.__name__}>" if isinstance(value, type) else f"<{type(value).__name__}>"


def refuse_data_parallel(n_gpu: int) -> None:
    """Raise RuntimeError where the Trainer would put one process on several GPUs (``torch.nn.DataParallel``)."""
    if n_gpu > 1:
        raise RuntimeError(
            f"n_gpu={n_gpu} GPUs are visible to this one process, so the Trainer would use torch.nn.DataParallel; "
            f"expected one process per GPU. Launch: torchrun --nproc_per_node={n_gpu} your_script.py (or show it one "
            "GPU only: CUDA_VISIBLE_DEVICES=0 python your_script.py)"
        )


def used_columns(trainer: Any) -> set[str] | None:
    """Return the columns that stock leaves to the collator, None for all: what the model takes and the labels, and
    what a subclass adds to them.

    Asking fills stock's cache, which is put back, since the model may be another one when training begins.
    """
    if not trainer.args.remove_unused_columns:
        return None
    # `_set_signature_columns_if_needed` fills `_signature_columns`, and subclasses override it (5.8.1 to 5.23.0; pinned
    # by a test).
    fill = getattr(trainer, "_set_signature_columns_if_needed", None)
    if fill is None:
        model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
        return {*inspect.signature(model.forward).parameters, *trainer.label_names, "label", "label_ids"}
    cached = trainer._signature_columns
    trainer._signature_columns = copy.copy(cached)  # a subclass may append to it
    try:
        fill()
        return set(trainer._signature_columns)
    finally:
        trainer._signature_columns = cached


def _check_master_weights(trainer: Any) -> None:
    import torch

    if not trainer.args.fp16 or trainer.is_deepspeed_enabled:  # DeepSpeed keeps float32 masters of its own
        return
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"fp16=True cannot train {name}, whose weights are float16 already (no gradient could be unscaled); "
                "expected float32 weights. Load with: from_pretrained(..., dtype=torch.float32)"
            )


def record_changes(trainer: Any, changes: Iterable[Change]) -> None:
    """Append changes to those that are known of this trainer, ``trainer.memopt_changes``."""
    known = getattr(trainer, CHANGES, ())
    setattr(trainer, CHANGES, (*known, *(change for change in changes if change not in known)))


def _bind_training_data(trainer: Any) -> None:
    """Let a view or stream leave unused columns unread: now, and as they are when stock decides on them too."""
    from hf_memopt.binding.handles import is_overridden, override_method

    def keep_columns() -> None:
        keep = getattr(trainer.train_dataset, "keep_columns", None)
        if keep is not None:
            keep(used_columns(trainer))

    def keeping(before: Callable[..., Any]) -> Callable[..., Any]:
        def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
            keep_columns()
            return before(*args, **kwargs)

        return get_train_dataloader

    keep_columns()
    if hasattr(trainer.train_dataset, "keep_columns") and not is_overridden(
        trainer, "get_train_dataloader", KEEPS_COLUMNS
    ):
        override_method(trainer, "get_train_dataloader", keeping, purpose=KEEPS_COLUMNS)


def _bind_evaluation(trainer: Any) -> None:
    """Let a sorted evaluation view put results back into its dataset's order, in evaluate and in predict, and refuse
    the views that are for training alone.

    ``evaluation_loop``, which both share, is public and meant to be overridden; here only on this instance.
    """
    evaluated = trainer.eval_dataset
    for dataset in evaluated.values() if isinstance(evaluated, dict) else (evaluated,):
        _check_evaluation(trainer, dataset)
    from hf_memopt.binding.handles import is_overridden, override_method

    if is_overridden(trainer, "evaluation_loop", RESTORES_ORDER):
        return

    def in_order(before: Callable[..., Any]) -> Callable[..., Any]:
        def evaluation_loop(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            dataset = getattr(dataloader, "dataset", None)
            _check_evaluation(trainer, dataset)
            evaluate = getattr(dataset, "evaluate_in_order", None)
            if evaluate is None:
                return before(dataloader, *args, **kwargs)
            return evaluate(trainer, before, dataloader, *args, **kwargs)

        return evaluation_loop

    def checking(before: Callable[..., Any]) -> Callable[..., Any]:
        def get_dataloader(*args: Any, **kwargs: Any) -> Any:
            for dataset in (*args, *kwargs.values()):  # before a sampler reads it
                _check_evaluation(trainer, dataset)
            return before(*args, **kwargs)

        return get_dataloader

    for name in ("get_eval_dataloader", "get_test_dataloader"):
        override_method(trainer, name, checking)
    override_method(trainer, "evaluation_loop", in_order, purpose=RESTORES_ORDER)


def _check_evaluation(trainer: Any, dataset: Any) -> None:
    check = getattr(dataset, "check_evaluation", None)
    if check is not None:
        check(trainer)


# ---- Gradient scale -------------------------------------------------------------------------------------------------


def _repair_gradient_scale(trainer: Any) -> None:
    """Switch stock's own division by accumulation steps back on where the head ignores ``num_items_in_batch``."""
    if not trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
        return  # stock divides already, or the user's own loss counts
    parameters = inspect.signature(trainer.compute_loss).parameters.values()
    if not any(p.name == "num_items_in_batch" or p.kind is p.VAR_KEYWORD for p in parameters):
        return  # a subclass that calls its own compute_loss its own way
    dataset = trainer.train_dataset
    if dataset is None:
        return
    if _is_stream(dataset) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        _probe_at_first_step(trainer)
    elif len(dataset) > 0:
        _probe(trainer, trainer.model, lambda: _first_batch(trainer), stacklevel=4)


def _is_stream(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _probe_at_first_step(trainer: Any) -> None:
    """Probe with the first real batch: reading a stream beforehand could lose examples, and FSDP and DeepSpeed give
    the model its weights only when training begins.
    """
    from hf_memopt.binding.handles import is_overridden, override_method

    if is_overridden(trainer, "training_step", PROBES):
        return

    def probing(before: Callable[..., Any]) -> Callable[..., Any]:
        def probing_step(model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            handle.remove()
            _probe(trainer, model, lambda: inputs, stacklevel=4)
            return before(model, inputs, *args, **kwargs)

        return probing_step

    handle = override_method(trainer, "training_step", probing, purpose=PROBES)


def _probe(trainer: Any, model: nn.Module, read_batch: Callable[[], Any], *, stacklevel: int) -> None:
    """Repair the scale if a few rows of the batch show that the head ignores the count; warn if they do not tell."""
    from hf_memopt.binding.probing import undisturbed

    ignores, finding = False, ""
    with undisturbed(trainer, model):
        try:
            ignores, finding = _head_ignores_item_count(trainer, model, _first_rows(read_batch(), _most_rows(trainer)))
        except Exception as error:  # whatever the user's data, collator, model or compute_loss raise
            finding = f"{type(error).__name__}: {error}"
    if _any_process(trainer, ignores):
        # A public attribute, named in stock's docstring and read live at every step (5.8.1, 5.17.0, 5.23.0; pinned by
        # a test).
        trainer.model_accepts_loss_kwargs = False
        reason = (
            f"the loss of {type(trainer.model).__name__} ignores num_items_in_batch, so stock would multiply its "
            "gradients by accumulation steps x processes"
        )
        change = Change("model_accepts_loss_kwargs", True, False, reason)
        logger.info("%s", change)
        record_changes(trainer, (change,))
    elif finding:
        warnings.warn(
            f"attach could not find out whether the loss of {type(trainer.model).__name__} is normalised by "
            f"num_items_in_batch ({finding}); its gradients may be multiplied by the accumulation steps. If the loss "
            "is a mean over the batch, set: trainer.model_accepts_loss_kwargs = False",
            stacklevel=stacklevel,
        )


def _any_process(trainer: Any, ignores: bool) -> bool:
    """Give all processes one answer: those that count items wait for each other, so two answers would hang."""
    import torch

    if trainer.args.world_size == 1:
        return ignores
    votes = trainer.accelerator.gather(torch.tensor([int(ignores)], device=trainer.args.device))
    return bool(votes.any())


def _head_ignores_item_count(trainer: Any, model: nn.Module, batch: Mapping[str, Any]) -> tuple[bool, str]:
    """Tell whether the loss stays the same when twice as many items are announced, and what was found if unclear."""
    import torch
    from accelerate.utils import send_to_device

    if not isinstance(batch, Mapping) or not torch.is_tensor(batch.get("labels")):
        return False, ""  # stock counts no items then, and divides by itself
    losses = []
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for items in (8, 16):
            inputs = send_to_device(dict(batch), trainer.args.device)
            count = torch.tensor(items, device=trainer.args.device)
            losses.append(float(trainer.compute_loss(model, inputs, num_items_in_batch=count)))
    one, half = losses
    if one != 0 and math.isclose(one, half, rel_tol=1e-3):
        return True, ""
    if one != 0 and math.isclose(one, 2 * half, rel_tol=1e-2):  # bfloat16 has 8 bits
        return False, ""
    return False, f"it was {one:.4g} for 8 items and {half:.4g} for 16"


def _most_rows(trainer: Any) -> int:
    """Return how many rows to probe: never more than a training step holds, so the probe needs no more memory."""
    most: int = min(PROBE_EXAMPLES, trainer.args.per_device_train_batch_size)
    return most


def _first_batch(trainer: Any) -> Any:
    """Collate the first examples as the Trainer will, without the columns that it removes."""
    dataset = trainer.train_dataset
    rows = [dataset[0]]
    if isinstance(rows[0], Mapping):  # else it is a whole batch
        rows += [dataset[i] for i in range(1, min(_most_rows(trainer), len(dataset)))]
    known = used_columns(trainer)
    if known is not None:
        rows = [{k: v for k, v in row.items() if k in known} if isinstance(row, Mapping) else row for row in rows]
    return trainer.data_collator(rows)


def _first_rows(inputs: Any, rows: int) -> Any:
    """Return copies of the first rows of all tensors that have as many rows as the labels, and the rest as it is."""
    import torch

    if not isinstance(inputs, Mapping):
        return inputs
    labels = inputs.get("labels")
    batch = labels.shape[0] if torch.is_tensor(labels) and labels.dim() > 0 else None
    return {
        key: value[:rows].clone() if torch.is_tensor(value) and value.shape[:1] == (batch,) else value
        for key, value in inputs.items()
    }
