"""Generated requests, right and wrong, never bring the server down: the published description is the grammar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from serving import USER, Served, scripted, serving, until

from swiftlet_mlx.server.openapi import schema as published

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
POSTED = (*GENERATING, "/v1/messages/count_tokens", "/tokenize")
QUIET = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(scripted("Hello world"), max_body_bytes=100_000, header_seconds=5) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(served: Served) -> Iterator[None]:
    threads = threading.active_count()
    yield
    until(lambda: served.server.desk.in_flight == 0)
    assert threading.active_count() <= threads + 4
    assert served.chat().json()["choices"][0]["message"]["content"] == "Hello world"
    assert not [line for line in served.said if " < " in line], "a fault of the server itself"


def test_the_description_is_served(served: Served) -> None:
    assert served.get("/openapi.json").json() == published()


def send(served: Served, client: httpx.Client, path: str, body: Any) -> httpx.Response:
    response = client.post(served.url + path, json=body)
    assert response.status_code < 500, (body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
    return response


def described(served: Served, path: str, examples: int) -> None:
    """Bodies that the description allows."""
    import schemathesis  # here, for importing it takes seconds and every worker collects this file

    description = schemathesis.openapi.from_dict(published())
    with httpx.Client(timeout=30) as client:

        @seed(1)
        @settings(max_examples=examples, **QUIET)  # type: ignore[arg-type]
        @given(case=description[path]["POST"].as_strategy())
        def run(case: Any) -> None:
            body = {**case.body, "model": "tiny"} if isinstance(case.body, dict) else case.body
            send(served, client, path, body)

        run()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def nearly_right(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A good body with one or two fields replaced by anything."""
    good: dict[str, Any] = {
        "/v1/completions": {"prompt": "Hi"},
        "/tokenize": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": USER, "max_tokens": 9},
    }.get(path, {"messages": USER})
    model = published()["components"]["schemas"]
    name = published()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = sorted(model[name.rpartition("/")[2]]["properties"])
    return st.dictionaries(st.sampled_from(fields) | st.text(max_size=8), ANY, min_size=1, max_size=2).map(
        lambda change: {**good, **change}
    )


def damaged(served: Served, path: str, examples: int) -> None:
    with httpx.Client(timeout=30) as client:

        @seed(2)
        @settings(max_examples=examples, **QUIET)  # type: ignore[arg-type]
        @given(body=nearly_right(path))
        def run(body: dict[str, Any]) -> None:
            send(served, client, path, body)

        run()


@pytest.mark.parametrize("path", POSTED)
def test_bodies_that_the_description_allows_are_answered_or_refused(served: Served, path: str) -> None:
    described(served, path, 2)


@pytest.mark.parametrize("path", POSTED)
def test_bodies_with_a_wrong_field_are_answered_or_refused(served: Served, path: str) -> None:
    damaged(served, path, 15)


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTED)
def test_a_thousand_requests(served: Served, path: str) -> None:
    described(served, path, 80)
    damaged(served, path, 100)
    counts = {status: n for (where, status), n in served.server.desk.metrics.requests.items() if where == path}
    assert sum(counts.values()) >= 175  # the last one may not be counted yet
    assert set(counts) >= {200, 400}, "requests of both kinds"
    print(path, counts)
