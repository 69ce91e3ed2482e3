"""What a model's own files say about generation: end tokens and how to sample.

Knows config.json and generation_config.json, nothing else. Invariant: a file that is there but cannot be read
is an error by name, never the same as a file that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, SamplingError
from .jsonfile import object_if_there
from .sampling import Sampling

# Qwen's advice for its thinking and instruct models, for checkpoints whose files say nothing.
THINKING = Sampling(temperature=0.6, top_p=0.95, top_k=20)
INSTRUCT = Sampling(temperature=0.7, top_p=0.8, top_k=20)

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file.

    Raises:
        ConfigError: it is there but is not a JSON object.
    """
    advice = "it may have been cut while copying, fetch it again"
    return object_if_there(path, ConfigError, advice=advice) or {}


def sampling_defaults(generation_config: Mapping[str, Any], *, thinking: bool, source: str = "") -> Sampling:
    """How to sample when the user does not say.

    Args:
        generation_config: the file's content, empty if there is none.
        thinking: whether replies begin with thoughts; chooses between Qwen's two recommendations.
        source: where the values come from, for the message.

    Raises:
        ConfigError: the file asks for something impossible.
    """
    stated = {n: generation_config[n] for n in _NAMES if generation_config.get(n) is not None}
    if generation_config.get("do_sample") is False:
        stated["temperature"] = 0.0
    try:
        if not stated.keys() & {"temperature", "top_p", "top_k", "min_p"}:
            return (THINKING if thinking else INSTRUCT).with_values(**stated)
        return Sampling(temperature=1.0).with_values(**stated)
    except SamplingError as error:
        raise ConfigError(f"{source or 'generation_config.json'}: {error}") from error


def stated_ends(*configs: Mapping[str, Any]) -> frozenset[int]:
    """The ids that a model's files say end a turn.

    Args:
        configs: config.json and generation_config.json. The first may keep its own in `text_config`; either may name
            one id or a list.
    """
    ids: set[int] = set()
    for config in configs:
        text = config.get("text_config")
        for holder in (config, text if isinstance(text, Mapping) else {}):
            stated = holder.get("eos_token_id")
            ids |= {i for i in (stated if isinstance(stated, list) else [stated]) if type(i) is int and i >= 0}
    return frozenset(ids)
