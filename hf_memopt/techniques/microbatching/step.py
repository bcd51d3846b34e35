"""Run a training step in micro-batches: split, weigh, run, and repeat in smaller ones what ran out of memory."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.versions import checkpointing_arguments
from hf_memopt.changes import Change, record_changes
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.devices.random_state import RandomState
from hf_memopt.notices import notify
from hf_memopt.techniques.microbatching.limits import Limit
from hf_memopt.techniques.microbatching.lockstep import agree_that_losses_add_up, groups_in_lockstep
from hf_memopt.techniques.microbatching.loss_rules import LossWeights
from hf_memopt.techniques.microbatching.probed_loss import Items, NotSplittableError
from hf_memopt.techniques.microbatching.splitting import (
    cut,
    decoder_lengths,
    padded_tokens,
    row_count,
    row_lengths,
    splittable_batch_reason,
    splittable_reason,
    take_rows,
)
from hf_memopt.techniques.microbatching.tally import Tally
from hf_memopt.techniques.nonfinite.example_indices import example_indices

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

__all__ = ["MicrobatchedStep"]

logger = logging.getLogger(__name__)


class _AccumulationStep(NamedTuple):
    """The arguments of one call of ``training_step``, and what stock divided its loss by at that time."""

    inputs: Mapping[str, Any]
    num_items_in_batch: Items
    accumulation_steps: int


class _MicroBatch(NamedTuple):
    """Rows that run together.

    ``position``: of their accumulation step in the window; ``weight``: their part of its loss.
    """

    position: int
    rows: list[int]
    weight: float
    inputs: Mapping[str, Any]


class MicrobatchedStep:
    """The overrides of one trainer's ``training_step``, ``compute_loss`` and ``train``.

    The *window* is the list of accumulation steps since the last optimizer step. Their gradients are added up in
    ``parameter.grad``, and a failed backward pass leaves there a part that cannot be separated again. So after out of
    memory all gradients are dropped and the whole window is repeated, from the random numbers with which it began.

    Args:
        trainer: the trainer, which is not kept alive.
        limits: ``max_tokens`` and ``max_examples``; lowered and raised in place.
        changes: a list to which each change of a limit is appended.
        tally: counts each run anew.
    """

    technique = "micro-batching"

    def __init__(
        self,
        trainer: Trainer,
        limits: Mapping[str, Limit],
        changes: list[Change] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._trainer: Callable[[], Any] = ref(trainer)
        self._limits = limits
        self._changes = [] if changes is None else changes
        self._is_checked = False  # whether the model was examined since training began
        self._weights = LossWeights()
        self._window: list[_AccumulationStep] = []
        self._random: RandomState | None = None  # at the beginning of the window
        self._was_split = False
        self._weight = 1.0  # compute_loss multiplies by it
        self._has_computed_loss = False  # in the current micro-batch
        self._share_gradients: Callable[[], None] | None = None
        self._is_shared = False  # whether gradients of this attempt were sent to other processes
        self._tally = Tally() if tally is None else tally

    # ---- Overrides --------------------------------------------------------------------------------------------------

    def wrap_train(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Check the settings again, which may have changed, and examine the model again, which may be new."""

        def train(*args: Any, **kwargs: Any) -> Any:
            check_compatibility(self._trainer(), cast("TrainerCallback", self))
            self._is_checked, self._weights = False, LossWeights()
            self._begin_window()
            self._tally.restart()
            output = before(*args, **kwargs)
            if self._tally.failures:
                notify(logger, self._tally.summary(self._limits))
            return output

        return train

    def wrap_compute_loss(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Multiply the loss by the weight of the current micro-batch."""

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = before(*args, **kwargs)
            self._has_computed_loss = True
            if self._share_gradients is not None:
                self._share_gradients()
            if self._weight == 1.0:
                return loss
            return (loss[0] * self._weight, *loss[1:]) if isinstance(loss, tuple) else loss * self._weight

        return compute_loss

    def wrap_training_step(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Run an accumulation step in micro-batches, and repeat what ran out of memory."""

        def training_step(
            model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Items = None
        ) -> torch.Tensor:
            trainer = self._trainer()
            refusal = None
            if self._weights.rule is None:
                refusal = self._examine(trainer, model, inputs, num_items_in_batch)
            if not self._window:
                self._random = RandomState.capture(trainer.args.device)
            steps = getattr(trainer, "current_gradient_accumulation_steps", 1)  # a step outside of train has none
            self._window.append(_AccumulationStep(inputs, num_items_in_batch, steps))
            try:
                loss = self._run_until_it_fits(before, trainer, model)
            except BaseException:
                self._begin_window()
                raise
            if trainer.accelerator.sync_gradients:
                self._end_window(trainer)
            if refusal is not None:
                raise refusal from refusal.__cause__
            return loss

        return training_step

    def _begin_window(self) -> None:
        self._window, self._random, self._was_split = [], None, False

    def _run_until_it_fits(self, run: Callable[..., Any], trainer: Trainer, model: nn.Module) -> torch.Tensor:
        """Run the newest accumulation step; after out of memory the whole window, in smaller micro-batches."""
        first = len(self._window) - 1  # the gradients of those before are there already
        while True:
            begin = time.perf_counter()
            loss, failed, text = self._attempt(run, trainer, model, first)
            if loss is not None:
                return loss
            self._tally.failures += 1
            self._tally.lost_seconds += time.perf_counter() - begin
            # The except block has ended, and with it the frames that referred to the failed step's tensors.
            model.zero_grad(set_to_none=True)
            free_failed_step()
            if self._random is not None:
                self._random.restore()
            self._lower_limit(trainer, *failed, text)
            first = 0

    def _attempt(
        self, run: Callable[..., Any], trainer: Trainer, model: nn.Module, first: int
    ) -> tuple[torch.Tensor | None, tuple[int, list[int]], str]:
        """Run the window from one accumulation step on.

        Returns:
            The loss of the last accumulation step, or None with the position and rows that failed and the error's text.
        """
        self._is_shared = False
        positions = range(first, len(self._window))
        splits = [self._split(trainer, model, position) for position in positions]
        failed = (first, [0])
        try:
            for position, micro_batches in zip(positions, splits, strict=True):
                syncs = position == positions[-1] and trainer.accelerator.sync_gradients
                loss = None
                for micro_batch in micro_batches:
                    failed = (position, micro_batch.rows)
                    with self._without_sync(trainer, model, shares=syncs and micro_batch is micro_batches[-1]):
                        part = self._run(run, trainer, model, micro_batch, is_alone=len(micro_batches) == 1)
                    loss = part if loss is None else loss + part
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = str(error).partition("\n")[0]
        else:
            return loss, failed, ""
        return None, failed, text

    def _run(
        self, run: Callable[..., Any], trainer: Any, model: nn.Module, micro_batch: _MicroBatch, *, is_alone: bool
    ) -> torch.Tensor:
        step = self._window[micro_batch.position]
        self._weight, self._has_computed_loss = micro_batch.weight, False
        # An epoch that ended early leaves accumulation steps, and their gradients, to the next epoch's first step.
        trainer.current_gradient_accumulation_steps = step.accumulation_steps
        try:
            # a copy, since a subclass may pop columns from it
            loss: torch.Tensor = run(model, copy.copy(micro_batch.inputs), step.num_items_in_batch)
        finally:
            self._weight = 1.0
        if not self._has_computed_loss and (not is_alone or trainer.args.world_size > 1):
            raise RuntimeError(
                f"training_step of {type(trainer).__name__} did not call compute_loss, so the loss of a micro-batch "
                "could not be weighted; expected one call per forward pass. Write loss = self.compute_loss(model, "
                "inputs, num_items_in_batch=num_items_in_batch) in it."
            )
        return loss

    def _split(self, trainer: Any, model: nn.Module, position: int) -> list[_MicroBatch]:
        """Split an accumulation step into micro-batches; all at once, since counting waits for the device."""
        inputs, num_items_in_batch, _ = self._window[position]
        groups, repeats = self._groups(inputs), 0
        if trainer.is_fsdp_enabled:
            groups, repeats = groups_in_lockstep(trainer, groups)
        if len(groups) + repeats == 1:
            is_limited = any(limit.limit is not None for limit in self._limits.values())
            whole = take_rows(inputs, groups[0]) if is_limited else inputs
            return [_MicroBatch(position, groups[0], 1.0, whole)]
        _refuse(trainer.model, splittable_batch_reason(inputs))
        self._was_split = True
        weights = None if trainer.is_fsdp_enabled else self._weights.of_rows(trainer, model, inputs, num_items_in_batch)
        weighted = _weighted(groups, weights) + [(groups[0][:1], 0.0)] * repeats
        return [_MicroBatch(position, rows, weight, take_rows(inputs, rows)) for rows, weight in weighted]

    def _groups(self, inputs: Mapping[str, Any]) -> list[list[int]]:
        """Return the rows of each micro-batch of a batch; of a single one all of them in their order."""
        limits = {name: limit.limit for name, limit in self._limits.items()}
        every_row = list(range(row_count(inputs)))
        if all(limit is None for limit in limits.values()):
            return [every_row]
        lengths = row_lengths(inputs)
        if lengths is None:
            groups = cut([1] * len(every_row), max_examples=limits["max_examples"])
        else:
            groups = cut(lengths, **limits, decoder_lengths=decoder_lengths(inputs))
        return groups if len(groups) > 1 else [every_row]

    @contextmanager
    def _without_sync(self, trainer: Trainer, model: nn.Module, *, shares: bool) -> Iterator[None]:
        """Keep the gradients of a micro-batch in this process, or share them where ``shares``.

        DDP shares gradients within the backward pass, but decides on that in the forward pass. A process that runs out
        of memory in between would leave the others waiting, so sharing is switched on only once the forward pass and
        the loss are done: ``trigger_sync_in_backward``.
        """
        if trainer.args.world_size == 1 or trainer.is_fsdp_enabled:  # FSDP2 reduces each micro-batch's gradients
            yield
        elif shares and not isinstance(model, DistributedDataParallel):  # torch.compile around DDP
            self._is_shared = True
            yield
        else:
            with trainer.accelerator.no_sync(model), ExitStack() as stack:

                def share() -> None:
                    self._is_shared = True
                    stack.enter_context(trainer.accelerator.trigger_sync_in_backward(model))

                self._share_gradients = share if shares else None
                try:
                    yield
                finally:
                    self._share_gradients = None

    # ---- Limits -----------------------------------------------------------------------------------------------------

    def _lower_limit(self, trainer: Trainer, position: int, rows: list[int], text: str) -> None:
        """Lower the limit after these rows of an accumulation step ran out of memory, or raise if that cannot help."""
        inputs = self._window[position].inputs
        tokens = padded_tokens(inputs, rows)
        name, size = ("max_examples", len(rows)) if tokens is None else ("max_tokens", tokens)
        if self._is_shared or trainer.is_fsdp_enabled:
            where = "in the backward pass in which the processes share their gradients"
            if trainer.is_fsdp_enabled:
                where = "under FSDP2, where the processes run each micro-batch together"
            raise torch.OutOfMemoryError(
                f"memory ran out {where} ({text}); expected micro-batches that fit there. Start with smaller ones: "
                f"MicrobatchCallback({name}={max(size // 2, 1)})"
            )
        if len(rows) == 1:
            raise torch.OutOfMemoryError(_too_large(trainer, position, rows[0], tokens, text))
        limit = self._limits[name]
        old = limit.limit
        limit.lower(size)
        step = trainer.state.global_step + 1
        self._record(trainer, name, old, f"out of memory at step {step}")
        lengths, unit = row_lengths(inputs), name.removeprefix("max_")
        failed = f"{len(rows)} examples" if lengths is None else f"{len(rows)} x {max(lengths[r] for r in rows)} tokens"
        notify(
            logger,
            f"{_process(trainer)}step {step}: out of memory with {failed}; repeated in "
            f"{len(self._groups(inputs))} micro-batches of at most {limit.limit:,} {unit}. Same batch, same loss.",
        )

    def _end_window(self, trainer: Trainer) -> None:
        self._tally.steps += 1
        self._tally.cut_steps += self._was_split
        for name, limit in self._limits.items():
            old = limit.limit
            if limit.note_step(was_split=self._was_split):
                reason = f"no out of memory in {limit.wait_steps} steps, at step {trainer.state.global_step + 1}"
                logger.info("micro-batching: %s", self._record(trainer, name, old, reason))
        self._begin_window()

    def _record(self, trainer: Trainer, name: str, old: int | None, reason: str) -> Change:
        change = Change(name, old, self._limits[name].limit, reason)
        self._changes.append(change)
        record_changes(trainer, [change])
        return change

    # ---- Refusals ---------------------------------------------------------------------------------------------------

    def _examine(
        self,
        trainer: Any,
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: Items,
    ) -> NotSplittableError | None:
        """Refuse what cannot be split, before anything has run out of memory.

        Returns:
            A refusal because of an error of the loss. It is raised after the step, which fails with its own error if
            the loss is wrong for whole batches too.
        """
        if not self._is_checked:
            if not isinstance(inputs, Mapping):
                made_in = f"{type(trainer).__name__} makes its batches from a {type(inputs).__name__} within the step"
                _refuse(trainer.model, f"{made_in}, so there are no rows to take")
            model.train()  # as the step is about to: a batch norm that a model keeps in evaluation mode does no harm
            _refuse(trainer.model, splittable_reason(trainer.model))
            self._is_checked = True
        if trainer.is_fsdp_enabled:
            self._weights.rule = "sum" if agree_that_losses_add_up(trainer, model, inputs, num_items_in_batch) else None
            return None
        _refuse(trainer.model, splittable_batch_reason(inputs))
        if row_count(inputs) > 1:
            try:
                self._weights.ask(trainer, model, inputs, num_items_in_batch)
            except NotSplittableError as error:
                if error.__cause__ is None:
                    raise
                return error
        return None


def _process(trainer: Any) -> str:
    return f"process {trainer.args.process_index}, " if trainer.args.world_size > 1 else ""


def _refuse(model: nn.Module, reason: str | None) -> None:
    if reason is not None:
        raise NotSplittableError(model, reason)


def _weighted(groups: list[list[int]], weights: list[float] | None) -> list[tuple[list[int], float]]:
    """Return the rows and the weight of each micro-batch, without rows that add nothing to a mean (it would be 0 / 0).

    ``weights`` is that of each row, shape (rows,), or None if losses add up.
    """
    if weights is None:
        return [(rows, 1.0) for rows in groups]
    kept = [[row for row in rows if weights[row]] for rows in groups]
    return [(rows, sum(weights[row] for row in rows)) for rows in kept if rows]


def _too_large(trainer: Trainer, position: int, row: int, tokens: int | None, text: str) -> str:
    indices = example_indices(trainer, position) or ()
    which = f"row {row} of the batch"
    if row < len(indices):
        is_view = hasattr(trainer.train_dataset, "indices_of")  # its indices are those of the dataset that it reads
        index = indices[row]
        which = f"example {index} of the dataset given to bucketed()" if is_view else f"train_dataset[{index}]"
    size = "" if tokens is None else f"has {tokens} tokens and "
    checkpointing = next(iter(checkpointing_arguments()))
    return (
        f"{which} {size}does not fit into memory by itself at step {trainer.state.global_step + 1} ({text}); expected "
        f"an example that fits. Cut texts shorter, set {checkpointing}=True, or take a leaner preset: "
        "preset('4gb-gpu')"
    )
