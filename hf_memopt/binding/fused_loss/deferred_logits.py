"""Logits that are remembered instead of computed: a tensor with a shape and no storage.

The head returns ``DeferredLogits``. What the model does to them (views and slices of rows, casts, scaling, a softcap,
an added bias) gives ``DeferredLogits`` again, which remember it as an ``Expression``; ``cross_entropy`` computes the
loss from the hidden states (``chunked_loss``). There is no rule for an architecture: whatever else is done to them
makes the real logits, with the very operations of the model, and notes what did.

Real for good: from then on this tensor is its real one in every later operation, and so are all tensors that come from
the same head's output. An in-place operation therefore reaches just those that it would reach in stock, through shared
memory (a slice of logits, ``.float()`` of float32 logits).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from hf_memopt.binding.fused_loss.chunked_loss import chunked_cross_entropy
from hf_memopt.binding.fused_loss.engine_hooks import is_engine_hook, register_hooks
from hf_memopt.binding.fused_loss.expression import Expression, Logits, Pointwise, Product, Sum
from hf_memopt.binding.fused_loss.loss import Loss
from hf_memopt.binding.fused_loss.record import FusionRecord
from hf_memopt.binding.handles import nothing_to_undo

__all__ = ["DeferredLogits", "defer"]

_T = torch.Tensor
_CASTS = {_T.float: torch.float32, _T.double: torch.float64, _T.half: torch.float16, _T.bfloat16: torch.bfloat16}
_POINTWISE: dict[Any, str] = {
    **dict.fromkeys((_T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.multiply, torch.multiply), "multiply"),
    **dict.fromkeys((_T.div, _T.__truediv__, torch.div, _T.true_divide, torch.true_divide), "divide"),
    **dict.fromkeys((_T.add, _T.__add__, _T.__radd__, torch.add), "add"),
    **dict.fromkeys((_T.tanh, torch.tanh), "tanh"),
}
_IDENTITIES = {_T.contiguous, _T.clone, torch.clone}
_RESHAPES = {_T.view, _T.reshape, torch.reshape}


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names}


_DESCRIPTIONS = {_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, _T.is_floating_point, _T.is_complex}
_DESCRIPTIONS |= {torch.is_floating_point, torch.is_complex, torch.numel, _T.element_size, _T.get_device}
_DESCRIPTIONS |= _getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "is_cuda", "is_cpu")
_DESCRIPTIONS |= _getters("is_sparse", "is_quantized", "itemsize", "is_mps", "is_xpu", "_base")
"""What the shell of the tensor answers, without its elements."""


def defer(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    chunk_bytes: int | None,
    record: FusionRecord,
) -> DeferredLogits:
    """Return the output of a linear layer, remembered."""
    # One row and one class tell the dtype, under autocast of any kind; an autocast cache does not keep a slice.
    row = hidden.detach()[(slice(0, 1),) * (hidden.dim() - 1)]
    dtype = F.linear(row, weight.detach()[:1], None if bias is None else bias.detach()[:1]).dtype
    product = Product(hidden, weight, bias, dtype)
    return DeferredLogits(
        (product,), Logits(0, dtype), (F.linear, (), {}), chunk_bytes=chunk_bytes, record=record, family=[]
    )


class DeferredLogits(torch.Tensor):
    """The output of a language model's head, (..., vocabulary), computed when something needs its elements.

    Args:
        products: the linear layers it comes from; all have hidden states of one shape but for the last dimension.
        expression: what was done to their outputs.
        made_by: the function and arguments that make it from other deferred logits; of the head's output itself
            ``F.linear``.
        chunk_bytes: as ``Loss``.
        record: notes what makes logits real.
        family: all deferred logits that come from the same head's output, weakly.
    """

    @staticmethod
    def __new__(
        cls, products: tuple[Product, ...], expression: Expression, *args: Any, **kwargs: Any
    ) -> DeferredLogits:
        hidden, weight = products[0].hidden, products[0].weight
        learns = any(t is not None and t.requires_grad for p in products for t in (p.hidden, p.weight, p.bias))
        shape = (*hidden.shape[:-1], weight.shape[0])
        made: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=expression.dtype, device=hidden.device, requires_grad=learns
        )
        return made

    def __init__(
        self,
        products: tuple[Product, ...],
        expression: Expression,
        made_by: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        *,
        chunk_bytes: int | None,
        record: FusionRecord,
        family: list[weakref.ref[DeferredLogits]],
    ) -> None:
        self._products, self._expression, self._made_by = products, expression, made_by
        self._chunk_bytes, self._record, self._family = chunk_bytes, record, family
        self._real: torch.Tensor | None = None
        self._hooks: list[Callable[[torch.Tensor], Any]] = []
        self._versions = [(tensor, tensor._version) for tensor in self._tensors()]
        family.append(weakref.ref(self))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})" if self._real is None else repr(self._real)
        )

    # ---- The real logits --------------------------------------------------------------------------------------------

    def _tensors(self) -> list[torch.Tensor]:
        """Return what the logits are computed from, besides other deferred logits."""
        found = [t for p in self._products for t in (p.hidden, p.weight, p.bias) if t is not None]
        _, args, _ = self._made_by
        found += [value for value in args if type(value) is torch.Tensor]
        return found

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if the logits would be those of other weights than the forward pass had."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"logits of shape {tuple(self.shape)} are read after a tensor of shape {tuple(tensor.shape)} that "
                    "they are computed from was changed, by an optimizer step for example; expected to be read before. "
                    "Read them before loss.backward(), or keep them there: logits = outputs.logits.detach().clone()"
                )

    def _make_real(self) -> torch.Tensor:
        """Return the real logits, in autograd's graph, as the model's own operations make them."""
        if self._real is None:
            self._check_unchanged()
            function, args, kwargs = self._made_by
            if function is F.linear:
                (product,) = self._products
                parts = (product.hidden, product.weight, product.bias)
                args = tuple(None if tensor is None else tensor.to(product.dtype) for tensor in parts)
            self._real = function(*(_real(value) for value in args), **kwargs)
            register_hooks(self._real, self._hooks)
        return self._real

    def _is_real(self) -> bool:
        """Return whether the real logits exist, of this tensor or of one that it comes from."""
        return self._real is not None or any(
            isinstance(value, DeferredLogits) and value._is_real() for value in self._made_by[1]
        )

    # ---- What is done to them ---------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mine = [value for value in _flat((args, kwargs)) if isinstance(value, DeferredLogits)]
        if not any(logits._is_real() for logits in mine):
            if func in _DESCRIPTIONS:
                with torch._C.DisableTorchFunction():  # private: pinned by a test, seen in torch 2.6 to 2.13
                    return func(*args, **kwargs)
            if is_engine_hook(func, args):
                mine[0]._hooks.append(args[1])
                return nothing_to_undo()
            if (found := _remembered(func, args, kwargs)) is not None:
                return found
            mine[0]._record.note(_name(func))
            for relative in [reference() for logits in mine for reference in logits._family]:
                if relative is not None:
                    relative._make_real()
        real_args, real_kwargs = _real(args), _real(kwargs)
        found = func(*real_args, **real_kwargs)
        # ``logits += 1`` and ``logits.mul_(2)`` return the tensor that they were called on
        return next((logits for logits in mine if logits._real is not None and found is logits._real), found)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise RuntimeError(
            f"{func} was called below torch's Python functions with logits that are fused with the loss; expected an "
            "operation of torch. Take a copy of the logits first: logits = logits.clone().detach()"
        )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    return [value]


def _real(value: Any) -> Any:
    """Return the value with real logits for deferred ones, also inside lists, tuples and dicts."""
    if isinstance(value, DeferredLogits):
        return value._make_real()
    if type(value) in (list, tuple):
        return type(value)(_real(item) for item in value)
    if type(value) is dict:
        return {key: _real(item) for key, item in value.items()}
    return value


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # of a property of tensors
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _remembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that is remembered or fused; None if it needs the elements."""
    if func is F.cross_entropy:
        return _fused(*args, **kwargs)
    if func in _POINTWISE:
        return None if kwargs else _pointwise(func, args)
    me = args[0] if args else None
    if not isinstance(me, DeferredLogits) or any(isinstance(value, DeferredLogits) for value in _flat(args[1:])):
        return None
    if func in _IDENTITIES:
        return _derived(me, me._expression, func, args, kwargs)
    if func in _CASTS or func is _T.to:
        dtype = _CASTS.get(func) or _dtype_of(me, args[1:], kwargs)
        return None if dtype is None else _derived(me, _cast(me, dtype), func, args, kwargs)
    if func in _RESHAPES:
        return None if kwargs else _reshaped(me, func, args)
    if func in (_T.flatten, torch.flatten) and args[1:] == (0, me.dim() - 2) and not kwargs:
        return _reshaped(me, _T.reshape, (me, -1, me.shape[-1]))
    if func is _T.__getitem__:
        return _indexed(me, func, args)
    return None


def _derived(
    me: DeferredLogits, expression: Expression, func: Any, args: Any, kwargs: Any, products: Any = None
) -> DeferredLogits:
    return DeferredLogits(
        products or me._products,
        expression,
        (func, args, kwargs),
        chunk_bytes=me._chunk_bytes,
        record=me._record,
        family=me._family,
    )


def _cast(me: DeferredLogits, dtype: torch.dtype) -> Expression:
    return me._expression if dtype == me._expression.dtype else Pointwise("cast", me._expression, dtype)


def _dtype_of(me: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the floating dtype that ``Tensor.to`` casts to; None if it does something else."""
    dtype = me._expression.dtype
    for value in (*args, kwargs.get("dtype"), kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.Tensor):
            if value.device != me.device:
                return None
            dtype = value.dtype
        elif isinstance(value, (str, torch.device)):
            device = torch.device(value)
            if device.type != me.device.type or device.index not in (None, me.device.index):
                return None
        elif isinstance(value, int) and not isinstance(value, bool) and value != me.device.index:
            return None
    return dtype if dtype.is_floating_point else None


def _pointwise(func: Any, args: tuple[Any, ...]) -> DeferredLogits | None:
    kind = _POINTWISE[func]
    if kind == "tanh":
        me = args[0]
        expression: Expression = Pointwise("tanh", me._expression, me._expression.dtype)
        return _derived(me, expression, func, args, {})
    one, other = args if len(args) == 2 else (None, None)
    if isinstance(one, DeferredLogits) and isinstance(other, DeferredLogits):
        return _summed(one, other, func, args) if kind == "add" else None
    me, operand = (one, other) if isinstance(one, DeferredLogits) else (other, one)
    if not isinstance(me, DeferredLogits) or (me is other and kind == "divide") or not _is_constant(operand, me):
        return None
    like = torch.empty((1,) * me.dim(), dtype=me._expression.dtype, device=me.device)
    dtype = torch.result_type(like, operand)  # type: ignore[arg-type]
    if not dtype.is_floating_point:
        return None
    return _derived(me, Pointwise(kind, me._expression, dtype, operand), func, args, {})


def _is_constant(operand: Any, me: DeferredLogits) -> bool:
    """Return whether an operand is the same for every row and needs no gradient."""
    if isinstance(operand, torch.Tensor):
        if operand.requires_grad or operand.dim() > me.dim() or (operand.dim() and operand.device != me.device):
            return False
        rows, last = operand.shape[:-1], operand.shape[-1:]
        return all(size == 1 for size in rows) and last in ((), (1,), (me.shape[-1],))
    return isinstance(operand, (int, float)) and not isinstance(operand, bool)


def _summed(one: DeferredLogits, other: DeferredLogits, func: Any, args: Any) -> DeferredLogits | None:
    """Return the sum of two products: a layer and the adapter on it."""
    shapes = {tuple(product.hidden.shape[:-1]) for product in (*one._products, *other._products)}
    weights = [id(product.weight) for product in (*one._products, *other._products)]
    if one.shape != other.shape or len(shapes) > 1 or len(set(weights)) < len(weights):
        return None
    shift = len(one._products)
    dtype = torch.promote_types(one._expression.dtype, other._expression.dtype)
    expression = Sum(one._expression, _shifted(other._expression, shift), dtype)
    if one._family is not other._family:
        one._family.extend(other._family)
        for reference in list(other._family):
            if (relative := reference()) is not None:
                relative._family = one._family
    return _derived(one, expression, func, args, {}, one._products + other._products)


def _shifted(expression: Expression, shift: int) -> Expression:
    if isinstance(expression, Logits):
        return Logits(expression.index + shift, expression.dtype)
    if isinstance(expression, Sum):
        return Sum(_shifted(expression.one, shift), _shifted(expression.other, shift), expression.dtype)
    return Pointwise(expression.kind, _shifted(expression.source, shift), expression.dtype, expression.operand)


def _with_hidden(me: DeferredLogits, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Product, ...]:
    return tuple(product._replace(hidden=change(product.hidden)) for product in me._products)


def _reshaped(me: DeferredLogits, func: Any, args: tuple[Any, ...]) -> DeferredLogits | None:
    given = args[1:]
    shape = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    whole = all(isinstance(size, int) for size in shape) and len(shape) > 1
    if not whole or shape[-1] not in (me.shape[-1], -1) or 0 in me.shape:
        return None
    if shape[-1] == -1:
        rows = 1
        for size in shape[:-1]:
            rows *= size
        if rows * me.shape[-1] != me.numel():
            return None
    products = _with_hidden(me, lambda hidden: hidden.reshape(*shape[:-1], hidden.shape[-1]))
    return _derived(me, me._expression, func, args, {}, products)


def _indexed(me: DeferredLogits, func: Any, args: tuple[Any, ...]) -> DeferredLogits | None:
    """Return rows of the logits, if the index leaves the vocabulary whole."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(isinstance(i, (int, slice, type(...), torch.Tensor)) and not isinstance(i, bool) for i in index):
        return None
    if any(isinstance(i, torch.Tensor) and (i.dtype == torch.uint8 or i.is_floating_point()) for i in index):
        return None
    masks = [i for i in index if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
    chosen = [i for i in index if i is not ...]
    taken = len(chosen) - len(masks) + sum(mask.dim() for mask in masks)
    to_the_end = len(chosen) < len(index) and index[-1] is not ...
    if (taken >= me.dim() or to_the_end) and not (isinstance(chosen[-1], slice) and chosen[-1] == slice(None)):
        return None
    return _derived(me, me._expression, func, args, {}, _with_hidden(me, lambda hidden: hidden[args[1]]))


def _hooks_of(logits: DeferredLogits) -> list[Callable[[torch.Tensor], Any]]:
    """Return the hooks of these logits and of those that they come from."""
    sources = [value for value in logits._made_by[1] if isinstance(value, DeferredLogits)]
    return [*(hook for source in sources for hook in _hooks_of(source)), *logits._hooks]


def _fused(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Return the cross entropy of deferred logits; None where it has to be that of real ones."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not plain or not isinstance(input, DeferredLogits) or type(target) is not torch.Tensor or input.dim() != 2:
        return None
    if target.shape != input.shape[:1] or target.dtype != torch.long or target.device != input.device:
        return None
    if not 0 <= label_smoothing <= 1:
        return None
    input._check_unchanged()
    dtypes = tuple(product.dtype for product in input._products)
    loss = Loss(input._expression, dtypes, input._chunk_bytes, ignore_index, reduction == "mean", label_smoothing)
    total = chunked_cross_entropy(input._products, target, loss)
    register_hooks(total, _hooks_of(input))
    input._record.note_fused()
    # One row tells the dtype of stock's loss, which autocast may widen.
    row = torch.zeros((1, 2), dtype=input._expression.dtype, device=target.device)
    return total.to(F.cross_entropy(row, torch.zeros(1, dtype=torch.long, device=target.device)).dtype)
