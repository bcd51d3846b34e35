"""Read the configuration of a model by its name, as transformers understands it.

Limitations: Python code that a repository brings along is never run (``trust_remote_code=False``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

from hf_memopt.memory.models.config_files import find_config, known_models, known_name
from hf_memopt.memory.settings import NotEstimableError

__all__ = ["one_error", "read_config"]

_MOST = {"layer": 10_000, "depth": 10_000, "expert": 10_000, "num_labels": 1_000_000}
"""The largest accepted value of entries by which transformers loops, by a part of the entry's name."""


def read_config(text: str, task: str | None) -> tuple[str, PretrainedConfig, str | None]:
    """Return a display name, the configuration, and the task where the caller or the known models give it."""
    folder = find_config(text)
    if folder is not None:
        name = folder.resolve().name if Path(text).is_dir() else text
        return name, _parse_config(folder, text), task
    known = str(known_name(text))
    facts = known_models()[known]
    return known, AutoConfig.for_model(facts["model_type"], **facts["config"]), task or facts["task"]


def _parse_config(folder: Path, text: str) -> PretrainedConfig:
    what = f"model={text!r} has a config.json that transformers {transformers.__version__} does not understand"
    with one_error(what):
        json.loads((folder / "config.json").read_text(encoding="utf-8"), object_hook=_check_counts)
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config


def _check_counts(entries: dict[str, Any]) -> None:
    """Refuse counts that would keep transformers busy for hours, and negative ones; json calls this for each object."""
    for name, value in entries.items():
        most = next((most for part, most in _MOST.items() if part in name), None)
        counts = [count for count in (value if isinstance(value, list) else [value]) if isinstance(count, int)]
        if most is not None and max(counts, default=0) > most:
            raise ValueError(f"{name}={value!r} is more than any model has, at most {most:,}")
        if name.startswith(("num_", "n_")) and min(counts, default=0) < 0:
            raise ValueError(f"{name}={value!r} is negative")


@contextmanager
def one_error(what: str) -> Iterator[None]:
    """Turn any error that transformers raises for an unsuitable configuration into one ``ValueError``."""
    try:
        yield
    except NotEstimableError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{what} without Python code of its own, and no such code is run; expected a model type of "
                "transformers. Load it yourself and pass the module: estimate(model, ...)"
            ) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"{what} ({reason}); expected a configuration that transformers can build. Correct it, or pass the module"
        ) from error
