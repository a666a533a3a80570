"""Steps 1 and 6: from anybody's array to plain facts, and outputs back in the same framework.

A framework is a module of frameworks/ with these functions:

    is_array(obj)            does it own this object? (cheap, imports nothing)
    key(array)               hashable facts that decide a plan: shape, strides, dtype, device (native objects)
    pointer(array)           address of element 0
    meta(array)              the same facts as a Meta, in hccupy's words
    empty(shape, dtype, device, like)   a new array (dtype: a Dtype; device: ("cpu", 0) or ("cuda", index))
    stream(device_index)     handle of the framework's current stream
    to_numpy(array)          zero-copy NumPy view of a CPU array
    same(arrays), ADDRESS, maker(shape, dtype, like)   only where repeat.py serves it: see torch_.py
    from_numpy(ndarray)      only where MUTABLE is False: the array to hand back for the NumPy one that `empty` gave
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from .errors import FrameworkError, HccupyError


@dataclass(frozen=True)
class Meta:
    """Facts of one array. Strides count elements; device is ("cpu", 0) or ("cuda", index)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]
    readonly: bool = False


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


# Order matters: torch and JAX arrays carry __dlpack__ as well. The second word is the module that must have been
# imported by the caller: a framework nobody imported cannot own an argument, and is never imported here.
FRAMEWORKS = (
    ("numpy_", "numpy"),
    ("torch_", "torch"),
    ("cupy_", "cupy"),
    ("jax_", "jax"),
    ("dlpack_", "sys"),
)
_BY_TYPE: dict[type, ModuleType | None] = {}


def framework(obj: Any) -> ModuleType | None:
    """The module of frameworks/ that owns `obj`, or None where it is no array."""
    kind = type(obj)
    if kind not in _BY_TYPE:
        _BY_TYPE[kind] = _find(obj)
    return _BY_TYPE[kind]


def _find(obj: Any) -> ModuleType | None:
    for name, requires in FRAMEWORKS:
        if requires in sys.modules:
            module = import_module(f"hccupy.frameworks.{name}")
            if module.is_array(obj):
                return module
    return None


def view(op: str, name: str, obj: Any) -> tuple[ModuleType, Meta]:
    """Framework and facts of one argument.

    Raises FrameworkError where `obj` is no array.
    """
    found = framework(obj)
    if found is None:
        raise FrameworkError(f"{op}: {name}: expected an array (NumPy, CuPy, PyTorch, JAX or anything with __dlpack__), got {type(obj).__name__}.")
    try:
        return found, found.meta(obj)
    except HccupyError as error:  # the framework knows what is wrong, not where
        raise named(op, name, error) from None


def named(op: str, name: str, error: HccupyError) -> HccupyError:
    """The same error, saying which argument of which op it is about."""
    return type(error)(f"{op}: {name}: {error}")
