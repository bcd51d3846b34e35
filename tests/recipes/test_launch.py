"""Recipes in several processes: what accelerate, DeepSpeed and ``TrainingArguments`` read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from slow_cases import slow_except
from torch.distributed.fsdp import StateDictType
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import tiny
from hf_memopt import Recipe, recipe
from hf_memopt.changes import Change
from hf_memopt.recipes import STRATEGIES, Launch

ENGINES = [(name, offload) for name in STRATEGIES if name != "auto" for offload in (False, True)]
ENGINES.remove(("ddp", True))
PLAIN = Recipe("mine", "tests", micro_batching=False, optim="adamw_torch")


def launched(monkeypatch: pytest.MonkeyPatch, launch: Launch, recipe: Recipe = PLAIN, **more: Any) -> Any:
    """Return the ``TrainingArguments`` that each of the processes makes, without waiting for the others."""
    monkeypatch.setattr("hf_memopt.recipes.resolved_arguments.process_count", lambda: launch.world_size)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda args: launch.world_size))
    return recipe.training_arguments(**launch.training_arguments, use_cpu=True, **more)


@pytest.mark.parametrize(("strategy", "offload"), ENGINES)
def test_accelerate_reads_the_file(strategy: str, offload: bool, tmp_path: Path) -> None:
    command = PLAIN.distributed(2, strategy, offload).write(tmp_path / "made")
    path = tmp_path / "made" / "accelerate.yaml"
    assert command == f"accelerate launch --config_file {path} train.py"
    read: Any = load_config_from_file(str(path))
    kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(strategy, "DEEPSPEED")
    assert (read.distributed_type.value, read.num_processes, read.num_machines) == (kind, 2, 1)
    if strategy == "fsdp2":
        assert read.fsdp_config["fsdp_version"] == 2
        assert read.fsdp_config["fsdp_offload_params"] is offload
    if kind == "DEEPSPEED":
        zero: Any = HfDeepSpeedConfig(read.deepspeed_config["deepspeed_config_file"])
        stages = {"zero2": zero.is_zero2(), "zero3": zero.is_zero3()}
        assert (stages, zero.is_offload()) == ({name: name == strategy for name in stages}, offload)


ZERO = [case for case in ENGINES if case[0].startswith("zero")]


@pytest.mark.parametrize(("strategy", "offload"), ZERO)
def test_deepspeed_reads_its_file_as_the_trainer_fills_it_in(
    strategy: str, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed: Any = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    launch = PLAIN.distributed(2, strategy, offload)
    launch.write(tmp_path)
    batch = {name: value for name, value in launch.training_arguments.items() if name != "deepspeed"}
    args = launched(monkeypatch, replace(launch, training_arguments=batch))  # makes no engine
    read = HfTrainerDeepSpeedConfig(str(tmp_path / "deepspeed.json"))
    read.trainer_config_process(args)
    read.trainer_config_finalize(args, tiny.bert(), num_training_steps=10)  # raises where file and arguments differ
    assert '"auto"' not in json.dumps(read.config)
    assert read.config["train_micro_batch_size_per_gpu"] == batch["per_device_train_batch_size"]
    read.config["train_batch_size"] //= 2  # it multiplies by the processes that have met, here one
    found = deepspeed.DeepSpeedConfig(read.config)
    assert found.zero_optimization_stage == int(strategy[-1])
    assert (found.zero_config.offload_optimizer is not None) is offload


@pytest.mark.parametrize(("strategy", "offload"), slow_except(("fsdp2", True), ENGINES[:3]))
def test_every_process_makes_its_share_of_the_batch(
    strategy: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = PLAIN.replace(per_device_train_batch_size=8)
    launch = small.distributed(2, strategy, offload)
    args = launched(monkeypatch, launch, small)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 2 == small.effective_batch_size
    if strategy == "ddp":
        assert (args.ddp_find_unused_parameters, args.ddp_broadcast_buffers) == (False, False)
    else:
        plugin = args.fsdp_plugin_args
        assert (plugin["fsdp_version"], plugin["reshard_after_forward"]) == (2, True)
        assert (plugin.get("cpu_offload", False), plugin["state_dict_type"]) == (offload, "FULL_STATE_DICT")
        assert plugin["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


def test_missing_deepspeed_is_an_error_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.recipes.resolved_arguments.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"which is not installed; .* Call: pip install deepspeed"):
        launched(monkeypatch, PLAIN.distributed(2, "zero2"))


def test_ddp_looks_for_weights_without_a_gradient() -> None:
    launch = PLAIN.distributed(2, "ddp", unused_parameters=("mask_token", "pooler"))
    assert launch.training_arguments["ddp_find_unused_parameters"] is True
    assert "ddp_broadcast_buffers" not in launch.training_arguments
    assert "ddp_find_unused_parameters: False -> True (mask_token gets no gradient)" in str(launch)


def test_auto_is_ddp_or_with_offload_fsdp2() -> None:
    launch = recipe("8gb-gpu").distributed(2)
    reason = "a recipe is made for one GPU, so it fits on each"
    assert (launch.strategy, launch.changes[0]) == ("ddp", Change("strategy", "auto", "ddp", reason))
    assert PLAIN.distributed(2, offload_params=True).strategy == "fsdp2"
    assert str(launch).splitlines()[0] == (
        "8gb-gpu on 2 GPUs: ddp, each GPU has the whole model; DistributedDataParallel"
    )
    assert str(launch).splitlines()[-1] == "  launch: torchrun --nproc_per_node=2 train.py"


def test_torchrun_saves_weights_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = PLAIN.distributed(2, "fsdp2")
    variables, torchrun, rest = launch.command().partition("torchrun ")
    assert (torchrun, rest) == ("torchrun ", "--nproc_per_node=2 train.py")
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    plugin = FullyShardedDataParallelPlugin(**launched(monkeypatch, launch).fsdp_plugin_args)
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT


def test_existing_files_stay_unless_forced(tmp_path: Path) -> None:
    launch = PLAIN.distributed(2, "zero3")
    (tmp_path / "deepspeed.json").write_text("mine")
    with pytest.raises(FileExistsError) as error:
        launch.write(tmp_path)
    assert error.value.strerror == (
        f"folder={str(tmp_path)!r} has deepspeed.json already; expected none of them. "
        "Pass force=True to overwrite, or another folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["deepspeed.json"]
    launch.write(tmp_path, force=True)
    names = {"accelerate.yaml", "deepspeed.json", "training_arguments.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    with pytest.raises(NotADirectoryError, match="is a file; expected a folder"):
        launch.write(tmp_path / "deepspeed.json")


def test_several_gpus_in_one_process_are_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda args: 2))  # what stock counts without a launcher
    with pytest.raises(RuntimeError, match=r"Launch: torchrun --nproc_per_node=2 your_script\.py"):
        PLAIN.training_arguments(use_cpu=True)
