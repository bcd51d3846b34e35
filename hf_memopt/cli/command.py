"""The class of all commands: help in groups of options, and messages that name flags instead of Python's parameters.

The package's messages speak of ``seq_len=4096``. ``in_flags`` turns that into ``--seq-len 4096`` by the options that a
command declares, so each message is written once. Help is laid out without rich, whose tables cut the names of options
off at 80 columns.
"""

from __future__ import annotations

import re
import shlex
from ast import literal_eval
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperOption

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "BEFORE",
    "MACHINE",
    "TRYING_OUT",
    "Command",
    "Flag",
    "check_of_data",
    "flags_of",
    "in_flags",
    "spinner",
    "typed_command",
    "wrapped",
]

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
    """Return the command with what was given of its parameters, as it is typed in a shell.

    Args:
        context: of the command.
        without: names of parameters to leave out.
    """
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
    return shlex.join(words)


def in_flags(text: str, flags: Mapping[str, Flag]) -> str:
    """Return a message with flags in place of parameters; quoted values and names without an underscore stay.

    Examples:
        >>> in_flags("seq_len=9 is odd; give eval_batch_size. Pass compare=True", {"seq_len": Flag("--seq-len"),
        ...     "eval_batch_size": Flag("--eval-batch-size"), "compare": Flag("--compare")})
        '--seq-len 9 is odd; give --eval-batch-size. Pass --compare'
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

    return given.sub(flag, text)


def _as_typed(value: str) -> str:
    """Return a value as it is typed in a shell; what is not quoted text stays."""
    if value[0] not in "'\"":
        return value
    try:
        return shlex.quote(literal_eval(value))
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
                shown = name if not isinstance(parameter, TyperOption) else _in_short(name)
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append((shown, text))
        width = max(len(name) for rows in groups.values() for name, _ in rows if len(name) <= WIDEST_COLUMNS)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


def _in_short(name: str) -> str:
    """Return an option's declaration with ``--[no-]flag`` for a pair of flags."""
    return re.sub(r"(--)([\w-]+) / --no-\2", r"\1[no-]\2", name)


def check_of_data(options: Any) -> None:
    """Raise ValueError for an option that says how ``--data`` is read, without it."""
    for name in ("column", "tokenizer"):
        if options.data is None and getattr(options, name) is not None:
            raise ValueError(
                f"{name}={getattr(options, name)!r} is for a data file, and there is none; expected both. "
                "Pass --data FILE"
            )


# ---- What a command shows


@contextmanager
def spinner(text: str, errors: Console, *, shown: bool = True) -> Iterator[Callable[[str], object]]:
    """Show a spinner inside the block, and yield the function that changes its text.

    Args:
        text: what the command does.
        errors: the console of standard error; nothing is written to it unless it is a terminal.
        shown: False for no spinner on a terminal either, as with ``--json``.
    """
    if not (shown and errors.is_terminal):
        yield lambda text: None
        return
    from rich.text import Text  # a name may hold what rich takes for markup

    with errors.status(Text(text)) as status:
        yield lambda text: status.update(Text(text))


def wrapped(text: str, console: Console) -> str:
    """Return lines that fit a terminal, continued with an indent; unchanged where standard output is not a terminal."""
    if not console.is_terminal:
        return text
    lines = (fill(line, console.width, subsequent_indent=" " * 6, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(lines)


BEFORE, MACHINE, TRYING_OUT = "Before the run", "On the machine that trains", "To try out and compare"
