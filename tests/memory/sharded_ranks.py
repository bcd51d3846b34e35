"""Train sharded models in two processes and write what torch's allocator held: python sharded_ranks.py FOLDER CASES.

The model is sharded by accelerate's own function, with the plugin that the ``Trainer`` would make.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function

from hf_memopt.binding import versions as compat
from hf_memopt.binding.fused_loss import fuse_cross_entropy
from hf_memopt.binding.model_changes import add_adapters

DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def build(case: dict[str, Any], device: str) -> Any:
    """Return the model of a case in training mode."""
    configuration = getattr(transformers, case["config"])(**case["size"])
    configuration._attn_implementation = "eager"  # the CPU has kernels of its own for the others
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, case["model"])(configuration).train()
    if case.get("checkpointing"):
        compat.enable_checkpointing(model, {"use_reentrant": False})
    for name, parameter in model.named_parameters():
        if case.get("frozen", "nothing") in name:
            parameter.requires_grad_(False)
    if "lora" in case:  # float32 adapters on weights as they are loaded for them
        with torch.device(device):
            model = add_adapters(model.to(torch.bfloat16), case["lora"]).train()
    if "chunk_bytes" in case:
        fuse_cross_entropy(model, chunk_bytes=case["chunk_bytes"])
    return model


def batch(case: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Return a batch without padding."""
    rows, length = case["batch"]
    tokens = torch.full((rows, length), 5, device=device)
    labels = torch.zeros(rows, dtype=torch.int64, device=device) if "Classification" in case["model"] else tokens
    shifted = {"shift_labels": tokens} if "chunk_bytes" in case else {}  # without, the last of a row has no label
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels, **shifted}


class Collective:
    """A collective by way of one buffer that was there before.

    gloo's own allocate copies of what they are given, which NCCL does not, and its threads let go of tensors when they
    come to it.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def part(self, like: torch.Tensor) -> torch.Tensor:
        return self.buffer[: like.nbytes].view(like.dtype)


class Gather(Collective):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        shared = self.part(output_tensor).zero_()
        shared.chunk(dist.get_world_size())[dist.get_rank()].copy_(input_tensor)
        for rank, part in enumerate(shared.chunk(dist.get_world_size())):
            dist.broadcast(part, src=rank)
        output_tensor.copy_(shared)


class ReduceScatter(Collective):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        shared = self.part(input_tensor).copy_(input_tensor)
        dist.all_reduce(shared)
        output_tensor.copy_(shared.chunk(dist.get_world_size())[dist.get_rank()]).div_(dist.get_world_size())


def shard(model: Any, precision: str, buffer: torch.Tensor, layers: list[str] | None) -> Any:
    """Return the model as accelerate shards it."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", reshard_after_forward=True, cpu_offload=False
    )
    plugin.transformer_cls_names_to_wrap = layers
    if DTYPES[precision] is not None:
        plugin.set_mixed_precision(precision)
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no" if DTYPES[precision] is None else precision,
        device=torch.device("cpu"),
        is_main_process=False,
    )
    model = fsdp2_prepare_model(accelerator, model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather(buffer))
            module.set_custom_reduce_scatter(ReduceScatter(buffer))
    return model


def peaks(case: dict[str, Any]) -> list[int]:
    """Return the peak of each of two steps in bytes, their inputs included."""
    dtype, passes = DTYPES[case["precision"]], case.get("accumulation", 1)
    buffer = torch.empty(2**25, dtype=torch.uint8)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = shard(build(case, "cpu"), case["precision"], buffer, case.get("layers"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        inputs = batch(case, "cpu")
        for _ in range(2):
            with record_function("step"):
                for index in range(passes):
                    model.set_requires_gradient_sync(index == passes - 1)  # as accelerate does
                    with torch.autocast("cpu", enabled=dtype is not None, dtype=dtype):
                        outputs = model(**inputs)
                    logits = outputs.logits.float() if dtype is not None else outputs.logits  # as accelerate does
                    loss = outputs.loss.float()
                    del outputs
                    gradient = torch.ones_like(loss)
                    del logits
                    loss.backward(gradient)
                    del loss, gradient
            optimizer.step()
            optimizer.zero_grad()
    events = profiler.profiler.kineto_results.events()
    spans = sorted((event.start_ns(), event.end_ns()) for event in events if event.name() == "step")
    found, alive = [0, 0], 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        alive += event.nbytes()
        for index, (start, end) in enumerate(spans):
            if start <= event.start_ns() <= end:
                found[index] = max(found[index], alive)
    return found


def main(folder: str, cases: str) -> None:
    gc.disable()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {name: peaks(case) for name, case in json.loads(Path(cases).read_text()).items()}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
