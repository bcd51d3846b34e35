"""Selective checkpointing: the operations of a checkpointed layer whose results are costly and small are kept.

Linear layers and fused attention take nearly all of a layer's arithmetic; norms, activation functions and dropouts are
recomputed from their results at the speed of memory. Products of two activations (``bmm``) are recomputed too: those of
unfused attention are scores, as large as the square of the length. ``kept_operations.csv`` names what is kept.

A compiled model has ``activation_memory_budget``: the partitioner looks for the least recomputation within a fraction
(1.0 is torch's default, 0.0 keeps about the inputs of the graph alone). It acts when a graph is compiled, the first
time that it runs, and has no effect on a model that is not compiled.

Limitations: no choice among the linear layers of one layer; the results of kernels outside of torch's dispatcher are
always recomputed; code that writes into the result of a linear layer (torch raises "Tensor cached during selective
activation checkpoint has been mutated" in the backward pass).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from hf_memopt.plain_data import packaged_rows
from hf_memopt.training.binding.undo import UndoHandle

_OF = {
    row["operation"]: row["of"]
    for row in packaged_rows("hf_memopt.training.techniques.checkpointing", "kept_operations.csv")
}
KEPT_PRODUCTS = frozenset(name for name, of in _OF.items() if of == "product")
"""Operations of linear layers, by the dispatcher's names."""
KEPT_ATTENTIONS = frozenset(name for name, of in _OF.items() if of == "attention")
"""Fused attention: all that ``F.scaled_dot_product_attention`` chooses from, flash-attn and flex attention."""


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of one checkpointed call: ``context_fn`` of non-reentrant ``torch.utils.checkpoint``."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name()
    kept = name in KEPT_PRODUCTS or (name in KEPT_ATTENTIONS and not _draws(operation, args, kwargs))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an attention draws a dropout mask.

    Then it must run again, else the dropouts after it would draw other random numbers than in the forward pass.
    ``_schema`` is private, pinned by a test, seen in torch 2.6 to 2.13.
    """
    if "dropout_p" in kwargs:
        return bool(kwargs["dropout_p"])
    arguments = getattr(getattr(operation, "_schema", None), "arguments", ())
    found = (value for argument, value in zip(arguments, args, strict=False) if argument.name == "dropout_p")
    return bool(next(found, False))


# ---- Compiled models


def activation_memory_budget(fraction: float) -> UndoHandle:
    """Let graphs that torch compiles from now on save at most about ``fraction`` of their activations."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise ValueError(
            f"fraction={fraction!r} is not a fraction of the activations; expected a number from 0.0 to 1.0. "
            "Call: activation_memory_budget(0.5)"
        )
    # private, pinned by a test, seen in torch 2.6 to 2.13: the name that torch's blog and issues give to users
    import torch._functorch.config as config

    patch: Any = config.patch(activation_memory_budget=float(fraction))
    patch.__enter__()
    return UndoHandle(lambda: patch.__exit__(None, None, None))
