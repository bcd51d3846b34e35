"""Wrong values in parameters of the public interface, each with its whole message.

``tests/hard/test_malformed_calls.py`` puts wrong values into every parameter of every call.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers
from public_calls import llama
from tables import refusals

import hf_memopt
import tiny


class Unprintable:
    """A user's object whose ``__repr__`` fails, as that of a half-built module does."""

    def __repr__(self) -> str:
        raise RuntimeError("no text for this object")


def test_whole_messages() -> None:
    named = {"Unprintable": Unprintable, "hf_memopt": hf_memopt, "llama": llama, "np": np, "tiny": tiny, "torch": torch}
    assert refusals(__file__, **named, transformers=transformers) == 11
