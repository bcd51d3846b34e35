"""Write the training script of a recipe: the stock ``Trainer``, with every choice spelled out beside its reason.

The arguments are those that ``Recipe.training_arguments`` sets on every machine (``stock_arguments``), the callbacks
those of ``callbacks_of``, adapters and quantisation the options that ``Recipe.prepare_model`` and ``model_kwargs`` use.
What a recipe does not say (learning rate, epochs, when to evaluate and save) has a usual value. What equals stock's
default is left out, and so is a callback with nothing to do: a script has 45 lines or fewer, about 50 with quantised
weights or expandable segments.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from hf_memopt.binding.adapters import adapter_options
from hf_memopt.binding.conflicts import names_of
from hf_memopt.binding.model_tasks import HEADS, NEW_HEADS
from hf_memopt.binding.quantized_weights import quantization_options
from hf_memopt.binding.refusals import refusal_of
from hf_memopt.binding.techniques import TECHNIQUES, asked_by
from hf_memopt.recipes.planning.script.code import COLUMNS, Argument, call, commented, quoted, together
from hf_memopt.recipes.planning.script.rows import KNOWN, Rows, rows_of
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
import hf_memopt

if __name__ == "__main__":  # before the imports below start CUDA
    hf_memopt.use_expandable_segments()  # no gaps between batches of many lengths
"""
"""peft imports bitsandbytes, which asks for the GPU and so starts CUDA; an ``if`` may stand between imports (E402)."""
NOT_REENTRANT = {"use_reentrant": False}
"""What transformers 5.8.1 to 5.23.0 use where no options of checkpointing are given."""


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
        cut: which rows ``seq_len`` cuts; "" for none, and where that is unknown.
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
        cut = f'CUT = {{"truncation": True, "max_length": {facts.seq_len}}}'
        is_tokenised = facts.task in KNOWN and facts.file is not None and not facts.file.is_text
        reason = facts.cut or "tokens of the longest row"
        constants += commented(f"LENGTH = {facts.seq_len}" if is_tokenised else cut, reason)
    heading = [line for text in facts.heading for line in _comment(text)]
    imports = _imports(recipe, facts, precision)
    lines = [*heading, *imports, "", *constants, *rows.lines, "", *model, "", *arguments, *trainer]
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


def _imports(recipe: Recipe, facts: ScriptFacts, precision: str) -> list[str]:
    modules = {"datasets", "transformers"}
    modules |= {"torch"} if precision in ("bf16", "tf32") else set()
    modules |= {"peft"} if recipe.lora is not None else set()
    modules |= {"accelerate"} if recipe.load_in is not None and facts.world_size > 1 else set()
    modules |= set() if recipe.expandable_segments else {"hf_memopt"}
    before = [*EXPANDABLE.splitlines(), ""] if recipe.expandable_segments else []
    speech = ["from hf_memopt.batching.collation.speech import SpeechCollator"] * (facts.task == "speech-seq2seq")
    return [*before, *(f"import {name}" for name in sorted(modules)), *speech]


# ---- The model ------------------------------------------------------------------------------------------------------


def _model(recipe: Recipe, facts: ScriptFacts, rows: Rows) -> list[str]:
    quantised = recipe.load_in is not None and recipe.weights_dtype == "float32"
    dtype = sixteen_bits_here(recipe) if quantised else recipe.weights_dtype
    arguments = ["NAME", f"dtype={quoted(dtype)}"]
    reason, lines = recipe.reason_of("weights_dtype"), []
    if recipe.weights_dtype == "float32":
        reason = f"float32: {reason}"
    if recipe.load_in is not None:
        options = _options(quantization_options(recipe.load_in, dtype, facts.task, is_sharded=facts.engine == "FSDP2"))
        lines += call(
            "quantization = transformers.BitsAndBytesConfig", [together(options)], recipe.reason_of("load_in")
        )
        arguments.append("quantization_config=quantization")
        reason = ""
    if recipe.load_in is not None and facts.world_size > 1:  # each process puts its quantised weights on its own GPU
        arguments.append('device_map={"": accelerate.PartialState().local_process_index}')
    if recipe.attn_implementation != "sdpa":  # what stock chooses itself
        arguments.append(f"attn_implementation={quoted(recipe.attn_implementation)}")
    if rows.labels:
        arguments.append(f"num_labels={rows.labels}")
    if facts.task == "image-classification":
        arguments.append("ignore_mismatched_sizes=True")  # its head is a new one
    lines += call(f"model = transformers.{HEADS[facts.task][0]}.from_pretrained", [together(arguments)], reason)
    if recipe.lora is not None:
        options = _options(
            adapter_options(facts.task, recipe.lora, alpha=recipe.lora_alpha, targets=recipe.lora_targets)
        )
        lines += call("model = peft.get_peft_model(model, peft.LoraConfig", [together(options)], end="))")
    if recipe.load_in is not None:
        reason = "trained weights in float32, all others in 16 bits"
        lines += call("hf_memopt.prepare_quantized", [Argument("model")], reason)
    return lines


def _options(options: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name}={_literal(value)}" for name, value in options.items() if value is not None)


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
    stock = {name: value for name, value in stock_arguments(recipe).items() if value != _default(name)}
    steps, per_device = facts.accumulation_steps, recipe.per_device_train_batch_size
    batch = [f"per_device_train_batch_size={per_device}", f"gradient_accumulation_steps={steps}"]
    kept = [quoted(facts.output_dir), 'eval_strategy="epoch"', 'save_strategy="epoch"', "save_total_limit=2"]
    found = [
        together(kept),
        together([f"learning_rate={rate}", "num_train_epochs=3", "logging_steps=10"], "usual values"),
        together(batch, f"{steps * per_device * facts.world_size} examples a step"),
    ]
    if precision == "bf16":
        found.append(
            together(["bf16=True", "use_cpu=not torch.accelerator.is_available()"], "matrix products in 16 bits")
        )
    elif precision == "fp16":
        found.append(Argument("fp16=True", "matrix products in 16 bits"))
    elif precision == "tf32":
        found.append(Argument("tf32=torch.cuda.is_available()", recipe.reason_of("precision")))
    of_evaluation = [name for name in ("per_device_eval_batch_size", "eval_accumulation_steps") if name in stock]
    found += _of_stock({name: value for name, value in stock.items() if name not in of_evaluation}, recipe)
    if of_evaluation:
        reason = recipe.reason_of(of_evaluation[0])
        found.append(together([f"{name}={stock[name]}" for name in of_evaluation], reason))
    if facts.task == "image-classification":
        found.append(Argument("remove_unused_columns=False", "encode() reads the images"))
    return call("args = transformers.TrainingArguments", found)


def _default(name: str) -> Any:
    """Return stock's default of an argument; of checkpointing's options what they are where none are given."""
    if name.endswith("_checkpointing_kwargs"):
        return NOT_REENTRANT
    return next(item.default for item in fields(TrainingArguments) if item.name == name)


def _of_stock(stock: Mapping[str, Any], recipe: Recipe) -> Iterator[Argument]:
    checkpointing = [f"{name}={_literal(value)}" for name, value in stock.items() if "_checkpointing" in name]
    for name, value in stock.items():
        if name == "max_grad_norm":
            yield Argument(f"{name}={value}", "released gradients have no common norm to clip by")
        elif "_checkpointing" not in name:
            yield Argument(f"{name}={_literal(value)}", recipe.reason_of(name))
    if checkpointing:
        yield together(checkpointing, recipe.reason_of("offload" if recipe.offload else "checkpointing"))


# ---- The Trainer ----------------------------------------------------------------------------------------------------


def _trainer(recipe: Recipe, facts: ScriptFacts, rows: Rows, precision: str) -> list[str]:
    train, test = 'data["train"]', 'data["test"]'
    if rows.sorted and recipe.bucketing:
        options = [train, f"batch_size={recipe.per_device_train_batch_size}", *_padding(recipe)]
        train, test = f"hf_memopt.bucketed({', '.join(options)})", f"hf_memopt.sorted_by_length({test})"
    found = [together(["model=model", "args=args", f"processing_class={rows.processor}"])]
    collator = _collator(recipe, facts, rows)
    if collator:
        found.append(Argument(f"data_collator={collator}"))
    found += [
        Argument(f"train_dataset={train}", "little padding" if rows.sorted else ""),
        Argument(f"eval_dataset={test}"),
    ]
    optimizer = _optimizer(recipe)
    if optimizer:
        found.append(Argument("optimizer_cls_and_kwargs=optimizer"))
    callbacks = [
        Argument(f"hf_memopt.{_source_of(one)}", _reason_of_callback(recipe, one))
        for one in callbacks_of(recipe, recipe.optim)
        if _has_work(recipe, facts, precision, one) and not _is_refused(recipe, facts, precision, one)
    ]
    found.append(Argument("callbacks=[", items=callbacks))
    save = call("trainer.save_model", [Argument(quoted(f"{facts.output_dir}/final"))])
    return [*optimizer, *call("trainer = transformers.Trainer", found), "hf_memopt.attach(trainer).train()", *save]


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
    for one in asked_by(recipe).values():
        if one.optimizer:
            reason = recipe.reason_of(one.field_in(recipe)) if one.kind == "training" else ""
            return call(f"optimizer = hf_memopt.{one.optimizer.rpartition(':')[2]}", given, reason)
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


def _reason_of_callback(recipe: Recipe, callback: Any) -> str:
    name = type(callback).__name__
    if name == "PrecisionCallback":
        return "a new head is updated in float32" if recipe.autocast_cache else "no 16-bit copies are kept"
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
