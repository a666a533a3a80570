"""docs/add-an-op.md, followed to the letter in a copy of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from .pages import ROOT, blocks, commands

PAGE = ROOT / "docs" / "add-an-op.md"
VERBS = {"Write": "w", "Add to": "a"}  # how the line before a block says what is to be done with it


def place(block):
    """(mode, file) of a block that is to be written, or None."""
    for verb, mode in VERBS.items():
        if block.before.startswith(f"{verb} `") and block.before.endswith("`:"):
            return mode, block.before.split("`")[1]
    return None


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository's code with the files of the page in it."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("hccupy", "kernels", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for block in blocks(PAGE):
        if place(block):
            mode, path = place(block)
            with (root / path).open(mode) as file:
                file.write(f"\n\n{block.text}" if mode == "a" else block.text)
    return root


def run(copy, words, expected=0, **environment):
    """Run a command in the copy."""
    env = {**os.environ, "PYTHONPATH": str(copy), "HCCUPY_CACHE_DIR": str(copy / "cache"), **environment}
    done = subprocess.run(words, cwd=copy, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == expected, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def test_an_op_is_a_kernel_a_spec_and_a_line():
    written = [place(b) for b in blocks(PAGE) if place(b)]
    assert written == [("w", "kernels/scale_rows.cu"), ("w", "hccupy/ops/scale_rows.py"), ("a", "hccupy/api.py")]
    assert [b.text.count("\n") for b in blocks(PAGE) if place(b)][2] == 1


def test_the_copy_is_in_good_style(copy):
    """ruff and the kernels' order of parameters are the project's own."""
    run(copy, [sys.executable, "-m", "ruff", "check", "hccupy"])
    run(copy, [sys.executable, "-m", "ruff", "format", "--check", "hccupy"])


def test_the_calls_of_the_page(copy):
    """NumPy path, torch op, supports, errors; and the bench knows the op, though it times nothing without a GPU."""
    calls = "\n".join(b.text for b in blocks(PAGE) if b.language == "python" and not place(b))
    bench = "from hccupy.bench import run\nfrom hccupy.ops import REGISTRY\nspec = REGISTRY['scale_rows']\n"
    bench += "print([run.facts_of(spec, c, run.imagined(spec, c))['case'] for c in spec.cases if c.name.startswith('bench')])\n"
    bench += "from hccupy.tables import op_table\nprint(op_table())\nassert 'scale_rows' in __import__('hccupy').__all__\n"
    said = run(copy, [sys.executable, "-c", calls + bench])
    assert "a row a block of 256 threads" in said and "scale_rows: scale" in said
    assert "['bench-1', 'bench-256', 'bench-16384']" in said and "| `scale_rows` | Multiply every row" in said


def test_the_commands_of_the_page(copy):
    """Plan, compiled kernel, and the project's own tests of the op: NVRTC builds and the simulated kernel among them."""
    said = ""
    for line in (line for b in blocks(PAGE) if b.language == "bash" for line in commands(b.text)):
        assert line.startswith("python -m ")
        said += run(copy, [sys.executable, *line.split()[1:], *(["-p", "no:cacheprovider"] if "pytest" in line else [])])
    assert "scale_rows on sm_90a: variant portable, kernels/scale_rows.cu" in said
    assert "kernels for sm_90a ready" in said and " passed" in said and "failed" not in said
    assert "scale_rows portable sm_120a" in said, "no NVRTC build"
