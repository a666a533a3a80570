"""What SECURITY.md promises, beside what test_cache.py and test_bundle.py show: words never become code, nothing is fetched, files stay where they are."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hccupy
from hccupy import arch, build, bundle, cache, cli, errors, plan
from hccupy.ops import REGISTRY

from . import audit, fakes
from .test_plan import OPS, bound_of, small_cases

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "hccupy").rglob("*.py"))


def calls_in(path):
    """(name, node) of every call in a file: f(...), module.f(...)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


# ---- no code from outside -----------------------------------------------------------------------------------------


def test_nothing_is_unpickled_or_fetched():
    """No module that unpickles or opens a connection is imported anywhere in the package."""
    forbidden = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "socket", "ssl", "http", "urllib", "requests", "httpx", "ftplib", "webbrowser"}
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            assert not forbidden & {n.split(".")[0] for n in names}, f"{path.name}: {names}"
        assert not any(name in ("torch.load", "np.load", "numpy.load") for name, _ in calls_in(path)), path.name


def test_code_is_made_in_four_places_from_words_of_the_specs():
    """eval of axis expressions (with no builtins), exec of the short way's functions and of signatures. No shell anywhere."""
    found = sorted(
        (path.relative_to(ROOT).as_posix(), name) for path in PACKAGE for name, _ in calls_in(path) if name in ("eval", "exec", "os.system", "os.popen")
    )
    assert found == [("hccupy/api.py", "exec"), ("hccupy/check.py", "eval"), ("hccupy/repeat.py", "exec"), ("hccupy/torch_ops.py", "eval")]
    for path in PACKAGE:
        for name, node in calls_in(path):
            if name == "eval":
                assert "{'__builtins__': {}}" in ast.unparse(node)
            assert not any(k.arg == "shell" for k in node.keywords), path.name
    words = {e for spec in REGISTRY.values() for a in spec.arrays if isinstance(a.axes, tuple) for e in a.axes}
    assert all(re.fullmatch(r"[a-z0-9_+*]+", w) for w in words)
    names = {a.name for spec in REGISTRY.values() for a in (*spec.params, *spec.outputs)}
    assert all(n.isidentifier() for n in names)


@pytest.mark.parametrize("op", OPS)
def test_only_integers_reach_the_compiler(op):
    """Every -D of every case is a k-word and an integer; nothing else depends on the call."""
    spec = REGISTRY[op]
    for case in spec.cases:
        if case.name.startswith("bench"):
            continue
        bound = bound_of(spec, spec.make_inputs(case, np.random.default_rng(0)))
        for target in arch.TABLE:
            made = plan.make(spec, bound, target)
            assert all(re.fullmatch(r"-Dk[A-Z][A-Za-z0-9]*=-?\d+", flag) for flag in made.flags), made.flags
            rest = set(build.options(made)) - set(made.flags)
            assert rest == {f"-arch={target.name}", "-std=c++17", "-default-device", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"}
            assert made.source in build.sources() and "/" not in made.source


EVIL = ["x; rm -rf /", "0) system(", "$(id)", "../../etc/passwd", "\n#include <x>", "__import__('os').system('id')", "1 -I/tmp", "norm\0then"]


@pytest.mark.parametrize("word", EVIL)
def test_words_of_a_call_are_checked_against_lists(word, rng):
    """A choice, a flag, a dtype: what is not in the list is an error that shows the word, and compiles nothing."""
    given = REGISTRY["rope_norm_store_kv"].make_inputs(small_cases(REGISTRY["rope_norm_store_kv"])[0], rng)
    for name in ("qk_norm_policy", "rope_style", "tail", "norm_eps", "null_block"):
        with pytest.raises(errors.ArgumentError, match=name):
            hccupy.rope_norm_store_kv(**{**given, name: word})
    with pytest.raises(errors.HccupyError):
        hccupy.warmup("ihc_post", hc=4, hidden=64, dtype=word, arch="sm_90a")
    with pytest.raises(errors.HccupyError):
        hccupy.warmup("ihc_post", hc=4, hidden=word, arch="sm_90a")
    with pytest.raises(errors.ArgumentError):
        arch.named(word)


@pytest.mark.parametrize("word", EVIL)
def test_words_of_the_command_line_too(word, capsys, monkeypatch, tmp_path):
    """Exit status 2 and a sentence; no traceback, nothing written."""
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "cache"))
    for words in (
        ["explain", word], ["explain", "ihc_pre", f"hidden={word}", "--arch", "90a"], ["explain", "ihc_pre", "hidden=64", "hc=4", "--arch", word],
        ["explain", "ihc_pre", f"{word}=3", "--arch", "90a"], ["warmup", "ihc_post", "hc=4", "hidden=64", "--dtype", word, "--arch", "90a"],
        ["build", word, "hidden=64", "--arch", "90a", "-o", str(tmp_path / "bundle")], ["build", "ihc_post", "hc=4", f"hidden={word}", "--arch", "90a", "-o", str(tmp_path / "bundle")],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2, words
        assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


def test_sizes_that_no_machine_has(capsys):
    for words in (["hidden=1e999"], ["hidden=-1"], ["hidden=99999999999999999999"], ["hc=0", "hidden=64"], ["hc=9", "hidden=64"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["explain", "ihc_pre", *words, "--arch", "90a"])
        assert ended.value.code == 2 and capsys.readouterr().err.count("\n") <= 12


# ---- files --------------------------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_from_a_private_file_that_is_gone_afterwards(monkeypatch, tmp_path):
    """CuPy loads by path: the file has a random name, is the user's alone, and is removed, also when the driver refuses it."""
    gpu = fakes.install(monkeypatch, tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    seen = []

    def load(path):
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        assert path.startswith(str(tmp_path / "tmp"))
        raise fakes.DriverError("no")

    monkeypatch.setattr(gpu, "RawModule", load)
    spec = REGISTRY["ihc_post"]
    made = plan.make(spec, bound_of(spec, spec.make_inputs(small_cases(spec)[1], np.random.default_rng(0))), arch.named("sm_80"))
    old = os.umask(0)
    try:
        with pytest.raises(errors.LaunchError):
            build.function(made, 0)
    finally:
        os.umask(old)
    assert seen == [0o600] and not list((tmp_path / "tmp").iterdir())


def test_a_key_is_a_hash_so_it_names_no_path(monkeypatch):
    made = plan.Plan("x", "../../x", "ihc_post.cu", "../entry", arch.named("sm_80"), {"kHc": 1}, None)
    assert re.fullmatch("[0-9a-f]{64}", build.identity(made))
    assert re.fullmatch("[0-9a-f]{64}", build.identity(replace(made, source="../../etc/passwd")))


def test_a_bundles_manifest_names_no_path(monkeypatch, tmp_path):
    """Kernels are looked up by the hash of what is asked for; names in the manifest are never opened."""
    secret = tmp_path / "secret.cubin"
    secret.write_bytes(b"secret")
    folder = tmp_path / "bundle"
    folder.mkdir(mode=0o700)
    import hashlib

    entry = {"key": "../secret", "op": "ihc_post", "variant": "portable", "arch": "sm_80", "sha256": hashlib.sha256(b"secret").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"schema": bundle.SCHEMA, "hccupy": "0", "kernels": "k", "nvrtc": "13.0", "entries": [entry]}))
    monkeypatch.setenv("HCCUPY_KERNEL_BUNDLE", str(folder))
    bundle._digests.cache_clear()
    assert bundle.find("a" * 64, "k") is None
    bundle.write(folder, [], "k", "13.0")
    assert secret.read_bytes() == b"secret"


def cache_with_a_link(monkeypatch, tmp_path, name):
    """(the cache's directory, a file elsewhere to which its entry `name` is a link)."""
    other, folder = tmp_path / "precious", tmp_path / "cache"
    other.write_bytes(b"mine")
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(other)
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(folder))
    return folder, other


def test_clearing_the_cache_follows_no_link(monkeypatch, tmp_path):
    """A link with an entry's name is removed; what it points to stays."""
    folder, other = cache_with_a_link(monkeypatch, tmp_path, f"{'a' * 64}.cubin")
    cache.clear()
    assert other.read_bytes() == b"mine" and not list(folder.iterdir())


def test_a_lock_that_is_a_link_writes_nothing_through(monkeypatch, tmp_path):
    """Somebody who could once write to the directory left a link in place of a lock."""
    _, other = cache_with_a_link(monkeypatch, tmp_path, f"{'a' * 64}.lock")
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    assert cache.get("a" * 64, lambda: b"x" * 99) == b"x" * 99
    assert other.read_bytes() == b"mine"


# ---- dependencies -------------------------------------------------------------------------------------------------


def test_the_audit_knows_what_is_asked_for():
    asked = audit.asked_for((ROOT / "setup.cfg").read_text())
    assert asked[""] == ["numpy", "ml_dtypes"] and "filelock" in asked["cuda13"] and "ruff" in asked["dev"]
    here, missing = audit.installed(["numpy", "no-such-package-of-ours"])
    assert here == [f"numpy=={np.__version__}"] and missing == ["no-such-package-of-ours"]


def test_the_audit_says_when_it_is_none():
    """Known vulnerabilities: 1; nothing looked up: 2, with the reason."""
    fine = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    skipped = {"name": "c", "skip_reason": "not found"}
    assert audit.verdict({"dependencies": [fine]})[0] == 0
    status, lines = audit.verdict({"dependencies": [fine, bad, skipped]})
    assert status == 1 and "b 1: CVE-1, mended in 2" in lines
    assert audit.verdict({"dependencies": [fine, skipped]})[0] == 2
    assert audit.verdict({"dependencies": []})[0] == audit.verdict(None)[0] == 2 and "network" in audit.verdict(None)[1][0]


def test_locks_are_of_a_version_without_the_known_fault():
    """filelock before 3.20.3 followed links when it made a lock."""
    text = (ROOT / "setup.cfg").read_text()
    assert text.count("filelock>=3.20.3") == 2
