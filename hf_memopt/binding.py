"""Bind what needs the ``Trainer`` itself, check that its pieces fit each other, and repair stock's gradient scale.

Stock transformers 5.x multiplies the gradients of a head that ignores ``num_items_in_batch`` (BERT classification, T5,
...) by accumulation steps times processes: it leaves the division to a head that never does it. ``attach`` asks the
head itself, with two forward passes of a few examples, and switches the stock division back on where it is needed, only
there.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hf_memopt.changes import Change
from hf_memopt.compatibility import check_compatibility

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

__all__ = ["attach", "record_changes", "refuse_data_parallel", "unbound_error", "used_columns"]

logger = logging.getLogger(__name__)

PROBE_EXAMPLES = 4
CHANGES = "memopt_changes"  # the attribute of the trainer that tells what attach changed
PROBES = "memopt_probes_gradient_scale"  # set on a trainer whose first step attach probes
RESTORES_ORDER = "memopt_restores_order"  # set on a trainer whose evaluation_loop attach has wrapped


def attach(trainer: Trainer, *callbacks: TrainerCallback) -> Trainer:
    """Add and bind callbacks, check that data, collator and arguments fit, repair the gradient scale; return the
    trainer.

    Call it once the Trainer is built and before ``trainer.train()``, in every process of the run; calling it again is
    harmless. What it changed stands in ``trainer.memopt_changes``, a tuple of ``Change``; a stream is probed with its
    first batch, so there it is complete after the first step. A repaired scale weighs the micro-batches of a step
    equally, however many labels each has.

    Raises:
        RuntimeError: several GPUs in one process (``torch.nn.DataParallel``).
        ValueError: data view, collator and arguments do not fit each other, two techniques or a technique and a
            setting cannot work together (``hf_memopt.compatibility``), or fp16 training of float16 weights.
    """
    refuse_data_parallel(trainer.args.n_gpu)
    check_compatibility(trainer, *callbacks)
    for part in (trainer.train_dataset, trainer.compute_loss_func):
        bind_part = getattr(part, "bind_trainer", None)
        if bind_part is not None:
            record_changes(trainer, bind_part(trainer))
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
    return trainer


def unbound_error(callback: object) -> RuntimeError:
    """Return the error of a callback that needs the trainer and was only passed in ``callbacks=``."""
    name = type(callback).__name__
    return RuntimeError(
        f"{name} was passed in callbacks= but never bound to its trainer; expected a bound callback. "
        "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
    )


def refuse_data_parallel(n_gpu: int) -> None:
    """Raise RuntimeError where the Trainer would put one process on several GPUs (``torch.nn.DataParallel``)."""
    if n_gpu > 1:
        raise RuntimeError(
            f"n_gpu={n_gpu} GPUs are visible to this one process, so the Trainer would use torch.nn.DataParallel; "
            f"expected one process per GPU. Launch: torchrun --nproc_per_node={n_gpu} your_script.py (or show it one "
            "GPU only: CUDA_VISIBLE_DEVICES=0 python your_script.py)"
        )


def used_columns(trainer: Any) -> set[str] | None:
    """Return the columns that stock leaves to the collator: what the model takes and the labels; None for all."""
    if not trainer.args.remove_unused_columns:
        return None
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    return {*inspect.signature(model.forward).parameters, *trainer.label_names, "label", "label_ids"}


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


def _bind_evaluation(trainer: Any) -> None:
    """Let a sorted evaluation view put results back into its dataset's order, in evaluate and in predict.

    ``evaluation_loop``, which both share, is public and meant to be overridden; here only on this instance.
    """
    evaluated = trainer.eval_dataset
    for dataset in evaluated.values() if isinstance(evaluated, dict) else (evaluated,):
        check = getattr(dataset, "check_evaluation", None)
        if check is not None:
            check(trainer)
    if getattr(trainer, RESTORES_ORDER, False):
        return
    from hf_memopt.undo import override_method

    def in_order(before: Callable[..., Any]) -> Callable[..., Any]:
        def evaluation_loop(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            evaluate = getattr(getattr(dataloader, "dataset", None), "evaluate_in_order", None)
            if evaluate is None:
                return before(dataloader, *args, **kwargs)
            return evaluate(trainer, before, dataloader, *args, **kwargs)

        return evaluation_loop

    override_method(trainer, "evaluation_loop", in_order)
    setattr(trainer, RESTORES_ORDER, True)


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
    from hf_memopt.undo import override_method

    if getattr(trainer, PROBES, False):
        return
    setattr(trainer, PROBES, True)

    def probing(before: Callable[..., Any]) -> Callable[..., Any]:
        def probing_step(model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            handle.remove()
            _probe(trainer, model, lambda: inputs, stacklevel=4)
            return before(model, inputs, *args, **kwargs)

        return probing_step

    handle = override_method(trainer, "training_step", probing)


def _probe(trainer: Any, model: nn.Module, read_batch: Callable[[], Any], *, stacklevel: int) -> None:
    """Repair the scale if a few rows of the batch show that the head ignores the count; warn if they do not tell."""
    from hf_memopt.probing import undisturbed

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
