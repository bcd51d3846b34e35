"""The losses of TRL's trainers, by their own ``compute_loss`` with models on the meta device.

``SFTTrainer`` and ``DPOTrainer`` project hidden states through the head in tiles, and on a GPU a Triton kernel makes of
each tile, in place, what the loss needs: here the kernels do nothing, and all else runs as written. Every position
counts as one of a completion. Limitation: without Triton, as on Windows, TRL needs more.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_memopt.prediction.memory.models import load_model
from hf_memopt.prediction.memory.recording.threads import OfThread
from hf_memopt.prediction.memory.settings import NotEstimableError, StepSettings
from hf_memopt.training.binding.undo import UndoHandle, set_attribute, undo_all

_ROWS = {"SFTTrainer": 1, "DPOTrainer": 2, "RewardTrainer": 2}  # of the model for an example: answers share a batch


class TrainerLoss:
    """The loss of a trainer of TRL; one of the ``prepare`` of settings, where it leaves the model as it is."""

    def __init__(self, trainer: Any, name: str) -> None:
        self.__name__ = f"loss of {name}" + ", whose examples are pairs" * (_ROWS[name] > 1)
        self.rows, self._trainer = _ROWS[name], trainer
        found = getattr(trainer, "ref_model", None)
        self.references = () if found is None else (load_model(found).model.train(found.training),)
        self._is_flat = getattr(trainer, "padding_free", False)  # rows one after the other, without padding

    def __call__(self, model: nn.Module) -> nn.Module:
        return model

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch of the trainer's collator in place of one that stock's would make."""
        found = dict(batch)
        rows, length = found["input_ids"].shape
        if self._is_flat:
            positions: Any = torch.arange(length).repeat(rows)[None]
            found = {name: found[name].view(1, -1) for name in ("input_ids", "labels")}
            found["position_ids"] = positions.to("meta")
            found["position_ids"].known_values = positions
        elif self.rows > 1:
            labels, logps = found.pop("labels"), torch.zeros(rows // 2, device="meta")
            if hasattr(self._trainer, "ref_model"):  # whose log-probabilities may be computed before
                found |= {"completion_mask": labels, "ref_chosen_logps": logps, "ref_rejected_logps": logps}
        return found

    def compute(self, model: nn.Module, batch: Mapping[str, Any], *, with_outputs: bool) -> tuple[torch.Tensor, Any]:
        """Return the loss of a batch, and the outputs where they are asked for."""
        trainer = copy.copy(self._trainer)
        trainer.model, trainer.ref_model = (model, *self.references, None)[:2]
        trainer.accelerator, trainer._metrics = _OneProcess(), defaultdict(lambda: defaultdict(list))
        found = type(trainer).compute_loss(trainer, model, dict(batch), return_outputs=with_outputs)
        return found if with_outputs else (found, {})

    def recording(self, model: nn.Module, around: Callable[..., Any]) -> UndoHandle:
        """Call each forward pass of model and reference by ``around``, and run TRL's head as on a GPU."""
        models = (model, *self.references)
        forwards = [set_attribute(one, "forward", partial(around, one.forward)) for one in models]
        return undo_all(*forwards, *_head_of_a_gpu())


def trainer_loss(trainer: Any) -> TrainerLoss | None:
    """Return the loss of a trainer of TRL, or of a subclass of one; None for any other Trainer."""
    name = next((kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)
    if name is None:
        return None
    reason = "" if name in _ROWS else "trains on completions that it generates or pairs anew"
    if trainer.is_fsdp_enabled:
        reason = "gathers its head, and shards a reference, by itself under FSDP"
    if reason:
        raise NotEstimableError(
            f"not estimable: trainer=<{name}> {reason}, which is not simulated; expected {', '.join(_ROWS)} without "
            f"FSDP. Measure a few steps: {name}(..., callbacks=[MemoryReportCallback()])"
        )
    return TrainerLoss(trainer, name)


def loss_among(settings: StepSettings) -> TrainerLoss | None:
    """Return the loss of a trainer that the settings have, if there is one."""
    return next((one for one in settings.prepare if isinstance(one, TrainerLoss)), None)


class _OneProcess:
    """What ``compute_loss`` asks of its accelerator, which would talk to others: it gathers metrics, and reads them."""

    device, num_processes, parallelism_config = torch.device("meta"), 1, None
    gather = gather_for_metrics = staticmethod(partial(torch.zeros_like, device="cpu"))
    unwrap_model = staticmethod(lambda model: model)


def _head_of_a_gpu() -> Iterator[UndoHandle]:
    """Let TRL's head run on meta as on a GPU. The names are private, seen in TRL 1.16, and pinned by a test."""
    kernels, utils = (sys.modules.get(f"trl.{name}") for name in ("kernels.chunked_logprob", "trainer.utils"))
    if kernels is None:
        return
    nothing = defaultdict[Any, Any](lambda: lambda *args, **kwargs: None)  # kernel[grid](...), which allocates nothing
    is_enabled: Any = torch.is_autocast_enabled
    changed = (
        (torch, "is_autocast_enabled", lambda kind="cuda": is_enabled(kind.replace("meta", "cuda"))),
        *((module, "_use_triton", lambda device: True) for module in (kernels, utils)),
        *((kernels, name, nothing) for name in ("_forward_kernel", "_backward_kernel")),
        # CUDA adds a product of 16 bits to a float32 total without a copy of either
        (kernels, "_addmm_fp32", lambda total, a, b: total.view(a.dtype)[:, : total.shape[1]].addmm_(a, b)),
    )
    swaps = [(module, name, OfThread(own, getattr(module, name))) for module, name, own in changed]  # all are there
    yield from (set_attribute(*swap) for swap in swaps)
    if not hasattr(kernels, "triton"):
        yield set_attribute(kernels, "triton", SimpleNamespace(cdiv=lambda size, block: -(-size // block)))
