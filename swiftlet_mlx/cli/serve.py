"""`serve`: one model behind OpenAI's API, until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, options
from .care import cared_for
from .running import DEMO_LINE, counters, opening, say_plan

if TYPE_CHECKING:
    from swiftlet_mlx.server.process import Server

DAY = 86400.0
EXAMPLE = "Example: swiftlet-mlx serve demo --port 8080"
KEY_VARIABLE = "SWIFTLET_MLX_API_KEY"  # a key on the command line can be read by other users of the machine


@options.sampled(*options.FILTERS)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=options.MODEL_HELP)] = "demo",
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="N", help="0 takes any free port.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar=KEY_VARIABLE, help="Clients must show this key."),
    ] = None,
    no_api_key: Annotated[
        bool, typer.Option("--no-api-key", help="Let everyone in who can reach an address other than this machine's.")
    ] = False,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Another name for the model. Repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", metavar="URL", help="Web pages that may use the server; * is any. Repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A DNS name the server is reached by. Repeatable."),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option("--max-waiting", min=0, metavar="N", help="Requests that may wait; more are told to come back."),
    ] = 32,
    heartbeat: Annotated[
        float,
        typer.Option(
            "--heartbeat", min=0, max=DAY, metavar="SECONDS", help="Sign of life after silence in a stream; 0: none."
        ),
    ] = 15.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds",
            min=0,
            max=DAY,
            metavar="SECONDS",
            help="How long replies may still run when told to stop.",
        ),
    ] = 30.0,
    context: Annotated[
        int | None, typer.Option("--context", min=1, metavar="TOKENS", help="Longest prompt plus reply.")
    ] = None,
    prefix_cache_gb: Annotated[
        float | None,
        typer.Option(
            "--prefix-cache-gb", min=0, max=1e6, metavar="GB", help="Memory for past conversations; 0 keeps none."
        ),
    ] = None,
    thinking: options.Thinking = None,
    max_tokens: options.MaxTokens = None,
    cache_gb: options.CacheGb = None,
    io: options.Io = "auto",
    warm: options.Warm = True,
    sampling: dict[str, Any] = {},  # noqa: B006 - given by the decorator, never changed
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Serve a model to OpenAI and Anthropic clients and a web page.

    It runs until Ctrl-C or SIGTERM. Sampling options are defaults for requests that do not say.
    """
    from swiftlet_mlx.engine import Engine
    from swiftlet_mlx.errors import OptionError
    from swiftlet_mlx.locate import DEMO, find_model
    from swiftlet_mlx.server.process import listen, url
    from swiftlet_mlx.server.process import serve as run
    from swiftlet_mlx.server.settings import Settings, is_loopback

    if not (api_key or no_api_key or is_loopback(host)):
        raise OptionError(
            f"--host {host} can be reached from other machines, so clients must show a key: give one with --api-key or "
            f"{KEY_VARIABLE}, or insist with --no-api-key"
        )
    settings = Settings(
        model_id=_model_id(model),
        aliases=tuple(alias or ()),
        host=host,
        api_key=api_key or None,
        allow_origins=tuple(allow_origin or ()),
        allow_hosts=tuple(allow_host or ()),
        max_waiting=max_waiting,
        heartbeat_seconds=heartbeat or None,
        drain_seconds=drain_seconds,
        max_tokens=max_tokens,
        thinking=thinking,
        sampling=sampling,
    )
    folder = find_model(model)
    remark = (lambda text: None) if quiet else console.warn
    sock = listen(host, port)  # before the model is loaded: a used port is told at once
    console.say(f"Listening on {url(sock)} (loading {settings.model_id})")
    if model == DEMO and not quiet:
        console.say(DEMO_LINE)

    def ready(server: Server) -> None:
        if verbose:
            say_plan(engine)
        if not quiet:
            console.say(f"Ready. Page: {url(sock)}/   API: {url(sock)}/v1   Ctrl-C stops.")

    engine_options = {} if prefix_cache_gb is None else {"prefix_cache_gb": prefix_cache_gb}
    with (
        sock,
        Engine(
            opening(folder, cache_gb, trust_remote_code, True, remark, io),
            counters=counters,
            context_tokens=context,
            **engine_options,  # type: ignore[arg-type]  # one option, of its type
        ) as engine,
        cared_for(engine, folder, warm=warm),
    ):
        run(engine, settings, sock, folder=folder, say=None if quiet else console.say, ready=ready)


def _model_id(model: str) -> str:
    """The name clients use: what the user typed, unless that is a path."""
    path = Path(model).expanduser()
    name = path.resolve().name if path.is_dir() else model
    return name.removesuffix(".qpack") or "model"
