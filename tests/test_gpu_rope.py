"""RoPE + norm + paged KV write on a GPU: every case on every framework, the field cases, 64-bit offsets, streams and graphs."""

from __future__ import annotations

import numpy as np
import pytest

import hccupy
from hccupy import arch, check, cuda, plan
from hccupy.dtypes import BY_NAME
from hccupy.frameworks import numpy_
from hccupy.ops import REGISTRY

from . import oracle, report, rope_field_cases
from .adapters import CPU, GPU, params
from .rope_cases import bf16, build, call, dirty, expected, fp8, of_an_earlier_step, quantised, raw, verify

pytestmark = pytest.mark.gpu
NUMPY, TORCH = CPU[0], GPU[0]
globals().update({name.replace("test_", "test_rope_", 1): test for name, test in rope_field_cases.tests(GPU).items()})


def runs(op):
    """Every case through torch; three shapes through the other frameworks, which reach the same kernels."""
    small = [c for c in REGISTRY[op].cases if not c.name.startswith("bench")]
    few = ("8-2", "5-1", "4-2-d192")
    return [pytest.param(on, c, id=f"{c.name}-{on.name}") for c in small for on in GPU if on is TORCH or c.name.startswith(few)]


def copies(given):
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}


@pytest.mark.parametrize(("on", "case"), runs("rope_norm_store_kv"))
def test_rope_bf16_against_fp64(case, on, rng):
    given = REGISTRY["rope_norm_store_kv"].make_inputs(case, rng)
    before = dirty(given)
    got = bf16(on, given)
    verify(given, got, before)
    want = expected(given)
    floor = 2.0 ** (BY_NAME[case.dtype].mantissa - 23) * 8
    rows = [i for i, w in enumerate(want.where) if w is not None]
    k = np.stack([got.key_cache[want.where[i]] for i in rows])
    note = report.note
    note("rope_norm_store_kv", case.dtype, on.name, "q", ulps=oracle.ulps(got.q, want.q[0], want.q[1] * floor).max())
    note("rope_norm_store_kv", case.dtype, on.name, "key_cache", ulps=oracle.ulps(k, want.k[0][rows], want.k[1][rows] * floor).max())
    note("rope_norm_store_kv", case.dtype, on.name, "value_cache", ulps=0.0)


@pytest.mark.parametrize(("on", "case"), runs("rope_norm_store_kv_fp8"))
def test_rope_fp8_against_the_reference(case, on, rng):
    """Codes equal the NumPy path's but where the two fp32 chains straddle a midpoint: one step, seldom."""
    given = REGISTRY["rope_norm_store_kv_fp8"].make_inputs(case, rng)
    dirty(given)
    want = quantised(NUMPY, copies(given))
    got = quantised(on, given)
    for name in ("q", "key_cache", "value_cache", "q_scale", "split_k_flag"):
        g, w = getattr(got, name), getattr(want, name)
        if w is None:
            assert g is None
        elif g.dtype == np.float32:
            assert np.allclose(g, w, rtol=1e-6, atol=0), name
            report.note("rope_norm_store_kv_fp8", case.dtype, on.name, name, relative=(np.abs(g - w) / np.maximum(np.abs(w), 1e-30)).max())
        else:
            steps = np.abs(raw(g).astype(np.int64) - raw(w).astype(np.int64))
            exact = name in ("value_cache", "split_k_flag")
            assert steps.max(initial=0) <= (0 if exact else 1) and (steps > 0).mean() < 2e-3, f"{name}: {steps.max()} steps, {(steps > 0).mean():.2%}"
            report.note("rope_norm_store_kv_fp8", case.dtype, on.name, name, code_steps=steps.max(initial=0), ulps=steps.max(initial=0))


@pytest.mark.parametrize("op", ["store_kv", "zero_kv_tail"])
@pytest.mark.parametrize("on", params(GPU))
def test_rope_store_and_tail_are_exact(op, on, rng):
    for case in REGISTRY[op].cases:
        if case.name.startswith("bench"):
            continue
        given = REGISTRY[op].make_inputs(case, rng)
        want, got = call(NUMPY, op, copies(given)), call(on, op, given)
        for name in vars(want):
            if getattr(want, name) is not None:
                assert np.array_equal(raw(getattr(got, name)), raw(getattr(want, name))), f"{op} {case.name} {name}"
                report.note(op, case.dtype, on.name, name, ulps=0.0)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_rope_rows_do_not_depend_on_the_batch(kind, rng):
    """D1: one row alone, in a decode batch, in a prefill of any size that changes the launch: the same bits."""
    import torch

    lengths = 700
    given = build(rng, q_heads=64, kv_heads=8, dim=128, rotary=64, block_size=64, lengths=(lengths,), new=(lengths,), policy="norm_then_rope")
    run = bf16 if kind == "bf16" else quantised
    whole = run(TORCH, copies(given) if kind == "bf16" else fp8(copies(given)))
    for first, count in ((0, 1), (699, 1), (100, 7), (65, 130), (0, 699)):
        part = {**given, "qkv": given["qkv"][first : first + count], "seq_lens": np.array([first + count], np.int32), "q_index": np.array([0, count], np.int32)}
        if kind == "fp8":
            part = fp8(part, is_prefill=count > 1)
        got = run(TORCH, copies(part))
        assert np.array_equal(raw(got.q), raw(whole.q)[first : first + count])
        for i in range(first, first + count):
            page, slot = given["block_table"][0, i // 64], i % 64
            assert np.array_equal(raw(got.key_cache[page, slot]), raw(whole.key_cache[page, slot]))
    torch.cuda.synchronize()


def test_rope_C3_offsets_beyond_32_bits(rng):
    """A strided view whose block stride alone passes 2^31 elements: the write lands where the address says."""
    import torch

    stride = 2**31 + 4096
    given = build(rng, lengths=(20,), new=(20,), block_size=8, policy="none")
    pages = 4
    buffer = torch.full((stride * (pages - 1) + 8 * 2 * 64,), 7.0, dtype=torch.bfloat16, device="cuda")
    key = buffer.as_strided((pages, 8, 2, 64), (stride, 128, 64, 1))
    value = torch.zeros(pages, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    arrays = {k: TORCH.put(v) for k, v in given.items() if k not in ("key_cache", "value_cache")}
    arrays["block_table"] = torch.tensor([[3, 0, 2]], dtype=torch.int32, device="cuda")
    small = torch.full((pages, 8, 2, 64), 7.0, dtype=torch.bfloat16, device="cuda")
    q = hccupy.rope_norm_store_kv(key, value, **arrays)
    q2 = hccupy.rope_norm_store_kv(small, value.clone(), **arrays)
    assert torch.equal(q, q2)
    for page in range(pages):
        assert torch.equal(key[page], small[page])
    assert (buffer == 7.0).sum().item() >= buffer.numel() - 24 * 128


def test_rope_C7_more_than_209715_rows():
    """209,717 rows of 10,240: the last rows are right."""
    import torch

    tokens = 209_717
    width = (64 + 2 * 8) * 128
    torch.manual_seed(1)
    qkv = torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda").normal_()
    table = torch.rand(64, 128, device="cuda")
    ones = {"q_norm_weight": torch.ones(128, device="cuda"), "k_norm_weight": torch.ones(128, device="cuda"), "qk_norm_policy": "norm_then_rope"}
    caches = [torch.zeros(tokens // 64 + 1, 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    seq = torch.full((tokens,), 33, dtype=torch.int32, device="cuda")
    index = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
    blocks = (torch.arange(tokens, dtype=torch.int32, device="cuda") // 64)[:, None].contiguous()
    q = hccupy.rope_norm_store_kv(*caches, qkv, table, seq, index, blocks, **ones, tail="keep")
    last = slice(tokens - 3, tokens)
    small = [torch.zeros(1, 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    q2 = hccupy.rope_norm_store_kv(
        *small, qkv[last].contiguous(), table, seq[:3], index[:4], torch.zeros(3, 1, dtype=torch.int32, device="cuda"), **ones, tail="keep"
    )
    assert torch.equal(q[last], q2)


def test_rope_many_requests(rng):
    """65,537 requests of one token each."""
    import torch

    n = 65_537
    qkv = torch.randn(n, 4 * 64, dtype=torch.bfloat16, device="cuda")
    caches = [torch.zeros(n, 1, 1, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    table = torch.rand(1, 64, device="cuda")
    ones = torch.ones(n, dtype=torch.int32, device="cuda")
    index = torch.arange(n + 1, dtype=torch.int32, device="cuda")
    pages = torch.randperm(n, device="cuda").to(torch.int32)[:, None].contiguous()
    hccupy.rope_norm_store_kv(*caches, qkv, table, ones, index, pages)
    assert torch.equal(caches[1][pages[:, 0].long(), 0, 0], qkv[:, 192:])


def test_rope_L4_graph_replay_follows_metadata(rng):
    """L4: captured once, replayed with other lengths, pages and values; and under HCCUPY_DEBUG the capture is refused."""
    import torch

    given = build(rng, q_heads=8, kv_heads=2, dim=128, block_size=16, lengths=(40, 17, 3), new=(1, 1, 1), policy="norm_then_rope")
    arrays = {k: TORCH.put(v) for k, v in given.items()}
    hccupy.rope_norm_store_kv(**arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = hccupy.rope_norm_store_kv(**arrays)
    for lengths in ((33, 18, 4), (38, 16, 1)):
        arrays["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        arrays["qkv"].normal_()
        fresh = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arrays.items()}
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(q, hccupy.rope_norm_store_kv(**fresh))
        assert torch.equal(arrays["key_cache"].view(torch.int16), fresh["key_cache"].view(torch.int16))


def test_rope_debug_names_the_first_offence(rng, monkeypatch):
    """HCCUPY_DEBUG=1 on device metadata: request, position, page; nothing is written."""
    import torch

    monkeypatch.setenv("HCCUPY_DEBUG", "1")
    given = build(rng, lengths=(11, 9), new=(3, 1))
    given["block_table"][1, 1] = len(given["key_cache"])
    arrays = {k: TORCH.put(v) for k, v in given.items()}
    before = arrays["key_cache"].clone()
    with pytest.raises(hccupy.MetadataError, match=r"page \d+ \(request 1, position 8\)"):
        hccupy.rope_norm_store_kv(**arrays)
    assert torch.equal(arrays["key_cache"].view(torch.int16), before.view(torch.int16))


def test_rope_J2_side_stream(rng):
    """The op runs on torch's current stream: a spin in front, 30 times."""
    import torch

    given = build(rng, lengths=(9,), new=(1,))
    arrays = {k: TORCH.put(v) for k, v in given.items()}
    hccupy.rope_norm_store_kv(**arrays)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for i in range(30):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            arrays["qkv"].fill_(i + 1)
            hccupy.rope_norm_store_kv(**arrays)
        side.synchronize()
        page = given["block_table"][0, 1]
        assert (arrays["value_cache"][int(page), 0] == i + 1).all()


# Lets the next grid start at once, and copies only after a while: three words a copy, to, from, bytes.
PREVIOUS = r"""
extern "C" __global__ void __launch_bounds__(1024) previous(const unsigned long long* copies, int count, int nanoseconds) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - start < nanoseconds);
  for (int c = 0; c < count; ++c) {
    const unsigned long long to = copies[3 * c], from = copies[3 * c + 1], bytes = copies[3 * c + 2];
    const unsigned long long whole = (to | from) % 16 ? 0 : bytes / 16;
    for (unsigned long long i = threadIdx.x; i < whole; i += 1024)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    for (unsigned long long i = 16 * whole + threadIdx.x; i < bytes; i += 1024)
      reinterpret_cast<char*>(to)[i] = reinterpret_cast<const char*>(from)[i];
  }
}
"""
WAYS = {"few": (64, 8, (1, 2, 1)), "block": (64, 8, (1, 2) * 21 + (1,)), "many": (64, 8, (63, 65, 1, 127) * 4), "narrow": (8, 1, (300, 212) * 8)}  # on an H200


def way_of(spec, given):
    """(few, block, many or narrow; is it a dependent launch?) of the kernel that runs this on the device."""
    arrays = {p.name: given[p.name] for p in spec.args if p.name in given}
    scalars = {s.name: given.get(s.name, s.default) for s in spec.scalars}
    addresses = {a.name: arrays[a.name].ctypes.data if a.name in arrays else 0 for a in (*spec.args, *spec.outputs)}
    bound = check.bind(spec, {n: numpy_.meta(a) for n, a in arrays.items()}, scalars, "numpy", addresses)
    made = plan.make(spec, bound, arch.of_device(0))
    found = [way for way, word in (("block", "kBulk"), ("narrow", "kTogether"), ("many", "kMany")) if made.defines[word]]
    return (found or ["few"])[0], made.launch.pdl


@pytest.mark.parametrize("rows", WAYS)
@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
def test_rope_what_the_previous_grid_writes(op, rows, rng):
    """All that the op reads is written by the grid before it, which is still at it when the op's blocks start: the bits are those of a call after it."""
    import cupy
    import torch

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no dependent launches")
    spec = REGISTRY[op]
    q_heads, kv_heads, new = WAYS[rows]
    lengths = np.array(new) + rng.integers(0, 200, len(new))
    given = build(rng, q_heads, kv_heads, 128, block_size=64, lengths=lengths, new=new, policy="norm_then_rope")
    given = fp8(given) if op.endswith("_fp8") else given
    way, dependent = way_of(spec, given)
    assert dependent
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert way == ("narrow" if op.endswith("_fp8") and rows == "many" else rows)

    arrays = {k: TORCH.put(v) for k, v in given.items()}
    untouched = {n: arrays[n].clone() for n in ("key_cache", "value_cache")}

    def run(**outs):
        results = getattr(hccupy, op)(**arrays, **outs)
        return results if isinstance(results, tuple) else (results,)

    # Everything is compiled, loaded and allocated by this call, whose results are the right ones.
    outs = {o.keyword: r for o, r in zip([o for o in spec.outputs if o.allocate], run(), strict=True)}
    torch.cuda.synchronize()
    written = {**outs, **{n: arrays[n] for n in untouched}}
    want = {n: t.clone() for n, t in written.items()}
    previous = cupy.RawModule(code=PREVIOUS).get_function("previous")
    side = torch.cuda.Stream()
    for label, earlier in of_an_earlier_step(given, rng).items():
        real = {n: arrays[n].clone() for n in earlier}
        for n, old in earlier.items():
            arrays[n].copy_(TORCH.put(old))
        for n, t in untouched.items():
            arrays[n].copy_(t)
        for t in outs.values():
            t.view(torch.uint8).fill_(0xA5)
        copies = torch.tensor([[arrays[n].data_ptr(), t.data_ptr(), t.nbytes] for n, t in real.items()], dtype=torch.int64, device="cuda")
        with torch.cuda.stream(side), cuda.on_stream(side.cuda_stream):
            for count in (0, len(real)):  # the first time nothing but what a first call brings
                torch.cuda.synchronize()
                torch.cuda._sleep(1_000_000)  # until all is in the queue
                previous((1,), (1024,), (np.uint64(copies.data_ptr()), np.int32(count), np.int32(30_000)))
            run(**outs)
        side.synchronize()
        for n, t in real.items():
            assert torch.equal(arrays[n].view(torch.uint8), t.view(torch.uint8)), f"{label}: {n} was not copied"
        for n, t in want.items():
            assert torch.equal(written[n].view(torch.uint8), t.view(torch.uint8)), f"{label}: {n}"
    TORCH.synchronize()
