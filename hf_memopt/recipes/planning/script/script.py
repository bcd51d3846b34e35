"""Write the training script of a recipe: the stock ``Trainer``, with every choice spelled out beside its reason.

``train.py.jinja`` has its lines. The arguments are those that ``Recipe.training_arguments`` sets on every machine
(``stock_arguments``), the callbacks those of ``callbacks_of``, adapters and quantisation the options that
``Recipe.prepare_model`` and ``model_kwargs`` use; ``read_rows`` reads the data. What a recipe does not say (learning
rate, epochs, when to evaluate and save) has a usual value. A callback with nothing to do is left out.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from hf_memopt.binding.compatibility import names_of, refusal_of
from hf_memopt.binding.model import HEADS, NEW_HEADS
from hf_memopt.binding.model_changes import adapter_options, quantization_options
from hf_memopt.recipes import callbacks_of, sixteen_bits_here, stock_arguments
from hf_memopt.recipes.planning.script.layout import heading_of, laid_out, literal
from hf_memopt.rows import fitting_format
from hf_memopt.technique_list import TECHNIQUES, asked_by
from hf_memopt.techniques.nonfinite import OverflowCallback

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from hf_memopt.batching.padding_costs import DataFile
    from hf_memopt.recipes import Recipe

__all__ = ["ScriptFacts", "training_script"]

NOT_REENTRANT = {"use_reentrant": False}
"""What transformers 5.8.1 to 5.23.0 use where no options of checkpointing are given."""


@dataclass(frozen=True)
class ScriptFacts:
    """What a script says beside the recipe.

    Attributes:
        name: of the model, for ``from_pretrained``; "" for one without.
        task: of its head.
        seq_len: where rows are cut; None for a model without text.
        accumulation_steps: micro-batches of a step on each GPU.
        world_size: GPUs.
        output_dir: where it saves.
        heading: comments at its top.
        file: the data; None where none was given.
        tokenizer: a folder or name; None for the model's own.
        cut: which rows ``seq_len`` cuts; "" for none, and where that is unknown.
        engine: of several GPUs, by its name in the table of conflicts; "" for one GPU.
        model_type: of its configuration, where the rows depend on it.
    """

    name: str
    task: str
    seq_len: int | None
    accumulation_steps: int
    world_size: int
    output_dir: str
    heading: tuple[str, ...]
    file: DataFile | None = None
    tokenizer: str | None = None
    cut: str = ""
    engine: str = ""
    model_type: str = ""


def training_script(recipe: Recipe, facts: ScriptFacts) -> tuple[str, list[str]]:
    """Return the text of the script, and what its user has to complete."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"heading": heading_of, "literal": literal, "options": _options}
    task, precision = facts.task, recipe.step_settings().precision
    quantised = recipe.load_in is not None and recipe.weights_dtype == "float32"
    dtype = sixteen_bits_here(recipe) if quantised else recipe.weights_dtype
    view = {
        **vars(facts),
        "columns": _columns(task, facts.file),
        "recipe": recipe,
        "precision": precision,
        "dtype": dtype,
        "head": HEADS[task][0],
        "stock": list(_stock(recipe)),
        "optimizer": _optimizer(recipe),
        "callbacks": list(_callbacks(recipe, facts, precision)),
    }
    if recipe.load_in is not None:
        is_sharded = facts.engine == "FSDP2"
        view["quantization"] = quantization_options(recipe.load_in, dtype, task, is_sharded=is_sharded)
    if recipe.lora is not None:
        targets = recipe.lora_targets
        view["adapters"] = adapter_options(task, recipe.lora, alpha=recipe.lora_alpha, targets=targets)
    text = environment.get_template("train.py.jinja").render(view)
    laid = laid_out(text)
    ast.parse(laid)  # names and paths of any kind stand in it
    return laid, re.findall("  # FILL IN: (.+)", text)


def _columns(task: str, file: DataFile | None) -> dict[str, str]:
    """Return ``columns`` for ``read_rows``; none where it finds the same by their names."""
    found = None if file is None else fitting_format(file.columns, task, {})
    return {} if file is None or (found is not None and found[1] == file.parts) else dict(file.parts)


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={literal(value)}" for name, value in options.items() if value is not None)


def _stock(recipe: Recipe) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield stock's arguments that are not its defaults, those together that share a reason, with it."""
    stock = {name: value for name, value in stock_arguments(recipe).items() if value != _default(name)}
    of_evaluation = {name: stock.pop(name) for name in list(stock) if "eval_" in name}
    checkpointing = {name: stock.pop(name) for name in list(stock) if "_checkpointing" in name}
    for name, value in stock.items():
        is_clipping = name == "max_grad_norm"
        why = "released gradients have no common norm to clip by" if is_clipping else recipe.reason_of(name)
        yield {name: value}, why
    if checkpointing:
        yield checkpointing, recipe.reason_of("offload" if recipe.offload else "checkpointing")
    if of_evaluation:
        yield of_evaluation, recipe.reason_of(next(iter(of_evaluation)))


def _default(name: str) -> Any:
    """Return stock's default of an argument; of checkpointing's options what they are where none are given."""
    if name.endswith("_checkpointing_kwargs"):
        return NOT_REENTRANT
    return next(item.default for item in fields(TrainingArguments) if item.name == name)


# ---- The optimizer and the callbacks


def _optimizer(recipe: Recipe) -> tuple[str, str] | None:
    """Return the function that makes an optimizer of ours, and the reason for it; None for one of stock's."""
    one = next((one for one in asked_by(recipe).values() if one.optimizer), None)
    if one is None:
        return None
    return one.optimizer.rpartition(":")[2], recipe.reason_of(one.field_in(recipe)) if one.kind == "training" else ""


def _callbacks(recipe: Recipe, facts: ScriptFacts, precision: str) -> Iterator[tuple[str, str]]:
    """Yield the code of each callback that changes anything and that ``attach`` does not refuse, and its reason."""
    overflow = [OverflowCallback()] if precision == "fp16" else []
    for one in [*callbacks_of(recipe, recipe.optim), *overflow]:
        if _has_work(recipe, facts, precision, one) and not _is_refused(recipe, facts, precision, one):
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
        return "a step with values beyond fp16 is dropped, and reported"
    return recipe.reason_of(TECHNIQUES[callback.technique].field_in(recipe) or "embedding_bits")


def _has_work(recipe: Recipe, facts: ScriptFacts, precision: str, callback: TrainerCallback) -> bool:
    """Return whether a callback changes anything.

    ``PrecisionCallback`` has work under autocast alone: without its cache, or where PEFT leaves the copy of a new head,
    which it trains whole, in the 16 bits of the model. Weights that are all trained are loaded in float32.
    """
    if type(callback).__name__ != "PrecisionCallback":
        return True
    has_new_head = recipe.lora is not None and facts.task in NEW_HEADS
    return precision not in ("fp32", "tf32") and (not recipe.autocast_cache or has_new_head)


def _is_refused(recipe: Recipe, facts: ScriptFacts, precision: str, callback: Any) -> bool:
    """Return whether ``attach`` would refuse the callback beside what the recipe asks for."""
    of_whole_models = facts.world_size > 1 and facts.engine in ("", "DDP")
    used = {"fp16": precision == "fp16", "DDP, default flags": of_whole_models, facts.engine: True}
    in_use = [*asked_by(recipe), *(name for name, is_used in used.items() if is_used)]
    return any(refusal_of(name, own) is not None for name in in_use for own in names_of(callback))
