"""Every client in every set-up: as with stock, bit for bit, or refused with a message that says why."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import adapter_clients
import embedding_clients
import head_clients
import plain_clients
import ranks
import setting_clients
import signal_clients
import trl_clients
from client import CUT, PASSED, SETUPS, WHOLE, Client
from comparison import Outcome, outcome_of
from two_ranks import run_pair

CLIENTS = {
    **plain_clients.CLIENTS,
    **head_clients.CLIENTS,
    **setting_clients.CLIENTS,
    **adapter_clients.CLIENTS,
    **trl_clients.CLIENTS,
    **embedding_clients.CLIENTS,
    **signal_clients.CLIENTS,
}
CELLS = [(name, setup) for name in CLIENTS for setup in SETUPS]


def expected(client: Client, setup: str) -> tuple[Outcome, ...]:
    """Return the outcomes that are right."""
    alone = ("micro-batching", "overflow", "evaluation guard") if setup == PASSED else ()
    message = next((client.refuses[name] for name in (setup, *alone) if name in client.refuses), "")
    if message:
        return (Outcome("refused", message),)
    if setup in client.differs and client.correct is None:
        return (Outcome("differs"),)
    refusal = Outcome("refused", client.cannot_cut)
    if setup == CUT:
        return (refusal,) if client.cannot_cut else (Outcome("equal"), Outcome("same"))
    if setup in WHOLE and client.cannot_cut:
        return Outcome("same"), refusal
    return (Outcome("same"),)


@functools.lru_cache(maxsize=1)
def outcomes_of_ranks(name: str) -> dict[str, list[Outcome]]:
    """Try a client in two processes; return what came of it in each, by set-up."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_pair(Path(folder), ranks.__file__, folder, name)
    return {
        setup: [Outcome(of_rank[setup][0], of_rank[setup][1], tuple(of_rank[setup][2])) for of_rank in found]
        for setup in SETUPS
    }


@pytest.mark.parametrize(
    ("name", "setup"), [pytest.param(*cell, marks=pytest.mark.xdist_group(cell[0])) for cell in CELLS]
)
def test_a_client_trains_as_with_stock(name: str, setup: str, record_outcome: Callable[..., None]) -> None:
    client, place = CLIENTS[name], CELLS.index((name, setup))
    if setup == "bucketed view" and client.no_view:
        record_outcome(place, name, setup, Outcome("not applicable", client.no_view), is_right=True)
        return
    found = [outcome_of(client, setup)] if client.ranks == 1 else outcomes_of_ranks(name)[setup]
    right = expected(client, setup)
    wrong = [outcome for outcome in found if not any(_is_as(outcome, one) for one in right)]
    shown = (wrong or found)[0]
    if not wrong and setup in client.differs:
        shown = Outcome("differs by design", client.differs[setup])
    record_outcome(place, name, setup, shown, is_right=not wrong)
    assert not wrong, f"expected {right[0]}, found {wrong[0]}"


def _is_as(outcome: Outcome, right: Outcome) -> bool:
    """Return whether an outcome is right; what differs by design may do so in any figures."""
    return outcome == right or (outcome.verdict, outcome.warnings) == ("differs", ()) == (right.verdict, right.warnings)
