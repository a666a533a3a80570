"""Where a measurement came from: date, commit, GPU, versions, and the digest of the kernel sources."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .build import kernels_dir

PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "nvidia-cuda-nvrtc", "pytest")


def kernels_digest() -> str:
    """sha256 over `sha256sum` lines of every file in kernels/, sorted by path: equal digests mean equal sources."""
    root = kernels_dir()
    files = sorted((p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts), key=lambda p: f"./{p.relative_to(root)}")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  ./{p.relative_to(root)}\n" for p in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _git(*words: str) -> str:
    try:
        run = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def record(gpu: str) -> dict[str, Any]:
    """The head of every report under notebooks/results/. In a copy of a checkout HCCUPY_COMMIT says what the sources are."""
    said = os.environ.get("HCCUPY_COMMIT")  # first: the copy may lie inside another checkout, or carry an older one's .git
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "cupy" in sys.modules:
        import cupy

        versions["driver"] = str(cupy.cuda.runtime.driverGetVersion())
        versions["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return {
        "date": datetime.date.today().isoformat(),
        "commit": said or _git("rev-parse", "HEAD") or "unknown",
        "uncommitted": not said and bool(_git("status", "--porcelain", "--", "kernels", "../kernels", ".")),
        "gpu": gpu,
        "versions": versions,
        "kernels_digest": kernels_digest(),
    }
