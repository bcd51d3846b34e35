"""What ``hf-memopt plan`` does: check the options, then plan and print the table, or JSON.

The options are checked without importing torch or transformers, as those of ``estimate`` are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt.cli.progress import spinner
from hf_memopt.memory.models.config_files import check_task, find_config
from hf_memopt.recipes.planning.request import GOALS, METHODS, checked_allow, checked_batch, checked_word, read_gpu

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

__all__ = ["PlanOptions", "run_plan"]

FITS, DOES_NOT_FIT = 0, 1


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command; None and () where one was not given."""

    model: str
    gpu: str | None = None
    budget: str | None = None
    seq_len: int | None = None
    data: Path | None = None
    column: str | None = None
    tokenizer: str | None = None
    effective_batch: int = 32
    goal: str = "speed"
    method: str = "auto"
    allow: tuple[str, ...] = ()
    world_size: int = 1
    task: str | None = None
    json_output: bool = False


def run_plan(options: PlanOptions, console: Console, errors: Console) -> int:
    """Print the plan and return the exit code: 0 if a set-up fits, else 1.

    Args:
        options: of the command.
        console: of standard output.
        errors: of standard error, which shows the progress if it is a terminal.

    Raises:
        ValueError: invalid options, or a model that cannot be planned for.
    """
    _check(options)
    with spinner(f"planning {options.model}", errors, shown=not options.json_output) as announce:
        from hf_memopt.recipes.planning.plan import plan

        lengths = None if options.data is None else _lengths(options, options.data)
        found = plan(
            options.model,
            gpu=options.gpu,
            budget=options.budget,
            lengths=lengths,
            seq_len=options.seq_len,
            effective_batch_size=options.effective_batch,
            goal=options.goal,
            method=options.method,
            allow=options.allow,
            world_size=options.world_size,
            task=options.task,
            announce=announce,
        )
    text = found.to_json() if options.json_output else found.table(console.width)
    console.out(text, highlight=False)
    return FITS if found.fits else DOES_NOT_FIT


def _check(options: PlanOptions) -> None:
    checked_word("goal", options.goal, GOALS)
    checked_word("method", options.method, METHODS)
    checked_batch(options.effective_batch, options.world_size)
    check_task(options.task)
    if options.gpu is not None or options.budget is not None:
        checked_allow(options.allow, options.method, read_gpu(options.gpu or options.budget, options.budget))
    for name in ("column", "tokenizer"):
        if options.data is None and getattr(options, name) is not None:
            raise ValueError(
                f"{name}={getattr(options, name)!r} is for a data file, and there is none; expected both. "
                "Pass --data FILE"
            )
    find_config(options.model)


def _lengths(options: PlanOptions, data: Path) -> NDArray[np.int32]:
    """Return the lengths of ``--data``; as in ``plan``, no row is cut unless ``--seq-len`` or ``--allow`` says so."""
    from hf_memopt.cli.data_length import lengths_of_data

    return lengths_of_data(options.model, data, options.column, options.tokenizer, options.task)[1]
