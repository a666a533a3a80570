"""64-bit offsets without the memory: rows so far apart that a 32-bit product of index and stride is wrong, in pages that nobody maps.

C3, C5, C6, C7 and C8 in the simulator, plain (the bytes must land where the address says) and with UBSan (a 32-bit product that overflows is an error).
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest

import hccupy
from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY, ihc_launch
from hccupy.spec import Case

from . import ihc_checks as checks
from . import rope_cases
from .adapters import CPU
from .simulated import simulate

APART = 2**31 + 64  # elements from row to row
NORESERVE = 0x4000  # MAP_NORESERVE: no page is accounted for before it is touched
BUILDS = pytest.mark.parametrize("build", [{}, {"sanitize": True}], ids=["plain", "ubsan"])


def far(values, stride=APART):
    """`values` with `stride` elements from row to row of the first axis."""
    kind, rows = values.dtype, len(values)
    size = (stride * (rows - 1) + values[0].size) * kind.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    flat = np.frombuffer(memory, np.uint8).view(kind)
    inner = np.empty(values.shape[1:], np.uint8).strides
    view = np.lib.stride_tricks.as_strided(flat, values.shape, (stride * kind.itemsize, *(s * kind.itemsize for s in inner)))
    view[...] = values
    return view


@BUILDS
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("op", checks.IHC)
def test_C5_C6_tokens_far_apart(op, target, build, rng, monkeypatch):
    """Every input and output that may be strided is."""
    monkeypatch.setattr(ihc_launch, "TENSOR_LEAST", 0)
    spec = REGISTRY[op]
    given = spec.make_inputs(Case("far", {"tokens": 3, "hc": 2, "hidden": 64}, spec.cases[0].scalars, "bfloat16"), rng)
    want = simulate(spec, given, 0, target)
    outs = {o.keyword: far(checks.poison(w.shape, w.dtype)) for o, w in zip(spec.outputs, want, strict=True)}
    rows = {k: far(given[k]) for k in ("x", "residual", "h_post") if k in given}
    got = simulate(spec, {**given, **rows, **outs}, 0, target, **build)
    for o, g, w in zip(spec.outputs, got, want, strict=True):
        assert np.array_equal(checks.bits(g), checks.bits(w)), o.name
    checks.verify(spec, given, got, CPU[0])


@BUILDS
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_C1_C3_C7_C8_rows_and_pages_far_apart(fp8, target, build, rng):
    """qkv, the block table and both caches, with pages that hold tails."""
    given = rope_cases.build(rng, lengths=(11, 9), new=(3, 1), policy="norm_then_rope")
    given = rope_cases.fp8(given) if fp8 else given
    op = "rope_norm_store_kv" + ("_fp8" if fp8 else "")
    near = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}
    want = simulate(REGISTRY[op], near, 0, target)
    wide = {k: far(given[k]) for k in ("key_cache", "value_cache", "qkv", "block_table")}
    got = simulate(REGISTRY[op], {**given, **wide}, 0, target, **build)
    for g, w in zip(got, want, strict=True):
        assert w is None or rope_cases.same(g, w)
    for name in ("key_cache", "value_cache"):
        assert rope_cases.same(np.ascontiguousarray(wide[name]), near[name]), name


@BUILDS
@pytest.mark.parametrize("few", [True, False])
def test_C3_store_and_tail_far_apart(few, build, rng, monkeypatch):
    from hccupy.ops import rope_launch

    monkeypatch.setattr(rope_launch, "SEARCH_DUPLICATES", 1024 if few else 0)
    kind = BY_NAME["bfloat16"].np
    src = rng.standard_normal((3, 2, 64)).astype(kind)
    cache = far(rope_cases.sentinel((4, 3, 2, 64), kind))
    given = {"cache": cache, "src": far(src), "slot_mapping": np.array([10, 0, 4], np.int64)}
    simulate(REGISTRY["store_kv"], given, 0, **build)
    want = {**given, "cache": rope_cases.sentinel((4, 3, 2, 64), kind), "src": src}
    hccupy.store_kv(**want)
    assert rope_cases.same(np.ascontiguousarray(cache), want["cache"])
    table = {"seq_lens": np.array([11, 5], np.int32), "block_table": far(np.array([[0, 1, 2, 3], [3, 1, 0, 2]], np.int32))}
    value = far(rope_cases.sentinel((4, 3, 2, 64), kind))
    simulate(REGISTRY["zero_kv_tail"], {"key_cache": cache, "value_cache": value, **table}, 0, **build)
    want_value = rope_cases.sentinel((4, 3, 2, 64), kind)
    hccupy.zero_kv_tail(want["cache"], want_value, **table)
    assert rope_cases.same(np.ascontiguousarray(cache), want["cache"]) and rope_cases.same(np.ascontiguousarray(value), want_value)


def test_C3_slots_beyond_32_bits(rng):
    """A slot number past 2^32, which is out of range here, must not be cut down to one in range."""
    kind = BY_NAME["bfloat16"].np
    cache = rope_cases.sentinel((4, 3, 2, 64), kind)
    slots = np.array([2**32 + 1, 2**40, 2**63 - 1, -(2**63)], np.int64)
    simulate(REGISTRY["store_kv"], {"cache": cache, "src": rng.standard_normal((4, 2, 64)).astype(kind), "slot_mapping": slots})
    assert rope_cases.same(cache, rope_cases.sentinel((4, 3, 2, 64), kind))
