"""Bench inputs on the device: NumPy inputs of the spec, grown to the case's tokens, copied into as many cold sets as needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..spec import Arg, Case, OpSpec

GROW = 128  # rows drawn on the host; larger cases of row-wise ops repeat them in random order


def _root(a: Any) -> Any:
    """The array that owns a view's memory."""
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def _raw(a: Any) -> Any:
    """`a` as a dtype torch.from_numpy takes."""
    return a.view({2: np.int16, 1: np.uint8}[a.dtype.itemsize]) if a.dtype.name in ("bfloat16", "float8_e4m3fn") else a


def tensor(array: Any, device: Any) -> Any:
    """A NumPy array as a tensor of its dtype on `device`."""
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(_raw(array))).to(device)
    dtype = getattr(torch, array.dtype.name)
    return flat if flat.dtype == dtype else flat.view(dtype)


def to_torch(given: dict[str, Any]) -> dict[str, Any]:
    """NumPy keyword arguments as CUDA tensors with the same strides; views of one array stay views of one tensor."""
    import torch

    roots: dict[int, Any] = {}
    out = {}
    for name, a in given.items():
        if not isinstance(a, np.ndarray):
            out[name] = a
            continue
        root = _root(a)
        if id(root) not in roots:
            roots[id(root)] = tensor(root.reshape(-1), "cuda")
        flat = roots[id(root)]
        dtype = getattr(torch, a.dtype.name)
        flat = flat if flat.dtype == dtype else flat.view(torch.uint8).view(dtype)
        offset = (a.__array_interface__["data"][0] - root.__array_interface__["data"][0]) // a.itemsize
        out[name] = flat.as_strided(a.shape, [s // a.itemsize for s in a.strides], offset)
    return out


def to_cupy(tensor: Any) -> Any:
    """The same memory as a CuPy array."""
    import cupy

    return cupy.from_dlpack(tensor)


class Foreign:
    """A tensor that only speaks DLPack, as another framework's array would."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def clone(tensors: dict[str, Any]) -> dict[str, Any]:
    """A copy on new memory, with the strides and the sharing of the original."""
    import torch

    copies: dict[int, Any] = {}
    out = {}
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            out[name] = t
            continue
        address = t.untyped_storage().data_ptr()
        if address not in copies:
            copies[address] = t.untyped_storage().clone()
        out[name] = torch.empty(0, dtype=t.dtype, device=t.device).set_(copies[address], t.storage_offset(), t.shape, t.stride())
    return out


def make(spec: OpSpec, case: Case, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(host kwargs of the drawn rows, device kwargs of the whole case, row numbers or None).

    Row-wise ops (every leading argument is a row) draw at most GROW rows; row i of the device arrays is row index[i].
    """
    import torch

    rng = np.random.default_rng(seed)
    rowwise = all(o.lead for o in spec.outputs) and bool(spec.outputs)
    tokens = case.axes.get("tokens", 0)
    if not rowwise or tokens <= GROW:
        host = spec.make_inputs(case, rng)
        return host, to_torch(host), None
    host = spec.make_inputs(replace(case, axes={**case.axes, "tokens": GROW}), rng)
    device = to_torch(host)
    index = torch.from_numpy(rng.integers(0, GROW, tokens)).cuda()
    for p in spec.params:
        if isinstance(p, Arg) and p.lead and p.name in device:
            device[p.name] = device[p.name].index_select(0, index)
    return host, device, index
