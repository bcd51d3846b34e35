"""The options of ``hf-memopt estimate``, ``plan``, ``measure`` and ``report``.

What a command does is in its ``..._command`` module.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_memopt.cli.command import flags_of, typed_command

__all__ = ["EXAMPLES", "AsJson", "estimate", "measure", "plan", "report"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

MODEL, GPU, STEP, OUTPUT = "Model", "GPU", "Step", "Output"
"""The groups of options in the help of ``estimate``."""
EXAMPLES = """\b
Examples:
  hf-memopt estimate gpt2 -g "RTX 3060 12GB"
  hf-memopt estimate Qwen/Qwen2.5-1.5B -b 4 -g T4 --lora 16 --load-in nf4
  hf-memopt estimate bert-large-uncased --data train.jsonl --preset 8gb-gpu
  hf-memopt estimate Llama-3.2-1B -g "RTX 4060" --compare --plot ladder.png"""


def _option(group: str, metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=group, show_default=False, **settings)


def _list_models(wanted: bool) -> None:
    if wanted:
        from hf_memopt.memory.models.known import known_models

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
        Path | None, _option(STEP, "FILE", "Take --seq-len from the rows of a file: 99 % of them are not longer.")
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
    offload: Annotated[
        bool | None, _option(STEP, None, "Keep shards and optimizer states in host memory between uses.")
    ] = None,
    eval_batch_size: Annotated[
        int | None, _option(STEP, "N", "Also simulate an evaluation with batches of this size.", min=1)
    ] = None,
    compare: Annotated[bool, _option(OUTPUT, None, "Compare ladders of techniques.", "--compare")] = False,
    plot: Annotated[
        Path | None, _option(OUTPUT, "FILE", "Also write a picture: a name that ends in .png, .svg or .pdf.")
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
    from rich.console import Console

    from hf_memopt.cli.estimate_command import EstimateOptions, run_estimate

    # each parameter above that is not handled here is a field of the options
    options = EstimateOptions(**{item.name: context.params[item.name] for item in fields(EstimateOptions)})
    flags = flags_of(context.command.params)
    raise typer.Exit(run_estimate(options, Console(), Console(stderr=True), flags))


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A well-known name, a folder with config.json, or an id on the hub.")],
    gpu: Annotated[
        str | None, typer.Option("-g", "--gpu", help="A name such as 'RTX 3060 12GB', or a size such as 8GB.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Use no more of it than this, such as 6GB.")] = None,
    data: Annotated[Path | None, typer.Option(help="Plan for the rows of this file.")] = None,
    column: Annotated[str | None, typer.Option(help="The column of token ids or texts of --data.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Counts the tokens of texts: a folder or a name.")] = None,
    seq_len: Annotated[int | None, typer.Option("-s", "--seq-len", min=1, help="Tokens where rows are cut.")] = None,
    effective_batch: Annotated[int, typer.Option(min=1, max=10**5, help="Examples of an optimizer step.")] = 32,
    goal: Annotated[str, typer.Option(help="speed, memory or longest (rows).")] = "speed",
    method: Annotated[str, typer.Option(help="auto (full, else LoRA, else QLoRA), full, lora or qlora.")] = "auto",
    allow: Annotated[
        list[str] | None,
        typer.Option(help="What may be changed: release_clipping, bf16_weights, freeze, shorter. Repeatable."),
    ] = None,
    world_size: Annotated[
        int, typer.Option("--gpus", "--world-size", min=1, help="GPUs of one computer that train together.")
    ] = 1,
    strategy: Annotated[
        str, typer.Option(help="How they share a step: auto (ddp, else fsdp2), ddp, fsdp2, zero2 or zero3.")
    ] = "auto",
    task: Annotated[str | None, typer.Option(help="The head to build; the usual one by default.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Correct it by real steps on the GPU: a file of hf-memopt measure.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the training script and the recipe to this folder.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one HTML file with pictures: a name in .html.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files that are written.")] = False,
    json_output: AsJson = False,
) -> None:
    """Find the fastest set-up that fits a GPU.

    Exit code 0 if one fits, 1 if none does, 2 if it cannot be planned.
    """
    from rich.console import Console

    from hf_memopt.cli.plan_command import PlanOptions, run_plan

    options = PlanOptions(**{item.name: context.params[item.name] for item in fields(PlanOptions)})
    made_by = typed_command(context, without=("write", "report", "force", "json_output"))
    raise typer.Exit(run_plan(options, Console(), Console(stderr=True), made_by))


def report(
    path: Annotated[Path, typer.Argument(help="The JSON that `hf-memopt plan --json` wrote.", metavar="PLAN.JSON")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The HTML file; beside the JSON by default.", metavar="FILE")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Make one HTML file with pictures of a plan's JSON.

    It needs no network, and neither the model nor the data of the plan. With --report, plan adds to its JSON which
    batches and lengths fit, the timeline, and what each choice costs.
    """
    from hf_memopt.reports.plan_file import read_plan_file
    from hf_memopt.reports.plan_page import check_page, write_page

    told = read_plan_file(path)
    page = path.with_suffix(".html") if output is None else output
    check_page(page, force=force)
    write_page(told, page)
    typer.echo(f"Report: {page}")


def measure(
    script: Annotated[Path, typer.Argument(help="A Python script that trains with the stock Trainer.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments, after --.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=10**4, help="Optimizer steps to time.")] = 10,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write JSON here, for plan.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --output.")] = False,
    json_output: AsJson = False,
) -> None:
    """Measure a few real steps of a script beside their prediction.

    The script runs up to its first Trainer.train() and ends there. Exit code 0 if its steps fit, 1 if memory ran out, 2
    if it cannot be measured.
    """
    from rich.console import Console

    from hf_memopt.cli.measure_command import MeasureOptions, run_measure

    options = MeasureOptions(script, tuple(arguments or ()), steps, output, force, json_output)
    raise typer.Exit(run_measure(options, Console()))
