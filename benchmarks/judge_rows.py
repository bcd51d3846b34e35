"""The rows of ``judge.py``: what a set-up means for ``estimate`` and for a real run.

A row has the words of ``estimate`` and ``StepSettings``; beside them ``family``, ``capability``, ``adapters`` and
``prepare``: who adds the adapters, and who prepares a quantised model ("ours" or "peft"); PEFT's ``target_modules``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LISTED: Row = json.loads((Path(__file__).parent / "judge_set_ups.json").read_text(encoding="utf-8"))
SET_UPS: dict[str, Row] = {row["name"]: row for row in LISTED["set_ups"]}
GPUS = {"7.5": "T4", "8.6": "RTX 3090", "8.9": "RTX 4090"}  # by compute capability; no row fills one
_OF_THE_ROW = ("name", "family", "model", "capability", "adapters", "prepare", "lora", "target_modules")
_PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "sequence-classification": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM"}


def config_of(row: Row) -> Any:
    """Return a well-known model's name, or the configuration that the list itself has."""
    own = LISTED["models"].get(row["model"])
    if own is None:
        return row["model"]
    from transformers import AutoConfig

    return AutoConfig.for_model(own["model_type"], **own["config"])


def adapters_of(row: Row) -> Any:
    """Return the rank where this package adds the adapters, else the configuration that users give PEFT."""
    if row.get("adapters") != "peft":
        return row.get("lora")
    from peft import LoraConfig

    from hf_memopt.prediction.memory.models import known_models

    task = row.get("task") or known_models()[row["model"]]["task"]
    targets = row.get("target_modules", "all-linear")
    return LoraConfig(r=row["lora"], target_modules=targets, task_type=_PEFT_TASKS.get(task))


def estimate_row(row: Row) -> Any:
    """Return the estimate of the row, by the public function."""
    import hf_memopt

    settings = {"padding": False, **{name: value for name, value in row.items() if name not in _OF_THE_ROW}}
    if "prepare" in row:
        settings["prepare"] = (hf_memopt.prepare_quantized,) if row["prepare"] == "ours" else "peft"
    return hf_memopt.estimate(config_of(row), gpu=GPUS[row["capability"]], lora=adapters_of(row), **settings)
