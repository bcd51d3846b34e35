"""Samplers side by side: padding, use of the token budget, shapes, cost, randomness, balance over ranks.

Three synthetic length sets and the demo's docstrings go through the samplers of ``batching_peers.py``, each arm in a
process of its own. Then the cost of fetching and collating a batch, and the demo's task trained end to end. Peers that
are not installed are named and left out.

    python benchmarks/batching.py [--quick] [--only lengths|collation|end-to-end] [--seeds N] [--max-train N]

``--quick`` takes 1e4 examples per set and few batches, and appends no row; its figures miss what needs size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from batching_collation import collation_table, measure_collation
from batching_end_to_end import end_to_end_table, measure_end_to_end
from batching_figures import measure_arm
from batching_peers import ARMS, missing
from fresh_process import in_fresh_process
from numpy.typing import NDArray
from results_file import MACHINE, append, installed_versions, markdown, versions_of

from hf_memopt.units import percent

BUDGETS = {"review": 8192, "glue": 8192, "heavy": 16384, "docstrings": 2048}


# ---- Length sets ----------------------------------------------------------------------------------------------------


def synthetic_lengths(name: str, examples: int) -> NDArray[np.int32]:
    """Return the lengths of the set ``review``, ``glue`` or ``heavy``."""
    random = np.random.default_rng(0)
    if name == "review":
        drawn = np.clip(np.exp(random.normal(np.log(60), 0.85, examples)), 4, 512)
    elif name == "glue":
        is_short = random.random(examples) < 0.55
        drawn = np.where(is_short, random.gamma(6, 2.2, examples) + 3, random.normal(58, 16, examples))
        drawn = np.clip(drawn, 4, 256)
    else:
        drawn = np.clip(np.exp(random.normal(np.log(250), 1.15, examples)), 8, 4096)
    return drawn.astype(np.int32)


def docstring_lengths() -> NDArray[np.int32]:
    """Return the tokens of the demo's training texts."""
    from demo_task import train_tokenizer, whole_task

    texts = list(whole_task().train_texts)
    ids = train_tokenizer(texts)(texts, truncation=True)["input_ids"]
    return np.array([len(row) for row in ids], dtype=np.int32)


def length_sets(examples: int) -> dict[str, tuple[NDArray[np.int32], int]]:
    """Return (lengths, budget) by name."""
    sets = {name: synthetic_lengths(name, examples) for name in ("review", "glue", "heavy")}
    sets["docstrings"] = in_fresh_process(docstring_lengths)
    return {name: (lengths, BUDGETS[name]) for name, lengths in sets.items()}


# ---- The samplers ---------------------------------------------------------------------------------------------------


def measure_lengths(examples: int) -> dict[str, Any]:
    """Measure every arm on every length set; return the figures by set and arm."""
    sets = length_sets(examples)
    figures: dict[str, Any] = {name: {"budget": budget, "arms": {}} for name, (_, budget) in sets.items()}
    for arm in ARMS:
        reason = missing(arm)
        print(reason or f"measuring {arm}", flush=True)
        if reason is None:
            for name, found in in_fresh_process(measure_arm, arm, sets).items():
                figures[name]["arms"][arm] = found
    return figures


def lengths_table(row: dict[str, Any]) -> str:
    """Return the samplers side by side."""
    sets = row["figures"]["figures"]
    rows = []
    for arm, review in sets["review"]["arms"].items():
        cells = [_three(of_set["arms"][arm]) for of_set in sets.values()]
        over = sum(of_set["arms"][arm]["batches_over_budget"] for of_set in sets.values())
        held = "-" if review["bytes_per_example"] is None else f"{review['bytes_per_example']:.0f}"
        cells += [str(over), f"{review['lag_one']:+.2f}", f"{review['straggler_ratio']:.3f}"]
        rows.append((arm, *cells, f"{review['microseconds_per_example']:.2f}", held))
    heads = " | ".join(f"{name}<br>budget {of_set['budget']}" for name, of_set in sets.items())
    note = (
        "A cell has padding efficiency / fill / number of shapes:\n\n"
        "- *Fill* is the mean of a batch's padded tokens divided by the budget.\n"
        "- *Over budget* counts batches of all data sets. The last four columns are of `review`.\n"
        "- *Safe* is the largest fixed batch size that keeps to the budget; *mean* uses the budget on average.\n"
        "- TRL packs several texts into a row, so its batches mean something else.\n"
        "- `review`, `glue` and `heavy` are synthetic lengths, `docstrings` those of the demo.\n"
        "- *Lag-1* is the correlation of the mean lengths of consecutive batches: 0 in random order.\n"
        "- *Straggler* is how much the fullest of 8 processes has over their mean, in padded tokens.\n\n"
        f"On {MACHINE}; {versions_of(row, 'transformers', 'lhotse', 'trl')}."
    )
    return markdown(f"| | {heads} | over budget | lag-1 | straggler | µs/example | bytes/example |", rows, note)


def _three(figures: dict[str, Any]) -> str:
    return f"{figures['padding_efficiency']:.3f} / {figures['fill']:.3f} / {figures['shapes']}"


def padding_sentence(row: dict[str, Any]) -> str:
    """Return one sentence on padding."""
    arms = row["figures"]["figures"]["review"]["arms"]
    ours, random = (arms[arm] for arm in ("hf_memopt max_tokens", "random, safe"))
    return (
        f"{percent(ours['padding_efficiency'])} of the tokens in a batch are real, against "
        f"{percent(random['padding_efficiency'])} in random order. Making the batches takes "
        f"{ours['microseconds_per_example']:.2f} µs per example. The lengths are synthetic: 100,000, log-normal, "
        "median 60 tokens, at most 512."
    )


# ---- The program ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the sections, print their tables, append their rows."""
    options = _options()
    few = options.quick
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "lengths": lambda: measure_lengths(10_000 if few else 100_000),
        "collation": lambda: in_fresh_process(measure_collation, *((4, 3) if few else (16, 9))),
        "end-to-end": lambda: measure_end_to_end(options.seeds, options.max_train),
    }
    for name in [options.only] if options.only else runs:
        row = {"figures": {"figures": runs[name]()}, "versions": installed_versions()}
        print(TABLES[name](row))
        if not few:
            case = f"batching_{name.replace('-', '_')}"
            print(f"appended to {append(case, row['figures'])}")


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "lengths": lengths_table,
    "collation": collation_table,
    "end-to-end": end_to_end_table,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sets, few batches, no row appended")
    parser.add_argument("--only", choices=TABLES, default=None)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 11), metavar="N", help="of the trained task")
    parser.add_argument("--max-train", type=int, default=None, metavar="N", help="texts of the trained task")
    return parser.parse_args()


if __name__ == "__main__":
    main()
