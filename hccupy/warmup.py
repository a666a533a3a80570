"""Every kernel that calls of some sizes can need, compiled (and loaded) ahead of the first call.

Binaries hold a model's constants, not its batch: which of a handful is taken depends on a few thresholds of the token and
request counts. `walk` finds them by asking the launch functions, which are pure, at counts from 1 to four million.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from . import arch as arches
from . import build, cache, cuda, plan
from .arch import Arch
from .errors import ArgumentError, DtypeError, HccupyError, NoGpuError
from .explain import here, imagine
from .ops import REGISTRY, get
from .plan import Plan
from .spec import Bound, OpSpec

Request = tuple[str, dict[str, Any], str]  # op, sizes, dtype

# What `hccupy doctor` launches; every bundle holds it.
TRIAL: Request = ("ihc_post", {"tokens": 5, "hc": 4, "hidden": 64}, "float32")

POWERS = tuple(2**i for i in range(23))
# Run-time lengths that plans may depend on, and the counts they are asked at where the caller gives none.
SPANS = {"requests": POWERS[:17], "block_size": POWERS[:11], "tokens": POWERS}
DENSE = tuple(sorted({*range(1, 1025), *(int(1024 * 1.05**i) for i in range(170))}))  # where tokens are the only such length
# Scalars that engines change from call to call or model to model; others stay at their defaults.
CHOICES = {"qk_norm_policy": ("none", "rope_then_norm", "norm_then_rope"), "is_prefill": (True, False), "max_q_len": (None, 1)}


def warmup(op: str, *, dtype: str = "bfloat16", arch: str | None = None, **sizes: Any) -> int:
    """Compile and load every kernel that calls of such sizes can need; how many there are.

    `sizes` are the words of `supports`: axes, scalars, and name=True for optional arrays. What is left out is tried at
    every value that matters: token and request counts, block sizes, with and without optional arrays, norm policies,
    prefill and decode. Arrays are taken to be contiguous and 16-byte aligned, other scalars at their defaults.
    Kernels are loaded on the current GPU; with `arch` ("sm_90a") they are compiled into the cache only, which needs no GPU.

    Raises what the op raises for such sizes, NoGpuError without a GPU and `arch`, CompileError.
    """
    found, device = target(arch)
    made = walk(op, sizes, dtype, found)
    for each in made:
        ready(each, device)
    return len(made)


def target(arch: str | None) -> tuple[Arch, int | None]:
    """(architecture, device to load on or None).

    Raises NoGpuError where none is named and none is here.
    """
    if arch:
        return arches.named(arch), None
    found = here()
    if found is None:
        raise NoGpuError("warmup: expected a usable GPU or an architecture, got neither. Name one (--arch 90a) to compile into the cache; see `hccupy doctor`.")
    return found, cuda.current_device()


def ready(made: Plan, device: int | None) -> None:
    """Load the kernel of a plan on `device`, or only have it in the bundle or cache."""
    if device is None:
        build.binary(made)
    else:
        build.function(made, device)


def compile_in_processes(todo: Sequence[Plan], jobs: int) -> Iterator[int]:
    """Compile into the cache what it lacks, in `jobs` processes; for each kernel that is done, 1 if it was compiled and 0 if not.

    NVRTC serves one compilation at a time in a process. For command lines: processes are spawned, which runs the caller's main
    module again unless it is guarded.
    """
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_compile, made) for made in todo]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _compile(made: Plan) -> int:
    before = len(build.compiled)
    build.binary(made)
    return len(build.compiled) - before


def compile_ahead(todo: Iterable[Plan], jobs: int | None, bar: Callable[[Iterable[int], int], Iterable[int]] = lambda items, total: items) -> int:
    """Have what bundle and cache lack in the cache, where several processes are quicker; how many kernels were compiled.

    Otherwise, and where there is no cache to keep them in, nothing: whoever asks for the kernels compiles them. bar(items, total)
    shows progress.
    """
    missing = [p for p in todo if not build.at_hand(p)]
    count = workers(len(missing), jobs)
    return sum(bar(compile_in_processes(missing, count), len(missing))) if count > 1 and cache.usable() else 0


def workers(kernels: int, jobs: int | None) -> int:
    """How many processes to compile so many kernels in: `jobs`, or a core each, but no more than it takes to be quicker.

    A process starts in about the time of two compilations.
    """
    return min(jobs or len(os.sched_getaffinity(0)), max(kernels // 4, 1))


def walk(op: str, sizes: dict[str, Any], dtype: str, on: Arch) -> list[Plan]:
    """One Plan for each distinct binary of such calls (of those that share one, the one with most shared memory).

    Raises what the op raises where no call of such sizes is possible.
    """
    spec = get(op)
    found: dict[tuple[str, str, tuple[str, ...]], Plan] = {}
    refusals: list[HccupyError] = []
    for words in _words(spec, sizes):
        try:
            first = imagine(spec, words, dtype)
        except ArgumentError as error:  # such optional arrays and scalars do not go together
            refusals.append(error)
            continue
        for bound in _dtypes(spec, first):
            for made in _Lengths(spec, bound, set(words), on).plans():
                kernel = made.source, made.entry, made.flags
                if kernel not in found or made.launch.smem > found[kernel].launch.smem:
                    found[kernel] = made
    if not found and refusals:
        raise refusals[0]
    return list(found.values())


def _words(spec: OpSpec, sizes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`sizes` with every choice of what they leave open."""
    options: dict[str, tuple[Any, ...]] = {p.name: (False, True) for p in spec.args if p.optional}
    options |= {s.name: CHOICES[s.name] for s in spec.scalars if s.name in CHOICES}
    open_ = {name: values for name, values in options.items() if name not in sizes}
    for values in itertools.product(*open_.values()):
        yield {**sizes, **dict(zip(open_, values, strict=True))}


def _dtypes(spec: OpSpec, bound: Bound) -> list[Bound]:
    """The call with norm weights of the model's dtype or float32, and with index arrays of both widths."""
    found: list[Bound] = []
    for weights, indices in itertools.product((None, "float32"), (None, "int32")):
        dtypes = dict(bound.dtypes)
        for a in spec.args:
            for word in (weights if a.optional else None, indices):
                if bound.has(a.name) and word in a.dtypes:
                    dtypes[a.name] = str(word)
        if all(dtypes != b.dtypes for b in found):
            found.append(replace(bound, dtypes=dtypes))
    return found


class _Lengths:
    """The plans of one bound call as its run-time lengths vary. `spans`: those the caller left open."""

    def __init__(self, spec: OpSpec, bound: Bound, given: set[str], on: Arch) -> None:
        self.spec, self.bound, self.on = spec, bound, on
        self.seen: dict[Hashable, Bound] = {}
        self.spans = {n: s for n, s in SPANS.items() if n not in given and any(a.name == n and not a.baked for a in spec.axes)}
        self.spans = {n: s for n, s in self.spans.items() if self._matters(n)}
        if self.spans.keys() == {"tokens"}:
            self.spans["tokens"] = DENSE

    def at(self, lengths: dict[str, int]) -> Hashable:
        """What tells binaries of this call apart (all else is the same); None where nothing can run it."""
        bound = replace(self.bound, axes={**self.bound.axes, **lengths})
        for v in self.spec.variants:
            launch, _ = plan.launch_of(v, bound, self.on)
            if launch is not None:
                if launch.grid[0] > plan.MOST_BLOCKS:
                    return None
                key = v.name, launch.smem, tuple(launch.defines.items())
                self.seen.setdefault(key, bound)
                return key
        return None

    def _matters(self, name: str) -> bool:
        """Does the binary change with this length, the others at their least or their most?"""
        for end in (0, -1):
            rest = {n: s[end] for n, s in self.spans.items() if n != name}
            if len({self.at({**rest, name: n}) for n in self.spans[name]} - {None}) > 1:
                return True
        return False

    def plans(self) -> list[Plan]:
        """One plan for each key: every combination, denser in the last length where the key changes."""
        *others, last = self.spans or {"": (0,)}
        for values in itertools.product(*(self.spans[n] for n in others)):
            fixed = dict(zip(others, values, strict=True))
            keys = [(n, self.at({**fixed, last: n} if last else {})) for n in self.spans.get(last, (0,))]
            for low, high in itertools.pairwise(keys):
                self._between(fixed, last, low, high)
        return [plan.make(self.spec, bound, self.on) for bound in self.seen.values()]

    def _between(self, fixed: dict[str, int], last: str, low: tuple[int, Hashable], high: tuple[int, Hashable]) -> None:
        """Look between two counts whose keys differ, by halving."""
        if high[0] - low[0] < 2 or low[1] == high[1]:
            return
        middle = (low[0] + high[0]) // 2
        found = (middle, self.at({**fixed, last: middle}))
        self._between(fixed, last, low, found)
        self._between(fixed, last, found, high)


def requests(
    op: str | None, sizes: dict[str, Any], dtype: str, hidden: int | None, hc: int, heads: tuple[int, int] | None, head_dim: int, everything: bool
) -> list[Request]:
    """What the command line asks for: an op with its sizes, or all ops of a model (`hidden`, `heads`, or both).

    `everything` stands for hidden 6144 and 64/8 heads where those are not given. `sizes` go to every op that knows the
    word. Caches are asked for in e4m3 as well. Raises ArgumentError where nothing is named or a word is unknown.
    """
    if op is not None:
        if hidden or heads or everything:
            raise ArgumentError(f"{op}: expected an op with its sizes, or --hidden, --heads and --all, got both. Give name=value words to the op.")
        return [(op, sizes, dtype)]
    if everything:
        hidden, heads = hidden or 6144, heads or (64, 8)
    if not hidden and not heads:
        raise ArgumentError("hccupy: ops: expected an op with its sizes, --hidden H, --heads Q/K or --all, got none of them.")
    found: list[Request] = []
    unknown = set(sizes)
    for spec in REGISTRY.values():
        axes = {a.name for a in spec.axes if a.baked}
        model: dict[str, Any] = {}
        if hidden and "hidden" in axes:
            model = {"hidden": hidden, "hc": hc}
        elif heads and "head_dim" in axes:
            model = {n: v for n, v in (("q_heads", heads[0]), ("kv_heads", heads[1]), ("head_dim", head_dim)) if n in axes}
        if not model:
            continue
        known = {a.name for a in spec.axes} | {p.name for p in spec.params} | set(spec.imagine)
        unknown -= known
        kinds = [dtype] if dtype in spec.args[0].dtypes and "float8_e4m3fn" in spec.args[0].dtypes else []
        for kind in dict.fromkeys((dtype, *(["float8_e4m3fn"] if kinds else []))):
            if any(kind in p.dtypes for p in spec.args):
                found.append((spec.name, {**model, **{n: v for n, v in sizes.items() if n in known}}, kind))
    if not found:
        raise DtypeError(f"hccupy: dtype: expected one that the ops take, got {dtype!r}.")
    if unknown:
        raise ArgumentError(f"hccupy: sizes: expected words that one of the ops knows, got {', '.join(sorted(unknown))}.")
    return found


def plans(asked: Iterable[Request], on: Arch) -> list[Plan]:
    """The distinct binaries of several requests."""
    found: dict[str, Plan] = {}
    for op, sizes, dtype in asked:
        for made in walk(op, sizes, dtype, on):
            known = found.get(build.identity(made) + made.entry)
            if known is None or made.launch.smem > known.launch.smem:
                found[build.identity(made) + made.entry] = made
    return list(found.values())
