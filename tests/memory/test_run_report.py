"""What a run leaves in its output folder, and what an out-of-memory that ends it leaves."""

from __future__ import annotations

import json
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from html_page import Page
from slow_cases import slow_except
from transformers import Trainer

import scarcity
import tiny
from hf_memopt import MemoryReportCallback, MicrobatchCallback, NotEstimableError, attach, low_memory_optimizer
from hf_memopt.gpus import custom_gpu, find_gpu
from hf_memopt.prediction.memory import estimate_of

BATCH = 6
GPU = "hf_memopt.prediction.memory.training_arguments.current_gpu"
MOST_GROUPS = "hf_memopt.prediction.memory.tracking.tensors_alive.MOST_GROUPS"
SHAPE: Any = SimpleNamespace(rows=2, seq_len=8, labels_length=None)


def make_trainer(
    folder: Path, *callbacks: Any, limit: int = 10**9, calls: Any = (), where: str = "forward", **settings: Any
) -> Trainer:
    """Return an attached Trainer on rows of mixed lengths that runs out of memory as told."""
    model = tiny.bert()
    scarcity.Scarcity(limit, calls, where).watch(model)
    sizes = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 2}
    usual = {**sizes, "train_sampling_strategy": "sequential", "optim": "adamw_torch"}
    args, rows = tiny.arguments(folder, **usual, **settings), scarcity.mixed_rows(24)
    data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows[:6], "data_collator": scarcity.Pad()}
    return attach(Trainer(model=model, args=args, **data), *callbacks)


def run_of(folder: Path) -> Any:
    return json.loads((folder / "memopt_run.json").read_text(encoding="utf-8"))


def test_a_run_leaves_what_its_report_shows(tmp_path: Path) -> None:
    callback = MicrobatchCallback()
    trainer = make_trainer(tmp_path, callback, MemoryReportCallback(), limit=40, eval_strategy="epoch")
    trainer.train()
    told = run_of(tmp_path)
    rows = scarcity.mixed_rows(24)
    lengths = [len(row["input_ids"]) for row in rows]
    batches = [lengths[at : at + BATCH] for at in range(0, 24, BATCH)]
    weights, held = sum(one.nbytes for one in trainer.model.parameters()), told_weights(trainer)
    state = trainer.optimizer.optimizer.state
    assert told["state"] == "finished"
    assert (told["first_step"], told["last_step"]) == (0, 2)
    assert told["batches"] == {
        "batches": 4,
        "examples": 24,
        "tokens": sum(lengths),
        "padded_tokens": sum(max(batch) * len(batch) for batch in batches),
        "largest_rows": BATCH,
        "largest_length": max(lengths),
    }
    assert told["components"] == {
        "weights": held,
        "gradients": weights,
        "optimizer state": 2 * weights + 4 * len(state),  # two moments, and the step count of each parameter
    }
    firsts = {"forward_backward": [1, 2], "optimizer": [1, 2], "evaluation": [2]}
    assert {name: one["first"] for name, one in told["steps"].items()} == firsts
    assert set(told["peaks"]) == {"load", "forward_backward", "optimizer", "evaluation"}
    assert [change["reason"] for change in told["changes"]][-1] == "out of memory at step 1"
    assert (told["micro_batching"]["steps"], told["micro_batching"]["cut_steps"]) == (2, 2)
    assert told["micro_batching"]["failures"] == callback.tally.failures >= 1
    assert told["micro_batching"]["limits"] == {name: limit.limit for name, limit in callback.limits.items()}
    assert (told["predicted"], told["out_of_memory"]) == (None, None)
    assert told["arguments"]["optim"] == "adamw_torch"
    page = (tmp_path / "memopt_run.html").read_text(encoding="utf-8")
    limits = ", ".join(f"{name}={one.limit}" for name, one in callback.limits.items() if one.limit is not None)
    assert f"cut them from the start: <code>MicrobatchCallback({limits})</code>" in page


def test_an_out_of_memory_that_ends_the_run_leaves_what_was_alive(tmp_path: Path, monkeypatch: Any) -> None:
    """The single row that does not fit is named by micro-batching; the report has the rows of the failed pass."""
    gpu = custom_gpu("1GiB", "8.6", name="a small GPU")
    monkeypatch.setattr(GPU, lambda: gpu)
    monkeypatch.setattr(MOST_GROUPS, 10**6)  # other tests may have left tensors that are larger
    trainer = make_trainer(tmp_path, MicrobatchCallback(), MemoryReportCallback(), calls=range(1, 9))
    with pytest.raises(torch.OutOfMemoryError, match="does not fit into memory by itself") as failed:
        trainer.train()
    page = tmp_path / "memopt_run.html"
    assert failed.value.__notes__[0].splitlines()[0] == f"[memopt] what was alive when memory ran out: {page}"
    told = run_of(tmp_path)
    lost = told["out_of_memory"]
    assert told["state"] == "out of memory"
    assert (lost["step"], lost["phase"], lost["rows"], lost["length"]) == (1, "forward", 1, 12)
    assert lost["error"] == str(failed.value)
    assert lost["components"]["weights"] == told_weights(trainer)
    words = trainer.model.bert.embeddings.word_embeddings.weight
    alive = {"component": "weights", "shape": list(words.shape), "dtype": "float32", "count": 1, "bytes": words.nbytes}
    assert alive in lost["tensors"]
    assert (told["predicted"]["batch_size"], told["predicted"]["seq_len"]) == (1, 12)
    assert told["predicted"]["gpu"] == "a small GPU"
    shown = Page(page.read_text(encoding="utf-8"))
    assert shown.open == []
    assert "Memory ran out at step 1, forward with 1 row of 12 tokens." in shown.words
    again = make_trainer(tmp_path, MemoryReportCallback())
    again.training_step = None  # which breaks off before the first checkpoint
    with pytest.raises(TypeError):
        again.train()
    assert (run_of(tmp_path)["state"], page.exists()) == ("training", False)


def told_weights(trainer: Trainer) -> int:
    model: Any = trainer.model
    return sum(one.nbytes for one in [*model.parameters(), *model.buffers()])


def test_memory_that_runs_out_in_an_evaluation_is_predicted_as_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(GPU, lambda: custom_gpu("1GiB", "8.6"))
    evaluation = {"eval_strategy": "epoch", "per_device_eval_batch_size": 3}
    trainer = make_trainer(tmp_path, MemoryReportCallback(), **evaluation)

    def run_out(module: Any, _: Any) -> None:
        if not (module.training or module.weight.is_meta):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.model.classifier.register_forward_pre_hook(run_out)  # type: ignore[union-attr, operator]
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    told = run_of(tmp_path)
    assert (told["out_of_memory"]["phase"], told["out_of_memory"]["rows"]) == ("evaluation", 3)
    assert told["predicted"]["batch_size"] == BATCH
    assert "evaluation" in told["predicted"]["phases"]


def test_without_micro_batching_the_phase_is_that_of_the_pass(tmp_path: Path, monkeypatch: Any) -> None:
    """Looking at what is alive keeps nothing alive."""
    monkeypatch.setattr(MOST_GROUPS, 10**6)
    mine = torch.ones(123, 457)
    gone = weakref.ref(mine)
    trainer = make_trainer(tmp_path, MemoryReportCallback(), limit=40, where="backward")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as failed:
        trainer.train()
    assert len(failed.value.__notes__) == 1
    lost = run_of(tmp_path)["out_of_memory"]
    assert (lost["phase"], lost["rows"]) == ("backward", BATCH)
    assert [one["bytes"] for one in lost["tensors"] if one["shape"] == [123, 457]] == [123 * 457 * 4]
    assert lost["components"]["other tensors"] >= 123 * 457 * 4
    del mine
    assert gone() is None


def test_an_out_of_memory_ends_with_what_to_type_to_find_what_fits(tmp_path: Path, monkeypatch: Any) -> None:
    gpu = find_gpu("RTX 3050 4GB")
    monkeypatch.setattr(GPU, lambda: gpu)
    for name, line in {
        "": "plan(model, gpu='RTX 3050 4GB', seq_len=12, effective_batch_size=12)",
        "org/model": "hf-memopt plan org/model --gpu 'RTX 3050 4GB' --seq-len 12 --task sequence-classification "
        "--effective-batch 12",
    }.items():
        trainer = make_trainer(tmp_path, MemoryReportCallback(), calls=(1,))
        trainer.model.config.name_or_path = name
        with pytest.raises(torch.OutOfMemoryError) as failed:
            trainer.train()
        assert run_of(tmp_path)["plan"] == line
        assert failed.value.__notes__[0].splitlines()[1:] == [f"[memopt] to find what fits: {line}"]
        assert f"To find what fits: {line}" in Page((tmp_path / "memopt_run.html").read_text("utf-8")).words


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "out", MemoryReportCallback(), limit=40)
    (tmp_path / "out").rmdir()
    with (
        pytest.warns(UserWarning, match=r"memopt_run\.json could not be written"),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as failed,
    ):
        trainer.train()
    assert not hasattr(failed.value, "__notes__")


def test_without_a_report_nothing_is_left(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, MemoryReportCallback(report=False))
    trainer.train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_checkpoint_has_the_report_so_far(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, MemoryReportCallback(), save_strategy="steps", save_steps=1)
    trainer.model.register_forward_pre_hook(_fail_in_step(trainer, 2))
    with pytest.raises(KeyError):
        trainer.train()
    told = run_of(tmp_path)
    assert (told["state"], told["last_step"]) == ("training", 1)


def _fail_in_step(trainer: Trainer, step: int) -> Any:
    def hook(*_: Any) -> None:
        if trainer.state.global_step + 1 == step:
            raise KeyError("stop")

    return hook


def test_micro_batches_of_a_trainer_are_at_most_its_batch(tmp_path: Path) -> None:
    shape: Any = SimpleNamespace(rows=BATCH, seq_len=12, labels_length=None)
    for most, expected in ((2, 2), (100, BATCH)):
        trainer = make_trainer(tmp_path, MicrobatchCallback(max_examples=most))
        assert estimate_of(trainer, shape).settings.micro_batch_size == expected


class Own(torch.optim.Optimizer):
    """A user's class, of which nothing is known."""


OPTIMIZERS: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    ("built", {}, lambda weights: torch.optim.AdamW(weights), {"optim": "adamw_torch"}),
    ("built", {}, lambda weights: torch.optim.Adam(weights, fused=True), {"optim": "adamw_torch_fused"}),
    (
        *("built", {}, lambda weights: torch.optim.SGD(weights, momentum=0.9)),
        {"optim": "sgd", "optim_args": "momentum=0.9"},
    ),
    ("built", {}, bitsandbytes.optim.AdamW8bit, {"optim": "adamw_8bit", "embedding_bits": 8}),
    ("built", {}, bitsandbytes.optim.PagedLion32bit, {"optim": "paged_lion_32bit"}),
    (
        "class",
        {},
        (low_memory_optimizer(torch.optim.SGD, release=True), {}),
        {"optim": "sgd", "gradient_release": True},
    ),
    ("class", {}, (bitsandbytes.optim.AdamW8bit, {}), {"optim": "adamw_8bit", "embedding_bits": 8}),
    (
        "named",
        {"optim": "adamw_bnb_8bit"},
        partial(low_memory_optimizer, release=True),
        {"optim": "adamw_8bit", "embedding_bits": 32},
    ),
    ("named", {"optim": "adamw_torch"}, partial(low_memory_optimizer, release=True), {"optim": "adamw_torch"}),
    ("named", {"optim": "adafactor"}, partial(low_memory_optimizer, release=True), {"optim": "adafactor"}),
]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize(("how", "named", "given", "expected"), slow_except(OPTIMIZERS[::3], OPTIMIZERS))
def test_an_optimizer_that_the_user_brings_is_the_one_that_is_estimated(
    how: str, named: dict[str, Any], given: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.bert()
    args = tiny.arguments(tmp_path, **{"optim": "adamw_torch_fused", "max_grad_norm": 0, **named})
    brought: dict[str, Any] = {"optimizer_cls_and_kwargs": given(args, model) if how == "named" else given}
    if how == "built":
        brought = {"optimizers": (given(model.parameters()), None)}
    trainer = Trainer(model=model, args=args, train_dataset=tiny.rows(4), **brought)
    found = estimate_of(trainer, SHAPE, gpu="T4").settings
    assert {name: getattr(found, name) for name in expected} == expected


def test_an_optimizer_of_which_nothing_is_known_is_not_estimated_as_another(tmp_path: Path) -> None:
    model = tiny.bert()
    trainer = Trainer(model=model, args=tiny.arguments(tmp_path), optimizers=(Own(model.parameters(), {}), None))
    with pytest.raises(NotEstimableError, match=r"the memory of optimizer=<Own> is not known"):
        estimate_of(trainer, SHAPE, gpu="T4")


def test_the_curve_counts_the_tokens_since_the_last_log(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, MemoryReportCallback(), logging_strategy="steps", logging_steps=1)
    trainer.train()
    told = run_of(tmp_path)
    curve = told["curve"]
    pairs = zip(curve["tokens_per_second"], curve["seconds_per_step"], strict=True)
    tokens = [rate * seconds for rate, seconds in pairs]
    assert curve["step"] == [1, 2]
    assert sum(tokens) == pytest.approx(told["batches"]["tokens"])
