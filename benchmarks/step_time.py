"""Predicted against measured seconds of a training step: python benchmarks/step_time.py

Throughput that other people published on one GPU, predicted without a GPU (``hf_memopt/memory/step_time``). Errors are
predicted / measured - 1 in seconds per step. All rows are priced with the same constants, fitted on those that are
marked so and on no others.

python benchmarks/step_time.py --cases FILE   # rows held back from the fit, in a format of benchmarks/published
python benchmarks/step_time.py --cpu          # real steps on this CPU, which three small measurements calibrate first
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from ladders import read_ladder
from published import estimate_settings
from published_behaviours import behaviours_of
from published_cases import PUBLISHED, Case, UnknownCaseError, read_cases

from hf_memopt.memory.estimation import estimate
from hf_memopt.memory.optimizers.optimizer_memory import ParameterFacts, optimizer_memory, parameter_facts
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.memory.step_time.operations import Operation, optimizer_operations
from hf_memopt.memory.step_time.prices import StepTime

FITTED = "fitted"
LARGEST_MEDIAN, LEAST_SPEARMAN = 0.10, 0.95
LOOPS_BEFORE = (2, 0)  # of torch: from then on clipping and zeroing take all gradients together
ADAMW_KERNELS = (2, 3, 2, 3, 2, 2, 4)  # accesses of an element by each kernel of AdamW.step, transformers v4.15.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A compared run."""

    group: str
    case: str
    measured: float
    predicted: StepTime
    seconds: float
    kind: tuple[str, ...] = ()  # GPU, model, method, precision, optimizer

    @property
    def error(self) -> float:
        """Of the predicted seconds."""
        return self.predicted.seconds / self.measured - 1

    def figures(self) -> dict[str, Any]:
        """Return the row for JSON."""
        found = {"group": self.group, "case": self.case, "measured_seconds": self.measured}
        return {**found, "predicted_seconds": self.predicted.seconds, "shares": dict(self.predicted.shares)}


def group_of(case: Case) -> str:
    """Return the group of a published row."""
    if case.id.startswith("hf-docs-v100"):
        return f"ladder B: BERT-large, V100 ({FITTED})"
    if "ixtral" in case.model:
        return "A100, as many tokens for each expert (reported only)"
    if case.quantization == "gptq":
        return "A100, GPTQ taken as nf4 (reported only)"
    if "santacoder" in case.model or "istral" in case.model or "Llama-2-70b" in case.model:
        is_fitted = "accelerated" not in case.id or "Llama" in case.model
        return f"A100, dense ({FITTED})" if is_fitted else "A100, dense, not fitted"
    return "held back"


def compare(case: Case) -> Row:
    """Predict the seconds of a step of a published run.

    Raises:
        UnknownCaseError, NotEstimableError, ValueError: it cannot be predicted; the message says why.
    """
    started = time.perf_counter()
    if case.excluded:
        raise UnknownCaseError(case.excluded)
    if case.gpus > 1:
        raise UnknownCaseError(f"{case.gpus} GPUs: the time has no communication")
    group = group_of(case)
    if case.quantization == "gptq":
        model = case.model.removesuffix("-GPTQ")
        case = dataclasses.replace(case, quantization="nf4", model=f"{model}-hf" if "Llama" in model else model)
    settings = estimate_settings(case)
    for behaviour in behaviours_of(case, settings["model"].model_type):
        behaviour.change(settings)
    facts: list[ParameterFacts] = []
    settings["prepare"] = (*settings["prepare"], lambda model: facts.extend(parameter_facts(model)))
    found = estimate(**settings)
    costs = found.step_costs
    if found.gpu is None or costs is None:
        raise UnknownCaseError(found.time_unknown or "the GPU is unknown")
    predicted = costs.on(found.gpu)
    if case.versions.get("torch", LOOPS_BEFORE) < LOOPS_BEFORE:
        costs = dataclasses.replace(costs, optimizer=optimizer_in_loops(facts, found.settings))
        predicted = costs.on(found.gpu)
    tokens = predicted.tokens or 0.0
    method = "full" if case.lora is None else f"LoRA {case.quantization}"
    kind = found.gpu.name, case.model, method, found.settings.precision, found.settings.optim
    seconds = tokens / (case.tokens_per_second or 1.0)
    return Row(group, case.id, seconds, predicted, time.perf_counter() - started, kind)


def optimizer_in_loops(facts: list[ParameterFacts], settings: StepSettings) -> Counter[Operation]:
    """Return the optimizer's operations as in torch before 2.0: one kernel after the other for each parameter.

    The norm of each gradient, its scaling and its zeroing, each a kernel; AdamW is transformers' own of that time. The
    other optimizers were loops then as they are today.
    """
    found: Counter[Operation] = Counter()
    kernels = [1, 2, 1]  # accesses of an element: norm, scaling, zeroing
    if settings.precision == "fp16":  # unscaling took all gradients together already
        found[Operation("memory", moved_bytes=2 * sum(fact.size_bytes for fact in facts))] += 1
    if settings.optim == "adamw_torch":
        kernels += ADAMW_KERNELS
    else:
        found += optimizer_operations(facts, optimizer_memory(facts, settings.optim), settings.optim, clips=False)
    for fact in facts:
        for accesses in kernels:
            found[Operation("memory", moved_bytes=accesses * fact.size_bytes)] += 1
    return found


# ---- Tables


def spearman(one: list[float], other: list[float]) -> float:
    """Return the correlation of the ranks; equal values share the mean of their ranks."""

    def ranks(values: list[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in values])

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def summary(rows: list[Row]) -> dict[str, float | int | None]:
    """Return number, rank correlations of seconds and of examples per second, median and worst error without sign."""
    seconds = [row.predicted.seconds for row in rows], [row.measured for row in rows]
    speeds = [[row.predicted.examples / time for row, time in zip(rows, times, strict=True)] for times in seconds]
    errors = [abs(row.error) for row in rows]
    return {
        "rows": len(rows),
        "spearman": spearman(*seconds) if len(rows) > 2 else None,
        "spearman_of_speed": spearman(*speeds) if len(rows) > 2 else None,
        "median": statistics.median(errors),
        "worst": max(errors),
    }


def print_rows(rows: list[Row]) -> None:
    """Print a line for each row, under its group."""
    for group in dict.fromkeys(row.group for row in rows):
        print(f"\n{group}\n{'':<64}{'measured':>10}{'predicted':>11}{'error':>8}{'range':>18}  largest share")
        for row in (row for row in rows if row.group == group):
            found = row.predicted
            part = max(found.shares, key=lambda name: found.shares[name])
            where = f"{found.low:>8.3f} to {found.high:.3f}"
            name = row.case.rpartition("/")[2][:63]
            print(
                f"{name:<64}{row.measured:>8.3f} s{found.seconds:>9.3f} s{row.error:>+8.1%}{where:>18}"
                f"  {part} {found.shares[part]:.0%}"
            )


def print_summaries(groups: dict[str, list[Row]]) -> dict[str, Any]:
    """Print a line for each group, and return the figures."""
    print(f"\n{'':<57}{'Spearman of':>22}{'error without sign':>20}")
    print(f"{'':<52}{'rows':>5}{'seconds':>10}{'examples/s':>12}{'median':>10}{'worst':>10}")
    found = {}
    for name, rows in groups.items():
        found[name] = figures = summary(rows)
        ranks = "".join(
            f"{'' if figures[rank] is None else format(figures[rank], '.3f'):>{width}}"
            for rank, width in (("spearman", 10), ("spearman_of_speed", 12))
        )
        print(f"{name:<52}{figures['rows']:>5}{ranks}{figures['median']:>10.1%}{figures['worst']:>10.1%}")
    return found


def print_errors_after_a_row(rows: list[Row]) -> None:
    """Print the errors that are left where the seconds of one row correct those of another row of the same GPU.

    ``recipes/planning/measured.py`` has the worst of them as ranges.
    """
    print(f"\n{'corrected by one row of the same GPU':<52}{'pairs':>5}{'median':>30}{'worst':>10}")
    for name, shared in (("of the same model and kind of set-up", 5), ("of the same model", 2), ("of any model", 1)):
        errors = [
            abs((1 + other.error) / (1 + one.error) - 1)
            for one, other in itertools.permutations(rows, 2)
            if one.kind[:shared] == other.kind[:shared]
        ]
        print(f"{name:<52}{len(errors):>5}{statistics.median(errors):>30.1%}{max(errors):>10.1%}")


# ---- Published rows


def published(paths: list[Path]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the compared rows that have a throughput, and those left out with the reason."""
    cases = [case for case in read_cases(paths) if case.tokens_per_second]
    rows, left_out = [], []
    for number, case in enumerate(cases, 1):
        if sys.stderr.isatty():
            print(f"\r{number}/{len(cases)} {case.id[:60]:<60}", end="\r", file=sys.stderr, flush=True)
        try:
            rows.append(compare(case))
        except (UnknownCaseError, NotEstimableError, ValueError) as error:
            left_out.append((case.id, str(error)))
    return rows, left_out


def ladder_a() -> list[Row]:
    """Return the ladder of a task whose GPU and number of steps are unknown: seconds after one scale for all rows."""
    ladder = read_ladder("A")
    rows = []
    for row in ladder.rows:
        found = estimate(ladder.model, gpu=ladder.gpu, **row.settings)
        assert found.step_time is not None
        rows.append((row.name, row.seconds, found.step_time))
    scale = statistics.median(seconds / predicted.seconds for _, seconds, predicted in rows)
    group = f"ladder A: {ladder.gpu} assumed, one scale (reported only)"
    return [Row(group, name, seconds / scale, predicted, 0.0) for name, seconds, predicted in rows]


def main(arguments: list[str] | None = None) -> int:
    """Print the rows and the summaries, append the figures to the results; 1 where the limits are not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=Path, action="append", help="rows held back, in a format of benchmarks/published"
    )
    parser.add_argument("--cpu", action="store_true", help="real steps on this CPU instead")
    parser.add_argument("--no-results", action="store_true", help="write nothing to benchmarks/results")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks for it
    if given.cpu:
        from step_time_cpu import main as of_cpu

        return of_cpu(write_results=not given.no_results)
    own = [PUBLISHED / "measurements.json", PUBLISHED / "a100_throughput.json"]
    rows, left_out = published(given.cases or own)
    if given.cases:
        rows = [dataclasses.replace(row, group="held back") for row in rows]
    else:
        rows += ladder_a()
    print_rows(rows)
    groups = {name: [row for row in rows if row.group == name] for name in dict.fromkeys(row.group for row in rows)}
    dense = [row for row in rows if row.group.startswith("A100, dense")]
    if dense:
        groups["A100, dense, all"] = dense
    found = print_summaries(groups)
    if given.cases is None:
        print_errors_after_a_row([row for row in rows if row.group.startswith(("ladder B", "A100, dense"))])
    for reason in dict.fromkeys(reason for _, reason in left_out):
        names = [name for name, other in left_out if other == reason]
        print(f"not predicted: {len(names)}, {reason}")
    if given.cases is None and not given.no_results:
        from results_file import append

        append("step_time", {"rows": [row.figures() for row in rows], "summaries": found, "left_out": len(left_out)})
    required = [name for name in found if name.startswith(("ladder B", "A100, dense, all", "held back"))]
    return 0 if all(is_within_limits(name, found[name]) for name in required) else 1


def is_within_limits(group: str, figures: dict[str, float | int | None]) -> bool:
    """Return whether the median error is small, and, of rows that are not held back, the order is that measured."""
    ranks = [figures[name] for name in ("spearman", "spearman_of_speed")]
    is_ordered = group == "held back" or all(rank is None or rank >= LEAST_SPEARMAN for rank in ranks)
    return is_ordered and (figures["median"] or 0.0) <= LARGEST_MEDIAN


if __name__ == "__main__":
    raise SystemExit(main())
