"""Micro-batching: the weights, logs and order of the unsplit run, whatever ran out of memory where."""

from __future__ import annotations

import functools
import gc
import json
import logging
import re
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from slow_cases import slow_except
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt.changes import Change
from hf_memopt.training.batching.views import bucketed
from hf_memopt.training.binding import attach
from hf_memopt.training.techniques.microbatching import MicrobatchCallback
from hf_memopt.training.techniques.microbatching.limits import Limit, microbatch_limits
from hf_memopt.training.techniques.microbatching.microbatch import SAVED, run_in_microbatches
from hf_memopt.training.techniques.microbatching.splitting import cut, take_rows
from scarcity import CASES, Case, Pad, Scarcity, causal_rows, mixed_rows

FLOAT32 = 2**-23  # one bit of a norm's weight, 1: the same gradients, added in another order and over shorter rows
IS_523 = Version(transformers.__version__) >= Version("5.23")
FLOAT64 = 1e-12  # AdamW divides by the root of the second moment, so that float32 noise would show as 1e-6


def make(
    case: Case,
    folder: Path,
    callback: TrainerCallback | None = None,
    scarcity: Scarcity | None = None,
    trainer_class: type[Trainer] = Trainer,
    **settings: Any,
) -> Trainer:
    """Return an attached trainer of 3 optimizer steps of 6 rows."""
    torch.manual_seed(0)
    model = case.build()
    double = settings.pop("double", False)
    if scarcity is not None:
        scarcity.watch(model)
    steps, has_scaler = settings.pop("max_steps", 3), settings.pop("scaler", False)
    collator = settings.pop("collator", None) or Pad(case.side)
    size = settings.pop("per_device_train_batch_size", 6)
    arguments = tiny.arguments(
        folder,
        per_device_train_batch_size=size,
        train_sampling_strategy="sequential",
        max_steps=steps,
        logging_strategy="steps",
        logging_steps=1,
        **{**case.settings, **settings},
    )
    trainer = trainer_class(
        model=model.double() if double else model,
        args=arguments,
        train_dataset=case.rows(size * 3 * arguments.gradient_accumulation_steps),
        data_collator=collator,
    )
    if has_scaler:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    return attach(trainer, *([] if callback is None else [callback]))


def run(case: Case, folder: Path, *args: Any, **settings: Any) -> Trainer:
    """Return that trainer, trained."""
    trainer = make(case, folder, *args, **settings)
    trainer.train()
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    return trainer


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_memory_that_runs_out_in_the_optimizers_step_is_raised_with_what_to_do(tmp_path: Path, monkeypatch) -> None:
    def step(self: Any, closure: Any = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    with pytest.raises(torch.OutOfMemoryError) as error:
        run(CASES["bert"], tmp_path, MicrobatchCallback())
    assert error.value.__notes__ == [
        "MicrobatchCallback: memory ran out in the optimizer's step, whose state and gradients are as large for any "
        "batch; expected an optimizer that fits. Keep a smaller state with optim='adamw_8bit', or one gradient at a "
        "time with optimizer_cls_and_kwargs=low_memory_optimizer(args, model, release=True)"
    ]


QUICK = ("bert-tokens", "bert-questions", "llama", "llama-left", "llama-smoothed", "t5", "vit")


@pytest.mark.parametrize("name", slow_except(QUICK, CASES))
def test_weights_and_losses_are_those_of_the_unsplit_run(name: str, tmp_path: Path) -> None:
    whole = run(CASES[name], tmp_path)
    scarcity = Scarcity(limit=2 if name == "vit" else 24)
    callback = MicrobatchCallback()
    split = run(CASES[name], tmp_path, callback, scarcity)
    assert scarcity.errors > 0
    assert scarcity.count > 6
    one_bit = 2 * FLOAT32 if name == "t5" else FLOAT32  # T5 draws embeddings with a deviation of 1: some are above 2
    assert tiny.largest_difference(whole.model, split.model) <= one_bit
    assert logged(split, "loss") == pytest.approx(logged(whole, "loss"), abs=1e-6 if IS_523 else 1e-5)
    assert split.state.global_step == whole.state.global_step == 3
    assert logged(split, "learning_rate") == logged(whole, "learning_rate")
    assert split.data_collator.seen == whole.data_collator.seen


class Stream(IterableDataset[dict[str, Any]]):
    """Four batches of six: with three of them to a step, stock leaves one of each epoch to the next epoch's step."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows[:24]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.mark.parametrize(
    ("name", "where", "calls", "settings"),
    [
        *(
            (name, where, (2, 5), {"max_steps": 2})  # in the second of three, and again within its repetition
            for name, where in (
                *(("bert", "backward"), ("bert-tokens", "forward")),
                *(("llama", "forward"), ("llama", "backward"), ("t5", "backward")),
            )
        ),
        *((name, "stream", (6,), {}) for name in ("bert", "llama")),  # in the second epoch's first step
    ],
)
def test_accumulation_is_repeated_from_its_first_step(
    name: str, where: str, calls: tuple[int, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    case = CASES[name]
    if where == "stream":
        case, where = case._replace(rows=lambda count: Stream(CASES[name].rows(count))), "forward"
    whole = run(case, tmp_path, gradient_accumulation_steps=3, **settings)
    scarcity = Scarcity(calls=calls, where=where)
    split = run(case, tmp_path, MicrobatchCallback(), scarcity, gradient_accumulation_steps=3, **settings)
    assert scarcity.errors == len(calls)
    assert tiny.largest_difference(whole.model, split.model) <= FLOAT32
    assert logged(split, "loss") == pytest.approx(logged(whole, "loss"), abs=1e-6)


class WithOutputs(Trainer):
    """Ask for the outputs with the loss, as a subclass that logs metrics does."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss, outputs = self.compute_loss(
            model, self._prepare_inputs(inputs), return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        assert outputs["logits"].shape[0] == len(inputs["input_ids"])
        self.accelerator.backward(loss)
        return loss.detach()


class NoComputeLoss(Trainer):
    """Compute the loss without compute_loss."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = model(**inputs)["loss"]
        loss.backward()
        return loss.detach()


def target_rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [5, 6, 7], "targets": [0, 1, -100 if i % 2 else 2]} for i in range(count)]


ADAMW = {"double": True, "optim": "adamw_torch", "learning_rate": 1e-2, "gradient_accumulation_steps": 2}
TARGETS = Case(heads.NamedTargets, target_rows)
EXACT: dict[str, tuple[Case, dict[str, Any], dict[str, Any], float]] = {
    "bert, AdamW in float64": (CASES["bert"], {"max_tokens": 24}, ADAMW, FLOAT64),
    # T5 of older transformers takes the softmax in float32, over shorter rows here
    "t5, AdamW in float64": (CASES["t5"], {"max_tokens": 24}, ADAMW, FLOAT64 if IS_523 else 1e-4),
    "images": (CASES["vit"], {"max_tokens": 16, "max_examples": 4}, {}, FLOAT32),
    "rows without a label": (CASES["bert-tokens"], {"max_examples": 1}, {}, FLOAT32),  # whose loss is 0 / 0
    "all fits, without its padding": (CASES["bert"], {"max_tokens": 72}, {}, 0.0),
    "a gradient scaler": (CASES["llama"], {"max_tokens": 24}, {"scaler": True}, FLOAT32),
    "a loss with outputs": (CASES["bert"], {"max_tokens": 24}, {"trainer_class": WithOutputs}, FLOAT32),
    "no compute_loss": (CASES["bert"], {"max_tokens": 24}, {"trainer_class": NoComputeLoss}, FLOAT32),
    "labels of another name": (
        # entries of its embedding are up to 4
        TARGETS, {"max_examples": 1, "backbone": "embedding"}, {"label_names": ["targets"]}, 4 * FLOAT32
    ),
}  # fmt: skip
PASSES = {"images": 6, "all fits, without its padding": 3 + 2}  # with a graph: of the three steps, of comparing padding


@pytest.mark.parametrize("name", EXACT)
def test_under_a_limit_weights_and_losses_are_those_of_the_unsplit_run(name: str, tmp_path: Path) -> None:
    case, limits, settings, tolerance = EXACT[name]
    whole, scarcity = run(case, tmp_path, **settings), Scarcity() if name in PASSES else None
    split = run(case, tmp_path, MicrobatchCallback(**limits), scarcity, **settings)
    assert scarcity is None or scarcity.count == PASSES[name]
    assert tiny.largest_difference(whole.model, split.model) <= tolerance
    assert logged(split, "loss") == pytest.approx(logged(whole, "loss"), abs=1e-6)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_a_repeated_step_draws_the_random_numbers_of_the_first_try(is_bf16: bool, tmp_path: Path) -> None:
    case = Case(lambda: tiny.bert(hidden_dropout_prob=0.1), mixed_rows)
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 1, "bf16": is_bf16}
    known = run(case, tmp_path, MicrobatchCallback(max_tokens=36), **settings)
    found = run(case, tmp_path, MicrobatchCallback(), Scarcity(calls=(2,), where="backward"), **settings)  # 72, then 36
    assert tiny.largest_difference(known.model, found.model) == 0.0


@pytest.mark.gpu
def test_fp16_on_a_gpu_ends_close_to_the_unsplit_run(tmp_path: Path) -> None:
    settings = {"use_cpu": False, "fp16": True, "learning_rate": 1e-2}
    whole = run(CASES["llama"], tmp_path, **settings)
    split = run(CASES["llama"], tmp_path, MicrobatchCallback(), Scarcity(limit=24), **settings)
    assert tiny.largest_difference(whole.model, split.model) <= 1e-4  # float16 products of other shapes
    assert split.accelerator.scaler.get_scale() == whole.accelerator.scaler.get_scale()


@pytest.mark.gpu
def test_a_gpu_that_is_really_full_recovers(tmp_path: Path) -> None:
    whole = run(CASES["llama"], tmp_path, use_cpu=False, max_steps=1)
    case = Case(lambda: tiny.llama(), causal_rows)
    trainer = make(case, tmp_path, MicrobatchCallback(), use_cpu=False, max_steps=1)
    taken: list[torch.Tensor] = []

    def fill(model: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        if model.training and inputs["input_ids"].numel() > 24:
            taken.append(torch.empty(2**50, dtype=torch.uint8, device="cuda"))  # 1 PiB

    trainer.model.register_forward_pre_hook(fill, with_kwargs=True)
    trainer.train()
    assert tiny.largest_difference(whole.model, trainer.model) <= 1e-6  # a GPU adds in another order


class Activations:
    """Keep weak references to the outputs of a module, by training pass, and whether a weight has a gradient then."""

    def __init__(self, module: nn.Module, weight: nn.Parameter) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.before_pass: list[int] = []
        self.gradients: list[bool] = []
        self._module, self._weight = module, weight
        # on all modules: a hook on this model would be a reason not to cut
        hooks = nn.modules.module
        self.handles = [
            hooks.register_module_forward_pre_hook(self._count),
            hooks.register_module_forward_hook(self._keep),
        ]

    def _count(self, module: nn.Module, args: Any) -> None:
        if module is self._module:
            self.before_pass.append(sum(reference() is not None for reference in self.alive))
            self.gradients.append(self._weight.grad is not None)

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if module is self._module and output.requires_grad:
            self.alive.append(weakref.ref(output))


@pytest.mark.parametrize("where", ["head", "backward"])
def test_nothing_of_a_failed_step_is_alive_when_it_is_repeated(where: str, tmp_path: Path) -> None:
    scarcity = Scarcity(calls=(1,), where=where)
    trainer = make(CASES["bert"], tmp_path, MicrobatchCallback(), scarcity, max_steps=1)
    inside = trainer.model.bert
    seen = Activations(inside.encoder.layer[0], inside.embeddings.word_embeddings.weight)
    gc.disable()  # what a later collection frees may be too late
    try:
        trainer.train()
    finally:
        gc.enable()
        for handle in seen.handles:
            handle.remove()
    assert scarcity.errors == 1
    assert seen.before_pass[-2:] == [0, 0]
    assert seen.gradients[-2:] == [False, True]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_example_that_does_not_fit_is_named_and_leaves_no_trace(where: str, tmp_path: Path) -> None:
    trainer = make(CASES["bert"], tmp_path, MicrobatchCallback(), Scarcity(limit=11, where=where))
    trainer.train_dataset = trainer.train_dataset[1:]  # now the row of 12 tokens is the sixth
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    checkpointing = "activation" if hasattr(trainer.args, "activation_checkpointing") else "gradient"
    assert str(error.value) == (
        "train_dataset[5] has 12 tokens and does not fit into memory by itself at step 1 (CUDA out of memory. Tried to "
        "allocate 2.00 GiB.); expected an example that fits. Cut texts shorter, set "
        f"{checkpointing}_checkpointing=True, or take a leaner preset: preset('4gb-gpu')"
    )
    assert error.value.__context__ is None
    assert all(weight.grad is None for weight in trainer.model.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in trainer.model.state_dict().items())


def test_what_parts_draw_anew_is_said_even_where_memory_ran_out_before_dropout_drew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(CASES["bert"], tmp_path, MicrobatchCallback(), Scarcity(limit=40))
    trainer.model.bert.embeddings.dropout.p = 0.1
    trainer.train()
    [text] = [text for text in caplog.messages if "out of memory with" in text]
    assert text.endswith("Same loss and gradient up to rounding and the draws of dropout.")


def test_each_change_of_the_limit_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = MicrobatchCallback()
    with caplog.at_level(logging.INFO, "hf_memopt"):
        trainer = run(CASES["bert"], tmp_path, callback, scarcity := Scarcity(limit=30))
    assert callback.changes == [
        Change("max_tokens", None, 36, "out of memory at step 1"),
        Change("max_tokens", 36, 18, "out of memory at step 1"),
    ]
    *lines, summary = [
        record.getMessage() for record in caplog.records if record.name.startswith("hf_memopt.training.techniques")
    ]
    assert lines == [
        "step 1: out of memory with 6 x 12 tokens; repeated in 2 micro-batches of at most 36 tokens. Same loss and "
        "gradient up to rounding.",
        "step 1: out of memory with 3 x 12 tokens; repeated in 4 micro-batches of at most 18 tokens. Same loss and "
        "gradient up to rounding.",
    ]
    assert re.fullmatch(
        r"3 of 3 steps ran in micro-batches\. Memory ran out 2 times, which cost [\d.]+ s\. To cut from the first "
        r"step on: MicrobatchCallback\(max_tokens=18\)",
        summary,
    )
    trainer.train()  # a second run keeps the limit
    assert scarcity.errors == len(lines)


def test_memory_that_runs_out_while_rows_are_taken_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are taken one micro-batch at a time: a batch is never there twice."""
    whole = run(CASES["bert"], tmp_path)
    trainer = make(CASES["bert"], tmp_path, MicrobatchCallback(max_examples=2))
    events: list[str] = []

    def take(inputs: Any, rows: list[int], **settings: Any) -> dict[str, Any]:
        events.append("take")
        if len(events) == 3:  # the second micro-batch of the first step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return take_rows(inputs, rows, **settings)

    monkeypatch.setattr("hf_memopt.training.techniques.microbatching.whole_micro_batches.take_rows", take)
    trainer.model.register_forward_pre_hook(lambda *_: events.append("run"))
    trainer.train()
    assert tiny.largest_difference(whole.model, trainer.model) <= FLOAT32
    assert events[:3] == ["take", "run", "take"]
    assert events[3:] == ["take", "run"] * (len(events[3:]) // 2)


class OwnLoss(Trainer):
    """A loss that is not known: the backbone's rows run in parts."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(("trainer_class", "where"), [(Trainer, "forward"), (OwnLoss, "backward")])
def test_what_repetitions_cost_is_told_whole(trainer_class: type[Trainer], where: str, tmp_path: Path) -> None:
    def fail(rows: int) -> None:
        if rows > 2 and trainer.state.global_step == 1:
            time.sleep(0.05)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if module is not trainer.model.bert.embeddings:
            return
        if where == "forward":
            fail(len(output))
        elif output.requires_grad:
            output.register_hook(lambda gradient: fail(len(gradient)))

    callback = MicrobatchCallback()
    trainer = make(CASES["bert"], tmp_path, callback, None, trainer_class)
    handle = nn.modules.module.register_module_forward_hook(watch)
    try:
        trainer.train()
    finally:
        handle.remove()
    assert callback.tally.failures > 1
    assert 0.05 * callback.tally.failures <= callback.tally.lost_seconds < callback.tally.seconds


def test_the_limit_rises_after_steps_that_fit_and_falls_back(tmp_path: Path) -> None:
    callback = MicrobatchCallback()
    callback.limits["max_tokens"].wait_steps = 2
    whole = run(CASES["bert"], tmp_path, max_steps=6)
    split = run(CASES["bert"], tmp_path, callback, Scarcity(limit=40), max_steps=6)
    assert callback.changes == [
        Change("max_tokens", None, 36, "out of memory at step 1"),
        Change("max_tokens", 36, 54, "no out of memory in 2 steps, at step 2"),
        Change("max_tokens", 54, 81, "no out of memory in 2 steps, at step 4"),
        Change("max_tokens", 81, 54, "out of memory at step 5"),
    ]
    assert callback.limits["max_tokens"].wait_steps == 4
    assert tiny.largest_difference(whole.model, split.model) <= 2 * FLOAT32  # twice the steps


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=12),
    room=st.integers(1, 5000),
    tries=st.integers(0, 400),
)
def test_lowering_ends_with_micro_batches_that_fit_or_one_row(lengths: list[int], room: int, tries: int) -> None:
    limit = Limit()
    limit.wait_steps = 1
    for _ in range(tries):
        limit.note_step(was_split=True)
    for round_number in range(60):
        groups = [list(range(len(lengths)))] if limit.limit is None else cut(lengths, max_tokens=limit.limit)
        sizes = [(len(rows) * max(lengths[row] for row in rows), len(rows)) for rows in groups]
        too_large = next(((tokens, rows) for tokens, rows in sizes if tokens > room), None)
        if too_large is None or too_large[1] == 1:
            break
        before = limit.limit
        limit.lower(too_large[0])
        assert limit.limit is not None
        assert limit.limit >= 1
        assert before is None or limit.limit < before
        if round_number % 2:
            limit.note_step(was_split=True)
    else:
        pytest.fail("never ended")


def saved_in(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"][SAVED]


def test_a_resumed_run_starts_with_the_limit_and_equals_the_straight_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    straight = run(CASES["bert"], tmp_path / "straight", MicrobatchCallback(), Scarcity(limit=40), **settings)
    assert saved_in(tmp_path / "straight/checkpoint-2")["max_tokens"]["limit"] == 36
    callback, scarcity = MicrobatchCallback(), Scarcity(limit=40)
    resumed = make(CASES["bert"], tmp_path / "other", callback, scarcity, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-2"))
    assert (scarcity.errors, callback.changes) == (0, [])
    assert asdict(callback.limits["max_tokens"]) == saved_in(tmp_path / "straight/checkpoint-3")["max_tokens"]
    assert saved_in(tmp_path / "other/checkpoint-3") == saved_in(tmp_path / "straight/checkpoint-3")
    assert tiny.largest_difference(straight.model, resumed.model) == 0.0
    anew = MicrobatchCallback(max_tokens=60)  # wins over the checkpoint
    trainer = make(CASES["bert"], tmp_path / "anew", anew, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-2"))
    assert anew.limits["max_tokens"].limit == 60


class Normed(nn.Module):
    """A classifier with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.norm(self.embed(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_part_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        run(Case(Normed, mixed_rows), tmp_path, MicrobatchCallback(max_examples=2, backbone="norm"))
    assert re.sub(r"by [\d.e+-]+;", "by #;", str(error.value)) == (
        "model=Normed cannot be trained in micro-batches at step 1 (a batch of input_ids, attention_mask, labels): "
        "norm: rows depend on each other: parts of its output 0 of shape (6, 8) differ from the whole by #; expected "
        "rows that do not depend on each other. Name a part whose rows are independent: "
        "MicrobatchCallback(backbone='embed'), or take MicrobatchCallback out of callbacks= and lower "
        "per_device_train_batch_size."
    )


def _normed_with_config() -> Normed:
    model = Normed()
    model.config = tiny.bert_config()
    return model


def _packed(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [token for row in rows for token in row["input_ids"]]
    positions = [position for row in rows for position in range(len(row["input_ids"]))]
    return {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]), "labels": torch.tensor([ids])}


UNCUT = Case(_normed_with_config, mixed_rows)
UNDER_A_VIEW = CASES["bert"]._replace(rows=lambda _: bucketed(mixed_rows(12), batch_size=6))


@pytest.mark.parametrize(
    ("case", "scarce", "settings", "message"),
    [
        (UNCUT, {"limit": 24}, {"backbone": "norm"}, "memory ran out at step 1 .*, and smaller parts do not help: "),
        (CASES["llama"], {"calls": (2,)}, {"collator": _packed}, ".* packed into one row, as position_ids shows"),
        (UNDER_A_VIEW, {"limit": 11}, {}, r"example (0|6) of the dataset given to bucketed\(\) has 12 tokens "),
    ],
    ids=["nothing can be cut", "packed", "an example under a view"],
)
def test_memory_that_cannot_be_spared_says_why(
    case: Case, scarce: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    callback = MicrobatchCallback(backbone=settings.pop("backbone", None))
    with pytest.raises(torch.OutOfMemoryError, match=f"^{message}"):
        make(case, tmp_path, callback, Scarcity(**scarce), **settings).train()


def test_a_forward_of_the_user_that_fails_with_all_rows_says_what_to_set(tmp_path: Path) -> None:
    """Its loss is not known, and memory runs out where no part helps."""

    def build() -> nn.Module:
        model: Any = CASES["llama"].build()
        before = model.forward

        @functools.wraps(before)
        def forward(input_ids: torch.Tensor, **others: Any) -> Any:
            if input_ids.numel() > 24:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return before(input_ids, **others)

        model.forward = forward
        return model

    case = CASES["llama"]._replace(build=build)
    with pytest.raises(torch.OutOfMemoryError, match=r"Set a smaller per_device_train_batch_size with more"):
        run(case, tmp_path, MicrobatchCallback())


def test_the_function_does_it_without_the_callback(tmp_path: Path) -> None:
    whole, split, changes = run(CASES["bert"], tmp_path), make(CASES["bert"], tmp_path), []
    scarcity = Scarcity(limit=30)
    scarcity.watch(split.model)
    before = dict(vars(split))
    handle = run_in_microbatches(split, microbatch_limits(max_tokens=60), changes=changes)
    with pytest.raises(ValueError, match=r"^trainer=<Trainer> runs in micro-batches already; expected"):
        run_in_microbatches(split)
    split.train()
    assert [(change.old, change.new) for change in changes] == [(60, 18)]
    assert tiny.largest_difference(whole.model, split.model) <= FLOAT32
    handle.remove()
    handle.remove()
    assert {name for name in vars(split) if name not in before} <= {"_created_lr_scheduler"} | vars(whole).keys()
    assert not {"training_step", "compute_loss", "prediction_step"} & vars(split).keys()
    run_in_microbatches(split)
    split.args.neftune_noise_alpha = 5.0  # became incompatible
    with pytest.raises(ValueError, match=r"^micro-batching and NEFTune"):
        split.train()


def test_nothing_is_waited_for_while_whole_batches_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bound = make(CASES["bert"], tmp_path), make(CASES["bert"], tmp_path, MicrobatchCallback())
    for trainer in (plain, bound):
        trainer.train()  # the first step asks the loss
    reads: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any) -> Any:
            reads.append(name)
            return original(self, *args)

        return read

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    inputs = plain.data_collator(plain.train_dataset[:6])
    plain.training_step(plain.model, inputs)
    of_the_model, reads[:] = list(reads), []
    bound.training_step(bound.model, inputs)
    assert reads == of_the_model
