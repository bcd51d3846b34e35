"""Reads a run's peaks of memory by phase: load, generation, scoring, forward, backward, optimizer, evaluation.

Scoring is what runs modules without gradients before the forward pass of a batch: reference and reward models, a
policy's own probabilities. What an evaluation generates belongs to it. What lies between a backward pass and the next
step (clipping, logging) counts as forward; a forward pass that checkpointing repeats counts as backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_memopt.prediction.rehearsal.events import set_label
from hf_memopt.prediction.rehearsal.result import Peak


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
                earlier = self.peaks.get(before, Peak())
                allocated_bytes = max(earlier.allocated_bytes, torch.cuda.max_memory_allocated())
                self.peaks[before] = Peak(
                    allocated_bytes, max(earlier.reserved_bytes, torch.cuda.max_memory_reserved())
                )
                torch.cuda.reset_peak_memory_stats()
        return before

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # an optimizer that ran out of memory in its step has not said that it ended
        if torch.compiler.is_compiling() or self.phase not in ("load", "optimizer", "scoring", "forward"):
            return
        if torch.is_grad_enabled():
            self.enter("forward")
            self.may_score = False  # checkpointing may run a module's parts without gradients
        elif self.may_score:
            self.enter("scoring")

    def before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self.before_step = self.enter("optimizer")  # backward, where steps are made as gradients come

    def after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self.enter(self.before_step)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase, here or in a function that this decorates; within an evaluation it stays evaluation."""
        before = self.enter(self.phase if self.phase == "evaluation" else phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextlib.contextmanager
    def hooked(self, *functions: tuple[Any, str, str]) -> Iterator[None]:
        """Watch forward and backward passes and steps of optimizers; ``functions`` are owners, names and phases."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.enter, "")
            undo.callback(register_module_forward_pre_hook(self.before_forward).remove)
            undo.callback(register_optimizer_step_pre_hook(self.before_optimizer).remove)
            undo.callback(register_optimizer_step_post_hook(self.after_optimizer).remove)
            for owner, name, phase in ((torch.autograd, "backward", "backward"), *functions):
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, self.during(phase)(getattr(owner, name)))
            yield


@contextlib.contextmanager
def peaks_by_phase() -> Iterator[dict[str, Peak]]:
    """Watch a training in this process; the peaks are whole when the block ends, and nothing of the watch remains.

    torch's own peaks (``torch.cuda.max_memory_allocated``) begin anew with each phase.
    """
    from transformers import Trainer

    watch = PhaseWatch()
    torch.cuda.reset_peak_memory_stats()
    with watch.hooked((Trainer, "evaluation_loop", "evaluation")):
        yield watch.peaks
