"""Run a training step in pieces: cut, weigh, run, and repeat in smaller pieces what ran out of memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.binding.handles import UndoHandle, override_method
from hf_memopt.binding.versions import checkpointing_arguments
from hf_memopt.changes import Change
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.devices.random_state import RandomState
from hf_memopt.techniques.evaluation.recovery import recover_predictions
from hf_memopt.techniques.microbatching.limits import Cap
from hf_memopt.techniques.microbatching.loss_rules import LossWeights, NotSplittableError
from hf_memopt.techniques.microbatching.splitting import (
    cut,
    decoder_lengths,
    row_count,
    row_lengths,
    splittable_batch_reason,
    splittable_reason,
    take_rows,
)
from hf_memopt.techniques.nonfinite.example_indices import example_indices

__all__ = ["PiecewiseStep"]

logger = logging.getLogger(__name__)


class _MicroBatch(NamedTuple):
    """What a step was called with, and what stock divided its loss by then."""

    inputs: Mapping[str, Any]
    num_items_in_batch: Any
    accumulation_steps: int


class _Piece(NamedTuple):
    """Rows that run together: of which micro-batch since the last optimizer step, and how much of its loss they are."""

    position: int
    rows: list[int]
    weight: float
    inputs: Mapping[str, Any]


class PiecewiseStep:
    """What stands over one trainer's ``training_step`` and ``compute_loss``.

    Args:
        trainer: the trainer, which is not kept alive.
        caps: ``max_tokens`` and ``max_examples``; lowered and raised in place.
        changes: gets each change of a cap.
    """

    def __init__(self, trainer: Any, caps: dict[str, Cap], changes: list[Change]) -> None:
        self._trainer: Callable[[], Any] = ref(trainer)
        self._caps = caps
        self._changes = changes
        self._is_checked = False  # the model, since training began
        self._weights = LossWeights()
        self._window: list[_MicroBatch] = []  # micro-batches since the last optimizer step
        self._random: RandomState | None = None  # where the window began
        self._was_cut = False
        self._weight = 1.0  # what compute_loss multiplies by
        self._asked = False  # for the loss, by the piece that runs
        self._share: Callable[[], None] | None = None
        self._is_shared = False  # gradients of this attempt are with other processes

    @property
    def trainer(self) -> Any:
        """The trainer, None once it is gone."""
        return self._trainer()

    def install(self) -> list[UndoHandle]:
        """Put it over the trainer's methods, which keep it alive from then on; return what takes it off."""
        handles = [
            override_method(self.trainer, "compute_loss", self._around_loss),
            override_method(self.trainer, "training_step", self._around_step),
        ]
        of_predictions = recover_predictions(self.trainer)
        if of_predictions is not None:  # None where predictions recover already
            handles.append(of_predictions)
        return handles

    def begin_training(self) -> None:
        """Forget what was found out about the model: it may be a new one."""
        self._is_checked, self._weights = False, LossWeights()
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the micro-batches of the last optimizer step."""
        self._window, self._random, self._was_cut = [], None, False

    def _around_loss(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = before(*args, **kwargs)
            self._asked = True
            if self._share is not None:
                self._share()
            if self._weight == 1.0:
                return loss
            return (loss[0] * self._weight, *loss[1:]) if isinstance(loss, tuple) else loss * self._weight

        return compute_loss

    def _around_step(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Any:
            trainer = self.trainer
            refusal = None
            if self._weights.rule is None:
                refusal = self._examine(trainer, model, inputs, num_items_in_batch)
            if not self._window:
                self._random = RandomState.capture(trainer.args.device)
            steps = getattr(trainer, "current_gradient_accumulation_steps", 1)  # a step outside of train has none
            self._window.append(_MicroBatch(inputs, num_items_in_batch, steps))
            try:
                loss = self._run_to_the_end(before, trainer, model)
            except BaseException:
                self.begin_window()
                raise
            if trainer.accelerator.sync_gradients:
                self._end_window(trainer)
            if refusal is not None:
                raise refusal from refusal.__cause__
            return loss

        return training_step

    def _run_to_the_end(self, run: Callable[..., Any], trainer: Any, model: nn.Module) -> torch.Tensor:
        """Run the newest micro-batch; after out of memory all of the window, in smaller pieces, until it fits."""
        first = len(self._window) - 1  # those before have their gradients already
        while True:
            loss, failed, text = self._attempt(run, trainer, model, first)
            if loss is not None:
                return loss
            # The error is gone here, and with it the frames that held the failed step's tensors.
            model.zero_grad(set_to_none=True)
            free_failed_step()
            if self._random is not None:
                self._random.restore()
            self._lower_cap(trainer, *failed, text)
            first = 0

    def _attempt(
        self, run: Callable[..., Any], trainer: Any, model: nn.Module, first: int
    ) -> tuple[torch.Tensor | None, tuple[int, list[int]], str]:
        """Run the window from one micro-batch on; return the last one's loss, or what ran and the error's text."""
        self._is_shared = False
        positions = range(first, len(self._window))
        cuts = [self._pieces(trainer, model, position) for position in positions]
        failed = (first, [0])
        try:
            for position, pieces in zip(positions, cuts, strict=True):
                syncs = position == positions[-1] and trainer.accelerator.sync_gradients
                loss = None
                for piece in pieces:
                    failed = (position, piece.rows)
                    with self._apart(trainer, model, shares=syncs and piece is pieces[-1]):
                        part = self._run_piece(run, trainer, model, piece, is_alone=len(pieces) == 1)
                    loss = part if loss is None else loss + part
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = str(error).partition("\n")[0]
        else:
            return loss, failed, ""
        return None, failed, text

    def _run_piece(
        self, run: Callable[..., Any], trainer: Any, model: nn.Module, piece: _Piece, *, is_alone: bool
    ) -> torch.Tensor:
        micro_batch = self._window[piece.position]
        self._weight, self._asked = piece.weight, False
        # An epoch that ended early leaves micro-batches, and their gradients, to the next one's first step.
        trainer.current_gradient_accumulation_steps = micro_batch.accumulation_steps
        try:
            loss: torch.Tensor = run(model, copy.copy(piece.inputs), micro_batch.num_items_in_batch)  # may pop of it
        finally:
            self._weight = 1.0
        if not self._asked and (not is_alone or trainer.args.world_size > 1):
            raise RuntimeError(
                f"training_step of {type(trainer).__name__} did not call compute_loss, so the loss of a piece could "
                "not be weighted; expected one call per forward pass. Write loss = self.compute_loss(model, inputs, "
                "num_items_in_batch=num_items_in_batch) in it."
            )
        return loss

    def _pieces(self, trainer: Any, model: nn.Module, position: int) -> list[_Piece]:
        """Cut a micro-batch; all at once, since to count waits for the device."""
        inputs, num_items_in_batch, _ = self._window[position]
        max_tokens, max_examples = self._caps["max_tokens"].limit, self._caps["max_examples"].limit
        every_row = list(range(row_count(inputs)))
        if max_tokens is None and max_examples is None:
            return [_Piece(position, every_row, 1.0, inputs)]
        lengths = row_lengths(inputs)
        if lengths is None:
            groups = cut([1] * len(every_row), max_examples=max_examples)
        else:
            limits = {"max_tokens": max_tokens, "max_examples": max_examples}
            groups = cut(lengths, **limits, decoder_lengths=decoder_lengths(inputs))
        if len(groups) == 1:
            return [_Piece(position, every_row, 1.0, take_rows(inputs, every_row))]
        _refuse(trainer.model, splittable_batch_reason(inputs))
        self._was_cut = True
        weights = self._weights.of_rows(trainer, model, inputs, num_items_in_batch)
        return [_Piece(position, rows, weight, take_rows(inputs, rows)) for rows, weight in _weighted(groups, weights)]

    @contextmanager
    def _apart(self, trainer: Any, model: nn.Module, *, shares: bool) -> Iterator[None]:
        """Keep the gradients of a piece in this process; one that shares does so once its forward pass is done."""
        if trainer.args.world_size == 1:
            yield
        elif shares and not isinstance(model, DistributedDataParallel):  # compiled, around DDP
            self._is_shared = True
            yield
        else:
            with trainer.accelerator.no_sync(model), ExitStack() as stack:

                def share() -> None:
                    self._is_shared = True
                    stack.enter_context(trainer.accelerator.trigger_sync_in_backward(model))

                self._share = share if shares else None
                try:
                    yield
                finally:
                    self._share = None

    # ---- Caps -------------------------------------------------------------------------------------------------------

    def _lower_cap(self, trainer: Any, position: int, rows: list[int], text: str) -> None:
        """Make room after these rows of a micro-batch ran out of memory, or raise if that cannot be done."""
        inputs = self._window[position].inputs
        tokens = _padded_tokens(inputs, rows)
        name, held = ("max_examples", len(rows)) if tokens is None else ("max_tokens", tokens)
        if self._is_shared:
            raise torch.OutOfMemoryError(
                f"memory ran out in the backward pass in which the processes share their gradients ({text}); expected "
                f"pieces that fit there. Start with smaller ones: MicrobatchCallback({name}={max(held // 2, 1)})"
            )
        if len(rows) == 1:
            raise torch.OutOfMemoryError(_too_large(trainer, position, rows[0], tokens, text))
        cap = self._caps[name]
        old = cap.limit
        cap.lower(held)
        self._record(name, old, f"out of memory at step {trainer.state.global_step + 1}", logging.WARNING)

    def _end_window(self, trainer: Any) -> None:
        for name, cap in self._caps.items():
            old = cap.limit
            if cap.note_step(was_cut=self._was_cut):
                reason = f"no out of memory in {cap.wait_steps} steps, at step {trainer.state.global_step + 1}"
                self._record(name, old, reason, logging.INFO)
        self.begin_window()

    def _record(self, name: str, old: int | None, reason: str, level: int) -> None:
        change = Change(name, "auto" if old is None else old, self._caps[name].limit, reason)
        self._changes.append(change)
        logger.log(level, "MicrobatchCallback: %s", change)

    def _examine(
        self, trainer: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any
    ) -> NotSplittableError | None:
        """Refuse what cannot be split, before anything ran out of memory.

        Returns:
            A refusal for an error of the loss: to be raised after the step, which fails by itself if it is a mistake.
        """
        if not self._is_checked:
            if not isinstance(inputs, Mapping):
                made_in = f"{type(trainer).__name__} makes its batches from a {type(inputs).__name__} within the step"
                _refuse(trainer.model, f"{made_in}, so there are no rows to take")
            model.train()  # as the step is about to: a batch norm that a model keeps in evaluation mode does no harm
            _refuse(trainer.model, splittable_reason(model) or splittable_batch_reason(inputs))
            self._is_checked = True
        if row_count(inputs) > 1:
            try:
                self._weights.ask(trainer, model, inputs, num_items_in_batch)
            except NotSplittableError as error:
                if error.__cause__ is None:
                    raise
                return error
        return None


def _refuse(model: nn.Module, reason: str | None) -> None:
    if reason is not None:
        raise NotSplittableError(model, reason)


def _weighted(groups: list[list[int]], weights: list[float] | None) -> list[tuple[list[int], float]]:
    """Return the rows and the weight of each piece, without rows that add nothing to a mean (it would be 0 / 0)."""
    if weights is None:
        return [(rows, 1.0) for rows in groups]
    kept = [[row for row in rows if weights[row]] for rows in groups]
    return [(rows, sum(weights[row] for row in rows)) for rows in kept if rows]


def _padded_tokens(inputs: Mapping[str, Any], rows: list[int]) -> int | None:
    """Return what ``cut`` counts for a piece: rows times the longest, encoder and decoder apart."""
    lengths, of_decoder = row_lengths(inputs), decoder_lengths(inputs)
    if lengths is None:
        return None
    decoder = of_decoder or [0] * len(lengths)
    return len(rows) * (max(lengths[row] - decoder[row] for row in rows) + max(decoder[row] for row in rows))


def _too_large(trainer: Any, position: int, row: int, tokens: int | None, text: str) -> str:
    indices = example_indices(trainer, position) or ()
    which = f"train_dataset[{indices[row]}]" if row < len(indices) else f"row {row} of the batch"
    size = "" if tokens is None else f"has {tokens} tokens and "
    checkpointing = next(iter(checkpointing_arguments()))
    return (
        f"{which} {size}does not fit into memory by itself at step {trainer.state.global_step + 1} ({text}); expected "
        f"an example that fits. Cut texts shorter, set {checkpointing}=True, or take a leaner preset: "
        "preset('4gb-gpu')"
    )
