"""The pictures of README and docs/: of the plan that ``benchmarks/plans.py`` keeps, and of padding."""

from __future__ import annotations

import tempfile
from pathlib import Path

from batching import synthetic_lengths
from plans import EXAMPLE_PLAN

from hf_memopt import padding_report
from hf_memopt.plotting import DARK, LIGHT, Theme, in_theme
from hf_memopt.prediction.reports.plan import draw_plan, read_plan_text

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PLANS: dict[str, Theme] = {"plan.svg": LIGHT, "plan-dark.svg": DARK}
PADDINGS = {"padding.svg": "light", "padding-dark.svg": "dark"}
PADDED_EXAMPLES = 5_000


def drawn() -> dict[Path, bytes]:
    """Return the pictures by their paths, drawn anew."""
    told = read_plan_text(EXAMPLE_PLAN.read_bytes(), str(EXAMPLE_PLAN))
    with tempfile.TemporaryDirectory() as folder:
        for name, theme in PLANS.items():
            draw_plan(told, Path(folder, name), theme=theme)
        report = padding_report(synthetic_lengths("review", PADDED_EXAMPLES))
        for name, colours in PADDINGS.items():
            with in_theme(colours):
                report.plot(Path(folder, name))
        return {IMAGES / name: Path(folder, name).read_bytes() for name in (*PLANS, *PADDINGS)}


def write_pictures() -> None:
    """Write the pictures."""
    IMAGES.mkdir(exist_ok=True)
    for path, content in drawn().items():
        path.write_bytes(content)


def stale_pictures() -> list[str]:
    """Return the names of pictures that another plan, or another version of the drawing, would change."""
    return [path.name for path, content in drawn().items() if not path.exists() or path.read_bytes() != content]
