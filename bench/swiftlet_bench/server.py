"""What serving costs over the bare engine, and how soon a waiting stream begins.

    python -m swiftlet_bench.server demo --tokens 200 --rounds 10

One process holds the engine and the server, another one is the client. The same greedy reply is generated in turns with
nobody but a loop in this process reading its events, and for the client, streamed: what differs is the server's work
alone, and a busy machine slows both. Decode seconds are the engine's own in both cases. Then two streams are asked
for at once, and the time between the last byte of the first and the first byte of the second is taken. Prints one JSON
object to stdout. On a machine with two cores the client's work is in the figure too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swiftlet_mlx import Completions, Engine, Sampling, load
from swiftlet_mlx.completion import Ask
from swiftlet_mlx.events import Statistics
from swiftlet_mlx.locate import find_model
from swiftlet_mlx.server.process import Server, listen, serve
from swiftlet_mlx.server.settings import Settings

PROMPT = "What is the capital of Spain?"
MESSAGES = [{"role": "user", "content": PROMPT}]


@contextmanager
def server(engine: Engine, folder: Path) -> Iterator[int]:
    """A server on a thread; yields its port."""
    started: list[Server] = []
    ready = threading.Event()
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    thread = threading.Thread(
        target=serve,
        args=(engine, Settings(model_id="model"), sock),
        kwargs={"folder": folder, "started": started.append, "ready": lambda _: ready.set()},
    )
    thread.start()
    try:
        ready.wait()
        yield port
    finally:
        started[0].should_exit = True
        thread.join()


class Client:
    """A process that asks, so that reading an answer takes no time of the server's interpreter."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "swiftlet_bench.server", "--client", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, what: str, body: Mapping[str, Any]) -> Any:
        """Have `stream` or `wait_after_turn` done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, body]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()


def _be_client(port: int) -> None:
    for line in sys.stdin:
        what, body = json.loads(line)
        result = ask_server(port, body)[0] if what == "stream" else _wait_after_turn(port, body)
        print(json.dumps(result), flush=True)


def ask_server(
    port: int, body: Mapping[str, Any], first: Callable[[float], None] | None = None
) -> tuple[dict[str, Any], float]:
    """Stream a reply.

    Args:
        port: Of the server.
        body: What the request says beside the messages.
        first: Is told when the first byte came.

    Returns:
        The reply's statistics, and when its last byte came.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    payload = {"messages": MESSAGES, "stream": True, "stream_options": {"include_statistics": True}, **body}
    connection.request("POST", "/v1/chat/completions", json.dumps(payload))
    response = connection.getresponse()
    figures: dict[str, Any] = {}
    for line in response:
        if first is not None:
            first(time.perf_counter())
            first = None
        if b'"statistics"' in line:
            figures = json.loads(line.removeprefix(b"data: "))["statistics"]
    ended = time.perf_counter()
    connection.close()
    return figures, ended


def ask_engine(completions: Completions, ask: Ask) -> Statistics:
    """The same reply without a server."""
    figures = None
    for event in completions.chat(MESSAGES, ask):
        if isinstance(event, Statistics):
            figures = event
    assert figures is not None
    return figures


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description="Serving against the bare engine.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        _be_client(args.client)
        return

    folder = find_model(args.model)
    with Engine(lambda: load(folder)) as engine, server(engine, folder) as port:
        client = Client(port)
        completions = Completions(engine, folder)
        bias = {i: -100.0 for i in completions.eos_ids if i < len(completions.tokenizer)}
        ask = Ask(sampling=Sampling(logit_bias=bias), max_tokens=args.tokens)
        body = {"max_tokens": args.tokens, "temperature": 0, "logit_bias": {str(i): b for i, b in bias.items()}}
        bare, served = [], []
        for _ in range(args.rounds + 1):
            bare.append(ask_engine(completions, ask).decode_seconds / (args.tokens - 1))
            served.append(client.do("stream", body)["decode_seconds"] / (args.tokens - 1))
        bare, served = bare[1:], served[1:]  # without the first round, which warms up
        ratios = [s / b for s, b in zip(served, bare, strict=True)]
        waits = [client.do("wait_after_turn", body) for _ in range(args.rounds)]
        client.close()
    print(
        json.dumps(
            {
                "model": args.model,
                "tokens": args.tokens,
                "rounds": args.rounds,
                "engine_ms_per_token": 1e3 * statistics.median(bare),
                "server_ms_per_token": 1e3 * statistics.median(served),
                "overhead": statistics.median(ratios) - 1,
                "overhead_quartiles": [q - 1 for q in statistics.quantiles(ratios, n=4)],
                "first_byte_after_turn_ms": 1e3 * statistics.median(waits),
                "first_byte_after_turn_ms_worst": 1e3 * max(waits),
                "load_average": os.getloadavg()[0],
                "cores": os.cpu_count(),
            }
        )
    )


def _wait_after_turn(port: int, body: Mapping[str, Any]) -> float:
    """Seconds from the end of a running stream to the first byte of the one that waited for it."""
    begun: list[float] = []
    running = threading.Event()
    ended: list[float] = []
    one = threading.Thread(target=lambda: ended.append(ask_server(port, body, lambda _: running.set())[1]))
    two = threading.Thread(target=lambda: ask_server(port, body, begun.append))
    one.start()
    running.wait()
    two.start()
    one.join()
    two.join()
    return begun[0] - ended[0]


if __name__ == "__main__":
    main()
