"""One small tree of exceptions; each is also the built-in a caller would expect.

A message names op, argument, what was expected, what came, and how to mend it:
`hint` is that last part. Nothing has been written when one of these is raised.
"""

from __future__ import annotations


class HccupyError(Exception):
    """Base of everything hccupy raises on purpose."""


class ArgumentError(HccupyError, ValueError):
    """A scalar, choice or combination of arguments that has no meaning."""


class ShapeError(HccupyError, ValueError):
    """Wrong rank, or axes that disagree between arguments."""


class DtypeError(HccupyError, TypeError):
    """A dtype the op does not take, or two that must be equal and are not."""


class LayoutError(HccupyError, ValueError):
    """Strides, alignment or overlap that the op cannot honour."""


class DeviceError(HccupyError, ValueError):
    """Arguments on different devices, or host memory where device memory is needed."""


class FrameworkError(HccupyError, TypeError):
    """Not an array, or arrays of several frameworks in one call."""


class MetadataError(HccupyError, IndexError):
    """HCCUPY_DEBUG=1 found a bad page, position or prefix sum in the device metadata."""


class CompileError(HccupyError, RuntimeError):
    """NVRTC refused a kernel; the message carries its log."""


class CaptureError(HccupyError, RuntimeError):
    """Something that cannot be done while a CUDA graph is being captured."""


class LaunchError(HccupyError, RuntimeError):
    """The driver refused a launch."""


class NoGpuError(HccupyError, RuntimeError):
    """CUDA was needed and is not usable here; the message says what is missing."""


class OutOfMemoryError(HccupyError, MemoryError):
    """An output could not be allocated; in-place arguments are untouched."""


class UnknownOpError(HccupyError, KeyError):
    """No op of that name is in the registry."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


def explain(op: str, argument: str, expected: str, got: str, hint: str = "") -> str:
    """The one sentence shape of every argument error."""
    text = f"{op}: {argument}: expected {expected}, got {got}"
    return f"{text}. {hint}" if hint else f"{text}."
