"""Do two arrays share an element? Judged by elements, so K and V may interleave in one buffer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np


def extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Byte offsets [low, high) from element 0 between which the array lies; (0, 0) for an empty one."""
    if 0 in shape:
        return 0, 0
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    return low * itemsize, (high + 1) * itemsize


def covers_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Might two indices be one element? Exact for nested strides, which every real layout has."""
    if 0 in shape:
        return False
    reach = 0
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: abs(pair[1])):
        if size > 1:
            if abs(stride) <= reach:
                return True
            reach += (size - 1) * abs(stride)
    return False


def _fake(ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
    """An ndarray over that memory which nobody reads (it may be device memory)."""

    class Holder:
        __array_interface__: ClassVar[dict[str, Any]] = {
            "data": (ptr, False),
            "shape": shape,
            "strides": tuple(s * itemsize for s in strides),
            "typestr": f"|V{itemsize}",
            "version": 3,
        }

    return np.asarray(Holder())


def shared(
    a: tuple[int, tuple[int, ...], tuple[int, ...], int],
    b: tuple[int, tuple[int, ...], tuple[int, ...], int],
) -> bool:
    """Whether two arrays, each (ptr, shape, strides, itemsize), share a byte. Exact."""
    if math.prod(a[1]) == 0 or math.prod(b[1]) == 0:
        return False
    return bool(np.shares_memory(_fake(*a), _fake(*b)))
