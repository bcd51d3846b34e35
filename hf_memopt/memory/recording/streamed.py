"""Record a step whose layers wait in host memory: the technique itself runs, with copies that allocate alone.

What is on the host is on meta as everything else, and not counted. Bytes that cross PCIe are summed up. A released
optimizer has its state fetched and stored by the technique's own code, with the bytes of ``OptimizerMemory``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.binding.model_changes import tied_embeddings
from hf_memopt.binding.undo import override_method, set_attribute, undo_all
from hf_memopt.memory.optimizers import OptimizerMemory, ParameterFacts, step_optimizer
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import StorageTracker
from hf_memopt.technique_list import TECHNIQUES, load

TECHNIQUE = TECHNIQUES["streamed layers"]


@dataclass(frozen=True, slots=True)
class HostWeights:
    """The weights of a recorded step that wait in host memory.

    Attributes:
        names: of those that are trained.
        stepped: of these, those that the optimizer steps on the host.
        weights_bytes: of all of them.
        in_bytes: copied to the GPU in a forward and backward pass.
        out_bytes: copied to the host in it.
        first_bytes: of the first layer, for which compute waits.
    """

    names: frozenset[str]
    stepped: frozenset[str]
    weights_bytes: int
    in_bytes: int
    out_bytes: int
    first_bytes: int

    def on_gpu(self, facts: Sequence[ParameterFacts]) -> tuple[ParameterFacts, ...]:
        """Return the trained parameters that step on the GPU."""
        return tuple(fact for fact in facts if fact.name not in self.stepped)

    def gradient_bytes(self, facts: Sequence[ParameterFacts]) -> int:
        """Return what the gradients take that wait for a step on the host."""
        return sum(fact.size_bytes for fact in facts if fact.name in self.stepped)

    def state_bytes(self, facts: Sequence[ParameterFacts], settings: StepSettings, *, stepped: bool = False) -> int:
        """Return what the optimizer's state takes on the host, or that of what it steps there alone."""
        names = self.stepped if stepped else self.names
        found = step_optimizer(tuple(fact for fact in facts if fact.name in names), settings)
        return found.state_bytes + found.host_state_bytes

    def bytes_on_host(self, facts: Sequence[ParameterFacts], settings: StepSettings) -> int:
        """Return what weights, parked gradients and the optimizer's state take of the host's memory."""
        return self.weights_bytes + self.gradient_bytes(facts) + self.state_bytes(facts, settings)


class RecordedStream:
    """The layers of a model on meta, streamed while a step of it is recorded.

    Args:
        model: prepared.
        settings: of the step.
        released: the memory of the optimizer for each trainable parameter by itself; {} where gradients are parked.
    """

    device, is_async = torch.device("meta"), False

    def __init__(
        self, model: Any, settings: StepSettings, tracker: StorageTracker, released: Mapping[str, OptimizerMemory]
    ) -> None:
        self._model, self._settings, self._tracker, self._released = model, settings, tracker, released
        self._in_bytes = self._out_bytes = self._first_bytes = 0
        self._host: list[Tensor] = []
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._layers: set[str] = set()
        self._embeddings: set[str] = set()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Stream the layers inside; what is on the host is left out of the recording.

        Raises:
            ValueError: the technique refuses the model, or would refuse the run.
        """
        with undo_all(*self._statistics_as_weights()):
            handle = load(TECHNIQUE.function)(self._model, device="meta", lanes=self)
            with undo_all(handle, *self._embeddings_on_host()):
                ring = handle.ring
                for layer in ring.layers:
                    self._host += layer.parameters
                self._first_bytes = sum(one.nbytes for one in ring.layers[0].parameters)
                self._layers = {self._names[one] for one in self._host if one in self._names} - self._embeddings
                self._check_scaler()
                for tensor in self._host:
                    self._tracker.ignore(tensor, is_copied=False)
                ring.gradients.take = self._park
                if self._released:
                    ring.steps = load(TECHNIQUE.steps)(self, _RecordedOptimizer(self))
                yield

    def weights(self, passes: int) -> HostWeights:
        """Return what was recorded of so many forward and backward passes."""
        stepped = self._embeddings if self._released else self._layers | self._embeddings
        return HostWeights(
            names=frozenset(self._layers | self._embeddings),
            stepped=frozenset(stepped),
            weights_bytes=sum(one.nbytes for one in self._host),
            in_bytes=self._in_bytes // passes,
            out_bytes=self._out_bytes // passes,
            first_bytes=self._first_bytes,
        )

    # ---- As ``Lanes``

    def fetch(self, host: Tensor, written: Any = None, into: Tensor | None = None) -> tuple[Tensor, None]:
        """Allocate a copy of what is on the host."""
        self._in_bytes += host.nbytes * self._model.training
        return torch.empty_like(host.detach()), None

    def store(self, host: Tensor, source: Tensor) -> None:
        """Count the bytes of a copy to the host."""
        self._out_bytes += source.nbytes

    def ready(self, event: None) -> None:
        """Do nothing: every copy is over at once."""

    landed = ready

    # ---- Where it differs from a run

    def _park(self, layer: Any, parameter: Tensor, gradient: Tensor) -> None:
        self.store(parameter, gradient)

    def _statistics_as_weights(self) -> Iterator[Any]:
        """Let the stand-ins of quantised linears have plain weights, their statistics among them, which travel too."""
        for module in self._model.modules():
            if not type(module).__name__.endswith("bitStandIn"):  # by name: bitsandbytes takes a second to import
                continue
            tensors = {"weight": module.weight.data, **module._buffers}
            plain = {name: nn.Parameter(one, requires_grad=False) for name, one in tensors.items() if one is not None}
            yield set_attribute(module, "_parameters", {**module._parameters, **plain})
            yield set_attribute(module, "_buffers", {})

    def _embeddings_on_host(self) -> Iterator[Any]:
        """Let the tokens be looked up without weights, gradients and state on the device."""
        if self._settings.embeddings_on_host:
            embeddings = self._model.get_input_embeddings()
            weights = [*embeddings.parameters()]
            if tied_embeddings(self._model):
                raise ValueError(
                    "embeddings_on_host=True cannot be used with tied embeddings, which the head needs on the GPU; "
                    "expected weights of their own. Pass embeddings_on_host=False"
                )
            self._host += weights
            self._embeddings = {self._names[one] for one in weights if one in self._names}

            def forward(before: Any, *args: Any, **kwargs: Any) -> Tensor:
                with torch.no_grad():
                    found = before(*args, **kwargs)
                looked_up: Tensor = _OnHost.apply(found, *weights)  # type: ignore[no-untyped-call]
                return looked_up

            yield override_method(embeddings, "forward", forward)

    def _check_scaler(self) -> None:
        if self._settings.precision == "fp16" and self._layers | self._embeddings:
            raise ValueError(
                "streamed=True, precision='fp16' are incompatible: the scaler reads gradients on the GPU, and those of "
                "streamed layers are on the host; expected bf16, or adapters alone to train. Pass precision='fp32', or "
                "lora=16"
            )


class _RecordedOptimizer:
    """A released optimizer of a recording, as ``DeviceSteps`` steps it: each state is as large as the real one's."""

    def __init__(self, stream: RecordedStream) -> None:
        self._stream = stream
        memory = {one: stream._released[name] for one, name in stream._names.items() if name in stream._layers}
        self._step = {one: max((*found.step, *found.first_step), key=sum, default=()) for one, found in memory.items()}
        self.state = {one: {str(i): self._on_host(size) for i, size in enumerate(m.state)} for one, m in memory.items()}

    def steps(self, parameter: Tensor) -> bool:
        return parameter in self.state

    def has_counter_on_device(self, parameter: Tensor) -> bool:
        return False  # a number, 512 bytes on the device

    def step_copy(self, parameter: Any, copy: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        self._stream._tracker.add_hidden(self._step[parameter])
        return state

    def _on_host(self, size_bytes: int) -> Tensor:
        found = torch.empty(size_bytes, dtype=torch.uint8, device="meta")
        self._stream._tracker.ignore(found, is_copied=False)
        return found


class _OnHost(torch.autograd.Function):
    """What was looked up on the host, whose weights get no gradient on the device."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, *weights: Tensor) -> Tensor:
        ctx.count = len(weights)
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * (1 + ctx.count)
