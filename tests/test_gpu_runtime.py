"""The runtime on a GPU: launch fallback, graph captures, default streams, devices, warm-up, cache and forks over processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hccupy
from hccupy import arch, build, check, launch, plan, run
from hccupy.ops import REGISTRY
from hccupy.spec import Case

from . import ihc_checks as checks
from . import report
from .adapters import GPU

pytestmark = pytest.mark.gpu
TORCH = GPU[0]
ROOT = Path(__file__).resolve().parent.parent
OPS = sorted(REGISTRY)


def one_case(op):
    """The first small case of an op."""
    return next(c for c in REGISTRY[op].cases if not c.name.startswith("bench"))


@pytest.fixture
def rawkernel(monkeypatch):
    """Calls go through cupy.RawKernel; nothing that was planned before is used."""
    monkeypatch.setenv("HCCUPY_LAUNCH", "rawkernel")
    monkeypatch.setattr(run, "_memo", {})


# ---- the fallback launch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_runtime_rawkernel_equals_launch_ex(op, rng):
    """The same plan, the same memory, both launches: the same bytes."""
    import torch

    spec = REGISTRY[op]
    given = spec.make_inputs(one_case(op), rng)
    here = replace(arch.of_device(0), clusters=False)  # a plan that both can start
    got = []
    for kind in ("ex", "raw"):
        arrays = {a.name: TORCH.put(given[a.name]) for a in spec.args if given.get(a.name) is not None}
        metas = {n: run.arrays.framework(t).meta(t) for n, t in arrays.items()}
        scalars = {s.name: given.get(s.name, s.default) for s in spec.scalars}
        bound = check.bind(spec, metas, scalars, "torch", {n: t.data_ptr() for n, t in arrays.items()} | dict.fromkeys((o.name for o in spec.outputs), 0))
        lead = check.lead_of(spec, metas)
        for o in spec.outputs:
            if bound.has(o.name):
                dtype = run.arrays.framework(next(iter(arrays.values()))).TORCH_DTYPE[bound.dtypes[o.name]]
                arrays[o.name] = torch.zeros(check.out_shape(spec, o, bound, lead), dtype=dtype, device="cuda")
        made = plan.make(spec, bound, here)
        kernel = build.function(made, 0)
        start = launch.Launcher(spec, made, bound, kernel.kernel.ptr) if kind == "ex" else launch.RawLauncher(spec, made, bound, kernel)
        start([arrays[a.name].data_ptr() if a.name in arrays else 0 for a in spec.arrays], torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        got.append([TORCH.get(arrays[a.name]).tobytes() for a in (*spec.args, *spec.outputs) if a.name in arrays])
    assert got[0] == got[1]


@pytest.mark.parametrize(("spec", "case"), [pytest.param(s, c, id=f"{s.name}-{c.name}") for s, c in checks.small_cases() if c.dtype == "bfloat16"])
def test_runtime_rawkernel_switch_ihc(spec, case, rng, rawkernel):
    """Through the public functions, against fp64."""
    assert not arch.of_device(0).clusters
    checks.case_is_right(spec, case, rng, TORCH)
    assert all(type(b.launcher) is launch.RawLauncher for b in run._memo.values() if b.launcher is not None)


def test_runtime_rawkernel_uses_the_current_stream(rawkernel):
    import torch

    side = torch.cuda.Stream()
    x, residual, h = (torch.zeros(s, device="cuda") for s in ((8, 512), (8, 4, 512), (8, 4)))
    hccupy.ihc_post(x, residual, h)
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            x.fill_(i + 1)
            h.fill_(1)
            y = hccupy.ihc_post(x, residual, h)
            value = y.mean()
        side.synchronize()
        assert value.item() == i + 1


# ---- graphs -----------------------------------------------------------------------------------------------------


def test_runtime_cupy_graph_capture():
    """CuPy's own capture; outputs supplied, since CuPy's pool must not grow inside one. Replays follow the inputs."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    x, residual, h = cupy.ones((8, 512), "float32"), cupy.zeros((8, 4, 512), "float32"), cupy.ones((8, 4), "float32")
    out = cupy.zeros_like(residual)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        hccupy.ihc_post(x, residual, h, out=out)
        stream.synchronize()
        stream.begin_capture()
        hccupy.ihc_post(x, residual, h, out=out)
        hccupy.ihc_post(x, out, h, out=out)
        graph = stream.end_capture()
        for value in (3, 5, 7):
            x.fill(value)
            graph.launch(stream)
            stream.synchronize()
            assert float(out.min()) == float(out.max()) == 2 * value


def test_runtime_warmup_then_first_call_inside_a_capture():
    """A width nobody called: an error before warm-up, and after it the very first call is captured and replays right."""
    import torch

    hidden = 1416
    x, residual, h = torch.ones(6, hidden, device="cuda"), torch.zeros(6, 4, hidden, device="cuda"), torch.ones(6, 4, device="cuda")
    with pytest.raises(hccupy.CaptureError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        hccupy.ihc_post(x, residual, h)
    torch.cuda.synchronize()
    assert hccupy.warmup("ihc_post", hc=4, hidden=hidden, dtype="float32") >= 1
    before = build.loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hccupy.ihc_post(x, residual, h)
    for value in (2, 9):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (y == value).all()
    assert build.loads == before


@pytest.mark.parametrize("op", checks.IHC)
def test_runtime_warmup_leaves_nothing_to_load(op, rng):
    """Random token counts after warm-up at a model's width: no load, no compile."""
    import torch

    hidden = 4096
    count = hccupy.warmup(op, hc=4, hidden=hidden)
    loads, compiled = build.loads, len(build.compiled)
    for tokens in (1, 2, 5, 8, 9, 31, 33, 64, 65, 128, 200, 300, 1000, 3000):
        case = Case(
            "warm", {"tokens": tokens, "hc": 4, "hidden": hidden}, REGISTRY[op].cases[0].scalars, "bfloat16", {"norm": op != "ihc_post" and tokens % 2 == 1}
        )
        arrays = {k: TORCH.put(v) for k, v in REGISTRY[op].make_inputs(case, rng).items()}
        getattr(hccupy, op)(**arrays)
    torch.cuda.synchronize()
    assert count and build.loads == loads and len(build.compiled) == compiled


# ---- streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["legacy", "per-thread", "side"])
def test_runtime_cupy_default_streams(which):
    """CuPy's current stream is the legacy default, the per-thread default, or one of the user's."""
    import cupy

    streams = {"legacy": cupy.cuda.Stream.null, "per-thread": cupy.cuda.Stream.ptds, "side": cupy.cuda.Stream(non_blocking=True)}
    stream = streams[which]
    x, residual, h = cupy.zeros((8, 512), "float32"), cupy.zeros((8, 4, 512), "float32"), cupy.ones((8, 4), "float32")
    out = cupy.empty_like(residual)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        for i in range(50):
            x.fill(i)
            hccupy.ihc_post(x, residual, h, out=out)
            stream.synchronize()
            assert float(out[0, 0, 0]) == float(out[-1, -1, -1]) == i


def test_runtime_stream_override():
    """stream= as an int, a torch stream and a CuPy stream: the op waits for what that stream does, not for the current one."""
    import cupy
    import torch

    side = torch.cuda.Stream()
    words = (side, side.cuda_stream, cupy.cuda.Stream.from_external(side) if hasattr(side, "__cuda_stream__") else side.cuda_stream)
    x, residual, h = torch.zeros(8, 512, device="cuda"), torch.zeros(8, 4, 512, device="cuda"), torch.ones(8, 4, device="cuda")
    out = torch.empty_like(residual)
    hccupy.ihc_post(x, residual, h, out=out)
    torch.cuda.synchronize()
    for i, word in enumerate(words):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.fill_(i + 1)
        hccupy.ihc_post(x, residual, h, out=out, stream=word)
        side.synchronize()
        assert (out == i + 1).all()
    for handle in (0, 1, 2):  # legacy by its two names, and the per-thread default
        x.fill_(100 + handle)
        torch.cuda.synchronize()
        hccupy.ihc_post(x, residual, h, out=out, stream=handle)
        torch.cuda.synchronize()
        assert (out == 100 + handle).all()


# ---- two devices ------------------------------------------------------------------------------------------------


def two_gpus():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: this machine has one")


@pytest.mark.parametrize("way", ["ex", "raw"])
def test_runtime_arrays_on_the_other_gpu(way, monkeypatch):
    """Arrays on GPU 1 while GPU 0 is current: computed there, and GPU 0 stays current. Mixed devices are an error."""
    import torch

    two_gpus()
    if way == "raw":
        monkeypatch.setenv("HCCUPY_LAUNCH", "rawkernel")
        monkeypatch.setattr(run, "_memo", {})
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    first = [torch.randn(s, device="cuda:0") for s in ((8, 512), (8, 4, 512), (8, 4))]
    want = hccupy.ihc_post(*first)
    second = [t.to("cuda:1") for t in first]
    for _ in range(3):
        got = hccupy.ihc_post(*second)
        assert got.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        assert torch.equal(got.cpu(), want.cpu())
    bound = hccupy.bind("ihc_post", *second, out=torch.empty_like(second[1]))
    assert torch.equal(bound().cpu(), want.cpu()) and torch.cuda.current_device() == 0
    with pytest.raises(hccupy.DeviceError, match="h_post"):
        hccupy.ihc_post(first[0], first[1], second[2])


# ---- processes --------------------------------------------------------------------------------------------------

CALL = """
import json, sys, time
import numpy as np, cupy, hccupy
from hccupy import build
cupy.zeros(1)
cupy.cuda.runtime.deviceSynchronize()
timed = []
real = build.function
def function(plan, device):
    start, before = time.perf_counter(), build.loads
    found = real(plan, device)
    if build.loads > before:
        timed.append(1000 * (time.perf_counter() - start))
    return found
build.function = function
rng = np.random.default_rng(0)
given = [rng.standard_normal(s).astype("float32") for s in ((8, 1512), (8, 4, 1512), (8, 4))]
want = hccupy.ihc_post(*given)
got = cupy.asnumpy(hccupy.ihc_post(*map(cupy.asarray, given)))
x, w = given[1], rng.standard_normal((8, 4 * 1512)).astype("float32") / 64
gates = [w, np.ones(2, "float32"), np.zeros(8, "float32")]
y, _ = hccupy.ihc_pre(*map(cupy.asarray, [x, *gates]))
ok = bool(np.abs(got - want).max() < 1e-5 and np.abs(cupy.asnumpy(y) - hccupy.ihc_pre(x, *gates)[0]).max() < 1e-3)
print(json.dumps({"ok": ok, "ms": timed, "compiled": len(build.compiled)}))
"""


def process(folder, code=CALL, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HCCUPY_CACHE_DIR": str(folder), **environment}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(child):
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_runtime_second_process_loads_from_the_cache(tmp_path):
    """Goal: under 20 ms a kernel from a warm cache. Recorded; the assertion leaves room for a busy machine."""
    first = answer(process(tmp_path / "cache"))
    second = answer(process(tmp_path / "cache"))
    assert first["ok"] and first["compiled"] == len(first["ms"]) >= 2
    assert second["ok"] and second["compiled"] == 0 and len(second["ms"]) == len(first["ms"])
    report.note("runtime", "-", "cupy", "cold_compile_and_load", ms=max(first["ms"]))
    report.note("runtime", "-", "cupy", "warm_cache_load", ms=max(second["ms"]))
    assert max(second["ms"]) < 100, second


def test_runtime_16_processes_on_a_cold_cache(tmp_path):
    children = [process(tmp_path / "cache") for _ in range(16)]
    found = [answer(child) for child in children]
    assert all(f["ok"] for f in found)
    kernels = len(found[0]["ms"])
    assert sum(f["compiled"] for f in found) == kernels, "each kernel is compiled by one of them"


def test_runtime_bundle_without_a_compiler(tmp_path):
    """`hccupy build`, then HCCUPY_NO_JIT=1 with an empty cache: calls run from the bundle, others say what to build."""
    here = arch.of_device(0).name.removeprefix("sm_")
    words = [sys.executable, "-m", "hccupy", "build", "--arch", here, "-o", str(tmp_path / "bundle"), "--dtype", "float32", "hc=4", "--hidden", "1512"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HCCUPY_CACHE_DIR": str(tmp_path / "one")}
    subprocess.run(words, env=env, check=True, capture_output=True)
    switches = {"HCCUPY_KERNEL_BUNDLE": str(tmp_path / "bundle"), "HCCUPY_NO_JIT": "1"}
    found = answer(process(tmp_path / "two", **switches))
    assert found["ok"] and found["compiled"] == 0
    child = process(tmp_path / "two", CALL.replace("1512", "1520"), **switches)
    _, err = child.communicate(timeout=300)
    assert child.returncode and "hccupy build ihc_post hc=4 hidden=1520" in err


def test_runtime_warmup_and_doctor_commands(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HCCUPY_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-m", "hccupy", "warmup", "ihc_post", "hc=4", "hidden=6144"], env=env, capture_output=True, text=True, check=True)
    assert " loaded in " in done.stdout
    done = subprocess.run([sys.executable, "-m", "hccupy", "doctor", "--json"], env=env, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["driver"]["gpus"] and all(row["works"] for row in found["launch"]), found["problems"]


FORK = """
import os, sys
import cupy, hccupy
def call():
    return hccupy.ihc_post(x, residual, h, out=out)
x, residual, h = cupy.ones((2, 64), "float32"), cupy.ones((2, 4, 64), "float32"), cupy.ones((2, 4), "float32")
out = cupy.empty_like(residual)
call()
bound = hccupy.bind("ihc_post", x, residual, h, out=out)
bound()
cupy.cuda.runtime.deviceSynchronize()
for what in (call, bound, lambda: hccupy.ihc_post(x[:1], residual[:1], h[:1], out=out[:1])):
    child = os.fork()
    if not child:
        try:
            what()
            os._exit(1)
        except hccupy.NoGpuError as error:
            os._exit(0 if "forked" in str(error) else 2)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
call()
cupy.cuda.runtime.deviceSynchronize()
print("1")
"""


def test_runtime_fork_after_use_is_a_clear_error(tmp_path):
    """A known call, a bound call and a new one in a forked child; the parent goes on."""
    assert answer(process(tmp_path / "cache", FORK)) == 1


def test_runtime_fork_before_use_is_fine(tmp_path):
    code = f"import os, hccupy\nchild = os.fork()\nif child:\n    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n{CALL}"
    assert answer(process(tmp_path / "cache", code))["ok"]
