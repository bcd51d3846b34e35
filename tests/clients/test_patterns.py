"""Every pattern in its set-ups: as with stock, or refused with a message whose remedy makes it so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
from pattern import is_right, outcomes_of

SUBJECTS = (
    loss_patterns,
    batch_patterns,
    contrastive_patterns,
    adversarial_patterns,
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


@pytest.mark.parametrize(
    ("name", "setup"), [pytest.param(*cell, marks=pytest.mark.xdist_group(cell[0])) for cell in CELLS]
)
def test_a_pattern_trains_as_with_stock(name: str, setup: str, record_outcome: Callable[..., None]) -> None:
    found, remedied = outcomes_of(PATTERNS[name], setup)
    fine = is_right(PATTERNS[name], setup, found, remedied)
    then = {} if remedied is None else {"remedied": remedied.verdict}
    place = CELLS.index((name, setup))
    record_outcome(place, name, setup, found, is_right=fine, table="pattern_results", **then)
    assert fine, f"found {found}, and by its remedy {remedied}"
