"""What ``attach`` calls on the parts of a ``Trainer``: implement one of these to have a part of your own attached.

The classes of this package do not inherit from them; any object that has the members is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import Trainer
    from transformers.trainer_utils import EvalLoopOutput

    from hf_memopt.training.binding.undo import UndoHandle


@runtime_checkable
class AttachedCallback(Protocol):
    """A ``TrainerCallback`` that needs the ``Trainer`` itself, not only what the events pass to it.

    A callback may also have ``binding``, a ``Binding``: ``attach`` then refuses to bind it to a second trainer; and
    ``technique``, its name in ``techniques.TECHNIQUES``, by which ``attach`` refuses what it cannot be used with.
    """

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Work for this trainer from now on; return the handle that ends it. A second call replaces the first."""


@runtime_checkable
class AttachedPart(Protocol):
    """A training dataset, a loss function or a data collator that adapts itself, or the trainer, to the other."""

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Adapt to this trainer, with ``record_changes`` for each decision; return the handle that undoes it.

        Raises:
            ValueError: the trainer's arguments or its other parts do not fit; nothing has been changed then.
        """


@runtime_checkable
class TrainingView(AttachedPart, Protocol):
    """A training dataset that can leave columns unread and must not be evaluated."""

    def keep_columns(self, names: Iterable[str] | None) -> None:
        """Read only these columns from now on; None: all of them."""

    def check_evaluation(self, trainer: Trainer) -> None:
        """Raise ValueError if ``trainer`` cannot evaluate this dataset."""


@runtime_checkable
class EvaluationView(Protocol):
    """An evaluation dataset in an order of its own, which puts the results back into that of the data."""

    def check_evaluation(self, trainer: Trainer) -> None:
        """Raise ValueError if ``trainer`` cannot evaluate this dataset."""

    def evaluate_in_order(
        self,
        trainer: Trainer,
        evaluation_loop: Callable[..., EvalLoopOutput],
        dataloader: DataLoader[Any],
        *args: Any,
        **kwargs: Any,
    ) -> EvalLoopOutput:
        """Call ``evaluation_loop(dataloader, *args, **kwargs)`` and return its output in the order of the data."""
