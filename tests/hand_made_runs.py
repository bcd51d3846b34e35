"""The JSON of runs on a GPU that the tests do not have, as ``MemoryReportCallback`` writes it."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["MIB", "estimate_data", "finished_run", "lost_run"]

MIB = 2**20


def finished_run(**changes: Any) -> dict[str, Any]:
    """Return a run of 40 steps that fitted, with a prediction."""

    def peaks(allocated: int) -> dict[str, int]:
        return {"peak_allocated_bytes": allocated * MIB, "peak_reserved_bytes": (allocated + 300) * MIB}

    steps = list(range(1, 41))
    return {
        "format": 1,
        "state": "finished",
        "model": "LlamaForCausalLM",
        "parameters": 1_235_814_400,
        "trainable_parameters": 1_235_814_400,
        "device": "cuda:0",
        "device_name": "NVIDIA GeForce RTX 4060",
        "device_bytes": 8188 * MIB,
        "context_bytes": 412 * MIB,
        "process": 0,
        "processes": 1,
        "first_step": 0,
        "last_step": 40,
        "peaks": {
            "load": peaks(2400),
            "forward_backward": peaks(6370),
            "optimizer": peaks(4500),
            "evaluation": peaks(3100),
        },
        "components": {"weights": 2357 * MIB, "gradients": 2357 * MIB, "optimizer state": 1200 * MIB},
        "steps": {
            "forward_backward": {"first": steps, "bytes": [(6000 + 37 * (step * 7 % 11)) * MIB for step in steps]},
            "optimizer": {"first": steps, "bytes": [4500 * MIB] * 40},
            "evaluation": {"first": [20, 40], "bytes": [3000 * MIB, 3100 * MIB]},
        },
        "batches": {
            "batches": 160,
            "examples": 640,
            "padded_tokens": 245_760,
            "tokens": 180_224,
            "largest_rows": 4,
            "largest_length": 512,
        },
        "changes": [
            {"name": "max_tokens", "old": "None", "new": "1024", "reason": "out of memory at step 3"},
            {"name": "optim", "old": "'adamw_torch'", "new": "'adamw_bnb_8bit'", "reason": 'fits "8 GB" & less'},
        ],
        "micro_batching": {
            "steps": 40,
            "cut_steps": 12,
            "failures": 1,
            "lost_seconds": 0.8,
            "limits": {"max_tokens": 1024, "max_examples": None},
        },
        "predicted": {
            "batch_size": 4,
            "seq_len": 512,
            "reserved_bytes": 6750 * MIB,
            "allocated_bytes": 6450 * MIB,
            "context_bytes": 400 * MIB,
            "components": {
                "weights": 2357 * MIB,
                "gradients": 1100 * MIB,
                "optimizer state": 1200 * MIB,
                "activations": 993 * MIB,
                "logits and loss": 800 * MIB,
            },
            "phases": {"load": 2360 * MIB, "forward": 6100 * MIB, "backward": 6450 * MIB, "optimizer": 4600 * MIB},
            "gpu": "RTX 4060",
            "usable_bytes": 7900 * MIB,
            "hints": [],
        },
        "out_of_memory": None,
        "arguments": {
            "per_device_train_batch_size": "4",
            "gradient_accumulation_steps": "4",
            "optim": "adamw_bnb_8bit",
        },
        "notes": [],
        "versions": {"hf-memopt": "0.2.0", "torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.12.0"},
        "environment": {"python": "3.11.9", "platform": "Linux"},
        **copy.deepcopy(changes),
    }


def lost_run(**changes: Any) -> dict[str, Any]:
    """Return a run that ran out of memory in step 3, in the backward pass."""
    predicted = finished_run()["predicted"]
    predicted |= {
        "reserved_bytes": 8900 * MIB,
        "hints": ["batch_size=1, gradient_accumulation_steps=16 needs 6.90 GiB: fits, 0.81 GiB to spare"],
    }
    steps = {name: {"first": [1, 2], "bytes": [6000 * MIB, 6100 * MIB]} for name in ("forward_backward", "optimizer")}
    return finished_run(
        **{
            "state": "out of memory",
            "last_step": 2,
            "steps": steps,
            "predicted": predicted,
            "out_of_memory": {
                "step": 3,
                "phase": "backward",
                "rows": 4,
                "length": 512,
                "error": "CUDA out of memory. Tried to allocate 501.00 MiB.\nGPU 0 has a total capacity of 8.00 GiB",
                "allocated_bytes": 7000 * MIB,
                "reserved_bytes": 7400 * MIB,
                "components": {
                    "weights": 2357 * MIB,
                    "gradients": 1800 * MIB,
                    "optimizer state": 1200 * MIB,
                    "other tensors": 543 * MIB,
                    "kept by autograd and kernels": 1100 * MIB,
                },
                "tensors": [
                    {
                        "component": "weights",
                        "shape": [128256, 2048],
                        "dtype": "bfloat16",
                        "count": 1,
                        "bytes": 501 * MIB,
                    },
                    {
                        "component": "other tensors",
                        "shape": [4, 512, 128256],
                        "dtype": "bfloat16",
                        "count": 1,
                        "bytes": 501 * MIB,
                    },
                ],
                "blocks": [{"bytes": 32 * MIB, "count": 30}],
            },
            **changes,
        }
    )


def estimate_data(**changes: Any) -> dict[str, Any]:
    """Return the JSON of an estimate, with the fields that a difference reads."""
    components = {
        "weights": 2357 * MIB,
        "gradients": 2357 * MIB,
        "optimizer state": 1200 * MIB,
        "activations": 993 * MIB,
        "logits and loss": 500 * MIB,
        "temporaries": 0,
        "workspace": 8 * MIB,
        "inputs": 0,
    }
    found = {
        "format": 1,
        "model": "Llama-3.2-1B",
        "batch_size": 4,
        "seq_len": 512,
        "settings": {"precision": "bf16", "optim": "adamw_torch", "checkpointing": True},
        "gpu": {"name": "RTX 4060", "usable_bytes": 7900 * MIB},
        "context_bytes": 400 * MIB,
        "fits": True,
        "components": components,
        "phase_peaks": {
            "forward": {"allocated_bytes": 7000 * MIB, "reserved_bytes": 7200 * MIB},
            "backward": {"allocated_bytes": 7415 * MIB, "reserved_bytes": 7500 * MIB},
        },
        "versions": {"hf-memopt": "0.2.0", "torch": "2.13.0", "transformers": "5.8.1"},
        **changes,
    }
    found["peak_allocated_bytes"] = sum(found["components"].values())
    found["peak_reserved_bytes"] = found["peak_allocated_bytes"] + 85 * MIB
    found["total_bytes"] = found["peak_reserved_bytes"] + 400 * MIB
    return found
