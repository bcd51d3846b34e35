"""Run a batch whose loss is a known sum or mean over rows in whole micro-batches, forward and backward one by one.

Padding that a micro-batch does not need is cut off, unless the loss of a row differs with it (``padding_check``). What
a loss calls may have been exchanged, so that of the first batch of each kind, and of one step in 200, is compared with
that of its parts: forward alone, the price of two forward passes.

Between processes under DDP gradients are shared in the backward pass of the last micro-batch alone.

Under FSDP2, where a forward pass gathers the weights from all processes, they have to run as many passes each, or those
that run more would wait for ever. So they agree on the number of micro-batches of each accumulation step: the most that
any of them needs. The others cut their batches into smaller micro-batches; where rows are fewer than that, a row is run
again with weight 0. Only a sum over labels that ``num_items_in_batch`` divides is cut, since its parts add up without
weights; ``compute_loss_func=exact_loss(model)`` makes such a sum of a mean over rows. The price: two more waits for the
other processes per accumulation step. Gradients are reduced in each micro-batch, so that no process holds those of the
whole model.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.binding.losses import KnownLoss, observed_hooks
from hf_memopt.binding.model import IGNORED_LABEL
from hf_memopt.binding.trials import is_narrow, row_count, untraced
from hf_memopt.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.techniques.microbatching.accumulation_step import (
    LARGEST_ERROR_16_BITS,
    SMALLEST,
    AccumulationStep,
    largest_of_all,
    loss_of,
)
from hf_memopt.techniques.microbatching.backbones import CHECKED_STEPS
from hf_memopt.techniques.microbatching.limits import Limit, are_set
from hf_memopt.techniques.microbatching.module_call import DRAWS, code_of, settings_of
from hf_memopt.techniques.microbatching.not_splittable import NotSplittableError
from hf_memopt.techniques.microbatching.padding_check import Padding
from hf_memopt.techniques.microbatching.splitting import (
    cut,
    decoder_lengths,
    row_lengths,
    take_rows,
    tensors_by_name,
)


class OtherLossError(Exception):
    """The loss of a batch is not made of those of its parts as its source says."""


class WholeMicroBatches:
    """Runs batches in micro-batches within limits, each with its weight."""

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        self._limits = limits
        self.rows: list[int] = []  # of the micro-batch that runs, or ran last
        self.are_shared = False  # gradients of this batch were sent to other processes
        self.verified_labels = 0  # a stated loss may be cut whose rows have as many different labels, 2 for any number
        self.padding = Padding()
        self.compared: set[Any] = set()  # kinds of batches whose loss was compared with those of its parts
        self._draw = random.Random(0)  # of its own: nobody else's numbers are drawn
        self._weight = 1.0
        self._share_gradients: Callable[[], None] | None = None

    def compute_loss(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Multiply the loss by the weight of the current micro-batch."""
        loss = before(*args, **kwargs)
        if self._share_gradients is not None:
            self._share_gradients()
        if self._weight == 1.0:
            return loss
        return (loss[0] * self._weight, *loss[1:]) if isinstance(loss, tuple) else loss * self._weight

    def run(self, trainer: Any, step: AccumulationStep, loss: KnownLoss, *, syncs: bool) -> tuple[torch.Tensor, bool]:
        """Run an accumulation step; return the sum of the losses, and whether the batch was split. The last micro-batch
        shares its gradients where ``syncs``.
        """
        self.rows = [0]  # what fails before any of them runs, with few rows, is not helped by smaller ones
        micro_batches = self._split(trainer, step, loss)
        is_split, losses = len(micro_batches) > 1, []
        try:
            with observed_hooks(trainer.model) if is_split else nullcontext():
                for number, (self.rows, self._weight) in enumerate(micro_batches, 1):
                    taken = step.inputs
                    if are_set(self._limits):
                        taken = take_rows(step.inputs, self.rows, keeps_padding=self.padding.is_kept)
                    shares = syncs and number == len(micro_batches)
                    with self._without_sync(trainer, step.model, shares=shares):
                        losses.append(step.call(trainer, taken))
                    del taken
        finally:
            self._weight = 1.0
        return sum(losses[1:], losses[0]), is_split

    def _split(self, trainer: Any, step: AccumulationStep, loss: KnownLoss) -> list[tuple[list[int], float]]:
        """Return the rows of each micro-batch of an accumulation step, and their part of its loss."""
        if are_set(self._limits):
            self.padding.check(trainer, step, loss)
        groups, repeats = groups_of(step.inputs, self._limits, keeps_padding=self.padding.is_kept), 0
        if trainer.is_fsdp_enabled:
            groups, repeats = groups_in_lockstep(trainer, groups)
        if len(groups) + repeats == 1:
            return [(groups[0], 1.0)]
        if self.verified_labels < 2:  # rows of one label do not show that a loss weighs classes
            labels = len(set(_row_labels(trainer, step.inputs) or (0, 1)) - {IGNORED_LABEL})
            if trainer.is_fsdp_enabled:
                labels = largest_of_all(trainer, labels)
            if self.verified_labels < min(labels, 2) or not self.verified_labels:
                verify_stated_loss(trainer, step, loss, self.padding.is_kept)
                self.verified_labels = min(max(labels, 1), 2)
        weights = loss.row_weights(step.inputs)
        self._compare(trainer, step, loss, groups)
        if weights is None:  # losses add up
            return [*((rows, 1.0) for rows in groups), *[(groups[0][:1], 0.0)] * repeats]
        kept = ([row for row in rows if weights[row]] for rows in groups)  # a mean over nothing would be 0 / 0
        return [(rows, sum(weights[row] for row in rows)) for rows in kept if rows]

    def _compare(self, trainer: Any, step: AccumulationStep, loss: KnownLoss, groups: list[list[int]]) -> None:
        """Compare the loss of a batch of a new kind, and in some steps of any, with those of its parts."""
        flags = ((name, code_of(value)) for name, value in tensors_by_name(step.inputs) if value.dim() < 2)
        kind = self.padding.is_kept, *step.inputs, *flags, settings_of(step.model)
        is_due = self._draw.random() < CHECKED_STEPS or kind not in self.compared
        if trainer.is_fsdp_enabled:  # a process alone in a forward pass would wait for the others
            is_due = bool(largest_of_all(trainer, int(is_due)))
        if is_due and not loss.source.startswith("stated"):
            compare_with_parts(trainer, step, loss, groups, self.padding.is_kept)
            self.compared.add(kind)

    @contextmanager
    def _without_sync(self, trainer: Any, model: nn.Module, *, shares: bool) -> Iterator[None]:
        """Keep the gradients of a micro-batch in this process, or share them where ``shares``.

        DDP shares gradients within the backward pass, but decides on that in the forward pass. A process that runs out
        of memory in between would leave the others waiting, so sharing is switched on only once the forward pass and
        the loss are done: ``trigger_sync_in_backward``.
        """
        if trainer.args.world_size == 1 or trainer.is_fsdp_enabled:  # FSDP2 reduces each micro-batch's gradients
            yield
        elif shares and not isinstance(model, DistributedDataParallel):  # torch.compile around DDP
            self.are_shared = True
            yield
        else:
            with trainer.accelerator.no_sync(model), ExitStack() as stack:

                def share() -> None:
                    self.are_shared = True
                    stack.enter_context(trainer.accelerator.trigger_sync_in_backward(model))

                self._share_gradients = share if shares else None
                try:
                    yield
                finally:
                    self._share_gradients = None


def groups_of(inputs: Mapping[str, Any], limits: Mapping[str, Limit], *, keeps_padding: bool) -> list[list[int]]:
    """Return the rows of each micro-batch of a batch; of a single one all of them in their order."""
    every_row = list(range(row_count(inputs)))
    if not are_set(limits):
        return [every_row]
    most = {name: limit.limit for name, limit in limits.items()}
    lengths = row_lengths(inputs, keeps_padding=keeps_padding)
    if lengths is None:
        groups = cut([1] * len(every_row), max_examples=most["max_examples"])
    else:
        groups = cut(lengths, **most, decoder_lengths=decoder_lengths(inputs, keeps_padding=keeps_padding))
    return groups if len(groups) > 1 else [every_row]


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


def refuse_together(trainer: Any, way: KnownLoss | str | None, inputs: Any) -> None:
    """Raise NotSplittableError in every process if the batch of one of them cannot be cut."""
    reason = None
    if not isinstance(way, KnownLoss) or way.row_weights(inputs) is not None:
        found = f"it is a mean over {way.over}" if isinstance(way, KnownLoss) else way
        reason = (
            f"under FSDP2 its loss has to be a known sum that num_items_in_batch divides, and {found} "
            "(compute_loss_func=exact_loss(model) makes such a sum of a mean)"
        )
    if largest_of_all(trainer, int(reason is not None)):
        raise NotSplittableError(trainer.model, reason or "the batch of another process cannot be split")


def groups_in_lockstep(trainer: Any, groups: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Cut the micro-batches of this process further, to as many as the process with the most of them has.

    Of too few rows, also how many more passes it has to run.
    """
    wanted, found = largest_of_all(trainer, len(groups)), list(groups)
    while len(found) < wanted and max(map(len, found)) > 1:
        index = max(range(len(found)), key=lambda index: len(found[index]))
        largest = found[index]
        found[index : index + 1] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return found, wanted - len(found)


# ---- A known loss, compared with what runs ---------------------------------------------------------------------------

LARGEST_OF_LOSS = 1e-3  # rows are added in another order, over shorter ones; of experts a few take other ways
LARGEST_OF_LOSS_16_BITS = 2**-6  # seen: 0.013, T5 in bfloat16, whose losses are rounded to 2**-8


def compare_with_parts(
    trainer: Any, step: AccumulationStep, loss: KnownLoss, groups: list[list[int]], keeps_padding: bool
) -> None:
    """Raise OtherLossError if the loss of a batch, or of as many rows as fit, is not that of its parts: forward alone,
    without dropout.
    """
    ran_out = False
    try:
        with untraced(trainer, step.model) as state, torch.no_grad():
            whole, joined = float(loss_of(trainer, step, step.inputs)), 0.0
            if state.has_drawn() and float(loss_of(trainer, step, step.inputs)) != whole:
                raise OtherLossError(DRAWS)
            weights = loss.row_weights(step.inputs)
            for rows in groups:
                share = 1.0 if weights is None else sum(weights[row] for row in rows)
                state.restore()
                part = take_rows(step.inputs, rows, keeps_padding=keeps_padding)
                joined += share * float(loss_of(trainer, step, part)) if share else 0.0
    except Exception as error:
        if not is_out_of_memory(error) or trainer.is_fsdp_enabled:
            raise
        ran_out = True
    if ran_out:  # the except block has ended, and with it the frames that hold tensors
        free_failed_step()
        fewer = list(range(row_count(step.inputs) // 2))
        if len(fewer) > 1:
            step = step._replace(inputs=take_rows(step.inputs, fewer, keeps_padding=keeps_padding))
            compare_with_parts(trainer, step, loss, [[row] for row in fewer], keeps_padding)
        return
    limit = LARGEST_OF_LOSS_16_BITS if is_narrow(trainer, step.model) else LARGEST_OF_LOSS
    differs = abs(whole - joined) > limit * max(abs(whole), abs(joined), SMALLEST / float(step.num_items_in_batch or 1))
    if largest_of_all(trainer, int(differs)) if trainer.is_fsdp_enabled else differs:
        raise OtherLossError(f"that of a batch is {whole:.6g}, and that of its parts {joined:.6g}")


# ---- A loss that the user has stated, verified once, on rows of different labels


ROWS = 4
LARGEST_ERROR = 1e-3  # of the largest gradient of a parameter: rows are added in another order, over shorter ones


def verify_stated_loss(
    trainer: Any, step: AccumulationStep, loss: KnownLoss, keeps_padding: bool, most_rows: int = ROWS
) -> None:
    """Raise NotSplittableError unless a few rows of a batch have the gradients that the stated loss gives.

    They are compared with those of the rows taken alone, weighted as stated: in training mode, without dropout. The
    Trainer, its model and all generators are left as they were.
    """
    try:
        return _verify(trainer, step, loss, keeps_padding, most_rows)
    except Exception as error:
        if not is_out_of_memory(error) or most_rows <= 2:  # fewer rows say nothing
            raise
    free_failed_step()
    verify_stated_loss(trainer, step, loss, keeps_padding, most_rows // 2)


def _verify(trainer: Any, step: AccumulationStep, loss: KnownLoss, keeps_padding: bool, most_rows: int) -> None:
    inputs = step.inputs
    rows = _rows_to_verify(inputs, _row_labels(trainer, inputs))[:most_rows]
    batch = take_rows(inputs, rows, keeps_padding=keeps_padding)
    found = _difference(trainer, step, batch, loss.row_weights(batch), keeps_padding)
    if found is None:
        return
    remedy = "Leave loss= out: MicrobatchCallback() then cuts below the loss, whatever it is."
    if step.num_items_in_batch is not None and _difference(trainer, step, batch, None, keeps_padding) is None:
        remedy = 'The Trainer divides a sum by num_items_in_batch here. Call MicrobatchCallback(loss="sum")'
    raise NotSplittableError(trainer.model, f"its loss is not what is stated ({loss.source}): {found}", remedy=remedy)


def _row_labels(trainer: Any, inputs: Mapping[str, Any]) -> list[Any] | None:
    """Return the label of each row, shape (rows,); None where rows have several, or none."""
    found = (inputs.get(name) for name in ("labels", *trainer.label_names))
    return next((x.flatten().tolist() for x in found if torch.is_tensor(x) and x.numel() == row_count(inputs)), None)


def _rows_to_verify(inputs: Mapping[str, Any], labels: list[Any] | None) -> list[int]:
    """Return all rows: the shortest of the rarest label, of the most common one and of each other, then the rest."""
    lengths = row_lengths(inputs) or [1] * row_count(inputs)
    rows = sorted(range(len(lengths)), key=lambda row: lengths[row])
    if labels is None:
        return rows
    counts = Counter(label for label in labels if label != IGNORED_LABEL)
    order = [label for label, _ in reversed(counts.most_common())]
    order[1:1] = order[1:][-1:]
    first: dict[Any, int] = {}
    for row in rows:
        first.setdefault(labels[row], row)
    return [*dict.fromkeys([*(first[label] for label in order), *rows])]


def _difference(
    trainer: Any, step: AccumulationStep, batch: Mapping[str, Any], weights: list[float] | None, keeps_padding: bool
) -> str | None:
    """Return how the gradients of some rows differ from the weighted sum of those of the rows alone; None if not."""
    model, rows = step.model, row_count(batch)
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def gradients(some: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss_of(trainer, step, some), list(parameters.values()), materialize_grads=True)

    with untraced(trainer, model):
        whole = gradients(batch)
        summed = [torch.zeros_like(gradient) for gradient in whole]
        for row, weight in enumerate(weights or [1.0] * rows):
            if weight:
                for total, gradient in zip(
                    summed, gradients(take_rows(batch, [row], keeps_padding=keeps_padding)), strict=True
                ):
                    total.add_(gradient, alpha=weight)
    # of the largest of all: that of an attention's key bias is 0 but for rounding
    smallest = SMALLEST * max((float(gradient.abs().max()) for gradient in whole), default=0.0)
    limit = LARGEST_ERROR_16_BITS if is_narrow(trainer, model) else LARGEST_ERROR
    for name, one, other in zip(parameters, whole, summed, strict=True):
        largest = max(float(one.abs().max()), float(other.abs().max()), smallest, 1e-12)
        error = float((one - other).abs().max()) / largest
        if error > limit:
            return f"the gradient of {name} for {rows} rows differs by {error:.1e} from that of the rows alone"
    return None
