"""What ``hf-memopt lengths`` does: print or draw what padding wastes on a data file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.command import wrapped
from hf_memopt.plotting import check_picture
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    from hf_memopt.cli.options import LengthsOptions

__all__ = ["run"]


def run(options: LengthsOptions, context: Any) -> None:
    """Print the report."""
    if options.plot is not None:
        check_picture(options.plot, purpose="the picture of a padding report")
    from hf_memopt.batching.padding_costs.data_files import file_lengths
    from hf_memopt.batching.padding_costs.figures import padding_report
    from hf_memopt.batching.padding_costs.output import print_report

    found = file_lengths(options.path, column=options.column, tokenizer=options.tokenizer)
    sizes = {name: getattr(options, name) for name in ("batch_size", "max_tokens", "max_length")}
    report = padding_report(found.lengths, unit=found.unit, **sizes)
    if options.plot is not None:
        report.plot(options.plot)
    console = Console()
    if options.json_output:
        figures = {"path": str(options.path), **found.as_dict(), **report.as_dict()}
        console.out(json.dumps(figures, indent=2), highlight=False)
        return
    console.out(wrapped(found.heading(options.path), console), highlight=False)
    print_report(report, console)
    if options.plot is not None:
        console.out(f"Picture: {options.plot}", highlight=False)
