"""Record which storages some code allocates and frees, in order, without an accelerator.

``StorageTracker`` sees every operation below autograd, and a weak reference to each storage sees when it is freed. So
nothing has to be known about the code that runs: what autograd saves, what checkpointing drops and recomputes and what
a technique frees early all appear in one list. On the meta device it is the list of a real run without its arithmetic.

Limitations: memory that a CUDA kernel allocates inside itself (the ``hidden`` argument gives it by operation), and what
differs above autograd on CUDA (``CudaSemantics``).
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memopt.prediction.memory.settings import NotEstimableError
from hf_memopt.prediction.memory.step_time import Operation, operation_of
from hf_memopt.prediction.memory.tracking.known_values import CHOICES, READS, KnownValues, on_host, shapes_of
from hf_memopt.prediction.memory.tracking.meta_outputs import run_on_meta

_aten = torch.ops.aten
_NO_SEQUENCE = 2**64 - 1  # torch's number of nodes that accumulate a gradient
_next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
Hidden = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[int, ...]]


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """Every allocation and free of a storage while the mode is on, in order.

    Args:
        device_type: count storages of this device only, an attribute too; None for all.
        padding: the answer when transformers' code for masks reads from a meta tensor whether a mask is all ones: with
            padding it is not. An attribute too.
        hidden: bytes that an operation's kernel allocates and frees inside itself, by ``(func, args, kwargs, out)``.
        flops: whether to sum floating-point operations.
        balanced: whether a choice among experts (``topk``, ``argmax``) is known, each expert as often as the others.
    """

    def __init__(
        self,
        *,
        device_type: str | None = "meta",
        padding: bool = True,
        hidden: Hidden | None = None,
        flops: bool = True,
        balanced: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []  # storage number, +bytes for an allocation or -bytes for a free
        # by storage number: its bytes, the event of its allocation, autograd's sequence number then (of the operation
        # in a forward pass, of the node whose backward runs in a backward pass; -1 where it belongs to none), and the
        # index in ``modules`` of where it was allocated in a forward pass (-1 in a backward pass)
        self.sizes: list[int] = []
        self.allocated_at: list[int] = []
        self.sequences: list[int] = []
        self.places: list[int] = []
        self.recomputed: list[tuple[int, int]] = []  # first and last event of what is recomputed in a backward pass
        self.after_recomputation: list[Callable[[], None]] = []  # called at the end of each such stretch
        self.modules: list[str] = [""]  # names of the watched ones
        self.flops = 0  # so far
        self.functions: set[Any] = set()  # the ATen operators that ran
        self.operations: list[Counter[Operation]] = []  # of each pass inside ``counting``
        self.ignored: set[int] = set()
        self._left_out: set[int] = set()
        self.values = KnownValues()
        self._live: dict[int, tuple[int, Any]] = {}
        self.device_type = device_type
        self.padding, self.padding_decides = padding, False  # whether code for masks has asked
        self._hidden = hidden
        self._count_flops = flops
        self._balanced = balanced
        self._backward = False
        self._recomputing = -1
        self._is_counting = False
        self._stack = [0]
        self._entered: tuple[list[int], list[int]] = ([-1], [0])
        self.first_products = [-1, -1]  # the event after the result of the first in a forward, in a backward pass
        self._in_place = _NOTHING  # of the operation before: its operand, the event after it, its result's storage
        self._answers: Callable[[str, torch.dtype], bool | int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler to switch it off around each operation; seen in torch 2.6 to 2.13."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a function mode is on in a backward pass, and would see each shape that is read here
        with torch._C.DisableTorchFunction():  # private: pinned by a test, seen in torch 2.6 to 2.13
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._in_place = _NOTHING
        known = self.values.arguments(func, args, kwargs)
        if func in READS and args[0].is_meta:
            return self._answer(func, args[0].dtype, known)
        if known is not None and kwargs.get("device") == _CPU:
            return on_host(func, known)
        if self._backward and (self._recomputing >= 0) != torch.is_grad_enabled() and func is not _aten.detach.default:
            self._toggle_recomputation()  # gradients are off in a backward pass, except in what is recomputed there
        self.functions.add(func)
        if known is None:
            self.values.forget_written(func, args)
            args = self.values.with_positions(func, args)
        if known is not None and torch.Tag.dynamic_output_shape in func.tags:
            out, flops, beside = shapes_of(known, func), 0, None
        else:
            out, flops, beside = run_on_meta(func, args, kwargs, self._count_flops)
        if known is not None:
            self.values.keep(func, known, out)
        elif self._balanced and func in CHOICES:
            self.values.balance(func, args, out)
        results = out if isinstance(out, (tuple, list)) else (out,)
        hides_first = self._backward and func is _aten.index_put.default  # mostly in place: its result is there before
        if not hides_first:
            self._add_results(func, args, results)
        self.flops += flops
        if beside is None or self.ignored:
            beside = {}
        if self._is_counting:
            in_cpp = self._backward and self._recomputing < 0
            if in_cpp not in beside:
                beside[in_cpp] = operation_of(
                    func, args, kwargs, out, flops=flops, in_backward=in_cpp, on_host=self.ignored
                )
            self.operations[-1][beside[in_cpp]] += 1
        if self._hidden is not None:
            if self._hidden not in beside:
                beside[self._hidden] = self._hidden(func, args, kwargs, out)
            self.add_hidden(beside[self._hidden])
        if hides_first:
            self._add_results(func, args, results)
        return out

    def _add_results(self, func: Any, args: tuple[Any, ...], results: Sequence[Any]) -> None:
        """Note what an operation allocates, in the order of CUDA."""
        copy = -1
        for position in _ORDERS.get(func, range(len(results))):
            if position == _COPY:
                copy = -1 if args[0].is_contiguous() else self._allocate(args[0].nbytes)
            elif isinstance(results[position], torch.Tensor):
                self.add(results[position])
        if copy >= 0:
            self.events.append((copy, -self.sizes[copy]))
        if func.overloadpacket in _PRODUCTS and self.first_products[self._backward] < 0:
            self.first_products[self._backward] = len(self.events)
        if self._backward and func.overloadpacket in _IN_PLACE and sys._getframe(3).f_code is _ENGINE:
            self._note_in_place(func, args[0], results[0])

    def _note_in_place(self, func: Any, operand: torch.Tensor, result: torch.Tensor) -> None:
        """Remember a result that CUDA writes into its operand, if nothing else refers to that: ``_freed`` will tell."""
        # a view's base is alive; what is dense has the result's strides; a sum inside a node is not in place, and the
        # engine adds gradients when the node of the last has run, to what another node gave
        number, last = self.number(operand), len(self.sizes) - 1
        is_inside = func is _aten.add.Tensor and self.sequences[number] == self.sequences[last]
        strides = zip(operand.shape, operand.stride(), result.stride(), strict=True)
        is_dense = all(own == others for length, own, others in strides if length > 1)
        if self.number(result) == last and is_dense and not (is_inside or operand._is_view() or self._recomputing >= 0):
            self._in_place = number, len(self.events), result.untyped_storage()._cdata

    def _answer(self, func: Any, dtype: torch.dtype, known: Any) -> Any:
        """Answer transformers' code whether a mask is all ones; refuse every other read of values that are unknown."""
        module, line, function = _asker()
        if self._answers is not None and module.startswith("transformers.") and ".generation" in module:
            return self._answers(function, dtype)
        number = func is not _COMPARES and dtype != torch.bool
        if module in _MASK_CODE and not number:
            self.padding_decides = True
            return not self.padding
        if known is not None:
            return on_host(func, known)
        if number:
            raise NotEstimableError(
                f"not estimable: the model's code reads a number ({dtype}) from the GPU, in {self.here()}, and only "
                "real data has it"
            )
        raise NotEstimableError(
            f"not estimable: {module}, line {line}, lets values on the GPU decide what runs, in {self.here()}, and "
            "only real data has them; expected a pass that depends on shapes and settings alone. Estimate the model "
            "without that branch"
        )

    @contextmanager
    def answering(self, answers: Callable[[str, torch.dtype], bool | int]) -> Iterator[None]:
        """Answer transformers' code for generation by ``answers(function, dtype)`` when it reads from a meta tensor."""
        self._answers = answers
        try:
            yield
        finally:
            self._answers = None

    def know(self, batch: Any) -> None:
        """Remember the values of meta tensors that have some (an attribute ``known_values``)."""
        for tensor in tree_leaves(batch):
            if hasattr(tensor, "known_values"):
                self.values.give(tensor, tensor.known_values)

    def add(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor's storage, a new one if it is new; -1 where it is not counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # private: pinned by a test, seen in torch 2.6 to 2.13
        known = self._live.get(key)
        if known is not None:
            return known[0]
        if self.device_type is not None and tensor.device.type != self.device_type:
            return -1
        if key in self.ignored or key in self._left_out:
            return -1
        number = self._allocate(storage.nbytes())
        self._live[key] = (number, weakref.ref(storage, partial(self._freed, key)))
        return number

    def _freed(self, key: int, _: Any) -> None:
        number, _ = self._live.pop(key)
        operand, event, result = self._in_place
        if (operand, event) != (number, len(self.events)):
            self.events.append((number, -self.sizes[number]))
            return
        self._forget_last()  # freed right after the operation, which so had the last reference, and took the block
        self._live[result] = (number, self._live[result][1])
        self._in_place = _NOTHING

    def ignore(self, tensor: torch.Tensor, *, is_copied: bool = True) -> None:
        """Do not count the tensor's storage, which represents host memory; remove its allocation if it was last.

        ``is_copied``: whether operations on it are copies over PCIe.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        number, _ = self._live.pop(key, (-1, None))
        if number == len(self.sizes) - 1 >= 0:
            self._forget_last()
        found = self.ignored if is_copied else self._left_out
        found.add(key)
        weakref.finalize(storage, found.discard, key)

    def _forget_last(self) -> None:
        for column in (self.events, self.sizes, self.allocated_at, self.sequences, self.places):
            column.pop()

    def close(self) -> None:
        """End the list: what is still allocated has no free in it, whenever it is freed."""
        self._live.clear()  # the weak references too, so that none is called
        self.values.forget()
        self.after_recomputation.clear()

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a storage that is still allocated; -1 if it was never counted."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return -1 if known is None else known[0]

    def _allocate(self, size_bytes: int) -> int:
        number = len(self.sizes)
        self.sizes.append(size_bytes)
        self.allocated_at.append(len(self.events))
        self._note_origin()
        self.events.append((number, size_bytes))
        return number

    def add_hidden(self, sizes: tuple[int, ...]) -> None:
        """Allocate storages that a kernel has inside itself, and free them."""
        numbers = [self._allocate(size_bytes) for size_bytes in sizes]
        for number in numbers:
            self.events.append((number, -self.sizes[number]))

    @staticmethod
    def sequence() -> int:
        """Return autograd's next sequence number: private, pinned by a test, seen in torch 2.6 to 2.13."""
        return _next_sequence()

    def _note_origin(self) -> None:
        """Note what runs now, for the storage that was just allocated.

        ``_current_autograd_node`` and ``_sequence_nr`` are private, pinned by a test, seen in torch 2.6 to 2.13.
        """
        place = self._stack[-1]
        if not self._backward or (self._recomputing >= 0 and place):
            self.sequences.append(_next_sequence())
            self.places.append(place)
            return
        node = torch._C._current_autograd_node()
        sequence = _NO_SEQUENCE if node is None else node._sequence_nr()
        self.sequences.append(-1 if sequence == _NO_SEQUENCE else int(sequence))
        self.places.append(-1)

    # ---- Modules and phases -----------------------------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Treat what runs inside as a backward pass."""
        self._backward = True
        try:
            yield
        finally:
            if self._recomputing >= 0:
                self._toggle_recomputation()
            self._backward = False

    def _toggle_recomputation(self) -> None:
        if self._recomputing < 0:
            self._recomputing = len(self.events)
        else:
            self.recomputed.append((self._recomputing, len(self.events)))
            self._recomputing = -1
            for leave in self.after_recomputation:
                leave()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Note the cost of each operation inside, as those of one pass in ``operations``."""
        self.operations.append(Counter())
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note which module of ``model`` runs, by hooks that are removed at the end."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                number = len(self.modules)
                self.modules.append(name)
                hooks.callback(module.register_forward_pre_hook(partial(self._enter, number)).remove)
                hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, number: int, *_: Any) -> None:
        self._stack.append(number)
        self._note_module()

    def _leave(self, *_: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._note_module()

    def _note_module(self) -> None:
        sequences, numbers = self._entered
        sequences.append(_next_sequence())
        numbers.append(self._stack[-1])

    def here(self) -> str:
        """Return the name of the module that runs, for messages."""
        return self.modules[self._stack[-1]] or "the model"

    def module_of(self, number: int) -> str:
        """Return the name of the module that ran when a storage was allocated; "" for none."""
        place = self.places[number]
        if place < 0:
            sequences, places = self._entered
            place = places[max(bisect_right(sequences, self.sequences[number]) - 1, 0)]
        return self.modules[place]


_COPY = -1  # of the first argument, where that is not contiguous; freed when the operator returns
_ORDERS = {  # of the results of an operator; all others allocate them from the first to the last
    _aten.native_dropout.default: (1, 0),  # Dropout.cu, ``dropout_cuda``
    _aten.convolution_backward.default: (_COPY, 0, 1, 2),  # cudnn/ConvShared.cpp
    _aten.native_layer_norm.default: (_COPY, 0, 1, 2),  # layer_norm_kernel.cu, ``layer_norm_cuda``
}
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}  # of cuBLAS
# Autograd's engine adds gradients up in place (input_buffer.cpp, ``accumulate``), and so do the nodes of gather, topk,
# index_select, masked_select and indexing (FunctionsManual.cpp), except where ``isTensorSubclassLike`` says that a
# tensor is not plain: a meta tensor, and any tensor while a mode is on (TensorSubclassLikeUtils.h).
_IN_PLACE = {_aten.add, _aten.scatter_add, _aten.scatter, _aten.index_add, _aten.masked_scatter, _aten.index_put}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # calls operators itself; private: seen in 2.6 to 2.14
_COMPARES, _CPU, _NOTHING = _aten.equal.default, torch.device("cpu"), (-1, -1, 0)
_MASK_CODE = {"transformers.masking_utils", "transformers.modeling_attn_mask_utils"}


def _asker() -> tuple[str, int, str]:
    """Return module, line and function of the code outside torch and this package that reads a value."""
    frame: Any = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] != "torch" and not module.startswith("hf_memopt.prediction.memory."):
            return module, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "torch", 0, ""
