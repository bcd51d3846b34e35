"""What ``reduce`` does to ``compute_metrics``: metrics, early stopping and the best model are stock's, or refused."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, default_data_collator

import tiny
from hf_memopt import EvaluationGuardCallback, attach, sorted_by_length
from hf_memopt.training.devices.readings import read_memory
from hf_memopt.training.techniques.evaluation import outputs as kept_outputs
from hf_memopt.training.techniques.evaluation.metric_check import FOR_CLASSES
from two_ranks import run_pair

LOGGER = "hf_memopt.training.techniques.evaluation.outputs"
REMEDY = f"Let it take both: {FOR_CLASSES}; or pass EvaluationGuardCallback(reduce=None), or another reduce"


def usual(prediction: Any) -> dict[str, float]:
    """As the tutorials write it."""
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, -1) == labels).mean())}


def of_ids(prediction: Any) -> dict[str, float]:
    """Of class ids alone."""
    assert isinstance(prediction.predictions == prediction.label_ids, np.ndarray)
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


def of_both(prediction: Any) -> dict[str, float]:
    ids = prediction.predictions if prediction.predictions.ndim == 1 else prediction.predictions.argmax(-1)
    return {"accuracy": float((ids == prediction.label_ids).mean())}


def make(folder: Any, metrics: Any, *callbacks: Any, rows: Any = None, **settings: Any) -> Trainer:
    """Return a Trainer of a tiny BERT with three classes, whose predictions are not all of one class."""
    torch.manual_seed(0)
    model = tiny.bert()
    with torch.no_grad():
        model.classifier.weight.mul_(50)
    args = tiny.arguments(folder, **{"per_device_eval_batch_size": 4, **settings})
    return Trainer(
        model=model,
        args=args,
        train_dataset=tiny.rows(16, seed=1),
        eval_dataset=tiny.rows(14) if rows is None else rows,
        data_collator=default_data_collator,
        compute_metrics=metrics,
        callbacks=list(callbacks),
    )


def guarded(folder: Any, metrics: Any, *callbacks: Any, reduce: Any = "argmax", **settings: Any) -> Trainer:
    trainer = make(folder, metrics, *callbacks, EvaluationGuardCallback(reduce=reduce), **settings)
    attach(trainer)
    return trainer


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def little_memory(available_bytes: int) -> Callable[[Any], Any]:
    return lambda device=None: replace(read_memory("cpu"), host_available_bytes=available_bytes)


def test_an_ordinary_function_gets_whole_predictions_and_one_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make(tmp_path, usual).evaluate()
    trainer = guarded(tmp_path, usual)
    found = [trainer.evaluate() for _ in range(3)]
    assert {each["eval_accuracy"] for each in found} == {expected["eval_accuracy"]}
    output = trainer.predict(tiny.rows(5, seed=3))
    assert output.predictions.shape == (5, 3)
    [notice] = notices(caplog)
    assert notice == (  # by chance both return 0.5 of the batch as it is
        "evaluation: reduce='argmax' and compute_metrics=<usual> do not agree: for one batch with other predictions it "
        "returns {'accuracy': 1.0} of whole predictions and {'accuracy': 0.25} of reduced ones; expected the same. "
        f"Predictions stay whole, 192 B of host memory. {REMEDY}."
    )


@pytest.mark.parametrize("is_later", [False, True])
def test_what_does_not_fit_whole_is_refused_with_both_values(
    is_later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first evaluation, or in one after another that fitted."""
    trainer = guarded(tmp_path, usual)
    if is_later:
        trainer.evaluate()
    monkeypatch.setattr(kept_outputs, "read_memory", little_memory(300))
    with pytest.raises(ValueError, match="do not agree") as error:
        trainer.evaluate()
    assert str(error.value) == (
        "reduce='argmax' and compute_metrics=<usual> do not agree: for one batch with other predictions it returns "
        "{'accuracy': 1.0} of whole predictions and {'accuracy': 0.25} of reduced ones; expected the same. Whole "
        f"predictions need 192 B of host memory; only 150 B may be used. {REMEDY}"
    )


def test_the_remedy_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = re.search(r"(ids = .*?argmax\(-1\))", REMEDY)
    assert found is not None

    def metrics(p: Any) -> dict[str, float]:
        names: dict[str, Any] = {"p": p}
        exec(found[1], names)
        return {"accuracy": float((names["ids"] == p.label_ids).mean())}

    expected = make(tmp_path, usual).predict(tiny.rows(14)).metrics
    output = guarded(tmp_path, metrics).predict(tiny.rows(14))
    assert output.metrics["test_accuracy"] == expected["test_accuracy"]
    assert output.predictions.shape == (14,)
    unreduced = guarded(tmp_path, usual, reduce=None).predict(tiny.rows(14))
    assert unreduced.metrics["test_accuracy"] == expected["test_accuracy"]
    assert notices(caplog) == []


@pytest.mark.parametrize("classes", [3, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_function_of_class_ids_alone_gets_them(rows: int, classes: int, tmp_path: Path) -> None:
    """With as many rows as classes, or a single one, ids broadcast against logits and nothing fails."""
    labelled = tiny.rows(14, labels=classes)
    trainer = make(tmp_path, of_ids, EvaluationGuardCallback("argmax"), rows=labelled, per_device_eval_batch_size=rows)
    trainer.model, trainer.train_dataset = tiny.bert(num_labels=classes), labelled
    attach(trainer)
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (14,)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("predicted", [0, 1, 2])
def test_agreement_by_chance_is_found_out(rows: int, predicted: int, tmp_path: Path) -> None:
    """At first a model predicts one class, and where that is the first one both ways agree on every batch."""
    trainer = guarded(tmp_path, usual, per_device_eval_batch_size=rows)
    with torch.no_grad():
        trainer.model.classifier.bias[predicted] = 1e4
    assert trainer.predict(tiny.rows(14)).predictions.shape == (14, 3)


def test_own_reductions_are_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def halved(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.half()

    def reversed_classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.flip(-1)

    def overwrites(prediction: Any) -> dict[str, float]:
        found = of_both(prediction)
        prediction.predictions[:] = 0  # what the function does to its arrays stays there
        prediction.label_ids[:] = 9
        return found

    expected = make(tmp_path, usual).evaluate()["eval_accuracy"]
    same = guarded(tmp_path, usual, reduce=halved)
    assert same.evaluate()["eval_accuracy"] == expected
    assert same.predict(tiny.rows(4)).predictions.dtype == np.float16
    assert notices(caplog) == []
    assert guarded(tmp_path, usual, reduce=reversed_classes).evaluate()["eval_accuracy"] == expected
    assert notices(caplog)[0].startswith("evaluation: reduce=<reversed_classes> and compute_metrics=<usual> do not")
    assert guarded(tmp_path, overwrites, per_device_eval_batch_size=14).evaluate()["eval_accuracy"] == expected


@pytest.mark.parametrize(
    "metrics",
    [
        lambda p: {f"of {p.predictions.ndim} axes": 1.0},
        lambda p: {"shape": list(p.predictions.shape)},
        lambda p: {"mean": float(p.predictions.sum()), "nan": float("nan")},
        lambda p: {"first": p.predictions[0, 0].item()},
        lambda p: {"text": str(p.predictions.dtype)},
    ],
    ids=["keys", "lists", "values", "failure", "text"],
)
def test_each_kind_of_difference_keeps_predictions_whole(metrics: Any, tmp_path: Path) -> None:
    expected = make(tmp_path, metrics).evaluate()
    found = guarded(tmp_path, metrics).evaluate()
    names = {name for name in expected if "time" not in name and "per_second" not in name}
    assert repr({name: found[name] for name in names}) == repr({name: expected[name] for name in names})


def describe(path: str, prediction: Any) -> dict[str, float]:
    """Add a line with what the function got."""
    given = {name: value for name, value in vars(prediction).items() if name != "elements" and value is not None}
    arrays = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    shown = {
        name: [(type(value).__name__, str(each.dtype), each.tolist()) for each in value]
        for name, value in arrays.items()
    }
    with open(path, "a") as file:
        file.write(json.dumps([type(prediction.predictions).__name__, shown]) + "\n")
    return {"rows": float(len(prediction.label_ids))}


@pytest.mark.parametrize("settings", [{}, {"eval_do_concat_batches": False}])
def test_the_function_gets_what_stock_gives_it(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of one batch: whole and reduced in the check, the same with other predictions, and reduced by stock."""
    lines = []
    for make_one in (make, guarded):
        path = tmp_path / make_one.__name__
        trainer = make_one(tmp_path, functools.partial(describe, str(path)), rows=tiny.rows(4), **settings)
        trainer.evaluate()
        lines.append(path.read_text().splitlines())
    [stock], (whole, reduced, _, _, last) = lines
    assert whole == stock
    assert reduced == last != whole


def test_a_function_of_more_than_predictions_and_labels_gets_them_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = []
    for make_one in (make, guarded):
        path = tmp_path / make_one.__name__
        metrics = functools.partial(describe, str(path))
        make_one(tmp_path, metrics, rows=tiny.rows(4), include_for_metrics=["inputs", "loss"]).evaluate()
        lines.append(path.read_text())
    assert lines[0] == lines[1]
    assert "cannot be checked on one batch: include_for_metrics=['inputs', 'loss'] gives" in notices(caplog)[0]


def test_each_function_is_checked_once(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    trainer = guarded(tmp_path, functools.partial(describe, str(path)))

    def calls() -> int:
        count = len(path.read_text().splitlines())
        path.unlink()
        return count

    named = {"a": Dataset.from_list(tiny.rows(5)), "b": sorted_by_length(tiny.rows(6)), "c": tiny.rows(5)}
    trainer.evaluate(named)
    assert calls() == 5 + 1 + 1
    trainer.predict(named["a"])
    assert calls() == 1
    trainer.compute_metrics = functools.partial(describe, str(path))
    trainer.predict(named["a"])
    assert calls() == 5


def test_nothing_is_checked_where_the_function_is_not_called(tmp_path: Path) -> None:
    def never(prediction: Any) -> dict[str, float]:
        raise AssertionError

    guarded(tmp_path, never, prediction_loss_only=True).evaluate()
    unlabelled = [{"input_ids": row["input_ids"]} for row in tiny.rows(4)]
    assert guarded(tmp_path, never).predict(unlabelled).predictions.shape == (4,)
    assert guarded(tmp_path, None).predict(tiny.rows(4)).predictions.shape == (4,)
    whole = guarded(tmp_path, usual)  # as it was said of the rows with labels
    whole.evaluate()
    assert whole.predict(unlabelled).predictions.shape == (4, 3)


def keeping() -> Any:
    """Return a function that keeps something, and one that shows what; ``test_kept_state.py`` has the other ways."""
    kept: list[float] = []

    def closure(prediction: Any) -> dict[str, float]:
        kept.append(1.0)
        return of_both(prediction)

    return closure, lambda: repr(kept)


def test_what_keeps_state_is_called_on_whole_predictions_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = []
    for make_one in (make, guarded):
        metrics, shown = keeping()
        output = make_one(tmp_path, metrics).predict(tiny.rows(14))
        kept.append(shown())
        assert output.predictions.shape == (14, 3)
    assert kept[0] == kept[1]
    [notice] = notices(caplog)
    assert notice == (
        "evaluation: reduce='argmax' and compute_metrics=<closure> cannot be checked on one batch: a call changes what "
        "it holds; expected a function of predictions and labels alone. Predictions stay whole, 192 B of host memory. "
        "To reduce all the same, pass Trainer(..., preprocess_logits_for_metrics=...) and reduce=None."
    )


def test_a_stateful_function_of_class_ids_alone_gets_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        calls.append(1)
        return of_ids(prediction)

    output = guarded(tmp_path, metrics).predict(tiny.rows(14))
    assert (output.predictions.shape, len(calls), notices(caplog)) == ((14,), 1, [])


@pytest.mark.parametrize("kind", ["iterator", "hidden"])
def test_what_cannot_be_put_back_or_seen_keeps_predictions_whole(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = itertools.count()

    def uses(prediction: Any) -> dict[str, float]:
        return {"calls": float(next(value))}

    def hides(prediction: Any) -> dict[str, float]:
        sys.hidden_count = getattr(sys, "hidden_count", 0) + 1
        return {"calls": float(sys.hidden_count)}

    metrics = hides if kind == "hidden" else uses
    output = guarded(tmp_path, metrics).predict(tiny.rows(14))
    assert output.predictions.shape == (14, 3)
    reason = "it uses <count>, which cannot be put back after a check"
    if kind == "hidden":
        del sys.hidden_count
        reason = "two calls on the same predictions differ"
    else:
        assert output.metrics["test_calls"] == 0.0
    assert f"=<{metrics.__name__}> cannot be checked on one batch: {reason}; expected" in notices(caplog)[0]


def test_a_stateful_function_whose_predictions_do_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_outputs, "read_memory", little_memory(300))
    metrics, shown = keeping()
    before = shown()
    with pytest.raises(ValueError, match="cannot be checked") as error:
        guarded(tmp_path, metrics).evaluate()
    assert str(error.value).endswith(
        "Whole predictions need 192 B of host memory; only 150 B may be used. To reduce all the same, pass "
        "Trainer(..., preprocess_logits_for_metrics=...) and reduce=None"
    )
    assert shown() == before
    trainer = make(tmp_path, metrics, EvaluationGuardCallback(reduce=None))
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    attach(trainer)
    assert trainer.predict(tiny.rows(14)).predictions.shape == (14,)


@pytest.mark.slow
def test_processes_decide_together(tmp_path: Path) -> None:
    """The rows of one process alone show that the function needs whole predictions."""
    one, other = run_pair(tmp_path, __file__, str(tmp_path))
    assert one["shapes"] == other["shapes"]
    assert other["refused"].startswith(one["refused"].split("only ")[0])
    assert one["shapes"] == [[8, 3], [8]]
    assert one["refused"].startswith("reduce='argmax' and compute_metrics=<of_rank> do not agree: for one batch ")


def of_rank(prediction: Any) -> dict[str, float]:
    return usual(prediction) if os.environ["RANK"] == "1" else of_both(prediction)


def main(folder: str) -> None:
    """Evaluate with a function that is right in process 0 alone, with one that is right, and with too little memory."""
    settings = {"ddp_backend": "gloo", "per_device_eval_batch_size": 4}
    shapes = [guarded(folder, each, **settings).predict(tiny.rows(8)).predictions.shape for each in (of_rank, of_both)]
    trainer, refused = guarded(folder, of_rank, **settings), ""
    if trainer.args.process_index == 0:  # the host of the other process has enough
        kept_outputs.read_memory = little_memory(160)
    try:
        trainer.predict(tiny.rows(8))
    except ValueError as error:
        refused = str(error)
    found = {"shapes": shapes, "refused": refused}
    Path(folder, f"rank{trainer.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
