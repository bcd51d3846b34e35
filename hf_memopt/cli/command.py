"""What all commands share: made of a dataclass of parameters, help in groups, messages that name flags, a spinner.

The package's messages speak of ``seq_len=4096``. ``in_flags`` turns that into ``--seq-len 4096`` by the options that a
command declares, so each message is written once. Help is laid out without rich, whose tables cut the names of options
off at 80 columns.
"""

from __future__ import annotations

import inspect
import os
import re
from ast import literal_eval
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from hf_memopt.notices import quoted
from hf_memopt.plain_data import checked_path, packaged_rows
from hf_memopt.prediction.memory.settings import StepSettings

if TYPE_CHECKING:
    from rich.console import Console

    from hf_memopt.prediction.recipes.planning.script import RowsFile

EXIT_CODES = {None: 0, "fits": 0, "over": 1, "tight": 3}
"""By ``Estimate.verdict``, and that of a plan's choice; 2 is that of errors."""
OTHER_NAMES = {  # an option, and what Python calls its value
    "gpu_memory": ("memory",),
    "preset": ("name",),
    "freeze": ("patterns",),
    "data": ("path",),
    "effective_batch": ("effective_batch_size",),
    "write": ("directory",),
    "output": ("path", "report"),
}
WIDEST_COLUMNS = 28  # of an option in the help; what is longer has a line of its own
VALUE = r"""[\w.]+\([^()]*\)|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\([^()]*\)|\[[^][]*\]|[^\s,;:()]*[^\s,;:().]"""


@dataclass(frozen=True, slots=True)
class Flag:
    """How a parameter is given on the command line; of an argument ``on`` is empty, as its value stands alone."""

    on: str
    off: str = ""


def flags_of(parameters: Iterable[Any]) -> dict[str, Flag]:
    """Return the flags of a command's parameters by their names in Python."""
    declared = {
        parameter.name: Flag(max(parameter.opts, key=len), max(parameter.secondary_opts, key=len, default=""))
        if parameter.param_type_name == "option"
        else Flag("")
        for parameter in parameters
    }
    others = {other: flag for name, flag in declared.items() for other in OTHER_NAMES.get(name, ())}
    return {**others, **declared}


def typed_command(context: Any, without: Collection[str] = ()) -> str:
    """Return the command with what was given of its parameters, as it is typed in a shell."""
    words = ["hf-memopt", context.info_name]
    for name, flag in flags_of(context.command.params).items():
        value = context.params.get(name)
        if value is None or name in without or context.get_parameter_source(name).name != "COMMANDLINE":
            continue
        if isinstance(value, bool):
            words.append(flag.on if value else flag.off)
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [flag.on, str(one)] if flag.on else [str(one)]
    return " ".join(map(quoted, words))


def in_flags(text: str, flags: Mapping[str, Flag]) -> str:
    """Return a message with flags in place of parameters; quoted values and names without an underscore stay.

    Examples:
        >>> in_flags("seq_len=9 is odd; give eval_batch_size. Pass tiled=True", {"seq_len": Flag("--seq-len"),
        ...     "eval_batch_size": Flag("--eval-batch-size"), "tiled": Flag("--tiled")})
        '--seq-len 9 is odd; give --eval-batch-size. Pass --tiled'
    """
    names = "|".join(sorted(flags, key=len, reverse=True))
    bare = "|".join(sorted((name for name in flags if "_" in name), key=len, reverse=True)) or "$^"
    given = re.compile(rf"(?<![\w./=-])(?:({names})=({VALUE})|(?<!['\"])({bare})(?![\w=('\"]))")

    def flag(found: re.Match[str]) -> str:
        name, value, alone = found.groups()
        if alone is not None:
            return flags[alone].on or str(alone)
        if value[-1] == ")" and value[0] != "(":
            return found.group()  # Python code
        known = flags[name]
        if not known.on:
            return str(value)
        if value == "False" and known.off:
            return known.off
        if value in ("False", "None"):
            return f"no {known.on}"
        return known.on if value == "True" else f"{known.on} {_as_typed(value)}"

    return given.sub(flag, text).replace(", or None", ", or none")


def _as_typed(value: str) -> str:
    """Return a value as it is typed in a shell; what is not quoted text stays."""
    if value[0] not in "'\"":
        return value
    try:
        return quoted(literal_eval(value))
    except SyntaxError:  # a long one that the message cuts before its last quote
        return value


class Command(TyperCommand):
    """A command whose errors name its flags; its help is grouped by ``rich_help_panel``."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (in_flags(error.args[0], flags_of(self.params)),)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name, text = record
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                if isinstance(parameter, TyperOption):  # --[no-]flag for a pair of flags
                    name = re.sub(r"(--)([\w-]+) / --no-\2", r"\1[no-]\2", name)
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append((name, text))
        width = max(len(name) for rows in groups.values() for name, _ in rows if len(name) <= WIDEST_COLUMNS)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


# ---- From a dataclass to a command ----------------------------------------------------------------------------------


def function_of(options: type[Any], run: Callable[[Any, typer.Context], int | None]) -> Callable[..., None]:
    """Return the function that typer makes a command of; it calls ``run``, which returns the exit code."""

    def command(context: typer.Context, **given: Any) -> None:
        own = {item.name: given.pop(item.name) for item in fields(options) if item.name in given}
        if given:
            own["settings"] = _settings(given)
        raise typer.Exit(run(options(**own), context) or 0)

    kinds: dict[str, Any] = {"context": typer.Context}
    defaults: dict[str, Any] = {"context": inspect.Parameter.empty}
    of_fields = get_type_hints(options)
    for item in fields(options):
        if item.name == "settings":
            kinds |= {one.name: _kind(one) for one in fields(StepSettings) if one.name in SETTINGS}
            defaults |= dict.fromkeys(SETTINGS)
        else:
            kinds[item.name] = Annotated[of_fields[item.name], item.metadata["info"](item.name)]
            defaults[item.name] = inspect.Parameter.empty if item.default is MISSING else item.default
    command.__annotations__ = kinds
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kinds[name])
            for name in kinds
        ]
    )
    command.__doc__ = _help(options)[0]
    return command


def examples_of(options: type[Any]) -> str:
    """Return what the help ends with; its first line keeps click from filling the others."""
    return "\n".join(["\b", "Examples:", _help(options)[1]])


def _help(options: type[Any]) -> tuple[str, str]:
    text, _, examples = inspect.cleandoc(options.__doc__ or "").partition("\n\nExamples:\n")
    return text, examples


_READS = {"": str, "count": int, "number": float, "words": list[str]}
SETTINGS = {row["setting"]: row for row in packaged_rows("hf_memopt.cli", "step_options.csv")}
"""The settings of a step that are options of ``estimate``, and how each is given."""


def _kind(setting: Field[Any]) -> Any:
    """Return the annotation of a setting's option, which is None where it is not given."""
    told, is_flag = SETTINGS[setting.name], isinstance(setting.default, bool)
    info = typer.Option(
        *told["names"].split(),
        help=told["help"],
        metavar=None if is_flag else told["metavar"] or "NAME",
        rich_help_panel=told["group"] or "Step",
        show_default=False,
        min=int(told["least"]) if told["least"] else None,
    )
    kind = bool if is_flag else _READS[told["reads"]]
    return Annotated[kind | None, info]


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, in the words of ``StepSettings``."""
    found: dict[str, Any] = {}
    for name, told in SETTINGS.items():
        value = given[name]
        if isinstance(value, list):
            value = tuple(value) or None
        if value is not None:
            words = dict(pair.split("=") for pair in told["words"].split())
            found[name] = words.get(value, value) if isinstance(value, str) else value
    return found


def check_of_data(options: Any) -> None:
    """Raise ValueError for an option that says how ``--data`` is read, without it, and for a file that cannot be read.

    It needs neither torch nor transformers.
    """
    for name in ("column", "tokenizer", "field"):
        if options.data is None and getattr(options, name) is not None:
            raise ValueError(
                f"{name}={getattr(options, name)!r} is for a data file, and there is none; expected both. "
                "Pass --data FILE"
            )
    if options.data is not None:
        rows_of(options).read()


def rows_of(options: Any) -> RowsFile:
    """Return the file of ``--data`` with what the other options say of it."""
    from hf_memopt.prediction.recipes.planning.script import RowsFile

    return RowsFile(options.data, options.column, options.tokenizer, options.field)


def one_gpu(names: Sequence[str] | None) -> str | None:
    """Return the GPU of a command for one; raise for several, of which the parser would keep the last."""
    if names and names[1:]:
        several = " ".join(f"--gpu {quoted(name)}" for name in names)
        raise ValueError(f"{several} are {len(names)} GPUs; expected one. Compare them: hf-memopt plan MODEL {several}")
    return names[0] if names else None


def arguments_of(options: Any) -> list[str]:
    """Return a script's own arguments; a ``--`` before them is not the script's."""
    own: list[str] = options.arguments or []
    return own[own[:1] == ["--"] :]


def check_script(script: str | os.PathLike[str], command: str, in_notebook: str = "") -> None:
    """Raise unless a script is a file that Python runs; what it would take for the JSON of a notebook does nothing."""
    path, or_else = checked_path("script", script), ", or --module and a module's name"
    if not path.is_file():
        trainer = "" if command.startswith("rehearse") else " with the stock Trainer"
        raise ValueError(
            f"script={os.fspath(script)!r} is not a file; expected a Python script that trains{trainer}{or_else}. "
            f"Call: hf-memopt {command} train.py"
        )
    if path.suffix == ".ipynb":
        raise ValueError(
            f"script={os.fspath(script)!r} is a notebook; expected a Python script{or_else}. "
            f"Call: jupyter nbconvert --to script {quoted(os.fspath(script))}{in_notebook}"
        )


# ---- What a command shows


@contextmanager
def spinner(text: str, errors: Console, *, shown: bool = True) -> Iterator[Callable[[str], object]]:
    """Show a spinner with the time that has passed inside the block, and yield the function that changes its text.

    Nothing is written to ``errors``, the console of standard error, unless it is a terminal.
    """
    if not (shown and errors.is_terminal):
        yield lambda text: None
        return
    from rich.markup import escape  # a name may hold what rich takes for markup
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(escape(text), total=None)
        yield lambda text: progress.update(task, description=escape(text))


def wrapped(text: str, console: Console) -> str:
    """Return lines that fit a terminal, continued with an indent; unchanged where the console is not a terminal."""
    if not console.is_terminal:
        return text
    whole = TextWrapper(console.width, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
    return "\n".join(map(whole.fill, text.splitlines()))


STYLES = {
    r"^FITS\b": "bold green",
    r"^RUNS OUT\b|^error:": "bold red",
    r"^hint:": "bold cyan",
}


def print_coloured(text: str, console: Console) -> None:
    """Print lines as they are, without wrapping them, and what ``STYLES`` matches in its colour."""
    from rich.text import Text

    shown = Text(text)
    for pattern, style in STYLES.items():
        shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console.print(shown, soft_wrap=True, highlight=False)


WITH_ACTION = re.compile(r"(.*?; expected .*?|(?!.*; expected ).*)\. ([A-Z].*)")


def print_error(message: str) -> None:
    """Print a message on standard error: what is wrong after ``error:``, what to do about it after ``hint:``."""
    from hf_memopt.terminal import Console

    console, text = Console(stderr=True), " ".join(message.split())
    parts = WITH_ACTION.fullmatch(text)
    lines = [f"error: {text}"] if parts is None else [f"error: {parts[1]}", f"hint: {parts[2]}"]
    print_coloured("\n".join(wrapped(line, console) for line in lines), console)


BEFORE, MACHINE = "Before the run", "On the machine that trains"
