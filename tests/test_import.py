"""`import hccupy` in a fresh process: quick, no framework, no CUDA; and the core dependencies are enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("torch", "jax", "cupy", "filelock", "platformdirs", "rich", "matplotlib", "hypothesis", "gguf", "tokenizers")

MEASURE = """
import json, sys, time
import numpy, ml_dtypes
start = time.process_time()
import hccupy
seconds = time.process_time() - start
libraries = sorted({line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/" in line})
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules), "libraries": libraries}))
"""

CALL = """
import sys
import numpy as np
import hccupy
y = hccupy.ihc_post(np.ones((2, 8), np.float32), np.ones((2, 4, 8), np.float32), np.ones((2, 4), np.float32))
assert (y == 2).all()
print(*[m for m in %r if m in sys.modules])
"""


def python(code, blocked=(), **environment):
    """Output of a fresh Python; the modules in `blocked` cannot be imported there."""
    guard = "".join(f"import sys; sys.modules[{name!r}] = None\n" for name in blocked)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", guard + code], env=env, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured():
    return [json.loads(python(MEASURE)) for _ in range(3)]


def test_time(measured, record_property):
    """CPU time beyond NumPy and ml_dtypes, the best of three: the machine may be busy."""
    seconds = min(m["seconds"] for m in measured)
    record_property("import_seconds", seconds)
    assert seconds < 0.3, f"import hccupy takes {seconds:.2f} s"


def test_no_framework_is_imported(measured):
    loaded = {name.split(".")[0] for name in measured[0]["modules"]}
    assert not loaded & set(OPTIONAL)


def test_no_cuda_library_is_mapped(measured):
    for word in ("cuda", "nvrtc", "cublas", "nvidia", "torch", "cupy"):
        assert not [name for name in measured[0]["libraries"] if word in name.lower()]


def test_a_numpy_call_imports_nothing_more():
    assert python(CALL % (OPTIONAL,)).strip() == ""


def test_core_dependencies_are_enough():
    """NumPy and ml_dtypes are all that a plain installation has."""
    assert python(CALL % ((),), blocked=OPTIONAL).strip() == ""


def test_K2_import_with_an_unwritable_home():
    """No cache directory, no terminal, no user: none of these matter to an import."""
    python("import hccupy", HOME="/proc/nobody", XDG_CACHE_HOME="/proc/nobody")


def test_import_order_does_not_matter():
    """Frameworks imported after hccupy are found."""
    pytest.importorskip("torch")
    python("""
import hccupy, numpy as np
hccupy.ihc_post(np.ones((2, 8), np.float32), np.ones((2, 4, 8), np.float32), np.ones((2, 4), np.float32))
import torch
y = hccupy.ihc_post(torch.ones(2, 8), torch.ones(2, 4, 8), torch.ones(2, 4))
assert isinstance(y, torch.Tensor) and (y == 2).all()
""")


def test_everything_public_has_a_docstring_and_exists():
    import hccupy

    assert sorted(hccupy.__all__) == sorted(set(hccupy.__all__))
    for name in hccupy.__all__:
        assert getattr(hccupy, name) is not None and (name == "__version__" or getattr(hccupy, name).__doc__)
