"""Who may use the server: names, origins, keys, limits. Defaults are for one person on one machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import CLIENT, USER, Served, scripted, serving

from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.server.process import listen
from swiftlet_mlx.server.settings import Settings, is_loopback

KEY = "sk-a key of 1"


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Served]:
    with serving(scripted("Hello"), allow_hosts=("box.example",), max_messages=20) as served:
        yield served


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(scripted("Hello"), api_key=KEY, allow_origins=("https://ui.example",)) as served:
        yield served


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("192.168.1.5", 200),
        ("LocalHost", 200),
        ("box.example:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_a_name_that_is_not_ours_is_turned_away(open_to_all: Served, host: str, status: int) -> None:
    """DNS rebinding: a page at evil.example whose name now points here still says evil.example."""
    assert open_to_all.get("/v1/models", headers={"host": host}).status_code == status
    assert open_to_all.get("/", headers={"host": host}).status_code == status


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "file://"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_other_origins_are_turned_away(open_to_all: Served, origin: str, method: str) -> None:
    response = CLIENT.request(
        method, open_to_all.url + "/v1/models", headers={"origin": origin, "access-control-request-method": "POST"}
    )
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


def test_the_servers_own_page_may_use_it(open_to_all: Served) -> None:
    own = {"origin": open_to_all.url}
    assert open_to_all.post("/v1/chat/completions", {"messages": USER}, headers=own).status_code == 200


def test_an_allowed_origin_gets_cors(locked: Served) -> None:
    origin = {"origin": "https://ui.example"}
    preflight = CLIENT.options(
        locked.url + "/v1/chat/completions",
        headers={**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"},
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    got = locked.get("/v1/models", headers={**origin, "authorization": f"Bearer {KEY}"})
    assert got.status_code == 200
    assert got.headers["access-control-allow-origin"] == "https://ui.example"
    assert got.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": "Bearer"},
        {"x-api-key": "wrong"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/v1/nothing", "/tokenize"])
def test_without_the_key_nothing_is_told(locked: Served, headers: dict[str, str], path: str) -> None:
    response = locked.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_the_key_opens_in_either_header(locked: Served) -> None:
    import openai

    assert locked.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    assert locked.get("/v1/models", headers={"authorization": f"bearer  {KEY}"}).status_code == 200
    assert locked.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
    for path in ("/", "/health"):
        assert locked.get(path).status_code == 200
    with openai.OpenAI(base_url=locked.url + "/v1", api_key=KEY) as client:
        assert client.models.list().data[0].id == "tiny"
    with (
        openai.OpenAI(base_url=locked.url + "/v1", api_key="no", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_too_many_messages_are_refused(open_to_all: Served) -> None:
    response = open_to_all.chat(messages=USER * 21)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "too_many_messages"


def test_no_response_names_the_software_below_or_a_path_of_this_machine(open_to_all: Served) -> None:
    response = open_to_all.chat(model="/etc/passwd")
    assert "server" not in response.headers
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_loopback_addresses_are_known(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_a_used_port_is_told() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(OptionError, match="--port"):
        listen("127.0.0.1", first.getsockname()[1])


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(OptionError, match="--host"):
        listen("not an address", 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"api_key": ""},
        {"api_key": "a\nb"},
        {"max_waiting": -1},
        {"heartbeat_seconds": 0},
        {"drain_seconds": -1},
        {"max_tokens": 0},
        {"allow_origins": ("example.org",)},
        {"sampling": {"temperature": 99}},
    ],
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        Settings(model_id="m", **bad)  # type: ignore[arg-type]
