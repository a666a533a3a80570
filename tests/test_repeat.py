"""The short way of a repeat call: the same arguments reach the driver as by the long way, and every doubt takes the long way."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import hccupy
from hccupy import arrays, build, cuda, launch, repeat, run
from hccupy.errors import ArgumentError, LayoutError, ShapeError
from hccupy.ops import REGISTRY

from . import fakes


class Array(fakes.Array):
    """A fake that a framework with `same` owns."""

    def data_ptr(self):
        return address(self)


def facts(x):
    return type(x), x.a.shape, x.a.strides, x.a.dtype


def same(given):
    known = [facts(x) for x in given]
    return lambda *others: [facts(x) for x in others if isinstance(x, Array)] == known


def maker(shape, dtype, like):
    return lambda: Array(np.empty(shape, dtype.np))


def address(x):
    return x.a.ctypes.data


FRAMEWORK = type(
    "framework",
    (),
    vars(fakes.FRAMEWORK)
    | {"same": staticmethod(same), "maker": staticmethod(maker), "ADDRESS": "data_ptr()", "pointer": staticmethod(address)}
    | {"empty": staticmethod(lambda shape, dtype, device, like: Array(np.empty(shape, dtype.np)))}
    | {k: staticmethod(vars(fakes.FRAMEWORK)[k]) for k in ("key", "meta", "stream")},
)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    gpu = fakes.install(monkeypatch, tmp_path)
    monkeypatch.setitem(arrays._BY_TYPE, Array, FRAMEWORK)
    monkeypatch.setattr(build, "function", lambda plan, device: fakes.Kernel(gpu, "kernel"))  # nothing to compile
    gpu.arguments = []

    def cuLaunchKernelEx(config, function, table, extra):
        kinds = [kind for _, kind in launch.parameters(gpu.spec)]
        slots = (ctypes.c_void_p * len(kinds)).from_address(table)
        gpu.launches.append(cuda.LaunchConfig.from_address(config).stream)
        gpu.arguments.append(
            [struct.unpack("=" + launch._FORMAT[k], ctypes.string_at(at, 4 if k in ("int", "float") else 8))[0] for at, k in zip(slots, kinds, strict=False)]
        )
        return 0

    gpu.cuLaunchKernelEx = cuLaunchKernelEx
    repeat.forget()
    yield gpu
    repeat.forget()


@pytest.fixture
def short(monkeypatch):
    """After short(): a call that goes the long way fails."""

    def only():
        monkeypatch.setattr(run, "prepare", lambda *a: pytest.fail("the long way"))

    return only


def arguments(spec, case, rng):
    return {k: Array(np.array(v)) if isinstance(v, np.ndarray) else v for k, v in spec.make_inputs(case, rng).items()}


def pieces(result):
    return [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]


@pytest.mark.parametrize("outputs", [False, True], ids=["allocating", "out"])
@pytest.mark.parametrize("op", REGISTRY)
def test_the_same_arguments_as_by_the_long_way(op, outputs, gpu, short, rng, monkeypatch):
    spec = gpu.spec = REGISTRY[op]
    function = getattr(hccupy, op)
    for case in [c for c in spec.cases if not c.name.startswith("bench")][:12]:
        given = arguments(spec, case, rng)
        if not all(v.a.size for v in given.values() if isinstance(v, Array)):
            continue
        first = function(**given)
        outs = {}
        if outputs:
            made = [o for o in spec.outputs if o.allocate]
            results = first if isinstance(first, tuple) else (first,)
            outs = {o.keyword: Array(np.empty_like(r.a)) for o, r in zip(made, results, strict=False) if o.keyword and r is not None}
            first = function(**given, **outs)
        with monkeypatch.context() as patch:
            patch.setattr(run, "prepare", lambda *a: pytest.fail("the long way"))
            second = function(**given, **outs)
        long, now = gpu.arguments[-2:]
        moved = {address(a): address(b) for a, b in zip(pieces(first), pieces(second), strict=True)}
        assert [moved.get(v, v) for v in long] == now, case.name
        assert [(r.a.shape, r.a.dtype) for r in pieces(first)] == [(r.a.shape, r.a.dtype) for r in pieces(second)]
        if outs:
            assert {id(r) for r in pieces(second)} == {id(o) for o in outs.values()}


def post(tokens=3):
    return [Array(x.a) for x in fakes.post(tokens)]


def test_shapes_that_take_turns_stay_short(gpu, short):
    gpu.spec = REGISTRY["ihc_post"]
    calls = [post(n) for n in range(1, repeat.RECENT + 1)]
    for call in calls:
        hccupy.ihc_post(*call)
    short()
    for call in calls * 3:
        assert hccupy.ihc_post(*call).a.shape == call[1].a.shape
    assert len(repeat.recent["ihc_post"]) == repeat.RECENT


def test_more_shapes_than_are_remembered(gpu):
    gpu.spec = REGISTRY["ihc_post"]
    for _ in range(3):
        for n in range(1, 12):
            assert hccupy.ihc_post(*post(n)).a.shape[0] == n
    assert len(repeat.recent["ihc_post"]) == repeat.RECENT
    assert all(b.remade <= 1 for b in run._memo.values())


def test_equal_scalars_of_another_type_are_checked(gpu, rng):
    spec = gpu.spec = REGISTRY["ihc_pre"]
    given = arguments(spec, spec.cases[0], rng)
    hccupy.ihc_pre(**{**given, "round_before_norm": True})
    hccupy.ihc_pre(**{**given, "round_before_norm": True})
    with pytest.raises(ArgumentError, match="round_before_norm"):
        hccupy.ihc_pre(**{**given, "round_before_norm": 1})


def test_overlap_is_found_at_new_addresses(gpu):
    gpu.spec = REGISTRY["ihc_post"]
    x, residual, h_post = post()
    hccupy.ihc_post(x, residual, h_post, out=Array(np.empty_like(residual.a)))
    big = np.zeros((4, 4, 64), np.float32)
    launches = len(gpu.arguments)
    with pytest.raises(LayoutError, match="overlap"):
        hccupy.ihc_post(x, Array(big[:3]), h_post, out=Array(big[1:]))
    assert len(gpu.arguments) == launches
    assert hccupy.ihc_post(x, residual, h_post, out=residual) is residual  # in place is no overlap


def test_another_alignment_goes_the_long_way(gpu):
    gpu.spec = REGISTRY["ihc_post"]
    room = np.zeros(3 * 64 + 8, np.float32)
    start = (-room.ctypes.data // 4) % 4
    aligned, shifted = (Array(room[start + k : start + k + 192].reshape(3, 64)) for k in (0, 1))
    _, residual, h_post = post()
    for x in (aligned, shifted, aligned, shifted):
        hccupy.ihc_post(x, residual, h_post)
    assert len(run._memo) == 2


def test_absent_arrays_are_part_of_the_likeness(gpu, rng):
    spec = gpu.spec = REGISTRY["ihc_pre"]
    case = next(c for c in spec.cases if c.options.get("norm"))
    given = arguments(spec, case, rng)
    for _ in range(2):
        hccupy.ihc_pre(**given)
        hccupy.ihc_pre(**{**given, "rms_weight": None})
    place = [a.name for a in spec.arrays].index("rms_weight")
    assert [bool(a[place]) for a in gpu.arguments] == [True, False, True, False]


def test_debug_is_read_at_each_call(gpu, monkeypatch, rng):
    spec = gpu.spec = REGISTRY["rope_norm_store_kv"]
    given = arguments(spec, spec.cases[0], rng)
    for _ in range(2):
        hccupy.rope_norm_store_kv(**given)
    monkeypatch.setenv("HCCUPY_DEBUG", "1")

    class LongWay(Exception):
        pass

    def prepare(*given):
        raise LongWay

    monkeypatch.setattr(run, "prepare", prepare)
    with pytest.raises(LongWay):
        hccupy.rope_norm_store_kv(**given)
    monkeypatch.delenv("HCCUPY_DEBUG")
    hccupy.rope_norm_store_kv(**given)


def test_nothing_to_compare_by_is_no_error(gpu, monkeypatch):
    gpu.spec = REGISTRY["ihc_post"]

    def broken(given):
        raise TypeError("another signature")

    monkeypatch.setattr(FRAMEWORK, "same", staticmethod(broken))
    for _ in range(3):
        assert hccupy.ihc_post(*post()).a.shape == (3, 4, 64)
    assert not repeat.recent


@pytest.mark.parametrize("count", [0, 1, 3])
def test_bound_calls(count, gpu, monkeypatch):
    gpu.spec = REGISTRY["ihc_post"]
    example, out = post(), Array(np.empty((3, 4, 64), np.float32))
    bound = hccupy.bind("ihc_post", *example, out=out)
    others = post()[:count]
    assert bound(*others) is out
    monkeypatch.setattr(type(bound), "long", lambda *a: pytest.fail("the long way"))
    assert bound(*others) is out
    full = [*others, *example[count:], out]
    assert gpu.arguments[-1][:4] == gpu.arguments[-2][:4] == [address(x) for x in full]


def test_bound_calls_of_several_kinds(gpu, monkeypatch):
    """Whatever takes turns: numbers of arrays, streams, and arrays that are alike but for their type."""
    gpu.spec = REGISTRY["ihc_post"]

    class Parameter(Array):
        pass

    monkeypatch.setitem(arrays._BY_TYPE, Parameter, FRAMEWORK)
    example, out = post(), Array(np.empty((3, 4, 64), np.float32))
    bound = hccupy.bind("ihc_post", *example, out=out, stream=5)
    for turn in range(20):
        given = [(Parameter if turn % 3 else Array)(x.a.copy()) for x in post()[: turn % 4]]
        assert bound(*given, stream=7 if turn % 2 else None) is out
        assert gpu.arguments[-1][:4] == [address(x) for x in (*given, *example[len(given) :], out)]
        assert gpu.launches[-1] == (7 if turn % 2 else 5)
    assert bound.learnt > len(bound.short)
    with pytest.raises(ShapeError):
        bound(post(5)[0])
    with pytest.raises(ArgumentError):
        bound(*post(), out)


def test_bound_call_that_allocates(gpu):
    gpu.spec = REGISTRY["ihc_post"]
    bound = hccupy.bind("ihc_post", *post())
    results = [bound(post()[0]) for _ in range(3)]
    assert len({address(r) for r in results}) == 3
    assert [a[3] for a in gpu.arguments] == [address(r) for r in results]
    hccupy.ihc_post(*post(5))
    with pytest.raises(ShapeError):  # remembered as a call of its own, but not what was bound
        bound(*post(5))


def test_torch_tells_tensors_apart():
    torch = pytest.importorskip("torch")
    from hccupy.frameworks import torch_

    x, y = torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16)
    check = torch_.same((x, y))
    assert check(torch.ones(2, 3), y) and check(x, torch.ones(4, dtype=torch.bfloat16))
    unlike = [torch.zeros(3, 2), torch.zeros(3, 2).T, torch.zeros(2, 3).half(), torch._neg_view(x), torch.zeros(2, 3, device="meta"), torch.nn.Parameter(x)]
    with torch.inference_mode():
        unlike.append(torch.zeros(2, 3))
    unlike += [torch.zeros(2, 3).to_sparse(), None, 3, np.zeros((2, 3), np.float32)]
    for other in unlike:
        assert not check(other, y), other


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn", "int32"])
def test_torch_makes_tensors(name):
    torch = pytest.importorskip("torch")
    from hccupy.frameworks import torch_

    make = torch_.maker((5, 2), hccupy.dtypes.BY_NAME[name], torch.zeros(2, 3))
    with torch.inference_mode():
        inference = make()
    for made in (make(), inference):
        assert made.shape == (5, 2) and made.is_contiguous() and made.dtype == getattr(torch, name) and made.device.type == "cpu"
    assert inference.is_inference() and make().data_ptr() not in (0, inference.data_ptr())


def test_cupy_tells_arrays_apart(monkeypatch):
    """CuPy's words on NumPy's arrays: there is no CuPy array without a GPU."""
    pytest.importorskip("cupy")
    from hccupy.frameworks import cupy_

    class ndarray:
        def __init__(self, a, device=0):
            self.shape, self.strides, self.dtype, self.data = a.shape, a.strides, a.dtype, SimpleNamespace(device_id=device)

    monkeypatch.setattr(cupy_, "cupy", SimpleNamespace(ndarray=ndarray))
    a, b = np.zeros((2, 3), np.float32), np.zeros(4, np.float16)
    check = cupy_.same([ndarray(a), ndarray(b)])
    assert check(ndarray(a + 1), ndarray(b))
    for other in (a.T, a.astype(np.float16), a[:, ::2], a[:1]):
        assert not check(ndarray(other), ndarray(b))
    assert not check(ndarray(a, device=1), ndarray(b)) and not check(a, ndarray(b)) and not check(None, ndarray(b))


def test_no_array_is_kept_alive(gpu):
    """A remembered call knows shapes, not arrays: activations of the last batch must not stay on the GPU."""
    gpu.spec = REGISTRY["ihc_post"]
    arrays_of_call = post()
    for _ in range(2):
        result = hccupy.ihc_post(*arrays_of_call)
    assert repeat.recent["ihc_post"]
    alive = [weakref.ref(a) for a in (*arrays_of_call, result)]
    del arrays_of_call, result
    gc.collect()
    assert not any(a() for a in alive)


def test_a_maker_of_cupy_keeps_no_array_alive(monkeypatch):
    pytest.importorskip("cupy")
    from hccupy.frameworks import cupy_

    monkeypatch.setattr(cupy_, "empty", lambda *given: given)
    like = type("ndarray", (), {"data": SimpleNamespace(device_id=1)})()
    make, alive = cupy_.maker((2, 3), hccupy.dtypes.BY_NAME["float16"], like), weakref.ref(like)
    del like
    gc.collect()
    assert alive() is None and make()[:3] == ((2, 3), hccupy.dtypes.BY_NAME["float16"], ("cuda", 1))


def test_torch_keeps_no_tensor_alive():
    torch = pytest.importorskip("torch")
    from hccupy.frameworks import torch_

    x = torch.zeros(10)
    check, alive = torch_.same((x,)), weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None and check(torch.ones(10))
