"""How answers are made, as a person at the chat sets it: names, values as typed, values as shown.

Knows Ask and Sampling; no sessions, no screen. Invariant: what cannot be honoured is refused with the setting's name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swiftlet_mlx.completion import Ask
from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.sampling import Sampling

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens",
)  # fmt: skip
NAMES = (*SAMPLING, "max_tokens", "sentence_end", "thinking", "thoughts")
_WHOLE = ("top_k", "seed", "min_tokens", "max_tokens")


def check(name: str) -> None:
    """Refuse a name that no setting has.

    Raises:
        OptionError: with the name that may have been meant.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        raise OptionError(f"There is no setting {name!r}." + (f" Did you mean {near[0]}?" if near else ""))


def changed(ask: Ask, defaults: Sampling, name: str, value: str) -> Ask:
    """How answers are made from now on.

    Args:
        ask: how they have been made.
        defaults: the model's own sampling.
        name: one of NAMES but `thoughts`, which is about the screen.
        value: as typed; `auto` is the default.

    Raises:
        OptionError: the value is none for this setting.
    """
    if name == "thinking":
        return replace(ask, thinking=choice(name, value, {"on": True, "off": False, "auto": None}))
    if name == "sentence_end":
        return replace(ask, sentence_end=choice(name, value, {"on": True, "off": False, "auto": False}))
    if name == "max_tokens":
        return replace(ask, max_tokens=None if value == "auto" else int(_number(name, value)))
    new: Any = getattr(defaults, name) if value == "auto" else _number(name, value)
    values: dict[str, Any] = {name: new}
    return replace(ask, sampling=replace(ask.sampling or defaults, **values))


def shown(ask: Ask, defaults: Sampling) -> dict[str, str]:
    """Every setting but `thoughts` as text, in the order of NAMES."""
    sampling = ask.sampling or defaults
    values = {name: getattr(sampling, name) for name in SAMPLING} | {
        "max_tokens": ask.max_tokens,
        "sentence_end": "on" if ask.sentence_end else "off",
        "thinking": {True: "on", False: "off", None: "auto"}[ask.thinking],
    }
    return {name: "auto" if value is None else str(value) for name, value in values.items()}


def choice(name: str, value: str, choices: Mapping[str, Any]) -> Any:
    """What a word stands for.

    Raises:
        OptionError: it is none of the choices.
    """
    if value not in choices:
        raise OptionError(f"{name} is one of {', '.join(choices)}, not {value!r}.")
    return choices[value]


def _number(name: str, value: str) -> float | int:
    try:
        return int(value) if name in _WHOLE else float(value)
    except ValueError:
        kind = "whole number" if name in _WHOLE else "number"
        raise OptionError(f"{name} {value!r} is not a {kind}.") from None
