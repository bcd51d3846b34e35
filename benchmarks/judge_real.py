"""The real side of a row of ``judge.py``: the stock ``Trainer``, as users write it, three steps and an evaluation.

python benchmarks/judge_real.py NAME RESULT [EVENTS]  # under a rehearsal; peaks by phase, and all events
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from judge_rows import SET_UPS, Row, adapters_of, config_of

import hf_memopt

if SET_UPS[sys.argv[1]].get("expandable_segments"):
    hf_memopt.use_expandable_segments()  # first: transformers imports bitsandbytes, which starts CUDA

import peft
import torch
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments
from transformers.initialization import no_init_weights

from hf_memopt.prediction.memory.models import example_batch, load_model
from hf_memopt.prediction.rehearsal.events import recorded_events
from hf_memopt.prediction.rehearsal.phases import peaks_by_phase

STEPS = 3
CALLBACKS: dict[str, Any] = {  # by the setting that asks for them, made of its value
    "micro_batch_size": lambda size: hf_memopt.MicrobatchCallback(max_examples=size),
    "fused_cross_entropy": lambda _: hf_memopt.FusedCrossEntropyCallback(),
    "tile_tokens": hf_memopt.TiledLayersCallback,
    "streamed": lambda _: hf_memopt.StreamedLayersCallback(),
    "sparse_tied_embedding": lambda _: hf_memopt.TiedEmbeddingCallback(),
}


def example_of(meta: Any, row: Row) -> Row:
    """Return the example that an estimate assumes, with its values; with padding its end is masked."""
    one = example_batch(meta, batch_size=1, seq_len=row.get("seq_len"), labels_length=row.get("labels_length"))
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            one[name] = torch.zeros(value.shape, dtype=value.dtype) + getattr(value, "known_values", 0)
    if row.get("padding"):
        one["attention_mask"][:, -5:] = 0
    return one


def joined(examples: list[Row]) -> Row:
    """Return a batch; each example has a dimension for its rows, since a picture has many patches."""
    return {
        name: torch.cat([example[name] for example in examples]) if isinstance(value, torch.Tensor) else value
        for name, value in examples[0].items()
    }


def build(row: Row, meta: Any, folder: Path) -> Any:
    """Return the model, with weights that nobody has touched, with its adapters."""
    kind, config, dtype = type(meta), meta.config, getattr(torch, row.get("weights_dtype", "float32"))
    if "load_in" in row:
        dtype = torch.float16 if row["precision"] == "fp16" else torch.bfloat16
    with nullcontext() if "tile_tokens" in row else no_init_weights():
        model = kind._from_config(config, dtype=dtype, attn_implementation=config._attn_implementation)
    model.tie_weights()
    if "load_in" in row:
        model.save_pretrained(folder)
        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        of_kind = hf_memopt.ExpertsConfig if row.get("quantize_experts") else BitsAndBytesConfig
        quantization = of_kind(load_in_4bit=True, **options)
        model = kind.from_pretrained(folder, quantization_config=quantization, device_map={"": 0}, dtype=dtype)
    if row.get("prepare") == "peft":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=row.get("checkpointing", False))
    if row.get("adapters") == "peft":
        model = peft.get_peft_model(model, adapters_of(row))
    elif "lora" in row:
        model = hf_memopt.add_adapters(model, row["lora"])
    if row.get("prepare") == "ours":
        hf_memopt.prepare_quantized(model)
    if "tile_tokens" in row:
        hf_memopt.techniques.tile_layers(
            model, row["tile_tokens"]
        )  # here: on the stand-in its probe would see no values
    if "streamed" in row:
        hf_memopt.stream_layers(model, resident=row.get("resident", 0))
    return model


def trainer_of(row: Row, meta: Any, folder: Path) -> Trainer:
    """Return the Trainer, with the row's techniques attached."""
    rows, evaluated = row["batch_size"], row.get("eval_batch_size", 8)
    accumulation, rounding = row.get("gradient_accumulation_steps", 1), row.get("rounding", "nearest")
    model, example, options = build(row, meta, folder), example_of(meta, row), dict[str, Any]()
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=evaluated,
        max_steps=STEPS,
        gradient_checkpointing=row.get("checkpointing", False),
        bf16=row["precision"] == "bf16",
        fp16=row["precision"] == "fp16",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **{name: row[name] for name in ("optim", "max_grad_norm", "gradient_accumulation_steps") if name in row},
    )
    if row.get("gradient_release"):
        options["optimizer_cls_and_kwargs"] = hf_memopt.low_memory_optimizer(
            args, model, release=True, rounding=rounding
        )
    elif rounding != "nearest":
        options["optimizer_cls_and_kwargs"] = hf_memopt.low_memory_optimizer(args, model, rounding=rounding)
    if row.get("prediction_loss_only") is False:
        options["compute_metrics"] = lambda found: {"rows": float(len(found.label_ids))}
    trainer = Trainer(
        model,
        args,
        train_dataset=[example] * (STEPS * rows * accumulation),
        eval_dataset=[example] * (evaluated * row.get("eval_batches", 1)),
        data_collator=joined,
        **options,
    )
    asked = [make(row[name]) for name, make in CALLBACKS.items() if name in row]
    return hf_memopt.attach(trainer, *asked) if asked else trainer


def run(row: Row) -> Row:
    """Train and evaluate; return the peaks by phase in bytes, (allocated, reserved), and what the run took."""
    started = time.perf_counter()
    given = {name: row[name] for name in ("task", "attn_implementation") if name in row}
    meta = load_model(config_of(row), keep_cache=True, **given).model
    with tempfile.TemporaryDirectory() as folder, peaks_by_phase() as peaks:
        trainer = trainer_of(row, meta, Path(folder))
        trainer.train()
        if "eval_batch_size" in row:
            trainer.evaluate()
        disk_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*"))
    return {
        "phases": {name: (peak.allocated_bytes, peak.reserved_bytes) for name, peak in peaks.items()},
        "allocated_bytes": max(peak.allocated_bytes for peak in peaks.values()),
        "reserved_bytes": max(peak.reserved_bytes for peak in peaks.values()),
        "phase": max(peaks, key=lambda name: peaks[name].allocated_bytes),
        "capability": row["capability"],
        "seconds": round(time.perf_counter() - started, 1),
        "disk_bytes": disk_bytes,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    result, *traced = map(Path, sys.argv[2:])
    with recorded_events() if traced else nullcontext() as events:
        figures = run(SET_UPS[sys.argv[1]])
    for file in traced:
        file.write_bytes(pickle.dumps(events))
    result.write_text(json.dumps(figures), encoding="utf-8")
    os._exit(0)  # without destructors that look for the GPU's libraries
