"""Ask torch's CUDA allocator for expandable segments, before CUDA starts.

Use it if reserved memory is far above allocated memory. A segment that grows in place leaves no gaps between batches of
different lengths; ordinary segments do, and the GPU runs out of memory that is reserved but unused.
``estimate(..., expandable_segments=True)`` shows in advance what it saves.

Limitations: ``max_split_size_mb`` and ``garbage_collection_threshold`` have no effect on expandable segments, which
replace them (https://github.com/pytorch/pytorch/pull/134338). Settings of the environment stay as they are.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import torch

from hf_memopt.changes import Change
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.undo import UndoHandle, nothing_to_undo
from hf_memopt.training.devices import current_os

logger = logging.getLogger(__name__)

SETTING = "expandable_segments"

PROBLEMS = {
    "windows": "torch ignores it on Windows",  # seen up to torch 2.13; https://github.com/pytorch/pytorch/pull/189163
    "wsl": "under WSL the driver can fail at the first allocation (https://github.com/pytorch/pytorch/issues/192330)",
}
TEGRA_RELEASE = Path("/etc/nv_tegra_release")


def use_expandable_segments() -> UndoHandle:
    """Add ``expandable_segments:True`` to the allocator's environment variable, for this process and its children.

    Call it first thing in the script: ``TrainingArguments(...)`` starts CUDA, and so does a preset. Other settings in
    the variable stay, and if it has this one already, with whatever value, that is kept.

    Returns:
        A handle whose ``remove()`` restores the environment. It has nothing to undo (``handle.is_removed``) if the
        environment has the setting already or (with a warning) if the platform does not support it.

    Raises:
        RuntimeError: CUDA has started in this process, and its allocator has read the variable without the setting.
    """
    variable = versions.allocator_variable()
    text = versions.allocator_settings()  # what torch would read: to set the newer variable would hide an older one
    asked = [item for item in text.split(",") if item.partition(":")[0].strip() == SETTING]
    if asked:
        logger.info("%s", Change(variable, text, text, f"the environment's own {asked[0].strip()} wins"))
        return nothing_to_undo()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "torch.cuda.is_initialized()=True comes too late, the allocator has read its settings; expected a call "
            "before CUDA starts. Move use_expandable_segments() to the top of the script, before TrainingArguments(...)"
        )
    problem = platform_problem()
    if problem:
        warnings.warn(
            f"expandable_segments=True is left out: {problem}; expected plain Linux. Leave use_expandable_segments() "
            "out here",
            stacklevel=2,
        )
        return nothing_to_undo()
    former = os.environ.get(variable)
    os.environ[variable] = f"{text},{SETTING}:True" if text else f"{SETTING}:True"
    logger.info("%s", Change(variable, former, os.environ[variable], "segments grow in place, so nothing fragments"))

    def undo() -> None:
        os.environ.pop(variable, None)
        os.environ.update({} if former is None else {variable: former})

    return UndoHandle(undo)


def platform_problem(system: str | None = None) -> str:
    """Return why expandable segments cannot work on this machine, or on another operating system, or an empty text."""
    if TEGRA_RELEASE.exists():
        return "on Tegra boards the driver reports out of memory (https://github.com/unslothai/unsloth-zoo/pull/1235)"
    return PROBLEMS.get(system or current_os(), "")
