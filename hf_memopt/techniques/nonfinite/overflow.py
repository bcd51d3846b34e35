"""The callback that drops non-finite steps, finds out where they began, and stops a run that does not recover.

``detection`` does it and names the limitations.

Stock's ``TrainingArguments(debug="underflow_overflow")`` is enough to look at a forward pass that overflows, in a run
that may stop there: it prints the largest values of every module up to the first one that is not finite, and raises. It
waits for the device at every module, and does not see a loss or a gradient that is not finite. Use ``OverflowCallback``
where the run has to go on, in every run (it costs one wait per optimizer step), for losses and gradients, and to find
the examples.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.handles import UndoHandle
from hf_memopt.techniques.nonfinite.detection import NonfiniteRecord, detect_nonfinite

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["OverflowCallback"]

BFLOAT16_FAMILY = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
"""Model types pretrained with bfloat16 activations (github.com/google-research/text-to-text-transfer-transformer,
issue 539), whose feed-forward outputs exceed float16's 65,504 (github.com/huggingface/transformers, issue 5651)."""


class OverflowCallback(NonfiniteRecord, TrainerCallback):
    """Drop steps that are not finite, report where they began and in which examples, and stop if it goes on.

    Bind it with ``attach(trainer)``, which calls ``detect_nonfinite``. To look at a forward pass that overflows, in a
    run that may stop there, stock's ``TrainingArguments(debug="underflow_overflow")`` is enough. A finding is logged
    once per kind and place as a warning, and all are written to ``overflow_report.json`` and ``.txt``, whenever there
    is a new one. A warning says where that fails, once per cause.

    It adds no keys to the Trainer's logs; two of stock's keep their meaning:

    ============= =====================================================================================
    key           value in a dropped step
    ============= =====================================================================================
    ``loss``      a loss that is not finite counts as the last one that was, as stock's filter does it
    ``grad_norm`` as stock computed it: NaN or infinite
    ============= =====================================================================================

    Args:
        max_nonfinite_steps: the run stops at so many of them in all.
        max_in_a_row: and at so many without a good step in between: weights that are bad never recover.
        report_dir: folder of the report; the Trainer's ``output_dir`` by default.

    Attributes:
        reports: one ``OverflowReport`` for each non-finite step that began in this process.
        nonfinite_steps: steps dropped so far, those found by other processes included.
        skipped_steps: steps that the gradient scaler of fp16 skipped, those among the non-finite ones included.
        changes: the settings that were changed for the run.
        handle: takes everything off the trainer again; None before ``attach``.

    Raises:
        ValueError: a limit is not an integer of 1 or more.
        RuntimeError: training began without ``attach``; a limit is reached. The weights are then those of the last good
            step.
    """

    technique = "non-finite detection"

    def __init__(
        self, max_nonfinite_steps: int = 10, *, max_in_a_row: int = 3, report_dir: str | Path | None = None
    ) -> None:
        super().__init__(max_nonfinite_steps, max_in_a_row=max_in_a_row, report_dir=report_dir)
        self.handle: UndoHandle | None = None
        self.binding = Binding()

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy starts unbound
        unbound = partial(
            type(self), self.max_nonfinite_steps, max_in_a_row=self.max_in_a_row, report_dir=self.report_dir
        )
        return unbound, ()

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Watch this trainer's steps; a second ``attach`` makes it the outermost override again."""
        if self.binding.trainer is not trainer:
            _warn_of_bfloat16_family(trainer)
        self.binding.end()
        self.handle = self.binding.to(trainer, detect_nonfinite(trainer, self))
        return self.handle

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to run unbound."""
        self.binding.serving(self, state)


def _warn_of_bfloat16_family(trainer: Any) -> None:
    family = getattr(getattr(trainer.model, "config", None), "model_type", None)
    if trainer.args.fp16 and family in BFLOAT16_FAMILY:
        warnings.warn(
            f"fp16=True is likely to overflow in {type(trainer.model).__name__}: models of the T5 family were trained "
            "in bfloat16, with values beyond float16's 65,504; expected bf16=True, or neither of the two. "
            "Set: fp16=False, bf16=True",
            stacklevel=4,
        )
