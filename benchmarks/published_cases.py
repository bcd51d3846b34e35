"""Read published GPU measurements: ``published/*.json``, or another file in either of their two formats.

A list of measurements (``measurements.json``), each with its configuration, versions and source; or the table of one
harness (``a100_throughput.json``), whose rows have the columns of its CSV file. Both become ``Case``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from hf_memopt.memory.models.config_files import known_models, known_name

PUBLISHED = Path(__file__).resolve().parent / "published"
MIB = 2**20
FMS_TOKENS = 4096  # of a row in the harness of fms-acceleration, or the model's positions if those are fewer
LORA = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
"""Of that harness: scripts/benchmarks/scenarios.yaml."""


TASKS = {
    "text-generation": "causal-lm",
    "text-classification": "sequence-classification",
    "text2text-generation": "seq2seq",
    "fill-mask": "masked-lm",
}
"""The names that the hub has for tasks."""


class UnknownCaseError(ValueError):
    """A row that cannot be compared; the message says why."""


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
        nvml_bytes: what NVML showed for the same run, context included; None if it was not recorded.
        context_bytes: of the CUDA context, where the source measured it.
        model: as the source names it.
        settings: of ``estimate``, without those that are functions.
        lora: options of ``peft.LoraConfig``; None without LoRA.
        quantization: of the weights: ``"nf4"``, ``"int8"``, or another name; None for none.
        kbit_preparation: ``"peft"`` where ``prepare_model_for_kbit_training`` ran, else ``""``.
        optim_class: the class, where it is none of ``TrainingArguments(optim=...)``.
        use_cache: False where a hand-written loop switched the key-value cache off; None for the model's own.
        gpus: that share the weights, by FSDP.
        rocm: whether it is an AMD GPU.
        environment: what runs share whose memory outside of torch's allocator is the same.
        tokens_per_second: of the run, on one GPU; None if it was not recorded.
        excluded: why the row is not compared; "" for a row that is.
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
    kbit_preparation: str = ""
    optim_class: str = ""
    use_cache: bool | None = None
    gpus: int = 1
    rocm: bool = False
    environment: str = ""
    tokens_per_second: float | None = None
    excluded: str = ""


def read_cases(paths: list[Path]) -> list[Case]:
    """Return the cases of the files; a measurement that two of them have is kept once.

    Raises:
        ValueError: a file has neither format.
    """
    cases: list[Case] = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, Mapping) and "rows" in content:
            found = [_read(_harness_case, {**row, "source": content["source"]}) for row in content["rows"]]
        elif isinstance(content, list):
            found = [_read(_case, row) for row in content]
        else:
            raise ValueError(
                f"cases={str(path)!r} has neither format of benchmarks/published; expected a list of measurements or "
                'a table {"source": ..., "rows": [...]}. Compare benchmarks/published/measurements.json'
            )
        known = {_measurement(case) for case in cases}
        cases += [case for case in found if _measurement(case) not in known]
    return cases


def _measurement(case: Case) -> tuple[Any, ...]:
    """Return what two files have in common of one measurement."""
    return case.source.split()[0], case.what, case.measured_bytes, case.settings.get("batch_size")


def _read(read: Callable[[Mapping[str, Any]], Case], row: Mapping[str, Any]) -> Case:
    """Return the case of a row; one that cannot be read is excluded, with the reason, and the others still run."""
    try:
        return read(row)
    except (KeyError, TypeError, ValueError) as error:
        name = str(row.get("id", row.get("model_name_or_path", "a row")))
        reason = f"it cannot be read ({type(error).__name__}: {error})"
        return Case(name, str(row.get("source", "?")), "", {}, "", "", 0, "", excluded=reason)


def versions_of(text: str) -> dict[str, tuple[int, int]]:
    """Return (major, minor) by library from a text such as "torch 2.4.1, transformers 4.48.1"; the first of a range.

    Example:
        >>> versions_of("Jan 2022: torch ~1.10, transformers 4.4x")
        {'torch': (1, 10), 'transformers': (4, 40)}
    """
    found = re.findall(r"(?i)\b([a-z][a-z0-9_-]*) ?[~=]*(\d+)\.(\d+x?)", text)
    return {name.lower(): (int(major), int(minor.replace("x", "0"))) for name, major, minor in found}


# ---- A measurement with its configuration


def _case(row: Mapping[str, Any]) -> Case:
    given = row["configuration"]
    optim, optim_class = str(given.get("optim", "adamw_torch")), str(given.get("optim_class", ""))
    if optim == "adamw_hf":  # removed in transformers 5
        optim, optim_class = "adamw_torch", "transformers.AdamW"
    versions = versions_of(row.get("versions", ""))
    how = str(given.get("loop", "Trainer"))
    loop = "manual" if re.search("hand|manual|[Aa]ccelerate", how) else "Trainer"
    if loop == "Trainer" and "trl" in versions:
        loop = "SFTTrainer"
    nvml = row.get("nvidia_smi_delta_mib")
    quantization = _quantization(given.get("quantisation"))
    choices = given.get("num_choices", 4)
    excluded = "" if row.get("solid", True) else "the source does not document it well enough"
    text = f"{row['id']} {row.get('note', '')} {given.get('kbit_preparation', '')}"  # some state it there alone
    known = row.get("own_context_mib")
    return Case(
        id=row["id"],
        source=row["source"],
        gpu=row.get("card", ""),
        versions=versions,
        loop=loop,
        what=row["what"],
        measured_bytes=int(row["measured_bytes"]),
        model=given["model"],
        settings=_settings(given, optim, loop),
        nvml_bytes=None if nvml is None else int(nvml) * MIB,
        context_bytes=None if known is None else int(known) * MIB,
        lora=_lora(given.get("peft")),
        quantization=quantization,
        kbit_preparation="peft" if quantization and re.search("prepare_for_kbit|baseline-peft-bnb", text) else "",
        optim_class=optim_class,
        use_cache=False if "use_cache=False" in how else None,
        environment=f"{row['source']}; {row.get('versions', '')}",
        tokens_per_second=_tokens_per_second(row),
        rocm="rocm" in f"{row['source']} {row.get('versions', '')}".lower(),
        excluded=excluded or ("" if choices == 4 else f"{choices} choices: the estimate takes 4"),
    )


def _tokens_per_second(row: Mapping[str, Any]) -> float | None:
    samples, seq_len = row.get("samples_per_second"), row["configuration"].get("seq_len")
    return None if samples is None or seq_len is None else samples * seq_len


def _settings(given: Mapping[str, Any], optim: str, loop: str) -> dict[str, Any]:
    """Return the settings of ``estimate`` for a configuration."""
    precision, dtype = _precision(str(given.get("precision", "fp32")))
    found: dict[str, Any] = {
        "batch_size": int(given["batch_size"]),
        "precision": precision,
        "weights_dtype": dtype,
        "optim": optim,
        "max_grad_norm": given.get("max_grad_norm", 1.0),
        "gradient_accumulation_steps": int(given.get("gradient_accumulation_steps") or 1),
        "loop": "manual" if loop == "manual" else "trainer",
    }
    optional = {
        "seq_len": given.get("seq_len"),
        "task": TASKS.get(str(given.get("task")), given.get("task")),
        "attn_implementation": given.get("attention"),
        "labels_length": given.get("labels_length"),
    }
    found.update({name: value for name, value in optional.items() if value is not None})
    checkpointing = given.get("gradient_checkpointing")
    if checkpointing:
        found["checkpointing"] = {"use_reentrant": checkpointing == "reentrant"}
    return found


def _precision(text: str) -> tuple[str, str]:
    """Return the precision of autocast and the dtype of the weights."""
    half = "bfloat16" if "bf16" in text else "float16" if "fp16" in text else "float32"
    if "pure" in text or "no autocast" in text:
        return "fp32", half
    found = re.search("bf16|fp16|tf32|fp32", text)
    return (found[0] if found else text), "float32"


def _quantization(text: str | None) -> str | None:
    if not text:
        return None
    return "nf4" if "nf4" in text or "4" in text.split()[0] else "int8" if "8" in text else text.split()[0]


def _lora(text: Any) -> dict[str, Any] | None:
    """Return the options of LoRA from a text such as "LoRA r16 q,k,v,o dropout 0.1"."""
    if not text:
        return None
    rank = re.search(r"\br\s*=?\s*(\d+)", str(text))
    dropout = re.search(r"dropout\s*=?\s*([\d.]+)", str(text))
    options = {**LORA, "r": int(rank[1]) if rank else 16, "lora_dropout": float(dropout[1]) if dropout else 0.0}
    if "all-linear" in str(text):
        options["target_modules"] = "all-linear"
    elif "c_attn" in str(text):
        options["target_modules"] = [*LORA["target_modules"], "c_attn"]
    elif "q,v" in str(text):
        options["target_modules"] = ["q_proj", "v_proj"]
    return options


# ---- A row of the harness of fms-acceleration


def _harness_case(row: Mapping[str, str]) -> Case:
    source = row["source"]
    framework, precision = row.get("framework_config") or "none", "fp32"
    if row.get("bf16") == "TRUE" or row.get("fp16") == "TRUE":
        precision = "bf16" if row.get("bf16") == "TRUE" else "fp16"
    lora = None
    if row.get("peft_method") == "lora":
        lora = {**LORA, "r": int(row.get("r") or 16)}
        lora["target_modules"] = row.get("target_modules", "").split() or LORA["target_modules"]
    gpus = int(row.get("num_gpus", "1"))
    excluded = ""
    quantization = "nf4" if "bnb" in framework else "gptq" if "gptq" in framework else None
    if framework not in ("none", "baseline-peft-bnb", "accelerated-peft-bnb", "accelerated-peft-autogptq"):
        excluded = excluded or f"framework_config={framework!r}: its kernels are not simulated"
    speed = row.get("train_tokens_per_second")
    return Case(
        id=f"{row['model_name_or_path']} {framework} {row.get('peft_method', 'full')} "
        f"{row['per_device_train_batch_size']} x {gpus}",
        source=source,
        gpu="A100 80GB" if "A100" in source else "",
        versions=versions_of(source),
        loop="SFTTrainer",
        what="allocated",
        measured_bytes=int(float(row.get("mem_peak_torch_mem_alloc_in_bytes") or 0)),
        model=row["model_name_or_path"],
        settings={
            "batch_size": int(row["per_device_train_batch_size"]),
            "seq_len": FMS_TOKENS,
            "precision": precision,
            "weights_dtype": row.get("torch_dtype") or "bfloat16",
            "optim": "adamw_torch",
            "attn_implementation": "flash_attention_2",
            "checkpointing": {"use_reentrant": True},
            "padding": False,  # packed rows: flash attention gets no mask
            "task": "causal-lm",
        },
        nvml_bytes=int(float(row["mem_nvidia_mem_reserved"])) * MIB if row.get("mem_nvidia_mem_reserved") else None,
        lora=lora,
        quantization=quantization,
        # TRL leaves it out where 4-bit weights are sharded (v0.13.0 trainer/sft_trainer.py, is_sharded_qlora)
        kbit_preparation="peft" if framework == "baseline-peft-bnb" and gpus == 1 else "",
        gpus=gpus,
        environment=f"{source}; {row.get('file', '')}",
        tokens_per_second=float(speed) if speed else None,
        excluded=excluded or ("" if row.get("mem_peak_torch_mem_alloc_in_bytes") else "no peak was recorded"),
    )


# ---- Models


@cache
def _further_models() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((PUBLISHED / "models.json").read_text(encoding="utf-8"))
    return found


def model_facts(name: str) -> dict[str, Any]:
    """Return the facts of a model by its name: ``published/models.json``, then the models that the package knows.

    Raises:
        UnknownCaseError: neither has it.
    """
    short = name.rpartition("/")[2].lower()
    for title, facts in _further_models().items():
        if short in (title.lower(), *(other.lower() for other in facts.get("other_names", ()))):
            return known_models()[facts["known"]] if "known" in facts else facts
    known = known_name(short)
    if known is None:
        raise UnknownCaseError(f"model={name!r} is in neither list of configurations; add it to published/models.json")
    return known_models()[known]


def configuration_of(case: Case) -> tuple[PretrainedConfig, str]:
    """Return the configuration of a case's model, and the task.

    Raises:
        UnknownCaseError: the model is unknown.
    """
    facts = model_facts(case.model)
    config = AutoConfig.for_model(facts["model_type"], **facts["config"])
    return config, str(case.settings.get("task") or facts["task"])
