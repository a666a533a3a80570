"""The committed notebooks are those of their sources, with outputs. (make test also executes them.)"""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from .pages import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks are read with nbformat: pip install 'hccupy[dev]'")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RESULTS = ROOT / "notebooks" / "results" / "h200"


def outputs(path):
    """(text, number of pictures) of all outputs."""
    cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    said = "".join(o.get("text", "") for c in cells for o in c.outputs)
    return said, sum("image/png" in o.get("data", {}) for c in cells for o in c.outputs)


def test_there_are_four():
    assert [p.stem for p in NOTEBOOKS] == ["01_quickstart", "02_ihc_formula_to_kernel", "03_rope_paged_kv", "04_benchmarks"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_are_the_sources(path):
    found = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
    execute = importlib.util.module_from_spec(found)
    found.loader.exec_module(execute)
    cells = [[(c.cell_type, c.source) for c in nb.cells] for nb in (nbformat.read(path, 4), execute.source(path.with_suffix(".py")))]
    assert cells[0] == cells[1], "make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_there_and_say_nothing_of_a_machine(path):
    notebook = nbformat.read(path, 4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert not [o for c in code for o in c.outputs if o.output_type == "error"]
    said, pictures = outputs(path)
    assert said and pictures
    assert not re.search(r"(^|[\s\"'(])/(?!\s)\w+/", said), said


def test_the_benchmarks_are_the_committed_report():
    bench = json.loads((RESULTS / "bench.json").read_text())
    said, pictures = outputs(ROOT / "notebooks" / "04_benchmarks.ipynb")
    assert f"{bench['gpu']} {bench['date']} commit {bench['commit'][:9]}" in said and pictures == 8, "make notebooks"
