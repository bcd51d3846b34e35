"""What ``batching.py`` must show, checked on its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batching_peers import ARMS

Report = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One line of what must be shown: the claim, the figures, and whether they reach it."""

    claim: str
    figures: str
    reached: bool


OURS, BOUNDED = "hf_memopt max_tokens", "hf_memopt boundaries=auto"


def check_lengths(report: Report) -> list[Check]:
    """Return the checks on the length sets."""
    wanted = {"review": 0.95, "glue": report["glue"]["ceiling"] - 0.003, "heavy": 0.96}
    arms = {name: of_set["arms"] for name, of_set in report.items()}
    over = {f"{name}, {arm}": arms[name][arm]["batches_over_budget"] for name in arms for arm in (OURS, BOUNDED)}
    checks = [Check("no batch over the budget", f"{sum(over.values())} batches", not any(over.values()))]
    for name, least in wanted.items():
        figures = arms[name][BOUNDED]
        efficiency, shapes = figures["padding_efficiency"], figures["shapes"]
        text = f"{efficiency:.4f} with {shapes} shapes"
        claim = f"{name}: efficiency >= {least:.4f} with at most 64 shapes ({BOUNDED})"
        checks.append(Check(claim, text, efficiency >= least and shapes <= 64))
    for arm in (OURS, BOUNDED):
        fills = {name: arms[name][arm]["fill"] for name in wanted}
        text = ", ".join(f"{name} {fill:.4f}" for name, fill in fills.items())
        checks.append(Check(f"fill >= 0.96 ({arm})", text, min(fills.values()) >= 0.96))
    for name, of_set in arms.items():
        better = [f"{peer} than {arm}" for arm in (OURS, BOUNDED) for peer in peers_in_front(of_set, arm)]
        claim = f"{name}: no peer within the budget better on efficiency, fill and shapes at once"
        checks.append(Check(claim, "; ".join(better) or "none", not better))
    lags = {name: [arms[name][arm]["lag_one"] for arm in (OURS, BOUNDED)] for name in arms}
    text = ", ".join(f"{name} {own:+.3f} {bounded:+.3f}" for name, (own, bounded) in lags.items())
    most = max(abs(lag) for name in wanted for lag in lags[name])
    checks.append(Check("lag-1 within +-0.05 on the three synthetic sets", text, most <= 0.05))
    return checks


def peers_in_front(arms: dict[str, dict[str, Any]], arm: str) -> list[str]:
    """Return the peers that keep to the budget and beat ``arm`` on efficiency, fill and shapes at once."""
    own = arms[arm]
    return [
        name
        for name, figures in arms.items()
        if not (ARMS[name].ours or ARMS[name].packs or figures["batches_over_budget"])
        and figures["padding_efficiency"] > own["padding_efficiency"]
        and figures["fill"] > own["fill"]
        and figures["shapes"] < own["shapes"]
    ]


def check_scale(report: Report) -> list[Check]:
    """Return the checks on the large sets."""
    first = next(iter(report.values()))
    limits = (
        (f"lengths + plan < 0.2 s at {first['examples']:.0e} examples", "lengths_and_plan_seconds", 0.2),
        ("the same with boundaries=auto", "lengths_and_plan_bounded_seconds", 0.2),
        (f"reshuffle < 0.5 s at {first['reshuffled_examples']:.0e} examples", "reshuffle_seconds", 0.5),
        ("<= 10 bytes per example", "bytes_per_example", 10.0),
        (f"straggler <= 1.01 at {first['examples']:.0e} examples, 8 ranks", "straggler_ratio", 1.01),
    )
    checks = []
    for claim, key, most in limits:
        values = {name: figures[key] for name, figures in report.items()}
        text = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        checks.append(Check(claim, text, max(values.values()) <= most))
    return checks


def check_collation(report: Report) -> list[Check]:
    """Return the checks on fetching and collating."""
    checks = [
        Check(
            f"fetch + collate {case}: at least {least}x",
            f"{report[case]['ratio']:.0f}x",
            report[case]["ratio"] >= least,
        )
        for case, least in (("128x512", 30), ("32x64", 8))
    ]
    differ = [case for case, figures in report.items() if not figures["same_tensors"]]
    return [*checks, Check("the same tensors as stock", ", ".join(differ) or "all cases", not differ)]


def check_end_to_end(report: Report) -> list[Check]:
    """Return the checks on the trained task; the accuracy of a token budget is shown, not promised."""
    arms, checks = report["arms"], []
    for arm in ("batch_size", "max_tokens"):
        for other in ("random", "group_by_length"):
            ratio = arms[other]["seconds"] / arms[arm]["seconds"]
            checks.append(Check(f"{arm}= faster than stock {other}", f"{ratio:.2f}x as fast", ratio > 1))
    interval = arms["batch_size"]["accuracy_interval"]
    if interval is not None:
        mean, low, high = interval
        text = f"{mean:+.3f}, 95 % interval [{low:+.3f}, {high:+.3f}] over {report['seeds']} seeds"
        checks.append(Check("batch_size= as accurate as stock random within noise", text, high >= 0))
    return checks


CHECKS: dict[str, Callable[[Report], list[Check]]] = {
    "lengths": check_lengths,
    "scale": check_scale,
    "collation": check_collation,
    "end-to-end": check_end_to_end,
}
