"""What ``hf-memopt rehearse`` does: rehearse a script, and print what that found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.command import arguments_of, check_script, one_gpu, print_coloured
from hf_memopt.notices import quoted
from hf_memopt.plotting import check_picture
from hf_memopt.prediction.rehearsal import RehearsalError, rehearse
from hf_memopt.terminal import Console
from hf_memopt.training.devices import current_gpu
from hf_memopt.units import format_bytes
from hf_memopt.whole_files import check_target, write_whole

if TYPE_CHECKING:
    from hf_memopt.cli.options import RehearseOptions
    from hf_memopt.prediction.rehearsal import Rehearsal

EXIT_CODES = {"fits": 0, "runs out": 1}


def run(options: RehearseOptions, context: Any) -> int:
    """Print the rehearsal and return the exit code: 0 if it fits, 1 if memory runs out, the script's if that fails."""
    script = options.script
    if not options.module:
        check_script(script, "rehearse --gpu T4")
    if options.json_file is not None:
        check_target("json_file", options.json_file)
    if options.timeline is not None:
        check_picture(options.timeline, "the picture of a rehearsal", name="timeline")
    own, timeline = arguments_of(options), options.timeline is not None
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("steps", "gpus", "empty_weights", "module")}
    gpu: dict[str, Any] = {"gpu": one_gpu(options.gpu), "memory": options.memory, "capability": options.capability}
    misplaced = [word for word in own if word in ("--gpu", "-g", "--memory")]
    if misplaced and not any(gpu.values()) and current_gpu() is None:
        raise ValueError(
            f"{misplaced[0]} after the script is the script's own; expected it before, as there is no GPU here. "
            f"Call: hf-memopt rehearse {'--memory 8GB' if misplaced[0] == '--memory' else '--gpu T4'} {quoted(script)}"
        )
    try:
        found = rehearse(script, *own, **gpu, **settings, timeline=timeline)
    except RehearsalError as error:
        raise ValueError(str(error)) from None
    if found.is_measured and found.verdict in EXIT_CODES:
        try:
            predicted = _need(rehearse(script, *own, gpu=current_gpu(), **settings))
        except RehearsalError as error:
            predicted = f"none ({error})"
        needs = f"needed here: {_need(found)}; predicted without the GPU: {predicted}"
        found = replace(found, notes=(*found.notes, needs))
    if found.verdict == "failed":
        return found.exit_code or 1
    if found.verdict == "never trained":
        raise ValueError(
            f"script={script!r} ended without a step of an optimizer of torch on the GPU; expected one that trains "
            f"in its own process. Rehearse what it starts, or run it by itself: python {quoted(script)}"
        )
    if options.json_file is not None:
        write_whole(options.json_file, found.to_json())
    if options.timeline is not None:
        found.plot(options.timeline)
    console = Console()
    print_coloured(found.table(console.width, script), console)
    return EXIT_CODES[found.verdict]


def _need(found: Rehearsal) -> str:
    if found.needed_bytes is not None:
        return format_bytes(found.needed_bytes)
    return "more than there is" if found.verdict == "runs out" else "none (the script fails there)"
