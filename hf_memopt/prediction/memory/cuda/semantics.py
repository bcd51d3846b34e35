"""Run torch code on the meta device with the allocations of CUDA: dropout, attention, autocast, copies to the host.

``CudaSemantics`` is used together with a ``StorageTracker``, which works below autograd and so cannot see what CUDA
decides above it: which attention kernel runs, which arguments autocast casts, that dropout keeps a mask of one byte per
element. Only what allocates differently on the meta device is replaced; everything else runs as it is.

Limitations: memory that a kernel allocates inside itself (``kernel_buffers`` has it); model code that switches autocast
off for a few operations (rotary angles), which are cast nevertheless, since the meta device has no autocast; the fused
kernel that ``nn.MultiheadAttention`` has for evaluation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hf_memopt.prediction.memory.cuda.attention import attend
from hf_memopt.prediction.memory.cuda.autocast import CUDA_CASTS, Policy, functions_of
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.binding.fused_loss import DeferredLogits

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_FUSED_SOFTMAX = {
    **dict.fromkeys(functions_of("softmax"), _aten._softmax),
    **dict.fromkeys(functions_of("log_softmax"), _aten._log_softmax),
}
_GROUPED_PRODUCTS = functions_of("grouped_mm") | functions_of("_grouped_mm")  # the second is private: torch 2.8 to 2.13


def run_backward(loss: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run ``loss.backward(gradient)`` under the modes that are on.

    A function mode is off while it handles a call, and ``Tensor.backward`` is such a call: what checkpointing
    recomputes inside it would run without the mode. ``_engine_run_backward`` is private, pinned by a test, seen in
    torch 2.6 to 2.13.
    """
    _run_engine((loss,), (gradient,))


def _run_engine(tensors: tuple[torch.Tensor, ...], gradients: tuple[Any, ...], retain: bool = False) -> None:
    torch.autograd.graph._engine_run_backward(
        tensors, gradients, retain, False, (), allow_unreachable=True, accumulate_grad=True
    )


class CudaSemantics(TorchFunctionMode):
    """Run torch code on meta tensors with the allocations of CUDA.

    ``autocast`` is the 16-bit dtype of autocast regions, and with ``cache`` a region keeps the 16-bit copy of each
    trainable weight until it ends. What moves to the host is in ``peak_host_bytes``, and not in the tracker.
    """

    def __init__(
        self,
        *,
        autocast: torch.dtype | None = None,
        capability: tuple[int, int] = (8, 0),
        cache: bool = True,
        tracker: StorageTracker | None = None,
    ) -> None:
        super().__init__()
        self.host_bytes = self.peak_host_bytes = 0
        self.deferred_at: tuple[int, int] | None = None  # event and sequence at the first use of logits not made
        self._dtype = autocast
        self.switched_off = 0  # regions of the model's code with autocast(enabled=False)
        self._capability = capability
        self._cache_enabled = cache
        self._cache: dict[int, torch.Tensor] = {}
        self._callers_autocast: tuple[bool, torch.dtype] | None = None
        self._region = False
        self._tracker = tracker
        if tracker is not None:
            tracker.after_recomputation.append(self._leave_autocast)
        self._on_host: dict[int, Any] = {}
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.autograd.backward: self._backward,
            F.dropout: self._dropout,
            torch.dropout: self._dropout,
            F.scaled_dot_product_attention: self._attention,
            torch.empty: self._empty,
            torch.tensor: self._tensor,
            torch.Tensor.to: self._to,
            torch.Tensor.__format__: _format,
            torch._C._nn.cross_entropy_loss: self._cross_entropy,
            **{function: partial(_grouped_product, function, capability) for function in _GROUPED_PRODUCTS},
            **{function: partial(self._softmax, function, fused) for function, fused in _FUSED_SOFTMAX.items()},
        }
        self._casts = CUDA_CASTS if autocast is not None else {}

    @contextmanager
    def autocast_region(self) -> Iterator[None]:
        """Autocast inside, as accelerate does around the model's forward; the weight copies are kept until the end."""
        self._region = self._dtype is not None
        self._autocasting()
        try:
            yield
        finally:
            self._region = False
            self._leave_autocast()

    def _leave_autocast(self) -> None:
        """End a region, or the recomputation of a part of it, which has a cache of its own."""
        self._cache.clear()
        if self._callers_autocast is not None:
            enabled, dtype = self._callers_autocast
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", dtype)
            self._callers_autocast = None

    def __exit__(self, *error: Any) -> None:
        self._leave_autocast()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Handle no more calls; without what refers to itself, it and the tracker are freed with their last user."""
        self._handlers.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if DeferredLogits in types:  # what they do then is seen like a model's code
            if self.deferred_at is None and self._tracker is not None:
                self.deferred_at = len(self._tracker.events), self._tracker.sequence() - 1  # of the head, just called
            with self._on_again():
                return DeferredLogits.__torch_function__(func, types, args, kwargs)
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in OPENED and func not in self._casts:
            with self._on_again():
                return OPENED[func](*args, **kwargs)
        return self._cast_and_call(func, args, kwargs)

    @contextmanager
    def _on_again(self) -> Iterator[None]:
        """Enter the mode within one of its handlers, where torch has left it."""
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    # ---- Autocast ---------------------------------------------------------------------------------------------------

    def _cast_and_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = self._casts.get(func)
        if policy is None or not self._autocasting():
            return func(*args, **kwargs)
        if policy in (Policy.FLOAT32_SET_OPT_DTYPE, Policy.FLOAT32_APPEND_DTYPE):
            first = args[0] if args else kwargs.get("input")
            given = any(isinstance(value, torch.dtype) for value in (*args, kwargs.get("dtype")))
            extra = {} if given or getattr(first, "dtype", None) not in _HALVES else {"dtype": torch.float32}
            return func(*args, **{**kwargs, **extra})
        cast: Callable[[Any], Any] = self._lower if policy is Policy.LOWER_PRECISION else _raise
        if policy is Policy.PROMOTE:
            values = (*args, *kwargs.values())
            flat = (t for value in values for t in (value if isinstance(value, (list, tuple)) else (value,)))
            wide = any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in flat)
            cast = _raise if wide else self._lower
        named = {key: _apply(cast, kwargs[key]) for key in reversed(kwargs)}  # as GCC evaluates: the last one first
        return func(*[_apply(cast, value) for value in reversed(args)][::-1], **named)

    def _autocasting(self) -> bool:
        """Return whether autocast is on: in the region, and where checkpointing recomputes a part of it."""
        if self._dtype is None or not (self._region or (torch.is_grad_enabled() and self._recomputing())):
            return False
        if self._callers_autocast is None:
            self._enable_torchs_autocast(self._dtype)
        return not self.switched_off

    def _enable_torchs_autocast(self, dtype: torch.dtype) -> None:
        """Set torch's own flags, which model code may read (PEFT's quantised layers do); meta tensors ignore them."""
        self._callers_autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)

    def _recomputing(self) -> bool:
        return torch._C._current_graph_task_id() >= 0  # private: pinned by a test, 2.6 to 2.13

    def _lower(self, value: Any) -> Any:
        """Return a tensor in the autocast dtype; from the cache where autocast's ``cached_cast`` takes it from there.

        That is where a float32 leaf requires a gradient: a weight that is used twice is cast once. Frozen weights and
        activations are cast at every use.
        """
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (self._dtype, torch.float64):
            return value
        cached = self._cache_enabled and torch.is_autocast_cache_enabled()  # off inside tiles
        cached = cached and (self._region or self._tracker is not None) and value.dtype == torch.float32
        if not (cached and value.requires_grad and value.is_leaf and not value._is_view()):
            return value.to(self._dtype)
        if id(value) not in self._cache:
            self._cache[id(value)] = value.to(self._dtype)
        return self._cache[id(value)]

    # ---- Operations -------------------------------------------------------------------------------------------------

    def _dropout(self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any) -> Any:
        if kwargs.get("train", training) and 0 < p < 1 and not inplace:
            return torch.native_dropout(input, p, True)[0]  # a mask of one byte per element
        return F.dropout(input, p, kwargs.get("train", training), inplace)

    def _softmax(self, function: Any, fused: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a softmax: on CUDA one kernel reads float16 and writes float32, without a copy."""
        dim = kwargs.get("dim", args[0] if args else None)
        given = kwargs.get("dtype", next((value for value in args[1:] if isinstance(value, torch.dtype)), None))
        wanted = torch.float32 if given is None and self._autocasting() else given
        if input.dtype == torch.float16 and wanted == torch.float32 and dim is not None:
            return fused(input, dim, True)
        return self._cast_and_call(function, (input, *args), kwargs)

    def _cross_entropy(self, logits: Any, *rest: Any) -> Any:
        """Run the cross entropy of 16-bit logits in its parts: autocast lists some of them, but not the whole."""
        if not (logits.dtype in _HALVES and self._autocasting()):
            return torch._C._nn.cross_entropy_loss(logits, *rest)
        with self._on_again():
            return cross_entropy(logits, *rest)

    def _attention(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *options: Any, **named: Any) -> Any:
        if self._autocasting():
            attn_mask, value, key, query = (self._lower(tensor) for tensor in (attn_mask, value, key, query))
        with nullcontext() if self._tracker is None else self._tracker.values.unread():  # a bias made of each mask
            return attend(query, key, value, attn_mask, *options, **named, capability=self._capability)

    def _backward(
        self, tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, *_: Any, **__: Any
    ) -> None:
        """Run a backward pass inside the backward pass, as reentrant checkpointing does, under this mode."""
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        gradients = tuple(torch.ones_like(root) for root in roots) if given is None else tuple(given)
        with self:
            _run_engine(roots, gradients, bool(retain_graph))

    # ---- Copies to the host -----------------------------------------------------------------------------------------

    def _empty(self, *size: Any, **kwargs: Any) -> Any:
        """Return host memory, which ``save_on_cpu`` asks for, as a meta tensor that the tracker ignores.

        Its ``pin_memory`` is False where torch was built for CUDA and no GPU is available.
        """
        if "pin_memory" not in kwargs or self._tracker is None or kwargs.get("device") is not None:
            return torch.empty(*size, **kwargs)
        return self.to_host(torch.empty(*size, **{**kwargs, "pin_memory": False, "device": "meta"}), is_pinned=True)

    def _tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Make a tensor whose values the tracker knows; torch makes one on the meta device without them."""
        found = torch.tensor(data, device=device, **kwargs)
        if found.is_meta and self._tracker is not None and not isinstance(data, torch.Tensor):
            values = tree_map(lambda one: one.item() if isinstance(one, torch.Tensor) else one, data)
            self._tracker.values.give(found, values)
        return found

    def to_host(self, tensor: torch.Tensor, *, is_pinned: bool = False) -> torch.Tensor:
        """Count a meta tensor that was just created as memory of the host.

        torch pins powers of two: https://github.com/pytorch/pytorch/issues/150517.
        """
        if self._tracker is not None:
            self._tracker.ignore(tensor)
        size_bytes = tensor.untyped_storage().nbytes()
        if is_pinned and size_bytes:
            size_bytes = 1 << (size_bytes - 1).bit_length()
        self._count_on_host(size_bytes)
        key = id(tensor)
        self._on_host[key] = weakref.ref(tensor, lambda _: self._leave_host(key, size_bytes))
        return tensor

    def _leave_host(self, key: int, size_bytes: int) -> None:
        self._on_host.pop(key, None)
        self._count_on_host(-size_bytes)

    def _count_on_host(self, delta: int) -> None:
        self.host_bytes += delta
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if id(tensor) in self._on_host:
            return torch.empty_like(tensor)
        return tensor.to(*args, **kwargs)


def _format(tensor: Any, spec: str) -> str:
    """Return the number in a text, as on a GPU: code names its experts so."""
    return format(tensor.item() if tensor.is_meta and not tensor.dim() else tensor, spec)


def _raise(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value


def _apply(cast: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return [cast(item) for item in value]
    return cast(value)


# ---- Operations that consist of others

# Autocast on CUDA works below Python: it casts the arguments of every operator that it lists, also inside a function
# that calls several. A function mode is off while it handles a call and so sees the outer function only. What is run
# here instead allocates the same and calls the parts one by one, so that the mode sees each.


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Run ``cross_entropy_loss`` in the steps of its C++ code, each of which autocast may cast.

    The log-softmax gets the dtype of the logits as an argument; ``nll_loss`` is cast to float32, which it saves.

    Logits are (batch, classes, ...) or (classes,), targets (batch, ...) classes or probabilities in the shape of the
    logits; reduction 0 is none, 1 mean, 2 sum.

    Source: torch 2.13, ``aten/src/ATen/native/LossNLL.cpp``.
    """
    dim = 1 if logits.dim() > 1 else 0
    classes = logits.shape[dim]
    found = F.log_softmax(logits, dim, dtype=logits.dtype)
    wide = None if weight is None else weight.view([-1 if axis == dim else 1 for axis in range(logits.dim())])
    if logits.shape == target.shape:
        if label_smoothing > 0:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        product = found * target if wide is None else found * target * wide
        if reduction == 0:
            return -product.sum(dim)
        return -product.sum() / (logits.numel() / classes) if reduction == 1 else -product.sum()
    name = ("none", "mean", "sum")[reduction]
    loss = F.nll_loss(found, target, weight, ignore_index=ignore_index, reduction=name)
    if label_smoothing <= 0:
        return loss
    smooth = -(found if wide is None else found * wide).sum(dim)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    if reduction:
        smooth = smooth.sum()
    if reduction == 1 and weight is None:
        smooth = smooth / (~ignored).sum()
    elif reduction == 1 and weight is not None:
        smooth = smooth / weight.gather(0, target.masked_fill(ignored, 0).flatten()).sum()
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / classes)


def _grouped_product(function: Any, capability: Any, rows: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a grouped matrix product: CUDA takes more dtypes than the meta device.

    Source: torch 2.13, ``aten/src/ATen/native/cuda/GroupedBlas.cpp``, ``_grouped_mm_cuda``.
    """
    options = {name: value for name, value in kwargs.items() if name != "offs" and value is not None}
    if rows.dtype == torch.bfloat16 or rows.dim() != 2 or weights.dim() != 3 or options:
        return function(rows, weights, *args, **kwargs)
    return _GroupedProduct.apply(rows, weights, capability < (8, 0))  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    """Rows (tokens, inputs), sorted by expert, times weights (experts, inputs, outputs): one product for each row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, rows_first: bool) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.rows_first = rows_first  # in the function of transformers for GPUs before Ampere
        return rows @ weights[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        of_rows = grad @ weights[0].t() if ctx.needs_input_grad[0] and ctx.rows_first else None
        of_weights = torch.empty_like(weights) if ctx.needs_input_grad[1] else None
        if of_weights is not None:
            torch.mm(rows.t(), grad, out=of_weights[0])
        if ctx.needs_input_grad[0] and not ctx.rows_first:
            of_rows = grad @ weights[0].t()
        return of_rows, of_weights, None


def _opened() -> dict[Any, FunctionType]:
    """Return a copy of each Python function of ``torch.nn.functional`` that does not call the mode for itself.

    Each of them first calls ``has_torch_function`` and, under a mode, passes itself to the mode. The copies have
    globals in which that function returns False; the functions that they call are unchanged and reach the mode. The
    names are pinned by a test, seen in torch 2.6 to 2.13.
    """
    asking = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    found = {**vars(F), **dict.fromkeys(asking, lambda *_: False)}
    copies = {}
    for function in vars(F).values():
        if not isinstance(function, FunctionType) or function.__globals__ is not vars(F):
            continue
        if not set(asking).isdisjoint(function.__code__.co_names):
            copy = FunctionType(
                function.__code__, found, function.__name__, function.__defaults__, function.__closure__
            )
            copy.__kwdefaults__ = function.__kwdefaults__
            copies[function] = copy
    return copies


OPENED = _opened()
"""The copy by the function, such as ``F.normalize`` and ``F.multi_head_attention_forward``."""
