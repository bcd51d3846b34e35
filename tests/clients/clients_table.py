"""Write ``docs/clients.md`` from what ``make test-clients`` found.

python tests/clients/clients_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = Path(__file__).with_name("results.jsonl")
PATTERN_RESULTS = Path(__file__).with_name("pattern_results.jsonl")
PAGE = ROOT / "docs" / "clients.md"
SHOWN = {
    "same": "same",
    "equal": "equal",
    "refused": "refused",
    "differs by design": "by design",
    "not applicable": "-",
}

TEXT = """\
# Other libraries

Other people's trainings give the same results with this package, or it refuses them with a message. For instance:

```python
from hf_memopt import EvaluationGuardCallback, MicrobatchCallback, OverflowCallback, attach

attach(trainer, MicrobatchCallback(), OverflowCallback(), EvaluationGuardCallback())  # a Trainer of any library
trainer.train()
```

Each training is 4 steps of a tiny model with random weights, run with the plain trainer and with this package. Losses,
gradient norms, everything else that is logged, evaluation metrics and weights are compared:

- **same**: bit for bit. A bucketed view is compared with the plain trainer on the same examples in the same order.
- **equal**: a batch was cut, so sums run in another order: within {relative:g} of each value (or {absolute:g}).
  Other metrics of training steps are left out of this one comparison: TRL's are means over forward passes.
- **refused (n)**: by message n below, complete but for its figures.
- **by design (n)**: differs for reason n.
- **- (n)**: means nothing, for reason n.
- **fails (n)**: wrong, and known.

`all` is memory report, micro-batching, overflow, evaluation guard and a bucketed view together. `passed` is the same
callbacks in `Trainer(callbacks=...)`, without `attach` and without a view.

For TRL's SFT, DPO and Reward rows `tests/clients/test_estimates.py` compares the estimate with what a run allocates.
KTO, GRPO, RLOO and Distillation are refused by name ([what the estimate leaves out](accuracy.md#what-it-leaves-out)).

{date}, {versions}. Made by `make test-clients`.
"""

PATTERNS = """
## Patterns

Losses, training steps, models, collators and evaluations as people write them, tried in the same way. Result: {count}.

- Memory runs out once, in the second step, or at each evaluation. It runs out at an operation of the model that has
  more rows than half a batch.
- **refused (n), then equal**: message n says what to do; with that done, the results are those of the plain trainer.
- **whole**: the batch of the last step was not cut, although it should have been.
- In bfloat16, **equal** is within {narrow:g}.
"""

UPSTREAM = """
## transformers' own tests

transformers' Trainer and data-collator tests (`tests/trainer`) run three times: with the plain Trainer, with every
Trainer attached, and attached with `MicrobatchCallback`, `OverflowCallback` and `EvaluationGuardCallback`.
`make test-upstream TRANSFORMERS_SRC=checkout` runs them, without the import of names that later versions lack.

- Most failures of the plain Trainer need the Hub or a name that is gone. Most skips are slow tests, DeepSpeed's, and
  tests for a GPU.
- `tests/upstream/known_differences.py` has the reason for each test that fails attached only.
- The last three rows are of an older state. It examined the loss before the first step, and refused two tests with
  random losses.

| passed / failed / skipped, against | tests of | plain | attached | attached with callbacks | run on |
|---|---|---|---|---|---|
| transformers 5.23.0 | 4.57.5 | 202 / 31 / 67 | 200 / 33 / 67 | 198 / 35 / 67 | 2026-11-27 |
| transformers 5.23.0 | 5.2.0.dev0 (ae05b2ae61) | 285 / 27 / 67 | 283 / 29 / 67 | 280 / 32 / 67 | 2026-11-30 |
| transformers 5.23.0 | 5.0.0.dev0 (4d0b6758b9) | 183 / 30 / 67 | 182 / 31 / 67 | 180 / 33 / 67 | 2026-11-30 |
| transformers 5.23.0 | 5.6.0.dev0 (357f414cae) | 267 / 26 / 262 | 267 / 26 / 262 | 262 / 31 / 262 | 2026-11-23 |
| transformers 5.17.0 | 5.6.0.dev0 (357f414cae) | 268 / 25 / 262 | 268 / 25 / 262 | 263 / 30 / 262 | 2026-11-23 |
| transformers 5.8.1 | 5.6.0.dev0 (357f414cae) | 268 / 25 / 262 | 268 / 25 / 262 | 263 / 30 / 262 | 2026-11-23 |
"""


def page() -> str:
    """Return the page that the committed results give."""
    head, *rows = _read(RESULTS)
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    text = TEXT.format(**head["tolerance"], date=head["date"], versions=versions)
    parts = [text, *_table(rows)]
    if PATTERN_RESULTS.exists():
        head, *rows = _read(PATTERN_RESULTS)
        parts += [PATTERNS.format(count=counted(rows), narrow=head["tolerance"]["narrow"]), *_table(rows)]
    return "\n".join(parts) + "\n" + UPSTREAM


def counted(rows: list[dict[str, Any]]) -> str:
    """Say how many patterns are as with stock in each of their set-ups, are refused in some, or differ."""
    patterns = {row["client"] for row in rows}
    different = {row["client"] for row in rows if not row["is_right"]}
    refused = {row["client"] for row in rows if row["verdict"] == "refused"} - different
    equal = len(patterns) - len(different) - len(refused)
    return (
        f"{equal} equal of {len(patterns)}, {len(refused)} refused with a remedy that works, {len(different)} different"
    )


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table, and its notes."""
    setups = list(dict.fromkeys(row["setup"] for row in rows))
    cells = {(row["client"], row["setup"]): row for row in rows}
    notes: dict[str, int] = {}
    lines = [f"| | {' | '.join(setups)} |", f"|---|{'---|' * len(setups)}"]
    for client in dict.fromkeys(row["client"] for row in rows):
        found = (cells.get((client, setup)) for setup in setups)
        lines.append(f"| {client} | {' | '.join('' if row is None else _cell(row, notes) for row in found)} |")
    return [*lines, "", *(f"{number}. {note}" for note, number in notes.items())]


def _cell(row: dict[str, Any], notes: dict[str, int]) -> str:
    """Return a cell, and number its note."""
    note = " ".join([row["detail"], *(f"Warns: {warning}" for warning in row["warnings"])]).strip()
    shown = SHOWN[row["verdict"]] if row["is_right"] else "**fails**"
    then = f", then {row['remedied']}" if row["is_right"] and "remedied" in row else ""
    then += ", whole" if "is_whole" in row else ""
    if not note:
        return shown + then
    note = note.replace("<", "\\<").replace("\n", " ")
    return f"{shown} ({notes.setdefault(note, len(notes) + 1)}){then}"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
