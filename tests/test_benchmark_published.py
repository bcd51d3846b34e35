"""The benchmark of published measurements: its files, its table of behaviours, and the rows that are far off."""

from __future__ import annotations

from pathlib import Path

import published
import published_behaviours as behaviours
import published_cases as cases

# ---- The files


def test_the_given_files_are_read() -> None:
    found = cases.read_cases(*cases.FILES)
    assert len(found) == 18 + 47 + 128
    assert {case.loop for case in found} == {"Trainer", "SFTTrainer", "manual", "function"}
    assert [case.gpus for case in found].count(2) == 25 + 4
    assert all((case.measured_bytes or 10**10) > 10**9 and case.source for case in found)
    assert all(case.measured_bytes or case.step_seconds or case.fits is not None for case in found)
    for case in found:
        if case.quantization in (None, "nf4"):
            assert cases.configuration_of(case)


# ---- Behaviours


def test_every_behaviour_has_a_source_and_versions() -> None:
    for behaviour in behaviours.BEHAVIOURS:
        assert behaviour.source.startswith("github:"), behaviour.name
        assert set(behaviour.loops) <= set(behaviours.LOOPS)
    found = [behaviour.name for behaviour in behaviours.BEHAVIOURS]
    assert len(set(found)) == len(found)


# ---- The run


def test_rows_of_reserved_bytes_that_are_far_off_are_named_and_explained() -> None:
    row = {"what": "reserved", "measured_bytes": 100 * 2**20}
    rows = [{**row, "case": str(found), "matched_bytes": found * 2**20} for found in (100, 91, 107, 109)]
    assert published.far_off([*rows, {**rows[1], "what": "allocated"}]) == (
        "Reserved bytes are off by more than 8 % in `91` by -9.0 % (-9 MiB) and `109` by +9.0 % (+9 MiB)."
    )
    assert published.far_off(rows[:1]) == "Reserved bytes are off by more than 8 % in none."
    page = (Path(__file__).parents[1] / "docs/accuracy.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("Reserved bytes are off")]
    assert line.split("`")[1::2] == [  # those whose causes follow
        "fitcheck/TinyLlama-1.1B/eager/nf4/r32/2x512/reserved",
        "fitcheck/SmolLM2-1.7B/eager/nf4/r32/1x2048/reserved",
    ]
