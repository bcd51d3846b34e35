"""Keep out what would disturb a recording, and restore it afterwards.

What a recording changes belongs to the whole process, so one thread records at a time.
"""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from logging import ERROR
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_memopt.binding.handles import set_attribute
from hf_memopt.memory.meta_outputs import HOST_GENERATOR

__all__ = ["RECORDING_LOCK", "collector_paused", "configs_of", "recording", "state_kept"]

RECORDING_LOCK = threading.RLock()
"""Held by ``recording``, which changes process-wide state: garbage collector, warnings, torch's flags."""


@contextmanager
def recording(*modes: Any) -> Iterator[None]:
    """Enter the modes, and keep out what would disturb a recording; everything is restored afterwards.

    The garbage collector is paused: it would free storages at random moments and costs more than the recording. Random
    numbers come from one seed, and no generator of the process is touched. transformers logs errors only. One thread
    records at a time.
    """
    import torch.fx.experimental._config as fx_config

    with collector_paused(), ExitStack() as stack:
        stack.enter_context(_own_generators())
        stack.enter_context(_only_errors())
        stack.enter_context(warnings.catch_warnings())
        # torch's checkpoint enters CUDA's autocast where it recomputes; a build without CUDA warns each time
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda', but CUDA is not available")
        # private, pinned by a test, seen in torch 2.6 to 2.13: how many elements are nonzero cannot be known
        stack.enter_context(fx_config.patch(meta_nonzero_assume_all_nonzero=True))  # type: ignore[attr-defined]
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector inside, one thread at a time.

    A replay makes hundreds of thousands of objects, and each of the collections that they cause looks through all that
    torch and transformers have made.
    """
    with RECORDING_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class _OfThread:
    """Gives one thread an object of its own, and all others the one that they share."""

    def __init__(self, own: Any, shared: Any) -> None:
        self._thread, self._own, self._shared = threading.get_ident(), own, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if threading.get_ident() == self._thread else self._shared, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Draw what this thread draws on the host from generators of its own, each with one seed.

    Models use functions of torch, numpy and Python that draw from one generator for all threads, where a training may
    be drawing at the same time. ``torch.random.default_generator`` is what checkpoints capture and restore; operations
    of torch draw from ``HOST_GENERATOR`` by themselves (``run_on_meta``).
    """
    with ExitStack() as stack:
        for module, own in ((random, random.Random(0)), (np.random, np.random.RandomState(0))):
            for name in (name for name in module.__all__ if hasattr(own, name)):
                one = _OfThread(getattr(own, name), getattr(module, name))
                stack.callback(set_attribute(module, name, one).remove)
        one = _OfThread(HOST_GENERATOR.manual_seed(0), torch.default_generator)
        stack.callback(set_attribute(torch.random, "default_generator", one).remove)
        yield


@contextmanager
def _only_errors() -> Iterator[None]:
    """Suppress transformers' advice, which belongs to the real run."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(max(verbosity, ERROR))
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the configurations of modules, each once."""
    found = (getattr(module, "config", None) for module in modules)
    return list({id(config): config for config in found if config is not None}.values())


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore what the modules of a model refer to, such as a cache that a forward pass fills, at the end.

    A weight on the meta device whose dtype changed inside, as bitsandbytes casts biases, gets its own again.
    """
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    inside = [(held, dict(held)) for _, values in kept for held in values.values() if isinstance(held, dict)]
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]
    try:
        yield
    finally:
        for values, copied in [*kept, *inside]:
            values.clear()
            values.update(copied)
        for parameter, dtype in dtypes:
            if parameter.dtype != dtype and parameter.is_meta:
                parameter.data = torch.empty_like(parameter.data, dtype=dtype)
