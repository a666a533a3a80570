"""The simulator finds faults in the real kernels: a barrier, a 64-bit cast and a bounds guard are taken out of copies of them.

tests/mutations has many more, and the tests that must catch each; these show that each build of the simulator does its part.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from hccupy import arch
from hccupy.ops import REGISTRY
from hccupy.spec import Case

from . import ihc_checks as checks
from .adapters import CPU
from .mutations.table import replaced
from .simulated import SimulatedAdapter, simulate
from .simulator.sim import KERNELS, SCHEDULES, SimulatorError
from .test_kernels_overflow import far


@pytest.fixture
def altered(tmp_path):
    """kernels/ with one piece of text replaced."""

    def alter(name, before, after):
        copy = tmp_path / "kernels"
        shutil.copytree(KERNELS, copy)
        (copy / name).write_text(replaced((copy / name).read_text(), before, after, name))
        return copy

    return alter


def inputs(op, tokens, hidden, rng):
    spec = REGISTRY[op]
    return spec, spec.make_inputs(
        Case("found", {"tokens": tokens, "hc": 4, "hidden": hidden}, spec.cases[0].scalars, "bfloat16", {"norm": op != "ihc_post"}), rng
    )


BARRIERS = {
    "sums": ("warp_sums(sums, warp_totals[warp]);\n  __syncthreads();", "warp_sums(sums, warp_totals[warp]);"),
    "gates": ("__syncthreads();\n\n  // Sum of squares of the mix.", "// Sum of squares of the mix."),
    "norm": ("warp_squares[token][warp] = squares;\n    }\n    __syncthreads();", "warp_squares[token][warp] = squares;\n    }"),
}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_barrier_taken_out(barrier, altered, rng):
    """Plain, some schedule gives wrong results; the watcher names the race under each."""
    spec, given = inputs("ihc_pre", 2, 600, rng)  # three warps
    kernels = altered("common/ihc_tile.cuh", *BARRIERS[barrier])
    wrong = []
    for seed in range(len(SCHEDULES)):
        checks.verify(spec, given, simulate(spec, given, seed), CPU[0])
        try:
            checks.verify(spec, given, simulate(spec, given, seed, kernels=kernels), CPU[0])
        except (AssertionError, SimulatorError):
            wrong.append(seed)
        with pytest.raises(SimulatorError, match=r"race.*ihc_tile\.cuh"):
            simulate(spec, given, seed, kernels=kernels, watch=True)
    assert wrong


CASTS = {
    "ihc_post": (
        "ihc_post.cu",
        "residual + token * residual_stride_tokens + column",
        "residual + static_cast<int>(token) * static_cast<int>(residual_stride_tokens) + column",
    ),
    "ihc_pre": (
        "common/ihc_tile.cuh",
        "rows + clamped(token) * stride_tokens +",
        "rows + static_cast<int>(clamped(token)) * static_cast<int>(stride_tokens) +",
    ),
}


@pytest.mark.parametrize("op", CASTS)
def test_a_64_bit_product_in_32_bits(op, altered, rng):
    """UBSan sees the product itself overflow, though nothing is out of range in memory."""
    spec, given = inputs(op, 3, 64, rng)
    name = "residual" if op == "ihc_post" else "x"
    given[name] = far(given[name], 2**30)
    simulate(spec, given, 0, sanitize=True)
    with pytest.raises(SimulatorError, match="signed overflow in a multiplication"):
        simulate(spec, given, 0, kernels=altered(*CASTS[op]), sanitize=True)


def test_a_bounds_guard_taken_out(altered, rng):
    """Threads past the last token write: plain, into the red zone (or further: a fault); watched, the access is named."""
    spec, given = inputs("ihc_post", 3, 64, rng)
    kernels = altered("ihc_post.cu", "if (!exists) return;", "")
    zoned = {k: SimulatedAdapter().put(v) for k, v in given.items()}
    checks.verify(spec, given, simulate(spec, zoned, 0), CPU[0])
    with pytest.raises((AssertionError, SimulatorError), match="outside|not mapped|out of bounds"):
        simulate(spec, zoned, 0, kernels=kernels)
    with pytest.raises(SimulatorError, match=r"out of bounds.*ihc_post\.cu"):
        simulate(spec, zoned, 0, kernels=kernels, watch=True)


def test_a_guard_of_a_tile_taken_out(altered, rng, monkeypatch):
    """Tiles of four tokens on a small chip, the last one not full."""
    monkeypatch.setattr(arch, "BY_NAME", {a.name: replace(a, sms=1) for a in arch.TABLE})
    spec, given = inputs("ihc_pre", 5, 64, rng)
    checks.verify(spec, given, simulate(spec, given, 0), CPU[0])
    kernels = altered("common/ihc_tile.cuh", "} else if (tile.exists(token)) {", "} else {")
    with pytest.raises(AssertionError, match="past the end of the array"):
        simulate(spec, given, 0, kernels=kernels)


def test_a_missing_tail_is_poison(altered, rng):
    """A row whose last chunk is not full: what is not written stays NaN."""
    spec, given = inputs("ihc_pre", 2, 21, rng)
    kernels = altered("common/ihc_tile.cuh", "kChunks = (kLength + kChunk - 1) / kChunk", "kChunks = kLength / kChunk")
    with pytest.raises(AssertionError, match="not written"):
        simulate(spec, given, 0, kernels=kernels)


def test_a_store_wider_than_the_alignment(altered, rng):
    """UBSan is the only one to see it: x86 does not mind."""
    spec, given = inputs("ihc_post", 2, 64, rng)
    wide = np.zeros((2, 4, 66), given["residual"].dtype)
    wide[:, :, 1:65] = given["residual"]
    given["residual"] = wide[:, :, 1:65]
    simulate(spec, given, 0, sanitize=True)
    kernels = altered("ihc_post.cu", "hccupy::ihc_post_body<kXDtype, kHc, kHidden, kVec,", "hccupy::ihc_post_body<kXDtype, kHc, kHidden, 8 * kVec,")
    with pytest.raises(SimulatorError, match="misaligned access"):
        simulate(spec, given, 0, kernels=kernels, sanitize=True)
