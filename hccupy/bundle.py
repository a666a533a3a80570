"""Cubins shipped with an application: a directory of <key>.cubin files and a manifest.json, made by `hccupy build`.

HCCUPY_KERNEL_BUNDLE=DIR is looked up before the cache. Keys hold everything that changes a binary but the compiler's
version, so that a machine without NVRTC can use them. A bundle of other kernel sources is not used (one warning).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .plan import Plan
from .version import __version__

log = logging.getLogger("hccupy")
SCHEMA = "hccupy-bundle-1"
MANIFEST = "manifest.json"
_warned: set[str] = set()


def _warn(folder: str, text: str) -> None:
    """One warning a bundle and process."""
    if folder not in _warned:
        _warned.add(folder)
        log.warning("hccupy: kernel bundle %s %s", folder, text)


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle.

    Raises OSError where it cannot be read, ValueError where it is none.
    """
    found = json.loads((folder / MANIFEST).read_text())
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"its manifest is not of schema {SCHEMA}")
    if not all(isinstance(e, dict) and {"key", "op", "variant", "arch", "sha256"} <= e.keys() for e in found["entries"]):
        raise ValueError("its manifest has damaged entries")
    return found


def problem(folder: str, kernels: str) -> str:
    """Why a bundle cannot serve these kernel sources; "" where it can."""
    try:
        if os.stat(folder).st_mode & stat.S_IWOTH:
            return "is not used: anybody may write to it"
        found = manifest(Path(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"is not used ({type(error).__name__}: {error})"
    if found.get("kernels") != kernels:
        return f"is not used: it was built from other kernel sources (hccupy {found.get('hccupy')}, here {__version__}). Run `hccupy build` again"
    return ""


@functools.lru_cache(maxsize=8)
def _digests(folder: str, kernels: str) -> dict[str, str]:
    """key -> sha256 of the bundle's cubins; nothing where it cannot be used. Read once a process."""
    wrong = problem(folder, kernels)
    if wrong:
        _warn(folder, wrong)
        return {}
    return {e["key"]: e["sha256"] for e in manifest(Path(folder))["entries"]}


def find(key: str, kernels: str) -> bytes | None:
    """The cubin of `key` in HCCUPY_KERNEL_BUNDLE, or None. `kernels` is the digest of this installation's sources."""
    folder = os.environ.get("HCCUPY_KERNEL_BUNDLE")
    expected = _digests(folder, kernels).get(key) if folder else None
    if not folder or expected is None:
        return None
    try:
        cubin = (Path(folder) / f"{key}.cubin").read_bytes()
    except OSError as error:
        _warn(folder, f"lacks a kernel that its manifest names ({error})")
        return None
    if hashlib.sha256(cubin).hexdigest() != expected:
        _warn(folder, f"holds a damaged kernel, {key}.cubin, which is not used")
        return None
    return cubin


def write(folder: Path, made: Iterable[tuple[str, Plan, bytes]], kernels: str, nvrtc: str) -> int:
    """Add (key, plan, cubin) to a bundle, which is made anew where it holds other sources or another NVRTC's work.

    Returns how many kernels it holds. Files appear whole or not at all, the manifest last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        old = manifest(folder)
    except (OSError, ValueError, KeyError, TypeError):
        old = {"entries": []}
    entries = {e["key"]: e for e in old["entries"]}
    if (old.get("kernels"), old.get("nvrtc")) != (kernels, nvrtc):
        entries = {}
    for key, plan, cubin in made:
        _publish(folder / f"{key}.cubin", cubin)
        entries[key] = {"key": key, "op": plan.op, "variant": plan.variant, "arch": plan.arch.name, "sha256": hashlib.sha256(cubin).hexdigest()}
    rows = sorted(entries.values(), key=lambda e: (e["op"], e["variant"], e["arch"], e["key"]))
    whole = {"schema": SCHEMA, "hccupy": __version__, "kernels": kernels, "nvrtc": nvrtc, "entries": rows}
    _publish(folder / MANIFEST, (json.dumps(whole, indent=1) + "\n").encode())
    for path in folder.glob("*.cubin"):
        if path.stem not in entries:
            path.unlink()
    return len(entries)


def _publish(path: Path, data: bytes) -> None:
    part = path.with_name(f".part-{os.getpid()}-{path.name}")
    part.write_bytes(data)
    os.replace(part, path)
