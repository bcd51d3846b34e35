"""The models known by name: facts in ``known_models.json``, read without torch or transformers."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hf_memopt.plain_data import parse_object

__all__ = ["known_models", "known_name", "name_on_hub"]

_TUNED_WORDS = {"instruct", "it", "chat", "base", "pt", "hf", "sft"}


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the facts of the well-known models: organisation, model_type, task, source, config, other names."""
    text = resources.files("hf_memopt.memory.models").joinpath("known_models.json").read_text(encoding="utf-8")
    return parse_object(text)


def known_name(text: str) -> str | None:
    """Return the well-known name that ``text`` means: itself, or the model that it is a variant of.

    A variant has the same configuration and other weights: ``-Instruct``, ``-it``, ``-Chat``, ``-Base``, ``-v0.2``.

    Examples:
        >>> known_name("Qwen/Qwen2.5-1.5B-Instruct"), known_name("HuggingFaceTB/SmolLM2-360M-Instruct-v0.2")
        ('Qwen2.5-1.5B', 'SmolLM2-360M')
    """
    organisation, _, name = text.lower().rpartition("/")
    first, *rest = name.split("-")
    untuned = "-".join((first, *(word for word in rest if word not in _TUNED_WORDS)))
    unversioned = re.sub(r"-v\d+(\.\d+)?$", "", untuned)
    for spelling in dict.fromkeys((name, untuned, unversioned)):
        for known, facts in known_models().items():
            names = {known.lower(), *(other.lower() for other in facts.get("other_names", ()))}
            if (spelling in names and organisation in ("", facts["organisation"].lower())) or text.lower() in names:
                return known
    return None


def name_on_hub(text: str) -> str:
    """Return what ``from_pretrained`` takes: a folder or an id as it is, a well-known name with its organisation.

    Examples:
        >>> name_on_hub("Qwen2.5-1.5B-Instruct"), name_on_hub("gpt2")
        ('Qwen/Qwen2.5-1.5B-Instruct', 'openai-community/gpt2')
    """
    known = known_name(text)
    if known is None or "/" in text or Path(text).is_dir():
        return text
    facts = known_models()[known]
    is_tuned = bool(_TUNED_WORDS & {*text.lower().split("-")} - {*known.lower().split("-")})
    spelled = {name.lower(): name for name in facts.get("other_names", ())}.get(text.lower(), text)
    return f"{facts['organisation']}/{spelled if is_tuned else known}"
