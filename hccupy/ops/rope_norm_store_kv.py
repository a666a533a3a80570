"""RoPE + QK-RMSNorm + paged KV write: rope_norm_store_kv and rope_norm_store_kv_fp8.

The references below are the CPU path: fp32 arithmetic, one rounding at a store, V and everything already rounded moved
as bits. All indices are 64-bit; only addressed elements of the caches are touched, whatever their strides.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..dtypes import BY_NAME, E4M3, FP8, HALVES, from_f32, to_f32
from ..errors import ArgumentError, MetadataError, ShapeError, explain
from ..spec import Arg, Axis, Bound, OpSpec, Out, Scalar
from .rope_inputs import CASES, CASES_FP8, inputs_fp8, inputs_rope
from .rope_launch import ROPE, ROPE_FP8, padded

BLOCK = 64  # tokens per NumPy block: 64 x 80 x 128 fp32 = 2.6 MB and its temporaries stay in a core's caches
E4M3_MAX = 448.0
HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256)
SOURCE = "RoPE (Su et al. 2021) and per-head RMSNorm of q and k, as in HY V4 models; FP8 scales as in hpc-ops"


# ---- references -------------------------------------------------------------------------------------------------


def bits(a: Any) -> Any:
    """The same memory as unsigned integers, so that moving it changes nothing."""
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def locate(b: SimpleNamespace) -> SimpleNamespace:
    """Where each row belongs and where its K and V go; arrays of length tokens.

    live: q is computed. stored: K and V go to page, slot. Plain bisection, so that a q_index which is not sorted gives
    the same rows here and on the GPU.
    """
    a = b.axes
    row = np.arange(a["tokens"])
    nowhere = np.zeros_like(row)
    r = SimpleNamespace(request=nowhere, place=nowhere, position=nowhere, column=nowhere, page=nowhere, slot=nowhere)
    r.held = r.live = r.stored = r.last = row < 0
    if not a["requests"] or not a["tokens"]:
        return r
    index = b.q_index.astype(np.int64)
    low, high = nowhere, nowhere + a["requests"]
    while (high - low > 1).any():
        middle = (low + high) // 2
        right = index[middle] <= row
        low, high = np.where(right, middle, low), np.where(right, high, middle)
    first, end = index[low], index[low + 1]
    r.request, r.place, r.last = low, row - first, row == end - 1
    r.held = (first <= row) & (row < end) & (first >= 0) & (end <= a["tokens"]) & ((low > 0) | (first == 0))
    r.position = b.seq_lens[low].astype(np.int64) - (end - row)
    r.live = r.held & (r.position >= 0) & (r.position < a["positions"])
    if b.out_k is None or b.out_v is None:
        r.column, r.slot = np.divmod(r.position, a["block_size"])
        r.live = r.live & (r.column < a["max_blocks"])
        r.page = b.block_table[low, np.where(r.live, r.column, 0)].astype(np.int64)
        null = r.page == b.null_block  # all False for None
        good = (r.page >= 0) & (r.page < a["num_blocks"])
        r.live, r.stored = r.live & (good | null), r.live & good & ~null
    return r


def _rotated(x: Any, b: SimpleNamespace) -> Any:
    """x [n, heads, rotary_dim] by the angles [n, 1, rotary_dim] of b.angles."""
    half = x.shape[-1] // 2
    cos, sin = b.angles[..., :half], b.angles[..., half:]
    first, second = (x[..., :half], x[..., half:]) if b.rope_style == "neox" else (x[..., 0::2], x[..., 1::2])
    first[...], second[...] = first * cos - second * sin, second * cos + first * sin
    return x


def _q_and_k(b: SimpleNamespace, rows: slice, position: Any) -> tuple[Any, Any]:
    """q and k of some rows in fp32, rotated and normalised as the policy says."""
    a = b.axes
    x = to_f32(b.qkv[rows, : (a["q_heads"] + a["kv_heads"]) * a["head_dim"]]).reshape(len(position), -1, a["head_dim"])
    heads = (slice(0, a["q_heads"]), slice(a["q_heads"], None))

    def rope() -> None:
        if a["positions"]:
            angles = b.cos_sin[position][:, None]
            _rotated(x[..., : a["rotary_dim"]], SimpleNamespace(angles=angles, rope_style=b.rope_style))

    def norm() -> None:
        x[...] *= 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(b.norm_eps))
        for part, weight in zip(heads, (b.q_norm_weight, b.k_norm_weight), strict=True):
            x[:, part] *= to_f32(weight) + np.float32(b.norm_weight_offset)

    for step in {"none": (rope,), "rope_then_norm": (rope, norm), "norm_then_rope": (norm, rope)}[b.qk_norm_policy]:
        step()
    return x[:, heads[0]], x[:, heads[1]]


def _values(b: SimpleNamespace, rows: slice) -> Any:
    a = b.axes
    return b.qkv[rows, (a["q_heads"] + a["kv_heads"]) * a["head_dim"] :].reshape(-1, a["kv_heads"], a["v_head_dim"])


def _store(cache: Any, out: Any, new: Any, r: SimpleNamespace, rows: slice) -> None:
    """K or V (as bits) of some rows to its cache, or to out."""
    if out is not None:
        bits(out)[rows] = np.where(r.live[rows, None, None], new, 0)
        return
    stored = np.flatnonzero(r.stored[rows])
    at = stored + rows.start
    bits(cache)[r.page[at], r.slot[at]] = new[stored]


def clear_slots(cache: Any, pages: Any, slots: Any) -> None:
    """Zero bytes in `slots` and all behind it, of each page."""
    memory = bits(cache)
    for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
        memory[page, slot:] = 0


def _tails(b: SimpleNamespace, r: SimpleNamespace) -> None:
    ends = np.flatnonzero(r.last & r.stored)
    pages, slots = r.page[ends], r.slot[ends] + 1
    for cache, out in ((b.key_cache, b.out_k), (b.value_cache, b.out_v)):
        if out is None and b.tail == "zero":
            clear_slots(cache, pages, slots)


def _blocks(tokens: int) -> list[slice]:
    return [slice(i, min(i + BLOCK, tokens)) for i in range(0, tokens, BLOCK)]


@np.errstate(all="ignore")
def reference(b: SimpleNamespace) -> None:
    """q is written, K and V go to their pages (or out_k, out_v), tails become zero."""
    r = locate(b)
    for rows in _blocks(b.axes["tokens"]):
        live = r.live[rows, None, None]
        q, k = _q_and_k(b, rows, np.where(r.live, r.position, 0)[rows])
        bits(b.q)[rows] = np.where(live, bits(from_f32(q, b.q.dtype)), 0)
        _store(b.key_cache, b.out_k, bits(from_f32(k, b.q.dtype)), r, rows)
        _store(b.value_cache, b.out_v, bits(_values(b, rows)), r, rows)
    _tails(b, r)


def _codes(x: Any, inverse: Any, bound: Any) -> Any:
    """x * inverse held inside +-bound (ml_dtypes would turn what is above 464 into NaN), rounded once to e4m3: the bytes."""
    codes = np.clip(x * inverse, -bound, bound).astype(E4M3.np).view(np.uint8)
    return np.where(codes == 0xFF, 0x7F, codes)  # the one NaN that GPUs give


@np.errstate(all="ignore")
def reference_fp8(b: SimpleNamespace) -> None:
    """As reference, with everything quantised to e4m3; fills q_scale (dynamic) and split_k_flag."""
    one, bound = np.float32(1), np.float32(b.upper_max or E4M3_MAX)
    r = locate(b)
    b.split_k_flag[...] = 0
    if b.q_scale is not None:
        b.q_scale[...] = 0
    for rows in _blocks(b.axes["tokens"]):
        live = r.live[rows, None, None]
        q, k = _q_and_k(b, rows, np.where(r.live, r.position, 0)[rows])
        if b.q_quant == "static":
            codes = _codes(q, b.q_scale_inv[0], bound)
        else:
            absmax = np.fmax.reduce(np.abs(q), -1, keepdims=True, initial=np.float32(0))  # fmax: ignores NaN
            scale = np.maximum(np.minimum(absmax, np.finfo(np.float32).max), np.float32(1e-12)) / bound
            codes = _codes(q, one / scale, bound)
            codes[(absmax == 0) & (codes == 0x80)] = 0  # an all-zero head has no negative zeros
            _scatter_q_scale(b, r, rows, np.where(live, scale, 0)[..., 0])
        bits(b.q)[rows] = np.where(live, codes, 0)
        _store(b.key_cache, b.out_k, _codes(k, one / b.k_scale[0], bound), r, rows)
        _store(b.value_cache, b.out_v, _codes(to_f32(_values(b, rows)), one / b.v_scale[0], bound), r, rows)
    _tails(b, r)


def _scatter_q_scale(b: SimpleNamespace, r: SimpleNamespace, rows: slice, scale: Any) -> None:
    """scale [n, q_heads] to the rows (decode), or to their request and place in it (prefill)."""
    if not b.is_prefill:
        b.q_scale[rows] = scale
        return
    fits = r.live[rows] & (r.place[rows] < b.q_scale.shape[2])
    b.q_scale[r.request[rows][fits], :, r.place[rows][fits]] = scale[fits]


# ---- what HCCUPY_DEBUG=1 looks at -------------------------------------------------------------------------------


def debug(b: SimpleNamespace) -> None:
    """Raise MetadataError for the first bad entry of q_index, position or page."""
    a = b.axes
    op = _name(vars(b))

    def bad(argument: str, expected: str, got: str, hint: str) -> MetadataError:
        return MetadataError(explain(op, argument, expected, got, hint))

    index = b.q_index.astype(np.int64)
    if index[0] != 0:
        raise bad("q_index", "0 first", f"{index[0]}", "q_index is the prefix sum of new tokens.")
    falls = np.flatnonzero(np.diff(index) < 0)
    if falls.size:
        at = falls[0]
        raise bad("q_index", f"at least {index[at]} after request {at}", f"{index[at + 1]}", "q_index is the prefix sum of new tokens.")
    over = np.flatnonzero(index > a["tokens"])
    if over.size:
        raise bad("q_index", f"at most tokens = {a['tokens']}", f"{index[over[0]]} at {over[0]}", "qkv has too few rows.")
    r = locate(b)
    wrong = np.flatnonzero(r.held & ~r.live)
    if wrong.size:
        i = wrong[0]
        request, position, column, page = (int(v[i]) for v in (r.request, r.position, r.column, r.page))
        where = f"request {request}, position {position}"
        if not 0 <= position < a["positions"]:
            hint = f"seq_lens[{request}] = {b.seq_lens[request]} counts this call's {index[request + 1] - index[request]} new tokens too."
            raise bad("seq_lens", f"positions in [0, {a['positions']}), the rows of cos_sin", where, hint)
        if column >= a["max_blocks"]:
            raise bad("block_table", f"fewer than {a['max_blocks']} blocks a request", f"{where}, block column {column}", "Widen block_table.")
        raise bad("block_table", f"pages in [0, {a['num_blocks']})", f"page {page} ({where})", "Pages to skip are declared with null_block.")


# ---- axes, rules, bytes -----------------------------------------------------------------------------------------


def _name(scalars: Any) -> str:
    return "rope_norm_store_kv_fp8" if "q_quant" in scalars else "rope_norm_store_kv"


def derive(axes: dict[str, int], scalars: Any) -> None:
    """q_heads from the width of qkv."""
    op = _name(scalars)
    kv_heads, dim, v_dim, width = (axes[n] for n in ("kv_heads", "head_dim", "v_head_dim", "qkv_width"))
    q_width = width - kv_heads * (dim + v_dim)
    axes["q_heads"] = q_width // dim if dim else 0
    shape = f"kv_heads = {kv_heads}, head_dim = {dim}, v_head_dim = {v_dim} (from the caches [num_blocks, block_size, kv_heads, dim])"
    hint = "Check the layout of the caches (give a head-major one as cache.transpose(1, 2)) and the width of qkv."
    if dim not in HEAD_DIMS or v_dim not in HEAD_DIMS or kv_heads < 1:
        return  # the limits of the axes say it better
    if q_width <= 0 or q_width % dim:
        expected = f"width q_heads*{dim} + {kv_heads * (dim + v_dim)} with {shape}"
        raise ShapeError(explain(op, "qkv", expected, f"width {width}", hint))
    if axes["q_heads"] % kv_heads:
        raise ShapeError(explain(op, "qkv", f"q_heads a multiple of {shape}", f"q_heads = {axes['q_heads']}", hint))


def _rule_rotary(b: Bound) -> None:
    r, d = b.axes["rotary_dim"], b.axes["head_dim"]
    if r % 2 or r > d:
        hint = "cos_sin is [positions, rotary_dim]: cosines, then sines."
        raise ShapeError(explain(b.op, "cos_sin", f"an even width of at most head_dim = {d}", f"{r}", hint))


def _rule_weights(b: Bound) -> None:
    policy = b.scalars["qk_norm_policy"]
    for name in ("q_norm_weight", "k_norm_weight"):
        if policy == "none" and b.has(name):
            hint = "Choose a qk_norm_policy, or leave the weight out."
            raise ArgumentError(explain(b.op, name, "None with qk_norm_policy='none'", "an array, which would be ignored", hint))
        if policy != "none" and not b.has(name):
            raise ArgumentError(explain(b.op, name, f"[head_dim] with qk_norm_policy={policy!r}", "None", "Pass both norm weights."))


def _rule_table(b: Bound) -> None:
    reads = not (b.has("out_k") and b.has("out_v"))
    if reads and b.axes["requests"] and b.axes["tokens"] and not b.axes["max_blocks"]:
        raise ShapeError(explain(b.op, "block_table", "at least one block column", "shape [requests, 0]", "block_table is [requests, max_blocks]."))


def _rule_fp8(b: Bound) -> None:
    quant, top, longest = (b.scalars[n] for n in ("q_quant", "upper_max", "max_q_len"))
    if quant == "static" and not b.has("q_scale_inv"):
        raise ArgumentError(explain(b.op, "q_scale_inv", "[1] fp32 with q_quant='static'", "None", "Pass 1 / scale of q."))
    if quant == "dynamic" and b.has("q_scale_inv"):
        raise ArgumentError(explain(b.op, "q_scale_inv", "None with q_quant='dynamic'", "an array, which would be ignored", "Use q_quant='static'."))
    if top is not None and not 0 < np.float32(top) <= E4M3_MAX:
        raise ArgumentError(explain(b.op, "upper_max", "more than 0 and at most 448", f"{top}", "None means 448, the largest e4m3."))
    if quant == "dynamic" and b.scalars["is_prefill"]:
        most = 2**31 - 128
        if longest is None or not (1 <= longest <= most or (longest == 0 and not b.axes["tokens"])):
            hint = "It is the largest number of new tokens of a request, and pads q_scale; no device sync looks it up."
            raise ArgumentError(explain(b.op, "max_q_len", "1 or more for prefill with dynamic q", f"{longest}", hint))


def _bytes(b: Bound) -> int:
    """qkv read once, q, K and V written once; the table, metadata, scales and tails are not counted."""
    a, size = b.axes, {n: BY_NAME[d].itemsize for n, d in b.dtypes.items()}
    kv = a["kv_heads"] * (a["head_dim"] + a["v_head_dim"]) * size["key_cache"]
    return a["tokens"] * (a["qkv_width"] * size["qkv"] + a["q_heads"] * a["head_dim"] * size["q"] + kv)


# ---- specs ------------------------------------------------------------------------------------------------------

AXES = (
    Axis("tokens", meaning="rows of qkv"),
    Axis("requests", meaning="sequences in the batch"),
    Axis("positions", meaning="rows of cos_sin"),
    Axis("num_blocks", meaning="pages of the caches"),
    Axis("block_size", low=1, meaning="slots of a page"),
    Axis("max_blocks", meaning="columns of block_table"),
    Axis("q_heads", baked=True, low=1, meaning="from the width of qkv; a multiple of kv_heads"),
    Axis("kv_heads", baked=True, low=1, meaning="heads of the caches"),
    Axis("head_dim", baked=True, choices=HEAD_DIMS, meaning="of q and k"),
    Axis("v_head_dim", baked=True, choices=HEAD_DIMS, meaning="of v"),
    Axis("rotary_dim", baked=True, meaning="width of cos_sin; even, at most head_dim; the dims behind it are not rotated"),
)
STRIDES = ("num_blocks", "block_size", "kv_heads")
IMAGINE = {
    "tokens": "1", "requests": "1", "positions": "4096", "num_blocks": "64", "block_size": "64", "max_blocks": "64",
    "v_head_dim": "head_dim", "rotary_dim": "head_dim", "qkv_width": "(q_heads + kv_heads) * head_dim + kv_heads * v_head_dim",
}  # fmt: skip
SCALARS = (
    Scalar("qk_norm_policy", "choice", "none", ("none", "rope_then_norm", "norm_then_rope"), baked=True, keyword=True, meaning="RMSNorm of q and k"),
    Scalar("norm_eps", "float", 1e-6, low=0.0, keyword=True, meaning="inside the RMSNorm"),
    Scalar("norm_weight_offset", "float", 0.0, keyword=True, meaning="added to both norm weights (1.0 for Gemma-style weights)"),
    Scalar("rope_style", "choice", "neox", ("neox", "interleaved"), baked=True, keyword=True, meaning="pairs (i, i + R/2), or (2i, 2i + 1)"),
    Scalar("tail", "choice", "zero", ("zero", "keep"), baked=True, keyword=True, meaning="clear the slots behind a request's last token in its last block"),
    Scalar("null_block", "int", None, optional=True, keyword=True, meaning="a page that is never written; its rows' q is computed"),
)


def _args(cache: tuple[str, ...], qkv: tuple[str, ...]) -> tuple[Arg, ...]:
    return (
        Arg("key_cache", ("num_blocks", "block_size", "kv_heads", "head_dim"), cache, STRIDES, mutated=True, meaning="pages of K, any strides"),
        Arg("value_cache", ("num_blocks", "block_size", "kv_heads", "v_head_dim"), ("=key_cache",), STRIDES, mutated=True, meaning="pages of V"),
        Arg("qkv", ("tokens", "qkv_width"), qkv, ("tokens",), meaning="q, k and v side by side: Hq*D + Hkv*D + Hkv*Dv columns"),
        Arg("cos_sin", ("positions", "rotary_dim"), ("float32",), meaning="cosines in the first half, sines in the second"),
        Arg("seq_lens", ("requests",), ("int32",), meaning="lengths after this call's tokens"),
        Arg("q_index", ("requests+1",), ("int32",), meaning="prefix sum of new tokens"),
        Arg("block_table", ("requests", "max_blocks"), ("int32",), ("requests",), meaning="pages of each request"),
        Arg("q_norm_weight", ("head_dim",), ("float32", "=qkv"), optional=True, meaning="with a qk_norm_policy"),
        Arg("k_norm_weight", ("head_dim",), ("float32", "=qkv"), optional=True, meaning="with a qk_norm_policy"),
    )


def _outs(q_dtype: str, scales: tuple[Out, ...] = ()) -> tuple[Out, ...]:
    strides = ("tokens", "kv_heads")
    return (
        Out("q", "out_q", ("tokens", "q_heads", "head_dim"), q_dtype, ("tokens", "q_heads"), meaning="zeros in padding and skipped rows"),
        *scales,
        Out("out_k", "out_k", ("tokens", "kv_heads", "head_dim"), "=key_cache", strides, allocate=False, meaning="K, instead of key_cache"),
        Out("out_v", "out_v", ("tokens", "kv_heads", "v_head_dim"), "=key_cache", strides, allocate=False, meaning="V, instead of value_cache"),
    )


def _q_scale_shape(b: Bound) -> tuple[int, ...]:
    a = b.axes
    return (a["requests"], a["q_heads"], padded(b.scalars["max_q_len"])) if b.scalars["is_prefill"] else (a["tokens"], a["q_heads"])


ROPE_NORM_STORE_KV = OpSpec(
    name="rope_norm_store_kv",
    summary="Rotate and normalise q and k of a fused projection and write K and V into a paged cache, in one pass.",
    axes=AXES,
    params=(*_args(HALVES, ("=key_cache",)), *SCALARS),
    outputs=_outs("=qkv"),
    reference=reference,
    variants=(ROPE,),
    make_inputs=inputs_rope,
    bytes_moved=_bytes,
    cases=CASES,
    derive=derive,
    imagine=IMAGINE,
    rules=(_rule_rotary, _rule_weights, _rule_table),
    debug=debug,
    tolerance={"": (1.0, 1.0)},  # ulps of q and K, where a pair does not cancel; V is bit-equal
    source=SOURCE,
)
ROPE_NORM_STORE_KV_FP8 = OpSpec(
    name="rope_norm_store_kv_fp8",
    summary="rope_norm_store_kv into FP8 (e4m3) caches, with q quantised as well.",
    axes=AXES,
    params=(
        *_args(FP8, HALVES),
        *SCALARS,
        Arg("k_scale", ("1",), ("float32",), meaning="K is divided by it"),
        Arg("v_scale", ("1",), ("float32",), meaning="V is divided by it"),
        Scalar("q_quant", "choice", "dynamic", ("dynamic", "static"), baked=True, keyword=True, meaning="a scale per token and head, or q_scale_inv"),
        Arg("q_scale_inv", ("1",), ("float32",), optional=True, meaning="q is multiplied by it (static)"),
        Scalar("upper_max", "float", None, optional=True, keyword=True, meaning="bound of the stored magnitudes; None is 448"),
        Scalar("is_prefill", "bool", True, baked=True, keyword=True, meaning="layout of q_scale, nothing else"),
        Scalar("max_q_len", "int", None, low=0, optional=True, keyword=True, presence=False, meaning="most new tokens of a request (prefill, dynamic)"),
    ),
    outputs=_outs(
        "float8_e4m3fn",
        (
            Out("q_scale", "q_scale_out", _q_scale_shape, "float32", when=lambda b: b.scalars["q_quant"] == "dynamic", meaning="zeros where no token is"),
            Out("split_k_flag", "split_k_flag_out", ("requests", "kv_heads"), "int32", meaning="zeros"),
        ),
    ),
    reference=reference_fp8,
    variants=(ROPE_FP8,),
    make_inputs=inputs_fp8,
    bytes_moved=_bytes,
    cases=CASES_FP8,
    derive=derive,
    imagine=IMAGINE,
    rules=(_rule_rotary, _rule_weights, _rule_table, _rule_fp8),
    debug=debug,
    empty=(),  # without tokens q_scale and split_k_flag still have to be zeroed
    tolerance={"": (0.0, 1.0)},  # codes are equal but where fp32 rounding straddles a midpoint
    source=SOURCE,
)
