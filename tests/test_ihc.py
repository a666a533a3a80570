"""iHC ops on the CPU path, through every framework."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hccupy
from hccupy.ops import REGISTRY
from hccupy.spec import Case

from . import ihc_checks as checks
from . import oracle
from .adapters import CPU, Adapter, params

NUMPY = CPU[0]
CASES = checks.small_cases()


@pytest.mark.parametrize("on", params(CPU[:1]))
@pytest.mark.parametrize(("spec", "case"), [pytest.param(s, c, id=f"{s.name}-{c.name}-{c.dtype}") for s, c in CASES])
def test_every_case_against_fp64(spec, case, rng, on):
    checks.case_is_right(spec, case, rng, on)


@pytest.mark.parametrize("on", params(CPU[1:]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", checks.IHC)
def test_every_framework(op, dtype, rng, on):
    case = Case("framework", {"tokens": 3, "hc": 4, "hidden": 72}, REGISTRY[op].cases[0].scalars, dtype, {"norm": op != "ihc_post"})
    checks.case_is_right(REGISTRY[op], case, rng, on)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    op=st.sampled_from(checks.IHC), tokens=st.integers(0, 40), hc=st.integers(1, 8), hidden=st.integers(1, 300),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]), norm=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape(op, tokens, hc, hidden, dtype, norm, seed):
    spec = REGISTRY[op]
    options = {"norm": norm} if op != "ihc_post" else {}
    case = Case("any", {"tokens": tokens, "hc": hc, "hidden": hidden}, spec.cases[0].scalars, dtype, options)
    checks.case_is_right(spec, case, np.random.default_rng(seed), NUMPY)


@pytest.mark.parametrize("op", checks.IHC)
def test_G8_batch_invariance(op, rng):
    checks.batch_invariant(op, 4, 256, "bfloat16", (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65), rng, NUMPY)


@pytest.mark.parametrize("op", checks.IHC)
def test_strides_do_not_matter(op, rng):
    checks.strides_do_not_matter(op, 4, 96, "bfloat16", rng, NUMPY)


def test_fused_is_composed(rng):
    checks.fused_is_composed(4, 96, 33, "bfloat16", rng, NUMPY)


@pytest.mark.parametrize("on", params([a for a in CPU if a.mutable]))
def test_in_place(on, rng):
    checks.in_place("ihc_post", 4, 40, 9, "bfloat16", rng, on)
    checks.in_place("ihc_post_pre", 4, 40, 9, "bfloat16", rng, on)


def test_G4_the_three_eps_are_different_numbers(rng):
    """Small x makes each eps visible: swapping any two must break the match with fp64."""
    spec = REGISTRY["ihc_pre"]
    case = Case("eps", {"tokens": 4, "hc": 4, "hidden": 64}, {"norm_eps": 1e-3, "hc_eps": 2e-2, "rms_eps": 3e-1}, "float32", {"norm": True})
    given = spec.make_inputs(case, rng)
    given["x"] *= np.float32(0.03)
    got = checks.call("ihc_pre", given, NUMPY)
    checks.verify(spec, given, got, NUMPY)
    for a, b in (("norm_eps", "hc_eps"), ("norm_eps", "rms_eps"), ("hc_eps", "rms_eps")):
        with pytest.raises(AssertionError):
            checks.verify(spec, {**given, a: given[b], b: given[a]}, got, NUMPY)


def test_G10_weights_that_cancel(rng):
    """Large weights whose products cancel: gates keep fp32 accuracy, and are no worse than twice an eager fp32 chain."""
    spec = REGISTRY["ihc_pre"]
    given = spec.make_inputs(Case("cancel", {"tokens": 16, "hc": 4, "hidden": 512}, spec.cases[0].scalars, "bfloat16"), rng)
    half = given["w"].shape[1] // 2
    given["x"] = given["x"].reshape(16, -1)
    given["x"][:, half:] = given["x"][:, :half]
    given["x"] = given["x"].reshape(16, 4, 512)
    given["w"][:, half:] = -given["w"][:, :half] + given["w"][:, half:] * np.float32(1e-3)
    given["w"] *= np.float32(8)
    checks.verify(spec, given, checks.call("ihc_pre", given, NUMPY), NUMPY)


def test_G14_channel_order(rng):
    """Channel i holds i + 1: a mixed-up order shows."""
    x = np.broadcast_to(np.arange(1.0, 5.0, dtype=np.float32)[:, None], (2, 4, 8)).copy()
    base = np.array([9, -9, -9, -9, 0, 0, 0, 0], np.float32)
    y, _ = hccupy.ihc_pre(x, np.zeros((8, 32), np.float32), np.zeros(2, np.float32), base, hc_eps=0.0)
    assert np.allclose(y, 1 / (1 + np.exp(-9)) + (2 + 3 + 4) / (1 + np.exp(9)), rtol=1e-6)
    residual = hccupy.ihc_post(np.ones((2, 8), np.float32), x, np.array([[10, 20, 30, 40]] * 2, np.float32))
    assert (residual[:, :, 0] == [11, 22, 33, 44]).all()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_leading_shapes(lead, rng):
    """Any leading shape is flattened to tokens and restored."""
    n = int(np.prod(lead, dtype=int))
    spec = REGISTRY["ihc_post_pre"]
    given = spec.make_inputs(Case("lead", {"tokens": n, "hc": 4, "hidden": 24}, spec.cases[0].scalars, "bfloat16"), rng)
    want = checks.call("ihc_post_pre", given, NUMPY)
    shaped = {k: v.reshape(*lead, *v.shape[1:]) if k in ("x", "residual", "h_post") else v for k, v in given.items()}
    got = checks.call("ihc_post_pre", shaped, NUMPY)
    for g, w in zip(got, want, strict=True):
        assert g.shape == (*lead, *w.shape[1:])
        assert np.array_equal(g.reshape(w.shape).view(np.uint8), w.view(np.uint8))


def test_hc_scale_zero_is_the_plain_residual_network():
    """HY V4's initial gates with hc_scale 0: h_pre sums to 1, h_post is 1."""
    base = np.array([-np.log(3.0)] * 4 + [0.0] * 4, np.float32)
    x = np.random.default_rng(0).standard_normal((5, 1, 16), np.float32).repeat(4, 1)
    y, h_post = hccupy.ihc_pre(x, np.ones((8, 64), np.float32), np.zeros(2, np.float32), base, hc_eps=0.0, magnitude=2.0)
    assert np.allclose(y, x[:, 0], rtol=3e-7) and (h_post == 1).all()


def test_subnormals_and_specials_pass_through():
    """K9: 0 * h + residual keeps bf16 subnormals, -0 and infinities."""
    import ml_dtypes

    residual = np.array([1e-39, -1e-39, 1e-40, np.inf, -np.inf, 3e38], ml_dtypes.bfloat16).reshape(1, 1, 6)
    y = hccupy.ihc_post(np.zeros((1, 6), ml_dtypes.bfloat16), residual, np.ones((1, 1), np.float32))
    assert np.array_equal(y.view(np.uint16), residual.view(np.uint16))


def test_cpu_path_is_no_slower_than_twice_torch_eager(rng):
    """256 tokens x 4 x 6144 bf16, the same arrays, turn by turn: the ratio of the medians."""
    import torch

    on = Adapter("torch")
    spec, post = REGISTRY["ihc_pre"], REGISTRY["ihc_post"]
    size = {"tokens": 256, "hc": 4, "hidden": 6144}
    a = {k: on.put(v) for k, v in spec.make_inputs(Case("speed", size), rng).items()}
    b = {k: on.put(v) for k, v in post.make_inputs(Case("speed", size), rng).items()}

    def eager_pre():
        xf = a["x"].float().flatten(1)
        mixes = (xf @ a["w"].T) * torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-5)
        h_pre = torch.sigmoid(mixes[:, :4] * a["hc_scale"][0] + a["hc_base"][:4]) + 1e-6
        h_post = 2 * torch.sigmoid(mixes[:, 4:] * a["hc_scale"][1] + a["hc_base"][4:]) + 1e-6
        return (h_pre[:, :, None] * xf.view(a["x"].shape)).sum(1).to(a["x"].dtype), h_post

    def eager_post():
        return (b["h_post"][:, :, None] * b["x"].float()[:, None, :] + b["residual"].float()).to(b["x"].dtype)

    for name, ours, eager in (("pre", lambda: hccupy.ihc_pre(**a), eager_pre), ("post", lambda: hccupy.ihc_post(**b), eager_post)):
        times = {"ours": [], "eager": []}
        for _ in range(7):
            for key, f in (("ours", ours), ("eager", eager)):
                start = time.perf_counter()
                f()
                times[key].append(time.perf_counter() - start)
        ratio = np.median(times["ours"]) / np.median(times["eager"])
        assert ratio <= 2.0, f"ihc_{name}: {ratio:.2f} times torch eager"


def test_oracle_catches_a_wrong_row(rng):
    """The checker itself: one wrong element in a large output is seen."""
    want = rng.standard_normal((64, 64))
    got = want.astype(np.float32)
    oracle.check_ulps(got, want, 1, 2, "right")
    got[13, 7] += 1e-5
    with pytest.raises(AssertionError, match="worst error"):
        oracle.check_ulps(got, want, 1, 2, "wrong")
