"""Step 4: source and options to a loaded kernel: bundle, user cache or our own NVRTC call, then cupy.RawModule(path=cubin).

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

from . import bundle, cache, cuda, switches
from .errors import CompileError, LaunchError, NoGpuError
from .plan import Plan, camel

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


def _key(*parts: bytes) -> str:
    digest = hashlib.sha256(SCHEMA)
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def identity(plan: Plan) -> str:
    """Everything that changes the binary but the compiler's version: the key of bundles and of loaded kernels. Needs no NVRTC."""
    return _key(sources_digest(), plan.source.encode(), repr(options(plan)).encode())


def key(plan: Plan) -> str:
    """Cache key: everything that changes the binary."""
    return _key(identity(plan).encode(), repr(cuda.nvrtc_version()).encode())


def compile_plan(plan: Plan, extra: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """(cubin or PTX, compiler log). Needs NVRTC, not a GPU.

    Raises CompileError with the log.
    """
    cuda.nvrtc_version()
    nvrtc = cuda.nvrtc()
    files = sources()
    headers = [name for name in files if name.endswith(".cuh")]
    # Headers are handed over from memory, by the exact words of the #include lines: what is hashed is what is compiled.
    program = nvrtc.createProgram(files[plan.source].decode(), f"kernels/{plan.source}", [files[h] for h in headers], [h.encode() for h in headers])
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
    """The cubin (PTX for an architecture newer than NVRTC): from the bundle, the user's cache, or compiled."""
    found = bundle.find(identity(plan), sources_digest().hex())
    return cached(plan) if found is None else found


def at_hand(plan: Plan) -> bool:
    """Is the binary in the bundle or the user's cache?"""
    if bundle.find(identity(plan), sources_digest().hex()) is not None:
        return True
    folder = cache.usable()
    return folder is not None and cache.read(folder / f"{key(plan)}.cubin") is not None


def cached(plan: Plan) -> bytes:
    """As `binary` without the bundle; one INFO line a cold compile.

    Raises CompileError under HCCUPY_NO_JIT=1 where the cache has no such kernel.
    """

    def make() -> bytes:
        if switches.on("HCCUPY_NO_JIT"):
            raise CompileError(_missing(plan))
        start = time.perf_counter()
        made, _ = compile_plan(plan)
        compiled.append((plan.op, plan.variant, time.perf_counter() - start))
        log.info("hccupy: compiled %s (%s) for %s in %.2f s", plan.op, plan.variant, plan.arch.name, compiled[-1][2])
        return made

    try:
        name = key(plan)
    except NoGpuError as error:  # no NVRTC
        if switches.on("HCCUPY_NO_JIT"):
            raise CompileError(_missing(plan)) from error
        raise
    return cache.get(name, make)


def _missing(plan: Plan) -> str:
    """What HCCUPY_NO_JIT=1 says of a kernel that nobody built."""
    from .ops import REGISTRY  # here, because nothing else in this file knows of ops

    words = ""  # kernels of no op are in every bundle
    if plan.op in REGISTRY:
        words = " ".join([plan.op, *(f"{a.name}={plan.defines[camel(a.name)]}" for a in REGISTRY[plan.op].axes if a.baked)]) + " "
    folder = os.environ.get("HCCUPY_KERNEL_BUNDLE")
    return (
        f"{plan.op}: kernel: expected one for {plan.arch.name} ({plan.variant}) in {f'bundle {folder}' if folder else 'a bundle (HCCUPY_KERNEL_BUNDLE)'} "
        f"or the cache, got none, and HCCUPY_NO_JIT=1 forbids compiling it. On a machine with NVRTC run: "
        f"hccupy build {words}--arch {plan.arch.name.removeprefix('sm_')} -o DIR (dtypes and policies of the call count as well)."
    )


def _slot(plan: Plan, device: int) -> tuple[int, str]:
    return device, identity(plan) + plan.entry


def is_loaded(plan: Plan, device: int) -> bool:
    """Can `function` answer without compiling or loading anything?"""
    return _slot(plan, device) in _loaded


def any_loaded(device: int) -> bool:
    """Has this process loaded a kernel on that device?"""
    return any(index == device for index, _ in list(_loaded))


def function(plan: Plan, device: int) -> Any:
    """The cupy RawKernel of a plan on the current device, which must be `device`; loaded once a device and process."""
    global loads
    slot = _slot(plan, device)
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
                found.kernel  # CuPy loads lazily: make it happen here  # noqa: B018
            except cuda.cupy().cuda.driver.CUDADriverError as error:
                raise LaunchError(
                    f"{plan.op}: the driver did not load the kernel for {plan.arch.name} ({error}). "
                    "Was it built by a newer CUDA than the driver's? `hccupy doctor` shows both."
                ) from error
            finally:
                os.unlink(file.name)
            _loaded[slot] = found
            loads += 1
        elif plan.launch.smem > found.max_dynamic_shared_size_bytes:
            found.max_dynamic_shared_size_bytes = plan.launch.smem
        if plan.launch.cluster > 8:
            cuda.allow_large_clusters(found.kernel.ptr)
        return found
