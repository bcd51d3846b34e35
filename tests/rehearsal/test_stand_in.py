"""What the stand-in of a GPU answers to torch: sizes, limits, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pynvml
import pytest
import torch

from hf_memopt.prediction.rehearsal import read_counters, read_generated_calls
from hf_memopt.training.devices.readings import read_memory

pytestmark = pytest.mark.stand_in
MIB = 2**20


@pytest.fixture(autouse=True)
def _nothing_cached() -> None:
    torch.cuda.empty_cache()


def test_torch_and_nvml_see_the_gpu_of_the_environment() -> None:
    total, capability = int(os.environ["HF_MEMOPT_GPU_MEMORY"]), int(os.environ["HF_MEMOPT_GPU_CAPABILITY"])
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.total_memory) == (os.environ["HF_MEMOPT_GPU_NAME"], total)
    assert (properties.major, properties.minor) == divmod(capability, 10)
    assert properties.multi_processor_count == int(os.environ["HF_MEMOPT_GPU_PROCESSORS"])
    pynvml.nvmlInit()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert (memory.total, memory.free) == (total, total - memory.used)
    assert read_memory().device_total_bytes == total


def test_what_is_held_is_what_torch_has_reserved() -> None:
    before = read_counters()["used_bytes"]
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert read_counters()["used_bytes"] - before == 30 * MIB
    free, total = torch.cuda.mem_get_info()
    assert total - free == read_counters()["used_bytes"] + int(os.environ["HF_MEMOPT_GPU_CONTEXT"])
    del tensor
    torch.cuda.empty_cache()
    assert read_counters()["used_bytes"] == before
    assert read_counters()["peak_bytes"] >= before + 30 * MIB


def test_more_than_the_gpu_has_is_refused_and_the_rest_is_not() -> None:
    free, refused = torch.cuda.mem_get_info()[0], read_counters()["refused"]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + 1, dtype=torch.uint8, device="cuda")
    assert read_counters()["refused"] > refused
    assert torch.empty(free // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda").is_cuda


def test_pinned_memory_is_counted() -> None:
    before = read_counters()["pinned_bytes"]
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    assert tensor.is_pinned()
    assert read_counters()["pinned_bytes"] - before == 64 * MIB


def test_functions_that_do_nothing_are_counted() -> None:
    calls = read_generated_calls().get("cublasGemmEx", 0) + read_generated_calls().get("cublasLtMatmul", 0)
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    found = read_generated_calls()
    assert sum(count for name, count in found.items() if "Gemm" in name or "gemm" in name or "Matmul" in name) > calls


WORKSPACES: dict[str, Callable[[Any], Any]] = {
    "cuDNN": lambda x: torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3]),
    "cuFFT": torch.fft.rfft,
    "cuSOLVER": torch.linalg.qr,
    "cuSPARSE": lambda x: torch.sparse.mm(x.cpu().to_sparse_csr().cuda(), x),
}


@pytest.mark.parametrize("library", WORKSPACES)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_workspaces_have_a_size(library: str) -> None:
    """An unwritten size would be whatever lay there: terabytes."""
    x = torch.eye(64, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    WORKSPACES[library](x)
    assert torch.cuda.max_memory_allocated() - before < 32 * MIB  # with cuBLAS's workspace


def record_a_graph() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "CUDA graphs": (
        record_a_graph,
        'a rehearsal cannot record CUDA graphs; leave out torch.cuda.graph and mode="reduce-overhead"',
    ),
    "recurrent layers of cuDNN": (
        lambda: torch.nn.LSTM(4, 4).cuda(),
        "a rehearsal has no recurrent layers of cuDNN; call torch.backends.cudnn.enabled = False before them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_rehearsed_says_so(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    function, message = REFUSED[name]
    with pytest.raises(RuntimeError) as error:
        function()
    assert message in str(error.value)
    assert f"hf_memopt.prediction.rehearsal: {message}" in capfd.readouterr().err


def test_recurrent_layers_are_made_without_cudnn() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        assert torch.nn.LSTM(4, 4).cuda().weight_hh_l0.is_cuda
