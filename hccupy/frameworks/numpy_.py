"""NumPy arrays: always on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Meta
from ..dtypes import Dtype
from ..errors import LayoutError

NAME = "numpy"
MUTABLE = True
CPU = ("cpu", 0)


def is_array(obj: Any) -> bool:
    """An ndarray (NumPy scalars are not arrays here)."""
    return isinstance(obj, np.ndarray) and not isinstance(obj, np.ma.MaskedArray)  # a mask would be dropped


def key(array: Any) -> tuple[Any, ...]:
    """Hashable facts of `array`."""
    return array.shape, array.strides, array.dtype, array.flags.writeable


def pointer(array: Any) -> int:
    """Address of element 0."""
    return int(array.ctypes.data)


def meta(array: Any) -> Meta:
    """Facts of `array`."""
    item = array.dtype.itemsize or 1
    if any(s % item for s in array.strides):
        raise LayoutError(
            f"expected strides of whole elements, got byte strides {array.strides} of {array.dtype.name}. Copy it first (a field of a structured array)."
        )
    return Meta(array.shape, tuple(s // item for s in array.strides), array.dtype.name, CPU, not array.flags.writeable)


def empty(shape: tuple[int, ...], dtype: Dtype, device: tuple[str, int], like: Any) -> Any:
    """A new array."""
    return np.empty(shape, dtype.np)


def stream(device: int) -> int:
    """There is none on the CPU."""
    return 0


def to_numpy(array: Any) -> Any:
    """The array itself, without a subclass's own rules (numpy.matrix)."""
    return array if type(array) is np.ndarray else array.view(np.ndarray)
