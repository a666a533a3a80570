"""What is left of a call once its facts are known: overlap by address, allocation, launch, return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from . import check, cuda, overlap, switches
from .arrays import Meta
from .dtypes import BY_NAME, Dtype
from .errors import ArgumentError, CaptureError, explain
from .frameworks import dlpack_
from .launch import Start
from .spec import Arg, Bound, OpSpec, Out


class Binding:
    """One op for one set of shapes, strides, dtypes, device and scalars."""

    def __init__(
        self,
        spec: OpSpec,
        framework: ModuleType,
        bound: Bound,
        metas: Mapping[str, Meta],
        lead: tuple[int, ...] | None,
        launcher: Start | None,
    ) -> None:
        self.spec, self.framework, self.bound, self.lead, self.launcher = spec, framework, bound, lead, launcher
        self.arrays = spec.arrays
        self.first_out = len(spec.args)
        self.fresh: list[tuple[int, tuple[int, ...], Dtype]] = []
        for i, o in enumerate(spec.outputs):
            if bound.has(o.name) and o.name not in metas:
                self.fresh.append((i, check.out_shape(spec, o, bound, lead), BY_NAME[bound.dtypes[o.name]]))
        self.metas = [metas.get(a.name) for a in self.arrays]
        self.pairs = self._pairs(metas)
        self.separate: set[tuple[int, ...]] = set()  # address differences already found free of overlap
        self.arg_places = [i for i, p in enumerate(spec.params) if isinstance(p, Arg)]
        self.mutated = [i for i, a in enumerate(spec.args) if a.mutated]
        self.empty = not all(bound.axes[a] for a in spec.empty)
        self.repeat: Any = None  # how to do the same again the short way (repeat.py), and how often that was worked out
        self.remade = 0

    def _pairs(self, metas: Mapping[str, Meta]) -> list[tuple[int, int, int, int, int, int]]:
        """(i, j, low_i, high_i, low_j, high_j) of every written array i and every other array j."""
        written = [i for i, a in enumerate(self.arrays) if a.name in metas and (isinstance(a, Out) or a.mutated)]
        spans = {}
        for i, m in enumerate(self.metas):
            if m is not None:
                spans[i] = overlap.extent(m.shape, m.strides, BY_NAME[m.dtype].itemsize)
        return [(i, j, *spans[i], *spans[j]) for i in written for j in spans if j != i and (j not in written or j > i)]

    def __call__(self, given: Sequence[Any], outs: Sequence[Any], pointers: list[int], stream: Any) -> Any:
        """Run once. `pointers`: addresses of the arrays in kernel order, 0 where absent or to be allocated."""
        self.check_overlap(pointers)
        if self.bound.device[0] == "cpu":
            return self._on_cpu(given, outs)
        index = self.bound.device[1]
        if cuda.current_device() != index:
            with cuda.cupy().cuda.Device(index):
                return self._on_cuda(given, outs, pointers, stream)
        return self._on_cuda(given, outs, pointers, stream)

    def check_overlap(self, pointers: Sequence[int]) -> None:
        """LayoutError where a written array shares an element with another one (address ranges first: they seldom meet)."""
        for i, j, low_i, high_i, low_j, high_j in self.pairs:
            a, b = pointers[i], pointers[j]
            if a + low_i < b + high_j and b + low_j < a + high_i and (i, j, a - b) not in self.separate:
                self._overlap(i, j, pointers)

    def _overlap(self, i: int, j: int, pointers: Sequence[int]) -> None:
        a, b = self.metas[i], self.metas[j]
        if a is None or b is None:
            return
        check.check_overlap(self.spec, self.arrays[i].name, self.arrays[j].name, (pointers[i], a), (pointers[j], b))
        if len(self.separate) < 1024:
            self.separate.add((i, j, pointers[i] - pointers[j]))

    def _on_cuda(self, given: Sequence[Any], outs: Sequence[Any], pointers: list[int], stream: Any) -> Any:
        framework, index = self.framework, self.bound.device[1]
        results = list(outs)
        for i, shape, dtype in self.fresh:
            results[i] = made = framework.empty(shape, dtype, self.bound.device, given[0])
            pointers[self.first_out + i] = framework.pointer(made)
        if not self.empty and self.launcher is not None:
            handle = framework.stream(index) if stream is None else stream_handle(stream)
            if self.spec.debug is not None and switches.debug():
                self._debug_cuda(pointers, handle)
            self.launcher(pointers, handle)
        return self.returned(results)

    def _on_cpu(self, given: Sequence[Any], outs: Sequence[Any]) -> Any:
        framework = self.framework
        results = list(outs)
        for i, shape, dtype in self.fresh:
            results[i] = framework.empty(shape, dtype, self.bound.device, given[0])
        args = [given[i] for i in self.arg_places]
        views = [None if a is None else framework.to_numpy(a) for a in args]
        if not framework.MUTABLE:
            for i in self.mutated:
                args[i] = views[i] = np.array(views[i])
        views += [None if a is None else framework.to_numpy(a) for a in results]
        if not self.empty:
            flat = {a.name: self._flatten(a, v) for a, v in zip(self.arrays, views, strict=True)}
            b = SimpleNamespace(axes=self.bound.axes, **self.bound.scalars, **flat)
            if self.spec.debug is not None and switches.debug():
                self.spec.debug(b)
            self.spec.reference(b)
        if framework.MUTABLE:
            return self.returned(results)
        updated = tuple(framework.from_numpy(args[i]) for i in self.mutated)
        wrapped = [None if r is None else framework.from_numpy(r) for r in results]
        return self.returned(wrapped, updated)

    def _flatten(self, a: Arg | Out, array: Any) -> Any:
        """A NumPy array with its leading shape folded into tokens; a view, which `check.layout` made sure of."""
        if array is None or not a.lead:
            return array
        return array.reshape(self.bound.axes["tokens"], *array.shape[len(self.lead or ()) :])

    def returned(self, results: Sequence[Any], updated: tuple[Any, ...] = ()) -> Any:
        """What the caller gets: the outputs, then (immutable frameworks) the updated caches."""
        if self.framework is dlpack_:  # the caller's own objects, not our readings of them
            results = [r.owner if isinstance(r, dlpack_.Foreign) else r for r in results]
        values = tuple(r for o, r in zip(self.spec.outputs, results, strict=True) if o.allocate) + updated
        if not values:
            return None
        return values[0] if len(values) == 1 else values

    def _debug_cuda(self, pointers: Sequence[int], handle: int) -> None:
        """HCCUPY_DEBUG=1: look at the metadata on the host before anything is launched."""
        if cuda.is_capturing(handle):
            raise CaptureError(f"{self.spec.name}: HCCUPY_DEBUG=1 reads device metadata, which a graph capture forbids. Unset it to capture.")
        cupy = cuda.cupy()
        b = SimpleNamespace(axes=self.bound.axes, **self.bound.scalars)
        for a, pointer, meta in zip(self.arrays, pointers, self.metas, strict=True):
            value = None
            if meta is not None and meta.dtype in ("int32", "int64") and isinstance(a, Arg) and not a.mutated:
                dtype = BY_NAME[meta.dtype]
                low, high = overlap.extent(meta.shape, meta.strides, dtype.itemsize)
                memory = cupy.cuda.UnownedMemory(pointer + low, max(high - low, 1), self)
                strides = tuple(s * dtype.itemsize for s in meta.strides)
                source = cupy.ndarray(meta.shape, dtype.np, cupy.cuda.MemoryPointer(memory, -low), strides)
                with cuda.on_stream(handle):
                    value = cupy.asnumpy(source)
            setattr(b, a.name, value)
        if self.spec.debug is not None:
            self.spec.debug(b)


def stream_handle(stream: Any) -> int:
    """The cudaStream_t of an int, a torch stream or a CuPy stream.

    Raises ArgumentError for anything else.
    """
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    raise ArgumentError(explain("hccupy", "stream", "a stream handle, a torch.cuda.Stream or a cupy.cuda.Stream", repr(stream)))
