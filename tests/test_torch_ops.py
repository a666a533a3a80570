"""The registered torch ops: schemas, fakes, opcheck, and the plain functions inside torch.compile."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hccupy  # noqa: E402
from hccupy import api, torch_ops  # noqa: E402
from hccupy.ops import REGISTRY  # noqa: E402
from hccupy.run import run  # noqa: E402

from .adapters import Adapter  # noqa: E402
from .rope_cases import build, fp8  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TORCH = Adapter("torch")
FORMS = {f.name: f for spec in REGISTRY.values() for f in torch_ops.forms(spec)}


def tensors(name, case, rng, device="cpu"):
    """(positional tensors, keyword arguments, caller's outputs) of a registered op."""
    form = FORMS[name]
    spec = form.spec
    given = {k: Adapter("torch", device).put(v) for k, v in spec.make_inputs(case, rng).items()}
    fresh = getattr(api, spec.name)(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()})
    first = fresh[0] if isinstance(fresh, tuple) else fresh
    outs = {o.keyword: torch.empty_like(first) for o in form.supplied}
    signature = inspect.signature(getattr(api, spec.name)).parameters.values()
    args = [given.pop(p.name) for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in given and p.default is p.empty]
    return args, given, outs


def cases_of(name):
    """Two cases a form; of the fp8 op, those of the form's mode, one with caches as bytes and one with e4m3 where there is one."""
    spec = FORMS[name].spec
    small = [c for c in spec.cases if not c.name.startswith("bench")]
    if spec.name != "rope_norm_store_kv_fp8":
        return small[1:3]
    mode = [c for c in small if (c.scalars["q_quant"] == "static") == ("no_q_scale" in name)]
    by_cache = {c.options.get("cache_dtype", "float8_e4m3fn") == "float8_e4m3fn": c for c in reversed(mode)}
    return list(by_cache.values())


@pytest.mark.parametrize("name", FORMS)
def test_opcheck(name, rng):
    for case in cases_of(name):
        args, kwargs, outs = tensors(name, case, rng)
        # torch's own schema checker multiplies what it has cloned, and cannot multiply e4m3 on the CPU: caches as bytes there.
        e4m3 = any(v.dtype == torch.float8_e4m3fn for v in (*args, *outs.values()) if isinstance(v, torch.Tensor))
        utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"] + ([] if e4m3 else ["test_schema"])
        torch.library.opcheck(torch_ops.OPS[name], tuple(args), {**kwargs, **outs}, test_utils=utils)


@pytest.mark.parametrize("name", FORMS)
def test_L1_schema_declares_every_write_and_nothing_else(name):
    form = FORMS[name]
    spec = form.spec
    written = {a.name for a in spec.args if a.mutated} | {o.keyword for o in form.supplied} | {o.keyword for o in spec.outputs if not o.allocate}
    schema = torch_ops.OPS[name]._schema
    assert {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write} == written
    assert len(schema.returns) == len(form.returned)


@pytest.mark.parametrize("name", FORMS)
def test_schema_is_the_public_signature(name):
    form = FORMS[name]
    public = inspect.signature(getattr(api, form.spec.name)).parameters
    for a in torch_ops.OPS[name]._schema.arguments:
        p = public[a.name]
        assert a.kwarg_only == (p.kind is p.KEYWORD_ONLY)
        if a.has_default_value():
            assert a.default_value == p.default and type(a.default_value) is type(p.default)
    left_out = set(public) - {a.name for a in torch_ops.OPS[name]._schema.arguments}
    assert left_out == {"stream"} | {o.keyword for o in form.spec.outputs if o.allocate and o.keyword} - {o.keyword for o in form.supplied}


def same_facts(fake, real):
    if real is None or isinstance(real, torch.Tensor):
        fake, real = (fake,), (real,)
    assert len(fake) == len(real)
    for f, r in zip(fake, real, strict=True):
        assert (f is None) == (r is None)
        if r is not None:
            assert (f.shape, f.stride(), f.dtype, f.device) == (r.shape, r.stride(), r.dtype, r.device)


@pytest.mark.parametrize("name", FORMS)
def test_fakes_equal_the_real_ones(name, rng):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for case in [c for c in FORMS[name].spec.cases if not c.name.startswith("bench")][:12]:
        if "fp8" in name and (case.scalars.get("q_quant") == "static") != ("no_q_scale" in name):
            continue
        args, kwargs, outs = tensors(name, case, rng)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) for a in args]
            named = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in {**kwargs, **outs}.items()}
            fake = torch_ops.OPS[name](*fakes, **named)
        same_facts(fake, torch_ops.OPS[name](*args, **kwargs, **outs))


@pytest.mark.parametrize("shape", [(4, 16), (0, 4, 16), (2, 3, 4, 16), (2, 0, 4, 16)])
def test_fakes_keep_any_leading_shape(shape):
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.zeros(shape)
    rest = torch.zeros(8, 64), torch.zeros(2), torch.zeros(8)
    with FakeTensorMode() as mode:
        fake = torch.ops.hccupy.ihc_pre(mode.from_tensor(x), *(mode.from_tensor(t) for t in rest))
    same_facts(fake, torch.ops.hccupy.ihc_pre(x, *rest))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Transformer(torch.nn.Module):
    """Two blocks between hyper-connections, with the plain functions in its forward."""

    def __init__(self, hidden=32, hc=4, device="cpu", dtype=torch.float32):
        super().__init__()
        make = torch.Generator().manual_seed(7)

        def draw(*shape, scale=1.0, dtype=torch.float32):
            return torch.nn.Parameter((torch.randn(shape, generator=make) * scale).to(device, dtype))

        self.w = torch.nn.ParameterList([draw(2 * hc, hc * hidden, scale=0.1) for _ in range(2)])
        self.head = draw(hc, hc * hidden, scale=0.1)
        self.scale, self.base, self.norm = draw(2), draw(2 * hc), draw(hidden)
        self.up = torch.nn.ParameterList([draw(hidden, hidden, scale=0.2, dtype=dtype) for _ in range(2)])
        self.hc = hc

    def block(self, i, x):
        return torch.nn.functional.silu(x @ self.up[i])

    def forward(self, x):
        gates = {"hc_scale": self.scale, "hc_base": self.base, "rms_weight": self.norm}
        y, h_post = hccupy.ihc_pre(x, self.w[0], **gates)
        x, y, h_post = hccupy.ihc_post_pre(self.block(0, y), x, h_post, self.w[1], **gates)
        x = hccupy.ihc_post(self.block(1, y), x, h_post)
        return hccupy.ihc_head(x, self.head, self.scale[:1], self.base[: self.hc], rms_weight=self.norm)


def test_L3_L5_compile_fullgraph_equals_eager_and_tokens_are_dynamic():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = Transformer()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (5, 7, 64, 3):
        x = torch.randn(tokens, 4, 32)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1, "a token count must not be a recompilation"
    assert not counters["graph_break"]


def test_compile_with_inductor():
    torch._dynamo.reset()
    model = Transformer()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (6, 9):
        x = torch.randn(tokens, 4, 32)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def captured(function, *args):
    """(result, names of the ops in the graph) of a function compiled in one piece."""
    names = []

    def backend(graph, example):
        names.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "hccupy" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)(*args), names


def test_plain_functions_become_registered_ops(rng):
    for op, spec in REGISTRY.items():
        case = [c for c in spec.cases if not c.name.startswith("bench")][1]
        given = {k: TORCH.put(v) for k, v in spec.make_inputs(case, rng).items()}
        copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        want = getattr(hccupy, op)(**copy)
        got, names = captured(lambda g, op=op: getattr(hccupy, op)(**g), given)
        assert names and all(op in n for n in names)
        for g, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            assert (g is None) == (w is None)
            assert w is None or torch.equal(g.view(torch.uint8), w.view(torch.uint8))
        for a in (a.name for a in spec.args if a.mutated):
            assert torch.equal(given[a].contiguous().view(torch.uint8), copy[a].contiguous().view(torch.uint8))


def test_first_use_of_hccupy_may_be_inside_compile():
    code = (
        "import torch, hccupy, sys; assert 'hccupy.torch_ops' not in sys.modules\n"
        "f = torch.compile(lambda x, r, h: hccupy.ihc_post(x, r, h), fullgraph=True, backend='eager')\n"
        "assert (f(torch.ones(2, 8), torch.ones(2, 4, 8), torch.ones(2, 4)) == 2).all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_out_inside_compile(backend):
    """out=residual is an update in place there too; every other output given is written."""
    x, residual, h_post = torch.randn(5, 16), torch.randn(5, 4, 16), torch.rand(5, 4)
    w, scale, base = torch.randn(8, 64), torch.ones(2), torch.zeros(8)

    def step(residual, z, gates):
        got = hccupy.ihc_post_pre(x, residual, h_post, w, scale, base, out=residual, z_out=z, h_post_out=gates)
        return (*got, residual + 1)

    plain = residual.clone(), torch.empty(5, 16), torch.empty(5, 4)
    mine = residual.clone(), torch.empty(5, 16), torch.empty(5, 4)
    want = step(*plain)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend=backend)(*mine)
    for a, b in zip((*got, *mine), (*want, *plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_reading_the_cache_after_the_op(backend):
    """The cache is declared as mutated: what the compiled code reads afterwards is what was written."""
    cache, src = torch.zeros(3, 4, 2, 8), torch.randn(5, 2, 8)
    slots = torch.tensor([0, 5, 11, -1, 2])

    def step(cache):
        before = cache.sum()
        hccupy.store_kv(cache, src, slots)
        return before, cache * 2

    want_cache = cache.clone()
    want = step(want_cache)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend=backend)(cache)
    assert torch.equal(cache, want_cache) and torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert want_cache.abs().sum() > 0


def test_rope_in_compile_with_out_k_and_static_q(rng):
    spec = REGISTRY["rope_norm_store_kv_fp8"]
    case = next(c for c in spec.cases if c.scalars.get("q_quant") == "static")
    given = {k: TORCH.put(v) for k, v in spec.make_inputs(case, rng).items()}
    dense = torch.zeros(given["qkv"].shape[0], *given["key_cache"].shape[2:], dtype=given["key_cache"].dtype)
    want = hccupy.rope_norm_store_kv_fp8(**{**given, "key_cache": given["key_cache"].clone()}, out_k=dense.clone())
    q = torch.empty_like(want[0])
    (got, names) = captured(lambda g, out_k, out_q: hccupy.rope_norm_store_kv_fp8(**g, out_k=out_k, out_q=out_q), given, dense, q)
    assert names == ["hccupy.rope_norm_store_kv_fp8_no_q_scale_out.default"]
    assert got[1] is None and torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(q.view(torch.uint8), want[0].view(torch.uint8)) and dense.view(torch.uint8).any()


def test_rope_sizes_are_dynamic(rng):
    """Tokens, requests, pages, table width and max_q_len may all change: one graph (torch joins sizes that start out equal, so none are)."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(hccupy.rope_norm_store_kv_fp8, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths, new in (((11, 9, 40), (3, 2, 17)), ((200, 9, 40, 3), (130, 2, 17, 2)), ((20, 30), (5, 6))):
        given = {k: TORCH.put(v) for k, v in fp8(build(rng, lengths=lengths, new=new, spare=11)).items()}
        plain = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        got, want = compiled(**given), hccupy.rope_norm_store_kv_fp8(**plain)
        for a, b in zip((*got, given["key_cache"]), (*want, plain["key_cache"]), strict=True):
            assert a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert counters["stats"]["unique_graphs"] == 1


def test_export_keeps_the_registered_op():
    class Post(torch.nn.Module):
        def forward(self, x, residual, h_post):
            return hccupy.ihc_post(x, residual, h_post)

    given = torch.randn(3, 8), torch.randn(3, 4, 8), torch.rand(3, 4)
    program = torch.export.export(Post(), given, strict=True)
    assert "hccupy.ihc_post" in program.graph_module.code
    assert torch.equal(program.module()(*given), hccupy.ihc_post(*given))


def test_bound_calls_break_the_graph_and_say_so():
    x, residual, h_post = torch.randn(3, 8), torch.randn(3, 4, 8), torch.rand(3, 4)
    call = hccupy.bind("ihc_post", x, residual, h_post)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda t: call(t * 2) + 1, backend="eager")(x), call(x * 2) + 1)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="inside torch.compile call the op itself"):
        torch.compile(lambda t: call(t * 2), backend="eager", fullgraph=True)(x)


def test_stream_is_refused_inside_compile():
    def step(x, residual, h_post):
        return hccupy.ihc_post(x, residual, h_post, stream=1)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="stream"):
        torch.compile(step, fullgraph=True, backend="eager")(torch.ones(2, 8), torch.ones(2, 4, 8), torch.ones(2, 4))


def test_errors_of_the_fake_are_ours():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x, w = mode.from_tensor(torch.zeros(2, 4, 16)), mode.from_tensor(torch.zeros(8, 64, dtype=torch.float16))
        rest = mode.from_tensor(torch.zeros(2)), mode.from_tensor(torch.zeros(8))
        with pytest.raises(hccupy.DtypeError, match="ihc_pre: w: expected float32, got float16"):
            torch.ops.hccupy.ihc_pre(x, w, *rest)
        with pytest.raises(hccupy.ShapeError, match="ihc_pre: w: expected 2 axes"):
            torch.ops.hccupy.ihc_pre(x, x, *rest)


def test_forms_refuse_the_other_mode(rng):
    spec = REGISTRY["rope_norm_store_kv_fp8"]
    case = next(c for c in spec.cases if c.scalars.get("q_quant") == "static")
    given = {k: TORCH.put(v) for k, v in spec.make_inputs(case, rng).items()}
    with pytest.raises(hccupy.ArgumentError, match="rope_norm_store_kv_fp8_no_q_scale"):
        torch.ops.hccupy.rope_norm_store_kv_fp8(**given)


def test_no_gradient_flows():
    """As documented: tensors that require grad are taken, results do not, in eager and registered calls alike."""
    x, residual, h_post = torch.ones(2, 8, requires_grad=True), torch.ones(2, 4, 8), torch.ones(2, 4)
    for function in (hccupy.ihc_post, torch.ops.hccupy.ihc_post):
        y = function(x, residual, h_post)
        assert not y.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            y.sum().backward()
    compiled = torch.compile(hccupy.ihc_post, fullgraph=True, backend="aot_eager")
    assert not compiled(x, residual, h_post).requires_grad


def test_eager_calls_pay_nothing():
    """The plain functions themselves are untouched: what torch.compile reads is an attribute beside them."""
    assert set(inspect.signature(hccupy.ihc_post).parameters) == {"x", "residual", "h_post", "out", "stream"}
    assert callable(run._torchdynamo_inline)
    assert np.asarray(hccupy.ihc_post(np.ones((1, 2), np.float32), np.ones((1, 1, 2), np.float32), np.ones((1, 1), np.float32))).tolist() == [[[2.0, 2.0]]]
