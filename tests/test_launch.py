"""The host side of a launch without a GPU: argument blocks against the kernels, RawKernel, captures, forks, NVTX, logging."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hccupy
from hccupy import arch, build, cuda, launch, plan, switches
from hccupy.errors import ArgumentError, CaptureError, LaunchError, NoGpuError
from hccupy.ops import REGISTRY

from . import fakes
from .simulator.sim import Simulated
from .test_plan import OPS, bound_of, small_cases

pytest.importorskip("cupy", reason="NVRTC comes with CuPy: pip install hccupy[cuda13]")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    yield fakes.install(monkeypatch, tmp_path)
    arch._measured.cache_clear()


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    yield fakes.install(monkeypatch, tmp_path, (9, 0))
    arch._measured.cache_clear()


# ---- argument blocks --------------------------------------------------------------------------------------------


def one_plan_a_kernel(op):
    """(bound, plan) of the first case that reaches each (source, entry) on any architecture."""
    spec = REGISTRY[op]
    found = {}
    for case in [*small_cases(spec), *[c for c in spec.cases if c.name.startswith("bench")][:1]]:
        given = spec.make_inputs(case, np.random.default_rng(0))
        for target in arch.TABLE:
            for tokens in (None, 1000) if "tokens" in spec.empty else (None,):
                bound = bound_of(spec, given, tokens)
                made = plan.make(spec, bound, target)
                found.setdefault((made.source, made.entry), (bound, made))
    return list(found.values())


def compiled_parameters(made):
    """(kind, size) of each parameter: from the simulator's g++, or from PTX (pointers are ints there) for kernels that only a GPU can run."""
    if not made.source.startswith("sm90_"):
        return Simulated(made.source, made.entry, dict(made.defines)).params
    text, _ = build.compile_plan(replace(made, arch=replace(made.arch, name=made.arch.name.replace("sm", "compute"), ptx=True)))
    words = re.search(rf"\.entry {made.entry}\((.*?)\)", text.decode(), re.DOTALL)[1]
    return [("f" if kind == "f" else "i", int(bits) // 8) for kind, bits in re.findall(r"\.param \.([usf])(\d+)", words)]


@pytest.mark.parametrize("op", OPS)
def test_block_has_the_kernels_own_parameter_sizes(op, monkeypatch):
    """The compiler's word on every parameter, kind and size, against what a Launcher packs."""
    spec = REGISTRY[op]
    monkeypatch.setattr(cuda, "driver", fakes.Gpu)
    letters = {"pointer": "p", "long long": "i", "float": "f", "int": "i"}
    for bound, made in one_plan_a_kernel(op):
        params = compiled_parameters(made)
        if made.source.startswith("sm90_"):
            letters = {**letters, "pointer": "i"}
        start = launch.Launcher(spec, made, bound, 0)
        assert start.sizes == [size for _, size in params], made.source
        assert [letters[kind] for _, kind in launch.parameters(spec)] == [letter for letter, _ in params], made.source
        assert 8 * start.pointers + len(start.rest) == sum(start.sizes)


# ---- RawKernel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_rawkernel_gets_the_same_arguments(op, gpu):
    """Every value and width as in the packed block, on the caller's stream."""
    spec = REGISTRY[op]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[0], np.random.default_rng(0)))
    made = plan.make(spec, bound, arch.named("sm_80"))
    packed = launch.Launcher(spec, made, bound, 0xF00)
    kernel = fakes.Kernel(gpu, made.entry)
    pointers = [2**40 + 256 * i for i in range(packed.pointers)]
    launch.RawLauncher(spec, made, bound, kernel)(pointers, 1234)
    grid, block, args, smem, stream = gpu.raw[0]
    assert (grid, block, smem, stream) == (made.launch.grid, made.launch.block, made.launch.smem, 1234)
    assert gpu.current_stream is None
    assert [int(a) for a in args[: packed.pointers]] == pointers
    assert [a.itemsize for a in args] == packed.sizes
    assert b"".join(a.tobytes() for a in args[packed.pointers :]) == packed.rest


def test_rawkernel_refuses_clusters(gpu):
    spec = REGISTRY["ihc_post"]
    bound = bound_of(spec, spec.make_inputs(small_cases(spec)[1], np.random.default_rng(0)))
    made = plan.make(spec, bound, arch.named("sm_90a"))
    made = replace(made, launch=replace(made.launch, cluster=4))
    with pytest.raises(LaunchError, match=r"ihc_post: .*clusters of 4 blocks, which HCCUPY_LAUNCH=rawkernel cannot start"):
        launch.RawLauncher(spec, made, bound, None)


def test_rawkernel_error_has_the_drivers_words(gpu, monkeypatch):
    monkeypatch.setenv("HCCUPY_LAUNCH", "rawkernel")
    gpu.refuse = True
    with pytest.raises(LaunchError, match=r"ihc_post: the driver refused the launch: CUDA_ERROR_INVALID_VALUE.*grid"):
        hccupy.ihc_post(*fakes.post())


def test_switch_chooses_the_launch(gpu, monkeypatch):
    hccupy.ihc_post(*fakes.post())
    assert gpu.launches == [77] and not gpu.raw
    monkeypatch.setenv("HCCUPY_LAUNCH", "rawkernel")
    hccupy.ihc_post(*fakes.post(tokens=4))
    assert gpu.launches == [77] and gpu.raw[0][-1] == 77
    monkeypatch.setenv("HCCUPY_LAUNCH", "fast")
    with pytest.raises(ArgumentError, match=r"HCCUPY_LAUNCH: expected rawkernel or nothing, got 'fast'"):
        hccupy.ihc_post(*fakes.post(tokens=5))


@pytest.mark.parametrize("op", OPS)
def test_rawkernel_plans_have_no_clusters(op, hopper, monkeypatch):
    """Where the best kernel needs clusters, another one is chosen; explain says why."""
    monkeypatch.setenv("HCCUPY_LAUNCH", "rawkernel")
    here = arch.of_device(0)
    assert here.name == "sm_90a" and not here.clusters
    spec = REGISTRY[op]
    for case in spec.cases:
        if case.name.startswith("bench") and max(case.axes.get("tokens", 1), case.axes.get("requests", 1)) > 64:
            continue
        bound = bound_of(spec, spec.make_inputs(case, np.random.default_rng(0)))
        made = plan.make(spec, bound, here)
        assert made.launch.cluster == 1 and not made.launch.pdl
        for name, ok, reason in plan.candidates(spec, bound, here):
            assert ok or reason, name
    monkeypatch.delenv("HCCUPY_LAUNCH")
    assert arch.of_device(0).clusters


# ---- streams, captures, threads ---------------------------------------------------------------------------------


def test_first_call_inside_a_capture(gpu):
    """Cold: an error that names warmup, and nothing is loaded. Warm: it runs, though the shape was never seen."""
    gpu.capturing = True
    with pytest.raises(CaptureError, match=r"ihc_post: .*hccupy\.warmup"):
        hccupy.ihc_post(*fakes.post())
    assert not gpu.loads and not gpu.launches
    gpu.capturing = False
    loaded = hccupy.warmup("ihc_post", hc=4, hidden=64, dtype="float32")
    assert loaded == len(gpu.loads) == build.loads - (build.loads - loaded) and loaded >= 2
    gpu.capturing = True
    for tokens in (1, 3, 300, 5000):
        hccupy.ihc_post(*fakes.post(tokens))
    assert len(gpu.launches) == 4 and len(gpu.loads) == loaded
    with pytest.raises(CaptureError, match="not loaded"):
        hccupy.ihc_post(*fakes.post(hidden=128))


def test_L4_warm_calls_work_inside_a_capture(gpu):
    hccupy.ihc_post(*fakes.post())
    gpu.capturing = True
    hccupy.ihc_post(*fakes.post())
    assert gpu.launches == [77, 77]


def test_stream_override(gpu):
    hccupy.ihc_post(*fakes.post(), stream=5)
    hccupy.ihc_post(*fakes.post(), stream=SimpleNamespace(cuda_stream=6))
    hccupy.ihc_post(*fakes.post(), stream=SimpleNamespace(ptr=7))
    assert gpu.launches == [5, 6, 7]


def test_threads_load_a_kernel_once(gpu):
    gate, wrong = threading.Barrier(8), []

    def work():
        gate.wait()
        try:
            for tokens in range(1, 5):
                hccupy.ihc_post(*fakes.post(tokens))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(gpu.launches) == 32 and len(gpu.loads) == 1


# ---- fork -------------------------------------------------------------------------------------------------------


def forked(action):
    """What `action` returns or raises in a forked child, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = f"returned {action()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


def test_fork_before_cuda_is_used_is_fine(gpu):
    assert forked(lambda: hccupy.ihc_post(*fakes.post()) is not None) == "returned True"
    assert cuda._owner is None
    hccupy.ihc_post(*fakes.post())
    assert cuda._owner == os.getpid()


def test_importing_and_the_cpu_path_are_no_use_of_cuda(gpu):
    a = [np.ones(s, np.float32) for s in ((2, 8), (2, 4, 8), (2, 4))]
    hccupy.ihc_post(*a)
    assert cuda._owner is None
    assert forked(lambda: hccupy.ihc_post(*a).shape) == "returned (2, 4, 8)"


def test_fork_after_cuda_was_used_is_a_clear_error(gpu):
    """A new shape, a known shape and a bound call; whether CUDA refuses the launch or the question for the device."""
    hccupy.ihc_post(*fakes.post())
    bound = hccupy.bind("ihc_post", *fakes.post(), out=fakes.post()[1])
    bound()

    def child(call, **state):
        vars(gpu).update(state)
        return call()

    for call in (lambda: hccupy.ihc_post(*fakes.post(9)), lambda: hccupy.ihc_post(*fakes.post()), bound):
        for state in ({"code": 3}, {"device_code": 3}):
            said = forked(lambda call=call, state=state: child(call, **state))
            assert said.startswith("NoGpuError: hccupy: CUDA was used before this process was forked") and "spawn" in said, said
    assert hccupy.ihc_post(*fakes.post()) is not None


def test_check_fork_names_the_mend(monkeypatch):
    monkeypatch.setattr(cuda, "_owner", os.getpid() + 1)
    with pytest.raises(NoGpuError, match="spawn"):
        cuda.check_fork()


def test_uninitialised_driver_hints_at_a_fork(gpu):
    assert "forked" in cuda.error_text(3) and "forked" not in cuda.error_text(1)


# ---- NVTX and logging -------------------------------------------------------------------------------------------


def test_nvtx_ranges(gpu, monkeypatch):
    seen = []

    class annotate:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(("push", self.name, len(gpu.launches)))

        def __exit__(self, *_):
            seen.append(("pop", self.name, len(gpu.launches)))

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    hccupy.ihc_post(*fakes.post())
    assert not seen
    monkeypatch.setenv("HCCUPY_NVTX", "1")
    hccupy.ihc_post(*fakes.post(4))
    assert seen == [("push", "hccupy.ihc_post", 1), ("pop", "hccupy.ihc_post", 2)]


def test_nvtx_missing_is_a_warning(gpu, monkeypatch, caplog):
    monkeypatch.setenv("HCCUPY_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    hccupy.ihc_post(*fakes.post())
    assert gpu.launches and "pip install nvtx" in caplog.text


def test_off_means_the_plain_launcher(gpu):
    hccupy.ihc_post(*fakes.post())
    (binding,) = __import__("hccupy.run").run._memo.values()
    assert type(binding.launcher) is launch.Launcher


@pytest.mark.parametrize("level, expected", [("", 0), ("INFO", 2), ("info", 2), ("WARNING", 1), ("loud", 3)])
def test_log_switch(level, expected):
    code = "import hccupy, logging\nlog = logging.getLogger('hccupy')\nlog.info('compiled')\nlog.warning('unusable')"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HCCUPY_LOG": level}
    err = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stderr
    if not level:  # Python's own last resort prints warnings bare
        assert err == "unusable\n"
        return
    lines = err.splitlines()
    assert len(lines) == expected and all(re.match(r"\d{4}-\d\d-\d\d .* (INFO|WARNING) ", line) for line in lines), err
    assert (level == "loud") == ("HCCUPY_LOG: expected a level such as INFO, got 'loud'" in err)


# ---- switches ---------------------------------------------------------------------------------------------------


def test_every_switch_is_listed():
    """No variable is read that the table does not name, and none is named that nobody reads."""
    read = set()
    for path in (ROOT / "hccupy").rglob("*.py"):
        if path.name != "switches.py":
            read |= set(re.findall(r"HCCUPY_[A-Z_]+(?=[\"'])", path.read_text()))
    read |= {"HCCUPY_LAUNCH"}  # read in switches.py itself
    assert read == set(switches.SWITCHES)
    assert all(name in switches.table() for name in switches.SWITCHES)
