"""Print peaks and events of set-ups as JSON: run with and without values, in a process of its own."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trained
import transformers

import language_models
from hf_memopt.prediction.rehearsal import peaks_by_phase, recorded_events

transformers.logging.set_verbosity_error()
PADDED, PLAIN, ONES = "padded", "no mask", "a mask of ones"
EAGER = "eager attention"  # makes its mask whatever the values are
SET_UPS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "bert": ("bert", PLAIN, "", {}),
    "bert in bfloat16": ("bert", PLAIN, "", {"bf16": True}),
    "tied llama, checkpointing": ("llama-tied", PADDED, EAGER, {"gradient_checkpointing": True}),
    "gpt2 in bfloat16": ("gpt2", PADDED, EAGER, {"bf16": True}),
    "t5, accumulation": ("t5", PLAIN, "", {"gradient_accumulation_steps": 2}),
    "8-bit optimizer": ("llama", PADDED, EAGER, {"optim": "adamw_bnb_8bit"}),
    "lora": (trained.lora, PADDED, EAGER, {}),
    "vit": (trained.vit, PLAIN, "", {}),
    "mask of ones": ("gpt2", ONES, "", {}),
}


def build(family: Any, attention: str) -> Any:
    model = family() if callable(family) else language_models.build(family)
    if attention == EAGER:
        model.set_attn_implementation("eager")
    return model


def in_order(happened: list[Any]) -> list[tuple[str, int]]:
    """Return kinds and sizes; frees that follow each other by size, since the cache of autocast has no order."""
    runs = itertools.groupby(((event.kind, event.requested_bytes) for event in happened), key=lambda event: event[0])
    return [event for kind, run in runs for event in (sorted(run) if kind == "free" else run)]


found = {}
for name, (family, mask, attention, settings) in SET_UPS.items():
    rows = trained.images() if name == "vit" else trained.texts(padded=mask == PADDED)
    if mask == ONES:
        rows = [{**row, "attention_mask": torch.ones(16, dtype=torch.long)} for row in rows]
    gc.collect()
    torch.cuda.empty_cache()
    with recorded_events() as happened, peaks_by_phase() as peaks:
        # the Trainer looks whether a loss is a number
        settings = {"logging_nan_inf_filter": False, **settings}
        trained.train(functools.partial(build, family, attention), rows, Path(tempfile.mkdtemp()), **settings)
    found[name] = {
        "peaks": {phase: (peak.allocated_bytes, peak.reserved_bytes) for phase, peak in peaks.items()},
        "events": in_order(happened),
    }
print(json.dumps(found))
