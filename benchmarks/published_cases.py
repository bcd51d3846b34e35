"""GPU measurements that other people published, ``published/*.json``, and the estimate that each is compared with.

A file is a list of sources. Each has what its runs share, and a row for each run; ``settings`` are those of
``estimate``. What a row says and nothing here reads would be ignored, and a value of another spelling would be another
set-up: an unknown key or value is an error that names the row.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from published_changes import sgd_with_momentum
from transformers import AutoConfig, BitsAndBytesConfig, PretrainedConfig

from hf_memopt.plain_data import Count, check_fields, check_value, check_word, from_object
from hf_memopt.prediction.memory import estimate
from hf_memopt.prediction.memory.models import known_models
from hf_memopt.prediction.memory.models.config_files import known_name
from hf_memopt.prediction.memory.quantized import quantize
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.training.devices import find_gpu

PUBLISHED = Path(__file__).resolve().parent / "published"
FILES = tuple(PUBLISHED / f"{name}.json" for name in ("measurements", "a100_throughput", "measurements_3"))
METERS = ("allocated", "reserved", "NVML whole card", "NVML less first sample", "fits", "seconds")
LOOPS = {"Trainer": "trainer", "SFTTrainer": "trainer", "manual": "manual", "function": "function"}
LORA_OPTIONS = {
    "r": Count,
    "target_modules": Literal["all-linear"] | tuple[str, ...],
    "lora_alpha": Count,
    "lora_dropout": float,
    "modules_to_save": tuple[str, ...],
}
NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Case:
    """One measurement, and the training run that it was taken of.

    Attributes:
        id: names the row; nothing depends on it.
        source: who published it: a repository and file, or a dataset.
        gpu: as the source names it.
        versions: of the libraries that the source names, "major.minor".
        loop: who steps: the stock ``Trainer``, TRL's, a hand-written loop, or one whose step is a function that frees
            the outputs at its return.
        what: one of ``METERS``: what torch or NVML measured, or that only the verdict or the seconds are known.
        model: as the source names it.
        measured_bytes: the measurement; None where only a verdict or seconds are known.
        settings: of ``estimate``, without those that are functions.
        nvml_bytes: what NVML showed for the same run, context included; None if it was not recorded.
        context_bytes: of the CUDA context, where the source measured it.
        lora: options of ``peft.LoraConfig``; None without LoRA.
        quantization: of the weights: ``"nf4"`` or another name; None for none.
        quantization_config: what differs from ``NF4``.
        kbit_preparation: whether ``prepare_model_for_kbit_training`` ran.
        momentum: whether SGD has momentum.
        gpus: that share the weights, by FSDP.
        tokens_per_second: of the run, on one GPU; None if it was not recorded.
        step_seconds: of an optimizer step; None if they were not recorded.
        fits: whether it ran; None where nobody tried how much fits.
        solid: whether the source states the settings well enough for the row to count.
    """

    id: str
    source: str
    gpu: str
    versions: Mapping[str, str]
    loop: Literal["Trainer", "SFTTrainer", "manual", "function"]
    what: str
    model: str
    measured_bytes: int | None = None
    settings: Mapping = field(default_factory=dict)
    nvml_bytes: int | None = None
    context_bytes: int | None = None
    lora: Mapping | None = None
    quantization: Literal["nf4", "gptq", "int8"] | None = None
    quantization_config: Mapping = field(default_factory=dict)
    kbit_preparation: bool = False
    momentum: bool = False
    gpus: int = 1
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    fits: bool | None = None
    solid: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_word("what", self.what, METERS)
        usual = {item.name: item.default for item in fields(StepSettings)}
        for name, value in self.settings.items():
            check_word("settings", name, [*inspect.signature(estimate).parameters, *usual], "batch_size")
            if name in ("batch_size", "seq_len"):
                check_value(name, value, Count, 8)
            elif isinstance(usual.get(name), bool) and isinstance(value, str):  # any text would count as True
                check_value(name, value, bool, usual[name])
        StepSettings(**{name: value for name, value in self.settings.items() if name in usual})
        for name, value in (self.lora or {}).items():
            check_word("lora", name, LORA_OPTIONS)
            check_value(name, tuple(value) if isinstance(value, list) else value, LORA_OPTIONS[name])
        for name in self.quantization_config:
            check_word("quantization_config", name, inspect.signature(BitsAndBytesConfig).parameters)

    def version(self, library: str) -> tuple[int, ...] | None:
        """Return (major, minor) of a library; None where the source does not name it."""
        return tuple(map(int, self.versions[library].split("."))) if library in self.versions else None


def read_cases(*paths: Path) -> list[Case]:
    """Return the cases of files.

    Raises:
        ValueError: a row has a key or a value that is not known; the message begins with the row's name.
    """
    sources = [source for path in paths for source in json.loads(path.read_text(encoding="utf-8"))]
    return [_case(source, row) for source in sources for row in source["rows"]]


def _case(source: Mapping[str, Any], row: Mapping[str, Any]) -> Case:
    told = {name: value for name, value in {**source, **row}.items() if name not in ("rows", "note")}
    try:
        return from_object(Case, {**told, "settings": {**source["settings"], **row.get("settings", {})}})
    except ValueError as error:
        raise ValueError(f"{row['id']}: {error}") from None


def estimate_settings(case: Case) -> dict[str, Any]:
    """Return the arguments of ``estimate`` for a case, as its source states it.

    Raises:
        ValueError: the weights are quantised in a way that is not estimated, several GPUs share them, or the model or
            the GPU is unknown.
    """
    if case.quantization not in (None, "nf4"):
        raise ValueError(f"weights quantised by {case.quantization!r} are not estimated")
    if case.gpus > 1:
        raise ValueError(f"{case.gpus} GPUs are counted by hf-memopt rehearse --gpus {case.gpus} alone")
    config, task = configuration_of(case)
    gpu = find_gpu(case.gpu.removesuffix(" class"))
    settings: dict[str, Any] = {
        **case.settings,
        "model": config,
        "task": task,
        "gpu": gpu,
        "prepare": (),
        "loop": LOOPS[case.loop],
    }
    if case.momentum:
        settings["optimizer_memory"] = sgd_with_momentum
    if case.quantization is not None:
        settings["prepare"] = (partial(quantize, config={**NF4, **case.quantization_config}),)
    if case.lora is not None:
        prepare = partial(add_lora, options=dict(case.lora), kbit=case.kbit_preparation)
        settings["prepare"] = (*settings["prepare"], prepare)
    return settings


def add_lora(model: Any, *, options: dict[str, Any], kbit: bool) -> Any:
    """Add LoRA as peft does, after its preparation of quantised weights where ``kbit`` asks for it."""
    import peft

    if kbit:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))


# ---- Models


@cache
def _further_models() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((PUBLISHED / "models.json").read_text(encoding="utf-8"))
    return found


def model_facts(name: str) -> dict[str, Any]:
    """Return the facts of a model by its name: ``published/models.json``, then the models that the package knows.

    Raises:
        ValueError: neither has it.
    """
    short = name.rpartition("/")[2].lower()
    for title, facts in _further_models().items():
        if short in (title.lower(), *(other.lower() for other in facts.get("other_names", ()))):
            return facts
    known = known_name(short)
    if known is None:
        raise ValueError(f"model={name!r} is in neither list of configurations; add it to published/models.json")
    return known_models()[known]


def configuration_of(case: Case) -> tuple[PretrainedConfig, str]:
    """Return the configuration of a case's model, and the task."""
    facts = model_facts(case.model)
    config = AutoConfig.for_model(facts["model_type"], **facts["config"])
    return config, str(case.settings.get("task") or facts["task"])
