"""Ask whether the Hugging Face hub can be reached, before its client tries for a minute and logs every attempt.

And what the hub calls a task.

``HF_HUB_OFFLINE``, ``HF_ENDPOINT`` and proxies are honoured. Importing this module imports only the standard library.

Limitations: behind a proxy the hub counts as reachable, since only the client knows how to talk to the proxy.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from hf_memopt.errors import nearest
from hf_memopt.plain_data import check_word, shown

_PATIENCE_SECONDS = 3.0
_TASKS = {
    **dict.fromkeys(
        ("text-classification", "sentiment-analysis", "zero-shot-classification"), "sequence-classification"
    ),
    **dict.fromkeys(("text2text-generation", "summarization", "translation"), "seq2seq"),
    "ner": "token-classification",
    "fill-mask": "masked-lm",
    "text-generation": "causal-lm",
    "image-to-text": "image-text-to-text",
    "image-segmentation": "semantic-segmentation",
    "automatic-speech-recognition": "speech-seq2seq",
}
"""What this package calls the tasks of https://huggingface.co/tasks and of pipelines that it knows by another name."""


def task_by_name(task: str, known: Sequence[str], example: str = "") -> str:
    """Return the known word for a task by the hub's name or by its own; for any other raise as ``check_word`` does."""
    near = nearest(task, (*known, *_TASKS)) or ""
    if (meant := _TASKS.get(near, "")) not in known:
        check_word("task", task, known, example)
        return task
    if task != near:
        raise ValueError(f"task={shown(task)} is unknown; expected {meant!r}, or another task. Did you mean {near!r}?")
    return meant


def hub_answers() -> bool:
    """Return whether something accepts connections at the hub's address; False when offline mode is on.

    A name server that does not answer, and each address of the hub, would wait for its own timeout one after the other;
    the thread limits them to ``_PATIENCE_SECONDS`` together.
    """
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        return False
    if getproxies():
        return True
    endpoint = urlsplit(constants.ENDPOINT)
    address = (endpoint.hostname or "", endpoint.port or (80 if endpoint.scheme == "http" else 443))
    connected: list[bool] = []

    def connect() -> None:
        with suppress(OSError), socket.create_connection(address, timeout=_PATIENCE_SECONDS):
            connected.append(True)

    attempt = Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(_PATIENCE_SECONDS)
    return bool(connected)
