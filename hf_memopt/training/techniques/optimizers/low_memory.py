"""An optimizer that frees each gradient at once, or keeps bfloat16 weights learning, or both: one function for all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_memopt.plain_data import check_value, check_word
from hf_memopt.training.binding.compatibility import check_settings
from hf_memopt.training.techniques.optimizers import gradient_release as released
from hf_memopt.training.techniques.optimizers import sixteen_bit_weights as rounded
from hf_memopt.training.techniques.optimizers.built_classes import OptimizerArguments

if TYPE_CHECKING:
    from transformers import TrainingArguments

Rounding = Literal["nearest", "stochastic", "kahan"]


def low_memory_optimizer(
    optimizer: TrainingArguments | type[torch.optim.Optimizer],
    model: Any = None,
    *,
    release: bool = False,
    rounding: Rounding = "nearest",
    max_tensor_norm: float | None = None,
    trust: bool = False,
) -> Any:
    """Return an optimizer class that steps in the backward pass, or that trains bfloat16 weights.

    Of ``TrainingArguments`` it returns what ``Trainer(optimizer_cls_and_kwargs=...)`` takes: the class that they name,
    changed, and its arguments. Stock's defaults need one change for ``release``: ``max_grad_norm=0``. An attached
    Trainer reads the arguments again for each run, as those of a hyperparameter search.

    Args:
        optimizer: the arguments of the Trainer, or an optimizer class of torch or bitsandbytes.
        model: of the Trainer, where arguments are given; GaLore's and APOLLO's names choose its modules.
        release: step each parameter, and free its gradient, as soon as the backward pass has it: ``gradient_release``.
        rounding: of bfloat16 weights: ``"stochastic"`` or ``"kahan"`` as ``sixteen_bit_optimizer`` has them, or
            ``"nearest"`` as the plain class rounds.
        max_tensor_norm: with ``release``, clip each parameter's gradient by itself to this L2 norm.
        trust: with ``release``, accept a class that is not known (GaLore, APOLLO, torchao).

    Returns:
        A class; of arguments the class and its keyword arguments.

    Raises:
        TypeError: ``optimizer`` is neither arguments nor a class of optimizers.
        ValueError: nothing is asked for; a setting of the arguments cannot work with it; or as ``gradient_release`` and
            ``sixteen_bit_optimizer`` do.

    Examples:
        >>> from transformers import TrainingArguments
        >>> args = TrainingArguments(optim="adamw_torch", max_grad_norm=0, learning_rate=2e-5)
        >>> released, kwargs = low_memory_optimizer(args, torch.nn.Linear(2, 2), release=True)
        >>> released.__name__, kwargs["lr"], kwargs["betas"]
        ('ReleasedAdamW', 2e-05, (0.9, 0.999))
        >>> low_memory_optimizer(torch.optim.AdamW, rounding="kahan").__name__
        'SixteenBitAdamW'
    """
    check_value("release", release, bool, True)
    check_word("rounding", rounding, ("nearest", "stochastic", "kahan"))
    if not release and rounding == "nearest":
        raise ValueError(
            "release=False and rounding='nearest' leave the optimizer as it is; expected one of them. Pass "
            "release=True, or for bfloat16 weights rounding='stochastic'"
        )
    from transformers import TrainingArguments

    args: Any = optimizer
    if model is None and not isinstance(args, TrainingArguments):
        return _changed(args, release, rounding, max_tensor_norm, trust)
    for technique, is_asked in ((released.TECHNIQUE, release), (rounded.TECHNIQUE, rounding != "nearest")):
        if is_asked:
            check_settings(technique, args)
    kwargs = OptimizerArguments(args, model)
    return _changed(kwargs.named, release, rounding, max_tensor_norm, trust), kwargs


def _changed(kind: Any, release: bool, rounding: Rounding, max_tensor_norm: float | None, trust: bool) -> Any:
    if rounding != "nearest":
        kind = rounded.sixteen_bit_optimizer(kind, rounding)
    return released.gradient_release(kind, max_tensor_norm=max_tensor_norm, trust=trust) if release else kind


# the names of before, until the next version
released_optimizer = partial(low_memory_optimizer, release=True)
rounded_optimizer = partial(low_memory_optimizer, rounding="stochastic")
