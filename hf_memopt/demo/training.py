"""The demo's model, the set-ups that it is trained with on a pretended GPU, and the figures of each.

All but the streamed model start from the same weights and share the examples of a step, learning rates and seed. Timed
is ``trainer.train()`` and nothing else. The predicted peak is that of a step of the set-up as it is given, with rows of
the longest text: what is known before the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
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

from hf_memopt.binding import attach, checkpointing_arguments, checkpointing_of
from hf_memopt.demo.docstring_task import MAX_LENGTH_TOKENS, DocstringTask
from hf_memopt.demo.pretended_gpu import PretendedGpu, PretendedLanes
from hf_memopt.devices import Gpu, custom_gpu
from hf_memopt.memory import estimate_of
from hf_memopt.memory.settings import BatchShape
from hf_memopt.recipes.planning import plan
from hf_memopt.techniques.microbatching import MicrobatchCallback
from hf_memopt.techniques.streaming import StreamedLayersCallback, stream_layers

BATCH_SIZE = 32
HYPERPARAMETERS = {"learning_rate": 1e-3, "warmup_steps": 0.1, "lr_scheduler_type": "linear"}
MODEL = {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512}
LARGE_MODEL = {"num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
LARGE_BATCH, LARGE_TOKENS, LARGE_STEPS = 8, 64, 8
"""Of the streamed model, which takes seconds a step on a CPU; its texts are cut."""
NAIVE_STEPS = 6
WHOLE = "unlimited.safetensors"  # losses and weights of the run without a limit


# ---- The model and its trainers -------------------------------------------------------------------------------------


def model_config(vocabulary_tokens: int, labels: Sequence[str], sizes: Mapping[str, int] = MODEL) -> BertConfig:
    """Return the configuration of the demo's BERT."""
    fields: dict[str, Any] = dict(sizes)
    return BertConfig(
        vocab_size=vocabulary_tokens,
        max_position_embeddings=MAX_LENGTH_TOKENS,
        type_vocab_size=1,
        initializer_range=0.7 / sizes["hidden_size"] ** 0.5,
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


class _SetUp:
    """What the set-ups share: the texts, the tokenizer, the pretended GPU, the arguments.

    Args:
        folder: holds ``task.json`` and ``tokenizer`` as ``run.prepare`` wrote them.
        limit_bytes: of the pretended GPU; None for no limit.
        seed: of weights and order.
        epochs: passes over the training texts.
        sizes: fields of the configuration of the model, and of the large one.
    """

    def __init__(
        self, folder: Path, limit_bytes: int | None, seed: int, epochs: int, sizes: Sequence[Mapping[str, int]]
    ) -> None:
        self.folder, self.seed = folder, seed
        self.sizes, self.large_sizes = sizes
        self.gpu = PretendedGpu(limit_bytes)
        self.task = DocstringTask(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.arguments: dict[str, Any] = {
            **HYPERPARAMETERS,
            "output_dir": str(folder / "trainer"),
            "num_train_epochs": epochs,
            "seed": seed,
            "save_strategy": "no",
            "logging_steps": 1,  # every loss is compared
            "report_to": "none",
            "use_cpu": True,
            "dataloader_pin_memory": False,
        }

    def model(self, sizes: Mapping[str, int] | None = None) -> BertForSequenceClassification:
        return build_model(model_config(len(self.tokenizer), self.task.labels, sizes or self.sizes), self.seed)

    def rows(self, **tokenized: Any) -> Dataset:
        encoded = self.tokenizer(list(self.task.train_texts), truncation=True, **tokenized)
        return Dataset.from_dict({**encoded, "labels": self.task.train_labels})

    def longest(self, most: int) -> int:
        """Return the tokens of the longest text, of which ``most`` are kept."""
        return min(most, max(map(len, self.rows()["input_ids"])))

    def stock(self, rows: Dataset | None = None, **arguments: Any) -> Trainer:
        """Return the stock Trainer, each batch padded to its longest text."""
        given = {**self.arguments, "per_device_train_batch_size": BATCH_SIZE, **arguments}
        trained = self.rows() if rows is None else rows
        args = TrainingArguments(**given)
        return Trainer(model=self.model(), args=args, train_dataset=trained, processing_class=self.tokenizer)

    def planned(self, figures: dict[str, Any]) -> Trainer:
        """Return the Trainer of the set-up that ``plan`` chooses for a GPU of the pretended size."""
        model, gpu = self.model(), gpu_of(self.gpu.limit_bytes)
        wanted = {"method": "full", "effective_batch_size": BATCH_SIZE, "task": "sequence-classification"}
        found = plan(model.config, gpu=gpu, seq_len=MAX_LENGTH_TOKENS, **wanted)  # type: ignore[arg-type]
        figures["plan"] = f"{found.chosen.stage}, {found.chosen.batch}" if found.chosen else "nothing fits"
        options = {**self.arguments, "effective_batch_size": BATCH_SIZE}
        return found.recipe.trainer(
            model=model, train_dataset=self.rows(), processing_class=self.tokenizer, training_arguments=options
        )

    def streamed(self, figures: dict[str, Any]) -> Trainer:
        """Return the Trainer of a model whose layers are larger than the pretended GPU, and wait on the host."""
        model = self.model(self.large_sizes)
        stream_layers(model, lanes=PretendedLanes(self.gpu))
        layers = [p for layer in model.bert.encoder.layer for p in layer.parameters()]
        self.gpu.keep_on_host(layers)
        figures |= {"parameters": model.num_parameters(), "layer_bytes": sum(p.nbytes for p in layers)}
        return attach(self.large_trainer(model), StreamedLayersCallback())

    def large_trainer(self, model: PreTrainedModel, **arguments: Any) -> Trainer:
        """Return the stock Trainer of the large model, for a few steps of short texts."""
        steps = {"per_device_train_batch_size": LARGE_BATCH, "max_steps": LARGE_STEPS, "learning_rate": 1e-4}
        return Trainer(
            model=model,
            args=TrainingArguments(**{**self.arguments, **steps, **arguments}),
            train_dataset=self.rows(max_length=LARGE_TOKENS),
            processing_class=self.tokenizer,
        )


def gpu_of(size_bytes: int | None) -> Gpu:
    """Return the pretended GPU as the planner takes one: all of it is the model's, no CUDA context lies beside it."""
    assert size_bytes is not None
    return replace(custom_gpu(size_bytes, "8.0"), context_bytes=0, name=f"a GPU of {size_bytes / 2**20:.0f} MiB")


# ---- One set-up -----------------------------------------------------------------------------------------------------


def run_setup(
    folder: Path,
    setup: str,
    *,
    limit_bytes: int,
    seed: int,
    epochs: int,
    sizes: Sequence[Mapping[str, int]] = (MODEL, LARGE_MODEL),
) -> dict[str, Any]:
    """Train one set-up and return its figures; ``"memopt"`` also saves model and tokenizer in ``folder/model``.

    ``"unlimited"`` has no limit and leaves its losses and weights in the folder, with which ``"memopt"`` compares its
    own. Of the others ``"stock"`` and ``"auto_find_batch_size"`` are the stock Trainer, ``"planned"`` is what ``plan``
    chooses, and ``"streamed"`` is a larger model for a few steps.

    Args:
        folder: with what ``run.prepare`` wrote.
        setup: its name.
        limit_bytes: of the pretended GPU.
        seed: of weights and order.
        epochs: passes over the training texts.
        sizes: fields of the configuration of the model, and of the large one.
    """
    one = _SetUp(folder, None if setup == "unlimited" else limit_bytes, seed, epochs, sizes)
    figures: dict[str, Any] = {}
    if setup == "planned":
        trainer = one.planned(figures)
    elif setup == "streamed":
        trainer = one.streamed(figures)
    else:
        trainer = one.stock(auto_find_batch_size=setup == "auto_find_batch_size")
    if setup == "memopt":
        attach(trainer, MicrobatchCallback())
    model: Any = trainer.model
    figures |= {"limit_bytes": one.gpu.limit_bytes, "settings": settings_text(trainer.args)}
    longest = one.longest(LARGE_TOKENS if setup == "streamed" else MAX_LENGTH_TOKENS)
    figures["predicted_peak_bytes"] = predicted_peak(trainer, longest)
    figures |= measure(trainer, one.gpu)
    model = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # without accelerate's autocast
    if setup == "unlimited":
        save_file(model.state_dict(), folder / WHOLE, {"losses": json.dumps(figures["losses"])})
        figures["naive_examples_per_second"] = _naive_speed(one)
    if setup == "memopt":
        figures |= _differences(model, figures["losses"], folder / WHOLE)
        model.save_pretrained(folder / "model")
        one.tokenizer.save_pretrained(folder / "model")
    if setup == "streamed" and figures["losses"]:
        figures |= _beside_whole(one, model, figures["losses"])
    is_trained = setup != "streamed" and figures["steps"] == figures["planned_steps"]
    predicted = predict_labels(model, one.tokenizer, one.task.test_texts) if is_trained else []
    hits = sum(each == other for each, other in zip(predicted, one.task.test_labels, strict=False))
    return {**figures, "accuracy": hits / len(predicted) if predicted else None, "test_texts": len(predicted)}


def settings_text(args: TrainingArguments) -> str:
    """Return the precision, the optimizer and how a step is divided, as the Trainer has them."""
    parts = ["bf16" if args.bf16 else "fp16" if args.fp16 else "fp32", str(getattr(args.optim, "value", args.optim))]
    if args.gradient_accumulation_steps > 1:
        parts.append(f"{args.gradient_accumulation_steps} accumulation steps of {args.per_device_train_batch_size}")
    return ", ".join([*parts, *(["checkpointing"] if checkpointing_of(args)[0] else [])])


class _Noted(TrainerCallback):
    """Keeps the losses of the last attempt, and its steps."""

    keeps_gradient_scale = True  # see ``binding.attachment``

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps = self.planned_steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses, self.steps, self.planned_steps = [], 0, state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))


class _Bar(ProgressCallback):
    """Stock's progress bar without a line for each loss."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print nothing."""


def measure(trainer: Trainer, gpu: PretendedGpu) -> dict[str, Any]:
    """Train on a pretended GPU and return what was seen; out of memory ends it."""
    noted, message = _Noted(), None
    for kind in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(kind)
    for callback in (noted, *([] if trainer.args.disable_tqdm else [_Bar()])):
        trainer.add_callback(callback)
    started = time.perf_counter()
    model: Any = trainer.model
    with gpu:
        gpu.hold(model.parameters())
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            message = str(error)
    seconds = time.perf_counter() - started
    examples = noted.steps * trainer.args.gradient_accumulation_steps * trainer._train_batch_size
    dataset: Any = trainer.train_dataset
    if noted.steps == noted.planned_steps and trainer.args.max_steps < 0:  # the last batch of an epoch is smaller
        examples = round(trainer.args.num_train_epochs * len(dataset))
    return {
        "steps": noted.steps,
        "planned_steps": noted.planned_steps,
        "losses": noted.losses,
        "batch_size": trainer._train_batch_size,
        "times_out_of_memory": gpu.times_out_of_memory,
        "peak_bytes": gpu.peak_bytes,
        "seconds": seconds,
        "examples_per_second": examples / seconds,
        **({"message": message} if message else {}),
    }


def predicted_peak(trainer: Trainer, longest: int) -> int:
    """Return the allocated bytes that are predicted for a step whose rows have ``longest`` tokens.

    The workspaces of a GPU's matrix multiplications are subtracted. What remains of a GPU are the buffers of its
    reductions, at most 12 MiB here, which a CPU does not allocate.
    """
    shape = BatchShape(trainer.args.per_device_train_batch_size, longest, None, None)
    found = estimate_of(trainer, shape)
    return found.peak_allocated_bytes - found.components["workspace"]


def _naive_speed(one: _SetUp) -> float:
    """Return the examples per second of the same training with every text padded to the longest."""
    trainer = one.stock(one.rows(padding="max_length"), max_steps=NAIVE_STEPS, logging_strategy="no", disable_tqdm=True)
    speed: float = measure(trainer, PretendedGpu(None))["examples_per_second"]
    return speed


def _beside_whole(one: _SetUp, model: PreTrainedModel, losses: list[float]) -> dict[str, Any]:
    """Return the peak of stock with checkpointing, which has the whole model, and whether it trains the same."""
    whole = one.large_trainer(one.model(one.large_sizes), **checkpointing_arguments())
    trained: Any = whole.model
    figures = measure(whole, PretendedGpu(None))
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    is_equal = losses == figures["losses"] and all(torch.equal(*pair) for pair in pairs)
    return {"whole_peak_bytes": figures["peak_bytes"], "is_equal_to_whole": is_equal}


def _differences(model: PreTrainedModel, losses: list[float], other: Path) -> dict[str, float]:
    """Return how far losses and weights are from those of another run: the largest of all, relative.

    Without the biases of keys: their gradient is zero but for rounding, and Adam makes whole steps of it.
    """
    with safe_open(other, "pt") as file:
        pairs = zip(losses, json.loads(file.metadata()["losses"]), strict=True)
        whole = {name: file.get_tensor(name) for name in file.keys() if "key.bias" not in name}  # noqa: SIM118
    weights = model.state_dict()
    of_weights = {name: float((weights[name] - one).norm() / one.norm()) for name, one in whole.items()}
    return {
        "loss_difference": max(abs(loss - wanted) / abs(wanted) for loss, wanted in pairs),
        "weight_difference": max(of_weights.values()),
    }


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
