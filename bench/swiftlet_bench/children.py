"""One run in a process of its own: its peak memory is its own, and two engines are never loaded together.

Knows how to start `python -m swiftlet_bench one` and to read its answer. Invariant: a child that fails is an error
with its own last words, never a missing value.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlet_mlx.errors import SwiftletError

from .harness import Setting

TIMEOUT_SECONDS = 3600.0


class ChildFailed(SwiftletError):
    """A measurement in its own process ended with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child has measured. `output` names the tokens it generated, to see whether engines agree."""

    setting: Setting
    values: dict[str, float]
    output: str


def one(
    folder: Path,
    *,
    prompt_tokens: int,
    max_tokens: int,
    seed: int = 0,
    cache_gb: float | None = None,
    threads: int | None = None,
    stock: bool = False,
    cold: bool = False,
    warm_up: int = 0,
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Load a model in a new process, run one prompt, return what it said.

    Args:
        folder: A container or checkpoint folder.
        prompt_tokens: Length of the prompt.
        max_tokens: To generate.
        seed: Of the prompt.
        cache_gb: Slot pool in GB.
        threads: That read experts.
        stock: By mlx-lm alone.
        cold: Empty the page cache first.
        warm_up: Runs of other prompts before.
        more: Further arguments.
        environment: Variables added to the child's.

    Raises:
        ChildFailed: with the child's last words.
    """
    command = [sys.executable, "-m", "swiftlet_bench", "one", str(folder), "--prompt-tokens", str(prompt_tokens)]
    command += ["--max-tokens", str(max_tokens), "--seed", str(seed), "--warm-up", str(warm_up), *more]
    if cache_gb is not None:
        command += ["--cache-gb", f"{cache_gb:.9f}"]
    if threads is not None:
        command += ["--threads", str(threads)]
    command += ["--stock"] * stock + ["--cold"] * cold
    found = answer(command, environment=environment)
    return Answer(Setting(**found["setting"]), found["values"], found["output"])


def answer(
    command: Sequence[str], timeout: float = TIMEOUT_SECONDS, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command and parse the JSON object in the last line of its output.

    Args:
        command: Program and arguments.
        timeout: Seconds it may take.
        environment: Variables added to this process's.

    Raises:
        ChildFailed: it fails, takes too long, or says something else.
    """
    try:
        env = {**os.environ, **(environment or {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChildFailed(f"{command[0]} could not be run: {error}") from None
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:]
        raise ChildFailed(f"a measurement failed with exit code {done.returncode}: {' / '.join(said)}")
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ChildFailed(f"a measurement said {last[:200]!r} where a JSON object was expected")
    return found
