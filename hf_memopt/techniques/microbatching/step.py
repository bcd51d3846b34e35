"""Run a training step in parts, and repeat in smaller ones what ran out of memory.

There are two ways. A loss that is known to be a sum or a mean over its rows (``known_losses``) is trained in whole
micro-batches: rows are sorted by length, freed of padding, and run forward and backward one micro-batch after the
other, each with its weight. Any other loss, and any ``training_step`` of a user's, is called once with the whole batch,
while the backbone under it runs the rows in parts (``backbones``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.foreign_code import HookChangesError, observed_hooks
from hf_memopt.binding.handles import is_overridden, override_method
from hf_memopt.binding.known_losses import KnownLoss, has_stock_step, known_loss
from hf_memopt.binding.model_traits import unwrap_model, unwrap_parallel
from hf_memopt.binding.versions import checkpointing_arguments
from hf_memopt.changes import Change, record_changes
from hf_memopt.devices.memory_reading import read_memory
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.devices.random_state import RandomState
from hf_memopt.notices import notify
from hf_memopt.techniques.microbatching.backbones import LOSS_OF_ALL_ROWS, Backbones, CutStep
from hf_memopt.techniques.microbatching.limits import Limit, Tally, part_rows
from hf_memopt.techniques.microbatching.lockstep import groups_in_lockstep, refuse_together
from hf_memopt.techniques.microbatching.row_check import DependentRowsError
from hf_memopt.techniques.microbatching.rows_in_parts import PartsFailedError, Size
from hf_memopt.techniques.microbatching.splitting import (
    NotSplittableError,
    copied_batch,
    count_rows,
    cut,
    decoder_lengths,
    padded_tokens,
    row_count,
    row_lengths,
    splittable_batch_reason,
    splittable_reason,
    take_rows,
)
from hf_memopt.techniques.microbatching.stated_loss import verify_stated_loss
from hf_memopt.techniques.microbatching.step_state import StepState
from hf_memopt.techniques.nonfinite.example_indices import example_indices
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

__all__ = ["MicrobatchedStep"]

logger = logging.getLogger(__name__)

PACKED = "its examples are packed"
DROP = "MicrobatchCallback out of callbacks= and lower per_device_train_batch_size."
FUSED = "fused cross entropy"  # the purpose of the override that never makes logits

Items = torch.Tensor | int | None
"""``num_items_in_batch``, as ``training_step`` gets it."""


class _AccumulationStep(NamedTuple):
    """The arguments of one call of ``training_step``, and what stock divided its loss by at that time."""

    inputs: Any
    num_items_in_batch: Items
    accumulation_steps: int


class _Failure(NamedTuple):
    """What ran out of memory.

    ``position``: of its accumulation step in the window; ``rows``: of the batch, where they are known; ``size``: how
    many, with ``tokens`` together; ``text``: the error's first line; ``hint``: why smaller parts would not help;
    ``hook``: that no memory ran out, but a hook of others changes what passes.
    """

    position: int
    rows: list[int]
    size: int
    tokens: int | None
    text: str
    hint: str = ""
    hook: str = ""


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
        backbones: names of the modules whose rows run in parts; none: found by themselves.
        stated: the loss as the user states it; None: it is looked up.
    """

    technique = "micro-batching"

    def __init__(
        self,
        trainer: Trainer,
        limits: Mapping[str, Limit],
        changes: list[Change] | None = None,
        tally: Tally | None = None,
        backbones: tuple[str, ...] = (),
        stated: KnownLoss | None = None,
    ) -> None:
        self._trainer: Callable[[], Any] = ref(trainer)
        self._limits = limits
        self._changes = [] if changes is None else changes
        self._tally = Tally() if tally is None else tally
        self._names, self._stated = backbones, stated
        self._weight = 1.0  # compute_loss multiplies by it
        self._share_gradients: Callable[[], None] | None = None
        self._is_shared = False  # whether gradients of this attempt were sent to other processes
        self._begin_run()

    def _begin_run(self) -> None:
        self._backbones = Backbones(self._names, Size(partial(part_rows, self._limits), self._part_failed))
        self._first_way: KnownLoss | str | None = None  # of the first step, None until then
        self._known: dict[bool, KnownLoss | str | None] = {}  # by whether items are counted
        self._is_verified = self._stated is None
        self._hook = ""  # of others, that changes what passes through the model
        self._was_told = False  # that nothing can be cut
        self._begin_window()

    def _begin_window(self) -> None:
        self._window: list[_AccumulationStep] = []
        self._random: RandomState | None = None  # at the beginning of the window
        self._state: StepState | None = None  # the same
        self._was_split = False

    # ---- Overrides --------------------------------------------------------------------------------------------------

    def wrap_train(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Check the settings again, which may have changed, and look the loss up again: the model may be new."""

        def train(*args: Any, **kwargs: Any) -> Any:
            check_compatibility(self._trainer(), cast("TrainerCallback", self))
            self._begin_run()
            self._tally.restart()
            begin = time.perf_counter()
            output = before(*args, **kwargs)
            self._tally.seconds = time.perf_counter() - begin
            self._tally.check_seconds = self._backbones.seconds
            if self._tally.failures or self._tally.check_seconds:
                notify(logger, self._tally.summary(self._limits))
            return output

        return train

    def wrap_compute_loss(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Multiply the loss by the weight of the current micro-batch."""

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = before(*args, **kwargs)
            if self._share_gradients is not None:
                self._share_gradients()
            if self._weight == 1.0:
                return loss
            return (loss[0] * self._weight, *loss[1:]) if isinstance(loss, tuple) else loss * self._weight

        return compute_loss

    def wrap_training_step(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Run an accumulation step in parts, and repeat what ran out of memory."""

        def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Items = None) -> torch.Tensor:
            trainer = self._trainer()
            steps = getattr(trainer, "current_gradient_accumulation_steps", 1)  # a step outside of train has none
            self._window.append(_AccumulationStep(inputs, num_items_in_batch, steps))
            if self._first_way is None:
                self._first_way = self._way(trainer, self._window[-1])
            if self._random is None:
                self._random = RandomState.capture(trainer.args.device)
                is_plain = isinstance(self._first_way, KnownLoss) and self._tally.steps > 0
                self._state = None if is_plain else StepState(trainer)
            try:
                loss = self._run_until_it_fits(before, trainer, model)
            except BaseException:
                self._begin_window()
                raise
            if trainer.accelerator.sync_gradients:
                self._end_window(trainer)
            return loss

        return training_step

    # ---- Attempts ---------------------------------------------------------------------------------------------------

    def _run_until_it_fits(self, run: Callable[..., Any], trainer: Trainer, model: nn.Module) -> torch.Tensor:
        """Run the newest accumulation step; after out of memory the whole window, in smaller parts."""
        first = len(self._window) - 1  # the gradients of those before are there already
        while True:
            begin, lost = time.perf_counter(), self._tally.lost_seconds
            loss, failure = self._attempt(run, trainer, model, first)
            failure = failure or self._buffer_changed()
            if failure is None:
                assert loss is not None  # each attempt ends with the newest accumulation step
                return loss
            # The except block has ended, and with it the frames that referred to the failed step's tensors.
            model.zero_grad(set_to_none=True)
            free_failed_step()
            assert self._random is not None
            has_drawn = not self._random.is_same(RandomState.capture(trainer.args.device))
            self._put_back(trainer, failure)
            self._random.restore()
            if failure.hook:
                self._first_way = self._hook = failure.hook
            else:
                self._lower_limit(trainer, failure, has_drawn=has_drawn)
                self._tally.failures += 1
            self._tally.lost_seconds = lost + time.perf_counter() - begin  # what parts lost is in it
            first = 0

    def _buffer_changed(self) -> _Failure | None:
        """Look once per run whether a forward pass changes a buffer, as spectral norms do: parts would do so again."""
        if not isinstance(self._first_way, KnownLoss) or self._state is None:
            return None
        changed = self._state.changed_buffer()
        if changed is None:
            return None
        self._first_way = self._hook = f"its forward pass changes {changed}"
        return _Failure(len(self._window) - 1, [], 0, None, "", hook=self._hook) if self._was_split else None

    def _put_back(self, trainer: Any, failure: _Failure) -> None:
        """Put back what a user's step has changed, or raise: a step on changed weights is not repeated."""
        if self._state is None:
            return
        changed = self._state.lost()
        is_apart = trainer.args.world_size == 1 or isinstance(self._first_way, KnownLoss)  # _without_sync sees to these
        shared = None if is_apart else "the processes share its gradients"
        if changed is None and shared is None:
            self._state.restore()
            return
        raise torch.OutOfMemoryError(
            f"memory ran out at step {trainer.state.global_step + 1} ({failure.text}), and the step cannot be repeated"
            f", since {shared or f'{changed} was changed within it'}; expected parts that fit from the beginning. "
            f"Start with smaller ones: MicrobatchCallback({_limit_text(failure)})"
        )

    def _attempt(
        self, run: Callable[..., Any], trainer: Trainer, model: nn.Module, first: int
    ) -> tuple[torch.Tensor | None, _Failure | None]:
        """Run the window from one accumulation step on; return the loss of its last, or what failed."""
        self._is_shared = False
        loss: torch.Tensor | None = None
        begin = time.perf_counter()
        for position in range(first, len(self._window)):
            is_last = position == len(self._window) - 1
            if is_last and first < position:
                self._tally.lost_seconds += time.perf_counter() - begin  # of what was repeated
            step = self._window[position]
            way = self._way(trainer, step) if self._limits_are_set() else self._first_way  # asked where it matters
            if trainer.is_fsdp_enabled:
                refuse_together(trainer, _reason_against_shards(way, step.inputs))
            if isinstance(way, KnownLoss):
                found = self._run_micro_batches(run, trainer, model, position, way, is_last=is_last)
            else:
                found = self._run_in_parts(run, trainer, model, position, way or "")
            if isinstance(found, _Failure):
                return None, found
            loss = found
        return loss, None

    def _way(self, trainer: Any, step: _AccumulationStep) -> KnownLoss | str:
        """Return how the loss of a batch is made of its rows', or why the loss has to see the whole batch."""
        if self._hook:
            return self._hook
        counts = step.num_items_in_batch is not None
        if counts not in self._known:  # once per run: classes and forwards stay what they are
            is_stated = self._stated is not None and has_stock_step(trainer)
            self._known[counts] = self._stated if is_stated else known_loss(trainer, step.num_items_in_batch)
        found = self._known[counts]
        if not isinstance(found, KnownLoss):
            return str(found)
        if not isinstance(step.inputs, Mapping):
            return f"its batches are a {type(step.inputs).__name__}"
        trainer.model.train()  # as the step is about to: a batch norm kept in evaluation mode does no harm
        reason = splittable_reason(trainer.model) or splittable_batch_reason(step.inputs)
        return reason or found.reason_against(step.inputs) or found

    def _call(self, run: Callable[..., Any], trainer: Any, model: nn.Module, position: int, inputs: Any) -> Any:
        step = self._window[position]
        # An epoch that ended early leaves accumulation steps, and their gradients, to the next epoch's first step.
        trainer.current_gradient_accumulation_steps = step.accumulation_steps
        return run(model, copied_batch(inputs), step.num_items_in_batch)  # a subclass may pop columns from it

    # ---- Whole micro-batches ----------------------------------------------------------------------------------------

    def _run_micro_batches(
        self, run: Callable[..., Any], trainer: Any, model: nn.Module, position: int, way: KnownLoss, *, is_last: bool
    ) -> torch.Tensor | _Failure:
        inputs = self._window[position].inputs
        micro_batches = self._split(trainer, model, position, way)
        syncs = is_last and trainer.accelerator.sync_gradients
        is_limited = self._limits_are_set()
        loss: torch.Tensor | None = None
        rows: list[int] = []
        try:
            with observed_hooks(trainer.model) if len(micro_batches) > 1 else nullcontext():
                for number, (rows, weight) in enumerate(micro_batches):
                    taken = take_rows(inputs, rows) if is_limited else inputs
                    with self._without_sync(trainer, model, shares=syncs and number == len(micro_batches) - 1):
                        self._weight = weight
                        part = self._call(run, trainer, model, position, taken)
                    del taken
                    loss = part if loss is None else loss + part
        except HookChangesError as error:
            return _Failure(position, rows, len(rows), None, "", hook=str(error))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = str(error).partition("\n")[0]
        else:
            assert loss is not None  # there is one micro-batch at least
            return loss
        finally:
            self._weight = 1.0
        return _Failure(position, rows, len(rows), padded_tokens(inputs, rows), text)

    def _split(self, trainer: Any, model: nn.Module, position: int, way: KnownLoss) -> list[tuple[list[int], float]]:
        """Return the rows of each micro-batch of an accumulation step, and their part of its loss."""
        inputs, items, _ = self._window[position]
        groups, repeats = self._groups(inputs), 0
        if trainer.is_fsdp_enabled:
            groups, repeats = groups_in_lockstep(trainer, groups)
        if len(groups) + repeats == 1:
            return [(groups[0], 1.0)]
        self._was_split = True
        if not self._is_verified:
            verify_stated_loss(trainer, model, inputs, items, way)
            self._is_verified = True
        weights = way.row_weights(inputs)
        return _weighted(groups, weights) + [(groups[0][:1], 0.0)] * repeats

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

    # ---- Rows in parts ----------------------------------------------------------------------------------------------

    def _run_in_parts(
        self, run: Callable[..., Any], trainer: Any, model: nn.Module, position: int, why: str
    ) -> torch.Tensor | _Failure:
        """Run the whole step once, with the rows of the backbone in parts."""
        inputs, where = self._window[position].inputs, _where(trainer, self._window[position].inputs)
        self._refuse_logits(trainer, inputs)
        failed_size: tuple[int, int | None] | None = None
        loss = None
        with ExitStack() as stack:
            seen = CutStep()
            if self._limits_are_set() or not trainer.args.torch_compile:  # else it would run uncompiled, for nothing
                seen = stack.enter_context(self._backbones.cut(unwrap_parallel(model)))
            stack.enter_context(override_method(trainer.accelerator, "backward", _noting_out_of_memory(seen)))
            try:
                loss = self._call(run, trainer, model, position, inputs)
            except DependentRowsError as error:
                remedy = _remedy(str(error), trainer.model)
                raise NotSplittableError(trainer.model, str(error), where=where, remedy=remedy) from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                seen.error = seen.error or str(error).partition("\n")[0]
                failed_size = (error.rows, error.columns) if isinstance(error, PartsFailedError) else None
        self._was_split |= bool(seen.cut)
        if seen.error is None:
            self._check_cut(trainer, seen, where, why if why.startswith(PACKED) else "", inputs)
            self._tell_cut(trainer, seen, why)
            return cast(torch.Tensor, loss)
        rows, columns = failed_size or seen.largest or (count_rows(inputs), None)
        hint = ""
        if seen.cut and failed_size is None:
            hint = "outside of the backbone, where all rows are needed" + self._logits_text(trainer, inputs)
        elif rows == 1 and why.startswith(PACKED):
            hint = why
        elif self._limits_are_set() and not seen.cut and not seen.fits:
            hint = "; ".join(seen.reasons) or "no module of transformers was called"
        return _Failure(position, [], rows, None if columns is None else rows * columns, seen.error, hint)

    def _limits_are_set(self) -> bool:
        return any(limit.limit is not None for limit in self._limits.values())

    def _check_cut(self, trainer: Any, seen: CutStep, where: str, packed: str, inputs: Any) -> None:
        """Refuse a step whose rows are above the user's limit and that nothing could cut; else say so once."""
        most = self._limits["max_tokens"].maximum
        if packed and not seen.cut and most is not None and (padded_tokens(inputs, [0]) or 0) > most:
            remedy = f"Pack fewer tokens into a row, raise max_tokens={most}, or take {DROP}"
            raise NotSplittableError(trainer.model, packed, where=where, remedy=remedy)
        if seen.cut or seen.fits or not seen.reasons or not self._limits_are_set():
            return
        reason = "; ".join(seen.reasons)
        if any(limit.maximum is not None for limit in self._limits.values()):
            raise NotSplittableError(trainer.model, reason, where=where, remedy=_remedy(reason, trainer.model))
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
            modules = [module for name, module in self._backbones.modules_of(trainer.model) if name in seen.names]
            weights = {weight for module in modules for weight in module.parameters() if weight.requires_grad}
            twice = format_bytes(sum(weight.nbytes for weight in weights))
            notify(
                logger,
                f"micro-batching: from the second accumulation step on, gradients of {names} exist twice: {twice}",
            )

    def _part_failed(self, rows: int, columns: int | None, text: str, seconds: float) -> None:
        """Lower the limit after a part ran out of memory, which is run again in smaller ones on the spot."""
        trainer = self._trainer()
        name, size = ("max_examples", rows) if columns is None else ("max_tokens", rows * columns)
        limit, step = self._limits[name], trainer.state.global_step + 1
        old = limit.limit
        limit.lower(size)
        self._record(trainer, name, old, f"out of memory at step {step}")
        self._tally.failures += 1
        self._tally.lost_seconds += seconds
        shown = f"{rows} examples" if columns is None else f"{rows} x {columns} tokens"
        notify(
            logger,
            f"{_process(trainer)}step {step}: out of memory with {shown}; run again in parts of at most "
            f"{limit.limit:,} {name.removeprefix('max_')}. Same loss and gradient up to rounding.",
        )

    def _refuse_logits(self, trainer: Any, inputs: Any) -> None:
        """Refuse a step before it runs whose logits, which exist for all rows, cannot fit."""
        if not self._limits_are_set():
            return
        needed = _logits_bytes(trainer.model, inputs)
        if needed < 2**28:  # far below any device; asking costs more
            return
        reading = read_memory(trainer.args.device)
        room = reading.host_available_bytes
        if reading.device_total_bytes is not None:
            room = reading.device_total_bytes - (reading.allocated_bytes or 0)
        if needed > room:
            raise NotSplittableError(
                trainer.model,
                f"its loss needs the logits of all rows{self._logits_text(trainer, inputs)}, and {format_bytes(room)} "
                "are free",
                where=_where(trainer, inputs),
                remedy="Add FusedCrossEntropyCallback(), or lower per_device_train_batch_size and raise "
                "gradient_accumulation_steps.",
            )

    def _logits_text(self, trainer: Any, inputs: Any) -> str:
        needed = _logits_bytes(trainer.model, inputs)
        return f" (its logits and their gradient take {format_bytes(needed)} at least)" if needed else ""

    # ---- Limits -----------------------------------------------------------------------------------------------------

    def _lower_limit(self, trainer: Trainer, failure: _Failure, *, has_drawn: bool) -> None:
        """Lower the limit after these rows of an accumulation step ran out of memory, or raise if that cannot help."""
        position, rows, count, tokens, text, hint, _ = failure
        inputs = self._window[position].inputs
        name, size = ("max_examples", count) if tokens is None else ("max_tokens", tokens)
        if self._is_shared or trainer.is_fsdp_enabled:
            where = "in the backward pass in which the processes share their gradients"
            if trainer.is_fsdp_enabled:
                where = "under FSDP2, where the processes run each micro-batch together"
            raise torch.OutOfMemoryError(
                f"memory ran out {where} ({text}); expected micro-batches that fit there. Start with smaller ones: "
                f"MicrobatchCallback({_limit_text(failure)})"
            )
        if hint:
            raise torch.OutOfMemoryError(
                f"memory ran out at step {trainer.state.global_step + 1} ({text}), and smaller parts do not help: "
                f"{hint}; expected a batch that fits. {_remedy(hint, trainer.model)}"
            )
        if count == 1:
            raise torch.OutOfMemoryError(_too_large(trainer, position, rows, tokens, text))
        limit = self._limits[name]
        old = limit.limit
        limit.lower(size)
        step = trainer.state.global_step + 1
        self._record(trainer, name, old, f"out of memory at step {step}")
        unit = name.removeprefix("max_")
        if rows:
            lengths = row_lengths(inputs)
            shown = f"{count} examples" if lengths is None else f"{count} x {max(lengths[r] for r in rows)} tokens"
            again = f"repeated in {len(self._groups(inputs))} micro-batches"
        else:
            shown = f"{count} examples" if tokens is None else f"{count} x {tokens // count} tokens"
            again = "repeated with the rows of the backbone in parts"
        draws = " and the draws of dropout" if has_drawn else ""
        notify(
            logger,
            f"{_process(trainer)}step {step}: out of memory with {shown}; {again} of at most {limit.limit:,} {unit}. "
            f"Same loss and gradient up to rounding{draws}.",
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


def _noting_out_of_memory(seen: CutStep) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what notes an out-of-memory error of ``accelerator.backward``, which a user's step may swallow."""

    def wrap(before: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return before(*args, **kwargs)
            except Exception as error:
                if is_out_of_memory(error):
                    seen.error = str(error).partition("\n")[0]
                raise

        return backward

    return wrap


def _logits_bytes(model: nn.Module, inputs: Any) -> int:
    """Return the bytes of a batch's logits in float32 and of their gradient; 0 without a language model's head."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    ask = getattr(unwrap_model(model), "get_output_embeddings", None)
    head = None if ask is None or not torch.is_tensor(ids) else ask()
    if ids is None or head is None or not hasattr(head, "weight"):
        return 0
    if is_overridden(head, "forward", FUSED):
        return 0
    labels = inputs.get("labels")
    tokens: torch.Tensor = labels if torch.is_tensor(labels) and labels.dim() == ids.dim() else ids
    return 2 * 4 * tokens.numel() * len(head.weight)


def _reason_against_shards(way: KnownLoss | str | None, inputs: Any) -> str | None:
    """Return why a batch cannot be cut where weights are gathered in each forward pass."""
    if isinstance(way, KnownLoss) and way.row_weights(inputs) is None:
        return None
    found = f"and it is a mean over {way.over}" if isinstance(way, KnownLoss) else f"and {way}"
    return (
        f"under FSDP2 its loss has to be a known sum that num_items_in_batch divides, {found} "
        "(compute_loss_func=exact_loss(model) makes such a sum of a mean)"
    )


def _process(trainer: Any) -> str:
    return f"process {trainer.args.process_index}, " if trainer.args.world_size > 1 else ""


def _where(trainer: Any, inputs: Any) -> str:
    """Return which step and what kind of batch this is."""
    names = f"a batch of {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else type(inputs).__name__
    return f" at step {trainer.state.global_step + 1} ({names})"


def _limit_text(failure: _Failure) -> str:
    name, size = ("max_examples", failure.size) if failure.tokens is None else ("max_tokens", failure.tokens)
    return f"{name}={max(size // 2, 1)}"


def _remedy(reason: str, model: Any) -> str:
    """Return what to do, as code, where rows cannot run apart for this reason."""
    if "create_graph" in reason or "changed between" in reason:
        return f"Take {DROP}"
    name = "..."
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):  # then that with most weights
        sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
        name = max(sizes, key=lambda name: sizes[name], default=name)
    part = f"Name a part of the model whose rows are independent: MicrobatchCallback(backbone={name!r})"
    if "would see parts" in reason:
        part = "Take the hook off, or name a part of the model without it: MicrobatchCallback(backbone='...')"
    return f"{part}, or take {DROP}"


def _weighted(groups: list[list[int]], weights: list[float] | None) -> list[tuple[list[int], float]]:
    """Return the rows and the weight of each micro-batch, without rows that add nothing to a mean (it would be 0 / 0).

    ``weights`` is that of each row, shape (rows,), or None if losses add up.
    """
    if weights is None:
        return [(rows, 1.0) for rows in groups]
    kept = [[row for row in rows if weights[row]] for rows in groups]
    return [(rows, sum(weights[row] for row in rows)) for rows in kept if rows]


def _too_large(trainer: Trainer, position: int, rows: list[int], tokens: int | None, text: str) -> str:
    indices = example_indices(trainer, position) or ()
    which = f"row {rows[0]} of the batch" if rows else "a row of the batch"
    if rows and rows[0] < len(indices):
        is_view = hasattr(trainer.train_dataset, "indices_of")  # its indices are those of the dataset that it reads
        index = indices[rows[0]]
        which = f"example {index} of the dataset given to bucketed()" if is_view else f"train_dataset[{index}]"
    size = "" if tokens is None else f"has {tokens} tokens and "
    checkpointing = next(iter(checkpointing_arguments()))
    return (
        f"{which} {size}does not fit into memory by itself at step {trainer.state.global_step + 1} ({text}); expected "
        f"an example that fits. Cut texts shorter, set {checkpointing}=True, or take a leaner preset: "
        "preset('4gb-gpu')"
    )
