"""What ``hf-memopt estimate`` does: check the options, then estimate one set-up.

The options are checked without importing torch or transformers, so that a misspelt name is answered at once. Only the
name of an attention implementation and patterns of ``--freeze`` wait for the model's classes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.command import EXIT_CODES, check_of_data, flags_of, in_flags, one_gpu, rows_of, spinner
from hf_memopt.prediction.memory.models import checked_task, find_config
from hf_memopt.prediction.memory.optimizers import check_optimizer
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.prediction.recipes import largest_divisor, recipe
from hf_memopt.terminal import Console
from hf_memopt.training.devices import custom_gpu, find_gpu

if TYPE_CHECKING:
    from hf_memopt.cli.options import EstimateOptions
    from hf_memopt.prediction.memory import Estimate
    from hf_memopt.prediction.recipes import Recipe
    from hf_memopt.training.devices import Gpu

MOST = {"batch_size": 10**6, "seq_len": 10**6, "eval_batch_size": 10**6, "gradient_accumulation_steps": 10**4}
"""Limits within which an estimate takes seconds: sizes have 63 bits, and every accumulation step is simulated."""
DEFAULT_BATCH_SIZE = 8
OF_EVALUATION = {"eval_batches", "eval_accumulation_steps", "prediction_loss_only", "predict_with_generate"}


def run(options: EstimateOptions, context: Any) -> int:
    """Print the estimate and return the exit code."""
    errors, gpu = Console(stderr=True), _check(options)
    given = options
    options, notes = _with_length_of_data(options, errors)
    with spinner(f"simulating {options.model}", errors, shown=not options.json_output):
        from hf_memopt.prediction.memory import estimate
        from hf_memopt.prediction.memory.output import as_dict, draw, print_estimate

        chosen, batch_size, settings = _set_up(options)
        if options.task is not None:
            settings["task"] = options.task
        found = estimate(
            options.model, batch_size=batch_size, seq_len=options.seq_len, recipe=chosen, gpu=gpu, **settings
        )
        found = replace(found, notes=(*notes, *found.notes))
        if options.plot is not None:
            draw(found, options.plot)
    console = Console()
    if options.json_output:
        console.out(json.dumps(as_dict(found), indent=2), highlight=False)
        return EXIT_CODES[found.verdict]
    wording = partial(in_flags, flags=flags_of(context.command.params))
    print_estimate(found, console, wording, _plan_line(given, found), verbose=options.verbose)
    if options.plot is not None:
        console.out(f"Picture: {options.plot}", highlight=False)
    return EXIT_CODES[found.verdict]


def _plan_line(options: EstimateOptions, found: Estimate) -> str:
    """Return the command that looks for what fits: the same model, GPU, rows and examples of a step."""
    settings, shared = found.settings, ("images", "image_size", "audio_seconds")
    given = {
        "gpu": options.gpu[0] if options.gpu else options.gpu_memory,
        "task": options.task,
        "seq_len": options.seq_len,
        **{name: getattr(options, name) for name in ("data", "column", "tokenizer")},
        "effective_batch": found.batch_size * settings.gradient_accumulation_steps,
        **{name: value for name, value in options.settings.items() if name in shared},
    }
    from hf_memopt.prediction.memory.output import plan_line

    return plan_line(options.model, **given)


# ---- Checks, without torch ------------------------------------------------------------------------------------------


def _check(options: EstimateOptions) -> Gpu | None:
    """Return the GPU that the options name; None for the current one, if there is one."""
    counts = {"batch_size": options.batch_size, "seq_len": options.seq_len, **options.settings}
    for name, most in MOST.items():
        _check_count(name, counts.get(name) or 1, most)
    gpu = _read_gpu(one_gpu(options.gpu), options.gpu_memory, options.compute_capability)
    if options.data is not None and options.seq_len is not None:
        raise ValueError(
            f"data={str(options.data)!r}, seq_len={options.seq_len} are two lengths; expected one of them. "
            "Drop --data or --seq-len"
        )
    check_of_data(options)
    checked_task(options.task)
    if "optim" in options.settings:
        check_optimizer(options.settings["optim"])
    for name in OF_EVALUATION & options.settings.keys():
        if options.preset is None and "eval_batch_size" not in options.settings:
            raise ValueError(
                f"{name}={options.settings[name]!r} is of an evaluation, and none is simulated; expected its batch "
                "too. Pass --eval-batch-size 8"
            )
    if options.preset != "auto":  # which would import torch to look for a GPU
        chosen, _, settings = _set_up(options)
        (StepSettings() if chosen is None else chosen.step_settings()).replace(**settings)
    find_config(options.model)
    return gpu


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        option = name.replace("_", "-")
        raise ValueError(f"{name}={count} is too large to simulate; expected 1 to {most}. Pass --{option} 32")


def _read_gpu(name: str | None, memory: str | None, compute_capability: str | None) -> Gpu | None:
    """Return the GPU that the options name or describe; None where they do neither."""
    if memory is None and compute_capability is None:
        return None if name is None else find_gpu(name)
    if name is not None:
        raise ValueError(
            f"gpu={name!r}, gpu_memory={memory!r}, compute_capability={compute_capability!r} name a GPU twice; "
            f"expected a name, or memory and compute capability. Pass --gpu {name!r} alone"
        )
    if memory is None:
        raise ValueError(
            f"compute_capability={compute_capability!r} alone does not describe a GPU; expected its memory too. "
            f"Pass --gpu-memory 4GiB --compute-capability {compute_capability}"
        )
    return custom_gpu(memory, compute_capability)


def _set_up(options: EstimateOptions) -> tuple[Recipe | None, int, dict[str, Any]]:
    """Return the preset's recipe, the batch size and the fields of ``StepSettings`` that the options themselves set."""
    settings = dict(options.settings)
    if options.preset is None:
        return None, options.batch_size or DEFAULT_BATCH_SIZE, settings
    chosen = recipe(options.preset)
    if "freeze" in settings:
        settings["freeze"] = (*chosen.freeze, *settings["freeze"])  # beside what the preset freezes
    steps = settings.get("gradient_accumulation_steps")
    batch_size, settings["gradient_accumulation_steps"] = _cut(chosen, options.batch_size, steps)
    return chosen, batch_size, settings


def _cut(chosen: Recipe, batch_size: int | None, steps: int | None) -> tuple[int, int]:
    """Return batch size and accumulation steps; the recipe's effective batch stays unless both are given."""
    if batch_size is not None and steps is not None:
        return batch_size, steps
    effective = chosen.effective_batch_size
    name, part = ("gradient_accumulation_steps", steps) if batch_size is None else ("batch_size", batch_size)
    if part is None:
        name, part = "batch_size", largest_divisor(effective, chosen.per_device_train_batch_size)
    if effective % part:
        near = largest_divisor(effective, part)
        raise ValueError(
            f"{name}={part} does not divide the {effective} examples of a step of preset {chosen.name!r}; expected a "
            f"divisor. Pass --{name.replace('_', '-')} {near}, or both --batch-size and --gradient-accumulation-steps"
        )
    return (part, effective // part) if name == "batch_size" else (effective // part, part)


def _with_length_of_data(options: EstimateOptions, errors: Console) -> tuple[EstimateOptions, tuple[str, ...]]:
    """Return the options with the length that ``--data`` asks for, and the note about it."""
    if options.data is None:
        return options, ()
    with spinner(f"reading {options.data}", errors, shown=not options.json_output):
        from hf_memopt.cli.lengths_command import length_of_data, task_of_data

        rows = rows_of(options)
        task, said = task_of_data(options.model, rows, options.task)
        seq_len, note = length_of_data(options.model, rows, task)
        unread = rows.read(task).note
    return replace(options, seq_len=seq_len, task=task), tuple(filter(None, (note, said.rstrip("."), unread)))
