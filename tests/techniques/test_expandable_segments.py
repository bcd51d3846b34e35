"""Expandable segments: what the environment says before and after, on platforms that are played."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_memopt.training.binding import versions
from hf_memopt.training.techniques import expandable_segments as allocator_settings
from hf_memopt.training.techniques import use_expandable_segments

NEW, OLD, HIP = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"


@pytest.fixture(autouse=True)
def _plain_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has not started CUDA, on Linux, with torch 2.13 and nothing set."""
    for name in (NEW, OLD, HIP):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(versions, "allocator_variable", lambda: NEW)
    monkeypatch.setattr(allocator_settings, "TEGRA_RELEASE", tmp_path / "none")
    monkeypatch.setattr(allocator_settings, "current_os", lambda: "linux")


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in (NEW, OLD, HIP) if name in os.environ}


@pytest.mark.parametrize("read", [NEW, OLD])  # by torch: the older one before 2.11
def test_it_is_set_once_and_taken_back(monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    monkeypatch.setattr(versions, "allocator_variable", lambda: read)
    handle = use_expandable_segments()
    assert settings() == {read: "expandable_segments:True"}
    assert use_expandable_segments().is_removed  # a second call changes nothing
    assert not handle.is_removed
    handle.remove()
    assert settings() == {}


@pytest.mark.parametrize("name", [NEW, OLD, HIP])
def test_what_is_there_is_kept_under_any_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Only one variable is read: without its text in the newer one, an older one would be lost."""
    before = {name: "garbage_collection_threshold:0.8, roundup_power2_divisions:[256:1,>:4],"}
    monkeypatch.setenv(name, before[name])
    handle = use_expandable_segments()
    assert settings() == {**before, NEW: f"{before[name]}expandable_segments:True"}
    handle.remove()
    assert settings() == before


@pytest.mark.parametrize("value", ["True", "False"])
def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str) -> None:
    text = f"max_split_size_mb:128, expandable_segments:{value}"
    monkeypatch.setenv(OLD, text)
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        assert use_expandable_segments().is_removed
    assert settings() == {OLD: text}
    assert caplog.messages == [
        f"PYTORCH_ALLOC_CONF: {text!r} -> {text!r} (the environment's own expandable_segments:{value} wins)"
    ]


def test_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError) as error:
        use_expandable_segments()
    assert str(error.value) == (
        "torch.cuda.is_initialized()=True comes too late, the allocator has read its settings; expected a call before "
        "CUDA starts. Move use_expandable_segments() to the top of the script, before TrainingArguments(...)"
    )
    assert settings() == {}


WSL = "under WSL the driver can fail at the first allocation (https://github.com/pytorch/pytorch/issues/192330)"
TEGRA = "on Tegra boards the driver reports out of memory (https://github.com/unslothai/unsloth-zoo/pull/1235)"


@pytest.mark.parametrize(
    ("platform", "problem"), [("windows", "torch ignores it on Windows"), ("wsl", WSL), ("tegra", TEGRA)]
)
def test_platforms_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, problem: str) -> None:
    if platform == "tegra":
        monkeypatch.setattr(allocator_settings, "TEGRA_RELEASE", tmp_path)
    else:
        monkeypatch.setattr(allocator_settings, "current_os", lambda: platform)
    with pytest.warns(UserWarning, match="expandable_segments") as warned:
        assert use_expandable_segments().is_removed
    assert [str(warning.message) for warning in warned] == [
        f"expandable_segments=True is left out: {problem}; expected plain Linux. Leave use_expandable_segments() out "
        "here"
    ]
    assert warned[0].filename == __file__
    assert settings() == {}


@pytest.mark.gpu
def test_the_allocator_of_a_card_follows() -> None:
    script = (
        "import torch\n"
        "from hf_memopt.training.techniques.expandable_segments import use_expandable_segments\n"
        "use_expandable_segments()\n"
        "kept = torch.zeros(1, device='cuda')\n"
        "print({segment['is_expandable'] for segment in torch.cuda.memory_snapshot()})\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["{True}"]
