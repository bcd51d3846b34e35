"""Record a step whose layers wait in host memory: the technique itself runs, with copies that allocate alone.

Copies out are as late as the technique lets them be: what they read stays until it waits for them. What is on the host
is on meta as everything else, and not counted. Bytes that cross PCIe are summed up. A released optimizer has its state
fetched and stored by the technique's own code, with the bytes of ``OptimizerMemory``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.prediction.memory.optimizers import OptimizerMemory, ParameterFacts, optimizer_memory
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.technique_list import TECHNIQUES, load
from hf_memopt.training.binding.model_changes import tied_embeddings
from hf_memopt.training.binding.undo import override_method, set_attribute, undo_all

TECHNIQUE = TECHNIQUES["streamed layers"]


@dataclass(frozen=True, slots=True)
class HostWeights:
    """The weights of a recorded step that wait in host memory."""

    trained: tuple[ParameterFacts, ...]
    stepped: tuple[ParameterFacts, ...]  # of these, those that the optimizer steps on the host, with their gradients
    weights_bytes: int  # of all of them
    in_bytes: int  # copied to the GPU in a forward and backward pass
    out_bytes: int  # copied to the host in it
    first_bytes: int  # of the first of them, for which compute waits

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are parked."""
        return sum(fact.size_bytes for fact in self.stepped)

    def bytes_on_host(self, settings: StepSettings) -> int:
        """Return what weights, parked gradients and the optimizer's state take of the host's memory."""
        state = optimizer_memory(self.trained, settings)
        return self.weights_bytes + self.gradient_bytes + state.state_bytes + state.host_state_bytes


class RecordedStream:
    """The layers of a prepared model on meta, streamed while a step is recorded; as ``Lanes`` it counts the copies."""

    device, is_async = torch.device("meta"), False

    def __init__(
        self, model: Any, settings: StepSettings, tracker: StorageTracker, facts: Sequence[ParameterFacts]
    ) -> None:
        self._model, self._settings, self._tracker = model, settings, tracker
        self._facts = dict(zip((one for one in model.parameters() if one.requires_grad), facts, strict=True))
        self._layers, self._embeddings = list[Tensor](), list[Tensor]()
        self._leaving: tuple[Any, list[Any]] = None, []  # a layer, and its gradients on their way to the host
        self._in_bytes = self._out_bytes = self._first_bytes = 0

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Stream the layers inside, unless the technique refuses; what is on the host is left out of the recording."""
        with (
            undo_all(*self._statistics_as_weights()),
            load(TECHNIQUE.function)(
                self._model, device="meta", lanes=self, resident=self._settings.resident
            ) as handle,
            undo_all(*self._embeddings_on_host()),
        ):
            self._layers = [parameter for layer in handle.ring.layers for parameter in layer.parameters]
            self._first_bytes = sum(one.nbytes for layer in handle.ring.layers[:1] for one in layer.parameters)
            self._check_scaler()
            for tensor in (*self._layers, *self._embeddings):
                self._tracker.ignore(tensor, is_copied=False)
            handle.ring.gradients.take, handle.ring.gradients.settle = self._take, self._settle
            if self._settings.steps_in_backward:
                memory = optimizer_memory(tuple(self._facts.values()), self._settings)
                alone = dict(zip(self._facts, memory.alone, strict=True))
                released = {one: alone[one] for one in self._layers if one in alone}
                handle.ring.steps = load(TECHNIQUE.steps)(self, _RecordedOptimizer(self._tracker, released))
            yield

    def weights(self, passes: int) -> HostWeights:
        """Return what was recorded of so many forward and backward passes."""
        stepped = self._embeddings if self._settings.steps_in_backward else [*self._layers, *self._embeddings]
        return HostWeights(
            trained=self._trained([*self._layers, *self._embeddings]),
            stepped=self._trained(stepped),
            weights_bytes=sum(one.nbytes for one in (*self._layers, *self._embeddings)),
            in_bytes=self._in_bytes // passes,
            out_bytes=self._out_bytes // passes,
            first_bytes=self._first_bytes,
        )

    def fetch(self, host: Tensor, written: Any = None, into: Tensor | None = None) -> tuple[Tensor, None]:
        """Allocate a copy of what is on the host."""
        self._in_bytes += host.nbytes * self._model.training
        return torch.empty_like(host.detach()), None

    def store(self, host: Tensor, source: Tensor) -> list[Tensor]:
        """Count the bytes of a copy to the host, and keep what it reads until somebody waits for it."""
        self._out_bytes += source.nbytes
        return [source]

    def ready(self, event: None) -> None:
        """Do nothing: every copy in is over at once."""

    def landed(self, event: list[Tensor] | None) -> None:
        """Let go of what a copy to the host has read."""
        if event is not None:
            event.clear()

    def _take(self, layer: Any, parameter: Tensor, gradient: Tensor) -> None:
        if self._leaving[0] is not layer:
            self._settle()
            self._leaving = layer, []
        self._leaving[1].append(self.store(parameter, gradient))

    def _settle(self, *, is_wanted: bool = True) -> None:
        self._leaving[1].clear()

    def _trained(self, parameters: Sequence[Tensor]) -> tuple[ParameterFacts, ...]:
        return tuple(self._facts[one] for one in parameters if one in self._facts)

    def _statistics_as_weights(self) -> Iterator[Any]:
        """Let the stand-ins of quantised linears have plain weights, their statistics among them, which travel too."""
        for module in self._model.modules():
            kind = type(module).__name__  # by name: bitsandbytes takes a second to import
            if kind.endswith("bitStandIn") or kind == "ExpertStack":
                buffers = {name: one for name, one in module._buffers.items() if one is not None}
                tensors = buffers if kind == "ExpertStack" else {"weight": module.weight.data, **buffers}
                plain = {name: nn.Parameter(one, requires_grad=False) for name, one in tensors.items()}
                yield set_attribute(module, "_parameters", {**module._parameters, **plain})
                yield set_attribute(module, "_buffers", {})

    def _embeddings_on_host(self) -> Iterator[Any]:
        """Let the tokens be looked up without weights, gradients and state on the device."""
        if not self._settings.embeddings_on_host:
            return
        if tied_embeddings(self._model):
            raise ValueError(
                "embeddings_on_host=True cannot be used with tied embeddings, which the head needs on the GPU; "
                "expected weights of their own. Pass embeddings_on_host=False"
            )
        try:
            embeddings = self._model.get_input_embeddings()
        except NotImplementedError as error:
            raise ValueError(
                f"embeddings_on_host=True cannot be used with {type(self._model).__name__}, which has no "
                "get_input_embeddings(); expected one embedding for all tokens. Pass embeddings_on_host=False"
            ) from error
        self._embeddings = [*embeddings.parameters()]

        def forward(before: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                found = before(*args, **kwargs)
            return found.requires_grad_(any(one.requires_grad for one in self._embeddings))

        yield override_method(embeddings, "forward", forward)

    def _check_scaler(self) -> None:
        if self._settings.precision == "fp16" and self._trained([*self._layers, *self._embeddings]):
            raise ValueError(
                "streamed=True, precision='fp16' are incompatible: the scaler reads gradients on the GPU, and those of "
                "streamed layers are on the host; expected bf16, or adapters alone to train. Pass precision='fp32', or "
                "lora=16"
            )


class _RecordedOptimizer:
    """A released optimizer of a recording, as ``DeviceSteps`` steps it: each state is as large as the real one's."""

    def __init__(self, tracker: StorageTracker, memory: dict[Tensor, OptimizerMemory]) -> None:
        self._tracker = tracker
        self._step = {one: max((*found.step, *found.first_step), key=sum, default=()) for one, found in memory.items()}
        self.state = {one: {str(i): self._on_host(size) for i, size in enumerate(m.state)} for one, m in memory.items()}

    def steps(self, parameter: Tensor) -> bool:
        return parameter in self.state

    def has_counter_on_device(self, parameter: Tensor) -> bool:
        return False  # a number, 512 bytes on the device

    def step_copy(self, parameter: Any, copy: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        self._tracker.add_hidden(self._step[parameter])
        return state

    def _on_host(self, size_bytes: int) -> Tensor:
        found = torch.empty(size_bytes, dtype=torch.uint8, device="meta")
        self._tracker.ignore(found, is_copied=False)
        return found
