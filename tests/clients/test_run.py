"""Every client as ``hf-memopt run`` runs it, in this process: as with stock, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_clients import CLIENTS
from transformers import Trainer

from client import Client, train_and_evaluate
from comparison import _run, _unchanged, compared
from hf_memopt.prediction.recipes.running.script import Running


@contextmanager
def as_command() -> Iterator[Running]:
    stock, running = (
        Trainer.train,
        Running("train.py", {"gpu": None, "apply": None, "allow": (), "repair": None, "is_module": True}),
    )
    running.change(Trainer)
    try:
        yield running
    finally:
        Trainer.train = stock


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.ranks == 1])
def test_a_client_trains_as_with_stock(name: str) -> None:
    client: Client = CLIENTS[name]
    stock = _run(client, _unchanged, None)
    with as_command() as running:
        ours = _run(client, _unchanged, None)
    assert compared(ours.values, stock.values, is_cut=False).verdict == "same"
    assert running.has_trained or client.drive is not train_and_evaluate
