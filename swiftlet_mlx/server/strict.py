"""The base of every request model: null means absent, and what is not known is refused by name.

Knows pydantic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """A JSON object with known fields. Numbers are numbers: no text or truth value is turned into one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are not honoured, with the values that ask for nothing and are therefore let by."""

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None and not _asks_nothing(v, cls.harmless.get(k, ()))}


def _asks_nothing(value: Any, values: tuple[Any, ...]) -> bool:
    # 0 == False in Python, but not for a client
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


class Open(Strict):
    """An object whose other fields are let by unseen, because they change nothing that a model reads."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
