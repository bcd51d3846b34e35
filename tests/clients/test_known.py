"""How many clients have a loss that is known without asking: their batches are cut into whole micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import RESULTS
from test_clients import CLIENTS

from client import CUT
from hf_memopt.training.binding.losses import KnownLoss, known_loss

PROBED = 76
"""The clients whose batches version 0.3.0 cut, after a probe of their loss; all the others were refused."""
LEAST = 0.9
"""Of those, the share that is known; what is not is cut row by row in the model alone, and still equal."""


def test_the_losses_of_most_clients_that_are_cut_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in RESULTS["results"].read_text(encoding="utf-8").splitlines()[1:]]
    names = [row["client"] for row in rows if (row["setup"], row["verdict"]) == (CUT, "equal")]
    unknown = {}
    for name in names:
        trainer = CLIENTS[name].build(tmp_path, lambda dataset: dataset)
        if trainer.model is None:  # until hyperparameters are searched
            trainer.model = trainer.call_model_init()
        found = known_loss(trainer, None)
        if not isinstance(found, KnownLoss):
            unknown[name] = found
    with capsys.disabled():
        print(f"\nknown: {len(names) - len(unknown)} of {len(names)}")
        print(*(f"    {name}: {reason}" for name, reason in unknown.items()), sep="\n")
    assert len(names) - len(unknown) >= LEAST * PROBED
