"""Train each batch in parts that fit, exactly, and recover from running out of memory within the step.

Use it when the batch size that you want does not fit into memory, or fits only sometimes: ``MicrobatchCallback`` under
the ``Trainer``, or ``run_in_microbatches`` by itself.

The stock ``Trainer`` sees the true batch: its steps, learning rates, order of the data and logged losses are those of
the unsplit run. When memory runs out, a limit is lowered and everything since the last optimizer step is repeated with
the same random numbers: nothing is skipped, nothing counts twice. A step is cut in one of two ways:

- A loss that is known to be a sum or one mean over rows or labels (``binding.known_losses``: stock's heads and losses,
  TRL's SFT, some of sentence-transformers): rows are sorted by length, freed of the padding that a micro-batch does not
  need, and run forward and backward one micro-batch after the other, each weighted so that the gradients add up to
  those of the batch.
- Any other loss or ``training_step``: the user's code runs once, with the whole batch, while the rows run in parts
  through the backbone below it (``rows_in_parts``), whose rows are checked to be independent. In-batch negatives, hard
  examples, pairs, class weights, adversarial steps and routers' losses are exact.

The trade: nothing while whole batches fit; known losses under a limit take a few waits for the device per accumulation
step and smaller kernels, against less padding; other losses run the backbone forward twice, 1.3 to 1.8 times the CPU
time, keep its outputs and the head's logits for all rows, and under accumulation hold its gradients twice.

Between processes (DDP with ``ddp_broadcast_buffers=False, ddp_find_unused_parameters=False``) each process recovers by
itself while the others wait, since gradients are shared only in the backward pass of the last micro-batch; out of
memory in that one pass cannot be repeated and raises. A step whose loss is not known is not repeated there; its parts
are halved on the spot.

Under FSDP2 and DeepSpeed, where a forward pass gathers the weights from all processes, it is refused.

Limitations: out of memory in the optimizer's step or between steps raises, and so does a step that changed weights
before memory ran out (an attack on the embeddings, a teacher's moving average): with a limit from the first step on it
does not run out. With dropout the masks of parts are other draws of the same distribution.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import Trainer

from hf_memopt.changes import Change
from hf_memopt.plain_data import shown
from hf_memopt.training.binding.undo import UndoHandle, is_overridden, override_method, undo_all
from hf_memopt.training.techniques import BoundCallback
from hf_memopt.training.techniques.evaluation import recover_predictions
from hf_memopt.training.techniques.microbatching.limits import Limit, Tally, microbatch_limits, saved_limits
from hf_memopt.training.techniques.microbatching.step import MicrobatchedStep

logger = logging.getLogger(__name__)

SPLITS = "micro-batching"  # the purpose of the override of training_step
SAVED = "hf_memopt: limits of micro-batches"  # in trainer_state.json, beside the callbacks that stock saves


def run_in_microbatches(
    trainer: Trainer,
    limits: Mapping[str, Limit] | None = None,
    *,
    changes: list[Change] | None = None,
    tally: Tally | None = None,
    backbone: str | Sequence[str] | None = None,
) -> UndoHandle:
    """Let a Trainer run each batch in micro-batches that fit, and repeat a step that ran out of memory in smaller ones.

    Overrides ``training_step``, ``compute_loss`` and ``train`` of this one Trainer, and lets its evaluations recover
    from out of memory too (``recover_predictions``). ``MicrobatchCallback`` calls it, and also saves the limits in
    checkpoints.

    Raises:
        ValueError: the Trainer runs in micro-batches already; in training, batches above a limit that was given cannot
            be cut (``NotSplittableError``).
        torch.OutOfMemoryError: in training, an example does not fit by itself, memory ran out where several processes
            share their gradients, or after the step had changed weights.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> config = BertConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> model = BertForSequenceClassification(config)
        >>> trainer = Trainer(model, TrainingArguments(report_to="none", use_cpu=True))
        >>> handle = run_in_microbatches(trainer, microbatch_limits(max_tokens=4096))
        >>> handle.remove()
    """
    if is_overridden(trainer, "training_step", SPLITS):
        raise ValueError(
            f"trainer=<{type(trainer).__name__}> runs in micro-batches already; expected a Trainer that does not. Keep "
            "one MicrobatchCallback in callbacks=, or call handle.remove() first"
        )
    names = _names_of(backbone)
    limits, changes = microbatch_limits() if limits is None else limits, [] if changes is None else changes
    step = MicrobatchedStep(trainer, limits, changes, tally or Tally(), names)
    return undo_all(
        override_method(trainer, "compute_loss", step.compute_loss),
        override_method(trainer, "training_step", step.training_step, purpose=SPLITS),
        override_method(trainer, "train", step.train),
        recover_predictions(trainer, names),
    )


def _names_of(backbone: Any) -> tuple[str, ...]:
    """Return the names of modules as a tuple."""
    names = (backbone,) if isinstance(backbone, str) else () if backbone is None else backbone
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"backbone={shown(backbone)} is invalid; expected the name of a module, several of them, or None. "
            "Pass backbone='encoder'"
        )
    return tuple(names)


class MicrobatchCallback(BoundCallback):
    """Repeat a step that runs out of memory in micro-batches, with the same loss; a resumed run keeps the limits.

    A checkpoint has the limits in ``trainer_state.json`` (with several processes, those of the process that saves); a
    resumed run starts with them unless ``max_tokens`` or ``max_examples`` differ from the saved run's. It logs no keys:
    each change of a limit is in ``changes`` and in ``trainer.memopt_changes``, and each out of memory is a line above
    the progress bar (``hf_memopt.notices``).

    Args:
        max_tokens: the most padded tokens of a micro-batch, i.e. its rows times its longest row; a longer row is a
            micro-batch by itself, or refused where it is packed. None (or ``"auto"``): no limit until memory runs out.
        max_examples: the most rows of a micro-batch. None: no limit until memory runs out.
        backbone: the name of the module whose rows run in parts, or its end, or several, where a loss is not known and
            nothing is found that can be cut: "encoder". None: found by itself.

    Attributes:
        limits: the current limits, ``max_tokens`` and ``max_examples``, each a ``Limit``, whose docstring has the rule
            by which it rises again. Batches without a sequence of tokens use the second only.
        changes: each change of a limit, the last one last.
        tally: what was done in the last run: steps, those that were cut, failures and the seconds that they cost.
        handle: takes everything off the trainer again; None until it is bound.

    Raises:
        ValueError: a limit is not an integer of 1 or more; otherwise as ``run_in_microbatches``.
        RuntimeError: training began unbound; otherwise as ``run_in_microbatches``.
        torch.OutOfMemoryError: as ``run_in_microbatches``.

    Examples:
        >>> MicrobatchCallback(max_tokens=4096).limits["max_tokens"].limit
        4096
    """

    technique = "micro-batching"

    def __init__(
        self,
        max_tokens: int | Literal["auto"] | None = None,
        max_examples: int | None = None,
        backbone: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(max_tokens, max_examples, backbone)
        self.max_tokens, self.max_examples, self.backbone = max_tokens, max_examples, backbone
        _names_of(backbone)
        self.limits = microbatch_limits(max_tokens, max_examples)
        self.tally = Tally()

    def change_trainer(self, trainer: Trainer) -> list[UndoHandle]:
        """Split this trainer's batches."""
        options: dict[str, Any] = {"changes": self.changes, "tally": self.tally, "backbone": self.backbone}
        return [run_in_microbatches(trainer, self.limits, **options)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound; restore the limits of a run that is resumed."""
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.get(SAVED)
        state.stateful_callbacks[SAVED] = self.limits  # whose values stock writes into each checkpoint
        if saved is None:  # a new run, or one of a checkpoint without micro-batching
            return
        try:
            found = saved_limits(saved)
        except (AttributeError, TypeError) as error:
            warnings.warn(
                f"the limits of micro-batches in the checkpoint could not be read ({error}), so the resumed run begins "
                "with the limits of a new one. If a limit is known to fit, set it: MicrobatchCallback(max_tokens=4096)",
                stacklevel=2,
            )
            return
        if all(limit.maximum == found[name].maximum for name, limit in self.limits.items()):
            self.limits.update(found)
            logger.info("micro-batching: resumed with %s", found)
