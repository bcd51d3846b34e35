"""The presets: a ``Recipe`` for every common size of GPU, and the functions that return them.

They are set-ups for encoders, in ``presets.json`` as ``Recipe.to_json`` writes them. What fits with one of them also
fits with every preset for a larger GPU, by the estimate (``tests/recipes/test_preset_fits.py``).
Where activations have to shrink for that, a preset has smaller micro-batches or checkpointing, whichever is predicted
to be faster. None of the memory figures has been measured on a GPU yet. For any other model ``plan``
chooses a recipe.
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
from hf_memopt.prediction.recipes.recipe_class import Recipe
from hf_memopt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from transformers import TrainingArguments


def _packaged() -> list[Recipe]:
    text = resources.files("hf_memopt.prediction.recipes").joinpath("presets.json").read_text(encoding="utf-8")
    return [Recipe(**fields) for fields in json.loads(text)]


PRESETS: Mapping[str, Recipe] = FixedMapping({one.name: one for one in _packaged()})
"""Every preset by its name; ``recipe("auto")`` chooses among them."""

# Of a GPU that is not in the table: a driver keeps up to 8 % of what it is sold with, more where error correction does.
COVERED_FRACTION = 0.92


def recipe(name: str | os.PathLike[str]) -> Recipe:
    """Return a preset as a ``Recipe``; ``"auto"`` chooses the one for this machine.

    ``plan(model, gpu=...).recipe`` is one that is chosen for a model.

    Args:
        name: of the preset; or the path of a ``recipe.json`` that ``Plan.write`` has written, which is read as it is.

    Raises:
        ValueError: no such preset; the message names the nearest and all of them. A file that is no recipe.

    Examples:
        >>> recipe("4gb-gpu").checkpointing
        True
    """
    if isinstance(name, os.PathLike) or (isinstance(name, str) and name.endswith(".json")):
        return _from_file(name)
    if isinstance(name, str) and name == "auto":
        return _for_this_machine()
    if not isinstance(name, str) or name not in PRESETS:
        known = [*PRESETS, "auto"]
        raise ValueError(
            f"name={shown(name)} is not a preset; expected one of {', '.join(known)}.{did_you_mean(name, known)} "
            "See them: hf-memopt presets"
        )
    return _for_this_system(PRESETS[name])


def _from_file(path: str | os.PathLike[str]) -> Recipe:
    try:
        return Recipe.from_json(Path(path).read_text(encoding="utf-8-sig", errors="replace"))
    except ValueError as error:
        raise ValueError(f"name={shown(os.fspath(path))} holds no recipe: {error}") from error
    except OSError as error:
        raise ValueError(
            f"name={shown(os.fspath(path))} cannot be read ({error.strerror}); expected a file that Plan.write has "
            "written. Call: plan(model, gpu=...).write('run')"
        ) from error


def _for_this_machine() -> Recipe:
    from hf_memopt.training.devices import find_gpu
    from hf_memopt.training.devices.readings import read_memory  # torch, which no other preset needs

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
    from hf_memopt.training.devices import current_os

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
    weights under 16-bit autocast), and the recipe's callbacks and collator, and bucketed data.

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
    from hf_memopt.training.binding import note_trainer_of

    made = recipe(name).training_arguments(output_dir, effective_batch_size=effective_batch_size, **training_arguments)
    note_trainer_of(made)
    return made
