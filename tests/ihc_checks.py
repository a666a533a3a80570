"""What every iHC op must satisfy on every framework and device. Called by test_ihc.py (CPU) and test_gpu_ihc.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hccupy
from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY
from hccupy.spec import Case, OpSpec

from . import oracle, report
from .adapters import Adapter

IHC = ("ihc_pre", "ihc_head", "ihc_post", "ihc_post_pre")


def small_cases() -> list[tuple[OpSpec, Case]]:
    """Every op with every case that is not for bench."""
    return [(REGISTRY[op], c) for op in IHC for c in REGISTRY[op].cases if not c.name.startswith("bench")]


def call(op: str, given: dict[str, Any], on: Adapter, **more: Any) -> tuple[Any, ...]:
    """The op through its public function; results as NumPy arrays."""
    result = on.op(op)(**{k: on.put(v) for k, v in given.items()}, **more)
    on.synchronize()
    return tuple(on.get(r) for r in (result if isinstance(result, tuple) else (result,)))


def poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """All bits set: NaN in every float format."""
    return np.full(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize, 255, np.uint8).view(dtype).reshape(shape)


def verify(spec: OpSpec, given: dict[str, Any], got: tuple[Any, ...], on: Adapter, cancelled: float = 8 * 2.0**-23) -> None:
    """Compare with the fp64 oracle at trust's tolerances and record the worst error.

    cancelled: what is left of an output whose terms cancel may be off by this much of the largest term.
    """
    op = spec.name
    if op == "ihc_post_pre":
        given = {**given, "y": got[0]}
    want = oracle.ORACLES[op](given)
    dtype = given["x"].dtype.name
    for o, g, w in zip(spec.outputs, got, want, strict=True):
        label = f"{op} {dtype} {on.name} {o.name}"
        assert g.shape == w.shape, label
        if o.dtype == "float32":
            report.note(op, dtype, on.name, o.name, relative=oracle.check_gates(g, w, label))
            continue
        normed = given.get("rms_weight") is not None and o.name != ("y" if op == "ihc_post_pre" else "")
        most, all_ = spec.tolerance["norm" if normed else ""]
        # A weighted sum of channels may cancel: fp32 keeps the digits of its terms, not of what is left of them.
        terms = magnitude(op, o.name, given, dtype) * 2.0 ** BY_NAME[dtype].mantissa * cancelled
        report.note(op, dtype, on.name, o.name, ulps=oracle.check_ulps(g, w, most, all_, label, terms))


def magnitude(op: str, output: str, given: dict[str, Any], dtype: str) -> Any:
    """Size of the largest term an output element is a sum of."""
    if op == "ihc_post" or (op == "ihc_post_pre" and output == "y"):
        x = np.abs(given["x"].astype(np.float64))[:, None, :] * np.abs(given["h_post"])[:, :, None]
        return np.maximum(x, np.abs(given["residual"].astype(np.float64)))
    x = given["y"] if op == "ihc_post_pre" else given["x"]
    terms = np.abs(x.astype(np.float64)).max(1)
    if given.get("rms_weight") is not None:
        scale = np.abs(given["rms_weight"].astype(np.float64))
        y = oracle.ORACLES["ihc_pre" if op != "ihc_head" else "ihc_head"]({**given, "x": x, "rms_weight": None})[0]
        terms = terms * scale / np.sqrt((y * y).mean(1, keepdims=True) + given["rms_eps"])
    return terms


def case_is_right(spec: OpSpec, case: Case, rng: np.random.Generator, on: Adapter) -> None:
    """Fresh random inputs; every output poisoned first where the framework lets us supply it."""
    given = spec.make_inputs(case, rng)
    outs: dict[str, Any] = {}
    if on.mutable:
        for o, r in zip(spec.outputs, call(spec.name, given, on), strict=True):
            outs[str(o.keyword)] = on.put(poison(r.shape, r.dtype))
    got = call(spec.name, given, on, **outs)
    verify(spec, given, got, on)
    for o, g in zip(spec.outputs, got, strict=True):
        if outs:
            assert np.array_equal(on.get(outs[str(o.keyword)]).view(np.uint8), g.view(np.uint8)), f"{o.name} is not the array given"


def bits(a: np.ndarray) -> np.ndarray:
    """The bytes of an array, row by row."""
    return np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)


def rows_that_overflow(op: str, hc: int, hidden: int, dtype: str, rng: np.random.Generator, run: Callable[[dict[str, Any]], tuple[Any, ...]]) -> None:
    """A row whose sum of squares is Inf in fp32 has r = 0, gates of hc_base alone, and finite results; its neighbours are as ever."""
    spec = REGISTRY[op]
    given = spec.make_inputs(Case("overflow", {"tokens": 5, "hc": hc, "hidden": hidden}, spec.cases[0].scalars, dtype), rng)
    given["x" if op != "ihc_post_pre" else "residual"][2] *= np.asarray(1e20, np.float32).astype(given["x"].dtype)
    with np.errstate(over="ignore"):
        want = getattr(hccupy, op)(**given)
    for o, got_o, want_o in zip(spec.outputs, run(given), want if isinstance(want, tuple) else (want,), strict=True):
        g, w = got_o.astype(np.float64), want_o.astype(np.float64)
        assert np.isfinite(g).all() and np.abs(g - w).max() <= 0.02 * np.abs(w).max(), f"{op} {o.name}"
        rows = [0, 1, 3, 4]
        assert np.abs(g[rows] - w[rows]).max() <= 0.02 * np.abs(w[rows]).max(), f"{op} {o.name}"


def batch_invariant(op: str, hc: int, hidden: int, dtype: str, sizes: tuple[int, ...], rng: np.random.Generator, on: Adapter) -> None:
    """Rows of the largest batch, computed alone, at other places and in batches of every size: the same bits."""
    spec = REGISTRY[op]
    scalars = spec.cases[0].scalars
    case = Case("invariance", {"tokens": max(sizes), "hc": hc, "hidden": hidden}, scalars, dtype, {"norm": op != "ihc_post"})
    given = spec.make_inputs(case, rng)
    rows = [k for k in ("x", "residual", "h_post") if k in given]
    whole = call(op, given, on)
    for n in sizes:
        start = int(rng.integers(0, max(sizes) - n + 1))
        part = call(op, {**given, **{k: given[k][start : start + n] for k in rows}}, on)
        for o, a, b in zip(spec.outputs, part, whole, strict=True):
            assert np.array_equal(bits(a), bits(b[start : start + n])), f"{op} {o.name}: rows {start}..{start + n} change their bits with the batch"


def strides_do_not_matter(op: str, hc: int, hidden: int, dtype: str, rng: np.random.Generator, on: Adapter) -> None:
    """Strided, misaligned and reversed views of the same values give the same bits as contiguous ones."""
    spec = REGISTRY[op]
    case = Case("strides", {"tokens": 5, "hc": hc, "hidden": hidden}, spec.cases[0].scalars, dtype, {"norm": op != "ihc_post"})
    given = spec.make_inputs(case, rng)
    want = call(op, given, on)
    for shift, gap in ((0, 8), (1, 0), (3, 5), (8, 16)):
        views = dict(given)
        for name in ("x", "residual"):
            if name in given:
                a = given[name]
                wide = poison((*a.shape[:-1], a.shape[-1] + gap + shift), a.dtype)
                wide[..., shift : shift + a.shape[-1]] = a
                views[name] = wide[..., shift : shift + a.shape[-1]]
        got = call(op, views, on)
        for o, g, w in zip(spec.outputs, got, want, strict=True):
            assert np.array_equal(bits(g), bits(w)), f"{op} {o.name}: bits change with shift {shift}, gap {gap}"


def fused_is_composed(hc: int, hidden: int, tokens: int, dtype: str, rng: np.random.Generator, on: Adapter) -> None:
    """ihc_post_pre is bit-equal to ihc_post, then ihc_pre."""
    spec = REGISTRY["ihc_post_pre"]
    case = Case("fused", {"tokens": tokens, "hc": hc, "hidden": hidden}, spec.cases[0].scalars, dtype, {"norm": True})
    given = spec.make_inputs(case, rng)
    y, z, gate = call("ihc_post_pre", given, on)
    parts = ("x", "residual", "h_post")
    (alone,) = call("ihc_post", {k: given[k] for k in parts}, on)
    z2, gate2 = call("ihc_pre", {**{k: v for k, v in given.items() if k not in parts}, "x": alone}, on)
    for name, a, b in (("y", y, alone), ("z", z, z2), ("h_post_next", gate, gate2)):
        assert np.array_equal(bits(a), bits(b)), f"{name} differs from the two calls"


def in_place(op: str, hc: int, hidden: int, tokens: int, dtype: str, rng: np.random.Generator, on: Adapter, times: int = 1) -> None:
    """out=residual gives the bits of a separate output. With many tokens, clusters that shared rows would run far apart."""
    spec = REGISTRY[op]
    case = Case("in place", {"tokens": tokens, "hc": hc, "hidden": hidden}, spec.cases[0].scalars, dtype, {"norm": op != "ihc_post"})
    given = spec.make_inputs(case, rng)
    want = call(op, given, on)
    for _ in range(times):
        arrays = {k: on.put(v.copy() if isinstance(v, np.ndarray) else v) for k, v in given.items()}
        result = getattr(hccupy, op)(**arrays, out=arrays["residual"])
        got = result if isinstance(result, tuple) else (result,)
        on.synchronize()
        assert np.array_equal(bits(on.get(arrays["residual"])), bits(want[0]))
        assert on.name == "dlpack" or got[0] is arrays["residual"]
        for o, g, w in zip(spec.outputs[1:], got[1:], want[1:], strict=True):
            assert np.array_equal(bits(on.get(g)), bits(w)), f"{o.name}: other bits in place"
