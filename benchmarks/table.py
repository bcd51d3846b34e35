"""Write the generated parts of README.md and docs/ between their markers, and README's picture, from the code and
``benchmarks/results``.

python benchmarks/table.py            # rewrite the pages
python benchmarks/table.py --check    # exit code 1 if they are not current
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import table_estimates as estimates
import table_plans as plans
import table_trainings as trainings
from table_cli import cli_help
from table_compatibility import compatibility, tested_versions
from table_pictures import stale_pictures, write_pictures

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(?P<begin><!-- (?P<name>[\w-]+):begin -->\n).*?(?P<end><!-- (?P=name):end -->)", re.DOTALL)

SECTIONS: dict[str, Callable[[], str]] = {
    "status": estimates.status,
    "rescue-log": trainings.rescue_log,
    "demo-sentence": trainings.demo_sentence,
    "demo-table": trainings.demo_table,
    "accuracy": trainings.accuracy,
    "cli-help": cli_help,
    "padding-sentence": trainings.padding_sentence,
    "plan-example": plans.plan_example,
    "plans": plans.plans,
    "largest-full": plans.largest_full,
    "estimate-comparison": estimates.estimate_comparison,
    "published-errors": estimates.published_errors,
    "estimate-errors": estimates.estimate_errors,
    "estimate-speed": estimates.estimate_speed,
    "batching-table": trainings.batching_table,
    "batching-collation": trainings.batching_collation,
    "batching-end-to-end": trainings.batching_end_to_end,
    "stream-scale": trainings.stream_scale,
    "microbatch": trainings.microbatch,
    "checkpointing": trainings.checkpointing,
    "resume": trainings.resume,
    "step-time": estimates.step_time,
    "fused-cross-entropy": trainings.fused_cross_entropy,
    "large-models": estimates.large_models,
    "sixteen-bit-weights": trainings.sixteen_bit_weights,
    "compatibility": compatibility,
    "tested-versions": tested_versions,
    "presets": estimates.presets,
    "memory-report": trainings.memory_report,
}


def rendered(text: str) -> str:
    """Return the page with every generated part made anew."""

    def made(marked: re.Match[str]) -> str:
        return f"{marked['begin']}{SECTIONS[marked['name']]()}\n{marked['end']}"

    return MARKED.sub(made, text)


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
