"""Around a recording: random numbers, other threads, logs and torch's settings are as if there had been none."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
import transformers
from recorded import recording
from transformers.utils import logging

from hf_memopt import estimate

TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60, "pad_token_id": 0}
BIG_BIRD = transformers.BigBirdConfig(  # draws the blocks that it attends to
    **TINY, intermediate_size=8, attention_type="block_sparse", block_size=4, num_random_blocks=1
)
OPT = transformers.OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=8, layerdrop=0.5)  # draws which layers it drops


@pytest.mark.slow
def test_a_training_in_another_thread_draws_what_it_draws_alone() -> None:
    """Models that draw on the host (a dropped layer, masked time steps) and checkpoints, while another thread draws."""
    drawn: list[tuple[float, float, float]] = []
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))

    generators = torch.Generator().manual_seed(5), random.Random(5), np.random.RandomState(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for config in (BIG_BIRD, OPT):
            for checkpointing in (False, {"use_reentrant": True}, {"use_reentrant": False}):
                estimate(config, batch_size=2, seq_len=64, checkpointing=checkpointing)
    finally:
        stop.set()
        thread.join()
        torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])
    of_torch, of_python, of_numpy = generators
    expected = [(torch.rand((), generator=of_torch).item(), of_python.random(), of_numpy.rand()) for _ in drawn]
    assert drawn == expected
    assert len(drawn) > 100


@pytest.mark.parametrize("verbosity", [logging.INFO, logging.CRITICAL])
def test_transformers_logs_errors_only_within(verbosity: int) -> None:
    was = logging.get_verbosity()
    logging.set_verbosity(verbosity)
    try:
        with recording():
            within = logging.get_verbosity()
        after = logging.get_verbosity()
    finally:
        logging.set_verbosity(was)
    assert (within, after) == (max(verbosity, logging.ERROR), verbosity)
