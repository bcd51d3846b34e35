"""``attach``: bind callbacks, data views and collator to one ``Trainer``, and check that they fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.gradient_scale import repair_gradient_scale
from hf_memopt.binding.model_traits import used_columns
from hf_memopt.changes import record_changes

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from hf_memopt.binding.callback_binding import Binding

__all__ = ["attach", "refuse_data_parallel"]

# Purposes of what attach puts over a trainer's methods.
RESTORES_ORDER, KEEPS_COLUMNS = "dataset order", "used columns"


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
    repair_gradient_scale(trainer)  # before any callback is bound: a memory report begins to measure there
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
