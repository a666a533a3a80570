"""The rope and store_kv references on the CPU: against an fp64 per-token oracle, the contract's corners, the field cases."""

from __future__ import annotations

import numpy as np
import pytest

from hccupy.ops import REGISTRY
from hccupy.ops.rope_inputs import LAYOUTS

from . import adapters, rope_field_cases
from .adapters import Adapter
from .rope_cases import E4M3, bf16, build, call, codes_of, dirty, expected, fp8, quantised, raw, same, sentinel, verify

NUMPY = Adapter("numpy")
SMALL = [c for c in REGISTRY["rope_norm_store_kv"].cases if not c.name.startswith("bench")]
globals().update(rope_field_cases.tests(adapters.CPU))


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_case_against_fp64(case, rng):
    given = REGISTRY["rope_norm_store_kv"].make_inputs(case, rng)
    before = dirty(given)
    verify(given, bf16(NUMPY, given), before)


@pytest.mark.parametrize("case", [c for c in REGISTRY["rope_norm_store_kv_fp8"].cases if not c.name.startswith("bench")], ids=lambda c: c.name)
def test_fp8_case_against_the_rule(case, rng):
    """Codes of the fp64 value by the rule, off by one code at most where rounding to fp32 first matters; scales to fp32."""
    given = REGISTRY["rope_norm_store_kv_fp8"].make_inputs(case, rng)
    before = dirty(given)
    got = quantised(NUMPY, given)
    want = expected(given)
    bound = given.get("upper_max") or 448.0

    def near(codes, x, inverse):
        wrong = raw(codes).astype(int) != codes_of(x, inverse, bound).astype(int)
        spacing = np.maximum(np.abs(x * inverse) * 2.0**-3, 2.0**-9)
        off = np.abs(raw(codes).view(E4M3).astype(float) - np.clip(x * inverse, -bound, bound))
        assert wrong.mean() < 1e-2 and (off <= 0.501 * spacing)[wrong].all()

    kc, vc = before
    for i, (page, slot) in enumerate(want.where[: int(given["q_index"][-1])]):
        near(got.key_cache[page, slot], want.k[0, i], np.float32(1) / given["k_scale"][0])
        v = codes_of(want.v[i].astype(np.float32), np.float32(1) / given["v_scale"][0], bound)
        assert (raw(got.value_cache[page, slot]) == v).all()
        kc[page, slot], vc[page, slot] = got.key_cache[page, slot], got.value_cache[page, slot]
        if i + 1 in given["q_index"]:
            kc[page, slot + 1 :] = vc[page, slot + 1 :] = 0
        if given.get("q_quant", "dynamic") == "static":
            near(got.q[i], want.q[0, i], given["q_scale_inv"][0])
            continue
        b = int(np.searchsorted(given["q_index"], i, "right")) - 1
        scale = got.q_scale[b, :, i - given["q_index"][b]] if given["is_prefill"] else got.q_scale[i]
        np.testing.assert_allclose(scale, np.abs(want.q[0, i]).max(-1) / bound, rtol=1e-6)
        near(got.q[i], want.q[0, i], (np.float32(1) / scale)[:, None])
    assert same(got.key_cache, kc) and same(got.value_cache, vc)


def test_bad_prefix_sums_skip_their_rows(rng):
    """q_index[0] != 0, decreasing, or past tokens: those rows are zero and nothing of them is stored."""
    for q_index, held in (((1, 3, 4), (3,)), ((0, 3, 9), (0, 1, 2)), ((0, -1, 4), ()), ((0, 3, 2), (0, 1, 2)), ((-2, 3, 4), (3,))):
        given = build(rng, lengths=(11, 9), new=(3, 1), q_index=None)
        given["q_index"] = np.array(q_index, np.int32)
        got = bf16(NUMPY, given)
        assert np.flatnonzero(raw(got.q).any((1, 2))).tolist() == list(held), q_index


def test_null_block_of_minus_one_is_tested_first(rng):
    given = build(rng, null_block=-1)
    given["block_table"][0] = -1
    got = bf16(NUMPY, given)
    assert raw(got.q[:3]).any((1, 2)).all() and raw(got.q[3]).any()
    verify({**given, "null_block": -1}, got)


def test_with_both_outs_the_block_table_is_not_read(rng):
    given = build(rng)
    given["block_table"][...] = -1
    kinds = given["qkv"].dtype
    got = bf16(NUMPY, given, out_k=sentinel((4, 2, 64), kinds), out_v=sentinel((4, 2, 64), kinds))
    assert raw(got.q).any((1, 2)).all() and same(got.out_v, expected({**given, "block_table": given["block_table"] * 0}).v)


def test_out_k_takes_k_of_a_null_block(rng):
    given = build(rng, null_block=0)
    given["block_table"][...] = 0
    got = bf16(NUMPY, given, out_k=sentinel((4, 2, 64), given["qkv"].dtype))
    assert raw(got.out_k).any((1, 2)).all() and (raw(got.value_cache) == 0xA5A5).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["store_kv", "zero_kv_tail"])
def test_dense_ops(op, layout, rng):
    for case in REGISTRY[op].cases:
        if case.name.startswith("bench"):
            continue
        given = REGISTRY[op].make_inputs(type(case)(case.name, case.axes, case.scalars, case.dtype, {**case.options, "layout": layout}), rng)
        if op == "store_kv":
            given["cache"][...] = sentinel(given["cache"].shape, given["cache"].dtype)
            want = given["cache"].copy()
            given["slot_mapping"][:3] = want.shape[0] * want.shape[1], -9, 3
            for row, slot in enumerate(given["slot_mapping"]):
                if 0 <= slot < want.shape[0] * want.shape[1] and slot // want.shape[1] != 1:
                    want[slot // want.shape[1], slot % want.shape[1]] = given["src"][row]
            assert same(call(NUMPY, op, {**given, "null_block": 1}).cache, want)
            continue
        wants = given["key_cache"].copy(), given["value_cache"].copy()
        given["block_table"][0] = (-1, len(wants[0]), 1)[rng.integers(3)]
        for b, length in enumerate(given["seq_lens"]):
            column, used = (length - 1) // wants[0].shape[1], (length - 1) % wants[0].shape[1] + 1
            page = given["block_table"][b, column] if length else -1
            if 0 <= page < len(wants[0]) and page != 1:
                wants[0][page, used:] = wants[1][page, used:] = 0
        got = call(NUMPY, op, {**given, "null_block": 1})
        assert same(got.key_cache, wants[0]) and same(got.value_cache, wants[1])


def test_store_kv_duplicates_one_row_wins_whole(rng):
    src = rng.integers(0, 255, (4, 2, 8)).astype(np.uint8)
    got = call(NUMPY, "store_kv", {"cache": np.zeros((2, 4, 2, 8), np.uint8), "src": src, "slot_mapping": np.array([3, 3, 1, 3])})
    assert any(same(got.cache[0, 3], src[i]) for i in (0, 1, 3))


def test_fp8_rounds_the_reciprocal_first(rng):
    """stored = value * fp32(1 / scale), not value / scale: for some scales the two differ."""
    given = fp8(build(rng, rotary=0, lengths=(64,), new=(64,), block_size=64), v_scale=0.7)
    got = quantised(NUMPY, given)
    v = given["qkv"][:, 6 * 64 :].astype(np.float32).reshape(64, 2, 64)
    assert (raw(got.value_cache[given["block_table"][0, 0]]) == codes_of(v, np.float32(1) / np.float32(0.7))).all()
