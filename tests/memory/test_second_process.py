"""Two processes give the results of one, and everything is computed here where there cannot be two, or one dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import tqdm

import tiny
from hf_memopt import custom_gpu, plan
from hf_memopt.cli.technique_ladder import ladder
from hf_memopt.devices.gpus import find_gpu
from hf_memopt.memory import second_process
from hf_memopt.memory.recording.trace_cache import forget_traces, kept_traces
from hf_memopt.memory.second_process import calls_ahead

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
]
HERE = os.getpid()


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork on a machine with one core too, and beside the threads of pytest-xdist; no process is left."""
    monkeypatch.setattr(second_process, "_can_fork", lambda: True)
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


class TMonitor(threading.Thread):
    """As tqdm's, by its name."""


def process_of(number: int) -> tuple[int, int]:
    """Return a number with the process that computed it."""
    if number < 0:
        raise ValueError(f"number={number}")
    return number, os.getpid()


def test_expected_calls_are_made_in_the_second_process_the_last_one_first() -> None:
    with calls_ahead(process_of, range(4)) as call:
        ahead: Any = call
        order = []
        while len(ahead._found) < 4:
            ahead._receive()
            order += [key for key in ahead._found if key not in order]
        assert order == [3, 2, 1, 0]
        found = [call(number) for number in range(5)]
    assert [number for number, _ in found] == [0, 1, 2, 3, 4]
    assert found[4] == (4, HERE)
    assert HERE not in [process for _, process in found[:4]]
    assert call(0) == (0, HERE)  # after the end


def test_the_error_of_a_call_is_raised_here() -> None:
    with calls_ahead(process_of, [-1]) as call, pytest.raises(ValueError, match="number=-1"):
        call(-1)


@pytest.mark.parametrize("when", ["idle", "in a call", "result not picklable"])
def test_where_the_second_process_dies_all_calls_are_made_here(when: str) -> None:
    def dying(number: int) -> Any:
        if os.getpid() == HERE:
            return number
        if when == "in a call":
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: number

    with calls_ahead(dying, [] if when == "idle" else [1, 0]) as call:
        ahead: Any = call
        if when == "idle":
            os.kill(ahead._process.pid, signal.SIGKILL)
        else:
            ahead._receive()
        assert [call(number) for number in range(3)] == [0, 1, 2]
        call.expect([3])
        assert call(3) == 3


def test_an_interrupt_ends_both() -> None:
    ended: list[int] = []

    def interrupted(call: Any) -> None:
        ended.append(call._process.pid)
        os.kill(ended[0], signal.SIGINT)  # as of the terminal, which the second process leaves to the first
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), calls_ahead(process_of) as call:
        interrupted(call)
    with pytest.raises(ProcessLookupError):
        os.kill(ended[0], 0)


def test_it_forks_only_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert tqdm.TMonitor.__name__ == TMonitor.__name__
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), TMonitor()])
    safe = second_process._can_fork
    assert safe()
    for owner, name, value in (
        (os, "sched_getaffinity", lambda process: {0}),
        (threading, "enumerate", lambda: [threading.main_thread(), threading.Thread()]),
        (torch.cuda, "is_initialized", lambda: True),
        (second_process.sys, "platform", "darwin"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            assert not safe(), name
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(safe()))
    thread.start()
    thread.join()
    assert elsewhere == [False]


@pytest.mark.slow
def test_a_comparison_is_the_same_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared() -> list[Any]:
        forget_traces()
        return [row.as_dict() for row in ladder(tiny.bert_config(), batch_size=4, seq_len=8, gpu=find_gpu("RTX 4060"))]

    two = compared()
    assert len(kept_traces()) > 1
    monkeypatch.setattr(second_process, "_can_fork", lambda: False)
    assert compared() == two


@pytest.mark.parametrize("memory", ["60MiB", pytest.param("20MiB", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_plan_is_the_same_in_one_process(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4000, "num_hidden_layers": 1}
    config = tiny.llama_config(**sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64)
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes
    assert context_bytes is not None
    gpu = custom_gpu(context_bytes + int(memory.removesuffix("MiB")) * 2**20, "8.6", name="a GPU")

    def planned() -> tuple[str, list[str]]:
        forget_traces()
        said: list[str] = []
        found = plan(config, gpu=gpu, seq_len=32, effective_batch_size=2, method="full", announce=said.append)
        return found.to_json(), said

    two = planned()
    monkeypatch.setattr(second_process, "_can_fork", lambda: False)
    assert planned() == two
