"""Drop the gradients of a checkpointed model's inputs, which non-reentrant checkpointing does not need."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from hf_memopt.changes import Change
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.undo import UndoHandle, nothing_to_undo

INPUT_GRADIENTS_DROPPED = Change(
    "input_require_grads",
    True,
    False,
    "non-reentrant checkpointing needs no gradient there, and it would undo what a frozen prefix saves",
)
"""What a callback records where ``drop_input_gradients`` changed something."""


def drop_input_gradients(model: Any) -> UndoHandle:
    """Take off the hooks that make the embeddings' output require a gradient, if checkpointing does not need them.

    Stock ``Trainer`` puts them on every checkpointed text model. Reentrant checkpointing and adapters need them.
    Non-reentrant checkpointing does not, and there they undo what a frozen prefix saves. Where nothing was taken off,
    the handle has nothing to undo (``handle.is_removed``).
    """
    if hasattr(model, "peft_config") or not versions.is_checkpointing(model) or not _is_non_reentrant(model):
        return nothing_to_undo()
    hooks = input_gradient_hooks(model)
    if not hooks:
        return nothing_to_undo()
    model.disable_input_require_grads()
    for module, key in hooks:  # it removes the last hooks only, and enabling twice (by hand, then by Trainer) adds two
        module._forward_hooks.pop(key, None)
    reference = weakref.ref(model)

    def enable() -> None:
        alive = reference()
        if alive is not None and not input_gradient_hooks(alive):
            alive.enable_input_require_grads()

    return UndoHandle(enable)


def input_gradient_hooks(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the hooks of ``enable_input_require_grads``, each as its module and its key there."""
    return [
        (module, key)
        for module in model.modules()
        for key, hook in module._forward_hooks.items()
        # the name it has in transformers 5.8.1, 5.17.0 and 5.23.0
        if getattr(hook, "__name__", None) == "make_inputs_require_grads"
    ]


def _is_non_reentrant(model: nn.Module) -> bool:
    """Return whether each checkpointed module of the model is known to use the non-reentrant variant."""
    # a functools.partial of torch's checkpoint, seen in transformers 5.8.1, 5.17.0 and 5.23.0; read here, not in the
    # arguments, since checkpointing may be switched on by hand, and without the option torch itself is reentrant
    functions = [
        getattr(module, "_gradient_checkpointing_func", None)
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    return all(getattr(function, "keywords", {}).get("use_reentrant") is False for function in functions)
