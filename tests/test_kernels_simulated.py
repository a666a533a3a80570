"""The real kernels/*.cu, compiled by g++ and run one fiber a thread, against the references: no GPU needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hccupy
from hccupy import arch
from hccupy.ops import REGISTRY, ihc_launch, rope_launch
from hccupy.spec import Case

from . import ihc_checks as checks
from .adapters import CPU
from .rope_cases import build as build_rope
from .rope_cases import dirty, fp8, of_an_earlier_step, raw
from .simulated import simulate

NUMPY = CPU[0]
SMALL = [(s, c) for s, c in checks.small_cases() if c.axes["tokens"] * c.axes["hc"] * c.axes["hidden"] <= 3000]
BUILDS = [{}, {"sanitize": True}, {"watch": True}]


@pytest.mark.parametrize(("spec", "case"), [pytest.param(s, c, id=f"{s.name}-{c.name}-{c.dtype}") for s, c in SMALL])
def test_ihc_kernels_against_fp64(spec, case, rng, monkeypatch):
    given = spec.make_inputs(case, rng)
    for seed in (0, 1, 4):
        checks.verify(spec, given, simulate(spec, given, seed), NUMPY)
    if spec.name != "ihc_post":  # tensor cores, in clusters of one block
        monkeypatch.setattr(ihc_launch, "TENSOR_LEAST", 0)
        checks.verify(spec, given, simulate(spec, given, 1, "sm_90a"), NUMPY)


@pytest.mark.parametrize(("hc", "hidden", "dtype"), [(4, 600, "bfloat16"), (8, 40, "float32")])
@pytest.mark.parametrize("op", ["ihc_pre", "ihc_head", "ihc_post_pre"])
def test_ihc_kernels_where_squares_overflow(op, hc, hidden, dtype, rng, monkeypatch):
    monkeypatch.setattr(ihc_launch, "TENSOR_LEAST", 0)
    for target in ("sm_80", "sm_90a"):
        checks.rows_that_overflow(op, hc, hidden, dtype, rng, lambda given, target=target: simulate(REGISTRY[op], given, 1, target))


@pytest.mark.parametrize("build", BUILDS, ids=["plain", "ubsan", "watch"])
@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_kernels_sanitized(op, build, rng, monkeypatch):
    """Undefined behaviour, stray reads and writes, data races: under each build, strided and misaligned."""
    spec = REGISTRY[op]
    monkeypatch.setattr(ihc_launch, "TENSOR_LEAST", 0)
    for hidden, shift in ((64, 0), (21, 1)):
        case = Case("sanitized", {"tokens": 3, "hc": 4, "hidden": hidden}, spec.cases[0].scalars, "bfloat16", {"norm": op != "ihc_post"})
        given = spec.make_inputs(case, rng)
        wide = np.zeros((3, 4, hidden + 8), given["x"].dtype)
        name = "residual" if "residual" in given else "x"
        wide[:, :, shift : hidden + shift] = given[name]
        given[name] = wide[:, :, shift : hidden + shift]
        for target in ("sm_80", "sm_90a"):
            checks.verify(spec, given, simulate(spec, given, 1, target, **build), NUMPY)


def _same_as_reference(op, case, rng, seed, **build):
    """Kernel and NumPy path on the same inputs: outputs and caches."""
    spec = REGISTRY[op]
    given = spec.make_inputs(case, rng)
    want_args = _copies(given)
    got = simulate(spec, given, seed, **build)
    want = getattr(hccupy, op)(**want_args)
    want = want if isinstance(want, tuple) else (want,)
    names = [o.name for o in spec.outputs if o.allocate]
    for name, g, w in [*zip(names, got, want, strict=False), *((a.name, given[a.name], want_args[a.name]) for a in spec.args if a.mutated)]:
        if w is None:
            continue
        _close(f"{op} {case.name} {name}", np.asarray(g), np.asarray(w))


def _copies(given):
    """A copy of every root array, and the same views on the copies."""
    roots = {}
    out = {}
    for k, a in given.items():
        if not isinstance(a, np.ndarray):
            out[k] = a
            continue
        root = a
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) not in roots:
            roots[id(root)] = root.copy()
        offset = a.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        out[k] = np.ndarray(a.shape, a.dtype, roots[id(root)].reshape(-1).view(np.uint8).data, offset, a.strides)
    return out


def _close(label, g, w, some=0):
    """Codes and 16-bit values may differ by one where fp32 rounding straddles a midpoint (seldom; `some` in an array of a few); everything else is equal.

    By more only where two products all but cancel: the NumPy path rounds both, the kernel's fma one, to 2^-24 of the largest values.
    """
    assert g.shape == w.shape and g.dtype == w.dtype, label
    if g.dtype.kind in "iu" and g.dtype.itemsize > 1:
        assert np.array_equal(g, w), label
        return
    if g.dtype == np.float32:
        assert np.allclose(g, w, rtol=1e-6, atol=0), label
        return
    unsigned = {1: np.uint8, 2: np.uint16}[g.dtype.itemsize]
    a, b = g.view(unsigned).astype(np.int64), w.view(unsigned).astype(np.int64)
    off = a != b
    assert off.sum() <= max(some, 2e-3 * off.size), f"{label}: {off.mean():.2%} differ"
    far = np.abs(a - b) > 1
    if far.any() and g.dtype.itemsize == 2:
        values = [v.astype(np.float32) for v in (g, w)]
        far &= ~(np.abs(values[0] - values[1]) <= 2.0**-22 * np.abs(values[1][np.isfinite(values[1])]).max(initial=0))
    assert not far.any(), f"{label}: more than one step apart"


OTHERS = [op for op in REGISTRY if op not in checks.IHC]  # RoPE, the stores, and whatever op is added
OTHER_CASES = [(op, c) for op in OTHERS for c in REGISTRY[op].cases if not c.name.startswith("bench")]


@pytest.mark.parametrize(("op", "case"), [pytest.param(o, c, id=f"{o}-{c.name}-{c.dtype}") for o, c in OTHER_CASES])
def test_rope_and_store_kernels_against_the_reference(op, case, rng):
    _same_as_reference(op, case, rng, seed=1)


@pytest.mark.parametrize("build", BUILDS[1:], ids=["ubsan", "watch"])
@pytest.mark.parametrize("op", OTHERS)
def test_rope_and_store_kernels_sanitized(op, build, rng):
    cases = [c for o, c in OTHER_CASES if o == op]
    for case in cases[:: max(len(cases) // 3, 1)]:
        _same_as_reference(op, case, rng, seed=2, **build)


SHAPES = {
    "few": (1, 16, 3, "few", 3),
    "few-2": (2, 16, 3, "few", 1),
    "row-a-block": (3, 18, 3, "block"),
    "many": (4, 20, 3, "many", 1, 4),
    "many-2": (1, 20, 3, "many", 2, 3),
    "narrow": (3, 16, 3, "narrow", 1),
    "narrow-whole": (99, 16, 3, "narrow", 1),
}


@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
@pytest.mark.parametrize("name", ["8-2-neox", "9-3-d64-interleaved"])
def test_rope_kernels_of_sm90_give_the_same_bits(op, name, rng, monkeypatch):
    """Every way rows are shared out on sm_90, guessed metadata and bulk copies included, on a chip of one multiprocessor; stale tails."""
    spec = REGISTRY[op]
    case = next(c for c in spec.cases if c.name == name)
    given = spec.make_inputs(case, rng)
    dirty(given)
    monkeypatch.setattr(arch, "TABLE", tuple(replace(a, sms=1) for a in arch.TABLE))
    monkeypatch.setattr(arch, "BY_NAME", {a.name: a for a in arch.TABLE})
    want = None
    for shape in (None, *SHAPES.values()):
        with monkeypatch.context() as patch:
            if shape:
                patch.setattr(rope_launch, "shape_of", lambda b, a, shape=shape: rope_launch.Shape(*shape))
            args = _copies(given)
            got = [*simulate(spec, args, 1, "sm_90a" if shape else "sm_80"), args["key_cache"], args["value_cache"]]
        got = [None if g is None else raw(np.ascontiguousarray(g)) for g in got]
        want = want or got
        for g, w in zip(got, want, strict=True):
            assert (g is None and w is None) or np.array_equal(g, w), shape


def _guesses(op, name, shape, rng, monkeypatch, labels=None, clean=False, **build):
    """The same bits whatever the arrays hold until the grid before has ended."""
    spec = REGISTRY[op]
    if name == "40-requests":  # more than a warp keeps at hand
        new = rng.permutation([0, 1, 1, 2] * 10)
        given = build_rope(rng, 8, 2, 128, block_size=16, lengths=rng.integers(2, 41, 40), new=new, padding=1, policy="rope_then_norm")
        given = fp8(given) if op.endswith("_fp8") else given
    else:
        given = spec.make_inputs(next(c for c in spec.cases if c.name == name), rng)
    if not clean:
        dirty(given)
    monkeypatch.setattr(rope_launch, "shape_of", lambda b, a: rope_launch.Shape(*SHAPES[shape]))

    def run(seed, previous):
        args = _copies(given)
        got = [*simulate(spec, args, seed, "sm_90a", previous=previous, **build), *(args[a.name] for a in spec.args if a.name in args)]
        return [None if g is None else raw(np.ascontiguousarray(g)) for g in got]

    want = run(1, None)
    for seed, (label, previous) in enumerate(of_an_earlier_step(given, rng).items()):
        if labels is None or label in labels:
            for g, w in zip(run(seed, previous), want, strict=True):
                assert (g is None and w is None) or np.array_equal(g, w), label


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["9-3-d64-neox", "24-1-neox", "40-requests"])
@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
def test_rope_kernels_and_what_the_previous_grid_writes(op, name, shape, rng, monkeypatch):
    """What is read before that grid has ended is a guess: other metadata then, other values in every array, the same bits."""
    _guesses(op, name, shape, rng, monkeypatch)


@pytest.mark.parametrize("build", BUILDS[1:], ids=["ubsan", "watch"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s not in ("few-2", "many-2")])
@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
def test_rope_kernels_and_previous_metadata_sanitized(op, shape, build, rng, monkeypatch):
    """No address outside the arrays comes of garbage."""
    if shape == "row-a-block" and "watch" in build:
        pytest.skip("the watcher does not know transaction barriers")
    _guesses(op, "24-1-neox", shape, rng, monkeypatch, ("an earlier step", "garbage", "garbage pages"), clean=True, **build)
