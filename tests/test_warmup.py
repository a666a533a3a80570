"""Warm-up finds every binary that calls of some sizes can need, and compiles no more than those."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

import hccupy
from hccupy import arch, build, cache, cli, explain, plan
from hccupy.errors import ArgumentError, CompileError, NoGpuError, ShapeError, UnknownOpError
from hccupy.ops import REGISTRY
from hccupy.spec import Launch

from . import fakes

pytest.importorskip("cupy", reason="NVRTC comes with CuPy: pip install hccupy[cuda13]")
warmup = sys.modules["hccupy.warmup"]  # hccupy.warmup is the function
ARCHS = ("sm_80", "sm_90a", "sm_100a")
MODEL = {"hidden": 6144, "hc": 4}
ROPE = {"q_heads": 64, "kv_heads": 8, "head_dim": 128}
SIZES = {
    "ihc_pre": MODEL,
    "ihc_head": MODEL,
    "ihc_post": MODEL,
    "ihc_post_pre": MODEL,
    "rope_norm_store_kv": ROPE,
    "rope_norm_store_kv_fp8": ROPE,
    "store_kv": {"kv_heads": 8, "head_dim": 128},
    "zero_kv_tail": {"kv_heads": 8, "head_dim": 128},
}


def binaries(plans):
    return {(p.source, p.entry, p.flags) for p in plans}


@pytest.mark.parametrize("target", ARCHS)
@pytest.mark.parametrize("op", SIZES)
def test_any_call_is_covered(op, target, rng):
    """200 random calls of such sizes: counts, optional arrays, policies, dtypes of weights."""
    spec, on = REGISTRY[op], arch.named(target)
    known = binaries(warmup.walk(op, SIZES[op], "bfloat16", on))
    lengths = {"tokens": 20_000, "requests": 2000, "block_size": 0, "positions": 9000, "num_blocks": 5000, "max_blocks": 300}
    for _ in range(200):
        words = dict(SIZES[op])
        for name, most in lengths.items():
            if any(a.name == name for a in spec.axes):
                small = int(np.exp(rng.uniform(0, np.log(most)))) if most else 0
                words[name] = int(2 ** rng.integers(0, 11)) if name == "block_size" else small
        if op.startswith("rope"):
            words["qk_norm_policy"] = str(rng.choice(["none", "rope_then_norm", "norm_then_rope"]))
            words["q_norm_weight"] = words["k_norm_weight"] = words["qk_norm_policy"] != "none"
        elif any(p.name == "rms_weight" for p in spec.args):
            words["rms_weight"] = bool(rng.integers(2))
        if op.endswith("fp8"):
            words["is_prefill"] = bool(rng.integers(2))
            words["max_q_len"] = int(rng.integers(1, 999)) if words["is_prefill"] or rng.integers(2) else None
        bound = explain.imagine(spec, words)
        weight = "float32" if rng.integers(2) else "bfloat16"
        dtypes = {n: weight if n.endswith("_weight") else d for n, d in bound.dtypes.items()}
        made = plan.make(spec, replace(bound, dtypes=dtypes), on)
        assert (made.source, made.entry, made.flags) in known, words


@pytest.mark.parametrize("op", SIZES)
def test_few_and_distinct(op):
    for target in ARCHS:
        found = warmup.walk(op, SIZES[op], "bfloat16", arch.named(target))
        assert len(binaries(found)) == len(found) <= 60


def test_every_threshold_of_a_launch_function_is_found(monkeypatch):
    """Binaries that change at odd counts, one of them for a narrow range only."""
    spec = REGISTRY["ihc_post"]

    def launch(b, on):
        n = b.axes["tokens"]
        return Launch((1, 1, 1), (32, 1, 1), defines={"kKind": sum(n >= t for t in (7, 130, 131, 1_000, 70_001, 3_000_000))})

    monkeypatch.setitem(REGISTRY, "ihc_post", replace(spec, variants=(replace(spec.variants[0], launch=launch),)))
    found = warmup.walk("ihc_post", MODEL, "bfloat16", arch.named("sm_80"))
    assert sorted(p.defines["kKind"] for p in found) == list(range(7))


def test_the_most_shared_memory_of_a_binary_is_kept(monkeypatch):
    spec = REGISTRY["ihc_post"]
    launch = lambda b, on: Launch((1, 1, 1), (32, 1, 1), smem=min(b.axes["tokens"], 9999))
    monkeypatch.setitem(REGISTRY, "ihc_post", replace(spec, variants=(replace(spec.variants[0], launch=launch),)))
    (found,) = warmup.walk("ihc_post", MODEL, "bfloat16", arch.named("sm_80"))
    assert found.launch.smem == 9999


def test_words_that_are_given_stay():
    on = arch.named("sm_90a")
    both = warmup.walk("ihc_pre", MODEL, "bfloat16", on)
    plain = warmup.walk("ihc_pre", {**MODEL, "rms_weight": False}, "bfloat16", on)
    normed = warmup.walk("ihc_pre", {**MODEL, "rms_weight": True}, "bfloat16", on)
    assert {p.defines["kHasRmsWeight"] for p in both} == {0, 1}
    assert binaries(both) == binaries(plain) | binaries(normed) and not binaries(plain) & binaries(normed)
    assert len(warmup.walk("ihc_pre", {**MODEL, "rms_weight": False, "tokens": 8}, "bfloat16", on)) == 1
    policies = {p.defines["kQkNormPolicy"] for p in warmup.walk("rope_norm_store_kv", {**ROPE, "qk_norm_policy": "norm_then_rope"}, "bfloat16", on)}
    assert policies == {2}


@pytest.mark.parametrize(
    "op, sizes, error, words",
    [
        ("ihc_prepost", MODEL, UnknownOpError, "ihc_pre"),
        ("ihc_pre", {"hidden": 64}, ShapeError, "hc"),
        ("ihc_pre", {**MODEL, "hc": 9}, ShapeError, "1 to 8, got 9"),
        ("ihc_pre", {**MODEL, "width": 1}, ArgumentError, "width"),
        ("ihc_pre", {**MODEL, "norm_eps": -1.0}, ArgumentError, "norm_eps"),
        ("rope_norm_store_kv", {**ROPE, "qk_norm_policy": "both"}, ArgumentError, "qk_norm_policy"),
        ("rope_norm_store_kv", {**ROPE, "qk_norm_policy": "none", "q_norm_weight": True}, ArgumentError, "q_norm_weight"),
    ],
)
def test_refuses_what_the_op_refuses(op, sizes, error, words):
    with pytest.raises(error, match=words):
        hccupy.warmup(op, arch="sm_90a", **sizes)


# ---- compiling and loading --------------------------------------------------------------------------------------


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "cache"))


def test_compiles_into_the_cache_without_a_gpu(folder):
    before = len(build.compiled)
    count = hccupy.warmup("ihc_post", hc=4, hidden=64, dtype="float32", arch="90a")
    assert count == len([p for p in cache.entries() if p.suffix == ".cubin"]) == len(build.compiled) - before
    assert hccupy.warmup("ihc_post", hc=4, hidden=64, dtype="float32", arch="90a") == count == len(build.compiled) - before


def test_without_a_gpu_an_architecture_is_needed(monkeypatch):
    monkeypatch.setattr(warmup, "here", lambda: None)
    with pytest.raises(NoGpuError, match="--arch"):
        hccupy.warmup("ihc_post", hc=4, hidden=64)


def test_loads_on_the_gpu(monkeypatch, tmp_path):
    """Afterwards no call of such sizes compiles or loads anything."""
    gpu = fakes.install(monkeypatch, tmp_path)
    count = hccupy.warmup("ihc_post", hc=4, hidden=64, dtype="float32")
    assert count == len(gpu.loads)
    for tokens in (1, 2, 77, 256, 257, 3000, 50_000):
        hccupy.ihc_post(*fakes.post(tokens))
    assert len(gpu.loads) == count and len(gpu.launches) == 7
    arch._measured.cache_clear()


# ---- the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys, folder):
    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["warmup", *words])
        return (stopped.value.code, *capsys.readouterr())

    return call


def test_command(run):
    status, out, err = run("ihc_post", "hc=4", "hidden=64", "tokens=3", "--dtype", "float32", "--arch", "80,90a")
    assert status == 0 and err == ""
    lines = out.splitlines()
    assert [line.split(" in ")[0] for line in lines] == ["1 kernels for sm_80 ready", "1 kernels for sm_90a ready"]
    assert all(line.endswith("1 of them compiled") for line in lines)


def test_command_without_rich(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert run("ihc_post", "hc=4", "hidden=64", "tokens=3", "--arch", "80")[0] == 0


@pytest.mark.parametrize(
    "words, part",
    [
        ([], "--all"),
        (["ihc_post", "--hidden", "64"], "got both"),
        (["wide=3", "--hidden", "64"], "got wide"),
        (["--hidden", "64", "--dtype", "float64"], "float64"),
        (["ihc_post", "--arch", "70"], "'70'"),
    ],
)
def test_command_refuses_with_one_sentence(run, words, part):
    status, out, err = run("--arch", "90a", *words)
    assert status == 2 and out == "" and part in err and err.count("\n") == 1, err


def test_usage_errors(run):
    for words in (["--heads", "64"], ["--heads", "a/b"], ["--hidden", "wide"], ["ihc_post", "hc4", "--arch", "80"]):
        assert run(*words)[0] == 2


def test_requests_of_a_model():
    """--hidden asks for the iHC ops, --heads for those with heads; e4m3 caches as well; extra words go where they are known."""

    def ask(**words):
        given = {"op": None, "sizes": {}, "dtype": "bfloat16", "hidden": None, "hc": 4, "heads": None, "head_dim": 128, "everything": False}
        return warmup.requests(**{**given, **words})

    wide = ask(hidden=4096, hc=2)
    assert {op for op, _, _ in wide} == {"ihc_pre", "ihc_head", "ihc_post", "ihc_post_pre"}
    assert all(sizes == {"hidden": 4096, "hc": 2} for _, sizes, _ in wide)
    heads = ask(heads=(48, 6), head_dim=96, sizes={"rope_style": "interleaved"})
    assert {(op, dtype) for op, _, dtype in heads} == {
        ("rope_norm_store_kv", "bfloat16"),
        ("rope_norm_store_kv_fp8", "bfloat16"),
        *((op, dtype) for op in ("store_kv", "zero_kv_tail") for dtype in ("bfloat16", "float8_e4m3fn")),
    }
    assert ("rope_norm_store_kv", {"q_heads": 48, "kv_heads": 6, "head_dim": 96, "rope_style": "interleaved"}, "bfloat16") in heads
    everything = ask(everything=True)
    assert {op for op, _, _ in everything} == set(REGISTRY)
    assert ask(everything=True, hidden=4096) != everything == ask(hidden=6144, heads=(64, 8))
    for op, sizes, dtype in everything:
        assert warmup.walk(op, sizes, dtype, arch.named("sm_120a"))


def test_command_in_processes(run, capsys):
    """The same kernels as one after the other, each compiled once; a second time there is nothing to do."""
    words = ("zero_kv_tail", "kv_heads=2", "head_dim=64", "--arch", "80,90a")
    here = len(build.compiled)
    status, out, _ = run(*words, "--jobs", "2")
    assert len(build.compiled) == here  # in other processes: eight kernels are worth two of them
    counts = [int(line.split()[0]) for line in out.splitlines()]
    assert status == 0 and sum(counts) == len([p for p in cache.entries() if p.suffix == ".cubin"])
    assert [line.endswith(f"{n} of them compiled") for n, line in zip(counts, out.splitlines(), strict=True)] == [True, True]
    assert run(*words)[1].count(" 0 of them compiled") == 2


def test_processes_compile_into_the_cache(folder):
    made = warmup.walk("store_kv", {"kv_heads": 2, "head_dim": 64}, "float32", arch.named("sm_90a"))[:3]
    assert sorted(warmup.compile_in_processes(made, 2)) == [1] * len(made)
    assert all(build.at_hand(p) for p in made)
    assert sorted(warmup.compile_in_processes(made, 2)) == [0] * len(made)


def test_without_a_cache_each_kernel_is_compiled_once(run, tmp_path, monkeypatch):
    """Nothing can be kept between processes: none are started, and nothing is compiled ahead only to be thrown away."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(warmup, "compile_in_processes", lambda *a: pytest.fail("processes without a cache"))
    before = len(build.compiled)
    status, out, _ = run("zero_kv_tail", "kv_heads=2", "head_dim=64", "--arch", "90a", "--jobs", "2")
    count = int(out.split()[0])
    assert status == 0 and count > 7 and len(build.compiled) - before == count
    assert out.strip().endswith(f"{count} of them compiled")


def test_a_kernel_that_does_not_compile_stops_the_processes(folder):
    made = warmup.walk("store_kv", {"kv_heads": 2, "head_dim": 64}, "float32", arch.named("sm_90a"))[0]
    broken = [replace(made, defines={**made.defines, "kParts": f"no_{i}"}) for i in range(6)]
    with pytest.raises(CompileError, match="store_kv"):
        list(warmup.compile_in_processes(broken, 2))


@pytest.mark.parametrize("kernels, jobs, expected", [(0, None, 1), (7, None, 1), (400, 3, 3), (12, 64, 3), (1, 8, 1)])
def test_K10_workers(kernels, jobs, expected, monkeypatch):
    monkeypatch.setattr(warmup.os, "sched_getaffinity", lambda pid: range(64))
    assert warmup.workers(kernels, jobs) == expected
