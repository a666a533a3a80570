"""The commands that run on a GPU (tests.sanitize, tests.soak, tests.guards) tried without one: what they parse, what they call, that they see a fault."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import hccupy
from hccupy import arch, build
from hccupy.bench.run import imagined, outputs_for
from hccupy.ops import REGISTRY
from hccupy.plan import make

from . import guards, rope_cases, sanitize, soak, soak_models
from .adapters import CPU

OUTPUT = """========= COMPUTE-SANITIZER
== call ihc_pre sm90_stream : ihc_pre stream
========= Error: Race reported between Write access at hccupy::store_partials(float *, float4, int)+0x60b0 in sm90_ihc.cuh:221
=========     and Read access at hccupy::StreamSums::push_sums(int) const::[lambda(int) (instance 1)]::operator ()(int) const+0xfb0 in sm90_stream_sums.cuh:96 [3 hazards]
=========
========= Error: Race reported between Write access at hccupy::store_partials(float *, float4, int)+0x70b0 in sm90_ihc.cuh:221
=========     and Read access at hccupy::StreamSums::push_sums(int) const::[lambda(int) (instance 1)]::operator ()(int) const+0xfb0 in sm90_stream_sums.cuh:96 [3 hazards]
=========
== call ihc_post portable : ihc_post odd
{more}== done 0
========= ERROR SUMMARY: 2 errors
"""
INVALID = """========= Invalid __global__ write of size 4 bytes
=========     at ihc_post+0x90 in ihc_post.cu:87
=========     by thread (3,0,0) in block (0,0,0)
=========
"""


def test_findings_are_attributed_and_only_the_known_ones_allowed():
    found = sanitize.judge("racecheck", 33, OUTPUT.format(more=""), 1.0)
    (race,) = found["findings"]
    assert found["ok"] and found["calls"] == 2 and race["allowed"] and race["count"] == 2
    assert (race["op"], race["variant"], race["functions"]) == ("ihc_pre", "sm90_stream", ["push_sums", "store_partials"])
    template = OUTPUT.format(more="").replace("hccupy::store_partials(", "void hccupy::store_partials<(int)1>(")
    assert sanitize.parse(template)["findings"][0]["functions"] == ["push_sums", "store_partials"]
    assert race["lines"] == ["sm90_ihc.cuh:221", "sm90_stream_sums.cuh:96"]
    assert not sanitize.judge("synccheck", 33, OUTPUT.format(more=""), 1.0)["ok"]  # the same words of another tool
    elsewhere = OUTPUT.format(more="").replace("sm90_stream :", "portable :")
    assert not sanitize.judge("racecheck", 33, elsewhere, 1.0)["ok"]
    other = OUTPUT.format(more="").replace("push_sums", "make_gates")
    assert not sanitize.judge("racecheck", 33, other, 1.0)["ok"]
    found = sanitize.judge("racecheck", 33, OUTPUT.format(more=INVALID), 1.0)
    assert not found["ok"] and [f["call"] for f in found["findings"] if not f["allowed"]] == ["ihc_post odd"]
    assert found["findings"][1]["lines"] == ["ihc_post.cu:87"] and "thread (3,0,0)" in " ".join(found["findings"][1]["text"])


def test_what_is_not_ok():
    """Wrong results, a tool that stopped, an exit status that nothing explains."""
    clean = "========= COMPUTE-SANITIZER\n== call ihc_post portable : ihc_post odd\n== done 0\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.judge("memcheck", 0, clean, 1.0)["ok"]
    assert not sanitize.judge("memcheck", 0, clean.replace("== done 0\n", ""), 1.0)["ok"]
    assert not sanitize.judge("memcheck", 0, clean.replace("== done", "== wrong AssertionError: y\n== done"), 1.0)["ok"]
    assert not sanitize.judge("memcheck", 1, clean, 1.0)["ok"] and not sanitize.judge("memcheck", -1, clean, 1.0)["ok"]


def test_the_sanitizers_calls_reach_every_variant():
    reached, missing = sanitize.coverage(arch.named("sm_90a"))
    assert not missing and len(reached) == len(hccupy.ops.REGISTRY)
    ways = {tuple(c.plan(arch.named("sm_90a")).defines[k] for k in ("kBulk", "kMany", "kTogether")) for c in sanitize.calls() if c.op.startswith("rope")}
    assert ways == {(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1)}
    assert len({c.name for c in sanitize.calls()}) == len(sanitize.calls())


@pytest.mark.parametrize("call", [c for c in sanitize.calls() if not re.search("many|two by two|streaming", c.name)], ids=lambda c: c.name.replace(" ", "-"))
def test_the_sanitizers_comparisons_hold_on_the_cpu(call):
    sanitize.compare(call, call.arguments(), CPU[0])


def run_soak(monkeypatch, capsys, tmp_path, minutes="0.02"):
    words = ["tests.soak", "--device", "cpu", "--minutes", minutes, "--threads", "2", "--seed", "3", "--report", str(tmp_path / "soak.json")]
    monkeypatch.setattr("sys.argv", words)
    return soak.main()


def test_the_soak_on_the_cpu_path(monkeypatch, capsys, tmp_path):
    import json

    assert run_soak(monkeypatch, capsys, tmp_path) == 0
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["ok"] and report["calls"] and not report["differences"] and {"commit", "kernels_digest", "versions"} <= report.keys()


FAULTS = {
    "ihc_post": lambda y, a: y.reshape(-1)[-1:].add_(1),
    "ihc_pre": lambda r, a: r[1].reshape(-1)[-1:].mul_(1.001),
    "rope_norm_store_kv": lambda q, a: a["key_cache"].view(torch.int16)[-1].fill_(3),
    "store_kv": lambda r, a: a["cache"].view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[a["cache"].element_size()])[0].fill_(1),
}


@pytest.mark.parametrize("op", FAULTS)
def test_the_soak_sees_a_fault(op, monkeypatch, capsys, tmp_path):
    """One element, one gate, one page of a cache."""
    real = getattr(hccupy, op)

    def faulty(**words):
        result = real(**words)
        if all(v.numel() for v in words.values() if isinstance(v, torch.Tensor)):
            FAULTS[op](result, words)
        return result

    monkeypatch.setattr(hccupy, op, faulty)
    monkeypatch.setattr(soak.Model, "ops", lambda self: (op,) if op in REAL[self.kind] else ())
    found = [m for m in soak.models(np.random.default_rng(5), 40, "cpu") if op in REAL[m.kind] and not m.words.get("fp8")]
    tested = soak.Soak(found, "cpu", 0)
    for number in range(6):
        tested.one(number, torch.Generator(), True)
    assert tested.differences and all(op in d["call"] for d in tested.differences)


REAL = {"ihc": soak_models.IHC, "rope": ("rope_norm_store_kv",), "store": ("store_kv", "zero_kv_tail")}


@pytest.mark.parametrize("op", guards.OPS)
def test_the_kernels_compile_without_their_guards(op):
    spec = REGISTRY[op]
    cases = {c.name: c for c in spec.cases}
    assert cases.keys() >= set(guards.CASES)
    made = make(spec, imagined(spec, cases[guards.CASES[0]]), arch.named("sm_90a"))
    key, files, with_guards = build.identity(made), build.sources(), build.compile_plan(made)[0]
    with guards.kernels(guards.without(files)):
        assert build.identity(made) != key and build.compile_plan(made)[0] != with_guards
    assert build.identity(made) == key and build.sources() is files


def test_guards_compare_what_a_call_writes(rng):
    """A kernel that writes nothing after one that wrote everything is no equal of it."""
    given = rope_cases.build(rng, lengths=(11, 9), new=(3, 1), dim=64, q_heads=4, kv_heads=2, block_size=16, policy="norm_then_rope")
    device = {k: CPU[1].put(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    outs = outputs_for(REGISTRY["rope_norm_store_kv"], hccupy.rope_norm_store_kv(**device))
    wrote = guards.results(device, outs, lambda: hccupy.rope_norm_store_kv(**device, **outs))
    again = guards.results(device, outs, lambda: hccupy.rope_norm_store_kv(**device, **outs))
    nothing = guards.results(device, outs, lambda: None)
    assert all(map(torch.equal, wrote, again)) and not any(map(torch.equal, wrote, nothing))
