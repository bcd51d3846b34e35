"""Every pattern in its set-ups: as with stock, or refused with a message whose remedy makes it so."""

from __future__ import annotations

from collections.abc import Callable

import derivative_patterns
import pytest
import scale_patterns

import adversarial_patterns
import answer_patterns
import batch_patterns
import collator_patterns
import contrastive_patterns
import evaluation_patterns
import form_patterns
import image_patterns
import language_patterns
import loss_patterns
import model_patterns
import sequence_patterns
import state_patterns
import step_patterns
import teacher_patterns
from pattern_outcomes import found_in, is_right, repeated, rounded

SUBJECTS = (
    loss_patterns,
    scale_patterns,
    batch_patterns,
    contrastive_patterns,
    adversarial_patterns,
    derivative_patterns,
    step_patterns,
    state_patterns,
    teacher_patterns,
    model_patterns,
    language_patterns,
    answer_patterns,
    sequence_patterns,
    image_patterns,
    collator_patterns,
    form_patterns,
    evaluation_patterns,
)
PATTERNS = {name: pattern for subject in SUBJECTS for name, pattern in subject.PATTERNS.items()}
CELLS = [(name, setup) for name, pattern in PATTERNS.items() for setup in pattern.setups]


def test_no_two_patterns_have_one_name() -> None:
    assert len(PATTERNS) == sum(len(subject.PATTERNS) for subject in SUBJECTS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PATTERNS])
def test_stock_repeats_itself_and_bears_a_rounding(name: str) -> None:
    assert repeated(PATTERNS[name]).verdict == "same"
    assert rounded(PATTERNS[name]).verdict in ("same", "equal")


@pytest.mark.parametrize(
    ("name", "setup"), [pytest.param(*cell, marks=pytest.mark.xdist_group(cell[0])) for cell in CELLS]
)
def test_a_pattern_trains_as_with_stock(name: str, setup: str, record_outcome: Callable[..., None]) -> None:
    found = found_in(PATTERNS[name], setup)
    fine = is_right(PATTERNS[name], setup, found)
    more = {} if found.remedied is None else {"remedied": found.remedied.verdict}
    if found.is_whole:
        more["is_whole"] = True
    place = CELLS.index((name, setup))
    record_outcome(place, name, setup, found.outcome, is_right=fine, table="pattern_results", **more)
    assert fine, f"found {found}"
