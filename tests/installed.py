"""Run by a fresh environment's Python (make build): is what was installed whole? Needs the core dependencies only."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

import hccupy
from hccupy import build, demo  # the demo imports with the core dependencies; what it lacks it names
from hccupy.explain import plan_for

here = Path(sys.prefix).resolve()
root = Path(hccupy.__file__).resolve().parent
assert here in root.parents, f"hccupy comes from {root}, not from {here}"
assert callable(demo.run_demo) and hccupy.__version__ == metadata.version("hccupy") == "0.1.0"
assert {
    plan_for(op, sizes, arch="sm_90a").source for op, sizes in (("ihc_pre", {"hc": 4, "hidden": 6144}), ("store_kv", {"kv_heads": 8, "head_dim": 128}))
} <= set(build.sources()), "kernels are missing"
assert sum(name.startswith("common/") for name in build.sources()) > 10
kept = {str(f) for f in metadata.files("hccupy") or ()}
assert not [f for f in kept if f.startswith(("tests/", "notebooks/"))] and any(f.endswith("LICENSE") for f in kept)
y, h_post = hccupy.ihc_pre(np.ones((2, 4, 8), np.float32), np.zeros((8, 32), np.float32), np.zeros(2, np.float32), np.zeros(8, np.float32))
assert y.shape == (2, 8) and np.allclose(h_post, 1, atol=1e-5)
said = subprocess.run([here / "bin" / "hccupy", "--version"], capture_output=True, text=True, check=True).stdout
assert said == "hccupy 0.1.0\n", said
done = subprocess.run([here / "bin" / "hccupy", "demo"], capture_output=True, text=True, check=False)
assert done.returncode == 2 and "pip install" in done.stderr, done.stderr
print(f"{Path(sys.argv[1]).name}: installed and whole")
