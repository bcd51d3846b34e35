"""Start a rehearsal: make the GPU, run the script in a process of its own, return what it found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_memopt.plain_data import Count, check_value
from hf_memopt.prediction.rehearsal.result import Rehearsal
from hf_memopt.prediction.rehearsal.stand_in import StandIn
from hf_memopt.training.devices import Gpu, current_gpu, custom_gpu, find_gpu

SURROUNDINGS = {
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # transformers loads weights in threads, in another order each time
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}
"""Of the script, where the user's environment does not say otherwise."""


def rehearse(
    path: str | os.PathLike[str],
    *arguments: str,
    gpu: str | Gpu | None = None,
    memory: int | str | None = None,
    capability: str | None = None,
    gpus: int = 1,
    steps: int = 2,
    empty_weights: bool = False,
    module: bool = False,
    timeline: bool = False,
) -> Rehearsal:
    """Run the first training steps of a script on a GPU that is not there, and return their memory.

    The script runs unchanged in a process of its own, with torch's own CUDA code, and ends inside its training. What it
    prints goes to standard error, what it writes by itself is written; a Trainer saves, reports and pushes nothing. The
    Hub is offline, unless ``HF_HUB_OFFLINE=0`` is set.

    Args:
        path: of the script.
        arguments: its own.
        gpu: that stands in, by name. Without it and ``memory``, the steps run for real on the one GPU of this machine.
        memory: instead: what a process can use of a GPU, such as ``"8GB"``.
        capability: compute capability of that GPU; 8.6 by default.
        gpus: that train together, of which the first one is rehearsed.
        steps: of the optimizer, after which the training ends.
        empty_weights: whether ``from_pretrained`` makes weights of the right shapes instead of reading them.
        module: whether ``path`` is the name of a module, as after ``python -m``.
        timeline: whether the result gets what ``Rehearsal.plot`` draws.

    Raises:
        RehearsalError: this machine, or its build of torch, cannot rehearse.
        ValueError: the GPU is not known, or an argument is invalid.
    """
    check_value("steps", steps, Count, 2)
    check_value("gpus", gpus, Count, 2)
    is_measured = gpu is None and memory is None
    if is_measured and gpus > 1:
        raise ValueError(f"gpus={gpus} needs GPUs that stand in; expected the name of one. Pass gpu='RTX 3060 12GB'")
    chosen = _chosen_gpu(gpu, memory, capability)
    environment = {**SURROUNDINGS, **os.environ}
    if not is_measured:
        environment = StandIn.of(chosen).environment(environment)
    if gpus > 1:
        from hf_memopt.prediction.rehearsal.world import environment as of_ranks

        environment |= of_ranks(gpus)
    context_bytes = chosen.context_bytes or 0
    found = Rehearsal("never trained", chosen.name, chosen.usable_bytes, context_bytes, is_measured=is_measured)
    options = {"found": found.to_json(), "steps": steps, "gpus": gpus, "empty_weights": empty_weights}
    began = time.monotonic()
    with TemporaryDirectory(prefix="hf-memopt-") as folder:
        result = Path(folder, "result.json")
        options |= {"module": module, "timeline": timeline, "result": str(result)}
        words = [json.dumps(options), os.fspath(path), *arguments]
        code = _run([sys.executable, "-m", "hf_memopt.prediction.rehearsal.child", *words], environment)
        if result.exists():
            return replace(Rehearsal.from_json(result.read_bytes()), seconds=time.monotonic() - began)
    return replace(found, verdict="failed" if code else "never trained", exit_code=code)  # by os._exit, or a signal


def _chosen_gpu(gpu: str | Gpu | None, memory: int | str | None, capability: str | None) -> Gpu:
    if memory is not None:
        if gpu is not None:
            raise ValueError(f"gpu={gpu!r} and memory={memory!r} are two GPUs; expected one. Omit memory={memory!r}")
        return custom_gpu(memory, capability or "8.6")
    if capability is not None:
        raise ValueError(
            f"capability={capability!r} is known of a GPU by name; expected memory='8GB' beside it. Omit it"
        )
    found = current_gpu() if gpu is None else find_gpu(gpu)
    if found is None:
        raise ValueError('gpu=None, and there is no GPU here; expected one to rehearse. Pass gpu="RTX 3060 12GB"')
    return found


def _run(words: list[str], environment: dict[str, str]) -> int:
    """Run the script in a group of processes of its own, of which nothing is left afterwards."""
    # its output must not be in ours; it has no terminal to read from
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)) if is_main else None
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code  # as a shell says it
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
