"""RopeNorm: RoPE, QK-RMSNorm, KV write and FP8 quantisation of an attention layer, prefill and decode parts from one metadata object."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any
from weakref import WeakValueDictionary

import torch

from .. import api, torch_ops
from ..errors import ArgumentError, ShapeError, explain
from ..explain import supports
from .common import KeepsFp32, eps_of
from .context import get_forward_context

KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
DEFAULT_EPS = 1e-6  # hpc-ops' fixed value, for norms that do not tell theirs
POLICIES = ("none", "rope_then_norm", "norm_then_rope")


class QkNormPolicy(IntEnum):
    """Order of the QK-RMSNorm and RoPE; the values are hpc-ops'."""

    NONE = 0
    ROPE_THEN_NORM = 1
    NORM_THEN_ROPE = 2


# layer name -> module: how the registered op, which sees only tensors and the name, finds its way back.
instances: WeakValueDictionary[str, RopeNorm] = WeakValueDictionary()


class RopeNorm(KeepsFp32):
    """q of a fused projection, rotated and normalised, with K and V written to the layer's paged cache on the way.

    num_heads, num_kv_heads, head_dim: of this rank. cos_sin_cache: [positions, rotary_dim], kept as a non-persistent fp32
    buffer. use_qk_norm, fallback_qnorm, fallback_knorm: the RMSNorms whose weights process_weights_after_loading() copies,
    in place, into fp32 parameters (their eps is used too; 1e-6 if they tell none). kv_cache_dtype: "auto", "bfloat16",
    "float16", "fp8" or "fp8_e4m3". layer_name: where metadata and cache of this layer are found.
    forward_context: a function giving what hccupy.nn.ForwardContext describes; the default is set_forward_context's, or vLLM's.
    rope_style: "neox" or "interleaved".

    The norms stay outside the module tree. Under torch.compile the call is the registered op hccupy::rope_norm_forward,
    opaque like vLLM's: name it among the splitting ops if graphs are captured piecewise.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, cos_sin_cache: Any, use_qk_norm: bool,
        fallback_qnorm: Any, fallback_knorm: Any, kv_cache_dtype: str, layer_name: str,
        qk_norm_policy: Any = QkNormPolicy.ROPE_THEN_NORM, *, forward_context: Callable[[], Any] | None = None, rope_style: str = "neox",
    ) -> None:  # fmt: skip
        super().__init__()
        ok, reason = _support(num_heads, num_kv_heads, head_dim, kv_cache_dtype)
        if not ok:
            raise ArgumentError(f"RopeNorm: {reason}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_size, self.kv_size, self.head_per_group = num_heads * head_dim, num_kv_heads * head_dim, num_heads // num_kv_heads
        self.use_qk_norm, self.rope_style = use_qk_norm, rope_style
        self.use_fp8 = "fp8" in kv_cache_dtype
        self.qk_norm_policy = QkNormPolicy(int(qk_norm_policy)) if use_qk_norm else QkNormPolicy.NONE
        normed = self.qk_norm_policy is not QkNormPolicy.NONE
        if normed and (fallback_qnorm is None or fallback_knorm is None):
            missing = "fallback_qnorm" if fallback_qnorm is None else "fallback_knorm"
            raise ArgumentError(explain("RopeNorm", missing, "an RMSNorm with use_qk_norm=True", "None", "Give both, or use_qk_norm=False."))
        object.__setattr__(self, "fallback_qnorm", fallback_qnorm)
        object.__setattr__(self, "fallback_knorm", fallback_knorm)
        self.register_buffer("cos_sin_cache", cos_sin_cache.float(), persistent=False)
        for name in ("qnorm_weight", "knorm_weight"):
            weight = torch.ones(head_dim, dtype=torch.float32, device=cos_sin_cache.device) if normed else None
            self.register_parameter(name, None if weight is None else torch.nn.Parameter(weight, requires_grad=False))
        self.norm_eps = DEFAULT_EPS
        self._context = forward_context or get_forward_context
        self.layer_name = ""
        self.register_layer_name(layer_name)

    @classmethod
    def support(cls, num_heads: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: str) -> bool:
        """Can this machine run such a layer?"""
        return _support(num_heads, num_kv_heads, head_dim, kv_cache_dtype)[0]

    @classmethod
    def support_reason(cls, num_heads: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: str) -> str:
        """Which kernel runs such a layer, or why none does."""
        return _support(num_heads, num_kv_heads, head_dim, kv_cache_dtype)[1]

    def register_layer_name(self, layer_name: str) -> None:
        """Be found under this name."""
        self.layer_name = layer_name
        instances[layer_name] = self

    def process_weights_after_loading(self, model: Any = None) -> None:
        """Copy the norms' weights into the fp32 parameters, in place: addresses that a captured graph holds stay right.

        Raises ShapeError, or ArgumentError where the two norms have different eps.
        """
        if self.qk_norm_policy is QkNormPolicy.NONE:
            return
        eps = []
        for name, norm, mine in (("q", self.fallback_qnorm, self.qnorm_weight), ("k", self.fallback_knorm, self.knorm_weight)):
            if tuple(norm.weight.shape) != (self.head_dim,):
                raise ShapeError(explain("RopeNorm", f"fallback_{name}norm", f"a weight of shape [{self.head_dim}]", f"{list(norm.weight.shape)}"))
            with torch.no_grad():
                mine.copy_(norm.weight)
            try:
                eps.append(eps_of("RopeNorm", norm))
            except ArgumentError:
                eps.append(DEFAULT_EPS)
        if eps[0] != eps[1]:
            raise ArgumentError(explain("RopeNorm", "eps", "one eps for both norms", f"{eps[0]} and {eps[1]}", "The kernel takes one."))
        self.norm_eps = eps[0]

    def forward(self, qkv: Any, layer_name: str | None = None, kv_cache: Any = None) -> Any:
        """qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> q [tokens, num_heads, head_dim] (e4m3 with an fp8 cache).

        kv_cache: the layer's cache, if the code that is compiled around this call holds it itself and reads it afterwards;
        by default it is the context's, which the compiler does not see.
        """
        dtype = torch.float8_e4m3fn if self.use_fp8 else qkv.dtype
        output = torch.empty((qkv.shape[0], self.num_heads, self.head_dim), dtype=dtype, device=qkv.device)
        name = self.layer_name if layer_name is None else layer_name
        if torch.compiler.is_compiling():
            FORWARD(qkv, output, name, kv_cache)
        else:
            _forward(qkv, output, name, kv_cache, self)
        return output

    forward_native = forward_cuda = forward

    def _caches(self, kv_cache: Any) -> tuple[Any, Any]:
        """K and V [blocks, block_size, kv_heads, head_dim] as views of the layer's cache: packed or with K and V apart."""
        if kv_cache.dim() == 4:  # [blocks, kv_heads, block_size, 2 * head_dim]
            both = kv_cache.transpose(1, 2)
            return both[..., : self.head_dim], both[..., self.head_dim :]
        if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:  # [blocks, 2, block_size, kv_heads, head_dim]
            return kv_cache[:, 0], kv_cache[:, 1]
        expected = "[blocks, kv_heads, block_size, 2 * head_dim] or [blocks, 2, block_size, kv_heads, head_dim]"
        raise ShapeError(explain("RopeNorm", "kv_cache", expected, f"shape {list(kv_cache.shape)}", "Give a view of one of these."))

    def _forward_impl(self, qkv: Any, kv_cache: Any, attn_metadata: Any, attn_layer: Any, output: Any) -> None:
        """One launch a part: decode tokens stand first, prefill tokens after them, rows of padding last (their q becomes zero)."""
        m, caches = attn_metadata, self._caches(kv_cache)
        decodes, prefills, tokens = m.num_decodes, m.num_prefills, m.num_decode_tokens
        lengths, table = m.seq_lens, m.block_table_tensor
        rows = qkv.shape[0]
        if prefills > 0:
            part = slice(decodes, decodes + prefills)
            index = m.qo_indptr[: prefills + 1]
            scale, _ = self._part(qkv[tokens:], output[tokens:], caches, lengths[part], index, table[part], attn_layer, m.max_query_len)
            if self.use_fp8:
                m.hpc_prefill_q_scale = scale
            rows = tokens
        if decodes > 0:
            index = m.qo_indptr_decode[: decodes + 1]
            scale, flag = self._part(qkv[:rows], output[:rows], caches, lengths[:decodes], index, table[:decodes], attn_layer, None)
            if self.use_fp8:
                m.hpc_decode_q_scale, m.hpc_split_k_flag = scale[:tokens], flag
        elif prefills == 0:
            _clear(output)
        m.hpc_kv_written = True  # the attention backend must not write K and V again

    def _part(
        self, qkv: Any, output: Any, caches: tuple[Any, Any], seq_lens: Any, q_index: Any, block_table: Any, layer: Any, max_q_len: int | None
    ) -> tuple[Any, Any]:
        """Prefill if max_q_len is given, else decode. (q_scale, split_k_flag) with an fp8 cache, else two None."""
        options: dict[str, Any] = {"norm_eps": self.norm_eps, "qk_norm_policy": POLICIES[self.qk_norm_policy], "rope_style": self.rope_style}
        given = (*caches, qkv, self.cos_sin_cache, seq_lens, q_index, block_table)
        options.update(q_norm_weight=self.qnorm_weight, k_norm_weight=self.knorm_weight, out_q=output)
        if not self.use_fp8:
            api.rope_norm_store_kv(*given, **options)
            return None, None
        options.update(k_scale=layer._k_scale.reshape(1), v_scale=layer._v_scale.reshape(1))
        _, q_scale, flag = api.rope_norm_store_kv_fp8(*given, **options, is_prefill=max_q_len is not None, max_q_len=max_q_len)
        return q_scale, flag


def _support(num_heads: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: str) -> tuple[bool, str]:
    if kv_cache_dtype not in KV_DTYPES:
        return False, f"kv_cache_dtype: expected one of {', '.join(KV_DTYPES)}, got {kv_cache_dtype!r}."
    heads: dict[str, Any] = {"q_heads": num_heads, "kv_heads": num_kv_heads, "head_dim": head_dim}
    if "fp8" in kv_cache_dtype:
        return supports("rope_norm_store_kv_fp8", is_prefill=False, **heads)
    return supports("rope_norm_store_kv", **heads)


def _clear(output: Any) -> None:
    (output.view(torch.uint8) if output.dtype == torch.float8_e4m3fn else output).zero_()


def _forward(qkv: Any, output: Any, layer_name: str, kv_cache: Any = None, module: RopeNorm | None = None) -> None:
    """What the registered op does: find module, metadata and cache, and run. Without metadata (a profile run) q is zero."""
    if module is None or module.layer_name != layer_name:
        module = instances.get(layer_name)
        if module is None:
            known = ", ".join(sorted(instances)) or "none"
            raise ArgumentError(explain("RopeNorm", "layer_name", f"a registered one ({known})", repr(layer_name), "Keep the module alive."))
    context = module._context()
    metadata = context.attn_metadata
    if isinstance(metadata, dict):
        metadata = metadata.get(layer_name)
    layer = context.no_compile_layers.get(layer_name)
    if kv_cache is None and layer is not None:
        kv_cache = layer.kv_cache
        if isinstance(kv_cache, list | tuple):  # one a pipeline stage in flight
            kv_cache = kv_cache[getattr(context, "virtual_engine", 0)]
    if metadata is None or (kv_cache is not None and kv_cache.numel() == 0):
        _clear(output)
        return
    if kv_cache is None or (module.use_fp8 and layer is None):
        what = "kv_cache" if kv_cache is None else "_k_scale and _v_scale"
        raise ArgumentError(explain("RopeNorm", "no_compile_layers", f"a layer {layer_name!r} with {what}", "none", "Give it to set_forward_context()."))
    module._forward_impl(qkv, kv_cache, metadata, layer, output)


def _register() -> Any:
    torch_ops.library.define("rope_norm_forward(Tensor qkv, Tensor(a!) output, str layer_name, Tensor(b!)? kv_cache=None) -> ()", tags=torch_ops.TAGS)
    for key in ("CPU", "CUDA"):
        torch_ops.library.impl("rope_norm_forward", _forward, key)
    torch.library.register_fake(f"{torch_ops.NAMESPACE}::rope_norm_forward", lambda *given, **named: None, lib=torch_ops.library)
    return torch.ops.hccupy.rope_norm_forward.default


FORWARD = _register()
