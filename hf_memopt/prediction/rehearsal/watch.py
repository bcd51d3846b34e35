"""Watch a training in this process: phases, steps, batches, whose each block is, and where memory runs out.

It works on the stand-in and on a real GPU. CUDA is not initialised by it: the record begins when the script does that.
"""

from __future__ import annotations

import linecache
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_memopt.prediction.rehearsal.events import (
    Event,
    blocks_alive,
    events_so_far,
    labels,
    named_blocks,
    place_of,
    set_label,
    start_recording,
)
from hf_memopt.prediction.rehearsal.phases import PhaseWatch
from hf_memopt.prediction.rehearsal.result import Batch, Done, Held, OutOfMemory

MOST_FAILURES = 60  # without a step between them: a script that goes on after each is not rescued by it
# NCCL's watchdog looks every 0.1 s, and lets go of the buffers of a collective then; a step on a GPU takes longer
WATCHDOG_SECONDS = 0.3


class Watch(PhaseWatch):
    """What a rehearsal sees of a training, which begins right after the import of torch."""

    def __init__(self, wanted_steps: int) -> None:
        super().__init__()
        self.wanted_steps, self.steps = wanted_steps, 0
        self.counts_steps = True  # a Trainer's are counted by its own events
        self.step_seconds: list[float] = []
        self.step_moments: list[int] = []  # at their ends
        self.batch: Batch | None = None
        self.largest: Batch | None = None
        self.failure: OutOfMemory | None = None  # the last one
        self.failures = self.failures_in_step = 0
        self.gave_up = False
        self.held: tuple[Held, ...] = ()  # when memory ran out last
        self.kept_outputs: Callable[[], Iterable[Any]] = tuple  # by an evaluation
        self._undo = ExitStack()
        self.names: list[dict[int, str]] = []  # of blocks by address, see ``named_blocks``
        self._roots: WeakSet[nn.Module] = WeakSet()  # modules that are called by no other one
        self._known: WeakSet[nn.Module] = WeakSet()
        self._optimizers: Counter[torch.optim.Optimizer] = Counter()
        self._began = time.perf_counter()
        self._undo.enter_context(self.hooked())
        make = nn.Module.compile

        def compiled(module: Any, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            call = module._compiled_call_impl  # private; seen in torch 2.6 to 2.14: the hooks are in its graph

            def watched(*inputs: Any, **named: Any) -> Any:
                self.before_forward(module, inputs)
                return call(*inputs, **named)

            module._compiled_call_impl = watched

        nn.Module.compile = compiled  # type: ignore[assignment,method-assign]
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")  # these
        torch.cuda._lazy_call(self._record)  # type: ignore[no-untyped-call]  # private; seen in torch 2.6 to 2.14

    def _record(self) -> None:
        start_recording()
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # type: ignore[attr-defined]

    # ---- What torch calls

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return  # values that are read here would become guards of the graph
        super().before_forward(module, inputs)
        if self.failures_in_step > MOST_FAILURES:
            self.gave_up = True
            raise Done
        if module not in self._known:  # a parent is called before its children
            self._known.update(module.modules())
            if next(module.parameters(), None) is not None:  # a loss has none
                self._began = self._began if self._roots else time.perf_counter()
                self._roots.add(module)
        if module in self._roots:
            self.batch = None
        first = next((one for one in inputs if isinstance(one, torch.Tensor) and one.dim()), None)
        reads_tokens = isinstance(module, nn.Embedding) or (first is not None and first.dtype == torch.long)
        if first is None or (self.batch is not None and (self.batch.tokens is not None or not reads_tokens)):
            return
        self.batch = Batch(first.shape[0], first.shape[1] if reads_tokens and first.dim() > 1 else None)
        if torch.is_grad_enabled() and (self.largest is None or self.batch.size > self.largest.size):
            self.largest = self.batch

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        super().before_optimizer(optimizer)
        self._optimizers[optimizer] += 0
        self.name_blocks()

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        super().after_optimizer(optimizer)
        self.name_blocks()
        self._optimizers[optimizer] += 1
        counts = self._optimizers.values()
        if self.counts_steps and min(counts) > self.steps:  # of several optimizers all step
            self.step_done()
        if self.counts_steps and (self.steps >= self.wanted_steps or max(counts) > self.wanted_steps + 1):
            raise Done

    def step_done(self) -> None:
        """Count an optimizer step."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - self._began)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            time.sleep(WATCHDOG_SECONDS)
        self._began, self.failures_in_step = time.perf_counter(), 0
        self.steps += 1
        self.step_moments.append(len(self.names))

    def _out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        self.failures += 1
        self.failures_in_step += 1
        if self.failures_in_step > 3:
            return
        self.name_blocks()
        frames = [{"filename": f.filename, "line": f.lineno, "name": f.name} for f in traceback.extract_stack()[::-1]]
        place = place_of(frames).split(" < ")[0] or " ".join(filter(None, (self.phase, labels["operator"])))
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        self.failure = OutOfMemory(self.phase, self.steps + 1, self.batch, asked, free, allocated, reserved, place)
        events = events_so_far()
        self.held = self.grouped(events, blocks_alive(events))

    # ---- Whose a block is

    def name_blocks(self) -> None:
        """Name the blocks of weights, gradients and optimizer state as they are now."""
        names: dict[int, str] = {}
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = {id(weight) for group in groups for weight in group}
        for root in self._roots:
            weights = f"weights of {type(_inside(root)).__name__}"
            if trained and trained.isdisjoint(map(id, root.parameters())):  # a reference, a reward model, a teacher
                weights += ", not trained"
            _name(names, (*root.parameters(), *root.buffers()), weights)
            _name(names, (one.grad for one in root.parameters()), "gradients")
        for optimizer in self._optimizers:
            _name(names, tree_leaves([*optimizer.state.values()]), f"state of {type(optimizer).__name__}")
        _name(names, (weight.grad for group in groups for weight in group), "gradients")
        _name(names, self.kept_outputs(), "outputs kept by the evaluation")
        self.names.append(names)
        set_label("moment", str(len(self.names)))

    def grouped(self, events: list[Event], blocks: Iterable[Event]) -> tuple[Held, ...]:
        """Return blocks by name, or by the line or the operator that made them, the largest first."""
        names, sizes = named_blocks(events, self.names), defaultdict[str, list[int]](list)
        for block in blocks:
            where = names.get(block.number) or block.place.split(" < ")[0]
            sizes[where or f"{block.phase}: {block.operator or 'no line of Python'}"].append(block.requested_bytes)
        found = (Held(where, sum(of_it), len(of_it), _code(where)) for where, of_it in sizes.items())
        return tuple(sorted(found, key=lambda one: (-one.size_bytes, one.place)))


def _inside(root: nn.Module) -> nn.Module:
    """Return the module in DDP or in what ``torch.compile`` makes."""
    inside = getattr(root, "module", getattr(root, "_orig_mod", None))
    return _inside(inside) if isinstance(inside, nn.Module) else root


def _code(place: str) -> str:
    path, _, rest = place.partition(":")
    number = rest.partition(" ")[0]
    return linecache.getline(path, int(number)).strip() if number.isdigit() else ""


def _name(names: dict[int, str], tensors: Iterable[Any], name: str) -> None:
    for tensor in tensors:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of FSDP2; private, seen in torch 2.6 to 2.14
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            try:
                names[tensor.untyped_storage().data_ptr()] = name
            except RuntimeError:  # a subclass without memory of its own
                continue
