"""A checkpoint is complete or not resumed from: killed at every write, over an earlier run's, by two processes."""

from __future__ import annotations

import builtins
import inspect
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from slow_cases import resumes_on_a_cpu
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt.binding.attach import attach
from hf_memopt.binding.checkpoint_manifest import checkpoint_to_resume, why_not_whole
from hf_memopt.techniques.checkpoints.sharded import ShardedCheckpointCallback
from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback
from two_ranks import run_pair

# PEFT asks transformers 5.23 by the older name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ROWS = [{"input_ids": [5, 6, 7, 8 + i], "labels": [5, 6, 7, 8 + i]} for i in range(16)]
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
}


def lora(seed: int = 0) -> nn.Module:
    model = tiny.llama()
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))


def trainer(model: nn.Module, folder: Path, max_shard_bytes: str = "1GB", **settings: Any) -> Trainer:
    args = tiny.arguments(folder, **{**RUN, "max_steps": 6, **settings})
    built = Trainer(model=model, args=args, train_dataset=ROWS)
    return attach(built, MicrobatchCallback(), ShardedCheckpointCallback(max_shard_bytes))


def trained(model: nn.Module, folder: Path, *rest: Any, resume: Any = None, **settings: Any) -> nn.Module:
    trainer(model, folder, *rest, **settings).train(resume_from_checkpoint=resume)
    return model


# ---- Killed while it saves ------------------------------------------------------------------------------------------


class Kill:
    """Ends the program at the n-th change of a folder's files, which it leaves half done."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, at: int) -> None:
        self.folder, self.at, self.changes = folder, at, 0
        real_open = builtins.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wxa"):
                self._change(file, lambda: real_open(file, mode, *args, **kwargs).close())
            return real_open(file, mode, *args, **kwargs)

        patch.setattr(builtins, "open", opened)
        for owner, name, where in ((os, "unlink", 0), (os, "remove", 0), (os, "replace", 1)):
            patch.setattr(owner, name, self._killing(getattr(owner, name), where, half=False))
        for owner, name in ((torch, "save"), (transformers.modeling_utils, "safe_save_file")):
            patch.setattr(owner, name, self._killing(getattr(owner, name), 1, half=True))

    def _killing(self, real: Callable[..., Any], where: int, *, half: bool) -> Callable[..., Any]:
        def killing(*args: Any, **kwargs: Any) -> Any:
            file = args[where] if len(args) > where else kwargs["filename"]

            def half_done() -> None:
                if half:
                    real(*args, **kwargs)
                    os.truncate(file, os.path.getsize(file) // 2)

            self._change(file, half_done)
            return real(*args, **kwargs)

        return killing

    def _change(self, file: Any, half_done: Callable[[], None]) -> None:
        if self.folder in Path(os.fspath(file)).parents:
            self.changes += 1
            if self.changes == self.at:
                half_done()
                raise SystemExit("killed")


@pytest.mark.parametrize(
    ("build", "max_shard_bytes"),
    [
        pytest.param(tiny.llama, "1GB", id="one", marks=pytest.mark.slow),
        pytest.param(tiny.llama, "40KB", id="many", marks=pytest.mark.slow),
        pytest.param(lora, "1GB", id="lora", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_write_a_run_is_resumed_that_was_saved_whole(tmp_path, build, max_shard_bytes) -> None:
    """A ran in this folder before; B is killed while it writes its own checkpoint-4 over A's."""
    a, b = tmp_path / "a", tmp_path / "b"
    straight = {"A": trained(build(seed=1), a, max_shard_bytes), "B": trained(build(seed=2), b, max_shard_bytes)}
    saving = trainer(build(seed=2), tmp_path / "b4", max_shard_bytes, max_steps=4)
    saving.train()
    found, at, was_killed = [], 1, True
    while was_killed:
        folder = tmp_path / "shared"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(b / "checkpoint-2", folder / "checkpoint-2")
        shutil.copytree(a / "checkpoint-4", folder / "checkpoint-4")
        saving.args.output_dir = str(folder)
        with pytest.MonkeyPatch.context() as patch:
            kill = Kill(patch, folder / "checkpoint-4", at)
            try:
                saving._save_checkpoint(saving.model, trial=None)
                saving.callback_handler.on_save(saving.args, saving.state, saving.control)
            except SystemExit:
                pass
            was_killed = kill.changes == at
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            resumed = trained(build(), folder, max_shard_bytes, resume=True)
        run = [name for name, model in straight.items() if tiny.largest_difference(model, resumed) == 0.0]
        found.append((*run, any("goes back to checkpoint-2" in str(each.message) for each in caught)))
        at += 1
    expected = [("A", False), ("B", True), ("B", False)]
    assert list(dict.fromkeys(found)) == expected, found
    assert found.count(("A", False)) == 1, found  # only before the first change
    assert found.count(("B", True)) >= 8, found


def test_stock_saves_in_the_order_that_this_rests_on() -> None:
    """Private, and the same in transformers 5.8.1, 5.17.0 and 5.23.0: weights first, the Trainer's state last."""
    source = inspect.getsource(Trainer._save_checkpoint)
    order = [
        "self.save_model(output_dir, _internal_call=True)",
        "self._save_optimizer_and_scheduler(output_dir)",
        "self._save_scaler(output_dir)",
        "self._save_rng_state(output_dir)",
        "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
        "rotate_checkpoints(",
    ]
    places = [source.index(call) for call in order]
    assert places == sorted(places)


# ---- What an earlier run left ---------------------------------------------------------------------------------------


def test_no_complete_checkpoint_is_refused_and_the_weights_stay(tmp_path) -> None:
    trained(tiny.llama(seed=1), tmp_path, save_steps=4, max_steps=4)
    dying = trainer(tiny.llama(seed=2), tmp_path, save_steps=4)

    def die(*_: Any) -> None:
        raise SystemExit("killed between weights and optimizer")

    dying._save_optimizer_and_scheduler = die
    with pytest.raises(SystemExit):
        dying.train()
    checkpoint = str(tmp_path / "checkpoint-4")
    rest = (
        " finds no complete checkpoint: checkpoint-4 is incomplete, it has no trainer_state.json, which is written "
        "last; expected one that was written to its end. Start anew: trainer.train()"
    )
    for asked in (True, checkpoint):
        with pytest.raises(ValueError) as error:
            trained(tiny.llama(), tmp_path, resume=asked)
        assert str(error.value) == f"resume_from_checkpoint={asked!r}{rest}"
    saved = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    assert tiny.largest_difference(saved, dying.model) == 0.0
    trained(tiny.llama(seed=3), tmp_path, save_steps=4)  # a new run completes the folder
    assert why_not_whole(Path(checkpoint)) is None


def test_only_the_model_is_saved_over_a_whole_checkpoint(tmp_path) -> None:
    """Else the earlier run's optimizer would be loaded beside these weights."""
    trained(tiny.llama(seed=1), tmp_path, max_steps=2)
    trained(tiny.llama(seed=2), tmp_path, max_steps=2, save_only_model=True)
    left = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert "trainer_state.json" in left
    assert left.isdisjoint({"optimizer.pt", "scheduler.pt", "rng_state.pth"})
    assert checkpoint_to_resume(True, str(tmp_path)) is True


def test_adapters_are_resumed_and_not_the_whole_model_of_an_earlier_run(tmp_path) -> None:
    trained(tiny.llama(seed=1), tmp_path, max_steps=4)
    straight = trained(lora(seed=2), tmp_path)
    resumed = trained(lora(seed=3), tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert tiny.largest_difference(straight, resumed) == 0.0


def test_weights_that_a_user_saves_into_a_checkpoint_leave_its_state(tmp_path) -> None:
    built = trainer(tiny.llama(), tmp_path, max_steps=2)
    built.train()
    built.save_model(str(tmp_path / "checkpoint-2"))
    assert why_not_whole(tmp_path / "checkpoint-2") is None


# ---- Which folders are complete -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("optimizer.pt", "it has no optimizer.pt"),
        ("rng_state.pth", "it has no rng_state*.pth"),
        ("model-00001-of-", "it has no model-00001-of-"),
        ("trainer_state.json", "it has no trainer_state.json, which is written last"),
        ("half", "its trainer_state.json was not written to its end"),
        ("list", "its trainer_state.json was not written to its end"),
    ],
)
def test_a_checkpoint_that_lost_files_is_passed_over(tmp_path, damage, reason) -> None:
    """As where deleting it was interrupted."""
    trained(tiny.llama(), tmp_path, "20KB", max_steps=4)
    last = tmp_path / "checkpoint-4"
    state = last / "trainer_state.json"
    if damage == "half":
        os.truncate(state, state.stat().st_size // 2)
    elif damage == "list":
        state.write_text("[]")
    else:
        (lost,) = last.glob(f"{damage}*")
        lost.unlink()
        reason = reason.replace(damage, lost.name) if damage.startswith("model") else reason
    assert why_not_whole(last) == reason
    before = str(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match="goes back to checkpoint-2") as caught:
        assert checkpoint_to_resume(True, str(tmp_path)) == before
    assert [str(each.message) for each in caught] == [
        f"resume_from_checkpoint=True goes back to checkpoint-2: checkpoint-4 is incomplete, {reason}. To choose it "
        f"without this warning, call trainer.train(resume_from_checkpoint={before!r})"
    ]


def test_a_state_with_nan_and_a_folder_of_an_engine_are_complete(tmp_path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"loss": NaN}]}')
    (tmp_path / "scheduler.pt").write_bytes(b"")
    assert why_not_whole(tmp_path) == "it has no optimizer.pt"
    assert why_not_whole(tmp_path, check_files=False) is None
    assert checkpoint_to_resume(str(tmp_path), "elsewhere") == str(tmp_path)  # asked for by name


@pytest.mark.parametrize("asked", [None, False, True, "missing/checkpoint-3"])
def test_where_nothing_is_incomplete_stock_gets_what_was_asked_for(tmp_path, asked) -> None:
    (tmp_path / "checkpoint-2-old").mkdir()
    assert checkpoint_to_resume(asked, str(tmp_path)) is asked
    assert checkpoint_to_resume(asked, str(tmp_path / "missing")) is asked


def test_what_this_runs_other_processes_have_written_stays(tmp_path) -> None:
    written = [name.format(rank) for rank in range(3) for name in ("rng_state_{}.pth", "memopt_stream_{}.json")]
    names = ["trainer_state.json", "scaler.pt", *written, "model.safetensors"]
    for name in names:
        (tmp_path / name).touch()
    remove_training_state(tmp_path, processes=2)
    kept = {"rng_state_1.pth", "memopt_stream_1.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == kept


# ---- Two processes --------------------------------------------------------------------------------------------------


@resumes_on_a_cpu
def test_two_processes_go_back_to_the_same_complete_checkpoint(tmp_path) -> None:
    for rank in run_pair(tmp_path, __file__, str(tmp_path)):
        assert rank == {"killed": True, "difference": 0.0, "states": ["rng_state_0.pth", "rng_state_1.pth"]}


def run_rank(folder: Path) -> None:
    """Let A train, B die between weights and optimizer of its checkpoint-4, and C resume; one of two processes."""
    settings = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False, "ddp_backend": "gloo"}
    trained(tiny.llama(seed=1), folder / "out", **settings)
    straight = trained(tiny.llama(seed=2), folder / "straight", **settings)
    dying = trainer(tiny.llama(seed=2), folder / "out", **settings)
    save, killed = dying._save_optimizer_and_scheduler, False

    def die(output_dir: str) -> None:
        if output_dir.endswith("checkpoint-4"):
            dying.accelerator.wait_for_everyone()
            raise SystemExit("killed")
        save(output_dir)

    dying._save_optimizer_and_scheduler = die
    try:
        dying.train()
    except SystemExit:
        killed = True
    shutil.rmtree(folder / "out/checkpoint-6", ignore_errors=True)  # of A
    dying.accelerator.wait_for_everyone()
    warnings.simplefilter("ignore")
    resumed = trainer(tiny.llama(), folder / "out", **settings)
    resumed.train(resume_from_checkpoint=True)
    found = {
        "killed": killed,
        "difference": tiny.largest_difference(straight, resumed.model),
        "states": sorted(path.name for path in (folder / "out/checkpoint-4").glob("rng_state*")),
    }
    (folder / f"rank{resumed.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ('{"weight_map": {"a": "../../secret"}}', "it has the file '../../secret', which is not one of its folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "it has the file '/etc/passwd', which is not one of its folder"),
        ('{"weight_map": {"a": 1}}', "it has weight_map={'a': 1}, which names no files"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
    ids=range(4),
)
@pytest.mark.parametrize("check_files", [True, False])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path, index, reason, check_files) -> None:
    """Stock would follow the name, whoever wrote it."""
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    found = why_not_whole(tmp_path, check_files=check_files)
    assert found == f"its model.safetensors.index.json cannot be read: {reason}"
