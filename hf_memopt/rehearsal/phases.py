"""Reads a run's peaks of memory by phase: load, generation, scoring, forward, backward, optimizer, evaluation.

Scoring is what runs modules without gradients before the forward pass of a batch: reference and reward models, a
policy's own probabilities. What an evaluation generates belongs to it. What lies between a backward pass and the next
step (clipping, logging) counts as forward; a forward pass that checkpointing repeats counts as backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_memopt.rehearsal.events import set_label
from hf_memopt.rehearsal.result import Peak


class PhaseWatch:
    """Knows the present phase, and reads its peaks when it ends."""

    def __init__(self) -> None:
        self.phase = self.before_step = "load"
        self.may_score = True  # since the last backward pass, no module ran with gradients
        self.peaks: dict[str, Peak] = {}
        set_label("phase", self.phase)

    def enter(self, phase: str) -> str:
        """Begin a phase and return the one before."""
        before, self.phase = self.phase, phase
        self.may_score = self.may_score or phase == "backward"
        if phase != before:
            set_label("phase", phase)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                peak = self.peaks.get(before, Peak())
                allocated_bytes = max(peak.allocated_bytes, torch.cuda.max_memory_allocated())
                reserved_bytes = max(peak.reserved_bytes, torch.cuda.max_memory_reserved())
                self.peaks[before] = Peak(allocated_bytes, reserved_bytes)
                torch.cuda.reset_peak_memory_stats()
        return before

    def before_forward(self, *arguments: Any) -> None:
        # an optimizer that ran out of memory in its step has not said that it ended
        if torch.compiler.is_compiling() or self.phase not in ("load", "optimizer", "scoring", "forward"):
            return
        if torch.is_grad_enabled():
            self.enter("forward")
            self.may_score = False  # checkpointing may run a module's parts without gradients
        elif self.may_score:
            self.enter("scoring")

    def before_optimizer(self, *arguments: Any) -> None:
        self.before_step = self.enter("optimizer")  # backward, where steps are made as gradients come

    def after_optimizer(self, *arguments: Any) -> None:
        self.enter(self.before_step)

    @contextlib.contextmanager
    def during(self, owner: Any, name: str, phase: str) -> Iterator[None]:
        """Let a function or method be a phase."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(self.phase if self.phase == "evaluation" else phase)
            try:
                return original(*args, **kwargs)
            finally:
                self.enter(before)

        setattr(owner, name, watched)
        try:
            yield
        finally:
            setattr(owner, name, original)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch forward passes, backward passes and steps of optimizers."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.enter, "")
            undo.callback(register_module_forward_pre_hook(self.before_forward).remove)
            undo.callback(register_optimizer_step_pre_hook(self.before_optimizer).remove)
            undo.callback(register_optimizer_step_post_hook(self.after_optimizer).remove)
            undo.enter_context(self.during(torch.autograd, "backward", "backward"))
            yield


@contextlib.contextmanager
def peaks_by_phase() -> Iterator[dict[str, Peak]]:
    """Watch a training in this process; the peaks are whole when the block ends, and nothing of the watch remains.

    torch's own peaks (``torch.cuda.max_memory_allocated``) begin anew with each phase.
    """
    from transformers import Trainer

    watch = PhaseWatch()
    torch.cuda.reset_peak_memory_stats()
    with watch.hooked(), watch.during(Trainer, "evaluation_loop", "evaluation"):
        yield watch.peaks
