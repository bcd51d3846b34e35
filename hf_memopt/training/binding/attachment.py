"""``attach``: bind callbacks, data views and collator to one ``Trainer``, and check that they fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.changes import CHANGES
from hf_memopt.training.binding.callback_binding import Binding
from hf_memopt.training.binding.compatibility import check_compatibility
from hf_memopt.training.binding.first_use import stop_waiting
from hf_memopt.training.binding.losses import repair_gradient_scale
from hf_memopt.training.binding.model import used_columns
from hf_memopt.training.binding.protocols import AttachedCallback, AttachedPart, EvaluationView, TrainingView
from hf_memopt.training.binding.undo import (
    UndoHandle,
    is_overridden,
    override_method,
    remove_all,
    set_attribute,
    undo_all,
)
from hf_memopt.training.binding.versions import mixed_precision

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

KEEPS_SCALE = "keeps_gradient_scale"  # the attribute of a callback beside which nothing is repaired
HANDLE = "memopt_handle"  # the attribute of a trainer whose ``remove()`` undoes ``attach``
# Purposes of what attach puts over a trainer's methods.
RESTORES_ORDER, KEEPS_COLUMNS, CHECKS = "dataset order", "used columns", "compatibility"


def attach(trainer: Trainer, *callbacks: TrainerCallback) -> Trainer:
    """Add and bind callbacks, check that data, collator and arguments fit, repair the gradient scale.

    Call it once the Trainer is built and before ``trainer.train()``, in every process of the run; calling it again is
    harmless. Callbacks in ``Trainer(callbacks=...)`` do the same by themselves before the Trainer is first used
    (``passed_parts``). Nothing of the data is read. Each decision is a ``Change`` in the tuple
    ``trainer.memopt_changes``; losses of parts of a batch are compared in the first step that accumulates, so the list
    is complete after that. A repaired scale weighs the accumulation steps of an optimizer step equally, however many
    labels each has.

    Each checkpoint gets a manifest, and a run resumes from whole checkpoints only (``checkpoint_manifest``):
    ``resume_from_checkpoint=True`` means the last whole one, and one that is asked for and is not whole raises.

    All of it belongs to this one trainer, and ``trainer.memopt_handle.remove()`` undoes it (not while it trains):
    callbacks that were added are removed, all are unbound, and dataset, collator, loss and arguments are as before; so
    is the model, with what callbacks in ``callbacks=`` changed when the Trainer was built. A deep copy or an unpickled
    trainer is attached when it begins to train, or refuses to where that is too late for one of its callbacks. A
    shallow copy shares everything, as in stock. A callback serves one trainer at a time.

    Args:
        trainer: a ``transformers.Trainer`` or an instance of a subclass.
        callbacks: to be added, unless the trainer has them already.

    Raises:
        RuntimeError: several GPUs in one process (``torch.nn.DataParallel``).
        TypeError: ``trainer`` is not a Trainer, or a callback is not an instance of ``TrainerCallback``.
        ValueError: data view, collator and arguments do not fit each other, two techniques or a technique and a
            setting are incompatible (``binding.compatibility``), fp16 training of float16 weights, or a callback is
            attached to another Trainer. The trainer is as before then.
    """
    from hf_memopt.training.binding.checkpoint_manifest import keep_manifests  # imports transformers

    _check_types(trainer, callbacks)
    refuse_data_parallel(trainer.args.n_gpu)
    check_compatibility(trainer, *callbacks)
    for callback in (*trainer.callback_handler.callbacks, *callbacks):
        if (binding := _binding_of(callback)) is not None:
            binding.refuse_another(callback, trainer)
    evaluated = trainer.eval_dataset
    for dataset in evaluated.values() if isinstance(evaluated, dict) else (evaluated,):
        _check_evaluation(trainer, dataset)
    with kept_handles(trainer) as handles:
        for part in parts_of(trainer):
            if isinstance(part, AttachedPart):
                handles.append(part.bind_trainer(trainer))
        handles += [_keep_used_columns(trainer), _evaluate_in_order(trainer)]
        for callback in callbacks:
            if callback not in trainer.callback_handler.callbacks:
                trainer.add_callback(callback)
                handles.append(UndoHandle(partial(trainer.pop_callback, callback)))  # no error if it is gone
        if not any(hasattr(one, KEEPS_SCALE) for one in trainer.callback_handler.callbacks):
            handles.append(repair_gradient_scale(trainer))  # first: a memory report begins to measure when bound
        for callback in sorted(trainer.callback_handler.callbacks, key=_is_outermost):
            if isinstance(callback, AttachedCallback):
                is_new = (binding := _binding_of(callback)) is None or binding.trainer is not trainer
                handle = callback.bind(trainer)
                if is_new:
                    handles.append(handle)
                else:  # stays, whatever comes
                    _keep_handles(trainer, [handle])
        handles.append(_check_each_run(trainer))
        _check_master_weights(trainer)  # now, as a PrecisionCallback has made float32 of them
        handles.append(keep_manifests(trainer))  # outermost: the others are told what is resumed from
    return trainer


@contextmanager
def kept_handles(trainer: Any) -> Iterator[list[UndoHandle]]:
    """Give a list for the handles of what is done to a trainer; ``memopt_handle`` removes them, or an error does."""
    handles = [set_attribute(trainer, CHANGES, getattr(trainer, CHANGES, ()))]
    try:
        yield handles
    except BaseException:
        remove_all(handles)
        raise
    given = [getattr(callback, "handle", None) for callback in trainer.callback_handler.callbacks]
    earlier = [handle for handle in given if isinstance(handle, UndoHandle)]  # of what they changed before, too
    _keep_handles(trainer, [*earlier, *handles])
    stop_waiting(trainer)


def parts_of(trainer: Any) -> tuple[Any, ...]:
    """Return what may adapt itself to a trainer: its training dataset, loss function, collator, optimizer class."""
    _, arguments = trainer.optimizer_cls_and_kwargs or (None, None)
    return trainer.train_dataset, trainer.compute_loss_func, trainer.data_collator, arguments


def _keep_handles(trainer: Trainer, handles: list[UndoHandle]) -> None:
    """Add handles to those that ``trainer.memopt_handle`` removes."""
    earlier = getattr(trainer, HANDLE, None)
    if handles:
        setattr(trainer, HANDLE, undo_all(*([] if earlier is None else [earlier]), *handles))


def _is_outermost(callback: TrainerCallback) -> bool:
    """Return whether a callback's overrides must be around all others: detection sees what the Trainer sees."""
    return getattr(callback, "technique", None) == "non-finite detection"


def _binding_of(callback: Any) -> Binding | None:
    binding = getattr(callback, "binding", None)
    return binding if isinstance(binding, Binding) else None


def _check_types(trainer: Any, callbacks: Iterable[Any]) -> None:
    from transformers import Trainer, TrainerCallback

    if not isinstance(trainer, Trainer):
        inside = [name for name, value in getattr(trainer, "__dict__", {}).items() if isinstance(value, Trainer)]
        raise TypeError(
            f"trainer={_named(trainer)} is not a transformers.Trainer; expected the Trainer that trains. "
            + (f"Pass the one inside it: attach(trainer.{inside[0]})" if inside else "Call attach(Trainer(model, ...))")
        )
    for callback in callbacks:
        if not isinstance(callback, TrainerCallback):
            name = callback.__name__ if isinstance(callback, type) else "MemoryReportCallback"
            call = "*callbacks" if isinstance(callback, (list, tuple)) else f"{name}(...)"
            raise TypeError(
                f"callbacks={_named(callback)} is not a TrainerCallback; expected instances. "
                f"Call attach(trainer, {call})"
            )


def _named(value: Any) -> str:
    return f"<class {value.__name__}>" if isinstance(value, type) else f"<{type(value).__name__}>"


def refuse_data_parallel(n_gpu: int) -> None:
    """Raise RuntimeError where the Trainer would put one process on several GPUs (``torch.nn.DataParallel``)."""
    if n_gpu > 1:
        raise RuntimeError(
            f"n_gpu={n_gpu} GPUs are visible to this one process, so the Trainer would use torch.nn.DataParallel; "
            f"expected one process per GPU. Launch: torchrun --nproc_per_node={n_gpu} your_script.py (or show it one "
            "GPU only: CUDA_VISIBLE_DEVICES=0 python your_script.py; a notebook is restarted and begins with "
            "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0')"
        )


def _check_master_weights(trainer: Any) -> None:
    import torch

    if mixed_precision(trainer.args) != "fp16" or trainer.is_deepspeed_enabled:  # which keeps float32 masters itself
        return
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"fp16=True cannot train {name}, whose weights are float16 already (no gradient could be unscaled); "
                "expected float32 weights. Load with: from_pretrained(..., dtype=torch.float32)"
            )


def _check_saving(trainer: Any) -> None:
    """Refuse a run whose first checkpoint would stop it: ``quantize_experts`` lets nothing but adapters be saved."""
    model, strategy = trainer.model, str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy))
    modules = () if model is None or hasattr(model, "get_base_model") or strategy == "no" else model.modules()
    if any(type(one).__name__ == "ExpertStack" for one in modules):
        raise ValueError(
            f"model=<{type(model).__name__}> has experts in 4 bits and no adapters, and save_strategy={strategy!r} "
            "would save what transformers loads with new random experts; expected adapters. Pass "
            "model=add_adapters(model, 16), or save_strategy='no'"
        )


def _check_each_run(trainer: Any) -> UndoHandle:
    """Refuse what the arguments say by the time of a run: a search for hyperparameters changes them."""
    if is_overridden(trainer, "create_optimizer", CHECKS):
        return undo_all()

    def create_optimizer(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        check_compatibility(trainer)
        _check_saving(trainer)
        return before(*args, **kwargs)

    return override_method(trainer, "create_optimizer", create_optimizer, purpose=CHECKS)


def _keep_used_columns(trainer: Any) -> UndoHandle:
    """Let a view leave unused columns unread: now, and as they are when stock decides on them too."""
    view = trainer.train_dataset
    if not isinstance(view, TrainingView):
        return undo_all()

    def keep_columns() -> None:
        if isinstance(trainer.train_dataset, TrainingView):
            trainer.train_dataset.keep_columns(used_columns(trainer))

    def get_train_dataloader(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        keep_columns()
        return before(*args, **kwargs)

    keep_columns()
    if is_overridden(trainer, "get_train_dataloader", KEEPS_COLUMNS):
        return undo_all()
    override = override_method(trainer, "get_train_dataloader", get_train_dataloader, purpose=KEEPS_COLUMNS)
    return undo_all(UndoHandle(partial(view.keep_columns, None)), override)


def _evaluate_in_order(trainer: Any) -> UndoHandle:
    """Let a sorted evaluation view put results back into its dataset's order, in evaluate and in predict, and refuse
    the views that are for training alone.

    ``evaluation_loop``, which both share, is public and meant to be overridden; here only on this instance.
    """
    if is_overridden(trainer, "evaluation_loop", RESTORES_ORDER):
        return undo_all()

    def evaluation_loop(before: Callable[..., Any], dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        dataset = getattr(dataloader, "dataset", None)
        _check_evaluation(trainer, dataset)
        if not isinstance(dataset, EvaluationView):
            return before(dataloader, *args, **kwargs)
        return dataset.evaluate_in_order(trainer, before, dataloader, *args, **kwargs)

    def get_dataloader(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for dataset in (*args, *kwargs.values()):  # before a sampler reads it
            _check_evaluation(trainer, dataset)
        return before(*args, **kwargs)

    names = ("get_eval_dataloader", "get_test_dataloader")
    checks = [override_method(trainer, name, get_dataloader) for name in names]
    return undo_all(*checks, override_method(trainer, "evaluation_loop", evaluation_loop, purpose=RESTORES_ORDER))


def _check_evaluation(trainer: Any, dataset: Any) -> None:
    if isinstance(dataset, TrainingView | EvaluationView):
        dataset.check_evaluation(trainer)
