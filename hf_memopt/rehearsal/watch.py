"""Watch a training in this process: phases, steps, batches, whose each block is, and where memory runs out.

It works on the stand-in and on a real GPU. CUDA is not initialised by it: the record begins when the script does that.
"""

from __future__ import annotations

import linecache
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from hf_memopt.rehearsal.events import (
    Event,
    blocks_alive,
    events_so_far,
    label,
    named_blocks,
    place_of,
    set_label,
    start_recording,
)
from hf_memopt.rehearsal.phases import PhaseWatch
from hf_memopt.rehearsal.result import Batch, Done, Held, OutOfMemory

MOST_FAILURES = 60  # without a step between them: a script that goes on after each is not rescued by it
MOST_PLACES = 12


class Watch:
    """What a rehearsal sees of a training; ``install`` begins it."""

    def __init__(self, wanted_steps: int) -> None:
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
        self.phases = PhaseWatch()
        self.kept_outputs: Callable[[], Iterable[Any]] = tuple  # by an evaluation
        self._undo = ExitStack()
        self.names: list[dict[int, str]] = []  # of blocks by address, see ``named_blocks``
        self._roots: WeakSet[nn.Module] = WeakSet()  # modules that are called by no other one
        self._known: WeakSet[nn.Module] = WeakSet()
        self._optimizers: Counter[torch.optim.Optimizer] = Counter()
        self._began = time.perf_counter()

    def install(self) -> None:
        """Begin, right after the import of torch."""
        self._undo.enter_context(self.phases.hooked())
        register_module_forward_pre_hook(self._before_forward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        compile_module = nn.Module.compile

        def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            compile_module(module, *args, **kwargs)
            compiled: Any = module._compiled_call_impl  # private, seen in torch 2.14; without it, no hook is called

            def called(*inputs: Any, **named: Any) -> Any:
                self._before_forward(module, inputs)
                self.phases.before_forward()
                return compiled(*inputs, **named)

            module._compiled_call_impl = called

        nn.Module.compile = compile_in_place  # type: ignore[assignment,method-assign]
        torch.cuda._lazy_call(self._record)  # type: ignore[no-untyped-call]  # private; seen in torch 2.6 to 2.14

    def let_be_a_phase(self, owner: Any, name: str, phase: str) -> None:
        """Let what a function or method does be a phase."""
        self._undo.enter_context(self.phases.during(owner, name, phase))

    def _record(self) -> None:
        start_recording()
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # type: ignore[attr-defined]

    # ---- What torch calls

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
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
        reads_tokens = isinstance(module, nn.Embedding)
        if first is None or (self.batch is not None and (self.batch.tokens is not None or not reads_tokens)):
            return
        self.batch = Batch(first.shape[0], first.shape[1] if reads_tokens and first.dim() > 1 else None)
        if torch.is_grad_enabled() and (self.largest is None or self.batch.size > self.largest.size):
            self.largest = self.batch

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers[optimizer] += 0
        self.name_blocks()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
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
        now = time.perf_counter()
        self.step_seconds.append(now - self._began)
        self._began, self.failures_in_step = now, 0
        self.steps += 1
        self.step_moments.append(len(self.names))

    def _out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        self.failures += 1
        self.failures_in_step += 1
        if self.failures_in_step > 3:
            return
        self.name_blocks()
        frames = [{"filename": f.filename, "line": f.lineno, "name": f.name} for f in traceback.extract_stack()[::-1]]
        phase = self.phases.phase
        place = place_of(frames).split(" < ")[0] or " ".join(filter(None, (phase, label("operator"))))
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        self.failure = OutOfMemory(phase, self.steps + 1, self.batch, asked, free, allocated, reserved, place)
        events = events_so_far()
        self.held = self.grouped(events, blocks_alive(events))

    # ---- Whose a block is

    def name_blocks(self) -> None:
        """Name the blocks of weights, gradients and optimizer state as they are now."""
        names: dict[int, str] = {}
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = {id(weight) for group in groups for weight in group}
        for root in self._roots:
            inner: Any = getattr(root, "_orig_mod", root)  # of torch.compile; private, seen in torch 2.6 to 2.14
            weights = f"weights of {type(getattr(inner, 'module', inner)).__name__}"  # inside of DDP
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
        names = named_blocks(events, self.names)
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for block in blocks:
            where = names.get(block.number) or block.place.split(" < ")[0]
            where = where or f"{block.phase}: {block.operator or 'no line of Python'}"
            sizes[where] += block.requested_bytes
            counts[where] += 1
        largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
        rows = [Held(where, size, counts[where], _code(where)) for where, size in largest[:MOST_PLACES]]
        rest = [(size, counts[where]) for where, size in largest[MOST_PLACES:]]
        others = Held(f"{len(rest)} other places", sum(size for size, _ in rest), sum(count for _, count in rest))
        return (*rows, others) if rest else tuple(rows)


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
