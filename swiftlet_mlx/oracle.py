"""Whether a streamed model computes what stock mlx-lm computes, on a model that may not fit in memory.

The streamed model answers a prompt greedily; then the whole text goes once through stock mlx-lm on the source
checkpoint, lazily loaded, each layer's experts dropped as soon as the layer is evaluated. Knows models, not files.
Invariant: never more than one stock layer's experts are in memory, and the two models are never there together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from ._compat import SwitchGLU, SwitchMLP
from .checkpoint import open_checkpoint
from .config import for_mlx_lm, read_config
from .errors import OptionError, StreamingUnsupported
from .loader import CONFIG_FAULTS, explained, load_streamed
from .qpack import is_container

Trace = list[NDArray[np.float32]]  # each layer's output [T, H], then the logits [T, V]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the oracle found. Differences are the largest absolute ones over all tokens.

    `first_difference` is the place in `ids` from which stock mlx-lm would have gone on otherwise, or None.
    """

    prompt_tokens: int
    ids: tuple[int, ...]
    layers: tuple[float, ...]
    logits: float
    first_difference: int | None

    @property
    def exact(self) -> bool:
        """Every number equal to the last bit."""
        return self.logits == 0 and not any(self.layers)

    @property
    def agrees(self) -> bool:
        """Every greedy token is the one that stock mlx-lm takes."""
        return self.first_difference is None


def compare(
    model: Path,
    source: Path,
    ids: Sequence[int],
    *,
    n_tokens: int = 32,
    cache_gb: float | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    warn: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare a streamed model with stock mlx-lm on its source checkpoint.

    Args:
        model: Container or checkpoint folder to be streamed.
        source: MLX checkpoint folder that stock mlx-lm can load.
        ids: Prompt tokens.
        n_tokens: Tokens to generate greedily.
        cache_gb: Slot pool in GB.
        progress: Called with layers done, layers in all, and what is being done.
        warn: Called with remarks about the files.

    Raises:
        OptionError: for an empty prompt, a token id the model does not have, or a source that is a container.
        SwiftletError: a model cannot be loaded.
    """
    if not ids or n_tokens < 1:
        raise OptionError("the oracle needs at least one prompt token and one token to generate")
    check_source(source)
    config = read_config(source)
    _check_ids(ids, {**config, **(config.get("text_config") or {})}.get("vocab_size"))
    streamed, _ = load_streamed(model, cache_gb=cache_gb, warn=warn)
    text = _greedy(streamed, list(ids), n_tokens)
    found = _trace(streamed, text, "streamed", progress)
    streamed.pools.close()
    del streamed
    mx.clear_cache()

    try:
        stock, _ = load_model(source, lazy=True, model_config=for_mlx_lm(config))
    except CONFIG_FAULTS as error:
        raise explained(source, config, error) from error
    expected = _trace(stock, text, "stock mlx-lm", progress)
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        raise StreamingUnsupported(
            f"{model} and {source} are not the same model: their layers differ in number or size"
        )
    differences = [float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)]
    choices = expected[-1].argmax(-1)  # [T]: what stock mlx-lm would say after each token
    wrong = [n for n in range(len(ids), len(text)) if choices[n - 1] != text[n]]
    return Comparison(
        prompt_tokens=len(ids),
        ids=tuple(text[len(ids) :]),
        layers=tuple(differences[:-1]),
        logits=differences[-1],
        first_difference=wrong[0] - len(ids) if wrong else None,
    )


def check_source(source: Path) -> None:
    """Refuse, before anything is loaded, a source that stock mlx-lm cannot load.

    Raises:
        OptionError: for a container, which stock mlx-lm does not know.
        SwiftletError: for a checkpoint that is not whole.
    """
    if is_container(source):
        raise OptionError(
            f"{source} is a container; --source is the MLX checkpoint folder that it was made from, for example a "
            "download of `hf download ORG/NAME`"
        )
    open_checkpoint(source)


def _check_ids(ids: Sequence[int], n_vocab: Any) -> None:
    """Ids are looked up without a check: one that is too large reads beyond the embedding, and may end the process."""
    bad = next((i for i in ids if i < 0 or (isinstance(n_vocab, int) and i >= n_vocab)), None)
    if bad is not None:
        raise OptionError(f"the prompt has token id {bad}; this model's are 0 to {n_vocab - 1}")


def _greedy(model: nn.Module, text: list[int], n_tokens: int) -> list[int]:
    """The prompt and what the model goes on with, token by token through a cache."""
    cache, feed = make_prompt_cache(model), text
    for _ in range(n_tokens):
        token = cast("int", mx.argmax(model(mx.array([feed]), cache=cache)[0, -1]).item())  # host synchronisation
        text, feed = [*text, token], [token]
    return text


def _trace(model: nn.Module, text: list[int], name: str, progress: Callable[[int, int, str], None]) -> Trace:
    """Run all tokens through a model once, keeping what every layer returns."""
    trace: Trace = []
    layers = _layer_list(model)
    total = len(layers)
    for index, layer in enumerate(layers):
        layers[index] = _Tap(layer, trace, lambda: progress(len(trace), total, name))
    logits = model(mx.array([text]))
    trace.append(_numbers(logits))
    return trace


class _Tap:
    """Stands where a decoder layer stood: calls it, evaluates, keeps the output, drops a stock layer's experts."""

    def __init__(self, layer: nn.Module, trace: Trace, done: Callable[[], None]) -> None:
        self.layer, self.trace, self.done = layer, trace, done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.layer(*args, **kwargs)
        self.trace.append(_numbers(output[0] if isinstance(output, tuple) else output))
        for _, module in self.layer.named_modules():
            if type(module) in (SwitchGLU, SwitchMLP):  # a streamed layer is of another class and has nothing to drop
                for child in module.children().values():
                    for part in list(child):
                        if isinstance(child[part], mx.array):
                            child[part] = mx.zeros((1,))
        mx.clear_cache()
        self.done()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _layer_list(model: nn.Module) -> list[Any]:
    """The list of decoder layers that the model iterates over."""
    n = len(model.layers)
    for _, module in model.named_modules():
        layers = module.get("layers")
        if isinstance(layers, list) and len(layers) == n:
            return layers
    raise StreamingUnsupported(f"{model.model_type}: its decoder layers are not in one list")


def _numbers(array: mx.array) -> NDArray[np.float32]:
    """A `[1, T, n]` array as float32 numbers `[T, n]`. Host synchronisation."""
    return np.array(array[0].astype(mx.float32))
