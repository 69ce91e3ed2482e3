"""A model folder becomes (model, tokenizer) with streamed experts; the drop-in for `mlx_lm.load`.

Built on mlx-lm's own loader: a hook hands it a subclass of the stock model whose constructor swaps the switch layers
for streamed ones and whose `sanitize` keeps expert tensors out. Invariant: experts are never loaded in full. Where
streaming cannot be used, loading stops and says why.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from . import memory
from ._compat import SwitchGLU, SwitchMLP, get_model_classes
from .config import ModelConfig, for_mlx_lm, read_config
from .defaults import read_json, stated_ends
from .delta import chunked_by_default, use_chunked_delta
from .errors import ConfigError, ModelNotFound, StreamingUnsupported
from .governor import Governor, Search, Trial
from .layer_major import use_layer_major
from .locate import find_model
from .moe import foresee, overlap_shared_experts, stream
from .pools import Pools
from .qpack import DENSE, Container
from .read_threads import ReadThreads
from .reader import IO, IO_THREADS, CheckpointSource, ContainerSource, open_source
from .units import size

SHIM = "swiftlet_mlx_model.py"
# Models whose forward pass builds a graph and evaluates nothing of it, as read in mlx-lm 0.32.2.
GRAPH_ONLY = {f"mlx_lm.models.{name}" for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_moe")}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# What mlx-lm's constructors raise over a config.json with impossible values.
CONFIG_FAULTS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    cache_gb: float | None = None,
    context_tokens: int | None = None,
    io: IO = "cached",
    threads: int = IO_THREADS,
    warn: Callable[[str], None] | None = None,
) -> Any:
    """Load a model whose routed experts stay on disk. Arguments and result are those of `mlx_lm.load`.

    Args:
        path_or_hf_repo: A container, an MLX checkpoint folder, the name of an installed model, or `demo`.
        tokenizer_config: Settings for the tokenizer.
        model_config: Settings that replace those of config.json.
        adapter_path: LoRA adapters for the dense part.
        lazy: Leave dense weights unevaluated until they are used.
        return_config: Return the config as a third item.
        revision: Revision of a hub model.
        trust_remote_code: Run Python files of the model folder. They are never run otherwise.
        cache_gb: Slot pool in GB (10^9 bytes); None takes what the machine has free and nothing else needs.
        context_tokens: Length of conversation to keep memory free for; None takes a moderate one.
        io: `cached` leaves experts in the system's page cache, `direct` does not.
        threads: Threads that read experts.
        warn: Called with each remark about the files; None drops them.

    Returns:
        `(model, tokenizer)` or `(model, tokenizer, config)`. `model.pools` holds the slot pools and their statistics.

    Raises:
        SwiftletError: the subclass says what is wrong, the message what to do.
    """
    folder = find_model(path_or_hf_repo, revision=revision)
    model, config = load_streamed(
        folder,
        cache_gb=cache_gb,
        context_tokens=context_tokens,
        io=io,
        threads=threads,
        lazy=lazy,
        model_config=model_config,
        trust_remote_code=trust_remote_code,
        warn=warn,
    )
    if adapter_path is not None:
        model = load_adapters(model, adapter_path)
        model.eval()
    tokenizer = load_text(folder, config, tokenizer_config, trust_remote_code)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_streamed(
    folder: Path,
    *,
    cache_gb: float | None = None,
    context_tokens: int | None = None,
    io: IO = "cached",
    threads: int = IO_THREADS,
    lazy: bool = False,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    warn: Callable[[str], None] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model alone, without a tokenizer, from a folder that is there. The arguments are those of `load`.

    Returns:
        `(model, config)`.

    Raises:
        SwiftletError: as `load`.
    """
    builder = _Builder(folder, cache_gb, context_tokens, io, threads, warn)
    config = read_config(folder)
    overrides = {**for_mlx_lm(config), **(model_config or {})}
    stock = _classes_in(folder, config) if trust_remote_code else None
    try:
        model, config = load_model(
            folder,
            lazy=lazy,
            model_config=overrides,
            get_model_classes=lambda config: builder.classes(stock or get_model_classes(config)),
        )
    except CONFIG_FAULTS as error:
        builder.close()
        raise explained(folder, config, error) from error
    except BaseException:
        builder.close()
        raise
    builder.pools = None  # the model's class refers to the builder, and a class lives until garbage is collected
    return model, config


def load_text(
    folder: Path, config: dict[str, Any], tokenizer_config: dict[str, Any] | None = None, trust: bool = False
) -> TokenizerWrapper:
    """The tokenizer, with every end-of-turn id that config, generation config or tokenizer name.

    Args:
        folder: A model folder.
        config: Its parsed config.json.
        tokenizer_config: Settings for the tokenizer.
        trust: Run Python files of the folder.

    Raises:
        ModelNotFound: if the folder has no tokenizer.
        ConfigError: if tokenizer files or generation_config.json cannot be read; a truncated one of the latter would
            silently lose stop tokens.
    """
    if not has_tokenizer(folder):
        raise ModelNotFound(
            f"{folder}: no tokenizer here, so text cannot be turned into tokens. Copy tokenizer.json and "
            "tokenizer_config.json from the model's page, or give token ids: `swiftlet-mlx generate MODEL --ids 1,2,3`"
        )
    extra = {**(tokenizer_config or {})}
    if trust:
        extra.setdefault("trust_remote_code", True)
    ends = stated_ends(config, read_json(folder / "generation_config.json"))
    try:
        return load_tokenizer(folder, extra, eos_token_ids=sorted(ends) or None)
    except Exception as error:  # the tokenizers library raises bare ones
        raise ConfigError(
            f"{folder}: the tokenizer cannot be loaded ({error}). Copy tokenizer.json, tokenizer_config.json and "
            "config.json again from the model's page"
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """Whether text can be turned into tokens with what the folder holds."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def model_classes(folder: Path, cache_gb: float | None = None) -> tuple[type[nn.Module], type]:
    """`(Model, ModelArgs)` for a container's own model file, through which unmodified mlx-lm commands stream it."""
    config = read_config(folder)
    return _Builder(folder, cache_gb).classes(get_model_classes({**config, **for_mlx_lm(config)}))


class _Builder:
    """Makes the streamed subclass of one model folder's stock model class."""

    def __init__(
        self,
        folder: Path,
        cache_gb: float | None,
        context_tokens: int | None = None,
        io: IO = "cached",
        threads: int = IO_THREADS,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = folder
        self.threads, self.warn = threads, warn or (lambda text: None)
        self.source: ContainerSource | CheckpointSource
        self.source, self.opened = open_source(folder, io)
        for text in getattr(self.opened, "warnings", ()):
            self.warn(text)
        config = read_config(folder)
        self.shape = ModelConfig.from_dict(config, str(folder / "config.json"))
        self.plan = memory.plan(self.opened, self.source.tables, config, cache_gb, context_tokens)
        memory.limit_mlx_cache()
        memory.wire(self.plan)
        self.pools: Pools | None = None

    def classes(self, stock: tuple[type[nn.Module], type]) -> tuple[type[nn.Module], type]:
        builder, (stock_model, stock_args) = self, stock

        class Model(stock_model):  # type: ignore[misc, valid-type]
            def __init__(self, args: Any) -> None:
                super().__init__(args)
                object.__setattr__(self, "pools", builder.make_pools())
                builder.swap(self)
                use_layer_major(self)
                if chunked_by_default():
                    use_chunked_delta(self)
                object.__setattr__(self, "built", _layer_classes(self))

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                # what mlx-lm globbed is replaced by what index and headers say; all of it is still lazy
                weights = builder.dense_weights()
                return super().sanitize(weights) if hasattr(stock_model, "sanitize") else weights

            if stock_model.__module__ in GRAPH_ONLY:

                def __call__(self, *args: Any, **kwargs: Any) -> Any:
                    if not self.pools.alone or _layer_classes(self) != self.built:
                        return super().__call__(*args, **kwargs)
                    with self.pools.building():
                        return super().__call__(*args, **kwargs)

        Model.__module__ = stock_model.__module__
        return Model, stock_args

    def make_pools(self) -> Pools:
        tables, top_k = self.source.tables, self.shape.top_k
        plan = self.plan
        search = Search(min(plan.pool, 2 * plan.cycle), plan.pool, plan.pool if plan.whole else plan.pool // 2)
        slots = memory.split(tables, search.size, top_k)
        pools = Pools(self.source, slots, ReadThreads(self.threads), top_k)
        pools.plan = plan
        if not plan.asked:
            pools.on_step = Governor(pools.stats, search)
        if pools.nbytes < self.plan.cycle:
            self.warn(
                f"the cache holds {sum(p.n_slots for p in pools.layers.values())} experts, one token uses "
                f"{len(tables) * top_k} ({size(self.plan.cycle)}): nothing can be reused from token to token. "
                "Give more --cache-gb if you can"
            )
        if not pools.direct:
            self.warn("this device does not see host writes: experts are copied on their way in, which is slower")
        pools.fill()
        self.pools = pools
        return pools

    def swap(self, model: nn.Module) -> None:
        pools = model.pools
        left = dict(self.source.tables)
        for path, module in model.named_modules():
            if not isinstance(module, (SwitchGLU, SwitchMLP)):
                continue
            match = _LAYER.search(path)
            if match is None or left.pop(int(match[1]), None) is None:
                raise StreamingUnsupported(
                    f"{self.folder}: the model wants routed experts at {path}, the files hold none for it. "
                    "Convert or repack the model again"
                )
            stream(module, path, int(match[1]), pools)
        overlap_shared_experts(model)
        if foresee(model, self.shape.top_k):
            governor = pools.on_step
            pools.foresight = Trial(pools.stats, lambda: not isinstance(governor, Governor) or governor.search.settled)
        if left:
            raise StreamingUnsupported(
                f"{self.folder}: the files hold experts for layers {sorted(left)}, the model has none there. "
                "This version of mlx-lm builds them in a way that cannot be streamed"
            )

    def dense_weights(self) -> dict[str, mx.array]:
        """The dense tensors, lazily, from exactly the files that headers and index name."""
        if isinstance(self.opened, Container):
            return _lazy(self.folder / DENSE)
        weights: dict[str, mx.array] = {}
        for file in self.opened.files:
            wanted = {n for n, at in self.opened.dense.items() if at.file == file}
            if wanted:
                weights |= {n: a for n, a in _lazy(self.folder / file).items() if n in wanted}
        return weights

    def close(self) -> None:
        if self.pools is not None:
            self.pools.close()
        else:
            self.source.close()


def _layer_classes(model: nn.Module) -> list[Any]:
    """What each decoder layer and each of its parts is: not the same once somebody has wrapped one to look at it."""
    return [[type(layer), *map(type, layer.values())] if isinstance(layer, dict) else layer for layer in model.layers]


def _lazy(path: Path) -> dict[str, mx.array]:
    """A safetensors file's tensors, unread until they are evaluated."""
    return cast("dict[str, mx.array]", mx.load(str(path)))


def _classes_in(folder: Path, config: dict[str, Any]) -> tuple[type[nn.Module], type] | None:
    """The classes of the folder's own model file, if it has one that is not this project's shim."""
    name = config.get("model_file")
    if not isinstance(name, str) or name == SHIM:
        return None
    if "/" in name or "\\" in name:
        raise ConfigError(f"{folder}: model_file {name!r} does not name a file in the folder")
    spec = importlib.util.spec_from_file_location(f"swiftlet_mlx_custom_{folder.name}", folder / name)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{folder}: model_file {name!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Model, module.ModelArgs


def explained(folder: Path, config: dict[str, Any], error: Exception) -> ConfigError | StreamingUnsupported:
    """mlx-lm's complaint, with where to look. Missing output weights get both places of the tie flag.

    Args:
        folder: The model that could not be built.
        config: Its parsed config.json.
        error: One of `CONFIG_FAULTS`.
    """
    text = str(error)
    if "not supported" in text:
        return StreamingUnsupported(
            f"{folder}: this version of mlx-lm does not know model type {config.get('model_type')!r}. "
            "Upgrade with `pip install -U mlx-lm`"
        )
    if "lm_head" in text and "issing" in text:
        flags = {"config.json": config.get("tie_word_embeddings")}
        if isinstance(config.get("text_config"), dict):
            flags["config.json text_config"] = config["text_config"].get("tie_word_embeddings")
        shown = ", ".join(f"tie_word_embeddings = {v} in {k}" for k, v in flags.items())
        return ConfigError(
            f"{folder}: lm_head.weight is missing and the embeddings are not tied ({shown}). If the model ties them, "
            "set the flag to true; otherwise download the missing file"
        )
    if not isinstance(error, ValueError):
        text = f"mlx-lm cannot build the model from config.json ({type(error).__name__}: {text})"
    else:
        text = f"config and tensors do not fit: {text}"
    return ConfigError(f"{folder}: {text}. Copy config.json again from the model's page, or convert the model again")
