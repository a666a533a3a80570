"""hccupy.compat.hpc: the names engines import, called as vLLM's and SGLang's layers call them, and the module `hpc` itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from configparser import ConfigParser
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import hccupy  # noqa: E402
from hccupy.compat import hpc as ours  # noqa: E402
from hccupy.compat import install_hpc, plugins, uninstall_hpc  # noqa: E402

from . import test_nn  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SIGNATURES = {
    "fuse_ihc_pre": "x, w, hc_scale, hc_base, norm_eps=1e-5, hc_eps=1e-6, magnitude=2.0, rms_weight=None, rms_eps=0.0, cast_bfloat_for_norm=True",
    "fuse_ihc_post": "x, residual, H_post",
    "fuse_ihc_head": "x, w, hc_scale, hc_base, norm_eps=1e-5, hc_eps=1e-6, rms_weight=None, rms_eps=0.0, cast_bfloat_for_norm=True",
    "fuse_ihc_post_pre": (
        "xa, residual, H_post_in, w, hc_scale, hc_base, norm_eps=1e-5, hc_eps=1e-6, magnitude=2.0, rms_weight=None, rms_eps=0.0, cast_bfloat_for_norm=True"
    ),
    "rope_norm_store_kv": (
        "key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill, q_norm_weight=None, k_norm_weight=None, "
        "out_q=None, out_k=None, out_v=None, qk_norm_policy=0"
    ),
    "rope_norm_store_kv_fp8": (
        "key_cache, value_cache, qkv, cos_sin, num_seqlen_per_req, q_index, kvcache_indices, is_prefill, k_scale, v_scale, quant_policy, max_seqlens=0, "
        "upper_max=None, q_scale_inv=None, q_norm_weight=None, k_norm_weight=None, out_q=None, out_k=None, out_v=None, qk_norm_policy=0"
    ),
}


@pytest.fixture
def hpc(monkeypatch):
    """`import hpc` with the shim installed and no real hpc-ops, as an engine does it."""
    uninstall_hpc()
    monkeypatch.delitem(sys.modules, "hpc", raising=False)
    install_hpc()
    yield importlib.import_module("hpc")
    uninstall_hpc()


def gates(hc=4, hidden=48, tokens=6, rows=2, dtype=torch.bfloat16, seed=0):
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hc, hidden, generator=make).to(dtype)
    w = torch.randn(rows * hc, hc * hidden, generator=make) / 8
    return x, w, torch.rand(rows, generator=make) + 1, torch.randn(rows * hc, generator=make) / 2


# ---- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    words = inspect.signature(eval(f"lambda {SIGNATURES[name]}: 0"))
    mine = inspect.signature(getattr(ours, name))
    assert [(p.name, p.default, p.kind) for p in mine.parameters.values()] == [(p.name, p.default, p.kind) for p in words.parameters.values()]


def test_how_engines_look_it_up(hpc):
    assert importlib.util.find_spec("hpc") is not None
    assert hpc is sys.modules["hpc"] and hpc.__hccupy__ is True and ours.__hccupy__ is True
    assert hpc.__version__ == hccupy.__version__
    for name in SIGNATURES:
        assert getattr(hpc, name, None) is getattr(ours, name)
    assert getattr(hpc, "fuse_moe", None) is None and not hasattr(getattr(hpc, "gemm", None), "gated_mla_gemm")
    with pytest.raises(AttributeError, match=r"hpc: hccupy stands in .* it has no 'fuse_moe', and no real hpc-ops is installed"):
        hpc.fuse_moe  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("hpc.attention")
    kind = hpc.QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR
    assert kind.value == 1 and kind == 1


def test_install_twice_and_uninstall():
    uninstall_hpc()
    assert importlib.util.find_spec("hpc") is None
    first = install_hpc()
    assert install_hpc() is first is sys.modules["hpc"]
    uninstall_hpc()
    uninstall_hpc()
    assert "hpc" not in sys.modules and importlib.util.find_spec("hpc") is None


REAL = """
__version__ = "9.9"
def fuse_ihc_post(*args): return "theirs"
def fuse_moe(*args): return "real moe"
from . import attention
from .attention import decode
"""


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A package called hpc on the path."""
    (tmp_path / "hpc").mkdir()
    (tmp_path / "hpc" / "__init__.py").write_text(REAL)
    (tmp_path / "hpc" / "attention.py").write_text("import hpc\ndef decode(): return hpc.__name__\n")
    (tmp_path / "hpc" / "extra.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    uninstall_hpc()
    for name in [n for n in sys.modules if n == "hpc" or n.startswith("hpc.")]:
        del sys.modules[name]


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_real_hpc_answers_for_the_rest(real, imported_before):
    before = importlib.import_module("hpc") if imported_before else None
    shim = install_hpc()
    assert shim.fuse_ihc_post is ours.fuse_ihc_post and shim.__version__ == hccupy.__version__
    assert ("hpc.attention" in sys.modules) == imported_before, "the real one is imported only when it is needed"
    assert shim.fuse_moe() == "real moe" and shim.decode() == "hpc" and sys.modules["hpc"] is shim
    assert importlib.import_module("hpc.extra").value == 5 and shim.attention.decode() == "hpc"
    with pytest.raises(AttributeError, match="nothing"):
        shim.nothing  # noqa: B018
    uninstall_hpc()
    restored = importlib.import_module("hpc")
    assert restored.__version__ == "9.9" and restored.fuse_ihc_post() == "theirs" and (before is None or restored is before)


def test_a_broken_or_empty_hpc_counts_as_none(tmp_path, monkeypatch):
    (tmp_path / "hpc").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert getattr(install_hpc(), "fuse_moe", None) is None  # just a folder of that name
    uninstall_hpc()
    (tmp_path / "hpc" / "__init__.py").write_text("raise ImportError('built for another torch')")
    importlib.invalidate_caches()
    shim = install_hpc()
    assert getattr(shim, "fuse_moe", None) is None and shim.fuse_ihc_post is ours.fuse_ihc_post and sys.modules["hpc"] is shim
    uninstall_hpc()


def test_plugin_obeys_the_switch(monkeypatch):
    uninstall_hpc()
    for value, there in ((None, False), ("0", False), ("1", True)):
        monkeypatch.delenv("HCCUPY_HPC", raising=False)
        if value is not None:
            monkeypatch.setenv("HCCUPY_HPC", value)
        plugins.register()
        assert ("hpc" in sys.modules) == there
    uninstall_hpc()


def test_entry_points_of_the_engines():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        name, _, target = config["options.entry_points"][group].strip().partition(" = ")
        module, _, function = target.partition(":")
        assert name == "hccupy" and getattr(importlib.import_module(module), function) is plugins.register


# ---- hyper-connections, as the engines call them ---------------------------------------------------------------------


def test_ihc_as_vllm_calls_it(hpc):
    x, w, scale, base = gates()
    norm = torch.rand(48).bfloat16()
    y, post = hpc.fuse_ihc_pre(x, w, scale, base, 1e-5, 2e-6, 2.0, None, 0.0)
    want = hccupy.ihc_pre(x, w, scale, base, 1e-5, 2e-6, 2.0)
    assert torch.equal(y, want[0]) and torch.equal(post, want[1])
    y, _ = hpc.fuse_ihc_pre(x, w, scale, base, 1e-5, 2e-6, 2.0, norm, 3e-5)
    assert torch.equal(y, hccupy.ihc_pre(x, w, scale, base, 1e-5, 2e-6, 2.0, norm, 3e-5)[0])
    assert torch.equal(hpc.fuse_ihc_post(y, x, post), hccupy.ihc_post(y, x, post))
    assert torch.equal(hpc.fuse_ihc_post(y, residual=x, H_post=post), hccupy.ihc_post(y, x, post))
    _, w, scale, base = gates(rows=1)
    assert torch.equal(hpc.fuse_ihc_head(x, w, scale, base, 1e-5, 2e-6), hccupy.ihc_head(x, w, scale, base, 1e-5, 2e-6))


def test_ihc_as_sglang_calls_it(hpc):
    x, w, scale, base = gates()
    norm, eps = torch.rand(48).bfloat16(), 1e-5
    y, post = hpc.fuse_ihc_pre(x.contiguous(), w, scale, base, 1e-5, 2e-6, 2.0, norm, eps, True)
    assert torch.equal(y, hccupy.ihc_pre(x, w, scale, base, 1e-5, 2e-6, 2.0, norm, eps, True)[0])
    got = hpc.fuse_ihc_post_pre(y, x, post, w, scale, base, 1e-5, 2e-6, 2.0, norm, eps, True)
    want = hccupy.ihc_post_pre(y, x, post, w, scale, base, 1e-5, 2e-6, 2.0, norm, eps)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    named = hpc.fuse_ihc_post_pre(xa=y, residual=x, H_post_in=post, w=w, hc_scale=scale, hc_base=base, norm_eps=1e-5, hc_eps=2e-6, rms_weight=norm, rms_eps=eps)
    assert torch.equal(named[1], got[1])
    _, w, scale, base = gates(rows=1)
    got = hpc.fuse_ihc_head(x, w, scale, base, 1e-5, 2e-6, norm, eps, True)
    assert torch.equal(got, hccupy.ihc_head(x, w, scale, base, 1e-5, 2e-6, norm, eps))


def test_default_rms_eps_is_zero(hpc):
    """hpc-ops' default; ours is 1e-5. On a row of tiny values the two differ visibly."""
    x, w, scale, base = gates(dtype=torch.float32)
    x, norm = x * 1e-3, torch.ones(48)
    y, _ = hpc.fuse_ihc_pre(x, w, scale, base, rms_weight=norm)
    assert torch.equal(y, hccupy.ihc_pre(x, w, scale, base, rms_weight=norm, rms_eps=0.0)[0])
    assert not torch.allclose(y, hccupy.ihc_pre(x, w, scale, base, rms_weight=norm)[0], rtol=1e-2)


@pytest.mark.parametrize(("hc", "hidden"), [(2, 100), (8, 257), (1, 6144), (4, 5120), (3, 7)])
def test_shapes_hpc_refuses(hpc, hc, hidden):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w, scale, base = gates(hc, hidden, 3, dtype=dtype)
        wide = torch.zeros(3, hc, 2 * hidden, dtype=dtype)
        wide[:, :, :hidden] = x
        y, post = hpc.fuse_ihc_pre(wide[:, :, :hidden], w, scale, base)  # strided, which hpc-ops refuses too
        assert torch.equal(y, hpc.fuse_ihc_pre(x, w, scale, base)[0])
        assert hpc.fuse_ihc_post(y, x, post).shape == (3, hc, hidden)
    assert hpc.fuse_ihc_pre(x[:0], w, scale, base)[1].shape == (0, hc)


# ---- rope, as vLLM's layer calls it ----------------------------------------------------------------------------------


class TheirPolicy(IntEnum):
    NONE, ROPE_THEN_NORM, NORM_THEN_ROPE = 0, 1, 2


def vllm_forward(hpc, layer, metadata, attention, qkv, scatter):
    """What vLLM's layer does with one metadata object: prefill and decode parts; K and V in place, or out and scattered."""
    fp8 = layer.use_fp8
    cache = attention.kv_cache.view(torch.float8_e4m3fn) if fp8 else attention.kv_cache
    key, value = cache.transpose(1, 2).split(test_nn.DIM, dim=-1)
    qkv = qkv[: metadata.num_actual_tokens]
    decode_tokens, decodes = metadata.num_decode_tokens, metadata.num_decodes
    q = torch.empty(len(qkv), test_nn.Q_HEADS, test_nn.DIM, dtype=torch.float8_e4m3fn if fp8 else qkv.dtype)
    parts = {
        True: (slice(decode_tokens, None), slice(decodes, None), metadata.qo_indptr, metadata.num_prefills),
        False: (slice(0, decode_tokens), slice(0, decodes), metadata.qo_indptr_decode, decodes),
    }
    policy = TheirPolicy(int(layer.qk_norm_policy))
    for is_prefill, (rows, requests, index, count) in parts.items():
        if not count:
            continue
        lengths, table = metadata.seq_lens[requests], metadata.block_table_tensor[requests]
        out_k = torch.empty(len(qkv[rows]), test_nn.KV_HEADS, test_nn.DIM, dtype=cache.dtype) if scatter else None
        out_v = torch.empty_like(out_k) if scatter else None
        pages = torch.zeros(2, 1, test_nn.BLOCK, test_nn.KV_HEADS, test_nn.DIM, dtype=cache.dtype) if scatter else (key, value)
        indices = torch.zeros_like(table) if scatter else table
        weights = {"q_norm_weight": layer.qnorm_weight, "k_norm_weight": layer.knorm_weight}
        outs = {"out_q": q[rows], "out_k": out_k, "out_v": out_v, "qk_norm_policy": policy}
        if fp8:
            _, scale, flag = hpc.rope_norm_store_kv_fp8(
                key_cache=pages[0], value_cache=pages[1], qkv=qkv[rows], cos_sin=layer.cos_sin_cache, num_seqlen_per_req=lengths,
                q_index=index, kvcache_indices=indices, is_prefill=is_prefill, k_scale=attention._k_scale.reshape(1),
                v_scale=attention._v_scale.reshape(1), quant_policy=hpc.QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR.value,
                max_seqlens=metadata.max_query_len if is_prefill else metadata.decode_query_len, **weights, **outs,
            )  # fmt: skip
            setattr(metadata, "hpc_prefill_q_scale" if is_prefill else "hpc_decode_q_scale", scale)
            metadata.hpc_split_k_flag = flag
        else:
            got = hpc.rope_norm_store_kv(pages[0], pages[1], qkv[rows], layer.cos_sin_cache, lengths, index, indices, is_prefill, **weights, **outs)
            assert got is outs["out_q"] or got.data_ptr() == outs["out_q"].data_ptr()
        if scatter:
            hccupy.zero_kv_tail(key, value, lengths, table)
            position = torch.cat([torch.arange(n - (b - a), n) for n, a, b in zip(lengths.tolist(), index[:-1].tolist(), index[1:].tolist(), strict=True)])
            owner = torch.repeat_interleave(torch.arange(count), (index[1:] - index[:-1]).long())
            slots = table[owner, position // test_nn.BLOCK].long() * test_nn.BLOCK + position % test_nn.BLOCK
            hccupy.store_kv(key, out_k, slots)
            hccupy.store_kv(value, out_v, slots)
    return q


@pytest.mark.parametrize("scatter", [False, True], ids=["in-place", "scattered"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", ["mixed", "decode", "prefill", "mtp"])
def test_rope_as_vllm_calls_it(hpc, case, fp8, scatter):
    """q, caches and scales equal to hccupy.nn.RopeNorm's for the same metadata object."""
    layer = test_nn.rope_layer("fp8_e4m3" if fp8 else "auto")
    layer.norm_eps = 1e-6  # hpc-ops takes none; RopeNorm otherwise uses the norms' own
    metadata, attention, qkv = test_nn.batch(fp8, **test_nn.CASES[case])
    mine = SimpleNamespace(**{**vars(attention), "kv_cache": attention.kv_cache.clone()})
    facts = SimpleNamespace(**vars(metadata))
    with hccupy.nn.set_forward_context(facts, {test_nn.LAYER: mine}):
        want = layer(qkv)
    got = vllm_forward(hpc, layer, metadata, attention, qkv, scatter)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(attention.kv_cache.view(torch.uint8), mine.kv_cache.view(torch.uint8))
    for name in ("hpc_prefill_q_scale", "hpc_decode_q_scale"):
        assert hasattr(metadata, name) == hasattr(facts, name)
        if hasattr(facts, name):
            assert torch.equal(getattr(metadata, name), getattr(facts, name))


def call(fp8=False, tokens=3):
    layer = test_nn.rope_layer(norm=False, name="shim")
    metadata, _, qkv = test_nn.batch(fp8, decode=(), prefill=((tokens, tokens),))
    key, value = (torch.zeros(4, test_nn.BLOCK, test_nn.KV_HEADS, test_nn.DIM, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16) for _ in range(2))
    return [key, value, qkv, layer.cos_sin_cache, metadata.seq_lens, metadata.qo_indptr, torch.zeros(1, 1, dtype=torch.int32)]


def test_norm_weights_are_dropped_without_a_norm(hpc):
    """hpc-ops ignores them with policy 0; hccupy's own function calls that an error."""
    weight = torch.full((test_nn.DIM,), 7.0)
    given = call()
    q = hpc.rope_norm_store_kv(*given, True, weight, weight)
    assert torch.equal(q, hccupy.rope_norm_store_kv(*given)) and q.shape == (3, test_nn.Q_HEADS, test_nn.DIM)
    positional = hpc.rope_norm_store_kv(*given, False, weight, weight, torch.empty_like(q), None, None, 0)
    assert torch.equal(positional, q), "is_prefill makes no difference to bf16"
    for number, name in ((1, "rope_then_norm"), (2, "norm_then_rope")):
        want = hccupy.rope_norm_store_kv(*given, q_norm_weight=weight, k_norm_weight=weight, qk_norm_policy=name)
        assert torch.equal(hpc.rope_norm_store_kv(*given, True, weight, weight, qk_norm_policy=number), want)
    with pytest.raises(hccupy.ArgumentError, match=r"qk_norm_policy: expected one of 0 \(none\), 1 \(rope_then_norm\), 2 .*, got 3"):
        hpc.rope_norm_store_kv(*given, True, qk_norm_policy=3)


def test_quant_policies(hpc):
    given, one = call(True), torch.tensor([0.02])
    inverse = torch.tensor([50.0])

    class Theirs(Enum):
        DYNAMIC, STATIC = 1, 2

    q, scale, flag = hpc.rope_norm_store_kv_fp8(*given, True, one, one, 1, 3, None, inverse)  # the inverse is for static Q only
    want = hccupy.rope_norm_store_kv_fp8(*given, k_scale=one, v_scale=one, max_q_len=3)
    assert torch.equal(q.view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(scale, want[1]) and not flag.any()
    assert torch.equal(hpc.rope_norm_store_kv_fp8(*given, True, one, one, Theirs.DYNAMIC, 3)[1], scale)
    q, scale, flag = hpc.rope_norm_store_kv_fp8(*given, False, one, one, Theirs.STATIC, upper_max=240.0, q_scale_inv=inverse)
    want = hccupy.rope_norm_store_kv_fp8(*given, k_scale=one, v_scale=one, q_quant="static", q_scale_inv=inverse, upper_max=240.0)
    assert scale is None and torch.equal(q.view(torch.uint8), want[0].view(torch.uint8))
    assert hpc.rope_norm_store_kv_fp8(*given, False, one, one, 1)[1].shape == (3, test_nn.Q_HEADS), "decode needs no max_seqlens"
    with pytest.raises(hccupy.ArgumentError, match=r"quant_policy: expected one of 1 \(dynamic\), 2 \(static\), got 0"):
        hpc.rope_norm_store_kv_fp8(*given, True, one, one, 0)
    with pytest.raises(hccupy.ArgumentError, match="max_q_len"):
        hpc.rope_norm_store_kv_fp8(*given, True, one, one, 1)


def test_shim_inside_compile(hpc):
    x, w, scale, base = gates(dtype=torch.float32)

    def step(x):
        import hpc

        y, post = hpc.fuse_ihc_pre(x, w, scale, base, 1e-5, 1e-6, 2.0, None, 0.0)
        return hpc.fuse_ihc_post(torch.tanh(y), x, post)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))
    given = call()
    torch._dynamo.reset()
    rope = torch.compile(lambda *g: hpc.rope_norm_store_kv(*g, True), fullgraph=True, backend="aot_eager")
    assert torch.equal(rope(*given), hccupy.rope_norm_store_kv(*given))


def test_shim_needs_no_torch():
    """The rename table works on any framework's arrays, and importing it imports none."""
    code = textwrap.dedent("""
        import sys
        import numpy as np
        from hccupy.compat import install_hpc
        install_hpc()
        import hpc
        y = hpc.fuse_ihc_post(np.ones((2, 8), np.float32), np.ones((2, 4, 8), np.float32), np.ones((2, 4), np.float32))
        assert (y == 2).all() and "torch" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
