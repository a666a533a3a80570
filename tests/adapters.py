"""Arrays of each framework from NumPy ones and back, by bytes, so that no conversion rounds."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

SPECIAL = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}
ZONE, MARK = 1024, 0xA5  # bytes on both sides of every tensor, and what they hold
_zoned: list[weakref.ref[Any]] = []


@dataclass(frozen=True)
class Adapter:
    """A framework on a device."""

    name: str  # numpy, torch, cupy, jax, dlpack
    device: str = "cpu"
    mutable: bool = True

    def put(self, a: np.ndarray | None) -> Any:
        """The framework's array with the same bytes and, where the framework can, the same strides."""
        if a is None or not isinstance(a, np.ndarray):
            return a
        if self.name == "numpy":
            return a
        if self.name == "jax":
            import jax

            kind = "gpu" if self.device == "cuda" else "cpu"
            return jax.device_put(np.ascontiguousarray(a), jax.devices(kind)[0])
        base, offset = _whole(a)
        if self.name == "torch" or (self.name == "dlpack" and self.device == "cpu"):
            import torch

            zone = np.full(ZONE, MARK, np.uint8)
            whole = torch.from_numpy(np.concatenate([zone, base.view(np.uint8), zone])).to(self.device)
            t = whole.view(getattr(torch, base.dtype.name)).as_strided(a.shape, [s // a.itemsize for s in a.strides], offset + ZONE // a.itemsize)
            _zoned.append(weakref.ref(t))
            return Producer(t) if self.name == "dlpack" else t
        import cupy

        raw = base.view(SPECIAL[base.dtype.name]) if base.dtype.name in SPECIAL else base
        whole = cupy.asarray(raw)
        c = cupy.ndarray(a.shape, raw.dtype, whole.data + offset * a.itemsize, strides=a.strides).view(a.dtype)
        if self.name == "dlpack":
            import torch

            t = torch.from_dlpack(cupy.ndarray(whole.shape, f"u{a.itemsize}", whole.data))
            if base.dtype.name in SPECIAL or base.dtype.kind != "u":
                t = t.view(getattr(torch, base.dtype.name))
            return Producer(t.as_strided(a.shape, [s // a.itemsize for s in a.strides], offset))
        return c

    def get(self, a: Any) -> Any:
        """The NumPy array with the same bytes (None passes; lists and tuples element by element)."""
        if a is None or isinstance(a, np.ndarray):
            return a
        if isinstance(a, tuple | list):
            return type(a)(self.get(v) for v in a)
        if isinstance(a, Producer):
            a = a.tensor
        if type(a).__module__.startswith("torch"):
            import torch

            t = a.detach().cpu()
            if t.dtype in (torch.bfloat16, torch.float8_e4m3fn):
                raw = t.contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.uint8).numpy()
                return raw.view(ml_dtypes.bfloat16 if t.dtype == torch.bfloat16 else ml_dtypes.float8_e4m3fn)
            return t.numpy()
        if type(a).__module__.startswith("cupy"):
            import cupy

            raw = a.view(SPECIAL[a.dtype.name]) if a.dtype.name in SPECIAL else a
            return cupy.asnumpy(raw).view(a.dtype)
        return np.asarray(a)

    def op(self, name: str) -> Any:
        """The op as a function of such arrays."""
        import hccupy

        return getattr(hccupy, name)

    def synchronize(self) -> None:
        """Wait for the device, then look at the red zones of all tensors that are still there."""
        if self.device == "cuda":
            import cupy

            cupy.cuda.runtime.deviceSynchronize()
        check_zones()


def check_zones() -> None:
    """Raise AssertionError if a byte before or behind a tensor that `put` made was written."""
    import torch

    alive = []
    for reference in _zoned:
        t = reference()
        if t is not None:
            alive.append(reference)
            whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            ends = torch.cat([whole[:ZONE], whole[-ZONE:]])
            assert bool((ends == MARK).all()), f"bytes beside an array of {whole.numel() - 2 * ZONE} bytes were written"
    _zoned[:] = alive


def _whole(a: np.ndarray) -> tuple[np.ndarray, int]:
    """(flat array of the memory `a` lies in, from its first to its last element; place of element 0 in it)."""
    if a.size == 0:
        return np.zeros(1, a.dtype), 0
    low = sum(min(0, (n - 1) * s) for n, s in zip(a.shape, a.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(a.shape, a.strides, strict=True)) + a.itemsize
    address = a.ctypes.data + low
    import ctypes

    raw = np.frombuffer((ctypes.c_char * (high - low)).from_address(address), dtype=a.dtype)
    return raw, -low // a.itemsize


class Producer:
    """Somebody's tensor that can do nothing but DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **words: Any) -> Any:
        if self.tensor.device.type == "cpu":
            return self.tensor.__dlpack__()
        return self.tensor.__dlpack__(stream=stream, **words)


CPU = [Adapter("numpy"), Adapter("torch"), Adapter("jax", mutable=False), Adapter("dlpack")]
GPU = [Adapter("torch", "cuda"), Adapter("cupy", "cuda"), Adapter("jax", "cuda", mutable=False), Adapter("dlpack", "cuda")]


def params(adapters: list[Adapter]) -> list[Any]:
    """pytest params, one an adapter; those of missing frameworks are errors at import, never silent skips."""
    return [pytest.param(a, id=f"{a.name}-{a.device}") for a in adapters]
