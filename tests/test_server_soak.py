"""Long runs against the real process: many clients for a minute, hundreds that leave. Nothing is lost or grows."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import events, joined, until
from test_server_process import Process, start

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
COUNTRIES = ["Spain", "France", "Italy", "Japan", "Peru", "Kenya", "Norway", "Chile"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Process]:
    running = start("demo", "--port", "0", "--temp", "0", "--no-thinking", "--max-waiting", "64")
    yield running
    assert running.process.poll() is None, "it died"
    assert running.end() == 0
    assert "Traceback" not in "".join(running.lines)


def body(country: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"What is the capital of {country}?"}], **more}


def ask(demo: Process, country: str, stream: bool) -> str:
    response = httpx.post(demo.url + "/v1/chat/completions", json=body(country, stream=stream), timeout=120)
    assert response.status_code == 200, response.text
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        return joined(events(response.text))
    return str(response.json()["choices"][0]["message"]["content"])


def leave(demo: Process, country: str, stream: bool, after: float) -> None:
    """Ask, and go before the answer is whole."""
    data = json.dumps(body(country, stream=stream, max_tokens=4000, logit_bias={"4087": -100, "4089": -100})).encode()
    host, port = demo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        time.sleep(after)


def figures(demo: Process) -> tuple[int, float]:
    """Threads and resident megabytes of the server."""
    status = Path(f"/proc/{demo.process.pid}/status").read_text()
    threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
    memory = re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)
    assert threads
    assert memory
    return int(threads[1]), int(memory[1]) / 1000


def idle(demo: Process) -> bool:
    return bool(httpx.get(demo.url + "/health", timeout=30).json()["in_flight"] == 0)


def test_32_clients_for_a_minute_get_the_answers_they_would_get_alone(demo: Process) -> None:
    solo = {c: ask(demo, c, stream=False) for c in COUNTRIES}
    ends = time.time() + 60
    counts = {"answered": 0, "left": 0}

    def client(n: int) -> None:
        choose = random.Random(n)
        while time.time() < ends:
            country, stream = choose.choice(COUNTRIES), choose.random() < 0.5
            if choose.random() < 0.25:
                leave(demo, country, stream, choose.random())
                counts["left"] += 1
            else:
                assert ask(demo, country, stream) == solo[country]
                counts["answered"] += 1

    with ThreadPoolExecutor(32) as pool:
        for done in [pool.submit(client, n) for n in range(32)]:
            done.result()
    assert counts["answered"] > 32
    assert counts["left"] > 8
    until(lambda: idle(demo), 10)
    print(counts, "threads, MB:", figures(demo))


def test_200_disconnects_leave_nothing_behind(demo: Process) -> None:
    def some(n: int, seed: int) -> None:
        choose = random.Random(seed)
        for i in range(n):
            leave(demo, choose.choice(COUNTRIES), i % 2 == 0, choose.random() * 0.1)
        assert until(lambda: idle(demo), 10) < 1.5

    some(50, 0)  # what is kept by design is full after these
    threads, memory = figures(demo)
    some(200, 1)
    after_threads, after_memory = figures(demo)
    print("threads", threads, after_threads, "MB", memory, after_memory)
    assert after_threads <= threads
    assert after_memory < memory + 10
    assert "Madrid" in ask(demo, "Spain", stream=True)
