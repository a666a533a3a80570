"""The command line: what it prints, and one sentence with exit status 2 for what it cannot do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hccupy
from hccupy import cache, cli
from hccupy.ops import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
ROPE = ["q_heads=64", "kv_heads=8", "head_dim=128"]
SIZES = {
    "ihc_pre": ["hc=4", "hidden=6144"],
    "ihc_head": ["hc=4", "hidden=6144"],
    "ihc_post": ["hc=4", "hidden=6144"],
    "ihc_post_pre": ["hc=4", "hidden=6144"],
    "rope_norm_store_kv": ROPE,
    "rope_norm_store_kv_fp8": [*ROPE, "max_q_len=1"],
    "store_kv": ["kv_heads=8", "head_dim=128"],
    "zero_kv_tail": ["kv_heads=8", "head_dim=128"],
}


@pytest.fixture
def run(capsys):
    """(exit status, stdout, stderr) of a command."""

    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            cli.main(list(words))
        return (stopped.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(run):
    """The one sentence of a command that cannot be done."""

    def call(*words):
        status, out, err = run(*words)
        assert status == 2 and out == "", (status, out, err)
        assert err.startswith("hccupy: ") and err.endswith(".\n") and err.count("\n") == 1 and "Traceback" not in err, err
        return err

    return call


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0 and out == f"hccupy {hccupy.__version__}\n"


def test_as_a_module():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "hccupy", "--version"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"hccupy {hccupy.__version__}\n")


@pytest.mark.parametrize("words", [[], ["nothing"], ["explain"], ["cache"], ["cache", "shrink"], ["explain", "ihc_pre", "hc4"]])
def test_usage_errors(run, words):
    status, out, err = run(*words)
    assert status == 2 and out == "" and "usage: hccupy" in err


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("op", REGISTRY)
def test_explain(run, op, arch):
    """A model's sizes are enough: batch, pages and table have defaults."""
    status, out, err = run("explain", op, *SIZES.get(op, ["hidden=6144"]), "--arch", arch)
    assert status == 0 and err == "", err
    assert out.startswith(f"{op} on {arch}: variant ")
    for word in ("why ", "grid ", "block ", "shared memory ", "cluster ", "programmatic dependent launch ", "baked ", "moves ", "can run this"):
        assert word in out
    assert re.search(r"moves +[\d,]+ bytes", out)


def test_explain_takes_scalars_flags_and_optional_arrays(run):
    plain = run("explain", "ihc_pre", "hc=4", "hidden=64", "--arch", "90a")[1]
    normed = run("explain", "ihc_pre", "hc=4", "hidden=64", "rms_weight=True", "round_before_norm=False", "rms_eps=1e-6", "--arch", "90a")[1]
    assert "kHasRmsWeight=0" in plain and "kHasRmsWeight=1" in normed and "kRoundBeforeNorm=0" in normed
    assert "kXDtype=1 " in run("explain", "ihc_pre", "hc=4", "hidden=64", "--dtype", "float16", "--arch", "90a")[1]


@pytest.mark.parametrize(
    "words, parts",
    [
        (["ihc_prepost", "hc=4", "hidden=64"], ["ihc_prepost", "ihc_pre"]),
        (["ihc_pre", "hc=9", "hidden=6144"], ["ihc_pre: hc", "1 to 8", "got 9"]),
        (["ihc_pre", "hc=4", "hidden=-1"], ["ihc_pre: hidden"]),
        (["ihc_pre"], ["ihc_pre: hc, hidden", "sizes"]),
        (["ihc_pre", "hc=4"], ["ihc_pre: hidden"]),
        (["ihc_pre", "hc=4", "hidden=64", "width=3"], ["ihc_pre: width", "unknown word"]),
        (["ihc_pre", "hc=four", "hidden=64"], ["ihc_pre: hc", "'four'"]),
        (["ihc_pre", "hc=4.5", "hidden=64"], ["ihc_pre: hc", "4.5"]),
        (["ihc_pre", "hc=None", "hidden=64"], ["ihc_pre: hc", "None"]),
        (["ihc_pre", "hc=4", "hidden=64", "norm_eps=-1"], ["ihc_pre: norm_eps", "-1"]),
        (["ihc_pre", "hc=4", "hidden=64", "--dtype", "float64"], ["float64"]),
        (["ihc_pre", "hc=4", "hidden=64", "--dtype", "nonsense"], ["nonsense"]),
        (["rope_norm_store_kv", "q_heads=7", "kv_heads=2", "head_dim=64"], ["rope_norm_store_kv: "]),
        (["rope_norm_store_kv", "q_heads=8", "kv_heads=2", "head_dim=100"], ["rope_norm_store_kv: head_dim", "got 100"]),
        (["rope_norm_store_kv", "q_heads=8", "kv_heads=2", "head_dim=64", "rope_style=gptj"], ["rope_norm_store_kv: rope_style", "'gptj'"]),
        (["rope_norm_store_kv"], ["rope_norm_store_kv: "]),
    ],
)
def test_explain_refuses_with_one_sentence(refused, words, parts):
    text = refused("explain", *words, "--arch", "sm_90a")
    for part in parts:
        assert part in text


def test_explain_unknown_architecture(refused):
    assert "sm_70" in refused("explain", "ihc_pre", "hc=4", "hidden=64", "--arch", "sm_70")


def test_explain_without_a_gpu(refused, monkeypatch):
    monkeypatch.setattr("hccupy.explain.here", lambda: None)
    assert "--arch" in refused("explain", "ihc_pre", "hc=4", "hidden=64")


# ---- supports(): the same question from Python -----------------------------------------------------------------


def test_supports_says_why():
    ok, why = hccupy.supports("ihc_pre", hc=4, hidden=6144, arch="sm_90a")
    assert ok and "sm_90a" in why
    ok, why = hccupy.supports("ihc_pre", hc=9, hidden=6144, arch="sm_90a")
    assert not ok and "hc: expected 1 to 8, got 9" in why
    ok, why = hccupy.supports("ihc_pre", hc=4, hidden=64, dtype="float64", arch="sm_90a")
    assert not ok and "float64" in why


@pytest.mark.parametrize("q_heads, kv_heads", [(8, 8), (24, 8), (40, 8), (48, 8), (7, 1), (12, 1), (24, 1)])
@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
def test_supports_every_group_size(op, q_heads, kv_heads):
    for dim in (64, 72, 80, 96, 128, 192, 256):
        ok, why = hccupy.supports(op, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, arch="sm_80", **({"max_q_len": 5} if op.endswith("8") else {}))
        assert ok, why


# ---- cache ------------------------------------------------------------------------------------------------------


def test_cache_info_and_clear(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "cache"))
    assert "0 kernels, 0 bytes, usable" in run("cache", "info")[1]
    cache.get("a" * 64, lambda: b"x" * 1000)
    status, out, _ = run("cache", "info")
    assert status == 0 and str(tmp_path / "cache") in out and "1 kernels, 1,032 bytes, usable" in out
    assert run("cache", "clear")[1] == f"1 kernels removed from {tmp_path / 'cache'}\n"
    assert "0 kernels" in run("cache", "info")[1]


def test_cache_info_of_a_directory_that_cannot_be(run, monkeypatch):
    monkeypatch.setenv("HCCUPY_CACHE_DIR", "/proc/nobody/cache")
    status, out, _ = run("cache", "info")
    assert status == 0 and "0 kernels" in out and "not usable" in out


def test_cache_needs_core_dependencies_only(run, monkeypatch):
    """A plain installation has no platformdirs: a sentence, not a traceback."""
    monkeypatch.delenv("HCCUPY_CACHE_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    for action in ("info", "clear"):
        status, out, err = run("cache", action)
        assert status in (0, 2) and (out + err).count("\n") == 1 and "Traceback" not in err
