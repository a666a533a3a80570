"""hccupy: fused hyper-connection and RoPE + paged-KV kernels for NumPy, CuPy, PyTorch and JAX arrays.

Importing this touches no CUDA and imports neither torch nor jax.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

from . import traced as _traced  # noqa: F401  (torch.compile sees the registered ops)
from .api import (
    ihc_head,
    ihc_post,
    ihc_post_pre,
    ihc_pre,
    rope_norm_store_kv,
    rope_norm_store_kv_fp8,
    store_kv,
    zero_kv_tail,
)
from .bound import bind
from .errors import (
    ArgumentError,
    CaptureError,
    CompileError,
    DeviceError,
    DtypeError,
    FrameworkError,
    HccupyError,
    LaunchError,
    LayoutError,
    MetadataError,
    NoGpuError,
    OutOfMemoryError,
    ShapeError,
    UnknownOpError,
)
from .explain import supports
from .logs import from_environment as _log_as_asked
from .ops import REGISTRY as _REGISTRY
from .version import __version__
from .warmup import warmup

_log_as_asked()

__all__ = [
    "ArgumentError",
    "CaptureError",
    "CompileError",
    "DeviceError",
    "DtypeError",
    "FrameworkError",
    "HccupyError",
    "LaunchError",
    "LayoutError",
    "MetadataError",
    "NoGpuError",
    "OutOfMemoryError",
    "ShapeError",
    "UnknownOpError",
    "__version__",
    "bind",
    "ihc_head",
    "ihc_post",
    "ihc_post_pre",
    "ihc_pre",
    "rope_norm_store_kv",
    "rope_norm_store_kv_fp8",
    "store_kv",
    "supports",
    "warmup",
    "zero_kv_tail",
]

__all__ += [name for name in _REGISTRY if name not in __all__]  # ops made by api.from_spec

# Imported when they are asked for, and not in __all__: they need torch or jax.
_LAZY = {"compat": ".compat", "jax": ".jax", "nn": ".nn", "torch_ops": ".torch_ops"}


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return _import_module(_LAZY[name], __name__)
    if name in _REGISTRY:
        from . import api

        return getattr(api, name)
    if name in ("patch", "unpatch"):
        return getattr(_import_module(".patching", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
