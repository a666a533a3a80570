"""The cubin cache on disk: keyed by content, published atomically, trusted only when it is ours.

Directory: HCCUPY_CACHE_DIR, or the user's cache directory (platformdirs). It is created 0700; a directory or entry that
somebody else owns or may write is not used. Anything wrong with the disk costs one warning and means "in memory".
An entry is the sha256 of its file name and cubin, then the cubin: a truncated, altered or swapped file is recompiled, never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import NoGpuError

log = logging.getLogger("hccupy")
LOCK_SECONDS = 60.0  # a cold compile takes well under a second; a lock held longer belongs to a dead or stuck process
_warned: set[str] = set()


def directory() -> Path:
    """Where entries live (not created here)."""
    chosen = os.environ.get("HCCUPY_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        import platformdirs
    except ImportError as error:  # it comes with the CUDA extras; without one there is nothing to cache
        raise NoGpuError("cache: expected platformdirs, got none. Install 'hccupy[cuda13]' (or [cuda12]), or set HCCUPY_CACHE_DIR.") from error
    return Path(platformdirs.user_cache_dir("hccupy", appauthor=False))


def _warn(folder: Path | str, text: str) -> None:
    """One warning a directory and process."""
    if str(folder) not in _warned:
        _warned.add(str(folder))
        log.warning("%s; kernels are compiled again in each process", text)


def _digest(path: Path, cubin: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + cubin).digest()


def _ours(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def usable() -> Path | None:
    """The directory, created 0700 and checked, or None (with one warning) where it cannot be trusted or written."""
    try:
        path = directory()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(path)
    except (OSError, RuntimeError) as error:
        _warn("", f"hccupy: no kernel cache on disk ({error})")
        return None
    if not stat.S_ISDIR(info.st_mode) or not _ours(info):
        _warn(path, f"hccupy: kernel cache {path} is a link, belongs to another user, or others may write to it")
        return None
    return path


def read(path: Path) -> bytes | None:
    """The cubin of an entry, or None where it is missing, not ours, or not what was written."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(path.parent, f"hccupy: kernel cache entry {path} was not read ({error})")
        return None
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode) or not _ours(info):
        os.close(handle)
        _warn(path.parent, f"hccupy: kernel cache entry {path} is no plain file, belongs to another user, or others may write to it")
        return None
    with os.fdopen(handle, "rb") as file:
        data = file.read()
    if len(data) <= 32 or _digest(path, data[32:]) != data[:32]:
        log.info("hccupy: kernel cache entry %s is damaged and will be replaced", path)
        return None
    return data[32:]


def write(path: Path, cubin: bytes) -> None:
    """Publish an entry: a reader sees the old one, none, or the whole new one."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(path, cubin) + cubin)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except OSError as error:
        _warn(path.parent, f"hccupy: kernel cache {path.parent} was not written ({error})")
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the entry's lock, or go on without it after LOCK_SECONDS: two compilations are better than none."""
    try:
        from filelock import FileLock, Timeout
    except ImportError:  # comes with the CUDA extras; without it two processes may both compile, which is harmless
        yield
        return
    lock = FileLock(path, timeout=LOCK_SECONDS, mode=0o600)
    try:
        lock.acquire()
    except (Timeout, OSError) as error:
        log.info("hccupy: going on without the lock %s (%s)", path, error)
    try:
        yield
    finally:
        lock.release()


def get(key: str, make: Callable[[], bytes]) -> bytes:
    """The cubin of that key: read, or made once among all processes and kept."""
    folder = usable()
    if folder is None:
        return make()
    path = folder / f"{key}.cubin"
    found = read(path)
    if found is None:
        with _lock(folder / f"{key}.lock"):
            found = read(path)  # another process may have made it while we waited
            if found is None:
                found = make()
                write(path, found)
    return found


def entries() -> list[Path]:
    """Every file this cache owns, in the directory as it is."""
    folder = directory()
    return sorted(p for p in folder.glob("*") if p.suffix in (".cubin", ".lock") or p.name.startswith(".part-")) if folder.is_dir() else []


def clear() -> int:
    """Remove every entry; how many cubins went."""
    count = 0
    for path in entries():
        with contextlib.suppress(OSError):
            path.unlink()
            count += path.suffix == ".cubin"
    return count
