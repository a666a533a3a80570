"""Anything else with __dlpack__: read through the DLPack C structs, so that bf16 and fp8 work without the producer's help.

Layout of the structs: DLPack 1.0 (dlpack.h of dmlc/dlpack). Results are NumPy arrays on the CPU and CuPy arrays on CUDA.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..arrays import Meta, row_major
from ..dtypes import BY_DLPACK, BY_NAME, Dtype
from ..errors import DeviceError, FrameworkError, NoGpuError

NAME = "dlpack"
MUTABLE = True


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]

CPU_KINDS = (1,)
CUDA_KINDS = (2, 13)  # device and managed memory; pinned host memory (3) is refused: kernels would read it over PCIe
READ_ONLY = 1


class Capsule:
    """The facts in a DLPack capsule, either generation. The capsule stays alive with this object and frees itself."""

    __slots__ = ("capsule", "facts", "ptr")

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule
        flags = 0
        if _is_valid(capsule, b"dltensor_versioned"):
            managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
            if managed.major != 1:
                raise FrameworkError(f"expected DLPack 1.x, got {managed.major}.{managed.minor}.")
            tensor, flags = managed.tensor, managed.flags
        else:
            tensor = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
        dtype = BY_DLPACK.get((tensor.code, tensor.bits))
        name = dtype.name if dtype and tensor.lanes == 1 else f"DLPack type ({tensor.code}, {tensor.bits}, {tensor.lanes})"
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else row_major(shape)
        device = ("cpu", 0) if tensor.device_type in CPU_KINDS else ("cuda", tensor.device_id)
        self.facts = Meta(shape, strides, name, device, bool(flags & READ_ONLY))
        self.ptr = (tensor.data or 0) + tensor.byte_offset


class Foreign(Capsule):
    """A producer's tensor, read once for a call."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        kind, index = (int(v) for v in owner.__dlpack_device__())
        if kind not in CPU_KINDS + CUDA_KINDS:
            raise DeviceError(f"expected CPU or CUDA memory, got DLPack device type {kind} of {type(owner).__name__}.")
        # An explicit stream, always: what None means has changed between producers. Legacy default is 1.
        stream = None if kind in CPU_KINDS else (_cupy().cuda.get_current_stream(index).ptr or 1)
        try:
            capsule = owner.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # a producer from before DLPack 1.0
            capsule = owner.__dlpack__(stream=stream) if stream is not None else owner.__dlpack__()
        except BufferError as error:
            raise FrameworkError(f"expected an array that DLPack can hand over, got {type(owner).__name__} which refuses: {error}") from error
        super().__init__(capsule)
        self.owner = owner


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise NoGpuError("CUDA arrays need CuPy: pip install 'hccupy[cuda13]' (or [cuda12]).") from error
    return cupy


def is_array(obj: Any) -> bool:
    """Has the DLPack methods."""
    if isinstance(obj, np.ndarray):  # numpy_ refused it: a masked array, whose mask DLPack would drop
        return False
    return isinstance(obj, Foreign) or (hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"))


def adopt(obj: Any) -> Any:
    """The Foreign of a producer's object (None and non-arrays pass)."""
    return Foreign(obj) if is_array(obj) and not isinstance(obj, Foreign) else obj


def key(array: Any) -> Any:
    """Hashable facts of `array`."""
    return array.facts


def pointer(array: Any) -> int:
    """Address of element 0, of a Foreign or of what `empty` made."""
    if isinstance(array, Foreign):
        return int(array.ptr)
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def meta(array: Any) -> Meta:
    """Facts of `array`."""
    return adopt(array).facts  # type: ignore[no-any-return]


def empty(shape: tuple[int, ...], dtype: Dtype, device: tuple[str, int], like: Any) -> Any:
    """A new NumPy or CuPy array."""
    if device[0] == "cpu":
        return np.empty(shape, dtype.np)
    _cupy()
    from . import cupy_

    return cupy_.empty(shape, dtype, device, like)


def stream(device: int) -> int:
    """CuPy's current stream: the one the producer was asked to make its data ready on."""
    return _cupy().cuda.get_current_stream(device).ptr  # type: ignore[no-any-return]


def to_numpy(array: Any) -> Any:
    """Zero-copy NumPy view of CPU memory."""
    if isinstance(array, np.ndarray):
        return array
    facts = array.facts
    dtype = BY_NAME[facts.dtype]
    strides = [s * dtype.itemsize for s in facts.strides]
    low = sum(min(0, s * (n - 1)) for n, s in zip(facts.shape, strides, strict=True))
    high = sum(max(0, s * (n - 1)) for n, s in zip(facts.shape, strides, strict=True)) + dtype.itemsize
    if 0 in facts.shape:
        return np.empty(facts.shape, dtype.np)
    memory = (ctypes.c_char * (high - low)).from_address(array.ptr + low)
    view = np.ndarray(facts.shape, dtype.np, memory, -low, strides)
    view.flags.writeable = not facts.readonly
    return view
