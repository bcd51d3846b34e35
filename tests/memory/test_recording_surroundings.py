"""Around a recording: random numbers, other threads, logs and torch's settings are as if there had been none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx.experimental._config as fx_config
import transformers
from recorded import StorageTracker, recording
from torch import nn
from transformers.utils import logging

from hf_memopt import estimate

OPERATIONS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.rand(4),
    lambda: torch.rand([]),
    lambda: torch.randint(2, 9, (4,)),
    lambda: torch.randint(9, (4,)),
    lambda: torch.randperm(9),
    lambda: torch.rand_like(torch.zeros(4)),
    lambda: torch.zeros(4).uniform_(),
    lambda: torch.normal(torch.zeros(4), 1.0),
    lambda: torch.bernoulli(torch.full((16,), 0.5)),
    lambda: torch.multinomial(torch.ones(16), 4),
    lambda: nn.functional.dropout(torch.ones(16)),
    lambda: torch.native_dropout(torch.ones(16), 0.5, True)[0],
    lambda: torch.tensor([random.random(), random.gauss(0, 1), *random.sample(range(99), 4)]),
    lambda: torch.tensor([np.random.rand(), np.random.choice(99), *np.random.permutation(9)]),
    lambda: torch.tensor(np.random.seed(7) or np.random.rand()),
    lambda: torch.tensor(random.seed(7) or random.random()),
    lambda: nn.Linear(4, 4).weight.detach(),
]


OF_PYTHON, OF_NUMPY = random.getstate, np.random.get_state  # not those of a recording


def state_of_process() -> list[Any]:
    _, numbers, *rest = OF_NUMPY()
    return [torch.default_generator.get_state().tolist(), OF_PYTHON(), numbers.tolist(), rest]


@pytest.mark.parametrize("draw", OPERATIONS)
def test_a_recording_draws_the_same_and_touches_no_generator(draw: Callable[[], torch.Tensor]) -> None:
    found = []
    for _ in range(2):
        before = state_of_process()
        with recording(StorageTracker()):
            found.append([draw(), draw()])
            assert before == state_of_process()
        assert before == state_of_process()
        torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60, "pad_token_id": 0}
BIG_BIRD = transformers.BigBirdConfig(  # draws the blocks that it attends to
    **TINY, intermediate_size=8, attention_type="block_sparse", block_size=4, num_random_blocks=1
)
OPT = transformers.OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=8, layerdrop=0.5)  # draws which layers it drops


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


def test_nonzero_on_meta_needs_the_setting_and_counts_every_element() -> None:
    """``meta_nonzero_assume_all_nonzero`` of the private ``torch.fx.experimental._config``."""
    ones = torch.ones(2, 3, device="meta")
    with pytest.raises(NotImplementedError):
        ones.nonzero()
    with fx_config.patch(meta_nonzero_assume_all_nonzero=True):
        assert ones.nonzero().shape == (6, 2)
    assert not fx_config.meta_nonzero_assume_all_nonzero
