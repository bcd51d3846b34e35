"""The presets: a ``Recipe`` for every common size of GPU, and the functions that return them.

They are set-ups for encoders, in ``presets.json`` as ``Recipe.to_json`` writes them. What fits with one of them also
fits with every preset for a larger GPU, by the estimate (``tests/recipes/test_preset_fits.py``).
Where activations have to shrink for that, a preset has smaller micro-batches or checkpointing, whichever is predicted
to be faster. None of the memory figures has been measured on a GPU yet. For any other model ``recipe(name, model=...)``
returns what ``plan`` chooses for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import FixedMapping, shown
from hf_memopt.recipes.recipe_class import Recipe
from hf_memopt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_memopt.devices import Gpu


def _packaged() -> list[Recipe]:
    text = resources.files("hf_memopt.recipes").joinpath("presets.json").read_text(encoding="utf-8")
    return [Recipe(**fields) for fields in json.loads(text)]


PRESETS: Mapping[str, Recipe] = FixedMapping({one.name: one for one in _packaged()})
"""Every preset by its name; ``recipe("auto")`` chooses among them."""

# Of a GPU that is not in the table: a driver keeps up to 8 % of what it is sold with, more where error correction does.
COVERED_FRACTION = 0.92


def recipe(name: str | os.PathLike[str], model: Any = None, *, seq_len: int | None = None) -> Recipe:
    """Return a preset as a ``Recipe``; ``"auto"`` looks at the machine and returns the one that suits it.

    Args:
        name: of the preset; or the path of a ``recipe.json`` that ``Plan.write`` has written, which is read as it is.
        model: that it must hold: the preset as it is where an estimate says that it does, else what ``plan`` chooses:
            full training, else LoRA, else QLoRA; every choice has its reason. A module, a configuration, a folder or a
            name, as for ``estimate``. None for the preset as it is.
        seq_len: tokens of the longest row, for ``model``; None for 512, or what the model takes.

    Raises:
        ValueError: no such preset; the message names the nearest and all of them. A file that is no recipe. Nothing
            makes the model fit, or it cannot be estimated.

    Examples:
        >>> recipe("4gb-gpu").checkpointing
        True
    """
    if seq_len is not None and model is None:
        raise ValueError(
            f"seq_len={shown(seq_len)} is the length of a model's texts, and model=None; expected both. "
            "Call: recipe('8gb-gpu', model='Llama-3.2-1B', seq_len=512)"
        )
    if isinstance(name, os.PathLike) or (isinstance(name, str) and name.endswith(".json")):
        return _from_file(name, model)
    if isinstance(name, str) and name == "auto":
        from hf_memopt.devices import current_gpu

        here, gpu = _for_this_machine(), None if model is None else current_gpu()
        return here if gpu is None else fitting_recipe(here, model, seq_len=seq_len, gpu=gpu)
    if not isinstance(name, str) or name not in PRESETS:
        known = [*PRESETS, "auto"]
        raise ValueError(
            f"name={shown(name)} is not a preset; expected one of {', '.join(known)}.{did_you_mean(name, known)} "
            "See them: hf-memopt presets"
        )
    chosen = _for_this_system(PRESETS[name])
    if model is None or name == "cpu":  # what a CPU can hold is not estimated
        return chosen
    return fitting_recipe(chosen, model, seq_len=seq_len, gpu=_smallest_gpu(name))


def _from_file(path: str | os.PathLike[str], model: Any) -> Recipe:
    name = os.fspath(path)
    if model is not None:
        raise ValueError(
            f"name={shown(name)} is a recipe for one model already, and another is given; expected only the file. "
            f"Call: recipe({name!r}), or plan(model, gpu=...)"
        )
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(
            f"name={shown(name)} cannot be read ({cause}); expected a file that Plan.write has written. "
            "Call: plan(model, gpu=...).write('run')"
        ) from error
    try:
        return Recipe.from_json(text)
    except ValueError as error:
        raise ValueError(f"name={shown(name)} holds no recipe: {error}") from error


def _smallest_gpu(name: str) -> Gpu:
    """Return a GPU with what is usable of the smallest of a preset's size, and this machine's kernels if it has any.

    Without a GPU here the kernels are those that ``custom_gpu`` assumes.
    """
    from hf_memopt.devices import GPUS, current_gpu, custom_gpu

    size = parse_bytes(f"{name.removesuffix('gb-gpu')}GiB")
    usable_bytes = min(gpu.usable_bytes for gpu in GPUS.values() if gpu.memory_bytes == size)
    here = current_gpu()
    return custom_gpu(usable_bytes, None if here is None else here.compute_capability, name=name)


def _for_this_machine() -> Recipe:
    from hf_memopt.devices import find_gpu
    from hf_memopt.devices.readings import read_memory  # torch, which no other preset needs

    reading = read_memory()
    if reading.device_total_bytes is None:
        return PRESETS["cpu"].replace(purpose=f"chosen by recipe('auto'): {PRESETS['cpu'].purpose}")
    by_size = {parse_bytes(f"{name.removesuffix('gb-gpu')}GiB"): name for name in PRESETS if name != "cpu"}
    try:
        sold_bytes = find_gpu(reading.device_name).memory_bytes
    except ValueError:
        sold_bytes = 0
    is_whole = reading.device_total_bytes >= 0.85 * sold_bytes  # and no slice of it, nor another size of that name
    most = max(reading.device_total_bytes / COVERED_FRACTION, sold_bytes if is_whole else 0)
    covered = [size for size in by_size if size <= most]
    name = by_size[max(covered, default=min(by_size))]
    gpu = f"{reading.device_name} with {format_bytes(reading.device_total_bytes)}"
    chosen = _for_this_system(PRESETS[name])
    if reading.device.startswith("mps") and chosen.optim.endswith("8bit"):
        why = f"bitsandbytes, which {chosen.optim} is of, does not support 8-bit or paged optimizers on Apple GPUs"
        chosen = chosen.replace(optim="adamw_torch", reasons={**chosen.reasons, "optim": why})
    return chosen.replace(purpose=f"chosen by recipe('auto') for {gpu}: {chosen.purpose}")


def _for_this_system(chosen: Recipe) -> Recipe:
    """Return a preset without a paged optimizer where managed memory cannot exceed the GPU (``planning.facts_of``)."""
    from hf_memopt.devices import current_os

    system = current_os()
    if system == "linux" or not chosen.optim.startswith("paged_"):
        return chosen
    optim = chosen.optim.removeprefix("paged_")
    name = {"windows": "Windows", "wsl": "WSL"}[system]
    why = f"{chosen.reasons['optim'].partition('; paged')[0]}; not paged: under {name} that moves nothing to the host"
    return chosen.replace(optim=optim, reasons={**chosen.reasons, "optim": why})


def preset_rows(recipes: Mapping[str, Recipe]) -> list[dict[str, str]]:
    """Return the choices that differ between presets as rows of text, for the terminal and the README."""
    return [
        {
            "preset": name,
            "batch": f"{r.per_device_train_batch_size} x {r.effective_batch_size // r.per_device_train_batch_size}",
            "eval batch": str(r.per_device_eval_batch_size),
            "optimizer": r.optim,
            "checkpointing": "yes" if r.checkpointing else "no",
            "meant for": r.purpose.split(" (")[0],
        }
        for name, r in recipes.items()
    ]


def preset(
    name: str, output_dir: str | None = None, *, effective_batch_size: int | None = None, **training_arguments: Any
) -> TrainingArguments:
    """Return plain ``transformers.TrainingArguments`` of a preset, ready for ``Trainer(args=...)``.

    A ``Trainer`` with these arguments repairs its gradient scale by itself, as ``attach`` does; beside callbacks,
    bucketed data or a collator of this package it attaches itself. Not arguments: ``Recipe.model_kwargs()`` (float32
    weights under 16-bit autocast), and the callbacks, collator and bucketed data that ``Recipe.trainer`` wires.

    Args:
        name: ``"4gb-gpu"`` ... ``"80gb-gpu"``, ``"cpu"`` or ``"auto"``.
        output_dir: as in TrainingArguments.
        effective_batch_size: examples per optimizer step; the recipe's unless given.
        training_arguments: any field of TrainingArguments; ``per_device_train_batch_size`` re-derives the accumulation
            so that the effective batch stays, and the other way round.

    Raises:
        ValueError: unknown preset, a batch that does not divide the effective batch, a precision this machine lacks.
        TypeError: a field that TrainingArguments does not have.

    Examples:
        >>> args = preset("4gb-gpu", "out", per_device_train_batch_size=4, use_cpu=True)
        >>> args.per_device_train_batch_size, args.gradient_accumulation_steps
        (4, 8)
    """
    from hf_memopt.binding import note_trainer_of

    made = recipe(name).training_arguments(output_dir, effective_batch_size=effective_batch_size, **training_arguments)
    note_trainer_of(made)
    return made


def fitting_recipe(preset: Recipe, model: Any, *, seq_len: int | None, gpu: Gpu) -> Recipe:
    """Return the preset if a training step of the model fits the GPU, else the recipe of ``plan``, with its reasons."""
    from hf_memopt.memory import estimate, margin_of
    from hf_memopt.memory.recording import keeping_models
    from hf_memopt.recipes.planning import facts_of, plan

    rows = preset.per_device_train_batch_size
    with keeping_models():
        source, task, facts = facts_of(model, None)
        if problem := facts.against_float16(gpu):
            preset = preset.replace(precision="fp32", reasons={**preset.reasons, "precision": problem})
        as_it_is = None
        if not facts.is_quantized or facts.has_adapters:
            as_it_is = estimate(source, batch_size=rows, seq_len=seq_len, recipe=preset, gpu=gpu, task=task)
        if as_it_is is not None and as_it_is.total_bytes + margin_of(gpu) <= gpu.usable_bytes:
            length = "" if as_it_is.seq_len is None else f" at {as_it_is.seq_len} tokens"
            needs = f"{format_bytes(as_it_is.total_bytes)} of {format_bytes(gpu.usable_bytes)}"
            purpose = f"as it is, with {as_it_is.model}{length} on {gpu.name}: {needs}, computed and not measured"
            return preset.replace(purpose=purpose, reasons=preset.reasons)
        found = plan(model, gpu=gpu, seq_len=seq_len, effective_batch_size=preset.effective_batch_size)
    if found.shortfall is not None:
        short = found.shortfall
        raise ValueError(
            f"model=<{found.model}> does not fit {gpu.name} at seq_len={found.texts.seq_len}: {short.nearest.name} "
            f"needs {format_bytes(short.nearest.total_bytes)} of {format_bytes(gpu.usable_bytes)}; expected a smaller "
            "model, shorter texts or a larger GPU. See what would fit: print(hf_memopt.plan(model, gpu=...))"
        )
    return found.recipe.replace(name=preset.name, reasons=found.recipe.reasons)
