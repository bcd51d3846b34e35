"""What CUDA does differently above the dispatcher: dropout masks, attention kernels, autocast, copies to the host.

``CudaSemantics`` replaces only what allocates other bytes there than on the meta device; everything else runs as it
is. Functions that ``torch.nn.functional`` writes in Python (``multi_head_attention_forward``, ``normalize``) are looked
into: a function mode is off inside them, so they run as copies that do not ask for it. Left out: what a kernel
allocates inside itself (``kernels``); model code that switches autocast off for a few operations (rotary angles):
autocast does not exist on the meta device, so they are cast all the same; the fused kernel that
``nn.MultiheadAttention`` has for evaluation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_memopt.memory.cuda import autocast_lists
from hf_memopt.memory.cuda.attention_buffers import attend
from hf_memopt.memory.storage_tracker import StorageTracker

__all__ = ["CudaSemantics", "run_backward"]

_aten = torch.ops.aten
_LOW, _HIGH, _HIGH_UNLESS_TOLD, _WIDEST = range(4)
_HALVES = (torch.float16, torch.bfloat16)


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

    Args:
        autocast: the 16-bit dtype of autocast regions; None for no autocast.
        capability: compute capability of the card, which decides the attention kernel.
        cache: whether a region keeps the 16-bit copy of each trainable weight until it ends.
        tracker: counts what moves to the host as such.
        cuda: False keeps dropout and attention as the device at hand has them, and takes the CPU's lists of autocast:
            for comparisons with a real run on a CPU.
    """

    def __init__(
        self,
        *,
        autocast: torch.dtype | None = None,
        capability: tuple[int, int] = (8, 0),
        cache: bool = True,
        tracker: StorageTracker | None = None,
        cuda: bool = True,
    ) -> None:
        super().__init__()
        self.host_bytes = 0
        self._cuda = cuda
        self.peak_host_bytes = 0
        self._dtype = autocast
        self._capability = capability
        self._cache_enabled = cache
        self._cache: dict[int, torch.Tensor] = {}
        self._told: tuple[bool, torch.dtype] | None = None
        self._region = False
        self._tracker = tracker
        if tracker is not None:
            tracker.after_recomputation.append(self._leave_autocast)
        self._on_host: dict[int, Any] = {}
        self._handlers: dict[Any, Callable[..., Any]] = {torch.autograd.backward: self._backward}
        if cuda:
            self._handlers |= {
                F.dropout: self._dropout,
                torch.dropout: self._dropout,
                F.scaled_dot_product_attention: self._attention,
                torch.empty: self._empty,
                torch.Tensor.to: self._to,
            }
            self._handlers[torch._C._nn.cross_entropy_loss] = self._cross_entropy
            self._handlers |= {function: _grouped_product(function) for function in _GROUPED_PRODUCTS}
            for fused, functions in _FUSED_SOFTMAX.items():
                for function in functions:
                    self._handlers[function] = self._softmax(function, fused)
        self._casts = (_CUDA_CASTS if cuda else _CPU_CASTS) if autocast is not None else {}

    @contextmanager
    def autocast_region(self) -> Iterator[None]:
        """Autocast inside, as accelerate does around the model's forward: the cache of weight copies lives so long."""
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
        if self._told is not None:
            torch.set_autocast_enabled("cuda", self._told[0])
            torch.set_autocast_dtype("cuda", self._told[1])
            self._told = None

    def __exit__(self, *error: Any) -> None:
        self._leave_autocast()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in _OPENED and func not in self._casts:
            with self._on_again():
                return _OPENED[func](*args, **kwargs)
        return self._cast_and_call(func, args, kwargs)

    @contextmanager
    def _on_again(self) -> Iterator[None]:
        """Put the mode on within one of its handlers, where torch has taken it off."""
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    # ---- Autocast ---------------------------------------------------------------------------------------------------

    def _cast_and_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = self._casts.get(func)
        if rule is None or not self._autocasting():
            return func(*args, **kwargs)
        if rule == _HIGH_UNLESS_TOLD:  # no copy of the input: the operator is told to compute in float32
            first = args[0] if args else kwargs.get("input")
            told = any(isinstance(value, torch.dtype) for value in (*args, kwargs.get("dtype")))
            extra = {} if told or getattr(first, "dtype", None) not in _HALVES else {"dtype": torch.float32}
            return func(*args, **{**kwargs, **extra})
        cast: Callable[[Any], Any] = self._lower if rule == _LOW else _raise
        if rule == _WIDEST:
            values = (*args, *kwargs.values())
            flat = (t for value in values for t in (value if isinstance(value, (list, tuple)) else (value,)))
            wide = any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in flat)
            cast = _raise if wide else self._lower
        return func(*(_apply(cast, value) for value in args), **{key: _apply(cast, v) for key, v in kwargs.items()})

    def _autocasting(self) -> bool:
        """Tell whether autocast is on here: in the region, and where checkpointing recomputes a part of it.

        Model code may ask torch the same (PEFT's quantised layers do), so it is told; meta tensors do not heed it.
        """
        if self._dtype is None or not (self._region or (torch.is_grad_enabled() and self._recomputing())):
            return False
        if self._cuda and self._told is None:
            self._told = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", self._dtype)
        return True

    def _recomputing(self) -> bool:
        return torch._C._current_graph_task_id() >= 0  # private: pinned by a test, 2.6 to 2.13

    def _lower(self, value: Any) -> Any:
        """Return a tensor in 16 bits; from the cache where C++ autocast takes it from there (``cached_cast``)."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (self._dtype, torch.float64):
            return value
        cached = self._cache_enabled and (self._region or self._tracker is not None) and value.dtype == torch.float32
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

    def _softmax(self, function: Any, fused: Any) -> Callable[..., Any]:
        """Return the handler of a softmax: CUDA alone has a kernel that reads float16 and writes float32."""

        def softmax(input: Any, *args: Any, **kwargs: Any) -> Any:
            dim = kwargs.get("dim", args[0] if args else None)
            told = kwargs.get("dtype", next((value for value in args[1:] if isinstance(value, torch.dtype)), None))
            wanted = torch.float32 if told is None and self._autocasting() else told
            if input.dtype == torch.float16 and wanted == torch.float32 and dim is not None:
                return fused(input, dim, True)
            return self._cast_and_call(function, (input, *args), kwargs)

        return softmax

    def _cross_entropy(self, logits: Any, *rest: Any) -> Any:
        """Run the cross entropy of 16-bit logits as autocast does, which does not list it but some of its parts."""
        if not (logits.dtype in _HALVES and self._autocasting()):
            return torch._C._nn.cross_entropy_loss(logits, *rest)
        with self._on_again():
            return cross_entropy(logits, *rest)

    def _attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if self._autocasting():
            query, key, value, attn_mask = (self._lower(tensor) for tensor in (query, key, value, attn_mask))
        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, capability=self._capability
        )

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
        """Make pinned host memory, as ``save_on_cpu`` asks for, a meta tensor that is not counted on the card."""
        if not kwargs.get("pin_memory") or self._tracker is None or kwargs.get("device") is not None:
            return torch.empty(*size, **kwargs)
        pinned = torch.empty(*size, **{**kwargs, "pin_memory": False, "device": "meta"})
        return self.to_host(pinned)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a meta tensor that was just made for memory of the host."""
        if self._tracker is not None:
            self._tracker.ignore(tensor)
        size_bytes = tensor.untyped_storage().nbytes()
        self.host_bytes += size_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        key = id(tensor)
        self._on_host[key] = weakref.ref(tensor, lambda _: self._leave_host(key, size_bytes))
        return tensor

    def _leave_host(self, key: int, size_bytes: int) -> None:
        self._on_host.pop(key, None)
        self.host_bytes -= size_bytes

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if id(tensor) in self._on_host:
            return torch.empty_like(tensor)
        return tensor.to(*args, **kwargs)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Run ``cross_entropy_loss`` in the steps of its C++ code, each of which autocast then casts or not.

    The log-softmax is told to stay in the type of the logits; ``nll_loss`` wants it, and saves it, in float32.

    Source: torch 2.13, ``aten/src/ATen/native/LossNLL.cpp``.

    Args:
        logits: (batch, classes, ...) or (classes,).
        target: classes, or probabilities in the shape of ``logits``.
        weight: (classes,).
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: of targets that do not count.
        label_smoothing: share of the loss that is spread over all classes.
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


def _grouped_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of a grouped matrix product: CUDA takes more types than the meta device.

    Source: torch 2.13, ``aten/src/ATen/native/cuda/GroupedBlas.cpp``, ``_grouped_mm_cuda``.
    """

    def grouped(rows: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if name != "offs" and value is not None}
        if rows.dtype == torch.bfloat16 or rows.dim() != 2 or weights.dim() != 3 or options:
            return function(rows, weights, *args, **kwargs)
        return _GroupedProduct.apply(rows, weights)  # type: ignore[no-untyped-call]

    return grouped


class _GroupedProduct(torch.autograd.Function):
    """Rows (tokens, inputs), sorted by expert, times weights (experts, inputs, outputs): one product for each row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return rows @ weights[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weights = ctx.saved_tensors
        of_rows = grad @ weights[0].t() if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_rows, None
        of_weights = torch.empty_like(weights)
        torch.mm(rows.t(), grad, out=of_weights[0])
        return of_rows, of_weights


def _raise(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value


def _apply(cast: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return [cast(item) for item in value]
    return cast(value)


_ALIASES = {  # functions of another name, within which the mode is off
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rdiv__",),
}


def _functions(names: Iterable[str]) -> set[Any]:
    """Return every Python function that is one of these ATen operators, under all of its names."""
    plain = {name.partition(".")[0] for name in names}
    plain |= {alias for name in plain for alias in _ALIASES.get(name, ())}
    spaces = (torch, F, torch.linalg, torch._C._nn, torch.Tensor)  # _nn is private: pinned by a test, torch 2.6 to 2.13
    plain |= {name.removeprefix("linalg_") for name in plain}
    return {getattr(space, name) for name in plain for space in spaces if hasattr(space, name)}


def _casts(lists: dict[int, tuple[str, ...]]) -> dict[Any, int]:
    """Map functions to the rule of the list that names them."""
    return {function: rule for rule, names in lists.items() for function in _functions(names)}


_CUDA_CASTS = _casts(
    {
        _LOW: autocast_lists.LOWER_PRECISION,
        _HIGH: autocast_lists.FLOAT32,
        _HIGH_UNLESS_TOLD: autocast_lists.FLOAT32_SET_OPT_DTYPE + autocast_lists.FLOAT32_APPEND_DTYPE,
        _WIDEST: autocast_lists.PROMOTE,
    }
)
_CPU_CASTS = _casts(
    {
        _LOW: autocast_lists.CPU_LOWER_PRECISION,
        _HIGH: autocast_lists.CPU_FLOAT32,
        _WIDEST: autocast_lists.CPU_PROMOTE,
    }
)
_FUSED_SOFTMAX = {_aten._softmax: _functions(("softmax",)), _aten._log_softmax: _functions(("log_softmax",))}
_GROUPED_PRODUCTS = _functions(("grouped_mm", "_grouped_mm"))  # torch._grouped_mm is private: seen in torch 2.8 to 2.13


def _opened() -> dict[Any, FunctionType]:
    """Return a copy of each Python function of ``torch.nn.functional`` that takes itself for not overridden.

    Each begins by asking ``has_torch_function`` and hands itself to the mode then. The copies find a "no" under these
    names, in globals of their own; what they call asks as ever. The names are pinned by a test, seen in torch 2.6 to
    2.13.
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


_OPENED = _opened()
