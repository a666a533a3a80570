"""iHC kernels on a GPU: right, batch-invariant, and safe with frameworks, streams, graphs and threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hccupy
from hccupy.ops import REGISTRY
from hccupy.spec import Case

from . import ihc_checks as checks
from .adapters import GPU, params

pytestmark = pytest.mark.gpu
TORCH, CUPY = GPU[0], GPU[1]
CASES = checks.small_cases()
SIZES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 4096)


@pytest.mark.parametrize(("spec", "case"), [pytest.param(s, c, id=f"{s.name}-{c.name}-{c.dtype}") for s, c in CASES])
def test_ihc_every_case_against_fp64(spec, case, rng):
    checks.case_is_right(spec, case, rng, TORCH)


@pytest.mark.parametrize("on", params(GPU[1:]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_every_framework(op, dtype, rng, on):
    case = Case("framework", {"tokens": 3, "hc": 4, "hidden": 576}, REGISTRY[op].cases[0].scalars, dtype, {"norm": op != "ihc_post"})
    checks.case_is_right(REGISTRY[op], case, rng, on)


@pytest.mark.parametrize("hidden", [1024, 2048, 2880, 4096, 4608, 5120, 6144, 6656, 7168, 8192, 12288, 4100, 100])
@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_G2_model_widths(op, hidden, rng):
    """G2: every width by its own kernel, at sizes that reach every variant."""
    for tokens in (1, 17, 70, 300):
        case = Case(
            "width", {"tokens": tokens, "hc": 4, "hidden": hidden}, REGISTRY[op].cases[0].scalars, "bfloat16", {"norm": op != "ihc_post" and tokens == 17}
        )
        checks.case_is_right(REGISTRY[op], case, rng, TORCH)


@pytest.mark.parametrize(("hc", "hidden"), [(1, 4096), (2, 4096), (3, 4096), (8, 4096), (2, 1152), (2, 2560), (2, 4608), (2, 12288), (3, 512), (3, 8192)])
@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_G3_channel_counts(op, hc, hidden, rng):
    for tokens in (3, 100):
        case = Case("hc", {"tokens": tokens, "hc": hc, "hidden": hidden}, REGISTRY[op].cases[0].scalars, "bfloat16", {"norm": op != "ihc_post"})
        checks.case_is_right(REGISTRY[op], case, rng, TORCH)


# Shapes of each kind of kernel: sm_90a in clusters of 8, 16, 4 and 2 blocks, whose columns fill their groups or do not; tensor, portable.
SM90 = [(4, 6144, "bfloat16"), (4, 4096, "float16"), (4, 8192, "bfloat16"), (4, 2880, "bfloat16"), (3, 2880, "float16"), (2, 2048, "bfloat16")]
SM90 += [(8, 2048, "bfloat16"), (7, 4096, "bfloat16"), (5, 2560, "float16")]  # over 8 outputs: two sides of them
KINDS = [*SM90, (8, 1024, "bfloat16"), (4, 2052, "float32"), (2, 576, "float32"), (3, 257, "bfloat16")]


@pytest.mark.parametrize(("hc", "hidden", "dtype"), KINDS)
@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_G8_batch_invariance(op, hc, hidden, dtype, rng):
    checks.batch_invariant(op, hc, hidden, dtype, tuple(n for n in SIZES if n * hc * hidden < 2**27), rng, TORCH)


@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_invariance_16384_and_100_repeats(op, rng):
    """The largest batch against parts of it, and 100 repeats of a middle one: always the same bits."""
    import torch

    spec = REGISTRY[op]
    given = spec.make_inputs(Case("large", {"tokens": 1024, "hc": 4, "hidden": 6144}, spec.cases[0].scalars, "bfloat16", {"norm": op != "ihc_post"}), rng)
    arrays = {k: TORCH.put(v) for k, v in given.items()}
    rows = [k for k in ("x", "residual", "h_post") if k in arrays]
    big = {**arrays, **{k: arrays[k].repeat(16, *[1] * (arrays[k].dim() - 1)) for k in rows}}
    function = getattr(hccupy, op)

    def results(a):
        r = function(**a)
        return r if isinstance(r, tuple) else (r,)

    first = results(arrays)
    for whole, part in zip(results(big), first, strict=True):
        assert torch.equal(whole.view(16, *part.shape), part.expand(16, *part.shape).contiguous())
    for _ in range(100):
        for again, part in zip(results(arrays), first, strict=True):
            assert torch.equal(again.view(torch.uint8), part.view(torch.uint8))


@pytest.mark.parametrize(("hc", "hidden", "dtype"), [*SM90, (4, 96, "bfloat16"), (2, 4100, "bfloat16"), (8, 576, "float32")])
@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_strides_do_not_matter(op, hc, hidden, dtype, rng):
    checks.strides_do_not_matter(op, hc, hidden, dtype, rng, TORCH)


@pytest.mark.parametrize(("hc", "hidden", "dtype"), [*KINDS, (4, 7168, "float16")])
def test_ihc_fused_is_composed(hc, hidden, dtype, rng):
    for tokens in (1, 33, 130, 1000):
        checks.fused_is_composed(hc, hidden, tokens, dtype, rng, TORCH)


@pytest.mark.parametrize("on", params([a for a in GPU if a.mutable]))
def test_ihc_in_place(on, rng):
    for hc, hidden in ((4, 6144), (8, 1028), (3, 41)):
        checks.in_place("ihc_post", hc, hidden, 9, "bfloat16", rng, on)


@pytest.mark.parametrize(("hc", "hidden", "dtype"), KINDS)
def test_ihc_fused_in_place(hc, hidden, dtype, rng):
    """The soaks found a kernel that read rows which another cluster had overwritten."""
    for tokens in (9, 600):
        checks.in_place("ihc_post_pre", hc, hidden, tokens, dtype, rng, TORCH, times=5)


# Gates may be off by 4e-6 of the largest, so a y of which the channels cancel may be off by 4e-6 of its terms. (The sm_90a kernels' gates
# are off by 2e-7, NumPy's by 3e-6, the tensor kernel's by 1e-6.)
@pytest.mark.parametrize(("hc", "hidden", "cancelled"), [(4, 6144, 8 * 2.0**-23), (4, 2880, 8 * 2.0**-23), (4, 4100, 4e-6), (8, 1024, 4e-6), (8, 2048, 4e-6)])
@pytest.mark.parametrize("tokens", [1, 127, 128, 2048])
def test_ihc_G10_weights_that_cancel(tokens, hc, hidden, cancelled, rng):
    """No accuracy step at any internal switch, with weights whose products cancel."""
    spec = REGISTRY["ihc_pre"]
    given = spec.make_inputs(Case("cancel", {"tokens": tokens, "hc": hc, "hidden": hidden}, spec.cases[0].scalars, "bfloat16"), rng)
    flat = given["x"].reshape(tokens, -1)
    half = flat.shape[1] // 2
    flat[:, half:] = flat[:, :half]
    given["w"][:, half:] = -given["w"][:, :half] + given["w"][:, half:] * np.float32(1e-3)
    given["w"] *= np.float32(8)
    checks.verify(spec, given, checks.call("ihc_pre", given, TORCH), TORCH, cancelled)


@pytest.mark.parametrize(("hc", "hidden", "dtype"), [k for k in KINDS if k[2] != "float16"])
@pytest.mark.parametrize("op", ["ihc_pre", "ihc_head", "ihc_post_pre"])
def test_ihc_squares_that_overflow(op, hc, hidden, dtype, rng):
    checks.rows_that_overflow(op, hc, hidden, dtype, rng, lambda given: checks.call(op, given, TORCH))


@pytest.mark.parametrize("op", checks.IHC)
def test_ihc_redzones(op, rng):
    """Bytes before and after every output stay as they were."""
    import torch

    spec = REGISTRY[op]
    for tokens, hidden in ((1, 6144), (77, 6144), (19, 4100), (3, 257)):
        given = {
            k: TORCH.put(v)
            for k, v in spec.make_inputs(Case("red", {"tokens": tokens, "hc": 4, "hidden": hidden}, spec.cases[0].scalars, "bfloat16"), rng).items()
        }
        plain = getattr(hccupy, op)(**given)
        outs, zones = {}, []
        for o, r in zip(spec.outputs, plain if isinstance(plain, tuple) else (plain,), strict=True):
            zone = torch.full((r.numel() + 512,), 12345.0, dtype=r.dtype, device="cuda")
            zones.append((zone, r))
            outs[o.keyword] = zone[256 : 256 + r.numel()].view(r.shape)
        getattr(hccupy, op)(**given, **outs)
        for zone, r in zones:
            assert torch.equal(zone[256:-256].view(r.shape), r)
            mark = torch.full_like(zone[:256], 12345.0)
            assert torch.equal(zone[:256], mark) and torch.equal(zone[-256:], mark)


def test_ihc_C6_more_than_2_31_elements():
    """131,073 tokens of 4 x 4096: the last rows are right and the first are not overwritten."""
    import torch

    tokens = 131_073
    torch.manual_seed(0)
    x = torch.empty(tokens, 4, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    spec = REGISTRY["ihc_pre"]
    small = spec.make_inputs(Case("w", {"tokens": 1, "hc": 4, "hidden": 4096}, {}, "bfloat16"), np.random.default_rng(0))
    w = {k: TORCH.put(small[k]) for k in ("w", "hc_scale", "hc_base")}
    ends = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device="cuda")
    y, h = hccupy.ihc_pre(x, **w)
    y2, h2 = hccupy.ihc_pre(x[ends].contiguous(), **w)
    assert torch.equal(y[ends], y2) and torch.equal(h[ends], h2)
    block = torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda")
    out = hccupy.ihc_post(block, x, h)
    assert torch.equal(out[ends], hccupy.ihc_post(block[ends], x[ends], h[ends].contiguous()))
    fused, z, g = hccupy.ihc_post_pre(block, x, h, **w)
    assert torch.equal(fused, out)
    z2, g2 = hccupy.ihc_pre(out, **w)
    assert torch.equal(z, z2) and torch.equal(g, g2)


def test_ihc_K9_subnormals_pass(rng):
    """Kernels do not flush subnormals."""
    import torch

    residual = torch.tensor([[[1e-39, -1e-39, 9.2e-41, float("inf"), -0.0, 3e38]]], device="cuda").to(torch.bfloat16)
    y = hccupy.ihc_post(torch.zeros(1, 6, dtype=torch.bfloat16, device="cuda"), residual, torch.ones(1, 1, device="cuda"))
    assert torch.equal(y.view(torch.int16)[..., :4], residual.view(torch.int16)[..., :4])


def test_ihc_L_graph_capture_and_replay_with_changed_inputs(rng):
    """Capture under torch.cuda.graph, replay with other inputs: the results follow them."""
    import torch

    spec = REGISTRY["ihc_post_pre"]
    case = Case("graph", {"tokens": 24, "hc": 4, "hidden": 6144}, spec.cases[0].scalars, "bfloat16")
    arrays = {k: TORCH.put(v) for k, v in spec.make_inputs(case, rng).items()}
    hccupy.ihc_post_pre(**arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hccupy.ihc_post_pre(**arrays)
    for _ in range(3):
        other = spec.make_inputs(case, rng)
        for k, v in arrays.items():
            if isinstance(v, torch.Tensor):
                v.copy_(TORCH.put(other[k]))
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, hccupy.ihc_post_pre(**arrays), strict=True):
            assert torch.equal(got, want)


def test_ihc_K8_first_call_inside_a_capture_is_a_clear_error(rng):
    """A cold shape under capture raises, and the capture can be ended."""
    import torch

    x = torch.randn(3, 4, 1304, device="cuda", dtype=torch.bfloat16)
    residual, h = torch.randn(3, 4, 1304, device="cuda", dtype=torch.bfloat16), torch.rand(3, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(hccupy.CaptureError, match="before the capture"), torch.cuda.graph(graph):
        hccupy.ihc_post(x[:, 0], residual, h)
    torch.cuda.synchronize()
    assert hccupy.ihc_post(x[:, 0], residual, h).shape == residual.shape


def test_ihc_J2_runs_on_the_frameworks_current_stream(rng):
    """A side stream held up by a long spin, 100 times: the op reads what that stream wrote."""
    import torch

    side = torch.cuda.Stream()
    residual = torch.zeros(8, 4, 6144, dtype=torch.bfloat16, device="cuda")
    h = torch.ones(8, 4, device="cuda")
    x = torch.zeros(8, 6144, dtype=torch.bfloat16, device="cuda")
    hccupy.ihc_post(x, residual, h)
    torch.cuda.synchronize()
    for i in range(100):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            x.fill_(i + 1)
            y = hccupy.ihc_post(x, residual, h)
            value = y.float().mean()
        side.synchronize()
        assert value.item() == i + 1


def test_ihc_J2_cupy_stream_and_override():
    """CuPy's current stream is read at each call; stream= overrides it."""
    import cupy

    side = cupy.cuda.Stream(non_blocking=True)
    x, residual = cupy.zeros((8, 6144), "float16"), cupy.zeros((8, 4, 6144), "float16")
    h = cupy.ones((8, 4), "float32")
    hccupy.ihc_post(x, residual, h)
    cupy.cuda.runtime.deviceSynchronize()
    with side:
        x.fill(3)
        y = hccupy.ihc_post(x, residual, h)
    side.synchronize()
    assert (y == 3).all()
    y = hccupy.ihc_post(x, residual, h, stream=side)
    side.synchronize()
    assert (y == 3).all()


def test_ihc_J10_eight_threads(rng):
    """Eight threads, each on its own stream, the same shapes at once."""
    import torch

    spec = REGISTRY["ihc_pre"]
    case = Case("threads", {"tokens": 16, "hc": 4, "hidden": 6144}, spec.cases[0].scalars, "bfloat16")
    inputs = [{k: TORCH.put(v) for k, v in spec.make_inputs(case, rng).items()} for _ in range(8)]
    want = [hccupy.ihc_pre(**a) for a in inputs]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(i):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(200):
                    y, h = hccupy.ihc_pre(**inputs[i])
                    if not (torch.equal(y, want[i][0]) and torch.equal(h, want[i][1])):
                        wrong.append(f"thread {i}")
        except Exception as error:  # a thread's exception would be lost
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[:3]


def test_ihc_first_call_of_a_new_thread():
    """A shape nobody has called yet, in a thread that has no CUDA context of its own yet."""
    import torch

    x, residual, h = torch.randn(2, 328, device="cuda"), torch.randn(2, 4, 328, device="cuda"), torch.rand(2, 4, device="cuda")
    torch.cuda.synchronize()
    found = []

    def work():
        try:
            found.append(hccupy.ihc_post(x, residual, h))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], torch.Tensor), found[0]
    assert torch.equal(found[0], hccupy.ihc_post(x, residual, h))


def test_ihc_J9_errors_on_the_gpu_write_nothing():
    """CPU index or gate tensors with GPU data name the argument; an overlapping output is refused."""
    import torch

    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(4, 4, 64, device="cuda", dtype=torch.bfloat16)
    before = residual.clone()
    with pytest.raises(hccupy.DeviceError, match="h_post"):
        hccupy.ihc_post(x, residual, torch.ones(4, 4), out=residual)
    with pytest.raises(hccupy.DeviceError, match="h_post"):
        hccupy.ihc_post(x, residual, np.ones((4, 4), np.float32), out=residual)
    big = torch.randn(5, 4, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(hccupy.LayoutError, match="share no element"):
        hccupy.ihc_post(x, big[:4], torch.ones(4, 4, device="cuda"), out=big[1:])
    assert torch.equal(residual, before)


def test_ihc_I1_empty_calls(rng):
    """No tokens: empty outputs, no launch, the next op works."""
    import torch

    for op in checks.IHC:
        spec = REGISTRY[op]
        given = spec.make_inputs(Case("empty", {"tokens": 0, "hc": 4, "hidden": 6144}, spec.cases[0].scalars, "bfloat16"), rng)
        for r in checks.call(op, given, TORCH):
            assert r.shape[0] == 0
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_ihc_K11_one_module_load(rng):
    """1,000 calls load a module once."""
    import torch

    from hccupy import build

    x, residual, h = torch.randn(2, 648, device="cuda"), torch.randn(2, 4, 648, device="cuda"), torch.rand(2, 4, device="cuda")
    before = build.loads
    for _ in range(1000):
        hccupy.ihc_post(x, residual, h)
    assert build.loads <= before + 1
