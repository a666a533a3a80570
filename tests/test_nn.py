"""hccupy.nn: each behaviour of the engine's layer classes, and the modules with parameters."""

from __future__ import annotations

import copy
import gc
import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import hccupy  # noqa: E402
from hccupy import nn  # noqa: E402

HC, HIDDEN, TOKENS = 4, 32, 5


class Norm(torch.nn.Module):
    """An RMSNorm as engines have it."""

    def __init__(self, size, eps=3e-5, dtype=torch.float32, seed=1):
        super().__init__()
        weight = 1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x):
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight.float()).to(x.dtype)


class EagerPre(torch.nn.Module):
    """The eager layer that owns the weights, and may hold the fused one as its child."""

    def __init__(self, fused=True, norm=None, seed=0, cls=nn.IHCPre):
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.hc_fn = torch.nn.Linear(HC * HIDDEN, 2 * HC, bias=False)
        self.hc_fn.weight = torch.nn.Parameter(torch.randn(2 * HC, HC * HIDDEN, generator=make) / 6)
        self.hc_scale = torch.nn.Parameter(torch.rand(2, generator=make) + 1)
        self.hc_base = torch.nn.Parameter(torch.randn(2 * HC, generator=make) / 2)
        if fused:
            self.hpc_pre = cls(HC, HIDDEN, 2.0, 2e-6, 1e-5, self, norm)

    def forward(self, x):
        f = x.flatten(1).float()
        mixes = (f @ self.hc_fn.weight.T) * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-5)
        pre = torch.sigmoid(mixes[:, :HC] * self.hc_scale[0] + self.hc_base[:HC]) + 2e-6
        post = 2.0 * torch.sigmoid(mixes[:, HC:] * self.hc_scale[1] + self.hc_base[HC:]) + 2e-6
        return (pre[..., None] * x.float()).sum(1).to(x.dtype), post


class EagerHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        make = torch.Generator().manual_seed(3)
        self.hc_head_fn = torch.nn.Linear(HC * HIDDEN, HC, bias=False)
        self.hc_head_fn.weight = torch.nn.Parameter(torch.randn(HC, HC * HIDDEN, generator=make) / 6)
        self.hc_head_scale = torch.nn.Parameter(torch.rand(1, generator=make) + 1)
        self.hc_head_base = torch.nn.Parameter(torch.randn(HC, generator=make) / 2)
        self.hpc_head = nn.IHCHead(HC, HIDDEN, 2e-6, 1e-5, self)

    def forward(self, x):
        f = x.flatten(1).float()
        mixes = (f @ self.hc_head_fn.weight.T) * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-5)
        return ((torch.sigmoid(mixes * self.hc_head_scale + self.hc_head_base) + 2e-6)[..., None] * x.float()).sum(1).to(x.dtype)


def channels(dtype=torch.float32, seed=9):
    return torch.randn(TOKENS, HC, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(a, b, tolerance=2e-6):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- iHC layers ------------------------------------------------------------------------------------------------------


def test_names_of_the_engine_are_aliases():
    for ours, theirs in (("IHCPre", "HpcIHCPre"), ("IHCPost", "HpcIHCPost"), ("IHCHead", "HpcIHCHead"), ("RopeNorm", "HpcRopeNorm")):
        assert getattr(nn, ours) is getattr(nn, theirs)


def test_owner_stays_out_of_the_module_tree():
    owner = EagerPre(norm=Norm(HIDDEN))
    owner.hpc_pre.process_weights_after_loading()
    assert set(owner.state_dict()) == {"hc_fn.weight", "hc_scale", "hc_base"}
    assert [n for n, _ in owner.named_modules()] == ["", "hc_fn", "hpc_pre"]
    assert not list(owner.hpc_pre.parameters())
    twin = copy.deepcopy(owner)
    assert twin.hpc_pre._fallback_op is twin and twin.hpc_pre.weight is twin.hc_fn.weight


def test_weights_are_none_until_loaded_and_forward_says_so():
    layer = EagerPre().hpc_pre
    assert layer.weight is layer.hc_scale is layer.hc_base is layer.rms_weight is None and layer.rms_eps == 0.0
    with pytest.raises(hccupy.ArgumentError, match=r"IHCPre: weights: expected process_weights_after_loading\(\)"):
        layer(channels())


def test_pre_equals_the_eager_layer_and_follows_refits():
    owner = EagerPre()
    owner.hpc_pre.process_weights_after_loading(None)
    assert owner.hpc_pre.weight is owner.hc_fn.weight, "no copy: fp32 from load to gate"
    x = channels()
    for got, want in zip(owner.hpc_pre(x), owner(x), strict=True):
        close(got, want)
    with torch.no_grad():
        owner.hc_fn.weight.mul_(-1)  # a refit in place
    close(owner.hpc_pre(x)[0], owner(x)[0])
    owner.hc_fn.weight = torch.nn.Parameter(owner.hc_fn.weight * 3)  # and one that replaces the parameter
    owner.hc_base = torch.nn.Parameter(owner.hc_base + 1)
    close(owner.hpc_pre(x)[1], owner(x)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_norm_owner(dtype):
    norm = Norm(HIDDEN, dtype=dtype)
    owner = EagerPre(norm=norm)
    owner.hpc_pre.process_weights_after_loading()
    assert owner.hpc_pre.rms_weight is norm.weight and owner.hpc_pre.rms_eps == norm.variance_epsilon
    x = channels(dtype)
    y, post = owner(x)
    got, got_post = owner.hpc_pre(x)
    close(got, norm(y), 2e-6 if dtype == torch.float32 else 2e-2)
    close(got_post, post)
    with torch.no_grad():
        norm.weight.mul_(2)
    close(owner.hpc_pre(x)[0], norm(y), 2e-6 if dtype == torch.float32 else 2e-2)


def test_post_head_and_post_pre():
    owner, head, post = EagerPre(norm=Norm(HIDDEN)), EagerHead(), nn.IHCPost(HC, HIDDEN)
    fused = nn.IHCPostPre(HC, HIDDEN, 2.0, 2e-6, 1e-5, owner, owner.hpc_pre._norm_owner)
    for layer in (owner.hpc_pre, head.hpc_head, post, fused):
        layer.process_weights_after_loading()
    residual, gates = channels(), torch.rand(TOKENS, HC)
    x = torch.randn(TOKENS, HIDDEN)
    close(post(x, residual, gates), gates[..., None] * x[:, None] + residual)
    close(post(x, residual, H_post=gates), post(x, residual, gates))
    y, z, following = fused(x, residual, gates)
    assert torch.equal(y, post(x, residual, gates))
    assert torch.equal(z, owner.hpc_pre(y)[0]) and torch.equal(following, owner.hpc_pre(y)[1])
    close(head.hpc_head(residual), head(residual))
    assert set(head.state_dict()) == {"hc_head_fn.weight", "hc_head_scale", "hc_head_base"}


@pytest.mark.parametrize("layer", [nn.IHCPre, nn.IHCPost, nn.IHCHead, nn.IHCPostPre])
def test_support_of_ihc_answers_with_a_reason(layer):
    for hc, hidden in ((4, 4096), (4, 6144), (2, 100), (8, 7168), (1, 5)):
        assert layer.support(hc, hidden) is True
        assert layer.support_reason(hc, hidden)
    assert layer.support(9, 6144) is False
    assert "expected 1 to 8, got 9" in layer.support_reason(9, 6144)


def test_load_errors_name_the_weight():
    owner = EagerPre()
    owner.hc_fn.weight = torch.nn.Parameter(owner.hc_fn.weight.bfloat16())
    with pytest.raises(hccupy.DtypeError, match="IHCPre: hc_fn: expected float32, got torch.bfloat16"):
        owner.hpc_pre.process_weights_after_loading()
    with pytest.raises(hccupy.ShapeError, match="IHCHead: hc_head_fn: expected shape"):
        nn.IHCHead(HC, HIDDEN + 1, 0.0, 0.0, EagerHead()).process_weights_after_loading()
    with pytest.raises(hccupy.FrameworkError, match="IHCHead: hc_head_fn: expected a parameter of the owner, got none"):
        nn.IHCHead(HC, HIDDEN, 0.0, 0.0, EagerPre(False)).process_weights_after_loading()


def test_layers_in_compile():
    owner = EagerPre(norm=Norm(HIDDEN))
    head, post = EagerHead(), nn.IHCPost(HC, HIDDEN)
    for layer in (owner.hpc_pre, head.hpc_head):
        layer.process_weights_after_loading()

    def step(x):
        y, gates = owner.hpc_pre(x)
        return head.hpc_head(post(torch.tanh(y), x, gates))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = channels()
    assert torch.equal(compiled(x), step(x))
    with torch.no_grad():
        owner.hc_fn.weight.mul_(0.5)
    assert torch.equal(compiled(x), step(x)), "the compiled code reads the owner's weights too"


# ---- RopeNorm --------------------------------------------------------------------------------------------------------

Q_HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 8
LAYER = "model.layers.0.self_attn.attn"


def rope_layer(kv_dtype="auto", policy=nn.QkNormPolicy.NORM_THEN_ROPE, name=LAYER, norm=True, **options):
    positions = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    cos_sin = torch.cat([positions.cos(), positions.sin()], 1).to(torch.bfloat16)
    norms = (Norm(DIM, 1e-5, torch.bfloat16, 4), Norm(DIM, 1e-5, torch.bfloat16, 5)) if norm else (None, None)
    layer = nn.RopeNorm(Q_HEADS, KV_HEADS, DIM, cos_sin, norm, *norms, kv_dtype, name, policy, **options)
    layer.process_weights_after_loading()
    return layer


def batch(fp8=False, decode=(9, 17, 4), prefill=((5, 5), (12, 3)), query=1, padding=0, seed=2):
    """(metadata, attention layer with a packed cache full of NaN bytes, qkv). prefill: (length, new) each."""
    make = torch.Generator().manual_seed(seed)
    lengths = [*decode, *(length for length, _ in prefill)]
    columns = max(-(-n // BLOCK) for n in lengths)
    table = torch.randperm(len(lengths) * columns, generator=make).reshape(len(lengths), columns).int()
    new = [n for _, n in prefill]
    metadata = SimpleNamespace(
        num_actual_tokens=len(decode) * query + sum(new), num_prefills=len(prefill), num_decodes=len(decode),
        num_decode_tokens=len(decode) * query, seq_lens=torch.tensor(lengths, dtype=torch.int32),
        qo_indptr=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()] if new else [0], dtype=torch.int32),
        qo_indptr_decode=torch.arange(0, len(decode) * query + 1, query, dtype=torch.int32),
        max_query_len=max([query, *new]), decode_query_len=query, block_table_tensor=table, slot_mapping=None,
    )  # fmt: skip
    bytes_each = 1 if fp8 else 2
    raw = torch.full((table.numel(), KV_HEADS, BLOCK, 2 * DIM * bytes_each), 0xFF, dtype=torch.uint8)
    cache = raw if fp8 else raw.view(torch.bfloat16)
    attention = SimpleNamespace(kv_cache=cache, _k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.03))
    qkv = torch.randn(metadata.num_actual_tokens + padding, (Q_HEADS + 2 * KV_HEADS) * DIM, generator=make).bfloat16()
    return metadata, attention, qkv


def expected(layer, metadata, attention, qkv, fp8):
    """Request by request through the op itself, into dense caches: (q, K and V of each request as bytes)."""
    q = torch.zeros(qkv.shape[0], Q_HEADS, DIM, dtype=torch.float8_e4m3fn if fp8 else qkv.dtype)
    starts = [*(metadata.qo_indptr_decode[:-1].tolist() if metadata.num_decodes else []), *(metadata.num_decode_tokens + metadata.qo_indptr[:-1]).tolist()]
    ends = [*starts[1:], metadata.num_actual_tokens]
    kinds = torch.float8_e4m3fn if fp8 else qkv.dtype
    stored = []
    for request, (start, end) in enumerate(zip(starts, ends, strict=True)):
        length = metadata.seq_lens[request : request + 1]
        key, value = (torch.zeros(8, BLOCK, KV_HEADS, DIM, dtype=kinds) for _ in range(2))
        index, table = torch.tensor([0, end - start], dtype=torch.int32), torch.arange(8, dtype=torch.int32)[None]
        given = (key, value, qkv[start:end], layer.cos_sin_cache, length, index, table)
        options = {"qk_norm_policy": ("none", "rope_then_norm", "norm_then_rope")[layer.qk_norm_policy], "norm_eps": layer.norm_eps}
        options.update(q_norm_weight=layer.qnorm_weight, k_norm_weight=layer.knorm_weight)
        if fp8:
            scales = {"k_scale": attention._k_scale.reshape(1), "v_scale": attention._v_scale.reshape(1), "is_prefill": False}
            q[start:end] = hccupy.rope_norm_store_kv_fp8(*given, **options, **scales)[0]
        else:
            q[start:end] = hccupy.rope_norm_store_kv(*given, **options)
        new = range(int(length) - (end - start), int(length))
        stored.append([(p, key.flatten(0, 1)[p].view(torch.uint8), value.flatten(0, 1)[p].view(torch.uint8)) for p in new])
    return q, stored


def check_cache(metadata, attention, stored):
    """Every new slot holds what it should, tails are zero, every other byte is as it was."""
    raw = attention.kv_cache.view(torch.uint8).clone().transpose(1, 2)  # [blocks, slots, heads, 2 * dim bytes]
    half = raw.shape[-1] // 2
    for request, rows in enumerate(stored):
        for position, key, value in rows:
            slot = raw[metadata.block_table_tensor[request, position // BLOCK], position % BLOCK]
            assert torch.equal(slot[:, :half], key) and torch.equal(slot[:, half:], value)
            slot.fill_(0xFF)
        last = int(metadata.seq_lens[request]) - 1
        tail = raw[metadata.block_table_tensor[request, last // BLOCK], last % BLOCK + 1 :]
        assert not tail.any()
        tail.fill_(0xFF)
    assert (raw == 0xFF).all()


CASES = {
    "mixed": {},
    "decode": {"prefill": ()},
    "prefill": {"decode": ()},
    "mtp": {"query": 3},
    "padded": {"padding": 4},
    "padded-decode": {"prefill": (), "padding": 3},
}


# The other policies reach the same code of the module: two cases each.
RUNS = [(c, p) for c in CASES for p in nn.QkNormPolicy if p is nn.QkNormPolicy.NORM_THEN_ROPE or c in ("mixed", "mtp")]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("case", "policy"), RUNS, ids=[f"{c}-{p.name.lower()}" for c, p in RUNS])
def test_rope_norm_parts_and_packed_cache(case, fp8, policy):
    layer = rope_layer("fp8_e4m3" if fp8 else "auto", policy)
    metadata, attention, qkv = batch(fp8, **CASES[case])
    with nn.set_forward_context(metadata, {LAYER: attention}):
        q = layer(qkv, LAYER)
    want, stored = expected(layer, metadata, attention, qkv, fp8)
    assert q.dtype == want.dtype and torch.equal(q.view(torch.uint8), want.view(torch.uint8)), "rows of padding are zero"
    check_cache(metadata, attention, stored)
    assert metadata.hpc_kv_written is True
    for name, there in (("hpc_prefill_q_scale", fp8 and metadata.num_prefills), ("hpc_decode_q_scale", fp8 and metadata.num_decodes)):
        assert hasattr(metadata, name) == bool(there)
    if fp8 and metadata.num_prefills:
        assert metadata.hpc_prefill_q_scale.shape == (metadata.num_prefills, Q_HEADS, 128)
    if fp8 and metadata.num_decodes:
        assert metadata.hpc_decode_q_scale.shape == (metadata.num_decode_tokens, Q_HEADS)
        assert metadata.hpc_split_k_flag.shape == (metadata.num_decodes, KV_HEADS) and not metadata.hpc_split_k_flag.any()


def test_rope_norm_one_launch_a_part(monkeypatch):
    """The packed cache is written where it lies: one op a part, no scatter, no scratch pages."""
    calls = []
    from hccupy import api

    real = api.rope_norm_store_kv
    monkeypatch.setattr(api, "rope_norm_store_kv", lambda *a, **k: calls.append(a[0]) or real(*a, **k))
    layer = rope_layer()
    metadata, attention, qkv = batch()
    with nn.set_forward_context({LAYER: metadata}, {LAYER: attention}):
        layer(qkv)
    assert len(calls) == 2 and all(c.data_ptr() == attention.kv_cache.data_ptr() and not c.is_contiguous() for c in calls)


def test_rope_norm_cache_with_k_and_v_apart():
    layer = rope_layer()
    metadata, attention, qkv = batch()
    apart = SimpleNamespace(kv_cache=torch.zeros(attention.kv_cache.shape[0], 2, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16))
    with nn.set_forward_context(metadata, {LAYER: attention}):
        want = layer(qkv)
    with nn.set_forward_context(metadata, {LAYER: apart}):
        assert torch.equal(layer(qkv), want)
    packed = attention.kv_cache.transpose(1, 2)
    written = packed.view(torch.int16) != -1
    assert torch.equal(apart.kv_cache[:, 0][written[..., :DIM]], packed[..., :DIM][written[..., :DIM]])
    with pytest.raises(hccupy.ShapeError, match="RopeNorm: kv_cache: expected"):
        layer._caches(torch.zeros(3, 3))


def test_rope_norm_buffer_and_parameters():
    layer = rope_layer()
    assert layer.cos_sin_cache.dtype == torch.float32 and dict(layer.named_buffers())["cos_sin_cache"] is layer.cos_sin_cache
    assert set(layer.state_dict()) == {"qnorm_weight", "knorm_weight"}, "the table is no part of a checkpoint, the norms are siblings"
    assert layer.qnorm_weight.dtype == torch.float32 and not layer.qnorm_weight.requires_grad
    assert [n for n, _ in layer.named_modules()] == [""]
    assert layer.norm_eps == 1e-5
    without = rope_layer(norm=False, name="no-norm")
    assert without.qnorm_weight is without.knorm_weight is None and without.qk_norm_policy is nn.QkNormPolicy.NONE


def test_norm_weights_are_updated_in_place():
    """Addresses that a captured graph holds stay right after a refit."""
    layer = rope_layer()
    before = layer.qnorm_weight.data_ptr(), layer.knorm_weight.data_ptr(), layer.cos_sin_cache.data_ptr()
    assert torch.equal(layer.qnorm_weight, layer.fallback_qnorm.weight.float())
    with torch.no_grad():
        layer.fallback_qnorm.weight.fill_(2.5)
    layer.fallback_knorm.weight = torch.nn.Parameter(torch.full((DIM,), -1.5))
    layer.process_weights_after_loading(None)
    assert (layer.qnorm_weight == 2.5).all() and (layer.knorm_weight == -1.5).all()
    assert before == (layer.qnorm_weight.data_ptr(), layer.knorm_weight.data_ptr(), layer.cos_sin_cache.data_ptr())


def test_fp32_survives_a_cast_of_the_model():
    layer = rope_layer()
    table, weight = layer.cos_sin_cache.clone(), layer.qnorm_weight.clone()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer).bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(layer.cos_sin_cache, table) and torch.equal(layer.qnorm_weight, weight) and weight.dtype == torch.float32


def test_registry_by_layer_name():
    from hccupy.nn.rope import instances

    a, b = rope_layer(name="a"), rope_layer(name="b", policy=nn.QkNormPolicy.ROPE_THEN_NORM)
    assert instances["a"] is a and instances["b"] is b
    metadata, attention, qkv = batch()
    with nn.set_forward_context(metadata, {"a": attention, "b": attention}):
        assert torch.equal(a(qkv, "b"), b(qkv, "b")), "the name decides, as in the engine"
        output = torch.empty(qkv.shape[0], Q_HEADS, DIM, dtype=qkv.dtype)
        torch.ops.hccupy.rope_norm_forward(qkv, output, "a")
        assert torch.equal(output, a(qkv))
    b.register_layer_name("c")
    assert instances["c"] is b
    del b
    gc.collect()
    assert "c" not in instances, "the registry keeps no model alive"
    with pytest.raises(hccupy.ArgumentError, match=r"RopeNorm: layer_name: expected a registered one \(a"):
        torch.ops.hccupy.rope_norm_forward(qkv, output, "c")


def test_without_metadata_or_cache_q_is_zero():
    """A profile run: no metadata, or a cache that is not there yet."""
    metadata, attention, qkv = batch()
    empty = SimpleNamespace(kv_cache=torch.empty(0), _k_scale=None, _v_scale=None)
    for layer in (rope_layer(), rope_layer("fp8")):
        for context in ((None, {}), ({LAYER: None}, {LAYER: attention}), (metadata, {LAYER: empty})):
            with nn.set_forward_context(*context):
                assert not layer(qkv).view(torch.uint8).any()
    idle = SimpleNamespace(**{**vars(metadata), "num_decodes": 0, "num_prefills": 0, "num_decode_tokens": 0, "num_actual_tokens": 0})
    with nn.set_forward_context(idle, {LAYER: attention}):
        assert not rope_layer()(qkv).any() and idle.hpc_kv_written


def test_forward_context_comes_from_where_it_should(monkeypatch):
    import sys

    metadata, attention, qkv = batch()
    layer = rope_layer()
    with pytest.raises(hccupy.ArgumentError, match="RopeNorm: forward context: expected one that is set, got none"):
        layer(qkv)
    staged = SimpleNamespace(kv_cache=[None, attention.kv_cache])
    context = SimpleNamespace(attn_metadata={LAYER: metadata}, no_compile_layers={LAYER: staged}, virtual_engine=1)
    given = rope_layer(forward_context=lambda: context)(qkv)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace(get_forward_context=lambda: context))
    assert torch.equal(rope_layer()(qkv), given)
    with nn.set_forward_context(None):
        assert not rope_layer()(qkv).any(), "ours stands before the engine's"
    with nn.set_forward_context(metadata, {}), pytest.raises(hccupy.ArgumentError, match="no_compile_layers"):
        rope_layer()(qkv)


def test_rope_norm_is_one_opaque_op_in_compile():
    layer, metadata, names = rope_layer(), *batch()[:1], []
    _, attention, qkv = batch()

    def backend(graph, example):
        names.extend(str(n.target) for n in graph.graph.nodes if "hccupy" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda t: layer(t) * 2, fullgraph=True, backend=backend)
    with nn.set_forward_context(metadata, {LAYER: attention}):
        want = layer(qkv) * 2
        assert torch.equal(compiled(qkv), want)
    assert names == ["hccupy.rope_norm_forward.default"]
    schema = torch.ops.hccupy.rope_norm_forward.default._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["output", "kv_cache"]


def test_compiled_code_that_reads_the_cache_gives_it():
    """With kv_cache given, the write is declared: what is read afterwards is what was written."""
    layer = rope_layer()
    metadata, attention, qkv = batch()
    cache = torch.zeros_like(attention.kv_cache)

    def step(qkv, cache):
        before = cache.float().abs().sum()
        q = layer(qkv, kv_cache=cache)
        return q, before, cache.float().abs().sum()

    torch._dynamo.reset()
    with nn.set_forward_context(metadata):
        want = step(qkv, torch.zeros_like(cache))
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(qkv, cache)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and got[1] == 0 and got[2] > 0


def test_opcheck_of_rope_norm_forward():
    layer = rope_layer(name="checked")
    metadata, attention, qkv = batch()
    output = torch.empty(qkv.shape[0], Q_HEADS, DIM, dtype=qkv.dtype)
    cache = torch.zeros_like(attention.kv_cache)
    with nn.set_forward_context(metadata, {"checked": attention}):
        torch.library.opcheck(torch.ops.hccupy.rope_norm_forward.default, (qkv, output, layer.layer_name, cache))


def test_support_of_rope_norm_answers_with_a_reason():
    for heads in ((8, 2, 128), (24, 1, 64), (9, 3, 64), (12, 12, 256), (80, 8, 192)):
        for kind in ("auto", "bfloat16", "fp8_e4m3", "fp8"):
            assert nn.RopeNorm.support(*heads, kind) is True and nn.RopeNorm.support_reason(*heads, kind)
    for heads, kind, why in (((8, 2, 100), "auto", "head_dim"), ((8, 3, 128), "auto", "kv_heads"), ((8, 2, 128), "fp8_e5m2", "fp8_e5m2")):
        assert nn.RopeNorm.support(*heads, kind) is False and why in nn.RopeNorm.support_reason(*heads, kind)


def test_rope_norm_constructor_errors():
    table = torch.zeros(4, DIM)
    with pytest.raises(hccupy.ArgumentError, match="fp8_e5m2"):
        nn.RopeNorm(8, 2, DIM, table, False, None, None, "fp8_e5m2", "x")
    with pytest.raises(hccupy.ArgumentError, match="RopeNorm: fallback_knorm: expected an RMSNorm"):
        nn.RopeNorm(8, 2, DIM, table, True, Norm(DIM), None, "auto", "x")
    with pytest.raises(hccupy.ArgumentError, match="RopeNorm: eps: expected one eps for both norms"):
        nn.RopeNorm(8, 2, DIM, table, True, Norm(DIM, 1e-5), Norm(DIM, 1e-6), "auto", "x").process_weights_after_loading()
    with pytest.raises(hccupy.ShapeError, match="RopeNorm: fallback_qnorm"):
        nn.RopeNorm(8, 2, DIM, table, True, Norm(DIM + 1), Norm(DIM), "auto", "x").process_weights_after_loading()
    bare = SimpleNamespace(weight=torch.ones(DIM))
    layer = nn.RopeNorm(8, 2, DIM, table, True, bare, bare, "auto", "x")
    layer.process_weights_after_loading()
    assert layer.norm_eps == 1e-6, "the value of hpc-ops where the norms tell none"


# ---- modules with parameters -----------------------------------------------------------------------------------------


def test_hyper_connection_starts_as_hy_v4_models_do():
    m = nn.HyperConnection(HIDDEN, HC)
    assert (m.hc_scale == torch.tensor(0.01)).all()
    close(m.hc_base, torch.tensor([-math.log(HC - 1)] * HC + [0.0] * HC))
    assert set(m.state_dict()) == {"hc_fn.weight", "hc_scale", "hc_base"} and not any(p.requires_grad for p in m.parameters())
    assert torch.isfinite(nn.HyperConnection(HIDDEN, 1).hc_base).all()
    head = nn.HyperHead(HIDDEN, HC)
    assert set(head.state_dict()) == {"hc_head_fn.weight", "hc_head_scale", "hc_head_base"}
    assert head.hc_head_fn.weight.shape == (HC, HC * HIDDEN)


def test_hyper_connection_with_silent_gates_is_a_plain_residual():
    m = nn.HyperConnection(HIDDEN, HC, hc_eps=0.0)
    with torch.no_grad():
        m.hc_scale.zero_()
    plain = torch.randn(TOKENS, HIDDEN)
    x = plain[:, None].repeat(1, HC, 1)
    close(m(x, torch.tanh), (plain + torch.tanh(plain))[:, None].expand(-1, HC, -1))


def test_hyper_connection_methods_are_the_ops():
    norm = Norm(HIDDEN)
    m = nn.HyperConnection(HIDDEN, HC, norm=norm, magnitude=1.5, norm_eps=2e-5, hc_eps=3e-6)
    assert m.norm is norm and "norm.weight" in m.state_dict()
    with pytest.raises(hccupy.ArgumentError, match="HyperConnection: norm: expected an RMSNorm with variance_epsilon or eps"):
        nn.HyperConnection(HIDDEN, HC, norm=torch.nn.RMSNorm(HIDDEN))  # torch's default eps depends on the dtype of x: say which
    x = channels()
    y, gates = m.pre(x)
    w = (m.hc_fn.weight, m.hc_scale, m.hc_base)
    want = hccupy.ihc_pre(x, *w, 2e-5, 3e-6, 1.5, norm.weight, norm.variance_epsilon)
    assert torch.equal(y, want[0]) and torch.equal(gates, want[1])
    out = m.post(y, x, gates)
    assert torch.equal(out, hccupy.ihc_post(y, x, gates))
    fused = m.post_pre(y, x.clone(), gates)
    assert torch.equal(fused[0], out) and torch.equal(fused[1], m.pre(out)[0])
    place = x.clone()
    assert m.post(y, place, gates, out=place) is place and torch.equal(place, out)
    assert torch.equal(m(x, lambda v: v), out)


def test_gates_stay_fp32_when_the_model_is_cast():
    model = torch.nn.ModuleDict({"c": nn.HyperConnection(HIDDEN, HC), "h": nn.HyperHead(HIDDEN, HC), "l": torch.nn.Linear(2, 2)})
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for cast in ("bfloat16", "half"):
        getattr(model, cast)()
        assert model["l"].weight.dtype != torch.float32
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if not k.startswith("l."))
    model.to(torch.bfloat16)
    y, _ = model["c"].pre(channels(torch.bfloat16))
    assert y.dtype == torch.bfloat16


def test_owner_of_an_engine_layer():
    """A HyperConnection has the eager layer's names, so it can own an IHCPre's weights."""
    m = nn.HyperConnection(HIDDEN, HC)
    layer = nn.IHCPre(HC, HIDDEN, m.magnitude, m.hc_eps, m.norm_eps, m)
    layer.process_weights_after_loading()
    assert torch.equal(layer(channels())[0], m.pre(channels())[0])


def test_from_safetensors(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    owner, head = EagerPre(False), EagerHead()
    prefix = "model.layers.3.hc_attn_layer.hc_pre."
    save_file({prefix + k: v for k, v in owner.state_dict().items()}, tmp_path / "a.safetensors")
    save_file({"model.hc_head." + k: v for k, v in head.state_dict().items()}, tmp_path / "b.safetensors")
    for path in (tmp_path, tmp_path / "a.safetensors"):
        m = nn.HyperConnection.from_safetensors(path, prefix, norm_eps=1e-5, hc_eps=2e-6)
        assert (m.hidden, m.hc) == (HIDDEN, HC)
        for got, want in zip(m.pre(channels()), owner(channels()), strict=True):
            close(got, want)
    close(nn.HyperHead.from_safetensors(tmp_path, "model.hc_head.", hc_eps=2e-6)(channels()), head(channels()))
    with pytest.raises(hccupy.ArgumentError, match="HyperConnection: path: expected tensors nope.hc_fn, nope.hc_scale, nope.hc_base"):
        nn.HyperConnection.from_safetensors(tmp_path, "nope.")
    save_file({"hc_fn": torch.zeros(24, 16), "hc_scale": torch.zeros(3), "hc_base": torch.zeros(24)}, tmp_path / "mhc.safetensors")
    with pytest.raises(hccupy.ShapeError, match="combination matrix"):
        nn.HyperConnection.from_safetensors(tmp_path / "mhc.safetensors")


def test_from_safetensors_without_the_package(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(hccupy.FrameworkError, match="HyperConnection: safetensors: .*pip install safetensors"):
        nn.HyperConnection.from_safetensors(tmp_path)
