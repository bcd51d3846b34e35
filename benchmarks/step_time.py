"""Predicted against measured seconds of a training step: python benchmarks/step_time.py

Throughput that other people published on one GPU, predicted without a GPU (``prediction/memory/step_time``). Errors are
predicted / measured - 1 in seconds per step. All rows are priced with the same constants, fitted on those that are
marked so and on no others. The widths of the printed ranges were chosen by all of these rows, so how many a range holds
says how well it describes them, and no more.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import warnings
from collections import Counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from ladders import read_ladder
from published_behaviours import behaviours_of
from published_cases import FILES, Case, estimate_settings, read_cases
from results_file import markdown, show

from hf_memopt.prediction.memory import estimate
from hf_memopt.prediction.memory.optimizers import optimizer_memory, parameter_facts
from hf_memopt.prediction.memory.optimizers.state_and_temporaries import ParameterFacts
from hf_memopt.prediction.memory.settings import NotEstimableError, StepSettings
from hf_memopt.prediction.memory.step_time import Operation, StepTime
from hf_memopt.prediction.memory.step_time.operations import optimizer_operations
from hf_memopt.units import percent

FITTED = "fitted"
A100 = "A100, all that is not fitted"
NOT_FITTED = {
    "T4": "T4, 1B to 1.7B with LoRA and nf4, not fitted",
    "RTX 3090": "RTX 3090, ViT, BEiT and Swin, not fitted",
}
LOOPS_BEFORE = (2, 0)  # of torch: from then on clipping and zeroing take all gradients together
ADAMW_KERNELS = (2, 3, 2, 3, 2, 2, 4)  # accesses of an element by each kernel of AdamW.step, transformers v4.15.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A compared run."""

    group: str
    case: str
    measured: float
    predicted: StepTime
    kind: tuple[str, ...] = ()  # GPU, model, method, precision, optimizer

    @property
    def error(self) -> float:
        """Of the predicted seconds."""
        return self.predicted.seconds / self.measured - 1

    @property
    def is_held(self) -> bool:
        """Whether the printed range has the measurement in it."""
        return self.predicted.low <= self.measured <= self.predicted.high

    def figures(self) -> dict[str, Any]:
        """Return the row for JSON."""
        found = {"group": self.group, "case": self.case, "measured_seconds": self.measured}
        return {**found, "predicted_seconds": self.predicted.seconds, "shares": dict(self.predicted.shares)}


def group_of(case: Case) -> str:
    """Return the group of a published row."""
    if case.id.startswith("hf-docs-v100"):
        return f"ladder B: BERT-large, V100 ({FITTED})"
    if case.gpu in NOT_FITTED:
        return NOT_FITTED[case.gpu]
    if case.id.startswith("qwen-readme"):
        rows = "rows of 1,024 tokens or more" if case.settings["seq_len"] >= 1024 else "shorter rows"
        return f"A100, Qwen 1.8B and 14B with LoRA, {rows}, not fitted"
    if "ixtral" in case.model:
        return "A100, as many tokens for each expert (reported only)"
    if case.quantization == "gptq":
        return "A100, GPTQ taken as nf4 (reported only)"
    is_fitted = "accelerated" not in case.id or "Llama" in case.model
    return f"A100, dense ({FITTED})" if is_fitted else "A100, dense, not fitted"


def compare(case: Case) -> Row:
    """Predict the seconds of a step of a published run.

    Raises:
        NotEstimableError, ValueError: it cannot be predicted; the message says why.
    """
    if case.gpus > 1:
        raise ValueError(f"{case.gpus} GPUs: the time has no communication")
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
    if found.gpu is None or costs is None or (costs.ranking_rule and not costs.routes_tokens):
        raise ValueError(found.time_unknown or "the GPU is unknown")
    predicted = costs.on(found.gpu)
    if (case.version("torch") or LOOPS_BEFORE) < LOOPS_BEFORE:
        costs = dataclasses.replace(costs, optimizer=optimizer_in_loops(facts, found.settings))
        predicted = costs.on(found.gpu)
    method = "full" if case.lora is None else f"LoRA {case.quantization}"
    kind = found.gpu.name, case.model, method, found.settings.precision, found.settings.optim
    seconds = case.step_seconds or (predicted.tokens or 0.0) / (case.tokens_per_second or 1.0)
    return Row(group, case.id, seconds, predicted, kind)


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
        own = StepSettings(optim=settings.optim, max_grad_norm=0)
        found += optimizer_operations(facts, optimizer_memory(facts, own), own)
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
    """Return number, rank correlation of seconds, median and worst error without sign."""
    seconds = [row.predicted.seconds for row in rows], [row.measured for row in rows]
    errors = [abs(row.error) for row in rows]
    return {
        "rows": len(rows),
        "spearman": spearman(*seconds) if len(rows) > 2 else None,
        "median": statistics.median(errors),
        "worst": max(errors),
        "held": sum(row.is_held for row in rows),
    }


def print_rows(rows: list[Row]) -> None:
    """Print a table of the rows, group by group."""
    lines = []
    for row in rows:
        found = row.predicted
        part = max(found.shares, key=lambda name: found.shares[name])
        cells = [f"{row.measured:.3f} s", f"{found.seconds:.3f} s", percent(row.error, 1, signed=True)]
        lines.append((row.group, row.case, *cells, f"{found.low:.3f} to {found.high:.3f}", part))
    print(markdown("| group | case | measured | predicted | error | range | largest share |", lines))


def grouped(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows by group."""
    return {name: [row for row in rows if row.group == name] for name in dict.fromkeys(row.group for row in rows)}


def table(figures: dict[str, Any]) -> str:
    """Return how far predicted seconds are from published ones."""
    rows = []
    for name, found in figures["summaries"].items():
        rank = "-" if found["spearman"] is None else f"{found['spearman']:.3f}"
        errors = (
            percent(found["median"], 1),
            percent(found["worst"], 1),
            f"{found['held']} of {found['rows']}",
        )
        rows.append((name, str(found["rows"]), rank, *errors))
    left_out = "\n".join(f"- {number}: {reason}" for reason, number in figures["left_out"].items()) or "none"
    note = (
        "Errors of seconds per step, without sign. Other people timed the steps (`make bench-step-time`). These steps "
        "also decided how wide the printed ranges are."
    )
    return markdown(
        "| steps | number | Spearman | median error | worst | in the printed range |",
        rows,
        note,
        f"Not predicted, with the number of steps:\n\n{left_out}",
    )


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
        print(f"{name:<52}{len(errors):>5}{percent(statistics.median(errors), 1):>30}{percent(max(errors), 1):>10}")


# ---- Published rows


def published() -> tuple[list[Row], Counter[str]]:
    """Return the compared rows that have a throughput, and why others were left out."""
    rows, left_out = [], Counter[str]()
    for case in read_cases(*FILES):
        if case.tokens_per_second or case.step_seconds:
            try:
                rows.append(compare(case))
            except (NotEstimableError, ValueError) as error:
                left_out[str(error)] += 1
                continue
            print(f"{case.id}: {percent(rows[-1].error, 1, signed=True)}", flush=True)
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
    return [Row(group, name, seconds / scale, predicted) for name, seconds, predicted in rows]


def main() -> None:
    """Print the rows and the table, append the row."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks for it
    rows, left_out = published()
    rows += ladder_a()
    groups = grouped(rows) | {
        A100: [row for row in rows if row.group.startswith("A100, ") and row.group.endswith(", not fitted")],
        "A100, all": [row for row in rows if row.group.startswith("A100, ")],
        "all but ladder A": [row for row in rows if not row.group.startswith("ladder A")],
    }
    found = {name: summary(members) for name, members in groups.items()}
    print_rows(rows)
    print_errors_after_a_row([row for row in rows if row.group.startswith(("ladder B", "A100, dense"))])
    figures = {"rows": [row.figures() for row in rows], "summaries": found, "left_out": dict(left_out)}
    show("step_time", figures, table(figures))


if __name__ == "__main__":
    main()
