"""What an estimate for one GPU says where several train, and that DDP's buckets are as large as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_on_cpu
import pytest
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

import tiny
from hf_memopt import NotEstimableError, estimate, plan
from hf_memopt.prediction.memory import estimate_of
from hf_memopt.prediction.memory.settings import BatchShape
from hf_memopt.prediction.memory.training_arguments import estimate_from_arguments
from hf_memopt.prediction.recipes.running.assistant import _Watch
from hf_memopt.units import format_bytes

SIZES: dict[str, Any] = {"batch_size": 2, "seq_len": 8}
REHEARSE = "hf-memopt rehearse --gpus 2 --gpu T4 train.py"
SHARDED = {
    "fsdp": f"for one GPU without FSDP's sharding, which is counted by: {REHEARSE}",
    "deepspeed": "for one GPU without DeepSpeed's sharding: hf-memopt rehearse --gpus 2 counts DDP and FSDP2, not "
    "DeepSpeed, whose memory MemoryReportCallback reports of a real run",
}


def of_ddp(found: Any, gpu: str = "T4", count: int = 2) -> str:
    """Return the note of an estimate for one of several processes of DDP."""
    buckets = format_bytes(found.gradient_bytes)
    whole = format_bytes(found.total_bytes + found.gradient_bytes)
    return (
        f"for one GPU; under DDP each of {count} holds gradient buckets of {buckets} besides, about {whole} in all. "
        f"To count everything: hf-memopt rehearse --gpus {count} --gpu {gpu} train.py"
    )


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two T4, as Kaggle lends, and one process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_ddps_buckets_hold_as_many_bytes_as_all_gradients(tmp_path: Path) -> None:
    seen: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, which are no text here
        seen.append(bucket.buffer().nbytes)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = tiny.bert()
    found = estimate(model, **SIZES, gpu="T4", precision="fp32")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        tokens = torch.ones(2, 8, dtype=torch.int64)
        wrapped(input_ids=tokens, labels=torch.zeros(2, dtype=torch.int64)).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert sum(seen) == found.gradient_bytes == 4 * found.trainable_parameters


def test_an_estimate_in_one_process_says_nothing_of_others() -> None:
    found = estimate(tiny.bert_config(), **SIZES, gpu="T4")
    assert not any("one GPU" in note for note in found.notes)


@pytest.mark.usefixtures("two_processes")
def test_an_estimate_in_one_of_two_processes_has_the_bytes_of_one_gpu_and_ddps_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = estimate(tiny.bert_config(), **SIZES, gpu="T4", precision="fp32")
    assert found.notes[-1] == of_ddp(found)
    assert found.gradient_bytes == 4 * found.trainable_parameters
    adapters = estimate(tiny.llama_config(), **SIZES, gpu="8GB", lora=8)
    assert adapters.notes[-1] == of_ddp(adapters, "NAME")
    assert adapters.gradient_bytes == 4 * adapters.trainable_parameters < 4 * adapters.parameters
    monkeypatch.delenv("WORLD_SIZE")
    alone = estimate(tiny.bert_config(), **SIZES, gpu="T4", precision="fp32")
    assert (alone.peak_reserved_bytes, alone.components) == (found.peak_reserved_bytes, found.components)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("engine", SHARDED)
def test_an_engine_of_accelerate_launch_is_not_counted(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine.upper()}", "true")
    assert estimate(tiny.bert_config(), **SIZES, gpu="T4").notes[-1] == SHARDED[engine]


@pytest.mark.usefixtures("two_gpus")
def test_the_gpus_of_this_machine_are_counted_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(tiny.bert_config(), **SIZES)
    assert found.notes[-1] == of_ddp(found, "NAME")
    assert not any("one GPU" in note for note in estimate(tiny.bert_config(), **SIZES, gpu="T4").notes)


def test_training_arguments_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = tiny.arguments(tmp_path)
    alone = estimate_from_arguments(tiny.bert_config(), args, 8, gpu="T4")
    assert not any("one GPU" in note for note in alone.notes)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 4)
    found = estimate_from_arguments(tiny.bert_config(), args, 8, gpu="T4")
    assert found.notes == (*alone.notes, of_ddp(found, count=4))
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 1)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)  # in one process, as stock's DataParallel
    assert estimate_from_arguments(tiny.bert_config(), args, 8, gpu="T4").notes[-1] == of_ddp(found)


def test_training_arguments_that_shard(tmp_path: Path) -> None:
    sharded = tiny.arguments(tmp_path, **fsdp_on_cpu.arguments())
    deepspeed = tiny.arguments(tmp_path)
    deepspeed.deepspeed = "zero2.json"
    for args, engine in ((sharded, "fsdp"), (deepspeed, "deepspeed")):
        assert estimate_from_arguments(tiny.bert_config(), args, 8, gpu="T4").notes[-1] == SHARDED[engine]


def test_an_engine_of_the_trainer_is_not_counted(tmp_path: Path) -> None:
    """A launcher's file switches it on, and the arguments have nothing of it."""
    shape, trainer = BatchShape(2, 8, None, None), Trainer(tiny.bert(), tiny.arguments(tmp_path))
    for engine, note in SHARDED.items():
        setattr(trainer, f"is_{engine}_enabled", True)
        assert estimate_of(trainer, shape, gpu="T4").notes[-1] == note
    next(iter(trainer.model.parameters())).ds_id = 0  # type: ignore[union-attr]
    with pytest.raises(NotEstimableError) as error:
        estimate_of(trainer, shape, gpu="T4")
    assert str(error.value) == (
        "not estimable: ZeRO-3 has cut the weights of <BertForSequenceClassification> already; expected whole ones, as "
        "an estimate is for one GPU without sharding. Call: estimate(trainer.model.config)"
    )


def test_run_says_that_its_prediction_is_for_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny.bert(), tiny.arguments(tmp_path), train_dataset=tiny.rows(8))
    alone, shared = list[str](), list[str]()
    _Watch(trainer, "T4", alone.append)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    _Watch(trainer, "T4", shared.append)
    assert shared[:-1] == alone
    assert shared[-1].startswith("for one GPU; under DDP each of 2 holds gradient buckets of ")
    assert shared[-1].endswith(REHEARSE)


PLANNED: dict[str, Any] = {"gpu": "T4", "seq_len": 8, "effective_batch_size": 2, "method": "full"}


@pytest.mark.slow
def test_a_plan_for_several_processes_is_for_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan(tiny.llama_config(), **PLANNED)
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = plan(tiny.llama_config(), **PLANNED)
    *notes, told = found.notes
    assert tuple(notes) == alone.notes
    assert told.startswith("for one GPU; under DDP each of 2 holds gradient buckets of ")
    assert told.endswith(f"To count everything: {REHEARSE}")
    assert f"Note     {told}\n" in found.table(1000)
    many = plan(tiny.llama_config(num_hidden_layers=4), **{**PLANNED, "gpu": "150MiB", "effective_batch_size": 32})
    steps = (many.chosen or many.shortfall.nearest).accumulation_steps  # type: ignore[union-attr]
    assert steps > 1
    assert many.notes[-1] == f"with 2 processes gradient_accumulation_steps={steps // 2} keeps 32 examples a step"
