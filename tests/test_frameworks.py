"""The same numbers from every framework's CPU arrays, in that framework's arrays; layouts, leading shapes, empties, in place."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import hccupy
from hccupy import run as runner
from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY

from .test_plan import OPS, small_cases

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
ROOT = Path(__file__).resolve().parent.parent


# ---- the frameworks ---------------------------------------------------------------------------------------------


def to_torch(array):
    """The same memory and strides as a tensor; bf16 and fp8 through integers of their size."""
    bits = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8}.get(array.dtype.name)
    if bits is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))


class Producer:
    """Anything with __dlpack__, here one that wraps a tensor; DLPack 1.x."""

    def __init__(self, inner):
        self.inner = inner

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert stream is None  # of CPU memory
        return self.inner.__dlpack__(max_version=max_version)


class OldProducer(Producer):
    """From before DLPack 1.0: no max_version."""

    def __dlpack__(self, stream=None):
        return self.inner.__dlpack__()


def to_jax(array):
    return jax.numpy.asarray(np.ascontiguousarray(array))


CONVERT = {
    "numpy": lambda a: a,
    "torch": to_torch,
    "dlpack": lambda a: Producer(to_torch(a)),
    "dlpack-old": lambda a: OldProducer(to_torch(a)),
    "jax": to_jax,
}
RESULT = {"numpy": np.ndarray, "torch": torch.Tensor, "dlpack": np.ndarray, "dlpack-old": np.ndarray, "jax": jax.Array}


def to_numpy(value):
    if isinstance(value, Producer):
        value = value.inner
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        bits = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8}.get(name)
        return (value if bits is None else value.view(bits)).numpy().view(BY_NAME[name].np)
    return np.asarray(value)


def convert(given, framework):
    return {n: CONVERT[framework](v) if isinstance(v, np.ndarray) else v for n, v in given.items()}


def results(value):
    return list(value) if isinstance(value, tuple) else [] if value is None else [value]


def equal(got, expected):
    """The same shape, dtype and bits."""
    got, expected = to_numpy(got), to_numpy(expected)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()


def inputs(op, index):
    """Two calls' worth of the same arguments: one for NumPy, one for the framework under test."""
    spec = REGISTRY[op]
    case = small_cases(spec)[index]
    return spec.make_inputs(case, np.random.default_rng(index)), spec.make_inputs(case, np.random.default_rng(index))


def indices(op):
    """A few cases of each dtype."""
    cases = small_cases(REGISTRY[op])
    by_dtype = {}
    for i, c in enumerate(cases):
        by_dtype.setdefault((c.dtype, c.options.get("cache_dtype"), c.options.get("layout")), i)
    return sorted(by_dtype.values())[:8]


EVERY = [(op, i) for op in OPS for i in indices(op)]


# ---- the same bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", [f for f in CONVERT if f != "numpy"])
@pytest.mark.parametrize("op, index", EVERY)
def test_J7_same_bits_as_numpy(op, index, framework):
    spec = REGISTRY[op]
    plain, mine = inputs(op, index)
    expected = results(getattr(hccupy, op)(**plain))
    arrays = convert(mine, framework)
    got = results(getattr(hccupy, op)(**arrays))
    mutated = [p.name for p in spec.args if p.mutated]
    if framework == "jax":
        expected += [plain[n] for n in mutated]  # results first, the updated caches after them
        fresh = spec.make_inputs(small_cases(spec)[index], np.random.default_rng(index))
        for n in mutated:
            equal(arrays[n], fresh[n])  # what the caller holds is as it was
    else:
        for n in mutated:
            equal(mine[n], plain[n])  # written in place, through the strides
    assert len(got) == len(expected)
    for value, wanted in zip(got, expected, strict=True):
        if wanted is None:
            assert value is None
        else:
            assert isinstance(value, RESULT[framework])
            equal(value, wanted)


@pytest.mark.parametrize("op", OPS)
def test_jax_in_jit_and_eager_give_the_same_bits(op):
    given, _ = inputs(op, 1)
    arrays = {n: to_jax(v) for n, v in given.items() if isinstance(v, np.ndarray)}
    scalars = {n: v for n, v in given.items() if n not in arrays}
    eager = results(getattr(hccupy, op)(**arrays, **scalars))
    jitted = results(jax.jit(lambda a: getattr(hccupy, op)(**a, **scalars))(arrays))
    assert len(eager) == len(jitted)
    for a, b in zip(eager, jitted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            equal(b, a)


def test_jax_donated_cache():
    given, plain = inputs("store_kv", 1)
    hccupy.store_kv(**plain)
    step = jax.jit(hccupy.store_kv, donate_argnums=0)
    cache = step(to_jax(given["cache"]), to_jax(given["src"]), to_jax(given["slot_mapping"]))
    equal(cache, plain["cache"])


@pytest.mark.parametrize("op", OPS)
def test_jax_refuses_out(op):
    spec = REGISTRY[op]
    given, _ = inputs(op, 1)
    arrays = convert(given, "jax")
    for o in spec.outputs:
        if o.keyword:
            with pytest.raises(hccupy.ArgumentError, match=f"^{op}: {o.keyword}: expected None with JAX arrays, got an array"):
                getattr(hccupy, op)(**arrays, **{o.keyword: jax.numpy.zeros(1)})
            with pytest.raises(hccupy.ArgumentError, match=f"^{op}: {o.keyword}: "):
                jax.jit(lambda out, keyword=o.keyword: getattr(hccupy, op)(**arrays, **{keyword: out}))(jax.numpy.zeros(1))


def test_jax_errors_inside_jit_are_ours():
    given, _ = inputs("ihc_pre", 1)
    arrays = {n: to_jax(v) for n, v in given.items() if isinstance(v, np.ndarray)}
    with pytest.raises(hccupy.ShapeError, match=r"ihc_pre: w: .*It looks transposed"):
        jax.jit(lambda a: hccupy.ihc_pre(**a))({**arrays, "w": arrays["w"].T})
    with pytest.raises(hccupy.ArgumentError, match=r"ihc_pre: norm_eps: .*on the host"):
        jax.jit(lambda a, eps: hccupy.ihc_pre(**a, norm_eps=eps))(arrays, 1e-5)
    with pytest.raises(hccupy.FrameworkError, match="ihc_pre: w: "):
        jax.jit(lambda x: hccupy.ihc_pre(**{**given, "x": x}))(arrays["x"])


def test_jax_array_over_several_devices():
    """A sharded array has no one address."""
    code = """
import jax, numpy as np, hccupy
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("t",))
x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("t")))
try:
    hccupy.ihc_post(x, jax.numpy.ones((4, 2, 8)), jax.numpy.ones((4, 2)))
except hccupy.DeviceError as error:
    print(error)
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("ihc_post: x: expected "), done.stderr


# ---- gradients, strides, read-only ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_J6_tensors_that_require_grad(dtype):
    """Norm weights are Parameters: accepted for inference, and no gradient is promised."""
    x = torch.nn.Parameter(torch.randn(3, 2, 8, dtype=dtype))
    w, scale, base = torch.nn.Parameter(torch.randn(4, 16)), torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(4))
    weight = torch.nn.Parameter(torch.randn(8, dtype=dtype))
    y, h_post = hccupy.ihc_pre(x, w, scale, base, rms_weight=weight)
    assert not y.requires_grad and not h_post.requires_grad
    with torch.no_grad():
        again, _ = hccupy.ihc_pre(x.detach(), w.detach(), scale.detach(), base.detach(), rms_weight=weight.detach())
    with torch.inference_mode():
        third, _ = hccupy.ihc_pre(x, w, scale, base, rms_weight=weight)
    equal(again, y)
    equal(third, y)


def slice_of(a, axis):
    return np.repeat(a, 2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]


def shifted(a):
    memory = np.zeros(a.size + 1, a.dtype)
    memory[1:] = a.ravel()
    return memory[1:].reshape(a.shape)


STRIDED = {
    "row slice": lambda a: slice_of(a, 0),
    "gaps between channels": lambda a: slice_of(a, 1),
    "channels first": lambda a: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1),
    "reversed rows": lambda a: a[::-1].copy()[::-1],
    "one element off": shifted,
    "part of a wider row": lambda a: np.concatenate([a, a], -1)[..., : a.shape[-1]],
}


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("framework", ["numpy", "torch", "dlpack", "dlpack-old"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strided_arguments_and_outputs(layout, framework, dtype, rng):
    """Any stride on tokens and channels, in and out; the bytes around an output stay."""
    if layout == "reversed rows" and framework != "numpy":
        framework = "numpy"  # tensors have no negative strides
    x = rng.standard_normal((5, 3, 8), np.float32).astype(BY_NAME[dtype].np)
    w, scale, base = rng.standard_normal((6, 24), np.float32), np.ones(2, np.float32), np.zeros(6, np.float32)
    y, h_post = hccupy.ihc_pre(x, w, scale, base)
    residual = hccupy.ihc_post(y, x, h_post)
    to = CONVERT[framework]
    view = STRIDED[layout](x)
    assert (view == x).all()
    for got, wanted in zip(hccupy.ihc_pre(to(view), to(w), to(scale), to(base)), (y, h_post), strict=True):
        equal(got, wanted)
    out = STRIDED[layout](np.full_like(x, 7))
    memory = out
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    before = memory.size - out.size
    hccupy.ihc_post(to(y), to(view), to(h_post), out=to(out))
    equal(out, residual)
    assert int((memory == 7).sum()) - int((out == 7).sum()) >= before - 1  # the spare element of "one element off" is 0


@pytest.mark.parametrize("framework", ["dlpack"])
def test_read_only_producer_cannot_be_an_output(framework):
    x, residual, h_post = np.ones((2, 8), np.float32), np.ones((2, 2, 8), np.float32), np.ones((2, 2), np.float32)
    out = np.zeros_like(residual)
    out.flags.writeable = False
    with pytest.raises(hccupy.LayoutError, match="ihc_post: out: expected a writable array"):
        hccupy.ihc_post(Producer(x), Producer(residual), Producer(h_post), out=Producer(out))
    assert not out.any()
    residual.flags.writeable = False  # as an input it is fine
    equal(hccupy.ihc_post(Producer(x), Producer(residual), Producer(h_post)), np.full((2, 2, 8), 2, np.float32))


@pytest.mark.parametrize("kind, name", [(3, "pinned host memory"), (4, "OpenCL"), (10, "ROCm")])
def test_producer_on_another_kind_of_device(kind, name):
    class Elsewhere(Producer):
        def __dlpack_device__(self):
            return kind, 0

    x, residual, h_post = np.ones((2, 8), np.float32), np.ones((2, 2, 8), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(hccupy.DeviceError, match=f"ihc_post: residual: .*{kind}"):
        hccupy.ihc_post(Producer(x), Elsewhere(residual), Producer(h_post))


def test_producer_is_asked_once_a_call():
    """A producer may copy or synchronise: one capsule an argument."""
    asked = []

    class Counted(Producer):
        def __dlpack__(self, **words):
            asked.append(self)
            return super().__dlpack__(**words)

    given = [Counted(a) for a in (np.ones((2, 8), np.float32), np.ones((2, 2, 8), np.float32), np.ones((2, 2), np.float32))]
    hccupy.ihc_post(*given)
    assert len(asked) == 3
    hccupy.ihc_post(*given)
    assert len(asked) == 6


@pytest.mark.parametrize("framework", ["numpy", "torch", "dlpack", "dlpack-old", "jax"])
def test_no_array_is_kept(framework):
    """The memory of calls holds facts, not arrays: buffers of gigabytes must be free to go."""
    arrays = [CONVERT[framework](np.ones(s, np.float32)) for s in ((7, 24), (7, 2, 24), (7, 2))]
    result = hccupy.ihc_post(*arrays)
    watched = [weakref.ref(a) for a in (*arrays, result)]
    del arrays, result
    gc.collect()
    assert [r() for r in watched] == [None] * 4


# ---- shapes -----------------------------------------------------------------------------------------------------

ANY = pytest.mark.parametrize("framework", CONVERT)


def gates(hc, hidden, head=False):
    rows = hc if head else 2 * hc
    rng = np.random.default_rng(5)
    return rng.standard_normal((rows, hc * hidden), np.float32), np.ones(1 if head else 2, np.float32), np.zeros(rows, np.float32)


def shapes(value):
    return [tuple(v.shape) for v in results(value)]


@ANY
@pytest.mark.parametrize("lead", [(), (1,), (6,), (2, 3), (1, 6, 1), (3, 1, 2), (0,), (0, 3), (2, 0)])
def test_any_leading_shape_comes_back(framework, lead, rng):
    """[hc, hidden] is one token; a leading shape with a zero gives empty outputs; the bits are those of [tokens, ...]."""
    hc, hidden = 3, 8
    tokens = int(np.prod(lead))
    x, block = rng.standard_normal((tokens, hc, hidden), np.float32), rng.standard_normal((tokens, hidden), np.float32)
    w, head = gates(hc, hidden), gates(hc, hidden, head=True)
    h = rng.uniform(0, 2, (tokens, hc)).astype(np.float32)
    to = CONVERT[framework]
    wide, flat, small = to(x.reshape(*lead, hc, hidden)), to(block.reshape(*lead, hidden)), to(h.reshape(*lead, hc))
    calls = {
        "ihc_pre": (hccupy.ihc_pre(wide, *map(to, w)), hccupy.ihc_pre(x, *w)),
        "ihc_head": (hccupy.ihc_head(wide, *map(to, head)), hccupy.ihc_head(x, *head)),
        "ihc_post": (hccupy.ihc_post(flat, wide, small), hccupy.ihc_post(block, x, h)),
        "ihc_post_pre": (hccupy.ihc_post_pre(flat, wide, small, *map(to, w)), hccupy.ihc_post_pre(block, x, h, *w)),
    }
    wanted = {"ihc_pre": [(hidden,), (hc,)], "ihc_head": [(hidden,)], "ihc_post": [(hc, hidden)], "ihc_post_pre": [(hc, hidden), (hidden,), (hc,)]}
    for op, (got, plain) in calls.items():
        assert shapes(got) == [(*lead, *rest) for rest in wanted[op]], op
        for a, b in zip(results(got), results(plain), strict=True):
            assert to_numpy(a).tobytes() == b.tobytes()


@ANY
@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
def test_rope_without_tokens(framework, op):
    """Idle ranks: no rows, requests with lengths. The caches stay as they are, tails included; every output is defined."""
    given, _ = inputs(op, 1)
    requests = len(given["seq_lens"])
    given |= {"qkv": given["qkv"][:0], "q_index": np.zeros(requests + 1, np.int32)}
    for name in ("key_cache", "value_cache"):
        given[name] = np.full(given[name].shape, 1, given[name].dtype)
    arrays = convert(given, framework)
    got = results(getattr(hccupy, op)(**arrays))
    dim, kv_heads = given["key_cache"].shape[3], given["key_cache"].shape[2]
    heads = got[0].shape[1]
    assert tuple(got[0].shape) == (0, heads, dim)
    if op.endswith("fp8"):
        assert tuple(got[2].shape) == (requests, kv_heads) and not to_numpy(got[2]).any()
        assert got[1] is None or not to_numpy(got[1]).any()
    for name in ("key_cache", "value_cache"):
        assert (to_numpy(arrays[name]).astype(np.float32) == 1).all()


@ANY
@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
def test_rope_without_requests(framework, op):
    """All rows are padding: q is zero and nothing is stored."""
    given, _ = inputs(op, 1)
    given |= {"seq_lens": np.zeros(0, np.int32), "q_index": np.zeros(1, np.int32), "block_table": np.zeros((0, 3), np.int32)}
    arrays = convert(given, framework)
    got = results(getattr(hccupy, op)(**arrays))
    assert got[0].shape[0] == len(given["qkv"]) and not to_numpy(got[0]).view(np.uint8).any()
    for name in ("key_cache", "value_cache"):
        assert not to_numpy(arrays[name]).view(np.uint8).any()


@ANY
def test_store_and_tail_of_nothing(framework):
    to = CONVERT[framework]
    cache = np.ones((2, 4, 1, 64), np.float32)
    hccupy.store_kv(to(cache), to(np.zeros((0, 1, 64), np.float32)), to(np.zeros(0, np.int32)))
    hccupy.zero_kv_tail(to(cache), to(cache.copy()), to(np.zeros(0, np.int32)), to(np.zeros((0, 3), np.int32)))
    hccupy.store_kv(to(cache[:0]), to(np.ones((3, 1, 64), np.float32)), to(np.zeros(3, np.int32)))  # no pages: every slot is out of range
    assert (cache == 1).all()


# ---- in place ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "dlpack", "dlpack-old"])
@pytest.mark.parametrize("op", [op for op in OPS if any(o.keyword for o in REGISTRY[op].outputs)])
def test_outputs_are_the_callers(op, framework):
    """Every output given is written and returned as the same object; without the others, those are allocated."""
    spec = REGISTRY[op]
    plain, mine = inputs(op, 1)
    expected = results(getattr(hccupy, op)(**plain))
    outs = [o for o in spec.outputs if o.allocate]
    for o, wanted in zip(outs, expected, strict=True):
        if o.keyword is None:
            continue
        target = np.empty(wanted.shape, wanted.dtype)
        target.view(np.uint8).fill(0xA5)
        handed = CONVERT[framework](target)
        got = results(getattr(hccupy, op)(**convert(mine, framework), **{o.keyword: handed}))
        assert got[outs.index(o)] is handed
        for value, want in zip(got, expected, strict=True):
            if want is not None:
                equal(value, want)
        equal(target, wanted)


@pytest.mark.parametrize("framework", ["numpy", "torch", "dlpack", "dlpack-old"])
@pytest.mark.parametrize("op", ["ihc_post", "ihc_post_pre"])
def test_update_of_the_residual_in_place(op, framework):
    plain, mine = inputs(op, 1)
    expected = results(getattr(hccupy, op)(**plain))
    arrays = convert(mine, framework)
    got = results(getattr(hccupy, op)(**arrays, out=arrays["residual"]))
    equal(mine["residual"], expected[0])
    for value, wanted in zip(got[1:], expected[1:], strict=True):
        equal(value, wanted)


def test_given_producer_comes_back():
    """The result is what the caller passed, not our wrapper of it."""
    x, residual, h_post = (Producer(np.ones(s, np.float32)) for s in ((2, 8), (2, 2, 8), (2, 2)))
    assert hccupy.ihc_post(x, residual, h_post, out=residual) is residual


# ---- one process, many callers ----------------------------------------------------------------------------------


def test_J10_threads_agree():
    given, _ = inputs("ihc_pre", 1)
    expected = hccupy.ihc_pre(**given)
    wrong = []

    def work():
        for _ in range(20):
            for got, wanted in zip(hccupy.ihc_pre(**given), expected, strict=True):
                if got.tobytes() != wanted.tobytes():
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_memory_of_calls_is_bounded(monkeypatch):
    """A server sees thousands of token counts."""
    monkeypatch.setattr(runner, "MEMO_LIMIT", 10)
    monkeypatch.setattr(runner, "_memo", {})
    for n in range(1, 40):
        hccupy.ihc_post(np.ones((n, 8), np.float32), np.ones((n, 2, 8), np.float32), np.ones((n, 2), np.float32))
        assert len(runner._memo) <= 10


# ---- bind(): fixed shapes ---------------------------------------------------------------------------------------


def post_arrays(seed, tokens=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokens, 8), np.float32), rng.standard_normal((tokens, 2, 8), np.float32), rng.uniform(0, 2, (tokens, 2)).astype(np.float32)


@pytest.mark.parametrize("framework", ["numpy", "torch", "dlpack", "dlpack-old"])
def test_bound_call(framework):
    """Other arrays of the same facts; those left out stay the example's; every result is a new array."""
    to = CONVERT[framework]
    first, second = post_arrays(1), post_arrays(2)
    call = hccupy.bind("ihc_post", *map(to, first))
    one, two, mixed = call(), call(*map(to, second)), call(to(second[0]))
    equal(one, hccupy.ihc_post(*first))
    equal(two, hccupy.ihc_post(*second))
    equal(mixed, hccupy.ihc_post(second[0], *first[1:]))
    equal(one, hccupy.ihc_post(*first))  # not overwritten by the later calls


@pytest.mark.parametrize("framework", ["numpy", "torch", "dlpack"])
def test_bound_call_writes_the_outputs_of_bind(framework):
    to = CONVERT[framework]
    first, second = post_arrays(1), post_arrays(2)
    target = np.zeros_like(first[1])
    out = to(target)
    call = hccupy.bind("ihc_post", *map(to, first), out=out)
    assert not target.any()  # checked, not run
    assert call(*map(to, second)) is out
    equal(target, hccupy.ihc_post(*second))


@pytest.mark.parametrize("op", OPS)
def test_bound_call_of_every_op(op):
    plain, mine = inputs(op, 1)
    expected = results(getattr(hccupy, op)(**plain))
    for got, wanted in zip(results(hccupy.bind(op, **mine)()), expected, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            equal(got, wanted)
    for p in REGISTRY[op].args:
        if p.mutated:
            equal(mine[p.name], plain[p.name])


@pytest.mark.parametrize(
    "kind, error",
    [
        ("longer", hccupy.ShapeError), ("strided", hccupy.ShapeError), ("dtype", hccupy.ShapeError), ("shifted", hccupy.LayoutError),
        ("too many", hccupy.ArgumentError), ("torch", hccupy.FrameworkError), ("none", hccupy.FrameworkError), ("list", hccupy.FrameworkError),
        ("overlap", hccupy.LayoutError),
    ],
)  # fmt: skip
def test_bound_call_refuses_other_arrays(kind, error):
    x, residual, h_post = post_arrays(1)
    out = np.zeros_like(residual)
    aligned = np.zeros(x.size + 64, np.float32)
    aligned = aligned[(-aligned.ctypes.data % 16) // 4 :][: x.size + 16]
    example = aligned[: x.size].reshape(x.shape)
    call = hccupy.bind("ihc_post", example, residual, h_post, out=out)
    arrays = {
        "longer": lambda: [np.concatenate([x, x])],
        "strided": lambda: [np.repeat(x, 2, 0)[::2]],
        "dtype": lambda: [x.astype(np.float64)],
        "shifted": lambda: [aligned[1 : x.size + 1].reshape(x.shape)],
        "too many": lambda: [example, residual, h_post, out],
        "torch": lambda: [torch.from_numpy(x)],
        "none": lambda: [None],
        "list": lambda: [x.tolist()],
        "overlap": lambda: [out.reshape(-1)[: x.size].reshape(x.shape)],
    }[kind]()
    with pytest.raises(error, match=r"^ihc_post: .*expected .* got "):
        call(*arrays)
    assert not out.any()


def test_bind_checks_its_example():
    x, residual, h_post = post_arrays(1)
    with pytest.raises(hccupy.ShapeError, match="ihc_post: h_post"):
        hccupy.bind("ihc_post", x, residual, h_post[:, :1])
    with pytest.raises(hccupy.UnknownOpError, match="ihc_past"):
        hccupy.bind("ihc_past", x)
    with pytest.raises(TypeError):
        hccupy.bind("ihc_post", x, residual)
    with pytest.raises(hccupy.FrameworkError, match=r"jax\.jit"):
        hccupy.bind("ihc_post", *map(to_jax, (x, residual, h_post)))
