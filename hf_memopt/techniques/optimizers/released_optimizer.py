"""The released optimizer that ``TrainingArguments`` name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hf_memopt.binding.conflicts import check_settings
from hf_memopt.plain_data import check_word
from hf_memopt.techniques.optimizers.gradient_release import TECHNIQUE, gradient_release
from hf_memopt.techniques.optimizers.sixteen_bit_weights import rounded_optimizer

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["released_optimizer"]


def released_optimizer(
    args: TrainingArguments,
    model: Any,
    *,
    max_tensor_norm: float | None = None,
    trust: bool = False,
    rounding: Literal["nearest", "stochastic", "kahan"] = "nearest",
) -> tuple[Any, dict[str, Any]]:
    """Return the released class of the optimizer that ``TrainingArguments`` name, and its arguments.

    Name, learning rate, betas, epsilon and ``optim_args`` are read as stock does; weight decay is stock's too. Stock's
    defaults need one change: ``max_grad_norm=0``.

    Args:
        args: of the Trainer.
        model: of the Trainer; GaLore's and APOLLO's names choose its modules.
        max_tensor_norm: as in ``gradient_release``.
        trust: as in ``gradient_release``; needed for optimizers of other packages (GaLore, APOLLO, torchao).
        rounding: of 16-bit weights, as in ``sixteen_bit_optimizer``; ``"nearest"`` is what the plain class does.

    Returns:
        What ``Trainer(optimizer_cls_and_kwargs=...)`` takes.

    Raises:
        ValueError: a setting cannot work with it (``hf_memopt.binding.conflicts``), or as ``gradient_release`` and
            ``sixteen_bit_optimizer`` do.

    Examples:
        >>> import torch
        >>> from transformers import TrainingArguments
        >>> args = TrainingArguments(optim="adamw_torch", max_grad_norm=0, learning_rate=2e-5)
        >>> released, kwargs = released_optimizer(args, torch.nn.Linear(2, 2))
        >>> released.__name__, kwargs["lr"], kwargs["betas"]
        ('ReleasedAdamW', 2e-05, (0.9, 0.999))
    """
    from transformers import Trainer

    check_settings(TECHNIQUE, args)
    check_word("rounding", rounding, ("nearest", "stochastic", "kahan"))
    if rounding == "nearest":
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    else:
        optimizer_class, kwargs = rounded_optimizer(args, model, rounding)
    return gradient_release(optimizer_class, max_tensor_norm=max_tensor_norm, trust=trust), kwargs
