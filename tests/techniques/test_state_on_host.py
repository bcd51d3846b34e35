"""Optimizer state in host memory: every step and every resume to the bit, two chunks at a time, each wait needed."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from late_lanes import LateLanes
from test_embedding_bits import Words
from torch import nn
from torch.optim import optimizer as torch_optimizer
from transformers import Trainer

import hf_memopt
import tiny
from hf_memopt.state_chunks import CHUNK_BYTES as CHUNK_BYTES_OF_ESTIMATES
from hf_memopt.state_chunks import SMALLEST_BYTES, cut_into_chunks
from hf_memopt.techniques import override_embedding_bits
from hf_memopt.training.techniques import Lanes
from hf_memopt.training.techniques.optimizers import state_on_host
from hf_memopt.training.techniques.optimizers.state_on_host import optimizer_state_on_host
from technique_table import run as trained
from technique_table import same

CHUNK_BYTES = 150_000  # two or three of the parameters below
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, for-loop": (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (transformers.Adafactor, {"relative_step": False, "beta1": 0.9}),
    "AdamW8bit": (bitsandbytes.optim.AdamW8bit, {}),
    "AdEMAMix8bit": (bitsandbytes.optim.AdEMAMix8bit, {}),
    "Lion8bit": (bitsandbytes.optim.Lion8bit, {}),
    "16-bit weights": (hf_memopt.low_memory_optimizer(torch.optim.AdamW, rounding="stochastic"), {}),
}


class Model(nn.Module):
    """Words, with norms, biases, a convolution in another order of memory, and a weight that gets gradients late."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words, self.norm = Words(), nn.LayerNorm(64)
        self.picture = nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last)
        self.late = nn.Linear(64, 64)
        self.to(dtype)

    def forward(self, ids: torch.Tensor, step: int) -> torch.Tensor:
        found = self.norm(self.words.embedding(ids)).transpose(1, 2).reshape(-1, 8, 8, ids.shape[1])
        found = self.picture(found).mean(dim=(2, 3))
        return self.late(found) if step > 1 else found


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decaying = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decaying}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


def steps(model: Any, optimizer: Any, first: int = 0, last: int = 4) -> None:
    """Two micro-batches, a norm that clips, and a schedule that was there before."""
    for step in range(first, last):
        for part in range(2):
            ids = torch.randint(0, 199, (4, 12), generator=torch.Generator().manual_seed(10 * step + part))
            (model(ids, step).float().square().mean() * 100).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def run(name: str, *, lanes: Lanes | None = None, is_plain: bool = False, chunk_bytes: int = CHUNK_BYTES) -> list[Any]:
    """Train 4 steps and, from the state of the second, the last two again; return weights and states of both."""
    kind, options = OPTIMIZERS[name]
    found: list[Any] = []
    torch.manual_seed(0)
    model = Model(torch.bfloat16 if "16-bit" in name else torch.float32)
    saved: Any = None
    for first, last in ((0, 2), (2, 4), (2, 4)):
        if saved is not None and found:
            model.load_state_dict(saved[0])
        optimizer = kind(groups(model), lr=0.01, **options)
        if name.startswith("AdamW8"):
            override_embedding_bits(model, optimizer)
        handle = None if is_plain else optimizer_state_on_host(optimizer, chunk_bytes=chunk_bytes, lanes=lanes)
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
        if saved is not None:
            optimizer.load_state_dict(torch.load(io.BytesIO(saved[1]), weights_only=False))
        steps(model, optimizer, first, last)
        state = copy.deepcopy(optimizer.state_dict()["state"])
        found += [[p.detach().clone() for p in model.parameters()], state]
        if saved is None:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            saved = copy.deepcopy(model.state_dict()), file.getvalue()
        if handle is not None:
            handle.remove()
            assert same(optimizer.state_dict()["state"], state)
    return found


@pytest.mark.parametrize("chunk_bytes", [1, CHUNK_BYTES, 2**30])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_are_those_of_the_optimizer_without_it(name: str, chunk_bytes: int) -> None:
    expected = run(name, is_plain=True)
    assert same(run(name, chunk_bytes=chunk_bytes), expected)
    assert same(expected[2], expected[4])


# ---- The copies


@pytest.mark.parametrize("name", ["AdamW, foreach", "AdamW8bit"])
def test_late_copies_change_nothing(name: str) -> None:
    expected, late = run(name, is_plain=True), 0
    for seed in range(5):
        lanes = LateLanes(seed)
        assert same(run(name, lanes=lanes), expected), seed
        late += lanes.late
    assert late > 5


def failing(lanes: Lanes) -> None:
    """A step that fails in its second chunk, and one after it."""
    optimizer, weights = weights_of(lanes=lanes)
    give_gradients(weights)
    optimizer.step()
    plain, calls = state_on_host._WaitingState._step, iter([False, True, False, False, False, False])

    def step(self: Any, *args: Any) -> None:
        plain(self, *args)
        if next(calls):
            raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_on_host._WaitingState, "_step", step)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert [weight.grad is not None for weight in weights] == [True] * 4
    assert optimizer.state.keys() == {*weights}
    optimizer.step()


WAITS = ("_WaitingState._receive", "_WaitingState._land", "_WaitingState.settle")


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_left_out_is_caught(wait: str) -> None:
    expected = run("AdamW, foreach", is_plain=True)
    for seed in range(9):
        try:
            lanes = LateLanes(seed, without=wait)
            failing(lanes)
            for lane in lanes.queues:
                while lanes.queues[lane]:
                    lanes._first(lane)
            if not same(run("AdamW, foreach", lanes=LateLanes(seed, without=wait)), expected):
                return
        except AssertionError:
            return
    pytest.fail("no race was found")


def test_every_wait_is_one_of_those_left_out() -> None:
    lanes = LateLanes(0)
    run("AdamW, foreach", lanes=lanes)
    failing(lanes)
    assert lanes.asked == {*WAITS}


class Counting(Lanes):
    """Counts the bytes on the device of what was fetched, and of what is on its way out."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.alive: list[Any] = []
        self.most_bytes = 0

    def fetch(self, host: torch.Tensor, *, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        fetched, event = super().fetch(host, into=into)
        self._see(fetched)
        return fetched, event

    def store(self, host: torch.Tensor, source: torch.Tensor) -> Any:
        self._see(source)
        return super().store(host, source)

    def _see(self, tensor: torch.Tensor) -> None:
        self.alive = [one for one in self.alive if one() is not None and one() is not tensor]
        self.alive.append(weakref.ref(tensor))
        self.most_bytes = max(self.most_bytes, sum(one().nbytes for one in self.alive))


def weights_of(
    count: int = 4, kind: Any = torch.optim.AdamW, lanes: Any = None, **options: Any
) -> tuple[Any, list[nn.Parameter]]:
    """Return an optimizer of weights whose states of 2 x 4096 bytes are a chunk each."""
    weights = [nn.Parameter(torch.ones(1024)) for _ in range(count)]
    optimizer = kind(weights, **options)
    optimizer_state_on_host(optimizer, chunk_bytes=2 * 4096, lanes=lanes)
    return optimizer, weights


def give_gradients(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)


def test_no_more_than_two_chunks_are_on_the_device() -> None:
    lanes = Counting()
    optimizer, weights = weights_of(8, lanes=lanes)
    give_gradients(weights)
    optimizer.step()
    assert lanes.most_bytes == 2 * 4096  # in the first step each parameter makes its own
    optimizer.step()
    assert lanes.most_bytes == 2 * 2 * 4096
    del optimizer
    gc.collect()
    assert not [one for one in lanes.alive if one() is not None]


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [([], []), ([5], [(0, 1)]), ([4, 6, 1], [(0, 2), (2, 3)]), ([0, 99, 0, 1], [(0, 1), (1, 2), (2, 4)])],
)
def test_chunks_are_as_full_as_they_may_be(sizes: list[int], cut: list[tuple[int, int]]) -> None:
    assert [(chunk.start, chunk.stop) for chunk in cut_into_chunks(sizes, 10)] == cut


def test_small_tensors_stay_where_they_are() -> None:
    weights = [nn.Parameter(torch.ones(elements)) for elements in (SMALLEST_BYTES // 4, SMALLEST_BYTES // 4 - 1)]
    lanes = Counting()
    optimizer = torch.optim.SGD(weights, momentum=0.9)
    optimizer_state_on_host(optimizer, lanes=lanes)
    give_gradients(weights)
    for _ in range(2):
        optimizer.step()
    assert lanes.most_bytes == SMALLEST_BYTES


# ---- Beside torch and accelerate


def test_hooks_run_once_around_a_step_and_see_all_gradients(request: pytest.FixtureRequest) -> None:
    optimizer, weights = weights_of()
    seen: list[tuple[str, int]] = []

    def note(when: str) -> Callable[..., None]:
        return lambda *_: seen.append((when, sum(weight.grad is not None for weight in weights)))

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    for hook in (
        torch_optimizer.register_optimizer_step_pre_hook(note("before any")),
        torch_optimizer.register_optimizer_step_post_hook(note("after any")),
    ):
        request.addfinalizer(hook.remove)
    give_gradients(weights)
    optimizer.step()
    assert seen == [("before any", 4), ("before", 4), ("after", 4), ("after any", 4)]
    assert optimizer.state[weights[0]]["step"] == 1


@pytest.mark.filterwarnings("ignore:Seems like .optimizer:UserWarning")  # stock's
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_drops_a_step_that_overflows(fused: bool) -> None:
    Accelerator(cpu=True)
    found = []
    for on_host in (False, True):
        weights = [nn.Parameter(torch.ones(2000)) for _ in range(3)]
        plain = torch.optim.AdamW(weights, fused=fused)
        if on_host:
            optimizer_state_on_host(plain, chunk_bytes=1)
        optimizer = AcceleratedOptimizer(plain, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
        scheduler = torch.optim.lr_scheduler.ConstantLR(plain)
        for worst in (1.0, float("inf"), 2.0):
            (optimizer.scaler.scale(sum((weight * worst).sum() for weight in weights))).backward()
            optimizer.step()
            assert optimizer.step_was_skipped == (worst == float("inf")) or fused
            scheduler.step()
            optimizer.zero_grad()
        found.append([*(weight.detach() for weight in weights), plain.state_dict()["state"]])
    assert same(*found)


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_of_one_run_is_resumed_by_the_other(before: bool, tmp_path: Path) -> None:
    name = "optimizer state on the host"
    saving = {"save_strategy": "steps", "save_steps": 2}
    straight = trained([name], tmp_path / "straight", **saving)
    trained([name], tmp_path, use=before, **saving)
    resumed = trained([name], tmp_path, use=not before, resume=str(tmp_path / "checkpoint-2"), **saving)
    assert tiny.largest_difference(resumed.trainer.model, straight.trainer.model) == 0.0
    assert same(
        resumed.trainer.optimizer.state_dict()["state"], straight.trainer.optimizer.state_dict()["state"]
    )  # of tied or frozen weights as well: by the order of the groups


def test_the_changes_say_so_and_a_late_callback_is_in_time(tmp_path: Path) -> None:
    assert hf_memopt.OptimizerStateOnHostCallback().chunk_bytes == CHUNK_BYTES_OF_ESTIMATES
    trainer = Trainer(tiny.bert(), tiny.arguments(tmp_path, max_steps=1), train_dataset=tiny.rows(4))
    callback = hf_memopt.OptimizerStateOnHostCallback()
    hf_memopt.attach(trainer, callback)
    trainer.train()
    assert [str(change) for change in callback.changes] == [
        "optimizer state: 'on the device' -> 'in host memory' (copied to the device in chunks of 128.0 MiB)"
    ]
    assert callback.changes[0] in trainer.memopt_changes


# ---- On the stand-in of a GPU


def llama() -> transformers.LlamaForCausalLM:
    sizes = {"vocab_size": 8000, "hidden_size": 768, "intermediate_size": 2048, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=6, num_attention_heads=12))


def trained_peaks(optim: str, folder: str) -> list[tuple[int, int]]:
    """Return the most that was allocated and reserved by a run and by one that resumes; the state waits after each."""
    model, found = llama(), []
    ids = [torch.randint(5, 8000, (64,)) for _ in range(8)]
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "use_cpu": False}
    arguments = tiny.arguments(Path(folder), optim=optim, per_device_train_batch_size=1, **saving)
    for resumes in (None, f"{folder}/checkpoint-2"):
        callbacks = [hf_memopt.OptimizerStateOnHostCallback()]
        callbacks += [hf_memopt.EmbeddingBitsCallback()] * (optim == "adamw_8bit")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        rows = [{"input_ids": row, "labels": row} for row in ids]
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resumes)
        found.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        states = [one for state in trainer.optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        large = [one for one in states if one.nbytes >= SMALLEST_BYTES]
        assert large
        assert {one.device.type for one in large} == {"cpu"}
    return found


@pytest.mark.stand_in
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "adamw_8bit"])
def test_the_peak_of_the_allocator_is_the_estimate(optim: str, tmp_path: Path) -> None:
    """Of four or five chunks, in a process of its own, since blocks that a run leaves move those of the next.

    A run that resumes needs no more: loading puts one chunk on the GPU at most, and leaves other blocks in the cache.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, optim, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    settings = {"optim": optim, "precision": "fp32", "optimizer_state_on_host": True}
    expected = hf_memopt.estimate(llama(), gpu="T4", batch_size=1, seq_len=64, **settings)
    fresh, resumed = json.loads(done.stdout.splitlines()[-1])
    assert fresh[0] == pytest.approx(expected.peak_allocated_bytes, rel=0.005)
    assert fresh[1] == pytest.approx(expected.peak_reserved_bytes, rel=0.005)
    assert resumed[0] == pytest.approx(expected.peak_allocated_bytes, rel=0.005)
    assert resumed[1] <= 1.01 * expected.peak_reserved_bytes


# ---- What is refused


class Counts(torch.optim.SGD):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def twice() -> None:
    optimizer = torch.optim.SGD(weight())
    optimizer_state_on_host(optimizer)
    optimizer_state_on_host(optimizer)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: hf_memopt.OptimizerStateOnHostCallback("much"),
        ValueError,
        "chunk='much' is not an amount of memory; expected a number with one of the units B, KB, MB, GB, TB, KiB, MiB, "
        "GiB, TiB. Write, for example, '4GB' or '3.5GiB'.",
    ),
    (
        lambda: optimizer_state_on_host(torch.optim.SGD(weight()), chunk_bytes=-1),
        ValueError,
        "chunk_bytes=-1 is negative; expected 0 bytes or more. Write, for example, '4GB'.",
    ),
    (
        lambda: optimizer_state_on_host(torch.nn.Linear(2, 2)),  # type: ignore[arg-type]
        TypeError,
        "optimizer=<Linear> is not an optimizer of torch; expected one. Pass trainer.optimizer",
    ),
    (
        twice,
        ValueError,
        "optimizer=<SGD> has its state on the host already; expected a plain one. Call remove() of its handle",
    ),
    (
        lambda: optimizer_state_on_host(
            hf_memopt.low_memory_optimizer(torch.optim.SGD, release=True)(weight(), lr=0.1)
        ),
        ValueError,
        "optimizer state on the host and gradient release are incompatible: its optimizer steps within the backward "
        "pass, where nothing is fetched; expected only one of them. Take OptimizerStateOnHostCallback out of "
        "callbacks=",
    ),
    (
        lambda: optimizer_state_on_host(bitsandbytes.optim.PagedAdamW(weight())),
        ValueError,
        "optimizer state on the host and paged optimizer are incompatible: bitsandbytes moves its state by itself; "
        "expected only one of them. Set optim='adamw_torch_fused' or optim='adamw_8bit'",
    ),
    (
        lambda: weights_of()[0].step(len),
        ValueError,
        "closure=<built-in function len> would run once for each chunk of the optimizer's state; expected step() "
        "without one. Compute the loss before, or take OptimizerStateOnHostCallback out of callbacks=",
    ),
    (
        lambda: weights_of(kind=Counts),
        ValueError,
        "optimizer=<Counts> is not known to step each parameter by itself, and its step would run once for each chunk "
        "of its state; expected the step of a class of torch or bitsandbytes. Choose AdamW, or take "
        "OptimizerStateOnHostCallback out of callbacks=",
    ),
]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize(("call", "kind", "says"), REFUSED)
def test_what_cannot_work_is_refused_by_name(call: Callable[[], Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == says


def test_parameters_of_two_gpus_are_refused() -> None:
    weights = [nn.Parameter(torch.ones(2, device="meta")), *weight()]
    optimizer = torch.optim.SGD(weights)
    waiting = state_on_host._WaitingState(optimizer, 1, None)
    assert waiting.lanes.device.type == "meta"
    del optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [SimpleNamespace(device=torch.device("cuda", place)) for place in (0, 1)]
    with pytest.raises(ValueError) as error:
        _ = state_on_host._WaitingState(optimizer, 1, None).lanes
    assert str(error.value) == (
        "optimizer=<SGD> steps parameters on cuda:0, cuda:1; expected one device. Load the model on one, or take "
        "OptimizerStateOnHostCallback out of callbacks="
    )


if __name__ == "__main__":
    print(json.dumps(trained_peaks(*sys.argv[1:])))
