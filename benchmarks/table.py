"""Write the generated parts of README.md between their markers, from the code and from ``benchmarks/results``.

python benchmarks/table.py            # rewrite README.md
python benchmarks/table.py --check    # exit code 1 if it is not current
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import table_estimates as estimates
import table_plans as plans
import table_trainings as trainings
from table_compatibility import compatibility

ROOT = Path(__file__).resolve().parent.parent

SECTIONS: dict[str, Callable[[], str]] = {
    "demo-sentence": trainings.demo_sentence,
    "demo-table": trainings.demo_table,
    "accuracy": trainings.accuracy,
    "plans": plans.plans,
    "largest-full": plans.largest_full,
    "estimate-ladder": estimates.estimate_ladder,
    "published-errors": estimates.published_errors,
    "estimate-errors": estimates.estimate_errors,
    "estimate-speed": estimates.estimate_speed,
    "batching-table": trainings.batching_table,
    "batching-collation": trainings.batching_collation,
    "batching-end-to-end": trainings.batching_end_to_end,
    "microbatch": trainings.microbatch,
    "checkpointing": trainings.checkpointing,
    "resume": trainings.resume,
    "step-time": estimates.step_time,
    "fused-cross-entropy": trainings.fused_cross_entropy,
    "large-models": estimates.large_models,
    "sixteen-bit-weights": trainings.sixteen_bit_weights,
    "compatibility": compatibility,
    "presets": estimates.presets,
    "memory-report": trainings.memory_report,
}


def rendered(text: str) -> str:
    """Return the page with every generated part made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"README.md lacks the markers {begin.strip()} and {end}")
        replacement = f"{begin}{make()}\n{end}"
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, new=replacement: new, text, flags=re.DOTALL)
    return text


def main() -> int:
    """Rewrite or check README.md; return the exit code."""
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = rendered(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
