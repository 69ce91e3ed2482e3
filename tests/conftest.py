"""What every test gets: one CPU device, no compilation where it is not the point, nothing read from the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# before mlx is imported: compiling tiny graphs costs more than running them
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

mx.set_default_device(mx.cpu)
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, hot lists and installed models of the person who runs the tests stay out of them."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub on loopback, empty; the only one that is in reach."""
    from loopback_hub import LoopbackHub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with LoopbackHub() as running:
        yield running
