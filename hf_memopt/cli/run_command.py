"""What ``hf-memopt run`` does: a fresh Python runs the script in the place of this process (``recipes/running``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.command import arguments_of, check_script, one_gpu
from hf_memopt.plain_data import check_word

if TYPE_CHECKING:
    from hf_memopt.cli.options import RunOptions


def run(options: RunOptions, context: Any) -> int:
    """Return the script's exit code where it is not this process that goes on with it."""
    if not options.module:
        in_notebook = ", or in the notebook: attach(trainer, MicrobatchCallback())"
        check_script(options.script, "run", in_notebook)
    if options.apply is not None:
        check_word("apply", options.apply, ("exact",))
    if options.repair is not None:
        check_word("repair", options.repair, ("gradient-scale",))
    for word in options.allow or ():
        check_word("allow", word, ("release_clipping", "bf16_weights", "freeze"))  # "shorter" is for the script's data
    if (gpu := one_gpu(options.gpu)) is not None:
        from hf_memopt.training.devices import find_gpu

        find_gpu(gpu)
    if options.rehearse and (code := _rehearse(options, gpu)):
        return code
    asked: dict[str, Any] = {"gpu": gpu, "apply": options.apply, "repair": options.repair}
    asked |= {"allow": options.allow or (), "is_module": options.module}
    words = [sys.executable, "-m", "hf_memopt.prediction.recipes.running.script", json.dumps(asked)]
    words += [options.script, *arguments_of(options)]
    if os.name == "posix":
        os.execv(sys.executable, words)  # signals and exit codes are the script's
    return subprocess.call(words)


def _rehearse(options: RunOptions, gpu: str | None) -> int:
    """Say on standard error what a rehearsal finds; return the exit code of a script that fails by itself."""
    from hf_memopt.prediction.rehearsal import RehearsalError, rehearse
    from hf_memopt.terminal import Console
    from hf_memopt.training.devices import current_gpu

    on = current_gpu() if gpu is None else gpu
    if on is None:
        raise ValueError("gpu=None, and there is no GPU here; expected one to rehearse on. Pass gpu='RTX 3060 12GB'")
    try:
        found = rehearse(options.script, *arguments_of(options), gpu=on, module=options.module)
    except RehearsalError as error:
        raise ValueError(str(error)) from None
    if found.verdict in ("fits", "runs out"):
        console = Console(stderr=True)
        console.out(found.table(console.width, options.script), highlight=False)
    return found.exit_code if found.verdict == "failed" else 0
