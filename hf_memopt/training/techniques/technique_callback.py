"""What the callbacks of techniques share: the trainer they serve, the handles of what they changed, what a copy is."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_memopt.changes import Change, add_change, record_changes
from hf_memopt.training.binding import Binding, bind_late, note_trainer
from hf_memopt.training.binding.compatibility import check_compatibility
from hf_memopt.training.binding.undo import UndoHandle, remove_all, undo_all

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

logger = logging.getLogger(__name__)


class ModelHandles:
    """The handles of all changes to the last model (or optimizer) of a callback, which is not kept alive.

    ``model_init`` gives a Trainer a new model for each run. The changes to a former model are not undone by this: they
    stay with it.
    """

    def __init__(self) -> None:
        self._model: Callable[[], Any] = lambda: None
        self._handles: list[UndoHandle] = []

    @property
    def model(self) -> Any:
        """The last model; None before the first, or if it is gone."""
        return self._model()

    def keep(self, model: Any, *handles: UndoHandle) -> UndoHandle:
        """Add handles of changes to a model; return one that undoes all changes to it, the last first."""
        if self._model() is not model:
            self._model, self._handles = weakref.ref(model), []
        self._handles += handles
        return UndoHandle(partial(remove_all, self._handles))

    def remove(self) -> None:
        """Undo all changes to the last model."""
        remove_all(self._handles)

    def handle_of(self, trainer: Trainer, *, only_later: bool = False) -> UndoHandle:
        """Return a handle that undoes all changes to the last model if it is this Trainer's: the one that it has now,
        unless ``only_later``, or one that ``model_init`` gives it later.
        """
        reference, now = weakref.ref(trainer), weakref.ref(trainer.model)

        def undo() -> None:
            last = self._model()
            is_now, owner = last is now(), reference()
            if last is not None and (not only_later if is_now else owner is not None and last is owner.model):
                self.remove()

        return UndoHandle(undo)


class TechniqueCallback(TrainerCallback):
    """A callback that serves one trainer at a time, and binds itself to the one that it is passed to. A copy has the
    same arguments and starts unused, since handles belong to this process, its trainer and its model.
    """

    technique = ""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._copied = partial(type(self), *given, **named)
        self.binding = Binding()  # to the trainer, once attach has bound it
        self.changes: list[Change] = []  # what was changed, one per kind
        self.handle: UndoHandle | None = None  # undoes what was changed last
        self._handles = ModelHandles()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copied, ()

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Belong to this trainer; ``attach`` calls it. The handle undoes what training changes in its model, too."""
        return undo_all(self.binding.to(trainer), self._handles.handle_of(trainer))

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the Trainer that is being built attach itself before it is first used."""
        note_trainer(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Be bound by now, where the Trainer was built without this callback or is a copy."""
        bind_late(self, state)

    def is_in(self, trainer: Trainer) -> bool:
        """Return whether a trainer has it still: stock's ``remove_callback`` unbinds nothing."""
        return any(one is self for one in trainer.callback_handler.callbacks)

    def note(self, *changes: Change, logs: bool = True) -> None:
        """Add changes that are new to ``changes`` and to those of the trainer, and log them."""
        for change in changes:
            if add_change(self.changes, change) and logs:
                logger.info("%s changed %s", type(self).__name__, change)
        if (trainer := self.binding.trainer) is not None:
            record_changes(trainer, changes)


class BoundCallback(TechniqueCallback):
    """A callback that overrides methods of a Trainer, and refuses to train unbound or beside what is incompatible."""

    def change_trainer(self, trainer: Trainer) -> Iterable[UndoHandle]:
        """Override what has to be; return the handles of that."""
        raise NotImplementedError

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Change this trainer, once; ``attach`` calls it."""
        if self.binding.trainer is not trainer:
            self.handle = self.binding.to(trainer, *self.change_trainer(trainer))
            record_changes(trainer, self.changes)
        return self.binding.handle

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound, and settings that are incompatible."""
        super().on_train_begin(args, state, control, **kwargs)
        check_compatibility(self.binding.serving(self, state))


class ModelCallback(TechniqueCallback):
    """A callback that changes the model of a Trainer when that is built or attached, and again when training begins
    with another one.
    """

    def change_model(self, model: Any, args: TrainingArguments) -> None:
        """Change the model of a Trainer with these arguments, and keep the handles of that."""
        raise NotImplementedError

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Change the model that the Trainer was given."""
        super().on_init_end(args, state, control)
        self.change_model(model, args)

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Change the model of a Trainer that was built without this callback; ``attach`` calls it."""
        is_changed = self._handles.model is trainer.model  # since the Trainer was built
        self.change_model(trainer.model, trainer.args)
        bound = self.binding.to(trainer)
        record_changes(trainer, self.changes)
        return undo_all(bound, self._handles.handle_of(trainer, only_later=is_changed))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Change a model that is new, and not one that only a wrapper (FSDP1, compile) is around."""
        super().on_train_begin(args, state, control)
        changed = self._handles.model
        if not any(module is changed for module in model.modules()):
            self.change_model(model, args)
