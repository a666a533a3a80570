"""Optional packages: imported where they are needed, missed with one sentence."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from ..errors import HccupyError


class MissingPackageError(HccupyError, ImportError):
    """A package or file of the demo is not installed; the message says how to get it."""


def need(module: str, install: str) -> ModuleType:
    """Import `module`, or say that `pip install <install>` brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        broken = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise MissingPackageError(f"The demo needs {module}, which {broken}: pip install {install}") from error
