"""Step 5: pack the arguments in the order every kernel declares them, and start the kernel on the caller's stream.

Parameter order: pointers of the arrays (parameters in signature order, then outputs), strides of those arrays along the
axes their spec lists, run-time scalars, run-time axes. `parameters` states it; a test compares it with kernels/*.cu.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import build, cuda, switches
from .errors import LaunchError
from .plan import Plan
from .spec import Bound, OpSpec


def parameters(spec: OpSpec) -> Iterator[tuple[str, str]]:
    """(name, type) of every kernel parameter, type one of "pointer", "long long", "float", "int"."""
    for a in spec.arrays:
        yield a.name, "pointer"
    for a in spec.arrays:
        for axis in a.strides:
            yield f"{a.name}_stride_{axis}", "long long"
    for s in spec.scalars:
        if s.in_kernel and not s.baked:
            yield s.name, "float" if s.kind == "float" else "int"
    for length in spec.axes:
        if not length.baked:
            yield length.name, "int"


Start = Callable[[Sequence[int], int], None]  # (addresses of the arrays, stream handle): starts the kernel
log = logging.getLogger("hccupy")
_FORMAT = {"pointer": "Q", "long long": "q", "float": "f", "int": "i"}


def values(spec: OpSpec, bound: Bound) -> list[int | float]:
    """The values after the pointers, in the order of `parameters`."""
    out: list[int | float] = []
    for a in spec.arrays:
        names = a.axes if isinstance(a.axes, tuple) else ()
        for axis in a.strides:
            out.append(bound.strides[a.name][names.index(axis)] if bound.has(a.name) else 0)
    for s in spec.scalars:
        if s.in_kernel and not s.baked:
            value = bound.scalars[s.name]
            out.append(0 if value is None else float(value) if s.kind == "float" else int(value))
    out.extend(bound.axes[a.name] for a in spec.axes if not a.baked)
    return out


STREAM = cuda.LaunchConfig.stream.offset  # the three words after it stand in one line with the addresses: one pack a call


def refusal(op: str, plan: Plan, words: str) -> LaunchError:
    """What the driver answered, with how the kernel was to be started."""
    how = plan.launch
    return LaunchError(
        f"{op}: the driver refused the launch: {words}; grid {how.grid}, block {how.block}, {how.smem} bytes of shared memory, cluster {how.cluster}"
    )


class Launcher:
    """A kernel with everything but the pointers and the stream filled in.

    Each thread has its own block, the launch configuration and behind it the arguments, because it is patched in place while
    the GIL is released by the call.
    """

    def __init__(self, spec: OpSpec, plan: Plan, bound: Bound, function: int) -> None:
        kinds = [kind for _, kind in parameters(spec)]
        self.op = spec.name
        self.plan = plan
        self.pointers = kinds.count("pointer")
        self.rest = struct.pack("=" + "".join(_FORMAT[k] for k in kinds[self.pointers :]), *values(spec, bound))
        self.sizes = [8 if k in ("pointer", "long long") else 4 for k in kinds]
        self.config = cuda.launch_config(plan.launch)
        self.attributes = ctypes.addressof(self.config.attributes.contents), self.config.count
        self.patch = struct.Struct(f"{3 + self.pointers}P").pack_into  # P takes half the time of Q
        self.patched = self.pointers  # how many addresses, from the first on, are told at each call
        self.start = bytes(8 * self.pointers)  # what a new block holds of addresses
        self.function = function
        self.local = threading.local()
        self.call = cuda.driver().cuLaunchKernelEx

    def holding(self, pointers: Sequence[int], count: int) -> Launcher:
        """The same with blocks of its own that hold these addresses: only the first `count` are patched."""
        other = copy.copy(self)
        other.local = threading.local()
        other.start = struct.pack(f"={self.pointers}Q", *pointers)
        other.patched, other.patch = count, struct.Struct(f"{3 + count}P").pack_into
        return other

    def block(self) -> tuple[Any, int, int, Any]:
        """This thread's (buffer, address of the configuration, address of the parameter table, keep-alive)."""
        cuda.ensure_context()
        content = bytes(self.config) + self.start + self.rest
        buffer = ctypes.create_string_buffer(content, len(content))
        table = (ctypes.c_void_p * len(self.sizes))()
        config = ctypes.addressof(buffer)
        offset = config + ctypes.sizeof(self.config)
        for i, size in enumerate(self.sizes):
            table[i] = offset
            offset += size
        made = (buffer, config, ctypes.addressof(table), table)
        self.local.block = made
        return made

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        """Start the kernel. The current device must be the arrays'.

        Raises LaunchError with the driver's words.
        """
        try:
            buffer, config, table, _ = self.local.block
        except AttributeError:
            buffer, config, table, _ = self.block()
        self.patch(buffer, STREAM, stream, *self.attributes, *pointers)
        code = self.call(config, self.function, table, None)
        if code:
            self.refused(code)

    def refused(self, code: int) -> None:
        """Raises LaunchError for what the driver answered, or what check_fork has to say."""
        cuda.check_fork()
        raise refusal(self.op, self.plan, cuda.error_text(code))


class RawLauncher:
    """The same start through cupy.RawKernel, public from end to end: no clusters, no programmatic dependent launch."""

    def __init__(self, spec: OpSpec, plan: Plan, bound: Bound, kernel: Any) -> None:
        if plan.launch.cluster > 1:
            raise LaunchError(
                f"{spec.name}: {plan.variant} needs clusters of {plan.launch.cluster} blocks, which HCCUPY_LAUNCH=rawkernel cannot start. Unset it."
            )
        kinds = [kind for _, kind in parameters(spec)]
        types: dict[str, Any] = {"long long": np.int64, "float": np.float32, "int": np.int32}
        rest = kinds[kinds.count("pointer") :]
        self.rest = tuple(types[kind](value) for kind, value in zip(rest, values(spec, bound), strict=True))
        self.op, self.plan, self.kernel = spec.name, plan, kernel
        self.cuda = cuda.cupy().cuda

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        """Start the kernel. The current device must be the arrays'.

        Raises LaunchError with the driver's words.
        """
        how = self.plan.launch
        cuda.ensure_context()
        try:
            with cuda.on_stream(stream):  # a new one each time: CuPy's notion of the current stream is left as it was
                self.kernel(how.grid, how.block, (*map(np.uint64, pointers), *self.rest), shared_mem=how.smem)
        except self.cuda.driver.CUDADriverError as error:
            raise refusal(self.op, self.plan, str(error)) from error


def launcher(spec: OpSpec, plan: Plan, bound: Bound, device: int) -> Start:
    """The plan's kernel, loaded on `device` (which must be current) and ready to start in the way the switches ask for."""
    kernel = build.function(plan, device)
    start: Start = RawLauncher(spec, plan, bound, kernel) if switches.rawkernel() else Launcher(spec, plan, bound, kernel.kernel.ptr)
    return ranged(spec.name, start) if switches.on("HCCUPY_NVTX") else start


def ranged(op: str, start: Start) -> Start:
    """`start` inside an NVTX range "hccupy.op"; as it is, with a warning, where the package nvtx is missing."""
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        log.warning("hccupy: HCCUPY_NVTX=1 needs the package nvtx: pip install nvtx")
        return start

    def inside(pointers: Sequence[int], stream: int) -> None:
        with nvtx.annotate(f"hccupy.{op}"):
            start(pointers, stream)

    return inside
