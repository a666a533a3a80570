"""The public ops: a signature and one call of the pipeline each. What the arguments are stands in the specs (ops/).

`documented` writes the tables of shapes and dtypes into the docstrings from the spec, so that they cannot drift.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from .ops import REGISTRY
from .run import run
from .spec import Arg, OpSpec, Scalar

Array = Any
Policy = Literal["none", "rope_then_norm", "norm_then_rope"]
Style = Literal["neox", "interleaved"]
Tail = Literal["zero", "keep"]
F = TypeVar("F", bound=Callable[..., Any])


def documented(spec: OpSpec) -> Callable[[F], F]:
    """Complete a docstring with the spec's arguments, returns, errors and source."""

    def complete(function: F) -> F:
        notes, prompt, example = inspect.cleandoc(function.__doc__ or "").partition(">>> ")
        lines = [spec.summary, "", notes.strip(), "", "Parameters", "----------"]
        for p in spec.params:
            if isinstance(p, Arg):
                kind = f"[{', '.join(p.axes)}], " + " or ".join(d.replace("=", "dtype of ") for d in p.dtypes)
                kind += (", or None" if p.optional else "") + (", written in place" if p.mutated else "")
            else:
                kind = " or ".join(map(repr, p.choices)) if p.choices else p.kind
                kind += f", default {p.default!r}"
            lines.append(f"{p.name} : {kind}\n    {p.meaning}")
        for o in spec.outputs:
            if o.keyword:
                lines.append(
                    f"{o.keyword} : array like the result {o.name}, or None\n    where {o.name} is written; allocated if None"
                    + ("" if o.allocate else "; not produced if None")
                )
        lines.append("stream : int, torch.cuda.Stream or cupy.cuda.Stream, or None\n    overrides the framework's current stream; unused on the CPU")
        lines += ["", "Returns", "-------"]
        for o in spec.outputs:
            if o.allocate:
                dtype = "set by the mode" if callable(o.dtype) else o.dtype.replace("=", "dtype of ")
                shape = f"[{', '.join(o.axes)}]" if isinstance(o.axes, tuple) else "see the notes above"
                lines.append(f"{o.name} : {shape}, {dtype}\n    {o.meaning}")
        if not any(o.allocate for o in spec.outputs):
            lines.append("None (with JAX: the updated arrays)")
        lines += ["", "Raises", "------", "ShapeError, DtypeError, LayoutError, DeviceError, FrameworkError, ArgumentError"]
        lines.append("    before anything is written; each names op, argument, expected, got. Gradients do not flow through this op.")
        lines += ["", f"Formula: {spec.source}."]
        lines += ["", "Examples", "--------", prompt + example] if example else []
        function.__doc__ = "\n".join(lines)
        return function

    return complete


def from_spec(spec: OpSpec) -> Callable[..., Any]:
    """The public function of an op, made from its spec: all that a new op needs here.

    The library's ops are written out instead: their signatures are what type checkers and editors read. A test holds both kinds to
    the spec.
    """
    words: list[str] = []
    for p in spec.params:
        if "*" not in words and isinstance(p, Scalar) and p.keyword:
            words.append("*")
        default = f"={p.default!r}" if isinstance(p, Scalar) else "=None" if p.optional else ""
        words.append(p.name + default)
    outs = [o.keyword for o in spec.outputs]
    words += [] if "*" in words else ["*"]
    words += [f"{word}=None" for word in (*filter(None, outs), "stream")]
    given = "".join(f"{p.name}, " for p in spec.params)
    body = f"return run(REGISTRY[{spec.name!r}], ({given}), ({''.join(f'{word}, ' for word in outs)}), stream)"
    made: dict[str, Any] = {}
    exec(compile(f"def {spec.name}({', '.join(words)}):\n    {body}", __file__, "exec"), globals(), made)  # names of the spec, never a caller's
    return documented(spec)(made[spec.name])  # type: ignore[no-any-return]


@documented(REGISTRY["ihc_pre"])
def ihc_pre(
    x: Array, w: Array, hc_scale: Array, hc_base: Array, norm_eps: float = 1e-5, hc_eps: float = 1e-6, magnitude: float = 2.0,
    rms_weight: Array | None = None, rms_eps: float = 1e-5, round_before_norm: bool = True,
    *, out: Array | None = None, h_post_out: Array | None = None, stream: Any = None,
) -> Any:  # fmt: skip
    """With xf = x in fp32 and r = 1 / sqrt(mean(xf^2 over hc*hidden) + norm_eps):

    mixes = (flat(xf) @ w.T) * r; h_pre = sigmoid(mixes[:hc] * hc_scale[0] + hc_base[:hc]) + hc_eps;
    h_post = magnitude * sigmoid(mixes[hc:] * hc_scale[1] + hc_base[hc:]) + hc_eps; y = sum_i h_pre[i] * xf[i].
    A row's bits do not depend on the other rows, their number, or strides.

    On sm_90a, w, hc_scale, hc_base and rms_weight are fetched while the kernel before this one on the stream may still be
    at work: one that writes them and lets its successor start early (programmatic dependent launch) must not be that kernel.

    >>> import numpy as np, hccupy
    >>> x, w = np.ones((2, 4, 8), np.float32), np.zeros((8, 32), np.float32)
    >>> y, h_post = hccupy.ihc_pre(x, w, hc_scale=np.zeros(2, np.float32), hc_base=np.zeros(8, np.float32), hc_eps=0.0)
    >>> y.shape, h_post.shape, float(y[0, 0]), float(h_post[0, 0])  # all gates of pre are 1/2, of post 1
    ((2, 8), (2, 4), 2.0, 1.0)
    """
    given = (x, w, hc_scale, hc_base, norm_eps, hc_eps, magnitude, rms_weight, rms_eps, round_before_norm)
    return run(REGISTRY["ihc_pre"], given, (out, h_post_out), stream)


@documented(REGISTRY["ihc_head"])
def ihc_head(
    x: Array, w: Array, hc_scale: Array, hc_base: Array, norm_eps: float = 1e-5, hc_eps: float = 1e-6,
    rms_weight: Array | None = None, rms_eps: float = 1e-5, round_before_norm: bool = True,
    *, out: Array | None = None, stream: Any = None,
) -> Any:  # fmt: skip
    """As ihc_pre, also in what it says of weights, with one gate a channel and no h_post.

    >>> import numpy as np, hccupy
    >>> x, w = np.ones((2, 4, 8), np.float32), np.zeros((4, 32), np.float32)
    >>> hccupy.ihc_head(x, w, np.zeros(1, np.float32), np.zeros(4, np.float32), hc_eps=0.0)[0, :3].tolist()
    [2.0, 2.0, 2.0]
    """
    given = (x, w, hc_scale, hc_base, norm_eps, hc_eps, rms_weight, rms_eps, round_before_norm)
    return run(REGISTRY["ihc_head"], given, (out,), stream)


@documented(REGISTRY["ihc_post"])
def ihc_post(x: Array, residual: Array, h_post: Array, *, out: Array | None = None, stream: Any = None) -> Any:
    """fp32 arithmetic, one rounding. out=residual updates in place.

    >>> import numpy as np, hccupy
    >>> x, residual, h_post = np.ones((1, 2), np.float32), np.zeros((1, 3, 2), np.float32), np.float32([[0, 1, 2]])
    >>> hccupy.ihc_post(x, residual, h_post, out=residual)[0].tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """
    return run(REGISTRY["ihc_post"], (x, residual, h_post), (out,), stream)


@documented(REGISTRY["ihc_post_pre"])
def ihc_post_pre(
    x: Array, residual: Array, h_post: Array, w: Array, hc_scale: Array, hc_base: Array,
    norm_eps: float = 1e-5, hc_eps: float = 1e-6, magnitude: float = 2.0,
    rms_weight: Array | None = None, rms_eps: float = 1e-5, round_before_norm: bool = True,
    *, out: Array | None = None, z_out: Array | None = None, h_post_out: Array | None = None, stream: Any = None,
) -> Any:  # fmt: skip
    """y = ihc_post(x, residual, h_post), rounded and written; (z, h_post_next) = ihc_pre(y, ...). out=residual updates in place.

    >>> import numpy as np, hccupy
    >>> x, residual, h_post = (np.ones(shape, np.float32) for shape in ((2, 8), (2, 4, 8), (2, 4)))
    >>> gates = np.zeros((8, 32), np.float32), np.zeros(2, np.float32), np.zeros(8, np.float32)
    >>> y, z, h_post_next = hccupy.ihc_post_pre(x, residual, h_post, *gates, hc_eps=0.0)
    >>> float(y[0, 0, 0]), float(z[0, 0]), h_post_next.shape
    (2.0, 4.0, (2, 4))
    """
    given = (x, residual, h_post, w, hc_scale, hc_base, norm_eps, hc_eps, magnitude, rms_weight, rms_eps, round_before_norm)
    return run(REGISTRY["ihc_post_pre"], given, (out, z_out, h_post_out), stream)


@documented(REGISTRY["rope_norm_store_kv"])
def rope_norm_store_kv(
    key_cache: Array, value_cache: Array, qkv: Array, cos_sin: Array, seq_lens: Array, q_index: Array, block_table: Array,
    *, q_norm_weight: Array | None = None, k_norm_weight: Array | None = None, qk_norm_policy: Policy = "none",
    norm_eps: float = 1e-6, norm_weight_offset: float = 0.0, rope_style: Style = "neox", tail: Tail = "zero",
    null_block: int | None = None, out_q: Array | None = None, out_k: Array | None = None, out_v: Array | None = None,
    stream: Any = None,
) -> Any:  # fmt: skip
    """Row i of request b has position seq_lens[b] - (q_index[b+1] - q_index[b]) + (i - q_index[b]) and goes to slot

    block_table[b, position // block_size], position % block_size. Rows >= q_index[requests] are padding: q is zero
    there and nothing is stored. Bad pages, positions and prefix sums skip the row's store (q zero), never write out of
    bounds, and raise MetadataError with HCCUPY_DEBUG=1. out_k / out_v take K / V instead of their cache. Position is the
    cache slot: M-RoPE is not served.

    tail="zero" clears the slots behind a request's last token in its last block. The kernel looks first: unless the
    block's first slot is among the new tokens, the tail is rewritten only if K or V is not zero in the slot right behind
    the last token (all elements) or in half of the block's last slot, judged for a few heads at a time. That finds
    rolled-back draft tokens, which begin right behind, and pages never cleared. It assumes that stale data reaches one of
    these two slots and is not all zero there; clear other pages with zero_kv_tail. The CPU path always clears.

    >>> import ml_dtypes, numpy as np, hccupy
    >>> keys, values = np.zeros((2, 4, 8, 1, 64), ml_dtypes.bfloat16)  # 4 pages of 8 slots, 1 head
    >>> angles = np.arange(32)[:, None] * 1e4 ** (-np.arange(0, 64, 2) / 64)
    >>> cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    >>> lens, index, table = np.int32([3]), np.int32([0, 3]), np.int32([[2]])  # a prompt of 3 tokens into page 2
    >>> q = hccupy.rope_norm_store_kv(keys, values, np.ones((3, 4 * 64), ml_dtypes.bfloat16), cos_sin, lens, index, table)
    >>> q.shape, np.flatnonzero(values[2].any((1, 2))).tolist()
    ((3, 2, 64), [0, 1, 2])
    """
    given = (
        key_cache, value_cache, qkv, cos_sin, seq_lens, q_index, block_table, q_norm_weight, k_norm_weight, qk_norm_policy,
        norm_eps, norm_weight_offset, rope_style, tail, null_block,
    )  # fmt: skip
    return run(REGISTRY["rope_norm_store_kv"], given, (out_q, out_k, out_v), stream)


@documented(REGISTRY["rope_norm_store_kv_fp8"])
def rope_norm_store_kv_fp8(
    key_cache: Array, value_cache: Array, qkv: Array, cos_sin: Array, seq_lens: Array, q_index: Array, block_table: Array,
    *, q_norm_weight: Array | None = None, k_norm_weight: Array | None = None, qk_norm_policy: Policy = "none",
    norm_eps: float = 1e-6, norm_weight_offset: float = 0.0, rope_style: Style = "neox", tail: Tail = "zero",
    null_block: int | None = None, out_q: Array | None = None, q_scale_out: Array | None = None, split_k_flag_out: Array | None = None,
    out_k: Array | None = None, out_v: Array | None = None, k_scale: Array, v_scale: Array, q_quant: Literal["dynamic", "static"] = "dynamic", q_scale_inv: Array | None = None,
    upper_max: float | None = None, is_prefill: bool = True, max_q_len: int | None = None, stream: Any = None,
) -> Any:  # fmt: skip
    """rope_norm_store_kv into e4m3 caches: stored = saturate(value * fp32(1 / scale)), rounded to nearest even once.

    q_scale (dynamic) is max(absmax, 1e-12) / upper_max per token and head: [requests, q_heads, ceil(max_q_len / 128) * 128]
    by the token's place in its request for prefill, [tokens, q_heads] for decode; None for static Q.
    split_k_flag is all zeros. NaN stays NaN; Inf saturates to upper_max.

    >>> import ml_dtypes, numpy as np, hccupy
    >>> keys, values = np.zeros((2, 4, 8, 1, 64), ml_dtypes.float8_e4m3fn)
    >>> cos_sin = np.concatenate([np.ones((32, 32)), np.zeros((32, 32))], 1).astype(np.float32)
    >>> where, scale = (np.int32([3]), np.int32([0, 3]), np.int32([[2]])), np.float32([0.5])
    >>> qkv = np.ones((3, 4 * 64), ml_dtypes.bfloat16)
    >>> q, q_scale, _ = hccupy.rope_norm_store_kv_fp8(keys, values, qkv, cos_sin, *where, k_scale=scale, v_scale=scale, is_prefill=False)
    >>> float(values[2, 0, 0, 0]), q_scale.shape, float(q[0, 0, 0])  # 1 / 0.5; the largest of a head of q becomes 448
    (2.0, (3, 2), 448.0)
    """
    given = (
        key_cache, value_cache, qkv, cos_sin, seq_lens, q_index, block_table, q_norm_weight, k_norm_weight, qk_norm_policy,
        norm_eps, norm_weight_offset, rope_style, tail, null_block, k_scale, v_scale, q_quant, q_scale_inv, upper_max,
        is_prefill, max_q_len,
    )  # fmt: skip
    return run(REGISTRY["rope_norm_store_kv_fp8"], given, (out_q, q_scale_out, split_k_flag_out, out_k, out_v), stream)


@documented(REGISTRY["store_kv"])
def store_kv(cache: Array, src: Array, slot_mapping: Array, *, null_block: int | None = None, stream: Any = None) -> Any:
    """Row n of src goes to slot slot_mapping[n]; negative and out-of-range slots are skipped; of duplicates any one wins (above 1,024 rows, each 16 bytes for themselves).

    >>> import numpy as np, hccupy
    >>> cache, rows = np.zeros((2, 4, 1, 8), np.float32), np.ones((3, 1, 8), np.float32)
    >>> hccupy.store_kv(cache, rows, np.int64([5, -1, 0]))  # page 1 slot 1, nowhere, page 0 slot 0
    >>> np.argwhere(cache[:, :, 0, 0]).tolist()
    [[0, 0], [1, 1]]
    """
    return run(REGISTRY["store_kv"], (cache, src, slot_mapping, null_block), (), stream)


@documented(REGISTRY["zero_kv_tail"])
def zero_kv_tail(key_cache: Array, value_cache: Array, seq_lens: Array, block_table: Array, *, null_block: int | None = None, stream: Any = None) -> Any:
    """Slots at and after seq_lens[b] in the last block of each request become zero bytes; requests of length 0 are left alone.

    >>> import numpy as np, hccupy
    >>> keys, values = np.ones((2, 2, 4, 1, 8), np.float32)
    >>> hccupy.zero_kv_tail(keys, values, np.int32([3]), np.int32([[1]]))
    >>> keys[:, :, 0, 0].tolist()
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
    """
    return run(REGISTRY["zero_kv_tail"], (key_cache, value_cache, seq_lens, block_table, null_block), (), stream)
