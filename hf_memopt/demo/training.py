"""The demo's model, the four set-ups of the stock ``Trainer`` that it compares, and the figures of one of them.

All four start from the same weights and share examples, examples per optimizer step, learning rate schedule, epochs
and seed. Timed is ``trainer.train()`` and nothing else: data loading, collation, forward, backward, optimizer and the
Trainer's own work. Not timed: imports, tokenisation, building model and Trainer, and the evaluation, which is the same
code for all set-ups.

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
from datasets import Dataset
from torch.profiler import ProfilerActivity
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from hf_memopt.demo.docstring_task import MAX_LENGTH_TOKENS, DocstringTask
from hf_memopt.devices import accelerator_type, choose_precision
from hf_memopt.memory import estimate_from_arguments
from hf_memopt.memory.run import MemoryReportCallback
from hf_memopt.recipes import recipe
from hf_memopt.techniques.optimizers import optimizer_state_bytes

BATCH_SIZE = 32
HYPERPARAMETERS = {"learning_rate": 1e-3, "warmup_steps": 0.1, "lr_scheduler_type": "linear"}
CPU_MODEL = {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512}
GPU_MODEL = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}


# ---- The model and the four set-ups ---------------------------------------------------------------------------------


def model_config(vocabulary_tokens: int, labels: Sequence[str], sizes: Mapping[str, int]) -> BertConfig:
    """Return the configuration of the demo's BERT; ``sizes`` replace those chosen for the machine."""
    suitable = CPU_MODEL if accelerator_type() == "cpu" else GPU_MODEL
    fields: dict[str, Any] = {**suitable, **sizes}
    return BertConfig(
        vocab_size=vocabulary_tokens,
        max_position_embeddings=MAX_LENGTH_TOKENS,
        type_vocab_size=1,
        initializer_range=0.7 / fields["hidden_size"] ** 0.5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **fields,
    )


def build_model(config: BertConfig, seed: int) -> BertForSequenceClassification:
    """Return the model with weights drawn from ``seed``, the same for every set-up.

    BERT's standard deviation of 0.02 for all weights suits a width of 768. In a narrow model it makes the outputs of
    linear layers very small, and the position embeddings as large as those of the words, so that an epoch of 125 steps
    learns next to nothing. Here linear layers get a deviation that fits their width (``initializer_range``), word
    embeddings 0.02, position and token type embeddings 0.
    """
    torch.manual_seed(seed)
    model = BertForSequenceClassification(config)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.02)
    torch.nn.init.zeros_(model.bert.embeddings.position_embeddings.weight)
    torch.nn.init.zeros_(model.bert.embeddings.token_type_embeddings.weight)
    return model


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
    ``"stock_best"`` is the fastest that stock has: grouped by length, padded to the longest row, native precision,
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
    options = {**arguments, "effective_batch_size": BATCH_SIZE}
    return chosen.trainer(train_dataset=dataset, training_arguments=options, **given)


# ---- One set-up -----------------------------------------------------------------------------------------------------


def run_setup(folder: Path, setup: str, *, seed: int, epochs: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Train one set-up and return its figures; ``memopt`` also saves model and tokenizer in ``folder/model``.

    Args:
        folder: holds ``task.json`` and ``tokenizer`` as ``run.prepare`` wrote them.
        setup: as for ``trainer_of``.
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
    model = build_model(config, seed)
    trainer = trainer_of(setup, model, tokenizer, task.train_texts, task.train_labels, arguments)
    figures = {"settings": settings_text(trainer.args), **measure(trainer)}
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
        del trainer, model
        figures["measured_peak_bytes"] = _profiled_peak_bytes(setup, config, tokenizer, arguments)
    return figures


def settings_text(args: TrainingArguments) -> str:
    """Return the precision, the optimizer and how a step is divided, as the Trainer has them."""
    parts = ["bf16" if args.bf16 else "fp16" if args.fp16 else "fp32", str(getattr(args.optim, "value", args.optim))]
    if args.gradient_accumulation_steps > 1:
        parts.append(f"{args.gradient_accumulation_steps} accumulation steps of {args.per_device_train_batch_size}")
    return ", ".join([*parts, *(["checkpointing"] if args.gradient_checkpointing else [])])


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
        trainer = trainer_of(setup, build_model(config, seed=0), tokenizer, texts, [0] * len(texts), arguments)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    changes = (event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"]))
    return max(itertools.accumulate(changes), default=0)


@torch.no_grad()
def predict_labels(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch_size: int = 64
) -> list[int]:
    """Return the number of the predicted label of each text, in the order of ``texts``."""
    predicted: dict[int, int] = {}
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    model.eval()  # type: ignore[no-untyped-call]
    for start in range(0, len(texts), batch_size):
        rows = by_length[start : start + batch_size]
        batch = tokenizer([texts[row] for row in rows], truncation=True, padding=True, return_tensors="pt")
        predicted |= zip(rows, model(**batch.to(model.device)).logits.argmax(-1).tolist(), strict=True)
    return [predicted[row] for row in range(len(texts))]
