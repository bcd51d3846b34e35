"""Find the configuration of a model by name: in a folder, among the well-known names, on the hub.

Limitations: Python code that a repository brings along is never run (``trust_remote_code=False``).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import transformers
from transformers import AutoConfig, PretrainedConfig

from hf_memopt.errors import did_you_mean
from hf_memopt.memory.models.known import known_models, known_name
from hf_memopt.memory.settings import NotEstimableError

__all__ = ["one_error", "read_config"]

_PATIENCE_SECONDS = 3.0
_MOST = {"layer": 10_000, "depth": 10_000, "expert": 10_000, "num_labels": 1_000_000}
"""The largest accepted value of entries by which transformers loops, by a part of the entry's name."""


def read_config(text: str, task: str | None) -> tuple[str, PretrainedConfig, str | None]:
    """Return a display name, the configuration, and the task where the caller or the known models give it.

    A folder has priority over a well-known name of the same spelling, as in transformers.
    """
    folder = Path(text)
    try:
        has_config, is_folder = (folder / "config.json").is_file(), folder.is_dir()
    except OSError as error:  # no permission, a name that is too long
        raise ValueError(
            f"model={text!r} cannot be looked up ({error.strerror}); expected a name, or a readable folder. "
            "Pass model='bert-base-uncased'"
        ) from error
    if has_config:
        return folder.resolve().name, _parse_config(folder, text), task
    known = known_name(text)
    if known is not None:
        facts = known_models()[known]
        return known, AutoConfig.for_model(facts["model_type"], **facts["config"]), task or facts["task"]
    if is_folder:
        raise ValueError(
            f"model={text!r} is a folder without config.json; expected one that save_pretrained has written. "
            f"Call: model.save_pretrained({text!r})"
        )
    return text, _parse_config(_download_config(text).parent, text), task


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


def _download_config(text: str) -> Path:
    """Return the path of a repository's ``config.json`` in the hub's local cache, downloaded if need be."""
    from huggingface_hub import errors, hf_hub_download, is_offline_mode

    cause: Exception
    try:
        return Path(hf_hub_download(text, "config.json", local_files_only=not _hub_answers()))
    except errors.HFValidationError as error:
        cause, reason = error, "nor can it be an id on the hub"
    except errors.LocalEntryNotFoundError as error:
        state = "offline (HF_HUB_OFFLINE is set)" if is_offline_mode() else "unreachable"
        cause, reason = error, f"and the hub is {state} and its local cache has nothing of that name"
    except errors.GatedRepoError as error:
        cause, reason = error, "and on the hub it is gated: accept its licence there and log in with hf auth login"
    except errors.RepositoryNotFoundError as error:
        cause, reason = error, "and the hub has no such repository, or you have no access to it"
    except errors.EntryNotFoundError as error:
        cause, reason = error, "and its repository on the hub has no config.json"
    except errors.HfHubHTTPError as error:
        cause, reason = error, f"and the hub failed ({str(error).splitlines()[0]})"
    names = list(known_models())
    raise ValueError(
        f"model={text!r} is neither a well-known name nor a folder, {reason}; expected a module, a configuration, a "
        "folder with config.json, an id on the hub, or one of the well-known names that "
        f"hf-memopt estimate --list-models shows.{did_you_mean(text, names)} Pass, for example, "
        "model='bert-base-uncased'"
    ) from cause


def _hub_answers() -> bool:
    """Return whether the hub accepts connections; its client would retry for half a minute and log every attempt.

    Behind a proxy only the client can find out, so the answer is True.
    """
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        return False
    if getproxies():
        return True
    endpoint = urlsplit(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        with socket.create_connection((endpoint.hostname or "", port), timeout=_PATIENCE_SECONDS):
            return True
    except OSError:
        return False
