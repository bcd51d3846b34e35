"""Which modules of a model have their rows run in parts while a step runs.

Tried is, from the outside in, every ``PreTrainedModel`` inside the model (where there is none, each of its children),
or the modules that the user names: the outermost one whose rows do not depend on each other runs in parts. A call with
labels is left whole, since it returns the loss of all rows; what is inside it is tried. No class names: a module counts
only if it is called in the step.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_memopt.errors import did_you_mean
from hf_memopt.training.binding.undo import override_method
from hf_memopt.training.devices.readings import is_out_of_memory
from hf_memopt.training.techniques.microbatching.module_call import DependentRowsError, Layout, ModuleCall
from hf_memopt.training.techniques.microbatching.not_splittable import LOSS_OF_ALL_ROWS, placeholder_reason
from hf_memopt.training.techniques.microbatching.row_check import check_rows
from hf_memopt.training.techniques.microbatching.rows_in_parts import Size, run_rows_in_parts

CHECKED_STEPS = 1 / 200  # of those after the second, drawn at random


@dataclass
class CutStep:
    """What the modules saw while one step ran."""

    cut: int = 0  # calls that ran in parts
    names: dict[str, None] = field(default_factory=dict)  # the modules that these were of, as keys
    fits: int = 0  # calls whose rows were few enough
    reasons: dict[str, None] = field(default_factory=dict)  # why the other calls ran whole, as keys
    # rows and columns of the largest call, columns None for images and sounds
    largest: tuple[int, int | None] | None = None
    # the first line of an out-of-memory error that went through a module or through the backward pass
    error: str | None = None
    forwards: dict[nn.Module, Any] = field(default_factory=dict)  # what stood in for a module's own when it began

    def noting_out_of_memory(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and note its out-of-memory error, which a user's step may swallow."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                self.error = str(error).partition("\n")[0]
            raise

    def note(self, call: ModuleCall) -> None:
        """Remember the largest call."""
        size = (call.rows, call.columns)
        if call.rows and (self.largest is None or size[0] * (size[1] or 1) > self.largest[0] * (self.largest[1] or 1)):
            self.largest = size


class Backbones:
    """Runs the rows of a model's backbones, named or found by themselves, in parts."""

    def __init__(self, names: Sequence[str], size: Size) -> None:
        self._names, self._size = tuple(names), size
        self._known: dict[Any, Layout | str] = {}  # by module and kind of call: where the rows are, or why not
        self._draw = random.Random(0)  # of its own: nobody else's numbers are drawn
        self._steps = 0
        self._is_checked = False  # whether what is known is checked again in this step
        self._is_inside = False
        self.seconds = 0.0  # what the checks took

    def modules_of(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules to try, the outer ones first."""
        named = list(model.named_modules())
        if not self._names:
            found = [(name, module) for name, module in named if not name or isinstance(module, PreTrainedModel)]
            return found if len(found) > 1 else [*found, *model.named_children()]
        found = []
        for asked in self._names:
            fitting = [(name, module) for name, module in named if f".{name}".endswith(f".{asked}")]
            if not fitting:
                known = [name for name, _ in named if name.count(".") < 2 and name]
                raise ValueError(
                    f"backbone={asked!r} is no module of {type(model).__name__}; expected the name of one, or its end."
                    f"{did_you_mean(asked, known)} Print them: [name for name, _ in model.named_modules()]"
                )
            found += fitting
        return found

    @contextmanager
    def cut(self, model: nn.Module, *, is_training: bool = True) -> Iterator[CutStep]:
        """Run rows in parts inside the context; yields what is seen."""
        step = CutStep()
        self._steps += is_training
        self._is_checked = self._steps == 2 or self._draw.random() < CHECKED_STEPS
        call: Callable[..., Any] = self._forward
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and to import it takes a second
            # checks and parts are no graph: a compiled model runs its backbone as it is written
            call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            for name, module in self.modules_of(model):
                stack.enter_context(override_method(module, "forward", partial(call, name, module, step)))
            step.forwards = {module: vars(module).get("forward") for module in model.modules()}
            yield step

    def _forward(
        self, name: str, module: nn.Module, step: CutStep, before: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_inside:  # where a part that runs out of memory is run again, so that nothing is noted
            return before(*args, **kwargs)
        return step.noting_out_of_memory(self._run, name, module, step, before, args, kwargs)

    def _run(
        self, name: str, module: nn.Module, step: CutStep, before: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = ModuleCall(module, partial(self._run_inside, before), args, kwargs)
        layout = self._layout_of(name, call, step, kwargs)
        if layout is None:
            return before(*args, **kwargs)
        step.cut += 1
        step.names[name or type(module).__name__] = None
        return run_rows_in_parts(call, layout, self._size)

    def _layout_of(self, name: str, call: ModuleCall, step: CutStep, kwargs: dict[str, Any]) -> Layout | None:
        """Return where the rows of a call are; None, and note it, if the call has to run whole."""
        step.note(call)
        size = self._size.rows(call.columns)
        if 0 < call.rows <= size:
            step.fits += 1
            return None
        if call.rows == 0:
            found: Layout | str = "its inputs have no rows"
        elif (kwargs.get("labels") is not None and _reads_labels(call.module)) or kwargs.get("return_loss"):
            found = LOSS_OF_ALL_ROWS
        else:
            try:
                found = _exchanged_forward(call.module, step) or self._layout(name, call, size, kwargs)
            except Exception as error:
                if is_out_of_memory(error):
                    reason = "not even two rows fit, without gradients, so that none can be compared"
                    step.reasons[f"{name or type(call.module).__name__}: {reason}"] = None
                raise
        if isinstance(found, Layout):
            return found
        step.reasons[f"{name or type(call.module).__name__}: {found}"] = None
        return None

    def _layout(self, name: str, call: ModuleCall, size: int, kwargs: dict[str, Any]) -> Layout | str:
        """Return where the rows are, checked if the kind of call is new or it is time; or why they cannot be cut."""
        key = name, call.kind(), placeholder_reason(call.module, kwargs) is None
        known = self._known.get(key)
        if known is not None and not (self._is_checked and isinstance(known, Layout)):
            return known
        begin = time.perf_counter()
        try:
            found: Layout | str = check_rows(call, size, draw=None if known is None else self._draw)
        except DependentRowsError as error:
            if known is not None:
                raise DependentRowsError(f"{error}, which an earlier check of {name} did not show") from None
            found = str(error)
        self.seconds += time.perf_counter() - begin
        self._known[key] = found
        return found

    def _run_inside(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a forward, with the modules inside it as they are."""
        before, self._is_inside = self._is_inside, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_inside = before


def _exchanged_forward(module: nn.Module, step: CutStep) -> str | None:
    """Return which module inside has another forward for as long as a loss runs: parts run again when it has ended."""
    for name, part in module.named_modules():
        now = vars(part).get("forward")
        if part is not module and now is not step.forwards.get(part):
            return f"the loss exchanges {name}.forward for <{type(now).__name__}>, and parts run again after the loss"
    return None


def _reads_labels(module: nn.Module) -> bool:
    """Return whether labels may make a loss: generation hands them to an encoder, too."""
    return not isinstance(module, PreTrainedModel) or "labels" in signature(type(module).forward).parameters
