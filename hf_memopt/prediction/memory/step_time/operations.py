"""What the operations of a step cost a GPU: floating-point operations, bytes, kernels and launches.

``StorageTracker`` calls ``operation_of`` for each operation of a forward and backward pass while it records their
allocations, so one recording gives bytes and seconds. The order of operations does not matter to their price
(``prices``), and a pass of many layers has 50 to 300 different ones: it is kept as a ``Counter``.

Rules for the bytes that a kernel moves: each input is read once (a dimension that is expanded is not counted), each
output is written once, and what is written in place is read as well. Embeddings and gathers read the rows that they
return and not the table. The backward of a layer norm reads its inputs twice, for the input's gradient and again for
those of weight and bias. Causal fused attention skips half of the products.

After the backward pass follow unscaling, clipping, and the optimizer's step. torch's optimizers run their own code on
the meta device, on one parameter of all elements, and transformers' Adafactor on one of each shape. Of
kernels that torch cannot run there (fused AdamW, bitsandbytes) the bytes follow from ``OptimizerMemory``: weights and
state are read and written, gradients are read. A paged state crosses PCIe both ways at every step, the most that it can
cost. Not counted are optimizers whose step is neither of these: ``UNPRICED_OPTIMIZERS``.

Limitations: bytes that a later kernel finds in the GPU's cache; the workspace of split sums; of float32 experts, whose
product is recorded as one for all rows, the weights of all but one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from hf_memopt.prediction.memory.optimizers import OptimizerMemory, ParameterFacts
    from hf_memopt.prediction.memory.settings import StepSettings

_FOREACH_CHUNK = 65_536  # elements, aten/src/ATen/native/cuda/MultiTensorApply.cuh
_FOREACH_CHUNKS_PER_KERNEL = 320
_LAUNCHES_PER_TENSOR = 0.05  # of a foreach call: it builds its list of addresses in C++
_LAUNCHES_OF_EXTENSIONS = 3  # an operation of bitsandbytes: Python, checks, ctypes

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_int_mm", "_grouped_mm"}
_NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view"}
_BY_ROWS = {"embedding", "index", "gather", "index_select", "nll_loss_forward"}
_WITHOUT_READING = {"fill_", "zero_", "copy_"}  # overwrite what they are called on
_CREATE = ("new_", "zeros_like", "ones_like", "full_like")  # use an input for its dtype and shape only


class Operation(NamedTuple):
    """The cost of one operation."""

    kind: str  # "product", "convolution", "attention" (fused), "memory", "view", "pcie", "bus" (both with the host)
    dtype: str = "fp32"  # of its first tensor: "fp16", "bf16", "int8", and "fp32" for all others
    in_backward: bool = False  # whether C++ code of the backward pass launches it, and not Python
    flops: float = 0.0  # floating-point operations of products; 0 for other operations
    moved_bytes: float = 0.0  # read and written in the GPU's memory, or over PCIe
    kernels: int = 1  # that it starts on the GPU
    launches: float = 1.0  # what it costs the host, in launches of one kernel


VIEW = (Operation("view", kernels=0), Operation("view", kernels=0, in_backward=True))
"""The cost of a view: by ``in_backward``."""


def operation_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    *,
    flops: int = 0,
    in_backward: bool = False,
    on_host: frozenset[int] | set[int] = frozenset(),
) -> Operation:
    """Return the cost of an ATen operation that has just run on meta tensors, of so many floating-point operations.

    ``in_backward`` says whether autograd's C++ code called it; ``on_host`` are the addresses (``_cdata``) of storages
    that represent memory of the host.
    """
    name, places, is_view = _schema_facts(func)
    allocates_alone = name in _NO_KERNEL
    if is_view or (allocates_alone and not on_host):
        return VIEW[in_backward]
    tensors = _tensors((*args, *kwargs.values()))
    if on_host:
        moved = sum(_bytes(tensor) for tensor in tensors if tensor.untyped_storage()._cdata in on_host)
        if moved:
            return Operation("pcie", in_backward=in_backward, moved_bytes=moved)
    results = _tensors(out if isinstance(out, (tuple, list)) else (out,))
    first = tensors[0] if tensors else results[0] if results else None
    if allocates_alone or first is None or (tensors and not any(t.is_meta for t in (*tensors, *results))):
        return VIEW[in_backward]
    written = [args[place] for place in places if place < len(args)]
    moved = _moved_bytes(name, tensors, _tensors(written), [] if places else results)
    kernels, launches = 1, 1.0 if func.namespace == "aten" else float(_LAUNCHES_OF_EXTENSIONS)
    if name.startswith("_foreach"):
        chunks = sum(-(-tensor.numel() // _FOREACH_CHUNK) for tensor in args[0])
        kernels = -(-chunks // _FOREACH_CHUNKS_PER_KERNEL)
        launches = kernels + _LAUNCHES_PER_TENSOR * len(args[0])
    kind, work = _kind(name), float(flops)
    if kind == "memory":
        work = 0.0
    if kind == "attention":
        by_name = {item.name: value for item, value in zip(func._schema.arguments, args, strict=False)}
        work /= 2 if by_name.get("is_causal") else 1
    return Operation(kind, _DTYPES.get(first.dtype, "fp32"), in_backward, work, moved, kernels, launches)


@cache
def _schema_facts(func: Any) -> tuple[str, tuple[int, ...], bool]:
    """Return the name of an operator, the places of the arguments that it writes to, and whether it makes a view."""
    aliases = [item.alias_info for item in func._schema.arguments]
    places = tuple(place for place, alias in enumerate(aliases) if alias is not None and alias.is_write)
    is_view = not places and any(item.alias_info is not None for item in func._schema.returns)
    return func._overloadpacket.__name__, places, is_view


def _moved_bytes(name: str, tensors: list[Tensor], written: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes that a kernel moves, of its arguments, those that it writes in place, and its new results."""
    moved = sum(map(_bytes, made))
    if name in _BY_ROWS:
        return 2 * moved + sum(map(_bytes, tensors[1:]))
    if name.startswith(_CREATE):
        return moved
    moved += sum({id(tensor): _bytes(tensor) for tensor in tensors}.values())
    if name not in _WITHOUT_READING:
        moved += sum(map(_bytes, written))
    return moved + sum(map(_bytes, tensors[:2])) if name == "native_layer_norm_backward" else moved


def _kind(name: str) -> str:
    if name.startswith("_scaled_dot_product_") and "attention" in name:
        return "attention"
    return "product" if name in _PRODUCTS else "convolution" if name.startswith("convolution") else "memory"


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the values and in the lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that there are to read: an expanded dimension, whose stride is 0, counts once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, strides, strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


# ---- The optimizer's step


_OF_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_torch": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
UNPRICED_OPTIMIZERS = ("lomo", "adalomo", "grokadamw", "schedule_free", "stable_adamw")
"""How the names begin of those whose step is not counted."""

_LAUNCHES_OF_BITSANDBYTES = 5  # a call from Python for each parameter
_LAUNCHES_OF_COPIES = 3  # a copy on a stream of its own: wait, copy, event


def optimizer_operations(
    parameters: Sequence[ParameterFacts], memory: OptimizerMemory, settings: StepSettings
) -> Counter[Operation]:
    """Return the costs of a step of the optimizer on the trainable parameters, none of ``UNPRICED_OPTIMIZERS``.

    One that is known by its memory alone counts as one kernel for each parameter.
    """
    optim = settings.optim if settings.optimizer_memory is None else None
    gradients = sum(fact.size_bytes for fact in parameters)
    found: Counter[Operation] = Counter()
    if not parameters:
        return found
    together = -(-sum(fact.elements for fact in parameters) // (_FOREACH_CHUNK * _FOREACH_CHUNKS_PER_KERNEL))
    of_lists = _LAUNCHES_PER_TENSOR * len(parameters)
    if settings.precision == "fp16":  # unscaling reads and writes them
        found[Operation("memory", moved_bytes=2 * gradients, kernels=together, launches=together + of_lists)] += 1
    if settings.max_grad_norm > 0 and not memory.releases_gradients:  # the norm reads, the scaling reads and writes
        launches = 2 * together + 2 * of_lists
        found[Operation("memory", moved_bytes=3 * gradients, kernels=2 * together, launches=launches)] += 1
    if not settings.zero_grad_to_none:
        found[Operation("memory", moved_bytes=gradients, kernels=together, launches=together + of_lists)] += 1
    if memory.chunks:
        found[_copies(memory.chunks)] += 1
    if optim in _OF_TORCH or optim == "adafactor":
        tensors = len(parameters) if memory.releases_gradients else 0
        alone = Counter(replace(fact, name="") for fact in parameters)  # layers share shapes, and so the cached run
        has_state = memory.state_bytes + memory.host_state_bytes > 0
        return found + _recorded(optim, tuple(alone.items()), settings.weight_decay, has_state, tensors)
    state = memory.state_bytes + sum(chunk.state_bytes for chunk in memory.chunks)
    moved = 2 * gradients + gradients + 2 * state  # the weights are as large as their gradients
    kernels, launches = together, together + 2 * of_lists
    if optim != "adamw_torch_fused" or memory.releases_gradients:
        kernels, launches = len(parameters), float(_LAUNCHES_OF_BITSANDBYTES * len(parameters))
    found[Operation("memory", moved_bytes=moved, kernels=kernels, launches=launches)] += 1
    if memory.host_state_bytes and not memory.chunks:
        found[Operation("pcie", moved_bytes=2 * memory.host_state_bytes, kernels=len(parameters))] += 1
    return found


def _copies(chunks: Sequence[OptimizerMemory]) -> Operation:
    """Return the copies of a state that waits on the host: a chunk goes out beside the next one that comes in."""
    sizes, tensors = [chunk.state_bytes for chunk in chunks], sum(len(chunk.state) for chunk in chunks)
    moved = sizes[0] + sum(map(max, sizes, [*sizes[1:], 0]))
    return Operation("bus", moved_bytes=moved, kernels=2 * tensors, launches=2.0 * _LAUNCHES_OF_COPIES * tensors)


@lru_cache(maxsize=64)
def _recorded(
    optim: str, parameters: tuple[tuple[ParameterFacts, int], ...], weight_decay: float, momentum: bool, releases: int
) -> Counter[Operation]:
    """Return the operations of torch's own code, or of Adafactor; ``parameters`` are different ones and their number.

    ``momentum``: whether SGD has one. ``releases``: how many tensors step alone, 0 where all step together.
    """
    found: Counter[Operation] = Counter()
    if optim == "adafactor":
        from transformers.optimization import Adafactor  # two seconds, as it imports PEFT

        as_the_trainer = partial(Adafactor, lr=1e-3, scale_parameter=False, relative_step=False)
        for fact, times in parameters:
            ran = _run(as_the_trainer, fact)
            found.update({cost: times * number for cost, number in ran.items()})
        return found
    options: dict[str, Any] = {"momentum": 0.9} if optim == "sgd" and momentum else {}
    for decays, size in dict.fromkeys((fact.decays, fact.element_size) for fact, _ in parameters):
        group = [(fact, times) for fact, times in parameters if (fact.decays, fact.element_size) == (decays, size)]
        elements, tensors = sum(fact.elements * times for fact, times in group), sum(times for _, times in group)
        whole = replace(group[0][0], shape=(elements,))
        decay = weight_decay if decays else 0.0
        build = partial(_OF_TORCH[optim], lr=1e-3, weight_decay=decay, foreach=True, **options)
        ran = _run(build, whole)
        for cost, number in ran.items():
            kernels = max(cost.kernels, tensors) if releases and cost.kernels else cost.kernels
            launches = float(tensors) if releases else cost.kernels + _LAUNCHES_PER_TENSOR * tensors
            found[cost._replace(kernels=kernels, launches=launches)] += number
    return found


def _run(build: Callable[[Any], torch.optim.Optimizer], fact: ParameterFacts) -> Counter[Operation]:
    """Return the operations of a step of an optimizer that has its state already, on the meta device."""
    dtype = torch.float32 if fact.element_size == 4 else torch.bfloat16
    parameter = nn.Parameter(torch.empty(fact.shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = build([parameter])
    optimizer.step()  # makes the state
    counter = _Counting()
    with counter:
        optimizer.step()
    return counter.found


class _Counting(TorchDispatchMode):
    """Counts the operations of code that runs on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[Operation] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if func.namespace != "profiler":  # step() marks where it begins and ends
            self.found[operation_of(func, args, kwargs or {}, out)] += 1
        return out
