"""Write the training script of a recipe: the stock ``Trainer``, with every choice spelled out beside its reason.

``train.py.jinja`` has its lines. The arguments are those that ``Recipe.training_arguments`` sets on every machine
(``stock_arguments``), the callbacks those of ``Recipe.callbacks``, adapters and quantisation the options that
``Recipe.prepare_model`` and ``model_kwargs`` use; ``read_rows`` reads the data. What a recipe does not say (learning
rate, epochs, when to evaluate and save) has a usual value. A callback with nothing to do is left out.
"""

from __future__ import annotations

import ast
import glob
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from hf_memopt import __version__
from hf_memopt.prediction.memory.recording import session
from hf_memopt.prediction.recipes import sixteen_bits_here, stock_arguments
from hf_memopt.prediction.recipes.planning.script.layout import heading_of, laid_out, literal
from hf_memopt.technique_list import TECHNIQUES, asked_by
from hf_memopt.training.binding.compatibility import names_of, refusal_of
from hf_memopt.training.binding.model import head_for
from hf_memopt.training.binding.model_changes import adapter_options, quantization_options
from hf_memopt.training.rows import fitting_format
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from hf_memopt.prediction.recipes import Recipe
    from hf_memopt.prediction.recipes.planning import Plan
    from hf_memopt.prediction.recipes.planning.script.folder import RowsFile
    from hf_memopt.training.batching import DataFile

NOT_REENTRANT = {"use_reentrant": False}
"""What transformers 5.8.1 to 5.23.0 use where no options of checkpointing are given."""


def script_of(found: Plan, rows: RowsFile | None, *, output_dir: str = "out") -> tuple[str | None, list[str]]:
    """Return the script of the chosen recipe, None where there is none for the task, and what it leaves to complete."""
    recipe, chosen, task = found.recipe, found.chosen, found.task
    file = None if rows is None else rows.read(task)
    facts = None if found.simulation is None else found.simulation.facts
    if task is None or "script" not in head_for(task).traits or (facts is not None and not _is_loaded(found, facts)):
        return None, []
    assert chosen is not None
    quantised = recipe.load_in is not None and recipe.weights_dtype == "float32"
    view = {
        "found": found,
        "chosen": chosen,
        "recipe": recipe,
        "task": task,
        "output_dir": output_dir,
        "versions": {
            "hf_memopt": __version__,
            **{name: version(name).partition("+")[0] for name in ("transformers", "torch")},
        },
        "file": file,
        "path": "" if file is None else file.path if file.is_folder else glob.escape(file.path),
        "columns": {} if file is None else _columns(task, file),
        "tokenizer": None if rows is None else rows.tokenizer,
        "model_type": "" if facts is None else facts.kind,
        "precision": recipe.step_settings().precision,
        "dtype": (dtype := sixteen_bits_here(recipe) if quantised else recipe.weights_dtype),
        "head": head_for(task),
        "stock": list(_stock(recipe)),
        "optimizer": next((one for one in asked_by(recipe).values() if one.optimizer), None),
        "left_out": "",
        "on_cpu": recipe.step_settings().precision != "fp32" or (dtype != "float32" and recipe.load_in is None),
        "callbacks": list(_callbacks(found)),
    }
    new = None if facts is None else facts.new_parts
    if recipe.load_in is not None:
        view["quantization"] = quantization_options(recipe.load_in, dtype, task, new=new)
    if recipe.lora is not None:
        of_recipe: dict[str, Any] = {"lora_alpha": recipe.lora_alpha, "lora_targets": recipe.lora_targets}
        planned = found.simulation
        model = None if planned is None else session().load(planned.model, task=planned.task).model
        view["adapters"] = adapters = adapter_options(task, recipe.lora, **of_recipe, new=new, model=model)
        names = {name.rpartition(".")[2] for name in adapters["exclude_modules"] or ()}
        names |= {"experts in 4 bits"} if recipe.quantize_experts and recipe.lora_targets == "auto" else set()
        view["left_out"] = " and ".join(sorted(names))  # of what PEFT would take with "all-linear"
    text = _template().render(view)
    laid = laid_out(text)
    ast.parse(laid)  # names and paths of any kind stand in it
    return laid, re.findall("  # FILL IN: (.+)", text)


def _is_loaded(found: Plan, facts: Any) -> bool:
    """Return whether a script that loads a model by its name trains what was planned, and knows its kind."""
    assert found.simulation is not None
    is_changed = facts.has_adapters or (
        facts.is_quantized and not isinstance(found.simulation.model, str | os.PathLike)
    )
    unknown = {"seq2seq": facts.kind == "mbart", "speech-seq2seq": facts.kind not in ("", "whisper")}
    is_other_kind = unknown.get(found.task or "", False)
    return not is_changed and not is_other_kind


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"bytes": format_bytes, "heading": heading_of, "literal": literal, "options": _options}
    environment.filters["brief"] = brief
    return environment.get_template("train.py.jinja")


def brief(reason: str) -> str:
    """Return the first clause of a reason; the whole of one that names its source."""
    return reason if "://" in reason else re.split("[,;] ", reason)[0]


def _columns(task: str, file: DataFile) -> dict[str, str]:
    """Return ``columns`` for ``read_rows``; none where it finds the same by their names."""
    found = fitting_format(file.columns, task, {})
    return {} if found is not None and found[1] == file.parts else dict(file.parts)


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in options.items() if value is not None)


def _stock(recipe: Recipe) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield stock's arguments that are not its defaults, those together that share a reason, with it."""
    stock = {name: value for name, value in stock_arguments(recipe).items() if value != _default(name)}
    of_evaluation = {name: stock.pop(name) for name in list(stock) if "eval_" in name or name.endswith("_loss_only")}
    checkpointing = {name: stock.pop(name) for name in list(stock) if "_checkpointing" in name}
    for name, value in stock.items():
        is_clipping = name == "max_grad_norm"
        why = "released gradients have no common norm to clip by" if is_clipping else recipe.reason_of(name)
        yield {name: value}, brief(why)
    if checkpointing:
        yield checkpointing, brief(recipe.reason_of("offload" if recipe.offload else "checkpointing"))
    if of_evaluation:
        yield of_evaluation, brief(recipe.reason_of(next(reversed(of_evaluation))))


def _default(name: str) -> Any:
    """Return stock's default of an argument; of checkpointing's options what they are where none are given."""
    if name.endswith("_checkpointing_kwargs"):
        return NOT_REENTRANT
    return next(item.default for item in fields(TrainingArguments) if item.name == name)


# ---- The callbacks


def _callbacks(found: Plan) -> Iterator[tuple[str, str]]:
    """Yield the code of each callback that changes anything and that ``attach`` does not refuse, and its reason."""
    recipe, precision = found.recipe, found.recipe.step_settings().precision
    in_use = [*asked_by(recipe), *(["fp16"] if precision == "fp16" else [])]
    for one in recipe.callbacks():
        is_refused = any(refusal_of(name, own) is not None for name in in_use for own in names_of(one))
        is_idle = type(one).__name__ == "PrecisionCallback" and not _has_autocast(recipe, found.task, precision)
        is_idle |= type(one).__name__ == "EmbeddingBitsCallback" and found.task == "image-classification"
        if not is_refused and not is_idle:
            yield _source_of(one), _reason_of_callback(recipe, one)


def _source_of(callback: TrainerCallback) -> str:
    """Return the code that makes a callback: its class, and the arguments that are not their defaults."""
    arguments = []
    for name, parameter in inspect.signature(type(callback)).parameters.items():
        value = getattr(callback, name)
        if parameter.default is inspect.Parameter.empty:
            arguments.append(literal(value))
        elif value != parameter.default:
            arguments.append(f"{name}={literal(value)}")
    return f"{type(callback).__name__}({', '.join(arguments)})"


def _reason_of_callback(recipe: Recipe, callback: Any) -> str:
    name = type(callback).__name__
    if name == "PrecisionCallback":
        return "a new head is updated in float32" if recipe.autocast_cache else "no 16-bit copies are kept"
    if name == "OverflowCallback":
        return "a step with values beyond fp16 is dropped"
    return brief(recipe.reason_of(TECHNIQUES[callback.technique].field_in(recipe) or "embedding_bits"))


def _has_autocast(recipe: Recipe, task: str | None, precision: str) -> bool:
    """Return whether autocast leaves ``PrecisionCallback`` something to do.

    That is: without its cache, or where PEFT leaves the copy of a new head, which it trains whole, in the 16 bits of
    the model. Weights that are all trained are loaded in float32.
    """
    has_new_head = recipe.lora is not None and bool(head_for(task).new)
    return precision not in ("fp32", "tf32") and (not recipe.autocast_cache or has_new_head)
