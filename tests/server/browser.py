"""Headless Chromium, controlled through its debugging pipe with NUL-terminated JSON messages."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio"),
)
_ANSWER_S = 60.0


class Page:
    """One page of a browser.

    Args:
        send, receive: File descriptors of the pipes to and from the browser.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer = send, receive, b""
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        """Errors that the page's script has thrown or logged."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the browser and return its result; raise `RuntimeError` if it fails."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, url: str, headers: dict[str, str]) -> None:
        """Load a page; send these headers with all of its requests."""
        self.call("Network.setExtraHTTPHeaders", headers=headers)
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true and return its value.

        Raises:
            TimeoutError: If the expression is not true within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} is {found!r} after {seconds:g} s; errors: {self.errors}")
            time.sleep(0.1)
        return found

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Set the size of the page, in CSS pixels."""
        scale = 2 if is_phone else 1
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path) -> None:
        """Write a screenshot of the page as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._receive], [], [], _ANSWER_S)[0]:
                raise TimeoutError(f"the browser has not answered within {_ANSWER_S:g} s")
            part = os.read(self._receive, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"] + " " + event["params"]["entry"].get("url", ""))


@contextmanager
def chromium_page(profile: Path) -> Iterator[Page]:
    """Context manager: run Chromium with its own profile and yield a page."""
    assert CHROMIUM is not None
    (to_read, send), (receive, to_write) = os.pipe(), os.pipe()

    def connect_pipes() -> None:  # Chromium reads descriptor 3 and writes descriptor 4
        high = (os.dup2(to_read, 103), os.dup2(to_write, 104))
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=connect_pipes,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Page(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.terminate()
        process.wait(30)
