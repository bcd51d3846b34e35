"""The parameters of every command: a dataclass for each, whose fields are its arguments and options.

The docstring is the command's help. Nothing heavy is imported here, as ``--help`` and the checks of typer need nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from hf_memopt.memory.settings import StepSettings

__all__ = [
    "DemoOptions",
    "DoctorOptions",
    "EstimateOptions",
    "LengthsOptions",
    "MeasureOptions",
    "PlanOptions",
    "PresetsOptions",
    "ReportOptions",
    "function_of",
]

MOST_COUNT = 2**31 - 1  # the product of two such counts still fits into numpy's 64-bit integers
MOST_SEED = 2**32 - 1  # that numpy takes
MODEL, DATA, GPU, STEP, CHANGE = "Model", "Model and data", "GPU", "Step", "What may change"
FILE, BATCHES, OUTPUT = "Data", "Batches", "Output"
"""The groups of options in the help."""


def _option(text: str, metavar: str | None = None, *names: str, group: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=group, **{"show_default": False, **more})


def _argument(text: str, metavar: str | None = None, group: str | None = None) -> Any:
    return typer.Argument(help=text, metavar=metavar, rich_help_panel=group)


def _model(group: str) -> Any:
    return _argument("A well-known name, a folder with config.json, or a name on the Hub.", "MODEL", group)


def _data(text: str, group: str) -> Any:
    return _option(text, "FILE", "-d", "--data", group=group)


def _column(group: str) -> Any:
    return _option("The column of --data; input_ids or text by default.", "NAME", group=group)


def _tokenizer(group: str) -> Any:
    return _option("Counts the tokens of texts in --data; the model's by default.", "NAME", group=group)


def _task(group: str) -> Any:
    return _option("The model's head, such as causal-lm.", "NAME", group=group)


def _length(text: str, group: str | None) -> Any:
    return _option(text, "N", "-s", "--seq-len", group=group, min=1)


Json = Annotated[bool, _option("Print JSON instead of a table.", None, "--json")]
JsonOutput = Annotated[bool, _option("Print JSON instead of a table.", None, "--json", group=OUTPUT)]
Picture = Annotated[
    Path | None, _option("Also write a picture: .png, .svg or .pdf.", "FILE", "-p", "--plot", group=OUTPUT)
]


@dataclass(frozen=True)
class DemoOptions:
    """Compare training set-ups on real text.

    Trains one small BERT on the standard library's docstrings four ways: naive, stock at its best, hf_memopt, and
    hf_memopt for a 4 GB GPU.
    """

    output: Annotated[Path, _option("Folder for the trained model.", "DIR", "-o", "--output", show_default=True)] = (
        Path("hf-memopt-demo")
    )
    json_file: Annotated[Path | None, _option("Also write the figures to this file.", "FILE", "--json")] = None
    epochs: Annotated[
        int, _option("Passes over the training texts.", "N", "-e", "--epochs", min=1, show_default=True)
    ] = 1
    seed: Annotated[
        int, _option("Seed of the weights and the data order.", "N", min=0, max=MOST_SEED, show_default=True)
    ] = 0
    max_train: Annotated[int | None, _option("Train on the first N texts only.", "N", "-n", "--max-train", min=1)] = (
        None
    )


@dataclass(frozen=True)
class PresetsOptions:
    """List the presets and which models fit with each, or explain one."""

    name: Annotated[str | None, _argument("The preset to explain, with the reason for every choice.")] = None
    model: Annotated[
        str | None, _option("A set-up that holds this model, as plan chooses it.", "NAME", "-m", "--model")
    ] = None
    seq_len: Annotated[int | None, _length("Tokens of the longest row of --model.", None)] = None
    json_output: Json = False


@dataclass(frozen=True)
class LengthsOptions:
    """Show what padding wastes on a data file.

    How long its examples are, what each way of padding wastes, and what to set.
    """

    path: Annotated[Path, _argument("A Parquet, Arrow, JSON Lines or CSV file, or a folder of them.", "FILE", FILE)]
    column: Annotated[
        str | None,
        _option(
            "The column of token ids or texts; input_ids or text by default.", "NAME", "-c", "--column", group=FILE
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        _option("Counts the tokens of texts: a folder or a name on the Hub.", "NAME", "-t", "--tokenizer", group=FILE),
    ] = None
    batch_size: Annotated[
        int,
        _option(
            "Examples per batch.",
            "N",
            "-b",
            "--batch-size",
            group=BATCHES,
            min=1,
            max=MOST_COUNT,
            show_default=True,
        ),
    ] = 32
    max_tokens: Annotated[
        int | None,
        _option("Padded tokens per batch; suggested by default.", "N", group=BATCHES, min=1, max=MOST_COUNT),
    ] = None
    max_length: Annotated[
        int | None, _option("Truncate longer examples to it.", "N", group=BATCHES, min=1, max=MOST_COUNT)
    ] = None
    plot: Picture = None
    json_output: JsonOutput = False


def _list_models(wanted: bool) -> None:
    if wanted:
        from hf_memopt.memory.models.config_files import known_models

        for name in known_models():
            typer.echo(name)
        raise typer.Exit


@dataclass(frozen=True)
class EstimateOptions:
    """Predict the memory of a training step, and what makes it fit.

    Exit code 0 if it fits or no GPU is known, 1 if it does not fit, 2 on errors.
    """

    model: Annotated[str, _model(MODEL)]
    task: Annotated[str | None, _task(MODEL)] = None
    gpu: Annotated[
        str | None, _option('Such as "RTX 3050 4GB"; the current one by default.', "NAME", "-g", "--gpu", group=GPU)
    ] = None
    gpu_memory: Annotated[
        str | None, _option("Of a GPU that is not in the table, such as 4GiB.", "SIZE", group=GPU)
    ] = None
    compute_capability: Annotated[str | None, _option("Of that GPU, such as 7.5.", "X.Y", group=GPU)] = None
    batch_size: Annotated[
        int | None,
        _option(
            "Examples of one forward pass; the preset's or 8 by default, 32 with --compare.",
            "N",
            "-b",
            "--batch-size",
            group=STEP,
            min=1,
        ),
    ] = None
    seq_len: Annotated[
        int | None, _length("Tokens of a row, padding included; 512 by default, or what the model takes.", STEP)
    ] = None
    data: Annotated[
        Path | None, _data("Take --seq-len from the rows of a file: 99 % of them are not longer.", STEP)
    ] = None
    column: Annotated[str | None, _column(STEP)] = None
    tokenizer: Annotated[str | None, _tokenizer(STEP)] = None
    preset: Annotated[
        str | None, _option("Start from a preset; the other options override it.", "NAME", group=STEP)
    ] = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of ``StepSettings`` that were given, each an option of its own."""
    compare: Annotated[
        bool, _option("Compare set-ups, each with the most rows that fit.", None, "--compare", group=OUTPUT)
    ] = False
    plot: Picture = None
    json_output: JsonOutput = False
    list_models: Annotated[
        bool,
        _option(
            "Print the well-known names and stop.",
            None,
            "--list-models",
            group=OUTPUT,
            callback=_list_models,
            is_eager=True,
        ),
    ] = False


@dataclass(frozen=True)
class PlanOptions:
    """Find the fastest set-up that fits a GPU.

    Exit code 0 if one fits, 1 if none does, 2 if it cannot be planned.
    """

    model: Annotated[str, _model(DATA)]
    data: Annotated[Path | None, _data("Plan for the rows of a file, and read them in --write.", DATA)] = None
    column: Annotated[str | None, _column(DATA)] = None
    tokenizer: Annotated[str | None, _tokenizer(DATA)] = None
    seq_len: Annotated[
        int | None, _length("Tokens where rows are cut; the longest row by default, 512 without --data.", DATA)
    ] = None
    effective_batch: Annotated[
        int,
        _option(
            "Examples of an optimizer step, which stays as it is; 32 by default.", "N", group=DATA, min=1, max=10**5
        ),
    ] = 32
    task: Annotated[str | None, _task(DATA)] = None
    gpu: Annotated[
        str | None,
        _option(
            'Such as "RTX 3060 12GB", or a size: 8GB; the current one by default.', "NAME", "-g", "--gpu", group=GPU
        ),
    ] = None
    budget: Annotated[str | None, _option("Use no more of it than this, such as 6GB.", "SIZE", group=GPU)] = None
    world_size: Annotated[
        int, _option("GPUs of one computer that train together.", "N", "--gpus", "--world-size", group=GPU, min=1)
    ] = 1
    strategy: Annotated[
        str, _option("How they share a step: auto (ddp, else fsdp2), ddp, fsdp2, zero2 or zero3.", "NAME", group=GPU)
    ] = "auto"
    measured: Annotated[
        Path | None, _option("Correct the plan by real steps, as hf-memopt measure wrote them.", "FILE", group=GPU)
    ] = None
    goal: Annotated[str, _option("speed, memory or longest (rows); speed by default.", "NAME", group=CHANGE)] = "speed"
    method: Annotated[
        str, _option("full, lora, qlora, or auto: full if it fits, else LoRA, else QLoRA.", "NAME", group=CHANGE)
    ] = "auto"
    allow: Annotated[
        list[str] | None,
        _option("release_clipping, bf16_weights, freeze or shorter (rows); may be repeated.", "WORD", group=CHANGE),
    ] = None
    write: Annotated[
        Path | None, _option("Write train.py and recipe.json to this folder.", "DIR", "-w", "--write", group=OUTPUT)
    ] = None
    report: Annotated[Path | None, _option("Also write one HTML file with pictures.", "FILE", group=OUTPUT)] = None
    plot: Picture = None
    force: Annotated[bool, _option("Replace files that are there.", None, "--force", group=OUTPUT)] = False
    json_output: JsonOutput = False


@dataclass(frozen=True)
class ReportOptions:
    """Make one HTML file of a run or a plan, or tell what grew between two.

    One: a page with pictures, of the output folder of a run with a MemoryReportCallback, or of a plan's JSON. Two of a
    kind: what grew, by component and phase, as tables; with --output also as a page. No network is needed, and neither
    the model nor the data.
    """

    path: Annotated[
        list[Path], _argument("The output folder of a run, or JSON of plan, estimate or measure; one or two.")
    ]
    output: Annotated[Path | None, _option("The HTML file; of one beside its JSON.", "FILE", "-o", "--output")] = None
    force: Annotated[bool, _option("Replace a file that is there.", None, "--force")] = False
    json_output: Annotated[bool, _option("Print JSON instead of tables, of two.", None, "--json")] = False


@dataclass(frozen=True)
class MeasureOptions:
    """Measure a few real steps of a script beside their prediction.

    The script runs in a process of its own, up to its first Trainer.train(); nothing after it runs. Exit code 0 if its
    steps fit, 1 if memory ran out, 2 if it cannot be measured.
    """

    script: Annotated[Path, _argument("A Python script that trains with the stock Trainer.")]
    arguments: Annotated[list[str] | None, _argument("Its own arguments, after --.")] = None
    steps: Annotated[
        int, _option("Optimizer steps to time.", "N", "-n", "--steps", min=1, max=10**4, show_default=True)
    ] = 10
    output: Annotated[Path | None, _option("Also write JSON here, for plan.", "FILE", "-o", "--output")] = None
    force: Annotated[bool, _option("Overwrite the file of --output.", None, "--force")] = False
    json_output: Json = False


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine for what training needs.

    Exit code 0 if nothing would fail, 1 otherwise.
    """

    json_output: Json = False


# ---- From a dataclass to a command ----------------------------------------------------------------------------------


def function_of(options: type[Any], run: Callable[[Any, typer.Context], int | None]) -> Callable[..., None]:
    """Return the function that typer makes a command of; it calls ``run``, which returns the exit code."""

    def command(context: typer.Context, **given: Any) -> None:
        own = {item.name: given[item.name] for item in fields(options) if item.name in given}
        if len(own) < len(given):
            own["settings"] = _settings({name: value for name, value in given.items() if name not in own})
        raise typer.Exit(run(options(**own), context) or 0)

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, kind, default in _parameters(options):
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = options.__doc__
    return command


def _parameters(options: type[Any]) -> Iterator[tuple[str, Any, Any]]:
    kinds = get_type_hints(options, include_extras=True)
    for item in fields(options):
        if item.name == "settings":
            yield from _of_settings()
        else:
            yield item.name, kinds[item.name], inspect.Parameter.empty if item.default is MISSING else item.default


def _of_settings() -> Iterator[tuple[str, Any, Any]]:
    """Yield an option for each setting of a step that declares one; what is not given is None."""
    for item in fields(StepSettings):
        asked = item.metadata.get("option")
        if asked is not None:
            info = _option(asked.help, asked.metavar, *asked.names, group=asked.group, min=asked.least)
            yield item.name, Annotated[asked.kind | None, info], None


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, in the words of ``StepSettings``."""
    found = {}
    for item in fields(StepSettings):
        value = given.get(item.name)
        if value not in (None, []):
            found[item.name] = (
                tuple(value) if isinstance(value, list) else item.metadata["option"].words.get(value, value)
            )
    return found
