"""Gives small tensors their values on a GPU without silicon, where no kernel runs.

The stand-in's device memory is memory of this process, so the CPU can work on a tensor "on the GPU" under another
name: an *alias*. Each operator with a kernel for CUDA is registered anew. First torch's own CUDA kernel runs: it
allocates, and launches what the stand-in ignores. Then, where all tensors of the call are small, the CPU computes the
same on aliases.

There is no ``TorchDispatchMode`` and no tensor subclass here. With either, autograd takes every tensor for a subclass
(``isTensorSubclassLike``) and adds gradients out of place, which raises the peak of a model with tied weights.

Left out: calls with large tensors (their small results are nought), kernels of Triton, sparse tensors, CUDA graphs.
Operators whose shape depends on values take no scratch memory. What fails is logged once and counted.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_memopt.rehearsal.cpu_kernels import CPU_KERNELS, call_with_seed
from hf_memopt.rehearsal.events import are_recorded, set_label

LIMIT_BYTES = int(os.environ.get("HF_MEMOPT_GPU_VALUES", 1 << 20))
"""Floating-point bytes of a call up to which it is computed; 0 leaves torch's kernels as they are."""
TOTAL_LIMIT_BYTES = 16 * LIMIT_BYTES
"""The same with masks, ids and lengths, which decide shapes and branches, and with all tensors of an optimizer."""

CPU = torch.device("cpu")
NUMBERS = (bool, int, float, complex)
ONLY_ALLOCATE_OR_LOOK = {
    "_fused_sdp_choice",  # which the CPU makes otherwise
    "empty.memory_format", "empty_strided", "empty_quantized", "resize_", "resize_as_", "_resize_output_", "set_",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to", "record_stream",
    "is_pinned", "_pin_memory", "_coalesced_", "_cudnn_init_dropout_state", "_use_cudnn_ctc_loss",
    "_use_cudnn_ctc_loss.Tensor",
    "_local_scalar_dense",  # reads by cudaMemcpy, which the stand-in does
    "_assert_async", "_assert_async.msg",  # of values that may be unknown, as before samples of large logits
    "_efficient_attention_forward", "_efficient_attention_backward",  # run inside operators that are computed
    "_flash_attention_forward", "_flash_attention_backward",
}  # fmt: skip
SHAPED_BY_VALUES = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "repeat_interleave.Tensor", "bincount",
}  # fmt: skip
"""Their CUDA kernels count, read the count back and allocate. No kernel wrote the count, so the CPU says the shape."""
COMPILED_WHEN_CALLED = {"prod", "prod.dim_int"}
"""Their CUDA kernels of integers are compiled by NVRTC, which ends the process here; they take no scratch memory."""
COMPOSITE = ("copy_", "pow.Scalar")
"""Have no CUDA kernel, but launch kernels, or hand Python a wrapped number on the GPU, which torch refuses."""

logger = logging.getLogger(__name__)
_registered: list[Any] = []  # a library and its kernels end with their last reference


@dataclass
class Failure:
    """Calls of one operator that the CPU could not compute, and why the first one failed."""

    calls: int
    reason: str


@dataclass
class Report:
    """What was computed in this process: calls by operator, failures by operator, and the time of it all."""

    computed: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    seconds: float = 0.0


_report = Report()


def values_report() -> Report:
    """Return what was computed in this process so far."""
    return _report


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on the stand-in as a CPU tensor of the same shape and strides.

    The tensor's own storage is never asked for: its Python object would be a second reference to it, with which
    autograd no longer adds gradients in place (torch 2.14).
    """
    shape, strides = tensor.shape, tensor.stride()
    if tensor.numel() == 0:
        return torch.empty(shape, dtype=tensor.dtype, device=CPU)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size = (last + 1) * tensor.itemsize
    memory = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), CPU, size)
    return torch.empty((0,), dtype=tensor.dtype, device=CPU).set_(memory, 0, shape, strides)


def _on_cpu(value: Any) -> Any:
    """Return an argument as the CPU takes it: aliases of tensors, its own device and random numbers."""
    if isinstance(value, torch.Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return [_on_cpu(item) for item in value]
    if isinstance(value, torch.device):
        return CPU
    return None if isinstance(value, torch.Generator) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, and those in lists among them."""
    lists = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return [item for items in lists for item in items if isinstance(item, torch.Tensor)]


def _listed(result: Any) -> list[Any]:
    """Return the results of an operator as a list: none, one, or several."""
    if isinstance(result, (list, tuple)):
        return list(result)
    return [result] if isinstance(result, torch.Tensor) else []


def _are_small(values: Any) -> bool:
    """Return whether the tensors of a call are within the limits; all lists together count as their largest tensor."""
    floats = listed = total = 0
    for value in values:
        for tensor in _tensors((value,)):
            size = tensor.nbytes
            total += size
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                floats, listed = (floats + size, listed) if tensor is value else (floats, max(listed, size))
    return floats + listed <= LIMIT_BYTES and total <= TOTAL_LIMIT_BYTES


def _tensor_of(number: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return a wrapped number, which torch hands a Python kernel as a plain number, as a tensor that promotes alike."""
    widest = max(tensors, key=lambda t: (t.dtype.is_floating_point or t.dtype.is_complex, t.dtype.itemsize))
    dtype = torch.result_type(widest, number)
    if widest.dim() > 0 and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # keeps the number's digits; without dimensions it does not promote the tensor
    return torch.tensor(number, dtype=dtype)


class Operator:
    """One operator of the stand-in: torch's own CUDA kernel allocates, then the CPU computes what is small."""

    def __init__(self, name: str, overload: torch._ops.OpOverload, cuda_kernel: Any) -> None:
        arguments = [argument for argument in overload._schema.arguments if not argument.kwarg_only]
        returns = overload._schema.returns
        self.name = name
        self.cuda_kernel = cuda_kernel
        self.cpu_kernel = CPU_KERNELS.get(name, overload)
        self.returns_list = [str(result.type) for result in returns] == ["List[Tensor]"]
        self.is_new = [result.alias_info is None for result in returns]
        self.places = [i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]
        self.written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        # the tag is missing at some fused operators with dropout
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags or "dropout" in name or "attention" in name

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run as the CUDA kernel of this operator."""
        if any(type(args[i]) in NUMBERS for i in self.places if i < len(args)):
            tensors = _tensors(args)
            is_number = [i in self.places and type(value) in NUMBERS for i, value in enumerate(args)]
            args = tuple(_tensor_of(v, tensors) if number else v for v, number in zip(args, is_number, strict=True))
        seed = self._seed((*args, *kwargs.values())) if self.is_random else None
        # the CPU works below autograd, which has seen this call already
        if self.name in SHAPED_BY_VALUES | COMPILED_WHEN_CALLED:
            with torch._C._AutoDispatchBelowAutograd():
                return self._compute_and_allocate(args, kwargs)
        saved = self._save(args, kwargs) if self.written else []
        result = self._allocate(keys, args, kwargs)
        started = time.perf_counter()
        with torch._C._AutoDispatchBelowAutograd():
            result = self._fill(result, args, kwargs, saved, seed)
        _report.seconds += time.perf_counter() - started
        return result

    @staticmethod
    def _seed(values: tuple[Any, ...]) -> int:
        """Return a seed from the state of the GPU's generator, so that a restored state draws the same again."""
        given = next((value for value in values if isinstance(value, torch.Generator)), None)
        generator = given or torch.cuda.default_generators[torch.cuda.current_device()]
        return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % (1 << 62)

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what the call changes in place, each with a copy.

        A CUDA kernel may call other operators, which are computed too (``index_add_``): what they changed is set back,
        or the change would be made twice.
        """
        if not _are_small((*args, *kwargs.values())):
            return []
        written = _tensors(args[i] for i in self.written if i < len(args))
        with torch._C._AutoDispatchBelowAutograd():
            return [(tensor, alias(tensor).clone()) for tensor in written if tensor.is_cuda]

    def _allocate(self, keys: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's own kernel; its name stands beside what it allocates."""
        if not are_recorded():
            return self.cuda_kernel(keys, *args, **kwargs)
        before = set_label("operator", self.name)
        try:
            return self.cuda_kernel(keys, *args, **kwargs)
        finally:
            set_label("operator", before)

    def _compute_and_allocate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the CPU say values and shapes, and allocate for them on the GPU."""
        device = next(tensor.device for tensor in _tensors(args) if tensor.is_cuda)
        computed = self._compute(args, kwargs, None)
        values = _listed(computed)
        results = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) for v in values]
        for result, value in zip(results, values, strict=True):
            alias(result).copy_(value)
        _report.computed[self.name] += 1
        return results[0] if isinstance(computed, torch.Tensor) else tuple(results)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> Any:
        on_cpu, named = _on_cpu(args), {name: _on_cpu(value) for name, value in kwargs.items()}
        if seed is None:
            return self.cpu_kernel(*on_cpu, **named)
        return call_with_seed(seed, self.cpu_kernel, *on_cpu, **named)

    def _fill(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saved: Any, seed: int | None) -> Any:
        """Give the results of torch's kernel their values, if the call is small; return the results."""
        results = _listed(result)
        is_new = self.is_new * len(results) if self.returns_list else self.is_new
        new = [r if mine else None for r, mine in zip(results, is_new, strict=False)]  # the others are arguments
        inputs = (*args, *kwargs.values())
        if not any(tensor.is_cuda for tensor in _tensors((*inputs, new))):
            return result
        if not _are_small((*inputs, *([new] if self.returns_list else new))):
            _report.left_out[self.name] += 1
            for tensor in _tensors(new):
                if tensor.is_cuda and tensor.nbytes <= LIMIT_BYTES:
                    alias(tensor).zero_()  # unknown, and what lay there before may be no number
            return result
        try:
            for tensor, before in saved:
                if tensor.shape == before.shape:
                    alias(tensor).copy_(before)
            computed = self._compute(args, kwargs, seed)
            for target, value in zip(new, _listed(computed), strict=False):
                if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and target.numel():
                    self._write(target, value)
        except Exception as error:
            self._count_failure(error)
            return result
        _report.computed[self.name] += 1
        # `equal` and the like return what their kernel would have read back
        return result if isinstance(computed, (torch.Tensor, list, tuple, type(None))) else computed

    @staticmethod
    def _write(target: torch.Tensor, value: torch.Tensor) -> None:
        place = alias(target) if target.is_cuda else target
        if place.shape != value.shape and place.dim() == value.dim():
            place = place[tuple(slice(size) for size in value.shape)]  # fused attention pads its sums to 32 rows
        place.copy_(value)

    def _count_failure(self, error: Exception) -> None:
        failure = _report.failures.setdefault(self.name, Failure(0, f"{type(error).__name__}: {error}".splitlines()[0]))
        failure.calls += 1
        if failure.calls == 1:
            text = "%s was not computed by the CPU and its results are what lay there: %s"
            logger.warning(text, self.name, failure.reason)


def _power(keys: torch._C.DispatchKeySet, base: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Stand in for ``pow.Scalar``: the base becomes a tensor on the GPU, as in torch, but no wrapped number."""
    on_gpu = torch.tensor(base, dtype=torch.result_type(exponent, base), device=exponent.device)
    return torch.pow(on_gpu, exponent)


def _replaceable(namespace: str) -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """Yield name and overload of each operator of a namespace whose CUDA kernel writes something."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = [name.partition("::")[2] for name in registered if name.startswith(f"{namespace}::")]
    for name in [*names, *COMPOSITE] if namespace == "aten" else names:
        base, _, overload_name = name.partition(".")
        overload = getattr(getattr(getattr(torch.ops, namespace), base, None), overload_name or "default", None)
        if overload is None or name in ONLY_ALLOCATE_OR_LOOK:
            continue
        returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in overload._schema.returns)
        if not returns_view:
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
