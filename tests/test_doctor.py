"""`hccupy doctor` on machines of every kind: it always reports, names what is wrong and what to do, and its exit status says which."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hccupy
from hccupy import arch, bundle, cache, cli, cuda, doctor, switches
from hccupy.errors import NoGpuError

ROOT = Path(__file__).resolve().parent.parent
ONE = {"cupy-cuda13x": "14.2.0", "nvidia-cuda-nvrtc": "13.5"}


class Driver:
    """libcuda with GPUs, or with an error."""

    def __init__(self, gpus=(), version=13000, code=0):
        self.gpus, self.version, self.code = gpus, version, code

    def set(self, pointer, value):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0

    def cuInit(self, flags):
        return self.code

    def cuDriverGetVersion(self, out):
        return self.set(out, self.version)

    def cuDeviceGetCount(self, out):
        return self.set(out, len(self.gpus))

    def cuDeviceGetName(self, buffer, size, index):
        buffer.value = self.gpus[index][0].encode()
        return 0

    def cuDeviceGetAttribute(self, out, attribute, index):
        return self.set(out, self.gpus[index][1][{75: 0, 76: 1}[attribute]])

    def cuGetErrorName(self, code, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        return 0

    cuGetErrorString = cuGetErrorName


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(driver, distributions, cupy error, nvrtc error) -> the report, as `examine` and as `--json` print it."""
    for name in switches.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HCCUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())

    def make(driver=None, dists=ONE, cupy=None, nvrtc=None):
        def fail(words):
            raise NoGpuError(words)

        monkeypatch.setattr(cuda, "driver", lambda: driver or fail("hccupy: no NVIDIA driver on this machine."))
        monkeypatch.setattr(doctor, "distributions", lambda: dict(dists))
        if cupy:
            monkeypatch.setattr(cuda, "cupy", lambda: fail(cupy))
        else:
            device = lambda i: __import__("contextlib").nullcontext()
            fake = SimpleNamespace(__version__="14", __file__="cupy", cuda=SimpleNamespace(Device=device), asarray=lambda a: a, asnumpy=lambda a: a)
            monkeypatch.setattr(cuda, "cupy", lambda: fake)
        if nvrtc:
            monkeypatch.setattr(cuda, "nvrtc_version", lambda: fail(nvrtc))
        monkeypatch.setattr(arch, "of_device", lambda i: arch.named("sm_90a"))
        found = doctor.examine()
        assert doctor.text(found) and json.loads(json.dumps(found)) == found
        return found

    return make


def has(found, *words, where="problems"):
    assert any(all(w in text for w in words) for text in found[where]), found[where]


pytest.importorskip("cupy", reason="NVRTC comes with CuPy: pip install hccupy[cuda13]")
H200 = ("NVIDIA H200", (9, 0))


def test_healthy_gpu_machine(machine):
    found = machine(Driver([H200, H200]))
    assert not found["problems"]
    assert found["driver"] == {"cuda": "13.0", "gpus": [{"name": "NVIDIA H200", "capability": "9.0"}] * 2}
    assert found["compile"]["works"] and found["compile"]["architecture"] == "sm_90a" and found["compile"]["seconds"] < 60
    assert [launch["works"] for launch in found["launch"]] == [True, True]
    assert found["nvrtc"]["version"] and 90 in found["nvrtc"]["architectures"]
    assert found["cache"]["usable"] and found["cache"]["mode"] == "0o700" and found["cache"]["owner"]
    text = doctor.text(found)
    for word in ("NVIDIA H200, compute capability 9.0", "CUDA 13.0", "trial compile  works True", "trial launch   gpu 1", "Everything is in order."):
        assert word in text, word


def test_no_gpu_is_no_fault(machine):
    found = machine()
    assert not found["problems"] and found["launch"] == []
    has(found, "no GPU on this machine", "no fault", where="notes")
    found = machine(Driver(code=100))
    assert not found["problems"]
    has(found, "sees no GPU", where="notes")


def test_plain_installation(machine):
    """Neither CuPy nor a GPU: the NumPy path, said so."""
    found = machine(dists={}, cupy="hccupy: CUDA arrays need CuPy")
    assert not found["problems"] and not found["compile"]
    has(found, "CuPy is not installed", "pip install 'hccupy[cuda13]'", where="notes")


def test_gpu_without_cupy(machine):
    has(machine(Driver([H200]), dists={}, cupy="hccupy: CUDA arrays need CuPy"), "There is a GPU and no CuPy", "pip install 'hccupy[cuda13]'")


def test_broken_cupy(machine):
    found = machine(Driver([H200]), cupy="hccupy: CUDA arrays need CuPy, which did not import (ImportError: libcudart.so.13)")
    has(found, "libcudart.so.13", "pip uninstall -y cupy-cuda13x")


def test_two_cupys(machine):
    found = machine(Driver([H200]), dists={"cupy-cuda12x": "14", "cupy-cuda13x": "14", "cupy-xarray": "1"})
    has(found, "2 CuPys", "pip uninstall -y cupy-cuda12x cupy-cuda13x", "hccupy[cuda13]")


def test_cupy_newer_than_the_driver(machine):
    has(machine(Driver([H200], version=12040)), "cupy-cuda13x needs a CUDA 13 driver, here is 12.4", "hccupy[cuda12]")


def test_missing_nvrtc(machine):
    found = machine(Driver([H200]), nvrtc="hccupy: no NVRTC was found. Install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12.")
    has(found, "Install nvidia-cuda-nvrtc")
    assert not found["nvrtc"] and not found["compile"]


def test_driver_that_does_not_start(machine):
    has(machine(Driver(code=803)), "cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "803", "Reinstall the NVIDIA driver")


def test_container_without_the_driver(machine, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    has(machine(), "start the container with GPUs")


def test_missing_headers_are_a_note(machine, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: False)

    def none(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "files", none)
    found = machine(Driver([H200]))
    assert not found["problems"] and found["headers"] == ""
    has(found, "hccupy needs none", "pip install nvidia-cuda-runtime", where="notes")


def test_cache_that_cannot_be_used(machine, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    found = machine(Driver([H200]))
    assert not found["cache"]["usable"] and found["cache"]["mode"] == "0o777"
    has(found, str(tmp_path / "cache"), "chmod 700", "HCCUPY_CACHE_DIR")


def test_missing_platformdirs(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    real = os.environ.get
    monkeypatch.setattr(os.environ, "get", lambda name, *d: None if name == "HCCUPY_CACHE_DIR" else real(name, *d))
    has(machine(Driver([H200])), "platformdirs", "hccupy[cuda13]")


def test_failing_trial_compile(machine, monkeypatch):
    def fail(plan):
        raise hccupy.CompileError("ihc_post: kernels/ihc_post.cu did not compile")

    monkeypatch.setattr(doctor.build, "compile_plan", fail)
    found = machine(Driver([H200]))
    has(found, "trial compile failed", "did not compile")
    assert found["compile"] == {"works": False}


@pytest.mark.parametrize("result, words", [(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"), "ILLEGAL_ADDRESS"), (1e-3, "off by 0.001")])
def test_failing_trial_launch(machine, monkeypatch, result, words):
    real = hccupy.api.ihc_post
    calls = []

    def post(*given):
        calls.append(1)
        if len(calls) == 1:  # the NumPy side
            return real(*given)
        if isinstance(result, Exception):
            raise result
        return real(*given) + np.float32(result)

    monkeypatch.setattr(hccupy.api, "ihc_post", post)
    found = machine(Driver([H200]))
    has(found, "GPU 0 (NVIDIA H200)", words)
    assert not found["launch"][0]["works"]


def test_bundles_and_switches(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("HCCUPY_NO_JIT", "1")
    monkeypatch.setenv("HCCUPY_DEBUGG", "1")
    found = machine()
    has(found, "HCCUPY_KERNEL_BUNDLE", "hccupy build")
    has(found, "HCCUPY_DEBUGG is set", "no such switch", where="notes")
    assert found["switches"]["HCCUPY_NO_JIT"] == "1" and "HCCUPY_DEBUGG" not in found["switches"]
    monkeypatch.setenv("HCCUPY_KERNEL_BUNDLE", str(tmp_path / "bundle"))
    has(machine(), str(tmp_path / "bundle"), "is not used")
    bundle.write(tmp_path / "bundle", [], doctor.build.sources_digest().hex(), "13.5")
    found = machine(nvrtc="hccupy: no NVRTC was found.")
    assert not found["problems"] and found["bundle"] == {
        "directory": str(tmp_path / "bundle"),
        "usable": True,
        "kernels": 0,
        "architectures": [],
        "nvrtc": "13.5",
    }


def test_distributions_are_found():
    found = doctor.distributions()
    assert any(n.startswith("cupy") for n in found) and any(n.startswith("nvidia-") for n in found)
    assert list(found) == sorted(found)


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problems, status", [([], 0), (["The driver is gone. Install it."], 1)])
def test_exit_status(monkeypatch, capsys, problems, status):
    real = doctor.examine()
    monkeypatch.setattr(doctor, "examine", lambda: {**real, "problems": problems})
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["doctor", *words])
        assert stopped.value.code == status
    out = capsys.readouterr().out
    assert "PROBLEM        The driver is gone. Install it." in out or not problems


@pytest.mark.parametrize("block", [(), ("cupy",), ("cupy", "platformdirs", "filelock", "rich", "torch", "jax")])
def test_in_a_fresh_process(block, tmp_path):
    """The real thing on this machine, with modules missing as well: a report and no traceback."""
    guard = "".join(f"sys.modules[{name!r}] = None; " for name in block)
    code = f"import sys; {guard}from hccupy import cli; cli.main(['doctor', '--json'])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HCCUPY_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.returncode == (1 if block else 0), done
    found = json.loads(done.stdout)
    assert bool(found["problems"]) == bool(block) and found["versions"]["hccupy"] == hccupy.__version__
