"""Predicted against measured GPU memory, of runs that other people published: python benchmarks/published.py

Each case is estimated twice on the CPU: "as is", with today's software, and "matched", with what the measured versions
did differently (``published_behaviours``). Errors are predicted / measured - 1. Of a run whose whole GPU was measured
too, the prediction is reserved bytes and the context.

python benchmarks/published.py --cases FILE   # other measurements, in the format of either file in published/
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from published_behaviours import behaviours_of
from published_cases import MIB, PUBLISHED, Case, UnknownCaseError, configuration_of, read_cases

from hf_memopt.devices.gpus import Gpu, find_gpu
from hf_memopt.memory.estimation import estimate
from hf_memopt.memory.quantized.stand_ins import quantize
from hf_memopt.memory.result import Estimate
from hf_memopt.memory.settings import NotEstimableError

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    },
    "int8": {"load_in_8bit": True},
}
TODAY = (4, 40)  # of transformers: stock Trainer runs from here on count as today's software
OPTIMIZERS = {
    "torch.optim.Adam": "adamw_torch",
    "torch.optim.AdamW": "adamw_torch",
    "torch.optim.SGD": "sgd",
    "torch.optim.RMSprop": "rmsprop",
    "torch.optim.Adagrad": "adagrad",
    "torch.optim.Adafactor": "adafactor",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A compared case: errors as fractions, and the behaviours that were put in place."""

    case: Case
    as_is_bytes: int
    matched_bytes: int
    as_is_nvml_bytes: int
    matched_nvml_bytes: int
    matched_reserved_bytes: int
    behaviours: tuple[str, ...]
    seconds: float

    @property
    def as_is(self) -> float:
        """The error of the estimate of today's software."""
        return self.as_is_bytes / self.case.measured_bytes - 1

    @property
    def matched(self) -> float:
        """The error with what the measured versions did differently."""
        return self.matched_bytes / self.case.measured_bytes - 1

    @property
    def nvml(self) -> float | None:
        """The error of reserved bytes and context, matched; None where that was not measured."""
        return None if self.case.nvml_bytes is None else self.matched_nvml_bytes / self.case.nvml_bytes - 1

    @property
    def is_today(self) -> bool:
        """Whether it is a stock Trainer run of recent software."""
        return self.case.loop == "Trainer" and self.case.versions.get("transformers", (0, 0)) >= TODAY

    def figures(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "case": self.case.id,
            "source": self.case.source,
            "gpu": self.case.gpu,
            "loop": self.case.loop,
            "what": self.case.what,
            "measured_bytes": self.case.measured_bytes,
            "as_is_bytes": self.as_is_bytes,
            "matched_bytes": self.matched_bytes,
            "nvml_bytes": self.case.nvml_bytes,
            "matched_nvml_bytes": self.matched_nvml_bytes,
            "matched_reserved_bytes": self.matched_reserved_bytes,
            "behaviours": list(self.behaviours),
            "is_today": self.is_today,
        }


def compare(case: Case) -> Row:
    """Estimate a case as is and matched.

    Raises:
        UnknownCaseError, NotEstimableError, ValueError: the case cannot be estimated; the message says why.
    """
    started = time.perf_counter()
    if case.excluded:
        raise UnknownCaseError(case.excluded)
    settings = estimate_settings(case)
    as_is = estimate(**settings)
    behaviours = behaviours_of(case, settings["model"].model_type)
    for behaviour in behaviours:
        behaviour.change(settings)
    matched = estimate(**settings) if behaviours else as_is
    predictions = [_compared(found, case) for found in (as_is, matched)]
    totals = [_total(found, case) for found in (as_is, matched)]
    names = tuple(behaviour.name for behaviour in behaviours)
    return Row(case, *predictions, *totals, matched.peak_reserved_bytes, names, time.perf_counter() - started)


def estimate_settings(case: Case) -> dict[str, Any]:
    """Return the arguments of ``estimate`` for a case, as its source states it."""
    if case.quantization not in (None, *QUANTIZATIONS):
        raise UnknownCaseError(f"weights quantised by {case.quantization!r} are not estimated")
    config, task = configuration_of(case)
    if case.use_cache is not None:
        config.use_cache = case.use_cache
    settings: dict[str, Any] = {**case.settings, "model": config, "task": task, "gpu": _gpu(case)}
    positions = getattr(config, "n_positions", None) or getattr(config, "max_position_embeddings", None)
    if positions and settings.get("seq_len", 0) > positions:
        settings["seq_len"] = positions
    if task == "image-classification":
        settings.pop("seq_len", None)
    if case.gpus > 1:
        settings |= {"world_size": case.gpus, "strategy": "fsdp2"}
    if case.optim_class in OPTIMIZERS:
        settings["optim"] = OPTIMIZERS[case.optim_class]
    settings["prepare"] = ()
    if case.quantization is not None:
        options = dict(QUANTIZATIONS[case.quantization])
        if case.gpus > 1 and case.quantization == "nf4":  # so the harness loads them for FSDP
            options["bnb_4bit_quant_storage"] = "bfloat16"
        settings["prepare"] = (partial(quantize, config=options),)
        if settings["weights_dtype"] == "float32":
            settings["weights_dtype"] = "bfloat16"
    if case.lora is not None:
        prepare = partial(add_lora, options=dict(case.lora), kbit=bool(case.kbit_preparation))
        settings["prepare"] = (*settings["prepare"], prepare)
    return settings


def add_lora(model: Any, *, options: dict[str, Any], kbit: bool) -> Any:
    """Add LoRA as peft does, after its preparation of quantised weights where ``kbit`` asks for it."""
    import peft

    if kbit:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))


def _gpu(case: Case) -> Gpu | None:
    name = case.gpu.removesuffix(" class")
    for known in (name, name.replace("A10G", "A10")):  # the same chip
        try:
            return find_gpu(known)
        except ValueError:
            continue
    return None


def _compared(found: Estimate, case: Case) -> int:
    """Return what corresponds to the measurement."""
    if case.what == "allocated":
        return found.peak_allocated_bytes
    if case.what == "reserved" or "less first sample" in case.what:  # the context was there at the first sample
        return found.peak_reserved_bytes
    return _total(found, case)


def _total(found: Estimate, case: Case) -> int:
    context = case.context_bytes if case.context_bytes is not None else found.context_bytes or 0
    return found.peak_reserved_bytes + context


# ---- Tables


def summary(errors: list[float]) -> dict[str, float | int]:
    """Return number, median and worst error without sign, and the worst one below the measurement."""
    if not errors:
        return {"cases": 0}
    return {
        "cases": len(errors),
        "median": statistics.median(map(abs, errors)),
        "worst": max(map(abs, errors)),
        "worst_under": max(0.0, -min(errors)),
    }


def outside_torch(rows: list[Row]) -> dict[str, tuple[Row, int]]:
    """Return by environment the run that shows what lies outside of torch's allocator, and how many bytes that is.

    The CUDA context and what libraries and other processes hold depend on the installation, not on the model: within
    the same harness runs agree on it to a few MiB. It is taken from one run, the smallest of unquantised weights, which
    is then not counted; the others test it.
    """
    found = {}
    for environment in dict.fromkeys(row.case.environment for row in rows if row.case.nvml_bytes is not None):
        members = [row for row in rows if row.case.environment == environment and row.case.nvml_bytes is not None]
        plain = [row for row in members if row.case.quantization is None]
        if len(members) > 1 and plain:
            smallest = min(plain, key=lambda row: row.matched_reserved_bytes)
            found[environment] = smallest, (smallest.case.nvml_bytes or 0) - smallest.matched_reserved_bytes
    return found


def nvml_errors(rows: list[Row]) -> dict[str, float]:
    """Return the error of reserved bytes and what the environment holds besides them, by case."""
    known = outside_torch(rows)
    return {
        row.case.id: (row.matched_reserved_bytes + known[row.case.environment][1]) / row.case.nvml_bytes - 1
        for row in rows
        if row.case.nvml_bytes and row.case.environment in known and row is not known[row.case.environment][0]
    }


def summaries(rows: list[Row]) -> dict[str, dict[str, float | int]]:
    """Return the summaries of the groups that the aims name."""
    allocated = [row for row in rows if row.case.what == "allocated"]
    return {
        "stock Trainer since 4.40, as is": summary([row.as_is for row in rows if row.is_today]),
        "all, as is": summary([row.as_is for row in rows]),
        "all, matched": summary([row.matched for row in rows]),
        "allocated, matched": summary([row.matched for row in allocated]),
        "reserved and the GPU's usual context, matched": summary([row.nvml for row in rows if row.nvml is not None]),
        "reserved and the environment's own memory, matched": summary([*nvml_errors(rows).values()]),
    }


def _line(row: Row) -> str:
    nvml = "" if row.nvml is None else f"{row.nvml:+8.2%}"
    sizes = "".join(f"{size / MIB:>9,.0f}" for size in (row.case.measured_bytes, row.as_is_bytes))
    return (
        f"{row.case.id[:58]:<59}{row.case.what[:9]:<10}{sizes}{row.as_is:>+9.2%}"
        f"{row.matched_bytes / MIB:>10,.0f}{row.matched:>+9.2%}{nvml:>9}{row.seconds:>7.1f}s"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print a line for each and the summaries, append the figures to the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=Path, action="append", help="measurements in a format of benchmarks/published")
    parser.add_argument("--no-results", action="store_true", help="write nothing to benchmarks/results")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks for it
    own = [PUBLISHED / "measurements.json", PUBLISHED / "a100_throughput.json"]
    cases = read_cases(given.cases or own)
    print(f"{'case':<59}{'':<10}{'measured':>9}{'as is':>9}{'error':>9}{'matched':>10}{'error':>9}{'NVML':>9}")
    rows, left_out, source = [], [], None
    for number, case in enumerate(cases, 1):
        if not case.excluded and case.source != source:
            source = case.source
            print(f"\n{source}\n    {case.gpu}; {', '.join(f'{n} {v[0]}.{v[1]}' for n, v in case.versions.items())}")
        if sys.stderr.isatty():
            print(f"\r{number}/{len(cases)} {case.id[:60]}", end="\r", file=sys.stderr, flush=True)
        try:
            rows.append(compare(case))
        except Exception as error:  # one row that fails must not take the others with it
            expected = isinstance(error, (UnknownCaseError, NotEstimableError, ValueError))
            left_out.append((case.id, str(error) if expected else f"{type(error).__name__}: {error}"))
            continue
        print(_line(rows[-1]), flush=True)
    for smallest, size_bytes in outside_torch(rows).values():
        print(f"\n{size_bytes / MIB:,.0f} MiB outside of torch's allocator, from {smallest.case.id}; with them")
    for name, error in nvml_errors(rows).items():
        print(f"{name:<59}{'NVML':<10}{error:>+9.2%}")
    print(f"\n{'errors without sign':<54}{'cases':>6}{'median':>9}{'worst':>9}{'worst under':>13}")
    found = summaries(rows)
    for name, figures in found.items():
        widths = {"median": 9, "worst": 9, "worst_under": 13}
        shown = "".join(f"{figures[key]:>{width}.2%}" for key, width in widths.items() if key in figures)
        print(f"{name:<54}{figures['cases']:>6}{shown}")
    for reason in dict.fromkeys(reason for _, reason in left_out):
        names = [name for name, other in left_out if other == reason]
        print(f"not counted: {len(names)}, {reason} ({', '.join(dict.fromkeys(names))})")
    if given.cases is None and not given.no_results:
        from results_file import append

        reasons = dict(Counter(reason for _, reason in left_out))
        append("published", {"rows": [row.figures() for row in rows], "summaries": found, "left_out": reasons})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
