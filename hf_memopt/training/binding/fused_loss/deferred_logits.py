"""Logits that are remembered instead of computed: tensors with a shape and no storage, in autograd's graph.

The head returns ``DeferredLogits``, the output of a ``Function`` of (hidden, weight, bias) whose backward pass is the
linear layer's. What the model does to them (views and slices of rows, casts, scaling, a softcap, an added constant)
gives ``DeferredLogits`` again, each a node of the graph; ``cross_entropy`` computes the loss from the hidden states
(``chunked_loss``), and its gradient with respect to the logits is remembered as well (``LogitsGradient``): it passes
through the graph to the head's node, which makes of it the gradients of the linear layer, chunk by chunk.

There is no rule for an architecture: whatever needs the elements gets the real logits, made with the model's own
operations, and is noted. Python functions of torch make them for good: from then on this tensor is its real one in
every later operation, and so are all that come from the same head's output, so that an in-place operation reaches just
those that it would reach in stock. What runs below torch's Python functions (a custom ``Function``, TorchScript,
``torch.func``) reads the elements only. A gradient of either kind comes back to the node that it belongs to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only  # private: pinned by a test, seen in torch 2.6 to 2.13

from hf_memopt.training.binding.fused_loss.chunked_loss import (
    Loss,
    gradient_of_logits,
    gradients_by_slices,
    loss_by_rows,
    loss_without_gradients,
    without_autocast,
)
from hf_memopt.training.binding.fused_loss.steps import Step, step_of
from hf_memopt.training.binding.undo import UndoHandle, remove_all

if TYPE_CHECKING:
    from hf_memopt.training.binding.fused_loss.fuse import FusionRecord

_alone = ContextVar("_alone", default=False)


@contextmanager
def loss_alone() -> Iterator[None]:
    """Let fused heads make no logits without gradients either: nothing but the loss is wanted of what runs inside."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_loss_alone() -> bool:
    """Return whether this is inside ``loss_alone``, and no gradients are made."""
    return _alone.get() and not torch.is_grad_enabled()


_T: Any = torch.Tensor  # whose properties a type checker takes for their values


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names}


_DESCRIPTIONS = {_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, _T.is_floating_point, _T.is_complex}
_DESCRIPTIONS |= {torch.is_floating_point, torch.is_complex, torch.numel, _T.element_size, _T.get_device}
_DESCRIPTIONS |= _getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "is_cuda", "is_cpu")
_DESCRIPTIONS |= _getters("is_sparse", "is_quantized", "itemsize", "is_mps", "is_xpu", "_base", "grad_fn", "is_leaf")
"""What the shell of the tensor answers, without its elements."""
_ENGINE = "torch.distributed.fsdp"
"""The package whose hooks look at no gradient: FSDP2 (torch 2.6 to 2.13; pinned by a test)."""


class _Remembered(torch.Tensor):
    """A tensor with a shape and no storage, whose elements are made when something needs them."""

    @staticmethod
    def __new__(cls, like: tuple[Any, ...], *args: Any) -> Any:
        shape, dtype, device = like
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def elements(self) -> torch.Tensor:
        """Return a tensor outside of the graph."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(_Remembered, _elements, (args, kwargs or {}))
        return func(*args, **kwargs)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.elements() if isinstance(tensor, _Remembered) else tensor


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _below(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch with the tensors as they are."""
    with torch._C.DisableTorchFunction():  # private: pinned by a test, seen in torch 2.6 to 2.13
        return func(*args, **kwargs)


class _Call:
    """One call of the head: what it computes, and all deferred logits that come from its output, weakly."""

    def __init__(
        self, tensors: tuple[Any, ...], dtype: torch.dtype, chunk_bytes: int | None, record: FusionRecord
    ) -> None:
        self.tensors, self.dtype, self.chunk_bytes, self.record = tensors, dtype, chunk_bytes, record
        self.family: list[weakref.ref[DeferredLogits]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.watch(tensors)

    def watch(self, values: Any) -> None:
        """Remember tensors that the logits are computed from."""
        plain = [one for one in tree_leaves(values) if type(one) in (torch.Tensor, torch.nn.Parameter)]
        self._versions += [(one, one._version) for one in plain]

    def check_unchanged(self, shape: torch.Size) -> None:
        """Raise RuntimeError if the logits would be those of other weights than the forward pass had."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"logits of shape {tuple(shape)} are read after a tensor of shape {tuple(tensor.shape)} that they "
                    "are computed from was changed, by an optimizer step for example; expected to be read before. Read "
                    "them before loss.backward(), or keep them there: logits = outputs.logits.detach().clone()"
                )

    def relatives(self) -> list[DeferredLogits]:
        """Return the deferred logits that still exist."""
        return [one for reference in self.family if (one := reference()) is not None]


class DeferredLogits(_Remembered):
    """The output of a language model's head, (..., vocabulary), computed when something needs its elements."""

    def __init__(
        self,
        like: tuple[Any, ...],  # shape, dtype and device
        call: _Call,
        node: Any,  # of the head's output in the graph
        parent: DeferredLogits | None = None,  # what the last step was done to; None of the head's output itself
        steps: tuple[Step, ...] = (),
        rows: torch.Tensor | None = None,  # the numbers of these rows among the head's; None: all, in their order
    ) -> None:
        self._call, self._node, self._parent, self._steps, self._rows = call, node, parent, steps, rows
        self._read: torch.Tensor | None = None
        self._real: torch.Tensor | None = None
        self._is_source = parent is None  # the real logits come after this tensor in the graph
        self._of_real: tuple[Any, int] = None, 0  # node of this tensor and version of the real one when they were tied
        # weakly, with what they come from: a graph does not keep logits that were read
        self.lineage: list[Any] = [weakref.ref(self), *([] if parent is None else parent.lineage)]
        call.family.append(self.lineage[0])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"
        return name if self._real is None else repr(self._real)

    def elements(self) -> torch.Tensor:
        if self._real is not None:
            return self._real.detach()
        with torch.no_grad():
            if self._read is None and self._parent is None:
                self._call.check_unchanged(self.shape)
                self._read = _linear(self._call.tensors, self._call.dtype)
            elif self._read is None:
                self._read = self._steps[-1].function(self._parent.elements())  # type: ignore[union-attr]
            return self._read.detach()

    def as_real(self) -> torch.Tensor:
        """Return the real logits, in the graph, as the model's own operations make them."""
        node = _below(_T.grad_fn.__get__, self)
        if self._real is not None and node is not self._of_real[0]:  # a Function changed this tensor in place
            self._read, self._real, self._is_source = self._real.detach().clone(), None, True
        if self._real is None:
            self._call.check_unchanged(self.shape)
            with torch.inference_mode(False), torch.enable_grad():
                if self._is_source:
                    self._real = _Real.apply(self)  # type: ignore[no-untyped-call]
                else:
                    self._real = self._steps[-1].function(self._parent.as_real())  # type: ignore[union-attr]
            self._of_real = node, self._real._version
        return self._real

    def make_real(self, operation: str) -> None:
        """Make these logits real for good, and all that come from the same head's output."""
        self._call.record.real[operation] += 1
        for relative in self._call.relatives():
            relative.as_real()

    def follow(self) -> None:
        """Come after the real logits in the graph, where they were changed in place."""
        if self._real is not None and self._real._version != self._of_real[1]:
            with torch.enable_grad():
                _below(_Changed.apply, self, self._real)
            self._of_real = _below(_T.grad_fn.__get__, self), self._real._version

    def places(self) -> list[torch.Tensor]:
        """Return the tensors of the graph whose gradients add up to that of these logits."""
        if self._real is None or (self._is_source and not self._real._version):
            return [self]
        return [self._real] if self._real._version else [self, self._real]

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator] # which else compiles what is below, in a compiled loss
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_GRADIENTS:
            return _OF_GRADIENTS[func](*args, **kwargs)
        mine = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits)]
        if all(logits._real is None for logits in mine):
            if func in _DESCRIPTIONS:
                return _below(func, *args, **kwargs)
            if (found := _remembered(func, args, kwargs)) is not None:
                return found
            mine[0].make_real(_name(func))
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.as_real, (args, kwargs))
        found = func(*args, **kwargs)
        for logits in mine:
            for relative in logits._call.relatives():
                relative.follow()
        return next((logits for logits in mine if logits._real is found), found)  # of an operation in place

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{name} was called below torch's Python functions to change logits that are fused with the loss; "
                "expected an operation that makes new ones. Make them real first: logits = logits.view_as(logits)"
            )
        logits = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits))
        if logits._read is logits._real is None:
            logits._call.record.real[name] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class _LogitsGradient(_Remembered):
    """The gradient of deferred logits that comes from fused losses alone."""

    def __init__(self, like: tuple[Any, ...], terms: list[Any], make: Callable[[], torch.Tensor]) -> None:
        # each term makes the gradients of a linear layer's tensors, given these; make(): the elements
        self.like, self.terms, self._make = like, terms, make
        self.made: torch.Tensor | None = None  # perhaps changed in place since

    # as torch's documentation of subclasses has it (2.6 to 2.13)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def elements(self) -> torch.Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self._make()
        return self.made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.add.Tensor and not kwargs and all(_is_unmade(one) for one in args):
            one, other = args
            return _LogitsGradient(one.like, one.terms + other.terms, lambda: one.elements() + other.elements())
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_unmade(gradient: Any) -> bool:
    return isinstance(gradient, _LogitsGradient) and gradient.made is None


# ---- The graph ------------------------------------------------------------------------------------------------------


def defer(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    chunk_bytes: int | None,
    record: FusionRecord,
) -> DeferredLogits:
    """Return the output of a linear layer, remembered; ``chunk_bytes`` as in ``Loss``."""
    # One row and one class tell the dtype, under autocast of any kind; an autocast cache does not keep a slice.
    row = hidden.detach()[(slice(0, 1),) * (hidden.dim() - 1)]
    dtype = F.linear(row, weight.detach()[:1], None if bias is None else bias.detach()[:1]).dtype
    call = _Call((hidden, weight, bias), dtype, chunk_bytes, record)
    found: DeferredLogits = _Linear.apply(hidden, weight, bias, call)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    """The linear layer: its output is deferred."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, call: _Call) -> DeferredLogits:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.dtype, ctx.unpacked, ctx.record = call.dtype, None, call.record
        return DeferredLogits(((*hidden.shape[:-1], len(weight)), call.dtype, hidden.device), call, ctx)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor | None, ...]:
        (hidden, weight, bias), ctx.unpacked = _unpacked(ctx), None
        rows = hidden.reshape(-1, hidden.shape[-1])  # (rows, hidden)
        if _is_unmade(gradient):
            terms = [term((rows.detach(), weight.detach(), bias)) for term in gradient.terms]
            found = [_sum(list(of_one)) for of_one in zip(*terms, strict=True)]
        else:
            of_rows, needed = _elements(gradient).reshape(-1, len(weight)), ctx.needs_input_grad
            with without_autocast(hidden.device.type):
                found = [
                    (of_rows @ weight.to(ctx.dtype)).to(hidden.dtype) if needed[0] else None,
                    (of_rows.t() @ rows.to(ctx.dtype)).to(weight.dtype) if needed[1] else None,
                    of_rows.sum(0).to(bias.dtype) if needed[2] else None,
                ]
        return (None if found[0] is None else found[0].view(hidden.shape), *found[1:], None)


class _Derived(torch.autograd.Function):
    """A step from deferred logits to others."""

    @staticmethod
    def forward(ctx: Any, parent: DeferredLogits, shape: torch.Size, step: Step) -> DeferredLogits:
        steps, rows = (*parent._steps, step), parent._rows
        if step.kind == "rows" and step.operand is not None:
            rows = step.operand if rows is None else rows[step.operand]
        ctx.node, ctx.steps, ctx.like = parent._node, steps, _like(parent)
        found = DeferredLogits((shape, step.dtype, parent.device), parent._call, parent._node, parent, steps, rows)
        ctx.lineage = found.lineage
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        def of_parent() -> Any:
            (shape, dtype, _), step, given = ctx.like, ctx.steps[-1], _elements(gradient)
            if step.kind != "rows":
                return step.backward(given, _logits_of(ctx) if step.kind == "tanh" else None).to(dtype)
            if step.operand is None:
                return given.reshape(shape)
            rows = given.new_zeros((shape[:-1].numel(), shape[-1]))
            return rows.index_add_(0, step.operand, given.reshape(-1, shape[-1])).view(shape)

        if _is_unmade(gradient):
            return _LogitsGradient(ctx.like, gradient.terms, of_parent), None, None
        return of_parent(), None, None


class _Real(torch.autograd.Function):
    """The real logits of the head's output."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Any:
        logits.elements()
        found, logits._read = logits._read, None
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Changed(torch.autograd.Function):
    """Deferred logits whose real ones were changed in place: their gradient is that of the changed ones."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, real: torch.Tensor) -> DeferredLogits:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


class _CrossEntropy(torch.autograd.Function):
    """The loss of deferred logits (rows, vocabulary) and labels (rows,)."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, target: torch.Tensor, loss: Loss) -> torch.Tensor:
        hidden, weight, bias = logits._call.tensors
        ctx.needed = [tensor is not None and tensor.requires_grad for tensor in logits._call.tensors]
        ctx.waits, ctx.loss, ctx.lineage = loss.waits(ctx.needed), loss, logits.lineage
        needed = (False,) * 3 if ctx.waits else ctx.needed
        tensors = (hidden.detach().reshape(-1, hidden.shape[-1]), weight.detach(), bias)
        total, labelled, ctx.found = loss_by_rows(loss, target, logits._rows, tensors, needed)
        ctx.node, ctx.steps, ctx.like, ctx.count = logits._node, logits._steps, _like(logits), max(1, len(labelled[0]))
        ctx.is_empty = len(labelled[0]) == 0
        ctx.save_for_backward(target, *(labelled if ctx.waits else ()))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return _gradient_in_graph(ctx, gradient), None, None
        loss, found = ctx.loss, ctx.found
        if found is None:
            raise RuntimeError(
                "loss.backward() was called a second time and the gradients of the first were given away; expected one "
                "backward pass, or retain_graph=True in all but the last. Call loss.backward(retain_graph=True) first"
            )
        target, *labelled = ctx.saved_tensors
        if ctx.is_empty:  # no row has a label: 0, as in stock, also where what it is divided by is 0
            gradient = torch.zeros_like(gradient)
        scale = gradient / ctx.count if loss.mean else gradient
        if ctx.waits:
            term = partial(gradients_by_slices, loss, labelled, scale, needed=ctx.needed)
        else:
            of_mean = gradient if loss.mean else gradient * ctx.count
            if _keeps_graph():
                found = [None if one is None else one * of_mean for one in found]
            else:  # there is no second gradient of the vocabulary's size
                ctx.found = None
                found = [None if one is None else one.mul_(of_mean) for one in found]
            term = partial(_taken, found)
        make = partial(gradient_of_logits, loss, target, scale, partial(_logits_of, ctx))
        return _LogitsGradient(ctx.like, [term], make), None, None


def _gradient_in_graph(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the logits of a fused loss, computed from real ones, for a second derivative."""
    ctx.node.record.real["a second derivative (create_graph=True)"] += 1
    loss, logits, reduction = ctx.loss, _logits_of(ctx), "mean" if ctx.loss.mean else "sum"
    settings = {"ignore_index": loss.ignore_index, "label_smoothing": loss.smoothing, "reduction": reduction}
    total = F.cross_entropy(logits.to(loss.dtype), ctx.saved_tensors[0], **settings)
    return torch.autograd.grad(total, logits, gradient, create_graph=True)[0]


def _taken(found: list[Any], tensors: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Return gradients that were made before, in the dtypes of their tensors, and keep none."""
    given = [None if one is None else one.to(tensor.dtype) for one, tensor in zip(found, tensors, strict=True)]
    found.clear()
    return given


def _sum(gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    found = [gradient for gradient in gradients if gradient is not None]
    return sum(found[1:], found[0]) if found else None


def _unpacked(node: Any) -> tuple[Any, ...]:
    """Return the tensors that a head's node saved; checkpointing lets them be unpacked once."""
    if node.unpacked is None:
        node.unpacked = node.saved_tensors
    return node.unpacked  # type: ignore[no-any-return]


def _logits_of(ctx: Any) -> torch.Tensor:
    """Return the deferred logits of a node, once more; for a second derivative in the graph, from those that exist."""
    for later, reference in enumerate(ctx.lineage if torch.is_grad_enabled() else ()):
        found = reference()
        if found is not None and (found._real is None or not found._real._version):  # not changed in place since
            logits, steps = found.as_real(), ctx.steps[len(ctx.steps) - later :]
            break
    else:
        logits, steps = _linear(_unpacked(ctx.node), ctx.node.dtype), ctx.steps
    for step in steps:
        logits = step.function(logits)
    return logits  # type: ignore[no-any-return]


def _linear(tensors: Any, dtype: torch.dtype) -> torch.Tensor:
    hidden, weight, *bias = (tensor.to(dtype) for tensor in tensors if tensor is not None)
    with without_autocast(hidden.device.type):
        return F.linear(hidden, weight, *bias)


def _keeps_graph() -> bool:
    """Return whether the backward pass that runs was asked to retain its graph.

    ``_get_current_graph_task_keep_graph`` is private, pinned by a test, seen in torch 2.6 to 2.13; torch's own compiled
    functions ask it for the same reason.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


# ---- Gradients that are asked for -----------------------------------------------------------------------------------


def _noted_places(logits: DeferredLogits, operation: str) -> list[torch.Tensor]:
    """Return where the gradient of logits arrives, and note that it is made."""
    if logits._parent is None:
        logits._call.record.real[operation] += 1
    elif logits._real is None:  # whose operations from now on are not these logits'
        logits.make_real(operation)
    return logits.places()


def _register_hook(logits: DeferredLogits, hook: Any) -> UndoHandle:
    """Register a hook, which gets the elements of the gradient; one that looks at none waits at the head's node."""
    if str(getattr(hook, "__module__", "")).startswith(_ENGINE):
        while logits._parent is not None:
            logits = logits._parent
        return _below(_T.register_hook, logits, hook)  # type: ignore[no-any-return]
    places = _noted_places(logits, "register_hook")
    handles = [_below(_T.register_hook, place, lambda gradient: hook(_elements(gradient))) for place in places]
    return UndoHandle(lambda: remove_all(handles))


def _retain_grad(logits: DeferredLogits) -> None:
    for place in _noted_places(logits, "retain_grad"):
        _below(_T.retain_grad, place)


def _retained(logits: DeferredLogits) -> torch.Tensor | None:
    places = [place for place in logits.places() if _below(_T.retains_grad.__get__, place)]
    return _sum([_below(_T.grad.__get__, place) for place in places])


def _grad(outputs: Any, inputs: Any, *args: Any, allow_unused: bool | None = None, **kwargs: Any) -> Any:
    """Do ``torch.autograd.grad``, which may ask for the gradients of deferred logits."""
    listed = [inputs] if isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge)) else list(inputs)
    places = [_noted_places(one, "grad") if isinstance(one, DeferredLogits) else [one] for one in listed]
    flat = [place for each in places for place in each]
    # made while the graph still has what they are made of
    handles = [_below(_T.register_hook, one, _elements) for one in flat if isinstance(one, DeferredLogits)]
    outputs = tree_map_only(DeferredLogits, lambda one: one.places()[-1], outputs)
    kwargs["allow_unused"] = True if len(flat) > len(listed) else allow_unused
    try:
        found = iter(_below(torch.autograd.grad, outputs, flat, *args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(_sum([next(found) for _ in each]) for each in places)


_OF_GRADIENTS: dict[Any, Callable[..., Any]] = {
    _T.register_hook: _register_hook,
    _T.retain_grad: _retain_grad,
    _T.grad.__get__: _retained,
    torch.autograd.grad: _grad,
}


# ---- What is remembered ---------------------------------------------------------------------------------------------


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # of a property of tensors
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _remembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that is remembered or fused; None if it needs the elements.

    Without gradients that is a copy, which DDP's own ``Function`` makes of each output (torch 2.6 to 2.13), and all of
    it where the loss alone is wanted.
    """
    if not (torch.is_grad_enabled() or is_loss_alone() or func in (_T.clone, torch.clone)):
        return None
    if func is F.cross_entropy:
        return _fused(*args, **kwargs)
    place = next((place for place, one in enumerate(args) if isinstance(one, DeferredLogits)), None)
    if place is None:
        return None
    before, me, after = args[:place], args[place], args[place + 1 :]
    others = tree_leaves((before, after, kwargs))
    if any(isinstance(one, DeferredLogits) for one in others):
        return None
    with torch._C.DisableTorchFunction():
        found = step_of(func, before, me, after, kwargs)
    if found is None:
        return None
    me._call.watch(others)
    made: DeferredLogits = _Derived.apply(me, *found)  # type: ignore[no-untyped-call]
    made._is_source = not torch.is_grad_enabled()
    return made


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
    if not 0 <= label_smoothing <= 1 or (label_smoothing and not torch.is_grad_enabled()):
        return None
    call = input._call
    call.check_unchanged(input.shape)
    steps = tuple(step for step in input._steps if step.kind != "rows")
    loss = Loss(steps, call.dtype, call.chunk_bytes, ignore_index, reduction == "mean", label_smoothing)
    if not torch.is_grad_enabled():
        hidden, *layer = call.tensors
        return loss_without_gradients(loss, target, input._rows, (hidden.flatten(0, -2), *layer), input.dtype)
    total: torch.Tensor = _CrossEntropy.apply(input, target, loss)  # type: ignore[no-untyped-call]
    call.record.fused += 1
    # One row tells the dtype of stock's loss, which autocast may widen.
    row = torch.zeros((1, 2), dtype=input.dtype, device=target.device)
    return total.to(F.cross_entropy(row, torch.zeros(1, dtype=torch.long, device=target.device)).dtype)
