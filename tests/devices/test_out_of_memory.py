"""Out of memory: which errors are, that nothing keeps the failed step alive, and that its random numbers come again."""

from __future__ import annotations

import csv
import gc
import random
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hf_memopt.training.binding.undo import RandomState
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory

CPU = torch.device("cpu")

TEXTS = list(csv.DictReader((Path(__file__).parent / "errors.csv").read_text(encoding="utf-8").splitlines()))
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    *(RuntimeError(row["text"]) for row in TEXTS if row["is_out_of_memory"] == "yes"),
]

OTHERS = [
    *(RuntimeError(row["text"].replace("\\n", "\n")) for row in TEXTS if row["is_out_of_memory"] == "no"),
    ValueError("CUDA out of memory"),
    MemoryError(),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, *OTHERS], ids=lambda error: str(error)[:50] or type(error).__name__)
def test_errors_are_recognised_by_their_texts(error: BaseException) -> None:
    assert is_out_of_memory(error) is (error in OUT_OF_MEMORY)


def test_the_real_error_of_the_host_is_recognised() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(10**15)
    assert is_out_of_memory(error.value)


@pytest.mark.gpu
def test_the_real_errors_of_a_gpu_are_recognised() -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(10**14, device="cuda")
    assert is_out_of_memory(error.value)


def test_an_error_raised_from_it_counts_and_one_raised_beside_it_does_not() -> None:
    with pytest.raises(ValueError) as wrapped:
        raise ValueError("step 3 failed") from torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(wrapped.value)
    with pytest.raises(KeyError) as beside:
        mistake_while_cleaning_up()
    assert not is_out_of_memory(beside.value)


def mistake_while_cleaning_up() -> None:
    try:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    except torch.OutOfMemoryError:
        {}["a name"]


# ---- nothing keeps the failed step alive


def failing_step(died: list[weakref.ref[torch.Tensor]], error: BaseException) -> None:
    activations = torch.zeros(4)
    died.append(weakref.ref(activations))
    forward(activations, error)


def forward(activations: torch.Tensor, error: BaseException) -> None:
    if (activations * 2).sum() == 0:
        raise error


def caught(error: BaseException) -> tuple[BaseException, weakref.ref[torch.Tensor]]:
    """Return the error of a step that failed, and a reference to its tensor, which the error keeps alive."""
    died: list[weakref.ref[torch.Tensor]] = []
    try:
        failing_step(died, error)
    except BaseException as kept:
        return kept, died[0]
    raise AssertionError("the step did not fail")


@pytest.fixture(autouse=True)
def _last_errors() -> Iterator[None]:
    """Put back what ``sys`` keeps of the last error."""
    names = ("last_exc", "last_value", "last_type", "last_traceback")
    before = {name: getattr(sys, name) for name in names if hasattr(sys, name)}
    yield
    for name in names:
        if hasattr(sys, name):
            delattr(sys, name)
    for name, value in before.items():
        setattr(sys, name, value)


KEEPERS: dict[str, Callable[[BaseException], None]] = {
    "last_exc": lambda error: setattr(sys, "last_exc", error),
    "last_value": lambda error: setattr(sys, "last_value", error),
    "last_traceback": lambda error: setattr(sys, "last_traceback", error.__traceback__),
}


@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
def test_an_error_that_a_notebook_keeps_lets_its_tensors_go(name: str, kind: type[BaseException]) -> None:
    error, tensor = caught(kind("CUDA out of memory."))
    KEEPERS[name](error)
    text = "".join(traceback.format_exception(error))
    lines = traceback.format_tb(error.__traceback__)
    if name == "last_traceback":
        del error
    gc.collect()
    assert tensor() is not None
    free_failed_step()
    assert tensor() is None
    if name != "last_traceback":
        assert "".join(traceback.format_exception(getattr(sys, name))) == text
    else:
        assert traceback.format_tb(sys.last_traceback) == lines


def test_a_cycle_is_collected() -> None:
    module = nn.Linear(2, 2)
    module.itself = [module]  # type: ignore[assignment]
    tensor = weakref.ref(module.weight)
    gc.disable()
    try:
        del module
        assert tensor() is not None
        free_failed_step()
        assert tensor() is None
    finally:
        gc.enable()


# ---- its random numbers come again


def drawn() -> list[float]:
    return [
        torch.rand(1).item(),
        nn.Dropout(0.5)(torch.ones(64)).sum().item(),
        np.random.rand(),
        np.random.normal(),
        random.random(),
    ]


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_the_same_numbers_come_again_as_often_as_needed(bits: Callable[[int], np.random.BitGenerator]) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(bits(1))
    try:
        np.random.normal()  # the second of a pair waits in the generator
        state = RandomState.capture(CPU)
        once = drawn()
        assert drawn() != once
        for _ in range(2):
            state.restore()
            assert RandomState.capture(CPU).is_same(state)  # which changes nothing
            assert drawn() == once
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.gpu
def test_the_same_dropout_comes_again_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = RandomState.capture(device)
    once = torch.rand(8, device=device)
    state.restore()
    assert torch.equal(torch.rand(8, device=device), once)
