"""The options of ``hf-memopt estimate``, ``plan``, ``measure`` and ``report``.

What a command does is in its ``..._command`` module.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_memopt.cli.command import flags_of, typed_command

__all__ = ["AsJson", "estimate", "measure", "plan", "report"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

MODEL, DATA, GPU, STEP, CHANGE, OUTPUT = "Model", "Model and data", "GPU", "Step", "What may change", "Output"
"""The groups of options in the help of ``estimate`` and ``plan``."""


def _option(group: str, metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=group, show_default=False, **settings)


def _list_models(wanted: bool) -> None:
    if wanted:
        from hf_memopt.memory.models.config_files import known_models

        for name in known_models():
            typer.echo(name)
        raise typer.Exit


def estimate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A well-known name, a folder with config.json, or a name on the Hub.",
            metavar="MODEL",
            rich_help_panel="Model",
        ),
    ],
    task: Annotated[str | None, _option(MODEL, "NAME", "The model's head, such as causal-lm.")] = None,
    attn: Annotated[str | None, _option(MODEL, "NAME", "Attention: sdpa, eager or flash_attention_2.")] = None,
    weights: Annotated[
        str | None, _option(MODEL, "DTYPE", "Of the weights as loaded: float32, bf16 or fp16; float32 by default.")
    ] = None,
    load_in: Annotated[str | None, _option(MODEL, "KIND", "Quantised weights: nf4 or int8.")] = None,
    lora: Annotated[int | None, _option(MODEL, "RANK", "Train LoRA adapters of this rank alone.", min=1)] = None,
    freeze: Annotated[
        list[str] | None, _option(MODEL, "PATTERN", "A pattern for hf_memopt.freeze; may be repeated.")
    ] = None,
    gpu: Annotated[
        str | None, _option(GPU, "NAME", 'Such as "RTX 3050 4GB"; the current one by default.', "-g", "--gpu")
    ] = None,
    gpu_memory: Annotated[str | None, _option(GPU, "SIZE", "Of a GPU that is not in the table, such as 4GiB.")] = None,
    compute_capability: Annotated[str | None, _option(GPU, "X.Y", "Of that GPU, such as 7.5.")] = None,
    batch_size: Annotated[
        int | None,
        _option(
            STEP,
            "N",
            "Examples of one forward pass; the preset's or 8 by default, 32 with --compare.",
            "-b",
            "--batch-size",
            min=1,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        _option(
            STEP,
            "N",
            "Tokens of a row, padding included; 512 by default, or what the model takes.",
            "-s",
            "--seq-len",
            min=1,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        _option(STEP, "FILE", "Take --seq-len from the rows of a file: 99 % of them are not longer.", "-d", "--data"),
    ] = None,
    column: Annotated[str | None, _option(STEP, "NAME", "The column of --data; input_ids or text by default.")] = None,
    tokenizer: Annotated[
        str | None, _option(STEP, "NAME", "Counts the tokens of texts in --data; the model's by default.")
    ] = None,
    gradient_accumulation_steps: Annotated[
        int | None,
        _option(
            STEP,
            "N",
            "Accumulation steps per optimizer step.",
            "--grad-accum",
            "--gradient-accumulation-steps",
            min=1,
        ),
    ] = None,
    preset: Annotated[str | None, _option(STEP, "NAME", "Start from a preset; the other options override it.")] = None,
    precision: Annotated[str | None, _option(STEP, "NAME", "auto, fp32, tf32, bf16 or fp16.")] = None,
    optim: Annotated[str | None, _option(STEP, "NAME", "An optimizer, by its name in TrainingArguments.")] = None,
    checkpointing: Annotated[bool | None, _option(STEP, None, "Recompute activations instead of keeping them.")] = None,
    autocast_cache: Annotated[
        bool | None, _option(STEP, None, "Keep 16-bit copies of the weights through a forward pass.")
    ] = None,
    expandable_segments: Annotated[
        bool | None, _option(STEP, None, "Of torch's allocator; see hf_memopt.use_expandable_segments.")
    ] = None,
    fused_cross_entropy: Annotated[
        bool | None, _option(STEP, None, "Compute a language model's loss without its logits.")
    ] = None,
    sparse_tied_embedding: Annotated[
        bool | None, _option(STEP, None, "Keep no second copy of a tied embedding's gradient.")
    ] = None,
    gradient_release: Annotated[
        bool | None, _option(STEP, None, "Step within the backward pass, with --max-grad-norm 0.")
    ] = None,
    max_grad_norm: Annotated[
        float | None, _option(STEP, "NORM", "Clip gradients at it; 1 by default, 0 for no clipping.", min=0)
    ] = None,
    rounding: Annotated[
        str | None, _option(STEP, "KIND", "Of updates of bf16 weights: nearest, stochastic or kahan.")
    ] = None,
    world_size: Annotated[
        int | None, _option(STEP, "N", "GPUs that train together; the estimate is of one of them.", min=1)
    ] = None,
    strategy: Annotated[
        str | None,
        _option(STEP, "NAME", "With --world-size: ddp (whole models), fsdp2, zero2, zero3 (sharded) or auto."),
    ] = None,
    offload_params: Annotated[
        bool | None,
        _option(STEP, None, "Keep shards and optimizer states in host memory between uses.", "--offload/--no-offload"),
    ] = None,
    eval_batch_size: Annotated[
        int | None, _option(STEP, "N", "Also simulate an evaluation with batches of this size.", min=1)
    ] = None,
    compare: Annotated[
        bool, _option(OUTPUT, None, "Compare set-ups, each with the most rows that fit.", "--compare")
    ] = False,
    plot: Annotated[
        Path | None, _option(OUTPUT, "FILE", "Also write a picture: .png, .svg or .pdf.", "-p", "--plot")
    ] = None,
    json_output: Annotated[bool, _option(OUTPUT, None, "Print JSON instead of a table.", "--json")] = False,
    list_models: Annotated[
        bool,
        typer.Option(
            "--list-models",
            callback=_list_models,
            is_eager=True,
            help="Print the well-known names and stop.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Predict the memory of a training step, and what makes it fit.

    Exit code 0 if it fits or no GPU is known, 1 if it does not fit, 2 on errors.
    """
    given = locals()  # typer before 0.29 has paths as text in context.params
    from hf_memopt.cli.estimate_command import EstimateOptions, run_estimate
    from hf_memopt.terminal import Console

    # each parameter above that is not handled here is a field of the options
    options = EstimateOptions(**{item.name: given[item.name] for item in fields(EstimateOptions)})
    flags = flags_of(context.command.params)
    raise typer.Exit(run_estimate(options, Console(), Console(stderr=True), flags))


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A well-known name, a folder with config.json, or a name on the Hub.",
            metavar="MODEL",
            rich_help_panel=DATA,
        ),
    ],
    data: Annotated[
        Path | None, _option(DATA, "FILE", "Plan for the rows of a file, and read them in --write.", "-d", "--data")
    ] = None,
    column: Annotated[str | None, _option(DATA, "NAME", "The column of --data; input_ids or text by default.")] = None,
    tokenizer: Annotated[
        str | None, _option(DATA, "NAME", "Counts the tokens of texts in --data; the model's by default.")
    ] = None,
    seq_len: Annotated[
        int | None,
        _option(
            DATA,
            "N",
            "Tokens where rows are cut; the longest row by default, 512 without --data.",
            "-s",
            "--seq-len",
            min=1,
        ),
    ] = None,
    effective_batch: Annotated[
        int,
        _option(DATA, "N", "Examples of an optimizer step, which stays as it is; 32 by default.", min=1, max=10**5),
    ] = 32,
    task: Annotated[str | None, _option(DATA, "NAME", "The model's head, such as causal-lm.")] = None,
    gpu: Annotated[
        str | None,
        _option(GPU, "NAME", 'Such as "RTX 3060 12GB", or a size: 8GB; the current one by default.', "-g", "--gpu"),
    ] = None,
    budget: Annotated[str | None, _option(GPU, "SIZE", "Use no more of it than this, such as 6GB.")] = None,
    world_size: Annotated[
        int, _option(GPU, "N", "GPUs of one computer that train together.", "--gpus", "--world-size", min=1)
    ] = 1,
    strategy: Annotated[
        str, _option(GPU, "NAME", "How they share a step: auto (ddp, else fsdp2), ddp, fsdp2, zero2 or zero3.")
    ] = "auto",
    measured: Annotated[
        Path | None, _option(GPU, "FILE", "Correct the plan by real steps, as hf-memopt measure wrote them.")
    ] = None,
    goal: Annotated[str, _option(CHANGE, "NAME", "speed, memory or longest (rows); speed by default.")] = "speed",
    method: Annotated[
        str, _option(CHANGE, "NAME", "full, lora, qlora, or auto: full if it fits, else LoRA, else QLoRA.")
    ] = "auto",
    allow: Annotated[
        list[str] | None,
        _option(CHANGE, "WORD", "release_clipping, bf16_weights, freeze or shorter (rows); may be repeated."),
    ] = None,
    write: Annotated[
        Path | None, _option(OUTPUT, "DIR", "Write train.py and recipe.json to this folder.", "-w", "--write")
    ] = None,
    report: Annotated[Path | None, _option(OUTPUT, "FILE", "Also write one HTML file with pictures.")] = None,
    plot: Annotated[
        Path | None, _option(OUTPUT, "FILE", "Also write a picture: .png, .svg or .pdf.", "-p", "--plot")
    ] = None,
    force: Annotated[bool, _option(OUTPUT, None, "Replace files that are there.", "--force")] = False,
    json_output: Annotated[bool, _option(OUTPUT, None, "Print JSON instead of a table.", "--json")] = False,
) -> None:
    """Find the fastest set-up that fits a GPU.

    Exit code 0 if one fits, 1 if none does, 2 if it cannot be planned.
    """
    given = locals()  # as for estimate
    from hf_memopt.cli.plan_command import PlanOptions, run_plan
    from hf_memopt.terminal import Console

    options = PlanOptions(**{item.name: given[item.name] for item in fields(PlanOptions)})
    made_by = typed_command(context, without=("write", "report", "plot", "force", "json_output"))
    flags = flags_of(context.command.params)
    raise typer.Exit(run_plan(options, Console(), Console(stderr=True), flags, made_by))


def report(
    path: Annotated[
        list[Path],
        typer.Argument(help="The output folder of a run, or JSON of plan, estimate or measure; one or two."),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The HTML file; of one beside its JSON.", metavar="FILE")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables, of two.")] = False,
) -> None:
    """Make one HTML file of a run or a plan, or tell what grew between two.

    One: a page with pictures, of the output folder of a run with a MemoryReportCallback, or of a plan's JSON. Two of a
    kind: what grew, by component and phase, as tables; with --output also as a page. No network is needed, and neither
    the model nor the data.
    """
    from hf_memopt.cli.report_command import run_report
    from hf_memopt.terminal import Console

    run_report(path, Console(), output=output, force=force, json_output=json_output)


def measure(
    script: Annotated[Path, typer.Argument(help="A Python script that trains with the stock Trainer.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments, after --.")] = None,
    steps: Annotated[
        int, typer.Option("-n", "--steps", metavar="N", min=1, max=10**4, help="Optimizer steps to time.")
    ] = 10,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write JSON here, for plan.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --output.")] = False,
    json_output: AsJson = False,
) -> None:
    """Measure a few real steps of a script beside their prediction.

    The script runs in a process of its own, up to its first Trainer.train(); nothing after it runs. Exit code 0 if its
    steps fit, 1 if memory ran out, 2 if it cannot be measured.
    """
    from hf_memopt.cli.measure_command import MeasureOptions, run_measure
    from hf_memopt.terminal import Console

    options = MeasureOptions(script, tuple(arguments or ()), steps, output, force, json_output)
    raise typer.Exit(run_measure(options, Console()))
