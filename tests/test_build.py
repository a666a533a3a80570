"""NVRTC on every op, variant and architecture, with no GPU: it compiles, nothing spills, and how long it takes."""

from __future__ import annotations

import logging
import re
import statistics
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest

from hccupy import arch, build, cache, cuda, plan
from hccupy.bench.run import plans_of
from hccupy.errors import CompileError
from hccupy.explain import plan_for
from hccupy.ops import REGISTRY

from . import resources as table_of
from .test_plan import OPS, bound_of, small_cases

pytest.importorskip("cupy", reason="NVRTC comes with CuPy: pip install hccupy[cuda13]")

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
BENCH_ARCHS = ("sm_80", "sm_90a")
PER_PAIR = 2  # binaries an op and architecture, or one a variant: more would only repeat templates that others instantiate
TOKENS = (1, 33, 1024, 16384)  # variants may differ by size
rows: list[dict[str, object]] = []


def plans(op, target):
    """PER_PAIR plans: one a variant first, then other cases; each architecture starts elsewhere in the list."""
    spec = REGISTRY[op]
    cases = small_cases(spec)
    shift = ARCHS.index(target.name) * len(cases) // len(ARCHS) if target.name in ARCHS else 0
    found = {}
    for case in cases[shift:] + cases[:shift]:
        given = spec.make_inputs(case, np.random.default_rng(0))
        for tokens in TOKENS if any(a.name == "tokens" for a in spec.axes) else (None,):
            made = plan.make(spec, bound_of(spec, given, tokens), target)
            found.setdefault((made.source, made.entry, made.flags), (case, made))
    first = {made.variant: (case, made) for case, made in reversed(found.values())}
    rest = [pair for pair in found.values() if pair[1] not in [made for _, made in first.values()]]
    return (list(first.values()) + rest)[: max(PER_PAIR, len(first))]


def bench_plans(op, target):
    """What the bench runs of an op."""
    spec = REGISTRY[op]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arch, "of_device", lambda index: arch.named(target))
        return list(plans_of([(spec, c) for c in spec.cases if c.name.startswith("bench")]))


def every_plan(ops=OPS):
    """(plan, is it of the bench) of all that this file compiles."""
    small = [(made, False) for op in ops for target in ARCHS for _, made in plans(op, arch.named(target))]
    return small + [(made, True) for op in ops for target in BENCH_ARCHS for made in bench_plans(op, target)]


def resources(log):
    """Registers, shared bytes, stack and spill bytes from the ptxas lines of a log."""
    number = lambda pattern: sum(int(n) for n in re.findall(pattern, log))
    return {
        "registers": number(r"Used (\d+) registers"),
        "shared": number(r"(\d+) bytes smem"),
        "stack": number(r"(\d+) bytes stack frame"),
        "spills": number(r"(\d+) bytes spill"),
    }


def table(rows):
    """The lines of the resource table: one row an op, variant and architecture, the largest of its binaries."""
    if not rows:
        return
    yield f"{'op':24}{'variant':18}{'arch':10}{'registers':>10}{'shared B':>10}{'dynamic B':>10}{'ms':>8}"
    for name in sorted({(r["op"], r["variant"], ARCHS.index(r["arch"]), r["arch"]) for r in rows}):
        same = [r for r in rows if (r["op"], r["variant"], r["arch"]) == (name[0], name[1], name[3])]
        most = {k: max(r[k] for r in same) for k in ("registers", "shared", "dynamic", "ms")}
        yield f"{name[0]:24}{name[1]:18}{name[3]:10}{most['registers']:10}{most['shared']:10}{most['dynamic']:10}{most['ms']:8.0f}"
    times = [r["ms"] for r in rows]
    yield f"{len(rows)} cold compilations (CPU time): median {statistics.median(times):.0f} ms, slowest {max(times):.0f} ms; no spills, no stack"


@pytest.mark.parametrize("target", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_compiles_without_spills(op, target, record_property):
    """And with no more registers and shared memory than tests/resources.json holds of this NVRTC."""
    times, mine = [], []
    for case, made in plans(op, arch.named(target)):
        start = time.process_time()  # not wall time: other jobs on the machine do not count
        cubin, log = build.compile_plan(made, extra=("-Xptxas=-v",))
        times.append(time.process_time() - start)
        used = resources(log)
        row = {**table_of.row_of(made, used), "ms": 1000 * times[-1]}
        rows.append(row)
        mine.append(row)
        record_property("kernel", row)
        assert cubin.startswith(b"\x7fELF") and made.entry.encode() in cubin
        assert used["registers"] and not used["spills"] and not used["stack"], f"{case.name}: {used}\n{log}"
        threads = int(np.prod(made.launch.block))
        assert used["registers"] * threads <= 65536, f"{case.name}: {used['registers']} registers of {threads} threads do not fit"
        assert used["shared"] + made.launch.smem <= made.arch.smem
        assert "warning" not in log, log
    wrong = table_of.complaints(table_of.largest(mine), table_of.baseline().get(table_of.version()))
    assert not wrong, "\n".join(wrong)
    # A guard against a kernel that unrolls out of hand: on a busy machine CPU time doubles.
    assert statistics.median(times) < 2.0, f"{op}: a cold compilation takes {statistics.median(times):.2f} s"


def test_the_resource_table_holds_every_variant_and_nothing_else():
    """A variant or architecture that is new, or gone, changes the baseline in the same commit."""
    made = {table_of.name_of(table_of.row_of(m, {}, bench)) for m, bench in every_plan()}
    held = table_of.baseline()
    assert held
    for version, rows_held in held.items():
        assert rows_held.keys() == made, f"NVRTC {version}: python -m tests.resources --write"
        assert not table_of.complaints(rows_held, None)
    if table_of.version() not in held:
        warnings.warn(f"no resource baseline for NVRTC {table_of.version()}, only for {', '.join(held)}: spills are checked, growth is not", stacklevel=1)


def test_what_the_resource_check_complains_about():
    """More than a step of registers, more shared memory, a spill, a row that is new; fewer of anything passes."""
    held = {"op v sm_80": {"registers": 64, "shared": 100, "dynamic": 0, "spills": 0, "stack": 0}}
    worse = lambda **words: table_of.complaints({"op v sm_80": {**held["op v sm_80"], **words}}, held)
    assert not worse() and not worse(registers=64 + table_of.GROWTH) and not worse(registers=8, shared=0)
    assert worse(registers=65 + table_of.GROWTH) and worse(shared=101) and worse(dynamic=16) and worse(spills=4) and worse(stack=8)
    assert table_of.complaints({"op w sm_80": held["op v sm_80"]}, held) and not table_of.complaints({"op w sm_80": held["op v sm_80"]}, None)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", BENCH_ARCHS)
def test_what_the_bench_runs_does_not_spill(op, target):
    """Models' sizes, which the small cases do not reach: rows of many heads, several kernels for as many ranges of rows."""
    found = []
    for made in bench_plans(op, target):
        used = resources(build.compile_plan(made, extra=("-Xptxas=-v",))[1])
        assert used["registers"] and not used["spills"] and not used["stack"], f"{made}: {used}"
        found.append(table_of.row_of(made, used, bench=True))
    wrong = table_of.complaints(table_of.largest(found), table_of.baseline().get(table_of.version()))
    assert not wrong, "\n".join(wrong)


# Of the sm_90a kernels, what comes closest to a spill: the most weights where columns do not fill their groups, norms, rows copied by lanes, many warps.
TIGHT = [
    ("ihc_pre", 4, 6656, "bfloat16", 4096, False, 8),
    ("ihc_pre", 4, 2880, "bfloat16", 4096, True, 8),
    ("ihc_post_pre", 4, 1280, "bfloat16", 4096, True, 8),
    ("ihc_post_pre", 4, 2880, "bfloat16", 4096, True, 1),
    ("ihc_post_pre", 3, 2816, "bfloat16", 4096, False, 8),
    ("ihc_post_pre", 4, 8192, "bfloat16", 8, True, 8),
    ("ihc_post_pre", 2, 12288, "bfloat16", 8, True, 8),
    ("ihc_pre", 8, 6144, "bfloat16", 4096, False, 8),
    ("ihc_post_pre", 8, 6144, "bfloat16", 4096, True, 8),
    ("ihc_post_pre", 7, 6144, "bfloat16", 4096, False, 4),
    ("ihc_head", 7, 6144, "bfloat16", 4096, True, 4),
    ("ihc_head", 5, 2560, "bfloat16", 4096, True, 1),
]


@pytest.mark.parametrize(("op", "hc", "hidden", "dtype", "tokens", "norm", "vec"), TIGHT)
def test_sm90_shapes_that_nearly_spill(op, hc, hidden, dtype, tokens, norm, vec):
    made = plan_for(op, {"tokens": tokens, "hc": hc, "hidden": hidden, **({"rms_weight": True} if norm else {})}, dtype, "sm_90a")
    assert made.variant.startswith("sm90_")
    used = resources(build.compile_plan(replace(made, defines={**made.defines, "kVec": vec}), extra=("-Xptxas=-v",))[1])
    assert used["registers"] and not used["spills"] and not used["stack"], used


@pytest.mark.parametrize("tokens", [8, 4096])
@pytest.mark.parametrize(("hc", "hidden"), [(4, 1280), (3, 2880), (2, 4608), (4, 8192), (8, 3072), (5, 7168)])
def test_sm90_blocks_and_clusters_are_as_planned(hc, hidden, tokens):
    """The launch rule and the kernel each work out how many warps and blocks a shape takes."""
    made = plan_for("ihc_head", {"tokens": tokens, "hc": hc, "hidden": hidden}, "bfloat16", "sm_90a")
    text = build.compile_plan(replace(made, arch=replace(made.arch, name="compute_90a", ptx=True)))[0].decode()
    assert re.search(rf"\.maxntid {made.launch.block[0]}\b", text) and re.search(rf"\.reqnctapercluster {made.launch.cluster}\b", text), made.launch


@pytest.mark.parametrize("op", ["ihc_pre", "ihc_head", "ihc_post_pre"])
def test_sm90_lanes_ask_only_where_the_kernel_allows_it(op):
    """With more than two tiles a cluster the kernel would wait for ever; at other alignments or with two sides it does not compile."""
    found = set()
    for hc, hidden in ((2, 6144), (3, 4096), (4, 512), (4, 2880), (4, 6144), (4, 8192), (5, 5120), (8, 6144)):
        for tokens in (0, *range(1, 700, 7), 4096, 16384):  # no token: nothing is launched, but explain plans it
            made = plan_for(op, {"tokens": tokens, "hc": hc, "hidden": hidden}, "bfloat16", "sm_90a")
            if made.defines.get("kLanesAsk"):
                clusters = made.launch.grid[0] // made.launch.cluster
                assert made.variant == "sm90_stream" and made.defines["kVec"] == 8 and tokens <= 2 * 8 * clusters, (hc, hidden, tokens)
                assert hc <= 4 or op == "ihc_head", (hc, hidden, tokens)
                found.add((hc, tokens > 8 * clusters))
    assert {(4, False), (4, True)} <= found  # one tile and two


def test_sm90_pre_and_post_pre_add_alike(monkeypatch):
    """A token's gates are the same bits from ihc_pre and ihc_post_pre: tensor sums in as many chains (two and one once differed, at 8 channels)."""
    shapes = [(hc, hidden, dtype) for hc in range(2, 9) for hidden in (1024, 2880, 4096, 6144, 7168, 8192) for dtype in ("bfloat16", "float16")]
    lines, made = [], None
    for hc, hidden, dtype in shapes:
        plans = [plan_for(op, {"tokens": 4096, "hc": hc, "hidden": hidden}, dtype, "sm_90a") for op in ("ihc_pre", "ihc_post_pre")]
        if all(p.variant == "sm90_stream" for p in plans):
            made = plans[0]
            words = f"{hc}, {hidden}, {made.defines['kXDtype']}, 0, false, true, 8, {made.defines['kRanks']}"
            lines.append(f'static_assert(Same<IhcShape<0, {words}>::Sums, IhcShape<2, {words}>::Sums>::value, "{hc} x {hidden} {dtype}");')
    assert made is not None and len(lines) > 20
    head = "template <class A, class B> struct Same { static constexpr bool value = false; };\ntemplate <class A> struct Same<A, A> { static constexpr bool value = true; };"
    text = "\n".join(['#include "common/sm90_ihc.cuh"', "namespace hccupy {", head, *lines, "}", 'extern "C" __global__ void nothing() {}'])
    alike = replace(made, source="alike.cu", entry="nothing", defines={})
    files = {**build.sources(), "alike.cu": text.encode()}
    monkeypatch.setattr(build, "sources", lambda: files)
    build.compile_plan(alike)
    files["alike.cu"] = text.replace("IhcShape<2, 4, 6144,", "IhcShape<2, 4, 7168,").encode()
    with pytest.raises(CompileError, match="4 x 6144"):
        build.compile_plan(alike)


@pytest.mark.parametrize("op", OPS)
def test_K4_gpu_newer_than_nvrtc_gets_ptx(op):
    """A device of tomorrow: PTX of the newest architecture known, without flush to zero (but inside expf, on its scaled argument, and in 1 / q_scale, at least 2e-15)."""
    future = arch.from_capability(99, 0, cuda.nvrtc_archs())
    assert future.ptx
    _, made = plans(op, future)[0]
    text, _ = build.compile_plan(made)
    assert f".entry {made.entry}(".encode() in text
    assert set(re.findall(rb"[\w.]*\.ftz[\w.]*", text)) <= {b"ex2.approx.ftz.f32", b"rcp.approx.ftz.f32"}


def test_gpu_of_an_older_nvrtc_gets_ptx_it_can_write():
    """Blackwell with an NVRTC that ends at 9.0."""
    old = arch.from_capability(10, 0, (80, 89, 90))
    for op in ("ihc_pre", "ihc_post", "rope_norm_store_kv_fp8"):
        _, made = plans(op, old)[0]
        assert f".entry {made.entry}(".encode() in build.compile_plan(made)[0]


# ---- the compiler's answer and the key --------------------------------------------------------------------------


@pytest.fixture
def post():
    spec = REGISTRY["ihc_post"]
    given = spec.make_inputs(small_cases(spec)[1], np.random.default_rng(0))
    return plan.make(spec, bound_of(spec, given), arch.named("sm_90a"))


def test_options_keep_ieee_arithmetic(post):
    words = build.options(post)
    assert "-arch=sm_90a" in words and "-ftz=false" in words and "-prec-div=true" in words and "-prec-sqrt=true" in words
    assert not any("fast" in w for w in words)


def test_same_plan_same_bytes(post):
    assert build.compile_plan(post)[0] == build.compile_plan(post)[0]


def test_compile_error_carries_the_log(post):
    broken = replace(post, defines={**post.defines, "kHc": -1})
    with pytest.raises(CompileError) as error:
        build.compile_plan(broken)
    text = str(error.value)
    assert "\0" not in text
    for word in ("ihc_post", "sm_90a", "-DkHc=-1", "error", "NVRTC"):
        assert word in text, word
    assert isinstance(error.value, RuntimeError)


def test_K4_unsupported_architecture_says_which_nvrtc(post):
    with pytest.raises(CompileError, match=r"did not compile for sm_55 with NVRTC \d+\.\d+"):
        build.compile_plan(replace(post, arch=replace(post.arch, name="sm_55")))


def test_key_changes_with_everything_that_changes_the_binary(post, monkeypatch):
    keys = {
        build.key(post),
        build.key(replace(post, arch=arch.named("sm_80"))),
        build.key(replace(post, source="store_kv.cu")),
        build.key(replace(post, defines={**post.defines, "kHidden": 1})),
    }
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: (99, 0))
    keys.add(build.key(post))
    monkeypatch.setattr(build, "SCHEMA", b"other")
    keys.add(build.key(post))
    monkeypatch.setattr(build, "sources_digest", lambda: b"an edited header")
    keys.add(build.key(post))
    assert len(keys) == 7 and all(re.fullmatch("[0-9a-f]{64}", k) for k in keys)


def test_key_ignores_how_it_is_launched(post):
    assert build.key(replace(post, launch=replace(post.launch, grid=(7, 1, 1)))) == build.key(post)


def test_K7_sources_digest_covers_every_header(monkeypatch):
    files = build.sources()
    digest = build.sources_digest()
    assert any(name.startswith("common/") for name in files)
    for name in files:
        monkeypatch.setattr(build, "sources", lambda name=name: {**files, name: files[name] + b" "})
        assert build.sources_digest.__wrapped__() != digest, name
    monkeypatch.setattr(build, "sources", lambda: {("x" + n if n == "ihc_post.cu" else n): t for n, t in files.items()})
    assert build.sources_digest.__wrapped__() != digest


def test_K5_sources_need_no_header_but_ours():
    """What is hashed is what is compiled: every #include is one of our files, by its path."""
    files = build.sources()
    for path, text in files.items():
        for word in re.findall(r"^\s*#\s*include\s*(.*)$", text.decode(), re.MULTILINE):
            assert word.strip().strip('"') in files, f"{path}: {word}"


def test_one_cold_compilation_one_line(post, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "hccupy")
    first = build.binary(post)
    assert build.binary(post) == first
    assert [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()] == [caplog.records[0].getMessage()]
    assert re.fullmatch(r"hccupy: compiled ihc_post \(\w+\) for sm_90a in \d+\.\d\d s", caplog.records[0].getMessage())
    assert len([p for p in cache.entries() if p.suffix == ".cubin"]) == 1
