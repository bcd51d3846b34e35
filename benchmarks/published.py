"""Predicted against measured GPU memory, of runs that other people published: python benchmarks/published.py

Each case is estimated twice on the CPU: "as is", with today's software, and "matched", with what the measured versions
did differently (``published_behaviours``). Errors are predicted / measured - 1. Of a run whose whole GPU was measured
too, the prediction is reserved bytes and the context. Of a run of which only the outcome is known, that it ran or that
memory ran out, the verdict is compared.

python benchmarks/published.py --cases FILE   # other measurements, in the format of published/; no row is appended
"""

from __future__ import annotations

import argparse
import os
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import step_time
from published_behaviours import behaviours_of
from published_cases import FILES, Case, estimate_settings, read_cases
from results_file import markdown, show

from hf_memopt.components import MARGIN_SHARE
from hf_memopt.prediction.memory import Estimate, estimate
from hf_memopt.prediction.memory.allocator import caching_allocator
from hf_memopt.prediction.memory.settings import NotEstimableError
from hf_memopt.units import percent

TODAY = (4, 40)  # of transformers: stock Trainer runs from here on count as today's software
LOOPS = {
    "Trainer": "`Trainer`",
    "SFTTrainer": "TRL's `SFTTrainer`",
    "manual": "hand-written loop",
    "function": "hand-written step",
}
VERDICTS = ("fits", "tight", "over")
FAR_SHARE = 0.08  # from which error of reserved bytes on docs/accuracy.md names the cause

Row = dict[str, Any]


# ---- The estimates --------------------------------------------------------------------------------------------------


def compare(case: Case) -> Row:
    """Estimate a case as is and matched.

    Raises:
        NotEstimableError, ValueError: the case cannot be estimated; the message says why.
    """
    settings = estimate_settings(case)
    as_is = estimate(**settings)
    behaviours = behaviours_of(case, settings["model"].model_type)
    for behaviour in behaviours:
        behaviour.change(settings)
    with patch.object(caching_allocator, "TORCH_RELEASE", case.version("torch") or caching_allocator.TORCH_RELEASE):
        matched = estimate(**settings)
    return {
        "case": case.id,
        "source": case.source,
        "gpu": case.gpu,
        "loop": case.loop,
        "what": case.what,
        "is_quantized": case.quantization is not None,
        "is_solid": case.solid,
        "ran": case.fits,
        "verdict": matched.verdict,
        "total_share": matched.total_bytes / settings["gpu"].usable_bytes,
        "measured_bytes": case.measured_bytes,
        "as_is_bytes": _compared(as_is, case),
        "matched_bytes": _compared(matched, case),
        "nvml_bytes": case.nvml_bytes,
        "matched_nvml_bytes": _total(matched, case),
        "matched_reserved_bytes": matched.peak_reserved_bytes,
        "behaviours": [behaviour.name for behaviour in behaviours],
        "is_today": case.loop == "Trainer" and (case.version("transformers") or (0, 0)) >= TODAY,
    }


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


def compare_all(cases: Sequence[Case]) -> tuple[list[Row], Counter[str]]:
    """Return the rows of the cases, and why others were left out."""
    rows, left_out = [], Counter[str]()
    for case in cases:
        try:
            row = compare(case)
        except (NotEstimableError, ValueError) as error:
            left_out[str(error)] += 1
            continue
        rows.append(row)
        print(line_of(row), flush=True)
    return rows, left_out


def line_of(row: Row) -> str:
    """Return what is printed of a row while the others are still computed."""
    said = []
    if row["measured_bytes"] is not None:
        said.append(
            f"as is {percent(error_of(row, 'as_is'), 2, signed=True)}, matched "
            f"{percent(error_of(row, 'matched'), 2, signed=True)}"
        )
    if row["ran"] is not None:
        outcome = "ran" if row["ran"] else "ran out of memory"
        said.append(f"{outcome}, predicted {row['verdict']} ({percent(row['total_share'], 1)} of the GPU)")
    return f"{row['case']}: {'; '.join(said)}{'' if row['is_solid'] else ' (settings not fully stated)'}"


# ---- Errors ---------------------------------------------------------------------------------------------------------


def error_of(row: Mapping[str, Any], which: str) -> float:
    """Return the error "as_is" or "matched"."""
    return float(row[f"{which}_bytes"] / row["measured_bytes"] - 1)


def environment_errors(rows: Sequence[Row]) -> list[float]:
    """Return the errors of reserved bytes and what the environment holds besides them.

    The CUDA context and what libraries and other processes hold depend on the installation, not on the model: within
    the same harness runs agree on it to a few MiB. It is taken from one run, the smallest of unquantised weights, which
    is then not counted; the others test it.
    """
    errors = []
    for source in dict.fromkeys(row["source"] for row in rows):
        members = [row for row in rows if row["source"] == source and row["nvml_bytes"] is not None]
        plain = [row for row in members if not row["is_quantized"]]
        if plain:
            smallest = min(plain, key=lambda row: row["matched_reserved_bytes"])
            outside = smallest["nvml_bytes"] - smallest["matched_reserved_bytes"]
            others = [row for row in members if row is not smallest]
            errors += [(row["matched_reserved_bytes"] + outside) / row["nvml_bytes"] - 1 for row in others]
    return errors


def summary(errors: Sequence[float]) -> dict[str, float | int]:
    """Return number, median and worst error without sign, and the worst one below the measurement."""
    if not errors:
        return {"cases": 0}
    return {
        "cases": len(errors),
        "median": statistics.median(map(abs, errors)),
        "worst": max(map(abs, errors)),
        "worst_under": max(0.0, -min(errors)),
    }


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, float | int]]:
    """Return the summaries of the groups that README and docs/ name."""
    others = [row for row in rows if row["measured_bytes"] is not None and not row["is_solid"]]
    rows = [row for row in rows if row["measured_bytes"] is not None and row["is_solid"]]
    matched = [error_of(row, "matched") for row in rows]
    reserved = [row for row in rows if row["what"] == "reserved"]
    with_nvml = [row for row in rows if row["nvml_bytes"] is not None]
    usual = [row["matched_nvml_bytes"] / row["nvml_bytes"] - 1 for row in with_nvml]
    return {
        "stock Trainer since 4.40, as is": summary([error_of(row, "as_is") for row in rows if row["is_today"]]),
        "all, as is": summary([error_of(row, "as_is") for row in rows]),
        "all, matched": summary(matched),
        "allocated, matched": summary([error_of(row, "matched") for row in rows if row["what"] == "allocated"]),
        "reserved by torch's meter, matched": summary([error_of(row, "matched") for row in reserved]),
        "reserved and the GPU's usual context, matched": summary(usual),
        "reserved and the environment's own memory, matched": summary(environment_errors(rows)),
        "settings not fully stated, matched (reported only)": summary([error_of(row, "matched") for row in others]),
    }


def verdicts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Return how often each verdict was given, by what happened."""
    groups = {
        "ran": [row for row in rows if row["ran"] is True and row["is_solid"]],
        "ran out of memory": [row for row in rows if row["ran"] is False and row["is_solid"]],
        "ran, settings not fully stated": [row for row in rows if row["ran"] is True and not row["is_solid"]],
        "ran out of memory, settings not fully stated": [
            row for row in rows if row["ran"] is False and not row["is_solid"]
        ],
    }
    return {
        name: {verdict: sum(row["verdict"] == verdict for row in members) for verdict in VERDICTS}
        for name, members in groups.items()
        if members
    }


def beyond_margin(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the runs whose reserved bytes were measured, and those that reserved more than a margin over the estimate.

    ``hf_memopt.components.MARGIN_SHARE`` rests on them.
    """
    reserved = [row for row in rows if row["what"] == "reserved" and row["is_solid"]]
    return len(reserved), sum(error_of(row, "matched") < -1 / MARGIN_SHARE for row in reserved)


# ---- Tables ---------------------------------------------------------------------------------------------------------


def outcomes(figures: Mapping[str, Any]) -> str:
    """Return how often each verdict was given to runs that trained and to runs that ran out of memory."""
    measured, beyond = figures["beyond_margin"]
    return markdown(
        "| what happened | runs | predicted: fits | tight | over |",
        [(name, *map(str, (sum(found.values()), *found.values()))) for name, found in figures["verdicts"].items()],
        f"*Tight* leaves less than {percent(1 / MARGIN_SHARE)} of the GPU free. Of {measured} runs whose reserved "
        f"bytes torch measured, {beyond} reserved that much more than was predicted.",
    )


def table(figures: Mapping[str, Any]) -> str:
    """Return the summaries, the errors by source and kind of loop, and what was put in place."""
    rows = [row for row in figures["rows"] if row["measured_bytes"] is not None and row["is_solid"]]
    groups = list(dict.fromkeys((row["source"], row["loop"]) for row in rows))
    sources = markdown(
        "| measured by | runs | matched: worst | worst under | median | as is: median | worst | what | loop | on |",
        [_cells([row for row in rows if (row["source"], row["loop"]) == group]) for group in groups],
    )
    errors = markdown(
        "| memory, errors in percent | figures | worst | worst under | median |",
        [
            (name, str(found["cases"]), *(f"{100 * found[key]:.2f}" for key in ("worst", "worst_under", "median")))
            for name, found in figures["summaries"].items()
            if found["cases"]
        ],
        "An error is predicted / measured - 1, without sign (`make bench-published`, on a CPU):",
        "- *worst under*: the largest error of a prediction that was too low\n"
        "- *as is*: the estimate for today's software\n"
        "- *matched*: with what the measured versions did differently, listed below\n"
        "- *the GPU's usual context*: NVML counts everything on the GPU, so the context is added to reserved bytes\n"
        "- *the environment's own memory*: what a harness holds outside torch's allocator, the same in all its runs. "
        "It is taken from the smallest run, which is not counted.",
    )
    counts = Counter(name for row in rows for name in row["behaviours"])
    changes = _listed(f"{name} ({count})" for name, count in counts.most_common())
    left_out = _listed(f"{count}: {reason.split(';')[0]}" for reason, count in figures["left_out"].items())
    return "\n\n".join(
        [
            errors,
            far_off(rows),
            "Other people measured all of these runs; their sources are in `benchmarks/published/`:",
            sources,
            "What the measured versions did differently, with the number of runs (`published_behaviours.py`):",
            changes,
            "Not compared, with the number of runs:",
            left_out or "none",
        ]
    )


def _listed(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def far_off(rows: Sequence[Row]) -> str:
    """Return the runs whose reserved bytes are off by more than 8 %, with the MiB of the error."""
    found = [
        f"`{row['case']}` by {percent(error_of(row, 'matched'), 1, signed=True)} "
        f"({(row['matched_bytes'] - row['measured_bytes']) / 2**20:+,.0f} MiB)"
        for row in rows
        if row["what"] == "reserved" and abs(error_of(row, "matched")) > FAR_SHARE
    ]
    return f"Reserved bytes are off by more than {percent(FAR_SHARE)} in {' and '.join(found) or 'none'}."


def status(memory: Mapping[str, Any], seconds: Mapping[str, Any]) -> str:
    """Return how far predictions are from what others measured, the worst included, and what was not measured."""
    found, total = (
        memory["summaries"][name] for name in ("all, matched", "reserved and the GPU's usual context, matched")
    )
    unfitted = [seconds["summaries"][name] for name in (step_time.A100, *step_time.NOT_FITTED.values())]
    steps, worst = sum(group["rows"] for group in unfitted), max(group["worst"] for group in unfitted)
    return (
        f"Against {found['cases']} GPU memory figures of other people, corrected for library versions, the median "
        f"error is {percent(found['median'], 1)} and the worst {percent(found['worst'], 1)}. Totals with CUDA's "
        f"context are up to {percent(total['worst_under'], 1)} too low: leave that much free. Seconds of {steps} "
        f"published steps are off by up to {percent(worst)}. "
        "**This project has measured neither memory nor seconds on a GPU yet**; `make bench-gpu` measures yours."
    )


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the line of one source."""
    first = rows[0]
    as_is, matched = (summary([error_of(row, which) for row in rows]) for which in ("as_is", "matched"))
    figures = [matched["worst"], matched["worst_under"], matched["median"], as_is["median"], as_is["worst"]]
    return [
        _link(first["source"]),
        str(len(rows)),
        *(f"{100 * figure:.2f}" for figure in figures),
        ", ".join(dict.fromkeys(row["what"].replace("card", "GPU") for row in rows)),
        LOOPS[first["loop"]],
        ", ".join(dict.fromkeys(row["gpu"] for row in rows)),
    ]


def _link(source: str) -> str:
    """Return a link to the repository or dataset of a source such as "github:owner/name path"."""
    place = source.split()[0].removesuffix(":")
    if place.startswith("github:"):
        name = place.removeprefix("github:")
        return f"[{name}](https://github.com/{name})"
    return f"[{place.removeprefix('huggingface.co/datasets/')}](https://{place})"


def main(arguments: list[str] | None = None) -> None:
    """Run the cases, print a line for each and the tables, append the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=Path, nargs="+", help="other measurements, in the format of published/")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks for it
    cases = [case for case in read_cases(*(given.cases or FILES)) if case.what != "seconds"]
    rows, left_out = compare_all(cases)
    figures = {
        "rows": rows,
        "summaries": summaries(rows),
        "verdicts": verdicts(rows),
        "beyond_margin": beyond_margin(rows),
        "left_out": dict(left_out),
    }
    if given.cases is None:
        show("published", figures, f"{outcomes(figures)}\n\n{table(figures)}")
    else:
        print(outcomes(figures), table(figures), sep="\n\n")


if __name__ == "__main__":
    main()
