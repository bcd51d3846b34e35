"""Find the ``config.json`` of a model by name, and check the names of tasks, without importing torch or transformers.

A name is a folder, a well-known name (``known``) or an id on the hub, in this order; the hub is asked last. The command
line looks a name up here before it imports anything heavy, and ``loading`` builds the model.
"""

from __future__ import annotations

from pathlib import Path

from hf_memopt.errors import did_you_mean, nearest
from hf_memopt.hub import hub_answers
from hf_memopt.memory.models.known import known_models, known_name

__all__ = ["TASKS", "check_task", "find_config"]

TASKS = (
    "speech-seq2seq",
    "seq2seq",
    "causal-lm",
    "masked-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "image-classification",
)
"""The purposes of a head, as ``task`` names them."""


def check_task(task: str | None) -> None:
    """Raise ValueError if ``task`` is neither None nor one of ``TASKS``."""
    if task is not None and task not in TASKS:
        raise ValueError(
            f"task={task!r} is unknown; expected one of {', '.join(map(repr, TASKS))}.{did_you_mean(task, TASKS)} "
            "Pass task='sequence-classification'"
        )


def find_config(text: str) -> Path | None:
    """Return the folder that holds the ``config.json`` of a model; None for a well-known name, whose facts ship here.

    A folder has priority over a well-known name of the same spelling, as in transformers. The configuration of an id on
    the hub is downloaded into the hub's cache if it is not there yet.

    Raises:
        ValueError: nothing has that name, or it cannot be read; the message says whether the hub could be asked.
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
        return folder
    if known_name(text) is not None:
        return None
    if is_folder:
        raise ValueError(
            f"model={text!r} is a folder without config.json; expected one that save_pretrained has written. "
            f"Call: model.save_pretrained({text!r})"
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
    names = list(known_models())
    raise ValueError(
        f"model={text!r} is neither a well-known name nor a folder, {reason}; expected a module, a configuration, a "
        "folder with config.json, an id on the hub, or one of the well-known names that "
        f"hf-memopt estimate --list-models shows.{did_you_mean(text, names)} "
        f"Pass model={nearest(text, names) or 'bert-base-uncased'!r}"
    ) from cause
