"""The demo's task trained with five ways of batching, which are all that differs: time and accuracy on unseen texts.

Same weights, examples, seed, optimizer (fused AdamW), learning rate schedule and padding (to the longest row of a
batch, rounded up to a multiple of 8). With a token budget a step has 32 examples on average: the budget is the one that
comes nearest to the steps of the other arms. Its second arm divides the summed loss by 32 instead of by the rows of the
batch, so that every text weighs the same: is it their weight that costs accuracy?
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from fresh_process import in_fresh_process
from results_file import MACHINE, markdown, versions_of

BATCH_SIZE = 32
TITLES = {
    "random": "stock random + dynamic",
    "group_by_length": "stock group_by_length",
    "batch_size": "hf_memopt batch_size=32",
    "max_tokens": "hf_memopt max_tokens=",
    "max_tokens_even": "the same, texts of equal weight",
}


def measure_end_to_end(seeds: int, max_train: int | None) -> dict[str, Any]:
    """Return the figures of every run by arm, in the order of the seeds; the arms of a seed run one after the other."""
    from demo_task import prepare

    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in TITLES}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, max_train=max_train)
        for seed in range(seeds):
            for arm, title in TITLES.items():
                run = in_fresh_process(train, arm, folder, seed)
                print(f"seed {seed}, {title}: {run['seconds']:.1f} s, accuracy {run['accuracy']:.3f}", flush=True)
                runs[arm].append(run)
    return {"runs": runs, "seeds": seeds, "examples": runs["random"][0]["examples"], "arms": _summary(runs)}


def _summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the medians and means of each arm."""
    return {
        arm: {
            "seconds": statistics.median(run["seconds"] for run in of_arm),
            "padding_efficiency": statistics.mean(run["padding_efficiency"] for run in of_arm),
            "accuracy": statistics.mean(run["accuracy"] for run in of_arm),
        }
        for arm, of_arm in runs.items()
    }


def end_to_end_table(row: dict[str, Any]) -> str:
    """Return the demo's task with five ways of batching."""
    figures = row["figures"]["figures"]
    arms = figures["arms"]
    rows = []
    for arm, found in arms.items():
        ratios = (f"{found['seconds'] / arms[other]['seconds']:.2f}x" for other in ("random", "group_by_length"))
        shares = (f"{found[key]:.3f}" for key in ("padding_efficiency", "accuracy"))
        rows.append((TITLES[arm], f"{found['seconds']:.1f}", *ratios, *shares))
    head = "| | seconds per epoch | to random + dynamic | to group_by_length | padding efficiency | accuracy |"
    note = f"{figures['examples']} texts, {figures['seeds']} seeds, on {MACHINE}; {versions_of(row, 'transformers')}."
    return markdown(head, rows, note)


def train(arm: str, folder: str, seed: int) -> dict[str, Any]:
    """Train one arm for an epoch and return its figures; called in a fresh process."""
    import torch
    from demo_task import HYPERPARAMETERS, build_model, predict_labels, prepared
    from four_setups import measure
    from transformers import PrinterCallback

    from hf_memopt.training.devices import accelerator_type, choose_precision

    task, tokenizer = prepared(Path(folder))
    precision = choose_precision()
    arguments = {
        **HYPERPARAMETERS,
        "output_dir": str(Path(folder) / "trainer"),
        "num_train_epochs": 1,
        "seed": seed,
        "optim": "adamw_torch_fused",
        "bf16": precision.bf16,
        "use_cpu": precision.bf16 and accelerator_type() == "cpu",  # stock requires it for bf16 on a CPU
        "fp16": precision.fp16,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "disable_tqdm": True,
    }
    model = build_model(len(tokenizer), task.labels, seed=seed)
    encoded = tokenizer(list(task.train_texts), truncation=True)
    trainer = _trainer(arm, model, tokenizer, {**encoded, "labels": list(task.train_labels)}, arguments)
    trainer.remove_callback(PrinterCallback)
    figures = measure(trainer)
    predicted = predict_labels(model, tokenizer, task.test_texts)
    hits = sum(one == other for one, other in zip(predicted, task.test_labels, strict=True))
    kept = {key: figures[key] for key in ("seconds", "examples", "padding_efficiency")}
    return {**kept, "steps": trainer.state.global_step, "accuracy": hits / len(predicted)}


def _trainer(arm: str, model: Any, tokenizer: Any, columns: Any, arguments: dict[str, Any]) -> Any:
    from datasets import Dataset
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    from hf_memopt import BucketedCollator, attach, bucketed, token_lengths

    dataset = Dataset.from_dict(columns)
    if arm in ("random", "group_by_length"):
        # The rows in a list: see four_setups.trainer_of for what a Dataset costs here.
        data, collator = dataset.to_list(), DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
        strategy, per_device = arm, BATCH_SIZE
    else:
        limit = {"batch_size": BATCH_SIZE}
        if arm.startswith("max_tokens"):
            limit = {"max_tokens": matching_budget(token_lengths(dataset), seed=arguments["seed"])}
        data, collator = bucketed(dataset, seed=arguments["seed"], **limit), BucketedCollator(tokenizer)
        strategy, per_device = "sequential", limit.get("batch_size", 1)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments, train_sampling_strategy=strategy, per_device_train_batch_size=per_device),
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=collator,
        compute_loss_func=_even_loss if arm == "max_tokens_even" else None,
    )
    return attach(trainer)


def _even_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return the sum of the losses of the texts over the texts of a mean batch."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs["logits"].float(), labels, reduction="sum") / BATCH_SIZE


def matching_budget(lengths: Any, *, seed: int = 0) -> int:
    """Return the budget, a multiple of 8, with as many batches an epoch as batches of 32 examples, or just fewer."""
    from hf_memopt.types import LengthBuckets

    wanted = -(-len(lengths) // BATCH_SIZE)
    low = -(-int(lengths.max()) // 8)  # the longest row must fit
    high = max(low, BATCH_SIZE * low)
    while low < high:
        middle = (low + high) // 2
        if LengthBuckets(lengths, max_tokens=8 * middle, seed=seed).n_batches > wanted:
            low = middle + 1
        else:
            high = middle
    return 8 * low
