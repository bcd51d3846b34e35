"""Load a model on the meta device, where tensors have shapes but no memory, from a module, a configuration or a name.

A module is copied without its weights; a configuration, a folder, an id on the hub or a well-known name is built from
the configuration alone. Either way no weight is initialised, and an 8B model takes well under a second and no host
memory (``tests/memory/test_models.py`` checks both). The well-known names are in ``known_models.json`` and never use
the network: it has what affects memory (sizes, dropout, tied weights) with the source of each figure.

Limitations: Python code from a repository is never run (``trust_remote_code=False``); of quantised weights that only a
configuration announces, those of bitsandbytes can be built.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from hf_memopt.errors import did_you_mean
from hf_memopt.prediction.memory.cuda import use_stand_in
from hf_memopt.prediction.memory.models.config_files import TASKS, checked_task, find_config, known_models, known_name
from hf_memopt.prediction.memory.models.meta_copy import copy_to_meta
from hf_memopt.prediction.memory.settings import NotEstimableError
from hf_memopt.training.binding.model import HEADS, task_of_class, unwrap_model
from hf_memopt.training.binding.model_changes import new_parts, quantization_options

__all__ = ["TASKS", "LoadedModel", "load_model", "rest_to_meta"]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on the meta device, in training mode, that nothing else refers to."""

    name: str  # to display: the well-known name, the folder's, or the class's
    model: nn.Module
    key: Hashable | None  # equal keys mean equal models; None for a module, which may change between two calls
    notes: tuple[str, ...] = ()  # on the published weights, and on kernels that may replace what is simulated


def load_model(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    *,
    attn_implementation: str | None = None,
    weights_dtype: str = "float32",
    task: str | None = None,
    load_in: str | None = None,
    compute_dtype: str = "bfloat16",
    keep_cache: bool = False,
) -> LoadedModel:
    """Return a copy of ``model`` on the meta device; the given model is not changed, and no weight is read.

    Args:
        model: as for ``estimate``; PEFT's wrappers too. A module's hooks are copied, its gradients are not.
        attn_implementation: None for the model's own. ``"sdpa"`` becomes ``"eager"`` where a class has no sdpa.
        weights_dtype: of what is built from a configuration; a module keeps its own.
        task: the head to build, one of ``TASKS``; by default the first of the configuration's ``architectures``, else
            causal LM for decoders, sequence classification for encoders. Ignored for a module.
        load_in: ``"nf4"`` or ``"int8"`` for the linears that ``from_pretrained`` would quantise.
        compute_dtype: of the products with 4-bit weights.
        keep_cache: whether the model keeps its own ``use_cache``; ``Trainer`` switches it off.

    Examples:
        >>> loaded = load_model("Llama-3.2-1B")
        >>> type(loaded.model).__name__, sum(weight.numel() for weight in loaded.model.parameters())
        ('LlamaForCausalLM', 1235814400)
    """
    task = checked_task(task)
    if attn_implementation is not None:
        _check_attention(attn_implementation)
    if isinstance(model, nn.Module):
        if load_in is not None:
            raise ValueError(
                f"load_in={load_in!r} cannot quantise the given module=<{type(model).__name__}>, which is loaded "
                "already; expected a name or a configuration. Pass model=model.config, or a module that "
                "from_pretrained(quantization_config=...) has loaded, without load_in"
            )
        _quantization(getattr(unwrap_model(model), "config", None))
        copied = rest_to_meta(copy_to_meta(model))
        # private, seen in transformers 5.8.1, 5.17.0 and 5.23.0
        own = getattr(getattr(unwrap_model(copied), "config", None), "_attn_implementation", None)
        if attn_implementation is not None or own == "flash_attention_2":
            _set_attention(copied, attn_implementation or "flash_attention_2")
        return LoadedModel(type(unwrap_model(copied)).__name__, _as_in_training(copied, keep_cache), None)
    if isinstance(model, PretrainedConfig):
        name, config, generation = None, copy.deepcopy(model), None
    elif isinstance(model, str | os.PathLike):
        name, config, generation, task = _read_config(os.fspath(model), task)
    else:
        raise TypeError(
            f"model=<{type(model).__name__}> cannot be loaded; expected an nn.Module, a PretrainedConfig, or "
            "the name of a model or a folder. Pass model='bert-base-uncased'"
        )
    task = task or _own_task(config)
    if task == "question-answering" and config.num_labels != 2:
        config.num_labels = 2  # where an answer starts and ends, whatever the model was trained for before
    if attn_implementation is None:  # private, as above
        attn_implementation = getattr(config, "_attn_implementation", None)
    if config.model_type not in HEADS[task].types:
        raise ValueError(
            f"task={task!r} has no head for a model of type {config.model_type!r}; expected one of "
            f"{', '.join(map(repr, _tasks_of_type(config.model_type)))}. Leave it out for the usual one"
        )
    if load_in is not None and getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"load_in={load_in!r} is given for a model whose configuration has a quantization_config; expected only "
            "one of them. Remove load_in, or call: del config.quantization_config"
        )
    with _one_error(f"model={name or type(config).__name__!r} cannot be built"):
        text = config.to_json_string() + ("" if generation is None else generation.to_json_string())
        quantization = _quantization(config)
        if quantization is not None:
            del config.quantization_config
        built = _build(config, task, attn_implementation, weights_dtype)
        new = new_parts(built)
        if load_in is not None:
            quantization = quantization_options(load_in, compute_dtype, task, new=new)
        if quantization is not None:
            from hf_memopt.prediction.memory.quantized import quantize  # bitsandbytes takes a second to import

            quantize(built, quantization)
        if name is not None:
            _untie_head(built)
        if generation is not None and built.can_generate():
            built.generation_config = generation
    packed = {*new} - {*new_parts(built)}
    is_new = task_of_class().get(str(_named_class(config))) != task
    if quantization and packed and (is_new or packed & {*HEADS[task].new}):
        skipped = [*dict.fromkeys([*(quantization.get("llm_int8_skip_modules") or ()), *new])]
        raise ValueError(
            f"model={name or type(config).__name__!r} has a quantization_config by which new parts for task={task!r} "
            f"are quantised ({', '.join(sorted(packed))}), which cannot be trained; expected them in 16 bits. Pass its "
            f"configuration with config.quantization_config['llm_int8_skip_modules'] = {skipped}"
        )
    options = weights_dtype, attn_implementation, load_in, compute_dtype, keep_cache
    key = _code_of(built), text, name is None, *options
    notes = [str(note)] if (note := known_models().get(name or "", {}).get("note")) is not None else []
    if any(name.endswith(".A_log") for name, _ in built.named_parameters()):  # use_kernel_func_from_hub_with_fallback
        notes.append(
            "layers with a recurrent state are simulated by transformers' own code; with the kernels of mamba_ssm or "
            "fla (flash-linear-attention) a step keeps other tensors and takes other times"
        )
    return LoadedModel(name or type(built).__name__, _as_in_training(built, keep_cache), key, tuple(notes))


def rest_to_meta(model: nn.Module) -> nn.Module:
    """Move what a class created on the host: buffers, and tensors that are plain attributes."""
    model.to("meta")
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                setattr(module, name, value.to("meta"))
    return model


def _code_of(model: nn.Module) -> Hashable:
    """Return the classes of a model with their ``forward``, which may have been replaced, and its experts' kernels.

    A configuration's JSON has neither. ``_experts_implementation`` is private, seen in transformers 5.8.1 to 5.23.0.
    """
    modules = list(model.modules())
    code = dict.fromkeys((type(module), type(module).forward) for module in modules)
    experts = (getattr(getattr(module, "config", None), "_experts_implementation", None) for module in modules)
    return tuple(code), tuple(dict.fromkeys(map(str, experts)))


# ---- building


def _tasks_of_type(model_type: str) -> list[str]:
    return [task for task, head in HEADS.items() if model_type in head.types]


def _usual_task(config: PretrainedConfig) -> str | None:
    """Return the head that a model of this configuration is most often trained with.

    An encoder is recognised by its masked LM; most encoders list a causal LM as well.
    """
    tasks = _tasks_of_type(config.model_type)
    if config.is_encoder_decoder:
        order = ["speech-seq2seq", "seq2seq"]
    elif "masked-lm" in tasks and not getattr(config, "is_decoder", False):
        order = ["sequence-classification", "masked-lm"]
    else:
        order = ["image-text-to-text", "causal-lm", "zero-shot-image-classification", "image-classification"]
    return next((task for task in (*order, *tasks) if task in tasks), None)


def _own_task(config: PretrainedConfig) -> str:
    """Return the task of the configuration's first architecture, or the usual one where it names none."""
    usual = _usual_task(config)
    named = _named_class(config)
    task = usual if named is None or is_headless(config) else task_of_class().get(str(named))
    if task is None:
        what = f"architectures=[{named!r}]" if named is not None else f"model_type={config.model_type!r}"
        tasks = _tasks_of_type(config.model_type)
        if not tasks:
            raise ValueError(
                f"{what} has no head whose batch is known; expected a model type with one of "
                f"{', '.join(map(repr, TASKS))}. Pass a configuration of such a type"
            )
        raise ValueError(
            f"{what} is not a head with a known loss and batch; expected one for {', '.join(map(repr, tasks))}. "
            f"Pass task={(usual or tasks[0])!r}"
        )
    return task


def is_headless(config: PretrainedConfig) -> bool:
    """Return whether a configuration is that of a model without a head, such as an encoder of embeddings."""
    named, bare = _named_class(config), MODEL_MAPPING_NAMES.get(config.model_type, ())
    return str(named) in ((bare,) if isinstance(bare, str) else bare) and str(named) not in task_of_class()


def _named_class(config: PretrainedConfig) -> Any:
    """Return the first of a configuration's ``architectures``, whatever a file has there; None where it names none."""
    named: Any = config.architectures or None
    return named[0] if isinstance(named, list | tuple) else named


def _build(
    config: PretrainedConfig,
    task: str,
    attn_implementation: str | None,
    weights_dtype: str,
) -> Any:
    """Return the head for ``task`` on the meta device."""
    if task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders refuse to classify several rows without one; it needs no memory
    from_config = partial(getattr(transformers, HEADS[task].auto_class).from_config, trust_remote_code=False)
    dtype = getattr(torch, weights_dtype)
    wanted = None if attn_implementation == "flash_attention_2" else attn_implementation
    with torch.device("meta"):
        try:
            model = from_config(config, dtype=dtype, attn_implementation=wanted)
        except ValueError:
            if attn_implementation != "sdpa":
                raise
            model = from_config(config, dtype=dtype, attn_implementation="eager")  # no sdpa: T5 before 5.17, DeBERTa
        except ImportError as error:
            if attn_implementation in (None, "eager", "sdpa"):
                cause = " ".join(str(error).split()).partition(". ")[0]
                raise NotEstimableError(f"not estimable: a library is missing ({cause})") from error
            raise _no_kernels(attn_implementation) from error
    if attn_implementation == "flash_attention_2":
        use_stand_in(model)
    _keep_in_float32(model, dtype)
    return rest_to_meta(model)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Make float32 of the modules that ``from_pretrained`` keeps so, T5's ``wo`` in float16 for example.

    Private, seen in transformers 5.8.1, 5.17.0 and 5.23.0.
    """
    always = getattr(model, "_keep_in_fp32_modules_strict", None) or () if dtype.itemsize == 2 else ()
    kept = {*always, *(getattr(model, "_keep_in_fp32_modules", None) or () if dtype == torch.float16 else ())}
    for name, held in [*model.named_parameters(), *model.named_buffers()]:
        if held.is_floating_point() and any(f".{one}." in f".{name}." for one in kept):
            held.data = held.data.float()


def _quantization(config: Any) -> dict[str, Any] | None:
    """Return how a model is quantised, or None for plain weights; refuse all but bitsandbytes."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    options = dict(found if isinstance(found, Mapping) else found.to_dict())
    method = str(getattr(options.get("quant_method"), "value", options.get("quant_method")))
    if not method.startswith("bitsandbytes"):
        raise NotEstimableError(
            f"not estimable: quantization_config of method {method!r} has no form on the meta device; expected "
            "bitsandbytes, or plain weights. Load the model in bfloat16"
        )
    return options


def _untie_head(model: Any) -> None:
    """Give T5 1.1 and Flan-T5 the untied head that their checkpoints have.

    transformers ties the head of every T5 that is built from a configuration, but not where a checkpoint has both
    weights; seen in 5.8.1 to 5.23.0. It turns ``tie_word_embeddings=False`` into ``scale_decoder_outputs=False``.
    """
    head = model.get_output_embeddings()
    if head is not None and getattr(model.config, "scale_decoder_outputs", True) is False:
        head.weight = nn.Parameter(torch.empty_like(head.weight))


def _as_in_training(model: Any, keep_cache: bool) -> nn.Module:
    if not keep_cache and getattr(model, "config", None) is not None:
        model.config.use_cache = False
    trained: nn.Module = model.train()
    return trained


def _set_attention(model: nn.Module, attn_implementation: str) -> None:
    inside = unwrap_model(model)
    if attn_implementation == "flash_attention_2":
        use_stand_in(inside)
        return
    if attn_implementation == "sdpa" and not hasattr(inside, "set_attn_implementation"):
        return  # a module of the user's own, of which the default is asked
    try:
        inside.set_attn_implementation(attn_implementation)
    except ImportError as error:
        raise _no_kernels(attn_implementation) from error
    except ValueError:
        if attn_implementation != "sdpa":
            raise


def _check_attention(name: str) -> None:
    """Refuse an attention that transformers does not have; ``owner/repository`` names kernels of the hub."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "flex_attention":
        raise NotEstimableError(
            "not estimable: attn_implementation='flex_attention' does not run without a GPU; expected 'sdpa', 'eager' "
            "or 'flash_attention_2'. Pass attn_implementation='sdpa'"
        )
    if name == "eager" or "/" in name or name in ALL_ATTENTION_FUNCTIONS:
        return
    usual = ("eager", "sdpa", "flash_attention_2")
    raise ValueError(
        f"attn_implementation={name!r} is unknown; expected one of {', '.join(map(repr, usual))}, or another that "
        f"transformers {transformers.__version__} has registered."
        + (did_you_mean(name, usual) or " Pass attn_implementation='sdpa'")
    )


def _no_kernels(attn_implementation: str | None) -> NotEstimableError:
    return NotEstimableError(
        f"not estimable: attn_implementation={attn_implementation!r} needs kernels that are not installed; expected "
        "'sdpa', 'eager' or 'flash_attention_2'. Pass attn_implementation='sdpa'"
    )


def _read_config(
    text: str, task: str | None
) -> tuple[str, PretrainedConfig, transformers.GenerationConfig | None, str | None]:
    """Return a display name, the configuration, that of generation where a folder has one, and the task where known."""
    folder = find_config(text)
    if folder is None:
        known = str(known_name(text))
        facts = known_models()[known]
        config = AutoConfig.for_model(facts["model_type"], **facts["config"])
        if "picture_size" in facts:
            config.picture_size = facts["picture_size"]
        return known, config, None, task or facts["task"]
    what = f"model={text!r} has a config.json that transformers {transformers.__version__} does not understand"
    with _one_error(what):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        has_own = (folder / "generation_config.json").is_file()
        own = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True) if has_own else None
    with suppress(OSError, ValueError):  # whatever is in that file, the model is what is asked for
        read = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        if (size := _picture_size(read)) is not None:
            config.picture_size = size
    return folder.resolve().name if Path(text).is_dir() else text, config, own, task


def _picture_size(processor: Any) -> list[int] | None:
    """Return height and width of the pictures of an image processor's file; None where it does not say."""
    if not isinstance(processor, dict):
        return None
    is_cut_last = processor.get("do_center_crop", True) and "Perceiver" not in str(
        processor.get("image_processor_type")
    )
    size = (is_cut_last and processor.get("crop_size")) or processor.get("size")
    if isinstance(size, dict):
        height = size.get("height") or size.get("shortest_edge")
        size = [height, size.get("width") or size.get("longest_edge") or height]
    sides: list[Any] = size if isinstance(size, list) else [size, size]
    # Qwen2-VL's edges are areas in pixels
    return sides if len(sides) == 2 and all(type(side) is int and 0 < side < 10_000 for side in sides) else None


@contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Turn any error that transformers raises for an unsuitable configuration into one ``ValueError``."""
    try:
        yield
    except NotEstimableError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{what} without Python code of its own, and no such code is run; expected a model type of "
                "transformers. Load it yourself in Python and pass the module"
            ) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"{what} ({reason}); expected a configuration that transformers can build. Correct it, or pass the module"
        ) from error
