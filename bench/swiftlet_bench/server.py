"""What serving costs over the bare engine, and how soon a waiting stream begins.

    python -m swiftlet_bench.server demo --tokens 200 --rounds 10

A server process and a bare engine in this process, both with the same model, generate the same greedy reply in turns
(engine, server, engine, ...), so that a busy machine slows both. Decode seconds are the engine's own in both
cases; the first is with nobody watching but a loop, the second while the server writes each token to a client in
this process. Then two streams are asked for at once, and the time between the last byte of the first and the first
byte of the second is taken. Prints one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swiftlet_mlx import Completions, Engine, Sampling, load
from swiftlet_mlx.completion import Ask
from swiftlet_mlx.events import Statistics
from swiftlet_mlx.locate import find_model

PROMPT = "What is the capital of Spain?"
MESSAGES = [{"role": "user", "content": PROMPT}]


@contextmanager
def server(model: str) -> Iterator[int]:
    """A server process; yields its port."""
    command = [sys.executable, "-m", "swiftlet_mlx", "serve", model, "--port", "0", "--temp", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            found = re.search(r"http://[^/ ]+:(\d+)", line)
            port = int(found[1]) if found else port
            if line.startswith("Ready."):
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield port
    finally:
        process.terminate()
        process.wait()


def ask_server(
    port: int, body: Mapping[str, Any], first: Callable[[float], None] | None = None
) -> tuple[dict[str, Any], float]:
    """Stream a reply; its statistics and when its last byte came. `first` is told when the first one did."""
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
    parser = argparse.ArgumentParser(description="Serving against the bare engine.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()

    folder = find_model(args.model)
    with Engine(lambda: load(folder)) as engine, server(args.model) as port:
        completions = Completions(engine, folder)
        ends = {str(i): -100 for i in completions.eos_ids if i < len(completions.tokenizer)}
        bias = {int(i): float(b) for i, b in ends.items()}
        ask = Ask(sampling=Sampling(logit_bias=bias), max_tokens=args.tokens)
        body = {"max_tokens": args.tokens, "logit_bias": ends}
        ratios, bare, served = [], [], []
        for i in range(args.rounds + 1):
            alone = ask_engine(completions, ask)
            figures, _ = ask_server(port, body)
            if i == 0:
                continue  # warm up
            bare.append(alone.decode_seconds / (alone.generated_tokens - 1))
            served.append(figures["decode_seconds"] / (args.tokens - 1))
            ratios.append(served[-1] / bare[-1])
        waits = [_wait_after_turn(port, body) for _ in range(args.rounds)]
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
