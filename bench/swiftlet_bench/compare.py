"""Engines side by side on the same prompts, in turn: stock mlx-lm, this project at several budgets, servers, programs.

Knows how to run each; formats nothing. Invariants: every engine gets the same prompts in the same rounds; engines on
this machine run one at a time, each in a process of its own; ratios are taken round by round. A server or program is
measured from outside and has no counters: what is not known is absent, not zero.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from swiftlet_mlx.config import read_config, text_config
from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.loader import has_tokenizer, load_text
from swiftlet_mlx.units import size

from . import children, machine, prompts
from .endpoint import Endpoint
from .harness import Setting, Spread, in_turn, model_hash, ratio
from .report import Row, today
from .synthetic import is_synthetic

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """What was found.

    `ratios` are decode speeds against the first row's, round by round. `same_output` tells which engines generated the
    same tokens as the first one that reports them, in every round; one measured from outside is not in it.
    """

    rows: list[Row]
    ratios: Mapping[str, Spread]
    same_output: Mapping[str, bool]


@dataclass(slots=True)
class _Case:
    """An engine and what it has said so far."""

    run: Callable[[_Prompt, _Case], Values]
    setting: Setting | None = None
    outputs: list[str] = field(default_factory=list)
    turn: int = 0
    prompt_tokens: int = 0
    """As the engine counts them, where it does."""
    version: str = ""
    cache_bytes: int = 0
    """Of experts in memory, where a program says so."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One round's prompt in every form an engine may want."""

    ids_file: Path
    text_file: Path
    ids: tuple[int, ...]
    text: str


def measure(
    model: Path,
    *,
    cache_gb: Sequence[float] = (),
    source: Path | None = None,
    urls: Mapping[str, Endpoint] | None = None,
    programs: Mapping[str, str] | None = None,
    prompt_tokens: int = 64,
    max_tokens: int = 64,
    rounds: int = 3,
    cold: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Compared:
    """Measure engines in turn.

    Args:
        model: What this project runs: a container or checkpoint folder.
        cache_gb: Its budgets, one case each.
        source: The same model as an MLX checkpoint, for stock mlx-lm with everything in memory; None leaves it out.
        urls: Name to server.
        programs: Name to a command line that prints one JSON object of values last, `cache_bytes` and `version` among
            them if it likes; `{model}`, `{ids}` (a file with a JSON list), `{text}` (a file) and `{tokens}` in it are
            replaced.
        prompt_tokens: Length of the prompts, of which every round has another.
        max_tokens: To generate.
        rounds: That count.
        cold: Empty the page cache before each run of an engine on this machine.
        progress: Called with runs done, runs in all, and the engine.

    Raises:
        OptionError: nothing to compare.
        ChildFailed, EndpointFailed: an engine failed.
    """
    cases: dict[str, _Case] = {}
    if source is not None:
        cases["mlx-lm, all resident"] = _Case(_child(source, max_tokens, None, True, cold))
    for gb in cache_gb:
        cases[f"swiftlet-mlx, {size(gb * 1e9)}"] = _Case(_child(model, max_tokens, gb, False, cold))
    for name, endpoint in (urls or {}).items():
        cases[name] = _Case(_server(endpoint, max_tokens))
    for name, command in (programs or {}).items():
        cases[name] = _Case(_program(command, model, max_tokens))
    if len(cases) < 2:
        raise OptionError("at least two engines are needed: give several --cache-gb, --source, --url or --program")
    with TemporaryDirectory() as folder:
        made = _prompts(model, Path(folder), prompt_tokens, rounds + 1)

        def run(case: _Case) -> Callable[[], Values]:
            def once() -> Values:
                case.turn += 1
                return case.run(made[case.turn - 1], case)

            return once

        found = in_turn({name: run(case) for name, case in cases.items()}, rounds, 1, progress=progress)
    outside = _setting_from_outside(model, made[0], max_tokens)
    rows = []
    for name, case in cases.items():
        counted = case.prompt_tokens or outside.prompt_tokens
        setting = case.setting or replace(
            outside, engine=name, prompt_tokens=counted, versions=case.version, cache_bytes=case.cache_bytes
        )
        rows.append(Row(name, replace(setting, n=rounds, warm_up=1), found[name], today()))
    key = "decode_tokens_per_second"
    first = rows[0].values
    ratios = {r.case: ratio(r.values[key], first[key]) for r in rows if key in r.values and key in first}
    said = {name: case.outputs for name, case in cases.items() if case.outputs}
    expected = next(iter(said.values()), [])
    return Compared(rows, ratios, {name: outputs == expected for name, outputs in said.items()})


def _child(
    folder: Path, max_tokens: int, cache_gb: float | None, stock: bool, cold: bool
) -> Callable[[_Prompt, _Case], Values]:
    def run(prompt: _Prompt, case: _Case) -> Values:
        got = children.one(
            folder,
            prompt_tokens=len(prompt.ids),
            max_tokens=max_tokens,
            cache_gb=cache_gb,
            stock=stock,
            cold=cold,
            warm_up=1,
            more=("--prompt-file", str(prompt.ids_file)),
        )
        case.setting = case.setting or got.setting
        case.outputs.append(got.output)
        return got.values

    return run


def _server(endpoint: Endpoint, max_tokens: int) -> Callable[[_Prompt, _Case], Values]:
    def run(prompt: _Prompt, case: _Case) -> Values:
        values, case.prompt_tokens = endpoint.complete(prompt.text, max_tokens)
        return values

    return run


def _program(command: str, model: Path, max_tokens: int) -> Callable[[_Prompt, _Case], Values]:
    def run(prompt: _Prompt, case: _Case) -> Values:
        places = {"model": model, "ids": prompt.ids_file, "text": prompt.text_file, "tokens": max_tokens}
        words = [word.format(**places) for word in shlex.split(command)]
        said = children.answer(words)
        values = {k: float(v) for k, v in said.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        if "decode_tokens_per_second" not in values:
            raise children.ChildFailed(f"{words[0]} did not report decode_tokens_per_second")
        case.version = str(said.get("version", ""))
        case.cache_bytes = int(values.pop("cache_bytes", 0))
        if isinstance(said.get("ids"), list):
            case.outputs.append(prompts.digest(said["ids"]))
        return values

    return run


def _prompts(model: Path, folder: Path, n: int, count: int) -> list[_Prompt]:
    config = read_config(model)
    tokenizer = load_text(model, config) if has_tokenizer(model) else None
    vocab = int(text_config(config)["vocab_size"])
    made = []
    for seed in range(count):
        ids = prompts.ids(n, vocab, None if is_synthetic(config) else tokenizer, seed)
        text = tokenizer.decode(ids) if tokenizer is not None else ""
        files = folder / f"{seed}.json", folder / f"{seed}.txt"
        files[0].write_text(json.dumps(ids))
        files[1].write_text(text)
        made.append(_Prompt(*files, tuple(ids), text))
    return made


def _setting_from_outside(model: Path, prompt: _Prompt, max_tokens: int) -> Setting:
    """For an engine that does not say: this machine, this model, and nothing about its memory."""
    here = machine.machine()
    return Setting(
        machine=here.slug, chip=here.chip, system=here.system, backend=here.backend, device=here.device,
        memory_bytes=here.memory_bytes, versions="", commit=machine.commit(), engine="", model=model.name,
        model_hash=model_hash(model), synthetic=is_synthetic(read_config(model)), cache_bytes=0, threads=0,
        io="", page_cache="unknown", prompt_tokens=len(prompt.ids), prompt_hash=prompts.digest(prompt.ids),
        max_tokens=max_tokens, warm_up=1, n=0,
    )  # fmt: skip
