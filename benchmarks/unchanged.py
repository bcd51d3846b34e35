"""Whether estimates and plans are those of an earlier commit, byte for byte: python benchmarks/unchanged.py

Estimates 120 pairs of model and set-up and plans 63 pairs of model and GPU, and compares every figure with the file in
``benchmarks/results/``. Exit code 1 where one differs; a plan may differ if it leaves no less room and is within 5 % as
fast, which is counted apart. Thirty minutes on two CPU cores; no GPU is needed.

python benchmarks/unchanged.py --write           # store the figures of this commit; goes on where it stopped
python benchmarks/unchanged.py --only 'plan*'    # some of them
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import results_file
from plans import LARGEST_CELLS, MODEL_CELLS, Cell, planned

from hf_memopt import Estimate, Plan, estimate, plan
from hf_memopt.gpus import GPUS

FILE = results_file.RESULTS / "unchanged.jsonl"
SAME_SPEED = 0.95

MODELS: Mapping[str, int | None] = {
    "bert-base-uncased": 128,
    "bert-large-uncased": 512,
    "roberta-base": 256,
    "distilbert-base-uncased": 256,
    "deberta-v3-base": 256,
    "albert-base-v2": 256,
    "ModernBERT-base": 512,
    "vit-base-patch16-224": None,
    "whisper-small": None,
    "t5-base": 256,
    "flan-t5-large": 256,
    "gpt2": 512,
    "gpt2-xl": 512,
    "gpt-neo-125m": 256,
    "pythia-410m": 256,
    "phi-2": 512,
    "Phi-4-mini-instruct": 512,
    "Qwen2.5-0.5B": 1024,
    "Qwen2.5-1.5B": 1024,
    "Qwen3-0.6B": 1024,
    "gemma-2-2b": 512,
    "gemma-3-1b-pt": 1024,
    "gemma-3-4b-pt": 1024,
    "Llama-3.2-1B": 1024,
    "Llama-3.1-8B": 1024,
    "Mistral-7B-v0.3": 1024,
    "SmolLM2-360M": 1024,
    "granite-3.1-2b-base": 512,
    "OLMo-2-0425-1B": 512,
    "Mixtral-8x7B-v0.1": 256,
}
COMMON: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bf16, checkpointing": {"precision": "bf16", "checkpointing": True},
    "8-bit, accumulation, evaluation": {
        "precision": "bf16",
        "optim": "adamw_8bit",
        "gradient_accumulation_steps": 4,
        "eval_batch_size": 8,
    },
}
IN_TURN: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"lora": 16, "weights_dtype": "bfloat16", "precision": "bf16", "checkpointing": True},
    "QLoRA": {"lora": 16, "load_in": "nf4", "precision": "bf16"},
    "every 2nd layer, paged": {
        "precision": "fp16",
        "checkpointing": {"every_n_layers": 2},
        "optim": "paged_adamw_32bit",
    },
    "released, 16-bit weights": {
        "weights_dtype": "bfloat16",
        "rounding": "stochastic",
        "optim": "adamw_8bit",
        "gradient_release": True,
        "max_grad_norm": 0.0,
    },
    "frozen, segments": {"precision": "bf16", "freeze": ("embeddings",), "expandable_segments": True},
    "offload": {"precision": "bf16", "checkpointing": {"offload": True}, "optim": "adafactor"},
    "parts, unclipped": {"precision": "bf16", "micro_batch_size": 2, "max_grad_norm": 0.0},
    "lengths": {"precision": "tf32", "padding": True},
}
OTHER_PLANS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("bert-large-uncased", "RTX 3050 4GB", {"seq_len": 256, "goal": "memory"}),
    ("bert-base-uncased", "GTX 1650", {"seq_len": 128}),
    ("distilbert-base-uncased", "RTX 3050 4GB", {"seq_len": 256, "method": "full"}),
    ("roberta-base", "RTX 4090", {"seq_len": 512, "effective_batch_size": 64}),
    ("deberta-v3-base", "T4", {"seq_len": 256}),
    ("gpt2", "RTX 3050 4GB", {"seq_len": 512}),
    ("gpt2-xl", "RTX 3090", {"seq_len": 512, "method": "full"}),
    ("t5-base", "T4", {"seq_len": 256, "method": "freeze", "allow": ("freeze",)}),
    ("Qwen2.5-0.5B", "RTX 3060 12GB", {"seq_len": 512, "method": "lora"}),
    ("Qwen2.5-0.5B", "T4", {"seq_len": 1024, "goal": "longest", "effective_batch_size": 1}),
    ("Qwen3-0.6B", "RTX 4060", {"seq_len": 512, "allow": ("freeze",)}),
    ("Llama-3.2-1B", "RTX 4060", {"seq_len": 512, "method": "qlora"}),
    ("Llama-3.2-1B", "A100 40GB", {"seq_len": 1024, "method": "full"}),
    ("gemma-3-1b-pt", "RTX 3090", {"seq_len": 512}),
    ("gemma-2-2b", "T4", {"seq_len": 512, "method": "qlora"}),
    ("Mistral-7B-v0.3", "RTX 3090", {"seq_len": 512, "method": "lora"}),
    ("Llama-3.1-8B", "RTX 4060", {"seq_len": 512, "method": "full"}),
    ("Llama-3.1-8B", "RTX 3090", {"seq_len": 2048, "method": "qlora", "effective_batch_size": 4}),
    ("Llama-3.2-3B", "RTX 3090", {"seq_len": 512, "effective_batch_size": 16}),
    ("vit-base-patch16-224", "T4", {"effective_batch_size": 128}),
)


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield every question with what answers it."""
    for place, (model, seq_len) in enumerate(MODELS.items()):
        in_turn = list(IN_TURN)[place % len(IN_TURN)]
        for name, settings in {**COMMON, in_turn: IN_TURN[in_turn]}.items():
            yield f"estimate {model}, {name}", lambda m=model, s=seq_len, k=settings: _estimated(m, s, k)
    for cell in (*MODEL_CELLS, *LARGEST_CELLS):
        consents = ", allowed" if cell.allow else ""
        yield f"plan {cell.model}, {cell.gpu}{consents}", lambda c=cell: _of_plan(planned(Cell(**vars(c))))
    for number, (model, gpu, more) in enumerate(OTHER_PLANS):
        yield (
            f"plan {number} {model}, {gpu}",
            lambda m=model, g=gpu, k=more: _of_plan(plan(m, gpu=GPUS[g], host_memory=0, **k)),
        )


def _estimated(model: str, seq_len: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    lengths = {} if seq_len is None else {"seq_len": seq_len}
    found = estimate(model, batch_size=4, gpu=GPUS["RTX 4090"], **lengths, **settings)
    return _of_estimate(found)


def _of_estimate(found: Estimate) -> dict[str, Any]:
    seconds = found.step_time
    told = {
        "total_bytes": found.total_bytes,
        "allocated_bytes": found.peak_allocated_bytes,
        "host_bytes": found.host_bytes,
        "parameters": [found.parameters, found.trainable_parameters],
        "flops": found.flops,
        "at": [found.phase, found.module],
        "components": found.components,
        "seconds": None if seconds is None else [seconds.seconds, seconds.low, seconds.high],
        "time_unknown": found.time_unknown,
        "notes": list(found.notes),
    }
    timeline = hashlib.sha256(repr(found.timeline).encode()).hexdigest()[:16]
    return {**told, "timeline": timeline}


def _of_plan(found: Plan) -> dict[str, Any]:
    one = found.chosen
    if one is None:
        near = found.shortfall.nearest if found.shortfall else None
        return {"chosen": None, "missing_bytes": None if near is None else -near.spare_bytes}
    return {
        "chosen": one.name,
        "batch": one.batch,
        "seq_len": one.seq_len,
        "total_bytes": one.total_bytes,
        "seconds_per_example": one.cost,
        "simulations": found.simulations,
    }


def answer(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures, or the error's words, and the CPU seconds that they took."""
    before = _cpu_seconds()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = ask()
    except Exception as error:  # what is refused has to be refused in the same words
        told = {"error": f"{type(error).__name__}: {error}"}
    return {"told": json.loads(json.dumps(told)), "cpu_seconds": round(_cpu_seconds() - before, 2)}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return "" for the same answer, "allowed" for another plan that is as good, else what differs."""
    before, after = ({key: value for key, value in told.items() if key != "simulations"} for told in (before, after))
    if before == after:
        return ""
    both_chosen = before.get("chosen") and after.get("chosen")
    if both_chosen and after["seq_len"] == before["seq_len"]:
        is_as_fast = after["seconds_per_example"] * SAME_SPEED <= before["seconds_per_example"]
        if is_as_fast and after["total_bytes"] <= before["total_bytes"]:
            return f"allowed: {after['chosen']}, {after['batch']} for {before['chosen']}, {before['batch']}"
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return "; ".join(f"{key} {before.get(key)!r:.90} -> {after.get(key)!r:.90}" for key in keys)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _read(path: Path) -> dict[str, dict[str, Any]]:
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {row.pop("case"): row for row in rows}


def main(arguments: list[str] | None = None) -> int:
    """Compare every case, or store what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name, such as 'estimate gpt2*'")
    parser.add_argument("--write", action="store_true", help="store the figures of cases that the file lacks")
    parser.add_argument("--file", type=Path, default=FILE, help="another file of figures")
    options = parser.parse_args(arguments)
    known = _read(options.file)
    counts = {"same": 0, "allowed": 0, "different": 0}
    seconds = [0.0, 0.0]
    for case, ask in cases():
        if not fnmatch(case, options.only) or (options.write and case in known):
            continue
        row = answer(ask)
        if options.write:
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case, **row}) + "\n")
            print(f"{case}: {row['cpu_seconds']} s", flush=True)
            continue
        what = difference(known[case]["told"], row["told"])
        counts["same" if not what else "allowed" if what.startswith("allowed") else "different"] += 1
        seconds = [seconds[0] + known[case]["cpu_seconds"], seconds[1] + row["cpu_seconds"]]
        if what:
            print(f"{case}: {what}", flush=True)
    if not options.write:
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"{told}; {seconds[1]:.0f} CPU seconds for {seconds[0]:.0f}")
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
