"""The framework behind the network: NumPy and CuPy share one class, PyTorch has its own.

Only what the three spell differently is here; `@`, `+`, `*`, slicing, indexing and `reshape` are written plainly in
the network. hccupy's ops take the arrays of all three as they are.
"""

# ruff: noqa: D102 (the Protocol documents the methods, once for both classes)

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..dtypes import BY_NAME
from ..errors import ArgumentError, NoGpuError
from .missing import need

NAN_BYTE = 0xFF  # repeated, it is NaN in bf16, fp16, fp32 and e4m3 alike
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class Backend(Protocol):
    """What the network asks of a framework. Dtypes go by hccupy's names."""

    name: str
    cuda: bool
    exact: bool  # both networks must agree to the last bit: every sum of theirs goes the same way

    def put(self, array: Any) -> Any:
        """A NumPy array on the device."""

    def stale(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array full of NaN, as memory that somebody else has used may be."""

    def cast(self, x: Any, dtype: str) -> Any:
        """`x` rounded to `dtype`."""

    def from_e4m3(self, x: Any) -> Any:
        """fp8 (e4m3, or uint8 holding it) to fp32."""

    def permute(self, x: Any, *axes: int) -> Any:
        """`x` with its axes in another order."""

    def copies(self, x: Any, count: int) -> Any:
        """x [n, k] → [n, count, k], writable."""

    def masked_softmax(self, scores: Any, hidden: Any) -> Any:
        """Softmax over the last axis with no weight where `hidden` is true."""

    def silu(self, x: Any) -> Any:
        """x * sigmoid(x)."""

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        """x / sqrt(mean(x**2) + eps) * weight over the last axis of x [n, k]."""

    def absmax(self, x: Any) -> Any:
        """Largest |x| as fp32 [1], left on the device."""

    def argmax(self, x: Any) -> int:
        """Index of the largest element: the one place where generation waits for the device."""

    def host(self, x: Any) -> Any:
        """An fp32 array as NumPy."""

    def mark(self) -> Any:
        """A point in the device's time line."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Time between two marks. On CUDA both must have been reached: call after `argmax` or `host`."""


def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> Any:
    """RMSNorm of x [n, k] with its sum of squares as a dot product.

    hccupy's CPU path sums that way too; any other order differs in the last bit, which the rounding of q, k and v to
    16 bits would now and then blow up to a difference that has nothing to do with the residual path.
    """
    mean = (x[:, None, :] @ x[:, :, None])[:, 0] / np.float32(x.shape[1])
    return x / xp.sqrt(mean + np.float32(eps)) * weight


class ArrayBackend:
    """NumPy, or CuPy, which repeats its names."""

    def __init__(self, xp: Any, name: str) -> None:
        self.xp, self.name = xp, name
        self.cuda, self.exact = name == "cupy", name == "numpy"
        self._e4m3 = xp.asarray(E4M3_VALUES)

    def put(self, array: Any) -> Any:
        return self.xp.asarray(array)

    def stale(self, shape: tuple[int, ...], dtype: str) -> Any:
        kind = BY_NAME[dtype]
        bytes_ = self.xp.full((*shape[:-1], shape[-1] * kind.itemsize), NAN_BYTE, np.uint8)
        return bytes_.view(kind.np)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(BY_NAME[dtype].np)

    def from_e4m3(self, x: Any) -> Any:
        return self._e4m3[x.view(np.uint8)]  # a table, because CuPy computes nothing in fp8

    def permute(self, x: Any, *axes: int) -> Any:
        return x.transpose(axes)

    def copies(self, x: Any, count: int) -> Any:
        return self.xp.repeat(x[:, None, :], count, axis=1)

    def masked_softmax(self, scores: Any, hidden: Any) -> Any:
        scores = self.xp.where(hidden, np.float32(-np.inf), scores)
        scores = self.xp.exp(scores - scores.max(axis=-1, keepdims=True))
        return scores / scores.sum(axis=-1, keepdims=True)

    def silu(self, x: Any) -> Any:
        return x * (0.5 + 0.5 * self.xp.tanh(0.5 * x))  # this form of the sigmoid cannot overflow

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return rms_norm(self.xp, x, weight, eps)

    def absmax(self, x: Any) -> Any:
        return self.xp.abs(x.astype(np.float32)).max().reshape(1)

    def argmax(self, x: Any) -> int:
        return int(x.argmax())

    def host(self, x: Any) -> Any:
        return self.xp.asnumpy(x) if self.cuda else x

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self.xp.cuda.Event()
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        if not self.cuda:
            return float(stop - start)
        return float(self.xp.cuda.get_elapsed_time(start, stop)) / 1e3


class TorchBackend:
    """PyTorch on the CPU or on the current CUDA device."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device, self.name = torch, device, "torch"
        self.cuda, self.exact = device == "cuda", False  # its BLAS promises no equal bits, even where it gives them

    def put(self, array: Any) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def stale(self, shape: tuple[int, ...], dtype: str) -> Any:
        width = shape[-1] * BY_NAME[dtype].itemsize
        bytes_ = self.torch.full((*shape[:-1], width), NAN_BYTE, dtype=self.torch.uint8, device=self.device)
        return bytes_.view(getattr(self.torch, dtype))

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.torch, dtype))

    def from_e4m3(self, x: Any) -> Any:
        return x.view(self.torch.float8_e4m3fn).float()

    def permute(self, x: Any, *axes: int) -> Any:
        return x.permute(axes)

    def copies(self, x: Any, count: int) -> Any:
        return x[:, None, :].repeat(1, count, 1)

    def masked_softmax(self, scores: Any, hidden: Any) -> Any:
        return scores.masked_fill(hidden, float("-inf")).softmax(-1)

    def silu(self, x: Any) -> Any:
        return self.torch.nn.functional.silu(x)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        if self.cuda:
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        y = self.torch.empty_like(x)  # PyTorch's memory is aligned, on which its matmul's last bit may depend
        y.numpy()[...] = rms_norm(np, x.numpy(), weight.numpy(), eps)
        return y

    def absmax(self, x: Any) -> Any:
        return x.float().abs().max().reshape(1)

    def argmax(self, x: Any) -> int:
        return int(x.argmax())

    def host(self, x: Any) -> Any:
        return x.cpu().numpy()

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        if not self.cuda:
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1e3


class Clock:
    """Calls functions and adds up their time by name: on CUDA between events, so nothing waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._marks: dict[str, list[tuple[Any, Any]]] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = self._backend.mark()
        result = function(*args, **kwargs)
        self._marks.setdefault(name, []).append((start, self._backend.mark()))
        return result

    def rows(self) -> list[tuple[str, int, float]]:
        """(name, calls, seconds), the most expensive first."""
        rows = [(n, len(m), sum(self._backend.seconds(*pair) for pair in m)) for n, m in self._marks.items()]
        return sorted(rows, key=lambda row: -row[2])


def make_backend(framework: str | None, device: str | None) -> Backend:
    """The backend for `--framework` and `--device`; what is None is chosen to fit the other.

    Raises ArgumentError, NoGpuError or MissingPackageError, each saying what to do.
    """
    device = device or ("cuda" if framework == "cupy" else "cpu")
    if framework is None:
        framework = "numpy" if device == "cpu" else "torch" if find_spec("torch") else "cupy"
    if (framework, device) == ("numpy", "cuda"):
        raise ArgumentError("NumPy arrays live on the CPU: with --device cuda use --framework torch or cupy.")
    if (framework, device) == ("cupy", "cpu"):
        raise ArgumentError("CuPy arrays live on the GPU: with --device cpu use --framework numpy or torch.")
    if framework == "numpy":
        return ArrayBackend(np, "numpy")
    if framework == "cupy":
        return ArrayBackend(_cupy(), "cupy")
    torch = need("torch", '"hccupy[torch]"')
    if device == "cuda" and not torch.cuda.is_available():
        built = "this PyTorch is a CPU build" if torch.version.cuda is None else "PyTorch finds none that it can use"
        raise NoGpuError(f"--device cuda needs an NVIDIA GPU and {built}: use --device cpu, or install a CUDA build of PyTorch.")
    return TorchBackend(torch, device)


def _cupy() -> Any:
    """CuPy, known to have a GPU and a cuBLAS (the CuPy wheel brings none)."""
    cupy = need("cupy", '"hccupy[cuda13]" (or "hccupy[cuda12]")')
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no driver, a driver too old, ...: CuPy has a class for each
        raise NoGpuError(f"CuPy finds no usable GPU ({error}): use --device cpu --framework numpy.") from error
    if count == 0:
        raise NoGpuError("CuPy finds no GPU: use --device cpu --framework numpy.")
    try:
        cupy.ones((1, 1), np.float32) @ cupy.ones((1, 1), np.float32)
    except (ImportError, OSError, RuntimeError) as error:
        raise NoGpuError(
            f"CuPy cannot multiply matrices here ({error}): pip install nvidia-cublas (CUDA 12: nvidia-cublas-cu12), or use --framework torch."
        ) from error
    return cupy
