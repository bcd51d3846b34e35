"""Write what a recipe needs to be trained in several processes: the files of the launchers, the arguments, the command.

The engines are stock's: ``DistributedDataParallel``, FSDP2 and DeepSpeed, as accelerate and the ``Trainer`` start them.
Here they are chosen and configured, and techniques that do not work with them are refused before anything is launched.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.binding import versions
from hf_memopt.binding.compatibility import ddp_flags, is_of_bitsandbytes, refusal_of, refused_fields
from hf_memopt.changes import Change
from hf_memopt.memory.distributed import ZERO_STAGES, zero_options
from hf_memopt.notices import quoted
from hf_memopt.plain_data import Count, check_value, check_word, checked_path
from hf_memopt.recipes.resolved_arguments import cut_effective_batch
from hf_memopt.technique_list import Refusal
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from hf_memopt.recipes.recipe_class import Recipe

STRATEGIES: Mapping[str, str] = {
    "auto": "ddp, or fsdp2 with offload_params",
    "ddp": "each GPU has the whole model; DistributedDataParallel",
    "fsdp2": "weights, gradients and optimizer states are cut over the GPUs; torch's fully_shard",
    "zero2": "gradients and optimizer states are cut over the GPUs; DeepSpeed",
    "zero3": "weights too; DeepSpeed",
}
"""The strategies, and what each does."""

NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "DeepSpeed", "zero3": "DeepSpeed"}  # in the table of conflicts
CUTS = {"fsdp2": ("nf4",), "zero3": ()}
"""Of the engines that cut weights, the quantised ones that they can cut."""
ADAMW = ("adamw_torch", "adamw_torch_fused")
ACCELERATE, ARGUMENTS, DEEPSPEED = "accelerate.yaml", "training_arguments.json", "deepspeed.json"


def launch_files(strategy: str) -> tuple[str, ...]:
    """Return the names of the files that ``Launch.write`` writes."""
    return ACCELERATE, ARGUMENTS, *([DEEPSPEED] if strategy in ZERO_STAGES else [])


@dataclass(frozen=True)
class Launch:
    """How a recipe is trained in several processes; ``print`` shows it, ``write`` writes its files."""

    recipe: str  # the name of the recipe
    world_size: int  # processes, one for each GPU
    strategy: str  # a name of `STRATEGIES`, never `"auto"`
    # whether the sharded optimizer states (with weights that are sharded: these too) wait in host memory
    offload_params: bool
    training_arguments: Mapping[str, Any]  # fields of `TrainingArguments`, for `recipe.training_arguments(...)`
    accelerate: Mapping[str, Any]  # the content of the file for `accelerate launch --config_file`
    deepspeed: Mapping[str, Any] | None  # DeepSpeed's own configuration; None for the other engines
    changes: tuple[Change, ...]  # what was decided, each with its reason

    def __str__(self) -> str:
        engine = f"{self.strategy}{' with offload' if self.offload_params else ''}"
        lines = [f"{self.recipe} on {self.world_size} GPUs: {engine}, {STRATEGIES[self.strategy]}"]
        lines += [f"  {change}" for change in self.changes]
        return "\n".join([*lines, f"  launch: {self.command()}"])

    def command(self, script: str = "train.py") -> str:
        """Return the command that starts all processes of this machine, with the training arguments alone.

        ``write`` has the one of accelerate, whose file it writes.
        """
        variables = versions.fsdp_environment() if self.strategy == "fsdp2" else {}
        launch = f"torchrun --nproc_per_node={self.world_size} {quoted(script)}"
        return " ".join([*(f"{name}={value}" for name, value in variables.items()), launch])

    def write(self, folder: str | os.PathLike[str], *, script: str = "train.py", force: bool = False) -> str:
        """Write the files into a folder, and return the command that uses them.

        ``accelerate.yaml`` is for ``accelerate launch``, ``training_arguments.json`` for ``TrainingArguments``, and
        ``deepspeed.json`` for DeepSpeed. Each is written whole or not at all.

        Args:
            folder: is made where it does not exist.
            script: the program that trains, for the command.
            force: whether files that exist are overwritten.

        Raises:
            FileExistsError: a file exists, and ``force`` is False; none is written then.
            NotADirectoryError: ``folder`` is a file.
        """
        check_value("script", script, str, "train.py")
        place = checked_path("folder", folder)
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(
                f"folder={str(place)!r} is a file; expected a folder or a new path. Pass another folder"
            )
        files = self._files(place)
        existing = [name for name in files if (place / name).exists()]
        if existing and not force:
            raise FileExistsError(
                errno.EEXIST,
                f"folder={str(place)!r} has {', '.join(existing)} already; expected none of them. "
                "Pass force=True to overwrite, or another folder",
            )
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(place / name, content)
        return f"accelerate launch --config_file {quoted(str(place / ACCELERATE))} {quoted(script)}"

    def _files(self, folder: Path) -> dict[str, str]:
        import yaml  # of accelerate

        files = {ARGUMENTS: json.dumps(self.training_arguments, indent=2) + "\n"}
        accelerate = dict(self.accelerate)
        if self.deepspeed is not None:
            files[DEEPSPEED] = json.dumps(self.deepspeed, indent=2) + "\n"
            of_engine = {**accelerate["deepspeed_config"], "deepspeed_config_file": str(folder / DEEPSPEED)}
            accelerate["deepspeed_config"] = of_engine
        files[ACCELERATE] = yaml.safe_dump(accelerate, sort_keys=False)
        return files


def launch_of(
    recipe: Recipe, world_size: int, strategy: str, *, offload_params: bool, unused: Sequence[str] = ()
) -> Launch:
    """Return how a recipe is trained in several processes; see ``Recipe.distributed``.

    ``unused`` are names of trainable weights that get no gradient.
    """
    _check_request(world_size, strategy, offload_params)
    changes = []
    if strategy == "auto":
        reason = "a recipe is made for one GPU, so it fits on each"
        shards = Change("strategy", "auto", "fsdp2", "offload_params is for sharded weights")
        changes.append(shards if offload_params else Change("strategy", "auto", "ddp", reason))
        strategy = changes[-1].new
    _check_techniques(recipe, strategy, offload_params)
    preferred = recipe.per_device_train_batch_size, recipe.effective_batch_size // recipe.per_device_train_batch_size
    batch, change = cut_effective_batch(recipe.effective_batch_size, preferred, {}, processes=world_size)
    changes += [] if change is None else [change]
    machine = {"num_machines": 1, "num_processes": world_size, "machine_rank": 0, "main_training_function": "main"}
    of_machine = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", **machine}
    accelerate: dict[str, Any] = {**of_machine, "use_cpu": False}
    deepspeed = None
    engine: dict[str, Any] = dict(ddp_flags(unused))
    if strategy == "fsdp2":
        accelerate |= {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": _fsdp_config(offload_params)}
        engine = versions.fsdp_arguments(offload_params=offload_params)
    elif strategy in ZERO_STAGES:
        deepspeed = _deepspeed_config(ZERO_STAGES[strategy], offload_params)
        accelerate |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero3_init_flag": strategy == "zero3"}}
        engine = {"deepspeed": deepspeed}
    else:
        accelerate["mixed_precision"] = "no"  # TrainingArguments decide
        if unused:
            changes.append(Change("ddp_find_unused_parameters", False, True, f"{unused[0]} gets no gradient"))
    arguments = {**batch, **engine}
    return Launch(recipe.name, world_size, strategy, offload_params, arguments, accelerate, deepspeed, tuple(changes))


# ---- Checks ---------------------------------------------------------------------------------------------------------


def _check_request(world_size: int, strategy: str, offload_params: bool) -> None:
    check_value("world_size", world_size, Count, 2)
    check_value("offload_params", offload_params, bool, False)
    if world_size == 1:
        raise ValueError(
            "world_size=1 is one process; expected 2 or more, one for each GPU. Call recipe.training_arguments(...) in "
            "one process"
        )
    check_word("strategy", strategy, STRATEGIES)
    if strategy == "ddp" and offload_params:
        raise ValueError(
            "strategy='ddp', offload_params=True contradict each other: every process keeps a whole model on its GPU; "
            "expected a strategy that shards. Pass strategy='fsdp2'"
        )


def _check_techniques(recipe: Recipe, strategy: str, offload_params: bool) -> None:
    """Refuse, in one error, everything in a recipe that does not work with the engine."""
    found: dict[str, tuple[Refusal, Any]] = {  # each with the value that switches it off
        field: (refusal, one.fields[field]) for field, (one, refusal) in refused_fields(recipe, NAMES[strategy]).items()
    }
    refusal = refusal_of("bitsandbytes optimizer", NAMES[strategy]) if is_of_bitsandbytes(recipe.optim) else None
    if refusal is not None:
        found["optim"] = refusal, "adamw_torch_fused"
    if found:
        reasons = "; ".join(f"{refusal.one}: {refusal.reason}" for refusal, _ in found.values())
        fields = ", ".join(f"{field}={off!r}" for field, (_, off) in found.items())
        raise ValueError(
            f"strategy={strategy!r} and what recipe {recipe.name!r} uses are incompatible ({reasons}); expected a "
            f"recipe without it. Call recipe.replace({fields}).distributed(...)"
        )
    if recipe.load_in is not None and strategy in CUTS and recipe.load_in not in CUTS[strategy]:
        raise ValueError(
            f"strategy={strategy!r}, load_in={recipe.load_in!r} are incompatible: quantised weights are bytes with "
            "tables of their own, which are not sharded; expected a strategy with whole weights, or 4 bits under "
            "FSDP2. Pass strategy='ddp'"
        )
    if offload_params and strategy in ZERO_STAGES and recipe.optim not in ADAMW:
        raise ValueError(
            f"strategy={strategy!r}, offload_params=True, optim={recipe.optim!r} are incompatible: DeepSpeed steps on "
            "the host with an AdamW of its own; expected AdamW. Call recipe.replace(optim='adamw_torch')"
        )


# ---- The engines' own files -----------------------------------------------------------------------------------------


def _fsdp_config(offload_params: bool) -> dict[str, Any]:
    """Return ``fsdp_config`` of accelerate's file.

    Checkpointing is left to ``TrainingArguments``: FSDP's own variant recomputes with other random numbers (accelerate
    1.15: ``preserve_rng_state=False``), so that dropout differs between a forward pass and its recomputation.
    """
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": offload_params,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": False,
    }


def _deepspeed_config(stage: int, offload_params: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration; the ``Trainer`` fills in what is "auto" from its arguments."""
    zero = zero_options(stage)
    if offload_params:
        on_host = {"device": "cpu", "pin_memory": True}
        zero |= {"offload_optimizer": on_host} | ({"offload_param": on_host} if stage == 3 else {})
    sizes = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    formats = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    config: dict[str, Any] = {"zero_optimization": zero, **formats, **dict.fromkeys(sizes, "auto")}
    if offload_params:  # stock's own optimizers step on the GPU
        names = ("lr", "betas", "eps", "weight_decay")
        return {**config, "optimizer": {"type": "AdamW", "params": dict.fromkeys(names, "auto")}}
    return {**config, "zero_allow_untested_optimizer": True}
