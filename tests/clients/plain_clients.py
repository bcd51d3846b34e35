"""Trainings with the Trainer of transformers itself: heads, subclasses, adapters, generation, searches, resuming."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
import transformers
from datasets import Dataset, Features, Value
from peft import LoraConfig, get_peft_model
from sklearn.metrics import accuracy_score, f1_score
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer

import tiny
from client import CUT, SETUPS, Arrange, Client, arguments, labelled, llama, texts

GRADIENT_SCALE = (
    "stock multiplies the gradients of a head that ignores num_items_in_batch by accumulation steps x processes; "
    "attach repairs it"
)


def repair_gradient_scale(trainer: Trainer) -> None:
    """Let stock divide the loss itself."""
    trainer.model_accepts_loss_kwargs = False


class Accuracy(evaluate.Metric):
    """A metric of the library evaluate, computed by scikit-learn, without a download."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {
            "accuracy": accuracy_score(references, predictions),
            "f1": f1_score(references, predictions, average="macro"),
        }


def with_metrics(prediction: Any) -> dict[str, float]:
    """Return accuracy and F1."""
    found: dict[str, float] = Accuracy().compute(
        predictions=np.argmax(prediction.predictions, axis=-1), references=prediction.label_ids
    )
    return found


def classifier(
    folder: Path,
    arrange: Arrange,
    *,
    kind: type[Trainer] = Trainer,
    model: Any = None,
    data: Any = None,
    given: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """A BERT with three classes; ``given``: other arguments of the Trainer."""
    return kind(
        model=tiny.bert() if model is None else model,
        args=arguments(folder, **settings),
        train_dataset=arrange(labelled() if data is None else data),
        eval_dataset=labelled(8, seed=1),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
        **{"compute_metrics": with_metrics, **(given or {})},
    )


def with_dropout(folder: Path, arrange: Arrange) -> Trainer:
    """The same with dropout: random numbers are drawn in every forward pass."""
    return classifier(folder, arrange, model=tiny.bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))


def with_noise(folder: Path, arrange: Arrange) -> Trainer:
    """Noise on the embeddings (NEFTune), scaled by the padded length."""
    return classifier(folder, arrange, neftune_noise_alpha=5.0)


def accumulated(folder: Path, arrange: Arrange) -> Trainer:
    """Two accumulation steps, by a head that does not count items."""
    return classifier(folder, arrange, gradient_accumulation_steps=2, max_steps=2)


def lora(folder: Path, arrange: Arrange) -> Trainer:
    """An adapter of peft."""
    model = get_peft_model(
        tiny.bert(), LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=False)
    )
    return classifier(folder, arrange, model=model)


class WeightedTrainer(Trainer):
    """A mean weighted by a column that the model does not take, kept the way stock's own subclasses do."""

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if "weight" not in self._signature_columns:
            self._signature_columns += ["weight"]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        weights = inputs.pop("weight")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


def weighted(folder: Path, arrange: Arrange, *, first: tuple[float, ...] = (1.0, 9.0, 0.1, 3.0)) -> Trainer:
    """A loss weighted by a column of the data; ``first``: the weights of the first batch."""
    weights = [*first, *(1.0, 9.0, 0.1, 3.0) * 3]
    return WeightedTrainer(
        model=tiny.bert(),
        args=arguments(folder, train_sampling_strategy="sequential"),
        train_dataset=arrange(labelled(weight=weights)),
        eval_dataset=labelled(8, seed=1, weight=weights[:8]),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
    )


def weighted_later(folder: Path, arrange: Arrange) -> Trainer:
    """Equal weights in the first batch, so that it cannot tell a weighted mean from a plain one."""
    return weighted(folder, arrange, first=(1.0, 1.0, 1.0, 1.0))


class TwoTaskTrainer(Trainer):
    """A second loss over labels of which some are ignored."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        second = inputs.pop("second_labels")
        outputs = model(**inputs)
        loss = outputs.loss + torch.nn.functional.cross_entropy(outputs.logits, second)
        return (loss, outputs) if return_outputs else loss


def two_tasks(folder: Path, arrange: Arrange) -> Trainer:
    """Second labels, all of which count in the first batch only."""
    second = [i % 3 if i < 4 or i % 2 else -100 for i in range(16)]
    return TwoTaskTrainer(
        model=tiny.bert(),
        args=arguments(folder, remove_unused_columns=False, train_sampling_strategy="sequential"),
        train_dataset=arrange(labelled(second_labels=second)),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
    )


def causal(folder: Path, arrange: Arrange, *, model: Any = None, **settings: Any) -> Trainer:
    """A causal language model, which counts items."""
    encoded = [{"input_ids": ids} for ids in tiny.tokenizer()(texts(16))["input_ids"]]
    return Trainer(
        model=llama() if model is None else model,
        args=arguments(folder, **settings),
        train_dataset=arrange(Dataset.from_list(encoded)),
        eval_dataset=Dataset.from_list(encoded[:8]),
        data_collator=DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False),
    )


def masked(folder: Path, arrange: Arrange) -> Trainer:
    """A masked language model, whose collator draws random numbers."""
    encoded = [{"input_ids": ids} for ids in tiny.tokenizer()(texts(16))["input_ids"]]
    torch.manual_seed(0)
    return Trainer(
        model=transformers.BertForMaskedLM(tiny.bert_config()),
        args=arguments(folder),
        train_dataset=arrange(Dataset.from_list(encoded)),
        eval_dataset=Dataset.from_list(encoded[:8]),
        data_collator=DataCollatorForLanguageModeling(tiny.tokenizer(), mlm_probability=0.4),
    )


def translation(folder: Path, arrange: Arrange) -> Trainer:
    """T5 with generation in evaluation."""
    encoded = tiny.tokenizer()(texts(16), text_target=texts(16, seed=1, longest=10))
    config = transformers.T5Config(
        vocab_size=100,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    return transformers.Seq2SeqTrainer(
        model=model,
        args=arguments(
            folder, transformers.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=8
        ),
        train_dataset=arrange(Dataset.from_dict(dict(encoded))),
        eval_dataset=Dataset.from_dict(dict(encoded)).select(range(8)),
        data_collator=DataCollatorForSeq2Seq(tiny.tokenizer(), model),
        processing_class=tiny.tokenizer(),
        compute_metrics=lambda found: {"tokens": int(np.sum(found.predictions))},
    )


def searched(folder: Path, arrange: Arrange) -> Trainer:
    """A trainer for a search over learning rates, which builds a model for each trial."""
    trainer = classifier(folder, arrange)
    return Trainer(
        model_init=lambda trial: tiny.bert(),
        args=trainer.args,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
        data_collator=trainer.data_collator,
    )


def search(trainer: Trainer) -> Mapping[str, Any]:
    """Search over two learning rates."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [0.01, 0.1])},
        backend="optuna",
        n_trials=2,
        sampler=optuna.samplers.GridSampler({"learning_rate": [0.01, 0.1]}),
    )
    return {"objective": best.objective, "rate": best.hyperparameters["learning_rate"]}


def saving(folder: Path, arrange: Arrange) -> Trainer:
    """A training that saves each second step."""
    return classifier(folder, arrange, save_strategy="steps", save_steps=2)


def resume(trainer: Trainer) -> Mapping[str, Any]:
    """Train to the end, then go back to the checkpoint of step 2 and train to the end again."""
    trainer.train()
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    return trainer.evaluate()


def resumed_stock(folder: Path, arrange: Arrange) -> Trainer:
    """A training that finds the checkpoint of a run of stock."""
    first = saving(folder, lambda dataset: dataset)
    first.args.train_sampling_strategy = "sequential"
    first.train()
    return saving(folder, arrange)


def resume_stock(trainer: Trainer) -> Mapping[str, Any]:
    """Go on from step 2 of the run of stock."""
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    return trainer.evaluate()


def processes(folder: Path, arrange: Arrange, *, build: Any = causal, **flags: Any) -> Trainer:
    """Two processes, with the flags of DDP that recovery needs."""
    needed = {"ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False, "max_steps": 2}
    trainer: Trainer = build(folder, arrange, **{**needed, **flags})
    return trainer


DEFAULT_FLAGS = (
    "micro-batching and DDP, default flags are incompatible: a forward pass that is run again would wait for the "
    "buffers of processes that do not run it; expected only one of them. Set ddp_broadcast_buffers=False, "
    "ddp_find_unused_parameters=False"
)
NEFTUNE = (
    "micro-batching and NEFTune are incompatible: its noise is scaled by the padded length, which is another one "
    "in a part of a batch; expected only one of them. Leave neftune_noise_alpha out"
)

CLIENTS = {
    "classification, metrics of evaluate and scikit-learn": Client(classifier),
    "classification, dropout": Client(
        with_dropout, differs={CUT: "dropout draws its random numbers for the rows of a forward pass"}
    ),
    "classification, NEFTune": Client(with_noise, refuses=dict.fromkeys(("micro-batching", CUT, "all"), NEFTUNE)),
    "classification, accumulation": Client(accumulated, differs=dict.fromkeys(SETUPS, GRADIENT_SCALE)),
    "classification, LoRA (peft)": Client(lora),
    "weighted loss, own columns": Client(weighted),
    "weighted loss, equal at first": Client(weighted_later),
    "two losses, labels ignored later": Client(two_tasks),
    "causal language model": Client(causal),
    "masked language model": Client(masked),
    "Seq2SeqTrainer, T5 with generation": Client(translation),
    "hyperparameter search (optuna)": Client(searched, drive=search),
    "resumed": Client(saving, drive=resume),
    "resumed from a run of stock": Client(resumed_stock, drive=resume_stock),
    "causal language model, two processes": Client(processes, ranks=2),
    "causal language model, two processes, each with tokens of its own": Client(
        lambda folder, arrange: processes(folder, arrange, average_tokens_across_devices=False), ranks=2
    ),
    "classification, two processes": Client(
        lambda folder, arrange: processes(folder, arrange, build=classifier),
        differs=dict.fromkeys(SETUPS, GRADIENT_SCALE),
        correct=repair_gradient_scale,
        ranks=2,
    ),
    "causal language model, two processes, default flags": Client(
        lambda folder, arrange: processes(folder, arrange, ddp_broadcast_buffers=None, ddp_find_unused_parameters=None),
        refuses=dict.fromkeys(("micro-batching", CUT, "all"), DEFAULT_FLAGS),
        ranks=2,
    ),
}
