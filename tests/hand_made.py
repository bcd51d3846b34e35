"""An estimate made by hand, for the tests of what is made of estimates: text, pictures, the command."""

from __future__ import annotations

from typing import Any

import numpy as np
from tables import tables

from hf_memopt import Estimate
from hf_memopt.gpus import Gpu
from hf_memopt.prediction.memory.tracking import COMPONENTS, Timeline
from hf_memopt.types import StepSettings

TABLES = tables(__file__)

MIB = 2**20
SMALL = Gpu("GPU 4GB", 4096 * MIB, 3891 * MIB, 400 * MIB, (8, 6), "made up for the tests")

# Name of the phase and, event by event, MiB of weights, gradients, optimizer state, activations, logits and loss,
# temporaries, workspace, inputs; the peak is the first event of the second backward pass.
EVENTS = TABLES["events"]


def hand_made(scale: int = 1, **changed: Any) -> Estimate:
    """Return the estimate of ``EVENTS``, every one of its bytes ``scale`` times; ``settings`` may be a dict."""
    components = np.array([row for _, row in EVENTS], dtype=np.int64) * MIB * scale
    names = [name for name, _ in EVENTS]
    phases = tuple((event, name) for event, name in enumerate(names) if event == 0 or names[event - 1] != name)
    allocated = components.sum(axis=1)
    reserved = np.maximum.accumulate(allocated) + 8 * MIB * scale
    settings = changed.pop("settings", {})
    fields: dict[str, Any] = {
        "model": "bert-large",
        "batch_size": 32,
        "seq_len": 128,
        "settings": StepSettings(**{"precision": "fp32", **settings}),
        "gpu": SMALL,
        "peak_allocated_bytes": int(allocated.max()),
        "peak_reserved_bytes": int(reserved.max()),
        "context_bytes": 400 * MIB,
        "components": dict(zip(COMPONENTS, components[allocated.argmax()].tolist(), strict=True)),
        "phase": "backward",
        "module": "bert.encoder.layer.23",
        "host_bytes": 0,
        "parameters": 335_143_938,
        "trainable_parameters": 335_143_938,
        "flops": 7_604_000_000_000,
        "timeline": Timeline(components, reserved, phases, ((2, 1), (6, 2))),
    }
    return Estimate(**{**fields, **changed})
