"""One request to a server of our own, as a client sees it: for the demo and its report.

The server is a process as people start it, `tilestack serve --port 0`; the request is streamed from it over HTTP.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tilestack.lab.report.page import Section, cards, text

START_SECONDS = 120
END_SECONDS = 30


@dataclass(frozen=True)
class Served:
    """A prompt with the answer that was streamed, and how long it took."""

    prompt: str
    answer: str
    tokens: int
    first_ms: float  # until the first piece came
    seconds: float  # in all


def serve_once(model: Path, prompt: str, device: str, max_tokens: int = 64) -> Served:
    """Start a server of a model, ask it once, and let it end in order."""
    asked = dict(prompt=prompt, max_tokens=max_tokens, temperature=0.6, top_k=40, seed=1, stream=True,
                 stream_options={"include_usage": True})  # fmt: skip
    with server(model, device) as address:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(asked).encode(), headers)
        began = time.perf_counter()
        answer, first, tokens = "", 0.0, 0
        with urllib.request.urlopen(request, timeout=START_SECONDS) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the server answered with an error: {event['error']['message']}")
                first = first or time.perf_counter() - began
                answer += "".join(choice["text"] for choice in event["choices"])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return Served(prompt, answer, tokens, 1e3 * first, time.perf_counter() - began)


@contextmanager
def server(model: Path, device: str) -> Iterator[str]:
    """A server's address; it is told to end when the block is left."""
    command = [sys.executable, "-m", "tilestack", "serve", "--model", str(model), "--port", "0", "--device", device]
    environment = {name: value for name, value in os.environ.items() if name != "TILESTACK_API_KEY"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield address_in(process)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # it has answered, and is killed below
            process.communicate(timeout=END_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def address_in(process: "subprocess.Popen[str]") -> str:
    """Where a server that is starting listens, from its log."""
    said = []
    for line in process.stderr or ():
        said.append(line)
        if line.startswith("{") and (told := json.loads(line)).get("event") == "listening":
            return told["address"]
    raise RuntimeError(f"the server did not start: {''.join(said).strip()[-500:]}")


def served_section(served: Served) -> Section:
    """The request, as a section of a page."""
    rate = (served.tokens - 1) / max(served.seconds - served.first_ms / 1e3, 1e-9)
    facts = cards(
        [
            (f"{served.first_ms:.0f} ms", "until the first token", ""),
            (f"{rate:,.0f}", "tokens a second from there on", ""),
            (f"{served.tokens}", "tokens in the answer", ""),
        ]
    )
    shown = f'<pre class="sample"><b>{text(served.prompt)}</b>{text(served.answer)}</pre>'
    lede = "The model above behind OpenAI's API, in a process of its own, asked once over HTTP: the prompt is set bold, the answer was streamed."
    return Section("The model, served", lede, facts + shown)
