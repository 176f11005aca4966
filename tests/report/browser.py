"""A headless Chromium for tests, driven over its debugging pipe: JSON messages, each ended by a zero byte."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
          "--remote-debugging-pipe", "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb")  # fmt: skip

# The browser reads commands from its descriptor 3 and writes results to 4, whatever they are called here.
_START = """
import fcntl, os, sys
kept = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(kept[0], 3)
os.dup2(kept[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium():
    """The program's path, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium process with one page."""

    def __init__(self, program, *, profile):
        commands, results = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                str(commands[0]),
                str(results[1]),
                program,
                *_FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(commands[0], results[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(results[1])
        self._out, self._in = os.fdopen(commands[1], "wb"), os.fdopen(results[0], "rb")
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.messages = []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self):
        """Open a page and hear what happens in it."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self):
        """End the process."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self._call("Browser.close")
        for pipe in (self._out, self._in):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, path, *, width=1200, height=900, scheme="light", is_phone=False):
        """Load a file, in a window of this size."""
        self.messages.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=is_phone
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.prefer(scheme)
        self._call("Page.navigate", url=path.resolve().as_uri())
        self._until("Page.loadEventFired")
        self.messages = [each for each in self.messages if each["method"] != "Page.loadEventFired"]

    def prefer(self, scheme, *, media=""):
        """Emulate the reader's colour scheme, and paper with media="print"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)

    def value(self, expression):
        """What an expression is in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def texts(self, selector):
        """Texts of all elements that a selector finds."""
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")

    def move(self, x, y):
        """Move the mouse to a place in the window."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x, y):
        """Touch a place in the window and let go."""
        self._call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key, *, is_shift=False):
        """Press and let go of a key."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 if is_shift else 0)

    def screenshot(self, path, *, is_whole=True):
        """Save the whole page, or what the window shows, as PNG."""
        shot = self._call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=is_whole, **self._clip(is_whole)
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path):
        """Print to A4."""
        printed = self._call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(printed["data"]))

    def complaints(self):
        """Errors, warnings, refusals by the policy, and addresses that were asked for beside the page itself."""
        found = []
        for message in self.messages:
            method, params = message["method"], message["params"]
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["exception"].get("description", "exception"))
            elif method == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled":
                found.append(str(params["args"]))
            elif method == "Network.requestWillBeSent" and params.get("type") != "Document":
                found.append(params["request"]["url"])
        return found

    def _clip(self, is_whole):
        if not is_whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if "method" in answer:
                self.messages.append(answer)

    def _until(self, method):
        while not any(message["method"] == method for message in self.messages):
            message = self._next()
            if "method" in message:
                self.messages.append(message)

    def _next(self):
        while b"\0" not in self._rest:
            part = os.read(self._in.fileno(), 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
