"""The models known by name: facts in ``known_models.json``, read without torch or transformers."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from hf_memopt.plain_data import parse_object

__all__ = ["known_models", "known_name"]


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the facts of the well-known models: organisation, model_type, task, source, config, other names."""
    text = resources.files("hf_memopt.memory.models").joinpath("known_models.json").read_text(encoding="utf-8")
    return parse_object(text)


def known_name(text: str) -> str | None:
    """Return the well-known name that ``text`` means."""
    organisation, _, name = text.lower().rpartition("/")
    for known, facts in known_models().items():
        names = (known.lower(), *(other.lower() for other in facts.get("other_names", ())))
        if name in names and organisation in ("", facts["organisation"].lower()):
            return known
    return None
