"""Where iHC rounds, and what its sums keep: faults of half an ulp, which no tolerance of one ulp would show."""

from __future__ import annotations

import numpy as np
import pytest

from hccupy.ops import REGISTRY, ihc_launch
from hccupy.spec import Case

from . import ihc_checks as checks
from . import oracle
from .adapters import CPU
from .simulated import SimulatedAdapter

WAYS = [CPU[0], SimulatedAdapter(), SimulatedAdapter(arch_name="sm_90a")]


@pytest.fixture(params=WAYS, ids=["cpu", "portable", "tensor"])
def on(request, monkeypatch):
    monkeypatch.setattr(ihc_launch, "TENSOR_LEAST", 0)
    return request.param


@pytest.mark.parametrize("op", ["ihc_pre", "ihc_head", "ihc_post_pre"])
def test_y_is_rounded_before_the_folded_norm_if_asked(op, on, rng):
    """Nearly every element has the bits of fp64 with the same rounding point, and far fewer those of the other one."""
    spec = REGISTRY[op]
    case = Case("point", {"tokens": 6, "hc": 4, "hidden": 264}, spec.cases[0].scalars, "bfloat16", {"norm": True, "rms_dtype": "float32"})
    given = spec.make_inputs(case, rng)
    place = [o.name for o in spec.outputs].index("z" if op == "ihc_post_pre" else "y")
    for rounds in (True, False):
        results = checks.call(op, {**given, "round_before_norm": rounds}, on)
        share = {}
        for assumed in (True, False):
            words = {**given, "round_before_norm": assumed, "y": results[0]}
            want = oracle.ORACLES[op](words)[place].astype(np.float32).astype(results[place].dtype)
            share[assumed] = float((checks.bits(results[place]) == checks.bits(want)).mean())
        assert share[rounds] > 0.99 > 0.97 > share[not rounds], share


@pytest.mark.parametrize("hidden", [96, 520])
def test_sums_keep_what_rounding_takes(hidden, rng):
    """Terms of millions that cancel between threads, beside terms of 1, and a scale that shows what is left: Kahan's step and two-sum have
    to carry it. Every sum of 8 is exact; plain fp32 sums of those are off by 2 % of the largest gate."""
    spec = REGISTRY["ihc_pre"]
    given = spec.make_inputs(Case("cancel", {"tokens": 3, "hc": 4, "hidden": hidden}, spec.cases[0].scalars, "float32"), rng)
    large = 64 * rng.integers(2**15, 2**17, (3, hidden)).astype(np.float32)
    x = rng.integers(-15, 16, (3, 4, hidden)).astype(np.float32) / 8
    signs = rng.choice([-1.0, 1.0], (8, 1, hidden)).astype(np.float32)
    half = hidden // 2
    x[:, 0] = large
    x[:, 0, half:] = -large[:, :half]
    signs[:, :, half:] = signs[:, :, :half]
    given |= {"x": x, "w": np.broadcast_to(signs, (8, 4, hidden)).reshape(8, -1).copy(), "hc_scale": np.full(2, 1e5, np.float32)}
    got, want = checks.call("ihc_pre", given, SimulatedAdapter())[1], oracle.ihc_pre(given)[1]
    oracle.check_gates(got, want, spec.name)
