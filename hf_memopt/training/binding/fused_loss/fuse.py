"""Fuse the head of a language model with its cross entropy: the logits of a training step are never all in memory.

Logits are the largest activation of a language model: of Llama-3.2-1B at 2 x 512 tokens, 131 million, which the loss
reads in float32 together with their log-softmax and its gradient. Here the head returns ``DeferredLogits`` while it
trains, and the loss is computed chunk by chunk over the rows that have a label (``chunked_loss``). Loss and gradients
are stock's to rounding; the model's code is not touched and no architecture has a rule.

Real logits are made, as if nothing was fused: in evaluation mode and without gradients; by label smoothing of the
``Trainer`` (its own loss calls ``log_softmax``), class weights and ``reduction="none"``; by LoRA on the head, whose
output is added to them; by a custom ``autograd.Function``, TorchScript, and anything else that reads or changes them in
training. They are in autograd's graph like stock's, and so are the fused ones: a gradient of them that arrives by any
way reaches the model, and one that is asked for (``register_hook``, ``retain_grad``, ``autograd.grad``) is made; one
that is itself differentiated (``create_graph=True``) is computed from real logits.

Limitations: the logits of a training step have to be read before the optimizer's step; a model that ``torch.compile``
wraps is refused, since a tensor without storage breaks its graph. Where the head computes in 16 bits, autocast
included, its logits are computed a second time in the backward pass: four products instead of stock's three (a frozen
head in bfloat16 has stock's two).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_memopt.changes import Change
from hf_memopt.plain_data import Count, check_value
from hf_memopt.training.binding.fused_loss.chunked_loss import CHUNK_BYTES
from hf_memopt.training.binding.fused_loss.deferred_logits import defer, is_loss_alone
from hf_memopt.training.binding.model import check_model, unwrap_model
from hf_memopt.training.binding.undo import UndoHandle, override_method, undo_all
from hf_memopt.units import format_bytes

PURPOSE = "fused cross entropy"


class FusionRecord:
    """Counts of one fused model."""

    def __init__(self, layers: str, chunks: str) -> None:
        self.fused = 0  # losses that were computed without logits
        self.real: Counter[str] = Counter()  # how often each operation of the training forward pass made real logits
        self.warned = False  # the user was told that nothing was fused
        self._layers, self._chunks = layers, chunks

    def changes(self) -> list[Change]:
        """Return what was done so far, one ``Change`` for each kind."""
        found = []
        if self.fused:
            reason = f"{self._layers} and the loss are one operation over labelled rows"
            found.append(Change("cross entropy", "logits of the whole batch", self._chunks, reason))
        for operation in self.real:
            found.append(Change("fused cross entropy", "no logits", "real logits", _reason(operation)))
        return found


def _reason(operation: str) -> str:
    """Return why an operation needs the elements of the logits."""
    if operation == "cross_entropy":
        return (
            "cross_entropy was called with class weights, probabilities, reduction='none' or more than two dimensions"
        )
    if operation == "add":
        return "another activation is added to them: LoRA on the head, or a term of the user's"
    if operation == "log_softmax":
        return "log_softmax reads them: label smoothing by the Trainer, or a loss of the user's"
    return f"{operation} reads or changes them"


class FusedHandle(UndoHandle):
    """The handle that takes the fusion out, with ``record``: what was fused, and what made real logits."""

    def __init__(self, fusion: UndoHandle, record: FusionRecord) -> None:
        super().__init__(fusion.remove)
        self.record = record


def fuse_cross_entropy(model: nn.Module, *, chunk_bytes: int | None = None) -> FusedHandle:
    """Compute the cross entropy in training without the logits, chunk by chunk over the labelled positions.

    In evaluation the head makes logits, unless a ``Trainer`` that is attached asks for the loss alone.

    It changes the forward of the head's linear layer, of this model alone: a deep copy and an unpickled model are plain
    stock. It may be called before or after PEFT wraps the model.

    Args:
        model: a causal, masked or sequence-to-sequence language model of transformers, also inside PEFT.
        chunk_bytes: the most bytes of one chunk's logits, in float32 (or float64); where the head computes in 16 bits,
            half as much again exists beside them. None: as many as the hidden states have, at least 64 MiB.

    Returns:
        A handle whose ``remove()`` undoes it. Its ``record`` says how many losses were fused and what made real logits.

    Raises:
        TypeError: ``model`` is not a module, or the head is not a linear layer.
        ValueError: no output embeddings, a head whose weights are sharded, quantised or moved between devices, a model
            that ``torch.compile`` has wrapped, or ``chunk_bytes`` out of range.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16)).train()
        >>> handle = fuse_cross_entropy(model)
        >>> ids = torch.arange(8).reshape(1, 8)
        >>> loss = model(input_ids=ids, labels=ids).loss
        >>> loss.backward()
        >>> handle.record.fused, dict(handle.record.real)
        (1, {})
    """
    check_value("chunk_bytes", chunk_bytes, Count | None, 64 * 2**20)
    inside, head = _head_of(model)
    layers = _linear_layers(inside, head)
    limit = f"{format_bytes(chunk_bytes or CHUNK_BYTES)} of logits"
    chunks = f"chunks of at most {limit}" + ("" if chunk_bytes else " or as many bytes as the hidden states")
    names = {id(module): name for name, module in inside.named_modules()}
    record = FusionRecord(" + ".join(names.get(id(layer), type(layer).__name__) for layer in layers), chunks)
    handles = (
        override_method(layer, "forward", partial(_forward, layer, chunk_bytes, record), purpose=PURPOSE)
        for layer in layers
    )
    return FusedHandle(undo_all(*handles), record)


def _forward(
    layer: nn.Linear, chunk_bytes: int | None, record: FusionRecord, before: Callable[..., Any], input: torch.Tensor
) -> torch.Tensor:
    """Return the output of a layer, deferred in training."""
    parts = (input, layer.weight, layer.bias)
    learns = any(part is not None and part.requires_grad for part in parts)
    if not (layer.training and learns and torch.is_grad_enabled()) and not is_loss_alone():
        return before(input)  # type: ignore[no-any-return]
    return defer(input, layer.weight, layer.bias, chunk_bytes=chunk_bytes, record=record)


def _head_of(model: Any) -> tuple[Any, nn.Module]:
    """Return the transformers model and the module that makes its logits."""
    check_model(model)
    if type(model).__name__ == "OptimizedModule":  # torch.compile's
        raise ValueError(
            "model=<OptimizedModule> is compiled, and logits without storage break its graph; expected a model that is "
            "not. "
            "Leave torch.compile out"
        )
    inside = unwrap_model(model)
    ask = getattr(inside, "get_output_embeddings", None)
    head = None if ask is None else ask()
    if head is None:
        raise ValueError(
            f"model=<{type(inside).__name__}> has no output embeddings; expected a causal, masked or "
            "sequence-to-sequence language model. Leave fuse_cross_entropy out: a small head has small logits"
        )
    return inside, head


def _linear_layers(inside: Any, head: nn.Module) -> list[nn.Linear]:
    """Return the linear layers inside the head whose output is logits: its own, and the last of each adapter on it."""
    name = type(inside).__name__
    linear = [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
    vocabulary = max((layer.out_features for layer in linear), default=0)
    layers = [layer for layer in linear if layer.out_features == vocabulary]
    if not layers:
        raise TypeError(
            f"model=<{name}> has the output embeddings <{type(head).__name__}>, which is not a linear layer; expected "
            "torch.nn.Linear. Leave fuse_cross_entropy out"
        )
    for layer in layers:
        if type(layer).forward is not nn.Linear.forward:
            raise TypeError(
                f"model=<{name}> has a head of class {type(layer).__name__}, whose weights are not a plain matrix; "
                'expected torch.nn.Linear. Leave the head out of the quantisation: llm_int8_skip_modules=["lm_head"]'
            )
        if layer.weight.dim() != 2 or len(layer.weight) != layer.out_features or hasattr(layer.weight, "device_mesh"):
            raise ValueError(
                f"model=<{name}> has a head whose weight is sharded over processes, of shape "
                f"{tuple(layer.weight.shape)} here; expected all of the vocabulary in each process. "
                "Leave fuse_cross_entropy out under FSDP, DeepSpeed ZeRO-3 and tensor parallelism"
            )
        if hasattr(layer, "_hf_hook"):  # accelerate's, which moves weights (accelerate 1.15)
            raise ValueError(
                f"model=<{name}> has a head that accelerate moves between devices; expected the whole model on one. "
                'Load it with device_map={"": 0}'
            )
    return layers
