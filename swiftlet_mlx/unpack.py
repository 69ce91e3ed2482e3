"""A container back into an MLX checkpoint that stock mlx-lm loads, for comparing the two where the source is gone.

Knows the container and safetensors headers; encodes nothing. Invariant: every tensor has the bytes it had, a few
megabytes of them in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile

from .config import read_config
from .qpack import CONFIG, DENSE, Container
from .safetensors import build_header

_DENSE, _EXPERTS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def unpack(container: Container, modules: Mapping[int, str], folder: Path) -> Path:
    """Write a checkpoint folder.

    Args:
        container: An opened container.
        modules: Layer to the path of its switch layer in the model, which a container does not record.
        folder: To be made.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True)
    config = {k: v for k, v in read_config(container.path).items() if k != "model_file"}
    (folder / CONFIG).write_text(json.dumps(config))
    copyfile(container.path / DENSE, folder / _DENSE)
    parts = [
        (f"{modules[layer]}.{section.name}", layer, section)
        for layer, table in container.layers.items()
        for section in table.sections
    ]
    tensors = [(name, s.dtype, (container.layers[layer].expert_count, *s.shape)) for name, layer, s in parts]
    with open(folder / _EXPERTS, "wb") as out:
        out.write(build_header(tensors, {"format": "mlx"}))
        for _, layer, section in parts:
            table = container.layers[layer]
            with open(container.path / table.file_name, "rb") as blobs:
                for expert in range(table.expert_count):
                    blobs.seek(expert * table.stride + section.offset)
                    out.write(blobs.read(section.size))
    return folder
