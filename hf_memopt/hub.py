"""Ask whether the Hugging Face hub can be reached, before its client tries for a minute and logs every attempt.

``HF_HUB_OFFLINE``, ``HF_ENDPOINT`` and proxies are honoured. Importing this module imports only the standard library.

Limitations: behind a proxy the hub counts as reachable, since only the client knows how to talk to the proxy.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE_SECONDS = 3.0


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
