"""What CUDA does differently above the dispatcher: dropout masks, attention kernels, autocast, copies to the host.

``CudaSemantics`` replaces only what allocates other bytes there than on the meta device; everything else runs as it
is. Left out: what a kernel allocates inside itself (``kernels``); model code that switches autocast off for a few
operations (rotary angles): autocast does not exist on the meta device, so they are cast all the same; and functions
that torch itself writes in Python (``F.multi_head_attention_forward``, ``F.normalize``): inside them a function mode is
off, so under autocast they stay in float32, which estimates too much.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_memopt.memory import autocast_lists
from hf_memopt.memory.attention import attention_kernel
from hf_memopt.memory.trace import StorageTracker

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
            self._handlers |= dict.fromkeys(_CROSS_ENTROPY, self._cross_entropy)
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
        return self._cast_and_call(func, args, kwargs)

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

    def _cross_entropy(self, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run the cross entropy of 16-bit logits as autocast does: log-softmax in 16 bits, its float32 copy, the loss.

        The operator itself is on no list. Its log-softmax gets the logits' dtype told, which autocast respects; only
        ``nll_loss`` is cast.
        """
        plain = not args and kwargs.get("label_smoothing", 0.0) == 0.0 and not target.is_floating_point()
        if not (plain and input.dtype in _HALVES and self._autocasting()):
            return F.cross_entropy(input, target, weight, *args, **kwargs)
        log_probabilities = F.log_softmax(input, 1 if input.dim() > 1 else 0, dtype=input.dtype).float()
        options = {name: value for name, value in kwargs.items() if name in ("ignore_index", "reduction")}
        return F.nll_loss(log_probabilities, target, weight, **options)

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
            query, key, value = self._lower(query), self._lower(key), self._lower(value)
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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    capability: tuple[int, int],
) -> Any:
    """Run ``F.scaled_dot_product_attention`` by the kernel that CUDA takes; shapes (batch, heads, seq, head)."""
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    kernel = attention_kernel(
        dtype=query.dtype,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        capability=capability,
        query_len=query.shape[-2],
        key_len=key.shape[-2],
        has_mask=attn_mask is not None,
        is_causal=is_causal,
        dropout_p=dropout_p,
        gqa=enable_gqa and key.shape[-3] != query.shape[-3],
        requires_grad=needs_gradient,
    )
    if kernel == "flash":
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width]
    if kernel == "math":
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    bias = None if attn_mask is None else _bias(attn_mask, query, key, padded=kernel == "efficient")
    if kernel == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, needs_gradient, dropout_p, is_causal, False, scale=scale
        )[0]
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _math_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *rest: Any
) -> Any:
    """Run the kernel without fusion; in 16 bits it computes in float32."""
    dropout_p, is_causal, scale, enable_gqa = rest
    wide = (tensor.float() if tensor.dtype in _HALVES else tensor for tensor in (query, key, value))
    out = _aten._scaled_dot_product_attention_math(
        *wide, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out.to(query.dtype)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """Return a mask as the additive bias of a kernel, (batch, heads, query, key).

    A bool mask becomes a new tensor in every call; the memory-efficient kernel wants rows at multiples of 8 elements.
    """
    if mask.dtype == torch.bool:
        zero, least = (torch.full((), v, dtype=query.dtype, device=mask.device) for v in (0.0, float("-inf")))
        mask = torch.where(mask, zero, least)
    width = mask.shape[-1]
    if padded and width % 8:
        mask = F.pad(mask, (0, -width % 8))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


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
    "grid_sampler": ("grid_sample",),
    "upsample_nearest2d": ("interpolate",),
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
        _HIGH: autocast_lists.FLOAT32 + autocast_lists.FLOAT32_APPEND_DTYPE,
        _HIGH_UNLESS_TOLD: autocast_lists.FLOAT32_SET_OPT_DTYPE,
        _WIDEST: autocast_lists.PROMOTE,
    }
)
_CPU_CASTS = _casts(
    {
        _LOW: autocast_lists.CPU_LOWER_PRECISION,
        _HIGH: (*autocast_lists.CPU_FLOAT32, "cross_entropy"),
        _WIDEST: autocast_lists.CPU_PROMOTE,
    }
)
_FUSED_SOFTMAX = {_aten._softmax: _functions(("softmax",)), _aten._log_softmax: _functions(("log_softmax",))}
_CROSS_ENTROPY = _functions(("cross_entropy", "cross_entropy_loss"))
