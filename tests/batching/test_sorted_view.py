"""Evaluation by a sorted view in the stock Trainer: dataset order, the same metrics, the exact loss, two processes.

Run under ``torch.distributed``'s environment it writes what every case gives to a file per rank.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import heads
import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from noted_batches import note_shapes
from slow_cases import slow_except
from tables import refuses, table, whole
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, Subset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import tiny
from hf_memopt import BucketedCollator, attach, bucketed, sorted_by_length
from two_ranks import run_pair

COUNT = 13
LENGTHS = [(7 * i) % 23 + 2 for i in range(COUNT)]
IGNORED = -100
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 logits of up to 10, summed in another order for another width

Row = dict[str, Any]


def rows(count: int, labels: Callable[[int, list[int]], Any]) -> list[Row]:
    """Return examples of different lengths; the first token, 5 + index, tells which one it is."""
    found = []
    for i in range(count):
        ids = [5 + i, *(5 + (17 * i + 3 * j) % 90 for j in range(1, LENGTHS[i % COUNT]))]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels(i, ids)})
    return found


def some_ignored(i: int, ids: list[int]) -> list[int]:
    """Labels for every token but a third."""
    return [token % 3 if j % 3 != i % 3 else IGNORED for j, token in enumerate(ids)]


class Case(NamedTuple):
    """A model, the labels of its examples, and the summed loss and number of counted labels of one example alone."""

    build: Callable[[], Any]
    labels: Callable[[int, list[int]], Any]
    loss_of_one: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, int]]
    unit: str


def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy of one row's counted labels."""
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), int((labels != -100).sum())


def seeded(build: Callable[[], Any], scale: float = 3.0) -> Callable[[], Any]:
    """Return a builder that always draws the same weights, scaled so that losses differ between rows."""

    def build_seeded() -> Any:
        torch.manual_seed(0)
        model = build().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        return model

    return build_seeded


CASES = {
    "classes": Case(
        seeded(tiny.bert),
        lambda i, ids: (i * i) % 3,
        lambda logits, label: (functional.cross_entropy(logits[None], label[None]), 1),
        "example",
    ),
    "regression": Case(
        seeded(lambda: tiny.bert(num_labels=1)),
        lambda i, ids: i / 3,
        lambda logits, label: ((logits[0] - label) ** 2, 1),
        "example",
    ),
    "targets": Case(
        seeded(lambda: tiny.bert(problem_type="multi_label_classification")),
        lambda i, ids: [float(i % 2), 1.0, float(i % 3 == 0)],
        lambda logits, label: (functional.binary_cross_entropy_with_logits(logits, label), 1),
        "example",
    ),
    "tokens": Case(
        seeded(lambda: transformers.BertForTokenClassification(tiny.bert_config())), some_ignored, of_tokens, "token"
    ),
    "causal": Case(
        seeded(tiny.llama), lambda i, ids: ids, lambda logits, labels: of_tokens(logits[:-1], labels[1:]), "token"
    ),
    "seq2seq": Case(
        seeded(heads.HEADS["t5"].build, 1.0), lambda i, ids: [*ids[i % 5 :: -1], 5 + i % 7, 3], of_tokens, "token"
    ),
}


def reference(case: Case, examples: list[Row]) -> tuple[list[np.ndarray], float]:
    """Return the logits of every example and the loss per label, one example at a time without any padding."""
    model, logits, losses, counts = case.build(), [], [], []
    for row in examples:
        labels = torch.tensor(row["labels"])
        with torch.no_grad():
            output = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels[None])
        logits.append(output.logits[0].numpy())
        loss, count = case.loss_of_one(output.logits[0], labels)
        losses.append(float(loss))
        counts.append(count)
    return logits, sum(losses) / sum(counts)


def record(prediction: transformers.EvalPrediction) -> dict[str, Any]:
    """Metrics that tell the order: each row's index by its first token, and what the first prediction of it is."""
    predictions = prediction.predictions
    first = predictions[0] if isinstance(predictions, tuple) else predictions
    labels = prediction.label_ids.reshape(len(prediction.label_ids), -1)
    found = {"indices": (prediction.inputs[:, 0] - 5).tolist(), "labels": labels[:, 0].tolist()}
    return {**found, "logits": first.reshape(len(first), -1)[:, 0].tolist(), "loss_rows": len(prediction.losses)}


def make_trainer(name: str, output_dir: Any, dataset: Any, kind: Any = Trainer, **settings: Any) -> Trainer:
    """Return an attached trainer of a case that evaluates a dataset."""
    names = [key for key in settings if key.startswith("trainer_")]
    given = {key.removeprefix("trainer_"): settings.pop(key) for key in names}
    settings = {"per_device_eval_batch_size": 4, "include_for_metrics": ["inputs", "loss"], **settings}
    given = {"eval_dataset": dataset, "compute_metrics": record, **given}
    collator = BucketedCollator(tiny.tokenizer(), pad_to_multiple_of=1)
    return attach(kind(CASES[name].build(), tiny.arguments(output_dir, **settings), data_collator=collator, **given))


def classes(count: int = COUNT) -> list[Row]:
    return rows(count, CASES["classes"].labels)


def without_speed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of an evaluation that neither measure time nor tell the epoch."""
    timed = ("_runtime", "_per_second", "_time", "epoch")
    return {key: value for key, value in metrics.items() if not key.endswith(timed)}


def first_logits(predictions: Any) -> np.ndarray:
    """Return the logits where the model gives more (an encoder-decoder its encoder's states)."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_except(
        [("classes", "arrow"), ("tokens", "arrow"), *((name, "list") for name in CASES)],
        itertools.product(CASES, ("list", "arrow")),
    ),
)
def test_results_are_those_of_each_example_alone_in_dataset_order(name, kind, tmp_path):
    case, source = CASES[name], list if kind == "list" else Dataset.from_list
    examples = rows(COUNT, case.labels)
    logits, loss = reference(case, examples)
    plain = make_trainer(name, tmp_path, source(examples)).evaluate()
    view = sorted_by_length(source(examples))
    trainer = make_trainer(name, tmp_path, view)
    metrics = trainer.evaluate()

    assert metrics["eval_indices"] == list(range(COUNT))
    assert metrics["eval_loss_rows"] == COUNT
    assert metrics["eval_labels"] == plain["eval_labels"]
    np.testing.assert_allclose(metrics["eval_logits"], plain["eval_logits"], **CLOSE)
    assert metrics[f"eval_loss_per_{case.unit}"] == pytest.approx(loss, rel=1e-6)
    if case.unit == "example":
        assert metrics["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics.keys() - plain.keys() == {f"eval_loss_per_{case.unit}"}

    output = trainer.predict(view)  # the same view, by the other door
    for one, alone in zip(first_logits(output.predictions), logits, strict=True):
        np.testing.assert_allclose(one.reshape(-1)[: alone.size], alone.reshape(-1), **CLOSE)
    for one, row in zip(output.label_ids, examples, strict=True):
        labels = np.atleast_1d(row["labels"]).astype(output.label_ids.dtype)
        assert np.array_equal(np.atleast_1d(one)[: len(labels)], labels)
    assert output.metrics[f"test_loss_per_{case.unit}"] == metrics[f"eval_loss_per_{case.unit}"]


def test_a_dataset_without_labels_gives_predictions_and_no_loss(tmp_path):
    examples = [{"input_ids": row["input_ids"]} for row in classes()]
    trainer = make_trainer("classes", tmp_path, None)
    plain, by_view = trainer.predict(examples), trainer.predict(sorted_by_length(examples))
    np.testing.assert_allclose(by_view.predictions, plain.predictions, rtol=0, atol=1e-6)
    assert by_view.label_ids is None
    assert without_speed(by_view.metrics) == {}


def test_a_loss_of_the_user_that_divides_by_the_count_is_exact(tmp_path):
    def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    class Summing(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            loss = summed(outputs, inputs["labels"], num_items_in_batch)
            return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    examples = rows(COUNT, CASES["causal"].labels)
    for given in ({"trainer_compute_loss_func": summed}, {"kind": Summing}):
        metrics = make_trainer("causal", tmp_path, sorted_by_length(examples), **given).evaluate()
        assert metrics["eval_loss_per_token"] == pytest.approx(reference(CASES["causal"], examples)[1], rel=1e-6)


def test_it_pads_less_and_begins_with_the_longest(tmp_path):
    examples, shapes = classes(), {}
    for kind, dataset in (("plain", examples), ("sorted", sorted_by_length(examples))):
        trainer = make_trainer("classes", tmp_path, dataset)
        shapes[kind] = note_shapes(trainer.model)
        trainer.evaluate()
    padded = {kind: sum(count * width for count, width in seen) for kind, seen in shapes.items()}
    assert [width for _, width in shapes["sorted"]] == sorted(LENGTHS, reverse=True)[::4]
    assert len(shapes["plain"]) == len(shapes["sorted"])  # one forward pass per batch and no more
    assert padded["plain"] > 1.2 * padded["sorted"], padded


def test_a_dict_of_datasets_and_evaluation_during_training(tmp_path):
    examples, others = classes(), classes(7)
    views = {"a": sorted_by_length(examples), "b": others, "c": sorted_by_length(others)}
    settings = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, "eval_strategy": "epoch"}
    settings |= {"num_train_epochs": 2, "trainer_train_dataset": bucketed(examples, batch_size=4)}
    trainer = make_trainer("classes", tmp_path, views, **settings)
    trainer.train()
    assert sum("eval_a_indices" in entry for entry in trainer.state.log_history) == 2
    metrics = trainer.evaluate()
    assert metrics["eval_a_indices"] == list(range(COUNT))
    assert metrics["eval_b_indices"] == metrics["eval_c_indices"] == list(range(7))
    assert metrics["eval_c_loss_per_example"] == pytest.approx(metrics["eval_b_loss"], rel=1e-6)
    assert "eval_b_loss_per_example" not in metrics


def test_columns_that_a_trainer_adds_reach_its_loss(tmp_path):
    seen: list[list[float]] = []

    class Weighted(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            super()._set_signature_columns_if_needed()
            self._signature_columns += ["weight"]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(inputs.pop("weight").tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    examples = [{**row, "weight": float(i), "text": "no tensor"} for i, row in enumerate(rows(5, lambda i, ids: 0))]
    view = sorted_by_length(Dataset.from_list(examples))
    args = tiny.arguments(tmp_path, per_device_eval_batch_size=4)
    trainer = Weighted(tiny.bert(), args, eval_dataset=view, data_collator=BucketedCollator(tiny.tokenizer()))
    attach(trainer).evaluate()
    order = view.order.tolist()
    assert seen == [order[:4], order[4:]]


UNATTACHED = whole("dataset=<SortedExamples>")


def test_a_view_that_nobody_restores_is_not_read(tmp_path):
    view = sorted_by_length(classes(5))
    collator = BucketedCollator(tiny.tokenizer())
    trainer = Trainer(tiny.bert(), tiny.arguments(tmp_path), eval_dataset=view, data_collator=collator)
    attached = make_trainer("classes", tmp_path, Subset(view, [3, 1]))
    for read in (
        trainer.evaluate,
        lambda: trainer.predict(view),
        lambda: next(iter(DataLoader(view, batch_size=2, collate_fn=collator))),
        lambda: view[0],
        attached.evaluate,
    ):
        refuses(RuntimeError, UNATTACHED, read)
    attach(trainer).evaluate()
    with pytest.raises(RuntimeError):
        view[0]  # after the evaluation as before it


def test_a_loop_of_ones_own_says_that_it_restores_the_order(tmp_path):
    examples = classes()
    view = sorted_by_length(examples, restore_by_hand=True)
    collator = BucketedCollator(tiny.tokenizer())
    trainer = Trainer(CASES["classes"].build(), tiny.arguments(tmp_path), data_collator=collator)
    plain = trainer.predict(examples).predictions
    np.testing.assert_allclose(view.restore_order(trainer.predict(view).predictions), plain, rtol=0, atol=1e-6)
    for refused in (lambda: attach(trainer).predict(view), lambda: make_trainer("classes", tmp_path, view)):
        refuses(ValueError, whole("restore_by_hand=True"), refused)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")  # what the test wants
def test_generated_tokens_come_in_dataset_order(tmp_path):
    examples = rows(COUNT, CASES["seq2seq"].labels)
    quiet = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    generates = {"predict_with_generate": True, "generation_max_length": 6}
    args = Seq2SeqTrainingArguments(**quiet, save_strategy="no", per_device_eval_batch_size=4, **generates)
    collator = BucketedCollator(tiny.tokenizer())
    trainer = attach(Seq2SeqTrainer(CASES["seq2seq"].build(), args, data_collator=collator))
    output = trainer.predict(sorted_by_length(examples))
    with torch.no_grad():
        for tokens, row in zip(output.predictions, examples, strict=True):
            alone = trainer.model.generate(torch.tensor([row["input_ids"]]), max_length=6, do_sample=False)[0].numpy()
            assert tokens[: len(alone)].tolist() == alone.tolist()
    assert output.metrics["test_loss_per_token"] == pytest.approx(reference(CASES["seq2seq"], examples)[1], rel=1e-6)


SIZES = {"classes": [(COUNT, 2), (5, 2), (3, 4), (8, 2)], "causal": [(COUNT, 2), (3, 4)]}  # examples, per device


def run_cases(output_dir: str) -> dict[str, Any]:
    """Evaluate and predict every case in this process of several."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for count, size in SIZES.get(name, [(5, 2)]):
            view = sorted_by_length(rows(count, case.labels))
            settings = {"per_device_eval_batch_size": size, "ddp_backend": "gloo"}
            trainer = make_trainer(name, output_dir, view, **settings)
            metrics = without_speed(trainer.evaluate())
            predictions = [one.reshape(-1).tolist() for one in first_logits(trainer.predict(view).predictions)]
            found[f"{name} {count}"] = {"metrics": metrics, "predictions": predictions}
    view = sorted_by_length(rows(5, CASES["causal"].labels))
    settings = {"per_device_eval_batch_size": 2, "ddp_backend": "gloo", "prediction_loss_only": True}
    found["loss only"] = make_trainer("causal", output_dir, view, **settings).evaluate()["eval_loss_per_token"]
    return found


@pytest.mark.slow
def test_two_processes_give_the_results_of_each_example_alone(tmp_path):
    one, other = run_pair(tmp_path, __file__, str(tmp_path))
    assert one == other
    assert one["loss only"] == pytest.approx(reference(CASES["causal"], rows(5, CASES["causal"].labels))[1], rel=1e-6)
    for name, case in CASES.items():
        for count, _ in SIZES.get(name, [(5, 2)]):
            logits, loss = reference(case, rows(count, case.labels))
            metrics, predictions = one[f"{name} {count}"].values()
            assert metrics["eval_indices"] == list(range(count))
            assert metrics["eval_loss_rows"] == count
            assert metrics[f"eval_loss_per_{case.unit}"] == pytest.approx(loss, rel=1e-6), (name, count)
            for predicted, alone in zip(predictions, logits, strict=True):
                np.testing.assert_allclose(predicted[: alone.size], alone.reshape(-1), **CLOSE)
    full = one["classes 8"]["metrics"]  # no row over: nothing to repeat, so stock's mean is the same
    assert full["eval_loss"] == pytest.approx(full["eval_loss_per_example"], rel=1e-6)


def test_the_view_is_sorted_and_stable_and_reads_its_rows():
    examples = [{"input_ids": [i] * length} for i, length in enumerate([2, 3, 2, 3, 1])]
    view = sorted_by_length(Dataset.from_list(examples), restore_by_hand=True)
    assert view.order.tolist() == [1, 3, 0, 2, 4]
    assert list(view) == [examples[i] for i in view.order]
    assert view[-1] == examples[4]
    assert view.__getitems__([0, 4]) == [examples[1], examples[4]]
    twin = pickle.loads(pickle.dumps(view))
    assert list(twin) == list(view)
    assert sorted_by_length(examples, lengths=[1, 1, 1, 1, 2]).order.tolist() == [4, 0, 1, 2, 3]
    assert sorted_by_length([{"ids": [1]}, {"ids": [1, 2]}], column="ids").order.tolist() == [1, 0]


def test_restore_order_goes_through_nests_and_leaves_its_input():
    view = sorted_by_length([{"input_ids": [1] * length} for length in (1, 3, 2)])
    of_view = np.array([[1.0], [2.0], [0.0]])
    restored = view.restore_order({"a": (of_view, None), "b": [torch.from_numpy(of_view)]})
    assert [restored["a"][0].tolist(), restored["b"][0].tolist()] == [[[0.0], [1.0], [2.0]]] * 2
    assert restored["a"][1] is None
    assert of_view[0, 0] == 1.0


REFUSED = {name: tuple(row) for name, *row in table("batching/tables/refused_evaluation")}


@pytest.mark.parametrize("as_dict", [False, True], ids=["one", "dict"])
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_attach_and_predict_refuse_arguments_that_lose_the_order(settings, message, as_dict, tmp_path):
    view = sorted_by_length(classes(5))
    refuses(ValueError, message, make_trainer, "classes", tmp_path, {"a": view} if as_dict else view, **settings)
    refuses(ValueError, message, make_trainer("classes", tmp_path, None, **settings).predict, view)


class Backwards(Sampler[int]):
    def __init__(self, dataset: Any) -> None:
        self.size = len(dataset)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return reversed(range(self.size))


def test_another_sampler_training_and_a_dataset_that_grew_are_refused(tmp_path, monkeypatch):
    examples = classes(5)
    view = sorted_by_length(examples)
    trainer = make_trainer("classes", tmp_path, view)
    monkeypatch.setattr(trainer, "_get_eval_sampler", Backwards)
    refuses(ValueError, whole("sampler=<Backwards>"), trainer.evaluate)
    trained, message = {"trainer_train_dataset": view}, whole("train_dataset=<SortedExamples>")
    refuses(ValueError, message, make_trainer, "classes", tmp_path, None, **trained)
    view = sorted_by_length(examples, restore_by_hand=True)
    examples.append(examples[0])
    for read in (lambda: view[0], lambda: view.__getitems__([0])):
        refuses(RuntimeError, whole("dataset=<6 examples>"), read)


OTHER_SIZE = whole("values=<array of shape")
BAD_CALLS: list[tuple[Callable[[Any], Any], str]] = [
    *[
        (lambda view, values=values: view.restore_order((np.zeros(3), values)), OTHER_SIZE.format(shape))
        for values, shape in ((np.zeros(2), "(2,)"), (torch.zeros(4, 3), "(4, 3)"), (np.array(1.0), "()"))
    ],
    (lambda view: view.restore_order("text"), whole("values=<str> cannot")),
    (lambda view: sorted_by_length(iter([])), whole("dataset=<{kind}> is a stream", kind="list_iterator")),
    (
        lambda view: sorted_by_length(view.dataset, lengths=[1, 2]),
        whole("lengths=<array of shape (2,)> does not belong to a dataset of 3"),
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_what_cannot_be_sorted_or_restored_is_refused(call, message):
    refuses((TypeError, ValueError), message, call, sorted_by_length([{"input_ids": [1]}] * 3))


if __name__ == "__main__":
    results = run_cases(sys.argv[1])
    with open(Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json", "w") as file:
        json.dump(results, file)
