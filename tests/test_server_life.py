"""One engine and many clients: who leaves frees it, who is refused hurts nobody, and the end is orderly."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from serving import CLIENT, USER, Served, events, joined, scripted, serving, until
from talkers import N_VOCAB, tokenizer

from swiftlet_mlx.errors import ConfigError, ReadFailed
from swiftlet_mlx.server.process import listen
from swiftlet_mlx.server.settings import Settings

LONG = "the quick brown fox " * 200


def slowly(_: int) -> None:
    """One step of a model that takes its time."""
    time.sleep(0.01)


def request(served: Served, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """Send a request and read nothing."""
    data = json.dumps({"messages": USER, **body}).encode()
    sock = served.connect()
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def busy(served: Served) -> Callable[[], bool]:
    return lambda: served.engine.state == "busy"


def idle(served: Served) -> Callable[[], bool]:
    return lambda: served.engine.state == "ready" and served.server.desk.in_flight == 0


# ---- clients that leave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine_within_a_second(stream: bool) -> None:
    with serving(scripted(LONG, on_step=slowly)) as served:
        sock = request(served, {"stream": stream})
        if stream:
            assert sock.recv(10)
        until(busy(served))
        time.sleep(0.1)
        sock.close()
        assert until(idle(served)) < 1.0
        assert served.chat(max_tokens=1).status_code == 200
        assert "swiftlet_abandoned_requests_total 1" in served.get("/metrics").text


def test_a_client_that_leaves_during_prefill_frees_the_engine() -> None:
    broken_off = threading.Event()

    def prefill(model: Any, tokens: mx.array, cache: list[Any], *, progress: Callable[[int, int], None]) -> None:
        try:
            for i in range(400):
                time.sleep(0.02)
                progress(i * tokens.size // 400, tokens.size)
        except BaseException:
            broken_off.set()
            raise
        model(tokens[None], cache=cache)

    with serving(scripted("Hello"), prefill=prefill) as served:
        sock = request(served, {})
        until(busy(served))
        time.sleep(0.1)
        sock.close()
        assert until(idle(served)) < 1.0
        assert broken_off.is_set()


def test_a_client_that_leaves_while_it_waits_is_never_served() -> None:
    with serving(scripted(LONG, on_step=slowly)) as served:
        first = request(served, {"max_tokens": 60, "stream": True})
        until(busy(served))
        second = request(served, {"messages": [{"role": "user", "content": "second"}]})
        until(lambda: served.engine.waiting == 1)
        second.close()
        assert until(lambda: served.engine.waiting == 0) < 1.0
        assert first.recv(10)
        first.close()


def test_many_disconnects_leave_nothing_behind() -> None:
    with serving(scripted(LONG, on_step=lambda _: time.sleep(0.002)), max_waiting=100) as served:
        threads = threading.active_count()
        for i in range(30):
            sock = request(served, {"stream": i % 2 == 0})
            if i % 4 == 0:  # once the stream has begun; the others are gone before
                sock.recv(10)
            sock.close()
        until(idle(served))
        until(lambda: not served.server.server_state.tasks)
        assert threading.active_count() <= threads + 4  # worker threads for prompts
        assert served.chat(max_tokens=1).status_code == 200


# ---- the queue ---------------------------------------------------------------------------------------------------


def test_more_than_may_wait_are_told_to_come_back() -> None:
    with serving(scripted(LONG, on_step=slowly), max_waiting=1) as served:
        first, second = (request(served, {"max_tokens": 50, "stream": True}) for _ in range(2))
        until(lambda: served.server.desk.in_flight == 2)
        refused = served.chat()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        health = served.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["waiting"]) == (200, "busy", 1)
        first.close()
        second.close()
        until(idle(served))
        assert served.chat(max_tokens=1).status_code == 200


def test_requests_are_served_in_the_order_they_came() -> None:
    with serving(scripted(LONG, on_step=slowly)) as served, ThreadPoolExecutor(4) as pool:
        ended: list[int] = []

        def ask(i: int) -> None:
            served.chat(max_tokens=10)
            ended.append(i)

        futures = []
        for i in range(4):
            futures.append(pool.submit(ask, i))
            until(lambda n=i: served.server.desk.in_flight == n + 1 - len(ended))  # type: ignore[misc]
            time.sleep(0.02)
        for future in futures:
            future.result()
        assert ended == [0, 1, 2, 3]


def test_a_bad_request_does_not_touch_another_ones_answer() -> None:
    with serving(scripted("one two three four five six seven eight nine ten", on_step=slowly)) as served:
        solo = served.chat().json()["choices"][0]["message"]["content"]
        with ThreadPoolExecutor(6) as pool:
            good = [pool.submit(lambda: served.chat().json()["choices"][0]["message"]["content"]) for _ in range(3)]
            bad: list[dict[str, Any]] = [{"stop": [1]}, {"top_k": -5}, {"logit_bias": {"99999": 1}}, {"messages": []}]
            for body in bad:
                assert pool.submit(lambda b=body: served.chat(**b)).result().status_code == 400  # type: ignore[misc]
            assert [g.result() for g in good] == [solo] * 3


def test_concurrent_answers_equal_the_solo_answers() -> None:
    """A real (random) model: answers depend on every token of the prompt."""
    from talkers import random_model

    prompts = [f"Prompt number {i}: {'word ' * i}" for i in range(6)]
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    with serving(lambda: (random_model(), tokenizer())) as served:
        solo = [served.post("/v1/completions", {"prompt": p, **body}).json()["choices"][0]["text"] for p in prompts]
        assert len(set(solo)) > 1
        with ThreadPoolExecutor(6) as pool:
            again = list(pool.map(lambda p: served.post("/v1/completions", {"prompt": p, **body}).json(), prompts * 2))
        assert [a["choices"][0]["text"] for a in again] == solo * 2


# ---- things that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ReadFailed("/secret/layer_00.bin: short read"), RuntimeError("boom at /secret")])
def test_a_failed_read_costs_one_answer(error: Exception) -> None:
    failures: list[Exception] = []

    def step(i: int) -> None:
        if i == 1 and failures:
            raise failures.pop()

    with serving(scripted("Hello world and more", on_step=step)) as served:
        for stream in (True, False):
            failures.append(error)
            response = served.chat(stream=stream)
            if stream:
                got = events(response.text)
                assert got[-1] == "[DONE]"
                assert got[-2]["error"]["code"] == "generation_failed"
            else:
                assert response.status_code == 500
                assert response.json()["error"]["code"] == "generation_failed"
            assert "secret" not in response.text
            assert any("secret" in line for line in served.said)
            assert served.chat().json()["choices"][0]["message"]["content"] == "Hello world and more"
            assert served.get("/health").json()["status"] == "ready"


def test_while_the_model_loads_requests_are_told_so() -> None:
    go = threading.Event()

    def load() -> tuple[Any, Any]:
        go.wait(10)
        return scripted("Hello")()

    with serving(load, wait=False) as served:
        health = served.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        refused = served.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert served.get("/v1/models").status_code == 200
        go.set()
        until(lambda: served.get("/health").status_code == 200)
        assert served.chat().status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_cause() -> None:
    from swiftlet_mlx.engine import Engine
    from swiftlet_mlx.server.process import serve

    def load() -> tuple[Any, Any]:
        raise ConfigError("config.json is broken")

    with Engine(load, prefix_cache_gb=0) as engine, pytest.raises(ConfigError, match="broken"):
        serve(engine, Settings(model_id="tiny"), listen("127.0.0.1", 0))


# ---- streams that wait -------------------------------------------------------------------------------------------


def test_a_silent_stream_beats_and_a_quick_one_does_not() -> None:
    def step(i: int) -> None:
        time.sleep(0.5 if i == 1 else 0)

    with serving(scripted("Hello world", on_step=step), heartbeat_seconds=0.15) as served:
        text = served.chat(stream=True).text
        assert text.startswith("data: ")
        assert 2 <= text.count(": still here\n\n") <= 4
        assert joined(events(text)) == "Hello world"
    with serving(scripted("Hello world"), heartbeat_seconds=15) as served:
        assert ": " not in served.chat(stream=True).text.replace("data: ", "")
    with serving(scripted("Hello world", on_step=step), heartbeat_seconds=None) as served:
        assert "still here" not in served.chat(stream=True).text


def test_a_waiting_stream_beats_before_its_turn() -> None:
    with serving(scripted(LONG, on_step=slowly), heartbeat_seconds=0.1) as served:
        first = request(served, {"max_tokens": 60})
        until(busy(served))
        with CLIENT.stream("POST", served.url + "/v1/chat/completions", json={"messages": USER, "stream": True}) as two:
            assert next(two.iter_bytes()).startswith(b": still here\n\n")
        first.close()


def test_progress_is_told_only_when_asked_for() -> None:
    def prefill(model: Any, tokens: mx.array, cache: list[Any], *, progress: Callable[[int, int], None]) -> None:
        for i in range(4):
            time.sleep(0.11)
            progress(i, 4)
        model(tokens[None], cache=cache)

    with serving(scripted("Hello"), prefill=prefill) as served:
        asked = served.stream(stream_options={"include_progress": True})
        told = [c["progress"] for c in asked[:-1] if "progress" in c]
        assert told
        assert all(0 <= p["done"] <= p["total"] for p in told)
        assert all("progress" not in c for c in served.stream()[:-1])


# ---- the end -----------------------------------------------------------------------------------------------------


def test_what_runs_is_finished_when_the_server_stops() -> None:
    with serving(scripted("one two three four five six", on_step=slowly)) as served, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(served.chat, stream=s) for s in (True, False)]
        until(lambda: served.server.desk.in_flight == 2)
        served.server.should_exit = True
        streamed, whole = (a.result() for a in answers)
        assert joined(events(streamed.text)) == "one two three four five six"
        assert whole.json()["choices"][0]["message"]["content"] == "one two three four five six"
        with pytest.raises(OSError):
            until(lambda: not served.connect(), 5)


def test_what_does_not_end_in_time_is_told_so() -> None:
    with (
        serving(scripted(LONG, on_step=slowly), drain_seconds=0.3) as served,
        ThreadPoolExecutor(2) as pool,
    ):
        streamed = pool.submit(served.chat, stream=True)
        until(busy(served))
        time.sleep(0.1)  # its first bytes are out
        whole = pool.submit(served.chat)
        until(lambda: served.server.desk.in_flight == 2)
        served.server.should_exit = True
        got = events(streamed.result().text)
        assert got[-1] == "[DONE]"
        assert got[-2]["error"]["code"] == "shutting_down"
        assert whole.result().status_code == 503


def test_sampled_ids_stay_in_the_vocabulary() -> None:
    """The scripted model's vocabulary is padded, as released ones are: a bias on a padding id is legal and harmless."""
    with serving(scripted("Hello")) as served:
        assert served.chat(logit_bias={str(N_VOCAB - 1): 1}).status_code == 200
        assert served.chat(logit_bias={str(N_VOCAB): 1}).status_code == 400
