"""Gives small tensors their values on a GPU without silicon, where no kernel runs.

The stand-in's device memory is memory of this process, so the CPU can work on a tensor "on the GPU" under another
name: an *alias*. Each operator with a kernel for CUDA is registered anew. First torch's own CUDA kernel runs: it
allocates, and launches what the stand-in ignores. Then, where all tensors of the call are small, the CPU computes the
same on aliases.

There is no ``TorchDispatchMode`` and no tensor subclass here. With either, autograd takes every tensor for a subclass
(``isTensorSubclassLike``) and adds gradients out of place, which raises the peak of a model with tied weights.

Left out: calls with large tensors (their small results are nought), kernels of Triton, sparse tensors, CUDA graphs. The
operators whose shape depends on values take no scratch memory. A failed computation is logged once and counted.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.rehearsal import events
from hf_memopt.rehearsal.cpu_kernels import CPU_KERNELS, call_with_seed

logger = logging.getLogger(__name__)

LIMIT_BYTES = int(os.environ.get("HF_MEMOPT_GPU_VALUES", 1 << 20))
"""Floating-point bytes of a call up to which it is computed; 0 leaves torch's kernels as they are."""
INTEGER_LIMIT_BYTES = 16 * LIMIT_BYTES
"""The same of masks, token ids and lengths, which decide shapes and branches."""

CPU = torch.device("cpu")
NUMBERS = (bool, int, float, complex)

ONLY_ALLOCATE_OR_LOOK = {
    "empty.memory_format", "empty_strided", "empty_quantized", "resize_", "resize_as_", "_resize_output_", "set_",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to", "record_stream",
    "is_pinned", "_pin_memory", "_coalesced_", "_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_cudnn_init_dropout_state",
    "_local_scalar_dense",  # reads by cudaMemcpy, which the stand-in does
    "_efficient_attention_forward", "_efficient_attention_backward",  # run inside operators that are computed
    "_flash_attention_forward", "_flash_attention_backward",
}  # fmt: skip
SHAPED_BY_VALUES = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "repeat_interleave.Tensor", "bincount",
}  # fmt: skip
"""Their CUDA kernels count, read the count back and allocate. No kernel wrote the count, so the CPU says the shape."""

WITHOUT_CUDA_KERNEL = ("copy_", "pow.Scalar")
"""Composite operators that need replacing, too: the first launches kernels by itself, the second hands a Python
kernel a wrapped number on the GPU, which is an assertion of torch."""


@dataclass
class Failure:
    """Calls of one operator that the CPU could not compute, and why the first one failed."""

    calls: int
    reason: str


@dataclass
class Report:
    """What was computed in this process: calls by operator, failures by operator, and the time of it all."""

    computed: Counter[str]
    left_out: Counter[str]
    failures: dict[str, Failure]
    seconds: float


_report = Report(Counter(), Counter(), {}, 0.0)
_registered: list[Any] = []  # a library and its kernels end with their last reference


def report() -> Report:
    """Return what was computed in this process so far."""
    return _report


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on the stand-in as a CPU tensor of the same shape and strides."""
    storage = tensor.untyped_storage()
    pointer, size = storage.data_ptr(), storage.nbytes()
    if pointer == 0 or size == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)
    memory = torch._C._construct_storage_from_data_pointer(pointer, CPU, size)
    on_cpu = torch.empty((0,), dtype=tensor.dtype, device=CPU)
    return on_cpu.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_cpu(value: Any) -> Any:
    """Return an argument as the CPU takes it: aliases of tensors, its own device, its own random numbers."""
    if isinstance(value, torch.Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return [_on_cpu(item) for item in value]
    if isinstance(value, torch.device):
        return CPU
    return None if isinstance(value, torch.Generator) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, those in lists too."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _listed(result: Any) -> list[Any]:
    """Return the results of an operator as a list: none, one, or several."""
    if isinstance(result, (list, tuple)):
        return list(result)
    return [result] if isinstance(result, torch.Tensor) else []


def _are_small(tensors: list[torch.Tensor]) -> bool:
    floats = integers = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            floats += size
        else:
            integers += size
    return floats <= LIMIT_BYTES and floats + integers <= INTEGER_LIMIT_BYTES


def _tensor_of(number: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return a wrapped number, which torch hands a Python kernel as a plain number, as a tensor that promotes alike."""
    widest = max(tensors, key=lambda t: (t.dtype.is_floating_point or t.dtype.is_complex, t.dtype.itemsize))
    dtype = torch.result_type(widest, number)
    if widest.dim() > 0 and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # keeps the number's digits; without dimensions it does not promote the tensor
    return torch.tensor(number, dtype=dtype)


class Operator:
    """One operator of the stand-in: torch's own CUDA kernel allocates, then the CPU computes what is small."""

    def __init__(self, name: str, overload: torch._ops.OpOverload, kernel: Any) -> None:
        schema = overload._schema
        by_position = [argument for argument in schema.arguments if not argument.kwarg_only]
        self.name = name
        self.cuda_kernel = kernel
        self.cpu_kernel = CPU_KERNELS.get(name, overload)
        self.returns_one = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        self.new_results = [result.alias_info is None for result in schema.returns]
        self.tensor_places = [
            i for i, argument in enumerate(by_position) if str(argument.type) in ("Tensor", "Optional[Tensor]")
        ]
        self.written_places = [
            i
            for i, argument in enumerate(by_position)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # the tag is missing at some fused operators with dropout
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags or "dropout" in name or "attention" in name

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run as the CUDA kernel of this operator."""
        if any(type(args[i]) in NUMBERS for i in self.tensor_places if i < len(args)):
            args = self._with_tensors_for_numbers(args)
        seed = self._seed(args, kwargs) if self.is_random else None
        if self.name in SHAPED_BY_VALUES:
            return self._allocate_and_compute(args, kwargs)
        saved = self._saved(args, kwargs) if self.written_places else []
        result = self._allocate(keys, args, kwargs)
        started = time.perf_counter()
        # aliases are plain CPU tensors: autograd has seen this call on the GPU's
        with torch._C._AutoDispatchBelowAutograd():
            result = self._fill(result, args, kwargs, saved, seed)
        _report.seconds += time.perf_counter() - started
        return result

    def _with_tensors_for_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tensors = _tensors(args)
        made = list(args)
        for i in self.tensor_places:
            if i < len(args) and type(args[i]) in NUMBERS:
                made[i] = _tensor_of(args[i], tensors)
        return tuple(made)

    def _seed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return a seed from the state of the GPU's generator, so that a restored state draws the same again."""
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
        generator = next(given, None) or torch.cuda.default_generators[torch.cuda.current_device()]
        return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % (1 << 62)

    def _saved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of what the call changes in place.

        A CUDA kernel may call other operators, which are computed too (``index_add_``): what they changed is set back,
        or the change would be made twice.
        """
        if not _are_small(_tensors((*args, *kwargs.values()))):
            return []
        written = _tensors(args[i] for i in self.written_places if i < len(args))
        with torch._C._AutoDispatchBelowAutograd():
            return [(tensor, alias(tensor).clone()) for tensor in written if tensor.is_cuda]

    def _allocate(self, keys: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's own kernel; its name stands beside what it allocates."""
        if not events.are_recorded():
            return self.cuda_kernel(keys, *args, **kwargs)
        before = events.set_label("operator", self.name)
        try:
            return self.cuda_kernel(keys, *args, **kwargs)
        finally:
            events.set_label("operator", before)

    def _allocate_and_compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the CPU say values and shapes, and allocate for them on the GPU."""
        device = next(tensor.device for tensor in _tensors(args) if tensor.is_cuda)
        with torch._C._AutoDispatchBelowAutograd():
            values = _listed(self._compute(args, kwargs, None))
            results = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) for v in values]
            for result, value in zip(results, values, strict=True):
                alias(result).copy_(value)
        _report.computed[self.name] += 1
        return results[0] if self.returns_one else tuple(results)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> Any:
        on_cpu = [_on_cpu(value) for value in args]
        named = {name: _on_cpu(value) for name, value in kwargs.items()}
        if seed is None:
            return self.cpu_kernel(*on_cpu, **named)
        return call_with_seed(seed, self.cpu_kernel, *on_cpu, **named)

    def _fill(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saved: Any, seed: int | None) -> Any:
        """Give the results of torch's kernel their values, if the call is small; return the results."""
        results = _listed(result)
        is_new = self.new_results if len(self.new_results) == len(results) else self.new_results * len(results)
        new = [t for t, mine in zip(results, is_new, strict=True) if mine and isinstance(t, torch.Tensor)]
        inputs = _tensors((*args, *kwargs.values()))
        if not any(tensor.is_cuda for tensor in (*inputs, *new)):
            return result
        if not _are_small([*inputs, *new]):
            _report.left_out[self.name] += 1
            self._clear(new)
            return result
        try:
            for tensor, before in saved:
                if tensor.shape == before.shape:
                    alias(tensor).copy_(before)
            computed = self._compute(args, kwargs, seed)
            values = _listed(computed)
            for target, value, mine in zip(results, values, is_new, strict=False):
                if mine and isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
                    self._write(target, value)
        except Exception as error:
            self._count_failure(error)
            return result
        _report.computed[self.name] += 1
        # `equal` and the like return what their kernel read back
        return computed if not results and not values and computed is not None else result

    @staticmethod
    def _write(target: torch.Tensor, value: torch.Tensor) -> None:
        if target.numel() == 0:
            return
        place = alias(target) if target.is_cuda else target
        if place.shape != value.shape and place.dim() == value.dim():
            place = place[tuple(slice(size) for size in value.shape)]  # fused attention pads its sums to 32 rows
        place.copy_(value)

    @staticmethod
    def _clear(tensors: list[torch.Tensor]) -> None:
        """Make small unknown results nought: what lay there before may be no number."""
        for tensor in tensors:
            if tensor.is_cuda and tensor.numel() * tensor.element_size() <= LIMIT_BYTES:
                alias(tensor).zero_()

    def _count_failure(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        failure = _report.failures.setdefault(self.name, Failure(0, reason))
        failure.calls += 1
        if failure.calls == 1:
            logger.warning("%s was not computed by the CPU and its results are what lay there: %s", self.name, reason)


def _power(keys: torch._C.DispatchKeySet, base: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Stand in for ``pow.Scalar``: the base becomes a tensor on the GPU, as in torch, but no wrapped number."""
    dtype = torch.result_type(exponent, base)
    base_on_gpu = torch.tensor(base, dtype=dtype, device=exponent.device)
    return torch.pow(base_on_gpu, exponent)


def _replaceable(namespace: str) -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """Yield name and overload of each operator of a namespace whose CUDA kernel writes something."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    prefix = f"{namespace}::"
    names = (name.removeprefix(prefix) for name in registered if name.startswith(prefix))
    for name in itertools.chain(names, WITHOUT_CUDA_KERNEL if namespace == "aten" else ()):
        base, _, overload_name = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        overload = getattr(packet, overload_name or "default", None)
        if overload is None or name in ONLY_ALLOCATE_OR_LOOK:
            continue
        returns = overload._schema.returns
        if not any(result.alias_info is not None and not result.alias_info.is_write for result in returns):  # no view
            yield name, overload


def install(namespace: str = "aten") -> None:
    """Give this process values: call once, right after the import of torch, before the first tensor on the GPU.

    Args:
        namespace: Whose operators get values: "aten" of torch, or "bitsandbytes" after the import of that package.
    """
    if LIMIT_BYTES == 0:
        return
    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    _registered.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced, which is what this is for
        for name, overload in _replaceable(namespace):
            kernel = torch.library.get_kernel(overload, "CUDA")
            _registered.append(kernel)
            operator = Operator(name, overload, _power if name == "pow.Scalar" else kernel.call_boxed)
            library.impl(name, operator, "CUDA", with_keyset=True, allow_override=True)
