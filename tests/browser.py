"""A headless Chromium, driven over its own protocol."""
import json
import os
import shutil
import subprocess
import time
import urllib.request

from websocket import create_connection

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    "The browser's path, or None."
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    "One page of a headless Chromium that writes down every request and every error."

    FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--remote-debugging-port=0", "--remote-allow-origins=*")

    def __init__(self, profile):
        self.process = subprocess.Popen([find(), *self.FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)
        port_file = profile / "DevToolsActivePort"
        ends = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < ends and self.process.poll() is None, "Chromium did not start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=20) as answer:
            pages = [p for p in json.load(answer) if p["type"] == "page"]
        self.socket = create_connection(pages[0]["webSocketDebuggerUrl"], timeout=30)
        self.number, self.requests, self.failed, self.errors = 0, [], [], []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        "One command; events that arrive meanwhile are noted."
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            self._note(message)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict) -> None:
        about = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Network.loadingFailed":
                self.failed.append(about)
            case "Runtime.exceptionThrown":
                self.errors.append(about["exceptionDetails"])
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(about["entry"])

    def run(self, script: str):
        "The value of a script in the page."
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, address: str) -> None:
        "Goes to a page and waits until it is complete, pictures included."
        self.call("Page.navigate", url=address)
        ends = time.monotonic() + 30
        ready = f"document.readyState == 'complete' && location.href.split('#')[0] == {json.dumps(address)}"
        while not self.run(ready):
            assert time.monotonic() < ends, f"{address} did not load"
            time.sleep(0.05)

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        "Sets the window's size and the preferred colours."
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self) -> bytes:
        import base64

        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self.socket.close()
        os.killpg(self.process.pid, 9)
        self.process.wait()
