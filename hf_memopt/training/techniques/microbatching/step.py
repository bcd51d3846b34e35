"""Run a training step in parts, and repeat in smaller ones what ran out of memory.

There are two ways. A loss that is known to be a sum or a mean over its rows (``known_losses``) is trained in whole
micro-batches (``whole_micro_batches``). Any other loss, and any ``training_step`` of a user's, is called once with the
whole batch, while the backbone under it runs the rows in parts (``backbones``).
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_memopt.changes import Change, record_changes
from hf_memopt.notices import notify
from hf_memopt.training.binding import checkpointing_arguments, versions
from hf_memopt.training.binding.compatibility import check_compatibility
from hf_memopt.training.binding.losses import HookChangesError, KnownLoss, known_loss
from hf_memopt.training.binding.model import unwrap_parallel
from hf_memopt.training.binding.trials import Gradients, StepState, count_rows, names_of_draws
from hf_memopt.training.binding.undo import override_method
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.training.techniques.microbatching.accumulation_step import AccumulationStep, Items
from hf_memopt.training.techniques.microbatching.backbones import Backbones, CutStep
from hf_memopt.training.techniques.microbatching.limits import Limit, Tally, are_set, part_rows
from hf_memopt.training.techniques.microbatching.module_call import DependentRowsError
from hf_memopt.training.techniques.microbatching.not_splittable import (
    DROP,
    LOSS_OF_ALL_ROWS,
    NotSplittableError,
    batch_text,
    check_logits,
    logits_text,
    placeholder_reason,
    remedy_of,
    splittable_batch_reason,
    splittable_reason,
)
from hf_memopt.training.techniques.microbatching.padding_check import Padding
from hf_memopt.training.techniques.microbatching.rows_in_parts import PartsFailedError, Size
from hf_memopt.training.techniques.microbatching.splitting import padded_tokens
from hf_memopt.training.techniques.microbatching.whole_micro_batches import (
    OtherLossError,
    WholeMicroBatches,
    groups_of,
)
from hf_memopt.training.techniques.nonfinite import example_indices
from hf_memopt.units import format_bytes

logger = logging.getLogger(__name__)

PACKED = "its examples are packed"
OF_OPTIMIZER = (
    "MicrobatchCallback: memory ran out in the optimizer's step, whose state and gradients are as large for any batch; "
    "expected an optimizer that fits. Keep a smaller state with optim='adamw_8bit', or one gradient at a time with "
    "optimizer_cls_and_kwargs=low_memory_optimizer(args, model, release=True)"
)


class _Failure(NamedTuple):
    """What ran out of memory.

    ``position``: of its accumulation step in the window; ``size``: its rows, of so many ``columns`` (None for images
    and sounds); ``text``: the error's first line; ``row``: the first of the batch, where it is known; ``hint``: why
    smaller parts would not help.
    """

    position: int
    size: int
    columns: int | None
    text: str
    row: int | None = None
    hint: str = ""

    @property
    def smaller(self) -> str:
        """A limit under which it would have been cut, as code."""
        name, size = _measured(self.size, self.columns)
        return f"MicrobatchCallback({name}={max(size // 2, 1)})"


class MicrobatchedStep:
    """The overrides of one trainer's ``training_step``, ``compute_loss`` and ``train``.

    The *window* is the list of accumulation steps since the last optimizer step. Their gradients are added up in
    ``parameter.grad``, and a failed backward pass leaves there a part that cannot be separated again. So after out of
    memory the whole window is repeated, from the gradients (mostly none) and random numbers with which it began.

    For the arguments see ``run_in_microbatches``; the trainer is not kept alive.
    """

    technique = "micro-batching"

    def __init__(
        self,
        trainer: Trainer,
        limits: Mapping[str, Limit],
        changes: list[Change],
        tally: Tally,
        backbones: tuple[str, ...],
    ) -> None:
        self._trainer: Callable[[], Any] = ref(trainer)
        self._limits, self._changes, self._tally = limits, changes, tally
        self._names = backbones
        self._whole = WholeMicroBatches(limits)
        self.compute_loss = self._whole.compute_loss
        self._begin_run()
        if backbones and trainer.model is not None:
            self._backbones.modules_of(trainer.model)  # a name that is no module's is refused now

    def _begin_run(self) -> None:
        self._backbones = Backbones(self._names, Size(partial(part_rows, self._limits), self._part_failed))
        self._first_way: KnownLoss | str | None = None  # of the first step, None until then
        self._known: dict[bool, KnownLoss | str] = {}  # by whether items are counted
        self._whole.padding, self._whole.compared = Padding(), set()
        self._why_whole = ""  # what was seen to change as rows pass through the model: a hook of others, a buffer
        self._was_told = False  # that nothing can be cut
        self._begin_window()

    def _begin_window(self) -> None:
        self._window: list[AccumulationStep] = []
        self._running = 0, "", CutStep()  # the position of a step, why it runs whole ("" if not), what its parts saw
        self._state: StepState | None = None  # at the beginning of the window
        self._gradients: Gradients | None = None
        self._was_split = False

    # ---- Overrides --------------------------------------------------------------------------------------------------

    def train(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check the settings again, which may have changed, and look the loss up again: the model may be new."""
        check_compatibility(self._trainer(), cast(TrainerCallback, self))
        self._begin_run()
        self._tally.restart()
        begin = time.perf_counter()
        try:
            output = before(*args, **kwargs)
        except Exception as error:
            names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
            if is_out_of_memory(error) and "step" in names and "training_step" not in names:
                error.add_note(OF_OPTIMIZER)
            raise
        self._tally.seconds = time.perf_counter() - begin
        self._tally.check_seconds = self._backbones.seconds
        is_asked = any(limit.maximum is not None for limit in self._limits.values())
        if self._tally.failures or self._tally.check_seconds or is_asked:
            notify(logger, self._tally.summary(self._limits))
        return output

    def training_step(
        self, before: Callable[..., Any], model: nn.Module, inputs: Any, num_items_in_batch: Items = None
    ) -> torch.Tensor:
        """Run an accumulation step in parts, and repeat what ran out of memory."""
        trainer = self._trainer()
        steps = getattr(trainer, "current_gradient_accumulation_steps", 1)  # a step outside of train has none
        syncs = trainer.accelerator.sync_gradients
        self._window.append(AccumulationStep(before, model, inputs, num_items_in_batch, steps, syncs))
        if self._first_way is None:
            self._first_way = self._way(trainer, self._window[-1])
        if self._state is None:
            is_known = isinstance(self._first_way, KnownLoss)
            self._state = StepState(trainer, of_stock=is_known and self._tally.steps > 0)
            self._gradients = Gradients(trainer, model)
        try:
            loss = self._run_until_it_fits(trainer)
        except BaseException:
            self._begin_window()
            raise
        if trainer.accelerator.sync_gradients:
            self._end_window(trainer)
        return loss

    # ---- Attempts ---------------------------------------------------------------------------------------------------

    def _run_until_it_fits(self, trainer: Any) -> torch.Tensor:
        """Run the newest accumulation step; after out of memory the whole window, in smaller parts."""
        first = len(self._window) - 1  # the gradients of those before are there already
        while True:
            begin, lost = time.perf_counter(), self._tally.lost_seconds
            try:
                loss = self._attempt(trainer, first)
                self._check_buffers()
                return loss
            except Exception as error:
                ran_out, text = is_out_of_memory(error), str(error).partition("\n")[0]
                if not ran_out and not isinstance(error, HookChangesError):
                    raise
                part = (error.rows, error.columns) if isinstance(error, PartsFailedError) else None
            # The except block has ended, and with it the frames that referred to the failed step's tensors.
            assert self._gradients is not None  # since the window began
            self._gradients.restore()
            free_failed_step()
            failure = self._failure(trainer, text, part)
            has_drawn = self._put_back(trainer, failure)
            if ran_out:
                self._lower_limit(trainer, failure, has_drawn=has_drawn)
            else:
                self._first_way = self._why_whole = text
            self._tally.lost_seconds = lost + time.perf_counter() - begin  # what parts lost is in it
            first = 0

    def _attempt(self, trainer: Any, first: int) -> torch.Tensor:
        """Run the window from one accumulation step on; return the loss of its last."""
        begin, last = time.perf_counter(), len(self._window) - 1
        self._whole.are_shared = False
        for position, step in enumerate(self._window[first:], first):
            if first < position == last:
                self._tally.lost_seconds += time.perf_counter() - begin  # of what was repeated
            self._running = position, "", CutStep()
            way = self._way(trainer, step) if are_set(self._limits) else self._first_way  # asked where it matters
            if isinstance(way, KnownLoss):
                syncs = position == last and trainer.accelerator.sync_gradients
                try:
                    loss, is_split = self._whole.run(trainer, step, way, syncs=syncs)
                    self._was_split |= is_split
                except OtherLossError as error:
                    self._first_way = self._why_whole = str(error)
                    loss = self._run_in_parts(trainer, step, self._why_whole)
            else:
                loss = self._run_in_parts(trainer, step, str(way))
        return loss

    def _way(self, trainer: Any, step: AccumulationStep) -> KnownLoss | str:
        """Return how the loss of a batch is made of its rows', or why the loss has to see the whole batch."""
        if self._why_whole:
            return self._why_whole
        counts = step.num_items_in_batch is not None
        if counts not in self._known:  # once per run: classes and forwards stay what they are
            self._known[counts] = known_loss(trainer, step.num_items_in_batch)
        found = self._known[counts]
        if not isinstance(found, KnownLoss):
            return found
        if not isinstance(step.inputs, Mapping):
            return f"its batches are a {type(step.inputs).__name__}"
        trainer.model.train()  # as the step is about to: a batch norm kept in evaluation mode does no harm
        reason = splittable_reason(trainer.model) or splittable_batch_reason(step.inputs)
        reason = reason or placeholder_reason(trainer.model, step.inputs)
        return reason or found.reason_against(step.inputs) or found

    def _run_in_parts(self, trainer: Any, step: AccumulationStep, why: str) -> torch.Tensor:
        """Run the whole step once, with the rows of the backbone in parts."""
        is_limited, where = are_set(self._limits), batch_text(trainer, step.inputs)
        if is_limited:
            check_logits(trainer, step.inputs)
        with ExitStack() as stack:
            seen = CutStep()
            if is_limited or not versions.is_compiled(trainer.args):  # else it would run uncompiled, for nothing
                seen = stack.enter_context(self._backbones.cut(unwrap_parallel(step.model)))
            self._running = self._running[0], why, seen
            stack.enter_context(override_method(trainer.accelerator, "backward", seen.noting_out_of_memory))
            try:
                loss = step.call(trainer, step.inputs)
            except DependentRowsError as error:
                remedy = remedy_of(str(error), trainer.model)
                raise NotSplittableError(trainer.model, str(error), where=where, remedy=remedy) from None
        if seen.error is not None:  # which the step swallowed
            raise torch.OutOfMemoryError(seen.error)
        self._was_split |= bool(seen.cut)
        self._check_cut(trainer, seen, where, why, step.inputs)
        self._tell_cut(trainer, seen, why)
        return loss

    def _check_cut(self, trainer: Any, seen: CutStep, where: str, why: str, inputs: Any) -> None:
        """Refuse a step whose rows are above the user's limit and that nothing could cut; else say so once."""
        most = self._limits["max_tokens"].maximum
        is_packed = why.startswith(PACKED) and not seen.cut
        if is_packed and most is not None and (padded_tokens(inputs, [0]) or 0) > most:
            remedy = f"Pack fewer tokens into a row, raise max_tokens={most}, or take {DROP}"
            raise NotSplittableError(trainer.model, why, where=where, remedy=remedy)
        if seen.cut or seen.fits or not seen.reasons or not are_set(self._limits):
            return
        reason = "; ".join(seen.reasons)
        if any(limit.maximum is not None for limit in self._limits.values()):
            raise NotSplittableError(trainer.model, reason, where=where, remedy=remedy_of(reason, trainer.model))
        if not self._was_told:
            self._was_told = True
            notify(logger, f"micro-batching: batches of {type(trainer.model).__name__} cannot be cut: {reason}")

    def _tell_cut(self, trainer: Any, seen: CutStep, why: str) -> None:
        """Record once why the backbone is cut and not the whole batch, and say what accumulation then needs."""
        if not seen.cut or self._was_told:
            return
        self._was_told = True
        names = ", ".join(seen.names)
        whole = "".join(f"; whole stays {text}" for text in seen.reasons if not text.endswith(LOSS_OF_ALL_ROWS))
        reason = f"the loss is not known: {why}{whole}"
        change = Change("micro-batches", "whole", f"rows of {names} in parts", reason)
        logger.info("micro-batching: %s", change)
        record_changes(trainer, [change])
        if trainer.args.gradient_accumulation_steps > 1:
            every = self._backbones.modules_of(trainer.model)
            modules = [module for name, module in every if (name or type(module).__name__) in seen.names]
            weights = {weight for module in modules for weight in module.parameters() if weight.requires_grad}
            twice = format_bytes(sum(weight.nbytes for weight in weights))
            notify(
                logger,
                f"micro-batching: from the second accumulation step on, gradients of {names} exist twice: {twice}",
            )

    # ---- What failed ------------------------------------------------------------------------------------------------

    def _failure(self, trainer: Any, text: str, part: tuple[int, int | None] | None) -> _Failure:
        """Return what failed, given the error's first line, and rows and columns of a part that cannot be halved."""
        position, why, seen = self._running
        inputs = self._window[position].inputs
        if not why:
            rows = self._whole.rows
            tokens = padded_tokens(inputs, rows, keeps_padding=self._whole.padding.is_kept)
            return _Failure(position, len(rows), None if tokens is None else tokens // len(rows), text, rows[0])
        size, columns = part or seen.largest or (count_rows(inputs), None)
        hint = ""
        if seen.cut and part is None:
            hint = "outside of the backbone, where all rows are needed" + logits_text(trainer, inputs)
        elif size == 1 and why.startswith(PACKED):
            hint = why
        elif are_set(self._limits) and part is None and not seen.fits:
            hint = "; ".join(seen.reasons) or "no module of transformers was called"
        return _Failure(position, size, columns, seen.error or text, hint=hint)

    def _check_buffers(self) -> None:
        """Look once per run whether a forward pass changes a buffer, as spectral norms do: parts would do so again."""
        if not isinstance(self._first_way, KnownLoss) or self._state is None:
            return
        changed = self._state.changed_buffer()
        if changed is not None:
            self._first_way = self._why_whole = f"its forward pass changes {changed}"
            if self._was_split:
                raise HookChangesError(self._why_whole)

    def _put_back(self, trainer: Any, failure: _Failure) -> bool:
        """Put back what the step has changed, and return whether it drew random numbers; or raise: a step on changed
        weights is not repeated.
        """
        assert self._state is not None  # since the window began
        reason, has_drawn = self._state.lost(), self._state.has_drawn()
        if trainer.args.world_size > 1 and self._running[1]:  # in whole micro-batches they share them at the end
            reason = "the processes share its gradients"
        if reason is None:
            self._state.restore()
            return has_drawn
        raise torch.OutOfMemoryError(
            f"memory ran out at step {trainer.state.global_step + 1} ({failure.text}), and the step cannot be repeated"
            f", since {reason}; expected parts that fit from the beginning. Start with smaller ones: {failure.smaller}"
        )

    # ---- Limits -----------------------------------------------------------------------------------------------------

    def _lower_limit(self, trainer: Any, failure: _Failure, *, has_drawn: bool) -> None:
        """Lower the limit after out of memory, or raise if that cannot help."""
        step = trainer.state.global_step + 1
        if self._whole.are_shared:
            raise torch.OutOfMemoryError(
                "memory ran out in the backward pass in which the processes share their gradients "
                f"({failure.text}); expected micro-batches that fit there. Start with smaller ones: {failure.smaller}"
            )
        if failure.hint:
            raise torch.OutOfMemoryError(
                f"memory ran out at step {step} ({failure.text}), and smaller parts do not help: {failure.hint}; "
                f"expected a batch that fits. {remedy_of(failure.hint, trainer.model)}"
            )
        if failure.size == 1:
            raise torch.OutOfMemoryError(_too_large(trainer, failure))
        limit = self._lowered(trainer, failure.size, failure.columns)
        again = "repeated with the rows of the backbone in parts"
        if failure.row is not None:
            inputs, keeps = self._window[failure.position].inputs, self._whole.padding.is_kept
            again = f"repeated in {len(groups_of(inputs, self._limits, keeps_padding=keeps))} micro-batches"
        self._tell_failure(trainer, failure.size, failure.columns, f"{again} of at most {limit}", has_drawn=has_drawn)

    def _part_failed(self, rows: int, columns: int | None, seconds: float) -> None:
        """Lower the limit after a part ran out of memory, which is run again in smaller ones on the spot."""
        trainer = self._trainer()
        limit = self._lowered(trainer, rows, columns)
        self._tally.lost_seconds += seconds
        self._tell_failure(trainer, rows, columns, f"run again in parts of at most {limit}")

    def _lowered(self, trainer: Any, rows: int, columns: int | None) -> str:
        """Lower the limit after so many rows ran out of memory; return the new one."""
        name, size = _measured(rows, columns)
        limit = self._limits[name]
        old = limit.limit
        limit.lower(size)
        self._record(trainer, name, old, f"out of memory at step {trainer.state.global_step + 1}")
        self._tally.failures += 1
        return f"{limit.limit:,} {name.removeprefix('max_')}"

    def _tell_failure(
        self, trainer: Any, rows: int, columns: int | None, again: str, *, has_drawn: bool = False
    ) -> None:
        drawn = names_of_draws(trainer.model) or ("dropout" if has_drawn else "")
        draws = f" and the draws of {drawn}" if drawn else ""
        process = f"process {trainer.args.process_index}, " if trainer.args.world_size > 1 else ""
        size = f"{rows} examples" if columns is None else f"{rows} x {columns} tokens"
        notify(
            logger,
            f"{process}step {trainer.state.global_step + 1}: out of memory with {size}; {again}. "
            f"Same loss and gradient up to rounding{draws}.",
        )

    def _end_window(self, trainer: Any) -> None:
        self._tally.steps += 1
        self._tally.cut_steps += self._was_split
        for name, limit in self._limits.items():
            old = limit.limit
            if limit.note_step(was_split=self._was_split):
                reason = f"no out of memory in {limit.wait_steps} steps, at step {trainer.state.global_step + 1}"
                logger.info("micro-batching: %s", self._record(trainer, name, old, reason))
        self._begin_window()

    def _record(self, trainer: Any, name: str, old: int | None, reason: str) -> Change:
        change = Change(name, old, self._limits[name].limit, reason)
        self._changes.append(change)
        record_changes(trainer, [change])
        return change


def _measured(rows: int, columns: int | None) -> tuple[str, int]:
    """Return the limit that so many rows come under, and their size in its unit."""
    return ("max_examples", rows) if columns is None else ("max_tokens", rows * columns)


def _too_large(trainer: Any, failure: _Failure) -> str:
    """Return which example does not fit by itself."""
    indices = example_indices(trainer, failure.position) or ()
    which = "a row of the batch" if failure.row is None else f"row {failure.row} of the batch"
    if failure.row is not None and failure.row < len(indices):
        is_view = hasattr(trainer.train_dataset, "indices_of")  # its indices are those of the dataset that it reads
        index = indices[failure.row]
        which = f"example {index} of the dataset given to bucketed()" if is_view else f"train_dataset[{index}]"
    size = "" if failure.columns is None else f"has {failure.columns} tokens and "
    checkpointing = next(iter(checkpointing_arguments()))
    return (
        f"{which} {size}does not fit into memory by itself at step {trainer.state.global_step + 1} ({failure.text}); "
        f"expected an example that fits. Cut texts shorter, set {checkpointing}=True, or take a leaner preset: "
        "preset('4gb-gpu')"
    )
