"""The real kernels in the CPU simulator on drawn inputs: every op, dtype and policy; sizes, strides, offsets, empties, schedules, builds.

Every array lies between red zones, outputs start as NaN, caches as sentinel bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hccupy
from hccupy import arch
from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY, ihc_launch, rope_launch
from hccupy.ops.rope_inputs import LAYOUTS, make_caches
from hccupy.spec import Case

from . import ihc_checks as checks
from . import rope_cases
from .adapters import CPU
from .profile import examples
from .simulated import SimulatedAdapter, simulate
from .simulator.sim import redzone_array
from .test_kernels_simulated import SHAPES, _close, _copies

NUMPY = CPU[0]
BUILDS = st.sampled_from([{}, {}, {"sanitize": True}, {"watch": True}])
SEEDS = st.integers(0, 2**31)


def zoned(given):
    """`given` between red zones, by the simulator's own arrays."""
    on = SimulatedAdapter()
    return {k: on.put(v) for k, v in given.items()}


@pytest.fixture(scope="module", autouse=True)
def one_multiprocessor():
    """A chip on which a handful of rows is many: tiles of several tokens, and every way of sharing rows out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arch, "TABLE", tuple(replace(a, sms=1) for a in arch.TABLE))
        patch.setattr(arch, "BY_NAME", {a.name: a for a in arch.TABLE})
        yield


# ---- iHC --------------------------------------------------------------------------------------------------------

# What is baked, each dtype and access size; runtime lengths are drawn freely.
BAKED = [(4, 64, "bfloat16"), (3, 21, "bfloat16"), (2, 100, "float16"), (8, 40, "float32"), (1, 9, "float16"), (5, 72, "float32")]


def strided(a: Any, data: Any) -> Any:
    """The same values as a view with gaps, at an offset, maybe from back to front."""
    *front, width = a.shape
    shift, gap = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 17))
    wide = checks.poison((*front, width + shift + gap), a.dtype)
    view = wide[..., shift : shift + width]
    view = view[::-1] if data.draw(st.booleans()) else view
    view[...] = a
    return view


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("op", checks.IHC)
@examples(5, 120)
@given(
    baked=st.sampled_from(BAKED), tokens=st.sampled_from([5, 0, 7, 2, 1, 9, 3]), norm=st.booleans(), rounds=st.booleans(),
    build=BUILDS, seed=SEEDS, scale=st.sampled_from([1e-3, 1.0, 30.0]),
    eps=st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 0.3]), min_size=3, max_size=3), data=st.data(),
)  # fmt: skip
def test_ihc(op, target, baked, tokens, norm, rounds, build, seed, scale, eps, data):
    spec, (hc, hidden, dtype) = REGISTRY[op], baked
    gated = op != "ihc_post"
    scalars = {"norm_eps": eps[0], "hc_eps": eps[1], "rms_eps": eps[2], "round_before_norm": rounds} if gated else {}
    if op in ("ihc_pre", "ihc_post_pre"):
        scalars["magnitude"] = 1.0 + seed % 3
    given = spec.make_inputs(
        Case("drawn", {"tokens": tokens, "hc": hc, "hidden": hidden}, scalars, dtype, {"norm": norm and gated}), np.random.default_rng(seed)
    )
    for name in ("x", "residual"):
        if name in given:
            given[name] = strided((given[name].astype(np.float32) * scale).astype(given[name].dtype), data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ihc_launch, "TENSOR_LEAST", 0)
        got = simulate(spec, zoned(given), seed, target, **build)
    if tokens:
        checks.verify(spec, given, got, NUMPY)
    assert all(g.shape[0] == tokens for g in got)


# ---- RoPE -------------------------------------------------------------------------------------------------------

HEADS = [(4, 2, 64, 64, 64), (3, 1, 72, 64, 36), (5, 1, 128, 64, 64), (2, 2, 64, 80, 0), (12, 4, 64, 64, 64)]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", [None, *SHAPES])
@examples(2, 80)
@given(
    heads=st.sampled_from(HEADS), style=st.sampled_from(["neox", "interleaved"]),
    policy=st.sampled_from(["none", "rope_then_norm", "norm_then_rope"]), dtype=st.sampled_from(["bfloat16", "float16"]),
    tail=st.sampled_from(["zero", "keep"]), null=st.sampled_from([None, -1, 0]), layout=st.sampled_from(LAYOUTS),
    block_size=st.sampled_from([1, 3, 8, 16]), requests=st.lists(st.tuples(st.sampled_from([1, 3, 0, 7]), st.integers(0, 20)), max_size=6).map(lambda r: r or [(3, 5), (1, 8)]),
    padding=st.integers(0, 3), build=BUILDS, seed=SEEDS, data=st.data(),
)  # fmt: skip
def test_rope(shape, fp8, heads, style, policy, dtype, tail, null, layout, block_size, requests, padding, build, seed, data):
    """Pages that are bad, tables that are too short, rows of nobody: the CPU path and the kernel leave the same bytes everywhere."""
    rng = np.random.default_rng(seed)
    new, before = [n for n, _ in requests], [b for _, b in requests]
    q_heads, kv_heads, dim, v_dim, rotary = heads
    lengths = [n + b if n else 0 for n, b in zip(new, before, strict=True)]
    given = rope_cases.build(
        rng, q_heads, kv_heads, dim, v_dim, rotary, block_size, lengths, new, padding, data.draw(st.sampled_from([0, 0, 5])), dtype,
        policy=policy, weight_dtype=data.draw(st.sampled_from([np.float32, BY_NAME[dtype].np])), rope_style=style, tail=tail, null_block=null,
    )  # fmt: skip
    pages = len(given["key_cache"])
    wrong_sums = data.draw(st.integers(0, 5)) == 0 and len(requests) > 1
    if wrong_sums:  # rows may then go to any page of any request: each has its own, or it would be open which of two rows a slot keeps
        pages = given["block_table"].size + 1
        given["block_table"][...] = rng.permutation(pages)[: pages - 1].reshape(given["block_table"].shape)
    for _ in range(data.draw(st.integers(0, 2)) if given["block_table"].size else 0):
        at = data.draw(st.integers(0, given["block_table"].size - 1))
        given["block_table"].flat[at] = data.draw(st.sampled_from([-1, pages, 2**31 - 1, -(2**31)]))
    if wrong_sums:
        given["q_index"][data.draw(st.integers(0, len(requests)))] = data.draw(st.sampled_from([-1, 0, 3, 99]))
    op = "rope_norm_store_kv"
    if fp8:
        op += "_fp8"
        mode = data.draw(st.sampled_from([{"is_prefill": False}, {}, {"q_quant": "static", "q_scale_inv": np.array([71.3], np.float32)}, {"upper_max": 240.0}]))
        given = rope_cases.fp8(given, **mode)
    kind = given["key_cache"].dtype
    given["key_cache"], given["value_cache"] = make_caches(layout, lambda s: rope_cases.sentinel(s, kind), pages, block_size, kv_heads, dim, v_dim)
    shift, gap = data.draw(st.sampled_from([0, 0, 1, 4])), data.draw(st.sampled_from([0, 8, 3]))
    wide = np.zeros((len(given["qkv"]), given["qkv"].shape[1] + shift + gap), given["qkv"].dtype)
    wide[:, shift : shift + given["qkv"].shape[1]] = given["qkv"]
    given["qkv"] = wide[:, shift : shift + given["qkv"].shape[1]]
    want_args, got_args = _copies(given), _copies(given)
    want = getattr(hccupy, op)(**want_args)
    if shape and SHAPES[shape][3] == "block" and "watch" in build:
        build = {}  # the watcher does not follow transaction barriers
    on = SimulatedAdapter()
    roots = {n: got_args[n] for n in ("key_cache", "value_cache")}
    with pytest.MonkeyPatch.context() as patch:
        # Bulk copies and groups of four angles are for aligned rows and whole quadruples; no rows at all are always few.
        if shape and len(wide) and (SHAPES[shape][3] != "block" or (rotary % 4 == 0 and shift == 0 and (wide.shape[1] % 8) == 0)):
            patch.setattr(rope_launch, "shape_of", lambda b, a: rope_launch.Shape(*SHAPES[shape]))
        got = simulate(REGISTRY[op], {k: on.put(v) if k not in roots else v for k, v in got_args.items()}, seed, "sm_90a" if shape else "sm_80", **build)
    want = want if isinstance(want, tuple) else (want,)
    names = [o.name for o in REGISTRY[op].outputs if o.allocate]
    for name, g, w in [*zip(names, got, want, strict=True), *((n, got_args[n], want_args[n]) for n in roots)]:
        if w is not None:
            _close(f"{op} {name}", np.asarray(g), np.asarray(w), some=2)


# ---- store, tail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@examples(10, 300)
@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8", "int8"]), layout=st.sampled_from(LAYOUTS),
    heads=st.integers(1, 3), dim=st.sampled_from([64, 7, 1, 72]), block_size=st.integers(1, 9), pages=st.integers(1, 5),
    slots=st.lists(st.integers(0, 44), max_size=12), wide=st.booleans(), null=st.sampled_from([None, -1, 0, 2]), build=BUILDS, seed=SEEDS,
)  # fmt: skip
def test_store_kv(few, dtype, layout, heads, dim, block_size, pages, slots, wide, null, build, seed):
    """Negative slots, slots out of range, slots given twice (the later row wins where rows are few)."""
    kind, end = BY_NAME[dtype].np, pages * block_size
    slots = list(dict.fromkeys([*slots, -1, -block_size, end - 1, end, end + block_size - 1]))
    if few:  # else any of them would win
        slots += slots[-3:] + slots[:2]
    rng = np.random.default_rng(seed)
    src = rng.integers(0, 255, (len(slots), heads, dim * np.dtype(kind).itemsize)).astype(np.uint8).view(kind)
    given = {"src": src, "slot_mapping": rng.permuted(np.array(slots, np.int64 if wide else np.int32)), "null_block": null}
    if build.get("watch") and few:
        build = {}  # rows for one slot are no race: all but the last return
    _same_bytes(
        "store_kv",
        given,
        lambda make: {"cache": make_caches(layout, make, pages, block_size, heads, dim, dim)[0]},
        kind,
        seed,
        build,
        SEARCH_DUPLICATES=1024 if few else 0,
    )


@pytest.mark.parametrize("dims", [(64, 64), (72, 7), (1, 8)], ids=str)
@examples(6, 130)
@given(
    dtype=st.sampled_from(["bfloat16", "float32", "uint8"]), layout=st.sampled_from(LAYOUTS), heads=st.integers(1, 3), columns=st.integers(1, 4),
    block_size=st.integers(2, 9), lengths=st.lists(st.integers(-2, 30), max_size=5).map(lambda n: n or [5, 3, 8]), null=st.sampled_from([None, -1, 0]),
    build=BUILDS, seed=SEEDS,
)  # fmt: skip
def test_zero_kv_tail(dims, dtype, layout, heads, columns, block_size, lengths, null, build, seed):
    """Lengths of nothing, lengths past the table, bad pages."""
    pages = 20
    order = np.random.default_rng(seed).permutation(pages + 4) - 2  # no page twice, a few of them bad
    table = order[: len(lengths) * columns].astype(np.int32).reshape(len(lengths), columns)
    given = {"seq_lens": np.array(lengths, np.int32), "block_table": table, "null_block": null}
    caches = lambda make: dict(zip(("key_cache", "value_cache"), make_caches(layout, make, pages, block_size, heads, *dims), strict=True))
    _same_bytes("zero_kv_tail", given, caches, BY_NAME[dtype].np, seed, build)


def _same_bytes(op, given, caches, kind, seed, build, **launch):
    """The CPU path on plain caches, the kernel on caches between red zones."""
    want = caches(lambda s: rope_cases.sentinel(s, kind))
    got = caches(lambda s: redzone_array(s, kind, rope_cases.sentinel(s, kind)))
    getattr(hccupy, op)(**want, **given)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launch.items():
            patch.setattr(rope_launch, name, value)
        simulate(REGISTRY[op], {**zoned(given), **got}, seed, "sm_90a" if seed % 2 else "sm_80", **build)
    for name in want:
        assert np.array_equal(rope_cases.raw(np.asarray(got[name])), rope_cases.raw(want[name])), f"{op} {name}"
