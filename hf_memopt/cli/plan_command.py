"""What ``hf-memopt plan`` does: check the options, then plan, print the table or JSON, and write the report.

The options are checked without importing torch or transformers, as those of ``estimate`` are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.command import EXIT_CODES, check_of_data, flags_of, in_flags, rows_of, spinner, typed_command
from hf_memopt.notices import quoted
from hf_memopt.plain_data import check_word
from hf_memopt.prediction.memory.models import checked_task, find_config
from hf_memopt.prediction.recipes.planning import GOALS, METHODS, checked_allow, read_gpu
from hf_memopt.prediction.recipes.planning.script import check_folder, check_splits
from hf_memopt.prediction.reports import check_page
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    from hf_memopt.cli.options import PlanOptions
    from hf_memopt.prediction.recipes.planning import Plan

AS_TYPED = ("budget", "os", "seq_len", "goal", "method", "images", "image_size", "audio_seconds", "host_memory")
"""The options that ``plan`` takes as they are."""


def run(options: PlanOptions, context: Any) -> int:
    """Print the plan, or those for several GPUs, write what is asked for, and return the exit code of the best one."""
    console, errors = Console(), Console(stderr=True)
    words = tuple(word for text in options.allow or () for word in text.split(","))
    _check(options, words)
    with spinner(f"planning {options.model}", errors, shown=not options.json_output) as announce:
        from hf_memopt.prediction.recipes.planning import print_plan, print_plans

        plans = _plans(options, words, context, announce)
        found = plans[0]  # the only one where a file is written
        if options.report is not None:
            found.report(options.report, force=options.force)
        if options.plot is not None:
            found.plot(options.plot)
        texts = [one.to_json(figures=len(plans) == 1) for one in plans] if options.json_output else []
    wording = partial(in_flags, flags=flags_of(context.command.params))
    if options.json_output:
        console.out(texts[0] if len(plans) == 1 else f"[{', '.join(texts)}]", highlight=False)
    elif len(plans) > 1:
        print_plans(plans, console, wording, verbose=options.verbose)
    else:
        print_plan(found, console, wording, verbose=options.verbose, is_written=options.write is not None)
    said = errors if options.json_output else console  # standard output is JSON alone
    if options.write is not None:
        written = f"Nothing was written to {options.write}: no set-up fits."
        said.out(str(found.write(options.write, options.force)) if found.fits else written, highlight=False)
    if options.report is not None:
        said.out(f"Report: {options.report}", highlight=False)
    if options.plot is not None:
        said.out(f"Picture: {options.plot}", highlight=False)
    verdicts = {"over" if one.chosen is None else one.chosen.verdict for one in plans}
    return next(EXIT_CODES[verdict] for verdict in ("fits", "tight", "over") if verdict in verdicts)


def _plans(options: PlanOptions, words: Sequence[str], context: Any, announce: Callable[[str], object]) -> list[Plan]:
    """Return the plan for each GPU; as in ``plan``, no row is cut unless ``--seq-len`` or ``--allow`` says so."""
    from hf_memopt.prediction.recipes.planning import plan

    task, said, lengths, rows, unread = checked_task(options.task), "", None, None, []
    if options.data is not None:
        from hf_memopt.cli.lengths_command import lengths_of_data, task_of_data

        rows = rows_of(options)
        task, said = task_of_data(options.model, rows, task)
        lengths = lengths_of_data(options.model, rows, task)[1]
        unread = [*filter(None, [rows.read(task).note])]
    given = {name: getattr(options, name) for name in AS_TYPED}
    typed = typed_command(context, without=("gpu", "write", "report", "plot", "force", "json_output", "verbose"))
    gpus: Sequence[str | None] = options.gpu or [None]
    plans: list[Plan] = []
    for gpu in gpus:
        found = plan(
            options.model,
            gpu=gpu,
            task=task,
            lengths=lengths,
            effective_batch_size=options.effective_batch,
            allow=words,
            announce=lambda text: announce(f"{len(plans) + 1} of {len(gpus)}: {text}" if gpus[1:] else text),
            **given,
        )
        command = typed if gpu is None else f"{typed} --gpu {quoted(gpu)}"
        plans.append(replace(found, notes=(*unread, *found.notes), command=command, rows=rows, task_note=said))
    return plans


def _check(options: PlanOptions, words: Sequence[str]) -> None:
    check_word("goal", options.goal, GOALS)
    check_word("method", options.method, METHODS)
    checked_task(options.task)
    gpus = options.gpu or []
    for gpu in gpus:
        checked_allow(words, options.method, read_gpu(gpu, options.budget, options.os))
    for name in ("write", "report", "plot"):
        if len(gpus) > 1 and (path := getattr(options, name)) is not None:
            several = ", ".join(f"gpu={gpu!r}" for gpu in gpus)
            raise ValueError(
                f"{several}, {name}={str(path)!r} contradict each other: a file is written of one plan; expected one "
                f"GPU. Pass gpu={gpus[0]!r}"
            )
    check_of_data(options)
    if options.write is not None:
        check_folder(options.write, force=options.force)
        if options.data is not None:
            check_splits(rows_of(options))
    if options.report is not None:
        check_page(options.report, force=options.force)
    find_config(options.model)
    if not gpus:
        read_gpu(None, options.budget, options.os)  # this machine's, for which torch is needed
