"""A headless Chromium, driven over its own pipe (the DevTools protocol on file descriptors 3 and 4)."""

import base64
import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
]


class Page:
    """One tab. `problems` are script errors and refused resources, `requests` every address that was asked for."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.command(method, params, self._session)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.js('document.body.innerText')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.wait(f"!!document.querySelector({json.dumps(selector)})")
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def write(self, selector: str, text: str) -> None:
        """Into a field, as typing would."""
        self.js(f"(e => {{ e.focus(); e.select?.(); }})(document.querySelector({json.dumps(selector)}))")
        self.command("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                modifiers=modifiers,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


class Browser:
    """The process and its pipe: commands from one thread, answers and events read by another."""

    def __init__(self, process: subprocess.Popen[bytes], read_fd: int, write_fd: int) -> None:
        self._process = process
        self._reader = os.fdopen(read_fd, "rb")
        self._write_fd = write_fd
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._next_id = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the process has gone."""
        self._thread.join(timeout=120)
        self._reader.close()
        os.close(self._write_fd)

    def command(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._next_id += 1
        answer = self._answers[self._next_id] = Queue()
        message = {"id": self._next_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        found = answer.get(timeout=60)
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def page(self) -> Page:
        target = self.command("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.command("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        self._pages[session] = page
        return page

    def _read(self) -> None:
        rest = b""
        while piece := self._reader.read1(1 << 20):
            *messages, rest = (rest + piece).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].on_event(message["method"], message["params"])


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile."""
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The shell puts the two ends where Chromium looks for them.
        script = f'exec chromium "$@" 3<&{their_read} 4>&{their_write} {their_read}<&- {their_write}>&-'
        command = ["bash", "-c", script, "chromium", *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            command, pass_fds=(their_read, their_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(their_read)
        os.close(their_write)
        browser = Browser(process, our_read, our_write)
        try:
            yield browser
        finally:
            with contextlib.suppress(AssertionError, OSError):
                browser.command("Browser.close", {})
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            browser.close()
