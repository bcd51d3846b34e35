"""The command line: ``hf-memopt demo | presets | lengths | estimate | plan | measure | report | doctor``.

``python -m hf_memopt ...`` does the same.

Exit code 2 and one line on standard error report an invalid input, and a bug of the package too; with
``HF_MEMOPT_DEBUG=1`` the traceback is shown instead. 0 and 1 are results of the commands.

Each command imports what it needs inside its function, torch and transformers last, so that ``--help``, the tables and
the checks of the options answer at once.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import warnings
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hf_memopt.cli.command import BEFORE, EXAMPLES, MACHINE, TRYING_OUT, Command
from hf_memopt.cli.model_commands import AsJson, estimate, measure, plan, report
from hf_memopt.errors import MissingExtraError, reason
from hf_memopt.notices import PrintableRecord, printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Prints the errors of all commands in one line, and lists the commands in groups.

    typer itself words invalid options.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # which returns exit codes, and raises what it would print
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}) or 0)
        except Exception as error:
            text, show = io.StringIO(), getattr(error, "show", None)
            if show is not None:  # typer's own
                show(text)
            elif os.environ.get("HF_MEMOPT_DEBUG"):
                raise
            else:
                text.write(f"{' '.join(_message(error).split())}\n")
            typer.echo(printable(text.getvalue()), err=True, nl=False)
            sys.exit(2)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (BEFORE, MACHINE, TRYING_OUT)}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None) or BEFORE
            groups[heading].append((name, command.get_short_help_str(formatter.width)))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(COMMAND_COLUMNS), text) for name, text in rows])


def _message(error: Exception) -> str:
    if isinstance(error, (ValueError, MissingExtraError)):
        return str(error)
    if isinstance(error, OSError):
        return reason(error)
    if isinstance(error, MemoryError):
        return (
            f"the memory of this computer ran out ({reason(error)}); expected enough for data and model. Close other "
            "programs, or take a smaller file or model"
        )
    return (
        f"hf-memopt failed ({reason(error)}), which is a bug in hf-memopt; please report it. "
        "Set HF_MEMOPT_DEBUG=1 for the traceback"
    )


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # see Command
    help="Train transformers on the GPU you have, with the stock Hugging Face Trainer.",
    epilog=EXAMPLES[""],
)

COMMAND_COLUMNS = 8  # of the longest name
LARGEST = 2**31 - 1  # the product of two such counts still fits into numpy's 64-bit integers
LARGEST_SEED = 2**32 - 1  # that numpy takes
DATA, BATCHES, OUTPUT = "Data", "Batches", "Output"
"""The groups of options in the help of ``lengths``."""


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        from hf_memopt import __version__

        typer.echo(f"hf-memopt {__version__}")
        raise typer.Exit


@app.command(cls=Command, rich_help_panel=TRYING_OUT, epilog=EXAMPLES["demo"])
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the trained model.")] = Path(
        "hf-memopt-demo"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")
    ] = None,
    epochs: Annotated[
        int, typer.Option("-e", "--epochs", metavar="N", min=1, help="Passes over the training texts.")
    ] = 1,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Seed of the weights and the data order.")
    ] = 0,
    max_train: Annotated[
        int | None, typer.Option("-n", "--max-train", metavar="N", min=1, help="Train on the first N texts only.")
    ] = None,
) -> None:
    """Compare training set-ups on real text.

    Trains one small BERT on the standard library's docstrings four ways: naive, stock at its best, hf_memopt, and
    hf_memopt for a 4 GB GPU.
    """
    from hf_memopt.demo.run import run_demo

    run_demo(output, json_file=json_file, epochs=epochs, seed=seed, max_train=max_train)


@app.command(cls=Command, rich_help_panel=BEFORE, epilog=EXAMPLES["presets"])
def presets(
    name: Annotated[str | None, typer.Argument(help="The preset to explain, with the reason for every choice.")] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="NAME", help="A set-up that holds this model, as plan chooses it."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("-s", "--seq-len", metavar="N", min=1, help="Tokens of the longest row of --model.")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """List the presets and which models fit with each, or explain one."""
    from hf_memopt.cli.progress import spinner
    from hf_memopt.recipes.presets import recipe
    from hf_memopt.terminal import Console

    if name is None and model is not None:
        raise ValueError(
            f"model={model!r} has no preset to begin with; expected both. "
            f"Call: hf-memopt presets 8gb-gpu --model {model}"
        )
    if name is None:
        from hf_memopt.cli.preset_tables import presets_json, print_presets

        if json_output:
            Console().out(presets_json(), highlight=False)
        else:
            print_presets(Console())
        return
    what = "looking at this machine" if model is None else f"estimating {model}"
    with spinner(what, Console(stderr=True), shown=(name == "auto" or model is not None) and not json_output):
        chosen = recipe(name, model, seq_len=seq_len)
    console = Console()
    console.out(chosen.to_json() if json_output else _wrapped(str(chosen), console), highlight=False)


def _wrapped(text: str, console: Console) -> str:
    """Return lines that fit a terminal, continued with an indent; unchanged where standard output is not a terminal."""
    if not console.is_terminal:
        return text
    wrapped = (
        fill(line, console.width, subsequent_indent=" " * 6, break_on_hyphens=False) for line in text.splitlines()
    )
    return "\n".join(wrapped)


@app.command(cls=Command, rich_help_panel=BEFORE, epilog=EXAMPLES["lengths"])
def lengths(
    path: Annotated[
        Path,
        typer.Argument(
            help="A Parquet, Arrow, JSON Lines or CSV file, or a folder of them.",
            metavar="FILE",
            rich_help_panel=DATA,
        ),
    ],
    column: Annotated[
        str | None,
        typer.Option(
            "-c",
            "--column",
            metavar="NAME",
            help="The column of token ids or texts; input_ids or text by default.",
            rich_help_panel=DATA,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--tokenizer",
            metavar="NAME",
            help="Counts the tokens of texts: a folder or a name on the Hub.",
            rich_help_panel=DATA,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "-b",
            "--batch-size",
            metavar="N",
            min=1,
            max=LARGEST,
            help="Examples per batch.",
            rich_help_panel=BATCHES,
        ),
    ] = 32,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=LARGEST,
            help="Padded tokens per batch; suggested by default.",
            rich_help_panel=BATCHES,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=LARGEST, help="Truncate longer examples to it.", rich_help_panel=BATCHES),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "-p",
            "--plot",
            metavar="FILE",
            help="Also write a picture: .png, .svg or .pdf.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT)
    ] = False,
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
    from hf_memopt.terminal import Console

    console = Console()
    if json_output:
        import json

        figures = {"path": str(path), **found.as_dict(), **report.as_dict()}
        console.out(json.dumps(figures, indent=2), highlight=False)
        return
    console.out(_wrapped(found.heading(path), console), highlight=False)
    print_report(report, console)
    if plot is not None:
        console.out(f"Picture: {plot}", highlight=False)


app.command(cls=Command, rich_help_panel=BEFORE, epilog=EXAMPLES["estimate"])(estimate)
app.command(cls=Command, rich_help_panel=BEFORE, epilog=EXAMPLES["plan"])(plan)
app.command(cls=Command, rich_help_panel=BEFORE, epilog=EXAMPLES["report"])(report)
app.command(cls=Command, rich_help_panel=MACHINE, epilog=EXAMPLES["measure"])(measure)


@app.command(cls=Command, rich_help_panel=MACHINE, epilog=EXAMPLES["doctor"])
def doctor(
    json_output: AsJson = False,
) -> None:
    """Check this machine for what training needs.

    Exit code 0 if nothing would fail, 1 otherwise.
    """
    from hf_memopt.cli.progress import spinner
    from hf_memopt.terminal import Console

    with spinner("looking at this machine", Console(stderr=True), shown=not json_output):
        from hf_memopt.cli.doctor import examine, print_findings

        findings = examine()
    if json_output:
        import json

        Console().out(json.dumps([finding.as_dict() for finding in findings], indent=2), highlight=False)
    else:
        print_findings(findings, Console())
    raise typer.Exit(int(any(finding.level == "error" for finding in findings)))


def main() -> None:
    """Run the command line."""
    # importing torch and transformers makes a million objects that stay; looking through them takes a second or more
    gc.set_threshold(100_000, 20, 100)
    # bitsandbytes recommends a kernel for CPUs whenever it is imported on a recent one; no command needs it
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    logging.setLogRecordFactory(PrintableRecord)  # for what other packages say of a model or a file
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: printable(formatted(*args, **kwargs))
    app(prog_name="hf-memopt")
