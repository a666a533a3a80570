"""Shared fixtures: random numbers seeded by the test's own id, frameworks by name, and the GPU report."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from hccupy import build
from hccupy.provenance import record

from . import report

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take three quarters of the GPU from the others
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def rng(request):
    """A generator that depends on the test's id only, so that order does not matter."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


def pytest_terminal_summary(terminalreporter):
    """The resource table of the NVRTC builds, gathered from every worker."""
    rows = [v for r in terminalreporter.stats.get("passed", []) for k, v in r.user_properties if k == "kernel"]
    if rows:
        from .test_build import table

        for line in table(rows):
            terminalreporter.write_line(line)


compiled = []  # (op, variant, seconds) of every worker's cold compiles


def compile_times():
    """Median and worst seconds of the session's cold compiles, by op."""
    by_op = {}
    for op, _, seconds in compiled + build.compiled:
        by_op.setdefault(op, []).append(seconds)
    return {op: {"count": len(s), "median": round(float(np.median(s)), 3), "worst": round(max(s), 3)} for op, s in sorted(by_op.items())}


class Gather:
    """Under xdist, the controller's ear for what the workers measured."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        output = getattr(node, "workeroutput", {})
        report.merge(output.get("worst", []))
        compiled.extend(tuple(c) for c in output.get("compiled", []))


def pytest_configure(config):
    config.pluginmanager.register(Gather())


def pytest_sessionfinish(session, exitstatus):
    """With -m gpu: write notebooks/results/<gpu>/tests.json (GPU_REPORT names another place)."""
    if session.config.getoption("-m") != "gpu" or session.config.option.collectonly:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput.update(worst=report.rows(), compiled=build.compiled)
        return
    import cupy

    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    counts = {k: len(terminal.stats.get(k, [])) for k in ("passed", "failed", "error", "skipped")}
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    word = "h200" if "H200" in name else name.lower().replace(" ", "-")
    path = Path(os.environ.get("GPU_REPORT") or ROOT / "notebooks" / "results" / word / "tests.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {**record(name), "counts": counts, "exit": int(exitstatus), "cold_compile_s": compile_times()}
    path.write_text(json.dumps({**head, "worst": report.rows()}, indent=1) + "\n")
