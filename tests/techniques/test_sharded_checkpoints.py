"""Checkpoints: resume equals the straight run, stock and ours read each other's files, and what either takes."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from slow_cases import slow_except
from test_quantized_experts import mixture
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.binding import attach
from hf_memopt.training.techniques.checkpoints import sharded as checkpoint_files
from hf_memopt.training.techniques.checkpoints.sharded import (
    ShardedCheckpointCallback,
    load_optimizer_state,
    mapped_loading,
    save_in_shards,
)

# PEFT asks transformers 5.23 by the older name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ROWS = [{"input_ids": [5, 6, 7, 8 + i], "labels": [5, 6, 7, 8 + i]} for i in range(16)]
SHARD_BYTES = 60_000
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 0.01,
    "optim": "adamw_torch",
}


def llama() -> nn.Module:
    return tiny.llama(vocab_size=512)  # embeddings of more than the 4,096 elements from which on states have 8 bits


def lora() -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama(), config)


def llava() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(vision_config=vision, text_config=tiny.llama_config(), image_token_index=1)
    return transformers.LlavaForConditionalGeneration(config)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (llama, {}),
    "AdamW 8-bit": (llama, {"optim": "adamw_bnb_8bit"}),
    "Adafactor": (llama, {"optim": "adafactor"}),
    "SGD with momentum": (llama, {"optim": "sgd", "optim_args": "momentum=0.9"}),
    "accumulation": (llama, {"optim": "adamw_bnb_8bit", "gradient_accumulation_steps": 2}),
    "LoRA": (lora, {}),
    "tied weights": (lambda: tiny.llama(vocab_size=512, tie_word_embeddings=True), {}),
}


def trainer(model: nn.Module, folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a Trainer of ``RUN``, attached where it has callbacks."""
    built = Trainer(model=model, args=tiny.arguments(folder, **{**RUN, **settings}), train_dataset=ROWS)
    return attach(built, *callbacks) if callbacks else built


def ours() -> ShardedCheckpointCallback:
    return ShardedCheckpointCallback(max_shard_bytes=SHARD_BYTES)


def peak(tracker: StorageTracker) -> int:
    """Return the most bytes that were live at once."""
    return max(accumulate(change for _, change in tracker.events), default=0)


@pytest.mark.parametrize("case", slow_except(("AdamW 8-bit",), CASES))
def test_resume_equals_straight_run(tmp_path, case) -> None:
    build, settings = CASES[case]
    straight, resumed, by_stock, from_stock = (build() for _ in range(4))
    trainer(straight, tmp_path / "ours", ours(), **settings).train()
    written = sorted(path.name for path in (tmp_path / "ours/checkpoint-2").glob("*.safetensors*"))
    assert len(written) > 2 or build is lora, written
    trainer(resumed, tmp_path / "ours", ours(), **settings).train(str(tmp_path / "ours/checkpoint-2"))
    trainer(by_stock, tmp_path / "ours", **settings).train(str(tmp_path / "ours/checkpoint-2"))
    stock = build()
    trainer(stock, tmp_path / "stock", **settings).train()
    trainer(from_stock, tmp_path / "stock", ours(), **settings).train(str(tmp_path / "stock/checkpoint-2"))
    for other in (resumed, by_stock, from_stock, stock):
        assert tiny.largest_difference(straight, other) == 0.0


@pytest.mark.parametrize("build", [mixture, llava])
@pytest.mark.slow
def test_converted_weights_are_resumed(tmp_path, build) -> None:
    """Stock writes these under the names of the hub and reads them back under none: it resumes with fresh ones."""
    differences = {}
    for name, callbacks in {"ours": [ours()], "stock": []}.items():
        straight, resumed = build(), build()
        trainer(straight, tmp_path / name, *callbacks).train()
        loaded = type(straight).from_pretrained(tmp_path / name / "checkpoint-4")
        assert tiny.largest_difference(straight, loaded) == 0.0
        again = [ours() for _ in callbacks]
        trainer(resumed, tmp_path / name, *again).train(str(tmp_path / name / "checkpoint-2"))
        differences[name] = tiny.largest_difference(straight, resumed)
    assert differences["ours"] == 0.0
    assert differences["stock"] > 0.01  # transformers 5.8.1, 5.17.0, 5.23.0: issue 48805


def test_best_model_and_limit(tmp_path) -> None:
    """A best model in several files is loaded at the end, and old checkpoints are deleted as ever."""
    settings = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 1,
        "max_steps": 6,
    }
    model = llama()
    args = tiny.arguments(tmp_path, **{**RUN, **settings})
    built = attach(Trainer(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS), ours())
    built.train()
    best = Path(built.state.best_model_checkpoint)
    assert {path.name for path in tmp_path.iterdir()} == {best.name, "checkpoint-6"}
    assert (best / "model.safetensors.index.json").is_file()
    loaded = transformers.LlamaForCausalLM.from_pretrained(best)
    assert tiny.largest_difference(model, loaded) == 0.0


def test_second_run_of_one_trainer_resumes(tmp_path) -> None:
    """As in a notebook: the state of the first run makes room before that of the checkpoint is loaded."""
    straight = llama()
    built = trainer(straight, tmp_path, ours())
    built.train()
    after = [parameter.detach().clone() for parameter in straight.parameters()]
    built.train(str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(one, other) for one, other in zip(after, straight.parameters(), strict=True))


def test_files_are_bounded_and_a_small_model_is_one_file(tmp_path) -> None:
    trainer(llama(), tmp_path / "small", ShardedCheckpointCallback()).train()
    assert [path.name for path in (tmp_path / "small/checkpoint-2").glob("*.safetensors*")] == ["model.safetensors"]
    built = trainer(llama(), tmp_path / "large", ShardedCheckpointCallback("70KB"))
    built.train()
    sizes = [path.stat().st_size for path in (tmp_path / "large/checkpoint-2").glob("*.safetensors")]
    headers = 4096
    assert max(sizes) <= 70_000 + headers
    built.save_model(str(tmp_path / "final"))
    assert len(list((tmp_path / "final").glob("*.safetensors"))) == len(sizes)


def test_final_model_keeps_the_names_of_the_hub(tmp_path) -> None:
    model = mixture()
    built = trainer(model, tmp_path, ShardedCheckpointCallback())
    model.save_pretrained(tmp_path / "stock")
    stock = (tmp_path / "stock/model.safetensors").read_bytes()
    for name in ("final", "checkpoint-best"):
        built.save_model(str(tmp_path / name))
        assert (tmp_path / name / "model.safetensors").read_bytes() == stock
    assert "save_pretrained" not in vars(model)


def test_weights_of_an_earlier_run_do_not_shadow_new_ones(tmp_path) -> None:
    """Stock reads model.safetensors before an index, so an old one would be resumed from."""
    trainer(tiny.llama(seed=7, vocab_size=512), tmp_path, max_steps=2).train()
    assert (tmp_path / "checkpoint-2/model.safetensors").is_file()
    straight, resumed = llama(), llama()
    trainer(straight, tmp_path, ours()).train()
    trainer(resumed, tmp_path, ours()).train(str(tmp_path / "checkpoint-2"))
    assert tiny.largest_difference(straight, resumed) == 0.0


@pytest.mark.parametrize("before", ["nothing", "one file", "several files"])
def test_interrupted_saving_leaves_the_old_weights_or_no_checkpoint(tmp_path, monkeypatch, before) -> None:
    """Old files of the same names are written over one by one: their index goes first, so that no mixture is read."""
    folder = tmp_path / "checkpoint-2"
    old, new = tiny.llama(seed=7, vocab_size=512), llama()
    if before != "nothing":
        old.save_pretrained(folder, max_shard_size=SHARD_BYTES if before == "several files" else "1GB")
    write, written = transformers.modeling_utils.safe_save_file, []

    def full_disk(tensors: Any, filename: Any, **options: Any) -> None:
        if len(written) == 2:
            raise OSError("No space left on device")
        written.append(filename)
        write(tensors, filename, **options)

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full_disk)
    with save_in_shards(new, max_shard_bytes=SHARD_BYTES), pytest.raises(OSError, match="No space left on device"):
        new.save_pretrained(folder)
    monkeypatch.undo()
    if before == "one file":
        read = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert tiny.largest_difference(read, old) == 0.0
    else:
        with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
            trainer(llama(), tmp_path).train(str(folder))


class OnCard(nn.Parameter):
    """A parameter that says it is on a card, so that what is copied to the host can be seen without one."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")

    def detach(self) -> torch.Tensor:
        return self

    def to(self, device: Any) -> torch.Tensor:
        assert device == "cpu"
        return self.as_subclass(torch.Tensor).clone()


def host_copies(model: nn.Module, folder: Path) -> int:
    """Return the most bytes that saving a model on a card holds in the host's memory at once."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, OnCard(parameter.detach()))
    tracker = StorageTracker(device_type=None, flops=False)
    known = {tracker.add(tensor.as_subclass(torch.Tensor)) for tensor in model.parameters()}
    gc.collect()
    with tracker:
        model.save_pretrained(folder)
    tracker.events = [event for event in tracker.events if event[0] not in known]
    return peak(tracker)


def test_weights_on_the_host_are_bounded_by_a_file(tmp_path) -> None:
    """All tensors of a file are copied before the first is written: with stock's files, the whole model."""
    weights_bytes = sum(parameter.nbytes for parameter in llama().parameters())
    assert host_copies(llama(), tmp_path / "stock") == weights_bytes
    model = llama()
    with save_in_shards(model, max_shard_bytes=SHARD_BYTES + 10_000):
        assert 0 < host_copies(model, tmp_path / "ours") <= SHARD_BYTES + 10_000 < weights_bytes // 2


def test_experts_are_not_copied_on_the_card(tmp_path) -> None:
    """Stock takes fused weights apart before it writes them (5.17, 5.23): up and gate projection, two thirds."""
    peaks = {}
    for name in ("stock", "checkpoint"):
        model = mixture()
        tracker = StorageTracker(device_type=None, flops=False)
        known = {tracker.add(parameter) for parameter in model.parameters()}
        experts = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name)
        with tracker, save_in_shards(model, max_shard_bytes=SHARD_BYTES):
            model.save_pretrained(tmp_path / name, save_original_format=name == "stock")
        tracker.events = [event for event in tracker.events if event[0] not in known]
        peaks[name] = peak(tracker)
    copied = 0 if transformers.__version__.startswith("5.8.") else experts * 2 // 3
    assert peaks == {"stock": copied, "checkpoint": 0}


def stepped(optimizer_class: Any, **options: Any) -> tuple[list[nn.Parameter], Any]:
    """Return eight parameters of 64 KiB and an optimizer that has stepped once."""
    parameters = [nn.Parameter(torch.randn(128, 128)) for _ in range(8)]
    optimizer = optimizer_class(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def convert(value: Any, function: Any) -> Any:
    """Return nested dictionaries with ``function`` of every tensor."""
    if isinstance(value, dict):
        return {key: convert(item, function) for key, item in value.items()}
    return function(value) if torch.is_tensor(value) else value


def loading_peaks(optimizer_class: Any, load: Any, *, read_to: str) -> dict[str, int]:
    """Return the most bytes of state on the host and on the card while it is loaded to a card (the meta device).

    ``read_to`` is the device to which the file was read: the host's with one process, the card with several.
    """
    state_dict = stepped(optimizer_class)[1].state_dict()
    state_dict["state"] = convert(state_dict["state"], lambda value: value.to(read_to))
    parameters = [nn.Parameter(torch.empty(128, 128, device="meta")) for _ in range(8)]
    optimizer = optimizer_class(parameters, lr=0.1)
    gc.collect()
    trackers = {"host": StorageTracker(device_type="cpu", flops=False), "card": StorageTracker(flops=False)}
    for tracker in trackers.values():
        convert(state_dict["state"], tracker.add)
    with trackers["host"], trackers["card"]:
        load(optimizer, state_dict)
    return {name: peak(tracker) for name, tracker in trackers.items()}


def stock_load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    optimizer.load_state_dict(state_dict)


def lean_load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    load_optimizer_state(optimizer, state_dict, part_bytes=1)


PER_PARAMETER = 2 * 128 * 128 * 4
STATE = 8 * PER_PARAMETER
SMALL = 8 * 16  # step counters


@pytest.mark.parametrize("read_to", ["cpu", "meta"])
def test_state_of_torch_is_never_twice_on_the_card(read_to) -> None:
    for load in (stock_load, lean_load):
        peaks = loading_peaks(torch.optim.AdamW, load, read_to=read_to)
        assert STATE <= peaks["card"] <= STATE + SMALL
        assert peaks["host"] <= (STATE if read_to == "cpu" else 0) + SMALL


@pytest.mark.parametrize(("read_to", "place"), [("cpu", "host"), ("meta", "card")], ids=["one", "several"])
def test_state_of_bitsandbytes_is_copied_part_by_part(read_to, place) -> None:
    """Stock: twice on the host with one process, twice on the card with several."""
    stock = loading_peaks(bitsandbytes.optim.AdamW32bit, stock_load, read_to=read_to)
    ours = loading_peaks(bitsandbytes.optim.AdamW32bit, lean_load, read_to=read_to)
    assert 2 * STATE <= stock[place] <= 2 * STATE + SMALL
    for found in (stock, ours):
        assert found["card"] >= STATE
    assert ours["host"] <= (STATE + PER_PARAMETER if read_to == "cpu" else 0) + SMALL
    assert ours["card"] <= STATE + PER_PARAMETER + SMALL


def test_groups_that_do_not_fit_are_refused_before_state_is_taken() -> None:
    parameters, optimizer = stepped(bitsandbytes.optim.AdamW32bit)
    state_dict = optimizer.state_dict()
    other = bitsandbytes.optim.AdamW32bit(parameters[:3])
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        load_optimizer_state(other, state_dict)
    assert len(state_dict["state"]) == 8


def mapping_at(address: int) -> str:
    """Return the line of this process's memory map that an address lies in; it ends with the file, if there is one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return line
    return ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what memory is mapped from")
def test_mapped_state_takes_no_memory_of_its_own(tmp_path) -> None:
    path = tmp_path / "optimizer.pt"
    torch.save([torch.ones(2**20) for _ in range(2)], path)
    for way, is_mapped in ((mapped_loading, True), (nullcontext, False)):
        with way():
            state = torch.load(path, map_location="cpu", weights_only=True)
        assert sum(float(value.sum()) for value in state) == 2**21
        assert [mapping_at(value.data_ptr()).endswith(str(path)) for value in state] == [is_mapped] * 2


def test_files_are_mapped_only_while_state_is_loaded(tmp_path, monkeypatch) -> None:
    """As on a card: mapped when stock reads the state, not for the scheduler's file, and nothing stays on the file."""
    from torch.utils.serialization import config

    straight, resumed = llama(), llama()
    trainer(straight, tmp_path, ours()).train()
    monkeypatch.setattr(checkpoint_files, "_maps_state", lambda trainer: True)
    read, seen = torch.load, {}

    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        seen[Path(path).name] = config.load.mmap
        return read(path, *args, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    built = trainer(resumed, tmp_path, ours())
    built.train(str(tmp_path / "checkpoint-2"))
    assert seen["optimizer.pt"] is True
    assert {name for name, mapped in seen.items() if mapped} == {"optimizer.pt"}
    assert config.load.mmap is False
    assert tiny.largest_difference(straight, resumed) == 0.0
    maps = Path("/proc/self/maps")
    assert not maps.is_file() or "checkpoint-2/optimizer.pt" not in maps.read_text()
