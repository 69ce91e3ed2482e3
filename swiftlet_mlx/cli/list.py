"""`list`: the models on this machine that a command accepts by name. Opens no weights."""

from __future__ import annotations

import json as jsonlib
from typing import Any

from . import console, options

EXAMPLE = "Example: swiftlet-mlx list"


def list_models(json: options.Json = False) -> None:
    """Show the models on this machine.

    These are the containers in the models folder and the MoE checkpoints in the hub cache.
    """
    from swiftlet_mlx.library import cached, hub_cache, installed, models_folder

    every = [*installed(), *cached()]
    rows: list[dict[str, Any]] = [
        {
            "name": found.name,
            "kind": found.kind,
            "bytes": found.nbytes,
            "source": found.source,
            "revision": found.revision,
            "path": str(found.path),
            "fault": found.fault,
        }
        for found in every
    ]
    if json:
        console.write(jsonlib.dumps(rows) + "\n")
        return
    if not rows:
        console.say(f"no models in {models_folder()} and no MoE checkpoints in {hub_cache()}")
        console.say("to install one: swiftlet-mlx repack --from-hf ORG/NAME; demo comes with the package")
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        state = "" if not row["fault"] else "  " + ("unfinished" if row["kind"] == "unfinished" else "damaged")
        console.write(
            f"{row['name']:{width}}  {row['kind']:10}  {console.size(row['bytes']):>8}{state}  {row['path']}\n"
        )
    for row in rows:
        if row["fault"] and row["kind"] != "unfinished":
            console.warn(row["fault"])
