"""Realistic inputs of the rope and store_kv ops: shuffled pages, four cache layouts, mixed requests; and the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import BY_NAME, from_f32
from ..spec import Case, ceil_div

# How K and V [num_blocks, block_size, kv_heads, dim] are cut out of their memory.
LAYOUTS = ("dense", "interleaved", "packed", "head_major", "cross_layer")


def make_caches(layout: str, make: Callable[[tuple[int, ...]], Any], nb: int, bs: int, heads: int, dim: int, v_dim: int) -> tuple[Any, Any]:
    """(key_cache, value_cache) as views of what make(shape) allocates, in any framework with indexing and swapaxes."""
    if layout == "dense":
        return make((nb, bs, heads, dim)), make((nb, bs, heads, v_dim))
    if layout == "head_major":
        return make((nb, heads, bs, dim)).swapaxes(1, 2), make((nb, heads, bs, v_dim)).swapaxes(1, 2)
    if layout == "packed":  # K and V share the last axis
        both = make((nb, heads, bs, dim + v_dim)).swapaxes(1, 2)
        return both[..., :dim], both[..., dim:]
    widest = max(dim, v_dim)
    if layout == "interleaved":
        both = make((nb, 2, bs, heads, widest))
        return both[:, 0, :, :, :dim], both[:, 1, :, :, :v_dim]
    if layout == "cross_layer":  # all layers of a page together
        both = make((nb, 4, 2, bs, heads, widest))
        return both[:, 2, 0, :, :, :dim], both[:, 2, 1, :, :, :v_dim]
    raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}.")


def rope_table(positions: int, rotary_dim: int, base: float = 10000.0) -> Any:
    """cos_sin [positions, rotary_dim]: angles in fp64, cosines in the first half, sines in the second."""
    angle = np.arange(positions)[:, None] * base ** (-np.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


def make_metadata(rng: np.random.Generator, lengths: Any, new: Any, block_size: int, spare: int = 2) -> tuple[dict[str, Any], int]:
    """(seq_lens, q_index, block_table; number of pages) for requests of these lengths with these new tokens.

    Pages that this call writes are its own, in shuffled order; earlier pages of a request, which the op never touches,
    share what is left, so that a bench with long contexts does not allocate them.
    """
    lengths, new = np.asarray(lengths, np.int64), np.asarray(new, np.int64)
    columns = np.arange(max(ceil_div(int(lengths.max(initial=1)), block_size), 1))
    first = ((lengths - new) // block_size)[:, None]
    touched = (columns >= first) & (columns * block_size < lengths[:, None]) & (new > 0)[:, None]
    pages = int(touched.sum()) + spare
    order = rng.permutation(pages)
    table = order[rng.integers(pages - spare if spare else 0, max(pages, 1), touched.shape)] if pages else np.zeros(touched.shape, np.int64)
    table[touched] = order[: pages - spare]
    index = np.concatenate([[0], np.cumsum(new)])
    return {"seq_lens": lengths.astype(np.int32), "q_index": index.astype(np.int32), "block_table": table.astype(np.int32)}, pages


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0, shift: float = 0.0) -> Any:
    return from_f32(rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(shift), BY_NAME[dtype].np)


def _inputs(case: Case, rng: np.random.Generator, cache_dtype: str) -> dict[str, Any]:
    a, o = case.axes, case.options
    dim, v_dim, heads = a["head_dim"], a["v_head_dim"], a["kv_heads"]
    new, lengths = np.asarray(o["new"]), np.asarray(o["lengths"])
    metadata, pages = make_metadata(rng, lengths, new, a["block_size"])
    key_cache, value_cache = make_caches(o.get("layout", "dense"), lambda s: np.zeros(s, BY_NAME[cache_dtype].np), pages, a["block_size"], heads, dim, v_dim)
    width = (a["q_heads"] + heads) * dim + heads * v_dim
    rows = int(new.sum()) + o.get("padding", 0)
    # Large cases repeat 2,048 rows: drawing 170 million numbers takes longer than a whole bench run.
    qkv = np.resize(_draw(rng, (min(rows, 2048), width + o.get("gate", 0)), case.dtype, 1.3), (rows, width + o.get("gate", 0)))[:, :width]
    given = {"key_cache": key_cache, "value_cache": value_cache, "qkv": qkv}
    given["cos_sin"] = rope_table(int(lengths.max(initial=1)), a["rotary_dim"])
    given.update(metadata)
    if case.scalars.get("qk_norm_policy", "none") != "none":
        for name in ("q_norm_weight", "k_norm_weight"):
            given[name] = _draw(rng, (dim,), o.get("weight_dtype", "float32"), 0.2, 1.0)
    return {**given, **case.scalars}


def inputs_rope(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Keyword arguments of rope_norm_store_kv, as NumPy arrays; the caches start as zeros (a clean tail)."""
    return _inputs(case, rng, case.dtype)


def inputs_fp8(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Keyword arguments of rope_norm_store_kv_fp8."""
    given = _inputs(case, rng, case.options.get("cache_dtype", "float8_e4m3fn"))
    given["k_scale"] = np.array([0.013], np.float32)
    given["v_scale"] = np.array([0.021], np.float32)
    if case.scalars.get("q_quant") == "static":
        given["q_scale_inv"] = np.array([71.0], np.float32)
    return given


def inputs_store(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Keyword arguments of store_kv: distinct slots in random order, a few of them -1."""
    a, o = case.axes, case.options
    pages = ceil_div(a["tokens"], a["block_size"]) + 2
    cache, _ = make_caches(
        o.get("layout", "dense"), lambda s: np.zeros(s, BY_NAME[case.dtype].np), pages, a["block_size"], a["kv_heads"], a["head_dim"], a["head_dim"]
    )
    slots = rng.permutation(pages * a["block_size"])[: a["tokens"]].astype(o.get("index", np.int64))
    slots[rng.random(a["tokens"]) < o.get("skipped", 0.05)] = -1
    return {"cache": cache, "src": _draw(rng, (a["tokens"], a["kv_heads"], a["head_dim"]), case.dtype), "slot_mapping": slots, **case.scalars}


def inputs_tail(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Keyword arguments of zero_kv_tail: caches full of random values, from the 65th page on those of the first 64 again."""
    a = case.axes
    lengths = rng.integers(0, 4 * a["block_size"], a["requests"])
    metadata, pages = make_metadata(rng, lengths, lengths, a["block_size"])

    def drawn(shape: tuple[int, ...]) -> Any:
        return np.resize(_draw(rng, (min(shape[0], 64), *shape[1:]), case.dtype), shape)

    layout = case.options.get("layout", "dense")
    key_cache, value_cache = make_caches(layout, drawn, pages, a["block_size"], a["kv_heads"], a["head_dim"], a["v_head_dim"])
    del metadata["q_index"]
    return {"key_cache": key_cache, "value_cache": value_cache, **metadata, **case.scalars}


# ---- cases ------------------------------------------------------------------------------------------------------


def _axes(q_heads: int, kv_heads: int, dim: int = 128, v_dim: int = 0, rotary: int = -1, block_size: int = 64) -> dict[str, int]:
    return {
        "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "v_head_dim": v_dim or dim,
        "rotary_dim": dim if rotary < 0 else rotary, "block_size": block_size,
    }  # fmt: skip


NORM = {"qk_norm_policy": "norm_then_rope", "norm_eps": 2e-6}
MIXED = {"new": (5, 1, 0, 3, 17, 1), "lengths": (5, 40, 33, 19, 33, 16)}  # prefill, decode, idle, MTP, chunk, end of a page


def _small() -> list[Case]:
    shapes = {
        "8-2": _axes(8, 2, block_size=16),
        "24-1": _axes(24, 1, 64, block_size=16),
        "9-3-d64": _axes(9, 3, 64, block_size=16),
        "6-1-d256": _axes(6, 1, 256, block_size=16),
        "5-1-d72": _axes(5, 1, 72, block_size=8),
        "7-7-d80": _axes(7, 7, 80, block_size=16),
        "12-1-d96": _axes(12, 1, 96, block_size=16),
        "4-2-d192-v128": _axes(4, 2, 192, 128, block_size=16),
        "4-2-d128-v64": _axes(4, 2, 128, 64, block_size=16),
        "8-2-r64": _axes(8, 2, 128, rotary=64, block_size=16),
        "4-2-r36": _axes(4, 2, 72, rotary=36, block_size=16),
        "4-2-r2": _axes(4, 2, 64, rotary=2, block_size=16),
        "4-2-r0": _axes(4, 2, 64, rotary=0, block_size=16),
    }
    policies = ("none", "rope_then_norm", "norm_then_rope")
    rows = []
    for i, (name, axes) in enumerate(shapes.items()):
        for j, style in enumerate(("neox", "interleaved")):
            scalars = {"qk_norm_policy": policies[(i + j) % 3], "norm_eps": 2e-6, "rope_style": style}
            if (i + j) % 3 and i % 2:
                scalars["norm_weight_offset"] = 1.0
            dtype = "float16" if (i + j) % 4 == 3 else "bfloat16"
            options = {**MIXED, "layout": LAYOUTS[(i + 2 * j) % len(LAYOUTS)], "padding": i % 3, "gate": 64 * (j % 2)}
            if i % 2 == 0:
                options["weight_dtype"] = dtype
            rows.append(Case(f"{name}-{style}", axes, scalars, dtype, options))
    return rows


def _bench() -> list[Case]:
    """64/8 heads at every size (the goals), the other groupings and cache layouts at one decode and one prefill size."""
    rows = []
    shapes = {
        "64-8": _axes(64, 8), "8-1": _axes(8, 1), "40-8": _axes(40, 8), "32-4": _axes(32, 4), "9-3": _axes(9, 3, 64), "24-1": _axes(24, 1),
        "16-2-d256": _axes(16, 2, 256),
    }  # fmt: skip
    for name, axes in shapes.items():
        main = name in ("64-8", "8-1")
        for layout in ("dense", "packed", "interleaved", "head_major", "cross_layer") if name == "64-8" else ("dense",):
            label = name if layout == "dense" else f"{name}-{layout}"
            every = main and layout == "dense"
            for n in (1, 16, 64, 256) if every else (64,):
                for length in (1041, 1025) if every else (1041,):  # mid-block, and the first slot of a block: the worst tail
                    options = {"mode": "decode", "layout": layout, "length": length, "new": (1,) * n, "lengths": (length,) * n}
                    rows.append(Case(f"bench-{label}-decode-{n}-at-{length}", axes, NORM, "bfloat16", options))
                    if n == 256 and name == "64-8":  # what the tail costs
                        rows.append(Case(f"bench-{label}-decode-{n}-keep-at-{length}", axes, {**NORM, "tail": "keep"}, "bfloat16", options))
            for n in (512, 4096, 16384) if every else (16384,):
                new = (min(n, 4096),) * max(n // 4096, 1)
                rows.append(Case(f"bench-{label}-prefill-{n}", axes, NORM, "bfloat16", {"mode": "prefill", "layout": layout, "new": new, "lengths": new}))
    return rows


def _fp8(case: Case, index: int) -> Case:
    bench = case.name.startswith("bench")
    prefill = "prefill" in case.name if bench else index % 2 == 0
    scalars = {**case.scalars, "is_prefill": prefill}
    if prefill:
        scalars["max_q_len"] = max(case.options["new"])
    if not bench:
        scalars["q_quant"] = "static" if index % 3 == 2 else "dynamic"
        scalars["upper_max"] = 240.0 if index % 5 == 4 else None
    cache = "float8_e4m3fn" if bench else ("float8_e4m3fn", "uint8", "int8")[index % 3]
    return Case(case.name, case.axes, scalars, case.dtype, {**case.options, "cache_dtype": cache})


CASES = tuple(_small() + _bench())
CASES_FP8 = tuple(_fp8(c, i) for i, c in enumerate(CASES))


def _store(name: str, tokens: int, heads: int, dim: int, dtype: str, **options: Any) -> Case:
    axes = {"tokens": tokens, "kv_heads": heads, "head_dim": dim, "block_size": 64 if name == "bench" else 16}
    return Case(f"{name}-{tokens}x{heads}x{dim}", axes, {}, dtype, options)


def _tail(name: str, requests: int, heads: int, dim: int, v_dim: int, dtype: str, block_size: int) -> Case:
    axes = {"requests": requests, "kv_heads": heads, "head_dim": dim, "v_head_dim": v_dim, "block_size": block_size}
    return Case(f"{name}-{requests}", axes, {}, dtype, {"layout": "dense" if name == "bench" else name})


CASES_STORE = (
    _store("dense", 7, 8, 128, "bfloat16", layout="dense"),
    _store("packed", 33, 3, 64, "float16", layout="packed", index=np.int32),
    _store("mla", 5, 1, 576, "float8_e4m3fn"),
    _store("head-major", 9, 2, 80, "uint8", layout="head_major"),
    _store("interleaved", 65, 4, 128, "float32", layout="interleaved", index=np.int32),
    _store("cross-layer", 12, 2, 72, "int8", layout="cross_layer"),
    *(_store("bench", n, 8, 128, "bfloat16", skipped=0.0) for n in (1, 64, 256, 4096, 16384)),
)
CASES_TAIL = (
    _tail("dense", 5, 2, 64, 64, "bfloat16", 16),
    _tail("packed", 3, 1, 192, 128, "float16", 8),
    _tail("interleaved", 9, 3, 72, 72, "float8_e4m3fn", 16),
    *(_tail("bench", n, 8, 128, 128, "bfloat16", 64) for n in (1, 64, 256, 1024, 4096)),
)
