"""Replies held to a grammar: JSON where `response_format` asks for it, tool calls where they must be right.

Knows grammars and tokens; the masks come from llguidance, an optional package (`pip install 'swiftlet-mlx[json]'`;
chosen because it computes masks in Rust from a tokenizer alone, has no dependencies and needs no PyTorch). Invariant:
inside a held stretch only tokens that keep the text within its grammar can be drawn; a grammar that cannot be
compiled is the client's error, told before anything is generated.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from swiftlet_mlx.completion import Completions, Processor

from .callgrammar import JSON_OPTIONS, calls_grammar
from .failures import ApiError, unsupported
from .protocol import ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

INSTALL = "install it with: pip install 'swiftlet-mlx[json]'"

_tokenizers: WeakKeyDictionary[Completions, LLTokenizer] = WeakKeyDictionary()
_lock = threading.Lock()


class Constraint(Protocol):
    """What a reply is held to."""

    def processor(self, completions: Completions, *, thinking: bool, given: str) -> Processor:
        """A logits processor for one reply.

        Args:
            completions: the model.
            thinking: the reply begins inside a thought, which stays free.
            given: text after the opening tag of a tool call that the reply was made to begin with.

        Raises:
            ApiError: the grammar cannot be compiled.
        """


def constrained(wanted: ResponseFormat | None, *, tools: bool = False) -> Constraint | None:
    """What a response format asks for; None for plain text.

    Raises:
        ApiError: it cannot be honoured here.
    """
    if wanted is None or wanted.type == "text":
        return None
    if not _installed():
        raise unsupported("response_format", f": {wanted.type} needs the package llguidance; {INSTALL}")
    if tools:
        raise unsupported("response_format", ": not together with tools, for a call is not in that format")
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else {"type": "object"}
    return JsonReply(schema)


def constrained_calls(
    tools: Sequence[Mapping[str, Any]], strict: Sequence[bool], *, forced: bool, field: str
) -> Constraint | None:
    """What keeps tool calls right: strict ones to their schemas, forced ones to their form; None if none asks for it.

    Raises:
        ApiError: a tool is strict, and that cannot be honoured here.
    """
    if not any(strict) and not forced:
        return None
    if not _installed():
        if any(strict):
            raise unsupported(field, f": strict needs the package llguidance; {INSTALL}")
        return None  # a forced call is begun for the model either way
    return ToolCalls(tuple(tools), tuple(strict), field)


def _installed() -> bool:
    return find_spec("llguidance") is not None


@dataclass(frozen=True, slots=True)
class JsonReply:
    """The whole answer is JSON of a schema."""

    schema: Mapping[str, Any]

    def processor(self, completions: Completions, *, thinking: bool, given: str) -> Processor:
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(self.schema), overrides=JSON_OPTIONS)
        except ValueError as error:
            raise _refused(str(error), "response_format") from None
        held = _Held(completions, _compiled(completions, grammar, "response_format"))
        held.wakes_at = _token(completions, completions.markup.think_end) if thinking else None
        return held.begin("")


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Whatever stands between the tags of a tool call is one."""

    tools: tuple[Mapping[str, Any], ...]
    strict: tuple[bool, ...]
    field: str

    def processor(self, completions: Completions, *, thinking: bool, given: str) -> Processor:
        from llguidance import LLMatcher

        parser = getattr(completions.tokenizer, "tool_parser", None)
        grammar = calls_grammar(getattr(parser, "__module__", ""), self.tools, self.strict)
        enter = _token(completions, completions.markup.tool_start)
        leave = _token(completions, completions.markup.tool_end)
        if grammar is None or enter is None or leave is None:
            if any(self.strict):
                raise unsupported(self.field, ": strict calls are not known for this model's format")
            return _free
        held = _Held(completions, _compiled(completions, LLMatcher.grammar_from_lark(grammar), self.field))
        held.wakes_at = _token(completions, completions.markup.think_end) if thinking else None
        held.enters_at, held.leaves_at = enter, leave
        return held.begin(given)


def _free(generated: list[int], logits: mx.array) -> mx.array:
    return logits


class _Held:
    """The state of one reply: waiting for its stretch to begin, or inside it. Called on the engine thread."""

    def __init__(self, completions: Completions, grammar: LLMatcher) -> None:
        self._tokenizer = _tokenizer_of(completions)
        self._ends = sorted(completions.eos_ids)
        self._grammar = grammar
        self._inside: LLMatcher | None = None
        self._awake = True
        self._seen = 0
        self.wakes_at: int | None = None
        self.enters_at: int | None = None
        self.leaves_at: int | None = None

    def begin(self, given: str) -> _Held:
        """Take the first stretch up, if it begins with the reply."""
        self._awake = self.wakes_at is None
        if self._awake and (self.enters_at is None or given):
            self._enter()
            assert self._inside is not None
            self._inside.consume_tokens(self._tokenizer.tokenize_str(given))
        return self

    def __call__(self, generated: list[int], logits: mx.array) -> mx.array:
        for token in generated[self._seen :]:
            self._take(token)
        self._seen = len(generated)
        if self._inside is None:
            return logits
        allowed = np.zeros(logits.shape[-1], dtype=bool)
        known = np.frombuffer(self._inside.compute_logit_bias(), dtype=np.uint8)[: len(allowed)]
        allowed[: len(known)] = known > 0
        if self.leaves_at is not None:
            allowed[[e for e in self._ends if e < len(allowed)]] = False
            allowed[self.leaves_at] = self._inside.is_accepting()
        if not allowed.any():
            raise RuntimeError(f"no token continues the reply within its grammar: {self._inside.get_error()}")
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _take(self, token: int) -> None:
        if self._inside is not None:
            if token == self.leaves_at:
                self._inside = None
            else:
                self._inside.consume_token(token)
        elif not self._awake:
            if token == self.wakes_at:
                self._awake = True
                if self.enters_at is None:
                    self._enter()
        elif token == self.enters_at:
            self._enter()

    def _enter(self) -> None:
        self._inside = self._grammar.deep_copy()


def _compiled(completions: Completions, grammar: str, field: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(_tokenizer_of(completions), grammar, log_level=0)
    if matcher.is_error():
        raise _refused(matcher.get_error(), field)
    return matcher


def _refused(why: str, field: str) -> ApiError:
    return ApiError(400, f"{field}: the schema cannot be enforced: {why}", param=field, code="invalid_schema")


def _tokenizer_of(completions: Completions) -> LLTokenizer:
    """Made once a model: about a second for a large vocabulary."""
    from llguidance import LLTokenizer

    with _lock:
        if completions not in _tokenizers:
            backend = getattr(completions.tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise unsupported("response_format", ": this model's tokenizer is of a kind that cannot be held")
            ends = [i for i in sorted(completions.eos_ids) if i < len(completions.tokenizer)]
            _tokenizers[completions] = LLTokenizer(backend.to_str(), eos_token=ends)
        return _tokenizers[completions]


def _token(completions: Completions, tag: str) -> int | None:
    """The id of a tag that is one token; None if it is not."""
    ids = completions.tokenizer.encode(tag, add_special_tokens=False) if tag else []
    return ids[0] if len(ids) == 1 else None
