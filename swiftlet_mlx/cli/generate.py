"""`generate`: one prompt, one reply, the figures on stderr or all of it as JSON."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, options
from .lines import valid
from .running import engine_for, peak_rss_bytes, versions

if TYPE_CHECKING:
    from swiftlet_mlx.engine import Engine, Stream
    from swiftlet_mlx.events import Event, Finish, FinishReason, Statistics
    from swiftlet_mlx.generation import Token
    from swiftlet_mlx.sampling import Sampling

DEFAULT_MAX_TOKENS = 256
EXAMPLE = 'Example: swiftlet-mlx generate demo --chat --prompt "What is the capital of Spain?"'


@options.sampled()
def generate(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt; - reads standard input.")
    ] = None,
    ids: Annotated[str | None, typer.Option("--ids", metavar="1,2,3", help="Raw token ids instead of text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: options.System = None,
    thinking: options.Thinking = None,
    max_tokens: options.MaxTokens = None,
    cache_gb: options.CacheGb = None,
    io: options.Io = "auto",
    warm: options.Warm = True,
    record_routes: Annotated[
        Path | None,
        typer.Option("--record-routes", metavar="FILE", help="Record which experts each step uses, to replay."),
    ] = None,
    sampling: dict[str, Any] = {},  # noqa: B006 - given by the decorator, never changed
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Continue a prompt, or with --chat answer it, and exit.

    Without sampling options the likeliest token is taken each time. The reply goes to stdout, figures to stderr.
    """
    from swiftlet_mlx.errors import OptionError
    from swiftlet_mlx.sampling import Sampling

    if (prompt is None) == (ids is None):
        raise OptionError("give either --prompt TEXT (- for standard input) or --ids 1,2,3")
    if prompt == "" and not (chat or system is not None or thinking is not None):
        raise OptionError("--prompt is empty; there is nothing to continue")
    if ids is not None and (chat or system is not None or thinking is not None):
        raise OptionError("--chat, --system and --thinking need text: give --prompt instead of --ids")
    chosen = Sampling().with_values(**sampling)
    numbers = options.token_ids(ids) if ids is not None else None
    text = valid(_standard_input() if prompt == "-" else prompt or "")
    system = valid(system) if system is not None else None
    chat = chat or system is not None or thinking is not None
    limit = max_tokens or DEFAULT_MAX_TOKENS
    with engine_for(
        model,
        cache_gb=cache_gb,
        trust_remote_code=trust_remote_code,
        with_text=numbers is None or None,
        quiet=quiet,
        verbose=verbose,
        prefix_cache_gb=0,
        io=io,
        warm=warm,
        routes=record_routes,
    ) as (engine, folder):
        if numbers is not None:
            stream = _continue_ids(engine, folder, numbers, limit, chosen)
        else:
            stream = _continue_text(engine, folder, text, chat, system, thinking, limit, chosen)
        said, statistics, finish = _follow(stream, show=numbers is None and not json)
        if numbers is not None and not json:
            console.write(",".join(map(str, statistics.ids)) + "\n")
        if json:
            if numbers is not None:
                said = engine.tokenizer.decode(list(statistics.ids)) if engine.tokenizer else None
            report = _report(engine, folder, said, statistics, finish)
            console.write(jsonlib.dumps(report, ensure_ascii=False) + "\n")
        cut = cut_off(finish, statistics, limit, said=said if numbers is None else None)
        if cut and not (quiet and said):  # an empty reply is explained even where nothing else is told
            console.say(cut)
        if not quiet:
            console.say(figures(engine, statistics))


def _standard_input() -> str:
    from swiftlet_mlx.errors import OptionError

    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise OptionError(
            f"standard input is not text in {error.encoding}: {error.reason} at byte {error.start}"
        ) from None


def cut_off(finish: Finish, s: Statistics, limit: int, said: str | None) -> str:
    """What to tell a person whose reply ended at the limit of tokens; nothing if it did not.

    Args:
        finish: how the reply ended.
        s: its figures.
        limit: the most tokens it might have.
        said: its text; None for token ids.
    """
    if finish.reason != "length":
        return ""
    if said == "" and s.generated_tokens:
        return (
            f"all {s.generated_tokens} tokens went into the model's thoughts, before an answer came; "
            "--max-tokens N allows more, --no-thinking goes without, where the model can"
        )
    if s.generated_tokens < limit:
        return f"cut off after {s.generated_tokens} tokens, where the context is full"
    return f"cut off after {s.generated_tokens} tokens; --max-tokens N allows more"


def figures(engine: Engine, s: Statistics) -> str:
    """The statistics of one reply in two lines."""
    import mlx.core as mx

    needed = s.counters.get("hits", 0) + s.counters.get("misses", 0)
    rate = f"{s.counters.get('hits', 0) / needed:.1%}" if needed else "all resident"
    pools = engine.model.pools
    return (
        f"prompt {s.prompt_tokens} tokens, {s.prefill_tokens_per_second:.1f} tok/s; "
        f"reply {s.generated_tokens} tokens, {s.decode_tokens_per_second:.1f} tok/s; "
        f"first token after {s.ttft_seconds:.2f} s\n"
        f"experts: hits {s.counters.get('hits', 0)}, misses {s.counters.get('misses', 0)} ({rate}), "
        f"read {console.size(s.counters.get('read_bytes', 0))}, cache {console.size(pools.nbytes)}; "
        f"peak memory {console.size(peak_rss_bytes())}, of it MLX {console.size(mx.get_peak_memory())}"
    )


class _Ids:
    """A consumer of tokens that are not to be turned into text."""

    thinking_tokens = 0

    def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
        return (), None

    def finish(self, reason: FinishReason) -> tuple[Sequence[Event], Finish]:
        from swiftlet_mlx.events import Finish

        return (), Finish(reason)


def _continue_ids(engine: Engine, folder: Path, ids: list[int], limit: int, sampling: Sampling) -> Stream:
    from swiftlet_mlx.config import read_config
    from swiftlet_mlx.defaults import read_json, stated_ends
    from swiftlet_mlx.detokenizer import end_ids
    from swiftlet_mlx.generation import Request

    stated = stated_ends(read_config(folder), read_json(folder / "generation_config.json"))
    ends = stated if engine.tokenizer is None else end_ids(engine.tokenizer, stated)
    return engine.submit(Request(ids=tuple(ids), consumer=_Ids(), max_tokens=limit, eos_ids=ends, sampling=sampling))


def _continue_text(
    engine: Engine,
    folder: Path,
    text: str,
    chat: bool,
    system: str | None,
    thinking: bool | None,
    limit: int,
    sampling: Sampling,
) -> Stream:
    from swiftlet_mlx.completion import Ask, Completions
    from swiftlet_mlx.messages import checked_messages

    completions = Completions(engine, folder)
    ask = Ask(sampling=sampling, max_tokens=limit, thinking=thinking)
    if not chat:
        return completions.text(text, ask)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    return completions.chat(checked_messages([*messages, {"role": "user", "content": text}]), ask)


def _follow(stream: Stream, show: bool) -> tuple[str | None, Statistics, Finish]:
    """Take a reply's events to the end, writing the answer as it comes."""
    from swiftlet_mlx.events import Finish, Statistics, TextDelta

    parts: list[str] = []
    statistics, finish = None, None
    for event in stream:
        if isinstance(event, TextDelta):
            parts.append(event.text)
            if show:
                console.write(event.text)
        elif isinstance(event, Statistics):
            statistics = event
        elif isinstance(event, Finish):
            finish = event
    if show:
        console.write("\n")
    assert statistics is not None, "every reply ends with Statistics and Finish"
    assert finish is not None
    return "".join(parts), statistics, finish


def _report(engine: Engine, folder: Path, text: str | None, s: Statistics, finish: Finish) -> dict[str, Any]:
    import mlx.core as mx

    pools = engine.model.pools
    first = s.prefill_counters
    hits, misses = s.counters["hits"], s.counters["misses"]
    return {
        "text": text,
        "ids": list(s.ids),
        "finish_reason": finish.reason,
        "prompt_tokens": s.prompt_tokens,
        "generated_tokens": s.generated_tokens,
        "ttft_seconds": s.ttft_seconds,
        "prefill": {
            "seconds": s.prefill_seconds,
            "tokens_per_second": s.prefill_tokens_per_second,
            "read_bytes": first.get("read_bytes", 0),
            "reads": first.get("reads", 0),
        },
        "decode": {
            "seconds": s.decode_seconds,
            "tokens_per_second": s.decode_tokens_per_second,
            "read_bytes": s.counters["read_bytes"] - first.get("read_bytes", 0),
            "reads": s.counters["reads"] - first.get("reads", 0),
        },
        "cache": {
            "slots": sum(p.n_slots for p in pools.layers.values()),
            "bytes": pools.nbytes,
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / (hits + misses) if hits + misses else 1.0,
        },
        "peak_rss_bytes": peak_rss_bytes(),
        "mlx_peak_bytes": mx.get_peak_memory(),
        "model": {
            "type": engine.model.model_type,
            "container": folder.name,
            "source": pools.source.origin,
        },
        "versions": versions(),
    }
