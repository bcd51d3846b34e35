"""A headless Chromium over its DevTools pipe: what a page looks like at a given width, and what it complains about.

``--window-size`` does not go below 500 px; ``Emulation.setDeviceMetricsOverride`` does. The pipe needs no package: JSON
messages that end with a zero byte, read by Chromium from file 3 and written by it to file 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["CHROMIUM", "Chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """Use it in a ``with`` block."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-extensions", "--no-proxy-server"]
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *flags, *quiet, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._waiting, self.events = 0, b"", []  # type: int, bytes, list[dict[str, Any]]
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, path: Path, width: int, *, dark: bool = False, media: str = "screen") -> None:
        """Load a page in a window of so many pixels, or as it is printed, and wait for its load event."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)  # else a screenshot is laid out wider than the window
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme], media=media)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.value("window.ready")  # a promise, where a page has to unpack its figures

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression is on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, uncaught exceptions and requests beyond the page itself."""
        found = []
        for event in self.events:
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(told["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(str(told["args"]))
            elif event["method"] == "Network.requestWillBeSent" and told["type"] != "Document":
                found.append(told["request"]["url"])
        return found

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol on the page."""
        return self._call(method, session=self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            part = os.read(self._read, 2**16)
            assert part, "Chromium has ended"
            self._waiting += part
        text, self._waiting = self._waiting.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message
