"""Out of memory: which errors are, that nothing keeps the failed step alive, and that its random numbers come again."""

from __future__ import annotations

import gc
import random
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from hf_memopt.binding.undo import RandomState
from hf_memopt.devices.readings import free_failed_step, is_out_of_memory

CPU = torch.device("cpu")

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 3.81 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("HIP out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 15.98 GiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of 28.55 GiB"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
    RuntimeError("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB already"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("cuFFT error: HIPFFT_ALLOC_FAILED"),
    RuntimeError("CUDA error: resource allocation failed when calling `cusparseCreate(handle)`"),
    RuntimeError("CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation( handle, opA, opB,"),
    RuntimeError("cuDNN Frontend error: cudnnBackendExecute(handle, plan, pack) failed with CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError(
        "cuDNN Frontend error: CUDNN_BACKEND_OPERATION: cudnnFinalize Failed cudnn_status: "
        "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    ),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    RuntimeError("Triton Error [HIP]: Code: 2, Message: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 7.80 GiB, other allocations: 6.94 GiB)"),
    RuntimeError("Invalid buffer size: 24.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to"),
]

OTHERS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"),
    RuntimeError(
        "cuDNN Frontend error: CUDNN_BACKEND_OPERATION: cudnnFinalize Failed cudnn_status: CUDNN_STATUS_BAD_PARAM"
    ),
    RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    RuntimeError("CUDA error: insufficient resources when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [HIP]:  Code: 209, Messsage: no kernel image is available for execution on the device"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:84, unhandled cuda error, Cuda failure 'out of memory'"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
    RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    ValueError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("step 3 of another process failed: CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("the log ends with\nCUDA out of memory. Tried to allocate 2.00 GiB"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:50] or type(error).__name__)
def test_these_errors_are_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:50] or type(error).__name__)
def test_these_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


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


def test_errors_that_name_each_other_as_cause_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)
    other.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(one)


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


def test_the_causes_of_a_kept_error_let_their_tensors_go_too() -> None:
    first, of_first = caught(ValueError("one"))
    second, of_second = caught(ValueError("two"))
    first.__context__ = second
    second.__context__ = first  # a circle, which nothing prevents
    last, of_last = caught(ValueError("three"))
    last.__cause__ = first
    sys.last_exc = last
    del first, second
    free_failed_step()
    assert [reference() for reference in (of_first, of_second, of_last)] == [None, None, None]


def test_an_error_that_the_caller_is_handling_lets_its_tensors_go() -> None:
    died: list[weakref.ref[torch.Tensor]] = []
    mine = torch.ones(1)
    try:
        failing_step(died, torch.OutOfMemoryError("CUDA out of memory."))
    except torch.OutOfMemoryError:
        assert died[0]() is not None
        free_failed_step()  # as in a run that is started within the except block of another
        assert died[0]() is None
    assert mine.item() == 1  # this frame is running: its variables stay


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


def test_the_same_numbers_come_again_as_often_as_needed() -> None:
    np.random.normal()  # the second of a pair waits in the generator
    state = RandomState.capture(CPU)
    once = drawn()
    assert drawn() != once
    for _ in range(2):
        state.restore()
        assert drawn() == once


def test_another_generator_of_numpy_is_captured_too() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = RandomState.capture(CPU)
        once = drawn()
        state.restore()
        assert drawn() == once
    finally:
        np.random.set_bit_generator(before)


def test_capturing_changes_nothing() -> None:
    state = RandomState.capture(CPU)
    once = drawn()
    state.restore()
    RandomState.capture(CPU)
    assert drawn() == once


@pytest.mark.gpu
def test_the_same_dropout_comes_again_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = RandomState.capture(device)
    once = torch.rand(8, device=device)
    state.restore()
    assert torch.equal(torch.rand(8, device=device), once)
