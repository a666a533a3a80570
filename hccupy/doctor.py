"""`hccupy doctor`: what is installed, what the GPU and its driver are, whether kernels compile and compute the right thing.

It runs on any machine: no GPU, no CuPy, a broken CuPy, two CuPys, no NVRTC. Every problem comes with what to do. A machine
without a GPU has no problem: there the NumPy path serves.
"""

from __future__ import annotations

import ctypes
import os
import platform
import pwd
import re
import stat
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from . import arch, build, bundle, cache, cuda, switches
from .errors import HccupyError, NoGpuError
from .version import __version__

VERSIONS = ("numpy", "ml_dtypes", "torch", "jax", "platformdirs", "filelock", "rich", "nvtx")
CUPY = re.compile(r"cupy(-cuda\d+x|-cuda\d+|-rocm[-\d]+)?")
INSTALL = "pip install 'hccupy[cuda13]' (or [cuda12] for a CUDA 12 driver)"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def examine() -> dict[str, Any]:
    """Everything doctor knows. "problems" holds sentences, each with what to do; empty means CUDA use is in order."""
    problems: list[str] = []
    notes: list[str] = []
    found: dict[str, Any] = {"versions": _versions(), "distributions": distributions()}
    found["driver"] = driver(problems, notes)
    found["cupy"] = _cupy(found, problems, notes)
    found["nvrtc"] = _nvrtc(found["cupy"], problems)
    found["headers"] = _headers(found["cupy"], notes)
    found["cache"] = _cache(found["cupy"], problems, notes)
    found["bundle"] = _bundle(problems)
    found["compile"] = _compile(found, problems)
    found["launch"] = [_launch(i, gpu["name"], problems) for i, gpu in enumerate(found["driver"]["gpus"])] if found["cupy"]["works"] else []
    found["switches"] = {n: os.environ[n] for n in switches.SWITCHES if n in os.environ}
    for name in sorted(os.environ):
        if name.startswith("HCCUPY_") and name not in switches.SWITCHES:
            notes.append(f"{name} is set, but hccupy has no such switch. There are: {', '.join(switches.SWITCHES)}.")
    return {**found, "problems": problems, "notes": notes}


def _versions() -> dict[str, str]:
    found = {"hccupy": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def distributions() -> dict[str, str]:
    """Every installed distribution of CuPy, NVIDIA or CUDA by name."""
    found = {}
    for d in metadata.distributions():
        name = str(d.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(("cupy", "nvidia-", "cuda-")):
            found[name] = d.version
    return dict(sorted(found.items()))


def driver(problems: list[str], notes: list[str]) -> dict[str, Any]:
    """The driver's CUDA version and the GPUs, asked without CuPy."""
    found: dict[str, Any] = {"cuda": "", "gpus": []}
    try:
        library = cuda.driver()
    except NoGpuError as error:
        if Path("/proc/driver/nvidia/version").exists():
            problems.append(f"{error} The kernel module is there: start the container with GPUs (docker run --gpus all), or install libcuda.")
        else:
            notes.append("No NVIDIA driver and no GPU on this machine: CPU arrays run on the NumPy path. That is no fault.")
        return found
    code = library.cuInit(0)
    value = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(value)) == 0:
        found["cuda"] = f"{value.value // 1000}.{value.value % 1000 // 10}"
    if code == NO_DEVICE:
        notes.append("The driver sees no GPU (CUDA_VISIBLE_DEVICES may hide them): CPU arrays run on the NumPy path.")
        return found
    if code:
        problems.append(f"The driver does not start: cuInit: {cuda.error_text(code)}. Reinstall the NVIDIA driver, or reboot after an update of it.")
        return found
    library.cuDeviceGetCount(ctypes.byref(value))
    for index in range(value.value):
        name = ctypes.create_string_buffer(128)
        library.cuDeviceGetName(name, len(name), index)
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        library.cuDeviceGetAttribute(ctypes.byref(major), 75, index)
        library.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)
        found["gpus"].append({"name": name.value.decode(), "capability": f"{major.value}.{minor.value}"})
    return found


def _cupy(found: dict[str, Any], problems: list[str], notes: list[str]) -> dict[str, Any]:
    """Which CuPys are installed, and whether the one that is imported works."""
    names = [n for n in found["distributions"] if CUPY.fullmatch(n)]
    state: dict[str, Any] = {"distributions": names, "works": False}
    gpus, driver_cuda = found["driver"]["gpus"], found["driver"]["cuda"]
    major = int(driver_cuda.split(".")[0] or 0) if driver_cuda else 0
    if len(names) > 1:
        keep = f"hccupy[cuda{12 if major == 12 else 13}]"
        problems.append(
            f"{len(names)} CuPys are installed and break each other ({', '.join(names)}). pip uninstall -y {' '.join(names)}, then pip install '{keep}'."
        )
    try:
        module = cuda.cupy()
    except NoGpuError as error:
        if names:
            problems.append(f"{error} First remove what is there: pip uninstall -y {' '.join(names)}.")
        elif gpus:
            problems.append(f"There is a GPU and no CuPy. {INSTALL}.")
        else:
            notes.append(f"CuPy is not installed; CUDA arrays would need it: {INSTALL}.")
        return state
    state |= {"works": True, "version": module.__version__, "file": str(getattr(module, "__file__", ""))}
    wheel = re.fullmatch(r"cupy-cuda(\d\d)x", names[0]) if len(names) == 1 else None
    if wheel and major and major < int(wheel[1]):
        problems.append(
            f"{names[0]} needs a CUDA {wheel[1]} driver, here is {driver_cuda}. pip uninstall -y {names[0]}, then pip install 'hccupy[cuda{major}]'."
        )
    return state


def _nvrtc(state: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    if not state["works"]:
        return {}
    try:
        version = cuda.nvrtc_version()
        return {"version": ".".join(map(str, version)), "architectures": list(cuda.nvrtc_archs())}
    except HccupyError as error:
        if os.environ.get("HCCUPY_KERNEL_BUNDLE") and switches.on("HCCUPY_NO_JIT"):
            return {}
        problems.append(str(error))
        return {}


def _headers(state: dict[str, Any], notes: list[str]) -> str:
    """Where CUDA's headers are. hccupy's kernels need none, CuPy's own element-wise kernels do."""
    if not state["works"]:
        return ""
    roots = [os.environ.get("CUDA_PATH", ""), os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    for root in filter(None, roots):
        if (Path(root) / "include" / "cuda_runtime.h").exists():
            return str(Path(root) / "include")
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "cuda_runtime.h":
                return str(Path(str(file.locate())).parent)
    notes.append(
        "CUDA's headers were not found. hccupy needs none; CuPy's own kernels do: pip install nvidia-cuda-runtime (CUDA 12: nvidia-cuda-runtime-cu12)."
    )
    return ""


def _cache(state: dict[str, Any], problems: list[str], notes: list[str]) -> dict[str, Any]:
    """Directory, size, owner, mode, and whether it is used."""
    try:
        folder = cache.directory()
    except HccupyError as error:
        (problems if state["works"] else notes).append(str(error))
        return {}
    found: dict[str, Any] = {"directory": str(folder), "usable": cache.usable() is not None}
    try:
        info = folder.lstat()
        sizes = [p.stat().st_size for p in cache.entries() if p.suffix == ".cubin"]
        found |= {"owner": _user(info.st_uid), "mode": oct(stat.S_IMODE(info.st_mode)), "kernels": len(sizes), "bytes": sum(sizes)}
    except OSError as error:
        found["error"] = str(error)
    if not found["usable"]:
        hint = "Kernels are compiled again in each process. Make it yours alone (chown, chmod 700), or set HCCUPY_CACHE_DIR to a directory that is."
        (problems if state["works"] else notes).append(
            f"The kernel cache {folder} is not used: {found.get('error') or 'others may write to it, or you may not'}. {hint}"
        )
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _bundle(problems: list[str]) -> dict[str, Any]:
    folder = os.environ.get("HCCUPY_KERNEL_BUNDLE")
    if not folder:
        if switches.on("HCCUPY_NO_JIT"):
            problems.append("HCCUPY_NO_JIT=1 is set and HCCUPY_KERNEL_BUNDLE is not: only cached kernels run. Make a bundle with `hccupy build`.")
        return {}
    wrong = bundle.problem(folder, build.sources_digest().hex())
    if wrong:
        problems.append(f"The kernel bundle {folder} {wrong}.")
        return {"directory": folder, "usable": False}
    whole = bundle.manifest(Path(folder))
    entries = whole["entries"]
    return {"directory": folder, "usable": True, "kernels": len(entries), "architectures": sorted({e["arch"] for e in entries}), "nvrtc": whole["nvrtc"]}


def _compile(found: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """One kernel through NVRTC, past every cache, for the GPU's architecture or sm_90a."""
    if not found["nvrtc"]:
        return {}
    from .explain import imagine
    from .ops import get
    from .plan import make
    from .warmup import TRIAL

    op, sizes, dtype = TRIAL
    gpus = found["driver"]["gpus"]
    major, minor = map(int, gpus[0]["capability"].split(".")) if gpus else (9, 0)
    try:
        on = arch.from_capability(major, minor, tuple(found["nvrtc"]["architectures"]))
        start = time.perf_counter()
        cubin, _ = build.compile_plan(make(get(op), imagine(get(op), sizes, dtype), on))
    except HccupyError as error:
        problems.append(f"The trial compile failed: {error}")
        return {"works": False}
    return {"works": True, "architecture": on.name, "seconds": round(time.perf_counter() - start, 3), "bytes": len(cubin)}


def _launch(index: int, name: str, problems: list[str]) -> dict[str, Any]:
    """The trial op on one GPU against the NumPy path."""
    import numpy as np

    from .api import ihc_post
    from .warmup import TRIAL

    n, hc, hidden = TRIAL[1].values()

    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(np.float32) for shape in ((n, hidden), (n, hc, hidden), (n, hc))]
    want = ihc_post(*given)
    try:
        cupy = cuda.cupy()
        with cupy.cuda.Device(index):
            found = arch.of_device(index).name
            got = cupy.asnumpy(ihc_post(*(cupy.asarray(a) for a in given)))
    except Exception as error:  # whatever CUDA says, a report must come out
        problems.append(f"The trial launch on GPU {index} ({name}) failed: {type(error).__name__}: {error}")
        return {"gpu": index, "works": False}
    worst = float(np.abs(got - want).max())
    if not worst < 1e-5:
        problems.append(f"The trial launch on GPU {index} ({name}) gave wrong numbers: off by {worst:.3g} from the NumPy path. Please report this.")
    return {"gpu": index, "works": worst < 1e-5, "architecture": found, "worst": worst}


def text(found: dict[str, Any]) -> str:
    """The report for people."""
    rows = [("versions", ", ".join(f"{n} {v}" for n, v in found["versions"].items()))]
    rows.append(("distributions", ", ".join(f"{n} {v}" for n, v in found["distributions"].items()) or "no cupy*, nvidia-* or cuda-*"))
    rows.append(("driver", f"CUDA {found['driver']['cuda']}" if found["driver"]["cuda"] else "none"))
    rows += [("gpu", f"{i}: {g['name']}, compute capability {g['capability']}") for i, g in enumerate(found["driver"]["gpus"])]
    rows.append(("cupy", f"{found['cupy']['version']} ({found['cupy']['file']})" if found["cupy"]["works"] else "none that works"))
    nvrtc = found["nvrtc"]
    rows.append(("nvrtc", f"{nvrtc['version']}, architectures {' '.join(map(str, nvrtc['architectures']))}" if nvrtc else "none"))
    rows.append(("cuda headers", found["headers"] or "none (hccupy needs none)"))
    rows += [(word, _words(found[key])) for word, key in (("cache", "cache"), ("bundle", "bundle"), ("trial compile", "compile"))]
    rows += [("trial launch", _words(launch)) for launch in found["launch"]] or [("trial launch", "none")]
    rows.append(("switches", " ".join(f"{n}={v}" for n, v in found["switches"].items()) or "none set"))
    lines = [f"{word:14} {value}" for word, value in rows]
    lines += [f"note           {note}" for note in found["notes"]]
    lines += [f"PROBLEM        {problem}" for problem in found["problems"]]
    lines.append(f"{len(found['problems'])} problems." if found["problems"] else "Everything is in order.")
    return "\n".join(lines)


def _words(facts: dict[str, Any]) -> str:
    def show(v: Any) -> str:
        if isinstance(v, list):
            return " ".join(map(str, v))
        return f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else str(v)

    return ", ".join(f"{n} {show(v)}" for n, v in facts.items()) or "none"
