"""Slots on CUDA, where host and device do not share memory but may reach each other's.

Pages the host has written migrate to the device a few at a time, at about 4 GB/s (H200, 2026-11). Told to stay where
they are and be read from there, decode was twice as fast. Knows addresses and the driver's advice; nothing else of the
project. Invariant: without CUDA, or if the driver declines, nothing happens.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from .device import backend

_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5  # cudaMemoryAdvise
_DEVICE, _HOST = 1, 2  # cudaMemLocationType


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def keep_on_host(view: memoryview) -> None:
    """Let the device read this memory where it is."""
    advise = _advise() if backend() == "cuda" else None
    if advise is not None and view.nbytes:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        advise(address, view.nbytes, _PREFERRED_LOCATION, _Location(_HOST, 0))
        advise(address, view.nbytes, _ACCESSED_BY, _Location(_DEVICE, 0))


@functools.cache
def _advise() -> Callable[..., int] | None:
    """The runtime library's function; MLX has loaded the library already."""
    for name in ("libcudart.so.13", "libcudart.so"):
        try:
            function = ctypes.CDLL(name).cudaMemAdvise
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, _Location]
        return function
    return None
