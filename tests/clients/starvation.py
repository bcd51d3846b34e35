"""Let memory run out where a test says: an operation of the model that has more rows than fit raises out of memory.

Nothing is hung on the model and no method is replaced: operations are watched from below, as they reach their kernels.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private in torch 2.6 to 2.13, and used by its own tests
from transformers import Trainer

import tiny

WORDS = len(tiny.VOCABULARY)  # tables with fewer entries are of positions, whose indices have no rows
Place = Literal["forward", "backward", "evaluation"]
aten = torch.ops.aten

_BACKWARD = (
    aten.convolution_backward.default,
    aten.native_layer_norm_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Starvation(TorchDispatchMode):
    """Raises out of memory while it is entered.

    Args:
        trainer: whose model runs out of memory.
        rows: as many fit.
        place: "forward" and "backward" raise once, in the second step; "evaluation" raises each time; None: never.

    Attributes:
        raised: how often.
        most_rows: of an operation of a forward pass in the last step, which tells whether its batch was cut.
    """

    def __init__(self, trainer: Trainer, rows: int, place: Place | None) -> None:
        super().__init__()
        self.raised = 0
        self.most_rows = 0
        self._rows = rows
        self._trainer = trainer
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # private in torch 2.6 to 2.13: -1 outside of backward passes
        is_backward = torch._C._current_graph_task_id() != -1
        tensor = self._backward(func, args) if is_backward else self._forward(func, args)
        if tensor is not None:
            self._look_at(len(tensor), is_backward)
        return func(*args, **(kwargs or {}))

    def _look_at(self, rows: int, is_backward: bool) -> None:
        """Raise where an operation has too many rows."""
        is_training, state = self._trainer.model.training, self._trainer.state
        if is_training and not is_backward and state.global_step == state.max_steps - 1:
            self.most_rows = max(self.most_rows, rows)
        is_now = {
            None: False,
            "evaluation": not is_training and not torch.is_grad_enabled(),
            "forward": is_training and state.global_step >= 1 and not is_backward and self.raised == 0,
            "backward": is_training and state.global_step >= 1 and is_backward and self.raised == 0,
        }[self._place]
        if is_now and rows > self._rows:
            self.raised += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory: no more than {self._rows} rows fit, on purpose")

    def _forward(self, func: Any, args: Any) -> torch.Tensor | None:
        """Return the ids that are looked up in a table of words of the model, or what is convolved."""
        if func == aten.convolution.default:
            return args[0]
        if func != aten.embedding.default or args[1].dim() < 2 or len(args[0]) < WORDS:
            return None
        own = {weight.data_ptr() for weight in self._trainer.model.parameters()}  # a teacher's are others
        return args[1] if args[0].data_ptr() in own else None

    def _backward(self, func: Any, args: Any) -> torch.Tensor | None:
        """Return the ids that were looked up, or a gradient of ``(rows, ...)`` of three dimensions or more."""
        if func == aten.embedding_dense_backward.default:
            return args[1] if args[1].dim() >= 2 and args[2] >= WORDS else None
        return args[0] if func in _BACKWARD and args[0].dim() >= 3 else None
