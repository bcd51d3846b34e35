"""The command line: ``hf-memopt gpus | presets | lengths | estimate | plan | rehearse | run``, ...

``python -m hf_memopt ...`` does the same.

Exit code 2, ``error:`` and ``hint:`` on standard error report an invalid input, and a bug of the package too; with
``HF_MEMOPT_DEBUG=1`` the traceback is shown instead. 0 and 1 are results of the commands.

Each command has a module of its own, which imports torch and transformers last, so that ``--help``, the tables and the
checks of the options answer at once.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import hf_memopt.cli.options as given
from hf_memopt.cli.command import BEFORE, MACHINE, Command, examples_of, function_of, print_error, spinner
from hf_memopt.errors import MissingExtraError, did_you_mean, reason
from hf_memopt.notices import PrintableRecord, printable, quoted
from hf_memopt.plain_data import check_word, packaged_rows
from hf_memopt.plotting import THEMES, check_picture, in_theme

GONE = {
    "demo": "expected a program in the checkout. Call: make demo, or python examples/demo",
    "measure": "expected 'rehearse'. Call: hf-memopt rehearse train.py",
}


class _Commands(TyperGroup):
    """Prints the errors of all commands in two lines, and lists the commands in groups."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a file under Windows has no bars in its encoding
        try:
            # which returns exit codes, and raises what it would print
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}) or 0)
        except Exception as error:
            is_usage = hasattr(error, "format_message")  # typer's own, of words that it cannot parse
            if os.environ.get("HF_MEMOPT_DEBUG") and not is_usage:
                raise
            print_error(_usage_message(error) if is_usage else _message(error))
            sys.exit(2)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in GONE:
            raise ValueError(f"{args[0]!r} was removed after 0.5.0; {GONE[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (BEFORE, MACHINE)}
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


def _usage_message(error: Any) -> str:
    """Return the message of an error of typer's parser, with what to do about it as its last sentence."""
    path = error.ctx.command_path if error.ctx else "hf-memopt"
    if hasattr(error, "possibilities"):
        return f"{error.message}. {_of_option(error.option_name, error.ctx) or f'See: {path} --help'}"
    said = str(error.format_message()).rstrip(".")
    cause: Any = error.__cause__
    if hasattr(cause, "errors"):  # pydantic's, by which typer reads numbers (seen in 0.29)
        least, most = error.param.min, error.param.max
        kind = "whole number" if "int" in cause.title else "number"
        range_of = "" if least is None else f" of {least} or more" if most is None else f" from {least} to {most}"
        option, value = max(error.param.opts, key=len), quoted(str(cause.errors()[0]["input"]))
        said = f"{option} {value} is invalid; expected a {kind}{range_of}"
    return said if said.endswith("?") else f"{said}. See: {path} --help"


def _of_option(option: str, context: Any) -> str:
    """Return the option that is meant, or the command that has it.

    ``other_options.csv`` has what other tools call an option, and what to pass instead; of several rows the first
    counts whose option the command has.
    """
    own = _names(context.command)
    for row in packaged_rows("hf_memopt.cli", "other_options.csv"):
        first = row["advice"].split()[0].rstrip(",")
        if option.strip("-").replace("_", "-") in row["options"].split() and (first in own or first[0] != "-"):
            return f"Pass {row['advice']}"
    commands = context.parent.command.commands if context.parent else {}
    others = [f"hf-memopt {name}" for name, command in commands.items() if option in _names(command)]
    listed = " and ".join([*([", ".join(others[:-1])] if others[:-1] else []), *others[-1:]])
    return did_you_mean(option, own).strip() or (f"It is an option of {listed}" if others else "")


def _names(command: Any) -> list[str]:
    shown = [one for one in command.params if not getattr(one, "hidden", False)]  # which an argument cannot be
    return [name for one in shown for name in (*one.opts, *one.secondary_opts) if name.startswith("-")]


EXAMPLES = """\b
Examples:
  hf-memopt plan Qwen/Qwen2.5-1.5B --gpu "RTX 3060 12GB"
  hf-memopt lengths train.jsonl
  hf-memopt doctor"""

app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    rich_markup_mode=None,  # see Command
    help="Train transformers on the GPU you have, with the stock Hugging Face Trainer.",
    epilog=EXAMPLES,
)

COMMAND_COLUMNS = 8  # of the longest name


@app.callback(invoke_without_command=True)
def _alone(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        from hf_memopt import __version__

        typer.echo(f"hf-memopt {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def _doctor(options: given.DoctorOptions, context: typer.Context) -> int:
    from hf_memopt.terminal import Console

    with spinner("looking at this machine", Console(stderr=True), shown=not options.json_output):
        from hf_memopt.cli.doctor import examine, print_findings

        findings = examine()
    if options.json_output:
        Console().out(json.dumps([asdict(finding) for finding in findings], indent=2), highlight=False)
    else:
        print_findings(findings, Console())
    return int(any(finding.level == "error" for finding in findings))


def _of_module(name: str) -> Callable[[Any, typer.Context], int | None]:
    """Return ``run`` of a command's module, which is imported when it is called and ``--plot`` can be written."""

    def run(options: Any, context: typer.Context) -> int | None:
        if getattr(options, "plot", None) is not None:
            check_picture(options.plot, purpose=f"the picture of hf-memopt {name}")
        theme = getattr(options, "theme", "light")
        check_word("theme", theme, THEMES)
        with in_theme(theme):
            code: int | None = import_module(f"hf_memopt.cli.{name}_command").run(options, context)
        return code

    return run


for name, group, options, run in (
    ("gpus", BEFORE, given.GpusOptions, _of_module("gpus")),
    ("presets", BEFORE, given.PresetsOptions, _of_module("presets")),
    ("lengths", BEFORE, given.LengthsOptions, _of_module("lengths")),
    ("estimate", BEFORE, given.EstimateOptions, _of_module("estimate")),
    ("plan", BEFORE, given.PlanOptions, _of_module("plan")),
    ("rehearse", BEFORE, given.RehearseOptions, _of_module("rehearse")),
    ("report", BEFORE, given.ReportOptions, _of_module("report")),
    ("run", MACHINE, given.RunOptions, _of_module("run")),
    ("doctor", MACHINE, given.DoctorOptions, _doctor),
):
    # what follows a script is its own; report answers more files itself
    settings = {"allow_interspersed_args": name not in ("run", "rehearse"), "allow_extra_args": name == "report"}
    command = app.command(
        name, cls=Command, rich_help_panel=group, epilog=examples_of(options), context_settings=settings
    )
    command(function_of(options, run))


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
