"""Arguments and results of the optimizers' formulas, and the order in which stock ``Trainer`` groups parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memopt.prediction.memory.settings import StepSettings

FLOAT_BYTES = 4  # of a float32


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """The properties of a trainable parameter that decide the memory of its optimizer.

    Attributes:
        name: as in ``named_parameters``, the first one of a tied parameter.
        shape: of the parameter.
        element_size: bytes of an element.
        is_embedding: whether it is the weight of an ``nn.Embedding``, also if the weight is tied.
        decays: whether stock ``Trainer`` puts it into the group with weight decay.
    """

    name: str
    shape: tuple[int, ...]
    element_size: int
    is_embedding: bool
    decays: bool = True

    @property
    def elements(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Its size, and that of its gradient."""
        return self.elements * self.element_size


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """The state of an optimizer and the temporaries of a step. Bytes everywhere, before the allocator's rounding.

    Attributes:
        state: each state tensor on the GPU, in order of creation by the first step. Adagrad and AdaLomo create
            theirs at construction.
        host_state_bytes: state on the host, or in managed memory that moves between host and GPU (paged).
        step: temporaries of the heaviest step, as successive groups: those of one group are held together and then
            freed.
        first_step: the same of the first step.
        releases_gradients: whether each parameter steps within the backward pass, and frees its gradient there.
        alone: then the memory of each parameter, in the given order; what all share is counted with the first. With
            ``chunks`` in the optimizer's order: the chunks of the first step.
        chunks: of a state that waits on the host, what visits the GPU for each step, and the step's temporaries.
    """

    state: tuple[int, ...]
    host_state_bytes: int
    step: tuple[tuple[int, ...], ...]
    first_step: tuple[tuple[int, ...], ...]
    releases_gradients: bool = False
    alone: tuple[OptimizerMemory, ...] = ()
    chunks: tuple[OptimizerMemory, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on the GPU."""
        return sum(self.state)


@dataclass(frozen=True, slots=True)
class OptimizerRequest:
    """The optimizer that was asked for."""

    settings: StepSettings
    arguments: dict[str, str]  # the pairs of ``optim_args``
    has_tables: bool = False  # whether an earlier parameter brought what all parameters of an 8-bit optimizer share

    def number(self, name: str, default: float) -> float:
        """Return a number of ``optim_args``."""
        text = self.arguments.get(name)
        if text is None:
            return default
        try:
            return float(text)
        except ValueError:
            raise ValueError(
                f"optim_args={name + '=' + text!r} is not a number; expected a number after '='. "
                f"Pass optim_args='{name}={default:g}'"
            ) from None

    def flag(self, name: str) -> bool:
        """Return a truth value of ``optim_args``, as stock ``Trainer`` reads them."""
        return self.arguments.get(name, "").lower() in ("true", "1", "yes")


Groups = Iterable[tuple[int, ...]]
Family = Callable[[Sequence[ParameterFacts], OptimizerRequest], OptimizerMemory]


def memory_of(
    state: Iterable[int], step: Groups, *, host_state_bytes: int = 0, first_step: Groups | None = None, **facts: Any
) -> OptimizerMemory:
    """Return the memory without empty groups; the first step is like any other unless given."""
    groups = _filled(step)
    first = groups if first_step is None else _filled(first_step)
    return OptimizerMemory(tuple(state), host_state_bytes, groups, first, **facts)


def _filled(groups: Groups) -> tuple[tuple[int, ...], ...]:
    kept = (tuple(size for size in group if size) for group in groups)
    return tuple(group for group in kept if group)


def trainer_groups(parameters: Iterable[ParameterFacts]) -> list[list[ParameterFacts]]:
    """Return stock ``Trainer``'s parameter groups: with weight decay, without."""
    groups: tuple[list[ParameterFacts], ...] = ([], [])
    for parameter in parameters:
        groups[not parameter.decays].append(parameter)
    return [group for group in groups if group]


def in_order(parameters: Iterable[ParameterFacts]) -> list[ParameterFacts]:
    """Return the parameters as the optimizer sees them, group by group."""
    return [parameter for group in trainer_groups(parameters) for parameter in group]


def with_previous(parameters: Iterable[ParameterFacts]) -> Iterator[tuple[int, ParameterFacts]]:
    """Yield each parameter with the bytes of the previous one of its group, 0 for the first."""
    for group in trainer_groups(parameters):
        previous_bytes = 0
        for parameter in group:
            yield previous_bytes, parameter
            previous_bytes = parameter.size_bytes
