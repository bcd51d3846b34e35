"""Print peaks and events of set-ups as JSON: run with and without values, in a process of its own."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import language_models
import trained
from hf_memopt.rehearsal import events, phases

transformers.logging.set_verbosity_error()
SET_UPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert in bfloat16": ("bert", {"bf16": True}),
    "tied llama, checkpointing": ("llama-tied", {"gradient_checkpointing": True}),
    "gpt2 in bfloat16": ("gpt2", {"bf16": True}),
    "t5, accumulation": ("t5", {"gradient_accumulation_steps": 2}),
    "8-bit optimizer": ("llama", {"optim": "adamw_bnb_8bit"}),
    "lora": (trained.lora, {}),
    "vit": (trained.vit, {}),
    "masked": ("gpt2", {"bf16": True}),
}

found = {}
for name, (family, settings) in SET_UPS.items():
    rows = trained.images() if name == "vit" else trained.texts(padded=False)
    if name == "masked":
        rows = [{**row, "attention_mask": torch.ones(16, dtype=torch.long)} for row in rows]
    gc.collect()
    torch.cuda.empty_cache()
    with events.recorded_events() as happened, phases.peaks_by_phase() as peaks:
        build = family if callable(family) else lambda kind=family: language_models.build(kind)
        trained.train(build, rows, Path(tempfile.mkdtemp()), **settings)
    found[name] = {
        "peaks": {phase: (peak.allocated_bytes, peak.reserved_bytes) for phase, peak in peaks.items()},
        "events": [(event.kind, event.requested_bytes) for event in happened],
    }
print(json.dumps(found))
