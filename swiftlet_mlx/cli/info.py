"""`info`: what a model is, what it costs in memory here, what it reads a token. Loads no weights."""

from __future__ import annotations

import json as jsonlib
from typing import Any

from . import console, options

EXAMPLE = "Example: swiftlet-mlx info demo"


def info(model: options.Model, cache_gb: options.CacheGb = None, json: options.Json = False) -> None:
    """Show a model's architecture, its sizes, and the memory it takes on this machine."""
    from swiftlet_mlx.locate import find_model

    facts = describe(str(find_model(model)), cache_gb)
    if json:
        console.write(jsonlib.dumps(facts) + "\n")
        return
    for key, value in facts.items():
        if key.endswith("_bytes"):
            key, value = key.removesuffix("_bytes"), console.size(value)
        console.write(f"{key.replace('_', ' '):24} {value}\n")


def describe(folder: str, cache_gb: float | None) -> dict[str, Any]:
    """The facts `info` shows. Sizes are bytes."""
    from pathlib import Path

    from swiftlet_mlx import memory
    from swiftlet_mlx.config import ModelConfig, read_config
    from swiftlet_mlx.qpack import Container
    from swiftlet_mlx.reader import open_source

    path = Path(folder)
    source, opened = open_source(path)
    source.close()
    raw = read_config(path)
    config = ModelConfig.from_dict(raw, str(path))
    tables = source.tables
    widest = max(tables.values(), key=lambda t: t.payload_bytes)
    plan = memory.plan(opened, tables, raw, cache_gb)
    slots = memory.split(tables, plan.pool, config.top_k)
    return {
        "model": path.name,
        "type": config.model_type,
        "kind": f"container v{opened.version}" if isinstance(opened, Container) else "MLX checkpoint (not repacked)",
        "source": source.origin,
        "layers": config.layer_count,
        "layers_with_experts": len(tables),
        "experts_per_layer": widest.expert_count,
        "experts_per_token": config.top_k,
        "context_tokens": config.context,
        "expert_bytes": widest.payload_bytes,
        "all_experts_bytes": opened.expert_bytes,
        "dense_bytes": plan.dense,
        "per_token_bytes": plan.cycle,
        "smallest_cache_bytes": memory.minimum_bytes(tables, config.top_k),
        "available_bytes": plan.available,
        "cache_bytes": sum(n * tables[layer].payload_bytes for layer, n in slots.items()),
        "cache_slots": sum(slots.values()),
        "memory_to_run_bytes": plan.process_total,
    }
