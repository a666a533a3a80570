"""JAX arrays. Immutable: results and updated caches come back as new arrays (hccupy/jax.py runs the CUDA side)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..arrays import Meta, row_major
from ..dtypes import Dtype
from ..errors import DeviceError, FrameworkError

NAME = "jax"
MUTABLE = False
jax: Any = sys.modules["jax"]
PLATFORM = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}


def is_array(obj: Any) -> bool:
    """A concrete or traced JAX array."""
    return isinstance(obj, jax.Array)


def _device(array: Any) -> tuple[str, int]:
    if isinstance(array, jax.core.Tracer):
        raise FrameworkError("expected a concrete JAX array, got a tracer. Inside jax.jit call the op of hccupy.jax.")
    devices = list(array.devices())
    if len(devices) != 1 or devices[0].platform not in PLATFORM:
        raise DeviceError(f"expected an array on one CPU or CUDA device, got one on {devices}.")
    kind = PLATFORM[devices[0].platform]
    return kind, 0 if kind == "cpu" else int(devices[0].local_hardware_id or 0)


def key(array: Any) -> tuple[Any, ...]:
    """Hashable facts of `array`."""
    return array.shape, array.dtype, _device(array)


def pointer(array: Any) -> int:
    """Address of element 0 (waits until a CPU array is computed)."""
    return array.unsafe_buffer_pointer()  # type: ignore[no-any-return]


def meta(array: Any) -> Meta:
    """Facts of `array`; JAX arrays are row-major."""
    return Meta(tuple(array.shape), row_major(array.shape), np.dtype(array.dtype).name, _device(array))


def empty(shape: tuple[int, ...], dtype: Dtype, device: tuple[str, int], like: Any) -> Any:
    """A NumPy array that from_numpy hands over: JAX arrays cannot be written."""
    return np.empty(shape, dtype.np)


def stream(device: int) -> int:
    """JAX shows no stream for eager arrays; its CUDA calls go through hccupy/jax.py."""
    return 0


def to_numpy(array: Any) -> Any:
    """Zero-copy, read-only view of a CPU array."""
    return array if isinstance(array, np.ndarray) else np.asarray(array)


def from_numpy(array: Any) -> Any:
    """The JAX array holding `array`."""
    return jax.numpy.asarray(array)
