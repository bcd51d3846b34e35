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
import warnings
from typing import Any

import torch

from hf_memopt.prediction.rehearsal.cpu_kernels import CPU_KERNELS, call_with_seed
from hf_memopt.prediction.rehearsal.events import set_label

LIMIT_BYTES = int(os.environ.get("HF_MEMOPT_GPU_VALUES", 1 << 20))
"""Floating-point bytes of a call up to which it is computed; 0 leaves torch's kernels as they are."""
TOTAL_LIMIT_BYTES = 16 * LIMIT_BYTES
"""The same with masks, ids and lengths, which decide shapes and branches, and with all tensors of an optimizer."""

CPU = torch.device("cpu")
NUMBERS = (bool, int, float, complex)
ONLY_ALLOCATE_OR_LOOK = (  # operators whose names begin with these
    *("empty", "resize_", "_resize_", "set_", "is_", "record_stream", "_pin_memory", "_coalesced_"),
    "_fused_sdp_choice",  # which the CPU makes otherwise
    "_assert_async",  # of values that may be unknown, as before samples of large logits
    "_local_scalar_dense",  # reads by cudaMemcpy, which the stand-in does
    *("_efficient_attention_", "_flash_attention_"),  # run inside operators that are computed
    *("_cudnn_init_dropout_state", "_use_cudnn_ctc_loss"),
)
COMPUTED_FIRST = {
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    *("repeat_interleave.Tensor", "bincount"),  # count, read the count back and allocate: no kernel wrote the count
    *("prod", "prod.dim_int"),  # of integers are compiled by NVRTC, which ends the process here
    "pow.Scalar",  # hands Python a wrapped number on the GPU, which torch refuses
}
"""The CPU says the shape, and what their CUDA kernels take as scratch memory is not taken."""
COMPOSITE = ("copy_", "pow.Scalar")
"""Have no CUDA kernel, but launch kernels."""

logger = logging.getLogger(__name__)
failed_values: dict[str, str] = {}
"""Why the CPU could not compute an operator in this process when that happened first, by the operator's name."""
_registered: list[Any] = []  # a library ends with its last reference


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on the stand-in as a CPU tensor of the same shape and strides; others as they are.

    The tensor's own storage is never asked for: its Python object would be a second reference to it, with which
    autograd no longer adds gradients in place (torch 2.14).
    """
    if not tensor.is_cuda:
        return tensor
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
        return alias(value)
    if isinstance(value, (list, tuple)):
        return [_on_cpu(item) for item in value]
    if isinstance(value, torch.device):
        return CPU
    return None if isinstance(value, torch.Generator) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, and those in lists among them."""
    return [item for value in values for item in _listed(value) if isinstance(item, torch.Tensor)]


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


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

    def __init__(self, name: str, overload: torch._ops.OpOverload) -> None:
        arguments = [argument for argument in overload._schema.arguments if not argument.kwarg_only]
        self.name = name
        self.cuda_kernel: Any = torch.library.get_kernel(overload, "CUDA").call_boxed
        self.cpu_kernel = CPU_KERNELS.get(name, overload)
        self.places = [i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]
        self.written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        # the tag is missing at some fused operators with dropout
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags or "dropout" in name or "attention" in name

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run as the CUDA kernel of this operator, whose name stands beside what it allocates."""
        is_number = [i in self.places and type(value) in NUMBERS for i, value in enumerate(args)]
        if any(is_number):
            tensors = _tensors(args)
            args = tuple(_tensor_of(v, tensors) if number else v for v, number in zip(args, is_number, strict=True))
        values = (*args, *kwargs.values())
        seed = self._seed(values) if self.is_random else None
        before = set_label("operator", self.name)
        try:
            # the CPU works below autograd, which has seen this call already
            with torch._C._AutoDispatchBelowAutograd():
                if self.name in COMPUTED_FIRST:
                    return self._compute_and_allocate(args, kwargs)
                # what a CUDA kernel changes by other operators, which are computed too (``index_add_``), is set back
                written = _tensors(args[i] for i in self.written if i < len(args))
                saved = [(alias(t), alias(t).clone()) for t in written] if written and _are_small(values) else []
            result = self.cuda_kernel(keys, *args, **kwargs)
        finally:
            set_label("operator", before)
        with torch._C._AutoDispatchBelowAutograd():
            return self._fill(result, args, kwargs, saved, seed)

    @staticmethod
    def _seed(values: tuple[Any, ...]) -> int:
        """Return a seed from the state of the GPU's generator, so that a restored state draws the same again."""
        given = next((value for value in values if isinstance(value, torch.Generator)), None)
        generator = given or torch.cuda.default_generators[torch.cuda.current_device()]
        return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % (1 << 62)

    def _compute_and_allocate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the CPU say values and shapes, and allocate for them on the GPU."""
        device = next(tensor.device for tensor in _tensors(args) if tensor.is_cuda)
        computed = self._compute(args, kwargs, None)
        results = []
        for value in _listed(computed):
            results.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device))
            alias(results[-1]).copy_(value)
        return results[0] if isinstance(computed, torch.Tensor) else tuple(results)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> Any:
        on_cpu, named = _on_cpu(args), {name: _on_cpu(value) for name, value in kwargs.items()}
        if seed is None:
            return self.cpu_kernel(*on_cpu, **named)
        return call_with_seed(seed, self.cpu_kernel, *on_cpu, **named)

    def _fill(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saved: Any, seed: int | None) -> Any:
        """Give the results of torch's kernel their values, if the call is small; return the results."""
        values = (*args, *kwargs.values())
        inputs = _tensors(values)
        new = [None if any(one is argument for argument in inputs) else one for one in _listed(result)]
        if not any(tensor.is_cuda for tensor in _tensors((inputs, new))):
            return result
        if not _are_small((*values, new)):
            for tensor in _tensors(new):
                if tensor.is_cuda and tensor.nbytes <= LIMIT_BYTES:
                    alias(tensor).zero_()  # unknown, and what lay there before may be no number
            return result
        try:
            for place, before in saved:
                place.copy_(before)
            computed = self._compute(args, kwargs, seed)
            for target, value in zip(new, _listed(computed), strict=False):
                if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and target.numel():
                    alias(target).copy_(value)
        except Exception as error:
            if self.name not in failed_values:
                failed_values[self.name] = reason = f"{type(error).__name__}: {error}".splitlines()[0]
                text = "%s was not computed by the CPU and its results are what lay there: %s"
                logger.warning(text, self.name, reason)
            return result
        # `equal` and the like return what their kernel would have read back
        return result if isinstance(computed, (torch.Tensor, list, tuple, type(None))) else computed


def install(namespace: str = "aten") -> None:
    """Give this process values: call once, right after the import of torch, before the first tensor on the GPU.

    Args:
        namespace: Whose operators get values: "aten" of torch, or "bitsandbytes" after the import of that package.
    """
    if LIMIT_BYTES == 0:
        return
    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = [name.partition("::")[2] for name in registered if name.startswith(f"{namespace}::")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced, which is what this is for
        for name in [*names, *COMPOSITE] if namespace == "aten" else names:
            base, _, overload_name = name.partition(".")
            overload = getattr(getattr(getattr(torch.ops, namespace), base, None), overload_name or "default", None)
            if overload is None or name.startswith(ONLY_ALLOCATE_OR_LOOK):
                continue
            if not any(one.alias_info and not one.alias_info.is_write for one in overload._schema.returns):  # a view
                library.impl(name, Operator(name, overload), "CUDA", with_keyset=True, allow_override=True)
    _registered.append(library)
