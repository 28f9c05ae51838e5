"""A real Chromium without a window, driven over its debugging pipe by the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_S = 60.0


def executable() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One Chromium process; `open` gives a fresh page in it."""

    def __enter__(self) -> Browser:
        program = executable()
        assert program is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium reads commands from 3 and answers on 4; moved up first, so that neither is in the way of the other.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]
        self._home = tempfile.mkdtemp(prefix="tilemesh-browser-")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                 "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"]  # fmt: skip

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={self._home}"], close_fds=False, preexec_fn=place,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self._out, self._in = ours_out, ours_in
        os.set_blocking(self._in, False)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            arrived = self._messages()
            self.events += [one for one in arrived if "method" in one]
            for found in arrived:
                if found.get("id") == number:
                    assert "error" not in found, f"{method}: {found['error']}"
                    return found.get("result", {})
        raise AssertionError(f"{method}: no answer from the browser within {TIMEOUT_S:.0f} s")

    def _messages(self) -> list[dict[str, Any]]:
        try:
            self._rest += os.read(self._in, 1 << 20)
        except BlockingIOError:
            time.sleep(0.002)
        *whole, self._rest = self._rest.split(b"\0")
        return [json.loads(one) for one in whole]

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        return Page(self, address, width, height, dark)


class Page:
    """A page of its own size and colours; everything it said or asked for since it was opened is kept."""

    def __init__(self, browser: Browser, address: str, width: int, height: int, dark: bool) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        browser.events.clear()
        began = time.monotonic()
        self.call("Page.navigate", url=address)
        self._wait_for("Page.loadEventFired")
        # Two frames later what the script drew is on the screen.
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        self.seconds = time.monotonic() - began

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error: object) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def _wait_for(self, name: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not self._seen(name):
            assert time.monotonic() < end, f"no {name} within {TIMEOUT_S:.0f} s"
            self.call("Runtime.evaluate", expression="0")

    def _seen(self, name: str) -> list[dict[str, Any]]:
        mine = (event for event in self.browser.events if event.get("sessionId") == self.session)
        return [event["params"] for event in mine if event["method"] == name]

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions, and whatever the page's policy refused."""
        self.value("0")
        said = [event["entry"] for event in self._seen("Log.entryAdded")]
        made = [f"{one['level']}: {one['text']}" for one in said if one["level"] in ("error", "warning")]
        made += [str(one["exceptionDetails"]) for one in self._seen("Runtime.exceptionThrown")]
        return made + [
            str(one) for one in self._seen("Runtime.consoleAPICalled") if one["type"] in ("error", "warning")
        ]

    def requests(self) -> list[str]:
        """What the page asked the network for, itself and what it carries in itself left out."""
        self.value("0")
        asked = [one["request"]["url"] for one in self._seen("Network.requestWillBeSent")]
        return [url for url in asked[1:] if not url.startswith("data:")]

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {
            "Tab": 9,
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "ArrowUp": 38,
            "ArrowDown": 40,
            "Home": 36,
            "End": 35,
            "Enter": 13,
        }
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        event |= {"modifiers": 8 if shift else 0}
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(found["data"]))
