"""A checkpoint is whole or not resumed from: damaged, killed while it is saved, of two runs, saved by two processes."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from slow_cases import resumes_on_a_cpu, slow_except
from tables import refuses, whole
from torch import nn
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt import BucketedCollator, MicrobatchCallback, ShardedCheckpointCallback, attach, bucketed
from two_ranks import run_pair

# PEFT asks transformers 5.23 by the older name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MANIFEST = "memopt_manifest.json"
ROWS = [{"input_ids": [5, 6, 7, 8 + i], "labels": [5, 6, 7, 8 + i]} for i in range(16)]
NAME_ANOTHER = "Name another, or delete memopt_manifest.json to skip the check"
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
}


class Chooses(Trainer):
    """Returns what stock would resume from, and trains nothing."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return resume_from_checkpoint


def chosen(asked: Any, folder: Path, **settings: Any) -> Any:
    """Return what is resumed from where this is asked for."""
    return attach(Chooses(tiny.bert(), tiny.arguments(folder, **settings))).train(asked)


def why_not_whole(checkpoint: Path) -> str | None:
    """Return the reason for which a checkpoint is refused; None if it is resumed from."""
    try:
        assert chosen(str(checkpoint), checkpoint.parent) == str(checkpoint)
    except ValueError as error:
        return str(error).partition("is not whole, ")[2].partition("; expected the files as they were saved.")[0]
    return None


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


def test_stock_saves_in_the_order_that_this_rests_on() -> None:
    """Private, and the same in transformers 5.8.1, 5.17.0 and 5.23.0: weights first, the Trainer's state last."""
    source = inspect.getsource(Trainer._save_checkpoint)
    order = [
        'checkpoint_folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"',
        "run_dir = self._get_output_dir(trial=trial)",
        "output_dir = os.path.join(run_dir, checkpoint_folder)",
        "self.save_model(output_dir, _internal_call=True)",
        "self._save_optimizer_and_scheduler(output_dir)",
        "self._save_scaler(output_dir)",
        "self._save_rng_state(output_dir)",
        "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
        "self._push_from_checkpoint(output_dir)",
        "rotate_checkpoints(",
    ]
    places = [source.index(call) for call in order]
    assert places == sorted(places)


def test_a_run_without_a_whole_checkpoint_is_refused_and_the_new_weights_stay(tmp_path) -> None:
    trained(tiny.llama(seed=1), tmp_path, save_steps=4, max_steps=4)
    dying = trainer(tiny.llama(seed=2), tmp_path, save_steps=4)

    def die(*_: Any) -> None:
        raise SystemExit("killed between weights and optimizer")

    dying._save_optimizer_and_scheduler = die
    with pytest.raises(SystemExit):
        dying.train()
    checkpoint = str(tmp_path / "checkpoint-4")
    rest = (
        " finds no whole checkpoint: checkpoint-4 is not whole, its memopt_manifest.json was not written to its end; "
        "expected the files as they were saved."
    )
    actions = {True: "Start anew: trainer.train()", checkpoint: NAME_ANOTHER}
    for asked, action in actions.items():
        message = f"resume_from_checkpoint={asked!r}{rest} {action}"
        refuses(ValueError, message, trained, tiny.llama(), tmp_path, resume=asked)
    saved = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    assert tiny.largest_difference(saved, dying.model) == 0.0
    trained(tiny.llama(seed=3), tmp_path, save_steps=4)  # a new run completes the folder
    assert why_not_whole(Path(checkpoint)) is None


def test_what_stock_would_read_is_removed_and_what_users_keep_stays(tmp_path) -> None:
    """Else the earlier run's optimizer would be loaded beside these weights."""
    folder = tmp_path / "checkpoint-2"
    trained(tiny.llama(seed=1), tmp_path, max_steps=2)
    (folder / "optimizer_0").mkdir()
    stale = {"scaler.pt", "rng_state_7.pth", "pytorch_model.bin", ".memopt-0a", "optimizer_0/__0_0.distcp"}
    for name in (*stale, "ema.pt", "README.md"):
        (folder / name).touch()
    (tmp_path / ".memopt-0a").touch()  # of an interrupted write
    trained(tiny.llama(seed=2), tmp_path, max_steps=2, save_only_model=True)
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert {"trainer_state.json", MANIFEST, "ema.pt", "README.md"} <= left
    assert left.isdisjoint({*stale, "optimizer.pt", "scheduler.pt", "rng_state.pth"})
    assert chosen(True, tmp_path) is True
    assert not list(tmp_path.rglob(".memopt-*"))


def test_adapters_are_resumed_and_not_the_whole_model_of_an_earlier_run(tmp_path) -> None:
    trained(tiny.llama(seed=1), tmp_path, max_steps=4)
    straight = trained(lora(seed=2), tmp_path)
    resumed = trained(lora(seed=3), tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert tiny.largest_difference(straight, resumed) == 0.0
    beside = lora(seed=3)
    beside.add_adapter("reference", beside.peft_config["default"])  # other places, the same names
    trained(beside, tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(beside.get_parameter(name), weight) for name, weight in resumed.named_parameters())


HALF, EMPTY, BIT, LOST, OLDER = "half", "empty", "one bit", "lost", "of another step"


def damage(path: Path, how: str) -> None:
    """Do to a file what a power cut, a bad disk or a careless copy does."""
    content = path.read_bytes()
    half = len(content) // 2
    if how == LOST:
        path.unlink()
        return
    found = {
        HALF: content[:half],
        EMPTY: b"",
        BIT: content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        OLDER: path.parent.with_name("checkpoint-2").joinpath(path.name).read_bytes(),
    }
    path.write_bytes(found[how])


def described(path: Path) -> str:
    content = path.read_bytes()
    return f"{len(content)} bytes, CRC32 {zlib.crc32(content):08x}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of a run in weights of several files, a view and micro-batches."""
    folder = tmp_path_factory.mktemp("saved")
    with_all_parts(folder, max_steps=4).train()
    return folder


def with_all_parts(folder: Path, **settings: Any) -> Trainer:
    """Return a Trainer with all that writes into checkpoints."""
    args = tiny.arguments(folder, **{**RUN, "max_steps": 6, **settings})
    view = bucketed(ROWS, batch_size=2)
    built = Trainer(tiny.llama(), args, train_dataset=view, data_collator=BucketedCollator(tiny.tokenizer()))
    return attach(built, MicrobatchCallback(), ShardedCheckpointCallback("20KB"))


CHANGING = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "model-00001-of-*")
STAYING = ("rng_state.pth", "training_args.bin", "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("name", "how"),
    slow_except(
        [*product(CHANGING + STAYING, [BIT]), *product(["optimizer.pt"], [HALF, EMPTY, LOST, OLDER])],
        [*product(CHANGING + STAYING, (HALF, EMPTY, BIT, LOST)), *product(CHANGING, [OLDER])],
    ),
)
def test_a_damaged_checkpoint_is_passed_over_or_refused_by_the_files_name(saved, tmp_path, name, how) -> None:
    shutil.copytree(saved, tmp_path / "out")
    last, before = tmp_path / "out/checkpoint-4", str(tmp_path / "out/checkpoint-2")
    (file,) = last.glob(name)
    expected = described(file)
    damage(file, how)
    reason = f"checkpoint-4 is not whole, its {file.name} has {{}}, and was saved with {expected}"
    reason = f"checkpoint-4 is not whole, it has no {file.name}" if how == LOST else reason.format(described(file))
    with pytest.warns(UserWarning, match="goes back to checkpoint-2") as caught:
        assert chosen(True, tmp_path / "out") == before
    assert [str(each.message) for each in caught] == [
        whole("resume_from_checkpoint=True", reason=reason, before=before)
    ]
    message = whole("resume_from_checkpoint={last!r}", last=str(last), reason=reason, name_another=NAME_ANOTHER)
    refuses(ValueError, message, chosen, str(last), tmp_path / "elsewhere")


def with_foreign_file(content: bytes) -> bytes:
    told = json.loads(content)
    told["files"]["../secret"] = "0 bytes, CRC32 00000000"
    return json.dumps(told).encode()


UNFINISHED = "its memopt_manifest.json was not written to its end"


BROKEN: list[tuple[Callable[[bytes], bytes], str]] = [
    *((lambda _, new=new: new, UNFINISHED) for new in (b"", b"\0" * 900, b"{", b"[]", b'{"run": "a", "step": 4}')),
    (with_foreign_file, "it has no ../secret"),
]


@pytest.mark.parametrize(("change", "reason"), BROKEN, ids=range(len(BROKEN)))
def test_a_manifest_that_was_cut_off_or_names_other_files_is_not_that_of_a_whole_checkpoint(
    saved, tmp_path, change, reason
) -> None:
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(saved / "checkpoint-4", folder)
    (tmp_path / "secret").write_bytes(b"")
    (folder / MANIFEST).write_bytes(change((folder / MANIFEST).read_bytes()))
    assert why_not_whole(folder) == reason


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_manifest_has_all_files_of_the_checkpoint(tmp_path, is_sharded) -> None:
    args = tiny.arguments(tmp_path, **RUN, max_steps=4)
    built = Trainer(model=tiny.llama(), args=args, train_dataset=ROWS)
    attach(built, *([ShardedCheckpointCallback("20KB")] if is_sharded else []))
    built.train()
    manifests = [json.loads((tmp_path / f"checkpoint-{step}" / MANIFEST).read_bytes()) for step in (2, 4)]
    assert manifests[0]["run"] == manifests[1]["run"]
    for manifest in manifests:
        folder = tmp_path / f"checkpoint-{manifest['step']}"
        files = {path.name: described(path) for path in folder.iterdir() if path.name != MANIFEST}
        assert (manifest["world_size"], manifest["files"]) == (1, files)
    before = torch.load(tmp_path / "checkpoint-4/optimizer.pt")
    resumed = attach(Trainer(model=tiny.llama(), args=args, train_dataset=ROWS))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert before["param_groups"] == resumed.optimizer.optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("asked", [True, "by name"])
def test_a_checkpoint_without_a_manifest_resumes_with_one_line(saved, tmp_path, caplog, asked) -> None:
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(saved / "checkpoint-4", folder)
    (folder / MANIFEST).unlink()
    asked = asked if asked is True else str(folder)
    assert chosen(asked, tmp_path) == asked
    assert [record.getMessage() for record in caplog.records if record.name.startswith("hf_memopt")] == [
        f"{folder} has no memopt_manifest.json, as of stock or hf_memopt 0.3.0: its files were not checked"
    ]
    (folder / "trainer_state.json").unlink()  # stock was killed before it wrote its last file
    assert why_not_whole(folder) == "it has no trainer_state.json, which stock writes last"
    with pytest.raises(ValueError, match=r"Start anew: trainer.train\(\)$"):  # not: delete what is not there
        chosen(str(folder), tmp_path / "elsewhere")


def test_the_old_checkpoint_is_deleted_after_the_manifest_of_the_new_one(tmp_path, monkeypatch) -> None:
    """Else a kill in between would leave none that is whole."""
    whole, real = [], shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        whole.append([each.name for each in tmp_path.glob("checkpoint-*") if why_not_whole(each) is None])
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    trained(tiny.llama(), tmp_path, save_total_limit=1)
    assert [sorted(names) for names in whole] == [["checkpoint-2", "checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]


class WritesMore(TrainerCallback):
    """As many scripts have it: on_save writes files of its own and deletes some of stock's."""

    def on_save(self, args, state, control, **kwargs) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        # a run that is killed here resumes: the manifest is the last file, and has the state of the run too
        assert set(json.loads((folder / MANIFEST).read_bytes())["files"]) == {*os.listdir(folder)} - {MANIFEST}
        (folder / "training_args.bin").unlink()
        (folder / "notes.txt").write_text("mine" * 2**17, encoding="utf-8")  # longer than what is read at once


def test_what_a_callback_changes_in_on_save_is_in_the_manifest(tmp_path) -> None:
    run = trainer(tiny.llama(), tmp_path, max_steps=2)
    run.add_callback(WritesMore())
    run.train()
    folder = tmp_path / "checkpoint-2"
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {MANIFEST}
    assert why_not_whole(folder) is None
    (folder / "notes.txt").write_text("Mine" + "mine" * (2**17 - 1), encoding="utf-8")
    found, saved = described(folder / "notes.txt"), files["notes.txt"]
    assert why_not_whole(folder) == f"its notes.txt has {found}, and was saved with {saved}"


def of_the_hub(folder: Path) -> Any:
    """Return a BERT whose weights have the names of bert-base-uncased."""
    tiny.bert().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    names = [(f"LayerNorm.{own}", f"LayerNorm.{other}") for own, other in (("weight", "gamma"), ("bias", "beta"))]
    renamed = {name: next((name.replace(*pair) for pair in names if name.endswith(pair[0])), name) for name in weights}
    save_file({renamed[name]: one for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return transformers.BertForSequenceClassification.from_pretrained(folder)


def test_a_model_that_the_hub_names_otherwise_is_resumed_and_its_best_one_loaded_as_a_whole(tmp_path) -> None:
    scores = iter([2.0, 1.0])
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    settings = {**RUN, "max_steps": 4}
    pieces = {"train_dataset": tiny.rows(8), "eval_dataset": tiny.rows(2)}
    straight = attach(Trainer(of_the_hub(tmp_path / "hub"), tiny.arguments(tmp_path / "a", **settings), **pieces))
    straight.train()
    resumed = attach(Trainer(of_the_hub(tmp_path / "hub"), tiny.arguments(tmp_path / "a", **settings), **pieces))
    resumed.train(str(tmp_path / "a/checkpoint-2"))
    assert tiny.largest_difference(straight.model, resumed.model) == 0.0
    args = tiny.arguments(tmp_path / "b", **settings, **best)
    made = {**pieces, "compute_metrics": lambda given: {"score": next(scores)}}
    chosen = attach(Trainer(of_the_hub(tmp_path / "hub"), args, **made))
    chosen.train()
    saved = type(chosen.model).from_pretrained(tmp_path / "b/checkpoint-2")
    assert tiny.largest_difference(saved, chosen.model) == 0.0
    chosen.save_model(str(tmp_path / "final"))
    stock = Trainer(of_the_hub(tmp_path / "hub"), tiny.arguments(tmp_path / "c", **settings), **pieces)
    stock.train()
    names = [{*load_file(tmp_path / f"{name}/model.safetensors")} for name in ("final", "c/checkpoint-2", "hub")]
    assert names[0] == names[1]  # those of transformers, which are the hub's where it writes these again
    late = attach(Trainer(of_the_hub(tmp_path / "hub"), tiny.arguments(tmp_path / "c", **settings), **pieces))
    if names[1] == names[2]:
        with pytest.raises(ValueError, match=r"has \d+ weights under other names, bert\.embeddings\.LayerNorm"):
            late.train(str(tmp_path / "c/checkpoint-2"))
        folder = tmp_path / "c/checkpoint-2"  # what the message says
        type(stock.model).from_pretrained(folder).save_pretrained(folder, save_original_format=False)
        late.train(str(folder))
        assert tiny.largest_difference(straight.model, late.model) == 0.0


@pytest.mark.parametrize("dies", ["no run", "second"])
def test_two_runs_that_save_at_the_same_time_leave_no_checkpoint_of_both(tmp_path, dies) -> None:
    """The second run saves while the first one is between its weights and its optimizer."""
    first, second = (trainer(tiny.llama(seed=seed), tmp_path / f"{seed}", max_steps=4) for seed in (1, 2))
    for run in (first, second):
        run.train()
        run.args.output_dir = str(tmp_path / "out")
    save, save_second = first._save_optimizer_and_scheduler, second._save_optimizer_and_scheduler

    def between(folder: str) -> None:
        with suppress(SystemExit):
            second._save_checkpoint(second.model, trial=None)
        save(folder)

    def between_of_second(folder: str) -> None:
        save_second(folder)
        if dies == "second":
            raise SystemExit("killed")

    first._save_optimizer_and_scheduler, second._save_optimizer_and_scheduler = between, between_of_second
    with warnings.catch_warnings(record=True) as caught, suppress(SystemExit):
        warnings.simplefilter("always", UserWarning)
        first._save_checkpoint(first.model, trial=None)
    message = whole("output_dir={path!r}", path=str(tmp_path / "out"))
    assert [str(each.message) for each in caught] == [message]
    assert why_not_whole(tmp_path / "out/checkpoint-4") == UNFINISHED
    first._save_optimizer_and_scheduler = save
    first._save_checkpoint(first.model, trial=None)  # what comes next is whole again
    assert why_not_whole(tmp_path / "out/checkpoint-4") is None


@pytest.mark.slow
@resumes_on_a_cpu
def test_two_processes_go_back_to_the_same_whole_checkpoint(tmp_path) -> None:
    for rank in run_pair(tmp_path, __file__, str(tmp_path)):
        assert rank == {
            "killed": True,
            "difference": 0.0,
            "states": ["rng_state_0.pth", "rng_state_1.pth"],
            "world_size": 2,
            "damaged": {"empty": "checkpoint-4", "lost": "checkpoint-4"},
        }


def run_rank(folder: Path) -> None:
    """Let A train, B die between weights and optimizer of its checkpoint-4, and C resume; one of two processes."""
    trained(tiny.llama(seed=1), folder / "out", **tiny.DDP)
    straight = trained(tiny.llama(seed=2), folder / "straight", **tiny.DDP)
    dying = trainer(tiny.llama(seed=2), folder / "out", **tiny.DDP)
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
    resumed = trainer(tiny.llama(), folder / "out", **tiny.DDP)
    resumed.train(resume_from_checkpoint=True)
    manifest = json.loads((folder / "out/checkpoint-6" / MANIFEST).read_bytes())
    found: dict[str, Any] = {
        "killed": killed,
        "difference": tiny.largest_difference(straight, resumed.model),
        "states": sorted(name for name in manifest["files"] if name.startswith("rng_state")),
        "world_size": manifest["world_size"],
        "damaged": {},
    }
    for how in (EMPTY, LOST):  # the state of the other process; only the first one looks
        resumed.accelerator.wait_for_everyone()
        if resumed.args.should_save:
            damage(folder / "out/checkpoint-6/rng_state_1.pth", how)
        resumed.accelerator.wait_for_everyone()
        found["damaged"][how] = Path(chosen(True, folder / "out", **tiny.DDP)).name
    (folder / f"rank{resumed.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
