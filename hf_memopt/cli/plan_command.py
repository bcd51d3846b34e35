"""What ``hf-memopt plan`` does: check the options, then plan, print the table or JSON, and write the report.

The options are checked without importing torch or transformers, as those of ``estimate`` are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.command import EXIT_CODES, check_of_data, flags_of, in_flags, spinner, typed_command
from hf_memopt.memory.models import check_task, find_config
from hf_memopt.plain_data import check_word
from hf_memopt.recipes import launch_files
from hf_memopt.recipes.planning import GOALS, METHODS, check_strategy, checked_allow, checked_batch, read_gpu
from hf_memopt.recipes.planning.script import RowsFile, check_folder, check_splits
from hf_memopt.reports import check_page, named_measurement
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hf_memopt.cli.options import PlanOptions

AS_TYPED = (
    *("gpu", "budget", "os", "seq_len", "goal", "method", "world_size", "strategy", "task"),
    *("images", "image_size", "audio_seconds", "host_memory", "measured"),
)
"""The options that ``plan`` takes as they are."""


def run(options: PlanOptions, context: Any) -> int:
    """Print the plan, write what is asked for, and return the exit code of the verdict."""
    console, errors = Console(), Console(stderr=True)
    words = tuple(word for text in options.allow or () for word in text.split(","))
    _check(options, words)
    with spinner(f"planning {options.model}", errors, shown=not options.json_output) as announce:
        from hf_memopt.recipes.planning import plan, print_plan

        lengths = None if options.data is None else _lengths(options, options.data)
        found = plan(
            options.model,
            lengths=lengths,
            effective_batch_size=options.effective_batch,
            allow=words,
            announce=announce,
            **{name: getattr(options, name) for name in AS_TYPED},
        )
        rows = None
        if options.data is not None:
            from hf_memopt.batching import data_file

            rows = RowsFile(options.data, options.column, options.tokenizer)
            has_tokenizer = options.tokenizer is not None
            file = data_file(options.data, column=options.column, has_tokenizer=has_tokenizer, task=found.task)
            unread = f"columns of texts in {options.data.name} that are not read: {', '.join(file.unread)}"
            found = replace(found, notes=(*found.notes, *([unread] if file.unread else [])))
        made_by = typed_command(context, without=("write", "report", "plot", "force", "json_output"))
        found = replace(found, command=made_by, rows=rows)
        if options.report is not None:
            found.report(options.report, force=options.force)
        if options.plot is not None:
            found.plot(options.plot)
    if options.json_output:
        console.out(found.to_json(figures=True), highlight=False)
    else:
        flags = flags_of(context.command.params)
        print_plan(found, console, lambda text: in_flags(text, flags))
    said = errors if options.json_output else console  # standard output is JSON alone
    if options.write is not None:
        written = f"Nothing was written to {options.write}: no set-up fits."
        said.out(str(found.write(options.write, options.force)) if found.fits else written, highlight=False)
    if options.report is not None:
        said.out(f"Report: {options.report}", highlight=False)
    if options.plot is not None:
        said.out(f"Picture: {options.plot}", highlight=False)
    return EXIT_CODES["over" if found.chosen is None else found.chosen.verdict]


def _check(options: PlanOptions, words: Sequence[str]) -> None:
    check_word("goal", options.goal, GOALS)
    check_word("method", options.method, METHODS)
    checked_batch(options.effective_batch, options.world_size)
    check_strategy(options.strategy, options.world_size, options.goal)
    check_task(options.task)
    if options.measured is not None:
        named_measurement(options.measured)
    if options.gpu is not None:
        checked_allow(words, options.method, read_gpu(options.gpu, options.budget, options.os))
    check_of_data(options)
    if options.write is not None:
        beside = launch_files(options.strategy) if options.world_size > 1 else ()
        check_folder(options.write, force=options.force, beside=beside)
        if options.data is not None:
            check_splits(options.data, options.column)
    if options.report is not None:
        check_page(options.report, force=options.force)
    if options.force and options.write is None and options.report is None:
        raise ValueError(
            "force=True has nothing to replace: no file is written; expected --write or --report. Pass --write DIR"
        )
    find_config(options.model)
    if options.measured is None or options.gpu is not None:
        read_gpu(options.gpu, options.budget, options.os)  # this machine's, for which torch is needed


def _lengths(options: PlanOptions, data: Path) -> NDArray[np.int32]:
    """Return the lengths of ``--data``; as in ``plan``, no row is cut unless ``--seq-len`` or ``--allow`` says so."""
    from hf_memopt.cli.lengths_command import lengths_of_data

    return lengths_of_data(options.model, data, options.column, options.tokenizer, options.task)[1]
