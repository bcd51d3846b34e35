"""What is said of words that a command does not take: the option that is meant, or the command that has it.

``other_options.csv`` has what other tools call an option, and what to pass instead; of several rows the first counts
whose option the command has.
"""

from __future__ import annotations

from typing import Any

from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import packaged_rows


def usage_message(error: Any) -> str:
    """Return the message of an error of typer's parser, with what to do about it as its last sentence."""
    path = error.ctx.command_path if error.ctx else "hf-memopt"
    if hasattr(error, "possibilities"):
        return f"{error.message}. {_of_option(error.option_name, error.ctx) or f'See: {path} --help'}"
    said = str(error.format_message()).rstrip(".")
    return said if said.endswith("?") else f"{said}. See: {path} --help"


def _of_option(option: str, context: Any) -> str:
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
    return [name for one in command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")]
