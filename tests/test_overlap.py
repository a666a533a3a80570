"""overlap.py against brute force: arrays share an element, or an array covers itself, exactly where index sets say so."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hccupy
from hccupy import overlap

LAYOUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(-7, 7)), min_size=0, max_size=3)


def elements(shape, strides, start=0):
    """Every element offset, one an index."""
    return [start + sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))]


def split(layout):
    return tuple(n for n, _ in layout), tuple(s for _, s in layout)


@settings(max_examples=300, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(-20, 20), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_shared_is_exact(first, second, distance, size_a, size_b):
    """Bytes, not address ranges; different item sizes (an fp8 cache and an int32 table) included."""
    (shape_a, strides_a), (shape_b, strides_b) = split(first), split(second)
    bytes_a = {e * size_a + k for e in elements(shape_a, strides_a) for k in range(size_a)}
    bytes_b = {distance + e * size_b + k for e in elements(shape_b, strides_b) for k in range(size_b)}
    a, b = (4096, shape_a, strides_a, size_a), (4096 + distance, shape_b, strides_b, size_b)
    assert overlap.shared(a, b) == overlap.shared(b, a) == bool(bytes_a & bytes_b)


@settings(max_examples=300, deadline=None)
@given(LAYOUTS)
def test_covers_itself_never_misses(layout):
    shape, strides = split(layout)
    found = elements(shape, strides)
    if len(set(found)) < len(found):
        assert overlap.covers_itself(shape, strides)


@settings(max_examples=200, deadline=None)
@given(st.permutations([0, 1, 2, 3]), st.lists(st.integers(1, 4), min_size=4, max_size=4), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_covers_itself_accepts_every_nested_layout(order, shape, padding):
    """Any permutation of a dense array, with padding after any axis, is writable."""
    strides, step = [0] * 4, 1
    for axis in order:
        strides[axis] = step
        step = step * shape[axis] + padding[axis]
    assert not overlap.covers_itself(tuple(shape), tuple(strides))


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, st.integers(1, 8))
def test_extent_bounds_the_bytes(layout, itemsize):
    shape, strides = split(layout)
    low, high = overlap.extent(shape, strides, itemsize)
    found = elements(shape, strides)
    assert (low, high) == ((min(found) * itemsize, (max(found) + 1) * itemsize) if found else (0, 0))


@pytest.mark.parametrize("name", ["interleaved", "packed", "head-major", "cross-layer", "same"])
def test_real_caches_are_judged_at_once(name):
    """K and V of a 10 GiB cache that interleave in one buffer; the exact test must not search."""
    blocks, size, heads, dim, layers = 2**16, 64, 8, 128, 3
    shape = (blocks, size, heads, dim)
    stride, gap = {
        "interleaved": ((2 * size * heads * dim, heads * dim, dim, 1), size * heads * dim),
        "packed": ((heads * size * 2 * dim, 2 * dim, size * 2 * dim, 1), dim),
        "head-major": ((2 * heads * size * dim, dim, size * dim, 1), heads * size * dim),
        "cross-layer": ((layers * 2 * size * heads * dim, heads * dim, dim, 1), size * heads * dim),
        "same": ((size * heads * dim, heads * dim, dim, 1), 0),
    }[name]
    key, value = (2**40, shape, stride, 2), (2**40 + 2 * gap, shape, stride, 2)
    start = time.perf_counter()
    assert overlap.shared(key, value) == (name == "same")
    assert not overlap.covers_itself(shape, stride)
    assert time.perf_counter() - start < 0.05


# ---- through the ops --------------------------------------------------------------------------------------------


def post(rng, tokens=4, hc=2, hidden=8):
    """Arguments of ihc_post and the result without out=."""
    x = rng.standard_normal((tokens, hidden), np.float32)
    residual = rng.standard_normal((tokens, hc, hidden), np.float32)
    h_post = rng.uniform(0, 2, (tokens, hc)).astype(np.float32)
    return x, residual, h_post, hccupy.ihc_post(x, residual, h_post)


def test_out_may_be_the_residual(rng):
    x, residual, h_post, expected = post(rng)
    assert hccupy.ihc_post(x, residual, h_post, out=residual) is residual
    np.testing.assert_array_equal(residual, expected)


def test_out_may_be_the_residual_seen_through_another_view(rng):
    x, residual, h_post, expected = post(rng)
    hccupy.ihc_post(x, residual, h_post, out=residual[:])
    np.testing.assert_array_equal(residual, expected)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_out_shifted_within_the_residual_is_refused(rng, shift):
    """A row off would read channels that are already overwritten."""
    x, _, h_post, _ = post(rng)
    buffer = rng.standard_normal((4 + shift, 2, 8), np.float32)
    before = buffer.copy()
    with pytest.raises(hccupy.LayoutError, match=r"ihc_post: out and residual: expected .*share no element.* got two that overlap"):
        hccupy.ihc_post(x, buffer[:4], h_post, out=buffer[shift:])
    np.testing.assert_array_equal(buffer, before)


def test_out_and_residual_may_interleave(rng):
    """Even rows in, odd rows out: address ranges cross, elements do not."""
    x, residual, h_post, expected = post(rng)
    buffer = np.zeros((8, 2, 8), np.float32)
    buffer[::2] = residual
    hccupy.ihc_post(x, buffer[::2], h_post, out=buffer[1::2])
    np.testing.assert_array_equal(buffer[1::2], expected)
    np.testing.assert_array_equal(buffer[::2], residual)


def test_overlap_is_judged_at_every_call_not_only_the_first(rng):
    """Same shapes and strides, other addresses: the remembered call must look again."""
    x, residual, h_post, expected = post(rng)
    out = np.zeros_like(residual)
    hccupy.ihc_post(x, residual, h_post, out=out)
    buffer = np.concatenate([residual, residual[:1]])
    for _ in range(2):
        with pytest.raises(hccupy.LayoutError):
            hccupy.ihc_post(x, buffer[:4], h_post, out=buffer[1:])
        hccupy.ihc_post(x, residual, h_post, out=out)
    np.testing.assert_array_equal(out, expected)


def test_two_outputs_may_not_share_memory(rng):
    x, residual, h_post, _ = post(rng)
    buffer = np.zeros((4, 8), np.float32)
    w, scale, base = rng.standard_normal((4, 16), np.float32), np.ones(2, np.float32), np.zeros(4, np.float32)
    with pytest.raises(hccupy.LayoutError, match="z_out and h_post_out"):
        hccupy.ihc_post_pre(x, residual, h_post, w, scale, base, z_out=buffer, h_post_out=buffer[:, :2])
    assert not buffer.any()
