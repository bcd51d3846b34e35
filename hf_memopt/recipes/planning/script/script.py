"""Write the training script of a recipe: the stock ``Trainer``, with every choice spelled out beside its reason.

The arguments are those that ``Recipe.training_arguments`` sets on every machine (``stock_arguments``), the callbacks
those of ``callbacks_of``, adapters and quantisation the options that ``Recipe.prepare_model`` and ``model_kwargs`` use.
What a recipe does not say (learning rate, epochs, when to evaluate and save) has a usual value.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers

from hf_memopt import __version__
from hf_memopt.binding.adapters import adapter_options
from hf_memopt.binding.conflicts import refusal_of
from hf_memopt.binding.model_tasks import HEADS
from hf_memopt.binding.quantized_weights import quantization_options
from hf_memopt.recipes.planning.script.code import COLUMNS, Argument, call, commented, quoted
from hf_memopt.recipes.planning.script.rows import Rows, rows_of
from hf_memopt.recipes.resolved_arguments import sixteen_bits_here, stock_arguments
from hf_memopt.recipes.wired_trainer import callbacks_of

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from hf_memopt.batching.padding_costs.data_files import DataFile
    from hf_memopt.recipes.recipe import Recipe

__all__ = ["ScriptFacts", "training_script"]

LEARNING_RATES = {"lora": "2e-4", "causal-lm": "1e-5", "seq2seq": "1e-4", "speech-seq2seq": "1e-5"}
LEARNING_RATE = "2e-5"  # of encoders
EXPANDABLE = """\
import sys

import hf_memopt

if sys.platform == "linux":  # no gaps between batches of many lengths
    hf_memopt.use_expandable_segments()  # before the imports below start CUDA
"""
"""peft imports bitsandbytes, which asks for the GPU and so starts CUDA; an ``if`` may stand between imports (E402)."""
FIELDS = {  # the field of a Recipe that asks for a callback, whose reason is printed beside it
    "FreezeCallback": "freeze",
    "EmbeddingBitsCallback": "embedding_bits",
    "TiedEmbeddingCallback": "sparse_tied_embedding",
    "FusedCrossEntropyCallback": "fused_cross_entropy",
    "MicrobatchCallback": "micro_batching",
    "MemoryReportCallback": "memory_report",
}


@dataclass(frozen=True)
class ScriptFacts:
    """What a script says beside the recipe.

    Attributes:
        name: of the model, for ``from_pretrained``.
        task: of its head.
        seq_len: where rows are cut; None for a model without text.
        accumulation_steps: micro-batches of a step on each GPU.
        world_size: GPUs.
        output_dir: where it saves.
        heading: comments at its top.
        file: the data; None where none was given.
        tokenizer: a folder or name; None for the model's own.
        cut: which rows ``seq_len`` cuts; "" where that is unknown.
        engine: of several GPUs, by its name in the table of conflicts; "" for one GPU.
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


def training_script(recipe: Recipe, facts: ScriptFacts) -> tuple[str, str]:
    """Return the text of the script, and what its user has to complete; "" for nothing."""
    rows = rows_of(facts.task, facts.file, facts.tokenizer)
    precision = recipe.step_settings().precision
    model = _model(recipe, facts, rows)
    arguments = _arguments(recipe, facts, rows, precision)
    trainer = _trainer(recipe, facts, rows, precision)
    constants = [f"NAME = {quoted(facts.name)}"]
    if facts.seq_len is not None:
        tokens = f"tokens of the longest row{facts.cut}"
        constants = commented(f"NAME, LENGTH = {quoted(facts.name)}, {facts.seq_len}", tokens)
    body = [*constants, "", *rows.lines, "", *model, "", *arguments, "", *trainer]
    heading = [line for text in facts.heading for line in _comment(text)]
    made_with = f"Made with hf-memopt {__version__} and transformers {transformers.__version__}."
    lines = [*heading, *_comment(made_with), *_imports(recipe, facts, rows, precision), "", *body]
    return "\n".join(lines) + "\n", rows.to_fill_in


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _imports(recipe: Recipe, facts: ScriptFacts, rows: Rows, precision: str) -> list[str]:
    names = {"transformers": {"Trainer", "TrainingArguments", HEADS[facts.task][0]}}
    for module, more in rows.imports.items():
        names.setdefault(module, set()).update(more)
    if recipe.load_in is not None:
        names["transformers"].add("BitsAndBytesConfig")
        names |= {"accelerate": {"PartialState"}} if facts.world_size > 1 else {}
    if recipe.lora is not None:
        names["peft"] = {"LoraConfig", "get_peft_model"}
    if facts.task == "speech-seq2seq":
        names["hf_memopt.batching.collation.speech"] = {"SpeechCollator"}
    lines = [*EXPANDABLE.splitlines(), ""] if recipe.expandable_segments else ["import hf_memopt"]
    lines += ["import torch"] if precision in ("bf16", "tf32") else []
    for module in sorted(names):
        parts = sorted(names[module], key=lambda name: (name[0].islower(), name))
        line = f"from {module} import {', '.join(parts)}"
        exploded = [f"from {module} import (", *(f"    {part}," for part in parts), ")"]
        lines += [line] if len(line) <= COLUMNS else exploded
    return lines


# ---- The model ------------------------------------------------------------------------------------------------------


def _model(recipe: Recipe, facts: ScriptFacts, rows: Rows) -> list[str]:
    quantised = recipe.load_in is not None and recipe.weights_dtype == "float32"
    dtype = sixteen_bits_here(recipe) if quantised else recipe.weights_dtype
    arguments = [Argument("NAME"), Argument(f"dtype={quoted(dtype)}")]
    reason, lines = recipe.reason_of("weights_dtype"), []
    if recipe.weights_dtype == "float32":
        reason = f"float32: {reason}"
    if recipe.load_in is not None:
        options = quantization_options(recipe.load_in, dtype, facts.task, is_sharded=facts.engine == "FSDP")
        lines += call("quantization = BitsAndBytesConfig", _options(options), recipe.reason_of("load_in"))
        arguments.append(Argument("quantization_config=quantization"))
        reason = ""
    if recipe.load_in is not None and facts.world_size > 1:  # each process puts its quantised weights on its own GPU
        arguments.append(Argument('device_map={"": PartialState().local_process_index}'))
    if recipe.attn_implementation != "sdpa":  # what stock chooses itself
        arguments.append(Argument(f"attn_implementation={quoted(recipe.attn_implementation)}"))
    if rows.labels:
        arguments.append(Argument(f"num_labels={rows.labels}"))
    if facts.task == "image-classification":
        arguments.append(Argument("ignore_mismatched_sizes=True"))  # its head is a new one
    lines += call(f"model = {HEADS[facts.task][0]}.from_pretrained", arguments, reason)
    if recipe.lora is not None:
        options = adapter_options(facts.task, recipe.lora, alpha=recipe.lora_alpha, targets=recipe.lora_targets)
        lines += call("lora = LoraConfig", _options(options))
        lines += call("model = get_peft_model", [Argument("model"), Argument("lora")])
    if recipe.load_in is not None:
        reason = "what is trained in float32, the rest in 16 bits"
        lines += call("hf_memopt.prepare_quantized", [Argument("model")], reason)
    return lines


def _options(options: Mapping[str, Any]) -> Iterator[Argument]:
    for name, value in options.items():
        if value is not None:
            yield Argument(f"{name}={_literal(value)}")


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        items = ", ".join(map(_literal, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    return repr(value)


# ---- The arguments --------------------------------------------------------------------------------------------------


def _arguments(recipe: Recipe, facts: ScriptFacts, rows: Rows, precision: str) -> list[str]:
    rate = LEARNING_RATES.get("lora" if recipe.lora is not None else facts.task, LEARNING_RATE)
    stock = stock_arguments(recipe)
    steps, per_device = facts.accumulation_steps, recipe.per_device_train_batch_size
    examples = steps * per_device * facts.world_size
    found = [Argument(f"output_dir={quoted(facts.output_dir)}")]
    if precision in ("bf16", "fp16"):
        found.append(Argument(f"{precision}=True", "matrix products in 16 bits"))
    if precision == "bf16":
        found.append(Argument("use_cpu=not torch.accelerator.is_available()", "to try it without a GPU"))
    if precision == "tf32":
        found.append(Argument("tf32=torch.cuda.is_available()", recipe.reason_of("precision")))
    found += [
        Argument(f"learning_rate={rate}", "a usual value to begin with"),
        Argument("num_train_epochs=3"),
        Argument(f"per_device_train_batch_size={per_device}", recipe.reason_of("per_device_train_batch_size")),
        Argument(f"gradient_accumulation_steps={steps}", f"{examples} examples a step"),
    ]
    of_evaluation = {"per_device_eval_batch_size", "eval_accumulation_steps"}
    for name, value in stock.items():
        if name not in of_evaluation and not (name == "dataloader_num_workers" and value == 0):
            found.append(Argument(f"{name}={_literal(value)}", _reason_of(recipe, name)))
    if rows.sorted and recipe.bucketing:
        found.append(Argument('train_sampling_strategy="sequential"', "the bucketed view shuffles"))
    found += [
        Argument(f"{name}={stock[name]}", recipe.reason_of(name))
        for name in sorted(of_evaluation, reverse=True)
        if stock[name] is not None
    ]
    usual = ('eval_strategy="epoch"', 'save_strategy="epoch"', "save_total_limit=2", "logging_steps=10")
    found += map(Argument, usual)
    if facts.task == "image-classification":
        found.append(Argument("remove_unused_columns=False", "the images are read by examples()"))
    return call("args = TrainingArguments", found)


def _reason_of(recipe: Recipe, name: str) -> str:
    if name == "max_grad_norm":
        return "released gradients have no norm of all of them to clip"
    if name.endswith("_checkpointing"):
        return recipe.reason_of("offload" if recipe.offload else "checkpointing")
    return "" if name.endswith("_kwargs") else recipe.reason_of(name)


# ---- The Trainer ----------------------------------------------------------------------------------------------------


def _trainer(recipe: Recipe, facts: ScriptFacts, rows: Rows, precision: str) -> list[str]:
    train, test = 'data["train"]', 'data["test"]'
    if rows.sorted and recipe.bucketing:
        options = [train, f"batch_size={recipe.per_device_train_batch_size}", *_padding(recipe)]
        train, test = f"hf_memopt.bucketed({', '.join(options)})", f"hf_memopt.sorted_by_length({test})"
    found = [Argument("model=model"), Argument("args=args"), Argument(f"processing_class={rows.processor}")]
    collator = _collator(recipe, facts, rows)
    if collator:
        found.append(Argument(f"data_collator={collator}", "pads a batch to its longest row" if rows.sorted else ""))
    found += [
        Argument(f"train_dataset={train}", "rows of like lengths together" if rows.sorted else ""),
        Argument(f"eval_dataset={test}"),
    ]
    optimizer = _optimizer(recipe)
    if optimizer:
        found.append(Argument("optimizer_cls_and_kwargs=optimizer"))
    callbacks = [
        Argument(f"hf_memopt.{_source_of(one)}", _reason_of_callback(recipe, one))
        for one in callbacks_of(recipe, recipe.optim)
        if not _is_refused(recipe, facts, precision, one)
    ]
    found.append(Argument("callbacks=[", items=callbacks))
    save = call("trainer.save_model", [Argument(quoted(f"{facts.output_dir}/final"))])
    return [*optimizer, *call("trainer = Trainer", found), "hf_memopt.attach(trainer).train()", *save]


def _padding(recipe: Recipe) -> list[str]:
    return [] if recipe.pad_to_multiple_of == 8 else [f"pad_to_multiple_of={recipe.pad_to_multiple_of}"]


def _collator(recipe: Recipe, facts: ScriptFacts, rows: Rows) -> str:
    if facts.task == "speech-seq2seq":
        return "SpeechCollator(model.config.decoder_start_token_id, model.dtype)"
    if not rows.sorted:
        return ""  # stock's, which stacks images
    own = {"causal-lm": ["causal_lm=True"], "masked-lm": ["mlm_probability=0.15"]}.get(facts.task, [])
    return f"hf_memopt.BucketedCollator({', '.join(['tokenizer', *own, *_padding(recipe)])})"


def _optimizer(recipe: Recipe) -> list[str]:
    """Return the lines of an optimizer that stock's arguments do not name."""
    rounding = [Argument(f"rounding={quoted(recipe.rounding)}")] if recipe.rounding != "nearest" else []
    given = [Argument("args"), Argument("model"), *rounding]
    if recipe.gradient_release:
        return call("optimizer = hf_memopt.released_optimizer", given, recipe.reason_of("gradient_release"))
    if rounding:
        return call("optimizer = hf_memopt.rounded_optimizer", given, recipe.reason_of("rounding"))
    return []


def _source_of(callback: TrainerCallback) -> str:
    """Return the code that makes a callback: its class, and the arguments that are not their defaults."""
    arguments = []
    for name, parameter in inspect.signature(type(callback)).parameters.items():
        value = getattr(callback, name)
        if parameter.default is inspect.Parameter.empty:
            arguments.append(_literal(value))
        elif value != parameter.default:
            arguments.append(f"{name}={_literal(value)}")
    return f"{type(callback).__name__}({', '.join(arguments)})"


def _reason_of_callback(recipe: Recipe, callback: TrainerCallback) -> str:
    name = type(callback).__name__
    if name == "PrecisionCallback":
        copies = "" if recipe.autocast_cache else ", without a 16-bit copy of each weight from forward to backward"
        return f"updates in {'16 bits' if recipe.trains_16_bits else 'float32'}{copies}"
    return recipe.reason_of(FIELDS[name])


def _is_refused(recipe: Recipe, facts: ScriptFacts, precision: str, callback: Any) -> bool:
    """Return whether ``attach`` would refuse the callback beside what the recipe asks for."""
    used = {"gradient release": recipe.gradient_release, "16-bit weights": recipe.rounding != "nearest"}
    of_whole_models = facts.world_size > 1 and facts.engine in ("", "DDP")
    used |= {"fp16": precision == "fp16", "DDP, default flags": of_whole_models, facts.engine: True}
    return any(is_used and refusal_of(name, callback.technique) is not None for name, is_used in used.items())
