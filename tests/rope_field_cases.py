"""Faults that users of such kernels met, as checks named after their row; run on every framework by `tests`.

Each check gets an Adapter and random numbers. JAX arrays are immutable: checks that give out= or look at a shared
buffer say so with `needs_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hccupy import ArgumentError, DtypeError, HccupyError, LayoutError, MetadataError, ShapeError

from .adapters import Adapter
from .rope_cases import E4M3, bf16, build, call, close, codes_of, expected, fp8, quantised, raw, rope_table, same, sentinel, verify, views

Check = Callable[[Adapter, np.random.Generator], None]
LAYOUTS = ("dense", "interleaved", "packed", "head_major", "cross_layer")
NAN = float("nan")
_memory: set[str] = set()


def needs_memory(check: Check) -> Check:
    """The check writes through caller's views or outs: not for JAX, nor for bare DLPack producers that cannot be indexed."""
    _memory.add(check.__name__)
    return check


def tests(adapters: list[Adapter], module: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"test_A1_...": pytest function over adapters} of all checks, for a test module's globals()."""

    def one(check: Check) -> Any:
        able = [a for a in adapters if check.__name__ not in _memory or (a.mutable and a.name != "dlpack")]

        @pytest.mark.parametrize("on", [pytest.param(a, id=f"{a.name}-{a.device}") for a in able])
        def test(on: Adapter, rng: np.random.Generator) -> None:
            check(on, rng)

        test.__doc__ = check.__doc__
        return test

    return {f"test_{n}": one(c) for n, c in globals().items() if n[0] in "ABDEFHI" and n[1:2].isdigit() and "_" in n and callable(c)}


# ---- A: padding, null block, tails ------------------------------------------------------------------------------


def A1_A2_reserved_block_stays_zero(on: Adapter, rng: np.random.Generator) -> None:
    """Two padded requests of NaN rows point at the reserved block; and A2: on every path."""
    for style in ("neox", "interleaved"):
        given = build(rng, lengths=(5, 9, 1, 1), new=(1, 1, 1, 1), rope_style=style, null_block=0, spare=4)
        table = given["block_table"]
        table[table == 0] = len(given["key_cache"]) - 1
        table[2:] = 0
        given["qkv"][2:] = NAN
        for g, op in ((given, bf16), (fp8(given), quantised), (fp8(given, is_prefill=False), quantised)):
            for name in ("key_cache", "value_cache"):
                g[name][0] = 0
            got = op(on, {**g, "key_cache": g["key_cache"].copy(), "value_cache": g["value_cache"].copy()})
            assert not raw(got.key_cache[0]).any() and not raw(got.value_cache[0]).any()
            assert np.isnan(got.q[2:].astype(np.float32)).all()  # computed all the same


def A5_idle_ranks_write_nothing(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(1, 1), new=(1, 1))
    given["qkv"][...] = NAN
    for seq_lens, q_index in (((0, 0), (0, 1, 2)), ((3, 4), (0, 0, 0))):
        g = {**given, "seq_lens": np.array(seq_lens, np.int32), "q_index": np.array(q_index, np.int32)}
        got = bf16(on, {**g, "key_cache": g["key_cache"].copy(), "value_cache": g["value_cache"].copy()})
        assert (raw(got.key_cache) == 0xA5A5).all() and (raw(got.value_cache) == 0xA5A5).all()
        assert not raw(got.q).any()


def A6_unused_table_entries_are_not_looked_at(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(11, 20), new=(3, 2))
    used = np.arange(given["block_table"].shape[1]) * 8 < given["seq_lens"][:, None]
    for filler in (-1, 0, 2**31 - 1):
        g = {**given, "block_table": np.where(used, given["block_table"], filler).astype(np.int32)}
        verify(g, bf16(on, {**g, "key_cache": g["key_cache"].copy(), "value_cache": g["value_cache"].copy()}))


def A8_padding_rows_and_empty_requests(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(10, 7, 0, 0), new=(3, 2, 0, 0), padding=3)
    got = bf16(on, {**given, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
    verify(given, got)
    assert not raw(got.q[5:]).any()
    alone = bf16(on, {**given, "qkv": given["qkv"][:5]})
    assert same(alone.q, got.q[:5]) and same(alone.key_cache, got.key_cache)


def A9_bad_lengths_of_padding_requests(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(9, 3, 1, 1), new=(9, 3, 0, 0), padding=3)
    given["seq_lens"][2:] = -5, 2**30
    verify(given, bf16(on, given))


def A9_bad_prefix_sums_skip_their_rows(on: Adapter, rng: np.random.Generator) -> None:
    """A q_index that does not start at 0, decreases or ends past the rows: those rows are skipped, though position and page would do."""
    given = build(rng, lengths=(9, 3, 120), new=(3, 2, 4), tail="keep")
    want = expected(given)
    for q_index, good in (((1, 3, 5, 9), range(3, 9)), ((0, 3, 5, 99), range(5)), ((0, 3, 2**31 - 1, 9), range(3)), ((0, 3, -5, 9), range(3))):
        g = {**given, "q_index": np.array(q_index, np.int32)}
        got = bf16(on, {**g, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
        written = int((raw(got.value_cache) != 0xA5A5).any((2, 3)).sum())
        assert written == len(good)
        for i in range(9):
            page, slot = want.where[i]
            assert bool(raw(got.q[i]).any()) == (i in good)
            assert i not in good or same(got.value_cache[page, slot], want.v[i])


@needs_memory
def A10_outputs_are_defined_everywhere(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(9, 3), new=(3, 2), padding=3)
    q, k, v = sentinel((8, 4, 64), given["qkv"].dtype), sentinel((8, 2, 64), given["qkv"].dtype), sentinel((8, 2, 64), given["qkv"].dtype)
    got = bf16(on, given, out_q=q, out_k=k, out_v=v)
    want = expected(given)
    close(got.q, want.q, "q")
    close(got.out_k, want.k, "k")
    assert same(got.out_v[:5], want.v[:5])
    assert not raw(got.q[5:]).any() and not raw(got.out_k[5:]).any() and not raw(got.out_v[5:]).any()
    assert (raw(got.key_cache) == 0xA5A5).all() and (raw(got.value_cache) == 0xA5A5).all()  # not touched, no tail either


def A11_nan_padding_does_not_move_scales(on: Adapter, rng: np.random.Generator) -> None:
    given = fp8(build(rng, lengths=(9, 3), new=(3, 2), padding=3), max_q_len=3)
    given["qkv"][5:] = NAN
    padded = quantised(on, {**given, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
    plain = quantised(on, {**given, "qkv": given["qkv"][:5]})
    assert same(padded.q_scale, plain.q_scale) and same(padded.q[:5], plain.q) and same(padded.key_cache, plain.key_cache)
    assert not raw(padded.q[5:]).any()


@needs_memory
def A12_tail_of_the_last_block(on: Adapter, rng: np.random.Generator) -> None:
    """Slots behind seq_len become zero in every layout and dtype; a full block and the slots before stay."""
    for layout in LAYOUTS:
        for length, new in ((65, 1), (65, 3), (128, 1), (70, 1), (127, 2)):
            given = build(rng, block_size=64, lengths=(length, 5), new=(new, 5))
            for g, op in ((given, bf16), (fp8(given, max_q_len=5), quantised)):
                placed, buffers = views(on, layout, g)
                op(on, placed)
                key, value = on.get(placed["key_cache"]), on.get(placed["value_cache"])
                page, slot = g["block_table"][0, (length - 1) // 64], (length - 1) % 64
                marks = np.uint64(0xA5A5 if op is bf16 else 0xA5)
                for cache in (key, value):
                    assert not raw(cache[page, slot + 1 :]).any()
                    if slot + 1 > new:
                        assert (raw(cache[page, : slot + 1 - new]) == marks).all()
                if layout == "cross_layer":
                    whole = on.get(buffers[0])
                    assert (raw(whole[:, [0, 1, 3]]) == marks).all()


def A12_rolled_back_drafts_are_cleared(on: Adapter, rng: np.random.Generator) -> None:
    """Many requests (where a clean tail is only looked at): slots of rejected draft tokens become zero again."""
    count = 40
    given = build(rng, lengths=(13,) * count, new=(4,) * count, block_size=16, fill=0)
    got = bf16(on, given)
    lengths = rng.integers(10, 13, count).astype(np.int32)
    again = {**given, "key_cache": got.key_cache, "value_cache": got.value_cache, "qkv": given["qkv"][:count], "seq_lens": lengths}
    got = bf16(on, {**again, "q_index": np.arange(count + 1, dtype=np.int32)})
    for b in range(count):
        page = given["block_table"][b, 0]
        for cache in (got.key_cache, got.value_cache):
            assert not raw(cache[page, lengths[b] :]).any()
            assert raw(cache[page, lengths[b] - 1]).any()


def A12_keep_leaves_the_tail(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(11, 9), new=(3, 1), tail="keep")
    verify(given, bf16(on, given))


def A14_block_0_is_an_ordinary_block(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(3,), new=(3,), spare=0)
    assert given["block_table"][0, 0] == 0
    verify(given, bf16(on, given))


# ---- B: layouts, strides, block tables --------------------------------------------------------------------------


@needs_memory
def B1_B2_B3_B6_B11_written_through_their_strides(on: Adapter, rng: np.random.Generator) -> None:
    """Packed, interleaved, head-major, cross-layer: only the addressed elements change, K and V halves apart."""
    for layout in LAYOUTS:
        for dims in ((64, 64), (128, 64)):
            given = build(rng, dim=dims[0], v_dim=dims[1], lengths=(11, 9), new=(3, 1), policy="norm_then_rope")
            placed, buffers = views(on, layout, given)
            got = bf16(on, placed)
            verify(given, got)
            changed = sum(int((raw(on.get(b)) != 0xA5A5).sum()) for b in buffers)
            inside = sum(int((raw(c) != 0xA5A5).sum()) for c in (got.key_cache, got.value_cache))
            assert changed == inside


@needs_memory
def B11_only_k_leaves_the_v_half(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng)
    placed, _ = views(on, "packed", given)
    got = bf16(on, placed, out_v=sentinel((4, 2, 64), given["qkv"].dtype))
    assert (raw(on.get(placed["value_cache"])) == 0xA5A5).all()
    assert same(got.out_v, expected(given).v)
    assert (raw(on.get(placed["key_cache"])) != 0xA5A5).any()


def B4_head_major_where_token_major_is_expected(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, q_heads=8, kv_heads=2, block_size=64)
    swapped = {n: np.ascontiguousarray(given[n].swapaxes(1, 2)) for n in ("key_cache", "value_cache")}
    with pytest.raises(ShapeError, match="qkv"):
        bf16(on, {**given, **swapped})


def B7_B8_row_stride_of_qkv(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng)
    wide = np.concatenate([given["qkv"], np.full((4, 96), NAN).astype(given["qkv"].dtype)], 1)
    verify(given, bf16(on, {**given, "qkv": wide[:, : given["qkv"].shape[1]]}))


def B10_many_q_heads_on_one_kv_head(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, q_heads=64, kv_heads=1, lengths=(9,), new=(2,))
    verify(given, bf16(on, given))


def B13_row_stride_of_the_block_table(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(11, 20), new=(3, 2))
    columns = given["block_table"].shape[1]
    wide = np.full((2, 512), -7, np.int32)
    wide[:, :columns] = given["block_table"]
    verify(given, bf16(on, {**given, "block_table": wide[:, :columns]}))


def B14_dims_that_are_not_rotated_reach_the_cache(on: Adapter, rng: np.random.Generator) -> None:
    for policy in ("none", "norm_then_rope", "rope_then_norm"):
        given = build(rng, dim=128, rotary=64, policy=policy)
        verify(given, bf16(on, given))


def B16_pages_out_of_range_are_skipped(on: Adapter, rng: np.random.Generator) -> None:
    for bad in (-1, -(2**31), 2**31 - 1, None):
        given = build(rng, lengths=(3, 9), new=(3, 1))
        given["block_table"][0] = len(given["key_cache"]) if bad is None else bad
        before = given["key_cache"].copy(), given["value_cache"].copy()
        got = bf16(on, given)
        assert not raw(got.q[:3]).any() and raw(got.q[3]).any()
        others = np.delete(np.arange(len(before[0])), given["block_table"][1, 1])
        assert same(got.key_cache[others], before[0][others]) and same(got.value_cache[others], before[1][others])


def B16_columns_past_the_table_are_skipped(on: Adapter, rng: np.random.Generator) -> None:
    """A length past the last column: what lies behind the table, here a good page, is not looked at."""
    given = build(rng, lengths=(17, 9), new=(1, 1))
    wide = np.zeros((2, 3), np.int32)
    wide[:, : given["block_table"].shape[1]] = given["block_table"]
    got = bf16(on, {**given, "block_table": wide[:, :2]})
    assert not raw(got.q[0]).any() and raw(got.q[1]).any()
    others = np.delete(np.arange(len(got.key_cache)), given["block_table"][1, 1])
    assert (raw(got.key_cache[others]) == 0xA5A5).all() and (raw(got.value_cache[others]) == 0xA5A5).all()


def B16_debug_names_the_page(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(3, 9), new=(3, 1))
    given["block_table"][1, 1] = 77
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HCCUPY_DEBUG", "1")
        with pytest.raises(MetadataError, match=r"page 77.*request 1, position 8"):
            bf16(on, given)
        bf16(on, {**given, "null_block": 77})
        with pytest.raises(MetadataError, match="request 0, position -2"):
            bf16(on, {**given, "seq_lens": np.array([1, 9], np.int32)})
        for q_index in ((1, 3, 4), (0, 3, 2), (0, 3, 9)):
            with pytest.raises(MetadataError, match="q_index"):
                bf16(on, {**given, "q_index": np.array(q_index, np.int32)})


# ---- D: rope ----------------------------------------------------------------------------------------------------


def D1_a_row_does_not_depend_on_the_batch(on: Adapter, rng: np.random.Generator) -> None:
    """Partial rotary, one token alone against the same token among many; and prefill against decode (H1)."""
    for style in ("neox", "interleaved"):
        given = build(rng, q_heads=16, dim=128, rotary=64, lengths=(40,), new=(40,), policy="norm_then_rope", rope_style=style)
        many = bf16(on, {**given, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
        verify(given, many)
        for i in (0, 17, 39):
            one = {**given, "qkv": given["qkv"][i : i + 1], "seq_lens": np.array([i + 1], np.int32), "q_index": np.array([0, 1], np.int32)}
            got = bf16(on, {**one, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
            page, slot = given["block_table"][0, i // 8], i % 8
            assert same(got.q[0], many.q[i]) and same(got.key_cache[page, slot], many.key_cache[page, slot])


def D2_rotary_dim_is_the_width_of_the_table(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, dim=128, rotary=64)
    got = bf16(on, given)
    verify(given, got)
    assert same(got.q[:, :, 64:], given["qkv"][:, : 4 * 128].reshape(4, 4, 128)[:, :, 64:])
    for width in (63, 130):
        with pytest.raises(ShapeError, match="cos_sin"):
            bf16(on, {**given, "cos_sin": np.zeros((20, width), np.float32)})


def D4_last_row_of_an_exact_table(on: Adapter, rng: np.random.Generator) -> None:
    for style in ("neox", "interleaved"):
        given = build(rng, dim=128, lengths=(11,), new=(3,), positions=11, rope_style=style)
        verify(given, bf16(on, given))


def D5_D7_styles_pair_different_dims(on: Adapter, rng: np.random.Generator) -> None:
    """One-hot at dim 1, position 1: NeoX moves energy to dim 1 + R/2, interleaved to dim 0."""
    given = build(rng, lengths=(2,), new=(1,), positions=2)
    given["qkv"][...] = 0
    given["qkv"][0, 1] = 1
    for style, other in (("neox", 33), ("interleaved", 0)):
        got = bf16(on, {**given, "rope_style": style, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
        assert set(np.flatnonzero(got.q[0, 0].astype(np.float32))) == {1, other}
        verify({**given, "rope_style": style}, got)


def D8_positions_outside_the_table(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(17, 9), new=(2, 1), positions=16)  # position 16 is one too many
    got = bf16(on, {**given, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
    assert raw(got.q[0]).any() and not raw(got.q[1]).any() and raw(got.q[2]).any()
    page = given["block_table"][0, 2]
    assert (raw(got.key_cache[page]) == 0xA5A5).all()
    got = bf16(on, {**given, "seq_lens": np.array([1, 9], np.int32)})  # seq_len < new tokens: position -1
    assert not raw(got.q[0]).any() and raw(got.q[1]).any()


def D9_long_positions(on: Adapter, rng: np.random.Generator) -> None:
    table = rope_table(131072, 64, 1e6)
    for position in (40, 2000, 48100, 131071):
        given = build(rng, lengths=(position + 1,), new=(1,))
        given["cos_sin"] = table
        verify(given, bf16(on, given))


def D11_norms_survive_rotation(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, dim=192, v_dim=128, dtype="float16")
    given["cos_sin"] = rope_table(16, 192)
    got = bf16(on, given)
    before = np.linalg.norm(given["qkv"][:, : 4 * 192].reshape(4, 4, 192).astype(np.float64), axis=-1)
    np.testing.assert_allclose(np.linalg.norm(got.q.astype(np.float64), axis=-1), before, rtol=2e-4)


def D12_head_dims(on: Adapter, rng: np.random.Generator) -> None:
    for dim in (64, 72, 80, 96, 128, 192, 256):
        for policy in ("none", "rope_then_norm"):
            given = build(rng, dim=dim, policy=policy, rope_style="interleaved" if dim % 16 else "neox")
            verify(given, bf16(on, given))
    for dim in (512, 100):
        with pytest.raises(ShapeError, match="64, 72, 80, 96, 128, 192, 256"):
            bf16(on, build(rng, dim=dim))


def D14_table_in_half_precision(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng)
    with pytest.raises(DtypeError, match="cos_sin"):
        bf16(on, {**given, "cos_sin": given["cos_sin"].astype(given["qkv"].dtype)})


def D15_head_groups(on: Adapter, rng: np.random.Generator) -> None:
    for q_heads, kv_heads in ((4, 4), (3, 1), (10, 2), (12, 2), (28, 4), (24, 2), (24, 1), (40, 8)):
        given = build(rng, q_heads=q_heads, kv_heads=kv_heads, lengths=(9,), new=(2,), policy="norm_then_rope")
        verify(given, bf16(on, given))


def D16_head_counts_that_do_not_fit(on: Adapter, rng: np.random.Generator) -> None:
    with pytest.raises(ShapeError, match="q_heads = 10"):
        bf16(on, build(rng, q_heads=10, kv_heads=4))
    given = build(rng)
    for width in (511, 400, 128, 256):
        with pytest.raises(ShapeError, match="qkv"):
            bf16(on, {**given, "qkv": given["qkv"][:, :width]})


# ---- E: norm ----------------------------------------------------------------------------------------------------


def E1_E2_eps_is_an_argument(on: Adapter, rng: np.random.Generator) -> None:
    for policy in ("rope_then_norm", "norm_then_rope"):
        given = build(rng, policy=policy)
        given["qkv"][...] = (given["qkv"].astype(np.float32) * 1e-3).astype(given["qkv"].dtype)
        results = []
        for eps in (1e-6, 1e-5, 3e-5):
            g = {**given, "norm_eps": eps}
            got = bf16(on, {**g, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
            verify(g, got)
            results.append(raw(got.q))
        assert (results[0] != results[1]).any() and (results[1] != results[2]).any()
    for eps in (-1e-6, float("inf"), NAN):
        with pytest.raises(ArgumentError, match="norm_eps"):
            bf16(on, {**given, "norm_eps": eps})


def E4_offset_of_the_weights(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, policy="norm_then_rope")
    for name in ("q_norm_weight", "k_norm_weight"):
        given[name][...] = 0
    for offset in (0.0, 1.0):
        g = {**given, "norm_weight_offset": offset}
        got = bf16(on, {**g, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
        verify(g, got)
        assert bool((got.q.astype(np.float32) != 0).any()) == bool(offset)


def E5_dtype_of_the_weights(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, policy="norm_then_rope")
    half = given["qkv"].dtype
    for q_kind, k_kind in ((np.float32, half), (half, np.float32), (half, half)):
        g = {**given, "q_norm_weight": given["q_norm_weight"].astype(q_kind), "k_norm_weight": given["k_norm_weight"].astype(k_kind)}
        verify(g, bf16(on, {**g, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()}))
    with pytest.raises(DtypeError, match="q_norm_weight"):
        bf16(on, {**given, "q_norm_weight": given["q_norm_weight"].astype(np.float16)})


def E6_one_rounding(on: Adapter, rng: np.random.Generator) -> None:
    """Nothing is rounded to 16 bits between norm and rope: 1 ulp of fp64 would not hold."""
    given = build(rng, q_heads=16, dim=128, lengths=(64,), new=(64,), policy="norm_then_rope")
    verify(given, bf16(on, given))


# ---- F: fp8 -----------------------------------------------------------------------------------------------------


def F1_all_zero_head(on: Adapter, rng: np.random.Generator) -> None:
    given = fp8(build(rng))
    other = quantised(on, {**given, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
    given["qkv"][:, 64:128] = 0
    got = quantised(on, given)
    assert not raw(got.q[:, 1]).any()
    assert np.isfinite(got.q_scale).all() and (got.q_scale[0, :, :3] > 0).all()
    keep = [0, 2, 3]
    assert same(got.q[:, keep], other.q[:, keep]) and same(got.q_scale[:, keep], other.q_scale[:, keep])


def F2_tiny_values(on: Adapter, rng: np.random.Generator) -> None:
    given = fp8(build(rng, lengths=(1,), new=(1,), positions=1), is_prefill=False, max_q_len=None)
    given["qkv"][:, :256] = 0
    for h, x in enumerate((1e-38, 1e-39, -1e-39, 1e-12)):
        given["qkv"][0, 64 * h] = x
    given["cos_sin"][:, :32], given["cos_sin"][:, 32:] = 1, 0
    got = quantised(on, given)
    assert not np.isnan(got.q.astype(np.float32)).any() and (got.q_scale > 0).all()
    assert not raw(got.q[:, :, 1:]).any()


def F3_saturation(on: Adapter, rng: np.random.Generator) -> None:
    given = fp8(build(rng, lengths=(1,), new=(1,)), k_scale=1.0, v_scale=1.0)
    given["qkv"][0, 6 * 64 : 6 * 64 + 8] = 1000, -1000, 464, 448, np.inf, -np.inf, 480, 0.25
    got = quantised(on, given)
    page = given["block_table"][0, 0]
    assert raw(got.value_cache[page, 0, 0, :8]).tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x28]
    got = quantised(on, {**given, "upper_max": 240.0, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
    assert raw(got.value_cache[page, 0, 0, :2]).tolist() == [0x77, 0xF7]
    assert np.abs(got.q.astype(np.float32)).max() == 240
    for bad in (0.0, -1.0, 449.0, NAN):
        with pytest.raises(ArgumentError, match="upper_max"):
            quantised(on, {**given, "upper_max": bad})


def F4_nan_stays_nan(on: Adapter, rng: np.random.Generator) -> None:
    given = fp8(build(rng, lengths=(1,), new=(1,), rotary=32))
    clean = quantised(on, {**given, "key_cache": given["key_cache"].copy(), "value_cache": given["value_cache"].copy()})
    given["qkv"][0, [50, 4 * 64 + 50, 6 * 64 + 50]] = NAN  # behind the rotated dims of q, K and V
    given["qkv"][0, 64 + 40] = np.inf
    got = quantised(on, given)
    page = given["block_table"][0, 0]
    for codes in (got.q[0, 0], got.key_cache[page, 0, 0], got.value_cache[page, 0, 0]):
        nan = (raw(codes) & 0x7F) == 0x7F
        assert np.flatnonzero(nan).tolist() == [50]
    without = np.array(given["qkv"][0, :64].astype(np.float32))
    assert np.isfinite(got.q_scale[0, 0, 0]) and got.q_scale[0, 0, 0] <= clean.q_scale[0, 0, 0] and np.nanmax(np.abs(without)) > 0
    largest = np.finfo(np.float32).max
    assert got.q_scale[0, 1, 0] == np.float32(largest) / np.float32(448) and raw(got.q[0, 1, 40]) == 0x7E


def F4_nan_infinity_and_overflow_under_a_norm(on: Adapter, rng: np.random.Generator) -> None:
    """A head with a NaN is NaN, one with an infinity is NaN there and zero elsewhere, one whose squares overflow is zero: no absmax is left."""
    given = fp8(build(rng, lengths=(1,), new=(1,), policy="norm_then_rope"))
    given["qkv"][0, 50], given["qkv"][0, 64 + 40], given["qkv"][0, 128:192] = NAN, np.inf, 3e38
    got = quantised(on, given)
    magnitude = raw(got.q[0]) & 0x7F
    assert (magnitude[0] == 0x7F).all() and not magnitude[2].any()
    assert np.flatnonzero(magnitude[1]).tolist() == [8, 40] and (magnitude[1, [8, 40]] == 0x7F).all()  # partners
    assert (got.q_scale[0, :3, 0] == np.float32(1e-12) / np.float32(448)).all()


def F7_device_scales_are_not_checked(on: Adapter, rng: np.random.Generator) -> None:
    """Documented: a scale of zero or below is used as it is; nothing is written out of place."""
    given = build(rng, lengths=(1,), new=(1,))
    for scale in (0.0, -1.0, NAN, np.inf, -3.4e38):
        g = fp8(given, k_scale=scale)
        got = quantised(on, g)
        assert np.isfinite(got.q_scale).all()
        page = g["block_table"][0, 0]
        others = np.delete(np.arange(len(got.key_cache)), page)
        assert (raw(got.key_cache[others]) == 0xA5).all()


def F8_scales_are_used(on: Adapter, rng: np.random.Generator) -> None:
    """Codes by the rule, from a table of all codes: K and V with their scales, static and dynamic q; no rope, so fp32 is exact."""
    given = build(rng, rotary=0, lengths=(11, 9), new=(3, 1))
    x = given["qkv"].astype(np.float32)
    q, k, v = x[:, :256].reshape(4, 4, 64), x[:, 256:384].reshape(4, 2, 64), x[:, 384:].reshape(4, 2, 64)
    for kind in (E4M3, np.uint8, np.int8):
        for scales in ((1.0, 0.5), (0.0131, 0.0173)):
            for mode in ({"q_quant": "static", "q_scale_inv": np.array([71.3], np.float32)}, {"is_prefill": False}, {"upper_max": 100.0}):
                g = fp8(given, *scales, kind=kind, **mode)
                got = quantised(on, g)
                bound = mode.get("upper_max", 448.0)
                for i, (page, slot) in enumerate(expected(given).where):
                    assert (raw(got.key_cache[page, slot]) == codes_of(k[i], np.float32(1) / np.float32(scales[0]), bound)).all()
                    assert (raw(got.value_cache[page, slot]) == codes_of(v[i], np.float32(1) / np.float32(scales[1]), bound)).all()
                    if "q_scale_inv" in mode:
                        want, scale = codes_of(q[i], np.float32(71.3), bound), None
                    else:
                        scale = np.abs(q[i]).max(-1, keepdims=True) / np.float32(bound)
                        want = codes_of(q[i], np.float32(1) / scale, bound)
                        place = (i, slice(None)) if mode.get("is_prefill") is False else (i // 3, slice(None), i % 3)
                        assert (got.q_scale[place] == scale[:, 0]).all()
                    assert (raw(got.q[i]) == want).all()
                assert got.split_k_flag.dtype == np.int32 and got.split_k_flag.shape == (2, 2) and not got.split_k_flag.any()
                assert (getattr(got, "q_scale", None) is None) == ("q_scale_inv" in mode)
                assert got.q.dtype == E4M3


def F10_dims_that_differ(on: Adapter, rng: np.random.Generator) -> None:
    given = fp8(build(rng, dim=192, v_dim=128, rotary=0))
    got = quantised(on, given)
    v = given["qkv"][:, 6 * 192 :].astype(np.float32).reshape(4, 2, 128)
    for i, (page, slot) in enumerate(expected(given).where):
        assert (raw(got.value_cache[page, slot]) == codes_of(v[i], np.float32(1) / np.float32(0.02))).all()


# ---- H, I -------------------------------------------------------------------------------------------------------


def H1_several_new_tokens_in_decode(on: Adapter, rng: np.random.Generator) -> None:
    """is_prefill chooses the q_scale layout and nothing else: rows by token, or by request and place."""
    new = (1, 2, 3, 4, 8)
    given = build(rng, lengths=(9, 9, 20, 4, 30), new=new, policy="norm_then_rope")
    pre, dec = quantised(on, fp8(given)), quantised(on, fp8(given, is_prefill=False))
    assert same(pre.q, dec.q) and same(pre.key_cache, dec.key_cache) and same(pre.value_cache, dec.value_cache)
    assert pre.q_scale.shape == (5, 4, 128) and dec.q_scale.shape == (18, 4)
    row = 0
    for b, n in enumerate(new):
        assert same(pre.q_scale[b, :, :n], np.ascontiguousarray(dec.q_scale[row : row + n].T))
        assert not pre.q_scale[b, :, n:].any()
        row += n
    verify(given, bf16(on, given))


def H1_max_q_len_too_small(on: Adapter, rng: np.random.Generator) -> None:
    """A token past the padded width gets no entry; nothing is written out of bounds."""
    given = fp8(build(rng, lengths=(130,), new=(130,), block_size=64), max_q_len=1)
    got = quantised(on, given)
    assert got.q_scale.shape == (1, 4, 128) and (got.q_scale > 0).all()
    for bad in (None, 0, -3):
        with pytest.raises(ArgumentError, match="max_q_len"):
            quantised(on, {**given, "max_q_len": bad})


def H3_position_is_the_cache_slot(on: Adapter, rng: np.random.Generator) -> None:
    import hccupy

    assert "M-RoPE" in (hccupy.rope_norm_store_kv.__doc__ or "")


def I1_nothing_at_all(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, lengths=(), new=())
    got = bf16(on, given)
    assert got.q.shape == (0, 4, 64) and (raw(got.key_cache) == 0xA5A5).all()
    got = quantised(on, fp8(given))
    assert got.q.shape == (0, 4, 64) and got.q_scale.shape == (0, 4, 128) and got.split_k_flag.shape == (0, 2)
    call(on, "store_kv", {"cache": given["key_cache"], "src": np.zeros((0, 2, 64), given["qkv"].dtype), "slot_mapping": np.zeros(0, np.int64)})


def I2_I3_requests_without_tokens(on: Adapter, rng: np.random.Generator) -> None:
    """Their tails are not touched; the fp8 outputs are zeros of the documented shapes."""
    given = build(rng, lengths=(9, 3), new=(0, 0))
    got = bf16(on, given)
    assert got.q.shape == (0, 4, 64) and (raw(got.key_cache) == 0xA5A5).all() and (raw(got.value_cache) == 0xA5A5).all()
    got = quantised(on, fp8(given, max_q_len=5))
    assert got.q_scale.shape == (2, 4, 128) and not got.q_scale.any() and not got.split_k_flag.any() and got.split_k_flag.shape == (2, 2)


def I5_index_dtypes_and_ranks(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng)
    wrong = np.float32 if on.name == "jax" else np.int64  # JAX has no int64 by default
    for name in ("block_table", "seq_lens", "q_index"):
        with pytest.raises(DtypeError, match=name):
            bf16(on, {**given, name: given[name].astype(wrong)})
        with pytest.raises(ShapeError, match=name):
            bf16(on, {**given, name: given[name][None]})
    with pytest.raises(ShapeError, match="q_index"):
        bf16(on, {**given, "q_index": given["q_index"][:-1]})
    with pytest.raises(ShapeError, match="block_table"):
        bf16(on, {**given, "block_table": given["block_table"][:, :0]})
    with pytest.raises(DtypeError):
        bf16(on, {**given, "key_cache": given["key_cache"].astype(np.float16)})


def I7_absent_means_absent(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng, policy="rope_then_norm")
    for name in ("q_norm_weight", "k_norm_weight"):
        with pytest.raises(ArgumentError, match=name):
            bf16(on, {**given, name: None})
    with pytest.raises(ArgumentError, match="q_norm_weight"):
        bf16(on, {**given, "qk_norm_policy": "none"})
    g = fp8(build(rng))
    with pytest.raises(ArgumentError, match="q_scale_inv"):
        quantised(on, {**g, "q_quant": "static"})
    with pytest.raises(ArgumentError, match="q_scale_inv"):
        quantised(on, {**g, "q_scale_inv": np.array([1.0], np.float32)})
    with pytest.raises(HccupyError):
        quantised(on, {**g, "k_scale": None})


@needs_memory
def I8_outputs_that_overlap_an_input(on: Adapter, rng: np.random.Generator) -> None:
    given = build(rng)
    qkv = on.put(given["qkv"])
    with pytest.raises(LayoutError, match="overlap"):
        import hccupy

        hccupy.rope_norm_store_kv(**{k: on.put(v) for k, v in given.items() if k != "qkv"}, qkv=qkv, out_q=qkv[:, :256].reshape(4, 4, 64))
