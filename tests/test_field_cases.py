"""Which test answers each known fault of the field. A row of the list is a test with its number in the name, or a reason why there is none.

The rows: A padding and null blocks, B layouts and block tables, C 32-bit overflow and grid limits, D rope, E norms, F fp8, G hyper-connections,
H decode, I empty calls and argument checks, J devices, streams and DLPack, K compiling and cache, L torch.compile and graphs,
M determinism, N launch overhead. Those of rope_field_cases.py run on every framework, on a GPU and in the simulator.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hccupy
from hccupy import arch, plan
from hccupy.frameworks import dlpack_
from hccupy.ops import REGISTRY, ihc_launch
from hccupy.spec import Case

from . import fakes, oracle
from . import ihc_checks as checks
from .adapters import CPU
from .simulated import SimulatedAdapter
from .test_plan import bound_of

# fmt: off
ROWS = [
    "A1", "A2", "A4", "A5", "A6", "A8", "A9", "A10", "A11", "A12", "A14", "B1", "B2", "B3", "B4", "B6", "B7", "B8", "B10", "B11", "B13", "B14", "B16",
    "C1", "C3", "C5", "C6", "C7", "C8", "C10", "C11", "D1", "D2", "D4", "D5", "D7", "D8", "D9", "D11", "D12", "D14", "D15", "D16", "E1", "E2", "E4", "E5",
    "E6", "F1", "F2", "F3", "F4", "F7", "F8", "F10", "G2", "G3", "G4", "G6", "G7", "G8", "G10", "G11", "G12", "G14", "H1", "H3", "I1", "I2", "I3", "I5",
    "I7", "I8", "J1", "J2", "J4", "J6", "J7", "J9", "J10", "K1", "K2", "K4", "K5", "K7", "K8", "K9", "K10", "K11", "L1", "L3", "L4", "L5", "M2", "N1",
    "N2", "N3",
]
# fmt: on
NO_TEST = {
    "M2": "an ask, not a fault: batch-invariant iHC, which G8 shows",
    "N1": "host time of a call is a figure: `hccupy bench` measures it (host_us), and test_repeat.py holds that arrays are looked at once",
    "N2": "as N1: no DLPack capsule is made for torch, CuPy or NumPy arrays (test_import.py, test_repeat.py)",
    "N3": "as N1: the bench's record is compared with `hccupy bench --check`",
}
ONLY_ON_A_GPU = {"A4", "J2", "K8", "K9", "K11"}  # what only a device can show; its neighbours in the CPU suite say what the host answers


def rows_with_tests():
    """{row: {"cpu" or "gpu": names}} of every test function; several rows may share one."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            test = isinstance(node, ast.FunctionDef) and (node.name.startswith("test_") or path.name == "rope_field_cases.py")
            for row in re.findall(r"(?:^|_)([A-N]\d+)(?=_)", node.name) if test else ():
                found.setdefault(row, {}).setdefault("gpu" if path.name.startswith("test_gpu_") else "cpu", []).append(node.name)
    return found


def test_every_row_is_a_test_or_says_why_not():
    found = rows_with_tests()
    assert len(ROWS) == len(set(ROWS))
    assert set(ROWS) - found.keys() == NO_TEST.keys()
    assert {r for r in found if "cpu" not in found[r]} == ONLY_ON_A_GPU
    assert not found.keys() - set(ROWS), "tests named after rows that are not in the list"


# ---- rows that are not about rope, and have no better place ------------------------------------------------------


@pytest.mark.parametrize("op", checks.IHC)
def test_G2_G3_each_width_and_channel_count_has_its_own_kernel(op):
    """What is baked is what the call has, on every architecture and at every token count: nothing is picked by anything else."""
    spec = REGISTRY[op]
    for hc, hidden in ((4, 7168), (4, 2560), (4, 5120), (4, 100), (1, 4096), (2, 4096), (3, 4096), (8, 4096)):
        given = spec.make_inputs(Case("own", {"tokens": 1, "hc": hc, "hidden": hidden}, {}, "bfloat16"), np.random.default_rng(0))
        for target in arch.TABLE:
            for tokens in (1, 33, 128, 5000):
                made = plan.make(spec, bound_of(spec, given, tokens), target)
                assert (made.defines["kHc"], made.defines["kHidden"]) == (hc, hidden)


@pytest.mark.parametrize("op", ["ihc_pre", "ihc_post_pre"])
def test_G6_gates_stay_fp32(op, rng, monkeypatch):
    """16-bit x, fp32 gates: within 1e-6 of fp64, in memory as well; gates of 16 bits are refused."""
    monkeypatch.setattr(ihc_launch, "TENSOR_LEAST", 0)
    spec = REGISTRY[op]
    given = spec.make_inputs(Case("gates", {"tokens": 6, "hc": 4, "hidden": 264}, spec.cases[0].scalars, "bfloat16"), rng)
    for on in (CPU[0], SimulatedAdapter(), SimulatedAdapter(arch_name="sm_90a")):
        results = checks.call(op, given, on)
        gates, want = results[-1], oracle.ORACLES[op]({**given, "y": results[0]})[-1]
        assert gates.dtype == np.float32
        assert np.abs(gates - want).max() / np.abs(want).max() < 1e-6
    post = REGISTRY["ihc_post"].make_inputs(Case("gates", {"tokens": 6, "hc": 4, "hidden": 8}, {}, "bfloat16"), rng)
    with pytest.raises(hccupy.DtypeError, match="h_post"):
        hccupy.ihc_post(**{**post, "h_post": post["h_post"].astype(post["x"].dtype)})


def test_G7_no_step_of_accuracy_at_an_internal_switch(rng, monkeypatch):
    """Widths around the units of both kernels: chunks of 8, units of 64, a second pass of the block."""
    monkeypatch.setattr(ihc_launch, "TENSOR_LEAST", 0)
    spec = REGISTRY["ihc_head"]
    worst = {}
    for hidden in (63, 64, 65, 2056):
        given = spec.make_inputs(Case("switch", {"tokens": 3, "hc": 2, "hidden": hidden}, spec.cases[0].scalars, "float32"), rng)
        given["w"] *= np.float32(4)
        for target in ("sm_80", "sm_90a"):
            if target == "sm_90a" and hidden > 72:
                continue  # clusters of several blocks: on a GPU
            y, want = checks.call("ihc_head", given, SimulatedAdapter(arch_name=target))[0], oracle.ihc_head(given)[0]
            worst[hidden, target] = float(np.abs(y - want).max() / np.abs(want).max())
    assert max(worst.values()) < 1e-6, worst


def test_J4_a_producer_is_told_the_stream(monkeypatch):
    """CUDA memory through DLPack: the stream is named at each call, since what None means has changed; legacy is 1."""
    asked = []

    class Producer:
        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, **words):
            asked.append(words)
            raise BufferError("enough")

    for current, told in ((0, 1), (77, 77)):
        stream = SimpleNamespace(ptr=current)
        monkeypatch.setattr(dlpack_, "_cupy", lambda stream=stream: SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda index: stream)))
        with pytest.raises(hccupy.HccupyError, match="enough"):
            hccupy.ihc_post(Producer(), Producer(), Producer())
        assert asked[-1]["stream"] == told


def test_J9_memory_of_the_host_beside_cuda_arrays(monkeypatch, tmp_path):
    """Named, before anything is launched."""
    gpu = fakes.install(monkeypatch, tmp_path)
    x, residual, h_post = fakes.post()
    with pytest.raises(hccupy.DeviceError, match="h_post.*cuda:0.*cpu"):
        hccupy.ihc_post(x, residual, h_post.a)
    assert not gpu.launches and not gpu.loads
