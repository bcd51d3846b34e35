"""The demo's model, the set-ups that it is trained with on a pretended GPU, and the figures of each.

All but the streamed model start from the same weights and share the examples of a step, learning rates and seed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from datasets import Dataset
from docstring_task import MAX_LENGTH_TOKENS, DocstringTask
from pretended_gpu import PretendedGpu, PretendedLanes
from transformers import Trainer, TrainingArguments

import hf_memopt
from hf_memopt.prediction.memory import estimate_of
from hf_memopt.prediction.memory.settings import BatchShape
from hf_memopt.training.binding import checkpointing_arguments
from hf_memopt.training.devices import custom_gpu

LIMIT_BYTES = 64 * 2**20
BATCH_SIZE, TOKENS = 32, 64
HYPERPARAMETERS = {"learning_rate": 1e-3, "warmup_steps": 0.1, "lr_scheduler_type": "linear"}
QUIET = {"save_strategy": "no", "logging_steps": 1, "report_to": "none"}  # every loss is compared
ON_CPU = {"use_cpu": True, "dataloader_pin_memory": False, "per_device_eval_batch_size": 32}
MODEL = {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512}
LARGE_MODEL = {"num_hidden_layers": 10, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
LARGE_STEPS = {"per_device_train_batch_size": 8, "max_steps": 3, "learning_rate": 1e-4}  # seconds a step on a CPU
LARGE_TOKENS = 32
CUT_STEPS = 6  # of auto_find_batch_size: by then its other batch and other number of steps are there to see


def build_model(
    vocabulary_tokens: int, labels: Sequence[str], sizes: Mapping[str, int] = MODEL, *, seed: int = 0
) -> transformers.BertForSequenceClassification:
    """Return a small BERT with weights drawn from ``seed``, the same for every set-up.

    BERT's deviation of 0.02 for all weights suits a width of 768: a narrow model would learn next to nothing in these
    steps. Here linear layers get one that fits their width, word embeddings 0.02, positions and token types 0.
    """
    config = transformers.BertConfig(
        vocab_size=vocabulary_tokens,
        max_position_embeddings=MAX_LENGTH_TOKENS,
        type_vocab_size=1,
        initializer_range=0.7 / sizes["hidden_size"] ** 0.5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **sizes,
    )
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(config)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.02)
    torch.nn.init.zeros_(model.bert.embeddings.position_embeddings.weight)
    torch.nn.init.zeros_(model.bert.embeddings.token_type_embeddings.weight)
    return model


@dataclass
class Demo:
    """What the set-ups share: texts, tokenizer, the GPU's size, and what the run without a limit trained."""

    task: DocstringTask
    tokenizer: Any
    folder: str
    limit_bytes: int = LIMIT_BYTES
    whole: dict[str, Any] = field(default_factory=dict)

    def model(self, sizes: Mapping[str, int]) -> transformers.BertForSequenceClassification:
        return build_model(len(self.tokenizer), self.task.labels, sizes)

    def rows(self, most: int = TOKENS, part: str = "train") -> Dataset:
        texts, labels = getattr(self.task, f"{part}_texts"), getattr(self.task, f"{part}_labels")
        return Dataset.from_dict({**self.tokenizer(list(texts), truncation=True, max_length=most), "labels": labels})

    def stock(self, sizes: Mapping[str, int], rows: Dataset, **given: Any) -> Trainer:
        """Return the plain Trainer, each batch padded to its longest text."""
        args = TrainingArguments(self.folder, **{**HYPERPARAMETERS, **QUIET, **ON_CPU, "num_train_epochs": 1, **given})
        return Trainer(self.model(sizes), args, train_dataset=rows, processing_class=self.tokenizer)

    def planned(self, figures: dict[str, Any]) -> Trainer:
        """Return the Trainer of the set-up that ``plan`` chooses for a GPU of the pretended size."""
        model, gpu = self.model(MODEL), replace(custom_gpu(self.limit_bytes, "6.0"), context_bytes=0)
        task, whole = "sequence-classification", {"effective_batch_size": BATCH_SIZE}
        own = {"method": "full", "task": task, "host_memory": "1MB"}  # beside a pretended GPU nothing can wait
        found = hf_memopt.plan(model.config, gpu=gpu, seq_len=TOKENS, **own, **whole)
        figures["plan"] = f"{found.chosen.name}, {found.chosen.batch}" if found.chosen else "nothing fits"
        recipe = found.recipe.replace(precision="auto")  # as this CPU computes
        args = recipe.training_arguments(self.folder, num_train_epochs=1, **HYPERPARAMETERS, **QUIET, **ON_CPU, **whole)
        trainer = Trainer(
            recipe.prepare_model(model),
            args,
            train_dataset=hf_memopt.bucketed(self.rows(), batch_size=args.per_device_train_batch_size),
            data_collator=recipe.collator(self.tokenizer),
            callbacks=recipe.callbacks(),
        )
        return hf_memopt.attach(trainer)

    def streamed(self, gpu: PretendedGpu, figures: dict[str, Any]) -> Trainer:
        """Return the Trainer of a model whose layers are larger than the pretended GPU, and wait on the host."""
        trainer = self.stock(LARGE_MODEL, self.rows(LARGE_TOKENS), **LARGE_STEPS)
        hf_memopt.stream_layers(trainer.model, lanes=PretendedLanes(gpu))
        layers = [*trainer.model.bert.encoder.layer.parameters()]
        gpu.keep_on_host(layers)
        figures["layer_bytes"] = sum(layer.nbytes for layer in layers)
        return hf_memopt.attach(trainer, hf_memopt.StreamedLayersCallback())


def run_setup(demo: Demo, name: str) -> dict[str, Any]:
    """Train one set-up and return its figures; ``"memopt"`` is compared with what ``"unlimited"`` has trained."""
    gpu = PretendedGpu(None if name == "unlimited" else demo.limit_bytes)
    figures: dict[str, Any] = {"limit_bytes": gpu.limit_bytes}
    is_streamed, is_found = name == "streamed", name == "auto_find_batch_size"
    if name == "planned":
        trainer = demo.planned(figures)
    elif is_streamed:
        trainer = demo.streamed(gpu, figures)
    else:
        given = {"per_device_train_batch_size": BATCH_SIZE, "auto_find_batch_size": is_found}
        trainer = demo.stock(MODEL, demo.rows(), **given)
    if name == "memopt":
        hf_memopt.attach(trainer, hf_memopt.MicrobatchCallback())
    figures["predicted_peak_bytes"] = predicted_peak(trainer, demo.rows(LARGE_TOKENS if is_streamed else TOKENS))
    figures |= measure(trainer, gpu, most=CUT_STEPS if is_found else None)
    weights = trainer.model.state_dict()
    if name == "unlimited":
        demo.whole = {"losses": figures["losses"], "weights": weights}
    if name == "memopt":
        figures |= _differences(demo.whole, figures["losses"], weights)
    if is_streamed and figures["losses"]:
        whole = demo.stock(LARGE_MODEL, demo.rows(LARGE_TOKENS), **LARGE_STEPS, **checkpointing_arguments())
        found = measure(whole, PretendedGpu(None))
        pairs = zip(trainer.model.parameters(), whole.model.parameters(), strict=True)
        is_equal = figures["losses"] == found["losses"] and all(torch.equal(*pair) for pair in pairs)
        figures |= {"whole_peak_bytes": found["peak_bytes"], "is_equal_to_whole": is_equal}
    figures["accuracy"] = None
    if figures["steps"] == figures["planned_steps"] and not is_streamed:
        found = trainer.predict(demo.rows(part="test"))
        figures["accuracy"] = float((found.predictions.argmax(-1) == found.label_ids).mean())
    return figures


def predicted_peak(trainer: Trainer, rows: Dataset) -> int:
    """Return the allocated bytes that are predicted for a step with rows of the longest text.

    Without a GPU's workspaces; with the buffers of its reductions, at most 12 MiB, which a CPU does not allocate.
    """
    longest = max(map(len, rows["input_ids"]))
    found = estimate_of(trainer, BatchShape(trainer.args.per_device_train_batch_size, longest, None, None))
    return found.peak_allocated_bytes - found.components["workspace"]


class _Bar(transformers.ProgressCallback):
    """Stock's bar, with the time that remains and without the losses; it may end the run early."""

    keeps_gradient_scale = True  # see ``binding.attachment``
    most: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        control.should_training_stop |= state.global_step == self.most

    def on_log(self, *args: Any, **kwargs: Any) -> None: ...


def measure(trainer: Trainer, gpu: PretendedGpu, most: int | None = None) -> dict[str, Any]:
    """Train on a pretended GPU, at most so many steps, and return what was seen; out of memory ends it."""
    for kind in (transformers.ProgressCallback, transformers.PrinterCallback):
        trainer.remove_callback(kind)
    trainer.add_callback(bar := _Bar())
    bar.most = most
    message, started = {}, time.perf_counter()
    with gpu:
        gpu.hold(trainer.model.parameters())
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            message = {"message": str(error)}
    seconds, state, batch_size = time.perf_counter() - started, trainer.state, trainer._train_batch_size
    examples = state.global_step * trainer.args.gradient_accumulation_steps * batch_size
    return {
        "steps": state.global_step,
        "planned_steps": state.max_steps,
        "losses": [logs["loss"] for logs in state.log_history if "loss" in logs],
        "batch_size": batch_size,
        "times_out_of_memory": gpu.times_out_of_memory,
        "peak_bytes": gpu.peak_bytes,
        "examples_per_second": min(examples, len(trainer.train_dataset)) / seconds,
        **message,
    }


def _differences(whole: dict[str, Any], losses: list[float], weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return how far losses and weights are from those of the whole run: the largest of all, relative.

    Without the biases of keys: their gradient is zero but for rounding, and Adam makes whole steps of it.
    """
    compared = {name: one for name, one in whole["weights"].items() if "key.bias" not in name}
    return {
        "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(losses, whole["losses"], strict=True)),
        "weight_difference": max(float((weights[name] - one).norm() / one.norm()) for name, one in compared.items()),
    }
