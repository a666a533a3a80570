"""CuPy arrays: always on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..arrays import Meta
from ..dtypes import E4M3, E5M2, Dtype
from ..errors import OutOfMemoryError

NAME = "cupy"
MUTABLE = True
cupy: Any = sys.modules["cupy"]


def is_array(obj: Any) -> bool:
    """A cupy.ndarray."""
    return isinstance(obj, getattr(cupy, "ndarray", ()))


def key(array: Any) -> tuple[Any, ...]:
    """Hashable facts of `array`."""
    return array.shape, array.strides, array.dtype, array.data.device_id


def pointer(array: Any) -> int:
    """Address of element 0."""
    return array.data.ptr  # type: ignore[no-any-return]


def meta(array: Any) -> Meta:
    """Facts of `array`."""
    item = array.dtype.itemsize
    strides = tuple(s // item for s in array.strides)
    return Meta(tuple(array.shape), strides, array.dtype.name, ("cuda", array.data.device_id))


def empty(shape: tuple[int, ...], dtype: Dtype, device: tuple[str, int], like: Any) -> Any:
    """A new array on the current device (launch makes the arrays' device current). fp8 exists in CuPy only as a view of bytes."""
    try:
        if dtype in (E4M3, E5M2):
            return cupy.empty(shape, "uint8").view(dtype.np)
        return cupy.empty(shape, dtype.np)
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise OutOfMemoryError(f"CuPy could not allocate {dtype.name}{list(shape)}: {error}") from error


ADDRESS = "data.ptr"  # element 0's, of an array that `same` knows


def same(arrays: Sequence[Any]) -> Callable[..., bool]:
    """A function that tells whether other arrays have the type, shape, strides, dtype and device of these."""
    known = [(type(a), a.shape, a.strides, a.dtype, a.data.device_id) for a in arrays]

    def check(*others: Any) -> bool:
        return known == [(type(a), a.shape, a.strides, a.dtype, a.data.device_id) if isinstance(a, cupy.ndarray) else None for a in others]

    return check


def maker(shape: tuple[int, ...], dtype: Dtype, like: Any) -> Callable[[], Any]:
    """A function that makes new arrays on the device of `like`, which must be current."""
    return partial(empty, shape, dtype, ("cuda", like.data.device_id), None)  # not `like`: a remembered call must keep no array alive


def stream(device: int) -> int:
    """Handle of CuPy's current stream on that device."""
    return cupy.cuda.get_current_stream(device).ptr  # type: ignore[no-any-return]


def to_numpy(array: Any) -> Any:
    """CuPy arrays are never on the CPU."""
    raise AssertionError("unreachable: CuPy arrays are on CUDA")
