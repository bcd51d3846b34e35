"""Unfreeze a model in stages, from the head downwards, on a schedule of optimizer steps.

A parameter that is frozen for now has no gradient, and no optimizer state before its first step; a frozen prefix saves
activations too (``freezing``). Memory therefore grows with each stage, and the last one decides what fits.

All parameters are in the optimizer's groups from the start, and what is trainable follows from the number of steps
taken alone. So a checkpoint of any stage has the layout of the last one, and a resumed run equals a straight one to the
bit. (Adding groups during training instead makes checkpoints that torch refuses to load.)

Limitations: one process only, since DDP decides which parameters have gradients when it wraps the model. Under
``torch.compile`` each stage compiles again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hf_memopt.binding.compatibility import check_settings
from hf_memopt.binding.model_changes import INPUT_GRADIENTS_DROPPED, drop_input_gradients
from hf_memopt.binding.parameters import checked_patterns, matching_parameters, set_trainable, trainable_parameters
from hf_memopt.binding.undo import UndoHandle
from hf_memopt.changes import Change
from hf_memopt.plain_data import shown
from hf_memopt.techniques import TechniqueCallback

logger = logging.getLogger(__name__)

Schedule = Mapping[int, str | Iterable[str]] | Mapping[float, str | Iterable[str]]
Stages = Mapping[int | float, tuple[str, ...]]

EXAMPLE = "schedule={0: 'classifier', 100: 'layers:10-11', 200: ['layers:0-9', 'embeddings']}"


def unfreeze_by_schedule(model: nn.Module, stages: Mapping[int, tuple[str, ...]], step: int) -> UndoHandle:
    """Make trainable what ``stages`` names for ``step`` or before, and freeze what it names for later only.

    Raises:
        ValueError: nothing would be left to train. The model is unchanged then.
    """
    first = _first_steps(model, stages)
    flags = {
        parameter: first.get(parameter, 0 if parameter.requires_grad else math.inf) <= step
        for parameter in model.parameters()
    }
    if not any(flags.values()):
        raise ValueError(
            f"schedule={dict(stages)!r} leaves {type(model).__name__} nothing to train at step {step}; expected at "
            f"least one trainable parameter. Name the head for step 0, for example: {EXAMPLE}"
        )
    return set_trainable(model, flags)


class GradualUnfreezeCallback(TechniqueCallback):
    """Make trainable what a schedule names for this step or before, and freeze what it names for later only.

    Other parameters stay as they are. A parameter named more than once follows its earliest stage, so
    ``{0: "classifier", 100: "layers:10-11", 200: "base"}`` needs no exceptions; tied weights are one parameter.

    Nothing is frozen before the optimizer is built, so that it holds every parameter. Under checkpointing it also calls
    ``drop_input_gradients``. When training ends the flags stay as the last step had them. It logs no keys.

    Args:
        schedule: patterns as ``freeze`` takes them, by the optimizer step from which on they are trained: an int, or a
            float below 1 as a fraction of ``state.max_steps`` (rounded up): ``{0: "classifier", 0.25: "layers:6-11",
            0.5: "base"}``. With fractions a resumed run must have as many steps as the first.

    Attributes:
        changes: what was changed, one ``Change`` per stage.
        handle: undoes the changes to the last model; None before the first.

    Raises:
        ValueError: a malformed schedule, at once; a pattern that matches nothing, when ``Trainer`` is constructed;
            nothing left to train at a step; when training begins, several processes, and parameters that the optimizer
            does not hold because they were frozen before it was built.
    """

    technique = "gradual unfreezing"
    only_watches = True  # see ``binding.passed_parts``

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = checked_schedule(schedule)
        super().__init__(self.schedule)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse patterns that match nothing; freeze nothing yet."""
        super().on_init_end(args, state, control)
        _first_steps(model, self.schedule)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Check that the optimizer holds what is to be trained later, and begin with the stage of this step."""
        super().on_train_begin(args, state, control)
        check_settings(self.technique, args)
        stages = _in_steps(self.schedule, state.max_steps)
        scheduled = _first_steps(model, stages)
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, parameter in model.named_parameters() if parameter in scheduled.keys() - held]
        if missing:
            remedy = (
                "What is trained beside adapters is not saved with them, so name adapters alone: '*layers.3.*lora_*' "
                "in place of 'layers:3'"
                if hasattr(model, "peft_config")
                else "Freeze them by the schedule alone, without FreezeCallback, and set requires_grad = True of "
                "these, and no others, before Trainer(...)"
            )
            raise ValueError(
                f"schedule={dict(stages)!r} names {len(missing)} parameters that the optimizer does not hold, "
                f"beginning with {missing[0]}; expected parameters that were trainable when it was built. {remedy}"
            )
        dropped = drop_input_gradients(model)
        if not dropped.is_removed:
            self._handles.keep(model, dropped)
            self.note(INPUT_GRADIENTS_DROPPED, logs=False)
        self._begin_stage(model, stages, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin the next stage if it is due."""
        stages = _in_steps(self.schedule, state.max_steps)
        if state.global_step in stages:
            self._begin_stage(model, stages, state.global_step)

    def _begin_stage(self, model: nn.Module, stages: dict[int, tuple[str, ...]], step: int) -> None:
        before = trainable_parameters(model)
        self.handle = self._handles.keep(model, unfreeze_by_schedule(model, stages, step))
        after = trainable_parameters(model)
        if after != before:
            begun = ", ".join(name for first, patterns in stages.items() if first <= step for name in patterns)
            change = Change("trainable_parameters", before, after, f"from step {step}: {begun}")
            self.note(change, logs=False)
            total = sum(parameter.numel() for parameter in model.parameters())
            logger.info(f"GradualUnfreezeCallback trains {after:,} of {total:,} parameters from step {step}: {begun}")


def checked_schedule(schedule: Any) -> dict[int | float, tuple[str, ...]]:
    """Return the schedule with its patterns as tuples; raise ValueError for what is not a schedule for any model."""
    if not isinstance(schedule, Mapping) or not schedule:
        raise ValueError(f"schedule={shown(schedule)} names no stage; expected patterns by step. Write {EXAMPLE}")
    for step in schedule:
        is_step = type(step) is int and step >= 0
        if not is_step and not (isinstance(step, float) and 0 <= step < 1):
            raise ValueError(
                f"schedule={dict(schedule)!r} has the key {step!r}, which is not a step; expected an integer of 0 or "
                f"more, or a fraction of the run below 1.0. Write {EXAMPLE}"
            )
    return {step: checked_patterns(patterns) for step, patterns in schedule.items()}


def _in_steps(schedule: Stages, total_steps: int) -> dict[int, tuple[str, ...]]:
    """Return the schedule by whole steps, earliest first."""
    stages: dict[int, tuple[str, ...]] = {}
    for key, patterns in schedule.items():
        step = math.ceil(key * total_steps) if isinstance(key, float) else key
        stages[step] = (*stages.get(step, ()), *patterns)
    return dict(sorted(stages.items()))


def _first_steps(model: nn.Module, stages: Mapping[Any, tuple[str, ...]]) -> dict[nn.Parameter, Any]:
    """Return the earliest step of each parameter that a schedule names."""
    first: dict[nn.Parameter, Any] = {}
    for step, patterns in sorted(stages.items(), reverse=True):
        for pattern in patterns:
            first |= dict.fromkeys(matching_parameters(model, pattern), step)
    return first
