"""Let memory run out where a test says: an operation of the model that has more rows than fit raises out of memory.

Nothing is hung on the model and no method is replaced: operations are watched from below, as they reach their kernels.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private in torch 2.6 to 2.13, and used by its own tests
from transformers import Trainer

ROWS = 2  # as many fit
Place = Literal["forward", "backward", "evaluation"]
aten = torch.ops.aten

_LOOKUP, _CONVOLUTION = aten.embedding.default, aten.convolution.default
_BACKWARD = {
    aten.embedding_dense_backward.default: 1,
    aten.convolution_backward.default: 0,
    aten.native_layer_norm_backward.default: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 0,
}
"""Operations of a backward pass, and which of their arguments has a dimension of rows."""


class Starvation(TorchDispatchMode):
    """Raises out of memory while it is entered.

    Args:
        trainer: whose model runs out of memory.
        place: "forward" and "backward" raise once, in the second step; "evaluation" raises each time.

    Attributes:
        raised: how often.
    """

    def __init__(self, trainer: Trainer, place: Place) -> None:
        super().__init__()
        self.raised = 0
        self._trainer = trainer
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._rows_of(func, args) > ROWS and self._is_now():
            self.raised += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory: no more than {ROWS} rows fit, on purpose")
        return func(*args, **(kwargs or {}))

    def _is_now(self) -> bool:
        is_training = self._trainer.model.training
        if self._place == "evaluation":
            return not is_training and not torch.is_grad_enabled()
        return is_training and self._trainer.state.global_step >= 1 and self.raised == 0

    def _rows_of(self, func: Any, args: Any) -> int:
        """Return the rows of an operation of the place, or 0."""
        # private in torch 2.6 to 2.13: -1 outside of backward passes
        is_backward = torch._C._current_graph_task_id() != -1
        if self._place == "backward":
            rows = args[_BACKWARD[func]] if is_backward and func in _BACKWARD else None
            least = 2 if func == aten.embedding_dense_backward.default else 3
        else:
            rows = None if is_backward else self._looked_up_or_convolved(func, args)
            least = 2
        return 0 if rows is None or rows.dim() < least else len(rows)

    def _looked_up_or_convolved(self, func: Any, args: Any) -> torch.Tensor | None:
        if func == _CONVOLUTION:
            return args[0]
        if func != _LOOKUP:
            return None
        own = {weight.data_ptr() for weight in self._trainer.model.parameters()}  # a teacher's are others
        return args[1] if args[0].data_ptr() in own else None
