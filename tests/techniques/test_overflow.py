"""Non-finite detection: what it costs, what a dropped step leaves, when it stops, and that it can be undone."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import nonfinite_models
import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt import PrecisionCallback
from hf_memopt.training.binding import attach
from hf_memopt.training.binding.losses import KnownLoss
from hf_memopt.training.techniques.microbatching import MicrobatchCallback
from hf_memopt.training.techniques.nonfinite.overflow import OverflowCallback
from scarcity import Scarcity
from two_ranks import run_pair

SYNCS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")


class Recorder(TrainerCallback):
    """Note weights, optimizer state, and schedule around each optimizer step."""

    def __init__(self) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.epochs: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before.append((weights_of(kwargs["model"]), states_of(kwargs["optimizer"])))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after.append((weights_of(kwargs["model"]), states_of(kwargs["optimizer"])))
        self.epochs.append(kwargs["lr_scheduler"].last_epoch)

    def moved(self) -> list[bool]:
        """Tell for each step whether it changed the weights."""
        return [not equal(before[0], after[0]) for before, after in zip(self.before, self.after, strict=True)]

    def moved_states(self) -> list[bool]:
        """Tell for each step whether it changed the optimizer's state."""
        return [not equal(before[1], after[1]) for before, after in zip(self.before, self.after, strict=True)]


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def states_of(optimizer: Any) -> list[torch.Tensor]:
    """Return copies of all tensors in the state; bitsandbytes nests them."""
    values = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    nested = [inner for value in values for inner in (value.values() if isinstance(value, dict) else (value,))]
    return [tensor.detach().clone() for tensor in nested if torch.is_tensor(tensor)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(tmp_path: Any, model: nn.Module, dataset: Any, *callbacks: Any, **settings: Any) -> Trainer:
    """Train with callbacks bound by ``attach``."""
    trainer = nonfinite_models.make_trainer(model, dataset, tmp_path, **settings)
    attach(trainer, *callbacks)
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore:.*paged.*:UserWarning")  # bitsandbytes on a CPU
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adafactor", "sgd"])
def test_a_dropped_step_leaves_weights_and_state_bit_equal(tmp_path: Any, optim: str) -> None:
    recorder, callback = Recorder(), OverflowCallback()
    model = nonfinite_models.make_nonfinite(tiny.llama(), "gradient")
    settings = {"optim": optim, "weight_decay": 0.1, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    trainer = run(tmp_path, model, nonfinite_models.rows(24, bad=(9,)), recorder, callback, **settings)
    assert recorder.moved() == [True, False, True]
    assert recorder.moved_states() == ([False] * 3 if optim == "sgd" else [True, False, True])
    assert (callback.nonfinite_steps, trainer.state.global_step, recorder.epochs) == (1, 3, [1, 2, 3])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_resume_equals_the_straight_run(tmp_path: Any) -> None:
    trainers = []
    for seed, checkpoint in ((0, None), (1, str(tmp_path / "checkpoint-2"))):
        model = nonfinite_models.make_nonfinite(tiny.llama(seed=seed), "forward")
        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        trainers.append(nonfinite_models.make_trainer(model, nonfinite_models.rows(bad=(5,)), tmp_path, **settings))
        attach(trainers[-1], OverflowCallback()).train(resume_from_checkpoint=checkpoint)
    assert tiny.largest_difference(trainers[0].model, trainers[1].model) == 0.0


def test_a_run_without_findings_is_bit_equal(tmp_path: Any) -> None:
    settings = {"gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1, "max_grad_norm": 1.0}
    plain = nonfinite_models.make_trainer(
        tiny.llama(attention_dropout=0.1), nonfinite_models.rows(), tmp_path, **settings
    )
    plain.train()
    callback = OverflowCallback()
    watched = run(tmp_path, tiny.llama(attention_dropout=0.1), nonfinite_models.rows(), callback, **settings)
    assert tiny.largest_difference(plain.model, watched.model) == 0.0
    keys = ("loss", "grad_norm", "learning_rate", "step")
    logs = [[{key: log.get(key) for key in keys} for log in one.state.log_history] for one in (plain, watched)]
    assert logs[0] == logs[1]
    assert callback.reports == []
    assert list(tmp_path.iterdir()) == []


def syncs_of_training(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Train and count the calls of all methods that wait for the device."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(self, *args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        for name in SYNCS:
            patch.setattr(torch.Tensor, name, counting(name))
        trainer.train()
    return counts


def test_one_sync_per_optimizer_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "optim": "sgd"}

    def trainer(*callbacks: Any) -> Trainer:
        one = nonfinite_models.make_trainer(tiny.llama(), nonfinite_models.rows(32), tmp_path, **settings)
        return attach(one, *callbacks)

    stock = syncs_of_training(trainer(), monkeypatch)
    ours = syncs_of_training(trainer(OverflowCallback()), monkeypatch)
    steps = 4
    assert ours - stock == {"tolist": steps}


def logged_losses(trainer: Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("is_filtered", [True, False])
def test_the_log_is_what_the_filter_of_stock_makes_of_it(tmp_path: Any, is_filtered: bool) -> None:
    settings = {"logging_strategy": "steps", "logging_steps": 1, "gradient_accumulation_steps": 2}
    model = nonfinite_models.make_nonfinite(tiny.llama(), "forward")
    dataset = nonfinite_models.rows(16, bad=(13,))
    trainer = run(tmp_path, model, dataset, OverflowCallback(), logging_nan_inf_filter=is_filtered, **settings)
    assert [loss < 10 for loss in logged_losses(trainer)] == [True, is_filtered]  # NaN is not


def test_it_stops_after_some_steps_in_a_row(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nonfinite_models.make_nonfinite(tiny.llama(), "forward")
    recorder, callback = Recorder(), OverflowCallback(max_in_a_row=2)
    trainer = nonfinite_models.make_trainer(model, nonfinite_models.rows(24, bad=(5, 13, 18)), tmp_path)
    attach(trainer, recorder, callback)
    with caplog.at_level(logging.INFO, "hf_memopt"), pytest.raises(RuntimeError) as error:
        trainer.train()
    reports = callback.reports
    assert [report.step for report in reports] == [2, 4, 5]
    assert str(error.value) == (
        "max_in_a_row=2 steps up to step 5 had losses or gradients that are not finite, and were dropped; "
        f"expected finite ones. Last, {reports[-1]}."
    )
    assert equal(weights_of(model), recorder.after[2][0])  # those of step 3, the last good one
    assert [(record.levelname, record.getMessage()) for record in caplog.records if "nonfinite" in record.name] == [
        ("WARNING", f"non-finite detection dropped {report}") for report in reports
    ]
    assert next(one._window for one in trainer.callback_handler.callbacks if hasattr(one, "_window")) == []


def test_it_stops_after_some_steps_in_all_of_a_run(tmp_path: Any) -> None:
    callback, model = OverflowCallback(2), nonfinite_models.make_nonfinite(tiny.llama(), "forward")
    trainer = run(tmp_path, model, nonfinite_models.rows(bad=(5,)), callback)
    trainer.train()  # which counts anew
    assert (callback.nonfinite_steps, len(callback.reports)) == (1, 1)
    trainer.train_dataset = nonfinite_models.rows(bad=(5, 13))
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    assert str(error.value) == (
        "max_nonfinite_steps=2 steps up to step 4 had losses or gradients that are not finite, and were dropped; "
        f"expected finite ones. Last, {callback.reports[-1]}."
    )


def half_precision_trainer(tmp_path: Any, scale: float, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a Trainer that trains in fp16 with a gradient scaler, on the CPU, where stock leaves both out."""
    trainer = Trainer(
        model=tiny.bert(),
        args=tiny.arguments(tmp_path, fp16=True, per_device_train_batch_size=4, learning_rate=1e-3, **settings),
        train_dataset=tiny.rows(16),
    )
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return attach(trainer, *callbacks)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_search_for_a_scale_is_left_to_the_scaler(tmp_path: Any, optim: str) -> None:
    recorder, callback = Recorder(), OverflowCallback(1)
    trainer = half_precision_trainer(tmp_path, 2.0**22, recorder, callback, optim=optim, max_steps=6)
    trainer.train()
    moved = recorder.moved()
    assert moved == sorted(moved)  # first those that are skipped
    assert 0 < sum(moved) < 6
    assert (callback.nonfinite_steps, callback.reports) == (0, [])


def test_a_scale_below_one_is_a_finding(tmp_path: Any) -> None:
    callback = OverflowCallback(1)
    trainer = half_precision_trainer(tmp_path, 1.0, callback, optim="adamw_torch", max_steps=3)
    trainer.model.classifier.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(RuntimeError, match=r"^max_nonfinite_steps=1 steps up to step 2 "):
        trainer.train()
    (report,) = callback.reports
    assert (report.step, report.case, report.where) == (2, "gradient", "classifier.weight")


def tiny_t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=100, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


def test_fp16_of_the_t5_family_is_warned_of_once(tmp_path: Any) -> None:
    trainer = Trainer(model=tiny_t5(), args=tiny.arguments(tmp_path, fp16=True), train_dataset=None)
    callback = OverflowCallback()
    with pytest.warns(UserWarning, match="t5") as warned:
        attach(trainer, callback)
    assert [str(one.message) for one in warned] == [
        "fp16=True is likely to lose steps: t5 is unsafe in float16: its feed-forward outputs exceed 65,504 "
        "(https://github.com/huggingface/transformers/issues/5651); expected bf16 where the GPU has it, else float32. "
        "Set: fp16=False"
    ]
    assert warned[0].filename == __file__
    attach(trainer)  # warnings are errors here


def test_what_cannot_work_is_refused(tmp_path: Any) -> None:
    trainer = nonfinite_models.make_trainer(tiny.llama(), nonfinite_models.rows(4), tmp_path)
    attach(trainer, OverflowCallback())
    trainer.args.optim = "lomo"  # became incompatible
    with pytest.raises(ValueError, match=r"^non-finite detection and layer-wise optimizer are incompatible: "):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    trainer = Trainer(model=tiny.bert().half(), args=tiny.arguments(tmp_path, fp16=True), train_dataset=tiny.rows(4))
    with pytest.raises(ValueError, match=r"^fp16=True cannot train bert\.embeddings"):
        attach(trainer, OverflowCallback())
    attach(trainer, PrecisionCallback())  # the remedy
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}


def test_beside_micro_batching_it_sees_whole_batches_once(tmp_path: Any, monkeypatch: Any) -> None:
    recorder, callback, shortage = Recorder(), OverflowCallback(), Scarcity(calls=(9,))
    model = nonfinite_models.make_nonfinite(tiny.llama(), "forward")
    shortage.watch(model)
    settings = {"gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    trainer = attach(
        nonfinite_models.make_trainer(model, nonfinite_models.rows(16, bad=(5,)), tmp_path, **settings), callback
    )
    # the model has a hook, so that its loss is not looked up
    monkeypatch.setattr(
        "hf_memopt.training.techniques.microbatching.step.known_loss", lambda *_: KnownLoss("sum", __file__)
    )
    cutting = MicrobatchCallback(max_tokens=16)
    attach(trainer, cutting, recorder)  # bound later, it is none the less within
    trainer.train()
    # five passes verify the loss; then at the second micro-batch of accumulation step 1
    assert (shortage.errors, cutting.limits["max_tokens"].limit) == (1, 8)
    (report,) = callback.reports
    assert (report.step, report.case, report.where) == (1, "forward", f"{nonfinite_models.PLACE} (NonfiniteLinear)")
    assert report.examples == (4, 5, 6, 7)
    assert recorder.moved() == [False, True]
    assert all(4 < loss < 5 for loss in logged_losses(trainer))  # log(100) = 4.6: each accumulation step once


@pytest.mark.slow
def test_all_processes_drop_what_one_finds(tmp_path: Path) -> None:
    one, other = run_pair(tmp_path, __file__, str(tmp_path))
    for kind in ("forward", "gradient", "gathers"):
        assert one[kind]["moved"] == other[kind]["moved"] == [True, False, True]
        assert one[kind]["weights"] == other[kind]["weights"]
        assert one[kind]["nonfinite"] == other[kind]["nonfinite"] == 1
        # of a bad gradient both have the sum; what gathers is not repeated by one process alone
        assert one[kind]["reports"] == ([[2, "unknown"]] if kind == "gradient" else [])
        assert other[kind]["reports"] == [[2, "unknown" if kind == "gathers" else kind]]


class Gathering(Trainer):
    """A loss that gathers a metric, as TRL's do."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.gather_for_metrics(inputs["input_ids"].sum())
        return super().compute_loss(model, inputs, *args, **kwargs)


def findings(output_dir: Path, kind: str) -> dict[str, Any]:
    """Train on two processes; only the second meets the bad example, in step 2."""
    dataset = nonfinite_models.rows(24, bad=(13,))  # step 2: 8 to 11, and 12 to 15
    model = nonfinite_models.make_nonfinite(tiny.llama(), "forward" if kind == "gathers" else kind)
    recorder, callback = Recorder(), OverflowCallback()
    trainer = nonfinite_models.make_trainer(model, dataset, output_dir / kind, ddp_backend="gloo")
    if kind == "gathers":
        trainer.__class__ = Gathering
    attach(trainer, recorder, callback)
    trainer.train()
    return {
        "moved": recorder.moved(),
        "weights": float(sum(weight.double().sum() for weight in weights_of(model))),
        "nonfinite": callback.nonfinite_steps,
        "reports": [[report.step, report.case] for report in callback.reports],
    }


def main(output_dir: Path) -> None:
    """Write what each kind leaves on this process."""
    gc.freeze()
    found = {kind: findings(output_dir, kind) for kind in ("forward", "gradient", "gathers")}
    (output_dir / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
