"""The weights of all experts of a layer in NF4, and the product of tokens with them, one expert at a time.

Each expert is quantised by itself, so that it can be read from a checkpoint by itself. The product dequantises one
expert, multiplies, and lets go of it; the backward pass does so again. Neither keeps more for it than the packed bytes:
the weights are frozen, so the inputs are not needed either.

``packed`` and ``absmax`` have the layout of bitsandbytes' pull request 1965 (https://github.com/bitsandbytes-foundation/
bitsandbytes/pull/1965), which is not merged. Products of tokens that are sorted by their expert, and the sum over the
experts of a token, are those of transformers' ``grouped_mm``, so what is returned is, to the bit, what that returns for
the dequantised weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.functional import QuantState as _QuantState
from bitsandbytes.functional import dequantize_4bit, quantize_4bit, quantize_blockwise
from torch import Tensor, nn

from hf_memopt.training.devices import accelerator_type

BLOCK = 64  # numbers that share a largest value
_BLOCK_OF_STATISTICS = 256
_NUMBERS_AT_ONCE = 1024 * BLOCK
QuantState: Any = _QuantState  # has no types


class ExpertStack(nn.Module):
    """The matrices of the experts of one layer, (experts, rows, columns), ``stack[i]`` dequantised."""

    packed: Tensor  # (experts, rows * columns / 2, 1), two numbers to a byte
    absmax: Tensor  # (experts, blocks)
    absmax_of_absmax: Tensor | None  # (experts, blocks / 256)
    offset: Tensor | None  # (experts,)

    def __init__(self, shape: torch.Size, dtype: torch.dtype, *, double_quant: bool, device: torch.device) -> None:
        super().__init__()
        self.shape, self.dtype, self.double_quant = shape, dtype, double_quant
        experts, numbers = shape[0], shape[1] * shape[2]
        blocks = numbers // BLOCK
        statistics = {"absmax_of_absmax": (experts, -(-blocks // _BLOCK_OF_STATISTICS)), "offset": (experts,)}
        self.register_buffer("packed", torch.empty(experts, numbers // 2, 1, dtype=torch.uint8, device=device))
        absmax = torch.empty(experts, blocks, dtype=torch.uint8 if double_quant else torch.float32, device=device)
        self.register_buffer("absmax", absmax)
        for name, size in statistics.items():
            self.register_buffer(name, torch.empty(size, device=device) if double_quant else None)
        self._codes: tuple[Tensor, ...] = ()  # the same for all stacks; on their device

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertStack:
        """Move the tensors; their dtypes are the format's, which ``model.half()`` does not change."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(fn(tensor.new_empty(0)).device) if not tensor.is_meta else fn(tensor).to(tensor.dtype)

        self._codes = ()
        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def write(self, index: int, expert: Tensor) -> None:
        """Quantise one expert, shape (rows, columns)."""
        if self.packed.is_meta:
            return
        given = expert.detach().to(accelerator_type(), self.dtype).reshape(-1)  # a CPU takes minutes
        # on a CPU bitsandbytes compares each number with 16 values, in float32
        parts = torch.split(given, _NUMBERS_AT_ONCE if given.device.type == "cpu" else len(given))
        made = [quantize_4bit(part, blocksize=BLOCK, quant_type="nf4") for part in parts]
        self.packed[index] = torch.cat([packed for packed, _ in made])
        largest = torch.cat([state.absmax for _, state in made])
        if self.double_quant:
            assert self.absmax_of_absmax is not None
            assert self.offset is not None
            self.offset[index] = offset = largest.mean()
            largest, state = quantize_blockwise(largest - offset, blocksize=_BLOCK_OF_STATISTICS)
            self.absmax_of_absmax[index] = state.absmax
        self.absmax[index] = largest

    def __getitem__(self, index: int) -> Tensor:
        """Return one expert, dequantised, shape (rows, columns)."""
        of: dict[str, Any] = {"blocksize": BLOCK, "quant_type": "nf4", "dtype": self.dtype}
        if not self._codes:  # the tables of values are those of any tensor on the device
            some = torch.zeros(BLOCK, device=self.packed.device)
            state = quantize_4bit(some, blocksize=BLOCK, quant_type="nf4", compress_statistics=self.double_quant)[1]
            self._codes = state.code, *((state.state2.code,) if self.double_quant else ())
        code, *inner = self._codes
        if self.double_quant:
            assert self.absmax_of_absmax is not None
            assert self.offset is not None
            of_largest = {"blocksize": _BLOCK_OF_STATISTICS, "dtype": torch.float32}
            inner_state = QuantState(self.absmax_of_absmax[index], None, inner[0], **of_largest)
            of |= {"offset": self.offset[index], "state2": inner_state}
        found: Tensor = dequantize_4bit(self.packed[index], QuantState(self.absmax[index], self.shape[1:], code, **of))
        return found

    def reader(self) -> Callable[[int], Tensor]:
        """Return what dequantises an expert, for one product.

        On the meta device each gets what the first one has; that with the temporaries of the CUDA operation.
        """
        if not self.packed.is_meta:
            return self.__getitem__
        if not hasattr(torch.ops.hf_memopt, "dequantized"):  # of the estimate, which counts it
            return lambda _: self.packed.new_empty(self.shape[1:], dtype=self.dtype)
        packed, absmax = self.packed[0], self.absmax[0]
        if self.offset is not None:
            _absmax = torch.empty_like(absmax, dtype=torch.float32) + self.offset[0]
        return lambda _: torch.ops.hf_memopt.dequantized(packed, absmax, self.shape[1:], self.dtype)

    def dequantized(self) -> Tensor:
        """Return all experts, shape (experts, rows, columns)."""
        return torch.stack([self[index] for index in range(len(self.packed))])

    def extra_repr(self) -> str:
        """Return shape and format."""
        return f"{tuple(self.shape)}, nf4{', double quantisation' * self.double_quant}"


class _Product(torch.autograd.Function):
    """Rows times the matrices of their experts; ``counts`` rows of each, in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stack: ExpertStack, counts: list[int], is_transposed: bool) -> Tensor:
        ctx.stack, ctx.counts, ctx.is_transposed = stack, counts, is_transposed
        return _multiplied(rows, stack, counts, is_transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = _multiplied(gradients[0], ctx.stack, ctx.counts, not ctx.is_transposed)
        return found, None, None, None


def _multiplied(rows: Tensor, stack: ExpertStack, counts: list[int], is_transposed: bool) -> Tensor:
    found = rows.new_zeros(len(rows), stack.shape[2 if is_transposed else 1])
    dequantized = stack.reader()
    for index, (part, out) in enumerate(zip(torch.split(rows, counts), torch.split(found, counts), strict=True)):
        if len(part):
            weight = dequantized(index)
            torch.mm(part, weight if is_transposed else weight.t(), out=out)
    return found


def experts_forward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what a module of experts returns: transformers' experts interface.

    Args:
        experts: a class with ``use_experts_implementation``.
        hidden: shape (tokens, width).
        index: the experts of each token, shape (tokens, chosen).
        weights: of what they return, the same shape.
    """
    chosen = index.shape[-1]
    ids, order = index.reshape(-1).sort()
    counts = _counts(ids, experts.num_experts)
    state = _projected(experts, "gate_up_proj" if experts.has_gate else "up_proj", hidden[order // chosen], ids, counts)
    state = experts._apply_gate(state) if experts.has_gate else experts.act_fn(state)
    state = _projected(experts, "down_proj", state, ids, counts)
    if getattr(experts, "has_post_expert_norm", False):  # since transformers 5.20
        state = experts.post_expert_norm(state)
    state = state * weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return state[place].view(len(hidden), chosen, -1).sum(1).to(hidden.dtype)


def _projected(experts: Any, name: str, rows: Tensor, ids: Tensor, counts: list[int]) -> Tensor:
    stack = getattr(experts, name)
    if isinstance(stack, ExpertStack):
        found: Tensor = _Product.apply(rows.to(stack.dtype), stack, counts, experts.is_transposed)  # type: ignore[no-untyped-call]
    else:
        matrices = zip(torch.split(rows.to(stack.dtype), counts), stack, strict=True)
        found = torch.cat([part @ (one if experts.is_transposed else one.t()) for part, one in matrices])
    return found + getattr(experts, f"{name}_bias")[ids] if experts.has_bias else found


def _counts(ids: Tensor, experts: int) -> list[int]:
    """Return how many tokens each expert has; in a simulation as many as the others."""
    if ids.is_meta:
        return [len(ids) // experts + (index < len(ids) % experts) for index in range(experts)]
    found: list[int] = torch.bincount(ids, minlength=experts).tolist()
    return found
