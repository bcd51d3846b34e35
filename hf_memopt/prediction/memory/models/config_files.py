"""Find the ``config.json`` of a model by name, and check the names of tasks, without importing torch or transformers.

A name is a folder, a well-known name (``known_models.json``) or an id on the hub, in this order; the hub is asked last.
The command line looks a name up here before it imports anything heavy, and ``loading`` builds the model.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hf_memopt.errors import did_you_mean
from hf_memopt.hub import hub_answers, task_by_name
from hf_memopt.plain_data import parse_object
from hf_memopt.training.binding.model import HEADS

TASKS = tuple(HEADS)
"""The purposes of a head, as ``task`` names them."""


def checked_task(task: str | None) -> str | None:
    """Return the word of ``TASKS`` for a task or for the hub's name of it, None for None; raise for others."""
    return None if task is None else task_by_name(task, TASKS, "sequence-classification")


def find_config(text: str) -> Path | None:
    """Return the folder that holds the ``config.json`` of a model; None for a well-known name, whose facts ship here.

    A folder has priority over a well-known name of the same spelling, as in transformers. The configuration of an id on
    the hub is downloaded into the hub's cache if it is not there yet.

    Raises:
        ValueError: nothing has that name, or it cannot be read; the message says whether the hub could be asked.
    """
    folder = Path(text)
    if (folder / "config.json").is_file():
        return folder
    _check_kind(text, folder)
    if known_name(text) is not None:
        return None
    if folder.is_dir():
        raise ValueError(
            f"model={text!r} is a folder without config.json; expected one that save_pretrained has written. "
            "Pass the folder of a model"
        )
    return _download_config(text).parent


def _download_config(text: str) -> Path:
    """Return the path of a repository's ``config.json`` in the hub's local cache, downloaded if need be."""
    from huggingface_hub import errors, hf_hub_download, is_offline_mode

    cause: Exception
    try:
        return Path(hf_hub_download(text, "config.json", local_files_only=not hub_answers()))
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
    hint = _of_other_weights(text) or did_you_mean(text.rpartition("/")[2], known_models())
    raise ValueError(
        f"model={text!r} is neither a well-known name nor a folder, {reason}; expected a folder with config.json, an "
        f"id on the hub or a well-known name.{hint} "
        "List the well-known names: hf-memopt estimate --list-models"
    ) from cause


_OTHER_WEIGHTS = {
    r"([-.]I?Q\d\w*)?[-.]gguf$": "GGUF files are for llama.cpp, and the Trainer does not train them",
    r"(-unsloth)?-bnb-4bit$": "It has the original's weights in 4 bits, which QLoRA makes as it loads them",
    r"-(awq|gptq)(-int\d)?$": "It has the original's weights, quantised to run",
    r"-(mlx|\dbit|fp8)$": "It has the original's weights, converted to run",
}
"""Endings of the names of converted models, and what these are."""


def _of_other_weights(text: str) -> str:
    """Return what a converted model is, with the name of the original; "" for other names."""
    name = Path(text).name
    originals = ((re.sub(ending, "", name, flags=re.IGNORECASE), what) for ending, what in _OTHER_WEIGHTS.items())
    found = next(((original, what) for original, what in originals if original not in ("", name)), None)
    return "" if found is None else f" {found[1]}. Pass the original: model={found[0]!r}."


def _check_kind(text: str, folder: Path) -> None:
    """Refuse what cannot be the name of a model: a script, data, a path where nothing is."""
    kinds = {
        ".py": ("a script", f"hf-memopt rehearse --gpu T4 {text}, or on its GPU: hf-memopt run {text}"),
        **dict.fromkeys((".jsonl", ".csv", ".parquet"), ("a data file", f"hf-memopt lengths {text}")),
    }
    if folder.suffix in kinds:
        what, command = kinds[folder.suffix]
        raise ValueError(
            f"model={text!r} is {what}; expected a model: a well-known name, a folder with config.json or an id on the "
            f"hub. Call: {command}"
        )
    if folder.suffix == ".gguf" and folder.is_file():
        raise ValueError(f"model={text!r} is a file of weights; expected a model.{_of_other_weights(text)}")
    if text.startswith((".", "/", "~")) and not folder.exists():
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ValueError(
            f"model={text!r} does not exist; expected a folder with config.json, as save_pretrained writes it."
            f"{did_you_mean(folder.name, siblings)} Check the path"
        )


_TUNED_WORDS = {"instruct", "it", "chat", "base", "pt", "hf", "sft"}


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the facts of well-known models: organisation, model_type, task, source, config, other names, a note.

    ``dtype`` is that of the published weights where most of the type have another one.
    ``picture_size`` is that of the image processor in the same repository, where the configuration has another one.
    """
    text = (
        resources.files("hf_memopt.prediction.memory.models").joinpath("known_models.json").read_text(encoding="utf-8")
    )
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
