"""The rows of a batch in parts: losses and gradients of the whole batch, and a refusal where they would not be."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import row_models
import tiny
from hf_memopt.techniques.microbatching.backbones import Backbones, CutStep
from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback
from hf_memopt.techniques.microbatching.rows_in_parts import Size
from row_models import ARCHITECTURES, ROWS, STEPS, TRAINED, Batch
from two_ranks import run_pair

PART = 3  # of 7 rows: the last part has one
FLOAT64 = 1e-12  # rows added in another order


class Outcome(NamedTuple):
    """What a step gives."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    seen: CutStep
    model: nn.Module


def in_parts(rows: int, names: Sequence[str] = ()) -> Backbones:
    return Backbones(names, Size(lambda columns: rows, lambda *failed: pytest.fail(f"out of memory: {failed}")))


def run(
    step: Callable[[nn.Module], torch.Tensor], model: nn.Module, rows: int = PART, names: Sequence[str] = ()
) -> Outcome:
    """Run a step on a copy of a model, with the rows in parts."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    with in_parts(rows, names).cut(model) as seen:
        loss = step(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), gradients, seen, model)


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of gradients, in parts of the largest gradient."""
    assert found.keys() == expected.keys() != set()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((found[name] - gradient).abs().max()) for name, gradient in expected.items()) / largest


def assert_exact(
    step: Callable[[nn.Module], torch.Tensor],
    model: nn.Module,
    tolerance: float = FLOAT64,
    names: Sequence[str] = (),
) -> Outcome:
    """Hold a step in parts against the same step uncut."""
    whole, parts = run(step, model, 99, names), run(step, model, PART, names)
    assert parts.seen.cut > 0, parts.seen.reasons
    assert float((whole.loss - parts.loss).abs()) <= tolerance * max(1.0, float(whole.loss.abs()))
    assert worst(parts.gradients, whole.gradients) <= tolerance
    return parts


# ---- Oracle ---------------------------------------------------------------------------------------------------------

QUICK = ("bert", "llama-tied", "mixtral", "mamba", "t5", "vit", "wav2vec2", "clip")
QUICK_STEPS = ("own", "supcon", "attack")


def _marks(name: str, step: str) -> list[Any]:
    return [] if name in QUICK and step in QUICK_STEPS else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "step"),
    [pytest.param(name, step, marks=_marks(name, step)) for name in ARCHITECTURES for step in STEPS],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(name: str, step: str) -> None:
    architecture = ARCHITECTURES[name]
    batch = architecture.batch(ROWS)
    assert_exact(lambda model: STEPS[step](model, batch), row_models.build(name), architecture.tolerance)


@pytest.mark.parametrize(("name", "loss"), TRAINED)
def test_accumulation_under_the_trainer(name: str, loss: str, tmp_path: Path) -> None:
    whole = row_models.train(name, loss, tmp_path)
    callback = MicrobatchCallback(max_examples=2)
    parts = row_models.train(name, loss, tmp_path, callback)
    assert callback.tally.cut_steps == 2
    assert tiny.largest_difference(whole.model, parts.model) <= FLOAT64


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_pair(folder, row_models.__file__, str(folder), timeout_seconds=120)


@pytest.mark.parametrize(("name", "loss"), TRAINED)
def test_accumulation_in_two_processes(name: str, loss: str, ranks: list[dict[str, Any]]) -> None:
    for difference, cut_steps in (found[f"{name}: {loss}"] for found in ranks):
        assert difference <= FLOAT64
        assert cut_steps == 2
