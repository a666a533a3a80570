"""Builders of rope and store_kv calls, an fp64 oracle written again from the contract, and one way to call an op anywhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY
from hccupy.ops.rope_inputs import make_caches, make_metadata, rope_table

from . import oracle
from .adapters import Adapter

E4M3 = ml_dtypes.float8_e4m3fn
SENTINEL = 0xA5  # every byte of a cache that nobody may touch


def sentinel(shape: Any, dtype: Any) -> np.ndarray:
    """An array of which every byte is SENTINEL."""
    return np.full(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize, SENTINEL, np.uint8).view(dtype).reshape(shape)


def dirty(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Sentinel bytes in both caches, through their strides; returns copies."""
    for name in ("key_cache", "value_cache"):
        given[name][...] = sentinel(given[name].shape, given[name].dtype)
    return given["key_cache"].copy(), given["value_cache"].copy()


def raw(a: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers."""
    return np.ascontiguousarray(a).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit."""
    return a.shape == b.shape and bool((raw(a) == raw(b)).all())


def build(
    rng: np.random.Generator, q_heads: int = 4, kv_heads: int = 2, dim: int = 64, v_dim: int = 0, rotary: int = -1, block_size: int = 8,
    lengths: Any = (11, 9), new: Any = (3, 1), padding: int = 0, positions: int = 0, dtype: str = "bfloat16", cache: Any = None,
    policy: str = "none", weight_dtype: Any = np.float32, spare: int = 2, fill: Any = None, **scalars: Any,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of rope_norm_store_kv with dense caches full of the sentinel (or of `fill`)."""
    v_dim, rotary = v_dim or dim, dim if rotary < 0 else rotary
    metadata, pages = make_metadata(rng, lengths, new, block_size, spare)
    kind = cache or BY_NAME[dtype].np
    caches = [sentinel((pages, block_size, kv_heads, d), kind) for d in (dim, v_dim)]
    if fill is not None:
        for c in caches:
            c[...] = fill
    width = (q_heads + kv_heads) * dim + kv_heads * v_dim
    qkv = (rng.standard_normal((int(np.sum(new)) + padding, width)) * 1.5).astype(BY_NAME[dtype].np)
    table = rng.uniform(-1, 1, (positions or max([*lengths, 1]), rotary)).astype(np.float32)  # no two entries alike, no unit circle
    given = {"key_cache": caches[0], "value_cache": caches[1], "qkv": qkv, "cos_sin": table, **metadata}
    if policy != "none":
        given["qk_norm_policy"] = policy
        for name in ("q_norm_weight", "k_norm_weight"):
            given[name] = (1 + 0.3 * rng.standard_normal(dim)).astype(weight_dtype)
    return {**given, **scalars}


def fp8(given: dict[str, Any], k_scale: float = 0.013, v_scale: float = 0.02, kind: Any = E4M3, **scalars: Any) -> dict[str, Any]:
    """The same call of rope_norm_store_kv_fp8: caches of the same shapes with e4m3, dynamic Q in prefill layout."""
    caches = {n: sentinel(given[n].shape, kind) for n in ("key_cache", "value_cache")}
    more: dict[str, Any] = {"k_scale": np.array([k_scale], np.float32), "v_scale": np.array([v_scale], np.float32)}
    if scalars.get("q_quant", "dynamic") == "dynamic" and scalars.get("is_prefill", True):
        more["max_q_len"] = max(int(np.diff(given["q_index"]).max(initial=1)), 1)
    return {**given, **caches, **more, **scalars}


def call(on: Adapter, op: str, given: dict[str, Any], **outs: Any) -> SimpleNamespace:
    """The op through its public function on `on`. Everything comes back as NumPy: results, caches, outs."""
    spec = REGISTRY[op]
    arrays = {k: on.put(v) for k, v in given.items()}
    placed = {k: on.put(v) for k, v in outs.items()}
    result = on.op(op)(**arrays, **placed)
    on.synchronize()
    results = list(result) if isinstance(result, tuple) else [result]
    back = {o.name: on.get(r) for o, r in zip([o for o in spec.outputs if o.allocate], results, strict=False)}
    mutated = [a.name for a in spec.args if a.mutated]
    if on.mutable:
        back.update({n: on.get(arrays[n]) for n in mutated})
        back.update({n: on.get(placed[n]) for n in placed if n != "out_q"})
    else:
        back.update(zip(mutated, (on.get(r) for r in results[-len(mutated) :]), strict=True))
    return SimpleNamespace(**back)


def bf16(on: Adapter, given: dict[str, Any], **outs: Any) -> SimpleNamespace:
    return call(on, "rope_norm_store_kv", given, **outs)


def quantised(on: Adapter, given: dict[str, Any], **outs: Any) -> SimpleNamespace:
    return call(on, "rope_norm_store_kv_fp8", given, **outs)


def views(on: Adapter, layout: str, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """`given` with caches that are views of one sentinel buffer of that layout, on the device; and that buffer there."""
    buffers = []

    def make(shape: tuple[int, ...]) -> Any:
        buffers.append(on.put(sentinel(shape, given["key_cache"].dtype)))
        return buffers[-1]

    nb, bs, heads, dim = given["key_cache"].shape
    key, value = make_caches(layout, make, nb, bs, heads, dim, given["value_cache"].shape[-1])
    return {**given, "key_cache": key, "value_cache": value}, buffers


def of_an_earlier_step(given: dict[str, Any], rng: np.random.Generator) -> dict[str, dict[str, np.ndarray]]:
    """What the metadata, then all that is read, may hold until the grid before has ended: alone, together, out of date or garbage."""
    lengths, index, table = (np.asarray(given[n]) for n in ("seq_lens", "q_index", "block_table"))
    positions = len(given["cos_sin"])
    other = ((lengths - 1 + rng.integers(1, positions, lengths.shape)) % positions + 1).astype(np.int32)
    last = np.arange(len(lengths)) == np.flatnonzero(np.diff(index))[-1]  # of those with rows
    rows = np.sort(rng.integers(0, index[-1] + 1, len(index) - 2)).astype(np.int32)
    step = {"seq_lens": other, "q_index": np.concatenate([index[:1], rows, index[-1:]]), "block_table": rng.permutation(table.reshape(-1)).reshape(table.shape)}
    values = ("qkv", "cos_sin", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale", "q_scale_inv")
    words = np.array([-(2**31), -(2**31) + 1, -(2**16), -1, 0, 1, 3, 17, 2**16, 2**31 - 2, 2**31 - 1], np.int32)
    return {
        "one length": {"seq_lens": np.where(last, other, lengths)},
        "q_index": {"q_index": step["q_index"]},
        "block_table": {"block_table": step["block_table"]},
        "an earlier step": step,
        "garbage": {n: rng.choice(words, a.shape) for n, a in step.items()},
        "garbage pages": {"block_table": rng.choice(words, table.shape)},
        "zeros": {n: np.zeros_like(a) for n, a in step.items()},
        "everything": step | {n: np.roll(given[n], 1) if given[n].size > 1 else given[n] * np.float32(3) for n in values if n in given},
    }


# ---- oracle -----------------------------------------------------------------------------------------------------


def head(x: Any, cos_sin: Any, weight: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """(one head in fp64, size of the terms each element is a sum of)."""
    x = x.astype(np.float64)
    policy, style = given.get("qk_norm_policy", "none"), given.get("rope_style", "neox")
    r = len(cos_sin)
    size = np.abs(x)

    def norm(v: Any) -> Any:
        return (weight.astype(np.float64) + given.get("norm_weight_offset", 0.0)) / np.sqrt((v * v).mean() + given.get("norm_eps", 1e-6))

    if policy == "norm_then_rope":
        factor = norm(x)
        x, size = x * factor, size * np.abs(factor)
    y = x.copy()
    for pair in range(r // 2):
        i, j = (pair, pair + r // 2) if style == "neox" else (2 * pair, 2 * pair + 1)
        c, s = float(cos_sin[pair]), float(cos_sin[r // 2 + pair])
        y[i], y[j] = x[i] * c - x[j] * s, x[j] * c + x[i] * s
        size[i] = size[j] = max(size[i], size[j]) * max(abs(c), abs(s))
    if policy == "rope_then_norm":
        factor = norm(y)
        y, size = y * factor, size * np.abs(factor)
    return y, size


def expected(given: dict[str, Any]) -> SimpleNamespace:
    """q, k [tokens, heads, dim] in fp64 (with sizes), v as it came, and (page, slot) or None of each row. Good metadata only."""
    dim, v_dim, kv_heads = given["key_cache"].shape[3], given["value_cache"].shape[3], given["key_cache"].shape[2]
    bs, tokens = given["key_cache"].shape[1], len(given["qkv"])
    q_heads = (given["qkv"].shape[1] - kv_heads * (dim + v_dim)) // dim
    q, k = np.zeros((2, tokens, q_heads, dim)), np.zeros((2, tokens, kv_heads, dim))
    where: list[Any] = [None] * tokens
    for b, length in enumerate(given["seq_lens"]):
        first, end = int(given["q_index"][b]), int(given["q_index"][b + 1])
        for i in range(first, end):
            position = int(length) - (end - first) + (i - first)
            page = int(given["block_table"][b, position // bs])
            where[i] = None if page == given.get("null_block") else (page, position % bs)
            for h in range(q_heads + kv_heads):
                x = given["qkv"][i, h * dim : (h + 1) * dim]
                target, at, name = (q, h, "q_norm_weight") if h < q_heads else (k, h - q_heads, "k_norm_weight")
                target[0, i, at], target[1, i, at] = head(x, given["cos_sin"][position], given.get(name), given)
    v = np.array(given["qkv"][:, (q_heads + kv_heads) * dim :]).reshape(tokens, kv_heads, v_dim)
    return SimpleNamespace(q=q, k=k, v=v, where=where)


def close(got: np.ndarray, want: Any, label: str) -> None:
    """Within 1 ulp of the dtype, or of what fp32 keeps of the terms where a pair cancels."""
    exact, size = want
    mantissa = BY_NAME[got.dtype.name].mantissa
    oracle.check_ulps(got, exact, 1.0, 1.0, label, size * 2.0 ** (mantissa - 23) * 8)


def verify(given: dict[str, Any], got: SimpleNamespace, before: tuple[Any, Any] | None = None) -> None:
    """q, K and V of every row, zero tails, and that nothing else in the caches moved (`before`; default the sentinel)."""
    want = expected(given)
    close(got.q, want.q, "q")
    kc, vc = (sentinel(given[n].shape, given[n].dtype) for n in ("key_cache", "value_cache")) if before is None else before
    kc, vc = np.array(kc), np.array(vc)
    for i, place in enumerate(want.where):
        if place is None:
            continue
        page, slot = place
        close(got.key_cache[page, slot], (want.k[0, i], want.k[1, i]), f"k of row {i}")
        kc[page, slot], vc[page, slot] = got.key_cache[page, slot], want.v[i]
        if i + 1 in given["q_index"] and given.get("tail", "zero") == "zero":  # the last token of its request
            kc[page, slot + 1 :], vc[page, slot + 1 :] = 0, 0
    assert same(got.key_cache, kc), "key_cache: something else moved"
    assert same(got.value_cache, vc), "value_cache: V is not a copy, or something else moved"


def codes_of(x: Any, inverse: Any, bound: float = 448.0) -> Any:
    """e4m3 bytes of fp32 x * fp32 inverse by the contract's rule, from a table of all codes (no cast is trusted)."""
    table = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)  # 0 .. 448
    scaled = (np.asarray(x, np.float32) * np.float32(inverse)).astype(np.float64)
    size = np.minimum(np.abs(scaled), bound)
    at = np.searchsorted(table, size)
    low = table[np.maximum(at - 1, 0)]
    down = (at > 0) & ((size - low < table[np.minimum(at, 126)] - size) | ((size - low == table[np.minimum(at, 126)] - size) & ((at - 1) % 2 == 0)))
    code = np.where(down, at - 1, at) | np.where(np.signbit(scaled), 0x80, 0)
    return np.where(np.isnan(scaled), 0x7F, code).astype(np.uint8)


__all__ = [
    "E4M3", "SENTINEL", "bf16", "build", "call", "close", "codes_of", "dirty", "expected", "fp8", "head", "of_an_earlier_step", "quantised", "raw", "rope_table", "same",
    "sentinel", "verify", "views",
]  # fmt: skip
