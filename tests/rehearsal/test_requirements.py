"""What a rehearsal refuses, and what it gives a process; no GPU stands in here, nor is torch a CUDA build."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_memopt.prediction.rehearsal import RehearsalError, StandIn, read_counters, read_generated_calls
from hf_memopt.prediction.rehearsal import library as library_module
from hf_memopt.prediction.rehearsal.library import NAME, cache_key, generated_functions
from hf_memopt.prediction.rehearsal.requirements import TorchBuild

VERSION = "__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
OF_CUDA = {"version": "2.14.1+cu130", "cuda": "'13.0'", "hip": "None"}
WITHOUT = "Without a rehearsal: hf-memopt estimate"
TORCH = (
    "expected one for CUDA. A rehearsal needs no GPU and no driver. On Linux, in a new environment: pip install torch. "
    + WITHOUT
)
TOOL = (
    "is not installed; expected g++ (or $CXX) and nm, to build the stand-in of a GPU once. "
    f"Call, for example: apt install g++ binutils. {WITHOUT}"
)
REFUSED = {
    "Windows": (
        {"system": "Windows", "machine": "AMD64"},
        "platform='Windows AMD64' cannot rehearse; expected 'Linux x86_64'. "
        "Rehearse under WSL, or call: hf-memopt estimate",
    ),
    "macOS": (
        {"system": "Darwin", "machine": "arm64"},
        "platform='Darwin arm64' cannot rehearse; expected 'Linux x86_64'. Call: hf-memopt estimate",
    ),
    "Linux on ARM": (
        {"machine": "aarch64"},
        "platform='Linux aarch64' cannot rehearse; expected 'Linux x86_64'. Call: hf-memopt estimate",
    ),
    "no torch": ({"torch": None}, "torch is not installed; expected its CUDA build. Call: pip install torch"),
    "for the CPU": (
        {"torch": {"version": "2.13.0+cpu", "cuda": "None", "hip": "None"}},
        f"torch='2.13.0+cpu' is a build for the CPU; {TORCH}",
    ),
    "for ROCm": (
        {"torch": {"version": "2.13.0+rocm6.4", "cuda": "None", "hip": "'6.4.43482'"}},
        f"torch='2.13.0+rocm6.4' is a build for ROCm; {TORCH}",
    ),
    "no compiler": ({"tools": ["nm"]}, f"tool='g++' {TOOL}"),
    "no other compiler": ({"tools": ["nm"], "CXX": "clang++ -v"}, f"tool='clang++' {TOOL}"),
    "no nm": ({"tools": ["g++"]}, f"tool='nm' {TOOL}"),
}


def pretend(machine: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process see another machine, with another build of torch."""
    monkeypatch.setattr(platform, "system", lambda: machine.get("system", "Linux"))
    monkeypatch.setattr(platform, "machine", lambda: machine.get("machine", "x86_64"))
    tools = machine.get("tools", ["g++", "nm"])
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("CXX", str(machine.get("CXX", "g++")))
    build = machine.get("torch", OF_CUDA)
    if build is not None:
        (folder / "torch").mkdir()
        (folder / "torch/__init__.py").touch()
        (folder / "torch/version.py").write_text(VERSION.format(**build), encoding="utf-8")


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_value_rule_and_fix(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, message = REFUSED[name]
    pretend(machine, tmp_path, monkeypatch)
    with pytest.raises(RehearsalError) as error:
        StandIn().environment({})
    assert str(error.value) == message


@pytest.mark.skipif("HF_MEMOPT_GPU_MEMORY" in os.environ, reason="runs on the stand-in")
def test_no_counters_without_a_stand_in() -> None:
    for function in (read_counters, read_generated_calls):
        with pytest.raises(RehearsalError) as error:
            function()
        assert str(error.value) == (
            "no GPU stands in in this process; expected one. Start it by: "
            "python -m hf_memopt.prediction.rehearsal -- COMMAND"
        )


def test_the_key_changes_with_torch_and_the_libraries(tmp_path: Path) -> None:
    torch, one, other = TorchBuild(tmp_path, "2.14.1", (13, 0)), tmp_path / "one.so", tmp_path / "other.so"
    one.write_bytes(b"1")
    other.write_bytes(b"22")
    builds = [(torch, [one]), (torch, [one, other]), (replace(torch, version="2.14.2"), [one])]
    builds.append((replace(torch, cuda=(12, 8)), [one]))
    keys = {cache_key(*build) for build in builds}
    assert len(keys) == len(builds)
    assert cache_key(torch, [one]) in keys
    one.write_bytes(b"333")
    assert cache_key(torch, [one]) not in keys


DECLARED = """
cusolverStatus_t cusolverDnSgetrf_bufferSize(
    cusolverDnHandle_t handle, int m, const int * p, float *  A, int * lwork, size_t* host);
"""
GENERATED = {
    "cublasGemmEx": "long cublasGemmEx() { calls[0]++; return 0; }",
    "cudnnCreate": "long cudnnCreate(unsigned long* made) { calls[1]++; *made = handles += 16; return 0; }",
    "cusolverDnSgetrf_bufferSize": (
        "long cusolverDnSgetrf_bufferSize(long p0, long p1, long p2, long p3, int* p4, size_t* p5) "
        "{ calls[2]++; *p4 = 0; *p5 = 0; return 0; }"
    ),
}


def test_generated_functions_count_their_calls_and_answer_numbers_and_sizes() -> None:
    text = generated_functions(list(GENERATED), DECLARED)
    assert [line.partition("))) ")[2] for line in text.splitlines()[-len(GENERATED) :]] == list(GENERATED.values())


def test_the_environment_of_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.prediction.rehearsal.stand_in.built_library", lambda: tmp_path / NAME)
    hook = str(Path(library_module.__file__).with_name("hook"))
    base = {"PATH": "/bin", "PYTHONPATH": "mine", "CUDA_VISIBLE_DEVICES": "", "LD_PRELOAD": "jemalloc.so"}
    assert StandIn.of("T4").environment(base) == {
        "PATH": "/bin",
        "PYTHONPATH": f"{hook}:mine",
        "LD_PRELOAD": f"{tmp_path / NAME}:jemalloc.so",
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "HF_MEMOPT_GPU_NAME": "T4",
        "HF_MEMOPT_GPU_MEMORY": str(StandIn.of("T4").memory_bytes),
        "HF_MEMOPT_GPU_CONTEXT": str(StandIn.of("T4").context_bytes),
        "HF_MEMOPT_GPU_CAPABILITY": "75",
        "HF_MEMOPT_GPU_PROCESSORS": "40",
    }
    assert StandIn().environment({}, values=False)["HF_MEMOPT_GPU_VALUES"] == "0"


COMMANDS = {
    "nothing": ([], "command is missing; expected one after --. Write, for example: -- python train.py"),
    "a capability of a known GPU": (
        ["--gpu", "T4", "--capability", "8.6", "--", "true"],
        "--capability is known of a GPU of the table; expected --memory beside it. Omit --capability",
    ),
    "an unknown size": (["--memory", "12", "--", "true"], "memory='12' has no unit"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_line_is_explained(name: str) -> None:
    arguments, message = COMMANDS[name]
    command = [sys.executable, "-m", "hf_memopt.prediction.rehearsal", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
