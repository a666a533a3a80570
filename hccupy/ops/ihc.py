"""Independent hyper-connections: ihc_pre, ihc_head, ihc_post, ihc_post_pre.

Formulas: the iHC layers of HY V4 models. tokens N, hc M parallel residual channels, hidden H; there is no
combination matrix (that is mHC). The references below are the CPU path: fp32 arithmetic, one rounding at a store.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..dtypes import BY_NAME, FLOATS, from_f32, to_f32
from ..spec import Arg, Axis, Bound, Case, OpSpec, Out, Scalar
from . import ihc_launch, ihc_sm90

BLOCK = 16  # tokens per NumPy block: 16 x 4 x 6144 fp32 = 1.5 MB, which a core's L2 holds (one pass over all: 2.3x slower)
SOURCE = "iHC layers of HY V4 models (independent hyper-connections)"


# ---- references -------------------------------------------------------------------------------------------------


def sigmoid(v: Any) -> Any:
    """1 / (1 + exp(-v)), without overflow warnings at large -v."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-v))


def _blocks(tokens: int) -> list[slice]:
    return [slice(i, min(i + BLOCK, tokens)) for i in range(0, tokens, BLOCK)]


def _gates(xf: Any, b: SimpleNamespace) -> Any:
    """mixes = (xf @ w.T) * rsqrt(mean(xf^2)): [n, rows of w]. One product a token, so bits do not depend on n."""
    flat = xf.reshape(len(xf), -1)
    mean = np.matmul(flat[:, None, :], flat[:, :, None])[:, 0] / np.float32(flat.shape[1])
    mixes = np.matmul(b.w, flat[:, :, None])[:, :, 0]
    return mixes * (1 / np.sqrt(mean + np.float32(b.norm_eps)))


def _merge(xf: Any, h_pre: Any, out: Any, b: SimpleNamespace) -> None:
    """out = sum_i h_pre[:, i] * xf[:, i, :], with the caller's next RMSNorm folded in when rms_weight is given."""
    y = np.matmul(h_pre[:, None, :], xf)[:, 0]
    if b.rms_weight is not None:
        if b.round_before_norm:
            y = to_f32(from_f32(y, out.dtype))
        mean = np.matmul(y[:, None, :], y[:, :, None])[:, 0] / np.float32(y.shape[1])
        y = y / np.sqrt(mean + np.float32(b.rms_eps)) * to_f32(b.rms_weight)
    out[...] = from_f32(y, out.dtype)


def reference_pre(b: SimpleNamespace) -> None:
    """x, w, hc_scale, hc_base -> y, h_post."""
    hc = b.axes["hc"]
    for rows in _blocks(b.axes["tokens"]):
        xf = to_f32(b.x[rows])
        mixes = _gates(xf, b)
        h_pre = sigmoid(mixes[:, :hc] * b.hc_scale[0] + b.hc_base[:hc]) + np.float32(b.hc_eps)
        gate = sigmoid(mixes[:, hc:] * b.hc_scale[1] + b.hc_base[hc:])
        b.h_post[rows] = np.float32(b.magnitude) * gate + np.float32(b.hc_eps)
        _merge(xf, h_pre, b.y[rows], b)


def reference_head(b: SimpleNamespace) -> None:
    """As reference_pre with one gate a channel and no h_post."""
    for rows in _blocks(b.axes["tokens"]):
        xf = to_f32(b.x[rows])
        h_pre = sigmoid(_gates(xf, b) * b.hc_scale[0] + b.hc_base) + np.float32(b.hc_eps)
        _merge(xf, h_pre, b.y[rows], b)


def reference_post(b: SimpleNamespace) -> None:
    """y[:, i] = h_post[:, i] * x + residual[:, i]."""
    for rows in _blocks(b.axes["tokens"]):
        y = b.h_post[rows][:, :, None] * to_f32(b.x[rows])[:, None, :]
        y += to_f32(b.residual[rows])
        b.y[rows] = from_f32(y, b.y.dtype)


def reference_post_pre(b: SimpleNamespace) -> None:
    """ihc_post, then ihc_pre of the rounded result."""
    reference_post(b)
    reference_pre(SimpleNamespace(**{**vars(b), "x": b.y, "y": b.z, "h_post": b.h_post_next}))


# ---- inputs, bytes, cases ---------------------------------------------------------------------------------------


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    return from_f32(rng.standard_normal(shape, np.float32) * np.float32(scale), BY_NAME[dtype].np)


def _gate_inputs(case: Case, rng: np.random.Generator, rows: int) -> dict[str, Any]:
    """Weights that give logits of standard deviation 1.3, so that the gates are neither flat nor saturated."""
    a = case.axes
    k = a["hc"] * a["hidden"]
    given = {
        "w": (rng.standard_normal((rows, k)) / np.sqrt(k)).astype(np.float32),
        "hc_scale": rng.uniform(1.0, 1.6, max(rows // a["hc"], 1)).astype(np.float32),
        "hc_base": (rng.standard_normal(rows) * 0.5).astype(np.float32),
    }
    if case.options.get("norm"):
        given["rms_weight"] = _draw(rng, (a["hidden"],), case.options.get("rms_dtype", case.dtype), 0.2)
    return given


def inputs_pre(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Random keyword arguments of ihc_pre, as NumPy arrays."""
    a = case.axes
    x = _draw(rng, (a["tokens"], a["hc"], a["hidden"]), case.dtype, 1.5)
    return {"x": x, **_gate_inputs(case, rng, 2 * a["hc"]), **case.scalars}


def inputs_head(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Random keyword arguments of ihc_head."""
    a = case.axes
    x = _draw(rng, (a["tokens"], a["hc"], a["hidden"]), case.dtype, 1.5)
    return {"x": x, **_gate_inputs(case, rng, a["hc"]), **case.scalars}


def inputs_post(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Random keyword arguments of ihc_post."""
    a = case.axes
    return {
        "x": _draw(rng, (a["tokens"], a["hidden"]), case.dtype),
        "residual": _draw(rng, (a["tokens"], a["hc"], a["hidden"]), case.dtype, 1.5),
        "h_post": rng.uniform(0, 2, (a["tokens"], a["hc"])).astype(np.float32),
    }


def inputs_post_pre(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Random keyword arguments of ihc_post_pre."""
    return {**inputs_post(case, rng), **_gate_inputs(case, rng, 2 * case.axes["hc"]), **case.scalars}


def _bytes(b: Bound, residuals: int, singles: int) -> int:
    """Bytes of `residuals` tensors [tokens, hc, hidden] and `singles` tensors [tokens, hidden]; gates and w not counted."""
    return b.axes["tokens"] * b.axes["hidden"] * BY_NAME[b.dtypes["x"]].itemsize * (residuals * b.axes["hc"] + singles)


SCALARS = {"norm_eps": 1e-5, "hc_eps": 2e-6, "rms_eps": 3e-5}  # all different: one eps used twice must show


def _cases(*, gated: bool) -> tuple[Case, ...]:
    """Sizes for tests (small, odd, every dtype) and for bench (names that start with "bench")."""
    rows: list[Case] = []
    shapes = [(1, 4, 6144), (7, 4, 64), (33, 2, 100), (5, 8, 257), (3, 1, 2560), (9, 3, 4100), (65, 4, 576), (2, 6, 1), (4, 5, 7168)]
    for dtype in FLOATS:
        for n, m, h in shapes:
            options = {"norm": True} if gated and (n + m) % 2 else {}
            scalars = SCALARS if gated else {}
            rows.append(Case(f"{n}x{m}x{h}", {"tokens": n, "hc": m, "hidden": h}, scalars, dtype, options))
    for norm in (False, True) if gated else (False,):
        for n in (1, 8, 16, 64, 256, 1024, 4096, 16384):
            axes = {"tokens": n, "hc": 4, "hidden": 6144}
            rows.append(Case(f"bench{'-norm' if norm else ''}-{n}", axes, SCALARS if gated else {}, "bfloat16", {"norm": norm}))
    others = [(4, h, "bfloat16") for h in (2048, 2880, 4096, 5120, 7168, 8192, 4100, 100)] + [
        (4, 6144, "float16"),
        (2, 6144, "bfloat16"),
        (8, 6144, "bfloat16"),
        (8, 4096, "bfloat16"),
    ]
    for m, h, dtype in others:
        for n in (64, 16384):
            axes = {"tokens": n, "hc": m, "hidden": h}
            rows.append(Case(f"bench-{n}x{m}x{h}-{dtype}", axes, SCALARS if gated else {}, dtype, {"norm": False}))
    return tuple(rows)


# ---- specs ------------------------------------------------------------------------------------------------------

AXES = (
    Axis("tokens", meaning="rows; any leading shape is flattened to it"),
    Axis("hc", baked=True, low=1, high=8, meaning="parallel residual channels (hc_mult)"),
    Axis("hidden", baked=True, low=1, high=2**20, meaning="model width"),
)
X_CHANNELS = Arg("x", ("tokens", "hc", "hidden"), FLOATS, ("tokens", "hc"), lead=True, meaning="the residual channels")
X_BLOCK = Arg("x", ("tokens", "hidden"), FLOATS, ("tokens",), lead=True, meaning="output of the attention or MLP block")
RESIDUAL = Arg("residual", ("tokens", "hc", "hidden"), ("=x",), ("tokens", "hc"), lead=True, meaning="the residual channels")
H_POST = Arg("h_post", ("tokens", "hc"), ("float32",), ("tokens",), lead=True, meaning="gates from ihc_pre, never in 16 bits")
NORM_EPS = Scalar("norm_eps", "float", 1e-5, low=0.0, meaning="inside the RMS of the projection input")
HC_EPS = Scalar("hc_eps", "float", 1e-6, low=0.0, meaning="added to every gate")
MAGNITUDE = Scalar("magnitude", "float", 2.0, meaning="multiplier of h_post")
RMS = (
    Arg("rms_weight", ("hidden",), FLOATS, optional=True, meaning="weight of the caller's next RMSNorm, folded in"),
    Scalar("rms_eps", "float", 1e-5, low=0.0, meaning="inside the folded RMSNorm"),
    Scalar("round_before_norm", "bool", True, baked=True, meaning="round y to its dtype before the folded norm, as the unfused pair does"),
)
TOLERANCE = {"": (1.0, 2.0), "norm": (2.0, 3.0)}  # ulps of the output dtype: 99.9 % of the elements, all of them


def _weights(rows: str, scales: str) -> tuple[Arg, ...]:
    return (
        Arg("w", (rows, "hc*hidden"), ("float32",), meaning="gate projection; fp32 from load to gate"),
        Arg("hc_scale", (scales,), ("float32",), meaning="scale of the gate logits"),
        Arg("hc_base", (rows,), ("float32",), meaning="offset of the gate logits"),
    )


IHC_PRE = OpSpec(
    name="ihc_pre",
    summary="Gates from the RMS-normalised channels, and their weighted sum (with the next RMSNorm folded in).",
    axes=AXES,
    params=(X_CHANNELS, *_weights("2*hc", "2"), NORM_EPS, HC_EPS, MAGNITUDE, *RMS),
    outputs=(
        Out("y", "out", ("tokens", "hidden"), "=x", ("tokens",), lead=True, meaning="input of the attention or MLP block"),
        Out("h_post", "h_post_out", ("tokens", "hc"), "float32", ("tokens",), lead=True, meaning="gates for ihc_post"),
    ),
    reference=reference_pre,
    variants=(*ihc_sm90.variants("ihc_pre"), ihc_launch.PRE_TENSOR, ihc_launch.PRE),
    make_inputs=inputs_pre,
    bytes_moved=lambda b: _bytes(b, 1, 1),
    cases=_cases(gated=True),
    imagine={"tokens": "1"},
    tolerance=TOLERANCE,
    source=SOURCE,
)
IHC_HEAD = OpSpec(
    name="ihc_head",
    summary="Merge the channels into one hidden state after the last layer.",
    axes=AXES,
    params=(X_CHANNELS, *_weights("hc", "1"), NORM_EPS, HC_EPS, *RMS),
    outputs=(Out("y", "out", ("tokens", "hidden"), "=x", ("tokens",), lead=True, meaning="the merged hidden state"),),
    reference=reference_head,
    variants=(*ihc_sm90.variants("ihc_head"), ihc_launch.HEAD_TENSOR, ihc_launch.HEAD),
    make_inputs=inputs_head,
    bytes_moved=lambda b: _bytes(b, 1, 1),
    cases=_cases(gated=True),
    imagine={"tokens": "1"},
    tolerance=TOLERANCE,
    source=SOURCE,
)
IHC_POST = OpSpec(
    name="ihc_post",
    summary="Gated residual add: y[:, i] = h_post[:, i] * x + residual[:, i].",
    axes=AXES,
    params=(X_BLOCK, RESIDUAL, H_POST),
    outputs=(Out("y", "out", ("tokens", "hc", "hidden"), "=x", ("tokens", "hc"), lead=True, alias=("residual",), meaning="the new residual channels"),),
    reference=reference_post,
    variants=(ihc_launch.POST,),
    make_inputs=inputs_post,
    bytes_moved=lambda b: _bytes(b, 2, 1),
    cases=_cases(gated=False),
    imagine={"tokens": "1"},
    tolerance=TOLERANCE,
    source=SOURCE,
)
IHC_POST_PRE = OpSpec(
    name="ihc_post_pre",
    summary="ihc_post of one block and ihc_pre of the next in one pass, bit-equal to the two calls.",
    axes=AXES,
    params=(X_BLOCK, RESIDUAL, H_POST, *_weights("2*hc", "2"), NORM_EPS, HC_EPS, MAGNITUDE, *RMS),
    outputs=(
        Out("y", "out", ("tokens", "hc", "hidden"), "=x", ("tokens", "hc"), lead=True, alias=("residual",), meaning="the new residual channels"),
        Out("z", "z_out", ("tokens", "hidden"), "=x", ("tokens",), lead=True, meaning="input of the next block"),
        Out("h_post_next", "h_post_out", ("tokens", "hc"), "float32", ("tokens",), lead=True, meaning="gates for the next ihc_post"),
    ),
    reference=reference_post_pre,
    variants=(*ihc_sm90.variants("ihc_post_pre"), ihc_launch.POST_PRE_TENSOR, ihc_launch.POST_PRE),
    make_inputs=inputs_post_pre,
    bytes_moved=lambda b: _bytes(b, 2, 2),
    cases=_cases(gated=True),
    imagine={"tokens": "1"},
    tolerance=TOLERANCE,
    source=SOURCE,
)
