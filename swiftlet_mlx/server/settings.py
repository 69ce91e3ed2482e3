"""What a server was told at its start. Frozen values, checked when they are made; knows nothing of HTTP libraries."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve.

    Args:
        model_id: the name in `/v1/models`.
        aliases: further names that requests may use.
        host: the address or name that is listened on.
        api_key: what clients must show; None lets everyone in.
        allow_origins: web pages of other origins that may use the server; `*` is any.
        allow_hosts: DNS names besides `host` and localhost that the server may be called by.
        max_waiting: requests that may wait while one is served; more are told to come back.
        max_tokens: reply length where a request does not say; None takes the library's default.
        sampling: sampling values where a request does not say.
        thinking: whether replies begin with thoughts where a request does not say; None leaves it to the template.
        heartbeat_seconds: silence in a stream after which a sign of life is sent; None sends none.
        drain_seconds: how long running replies may take to end once the server was asked to stop.
        max_body_bytes: largest request body.
        max_bodies_bytes: all request bodies together that are being received.
        max_messages: longest list of messages.
        body_seconds: how long a request body may take to arrive.
        header_seconds: how long a request's header may take.
        stall_seconds: how long a client may leave its answer unread before it is cut off.
        max_connections: open connections.
    """

    model_id: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_waiting: int = 32
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    heartbeat_seconds: float | None = 15.0
    drain_seconds: float = 30.0
    max_body_bytes: int = 8_000_000  # a million tokens of text, escapes and all
    max_bodies_bytes: int = 64_000_000
    max_messages: int = 4096
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    stall_seconds: float = 60.0
    max_connections: int = 512  # importing mlx_lm leaves 2048 file descriptors

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.strip() and self.api_key.isprintable()):
            raise OptionError("The API key is empty or has characters that cannot be sent in a header.")
        if self.max_waiting < 0:
            raise OptionError(f"--max-waiting is {self.max_waiting}; it must be 0 or more.")
        if self.heartbeat_seconds is not None and self.heartbeat_seconds <= 0:
            raise OptionError(f"A heartbeat every {self.heartbeat_seconds} seconds is none; leave it out instead.")
        if self.drain_seconds < 0:
            raise OptionError(f"--drain-seconds is {self.drain_seconds}; it must be 0 or more.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise OptionError(f"--max-tokens is {self.max_tokens}; it must be 1 or more.")
        for origin in self.allow_origins:
            if origin != "*" and "://" not in origin:
                raise OptionError(f"--allow-origin {origin!r} is no origin; write for example https://example.org")
        Sampling().with_values(**self.sampling)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a request may use for the model."""
        return (self.model_id, *self.aliases, "default")


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
