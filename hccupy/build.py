"""Step 4: source and options to a loaded kernel. Own NVRTC call, own cache, then cupy.RawModule(path=cubin).

Not cupy.RawModule(code=...): it appends -ftz=true (subnormals flushed), never picks sm_90a, and its cache key leaves out
the headers. One load a device and process; a compile or load is refused while a CUDA graph is being captured.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from . import cache, cuda
from .errors import CompileError
from .plan import Plan

log = logging.getLogger("hccupy")
SCHEMA = b"hccupy-cubin-1"
_lock = threading.RLock()
_loaded: dict[tuple[int, str], Any] = {}
loads = 0  # module loads in this process, for tests
compiled: list[tuple[str, str, float]] = []  # (op, variant, seconds) of the cold compiles of this process


def kernels_dir() -> Path:
    """Where kernels/ is: inside an installed package, beside it in a checkout or editable install."""
    here = Path(__file__).resolve().parent
    for path in (here / "kernels", here.parent / "kernels"):
        if (path / "common").is_dir():
            return path
    raise CompileError(f"hccupy: the CUDA sources were not found beside {here}. Reinstall hccupy.")


@functools.cache
def sources() -> dict[str, bytes]:
    """Every kernel file by its path inside kernels/. Read once: a running process keeps what it started with."""
    root = kernels_dir()
    files = sorted(p for p in root.rglob("*") if p.suffix in (".cu", ".cuh"))
    return {str(p.relative_to(root)): p.read_bytes() for p in files}


@functools.cache
def sources_digest() -> bytes:
    """sha256 over names and bytes of all kernel files."""
    digest = hashlib.sha256()
    for name, text in sources().items():
        digest.update(name.encode() + b"\0" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def options(plan: Plan) -> tuple[str, ...]:
    """The NVRTC options of a plan: exact arithmetic (no fast math, no flush to zero)."""
    return (f"-arch={plan.arch.name}", "-std=c++17", "-default-device", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", *plan.flags)


def key(plan: Plan) -> str:
    """Cache key: everything that changes the binary."""
    digest = hashlib.sha256(SCHEMA)
    for part in (sources_digest(), plan.source.encode(), repr(options(plan)).encode(), repr(cuda.nvrtc_version()).encode()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def compile_plan(plan: Plan, extra: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """(cubin or PTX, compiler log). Needs NVRTC, not a GPU.

    Raises CompileError with the log.
    """
    cuda.nvrtc_version()
    nvrtc = cuda.nvrtc()
    files = sources()
    headers = [name for name in files if name.endswith(".cuh")]
    # Headers are handed over from memory, by the exact words of the #include lines: what is hashed is what is compiled.
    program = nvrtc.createProgram(
        files[plan.source].decode(), f"kernels/{plan.source}", [files[h] for h in headers], [h.encode() for h in headers]
    )
    try:
        nvrtc.compileProgram(program, (*options(plan), *extra))
        # CuPy's getCUBIN drops the last byte, which the loader misses.
        return (nvrtc.getPTX(program) if plan.arch.ptx else nvrtc.getCUBIN(program) + b"\0"), _log(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(
            f"{plan.op}: kernels/{plan.source} did not compile for {plan.arch.name} with NVRTC "
            f"{'.'.join(map(str, cuda.nvrtc_version()))} ({error}); options {' '.join(options(plan))}\n{_log(program)}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _log(program: Any) -> str:
    """What the compiler said (it ends the text with a NUL)."""
    return str(cuda.nvrtc().getProgramLog(program)).rstrip("\0").strip()


def binary(plan: Plan) -> bytes:
    """The cubin (PTX for an architecture newer than NVRTC), from the cache or compiled; one INFO line a cold compile."""

    def make() -> bytes:
        start = time.perf_counter()
        made, _ = compile_plan(plan)
        compiled.append((plan.op, plan.variant, time.perf_counter() - start))
        log.info("hccupy: compiled %s (%s) for %s in %.2f s", plan.op, plan.variant, plan.arch.name, compiled[-1][2])
        return made

    return cache.get(key(plan), make)


def function(plan: Plan, device: int) -> Any:
    """The cupy RawKernel of a plan on the current device, which must be `device`; loaded once a device and process."""
    global loads
    slot = (device, key(plan) + plan.entry)
    with _lock:
        found = _loaded.get(slot)
        if found is None:
            cuda.check_fork()
            data = binary(plan)
            suffix = ".ptx" if plan.arch.ptx else ".cubin"
            with tempfile.NamedTemporaryFile(suffix=suffix, delete=False) as file:
                file.write(data)
            try:
                module = cuda.cupy().RawModule(path=file.name)
                found = module.get_function(plan.entry)
                if plan.launch.smem:  # 48 KB without asking, static shared memory included
                    found.max_dynamic_shared_size_bytes = plan.launch.smem
                if plan.launch.cluster > 8:
                    cuda.allow_large_clusters(found.kernel.ptr)
                found.kernel  # CuPy loads lazily: make it happen here  # noqa: B018
            finally:
                os.unlink(file.name)
            _loaded[slot] = found
            loads += 1
        elif plan.launch.smem > found.max_dynamic_shared_size_bytes:
            found.max_dynamic_shared_size_bytes = plan.launch.smem
        return found
