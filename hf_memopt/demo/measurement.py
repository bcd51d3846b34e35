"""Train one set-up of the demo and return its figures: time, padding, optimizer state, memory peaks and accuracy.

Timed is ``trainer.train()`` and nothing else: data loading, collation, forward, backward, optimizer and the Trainer's
own work. Not timed: imports, tokenisation, building model and Trainer, and the evaluation, which is the same code for
all set-ups.

The predicted peak is the estimate of a step with a full micro-batch of 256 tokens. On an accelerator the measured peak
is that of the timed run. On a CPU torch's profiler reads it; that slows a step down, so it is measured in two steps
after the timed run, with micro-batches of exactly the predicted shape.
"""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_memopt.demo.docstring_task import MAX_LENGTH_TOKENS, DocstringTask
from hf_memopt.demo.setups import BATCH_SIZE, HYPERPARAMETERS, SETUPS, Ingredients, build_model, model_config
from hf_memopt.devices.precision_support import accelerator_type
from hf_memopt.memory.estimation import estimate_from_arguments
from hf_memopt.memory.report import MemoryReportCallback
from hf_memopt.techniques.optimizers.embedding_bits import optimizer_state_bytes

__all__ = ["OptimizerClock", "measure", "predict_labels", "run_setup"]


def run_setup(folder: Path, setup: str, *, seed: int, epochs: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Train one set-up and return its figures; ``memopt`` also saves model and tokenizer in ``folder/model``.

    Args:
        folder: holds ``task.json`` and ``tokenizer`` as ``run.prepare`` wrote them.
        setup: a key of ``SETUPS``.
        seed: of weights and order.
        epochs: passes over the training texts.
        sizes: fields of the configuration that replace the size chosen for the machine.
    """
    task = DocstringTask(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = model_config(len(tokenizer), task.labels, sizes)
    arguments = {
        **HYPERPARAMETERS,
        "output_dir": str(folder / "trainer"),
        "num_train_epochs": epochs,
        "seed": seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 0,  # the tokens are counted in this process
        "dataloader_pin_memory": torch.accelerator.is_available(),
    }
    clock = OptimizerClock()
    given = Ingredients(
        build_model(config, seed), tokenizer, list(task.train_texts), list(task.train_labels), arguments, [clock]
    )
    trainer = SETUPS[setup](given)
    figures = {"settings": settings_text(trainer.args), **measure(trainer, clock)}
    # Without autocast, which accelerate leaves in forward: the accuracy is that of a reloaded model.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    predicted = predict_labels(model, tokenizer, task.test_texts)
    hits = sum(one == other for one, other in zip(predicted, task.test_labels, strict=True))
    if setup == "memopt":
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    figures |= {"accuracy": hits / len(predicted), "test_texts": len(predicted)}
    figures |= predicted_peaks(config, trainer)
    if accelerator_type() == "cpu":
        del trainer, model, given
        figures["measured_peak_bytes"] = _profiled_peak_bytes(setup, config, tokenizer, arguments)
    return figures


def settings_text(args: TrainingArguments) -> str:
    """Return the precision, the optimizer and how a step is divided, as the Trainer has them."""
    parts = ["bf16" if args.bf16 else "fp16" if args.fp16 else "fp32", str(getattr(args.optim, "value", args.optim))]
    if args.gradient_accumulation_steps > 1:
        parts.append(f"{args.gradient_accumulation_steps} accumulation steps of {args.per_device_train_batch_size}")
    return ", ".join([*parts, *(["checkpointing"] if args.gradient_checkpointing else [])])


# ---- Time and padding -----------------------------------------------------------------------------------------------


class OptimizerClock(TrainerCallback):
    """Add up the seconds of ``optimizer.step()``; on an accelerator the queue is emptied before and after it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.state_bytes: dict[str, int] = {}
        self._started = 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self._started = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self.seconds += time.perf_counter() - self._started

    def on_train_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self.state_bytes = optimizer_state_bytes(optimizer)


class ProgressBar(ProgressCallback):
    """The Trainer's progress bar without its line of metrics at the end, which wraps in a terminal."""

    def on_log(self, *_: Any, **__: Any) -> None:
        pass


class TokenCounter:
    """Count the real and the padded tokens that a collator returns."""

    def __init__(self, collator: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.collator = collator
        self.examples = self.real_tokens = self.padded_tokens = 0

    def __call__(self, features: list[Any]) -> Any:
        batch = self.collator(features)
        mask = batch["attention_mask"]  # (batch, seq)
        self.examples += mask.shape[0]
        self.real_tokens += int(mask.sum())
        self.padded_tokens += mask.numel()
        return batch


def measure(trainer: Trainer, clock: OptimizerClock) -> dict[str, Any]:
    """Train and return the figures of the run; the measured peaks are None where torch counts none (CPU, MPS)."""
    # the report that the trainer has, or a new one: two would reset each other's peaks
    memory: Any = trainer.pop_callback(MemoryReportCallback) or MemoryReportCallback()
    trainer.add_callback(memory)
    counter = TokenCounter(trainer.data_collator)
    trainer.data_collator = counter
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ProgressBar)
    _synchronize()
    started = time.perf_counter()
    trainer.train()
    _synchronize()
    seconds = time.perf_counter() - started
    phases = memory.summary.values()
    return {
        "seconds": seconds,
        "optimizer_seconds": clock.seconds,
        "examples": counter.examples,
        "examples_per_second": counter.examples / seconds,
        "real_tokens_per_second": counter.real_tokens / seconds,
        "padding_efficiency": counter.real_tokens / counter.padded_tokens,
        "optimizer_state_bytes": sum(clock.state_bytes.values()),
        "optimizer_state_bytes_by_dtype": clock.state_bytes,
        "measured_peak_bytes": max((phase.get("peak_allocated_bytes", 0) for phase in phases), default=0) or None,
        "measured_reserved_bytes": max((phase.get("peak_reserved_bytes", 0) for phase in phases), default=0) or None,
    }


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# ---- Memory peaks ---------------------------------------------------------------------------------------------------


def predicted_peaks(config: BertConfig, trainer: Trainer) -> dict[str, int | None]:
    """Return the estimated peaks of a step with micro-batches of ``MAX_LENGTH_TOKENS`` under the trainer's settings.

    On a CPU the workspaces of a GPU's matrix multiplications are subtracted and nothing is reserved. What remains of a
    GPU are the buffers of its reductions, at most 12 MiB here, which a CPU does not allocate.
    """
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    handler = trainer.accelerator.autocast_handler
    cached = handler is None or handler.cache_enabled
    found = estimate_from_arguments(model, trainer.args, MAX_LENGTH_TOKENS, autocast_cache=bool(cached))
    on_cpu = accelerator_type() == "cpu"
    return {
        "predicted_peak_bytes": found.peak_allocated_bytes - (found.components["workspace"] if on_cpu else 0),
        "predicted_reserved_bytes": None if on_cpu else found.peak_reserved_bytes,
    }


def _profiled_peak_bytes(
    setup: str, config: BertConfig, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]
) -> int:
    """Return the peak bytes of torch's allocator on the CPU, from a new model to the end of two optimizer steps.

    Two steps, because the optimizer allocates its state in the first. The texts are 250 tokens long, and every set-up
    pads them to 256: batches of real texts contain padding too, so that attention needs a mask.
    """
    texts = ["." * (MAX_LENGTH_TOKENS - 6 - 2)] * (2 * BATCH_SIZE)  # a token each, with [CLS] and [SEP]
    arguments = {**arguments, "num_train_epochs": 1, "disable_tqdm": True}
    gc.collect()  # nothing of the timed run may be freed while the profiler counts
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        model = build_model(config, seed=0)
        trainer = SETUPS[setup](Ingredients(model, tokenizer, texts, [0] * len(texts), arguments, []))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    changes = (event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"]))
    return max(itertools.accumulate(changes), default=0)


# ---- Accuracy -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict_labels(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch_size: int = 64
) -> list[int]:
    """Return the number of the predicted label of each text, in the order of ``texts``."""
    encoded = tokenizer(list(texts), truncation=True)
    by_length = sorted(range(len(texts)), key=lambda i: len(encoded["input_ids"][i]))
    predicted = [0] * len(texts)
    model.eval()  # type: ignore[no-untyped-call]
    for start in range(0, len(texts), batch_size):
        rows = by_length[start : start + batch_size]
        batch = tokenizer.pad({key: [values[i] for i in rows] for key, values in encoded.items()}, return_tensors="pt")
        for i, label in zip(rows, model(**batch.to(model.device)).logits.argmax(-1).tolist(), strict=True):
            predicted[i] = label
    return predicted
