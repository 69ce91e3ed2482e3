"""The real process with the bundled model: official clients, signals, and what goes wrong at the start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftlet_mlx.cli.app import app
from swiftlet_mlx.cli.run import run

QUESTION: Any = [{"role": "user", "content": "What is the capital of Spain?"}]


@dataclass
class Process:
    """A server process and what it said so far."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def start(*args: str) -> Process:
    process = subprocess.Popen(
        [sys.executable, "-m", "swiftlet_mlx", "serve", *args],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stderr is not None
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                lines.append(line)
                if line.startswith("Ready."):
                    ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert ready.wait(60)
    found = re.search(r"http://[^/ ]+:\d+", "".join(lines))
    assert found, lines
    return Process(process, found[0], lines)


@pytest.fixture(scope="module")
def demo() -> Iterator[Process]:
    running = start("demo", "--port", "0", "--alias", "gpt-4o", "--temp", "0", "--no-thinking")
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """The exit code and message of a command that does not come to serve; in this process, for speed."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = run(app, ["serve", *args])
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return code, said


@pytest.mark.long
def test_the_bundled_model_answers_every_client(demo: Process) -> None:
    import anthropic  # here, for importing it takes seconds and every worker collects this file
    import openai

    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none") as client:
        chat = client.chat.completions.create(model="gpt-4o", messages=QUESTION)
        assert "Madrid" in (chat.choices[0].message.content or "")
        assert "Madrid" in client.responses.create(model="demo", input=QUESTION[0]["content"]).output_text
        streamed = client.chat.completions.create(model="demo", messages=QUESTION, stream=True)
        assert "Madrid" in "".join(c.choices[0].delta.content or "" for c in streamed)
    with (
        anthropic.Anthropic(base_url=demo.url, api_key="none") as claude,
        claude.messages.stream(model="demo", max_tokens=50, messages=QUESTION) as stream,
    ):
        assert "Madrid" in stream.get_final_text()
    metrics = httpx.get(demo.url + "/metrics").text
    hits = re.search(r"^swiftlet_expert_hits_total (\d+)$", metrics, re.MULTILINE)
    assert hits
    assert int(hits[1]) > 0
    assert httpx.get(demo.url + "/").text.startswith("<!doctype html>")


def test_a_second_turn_is_answered_from_the_cache(demo: Process) -> None:
    import openai

    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none") as client:
        first = client.chat.completions.create(model="demo", messages=QUESTION)
        answer: Any = {"role": "assistant", "content": first.choices[0].message.content}
        question: Any = {"role": "user", "content": "And what about France?"}
        second = client.chat.completions.create(model="demo", messages=[*QUESTION, answer, question])
        assert "Paris" in (second.choices[0].message.content or "")
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        cached = second.usage.prompt_tokens_details.cached_tokens or 0
        assert second.usage.prompt_tokens / 4 < cached < second.usage.prompt_tokens


def test_a_used_port_is_told(demo: Process, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = fails(capsys, "demo", "--port", demo.url.rpartition(":")[2])
    assert code == 2
    assert "--port" in said


def test_sigterm_lets_what_runs_finish_and_exits_with_zero(demo: Process) -> None:
    with httpx.stream(
        "POST",
        demo.url + "/v1/completions",
        json={"prompt": "The", "max_tokens": 30, "stream": True, "logit_bias": {"4087": -100, "4089": -100}},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        demo.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in line for line in rest) == 1
    assert demo.process.wait(30) == 0
    assert not [line for line in demo.lines if "Traceback" in line]


@pytest.mark.slow
def test_ctrl_c_ends_the_server_as_interrupted() -> None:
    running = start("demo", "--port", "0")
    assert running.end(signal.SIGINT) == 130
    assert "Traceback" not in "".join(running.lines)


def test_a_model_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.qpack").mkdir()
    code, said = fails(capsys, str(tmp_path / "broken.qpack"), "--port", "0")
    assert code == 1
    assert "broken.qpack" in said


def test_other_machines_need_a_key_unless_the_user_insists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWIFTLET_MLX_API_KEY", raising=False)
    code, said = fails(capsys, "demo", "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert "--api-key" in said
    assert "--no-api-key" in said
