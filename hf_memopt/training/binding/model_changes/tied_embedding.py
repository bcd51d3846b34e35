"""Add the gradient of a tied input embedding into the head's in place, without two more matrices of that size.

Where the head shares its weight with the input embeddings, both of them give the weight a gradient. torch makes each as
a whole matrix, (vocabulary, hidden), and a third for their sum: of Llama-3.2-1B in 16 bits three times 501 MiB. But the
embeddings have a gradient only for the tokens of the batch. Here they keep these rows, (distinct tokens, hidden), until
the head's gradient is complete, and then the rows are added into it: one matrix, and a few rows.

``embedding.sparse = True`` does not do that. Autograd adds a sparse gradient in place only if it arrives before the
dense one, and the head's arrives first (``accumulate`` in torch/csrc/autograd/input_buffer.cpp; torch 2.13,
``tests/binding/test_tied_embedding.py`` measures it): two matrices. Also it has a row for each token, repeated ones
included, and 16 bits round after each of them.

What it costs: the distinct tokens are counted, which waits for the GPU once per forward pass. On a CPU all gradients
are bit for bit stock's. Training and the estimate, on the meta device, use the function below.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from hf_memopt.training.binding.model import check_model, unwrap_model
from hf_memopt.training.binding.undo import UndoHandle, is_overridden, nothing_to_undo, override_method, undo_all

_PURPOSE = "sparse tied embedding"
_Rows = tuple[torch.Tensor, torch.Tensor]  # distinct tokens (distinct,), their gradient (distinct, hidden)


def sparse_tied_embedding(model: nn.Module) -> UndoHandle:
    """Add the gradient of tied input embeddings to the head's in place, only for the tokens that occur.

    What arrives in ``weight.grad`` is dense, as in stock, once per backward pass, for any optimizer: with accumulation,
    gradient release, checkpointing, mixed precision and several processes. A second call changes nothing. A copy of the
    model (``copy.deepcopy``, ``pickle``) is as in stock.

    Limitations: each loss has to depend on the head; a compiled model does as in stock; there are no gradients of
    gradients.

    Args:
        model: of transformers, or wrapped by PEFT or ``DistributedDataParallel``. Its embeddings get a ``forward`` of
            their own.

    Returns:
        A handle whose ``remove()`` takes the change back; it does not keep the model alive.

    Raises:
        ValueError: the head does not share the weight of the input embeddings; the embeddings are no ``nn.Embedding``
            or have ``max_norm``; the weight is sharded or packed.
        RuntimeError: in the backward pass of a loss that does not depend on the head.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        >>> config = LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True)
        >>> model = LlamaForCausalLM(config)
        >>> handle = sparse_tied_embedding(model)
        >>> ids = torch.tensor([[5, 6, 5]])
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> model.get_input_embeddings().weight.grad.shape
        torch.Size([50, 8])
    """
    embeddings = tied_embeddings(model)
    if not embeddings:
        raise ValueError(
            f"model=<{type(unwrap_model(model)).__name__}> has no head that shares the weight of its input embeddings; "
            "expected tied weights. Leave sparse_tied_embedding out"
        )
    for module in embeddings:
        _check(module)
    _references_to_unshared()  # counted here, outside of the user's modes
    fresh = [module for module in embeddings if not is_overridden(module, "forward", _PURPOSE)]
    if not fresh:
        return nothing_to_undo()
    rows = _RowsOfTheWeight()
    overrides = (
        override_method(module, "forward", partial(_by_distinct_tokens, module, rows), purpose=_PURPOSE)
        for module in fresh
    )
    return undo_all(UndoHandle(rows.remove), *overrides)


def tied_embeddings(model: nn.Module) -> list[Any]:
    """Return the input embeddings that share their weight with the model's head; none where nothing is tied.

    T5 and BART have three of them: of the encoder, of the decoder, and one that only holds the weight.
    """
    check_model(model)
    inside = unwrap_model(model)
    try:
        embedding, head = inside.get_input_embeddings(), inside.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # no model of transformers, or one without tokens
        return []
    weight = getattr(embedding, "weight", None)
    if weight is None or head is embedding or getattr(head, "weight", None) is not weight:
        return []
    found = [module for module in inside.modules() if isinstance(module, nn.Embedding) and module.weight is weight]
    return found or [embedding]


def _check(embedding: Any) -> None:
    kind = type(embedding.weight)
    if not isinstance(embedding, nn.Embedding):
        problem, rule = " are not known to read rows of a weight", "an nn.Embedding"
    elif embedding.max_norm is not None:
        problem, rule = f", max_norm={embedding.max_norm!r} changes the weight in each forward pass", "max_norm=None"
    elif kind is not nn.Parameter:  # a DTensor, a quantised weight
        problem, rule = f" have a weight of class {kind.__name__}, which is sharded or packed", "a plain parameter"
    else:
        return
    name = type(embedding).__name__
    raise ValueError(f"embeddings=<{name}>{problem}; expected {rule}. Leave sparse_tied_embedding out")


# ---- The forward pass -----------------------------------------------------------------------------------------------


def _by_distinct_tokens(
    embedding: Any, rows: _RowsOfTheWeight, before: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Do the forward of embeddings by looking the tokens up in a small table, the rows of those that occur.

    ids (batch, seq) -> distinct (distinct,), places (batch, seq); weight (vocabulary, hidden) -> table (distinct,
    hidden). The embeddings' own forward runs on the table, with the places for ids, and does all else that it does.
    torch's kernel sums the gradients of repeated tokens within the table, in stock's order and precision.
    """
    ids = args[0] if len(args) == 1 else None
    weight = embedding.weight
    # in rows in parts the weight is an alias, of which only the whole gradient reaches the parameter
    is_trained = isinstance(weight, nn.Parameter) and torch.is_grad_enabled() and weight.requires_grad
    is_trained = is_trained and not torch.compiler.is_compiling()
    if not is_trained or kwargs or not isinstance(ids, torch.Tensor) or not ids.numel():
        return before(*args, **kwargs)
    rows.watch(weight)
    if ids.is_meta:  # where no token is known, all differ
        distinct, places = ids.new_empty(ids.numel()), torch.empty_like(ids, dtype=torch.long)
    else:
        distinct, places = torch.unique(ids, return_inverse=True)
    padding = embedding.padding_idx
    # an attribute of the object hides the parameter of that name
    vars(embedding)["weight"] = _Table.apply(weight, distinct, padding, rows)  # type: ignore[no-untyped-call]
    embedding.padding_idx = None  # places are no ids
    try:
        return before(places)
    finally:
        del vars(embedding)["weight"]
        embedding.padding_idx = padding


class _Table(torch.autograd.Function):
    """The rows of a weight, whose gradient is kept aside instead of being returned as a matrix."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, distinct: torch.Tensor, padding: int | None, rows: _RowsOfTheWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(distinct)
        ctx.padding, ctx.rows = padding, rows
        return weight.index_select(0, distinct)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        (distinct,) = ctx.saved_tensors
        if ctx.padding is not None:
            gradient = gradient.masked_fill((distinct == ctx.padding)[:, None], 0)
        ctx.rows.keep((distinct, gradient))
        return None, None, None, None


# ---- The backward pass ----------------------------------------------------------------------------------------------


class _RowsOfTheWeight:
    """The rows of gradients of the embeddings of one weight, until the head's gradient is complete.

    Autograd runs a hook on the weight when all that has used it has run backward, before it fills ``weight.grad`` and
    runs the hooks of gradient release and of ``DistributedDataParallel``. This hook adds the rows. Without the head
    there is no gradient that they could be added to, and torch lets no hook make one.

    Rows are kept by the number of the backward pass, so that those of an interrupted one are never added to another.
    """

    def __init__(self) -> None:
        self._weight: Callable[[], nn.Parameter | None] = lambda: None
        self._hook: RemovableHandle | None = None
        self._kept: dict[int, list[_Rows]] = {}

    def watch(self, weight: nn.Parameter) -> None:
        """Put the hook on a weight that requires a gradient, unless it is there."""
        if _number_of_backward() < 0:
            self._kept.clear()  # of an interrupted backward pass
        if self._weight() is not weight:
            self.remove()
            self._weight = weakref.ref(weight)
            self._hook = weight.register_hook(self._add)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._weight, self._hook = (lambda: None), None

    def keep(self, rows: _Rows) -> None:
        self._kept.setdefault(_number_of_backward(), []).append(rows)

    def _add(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        kept = self._kept.pop(_number_of_backward(), [])
        if gradient is None:
            if kept:
                raise RuntimeError(
                    "the loss depends on tied embeddings but not on the head that shares their weight; expected a loss "
                    "of the model's logits. Leave sparse_tied_embedding out"
                )
            return None
        if kept and not (gradient.is_contiguous() and references_to(gradient) in _references_to_unshared()):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        for distinct, rows in kept:
            gradient.index_add_(0, distinct, rows.to(gradient.dtype))
        return gradient


def _number_of_backward() -> int:
    """Return the number of the backward pass that runs; -1 for none. Private, pinned by a test, torch 2.6 to 2.13."""
    return torch._C._current_graph_task_id()


def references_to(gradient: torch.Tensor) -> tuple[int, ...]:
    """Return how often C++ and Python refer to a tensor, and how many tensors to its storage; then of its base.

    A linear layer's gradient is a view of a product. ``_use_count`` and ``_storage_Use_Count`` are private, pinned by a
    test, seen in torch 2.13.
    """
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    tensor: Any = gradient
    counts = tensor._use_count(), sys.getrefcount(gradient), storage
    return counts if gradient._base is None else (*counts, *references_to(gradient._base))


@cache
def _references_to_unshared() -> tuple[tuple[int, ...], ...]:
    """Return ``references_to`` of gradients that nothing else refers to, so that they may be changed in place.

    The first is of a linear layer, the second of a function that returns a new tensor.
    """
    found: list[tuple[int, ...]] = []
    with torch.inference_mode(False), torch.enable_grad():
        weight: Any = nn.Parameter(torch.ones(1, 1))
        weight.register_hook(_Probe(found).note)
        products: tuple[Any, ...] = (F.linear(torch.ones(1, 1), weight), weight.mul(2))
        for product in products:
            product.sum().backward()
    return tuple(found)


class _Probe:
    """A hook that notes the references to a gradient; a method, as ``_add`` is."""

    def __init__(self, found: list[tuple[int, ...]]) -> None:
        self._found = found

    def note(self, gradient: torch.Tensor) -> None:
        self._found.append(references_to(gradient))
