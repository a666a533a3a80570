"""hccupy: fused hyper-connection and RoPE + paged-KV kernels for NumPy, CuPy, PyTorch and JAX arrays.

Importing this touches no CUDA and imports neither torch nor jax.
"""

from __future__ import annotations

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
from .version import __version__

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
    "zero_kv_tail",
]
