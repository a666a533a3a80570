"""Runs a kernels/*.cu file on the CPU: g++ compiles it with cuda_sim.h, every CUDA thread is a fiber.

    kernel = Simulated("ihc_post.cu", "ihc_post", {"kHc": 4, "kHidden": 512})
    y = redzone_array((3, 512), np.float32)
    kernel.launch(grid=3, block=128, smem=0, params=[x, None, y, 0.5, 3], seed=0)
    y.check()

Three builds of one kernel:

    plain          fast. Run it under several seeds: `seed` also picks the schedule (SCHEDULES), and a missing barrier
                   shows as a wrong or poisoned result under one of them
    sanitize=True  undefined behaviour: 32-bit overflow, misaligned vector access, index outside an array
    watch=True     every access: outside the arrays, the gaps of a RedzoneArray included; races between threads

What the kernel does before wait_for_previous_grid() can be seen to read what the grid before it has yet to write:
`previous` of launch.

What is not modelled: warps in lockstep, clusters, mbarriers, asynchronous copies, streams, and the accuracy of CUDA's
fast functions (expf, rsqrtf, __fdividef: here rounded as well as the C library does). Blocks run one after another,
so a block that waits for a later one never ends. PTX is replaced by its C++ twin. Needs Linux, g++ and binutils.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"

# forward, reverse  threads in (reverse) order of their number, one scheduling point each
# shuffled          the same with one random order for the block
# random            a new random order at each turn
# greedy            one warp runs as far as it can before another moves
SCHEDULES = ("shuffled", "greedy", "reverse", "random", "forward")  # seed % 5 picks one
_SCHEDULE_CODES = {"forward": 0, "reverse": 1, "shuffled": 2, "random": 3, "greedy": 4}

DYNAMIC_BYTES = 227 * 1024  # what one block can have on sm_90
GUARD_BYTES = 4096

_OPTIONS = [
    "-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-extern-tls-init",
    "-fno-fast-math", "-fno-delete-null-pointer-checks", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-w",
]  # fmt: skip
_WATCH = ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0", "-g1", "-gdwarf-4"]
_SANITIZE = ["-fsanitize=undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]


class SimulatorError(RuntimeError):
    """A kernel did not compile, or did something a GPU would not allow."""


def _dims(value: int | Sequence[int], name: str, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    given = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    dims = tuple(int(n) for n in given) + (1,) * (3 - len(given))
    if len(dims) != 3 or any(not 1 <= n <= limit for n, limit in zip(dims, limits, strict=True)):
        raise SimulatorError(f"{name}: each of {given} must be between 1 and {limits}")
    return dims


def _run(command: list[str], cwd: Path, text: str = "") -> str:
    done = subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SimulatorError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _cache_directory() -> Path:
    directory = Path(tempfile.gettempdir()) / f"hccupy-simulator-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    facts = directory.lstat()
    if directory.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise SimulatorError(f"{directory}: not a directory that only this user writes to")
    return directory


_compiler_facts: list[str] = []


def _compiler() -> list[str]:
    """Version text and options that depend on the machine."""
    if not _compiler_facts:
        version = _run(["g++", "--version"], HERE).splitlines()[0]
        cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        # fmaf as an instruction; contraction stays off, so no other result changes.
        _compiler_facts.extend([version, *(["-mfma"] if re.search(r"^flags.*\bfma\b", cpu, re.M) else [])])
    return _compiler_facts


def _runtime() -> list[Path]:
    """The compiled scheduler and watcher, the same for every kernel."""
    options = [
        "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-extern-tls-init",
        "-Wall", "-Wextra", f"-DCUDA_SIM_DYNAMIC_BYTES={DYNAMIC_BYTES}", f"-DCUDA_SIM_GUARD_BYTES={GUARD_BYTES}",
    ]  # fmt: skip
    key = hashlib.sha256(repr([_compiler(), options]).encode())
    for name in ("cuda_sim.h", "watch.h", "cuda_sim.cpp", "watch.cpp"):
        key.update((HERE / name).read_bytes())
    paths = []
    for name in ("cuda_sim", "watch"):
        path = _cache_directory() / f"{name}-{key.hexdigest()[:32]}.o"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = Path(scratch) / path.name
                _run(["g++", *options, "-c", f"{name}.cpp", "-o", str(built)], HERE)
                os.replace(built, path)
        paths.append(path)
    return paths


def _dynamic_names(built: Path) -> list[str]:
    """Every `extern __shared__` array is an undefined thread-local symbol of the object file."""
    table = _run(["readelf", "-sW", str(built)], HERE)
    return sorted({line.split()[-1] for line in table.splitlines() if " TLS " in line and " UND " in line})


def _build(source: Path, entry: str, defines: Mapping[str, Any], sanitize: bool, watch: bool) -> Path:
    runtime = _runtime()
    options = [*_OPTIONS, *_compiler()[1:], *(_SANITIZE if sanitize else []), *(_WATCH if watch else [])]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    key = hashlib.sha256(repr([_compiler(), options, [file.name for file in runtime], entry, source.name]).encode())
    for file in [source, *sorted(source.parent.rglob("*.cuh")), *sorted(KERNELS.rglob("*.cuh"))]:
        key.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    path = _cache_directory() / f"{entry}-{key.hexdigest()[:32]}.so"
    if path.exists():
        return path
    inside = source.is_relative_to(KERNELS)
    cwd, name = (KERNELS.parent, source.relative_to(KERNELS.parent)) if inside else (source.parent, source.name)
    folder = "kernels" if inside else str(KERNELS)
    wrapper = f"""
#include "{name}"
extern "C" CUDA_SIM_UNWATCHED void cuda_sim_entry(void** params) {{
    static auto* volatile entry = &{entry};  // volatile: g++ must not look through the call and drop a fault
    cuda_sim::invoke(entry, params);
}}
extern "C" __attribute__((visibility("default"))) int cuda_sim_describe(char* letters, int* sizes) {{
    return cuda_sim::describe(&{entry}, letters, sizes);
}}
"""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built, memory, library = (str(Path(scratch) / file) for file in ("kernel.o", "shared.s", "kernel.so"))
        include = ["-include", str(HERE / "cuda_sim.h"), "-I", ".", "-I", folder]
        _run(["g++", *options, *include, "-x", "c++", "-c", "-", "-o", built], cwd, wrapper)
        names = sorted({"cuda_sim_dynamic", *_dynamic_names(Path(built))})
        labels = "".join(f".globl {n}\n.hidden {n}\n.type {n}, @object\n{n}:\n" for n in names)
        Path(memory).write_text(
            f'.section .tbss,"awT",@nobits\n.p2align 10\n{labels}.zero {DYNAMIC_BYTES + GUARD_BYTES}\n.section .note.GNU-stack,"",@progbits\n'
        )
        _run(["g++", "-shared", "-Wl,-z,defs", built, memory, *map(str, runtime), "-o", library, "-lm", "-ldl"], HERE)
        os.replace(library, path)
    return path


_one_launch = threading.Lock()  # signal handlers and stacks belong to the process
_stacks: list[int] = []


class Simulated:
    """One compiled kernel.

    source    a file of kernels/, or an absolute path
    entry     the name of its __global__ function
    defines   the macros baked into it
    sanitize  build with -fsanitize=undefined: 32-bit overflow, misaligned vector access, index outside an array
    watch     look at every access: reads and writes outside the arrays, races between threads (watch.cpp). Slow
    """

    def __init__(
        self,
        source: str | Path,
        entry: str,
        defines: Mapping[str, Any] | None = None,
        sanitize: bool = False,
        watch: bool = False,
    ) -> None:
        self.source, self.entry, self.watch = KERNELS / source, entry, watch
        self._path = _build(self.source, entry, defines or {}, sanitize, watch)
        self._library = ctypes.CDLL(str(self._path))
        self._library.cuda_sim_launch.restype = ctypes.c_char_p
        letters, sizes = ctypes.create_string_buffer(256), (ctypes.c_int * 256)()
        count = self._library.cuda_sim_describe(letters, sizes)
        self.params = [(letters.raw[i : i + 1].decode(), sizes[i]) for i in range(count)]

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        smem: int = 0,
        params: Sequence[Any] = (),
        seed: int = 0,
        schedule: str | None = None,
        seconds: float = 60.0,
        previous: Sequence[tuple[np.ndarray, Any]] = (),
    ) -> None:
        """Run the grid. `params` in kernel order: ctypes values, NumPy arrays, None, or Python numbers.

        seed      orders threads and blocks, and picks the schedule where `schedule` is None
        seconds   of CPU time, after which the launch is an error
        previous  (array, earlier) pairs: arrays that the kernel only reads and that the grid before it writes. Every block
                  starts with the earlier contents; that grid ends when a thread of the block is at wait_for_previous_grid() and
                  no other can go on without
        """
        grid3 = _dims(grid, "grid", (2**31 - 1, 65535, 65535))
        block3 = _dims(block, "block", (1024, 1024, 64))
        if block3[0] * block3[1] * block3[2] > 1024:
            raise SimulatorError(f"block: {block3} are more than 1024 threads")
        values = self._values(params)
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        code = _SCHEDULE_CODES[schedule or SCHEDULES[seed % len(SCHEDULES)]]
        spans = _spans(params) if self.watch else []
        bounded = not any(letter == "p" and isinstance(p, ctypes._SimpleCData) and p.value
                          for p, (letter, _) in zip(params, self.params, strict=True))  # fmt: skip
        written = [stretch for array, earlier in previous for stretch in _written(array, earlier, params)]
        with _one_launch:
            if not _stacks:
                self._library.cuda_sim_make_stacks.restype = ctypes.c_void_p
                made = self._library.cuda_sim_make_stacks()
                if made is None:
                    raise SimulatorError("no memory for the stacks of the fibers")
                _stacks.append(made)
            error = self._library.cuda_sim_launch(
                (ctypes.c_uint * 3)(*grid3), (ctypes.c_uint * 3)(*block3), ctypes.c_int(smem), pointers,
                ctypes.c_ulonglong(seed), ctypes.c_int(code), ctypes.c_double(seconds),
                ctypes.c_void_p(_stacks[0]),
                (_Span * max(1, len(spans)))(*spans), ctypes.c_int(len(spans) if self.watch else -1),
                ctypes.c_int(bounded),
                (_Written * max(1, len(written)))(*written), ctypes.c_int(len(written)),
            )  # fmt: skip
        if error is not None:
            text = re.sub(r"\+0x[0-9a-f]+", self._line, error.decode())
            raise SimulatorError(f"{self.entry}: {text}")

    def _line(self, offset: re.Match[str]) -> str:
        """File and line of an offset into the library, followed by those it was inlined into."""
        # The address is where the call returns to: one byte earlier lies in the line that made it.
        address = hex(int(offset[0], 16) - 1)
        lines = _run(["addr2line", "-i", "-e", str(self._path), address], HERE).splitlines()
        return " from ".join(line.split(" (")[0].removeprefix(f"{KERNELS.parent}/") for line in lines if "<stdin>" not in line)

    def _values(self, params: Sequence[Any]) -> list[Any]:
        if len(params) != len(self.params):
            raise SimulatorError(f"{self.entry} takes {len(self.params)} parameters, got {len(params)}")
        return [self._value(i, value, *self.params[i]) for i, value in enumerate(params)]

    def _value(self, index: int, value: Any, letter: str, size: int) -> Any:
        """The ctypes value of one parameter, of the kind and size that the kernel declares."""
        if value is None:
            value = ctypes.c_void_p(None)
        elif isinstance(value, np.ndarray):
            value = ctypes.c_void_p(value.ctypes.data)
        elif letter in "iu" and isinstance(value, (int, np.integer)):  # bool is an int
            low, high = (-(2 ** (8 * size - 1)), 2 ** (8 * size - 1)) if letter == "i" else (0, 2 ** (8 * size))
            if not low <= value < high:
                raise SimulatorError(f"{self.entry}: parameter {index} has {size} bytes, got {value}")
            kind = f"c_{'u' if letter == 'u' else ''}int{8 * size}"
            value = getattr(ctypes, kind)(int(value))
        elif letter == "f" and isinstance(value, (int, float, np.number)):
            value = (ctypes.c_float if size == 4 else ctypes.c_double)(float(value))
        name = type(value).__name__
        given = (
            "p" if name in ("c_void_p", "c_char_p") or name.startswith("LP_")
            else "f" if name in ("c_float", "c_double")
            else "iu" if name.startswith("c_") else "s"
        )  # fmt: skip
        if letter not in given or not isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes._Pointer)):
            raise SimulatorError(f"{self.entry}: parameter {index} is of kind {letter!r}, got {value!r}")
        if ctypes.sizeof(value) != size:
            raise SimulatorError(f"{self.entry}: parameter {index} has {size} bytes, got {value!r}")
        return value


class _Span(ctypes.Structure):
    """Span of watch.h."""

    _fields_ = [
        ("begin", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("owned", ctypes.c_void_p), ("parameter", ctypes.c_int),
    ]  # fmt: skip


class _Written(ctypes.Structure):
    """Written of cuda_sim.cpp."""

    _fields_ = [
        ("at", ctypes.c_void_p), ("earlier", ctypes.c_char_p), ("real", ctypes.c_char_p), ("bytes", ctypes.c_size_t),
    ]  # fmt: skip


def _written(array: np.ndarray, earlier: Any, params: Sequence[Any]) -> Iterator[_Written]:
    """The elements of the array, a stretch without gaps each: what lies between them may be another array's."""
    if not any(isinstance(p, np.ndarray) and np.may_share_memory(array, p) for p in params):
        raise SimulatorError("previous: an array that is no parameter")
    old = np.asarray(earlier)
    if (old.shape, old.dtype) != (array.shape, array.dtype):
        raise SimulatorError(f"previous: {array.dtype} {array.shape} cannot have been {old.dtype} {old.shape}")
    return _stretches(np.asarray(array), old)


def _stretches(array: np.ndarray, earlier: np.ndarray) -> Iterator[_Written]:
    if array.flags.c_contiguous:
        yield _Written(array.ctypes.data, earlier.tobytes(), array.tobytes(), array.nbytes)
    else:
        for i in range(len(array)):
            yield from _stretches(array[i, ...], earlier[i, ...])


def _spans(params: Sequence[Any]) -> list[_Span]:
    """The memory of the arrays among the parameters, each byte once."""
    spans: dict[int, _Span] = {}
    plain = []
    for index, array in enumerate(params):
        if isinstance(array, RedzoneArray) and array._zone is not None:
            buffer, owned = array._zone
            begin = buffer.ctypes.data
            spans.setdefault(begin, _Span(begin, buffer.size, owned.ctypes.data, index))
        elif isinstance(array, np.ndarray) and array.size:
            ends = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
            begin = array.ctypes.data + sum(min(end, 0) for end in ends)
            plain.append((begin, array.ctypes.data + sum(max(end, 0) for end in ends) + array.itemsize, index))
    for begin, end, index in sorted(plain):
        last = next((s for s in spans.values() if s.begin <= begin < s.begin + s.bytes), None)
        if last is None:
            spans[begin] = _Span(begin, end - begin, None, index)
        elif last.owned is None:
            last.bytes = max(last.bytes, end - last.begin)
    return list(spans.values())


# ---- arrays between guard bytes -----------------------------------------------------------------------------------

_PATTERN = bytes([0xA5, 0xFF])  # NaN as bfloat16, float16 and float32; a negative index as an integer
_ZONE = 1 << 14  # more than the threads of a block write when their guard is gone


class RedzoneArray(np.ndarray):
    """An array whose surroundings, gaps between rows included, hold a pattern that check() compares."""

    _zone: tuple[np.ndarray, np.ndarray] | None = None  # bytes of the whole buffer; True where an element lies

    def __array_finalize__(self, parent: Any) -> None:
        self._zone = getattr(parent, "_zone", None)

    def check(self) -> None:
        """Raise AssertionError if a byte that belongs to no element was written."""
        assert self._zone is not None, "not made by redzone_array"
        buffer, owned = self._zone
        wrong = np.flatnonzero(~owned & (buffer != _poison(buffer.size)))
        if wrong.size:
            first, last = np.flatnonzero(owned)[[0, -1]] if owned.any() else (_ZONE, _ZONE - 1)
            at = int(wrong[0])
            where = (
                f"{first - at} bytes before the array" if at < first
                else f"{at - last} bytes past the end of the array" if at > last
                else f"in a gap, {at - first} bytes from the start of the array"
            )  # fmt: skip
            raise AssertionError(f"{wrong.size} bytes written outside the elements, the first {where}")

    def unwritten(self) -> int:
        """How many elements still hold the poison they were made with."""
        raw = np.ascontiguousarray(self).reshape(-1).view(np.uint8).reshape(self.size, self.itemsize)
        pattern = np.resize(np.frombuffer(_PATTERN, np.uint8), raw.shape[1])
        return int((raw == pattern).all(axis=1).sum())


def _poison(count: int) -> np.ndarray:
    return np.resize(np.frombuffer(_PATTERN, np.uint8), count)


def redzone_array(
    shape: int | Sequence[int],
    dtype: Any,
    fill: Any = None,
    strides: Sequence[int] | None = None,
    shift: int = 0,
) -> RedzoneArray:
    """An array between guard bytes.

    fill     a number or array to copy in; None leaves every element poisoned
    strides  in elements (packed when None); the gaps they leave are guarded as well
    shift    elements by which the start misses a multiple of 256 bytes
    """
    dims = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    kind = np.dtype(dtype)
    if strides is None:
        strides = [int(np.prod(dims[i + 1 :], dtype=np.int64)) for i in range(len(dims))]
    span = 1 + sum((n - 1) * s for n, s in zip(dims, strides, strict=True)) if all(dims) else 0
    start = 256 + _ZONE + shift * kind.itemsize
    whole = np.empty(start + span * kind.itemsize + _ZONE + 256, np.uint8)
    buffer = whole[-whole.ctypes.data % 256 :]
    buffer[:] = _poison(buffer.size)
    owned = np.zeros(buffer.size, np.bool_)
    step = tuple(s * kind.itemsize for s in strides)
    np.lib.stride_tricks.as_strided(owned[start:], (*dims, kind.itemsize), (*step, 1))[...] = True
    array = np.ndarray(dims, kind, buffer.data, start, step).view(RedzoneArray)
    array._zone = (buffer, owned)
    if fill is not None:
        array[...] = fill
    return array
