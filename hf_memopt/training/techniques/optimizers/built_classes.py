"""Optimizer classes that a technique builds from another class, and what it has to know of that one."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from hf_memopt.plain_data import shown
from hf_memopt.training.binding.undo import UndoHandle, override_method, set_attribute, undo_all

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""Classes of ``torch.optim`` whose update of an element depends on that element and scalars only."""


class BuiltClass(type):
    """The class of classes that a function builds from another class; they are pickled as its call."""


copyreg.pickle(BuiltClass, lambda built: vars(built).get("_built_by", built.__qualname__))


class Built(torch.optim.Optimizer, metaclass=BuiltClass):
    """What the classes that are put before a plain class share."""

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _step_with(self, groups: list[dict[str, Any]], step: Callable[[], Any]) -> None:
        """Run the plain step with other groups."""
        with set_attribute(self, "param_groups", groups):
            step()


@cache
def built_class(kind: Any, plain: Any, **options: Any) -> type:
    """Return a class with the methods of ``kind`` before those of a plain class, always the same, pickled as this call.

    Its module is the plain one's: stock registers 32-bit embeddings where it reads "bitsandbytes" in it. The plain
    step is the attribute that ``kind`` names, since one built class may be the plain one of another.
    """
    own = {
        "__doc__": f"{plain.__name__} {kind.described.format(**options)}",
        "__module__": plain.__module__,
        "_plain_class": plain,
        "_built_by": (partial(built_class, **options), (kind, plain)),
        kind.inner_step: plain_step(plain.step),
    }
    return BuiltClass(f"{kind.prefix}{plain.__name__}", (kind, plain), {**own, **options})


class OptimizerArguments(dict[str, Any]):
    """The arguments of the optimizer that ``TrainingArguments`` name, as ``Trainer(optimizer_cls_and_kwargs=)`` takes.

    An attached Trainer reads those that have changed since, as a hyperparameter search changes them, when it makes an
    optimizer.
    """

    def __init__(self, args: TrainingArguments, model: Any) -> None:
        from transformers import Trainer

        self.named, read = Trainer.get_optimizer_cls_and_kwargs(args, model)
        super().__init__(read)
        self._read = _plain_values(read)

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Follow a Trainer's arguments; ``attach`` calls it."""

        def create_optimizer(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if trainer.optimizer is None:
                self._follow(trainer)
            return before(*args, **kwargs)

        def train(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            _pause(trainer.optimizer, False)
            try:
                return before(*args, **kwargs)
            finally:
                _pause(trainer.optimizer, True)

        return undo_all(
            override_method(trainer, "create_optimizer", create_optimizer), override_method(trainer, "train", train)
        )

    def _follow(self, trainer: Any) -> None:
        named, read = type(trainer).get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        if named is not self.named:
            raise ValueError(
                f"optim={str(getattr(trainer.args.optim, 'value', trainer.args.optim))!r} names {class_name(named)}, "
                f"and the Trainer has a class that was made of {class_name(self.named)}; expected the one that its "
                "arguments name, in all runs. Make the class of args=trainer.args, or leave optim as it was"
            )
        now = _plain_values(read)
        self.update({name: value for name, value in now.items() if self._read.get(name) != value})
        # parameters of the model that is trained now; stock takes them out again
        self.update({name: value for name, value in read.items() if name not in now})
        self._read = now


def _pause(optimizer: Any, is_paused: bool) -> None:
    """Let a released optimizer step within backward passes of its own runs only."""
    pause = getattr(getattr(optimizer, "optimizer", optimizer), "pause", None)
    if pause is not None:
        pause(is_paused)


def _plain_values(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are no tensors or modules, as of optimizers by layer."""
    kinds = (int, float, str, tuple, type(None))
    return {name: value for name, value in arguments.items() if isinstance(value, kinds)}


def check_is_class(optimizer_class: Any, fix: str) -> None:
    """Raise TypeError for what is no class of optimizers."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"optimizer_class={shown(optimizer_class)} is not a class of optimizers; expected a subclass of "
            f"torch.optim.Optimizer. {fix}"
        )


def class_name(optimizer_class: type) -> str:
    """Return the name of a class with its module, for an error."""
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def plain_step(step: Any) -> Any:
    """Return the step of an optimizer class without the wrapper in which torch runs step hooks.

    ``hooked``, its mark, is not a private name but undocumented: seen in torch 2.13.
    """
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def steps_alone(optimizer_class: Any) -> bool:
    """Return whether the step of a class is known to treat each parameter by itself."""
    from transformers.optimization import Adafactor

    optimizer_class = getattr(optimizer_class, "_plain_class", optimizer_class)  # of 16-bit weights
    of_torch = (getattr(torch.optim, name) for name in (*ELEMENTWISE, "Adafactor"))
    known = {plain_step(kind.step) for kind in (Optimizer8bit, Adafactor, *of_torch)}
    return plain_step(optimizer_class.step) in known
