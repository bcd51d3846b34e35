"""The parameters of every command: a dataclass for each, whose fields are its arguments and options.

The docstring is the command's help, and ends with its examples. Nothing heavy is imported here, as ``--help`` and the
checks of typer need nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from dataclasses import field as default_of
from pathlib import Path
from typing import Any

import typer

MOST_COUNT = 2**31 - 1  # the product of two such counts still fits into numpy's 64-bit integers
MODEL, DATA, GPU, STEP, CHANGE = "Model", "Model and data", "GPU", "Step", "What may change"
FILE, BATCHES, OUTPUT = "Data", "Batches", "Output"
"""The groups of options in the help."""


def _option(
    default: Any, text: str, metavar: str | None = None, *names: str, group: str | None = None, **more: Any
) -> Any:
    """Declare an option; where none of ``names`` is a long one, that is the field's."""
    settings = {"help": text, "metavar": metavar, "rich_help_panel": group, "show_default": False, **more}

    def made(field_name: str) -> Any:
        has_long = any(name.startswith("--") for name in names)
        return typer.Option(*names, *([] if has_long else [f"--{field_name.replace('_', '-')}"]), **settings)

    return default_of(default=default, metadata={"info": made})


def _count(text: str, *names: str, group: str, **more: Any) -> Any:
    return _option(None, text, "N", *names, group=group, min=1, **more)


def _argument(text: str, metavar: str | None = None, group: str | None = None, default: Any = MISSING) -> Any:
    info = typer.Argument(help=text, metavar=metavar, rich_help_panel=group)
    return default_of(default=default, metadata={"info": lambda _: info})


def _model(group: str) -> Any:
    return _argument("A well-known name, a folder with config.json, or a name on the Hub.", "MODEL", group)


def _task(group: str) -> Any:
    return _option(None, "The model's head, such as causal-lm.", "NAME", group=group)


def _field(group: str, of: str = "--data") -> Any:
    return _option(None, f"The field that holds the examples, where {of} is one JSON object.", "NAME", group=group)


def _column(group: str) -> Any:
    return _option(None, "The column of --data; by default what has a usual name.", "NAME", group=group)


def _tokenizer(group: str) -> Any:
    return _option(None, "Counts the tokens of texts in --data; the model's by default.", "NAME", group=group)


def _picture() -> Any:
    return _option(None, "Also write a picture: .png, .svg or .pdf.", "FILE", "-p", "--plot", group=OUTPUT)


def _theme() -> Any:
    return _option("light", "Colours of the picture: light or dark.", "NAME", group=OUTPUT)


def _json(group: str | None = None) -> Any:
    return _option(False, "Print JSON instead of a table.", None, "--json", group=group)


def _verbose() -> Any:
    return _option(False, "Show every row and note.", None, "-v", "--verbose", group=OUTPUT)


@dataclass(frozen=True)
class GpusOptions:
    """List the known GPUs by memory.

    Examples:
      hf-memopt gpus
      hf-memopt gpus 3060
      hf-memopt gpus laptop 8gb --json
    """

    words: list[str] | None = _argument("Parts of names or sizes; all of them must occur.", default=None)
    json_output: bool = _json()


@dataclass(frozen=True)
class PresetsOptions:
    """List the presets, or what differs from the Trainer's defaults in one.

    Examples:
      hf-memopt presets
      hf-memopt presets 8gb-gpu
    """

    name: str | None = _argument("The preset to explain, with the reason for each difference.", default=None)
    json_output: bool = _json()


@dataclass(frozen=True)
class LengthsOptions:
    """Show what padding wastes on a data file.

    It prints how long examples are, what each way of padding wastes, and what to set.

    Examples:
      hf-memopt lengths train.jsonl
      hf-memopt lengths reviews.csv --column text --tokenizer bert-base-uncased
      hf-memopt lengths data/ -b 16 --max-length 512 --plot lengths.png
    """

    path: Path = _argument("A Parquet, Arrow, JSON, CSV or TSV file, or a folder of them.", "FILE", FILE)
    column: str | None = _option(
        None, "The column of token ids or texts; by default what has a usual name.", "NAME", "-c", group=FILE
    )
    field: str | None = _field(FILE, "the file")
    tokenizer: str | None = _option(
        None, "Counts the tokens of texts: a folder or a name on the Hub.", "NAME", "-t", group=FILE
    )
    batch_size: int = _option(
        32, "Examples per batch.", "N", "-b", group=BATCHES, min=1, max=MOST_COUNT, show_default=True
    )
    max_tokens: int | None = _count("Padded tokens per batch; suggested by default.", group=BATCHES, max=MOST_COUNT)
    max_length: int | None = _count("Truncate longer examples to it.", group=BATCHES, max=MOST_COUNT)
    plot: Path | None = _picture()
    theme: str = _theme()
    json_output: bool = _json(OUTPUT)


def _list_models(wanted: bool) -> None:
    if wanted:
        from hf_memopt.prediction.memory.models import known_models

        for name in known_models():
            typer.echo(name)
        raise typer.Exit


@dataclass(frozen=True)
class EstimateOptions:
    """Predict the memory of a training step.

    Exit code 0 if it fits or no GPU is known, 1 if it does not fit, 2 on errors, 3 if it is too close to tell.

    Examples:
      hf-memopt estimate gpt2 -g "RTX 3060 12GB"
      hf-memopt estimate Qwen/Qwen2.5-1.5B -b 4 -g T4 --lora 16 --load-in nf4
      hf-memopt estimate bert-large-uncased --data train.jsonl --preset 8gb-gpu
      hf-memopt estimate Llama-3.2-1B -g "RTX 4060" --plot step.png
    """

    model: str = _model(MODEL)
    task: str | None = _task(MODEL)
    gpu: list[str] | None = _option(
        None, 'Such as "RTX 3050 4GB", or a size: 8GB; the current one by default.', "NAME", "-g", group=GPU
    )
    gpu_memory: str | None = _option(
        None, "What a process can use of a GPU that is not in the table, such as 3.8GiB.", "SIZE", group=GPU
    )
    compute_capability: str | None = _option(None, "Of that GPU, such as 7.5.", "X.Y", group=GPU)
    batch_size: int | None = _count("Examples of one forward pass; the preset's or 8 by default.", "-b", group=STEP)
    seq_len: int | None = _count(
        "Tokens of an example, padding included; 512 by default, or what the model takes.", "-s", group=STEP
    )
    data: Path | None = _option(
        None, "Take --seq-len from the examples of a file: 99 % are not longer.", "FILE", "-d", group=STEP
    )
    column: str | None = _column(STEP)
    field: str | None = _field(STEP)
    tokenizer: str | None = _tokenizer(STEP)
    preset: str | None = _option(None, "Start from a preset; the other options override it.", "NAME", group=STEP)
    settings: Mapping[str, Any] = default_of(default_factory=dict)
    """Those of ``StepSettings`` that were given, each an option of its own."""
    plot: Path | None = _picture()
    theme: str = _theme()
    verbose: bool = _verbose()
    json_output: bool = _json(OUTPUT)
    list_models: bool = _option(
        False, "Print the well-known names and stop.", group=OUTPUT, callback=_list_models, is_eager=True
    )


@dataclass(frozen=True)
class PlanOptions:
    """Find the fastest set-up that fits a GPU, or compare those of several GPUs.

    Exit code 0 if one fits, 1 if none does, 2 on errors, 3 if it is too close to tell.

    Examples:
      hf-memopt plan bert-large-uncased -g "RTX 3060 12GB" -s 128
      hf-memopt plan Qwen/Qwen2.5-1.5B -g T4 -d train.jsonl --write run
      hf-memopt plan Llama-3.2-1B -g "RTX 4060" --method full --allow bf16_weights
      hf-memopt plan gpt2 -g 8GB --goal longest --report plan.html
      hf-memopt plan Llama-3.2-1B -g T4 -g L4 -g "RTX 4090" -d chats.jsonl
    """

    model: str = _model(DATA)
    data: Path | None = _option(
        None, "Plan for the examples of a file, and read them in --write.", "FILE", "-d", group=DATA
    )
    column: str | None = _column(DATA)
    field: str | None = _field(DATA)
    tokenizer: str | None = _tokenizer(DATA)
    seq_len: int | None = _count(
        "Cut longer examples; to the longest by default, to 512 without --data.", "-s", group=DATA
    )
    effective_batch: int = _option(
        32, "Examples per optimizer step, never changed; 32 by default.", "N", group=DATA, min=1, max=10**5
    )
    task: str | None = _task(DATA)
    images: int | None = _option(None, "Pictures of an example.", "N", group=DATA, min=0)
    image_size: int | None = _count("Pixels of a picture's side; the model's by default.", group=DATA)
    audio_seconds: float | None = _option(None, "Seconds of audio of an example; 10 by default.", "N", group=DATA)
    gpu: list[str] | None = _option(
        None, 'Such as "RTX 3060 12GB", or 8GB; may be repeated. The current one by default.', "NAME", "-g", group=GPU
    )
    budget: str | None = _option(None, "Use no more of it than this, such as 6GB.", "SIZE", group=GPU)
    os: str | None = _option(
        None, "Where it trains: linux, windows or wsl; as here, or windows for a laptop of --gpu.", "NAME", group=GPU
    )
    host_memory: str | None = _option(
        None,
        "Of the computer, such as 64GiB, for layers that wait there; this machine's by default.",
        "SIZE",
        group=GPU,
    )
    goal: str = _option("speed", "speed, memory or longest (examples); speed by default.", "NAME", group=CHANGE)
    method: str = _option(
        "auto",
        "full, lora, qlora, or auto: full if it fits with 8 % free, else LoRA, else QLoRA.",
        "NAME",
        group=CHANGE,
    )
    allow: list[str] | None = _option(
        None, "release_clipping, bf16_weights, freeze or shorter (examples); may be repeated.", "WORD", group=CHANGE
    )
    write: Path | None = _option(None, "Write train.py and recipe.json to this folder.", "DIR", "-w", group=OUTPUT)
    report: Path | None = _option(None, "Also write one HTML file with pictures.", "FILE", group=OUTPUT)
    plot: Path | None = _picture()
    theme: str = _theme()
    force: bool = _option(False, "Replace files that are there.", group=OUTPUT)
    verbose: bool = _verbose()
    json_output: bool = _json(OUTPUT)


@dataclass(frozen=True)
class ReportOptions:
    """Make one HTML file with pictures of a run or a plan.

    Pass the output folder of a run with a MemoryReportCallback, or the JSON of plan. No network, model or data is
    needed.

    Examples:
      hf-memopt plan gpt2 -g "RTX 4060" --report plan.html --json > plan.json
      hf-memopt report plan.json
      hf-memopt report out/
    """

    path: Path = _argument("The output folder of a run, or JSON of plan.", "PATH")
    output: Path | None = _option(None, "The HTML file to write; beside PATH by default.", "FILE", "-o")
    force: bool = _option(False, "Replace a file that is there.")
    json_output: bool = _option(False, "", None, "--json", hidden=True)  # of two, once


@dataclass(frozen=True)
class RehearseOptions:
    """Run a script, unchanged, on a GPU that is not there, and print its peak memory.

    PyTorch's own CUDA code runs a few optimizer steps and two batches of evaluation. Without --gpu and --memory the
    same steps run for real on this machine's GPU. Exit code 0 if it fits, 1 if memory runs out, 2 on errors; a script
    that fails by itself keeps its own.

    Examples:
      hf-memopt rehearse --gpu "RTX 3060 12GB" train.py --learning_rate 1e-4
      hf-memopt rehearse --memory 8GB --timeline steps.svg train.py
      hf-memopt rehearse --gpu T4 -m my_package.train
    """

    script: str = _argument("A Python script that trains, or a module.")
    arguments: list[str] | None = _argument("Its own arguments.", default=None)
    module: bool = _option(False, "Run a module by its name, as python -m does.", None, "-m")
    gpu: list[str] | None = _option(
        None, 'Such as "RTX 3060 12GB"; without it the GPU of this machine.', "NAME", "-g", group=GPU
    )
    memory: str | None = _option(None, "Instead: what a process can use of a GPU, such as 8GB.", "SIZE", group=GPU)
    capability: str | None = _option(None, "Compute capability of that GPU, such as 7.5.", "X.Y", group=GPU)
    gpus: int = _option(1, "GPUs that train together; the first is rehearsed.", "N", group=GPU, min=1)
    steps: int = _option(2, "Optimizer steps.", "N", "-n", min=1, max=10**4, show_default=True)
    empty_weights: bool = _option(False, "Make weights of the right shapes instead of reading them.")
    json_file: Path | None = _option(None, "Also write everything to this file.", "FILE", "--json", group=OUTPUT)
    timeline: Path | None = _option(None, "Also draw it: .png, .svg or .pdf.", "FILE", group=OUTPUT)


@dataclass(frozen=True)
class RunOptions:
    """Run a script unchanged, with what saves memory and does not change its result.

    It predicts memory before the first step, splits a step or an evaluation that does not fit, and prints the lines to
    add at the end. The script's output and exit code stay its own. With torchrun: torchrun -m hf_memopt run train.py.

    Examples:
      hf-memopt run train.py --learning_rate 1e-4
      hf-memopt run --gpu "RTX 4060" --apply exact train.py
      hf-memopt run -m my_package.train
    """

    script: str = _argument("A Python script that trains with the stock Trainer, or a module.")
    arguments: list[str] | None = _argument("Its own arguments.", default=None)
    module: bool = _option(False, "Run a module by its name, as python -m does.", None, "-m")
    gpu: list[str] | None = _option(None, "Predict for this GPU; by default that of this machine.", "NAME")
    rehearse: bool = _option(False, "Rehearse the script first, on that GPU, and say whether it fits.")
    apply: str | None = _option(None, "exact: also fused loss and checkpointing, where a step does not fit.", "KIND")
    allow: list[str] | None = _option(
        None, "release_clipping, bf16_weights or freeze, where a step does not fit; may be repeated.", "WORD"
    )
    repair: str | None = _option(None, "gradient-scale: weigh accumulation steps equally, as attach does.", "WHAT")


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine for what training needs.

    Exit code 0 if nothing would fail, 1 otherwise.

    Examples:
      hf-memopt doctor
      hf-memopt doctor --json
    """

    json_output: bool = _json()
