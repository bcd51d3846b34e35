"""Torch's own allocator runs out of memory at each place of a run; with this package the numbers are those without.

Each case trains three times: without callbacks with all the memory, and with less, which raises where the table says;
then, with as little, as this package offers. `docs/out-of-memory.md` has the table.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import heads
import pytest
import torch
import transformers
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import hf_memopt as m
import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "out-of-memory.md"
HEADER = "| place | what runs out there | with | what happens |\n"
MIB = 2**20
ROUNDING = 2e-6  # float32: gradients and losses of rows added in another order, over the steps of a run
PLACES = {
    "from_pretrained": "loading",
    "_load_optimizer_and_scheduler": "resume",
    "generate": "generation",
    "evaluation_loop": "evaluation",
    "backward": "backward",
    "compute_loss": "forward",
    "step": "optimizer step",
}
"""Places of a run, by functions of torch and transformers 5.23 that run there; the first of them counts."""

ran_out: list[str] = []


def note_place(*_: Any) -> None:
    """Note where the main thread is; torch calls it when its allocator is about to raise."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    running = {frame.f_code.co_name for frame, _ in traceback.walk_stack(frame)}
    ran_out.append(next((place for name, place in PLACES.items() if name in running), "elsewhere"))


@pytest.fixture(scope="module", autouse=True)
def _observed() -> None:
    if torch.cuda.is_available():
        nn.functional.linear(*torch.ones(2, 8, 8, device="cuda"))  # its workspace comes from the allocator, and stays
        torch._C._cuda_attach_out_of_memory_observer(note_place)  # private; seen in torch 2.14


@contextmanager
def memory(mib: int | None) -> Iterator[None]:
    """Let torch's allocator reserve this much more than it has now."""
    ran_out.clear()
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()  # its thread keeps the error of the last one
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    fraction = 1.0 if mib is None else (torch.cuda.memory_reserved() + mib * MIB) / total
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# ---- Runs: what they train, and the numbers of it -------------------------------------------------------------------

Numbers = list[float]
SETTINGS = {"per_device_train_batch_size": 16, "max_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
SETTINGS |= {"learning_rate": 1e-3, "train_sampling_strategy": "sequential", "use_cpu": False}
NUMBERS = ("loss", "eval_loss", "eval_sum")


def numbers(trainer: Trainer) -> Numbers:
    """Return the losses and metrics of a run."""
    return [entry[name] for entry in trainer.state.log_history for name in NUMBERS if name in entry]


def classifier(layers: int, late: int = 0) -> nn.Module:
    """Return a BERT with large activations of small weights; ``late`` weights of 256 KiB in its head."""
    model = tiny.bert(num_hidden_layers=layers)
    if late:
        wide = (module for _ in range(late) for module in (nn.Linear(256, 256), nn.ReLU()))
        model.classifier = nn.Sequential(nn.Linear(32, 256), *wide, nn.Linear(256, 3))
    return model


def train(
    folder: Path,
    *callbacks: Any,
    model: Any,
    rows: Any = None,
    kind: Any = Trainer,
    again: bool = False,
    more: Any = None,
    **settings: Any,
) -> Numbers:
    """Train; ``again`` from the checkpoint of step 2."""
    args = tiny.arguments(folder, **{**SETTINGS, **settings})
    trainer = kind(model=model(), args=args, train_dataset=rows or tiny.rows(32, 60), **(more or {}))
    m.attach(trainer, *callbacks)
    trainer.train()
    if again:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return numbers(trainer)


class InBatchNegatives(Trainer):
    """A loss that sees all rows at once."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits), device=logits.device))


def with_holes(folder: Path, *callbacks: Any) -> Numbers:
    """Train beside 40 segments of the allocator that a small tensor keeps, and that large ones cannot use."""
    blocks = [torch.empty(256 * 1024, dtype=torch.uint8, device="cuda") for _ in range(8 * 40)]
    kept = blocks[::8]
    blocks.clear()
    found = train(folder, *callbacks, model=lambda: classifier(4), rows=tiny.rows(320, 60), **OF_160_ROWS)
    assert len(kept) == 40
    return found


OF_160_ROWS = {"per_device_train_batch_size": 160}


def evaluate(folder: Path, *callbacks: Any, kept_logits: bool) -> Numbers:
    """Evaluate in batches that are too large, or whose logits are together."""
    model = tiny.llama(vocab_size=1000 if kept_logits else 100, num_hidden_layers=2)
    rows = [{**row, "labels": row["input_ids"]} for row in tiny.rows(64 if kept_logits else 512, 60)]
    args = tiny.arguments(folder, per_device_eval_batch_size=4 if kept_logits else 512, use_cpu=False)
    metrics = None if not kept_logits else lambda found: {"sum": float(abs(found.predictions).mean())}
    trainer = Trainer(model=model, args=args, eval_dataset=rows, compute_metrics=metrics)
    if callbacks:
        m.attach(trainer, *callbacks)
    trainer.evaluate()
    return numbers(trainer)


def generate(folder: Path, *callbacks: Any) -> Numbers:
    """Generate long answers to many rows, whose caches grow."""
    args = tiny.arguments(folder)
    kept = {name: getattr(args, name) for name in ("output_dir", "report_to", "disable_tqdm")}
    asked = {"predict_with_generate": True, "generation_max_length": 40, "per_device_eval_batch_size": 256}
    trainer = Seq2SeqTrainer(
        model=heads.HEADS["t5"].build(),
        args=Seq2SeqTrainingArguments(**kept, **asked),
        eval_dataset=heads.HEADS["t5"].examples(256),
        compute_metrics=lambda found: {"sum": float(found.predictions.sum())},
    )
    if callbacks:
        m.attach(trainer, *callbacks)
    trainer.evaluate()
    return numbers(trainer)


def load(folder: Path, *callbacks: Any) -> Numbers:
    """Load weights of 30 MiB from a file, and train; with a callback they wait in host memory."""
    if not (folder / "model").exists():
        tiny.llama(hidden_size=256, intermediate_size=512, num_hidden_layers=12).save_pretrained(folder / "model")
    device = "cpu" if callbacks else "cuda"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", device_map=device)
    if callbacks:
        m.stream_layers(model)
    rows = [{**row, "labels": row["input_ids"]} for row in tiny.rows(8, 12)]
    return train(folder, *callbacks, model=lambda: model, rows=rows, per_device_train_batch_size=4)


def released(folder: Path, *callbacks: Any) -> Numbers:
    """Train with AdamW; with ``None`` for a callback it steps within the backward pass."""
    args = tiny.arguments(folder, **SETTINGS, optim="adamw_torch")
    model = classifier(2, late=96)
    chosen = m.low_memory_optimizer(args, model, release=True) if callbacks == (None,) else None
    return train(
        folder,
        *filter(None, callbacks),
        model=lambda: model,
        more={"optimizer_cls_and_kwargs": chosen},
        optim="adamw_torch",
    )


def resume(folder: Path, *callbacks: Any) -> Numbers:
    """Train four steps, and go on from the second with the same Trainer, which has the state of the fourth."""
    settings = {"optim": "adamw_torch_fused", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    return train(folder, *callbacks, model=lambda: classifier(2, late=96), again=True, **settings)


class Case(NamedTuple):
    """A run, the memory that it gets, where stock runs out of it, and what is done about that."""

    place: str  # of PLACES
    what: str  # runs there
    run: Callable[..., Numbers]
    mib: int
    callbacks: Callable[[], tuple[Any, ...]]
    remedy: str
    outcome: str
    refusal: str = ""  # the text, where it is refused


def _train(**settings: Any) -> Callable[..., Numbers]:
    return lambda folder, *callbacks: train(folder, *callbacks, **settings)


def _evaluate(kept_logits: bool) -> Callable[..., Numbers]:
    return lambda folder, *callbacks: evaluate(folder, *callbacks, kept_logits=kept_logits)


LONGER = [*tiny.rows(16, 20), *tiny.rows(16, 60)] * 2
CUT, EQUAL = "`MicrobatchCallback`", "the step is cut and repeated; equal losses"
MICRO: Callable[[], tuple[Any, ...]] = lambda: (m.MicrobatchCallback(),)  # noqa: E731
CASES = [
    Case("forward", "a batch", _train(model=lambda: classifier(24)), 20, MICRO, CUT, EQUAL),
    Case("forward", "a batch, and its half", _train(model=lambda: classifier(24)), 12, MICRO, CUT, EQUAL),
    Case(
        *("forward", "a loss over all rows", _train(model=lambda: classifier(24), kind=InBatchNegatives)),
        *(20, MICRO, CUT, "the backbone runs in parts; equal losses"),
    ),
    Case(
        *("forward", "the longer half of an accumulated batch"),
        _train(model=lambda: classifier(24), rows=LONGER, gradient_accumulation_steps=2),
        *(20, MICRO, CUT, "both are repeated; equal losses"),
    ),
    Case(
        *("forward", "one row", _train(model=lambda: classifier(24)), 2, MICRO, CUT, "refused by name"),
        refusal="does not fit",
    ),
    Case("forward", "beside fragments, 80 MiB reserved for 10", with_holes, 118, MICRO, CUT, EQUAL),
    Case("backward", "a batch and gradients", _train(model=lambda: classifier(12, late=96)), 56, MICRO, CUT, EQUAL),
    Case(
        *("optimizer step", "the state of AdamW, made at step 1", released, 90, MICRO, CUT, "refused by name"),
        refusal="low_memory_optimizer(args, model, release=True)",
    ),
    Case(
        *("optimizer step", "the state of AdamW, made at step 1", released, 90, lambda: (None,)),
        *("`low_memory_optimizer`", "one gradient at a time; equal losses"),
    ),
    Case(
        *("evaluation", "a batch", _evaluate(kept_logits=False), 30, MICRO, CUT),
        "the batch is cut and repeated; equal metrics",
    ),
    Case(
        *("evaluation", "logits of all batches", _evaluate(kept_logits=True), 30),
        lambda: (m.EvaluationGuardCallback(card_budget="4MiB"),),
        *("`EvaluationGuardCallback`", "moved to the host in time; equal metrics"),
    ),
    Case("generation", "caches of a batch", generate, 8, MICRO, CUT, "the batch is cut and repeated; equal answers"),
    Case(
        *("loading", "the weights", load, 20, lambda: (m.StreamedLayersCallback(),), "`stream_layers`"),
        "layers wait in host memory; equal losses",
    ),
    Case(
        *("resume", "the optimizer's state, beside that of an earlier run", resume, 116),
        lambda: (m.ShardedCheckpointCallback(),),
        *("`ShardedCheckpointCallback`", "the old state goes before the new one comes; equal losses"),
    ),
]


def table() -> str:
    """Return the table of the page."""
    rows = [f"| {case.place} | {case.what} | {case.remedy} | {case.outcome} |\n" for case in CASES]
    return "".join([HEADER, "|---|---|---|---|\n", *rows])


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index(HEADER) :].partition("\n\n")[0] + "\n" == table()


def error_of(run: Callable[..., Any], *args: Any) -> str:
    """Return what is said when memory runs out, and keep no frame of it."""
    try:
        run(*args)
    except torch.OutOfMemoryError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


@pytest.mark.stand_in
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.place}: {case.what}, {case.remedy}")
def test_what_runs_out_of_memory_has_the_numbers_of_enough(case: Case, tmp_path: Path) -> None:
    with memory(None):
        expected = case.run(tmp_path)
    assert expected
    assert all(0 < number < float("inf") for number in expected)
    assert not ran_out
    with memory(case.mib):
        assert error_of(case.run, tmp_path)
    assert ran_out == [case.place]
    with memory(case.mib):
        if case.refusal:
            assert case.refusal in error_of(case.run, tmp_path, *case.callbacks())
        else:
            assert case.run(tmp_path, *case.callbacks()) == pytest.approx(expected, rel=0, abs=ROUNDING)
    is_avoided = case.callbacks is not MICRO
    assert is_avoided is (not ran_out)
