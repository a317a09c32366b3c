"""Headless Chromium, driven by the DevTools protocol over a pipe, which needs no library for web sockets."""

import base64
import io
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_SECONDS = 60


class Browser:
    """A page in Chromium. `console` collects the errors and warnings that it logs, `dialogs` its questions."""

    def __init__(self, commands: int, answers: io.FileIO) -> None:
        self._commands = commands
        self._answers = answers
        self._rest = b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.console: list[str] = []
        self.dialogs: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result."""
        number = self._send(method, **parameters)
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _send(self, method: str, **parameters: Any) -> int:
        """Send a command and return its number."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return number

    def _next(self) -> Any:
        """Return the next message; note errors, and accept questions of the page."""
        while b"\0" not in self._rest:
            read = self._answers.read(1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        about = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(about["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and about["entry"]["level"] != "verbose":
            self.console.append(about["entry"]["text"])
        elif message.get("method") == "Page.javascriptDialogOpening":
            self.dialogs.append(about["message"])
            self._send("Page.handleJavaScriptDialog", accept=True)
        return message

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a script, awaited if it is a promise."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, (script, done["exceptionDetails"])
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of a script once it is true."""
        end = time.monotonic() + WAIT_SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"), self.console)
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """Return the text of the first element of a CSS selector."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def hover(self, selector: str) -> dict[str, float]:
        """Move the mouse to the middle of the first element of a CSS selector, and return where that is."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"{where}.getBoundingClientRect().toJSON()")
        middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **middle)
        return middle

    def click(self, selector: str) -> None:
        """Click on the middle of the first element of a CSS selector."""
        middle = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **middle)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field as a user would type it."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.run(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, code: int, shift: bool = False) -> None:
        """Press a key; `code` is its Windows virtual key code."""
        for kind in ("rawKeyDown", "keyUp"):
            named = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
            self.call("Input.dispatchKeyEvent", type=kind, **named)

    def upload(self, selector: str, file: Path) -> None:
        """Choose a file in a file field."""
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set the size of the viewport in pixels and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write the visible part of the page as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Run Chromium with a profile in `folder`, and end it."""
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    words = [
        f'exec "$0" "$@" 3<&{command_out} 4>&{answer_in}',
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
    ]
    with (folder / "chromium.log").open("wb") as errors:
        process = subprocess.Popen(
            ["/bin/bash", "-c", *words], pass_fds=[command_out, answer_in], stdout=errors, stderr=errors
        )
        os.close(command_out)
        os.close(answer_in)
        try:
            with os.fdopen(answer_out, "rb", buffering=0) as answers:
                yield Browser(command_in, answers)
        finally:
            os.close(command_in)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
