"""Where users are, on a GPU: registered ops, torch.compile with CUDA graphs, the engine modules, the hpc shim, JAX under jit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hccupy  # noqa: E402
from hccupy import nn, torch_ops  # noqa: E402
from hccupy.compat import install_hpc, uninstall_hpc  # noqa: E402
from hccupy.ops import REGISTRY  # noqa: E402

from . import test_demo, test_hpc, test_nn, test_patch, test_torch_ops  # noqa: E402
from .adapters import Adapter  # noqa: E402

pytestmark = pytest.mark.gpu
FORMS = test_torch_ops.FORMS


def moved(thing, device="cuda"):
    """A namespace, module or tensor on the device, strides kept."""
    if isinstance(thing, SimpleNamespace):
        return SimpleNamespace(**{k: moved(v, device) for k, v in vars(thing).items()})
    return thing.to(device) if isinstance(thing, torch.Tensor | torch.nn.Module) else thing


# ---- registered ops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_opcheck_on_cuda(name, rng):
    for case in test_torch_ops.cases_of(name):
        args, kwargs, outs = test_torch_ops.tensors(name, case, rng, "cuda")
        e4m3 = any(v.dtype == torch.float8_e4m3fn for v in (*args, *outs.values()) if isinstance(v, torch.Tensor))
        utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"] + ([] if e4m3 else ["test_schema"])
        torch.library.opcheck(torch_ops.OPS[name], tuple(args), {**kwargs, **outs}, test_utils=utils)


@pytest.mark.parametrize("name", FORMS)
def test_fakes_equal_the_real_ones_on_cuda(name, rng):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for case in test_torch_ops.cases_of(name):
        args, kwargs, outs = test_torch_ops.tensors(name, case, rng, "cuda")
        with FakeTensorMode() as mode:
            named = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in {**kwargs, **outs}.items()}
            fake = torch_ops.OPS[name](*(mode.from_tensor(a) for a in args), **named)
        test_torch_ops.same_facts(fake, torch_ops.OPS[name](*args, **kwargs, **outs))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def transformer(request):
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = False
    return test_torch_ops.Transformer(256, device="cuda", dtype=request.param).requires_grad_(False), request.param


def agree(got, want):
    """Equal but for the block's SiLU, which Inductor rounds its own way."""
    fine = want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-4 if fine else 3e-2, atol=1e-4 if fine else 3e-2)


def test_compile_fullgraph_on_cuda(transformer):
    from torch._dynamo.utils import counters

    model, dtype = transformer
    exact, fused = (torch.compile(model, fullgraph=True, backend=b) for b in ("aot_eager", "inductor"))
    counters.clear()
    for tokens in (5, 1, 64, 333):
        x = torch.randn(tokens, 4, 256, device="cuda", dtype=dtype)
        if tokens > 1:  # one token is a graph of its own: torch specialises lengths of 0 and 1
            torch._dynamo.mark_dynamic(x, 0)
        want = model(x)
        assert torch.equal(exact(x), want)
        agree(fused(x), want)
    assert counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"], "two graphs a backend: one token, and any number"


def test_compile_reduce_overhead(transformer):
    """CUDA graphs made by torch: replays with new inputs, several token counts, nothing skipped."""
    from torch._dynamo.utils import counters

    model, dtype = transformer
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=False)
    counters.clear()
    with torch.no_grad():
        for tokens in (8, 8, 8, 3, 8, 3, 3):
            x = torch.randn(tokens, 4, 256, device="cuda", dtype=dtype)
            torch.compiler.cudagraph_mark_step_begin()
            agree(compiled(x).clone(), model(x))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_compile_reads_the_cache_after_the_op():
    """Inductor must not move the read of a mutated cache before the write."""
    cache = torch.zeros(3, 4, 2, 8, device="cuda")
    src, slots = torch.randn(5, 2, 8, device="cuda"), torch.tensor([0, 5, 11, -1, 2], device="cuda")

    def step(cache):
        before = cache.sum()
        hccupy.store_kv(cache, src, slots)
        return before, cache * 2

    torch._dynamo.reset()
    want_cache = cache.clone()
    want, got = step(want_cache), torch.compile(step, fullgraph=True)(cache)
    assert torch.equal(cache, want_cache) and got[0] == want[0] == 0 and torch.equal(got[1], want[1]) and cache.any()


def test_compile_in_place_residual():
    """out=residual inside compiled code writes the caller's tensor."""
    x, h_post = torch.randn(7, 64, device="cuda"), torch.rand(7, 4, device="cuda")
    residual = torch.randn(7, 4, 64, device="cuda")

    def step(residual):
        hccupy.ihc_post(x, residual, h_post, out=residual)
        return residual + 1

    torch._dynamo.reset()
    mine, plain = residual.clone(), residual.clone()
    assert torch.equal(torch.compile(step, fullgraph=True)(mine), step(plain)) and torch.equal(mine, plain)


def test_patched_model_on_cuda():
    model = test_patch.Model().cuda().requires_grad_(False)
    x = test_nn.channels().cuda()
    want = model(x)
    assert hccupy.patch(model)["pre"] == 2
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), want, rtol=1e-4, atol=1e-4)


# ---- engine modules --------------------------------------------------------------------------------------------------


def float_bits(a, b, fp8):
    """Equal where NaN bytes were left alone and where zeros were written; elsewhere within one step of the format, seldom."""
    a, b = (t.cpu().view(torch.uint8 if fp8 else torch.int16).int() for t in (a, b))
    steps = (a - b).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 5e-3, f"{int(steps.max())} steps, {float((steps > 0).float().mean()):.2%}"


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", test_nn.CASES)
def test_nn_rope_norm_packed_cache(case, fp8):
    """q, packed cache and scales as the CPU path gives them for the same metadata object."""
    layer = test_nn.rope_layer("fp8_e4m3" if fp8 else "auto", name="cpu")
    metadata, attention, qkv = test_nn.batch(fp8, **test_nn.CASES[case])
    on_gpu = test_nn.rope_layer("fp8_e4m3" if fp8 else "auto", name="gpu").cuda()
    facts, cache, x = moved(metadata), moved(attention), qkv.cuda()
    with nn.set_forward_context(metadata, {"cpu": attention}):
        want = layer(qkv)
    with nn.set_forward_context(facts, {"gpu": cache}):
        got = on_gpu(x)
    float_bits(got, want, fp8)
    float_bits(cache.kv_cache, attention.kv_cache, fp8)
    assert facts.hpc_kv_written is True
    for name in ("hpc_prefill_q_scale", "hpc_decode_q_scale", "hpc_split_k_flag"):
        assert hasattr(facts, name) == hasattr(metadata, name)
        if hasattr(metadata, name):
            torch.testing.assert_close(getattr(facts, name).cpu(), getattr(metadata, name), rtol=1e-6, atol=0)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_nn_rope_norm_in_a_graph_follows_refits(fp8):
    """A captured decode step: new tokens through the same buffers, and norm weights copied in place after the capture."""
    layer = test_nn.rope_layer("fp8" if fp8 else "auto", name="graph").cuda()
    metadata, attention, qkv = (moved(t) for t in test_nn.batch(fp8, prefill=()))
    clean = attention.kv_cache.clone()
    with nn.set_forward_context(metadata, {"graph": attention}):
        layer(qkv)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = layer(qkv)
        address = layer.qnorm_weight.data_ptr()
        layer.fallback_qnorm.weight.data.mul_(-2)
        layer.fallback_knorm.weight.data.mul_(3)
        layer.process_weights_after_loading()
        assert layer.qnorm_weight.data_ptr() == address
        qkv.copy_(torch.randn_like(qkv))
        attention.kv_cache.copy_(clean)
        graph.replay()
        torch.cuda.synchronize()
        replayed = q.clone(), attention.kv_cache.clone()
        attention.kv_cache.copy_(clean)
        eager = layer(qkv), attention.kv_cache
    for a, b in zip(replayed, eager, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_nn_rope_norm_in_compile():
    layer = test_nn.rope_layer(name="compiled").cuda()
    metadata, attention, qkv = (moved(t) for t in test_nn.batch())
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: layer(t) + 1, fullgraph=True)
    with nn.set_forward_context(metadata, {"compiled": attention}):
        assert torch.equal(compiled(qkv), layer(qkv) + 1)


def test_nn_ihc_layers_on_cuda():
    owner, head = test_nn.EagerPre(norm=test_nn.Norm(test_nn.HIDDEN)).cuda(), test_nn.EagerHead().cuda()
    post = nn.IHCPost(test_nn.HC, test_nn.HIDDEN)
    for layer in (owner.hpc_pre, head.hpc_head):
        assert layer.support(4, 6144) and "sm_" in layer.support_reason(4, 6144)
        layer.process_weights_after_loading()
    x = test_nn.channels().cuda()

    def step(x):
        y, gates = owner.hpc_pre(x)
        return head.hpc_head(post(torch.tanh(y), x, gates))

    y, gates = owner(x)
    y = torch.tanh(owner.hpc_pre._norm_owner.cuda()(y))
    want = head(gates[..., None] * y[:, None] + x)
    torch.testing.assert_close(step(x), want, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x).clone(), want, rtol=1e-4, atol=1e-4)


# ---- hpc shim --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hpc():
    uninstall_hpc()
    yield install_hpc()
    uninstall_hpc()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", ["mixed", "decode", "prefill", "mtp"])
def test_hpc_rope_on_cuda(hpc, case, fp8):
    """As vLLM's layer calls it, in place through the packed strides: bit for bit what hccupy.nn.RopeNorm gives."""
    layer = test_nn.rope_layer("fp8_e4m3" if fp8 else "auto", name="shim").cuda()
    layer.norm_eps = 1e-6
    metadata, attention, qkv = (moved(t) for t in test_nn.batch(fp8, **test_nn.CASES[case]))
    mine, facts = SimpleNamespace(**{**vars(attention), "kv_cache": attention.kv_cache.clone()}), SimpleNamespace(**vars(metadata))
    with nn.set_forward_context(facts, {"shim": mine}):
        want = layer(qkv)
    with torch.device("cuda"):
        got = test_hpc.vllm_forward(hpc, layer, metadata, attention, qkv, scatter=False)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(attention.kv_cache.view(torch.uint8), mine.kv_cache.view(torch.uint8))


@pytest.mark.parametrize(("hc", "hidden"), [(4, 6144), (4, 4096), (2, 100), (8, 257), (1, 5120)])
def test_hpc_ihc_on_cuda(hpc, hc, hidden):
    """As vLLM and SGLang call them, also for shapes that hpc-ops has no kernel for."""
    x, w, scale, base = (t.cuda() for t in test_hpc.gates(hc, hidden, 9))
    norm = torch.rand(hidden, device="cuda").bfloat16()
    y, post = hpc.fuse_ihc_pre(x, w, scale, base, 1e-5, 1e-6, 2.0, norm, 1e-5, True)
    want, gates = hccupy.ihc_pre(x, w, scale, base, rms_weight=norm, rms_eps=1e-5)
    assert torch.equal(y, want) and torch.equal(post, gates)
    residual, z, following = hpc.fuse_ihc_post_pre(y, x, post, w, scale, base, 1e-5, 1e-6, 2.0, norm, 1e-5, True)
    assert torch.equal(residual, hpc.fuse_ihc_post(y, x, post))
    again = hpc.fuse_ihc_pre(residual, w, scale, base, 1e-5, 1e-6, 2.0, norm, 1e-5, True)
    assert torch.equal(z, again[0]) and torch.equal(following, again[1])
    merged = hpc.fuse_ihc_head(x, w[:hc], scale[:1], base[:hc], 1e-5, 1e-6)
    assert torch.equal(merged, hccupy.ihc_head(x, w[:hc], scale[:1], base[:hc]))


# ---- JAX -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", list(REGISTRY))
def test_jax_jit_donates_on_cuda(op, rng):
    """Under jit with donated caches: bit for bit what torch gives on the same GPU."""
    jax = pytest.importorskip("jax")
    from . import test_jax_jit

    on, torch_on = Adapter("jax", "cuda", mutable=False), Adapter("torch", "cuda")
    arrays, scalars = test_jax_jit.inputs(op, rng, Adapter("numpy"))
    plain = {n: torch_on.put(np.ascontiguousarray(v)) for n, v in arrays.items()}
    caches = [a.name for a in REGISTRY[op].args if a.mutated]
    want = [r for r in test_jax_jit.flat(getattr(hccupy, op)(**plain, **scalars)) if r is not None] + [plain[n] for n in caches]
    want = [torch_on.get(w) for w in want]
    arrays = {n: on.put(v) for n, v in arrays.items()}
    donated = {n: arrays.pop(n) for n in caches}
    step = jax.jit(lambda donated, rest: getattr(hccupy, op)(**donated, **rest, **scalars), donate_argnums=0)
    got = [r for r in test_jax_jit.flat(step(donated, arrays)) if r is not None]
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert next(iter(g.devices())).platform == "gpu"
        assert np.asarray(g).tobytes() == np.ascontiguousarray(w).tobytes()
    assert all(v.is_deleted() for v in donated.values())


def test_jax_decode_loop_on_cuda(rng):
    """A lax.scan of store and rope steps, caches carried and donated: what step by step with torch gives."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    on, torch_on = Adapter("jax", "cuda", mutable=False), Adapter("torch", "cuda")
    steps, width = 6, (4 + 2 * 2) * 64
    qkv = rng.standard_normal((steps, 1, width)).astype(jnp.bfloat16)
    constants = [rng.uniform(-1, 1, (16, 64)).astype(np.float32), np.array([0, 1], np.int32), np.arange(4, dtype=np.int32)[None]]
    cos_sin, index, table = map(on.put, constants)
    zeros, lengths = np.zeros((4, 4, 2, 64), jnp.bfloat16), np.arange(1, steps + 1, dtype=np.int32)[:, None]

    def step(caches, now):
        row, length = now
        q, key, value = hccupy.rope_norm_store_kv(*caches, row, cos_sin, length, index, table)
        return (key, value), q

    loop = jax.jit(lambda caches, now: jax.lax.scan(step, caches, now), donate_argnums=0)
    (key, _), q = loop((on.put(zeros), on.put(zeros)), (on.put(qkv), on.put(lengths)))
    mine = torch_on.put(zeros), torch_on.put(zeros)
    cos_sin, index, table = map(torch_on.put, constants)
    for i in range(steps):
        want = hccupy.rope_norm_store_kv(*mine, torch_on.put(qkv[i]), cos_sin, torch_on.put(lengths[i]), index, table)
        assert np.asarray(q[i]).tobytes() == torch_on.get(want).tobytes()
    assert np.asarray(key).tobytes() == torch_on.get(mine[0]).tobytes()


def test_jax_vmap_and_grad_on_cuda(rng):
    jax = pytest.importorskip("jax")
    on = Adapter("jax", "cuda", mutable=False)
    given = [on.put(rng.standard_normal((2, 3, *s)).astype(np.float32)) for s in ((16,), (4, 16), (4,))]
    assert np.asarray(jax.vmap(hccupy.ihc_post)(*given)).tobytes() == np.asarray(hccupy.ihc_post(*given)).tobytes()
    with pytest.raises(hccupy.ArgumentError, match="ihc_post: gradient: "):
        jax.grad(lambda x: hccupy.ihc_post(x, *given[1:]).sum())(given[0])


# ---- the demo's network ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "fp16"])
def test_nn_network_compiled_and_captured(kv):
    """A whole network through hccupy.nn: eager, compiled, and one CUDA graph a token generate the same tokens."""
    from hccupy.demo import backend, compiled, network, weights

    place = backend.make_backend("torch", "cuda")
    model = weights.random_weights(test_demo.TINY, 0).map(place.put)
    rows = list(compiled.compare(model, network.make_gates(test_demo.TINY, place, 3), test_demo.PROMPT, 9, kv, 4))
    assert len(rows) == 6 and rows[2].how.endswith("one CUDA graph a token")
    assert all(row.same for row in rows if row.fused), rows
