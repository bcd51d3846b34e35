"""Write the generated parts of README.md and docs/ between their markers, and README's picture, from the code and the
last rows in ``benchmarks/results``; each program there has its table. Counts of models and GPUs in sentences have
markers, too.

python benchmarks/table.py            # rewrite the pages
python benchmarks/table.py --check    # exit code 1 if they are not current
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import accuracy
import batching
import batching_collation
import batching_end_to_end
import checkpointing
import claims
import estimation
import experts
import fit_page
import four_setups
import fused_cross_entropy
import gpu_figures
import judge
import large_models
import larger_than_gpu
import long_rows
import longest_rows
import memory_report
import microbatch
import plans
import public_scripts
import published
import rehearsals
import resident_layers
import resume
import sixteen_bit_weights
import step_time
from results_file import last_row
from table_of_code import cli_help, compatibility, presets, tested_versions
from table_of_demo import demo_results, rescue_log
from table_pictures import stale_pictures, write_pictures

from hf_memopt.gpus import GPUS
from hf_memopt.prediction.memory.models import known_models

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(?P<begin><!-- (?P<name>[\w-]+):begin -->\n).*?(?P<end><!-- (?P=name):end -->)", re.DOTALL)
COUNTED = re.compile(r"(?P<begin><!--(?P<name>[\w-]+)-->)\d*(?P<end><!---->)")


def _of(table: Callable[[Any], str], case: str, program: str | None = None) -> Callable[[], str]:
    """Return what makes a table of the figures of a case's last row."""
    return lambda: table(last_row(case, program=program)["figures"])


def _of_batching(table: Callable[[Mapping[str, Any]], str], case: str) -> Callable[[], str]:
    """Return what makes a table of a last row of ``batching.py``, versions included."""
    return lambda: table(last_row(f"batching_{case}", program="batching"))


SECTIONS: dict[str, Callable[[], str]] = {
    "status": lambda: published.status(last_row("published")["figures"], last_row("step_time")["figures"]),
    "rescue-log": rescue_log,
    "demo-results": demo_results,
    "four-setups": four_setups.stored_table,
    "accuracy": _of(accuracy.table, "accuracy"),
    "claims": claims.table,
    "cli-help": cli_help,
    "padding-sentence": _of_batching(batching.padding_sentence, "lengths"),
    "plan-example": plans.plan_example,
    "plans": plans.plans_table,
    "largest-full": plans.largest_full,
    "outcomes": _of(published.outcomes, "published"),
    "published-errors": _of(published.table, "published"),
    "estimate-errors": gpu_figures.estimate_errors,
    "judge": _of(judge.table, "judge"),
    "judge-worst": _of(judge.worst_table, "judge"),
    "judge-sentence": _of(judge.sentence, "judge"),
    "rehearsals": lambda: rehearsals.table(rehearsals.stored()),
    "rehearsal-example": rehearsals.example,
    "public-scripts": lambda: public_scripts.table(public_scripts.stored_rows()),
    "estimate-speed": _of(estimation.table, "estimation"),
    "batching-table": _of_batching(batching.lengths_table, "lengths"),
    "batching-collation": _of_batching(batching_collation.collation_table, "collation"),
    "batching-end-to-end": _of_batching(batching_end_to_end.end_to_end_table, "end_to_end"),
    "microbatch": _of(microbatch.table, "microbatch"),
    "checkpointing": _of(checkpointing.table, "checkpointing"),
    "long-rows": _of(long_rows.table, "long_rows"),
    "longest-rows": _of(longest_rows.table, "longest_rows"),
    "resume": _of(resume.table, "resume"),
    "step-time": _of(step_time.table, "step_time"),
    "fused-cross-entropy": _of(fused_cross_entropy.table, "fused cross entropy", "fused_cross_entropy"),
    "large-models": _of(large_models.table, "large_models"),
    "experts": _of(experts.table, "experts"),
    "larger-than-gpu": _of(larger_than_gpu.table, "larger_than_gpu"),
    "resident-layers": _of(resident_layers.table, "resident_layers"),
    "sixteen-bit-weights": lambda: sixteen_bit_weights.table(
        {
            task: last_row(f"16-bit weights, {task}", program="sixteen_bit_weights")["figures"]
            for task in sixteen_bit_weights.TITLES
        }
    ),
    "compatibility": compatibility,
    "tested-versions": tested_versions,
    "presets": presets,
    "memory-report": _of(memory_report.table, "memory_report"),
}


COUNTS: dict[str, Callable[[], int]] = {
    "models": lambda: len(known_models()),
    "gpus": lambda: len(GPUS),
    "models-of-the-page": lambda: len(fit_page.shown_models()),
    "gpus-of-the-page": lambda: sum(map(len, fit_page.by_size().values())),
}


def rendered(text: str) -> str:
    """Return the page with every generated part made anew."""

    def made(marked: re.Match[str]) -> str:
        return f"{marked['begin']}{SECTIONS[marked['name']]()}\n{marked['end']}"

    counted = COUNTED.sub(lambda marked: f"{marked['begin']}{COUNTS[marked['name']]()}{marked['end']}", text)
    return MARKED.sub(made, counted)


def unplaced(texts: Iterable[str]) -> list[str]:
    """Return the sections that are in no page."""
    found = {marked["name"] for text in texts for marked in MARKED.finditer(text)}
    return [name for name in SECTIONS if name not in found]


def main() -> int:
    """Rewrite or check the pages; return the exit code."""
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    if missing := unplaced(pages.values()):
        raise SystemExit(f"no page has the markers of {', '.join(missing)}")
    changed = {page: new for page, old in pages.items() if (new := rendered(old)) != old}
    if "--check" in sys.argv[1:]:
        return int(bool(changed or stale_pictures()))
    for page, text in changed.items():
        page.write_text(text, encoding="utf-8")
    write_pictures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
