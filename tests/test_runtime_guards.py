"""Which device, which plan, and nothing at all for nothing: the host side of calls on a GPU that is only played."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import hccupy
from hccupy import arrays, build, plan, repeat, run
from hccupy.errors import DeviceError, LayoutError
from hccupy.ops import REGISTRY
from hccupy.spec import Case

from . import fakes
from .test_plan import bound_of
from .test_repeat import FRAMEWORK, Array

pytest.importorskip("cupy", reason="NVRTC comes with CuPy: pip install hccupy[cuda13]")


class TwoGpus(fakes.Gpu):
    """Which device was current at each launch. Arrays lie on device 0."""

    def __init__(self, capability=(8, 0)):
        super().__init__(capability)
        self.current, self.launched_on = 0, []
        self.cuda.Device = self.on_device
        self.cuda.runtime.getDevice = lambda: self.current

    @contextlib.contextmanager
    def on_device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def cuLaunchKernelEx(self, config, function, table, extra):
        self.launched_on.append(self.current)
        return super().cuLaunchKernelEx(config, function, table, extra)


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(fakes, "Gpu", TwoGpus)
    gpu = fakes.install(monkeypatch, tmp_path)
    monkeypatch.setitem(arrays._BY_TYPE, Array, FRAMEWORK)
    monkeypatch.setattr(repeat, "recent", {})
    return gpu


def post(tokens=3, hidden=64, shift=0):
    """Arguments of ihc_post, `shift` elements off a multiple of 16 bytes."""
    found = []
    for shape in ((tokens, hidden), (tokens, 4, hidden), (tokens, 4)):
        size = int(np.prod(shape))
        room = np.zeros(size + 16, np.float32)
        start = -room.ctypes.data % 16 // 4 + shift
        found.append(Array(room[start : start + size].reshape(shape)))
    return found


def test_J1_kernels_start_on_the_arrays_device(gpus):
    """The first call, one that is remembered, and the short way, with another device current, which stays so."""
    given = post()
    hccupy.ihc_post(*given)
    assert gpus.launched_on == [0]
    for _ in range(3):
        gpus.current = 1
        hccupy.ihc_post(*given)
        assert gpus.launched_on.pop() == 0 and gpus.current == 1
        gpus.current = 0
        hccupy.ihc_post(*given)
        assert gpus.launched_on.pop() == 0


def test_J1_arrays_of_two_devices(gpus, monkeypatch):
    given = post()
    there = given[2]
    meta = FRAMEWORK.meta
    monkeypatch.setattr(FRAMEWORK, "meta", staticmethod(lambda x: replace(meta(x), device=("cuda", int(x is there)))), raising=False)
    with pytest.raises(DeviceError, match="h_post"):
        hccupy.ihc_post(*given)
    assert not gpus.launches


def test_a_kernel_is_loaded_on_each_device(gpus):
    spec = REGISTRY["ihc_post"]
    given = spec.make_inputs(Case("two", {"tokens": 3, "hc": 4, "hidden": 64}, {}, "float32"), np.random.default_rng(0))
    made = plan.make(spec, bound_of(spec, given), run.arch.named("sm_80"))
    build.function(made, 0)
    build.function(made, 0)
    assert len(gpus.loads) == 1
    build.function(made, 1)
    assert len(gpus.loads) == 2


def test_another_alignment_is_another_plan(gpus):
    """The same shapes, an address that 16-byte accesses do not suit."""
    for shift, vec in ((0, 4), (1, 1), (2, 2), (0, 4)):
        repeat.forget()
        hccupy.ihc_post(*post(shift=shift))
        kept = [b.launcher.plan.defines["kVec"] for b in run._memo.values()]
        assert vec in kept
    assert sorted(kept) == [1, 2, 4]


def test_another_alignment_is_not_the_remembered_call(gpus):
    """With an output given the short way looks at all addresses, their alignment first."""
    outs = [post(shift=s)[1] for s in (0, 1)]
    for _ in range(2):
        hccupy.ihc_post(*post(), out=outs[0])
    before = len(run._memo)
    hccupy.ihc_post(*post(shift=1), out=outs[1])
    hccupy.ihc_post(*post(), out=outs[1])
    assert len(run._memo) == before + 2


def test_leading_axes_with_gaps_do_not_fold():
    """Every other row of a longer axis: one stride cannot walk it."""
    x, residual, h = np.ones((3, 4, 8), np.float32), np.ones((3, 4, 2, 8), np.float32), np.ones((3, 4, 2), np.float32)
    want = hccupy.ihc_post(x[:, :2].copy(), residual[:, :2].copy(), h[:, :2].copy())
    assert want.shape == (3, 2, 2, 8)
    with pytest.raises(LayoutError, match="fold into one stride"):
        hccupy.ihc_post(x[:, :2], residual[:, :2].copy(), h[:, :2].copy())


def test_an_output_at_the_residuals_address_with_other_strides():
    """In place means the same elements: rows further apart overlap rows of the residual that are still to be read."""
    room = np.ones((6, 2, 8), np.float32)
    x, h = np.ones((3, 8), np.float32), np.ones((3, 2), np.float32)
    with pytest.raises(LayoutError, match="share no element"):
        hccupy.ihc_post(x, room[:3], h, out=room[::2])
    hccupy.ihc_post(x, room[:3], h, out=room[:3])
    assert (room[:3] == 2).all() and (room[3:] == 1).all()


def test_I1_nothing_is_compiled_for_nothing(gpus):
    out = hccupy.ihc_post(*post(tokens=0))
    assert out.a.shape == (0, 4, 64) and not gpus.loads and not gpus.launches


def test_out_of_memory_leaves_arguments_as_they_are(gpus, monkeypatch):
    """The framework's allocator fails while an update in place is asked for: its words reach the caller, and nothing was launched."""

    def full(shape, dtype, device, like):
        raise MemoryError(f"tried to allocate {4 * int(np.prod(shape))} bytes")

    given = post()
    hccupy.ihc_post(*given)  # the kernel is there
    gpus.launches.clear()
    monkeypatch.setattr(FRAMEWORK, "empty", staticmethod(full), raising=False)
    monkeypatch.setattr(FRAMEWORK, "maker", staticmethod(lambda shape, dtype, like: lambda: full(shape, dtype, None, like)), raising=False)
    repeat.forget()
    run.forget()
    for _ in range(2):
        with pytest.raises(MemoryError, match="3072 bytes"):
            hccupy.ihc_post(*given)
    weights = [Array(np.ones(s, np.float32)) for s in ((8, 256), (2,), (8,))]
    before = given[1].a.copy()
    for _ in range(2):
        with pytest.raises(MemoryError, match="bytes"):
            hccupy.ihc_post_pre(*given, *weights, out=given[1])
    assert not gpus.launches and np.array_equal(given[1].a, before)


def test_no_launch_after_a_refused_check(gpus):
    """Everything is checked before anything is launched, with outputs given too."""
    given = post()
    for bad in (SimpleNamespace(), Array(np.zeros((3, 4, 63), np.float32)), Array(np.zeros((3, 4, 64), np.float16))):
        with pytest.raises(hccupy.HccupyError):
            hccupy.ihc_post(*given, out=bad)
    assert not gpus.launches
