"""The process of a rehearsed script: runs it, ends it inside its training, and writes what was seen.

``python -m hf_memopt.prediction.rehearsal.child OPTIONS SCRIPT [ARGUMENT]...``, with the options as JSON. torch and
``Trainer`` are changed when the script imports them, since it may set environment variables before.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hf_memopt.prediction.recipes.running.script_as_main import TRAINER, print_traceback, run_as_main
from hf_memopt.prediction.rehearsal.result import Done, Rehearsal, Verdict

if TYPE_CHECKING:
    from hf_memopt.prediction.rehearsal.shortened import Shortening
    from hf_memopt.prediction.rehearsal.watch import Watch

GENERATION = "transformers.generation.utils"
WRITTEN = "what the script itself writes was written"
OFFLINE = """\
error: HF_HUB_OFFLINE='1' keeps the script from the Hub; expected its data sets and models on the disk
hint: Set HF_HUB_OFFLINE=0, or, for models alone, pass --empty-weights"""
UNKNOWN = {  # libraries whose calls are counted, and what of them is not known here
    ("cudnn",): "not modelled: workspaces of cuDNN, which count as 0",
    ("cusolver", "cusparse", "cufft"): "not modelled: workspaces of cuSOLVER, cuSPARSE and cuFFT, which count as 0",
    ("nccl",): "not modelled: buffers of NCCL",
}


def main(options: str, script: str, *arguments: str) -> NoReturn:
    """Run the script to the end of its rehearsal."""
    leave(Child(json.loads(options)).run(script, arguments))  # without destructors of a GPU that is not there


def leave(code: int) -> NoReturn:
    """End this process, without destructors and whatever the script registered."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


class Child:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options, self._found = options, Rehearsal.from_json(options["found"])
        self._watch: Watch | None = None
        self._shortening: Shortening | None = None
        self._notes: list[str] = []

    def run(self, script: str, arguments: tuple[str, ...]) -> int:
        changes = {
            "torch": self._torch_is_there,
            TRAINER: self._trainer_is_there,
            GENERATION: self._generation_is_there,
        }
        code, error = 0, None  # type: int, Exception | None
        if self._options["empty_weights"]:
            from hf_memopt.prediction.rehearsal.empty_weights import install

            self._notes = install(Path(self._options["result"]).with_name("weights"))
        try:
            with suppress(Done):
                run_as_main(script, arguments, changes, is_module=self._options["module"])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except Exception as caught:
            code, error = 1, caught
        verdict = self._verdict(code, error)
        if error is not None and verdict == "failed":
            print_traceback(error)
            if _asks_the_hub(error):
                print(OFFLINE, file=sys.stderr)
        Path(self._options["result"]).write_text(self._seen(verdict, code).to_json(), encoding="utf-8")
        return code

    def _verdict(self, code: int, error: BaseException | None) -> Verdict:
        watch = self._watch
        if watch is None or not sys.modules["torch"].cuda.is_initialized():
            return "failed" if code else "never trained"
        from hf_memopt.training.devices.readings import is_out_of_memory

        ran_out = watch.gave_up or (error is None and code != 0 and watch.failures_in_step > 0)
        while error is not None:  # a script may have wrapped it
            ran_out = ran_out or (isinstance(error, Exception) and is_out_of_memory(error))
            error = error.__cause__ or error.__context__
        if ran_out and watch.failure is not None:
            return "runs out"
        return "failed" if code else "fits" if watch.steps else "never trained"

    def _torch_is_there(self, torch: Any) -> None:
        from hf_memopt.prediction.rehearsal.watch import Watch

        self._watch = Watch(self._options["steps"])
        if self._options["gpus"] > 1:
            from hf_memopt.prediction.rehearsal.world import install

            install(self._options["gpus"])

    def _trainer_is_there(self, module: Any) -> None:
        from hf_memopt.prediction.rehearsal.shortened import Shortening

        assert self._watch is not None  # transformers' Trainer imports torch
        self._shortening = Shortening(self._watch, module.Trainer)

    def _generation_is_there(self, module: Any) -> None:
        assert self._watch is not None  # it imports torch, too
        generate = module.GenerationMixin.generate
        module.GenerationMixin.generate = self._watch.during("generation")(generate)

    def _seen(self, verdict: Verdict, code: int) -> Rehearsal:
        found, watch = replace(self._found, verdict=verdict, exit_code=code), self._watch
        if verdict not in ("fits", "runs out") or watch is None:
            return found
        import torch

        from hf_memopt.prediction.rehearsal.events import blocks_at_peak, events_so_far, named_blocks
        from hf_memopt.prediction.rehearsal.least_memory import least_memory

        watch.enter("")
        events = events_so_far()
        peaks = {name: peak for name, peak in watch.peaks.items() if peak.allocated_bytes}
        if verdict == "runs out":
            found = replace(found, out_of_memory=watch.failure, held=watch.held)
        else:
            if watch.failures:  # with less it would go on again, in smaller parts
                phase = max(peaks, key=lambda name: peaks[name].allocated_bytes)
                reserved_bytes = max(peak.reserved_bytes for peak in peaks.values())
            else:
                settings = torch.cuda.memory._snapshot()["allocator_settings"]
                reserved_bytes, phase = least_memory(events, found.context_bytes, settings["expandable_segments"])
            needed = reserved_bytes + found.context_bytes
            held = watch.grouped(events, blocks_at_peak(events))
            found = replace(found, needed_bytes=needed, peak_phase=phase, held=held, recovered=watch.failures)
        if self._options["timeline"]:
            from hf_memopt.prediction.rehearsal.timeline import data_of

            names, begun = named_blocks(events, watch.names), watch.steps + (verdict == "runs out")
            found = replace(found, timeline=data_of(events, names, watch.step_moments, begun))
        shortening = self._shortening
        return replace(
            found,
            phases=peaks,
            largest_batch=watch.largest,
            longest_row=shortening.longest.longest_row if shortening else None,
            steps=watch.steps,
            step_seconds=tuple(watch.step_seconds) if found.is_measured else (),
            notes=(*self._notes, *(shortening.notes() if shortening else ()), WRITTEN, *self._not_modelled()),
        )

    def _not_modelled(self) -> list[str]:
        """Return what of this run is not known on the stand-in."""
        if self._found.is_measured:
            return []
        from hf_memopt.prediction.rehearsal import failed_values, read_generated_calls

        calls = read_generated_calls()
        notes = [what for begins, what in UNKNOWN.items() if any(name.startswith(begins) for name in calls)]
        return notes + [f"values of {name}: {reason}" for name, reason in failed_values.items()]


def _asks_the_hub(error: BaseException | None) -> bool:
    """Return whether a file of the Hub is missing because a rehearsal is offline."""
    while error is not None and "OfflineMode" not in f"{type(error)} {error}" and "outgoing traffic" not in str(error):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    main(*sys.argv[1:])
