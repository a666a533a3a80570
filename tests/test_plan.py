"""Plans are pure and legal for every case and architecture; api, spec, kernels and the packed arguments state one signature."""

from __future__ import annotations

import ctypes
import inspect
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

import hccupy
from hccupy import api, arch, build, check, cuda, launch, plan
from hccupy.errors import ArgumentError, HccupyError, LaunchError, NoGpuError
from hccupy.frameworks import numpy_
from hccupy.ops import REGISTRY
from hccupy.spec import Scalar

OPS = sorted(REGISTRY)
CUDA = ("cuda", 0)


def small_cases(spec):
    """The cases for tests, not those for the bench."""
    return [c for c in spec.cases if not c.name.startswith("bench")]


def bound_of(spec, given, tokens=None, framework="numpy", outs=None):
    """The Bound of a call with such NumPy arrays if they were on CUDA; `tokens` stretches that axis without memory."""
    metas = {}
    for a in (*spec.args, *spec.outputs):
        array = (outs or {}).get(a.name) if a in spec.outputs else given.get(a.name)
        if array is not None:
            meta = numpy_.meta(array)
            shape = meta.shape
            if tokens is not None and isinstance(a.axes, tuple) and a.axes[0] == "tokens":
                shape = (tokens, *shape[1:])
            metas[a.name] = replace(meta, shape=shape, device=CUDA, readonly=False)
    scalars = {s.name: given.get(s.name, s.default) for s in spec.scalars}
    return check.bind(spec, metas, scalars, framework, dict.fromkeys(metas, 0))


# ---- one signature, four times ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_api_signature_is_the_spec(op):
    """Names, order and defaults of the parameters, then one keyword an output, then stream."""
    spec = REGISTRY[op]
    parameters = inspect.signature(getattr(hccupy, op)).parameters
    keywords = [o.keyword for o in spec.outputs if o.keyword]
    assert set(parameters) == {p.name for p in spec.params} | set(keywords) | {"stream"}
    assert [n for n in parameters if n in {p.name for p in spec.params}] == [p.name for p in spec.params]
    assert [n for n in parameters if n in keywords] == keywords
    assert list(parameters)[-1] == "stream"
    for p in spec.params:
        given = parameters[p.name]
        if isinstance(p, Scalar):
            assert given.default == p.default and type(given.default) is type(p.default), p.name
            assert (given.kind is given.KEYWORD_ONLY) or not p.keyword, p.name
        else:
            assert given.default is (None if p.optional else given.empty), p.name
    for name in (*keywords, "stream"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and parameters[name].default is None


@pytest.mark.parametrize("op", OPS)
def test_api_passes_every_argument_to_its_place(op, monkeypatch):
    spec = REGISTRY[op]
    monkeypatch.setattr(api, "run", lambda *a: a)
    marks = {name: object() for name in inspect.signature(getattr(api, op)).parameters}
    got, given, outs, stream = getattr(api, op)(**marks)
    assert got is spec and stream is marks["stream"]
    assert list(given) == [marks[p.name] for p in spec.params]
    assert list(outs) == [marks[o.keyword] if o.keyword else None for o in spec.outputs]


@pytest.mark.parametrize("op", OPS)
def test_docstring_names_every_argument_and_result(op):
    text = getattr(hccupy, op).__doc__
    spec = REGISTRY[op]
    for name in [*(p.name for p in spec.params), *(o.keyword or o.name for o in spec.outputs), "stream"]:
        assert re.search(rf"^{name} : ", text, re.MULTILINE), name
    for section in ("Parameters", "Returns", "Raises", "Formula"):
        assert section in text


SIGNATURE = re.compile(r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)\(([^{;]*)\)\s*\{')


def kernel_signatures():
    """(file, entry) -> [(name, type, const)] of every extern "C" kernel of an op (ceiling.cu measures the machine for the bench)."""
    found = {}
    for path, text in build.sources().items():
        for entry, words in SIGNATURE.findall(re.sub(r"//[^\n]*|/\*.*?\*/", "", text.decode(), flags=re.DOTALL)):
            rows = []
            for parameter in words.split(","):
                *kind, name = parameter.replace("*", " * ").replace("__restrict__", " ").split()
                const = "const" in kind
                rows.append((name, "pointer" if "*" in kind else " ".join(w for w in kind if w != "const"), const))
            if path != "ceiling.cu":
                found[path, entry] = rows
    return found


@pytest.mark.parametrize("op", OPS)
def test_kernel_parameters_are_the_spec(op):
    """Names and types, in order, of every kernel an op can start (headers with entry points included); what is not written is const."""
    spec = REGISTRY[op]
    expected = list(launch.parameters(spec))
    read_only = {p.name for p in spec.args if not p.mutated}
    found = kernel_signatures()
    for entry in {v.entry for v in spec.variants}:
        same = {path: rows for (path, name), rows in found.items() if name == entry}
        assert same, f"no kernel {entry}"
        for path, rows in same.items():
            assert [(name, kind) for name, kind, _ in rows] == expected, f"{path}: {entry}"
            assert {name for name, kind, const in rows if kind == "pointer" and const} == read_only, f"{path}: {entry}"


def test_every_kernel_has_an_op():
    assert {entry for _, entry in kernel_signatures()} == {v.entry for s in REGISTRY.values() for v in s.variants}


def test_every_source_exists():
    assert {v.source for s in REGISTRY.values() for v in s.variants} <= set(build.sources())


# ---- plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_plans_are_legal_on_every_architecture(op, rng):
    """Grid, block, shared memory, cluster; nothing but ints reaches the compiler; run-time values are not baked."""
    spec = REGISTRY[op]
    for case in small_cases(spec):
        bound = bound_of(spec, spec.make_inputs(case, rng))
        for target in arch.TABLE:
            made = plan.make(spec, bound, target)
            how = made.launch
            threads = int(np.prod(how.block))
            assert 1 <= threads <= 1024 and threads % 32 == 0, (case.name, target.name, how)
            assert 1 <= how.grid[0] < 2**31 and how.grid[1:] == (1, 1), (case.name, target.name, how)
            assert 0 <= how.smem <= target.smem, (case.name, target.name, how)
            assert 1 <= how.cluster <= (16 if target.clusters_of_16 else 8) and (how.cluster == 1 or target.clusters)
            assert how.grid[0] % how.cluster == 0
            assert not how.pdl or target.clusters
            assert how.why
            assert all(isinstance(v, int) and re.fullmatch(r"k[A-Za-z0-9]+|HCCUPY_[A-Z0-9_]+", n) for n, v in made.defines.items()), made.defines
            assert made == plan.make(spec, bound, target)  # pure
            other = {s.name: 7 if s.kind == "int" else 0.125 for s in spec.scalars if not s.baked and bound.scalars[s.name] is not None}
            if "max_q_len" not in other:  # sets the grid
                assert made == plan.make(spec, replace(bound, scalars={**bound.scalars, **other}), target)  # eps and the like are not baked


@pytest.mark.parametrize("op", [n for n in OPS if any(a.name == "tokens" for a in REGISTRY[n].axes)])
def test_G12_few_binaries_whatever_the_token_count(op, rng):
    """A server sees every prefill length: none of them may bring a compilation of its own.

    Six: rope has one for each of 1, 16, 64, 256 and 512 rows and one for all above. Any two of them put together cost a size 15 to 60 %.
    """
    spec = REGISTRY[op]
    for case in small_cases(spec)[:2]:
        given = spec.make_inputs(case, rng)
        for target in (arch.named("sm_80"), arch.named("sm_90a")):
            counts = [*range(1, 100), 255, 256, 257, 300, 511, 1000, 1024, 4096, 5000, 16384, 100_000]
            plans = [plan.make(spec, bound_of(spec, given, tokens=n), target) for n in counts]
            assert len({(p.source, p.entry, p.flags) for p in plans}) <= 6, case.name


@pytest.mark.parametrize("op", ["rope_norm_store_kv", "rope_norm_store_kv_fp8"])
def test_rope_leaves_room_for_the_next_grid(op, rng):
    """Shared memory that spreads a grid's blocks over the machine must let the next grid stand beside it."""
    spec, target = REGISTRY[op], arch.named("sm_90a")
    given = spec.make_inputs(small_cases(spec)[0], rng)
    for tokens in range(1, 2 * target.sms + 1):
        how = plan.make(spec, bound_of(spec, given, tokens=tokens), target).launch
        fit = (target.smem + 1024) // (how.smem + 1024) if how.smem else target.blocks  # the driver takes 1 KB of each block
        assert fit * target.sms >= 2 * how.grid[0], f"{tokens} rows: {how.grid[0]} blocks of {how.smem} bytes"


@pytest.mark.parametrize("op", OPS)
def test_C11_the_largest_token_count_is_legal_or_refused(op, rng):
    """2^31 - 1 rows: a grid the driver takes, or an error of ours; never a wrapped number."""
    spec = REGISTRY[op]
    given = spec.make_inputs(small_cases(spec)[0], rng)
    for target in arch.TABLE:
        try:
            how = plan.make(spec, bound_of(spec, given, tokens=2**31 - 1), target).launch
        except HccupyError:
            continue
        assert how.grid[0] < 2**31


def test_no_variant_names_every_reason(rng):
    spec = REGISTRY["ihc_post"]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[0], rng))
    none = replace(spec, variants=tuple(replace(v, when=lambda b, a: (False, "not today")) for v in spec.variants))
    with pytest.raises(ArgumentError, match=r"ihc_post: variant: expected a kernel for sm_80, got none\. .*not today"):
        plan.make(none, bound, arch.named("sm_80"))


def test_misaligned_device_memory_is_refused(rng):
    """A bf16 array at an odd address faults on the device, on the scalar path as well."""
    spec = REGISTRY["ihc_post"]
    given = spec.make_inputs(small_cases(spec)[0], rng)
    metas = {n: replace(numpy_.meta(a), device=CUDA) for n, a in given.items()}
    with pytest.raises(hccupy.LayoutError, match="ihc_post: residual"):
        check.bind(spec, metas, {}, "cupy", {**dict.fromkeys(metas, 0), "residual": 4097})


@pytest.mark.parametrize(
    "offset, strides, expected", [(0, [], 16), (16, [32], 16), (8, [32], 8), (0, [4100 * 2], 8), (2, [64], 2), (0, [-96, 64], 16), (0, [100 * 4, 6], 2)]
)
def test_alignment_counts_pointer_and_pitch(offset, strides, expected):
    assert check.alignment(4096 + offset, strides) == expected


# ---- architectures ----------------------------------------------------------------------------------------------

NVRTC_13 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize(
    "capability, supported, name",
    [
        ((8, 0), NVRTC_13, "sm_80"),
        ((8, 6), NVRTC_13, "sm_86"),
        ((8, 7), NVRTC_13, "sm_87"),
        ((8, 9), NVRTC_13, "sm_89"),
        ((9, 0), NVRTC_13, "sm_90a"),
        ((10, 0), NVRTC_13, "sm_100a"),
        ((10, 3), NVRTC_13, "sm_103a"),
        ((12, 0), NVRTC_13, "sm_120a"),
        ((12, 1), NVRTC_13, "sm_121"),
        ((13, 0), NVRTC_13, "compute_121"),
        ((10, 0), (80, 89, 90), "compute_90"),
        ((12, 0), (80, 89, 90), "compute_90"),
    ],
)
def test_architecture_of_a_device(capability, supported, name):
    """Known to NVRTC: its own binary. Newer than NVRTC: PTX of the newest it knows."""
    found = arch.from_capability(*capability, supported)
    assert found.name == name and found.ptx == name.startswith("compute")
    assert found.clusters == (capability >= (9, 0))


@pytest.mark.parametrize("capability, supported, words", [((7, 5), NVRTC_13, "8.0 or newer, got 7.5"), ((8, 0), (90, 100), "sm_80.*Install")])
def test_devices_that_cannot_be_served(capability, supported, words):
    with pytest.raises(NoGpuError, match=words):
        arch.from_capability(*capability, supported)


def test_names_of_architectures():
    assert arch.named("90") is arch.named("sm_90") is arch.named("90a") is arch.named("sm_90a")
    assert arch.named("sm_90a").at_least(9) and not arch.named("sm_89").at_least(9)
    for bad in ("sm_70", "", "hopper"):
        with pytest.raises(ArgumentError, match=re.escape(f"got {bad!r}")):
            arch.named(bad)


# ---- packed arguments -------------------------------------------------------------------------------------------

C_TYPE = {"pointer": ctypes.c_uint64, "long long": ctypes.c_int64, "float": ctypes.c_float, "int": ctypes.c_int32}


class Driver:
    """cuLaunchKernelEx that notes what a kernel would have read."""

    def __init__(self, spec):
        self.spec, self.code, self.seen = spec, 0, []

    def cuLaunchKernelEx(self, config, function, table, extra):
        c = cuda.LaunchConfig.from_address(config)
        addresses = (ctypes.c_void_p * len(list(launch.parameters(self.spec)))).from_address(table)
        read = {n: C_TYPE[kind].from_address(a).value for (n, kind), a in zip(launch.parameters(self.spec), addresses, strict=True)}
        attributes = {c.attributes[i].id: list(c.attributes[i].value[:3]) for i in range(c.count)}
        self.seen.append((read, tuple(c.grid), tuple(c.block), c.smem, c.stream, attributes, function, threading.get_ident(), table))
        return self.code


def launcher(spec, bound, monkeypatch, **changes):
    made = plan.make(spec, bound, arch.named("sm_90a"))
    made = replace(made, launch=replace(made.launch, **changes))
    fake = Driver(spec)
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    monkeypatch.setattr(cuda, "ensure_context", lambda: None)
    return fake, made, launch.Launcher(spec, made, bound, 0xF00)


@pytest.mark.parametrize("op", OPS)
def test_packed_arguments(op, rng, monkeypatch):
    """What the kernel reads at each parameter's place, by the parameter's name."""
    spec = REGISTRY[op]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[0], rng))
    fake, made, start = launcher(spec, bound, monkeypatch)
    arrays = [*spec.args, *spec.outputs]
    pointers = {a.name: 2**40 + 256 * i if bound.has(a.name) else 0 for i, a in enumerate(arrays)}
    start(list(pointers.values()), 77)
    read, grid, block, smem, stream, _, function, *_ = fake.seen[0]
    expected = dict(pointers)
    for a in arrays:
        for axis in a.strides:
            expected[f"{a.name}_stride_{axis}"] = bound.strides[a.name][a.axes.index(axis)] if bound.has(a.name) else 0
    for s in spec.scalars:
        if s.in_kernel and not s.baked:
            value = bound.scalars[s.name]
            expected[s.name] = 0 if value is None else np.float32(value) if s.kind == "float" else int(value)
    expected.update({a.name: bound.axes[a.name] for a in spec.axes if not a.baked})
    assert read == expected and function == 0xF00 and stream == 77
    assert (grid, block, smem) == (made.launch.grid, made.launch.block, made.launch.smem)


def test_strides_beyond_32_bits_are_packed_whole(rng, monkeypatch):
    spec = REGISTRY["ihc_post"]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[1], rng))
    bound.strides["residual"] = (2**33 + 5, 2**32, 1)
    fake, _, start = launcher(spec, bound, monkeypatch)
    start([1, 2, 3, 4], 0)
    read = fake.seen[0][0]
    assert (read["residual_stride_tokens"], read["residual_stride_hc"]) == (2**33 + 5, 2**32)


@pytest.mark.parametrize(
    "cluster, pdl, attributes", [(1, False, {}), (4, False, {4: [4, 1, 1]}), (1, True, {6: [1, 0, 0]}), (2, True, {4: [2, 1, 1], 6: [1, 0, 0]})]
)
def test_launch_attributes(rng, monkeypatch, cluster, pdl, attributes):
    spec = REGISTRY["ihc_post"]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[1], rng))
    fake, _, start = launcher(spec, bound, monkeypatch, cluster=cluster, pdl=pdl)
    start([1, 2, 3, 4], 0)
    assert fake.seen[0][5] == attributes


def test_each_thread_has_its_own_argument_block(rng, monkeypatch):
    spec = REGISTRY["ihc_post"]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[1], rng))
    fake, _, start = launcher(spec, bound, monkeypatch)
    gate = threading.Barrier(8)

    def work(base):
        gate.wait()
        for i in range(200):
            start([base, base + 1, base + 2, base + 3], base + i)
        gate.wait()  # all blocks alive at once: addresses can be compared

    threads = [threading.Thread(target=work, args=(10_000 * (t + 1),)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.seen) == 1600 and len({row[-1] for row in fake.seen}) == len({row[-2] for row in fake.seen}) == 8
    for row in fake.seen:
        read = row[0]
        assert [read[n] - read["x"] for n in ("x", "residual", "h_post", "y")] == [0, 1, 2, 3]


def test_C10_refused_launch_is_an_error_with_the_drivers_words(rng, monkeypatch):
    spec = REGISTRY["ihc_post"]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[1], rng))
    fake, made, start = launcher(spec, bound, monkeypatch)
    fake.code = 701
    monkeypatch.setattr(cuda, "error_text", lambda code: f"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES ({code}): too many resources")
    with pytest.raises(LaunchError, match=r"ihc_post: .*OUT_OF_RESOURCES \(701\).*grid") as error:
        start([1, 2, 3, 4], 0)
    assert str(made.launch.block) in str(error.value)


def test_a_gpu_without_room_for_clusters_gets_the_portable_kernel(rng):
    """A slice of an H200 may hold no cluster of 8: a grid of no blocks would be planned otherwise."""
    spec = REGISTRY["ihc_pre"]
    case = replace(spec.cases[0], axes={"tokens": 3, "hc": 4, "hidden": 4096}, dtype="bfloat16")
    bound = bound_of(spec, spec.make_inputs(case, rng))
    whole = arch.named("sm_90a")
    assert plan.make(spec, bound, whole).variant.startswith("sm90_")
    made = plan.make(spec, bound, replace(whole, clusters_of_8=0, clusters_of_16=0))
    assert made.variant == "portable" and made.launch.grid[0] >= 1
