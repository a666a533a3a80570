"""The cubin cache: never a broken or foreign entry, never an exception because of the disk, one compilation among many processes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import filelock
import pytest

from hccupy import cache

ROOT = Path(__file__).resolve().parent.parent
CUBIN = b"\x7fELF" + bytes(range(256)) * 8
NOBODY = 65534


class Maker:
    """A make function that counts its calls."""

    def __init__(self, cubin=CUBIN):
        self.calls, self.cubin = 0, cubin

    def __call__(self):
        self.calls += 1
        return self.cubin


@pytest.fixture(autouse=True)
def fresh(monkeypatch, caplog):
    """Every test may get its one warning."""
    monkeypatch.setattr(cache, "_warned", set())
    caplog.set_level(logging.INFO, "hccupy")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(path))
    return path


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def works_in_memory(caplog, times=3):
    """get() hands over what make() made, every time, with one warning in all."""
    make = Maker()
    assert [cache.get("k" * 64, make) for _ in range(times)] == [CUBIN] * times
    assert make.calls == times
    assert len(warnings(caplog)) == 1, warnings(caplog)
    return warnings(caplog)[0]


@contextlib.contextmanager
def unprivileged():
    """File permissions mean nothing to root: be somebody else for a while, with a directory of one's own."""
    path = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    if root:
        os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield path
    finally:
        if root:
            os.seteuid(0)
        path.chmod(0o700)
        shutil.rmtree(path)


def process(code, folder, *arguments, **environment):
    """A fresh Python that runs `code` on the cache of `folder`."""
    env = {**os.environ, "HCCUPY_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=env, stdout=subprocess.PIPE, text=True)


# ---- the plain case ---------------------------------------------------------------------------------------------


def test_made_once_then_read(folder, caplog):
    make = Maker()
    assert cache.get("a" * 64, make) == cache.get("a" * 64, make) == CUBIN
    assert make.calls == 1 and not warnings(caplog)


def test_private_modes(folder):
    old = os.umask(0)  # the worst umask: everything for everybody
    try:
        cache.get("a" * 64, Maker())
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path


def test_keys_do_not_meet(folder):
    assert cache.get("a" * 64, Maker(b"a" * 99)) == b"a" * 99
    assert cache.get("b" * 64, Maker(b"b" * 99)) == b"b" * 99
    assert cache.get("a" * 64, Maker(b"no")) == b"a" * 99


def test_entry_is_digest_then_cubin(folder):
    """sha256 over the entry's name and the bytes, then the bytes: documented, so that others can check a cache."""
    cache.get("a" * 64, Maker())
    name = f"{'a' * 64}.cubin"
    assert (folder / name).read_bytes() == hashlib.sha256(name.encode() + b"\0" + CUBIN).digest() + CUBIN


def test_default_directory_is_the_users_never_tmp(monkeypatch):
    monkeypatch.delenv("HCCUPY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.directory() == Path("/home/somebody/.cache/hccupy")
    monkeypatch.setenv("HCCUPY_CACHE_DIR", "/elsewhere")
    assert cache.directory() == Path("/elsewhere")


def test_clear_removes_what_is_ours_and_only_that(folder):
    for key in ("a" * 64, "b" * 64):
        cache.get(key, Maker())
    (folder / ".part-left").write_bytes(b"half")
    (folder / "notes.txt").write_text("the user's")
    assert cache.clear() == 2
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    assert cache.clear() == 0


def test_clear_of_no_directory(folder):
    assert cache.entries() == [] and cache.clear() == 0 and not folder.exists()


# ---- disks that do not serve ------------------------------------------------------------------------------------


def test_K2_unwritable_home(monkeypatch, caplog):
    monkeypatch.delenv("HCCUPY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nobody")  # not even root can create a directory there
    assert "/proc/nobody" in works_in_memory(caplog)


def test_directory_is_a_file(folder, caplog):
    folder.write_text("in the way")
    works_in_memory(caplog)
    assert folder.read_text() == "in the way"


def test_read_only_directory_serves_what_it_holds(monkeypatch, caplog):
    with unprivileged() as path:
        monkeypatch.setenv("HCCUPY_CACHE_DIR", str(path))
        cache.get("a" * 64, Maker())
        path.chmod(0o500)
        make = Maker(b"other")
        assert cache.get("a" * 64, make) == CUBIN and make.calls == 0
        works_in_memory(caplog)


def test_unreadable_directory(monkeypatch, caplog):
    with unprivileged() as path:
        monkeypatch.setenv("HCCUPY_CACHE_DIR", str(path))
        path.chmod(0o000)
        works_in_memory(caplog)


def test_full_disk(folder, caplog):
    """No byte past 64 of a file can be written: the call works, and nothing half-written is left."""
    cubin, key = CUBIN, "f" * 64
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.mkdir(mode=0o700)
    capture = caplog.handler.stream  # in memory: not touched by the limit
    assert capture is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        assert cache.get(key, Maker()) == cubin
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(warnings(caplog)) == 1
    assert [p.name for p in folder.iterdir() if p.suffix != ".lock"] == []
    make = Maker()
    assert cache.get(key, make) == cubin and make.calls == 1 and (folder / f"{key}.cubin").exists()


def test_failing_compiler_leaves_nothing_and_frees_the_lock(folder):
    def broken():
        raise ValueError("the compiler's words")

    for _ in range(2):
        with pytest.raises(ValueError, match="the compiler's words"):
            cache.get("a" * 64, broken)
    assert not list(folder.glob("*.cubin")) and not list(folder.glob(".part-*"))
    assert cache.get("a" * 64, Maker()) == CUBIN


# ---- entries and directories that must not be trusted ----------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720])
def test_directory_others_may_write_is_not_used(folder, caplog, mode):
    cache.get("k" * 64, Maker(b"planted" * 9))
    folder.chmod(mode)
    assert "others may write" in works_in_memory(caplog)


def test_directory_of_another_user(folder, monkeypatch, caplog):
    cache.get("k" * 64, Maker(b"planted" * 9))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "another user" in works_in_memory(caplog)


def test_symlinked_directory(folder, tmp_path, caplog):
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    works_in_memory(caplog)
    assert not list((tmp_path / "real").iterdir())


@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_entry_others_may_write_is_replaced(folder, caplog, mode):
    path = folder / f"{'a' * 64}.cubin"
    cache.get("a" * 64, Maker(b"planted" * 9))
    path.chmod(mode)
    assert cache.get("a" * 64, Maker()) == CUBIN
    assert len(warnings(caplog)) == 1
    assert cache.get("a" * 64, Maker(b"no")) == CUBIN and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_symlinked_entry_is_neither_followed_nor_written_through(folder, tmp_path, caplog):
    other = tmp_path / "other"
    planted = hashlib.sha256(b"evil").digest() + b"evil"
    other.write_bytes(planted)
    other.chmod(0o600)
    folder.mkdir(mode=0o700)
    path = folder / f"{'a' * 64}.cubin"
    path.symlink_to(other)
    assert cache.get("a" * 64, Maker()) == CUBIN
    assert other.read_bytes() == planted
    assert not path.is_symlink() and cache.get("a" * 64, Maker(b"no")) == CUBIN
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_entry_that_is_no_file(folder, caplog, kind):
    folder.mkdir(mode=0o700)
    path = folder / f"{'k' * 64}.cubin"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    make = Maker()
    assert cache.get("k" * 64, make) == CUBIN and cache.get("k" * 64, make) == CUBIN
    assert make.calls <= 2 and len(warnings(caplog)) == 1


DAMAGE = {
    "empty": lambda whole: b"",
    "digest only": lambda whole: whole[:32],
    "truncated": lambda whole: whole[:-1],
    "half": lambda whole: whole[: len(whole) // 2],
    "longer": lambda whole: whole + b"\0",
    "one bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "zeros": lambda whole: bytes(len(whole)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_compiled_again(folder, damage):
    path = folder / f"{'a' * 64}.cubin"
    cache.get("a" * 64, Maker())
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    make = Maker()
    assert cache.get("a" * 64, make) == CUBIN and make.calls == 1
    assert path.read_bytes() == whole


def test_swapped_entries_are_not_taken_for_each_other(folder):
    """A whole, well-formed entry under the wrong key: the digest must bind the key as well."""
    cache.get("a" * 64, Maker(b"a" * 99))
    cache.get("b" * 64, Maker(b"b" * 99))
    shutil.copy(folder / f"{'b' * 64}.cubin", folder / f"{'a' * 64}.cubin")
    assert cache.get("a" * 64, Maker(b"a" * 99)) == b"a" * 99


# ---- many processes ---------------------------------------------------------------------------------------------

SHARE = """
import sys, time
from hccupy import cache
def make():
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    time.sleep(0.3)
    return b"cubin" * 1000
print(cache.get("a" * 64, make) == b"cubin" * 1000)
"""


def test_K1_eight_processes_one_compilation(folder, tmp_path):
    children = [process(SHARE, folder, tmp_path / "log") for _ in range(8)]
    assert [child.communicate(timeout=120)[0].strip() for child in children] == ["True"] * 8
    assert (tmp_path / "log").read_text() == "made\n"
    assert not list(folder.glob(".part-*"))


STALL = """
import os, time
from hccupy import cache
def stall(handle):
    print("writing", flush=True)
    time.sleep(600)
os.fsync = stall
cache.get("a" * 64, lambda: b"cubin" * 1000)
"""


def test_kill_in_the_middle_of_a_write(folder):
    """Killed with the lock held and half an entry on disk: the next process sees no entry, gets the lock and makes it."""
    child = process(STALL, folder)
    assert child.stdout.readline().strip() == "writing"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not list(folder.glob("*.cubin")) and len(list(folder.glob(".part-*"))) == 1
    start = time.perf_counter()
    make = Maker()
    assert cache.get("a" * 64, make) == CUBIN and make.calls == 1
    assert time.perf_counter() - start < 5
    cache.clear()
    assert not list(folder.iterdir())


REWRITE = """
from hccupy import cache
print("ready", flush=True)
path = cache.usable() / ("a" * 64 + ".cubin")
for n in range(10**9):
    cache.write(path, bytes([n % 256]) * 300_000)
"""


def test_readers_see_whole_entries_while_a_writer_is_killed(folder):
    child = process(REWRITE, folder)
    assert child.stdout.readline().strip() == "ready"
    path, seen = folder / f"{'a' * 64}.cubin", 0
    end = time.perf_counter() + 10
    while seen < 200 and time.perf_counter() < end:
        found = cache.read(path)
        if found is None:
            assert not seen  # not there yet; once there, it is whole at any moment
        else:
            assert found == found[:1] * 300_000
            seen += 1
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert seen and cache.read(path) is not None


def test_lock_held_for_ever_is_not_waited_for(folder, monkeypatch):
    """Two compilations are better than none."""
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    folder.mkdir(mode=0o700)
    held, done = threading.Event(), threading.Event()

    def hold():
        with filelock.FileLock(folder / f"{'a' * 64}.lock"):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(10)
        start = time.perf_counter()
        make = Maker()
        assert cache.get("a" * 64, make) == CUBIN and make.calls == 1
        assert 0.1 < time.perf_counter() - start < 10
    finally:
        done.set()
        thread.join()


def test_threads_of_one_process_share_one_compilation(folder):
    calls, results = [], []

    def make():
        calls.append(1)
        time.sleep(0.1)
        return CUBIN

    threads = [threading.Thread(target=lambda: results.append(cache.get("a" * 64, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CUBIN] * 8 and len(calls) == 1
