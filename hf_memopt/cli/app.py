"""The command line: ``hf-memopt demo | presets | lengths | estimate | doctor``, or ``python -m hf_memopt ...``.

Exit code 2 and one line on standard error report an invalid input, and a bug of the package too; with
``HF_MEMOPT_DEBUG=1`` the traceback is shown instead. 0 and 1 are results of the commands.

Each command imports what it needs inside its function, torch and transformers last, so that ``--help``, the tables and
the checks of the options answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Prints the errors of all commands in one line; typer itself reports invalid options and interrupts."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except Exception as error:
            if os.environ.get("HF_MEMOPT_DEBUG"):
                raise
            typer.echo(_in_one_line(error), err=True)
            sys.exit(2)


def _in_one_line(error: Exception) -> str:
    from hf_memopt.errors import MissingExtraError

    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, MissingExtraError)):
        return text
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {text}"
    return (
        f"hf-memopt failed ({type(error).__name__}: {text}), which is a bug in hf-memopt; please report it. "
        "Set HF_MEMOPT_DEBUG=1 for the traceback"
    )


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's tables cut the names of options off at 80 columns
    help="Train transformers on the GPU you have, with the stock Hugging Face Trainer.",
)

LARGEST = 2**31 - 1  # the product of two such counts still fits into numpy's 64-bit integers

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        from hf_memopt import __version__

        typer.echo(f"hf-memopt {__version__}")
        raise typer.Exit


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")] = Path("hf-memopt-demo"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training texts.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the data order.")] = 0,
    max_train: Annotated[int | None, typer.Option(min=1, help="Train on the first N texts only.")] = None,
) -> None:
    """Compare training set-ups on real text.

    Trains one small BERT on the standard library's docstrings four ways: naive, stock at its best, hf_memopt, and
    hf_memopt for a 4 GB GPU.
    """
    from hf_memopt.demo.run import run_demo

    run_demo(output, json_file=json_file, epochs=epochs, seed=seed, max_train=max_train)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="The preset to explain, with the reason for every choice.")] = None,
    json_output: AsJson = False,
) -> None:
    """List the presets, or explain one."""
    from rich.console import Console

    from hf_memopt.cli.progress import spinner
    from hf_memopt.recipes.presets import PRESETS, recipe

    if name is None:
        if json_output:
            import json

            typer.echo(json.dumps({key: json.loads(value.to_json()) for key, value in PRESETS.items()}, indent=2))
        else:
            _print_presets()
        return
    with spinner("looking at this machine", Console(stderr=True), shown=name == "auto" and not json_output):
        chosen = recipe(name)
    typer.echo(chosen.to_json() if json_output else _wrapped(str(chosen), Console()))


def _wrapped(text: str, console: Console) -> str:
    """Return lines that fit a terminal, continued with an indent; unchanged where standard output is not a terminal."""
    if not console.is_terminal:
        return text
    return "\n".join(fill(line, console.width, subsequent_indent=" " * 6) for line in text.splitlines())


def _print_presets() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from hf_memopt.recipes.presets import PRESETS, preset_rows

    rows = preset_rows(PRESETS)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    folded = {"eval batch": "eval\nbatch", "checkpointing": "check-\npointing"}
    for heading in rows[0]:
        table.add_column(folded.get(heading, heading), no_wrap=heading != "meant for", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.print(table)
    console.print("batch: examples x accumulation steps. Every choice with its reason: hf-memopt presets 4gb-gpu")


@app.command()
def lengths(
    path: Annotated[Path, typer.Argument(help="A Parquet, Arrow, JSON Lines or CSV file, or a folder of them.")],
    column: Annotated[
        str | None, typer.Option(help="The column of token ids or texts; input_ids or text by default.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Counts the tokens of texts: a folder or a name on the Hub.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST, help="Examples per batch.")] = 32,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Padded tokens per batch; suggested by default.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="Truncate longer examples to it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write a picture to this PNG file.")] = None,
    json_output: AsJson = False,
) -> None:
    """Show what padding wastes on a data file.

    How long its examples are, what each way of padding wastes, and what to set.
    """
    if plot is not None:
        from hf_memopt.plotting import check_picture

        check_picture(plot, purpose="the picture of a padding report")
    from hf_memopt.batching.padding_costs.data_files import file_lengths
    from hf_memopt.batching.padding_costs.figures import padding_report
    from hf_memopt.batching.padding_costs.output import print_report

    found = file_lengths(path, column=column, tokenizer=tokenizer)
    report = padding_report(
        found.lengths, batch_size=batch_size, max_tokens=max_tokens, max_length=max_length, unit=found.unit
    )
    if plot is not None:
        report.plot(plot)
    if json_output:
        import json

        typer.echo(json.dumps({"path": str(path), **found.as_dict(), **report.as_dict()}, indent=2))
        return
    from rich.console import Console

    typer.echo(found.heading(path))
    print_report(report, Console())
    if plot is not None:
        typer.echo(f"Picture: {plot}")


def _list_models(wanted: bool) -> None:
    if wanted:
        from hf_memopt.memory.models.known import known_models

        for name in known_models():
            typer.echo(name)
        raise typer.Exit


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="A well-known name, a folder with config.json, or a name on the Hub.")],
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Examples of one forward pass; the preset's or 8 by default, 32 with --compare."),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a row, padding included.")] = None,
    gpu: Annotated[str | None, typer.Option(help='A GPU, such as "RTX 3050 4GB"; the current one by default.')] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU that is not in the table, such as 4GiB.")
    ] = None,
    compute_capability: Annotated[str | None, typer.Option(help="Compute capability of that GPU, such as 7.5.")] = None,
    preset: Annotated[str | None, typer.Option(help="Start from a preset; the other options override it.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, tf32, bf16 or fp16.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="The dtype the weights are loaded in: float32, bf16 or fp16.")
    ] = None,
    load_in: Annotated[str | None, typer.Option(help="Quantise the weights: nf4 or int8; needs --lora.")] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="Train LoRA adapters of this rank, 16 for example.")] = None,
    optim: Annotated[str | None, typer.Option(help="An optimizer, by its name in TrainingArguments.")] = None,
    checkpointing: Annotated[bool | None, typer.Option(help="Recompute activations instead of keeping them.")] = None,
    gradient_accumulation_steps: Annotated[
        int | None, typer.Option(min=1, help="Accumulation steps per optimizer step.")
    ] = None,
    freeze: Annotated[list[str] | None, typer.Option(help="A pattern for hf_memopt.freeze; may be repeated.")] = None,
    attn: Annotated[str | None, typer.Option(help="Attention: sdpa, eager or flash_attention_2.")] = None,
    task: Annotated[str | None, typer.Option(help="The model's head, such as causal-lm.")] = None,
    eval_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Also simulate an evaluation with batches of this size.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write a picture of the timeline to this PNG file.")] = None,
    json_output: AsJson = False,
    compare: Annotated[bool, typer.Option("--compare", help="Compare ladders of techniques.")] = False,
    list_models: Annotated[
        bool,
        typer.Option(
            "--list-models", callback=_list_models, is_eager=True, help="Print the well-known names and stop."
        ),
    ] = False,
) -> None:
    """Predict the memory of a training step.

    Exit code 0 if it fits or no GPU is known, 1 if it does not fit, 2 on errors.
    """
    from rich.console import Console

    from hf_memopt.cli.estimate_command import EstimateOptions, run_estimate

    options = EstimateOptions(
        model,
        batch_size=batch_size,
        seq_len=seq_len,
        gpu=gpu,
        gpu_memory=gpu_memory,
        compute_capability=compute_capability,
        preset=preset,
        precision=precision,
        weights=weights,
        load_in=load_in,
        lora=lora,
        optim=optim,
        checkpointing=checkpointing,
        gradient_accumulation_steps=gradient_accumulation_steps,
        freeze=tuple(freeze or ()),
        attn=attn,
        task=task,
        eval_batch_size=eval_batch_size,
        plot=plot,
        json_output=json_output,
        compare=compare,
    )
    raise typer.Exit(run_estimate(options, Console(), Console(stderr=True)))


@app.command()
def doctor(json_output: AsJson = False) -> None:
    """Check this machine for what training needs.

    Exit code 0 if nothing would fail, 1 otherwise.
    """
    from rich.console import Console

    from hf_memopt.cli.progress import spinner

    with spinner("looking at this machine", Console(stderr=True), shown=not json_output):
        from hf_memopt.cli.doctor import examine, findings_table

        findings = examine()
    if json_output:
        import json

        typer.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        Console().print(findings_table(findings))
    raise typer.Exit(int(any(finding.level == "error" for finding in findings)))


def main() -> None:
    """Run the command line."""
    app(prog_name="hf-memopt")
