"""A GPU made of Python, for the host side of the CUDA path: CuPy's and the driver's few words, and arrays that say they are on cuda:0."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from hccupy import arch, arrays, build, cuda, run
from hccupy.frameworks import numpy_


class DriverError(Exception):
    """cupy.cuda.driver.CUDADriverError."""


class Kernel:
    """A RawKernel that notes its calls."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name, self.max_dynamic_shared_size_bytes = gpu, name, 49152
        self.kernel = SimpleNamespace(ptr=0xF00)

    def __call__(self, grid, block, args, *, shared_mem=0):
        if self.gpu.refuse:
            raise DriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self.gpu.raw.append((grid, block, args, shared_mem, self.gpu.current_stream))


class Gpu:
    """Both what `import cupy` and what libcuda would give. `capturing` and `code` are what the driver answers."""

    def __init__(self, capability=(8, 0)) -> None:
        self.capability, self.capturing, self.code, self.refuse, self.device_code = capability, False, 0, False, 0
        self.loads: list[bytes] = []
        self.launches: list[int] = []
        self.raw: list[Any] = []
        self.current_stream = None
        runtime = SimpleNamespace(getDevice=self.get_device, setDevice=lambda i: None, getDeviceCount=lambda: 1, getDeviceProperties=self.properties)
        stream = SimpleNamespace(from_external=self.on_stream)
        driver = SimpleNamespace(CUDADriverError=DriverError)
        self.cuda = SimpleNamespace(runtime=runtime, driver=driver, Stream=stream, Device=lambda i: contextlib.nullcontext())
        self.__version__, self.__file__ = "14", "fake"

    def get_device(self):
        if self.device_code:
            raise RuntimeError("cudaErrorInitializationError: initialization error")
        return 0

    def properties(self, index):
        major, minor = self.capability
        return {"major": major, "minor": minor, "multiProcessorCount": 132, "sharedMemPerBlockOptin": 232448 if major >= 9 else 166912}

    @contextlib.contextmanager
    def on_stream(self, stream):
        before, self.current_stream = self.current_stream, stream.__cuda_stream__()[1]
        yield
        self.current_stream = before

    def RawModule(self, path):
        with open(path, "rb") as file:
            self.loads.append(file.read())
        return SimpleNamespace(get_function=lambda name: Kernel(self, name))

    # libcuda

    def cuLaunchKernelEx(self, config, function, table, extra):
        self.launches.append(cuda.LaunchConfig.from_address(config).stream)
        return self.code

    def cuStreamIsCapturing(self, stream, status):
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = int(self.capturing)
        return 0

    def cuOccupancyMaxActiveClusters(self, count, function, config):
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = 7
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        return 0

    def cuGetErrorName(self, code, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR"
        return 0

    cuGetErrorString = cuGetErrorName


class Array:
    """NumPy memory that says it is on cuda:0."""

    def __init__(self, a: np.ndarray) -> None:
        self.a = a


FRAMEWORK = SimpleNamespace(
    NAME="fake",
    MUTABLE=True,
    key=lambda x: (x.a.shape, x.a.strides, x.a.dtype),
    pointer=lambda x: x.a.ctypes.data & ~15,
    meta=lambda x: arrays.Meta(*[getattr(numpy_.meta(x.a), n) for n in ("shape", "strides", "dtype")], ("cuda", 0)),
    empty=lambda shape, dtype, device, like: Array(np.empty(shape, dtype.np)),
    stream=lambda device: 77,
)


def install(monkeypatch, tmp_path, capability=(8, 0)) -> Gpu:
    """A fresh GPU, process state and cache for one test."""
    gpu = Gpu(capability)
    monkeypatch.setattr(cuda, "cupy", lambda: gpu)
    monkeypatch.setattr(cuda, "driver", lambda: gpu)
    monkeypatch.setattr(cuda, "_owner", None)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(run, "_memo", {})
    monkeypatch.setitem(arrays._BY_TYPE, Array, FRAMEWORK)
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "cache"))
    arch._measured.cache_clear()
    return gpu


def post(tokens=3, hidden=64) -> list[Array]:
    """Arguments of ihc_post."""
    return [Array(np.ones(shape, np.float32)) for shape in ((tokens, hidden), (tokens, 4, hidden), (tokens, 4))]
