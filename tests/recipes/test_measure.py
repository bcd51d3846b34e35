"""``measure``: real steps beside their prediction, and a Trainer that is as before."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, set_seed

import hf_memopt
import tiny
from hf_memopt import (
    CheckpointingCallback,
    FreezeCallback,
    Measurement,
    MemoryReportCallback,
    MicrobatchCallback,
    PrecisionCallback,
    attach,
    bucketed,
    gradient_release,
    measure,
    plan,
)
from hf_memopt.binding import checkpointing_arguments

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
LONGEST = 30


def texts(count: int = 32) -> list[dict[str, Any]]:
    """Return rows of 4 to 30 tokens; the longest are neither first nor last."""
    drawn = random.Random(0)
    lengths = [drawn.randint(4, LONGEST - 1) for _ in range(count)]
    lengths[count // 2 : count // 2 + 4] = [LONGEST] * 4
    return [{"input_ids": [5 + i % 90] * n, "attention_mask": [1] * n, "labels": i % 3} for i, n in enumerate(lengths)]


def trainer_of(folder: Any, *, model: Any = None, data: Any = None, seed: int = 0, **settings: Any) -> Trainer:
    names = [name for name in settings if name.startswith("trainer_")]
    given = {name.removeprefix("trainer_"): settings.pop(name) for name in names}
    set_seed(seed)
    if "model_init" not in given:
        given["model"] = tiny.bert(**DROPOUT) if model is None else model
    args = tiny.arguments(folder, per_device_train_batch_size=4, **settings)
    collator = DataCollatorWithPadding(tiny.tokenizer())
    return Trainer(args=args, train_dataset=texts() if data is None else data, data_collator=collator, **given)


class Noted(TrainerCallback):
    """A user's callback, which counts and draws random numbers."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)
        random.random()


class Averaged(nn.Module):
    """A module with a buffer that training changes, and no configuration of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.norm(self.embedding(input_ids).mean(1))
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def plain(folder: Any) -> Trainer:
    return trainer_of(folder, optim="adamw_torch", max_grad_norm=1.0, gradient_accumulation_steps=2)


def viewed(folder: Any) -> Trainer:
    view = bucketed(texts(), batch_size=8)
    return attach(
        trainer_of(folder, data=view, optim="adamw_torch", gradient_accumulation_steps=2),
        PrecisionCallback(),
        MicrobatchCallback(max_examples=2),
        Noted(),
    )


def released(folder: Any) -> Trainer:
    cls = (gradient_release(torch.optim.AdamW), {"lr": 0.01})
    return attach(trainer_of(folder, trainer_optimizer_cls_and_kwargs=cls), CheckpointingCallback("every_2"))


def with_own_optimizer(folder: Any) -> Trainer:
    model = tiny.bert(**DROPOUT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([1])).loss.backward()
    optimizer.step()  # it has a state already
    return trainer_of(folder, model=model, trainer_optimizers=(optimizer, None))


def built_anew(folder: Any) -> Trainer:
    return trainer_of(folder, trainer_model_init=lambda: tiny.bert(**DROPOUT), optim="adamw_torch")


def of_own_module(folder: Any) -> Trainer:
    torch.manual_seed(0)
    return trainer_of(folder, model=Averaged(), bf16=True, gradient_accumulation_steps=3)


def frozen_and_checkpointed(folder: Any) -> Trainer:
    return attach(trainer_of(folder, bf16=True, **checkpointing_arguments()), FreezeCallback("embeddings"))


BUILDS = [viewed]
SLOW_BUILDS = [plain, released, with_own_optimizer, built_anew, of_own_module, frozen_and_checkpointed]


@pytest.mark.parametrize("build", [*BUILDS, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW_BUILDS)])
def test_training_afterwards_is_bit_for_bit_that_of_an_unmeasured_trainer(
    build: Callable[..., Trainer], tmp_path: Any
) -> None:
    straight, measured = build(tmp_path / "a"), None
    losses = straight.train().training_loss
    expected = [one.detach().clone() for one in (*straight.model.parameters(), *straight.model.buffers())]
    measured = build(tmp_path / "b")
    found = measure(measured, steps=2)
    assert found.fits
    assert measured.train().training_loss == losses
    after = [*measured.model.parameters(), *measured.model.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(expected, after, strict=True))
    assert measured.state.global_step == straight.state.global_step
    assert measured.state.log_history[-1].keys() == straight.state.log_history[-1].keys()
    for one, other in zip(straight.callback_handler.callbacks, measured.callback_handler.callbacks, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Noted) and isinstance(other, Noted):
            assert one.steps == other.steps
    assert list((tmp_path / "b").iterdir()) == []


# ---- What is measured


def sized(kind: str, folder: Any, **settings: Any) -> Trainer:
    """Return a Trainer of a model whose tensors are large beside the 512 bytes that CUDA's allocator rounds to."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    if kind == "bert":
        return trainer_of(folder, model=tiny.bert(**sizes, vocab_size=2000), **settings)
    model = tiny.llama(**sizes, num_key_value_heads=4, vocab_size=2000)
    data = [{**row, "labels": row["input_ids"]} for row in texts()]
    data = [{name: value + [0] * (32 - len(value)) for name, value in row.items()} for row in data]
    return trainer_of(folder, model=model, data=data, **settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"optim": "adamw_torch_fused", "max_grad_norm": 1.0},
    "accumulated": {"optim": "adamw_torch_fused", "gradient_accumulation_steps": 3},
    "checkpointed": {"optim": "sgd", **checkpointing_arguments()},
}
COMPARED = [
    pytest.param(kind, name, marks=[] if (kind, name) in (("bert", "AdamW"), ("llama", "AdamW")) else pytest.mark.slow)
    for kind in ("bert", "llama")
    for name in SETTINGS
]


@pytest.mark.parametrize(("kind", "name"), COMPARED)
def test_predicted_bytes_are_those_that_were_measured(kind: str, name: str, tmp_path: Any) -> None:
    """On a CPU, without dropout, whose kernels differ; 2 %: CUDA's allocator rounds each tensor up."""
    found = measure(sized(kind, tmp_path, **SETTINGS[name]), steps=1)
    assert found.seq_len == (LONGEST if kind == "bert" else 32)
    compared = {
        **{name: (size, found.predicted.components[name]) for name, size in found.measured.components.items()},
        **{name: (size, found.predicted.phases[name]) for name, size in found.measured.phases.items()},
        "allocated": (found.measured.allocated_bytes, found.predicted.allocated_bytes),
    }
    kept = {"weights", "gradients", "optimizer state", "activations and logits"}
    assert set(compared) >= kept | {"load", "forward", "backward"}
    for measured, predicted in compared.values():
        assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_on_a_gpu_reserved_bytes_and_seconds_are_measured_too(kind: str, tmp_path: Any) -> None:
    found = measure(sized(kind, tmp_path, optim="adamw_torch_fused", use_cpu=False), steps=3)
    assert found.gpu != ""
    assert found.measured.reserved_bytes >= found.measured.allocated_bytes  # type: ignore[operator]
    assert found.predicted.allocated_bytes == pytest.approx(found.measured.allocated_bytes, rel=0.05)
    assert found.measured.seconds is not None


def test_a_table_is_as_wide_as_it_may_be(measured: Measurement) -> None:
    for width in (60, 80, 120):
        lines = measured.table(width).splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.startswith("activations and logits") for line in lines)
        assert any(line.startswith("step, median") and line.endswith("-") for line in lines)


def test_sizes_are_those_of_the_tensors(tmp_path: Any) -> None:
    trainer = sized("bert", tmp_path, optim="adamw_torch_fused")
    found = measure(trainer, steps=3)
    trained = sum(one.nbytes for one in trainer.model.parameters())
    assert found.measured.components["gradients"] == trained
    count = len(list(trainer.model.parameters()))
    assert found.measured.components["optimizer state"] == 2 * trained + 4 * count  # two moments, and the step count
    assert found.measured.components["weights"] == trained + sum(one.nbytes for one in trainer.model.buffers())
    assert found.measured.phases["load"] == found.measured.components["weights"]
    assert (found.steps, len(found.step_seconds)) == (3 + 3, 3)
    assert 4 * 4 <= found.tokens <= 4 * LONGEST
    assert found.tokens_per_second == pytest.approx(found.tokens / (sum(found.step_seconds) / 3))
    assert (found.gpu, found.measured.reserved_bytes, found.predicted.seconds) == ("", None, None)


class Longest(TorchDataset[Any]):
    """A dataset that makes its rows when they are read, so that their lengths are not written down."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = 60 if index == 1999 else 64 if index == 2500 else 8
        return {"input_ids": [7] * tokens, "attention_mask": [1] * tokens, "labels": 0}


def test_of_rows_made_on_the_fly_the_first_are_looked_at(tmp_path: Any) -> None:
    found = measure(trainer_of(tmp_path, data=Longest()), steps=1)
    assert found.seq_len == 60
    assert found.notes[0] == "the longest rows are those of the first 2,000 of 3,000 examples"


def test_a_run_of_few_steps_is_measured_to_its_end(tmp_path: Any) -> None:
    found = measure(trainer_of(tmp_path, max_steps=2), steps=5)
    assert (found.steps, found.step_seconds, found.measured.seconds) == (2, (), None)
    assert "the run has 2 steps, and 3 come before the first that is timed" in found.notes
    assert found.measured.allocated_bytes > 0


class FailsAt(TrainerCallback):
    """Runs out of memory, or fails otherwise, at a step."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            raise self.error


def test_out_of_memory_is_an_answer_and_another_error_is_not(tmp_path: Any) -> None:
    failing = FailsAt(torch.OutOfMemoryError("CUDA out of memory. Tried"))
    trainer = trainer_of(tmp_path, trainer_callbacks=[failing])
    before = copy.deepcopy(trainer.model.state_dict())
    found = measure(trainer, steps=1)
    assert (found.fits, found.out_of_memory, found.steps) == (False, "forward", 1)
    assert "Out of memory in the forward phase, after 1 whole steps." in str(found).splitlines()
    failing.error = KeyError("label")  # which is raised
    with pytest.raises(KeyError, match="label"):
        measure(trainer, steps=1)
    assert all(torch.equal(one, before[name]) for name, one in trainer.model.state_dict().items())
    assert (trainer.optimizer, trainer.is_in_train) == (None, False)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_reports_are_set_aside_and_nothing_is_written(tmp_path: Any) -> None:
    class Sink(TrainerCallback):
        events: list[str] = []  # noqa: RUF012  # of one test

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.events.append("begin")

    class Saves(TrainerCallback):
        def on_epoch_end(self, *_: Any, model: Any, **__: Any) -> None:
            model.save_pretrained(tmp_path / "out" / "best")

        on_train_end = on_epoch_end

    Sink.__module__ = "transformers.integrations.integration_utils"
    report = MemoryReportCallback()
    trainer = attach(trainer_of(tmp_path / "out", logging_strategy="steps", logging_steps=1), Sink(), Saves(), report)
    summary = report.summary
    measure(trainer, steps=1)
    assert Sink.events == []
    assert report.summary == summary
    assert trainer.state.log_history == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 is invalid; expected an integer of 1 or more. Pass steps=10"),
        (
            {"path": "no/such/run.json"},
            "is a folder or is in a missing one; expected a file in an existing folder. Pass run.json",
        ),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=message):
        measure(trainer_of(tmp_path), **options)


def test_what_cannot_be_measured_is_refused(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"trainer=<str> is not a transformers\.Trainer; expected the Trainer"):
        measure("trainer")  # type: ignore[arg-type]
    trainer = trainer_of(tmp_path)
    trainer.args._n_gpu = 2  # private: what stock sets where it sees two GPUs; seen in transformers 5.8.1 to 5.23.0
    with pytest.raises(RuntimeError, match="n_gpu=2 GPUs are visible to this one process"):
        measure(trainer)


# ---- The file


@pytest.fixture(scope="module")
def measured(tmp_path_factory: Any) -> Measurement:
    return measure(trainer_of(tmp_path_factory.mktemp("run")), steps=1)


def test_a_file_is_written_once_and_read_again(measured: Measurement, tmp_path: Any) -> None:
    path = tmp_path / "run.json"
    measured.write(path)
    assert Measurement.from_json(path.read_text()) == measured
    message = "exists already; expected a new file. Pass another name, or force=True to replace it"
    with pytest.raises(ValueError, match=message):
        measured.write(path)
    measured.write(path, force=True)


def of_measured(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda told: told["measured"].update(values)


BROKEN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda told: told.update(format=2), f"it has format 2, written by hf-memopt {hf_memopt.__version__}"),
    (lambda told: told.update(sped=1), "sped=1 is not a field of Measurement"),
    (lambda told: told.pop("gpu"), "gpu is missing; expected a string"),
    (lambda told: told["versions"].pop("torch"), "lack torch; expected all of"),
    (lambda told: told.update(precision="fp64"), "precision='fp64' is invalid"),
    (of_measured(allocated_bytes=-1), "allocated_bytes=-1 is invalid"),
    (of_measured(reserved_bytes=1), "what is allocated is a part of what is reserved"),
    (of_measured(seconds=-1.0), "expected low, then seconds, then high, all above 0"),
    (of_measured(phases={"load": "2"}), "expected values that are each an integer of 0 or more"),
    (lambda told: told.update(measured=None), "measured=None is invalid; expected a Figures"),
    (lambda told: told.update(step_seconds=["1"]), "('1',) is invalid; expected a tuple or list of values"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_changed_file_is_refused(measured: Measurement, change: Any, message: str, tmp_path: Any) -> None:
    told = json.loads(measured.to_json())
    change(told)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(told))
    start = f"measured={str(path)!r} is not a measurement ("
    with pytest.raises(ValueError, match=f"^{re.escape(start)}.*{re.escape(message)}"):
        plan("bert-base-uncased", gpu="T4", measured=path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.json", r"measured='none\.json' cannot be read: No such file or directory; expected a"),
        (True, r"measured=True cannot be a path .*; expected text or a pathlib\.Path\."),
    ],
)
def test_a_file_that_is_not_there_is_refused(path: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan("bert-base-uncased", gpu="T4", measured=path)
