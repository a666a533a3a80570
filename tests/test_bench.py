"""What the bench does without a GPU: judge results."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hccupy import arch  # noqa: E402
from hccupy.bench import inputs, peers, run  # noqa: E402
from hccupy.dtypes import BY_NAME  # noqa: E402
from hccupy.explain import plan_for  # noqa: E402
from hccupy.ops import REGISTRY  # noqa: E402


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int32", "uint8"])
def test_differing_counts_wrong_elements(name, rng):
    want = (rng.standard_normal((50, 8)) * 20).astype(BY_NAME[name].np)
    index = torch.from_numpy(rng.integers(0, 50, 5000))
    good = inputs.tensor(want, "cpu")[index]
    assert run.differing(good, want, index) == 0.0
    bad = good.clone().view(torch.uint8)
    bad[4990:] ^= 0x55  # in the last chunk, which is shorter
    assert run.differing(bad.view(good.dtype), want, index) > 0.9 * 10 / 5000
    assert run.differing(inputs.tensor(want, "cpu"), want, None) == 0.0


def test_differing_knows_nan_infinity_and_ulps(rng):
    want = rng.standard_normal((4, 64)).astype(np.float32)
    want[0, 0], want[1, 1], want[2, 2] = np.nan, np.inf, -np.inf
    got = torch.from_numpy(want.copy())
    assert run.differing(got, want, None) == 0.0
    for place, value in (((0, 0), 0.0), ((1, 1), 1e38), ((2, 2), np.inf), ((3, 3), np.nan)):
        changed = got.clone()
        changed[place] = value
        assert run.differing(changed, want, None) == 1 / 256, place
    wide = want.astype(BY_NAME["bfloat16"].np)
    near, far = (inputs.tensor((wide.astype(np.float32) * k).astype(wide.dtype), "cpu") for k in (1.004, 1.03))
    assert run.differing(near, wide, None) == 0.0
    assert run.differing(far, wide, None) > 0.9
    gates = got[3:, :32].abs() + 1
    assert run.differing(gates * (1 + 2e-6), gates.numpy(), None) == 0.0
    assert run.differing(gates * (1 + 3e-5), gates.numpy(), None) == 1.0
    assert run.differing(gates * (1 + 3e-5), gates.numpy(), None, run.LEAST["ihc_post_pre"]) == 0.0


@pytest.mark.parametrize("op", [o for o in REGISTRY if any(c.name.startswith("bench") for c in REGISTRY[o].cases)])
def test_verify_accepts_the_cpu_path_and_refuses_a_wrong_result(op, rng):
    """The bench's check on NumPy's own results, as tensors on the CPU."""
    import hccupy

    spec = REGISTRY[op]
    case = [c for c in spec.cases if not c.name.startswith("bench")][1]
    host = spec.make_inputs(case, rng)
    device = {k: inputs.tensor(v, "cpu") if isinstance(v, np.ndarray) else v for k, v in host.items()}
    result = getattr(hccupy, op)(**device)
    got = result if isinstance(result, tuple) else (result,)
    run.verify(spec, host, device, None, got)
    first = next(g for g in (*got, *(device[a.name] for a in spec.args if a.mutated)) if g is not None and g.numel())
    first.view(torch.uint8).bitwise_xor_(0x41)
    with pytest.raises(run.WrongResultError, match=op):
        run.verify(spec, host, device, None, got)


@pytest.mark.parametrize("op", [o for o in REGISTRY if any(c.name.startswith("bench") for c in REGISTRY[o].cases)])
def test_what_is_compiled_ahead_is_what_the_inputs_need(op, rng):
    """Dtypes that differ would compile other kernels ahead than the calls use, and give their compile times to the wrong kind."""
    spec = REGISTRY[op]
    small = {c.name: c for c in spec.cases if c.name.startswith("bench") and c.axes.get("tokens", sum(c.options.get("new", (1,)))) <= 64}
    assert small
    for case in list(small.values())[:: max(len(small) // 6, 1)]:
        host, bound = spec.make_inputs(case, rng), run.imagined(spec, case)
        given = {a.name: host[a.name].dtype.name for a in spec.args if isinstance(host.get(a.name), np.ndarray)}
        assert {name: bound.dtypes[name] for name in given} == given, case.name


def test_peers_are_timed_on_the_model_of_the_goals_only():
    spec = REGISTRY["ihc_pre"]
    timed = [c.name for c in spec.cases if c.name.startswith("bench") and run.standard(spec, c)]
    assert "bench-16384" in timed and "bench-norm-1" in timed and not any("x" in name for name in timed)


def test_plans_of_every_case(monkeypatch):
    """One plan a case, from the case alone; those that share a binary are compiled once."""
    monkeypatch.setattr(run.arch, "of_device", lambda index: arch.named("sm_90a"))
    todo = [(s, c) for s in REGISTRY.values() for c in s.cases if c.name.startswith("bench")]
    compiled = run.plans_of(todo)
    assert len(compiled) == len({run.build.identity(p) for p in compiled}) < len(todo)
    assert {p.op for p in compiled} == set(REGISTRY)
    assert {p.defines["kHasRmsWeight"] for p in compiled if p.op == "ihc_pre"} == {0, 1}
    assert {p.defines["kHasQNormWeight"] for p in compiled if p.op == "rope_norm_store_kv"} == {1}


def test_a_cold_compile_of_each_kind(monkeypatch):
    """No cache of ours, none of NVRTC's; one kernel a kind."""
    asked = []
    monkeypatch.setattr(run.build, "compile_plan", lambda made, options: asked.append((made, options)))
    plans = [plan_for("ihc_post", {"tokens": n, "hc": hc, "hidden": 6144}, arch="sm_90a") for n in (1, 4096) for hc in (2, 4)]
    seconds = run.compile_seconds(plans)
    assert len(asked) == len(seconds) == len({run.kind_of(p) for p in plans}) < len(plans)
    assert all(options == ("--no-cache",) for _, options in asked) and all(s > 0 for s in seconds.values())


def test_facts_of_every_case():
    """Every record can be found by its op, dtype and sizes; those of the goals by the words of the goals."""
    for spec in REGISTRY.values():
        for case in (c for c in spec.cases if c.name.startswith("bench")):
            facts = run.facts_of(spec, case, run.imagined(spec, case))
            assert facts["op"] == spec.name and facts["dtype"] == case.dtype and facts.items() >= case.axes.items()
            assert ("tokens" in facts) == any(a.name == "tokens" for a in spec.axes)
            assert facts.get("norm") == case.options.get("norm")
            if spec.name.startswith("rope"):
                assert (
                    facts["mode"] in ("decode", "prefill")
                    and facts["policy"] == "norm_then_rope"
                    and facts["tail"] == case.scalars.get("tail", "zero")
                    and facts["tokens"] == sum(case.options["new"])
                )


def _stand_ins(monkeypatch):
    """hpc, vLLM and FlashInfer with our own functions behind their signatures."""
    from types import ModuleType

    import hccupy
    from hccupy.compat import hpc

    theirs = ModuleType("hpc")
    theirs.__spec__ = importlib.machinery.ModuleSpec("hpc", None)
    theirs.__dict__.update({n: getattr(hpc, n) for n in hpc.__all__})
    monkeypatch.setitem(sys.modules, "hpc", theirs)

    def append(
        qkv, cos_sin, seq_lens, q_indptr, page_indices, key_cache, value_cache, *, num_q_heads, num_kv_heads, qk_norm_policy, q_norm_weight, k_norm_weight,
        clear_unused_last_page_rows,
    ):  # fmt: skip
        assert (num_q_heads + 2 * num_kv_heads) * 128 == qkv.shape[1] and qk_norm_policy == 2
        return hccupy.rope_norm_store_kv(
            key_cache, value_cache, qkv, cos_sin, seq_lens, q_indptr, page_indices, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight,
            qk_norm_policy="norm_then_rope", tail="zero" if clear_unused_last_page_rows else "keep",
        )  # fmt: skip

    def append_fp8(
        qkv, cos_sin_cache, seq_lens, q_indptr, page_indices, paged_kv_cache, is_prefill, k_scale, v_scale, quant_policy, max_seqlen, *,
        q_norm_weight, k_norm_weight, qk_norm_policy,
    ):  # fmt: skip
        assert quant_policy == 1 and qk_norm_policy == 2
        return hccupy.rope_norm_store_kv_fp8(
            *paged_kv_cache, qkv, cos_sin_cache, seq_lens, q_indptr, page_indices, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight,
            qk_norm_policy="norm_then_rope", k_scale=k_scale, v_scale=v_scale, is_prefill=is_prefill, max_q_len=max_seqlen or None,
        )  # fmt: skip

    vllm = ModuleType("vllm.models.hy_v4.nvidia.triton_ihc")
    vllm.triton_ihc_pre = lambda x, weight, scale, base, magnitude, hc_eps, norm_eps: hccupy.ihc_pre(x, weight, scale, base, norm_eps, hc_eps, magnitude)
    vllm.triton_ihc_post = hccupy.ihc_post
    parts = vllm.__name__.split(".")
    for n in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(".".join(parts[:n])))
    sys.modules["vllm.models.hy_v4.nvidia"].triton_ihc = vllm
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    for module, name, function in (
        ("cake_fused_qk_rope_append", "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache", append),
        ("cake_fused_qk_rope_fp8_append", "cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache", append_fp8),
    ):
        made = ModuleType(f"flashinfer.{module}")
        setattr(made, name, function)
        monkeypatch.setitem(sys.modules, f"flashinfer.{module}", made)


PEER_CASES = {
    "ihc_pre": "bench-1", "ihc_head": "bench-1", "ihc_post": "bench-8", "ihc_post_pre": "bench-1",
    "rope_norm_store_kv": "bench-8-1-decode-16-at-1041", "rope_norm_store_kv_fp8": "bench-8-1-prefill-512",
}  # fmt: skip


@pytest.mark.parametrize("op", PEER_CASES)
def test_peers_are_asked_for_the_same_thing(op, rng, monkeypatch):
    """hpc-ops, vLLM and FlashInfer get their arguments in their own order: their stand-ins give what ours gives."""
    import hccupy

    _stand_ins(monkeypatch)
    spec = REGISTRY[op]
    case = next(c for c in spec.cases if c.name.startswith(PEER_CASES[op]))
    if "rope" in op:  # where peers have no such argument, or are timed with their own default
        case = replace(case, scalars={k: v for k, v in case.scalars.items() if k != "norm_eps"})
    host = spec.make_inputs(case, rng)

    def tensors():
        return {k: inputs.tensor(v, "cpu") if isinstance(v, np.ndarray) else v for k, v in host.items()}

    ours = tensors()
    want = getattr(hccupy, op)(**ours)
    found = peers.of(spec, case, False, True)
    assert set(found) >= ({"hpc-ops", "FlashInfer"} if "rope" in op else {"hpc-ops", "torch eager"} | ({"vLLM Triton"} if op != "ihc_head" else set()))
    for name in set(found) - {"torch eager"}:
        theirs = tensors()
        got = found[name](theirs)
        for g, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=False):
            assert torch.equal(g.view(torch.uint8), w.view(torch.uint8)), name
        for a in spec.args:
            if a.mutated:
                assert torch.equal(theirs[a.name].view(torch.uint8), ours[a.name].view(torch.uint8)), (name, a.name)


def test_fused_peers_only_where_they_serve(monkeypatch):
    _stand_ins(monkeypatch)
    spec = REGISTRY["rope_norm_store_kv"]
    sys.modules["flashinfer"].__version__ = "1.2.3"
    assert peers.versions()["FlashInfer"] == "1.2.3" and "vLLM Triton" not in peers.versions()
    found = {c.name: set(peers.of(spec, c, False, run.standard(spec, c))) for c in spec.cases if c.name.startswith("bench")}
    assert found["bench-64-8-prefill-512"] == {"torch eager", "hpc-ops", "FlashInfer"}
    assert found["bench-8-1-prefill-512"] == {"hpc-ops", "FlashInfer"}
    assert not found["bench-40-8-prefill-16384"] and not found["bench-64-8-packed-prefill-16384"]


def test_host_times_are_the_fastest_of_all_passes():
    tables = [[{"op": "ihc_pre", "call": "bound", "us": a}, {"op": "ihc_pre", "call": "out", "us": b}] for a, b in ((5.0, 6.0), (4.0, 7.0))]
    assert [(r["call"], r["us"]) for r in run.fastest(*tables)] == [("bound", 4.0), ("out", 6.0)]
