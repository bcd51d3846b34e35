"""What ``hf-memopt report`` does: one page of a run or a plan.

It imports neither torch nor transformers: a report is made of JSON alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.notices import quoted
from hf_memopt.plain_data import checked_path, parse_object
from hf_memopt.prediction.reports import check_page, write_page
from hf_memopt.prediction.reports.plan import plan_page, read_plan_text
from hf_memopt.prediction.reports.run import read_run, run_file_of, run_page
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    from hf_memopt.cli.options import ReportOptions

WRITE_IT = "Write it: hf-memopt plan MODEL --json > plan.json"


def run(options: ReportOptions, context: Any) -> None:
    """Write the page."""
    path = checked_path("path", str(options.path))
    found = run_file_of(path) if path.is_dir() else path
    if not found.is_file():
        raise ValueError(
            f"path={str(path)!r} does not exist; expected the output folder of a run, or the JSON of a plan. {WRITE_IT}"
        )
    draw = _drawn_by(found)
    if options.json_output or context.args:
        asks = "json_output=True asks" if options.json_output else f"path={1 + len(context.args)} files ask"
        raise ValueError(
            f"{asks} for a comparison, which reports no longer make; expected one file or folder. "
            f"Make a page of each: hf-memopt report {quoted(str(path))}"
        )
    page = options.output or found.with_suffix(".html")
    # the page that the run itself wrote beside its report is made again
    check_page(page, force=options.force or (options.output is None and found != path))
    write_page(draw(), page)
    Console().out(f"Report: {page}", highlight=False)


def _drawn_by(path: Path) -> Callable[[], str]:
    """Return what makes the page of a file, which is read and checked now; its kind is that of a field only it has."""
    text, name = path.read_bytes(), str(path)
    try:
        content = parse_object(text)
        if content.keys().isdisjoint(("candidates", "micro_batching")):
            raise ValueError("it has neither the field candidates of a plan nor micro_batching of a run")
    except ValueError as error:
        raise ValueError(
            f"path={name!r} is nothing to report ({error}); expected what `hf-memopt plan --json` or a "
            f"MemoryReportCallback wrote. {WRITE_IT}"
        ) from None
    if "candidates" in content:
        return partial(plan_page, read_plan_text(text, name))
    return partial(run_page, read_run(text, name))
