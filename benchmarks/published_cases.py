"""GPU measurements that other people published, ``published/*.json``, and the estimate that each is compared with.

A file is a list of sources. Each has what its runs share, and a row for each run; ``settings`` are those of
``estimate``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from hf_memopt.devices import find_gpu
from hf_memopt.memory.models import known_models
from hf_memopt.memory.models.config_files import known_name
from hf_memopt.memory.quantized import quantize

PUBLISHED = Path(__file__).resolve().parent / "published"
FILES = (PUBLISHED / "measurements.json", PUBLISHED / "a100_throughput.json")
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
        versions: (major, minor) of the libraries that the source names.
        loop: ``"Trainer"``, ``"SFTTrainer"`` or ``"manual"``.
        what: ``"allocated"``, ``"reserved"``, or how the whole GPU was read: a text that begins with "NVML".
        measured_bytes: the measurement.
        model: as the source names it.
        settings: of ``estimate``, without those that are functions.
        nvml_bytes: what NVML showed for the same run, context included; None if it was not recorded.
        context_bytes: of the CUDA context, where the source measured it.
        lora: options of ``peft.LoraConfig``; None without LoRA.
        quantization: of the weights: ``"nf4"`` or another name; None for none.
        kbit_preparation: whether ``prepare_model_for_kbit_training`` ran.
        gpus: that share the weights, by FSDP.
        tokens_per_second: of the run, on one GPU; None if it was not recorded.
    """

    id: str
    source: str
    gpu: str
    versions: Mapping[str, tuple[int, int]]
    loop: str
    what: str
    measured_bytes: int
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    nvml_bytes: int | None = None
    context_bytes: int | None = None
    lora: Mapping[str, Any] | None = None
    quantization: str | None = None
    kbit_preparation: bool = False
    gpus: int = 1
    tokens_per_second: float | None = None


def read_cases(*paths: Path) -> list[Case]:
    """Return the cases of files."""
    sources = [source for path in paths for source in json.loads(path.read_text(encoding="utf-8"))]
    return [_case(source, row) for source in sources for row in source["rows"]]


def _case(source: Mapping[str, Any], row: Mapping[str, Any]) -> Case:
    told = {name: value for name, value in {**source, **row}.items() if name not in ("rows", "note")}
    versions = {name: tuple(map(int, version.split("."))) for name, version in told["versions"].items()}
    return Case(**{**told, "versions": versions, "settings": {**source["settings"], **row.get("settings", {})}})


def estimate_settings(case: Case) -> dict[str, Any]:
    """Return the arguments of ``estimate`` for a case, as its source states it.

    Raises:
        ValueError: the weights are quantised in a way that is not estimated, or the model or the GPU is unknown.
    """
    if case.quantization not in (None, "nf4"):
        raise ValueError(f"weights quantised by {case.quantization!r} are not estimated")
    config, task = configuration_of(case)
    gpu = find_gpu(case.gpu.removesuffix(" class"))
    settings: dict[str, Any] = {**case.settings, "model": config, "task": task, "gpu": gpu, "prepare": ()}
    if case.gpus > 1:
        settings |= {"world_size": case.gpus, "strategy": "fsdp2"}
    if case.quantization is not None:
        # 4-bit weights are cut by FSDP only if they are stored so, and so the harness loads them
        storage = {"bnb_4bit_quant_storage": "bfloat16"} if case.gpus > 1 else {}
        settings["prepare"] = (partial(quantize, config={**NF4, **storage}),)
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
