"""Bundles of cubins: made without a GPU, used without NVRTC, never used when stale, damaged or open to anybody."""

from __future__ import annotations

import hashlib
import json
import logging
import sys

import numpy as np
import pytest

import hccupy
from hccupy import arch, build, bundle, cache, cli, cuda, plan
from hccupy.errors import CompileError, NoGpuError
from hccupy.ops import REGISTRY

from . import fakes
from .test_plan import bound_of, small_cases

pytest.importorskip("cupy", reason="NVRTC comes with CuPy: pip install hccupy[cuda13]")
CUBIN = b"\x7fELF" + bytes(range(256))
HERE = build.sources_digest().hex()


@pytest.fixture(autouse=True)
def fresh(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(bundle, "_warned", set())
    bundle._digests.cache_clear()
    caplog.set_level(logging.INFO, "hccupy")
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def post():
    spec = REGISTRY["ihc_post"]
    return plan.make(spec, bound_of(spec, spec.make_inputs(small_cases(spec)[1], np.random.default_rng(0))), arch.named("sm_90a"))


@pytest.fixture
def folder(tmp_path, monkeypatch, post):
    """A bundle that holds `post` as CUBIN."""
    path = tmp_path / "bundle"
    bundle.write(path, [(build.identity(post), post, CUBIN)], HERE, "13.5")
    monkeypatch.setenv("HCCUPY_KERNEL_BUNDLE", str(path))
    return path


def no_nvrtc(monkeypatch):
    def missing():
        raise NoGpuError("hccupy: no NVRTC was found.")

    monkeypatch.setattr(cuda, "nvrtc_version", missing)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---- looked up --------------------------------------------------------------------------------------------------


def test_bundle_comes_before_cache_and_compiler(folder, post, monkeypatch):
    monkeypatch.setattr(build, "compile_plan", lambda plan: pytest.fail("compiled"))
    assert build.binary(post) == CUBIN
    assert not cache.entries()


def test_bundle_needs_no_nvrtc(folder, post, monkeypatch, caplog):
    no_nvrtc(monkeypatch)
    monkeypatch.setenv("HCCUPY_NO_JIT", "1")
    assert build.binary(post) == CUBIN and not warnings(caplog)


def test_identity_is_the_key_but_for_the_compiler(post, monkeypatch):
    identity, key = build.identity(post), build.key(post)
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: (99, 0))
    assert build.identity(post) == identity and build.key(post) != key


def test_a_kernel_the_bundle_lacks_is_compiled(folder, post, caplog):
    spec = REGISTRY["ihc_post"]
    other = plan.make(spec, bound_of(spec, spec.make_inputs(small_cases(spec)[1], np.random.default_rng(0))), arch.named("sm_80"))
    assert build.binary(other) != CUBIN and not warnings(caplog)
    assert len([p for p in cache.entries() if p.suffix == ".cubin"]) == 1


def test_whole_call_from_a_bundle(monkeypatch, tmp_path):
    """No NVRTC, no compiling: the architecture comes from the device, the kernel from the bundle."""
    gpu = fakes.install(monkeypatch, tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["build", "ihc_post", "hc=4", "hidden=64", "--dtype", "float32", "--arch", "80", "-o", str(tmp_path / "bundle")])
    before = len(build.compiled)
    monkeypatch.setenv("HCCUPY_KERNEL_BUNDLE", str(tmp_path / "bundle"))
    monkeypatch.setenv("HCCUPY_NO_JIT", "1")
    no_nvrtc(monkeypatch)
    for tokens in (1, 300, 20_000):
        hccupy.ihc_post(*fakes.post(tokens))
    assert len(gpu.launches) == 3 and len(build.compiled) == before
    with pytest.raises(CompileError, match=r"ihc_post: kernel: .*sm_80.*hccupy build ihc_post hc=4 hidden=96 --arch 80 -o DIR"):
        hccupy.ihc_post(*fakes.post(hidden=96))
    arch._measured.cache_clear()


def stale(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace(HERE, "0" * 64))


BROKEN = {
    "stale": (stale, "other kernel sources"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "FileNotFoundError"),
    "half a manifest": (lambda p: (p / "manifest.json").write_text('{"schema": "hccupy-'), "JSONDecodeError"),
    "another schema": (lambda p: (p / "manifest.json").write_text('{"schema": "x"}'), "schema"),
    "no entries": (lambda p: (p / "manifest.json").write_text(json.dumps({"schema": bundle.SCHEMA})), "entries"),
    "odd entries": (lambda p: (p / "manifest.json").write_text(json.dumps({"schema": bundle.SCHEMA, "entries": [3]})), "damaged"),
    "open to anybody": (lambda p: p.chmod(0o777), "anybody may write"),
    "damaged cubin": (lambda p: next(p.glob("*.cubin")).write_bytes(CUBIN[:-1]), "damaged kernel"),
    "missing cubin": (lambda p: next(p.glob("*.cubin")).unlink(), "lacks a kernel"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_used_costs_one_warning(folder, post, caplog, how):
    spoil, words = BROKEN[how]
    spoil(folder)
    for _ in range(3):
        assert build.binary(post).startswith(b"\x7fELF") and build.binary(post) != CUBIN
    assert len(warnings(caplog)) == 1 and words in warnings(caplog)[0] and str(folder) in warnings(caplog)[0]


def test_no_such_directory(post, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("HCCUPY_KERNEL_BUNDLE", str(tmp_path / "nowhere"))
    assert build.binary(post) and len(warnings(caplog)) == 1


# ---- HCCUPY_NO_JIT ----------------------------------------------------------------------------------------------


def test_no_jit_says_what_to_do(post, monkeypatch):
    monkeypatch.setenv("HCCUPY_NO_JIT", "1")
    for prepare in (lambda: None, lambda: no_nvrtc(monkeypatch)):
        prepare()
        with pytest.raises(CompileError) as error:
            build.binary(post)
        for word in ("ihc_post", "sm_90a", "HCCUPY_NO_JIT=1", "HCCUPY_KERNEL_BUNDLE", "hccupy build ihc_post hc=4 hidden=64 --arch 90a -o DIR"):
            assert word in str(error.value), word


def test_no_jit_uses_the_cache(post, monkeypatch):
    made = build.binary(post)
    monkeypatch.setenv("HCCUPY_NO_JIT", "1")
    assert build.binary(post) == made


def test_no_jit_of_something_that_is_no_op(monkeypatch):
    from hccupy import clusters

    monkeypatch.setenv("HCCUPY_NO_JIT", "1")
    with pytest.raises(CompileError, match="clusters: kernel.*run: hccupy build --arch 90a -o DIR"):
        build.binary(clusters.probe(arch.named("sm_90a"), 8))


def test_without_nvrtc_and_with_jit_the_error_is_nvrtcs(post, monkeypatch):
    no_nvrtc(monkeypatch)
    with pytest.raises(NoGpuError, match="no NVRTC"):
        build.binary(post)


# ---- written ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make(capsys, tmp_path):
    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["build", *words, "-o", str(tmp_path / "made")])
        return (stopped.value.code, *capsys.readouterr())

    return call


def test_command(make, tmp_path):
    status, out, err = make("ihc_post", "hc=4", "hidden=64", "tokens=8", "--arch", "90a,100a")
    assert status == 0 and err == "" and f"HCCUPY_KERNEL_BUNDLE={tmp_path / 'made'}" in out
    whole = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert whole["schema"] == bundle.SCHEMA and whole["kernels"] == HERE and whole["hccupy"] == hccupy.__version__
    assert whole["nvrtc"] == ".".join(map(str, cuda.nvrtc_version()))
    assert {e["arch"] for e in whole["entries"]} == {"sm_90a", "sm_100a"}
    assert {e["op"] for e in whole["entries"]} == {"ihc_post", "clusters"}  # the second: how many clusters an sm_90a die holds
    for e in whole["entries"]:
        assert set(e) == {"key", "op", "variant", "arch", "sha256"}
        assert hashlib.sha256((tmp_path / "made" / f"{e['key']}.cubin").read_bytes()).hexdigest() == e["sha256"]
    assert {p.name for p in (tmp_path / "made").iterdir()} == {"manifest.json", *(f"{e['key']}.cubin" for e in whole["entries"])}


def test_the_same_command_gives_the_same_bytes(make, tmp_path):
    words = ("ihc_post", "hc=4", "hidden=64", "tokens=8", "--arch", "80")
    make(*words)
    first = {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()}
    cache.clear()
    make(*words)
    assert {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()} == first


def test_a_bundle_is_added_to(make, tmp_path, monkeypatch):
    make("ihc_post", "hc=4", "hidden=64", "tokens=8", "--arch", "80")
    count = len(bundle.manifest(tmp_path / "made")["entries"])
    make("ihc_post", "hc=4", "hidden=128", "tokens=8", "--arch", "80")
    assert len(bundle.manifest(tmp_path / "made")["entries"]) == count + 1
    monkeypatch.setattr(build, "sources_digest", lambda: b"edited sources")
    make("ihc_post", "hc=4", "hidden=128", "tokens=8", "--arch", "80")  # nothing of the old sources stays
    assert len(bundle.manifest(tmp_path / "made")["entries"]) == len(list((tmp_path / "made").glob("*.cubin"))) == count


@pytest.mark.parametrize("words, status, part", [(["--arch", "70"], 2, "sm_70"), ([], 2, "--arch"), (["nothing", "--arch", "80"], 2, "nothing")])
def test_command_refuses(make, words, status, part):
    got, out, err = make(*words)
    assert got == status and out == "" and part.removeprefix("sm_") in err


def test_what_build_writes_by_default(monkeypatch):
    """Without words: every op. (Asked, not compiled: that takes a minute.)"""
    asked = []
    monkeypatch.setattr(sys.modules["hccupy.warmup"], "plans", lambda requests, on: asked.append(([op for op, _, _ in requests], on.name)) or [])
    monkeypatch.setattr(bundle, "write", lambda *a: 0)
    monkeypatch.setattr("hccupy.clusters.probe", lambda *a: pytest.skip("unreachable"))
    with pytest.raises(SystemExit):
        cli.main(["build", "--arch", "80,100a", "-o", "nowhere"])
    assert [name for _, name in asked] == ["sm_80", "sm_100a"] and all(set(ops) == set(REGISTRY) for ops, _ in asked)
