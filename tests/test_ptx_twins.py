"""Each PTX function and its portable twin: the twin against exact arithmetic here, the instruction against the twin on a GPU."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hccupy import build, cuda

from .simulator.sim import Simulated

SOURCE = Path(__file__).parent / "twins.cu"
DEFINES = {"kHopper": 1}


def floats(rng):
    """Bits of floats at and beside every rounding boundary of bf16, f16 and e4m3, of specials, and at random."""
    halves = np.arange(65536, dtype=np.uint32)
    around_bf16 = [(halves << 16) + np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001)]
    with np.errstate(all="ignore"):
        f16 = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        middles = (f16[:-1].astype(np.float64) + f16[1:]).astype(np.float32) / 2
        e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        codes = np.concatenate([e4m3, (e4m3[:-1] + e4m3[1:]) / 2, [464, -464, 479.9, 480, 1e-10, -1e-10, np.inf, -np.inf, np.nan, 0, -0.0]]).astype(np.float32)
    around = np.concatenate([middles, codes]).view(np.uint32)
    found = [*around_bf16, around, around + np.uint32(1), around - np.uint32(1), rng.integers(0, 2**32, 50_000).astype(np.uint32)]
    return np.concatenate(found).astype(np.uint32)


def inputs(rng):
    """(entry, grid, block, arguments; outputs are the arrays that hold nothing yet) of every kernel of twins.cu."""
    bits = floats(rng)
    some = rng.integers(0, 256, 4096).astype(np.uint8)
    normal = np.concatenate([rng.uniform(1, 2, 4096), 2.0 ** rng.integers(-125, 125, 4096), rng.uniform(1e-30, 1e30, 4096)]).astype(np.float32)
    a = rng.integers(-1023, 1024, (8, 16, 8)).astype(np.float32)
    a *= np.float32(1 + 2.0**-14)  # more than 11 bits: what is behind them must not count
    b, c = rng.integers(-1023, 1024, (8, 8, 8)).astype(np.float32), rng.integers(-1000, 1000, (8, 16, 8)).astype(np.float32)
    yield "narrow", -(-len(bits) // 256), 256, [bits, np.zeros((len(bits), 6), np.uint32), len(bits)]
    yield "widen", 256, 256, [np.zeros((65536, 3), np.uint32)]
    yield "inverse", -(-len(normal) // 256), 256, [normal, np.zeros_like(normal), len(normal)]
    for size in (1, 2, 4, 8, 16):
        yield "move_words", 2, 64, [some, np.zeros_like(some), size]
    for size in (4, 8, 16):
        yield "async_copies", 1, 128, [some, np.zeros_like(some), size]
    yield "products", 8, 32, [a, b, c.copy()]
    yield "cluster", 1, 64, [rng.standard_normal(128).astype(np.float32), np.zeros(128, np.float32)]
    yield "bulk_copies", 1, 64, [some[:2048], np.zeros(2048, np.uint8)]


def by_twins(rng):
    """[(entry, arguments after the run in the simulator)]."""
    found = []
    for entry, grid, block, arguments in inputs(rng):
        Simulated(SOURCE, entry, DEFINES).launch(grid, block, 0, arguments, seed=1)
        found.append((entry, arguments))
    return found


def e4m3(x):
    """The rule: saturated to 448, infinities too; NaN has one code."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), 0x7F, codes).astype(np.uint32)


def test_twins_are_exact(rng):
    for entry, arguments in by_twins(rng):
        if entry == "narrow":
            bits, out = arguments[:2]
            x = bits.view(np.float32)
            nan = np.isnan(x)
            with np.errstate(all="ignore"):
                bf16 = np.where(nan, 0x7FFF, x.astype(ml_dtypes.bfloat16).view(np.uint16)).astype(np.uint32)
                f16 = np.where(nan, 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint32)
            want = [bf16, f16, e4m3(x)]
            for k, w in enumerate(want):
                assert np.array_equal(out[:, k], w), ("bf16", "f16", "e4m3")[k]
                assert np.array_equal(out[:, 3 + k], w | np.roll(w, -1) << (8 if k == 2 else 16))
        elif entry == "widen":
            codes, out = np.arange(65536), arguments[0].view(np.float32)
            want = [codes.astype(np.uint16).view(t) for t in (ml_dtypes.bfloat16, np.float16)] + [codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)]
            for k, w in enumerate(want):
                assert np.array_equal(out[:, k], w.astype(np.float32), equal_nan=True)
                assert np.array_equal(np.signbit(out[:, k]), np.signbit(w.astype(np.float32)))
        elif entry == "inverse":
            assert np.array_equal(arguments[1], 1 / arguments[0])
        elif entry == "products":
            a, b, c = arguments
            kept = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
            assert (kept != a).any()
            rest = c.astype(np.float64) - kept.astype(np.float64) @ b.astype(np.float64)
            assert np.array_equal(rest, np.round(rest)) and np.abs(rest).max() <= 1000  # c as it was
        elif entry == "cluster":
            assert np.array_equal(arguments[1].reshape(64, 2), arguments[0].reshape(64, 2)[::-1])
        else:
            n = {"move_words": lambda size: 256 * size, "async_copies": lambda size: 128 * size, "bulk_copies": lambda: 2048}[entry](*arguments[2:])
            if entry == "async_copies":
                for first in (0, 2048):
                    assert np.array_equal(arguments[1][first : first + n], arguments[0][first : first + n])
            else:
                assert np.array_equal(arguments[1][:n], arguments[0][:n])


def compiled(arch_name, hopper):
    """(cubin, log) of twins.cu with the library's own headers and options."""
    nvrtc = cuda.nvrtc()
    files = build.sources()
    headers = [name for name in files if name.endswith(".cuh")]
    program = nvrtc.createProgram(SOURCE.read_text(), "twins.cu", [files[h] for h in headers], [h.encode() for h in headers])
    nvrtc.compileProgram(
        program, (f"-arch={arch_name}", "-std=c++17", "-default-device", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", f"-DkHopper={int(hopper)}")
    )
    return nvrtc.getCUBIN(program) + b"\0"


@pytest.mark.parametrize("arch_name", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_twins_compile_as_ptx(arch_name):
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy: pip install hccupy[cuda13]")
    assert compiled(arch_name, arch_name not in ("sm_80", "sm_89")).startswith(b"\x7fELF")


@pytest.mark.gpu
def test_twin_ptx_gives_the_same_bits(rng, tmp_path):
    """NaN of any payload where a NaN is widened; the fast reciprocal within an ulp. All else bit for bit."""
    import cupy

    from hccupy import arch

    here = arch.of_device(0)
    path = tmp_path / "twins.cubin"
    path.write_bytes(compiled(here.name, here.at_least(9)))
    module = cupy.RawModule(path=str(path))
    for (entry, twin), (_, grid, block, arguments) in zip(by_twins(np.random.default_rng(7)), inputs(np.random.default_rng(7)), strict=True):
        if entry in ("cluster", "bulk_copies") and not here.at_least(9):
            continue
        placed = [cupy.asarray(a) if isinstance(a, np.ndarray) else np.int32(a) for a in arguments]
        module.get_function(entry)((grid,), (block,), tuple(placed))
        for k, (p, want) in enumerate(zip(placed, twin, strict=True)):
            if not isinstance(want, np.ndarray):
                continue
            got = cupy.asnumpy(p)
            if entry == "widen":
                nan = np.isnan(want.view(np.float32))
                assert np.isnan(got.view(np.float32))[nan].all()
                got, want = got[~nan], want[~nan]  # noqa: PLW2901
            elif entry == "inverse" and k == 1:
                steps = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32))
                assert steps.max() <= 1, f"fast_reciprocal: {steps.max()} ulps"
                continue
            wrong = np.flatnonzero((got.reshape(-1) != want.reshape(-1)) & ~((got != got) & (want != want)).reshape(-1))
            assert not wrong.size, (
                f"{entry}, argument {k}: {wrong.size} of {got.size} differ, first {wrong[0]}: {got.reshape(-1)[wrong[0]]} and {want.reshape(-1)[wrong[0]]}"
            )
