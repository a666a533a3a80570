"""hpc-ops' names, argument orders and defaults: a rename table with no checks of its own.

`hccupy.compat.install_hpc()` puts this in the place of `import hpc`. The functions serve every shape, stride and
architecture that hccupy does. Errors are hccupy's, under hccupy's argument names.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from .. import api
from ..errors import ArgumentError, explain
from ..version import __version__

__hccupy__ = True
__all__ = [
    "QuantType",
    "__version__",
    "fuse_ihc_head",
    "fuse_ihc_post",
    "fuse_ihc_post_pre",
    "fuse_ihc_pre",
    "rope_norm_store_kv",
    "rope_norm_store_kv_fp8",
]
POLICIES = {0: "none", 1: "rope_then_norm", 2: "norm_then_rope"}
Q_QUANT = {1: "dynamic", 2: "static"}


class QuantType(IntEnum):
    """quant_policy of rope_norm_store_kv_fp8."""

    QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR = 1
    QPERTENSOR_KPERTENSOR_VPERTENSOR = 2


def fuse_ihc_pre(
    x: Any, w: Any, hc_scale: Any, hc_base: Any, norm_eps: float = 1e-5, hc_eps: float = 1e-6, magnitude: float = 2.0,
    rms_weight: Any = None, rms_eps: float = 0.0, cast_bfloat_for_norm: bool = True,
) -> Any:  # fmt: skip
    """hccupy.ihc_pre -> (y, H_post)."""
    return api.ihc_pre(x, w, hc_scale, hc_base, norm_eps, hc_eps, magnitude, rms_weight, rms_eps, cast_bfloat_for_norm)


def fuse_ihc_post(x: Any, residual: Any, H_post: Any) -> Any:
    """hccupy.ihc_post."""
    return api.ihc_post(x, residual, H_post)


def fuse_ihc_head(
    x: Any, w: Any, hc_scale: Any, hc_base: Any, norm_eps: float = 1e-5, hc_eps: float = 1e-6,
    rms_weight: Any = None, rms_eps: float = 0.0, cast_bfloat_for_norm: bool = True,
) -> Any:  # fmt: skip
    """hccupy.ihc_head."""
    return api.ihc_head(x, w, hc_scale, hc_base, norm_eps, hc_eps, rms_weight, rms_eps, cast_bfloat_for_norm)


def fuse_ihc_post_pre(
    xa: Any, residual: Any, H_post_in: Any, w: Any, hc_scale: Any, hc_base: Any, norm_eps: float = 1e-5, hc_eps: float = 1e-6,
    magnitude: float = 2.0, rms_weight: Any = None, rms_eps: float = 0.0, cast_bfloat_for_norm: bool = True,
) -> Any:  # fmt: skip
    """hccupy.ihc_post_pre -> (new residual, z, H_post_out)."""
    return api.ihc_post_pre(xa, residual, H_post_in, w, hc_scale, hc_base, norm_eps, hc_eps, magnitude, rms_weight, rms_eps, cast_bfloat_for_norm)


def rope_norm_store_kv(
    key_cache: Any, value_cache: Any, qkv: Any, cos_sin: Any, num_seqlen_per_req: Any, q_index: Any, kvcache_indices: Any,
    is_prefill: bool, q_norm_weight: Any = None, k_norm_weight: Any = None, out_q: Any = None, out_k: Any = None, out_v: Any = None,
    qk_norm_policy: int = 0,
) -> Any:  # fmt: skip
    """hccupy.rope_norm_store_kv; is_prefill makes no difference, and without a norm its weights are dropped, as hpc-ops does."""
    return api.rope_norm_store_kv(
        key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices,
        **_norm("rope_norm_store_kv", qk_norm_policy, q_norm_weight, k_norm_weight), out_q=out_q, out_k=out_k, out_v=out_v,
    )  # fmt: skip


def rope_norm_store_kv_fp8(
    key_cache: Any, value_cache: Any, qkv: Any, cos_sin: Any, num_seqlen_per_req: Any, q_index: Any, kvcache_indices: Any,
    is_prefill: bool, k_scale: Any, v_scale: Any, quant_policy: int,
    max_seqlens: int = 0, upper_max: float | None = None, q_scale_inv: Any = None, q_norm_weight: Any = None, k_norm_weight: Any = None, out_q: Any = None, out_k: Any = None, out_v: Any = None, qk_norm_policy: int = 0,
) -> Any:  # fmt: skip
    """hccupy.rope_norm_store_kv_fp8 -> (q, q_scale, split_k_flag); quant_policy 1 dynamic Q, 2 static Q."""
    op = "rope_norm_store_kv_fp8"
    q_quant = _choice(op, "quant_policy", quant_policy, Q_QUANT)
    return api.rope_norm_store_kv_fp8(
        key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices,
        **_norm(op, qk_norm_policy, q_norm_weight, k_norm_weight), out_q=out_q, out_k=out_k, out_v=out_v,
        k_scale=k_scale, v_scale=v_scale, q_quant=q_quant, q_scale_inv=q_scale_inv if q_quant == "static" else None, upper_max=upper_max,
        is_prefill=bool(is_prefill), max_q_len=int(max_seqlens),
    )  # fmt: skip


def _norm(op: str, policy: Any, q_weight: Any, k_weight: Any) -> dict[str, Any]:
    name = _choice(op, "qk_norm_policy", policy, POLICIES)
    return {"qk_norm_policy": name} if name == "none" else {"qk_norm_policy": name, "q_norm_weight": q_weight, "k_norm_weight": k_weight}


def _choice(op: str, argument: str, value: Any, names: dict[int, str]) -> Any:
    """The name of an int, or of an engine's own enum."""
    number = 0 if value is None else int(getattr(value, "value", value))
    if number not in names:
        words = ", ".join(f"{k} ({v})" for k, v in names.items())
        raise ArgumentError(explain(op, argument, f"one of {words}", repr(value)))
    return names[number]
