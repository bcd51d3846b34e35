"""Train each batch in pieces that fit, exactly, and recover from running out of memory within the step.

The stock ``Trainer`` sees the true batch: its steps, learning rates, order of the data and logged losses are those of
the unsplit run. Inside ``training_step`` the rows are sorted by length, cut by a cap, freed of the padding that a piece
does not need, and run one piece after the other through the ``training_step`` below, each weighted so that the
gradients add up to those of the batch. When memory runs out, the cap goes down and everything since the last optimizer
step is repeated, with the same random numbers: nothing is skipped, nothing counts twice.

The trade: nothing while whole batches fit; under a cap, a few waits for the device per micro-batch (lengths and labels
are counted on the host) and smaller kernels, against less padding.

Between processes (DDP with ``ddp_broadcast_buffers=False, ddp_find_unused_parameters=False``) each process recovers by
itself while the others wait, since gradients are shared only in the backward pass of the last piece; out of memory in
that one pass cannot be repeated and raises.

Limitations: out of memory in the optimizer's step or between steps raises. A loss that is neither a sum nor a mean of
its rows, weighted by rows, labels or another column of the batch, is refused before a batch is cut (see
``loss_weights``; one that is nearly such a mean, within 1e-4 of it, or 3e-3 under autocast, is taken for it). What a
``training_step`` of a subclass adds to the loss of ``compute_loss`` would count once for each part.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.handles import UndoHandle, override_method
from hf_memopt.changes import Change
from hf_memopt.techniques.microbatching.limits import CAPS_FILE, Cap, read_caps, write_caps
from hf_memopt.techniques.microbatching.step import PiecewiseStep
from hf_memopt.whole_files import warn_unwritten

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["MicrobatchCallback"]

logger = logging.getLogger(__name__)


class MicrobatchCallback(TrainerCallback):
    """Run each batch in pieces that fit, and repeat a step that ran out of memory in smaller ones.

    Bind it with ``attach(trainer)``. Evaluation and prediction recover from out of memory too. A checkpoint remembers
    the caps in ``memopt_microbatch.json`` (several processes: those of the one that saves); a resumed run starts with
    them unless ``max_tokens`` or ``max_examples`` differ from the saved run's.

    Args:
        max_tokens: the most padded tokens of a piece, rows times longest row; a longer row is a piece by itself.
            ``"auto"`` runs whole batches until memory runs out.
        max_examples: the most rows of a piece, or None.

    Attributes:
        caps: the caps in force, ``max_tokens`` and ``max_examples``, each a ``Cap``, whose docstring has the rule by
            which it rises again. Batches without a sequence of tokens have the second only.
        changes: each change of a cap, the last one last.
        handle: takes everything off the trainer again; None before ``attach``.

    Raises:
        ValueError: a cap is no whole number from 1 up; at the first step, the model or its loss cannot be split.
        RuntimeError: training began without ``attach``; a ``training_step`` of its own does not call ``compute_loss``.
        torch.OutOfMemoryError: an example does not fit by itself, or memory ran out where several processes share their
            gradients.

    Example:
        >>> MicrobatchCallback(max_tokens=4096).caps["max_tokens"].limit
        4096
    """

    technique = "micro-batching"

    def __init__(self, max_tokens: int | str = "auto", max_examples: int | None = None) -> None:
        if max_tokens != "auto" and not _is_count(max_tokens):
            raise ValueError(
                f"max_tokens={max_tokens!r} is no cap; expected 'auto' or a whole number of padded tokens from 1 up. "
                "Write max_tokens=4096."
            )
        if max_examples is not None and not _is_count(max_examples):
            raise ValueError(
                f"max_examples={max_examples!r} is no cap; expected None or a whole number of rows from 1 up. "
                "Write max_examples=8."
            )
        self.max_tokens = max_tokens
        self.max_examples = max_examples
        self.caps = self._initial_caps()
        self.changes: list[Change] = []
        self._unwritten: set[str] = set()  # why caps could not be written, as far as it was warned of
        self.handle: UndoHandle | None = None
        self.binding = Binding()
        self._step: Callable[[], PiecewiseStep | None] = lambda: None  # the trainer has it, and is not kept alive
        self._resume_from: str | bool | None = None  # what train was called with

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_tokens, self.max_examples)  # a copy starts unbound

    def bind(self, trainer: Trainer) -> None:
        """Stand over this trainer's ``training_step`` and ``compute_loss``; called by ``attach``."""
        if self.binding.trainer is trainer:
            return
        step = PiecewiseStep(trainer, self.caps, self.changes)
        override = override_method(trainer, "train", self._around_train)
        self.handle = self.binding.to(trainer, *step.install(), override)
        self._step = ref(step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check again what may have changed since ``attach``, and take over the caps of a run that is resumed."""
        check_compatibility(self.binding.serving(self, state))
        if (step := self._step()) is not None:
            step.begin_training()
        if self._resume_from and state.global_step > 0:
            last = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._resume(Path(last if self._resume_from is True else self._resume_from))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the caps into the checkpoint."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.should_save and os.path.isdir(folder):
            try:
                write_caps(folder, self.caps)
            except OSError as error:
                lost = "a run that resumes here begins with the caps of a new one"
                warn_unwritten(folder / CAPS_FILE, error, lost, self._unwritten)

    def _around_train(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resume_from = resume_from_checkpoint
            return before(resume_from_checkpoint, *args, **kwargs)

        return train

    def _initial_caps(self) -> dict[str, Cap]:
        most = None if self.max_tokens == "auto" else int(self.max_tokens)
        return {"max_tokens": Cap(most), "max_examples": Cap(self.max_examples)}

    def _resume(self, folder: Path) -> None:
        try:
            found = read_caps(folder)
        except FileNotFoundError:  # a checkpoint of a run without micro-batching
            return
        except (OSError, ValueError) as error:
            warnings.warn(
                f"{folder / CAPS_FILE} could not be read ({type(error).__name__}: {error}), so the resumed run begins "
                "with the caps of a new one. If a cap is known to fit, set it: MicrobatchCallback(max_tokens=4096)",
                stacklevel=2,
            )
            return
        if {name: cap.most for name, cap in found.items()} == {name: cap.most for name, cap in self.caps.items()}:
            self.caps.update(found)
            logger.info("MicrobatchCallback: resumed with %s", found)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1
