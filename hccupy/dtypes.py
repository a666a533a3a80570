"""The dtypes hccupy knows: one row each, used by the CPU path, the kernels and the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Dtype:
    """A dtype under its one name, whatever the framework calls it."""

    name: str  # NumPy's and torch's word for it
    itemsize: int  # bytes
    code: int  # the value of `enum Dtype` in kernels/common/convert.cuh
    mantissa: int  # explicit fraction bits; 0 for integers
    dlpack: tuple[int, int]  # (type code, bits) of DLPack 1.x
    np: Any  # the NumPy scalar type


BOOL = Dtype("bool", 1, 10, 0, (6, 8), np.bool_)
F32 = Dtype("float32", 4, 0, 23, (2, 32), np.float32)
F16 = Dtype("float16", 2, 1, 10, (2, 16), np.float16)
BF16 = Dtype("bfloat16", 2, 2, 7, (4, 16), ml_dtypes.bfloat16)
E4M3 = Dtype("float8_e4m3fn", 1, 3, 3, (10, 8), ml_dtypes.float8_e4m3fn)
U8 = Dtype("uint8", 1, 4, 0, (1, 8), np.uint8)
I8 = Dtype("int8", 1, 5, 0, (0, 8), np.int8)
I32 = Dtype("int32", 4, 6, 0, (0, 32), np.int32)
I64 = Dtype("int64", 8, 7, 0, (0, 64), np.int64)
F64 = Dtype("float64", 8, 8, 52, (2, 64), np.float64)
E5M2 = Dtype("float8_e5m2", 1, 9, 2, (12, 8), ml_dtypes.float8_e5m2)

ALL = (F32, F16, BF16, E4M3, U8, I8, I32, I64, F64, E5M2, BOOL)
BY_NAME = {d.name: d for d in ALL}
BY_DLPACK = {d.dlpack: d for d in ALL}

FLOATS = ("bfloat16", "float16", "float32")  # what activations may be
HALVES = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "uint8", "int8")  # e4m3, or bytes that hold it


def ulp(values: Any, dtype: Dtype) -> Any:
    """The spacing of `dtype` at |values|, as float64 (subnormal spacing below the normals)."""
    magnitude = np.abs(np.asarray(values, np.float64))
    tiny = float(ml_dtypes.finfo(dtype.np).smallest_normal)
    return np.exp2(np.floor(np.log2(np.maximum(magnitude, tiny))) - dtype.mantissa)


def to_f32(a: Any) -> Any:
    """`a` widened to float32 (a itself where it is float32 already)."""
    return a.astype(np.float32, copy=False)


def from_f32(a: Any, dtype: Any) -> Any:
    """float32 `a` rounded once, to nearest even, into `dtype`."""
    with np.errstate(over="ignore"):  # float16 overflows to inf, as the kernels do
        return a.astype(dtype, copy=False)
