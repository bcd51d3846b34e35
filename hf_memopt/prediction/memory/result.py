"""``Estimate``: the memory that a training step needs, by component and phase, as a table, a picture or JSON."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from hf_memopt.components import verdict_of
from hf_memopt.plain_data import check_value
from hf_memopt.prediction.memory.output import as_dict, draw, print_estimate
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.prediction.memory.what_fits import margin_of

if TYPE_CHECKING:
    from hf_memopt.components import Verdict
    from hf_memopt.prediction.memory.settings import Fragmentation
    from hf_memopt.prediction.memory.step_time import StepCosts, StepTime
    from hf_memopt.prediction.memory.tracking import PhasePeak, Timeline
    from hf_memopt.training.devices import Gpu


@dataclass(frozen=True, eq=False)
class Estimate:
    """The memory of a training step of the stock ``Trainer``, simulated. Bytes everywhere.

    Attributes:
        model: its display name.
        batch_size: examples of one forward and backward pass on the GPU.
        seq_len: tokens of a row, padding included, of the longest batch; None for a model without text.
        settings: what was simulated, with "auto" resolved.
        gpu: the GPU; None if none was given and this machine has none.
        peak_allocated_bytes: the peak of what tensors hold.
        peak_reserved_bytes: the peak of what torch's allocator holds.
        context_bytes: of CUDA's context on the GPU; None where it is unknown.
        components: what is allocated, by the names in ``COMPONENTS``, at the moment that decides the total: of those at
            which the allocator holds within 1 % of its most, the one at which tensors hold most. That is the peak of
            allocated bytes too, unless the allocator needs more for fewer bytes of another phase.
        phase: that of this moment: "load", "forward", "backward", "optimizer", "generation" or "evaluation".
        module: the module whose operation reaches it; "" between modules.
        host_bytes: what is moved to the host: optimizer state that waits there or is paged, offloaded activations,
            streamed layers with their parked gradients and state.
        parameters: elements of all parameters.
        trainable_parameters: elements of those that require a gradient.
        unused_parameters: names of trainable parameters that get no gradient from a step, with which DDP needs
            ``ddp_find_unused_parameters=True``; empty for shared weights, of which it is not known.
        flops: floating-point operations of an optimizer step, all its micro-batches, recomputation included.
        gradient_bytes: of all trainable parameters; DDP's buckets hold as many besides.
        timeline: bytes over time.
        notes: what was assumed.
        fragmentation: what differing batch lengths add to the reserved bytes; None without ``estimate(lengths=)``.
        step_time: the predicted seconds of an optimizer step, with a range; None without a GPU, and where they cannot
            be predicted.
        step_costs: what the step computes and moves; ``step_costs.on("T4")`` is its time on another GPU of the same
            compute capability (where no time is predicted, the one that ranks set-ups, by
            ``step_costs.ranking_rule``). None where it is unknown.
        time_unknown: why ``step_time`` is None although there is a GPU; "" otherwise.
    """

    model: str
    batch_size: int
    seq_len: int | None
    settings: StepSettings
    gpu: Gpu | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int | None
    components: dict[str, int]
    phase: str
    module: str
    host_bytes: int
    parameters: int
    trainable_parameters: int
    flops: int
    timeline: Timeline = field(repr=False)
    notes: tuple[str, ...] = ()
    fragmentation: Fragmentation | None = None
    step_time: StepTime | None = None
    step_costs: StepCosts | None = field(default=None, repr=False)
    time_unknown: str = ""
    unused_parameters: tuple[str, ...] = ()
    gradient_bytes: int = field(default=0, repr=False)

    @property
    def total_bytes(self) -> int:
        """Reserved bytes and the context, if it is known: what the GPU must hold."""
        return self.peak_reserved_bytes + (self.context_bytes or 0)

    @cached_property
    def phases(self) -> dict[str, PhasePeak]:
        """What each phase needs by its name: ``allocated_bytes``, ``reserved_bytes``, and the ``components`` of it."""
        return self.timeline.phase_peaks()

    @property
    def fits(self) -> bool | None:
        """Whether the GPU holds what is predicted, however closely; None without a GPU. ``verdict`` says how sure."""
        return None if self.gpu is None else self.total_bytes <= self.gpu.usable_bytes

    @property
    def verdict(self) -> Verdict | None:
        """``"fits"`` with 5 % of the GPU free, ``"tight"`` with less, which is too close to tell, or ``"over"``.

        The margin is that of a plan; published runs reserved up to so much more than was predicted. None without a GPU.
        """
        gpu = self.gpu
        return None if gpu is None else verdict_of(gpu.usable_bytes - self.total_bytes, margin_of(gpu))

    def table(self, *, verbose: bool = False) -> str:
        """Return the estimate as text of at most 80 columns; ``verbose`` shows the phases and every note."""
        from hf_memopt.terminal import printed_text

        check_value("verbose", verbose, bool, False)
        return printed_text(partial(print_estimate, self, verbose=verbose))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline, stacked by component, to a PNG, SVG or PDF file.

        Raises:
            ValueError: ``path`` is not such a file that can be written.
            MissingExtraError: matplotlib is not installed.
        """
        draw(self, path)

    def to_json(self) -> str:
        """Return everything but the timeline as JSON text."""
        return json.dumps(as_dict(self), indent=2)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        from hf_memopt.terminal import printed_html

        return printed_html(partial(print_estimate, self))
