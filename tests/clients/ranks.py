"""Try a client in every set-up in this process of several: ``ranks.py FOLDER CLIENT``, once for each process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import plain_clients
from client import SETUPS
from comparison import outcome_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    client = plain_clients.CLIENTS[sys.argv[2]]
    found = {setup: outcome_of(client, setup) for setup in SETUPS}
    Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
