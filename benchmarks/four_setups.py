"""One training on real text with four set-ups of the stock ``Trainer``, side by side: speed, memory, accuracy.

(a) naive, (b) stock at its best, (c) what ``recipe("auto")`` chooses, (d) the preset for the smallest GPUs; each in a
process of its own. All four start from the same weights and share examples, examples per optimizer step, learning rate
schedule, epochs and seed. Timed is ``trainer.train()`` and nothing else: data loading, collation, forward, backward,
optimizer and the Trainer's own work. Not timed: imports, tokenisation, building model and Trainer, and the evaluation,
which is the same code for all set-ups.

The predicted peak is the estimate of a step with a full micro-batch of 256 tokens. On an accelerator the measured peak
is that of the timed run. On a CPU torch's profiler reads it; that slows a step down, so it is measured in two steps
after the timed run, with micro-batches of exactly the predicted shape.

    python benchmarks/four_setups.py [--seed N] [--max-train N]
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from demo_task import HYPERPARAMETERS, MAX_LENGTH_TOKENS, build_model, predict_labels, prepare, prepared, versions
from fresh_process import in_fresh_process
from results_file import MACHINE, RESULTS
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from hf_memopt import attach, bucketed, estimate_from_arguments
from hf_memopt.prediction.memory.run import MemoryReportCallback
from hf_memopt.prediction.recipes import recipe
from hf_memopt.training.binding import checkpointing_of
from hf_memopt.training.devices import accelerator_type, choose_precision
from hf_memopt.training.techniques.optimizers import optimizer_state_bytes

FILE = RESULTS / "four-setups-cpu-2core.json"
BATCH_SIZE = 32
MODEL = {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512}
GPU_MODEL = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
TITLES = {
    "baseline": "(a) naive",
    "stock_best": "(b) plain Trainer at its best",
    "memopt": "(c) hf_memopt",
    "memory_saver": "(d) memory saver",
}
SUMMARIES = {
    "baseline": "every text padded to 256 tokens",
    "stock_best": "group_by_length, padded to the longest text",
    "memopt": 'recipe("auto"), bucketed',
    "memory_saver": 'recipe("4gb-gpu"), bucketed',
}
HEADINGS = ("(a)\nnaive", "(b)\nstock", "(c)\nmemopt", "(d)\nsaver")


Figures = Mapping[str, Mapping[str, Any]]


def trainer_of(
    setup: str,
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    labels: Sequence[int],
    arguments: Mapping[str, Any],
) -> Trainer:
    """Return the Trainer of a set-up.

    ``"baseline"`` is what many scripts do: every text padded to the maximum, 32-bit floats, the Trainer's defaults.
    ``"stock_best"`` is the fastest that stock has: grouped by length, padded to the longest text, native precision,
    fused AdamW; its rows are plain dicts in a list, since of a ``datasets.Dataset`` the sampler reads the lazy
    ``length`` column example by example (170 times slower at 100,000 examples). ``"memopt"`` is what
    ``recipe("auto")`` chooses for this machine, ``"memory_saver"`` the preset for the smallest GPUs.
    """
    encoded = tokenizer(list(texts), truncation=True, padding="max_length" if setup == "baseline" else False)
    dataset = Dataset.from_dict({**encoded, "labels": labels})
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    if setup == "baseline":
        args = TrainingArguments(**arguments, per_device_train_batch_size=BATCH_SIZE)
        return Trainer(args=args, train_dataset=dataset, **given)
    on_cpu = accelerator_type() == "cpu"
    if setup == "stock_best":
        precision = choose_precision()
        args = TrainingArguments(
            **arguments,
            per_device_train_batch_size=BATCH_SIZE,
            train_sampling_strategy="group_by_length",
            optim="adamw_torch_fused",
            bf16=precision.bf16,
            fp16=precision.fp16,
            use_cpu=precision.bf16 and on_cpu,  # stock requires it for bf16 on a CPU
        )
        collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
        return Trainer(args=args, train_dataset=dataset.to_list(), data_collator=collator, **given)
    chosen = recipe("auto" if setup == "memopt" else "4gb-gpu")
    if setup == "memory_saver" and on_cpu:
        chosen = chosen.replace(optim="adamw_8bit")  # a paged optimizer moves state from a GPU to the host
    options = {**arguments, "effective_batch_size": BATCH_SIZE, "train_sampling_strategy": "sequential"}
    args = chosen.training_arguments(**options)
    size, multiple = args.per_device_train_batch_size, chosen.pad_to_multiple_of
    view = bucketed(dataset, batch_size=size, pad_to_multiple_of=multiple)
    collator, callbacks = chosen.collator(tokenizer), chosen.callbacks()
    return attach(Trainer(args=args, train_dataset=view, data_collator=collator, callbacks=callbacks, **given))


def settings_text(args: TrainingArguments) -> str:
    """Return the precision, the optimizer and how a step is divided, as the Trainer has them."""
    parts = ["bf16" if args.bf16 else "fp16" if args.fp16 else "fp32", str(getattr(args.optim, "value", args.optim))]
    if args.gradient_accumulation_steps > 1:
        parts.append(f"{args.gradient_accumulation_steps} accumulation steps of {args.per_device_train_batch_size}")
    return ", ".join([*parts, *(["checkpointing"] if checkpointing_of(args)[0] else [])])


# ---- One set-up -----------------------------------------------------------------------------------------------------


def run_setup(folder: str, setup: str, seed: int) -> dict[str, Any]:
    """Train one set-up and return its figures; called in a fresh process, with what the demo prepares in ``folder``."""
    task, tokenizer = prepared(Path(folder))
    sizes = MODEL if accelerator_type() == "cpu" else GPU_MODEL
    arguments = {
        **HYPERPARAMETERS,
        "output_dir": str(Path(folder) / "trainer"),
        "num_train_epochs": 1,
        "seed": seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 0,  # the tokens are counted in this process
        "dataloader_pin_memory": torch.accelerator.is_available(),
    }
    model = build_model(len(tokenizer), task.labels, sizes, seed=seed)
    config = model.config
    trainer = trainer_of(setup, model, tokenizer, task.train_texts, task.train_labels, arguments)
    figures = {"settings": settings_text(trainer.args), **measure(trainer)}
    # Without autocast, which accelerate leaves in forward: the accuracy is that of a reloaded model.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    predicted = predict_labels(model, tokenizer, task.test_texts)
    hits = sum(one == other for one, other in zip(predicted, task.test_labels, strict=True))
    figures |= {"accuracy": hits / len(predicted), "test_texts": len(predicted)}
    figures |= predicted_peaks(config, trainer)
    if accelerator_type() == "cpu":
        del trainer, model
        figures["measured_peak_bytes"] = _profiled_peak_bytes(setup, config, tokenizer, arguments)
    return figures


class TokenCounter:
    """Count the real and the padded tokens that a collator returns."""

    def __init__(self, collator: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.data_collator = collator  # the name by which stock wraps one, so that what is inside is seen
        self.examples = self.real_tokens = self.padded_tokens = 0

    def __call__(self, features: list[Any]) -> Any:
        batch = self.data_collator(features)
        mask = batch["attention_mask"]  # (batch, seq)
        self.examples += mask.shape[0]
        self.real_tokens += int(mask.sum())
        self.padded_tokens += mask.numel()
        return batch


def measure(trainer: Trainer) -> dict[str, Any]:
    """Train and return the figures of the run; the measured peaks are None where torch counts none (CPU, MPS)."""
    # the report that the trainer has, or a new one: two would reset each other's peaks
    memory: Any = trainer.pop_callback(MemoryReportCallback) or MemoryReportCallback()
    trainer.add_callback(memory)
    counter = TokenCounter(trainer.data_collator)
    trainer.data_collator = counter
    _synchronize()
    started = time.perf_counter()
    trainer.train()
    _synchronize()
    seconds = time.perf_counter() - started
    phases = memory.summary.values()
    optimizer: Any = trainer.optimizer
    state_bytes = optimizer_state_bytes(optimizer)
    return {
        "seconds": seconds,
        "examples": counter.examples,
        "examples_per_second": counter.examples / seconds,
        "real_tokens_per_second": counter.real_tokens / seconds,
        "padding_efficiency": counter.real_tokens / counter.padded_tokens,
        "optimizer_state_bytes": sum(state_bytes.values()),
        "optimizer_state_bytes_by_dtype": state_bytes,
        "measured_peak_bytes": max((phase.get("peak_allocated_bytes", 0) for phase in phases), default=0) or None,
        "measured_reserved_bytes": max((phase.get("peak_reserved_bytes", 0) for phase in phases), default=0) or None,
    }


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


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
        trainer = trainer_of(
            setup,
            build_model(len(tokenizer), [*config.label2id], sizes=MODEL),
            tokenizer,
            texts,
            [0] * len(texts),
            arguments,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    changes = (event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"]))
    return max(itertools.accumulate(changes), default=0)


# ---- Results


def print_results(figures: Figures, console: Console) -> None:
    """Print what each set-up is, the table and the conclusions; only the text wraps in a narrow terminal."""
    console.print(setups_text(figures))
    console.print()
    console.print(figures_table(figures))
    for line in conclusions(figures):
        console.print(f"\n{line}")


def setups_text(figures: Figures) -> str:
    """Return a line for each set-up: how it batches, and its settings as the Trainer had them."""
    return "\n".join(f"{TITLES[name]}: {SUMMARIES[name]}; {figures[name]['settings']}" for name in TITLES)


def figures_table(figures: Figures) -> Table:
    """Return the figures of the set-ups side by side, at most 60 columns wide; bytes in MiB."""
    from rich import box

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in ("", *HEADINGS):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def row(label: str, key: str, form: Callable[[Any], str] = _number) -> None:
        table.add_row(label, *("-" if (value := figures[name][key]) is None else form(value) for name in TITLES))

    row("training, seconds", "seconds")
    row("examples/s", SPEED)
    row("real tokens/s", "real_tokens_per_second", "{:,.0f}".format)
    row("padding efficiency", "padding_efficiency", "{:.3f}".format)
    row("optimizer state, MiB", STATE, _mebibytes)
    by_dtype = "optimizer_state_bytes_by_dtype"
    for dtype in sorted({dtype for f in figures.values() for dtype in f[by_dtype]}):
        row(f"  {dtype}", by_dtype, lambda sizes, dtype=dtype: _mebibytes(sizes.get(dtype, 0)))  # type: ignore[misc]
    row("peak predicted, MiB", "predicted_peak_bytes", _mebibytes)
    row("peak measured, MiB", PEAK, _mebibytes)
    if not _on_cpu(figures):
        row("reserved predicted, MiB", "predicted_reserved_bytes", _mebibytes)
        row("reserved measured, MiB", "measured_reserved_bytes", _mebibytes)
    row("accuracy", "accuracy", "{:.3f}".format)
    return table


def conclusions(figures: Figures) -> list[str]:
    """Return what the table says: (c) against stock at its best, then against naive, then (d), then the limits."""
    naive, stock, ours, saver = (figures[name] for name in TITLES)
    texts = ours["test_texts"]
    error = (ours["accuracy"] * (1 - ours["accuracy"]) / texts) ** 0.5
    lines = [
        _comparison("(c)", ours, "(b), the plain Trainer at its best", stock),
        _comparison("(c)", ours, "(a), naive", naive),
        f"{_comparison('(d)', saver, '(b)', stock)} Its optimizer state is {_ratio(saver, stock, STATE)} that of (b).",
        f"group_by_length in (b) sorts up to 50 batches at a time from long to short texts: accuracy "
        f"{stock['accuracy']:.3f}. (c) and (d) also batch texts of similar length, but take the batches in random "
        f"order: accuracy {ours['accuracy']:.3f} and {saver['accuracy']:.3f}. This is one seed; the standard error of "
        f"an accuracy is {error:.3f} ({texts} unseen texts).",
    ]
    return lines + ([*NOTES_ON_A_CPU] if _on_cpu(figures) else [])


NOTES_ON_A_CPU = (
    "Peaks count weights, gradients, optimizer state and activations of a step with 256 tokens per text. They are "
    "measured in torch's allocator, apart from the timed run. The prediction is made for a GPU: its matrix workspaces "
    "are subtracted, its reduction buffers are not.",
    "The 8-bit optimizer of bitsandbytes is written for GPUs; on a CPU its step is much slower than the fused one.",
)
STATE, PEAK, SPEED = "optimizer_state_bytes", "measured_peak_bytes", "examples_per_second"


def _mebibytes(size_bytes: int) -> str:
    return _number(size_bytes / 2**20)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _comparison(name: str, one: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> str:
    memory = f", {_ratio(one, other, PEAK)} the peak memory" if one[PEAK] and other[PEAK] else ""
    return (
        f"{name} against {other_name}: {_ratio(one, other, SPEED)} the examples per second{memory}, accuracy "
        f"{one['accuracy']:.3f} against {other['accuracy']:.3f}."
    )


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> str:
    return f"{one[key] / other[key]:.2f}x"


def _on_cpu(figures: Figures) -> bool:
    return all(f["predicted_reserved_bytes"] is None for f in figures.values())


def four_setups(seed: int, max_train: int | None) -> dict[str, Any]:
    """Return the figures of the set-ups, each trained in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), max_train=max_train)
        found: dict[str, Any] = {name: in_fresh_process(run_setup, folder, name, seed) for name in TITLES}
    return {**found, "versions": versions()}


def table(figures: dict[str, Any]) -> str:
    """Return the table as it is printed, with what it ran on."""
    printed = io.StringIO()
    print_results({name: figures[name] for name in TITLES}, Console(file=printed, width=100, record=False))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    of = ", ".join(f"{name} {version}" for name, version in figures["versions"].items() if name != "device")
    return "\n".join(["```text", *lines, "```", "", f"On {MACHINE}; {of}."])


def stored_table() -> str:
    """Return the table of the stored figures."""
    return table(json.loads(FILE.read_text(encoding="utf-8")))


def main() -> None:
    """Train, print the table, store the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--max-train", type=int, default=None, metavar="N", help="with fewer texts nothing is stored")
    options = parser.parse_args()
    figures = four_setups(options.seed, options.max_train)
    print(table(figures))
    if options.max_train is None:
        FILE.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
