"""Passing is enough: a callback in ``Trainer(callbacks=...)`` trains to the bit what ``attach`` trains."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from slow_cases import slow_except
from tables import refuses
from transformers import Trainer, TrainingArguments

import hf_memopt as m
import tiny
from hf_memopt.technique_list import TECHNIQUES
from hf_memopt.training.binding import checkpointing_arguments
from technique_table import TABLE, Run, examples, make_trainer, run
from two_ranks import run_pair

WITH_CALLBACK = [name for name in TECHNIQUES if TABLE[name].callback is not None]
ONLY_BOUND = ("memory report", "freezing")
ACCUMULATING = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2}
UNBOUND = (
    "{} is not bound to this Trainer: it came after the Trainer was built, or was unbound; expected a bound callback. "
    "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
)
MULTIPLIED = (
    "gradient_accumulation_steps=2 multiplies the gradients of BertForSequenceClassification by 2, as its loss ignores "
    "num_items_in_batch; expected their mean. Call attach(trainer) before trainer.train(), with: from hf_memopt import "
    "attach"
)


def settings_of(name: str) -> dict[str, Any]:
    """A run whose gradient scale ``attach`` repairs, where passing the callback does so, too."""
    return {} if name in ONLY_BOUND else ACCUMULATING


def is_same(one: Run, other: Run) -> bool:
    return (
        one.losses == other.losses
        and one.metrics == other.metrics
        and tiny.largest_difference(one.trainer.model, other.trainer.model) == 0.0
    )


TRIED = ("micro-batching", "streamed layers", "fused cross-entropy", "freezing", "precision")


@pytest.mark.parametrize("name", slow_except(TRIED, WITH_CALLBACK))
def test_passed_it_trains_and_resumes_as_attached(name: str, tmp_path: Any) -> None:
    settings = {**settings_of(name), **SAVING}
    attached = run([name], tmp_path / "attached", **settings)
    passed = run([name], tmp_path / "passed", attaches=False, **settings)
    assert is_same(passed, attached)
    if name not in ONLY_BOUND:
        assert passed.trainer.memopt_changes == attached.trainer.memopt_changes
    resumed = run([name], tmp_path / "passed", attaches=False, resume=str(tmp_path / "passed/checkpoint-2"), **settings)
    assert tiny.largest_difference(resumed.trainer.model, attached.trainer.model) == 0.0
    assert resumed.losses == attached.losses


@pytest.mark.parametrize("name", slow_except(("micro-batching", "memory report", "freezing"), WITH_CALLBACK))
def test_added_later_it_trains_as_attached(name: str, tmp_path: Any) -> None:
    attached = run([name], tmp_path, **settings_of(name))
    trainer = make_trainer([], tmp_path, attaches=False, **TABLE[name].settings, **settings_of(name))
    if TABLE[name].model is not None:
        trainer = make_trainer([], tmp_path, attaches=False, model=TABLE[name].model, **settings_of(name))
    trainer.add_callback(TABLE[name].callback())
    trainer.train()
    assert tiny.largest_difference(trainer.model, attached.trainer.model) == 0.0


@pytest.mark.parametrize("name", slow_except(("micro-batching", "memory report", "precision"), WITH_CALLBACK))
def test_one_callback_serves_two_trainers_in_turn(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attached = run([name], tmp_path, **settings_of(name))
    callback = TABLE[name].callback()
    monkeypatch.setitem(TABLE, name, TABLE[name]._replace(callback=lambda: callback))
    first, second = (make_trainer([name], tmp_path, attaches=False, **settings_of(name)) for _ in range(2))
    for trainer in (first, second):
        trainer.train()
        assert tiny.largest_difference(trainer.model, attached.trainer.model) == 0.0
    assert callback.binding.trainer is second
    first.train()
    assert callback.binding.trainer is first


@pytest.mark.slow
def test_two_processes(tmp_path: Any) -> None:
    assert run_pair(tmp_path, __file__, str(tmp_path)) == [True, True]


# ---- When ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["train", "evaluate", "predict", "create_optimizer"])
def test_it_is_attached_by_the_first_use(use: str, tmp_path: Any) -> None:
    trainer = make_trainer(["evaluation guard"], tmp_path, attaches=False)
    assert "prediction_step" not in vars(trainer)
    getattr(trainer, use)(*([examples(4)] if use == "predict" else []))
    assert "prediction_step" in vars(trainer)
    trainer.memopt_handle.remove()
    assert not [name for name, value in vars(trainer).items() if callable(value) and hasattr(Trainer, name)]


def test_what_attach_refuses_is_refused_at_each_use(tmp_path: Any) -> None:
    trainer = make_trainer(["fused cross-entropy"], tmp_path, attaches=False, torch_compile=False)
    trainer.add_callback(m.StreamedLayersCallback())
    trainer.add_callback(m.MicrobatchCallback())
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=r"^streamed layers and micro-batching are incompatible: "):
            use()
    assert not hasattr(trainer, "memopt_handle")


def test_what_was_unbound_stays_so(tmp_path: Any) -> None:
    for attaches in (True, False):
        trainer = make_trainer(["micro-batching"], tmp_path, attaches=attaches)
        if not attaches:
            trainer.evaluate()
        trainer.memopt_handle.remove()
        refuses(RuntimeError, UNBOUND.format("MicrobatchCallback"), trainer.train)


@pytest.mark.parametrize("late", ["view", "resumed", "checkpointed"])
def test_what_is_too_late_when_training_begins_names_attach(late: str, tmp_path: Any) -> None:
    settings = {**SAVING, "train_sampling_strategy": "sequential"}
    rows = m.bucketed(examples(), batch_size=4) if late == "view" else None
    callback = m.PrecisionCallback() if late == "checkpointed" else m.MicrobatchCallback()
    if late == "checkpointed":
        settings |= checkpointing_arguments()
    trainer = make_trainer([], tmp_path, attaches=False, train_dataset=rows, **settings)
    resume = None
    if late == "resumed":
        trainer.train()
        resume = str(tmp_path / "checkpoint-2")
    trainer.add_callback(callback)
    refuses(RuntimeError, UNBOUND.format(type(callback).__name__), trainer.train, resume)
    m.attach(trainer).train(resume)
    assert trainer.state.global_step == 4


# ---- What is only bound ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONLY_BOUND)
def test_what_only_watches_or_freezes_repairs_nothing_and_warns_once(name: str, tmp_path: Any) -> None:
    trainer = make_trainer([name], tmp_path, attaches=False, **ACCUMULATING, **SAVING)
    with pytest.warns(UserWarning, match=r"^gradient_accumulation_steps=2") as caught:
        trainer.train()
    assert [str(warning.message) for warning in caught] == [MULTIPLIED]
    assert trainer.model_accepts_loss_kwargs
    assert not list(tmp_path.glob("*/memopt_manifest.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train()
    trainer.memopt_handle.remove()
    assert trainer.callback_handler.callbacks
    assert "train" not in vars(trainer)


def test_beside_a_view_it_attaches(tmp_path: Any) -> None:
    attached, passed = (
        run(["memory report"], tmp_path, train_dataset=view, attaches=way, **ACCUMULATING)
        for way in (True, False)
        for view in [m.bucketed(examples(), batch_size=4)]
    )
    assert is_same(passed, attached)
    assert passed.trainer.memopt_changes == attached.trainer.memopt_changes


# ---- Presets ---------------------------------------------------------------------------------------------------------


ONE_STEP = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 1, "report_to": "none", "max_grad_norm": 1.0}
ONE_STEP |= {"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "no"}


def preset_trainer(folder: Any, rows: Any = None, collator: Any = None, **settings: Any) -> Trainer:
    """A BERT with the preset for 4 GB, which cuts 32 examples into 4 accumulation steps."""
    args = m.preset("4gb-gpu", str(folder), use_cpu=True, bf16=False, disable_tqdm=True, **{**ONE_STEP, **settings})
    collator = collator or transformers.DataCollatorWithPadding(tiny.tokenizer())
    return Trainer(tiny.bert(), args, train_dataset=rows or examples(32), data_collator=collator)


def test_a_preset_repairs_the_scale_of_a_plain_trainer(tmp_path: Any) -> None:
    """8 x 4 examples have the loss and the gradient of 32 x 1, where stock has four times as much."""
    args = tiny.arguments(tmp_path, per_device_train_batch_size=32, **ONE_STEP)
    collator = transformers.DataCollatorWithPadding(tiny.tokenizer())
    whole = Trainer(tiny.bert(), args, train_dataset=examples(32), data_collator=collator)
    whole.train()
    trainer = preset_trainer(tmp_path)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (8, 4)
    trainer.train()
    expected, found = whole.state.log_history[0], trainer.state.log_history[0]
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert [change.name for change in trainer.memopt_changes] == ["model_accepts_loss_kwargs"]
    assert not list(tmp_path.glob("*/memopt_manifest.json"))
    assert type(trainer.args) is TrainingArguments
    trainer.save_model()
    assert b"hf_memopt" not in (tmp_path / "training_args.bin").read_bytes()
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert (saved.to_dict(), saved.get_process_log_level()) == (trainer.args.to_dict(), args.get_process_log_level())


@pytest.mark.parametrize("system", ["linux", "windows", "wsl"])
def test_presets_page_where_the_system_can(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows" if system == "windows" else "Linux")
    monkeypatch.setattr("platform.release", lambda: "6.6-microsoft-standard-WSL2" if system == "wsl" else "6.1")
    wanted = {"linux": "paged_adamw_8bit"}.get(system, "adamw_8bit")
    for name in ("4gb-gpu", "6gb-gpu"):
        assert m.preset(name, use_cpu=True).optim == wanted
        assert ("not paged: under" in m.recipe(name).reason_of("optim")) == (system != "linux")
    assert m.recipe("8gb-gpu") == m.PRESETS["8gb-gpu"]


# ---- Views and collators alone ---------------------------------------------------------------------------------------


def test_a_view_alone_says_the_line(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = m.bucketed(examples(), batch_size=4)
    trainer = make_trainer([], tmp_path, attaches=False, train_dataset=rows)
    trainer.train()
    trainer.train()
    line = (
        "BucketedView is read by a Trainer that is not attached: its order, batch size and seed are not checked. Call "
        "attach(trainer) before trainer.train(), with: from hf_memopt import attach"
    )
    assert caplog.messages.count(line) == 1
    m.attach(make_trainer([], tmp_path, attaches=False, train_dataset=m.bucketed(examples(), batch_size=4))).train()
    assert caplog.messages.count(line) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collator_alone_says_what_the_model_needs(workers: int, tmp_path: Any) -> None:
    rows = [{"input_ids": [5 + i, 6, 7][: 2 + i % 2]} for i in range(4)]
    collator = m.BucketedCollator(tiny.tokenizer("left"), causal_lm=True)
    args = tiny.arguments(tmp_path, max_steps=1, dataloader_num_workers=workers)
    handler, logger = logging.FileHandler(tmp_path / "log"), logging.getLogger("hf_memopt")  # of a worker, too
    logger.addHandler(handler)
    try:
        Trainer(tiny.llama(), args, train_dataset=rows, data_collator=collator).train()
    finally:
        logger.removeHandler(handler)
        handler.close()
    line = (
        "BucketedCollator collates for a Trainer that is not attached; LlamaForCausalLM needs label of the first "
        "token: -100. Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
    )
    assert (tmp_path / "log").read_text(encoding="utf-8") == f"{line}\n"


def main(folder: str) -> None:
    """Write whether the techniques train in this process as attached, if they are passed alone."""
    rank = os.environ["RANK"]
    flags = {"ddp_backend": "gloo", "ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False, **ACCUMULATING}
    names = ["micro-batching", "non-finite detection", "evaluation guard", "memory report", "freezing"]
    attached, passed = (run(names, Path(folder, f"{rank}-{way}"), attaches=way, **flags) for way in (True, False))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(is_same(passed, attached)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
