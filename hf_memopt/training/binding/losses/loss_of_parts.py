"""Find out by value how the losses of micro-batches make that of both: they add up, or they average.

Compared are two halves of the batch that is about to run and the whole: forward alone, without dropout, with batch
norms in evaluation mode, the same ``num_items_in_batch`` and the same random numbers. Of a single row, or where halves
show nothing, the parts are the batch twice. A mean that the user divides by the accumulation steps is half as large
with twice as many; a division by a number from outside is watched for, since its value does not change.

Rows that meet in the loss (negatives of the batch) neither add up nor average. Then a loss is taken for a mean if twice
the count changes nothing and the whole is less than its parts together, or if parts cannot be computed. A loss worth 0,
as of policy gradients, shows nothing, and is left alone.

The price: forward passes of two batches, once per run; 26 of a loss that draws random numbers. The processes of a run
decide together and run the same number of passes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_memopt.training.binding.trials import (
    Gradients,
    StepState,
    copied_batch,
    is_narrow,
    row_count,
    select_rows,
    untraced,
)
from hf_memopt.training.binding.undo import set_attribute

LARGEST_ERROR = 1e-4  # of the largest loss: rows are added in another order
LARGEST_ERROR_16_BITS = 5e-2
SMALLEST = 1e-6  # a smaller loss is a difference of larger numbers
LARGEST_COPY_BYTES = 2**30  # of a buffer that a forward pass changes, as the queue of a momentum encoder is
DRAWN = 8  # how often a loss is computed that draws random numbers
NOTHING, NEITHER, ADDS_UP, AVERAGES = range(4)  # what parts show; of several processes the largest decides
DIVISIONS = {"__truediv__", "__itruediv__", "div", "div_", "true_divide", "true_divide_"}


class Finding(NamedTuple):
    """Whether a loss is a mean over its batch, the losses that were seen, and whether they add up or average."""

    is_mean: bool
    losses: str = ""
    is_clear: bool = True


def compare_parts(trainer: Any, model: nn.Module, inputs: Any, items: Any, loss: Callable[[Any, Any], Any]) -> Finding:
    """Return what the losses of parts show; ``loss(batch, items)`` computes one, and leaves no trace."""
    trial = _Trial(trainer, inputs, items, loss, LARGEST_ERROR_16_BITS if is_narrow(trainer, model) else LARGEST_ERROR)
    for has_graph in (False, True):  # a loss that differentiates something needs one
        with ExitStack() as stack:
            trial.state = stack.enter_context(untraced(trainer, model, largest_copy_bytes=LARGEST_COPY_BYTES))
            if has_graph:
                stack.callback(Gradients(trainer, model).restore)
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                    stack.callback(module.train)
                    module.eval()
            stack.enter_context(torch.set_grad_enabled(has_graph))
            if (finding := trial.finding()) is not None:
                return finding
    return Finding(False, f"its loss cannot be computed twice ({trial.error})", is_clear=False)


class _Losses(NamedTuple):
    """The losses of two parts and of both together."""

    parts: str
    one: float
    other: float
    both: float

    def shows(self, limit: float) -> int:
        """Return what they show, up to rounding."""
        low, high, smallest = min(self[1:3]), max(self[1:3]), min(abs(self.one), abs(self.other))
        error = limit * max(abs(low), abs(high), abs(self.both))
        adds_up = abs(self.both - self.one - self.other) <= error
        averages = low - error <= self.both <= high + error
        if not all(map(math.isfinite, self[1:])) or smallest <= max(SMALLEST, limit * abs(self.both)):
            return NOTHING
        return NEITHER if adds_up == averages else ADDS_UP if adds_up else AVERAGES

    def __str__(self) -> str:
        return f"{self.parts} have losses of {self.one:.6g} and {self.other:.6g}, both together {self.both:.6g}"


class _Trial:
    """Computes the loss of a batch and of its parts, each as if it were the first."""

    state: StepState

    def __init__(self, trainer: Any, inputs: Any, items: Any, loss: Callable[[Any, Any], Any], limit: float) -> None:
        self._trainer, self._inputs, self._items, self._loss, self._limit = trainer, inputs, items, loss, limit
        self.error = ""

    def finding(self) -> Finding | None:
        """Return what the parts show; None if the loss of the batch failed in some process."""
        self.error = ""
        try:
            whole = self._value(self._inputs)
        except torch.OutOfMemoryError:  # the step runs out as well, and may be repeated
            raise
        except Exception as error:
            whole, self.error = math.nan, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
        if self._in_any_process(self.error != ""):
            return None
        parts, unclear = [*_parts(self._inputs)], list[_Losses]()
        if self._in_any_process(self.state.has_drawn() and self._value(self._inputs, goes_on=True) != whole) and parts:
            return self._of_random_numbers(parts[1][3])
        for name, *batches in parts:  # of which each takes two forward passes, as processes may have to run together
            one = self._value_if_any(batches[0])
            other = one if batches[1] is batches[0] else self._value_if_any(batches[1])
            both = whole if batches[2] is self._inputs else self._value_if_any(batches[2])
            losses = _Losses(name, one, other, both)
            shown = self._largest_of_all(losses.shows(self._limit))
            if shown in (ADDS_UP, AVERAGES):
                return Finding(shown == AVERAGES and not self._divides_by_steps(), str(losses))
            unclear.append(losses)
        if not unclear:
            return Finding(False, "its batch has no rows", is_clear=False)
        losses = next((losses for losses in unclear if losses.shows(self._limit)), unclear[0])
        is_counted = abs(self._value(self._inputs, self._items and 2 * self._items) - whole) > self._limit * abs(whole)
        is_less = min(losses[1:3]) > 0 and losses.both < (1 - self._limit) * (losses.one + losses.other)
        have_failed = math.isnan(losses.one + losses.other) and SMALLEST < abs(whole) < math.inf
        is_mean = self._in_any_process((is_less or have_failed) and not is_counted)
        return Finding(is_mean and not self._divides_by_steps(), str(losses), is_clear=False)

    def _of_random_numbers(self, twice: Any) -> Finding:
        """Return what the mean of several draws shows, of a batch and of that batch ``twice``."""
        one, both = (sum(self._value(x, goes_on=True) for _ in range(DRAWN)) / DRAWN for x in (self._inputs, twice))
        share = both / (2 * one) if abs(one) > SMALLEST else 1.0
        is_mean = self._in_any_process(share < 0.75) and not self._divides_by_steps()
        losses = _Losses(f"a batch and its copy, drawn {DRAWN} times,", one, one, both)
        is_clear = abs(one) > SMALLEST and min(abs(share - 0.5), abs(share - 1)) < 0.1
        return Finding(is_mean, str(losses), is_clear)

    def _value(self, batch: Any, items: Any = None, *, goes_on: bool = False, watch: Any = None) -> float:
        """Return the loss of a batch; ``goes_on``: with the random numbers and the state that the last one left."""
        if not goes_on:
            self.state.restore()
        loss = self._loss(copied_batch(batch), self._items if items is None else items)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if watch is not None:
            watch.loss = loss
        return float(loss.detach())

    def _value_if_any(self, batch: Any) -> float:
        """Return the loss of a batch; nan where it fails, as that of half a pair does."""
        with suppress(Exception):
            return self._value(batch)
        return math.nan

    def _divides_by_steps(self) -> bool:
        trainer, steps = self._trainer, self._trainer.args.gradient_accumulation_steps
        of_window = getattr(trainer, "current_gradient_accumulation_steps", steps)
        with _WatchedDivision({steps, of_window} - {1}) as watch:
            whole = self._value(self._inputs, watch=watch)
        self.state.restore()  # before the steps are set, which it would put back
        with ExitStack() as stack:
            stack.enter_context(set_attribute(trainer.args, "gradient_accumulation_steps", 2 * steps))
            stack.enter_context(set_attribute(trainer, "current_gradient_accumulation_steps", 2 * of_window))
            half = self._value(self._inputs, goes_on=True)
        is_divided = watch.is_named or watch.loss is watch.last
        return not self._in_any_process(not is_divided and abs(half - whole / 2) > 100 * LARGEST_ERROR * abs(whole))

    def _in_any_process(self, answer: bool) -> bool:
        return bool(self._largest_of_all(int(answer)))

    def _largest_of_all(self, number: int) -> int:
        if self._trainer.args.world_size == 1:
            return number
        numbers = torch.tensor([number], device=self._trainer.args.device)
        return int(self._trainer.accelerator.gather(numbers).max())


def _parts(inputs: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield what is compared, always two: how it was made, two batches, and both together."""
    if not isinstance(inputs, Mapping) or not any(torch.is_tensor(value) and value.dim() for value in inputs.values()):
        return
    rows = row_count(inputs)
    order, middle = list(range(rows)), (rows + 1) // 2
    copied = "a batch and its copy", inputs, inputs, select_rows(dict(inputs), 2 * order, rows)
    halves = (select_rows(dict(inputs), half, rows) for half in (order[:middle], order[middle:]))
    yield ("two halves of a batch", *halves, inputs) if rows > 1 else copied
    yield copied


class _WatchedDivision(TorchFunctionMode):
    """Sees whether a loss is divided by as many as the accumulation steps: where the code names what accumulates, or at
    the end by a number that it does not write. A mean of two losses or a temperature is such a division, too.
    """

    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self._steps, self.is_named, self.last, self.loss = steps, False, object(), None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in DIVISIONS and self._has_steps(args):
            code = sys._getframe(1).f_code
            self.is_named |= any("accum" in one for one in (*code.co_names, *code.co_freevars, *code.co_varnames))
            self.last = self.last if self._has_steps(code.co_consts) else result
        return result

    def _has_steps(self, values: tuple[Any, ...]) -> bool:
        return any(isinstance(value, (int, float)) and value in self._steps for value in values)
