"""What ``hf-memopt report`` does: one page of a run, a plan, an estimate or a measurement, or what grew between two.

It imports neither torch nor transformers: a report is made of JSON alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.reports import check_page, write_page
from hf_memopt.reports.difference import compare, difference_page, print_difference, read_side, read_told, single_page
from hf_memopt.reports.plan import plan_page
from hf_memopt.reports.run import run_page
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    from hf_memopt.cli.options import ReportOptions

PAGES: dict[str, Callable[[Any], str]] = {"plan": plan_page, "run": run_page}


def run(options: ReportOptions, context: Any) -> None:
    """Write the page of one, or print what grew between two.

    Raises:
        ValueError: more than two; a file that is missing, of another version or of another kind; a page that cannot be
            written.
    """
    paths, output, force = options.path, options.output, options.force
    if len(paths) > 2:
        raise ValueError(f"path={len(paths)} files are too many; expected one or two. Pass the first and the last")
    if force and output is None and len(paths) == 2:
        raise ValueError("force=True has nothing to replace: no file is written; expected --output. Pass --output FILE")
    if len(paths) == 2:
        _difference(paths, options)
        return
    if options.json_output:
        raise ValueError(
            f"json_output=True, path={str(paths[0])!r}: one is JSON already; expected two. Pass the one before it too"
        )
    kind, told, found = read_told(paths[0])
    page = found.with_suffix(".html") if output is None else output
    check_page(page, force=force)
    write_page(PAGES[kind](told) if kind in PAGES else single_page(read_side(found)), page)
    Console().out(f"Report: {page}", highlight=False)


def _difference(paths: Sequence[Path], options: ReportOptions) -> None:
    output, console = options.output, Console()
    if output is not None:
        check_page(output, force=options.force)
    found = compare(*(read_side(path) for path in paths))
    if output is not None:
        write_page(difference_page(found), output)
    if options.json_output:
        console.out(json.dumps(found.as_dict(), indent=2), highlight=False)
        return
    print_difference(found, console)
    if output is not None:
        console.out(f"Report: {output}", highlight=False)
