"""Every environment variable that hccupy reads. There are no others; `hccupy doctor` lists those that are set."""

from __future__ import annotations

import os

from .errors import ArgumentError

SWITCHES = {
    "HCCUPY_CACHE_DIR": "where compiled kernels are kept (default: the user's cache directory)",
    "HCCUPY_COMMIT": "the commit that reports name, where the sources are a copy of a checkout",
    "HCCUPY_DEBUG": "`1`: check pages, positions and prefix sums on the host before each launch; read at each call, costs a sync",
    "HCCUPY_HPC": "`1`: engines that `import hpc` get hccupy's stand-in, in every process of vLLM and SGLang",
    "HCCUPY_KERNEL_BUNDLE": "a directory made by `hccupy build`; its kernels come before the cache and the compiler",
    "HCCUPY_LAUNCH": "`rawkernel`: start kernels with `cupy.RawKernel` instead of `cuLaunchKernelEx` (slower; no clusters, no dependent launch)",
    "HCCUPY_LOG": "a level such as `INFO`: log to stderr; read at import",
    "HCCUPY_NO_JIT": "`1`: never compile; a kernel that is in no bundle or cache is a CompileError",
    "HCCUPY_NVTX": "`1`: an NVTX range around each launch, with the package `nvtx`",
}


def on(name: str) -> bool:
    """Is a yes-or-no switch set to 1?"""
    return os.environ.get(name) == "1"


# os.environ.get costs 0.5 us, more than all the rest that a repeat call looks at; on POSIX it reads this dict of bytes.
_bytes = getattr(os.environ, "_data", None)


def debug() -> bool:
    """Is HCCUPY_DEBUG set to 1? Asked at each call."""
    if type(_bytes) is dict and os.name == "posix":
        return _bytes.get(b"HCCUPY_DEBUG") == b"1"
    return on("HCCUPY_DEBUG")


def rawkernel() -> bool:
    """Does HCCUPY_LAUNCH ask for cupy.RawKernel?

    Raises ArgumentError for any other word.
    """
    word = os.environ.get("HCCUPY_LAUNCH", "")
    if word not in ("", "rawkernel"):
        raise ArgumentError(f"hccupy: HCCUPY_LAUNCH: expected rawkernel or nothing, got {word!r}.")
    return bool(word)


def table() -> str:
    """The switches as a Markdown table."""
    return "\n".join(["| switch | meaning |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in SWITCHES.items())])
