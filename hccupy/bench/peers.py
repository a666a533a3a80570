"""What ours is timed against: torch eager, torch.compile, and hpc-ops, vLLM and FlashInfer where they can be imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from ..spec import Case, OpSpec

Kwargs = dict[str, Any]


def eager_pre(k: Kwargs) -> Any:
    """ihc_pre and ihc_head in plain torch."""
    import torch

    x = k["x"]
    hc = x.shape[1]
    xf = x.float().flatten(1)
    mixes = (xf @ k["w"].T) * torch.rsqrt(xf.square().mean(-1, keepdim=True) + k["norm_eps"])
    h_pre = torch.sigmoid(mixes[:, :hc] * k["hc_scale"][0] + k["hc_base"][:hc]) + k["hc_eps"]
    y = (h_pre[:, :, None] * xf.view(x.shape)).sum(1)
    if k.get("rms_weight") is not None:
        y = y.to(x.dtype).float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + k["rms_eps"]) * k["rms_weight"].float()
    if k["w"].shape[0] == hc:
        return y.to(x.dtype)
    h_post = k.get("magnitude", 2.0) * torch.sigmoid(mixes[:, hc:] * k["hc_scale"][1] + k["hc_base"][hc:]) + k["hc_eps"]
    return y.to(x.dtype), h_post


def eager_post(k: Kwargs) -> Any:
    """ihc_post in plain torch."""
    return (k["h_post"][:, :, None] * k["x"].float()[:, None, :] + k["residual"].float()).to(k["x"].dtype)


def eager_post_pre(k: Kwargs) -> Any:
    """ihc_post_pre in plain torch."""
    y = eager_post(k)
    return (y, *eager_pre({**k, "x": y}))


def eager_rope(k: Kwargs) -> Any:
    """rope_norm_store_kv (NeoX, full rotary, norm_then_rope) in plain torch: norms, rotation, two index_puts; no tail."""
    import torch

    kv_heads, dim = k["key_cache"].shape[2:]
    v_dim = k["value_cache"].shape[3]
    tokens = k["qkv"].shape[0]
    q_width = k["qkv"].shape[1] - kv_heads * (dim + v_dim)
    q, key, value = k["qkv"].split([q_width, kv_heads * dim, kv_heads * v_dim], dim=1)
    row = torch.arange(tokens, device=q.device)
    request = torch.searchsorted(k["q_index"], row, right=True) - 1
    position = k["seq_lens"][request] - (k["q_index"][request + 1] - row)
    cos, sin = k["cos_sin"][position][:, None].chunk(2, -1)

    def one(x: Any, weight: Any) -> Any:
        x = x.view(tokens, -1, dim).float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + k["norm_eps"]) * weight.float()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    size = k["key_cache"].shape[1]
    place = k["block_table"][request, position // size].long(), (position % size).long()
    k["key_cache"].index_put_(place, one(key, k["k_norm_weight"]).to(k["key_cache"].dtype))
    k["value_cache"].index_put_(place, value.view(tokens, kv_heads, v_dim))
    return one(q, k["q_norm_weight"]).to(q.dtype)


EAGER: dict[str, Callable[[Kwargs], Any]] = {
    "ihc_pre": eager_pre,
    "ihc_head": eager_pre,
    "ihc_post": eager_post,
    "ihc_post_pre": eager_post_pre,
    "rope_norm_store_kv": eager_rope,
}


def torch_peers(op: str, compiled: bool) -> dict[str, Callable[[Kwargs], Any]]:
    """name -> function of the same keyword arguments. Compiled code costs seconds a shape: `compiled` asks for it."""
    if op not in EAGER:
        return {}
    found = {"torch eager": EAGER[op]}
    if compiled:
        import torch

        torch._dynamo.reset()  # a function that has met 8 shapes would run eagerly from then on, without a word
        found["torch.compile"] = torch.compile(EAGER[op], dynamic=False, fullgraph=True)
    return found


def hpc_peers(op: str) -> dict[str, Callable[[Kwargs], Any]]:
    """The hpc-ops function of the same op, where hpc is installed (and is not our own stand-in)."""
    if importlib.util.find_spec("hpc") is None:
        return {}
    import hpc

    if getattr(hpc, "__hccupy__", False):
        return {}

    def rms(k: Kwargs) -> Kwargs:
        return {"rms_weight": k["rms_weight"], "rms_eps": k["rms_eps"]} if k.get("rms_weight") is not None else {}

    def gates(k: Kwargs) -> tuple[Any, ...]:
        return k["w"], k["hc_scale"], k["hc_base"], k["norm_eps"], k["hc_eps"]

    table: dict[str, Callable[[Kwargs], Any]] = {
        "ihc_pre": lambda k: hpc.fuse_ihc_pre(k["x"], *gates(k), 2.0, **rms(k)),
        "ihc_head": lambda k: hpc.fuse_ihc_head(k["x"], *gates(k), **rms(k)),
        "ihc_post": lambda k: hpc.fuse_ihc_post(k["x"], k["residual"], k["h_post"]),
        "ihc_post_pre": lambda k: hpc.fuse_ihc_post_pre(k["x"], k["residual"], k["h_post"], *gates(k), 2.0, **rms(k)),
        "rope_norm_store_kv": lambda k: hpc.rope_norm_store_kv(*paged(k), prefill(k), **norm(k)),
        "rope_norm_store_kv_fp8": lambda k: hpc.rope_norm_store_kv_fp8(
            *paged(k), prefill(k), k["k_scale"], k["v_scale"], 1, max_seqlens=k.get("max_q_len") or 0, **norm(k)
        ),
    }
    return {"hpc-ops": table[op]} if op in table else {}


def vllm_peers(op: str) -> dict[str, Callable[[Kwargs], Any]]:
    """vLLM's Triton kernels of HY V4, where vLLM is installed: no head, no norm, post and pre one after the other."""
    try:
        from vllm.models.hy_v4.nvidia import triton_ihc
    except ImportError:
        return {}

    def pre(k: Kwargs) -> Any:
        return triton_ihc.triton_ihc_pre(k["x"], k["w"], k["hc_scale"], k["hc_base"], k.get("magnitude", 2.0), k["hc_eps"], k["norm_eps"])

    def post(k: Kwargs) -> Any:
        return triton_ihc.triton_ihc_post(k["x"], k["residual"], k["h_post"])

    table: dict[str, Callable[[Kwargs], Any]] = {"ihc_pre": pre, "ihc_post": post, "ihc_post_pre": lambda k: (y := post(k), *pre({**k, "x": y}))}
    return {"vLLM Triton": table[op]} if op in table else {}


def flashinfer_peers(op: str) -> dict[str, Callable[[Kwargs], Any]]:
    """FlashInfer's fused RoPE, norm and append, where it is installed and has it (64/8 and 8/1 heads of 128, dense caches)."""
    found: dict[str, Callable[[Kwargs], Any]] = {}
    try:
        if op == "rope_norm_store_kv":
            from flashinfer.cake_fused_qk_rope_append import cake_fused_qk_rmsnorm_rope_append_paged_kv_cache as append

            def fused(k: Kwargs) -> Any:
                kv_heads, dim = k["key_cache"].shape[2:]
                key_cache, value_cache, *rest = paged(k)
                return append(
                    *rest, key_cache, value_cache, num_q_heads=k["qkv"].shape[1] // dim - 2 * kv_heads, num_kv_heads=kv_heads,
                    clear_unused_last_page_rows=k.get("tail", "zero") == "zero", **norm(k),
                )  # fmt: skip

            found["FlashInfer"] = fused
        elif op == "rope_norm_store_kv_fp8":
            from flashinfer.cake_fused_qk_rope_fp8_append import cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache as append_fp8

            def fused_fp8(k: Kwargs) -> Any:
                key_cache, value_cache, *rest = paged(k)
                return append_fp8(*rest, (key_cache, value_cache), prefill(k), k["k_scale"], k["v_scale"], 1, k.get("max_q_len") or 0, **norm(k))

            found["FlashInfer"] = fused_fp8
    except ImportError:  # not installed, or a release without them
        pass
    return found


def paged(k: Kwargs) -> tuple[Any, ...]:
    """hpc-ops' first arguments. FlashInfer's are the same with the caches behind the others."""
    return tuple(k[n] for n in ("key_cache", "value_cache", "qkv", "cos_sin", "seq_lens", "q_index", "block_table"))


def prefill(k: Kwargs) -> bool:
    """Has any request more than one new token? Told from shapes, as a graph is being captured."""
    return bool(k["qkv"].shape[0] > k["seq_lens"].shape[0])


def norm(k: Kwargs) -> Kwargs:
    """The norm's arguments; the bench's cases all norm first."""
    return {"q_norm_weight": k["q_norm_weight"], "k_norm_weight": k["k_norm_weight"], "qk_norm_policy": 2}


def of(spec: OpSpec, case: Case, compiled: bool, standard: bool) -> dict[str, Callable[[Kwargs], Any]]:
    """The peers of a case: all of them for the model of the goals, the fused ones for their second head count too."""
    found = torch_peers(spec.name, compiled) if standard else {}
    if standard and not case.options.get("norm"):
        found |= vllm_peers(spec.name)
    second = (case.axes.get("q_heads"), case.axes.get("kv_heads")) == (8, 1)
    return found | (hpc_peers(spec.name) | flashinfer_peers(spec.name) if standard or second else {})


def versions() -> dict[str, str]:
    """The releases of the peers that can be imported, by the names of their records."""
    found = {}
    for name, module in (("hpc-ops", "hpc"), ("vLLM Triton", "vllm"), ("FlashInfer", "flashinfer")):
        try:
            found[name] = str(importlib.import_module(module).__version__)
        except (ImportError, AttributeError):
            continue
    return found
