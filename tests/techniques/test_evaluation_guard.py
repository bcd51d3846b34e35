"""Evaluation: recovered from out of memory with the results of the whole batch, and outputs kept within bounds."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import heads
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, default_data_collator

import language_models
import tiny
from hf_memopt.training.batching.collation.collators import BucketedCollator
from hf_memopt.training.batching.views import sorted_by_length
from hf_memopt.training.binding import attach
from hf_memopt.training.devices.readings import read_memory, read_process
from hf_memopt.training.techniques.evaluation import outputs as kept_outputs
from hf_memopt.training.techniques.evaluation.guard import (
    EvaluationGuardCallback,
    class_predictions,
    guard_evaluation,
    recover_predictions,
)
from two_ranks import run_pair

FAKE = "CUDA out of memory. Tried to allocate 2.00 GiB (a test)"
TOLERANCE = 1e-6  # float32: matrix products of other shapes, sums in another order


class Limit:
    """Let the first layer of a model run out of memory in every forward pass of more than ``rows`` rows.

    By a hook on all modules: one on the model itself would see whole batches.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.rows, self.failures = rows, 0
        self.sizes: list[int] = []
        self.failed: list[weakref.ref[torch.Tensor]] = []
        inside = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
        layers = (module for module in inside.modules() if isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d)))
        self._first = weakref.ref(next(layers))
        handle = nn.modules.module.register_module_forward_pre_hook(self._run_out)
        weakref.finalize(model, handle.remove)

    def _run_out(self, module: nn.Module, args: Any) -> None:
        if module is not self._first():
            return
        self.sizes.append(len(args[0]))
        if len(args[0]) > self.rows:
            activation = torch.zeros(8)  # what the traceback would keep alive
            self.failed.append(weakref.ref(activation))
            self.failures += 1
            raise torch.OutOfMemoryError(FAKE)


def uneven(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out labels: none of the first row, all of the second, then more and more."""
    kept = []
    for number, example in enumerate(examples):
        labels = example.get("labels")
        if isinstance(labels, list):
            count = 0 if number == 1 else len(labels) - number % 7
            example = {**example, "labels": labels[:count] + [-100] * (len(labels) - count)}
        kept.append(example)
    return kept


def make_trainer(
    name: str,
    output_dir: Any,
    *,
    rows: int | None = None,
    build: Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> tuple[Trainer, Limit | None]:
    """Return a Trainer of one of ``heads.HEADS``, and the limit of its model, if there is one."""
    head = heads.HEADS[name]
    torch.manual_seed(0)
    model = (build or head.build)()
    of_trainer = {key.removeprefix("trainer_"): settings.pop(key) for key in list(settings) if "trainer_" in key}
    args = tiny.arguments(output_dir, **{"per_device_eval_batch_size": 7, **settings})
    examples = uneven(head.examples(16))
    defaults = {"data_collator": default_data_collator, "compute_metrics": lambda prediction: {}}
    trainer = Trainer(model=model, args=args, eval_dataset=examples, **{**defaults, **of_trainer})
    return trainer, None if rows is None else Limit(model, rows)


def accuracy(prediction: Any) -> dict[str, float]:
    """Of logits or of classes, in both spellings of predictions."""
    found = prediction.predictions
    if found.ndim > prediction.label_ids.ndim:
        found = found.argmax(-1)
    counted = prediction.label_ids != -100
    return {"accuracy": float((found == prediction.label_ids)[counted].mean())}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
        return
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def assert_same_output(one: Any, other: Any) -> None:
    assert_same(one.predictions, other.predictions)
    assert_same(one.label_ids, other.label_ids)
    assert one.metrics["test_loss"] == pytest.approx(other.metrics["test_loss"], rel=TOLERANCE)


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    total = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


class Contrastive(transformers.BertForSequenceClassification):
    """As CLIP: the loss may be asked for, and compares rows."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, return_loss: bool = True) -> Any:
        found = super().forward(input_ids, attention_mask, labels=labels)
        return {**found, "loss": found.loss + (found.logits @ found.logits.T).logsumexp(-1).mean()}


class WithTable(transformers.BertForSequenceClassification):
    """Returns something that has no rows."""

    shape: tuple[int, ...] = (5, 2)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        return {**super().forward(input_ids, attention_mask, labels=labels), "table": torch.zeros(self.shape)}


class WithNumber(WithTable):
    shape = ()


def of_class(kind: type[nn.Module]) -> dict[str, Any]:
    return {"build": lambda: kind(tiny.bert_config()), "remove_unused_columns": False}


NESTED = {"build": lambda: tiny.bert(output_hidden_states=True)}
SMOOTHED = {"label_smoothing_factor": 0.1}
RECOVERED: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{name: (name, 3, {}) for name in ("bert", "bert-tokens", "bert-qa", "gpt2", "llama-causal-lm", "t5", "vit")},
    "single rows weigh as their labels do": ("bert-tokens", 1, {}),
    "smoothed": ("bert-tokens", 3, SMOOTHED),
    "smoothed, causal": ("llama-causal-lm", 3, SMOOTHED),
    "summed loss": ("bert-tokens", 3, {"trainer_compute_loss_func": summed_loss}),
    "preprocessed": ("bert-tokens", 3, {"trainer_preprocess_logits_for_metrics": class_predictions}),
    "unconcatenated": ("bert-tokens", 3, {"eval_do_concat_batches": False}),
    "nested outputs": ("bert", 2, NESTED),
    "nested outputs of single rows": ("bert", 1, NESTED),
    "a loss that compares rows": ("bert", 3, of_class(Contrastive)),
    "an output without rows": ("bert", 3, of_class(WithTable)),
    "an output that is a number": ("bert", 3, of_class(WithNumber)),
    "the loss alone": ("bert-tokens", 3, {"trainer_compute_metrics": None, "prediction_loss_only": True}),
    "no labels": ("bert-tokens", 3, {"trainer_compute_metrics": None}),
}


@pytest.mark.parametrize("case", RECOVERED)
def test_recovered_prediction_is_that_of_the_whole_batch(case: str, tmp_path: Path) -> None:
    name, rows, settings = RECOVERED[case]
    whole, _ = make_trainer(name, tmp_path, **settings)
    split, limit = make_trainer(name, tmp_path, rows=rows, **settings)
    recover_predictions(split)
    examples = whole.eval_dataset
    if case == "no labels":
        examples = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in examples]
    ignored = ["table"] if "output" in case and "nested" not in case else None
    expected, found = (trainer.predict(examples, ignore_keys=ignored) for trainer in (whole, split))
    if case == "no labels":
        assert_same(expected.predictions, found.predictions)
    elif case == "the loss alone":
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=TOLERANCE)
    else:
        assert_same_output(expected, found)
    assert expected.metrics.keys() == found.metrics.keys()
    assert limit is not None
    assert limit.failures >= 2


def generating_trainer(
    output_dir: Any,
    generation_max_length: int,
    smoothing: float = 0.0,
    kind: type[Seq2SeqTrainer] = Seq2SeqTrainer,
    build: Callable[[], nn.Module] = heads.HEADS["t5"].build,
    beams: int | None = None,
) -> Seq2SeqTrainer:
    torch.manual_seed(0)
    quiet = tiny.arguments(output_dir).to_dict()
    kept = {name: quiet[name] for name in ("output_dir", "use_cpu", "report_to", "disable_tqdm")}
    args = Seq2SeqTrainingArguments(
        **kept,
        predict_with_generate=True,
        generation_max_length=generation_max_length,
        per_device_eval_batch_size=8,
        label_smoothing_factor=smoothing,
        generation_num_beams=beams,
    )
    return kind(
        model=build(),
        args=args,
        data_collator=default_data_collator,
        processing_class=tiny.tokenizer(),
    )


@pytest.mark.parametrize(("longest", "rows", "smoothing"), [(9, 3, 0.0), (9, 2, 0.1), (40, 2, 0.0)])
def test_generated_text_is_that_of_the_whole_batch(longest: int, rows: int, smoothing: float, tmp_path: Path) -> None:
    """Where texts are longer than the model's own ``max_length`` stock does not pad the micro-batches to one length."""
    outputs = []
    for limit in (8, rows):
        trainer = generating_trainer(tmp_path, generation_max_length=longest, smoothing=smoothing)
        stock = trainer.model.generate

        def generate(limit: int = limit, stock: Any = stock, **inputs: Any) -> torch.Tensor:
            if len(inputs["input_ids"]) > limit:
                raise torch.OutOfMemoryError(FAKE)
            if longest == 9:
                return stock(**inputs)
            texts = [torch.full((22 + int(row.sum()) % 15,), 7) for row in inputs["input_ids"]]
            return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)

        trainer.model.generate = generate
        recover_predictions(trainer)
        outputs.append(trainer.predict(uneven(heads.HEADS["t5"].examples(8))))
    assert (outputs[0].predictions.shape[1] > 22) == (longest == 40)
    assert_same_output(*outputs)


def whisper() -> nn.Module:
    """Return a Whisper that hears a difference, and whose texts end at any of several tokens."""
    model = language_models.build("whisper", torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6)
    model.generation_config.eos_token_id = list(range(40, 60))
    return model


class OwnLoss(Seq2SeqTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 1.0, outputs) if return_outputs else outputs.loss * 1.0


@pytest.mark.parametrize(("kind", "beams"), [(Seq2SeqTrainer, 1), (Seq2SeqTrainer, 2), (OwnLoss, 1), (OwnLoss, 2)])
def test_speech_is_written_down_as_in_the_whole_batch(kind: type[Seq2SeqTrainer], beams: int, tmp_path: Path) -> None:
    """Generation hands the labels to Whisper's encoder, which runs out of memory there; texts have several lengths.

    Beam search takes a padding of 0 for none, and fills shorter texts of a batch up with the first of the end tokens.
    """
    sounds = torch.randn(8, 80, 48, generator=torch.Generator().manual_seed(4)).double()
    rows = [{"input_features": sound, "labels": list(range(5, 11))} for sound in sounds]
    outputs = []
    for limit in (8, 3):
        trainer = generating_trainer(tmp_path, 12, kind=kind, build=whisper, beams=beams)
        recover_predictions(trainer)
        memory = Limit(trainer.model, limit)
        outputs.append(trainer.predict(uneven(rows)))
    assert memory.failures >= 2
    ends = (~np.isin(outputs[0].predictions[:, 1:], (0, 40))).sum(1)
    assert len(set(ends.tolist())) > 1
    assert ((outputs[0].predictions == 40).sum() > 8) == (beams == 2)
    assert_same_output(*outputs)


def test_generated_ids_are_what_argmax_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, found = uneven(heads.HEADS["t5"].examples(8)), []
    for callbacks in ([], [EvaluationGuardCallback("argmax")]):
        trainer = generating_trainer(tmp_path, generation_max_length=9)
        trainer.compute_metrics = lambda given: {"ids": float(given.predictions.sum())}
        found.append(attach(trainer, *callbacks).predict(rows))
    assert_same_output(*found)
    assert caplog.messages == []


def test_size_is_remembered_until_the_evaluation_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, limit = make_trainer("bert", tmp_path, rows=2, per_device_eval_batch_size=8)
    assert limit is not None
    recover_predictions(trainer)
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        trainer.evaluate()
    assert limit.failures == 2  # 8 rows and 4, and none in the second batch
    assert [record.getMessage() for record in caplog.records] == [
        f"evaluation: out of memory with {rows} rows; it goes on with {rows // 2} at a time, and joins the results."
        for rows in (8, 4)
    ]
    trainer.evaluate()
    assert limit.failures == 4
    limit.rows = 8
    limit.sizes.clear()
    trainer.evaluate()
    assert limit.sizes == [8, 8]


def test_failed_rows_are_freed_before_the_next_try(tmp_path: Path) -> None:
    trainer, limit = make_trainer("bert", tmp_path, rows=3)
    assert limit is not None
    alive: list[bool] = []
    recover_predictions(trainer)
    trainer.model.register_forward_pre_hook(lambda *_: alive.extend(one() is not None for one in limit.failed))
    trainer.evaluate()
    assert alive
    assert not any(alive)


def test_a_row_that_does_not_fit_is_named(tmp_path: Path) -> None:
    trainer, _ = make_trainer("bert", tmp_path, rows=0)
    recover_predictions(trainer)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.evaluate()
    assert str(error.value) == (
        "row 0 of batch 0 of this evaluation, 12 tokens long, does not fit alone; expected a row that fits. Try "
        "shorter text (truncation=True, max_length=...), bf16_full_eval=True outside training, or "
        f"EvaluationGuardCallback(reduce='argmax'). ({FAKE})"
    )


def test_a_model_without_a_backbone_is_named(tmp_path: Path) -> None:
    def build() -> Any:
        model = heads.NamedTargets()
        model.config = tiny.bert_config()
        return model

    trainer, _ = make_trainer("bert-tokens", tmp_path, rows=3, build=build, label_names=["targets"])
    trainer.eval_dataset = [{"input_ids": row["input_ids"], "targets": row["labels"]} for row in trainer.eval_dataset]
    recover_predictions(trainer)
    with pytest.raises(torch.OutOfMemoryError, match="cannot be split: NamedTargets: rows depend on each other"):
        trainer.evaluate()


def test_two_techniques_recover_and_either_may_end(tmp_path: Path) -> None:
    trainer, _ = make_trainer("bert", tmp_path, rows=3)
    whole, _ = make_trainer("bert", tmp_path)
    expected = whole.evaluate()["eval_loss"]
    before = dict(vars(trainer))
    for first in (0, 1):
        handles = [recover_predictions(trainer), recover_predictions(trainer)]
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
        handles[first].remove()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
        handles[1 - first].remove()
        with pytest.raises(torch.OutOfMemoryError):
            trainer.evaluate()
    assert vars(trainer).keys() - {"model_preparation_time"} == before.keys()


def test_stock_counts_items_once_per_batch_by_this_name(tmp_path: Path) -> None:
    """Pins the private name: were it gone, a process that splits would count, and wait for the others, once more."""
    trainer, limit = make_trainer("llama-causal-lm", tmp_path, rows=3)
    counted: list[int] = []
    before = trainer._get_num_items_in_batch

    def count(batches: list[Any], device: Any) -> Any:
        counted.append(len(batches[0]["labels"]))
        return before(batches, device)

    trainer._get_num_items_in_batch = count
    recover_predictions(trainer)
    trainer.evaluate()
    assert counted == [7, 7, 2]
    assert limit is not None
    assert limit.failures == 2


def of_lengths(count: int = 16) -> list[dict[str, Any]]:
    """Token examples of 3 to 12 tokens."""
    rows = []
    for number, row in enumerate(heads.token_examples(count)):
        length = 3 + number * 7 % 10
        rows.append({name: column[:length] for name, column in row.items()})
    return rows


def token_trainer(output_dir: Any, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a token classifier whose batches have different lengths."""
    padding = BucketedCollator(tiny.tokenizer(), pad_to_multiple_of=None)
    given = {"trainer_data_collator": padding, "trainer_compute_metrics": accuracy, "trainer_callbacks": [*callbacks]}
    trainer, _ = make_trainer("bert-tokens", output_dir, **{"per_device_eval_batch_size": 4, **given, **settings})
    trainer.eval_dataset = of_lengths()
    return trainer


def test_argmax_gives_the_same_metrics_during_training_and_alone(tmp_path: Path) -> None:
    logs = []
    training = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    for callbacks in ([], [EvaluationGuardCallback("argmax")]):
        trainer = token_trainer(tmp_path, *callbacks, **training, trainer_train_dataset=heads.token_examples(16))
        attach(trainer)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
        logs.append([(entry["eval_loss"], entry["eval_accuracy"]) for entry in log])
        output = trainer.predict(of_lengths())
        logs[-1].append((output.metrics["test_loss"], output.metrics["test_accuracy"]))
        shape = output.predictions.shape
    assert len(logs[0]) == 3
    assert logs[0] == logs[1]
    assert shape == (16, 12)
    assert output.predictions.dtype == np.int64


def test_a_metric_may_predict_other_rows_itself(tmp_path: Path) -> None:
    found = []

    def metric(prediction: Any) -> dict[str, float]:
        trainer.compute_metrics = None
        others = trainer.predict(of_lengths(8))
        trainer.compute_metrics = metric
        return {**accuracy(prediction), "of_others": accuracy(others)["accuracy"]}

    for callbacks in ([], [EvaluationGuardCallback("argmax")]):
        trainer = token_trainer(tmp_path, *callbacks, trainer_compute_metrics=metric)
        measured = attach(trainer).evaluate()
        found.append([measured["eval_loss"], measured["eval_accuracy"], measured["eval_of_others"]])
    assert found[0] == found[1]
    assert trainer.predict(of_lengths(8)).predictions.ndim == 2


def test_callable_and_datasets_by_name(tmp_path: Path) -> None:
    def first_class(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[..., 0]

    def shape(prediction: Any) -> dict[str, float]:
        rows, columns = prediction.predictions.shape  # fails of whole logits
        return {"rows": rows, "columns": columns}

    trainer = token_trainer(tmp_path, EvaluationGuardCallback(first_class), trainer_compute_metrics=shape)
    trainer.eval_dataset = {"long": of_lengths(), "short": of_lengths(3)}
    attach(trainer)
    metrics = trainer.evaluate()
    assert {"eval_long_loss", "eval_short_loss"} <= metrics.keys()
    assert [metrics[f"eval_{name}"] for name in ("long_rows", "long_columns", "short_rows", "short_columns")] == [
        16,
        12,
        3,
        10,
    ]


def test_sorted_views_and_recovery(tmp_path: Path) -> None:
    stock = token_trainer(tmp_path)
    guarded = token_trainer(tmp_path)
    Limit(guarded.model, 3)
    examples = of_lengths()
    lengths = [len(row["input_ids"]) for row in examples]
    attach(stock)
    attach(guarded, EvaluationGuardCallback())
    view = sorted_by_length(examples, lengths=lengths)
    expected = stock.predict(view)
    found = guarded.predict(view)
    assert_same_output(expected, found)
    for name in ("test_loss_per_token", "test_accuracy"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=TOLERANCE)


def test_outputs_are_moved_before_the_card_is_full() -> None:
    """On the CPU there is no card to move them from, so the device is a fake one here."""
    args = SimpleNamespace(
        eval_accumulation_steps=None,
        device=torch.device("cuda"),
        batch_eval_metrics=False,
        eval_do_concat_batches=True,
    )
    trainer: Any = SimpleNamespace(
        args=args, preprocess_logits_for_metrics=None, accelerator=SimpleNamespace(num_processes=1)
    )
    outputs = kept_outputs.KeptOutputs(trainer, None, "", 4000, range(8), "Evaluation")
    steps = []
    for columns in (10, 25, 10, 2000):
        outputs.reduce_and_check(torch.zeros(10, columns), None)
        steps.append(args.eval_accumulation_steps)
    assert steps == [10, 4, 4, 1]


def test_arguments_are_the_users_after_an_evaluation(tmp_path: Path) -> None:
    trainer = token_trainer(tmp_path)
    arguments = trainer.args.to_dict()
    handle = guard_evaluation(trainer, "argmax")
    trainer.evaluate()
    assert trainer.args.to_dict() == arguments
    assert pickle.loads(pickle.dumps(trainer.args)).to_dict() == arguments
    trainer.compute_metrics = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert trainer.args.to_dict() == arguments
    assert trainer.preprocess_logits_for_metrics is None
    trainer.compute_metrics = accuracy
    handle.remove()
    assert not {"evaluation_loop", "prediction_step"} & vars(trainer).keys()


@pytest.mark.parametrize(
    ("available", "settings", "needs"),
    [  # two processes of a host, each of which keeps the outputs of all; then a short first batch
        (1000, {"eval_do_concat_batches": False}, "1.9 KiB {}; only 500 B may be used (all that is available)"),
        (2400, {}, "1.5 KiB {}; only 1.2 KiB may be used (half of the 2.3 KiB available, because {})"),
    ],
)
def test_outputs_that_cannot_be_kept_are_refused(
    available: int, settings: dict[str, Any], needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kept_outputs, "read_memory", lambda device=None: replace(read_memory("cpu"), host_available_bytes=available)
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2" if settings else "1")
    trainer = token_trainer(tmp_path, **settings)
    if not settings:
        trainer.eval_dataset = sorted(of_lengths(), key=lambda row: len(row["input_ids"]))
    attach(trainer, EvaluationGuardCallback())
    with pytest.raises(MemoryError) as error:
        trainer.evaluate()
    assert str(error.value) == (
        f"evaluation outputs need {needs.format('of host memory', 'concatenation holds them twice')}. Reduce them on "
        "the GPU: EvaluationGuardCallback(reduce='argmax'), or compute metrics batch by batch: "
        "TrainingArguments(..., batch_eval_metrics=True)"
    )


def test_metrics_by_batch_are_left_to_stock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counts: list[int] = []

    def by_batch(prediction: Any, compute_result: bool) -> dict[str, float]:
        counts.append(len(prediction.predictions))
        assert prediction.predictions.dim() == 3  # logits, still a tensor: nothing is kept that would have to be small
        return {"batches": float(len(counts))} if compute_result else {}

    settings = {"batch_eval_metrics": True, "trainer_compute_metrics": by_batch}
    trainer = token_trainer(tmp_path, **settings)
    attach(trainer, EvaluationGuardCallback("argmax"))
    assert trainer.evaluate()["eval_batches"] == 4.0
    assert counts == [4, 4, 4, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "evaluation: reduce='argmax' and compute_metrics=<by_batch> cannot be checked on one batch: "
        "batch_eval_metrics=True keeps no predictions, so reducing them saves nothing; expected a function of "
        "predictions and labels alone. Predictions stay whole, one batch at a time. To reduce all the same, pass "
        "Trainer(..., preprocess_logits_for_metrics=...) and reduce=None."
    ]


def loss_of_labelled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean over the labels that count; the others cost no softmax over all classes."""
    counted = labels != -100
    return nn.functional.cross_entropy(outputs.logits[counted], labels[counted])


def mean_class(prediction: Any) -> dict[str, float]:
    """Of logits or of classes; no chance agreement of 50,000 classes, as an accuracy of 0 would be."""
    found = prediction.predictions
    if found.ndim > prediction.label_ids.ndim:
        found = found.argmax(-1)
    return {"class": float(found[prediction.label_ids != -100].mean())}


def rise_of_peak(evaluate: Callable[[], Any]) -> tuple[int, Any]:
    """Return by how much this process grew at most, and what was returned."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read_process()[0]
    found = evaluate()
    peak = read_process()[1]
    assert peak is not None
    return peak - before, found


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, to reset the peak")
@pytest.mark.slow
def test_50_000_classes_stay_below_200_megabytes(tmp_path: Path) -> None:
    """Everything counts, the card being the CPU: the logits of one batch, its loss, and what is kept."""
    classes, tokens, count, few = 50_000, 128, 160, 8
    rows = [
        {
            "input_ids": [5 + (row + i) % 90 for i in range(tokens)],
            "labels": [(row * 31 + i) % classes if i % 8 == 0 else -100 for i in range(tokens)],
        }
        for row in range(count)
    ]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 1}
    config = tiny.bert_config(**sizes, max_position_embeddings=tokens, num_labels=classes)
    settings = {"trainer_compute_loss_func": loss_of_labelled, "trainer_compute_metrics": mean_class}
    trainer, _ = make_trainer(
        "bert-tokens",
        tmp_path,
        build=lambda: transformers.BertForTokenClassification(config),
        per_device_eval_batch_size=1,
        **settings,
    )
    trainer.evaluate(rows[:1])  # what torch keeps from its first call on
    row_bytes = tokens * classes * 4
    with guard_evaluation(trainer, "argmax"):
        rise_bytes, _ = rise_of_peak(lambda: trainer.evaluate(rows))
        guarded = trainer.evaluate(rows[:few])
    stock_bytes, stock = rise_of_peak(lambda: trainer.evaluate(rows[:few]))
    print(f"peak above start: {rise_bytes:,}; stock with {few} rows: {stock_bytes:,}")
    assert stock_bytes > few * row_bytes  # so does it hold all logits, twice where it concatenates
    assert count * row_bytes > 4e9
    assert rise_bytes < 200e6
    assert (guarded["eval_loss"], guarded["eval_class"]) == (stock["eval_loss"], stock["eval_class"])


@pytest.mark.parametrize(
    ("logits", "shown"),
    [
        (torch.zeros(2, 1), "(2, 1) and dtype torch.float32"),
        (torch.zeros(2, 3).bool(), "(2, 3) and dtype torch.bool"),
        ("text", "str"),
        ((), "tuple"),
    ],
    ids=["regression", "a mask", "text", "nothing"],
)
def test_classes_of_spans_and_mappings_but_not_of_what_is_no_logits(logits: Any, shown: str) -> None:
    start, end = torch.eye(3), torch.eye(3).flip(0)
    labels = (torch.zeros(3), torch.zeros(3))
    assert [one.tolist() for one in class_predictions((start, end, "states"), labels)] == [[0, 1, 2], [2, 1, 0]]
    assert class_predictions({"logits": start, "other": end}, labels[0]).tolist() == [0, 1, 2]
    assert class_predictions(torch.tensor([[3, 4]]), labels[0]).tolist() == [[3, 4]]
    with pytest.raises(ValueError, match="reduce='argmax'") as error:
        class_predictions(logits, None)
    assert str(error.value) == (
        f"reduce='argmax' found an output of shape {shown}, which are not logits of several classes; expected a "
        "floating point output of shape (batch, ..., classes). For one label write "
        "EvaluationGuardCallback(reduce=None); say what to keep of others: reduce=lambda logits, labels: ..."
    )


def test_argmax_of_one_label_is_refused(tmp_path: Path) -> None:
    trainer = attach(Trainer(tiny.bert(num_labels=1), tiny.arguments(tmp_path)), EvaluationGuardCallback("argmax"))
    with pytest.raises(ValueError, match=r"For one label write EvaluationGuardCallback\(reduce=None\)"):
        trainer.predict(tiny.rows(4))
    trainer.memopt_handle.remove()
    assert attach(trainer, EvaluationGuardCallback()).predict(tiny.rows(4)).predictions.shape == (4, 1)


class PredictsItself(Trainer):
    """Measures by its own predictions."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return {"classes": self.predict(self.eval_dataset).predictions.shape[1:]}


@pytest.mark.parametrize(("reduce", "shape"), [("argmax", ()), (None, (3,))])
def test_predictions_that_no_metric_checks_are_said_to_be_reduced(
    reduce: Any, shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = PredictsItself(tiny.bert(), tiny.arguments(tmp_path), eval_dataset=tiny.rows(4))
    attach(trainer, EvaluationGuardCallback(reduce))
    assert [trainer.evaluate()["classes"] for _ in range(2)] == [shape] * 2
    assert caplog.messages == [
        "evaluation: reduce='argmax' reduces what trainer.predict returns without compute_metrics too; argmax of it is "
        "wrong. For logits pass EvaluationGuardCallback(reduce=None)."
    ] * (reduce is not None)


@pytest.mark.slow
def test_one_process_of_two_recovers(tmp_path: Path) -> None:
    for found in run_pair(tmp_path, __file__, str(tmp_path)):
        assert found["failures"] == [0, 2]  # 7 rows and 4; the last batch has 2
        assert found["whole"] == pytest.approx(found["split"], rel=TOLERANCE)


def main(folder: str) -> None:
    """Evaluate with all rows, then with a limit in process 1 alone."""
    metrics, failures = {}, []
    for way in ("whole", "split"):
        trainer, _ = make_trainer("llama-causal-lm", folder, ddp_backend="gloo", trainer_compute_metrics=accuracy)
        rank = trainer.args.process_index
        limit = Limit(trainer.model, 2 if way == "split" and rank == 1 else 100)
        recover_predictions(trainer)
        found = trainer.evaluate()
        metrics[way] = [found["eval_loss"], found["eval_accuracy"]]
        failures.append(sum(trainer.accelerator.gather(torch.tensor([limit.failures])).tolist()))
    Path(folder, f"rank{rank}.json").write_text(json.dumps({**metrics, "failures": failures}))


if __name__ == "__main__":
    main(sys.argv[1])
