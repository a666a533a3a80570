"""hccupy.patch and unpatch on trees shaped like vLLM's and SGLang's HY V4 models."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import hccupy  # noqa: E402
from hccupy import nn  # noqa: E402

from . import test_nn  # noqa: E402
from .test_nn import HC, HIDDEN, TOKENS, Norm, channels, close  # noqa: E402

CONFIG = SimpleNamespace(hc_mult=HC, hc_magnitude=2.0, hc_eps=2e-6, rms_norm_eps=1e-5, hidden_size=HIDDEN)


class Linear(torch.nn.Linear):
    """An engine's linear layer: a tuple comes back."""

    def forward(self, x):
        return super().forward(x), None


class PreLayer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.config, self.magnitude, self.hc_eps, self.layernorm_epsilon = CONFIG, 2.0, 2e-6, 1e-5
        self.hc_fn = Linear(HC * HIDDEN, 2 * HC, bias=False)
        self.hc_fn.weight = torch.nn.Parameter(torch.randn(2 * HC, HC * HIDDEN, generator=make) / 6)
        self.hc_scale = torch.nn.Parameter(torch.rand(2, generator=make) + 1)
        self.hc_base = torch.nn.Parameter(torch.randn(2 * HC, generator=make) / 2)
        self.calls = 0

    def forward(self, x, rms_weight=None, rms_eps=0.0):
        self.calls += 1
        f = x.flatten(1).float()
        mixes = self.hc_fn(f)[0] * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.layernorm_epsilon)
        pre = torch.sigmoid(mixes[:, :HC] * self.hc_scale[0] + self.hc_base[:HC]) + self.hc_eps
        post = self.magnitude * torch.sigmoid(mixes[:, HC:] * self.hc_scale[1] + self.hc_base[HC:]) + self.hc_eps
        y = (pre[..., None] * x).sum(1)
        if rms_weight is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + rms_eps) * rms_weight
        return y, post


class PostLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, residual, post):
        self.calls += 1
        return post.unsqueeze(-1) * x.unsqueeze(-2) + residual


class HeadLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.calls = CONFIG, 0
        make = torch.Generator().manual_seed(77)
        self.hc_head_fn = Linear(HC * HIDDEN, HC, bias=False)
        self.hc_head_fn.weight = torch.nn.Parameter(torch.randn(HC, HC * HIDDEN, generator=make) / 6)
        self.hc_head_scale = torch.nn.Parameter(torch.rand(1, generator=make) + 1)
        self.hc_head_base = torch.nn.Parameter(torch.randn(HC, generator=make) / 2)

    def forward(self, x, norm=None):
        self.calls += 1
        f = x.flatten(1).float()
        mixes = self.hc_head_fn(f)[0] * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        y = ((torch.sigmoid(mixes * self.hc_head_scale + self.hc_head_base) + self.config.hc_eps)[..., None] * x).sum(1)
        return y if norm is None else norm(y)


class Boundary(torch.nn.Module):
    """One pre and post. `method`: the post is a method, as in SGLang, rather than a layer of its own, as in vLLM."""

    def __init__(self, seed, method):
        super().__init__()
        self.hc_pre = PreLayer(seed)
        self.calls = 0
        if not method:
            self.hc_post = PostLayer()

    def pre(self, x, norm):
        return self.hc_pre(x, norm.weight, norm.variance_epsilon)

    def post(self, output, residual, post):
        if hasattr(self, "hc_post"):
            return self.hc_post(output, residual, post)
        self.calls += 1
        return post.unsqueeze(-1) * output.unsqueeze(-2) + residual


class Model(torch.nn.Module):
    def __init__(self, method=False, layers=2):
        super().__init__()
        self.layers = torch.nn.ModuleList([Boundary(i, method) for i in range(layers)])
        self.norms = torch.nn.ModuleList([Norm(HIDDEN, seed=i) for i in range(layers)])
        self.hc_head = HeadLayer()
        self.norm = Norm(HIDDEN)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y, gates = layer.pre(x, norm)
            x = layer.post(torch.tanh(y), x, post=gates)
        return self.hc_head(x, norm=self.norm)

    def eager_calls(self):
        return sum(getattr(m, "calls", 0) for m in self.modules())


@pytest.mark.parametrize("method", [False, True], ids=["vllm", "sglang"])
def test_patched_equals_eager_and_unpatch_restores(method):
    model, x = Model(method), channels()
    want, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    before = model.eager_calls()
    assert hccupy.patch(model) == {"pre": 2, "post": 2, "head": 1, "rope": 0}
    close(model(x), want, 1e-5)
    assert model.eager_calls() == before, "no eager layer ran"
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and set(model.state_dict()) == set(state)
    assert hccupy.unpatch(model) == 5
    assert torch.equal(model(x), want) and model.eager_calls() > before


@pytest.mark.parametrize("part", ["pre", "post", "head"])
def test_switches(part):
    model, x = Model(), channels()
    want, before = model(x), model.eager_calls()
    counts = hccupy.patch(model, **{p: p == part for p in ("pre", "post", "head", "rope")})
    assert [k for k, n in counts.items() if n] == [part]
    close(model(x), want, 1e-5)
    assert model.eager_calls() == before + 5 - counts[part]


def test_patched_reads_live_weights_and_survives_copies():
    model, x = Model(), channels()
    hccupy.patch(model)
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.layers[0].hc_pre.hc_fn.weight = torch.nn.Parameter(m.layers[0].hc_pre.hc_fn.weight * (2 if m is model else 3))
    results = [m(x) for m in (model, twin)]
    for m, got in zip((model, twin), results, strict=True):
        hccupy.unpatch(m)
        close(got, m(x), 1e-5)
    assert not torch.equal(*results)


def test_patched_model_in_compile():
    model, x = Model(), channels()
    hccupy.patch(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x), rtol=0, atol=0)


def test_nothing_found_is_an_error():
    with pytest.raises(hccupy.ArgumentError, match=r"patch: model: expected .* \(looked for pre, post, head, rope\), got none in Linear"):
        hccupy.patch(torch.nn.Linear(2, 2))
    with pytest.raises(hccupy.ArgumentError, match="every switch is off"):
        hccupy.patch(Model(), pre=False, post=False, head=False, rope=False)
    with pytest.raises(hccupy.ArgumentError, match="unpatch: model: expected a patched model"):
        hccupy.unpatch(Model())


def test_twice_is_an_error():
    model = Model()
    hccupy.patch(model, pre=False)
    with pytest.raises(hccupy.ArgumentError, match="patch: model: expected one that is not patched"):
        hccupy.patch(model)


def test_other_hyper_connections_are_left_alone():
    """mHC has a combination matrix (other shapes); a model that keeps its head's weights itself does more than merge."""
    mhc = PreLayer(0)
    mhc.hc_fn.weight = torch.nn.Parameter(torch.zeros(HC * (HC + 2), HC * HIDDEN))
    mhc.hc_scale, mhc.hc_base = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(HC * (HC + 2)))
    whole = HeadLayer()
    whole.embed = torch.nn.Linear(2, 2)
    for module in (mhc, whole, nn.HyperConnection(HIDDEN, HC), nn.HyperHead(HIDDEN, HC)):
        with pytest.raises(hccupy.ArgumentError, match="got none"):
            hccupy.patch(module)


def test_errors_before_anything_is_changed():
    model = Model()
    model.hc_head.hc_head_fn.bfloat16()
    with pytest.raises(hccupy.DtypeError, match="patch: hc_head.hc_head_fn: expected float32, got torch.bfloat16"):
        hccupy.patch(model)
    model.hc_head.hc_head_fn.float()
    model.layers[1].hc_pre.magnitude = None
    model.layers[1].hc_pre.config = None
    with pytest.raises(hccupy.ArgumentError, match="patch: layers.1.hc_pre.magnitude: expected one of magnitude, hc_magnitude"):
        hccupy.patch(model)
    before = model.eager_calls()
    del model.layers[1].hc_pre.config
    model.layers[1].hc_pre.magnitude = 2.0
    model(channels())
    assert model.eager_calls() == before + 5


class TheirRope(torch.nn.Module):
    """A module that holds what vLLM's HpcRopeNorm holds."""

    def __init__(self, source):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = test_nn.Q_HEADS, test_nn.KV_HEADS, test_nn.DIM
        self.register_buffer("cos_sin_cache", source.cos_sin_cache, persistent=False)
        self.fallback_qnorm, self.fallback_knorm = source.fallback_qnorm, source.fallback_knorm
        self.qk_norm_policy, self.use_fp8, self.layer_name = int(source.qk_norm_policy), source.use_fp8, source.layer_name


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_rope_is_replaced(fp8):
    source = test_nn.rope_layer("fp8" if fp8 else "auto", name="patched")
    model = torch.nn.Module()
    model.attention = torch.nn.Module()
    theirs = model.attention.rope_norm = TheirRope(source)
    assert hccupy.patch(model) == {"pre": 0, "post": 0, "head": 0, "rope": 1}
    assert isinstance(model.attention.rope_norm, nn.RopeNorm)
    metadata, attention, qkv = test_nn.batch(fp8)
    with nn.set_forward_context(metadata, {"patched": attention}):
        got, want = model.attention.rope_norm(qkv, "patched"), source(qkv)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert hccupy.unpatch(model) == 1 and model.attention.rope_norm is theirs


def test_no_tokens():
    model = Model()
    hccupy.patch(model)
    assert model(channels()[:0]).shape == (0, HIDDEN) and TOKENS > 0
