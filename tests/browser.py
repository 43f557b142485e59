"""A page in headless Chromium, driven over the DevTools protocol: open, type, press, ask, look."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), " ": (32, " "), "ArrowRight": (39, ""), "ArrowDown": (40, "")}
SHIFT = 8


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. What its console complains of is in `complaints`."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 900, dark: bool = False):
        self.folder, self.numbers, self.complaints = folder, 0, []
        flags = [
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-port=0",
            "--disable-dev-shm-usage",
        ]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [chromium(), *flags, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = folder / "DevToolsActivePort"
        ends = time.monotonic() + 120
        while not port.exists() or len(port.read_text().split()) < 2:
            assert time.monotonic() < ends, "chromium did not start"
            assert self.process.poll() is None, "chromium ended"
            time.sleep(0.05)
        number, path = port.read_text().split()
        self.closing = ExitStack()
        self.socket = self.closing.enter_context(
            connect(f"ws://127.0.0.1:{number}{path}", max_size=1 << 26, open_timeout=60)
        )
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method, **params):
        self.numbers += 1
        message = {"id": self.numbers, "method": method, "params": params}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while (answer := json.loads(self.socket.recv(timeout=120))).get("id") != self.numbers:
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(answer["params"]))
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, url):
        self.leave("Page.navigate", url=url)

    def reload(self):
        self.leave("Page.reload")

    def leave(self, method, **params):
        """Until another document is there and has all it needs: the answer may come while the one before still is."""
        self.run("window.before = true")
        self.call(method, **params)
        self.wait("!window.before && document.readyState === 'complete'")

    def run(self, script):
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script, seconds=120):
        """Until a condition holds on the page; answers its value."""
        ends = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < ends, f"never came true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.03)
        return value

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False):
        code, text = KEYS[key]
        about = dict(key=key, code=key, windowsVirtualKeyCode=code, modifiers=SHIFT if shift else 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self):
        self.closing.close()
        self.process.terminate()
        self.process.wait(60)
