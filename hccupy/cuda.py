"""The few words spoken with CUDA: CuPy for devices and modules, ctypes for the one driver call CuPy lacks.

cuLaunchKernelEx carries the cluster and programmatic-launch attributes, and with a prebuilt block it is the cheapest
launch there is (3.4 us against 6.5 for RawKernel, H200 host). Struct layouts: CUDA driver API 12 and 13.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from .errors import LaunchError, NoGpuError
from .spec import Launch

_owner: int | None = None  # the process that first used CUDA through hccupy


@cache
def cupy() -> Any:
    """The CuPy module, or NoGpuError with the words to install it."""
    try:
        import cupy as module
    except Exception as error:  # a broken CuPy raises more than ImportError
        raise NoGpuError(
            f"hccupy: CUDA arrays need CuPy, which did not import ({type(error).__name__}: {error}). "
            "Install one of: pip install 'hccupy[cuda13]' or 'hccupy[cuda12]'."
        ) from error
    return module


@cache
def nvrtc() -> Any:
    """CuPy's NVRTC binding; works without a GPU and without a driver."""
    cupy()
    from cupy.cuda import nvrtc as module

    return module


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that is found, or NoGpuError with the wheel to install."""
    try:
        major, minor = nvrtc().getVersion()
    except NoGpuError:
        raise
    except Exception as error:
        raise NoGpuError(
            f"hccupy: no NVRTC was found ({type(error).__name__}: {error}). Install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12."
        ) from error
    return int(major), int(minor)


def nvrtc_archs() -> tuple[int, ...]:
    """Architectures that NVRTC compiles for, as 80, 90, 120 ..."""
    nvrtc_version()
    return tuple(int(a) for a in nvrtc().getSupportedArchs())


def device_properties(index: int) -> dict[str, int]:
    """major, minor, sms and smem (bytes a block may opt in to) of a device."""
    check_fork()
    p = cupy().cuda.runtime.getDeviceProperties(index)
    return {"major": p["major"], "minor": p["minor"], "sms": p["multiProcessorCount"], "smem": p["sharedMemPerBlockOptin"]}


def check_fork() -> None:
    """CUDA does not survive fork(): say so instead of hanging or corrupting. Called wherever CUDA is about to be used."""
    global _owner
    if _owner is None:
        _owner = os.getpid()
    elif _owner != os.getpid():
        raise NoGpuError(
            "hccupy: CUDA was used before this process was forked, and does not work in the child. "
            "Use multiprocessing's spawn start method, or call hccupy only after the fork."
        )


class Stream:
    """A stream handle as an object of the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def on_stream(handle: int) -> Any:
    """A context in which CuPy's current stream is this one."""
    return cupy().cuda.Stream.from_external(Stream(handle))


# ---- cuLaunchKernelEx -------------------------------------------------------------------------------------------

CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: what a forked child gets


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, four bytes of padding, a 64-byte union of which three ints are used."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


def launch_config(launch: Launch) -> LaunchConfig:
    """How to start a kernel, but for the stream. The attributes live as long as this object."""
    wanted = []
    if launch.cluster > 1:
        wanted.append((CLUSTER_DIMENSION, [launch.cluster, 1, 1]))
    if launch.pdl:
        wanted.append((PROGRAMMATIC_STREAM_SERIALIZATION, [1]))
    attributes = (LaunchAttribute * 2)()
    for attribute, (kind, value) in zip(attributes, wanted, strict=False):
        attribute.id = kind
        attribute.value[: len(value)] = value
    return LaunchConfig((ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block), launch.smem, None, attributes, len(wanted))


@cache
def driver() -> Any:
    """libcuda through ctypes."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGpuError(f"hccupy: no NVIDIA driver on this machine ({error}).") from error
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


def allow_large_clusters(function: int) -> None:
    """Let a kernel be launched in clusters of 16 blocks."""
    code = driver().cuFuncSetAttribute(ctypes.c_void_p(function), NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    if code:
        raise LaunchError(f"hccupy: clusters of 16 blocks were refused: {error_text(code)}")


def error_text(code: int) -> str:
    """Name and sentence of a driver error."""
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver().cuGetErrorName(code, ctypes.byref(name))
    driver().cuGetErrorString(code, ctypes.byref(text))
    hint = " (was this process forked after CUDA was used? Use the spawn start method)" if code == NOT_INITIALIZED else ""
    return f"{(name.value or b'?').decode()} ({code}): {(text.value or b'unknown error').decode()}{hint}"


def is_capturing(stream: int) -> bool:
    """Is a CUDA graph being captured on this stream?"""
    check_fork()
    status = ctypes.c_int(0)
    code = driver().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    if code == 900:  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: asked of the legacy stream while another one captures
        return True
    if code:
        raise LaunchError(f"hccupy: cuStreamIsCapturing: {error_text(code)}")
    return status.value != 0


def current_device() -> int:
    """Index of the current device. Raises NoGpuError in a child forked after CUDA was used."""
    try:
        return int(cupy().cuda.runtime.getDevice())
    except Exception:
        check_fork()  # a forked child learns here what is wrong
        raise


def ensure_context() -> None:
    """Give this thread the primary context of its current device (a new thread starts with none)."""
    check_fork()
    runtime = cupy().cuda.runtime
    runtime.setDevice(runtime.getDevice())
