"""On a GPU: memory that runs out, caches of more than 2 GiB through strides, launches that are refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import hccupy
from hccupy.ops import REGISTRY
from hccupy.spec import Case

from .adapters import GPU
from .rope_cases import build, fp8, sentinel

pytestmark = pytest.mark.gpu
TORCH, CUPY = GPU[0], GPU[1]


def fill(allocate, error):
    """What is left in pieces that are partly in use: other tests' small arrays keep large ones from going back to the driver."""
    held, size = [], 1 << 34
    while size >= 1 << 20:
        try:
            held.append(allocate(size))
        except error:
            size //= 2
    return held


@contextlib.contextmanager
def no_memory_left(framework):
    """Nothing more than what is in use can be had from the framework's allocator."""
    if framework == "torch":
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
        held = fill(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.cuda.OutOfMemoryError)
        try:
            yield hccupy.OutOfMemoryError
        finally:
            held.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    import cupy

    pool = cupy.get_default_memory_pool()
    cupy.cuda.runtime.deviceSynchronize()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + (1 << 20))
    held = fill(cupy.cuda.alloc, cupy.cuda.memory.OutOfMemoryError)
    try:
        yield hccupy.OutOfMemoryError
    finally:
        held.clear()
        pool.set_limit(size=0)


@pytest.mark.parametrize("on", [TORCH, CUPY], ids=lambda on: on.name)
def test_trust_out_of_memory_leaves_arguments_as_they_are(on, rng):
    """In-place arguments keep their bytes, on the first call of a shape and on repeats; the error names the size; afterwards all is well."""
    spec = REGISTRY["ihc_post_pre"]
    given = spec.make_inputs(Case("oom", {"tokens": 3000, "hc": 4, "hidden": 4096}, spec.cases[0].scalars, "bfloat16"), rng)
    arrays = {k: on.put(v) for k, v in given.items()}
    cached = build(rng, q_heads=64, kv_heads=8, dim=128, block_size=64, lengths=(2000,), new=(2000,), policy="norm_then_rope")
    caches = {k: on.put(v) for k, v in cached.items()}
    want = [on.get(r) for r in hccupy.ihc_post_pre(**arrays)]
    want_q = on.get(hccupy.rope_norm_store_kv(**caches))
    fresh = {k: on.put(sentinel(cached[k].shape, cached[k].dtype)) for k in ("key_cache", "value_cache")}
    for again in range(3):
        if again == 1:  # a shape that nobody has called
            from hccupy import run

            run.forget()
        with no_memory_left(on.name) as error:
            with pytest.raises(error, match=r"(?i)allocat\w* [\d.,]+"):
                hccupy.ihc_post_pre(**arrays, out=arrays["residual"])
            with pytest.raises(error, match=r"(?i)allocat\w* [\d.,]+"):
                hccupy.rope_norm_store_kv(**{**caches, **fresh})
        on.synchronize()
        assert np.array_equal(on.get(arrays["residual"]).view(np.uint16), given["residual"].view(np.uint16))
        for k in fresh:
            assert (on.get(fresh[k]).view(np.uint16) == 0xA5A5).all()
    got = [on.get(r) for r in hccupy.ihc_post_pre(**arrays, out=arrays["residual"])]
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(g.view(np.uint8), w.view(np.uint8))
    assert np.array_equal(on.get(hccupy.rope_norm_store_kv(**{**caches, **fresh})).view(np.uint16), want_q.view(np.uint16))


def test_trust_C3_fp8_store_and_tail_beyond_2_gib(rng):
    """Pages 2^31 + 4096 bytes apart in one buffer: each op writes where the address says, and nothing else."""
    import torch

    stride, pages = 2**31 + 4096, 4
    buffer = torch.full((stride * (pages - 1) + 8 * 2 * 64,), 0xA5, dtype=torch.uint8, device="cuda")
    far = buffer.as_strided((pages, 8, 2, 64), (stride, 128, 64, 1))
    near = torch.full((pages, 8, 2, 64), 0xA5, dtype=torch.uint8, device="cuda")
    given = fp8(build(rng, lengths=(21,), new=(21,), block_size=8), kind=np.uint8)
    arrays = {k: TORCH.put(v) for k, v in given.items() if k not in ("key_cache", "value_cache")}
    arrays["block_table"] = torch.tensor([[3, 0, 2]], dtype=torch.int32, device="cuda")
    value = torch.zeros(pages, 8, 2, 64, dtype=torch.uint8, device="cuda")
    q, scale, _ = hccupy.rope_norm_store_kv_fp8(far, value, **arrays)
    q2, scale2, _ = hccupy.rope_norm_store_kv_fp8(near, value.clone(), **arrays)
    assert torch.equal(q.view(torch.uint8), q2.view(torch.uint8)) and torch.equal(scale, scale2) and torch.equal(far, near)
    src = torch.randint(0, 255, (3, 2, 64), dtype=torch.uint8, device="cuda")
    slots = torch.tensor([8, 31, 15], device="cuda")
    for cache in (far, near):
        hccupy.store_kv(cache, src, slots)
    assert torch.equal(far, near)
    lens, table = torch.tensor([19, 3], dtype=torch.int32, device="cuda"), torch.tensor([[0, 1, 3], [1, 0, 0]], dtype=torch.int32, device="cuda")
    for cache in (far, near):
        hccupy.zero_kv_tail(cache, torch.zeros_like(value), lens, table)
    assert torch.equal(far, near)
    far.fill_(0xA5)
    step = 2**30
    assert all((buffer[i : i + step] == 0xA5).all() for i in range(0, len(buffer), step))


def test_trust_C10_a_refused_launch_is_raised_where_it_was_called(monkeypatch):
    """More shared memory than a block may have: an error of that call, and the next op works."""
    from dataclasses import replace

    import torch

    from hccupy import launch, run

    real = launch.Launcher.__init__

    def greedy(self, spec, plan, bound, function):
        real(self, spec, replace(plan, launch=replace(plan.launch, smem=10**6)), bound, function)

    x, residual, h = torch.ones(2, 72, device="cuda"), torch.ones(2, 4, 72, device="cuda"), torch.ones(2, 4, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(launch.Launcher, "__init__", greedy)
        run.forget()
        with pytest.raises(hccupy.LaunchError, match=r"ihc_post.*1000000 bytes"):
            hccupy.ihc_post(x, residual, h)
    run.forget()
    assert (hccupy.ihc_post(x, residual, h) == 2).all()
    torch.cuda.synchronize()


def test_trust_A4_capture_with_an_empty_block_table_leaves_block_0_alone(rng):
    """Warm-up and capture as engines do it, on a block table of zeros and garbage rows; then real rows. Block 0 is never written."""
    import torch

    for quantise in (False, True):
        given = build(rng, lengths=(1,) * 8, new=(1,) * 8, null_block=0, spare=12)
        given["block_table"][...] = 0
        given["qkv"][...] = np.nan
        given = fp8(given) if quantise else given
        for name in ("key_cache", "value_cache"):
            given[name][...] = np.zeros_like(given[name])
        call = hccupy.rope_norm_store_kv_fp8 if quantise else hccupy.rope_norm_store_kv
        arrays = {k: TORCH.put(v) for k, v in given.items()}
        call(**arrays)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = call(**arrays)
        caches = [arrays[n].view(torch.uint8) for n in ("key_cache", "value_cache")]
        torch.cuda.synchronize()
        assert not any(int(c[0].count_nonzero()) for c in caches)
        arrays["qkv"].normal_()
        arrays["block_table"][:, 0] = torch.tensor([0, 3, 5, 0, 7, 9, 2, 0], dtype=torch.int32)
        graph.replay()
        torch.cuda.synchronize()
        assert not any(int(c[0].count_nonzero()) for c in caches)
        assert all(int(c[[3, 5, 7, 9, 2], 0].count_nonzero()) for c in caches)
        assert torch.isfinite((q[0] if quantise else q).float()).all()


def test_trust_J4_foreign_arrays_inside_a_capture(rng):
    """Arrays of a producer that speaks DLPack alone, first and second call inside a capture on a side stream."""
    import torch

    from .adapters import Producer

    x, residual, h = torch.ones(4, 64, device="cuda"), torch.zeros(4, 4, 64, device="cuda"), torch.ones(4, 4, device="cuda")
    outs = [torch.zeros_like(residual) for _ in range(2)]
    hccupy.ihc_post(x, residual, h)
    torch.cuda.synchronize()
    import cupy

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for out in outs:
            hccupy.ihc_post(Producer(x), Producer(residual), Producer(h), out=Producer(out))
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert all((out == 3).all() for out in outs)
